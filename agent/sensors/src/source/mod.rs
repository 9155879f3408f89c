//! Sources: readings of the outside world become facts.

pub mod active;
pub mod activity;
pub mod cloud;
pub mod dcgm;
pub mod device;
pub mod error_file;
pub mod evidence;
pub mod fabric;
pub mod host;
pub mod journald;
pub mod kernel_log;
pub mod kmsg;
pub mod nccl_ras;
pub mod nvrx;
pub mod oom;
pub mod output_lines;
pub mod pages;
pub mod process_limit;
pub mod program;
pub mod request_child;
pub mod slurm;
pub mod tpu;
pub mod trainer;
