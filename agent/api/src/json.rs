//! The read side as JSON over HTTP, for the page and for scripts: the answers of the gRPC services to the same caller, in
//! the form of the commands' `--json`. `docs/reference/openapi.yaml` describes it.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State};
use axum::http::{Extensions, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mainstay_model::id::Incident;
use mainstay_proto::json::{ApiEnum, versioned};
use mainstay_proto::v1::event_service_server::EventService;
use mainstay_proto::v1::health_service_server::HealthService;
use mainstay_proto::v1::{
    EventFilter, EventKind, GetJobRequest, GetNodeRequest, ListDevicesRequest, ListEventsRequest,
    ListJobsRequest, ListJobsResponse, Severity,
};
use mainstay_view::incident_report;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio_stream::StreamExt;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

use super::ReadSide;
use super::bounds::{self, Held};
use super::events::{Events, MAX_PAGE_BYTES};
use super::health::Health;
use super::refusal::{self, Reason, invalid};
use super::shares::Source;
use super::stream::{self, Caller, End};

/// The least time between two states of a stream.
const STREAM_INTERVAL: Duration = Duration::from_secs(1);

/// A stream sends the state after this time also if nothing has changed.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);

/// The paths, in the order in which they are documented.
pub(super) fn router() -> Router<ReadSide> {
    Router::new()
        .route("/v1/node", get(node))
        .route("/v1/devices", get(devices))
        .route("/v1/jobs", get(jobs))
        .route("/v1/jobs/{job}", get(job))
        .route("/v1/events", get(events))
        .route("/v1/incidents/{job}/{incident}", get(incident))
        .route("/v1/stream", get(stream))
}

async fn node(State(read): State<ReadSide>, request: Request) -> Response {
    answer(Health(read).get_node(asking(GetNodeRequest {}, request)).await, json_of)
}

async fn devices(State(read): State<ReadSide>, request: Request) -> Response {
    answer(Health(read).list_devices(asking(ListDevicesRequest {}, request)).await, json_of)
}

/// A list of large jobs with their ranks would be megabytes.
const LIGHT: ListJobsRequest =
    ListJobsRequest { without_ranks: true, page_size: 0, page_token: String::new() };

async fn jobs(State(read): State<ReadSide>, request: Request) -> Response {
    let jobs = Health(read).list_jobs(asking(LIGHT, request)).await;
    answer(jobs, without_rank_lists)
}

/// Absent, where an empty list would mean that a job has no ranks.
fn without_rank_lists(answer: ListJobsResponse) -> serde_json::Result<Value> {
    let mut answer = json_of(answer)?;
    for job in answer["jobs"].as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        job.remove("ranks");
    }
    Ok(answer)
}

/// The query of a request for the stream.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamQuery {
    /// The job that is sent with its ranks.
    job: Option<String>,
}

/// What the page shows, now and after each change, as server-sent events.
async fn stream(
    State(read): State<ReadSide>,
    query: Result<Query<StreamQuery>, QueryRejection>,
    request: Request,
) -> Response {
    let StreamQuery { job } = match query {
        Ok(Query(query)) => query,
        Err(refused) => return refuse(&Reason::INVALID_FIELD.refuse(refused.body_text())),
    };
    let connection = request.into_parts().0.extensions;
    let stop = read.stop.clone();
    let states = stream::answer(stop, move |caller| follow(read, job, connection, caller));
    // A browser connects again when the stream ends, for whatever reason.
    let states = states.map_while(Result::ok).map(Ok::<String, Infallible>);
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, Body::from_stream(states)).into_response()
}

/// Sends the state after each change, at most every second. Changes coalesce while the caller is busy.
async fn follow(read: ReadSide, job: Option<String>, connection: Extensions, caller: Caller<String>) -> End {
    let mut snapshots = read.snapshots.clone();
    loop {
        let (state, held) = match state(&read, job.as_deref(), &connection).await {
            Ok(state) => state,
            Err(refused) => return refused.into(),
        };
        // A document of JSON has no line break outside its strings, and none in them.
        if let Err(left) = caller.send(format!("event: state\ndata: {state}\n\n")).await {
            return left.into();
        }
        // Nothing is built for a caller that has not accepted the state before.
        if let Err(left) = caller.ready().await {
            return left.into();
        }
        drop(held);
        tokio::time::sleep(STREAM_INTERVAL).await;
        // Without a change the ages still grow.
        if let Ok(false) = tokio::time::timeout(LONGEST_SILENCE, snapshots.changed()).await {
            return End::snapshots_gone();
        }
    }
}

/// The answers of `/v1/node`, `/v1/devices`, `/v1/jobs` and of the job, by these names; and their shares.
async fn state(
    read: &ReadSide,
    job: Option<&str>,
    connection: &Extensions,
) -> Result<(Value, Vec<Held>), Status> {
    let health = Health(read.clone());
    let failed = |error: serde_json::Error| Reason::INTERNAL.refuse(error.to_string());
    let node = health.get_node(asking_on(GetNodeRequest {}, connection)).await?;
    let devices = health.list_devices(asking_on(ListDevicesRequest {}, connection)).await?;
    let jobs = health.list_jobs(asking_on(LIGHT, connection)).await?;
    let mut held: Vec<Held> = jobs.extensions().get::<Held>().cloned().into_iter().collect();
    let mut state = json!({
        "node": json_of(node.into_inner()).map_err(failed)?,
        "devices": json_of(devices.into_inner()).map_err(failed)?,
        "jobs": without_rank_lists(jobs.into_inner()).map_err(failed)?,
    });
    if let Some(id) = job {
        match health
            .get_job(asking_on(GetJobRequest { id: id.to_owned(), without_ranks: false }, connection))
            .await
        {
            Ok(job) => {
                held.extend(job.extensions().get::<Held>().cloned());
                state["job"] = json_of(job.into_inner()).map_err(failed)?;
            }
            // The journal may have forgotten it meanwhile.
            Err(unknown) if unknown.code() == Code::NotFound => {}
            Err(refused) => return Err(refused),
        }
    }
    Ok((versioned(state), held))
}

async fn job(
    State(read): State<ReadSide>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let Path(id) = match id {
        Ok(id) => id,
        Err(refused) => return refuse(&Reason::INVALID_FIELD.refuse(refused.body_text())),
    };
    answer(Health(read).get_job(asking(GetJobRequest { id, without_ranks: false }, request)).await, json_of)
}

/// The query of a request for events.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventQuery {
    #[serde(default)]
    after: u64,
    #[serde(default)]
    limit: u32,
    job: Option<String>,
    /// Kinds, separated by commas.
    kind: Option<String>,
    severity: Option<String>,
}

impl EventQuery {
    fn filter(&self) -> Result<EventFilter, Status> {
        const KINDS: [EventKind; 6] = [
            EventKind::Fact,
            EventKind::Health,
            EventKind::Verdict,
            EventKind::Decision,
            EventKind::Outcome,
            EventKind::Finding,
        ];
        const SEVERITIES: [Severity; 3] = [Severity::Info, Severity::Warning, Severity::Error];
        let kinds = self.kind.iter().flat_map(|kinds| kinds.split(','));
        let kinds: Result<Vec<i32>, Status> =
            kinds.map(|name| named("kind", name, &KINDS).map(i32::from)).collect();
        let severity = self.severity.as_ref().map(|name| named("severity", name, &SEVERITIES)).transpose()?;
        Ok(EventFilter {
            job: self.job.clone(),
            kinds: kinds?,
            min_severity: severity.unwrap_or_default().into(),
        })
    }
}

fn named<E: ApiEnum + Copy>(field: &str, name: &str, all: &[E]) -> Result<E, Status> {
    all.iter().copied().find(|of| of.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names: Vec<String> = all.iter().map(|of| of.name().to_lowercase()).collect();
        invalid(field, format!("{name:?} is none of {}", names.join(", ")))
    })
}

async fn events(
    State(read): State<ReadSide>,
    query: Result<Query<EventQuery>, QueryRejection>,
    request: Request,
) -> Response {
    let query = match query {
        Ok(Query(query)) => query,
        Err(refused) => return refuse(&Reason::INVALID_FIELD.refuse(refused.body_text())),
    };
    let filter = match query.filter() {
        Ok(filter) => Some(filter),
        Err(refused) => return refuse(&refused),
    };
    let list = ListEventsRequest {
        after_cursor: query.after,
        limit: query.limit,
        filter,
        ..ListEventsRequest::default()
    };
    answer(Events(read).list_events(asking(list, request)).await, json_of)
}

/// A failure is named by its job and its number in the job.
async fn incident(
    State(read): State<ReadSide>,
    path: Result<Path<(String, u64)>, PathRejection>,
    request: Request,
) -> Response {
    let Path((job, incident)) = match path {
        Ok(path) => path,
        Err(refused) => return refuse(&Reason::INVALID_FIELD.refuse(refused.body_text())),
    };
    let request = asking((), request);
    let (reader, source) = (read.readers.reader(&request), Source::from_connection(request.extensions()));
    let report = async {
        let share = read.bounds.answer(source, 2 * MAX_PAGE_BYTES).await?;
        let report = read.failure(&job, Some(Incident(incident)), reader, source).await?;
        Ok(bounds::holding(incident_report::with_text(&job, &report), share, 2 * MAX_PAGE_BYTES))
    };
    answer(report.await, Ok)
}

/// The request to a service, from the same connection.
fn asking<T>(message: T, request: Request) -> tonic::Request<T> {
    asking_on(message, &request.into_parts().0.extensions)
}

fn asking_on<T>(message: T, connection: &Extensions) -> tonic::Request<T> {
    tonic::Request::from_parts(MetadataMap::new(), connection.clone(), message)
}

fn json_of(message: impl Serialize) -> serde_json::Result<Value> {
    serde_json::to_value(message)
}

fn answer<T>(
    answer: Result<tonic::Response<T>, Status>,
    json: impl FnOnce(T) -> serde_json::Result<Value>,
) -> Response {
    let (message, extensions) = match answer {
        Ok(answer) => {
            let (_, message, extensions) = answer.into_parts();
            (message, extensions)
        }
        Err(status) => return refuse(&status),
    };
    match json(message) {
        Ok(value) => as_json(StatusCode::OK, value, extensions),
        Err(error) => refuse(&Reason::INTERNAL.refuse(error.to_string())),
    }
}

fn refuse(status: &Status) -> Response {
    let code = match status.code() {
        Code::InvalidArgument => StatusCode::BAD_REQUEST,
        // A cursor of another journal.
        Code::OutOfRange => StatusCode::CONFLICT,
        Code::PermissionDenied | Code::Unauthenticated => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let mut error = json!({ "error": status.message() });
    if let Some(reason) = refusal::reason_of(status) {
        error["reason"] = reason.into();
    }
    as_json(code, error, Extensions::new())
}

/// The share of the answer lasts until its bytes are counted.
fn as_json(status: StatusCode, value: Value, mut extensions: Extensions) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    let mut response = (status, headers, format!("{}\n", versioned(value))).into_response();
    if let Some(held) = extensions.remove::<Held>() {
        response.extensions_mut().insert(held);
    }
    response
}
