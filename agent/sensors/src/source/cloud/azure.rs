//! The metadata service of Microsoft Azure: scheduled events, polled every few seconds. Events of a scale set name the
//! machines that they are for; those for other machines are ignored.

use std::time::Duration;

use hyper::{Method, StatusCode};
use mainstay_health::host::cloud::Notice;
use mainstay_health::host::cloud::azure::events;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::CloudUpdate;
use mainstay_sys::http::{self, HttpError, Question};

const INTERVAL: Duration = Duration::from_secs(5);

/// The first request of a machine turns the service on, which takes up to two minutes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(150);

const EVENTS_PATH: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
const KEY: &str = mainstay_health::host::cloud::azure::KEY;

/// Follows the service. Returns how many keys there are.
pub(super) fn follow(runtime: &Runtime, address: &str, news: &mpsc::Sender<CloudUpdate>) -> usize {
    runtime.spawn(follow_events(address.to_owned(), news.clone()));
    1
}

async fn follow_events(address: String, news: mpsc::Sender<CloudUpdate>) {
    let mut own: Option<String> = None;
    loop {
        let notices = poll(&address, &mut own).await;
        if news.send(CloudUpdate { key: KEY, notices }).await.is_err() {
            return;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

async fn poll(address: &str, own: &mut Option<String>) -> Result<Vec<Notice>, String> {
    if own.is_none() {
        *own = Some(ask(address, NAME).await.map_err(|error| format!("the machine's name: {error}"))?);
    }
    let body = ask(address, EVENTS_PATH).await.map_err(|error| error.to_string())?;
    events(&body, own.as_deref().unwrap_or_default())
}

async fn ask(address: &str, path: &str) -> Result<String, HttpError> {
    let header = ("Metadata", "true");
    let answer = http::ask(&Question {
        address,
        method: Method::GET,
        path,
        header,
        body: b"",
        deadline: ANSWER_TIMEOUT,
        secure: None,
    })
    .await?;
    match answer.status {
        StatusCode::OK => Ok(answer.body),
        status => Err(HttpError::Status(status)),
    }
}
