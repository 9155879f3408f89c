//! The core's judges on simulated jobs.
//!
//! One executable for all of them: each module is a subject.

mod hang;
mod robust;
mod shapes;
mod slow;
mod traces;
mod weather;
