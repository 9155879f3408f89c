//! The GPUs' sensing on a thread of its own: the driver may take as long as it likes.

use std::sync::mpsc::{RecvTimeoutError, Sender as StopSender, channel};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::board::Roster;
use crate::node::Input;
use crate::os::clock;
use crate::source::device::{DeviceSource, ProbePlan};

/// Sensing under way; it ends when this is dropped.
#[derive(Debug)]
pub struct Probing {
    _stop: StopSender<()>,
}

/// The room's name on the roster.
const ROOM: &str = "devices";

/// Asks the driver now and every `interval`, and tells the node.
///
/// # Errors
/// The kernel gives no more threads.
pub fn probe(
    plan: ProbePlan,
    interval: Duration,
    inputs: mpsc::Sender<Input>,
    roster: Roster,
) -> std::io::Result<Probing> {
    let (stop, stopped) = channel();
    roster.begins(ROOM, clock::mono());
    let ask = move || {
        let mut source = DeviceSource::new(plan);
        loop {
            let at = clock::mono();
            roster.begins(ROOM, at);
            let report = source.sample(at);
            if inputs.blocking_send(Input::Devices(report)).is_err() {
                return;
            }
            let looked = Input::Looked { room: ROOM.to_owned(), components: Vec::new() };
            if inputs.blocking_send(looked).is_err() {
                return;
            }
            match stopped.recv_timeout(interval) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    };
    std::thread::Builder::new().name("devices".to_owned()).spawn(ask)?;
    Ok(Probing { _stop: stop })
}
