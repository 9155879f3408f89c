//! Directories that cannot be written, and full disks: a clear error, or a job that continues with a warning.

use std::fs;

use mainstay_model::entry::Fact;
use mainstay_tests::{End, Stage, has_client, is_root, journal, mainstay, processes, skipped};

/// One step; used by all scenarios here that check whether training works.
const TRAINER: &str = "import mainstay\nmainstay.step(1)\nprint('trained')\n";

fn is_without_pages(end: &End) -> bool {
    journal::facts(&end.journal).any(|fact| match fact {
        Fact::PagesUnavailable { .. } => true,
        Fact::AttemptStarted { ranks, .. } => ranks.iter().all(|rank| rank.page.is_none()),
        _ => false,
    })
}

#[test]
fn without_options_everything_goes_to_the_users_own_places_and_is_found_there() {
    let stage = Stage::new();
    let job =
        stage.sh("mark up; wait_for end").own_paths().variable("MAINSTAY_RUNTIME_DIR", stage.tmpfs()).start();
    job.mark("up");
    let runs = stage.home().join(".local/state/mainstay/runs");
    let names = fs::read_dir(&runs).expect("runs").flatten().map(|run| run.file_name());
    // What was learned of jobs, and which directories are whose, is next to their runs.
    let names: Vec<_> = names.filter(|name| !name.as_encoded_bytes().starts_with(b".")).collect();
    let [name] = &names[..] else { panic!("one run: {names:?}") };
    let name = name.to_string_lossy().into_owned();
    let mut status = std::process::Command::new(mainstay());
    status.args(["status", "--json", "--job", &name]).env("MAINSTAY_RUNTIME_DIR", stage.tmpfs());
    let reported = status.env_remove("MAINSTAY_SOCKET").output().expect("mainstay starts");
    assert!(String::from_utf8_lossy(&reported.stdout).contains(&name), "{reported:?}");
    stage.mark("end");
    let end = job.end();
    end.assert_status(0);
    end.assert_printed(&runs.display().to_string());
    assert!(runs.join(&name).join("summary.json").exists(), "{end}");
}

#[test]
fn an_ordinary_user_needs_no_root_for_a_recovery() {
    let stage = Stage::new();
    let script = r#"
        [ "$ATTEMPT" = 1 ] && exit 0
        ( trap '' TERM; mark "child.$RANK" "$(exec sh -c 'echo $PPID')"; work ) &
        work"#;
    let mut plan = stage.sh(script).ranks(2).own_paths().options("--fault-timeout 0.3s --rdzv-id ordinary");
    if is_root() {
        let no_one = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
        let mut tried = std::process::Command::new(no_one[0]);
        if !tried
            .args(&no_one[1..])
            .arg(mainstay())
            .arg("version")
            .output()
            .is_ok_and(|reported| reported.status.success())
        {
            return skipped("an ordinary user cannot start the program where it lies");
        }
        stage.open_to_all();
        plan = plan.under(&no_one);
    }
    let options =
        format!("--log-dir {0}/own --runtime-dir {1}/own", stage.logs().display(), stage.tmpfs().display());
    let job = plan.options(&options).start();
    let children = [job.marked_pid("child.0"), job.marked_pid("child.1")];
    let journal = stage.logs().join("own/ordinary/journal");
    let of_rank_1 = journal::facts(&journal::read(&journal)).find_map(|fact| match fact {
        Fact::AttemptStarted { ranks, .. } => Some(ranks[1].pid.0),
        _ => None,
    });
    let rank = nix::unistd::Pid::from_raw(of_rank_1.expect("its start stands in the journal"));
    nix::sys::signal::kill(rank, nix::sys::signal::Signal::SIGKILL).expect("the rank lives");
    let end = job.end();
    end.assert_status(0);
    end.assert_printed("rank 1 ").assert_printed("SIGKILL");
    for child in children {
        assert!(!processes::is_alive(child), "left: {}", processes::reported(child));
    }
    let journal = journal::read(&journal);
    assert_eq!(journal::restarts(&journal), 1, "{end}");
    assert!(!journal::facts(&journal).any(|fact| matches!(fact, Fact::PagesUnavailable { .. })), "{end}");
}

#[test]
fn a_log_directory_that_cannot_be_made_is_named_with_its_option() {
    let stage = Stage::new();
    let file = stage.work().join("file");
    fs::write(&file, "").expect("a file");
    let logs = file.join("logs");
    let options = format!("--log-dir {} --runtime-dir {}", logs.display(), stage.tmpfs().display());
    let end = stage.sh("echo no").own_paths().options(&options).start().end();
    end.assert_status(70);
    end.assert_printed(&logs.display().to_string());
    end.assert_printed("--log-dir");
}

#[test]
fn a_log_directory_without_permission_is_named_with_its_option() {
    let stage = Stage::new();
    let locked = stage.work().join("locked");
    fs::create_dir(&locked).expect("a directory");
    fs::set_permissions(&locked, std::os::unix::fs::PermissionsExt::from_mode(0o555))
        .expect("our own directory");
    let options = format!("--log-dir {} --runtime-dir {}", locked.display(), stage.tmpfs().display());
    let mut plan = stage.sh("echo no").own_paths().options(&options);
    if is_root() {
        // Root may write anywhere; without its capabilities it is like any other user.
        plan = plan.under(&["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]);
    }
    let end = plan.start().end();
    end.assert_status(70);
    end.assert_printed("Permission denied");
    end.assert_printed("--log-dir");
}

#[test]
fn a_run_id_that_cannot_name_a_directory_is_refused_before_anything_is_started() {
    let stage = Stage::new();
    let places = format!("--log-dir {} --runtime-dir {}", stage.logs().display(), stage.tmpfs().display());
    for id in ["../up", "a/b", ".hidden"] {
        let options = format!("{places} --rdzv-id {id}");
        let end = stage.sh("mark ran").own_paths().options(&options).start().end();
        assert!([64, 70].contains(&end.status), "{end}");
        end.assert_printed("--rdzv-id");
    }
    assert!(!stage.marks().join("ran").exists());
    assert_eq!(fs::read_dir(stage.logs()).expect("our own directory").count(), 0, "nothing was begun");
}

#[test]
fn without_a_runtime_directory_the_job_runs_without_heartbeats_and_reports_it() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let file = stage.work().join("file");
    fs::write(&file, "").expect("a file");
    let options =
        format!("--rdzv-id own --log-dir {} --runtime-dir {}/run", stage.logs().display(), file.display());
    let end = stage.python(TRAINER).named("own").ranks(2).own_paths().options(&options).start().end();
    end.assert_status(0);
    assert!(is_without_pages(&end), "{end}");
    assert_eq!(end.stdout.matches("trained").count(), 2, "{end}");
}

#[test]
fn a_runtime_directory_that_others_may_write_to_is_not_used() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let open = stage.tmpfs().join("open");
    fs::create_dir(&open).expect("a directory");
    fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .expect("our own directory");
    let options =
        format!("--rdzv-id own --log-dir {} --runtime-dir {}", stage.logs().display(), open.display());
    let end = stage.python(TRAINER).named("own").own_paths().options(&options).start().end();
    end.assert_status(0);
    end.assert_printed(&open.display().to_string());
    assert!(is_without_pages(&end), "{end}");
    assert_eq!(fs::read_dir(&open).expect("our own directory").count(), 0, "nothing was put there\n{end}");
}

#[test]
fn on_a_full_tmpfs_the_job_runs_without_heartbeats_and_reports_it() {
    if !has_client() || !may_mount() {
        return;
    }
    let stage = Stage::new();
    let full = stage.work().join("full");
    fs::create_dir(&full).expect("a directory");
    let fill = format!(
        "mount -t tmpfs -o size=64k,mode=700 tmpfs {full} && (head -c 60k /dev/zero > {full}/ballast; exec \"$0\" \"$@\")",
        full = full.display()
    );
    let options = format!("--runtime-dir {}", full.display());
    let plan = stage.python(TRAINER).ranks(2).own_paths().under(&["unshare", "-m", "sh", "-c", &fill]);
    let logs = format!("--log-dir {} --rdzv-id full", stage.logs().display());
    let end = plan.options(&options).options(&logs).start().end();
    end.assert_status(0);
    end.assert_printed("without heartbeats");
    let journal = journal::read(&stage.logs().join("full/journal"));
    assert!(journal::facts(&journal).any(|fact| matches!(fact, Fact::PagesUnavailable { .. })), "{end}");
    assert_eq!(end.stdout.matches("trained").count(), 2, "{end}");
}

#[test]
fn a_full_disk_for_checkpoints_costs_the_checkpoint_and_not_the_training() {
    if !has_client() || !may_mount() {
        return;
    }
    let stage = Stage::new();
    let small = stage.work().join("small");
    fs::create_dir(&small).expect("a directory");
    let mount = format!("mount -t tmpfs -o size=1m tmpfs {} && exec \"$0\" \"$@\"", small.display());
    // The first fits; the second does not; the third, smaller again, does.
    let script = r#"
import mainstay, warnings
state = {1: 100_000, 2: 4_000_000, 3: 1_000}
saved = {}
for step in (1, 2, 3):
    if step == 3:
        assert mainstay.checkpoint.latest() == 1, "the older step is kept"
    saved[step] = mainstay.checkpoint.save(step, bytes(state[step]))
    mainstay.step(step)
assert saved == {1: True, 2: False, 3: True}, saved
assert mainstay.checkpoint.latest() == 3
assert len(mainstay.checkpoint.load(1)) == 100_000
"#;
    let plan = stage.python(script).under(&["unshare", "-m", "sh", "-c", &mount]);
    let end = plan
        .options(&format!("--max-restarts 0 --checkpoint-memory off --checkpoint-dir {}", small.display()))
        .start()
        .end();
    end.assert_status(0);
    end.assert_printed("No space left on device");
    assert!(journal::verdicts(&end.journal).is_empty(), "{end}");
}

#[test]
fn a_full_disk_for_the_logs_ends_no_job() {
    if !may_mount() {
        return;
    }
    let stage = Stage::new();
    let small = stage.work().join("small");
    fs::create_dir(&small).expect("a directory");
    let mount = format!("mount -t tmpfs -o size=512k tmpfs {} && exec \"$0\" \"$@\"", small.display());
    // More output than there is room for, and a script that ignores the errors; then a fault, decided without a
    // journal that can grow.
    let script = r#"
        head -c 2M /dev/zero 2>/dev/null
        mark "full.$RANK.$ATTEMPT"
        [ "$ATTEMPT" = 1 ] && exit 0
        [ "$RANK" = 1 ] && kill -KILL $$
        work"#;
    let options =
        format!("--log-dir {} --rdzv-id small --runtime-dir {}", small.display(), stage.tmpfs().display());
    let plan = stage.sh(script).ranks(2).own_paths().options(&options).options("-r 3");
    let end = plan.under(&["unshare", "-m", "sh", "-c", &mount]).start().end();
    end.assert_status(0);
    end.assert_printed("rank 1 ").assert_printed("SIGKILL");
    assert!(stage.marks().join("full.1.1").exists(), "{end}");
}

fn may_mount() -> bool {
    let tried = std::process::Command::new("unshare").args(["-m", "true"]).output();
    let may = is_root() && tried.is_ok_and(|tried| tried.status.success());
    if !may {
        skipped("only root can mount a small file system in a namespace of its own");
    }
    may
}
