//! The launcher's end of the template. It is started during an attempt, imports while the ranks train, and provides ranks
//! when an attempt starts.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mainstay_model::id::Pid;
use mainstay_sys::{priority, processes, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::group::plan::TOKEN_VARIABLE;
use crate::log_files;
use crate::ranks::warm::python::PythonProgram;

/// The template's program, for Python 3.9 and later.
const SOURCE: &str = include_str!("template.py");

/// How long standbys may take to become ranks. They only open their files; a plain start is the fallback.
const START_WITHIN: Duration = Duration::from_secs(5);

const READ_BYTES: usize = 8192;

/// A module's name and the file that it came from, empty for built-in modules.
pub type Module = (String, String);

#[derive(Clone, Debug)]
pub struct TemplatePlan {
    pub program: PythonProgram,
    /// What to import, in this order; none to import what the program's text imports.
    pub imports: Option<Vec<Module>>,
    /// Modules that must not be imported here: their effects do not survive a fork.
    pub without: Vec<String>,
    /// Variables of all ranks that imports may look at; the rest is the launcher's own environment.
    pub environment: Vec<(&'static str, String)>,
    /// Whether it runs only when a processor is idle, until it gets the order to hurry: the ranks need the processors.
    pub idle: bool,
    /// Where its program, its plan and its output are kept.
    pub directory: PathBuf,
}

/// What one rank is started with.
#[derive(Clone, Debug, Serialize)]
pub struct RankOrders {
    pub name: String,
    /// The process that becomes its parent: the launcher.
    pub launcher: i32,
    pub cgroup: Option<PathBuf>,
    pub stdout: PathBuf,
    pub stderr: PathBuf,
    /// Variables to set, over the launcher's own.
    pub environment: std::collections::BTreeMap<&'static str, String>,
    pub unset: Vec<&'static str>,
    /// `sys.argv`.
    pub arguments: Vec<String>,
    /// The CPUs to run on; none for all that the launcher may use.
    pub cpus: Option<Vec<usize>>,
}

/// Messages that the template sends by itself.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateEvent {
    Warm {
        modules: u32,
        seconds: f64,
    },
    /// A fork of it would not work correctly.
    Unclean {
        why: String,
        /// The module whose import caused it, if known.
        module: Option<String>,
    },
    /// The number of a rank's modules that it lacks.
    Lacks(u32),
    Prepared(Vec<i32>),
    Started(Vec<i32>),
    Failed(String),
    #[serde(skip)]
    Gone,
}

/// A running template. Dropping it ends it and its standbys.
#[derive(Debug)]
pub struct Template {
    process: Child,
    control: UnixStream,
    received: Vec<u8>,
    /// `sys.argv` of its ranks, before a rank's number is inserted.
    arguments: Vec<String>,
    /// Everything is imported and a fork is possible.
    warm: bool,
    /// Standbys that already are our children.
    standbys: Vec<Pid>,
    /// It yields to all other processes.
    idle: bool,
    began: Instant,
}

#[derive(Serialize)]
struct Plan<'a> {
    path: PathBuf,
    module: bool,
    target: &'a str,
    imports: Option<&'a [Module]>,
    without: &'a [String],
    arguments: &'a [String],
    original: Vec<&'a str>,
}

impl Template {
    /// Starts a template; [`Template::update`] reports when it is warm. Must be called from the main thread, within a tokio runtime.
    ///
    /// # Errors
    /// Its files could not be written, or its interpreter could not be started.
    pub fn start(plan: &TemplatePlan) -> io::Result<Template> {
        let file = |name: &str| plan.directory.join(name);
        let program = &plan.program;
        let interpreter = program.interpreter.iter().map(String::as_str);
        let original = interpreter.chain(program.module.then_some("-m"));
        let written = Plan {
            path: first_search_path(program)?,
            module: program.module,
            target: &program.target,
            imports: plan.imports.as_deref(),
            without: &plan.without,
            arguments: &program.arguments,
            original: original.chain(program.arguments.iter().map(String::as_str)).collect(),
        };
        let output = write_files(&plan.directory, serde_json::to_vec(&written)?)?;

        let (ours, theirs) = StdStream::pair()?;
        // No other child is started between here and the spawn that inherits it.
        fcntl_setfd(&theirs, FdFlags::empty())?;
        let (interpreter, options) = program.interpreter.split_first().ok_or(ErrorKind::InvalidInput)?;
        let mut environment = plan.environment.clone();
        if !["OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"].iter().any(|name| std::env::var_os(name).is_some()) {
            // OpenBLAS starts threads when it is loaded; the ranks get theirs again.
            environment.extend([("OPENBLAS_NUM_THREADS", "1".to_owned()), ("MAINSTAY_BLAS", "1".to_owned())]);
        }
        let mut command = Command::new(interpreter);
        command
            .args(options)
            .arg(file("template.py"))
            .arg(theirs.as_raw_fd().to_string())
            .arg(file("plan.json"))
            // For people who look for their program in the process list.
            .arg("--")
            .args(&program.arguments)
            .env_remove("MAINSTAY_PAGE")
            .env_remove(TOKEN_VARIABLE)
            .env_remove("MAINSTAY_PREVIOUS_WORLD_SIZE")
            .envs(environment)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let process = spawn::spawn_bound(&mut command, None)?;
        drop(theirs);
        ours.set_nonblocking(true)?;
        let control = UnixStream::from_std(ours)?;
        let pid = Pid(i32::try_from(process.id()).unwrap_or(0));
        Ok(Template {
            process,
            control,
            received: Vec::new(),
            arguments: program.arguments.clone(),
            warm: false,
            standbys: Vec::new(),
            idle: plan.idle && priority::idle(pid).is_ok(),
            began: Instant::now(),
        })
    }

    pub fn pid(&self) -> Pid {
        Pid(i32::try_from(self.process.id()).unwrap_or(0))
    }

    /// The template and all processes that wait under it: they are not orphans of an attempt.
    pub fn processes(&self) -> Vec<Pid> {
        let mut all = processes::descendants(self.pid());
        all.push(self.pid());
        all.extend(&self.standbys);
        all
    }

    /// `sys.argv` of its ranks, before a rank's number is inserted.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// Whether ranks can be started from it.
    pub fn is_warm(&self) -> bool {
        self.warm
    }

    /// The next message. The future may be dropped and created again at any time.
    pub async fn update(&mut self) -> TemplateEvent {
        loop {
            if let Some(update) = self.line() {
                return update;
            }
            let mut buffer = [0; READ_BYTES];
            let ready = self.control.readable().await;
            // Through the runtime, so that it notices when nothing is left.
            let read = ready.and_then(|()| {
                self.control.try_io(Interest::READABLE, || receive(&self.control, &mut buffer))
            });
            match read {
                Ok(length) if length > 0 => self.received.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => return TemplateEvent::Gone,
            }
        }
    }

    /// Takes over standbys as our children. From here on they belong to the template.
    pub fn adopt(&mut self, standbys: &[i32]) {
        self.standbys = standbys.iter().copied().map(Pid).collect();
        let _ = self.report(&serde_json::json!({ "adopt": true }));
    }

    /// Gives it normal priority. Ranks inherit the priority, so call this before any of them is forked.
    ///
    /// # Errors
    /// The kernel refused. Then do not fork from it.
    pub fn hurry(&mut self) -> io::Result<()> {
        if self.idle {
            priority::normal(self.pid())?;
            self.idle = false;
        }
        Ok(())
    }

    /// Makes it yield to all other processes again, before it is warm.
    pub fn rest(&mut self) {
        self.idle = !self.warm && priority::idle(self.pid()).is_ok();
    }

    /// Waits until it is warm, at most as long as it has been importing: a plain start would import everything from the start.
    pub fn finish_imports(&mut self) -> bool {
        let until = Instant::now() + self.began.elapsed().min(START_WITHIN);
        while !self.warm {
            let mut buffer = [0; READ_BYTES];
            if !self.wait(PollFlags::IN, until).unwrap_or(false) {
                return false;
            }
            match receive(&self.control, &mut buffer) {
                Ok(length) if length > 0 => self.received.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // Its news has the reason.
                Ok(_) | Err(_) => return false,
            }
            self.warm = matches!(self.first_line(), Some(TemplateEvent::Warm { .. }));
            if self.received.contains(&b'\n') && !self.warm {
                return false;
            }
        }
        true
    }

    /// Asks how many of a rank's modules it lacks; the answer is in its news.
    pub fn compare(&mut self, modules: &Path) {
        // If sending fails, the template is gone and its news reports that.
        let _ = self.report(&serde_json::json!({ "compare": modules }));
    }

    /// Makes it fork standbys in advance, so that a start need not wait for that.
    pub fn prepare(&mut self, ranks: usize) {
        // If sending fails, the template is gone and its news reports that.
        let _ = self.report(&serde_json::json!({ "prepare": ranks }));
    }

    /// Turns its standbys into ranks. They are our children from here on.
    ///
    /// # Errors
    /// They could not be started. None of them runs once the template has been ended.
    pub fn start_ranks(&mut self, orders: &[RankOrders]) -> Result<Vec<Pid>, String> {
        self.report(&serde_json::json!({ "start": orders }))
            .map_err(|error| format!("it cannot be reached: {error}"))?;
        let until = Instant::now() + START_WITHIN;
        loop {
            match self.line() {
                Some(TemplateEvent::Started(pids)) if pids.len() == orders.len() => {
                    let ranks: Vec<Pid> = pids.into_iter().map(Pid).collect();
                    self.standbys.retain(|standby| !ranks.contains(standby));
                    return Ok(ranks);
                }
                Some(TemplateEvent::Failed(why)) => return Err(why),
                Some(TemplateEvent::Started(_) | TemplateEvent::Unclean { .. } | TemplateEvent::Gone) => {
                    return Err("its answer is invalid".to_owned());
                }
                // A message from before the request. Standbys that are left over are our children too.
                Some(TemplateEvent::Prepared(pids)) => {
                    self.standbys = pids.into_iter().map(Pid).collect();
                    continue;
                }
                Some(TemplateEvent::Warm { .. } | TemplateEvent::Lacks(_)) => continue,
                None => {}
            }
            match self.wait(PollFlags::IN, until) {
                Ok(true) => {}
                Ok(false) => return Err(format!("it did not answer within {} s", START_WITHIN.as_secs())),
                Err(error) => return Err(error.to_string()),
            }
            let mut buffer = [0; READ_BYTES];
            match receive(&self.control, &mut buffer) {
                Ok(0) => return Err("it ended".to_owned()),
                Ok(length) => self.received.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Ends it and all processes that wait under it.
    pub fn end(mut self) {
        for pid in self.processes() {
            processes::kill_process(pid);
        }
        let _ = self.process.wait();
    }

    /// The first message that was not processed yet.
    fn first_line(&self) -> Option<TemplateEvent> {
        let end = self.received.iter().position(|byte| *byte == b'\n')?;
        serde_json::from_slice(&self.received[..=end]).ok()
    }

    fn line(&mut self) -> Option<TemplateEvent> {
        let end = self.received.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.received.drain(..=end).collect();
        let update = serde_json::from_slice(&line)
            .unwrap_or_else(|error| TemplateEvent::Failed(format!("its answer is not understood: {error}")));
        self.warm |= matches!(update, TemplateEvent::Warm { .. });
        Some(update)
    }

    fn report(&mut self, order: &serde_json::Value) -> io::Result<()> {
        let line = format!("{order}\n");
        let mut left = line.as_bytes();
        let until = Instant::now() + START_WITHIN;
        while !left.is_empty() {
            match send(&self.control, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(length) => left = &left[length..],
                Err(rustix::io::Errno::AGAIN) => {
                    if !self.wait(PollFlags::OUT, until)? {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits for the socket. Returns whether it became ready in time. The wait is short: the template has nothing else to do.
    fn wait(&self, flags: PollFlags, until: Instant) -> io::Result<bool> {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::from_borrowed_fd(self.control.as_fd(), flags)], Some(&timeout)) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        // Its standbys see their sockets close and exit.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Reads the available data, without waiting and without the runtime.
fn receive(control: &UnixStream, buffer: &mut [u8]) -> io::Result<usize> {
    let (length, _) = recv(control, buffer, RecvFlags::DONTWAIT)?;
    Ok(length)
}

/// Writes the files that a template reads; returns its output file.
fn write_files(directory: &Path, plan: Vec<u8>) -> io::Result<fs::File> {
    let directory = directory.to_owned();
    let write = move || {
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("template.py"), SOURCE)?;
        fs::write(directory.join("plan.json"), plan)?;
        fs::File::options().create(true).append(true).open(directory.join("output.log"))
    };
    log_files::ask(write).unwrap_or_else(|| Err(ErrorKind::TimedOut.into()))
}

/// The first entry that the interpreter puts into `sys.path`: the script's directory, or the working directory for a module.
fn first_search_path(program: &PythonProgram) -> io::Result<PathBuf> {
    if program.module {
        return std::env::current_dir();
    }
    let target = program.target.clone();
    let script = log_files::ask_of_program(move || fs::canonicalize(target));
    let script = script.unwrap_or_else(|| Err(ErrorKind::TimedOut.into()))?;
    Ok(script.parent().map(Path::to_owned).unwrap_or_default())
}
