//! The processes of one attempt: started together, each with its own files, page and process group.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;

use mainstay_core::base::id::{Attempt, Pid, Rank};
use mainstay_core::formats::nvrx::socket_name;
use mainstay_core::model::entry::ExitStatus;
use mainstay_core::recovery::hosts::wire::Seat;
use mainstay_heartbeat::PageSpec;

use crate::act::devices;
use crate::act::environment::{self, RankEnvironment, expand};
use crate::act::log_files;
use crate::act::page_files;
use crate::act::round_server;
use crate::act::warm::{RankOrders, Template};
use crate::os::affinity::CpuSet;
use crate::os::pidfd::PidFd;
use crate::os::{clock, numa, spawn};

/// What every attempt of a job starts from.
#[derive(Clone, Debug)]
pub struct RankSpec {
    /// The job's name.
    pub job: String,
    /// The run id as the user gave it.
    pub run_id: String,
    /// This launch of it: the run that its checkpoints belong to, and behind an `@` what no other launch has. The same on all hosts of a job.
    pub launch: String,
    /// This launcher and no other, where a job has several: its processes are found by it.
    pub launcher: Option<String>,
    /// Where this host is in the job.
    pub seat: Seat,
    /// Program and arguments; `${local_rank}` in them is replaced.
    pub command: Vec<String>,
    /// Ranks on this host.
    pub local_world_size: u32,
    /// How many ranks the job's last run had, where that is known.
    pub previous_size: Option<u32>,
    /// How many ranks this run had before, if it was another number.
    pub ran_before: Option<u32>,
    /// `ROLE_NAME`.
    pub role: String,
    /// `MASTER_ADDR`.
    pub master_addr: String,
    /// `TORCHELASTIC_MAX_RESTARTS`.
    pub max_restarts: u32,
    /// Logs go to `attempt_N/<local rank>/` in here.
    pub run_dir: PathBuf,
    /// Where logs go in place of `run_dir` while that does not answer.
    pub logs_aside: Option<PathBuf>,
    /// `MAINSTAY_CHECKPOINT_DIR`.
    pub checkpoint_dir: PathBuf,
    /// `MAINSTAY_CHECKPOINT_POOL`: the memory that the launcher keeps for checkpoints; none where ranks write to the disk.
    pub checkpoint_pool: Option<PathBuf>,
    /// `MAINSTAY_CHECKPOINT_RESUME` by rank: the step from which all hosts go on, and the root of the rank's shard.
    pub resume: BTreeMap<u32, String>,
    /// Where heartbeat pages are made; none to run without.
    pub page_dir: Option<PathBuf>,
    /// The boot id as sixteen bytes, for the pages.
    pub boot_id: [u8; 16],
    /// The `cgroup.procs` of the job's cgroup, if there is one.
    pub cgroup_procs: Option<PathBuf>,
    /// `MAINSTAY_MODULES` of the first rank: where its client writes which modules it holds; none to not ask.
    pub modules_file: Option<PathBuf>,
    /// The GPUs that ranks are to see, if not all that the launcher's own environment names.
    pub devices: Option<Vec<String>>,
    /// Whether each rank sees its own GPU only, as the first one, and is told that its local rank is 0.
    pub virtual_local_rank: bool,
    /// Which CPUs ranks are bound to; none for all that the launcher may use.
    pub numa: Option<numa::Binding>,
}

/// A rank's process under watch.
#[derive(Debug)]
pub struct RankProcess {
    /// Which rank.
    pub rank: Rank,
    /// Its place on the host.
    pub local_rank: u32,
    /// Its process, which leads its own process group.
    pub pid: Pid,
    /// The handle that tells of its end.
    pub pidfd: Rc<PidFd>,
    /// Its files.
    pub files: RankFiles,
    /// Its heartbeat page, with the file for whoever reads it.
    pub page: Option<(PathBuf, File)>,
    /// Whether it said that it raised.
    pub raised: bool,
    /// Whether its page's lifeline is watched: once per process, however often it connects anew.
    pub watched: bool,
    /// How it failed, if the kernel is taking it apart: from here on nothing that is sent to it is what ends it.
    pub ending: Option<ExitStatus>,
    /// How it ended, once it has.
    pub exit: Option<ExitStatus>,
}

/// Where a rank writes to.
#[derive(Clone, Debug)]
pub struct RankFiles {
    /// Standard output.
    pub stdout: PathBuf,
    /// Standard error.
    pub stderr: PathBuf,
    /// `TORCHELASTIC_ERROR_FILE`.
    pub error: PathBuf,
    /// `MAINSTAY_STACKS`.
    pub stacks: PathBuf,
}

/// Why an attempt could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A file or directory for a rank's output could not be made.
    #[error("making {path} for the output of a rank: {source}; give a writable --log-dir")]
    Output {
        /// The file or directory.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// The program could not be executed.
    #[error("starting {program}: {source}; is it installed and on PATH?")]
    Program {
        /// The program as given.
        program: String,
        /// What the kernel says.
        source: io::Error,
    },
    /// The command is empty.
    #[error("there is no command to start")]
    NoCommand,
    /// The new process cannot be watched.
    #[error("watching the process {pid}: {source}; Mainstay needs Linux 5.3 or later")]
    Watch {
        /// The process.
        pid: i32,
        /// What the kernel says.
        source: io::Error,
    },
}

/// Pages that could not be made are told, not fatal.
pub type PageTrouble = Option<String>;

impl RankSpec {
    /// Starts these ranks of an attempt, by their places on the host. If one cannot be started, those before it are killed again.
    ///
    /// # Errors
    /// [`StartError`]; nothing of the attempt runs then.
    pub fn start(
        &self,
        attempt: Attempt,
        master_port: u16,
        which: &[u32],
    ) -> Result<(Vec<RankProcess>, PageTrouble), StartError> {
        self.check_that_the_program_answers()?;
        let mut started = Vec::new();
        let mut trouble = None;
        for &local_rank in which {
            match self.start_rank(attempt, local_rank, master_port, &mut trouble) {
                Ok(rank) => started.push(rank),
                Err(error) => {
                    started.iter().for_each(abandon);
                    return Err(error);
                }
            }
        }
        Ok((started, trouble))
    }

    /// Makes these ranks of an attempt out of a template's standbys.
    ///
    /// # Errors
    /// Why they could not be started so. What then runs of them has to be killed: it is ours, beside the guardian.
    pub fn start_warm(
        &self,
        template: &mut Template,
        attempt: Attempt,
        master_port: u16,
        which: &[u32],
    ) -> Result<(Vec<RankProcess>, PageTrouble), String> {
        let mut trouble = None;
        let mut orders = Vec::new();
        let mut places = Vec::new();
        for &local_rank in which {
            let files = self.files(attempt, local_rank);
            // A directory that cannot be made is for a plain start to tell.
            let made = [&files.stdout, &files.stderr].map(|path| output_file(path));
            made.into_iter().collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
            let page = self.make_page(attempt, local_rank, &mut trouble);
            let environment = self.environment(attempt, local_rank, master_port, &files, page.as_ref());
            let words = template.arguments().iter().map(|argument| expand(argument, local_rank));
            orders.push(RankOrders {
                name: self.rank(local_rank).to_string(),
                launcher: i32::try_from(std::process::id()).unwrap_or(0),
                cgroup: self.cgroup_procs.clone(),
                stdout: files.stdout.clone(),
                stderr: files.stderr.clone(),
                unset: if page.is_none() { vec!["MAINSTAY_PAGE"] } else { Vec::new() },
                environment: environment.into_iter().collect(),
                arguments: words.collect(),
                cpus: self.cpus(local_rank),
            });
            places.push((local_rank, files, page));
        }
        let pids = template.start_ranks(&orders)?;
        let ranks = places.into_iter().zip(pids).map(|((local_rank, files, page), pid)| {
            let pidfd =
                PidFd::open(pid).map_err(|error| format!("watching the process {}: {error}", pid.0))?;
            Ok(RankProcess::new(self.rank(local_rank), local_rank, pid, pidfd, files, page))
        });
        Ok((ranks.collect::<Result<Vec<_>, String>>()?, trouble))
    }

    /// The GPUs that are left to the ranks without that of one of them.
    ///
    /// # Errors
    /// There would be too few of them; in words for a person.
    pub fn devices_without(&self, local_rank: u32) -> Result<Vec<String>, String> {
        devices::without(&self.visible_devices(), local_rank, self.local_world_size)
    }

    /// The GPUs that the ranks see, by the names that they have in `CUDA_VISIBLE_DEVICES`.
    pub fn visible_devices(&self) -> Vec<String> {
        let given = std::env::var(devices::VARIABLE).ok();
        match &self.devices {
            Some(devices) => devices.clone(),
            None => devices::visible(given.as_deref(), Path::new("/dev")),
        }
    }

    /// The CPUs that a rank is bound to; none where it is bound to none, or where its place is not known any more.
    fn cpus(&self, local_rank: u32) -> Option<Vec<usize>> {
        let gpus = self.visible_devices();
        let cpus = numa::Topology::of_this_host().cpus(self.numa?, local_rank, self.local_world_size, &gpus);
        cpus.inspect_err(|error| tracing::warn!(local_rank, "the rank is bound to no CPUs: {error}")).ok()
    }

    /// The GPU that a rank alone sees, where each sees its own only.
    fn own_device(&self, local_rank: u32) -> String {
        let visible = self.visible_devices();
        visible.get(local_rank as usize).cloned().unwrap_or_else(|| local_rank.to_string())
    }

    /// What all processes that this launcher started have in their environment, and those of no other launcher.
    pub fn mark(&self) -> String {
        match &self.launcher {
            Some(launcher) => format!("MAINSTAY_LAUNCHER={launcher}"),
            None => format!("MAINSTAY_LAUNCH={}", self.launch),
        }
    }

    /// The run that the job's checkpoints belong to, without the launch.
    pub fn checkpoint_run(&self) -> &str {
        self.launch.split_once('@').map_or(&self.launch, |(run, _)| run)
    }

    /// The number of a rank in the job.
    pub fn rank(&self, local_rank: u32) -> Rank {
        Rank(self.seat.first_rank + local_rank)
    }

    /// All ranks of the host, by their places.
    pub fn all_ranks(&self) -> Vec<u32> {
        (0..self.local_world_size).collect()
    }

    /// What a rank that goes on in its process is told of the attempt that begins.
    pub fn round_environment(
        &self,
        attempt: Attempt,
        rank: &RankProcess,
        port: u16,
    ) -> BTreeMap<String, String> {
        self.rank_environment(attempt, rank.local_rank, port, &rank.files, None, None).of_the_round()
    }

    /// Chooses where the ranks of an attempt write: beside their pages where the log directory does not answer, which is then
    /// returned, for ranks that are not started do no work at all.
    pub fn choose_logs(&mut self, attempt: Attempt) -> Option<PathBuf> {
        let directory = self.run_dir.join(format!("attempt_{}", attempt.0));
        let made = log_files::make_directory(&directory);
        let is_silent = made.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
        let aside = self.page_dir.as_ref().map(|pages| pages.join("logs"));
        self.logs_aside = aside.filter(|_| is_silent);
        self.logs_aside.iter().for_each(|aside| log_files::write_aside(aside));
        self.logs_aside.clone()
    }

    /// The files of a rank in an attempt.
    pub fn files(&self, attempt: Attempt, local_rank: u32) -> RankFiles {
        let logs = self.logs_aside.as_ref().unwrap_or(&self.run_dir);
        let directory = logs.join(format!("attempt_{}", attempt.0)).join(local_rank.to_string());
        RankFiles {
            stdout: directory.join("stdout.log"),
            stderr: directory.join("stderr.log"),
            error: directory.join("error.json"),
            stacks: directory.join("stacks.txt"),
        }
    }

    /// A new process that cannot read its program or its directory would hold up whoever starts it.
    fn check_that_the_program_answers(&self) -> Result<(), StartError> {
        let program = self.command.first().ok_or(StartError::NoCommand)?.clone();
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
        trouble: &mut PageTrouble,
    ) -> Result<RankProcess, StartError> {
        let files = self.files(attempt, local_rank);
        let page = self.make_page(attempt, local_rank, trouble);
        let (program, arguments) = self.command.split_first().ok_or(StartError::NoCommand)?;
        let environment = self.environment(attempt, local_rank, master_port, &files, page.as_ref());
        let mut command = Command::new(expand(program, local_rank));
        command
            .args(arguments.iter().map(|argument| OsString::from(expand(argument, local_rank))))
            .env_remove("MAINSTAY_PAGE")
            .env_remove("MAINSTAY_PREVIOUS_WORLD_SIZE")
            .env_remove("MAINSTAY_CHECKPOINT_POOL")
            .env_remove("MAINSTAY_CHECKPOINT_RESUME")
            .envs(environment)
            .stdin(Stdio::null())
            .stdout(output_file(&files.stdout)?)
            .stderr(output_file(&files.stderr)?);
        if let Some(cpus) = self.cpus(local_rank) {
            spawn::confine(&mut command, CpuSet::of(&cpus));
        }
        let cgroup = self.cgroup_procs.as_ref().and_then(|path| File::options().write(true).open(path).ok());
        let child = spawn::spawn_bound(&mut command, cgroup.as_ref())
            .map_err(|source| StartError::Program { program: program.clone(), source })?;
        let pid = Pid(i32::try_from(child.id()).unwrap_or(0));
        let pidfd = PidFd::open(pid).map_err(|source| StartError::Watch { pid: pid.0, source })?;
        Ok(RankProcess::new(self.rank(local_rank), local_rank, pid, pidfd, files, page))
    }

    /// The variables of a rank, beside the launcher's own.
    fn environment(
        &self,
        attempt: Attempt,
        local_rank: u32,
        master_port: u16,
        files: &RankFiles,
        page: Option<&(PathBuf, File)>,
    ) -> Vec<(&'static str, String)> {
        // Made before the ranks, if it could be.
        let socket = |name: &str| {
            let path = self.page_dir.as_ref().map(|directory| directory.join(name));
            path.filter(|socket| socket.exists())
        };
        let monitor = socket(&socket_name(local_rank));
        let (rounds, drill) = (socket(round_server::SOCKET), socket(round_server::DRILL_SOCKET));
        let page = page.map(|(path, _)| path.as_path());
        let environment =
            self.rank_environment(attempt, local_rank, master_port, files, page, monitor.as_deref());
        RankEnvironment { rounds: rounds.as_deref(), drill: drill.as_deref(), ..environment }
            .variables(is_set)
    }

    fn rank_environment<'a>(
        &'a self,
        attempt: Attempt,
        local_rank: u32,
        master_port: u16,
        files: &'a RankFiles,
        page: Option<&'a Path>,
        monitor: Option<&'a Path>,
    ) -> RankEnvironment<'a> {
        RankEnvironment {
            job: &self.job,
            run_id: &self.run_id,
            launch: &self.launch,
            launcher: self.launcher.as_deref(),
            rank: self.rank(local_rank).0,
            local_rank,
            world_size: self.seat.world_size,
            local_world_size: self.local_world_size,
            group_rank: self.seat.group_rank,
            group_world_size: self.seat.group_world_size,
            previous_size: match attempt.0 {
                0 => self.previous_size,
                _ => Some(self.ran_before.unwrap_or(self.seat.world_size)),
            },
            role: &self.role,
            master_addr: &self.master_addr,
            master_port,
            attempt: attempt.0,
            max_restarts: self.max_restarts,
            error_file: &files.error,
            stacks_file: &files.stacks,
            page,
            monitor,
            checkpoint_dir: &self.checkpoint_dir,
            checkpoint_pool: self.checkpoint_pool.as_deref(),
            resume: self.resume.get(&self.rank(local_rank).0).map(String::as_str),
            // In the log directory: a rank must not wait for one that does not answer.
            modules_file: self
                .modules_file
                .as_deref()
                .filter(|_| local_rank == 0 && self.logs_aside.is_none()),
            rounds: None,
            drill: None,
            devices: if self.virtual_local_rank {
                Some(self.own_device(local_rank))
            } else {
                self.devices.as_ref().map(|devices| devices.join(","))
            },
            virtual_local_rank: self.virtual_local_rank,
        }
    }

    /// The variables that all ranks have in common and that imports look at, for a template.
    pub fn common_environment(&self) -> Vec<(&'static str, String)> {
        let mut variables = environment::tunables(self.local_world_size, is_set);
        // By these it is found what is left of a job and of a launch, whoever started it.
        variables.push(("MAINSTAY_JOB_ID", self.job.clone()));
        variables.push(("MAINSTAY_LAUNCH", self.launch.clone()));
        variables.extend(self.launcher.clone().map(|launcher| ("MAINSTAY_LAUNCHER", launcher)));
        variables
    }

    /// What a page of a rank says of it.
    pub fn page_spec(&self, attempt: Attempt, local_rank: u32) -> PageSpec<'_> {
        PageSpec {
            job: &self.job,
            rank: self.rank(local_rank).0,
            local_rank,
            world_size: self.seat.world_size,
            attempt: attempt.0,
            boot_id: self.boot_id,
            creator_pid: std::process::id(),
            created_mono_ns: clock::mono().0,
        }
    }

    fn make_page(
        &self,
        attempt: Attempt,
        local_rank: u32,
        trouble: &mut PageTrouble,
    ) -> Option<(PathBuf, File)> {
        let directory = self.page_dir.as_ref()?;
        let made = page_files::make(directory, &self.page_spec(attempt, local_rank));
        made.map_err(|error| {
            trouble.get_or_insert(format!(
                "making a heartbeat page in {}: {error}; training goes on without heartbeats",
                directory.display()
            ));
        })
        .ok()
    }
}

impl RankProcess {
    fn new(
        rank: Rank,
        local_rank: u32,
        pid: Pid,
        pidfd: PidFd,
        files: RankFiles,
        page: Option<(PathBuf, File)>,
    ) -> RankProcess {
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

/// Whether the user has set a variable.
fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

fn output_file(path: &Path) -> Result<File, StartError> {
    log_files::append_to(path).map_err(|source| StartError::Output { path: path.to_owned(), source })
}

/// Ends a rank of an attempt that does not come about.
fn abandon(rank: &RankProcess) {
    let _ = rank.pidfd.signal(nix::libc::SIGKILL);
    let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(rank.pid.0), None);
}
