//! The user's own policy, in front of the built-in one. Its advice is carried out unless it is [`forbidden`]. If it
//! fails or makes no decision, the built-in policy decides.

use crate::policy::{Advice, Case, Choice, Rung, Settings, forbidden, unless_dry, usual};
use mainstay_model::verdict::{Action, Rule};

/// The answer of the user's own policy to a case.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyAnswer<'a> {
    /// The policy's name for messages: that of its file.
    pub policy: &'a str,
    /// Its advice, if any. `None` leaves the failure to the built-in policy. An error has file and line.
    pub advice: Result<Option<Advice>, String>,
}

/// Why the built-in policy decided instead of the user's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyProblem {
    /// It failed; with the error text.
    Failed(String),
    /// Its advice is forbidden; with the reason.
    Overruled(String),
}

impl PolicyProblem {
    /// The text.
    pub fn message(&self) -> &str {
        match self {
            PolicyProblem::Failed(words) | PolicyProblem::Overruled(words) => words,
        }
    }
}

/// Decides, first with the answer of the user's own policy if there is one.
pub fn decide_with(
    answer: Option<PolicyAnswer<'_>>,
    settings: &Settings,
    case: Case<'_>,
) -> (Choice, Option<PolicyProblem>) {
    let (choice, problem) = match answer {
        None | Some(PolicyAnswer { advice: Ok(None), .. }) => (usual(settings, case), None),
        Some(PolicyAnswer { policy, advice: Ok(Some(advice)) }) => match forbidden(settings, case, &advice) {
            None => (choice_of(policy, settings, case, advice), None),
            Some(why) => {
                let wanted = advice.rung.map_or("waiting", Rung::describe);
                let words = format!("{policy}: {wanted} is not allowed: {why}");
                (usual(settings, case), Some(PolicyProblem::Overruled(words)))
            }
        },
        Some(PolicyAnswer { advice: Err(words), .. }) => {
            (usual(settings, case), Some(PolicyProblem::Failed(words)))
        }
    };
    (unless_dry(settings, case, choice), problem)
}

fn choice_of(policy: &str, settings: &Settings, case: Case<'_>, advice: Advice) -> Choice {
    let exit = if advice.rung == Some(Rung::HandBack) { settings.hand_back_exit } else { case.job.exit };
    let action =
        advice.rung.map_or(Action::Wait, |rung| Action::from_rung(rung, case.verdict.attempt.next(), exit));
    let why = format!("{} ({policy})", advice.why);
    Choice { action, after: advice.after, rule: Rule::UserPolicy, why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Budget, Host, JobState, PastFailure};
    use mainstay_diagnosis::root_rank::start_failed;
    use mainstay_model::id::{Attempt, Incident};
    use mainstay_model::time::Mono;
    use mainstay_model::time::Span;
    use mainstay_model::verdict::{Cause, Verdict};

    fn kill() -> Verdict {
        Verdict { cause: Cause::Signal { signal: 9 }, ..start_failed(Incident(1), Attempt(0), "", Mono(0)) }
    }

    fn decided(
        response: Result<Option<Advice>, String>,
        settings: &Settings,
        past: &[PastFailure],
    ) -> (Choice, Option<PolicyProblem>) {
        let verdict = kill();
        let case = Case {
            verdict: &verdict,
            past,
            earlier: &[],
            job: JobState {
                exit: 137,
                lived: Span::seconds(60),
                reached: None,
                committed: None,
                ranks: 1,
                waiting: 0,
            },
            host: Host::default(),
            seen: None,
            spares: 0,
            now: Mono(100_000_000_000),
        };
        decide_with(Some(PolicyAnswer { policy: "mine.py", advice: response }), settings, case)
    }

    fn advice(rung: Rung) -> Result<Option<Advice>, String> {
        Ok(Some(Advice { rung: Some(rung), after: Span::seconds(2), why: "so".into() }))
    }

    #[test]
    fn its_advice_is_carried_out_and_the_built_in_policy_decides_the_rest() {
        let settings = Settings::from(Budget { max_restarts: 3, window: None });
        let (choice, problem) = decided(advice(Rung::HandBack), &settings, &[]);
        assert_eq!((choice.action, choice.after), (Action::HandBack { exit: 75 }, Span::seconds(2)));
        assert_eq!((choice.why.as_str(), problem), ("so (mine.py)", None));
        let (choice, problem) = decided(Ok(None), &settings, &[]);
        assert_eq!((choice.action.rung(), problem), (Some(Rung::All), None));
        let (choice, problem) = decided(Err("mine.py:3: no".into()), &settings, &[]);
        assert_eq!(choice.action.rung(), Some(Rung::All));
        assert_eq!(problem, Some(PolicyProblem::Failed("mine.py:3: no".into())));
    }

    #[test]
    fn forbidden_advice_is_not_carried_out_and_the_reason_is_given() {
        let none = Settings::from(Budget { max_restarts: 0, window: None });
        let (choice, problem) = decided(advice(Rung::All), &none, &[]);
        assert_eq!(choice.action, Action::Stop { exit: 137 });
        let problem = problem.expect("it was overruled");
        testing::snapshot!(
            "reasons",
            "user: forbidden advice is not carried out and the reason is given",
            problem.message()
        );
    }

    #[test]
    fn a_dry_run_reports_what_it_would_do() {
        let dry = Settings { dry_run: true, ..Settings::from(Budget { max_restarts: 3, window: None }) };
        let (choice, _) = decided(advice(Rung::All), &dry, &[]);
        testing::snapshot!("reasons", "user: a dry run reports what it would do", choice.why);
    }
}
