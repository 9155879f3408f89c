//! The signals that end a job, and those that ask it to save.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Catches these signals.
pub(crate) fn caught(which: &[i32]) -> std::io::Result<mpsc::Receiver<i32>> {
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
