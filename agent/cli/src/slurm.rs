//! `mainstay slurm healthcheck`: drains the node of this host in Slurm while it is not fit for training.

use std::ffi::OsString;
use std::io::Write;
use std::process::{ExitCode, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::process::Command;
use tokio::time::timeout;

use super::{exit, output};

/// Work with the node of this host in Slurm
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    Healthcheck(Healthcheck),
}

/// Drain the node while `mainstay check` fails, and resume it when it is idle and passes `mainstay check --deep`
///
/// For HealthCheckProgram of slurm.conf, as root or SlurmUser. A node that was drained with another reason is not
/// changed. Prints a line if it drains or resumes the node, and nothing else.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay slurm healthcheck                  drain if something is broken
  mainstay slurm healthcheck --require gpu=8  or if there are fewer than 8 GPUs

The name of the node is SLURMD_NODENAME, else the host name. The command ends within 60 s, after which Slurm
would kill it. Slurm ignores the exit status.
Exit status: 0 done, 3 Slurm or the check does not answer, 64 the command line was not understood.")]
struct Healthcheck {
    /// Options of `mainstay check`
    #[arg(value_name = "OPTION", trailing_var_arg = true, allow_hyphen_values = true)]
    check: Vec<OsString>,
}

/// What reasons of this program start with. Soperator and others know reasons of programs by the prefix in brackets.
const OWN_REASON: &str = "[node_problem] mainstay:";
/// How long a check may take. Slurm kills the program after 60 s.
const CHECK_DEADLINE: Duration = Duration::from_secs(40);
/// How long scontrol may take: there are three calls at most.
const SCONTROL_DEADLINE: Duration = Duration::from_secs(5);

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Task::Healthcheck(args) = args.command;
    let name = node_name()?;
    let before = Node::ask(&name).await?;
    if before.drain == Drain::Other {
        return Ok(ExitCode::SUCCESS);
    }
    // The probes of --deep load the host, so they wait until its jobs have ended. What they cannot read is no pass.
    let is_retest = before.drain == Drain::Own;
    if is_retest && !before.is_idle {
        return Ok(ExitCode::SUCCESS);
    }
    let mut check = Command::new("/proc/self/exe");
    check.args(["check", "--format", "npd", "--fail-on", "fail"]);
    if is_retest {
        check.args(["--deep", "--fail-on", "unknown"]);
    }
    let checked = answer(check.args(&args.check), CHECK_DEADLINE).await.context("mainstay check")?;
    let is_fit = match checked.status.code() {
        Some(0) => true,
        Some(1 | 2) => false,
        // A check that was called in a wrong way says nothing about the node.
        status => {
            let _ = std::io::stderr().write_all(&checked.stderr);
            let is_usage = status == Some(exit::USAGE.into());
            return Ok(ExitCode::from(if is_usage { exit::USAGE } else { exit::UNKNOWN }));
        }
    };
    if is_fit != is_retest {
        return Ok(ExitCode::SUCCESS);
    }
    // A person may have changed the node in the meantime.
    let now = Node::ask(&name).await?;
    if now.drain != before.drain || (is_retest && !now.is_idle) {
        return Ok(ExitCode::SUCCESS);
    }
    if is_fit {
        update(&name, &["state=resume"]).await?;
        output::print(&format!("node {name}: resumed\n"))?;
    } else {
        let reason = format!("{OWN_REASON} {}", String::from_utf8_lossy(&checked.stdout).trim());
        update(&name, &["state=drain", &format!("reason={reason}")]).await?;
        output::print(&format!("node {name}: drained: {reason}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn node_name() -> anyhow::Result<String> {
    if let Some(name) = std::env::var("SLURMD_NODENAME").ok().filter(|name| !name.is_empty()) {
        return Ok(name);
    }
    let name = nix::unistd::gethostname().context("the host name")?.to_string_lossy().into_owned();
    Ok(name.split('.').next().unwrap_or_default().to_owned())
}

/// What Slurm knows of the node.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    drain: Drain,
    is_idle: bool,
}

/// Who has given the reason of the node.
#[derive(Debug, PartialEq, Eq)]
enum Drain {
    No,
    Own,
    Other,
}

impl Node {
    async fn ask(name: &str) -> anyhow::Result<Node> {
        let shown = scontrol(&["--oneliner", "show", "node", name]).await?;
        Node::parse(&shown).with_context(|| format!("scontrol show node {name}: no State in {shown:?}"))
    }

    /// `NodeName=n1 ... State=IDLE+DRAIN ... Reason=text [root@2026-11-29T12:00:00]`. Without a reason there is no
    /// `Reason=`.
    fn parse(shown: &str) -> Option<Node> {
        let states = shown.split_whitespace().find_map(|field| field.strip_prefix("State="))?;
        let mut states = states.split('+');
        let is_idle = states.next() == Some("IDLE");
        let (mut drains, mut completes) = (false, false);
        for flag in states {
            drains |= flag.starts_with("DRAIN");
            completes |= flag.starts_with("COMPLETING");
        }
        let drain = match shown.split_once(" Reason=").map(|(_, reason)| reason.trim_start()) {
            None | Some("") if !drains => Drain::No,
            Some(reason) if drains && reason.starts_with(OWN_REASON) => Drain::Own,
            _ => Drain::Other,
        };
        Some(Node { drain, is_idle: is_idle && !completes })
    }
}

async fn update(name: &str, values: &[&str]) -> anyhow::Result<()> {
    let node = format!("nodename={name}");
    let words: Vec<&str> = ["update", &node].into_iter().chain(values.iter().copied()).collect();
    scontrol(&words).await.map(drop)
}

async fn scontrol(words: &[&str]) -> anyhow::Result<String> {
    let output = answer(Command::new("scontrol").args(words), SCONTROL_DEADLINE).await.context("scontrol")?;
    if !output.status.success() {
        // It prints some errors on standard output.
        let said = [output.stdout, output.stderr].concat();
        bail!("scontrol {}: {}", words.join(" "), String::from_utf8_lossy(&said).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// The answer of a program, which is killed if it takes longer.
async fn answer(command: &mut Command, deadline: Duration) -> anyhow::Result<Output> {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    match timeout(deadline, output).await {
        Ok(output) => Ok(output?),
        Err(_) => bail!("no answer within {} s", deadline.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_node_that_this_program_drained_is_its_own() {
        let node =
            |state: &str, reason: &str| Node::parse(&format!("NodeName=n1 State={state} CPUs=8{reason}"));
        let parsed = |drain, is_idle| Some(Node { drain, is_idle });
        let own = " Reason=[node_problem] mainstay: gpu.0000:3b:00: XID 79 [root@2026-11-29T12:00:00]";
        assert_eq!(node("MIXED", ""), parsed(Drain::No, false));
        assert_eq!(node("IDLE+DRAIN", own), parsed(Drain::Own, true));
        assert_eq!(node("MIXED+DRAIN", own), parsed(Drain::Own, false));
        assert_eq!(node("IDLE+COMPLETING+DRAIN", own), parsed(Drain::Own, false));
        assert_eq!(
            node("IDLE+DRAIN", " Reason=cables [root@2026-11-29T12:00:00]"),
            parsed(Drain::Other, true)
        );
        assert_eq!(node("DOWN*", " Reason=Not responding [slurm@now]"), parsed(Drain::Other, false));
        // Set by a person, who did not drain the node.
        assert_eq!(node("IDLE", own), parsed(Drain::Other, true));
        assert_eq!(node("IDLE+DRAIN", ""), parsed(Drain::Other, true));
        assert_eq!(Node::parse("slurm_load_node error"), None);
    }
}
