//! What the journal contains from before this start, sorted by consumer.

use std::collections::BTreeMap;

use mainstay_diagnosis::host_evidence::Records;
use mainstay_diagnosis::repeats::Repeats;
use mainstay_health::hardware::gpu::reset;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::{BootId, JobId};
use mainstay_model::kernel::{LogCursor, journal_position};
use mainstay_model::observation::Observation;
use mainstay_model::operator::ACKNOWLEDGED;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Stamp};

use mainstay_sensors::source::journald::JOURNALD;
use mainstay_sys::clock;

/// What the journal contains from before this start.
#[derive(Debug, Default)]
pub(super) struct Recalled {
    /// The newest launcher's entry, by job.
    pub(super) origins: BTreeMap<JobId, u64>,
    /// Facts of this boot's kernel log.
    pub(super) kernel: Vec<(Mono, Fact)>,
    /// Facts of the kernel logs of earlier boots, in journal order.
    pub(super) earlier: Vec<(Stamp, BootId, Fact)>,
    /// How far `/dev/kmsg` or a file was read.
    pub(super) position: u64,
    /// How far systemd's journal was read.
    pub(super) journal_position: u64,
    /// What the sensors that watch the host observed, in any boot, in journal order.
    pub(super) observed: Vec<(Stamp, BootId, Observation)>,
    /// How jobs failed, in any boot.
    pub(super) repeats: Repeats,
    /// Hardware faults of earlier boots, and the last of those boots.
    records: Records,
    last_boot: Option<BootId>,
}

impl Recalled {
    /// The stored cursor, advanced to what the journal shows was read after it.
    pub(super) fn cursor(&self, kept: Option<LogCursor>) -> Option<LogCursor> {
        let boot = clock::boot_id();
        match kept {
            Some(cursor) if cursor.boot == boot => {
                let in_journal = cursor.log == JOURNALD;
                let known = if in_journal { self.journal_position } else { self.position };
                Some(LogCursor { next: cursor.next.max(known), ..cursor })
            }
            // The first facts of a boot were written, and then the agent was killed.
            _ if self.journal_position > 0 => {
                Some(LogCursor { boot, log: JOURNALD.to_owned(), next: self.journal_position, journal: None })
            }
            kept => kept,
        }
    }

    /// Records hardware faults of an earlier boot, and how long that boot lasted.
    fn remember(&mut self, entry: &Entry, boot: &BootId) {
        if entry.boot == *boot {
            return;
        }
        if self.last_boot.as_ref() != Some(&entry.boot) {
            self.records.next_boot();
            self.last_boot = Some(entry.boot.clone());
        }
        self.records.was_up(entry.at.mono);
        if let Body::Fact(fact) = &entry.body {
            self.records.take_in(entry.at.mono, fact);
        }
    }

    /// The records of earlier boots, with the boards that this boot has found.
    pub(super) fn records(&self) -> Records {
        let mut records = self.records.clone();
        records.next_boot();
        let boot = clock::boot_id();
        for (at, _, seen) in self.observed.iter().filter(|(_, of, _)| *of == boot) {
            records.take_in(at.mono, &Fact::Observed(seen.clone()));
        }
        records
    }

    pub(super) fn take_in(&mut self, entry: Entry, boot: &BootId) {
        if let (Some(job), Some(seq)) = (&entry.job, entry.origin_seq) {
            self.origins.insert(job.clone(), seq);
        }
        self.repeats.take_in(&entry);
        self.remember(&entry, boot);
        let Body::Fact(fact) = entry.body else { return };
        if entry.job.is_some() {
            return;
        }
        if let Fact::Observed(observation) = fact {
            let of_faults = observation.event == ACKNOWLEDGED || observation.event == reset::DONE;
            if of_faults && entry.boot == *boot {
                self.kernel.push((entry.at.mono, Fact::Observed(observation.clone())));
            } else if observation.event == reset::DONE {
                // A fault that recurred after a reset needs a stronger action.
                self.earlier.push((entry.at, entry.boot.clone(), Fact::Observed(observation.clone())));
            }
            return self.observed.push((entry.at, entry.boot, observation));
        }
        if entry.boot != *boot {
            if matches!(fact, Fact::Xid(_) | Fact::KernelReport(_)) {
                self.earlier.push((entry.at, entry.boot, fact));
            }
            return;
        }
        let position = match &fact {
            Fact::Xid(xid) => xid.place.position,
            Fact::Sxid(sxid) => sxid.place.position,
            Fact::KernelReport(report) => report.place.position,
            Fact::KernelLinesLeftOut { .. } | Fact::KernelLogGap { .. } => 0,
            _ => return,
        };
        if position == journal_position(entry.at.mono) {
            self.journal_position = self.journal_position.max(position);
        } else {
            self.position = self.position.max(position);
        }
        self.kernel.push((entry.at.mono, fact));
    }

    /// The GPUs that the agent itself decided to reset in this boot, and when.
    pub(super) fn own_resets(&self) -> BTreeMap<PciAddress, Mono> {
        let boot = clock::boot_id();
        let here = self.observed.iter().filter(|(_, of, _)| *of == boot);
        here.filter_map(|(at, _, seen)| Some((reset::own_try(seen)?, at.mono))).collect()
    }

    /// A value with only the observations of sensors.
    pub(super) fn of_rooms(observed: Vec<(Stamp, BootId, Observation)>) -> Recalled {
        Recalled { observed, ..Recalled::default() }
    }
}

#[cfg(test)]
mod tests {
    use mainstay_diagnosis::host_evidence::{AttemptScope, EvidenceLog};
    use mainstay_model::kernel::Xid;
    use mainstay_model::time::Wall;

    use super::*;

    fn hours(n: u64) -> Mono {
        Mono(n * 3_600_000_000_000)
    }

    fn lost() -> Fact {
        let gpu = PciAddress { domain: 0, bus: 0x3b, device: 0 };
        Fact::Xid(Xid { gpu, code: 79, ..Xid::default() })
    }

    fn entry(boot: &str, at: Mono, fact: Fact) -> Entry {
        let at = Stamp { mono: at, wall: Wall(0) };
        let boot = BootId(boot.to_owned());
        Entry { seq: 1, at, boot, job: None, origin_seq: None, body: Body::Fact(fact) }
    }

    #[test]
    fn faults_of_earlier_boots_are_on_record_and_those_of_this_one_are_not_counted_twice() {
        let boot = BootId("now".to_owned());
        let mut recalled = Recalled::default();
        for earlier in ["first", "second"] {
            recalled.take_in(entry(earlier, hours(10), lost()), &boot);
            recalled.take_in(entry(earlier, hours(90), Fact::AgentStopped), &boot);
        }
        recalled.take_in(entry("now", hours(1), lost()), &boot);
        let mut evidence_log = EvidenceLog::with(recalled.records());
        recalled.kernel.iter().for_each(|(at, fact)| evidence_log.take_in(*at, fact));
        evidence_log.take_in(hours(5), &lost());
        let reported = evidence_log.report_evidence(hours(5), &AttemptScope::default(), &[]).failed_before;
        assert_eq!(reported.len(), 1, "{reported:?}");
        assert_eq!(reported[0].incidents, 3);
        assert!((reported[0].hours - 185.0).abs() < 1.0, "{}", reported[0].hours);
    }
}
