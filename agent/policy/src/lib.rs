//! Policies in Starlark: a file of the user decides the action for a failure. Pure, like the core: a policy reads
//! only the case, and one that does not end or uses too much memory is stopped with an error at its line.
//!
//! `docs/reference/policy-file.md` is the reference. [`DEFAULT`] is the built-in policy as such a file; a test
//! compares it with `mainstay_recovery::policy::decide`.
//!
//! The language is our own subset of Starlark and not the `starlark` crate: `docs/internals/dependencies.md`.

mod case_value;
mod fields;
pub mod incidents;
mod language;
mod words;

use mainstay_recovery::policy::{Advice, Advisor, Case, Settings};

pub use fields::{FIELDS, Field};
pub use language::{Branch, Fault, Limits, Place};

use case_value::value_of;
use fields::FORMER_FIELDS;
use language::{Module, Run, Value, fields_read, parse};
use words::Words;

/// The built-in policy as a file, with comments, as a template.
pub const DEFAULT: &str = include_str!("../default.star");

/// The limits of one decision. The default policy takes about 3,000 steps for a job that failed ten times.
pub const LIMITS: Limits = Limits { steps: 500_000, bytes: 16 << 20 };

/// The limit of steps and of bytes for the case itself.
const ROOM_FOR_THE_CASE: u64 = 64 << 20;

/// A parsed policy.
#[derive(Debug)]
pub struct Policy {
    name: String,
    module: Module,
    warnings: Vec<Problem>,
}

/// An error in a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file.
    pub name: String,
    /// The place and the error.
    pub fault: Fault,
}

impl std::fmt::Display for Problem {
    /// `mine.star:3:5: there is no verdct`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Place { line, column } = self.fault.place;
        match line {
            0 => write!(f, "{}: {}", self.name, self.fault.what),
            _ => write!(f, "{}:{line}:{column}: {}", self.name, self.fault.what),
        }
    }
}

impl std::error::Error for Problem {}

/// The decision of a policy on a case, and how it was reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    /// The advice; none to leave the failure to the built-in policy.
    pub advice: Option<Advice>,
    /// The place of the `return`.
    pub place: Place,
    /// The evaluated conditions, in order.
    pub branches: Vec<Branch>,
    /// Steps that were used.
    pub steps: u64,
    /// Memory that was used, in bytes.
    pub bytes: u64,
}

impl Policy {
    /// Parses a policy and evaluates its constants, so that only the decision is left for later.
    ///
    /// # Errors
    /// A syntax error, an error in a constant, or there is no `decide(case)`.
    pub fn parse(name: &str, text: &str) -> Result<Policy, Problem> {
        let problem = |fault| Problem { name: name.to_owned(), fault };
        let module = parse(text).map_err(problem)?;
        let words = Words { seed: 0 };
        let mut run = Run::new(LIMITS, &|| false, &words);
        run.load(&module).map_err(problem)?;
        let takes = run.function("decide").and_then(|value| match value {
            Value::Function(function) => Some((function.parameters.len(), function.place)),
            _ => None,
        });
        match takes {
            Some((1, _)) => {
                let former = fields_read(text).map_err(problem)?.into_iter().filter_map(former_name);
                let warnings = former.map(problem).collect();
                Ok(Policy { name: name.to_owned(), module, warnings })
            }
            Some((count, place)) => Err(problem(Fault::at(
                place,
                format!("decide takes one argument, the case, and not {count}"),
            ))),
            None => Err(problem(Fault::at(
                Place::default(),
                "there is no function decide(case), which is called for each failure",
            ))),
        }
    }

    /// The name of the policy.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What still works and will not in a later version, such as former names of fields.
    pub fn warnings(&self) -> &[Problem] {
        &self.warnings
    }

    /// Decides a case. Ends within [`LIMITS`], and as soon as `out_of_time` returns true.
    ///
    /// # Errors
    /// The policy fails, exceeds a limit, or returns something other than a decision.
    pub fn decide(
        &self,
        settings: &Settings,
        case: Case<'_>,
        out_of_time: &dyn Fn() -> bool,
    ) -> Result<Decided, Problem> {
        self.run(settings, case, out_of_time).map_err(|fault| Problem { name: self.name.clone(), fault })
    }

    fn run(
        &self,
        settings: &Settings,
        case: Case<'_>,
        out_of_time: &dyn Fn() -> bool,
    ) -> Result<Decided, Fault> {
        let words = Words { seed: settings.seed };
        let mut run = Run::new(LIMITS, out_of_time, &words);
        run.load(&self.module)?;
        let (steps, bytes) = (run.heap.steps_left, run.heap.bytes_left);
        // The case does not count towards the limits of the policy.
        (run.heap.steps_left, run.heap.bytes_left) = (ROOM_FOR_THE_CASE, ROOM_FOR_THE_CASE);
        let nowhere = |what| Fault::at(Place::default(), what);
        let case = value_of(&mut run.heap, settings, case).map_err(nowhere)?;
        (run.heap.steps_left, run.heap.bytes_left) = (steps, bytes);
        run.freeze();
        let Some(decide) = run.function("decide").cloned() else {
            return Err(nowhere("there is no decide".into()));
        };
        let (value, place) = run.call_function(&decide, vec![case])?;
        let advice = words::advice(&mut run.heap, &value).map_err(|what| Fault::at(place, what))?;
        Ok(Decided {
            advice,
            place,
            steps: LIMITS.steps - run.heap.steps_left,
            bytes: LIMITS.bytes - run.heap.bytes_left,
            branches: run.branches,
        })
    }
}

/// A warning if a field is read by its former name.
fn former_name((name, place): (String, Place)) -> Option<Fault> {
    let (former, now) = FORMER_FIELDS.iter().find(|(former, _)| *former == name)?;
    Some(Fault::at(place, format!("`{former}` is now called `{now}`: the former name works until 0.2.0")))
}

/// Limited only by steps and memory, so that the same case is decided the same on every host.
impl Advisor for Policy {
    fn name(&self) -> &str {
        &self.name
    }

    fn advise(&self, settings: &Settings, case: Case<'_>) -> Result<Option<Advice>, String> {
        self.decide(settings, case, &|| false)
            .map(|decided| decided.advice)
            .map_err(|problem| problem.to_string())
    }
}
