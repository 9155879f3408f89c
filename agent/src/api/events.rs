//! `mainstay.v1.EventService`: the journal as a list and as a stream that resumes by cursor, and the story of a failure.

use mainstay_core::base::id::Incident;
use mainstay_core::model::entry::{Body, Entry, Fact};
use mainstay_core::view::incident_report::{self, Options};
use mainstay_proto::v1::event_service_server::EventService;
use mainstay_proto::v1::watch_events_response::Item;
use mainstay_proto::v1::{
    Event, EventFilter, ExplainIncidentRequest, ExplainIncidentResponse, Gap, ListEventsRequest,
    ListEventsResponse, WatchEventsRequest, WatchEventsResponse,
};
use prost::Message;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::ReadSide;
use super::convert::event as convert;
use super::readers::{Owners, Reader};
use super::stream::{Answers, Caller, End, answer_to_the_end};
use crate::state::StateReader;
use crate::store::journal::Read;

const USUAL_LIMIT: usize = 100;
const LARGEST_LIMIT: usize = 1000;
/// Entries that one call of ListEvents reads before it answers with what it has found.
const LOOK_AT_MOST: usize = 20_000;
/// Bytes of events after which a page ends, well below the 4 MiB that callers accept by default.
const LARGEST_PAGE: usize = 2 << 20;
/// Entries read from the journal at a time.
const CHUNK: usize = 500;

/// The service.
pub(super) struct Events(pub(super) ReadSide);

#[tonic::async_trait]
impl EventService for Events {
    async fn list_events(
        &self,
        request: Request<ListEventsRequest>,
    ) -> Result<Response<ListEventsResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let request = request.into_inner();
        let snapshots = &self.0.snapshots;
        not_ahead(snapshots, request.after_cursor)?;
        let limit = match request.limit {
            0 => USUAL_LIMIT,
            limit => usize::try_from(limit).unwrap_or(LARGEST_LIMIT).min(LARGEST_LIMIT),
        };
        let filter = request.filter.unwrap_or_default();
        let mut answer = ListEventsResponse { next_cursor: request.after_cursor, ..Default::default() };
        let (mut looked_at, mut bytes) = (0, 0);
        let mut owners = Owners::default();
        let mut full = false;
        while !full && looked_at < LOOK_AT_MOST {
            let read = read(snapshots, answer.next_cursor, CHUNK).await?;
            answer.gap = answer.gap.or_else(|| gap(&read));
            answer.caught_up = read.entries.is_empty();
            if answer.caught_up {
                answer.next_cursor = answer.next_cursor.max(read.cursor);
                break;
            }
            looked_at += read.entries.len();
            if has_gap(&read) {
                owners.after_a_gap();
            }
            let view = snapshots.view();
            for entry in &read.entries {
                answer.next_cursor = entry.seq;
                let event = reported(entry, owners.may_read(reader, entry, &view));
                if passes(&event, &filter) {
                    bytes += event.encoded_len();
                    answer.events.push(event);
                }
                full = answer.events.len() >= limit || bytes >= LARGEST_PAGE;
                if full {
                    break;
                }
            }
        }
        answer.oldest_cursor = snapshots.oldest();
        answer.newest_cursor = snapshots.newest();
        Ok(Response::new(answer))
    }

    async fn explain_incident(
        &self,
        request: Request<ExplainIncidentRequest>,
    ) -> Result<Response<ExplainIncidentResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let ExplainIncidentRequest { job, incident, all } = request.into_inner();
        let entries = of_failures(&self.0.snapshots, &job, reader).await?;
        let Some(report) = incident_report::of(entries.iter(), incident.map(Incident)) else {
            let which = incident.map_or("no failure".to_owned(), |incident| format!("no failure {incident}"));
            return Err(Status::not_found(format!("the journal has {which} of job {job:?}")));
        };
        let findings = incident_report::findings(entries.iter());
        let words = |markdown| {
            let options = Options { markdown, all, ..Options::default() };
            incident_report::render(&report, options) + &incident_report::render_findings(&findings, markdown)
        };
        let json = incident_report::json(&report, &findings);
        Ok(Response::new(ExplainIncidentResponse {
            incident: report.verdict.incident.0,
            text: words(false),
            markdown: words(true),
            json: json.to_string(),
        }))
    }

    type WatchEventsStream = Answers<WatchEventsResponse>;

    async fn watch_events(
        &self,
        request: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let reader = self.0.readers.reader(&request);
        let request = request.into_inner();
        let snapshots = self.0.snapshots.clone();
        let cursor = request.after_cursor.unwrap_or_else(|| snapshots.newest());
        not_ahead(&snapshots, cursor)?;
        let filter = request.filter.unwrap_or_default();
        let stop = self.0.stop.clone();
        Ok(Response::new(answer_to_the_end(move |caller| {
            watch(snapshots, cursor, (filter, reader), stop, caller)
        })))
    }
}

/// Callers for whom the whole journal is read at once; others wait.
static READING: Semaphore = Semaphore::const_new(2);

/// Maximum number of entries of one job's failures: the newest.
const MOST_OF_FAILURES: usize = 10_000;

/// The journal's entries of a job's failures: a few for each failure. A report consists of texts, so a caller who
/// may not read texts gets no entries.
async fn of_failures(snapshots: &StateReader, job: &str, reader: Reader) -> Result<Vec<Entry>, Status> {
    let _turn = READING.acquire().await.map_err(|_| Status::unavailable("the agent is stopping"))?;
    let (mut entries, mut cursor) = (Vec::new(), 0);
    let (mut owners, mut withheld) = (Owners::default(), false);
    loop {
        let read = read(snapshots, cursor, CHUNK).await?;
        let Some(last) = read.entries.last() else {
            return if entries.is_empty() && withheld { Err(not_theirs(job)) } else { Ok(entries) };
        };
        cursor = last.seq;
        if has_gap(&read) {
            owners.after_a_gap();
        }
        let view = snapshots.view();
        let surplus = entries.len().saturating_sub(MOST_OF_FAILURES);
        entries.drain(..surplus);
        entries.extend(read.entries.into_iter().filter(|entry| {
            let reports = matches!(
                entry.body,
                Body::Verdict(_)
                    | Body::Decision(_)
                    | Body::Outcome(_)
                    | Body::Finding(_)
                    | Body::Fact(Fact::JobStarted(_))
            );
            let is_of_job = entry.job.as_ref().is_some_and(|of| of.0 == job);
            let may_read = owners.may_read(reader, entry, &view);
            withheld |= is_of_job && !may_read;
            reports && is_of_job && may_read
        }));
    }
}

fn not_theirs(job: &str) -> Status {
    Status::permission_denied(format!(
        "why job {job:?} failed is for its user and for operators, on the agent's Unix socket: ask as that user, or have \
         job_texts = \"everyone\" put into the agent's configuration"
    ))
}

/// Whether entries are missing within what was read, or before it.
fn has_gap(read: &Read) -> bool {
    read.gap.is_some() || read.skipped > 0
}

/// An entry with the fields that the caller may read.
fn reported(entry: &Entry, with_texts: bool) -> Event {
    if with_texts { convert::event(entry) } else { convert::without_texts(entry) }
}

/// Sends everything up to the stop: how a job ended is the last entry of its launcher.
async fn watch(
    mut snapshots: StateReader,
    mut cursor: u64,
    (filter, reader): (EventFilter, Reader),
    stop: CancellationToken,
    caller: Caller<WatchEventsResponse>,
) -> End {
    let mut owners = Owners::default();
    loop {
        let newest = snapshots.newest();
        let read = match read(&snapshots, cursor, CHUNK).await {
            Ok(read) => read,
            Err(status) => return status.into(),
        };
        if has_gap(&read) {
            owners.after_a_gap();
        }
        let gap = gap(&read).map(Item::Gap);
        let view = snapshots.view();
        let events = read.entries.iter().map(|entry| reported(entry, owners.may_read(reader, entry, &view)));
        let events: Vec<Event> = events.filter(|event| passes(event, &filter)).collect();
        for item in gap.into_iter().chain(events.into_iter().map(Item::Event)) {
            if let Err(left) = caller.send(WatchEventsResponse { item: Some(item) }).await {
                return left.into();
            }
        }
        // Entries before `newest` that were not read now are damaged and stay unreadable.
        cursor = if read.entries.is_empty() { newest.max(read.cursor) } else { read.cursor };
        tokio::select! {
            biased;
            newer = snapshots.newer_than(cursor) => {
                if !newer {
                    return End::snapshots_gone();
                }
            }
            () = stop.cancelled() => return End::stopping(),
        }
    }
}

/// Reads the journal's files on another thread, so that other calls do not wait.
async fn read(snapshots: &StateReader, cursor: u64, limit: usize) -> Result<Read, Status> {
    let snapshots = snapshots.clone();
    tokio::task::spawn_blocking(move || snapshots.entries_after(cursor, limit))
        .await
        .map_err(|error| Status::internal(format!("reading the journal: {error}")))?
        .map_err(|error| Status::unavailable(error.to_string()))
}

/// A cursor from the future belongs to another journal: waiting for it would never end.
fn not_ahead(snapshots: &StateReader, cursor: u64) -> Result<(), Status> {
    let newest = snapshots.newest();
    if cursor <= newest {
        return Ok(());
    }
    Err(Status::out_of_range(format!(
        "cursor {cursor} is beyond the newest event, {newest}: it belongs to another journal; start again from 0"
    )))
}

fn gap(read: &Read) -> Option<Gap> {
    read.gap.map(|gap| Gap {
        first_missing: gap.first,
        last_missing: gap.last,
        message: format!("events {} to {} are no longer kept: the journal is bounded", gap.first, gap.last),
    })
}

/// Whether an event matches the caller's filter.
pub fn passes(event: &Event, filter: &EventFilter) -> bool {
    let job = filter.job.as_ref().is_none_or(|job| event.job.as_ref() == Some(job));
    let kind = filter.kinds.is_empty() || filter.kinds.contains(&event.kind);
    job && kind && event.severity >= filter.min_severity
}
