//! The agent's sensors, each of which watches a part of the host on its own thread: one function for each sensor.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use mainstay_checkpoint::divergence::{REPLICAS, ReplicaDivergence};
use mainstay_checkpoint::eligibility::PlacementEligibility;
use mainstay_hang::nccl_ras::{NcclJudge, RasReply};
use mainstay_health::hardware::dcgm::{DcgmJudge, ExporterJudge};
use mainstay_health::hardware::tpu::{self, TpuJudge};
use mainstay_health::host::cloud::CloudJudge;
use mainstay_health::host::fabric::{FabricJudge, LearnedLinks};
use mainstay_health::host::os::{HostJudge, SystemJudge};
use mainstay_model::entry::Fact;
use mainstay_model::id::{BootId, Pid};
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::report::SensorReport;
use mainstay_model::time::{Mono, Stamp};
use mainstay_model::units::Period;
use mainstay_tier::peer::{Service, WatchedDirectory};
use mainstay_view::node::JobPhase;
use mainstay_view::placement::placement_eligibility;
use tokio::sync::mpsc;

use crate::catalog;
use crate::watch::{Watching, watch};
use mainstay_journal::state::{Roster, StateReader};
use mainstay_journal::store::value_file::ValueFile;
use mainstay_node::Input;
use mainstay_node::config::{CloudProvider, Config, DcgmConfig, DcgmMode, NcclConfig, TpuConfig};
use mainstay_sensors::source::cloud::{CloudSource, Provider};
use mainstay_sensors::source::dcgm::{DcgmPlan, DcgmSource, scrape};
use mainstay_sensors::source::fabric::FabricSource;
use mainstay_sensors::source::host::{HostSource, SystemSource, standard_paths};
use mainstay_sensors::source::nccl_ras;
use mainstay_sensors::source::tpu::{TpuPlan, TpuSource};
use mainstay_sys::clock;

/// Events: ranks saved different bytes of the same content; copies do not keep up; copies have caught up.
const REPLICAS_DIFFER: &str = "replicas_differ";
const COPIES_BEHIND: &str = "copies_behind";
const COPIES_CAUGHT_UP: &str = "copies_caught_up";

/// How long libtpu, NCCL's RAS service and DCGM may take to answer.
const TPU_DEADLINE: Duration = Duration::from_secs(2);
const NCCL_DEADLINE: Duration = Duration::from_secs(15);
const DCGM_DEADLINE: Duration = Duration::from_secs(10);

/// Observations of the sensors in the journal from before this start, in any boot, oldest first.
pub type Observed = [StampedObservation];

/// One observation with its time and boot.
pub type StampedObservation = (Stamp, BootId, Observation);

/// Where sensors report to.
pub struct SensorStarter<'a> {
    config: &'a Config,
    observed: &'a Observed,
    inputs: &'a mpsc::Sender<Input>,
    roster: &'a Roster,
    watching: Vec<Watching>,
}

/// Starts all configured sensors; they end when the returned value is dropped.
///
/// # Errors
/// The kernel cannot create a thread.
pub fn start(
    config: &Config,
    observed: &Observed,
    inputs: &mpsc::Sender<Input>,
    snapshots: &StateReader,
    replicas: Option<Arc<Service>>,
) -> anyhow::Result<Vec<Watching>> {
    let roster = snapshots.roster();
    let mut sensors = SensorStarter { config, observed, inputs, roster, watching: Vec::new() };
    sensors.host(snapshots)?;
    sensors.system()?;
    sensors.tpu()?;
    sensors.cloud()?;
    sensors.nccl(snapshots)?;
    sensors.fabric()?;
    sensors.dcgm()?;
    sensors.dcgm_exporter()?;
    sensors.replicas(replicas, snapshots)?;
    Ok(sensors.watching)
}

/// The observation for a step in which ranks saved different bytes of the same content.
fn observed(found: &ReplicaDivergence) -> Observation {
    let step = &found.key;
    let mut values: BTreeMap<String, String> = found
        .members
        .iter()
        .map(|member| (format!("rank {}", member.rank), format!("{} {}", member.holder, member.root)))
        .collect();
    values.insert("run".to_owned(), mainstay_checkpoint::owner::name(step.run_id()).to_owned());
    values.insert("step".to_owned(), step.step.to_string());
    values.insert("attempt".to_owned(), step.attempt.to_string());
    values.insert("group".to_owned(), found.group.clone());
    values.extend(uid_of(step.run_id()));
    Observation {
        component: REPLICAS.to_owned(),
        event: REPLICAS_DIFFER.to_owned(),
        weight: Weight::Error,
        detail: found.sentence(),
        values,
    }
}

/// The user of a run, as a value of an observation; none for the agents' own runs.
fn uid_of(run: &str) -> Option<(String, String)> {
    mainstay_checkpoint::owner::owner(run).map(|uid| ("uid".to_owned(), uid.to_string()))
}

/// Observations of replicas that fall behind saves, and that catch up again: one for each change. `behind` has the
/// runs that were reported.
fn lagging(replicas: &Service, behind: &mut BTreeSet<String>) -> Vec<Observation> {
    let lags = replicas.lags();
    behind.retain(|run| lags.iter().any(|lag| lag.copies.run == *run));
    let mut news = Vec::new();
    for lag in lags {
        let (event, weight, detail) = match lag.sentence() {
            Some(sentence) if behind.insert(lag.copies.run.to_string()) => {
                (COPIES_BEHIND, Weight::Warning, sentence)
            }
            None if behind.remove(lag.copies.run.as_str()) => {
                let detail = "checkpoint: a newer step has its copies on peers again".to_owned();
                (COPIES_CAUGHT_UP, Weight::Info, detail)
            }
            _ => continue,
        };
        let name = mainstay_checkpoint::owner::name(&lag.copies.run).to_owned();
        let mut values = BTreeMap::from([
            ("run".to_owned(), name),
            ("reason".to_owned(), lag.reason.as_str().to_owned()),
            ("saved".to_owned(), lag.copies.saved.to_string()),
        ]);
        values.extend(uid_of(&lag.copies.run));
        values.extend(lag.copies.copied.map(|(of, _)| ("step".to_owned(), of.step.to_string())));
        match weight {
            Weight::Warning => tracing::warn!(run = values["run"], "{detail}"),
            _ => tracing::info!(run = values["run"], "{detail}"),
        }
        news.push(Observation {
            component: REPLICAS.to_owned(),
            event: event.to_owned(),
            weight,
            detail,
            values,
        });
    }
    news
}

/// Whether this host is eligible for replicas.
fn standing(snapshots: &StateReader, replicas: &Service) -> PlacementEligibility {
    let watched = replicas.watched();
    placement_eligibility(&snapshots.view(), |job| {
        let of_job = |of: &&WatchedDirectory| of.directory == Path::new(&job.spec.checkpoint_dir);
        watched.iter().find(of_job).map(|watched| watched.run.clone())
    })
}

/// The processes of the jobs that run here.
fn ranks(snapshots: &StateReader) -> Vec<Pid> {
    let view = snapshots.view();
    let open = view.jobs.values().filter(|job| !matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost));
    open.flat_map(|job| job.ranks.values().map(|rank| rank.pid)).collect()
}

impl SensorStarter<'_> {
    /// Ranks that saved different bytes of the same content, replicas that fall behind, and whether this host is
    /// eligible for replicas.
    fn replicas(&mut self, replicas: Option<Arc<Service>>, snapshots: &StateReader) -> anyhow::Result<()> {
        let Some(replicas) = replicas else { return Ok(()) };
        let mut reported: Vec<Observation> = self.observed.iter().map(|(_, _, seen)| seen.clone()).collect();
        reported.retain(|seen| seen.component == REPLICAS && seen.event == REPLICAS_DIFFER);
        let (snapshots, mut behind) = (snapshots.clone(), BTreeSet::new());
        self.watch("replicas", Period::seconds(1), move |_| {
            replicas.stands(standing(&snapshots, &replicas));
            let own = replicas.divergences().into_iter().filter(|found| {
                // Agents without a part in it leave the report to those that have one.
                found.members.iter().any(|member| member.holder == replicas.name())
            });
            let news: Vec<Observation> =
                own.map(|found| observed(&found)).filter(|seen| !reported.contains(seen)).collect();
            reported.extend(news.iter().cloned());
            let news = news.into_iter().chain(lagging(&replicas, &mut behind));
            SensorReport { components: Vec::new(), facts: news.map(Fact::Observed).collect() }
        })
    }

    /// CPU, memory, disks.
    fn host(&mut self, snapshots: &StateReader) -> anyhow::Result<()> {
        let mut named: Vec<&Path> = vec![&self.config.state_dir];
        named.extend(self.config.host.watch_paths.iter().map(|path| path.as_path()));
        let mut source = HostSource::new(self.config.host_roots(), standard_paths(&named));
        let mut judge = HostJudge::new(self.config.limits.host.clone());
        let snapshots = snapshots.clone();
        self.watch("host", self.config.host.interval, move |at| {
            // Their control groups may differ from the agent's, and may be smaller than the host.
            source.watch_processes(ranks(&snapshots));
            judge.step(at, &source.sample(at))
        })
    }

    /// Processes, clocks, network mounts, services and others.
    fn system(&mut self) -> anyhow::Result<()> {
        let mut source = SystemSource::new(self.config.system_plan("/proc/self/exe".into()));
        let mut judge = SystemJudge::new(self.config.limits.host.clone());
        judge.recall(clock::now(), &clock::boot_id(), self.observed);
        self.watch("system", self.config.host.system.interval, move |at| judge.step(at, &source.sample(at)))
    }

    /// TPUs and the readings of libtpu.
    fn tpu(&mut self) -> anyhow::Result<()> {
        let TpuConfig { enabled, endpoints, interval, log_dir } = &self.config.tpu;
        if !enabled {
            return Ok(());
        }
        let mut judge = TpuJudge::new(self.config.limits.tpu.clone());
        let boot = clock::boot_id();
        let mut stalls = BTreeSet::new();
        for (_, _, seen) in self.observed.iter().filter(|(_, seen_in, _)| *seen_in == boot) {
            judge.recall(seen);
            if seen.event == tpu::STALL {
                stalls.extend(seen.values.get("file").cloned());
            }
        }
        let mut source = TpuSource::new(
            TpuPlan {
                sys: self.config.host.sys_root.clone(),
                proc: self.config.host.proc_root.clone(),
                endpoints: endpoints.clone(),
                deadline: TPU_DEADLINE,
                log_dir: log_dir.clone(),
            },
            stalls,
        );
        self.watch("tpu", *interval, move |at| judge.step(at, &source.sample()))
    }

    /// Announcements of the cloud for this machine; machines outside a cloud have no such sensor.
    fn cloud(&mut self) -> anyhow::Result<()> {
        let provider = match self.config.cloud.provider {
            CloudProvider::None => None,
            CloudProvider::Google => Some(Provider::Google),
            CloudProvider::Amazon => Some(Provider::Amazon),
            CloudProvider::Azure => Some(Provider::Azure),
            CloudProvider::Auto => Provider::by_firmware(&self.config.host.sys_root),
        };
        let Some(provider) = provider else { return Ok(()) };
        let mut judge = CloudJudge::new(self.config.limits.host.cloud.clone());
        self.observed.iter().for_each(|(_, _, seen)| judge.recall(seen));
        let mut source = CloudSource::new(provider, &self.config.cloud.metadata)
            .context("starting to follow the cloud's metadata server")?;
        // The server reports changes itself; this interval only concerns this process.
        self.watch("cloud", Period::seconds(1), move |at| judge.step(clock::stamp_of(at), &source.sample()))
    }

    /// The reports of NCCL about the jobs of this host, while there are any.
    fn nccl(&mut self, snapshots: &StateReader) -> anyhow::Result<()> {
        let NcclConfig { address, interval } = self.config.nccl.clone();
        if address.is_empty() {
            return Ok(());
        }
        let mut judge = NcclJudge::new(self.config.limits.nccl.clone());
        let snapshots = snapshots.clone();
        self.watch("nccl", interval, move |at| {
            let runs = snapshots
                .view()
                .jobs
                .values()
                .any(|job| !matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost));
            let asked = if runs { nccl_ras::ask_blocking(&address, NCCL_DEADLINE) } else { RasReply::NoJob };
            judge.step(at, &asked)
        })
    }

    /// InfiniBand, RoCE, Ethernet.
    fn fabric(&mut self) -> anyhow::Result<()> {
        let config = &self.config.fabric;
        if !config.enabled {
            return Ok(());
        }
        let expected =
            config.expected().map_err(anyhow::Error::msg).context("key `fabric.expected_ports`")?;
        let interfaces = expected.iter().filter(|link| !link.name.contains('/'));
        let interfaces = interfaces.map(|link| link.name.clone()).collect();
        let mut source =
            FabricSource::new(self.config.host.sys_root.clone(), config.exclude.clone(), interfaces);
        let mut kept: ValueFile<LearnedLinks> = ValueFile::open(&self.config.state_dir.join("fabric.json"));
        let learned = kept.value().cloned().unwrap_or_default();
        let mut judge =
            FabricJudge::new(self.config.limits.fabric.clone(), clock::boot_id(), expected, learned);
        judge.recall(clock::now(), self.observed);
        self.watch("fabric", config.interval, move |at| {
            if kept.was_deleted() {
                judge.forget();
            }
            let judged = judge.step(at, &source.sample(&judge.places()));
            let known = kept.value().is_some() || !judge.learned().links.is_empty();
            if known && let Err(error) = kept.keep(judge.learned()) {
                tracing::debug!(%error, "the learned state of the network cannot be stored");
            }
            judged
        })
    }

    /// A second opinion on GPUs.
    fn dcgm(&mut self) -> anyhow::Result<()> {
        let DcgmConfig { mode, address, library, policies, interval, .. } = &self.config.dcgm;
        if *mode == DcgmMode::Off {
            return Ok(());
        }
        let expected = *mode != DcgmMode::Auto;
        let mut judge = DcgmJudge::new(catalog::dcgm()?, expected);
        let mut source = DcgmSource::new(DcgmPlan {
            program: "/proc/self/exe".into(),
            library: (!library.as_os_str().is_empty()).then(|| library.clone()),
            address: (*mode != DcgmMode::Embedded).then(|| address.clone()),
            expected,
            sys: self.config.host.sys_root.clone(),
            deadline: DCGM_DEADLINE,
            policies: *policies,
        });
        let inputs = self.inputs.clone();
        self.watch("dcgm", *interval, move |at| {
            let judged = judge.step(at, &source.sample());
            // Without the node there is nothing to show.
            let _ = inputs.blocking_send(Input::SecondOpinions(judge.opinions().clone()));
            judged
        })
    }

    /// The same for hosts that have only DCGM's exporter.
    fn dcgm_exporter(&mut self) -> anyhow::Result<()> {
        let DcgmConfig { exporter, interval, .. } = self.config.dcgm.clone();
        if exporter.is_empty() {
            return Ok(());
        }
        let mut judge = ExporterJudge::default();
        self.watch("dcgm exporter", interval, move |at| judge.step(at, &scrape(&exporter, DCGM_DEADLINE)))
    }

    fn watch(
        &mut self,
        name: &str,
        interval: Period,
        mut look: impl FnMut(Mono) -> SensorReport + Send + 'static,
    ) -> anyhow::Result<()> {
        let (inputs, roster, sensor) = (self.inputs.clone(), self.roster.clone(), name.to_owned());
        roster.starts(name, clock::mono());
        roster.expect(name, clock::mono(), interval.0);
        let started = sensor.clone();
        let look = move |at| {
            roster.starts(&started, at);
            look(at)
        };
        let mut shown = BTreeSet::new();
        let report = move |judged: SensorReport| {
            let components: BTreeSet<String> =
                judged.components.iter().map(|component| component.name.clone()).collect();
            let unwatched: Vec<String> = shown.difference(&components).cloned().collect();
            shown.clone_from(&components);
            let looked =
                Input::Looked { sensor: sensor.clone(), components: components.into_iter().collect() };
            let mut reported = vec![Input::Sensed(judged), looked];
            if !unwatched.is_empty() {
                reported.push(Input::Unwatched(unwatched));
            }
            reported.into_iter().all(|input| inputs.blocking_send(input).is_ok())
        };
        let watching = watch(name, Duration::from_nanos(interval.0.0), look, report)
            .with_context(|| format!("starting the thread that watches: {name}"))?;
        self.watching.push(watching);
        Ok(())
    }
}
