//! `--role NAME=N:COMMAND`: a job of several roles, each with its own `mainstay run`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use mainstay_app::{self as app, RestartRule, RolePlan, RolesPlan, When};
use mainstay_coord::endpoint::Endpoint;
use mainstay_launcher::checkpoints::lineage;
use mainstay_launcher::group::plan::HostsPlan;
use mainstay_launcher::ranks::devices;
use mainstay_model::time::Span;

use super::values::duration;
use super::{Args, cluster, hosts, plan};
use crate::{Command, arguments, options_of_run, parsed};

/// The wait before a role is started again, if none is given.
const BACKOFF: Span = Span::seconds(10);

/// Between the ports of two roles where their hosts meet. etcd uses the next one too.
const PORTS_APART: u16 = 10;

/// Options with which only the first role can be meant, and their variables.
const OF_THE_FIRST: [(&str, Option<&str>); 5] = [
    ("status-file", Some("MAINSTAY_STATUS_FILE")),
    ("http", Some("MAINSTAY_HTTP")),
    ("checkpoint-watch", Some("MAINSTAY_CHECKPOINT_WATCH")),
    ("resume-from", Some("MAINSTAY_RESUME_FROM")),
    ("json", None),
];

/// Options that follow from `--role`.
const OF_THE_ROLE: [&str; 4] = ["role", "rdzv-id", "nproc-per-node", "max-restarts"];

/// Options that all roles have in common.
const OF_THE_JOB: [&str; 6] =
    ["nnodes", "node-rank", "rdzv-endpoint", "rdzv-backend", "master-addr", "runtime-dir"];

/// What `--role` means.
#[derive(Clone, Debug)]
pub(super) enum RoleOption {
    /// The `ROLE_NAME` of all ranks.
    Name(String),
    /// A role of its own.
    Own(Role),
}

/// `NAME=N[,KEY=VALUE…]:COMMAND`.
#[derive(Clone, Debug)]
pub(super) struct Role {
    name: String,
    /// Ranks on each host, as in --nproc-per-node.
    ranks: String,
    when: When,
    /// The most restarts; those of the command line if not given.
    max: Option<u32>,
    backoff: Span,
    /// The number of GPUs; one for each rank if not given.
    gpus: Option<u32>,
    /// Options of `mainstay run`, with values.
    options: Vec<(String, Option<String>)>,
    command: Vec<String>,
}

/// Reads `--role`. A text without `=` is torchrun's.
pub(super) fn role(text: &str) -> Result<RoleOption, String> {
    let Some((name, rest)) = text.split_once('=') else { return Ok(RoleOption::Name(text.to_owned())) };
    let good = |letter: char| letter.is_ascii_alphanumeric() || "_-".contains(letter);
    if !name.starts_with(|first: char| first.is_ascii_alphabetic()) || !name.chars().all(good) {
        return Err(format!(
            "{name:?}: the name of a role has letters, digits, '_' and '-', and begins with a letter"
        ));
    }
    let (head, command) = rest
        .split_once(':')
        .ok_or_else(|| format!("{name}: write NAME=N:COMMAND, such as trainer=2:'python train.py'"))?;
    let mut parts = head.split(',').map(str::trim);
    let mut role = Role {
        name: name.to_owned(),
        ranks: parts.next().unwrap_or_default().to_owned(),
        when: When::OnFailure,
        max: None,
        backoff: BACKOFF,
        gpus: None,
        options: Vec::new(),
        command: shlex::split(command)
            .ok_or_else(|| format!("{name}: a quote in its command is not closed"))?,
    };
    if role.command.is_empty() {
        return Err(format!("{name}: there is no command after the colon"));
    }
    for part in parts {
        let (key, value) = match part.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (part, None),
        };
        let wrong = |right: &str| format!("{name}: {part}: {right}");
        let number = || value.and_then(|value| value.parse().ok()).ok_or_else(|| wrong("write a number"));
        match key {
            "restart" => {
                role.when = match value {
                    Some("never") => When::Never,
                    Some("on-failure") => When::OnFailure,
                    Some("always") => When::Always,
                    _ => return Err(wrong("write restart=never, on-failure or always")),
                }
            }
            "max" => role.max = Some(number()?),
            "backoff" => role.backoff = duration(value.unwrap_or_default()).map_err(|error| wrong(&error))?,
            "gpus" => role.gpus = Some(number()?),
            _ if OF_THE_ROLE.contains(&key) || OF_THE_JOB.contains(&key) => {
                return Err(wrong(
                    "a role cannot have this option for itself; write restart, max, backoff, gpus or another option",
                ));
            }
            _ => role.options.push((key.to_owned(), value.map(str::to_owned))),
        }
    }
    Ok(RoleOption::Own(role))
}

/// Runs a job of several roles.
///
/// # Errors
/// Signals cannot be caught, or no thread can be started for the terminal.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let planned = arguments()
        .map_err(anyhow::Error::msg)
        .and_then(|all| plan_of(args, all.get(2..).unwrap_or_default()));
    super::start_logging(false);
    super::ended(match planned {
        Ok(plan) => app::run_roles(plan).await,
        Err(error) => return Ok(super::refused(&error)),
    })
}

/// The plan of a job with the options `given`, which `args` has in another form.
fn plan_of(mut args: Args, given: &[OsString]) -> anyhow::Result<RolesPlan> {
    let roles = args.role.iter().map(|role| match role {
        RoleOption::Own(role) => Ok(role.clone()),
        RoleOption::Name(name) => {
            bail!("--role {name}: another role has a command, so each needs NAME=N:COMMAND")
        }
    });
    let roles = roles.collect::<anyhow::Result<Vec<Role>>>()?;
    if let Some(word) = args.command.first() {
        bail!("{word}: the commands of the roles are in --role NAME=N:COMMAND, and there is no other");
    }
    let mut names = BTreeSet::new();
    if let Some(twice) = roles.iter().find(|role| !names.insert(role.name.as_str())) {
        bail!("--role {}: the name is given twice", twice.name);
    }
    let own_endpoint = args.rdzv_endpoint.clone();
    let found = cluster::add(&mut args, &cluster::variables(), cluster::full_name().as_deref())?;
    if found.meets_as.is_some() {
        bail!("--role: the tasks of a Slurm array need --rdzv-backend etcd with --rdzv-endpoint for roles");
    }
    let several = hosts::hosts(&args)?.is_some();
    let run_id = match &args.rdzv_id {
        Some(id) => id.clone(),
        None if several => "none".to_owned(),
        None => lineage::new_run_id().context("making a run id")?,
    };
    let visible = std::env::var(devices::VARIABLE).ok();
    let gpus = devices::visible(visible.as_deref(), Path::new("/dev"));
    let (shares, notes) = gpus_of(&roles, &gpus);
    let mut plans = Vec::new();
    for (place, (role, share)) in roles.into_iter().zip(shares).enumerate() {
        let mut options = defaults(&args, &run_id, &role, place);
        options.extend(ports(&args, own_endpoint.as_deref(), several, place)?);
        options.retain(|(name, _)| role.options.iter().all(|(own, _)| own != name));
        options.extend(role.options.iter().cloned());
        let own = |name: &str| options.iter().any(|(own, _)| own == name);
        let is_others = |name: &str| place > 0 && OF_THE_FIRST.iter().any(|(of, _)| *of == name);
        let mut words = without(given, |name| OF_THE_ROLE.contains(&name) || own(name) || is_others(name));
        words.extend(options.iter().map(|(name, value)| match value {
            Some(value) => OsString::from(format!("--{name}={value}")),
            None => OsString::from(format!("--{name}")),
        }));
        check(&words, &role).with_context(|| format!("--role {}", role.name))?;
        let others = OF_THE_FIRST.iter().filter(|_| place > 0).filter_map(|(_, variable)| *variable);
        let mut variables: Vec<(&'static str, Option<String>)> = others.map(|name| (name, None)).collect();
        variables.extend(share.map(|gpus| (devices::VARIABLE, Some(gpus))));
        plans.push(RolePlan {
            name: role.name,
            options: words,
            command: role.command,
            variables,
            restart: RestartRule {
                when: role.when,
                max: role.max.unwrap_or(args.max_restarts),
                backoff: role.backoff,
            },
        });
    }
    Ok(RolesPlan {
        run_id,
        roles: plans,
        runtime_root: args.runtime_dir,
        timestamps: args.host.timestamps(),
        signals: args.host.signals_to_handle,
        notes,
    })
}

/// What each role has for itself, unless it says otherwise.
fn defaults(args: &Args, run_id: &str, role: &Role, place: usize) -> Vec<(String, Option<String>)> {
    let name = &role.name;
    let mut options = vec![
        ("rdzv-id", Some(format!("{run_id}.{name}"))),
        ("role", Some(name.clone())),
        ("nproc-per-node", Some(role.ranks.clone())),
        // It would overwrite that of another role.
        ("no-progress", None),
    ];
    if args.host.log_line_prefix_template.is_none() {
        options.push(("log-line-prefix-template", Some("[${role_name} ${rank}] ".to_owned())));
    }
    if let Some(directory) = &args.checkpoint_dir {
        options.push(("checkpoint-dir", Some(directory.join(name).display().to_string())));
    }
    if place > 0 {
        // Each launcher would take half of the free memory.
        options.push(("checkpoint-memory", Some("off".to_owned())));
    }
    options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The option that keeps the port of a role apart from those of the roles before it, where the port is known before the
/// ranks start.
fn ports(
    args: &Args,
    own_endpoint: Option<&str>,
    several: bool,
    place: usize,
) -> anyhow::Result<Option<(String, Option<String>)>> {
    // A cluster of etcd serves all roles, each under its run id.
    let is_etcd = args.rdzv_backend.as_deref() == Some("etcd");
    let apart = u16::try_from(place).unwrap_or(u16::MAX).saturating_mul(PORTS_APART);
    if apart == 0 || is_etcd {
        return Ok(None);
    }
    let later = |port: u16| {
        port.checked_add(apart).with_context(|| {
            format!("port {port}: each role needs one {PORTS_APART} above that of the role before it")
        })
    };
    let endpoints = |text: &str| {
        let numbered = args.rdzv_backend.as_deref() == Some("static") || args.node_rank.is_some();
        let port = if numbered { hosts::STATIC_PORT } else { HostsPlan::PORT };
        Endpoint::parse_list(text, port).map_err(|error| anyhow::anyhow!("--rdzv-endpoint: {error}"))
    };
    if let Some(text) = own_endpoint {
        let mut moved = endpoints(text)?;
        for endpoint in &mut moved {
            // Port 0 is any free one.
            endpoint.port = if endpoint.port == 0 { 0 } else { later(endpoint.port)? };
        }
        let moved: Vec<String> = moved.iter().map(Endpoint::authority).collect();
        return Ok(Some(("rdzv-endpoint".to_owned(), Some(moved.join(",")))));
    }
    let port = match (args.master_port.filter(|port| *port != 0), &args.rdzv_endpoint) {
        (Some(port), _) => Some(port),
        (None, Some(text)) => endpoints(text)?.first().map(|first| first.port),
        (None, None) => several.then_some(hosts::STATIC_PORT),
    };
    let port = port.map(later).transpose()?;
    Ok(port.map(|port| ("master-port".to_owned(), Some(port.to_string()))))
}

/// The GPUs of each role, in the order of the roles, if there are enough; and what people should know of it. A role
/// without a share sees all.
fn gpus_of(roles: &[Role], visible: &[String]) -> (Vec<Option<String>>, Vec<String>) {
    if visible.is_empty() {
        return (vec![None; roles.len()], Vec::new());
    }
    let wanted = |role: &Role| role.gpus.or_else(|| role.ranks.parse().ok()).map(|count| count as usize);
    let counts: Option<Vec<usize>> = roles.iter().map(wanted).collect();
    let needed = counts.as_ref().map(|counts| counts.iter().sum::<usize>());
    match (counts, needed) {
        (Some(counts), Some(needed)) if needed <= visible.len() => {
            let mut left = visible.iter();
            let shares = counts.into_iter().map(|count| {
                let share: Vec<&str> = left.by_ref().take(count).map(String::as_str).collect();
                Some(share.join(","))
            });
            (shares.collect(), Vec::new())
        }
        (_, needed) => {
            let needed =
                needed.map_or_else(|| "an unknown number of".to_owned(), |needed| needed.to_string());
            let note = format!(
                "the roles share all {} GPU(s): they need {needed} (gpus=N in --role, one for each rank by default)",
                visible.len()
            );
            let shares = roles.iter().map(|role| (role.gpus == Some(0)).then(String::new));
            (shares.collect(), vec![note])
        }
    }
}

/// The options without those whose name is `left_out`.
fn without(given: &[OsString], left_out: impl Fn(&str) -> bool) -> Vec<OsString> {
    let known = options_of_run();
    let mut kept = Vec::new();
    let mut words = given.iter();
    while let Some(word) = words.next() {
        let Some(option) = word.to_str().and_then(|text| text.strip_prefix("--")) else {
            kept.push(word.clone());
            continue;
        };
        let (name, has_value) = option.split_once('=').map_or((option, false), |(name, _)| (name, true));
        let takes_next = !has_value && known.iter().any(|(known, takes_next)| known == name && *takes_next);
        let value = if takes_next { words.next() } else { None };
        if !left_out(name) {
            kept.push(word.clone());
            kept.extend(value.cloned());
        }
    }
    kept
}

/// Whether a launcher could start with these options. An error is reported before any role is started.
fn check(options: &[OsString], role: &Role) -> anyhow::Result<()> {
    let before = ["mainstay", "run"].map(OsString::from);
    let command = role.command.iter().map(OsString::from);
    let line = before.into_iter().chain(options.iter().cloned()).chain(command).collect();
    let cli = parsed(line).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        anyhow::anyhow!("{}", first.strip_prefix("error: ").unwrap_or(first).to_owned())
    })?;
    let Command::Run(args) = cli.command else { bail!("its options are not those of `mainstay run`") };
    plan::plan(*args).map(drop)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    fn own(text: &str) -> Role {
        match role(text) {
            Ok(RoleOption::Own(role)) => role,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn a_role_has_ranks_rules_options_and_a_command() {
        let plain = own("trainer=2:python 'my train.py' --lr=1:2");
        assert_eq!((plain.name.as_str(), plain.ranks.as_str()), ("trainer", "2"));
        assert_eq!(plain.command, ["python", "my train.py", "--lr=1:2"]);
        assert_eq!((plain.when, plain.max, plain.backoff), (When::OnFailure, None, BACKOFF));
        let full = own("r=4,restart=always,max=5,backoff=250ms,gpus=0,hang-limit=step=30s,no-warm:a b");
        assert_eq!((full.when, full.max, full.backoff), (When::Always, Some(5), Span::millis(250)));
        assert_eq!(full.gpus, Some(0));
        let limit = ("hang-limit".to_owned(), Some("step=30s".to_owned()));
        assert_eq!(full.options, [limit, ("no-warm".to_owned(), None)]);
        assert!(matches!(role("trainer"), Ok(RoleOption::Name(name)) if name == "trainer"));
    }

    #[test]
    fn what_is_wrong_in_a_role_is_named() {
        for (text, part) in [
            ("=2:a", "name of a role"),
            ("2=2:a", "name of a role"),
            ("a.b=2:a", "name of a role"),
            ("a=2", "NAME=N:COMMAND"),
            ("a=2:", "no command"),
            ("a=2:b 'c", "quote"),
            ("a=2,restart=sometimes:b", "restart=sometimes"),
            ("a=2,max=x:b", "max=x"),
            ("a=2,backoff=soon:b", "backoff=soon"),
            ("a=2,max-restarts=1:b", "max-restarts=1"),
            ("a=2,nnodes=2:b", "nnodes=2"),
        ] {
            let error = role(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn options_of_the_job_are_left_out_with_their_values() {
        let given: Vec<OsString> =
            ["--role", "a=1:b", "--max-restarts=3", "-r", "3", "--json", "--log-dir", "x"]
                .map(OsString::from)
                .into();
        let left = without(&given, |name| ["role", "max-restarts", "json"].contains(&name));
        assert_eq!(left, ["-r", "3", "--log-dir", "x"].map(OsStr::new));
    }

    #[test]
    fn gpus_are_split_in_order_where_there_are_enough() {
        let visible: Vec<String> = (0..6).map(|gpu| gpu.to_string()).collect();
        let shares =
            |roles: &[&str]| gpus_of(&roles.iter().map(|text| own(text)).collect::<Vec<_>>(), &visible);
        let share = |text: &str| Some(text.to_owned());
        assert_eq!(
            shares(&["a=2:x", "b=4:x", "c=2,gpus=0:x"]),
            (vec![share("0,1"), share("2,3,4,5"), share("")], vec![])
        );
        let (shared, notes) = shares(&["a=4:x", "b=4:x", "c=2,gpus=0:x"]);
        assert_eq!((shared, notes.len()), (vec![None, None, share("")], 1));
        assert_eq!(gpus_of(&[own("a=2:x")], &[]), (vec![None], vec![]));
    }
}
