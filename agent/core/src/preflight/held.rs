//! Whether the GPUs that a job worked on are free again after its ranks are gone: the driver gives memory back some time
//! after the process is, and what a rank started may hold a device that the next rank needs.

use std::collections::{BTreeMap, BTreeSet};

use crate::device::GpuReading;
use crate::id::{JobId, Pid};
use crate::pci::PciAddress;
use crate::preflight::{Freedom, free};
use crate::settings::Bytes;

/// What was seen of a GPU while a job worked on it.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// The job's ranks that were on it.
    ours: BTreeSet<Pid>,
    /// Who else was there.
    neighbours: BTreeSet<Pid>,
    /// Whether it told how much of its memory is in use.
    told: bool,
}

/// On which GPUs the processes of each job were last seen, and who else was there.
#[derive(Clone, Debug, Default)]
pub struct GpuUse {
    jobs: BTreeMap<JobId, BTreeMap<PciAddress, Seen>>,
}

impl GpuUse {
    /// Takes in a reading that was made while the job's processes `ours` worked. One in which none of them is on any GPU
    /// leaves all as it was: they are on their way.
    pub fn see(&mut self, job: &JobId, ours: &BTreeSet<Pid>, gpus: &[GpuReading]) {
        let seen: BTreeMap<PciAddress, Seen> = gpus.iter().filter_map(|gpu| seen_on(gpu, ours)).collect();
        if !seen.is_empty() {
            self.jobs.insert(job.clone(), seen);
        }
    }

    /// Whether the job was seen on a GPU that nobody of those works on who stay.
    pub fn is_left(&self, job: &JobId, staying: &BTreeSet<Pid>) -> bool {
        let mut gpus = self.jobs.get(job).into_iter().flat_map(BTreeMap::values);
        gpus.any(|gpu| gpu.ours.is_disjoint(staying))
    }

    /// The job is over.
    pub fn forget(&mut self, job: &JobId) {
        self.jobs.remove(job);
    }

    /// Which of the job's GPUs are not free, by a reading made after its ranks were gone, but for those `staying` in their
    /// processes; a sentence each. Neighbours that were there before may stay. A GPU that told before what is in use and does
    /// not tell now is not known to be free; one that never told is in nobody's way.
    pub fn held(
        &self,
        job: &JobId,
        gpus: &[GpuReading],
        allowed: Bytes,
        staying: &BTreeSet<Pid>,
    ) -> Vec<String> {
        let Some(used) = self.jobs.get(job) else { return Vec::new() };
        let held = gpus.iter().filter_map(|gpu| {
            let address = gpu.identity.as_ref()?.address;
            let seen = used.get(&address).filter(|seen| seen.ours.is_disjoint(staying))?;
            match free(gpu, &seen.neighbours, allowed).0 {
                Freedom::Held(why) => Some(format!("gpu.{address}: {why}")),
                Freedom::Unknown(why) if seen.told => {
                    Some(format!("gpu.{address}: whether it is free is not known: {why}"))
                }
                Freedom::Free | Freedom::Unknown(_) => None,
            }
        });
        held.collect()
    }
}

fn seen_on(gpu: &GpuReading, ours: &BTreeSet<Pid>) -> Option<(PciAddress, Seen)> {
    let there: BTreeSet<Pid> = gpu.processes.value()?.iter().map(|process| process.pid).collect();
    let seen = Seen {
        ours: there.intersection(ours).copied().collect(),
        neighbours: there.difference(ours).copied().collect(),
        told: gpu.memory.value().is_some(),
    };
    (!seen.ours.is_empty()).then_some((gpu.identity.as_ref()?.address, seen))
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
        let held = |gpus: &[GpuReading]| used.held(&job, gpus, ALLOWED, &BTreeSet::new());
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
        let nobody = BTreeSet::new();
        assert!(used.is_left(&job, &nobody) && !used.is_left(&other, &nobody));
        assert_eq!(used.held(&job, &[gpu(1, &[99], 5 << 30)], ALLOWED, &nobody), Vec::<String>::new());
        assert_eq!(used.held(&other, &[gpu(1, &[7], 9 << 30)], ALLOWED, &nobody), Vec::<String>::new());
        used.forget(&job);
        assert!(!used.is_left(&job, &nobody));
    }

    #[test]
    fn ranks_that_stay_keep_what_they_hold_and_the_gpu_of_a_lost_one_has_to_be_free() {
        let job = JobId("a".into());
        let mut used = GpuUse::default();
        used.see(&job, &[Pid(7), Pid(8)].into(), &[gpu(1, &[7], 9 << 30), gpu(2, &[8], 9 << 30)]);
        let held = |gpus: &[GpuReading], staying| used.held(&job, gpus, ALLOWED, &staying);
        let memory_only = [gpu(1, &[7], 9 << 30), gpu(2, &[], 9 << 30)];
        let told = held(&memory_only, [Pid(7)].into());
        assert!(told.len() == 1 && told[0].starts_with("gpu.0000:02:00"), "{told:?}");
        let orphan = held(&[gpu(1, &[7], 9 << 30), gpu(2, &[21], 1 << 20)], [Pid(7)].into());
        assert_eq!(orphan, ["gpu.0000:02:00: in use by process 21"]);
        assert_eq!(held(&[gpu(1, &[7], 9 << 30), gpu(2, &[], 0)], [Pid(7)].into()), Vec::<String>::new());
        assert_eq!(held(&memory_only, [Pid(7), Pid(8)].into()), Vec::<String>::new());
        // Nobody need ask the driver for what nobody left.
        assert!(!used.is_left(&job, &[Pid(7), Pid(8)].into()) && used.is_left(&job, &[Pid(7)].into()));
    }

    #[test]
    fn a_gpu_that_no_longer_tells_is_not_free_and_one_that_never_told_is_in_nobodys_way() {
        let (job, nobody) = (JobId("a".into()), BTreeSet::new());
        let mute = |processes: &[i32]| GpuReading { memory: Read::NotOffered, ..gpu(1, processes, 0) };
        let mut used = GpuUse::default();
        used.see(&job, &[Pid(7)].into(), &[gpu(1, &[7], 9 << 30)]);
        let told = used.held(&job, &[mute(&[])], ALLOWED, &nobody);
        assert!(told.len() == 1 && told[0].contains("whether it is free is not known"), "{told:?}");
        used.see(&job, &[Pid(7)].into(), &[mute(&[7])]);
        assert_eq!(used.held(&job, &[mute(&[])], ALLOWED, &nobody), Vec::<String>::new());
    }

    #[test]
    fn a_gpu_that_the_job_has_left_for_another_is_no_more_its_concern() {
        let (job, nobody) = (JobId("a".into()), BTreeSet::new());
        let mut used = GpuUse::default();
        used.see(&job, &[Pid(7)].into(), &[gpu(1, &[7], 9 << 30), gpu(2, &[], 0)]);
        used.see(&job, &[Pid(8)].into(), &[gpu(1, &[], 9 << 30), gpu(2, &[], 0)]);
        assert!(
            !used.held(&job, &[gpu(1, &[], 9 << 30)], ALLOWED, &nobody).is_empty(),
            "the next is on its way"
        );
        used.see(&job, &[Pid(8)].into(), &[gpu(1, &[], 9 << 30), gpu(2, &[8], 9 << 30)]);
        assert_eq!(
            used.held(&job, &[gpu(1, &[], 9 << 30), gpu(2, &[], 0)], ALLOWED, &nobody),
            Vec::<String>::new()
        );
    }
}
