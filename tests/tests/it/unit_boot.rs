//! The shipped unit on a host that systemd has booted, installed by the steps of `docs/howto/agent.md`.
//!
//! The host is a container of systemd-nspawn: systemd is its first process. Its root is this machine's, with all changes
//! in memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use mainstay_tests::{is_root, mainstay, processes, skipped};

/// The steps, and the page that has them.
const PAGE: &str = include_str!("../../../docs/howto/agent.md");

/// Commands of the page whose exit status is the health of the host, which is not what is tested here.
const REPORT_HEALTH: [&str; 2] = ["mainstay status", "mainstay doctor"];

/// Boots no service of this machine: `basic.target` needs none of them. `$GROUP` is for the container alone.
const BOOT: &str = r#"
echo $$ > "$GROUP/cgroup.procs"
mount --make-rprivate /
mount --bind / "$ROOT"
exec systemd-nspawn --directory "$ROOT" --volatile=overlay --register=no --keep-unit --private-network \
    --hostname=unit --link-journal=no --console=pipe --bind-ro="$PROGRAM:/src/target/release/mainstay" \
    --bind-ro="$UNIT:/src/systemd" --boot systemd.unit=basic.target
"#;

/// A booted host.
struct Machine {
    nspawn: Child,
    init: String,
    group: PathBuf,
    directory: testing::TempDir,
}

impl Machine {
    /// Boots one, or says why this machine cannot.
    fn boot() -> Result<Machine, String> {
        let groups = place_for_groups()?;
        let directory = testing::tempdir().expect("a directory");
        let name = directory.path().file_name().expect("its name").to_string_lossy().into_owned();
        let group = groups.join(format!("mainstay-test-unit{name}"));
        fs::create_dir(&group).map_err(|error| format!("control group {}: {error}", group.display()))?;
        let root = directory.path().join("root");
        fs::create_dir(&root).expect("a directory");
        let log = directory.path().join("console");
        let console = fs::File::create(&log).expect("a file");
        let mut boot = Command::new("unshare");
        boot.args(["--mount", "sh", "-ec", BOOT])
            .env("GROUP", &group)
            .env("ROOT", &root)
            .env("PROGRAM", mainstay())
            .env("UNIT", Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd"))
            // As on a current distribution: the name of the variable depends on the version.
            .env("UNIFIED_CGROUP_HIERARCHY", "1")
            .env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1")
            .stdin(Stdio::null())
            .stdout(console.try_clone().expect("a file"))
            .stderr(console);
        let nspawn = boot.spawn().expect("unshare");
        let mut machine = Machine { nspawn, init: String::new(), group, directory };
        processes::wait_until("systemd-nspawn has started its system, or has ended", || {
            machine.is_over() || machine.first_process().is_some()
        });
        let Some(init) = machine.first_process() else {
            let printed = fs::read_to_string(log).unwrap_or_default();
            return Err(format!("systemd-nspawn cannot boot here: {}", printed.trim()));
        };
        machine.init = init.to_string();
        processes::wait_until("systemd answers in the container", || {
            let state = machine.enter(&["systemctl", "is-system-running", "--wait"]);
            ["running", "degraded"].contains(&text(&state.stdout).trim())
        });
        Ok(machine)
    }

    fn is_over(&self) -> bool {
        processes::state(i32::try_from(self.nspawn.id()).expect("a pid")).is_none_or(|state| state == 'Z')
    }

    /// systemd in the container: a child of nspawn, in a namespace where it is process 1.
    fn first_process(&self) -> Option<i32> {
        let children = processes::children(i32::try_from(self.nspawn.id()).expect("a pid"));
        children.into_iter().find(|pid| {
            let program = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            program.trim() == "systemd"
        })
    }

    /// Runs a command in the container.
    fn enter(&self, command: &[&str]) -> Output {
        let mut entered = Command::new("nsenter");
        entered
            .args(["--target", &self.init, "--mount", "--uts", "--ipc", "--net", "--pid", "--root"])
            .args(["sh", "-c", "cd /src && exec \"$@\"", "sh"])
            .args(command)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        entered.output().expect("nsenter")
    }

    fn run(&self, command: &[&str]) -> String {
        let output = self.enter(command);
        assert!(output.status.success(), "{command:?}: {output:?}\n{}", self.journal());
        text(&output.stdout)
    }

    fn as_user(&self, user: &str, command: &[&str]) -> Output {
        let setpriv = ["setpriv", "--reuid", user, "--regid", user, "--init-groups"];
        self.enter(&[&setpriv[..], command].concat())
    }

    /// A property of the unit.
    fn property(&self, name: &str) -> String {
        self.run(&["systemctl", "show", "--value", "--property", name, "mainstay"]).trim().to_owned()
    }

    fn journal(&self) -> String {
        text(&self.enter(&["journalctl", "--no-pager", "--unit", "mainstay"]).stdout)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.directory.path().join("console")).unwrap_or_default());
        }
        // The end of process 1 ends all processes of the container, and then nspawn.
        match self.first_process() {
            Some(init) => drop(Command::new("kill").args(["-KILL", &init.to_string()]).status()),
            None => drop(self.nspawn.kill()),
        }
        let _ = self.nspawn.wait();
        // On a host with both versions, systemd-nspawn has a group of this name in version 1 too.
        let name = self.group.file_name().unwrap_or_default();
        let groups = [self.group.clone(), Path::new("/sys/fs/cgroup/systemd").join(name)];
        processes::wait_until("the control groups are gone", || {
            groups.iter().all(|group| remove_groups(group))
        });
    }
}

/// Where control groups of version 2 are, if this machine can boot a container at all.
fn place_for_groups() -> Result<PathBuf, String> {
    if !is_root() {
        return Err("a container with systemd needs root".to_owned());
    }
    let has = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    if !has("systemd-nspawn") || !Path::new("/lib/systemd/systemd").exists() {
        return Err("systemd-nspawn is needed: install systemd and systemd-container".to_owned());
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let of_version_2 = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let place = fields.next()?;
        (fields.next()? == "cgroup2").then(|| PathBuf::from(place))
    };
    mounts.lines().find_map(of_version_2).ok_or("there are no control groups of version 2".to_owned())
}

/// Removes the groups below this one and itself; whether they are gone. Processes that end keep theirs for a moment.
fn remove_groups(group: &Path) -> bool {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_groups(&entry.path());
        }
    }
    fs::remove_dir(group).is_ok() || !group.exists()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The commands in the page's `console` blocks, without comments.
fn steps() -> Vec<&'static str> {
    let commands = PAGE.lines().filter_map(|line| line.trim_start().strip_prefix("$ "));
    commands.map(|line| line.split("  # ").next().unwrap_or(line).trim_end()).collect()
}

#[test]
fn the_shipped_unit_starts_by_the_steps_of_its_page_and_serves_other_users() {
    let machine = match Machine::boot() {
        Ok(machine) => machine,
        Err(reason) => return skipped(&reason),
    };
    // What this machine has of an agent is not part of the test.
    machine.run(&["rm", "-rf", "/etc/mainstay", "/var/lib/mainstay"]);
    machine.run(&["sh", "-c", "id alice || useradd --no-create-home alice"]);
    let mut checked = String::new();
    for step in steps() {
        let output = machine.enter(&["sh", "-c", step]);
        let reports_health = REPORT_HEALTH.contains(&step);
        assert!(output.status.success() || reports_health, "{step}: {output:?}\n{}", machine.journal());
        if step == "mainstay config --check --as mainstay" {
            checked = text(&output.stdout);
        }
    }

    // The unit is active, which Type=notify means to be ready, at its first try and at the next boot too.
    assert_eq!(machine.property("ActiveState"), "active", "{}", machine.journal());
    assert_eq!(machine.property("NRestarts"), "0", "{}", machine.journal());
    assert_eq!(machine.property("UnitFileState"), "enabled");
    let user = machine.run(&["stat", "--format", "%U", &format!("/proc/{}", machine.property("MainPID"))]);
    assert_eq!(user.trim(), "mainstay");
    for path in ["/run/mainstay/agent.sock", "/var/lib/mainstay"] {
        machine.run(&["test", "-e", path]);
        assert!(checked.contains(path), "`config --check` names {path}: {checked}");
    }
    machine.run(&["sh", "-c", "test -n \"$(ls /var/lib/mainstay/journal)\""]);
    // Its log has priorities: 5 is a notice, and what a service prints has 6.
    let notices = ["journalctl", "--unit=mainstay", "--output=cat", "_TRANSPORT=journal", "PRIORITY=5"];
    processes::wait_until("the agent's log is in the journal", || !machine.run(&notices).is_empty());

    // A directory that the unit does not make.
    machine.run(&[
        "sh",
        "-c",
        "mkdir -m 700 /tmp/of-root; echo 'state_dir = \"/tmp/of-root\"' > /tmp/of-root.toml",
    ]);
    let check = ["mainstay", "config", "--check", "--as", "mainstay", "--config", "/tmp/of-root.toml"];
    let refused = machine.enter(&check);
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
    assert!(text(&refused.stderr).contains("state_dir: /tmp/of-root"), "{refused:?}");

    // Every user is answered.
    let status = ["mainstay", "status", "--json"];
    let answered = || {
        let output = machine.as_user("alice", &status);
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        answer.to_string().contains("\"mode\":\"AGENT\"").then_some(answer)
    };
    let answer = answered();
    assert!(answer.is_some(), "{:?}\n{}", machine.as_user("alice", &status), machine.journal());

    // In its /proc are the processes of all users, with what only their owner may read.
    machine.run(&["systemd-run", "--uid=alice", "--unit=of-alice", "sleep", "1000"]);
    let sleeping = machine.run(&["pgrep", "-u", "alice", "sleep"]);
    let as_agent = format!(
        "grep -q 'hidepid=\\(ptraceable\\|4\\)' /proc/self/mountinfo && exec setpriv --reuid mainstay --regid mainstay \
         --clear-groups --inh-caps -all,+sys_ptrace --ambient-caps +sys_ptrace cat /proc/{0}/wchan /proc/{0}/maps",
        sleeping.trim()
    );
    let agent = machine.property("MainPID");
    let seen = machine.run(&["nsenter", "--target", &agent, "--mount", "sh", "-c", &as_agent]);
    assert!(seen.contains("/sleep"), "{seen}");
    machine.run(&["systemctl", "stop", "of-alice"]);

    // Its threads may lower their priority, for the processor and for the disk.
    let lower = "sed -e 's/^Type=.*/Type=oneshot/' -e '/^Restart=/d' -e '/^WatchdogSec=/d' -e '/Directory/d' \
        -e 's|^ExecStart=.*|ExecStart=/usr/bin/ionice -c 3 /usr/bin/renice -n 5 --pgrp 0|' \
        systemd/mainstay.service > /run/systemd/system/lower.service && systemctl daemon-reload && \
        systemctl start lower";
    machine.run(&["sh", "-c", lower]);

    // The agent feeds the watchdog, and one that is stopped is replaced.
    let drop_in = "mkdir -p /run/systemd/system/mainstay.service.d && \
        printf '[Service]\\nWatchdogSec=5\\n' > /run/systemd/system/mainstay.service.d/soon.conf && \
        systemctl daemon-reload && systemctl restart mainstay";
    machine.run(&["sh", "-c", drop_in]);
    let first = machine.property("MainPID");
    let started = machine.property("WatchdogTimestampMonotonic");
    processes::wait_until("the watchdog is fed", || {
        machine.property("WatchdogTimestampMonotonic") != started
    });
    assert_eq!(machine.property("NRestarts"), "0", "{}", machine.journal());
    machine.run(&["systemctl", "kill", "--kill-whom=main", "--signal=STOP", "mainstay"]);
    processes::wait_until("the stopped agent is replaced", || {
        machine.property("MainPID") != first && machine.property("ActiveState") == "active"
    });
    assert_eq!(machine.property("NRestarts"), "1", "{}", machine.journal());
    assert!(answered().is_some(), "{}", machine.journal());

    // One group: the agent says what the unit needs for it, and then has it.
    machine.run(&["sh", "-c", "groupadd --force trainers"]);
    let group = machine.run(&["sh", "-c", "getent group trainers | cut -d: -f3"]);
    let drop_in = |name: &str, text: &str| {
        let file = format!("/run/systemd/system/mainstay.service.d/{name}.conf");
        machine.run(&["sh", "-c", &format!("cat > {file} <<'END'\n{text}\nEND\nsystemctl daemon-reload")]);
    };
    drop_in("gid", &format!("[Service]\nEnvironment=MAINSTAY_AGENT_SOCKET_GID={}", group.trim()));
    machine.enter(&["systemctl", "restart", "mainstay"]);
    processes::wait_until("the agent says what it lacks", || {
        machine.journal().contains("SystemCallFilter=@chown")
    });
    let from = PAGE.find("```ini").expect("the drop-in of the page") + "```ini".len();
    let (of_page, _) = PAGE[from..].split_once("```").expect("its end");
    drop_in("group", &of_page.replace("\n   ", "\n"));
    machine.run(&["systemctl", "restart", "mainstay"]);
    let socket = machine.run(&["stat", "--format", "%G %a", "/run/mainstay/agent.sock"]);
    assert_eq!(socket.trim(), "trainers 660");
    machine.run(&[
        "sh",
        "-c",
        "rm /run/systemd/system/mainstay.service.d/g*.conf && systemctl daemon-reload",
    ]);

    machine.run(&["systemctl", "stop", "mainstay"]);
    assert_eq!(machine.property("ActiveState"), "inactive", "{}", machine.journal());
    assert_eq!(machine.property("Result"), "success", "{}", machine.journal());
    machine.run(&["systemctl", "start", "mainstay"]);
    assert!(answered().is_some(), "{}", machine.journal());
}

/// The example for C.
const C_EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../client/c/example.c");

/// The variable that names the package, as `cargo xtask dist` builds it.
const PACKAGE: &str = "MAINSTAY_TEST_DEB";

#[test]
fn the_package_starts_nothing_is_replaced_under_a_job_and_leaves_nothing_when_it_is_purged() {
    let Some(package) = std::env::var_os(PACKAGE) else {
        return skipped("MAINSTAY_TEST_DEB names no package: cargo xtask test builds one where dpkg-deb is");
    };
    let machine = match Machine::boot() {
        Ok(machine) => machine,
        Err(reason) => return skipped(&reason),
    };
    machine.run(&["rm", "-rf", "/etc/mainstay", "/var/lib/mainstay"]);
    machine.run(&["sh", "-c", "id alice || useradd --no-create-home alice"]);
    fs::copy(package, format!("/proc/{}/root/run/mainstay.deb", machine.init)).expect("a copy in its memory");
    let install = ["dpkg", "--install", "/run/mainstay.deb"];
    machine.run(&install);
    assert_eq!(machine.property("ActiveState"), "inactive", "{}", machine.journal());
    for path in ["/etc/mainstay", "/usr/share/man/man1/mainstay-run.1.gz"] {
        machine.run(&["test", "-e", path]);
    }

    // A program in C needs the package and a compiler.
    if ["cc", "pkg-config"].iter().all(|tool| machine.enter(&["which", tool]).status.success()) {
        fs::copy(C_EXAMPLE, format!("/proc/{}/root/run/example.c", machine.init))
            .expect("a copy in its memory");
        let build = "cc /run/example.c $(pkg-config --cflags --libs mainstay) -lm -o /tmp/example";
        machine.run(&["sh", "-c", build]);
        let train = "mainstay run --nproc-per-node 1 --no-agent --log-dir /tmp/of-c --no-python /tmp/example";
        assert!(machine.run(&["sh", "-c", train]).contains("active=1"));
    } else {
        skipped("cc or pkg-config is missing: the C example is not built from the package");
    }

    machine.run(&["systemctl", "enable", "--now", "mainstay"]);
    let job = ["systemd-run", "--uid=alice", "--unit=job", "--setenv=HOME=/tmp", "mainstay", "run"];
    machine.run(&[&job[..], &["--log-dir=/tmp/of-alice", "--no-python", "sleep", "1000"]].concat());
    let attached = || {
        let status = ["mainstay", "status", "--json", "--socket", "/run/mainstay/agent.sock"];
        text(&machine.enter(&status).stdout).contains("/tmp/of-alice/")
    };
    processes::wait_until("the agent has the job", attached);

    let agent = machine.property("MainPID");
    let rank = machine.run(&["pgrep", "-u", "alice", "sleep"]);
    machine.run(&install);
    assert_ne!(machine.property("MainPID"), agent, "an upgrade replaces the agent");
    processes::wait_until("the new agent has the job", attached);
    assert_eq!(machine.run(&["pgrep", "-u", "alice", "sleep"]), rank, "and no rank");

    machine.run(&["dpkg", "--remove", "mainstay"]);
    assert_eq!(machine.run(&["pgrep", "-u", "alice", "sleep"]), rank);
    machine.run(&["test", "-e", "/var/lib/mainstay/journal"]);
    machine.run(&["dpkg", "--purge", "mainstay"]);
    for path in ["/var/lib/mainstay", "/etc/mainstay", "/run/mainstay", "/usr/bin/mainstay"] {
        machine.run(&["test", "!", "-e", path]);
    }
}
