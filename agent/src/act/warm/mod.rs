//! Warm starts: ranks forked from a process that holds their imports already, instead of importing them again.

mod python;
mod template;

pub use python::{NoTemplate, PythonProgram};
pub use template::{Module, News, RankOrders, Template, TemplatePlan};
