//! The signals that end a job.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// The signals that ask the launcher to stop.
pub(super) fn signals(which: &[i32]) -> std::io::Result<mpsc::Receiver<i32>> {
    let (sender, receiver) = mpsc::channel(8);
    for kind in which.iter().map(|signal| SignalKind::from_raw(*signal)) {
        let mut arrivals = signal(kind)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while arrivals.recv().await.is_some() {
                if sender.send(kind.as_raw_value()).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(receiver)
}
