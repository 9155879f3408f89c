//! The GPUs' sensing on a thread of its own: the driver may take as long as it likes.

use std::io::{PipeReader, PipeWriter, Read};
use std::os::fd::AsFd;
use std::sync::mpsc as orders;
use std::time::{Duration, Instant};

use mainstay_core::hardware::gpu::reset::{self, ResetError, ResetOrder};
use mainstay_core::hardware::gpu::{DeviceReport, GpuReading, ProbeAnswer};
use tokio::sync::mpsc;

use crate::act::reset::{ResetPlan, holders, reset as reset_now};
use crate::node::Input;
use crate::os::clock;
use crate::source::device::{DeviceSource, ProbePlan, Waited};
use crate::state::Roster;

/// The room's name on the roster.
const ROOM: &str = "devices";

/// After an event the GPUs are read at once, but not more often than this.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);

/// After a reset the driver may need a moment: it is asked so often, with so long between.
const TRIES_AFTER_A_RESET: u32 = 5;
const BETWEEN_TRIES: Duration = Duration::from_secs(1);

/// Sensing under way; it ends when this is dropped.
#[derive(Debug)]
pub struct Probing {
    stop: PipeWriter,
    resets: orders::Sender<ResetOrder>,
}

impl Probing {
    /// A way to have the driver asked at once: by a byte into it. Sensing ends when this is dropped too.
    ///
    /// # Errors
    /// The kernel gives no more descriptors.
    pub fn nudge(&self) -> std::io::Result<PipeWriter> {
        self.stop.try_clone()
    }

    /// A way to have GPUs reset: the probe has them open, so it is its thread that does it.
    pub fn resets(&self) -> orders::Sender<ResetOrder> {
        self.resets.clone()
    }
}

/// The thread's own things.
struct Room {
    source: DeviceSource,
    stop: PipeReader,
    interval: Duration,
    inputs: mpsc::Sender<Input>,
    roster: Roster,
    reset: ResetPlan,
    resets: orders::Receiver<ResetOrder>,
}

/// Asks the driver now and every `interval`, passes on what it tells unasked, resets what is to be reset, and tells the node.
///
/// # Errors
/// The kernel gives no more threads or descriptors.
pub fn probe(
    plan: ProbePlan,
    reset: ResetPlan,
    interval: Duration,
    inputs: mpsc::Sender<Input>,
    roster: Roster,
) -> std::io::Result<Probing> {
    let (stop, stop_writer) = std::io::pipe()?;
    let (ordered, resets) = orders::channel();
    roster.starts(ROOM, clock::mono());
    let ask = move || {
        let mut room =
            Room { source: DeviceSource::new(plan), stop, interval, inputs, roster, reset, resets };
        while room.look().is_some() {}
    };
    std::thread::Builder::new().name("devices".to_owned()).spawn(ask)?;
    Ok(Probing { stop: stop_writer, resets: ordered })
}

impl Room {
    /// One sample, and the wait for the next. None when it is over.
    fn look(&mut self) -> Option<()> {
        let (at, began) = (clock::mono(), Instant::now());
        self.roster.starts(ROOM, at);
        let report = self.source.sample(at);
        self.report(Input::Devices { began: at, report: report.clone() })?;
        self.report(Input::Looked { room: ROOM.to_owned(), components: Vec::new() })?;
        if let Ok(order) = self.resets.try_recv() {
            let outcome = self.reset(&order, &report);
            // How the GPU is now comes before what is said of its reset: the next look is at once.
            let began = clock::mono();
            let report = self.source.sample(began);
            self.report(Input::Devices { began, report })?;
            return self.report(Input::GpuReset { order, outcome });
        }
        // A driver that takes its time is left alone for half the interval at least.
        let took = began.elapsed();
        let mut next = Instant::now() + self.interval - took.min(self.interval / 2);
        loop {
            match self.source.wait(self.stop.as_fd(), next.saturating_duration_since(Instant::now())) {
                Waited::Over => return Some(()),
                // A byte asks for a look at once; the other end gone is the end.
                Waited::Stopped => return matches!((&self.stop).read(&mut [0; 16]), Ok(1..)).then_some(()),
                Waited::Reported(events) => {
                    self.report(Input::GpuEvents(events))?;
                    // What the event did to the counters is not left until the next look.
                    next = next.min(began + took + AT_MOST_EVERY);
                }
            }
        }
    }

    fn report(&self, input: Input) -> Option<()> {
        self.inputs.blocking_send(input).ok()
    }

    /// Resets a GPU that is idle by the report and by the kernel, and looks whether that helped.
    fn reset(&mut self, order: &ResetOrder, report: &DeviceReport) -> Result<(), ResetError> {
        if !self.source.let_go() {
            return Err(ResetError::Busy("a call of our own into the driver has not returned".to_owned()));
        }
        reset::idle(reading_of(order, report), holders(&self.reset, order.address))?;
        // Who reset what stands in the journal also if we do not live to see the end of it.
        let _ = self.report(Input::ResetBegins(order.clone()));
        reset_now(&self.reset, &order.uuid)?;
        let mut outcome = Ok(());
        for again in 0..TRIES_AFTER_A_RESET {
            if again > 0 {
                std::thread::sleep(BETWEEN_TRIES);
            }
            outcome = reset::helped(order, &self.source.sample(clock::mono()));
            if outcome.is_ok() {
                break;
            }
            self.source.let_go();
        }
        outcome
    }
}

fn reading_of<'a>(order: &ResetOrder, report: &'a DeviceReport) -> Option<&'a GpuReading> {
    let DeviceReport::Answered(ProbeAnswer::Gpus { gpus, .. }) = report else { return None };
    gpus.iter().find(|gpu| gpu.identity.as_ref().is_some_and(|of| of.uuid == order.uuid))
}
