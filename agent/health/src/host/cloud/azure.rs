//! Parses the scheduled events of Microsoft Azure's metadata service.

use super::time::wall_of;
use super::{Notice, NoticeKind, json};

/// The key that is watched.
pub const KEY: &str = "scheduledevents";

/// Scheduled events for the machine named `own`, or for no machine in particular.
///
/// # Errors
/// The body is not a document with a list of events.
pub fn events(body: &str, own: &str) -> Result<Vec<Notice>, String> {
    let document = json(body)?;
    let events = document["Events"].as_array().ok_or("it has no events")?;
    // Events name a machine of a scale set with an underscore that its own name does not have.
    let plain = |name: &str| name.replace('_', "").to_lowercase();
    let ours = events.iter().filter(|event| {
        let resources = event["Resources"].as_array();
        resources.is_none_or(|all| {
            all.iter().filter_map(|name| name.as_str()).any(|name| plain(name) == plain(own.trim()))
        })
    });
    Ok(ours
        .map(|event| {
            let text = |name: &str| event[name].as_str().unwrap_or_default();
            let kind = match text("EventType") {
                "Preempt" => NoticeKind::Preemption,
                "Terminate" => NoticeKind::Termination,
                // The machine pauses for some seconds.
                "Freeze" => NoticeKind::Migration,
                _ => NoticeKind::Maintenance,
            };
            Notice {
                id: format!("event {}", text("EventId")),
                kind,
                starts: wall_of(text("NotBefore")),
                ends: None,
                ongoing: text("EventStatus") == "Started",
                detail: format!("{}, {}: {}", text("EventType"), text("EventStatus"), text("Description")),
                source: KEY.to_owned(),
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
    fn events_of_this_machine_are_read_and_those_of_others_ignored() {
        let body = r#"{ "DocumentIncarnation": 2, "Events": [
            { "EventId": "A", "EventType": "Reboot", "ResourceType": "VirtualMachine", "Resources": ["train_17"],
              "EventStatus": "Scheduled", "NotBefore": "Thu, 21 Jan 2027 09:00:43 GMT", "Description": "Host maintenance",
              "EventSource": "Platform", "DurationInSeconds": 5 },
            { "EventId": "B", "EventType": "Preempt", "Resources": ["train_18"], "EventStatus": "Started", "NotBefore": "" } ] }"#;
        let own = events(body, "train17\n").unwrap();
        assert_eq!((own.len(), own[0].kind, own[0].ongoing), (1, NoticeKind::Maintenance, false));
        assert_eq!(own[0].starts, Some(Wall(1_800_522_043_000_000_000)));
        let other = events(body, "train_18").unwrap();
        assert_eq!((other.len(), other[0].kind, other[0].starts), (1, NoticeKind::Preemption, None));
        assert_eq!(events(r#"{"DocumentIncarnation": 1, "Events": []}"#, "a"), Ok(Vec::new()));
    }

    proptest! {
        #[test]
        fn no_body_makes_reading_panic(body in "[\\[\\]{}\":a-zA-Z0-9_, -]{0,60}", own in ".{0,10}") {
            let _ = events(&body, &own);
            let _ = events(&format!("{{\"Events\": [{{{body}}}]}}"), &own);
        }
    }
}
