//! Tracks which step has its copies on other hosts. The pool keeps that step until a newer one has them, and people see it.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mainstay_checkpoint::copied_step::CopiedStep;
use mainstay_checkpoint::inventory::{Copy, StepKey};
use mainstay_checkpoint::lag::LagReason;
use mainstay_tier::peer::Service;
use mainstay_tier::pool::PoolView;

/// How long a newer step may lack its copies before that is reported.
const COPIED_WITHIN: Duration = Duration::from_secs(60);

/// How often to check whether a newer step waits for its copies.
const CHECKED_EVERY: Duration = Duration::from_secs(1);

/// How often the newest step with its copies is written to the journal.
const RECORDED_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) enum CopyNews {
    /// The first step of which each shard has its copy.
    First(u64),
    /// The newest such step. Not reported for each step.
    Newest(CopiedStep),
    /// No newer step has its copies, and why.
    Behind(String),
}

/// Reports to the pool which step has its copies, while the service exists. Without a view, only what is kept for others follows.
pub(crate) fn keep_what_is_copied(
    service: &Weak<Service>,
    view: Option<&PoolView>,
    (launch, every): (&str, Duration),
    stop: &AtomicBool,
    report: &dyn Fn(CopyNews),
) {
    let mut copies = Copies::new(Instant::now());
    while let Some(service) = service.upgrade().filter(|_| !stop.load(Ordering::SeqCst)) {
        let now = Instant::now();
        let copied = service.copied(launch);
        let newer = copied.iter().take_while(|at| Some(**at) > copies.newest);
        let stays = |at: &(u64, u64)| {
            // Saves that are faster than copies have overwritten it in memory, and its files on the disk are held.
            view.is_none_or(|view| view.copied(at.0, at.1)) || service.keep_from_files(launch, *at)
        };
        if let Some(at) = newer.copied().find(stays) {
            service.keep_from(launch, at);
            copies.advanced(at, now, report);
        } else if copies.is_to_be_checked(now) {
            copies.check(now, saved_after(&service, launch, copies.newest));
            if copies.are_behind(now) {
                copies.behind(why_not_copied(&service, copies.newest), report);
            }
        }
        copies.record(now, report);
        drop(service);
        std::thread::sleep(every);
    }
}

/// What was reported of the newest step with its copies. Each change is reported once.
struct Copies {
    /// Attempt and step.
    newest: Option<(u64, u64)>,
    checked: Instant,
    /// Since when a newer step without copies has been saved here.
    awaited_since: Option<Instant>,
    recorded: Option<((u64, u64), Instant)>,
    is_behind: bool,
}

impl Copies {
    fn new(now: Instant) -> Copies {
        Copies { newest: None, checked: now, awaited_since: None, recorded: None, is_behind: false }
    }

    fn advanced(&mut self, at: (u64, u64), now: Instant, report: &dyn Fn(CopyNews)) {
        if self.newest.is_none() {
            report(CopyNews::First(at.1));
        }
        (self.newest, self.checked, self.awaited_since, self.is_behind) = (Some(at), now, None, false);
    }

    fn is_to_be_checked(&self, now: Instant) -> bool {
        !self.is_behind && now.duration_since(self.checked) >= CHECKED_EVERY
    }

    fn check(&mut self, now: Instant, newer_is_saved: bool) {
        self.checked = now;
        self.awaited_since = newer_is_saved.then(|| self.awaited_since.unwrap_or(now));
    }

    fn are_behind(&self, now: Instant) -> bool {
        self.awaited_since.is_some_and(|since| now.duration_since(since) >= COPIED_WITHIN)
    }

    fn behind(&mut self, why: String, report: &dyn Fn(CopyNews)) {
        self.is_behind = true;
        report(CopyNews::Behind(why));
    }

    fn record(&mut self, now: Instant, report: &dyn Fn(CopyNews)) {
        let Some(newest) = self.newest else { return };
        let is_due =
            self.recorded.is_none_or(|(of, at)| of != newest && now.duration_since(at) >= RECORDED_EVERY);
        if is_due {
            self.recorded = Some((newest, now));
            let (attempt, step) = newest;
            report(CopyNews::Newest(CopiedStep { attempt, step }));
        }
    }
}

/// Whether ranks of this host have saved a newer step.
fn saved_after(service: &Service, launch: &str, newest: Option<(u64, u64)>) -> bool {
    let of_launch = |copy: &&Copy| copy.own && copy.shard.key.run == launch;
    service.copies().iter().filter(of_launch).any(|copy| {
        let StepKey { attempt, step, .. } = copy.shard.key;
        Some((attempt, step)) > newest
    })
}

/// Why the copies are missing, as far as known, and what to do.
fn why_not_copied(service: &Service, newest: Option<(u64, u64)>) -> String {
    let (reason, why) = service.delay();
    let advice = match reason {
        LagReason::Peer => "Check that all ports between the hosts are open",
        LagReason::Slowdown | LagReason::Measurement | LagReason::Speed => {
            "Save less often: mainstay.checkpoint.due() follows the advised interval"
        }
    };
    let which = newest.map_or("no step".to_owned(), |(_, step)| format!("no step after {step}"));
    let seconds = COPIED_WITHIN.as_secs();
    format!(
        "checkpoint: {which} has a copy of each shard on another host yet, for {seconds} s ({why}). {advice}"
    )
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn copies_are_behind_a_minute_after_a_save_and_not_a_minute_after_the_last_copy() {
        let updates = RefCell::new(Vec::new());
        let report = |update| updates.borrow_mut().push(update);
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut copies = Copies::new(begin);
        copies.advanced((0, 7), at(1), &report);
        // Half an hour of training without a save, then one.
        for second in (2..1800).step_by(10) {
            copies.check(at(second), false);
            assert!(!copies.are_behind(at(second)));
        }
        copies.check(at(1800), true);
        assert!(!copies.are_behind(at(1800)), "it has only just been saved");
        copies.check(at(1861), true);
        assert!(copies.are_behind(at(1861)));
        copies.behind("why".to_owned(), &report);
        assert!(!copies.is_to_be_checked(at(4000)), "it is reported once");
        copies.advanced((0, 8), at(4001), &report);
        assert!(!copies.are_behind(at(4001)) && copies.is_to_be_checked(at(4003)));
        assert!(matches!(&updates.borrow()[..], [CopyNews::First(7), CopyNews::Behind(_)]));
    }

    #[test]
    fn a_step_is_recorded_at_once_and_then_at_most_every_ten_seconds() {
        let recorded = RefCell::new(Vec::new());
        let report = |update| {
            if let CopyNews::Newest(of) = update {
                recorded.borrow_mut().push(of.step);
            }
        };
        let begin = Instant::now();
        let mut copies = Copies::new(begin);
        for second in 0..25 {
            let now = begin + Duration::from_secs(second);
            copies.advanced((0, second), now, &report);
            copies.record(now, &report);
        }
        assert_eq!(*recorded.borrow(), [0, 10, 20]);
    }
}
