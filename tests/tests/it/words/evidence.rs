//! Lines of a verdict's evidence, reasons of decisions, and details of facts in the journal.

/// The device that an XID names.
pub const OFF_THE_BUS: &str = "fallen off the bus";
/// A failure that comes back at the same data.
pub const SAME_DATA: &str = "where the same data was read";
/// No heartbeats say more.
pub const NO_HEARTBEATS: &str = "sends no heartbeats";
/// The client does not trust its page.
pub const REFUSED_PAGE: &str = "refused its page";
/// Another host may tell whether the host or the program is at fault.
pub const ANOTHER_HOST_TELLS: &str = "another host shows whether this host or the program is at fault";
/// How a host was lost: without power or network.
pub const NOT_REACHED: &str = "cannot reach it either";
/// The same: its kernel answers, no process does.
pub const NO_ANSWER: &str = "can connect to it and get no answer";
/// The same: its launcher was ended.
pub const LAUNCHER_GONE: &str = "find that its launcher is gone";
/// The same failure, once more.
pub const RECURRED: &str = "the same exception recurred";
/// A program with a plain error.
pub const FAILS_BY_ITSELF: &str = "the program fails by itself before its first step";

/// The restarts are used up.
pub fn budget_used_up(restarts: u32) -> String {
    format!("the budget of {restarts} restart(s) is used up")
}

/// Ranks that wait for another one, by a source.
pub fn wait_for_rank(source: &str, rank: u32) -> String {
    format!("by {source} 3 of 3 waiting ranks wait for rank {rank}")
}

/// Where a rank ran.
pub fn ran_on(rank: u32, host: &str, node_rank: u32) -> String {
    format!("rank {rank} ran on host {host} (node rank {node_rank})")
}
