//! `mainstay config`: the configuration that the agent would use.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use nix::unistd::{AccessFlags, User, access, geteuid, initgroups, setgid, setuid};

use crate::output::Structured;
use crate::{exit, output};
use mainstay_app::default_paths;
use mainstay_node::config::{Config, Environment};

const EXAMPLES: &str = "\
Examples:
  mainstay config --default > agent.toml
  mainstay config --check --config agent.toml
  sudo mainstay config --check --as mainstay
  mainstay config";

/// Print the agent's configuration, or check it
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Configuration file; /etc/mainstay/agent.toml if it is there
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the default configuration with every key explained
    #[arg(long, conflicts_with = "check")]
    default: bool,
    /// Check file and environment without printing the configuration
    #[arg(long)]
    check: bool,
    /// Check as this user, with what the shipped systemd unit sets, and whether its directories can be used; as root
    #[arg(long = "as", value_name = "USER", requires = "check")]
    user: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the configuration or the result of the check.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.default {
        output::print(&Config::commented_default())?;
        return Ok(ExitCode::SUCCESS);
    }
    let environment = Environment::new(default_paths::variables(), geteuid().as_raw());
    if let Some(user) = &args.user {
        return Ok(check_unit(args, user, &environment));
    }
    match Config::load(args.config.as_deref(), &environment, &[]) {
        Ok(config) if args.check => output::print(&checked(args, &environment, &config))?,
        Ok(config) if args.json => output::print(&Structured::Json.document(serde_json::to_value(&config)?))?,
        Ok(config) => output::print(&toml::to_string(&config)?)?,
        Err(error) => {
            output::note(&format!("error: {error}"));
            return Ok(ExitCode::from(exit::USAGE));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What the agent of the shipped unit would use, and what one that this user starts would, if it differs: both have
/// their default paths from their environment.
fn checked(args: &Args, environment: &Environment, here: &Config) -> String {
    let file = environment.config_file(args.config.as_deref()).ok().flatten();
    let file = file.map_or("no file, all defaults".to_owned(), |(path, _)| path.display().to_string());
    let paths = |config: &Config| {
        format!("socket {}, state in {}", config.socket.display(), config.state_dir.display())
    };
    let of_unit = Config::load(args.config.as_deref(), &environment.of_shipped_unit(), &[]);
    let mut text = format!("the configuration is valid: {file}\n");
    if let Ok(of_unit) = &of_unit {
        text.push_str(&format!("the agent of the shipped systemd unit: {}\n", paths(of_unit)));
    }
    if of_unit.is_ok_and(|of_unit| paths(&of_unit) != paths(here)) {
        text.push_str(&format!("an agent that user {} starts here: {}\n", environment.uid, paths(here)));
    }
    text
}

/// Gives up root for this user and its groups, for the rest of this process.
fn become_user(name: &str) -> anyhow::Result<()> {
    let user = User::from_name(name)?.with_context(|| {
        format!("--as {name}: this host has no such user; `systemd-sysusers mainstay.conf` makes the unit's")
    })?;
    if user.uid == geteuid() {
        return Ok(());
    }
    let changed = CString::new(name)
        .map_err(anyhow::Error::from)
        .and_then(|name| Ok(initgroups(&name, user.gid)?))
        .and_then(|()| Ok(setgid(user.gid)?))
        .and_then(|()| Ok(setuid(user.uid)?));
    changed.with_context(|| format!("--as {name}: only root can check as another user"))
}

/// Checks what the shipped unit's agent will find: its configuration, and directories of the file that the unit does
/// not make.
fn check_unit(args: &Args, user: &str, environment: &Environment) -> ExitCode {
    let unit = environment.of_shipped_unit();
    // The unit reads files of other users (CAP_DAC_READ_SEARCH), so the file is read before the user changes.
    let loaded = Config::load(args.config.as_deref(), &unit, &[]).map_err(anyhow::Error::from);
    let loaded = loaded.map(|config| (checked(args, &unit, &config), config));
    let (valid, config) = match loaded.and_then(|loaded| become_user(user).map(|()| loaded)) {
        Ok(loaded) => loaded,
        Err(error) => {
            output::note(&format!("error: {error:#}"));
            return ExitCode::from(exit::USAGE);
        }
    };
    let directories = [
        ("state_dir", Some(config.state_dir.as_path())),
        ("socket", config.socket.parent()),
        ("checkpoint.store", Some(config.checkpoint.store.as_path())),
    ];
    let made_by_systemd = ["RUNTIME_DIRECTORY", "STATE_DIRECTORY"].map(|name| unit.variables.get(name));
    let mut problems = 0;
    for (key, directory) in directories {
        let Some(directory) = directory.filter(|path| path.is_absolute()) else { continue };
        if made_by_systemd.iter().flatten().any(|made| directory.starts_with(made)) {
            continue;
        }
        if let Err(error) = is_writable(directory) {
            output::note(&format!("error: {key}: {}: {error}", directory.display()));
            problems += 1;
        } else {
            output::note(&format!(
                "{key}: {} is outside the unit's directories: add ReadWritePaths={} to a drop-in of the unit \
                 (systemctl edit mainstay)",
                directory.display(),
                directory.display()
            ));
        }
    }
    if problems > 0 {
        return ExitCode::from(exit::USAGE);
    }
    let _ = output::print(&valid);
    ExitCode::SUCCESS
}

/// Whether this user can write into the directory, or make it.
fn is_writable(directory: &Path) -> Result<(), String> {
    let there = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let denied = match access(there, AccessFlags::W_OK | AccessFlags::X_OK) {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    let user = geteuid();
    Err(match there == directory {
        true => format!("user {user} cannot write there: {}", denied.desc()),
        false => format!("user {user} cannot make it in {}: {}", there.display(), denied.desc()),
    })
}
