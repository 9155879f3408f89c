//! The rooms of the agent that watch a part of the host each, on a thread each: one function for a room.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use mainstay_core::host::HostJudge;
use mainstay_core::id::BootId;
use mainstay_core::judged::Judged;
use mainstay_core::observation::Observation;
use mainstay_core::settings::Period;
use mainstay_core::time::{Mono, Stamp};
use tokio::sync::mpsc;

use crate::app::watch::{Watching, watch};
use crate::board::Roster;
use crate::config::Config;
use crate::node::Input;
use crate::os::clock;
use crate::source::host::{HostSource, standard_paths};

/// What the journal holds of what the rooms saw before this start, in any boot, oldest first.
pub type Observed = [Seen];

/// One thing that was seen, when, and in which boot.
pub type Seen = (Stamp, BootId, Observation);

/// Where rooms report to.
pub struct Rooms<'a> {
    config: &'a Config,
    #[expect(dead_code, reason = "for rooms that remember what they saw before a restart")]
    observed: &'a Observed,
    inputs: &'a mpsc::Sender<Input>,
    roster: &'a Roster,
    watching: Vec<Watching>,
}

/// Starts all rooms that are configured; they end when what is returned is dropped.
///
/// # Errors
/// The kernel gives no more threads.
pub fn start(
    config: &Config,
    observed: &Observed,
    inputs: &mpsc::Sender<Input>,
    roster: &Roster,
) -> anyhow::Result<Vec<Watching>> {
    let mut rooms = Rooms { config, observed, inputs, roster, watching: Vec::new() };
    rooms.host()?;
    Ok(rooms.watching)
}

impl Rooms<'_> {
    /// CPU, memory, disks.
    fn host(&mut self) -> anyhow::Result<()> {
        let mut named: Vec<&Path> = vec![&self.config.state_dir];
        named.extend(self.config.host.watch_paths.iter().map(|path| path.as_path()));
        let mut source = HostSource::new(self.config.host_roots(), standard_paths(&named));
        let mut judge = HostJudge::new(self.config.host.limits.clone());
        self.watch("host", self.config.host.interval, move |at| judge.step(at, &source.sample(at)))
    }

    fn watch(
        &mut self,
        name: &str,
        interval: Period,
        mut look: impl FnMut(Mono) -> Judged + Send + 'static,
    ) -> anyhow::Result<()> {
        let (inputs, roster, room) = (self.inputs.clone(), self.roster.clone(), name.to_owned());
        roster.begins(name, clock::mono());
        roster.expect(name, clock::mono(), interval.0);
        let begun = room.clone();
        let look = move |at| {
            roster.begins(&begun, at);
            look(at)
        };
        let tell = move |judged: Judged| {
            let components = judged.components.iter().map(|component| component.name.clone()).collect();
            let looked = Input::Looked { room: room.clone(), components };
            inputs.blocking_send(Input::Sensed(judged)).is_ok() && inputs.blocking_send(looked).is_ok()
        };
        let watching = watch(name, Duration::from_nanos(interval.0.0), look, tell)
            .with_context(|| format!("starting the thread that watches: {name}"))?;
        self.watching.push(watching);
        Ok(())
    }
}
