//! The launcher: the loop of one job ([`run`]), and its parts.

pub mod agent_link;
mod begin;
pub mod checkpoints;
pub mod drill;
pub mod group;
pub mod hang;
mod journal;
pub mod log_files;
pub mod log_mirror;
mod obey;
pub mod order;
pub mod output;
mod pages;
pub mod paths;
pub mod policy;
pub mod ranks;
pub mod roles;
mod run;
pub mod settings;
mod signatures;

pub use begin::JobResources;
pub use run::{JobEnd, Launcher, Outside};
pub use settings::Settings;
