//! `mainstay.v1.EventService`: the journal as a list and as a stream that resumes by cursor, and the story of a failure.

use std::time::Duration;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::Incident;
use mainstay_model::redact::masked;
use mainstay_proto::v1::event_service_server::EventService;
use mainstay_proto::v1::watch_events_response::Item;
use mainstay_proto::v1::{
    Event, EventFilter, ExplainIncidentRequest, ExplainIncidentResponse, Gap, ListEventsRequest,
    ListEventsResponse, WatchEventsRequest, WatchEventsResponse,
};
use mainstay_view::convert::event::{self as convert, passes};
use mainstay_view::incident_report::{self, Options};
use prost::Message;
use tonic::{Request, Response, Status};

use super::ReadSide;
use super::bounds::{self, Bounds};
use super::readers::{Owners, Reader};
use super::refusal::{Reason, invalid};
use super::shares::{Share, Source};
use super::stream::{Answers, Caller, End, answer_to_the_end};
use mainstay_journal::state::StateReader;
use mainstay_journal::store::journal::{JournalPage, Most};

const USUAL_LIMIT: usize = 100;
const LARGEST_LIMIT: usize = 1000;
/// Entries that one call of ListEvents reads before it answers with what it has found.
const LOOK_AT_MOST: usize = 20_000;
/// Bytes of events after which a page ends, well below the 4 MiB that callers accept by default.
pub(super) const MAX_PAGE_BYTES: usize = 2 << 20;
/// What is read from the journal at a time.
const CHUNK: Most = Most { entries: 500, bytes: 64 << 10 };
/// Bytes of memory for a chunk: entries and events need more than lines.
const CHUNK_HELD: usize = 4 * CHUNK.bytes;
/// What is read at a time by one who reads the whole journal.
const LARGE_CHUNK: Most = Most { entries: 5000, bytes: 1 << 20 };
/// How long what was read for a caller waits for it. Then it is dropped, and read again when the caller reads.
const HELD_FOR: Duration = Duration::from_secs(1);

/// The service.
pub(super) struct Events(pub(super) ReadSide);

#[tonic::async_trait]
impl EventService for Events {
    async fn list_events(
        &self,
        request: Request<ListEventsRequest>,
    ) -> Result<Response<ListEventsResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let source = Source::from_connection(request.extensions());
        let request = request.into_inner();
        let snapshots = &self.0.snapshots;
        let after_cursor = after_cursor(&request)?;
        not_ahead(snapshots, after_cursor)?;
        let limit = limit(&request)?;
        let filter = request.filter.unwrap_or_default();
        let share = self.0.bounds.answer(source, 2 * MAX_PAGE_BYTES + CHUNK_HELD).await?;
        let mut answer = ListEventsResponse { next_cursor: after_cursor, ..Default::default() };
        let (mut looked_at, mut bytes) = (0, 0);
        let mut owners = Owners::default();
        let mut full = false;
        while !full && looked_at < LOOK_AT_MOST {
            let read = read(&self.0.bounds, source, snapshots, answer.next_cursor).await?;
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
                let with_texts = owners.may_read(reader, entry, &view);
                let event = self.0.visible_event(entry, with_texts, reader);
                if passes(&event, &filter) {
                    bytes += event.encoded_len();
                    answer.events.push(event);
                }
                full = answer.events.len() >= limit || bytes >= MAX_PAGE_BYTES;
                if full {
                    break;
                }
            }
        }
        answer.oldest_cursor = snapshots.oldest();
        answer.newest_cursor = snapshots.newest();
        if !answer.caught_up {
            answer.next_page_token = answer.next_cursor.to_string();
        }
        Ok(bounds::holding(answer, share, 2 * bytes))
    }

    async fn explain_incident(
        &self,
        request: Request<ExplainIncidentRequest>,
    ) -> Result<Response<ExplainIncidentResponse>, Status> {
        let reader = self.0.readers.reader(&request);
        let source = Source::from_connection(request.extensions());
        let ExplainIncidentRequest { job, incident, all } = request.into_inner();
        let share = self.0.bounds.answer(source, 2 * MAX_PAGE_BYTES).await?;
        let report = self.0.failure(&job, incident.map(Incident), reader, source).await?;
        let words =
            |markdown| incident_report::render(&report, Options { markdown, all, ..Options::default() });
        let answer = ExplainIncidentResponse {
            incident: report.verdict.incident.0,
            text: words(false),
            markdown: words(true),
            json: incident_report::json(&report).to_string(),
        };
        let bytes = answer.encoded_len();
        Ok(bounds::holding(answer, share, 2 * bytes))
    }

    type WatchEventsStream = Answers<WatchEventsResponse>;

    async fn watch_events(
        &self,
        request: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let reader = self.0.readers.reader(&request);
        let source = Source::from_connection(request.extensions());
        let request = request.into_inner();
        let side = self.0.clone();
        let cursor = request.after_cursor.unwrap_or_else(|| side.snapshots.newest());
        not_ahead(&side.snapshots, cursor)?;
        let filter = request.filter.unwrap_or_default();
        Ok(Response::new(answer_to_the_end(move |caller| {
            watch(side, cursor, (filter, reader), source, caller)
        })))
    }
}

/// Where a page begins: at its token, else at the cursor.
fn after_cursor(request: &ListEventsRequest) -> Result<u64, Status> {
    match request.page_token.as_str() {
        "" => Ok(request.after_cursor),
        token => token
            .parse()
            .map_err(|_| invalid("page_token", format!("{token:?} is no next_page_token of this method"))),
    }
}

/// The most events of a page.
fn limit(request: &ListEventsRequest) -> Result<usize, Status> {
    let size = u32::try_from(request.page_size)
        .map_err(|_| invalid("page_size", format!("{} is negative", request.page_size)))?;
    Ok(match if request.limit == 0 { size } else { request.limit } {
        0 => USUAL_LIMIT,
        limit => usize::try_from(limit).unwrap_or(LARGEST_LIMIT).min(LARGEST_LIMIT),
    })
}

/// Maximum number of entries of one job's failures: the newest.
const MOST_OF_FAILURES: usize = 10_000;

/// The journal's entries of a job's failures: a few for each failure. A report consists of texts, so a caller who
/// may not read texts gets no entries.
pub(super) async fn of_failures(
    snapshots: &StateReader,
    job: &str,
    reader: Reader,
) -> Result<Vec<Entry>, Status> {
    let (mut entries, mut cursor) = (Vec::new(), 0);
    let (mut owners, mut withheld) = (Owners::default(), false);
    loop {
        let read = read_on_a_thread(snapshots, cursor, LARGE_CHUNK, None).await?;
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
                    | Body::Fact(Fact::JobStarted(_) | Fact::JobEnded { .. })
            );
            let is_of_job = entry.job.as_ref().is_some_and(|entry_job| entry_job.0 == job);
            let may_read = owners.may_read(reader, entry, &view);
            withheld |= is_of_job && !may_read;
            reports && is_of_job && may_read
        }));
    }
}

/// One entry of the journal, and the event as the caller may read it.
pub(super) async fn one(
    read: &ReadSide,
    cursor: u64,
    reader: Reader,
    source: Source,
) -> Result<(Entry, Event), Status> {
    let found = self::read(&read.bounds, source, &read.snapshots, cursor.saturating_sub(1)).await?;
    let entry = found.entries.into_iter().next().filter(|entry| entry.seq == cursor);
    let entry =
        entry.ok_or_else(|| Reason::UNKNOWN_EVENT.refuse(format!("the journal has no event {cursor}")))?;
    // The user of a job whose start was not read is unknown.
    let with_texts = Owners::default().may_read(reader, &entry, &read.snapshots.view());
    let event = read.visible_event(&entry, with_texts, reader);
    Ok((entry, event))
}

fn not_theirs(job: &str) -> Status {
    Reason::TEXTS_WITHHELD.refuse(format!(
        "why job {job:?} failed is for its user and for operators, on the agent's Unix socket: ask as that user, or have \
         job_texts = \"everyone\" put into the agent's configuration"
    ))
}

/// Whether entries are missing within what was read, or before it.
fn has_gap(read: &JournalPage) -> bool {
    read.gap.is_some() || read.skipped > 0
}

impl ReadSide {
    /// An entry with the fields that the caller may read.
    fn visible_event(&self, entry: &Entry, with_texts: bool, reader: Reader) -> Event {
        let event = match reader {
            _ if !with_texts => convert::without_texts(entry),
            // What cannot be masked is withheld.
            Reader::Masked => {
                masked(entry).map_or_else(|_| convert::without_texts(entry), |entry| convert::event(&entry))
            }
            _ => convert::event(entry),
        };
        Event { host: self.about.hostname.clone(), ..event }
    }
}

/// Sends everything up to the stop: how a job ended is the last entry of its launcher.
async fn watch(
    side: ReadSide,
    mut cursor: u64,
    (filter, reader): (EventFilter, Reader),
    source: Source,
    caller: Caller<WatchEventsResponse>,
) -> End {
    let (mut snapshots, bounds) = (side.snapshots.clone(), &side.bounds);
    let mut owners = Owners::default();
    'reading: loop {
        if let Err(left) = caller.ready().await {
            return left.into();
        }
        let share = bounds.unread.take(source, CHUNK_HELD).await;
        let newest = snapshots.newest();
        let read = match read(bounds, source, &snapshots, cursor).await {
            Ok(read) => read,
            Err(status) => return status.into(),
        };
        if has_gap(&read) {
            owners.after_a_gap();
        }
        // Entries before `newest` that were not read now are damaged and stay unreadable.
        let next = if read.entries.is_empty() { newest.max(read.cursor) } else { read.cursor };
        let view = snapshots.view();
        let gap = gap(&read).map(|gap| (gap.last_missing, Item::Gap(gap)));
        let events = read.entries.into_iter().filter_map(|entry| {
            let event = side.visible_event(&entry, owners.may_read(reader, &entry, &view), reader);
            passes(&event, &filter).then_some((entry.seq, Item::Event(event)))
        });
        for (number, item) in gap.into_iter().chain(events) {
            match tokio::time::timeout(HELD_FOR, caller.send(WatchEventsResponse { item: Some(item) })).await
            {
                Ok(Ok(())) => cursor = number,
                Ok(Err(left)) => return left.into(),
                Err(_) => continue 'reading,
            }
        }
        cursor = next;
        drop(share);
        tokio::select! {
            biased;
            newer = snapshots.newer_than(cursor) => {
                if !newer {
                    return End::snapshots_gone();
                }
            }
            () = side.stop.cancelled() => return End::stopping(),
        }
    }
}

/// Reads a chunk when it is the source's turn.
async fn read(
    bounds: &Bounds,
    source: Source,
    snapshots: &StateReader,
    cursor: u64,
) -> Result<JournalPage, Status> {
    let turn = bounds.reads.take(source, 1).await;
    read_on_a_thread(snapshots, cursor, CHUNK, Some(turn)).await
}

/// Reads the journal's files on another thread, so that other calls do not wait. The turn lasts as long as the thread
/// reads, also for a caller that has left.
async fn read_on_a_thread(
    snapshots: &StateReader,
    cursor: u64,
    limit: Most,
    turn: Option<Share>,
) -> Result<JournalPage, Status> {
    let snapshots = snapshots.clone();
    let read = move || {
        let _turn = turn;
        snapshots.entries_after(cursor, limit)
    };
    tokio::task::spawn_blocking(read)
        .await
        .map_err(|error| Reason::INTERNAL.refuse(format!("reading the journal: {error}")))?
        .map_err(|error| Reason::JOURNAL_UNREADABLE.refuse(error.to_string()))
}

/// A cursor from the future belongs to another journal: waiting for it would never end.
fn not_ahead(snapshots: &StateReader, cursor: u64) -> Result<(), Status> {
    let newest = snapshots.newest();
    if cursor <= newest {
        return Ok(());
    }
    Err(Reason::CURSOR_AHEAD.refuse(format!(
        "cursor {cursor} is beyond the newest event, {newest}: it belongs to another journal; start again from 0"
    )))
}

fn gap(read: &JournalPage) -> Option<Gap> {
    read.gap.map(|gap| Gap {
        first_missing: gap.first,
        last_missing: gap.last,
        message: format!("events {} to {} are no longer kept: the journal is bounded", gap.first, gap.last),
    })
}
