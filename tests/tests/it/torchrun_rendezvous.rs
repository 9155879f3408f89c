//! Where the ranks of torchrun's command lines meet: at a fixed address, and where an elastic job starts with fewer hosts than it may
//! have. Other options of torchrun are in `torchrun.rs`.

use mainstay_tests::{Job, Stage, has_torch};
use testing::free_port;

#[test]
fn ranks_meet_at_a_fixed_address_by_tcp_and_by_the_environment() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=RANK, world_size=int(os.environ["WORLD_SIZE"]))
total = torch.ones(1)
dist.all_reduce(total)
mark(f"{sys.argv[1][:3]}.{RANK}", f"{int(total)} {os.environ['MASTER_PORT']} {dist.is_torchelastic_launched()}")
dist.destroy_process_group()
"#;
    for method in ["tcp", "env"] {
        let port = free_port();
        let url = if method == "tcp" { format!("tcp://localhost:{port}") } else { "env://".to_owned() };
        let options =
            format!("--run-path --node-rank=0 --master-addr=localhost --master-port={port} --max-restarts=0");
        let job = stage.python(script).arguments(&[&url]).ranks(2).options(&options).start();
        for rank in 0..2 {
            assert_eq!(job.mark(&format!("{method}.{rank}")), format!("2 {port} True"), "rank {rank}");
        }
        job.end().assert_status(0);
    }
}

/// One launcher of a job of one or two hosts.
fn elastic(stage: &Stage, id: &str, port: u16, last_call: u32, script: &str) -> Job {
    let options = format!(
        "--nnodes=1:2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} \
         --rdzv-conf=join_timeout=60,last_call_timeout={last_call},timeout=5 --max-restarts=0"
    );
    stage.sh(script).named(id).options(&options).start()
}

#[test]
fn an_elastic_job_starts_with_the_fewest_hosts_when_no_other_comes() {
    let stage = Stage::new();
    let job = elastic(
        &stage,
        "alone-of-two",
        free_port(),
        1,
        r#"mark "ran.$RANK" "$WORLD_SIZE $GROUP_WORLD_SIZE""#,
    );
    assert_eq!((job.mark("ran.0"), job.mark("ran.1")), ("2 1".to_owned(), "2 1".to_owned()));
    job.end().assert_status(0);
    let failed = elastic(&stage, "alone-and-failing", free_port(), 1, "exit 3").end();
    failed.assert_status(3);
    assert_eq!(failed.summary().attempts, 1, "{failed}");
}

#[test]
fn two_launchers_of_an_elastic_job_are_one_world() {
    let (first, second) = (Stage::new(), Stage::new());
    let (port, script) = (free_port(), r#"mark "ran.$RANK" "$WORLD_SIZE""#);
    // It accepts the second host, however late: the last call is longer than the test may last.
    let jobs = [&first, &second].map(|stage| elastic(stage, "both-of-two", port, 3_600, script));
    // Processes of both have the same job in their names: leftovers are checked when both have ended.
    assert!(jobs.iter().all(Job::has_ended));
    for job in jobs {
        job.end().assert_status(0);
    }
    let ran = |stage: &Stage| {
        let mut marks: Vec<String> = std::fs::read_dir(stage.marks())
            .expect("a directory")
            .filter_map(|mark| mark.ok()?.file_name().into_string().ok())
            .collect();
        marks.sort();
        marks
    };
    let mut all = [ran(&first), ran(&second)];
    all.sort();
    assert_eq!(all, [["ran.0", "ran.1"], ["ran.2", "ran.3"]]);
}
