//! The `mainstay` program; `mainstay_agent::cli` has its commands.

use std::process::ExitCode;

fn main() -> ExitCode {
    mainstay_agent::cli::main()
}
