//! The metadata server of Amazon EC2 (IMDSv2). It does not tell of changes: it is asked every few seconds, as Amazon
//! recommends for spot machines.

use std::time::Duration;

use hyper::{Method, StatusCode};
use mainstay_core::cloud::{Notice, NoticeKind};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::{News, json, wall_of};
use crate::http::{self, HttpError, Question};

/// How often each key is asked for.
const INTERVAL: Duration = Duration::from_secs(5);

const DEADLINE: Duration = Duration::from_secs(5);

/// How long a token is good, in seconds: the longest that there is.
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
pub(super) fn follow(runtime: &Runtime, address: &str, news: &mpsc::Sender<News>) -> usize {
    runtime.spawn(follow_keys(address.to_owned(), news.clone()));
    KEYS.len()
}

async fn follow_keys(address: String, news: mpsc::Sender<News>) {
    let mut token: Option<String> = None;
    loop {
        for key in &KEYS {
            let told = match ask(key, &address, &mut token).await {
                Ok(Some(body)) => (key.read)(&body),
                Ok(None) => Ok(Vec::new()),
                Err(error) => Err(error.to_string()),
            };
            if news.send(News { key: key.name, told }).await.is_err() {
                return;
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The key's value; none if there is no such key, which is how nothing is announced.
async fn ask(key: &Key, address: &str, token: &mut Option<String>) -> Result<Option<String>, HttpError> {
    if token.is_none() {
        *token = Some(new_token(address).await?);
    }
    let path = format!("/latest/meta-data/{}", key.name);
    let header = ("X-aws-ec2-metadata-token", token.as_deref().unwrap_or_default());
    let question =
        Question { address, method: Method::GET, path: &path, header, body: b"", deadline: DEADLINE };
    let answer = http::ask(&question).await?;
    match answer.status {
        StatusCode::OK => Ok(Some(answer.body)),
        StatusCode::NOT_FOUND => Ok(None),
        status => {
            // A token that is too old is refused.
            *token = None;
            Err(HttpError::Status(status))
        }
    }
}

async fn new_token(address: &str) -> Result<String, HttpError> {
    let header = ("X-aws-ec2-metadata-token-ttl-seconds", TOKEN_LIFE);
    let path = "/latest/api/token";
    let answer =
        http::ask(&Question { address, method: Method::PUT, path, header, body: b"", deadline: DEADLINE })
            .await?;
    let plain = !answer.body.is_empty() && answer.body.bytes().all(|byte| byte.is_ascii_graphic());
    match answer.status {
        StatusCode::OK if plain => Ok(answer.body),
        StatusCode::OK => Err(HttpError::Improper("its token is none".to_owned())),
        status => Err(HttpError::Status(status)),
    }
}

/// `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`
fn instance_action(body: &str) -> Result<Vec<Notice>, String> {
    let document = json(body)?;
    let action = document["action"].as_str().ok_or("it names no action")?;
    let time = document["time"].as_str().unwrap_or_default();
    Ok(vec![Notice {
        id: "spot/instance-action".to_owned(),
        kind: NoticeKind::Preemption,
        // The machine has two minutes at most: that is now.
        starts: None,
        ends: None,
        ongoing: false,
        detail: format!("{action} at {time}"),
        source: "spot/instance-action".to_owned(),
    }])
}

/// `{"noticeTime": "2020-11-05T08:22:00Z"}`
fn rebalance(body: &str) -> Result<Vec<Notice>, String> {
    let document = json(body)?;
    let time = document["noticeTime"].as_str().ok_or("it names no time")?;
    Ok(vec![Notice {
        id: "rebalance".to_owned(),
        kind: NoticeKind::AtRisk,
        starts: None,
        ends: None,
        ongoing: false,
        detail: format!("rebalance recommendation of {time}"),
        source: "events/recommendations/rebalance".to_owned(),
    }])
}

/// A list of events with `NotBefore`, `Code`, `State` and so on; those that are over stay in it for a while.
fn scheduled(body: &str) -> Result<Vec<Notice>, String> {
    let document = json(body)?;
    let events = document.as_array().ok_or("it is no list")?;
    let active = events.iter().filter(|event| event["State"].as_str().is_none_or(|state| state == "active"));
    Ok(active
        .map(|event| {
            let text = |name: &str| event[name].as_str().unwrap_or_default();
            let code = text("Code");
            let kind = match code {
                "instance-stop" | "instance-retirement" => NoticeKind::Termination,
                _ => NoticeKind::Maintenance,
            };
            let starts = wall_of(text("NotBefore"));
            Notice {
                id: format!("event {}", text("EventId")),
                // One that is weeks away is not yet the end.
                kind,
                starts,
                ends: wall_of(text("NotAfter")),
                ongoing: false,
                detail: format!("{code}: {}, from {}", text("Description"), text("NotBefore")),
                source: "events/maintenance/scheduled".to_owned(),
            }
        })
        .collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test reports")]
mod tests {
    use super::*;
    use mainstay_core::time::Wall;
    use proptest::prelude::*;

    #[test]
    fn the_forms_of_amazons_documentation_are_read() {
        let action = instance_action(r#"{"action": "terminate", "time": "2017-09-18T08:22:00Z"}"#).unwrap();
        assert_eq!((action[0].kind, action[0].starts), (NoticeKind::Preemption, None));
        assert_eq!(
            rebalance(r#"{"noticeTime": "2020-11-05T08:22:00Z"}"#).unwrap()[0].kind,
            NoticeKind::AtRisk
        );
        let events = r#"[ { "NotBefore" : "21 Jan 2027 09:00:43 GMT", "Code" : "system-reboot",
            "Description" : "scheduled reboot", "EventId" : "instance-event-0d59937288b749b32",
            "NotAfter" : "21 Jan 2027 09:17:23 GMT", "State" : "active" },
            { "NotBefore" : "21 Jan 2026 09:00:43 GMT", "Code" : "system-reboot", "Description" : "[Completed]",
            "EventId" : "instance-event-1", "NotAfter" : "21 Jan 2026 09:17:23 GMT", "State" : "completed" } ]"#;
        let events = scheduled(events).unwrap();
        assert_eq!((events.len(), events[0].kind), (1, NoticeKind::Maintenance));
        assert_eq!(events[0].starts, Some(Wall(1_800_522_043_000_000_000)));
        assert_eq!(scheduled("[]"), Ok(Vec::new()));
    }

    proptest! {
        #[test]
        fn no_body_makes_reading_panic(body in "[\\[\\]{}\":a-zA-Z0-9_, -]{0,60}") {
            let _ = (instance_action(&body), rebalance(&body), scheduled(&body));
        }
    }
}
