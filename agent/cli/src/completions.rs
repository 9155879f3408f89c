//! `mainstay completions`.

use std::process::ExitCode;

use clap_complete::Shell;

use super::{command_line, exit, output};

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
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command_line(), "mainstay", &mut script);
    let script = String::from_utf8_lossy(&script);
    if args.json {
        let shell = args.shell.to_string();
        output::print(&format!("{}\n", serde_json::json!({ "shell": shell, "script": script })))?;
    } else {
        output::print(&script)?;
    }
    Ok(ExitCode::from(exit::OK))
}
