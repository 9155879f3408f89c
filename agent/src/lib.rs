//! The Mainstay agent and launcher. One program, `mainstay`; `docs/architecture.md` is the map.
//!
//! Modules are in the order of their floors, lowest first: a floor uses only those below it.

pub mod hosts;
pub mod http;
pub mod os;

pub mod act;
pub mod launcher_link;
pub mod probe;
pub mod source;
pub mod store;

pub mod launch;
pub mod node;
pub mod state;

pub mod api;

pub mod app;
pub mod config;

pub mod cli;
