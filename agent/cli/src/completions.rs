//! `mainstay completions`, and what a shell asks this program for while the user types.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap_complete::engine::{PathCompleter, ValueCompleter};
use clap_complete::env::{Bash, Elvish, EnvCompleter, Fish, Powershell, Zsh};
use clap_complete::{CompleteEnv, CompletionCandidate, Shell};
use mainstay_proto::json::ApiEnum;
use mainstay_proto::v1::Component;

use super::client::Client;
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

/// How long a person waits for the agent's answer after pressing a key.
const PATIENCE: Duration = Duration::from_millis(300);

/// The components of the host; none if its agent does not answer at once.
pub(super) fn components() -> Vec<CompletionCandidate> {
    let named = std::env::var_os("MAINSTAY_SOCKET").filter(|path| !path.is_empty()).map(PathBuf::from);
    let agents = find(named.as_deref()).places.into_iter().filter(|place| place.job.is_none());
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let asked = runtime.block_on(async {
        tokio::time::timeout(PATIENCE, async {
            for agent in agents {
                if let Ok(client) = Client::connect(&agent.socket).await
                    && let Ok(components) = client.components().await
                {
                    return components;
                }
            }
            Vec::new()
        })
        .await
    });
    let candidate = |of: Component| {
        let state = of.state().name().to_owned();
        CompletionCandidate::new(of.name).help(Some(state.into()))
    };
    asked.unwrap_or_default().into_iter().map(candidate).collect()
}

/// What `explain` takes besides numbers and codes: run directories, jobs, components.
pub(super) fn explained(current: &OsStr) -> Vec<CompletionCandidate> {
    let begins =
        |of: &CompletionCandidate| of.get_value().as_encoded_bytes().starts_with(current.as_encoded_bytes());
    let names = jobs().into_iter().chain(components()).filter(begins);
    names.chain(PathCompleter::dir().complete(current)).collect()
}

/// The jobs whose launchers run on this host. No server is asked: a shell waits for the answer.
pub(super) fn jobs() -> Vec<CompletionCandidate> {
    let found = find(None);
    found.places.into_iter().filter_map(|place| place.job.map(CompletionCandidate::new)).collect()
}
