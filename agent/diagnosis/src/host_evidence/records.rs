//! Fault records of a host and of its GPUs: hardware faults over all boots of the host in the journal, relative to its uptime. A
//! replaced board starts a new record.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::OnceLock;

use crate::attribution::catalog::{Catalog, Role, Signature};
use crate::attribution::class::Class;
use crate::failure_rate::{GPU_PER_HOUR, HOST_PER_HOUR, Record};
use mainstay_health::hardware::gpu::{board_of, replaced_board};
use mainstay_model::entry::Fact;
use mainstay_model::host_context::FailedBefore;
use mainstay_model::kernel::KernelClass;
use mainstay_model::time::{Mono, Span};

use super::{MAX_TIME_BEFORE_FAULT, around, component_of};

/// The name of the host itself in records.
pub(super) const HOST: &str = "host";

/// Maximum number of faults kept per place, the newest.
const MAX_FAULTS: usize = 64;

/// The faults of a host and of its GPUs. Times are in the host's accumulated uptime: its boots, one after the other.
#[derive(Clone, Debug, Default)]
pub struct Records {
    /// Total uptime of the earlier boots that are known.
    before: Span,
    /// The newest time of this boot that was reported.
    newest: Mono,
    /// By place, oldest first.
    faults: BTreeMap<String, VecDeque<Mono>>,
    /// The board at each GPU's address, and since when it is there.
    boards: BTreeMap<String, (String, Mono)>,
}

impl Records {
    /// The host was up until `until` in this boot, even without facts.
    pub fn was_up(&mut self, until: Mono) {
        self.newest = self.newest.max(until);
    }

    /// Starts the next boot.
    pub fn next_boot(&mut self) {
        self.before = Span(self.before.0.saturating_add(self.newest.0));
        self.newest = Mono::default();
    }

    /// Processes one fact of this boot.
    pub fn take_in(&mut self, at: Mono, fact: &Fact) {
        self.was_up(at);
        let life = self.life(at);
        let place = match fact {
            Fact::Xid(xid) if is_of_the_hardware(xid.code) => component_of(xid.gpu),
            Fact::KernelReport(report) if is_of_the_host(report.class) => HOST.to_owned(),
            Fact::Observed(seen) => {
                if let Some((component, uuid)) = board_of(seen) {
                    self.board(component, uuid, life);
                } else if let Some(component) = replaced_board(seen) {
                    self.board(component, String::new(), life);
                }
                return;
            }
            _ => return,
        };
        let faults = self.faults.entry(place).or_default();
        if faults.len() == MAX_FAULTS {
            faults.pop_front();
        }
        faults.push_back(life);
    }

    fn board(&mut self, component: String, uuid: String, at: Mono) {
        match self.boards.get_mut(&component) {
            None => _ = self.boards.insert(component, (uuid, Mono::default())),
            Some((known, since)) if *known != uuid => {
                // The first UUID reported after a replacement is no second replacement.
                if !known.is_empty() {
                    *since = at;
                }
                *known = uuid;
            }
            Some(_) => {}
        }
    }

    /// The records, before this fault of this boot, of the places that had a fault around it.
    pub fn before(&self, fault_at: Mono) -> Vec<FailedBefore> {
        let fault_at = self.life(fault_at);
        let starts = Mono(fault_at.0.saturating_sub(MAX_TIME_BEFORE_FAULT.0));
        let records = self.faults.iter().filter_map(|(component, faults)| {
            faults.iter().find(|at| around(fault_at, **at))?;
            let since = self.boards.get(component).map_or(Mono::default(), |(_, since)| *since);
            let hours = starts.since(since).0 as f64 / Span::seconds(3600).0 as f64;
            let mut record = Record::default();
            faults.iter().filter(|at| **at >= since && **at < starts).for_each(|at| {
                record.add(*at, 1);
            });
            let rate = if component == HOST { HOST_PER_HOUR } else { GPU_PER_HOUR };
            (record.incidents > 0).then(|| FailedBefore {
                component: component.clone(),
                incidents: record.incidents,
                hours,
                suspicion: record.suspicion(hours, rate),
            })
        });
        records.collect()
    }

    fn life(&self, at: Mono) -> Mono {
        at.after(self.before)
    }
}

/// Whether the catalog attributes the XID to the device rather than to a program.
fn is_of_the_hardware(code: u32) -> bool {
    /// Cached, so that the catalog is not read for each XID.
    static CODES: OnceLock<BTreeSet<u32>> = OnceLock::new();
    let codes = || Catalog::shared().map(|catalog| catalog.xids_where(is_of_a_device)).unwrap_or_default();
    CODES.get_or_init(codes).contains(&code)
}

/// Whether the catalog attributes the XID to a program, or to the end of one.
pub(super) fn is_of_a_program(code: u32) -> bool {
    /// Cached, see above.
    static CODES: OnceLock<BTreeSet<u32>> = OnceLock::new();
    let is = |signature: &Signature| signature.class == Class::UserCode;
    let codes = || Catalog::shared().map(|catalog| catalog.xids_where(is)).unwrap_or_default();
    CODES.get_or_init(codes).contains(&code)
}

fn is_of_a_device(signature: &Signature) -> bool {
    signature.class == Class::HardwareGpu && signature.role == Role::Primary
}

/// Whether a report is about the host's own hardware. Faults caused by programs and drivers do not count.
fn is_of_the_host(class: KernelClass) -> bool {
    matches!(
        class,
        KernelClass::MachineCheck
            | KernelClass::AerNonFatal
            | KernelClass::AerUncorrected
            | KernelClass::PcieSlotDown
            | KernelClass::CriticalTemperature
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::kernel::{KernelReport, LogPlace, Xid};
    use mainstay_model::observation::{Observation, Weight};
    use mainstay_model::pci::PciAddress;

    fn hours(n: u64) -> Mono {
        Mono(n * 3_600_000_000_000)
    }

    fn lost() -> Fact {
        let gpu = PciAddress::parse("0000:3b:00").expect("an address");
        Fact::Xid(Xid { gpu, code: 79, ..Xid::default() })
    }

    fn machine_check() -> Fact {
        Fact::KernelReport(KernelReport {
            class: KernelClass::MachineCheck,
            subject: None,
            pid: None,
            process: None,
            cgroup: None,
            place: LogPlace::default(),
        })
    }

    fn learned(uuid: &str) -> Fact {
        let value = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        Fact::Observed(Observation {
            component: "gpu.0000:3b:00".into(),
            event: "gpu_learned".into(),
            weight: Weight::Info,
            detail: String::new(),
            values: [value("uuid", uuid), value("index", "0"), value("name", "H100"), value("nvlinks", "")]
                .into(),
        })
    }

    /// `count` boots of a hundred hours, each with the fact after ten hours.
    fn boots(count: u64, fact: &Fact) -> Records {
        let mut records = Records::default();
        for _ in 0..count {
            records.take_in(hours(10), fact);
            records.was_up(hours(100));
            records.next_boot();
        }
        records
    }

    #[test]
    fn faults_of_earlier_boots_count_against_the_time_in_which_the_host_was_up() {
        let mut records = boots(3, &lost());
        records.take_in(hours(2), &lost());
        let [record] = &records.before(hours(2))[..] else { panic!("one record: {records:?}") };
        assert_eq!((record.component.as_str(), record.incidents), ("gpu.0000:3b:00", 3));
        assert!((record.hours - 302.0).abs() < 1.0, "{}", record.hours);
        let mut one = boots(1, &lost());
        one.take_in(hours(2), &lost());
        assert!(
            record.suspicion > 0.6 && record.suspicion > one.before(hours(2))[0].suspicion,
            "{}",
            record.suspicion
        );
        assert!(records.before(hours(50)).is_empty(), "without a fault now there is nothing to say");
    }

    #[test]
    fn a_host_has_its_own_record_with_a_higher_threshold() {
        let mut records = boots(3, &machine_check());
        records.take_in(hours(2), &machine_check());
        let [record] = &records.before(hours(2))[..] else { panic!("one record: {records:?}") };
        assert_eq!((record.component.as_str(), record.incidents), (HOST, 3));
        let mut gpu = boots(3, &lost());
        gpu.take_in(hours(2), &lost());
        assert!(
            record.suspicion < gpu.before(hours(2))[0].suspicion,
            "a host of eight GPUs fails more often than one"
        );
    }

    #[test]
    fn a_different_board_starts_a_new_record_and_the_same_one_does_not() {
        let record = |uuid: &str| {
            let mut records = Records::default();
            records.take_in(hours(1), &learned("GPU-1"));
            records.take_in(hours(10), &lost());
            records.was_up(hours(100));
            records.next_boot();
            records.take_in(hours(1), &learned(uuid));
            records.take_in(hours(20), &lost());
            records.before(hours(20)).first().map(|record| record.incidents)
        };
        assert_eq!((record("GPU-1"), record("GPU-2")), (Some(1), None));
    }

    #[test]
    fn memory_is_bounded_and_keeps_the_newest() {
        let mut records = Records::default();
        (1..1_000).for_each(|n| records.take_in(hours(2 * n), &lost()));
        let newest = records.before(hours(2 * 999));
        assert_eq!(newest[0].incidents as usize, MAX_FAULTS - 1);
    }
}
