//! Parses the answers of Google Compute Engine's metadata server, key by key.

use super::time::wall_of;
use super::{Notice, NoticeKind, json};

/// `instance/maintenance-event`: `NONE`, `MIGRATE_ON_HOST_MAINTENANCE`, `TERMINATE_ON_HOST_MAINTENANCE`.
///
/// # Errors
/// The body is none of these.
pub fn maintenance_event(body: &str) -> Result<Vec<Notice>, String> {
    let kind = match body.trim() {
        "NONE" => return Ok(Vec::new()),
        event if event.starts_with("MIGRATE_") => NoticeKind::Migration,
        event if event.starts_with("TERMINATE_") => NoticeKind::Termination,
        other => return Err(format!("it is {:?}", other.chars().take(80).collect::<String>())),
    };
    Ok(vec![at_once("maintenance-event", kind, body.trim())])
}

/// `instance/preempted`: `FALSE`, `TRUE`.
///
/// # Errors
/// The body is neither.
pub fn preempted(body: &str) -> Result<Vec<Notice>, String> {
    match body.trim() {
        "FALSE" => Ok(Vec::new()),
        "TRUE" => Ok(vec![at_once("preempted", NoticeKind::Preemption, "preempted is TRUE")]),
        other => Err(format!("it is {:?}", other.chars().take(80).collect::<String>())),
    }
}

fn at_once(id: &str, kind: NoticeKind, detail: &str) -> Notice {
    Notice {
        id: id.to_owned(),
        kind,
        starts: None,
        ends: None,
        ongoing: false,
        detail: detail.to_owned(),
        source: format!("instance/{id}"),
    }
}

/// `instance/upcoming-maintenance`. `NONE`, `{}` and an `error` mean no announcement; field names have both of Google's
/// spellings.
///
/// # Errors
/// The body is not a JSON object.
pub fn upcoming_maintenance(body: &str) -> Result<Vec<Notice>, String> {
    if body.trim().trim_matches('"') == "NONE" {
        return Ok(Vec::new());
    }
    let document = json(body)?;
    let object = document.as_object().ok_or("it is not an object")?;
    let field = |wanted: &str| {
        let found = object.iter().find(|(name, _)| name.replace('_', "").eq_ignore_ascii_case(wanted));
        found.map(|(_, value)| match value {
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Array(all) => {
                all.iter().filter_map(|one| one.as_str()).collect::<Vec<_>>().join(", ")
            }
            other => other.to_string(),
        })
    };
    let starts = field("windowstarttime").or_else(|| field("starttime"));
    let status = field("maintenancestatus");
    if starts.is_none() && status.is_none() {
        return Ok(Vec::new());
    }
    let mut detail: Vec<String> = Vec::new();
    detail.extend(field("type"));
    detail.extend(status.clone());
    detail.extend(field("maintenancereasons").filter(|reasons| !reasons.is_empty()));
    detail.extend(starts.as_ref().map(|starts| format!("from {starts}")));
    detail.extend(field("windowendtime").map(|ends| format!("to {ends}")));
    if field("canreschedule").is_some_and(|can| can.eq_ignore_ascii_case("true")) {
        detail.push("it can be rescheduled".to_owned());
    }
    Ok(vec![Notice {
        id: "upcoming-maintenance".to_owned(),
        kind: NoticeKind::Maintenance,
        // A time that cannot be parsed may be now.
        starts: starts.as_deref().and_then(wall_of),
        ends: field("windowendtime").as_deref().and_then(wall_of),
        ongoing: status.is_some_and(|status| status.eq_ignore_ascii_case("ONGOING")),
        detail: detail.join(", ").chars().take(500).collect(),
        source: "instance/upcoming-maintenance".to_owned(),
    }])
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test reports")]
mod tests {
    use super::*;
    use mainstay_model::time::Wall;
    use proptest::prelude::*;

    #[test]
    fn nothing_announced_has_several_forms() {
        let none = [
            "NONE",
            "\"NONE\"\n",
            "{}",
            "{ }",
            "{ \"error\": \"no notifications have been received yet, try again later\" }",
        ];
        for body in none {
            assert_eq!(upcoming_maintenance(body), Ok(Vec::new()), "{body}");
        }
        assert_eq!(maintenance_event("NONE\n"), Ok(Vec::new()));
        assert_eq!(preempted("FALSE"), Ok(Vec::new()));
    }

    #[test]
    fn announcements_are_parsed_in_both_spellings() {
        let snake = r#"{"can_reschedule": "true", "latest_window_start_time": "2027-01-15T08:30:00Z",
            "maintenance_reasons": ["FAILURE_GPU_XID", "FAILURE_GPU"], "maintenance_status": "PENDING", "type": "UNSCHEDULED",
            "window_end_time": "2027-01-15T12:00:00Z", "window_start_time": "2027-01-15T08:00:00Z"}"#;
        let camel = r#"{"canReschedule": true, "latestWindowStartTime": "2027-01-15T08:30:00Z",
            "maintenanceReasons": ["FAILURE_GPU_XID", "FAILURE_GPU"], "maintenanceStatus": "PENDING", "type": "UNSCHEDULED",
            "windowEndTime": "2027-01-15T12:00:00Z", "windowStartTime": "2027-01-15T08:00:00Z"}"#;
        let notices = upcoming_maintenance(snake).unwrap();
        assert_eq!(notices, upcoming_maintenance(camel).unwrap());
        let notice = &notices[0];
        assert_eq!(
            (notice.starts, notice.ends),
            (Some(Wall(1_800_000_000_000_000_000)), Some(Wall(1_800_014_400_000_000_000)))
        );
        assert!(!notice.ongoing);
        testing::snapshot!("reasons", "google: announcements are parsed in both spellings", notice.detail);
        let far = upcoming_maintenance(r#"{"window_start_time": "9999-12-31T00:00:00Z"}"#).unwrap();
        assert_eq!(far[0].starts, Some(Wall(i64::MAX)));
        assert!(upcoming_maintenance(r#"{"maintenance_status": "ONGOING"}"#).unwrap()[0].ongoing);
        assert_eq!(
            maintenance_event("TERMINATE_ON_HOST_MAINTENANCE").unwrap()[0].kind,
            NoticeKind::Termination
        );
        assert_eq!(maintenance_event("MIGRATE_ON_HOST_MAINTENANCE").unwrap()[0].kind, NoticeKind::Migration);
        assert_eq!(preempted("TRUE").unwrap()[0].kind, NoticeKind::Preemption);
    }

    #[test]
    fn an_answer_that_cannot_be_parsed_is_an_error() {
        for body in ["", "<html>", "[]", "maybe"] {
            assert!(maintenance_event(body).is_err(), "{body:?}");
            assert!(preempted(body).is_err(), "{body:?}");
            assert!(upcoming_maintenance(body).is_err(), "{body:?}");
        }
    }

    proptest! {
        #[test]
        fn no_body_makes_reading_panic(body in "(?s).{0,80}", value in "[\\[\\]{}\":a-zA-Z0-9_, -]{0,60}") {
            let _ = (maintenance_event(&body), preempted(&body), upcoming_maintenance(&body));
            let _ = upcoming_maintenance(&format!("{{\"window_start_time\": {value}}}"));
            let _ = upcoming_maintenance(&format!("{{\"windowStartTime\": \"{value}\"}}"));
        }
    }
}
