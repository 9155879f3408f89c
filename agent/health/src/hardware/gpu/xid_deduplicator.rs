//! An XID is reported twice: by a kernel log line and by an NVML event. Both are one fact, whichever arrives first; the
//! line has more details.
//!
//! An event counts at once. It is written to the journal a moment later, so that its line can replace it.

use std::collections::{BTreeMap, VecDeque};

use super::limits::{ECHO_WINDOW, EVENT_WINDOW, LINE_WAIT};
use super::probe_protocol::GpuEvent;
use super::{DeviceJudge, RECOVERY_ACTION};
use mainstay_model::component_id::ComponentId;
use mainstay_model::entry::Fact;
use mainstay_model::kernel::{LogPlace, Xid};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};

/// Maximum number of remembered reports.
const MAX_REMEMBERED_REPORTS: usize = 256;
/// NVML's code for an XID that it does not know: the line has the real code.
const UNKNOWN: u32 = 999;
/// XIDs whose severity is only in the line: those of NVLinks of the fifth generation.
const BY_LINE: std::ops::RangeInclusive<u32> = 144..=150;

/// What an XID that only an NVML event reported has in place of its kernel log line.
pub(super) const BY_NVML_EVENT: &str = "reported by an NVML event";

#[derive(Clone, Debug, Default)]
pub(super) struct XidDeduplicator {
    reports: VecDeque<XidReport>,
    /// XIDs that the driver reported without a GPU.
    of_no_process: Vec<(Mono, u32)>,
    /// Other driver events for the journal, and the time of the last one of each kind.
    others: Vec<(Mono, Fact)>,
    other_at: BTreeMap<(Option<PciAddress>, u64), Mono>,
}

/// Other driver events, by the bits of NVML's event types. The next reading shows the GPU's state.
const OTHERS: [(u64, &str); 8] = [
    (0x2, "a memory error could not be corrected"),
    (0x200, "very many memory errors were corrected"),
    (0x400, "a part of its memory was taken out of use"),
    (0x800, "a part of its memory could not be taken out of use"),
    (0x1000, "a program accessed memory that is known to be bad"),
    (0x2000, "memory that is known to be bad was used, and the GPU cannot go on"),
    (0x4000, "it is no longer available"),
    (0x8000, "the driver changed its recommended recovery action"),
];

#[derive(Clone, Debug)]
struct XidReport {
    at: Mono,
    gpu: PciAddress,
    code: u32,
    by: By,
}

#[derive(Clone, Debug, PartialEq)]
enum By {
    Line,
    /// An event that waits for its line, and whether it was judged already.
    Waiting(Box<Xid>, bool),
    /// An event that was written to the journal.
    Event,
}

impl XidDeduplicator {
    fn note(&mut self, sighting: XidReport) {
        if self.reports.len() == MAX_REMEMBERED_REPORTS {
            self.reports.pop_front();
        }
        self.reports.push_back(sighting);
    }

    fn same(
        &self,
        xid: (Mono, PciAddress, u32),
        within: Span,
        wanted: impl Fn(&By) -> bool,
    ) -> Option<usize> {
        let (at, gpu, code) = xid;
        self.reports.iter().position(|xid| {
            let near = at.since(xid.at) <= within && xid.at.since(at) <= within;
            near && xid.gpu == gpu
                && (xid.code == code || xid.code == UNKNOWN || code == UNKNOWN)
                && wanted(&xid.by)
        })
    }
}

impl DeviceJudge {
    /// Processes a driver event received at `at`. [`DeviceJudge::due`] returns what belongs in the journal.
    pub fn event(&mut self, at: Mono, event: &GpuEvent) {
        self.other_event(at, event);
        // There is no XID 0.
        let code = u32::try_from(event.data).ok().filter(|code| *code > 0);
        let (Some(code), true) = (code, event.kind & GpuEvent::XID != 0) else { return };
        let Some(gpu) = event.gpu.or_else(|| self.only_gpu()) else {
            if self.xids.of_no_process.len() < MAX_REMEMBERED_REPORTS {
                self.xids.of_no_process.push((at, code));
            }
            return;
        };
        if self.xids.same((at, gpu, code), EVENT_WINDOW, |by| *by == By::Line).is_some() {
            return;
        }
        let line = BY_NVML_EVENT.to_owned();
        let xid = Xid {
            gpu,
            code,
            mig_instance: event.instance,
            by_event: true,
            place: LogPlace { position: 0, line },
            ..Xid::default()
        };
        let judged = code != UNKNOWN && !BY_LINE.contains(&code);
        if judged {
            self.xid(at, &xid);
        }
        self.xids.note(XidReport { at, gpu, code, by: By::Waiting(Box::new(xid), judged) });
    }

    /// Events other than XIDs go to the journal once a minute per kind, since some come in storms.
    fn other_event(&mut self, at: Mono, event: &GpuEvent) {
        for (kind, words) in OTHERS.into_iter().filter(|(kind, _)| event.kind & kind != 0) {
            let xids = &mut self.xids;
            let last = xids.other_at.get(&(event.gpu, kind));
            let just_now = last.is_some_and(|last| at.since(*last) < ECHO_WINDOW);
            if just_now || xids.others.len() >= MAX_REMEMBERED_REPORTS {
                continue;
            }
            xids.other_at.insert((event.gpu, kind), at);
            let component = event.gpu.map_or(ComponentId::Gpus("driver"), ComponentId::Gpu).to_string();
            let observation = Observation {
                component,
                event: "told_by_driver".to_owned(),
                weight: Weight::Warning,
                detail: format!("an event of NVML: {words}"),
                values: [("kind".to_owned(), format!("{kind:#x}"))].into(),
            };
            self.xids.others.push((at, Fact::Observed(observation)));
        }
    }

    /// Returns the events for the journal at `now`: those whose line did not arrive, or cannot arrive because the log
    /// is not read.
    pub fn due(&mut self, now: Mono, log_is_read: bool) -> Vec<(Mono, Fact)> {
        let of_no_process: Vec<(Mono, Fact)> =
            self.xids.of_no_process.drain(..).map(|(at, code)| (at, of_no_process(code))).collect();
        let others = std::mem::take(&mut self.xids.others);
        let mut due = Vec::new();
        for report in &mut self.xids.reports {
            if log_is_read && now.since(report.at) < LINE_WAIT {
                continue;
            }
            match std::mem::replace(&mut report.by, By::Event) {
                By::Waiting(xid, judged) => due.push((report.at, *xid, judged)),
                by => report.by = by,
            }
        }
        for (at, xid, judged) in &due {
            if !judged {
                self.xid(*at, xid);
            }
        }
        due.into_iter().map(|(at, xid, _)| (at, Fact::Xid(xid))).chain(of_no_process).chain(others).collect()
    }

    /// The GPU of a host with only one.
    fn only_gpu(&self) -> Option<PciAddress> {
        let mut all = self.gpus.keys();
        all.next().filter(|_| all.next().is_none()).copied()
    }

    /// Processes a line of `at` that was read at `now`. Returns whether it is news: it is not if its event is in the
    /// journal and the line adds nothing.
    pub(super) fn xid_line(&mut self, now: Mono, at: Mono, xid: &Xid) -> bool {
        let mut news = true;
        if xid.by_event {
            // An event from the journal, after a restart.
            self.xids.note(XidReport { at: now, gpu: xid.gpu, code: xid.code, by: By::Event });
        } else {
            let event = self.xids.same((now, xid.gpu, xid.code), EVENT_WINDOW, |by| *by != By::Line);
            match event.and_then(|place| self.xids.reports.remove(place)).map(|xid| xid.by) {
                Some(By::Waiting(_, judged)) => {
                    if judged {
                        self.retract(xid);
                    }
                }
                Some(By::Event) => {
                    self.retract(xid);
                    news = adds(xid);
                }
                Some(By::Line) | None => {}
            }
            self.xids.note(XidReport { at: now, gpu: xid.gpu, code: xid.code, by: By::Line });
        }
        self.xid(at, xid);
        news
    }

    fn retract(&mut self, xid: &Xid) {
        if let Some(gpu) = self.gpus.get_mut(&xid.gpu) {
            gpu.faults.retract(xid.code);
            gpu.programs.retract(xid.code);
        }
    }
}

/// The kernel log names the GPU. An event without a GPU blames none.
fn of_no_process(code: u32) -> Fact {
    Fact::Observed(Observation {
        component: "gpu.driver".to_owned(),
        event: "xid_of_unknown_gpu".to_owned(),
        weight: Weight::Warning,
        detail: format!("NVML reported XID {code} without its GPU"),
        values: [("code".to_owned(), code.to_string())].into(),
    })
}

/// Whether a line has more details than its event.
fn adds(xid: &Xid) -> bool {
    xid.code == RECOVERY_ACTION
        || xid.pid.is_some()
        || xid.nvlink.is_some()
        || xid.link_registers.is_some()
        || xid.caused_by.is_some()
        || xid.reset_needed.is_some()
        || xid.drain_and_reset_needed.is_some()
}
