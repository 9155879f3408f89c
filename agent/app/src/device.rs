//! Reads the GPUs on a separate thread: the driver may take as long as it needs.

use std::io::{PipeReader, PipeWriter, Read};
use std::os::fd::AsFd;
use std::sync::mpsc as orders;
use std::time::{Duration, Instant};

use mainstay_health::hardware::gpu::reset::{self, ResetError, ResetOrder};
use mainstay_health::hardware::gpu::{DeviceReport, GpuReading, ProbeAnswer};
use tokio::sync::mpsc;

use crate::reset::{ResetPlan, holders, reset as reset_now};
use mainstay_journal::state::Roster;
use mainstay_node::Input;
use mainstay_sensors::source::device::{DeviceSource, ProbePlan, Waited};
use mainstay_sys::clock;

/// The sensor's name on the roster.
const SENSOR: &str = "devices";

/// After an event the GPUs are read at once, but not more often than this.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);

/// After a reset the driver may need a moment: number of attempts, and the time between them.
const TRIES_AFTER_A_RESET: u32 = 5;
const BETWEEN_TRIES: Duration = Duration::from_secs(1);

/// Running sensing; it ends when this is dropped.
#[derive(Debug)]
pub struct Probing {
    stop: PipeWriter,
    resets: orders::Sender<ResetOrder>,
}

impl Probing {
    /// Returns a pipe: a byte written to it makes the driver be read at once. Sensing also ends when this is
    /// dropped.
    ///
    /// # Errors
    /// The kernel provides no more descriptors.
    pub fn nudge(&self) -> std::io::Result<PipeWriter> {
        self.stop.try_clone()
    }

    /// A channel for GPU resets: the probe has the GPUs open, so its thread does the reset.
    pub fn resets(&self) -> orders::Sender<ResetOrder> {
        self.resets.clone()
    }
}

/// The state of the thread.
struct Sensor {
    source: DeviceSource,
    stop: PipeReader,
    interval: Duration,
    inputs: mpsc::Sender<Input>,
    roster: Roster,
    reset: ResetPlan,
    resets: orders::Receiver<ResetOrder>,
}

/// Reads the driver now and every `interval`, passes on events of the driver, runs requested resets, and reports to
/// the node.
///
/// # Errors
/// The kernel provides no more threads or descriptors.
pub fn probe(
    plan: ProbePlan,
    reset: ResetPlan,
    interval: Duration,
    inputs: mpsc::Sender<Input>,
    roster: Roster,
) -> std::io::Result<Probing> {
    let (stop, stop_writer) = std::io::pipe()?;
    let (ordered, resets) = orders::channel();
    roster.starts(SENSOR, clock::mono());
    let ask = move || {
        let mut sensor =
            Sensor { source: DeviceSource::new(plan), stop, interval, inputs, roster, reset, resets };
        while sensor.look().is_some() {}
    };
    std::thread::Builder::new().name("devices".to_owned()).spawn(ask)?;
    Ok(Probing { stop: stop_writer, resets: ordered })
}

impl Sensor {
    /// Takes one sample and waits for the next. None at the end.
    fn look(&mut self) -> Option<()> {
        let (at, began) = (clock::mono(), Instant::now());
        self.roster.starts(SENSOR, at);
        let report = self.source.sample(at);
        self.report(Input::Devices { began: at, report: report.clone() })?;
        self.report(Input::Looked { sensor: SENSOR.to_owned(), components: Vec::new() })?;
        if let Ok(order) = self.resets.try_recv() {
            let outcome = self.reset(&order, &report);
            // The GPU's new state is reported before the result of its reset: the next look is at once.
            let began = clock::mono();
            let report = self.source.sample(began);
            self.report(Input::Devices { began, report })?;
            return self.report(Input::GpuReset { order, outcome });
        }
        // A slow driver is left alone for at least half the interval.
        let took = began.elapsed();
        let mut next = Instant::now() + self.interval - took.min(self.interval / 2);
        loop {
            match self.source.wait(self.stop.as_fd(), next.saturating_duration_since(Instant::now())) {
                Waited::Over => return Some(()),
                // A byte requests a look at once; a closed pipe is the end.
                Waited::Stopped => return matches!((&self.stop).read(&mut [0; 16]), Ok(1..)).then_some(()),
                Waited::Reported(events) => {
                    self.report(Input::GpuEvents(events))?;
                    // The effect of the event on the counters is read soon, not only at the next look.
                    next = next.min(began + took + AT_MOST_EVERY);
                }
            }
        }
    }

    fn report(&self, input: Input) -> Option<()> {
        self.inputs.blocking_send(input).ok()
    }

    /// Resets a GPU that is idle according to the report and the kernel, and checks whether that helped.
    fn reset(&mut self, order: &ResetOrder, report: &DeviceReport) -> Result<(), ResetError> {
        if !self.source.let_go() {
            return Err(ResetError::Busy("a call of our own into the driver has not returned".to_owned()));
        }
        reset::idle(reading_of(order, report), holders(&self.reset, order.address))?;
        // The journal has who reset which GPU, even if the agent dies before the reset is complete.
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
    gpus.iter().find(|gpu| gpu.identity.as_ref().is_some_and(|identity| identity.uuid == order.uuid))
}
