//! The judge of stragglers: finds what makes a synchronous job slow.
//!
//! Ranks that synchronize in each step all take the same time for it, so a step's length does not distinguish them.
//! Their **self time** does: a step without the time in which the rank waited for others ([`section`]). In each step
//! it is compared with the median of the rank's peers ([`peers`], [`score`]), and x = ln(self time / peers') is kept
//! for a while ([`history`]).
//!
//! - A **rank** is slow when the sum of its scores over 8 to 512 steps is off by 6.7 standard deviations, exceeds the
//!   permanent differences between its peers, and was so in nearly all of these steps ([`ranks`]). With a noise of 1
//!   %, a slowdown of 5 % is found after 8 steps.
//! - All ranks of a **host** slow: it is the host.
//! - A **stage** is slow when its median is more than 10 % above the other stages', and its ranks agree ([`stages`]).
//! - Slow ranks that **rotate**: the work is uneven ([`rotating`]).
//!
//! The **cost** is the difference between the last steps as they were and as they would have been ([`paces`]).
//!
//! Waiting is additional evidence: a slow rank waits least. `docs/reference/stragglers.md` has the rules with
//! figures.

mod autocorrelation;
mod change;
mod columns;
mod history;
mod judge;
pub mod learn;
mod link;
mod measurements;
mod paces;
mod peers;
mod ranks;
mod regime;
mod repeated_steps;
mod rotating;
mod score;
mod section;
mod sentences;
mod slowness;
mod stages;
mod times;
mod trace;

pub use change::ChangePoint;
pub use columns::{Columns, TraceError};
pub use judge::Judge;
pub use link::Links;
pub use measurements::{Limits, Row};
pub use peers::{Peers, Role};
pub use score::{median, spread_around_median};
pub use section::SectionKind;
pub use sentences::{Names, OpenFindings};
pub use slowness::{Change, Slow, Straggler};
pub use trace::{Report, Trace, TraceSpan};
