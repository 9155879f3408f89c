//! The screen of `mainstay top` and its keys: no clock, no terminal and no server, so that a test can press and look.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use mainstay_proto::json::ApiEnum;
use mainstay_proto::v1::{
    Component, Device, HealthState, Job, JobPhase, Rank, RankPhase, Server, ServerMode,
};
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::super::answer::{ServerReply, is_over};
use super::super::output::{Paint, aligned, clean, shortened};
use super::super::{ranks, screen, status};

/// For how long a key silences a component.
pub(super) const SILENCE_FOR: prost_types::Duration = prost_types::Duration { seconds: 3600, nanos: 0 };

/// How many refreshes a sparkline has.
const SPARK: usize = 12;

/// Beyond this many ranks, those without anything remarkable are folded.
const MAX_UNFOLDED_RANKS: usize = 12;

/// From this width on all columns of `ranks` fit.
const WIDE: u16 = 110;

const KEYS: &str = "↑↓ select  Enter explain  t stacks  d devices  s silence  r restart  q quit";

/// What a key asks for that needs a server.
#[derive(Debug, PartialEq)]
pub(super) enum Wish {
    Quit,
    /// A component, or the last failure of a job.
    Explain(String),
    Stacks {
        host: String,
        job: Box<Job>,
    },
    Devices(Vec<Device>),
    Silence {
        at: PathBuf,
        component: String,
        reason: String,
    },
    Restart {
        /// The launcher's socket, if it was found.
        at: Option<PathBuf>,
        job: String,
        reason: String,
    },
}

/// What can be selected.
#[derive(Clone, Debug, PartialEq)]
enum Target {
    Job(String),
    Component(String),
}

/// What the screen shows in place of the overview, or below it.
enum Mode {
    Overview,
    /// A text with its title, and its first visible line.
    Text {
        title: String,
        lines: Vec<String>,
        first: usize,
    },
    /// A reason is typed for a silence or a restart.
    Reason {
        target: Target,
        typed: String,
    },
    /// A restart is asked for a second time.
    Sure {
        job: String,
        reason: String,
    },
}

/// How a line looks; without colors only by weight.
#[derive(Clone, Copy, PartialEq)]
enum Tone {
    Plain,
    Dim,
    Bold,
    Good,
    Warning,
    Bad,
}

pub(super) struct Top {
    answers: Vec<ServerReply>,
    devices: Vec<Device>,
    /// Launchers' sockets by job.
    launchers: BTreeMap<String, PathBuf>,
    /// The last steps of each rank, one per refresh.
    steps: BTreeMap<(String, u32), VecDeque<u64>>,
    selected: Option<Target>,
    mode: Mode,
    note: String,
    paint: Paint,
}

impl Top {
    pub(super) fn new(paint: Paint) -> Top {
        Top {
            answers: Vec::new(),
            devices: Vec::new(),
            launchers: BTreeMap::new(),
            steps: BTreeMap::new(),
            selected: None,
            mode: Mode::Overview,
            note: "asking".to_owned(),
            paint,
        }
    }

    /// Takes in what the servers answered.
    pub(super) fn take(&mut self, mut answers: Vec<ServerReply>, devices: Vec<Device>) {
        if self.answers.is_empty() {
            self.note.clear();
        }
        let launchers = answers.iter().filter_map(|answer| {
            let snapshot = answer.result.as_ref().ok()?;
            let is_launcher = snapshot.server.mode() == ServerMode::Launcher;
            is_launcher.then(|| snapshot.jobs.iter().map(|job| (job.id.clone(), answer.place.socket.clone())))
        });
        self.launchers = launchers.flatten().collect();
        status::reported_once(&mut answers);
        (self.answers, self.devices) = (answers, devices);
        self.follow_steps();
    }

    fn follow_steps(&mut self) {
        let mut before = std::mem::take(&mut self.steps);
        let mut now = BTreeMap::new();
        for (_, job) in self.jobs().filter(|(_, job)| !is_over(job)) {
            for (rank, step) in job.ranks.iter().filter_map(|rank| Some((rank, rank.step?))) {
                let key = (job.id.clone(), rank.rank);
                let mut seen = before.remove(&key).unwrap_or_default();
                // After a restart a rank may go on from an earlier step.
                if seen.back().is_some_and(|last| *last > step) {
                    seen.clear();
                }
                seen.push_back(step);
                if seen.len() > SPARK + 1 {
                    seen.pop_front();
                }
                now.insert(key, seen);
            }
        }
        self.steps = now;
    }

    /// Shows a text.
    pub(super) fn read(&mut self, title: &str, text: &str) {
        self.note.clear();
        let lines = text.lines().map(clean).collect();
        self.mode = Mode::Text { title: clean(title), lines, first: 0 };
    }

    /// Shows one line at the bottom.
    pub(super) fn note(&mut self, note: &str) {
        self.note = clean(note);
    }

    fn servers(&self) -> impl Iterator<Item = &super::super::client::Snapshot> {
        self.answers.iter().filter_map(|answer| answer.result.as_ref().ok())
    }

    /// Jobs that run first, and the newest of those that are over.
    fn jobs(&self) -> impl Iterator<Item = (&Server, &Job)> {
        let of = |over: bool| {
            let jobs = self.servers().flat_map(|of| of.jobs.iter().map(move |job| (&of.server, job)));
            jobs.filter(move |(_, job)| is_over(job) == over)
        };
        of(false).chain(of(true))
    }

    /// Components that are worth a line, with the socket of their agent.
    fn components(&self) -> impl Iterator<Item = (&PathBuf, &Component)> {
        self.answers.iter().flat_map(|answer| {
            let components = answer.result.iter().flat_map(|snapshot| &snapshot.node.components);
            let remarkable =
                components.filter(|of| of.state() != HealthState::Healthy || of.silence.is_some());
            remarkable.map(|component| (&answer.place.socket, component))
        })
    }

    fn targets(&self) -> Vec<Target> {
        let jobs = self.jobs().map(|(_, job)| Target::Job(job.id.clone()));
        jobs.chain(self.components().map(|(_, of)| Target::Component(of.name.clone()))).collect()
    }

    /// What is selected: the first if what was selected is gone.
    fn selected(&self) -> Option<Target> {
        let targets = self.targets();
        let still_there = self.selected.clone().filter(|selected| targets.contains(selected));
        still_there.or_else(|| targets.into_iter().next())
    }

    fn step_selection(&mut self, by: isize) {
        let targets = self.targets();
        let at = self.selected().and_then(|selected| targets.iter().position(|of| *of == selected));
        let at = at.unwrap_or(0).saturating_add_signed(by).min(targets.len().saturating_sub(1));
        self.selected = targets.get(at).cloned();
    }

    /// The job whose ranks are shown.
    fn shown_job(&self) -> Option<(&Server, &Job)> {
        match self.selected() {
            Some(Target::Job(id)) => self.jobs().find(|(_, job)| job.id == id),
            _ => self.jobs().next(),
        }
    }

    /// What a key does.
    pub(super) fn key(&mut self, key: KeyEvent) -> Option<Wish> {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return (key.code == KeyCode::Char('c')).then_some(Wish::Quit);
        }
        match std::mem::replace(&mut self.mode, Mode::Overview) {
            Mode::Overview => self.overview_key(key.code),
            Mode::Text { title, lines, first } => {
                let last = lines.len().saturating_sub(1);
                let first = match key.code {
                    KeyCode::Up | KeyCode::Char('k') => first.saturating_sub(1),
                    KeyCode::Down | KeyCode::Char('j') => first.saturating_add(1).min(last),
                    KeyCode::PageUp => first.saturating_sub(20),
                    KeyCode::PageDown | KeyCode::Char(' ') => first.saturating_add(20).min(last),
                    KeyCode::Esc | KeyCode::Enter | KeyCode::Char('q') => return None,
                    _ => first,
                };
                self.mode = Mode::Text { title, lines, first };
                None
            }
            Mode::Reason { target, typed } => self.reason_key(key.code, target, typed),
            Mode::Sure { job, reason } => {
                if key.code == KeyCode::Char('y') {
                    let at = self.launchers.get(&job).cloned();
                    return Some(Wish::Restart { at, job, reason });
                }
                self.note(&format!("job {job}: not restarted"));
                None
            }
        }
    }

    fn overview_key(&mut self, key: KeyCode) -> Option<Wish> {
        self.note.clear();
        let selected = self.selected();
        match (key, selected) {
            (KeyCode::Char('q') | KeyCode::Esc, _) => return Some(Wish::Quit),
            (KeyCode::Up | KeyCode::Char('k'), _) => self.step_selection(-1),
            (KeyCode::Down | KeyCode::Char('j'), _) => self.step_selection(1),
            (KeyCode::Enter | KeyCode::Char('e'), Some(Target::Job(what) | Target::Component(what))) => {
                return Some(Wish::Explain(what));
            }
            (KeyCode::Char('t'), _) => {
                let (server, job) = self.shown_job()?;
                let wish = Wish::Stacks { host: server.hostname.clone(), job: Box::new(job.clone()) };
                self.note("taking stacks");
                return Some(wish);
            }
            (KeyCode::Char('d'), _) if self.devices.is_empty() => self.note("no devices are known here"),
            (KeyCode::Char('d'), _) => return Some(Wish::Devices(self.devices.clone())),
            (KeyCode::Char('s'), Some(target @ Target::Component(_)))
            | (KeyCode::Char('r'), Some(target @ Target::Job(_))) => {
                self.mode = Mode::Reason { target, typed: String::new() };
            }
            (KeyCode::Char('s'), _) => self.note("select a component to silence it"),
            (KeyCode::Char('r'), _) => self.note("select a job to restart it"),
            _ => {}
        }
        None
    }

    fn reason_key(&mut self, key: KeyCode, target: Target, mut typed: String) -> Option<Wish> {
        match key {
            KeyCode::Esc => return None,
            KeyCode::Char(letter) => typed.push(letter),
            KeyCode::Backspace => {
                typed.pop();
            }
            KeyCode::Enter if !typed.trim().is_empty() => match target {
                Target::Job(job) => {
                    self.mode = Mode::Sure { job, reason: typed };
                    return None;
                }
                Target::Component(component) => {
                    let (at, _) = self.components().find(|(_, of)| of.name == component)?;
                    return Some(Wish::Silence { at: at.clone(), component, reason: typed });
                }
            },
            _ => {}
        }
        self.mode = Mode::Reason { target, typed };
        None
    }

    /// Draws the whole screen.
    pub(super) fn draw(&self, area: Rect, buffer: &mut Buffer) {
        let Some(height) = area.height.checked_sub(1) else { return };
        let mut lines = Lines { area: Rect { height, ..area }, buffer, next: 0, paint: self.paint };
        match &self.mode {
            Mode::Text { title, lines: text, first } => {
                lines.add(title, Tone::Bold);
                text.iter().skip(*first).for_each(|line| lines.add(line, Tone::Plain));
            }
            _ => self.overview(&mut lines),
        }
        lines.last(&self.prompt());
    }

    fn prompt(&self) -> String {
        match &self.mode {
            Mode::Overview if self.note.is_empty() => KEYS.to_owned(),
            Mode::Overview => self.note.clone(),
            Mode::Text { .. } => "↑↓ scroll  Esc back".to_owned(),
            Mode::Reason { target: Target::Job(job), typed } => {
                format!("restart all ranks of job {}; reason: {typed}_", clean(job))
            }
            Mode::Reason { target: Target::Component(name), typed } => {
                format!("silence {} for 1 h; reason: {typed}_", clean(name))
            }
            Mode::Sure { job, .. } => {
                format!(
                    "all ranks of job {} are stopped and started again: y restarts, any other key does not",
                    clean(job)
                )
            }
        }
    }

    fn overview(&self, lines: &mut Lines<'_>) {
        for answer in &self.answers {
            match &answer.result {
                Ok(of) if of.server.mode() == ServerMode::Launcher && of.jobs.is_empty() => {}
                Ok(of) => {
                    let senses = !of.node.components.is_empty() || of.server.mode() == ServerMode::Agent;
                    let state = if senses { format!("  {}", of.node.state().name()) } else { String::new() };
                    let devices = match (self.devices.len(), of.server.mode()) {
                        (count @ 1.., ServerMode::Agent) => format!(", {count} device(s)"),
                        _ => String::new(),
                    };
                    let program = screen::program(&of.server);
                    let text = format!("{}{state}  {program}{devices}", clean(&of.server.hostname));
                    lines.add(&text, if senses { tone(of.node.state()) } else { Tone::Bold });
                }
                Err(error) => lines.add(&error.to_string(), Tone::Warning),
            }
        }
        let selected = self.selected();
        let third = usize::from(lines.area.height) / 4;
        self.jobs_table(lines, selected.as_ref(), third.max(2));
        self.components_table(lines, selected.as_ref(), third.max(2));
        if let Some((server, job)) = self.shown_job() {
            self.job(lines, server, job);
        }
    }

    fn jobs_table(&self, lines: &mut Lines<'_>, selected: Option<&Target>, most: usize) {
        let jobs: Vec<(&Server, &Job)> = self.jobs().collect();
        if jobs.is_empty() {
            return lines.add("no jobs", Tone::Dim);
        }
        let header =
            ["JOB", "PHASE", "STEP", "STEPS/S", "RANKS", "RESTARTS", "COPIES", "FOR"].map(str::to_owned);
        let rows: Vec<[String; 8]> =
            std::iter::once(header).chain(jobs.iter().map(|(server, job)| job_cells(server, job))).collect();
        let table = aligned(&rows, |column| column < 2, None);
        lines.add(&format!(" {}", table[0]), Tone::Dim);
        let is_selected = |job: &Job| selected == Some(&Target::Job(job.id.clone()));
        let place = jobs.iter().position(|(_, job)| is_selected(job)).unwrap_or(0);
        let first = window(place, jobs.len(), most);
        for ((_, job), text) in jobs.iter().zip(&table[1..]).skip(first).take(most) {
            let tone = match job.phase() {
                JobPhase::Recovering | JobPhase::Stopping => Tone::Warning,
                JobPhase::Lost => Tone::Bad,
                JobPhase::Ended if job.exit_status != Some(0) => Tone::Bad,
                _ if job.hang.is_some() => Tone::Bad,
                _ => Tone::Plain,
            };
            lines.selectable(text, tone, is_selected(job));
        }
        lines.more(jobs.len(), most, "job(s)");
    }

    fn components_table(&self, lines: &mut Lines<'_>, selected: Option<&Target>, most: usize) {
        let all: usize = self.servers().map(|of| of.node.components.len()).sum();
        let remarkable: Vec<(&PathBuf, &Component)> = self.components().collect();
        if all == 0 {
            return;
        }
        let healthy = all - remarkable.len();
        lines.add(&format!(" COMPONENTS  {healthy} of {all} healthy"), Tone::Dim);
        let width = remarkable.iter().map(|(_, of)| of.name.len()).max().unwrap_or(0);
        let is_selected = |of: &Component| selected == Some(&Target::Component(of.name.clone()));
        let place = remarkable.iter().position(|(_, of)| is_selected(of)).unwrap_or(0);
        let first = window(place, remarkable.len(), most);
        for (_, of) in remarkable.iter().skip(first).take(most) {
            let silenced = if of.silence.is_some() { "silenced, " } else { "" };
            let text = format!(
                "{:<width$}  {:<9}  {silenced}{}",
                clean(&of.name),
                of.state().name(),
                clean(&of.reason)
            );
            lines.selectable(&text, tone(of.state()), is_selected(of));
        }
        lines.more(remarkable.len(), most, "component(s)");
    }

    /// What `status` shows of the job, then its ranks.
    fn job(&self, lines: &mut Lines<'_>, server: &Server, job: &Job) {
        let mut details = String::new();
        screen::details(job, server.time.as_ref(), Paint::plain(), &mut details);
        // The rest is for ranks.
        let most = usize::from(lines.left()) / 2;
        lines.add(&format!(" JOB {}  {}", clean(&job.id), screen::restarts(job)), Tone::Dim);
        for line in details.lines().take(most) {
            let is_bad = job.hang.as_ref().is_some_and(|hang| line.contains(&clean(&hang.headline)));
            lines.add(line, if is_bad { Tone::Bad } else { Tone::Plain });
        }
        if !is_over(job) && !job.ranks.is_empty() {
            self.ranks(lines, job);
        }
    }

    fn ranks(&self, lines: &mut Lines<'_>, job: &Job) {
        let (shown, grouped) = ranks::folded(job, MAX_UNFOLDED_RANKS.max(usize::from(lines.left())));
        let groups = ranks::groups(&grouped);
        let most_steps = shown.iter().flat_map(|rank| self.strides(job, rank)).max().unwrap_or(0);
        let header = (ranks::COLUMNS.map(str::to_owned), "LAST STEPS".to_owned());
        let rows = shown.iter().map(|rank| (ranks::cells(rank), self.spark(job, rank, most_steps)));
        let rows = std::iter::once(header).chain(rows);
        let table = if lines.area.width >= WIDE {
            let has_hosts = shown.iter().any(|rank| rank.host.is_some());
            let rows: Vec<[String; 12]> = rows.map(wide).collect();
            aligned(
                &rows,
                |column| matches!(column, 1 | 3 | 5 | 6),
                (!has_hosts).then_some(ranks::HOST_COLUMN),
            )
        } else {
            let rows: Vec<[String; 8]> = rows.map(narrow).collect();
            aligned(&rows, |column| matches!(column, 1 | 3 | 4), None)
        };
        let room = usize::from(lines.left()).saturating_sub(groups.len().min(3) + 1);
        if !shown.is_empty() {
            lines.add(&format!(" {}", table[0]), Tone::Dim);
        }
        let most = if shown.len() > room { room.saturating_sub(1) } else { room };
        for (text, rank) in table[1..].iter().zip(&shown).take(most) {
            let remark = ranks::remark(job, rank).map(|remark| format!("  {remark}")).unwrap_or_default();
            let tone = match (ranks::is_suspect(job, rank), ranks::is_slow(job, rank), rank.phase()) {
                (true, _, _) | (_, _, RankPhase::Raised | RankPhase::Exited) => Tone::Bad,
                (_, true, _) => Tone::Warning,
                _ => Tone::Plain,
            };
            lines.add(&format!(" {text}{remark}"), tone);
        }
        lines.more(shown.len(), most, "rank(s); `mainstay ranks` shows all");
        let width = usize::from(lines.area.width);
        for line in groups.iter().flat_map(|group| wrapped(group, width)) {
            lines.add(&line, Tone::Plain);
        }
    }

    /// Steps between refreshes, oldest first.
    fn strides(&self, job: &Job, rank: &Rank) -> Vec<u64> {
        let seen = self.steps.get(&(job.id.clone(), rank.rank));
        let steps: Vec<u64> = seen.into_iter().flatten().copied().collect();
        steps.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect()
    }

    fn spark(&self, job: &Job, rank: &Rank, most: u64) -> String {
        const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let bar = |steps: u64| match usize::try_from((steps * 8).div_ceil(most.max(1))) {
            // A refresh without a step is visible too.
            Ok(0) | Err(_) => '.',
            Ok(height) => BARS[height.min(8)],
        };
        let strides = self.strides(job, rank);
        format!("{:>SPARK$}", strides.into_iter().map(bar).collect::<String>())
    }
}

/// A group of ranks on as many lines as it needs.
fn wrapped(group: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for part in group.split_inclusive("; ") {
        let last = lines.last().map_or(0, |line| line.chars().count());
        if last > 0 && last + part.trim_end().chars().count() > width {
            lines.push("   ".to_owned());
        }
        if let Some(line) = lines.last_mut() {
            line.push_str(if line.is_empty() { " " } else { "" });
            line.push_str(part);
        }
    }
    lines
}

fn wide((cells, spark): ([String; 11], String)) -> [String; 12] {
    let [rank, host, pid, phase, step, section, age, own, versus, wait, median] = cells;
    [rank, host, pid, phase, step, spark, section, age, own, versus, wait, median]
}

/// Without host, process and times.
fn narrow((cells, spark): ([String; 11], String)) -> [String; 8] {
    let [rank, _, _, phase, step, section, age, _, versus, wait, _] = cells;
    [rank, phase, step, spark, shortened(&section, 16), age, versus, wait]
}

fn job_cells(server: &Server, job: &Job) -> [String; 8] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let now = server.time.as_ref();
    let copied = job.copied_step.as_ref().and_then(|of| screen::since(of.time.as_ref(), now));
    let up = screen::since(job.start_time.as_ref(), now).filter(|_| !is_over(job));
    [
        clean(&job.id),
        screen::phase(job, Paint::plain()),
        or_dash(job.step.map(|step| step.to_string())),
        or_dash(job.steps_per_second.map(|pace| format!("{pace:.2}"))),
        job.world_size.to_string(),
        format!("{}/{}", job.restarts, job.max_restarts),
        or_dash(copied),
        or_dash(up),
    ]
}

/// The first row to show, so that the selected one is among `most`.
fn window(selected: usize, all: usize, most: usize) -> usize {
    selected.saturating_sub(most.saturating_sub(1)).min(all.saturating_sub(most))
}

fn tone(state: HealthState) -> Tone {
    match state {
        HealthState::Healthy => Tone::Good,
        HealthState::Degraded => Tone::Warning,
        HealthState::Unhealthy => Tone::Bad,
        HealthState::Unknown | HealthState::Unspecified => Tone::Dim,
    }
}

/// The lines of the screen, from the top.
struct Lines<'b> {
    /// Without the last line, which is for keys.
    area: Rect,
    buffer: &'b mut Buffer,
    next: u16,
    paint: Paint,
}

impl Lines<'_> {
    fn left(&self) -> u16 {
        self.area.height.saturating_sub(self.next)
    }

    fn add(&mut self, text: &str, tone: Tone) {
        let style = self.style(tone);
        self.put(text, style);
    }

    fn selectable(&mut self, text: &str, tone: Tone, is_selected: bool) {
        let style = self.style(tone);
        // The mark shows also where a terminal cannot reverse.
        let (mark, style) =
            if is_selected { (">", style.add_modifier(Modifier::REVERSED)) } else { (" ", style) };
        self.put(&format!("{mark}{text}"), style);
    }

    /// How many of `all` are not shown.
    fn more(&mut self, all: usize, shown: usize, what: &str) {
        if all > shown {
            self.add(&format!(" and {} more {what}", all - shown), Tone::Dim);
        }
    }

    fn put(&mut self, text: &str, style: Style) {
        if self.left() == 0 {
            return;
        }
        let width = usize::from(self.area.width);
        let text = shortened(text, width);
        self.buffer.set_stringn(self.area.x, self.area.y + self.next, text, width, style);
        self.next += 1;
    }

    /// The line below all others.
    fn last(&mut self, text: &str) {
        let (width, y) = (usize::from(self.area.width), self.area.y + self.area.height);
        let text = shortened(text, width);
        self.buffer.set_stringn(self.area.x, y, text, width, self.style(Tone::Bold));
    }

    fn style(&self, tone: Tone) -> Style {
        let colored = |color| if self.paint.is_on() { Style::new().fg(color) } else { Style::new() };
        match tone {
            Tone::Plain => Style::new(),
            Tone::Dim => Style::new().add_modifier(Modifier::DIM),
            Tone::Bold => Style::new().add_modifier(Modifier::BOLD),
            Tone::Good => colored(Color::Green),
            Tone::Warning => colored(Color::Yellow),
            Tone::Bad => colored(Color::Red).add_modifier(Modifier::BOLD),
        }
    }
}
