//! One thread for each sensor that watches a part of the host: a reading may take long if a file system or a driver
//! hangs, and nothing else may wait for it.

use std::sync::mpsc::{RecvTimeoutError, Sender as StopSender, channel};
use std::time::Duration;

use mainstay_model::report::SensorReport;
use mainstay_model::time::Mono;

use mainstay_sys::clock;

/// Running watch; it ends when this is dropped.
#[derive(Debug)]
pub struct Watching {
    _stop: StopSender<()>,
}

/// Looks now and every `interval`, and passes the results to `report` until it returns that no one receives them any
/// more.
///
/// # Errors
/// The kernel cannot create a thread.
pub fn watch(
    name: &str,
    interval: Duration,
    mut look: impl FnMut(Mono) -> SensorReport + Send + 'static,
    mut report: impl FnMut(SensorReport) -> bool + Send + 'static,
) -> std::io::Result<Watching> {
    let (stop, stopped) = channel();
    let repeat = move || {
        while report(look(clock::mono())) {
            match stopped.recv_timeout(interval) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(repeat)?;
    Ok(Watching { _stop: stop })
}
