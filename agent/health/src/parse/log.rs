//! Reads a kernel log continuously: turns records into facts and counts storms.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::bucket::{Bucket, Rate};
use super::journal::{self, JournalEntry};
use super::kmsg::{Record, plain};
use super::{host, nvidia, prefilter};
use mainstay_model::entry::Fact;
use mainstay_model::id::Pid;
use mainstay_model::kernel::{KernelClass, KernelReport, LogPlace, Sxid, Xid};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};

/// Kinds of lines that are counted separately, so that a storm of one does not hide another. Lines with one code but different details
/// (fatal or not, reset or not, required action) are different kinds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Xid(PciAddress, u32, u64),
    Sxid(PciAddress, u32, Option<bool>),
    Host(KernelClass),
}

impl Kind {
    fn of_xid(xid: &Xid) -> Kind {
        let flag = |flag: Option<bool>| flag.map_or(0, |set| 1 + u64::from(set));
        let fatal = xid.nvlink.as_ref().and_then(|error| error.fatal);
        let link = xid.link_registers.as_ref().map_or(0, |registers| u64::from(registers.link & 0xff) + 1);
        let recommended = xid.recovery_action.map_or(0, |number| u64::from(number & 0xff) + 1);
        let recommended = recommended << 32 | link << 8 | flag(fatal) << 4 | flag(xid.reset_needed) << 2;
        Kind::Xid(xid.gpu, xid.code, recommended | flag(xid.drain_and_reset_needed))
    }

    fn of_sxid(sxid: &Sxid) -> Kind {
        Kind::Sxid(sxid.address, sxid.code, sxid.fatal)
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Xid(gpu, code, _) => write!(f, "XID {code} of GPU {gpu}"),
            Kind::Sxid(switch, code, _) => write!(f, "SXID {code} of switch {switch}"),
            Kind::Host(class) => f.write_str(class.name()),
        }
    }
}

/// Limits for storms: lines of each kind that are read at once (the others are counted), and the interval at which one
/// more line of that kind is read.
const STORM: Rate = Rate { burst: 20, every: Span::seconds(10) };

/// Maximum number of kinds remembered: far more than the GPUs of a host times their codes in an hour with many faults.
const KINDS: usize = 1024;

/// Subjects of a class whose first line always passes, so that a storm of one disk does not hide another.
const SUBJECTS: usize = 64;

/// Repeated messages of a storm that are compared as a whole: storms have few distinct ones.
const REPEATED: usize = 8;

/// How often the number of lines held back is reported.
const REPORT_EVERY: Span = Span::seconds(10);

/// Maximum length of a line kept as evidence, in bytes.
const LINE: usize = 1024;

/// The kernel's escape for a newline inside a record.
const NEW_LINE: &str = "\\x0a";

/// Reads a log continuously.
#[derive(Clone, Debug, Default)]
pub struct LogReader {
    buckets: BTreeMap<Kind, Bucket>,
    subjects: BTreeMap<KernelClass, BTreeSet<String>>,
    /// The process of the last kill: some kernels report one kill in two lines.
    last_kill: Option<Pid>,
    /// The control group of the next kill, which older kernels report in a separate line.
    group_of_kill: Option<String>,
    /// The firmware's last report of an uncorrected error.
    of_firmware: Option<String>,
    /// The GPU named in a line whose problem follows in later lines.
    preface: Option<String>,
    /// Messages that were held back, with their kinds: comparing a message costs less than parsing it.
    repeated: VecDeque<(String, Kind)>,
    reported_at: Mono,
}

impl LogReader {
    /// Processes one line of text, read at `now`, with the position after it: a kernel log line in any form of `dmesg`, syslog or
    /// `journalctl`.
    pub fn line(&mut self, now: Mono, line: &str, position: u64) -> Option<(Mono, Fact)> {
        let wrapped = prefilter::is_wrapped(line);
        if (!wrapped && self.is_left_out(line)) || Record::is_continuation(line) {
            return None;
        }
        let line = plain(line);
        if let Some(entry) = JournalEntry::parse(&line) {
            return if entry.by_kernel { self.entry(now, &entry, position) } else { None };
        }
        if let Some(message) = journal::of_container(&line) {
            return self.read(now, &Record::parse(&plain(&message)), position);
        }
        if let Some(message) = journal::of_dmesg(&line) {
            return self.read(now, &bare(&message, None), position);
        }
        let record = Record::parse(&line);
        if wrapped { self.read(now, &record, position) } else { self.take_in(now, &record, position) }
    }

    /// Processes one journal entry, read at `now`.
    pub fn entry(&mut self, now: Mono, entry: &JournalEntry, position: u64) -> Option<(Mono, Fact)> {
        self.read(now, &bare(&plain(&entry.message), entry.at), position)
    }

    /// Processes one record, read at `now`, with the position after it. Returns the fact, if any, and when it was written.
    pub fn read(&mut self, now: Mono, record: &Record<'_>, position: u64) -> Option<(Mono, Fact)> {
        if self.is_left_out(record.message) { None } else { self.take_in(now, record, position) }
    }

    /// Whether the line certainly contains no fact.
    fn is_left_out(&self, line: &str) -> bool {
        if prefilter::may_match_a_pattern(line) {
            return false;
        }
        // Verified in tests and under fuzzing; release builds rely on it.
        debug_assert!(
            self.clone().take_in(Mono(0), &Record::parse(line), 0).is_none(),
            "a word is missing in the prefilter: {line:?}"
        );
        true
    }

    fn take_in(&mut self, now: Mono, record: &Record<'_>, position: u64) -> Option<(Mono, Fact)> {
        // A clock of another boot or host must not put the record into the future.
        let at = record.at.map_or(now, |at| at.min(now));
        let of_line = |message: &str| LogPlace { position, line: shortened(message) };
        let fact = if memchr::memchr(b'\\', record.message.as_bytes()).is_none() {
            self.fact(now, record.message, &of_line)
        } else {
            let mut lines = record.message.split(NEW_LINE);
            lines.find_map(|message| self.fact(now, message, &of_line))
        };
        fact.map(|fact| (at, fact))
    }

    fn fact(&mut self, now: Mono, message: &str, place: &dyn Fn(&str) -> LogPlace) -> Option<Fact> {
        if self.is_held_back_again(now, message) {
            return None;
        }
        if let Some(mut xid) = nvidia::xid(message) {
            let passes = self.passes(Kind::of_xid(&xid), None, now, message);
            return passes.then(|| {
                xid.place = place(message);
                Fact::Xid(xid)
            });
        }
        if let Some(mut sxid) = nvidia::sxid(message) {
            let passes = self.passes(Kind::of_sxid(&sxid), None, now, message);
            return passes.then(|| {
                sxid.place = place(message);
                Fact::Sxid(sxid)
            });
        }
        if let Some(group) = host::group_of_kill(message) {
            self.group_of_kill = Some(shortened(group));
            return None;
        }
        let mut report = self.of_driver(message).or_else(|| self.of_host(message))?;
        if report.class == KernelClass::OutOfMemory {
            let group = self.group_of_kill.take();
            if message.starts_with("Memory cgroup") {
                report.cgroup = report.cgroup.or(group);
            }
            let again = report.pid.is_some() && report.pid == self.last_kill;
            self.last_kill = if again { None } else { report.pid };
            if again {
                return None;
            }
        }
        let passes = self.passes(Kind::Host(report.class), report.subject.as_deref(), now, message);
        passes.then(|| {
            report.place = place(message);
            Fact::KernelReport(report)
        })
    }

    /// The driver's other messages. Some take three lines, of which only the first names the GPU.
    fn of_driver(&mut self, message: &str) -> Option<KernelReport> {
        if !message.starts_with("NVRM: ") {
            return None;
        }
        let preface = self.preface.take();
        let Some(mut report) = nvidia::other(message) else {
            self.preface =
                nvidia::preface(message).or(preface.filter(|_| message.contains("in this system")));
            return None;
        };
        report.subject = report.subject.or(preface);
        Some(report)
    }

    /// The kernel's messages about the host. The firmware reports the severity in one line and the subject in a later one.
    fn of_host(&mut self, message: &str) -> Option<KernelReport> {
        if let Some(device) = host::pcie_of_firmware(message) {
            let reported_at = self.of_firmware.take_if(|reported_at| *reported_at == device)?;
            return Some(host::about(KernelClass::AerNonFatal, Some(&reported_at)));
        }
        let report = host::report(message)?;
        if message.starts_with('{') {
            self.of_firmware = report.subject.clone();
        }
        Some(report)
    }

    /// The lines held back since the last report, at most once per interval.
    pub fn held_back(&mut self, now: Mono) -> Vec<Fact> {
        if now.since(self.reported_at) < REPORT_EVERY {
            return Vec::new();
        }
        self.reported_at = now;
        let held_back = self.buckets.iter_mut().filter_map(|(kind, bucket)| {
            let count = bucket.take_held_back();
            (count > 0).then(|| Fact::KernelLinesLeftOut { of: kind.to_string(), count })
        });
        held_back.collect()
    }

    /// Whether an identical message was held back before and must be held back again.
    fn is_held_back_again(&mut self, now: Mono, message: &str) -> bool {
        let Some((_, kind)) = self.repeated.iter().find(|(before, _)| before == message) else {
            return false;
        };
        let Some(bucket) = self.buckets.get_mut(kind) else { return false };
        let mut tried = *bucket;
        if tried.pass(STORM, now) {
            return false;
        }
        *bucket = tried;
        true
    }

    fn passes(&mut self, kind: Kind, subject: Option<&str>, now: Mono, message: &str) -> bool {
        let passes = self.passes_of(&kind, subject, now);
        // The meaning of the driver's other lines, and of a kill, depends on the lines before them.
        let alone = match kind {
            Kind::Xid(..) | Kind::Sxid(..) => true,
            Kind::Host(KernelClass::OutOfMemory) => false,
            Kind::Host(_) => !message.starts_with("NVRM: "),
        };
        if !passes && alone && message.len() <= LINE {
            self.repeated.truncate(REPEATED - 1);
            self.repeated.push_front((message.to_owned(), kind));
        }
        passes
    }

    fn passes_of(&mut self, kind: &Kind, subject: Option<&str>, now: Mono) -> bool {
        if let (Kind::Host(class), Some(subject)) = (kind, subject) {
            let known = self.subjects.entry(*class).or_default();
            if known.len() < SUBJECTS && !known.contains(subject) {
                known.insert(subject.to_owned());
                return true;
            }
        }
        if let Some(bucket) = self.buckets.get_mut(kind) {
            return bucket.pass(STORM, now);
        }
        // A log that invents kinds must not use unbounded memory, nor hide a real kind.
        if self.buckets.len() >= KINDS {
            self.buckets.pop_first();
        }
        self.buckets.entry(kind.clone()).or_insert_with(|| Bucket::new(STORM, now)).pass(STORM, now)
    }
}

fn bare(message: &str, at: Option<Mono>) -> Record<'_> {
    Record { priority: None, sequence: None, at, message }
}

fn shortened(line: &str) -> String {
    let mut end = line.len().min(LINE);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line[..end].to_owned()
}
