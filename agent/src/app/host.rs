//! The host's sensing on a thread of its own: reading files may take long when a file system hangs, and nothing
//! else may wait for that.

use std::sync::mpsc::{RecvTimeoutError, Sender as StopSender, channel};
use std::time::Duration;

use mainstay_core::host::{HostJudge, HostLimits, Judged};
use tokio::sync::mpsc;

use crate::os::clock;
use crate::source::host::HostSource;

/// Sensing under way; it ends when this is dropped.
#[derive(Debug)]
pub struct Sensing {
    _stop: StopSender<()>,
}

/// Looks at the host now and every `interval`, and reports what the judge makes of it.
///
/// # Errors
/// The kernel gives no more threads.
pub fn sense(
    mut source: HostSource,
    limits: HostLimits,
    interval: Duration,
) -> std::io::Result<(Sensing, mpsc::Receiver<Judged>)> {
    let (stop, stopped) = channel();
    // Room for one: a report that nobody took yet is old news, and the next one says it again.
    let (reports, receiver) = mpsc::channel(1);
    let look = move || {
        let mut judge = HostJudge::new(limits);
        loop {
            let at = clock::mono();
            let judged = judge.step(at, &source.sample(at));
            if reports.blocking_send(judged).is_err() {
                return;
            }
            match stopped.recv_timeout(interval) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    };
    std::thread::Builder::new().name("host".to_owned()).spawn(look)?;
    Ok((Sensing { _stop: stop }, receiver))
}
