//! Hooks: commands and webhooks that receive verdicts, decisions and ends of jobs. Each has a separate thread and queue, so
//! that a hook that hangs blocks no other. An entry that could not be delivered after all tries is kept as a dead letter.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use hyper::Method;
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::redact::mask_json;
use serde_json::Value;
use tokio::runtime::Builder;

use mainstay_sys::child::{ended, kill_group};
use mainstay_sys::http::{self, Question, Secure};

/// Prefix of the address of a webhook with TLS.
const BY_TLS: &str = "https://";

/// Entries that may wait for a hook.
const MAX_QUEUED_ENTRIES: usize = 256;

/// The time before the second try; doubled before each further one.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The dead letters of a hook have at most this many bytes.
const MOST_DEAD_LETTERS: u64 = 16 << 20;

/// Which hooks there are and what they receive.
#[derive(Clone, Debug)]
pub struct HookPlan {
    /// Shell commands; they receive the entry on standard input.
    pub commands: Vec<String>,
    /// `http://host:port/path` or `https://…`; the entry is posted.
    pub webhooks: Vec<String>,
    /// Certificate authorities for webhooks with TLS, in addition to those of the host; none for the host's alone.
    pub authorities: Option<PathBuf>,
    /// The kinds of entries: `verdict`, `decision`, `job_ended`.
    pub on: Vec<String>,
    /// How long one try may take.
    pub deadline: Duration,
    /// How often it is tried.
    pub tries: u32,
    /// The directory for dead letters, and for what hooks read.
    pub directory: PathBuf,
}

/// The hooks of an agent.
#[derive(Debug, Default)]
pub struct Hooks {
    on: Vec<String>,
    dead: PathBuf,
    queues: Vec<(String, SyncSender<Arc<Entry>>)>,
}

impl Hooks {
    /// Starts a thread for each hook; none if there are no hooks.
    ///
    /// # Errors
    /// The kernel gives no more threads, or a webhook has TLS and no authority is trusted.
    pub fn start(plan: &HookPlan) -> io::Result<Hooks> {
        let by_tls = plan.webhooks.iter().any(|address| address.starts_with(BY_TLS));
        let secure = by_tls.then(|| Secure::new(plan.authorities.as_deref())).transpose();
        let secure = secure.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let commands = plan.commands.iter().map(|command| Hook::Command(command.clone()));
        let webhooks = plan.webhooks.iter().map(|address| Hook::Webhook(address.clone()));
        let dead = plan.directory.join("hooks-failed.jsonl");
        let mut queues = Vec::new();
        for (number, hook) in commands.chain(webhooks).enumerate() {
            let (sender, receiver) = sync_channel(MAX_QUEUED_ENTRIES);
            let name = hook.name().to_owned();
            let reported = plan.directory.join(format!("hook-{number}.json"));
            let (dead, secure) = (dead.clone(), secure.clone());
            let teller = Teller { hook, reported, dead, deadline: plan.deadline, tries: plan.tries, secure };
            std::thread::Builder::new().name("hook".to_owned()).spawn(move || teller.run(&receiver))?;
            queues.push((name, sender));
        }
        Ok(Hooks { on: plan.on.clone(), dead, queues })
    }

    /// Sends an entry to the hooks that are configured for its kind. Never waits.
    pub fn report(&self, entry: &Entry) {
        if self.queues.is_empty()
            || !kind(&entry.body).is_some_and(|kind| self.on.iter().any(|on| on == kind))
        {
            return;
        }
        let entry = Arc::new(entry.clone());
        for (name, queue) in &self.queues {
            let why = match queue.try_send(entry.clone()) {
                Ok(()) => continue,
                Err(TrySendError::Full(_)) => "it does not keep up",
                Err(TrySendError::Disconnected(_)) => "its thread ended",
            };
            bury(&self.dead, name, why, &entry);
        }
    }
}

/// The name of the entry's kind in the configuration.
fn kind(body: &Body) -> Option<&'static str> {
    match body {
        Body::Verdict(_) => Some("verdict"),
        Body::Decision(_) => Some("decision"),
        Body::Fact(Fact::JobEnded { .. }) => Some("job_ended"),
        Body::Fact(_) | Body::Health(_) | Body::Outcome(_) | Body::Finding(_) => None,
    }
}

#[derive(Debug)]
enum Hook {
    Command(String),
    Webhook(String),
}

impl Hook {
    fn name(&self) -> &str {
        match self {
            Hook::Command(name) | Hook::Webhook(name) => name,
        }
    }
}

struct Teller {
    hook: Hook,
    reported: PathBuf,
    dead: PathBuf,
    deadline: Duration,
    tries: u32,
    secure: Option<Secure>,
}

impl Teller {
    fn run(&self, entries: &Receiver<Arc<Entry>>) {
        while let Ok(entry) = entries.recv() {
            let mut again_after = RETRY_AFTER;
            for number in 1..=self.tries.max(1) {
                let Err(why) = self.report(&entry) else { break };
                if number >= self.tries {
                    bury(&self.dead, self.hook.name(), &why, &entry);
                } else {
                    std::thread::sleep(again_after);
                    again_after *= 2;
                }
            }
        }
    }

    fn report(&self, entry: &Entry) -> Result<(), String> {
        let text = masked(entry).to_string().into_bytes();
        match &self.hook {
            Hook::Command(command) => self.command(command, &text, entry),
            Hook::Webhook(address) => {
                on_this_thread(post(address, &text, self.deadline, self.secure.as_ref()))
            }
        }
    }

    fn command(&self, command: &str, text: &[u8], entry: &Entry) -> Result<(), String> {
        // A file, not a pipe: a command that does not read must not block this thread.
        std::fs::write(&self.reported, text)
            .map_err(|error| format!("writing {}: {error}", self.reported.display()))?;
        let input = File::open(&self.reported).map_err(|error| error.to_string())?;
        let mut child = Command::new("/bin/sh")
            .args(["-c", command])
            .env("MAINSTAY_EVENT", kind(&entry.body).unwrap_or_default())
            .env("MAINSTAY_JOB_ID", entry.job.as_ref().map_or("", |job| job.0.as_str()))
            .stdin(Stdio::from(input))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("starting /bin/sh: {error}"))?;
        match ended(&mut child, self.deadline) {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(format!("it ended with {status}")),
            Ok(None) | Err(_) => {
                kill_group(&child);
                let _ = child.wait();
                Err(format!("it took longer than {} s and was killed", self.deadline.as_secs_f64()))
            }
        }
    }
}

/// Runs this on the hook's own thread: deliveries are rare and need no concurrency.
fn on_this_thread(telling: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())?;
    let reported = runtime.block_on(telling);
    // A name look-up that hangs is left running.
    runtime.shutdown_background();
    reported
}

/// Posts the text to `http://host:port/path` or `https://host:port/path`. Any status of 2xx counts as delivered.
async fn post(address: &str, text: &[u8], deadline: Duration, secure: Option<&Secure>) -> Result<(), String> {
    let plain = address.strip_prefix("http://").map(|rest| (rest, 80, None));
    let by_tls = address.strip_prefix(BY_TLS).map(|rest| (rest, 443, secure));
    let (rest, usual_port, secure) =
        plain.or(by_tls).ok_or("a webhook starts with http:// or https://; for others use a command")?;
    let (host, path) = rest.find('/').map_or((rest, "/"), |slash| rest.split_at(slash));
    let with_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let address = if with_port { host.to_owned() } else { format!("{host}:{usual_port}") };
    let (method, header) = (Method::POST, ("Content-Type", "application/json"));
    let question = Question { address: &address, method, path, header, body: text, deadline, secure };
    match http::report(&question).await.map_err(|error| error.to_string())? {
        status if status.is_success() => Ok(()),
        status => Err(format!("it answered {status}")),
    }
}

/// The entry as JSON, without secrets: it quotes the output of programs, and leaves the host, so it names the host too.
fn masked(entry: &Entry) -> Value {
    let mut json = serde_json::to_value(entry).unwrap_or_else(|error| error.to_string().into());
    mask_json(&mut json);
    if let (Some(entry), Ok(host)) = (json.as_object_mut(), nix::unistd::gethostname()) {
        entry.insert("host".to_owned(), host.to_string_lossy().into());
    }
    json
}

/// Keeps an entry that could not be delivered.
fn bury(dead: &Path, hook: &str, why: &str, entry: &Entry) {
    tracing::warn!(hook, why, "a hook could not be notified");
    let letter = serde_json::json!({ "hook": hook, "why": why, "entry": masked(entry) });
    let keep = || {
        let mut file = OpenOptions::new().create(true).append(true).open(dead)?;
        if file.metadata()?.len() < MOST_DEAD_LETTERS {
            file.write_all(format!("{letter}\n").as_bytes())?;
        }
        Ok::<(), io::Error>(())
    };
    if let Err(error) = keep() {
        tracing::warn!(path = %dead.display(), %error, "a dead letter cannot be kept");
    }
}
