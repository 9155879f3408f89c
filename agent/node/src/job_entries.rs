//! Entries of jobs in the journal: those of one user's jobs may use a part of it. Entries beyond that change the view
//! and are not kept.

use std::collections::BTreeMap;

use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::id::JobId;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::{Span, Stamp};

use super::Node;
use super::allowance::Allowance;
use mainstay_sys::clock;

/// The component of the entry that says so.
const JOURNAL: &str = "agent.journal";

/// One user's part of the journal in one period: the journal of a user without restraint has two days of the others.
const PART: (u64, Span) = (8, Span::seconds(6 * 3600));

/// Bytes of an entry's line that are neither its body nor its job.
const ENTRY_OVERHEAD_BYTES: usize = 200;

pub(super) fn allowance(journal_bytes: u64) -> Allowance {
    Allowance::new(journal_bytes / PART.0, PART.1)
}

impl Node {
    /// Records an entry of a job, or shows it alone if the job's user has used up a user's part of the journal.
    pub(super) fn record_of_job(
        &mut self,
        at: Stamp,
        job: &JobId,
        origin_seq: Option<u64>,
        body: Body,
    ) -> Entry {
        // Root and the agent's own user may delete the journal anyway.
        let user = self.launchers.get(job).map(|launcher| launcher.uid);
        let Some(uid) = user.filter(|uid| *uid != 0 && *uid != nix::unistd::geteuid().as_raw()) else {
            return self.snapshots.record(at, Some(job), origin_seq, body);
        };
        // What has no form in JSON is not written either.
        let bytes =
            ENTRY_OVERHEAD_BYTES + job.0.len() + serde_json::to_vec(&body).map_or(0, |body| body.len());
        match self.job_entries.take(uid, bytes as u64, clock::mono()) {
            Ok(0) => self.snapshots.record(at, Some(job), origin_seq, body),
            Ok(left_out) => {
                self.entries_left_out(
                    uid,
                    format!("{left_out} entries of user {uid}'s jobs were left out"),
                    left_out,
                );
                self.snapshots.record(at, Some(job), origin_seq, body)
            }
            Err(left_out) => {
                if left_out == 1 {
                    let hours = PART.1.0 / Span::seconds(3600).0;
                    let detail = format!(
                        "user {uid}'s jobs have used their part of the journal: their entries are left out for up to {hours} hours"
                    );
                    self.entries_left_out(uid, detail, left_out);
                }
                self.snapshots.show(at, Some(job), origin_seq, body)
            }
        }
    }

    fn entries_left_out(&mut self, uid: u32, detail: String, left_out: u64) {
        let values = BTreeMap::from([
            ("uid".to_owned(), uid.to_string()),
            ("left_out".to_owned(), left_out.to_string()),
        ]);
        let (component, event) = (JOURNAL.to_owned(), "left_out".to_owned());
        let weight = Weight::Warning;
        self.record(None, Fact::Observed(Observation { component, event, weight, detail, values }));
    }
}
