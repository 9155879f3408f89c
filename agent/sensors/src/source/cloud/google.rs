//! The metadata server of Google Compute Engine: a request waits there until a key changes.
//!
//! A change of `maintenance-event` is announced only to clients that have asked for it since the last one. So it is
//! requested at once, and forever.

use std::time::Duration;

use hyper::{Method, StatusCode};
use mainstay_health::host::cloud::Notice;
use mainstay_health::host::cloud::google::{maintenance_event, preempted, upcoming_maintenance};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::CloudUpdate;
use mainstay_sys::http::{self, HttpError, Question};

/// How long the server may delay an answer until there is a change.
const HELD_BACK: u64 = 60;

/// How much longer an answer may take than that.
const ANSWER_MARGIN: Duration = Duration::from_secs(10);

/// The pause after a failed request, at first and at most; it doubles in between.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The pause for a key that does not exist for this kind of machine, and may exist later.
const ABSENT_PAUSE: Duration = Duration::from_secs(60);

/// The minimum time between two requests for a key, whatever the server answers.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

const FLAVOR: &str = "Metadata-Flavor";

struct Key {
    name: &'static str,
    query: &'static str,
    read: fn(&str) -> Result<Vec<Notice>, String>,
}

const KEYS: [Key; 3] = [
    Key { name: "instance/maintenance-event", query: "", read: maintenance_event },
    Key { name: "instance/preempted", query: "", read: preempted },
    Key { name: "instance/upcoming-maintenance", query: "alt=json&", read: upcoming_maintenance },
];

/// Follows all keys. Returns how many there are.
pub(super) fn follow(runtime: &Runtime, address: &str, news: &mpsc::Sender<CloudUpdate>) -> usize {
    for key in KEYS {
        runtime.spawn(follow_key(key, address.to_owned(), news.clone()));
    }
    KEYS.len()
}

async fn follow_key(key: Key, address: String, news: mpsc::Sender<CloudUpdate>) {
    let mut etag: Option<String> = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let (notices, rest) = match ask(&key, &address, etag.as_deref()).await {
            Ok(MetadataReply::Reported { body, etag: new }) => {
                etag = new;
                pause = FIRST_PAUSE;
                // Without an etag the server cannot wait for a change.
                let rest = if etag.is_some() { LEAST_PAUSE } else { FIRST_PAUSE };
                ((key.read)(&body), rest)
            }
            Ok(MetadataReply::Absent) => {
                etag = None;
                (Ok(Vec::new()), ABSENT_PAUSE)
            }
            Err(error) => {
                // A request without waiting returns at once what changed meanwhile.
                etag = None;
                let rest = pause;
                pause = (pause * 2).min(LONGEST_PAUSE);
                (Err(error.to_string()), rest)
            }
        };
        if news.send(CloudUpdate { key: key.name, notices }).await.is_err() {
            return;
        }
        tokio::time::sleep(rest).await;
    }
}

enum MetadataReply {
    Reported {
        body: String,
        etag: Option<String>,
    },
    /// There is no such key.
    Absent,
}

/// Requests a key: at once, or when it differs from `etag`.
async fn ask(key: &Key, address: &str, etag: Option<&str>) -> Result<MetadataReply, HttpError> {
    let wait = etag.map(|etag| format!("wait_for_change=true&timeout_sec={HELD_BACK}&last_etag={etag}"));
    let path =
        format!("/computeMetadata/v1/{}?{}{}", key.name, key.query, wait.as_deref().unwrap_or_default());
    let deadline =
        if wait.is_some() { ANSWER_MARGIN + Duration::from_secs(HELD_BACK) } else { ANSWER_MARGIN };
    let header = (FLAVOR, "Google");
    let answer = http::ask(&Question {
        address,
        method: Method::GET,
        path: &path,
        header,
        body: b"",
        deadline,
        secure: None,
    })
    .await?;
    if answer.headers.get(FLAVOR).is_none_or(|flavor| flavor != "Google") {
        return Err(HttpError::Improper(format!("it answers {} without {FLAVOR}: Google", answer.status)));
    }
    match answer.status {
        StatusCode::OK => {
            let etag = answer.headers.get("ETag").and_then(|etag| etag.to_str().ok());
            let plain = |etag: &&str| etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
            Ok(MetadataReply::Reported { body: answer.body, etag: etag.filter(plain).map(str::to_owned) })
        }
        StatusCode::NOT_FOUND => Ok(MetadataReply::Absent),
        status => Err(HttpError::Status(status)),
    }
}
