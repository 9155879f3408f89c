//! Jobs that Slurm's `srun` and Open MPI's `mpirun` start on two network namespaces: no option names the meeting
//! point.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use mainstay_tests::{Stage, has_torch, is_root, mainstay, processes, python, skipped};

use super::network::Network;
use super::slurm::{Slurm, has_slurm};

/// Two ranks sum a number in each step; the last is killed in the first attempt.
const SUMS: &str = r#"#!/usr/bin/env python3
import os, signal, torch, torch.distributed as dist
import mainstay
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
saved = mainstay.checkpoint.load()
for step in range(0 if saved is None else saved + 1, 8):
    total = torch.ones(1)
    dist.all_reduce(total)
    mainstay.step(step, loss=1.0)
    mainstay.checkpoint.save(step, step)
    if attempt == 0 and step == 4 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
with open(f"{os.environ['MARKS']}/sum.{rank}", "w") as file:
    file.write(f"{int(total)} {attempt} {os.environ['GROUP_RANK']}")
dist.destroy_process_group()
"#;

/// `mainstay run` of a program with the directories of a stage, as a shell command.
fn run(stage: &Stage, options: &str, program: &str) -> String {
    format!(
        "env PYTHON_EXEC={} GLOO_SOCKET_IFNAME=eth0 {} run --no-agent --log-dir {} --runtime-dir {} \
         --checkpoint-dir {} {options} {program}",
        python().display(),
        mainstay().display(),
        stage.logs().display(),
        stage.tmpfs().display(),
        stage.work().join("checkpoints").display(),
    )
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// Both ranks were in one world, were started again after the kill, and have the nodes' order.
fn assert_one_world(stage: &Stage, output: &Output) {
    assert!(output.status.success(), "{}", printed(output));
    for rank in 0..2 {
        let mark = std::fs::read_to_string(stage.marks().join(format!("sum.{rank}")));
        assert_eq!(mark.expect("the rank has ended well"), format!("2 1 {rank}"), "{}", printed(output));
    }
}

#[test]
fn srun_starts_a_job_of_two_hosts_without_an_option() {
    if !has_torch() || !has_slurm() {
        return;
    }
    if !is_root() {
        return skipped("only root can make network namespaces");
    }
    let slurm = Slurm::start(2);
    let stage = slurm.stage();
    let script = stage.script("sums.py", SUMS);
    let job = run(stage, "", &script);
    let output = slurm.run(&format!("srun --nodes 2 --ntasks-per-node 1 {job}"));
    assert_one_world(stage, &output);
    let printed = printed(&output);
    for taken in ["2 (SLURM_STEP_NUM_NODES)", "0 (SLURM_NODEID)", "1 (SLURM_NODEID)", "node1:"] {
        assert!(printed.contains(taken), "{taken}: {printed}");
    }

    // Two launchers on a node would each start its ranks.
    let crowded = slurm.run(&format!("srun --nodes 2 --ntasks 4 {job}"));
    assert!(
        self::printed(&crowded).contains("SLURM_STEP_NUM_TASKS=4 on 2 hosts"),
        "{}",
        self::printed(&crowded)
    );
    assert_eq!(crowded.status.code(), Some(64), "{}", self::printed(&crowded));

    // One host is started as it is without Slurm.
    let alone = run(stage, "", "/bin/true");
    for line in [format!("srun --nodes 1 {alone}"), format!("salloc --nodes 1 {alone}")] {
        let output = slurm.run(&line);
        let printed = self::printed(&output);
        assert!(output.status.success() && !printed.contains("(SLURM_"), "{line}: {printed}");
    }
    let allocated = slurm.run(&format!("salloc --nodes 2 {alone}"));
    let printed = self::printed(&allocated);
    assert!(allocated.status.success() && printed.contains("srun --ntasks-per-node=1"), "{printed}");
}

#[test]
fn a_node_of_slurm_is_lost_and_the_task_beyond_the_job_takes_its_place() {
    if !has_slurm() {
        return;
    }
    if !is_root() {
        return skipped("only root can make network namespaces");
    }
    let slurm = Slurm::start(3);
    let stage = slurm.stage();
    let program = "#!/bin/sh\n\
         echo $SLURM_NODEID > $MARKS/.$RANK && mv $MARKS/.$RANK $MARKS/runs.$TORCHELASTIC_RESTART_COUNT.$RANK\n\
         until [ -e $MARKS/end ]; do sleep 0.1; done\n";
    let program = stage.script("rank.sh", program);
    let job = run(stage, "--no-python --nnodes 2", &program);
    // Without --no-kill, Slurm ends the step or the job when it has noticed the loss.
    let step = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --nodes 3 --ntasks-per-node 1";
    let job = slurm.spawn(&format!("exec salloc --no-kill --nodes 3 {step} {job}"));
    let node_of = |attempt: u32, rank: u32| -> usize {
        let mark = stage.marks().join(format!("runs.{attempt}.{rank}"));
        processes::wait_until("the rank runs", || mark.exists());
        std::fs::read_to_string(mark).expect("a mark").trim().parse().expect("a number of a node")
    };
    let first = [node_of(0, 0), node_of(0, 1)];
    let lost = first.into_iter().find(|node| *node != 0).expect("two ranks on two nodes");
    slurm.network.vanish(lost);
    let then = [node_of(1, 0), node_of(1, 1)];
    assert!(!then.contains(&lost), "node {lost} is lost, and ranks run on {then:?}");
    stage.mark("end");
    let output = job.wait_with_output().expect("our own child");
    assert!(output.status.success(), "{}", printed(&output));
}

#[test]
fn the_health_check_and_the_prolog_for_slurm_drain_a_node_that_fails_and_resume_only_what_they_drained() {
    if !has_slurm() {
        return;
    }
    if !is_root() {
        return skipped("only root can make network namespaces");
    }
    let slurm = Slurm::configured(2, |slurm| {
        let (bin, broken) = (slurm.file("bin"), slurm.file("broken"));
        std::fs::create_dir(&bin).expect("a directory");
        std::os::unix::fs::symlink(mainstay(), bin.join("mainstay")).expect("a link");
        // Slurm gives it no SLURM_CONF. The second node lacks GPUs for as long as a file exists.
        let health = slurm.stage().script(
            "health.sh",
            &format!(
                "#!/bin/sh\nexport SLURM_CONF={}\n\
                 [ $SLURMD_NODENAME = node2 ] && [ -e {} ] && broken='--require gpu=8'\n\
                 {} slurm healthcheck --alone --group gpu $broken && echo >> {}.$SLURMD_NODENAME\n",
                slurm.file("slurm.conf").display(),
                broken.display(),
                mainstay().display(),
                slurm.file("ran").display(),
            ),
        );
        format!("HealthCheckProgram={health}\nHealthCheckInterval=1\nHealthCheckNodeState=ANY\n")
    });
    let node = |number: u32| {
        let output = slurm.run(&format!("scontrol --oneliner show node node{number}"));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    // A job on the node that is drained.
    let end = slurm.file("end");
    let wait = format!("touch $MARKS/job; until [ -e {} ]; do sleep 0.1; done", end.display());
    let job = slurm.spawn(&format!("exec srun --nodes 1 --nodelist node2 sh -c '{wait}'"));
    processes::wait_until("the job runs", || slurm.stage().marks().join("job").exists());
    std::fs::write(slurm.file("broken"), "").expect("a file");
    let reason =
        || node(2).split_once("Reason=[node_problem] mainstay:").map(|(_, reason)| reason.to_owned());
    processes::wait_until("node2 is drained", || reason().is_some());
    // The prolog: a wrong call says nothing about the node, and a check that fails gives its reason.
    let prolog = |check: &str| {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/slurm/prolog.sh");
        let path = format!("PATH={}:$PATH", slurm.file("bin").display());
        let line = format!("{path} SLURMD_NODENAME=node2 MAINSTAY_CHECK='{check}' {}", program.display());
        slurm.run(&line).status.code()
    };
    let before = reason();
    assert_eq!((prolog("--no-such-option"), reason()), (Some(0), before.clone()));
    assert_eq!(prolog("--alone --group gpu --require gpu=9"), Some(1));
    assert!(reason().is_some_and(|reason| Some(reason) != before), "{}", node(2));
    assert!(slurm.run("scontrol update nodename=node1 state=drain reason=by-hand").status.success());
    std::fs::remove_file(slurm.file("broken")).expect("our own file");
    let checks = |of: u32| {
        let runs = || std::fs::read(slurm.file(&format!("ran.node{of}"))).map_or(0, |lines| lines.len());
        let before = runs();
        processes::wait_until("two more checks", || runs() >= before + 2);
    };
    checks(2);
    assert!(node(2).contains("DRAIN"), "it has a job, which the probes would disturb: {}", node(2));
    std::fs::write(end, "").expect("a file");
    let output = job.wait_with_output().expect("our own child");
    assert!(output.status.success(), "{}", printed(&output));
    processes::wait_until("node2 is resumed", || !node(2).contains("DRAIN"));
    checks(1);
    assert!(node(1).contains("Reason=by-hand"), "{}", node(1));
}

/// A script of contrib/slurm on the real Slurm, with four nodes: three hosts and a spare.
struct Contributed {
    slurm: Slurm,
}

impl Contributed {
    fn start() -> Contributed {
        let slurm = Slurm::start(4);
        let bin = slurm.file("bin");
        std::fs::create_dir(&bin).expect("a directory");
        std::os::unix::fs::symlink(mainstay(), bin.join("mainstay")).expect("a link");
        Contributed { slurm }
    }

    /// The script, unchanged but for its program.
    fn script(&self, name: &str) -> String {
        let stage = self.slurm.stage();
        let rank = stage.script(
            "rank.sh",
            "#!/bin/sh\n\
             echo $SLURMD_NODENAME > $MARKS/.$RANK && mv $MARKS/.$RANK $MARKS/runs.$TORCHELASTIC_RESTART_COUNT.$RANK\n\
             until [ -e $MARKS/end ]; do sleep 0.1; done\n",
        );
        let program = format!(
            "PROGRAM=(--no-agent --log-dir {} --runtime-dir {} --checkpoint-dir {} --no-python {rank})",
            stage.logs().display(),
            stage.tmpfs().display(),
            stage.work().join("checkpoints").display(),
        );
        let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/slurm");
        let text = std::fs::read_to_string(contrib.join(name)).expect("our own file");
        let lines = text.lines().map(|line| if line.starts_with("PROGRAM=") { &program } else { line });
        let lines: Vec<&str> = lines.collect();
        assert!(lines.contains(&program.as_str()), "{text}");
        let with = std::fs::read_to_string(contrib.join("with-batch-host.sh")).expect("our own file");
        stage.script("with-batch-host.sh", &with);
        stage.script(name, &(lines.join("\n") + "\n"))
    }

    fn line(&self, line: &str) -> String {
        format!("PATH={}:$PATH {line}", self.slurm.file("bin").display())
    }

    /// The nodes of the ranks of an attempt, once all run.
    fn nodes(&self, attempt: u32) -> Vec<usize> {
        let node_of = |rank: u32| {
            let mark = self.slurm.stage().marks().join(format!("runs.{attempt}.{rank}"));
            processes::wait_until("the rank runs", || mark.exists());
            let node = std::fs::read_to_string(&mark).expect("a mark");
            node.trim().strip_prefix("node").and_then(|number| number.parse::<usize>().ok()).expect("a node")
                - 1
        };
        (0..3).map(node_of).collect()
    }

    /// A field of the newest state of each job, or task of an array.
    fn fields(&self, name: &str) -> Vec<String> {
        let shown = self.slurm.run("scontrol --oneliner show job");
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        let field = |line: &str| {
            line.split_whitespace()
                .find_map(|field| field.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
        };
        shown.lines().filter_map(field).collect()
    }

    fn vanish(&self, node: usize) {
        self.slurm.network.vanish(node);
        let then = self.nodes(1);
        assert!(!then.contains(&node), "node {node} is lost, and ranks run on {then:?}");
        self.slurm.stage().mark("end");
    }
}

fn can_run_contributed() -> bool {
    let can = has_slurm() && super::etcd::has_etcd();
    if can && !is_root() {
        skipped("only root can make network namespaces");
    }
    can && is_root()
}

#[test]
fn a_job_of_allocation_sbatch_survives_the_host_of_its_batch_script_and_ends_for_slurm_too() {
    if !can_run_contributed() {
        return;
    }
    let contributed = Contributed::start();
    let script = contributed.script("allocation.sbatch");
    let submitted = contributed.slurm.run(&contributed.line(&format!("sbatch {script}")));
    assert!(submitted.status.success(), "{}", printed(&submitted));
    contributed.nodes(0);
    let batch = contributed.fields("BatchHost");
    let batch = batch.first().and_then(|host| host.strip_prefix("node")?.parse::<usize>().ok());
    contributed.slurm.network.vanish(batch.expect("a node") - 1);
    let then = contributed.nodes(1);
    assert!(!then.contains(&(batch.expect("a node") - 1)), "{then:?}");
    contributed.slurm.stage().mark("end");
    processes::wait_until("the end of Slurm's job", || contributed.fields("JobState") == ["CANCELLED"]);
    let verdict = std::fs::read_dir(contributed.slurm.stage().work()).expect("a directory").flatten();
    let verdict = verdict.map(|entry| entry.path()).find(|path| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("mainstay-verdict."))
    });
    let verdict = std::fs::read(verdict.expect("launchers have written the result")).expect("a file");
    let verdict: serde_json::Value = serde_json::from_slice(&verdict).expect("JSON");
    assert_eq!(verdict["exit"], 0, "{verdict}");
}

#[test]
fn a_lost_host_of_array_sbatch_is_replaced_and_a_task_that_starts_after_the_end_ends_too() {
    if !can_run_contributed() {
        return;
    }
    let contributed = Contributed::start();
    let script = contributed.script("array.sbatch");
    let submitted = contributed.slurm.run(&contributed.line(&format!("sbatch {script}")));
    assert!(submitted.status.success(), "{}", printed(&submitted));
    let first = contributed.nodes(0);
    contributed.vanish(first[0]);
    let completed = || contributed.fields("JobState").iter().filter(|state| *state == "COMPLETED").count();
    processes::wait_until("the end of the three tasks that are left", || completed() == 3);
    // A task of the same array that starts later.
    let run = std::fs::read_dir(contributed.slurm.file("checkpoints/.mainstay-hosts")).expect("a directory");
    let run = run.flatten().next().expect("one job").file_name().to_string_lossy().into_owned();
    let array = run.strip_prefix("slurm-").expect("the name of an array");
    let node = (0..4).find(|node| *node != first[0]).expect("four") + 1;
    let late = contributed.slurm.run(
        &contributed.line(&format!("SLURM_ARRAY_JOB_ID={array} SLURMD_NODENAME=node{node} bash {script}")),
    );
    assert_eq!(late.status.code(), Some(0), "{}", printed(&late));
}

#[test]
fn a_job_of_login_sh_survives_the_loss_of_its_first_host() {
    if !can_run_contributed() {
        return;
    }
    let contributed = Contributed::start();
    let script = contributed.script("login.sh");
    let job = contributed.slurm.spawn(&contributed.line(&format!("exec bash {script}")));
    let first = contributed.nodes(0);
    contributed.vanish(first[0]);
    let output = job.wait_with_output().expect("our own child");
    assert!(output.status.success(), "{}", printed(&output));
}

fn has_mpirun() -> bool {
    let found = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.is_ok() || {
        skipped("there is no mpirun (Debian: openmpi-bin)");
        false
    }
}

#[test]
fn mpirun_starts_a_job_of_two_hosts_without_an_option() {
    if !has_torch() || !has_mpirun() {
        return;
    }
    if !is_root() {
        return skipped("only root can make network namespaces");
    }
    let (network, stage) = (Network::new(2), Stage::new());
    // A replacement for ssh. mpirun distinguishes its hosts by their names.
    let other = network.namespace(1);
    let agent =
        format!("#!/bin/sh\nshift\nexec ip netns exec {other} unshare --uts sh -c \"hostname node2; $*\"\n");
    let agent = stage.script("agent.sh", &agent);
    let script = stage.script("sums.py", SUMS);
    let mpirun = |hosts: &str, job: &str| {
        let line = format!(
            "hostname node1; exec mpirun --allow-run-as-root --mca plm_rsh_agent {agent} --host {hosts} {job}"
        );
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &network.namespace(0), "unshare", "--uts", "sh", "-c", &line]);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("MARKS", stage.marks()).env("HOME", stage.home()).current_dir(stage.work());
        command.output().expect("there is `ip`")
    };
    let (first, second) = (network.address(0), network.address(1));
    // mpirun's daemons pass on its own variables, -x passes on others.
    let job = format!("-x MARKS {}", run(&stage, "", &script));
    let output = mpirun(&format!("{first},{second}"), &job);
    assert_one_world(&stage, &output);
    let reported = printed(&output);
    for taken in ["2 (OMPI_COMM_WORLD_SIZE)", "1 (OMPI_COMM_WORLD_RANK)", &format!("{first}:")] {
        assert!(reported.contains(taken), "{taken}: {reported}");
    }

    let crowded = mpirun(&format!("{first}:2"), &job);
    assert_eq!(crowded.status.code(), Some(64), "{}", printed(&crowded));
    assert!(printed(&crowded).contains("OMPI_COMM_WORLD_LOCAL_SIZE=2"), "{}", printed(&crowded));
}
