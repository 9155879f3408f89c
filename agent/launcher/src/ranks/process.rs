//! The processes of one attempt: started together, each with separate files, page and process group.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;

use mainstay_model::entry::ExitStatus;
use mainstay_model::id::{Attempt, Pid, Rank};
use mainstay_sys::affinity::CpuSet;
use mainstay_sys::pidfd::PidFd;
use mainstay_sys::{limits, spawn};

use crate::group::plan::TOKEN_VARIABLE;
use crate::log_files;
use crate::pages::files;
use crate::ranks::environment::{Variables, expand};
use crate::ranks::spec::{RankFiles, RankSpec};
use crate::ranks::warm::{RankOrders, Template};

/// A rank's process under watch.
#[derive(Debug)]
pub struct RankProcess {
    pub rank: Rank,
    pub local_rank: u32,
    /// Its process, which leads its own process group.
    pub pid: Pid,
    pub pidfd: Rc<PidFd>,
    pub files: RankFiles,
    /// Its heartbeat page, and the file for its reader.
    pub page: Option<(PathBuf, File)>,
    pub raised: bool,
    /// Whether its page's lifeline is watched: once per process, however often it reconnects.
    pub watched: bool,
    /// How it failed, if the kernel is tearing it down: signals sent from now on are not the cause of its end.
    pub ending: Option<ExitStatus>,
    pub exit: Option<ExitStatus>,
}

/// What to do about an error of the kernel: `usual`, unless a resource ran out.
fn advice<'a>(error: &io::Error, usual: &'a str) -> &'a str {
    if limits::is_exhaustion(error) {
        "raise the limits of open files and processes (ulimit -n, ulimit -u)"
    } else {
        usual
    }
}

fn without_pidfd(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => {
            "the seccomp profile of the container forbids it: allow pidfd_open and pidfd_send_signal, or update the \
             container runtime"
        }
        _ => "Mainstay needs Linux 5.3 or later",
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(
        "making {path} for the output of a rank: {source}; {}",
        advice(source, "give a writable --log-dir")
    )]
    Output { path: PathBuf, source: io::Error },
    #[error("starting {program}: {source}; {}", advice(source, "is it installed and on PATH?"))]
    Program { program: String, source: io::Error },
    #[error("there is no command to start")]
    NoCommand,
    #[error("watching the process {pid} (pidfd_open): {source}; {}", advice(source, without_pidfd(source)))]
    Watch { pid: i32, source: io::Error },
}

impl StartError {
    pub fn kernel_error(&self) -> Option<&io::Error> {
        match self {
            StartError::Output { source, .. }
            | StartError::Program { source, .. }
            | StartError::Watch { source, .. } => Some(source),
            StartError::NoCommand => None,
        }
    }
}

/// Why pages could not be created; reported, not fatal.
pub type PageProblem = Option<String>;

impl RankSpec {
    /// Starts these ranks of an attempt, by their indexes on the host. If one cannot be started, the previous ones are killed.
    ///
    /// # Errors
    /// [`StartError`]; then nothing of the attempt runs.
    pub fn start(
        &self,
        attempt: Attempt,
        master_port: u16,
        which: &[u32],
    ) -> Result<(Vec<RankProcess>, PageProblem), StartError> {
        self.check_that_the_program_answers()?;
        let mut started = Vec::new();
        let mut problem = None;
        for &local_rank in which {
            match self.start_rank(attempt, local_rank, master_port, &mut problem) {
                Ok(rank) => started.push(rank),
                Err(error) => {
                    started.iter().for_each(abandon);
                    return Err(error);
                }
            }
        }
        Ok((started, problem))
    }

    /// Turns a template's standbys into these ranks of an attempt.
    ///
    /// # Errors
    /// Why they could not be started so. The caller must kill what runs of them then: all our descendants except the guardian.
    pub fn start_warm(
        &self,
        template: &mut Template,
        attempt: Attempt,
        master_port: u16,
        which: &[u32],
    ) -> Result<(Vec<RankProcess>, PageProblem), String> {
        let mut problem = None;
        let mut orders = Vec::new();
        let mut prepared = Vec::new();
        for &local_rank in which {
            let rank = self.prepare(attempt, local_rank, master_port, &mut problem);
            // If a directory cannot be created, the plain start reports it.
            let made = [&rank.files.stdout, &rank.files.stderr].map(|path| output_file(path));
            made.into_iter().collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
            let arguments = template.arguments().iter().map(|argument| expand(argument, local_rank));
            orders.push(RankOrders {
                name: self.rank(local_rank).to_string(),
                launcher: i32::try_from(std::process::id()).unwrap_or(0),
                cgroup: self.cgroup_procs.clone(),
                stdout: rank.files.stdout.clone(),
                stderr: rank.files.stderr.clone(),
                unset: if rank.page.is_none() { vec!["MAINSTAY_PAGE"] } else { Vec::new() },
                environment: rank.environment.iter().cloned().collect(),
                arguments: arguments.collect(),
                cpus: self.cpus(local_rank),
            });
            prepared.push(rank);
        }
        let pids = template.start_ranks(&orders)?;
        let ranks = prepared.into_iter().zip(pids).map(|(rank, pid)| {
            let pidfd =
                PidFd::open(pid).map_err(|error| format!("watching the process {}: {error}", pid.0))?;
            Ok(rank.started(pid, pidfd))
        });
        Ok((ranks.collect::<Result<Vec<_>, String>>()?, problem))
    }

    /// A new process that cannot read its program or its directory would block its parent.
    fn check_that_the_program_answers(&self) -> Result<(), StartError> {
        let program = self.settings.command.first().ok_or(StartError::NoCommand)?.clone();
        let path = PathBuf::from(&program);
        let look = move || {
            let _ = std::fs::metadata(".");
            let search =
                std::env::var_os("PATH").filter(|_| !path.as_os_str().as_encoded_bytes().contains(&b'/'));
            match search {
                Some(search) => {
                    _ = std::env::split_paths(&search).any(|directory| directory.join(&path).exists())
                }
                None => _ = path.exists(),
            }
        };
        let silent = || {
            io::Error::new(
                io::ErrorKind::TimedOut,
                "its file system or the working directory does not answer",
            )
        };
        log_files::ask_of_program(look).ok_or_else(|| StartError::Program { program, source: silent() })
    }

    fn start_rank(
        &self,
        attempt: Attempt,
        local_rank: u32,
        master_port: u16,
        problem: &mut PageProblem,
    ) -> Result<RankProcess, StartError> {
        let mut rank = self.prepare(attempt, local_rank, master_port, problem);
        let (program, arguments) = self.settings.command.split_first().ok_or(StartError::NoCommand)?;
        let mut command = Command::new(expand(program, local_rank));
        command
            .args(arguments.iter().map(|argument| OsString::from(expand(argument, local_rank))))
            .env_remove("MAINSTAY_PAGE")
            .env_remove(TOKEN_VARIABLE)
            .env_remove("MAINSTAY_PREVIOUS_WORLD_SIZE")
            .env_remove("MAINSTAY_CHECKPOINT_POOL")
            .env_remove("MAINSTAY_CHECKPOINT_RESUME")
            .envs(std::mem::take(&mut rank.environment))
            .stdin(Stdio::null())
            .stdout(output_file(&rank.files.stdout)?)
            .stderr(output_file(&rank.files.stderr)?);
        if let Some(cpus) = self.cpus(local_rank) {
            spawn::confine(&mut command, CpuSet::from_cpus(&cpus));
        }
        let cgroup = self.cgroup_procs.as_ref().and_then(|path| File::options().write(true).open(path).ok());
        let child = spawn::spawn_bound(&mut command, cgroup.as_ref())
            .map_err(|source| StartError::Program { program: program.clone(), source })?;
        let pid = Pid(i32::try_from(child.id()).unwrap_or(0));
        let pidfd = PidFd::open(pid).map_err(|source| StartError::Watch { pid: pid.0, source })?;
        Ok(rank.started(pid, pidfd))
    }

    /// The files, the page and the environment of a rank.
    fn prepare(
        &self,
        attempt: Attempt,
        local_rank: u32,
        master_port: u16,
        problem: &mut PageProblem,
    ) -> PreparedRank {
        let files = self.files(attempt, local_rank);
        let page = self.make_page(attempt, local_rank, problem);
        let page_path = page.as_ref().map(|(path, _)| &**path);
        let environment = self.environment(attempt, local_rank, master_port, &files, page_path);
        PreparedRank { rank: self.rank(local_rank), local_rank, files, page, environment }
    }

    fn make_page(
        &self,
        attempt: Attempt,
        local_rank: u32,
        problem: &mut PageProblem,
    ) -> Option<(PathBuf, File)> {
        let directory = self.page_dir.as_ref()?;
        let made = files::make(directory, &self.page_spec(attempt, local_rank));
        made.map_err(|error| {
            problem.get_or_insert(format!(
                "making a heartbeat page in {}: {error}; training goes on without heartbeats",
                directory.display()
            ));
        })
        .ok()
    }
}

impl RankProcess {
    /// Sends a signal, unless it has ended.
    pub(crate) fn signal(&self, signal: i32) {
        if self.exit.is_none()
            && let Err(error) = self.pidfd.signal(signal)
        {
            tracing::error!(rank = self.rank.0, signal, %error, "could not signal a rank");
        }
    }
}

/// A rank without its process.
struct PreparedRank {
    rank: Rank,
    local_rank: u32,
    files: RankFiles,
    page: Option<(PathBuf, File)>,
    environment: Variables,
}

impl PreparedRank {
    fn started(self, pid: Pid, pidfd: PidFd) -> RankProcess {
        let PreparedRank { rank, local_rank, files, page, .. } = self;
        RankProcess {
            rank,
            local_rank,
            pid,
            pidfd: Rc::new(pidfd),
            files,
            page,
            raised: false,
            watched: false,
            ending: None,
            exit: None,
        }
    }
}

fn output_file(path: &Path) -> Result<File, StartError> {
    log_files::append_to(path).map_err(|source| StartError::Output { path: path.to_owned(), source })
}

/// Ends a rank of an attempt whose start failed.
fn abandon(rank: &RankProcess) {
    let _ = rank.pidfd.signal(nix::libc::SIGKILL);
    let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(rank.pid.0), None);
}
