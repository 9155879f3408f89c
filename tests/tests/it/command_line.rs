//! torchrun's command line and environment: what is started, with which arguments, and what the ranks see.

use std::collections::BTreeMap;

use mainstay_tests::{Stage, has_client, has_torch};

/// What torch's elastic agent sets for every worker (`torch/distributed/elastic/agent/server/local_elastic_agent.py`).
const TORCHRUN: [&str; 18] = [
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "WORLD_SIZE",
    "OMP_NUM_THREADS",
];

/// What Mainstay sets in addition.
const OURS: [&str; 13] = [
    "MAINSTAY_ATTEMPT",
    "MAINSTAY_CHECKPOINT_DIR",
    "MAINSTAY_CHECKPOINT_POOL",
    "MAINSTAY_JOB_ID",
    "MAINSTAY_LAUNCH",
    "MAINSTAY_PAGE",
    "MAINSTAY_STACKS",
    "MAINSTAY_ROUNDS",
    "FT_RANK_MONITOR_IPC_SOCKET",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "PYTHONUNBUFFERED",
];

#[test]
fn ranks_see_all_that_torchrun_sets_and_nothing_unexpected() {
    let stage = Stage::new();
    let job =
        stage.sh(r#"mark "env.$RANK" "$(env)""#).ranks(3).options("--role trainer --max-restarts 5").start();
    let (id, port) = (job.id().to_owned(), job.attempt(0).port);
    let seen: Vec<BTreeMap<String, String>> =
        (0..3).map(|rank| variables(&job.mark(&format!("env.{rank}")))).collect();
    let end = job.end();
    end.assert_status(0);
    for (rank, seen) in seen.iter().enumerate() {
        let rank = rank.to_string();
        let expected = [
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("ROLE_RANK", &rank),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("ROLE_WORLD_SIZE", "3"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_NAME", "trainer"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "5"),
            ("TORCHELASTIC_RUN_ID", &id),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("MAINSTAY_JOB_ID", &id),
        ];
        for (name, value) in expected {
            assert_eq!(seen.get(name).map(String::as_str), Some(value), "{name} of rank {rank}");
        }
        for name in TORCHRUN.iter().chain(&OURS) {
            assert!(seen.contains_key(*name), "{name} of rank {rank}");
        }
        // All other variables must come from outside.
        let outside =
            ["PATH", "HOME", "LANG", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", "MARKS", "PYTHON_EXEC"];
        let tools = ["PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "RUST_BACKTRACE"];
        let known = |name: &str| {
            TORCHRUN.contains(&name)
                || OURS.contains(&name)
                || outside.contains(&name)
                || tools.contains(&name)
        };
        let unknown: Vec<&String> = seen.keys().filter(|name| !known(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}

#[test]
fn ranks_inherit_nothing_of_the_launcher_but_their_streams() {
    let stage = Stage::new();
    let script = r#"
files = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
assert files["0"] == "/dev/null", files
# The process that started the launcher may have passed on more; nothing of the launcher itself may be there.
own = ("anon_inode:", "socket:", os.path.dirname(os.environ["MAINSTAY_PAGE"]), os.environ["MAINSTAY_CHECKPOINT_DIR"][:-len("/checkpoints")])
assert not any(file.startswith(own) for fd, file in files.items() if fd not in "12"), files
assert os.getpgid(0) == os.getpid(), "each rank leads a process group of its own"
# The program that a rank starts sees the rank's signal settings: the launcher blocks and ignores signals only for itself.
status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, restore_signals=False).stdout
signals = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
assert int(signals["SigBlk"], 16) == 0, signals
for name in ("SIGTERM", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGALRM"):
    assert int(signals["SigIgn"], 16) >> (getattr(signal, name) - 1) & 1 == 0, (name, signals)
"#;
    stage.python(script).ranks(2).options("--max-restarts 0").start().end().assert_status(0);
}

#[test]
fn what_the_user_has_set_of_the_tunables_stays() {
    let stage = Stage::new();
    let job = stage
        .sh(r#"mark env "$(env)""#)
        .ranks(1)
        .variable("OMP_NUM_THREADS", "7")
        .variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        .variable("RANK", "99")
        .start();
    let seen = variables(&job.mark("env"));
    job.end().assert_status(0);
    assert_eq!(
        (seen["OMP_NUM_THREADS"].as_str(), seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"].as_str()),
        ("7", "3")
    );
    assert_eq!(seen["RANK"], "0", "what tells a rank who it is comes from the launcher alone");
}

#[test]
fn what_follows_the_script_belongs_to_the_script() {
    let stage = Stage::new();
    let script = r#"mark args "$*""#;
    let arguments =
        ["--n", "5", "--max-restarts", "-m", "--help", "--", "--nproc-per-node=9", "${local_rank}"];
    let job = stage.sh(script).arguments(&arguments).start();
    let seen = job.mark("args");
    let end = job.end();
    end.assert_status(0);
    assert_eq!(seen, "--n 5 --max-restarts -m --help -- --nproc-per-node=9 0", "{end}");
}

#[test]
fn a_python_script_runs_under_python_and_gets_its_arguments() {
    let stage = Stage::new();
    let script = "mark('argv', ' '.join(sys.argv[1:]))\n";
    let job = stage.python(script).arguments(&["--n", "5", "-x"]).start();
    assert_eq!(job.mark("argv"), "--n 5 -x");
    job.end().assert_status(0);
}

#[test]
fn a_module_runs_as_a_module() {
    let stage = Stage::new();
    let text =
        "import os, sys\nopen(os.environ['MARKS'] + '/module', 'w').write(__name__ + ' ' + sys.argv[1])\n";
    std::fs::create_dir(stage.work().join("pack")).expect("a directory");
    std::fs::write(stage.work().join("pack/__main__.py"), text).expect("a module");
    let end = stage.command(&["pack", "--epochs=3"]).options("-m").start().end();
    end.assert_status(0);
    let printed = std::fs::read_to_string(stage.marks().join("module")).expect("it ran");
    assert_eq!(printed, "__main__ --epochs=3");
}

#[test]
fn a_program_that_is_not_python_is_started_as_it_is() {
    let stage = Stage::new();
    let job = stage.sh(r#"mark ran "$0 $*""#).arguments(&["-q"]).options("--no-python").start();
    assert!(job.mark("ran").ends_with("ranks.sh -q"));
    job.end().assert_status(0);
}

#[test]
fn defaults_come_from_pet_variables_and_options_weigh_more() {
    let stage = Stage::new();
    let script = r#"mark "up.$WORLD_SIZE.$RANK.$TORCHELASTIC_MAX_RESTARTS""#;
    let with_defaults = || {
        let plan = stage.sh(script).variable("PET_NPROC_PER_NODE", "3").variable("PET_MAX_RESTARTS", "8");
        plan.variable("PET_NNODES", "1:1").variable("PET_RDZV_BACKEND", "c10d")
    };
    let job = with_defaults().start();
    job.mark("up.3.2.8");
    job.end().assert_status(0);
    let job = with_defaults().options("--nproc_per_node=2").start();
    job.mark("up.2.1.8");
    job.end().assert_status(0);
}

#[test]
fn torchruns_options_are_taken_in_both_spellings() {
    let stage = Stage::new();
    let options = "--standalone --nnodes=1 --nproc_per_node=2 --rdzv_backend=c10d --rdzv-endpoint=localhost:0 \
                   --rdzv-conf timeout=5 --monitor_interval 0.5 --start-method spawn --node_rank=0 --master_addr=localhost";
    let end = stage.sh(r#"echo "$MASTER_ADDR""#).options(options).start().end();
    end.assert_status(0);
    assert_eq!(end.output(0, 1, "stdout"), "localhost\n");
}

#[test]
fn more_than_one_host_is_refused_in_plain_words() {
    let stage = Stage::new();
    let end = stage.sh("mark ran").options("--nnodes 2:1").start().end();
    end.assert_status(64);
    testing::snapshot!("torchrun", "--nnodes 2:1", stage.masked(&end.stderr));
    assert!(!stage.marks().join("ran").exists());
}

#[test]
fn as_many_ranks_as_the_machine_has_are_started_for_auto_and_cpu() {
    let stage = Stage::new();
    let cpus = std::thread::available_parallelism().expect("a number of CPUs").get();
    for option in ["cpu", "auto"] {
        if option == "auto" && std::path::Path::new("/dev/nvidia0").exists() {
            continue;
        }
        let end = stage.sh("echo $WORLD_SIZE").options(&format!("--nproc-per-node {option}")).start().end();
        end.assert_status(0);
        assert_eq!(end.output(0, 0, "stdout"), format!("{cpus}\n"), "--nproc-per-node {option}");
    }
}

#[test]
fn a_script_that_uses_torchs_record_without_the_client_is_understood() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if RANK == 1:
        raise RuntimeError("no space on device 7")
    time.sleep(36000)
main()
"#;
    let end = stage.python(script).ranks(2).options("--max-restarts 0").start().end();
    end.assert_status(1);
    end.assert_printed("RuntimeError: no space on device 7");
}

#[test]
fn the_client_finds_its_page_by_the_environment_alone() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
status = mainstay.status()
assert status["active"] and status["page"] == os.environ["MAINSTAY_PAGE"], status
"#;
    stage.python(script).ranks(2).options("--max-restarts 0").start().end().assert_status(0);
}

fn variables(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}
