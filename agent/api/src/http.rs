//! HTTP: `/healthz` and `/readyz` for probes, `/metrics` for Prometheus, the page for people, JSON for scripts.

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::ReadSide;
use super::metrics::{self, Format, Scrape};
use super::{json, page};
use mainstay_view::convert::health::{reasons, state_name};

pub(super) fn router(read: ReadSide) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .merge(json::router())
        .merge(page::router())
        .with_state(read)
}

/// The process answers, and nothing more: a node with a broken GPU has a healthy agent.
async fn healthz() -> &'static str {
    "ok\n"
}

/// Whether work may be sent to this node, and if not, why.
async fn readyz(State(read): State<ReadSide>) -> Response {
    let view = read.snapshots.view();
    let state = view.state();
    let status = if read.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut text = format!("{}\n", state_name(state));
    if read.snapshots_gone.is_cancelled() {
        text.push_str("the task that watches this node has ended; see the log\n");
    }
    for reason in reasons(&view) {
        text.push_str(&reason);
        text.push('\n');
    }
    (status, text).into_response()
}

/// `?ranks=all` asks for the series of each rank also in a large job.
async fn scrape(State(read): State<ReadSide>, uri: Uri, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let format = Format::accepted(accept);
    let all_ranks = uri.query().is_some_and(|query| query.split('&').any(|part| part == "ranks=all"));
    let text = metrics::render(&read, (read.clock)(), Scrape { format, all_ranks });
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

/// For the HTTP listener: lists the paths that exist.
pub(super) async fn not_found(uri: Uri) -> Response {
    let text = format!(
        "nothing at {}; there are /, /healthz, /readyz, /metrics and, as JSON, /v1/node, /v1/devices, /v1/jobs, /v1/events and /v1/stream\n",
        uri.path()
    );
    (StatusCode::NOT_FOUND, text).into_response()
}
