//! The launcher: `launch` is the loop of one job, `act` starts and stops processes, `launcher_link` is the wire to the agent,
//! `hosts` are the streams between the launchers of one job.

pub mod act;
pub mod hosts;
pub mod launch;
pub mod launcher_link;
