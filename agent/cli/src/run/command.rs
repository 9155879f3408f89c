//! What the ranks run, from the command line.

use std::path::Path;

use anyhow::{Context, bail};

use super::Args;

/// The command of each rank: as torchrun builds it, and also programs other than Python without --no-python.
pub(super) fn command(args: &Args) -> anyhow::Result<Vec<String>> {
    let (script, arguments) = args.command.split_first().context("there is no script to run")?;
    if script.starts_with('-') {
        bail!("{script}: no such option of `mainstay run`; see `mainstay run --help`");
    }
    let mut command = Vec::new();
    // As in torchrun: --run-path takes precedence over --module and --no-python.
    let module = args.module && !args.host.run_path;
    let is_python = args.host.run_path || module || (!args.no_python && !is_program(script));
    if is_python {
        command.push(python());
        if module {
            command.push("-m".to_owned());
        } else if !Path::new(script).exists() {
            bail!("{script}: no such script or program");
        }
    }
    command.push(script.clone());
    command.extend(arguments.iter().cloned());
    Ok(command)
}

/// Whether `script` is itself an executable program: found on PATH, or an executable file whose name does not end
/// in `.py`.
fn is_program(script: &str) -> bool {
    if script.ends_with(".py") {
        return false;
    }
    if script.contains('/') { is_executable(Path::new(script)) } else { on_path(script) }
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| is_executable(&directory.join(program)))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok()
}

/// The interpreter: torchrun's `PYTHON_EXEC`, or the first one on PATH, which is the environment's in an activated
/// environment.
fn python() -> String {
    std::env::var("PYTHON_EXEC").unwrap_or_else(|_| {
        let name = if on_path("python3") { "python3" } else { "python" };
        name.to_owned()
    })
}
