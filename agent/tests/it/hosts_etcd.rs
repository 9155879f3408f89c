//! A launcher whose etcd cannot run.

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn an_etcd_that_ends_is_reported_with_its_last_line() {
    let directory = testing::tempdir().unwrap();
    let directory = directory.path();
    testing::executable(
        &directory.join("etcd"),
        "#!/bin/sh\necho 'failed to create WAL: no space left' >&2; exit 1",
    );
    let endpoints: Vec<String> = (0..3).map(|_| format!("127.0.0.1:{}", testing::free_port())).collect();
    let path = format!("{}:{}", directory.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
    command.args(["run", "--no-agent", "--nnodes", "3", "--node-rank", "0", "--rdzv-id", "etcd-that-ends"]);
    command.args(["--rdzv-endpoint", &endpoints.join(",")]).args(["--no-python", "--log-dir"]);
    command.arg(directory.join("logs")).arg("--runtime-dir").arg(directory.join("runtime"));
    let printed = directory.join("said");
    command.args(["/bin/true"]).env("PATH", path).current_dir(directory).stdin(Stdio::null());
    let said = File::create(&printed).unwrap();
    let mut launcher = command.stdout(Stdio::null()).stderr(said).spawn().unwrap();
    let said = || fs::read_to_string(&printed).unwrap();
    while !said().contains("no space left") {
        assert_eq!(launcher.try_wait().unwrap(), None, "{}", said());
        std::thread::sleep(Duration::from_millis(20));
    }
    launcher.kill().unwrap();
    launcher.wait().unwrap();
}
