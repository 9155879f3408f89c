//! The agent.
pub fn run_agent() {}
