//! Whether a job's GPUs are free again after its ranks ended: the driver releases memory some time after the process
//! ended, and a process that a rank started may hold a device that the next rank needs.

use std::collections::{BTreeMap, BTreeSet};

use crate::hardware::gpu::GpuReading;
use crate::host::preflight::{GpuAvailability, free};
use mainstay_model::component_id::ComponentId;
use mainstay_model::id::{JobId, Pid};
use mainstay_model::pci::PciAddress;
use mainstay_model::units::Bytes;

/// The owner of each process of a job on a GPU: the rank that it is or descends from, or the launcher if that rank is
/// gone or unknown.
pub type Owners = BTreeMap<Pid, Pid>;

/// What was seen on a GPU while a job ran on it.
#[derive(Clone, Debug, Default)]
struct GpuUsers {
    /// The owners of the job's processes on it.
    owners: BTreeSet<Pid>,
    /// The job's processes on it: ranks, and what they started.
    ours: BTreeSet<Pid>,
    /// Other processes on it.
    neighbours: BTreeSet<Pid>,
    /// Whether the GPU reported its used memory.
    reports_memory: bool,
}

/// The GPUs on which each job's processes were last seen, and the other processes there.
#[derive(Clone, Debug, Default)]
pub struct GpuUse {
    jobs: BTreeMap<JobId, BTreeMap<PciAddress, GpuUsers>>,
    /// GPUs that a job no longer uses.
    excluded: BTreeMap<JobId, BTreeSet<PciAddress>>,
}

impl GpuUse {
    /// Processes a reading made while the job's ranks ran, with the owners of its processes. A reading without any of
    /// them on a GPU changes nothing: they are still starting.
    pub fn see(&mut self, job: &JobId, owners: &Owners, gpus: &[GpuReading]) {
        let users: BTreeMap<PciAddress, GpuUsers> =
            gpus.iter().filter_map(|gpu| users_on(gpu, owners)).collect();
        if !users.is_empty() {
            self.jobs.insert(job.clone(), users);
        }
    }

    /// Whether a process of the job has left one of its GPUs: not all owners on it are in `staying`.
    pub fn is_left(&self, job: &JobId, staying: &BTreeSet<Pid>) -> bool {
        let mut gpus = self.jobs.get(job).into_iter().flat_map(BTreeMap::values);
        gpus.any(|gpu| !gpu.owners.is_subset(staying))
    }

    /// The job no longer uses the GPUs that this rank had for itself, so their faults do not concern the job.
    pub fn exclude(&mut self, job: &JobId, rank: Pid) {
        let gpus = self.jobs.get(job).into_iter().flatten();
        let alone =
            gpus.filter(|(_, users)| users.owners == BTreeSet::from([rank])).map(|(address, _)| *address);
        self.excluded.entry(job.clone()).or_default().extend(alone);
    }

    /// Whether the component is a GPU that the job no longer uses.
    pub fn is_excluded(&self, job: &JobId, component: &str) -> bool {
        let ComponentId::Gpu(address) = ComponentId::parse(component) else { return false };
        self.excluded.get(job).is_some_and(|excluded| excluded.contains(&address))
    }

    /// The GPUs on which the job was seen, if all its `ranks` were: faults of other GPUs do not concern this job.
    pub fn of_job(&self, job: &JobId, ranks: &BTreeSet<Pid>) -> Option<BTreeSet<PciAddress>> {
        let own = self.jobs.get(job)?;
        let placed: BTreeSet<Pid> = own.values().flat_map(|users| &users.owners).copied().collect();
        (!ranks.is_empty() && ranks.is_subset(&placed)).then(|| own.keys().copied().collect())
    }

    /// Forgets a job that is over.
    pub fn forget(&mut self, job: &JobId) {
        self.jobs.remove(job);
        self.excluded.remove(job);
    }

    /// Returns a sentence for each of the job's GPUs that is not free. The reading was made after all ranks except
    /// those in `staying` ended. Ranks that stay, their descendants, and neighbours from before may remain on a GPU
    /// that another rank has left; other processes of the job may not. A GPU that no longer reports its memory counts
    /// as not free; one that never did is ignored.
    pub fn not_free(
        &self,
        job: &JobId,
        gpus: &[GpuReading],
        owners: &Owners,
        allowed: Bytes,
        staying: &BTreeSet<Pid>,
    ) -> Vec<String> {
        let Some(used) = self.jobs.get(job) else { return Vec::new() };
        let excluded = self.excluded.get(job);
        let of_those_who_stay = owners.iter().filter(|(_, owner)| staying.contains(owner));
        let of_those_who_stay: BTreeSet<Pid> = of_those_who_stay.map(|(pid, _)| *pid).collect();
        let held = gpus.iter().filter_map(|gpu| {
            let address = gpu.identity.as_ref()?.address;
            let users = used.get(&address).filter(|users| !users.owners.is_subset(staying))?;
            if excluded.is_some_and(|excluded| excluded.contains(&address)) {
                return None;
            }
            let may_stay = &users.neighbours | &of_those_who_stay;
            match free(gpu, &may_stay, allowed).0 {
                GpuAvailability::Held(why) => Some(format!(
                    "{}: {why}{}",
                    ComponentId::Gpu(address),
                    left_by_us(gpu, users, owners, &may_stay)
                )),
                GpuAvailability::Unknown(why) if users.reports_memory => {
                    Some(format!("{}: whether it is free is unknown: {why}", ComponentId::Gpu(address)))
                }
                GpuAvailability::Free | GpuAvailability::Unknown(_) => None,
            }
        });
        held.collect()
    }
}

fn users_on(gpu: &GpuReading, owners: &Owners) -> Option<(PciAddress, GpuUsers)> {
    let there = || gpu.processes.value().into_iter().flatten().map(|process| process.pid);
    let users = GpuUsers {
        owners: there().filter_map(|pid| owners.get(&pid).copied()).collect(),
        ours: there().filter(|pid| owners.contains_key(pid)).collect(),
        neighbours: there().filter(|pid| !owners.contains_key(pid)).collect(),
        reports_memory: gpu.memory.value().is_some(),
    };
    (!users.ours.is_empty()).then_some((gpu.identity.as_ref()?.address, users))
}

/// The processes on the GPU that the job itself left behind, as text.
fn left_by_us(gpu: &GpuReading, users: &GpuUsers, owners: &Owners, may_stay: &BTreeSet<Pid>) -> String {
    let there = gpu.processes.value().into_iter().flatten().map(|process| process.pid);
    let ours = there.filter(|pid| users.ours.contains(pid) || owners.contains_key(pid));
    let ours: Vec<String> = ours.filter(|pid| !may_stay.contains(pid)).map(|pid| pid.0.to_string()).collect();
    if ours.is_empty() { String::new() } else { format!(" (left by this job: {})", ours.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::gpu::{GpuIdentity, GpuProcess, Sampled};

    const ALLOWED: Bytes = Bytes(512 << 20);

    fn gpu(bus: u8, processes: &[i32], used: u64) -> GpuReading {
        let text = format!("00000000:{bus:02X}:00.0");
        let address = PciAddress::parse(&text).unwrap_or_else(|| panic!("{text} is an address"));
        GpuReading {
            index: u32::from(bus),
            identity: Some(GpuIdentity { address, uuid: String::new(), name: String::new(), serial: None }),
            processes: Sampled::Value(
                processes.iter().map(|pid| GpuProcess { pid: Pid(*pid), memory: None }).collect(),
            ),
            memory: Sampled::Value((used, 80 << 30)),
            ..GpuReading::default()
        }
    }

    /// Ranks that use GPUs themselves.
    fn ranks(pids: &[i32]) -> Owners {
        pids.iter().map(|pid| (Pid(*pid), Pid(*pid))).collect()
    }

    #[test]
    fn a_gpu_is_free_when_the_jobs_processes_and_their_memory_are_gone() {
        let job = JobId("a".into());
        let mut used = GpuUse::default();
        used.see(&job, &ranks(&[7]), &[gpu(1, &[7], 9 << 30), gpu(2, &[8], 9 << 30)]);
        let held = |gpus: &[GpuReading]| used.not_free(&job, gpus, &Owners::new(), ALLOWED, &BTreeSet::new());
        testing::snapshot!(
            "reasons",
            "gpu_use: a process of the job stays",
            held(&[gpu(1, &[7], 9 << 30)]).join("\n")
        );
        testing::snapshot!(
            "reasons",
            "gpu_use: a gpu is free when the jobs processes and their memory are gone",
            held(&[gpu(1, &[], 9 << 30)])[0]
        );
        assert_eq!(held(&[gpu(1, &[], 9 << 20), gpu(2, &[8], 9 << 30)]), Vec::<String>::new());
    }

    #[test]
    fn neighbours_and_jobs_without_gpus_are_left_alone() {
        let (job, other) = (JobId("a".into()), JobId("b".into()));
        let mut used = GpuUse::default();
        used.see(&job, &ranks(&[7]), &[gpu(1, &[7, 99], 9 << 30)]);
        used.see(&other, &ranks(&[5]), &[gpu(1, &[7, 99], 9 << 30)]);
        let no_one = BTreeSet::new();
        assert!(used.is_left(&job, &no_one) && !used.is_left(&other, &no_one));
        let held = |job, gpu| used.not_free(job, &[gpu], &Owners::new(), ALLOWED, &no_one);
        assert_eq!(held(&job, gpu(1, &[99], 5 << 30)), Vec::<String>::new());
        assert_eq!(held(&other, gpu(1, &[7], 9 << 30)), Vec::<String>::new());
        let stranger = held(&job, gpu(1, &[99, 100], 5 << 30));
        testing::snapshot!(
            "reasons",
            "gpu_use: neighbours and jobs without gpus are left alone",
            stranger.join("\n")
        );
        used.forget(&job);
        assert!(!used.is_left(&job, &no_one));
    }

    #[test]
    fn the_gpus_of_a_job_are_known_once_all_its_ranks_are_placed() {
        let (job, other) = (JobId("a".into()), JobId("b".into()));
        let all = [gpu(1, &[7], 0), gpu(2, &[8, 5], 0), gpu(3, &[5], 0)];
        let of_job = |used: &GpuUse, ranks: &[i32]| {
            let ranks = ranks.iter().map(|pid| Pid(*pid)).collect();
            let gpus = used.of_job(&job, &ranks)?;
            Some(gpus.iter().map(PciAddress::to_string).collect::<Vec<_>>())
        };
        let mut used = GpuUse::default();
        assert_eq!(of_job(&used, &[7, 8]), None);
        used.see(&job, &ranks(&[7, 8]), &all);
        used.see(&other, &ranks(&[5]), &all);
        let known = Some(vec!["0000:01:00".to_owned(), "0000:02:00".to_owned()]);
        assert_eq!(of_job(&used, &[7, 8]), known);
        assert_eq!(of_job(&used, &[7, 8, 9]), None, "where the third rank is is not known");
        assert_eq!(of_job(&used, &[]), None);
        used.forget(&job);
        assert_eq!(of_job(&used, &[7, 8]), None);
    }

    #[test]
    fn processes_started_by_a_rank_must_end_with_it() {
        let (job, no_one) = (JobId("a".into()), BTreeSet::new());
        // 7 is a rank; 71 and 72 descend from it, and only 72 computes on the second GPU.
        let owners = Owners::from([(Pid(7), Pid(7)), (Pid(71), Pid(7)), (Pid(72), Pid(7))]);
        let mut used = GpuUse::default();
        used.see(&job, &owners, &[gpu(1, &[7, 71], 9 << 30), gpu(2, &[72], 9 << 30)]);
        let held = |gpus: &[GpuReading], staying| used.not_free(&job, gpus, &Owners::new(), ALLOWED, staying);
        let not_free = held(&[gpu(1, &[71], 1 << 20), gpu(2, &[72], 1 << 20)], &no_one);
        testing::snapshot!(
            "reasons",
            "gpu_use: processes started by a rank must end with it",
            not_free.join("\n")
        );
        assert_eq!(held(&[gpu(1, &[], 0), gpu(2, &[], 0)], &no_one), Vec::<String>::new());
        // It may stay with a rank that stays.
        assert!(!used.is_left(&job, &[Pid(7)].into()));
        assert_eq!(held(&[gpu(1, &[7, 71], 9 << 30)], &[Pid(7)].into()), Vec::<String>::new());
    }

    #[test]
    fn ranks_that_stay_keep_what_they_hold_and_the_gpu_of_a_lost_one_has_to_be_free() {
        let job = JobId("a".into());
        let mut used = GpuUse::default();
        used.see(&job, &ranks(&[7, 8]), &[gpu(1, &[7], 9 << 30), gpu(2, &[8], 9 << 30)]);
        let held = |gpus: &[GpuReading], staying| used.not_free(&job, gpus, &ranks(&[7]), ALLOWED, &staying);
        let memory_only = [gpu(1, &[7], 9 << 30), gpu(2, &[], 9 << 30)];
        let not_free = held(&memory_only, [Pid(7)].into());
        assert!(not_free.len() == 1 && not_free[0].starts_with("gpu.0000:02:00"), "{not_free:?}");
        let orphan = held(&[gpu(1, &[7], 9 << 30), gpu(2, &[21], 1 << 20)], [Pid(7)].into());
        testing::snapshot!(
            "reasons",
            "gpu_use: ranks that stay keep what they hold and the gpu of a lost one has to be free",
            orphan.join("\n")
        );
        assert_eq!(held(&[gpu(1, &[7], 9 << 30), gpu(2, &[], 0)], [Pid(7)].into()), Vec::<String>::new());
        assert_eq!(held(&memory_only, [Pid(7), Pid(8)].into()), Vec::<String>::new());
        // If no process has left a GPU, the driver need not be asked.
        assert!(!used.is_left(&job, &[Pid(7), Pid(8)].into()) && used.is_left(&job, &[Pid(7)].into()));
    }

    #[test]
    fn a_lost_ranks_gpu_with_a_staying_rank_is_free_once_the_lost_rank_is_gone() {
        let job = JobId("a".into());
        let mut used = GpuUse::default();
        // All ranks use the first GPU, as with shared memory.
        used.see(&job, &ranks(&[7, 8]), &[gpu(1, &[7, 8], 9 << 30), gpu(2, &[8], 9 << 30)]);
        let staying = BTreeSet::from([Pid(8)]);
        // 81 was started by the staying rank after the last reading.
        let owners = Owners::from([(Pid(8), Pid(8)), (Pid(81), Pid(8))]);
        let held = |processes: &[i32]| {
            used.not_free(
                &job,
                &[gpu(1, processes, 5 << 30), gpu(2, &[8, 81], 9 << 30)],
                &owners,
                ALLOWED,
                &staying,
            )
        };
        testing::snapshot!(
            "reasons",
            "gpu_use: a lost ranks gpu with a staying rank is free once the lost rank is gone",
            held(&[7, 8]).join("\n")
        );
        assert_eq!(held(&[8, 81]), Vec::<String>::new());
    }

    #[test]
    fn an_excluded_gpu_does_not_concern_the_job_but_a_shared_one_does() {
        let (job, no_one) = (JobId("a".into()), BTreeSet::new());
        let mut used = GpuUse::default();
        used.see(&job, &ranks(&[7, 8]), &[gpu(1, &[7], 9 << 30), gpu(2, &[7, 8], 9 << 30)]);
        used.exclude(&job, Pid(7));
        let not_free = used.not_free(
            &job,
            &[gpu(1, &[], 9 << 30), gpu(2, &[], 9 << 30)],
            &Owners::new(),
            ALLOWED,
            &no_one,
        );
        assert!(not_free.len() == 1 && not_free[0].starts_with("gpu.0000:02:00"), "{not_free:?}");
        assert!(used.is_excluded(&job, "gpu.0000:01:00") && !used.is_excluded(&job, "gpu.0000:02:00"));
        used.forget(&job);
        assert!(!used.is_excluded(&job, "gpu.0000:01:00"));
    }

    #[test]
    fn a_gpu_that_stops_reporting_memory_is_not_free_and_one_that_never_did_is_ignored() {
        let (job, no_one) = (JobId("a".into()), BTreeSet::new());
        let mute = |processes: &[i32]| GpuReading { memory: Sampled::NotOffered, ..gpu(1, processes, 0) };
        let mut used = GpuUse::default();
        used.see(&job, &ranks(&[7]), &[gpu(1, &[7], 9 << 30)]);
        let not_free = used.not_free(&job, &[mute(&[])], &Owners::new(), ALLOWED, &no_one);
        testing::snapshot!("reasons", "gpu_use: a gpu stops reporting its memory", not_free.join("\n"));
        used.see(&job, &ranks(&[7]), &[mute(&[7])]);
        assert_eq!(used.not_free(&job, &[mute(&[])], &Owners::new(), ALLOWED, &no_one), Vec::<String>::new());
    }

    #[test]
    fn a_gpu_that_the_job_left_for_another_does_not_concern_it() {
        let (job, no_one) = (JobId("a".into()), BTreeSet::new());
        let mut used = GpuUse::default();
        used.see(&job, &ranks(&[7]), &[gpu(1, &[7], 9 << 30), gpu(2, &[], 0)]);
        used.see(&job, &ranks(&[8]), &[gpu(1, &[], 9 << 30), gpu(2, &[], 0)]);
        let held =
            |used: &GpuUse, gpus: &[GpuReading]| used.not_free(&job, gpus, &Owners::new(), ALLOWED, &no_one);
        assert!(!held(&used, &[gpu(1, &[], 9 << 30)]).is_empty(), "the next is on its way");
        used.see(&job, &ranks(&[8]), &[gpu(1, &[], 9 << 30), gpu(2, &[8], 9 << 30)]);
        assert_eq!(held(&used, &[gpu(1, &[], 9 << 30), gpu(2, &[], 0)]), Vec::<String>::new());
    }
}
