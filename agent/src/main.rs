//! The `mainstay` program; `mainstay_agent::cli` tells what it can do.

use std::process::ExitCode;

fn main() -> ExitCode {
    mainstay_agent::cli::main()
}
