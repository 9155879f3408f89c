//! Running other programs: loudly, quietly with a log, or watched line by line.

use std::fmt::Write;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use crate::{output, paths};

/// A command from one line in which `{name}` is a variable and `{names...}` are several arguments. No shell is
/// involved.
macro_rules! cmd {
    ($line:literal) => {{
        let shell = $crate::command::shell();
        let command = std::process::Command::from(xshell::cmd!(shell, $line));
        command
    }};
}
pub(crate) use cmd;

/// What parses the lines of [`cmd`].
#[expect(clippy::expect_used, reason = "it fails only in a working directory that was deleted")]
pub fn shell() -> xshell::Shell {
    xshell::Shell::new().expect("there is a working directory")
}

/// `cargo` in this repository, as a shell starts it: without the variables in which `cargo run` describes this
/// program. The build script of ring reads some of them, so with them ring, rustls and the agent are compiled
/// again after each plain `cargo build`.
pub fn cargo(arguments: &str) -> Command {
    let mut cargo = Command::new("cargo");
    let of_this_program = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(of_this_program) {
            cargo.env_remove(name);
        }
    }
    cargo.args(arguments.split_whitespace()).current_dir(paths::root());
    cargo
}

/// The same command, with its environment and its folder, as the last arguments of another.
pub fn inside(mut outer: Command, command: &Command) -> Command {
    outer.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        outer.current_dir(folder);
    }
    outer
}

/// Runs to the end with the terminal as it is; an error names the command.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("starting {}", words(command)))?;
    if !status.success() {
        bail!("{} ended with {status}", words(command));
    }
    Ok(())
}

/// Runs to the end with all output in a log file; on failure the error contains the end of the log.
pub fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    fs::create_dir_all(log.parent().unwrap_or(log))?;
    let file = fs::File::create(log)?.into_parts().0;
    command.stdin(Stdio::null()).stdout(file.try_clone().context("opening a log twice")?).stderr(file);
    run(command).with_context(|| {
        let printed = fs::read_to_string(log).unwrap_or_default();
        format!("all it printed is in {}\n{}", log.display(), tail(&printed, 25))
    })
}

/// Runs to the end, shows the output as it arrives, and returns it too: standard output and error in the order
/// of arrival.
pub fn run_watched(command: &mut Command) -> Result<(ExitStatus, String)> {
    let (reader, writer) = io::pipe().context("making a pipe")?;
    let second = writer.try_clone().context("opening a pipe twice")?;
    command.stdin(Stdio::null()).stdout(writer).stderr(second);
    let mut child = command.spawn().with_context(|| format!("starting {}", words(command)))?;
    // The command holds our ends of the pipe until they are replaced, and the pipe would never end.
    command.stdout(Stdio::null()).stderr(Stdio::null());

    let mut printed = String::new();
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).context("reading what a command prints")? > 0 {
        let text = String::from_utf8_lossy(&line);
        output::write(&text);
        printed.push_str(&text);
        line.clear();
    }
    let status = child.wait().with_context(|| format!("waiting for {}", words(command)))?;
    Ok((status, printed))
}

/// What a command prints, when it succeeds.
pub fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("starting {}", words(command)))?;
    if !output.status.success() {
        let printed = String::from_utf8_lossy(&output.stderr);
        bail!("{} ended with {}\n{}", words(command), output.status, tail(&printed, 15));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a program can be started, asked with arguments that make it end at once.
pub fn exists(program: &str, harmless: &str) -> bool {
    let mut command = Command::new(program);
    command.arg(harmless).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The exit status of this program.
pub fn exit_code(success: bool) -> ExitCode {
    if success { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A command as a person would type it.
pub fn words(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args().map(|argument| argument.to_string_lossy()) {
        // Writing to a string cannot fail.
        let _ = match argument.contains([' ', '\n', '"']) {
            true => write!(text, " {argument:?}"),
            false => write!(text, " {argument}"),
        };
    }
    text
}

/// The last lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    #[test]
    fn cargo_gets_no_variable_of_this_package() {
        // `cargo test` sets these for a test as `cargo run` does for a program.
        let cargo = super::cargo("build");
        let changed: Vec<_> = cargo.get_envs().collect();
        assert!(changed.contains(&(OsStr::new("CARGO_MANIFEST_DIR"), None)), "{changed:?}");
        assert!(changed.iter().all(|(name, value)| *name != "PATH" && value.is_none()), "{changed:?}");
    }
}
