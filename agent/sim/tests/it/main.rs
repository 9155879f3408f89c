//! The judges of the core on simulated jobs.
//!
//! One executable for all tests, with one module per subject.

mod hang;
mod robust;
mod shapes;
mod slow;
mod traces;
mod weather;
