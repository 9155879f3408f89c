//! A user's policy for commands, in the process that a launcher would have.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use mainstay_launcher::policy::{News, Policy, Reply};
use mainstay_model::id::Incident;
use mainstay_recovery::policy::Advice;
use mainstay_view::replay::UserPolicy;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use crate::output;

/// How long a decision may take here: what is slower than a launcher permits is reported, and not cut off.
const DECISION_TIMEOUT: Duration = Duration::from_secs(10);

/// A policy that is loaded. Its process belongs to a thread: commands themselves run in a runtime, and wait for it.
#[derive(Debug)]
pub(crate) struct Script {
    questions: Sender<(Value, bool)>,
    replies: Receiver<Reply>,
    name: String,
    slowest: Cell<Duration>,
}

impl Script {
    /// Loads a policy; the text of its error if it cannot be used.
    pub(crate) fn load(file: &Path) -> anyhow::Result<Result<Script, String>> {
        let runtime = Builder::new_current_thread().enable_all().build().context("starting a runtime")?;
        let (questions, asked) = channel();
        let (answers, replies) = channel();
        let (loaded, is_loaded) = channel();
        let file = PathBuf::from(file);
        std::thread::Builder::new()
            .name("policy".to_owned())
            .spawn(move || serve(&runtime, &file, &loaded, &asked, &answers))
            .context("starting a thread")?;
        let loaded = is_loaded.recv().map_err(|_| anyhow!("the thread of the policy ended"))?;
        Ok(loaded.map(|name| Script { questions, replies, name, slowest: Cell::default() }))
    }

    /// How long its slowest decision so far took.
    pub(crate) fn slowest(&self) -> Duration {
        self.slowest.get()
    }

    /// Its answer to a case (`recovery::policy::question`). `trace`: with the lines that were executed.
    pub(crate) fn ask(&self, case: Value, trace: bool) -> Reply {
        let began = Instant::now();
        let reply = self.questions.send((case, trace)).ok().and_then(|()| self.replies.recv().ok());
        self.slowest.set(began.elapsed().max(self.slowest.get()));
        let gone = || Reply { advice: Err(format!("{}: its thread ended", self.name)), lines: Vec::new() };
        reply.unwrap_or_else(gone)
    }
}

impl UserPolicy for Script {
    fn name(&self) -> &str {
        &self.name
    }

    fn advise(&self, case: &Value) -> Result<Option<Advice>, String> {
        self.ask(case.clone(), false).advice
    }
}

/// Reports whether the policy is loaded, then answers until no more is asked.
fn serve(
    runtime: &Runtime,
    file: &Path,
    loaded: &Sender<Result<String, String>>,
    asked: &Receiver<(Value, bool)>,
    answers: &Sender<Reply>,
) {
    let _within = runtime.enter();
    let mut policy = Policy::start(file, "python3".to_owned(), None, DECISION_TIMEOUT);
    let result = match runtime.block_on(next(&mut policy)) {
        News::Broken(words) => Err(words),
        _ => Ok(policy.name().to_owned()),
    };
    let _ = loaded.send(result);
    while let Ok((case, trace)) = asked.recv() {
        policy.ask(Incident(1), &case, trace);
        let reply = loop {
            if let News::Answered(_, reply) = runtime.block_on(next(&mut policy)) {
                break reply;
            }
        };
        let _ = answers.send(reply);
    }
    let _ = runtime.block_on(policy.end());
}

/// The next news; shows what the policy prints.
async fn next(policy: &mut Policy) -> News {
    loop {
        match policy.next().await {
            News::Printed(line) => output::note(&line),
            news => return news,
        }
    }
}
