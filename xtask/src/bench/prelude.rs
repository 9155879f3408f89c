//! What most benches use.

pub(super) use std::path::{Path, PathBuf};
pub(super) use std::process::Command;
pub(super) use std::time::{Duration, Instant};

pub(super) use anyhow::{Context, Result, ensure};
pub(super) use fs_err as fs;
pub(super) use mainstay_model::entry::{Body, Entry, Fact};
pub(super) use nix::sys::signal::Signal;

pub(super) use super::Bench;
pub(super) use super::events::{Events, Fault, Moment, Restart};
pub(super) use super::figure::{Comparison, Figure, Of};
pub(super) use super::launchers::{Bed, Launcher, NVRX_NAME, script_path};
pub(super) use super::process::{self, Running, family, free_port, is_over, stat, strike};
pub(super) use super::stop::leftover_free;
pub(super) use crate::command::{self, cmd};
pub(super) use crate::journal::{self, Follower, Lines, observed};
pub(super) use crate::{paths, python};
