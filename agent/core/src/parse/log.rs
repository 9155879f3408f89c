//! A kernel log as it is read on: records in, facts out, storms counted.

use std::collections::BTreeMap;

use super::bucket::{Bucket, Rate};
use super::kmsg::Record;
use super::{host, nvidia};
use crate::entry::Fact;
use crate::id::Pid;
use crate::kernel::{KernelClass, LogPlace};
use crate::pci::PciAddress;
use crate::time::{Mono, Span};

/// Kinds of lines that are counted apart, so that a storm of one does not hide another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Xid(PciAddress, u32),
    Sxid(PciAddress, u32),
    Host(KernelClass),
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Xid(gpu, code) => write!(f, "XID {code} of GPU {gpu}"),
            Kind::Sxid(switch, code) => write!(f, "SXID {code} of switch {switch}"),
            Kind::Host(class) => f.write_str(class.name()),
        }
    }
}

/// The first lines of each kind, and then one now and then.
const RATE: Rate = Rate { burst: 20, every: Span::seconds(10) };

/// Kinds that are remembered: far more than one host has GPUs times codes in a bad hour.
const KINDS: usize = 1024;

/// How often it is told what was held back.
const TELL_EVERY: Span = Span::seconds(10);

/// Longest line that is kept as evidence, in bytes.
const LINE: usize = 1024;

/// Reads a log on.
#[derive(Clone, Debug, Default)]
pub struct LogReader {
    buckets: BTreeMap<Kind, Bucket>,
    /// The process of the last kill: older and newer kernels tell it in two lines.
    last_kill: Option<Pid>,
    told: Mono,
}

impl LogReader {
    /// Takes in one record, read at `now`, with the position behind it. Returns what it says, if that is a fact, and
    /// when it was written.
    pub fn read(&mut self, now: Mono, record: &Record<'_>, position: u64) -> Option<(Mono, Fact)> {
        let place = || LogPlace { position, line: shortened(record.message) };
        let (kind, fact) = if let Some(mut xid) = nvidia::xid(record.message) {
            xid.place = place();
            (Kind::Xid(xid.gpu, xid.code), Fact::Xid(xid))
        } else if let Some(mut sxid) = nvidia::sxid(record.message) {
            sxid.place = place();
            (Kind::Sxid(sxid.address, sxid.code), Fact::Sxid(sxid))
        } else {
            let mut report = nvidia::other(record.message).or_else(|| host::report(record.message))?;
            if report.class == KernelClass::OutOfMemory {
                let again = report.pid.is_some() && report.pid == self.last_kill;
                self.last_kill = if again { None } else { report.pid };
                if again {
                    return None;
                }
            }
            report.place = place();
            (Kind::Host(report.class), Fact::KernelReport(report))
        };
        // A clock of another boot, or of another host, must not put it into the future.
        let at = record.at.map_or(now, |at| at.min(now));
        self.passes(kind, now).then_some((at, fact))
    }

    /// What was held back since it was last told, once in a while.
    pub fn held_back(&mut self, now: Mono) -> Vec<Fact> {
        if now.since(self.told) < TELL_EVERY {
            return Vec::new();
        }
        self.told = now;
        self.buckets
            .iter_mut()
            .filter_map(|(kind, bucket)| {
                let count = bucket.take_held_back();
                (count > 0).then(|| Fact::KernelLinesLeftOut { of: kind.to_string(), count })
            })
            .collect()
    }

    fn passes(&mut self, kind: Kind, now: Mono) -> bool {
        if let Some(bucket) = self.buckets.get_mut(&kind) {
            return bucket.pass(RATE, now);
        }
        // A log that makes up kinds is no reason to grow without end, nor to lose a real one.
        if self.buckets.len() >= KINDS {
            self.buckets.pop_first();
        }
        self.buckets.entry(kind).or_insert_with(|| Bucket::new(RATE, now)).pass(RATE, now)
    }
}

fn shortened(line: &str) -> String {
    let mut end = line.len().min(LINE);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line[..end].to_owned()
}
