//! Running other programs: loudly, quietly with a log, or watched line by line.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

use crate::output;

/// `cargo`, as a shell starts it: without the variables in which `cargo run` describes this program. The build script of
/// ring reads some of them, so with them ring, rustls and the agent are compiled again after each plain `cargo build`.
pub fn cargo() -> Command {
    let mut cargo = Command::new("cargo");
    let of_this_program = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(of_this_program) {
            cargo.env_remove(name);
        }
    }
    cargo
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
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
    let second = file.try_clone().with_context(|| format!("opening {} twice", log.display()))?;
    let status = command
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(second)
        .status()
        .with_context(|| format!("starting {}", words(command)))?;
    if !status.success() {
        let printed = fs::read_to_string(log).unwrap_or_default();
        bail!(
            "{} ended with {status}; all it said is in {}\n{}",
            words(command),
            log.display(),
            tail(&printed, 25)
        );
    }
    Ok(())
}

/// Runs to the end, shows the output as it arrives, and returns it too: standard output and error in the order of
/// arrival.
pub fn run_watched(command: &mut Command) -> Result<(ExitStatus, String)> {
    let (reader, writer) = io::pipe().context("making a pipe")?;
    let second = writer.try_clone().context("opening a pipe twice")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(second)
        .spawn()
        .with_context(|| format!("starting {}", words(command)))?;
    // The command holds our ends of the pipe until they are replaced, and the pipe would never end.
    command.stdout(Stdio::null()).stderr(Stdio::null());

    let mut printed = String::new();
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).context("reading what a command says")? > 0 {
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

/// Whether a program can be started at all, asked with an argument that makes it end at once.
pub fn exists(program: &str, harmless: &str) -> bool {
    let mut command = Command::new(program);
    command.arg(harmless).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A command as a person would type it.
pub fn words(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        let argument = argument.to_string_lossy();
        text.push(' ');
        if argument.contains([' ', '\n', '"']) {
            text.push_str(&format!("{argument:?}"))
        } else {
            text.push_str(&argument)
        }
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
        let cargo = super::cargo();
        let changed: Vec<_> = cargo.get_envs().collect();
        assert!(changed.contains(&(OsStr::new("CARGO_MANIFEST_DIR"), None)), "{changed:?}");
        assert!(changed.iter().all(|(name, value)| *name != "PATH" && value.is_none()), "{changed:?}");
    }
}
