//! Warm starts: ranks are forked from a process that already holds their imports.

mod python;
mod template;

pub use python::{NoTemplate, PythonProgram, interpreter_of};
pub use template::{Module, RankOrders, Template, TemplateEvent, TemplatePlan};
