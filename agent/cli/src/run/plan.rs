//! Converts the options of `mainstay run` to the plan of the job.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use mainstay_model::time::Span;
use mainstay_recovery::policy::Budget;

use super::command::command;
use super::roles::RoleOption;
use super::values::{CheckpointMemory, duration, limits};
use super::{Args, cluster, host_options, hosts, xpu};
use crate::torchrun;
use mainstay_app::{JobPlan, default_paths};
use mainstay_launcher::checkpoints::lineage;
use mainstay_launcher::group::meeting::{self, Meeting};
use mainstay_launcher::group::plan::HostsPlan;
use mainstay_launcher::hang::HangSettings;
use mainstay_launcher::policy;
use mainstay_launcher::ranks::Grace;
use mainstay_launcher::ranks::devices;
use mainstay_launcher::ranks::warm::WarmSettings;
use mainstay_launcher::settings::{CheckpointSettings, RankSettings, Settings, Shown};
use mainstay_node::config::{Config, Environment};

pub(super) fn plan(mut args: Args) -> anyhow::Result<JobPlan> {
    let wrong = |option: &'static str| move |error: String| anyhow::anyhow!("{option}: {error}");
    let is_named = args.rdzv_id.is_some();
    let found = cluster::add(&mut args, &cluster::variables(), cluster::full_name().as_deref())?;
    let meeting_in = match (&found.meets_as, &args.checkpoint_dir) {
        (Some(name), Some(directory)) => Some(directory.join(meeting::DIRECTORY).join(name)),
        (Some(_), None) => bail!(
            "--nnodes: the tasks of a Slurm array have to find each other: give --rdzv-backend etcd with \
             --rdzv-endpoint, or --checkpoint-dir with a directory that all of them share"
        ),
        (None, _) => None,
    };
    let hosts = hosts::hosts(&args)?.map(|hosts| HostsPlan {
        meeting: meeting_in.zip(hosts.endpoints.first().cloned()).map(|(directory, me)| Meeting {
            directory,
            me,
            has_etcd: found.has_etcd,
            slots: if found.has_etcd && hosts.hosts.0 >= 3 { 3 } else { 1 },
        }),
        token_file: args.checkpoint_dir.as_deref().filter(|_| found.is_step).and_then(meeting::token_file),
        is_host: hosts.is_host.or(found.is_endpoint),
        runs_once: found.runs_once,
        returning: args.returning,
        ..hosts
    });
    if args.module && args.no_python && !args.host.run_path {
        bail!("--module and --no-python exclude each other (PET_MODULE and PET_NO_PYTHON set them too)");
    }
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let ranks = ranks(&args.nproc_per_node, visible.as_deref()).map_err(wrong("--nproc-per-node"))?;
    let gpus = devices::visible(visible.as_deref(), Path::new("/dev"));
    args.host.check(ranks, visible.as_deref(), &gpus).map_err(anyhow::Error::msg)?;
    let redirects = torchrun::streams(&args.redirects, ranks).map_err(wrong("--redirects"))?;
    let tee = torchrun::streams(&args.tee, ranks).map_err(wrong("--tee"))?;
    let streams = redirects.iter().zip(&tee).map(|(off, on)| (!off.0 || on.0, !off.1 || on.1)).collect();
    let listed = args.local_ranks_filter.as_deref().filter(|ranks| !ranks.is_empty());
    let listed = listed.map(torchrun::local_ranks).transpose();
    let (endpoint_addr, endpoint_port) = static_endpoint(&args)?;
    let run_id = match (&args.rdzv_id, &hosts) {
        (Some(id), _) => id.clone(),
        // All hosts must have the same; this is torchrun's default.
        (None, Some(_)) => "none".to_owned(),
        (None, None) => lineage::new_run_id().context("making a run id")?,
    };
    if let Some(file) = args.policy.as_ref().filter(|file| policy::is_starlark(file)) {
        bail!("--policy {}: {}", file.display(), policy::STARLARK);
    }
    let is_elastic = hosts.as_ref().is_some_and(|plan| plan.hosts.0 != plan.hosts.1);
    // Where only an order restarts the ranks, a template would take processor time from them for a rare case.
    let may_restart = args.max_restarts > 0 || is_elastic || !args.warm_imports.is_empty();
    // The meeting place of several hosts is not that of the ranks of a round.
    let fixed_port = args.master_port.or(endpoint_port).filter(|port| *port != 0 && hosts.is_none());
    let role = match args.role.pop() {
        Some(RoleOption::Name(name)) => name,
        other => bail!("--role: {other:?} is not the name of a role"),
    };
    let settings = Settings {
        ranks: RankSettings {
            run_id,
            command: command(&args)?,
            local_world_size: ranks,
            role,
            virtual_local_rank: args.host.virtual_local_rank,
            numa: args.host.numa_binding,
            progress: args.progress.map(Arc::new),
        },
        master_addr: args.master_addr.or(endpoint_addr).unwrap_or_else(|| "127.0.0.1".to_owned()),
        master_port: fixed_port,
        policy: mainstay_recovery::policy::Settings {
            by_cause: args.restart_budget.into_iter().collect(),
            ready_within: args.ready_within.0,
            hand_back_exit: i32::from(args.hand_back_exit),
            dry_run: args.dry_run,
            ..Budget { max_restarts: args.max_restarts, window: args.restart_window }.into()
        },
        policy_file: args.policy.or_else(policy_of_the_host),
        grace: Grace {
            requested: shutdown_timeout(args.shutdown_timeout)?,
            fault: args.fault_timeout,
            done: Span::seconds(5),
        },
        save_signal: args.save_signal,
        leave_on_notice: !args.stay_on_notice,
        allow_inject: args.allow_inject,
        gpu_library: configuration_of_the_host()
            .filter(|_| args.allow_inject)
            .map(|config| config.gpu.library),
        hang: HangSettings { mode: args.hang, limits: limits(&args.hang_limit) },
        checkpoint_dir: args.checkpoint_dir,
        remember: !args.forget,
        checkpoints: CheckpointSettings {
            is_named,
            resume_from: args.resume_from,
            watch: args.checkpoint_watch,
            memory: args.checkpoint_memory.and_then(|memory| memory.0),
            in_memory: args.checkpoint_memory != Some(CheckpointMemory(None)),
            slots: args.checkpoint_slots.into(),
            bandwidth: args.checkpoint_bandwidth,
            keep: usize::try_from(args.checkpoint_keep).unwrap_or(usize::MAX),
            quota: args.checkpoint_quota,
        },
        warm: WarmSettings { enabled: !args.no_warm && may_restart, imports: args.warm_imports },
        roles: default_paths::environment(mainstay_launcher::roles::VARIABLE).map(PathBuf::from),
        shown: Shown {
            ranks: listed.map_err(wrong("--local-ranks-filter"))?,
            streams,
            prefix: args.host.log_line_prefix_template.clone(),
            duplicate_stdout: args.host.duplicate_stdout_filters.clone().unwrap_or_default().0,
            duplicate_stderr: args.host.duplicate_stderr_filters.clone().unwrap_or_default().0,
        },
    };
    Ok(JobPlan {
        settings,
        hosts,
        log_dir: args.log_dir,
        runtime_root: args.runtime_dir,
        agent_socket: args.socket,
        look_for_agent: !args.no_agent,
        http: args.http,
        print_summary: args.json,
        status_file: args.status_file,
        timestamps: args.host.timestamps(),
        is_terminal: host_options::is_terminal(),
        progress: host_options::is_terminal() && !args.host.no_progress,
        signals: args.host.signals_to_handle,
        from_environment: found.sources,
    })
}

/// The requested number of ranks.
fn ranks(text: &str, visible: Option<&str>) -> Result<u32, String> {
    let (dev, drm) = (Path::new("/dev"), Path::new("/sys/class/drm"));
    let mask = std::env::var("ZE_AFFINITY_MASK").ok();
    let has_gpus = !devices::visible(visible, dev).is_empty();
    let number = xpu::in_numbers(text, xpu::count(&dev.join("dri"), drm, mask.as_deref()), has_gpus)?;
    torchrun::ranks_per_node(&number, dev, visible)
}

/// Slurm and Kubernetes kill the launcher 30 s after SIGTERM by default. Within these it also has to kill ranks that do
/// not exit, write the last step to the disk, and report.
const SHUTDOWN_TIMEOUT: Span = Span::seconds(20);

/// How long ranks may take to exit: the given time, else the value of PyTorch's own variable.
fn shutdown_timeout(given: Option<Span>) -> anyhow::Result<Span> {
    const VARIABLE: &str = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
    match (given, std::env::var(VARIABLE)) {
        (Some(given), _) => Ok(given),
        (None, Ok(text)) => duration(&text).map_err(|error| anyhow::anyhow!("{VARIABLE}: {error}")),
        (None, Err(_)) => Ok(SHUTDOWN_TIMEOUT),
    }
}

/// The configured policy for jobs that do not name one. An unreadable configuration is left to the agent to report.
fn policy_of_the_host() -> Option<PathBuf> {
    Some(configuration_of_the_host()?.policy.file).filter(|file| !file.as_os_str().is_empty())
}

fn configuration_of_the_host() -> Option<Config> {
    let environment = Environment::new(default_paths::variables(), nix::unistd::geteuid().as_raw());
    Config::load(None, &environment, &[]).ok()
}

/// With torchrun's static backend the rendezvous endpoint is the address of the ranks' store.
fn static_endpoint(args: &Args) -> anyhow::Result<(Option<String>, Option<u16>)> {
    let (Some("static"), Some(endpoint)) = (args.rdzv_backend.as_deref(), args.rdzv_endpoint.as_deref())
    else {
        return Ok((None, None));
    };
    let (host, port) = match endpoint.rsplit_once(':') {
        Some((host, port)) => {
            let port = port.parse().with_context(|| format!("--rdzv-endpoint: {port:?} is not a port"))?;
            (host, Some(port))
        }
        None => (endpoint, None),
    };
    Ok((Some(host.to_owned()), port))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use mainstay_recovery::policy::CauseKind;

    use super::*;
    use mainstay_launcher::hang::Mode;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &[&str]) -> Result<Args, String> {
        let line = std::iter::once("run").chain(line.iter().copied());
        Line::try_parse_from(line).map(|line| line.args).map_err(|error| error.to_string())
    }

    fn plan_of(line: &[&str]) -> Result<JobPlan, String> {
        plan(parse(line)?).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn what_follows_the_script_belongs_to_the_script() {
        let plan = plan_of(&["--nproc_per_node=2", "/bin/sh", "--n", "5", "--help", "-m"]).expect("a plan");
        assert_eq!(plan.settings.ranks.command, ["/bin/sh", "--n", "5", "--help", "-m"]);
        assert_eq!(plan.settings.ranks.local_world_size, 2);
    }

    #[test]
    fn an_unknown_option_before_the_script_is_an_error() {
        let error = plan_of(&["--nproc-pr-node", "2", "/bin/sh"]).expect_err("a typing error");
        assert!(error.contains("--nproc-pr-node"), "{error}");
    }

    #[test]
    fn modules_run_under_python() {
        let plan = plan_of(&["-m", "json.tool", "-h"]).expect("a plan");
        assert_eq!(plan.settings.ranks.command[1..], ["-m", "json.tool", "-h"]);
    }

    #[test]
    fn a_job_that_only_an_order_restarts_has_no_template() {
        let has_template = |line: &str| {
            let line: Vec<&str> = line.split_whitespace().chain(["/bin/sh"]).collect();
            plan_of(&line).expect("a plan").settings.warm.enabled
        };
        assert!(!has_template("--max-restarts 0"));
        assert!(!has_template("--max-restarts 0 --nnodes 2 --rdzv-endpoint a"));
        assert!(!has_template("--no-warm"));
        // Hosts that join or leave restart the ranks, too.
        assert!(has_template("--max-restarts 0 --nnodes 1:2 --rdzv-endpoint a"));
        assert!(has_template("--max-restarts 0 --warm-imports json"));
        assert!(has_template(""));
    }

    #[test]
    fn a_missing_script_is_named() {
        let error = plan_of(&["./no-such-script.py"]).expect_err("no script");
        testing::snapshot!("run", "a missing script", error);
    }

    #[test]
    fn redirected_streams_are_off_the_terminal_unless_teed() {
        let shown = plan_of(&["--nproc-per-node=2", "-r", "3", "-t", "0:1", "/bin/sh"])
            .expect("a plan")
            .settings
            .shown;
        assert_eq!((shown.streams_of(0), shown.streams_of(1)), ((true, false), (false, false)));
    }

    #[test]
    fn limits_of_phases_and_of_patience() {
        let line = ["--hang-limit", "step=30s,checkpoint=1h", "--hang-limit", "spinning=5s", "/bin/sh"];
        let hang = plan_of(&line).expect("a plan").settings.hang;
        assert_eq!(hang.limits.given["checkpoint"], Span::seconds(3600));
        assert_eq!((hang.limits.given["step"], hang.limits.spinning), (Span::seconds(30), Span::seconds(5)));
        assert_eq!(hang.mode, Mode::Auto);
        assert!(plan_of(&["--hang-limit", "step", "/bin/sh"]).is_err());
        assert!(plan_of(&["--hang", "maybe", "/bin/sh"]).is_err());
    }

    #[test]
    fn a_rule_for_lines_of_progress() {
        let settings = |rule: &str| plan_of(&["--progress", rule, "/bin/sh"]).map(|plan| plan.settings);
        let rule = settings(r"step (\d+)").expect("a plan").ranks.progress.expect("a rule");
        assert_eq!(rule.read(b"step 7").and_then(|line| line.step), Some(7));
        assert!(settings("step (").is_err());
    }

    #[test]
    fn budgets_of_causes_and_patience_with_the_host() {
        let line = ["--restart-budget", "hang=2,signal=10/1h", "--ready-within", "off", "/bin/sh"];
        let policy = plan_of(&line).expect("a plan").settings.policy;
        let signal = Budget { max_restarts: 10, window: Some(Span::seconds(3600)) };
        assert_eq!(policy.by_cause[&CauseKind::Signal], signal);
        assert_eq!(policy.by_cause[&CauseKind::Hang], Budget { max_restarts: 2, window: None });
        assert_eq!((policy.ready_within, policy.hand_back_exit), (None, 75));
        assert!(plan_of(&["--restart-budget", "tuesday=2", "/bin/sh"]).is_err());
        assert!(plan_of(&["--hand-back-exit", "0", "/bin/sh"]).is_err());
    }

    #[test]
    fn a_module_is_not_run_without_python() {
        let error = plan_of(&["-m", "--no-python", "json.tool"]).expect_err("both");
        assert!(error.contains("--module") && error.contains("--no-python"), "{error}");
    }

    #[test]
    fn durations_in_words_and_in_seconds() {
        assert_eq!(duration("30s"), Ok(Span::seconds(30)));
        assert_eq!(duration("1h 30m"), Ok(Span::seconds(5400)));
        assert_eq!(duration("0.5"), Ok(Span::millis(500)));
        assert!(duration("soon").is_err() && duration("-3s").is_err());
    }
}
