//! The `mainstay` program; the crate `mainstay-cli` has its commands.

use std::process::ExitCode;

fn main() -> ExitCode {
    mainstay_cli::main()
}
