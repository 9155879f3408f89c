//! The metadata server of Amazon EC2 (IMDSv2). It does not report changes: it is polled every few seconds, as Amazon
//! recommends for spot machines.

use std::time::Duration;

use hyper::{Method, StatusCode};
use mainstay_health::host::cloud::Notice;
use mainstay_health::host::cloud::amazon::{instance_action, rebalance, scheduled};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::CloudUpdate;
use mainstay_sys::http::{self, HttpError, Question};

/// How often each key is asked for.
const INTERVAL: Duration = Duration::from_secs(5);

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a token is valid, in seconds: the maximum.
const TOKEN_LIFE: &str = "21600";

struct Key {
    name: &'static str,
    read: fn(&str) -> Result<Vec<Notice>, String>,
}

const KEYS: [Key; 3] = [
    Key { name: "spot/instance-action", read: instance_action },
    Key { name: "events/recommendations/rebalance", read: rebalance },
    Key { name: "events/maintenance/scheduled", read: scheduled },
];

/// Follows all keys. Returns how many there are.
pub(super) fn follow(runtime: &Runtime, address: &str, news: &mpsc::Sender<CloudUpdate>) -> usize {
    runtime.spawn(follow_keys(address.to_owned(), news.clone()));
    KEYS.len()
}

async fn follow_keys(address: String, news: mpsc::Sender<CloudUpdate>) {
    let mut token: Option<String> = None;
    loop {
        for key in &KEYS {
            let notices = match ask(key, &address, &mut token).await {
                Ok(Some(body)) => (key.read)(&body),
                Ok(None) => Ok(Vec::new()),
                Err(error) => Err(error.to_string()),
            };
            if news.send(CloudUpdate { key: key.name, notices }).await.is_err() {
                return;
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The key's value; none if there is no such key, which means that nothing is announced.
async fn ask(key: &Key, address: &str, token: &mut Option<String>) -> Result<Option<String>, HttpError> {
    if token.is_none() {
        *token = Some(new_token(address).await?);
    }
    let path = format!("/latest/meta-data/{}", key.name);
    let header = ("X-aws-ec2-metadata-token", token.as_deref().unwrap_or_default());
    let question = Question {
        address,
        method: Method::GET,
        path: &path,
        header,
        body: b"",
        deadline: ANSWER_TIMEOUT,
        secure: None,
    };
    let answer = http::ask(&question).await?;
    match answer.status {
        StatusCode::OK => Ok(Some(answer.body)),
        StatusCode::NOT_FOUND => Ok(None),
        status => {
            // An expired token is refused.
            *token = None;
            Err(HttpError::Status(status))
        }
    }
}

async fn new_token(address: &str) -> Result<String, HttpError> {
    let header = ("X-aws-ec2-metadata-token-ttl-seconds", TOKEN_LIFE);
    let path = "/latest/api/token";
    let answer = http::ask(&Question {
        address,
        method: Method::PUT,
        path,
        header,
        body: b"",
        deadline: ANSWER_TIMEOUT,
        secure: None,
    })
    .await?;
    let plain = !answer.body.is_empty() && answer.body.bytes().all(|byte| byte.is_ascii_graphic());
    match answer.status {
        StatusCode::OK if plain => Ok(answer.body),
        StatusCode::OK => Err(HttpError::Improper("its token is none".to_owned())),
        status => Err(HttpError::Status(status)),
    }
}
