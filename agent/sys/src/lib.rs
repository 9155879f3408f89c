//! Safe wrappers of Linux: clock, pidfd, inotify, cgroups, processes, mappings. Contains nearly all unsafe
//! code of the agent.

pub mod affinity;
pub mod apart;
pub mod c_library;
pub mod calls;
pub mod cgroup;
pub mod child;
pub mod clock;
pub mod foreign_files;
pub mod guarded;
pub mod handover;
pub mod http;
pub mod inotify;
pub mod lifeline;
pub mod limits;
pub mod mapping;
pub mod memory;
pub mod numa;
pub mod peer_groups;
pub mod pidfd;
pub mod priority;
pub mod private_directory;
pub mod processes;
pub mod readable;
pub mod sparse;
pub mod spawn;
pub mod stdout;
pub mod timed_files;
pub mod users;
