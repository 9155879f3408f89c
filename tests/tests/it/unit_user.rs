//! The agent as the shipped unit runs it: a separate user with the unit's capabilities, which cannot become another
//! user, in the file system that the unit's sandbox leaves. It replicates what launchers and `ckpt push` hand over,
//! and reports what it cannot do.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use mainstay_tests::{End, as_unprivileged, mainstay, processes, skipped};

use crate::hosts::{Hosts, ckpt, json};
use crate::peers::save;
use crate::sealing::TRAINER;

/// The unit's user and group.
const UNIT: u32 = 61_010;

/// Users who train; both are members of the unit's group.
const A: u32 = 61_011;
const B: u32 = 61_012;

/// `AmbientCapabilities` of systemd/mainstay.service, as setpriv writes them.
fn capabilities() -> String {
    let unit = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd/mainstay.service"));
    let unit = unit.expect("the unit");
    for setting in
        ["ProtectSystem=strict", "PrivateMounts=yes", "MemoryDenyWriteExecute=yes", "NoNewPrivileges=yes"]
    {
        assert!(unit.lines().any(|line| line == setting), "SANDBOX is not what the unit has: {setting}");
    }
    let listed =
        unit.lines().find_map(|line| line.strip_prefix("AmbientCapabilities=")).expect("its capabilities");
    let each =
        listed.split_whitespace().map(|name| format!("+{}", name.trim_start_matches("CAP_").to_lowercase()));
    format!("-all,{}", each.collect::<Vec<_>>().join(","))
}

/// What the unit's sandbox does to the file system and to the process, for systems on which systemd does not run: `ProtectSystem=strict`
/// with its own folders, the exceptions for /dev, /proc and /sys, `PrivateMounts`, and `MemoryDenyWriteExecute`. All mounts are made
/// read-only, and then the folders of the unit are not.
const SANDBOX: &str = r#"
mount --make-rprivate /
for folder in "$RUN" "$STATE"; do mount --bind "$folder" "$folder"; done
cut -d ' ' -f 5 /proc/self/mountinfo | sort -u | while read -r at; do
    case "$at" in
        /dev|/dev/*|/proc|/proc/*|/sys|/sys/*|"$RUN"|"$STATE") ;;
        *) mount -o remount,bind,ro "$at" || true ;;
    esac
done
if touch "$READ_ONLY/new" 2> /dev/null; then echo "the sandbox is not read-only" >&2; exit 9; fi
exec "$@"
"#;

/// `PR_SET_MDWE` with `PR_MDWE_REFUSE_EXEC_GAIN`: systemd sets it for `MemoryDenyWriteExecute` since version 254.
fn deny_write_execute(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let deny = || {
        // SAFETY: one system call that changes this process only. A kernel before 6.3 does not know it, and allows what the unit denies.
        let _ = unsafe { nix::libc::prctl(65, 1, 0, 0, 0) };
        Ok(())
    };
    // SAFETY: between fork and exec nothing but a system call is made.
    unsafe { command.pre_exec(deny) };
}

/// An agent with a socket where only root can have put it.
struct UnitAgent {
    process: Child,
    run: PathBuf,
}

impl UnitAgent {
    fn start(hosts: &Hosts, program: &str, capabilities: &str) -> UnitAgent {
        UnitAgent::start_on(0, hosts, program, capabilities)
    }

    fn start_on(host: usize, hosts: &Hosts, program: &str, capabilities: &str) -> UnitAgent {
        let stage = hosts.stages[host].open_to_all();
        let run = PathBuf::from(format!("/run/mainstay-it-{}", hosts.names[host].replace(':', "-")));
        fs::create_dir(&run).expect("a directory in /run");
        let state = stage.work().join("agent-state");
        fs::create_dir_all(&state).unwrap();
        let token = stage.work().join("token");
        fs::write(&token, "the same on all hosts of this test").unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        let log = hosts.kernel_log(host);
        fs::write(&log, "").unwrap();
        for path in [&run, &state, &token, &log] {
            chown(path, Some(UNIT), Some(UNIT)).unwrap();
        }
        fs::set_permissions(&run, fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new("unshare");
        let unit = UNIT.to_string();
        command
            .args(["--mount", "sh", "-ec", SANDBOX, "sandbox", "setpriv"])
            .env("RUN", &run)
            .env("STATE", &state)
            .env("READ_ONLY", stage.work())
            .args(["--reuid", &unit, "--regid", &unit, "--clear-groups", "--no-new-privs"])
            .args([
                "--inh-caps",
                capabilities,
                "--ambient-caps",
                capabilities,
                "--bounding-set",
                capabilities,
            ])
            .args([program, "agent", "--socket"])
            .arg(run.join("agent.sock"))
            .arg("--state-dir")
            .arg(&state)
            .env("MAINSTAY_AGENT_KERNEL_LOG_PATH", &log)
            .env("MAINSTAY_AGENT_CHECKPOINT_LISTEN", &hosts.names[host])
            .env("MAINSTAY_AGENT_CHECKPOINT_PEERS", hosts.names.join(","))
            .env("MAINSTAY_AGENT_CHECKPOINT_TOKEN_FILE", &token)
            .env("MAINSTAY_AGENT_CHECKPOINT_STORE", hosts.store(host))
            .env("MAINSTAY_AGENT_CHECKPOINT_INTERVAL", "100ms")
            .current_dir(stage.work())
            .stdout(Stdio::null())
            .stderr(fs::File::create(stage.home().join("agent.err")).unwrap());
        deny_write_execute(&mut command);
        let process = command.spawn().expect("unshare");
        let agent = UnitAgent { process, run };
        processes::wait_until("the agent's sockets", || {
            agent.socket().exists() && agent.run.join("agent.sock.directories").exists()
        });
        agent
    }

    fn socket(&self) -> PathBuf {
        self.run.join("agent.sock")
    }

    /// The answer to a user of the unit's group.
    fn asked(&self, program: &str, uid: u32, arguments: &[&str]) -> Output {
        let (uid, group) = (uid.to_string(), UNIT.to_string());
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &uid, "--regid", &uid, "--groups", &group, program]).args(arguments);
        command.arg("--socket").arg(self.socket()).env("HOME", "/nonexistent").current_dir("/");
        command.output().expect("setpriv")
    }
}

impl Drop for UnitAgent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.run);
    }
}

fn give(path: &Path, uid: u32) {
    lchown(path, Some(uid), Some(uid)).unwrap();
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| give(&entry.unwrap().path(), uid));
    }
}

/// A directory of a user's with a step.
fn saved(hosts: &Hosts, name: &str, uid: u32, mode: u32) -> PathBuf {
    let directory = hosts.stages[0].work().join(name);
    save(&directory, "train~1", 40, 2, 1 << 20);
    give(&directory, uid);
    fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
    directory
}

/// The names of all files below a directory, each of which is this user's.
fn files_of(directory: &Path, uid: u32) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut left = vec![directory.to_owned()];
    while let Some(at) = left.pop() {
        for entry in fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(fs::symlink_metadata(&path).unwrap().uid(), uid, "{}", path.display());
            if path.is_dir() {
                left.push(path)
            } else {
                _ = found.insert(path.strip_prefix(directory).unwrap().to_owned())
            }
        }
    }
    found
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_units_user_replicates_what_users_hand_over_and_reports_what_it_cannot_do() {
    if let Err(reason) = as_unprivileged() {
        return skipped(reason);
    }
    let hosts = Hosts::new(14, 2, &[]);
    let program = hosts.stages[0].program("mainstay", &mainstay());
    let peer = hosts.agent(1);
    let agent = UnitAgent::start(&hosts, &program, &capabilities());
    let of_a = saved(&hosts, "of-a", A, 0o700);
    let place = of_a.display().to_string();
    let pushed = agent.asked(&program, A, &["ckpt", "push", "train", &place, "--wait", "90", "--json"]);
    assert_eq!(json(&pushed)["copies"], 2, "{}", text(&pushed.stderr));
    let listed = json(&ckpt(&peer, &["ls", "--run", "train", "--json"]));
    assert_eq!(listed["steps"][0]["whole"], true, "{listed}");

    // Another user of the group gets no access, and the error names the reason.
    let tried = agent.asked(&program, B, &["ckpt", "push", "theirs", &place, "--wait", "1"]);
    let printed = text(&tried.stderr);
    assert!(
        !tried.status.success() && printed.contains("nothing in") && printed.contains("is replicated"),
        "{printed}"
    );
    let seen = json(&agent.asked(&program, B, &["ckpt", "ls", "--json"]));
    assert!(seen["steps"].as_array().is_none_or(Vec::is_empty), "{seen}");

    // Files are restored into files that the user's process lends, and are whole and owned by the user.
    let back = hosts.stages[0].work().join("back");
    fs::create_dir(&back).unwrap();
    give(&back, A);
    fs::set_permissions(&back, fs::Permissions::from_mode(0o700)).unwrap();
    let there = back.display().to_string();
    let pulled = agent.asked(&program, A, &["ckpt", "pull", "train", &there, "--json"]);
    assert_eq!(json(&pulled)["step"], 40, "{}", text(&pulled.stderr));
    let verified = Command::new(&program).args(["ckpt", "verify", &there]).output().unwrap();
    assert!(text(&verified.stdout).contains("2 shard(s)"), "{verified:?}");
    assert_eq!(files_of(&back, A), files_of(&of_a, A), "nothing else is there, and all is the user's");

    // Files cannot be lent for another user's directory: nothing is written, and a message names the reason.
    let of_b = saved(&hosts, "of-b", B, 0o700).display().to_string();
    let pushed = agent.asked(&program, B, &["ckpt", "push", "train", &of_b, "--wait", "90", "--json"]);
    assert_eq!(json(&pushed)["copies"], 2, "{}", text(&pushed.stderr));
    let tried = agent.asked(&program, B, &["ckpt", "pull", "train", &there]);
    let printed = text(&tried.stderr);
    assert!(!tried.status.success(), "{printed}");
    testing::snapshot!("ckpt", "pull into another user's directory", hosts.stages[0].masked(&printed));
    assert_eq!(files_of(&back, A), files_of(&of_a, A));
    let checked = agent.asked(&program, A, &["doctor"]);
    let printed = text(&checked.stdout);
    let line = printed.lines().find(|line| line.contains("checkpoints of users")).unwrap_or(&printed);
    testing::snapshot!("ckpt", "doctor: checkpoints of users", line.trim());
}

/// Why the ranks could not be started, without a directory's name.
fn why_not_started(end: &End, directory: &Path) -> String {
    let directory = directory.display().to_string();
    end.line(&[&directory, "cannot be made again"]).replace(&directory, "OUT")
}

#[test]
fn under_the_units_user_trainers_go_on_from_their_own_checkpoints_and_from_nothing_damaged() {
    if let Err(reason) = as_unprivileged() {
        return skipped(reason);
    }
    let hosts = Hosts::new(1, 2, &[]);
    let program = hosts.stages[0].program("mainstay", &mainstay());
    let agents = [0, 1].map(|host| UnitAgent::start_on(host, &hosts, &program, &capabilities()));
    let (user, group) = (A.to_string(), UNIT.to_string());
    let launch = |host: usize, out: &Path, script: &str| {
        let stage = &hosts.stages[host];
        let options = format!(
            "--rdzv-id run-u --resume-from run-u:checkpoints~1 --log-dir {} --runtime-dir {} --checkpoint-watch huggingface:{}",
            stage.logs().display(),
            stage.tmpfs().display(),
            out.display()
        );
        stage
            .sh(&format!("{TRAINER}{script}"))
            .under(&["setpriv", "--reuid", &user, "--regid", &user, "--groups", &group])
            .at_socket(&agents[host].socket())
            .variable("OUT", out)
            .own_paths()
            .options(&options)
            .start()
    };
    let closed = |directory: &Path| {
        fs::create_dir(directory).unwrap();
        give(directory, A);
        fs::set_permissions(directory, fs::Permissions::from_mode(0o700)).unwrap();
    };
    let outs = [hosts.directory(0), hosts.directory(1)];
    outs.iter().for_each(|out| closed(out));
    // Both hosts have asked before anything exists: their parts belong to one decision.
    launch(1, &outs[1], "true").end().assert_status(0);
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then
    save 20; mark saved; wait_for replicated
    printf 'torn' > "$OUT/checkpoint-20/weights"
    mkdir "$OUT/checkpoint-30"; printf 'half of' > "$OUT/checkpoint-30/weights"
    exit 9
fi
goes_on_from 20
"#;
    let job = launch(0, &outs[0], script);
    job.mark("saved");
    // A step is whole with the parts of both hosts: the other one writes its own.
    let other = outs[1].join("checkpoint-20");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("trainer_state.json"), "{\"global_step\": 20}").unwrap();
    give(&other, A);
    processes::wait_until("the step on both hosts", || {
        let listed = json(&agents[0].asked(&program, A, &["ckpt", "ls", "--json"]));
        let newest = &listed["steps"][0];
        newest["whole"] == true && newest["least_copies"] == 2
    });
    hosts.stages[0].mark("replicated");
    let end = job.end();
    end.assert_status(0);
    assert!(!end.lines(&["step 20", "checkpoint-20/weights"]).is_empty(), "the damaged file is named\n{end}");
    end.assert_printed(".checkpoint-30.not-whole");
    let files = files_of(&outs[0], A);
    assert!(files.iter().all(|file| !file.starts_with(".mainstay-")), "nothing of ours is left: {files:?}");
    let aside = fs::read_to_string(outs[0].join(".checkpoint-30.not-whole/weights")).unwrap();
    assert_eq!(aside, "half of", "it is renamed and nothing of it is lost");

    // The next launch finds all of it here, and a host that lost all has it back.
    launch(0, &outs[0], "goes_on_from 20").end().assert_status(0).assert_printed("1 shard(s) here");
    fs::remove_dir_all(&outs[0]).unwrap();
    closed(&outs[0]);
    launch(0, &outs[0], "goes_on_from 20").end().assert_status(0).assert_printed("step 20 (decision");
    files_of(&outs[0], A);

    // Within a job a missing directory is not created, and no rank starts from step 0.
    let script = r#"
if [ "$ATTEMPT" = 0 ]; then rm -r "$OUT"; exit 9; fi
mark started-over
"#;
    let end = launch(0, &outs[0], script).end();
    end.assert_status(70);
    testing::snapshot!("sealing", "a directory that is gone, with an agent", why_not_started(&end, &outs[0]));
    assert!(!hosts.stages[0].marks().join("started-over").exists());
}

#[test]
fn without_any_capability_readable_files_are_replicated_and_the_rest_is_reported() {
    if let Err(reason) = as_unprivileged() {
        return skipped(reason);
    }
    let hosts = Hosts::new(15, 2, &[]);
    let program = hosts.stages[0].program("mainstay", &mainstay());
    let _peer = hosts.agent(1);
    let agent = UnitAgent::start(&hosts, &program, "-all");
    let open = saved(&hosts, "open", A, 0o755).display().to_string();
    let pushed = agent.asked(&program, A, &["ckpt", "push", "train", &open, "--wait", "90", "--json"]);
    assert_eq!(json(&pushed)["copies"], 2, "{}", text(&pushed.stderr));
    let closed = saved(&hosts, "closed", A, 0o700).display().to_string();
    let tried = agent.asked(&program, A, &["ckpt", "push", "other", &closed, "--wait", "1"]);
    let printed = text(&tried.stderr);
    assert!(!tried.status.success() && printed.contains("Permission denied"), "{printed}");
}
