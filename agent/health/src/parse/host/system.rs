//! Processes and the kernel itself: OOM kills, hangs, lockups, oopses, crashes, clocks.

use super::{about, between, contains_any, pid, starts_with_any};
use mainstay_model::kernel::{KernelClass, KernelReport};

use KernelClass::{ClockUnstable, HungTask, KernelBug, KernelStarted, Lockup, OutOfMemory, Segfault};

pub(super) fn report(message: &str) -> Option<KernelReport> {
    if message.starts_with("Linux version ") {
        return Some(about(KernelStarted, None));
    }
    const LINE_PARSERS: [fn(&str) -> Option<KernelReport>; 5] =
        [out_of_memory, stuck, kernel_bug, crash, unstable_clock];
    LINE_PARSERS.iter().find_map(|reader| reader(message))
}

/// `oom-kill:constraint=…,task_memcg=/job,task=python,pid=1,uid=0`, and `Out of memory: Killed process 1 (python)`, which comes before
/// or after it, or alone in older kernels.
fn out_of_memory(message: &str) -> Option<KernelReport> {
    if let Some(fields) = message.strip_prefix("oom-kill:") {
        // The task's name comes before its pid and may contain a comma.
        let process = between(fields, ",task=", ",pid=");
        let cgroup = between(fields, ",task_memcg=", ",task=");
        let pid = fields.rsplit_once(",pid=").and_then(|(_, rest)| pid(rest.split(',').next()?));
        return Some(KernelReport {
            pid,
            process: process.map(str::to_owned),
            cgroup: cgroup.map(str::to_owned),
            ..about(OutOfMemory, None)
        });
    }
    const BEGINNINGS: [&str; 3] =
        ["Out of memory: ", "Memory cgroup out of memory: ", "Out of memory (oom_kill_allocating_task): "];
    let killed = BEGINNINGS.iter().find_map(|beginning| message.strip_prefix(beginning))?;
    let killed = killed.strip_prefix("Killed process ").or_else(|| killed.strip_prefix("Kill process "))?;
    let (number, rest) = killed.split_once(" (")?;
    let process = rest.split_once(')').map(|(process, _)| process.to_owned());
    Some(KernelReport { pid: pid(number), process, ..about(OutOfMemory, None) })
}

/// `Task in /job/rank0 killed as a result of limit of /job`: precedes the kill's line in kernels before 5.0.
pub(in crate::parse) fn group_of_kill(message: &str) -> Option<&str> {
    let (group, _) = message.strip_prefix("Task in ")?.split_once(" killed as a result of limit of ")?;
    Some(group)
}

/// `INFO: task python:1 blocked for more than 120 seconds.` and
/// `watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:1]`.
fn stuck(message: &str) -> Option<KernelReport> {
    if let Some(task) = message.strip_prefix("INFO: task ") {
        let blocked = task
            .split_once(" blocked for more than ")
            .or_else(|| task.split_once(" blocked in I/O wait for more than "));
        let (process, number) = blocked?.0.rsplit_once(':')?;
        return Some(KernelReport {
            pid: pid(number),
            process: Some(process.to_owned()),
            ..about(HungTask, None)
        });
    }
    let text = message
        .strip_prefix("watchdog: ")
        .or_else(|| message.strip_prefix("NMI watchdog: "))
        .unwrap_or(message);
    let hard =
        starts_with_any(text, &["Watchdog", "CPU"]) && text.contains("Watchdog detected hard LOCKUP on cpu");
    const LOCKUPS: [&str; 3] =
        ["BUG: soft lockup", "BUG: workqueue lockup", "BUG: spinlock lockup suspected"];
    if hard || starts_with_any(text, &LOCKUPS) {
        let words = || text.split(|letter: char| letter.is_whitespace());
        let numbered = words().find(|word| word.to_ascii_lowercase().starts_with("cpu#")).map(str::to_owned);
        let cpu = numbered.or_else(|| {
            let mut rest = words().skip_while(|word| *word != "cpu");
            Some(format!("CPU#{}", rest.nth(1)?))
        });
        let who = text.rsplit_once('[').and_then(|(_, who)| who.trim_end_matches(']').rsplit_once(':'));
        return Some(KernelReport {
            pid: who.and_then(|(_, number)| pid(number)),
            process: who.map(|(process, _)| process.to_owned()),
            ..about(Lockup, cpu.as_deref())
        });
    }
    let rcu = starts_with_any(text, &["rcu: INFO: rcu", "INFO: rcu"]);
    let stalled =
        rcu && contains_any(text, &["detected stall", "detected expedited stall", "self-detected stall"]);
    stalled.then(|| about(Lockup, None))
}

fn kernel_bug(message: &str) -> Option<KernelReport> {
    const BEGINNINGS: [&str; 24] = [
        "Internal error: synchronous external abort",
        "BUG: stack guard page was hit",
        "BUG: TASK stack guard page was hit",
        "BUG: unable to handle ",
        "BUG: kernel NULL pointer dereference",
        "BUG: Bad page ",
        "BUG: scheduling while atomic",
        "BUG: KASAN: ",
        "BUG: KFENCE: ",
        "kernel BUG at ",
        "Oops: ",
        "Internal error: Oops",
        "Unable to handle kernel ",
        "general protection fault: ",
        "general protection fault, ",
        "invalid opcode: ",
        "divide error: ",
        "double fault: ",
        "stack segment: ",
        "traps: PANIC: ",
        "PANIC: double fault",
        "list_del corruption",
        "list_add corruption",
        "Kernel panic - not syncing",
    ];
    starts_with_any(message, &BEGINNINGS).then(|| about(KernelBug, None))
}

/// `python[1]: segfault at 0 ip … in libtorch.so[…]`, `traps: python[1] general protection fault ip:… in …`,
/// `traps: python[1] trap invalid opcode ip:…`.
fn crash(message: &str) -> Option<KernelReport> {
    let text = message.strip_prefix("traps: ").unwrap_or(message);
    // A process name has at most 15 characters of up to four bytes.
    if memchr::memchr(b'[', text.as_bytes()).is_none_or(|place| place > 60) {
        return None;
    }
    let (who, rest) = text
        .split_once("]: segfault at ")
        .or_else(|| text.split_once("] general protection fault ip:"))
        .or_else(|| text.split_once("] trap "))?;
    let (process, number) = who.rsplit_once('[')?;
    // A process name has at most 15 characters; anything longer is another message.
    if process.chars().count() > 15 || process.contains(": ") {
        return None;
    }
    let library = rest.rsplit_once(" in ").map(|(_, library)| library.split('[').next().unwrap_or(library));
    Some(KernelReport { pid: pid(number), process: Some(process.to_owned()), ..about(Segfault, library) })
}

/// `clocksource: timekeeping watchdog on CPU3: Marking clocksource 'tsc' as unstable because the skew is too large:`. A clock that
/// halts in idle is found at boot and does no harm.
fn unstable_clock(message: &str) -> Option<KernelReport> {
    let by_watchdog = (message.starts_with("clocksource: ") && message.contains("as unstable because"))
        || message.starts_with("tsc: Marking TSC unstable due to clocksource watchdog")
        || (message.starts_with("Clocksource ") && message.contains(" unstable (delta"));
    let clock = between(message, "clocksource '", "'").unwrap_or("tsc");
    by_watchdog.then(|| about(ClockUnstable, Some(clock)))
}
