//! Warm starts of a job's ranks: when a template is started, what is learned for it, and what is told of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainstay_core::entry::Fact;
use mainstay_core::id::{Attempt, Pid};
use mainstay_core::observation::{Observation, Weight};

use crate::act::ranks::{Crew, PageTrouble, RankProcess};
use crate::act::warm::{Module, News, NoTemplate, PythonProgram, Template, TemplatePlan};
use crate::os::processes;

/// How the user wants ranks to be started.
#[derive(Clone, Debug, Default)]
pub struct WarmSettings {
    /// Whether a template may be used.
    pub enabled: bool,
    /// Modules to import in any case, from the job's start on.
    pub imports: Vec<String>,
}

/// Templates that may fail before no more are started: each without the module that spoilt the one before.
const TRIES: u32 = 5;

/// Ranks that have not told what they hold by then will not: their program is read instead.
const TOLD_WITHIN: Duration = Duration::from_secs(20);

/// How long after an attempt began new standbys are forked: the ranks need the processors first.
const PREPARE_AFTER: Duration = Duration::from_secs(1);

/// What there is to restart ranks from.
#[derive(Debug)]
pub struct Warm {
    settings: WarmSettings,
    /// None when ranks have to be started plainly.
    program: Option<PythonProgram>,
    /// Why a Python program has to be, until that is told.
    plainly: Option<String>,
    directory: PathBuf,
    template: Option<Template>,
    /// Whether the template imports what the ranks told, and not what could be read from their program.
    learned: bool,
    without: Vec<String>,
    tries: u32,
    /// When the current attempt began.
    began: Instant,
    prepared: bool,
}

impl Warm {
    /// For a job with this command, which keeps its template's files in `directory`.
    pub fn new(settings: WarmSettings, command: &[String], directory: PathBuf) -> Warm {
        let search = std::env::var_os("PATH");
        let (program, plainly) = match PythonProgram::of(command, search.as_deref()) {
            _ if !settings.enabled => (None, None),
            Ok(program) => (Some(program), None),
            Err(NoTemplate::Plainly(why)) => (None, Some(why)),
            Err(NoTemplate::NotPython(_)) => (None, None),
        };
        let (without, began) = (Vec::new(), Instant::now());
        Warm {
            settings,
            program,
            plainly,
            directory,
            template: None,
            learned: false,
            without,
            tries: 0,
            began,
            prepared: false,
        }
    }

    /// Where the first rank is to write which modules it holds, if anybody wants to know.
    pub fn modules_file(&self) -> Option<PathBuf> {
        self.program.as_ref().map(|_| self.directory.join("modules.json"))
    }

    /// The next thing that the template tells; waits for ever without one.
    pub async fn news(&mut self) -> News {
        match &mut self.template {
            Some(template) => template.news().await,
            None => std::future::pending().await,
        }
    }

    /// The template and all that waits under it.
    pub fn processes(&self) -> Vec<Pid> {
        self.template.as_ref().map(Template::processes).unwrap_or_default()
    }

    /// The template's own process, which is reaped with it and not before.
    pub fn template(&self) -> Option<Pid> {
        self.template.as_ref().map(Template::pid)
    }

    /// Starts a template when it is time, and has it fork standbys.
    pub fn look_after(&mut self, crew: &Crew) -> Option<Fact> {
        if let Some(why) = self.plainly.take() {
            return Some(observed("plain", Weight::Info, format!("ranks are started plainly: {why}")));
        }
        let learned = self.modules_file().filter(|file| file.exists());
        if learned.is_some() && !self.learned {
            // Lazy imports, which no program names, cost a restart most: a template without them is replaced.
            self.end();
        }
        if self.template.is_some() {
            if self.began.elapsed() >= PREPARE_AFTER {
                self.prepare(crew);
            }
            return None;
        }
        let program = self.program.clone()?;
        if learned.is_none() && self.settings.imports.is_empty() && self.began.elapsed() < TOLD_WITHIN {
            return None;
        }
        self.tries += 1;
        self.learned = learned.is_some();
        let plan = TemplatePlan {
            program,
            imports: self.imports(learned.as_deref()),
            without: self.without.clone(),
            environment: crew.common_environment(),
            directory: self.directory.clone(),
        };
        match Template::start(&plan) {
            Ok(template) => {
                self.template = Some(template);
                self.prepared = false;
                None
            }
            Err(error) => Some(self.give_up(&format!("it cannot be started: {error}"))),
        }
    }

    /// Has standbys forked, unless there are some: they are wanted soon.
    pub fn prepare(&mut self, crew: &Crew) {
        if let Some(template) = self.template.as_mut().filter(|template| template.is_warm() && !self.prepared)
        {
            self.prepared = true;
            template.prepare(crew.local_world_size as usize);
        }
    }

    /// What is imported: what the user named, then what the ranks held.
    fn imports(&self, learned: Option<&Path>) -> Option<Vec<Module>> {
        let named = self.settings.imports.iter().map(|name| (name.clone(), String::new()));
        let text = learned.and_then(|file| std::fs::read(file).ok());
        match text.and_then(|text| serde_json::from_slice::<Vec<Module>>(&text).ok()) {
            Some(learned) => Some(named.chain(learned).collect()),
            None if self.settings.imports.is_empty() => None,
            None => Some(named.collect()),
        }
    }

    /// Takes in what the template told; what is worth telling of it.
    pub fn heard(&mut self, news: News) -> Option<Fact> {
        match news {
            News::Warm { modules, seconds } => Some(observed(
                "warm",
                Weight::Info,
                format!(
                    "the next ranks will be forked from a process that holds their imports ({modules} modules, {seconds:.1} s)"
                ),
            )),
            News::Prepared(standbys) => {
                if let Some(template) = &mut self.template {
                    template.adopt(&standbys);
                }
                None
            }
            News::Started(_) => None,
            News::Unclean { why, module } => {
                self.end();
                match module {
                    Some(module) if self.tries < TRIES => {
                        let detail = format!("{module} is left to the ranks: once it is imported, {why}");
                        self.without.push(module);
                        Some(observed("module_left_out", Weight::Info, detail))
                    }
                    _ => Some(self.give_up(&why)),
                }
            }
            News::Failed(why) => Some(self.give_up(&why)),
            News::Gone => {
                self.end();
                (self.tries >= TRIES).then(|| self.give_up("it ended again and again; see its output.log"))
            }
        }
    }

    /// Starts ranks of an attempt from the template, if there is one that is warm. What is spared is not of this start:
    /// the guardian, and ranks that stay in their processes.
    pub fn start(
        &mut self,
        crew: &Crew,
        attempt: Attempt,
        port: u16,
        which: &[u32],
        spare: &[Pid],
    ) -> Option<Result<(Vec<RankProcess>, PageTrouble), Fact>> {
        self.began = Instant::now();
        let template = self.template.as_mut().filter(|template| template.is_warm())?;
        self.prepared = false;
        Some(crew.start_warm(template, attempt, port, which).map_err(|why| {
            let fact = self.give_up(&why);
            // What is left below us, but for what is spared, are ranks that did not come about.
            let us = Pid(i32::try_from(std::process::id()).unwrap_or(0));
            let spared = with_descendants(spare);
            for pid in processes::descendants(us).into_iter().filter(|pid| !spared.contains(pid)) {
                processes::kill_process(pid);
            }
            fact
        }))
    }

    /// Ends the template; there may be another.
    pub fn end(&mut self) {
        if let Some(template) = self.template.take() {
            template.end();
        }
    }

    /// No more templates in this job.
    fn give_up(&mut self, why: &str) -> Fact {
        self.end();
        self.program = None;
        observed("plain", Weight::Warning, format!("ranks are started plainly from here on: {why}"))
    }
}

/// These processes and all below them.
pub(super) fn with_descendants(of: &[Pid]) -> Vec<Pid> {
    let below = of.iter().flat_map(|pid| processes::descendants(*pid));
    of.iter().copied().chain(below).collect()
}

fn observed(event: &str, weight: Weight, detail: String) -> Fact {
    let component = "template".to_owned();
    Fact::Observed(Observation {
        component,
        event: event.to_owned(),
        weight,
        detail,
        ..Observation::default()
    })
}
