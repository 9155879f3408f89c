//! What the launcher prints on the terminal: few lines, each with what happened and what is done about it.

use mainstay_model::entry::{Body, Fact};
use mainstay_model::observation::HOSTS;
use mainstay_recovery::job::{ORDERS, POLICY, RESTART_WAITS};
use mainstay_recovery::policy::Rung;
use mainstay_view::incident_report;

use crate::order::STOP_ORDERED;

/// The line for an entry; none for entries that people need not see.
pub fn line(body: &Body) -> Option<String> {
    match body {
        Body::Verdict(verdict) => Some(incident_report::brief(verdict)),
        Body::Decision(decision) => {
            let done = decision.action.rung().map_or("waiting", Rung::describe);
            let exit =
                decision.action.exit().map_or(String::new(), |exit| format!(" with exit status {exit}"));
            let later = if decision.after.0 > 0 { format!(" in {}", decision.after) } else { String::new() };
            Some(format!("{done}{exit}{later}: {}", decision.why))
        }
        Body::Outcome(outcome) => Some(outcome.describe()),
        Body::Fact(Fact::RanksHung { hang, acts: true, .. }) => {
            Some(format!("{}; taking the stacks of the ranks, then stopping them", hang.headline()))
        }
        Body::Fact(Fact::RanksHung { hang, acts: false, .. }) => {
            Some(format!("{}; it is only reported (--hang report)", hang.headline()))
        }
        Body::Fact(Fact::HostLost { named, how, .. }) => Some(format!("{named} is lost: {how}")),
        Body::Fact(Fact::WorldChanged { before, now, hosts, why, .. }) => Some(format!(
            "the job goes on with {now} ranks instead of {before}, on {}: {why}",
            hosts.join(", ")
        )),
        Body::Fact(Fact::HangPassed { after, .. }) => {
            Some(format!("the ranks make progress again, after {after}"))
        }
        Body::Fact(Fact::Observed(seen))
            if matches!(seen.event.as_str(), "hang_suspected" | RESTART_WAITS)
                || seen.component == POLICY
                || seen.component == HOSTS
                // That the ranks are stopped is reported anyway, with the person.
                || (seen.component == ORDERS && seen.event != STOP_ORDERED) =>
        {
            Some(seen.detail.clone())
        }
        Body::Finding(finding) => Some(finding.headline.clone()),
        Body::Fact(Fact::PagesUnavailable { reason } | Fact::RankRefused { reason, .. }) => {
            Some(reason.clone())
        }
        Body::Fact(Fact::AgentLost { reason }) => {
            Some(format!("lost the agent ({reason}); continuing without it"))
        }
        Body::Fact(Fact::StopRequested { by, .. }) => Some(format!("{by}: stopping the ranks")),
        Body::Fact(_) | Body::Health(_) => None,
    }
}
