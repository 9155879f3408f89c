//! torchrun's options for a single host: how ranks are started, where they run, and how their output looks.

use std::io::IsTerminal;

use nix::sys::signal::Signal;

use super::values::switch;
use mainstay_sys::numa::{self, Topology};

/// torchrun's name for the only supported implementation of logs.
const DEFAULT_LOGS: &str = "default";

#[derive(Debug, clap::Args)]
pub(super) struct HostOptions {
    /// Run the script as a Python script, even if it is executable or --no-python is set
    #[arg(long, alias = "run_path", env = "PET_RUN_PATH", value_parser = switch("PET_RUN_PATH"), help_heading = "Launch", hide_short_help = true)]
    pub(super) run_path: bool,
    /// Give each rank LOCAL_RANK=0 and its own GPU as the only visible one
    #[arg(long, alias = "virtual_local_rank", env = "PET_VIRTUAL_LOCAL_RANK", value_parser = switch("PET_VIRTUAL_LOCAL_RANK"), help_heading = "Launch", hide_short_help = true)]
    pub(super) virtual_local_rank: bool,
    /// Bind each rank to CPUs near its GPU: node, socket, exclusive or core-complex
    ///
    /// The GPU of a rank is the one at its place among the visible GPUs. On a host without GPUs the ranks are
    /// spread over the NUMA nodes.
    #[arg(long, alias = "numa_binding", value_name = "MODE", value_parser = binding, help_heading = "Launch", hide_short_help = true)]
    pub(super) numa_binding: Option<numa::Binding>,
    /// Signals that end the job; the ranks get the same signal
    #[arg(
        long,
        alias = "signals_to_handle",
        env = "PET_SIGNALS_TO_HANDLE",
        default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        value_name = "SIGNALS",
        value_delimiter = ',',
        value_parser = signal_to_handle,
        help_heading = "Restarts",
        hide_short_help = true
    )]
    pub(super) signals_to_handle: Vec<i32>,
    /// Also write lines of standard output with one of these texts into filtered_stdout.log
    ///
    /// The file is in the directory of the attempt and has the lines of all ranks. Write ,, for a comma.
    #[arg(long, alias = "duplicate_stdout_filters", env = "PET_DUPLICATE_STDOUT_FILTERS", value_name = "TEXT,…", value_parser = filters, help_heading = "Output", hide_short_help = true)]
    pub(super) duplicate_stdout_filters: Option<Filters>,
    /// The same for standard error and filtered_stderr.log
    #[arg(long, alias = "duplicate_stderr_filters", env = "PET_DUPLICATE_STDERR_FILTERS", value_name = "TEXT,…", value_parser = filters, help_heading = "Output", hide_short_help = true)]
    pub(super) duplicate_stderr_filters: Option<Filters>,
    /// Text before each line of a rank; macros: ${role_name}, ${rank}, ${local_rank}, ${hostname}
    #[arg(
        long,
        alias = "log_line_prefix_template",
        env = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        value_name = "TEXT",
        help_heading = "Output",
        hide_short_help = true
    )]
    pub(super) log_line_prefix_template: Option<String>,
    /// Implementation of logs; only default is supported
    #[arg(long, alias = "logs_specs", value_name = "NAME", value_parser = logs_specs, help_heading = "Output", hide_short_help = true)]
    pub(super) logs_specs: Option<String>,
    /// Start each line of the launcher with its time (UTC); default: if standard error is not a terminal
    #[arg(long, env = "MAINSTAY_TIMESTAMPS", value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch("MAINSTAY_TIMESTAMPS"), help_heading = "Output", hide_short_help = true)]
    pub(super) timestamps: Option<bool>,
    /// Do not show step, pace and checkpoint age on the last line of the terminal
    #[arg(long, env = "MAINSTAY_NO_PROGRESS", value_parser = switch("MAINSTAY_NO_PROGRESS"), help_heading = "Output", hide_short_help = true)]
    pub(super) no_progress: bool,
}

/// Whether standard error is a terminal that can erase a line.
pub(super) fn is_terminal() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Texts that lines are searched for.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Filters(pub(super) Vec<String>);

impl HostOptions {
    /// Whether the launcher's lines start with their time.
    pub(super) fn timestamps(&self) -> bool {
        self.timestamps.unwrap_or_else(|| !std::io::stderr().is_terminal())
    }

    /// Checks before the start whether each rank gets its own GPU and CPUs, if that was requested.
    ///
    /// # Errors
    /// The option and what is missing.
    pub(super) fn check(&self, ranks: u32, visible: Option<&str>, gpus: &[String]) -> Result<(), String> {
        if self.virtual_local_rank && visible.is_some() && gpus.len() < ranks as usize {
            return Err(format!(
                "--virtual-local-rank: {ranks} ranks need a GPU each, but CUDA_VISIBLE_DEVICES has {}",
                gpus.len()
            ));
        }
        if let Some(binding) = self.numa_binding {
            let topology = Topology::of_this_host();
            for rank in 0..ranks {
                topology
                    .cpus(binding, rank, ranks, gpus)
                    .map_err(|error| format!("--numa-binding: {error}"))?;
            }
        }
        Ok(())
    }
}

fn binding(text: &str) -> Result<numa::Binding, String> {
    match text {
        "node" => Ok(numa::Binding::Node),
        "socket" => Ok(numa::Binding::Socket),
        "exclusive" => Ok(numa::Binding::Exclusive),
        "core-complex" => Ok(numa::Binding::CoreComplex),
        _ => Err("write node, socket, exclusive or core-complex".to_owned()),
    }
}

fn logs_specs(text: &str) -> Result<String, String> {
    if text == DEFAULT_LOGS {
        return Ok(text.to_owned());
    }
    Err("only default is supported: plug-ins of Python's entry points (torchrun.logs_specs) are not loaded; \
         see --log-dir, --redirects, --tee and --duplicate-stdout-filters"
        .to_owned())
}

/// The name of a signal, as Python spells it.
fn signal_to_handle(text: &str) -> Result<i32, String> {
    let signal: Signal = text.trim().parse().map_err(|_| {
        format!("{:?} is not a signal: write names such as SIGTERM,SIGUSR1, separated by commas", text.trim())
    })?;
    let taken = [
        Signal::SIGKILL,
        Signal::SIGSTOP,
        Signal::SIGCHLD,
        Signal::SIGSEGV,
        Signal::SIGILL,
        Signal::SIGFPE,
        Signal::SIGBUS,
        Signal::SIGPIPE,
    ];
    if taken.contains(&signal) {
        return Err(format!("{signal} cannot be handled by a launcher; leave it out"));
    }
    Ok(signal as i32)
}

/// A list as torchrun reads it: separated by commas, with two commas for a literal one.
fn filters(text: &str) -> Result<Filters, String> {
    let mut found = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            ',' if letters.next_if_eq(&',').is_none() => found.push(String::new()),
            letter => {
                if let Some(last) = found.last_mut() {
                    last.push(letter);
                }
            }
        }
    }
    found.retain(|text| !text.is_empty());
    Ok(Filters(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_commas_are_one() {
        let texts = |text| filters(text).expect("a list").0;
        assert_eq!(texts("apple,orange"), ["apple", "orange"]);
        assert_eq!(texts("a,,b,c"), ["a,b", "c"]);
        assert!(texts("").is_empty() && texts(",").is_empty());
    }

    #[test]
    fn signals_that_a_program_cannot_handle_are_refused() {
        assert_eq!(signal_to_handle(" SIGUSR1"), Ok(10));
        testing::snapshot!("run", "SIGKILL to handle", signal_to_handle("SIGKILL").unwrap_err());
        testing::snapshot!("run", "no name of a signal", signal_to_handle("USR1").unwrap_err());
    }

    #[test]
    fn only_the_usual_logs_are_there() {
        assert!(logs_specs("default").is_ok());
        testing::snapshot!("run", "logs of another kind", logs_specs("mine").unwrap_err());
    }
}
