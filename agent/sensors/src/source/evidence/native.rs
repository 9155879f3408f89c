//! A process as the kernel sees it: its threads, what they wait for, its children.

use std::fs;
use std::path::Path;

use mainstay_model::id::Pid;
use serde_json::{Value, json};

use mainstay_sys::{calls, processes};

/// At most this many threads are reported: later ones are not the cause of a hang.
const MAX_THREADS: usize = 128;

/// A process.
pub(super) struct Native {
    command: String,
    main: Thread,
    threads: Vec<Thread>,
    children: Vec<(i32, String)>,
}

#[derive(Default)]
struct Thread {
    id: String,
    name: String,
    state: String,
    channel: String,
    call: String,
    stack: String,
}

/// Reads a process; none if it is gone.
pub(super) fn look(pid: Pid) -> Option<Native> {
    let directory = format!("/proc/{}", pid.0);
    let directory = Path::new(&directory);
    let command = fs::read(directory.join("cmdline")).ok()?;
    let command = String::from_utf8_lossy(&command).replace('\0', " ").trim().to_owned();
    let tasks = fs::read_dir(directory.join("task")).ok()?;
    let mut threads: Vec<Thread> =
        tasks.flatten().take(MAX_THREADS).map(|task| thread(&task.path())).collect();
    let own = pid.0.to_string();
    let main = threads.iter().position(|thread| thread.id == own)?;
    let main = threads.swap_remove(main);
    let children = processes::descendants(pid).into_iter().take(MAX_THREADS);
    let children = children.map(|child| (child.0, processes::waits_in(child))).collect();
    Some(Native { command, main, threads, children })
}

fn thread(task: &Path) -> Thread {
    let read = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default().trim().to_owned();
    let stat = read("stat");
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').next()).unwrap_or("?").to_owned();
    Thread {
        id: task.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        name: read("comm"),
        state,
        channel: read("wchan"),
        // The system call's number first; "running" if it is in none.
        call: read("syscall"),
        // Only root may read it.
        stack: read("stack"),
    }
}

impl Native {
    /// The place of the main thread.
    pub(super) fn place(&self) -> String {
        let what = match self.main.state.as_str() {
            "T" => "stopped",
            "t" => "held by a debugger",
            "D" => "uninterruptible sleep",
            "R" => "running",
            "Z" => "ended",
            _ => "sleeping",
        };
        match self.main.channel.as_str() {
            "" | "0" => format!("no known place ({what})"),
            channel => format!("{channel} of the kernel ({what})"),
        }
    }

    pub(super) fn as_json(&self) -> Value {
        json!({
            "command": self.command,
            "main": self.main.as_json(),
            "threads": self.threads.iter().map(Thread::as_json).collect::<Vec<Value>>(),
            "children": self.children.iter().map(|(pid, waits)| json!({ "pid": pid, "waits_in": waits })).collect::<Vec<Value>>(),
        })
    }
}

impl Thread {
    fn as_json(&self) -> Value {
        json!({
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "wait_channel": self.channel,
            "system_call": self.call,
            "system_call_name": calls::name(&self.call),
            "kernel_stack": self.stack,
        })
    }
}
