//! Warm starts of a job's ranks: when a template is started, what is learned for it, and what is reported about it.

mod python;
mod template;

pub(crate) use python::interpreter_of;
use python::{NoTemplate, PythonProgram};
use template::{Module, TemplateEvent, TemplatePlan};
pub(super) use template::{RankOrders, Template};

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainstay_model::entry::Fact;
use mainstay_model::id::{Attempt, Pid};
use mainstay_model::observation::{Observation, Weight};

use crate::log_files;
use crate::ranks::RankSpec;
use crate::ranks::process::{PageProblem, RankProcess};
use crate::run::next_of;
use mainstay_sys::{affinity, priority, processes};

/// The user's settings for starting ranks.
#[derive(Clone, Debug, Default)]
pub struct WarmSettings {
    /// Whether a template may be used.
    pub enabled: bool,
    /// Modules to import in any case, from the job's start.
    pub imports: Vec<String>,
}

/// Number of templates that may fail before no more are started: each lacks the module that spoilt the previous one.
const MAX_FAILED_TEMPLATES: u32 = 5;

/// If ranks have not reported their modules after this time, their program is read instead.
const REPORT_WITHIN: Duration = Duration::from_secs(20);

/// How long after the start of an attempt new standbys are forked: the ranks need the processors first.
const PREPARE_AFTER: Duration = Duration::from_secs(1);

/// The processes from which ranks can be restarted.
#[derive(Debug)]
pub struct Warm {
    settings: WarmSettings,
    /// None if ranks must be started without a template.
    program: Option<PythonProgram>,
    /// Why a Python program must be started without one, until that is reported.
    plainly: Option<String>,
    directory: PathBuf,
    template: Option<Template>,
    /// One that holds more and replaces the template when it is warm.
    next: Option<Template>,
    /// Whether the template holds the modules that the ranks reported, not only those read from their program.
    learned: bool,
    /// Whether the ranks hold modules that the template lacks.
    lacks: bool,
    /// Whether a template can yield the processors to the ranks and be brought back.
    can_be_idle: bool,
    without: Vec<String>,
    tries: u32,
    /// When the current attempt started.
    began: Instant,
    prepared: bool,
}

impl Warm {
    /// For a job with this command. The template's files are in `directory`.
    pub fn new(settings: WarmSettings, command: &[String], directory: PathBuf) -> Warm {
        let search = std::env::var_os("PATH");
        let (program, plainly) = match PythonProgram::parse(command, search.as_deref()) {
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
            next: None,
            learned: false,
            lacks: false,
            can_be_idle: priority::can_be_idle(),
            without,
            tries: 0,
            began,
            prepared: false,
        }
    }

    /// Where the first rank writes which modules it holds, if that is needed.
    pub fn modules_file(&self) -> Option<PathBuf> {
        self.program.as_ref().map(|_| self.directory.join("modules.json"))
    }

    /// Whether what the next ranks import is imported; none if ranks are started without a template.
    pub(crate) fn are_imports_done(&self) -> Option<bool> {
        self.program.as_ref().map(|_| self.template.as_ref().is_some_and(Template::is_warm))
    }

    /// The next news from a template, and whether it is from the next one; waits forever without one.
    pub(crate) async fn update(&mut self) -> (bool, TemplateEvent) {
        tokio::select! {
            update = next_of(self.template.as_mut().map(Template::update)) => (false, update),
            update = next_of(self.next.as_mut().map(Template::update)) => (true, update),
        }
    }

    /// The templates and all processes that wait under them.
    pub(crate) fn processes(&self) -> Vec<Pid> {
        self.template.iter().chain(&self.next).flat_map(Template::processes).collect()
    }

    /// The templates' own processes, which are reaped with them and not earlier.
    pub(crate) fn templates(&self) -> impl Iterator<Item = Pid> + '_ {
        self.template.iter().chain(&self.next).map(Template::pid)
    }

    /// Starts a template when it is time, and has it fork standbys. `waits`: no rank of this host needs its processors.
    pub(crate) fn look_after(&mut self, rank_spec: &RankSpec, waits: bool) -> Option<Fact> {
        if let Some(why) = self.plainly.take() {
            return Some(observed("plain", Weight::Info, format!("ranks are started plainly: {why}")));
        }
        let learned = self.modules_file().filter(|file| log_files::length(file).is_some());
        if log_files::are_stuck() {
            // Starting a template needs files too.
            return None;
        }
        if let (Some(template), Some(file), false) = (&mut self.template, &learned, self.learned) {
            // The ranks run; the modules read from their program must be imported before the rest.
            let hurried = template.hurry();
            if template.is_warm() && hurried.is_ok() {
                self.learned = true;
                template.compare(file);
            }
        }
        if self.lacks && self.next.is_none() && self.tries < MAX_FAILED_TEMPLATES {
            self.lacks = false;
            let program = self.program.clone()?;
            // One that cannot be started changes nothing.
            self.next = self.begin(program, learned.as_deref(), self.can_be_idle, rank_spec).ok();
        }
        if let Some(next) = self.next.as_mut().filter(|_| self.began.elapsed() >= REPORT_WITHIN)
            && next.hurry().is_err()
        {
            self.drop_next();
        }
        if let Some(template) = &mut self.template {
            if self.began.elapsed() >= REPORT_WITHIN && template.hurry().is_err() {
                self.end();
            } else if self.began.elapsed() >= PREPARE_AFTER {
                self.prepare(rank_spec);
            }
            return None;
        }
        let program = self.program.clone()?;
        // Without a report from ranks only the program's text is known. That is enough if it costs the ranks no processor.
        let of_text = learned.is_none() && self.settings.imports.is_empty();
        let spare = waits || affinity::allowed().len() > 2 * rank_spec.settings.local_world_size as usize;
        if of_text && !self.can_be_idle && !spare && self.began.elapsed() < REPORT_WITHIN {
            return None;
        }
        self.learned = learned.is_some();
        let idle = of_text && self.can_be_idle && !waits;
        match self.begin(program, learned.as_deref(), idle, rank_spec) {
            Ok(template) => {
                self.template = Some(template);
                self.prepared = false;
                None
            }
            Err(error) => Some(self.give_up(&format!("it cannot be started: {error}"))),
        }
    }

    fn begin(
        &mut self,
        program: PythonProgram,
        learned: Option<&Path>,
        idle: bool,
        rank_spec: &RankSpec,
    ) -> std::io::Result<Template> {
        self.tries += 1;
        Template::start(&TemplatePlan {
            program,
            imports: self.imports(learned),
            without: self.without.clone(),
            environment: rank_spec.common_environment(),
            idle,
            directory: self.directory.clone(),
        })
    }

    /// Has standbys forked, unless there are some: they are needed soon.
    pub(crate) fn prepare(&mut self, rank_spec: &RankSpec) {
        if self.template.as_mut().is_some_and(|template| template.is_warm() && template.hurry().is_err()) {
            self.end();
        }
        if let Some(template) = self.template.as_mut().filter(|template| template.is_warm() && !self.prepared)
        {
            self.prepared = true;
            template.prepare(rank_spec.settings.local_world_size as usize);
        }
    }

    /// The modules to import: those that the user named, then those that the ranks held.
    fn imports(&self, learned: Option<&Path>) -> Option<Vec<Module>> {
        let named = self.settings.imports.iter().map(|name| (name.clone(), String::new()));
        let file = learned.map(Path::to_owned);
        let text = file.and_then(|file| log_files::ask(move || std::fs::read(file).ok()).flatten());
        match text.and_then(|text| serde_json::from_slice::<Vec<Module>>(&text).ok()) {
            Some(learned) => Some(named.chain(learned).collect()),
            None if self.settings.imports.is_empty() => None,
            None => Some(named.collect()),
        }
    }

    /// Processes news from a template. Returns the fact to record, if any.
    pub(crate) fn received(&mut self, (of_next, update): (bool, TemplateEvent)) -> Option<Fact> {
        if of_next {
            return self.news_of_next(update);
        }
        match update {
            TemplateEvent::Warm { modules, seconds } => {
                let hurried = self.template.as_mut().map_or(Ok(()), Template::hurry);
                match hurried {
                    Ok(()) => Some(warm(modules, seconds)),
                    Err(error) => Some(self.give_up(&format!("it stays idle: {error}"))),
                }
            }
            TemplateEvent::Lacks(modules) => {
                self.lacks = modules > 0;
                None
            }
            TemplateEvent::Prepared(standbys) => {
                if let Some(template) = &mut self.template {
                    template.adopt(&standbys);
                }
                None
            }
            TemplateEvent::Started(_) => None,
            TemplateEvent::Unclean { why, module } => {
                self.end();
                match module {
                    Some(module) if self.tries < MAX_FAILED_TEMPLATES => Some(self.leave_out(module, &why)),
                    _ => Some(self.give_up(&why)),
                }
            }
            TemplateEvent::Failed(why) => Some(self.give_up(&why)),
            TemplateEvent::Gone => {
                self.end();
                (self.tries >= MAX_FAILED_TEMPLATES)
                    .then(|| self.give_up("it ended again and again; see its output.log"))
            }
        }
    }

    /// The next template replaces the present one, or is dropped.
    fn news_of_next(&mut self, update: TemplateEvent) -> Option<Fact> {
        match update {
            TemplateEvent::Warm { modules, seconds } => {
                let mut next = self.next.take()?;
                if next.hurry().is_err() {
                    next.end();
                    return None;
                }
                if let Some(old) = self.template.replace(next) {
                    old.end();
                }
                self.prepared = false;
                Some(warm(modules, seconds))
            }
            TemplateEvent::Unclean { why, module } => {
                self.drop_next();
                let fact = self.leave_out(module?, &why);
                self.lacks = true;
                Some(fact)
            }
            TemplateEvent::Failed(_) | TemplateEvent::Gone => {
                self.drop_next();
                None
            }
            TemplateEvent::Lacks(_) | TemplateEvent::Prepared(_) | TemplateEvent::Started(_) => None,
        }
    }

    fn leave_out(&mut self, module: String, why: &str) -> Fact {
        let detail = format!("{module} is left to the ranks: once it is imported, {why}");
        self.without.push(module);
        observed("module_left_out", Weight::Info, detail)
    }

    fn drop_next(&mut self) {
        if let Some(next) = self.next.take() {
            next.end();
        }
    }

    /// Starts ranks of an attempt from the template, if there is a warm one. What is spared does not belong to this start:
    /// the guardian, and ranks that stay in their processes.
    pub(crate) fn start(
        &mut self,
        rank_spec: &RankSpec,
        attempt: Attempt,
        port: u16,
        which: &[u32],
        spare: &[Pid],
    ) -> Option<Result<(Vec<RankProcess>, PageProblem), Fact>> {
        self.began = Instant::now();
        let template = self.template.as_mut()?;
        if template.hurry().is_err() || !(template.is_warm() || template.finish_imports()) {
            // The ranks are started without it and need the processors.
            if self.can_be_idle {
                template.rest();
            }
            return None;
        }
        self.prepared = false;
        Some(rank_spec.start_warm(template, attempt, port, which).map_err(|why| {
            let fact = self.give_up(&why);
            // The remaining processes below this one, except the spared ones, are ranks that were not started completely.
            let us = Pid(i32::try_from(std::process::id()).unwrap_or(0));
            let spared = with_descendants(spare);
            for pid in processes::descendants(us).into_iter().filter(|pid| !spared.contains(pid)) {
                processes::kill_process(pid);
            }
            fact
        }))
    }

    /// Ends the template; another one may follow.
    pub(crate) fn end(&mut self) {
        self.drop_next();
        self.lacks = false;
        if let Some(template) = self.template.take() {
            template.end();
        }
    }

    /// Starts no more templates in this job.
    fn give_up(&mut self, why: &str) -> Fact {
        self.end();
        self.program = None;
        observed("plain", Weight::Warning, format!("ranks are started plainly from here on: {why}"))
    }
}

fn warm(modules: u32, seconds: f64) -> Fact {
    let detail = format!(
        "the next ranks will be forked from a process that holds their imports ({modules} modules, {seconds:.1} s)"
    );
    observed("warm", Weight::Info, detail)
}

/// These processes and all their descendants.
pub(crate) fn with_descendants(pids: &[Pid]) -> Vec<Pid> {
    let below = pids.iter().flat_map(|pid| processes::descendants(*pid));
    pids.iter().copied().chain(below).collect()
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
