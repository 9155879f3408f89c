//! A writer that never blocks its callers: a separate thread writes what it receives. If that thread is blocked,
//! lines are queued up to a limit and then dropped, and the number of dropped lines is reported.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::time::Duration;

/// Lines that may queue for a terminal.
const MAX_QUEUED_LINES: usize = 1024;

enum Order {
    Write(Vec<u8>),
    /// Answered when everything before it is written.
    Flush(Sender<()>),
}

/// The end that writers use.
#[derive(Clone, Debug)]
pub(super) struct Behind {
    orders: SyncSender<Order>,
    left_out: Arc<AtomicU64>,
}

impl Behind {
    /// Writes to `target` from a thread. If the kernel cannot create it, everything is dropped.
    pub(super) fn start(target: impl Write + Send + 'static) -> Behind {
        let (orders, received) = sync_channel(MAX_QUEUED_LINES);
        let left_out = Arc::new(AtomicU64::new(0));
        let behind = Behind { orders, left_out: Arc::clone(&left_out) };
        // Without the thread the receiver is gone, and written lines are only counted.
        let _ = std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || write_behind(target, &received, &left_out));
        behind
    }

    /// Waits until everything is written, at most this long.
    pub(super) fn flush(&self, patience: Duration) {
        let (done, wait) = channel();
        // Without room the terminal is stuck, and waiting would not help.
        if self.orders.try_send(Order::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(patience);
        }
    }
}

impl Write for Behind {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match self.orders.try_send(Order::Write(line.to_vec())) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.left_out.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_behind(mut target: impl Write, orders: &Receiver<Order>, left_out: &AtomicU64) {
    while let Ok(order) = orders.recv() {
        match order {
            Order::Write(line) => {
                // A closed terminal is no reason to end.
                let _ = target.write_all(&line);
            }
            Order::Flush(done) => {
                let _ = done.send(());
            }
        }
        let lost = left_out.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let _ = writeln!(target, "{lost} lines of the log were left out: no process read them");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]

    use std::io::{BufRead, BufReader};

    use super::*;

    #[test]
    fn lines_are_whole_and_in_order_and_a_flush_waits_for_them() {
        let (reader, writer) = io::pipe().unwrap();
        let mut behind = Behind::start(writer);
        (0..100).for_each(|number| writeln!(&mut behind, "line {number}").unwrap());
        behind.flush(Duration::from_secs(60));
        drop(behind);
        let lines: Vec<String> = BufReader::new(reader).lines().map(Result::unwrap).collect();
        let wanted: Vec<String> = (0..100).map(|number| format!("line {number}")).collect();
        assert_eq!(lines, wanted);
    }

    #[test]
    fn an_absent_reader_blocks_no_one_and_dropped_lines_are_counted() {
        let (reader, writer) = io::pipe().unwrap();
        let mut behind = Behind::start(writer);
        // More than a pipe and the queue hold: a blocking writer would never finish.
        let line = [b"x".repeat(1023), b"\n".to_vec()].concat();
        let all = 4 * MAX_QUEUED_LINES;
        (0..all).for_each(|_| behind.write_all(&line).unwrap());
        drop(behind);
        let lines: Vec<String> = BufReader::new(reader).lines().map(Result::unwrap).collect();
        let (reported, whole): (Vec<&String>, Vec<&String>) =
            lines.iter().partition(|line| line.contains("left out"));
        let lost: usize =
            reported.iter().map(|line| line.split(' ').next().unwrap().parse::<usize>().unwrap()).sum();
        assert!(lost > 0);
        assert_eq!(whole.len() + lost, all);
    }
}
