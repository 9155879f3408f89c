//! `mainstay completions`, and what a shell asks this program for while the user types.

use std::process::ExitCode;

use anyhow::bail;
use clap_complete::env::{Bash, Elvish, EnvCompleter, Fish, Powershell, Zsh};
use clap_complete::{CompleteEnv, CompletionCandidate, Shell};

use super::find::find;
use super::output::Structured;
use super::{command_line, exit, output};

/// The variable by which the script of a shell asks for completions.
const VARIABLE: &str = "MAINSTAY_COMPLETE";

/// The program that the script asks.
const PROGRAM: &str = "mainstay";

/// Print a script that completes commands in a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay completions bash > ~/.local/share/bash-completion/completions/mainstay
  mainstay completions zsh > \"${fpath[1]}/_mainstay\"
  mainstay completions fish > ~/.config/fish/completions/mainstay.fish")]
pub(super) struct Args {
    /// The shell
    shell: Shell,
    /// Print JSON
    #[arg(long, hide = true)]
    json: bool,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let shell: &dyn EnvCompleter = match args.shell {
        Shell::Bash => &Bash,
        Shell::Elvish => &Elvish,
        Shell::Fish => &Fish,
        Shell::PowerShell => &Powershell,
        Shell::Zsh => &Zsh,
        other => bail!("{other}: there is no script for this shell"),
    };
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script)?;
    let script = String::from_utf8_lossy(&script);
    if args.json {
        let shell = args.shell.to_string();
        let document = serde_json::json!({ "shell": shell, "script": script });
        output::print(&Structured::Json.document(document))?;
    } else {
        output::print(&script)?;
    }
    Ok(ExitCode::from(exit::OK))
}

/// Answers a shell that asks for completions, and ends the program then.
pub(super) fn answer_the_shell() {
    CompleteEnv::with_factory(command_line).var(VARIABLE).bin(PROGRAM).complete();
}

/// The jobs whose launchers run on this host. No server is asked: a shell waits for the answer.
pub(super) fn jobs() -> Vec<CompletionCandidate> {
    let found = find(None);
    found.places.into_iter().filter_map(|place| place.job.map(CompletionCandidate::new)).collect()
}
