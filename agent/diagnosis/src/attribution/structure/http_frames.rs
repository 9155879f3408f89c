//! Interrupted transfers: the type of an HTTP client's exception means little, but its frames show that it waited for a server.

use super::{framed, vote};
use crate::attribution::Evidence;
use crate::attribution::catalog::Determinism;
use crate::attribution::class::Class;
use crate::attribution::traceback::Frame;
use crate::attribution::vote::Vote;

/// Log-odds of a store or a hub that did not respond.
const NO_RESPONSE_LOG_ODDS: f64 = 2.4;

/// Libraries that fetch from other machines by HTTP.
const CLIENTS: [&str; 11] = [
    "/urllib3/",
    "/requests/",
    "/http/client.py",
    "/httpx/",
    "/httpcore/",
    "/aiohttp/",
    "/botocore/",
    "/s3fs/",
    "/gcsfs/",
    "/fsspec/",
    "/huggingface_hub/",
];

/// Exception types of a wait or a connection, for any purpose.
const WAITS: [&str; 8] = [
    "TimeoutError",
    "Timeout",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "RemoteDisconnected",
    "ProtocolError",
    "IncompleteRead",
];

/// A wait or a connection that failed inside a library that fetches from other machines.
pub(super) fn gave_up(evidence: &Evidence) -> Option<Vote> {
    let (source, ended, _) = framed(evidence).find(|(_, exception, frame)| {
        WAITS.iter().any(|end| exception.name.ends_with(end)) && fetches(frame)
    })?;
    let vote = vote(
        "frame.web_client",
        "a transfer from another machine broke off".to_owned(),
        (Class::Storage, NO_RESPONSE_LOG_ODDS),
        vec![(source, ended.spot.clone())],
        "frames",
    );
    Some(Vote { determinism: Determinism::Transient, ..vote })
}

fn fetches(frame: &Frame) -> bool {
    let path = frame.path.replace('\\', "/");
    CLIENTS.iter().any(|client| path.contains(client))
}

#[cfg(test)]
mod tests {
    use crate::attribution::class::{Class, Restart};
    use crate::attribution::judged;

    #[test]
    fn a_wait_inside_an_http_client_points_to_the_store() {
        let raised = |path: &str| {
            format!(
                "  File \"{path}\", line 9, in read\n    x = read()\nTimeoutError: The read operation timed out\n"
            )
        };
        let fetched = judged(&raised("/usr/lib/python3.12/site-packages/urllib3/response.py"));
        assert_eq!((fetched.class, fetched.restart), (Class::Storage, Restart::RestartAfterWait));
        let on_windows = judged(&raised("C:\\venv\\lib\\site-packages\\requests\\models.py"));
        assert_eq!(on_windows.class, Class::Storage);
        assert_ne!(judged(&raised("/home/a/train.py")).class, Class::Storage);
    }
}
