//! The program `mainstay`.

fn main() -> std::process::ExitCode {
    mainstay_agent::cli::main()
}
