//! Actions: starts, watches and stops processes, and keeps their output.

mod child;
pub mod devices;
pub mod doubtful_checkpoints;
pub mod environment;
pub mod growth;
pub mod guardian;
pub mod hook;
pub mod log_files;
pub mod output;
pub mod page_files;
pub mod policy;
pub mod port;
pub mod rank_processes;
pub mod rank_spec;
pub mod reset;
pub mod round_server;
pub mod segment_file;
pub mod simulated_gpu;
pub mod stop;
pub mod warm;
