//! The recovery ladder: the actions for a failure, mildest first.

use serde::{Deserialize, Serialize};

/// A rung of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rung {
    /// 0: all ranks leave their attempt and start again in the same processes.
    InProcess,
    /// 1: ranks that are gone or excluded are restarted; the others wait for them in their processes.
    Ranks,
    /// 2: all ranks of this host are restarted; those of other hosts wait in their processes.
    Host,
    /// 3: all ranks are restarted.
    All,
    /// 4: a spare host replaces this one.
    Replace,
    /// 5: the job continues with fewer ranks.
    Shrink,
    /// 6: the job exits with the status that asks the scheduler to start it on another host.
    HandBack,
    /// 7: the job ends; a person has to act first.
    Stop,
}

impl Rung {
    /// All rungs, mildest first.
    pub const ALL: [Rung; 8] = [
        Rung::InProcess,
        Rung::Ranks,
        Rung::Host,
        Rung::All,
        Rung::Replace,
        Rung::Shrink,
        Rung::HandBack,
        Rung::Stop,
    ];

    /// Whether the job continues on its present host.
    pub fn stays(self) -> bool {
        self <= Rung::All
    }

    /// Whether the job continues.
    pub fn goes_on(self) -> bool {
        self < Rung::HandBack
    }

    /// The action, in words.
    pub fn describe(self) -> &'static str {
        match self {
            Rung::InProcess => "restarting in process",
            Rung::Ranks => "starting the lost ranks again",
            Rung::Host => "starting this host's ranks again",
            Rung::All => "restarting all ranks",
            Rung::Replace => "replacing the host by a spare",
            Rung::Shrink => "going on with fewer ranks",
            Rung::HandBack => "handing the job back to the scheduler",
            Rung::Stop => "stopping",
        }
    }
}

/// The available rungs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<Rung>", into = "Vec<Rung>")]
pub struct Rungs(u8);

impl From<Vec<Rung>> for Rungs {
    fn from(rungs: Vec<Rung>) -> Rungs {
        rungs.into_iter().fold(Rungs(0), Rungs::with)
    }
}

impl From<Rungs> for Vec<Rung> {
    fn from(rungs: Rungs) -> Vec<Rung> {
        rungs.iter().collect()
    }
}

impl Rungs {
    /// The rungs that are always available on one host: restart all ranks, hand back, stop.
    pub const ONE_HOST: Rungs = Rungs(0).with(Rung::All).with(Rung::HandBack).with(Rung::Stop);

    /// Adds a rung.
    #[must_use]
    pub const fn with(self, rung: Rung) -> Rungs {
        Rungs(self.0 | 1 << rung as u8)
    }

    /// Whether the rung is available.
    pub const fn has(self, rung: Rung) -> bool {
        self.0 & 1 << rung as u8 != 0
    }

    /// The available rungs, mildest first.
    pub fn iter(self) -> impl Iterator<Item = Rung> {
        Rung::ALL.into_iter().filter(move |rung| self.has(*rung))
    }
}
