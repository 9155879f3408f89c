//! Resets a GPU with NVIDIA's own program: NVML has no call for it.
//!
//! The program runs once, as a child with a time limit, and is killed with all that it started. One that hangs in the
//! driver may survive that. It is then left alone, and nothing waits for it.

use std::collections::BTreeSet;
use std::io::{self, PipeReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use mainstay_health::hardware::gpu::reset::{Holder, ResetError};
use mainstay_model::id::Pid;
use mainstay_model::pci::PciAddress;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use mainstay_sys::child::{ended, kill_group};

/// How long a killed program may take to exit.
const GONE_WITHIN: Duration = Duration::from_secs(1);

/// At most this many bytes of the program's output are kept.
const LONGEST_WORDS: usize = 512;

/// The kernel keeps this many bytes of a process's name.
const NAME: usize = 15;

/// How GPUs are reset.
#[derive(Clone, Debug)]
pub struct ResetPlan {
    /// `nvidia-smi`, or a replacement.
    pub program: PathBuf,
    /// How long it may take.
    pub deadline: Duration,
    /// Where procfs is.
    pub proc: PathBuf,
    /// Programs that may have the GPU open, by the names of their processes.
    pub may_stay: Vec<String>,
}

/// The processes that have the GPU's device file open. The driver reports the number of the file
/// (`/proc/driver/nvidia/gpus`). If it does not, all processes that have any GPU open count.
///
/// # Errors
/// Not all processes can be read; as a message.
pub fn holders(plan: &ResetPlan, address: PciAddress) -> Result<Vec<Holder>, String> {
    let file = device_file(&plan.proc, address);
    let is_it = |path: &str| match &file {
        Some(file) => path == file,
        None => path
            .strip_prefix("/dev/nvidia")
            .is_some_and(|rest| rest.starts_with(|of: char| of.is_ascii_digit())),
    };
    let mut holders = Vec::new();
    let processes =
        std::fs::read_dir(&plan.proc).map_err(|error| format!("reading {}: {error}", plan.proc.display()))?;
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()).map(Pid) else {
            continue;
        };
        let open = open_files(&process.path()).map_err(|error| {
            format!("the open files of process {} cannot be read ({error}); is the agent root?", pid.0)
        })?;
        if let Some(file) = open.into_iter().find(|path| is_it(path)) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            let name = name.trim_end().to_owned();
            if !plan.may_stay.iter().any(|allowed| cut(allowed, NAME) == name) {
                holders.push(Holder { pid, name, file });
            }
        }
    }
    Ok(holders)
}

/// `/dev/nvidia3`, from what the kernel driver reports about the GPU.
fn device_file(proc: &Path, address: PciAddress) -> Option<String> {
    let gpus = std::fs::read_dir(proc.join("driver/nvidia/gpus")).ok()?;
    let mut of_address =
        gpus.flatten().filter(|gpu| gpu.file_name().to_str().and_then(PciAddress::parse) == Some(address));
    let reported = std::fs::read_to_string(of_address.next()?.path().join("information")).ok()?;
    let minor = reported.lines().find_map(|line| line.strip_prefix("Device Minor:"))?;
    Some(format!("/dev/nvidia{}", minor.trim().parse::<u32>().ok()?))
}

/// The files that a process has open; empty for one that has ended meanwhile.
fn open_files(process: &Path) -> io::Result<BTreeSet<String>> {
    let entries = match std::fs::read_dir(process.join("fd")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        // It ended between the two reads.
        Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => return Ok(BTreeSet::new()),
        Err(error) => return Err(error),
    };
    let paths = entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    Ok(paths.map(|path| path.display().to_string()).collect())
}

/// Resets the GPU, and returns when that is done.
///
/// # Errors
/// The program cannot be started, does not end in time, or reports a failure.
pub fn reset(plan: &ResetPlan, uuid: &str) -> Result<(), ResetError> {
    let name = plan.program.display();
    let failed = |why: String| ResetError::Program(why);
    let (mut output, saying) = io::pipe().map_err(|error| failed(format!("a pipe for {name}: {error}")))?;
    let also = saying.try_clone().map_err(|error| failed(format!("a pipe for {name}: {error}")))?;
    let mut command = Command::new(&plan.program);
    command.args(["--gpu-reset", "-i", uuid]).env("LC_ALL", "C").process_group(0);
    command.stdin(Stdio::null()).stdout(saying).stderr(also);
    let started = command.spawn();
    // It has our write ends of the pipe.
    drop(command);
    let mut child = started.map_err(|error| failed(format!("{name} cannot be started: {error}")))?;
    match ended(&mut child, plan.deadline) {
        Ok(Some(status)) if status.success() => Ok(()),
        Ok(Some(status)) => {
            Err(failed(format!("{name} failed ({status}): {}", in_a_line(&read_what_is_there(&mut output)))))
        }
        Ok(None) | Err(_) => {
            kill_group(&child);
            let gone = matches!(ended(&mut child, GONE_WITHIN), Ok(Some(_)));
            let left = if gone { "and was killed" } else { "and cannot be killed: it hangs in the driver" };
            Err(failed(format!("{name} took longer than {} s {left}", plan.deadline.as_secs_f64())))
        }
    }
}

/// What the program has written so far; its descendants may still hold the other end.
fn read_what_is_there(output: &mut PipeReader) -> String {
    let mut buffer = [0; 4096];
    let at_once = fcntl(&*output, FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
    let length = at_once.ok().and_then(|_| output.read(&mut buffer).ok()).unwrap_or(0);
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

fn in_a_line(words: &str) -> String {
    let line = words.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.is_empty() { "it said nothing".to_owned() } else { cut(&line, LONGEST_WORDS).to_owned() }
}

/// At most `most` bytes of a text, without a partial character.
fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn plan(proc: &Path) -> ResetPlan {
        let may_stay = vec!["nvidia-persistenced".to_owned()];
        ResetPlan {
            program: "true".into(),
            deadline: Duration::from_secs(60),
            proc: proc.to_owned(),
            may_stay,
        }
    }

    fn process(proc: &Path, pid: i32, name: &str, files: &[&str]) {
        let fd = proc.join(pid.to_string()).join("fd");
        fs::create_dir_all(&fd).expect("a directory");
        fs::write(proc.join(pid.to_string()).join("comm"), format!("{name}\n")).expect("a file");
        for (number, file) in files.iter().enumerate() {
            symlink(file, fd.join(number.to_string())).expect("a link");
        }
    }

    fn gpu(proc: &Path, address: &str, minor: u32) {
        let directory = proc.join("driver/nvidia/gpus").join(address);
        fs::create_dir_all(&directory).expect("a directory");
        let text = format!("Model: \t H100\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n");
        fs::write(directory.join("information"), text).expect("a file");
    }

    #[test]
    fn processes_with_this_gpu_open_hold_it_unless_they_may_stay() {
        let proc = testing::tempdir().expect("a directory");
        let address = PciAddress::parse("0000:01:00").expect("an address");
        process(proc.path(), 7, "python", &["/dev/null", "/dev/nvidia1", "/dev/nvidiactl"]);
        process(proc.path(), 8, "nvidia-persiste", &["/dev/nvidia3"]);
        process(proc.path(), 9, "dcgm", &["/dev/nvidia10"]);
        // The driver does not report the numbers: each file counts.
        let pids = |plan: &ResetPlan| -> Vec<i32> {
            let mut pids: Vec<i32> =
                holders(plan, address).expect("readable").iter().map(|holder| holder.pid.0).collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(pids(&plan(proc.path())), [7, 9]);
        gpu(proc.path(), "0000:01:00.0", 3);
        gpu(proc.path(), "0000:02:00.0", 1);
        assert!(pids(&plan(proc.path())).is_empty());
        gpu(proc.path(), "0000:01:00.0", 1);
        let found = holders(&plan(proc.path()), address).expect("readable");
        assert_eq!(found, [Holder { pid: Pid(7), name: "python".into(), file: "/dev/nvidia1".into() }]);
    }

    #[test]
    fn a_procfs_that_cannot_be_read_is_an_error() {
        let address = PciAddress::parse("0000:01:00").expect("an address");
        assert!(holders(&plan(Path::new("/nonexistent")), address).is_err());
    }

    #[test]
    fn the_error_has_the_output_of_the_program() {
        let directory = testing::tempdir().expect("a directory");
        // Written by a child: a program that one of our own processes has open for writing cannot be executed.
        let script = |name: &str, text: &str| {
            let path = directory.path().join(name);
            let write = "printf '%s' \"$1\" > \"$2\" && chmod +x \"$2\"";
            let mut shell = Command::new("/bin/sh");
            let written = shell.args(["-c", write, "sh", text]).arg(&path).status().expect("a shell");
            assert!(written.success());
            path
        };
        let with =
            |program, deadline| reset(&ResetPlan { program, deadline, ..plan(directory.path()) }, "GPU-1");
        let long = Duration::from_secs(60);
        assert_eq!(with("true".into(), long), Ok(()));
        let reported =
            with(script("fails", "#!/bin/sh\necho \"$@: in use\nby another client\" >&2\nexit 3\n"), long);
        let reported = reported.expect_err("it fails").to_string();
        assert!(reported.ends_with("--gpu-reset -i GPU-1: in use by another client"), "{reported}");
        let reported = with("/nonexistent/nvidia-smi".into(), long).expect_err("there is none").to_string();
        testing::snapshot!("app", "a reset without its program", reported);
        // It never ends by itself; what it starts is killed too.
        let reported =
            with(script("hangs", "#!/bin/sh\nsleep 1000 &\nsleep 1000\n"), Duration::from_millis(100));
        let reported = reported.expect_err("it hangs").to_string();
        assert!(reported.contains("0.1 s"), "{reported}");
    }
}
