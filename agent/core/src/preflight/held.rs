//! Whether the GPUs that a job worked on are free again after its ranks are gone: the driver gives memory back some time
//! after the process is, and what a rank started may hold a device that the next rank needs.

use std::collections::{BTreeMap, BTreeSet};

use crate::device::GpuReading;
use crate::id::{JobId, Pid};
use crate::pci::PciAddress;
use crate::preflight::{Freedom, free};
use crate::settings::Bytes;

/// On which GPUs the processes of each job were seen, and who else was there.
#[derive(Clone, Debug, Default)]
pub struct GpuUse {
    jobs: BTreeMap<JobId, BTreeMap<PciAddress, BTreeSet<Pid>>>,
}

impl GpuUse {
    /// Takes in a reading that was made while the job's processes `ours` worked.
    pub fn see(&mut self, job: &JobId, ours: &BTreeSet<Pid>, gpus: &[GpuReading]) {
        for gpu in gpus {
            let (Some(identity), Some(processes)) = (&gpu.identity, gpu.processes.value()) else { continue };
            let there: BTreeSet<Pid> = processes.iter().map(|process| process.pid).collect();
            if !there.is_disjoint(ours) {
                let neighbours = there.difference(ours).copied().collect();
                self.jobs.entry(job.clone()).or_default().insert(identity.address, neighbours);
            }
        }
    }

    /// Whether the job was seen on a GPU.
    pub fn is_known(&self, job: &JobId) -> bool {
        self.jobs.contains_key(job)
    }

    /// The job is over.
    pub fn forget(&mut self, job: &JobId) {
        self.jobs.remove(job);
    }

    /// Which of the job's GPUs are not free, by a reading made after its ranks were gone; a sentence each. Neighbours that
    /// were there before may stay. Of a GPU that does not tell, nothing is held.
    pub fn held(&self, job: &JobId, gpus: &[GpuReading], allowed: Bytes) -> Vec<String> {
        let Some(used) = self.jobs.get(job) else { return Vec::new() };
        let held = gpus.iter().filter_map(|gpu| {
            let address = gpu.identity.as_ref()?.address;
            match free(gpu, used.get(&address)?, allowed).0 {
                Freedom::Held(why) => Some(format!("gpu.{address}: {why}")),
                Freedom::Free | Freedom::Unknown(_) => None,
            }
        });
        held.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{GpuIdentity, GpuProcess, Read};

    const ALLOWED: Bytes = Bytes(512 << 20);

    fn gpu(bus: u8, processes: &[i32], used: u64) -> GpuReading {
        let text = format!("00000000:{bus:02X}:00.0");
        let address = PciAddress::parse(&text).unwrap_or_else(|| panic!("{text} is an address"));
        GpuReading {
            index: u32::from(bus),
            identity: Some(GpuIdentity { address, uuid: String::new(), name: String::new(), serial: None }),
            processes: Read::Value(
                processes.iter().map(|pid| GpuProcess { pid: Pid(*pid), memory: None }).collect(),
            ),
            memory: Read::Value((used, 80 << 30)),
            ..GpuReading::default()
        }
    }

    #[test]
    fn a_gpu_is_free_when_the_jobs_processes_and_their_memory_are_gone() {
        let job = JobId("a".into());
        let mut used = GpuUse::default();
        used.see(&job, &[Pid(7)].into(), &[gpu(1, &[7], 9 << 30), gpu(2, &[8], 9 << 30)]);
        let held = |gpus: &[GpuReading]| used.held(&job, gpus, ALLOWED);
        assert_eq!(held(&[gpu(1, &[7], 9 << 30)]), ["gpu.0000:01:00: in use by process 7"]);
        assert!(held(&[gpu(1, &[], 9 << 30)])[0].contains("though no process is to be seen"));
        assert_eq!(held(&[gpu(1, &[], 9 << 20), gpu(2, &[8], 9 << 30)]), Vec::<String>::new());
    }

    #[test]
    fn neighbours_and_jobs_without_gpus_are_left_alone() {
        let (job, other) = (JobId("a".into()), JobId("b".into()));
        let mut used = GpuUse::default();
        used.see(&job, &[Pid(7)].into(), &[gpu(1, &[7, 99], 9 << 30)]);
        used.see(&other, &[Pid(5)].into(), &[gpu(1, &[7, 99], 9 << 30)]);
        assert!(used.is_known(&job) && !used.is_known(&other));
        assert_eq!(used.held(&job, &[gpu(1, &[99], 5 << 30)], ALLOWED), Vec::<String>::new());
        assert_eq!(used.held(&other, &[gpu(1, &[7], 9 << 30)], ALLOWED), Vec::<String>::new());
        used.forget(&job);
        assert!(!used.is_known(&job));
    }
}
