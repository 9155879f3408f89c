//! The trainer's own checkpoints. Before each start of a job it is decided which step the job resumes from. The agent
//! decides if one keeps checkpoints. Without it this launcher decides, and what is sealed has no copy outside this host.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mainstay_checkpoint::files::title::title;
use mainstay_checkpoint::files::{Kind, Rule, is_unknown_checkpoint};
use mainstay_tier::files::{FileWatch, Files, FilesError, FilesSettings, WatchRequest};
use mainstay_tier::peer::{Progress, Service, Settings};
use tokio::sync::mpsc;

use crate::agent_link::checkpoint::{self, NotToStart, Resumed};
use crate::checkpoints::lineage::Output;
use crate::group::plan::Aborting;
use crate::ranks::Start;

/// Time between two looks at the directories.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The directories that `--checkpoint-watch` names.
#[derive(Clone, Debug)]
pub struct Sealing {
    outputs: Vec<Output>,
    sockets: Vec<PathBuf>,
    /// Where this launcher keeps its notes if no agent does.
    home: PathBuf,
    /// The directory of this launch alone.
    run_dir: PathBuf,
    own: Arc<Mutex<Option<Arc<Files>>>>,
}

impl Sealing {
    /// For the outputs of a job that its trainer writes itself. The job's logs are in `log_dir`, this launch's in
    /// `run_dir`. None if nothing is watched.
    pub fn new(
        outputs: &[Output],
        sockets: &[PathBuf],
        (log_dir, run_dir): (&Path, &Path),
    ) -> Option<Sealing> {
        let outputs: Vec<Output> = outputs.iter().filter(|output| !output.kind.is_empty()).cloned().collect();
        (!outputs.is_empty()).then(|| Sealing {
            outputs,
            sockets: sockets.to_vec(),
            // Run directories do not start with a dot.
            home: log_dir.join(".sealed"),
            run_dir: run_dir.to_owned(),
            own: Arc::default(),
        })
    }

    /// Restores the newest whole step in each directory. `again`: the job has run before.
    ///
    /// # Errors
    /// Why the ranks must not be started.
    pub async fn go_back(
        &self,
        again: bool,
        print: &(dyn Fn(String) + Sync),
    ) -> Result<Vec<WentBack>, NotToStart> {
        let mut all = Vec::new();
        for output in &self.outputs {
            let place = output.directory.display();
            let answer = checkpoint::restore_files(&self.sockets, output, again, print).await?;
            let (resumed, kept_by) = match answer {
                Some((resumed, kept_by)) => {
                    if resumed == Resumed::Nothing {
                        print_unsealed(output, print).await;
                    }
                    (resumed, Some(kept_by))
                }
                None => {
                    self.go_back_alone(output, again, print).await.map_err(NotToStart::Lost)?;
                    (Resumed::Unknown, None)
                }
            };
            let protection = format!("{place} (sealed in place; {})", copies(kept_by.as_deref()));
            all.push(WentBack { output: output.clone(), resumed, protection });
        }
        Ok(all)
    }

    /// Begins to restore it for a start of a job that has run before.
    pub(crate) fn begin(&self, start: Start) -> Starting {
        let (sender, lines) = mpsc::unbounded_channel();
        let sealing = self.clone();
        let task = tokio::spawn(async move {
            let print = move |line: String| drop(sender.send(line));
            sealing.go_back(true, &print).await.map(drop).map_err(NotToStart::describe)
        });
        Starting { start, task: Aborting(task), lines }
    }

    async fn go_back_alone(
        &self,
        output: &Output,
        again: bool,
        print: &(dyn Fn(String) + Sync),
    ) -> Result<(), String> {
        let (sender, mut reports) = mpsc::unbounded_channel();
        let (sealing, of) = (self.clone(), output.clone());
        let place = output.directory.display().to_string();
        let work = tokio::task::spawn_blocking(move || {
            let watch = sealing.watch(&of)?;
            let report = |at: Progress| {
                if !at.message.is_empty() {
                    let _ = sender.send(format!("checkpoint: {}", at.message));
                }
            };
            let restored = watch.restore(again, &report)?;
            Ok(restored)
        });
        // The channel closes when the work ends and drops its sender.
        while let Some(line) = reports.recv().await {
            print(line);
        }
        match work.await {
            Ok(Ok(restored)) => {
                match restored.decision.step {
                    Some(key) => print(format!("{place}: {} is whole", title(key.step))),
                    None => {
                        print(format!("{place}: no whole step is known"));
                        print_unsealed(output, print).await;
                    }
                }
                Ok(())
            }
            Ok(Err(FilesError::Lost(message))) => Err(message),
            Ok(Err(error)) => {
                print(format!(
                    "{place}: not sealed: {error}; the trainer resumes from the files as they are"
                ));
                Ok(())
            }
            Err(error) => Err(format!("{place}: {error}")),
        }
    }

    fn watch(&self, output: &Output) -> Result<Arc<FileWatch>, FilesError> {
        let directory = &output.directory;
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        let files = match &*own {
            Some(files) => Arc::clone(files),
            None => {
                let files = Arc::new(self.files()?);
                *own = Some(Arc::clone(&files));
                files
            }
        };
        let wanted = WatchRequest {
            directory: directory.to_owned(),
            run: output.run.clone(),
            user: None,
            rules: rules_of(output),
            expect: 0,
            quiet: 0,
            hosts: Vec::new(),
            // Without an agent, no one else reads it.
            shared: Some(false),
        };
        let watch = files.watch(wanted)?;
        if !watch.has_sealed() {
            std::fs::create_dir_all(directory)
                .map_err(|source| FilesError::Io { path: directory.to_owned(), source })?;
        }
        Ok(watch)
    }

    fn files(&self) -> Result<Files, FilesError> {
        let failed = |error: String| FilesError::Manifest(error);
        let name = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned());
        let settings = Settings {
            interval: POLL_INTERVAL,
            ..Settings::alone(self.run_dir.join("sealing"), name.unwrap_or_default())
        };
        let pass = mainstay_tier::peer::token::Token::random().map_err(|error| failed(error.to_string()))?;
        let service = Service::start(settings, pass).map_err(|error| failed(error.to_string()))?;
        let plan = FilesSettings {
            home: self.home.clone(),
            spool: self.run_dir.join("sealing/spool"),
            hosts: Vec::new(),
            interval: POLL_INTERVAL,
        };
        Ok(Files::new(Arc::new(service), plan))
    }
}

/// A directory of the trainer's own with its newest whole step in place.
#[derive(Clone, Debug)]
pub struct WentBack {
    /// The directory.
    pub output: Output,
    /// The result of the search.
    pub resumed: Resumed,
    /// How it is protected, in words.
    pub protection: String,
}

/// How copies of what is sealed are kept elsewhere, in words.
fn copies(kept_by: Option<&str>) -> String {
    match kept_by {
        None => "no agent keeps a copy elsewhere".to_owned(),
        Some("") => "no copy elsewhere".to_owned(),
        Some(kept_by) => kept_by.to_owned(),
    }
}

/// The line at a job's start that names what can be resumed from, and where it is. `saved`: where `mainstay.checkpoint`
/// saves, and whether it saves to memory first; `kept_by`: what keeps copies of it.
pub fn protection(saved: (&Path, bool), kept_by: Option<&str>, watched: &[String]) -> String {
    let (directory, is_in_memory) = saved;
    let memory = if is_in_memory { "memory, then " } else { "" };
    let own = format!("mainstay.checkpoint ({memory}{}; {})", directory.display(), copies(kept_by));
    let all: Vec<&str> = std::iter::once(own.as_str()).chain(watched.iter().map(String::as_str)).collect();
    let others = if watched.is_empty() {
        "checkpoints that the trainer writes itself"
    } else {
        "what it writes elsewhere"
    };
    format!("protected: {}; not protected: {others} (--checkpoint-watch)", all.join(", "))
}

/// A start that waits until it is decided which step the job resumes from.
#[derive(Debug)]
pub(crate) struct Starting {
    pub(crate) start: Start,
    task: Aborting<Result<(), String>>,
    pub(crate) lines: mpsc::UnboundedReceiver<String>,
}

/// Progress of such a start.
pub(crate) enum StartProgress {
    Line(String),
    Done(Result<(), String>),
}

impl Starting {
    /// The next progress.
    pub(crate) async fn next(&mut self) -> StartProgress {
        tokio::select! {
            biased;
            Some(line) = self.lines.recv() => StartProgress::Line(line),
            done = &mut self.task.0 => StartProgress::Done(done.unwrap_or_else(|error| Err(error.to_string()))),
        }
    }
}

fn rules_of(output: &Output) -> Vec<Rule> {
    Kind::parse(&output.kind).unwrap_or(Kind::Auto).rules()
}

/// Names in a directory that look like checkpoints and are not sealed.
fn unknown_checkpoints(output: &Output) -> Vec<String> {
    let rules = rules_of(output);
    let names = std::fs::read_dir(&output.directory).into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut unknown: Vec<String> = names.filter(|name| is_unknown_checkpoint(&rules, name)).collect();
    unknown.sort();
    unknown
}

/// Reports each directory in which nothing is sealed: a user who sees such files there would assume that they are protected.
async fn print_unsealed(output: &Output, print: &(dyn Fn(String) + Sync)) {
    let searched = output.clone();
    // The file system may be slow or not answer.
    let unknown =
        tokio::task::spawn_blocking(move || unknown_checkpoints(&searched)).await.unwrap_or_default();
    if let Some(message) = not_sealed(&unknown) {
        print(format!("{}: {message}", output.directory.display()));
    }
}

fn not_sealed(unknown: &[String]) -> Option<String> {
    let which = match unknown {
        [] => return None,
        [one] => format!("{one:?} is not sealed, because its name is of no known kind"),
        [first, more @ ..] => format!(
            "{first:?} and {} more are not sealed, because their names are of no known kind",
            more.len()
        ),
    };
    Some(format!("{which}: save as ckpt.pt or with the step in the name, such as model_100.pt"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_what_is_protected_and_how_and_what_is_not() {
        let place = Path::new("/runs/7/checkpoints");
        testing::snapshot!("launcher", "protection without an agent", protection((place, true), None, &[]));
        let watched = ["/out (sealed in place)".to_owned()];
        let by_agent = protection((place, false), Some("copies"), &watched);
        testing::snapshot!("launcher", "protection by an agent", by_agent);
    }

    #[test]
    fn what_is_not_sealed_is_named_with_what_would_be() {
        assert_eq!(not_sealed(&[]), None);
        let names = ["model.pt", "optim.pt", "rng.pt"].map(str::to_owned);
        testing::snapshot!("launcher", "one file is not sealed", not_sealed(&names[..1]).unwrap_or_default());
        testing::snapshot!(
            "launcher",
            "several files are not sealed",
            not_sealed(&names).unwrap_or_default()
        );
    }
}
