//! The books of a job as API messages.

use std::collections::BTreeMap;

use mainstay_model::time::Wall;
use mainstay_proto::v1;

use super::{duration, timestamp};
use crate::goodput::Books;

/// The books until `now` if the job runs, else until its newest entry. Causes outside their window to which nothing is
/// charged are left out.
pub fn books(books: &Books, now: Option<Wall>) -> v1::Books {
    let closed = books.closed(now);
    let charged = |index: usize| closed.settled().keys().any(|(_, charge)| *charge == Some(index));
    let mut numbers = BTreeMap::new();
    let mut causes = Vec::new();
    for (index, of) in closed.causes.iter().enumerate() {
        if !closed.is_in_window(of.at) && !charged(index) {
            continue;
        }
        numbers.insert(index, u32::try_from(causes.len()).unwrap_or(u32::MAX));
        causes.push(v1::TimeCause {
            kind: of.kind.to_owned(),
            headline: of.headline.clone(),
            host: of.host.clone(),
            incident: of.incident.map(|incident| incident.0),
            time: Some(timestamp(of.at)),
            detected_after: Some(duration(of.detected_after)),
            recovered_after: of.recovered_after.map(duration),
            lost_steps: closed.lost_steps.get(&Some(index)).copied().unwrap_or_default(),
        });
    }
    let times = closed.settled().iter().map(|((state, charge), booked)| v1::TimeInState {
        state: state.as_str().to_owned(),
        cause: charge.and_then(|index| numbers.get(&index).copied()),
        time: Some(duration(booked.span)),
        rank_seconds: booked.of_ranks as f64 / 1e9,
    });
    v1::Books {
        times: times.collect(),
        causes,
        steps: closed.steps,
        launches: closed.launches,
        measured: closed.measured,
        counted: closed.counted,
    }
}
