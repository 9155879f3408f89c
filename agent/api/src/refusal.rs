//! Errors of calls. A program reads the reason from `google.rpc.ErrorInfo`, the wrong field of its request from
//! `BadRequest`, and when to try again from `RetryInfo`. The message is for people.

use std::collections::HashMap;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// `ErrorInfo.domain`: the API that the reasons belong to.
pub const DOMAIN: &str = "mainstay.v1";

/// When what is refused for a limit, or by a server that stops, may be tried again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why a call is refused. Each reason has one code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reason {
    /// `ErrorInfo.reason`.
    name: &'static str,
    code: Code,
}

/// Constants, and all of them in a list.
macro_rules! reasons {
    ($($name:ident $code:ident;)+) => {
        #[allow(missing_docs, reason = "docs/reference/api.md describes each")]
        impl Reason {
            $(pub(super) const $name: Reason = Reason { name: stringify!($name), code: Code::$code };)+

            #[cfg(test)]
            const ALL: &[Reason] = &[$(Reason::$name),+];
        }
    };
}

reasons! {
    AGENT_ONLY Unimplemented;
    CALLER_NOT_ALLOWED PermissionDenied;
    CURSOR_AHEAD OutOfRange;
    DIRECTORY_GONE Aborted;
    GPU_RESET_FAILED Aborted;
    GPU_RESET_REFUSED FailedPrecondition;
    INTERNAL Internal;
    INVALID_FIELD InvalidArgument;
    JOB_ATTACHED AlreadyExists;
    JOURNAL_UNREADABLE Unavailable;
    NOT_REMOVED Aborted;
    NOT_SERVED_HERE Unimplemented;
    NO_HELLO DeadlineExceeded;
    NO_REPLICAS FailedPrecondition;
    ORDER_NOT_POSSIBLE FailedPrecondition;
    PROBES_RUNNING ResourceExhausted;
    RESTORE_FAILED Aborted;
    RUN_OF_ANOTHER_DIRECTORY AlreadyExists;
    SERVER_STOPPING Unavailable;
    STEPS_LOST DataLoss;
    TEXTS_WITHHELD PermissionDenied;
    TOO_MANY_CALLS ResourceExhausted;
    TOO_MANY_LAUNCHERS ResourceExhausted;
    TOO_MANY_REPORTS ResourceExhausted;
    TOO_MANY_RESTORES ResourceExhausted;
    TOO_MANY_UNREAD_ANSWERS ResourceExhausted;
    UNIX_SOCKET_ONLY PermissionDenied;
    UNKNOWN_CODE NotFound;
    UNKNOWN_COMPONENT NotFound;
    UNKNOWN_EVENT NotFound;
    UNKNOWN_FAILURE NotFound;
    UNKNOWN_GPU NotFound;
    UNKNOWN_JOB NotFound;
    UNKNOWN_RANK NotFound;
    UNKNOWN_SERVICE NotFound;
}

impl Reason {
    /// The status of a call that is refused for this.
    pub(super) fn refuse(self, message: impl Into<String>) -> Status {
        self.with(message, ErrorDetails::new())
    }

    fn with(self, message: impl Into<String>, mut details: ErrorDetails) -> Status {
        details.set_error_info(self.name, DOMAIN, HashMap::new());
        if matches!(self.code, Code::ResourceExhausted | Code::Unavailable) {
            details.set_retry_info(Some(RETRY_AFTER));
        }
        Status::with_error_details(self.code, message, details)
    }
}

/// The status of a call with a wrong field: its name in the request, then what would be right.
pub(super) fn invalid(field: &str, problem: impl AsRef<str>) -> Status {
    let problem = problem.as_ref();
    let mut details = ErrorDetails::new();
    details.add_bad_request_violation(field, problem);
    Reason::INVALID_FIELD.with(format!("{field}: {problem}"), details)
}

/// The reason of a refused call; none if the server of another version gave none.
pub(super) fn reason_of(status: &Status) -> Option<String> {
    status.get_details_error_info().filter(|info| info.domain == DOMAIN).map(|info| info.reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ResourceExhausted` as `RESOURCE_EXHAUSTED`.
    fn upper_snake(name: &str) -> String {
        let mut out = String::new();
        for letter in name.chars() {
            if letter.is_uppercase() && !out.is_empty() {
                out.push('_');
            }
            out.push(letter.to_ascii_uppercase());
        }
        out
    }

    #[test]
    fn the_api_page_has_a_row_for_each_reason() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/api.md");
        let page = std::fs::read_to_string(path).unwrap();
        let section = page.split("\n## ").find(|section| section.starts_with("Errors\n")).unwrap();
        let rows: Vec<(&str, &str)> = section
            .lines()
            .filter_map(|line| {
                let mut cells = line.strip_prefix("| `")?.split('`');
                Some((cells.next()?, cells.nth(1)?))
            })
            .collect();
        let reasons: Vec<(&str, String)> = Reason::ALL
            .iter()
            .map(|reason| (reason.name, upper_snake(&format!("{:?}", reason.code))))
            .collect();
        let reasons: Vec<(&str, &str)> = reasons.iter().map(|(name, code)| (*name, code.as_str())).collect();
        assert_eq!(rows, reasons);
    }

    #[test]
    fn a_refusal_has_its_reason_the_wrong_field_and_when_to_try_again() {
        let refused = invalid("limit", "from 1 to 1000");
        let details = refused.get_error_details();
        assert_eq!(reason_of(&refused).as_deref(), Some("INVALID_FIELD"));
        let violations = &details.bad_request().unwrap().field_violations;
        assert_eq!((violations.len(), violations[0].field.as_str()), (1, "limit"));
        assert!(details.retry_info().is_none());
        let busy = Reason::PROBES_RUNNING.refuse("later");
        assert_eq!(busy.get_details_retry_info().unwrap().retry_delay, Some(RETRY_AFTER));
        assert_eq!(reason_of(&Status::not_found("of a server without details")), None);
    }
}
