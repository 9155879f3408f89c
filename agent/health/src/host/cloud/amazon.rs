//! Parses the answers of Amazon EC2's metadata server, key by key.

use super::time::wall_of;
use super::{Notice, NoticeKind, json};

/// `spot/instance-action`: `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`
///
/// # Errors
/// The body is no such document.
pub fn instance_action(body: &str) -> Result<Vec<Notice>, String> {
    let document = json(body)?;
    let action = document["action"].as_str().ok_or("it names no action")?;
    let time = document["time"].as_str().unwrap_or_default();
    Ok(vec![Notice {
        id: "spot/instance-action".to_owned(),
        kind: NoticeKind::Preemption,
        // At most two minutes from now.
        starts: wall_of(time),
        ends: None,
        ongoing: false,
        detail: format!("{action} at {time}"),
        source: "spot/instance-action".to_owned(),
    }])
}

/// `events/recommendations/rebalance`: `{"noticeTime": "2020-11-05T08:22:00Z"}`
///
/// # Errors
/// The body is no such document.
pub fn rebalance(body: &str) -> Result<Vec<Notice>, String> {
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

/// `events/maintenance/scheduled`: a list of events with `NotBefore`, `Code`, `State` and so on. Completed events stay
/// in the list for a while.
///
/// # Errors
/// The body is not a JSON list.
pub fn scheduled(body: &str) -> Result<Vec<Notice>, String> {
    let document = json(body)?;
    let events = document.as_array().ok_or("it is not a list")?;
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
                // An event weeks away is not the end yet.
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
    use mainstay_model::time::Wall;
    use proptest::prelude::*;

    #[test]
    fn the_forms_of_amazons_documentation_are_read() {
        let action = instance_action(r#"{"action": "terminate", "time": "2017-09-18T08:22:00Z"}"#).unwrap();
        let at = Some(Wall(1_505_722_920_000_000_000));
        assert_eq!((action[0].kind, action[0].starts), (NoticeKind::Preemption, at));
        let unreported = instance_action(r#"{"action": "stop"}"#).unwrap();
        assert_eq!((unreported[0].kind, unreported[0].starts), (NoticeKind::Preemption, None));
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
