//! Floor 1. Linux, safely: clock, pidfd, inotify, cgroups, processes, mappings. Nearly all the unsafe of the agent.

pub mod affinity;
pub mod calls;
pub mod cgroup;
pub mod clock;
pub mod handover;
pub mod inotify;
pub mod lifeline;
pub mod limits;
pub mod mapping;
pub mod memory;
pub mod numa;
pub mod patient;
pub mod peer_groups;
pub mod pidfd;
pub mod priority;
pub mod processes;
pub mod readable;
pub mod spawn;
pub mod stdout;
