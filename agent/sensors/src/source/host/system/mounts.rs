//! Network file systems: which are mounted, and whether they answer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_health::host::os::{MountReading, MountState};
use mainstay_health::parse::mounts::{Mount, NETWORK, parse_mounts};
use mainstay_model::time::{Mono, Span};

use super::SystemPlan;
use super::child::PendingRequest;

/// At most this many network file systems are asked: a host of many containers has hundreds.
const MAX_MOUNTS: usize = 32;

/// How long a look waits for all requests together; later answers are read at the next look.
const POLL_TIMEOUT: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct MountProbes {
    program: PathBuf,
    every: Span,
    deadline: Span,
    exclude: Vec<PathBuf>,
    kinds: BTreeSet<String>,
    probes: BTreeMap<PathBuf, Probe>,
}

#[derive(Debug, Default)]
struct Probe {
    asked: Option<PendingRequest>,
    last: Option<(Mono, Result<(), String>)>,
    /// The first of the requests in a row that were not answered.
    silent_since: Option<Mono>,
}

impl MountProbes {
    pub(super) fn new(plan: &SystemPlan) -> MountProbes {
        let span = |time: Duration| Span(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let kinds = NETWORK.iter().map(|kind| (*kind).to_owned()).chain(plan.file_systems.iter().cloned());
        MountProbes {
            program: plan.program.clone(),
            every: span(plan.ask_mounts_every),
            deadline: span(plan.mount_deadline),
            exclude: plan.exclude_mounts.clone(),
            kinds: kinds.collect(),
            probes: BTreeMap::new(),
        }
    }

    pub(super) fn poll(&mut self, now: Mono, proc: &Path) -> Vec<MountReading> {
        let table = std::fs::read_to_string(proc.join("self/mountinfo")).unwrap_or_default();
        let mounts = self.of_interest(parse_mounts(&table));
        // Keep a probe that hangs after its mount is gone: if it is mounted again, it is not asked a second time.
        self.probes
            .retain(|point, probe| probe.asked.is_some() || mounts.iter().any(|mount| mount.point == *point));
        for mount in &mounts {
            let probe = self.probes.entry(mount.point.clone()).or_default();
            probe.ask(&self.program, &mount.point, now, self.every);
        }
        let mut patience = POLL_TIMEOUT;
        for probe in self.probes.values_mut() {
            let started = std::time::Instant::now();
            probe.receive(now, self.deadline, patience);
            patience = patience.saturating_sub(started.elapsed());
        }
        let reading = |mount: Mount| {
            let state = self
                .probes
                .get(&mount.point)
                .map_or(MountState::Asked, |probe| probe.state(now, self.every, self.deadline));
            MountReading {
                point: mount.point.display().to_string(),
                kind: mount.kind,
                from: mount.from,
                state,
            }
        };
        mounts.into_iter().map(reading).collect()
    }

    /// The network file systems, each at one of its mounts: one that is bound into a hundred containers is asked once.
    fn of_interest(&self, mounts: Vec<Mount>) -> Vec<Mount> {
        let mut by_device: BTreeMap<String, Mount> = BTreeMap::new();
        for mount in mounts {
            let excluded = self.exclude.iter().any(|path| mount.point.starts_with(path));
            if excluded || !self.kinds.contains(&mount.kind) {
                continue;
            }
            let known = by_device.get(&mount.device);
            let shorter =
                known.is_none_or(|known| mount.point.as_os_str().len() < known.point.as_os_str().len());
            if shorter {
                by_device.insert(mount.device.clone(), mount);
            }
        }
        let mut mounts: Vec<Mount> = by_device.into_values().collect();
        mounts.sort_by(|one, other| one.point.cmp(&other.point));
        mounts.truncate(MAX_MOUNTS);
        mounts
    }
}

impl Probe {
    /// Asks it, unless a request is pending or it has answered recently.
    fn ask(&mut self, program: &Path, point: &Path, now: Mono, every: Span) {
        let lately = self.last.as_ref().is_some_and(|(at, _)| now.since(*at) < every);
        if self.asked.is_some() || (lately && self.silent_since.is_none()) {
            return;
        }
        let Some(path) = point.to_str() else {
            self.last = Some((now, Err("its name is not text".to_owned())));
            return;
        };
        match PendingRequest::start(program, &["probe", "mount", path], now) {
            Ok(asked) => {
                self.silent_since.get_or_insert(now);
                self.asked = Some(asked);
            }
            // A failure to start a process is no failure of the file system.
            Err(error) => tracing::warn!(%error, "no process can be started to ask file systems"),
        }
    }

    fn receive(&mut self, now: Mono, deadline: Span, patience: Duration) {
        let Some(asked) = &mut self.asked else { return };
        match asked.answer(patience) {
            Some(answer) => {
                let killed = asked.was_killed();
                self.asked = None;
                if killed && answer.is_err() {
                    return;
                }
                self.silent_since = None;
                let answer = match answer.as_deref().map(str::trim) {
                    Ok("ok") => Ok(()),
                    Ok(why) => Err(why.to_owned()),
                    Err(error) => Err(error.to_string()),
                };
                self.last = Some((now, answer));
            }
            None if now.since(asked.at) >= deadline => asked.kill(),
            None => {}
        }
    }

    fn state(&self, now: Mono, every: Span, deadline: Span) -> MountState {
        // An answer is valid until the next one is due: requests may become impossible.
        let good_for = every.plus(every).plus(deadline);
        match (self.silent_since, &self.last) {
            (Some(since), _) if now.since(since) >= deadline => MountState::Silent { since },
            (_, Some((at, _))) if self.asked.is_none() && now.since(*at) > good_for => MountState::Asked,
            (_, Some((_, Ok(())))) => MountState::Answers,
            (_, Some((_, Err(why)))) => MountState::Fails(why.clone()),
            (_, None) => MountState::Asked,
        }
    }
}
