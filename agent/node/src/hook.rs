//! Hooks: commands and webhooks that receive what happens to jobs and to the host. Each has a separate thread and queue, so
//! that a hook that hangs blocks no other. What could not be delivered after all tries is kept as a dead letter.

mod health_event;
mod notice;

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
use mainstay_model::id::BootId;
use mainstay_model::redact::{mask, mask_json};
use tokio::runtime::Builder;

use mainstay_sys::child::{ended, kill_group};
use mainstay_sys::clock;
use mainstay_sys::http::{self, Question, Secure};

pub use notice::HookFormat;
use notice::{Notice, OpenNotices, Sender};

/// Prefix of the address of a webhook with TLS.
const BY_TLS: &str = "https://";

/// Prefix of the address of a Unix socket.
pub(crate) const UNIX: &str = "unix:///";

/// Entries that may wait for a hook.
const MAX_QUEUED_ENTRIES: usize = 256;

/// The time before the second try; doubled before each further one.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The dead letters of a hook have at most this many bytes.
const MOST_DEAD_LETTERS: u64 = 16 << 20;

/// Which hooks there are and what they receive.
#[derive(Clone, Debug)]
pub struct HookPlan {
    /// Shell commands; they receive it on standard input.
    pub commands: Vec<String>,
    /// `http://host:port/path` or `https://…`; it is posted. PagerDuty's integration key follows after `#`. For NVSentinel
    /// `unix:///path`.
    pub webhooks: Vec<String>,
    /// Certificate authorities for webhooks with TLS, in addition to those of the host; none for the host's alone.
    pub authorities: Option<PathBuf>,
    /// The kinds of entries: those of [`KINDS`].
    pub on: Vec<String>,
    /// The form of what they receive.
    pub format: HookFormat,
    /// Where people reach this agent's page.
    pub link: Option<String>,
    /// How long one try may take.
    pub deadline: Duration,
    /// How often it is tried.
    pub tries: u32,
    /// The directory for dead letters, and for what hooks read.
    pub directory: PathBuf,
}

/// The kinds of entries that hooks can receive.
pub const KINDS: [&str; 5] = ["verdict", "decision", "job_ended", "finding", "health"];

/// The hooks of an agent.
#[derive(Debug, Default)]
pub struct Hooks {
    on: Vec<String>,
    format: HookFormat,
    open: OpenNotices,
    dead: PathBuf,
    queues: Vec<(String, SyncSender<Arc<Notice>>)>,
}

impl Hooks {
    /// Starts a thread for each hook; none if there are no hooks.
    ///
    /// # Errors
    /// The kernel gives no more threads, or a webhook has TLS and no authority is trusted.
    pub fn start(plan: &HookPlan) -> io::Result<Hooks> {
        let mut queues = Vec::new();
        for teller in tellers(plan)? {
            let (sender, receiver) = sync_channel(MAX_QUEUED_ENTRIES);
            let name = teller.hook.name().to_owned();
            std::thread::Builder::new().name("hook".to_owned()).spawn(move || teller.run(&receiver))?;
            queues.push((name, sender));
        }
        let (on, format) = (plan.on.clone(), plan.format);
        Ok(Hooks { on, format, open: OpenNotices::default(), dead: dead_letters(plan), queues })
    }

    /// Sends an entry to the hooks that are configured for its kind. Never waits. `leads`: this host's launcher decides
    /// for the job. Notices about a job are sent by this host only, and entries by each.
    pub fn report(&mut self, entry: &Entry, leads: bool) {
        if self.queues.is_empty() {
            return;
        }
        let notices = match self.format {
            HookFormat::Raw => {
                let is_on = kind(&entry.body).is_some_and(|kind| self.on.iter().any(|on| on == kind));
                if is_on { vec![Notice::of(entry)] } else { Vec::new() }
            }
            _ if leads || entry.job.is_none() => self.open.notices(entry, &self.on),
            _ => Vec::new(),
        };
        for notice in notices.into_iter().map(Arc::new) {
            for (name, queue) in &self.queues {
                let why = match queue.try_send(notice.clone()) {
                    Ok(()) => continue,
                    Err(TrySendError::Full(_)) => "it does not keep up",
                    Err(TrySendError::Disconnected(_)) => "its thread ended",
                };
                bury(&self.dead, name, why, &notice.entry);
            }
        }
    }

    /// Sends a notice that says it is a test to each hook, once: the name of the hook, and why it could not be delivered.
    ///
    /// # Errors
    /// As of [`Hooks::start`].
    pub fn test(plan: &HookPlan) -> io::Result<Vec<(String, Result<(), String>)>> {
        let at = clock::now();
        let reason = "this is a test of the hooks; nothing has happened".to_owned();
        let body = Body::Fact(Fact::JobEnded { exit: 0, reason });
        let notice =
            Notice::test(Entry { seq: 0, at, boot: BootId::default(), job: None, origin_seq: None, body });
        Ok(tellers(plan)?.iter().map(|of| (of.hook.name().to_owned(), of.report(&notice))).collect())
    }
}

fn dead_letters(plan: &HookPlan) -> PathBuf {
    plan.directory.join("hooks-failed.jsonl")
}

/// What delivers to each hook.
fn tellers(plan: &HookPlan) -> io::Result<Vec<Teller>> {
    let by_tls = plan.webhooks.iter().any(|address| address.starts_with(BY_TLS));
    let secure = by_tls.then(|| Secure::new(plan.authorities.as_deref())).transpose();
    let secure = secure.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let host =
        nix::unistd::gethostname().map_or_else(|_| String::new(), |host| host.to_string_lossy().into_owned());
    let commands = plan.commands.iter().map(|command| (Hook::Command(command.clone()), None));
    let webhooks = plan.webhooks.iter().map(|address| {
        let (address, key) =
            address.split_once('#').map_or((&**address, None), |(address, key)| (address, Some(key)));
        (Hook::Webhook(address.to_owned()), key.map(str::to_owned))
    });
    let teller = |(number, (hook, key))| Teller {
        hook,
        sender: Sender { format: plan.format, host: host.clone(), link: plan.link.clone(), key },
        reported: plan.directory.join(format!("hook-{number}.json")),
        dead: dead_letters(plan),
        deadline: plan.deadline,
        tries: plan.tries,
        secure: secure.clone(),
    };
    Ok(commands.chain(webhooks).enumerate().map(teller).collect())
}

/// The name of the entry's kind in the configuration.
fn kind(body: &Body) -> Option<&'static str> {
    match body {
        Body::Verdict(_) => Some("verdict"),
        Body::Decision(_) => Some("decision"),
        Body::Fact(Fact::JobEnded { .. }) => Some("job_ended"),
        Body::Finding(_) => Some("finding"),
        Body::Health(_) => Some("health"),
        Body::Fact(_) | Body::Outcome(_) => None,
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
    sender: Sender,
    reported: PathBuf,
    dead: PathBuf,
    deadline: Duration,
    tries: u32,
    secure: Option<Secure>,
}

impl Teller {
    fn run(&self, notices: &Receiver<Arc<Notice>>) {
        while let Ok(notice) = notices.recv() {
            let mut again_after = RETRY_AFTER;
            for number in 1..=self.tries.max(1) {
                let Err(why) = self.report(&notice) else { break };
                if number >= self.tries {
                    bury(&self.dead, self.hook.name(), &why, &notice.entry);
                } else {
                    std::thread::sleep(again_after);
                    again_after *= 2;
                }
            }
        }
    }

    fn report(&self, notice: &Notice) -> Result<(), String> {
        let text = self.sender.write(notice).to_string().into_bytes();
        match &self.hook {
            Hook::Webhook(address) if self.sender.format.strategy().is_some() => {
                let Some(mut event) = self.sender.health_event(notice) else { return Ok(()) };
                event.message = mask(&event.message);
                on_this_thread(health_event::send(address, event, self.deadline))
            }
            Hook::Command(command) => self.command(command, &text, &notice.entry),
            Hook::Webhook(address) => on_this_thread(self.post(address, &text)),
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

    /// Posts the text to `http://host:port/path` or `https://host:port/path`. Any status of 2xx counts as delivered.
    async fn post(&self, address: &str, text: &[u8]) -> Result<(), String> {
        let plain = address.strip_prefix("http://").map(|rest| (rest, 80, None));
        let by_tls = address.strip_prefix(BY_TLS).map(|rest| (rest, 443, self.secure.as_ref()));
        let (rest, usual_port, secure) =
            plain.or(by_tls).ok_or("a webhook starts with http:// or https://; for others use a command")?;
        let (host, path) = rest.find('/').map_or((rest, "/"), |slash| rest.split_at(slash));
        let with_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let address = if with_port { host.to_owned() } else { format!("{host}:{usual_port}") };
        let header = ("Content-Type", self.sender.format.content_type());
        let (method, deadline) = (Method::POST, self.deadline);
        let question = Question { address: &address, method, path, header, body: text, deadline, secure };
        match http::report(&question).await.map_err(|error| error.to_string())? {
            status if status.is_success() => Ok(()),
            status => Err(format!("it answered {status}")),
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

/// Keeps an entry that could not be delivered.
fn bury(dead: &Path, hook: &str, why: &str, entry: &Entry) {
    tracing::warn!(hook, why, "a hook could not be notified");
    let mut letter = serde_json::json!({ "hook": hook, "why": why, "entry": entry });
    mask_json(&mut letter);
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
