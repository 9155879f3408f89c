//! The GPUs' sensing on a thread of its own: the driver may take as long as it likes.

use std::io::{PipeReader, PipeWriter, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::board::Roster;
use crate::node::Input;
use crate::os::clock;
use crate::source::device::{DeviceSource, ProbePlan, Waited};

/// The room's name on the roster.
const ROOM: &str = "devices";

/// After an event the GPUs are read at once, but not more often than this.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);

/// Sensing under way; it ends when this is dropped.
#[derive(Debug)]
pub struct Probing {
    stop: PipeWriter,
}

impl Probing {
    /// A way to have the driver asked at once: by a byte into it. Sensing ends when this is dropped too.
    ///
    /// # Errors
    /// The kernel gives no more descriptors.
    pub fn nudge(&self) -> std::io::Result<PipeWriter> {
        self.stop.try_clone()
    }
}

/// Asks the driver now and every `interval`, passes on what it tells unasked, and tells the node.
///
/// # Errors
/// The kernel gives no more threads or descriptors.
pub fn probe(
    plan: ProbePlan,
    interval: Duration,
    inputs: mpsc::Sender<Input>,
    roster: Roster,
) -> std::io::Result<Probing> {
    let (stop, stop_writer) = std::io::pipe()?;
    roster.begins(ROOM, clock::mono());
    let ask = move || {
        let mut source = DeviceSource::new(plan);
        while look(&mut source, &stop, interval, &inputs, &roster).is_some() {}
    };
    std::thread::Builder::new().name("devices".to_owned()).spawn(ask)?;
    Ok(Probing { stop: stop_writer })
}

/// One sample, and the wait for the next. None when it is over.
fn look(
    source: &mut DeviceSource,
    stop: &PipeReader,
    interval: Duration,
    inputs: &mpsc::Sender<Input>,
    roster: &Roster,
) -> Option<()> {
    let tell = |input| inputs.blocking_send(input).ok();
    let (at, began) = (clock::mono(), Instant::now());
    roster.begins(ROOM, at);
    let report = source.sample(at);
    tell(Input::Devices { began: at, report })?;
    tell(Input::Looked { room: ROOM.to_owned(), components: Vec::new() })?;
    // A driver that takes its time is left alone for half the interval at least.
    let took = began.elapsed();
    let mut next = Instant::now() + interval - took.min(interval / 2);
    loop {
        match source.wait(stop.as_fd(), next.saturating_duration_since(Instant::now())) {
            Waited::Over => return Some(()),
            // A byte asks for a look at once; the other end gone is the end.
            Waited::Stopped => return matches!((&*stop).read(&mut [0; 16]), Ok(1..)).then_some(()),
            Waited::Told(events) => {
                tell(Input::GpuEvents(events))?;
                // What the event did to the counters is not left until the next look.
                next = next.min(began + took + AT_MOST_EVERY);
            }
        }
    }
}
