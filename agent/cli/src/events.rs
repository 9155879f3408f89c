//! `mainstay events`: the events of a server, or of a journal's directory.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use mainstay_proto::json::{ApiEnum, point};
use mainstay_proto::v1::watch_events_response::Item;
use mainstay_proto::v1::{Event, EventFilter, EventKind, Gap, Severity};
use serde_json::json;

use super::client::{AskError, Client};
use super::explain;
use super::find::{AskAny, JobName, SocketAt, find};
use super::is_given;
use super::output::{self, Paint, Structured, clean};
use super::when::When;
use super::{exit, status};
use mainstay_journal::store::journal::JournalReader;
use mainstay_model::entry::Entry;
use mainstay_model::time::Wall;
use mainstay_view::convert::event::{event, passes};
use mainstay_view::convert::wall;

/// Pauses between attempts to reach a lost server.
const FIRST_REST: Duration = Duration::from_millis(200);
const LONGEST_REST: Duration = Duration::from_secs(5);

/// Show what happened: facts, verdicts, decisions and outcomes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay events                            everything that is kept
  mainstay events -n 20 --follow             the last 20, then each as it happens
  mainstay events demo --kind verdict --kind decision
  mainstay events --since 2h --until 1h      of the hour before the last
  mainstay events --since 4711 --json        JSON lines after cursor 4711
  mainstay events exp                        of this job, after its end too
  mainstay events --journal /var/lib/mainstay/journal     without any server

Exit status: 0 shown, 3 nothing answers, there is no such job or the journal cannot be read, 64 the command line was not understood.")]
pub(super) struct Args {
    #[command(flatten)]
    ask: AskAny,
    /// Also show each new event, through restarts of the server
    #[arg(long, short, conflicts_with = "journal")]
    follow: bool,
    /// Only events since then: after this cursor, since so long ago (2h), or since a time (2026-11-29T12:00)
    #[arg(long, value_name = "CURSOR|TIME")]
    since: Option<Since>,
    /// Only events until then: so long ago, or a time
    #[arg(long, value_name = "TIME", conflicts_with = "follow")]
    until: Option<When>,
    /// Only the last N of them
    #[arg(long, short = 'n', value_name = "N")]
    last: Option<usize>,
    #[command(flatten)]
    job: JobName,
    /// Only events of this kind; may be given several times
    #[arg(long, ignore_case = true, value_parser = kinds())]
    kind: Vec<EventKind>,
    /// Only events of at least this severity
    #[arg(long, ignore_case = true, value_parser = severities())]
    severity: Option<Severity>,
    /// Read the journal of this run directory, or in this directory, without any server
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
}

/// The words for kinds of events. They are checked, so each has a value.
fn kinds() -> impl TypedValueParser<Value = EventKind> {
    let known = PossibleValuesParser::new(["fact", "health", "verdict", "decision", "outcome", "finding"]);
    known.map(|word| {
        let name = format!("EVENT_KIND_{}", word.to_uppercase());
        EventKind::from_str_name(&name).unwrap_or_default()
    })
}

fn severities() -> impl TypedValueParser<Value = Severity> {
    let known = PossibleValuesParser::new(["info", "warning", "error"]);
    known
        .map(|word| Severity::from_str_name(&format!("SEVERITY_{}", word.to_uppercase())).unwrap_or_default())
}

/// Where the events begin.
#[derive(Clone, Copy, Debug)]
enum Since {
    Cursor(u64),
    Time(When),
}

impl std::str::FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Since, String> {
        text.parse().map(Since::Cursor).or_else(|_| text.parse().map(Since::Time))
    }
}

impl Args {
    fn cursor(&self) -> u64 {
        match self.since {
            Some(Since::Cursor(cursor)) => cursor,
            _ => 0,
        }
    }

    fn filter(&self) -> EventFilter {
        let kinds = self.kind.iter().map(|kind| (*kind).into()).collect();
        let min_severity = self.severity.unwrap_or_default().into();
        EventFilter { job: self.job.get().cloned(), kinds, min_severity }
    }
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let from = match args.since {
        Some(Since::Time(When(at))) => Some(at),
        _ => None,
    };
    let until = args.until.map(|When(at)| at);
    let teller =
        Teller { form: args.ask.form.structured(), paint: Paint::for_stdout(), between: (from, until) };
    let filter = args.filter();
    if let Some(dir) = &args.journal {
        // Variables in the environment are for commands that need a server; on the command line the option is a mistake.
        if let Some(option) = ["--socket", "--host"].into_iter().find(|option| is_given(option)) {
            output::note(&format!(
                "error: --journal and {option} exclude each other: a journal is read without a server"
            ));
            return Ok(ExitCode::from(exit::USAGE));
        }
        let is_known = from_directory(dir.clone(), &args, &filter, teller)?;
        return Ok(ExitCode::from(if is_known { exit::OK } else { exit::UNKNOWN }));
    }
    let (client, place) = match choose(&args).await? {
        Ok(chosen) => chosen,
        Err(why) => return of_ended_run(&args, &filter, teller, &why),
    };
    let mut watch =
        Watch { cursor: args.cursor(), filter, teller, history: Some(History::new(&args, teller)), shown: 0 };
    if args.follow {
        watch.follow(client, place).await?;
    } else if let Some(failed) = watch.catch_up(&client).await? {
        return Err(failed.into());
    } else if let Some(job) = args.job.get().filter(|_| watch.shown == 0)
        && !has_events(&client, job).await?
    {
        return of_ended_run(&args, &args.filter(), teller, &no_job(job));
    }
    Ok(ExitCode::from(exit::OK))
}

/// The events of a job of which no server knows: of this user's run with that name. `why` is reported if there is none.
fn of_ended_run(args: &Args, filter: &EventFilter, teller: Teller, why: &str) -> anyhow::Result<ExitCode> {
    let job = args.job.get().filter(|_| !args.follow && args.ask.server.named().is_none());
    let run = job.and_then(|job| explain::find_run(Some(Path::new(job))).ok());
    let is_known = match run {
        Some(run) => from_directory(run, args, filter, teller)?,
        None => {
            output::note(why);
            false
        }
    };
    Ok(ExitCode::from(if is_known { exit::OK } else { exit::UNKNOWN }))
}

fn no_job(job: &str) -> String {
    format!("no event of a job {job:?}: `mainstay status` shows the jobs that are known here")
}

/// Whether the server has any event of a job, of whatever kind and time.
async fn has_events(client: &Client, job: &str) -> anyhow::Result<bool> {
    let filter = EventFilter { job: Some(job.to_owned()), ..EventFilter::default() };
    let mut cursor = 0;
    loop {
        let page = client.list_events(cursor, filter.clone()).await?;
        if !page.events.is_empty() || page.caught_up {
            return Ok(!page.events.is_empty());
        }
        cursor = page.next_cursor;
    }
}

/// How events are printed.
#[derive(Clone, Copy)]
struct Teller {
    form: Option<Structured>,
    paint: Paint,
    between: (Option<Wall>, Option<Wall>),
}

impl Teller {
    /// Whether this is in the time that is asked for. Gaps have no time.
    fn shows(&self, item: &Item) -> bool {
        let Item::Event(Event { time: Some(time), .. }) = item else { return true };
        let at = wall(time);
        self.between.0.is_none_or(|from| from <= at) && self.between.1.is_none_or(|until| at <= until)
    }

    fn report(self, item: &Item) -> anyhow::Result<()> {
        let text = match (item, self.form) {
            (Item::Event(event), Some(form)) => form.document(json!(event)),
            (Item::Gap(gap), Some(form)) => form.document(json!({ "gap": gap })),
            (Item::Event(event), None) => self.line(event) + "\n",
            (Item::Gap(gap), None) => self.paint.warning(&clean(&gap.message)) + "\n",
        };
        output::print(&text)
    }

    fn line(self, event: &Event) -> String {
        let point = event.time.as_ref().and_then(point).map(|point| {
            let local = point.to_zoned(jiff::tz::TimeZone::system());
            local.strftime("%Y-%m-%d %H:%M:%S%.3f").to_string()
        });
        let kind = event.kind().name().to_lowercase();
        let job = event.job.as_ref().map(|job| format!("{}: ", self.paint.bold(&clean(job))));
        format!(
            "{}  {}  {}  {}{}",
            self.paint.dim(&format!("{:>6}", event.cursor)),
            self.paint.dim(&point.unwrap_or_else(|| "-".to_owned())),
            self.paint.severity(event.severity(), &format!("{kind:<8}")),
            job.unwrap_or_default(),
            self.paint.severity(event.severity(), &clean(&event.message)),
        )
    }
}

/// Past events, all of them or the last few.
struct History {
    teller: Teller,
    last: Option<usize>,
    kept: VecDeque<Item>,
}

impl History {
    fn new(args: &Args, teller: Teller) -> History {
        History { teller, last: args.last, kept: VecDeque::new() }
    }

    fn take(&mut self, item: Item) -> anyhow::Result<()> {
        if !self.teller.shows(&item) {
            return Ok(());
        }
        let Some(last) = self.last else { return self.teller.report(&item) };
        // Gaps before the last few events do not matter.
        if matches!(item, Item::Event(_)) {
            self.kept.push_back(item);
        }
        if self.kept.len() > last {
            self.kept.pop_front();
        }
        Ok(())
    }

    fn end(&self) -> anyhow::Result<()> {
        self.kept.iter().try_for_each(|item| self.teller.report(item))
    }
}

/// How far a server's events were printed.
struct Watch {
    cursor: u64,
    filter: EventFilter,
    teller: Teller,
    /// None once all past events are printed.
    history: Option<History>,
    /// Past events that passed the filter.
    shown: usize,
}

impl Watch {
    /// Prints the past events of a server, starting where the last connection broke; returns what broke this one.
    /// Fails only if printing fails.
    async fn catch_up(&mut self, client: &Client) -> anyhow::Result<Option<AskError>> {
        while let Some(history) = &mut self.history {
            let page = match client.list_events(self.cursor, self.filter.clone()).await {
                Ok(page) => page,
                Err(lost) => return Ok(Some(lost)),
            };
            self.shown += page.events.len();
            for item in page.gap.map(Item::Gap).into_iter().chain(page.events.into_iter().map(Item::Event)) {
                history.take(item)?;
            }
            self.cursor = page.next_cursor;
            if page.caught_up {
                history.end()?;
                self.history = None;
            }
        }
        Ok(None)
    }

    /// Prints past events and then each new one. A lost connection is resumed where it broke.
    async fn follow(&mut self, client: Client, place: SocketAt) -> anyhow::Result<()> {
        let mut connection = Ok(client);
        let mut rest = FIRST_REST;
        loop {
            let lost = match connection {
                Ok(client) => {
                    let before = self.cursor;
                    let lost = self.follow_connection(&client).await?;
                    if self.cursor > before {
                        rest = FIRST_REST;
                    }
                    lost
                }
                Err(lost) => lost,
            };
            match &lost {
                AskError::CursorAhead(reason) => {
                    output::note(&format!("{reason}; starting again from the oldest event"));
                    self.cursor = 0;
                }
                // A launcher that has ended removes its socket; an agent may restart.
                AskError::Missing(_) if place.job.is_some() => {
                    output::note(&format!(
                        "the launcher is gone and its socket with it; the last event was {}",
                        self.cursor
                    ));
                    return Ok(());
                }
                _ if rest == FIRST_REST => {
                    output::note(&format!("{lost}; trying again, going on after event {}", self.cursor));
                }
                _ => {}
            }
            tokio::time::sleep(rest).await;
            rest = (rest * 2).min(LONGEST_REST);
            connection = Client::connect(&place.socket).await;
        }
    }

    /// Follows one connection until it is lost. Fails only if printing fails.
    async fn follow_connection(&mut self, client: &Client) -> anyhow::Result<AskError> {
        if let Some(lost) = self.catch_up(client).await? {
            return Ok(lost);
        }
        let mut events = match client.watch_events(self.cursor, self.filter.clone()).await {
            Ok(events) => events,
            Err(lost) => return Ok(lost),
        };
        loop {
            match events.next().await {
                Ok(item) => {
                    if self.teller.shows(&item) {
                        self.teller.report(&item)?;
                    }
                    self.cursor = match item {
                        Item::Event(event) => event.cursor,
                        Item::Gap(gap) => gap.last_missing,
                    };
                }
                Err(lost) => return Ok(lost),
            }
        }
    }
}

/// The server to ask: the host's agent if it answers (and knows the job, if one is given), else the launcher of the
/// job, else the only launcher. Each has its own journal, so one is chosen. The error is for the user.
async fn choose(args: &Args) -> anyhow::Result<Result<(Client, SocketAt), String>> {
    let found = find(args.ask.server.named());
    let mut answering = Vec::new();
    for place in &found.places {
        match Client::connect(&place.socket).await {
            Ok(client) => answering.push((client, place.clone())),
            Err(error) => {
                // Dead sockets are only reported if there is nothing else.
                if found.places.len() == 1 || !matches!(error, AskError::Dead(_) | AskError::Missing(_)) {
                    output::note(&clean(&error.to_string()));
                }
            }
        }
    }
    if let Some(job) = args.job.get() {
        for (client, place) in &answering {
            if client
                .snapshot()
                .await
                .is_ok_and(|snapshot| snapshot.jobs.iter().any(|candidate| candidate.id == *job))
            {
                return Ok(Ok((client.clone(), place.clone())));
            }
        }
    }
    let agent = answering.iter().find(|(_, place)| place.job.is_none());
    match (agent, answering.as_slice()) {
        (Some(chosen), _) | (None, [chosen]) => Ok(Ok(chosen.clone())),
        (None, []) => Ok(Err(status::nothing_answers(&found))),
        (None, several) => {
            let sockets: Vec<String> =
                several.iter().map(|(_, place)| format!("--socket {}", place.socket.display())).collect();
            Ok(Err(format!("several launchers answer; choose one with\n  {}", sockets.join("\n  "))))
        }
    }
}

/// Returns false if there is no event of the job that is asked for.
fn from_directory(dir: PathBuf, args: &Args, filter: &EventFilter, teller: Teller) -> anyhow::Result<bool> {
    anyhow::ensure!(
        dir.is_dir(),
        "{} is not a directory; give the directory that holds the journal's segments",
        dir.display()
    );
    let inside = dir.join("journal");
    let dir = if inside.is_dir() { inside } else { dir };
    let reader = JournalReader::new(&dir);
    let mut history = History::new(args, teller);
    let mut cursor = args.cursor();
    let mut is_known = args.job.get().is_none();
    loop {
        let read = reader.entries_after(cursor, 1000)?;
        anyhow::ensure!(
            cursor > 0 || !read.entries.is_empty(),
            "{} has no entries of a journal; give a run directory, or the directory that holds the journal's segments",
            dir.display()
        );
        if let Some(gap) = read.gap.filter(|_| cursor > 0) {
            let message = format!("events {} to {} are no longer kept", gap.first, gap.last);
            history.take(Item::Gap(Gap { first_missing: gap.first, last_missing: gap.last, message }))?;
        }
        for event in read.entries.iter().map(event).filter(|event| passes(event, filter)) {
            history.take(Item::Event(event))?;
        }
        if read.entries.is_empty() {
            history.end()?;
            if let Some(job) = args.job.get().filter(|_| !is_known) {
                output::note(&no_job(job));
            }
            return Ok(is_known);
        }
        let is_of_job = |entry: &Entry| entry.job.as_ref().map(|job| &job.0) == args.job.get();
        is_known |= read.entries.iter().any(is_of_job);
        cursor = read.cursor;
    }
}
