//! The read side as JSON over HTTP, for the page and for scripts: the answers of the gRPC services to the same caller, in
//! the form of the commands' `--json`. `docs/reference/openapi.yaml` describes it.

use axum::Router;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State};
use axum::http::{Extensions, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mainstay_model::id::Incident;
use mainstay_proto::json::ApiEnum;
use mainstay_proto::v1::event_service_server::EventService;
use mainstay_proto::v1::health_service_server::HealthService;
use mainstay_proto::v1::{
    EventFilter, EventKind, GetJobRequest, GetNodeRequest, ListDevicesRequest, ListEventsRequest,
    ListJobsRequest, Severity,
};
use mainstay_view::incident_report;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

use super::ReadSide;
use super::bounds::{self, Held};
use super::events::{Events, MAX_PAGE_BYTES};
use super::health::Health;
use super::shares::Source;

/// The paths, in the order in which they are documented.
pub(super) fn router() -> Router<ReadSide> {
    Router::new()
        .route("/v1/node", get(node))
        .route("/v1/devices", get(devices))
        .route("/v1/jobs", get(jobs))
        .route("/v1/jobs/{job}", get(job))
        .route("/v1/events", get(events))
        .route("/v1/incidents/{job}/{incident}", get(incident))
}

async fn node(State(read): State<ReadSide>, request: Request) -> Response {
    answer(Health(read).get_node(asking(GetNodeRequest {}, request)).await, json_of)
}

async fn devices(State(read): State<ReadSide>, request: Request) -> Response {
    answer(Health(read).list_devices(asking(ListDevicesRequest {}, request)).await, json_of)
}

/// Without ranks: a list of large jobs would be megabytes.
async fn jobs(State(read): State<ReadSide>, request: Request) -> Response {
    let jobs = Health(read).list_jobs(asking(ListJobsRequest {}, request)).await;
    answer(jobs, |mut answer| {
        answer.jobs.iter_mut().for_each(|job| job.ranks.clear());
        let mut answer = json_of(answer)?;
        for job in answer["jobs"].as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            job.remove("ranks");
        }
        Ok(answer)
    })
}

async fn job(
    State(read): State<ReadSide>,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let Path(id) = match id {
        Ok(id) => id,
        Err(refused) => return refuse(&Status::invalid_argument(refused.body_text())),
    };
    answer(Health(read).get_job(asking(GetJobRequest { id }, request)).await, json_of)
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
        Status::invalid_argument(format!("{field}: {name:?} is none of {}", names.join(", ")))
    })
}

async fn events(
    State(read): State<ReadSide>,
    query: Result<Query<EventQuery>, QueryRejection>,
    request: Request,
) -> Response {
    let query = match query {
        Ok(Query(query)) => query,
        Err(refused) => return refuse(&Status::invalid_argument(refused.body_text())),
    };
    let filter = match query.filter() {
        Ok(filter) => Some(filter),
        Err(refused) => return refuse(&refused),
    };
    let list = ListEventsRequest { after_cursor: query.after, limit: query.limit, filter };
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
        Err(refused) => return refuse(&Status::invalid_argument(refused.body_text())),
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
    tonic::Request::from_parts(MetadataMap::new(), request.into_parts().0.extensions, message)
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
        Ok(value) => as_json(StatusCode::OK, &value, extensions),
        Err(error) => refuse(&Status::internal(error.to_string())),
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
    as_json(code, &json!({ "error": status.message() }), Extensions::new())
}

/// The share of the answer lasts until its bytes are counted.
fn as_json(status: StatusCode, value: &Value, mut extensions: Extensions) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    let mut response = (status, headers, format!("{value}\n")).into_response();
    if let Some(held) = extensions.remove::<Held>() {
        response.extensions_mut().insert(held);
    }
    response
}
