//! The user's own policy in the loop of the launcher: it is asked like the agent, and the loop goes on meanwhile.

use mainstay_model::entry::Body;
use mainstay_model::id::{Incident, Pid};
use mainstay_recovery::job::{Output, policy_trouble};
use mainstay_recovery::policy::Trouble;
use mainstay_recovery::protocol::Event;
use serde_json::Value;

use crate::policy::{News, Policy, WITHIN};
use crate::ranks::spec::RankSpec;
use crate::ranks::warm::interpreter_of;
use crate::ranks::warm::with_descendants;
use crate::run::Launcher;
use crate::settings::Settings;
use mainstay_sys::clock;

/// Starts the policy that the job has, if it has one.
pub(crate) fn start(settings: &Settings, rank_spec: &RankSpec) -> Option<Policy> {
    let interpreter = interpreter_of(&settings.command, std::env::var_os("PATH").as_deref());
    let file = settings.policy_file.as_deref()?;
    Some(Policy::start(file, interpreter, Some(rank_spec.mark()), WITHIN))
}

pub(crate) async fn next_news(policy: Option<&mut Policy>) -> News {
    match policy {
        Some(policy) => policy.next().await,
        None => std::future::pending().await,
    }
}

impl Launcher {
    pub(crate) fn ask_policy(&mut self, incident: Incident, case: &Value) {
        match &mut self.policy {
            Some(policy) => policy.ask(incident, case, false),
            None => self.step(clock::mono(), Event::PolicyAnswer { incident, advice: Ok(None) }),
        }
    }

    pub(crate) fn policy_news(&mut self, news: News) {
        match news {
            News::Ready => {}
            News::Broken(words) => {
                let fact = policy_trouble(&Trouble::Failed(words));
                let now = clock::mono();
                if let Some(lead) = self.group.lead_mut() {
                    lead.begin_with(now, vec![Output::Record(Body::Fact(fact))]);
                }
                self.poll_group(now);
            }
            News::Printed(line) => self.output.terminal.print(format!("policy: {line}")),
            News::Answered(incident, reply) => {
                self.step(clock::mono(), Event::PolicyAnswer { incident, advice: reply.advice });
            }
        }
    }

    /// The processes of the policy, which do not belong to the ranks.
    pub(crate) fn policy_processes(&self) -> Vec<Pid> {
        let pid = self.policy.as_ref().and_then(Policy::pid);
        with_descendants(pid.as_slice())
    }

    /// Lets the policy finish what it does in threads.
    pub(crate) async fn end_policy(&mut self) {
        let Some(policy) = self.policy.take() else { return };
        let printed = policy.end().await;
        printed.into_iter().for_each(|line| self.output.terminal.print(format!("policy: {line}")));
    }
}
