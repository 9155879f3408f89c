//! Parses messages that a large job sends tens of thousands of times a second in one pass. The kind of a message is
//! one of its fields, so serde first buffers the whole message to find that field, three times for a fact in a
//! report. Here the kind is guessed from where launchers write it, and verified when the message is read. Anything
//! else is left to serde.

use std::borrow::Cow;

use serde::Deserialize;

use mainstay_checkpoint::inventory::Copy;
use mainstay_model::entry::{Fact, StepDone};
use mainstay_model::id::{Attempt, Rank};
use mainstay_model::time::Mono;

use super::{Report, Up, copy_list};

#[derive(Deserialize)]
struct Beat<'a> {
    #[serde(borrow)]
    up: Cow<'a, str>,
    sent: Mono,
}

#[derive(Deserialize)]
struct Acknowledged<'a> {
    #[serde(borrow)]
    up: Cow<'a, str>,
    number: u64,
}

#[derive(Deserialize)]
struct Reported<'a, T> {
    #[serde(borrow)]
    up: Cow<'a, str>,
    number: u64,
    at: Mono,
    report: T,
}

#[derive(Deserialize)]
struct Steps {
    #[serde(rename = "report")]
    kind: String,
    attempt: Attempt,
    ranks: Vec<(Rank, Vec<StepDone>)>,
}

#[derive(Deserialize)]
struct Observed {
    #[serde(rename = "report")]
    kind: String,
    fact: Fact,
}

#[derive(Deserialize)]
struct Holding {
    #[serde(rename = "report")]
    kind: String,
    attempt: Attempt,
    #[serde(with = "copy_list")]
    copies: Vec<Copy>,
}

/// Reads a message of the frequent kinds, as launchers write it.
pub(super) fn read(bytes: &[u8]) -> Option<Up> {
    match kind_after(bytes, br#"{"up":""#)? {
        b"beat" => {
            let Beat { up, sent } = serde_json::from_slice(bytes).ok()?;
            (up == "beat").then_some(Up::Beat { sent })
        }
        b"received" => {
            let Acknowledged { up, number } = serde_json::from_slice(bytes).ok()?;
            (up == "received").then_some(Up::Received { number })
        }
        b"report" => report(bytes),
        _ => None,
    }
}

fn report(bytes: &[u8]) -> Option<Up> {
    // After two numbers of at most 20 digits.
    let head = bytes.get(..bytes.len().min(128))?;
    let marker = br#""report":{"report":""#;
    let begin = head.windows(marker.len()).position(|found| found == marker)?;
    match kind_after(bytes.get(begin..)?, marker)? {
        b"steps" => numbered(bytes, |Steps { kind, attempt, ranks }| {
            (kind == "steps").then_some(Report::Steps { attempt, ranks })
        }),
        b"fact" => {
            numbered(bytes, |Observed { kind, fact }| (kind == "fact").then_some(Report::Fact { fact }))
        }
        b"holding" => numbered(bytes, |Holding { kind, attempt, copies }| {
            (kind == "holding").then_some(Report::Holding { attempt, copies })
        }),
        _ => None,
    }
}

fn numbered<'a, T: Deserialize<'a>>(bytes: &'a [u8], report: impl Fn(T) -> Option<Report>) -> Option<Up> {
    let Reported { up, number, at, report: found } = serde_json::from_slice::<Reported<'a, T>>(bytes).ok()?;
    let report = report(found).filter(|_| up == "report")?;
    Some(Up::Report { number, at, report })
}

/// The word from the end of the marker to the next quotation mark.
fn kind_after<'a>(bytes: &'a [u8], marker: &[u8]) -> Option<&'a [u8]> {
    let rest = bytes.strip_prefix(marker)?;
    rest.get(..rest.iter().take(16).position(|byte| *byte == b'"')?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Join;

    fn messages() -> Vec<Up> {
        let (attempt, rank, at) = (Attempt(3), Rank(7), Mono(11));
        let facts = [
            Fact::RankConnected { attempt, rank, client: "a \"report\":{\"report\":\"steps\"".to_owned() },
            Fact::AttemptEnded { attempt, orphans_killed: 1, waiting: vec![rank] },
        ];
        let reports = facts.map(|fact| Report::Fact { fact }).into_iter().chain([
            Report::Steps {
                attempt,
                ranks: vec![(rank, vec![StepDone { loss: Some(0.1), ..StepDone::default() }])],
            },
            Report::Role { attempt, rank, role: "actor".to_owned(), stage: None },
            Report::Holding { attempt, copies: Vec::new() },
            Report::Opened { attempt, port: Ok(1) },
        ]);
        let reports = reports.map(|report| Up::Report { number: u64::MAX, at, report });
        let others = [Up::Join(Join::default()), Up::Received { number: 5 }, Up::Beat { sent: at }];
        reports.chain(others).collect()
    }

    #[test]
    fn each_message_is_what_serde_reads_and_frequent_kinds_are_read_in_one_pass() {
        for up in messages() {
            let bytes = serde_json::to_vec(&up).expect("it is written");
            assert_eq!(Up::read(&bytes).expect("it is read"), up);
            let many = match &up {
                Up::Join(_) => false,
                Up::Report { report, .. } => !matches!(report, Report::Role { .. } | Report::Opened { .. }),
                _ => true,
            };
            assert_eq!(read(&bytes).is_some(), many, "{up:?}");
        }
    }

    #[test]
    fn a_message_in_another_format_is_left_to_serde() {
        let beat = br#"{ "sent": 5, "up": "beat" }"#;
        assert_eq!(read(beat), None);
        assert_eq!(Up::read(beat).expect("it is read"), Up::Beat { sent: Mono(5) });
        // The first word does not prove the kind.
        let role = br#"{"up":"report","number":1,"at":1,"x":{"report":{"report":"steps"}},"report":{"report":"role","attempt":1,"rank":2,"role":"a","stage":null,"done":[]}}"#;
        assert!(matches!(Up::read(role), Ok(Up::Report { report: Report::Role { .. }, .. })));
        assert!(Up::read(br#"{"up":"beat","sent":"soon"}"#).is_err());
    }
}
