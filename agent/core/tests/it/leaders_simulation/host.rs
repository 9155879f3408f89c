//! A launcher with its ranks, and what it has if it leads.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use mainstay_core::base::id::{Attempt, Rank};
use mainstay_core::base::time::Mono;
use mainstay_core::recovery::hosts::merge::{Merge, Next};
use mainstay_core::recovery::hosts::round::Seated;
use mainstay_core::recovery::hosts::sequence::{Inbox, Outbox};
use mainstay_core::recovery::hosts::succession::Standing;
use mainstay_core::recovery::hosts::wire::{Command, Report};
use mainstay_core::recovery::job::{Job, Order};

/// What a launcher has that leads, or takes itself for the leader.
pub(super) struct Leader {
    pub(super) job: Job,
    pub(super) merge: Merge,
    pub(super) next: VecDeque<Next>,
    pub(super) epoch: u64,
    pub(super) links: Vec<Link>,
    pub(super) timers: BTreeSet<Mono>,
    pub(super) consulted: bool,
    /// Orders that wait until the record is stored.
    pub(super) held: VecDeque<Order>,
    pub(super) over: Option<i32>,
}

pub(super) fn leader(job: Job, merge: Merge, epoch: u64) -> Leader {
    let links = merge.seats().map(|seated| Link::new(&seated.member.launcher)).collect();
    Leader {
        job,
        merge,
        next: VecDeque::new(),
        epoch,
        links,
        timers: BTreeSet::new(),
        consulted: false,
        held: VecDeque::new(),
        over: None,
    }
}

pub(super) struct Link {
    /// Whose it is.
    pub(super) launcher: String,
    pub(super) reports_in: Inbox,
    pub(super) commands: Outbox<Command>,
}

impl Link {
    pub(super) fn new(launcher: &str) -> Link {
        Link { launcher: launcher.to_owned(), reports_in: Inbox::default(), commands: Outbox::new(100_000) }
    }
}

/// One launcher with its ranks.
pub(super) struct Host {
    pub(super) seated: Seated,
    pub(super) living: BTreeMap<Rank, Attempt>,
    pub(super) waiting: BTreeSet<Rank>,
    pub(super) attempt: Option<Attempt>,
    /// What was seen of the attempt, for the next leader.
    pub(super) log: Vec<Report>,
    /// Whom it follows, and since when by epoch.
    pub(super) follows: (usize, u64),
    /// The launcher that is.
    pub(super) leader: String,
    pub(super) reports: Outbox<Report>,
    pub(super) commands_in: Inbox,
    pub(super) up: VecDeque<(u64, Report)>,
    pub(super) down: VecDeque<(u64, u64, Command)>,
    pub(super) connected: bool,
    /// The launcher is gone, and its ranks with it.
    pub(super) crashed: bool,
    /// The launcher does nothing at the moment; its ranks live.
    pub(super) stalled: bool,
    /// It does not reach the store.
    pub(super) cut: bool,
    pub(super) finished: Option<i32>,
    pub(super) leads: Option<Box<Leader>>,
}

impl Host {
    pub(super) fn new(seated: Seated, follows: (usize, u64), leader: &str) -> Host {
        Host {
            leader: leader.to_owned(),
            seated,
            living: BTreeMap::new(),
            waiting: BTreeSet::new(),
            attempt: None,
            log: Vec::new(),
            follows,
            reports: Outbox::new(100_000),
            commands_in: Inbox::default(),
            up: VecDeque::new(),
            down: VecDeque::new(),
            connected: false,
            crashed: false,
            stalled: false,
            cut: false,
            finished: None,
            leads: None,
        }
    }

    pub(super) fn ranks(&self) -> Vec<Rank> {
        let first = self.seated.seat.first_rank;
        (first..first + self.seated.member.ranks).map(Rank).collect()
    }

    pub(super) fn standing(&self) -> Standing<'_> {
        match &self.leads {
            Some(leader) => Standing::Leads { epoch: leader.epoch },
            None => Standing::Follows { leader: &self.leader, epoch: self.follows.1 },
        }
    }

    pub(super) fn runs(&self) -> bool {
        !self.crashed && !self.stalled
    }

    pub(super) fn disconnect(&mut self) {
        self.connected = false;
        self.up.clear();
        self.down.clear();
    }

    /// The launcher ends, and its ranks die.
    pub(super) fn crash(&mut self) {
        self.disconnect();
        self.living.clear();
        self.waiting.clear();
        (self.crashed, self.stalled, self.leads) = (true, false, None);
    }

    /// Follows another leader: all that was seen is reported again.
    pub(super) fn follow(&mut self, follows: (usize, u64), leader: &str) {
        self.disconnect();
        self.follows = follows;
        leader.clone_into(&mut self.leader);
        (self.reports, self.commands_in) = (Outbox::new(100_000), Inbox::default());
        for report in self.log.clone() {
            self.reports.push(report).expect("room");
        }
    }
}
