use super::*;

fn variables(text: &str) -> Variables {
    let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn started(text: &str, given: &ExplicitOptions) -> Result<Start, String> {
    start(&variables(text), None, given).map_err(|refused| refused.to_string())
}

/// Hosts, node rank, endpoint and run id.
fn found(text: &str) -> (u32, u32, String, String) {
    let start = started(text, &ExplicitOptions::default()).expect(text);
    let (address, port) = start.endpoint.expect("an endpoint").value;
    let port = port.map_or(String::new(), |port| format!(":{port}"));
    let run_id = start.run_id.map_or(String::new(), |id| id.value);
    (start.hosts.expect("hosts").value, start.node_rank.expect("a node rank").value, address + &port, run_id)
}

fn exactly(hosts: u32) -> ExplicitOptions {
    ExplicitOptions { hosts: Some((hosts, hosts)), ..ExplicitOptions::default() }
}

const STEP: &str = "SLURM_JOB_ID=4711 SLURM_STEP_ID=2 SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=3 SLURM_NODEID=1 \
                    SLURM_PROCID=1 SLURM_STEP_NODELIST=gpu[07-08],login1";

const MPIRUN: &str = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=1 \
                      PMIX_NAMESPACE=903675905 PMIX_RANK=1 \
                      OMPI_MCA_orte_hnp_uri=903675904.0;tcp://10.0.0.1,172.17.0.1:60737;tcp6://[fd00::2]:35421 \
                      OMPI_MCA_orte_local_daemon_uri=903675904.1;tcp://10.0.0.2,172.17.0.1:1";

#[test]
fn a_task_of_a_slurm_step_is_a_host() {
    assert_eq!(found(STEP), (3, 1, "gpu07:16245".to_owned(), "slurm-4711.2".to_owned()));
    let without_node = STEP.replace("SLURM_NODEID=1 ", "");
    assert_eq!(found(&without_node).1, 1, "one task for each node");
    let older = "SLURM_JOB_ID=1 SLURM_STEPID=0 SLURM_NNODES=2 SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_NODEID=0 \
                 SLURM_JOB_NODELIST=a,b";
    assert_eq!(found(older), (2, 0, "a:15013".to_owned(), "slurm-1.0".to_owned()));
}

#[test]
fn one_host_is_started_as_without_slurm() {
    for text in [
        "SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=1 SLURM_NNODES=1",
        "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=3",
        "SLURM_JOB_ID=1 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_NODES=1 SLURM_PROCID=0",
        "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0",
        "OMPI_COMM_WORLD_SIZE=0 OMPI_COMM_WORLD_RANK=0",
        "PMIX_RANK=0",
        "JOB_COMPLETION_INDEX=7",
        "WORLD_SIZE=1 RANK=0 MASTER_ADDR=localhost",
        "WORLD_SIZE=8 MASTER_PORT=29500",
        "WORLD_SIZE=8 RANK=3 LOCAL_RANK=3",
        "WORLD_SIZE=8 RANK=3 LOCAL_RANK=3 MASTER_ADDR=a",
        "",
    ] {
        assert_eq!(started(text, &ExplicitOptions::default()), Ok(Start::default()), "{text}");
    }
    for text in [STEP, MPIRUN] {
        assert_eq!(started(text, &exactly(1)), Ok(Start::default()), "--nnodes 1 wins");
        let rank = format!("{text} TORCHELASTIC_RUN_ID=x");
        assert_eq!(started(&rank, &ExplicitOptions::default()), Ok(Start::default()), "within a rank");
    }
}

#[test]
fn a_step_may_end_with_a_lost_host_unless_srun_was_told_to_keep_it() {
    let first = STEP.replace("SLURM_NODEID=1 SLURM_PROCID=1", "SLURM_NODEID=0 SLURM_PROCID=0");
    assert!(may_end_with_a_host(&variables(&first)));
    let kept = format!("{first} SLURM_NO_KILL=set");
    let alone = "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0";
    for text in [STEP, &kept, alone, MPIRUN, "SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=4", ""] {
        assert!(!may_end_with_a_host(&variables(text)), "{text}");
    }
}

#[test]
fn a_batch_script_on_several_hosts_gets_a_hint_about_srun() {
    let batch = "SLURM_JOB_ID=2 SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_PROCID=0";
    let start = started(batch, &ExplicitOptions::default()).expect("a start");
    assert!(start.hint.as_deref().is_some_and(|hint| hint.starts_with("SLURM_JOB_NUM_NODES=2, but srun")));
    assert_eq!(Start { hint: None, ..start }, Start::default());
    assert_eq!(started(batch, &exactly(2)), Ok(Start::default()), "whoever counts hosts knows");
}

#[test]
fn options_win_over_slurm() {
    let numbered = ExplicitOptions { node_rank: Some(0), ..exactly(3) };
    let start = started(STEP, &numbered).expect("a start");
    assert_eq!((start.hosts, start.node_rank, start.is_endpoint), (None, None, Some(true)));
    let addressed = ExplicitOptions { has_address: true, is_numbered: Some(true), ..exactly(3) };
    let start = started(STEP, &addressed).expect("a start");
    assert_eq!((start.node_rank.map(|rank| rank.value), start.endpoint), (Some(1), None));
    let elastic = ExplicitOptions { hosts: Some((1, 4)), ..ExplicitOptions::default() };
    let start = started(STEP, &elastic).expect("a start");
    assert_eq!((start.hosts, start.node_rank, start.is_endpoint), (None, None, Some(false)));
    assert_eq!(start.endpoint.expect("an endpoint").value, ("gpu07".to_owned(), Some(16_245)));
    let complete = ExplicitOptions {
        hosts: Some((9, 9)),
        node_rank: Some(8),
        has_address: true,
        ..ExplicitOptions::default()
    };
    assert_eq!(started(STEP, &complete), Ok(Start::default()), "nothing is left to be found");
    let here = "SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0";
    let addressed = ExplicitOptions { has_address: true, is_numbered: Some(true), ..exactly(2) };
    assert_eq!(started(here, &addressed), Ok(Start::default()), "steps of one host each");
}

#[test]
fn hosts_beyond_those_of_the_job_are_spares_without_a_number() {
    for hosts in [(2, 2), (1, 2)] {
        let given = ExplicitOptions { hosts: Some(hosts), ..ExplicitOptions::default() };
        let start = started(STEP, &given).expect("a start");
        assert_eq!((start.hosts, start.node_rank, start.is_endpoint), (None, None, Some(false)));
        assert_eq!(start.endpoint.expect("an endpoint").value, ("gpu07".to_owned(), Some(16_245)));
    }
}

#[test]
fn the_tasks_of_an_array_share_the_name_of_the_array() {
    let task =
        "SLURM_JOB_ID=81 SLURM_ARRAY_JOB_ID=80 SLURM_ARRAY_TASK_ID=1 SLURM_JOB_NUM_NODES=1 SLURM_NNODES=1";
    let given = ExplicitOptions { has_address: true, is_numbered: Some(false), ..exactly(3) };
    let name = Sourced::new("slurm-80".to_owned(), "SLURM_ARRAY_JOB_ID");
    let named = Start { run_id: Some(name), runs_once: true, ..Start::default() };
    assert_eq!(started(task, &given), Ok(named.clone()));
    let step = format!("{task} SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0");
    assert_eq!(started(&step, &given), Ok(named.clone()), "also within srun");
    let numbered = ExplicitOptions { is_numbered: Some(true), ..given.clone() };
    assert_eq!(started(&step, &numbered), Ok(named.clone()));
    let unaddressed = format!("{task} SLURMD_NODENAME=gpu07");
    let meets = Some(("gpu07".to_owned(), 15_160));
    assert_eq!(
        started(&unaddressed, &exactly(3)),
        Ok(Start { meets, ..named.clone() }),
        "they agree on a place"
    );
    assert_eq!(started(&unaddressed, &given), Ok(named));
    for one_host in [exactly(1), ExplicitOptions::default()] {
        assert_eq!(started(&step, &one_host), Ok(Start::default()), "each task is a job");
    }
    let of_many = format!("{STEP} SLURM_ARRAY_JOB_ID=80");
    let start = started(&of_many, &ExplicitOptions::default()).expect("a start");
    assert_eq!((start.run_id.map(|id| id.value).as_deref(), start.runs_once), (Some("slurm-4711.2"), false));
}

#[test]
fn a_process_of_mpirun_is_a_host() {
    let name = "mpi-903675905".to_owned();
    let (hosts, node, endpoint, run_id) = found(MPIRUN);
    assert_eq!((hosts, node, run_id), (2, 1, name));
    assert!(endpoint.starts_with("10.0.0.1:"), "{endpoint}");
    let within_slurm = format!("{MPIRUN} SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_NODES=1");
    assert_eq!(found(&within_slurm), found(MPIRUN), "its daemons are tasks of Slurm");
    let passed_on = format!("{MPIRUN} MASTER_ADDR=a MASTER_PORT=7");
    assert_eq!(found(&passed_on).2, "a:7");
    let hydra = "PMI_SIZE=2 PMI_RANK=1 MPI_LOCALNRANKS=1 MASTER_ADDR=a SLURM_STEP_ID=0 SLURM_PROCID=1";
    assert_eq!(found(hydra), (2, 1, "a".to_owned(), String::new()));
}

#[test]
fn pods_are_hosts() {
    let workers = "WORLD_SIZE=2 RANK=1 MASTER_ADDR=job-master-0 MASTER_PORT=23456";
    assert_eq!(found(workers), (2, 1, "job-master-0:23456".to_owned(), String::new()));
    let newer = "WORLD_SIZE=16 RANK=1 MASTER_ADDR=job-master-0";
    let start = started(newer, &ExplicitOptions { ranks: Some(8), ..exactly(2) }).expect("a start");
    assert_eq!(start.node_rank.map(|rank| rank.value), Some(1));
    let set = "JOB_COMPLETION_INDEX=3 JOBSET_NAME=llm REPLICATED_JOB_NAME=workers";
    let start = started(set, &exactly(4)).expect("a start");
    assert_eq!(start.node_rank, Some(Sourced::new(3, "JOB_COMPLETION_INDEX")));
    assert_eq!(start.endpoint, Some(Sourced::new(("llm-workers-0-0.llm".to_owned(), None), "JOBSET_NAME")));
    let index = variables("JOB_COMPLETION_INDEX=3");
    let start = start_of(&index, "train-3.train.team.svc.cluster.local");
    assert_eq!(start.endpoint.expect("an endpoint").value.0, "train-0.train.team.svc.cluster.local");
}

fn start_of(index: &Variables, full_name: &str) -> Start {
    start(index, Some(full_name), &exactly(4)).expect("a start")
}

#[test]
fn the_full_name_of_a_pod_is_in_its_file_of_hosts() {
    let file =
        "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n10.1.2.3\ttrain-3.train.team.svc\ttrain-3\n";
    assert_eq!(full_name(file, "train-3").as_deref(), Some("train-3.train.team.svc"));
    assert_eq!(full_name(file, "localhost"), None);
}

#[test]
fn contradictory_or_missing_variables_are_named() {
    let two = exactly(2);
    let none = ExplicitOptions::default();
    for (text, given, reported) in [
        (STEP.replace("TASKS=3", "TASKS=24"), &none, "SLURM_STEP_NUM_TASKS=24"),
        (STEP.replace("login1", "login[1-2]"), &none, "SLURM_STEP_NODELIST=gpu[07-08],login[1-2]"),
        (STEP.replace("[07-08]", "[07-08"), &none, "SLURM_STEP_NODELIST=gpu[07-08,login1: "),
        (STEP.replace("SLURM_STEP_NODELIST", "X"), &none, "SLURM_STEP_NODELIST "),
        (STEP.replace("SLURM_STEP_NUM_NODES", "X"), &none, "SLURM_STEP_NUM_NODES "),
        (STEP.replace("NODEID=1", "NODEID=3"), &none, "SLURM_NODEID=3"),
        (STEP.replace("NODEID=1", "NODEID=one"), &none, "SLURM_NODEID=one"),
        (format!("{STEP} SLURM_HET_SIZE=2"), &none, "SLURM_HET_SIZE=2"),
        (STEP.to_owned(), &exactly(4), "--nnodes 4"),
        (STEP.to_owned(), &ExplicitOptions { is_numbered: Some(true), ..exactly(2) }, "--nnodes 2"),
        (MPIRUN.replace("LOCAL_SIZE=1", "LOCAL_SIZE=2"), &none, "OMPI_COMM_WORLD_LOCAL_SIZE=2"),
        (MPIRUN.replace("OMPI_COMM_WORLD_RANK", "X"), &none, "OMPI_COMM_WORLD_RANK "),
        (MPIRUN.replace("RANK=1", "RANK=0"), &none, "OMPI_MCA_orte_hnp_uri"),
        (MPIRUN.replace("orte_hnp", "x"), &none, "-x MASTER_ADDR=HOST"),
        ("PMI_SIZE=2 PMI_RANK=0".to_owned(), &none, "PMI_RANK=0"),
        ("PMI_SIZE=2 MASTER_ADDR=a".to_owned(), &none, "PMI_RANK "),
        ("PMI_SIZE=8 PMI_RANK=0 PMI_LOCAL_SIZE=4".to_owned(), &none, "PMI_LOCAL_SIZE=4"),
        ("WORLD_SIZE=2 RANK=1".to_owned(), &none, "WORLD_SIZE=2 and RANK=1"),
        ("WORLD_SIZE=2 MASTER_ADDR=a".to_owned(), &none, "WORLD_SIZE=2 and MASTER_ADDR"),
        ("WORLD_SIZE=2 RANK=2 MASTER_ADDR=a".to_owned(), &none, "RANK=2"),
        ("WORLD_SIZE=3 RANK=1 MASTER_ADDR=a".to_owned(), &two, "--nnodes 2"),
        ("JOB_COMPLETION_INDEX=1".to_owned(), &two, "JOB_COMPLETION_INDEX=1"),
        ("JOB_COMPLETION_INDEX=0 JOB_INDEX=1 MASTER_ADDR=a".to_owned(), &two, "PET_NODE_RANK"),
        ("JOB_COMPLETION_INDEX=0 JOBSET_NAME=a REPLICATED_JOB_NAME=b".to_owned(), &none, "PET_NNODES "),
    ] {
        let error = started(&text, given).expect_err(&text);
        assert!(error.contains(reported), "{text}: {error}");
        testing::snapshot!("cluster", format!("{reported}: {text}"), error);
    }
    let ranks = ExplicitOptions { ranks: Some(8), ..ExplicitOptions::default() };
    let error = started("WORLD_SIZE=16 RANK=1 MASTER_ADDR=a PET_NPROC_PER_NODE=8", &ranks)
        .expect_err("pods or ranks");
    assert!(error.contains("set PET_NNODES"), "{error}");
}

const NAMES: [&str; 24] = [
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_MCA_orte_hnp_uri",
    "PMI_SIZE",
    "PMI_RANK",
    "PMIX_RANK",
    "JOB_COMPLETION_INDEX",
    "JOBSET_NAME",
    "REPLICATED_JOB_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
];
const VALUES: [&str; 10] =
    ["", "0", "1", "2", "3", "4294967295", "x", "node[1-2]", "a,b,c", "1.0;tcp://10.0.0.1:1"];

proptest::proptest! {
    #[test]
    fn in_any_environment_a_host_has_a_number_a_job_and_an_endpoint(
        chosen in proptest::collection::vec(proptest::option::of(0..VALUES.len()), NAMES.len()),
        hosts in proptest::option::of((1u32..4, 0u32..3)),
        node_rank in proptest::option::of(0u32..4),
        has_address: bool,
    ) {
        let variables: Variables = NAMES
            .iter()
            .zip(chosen)
            .filter_map(|(name, value)| Some(((*name).to_owned(), VALUES[value?].to_owned())))
            .collect();
        let hosts = hosts.map(|(least, more)| (least, least + more));
        let given = ExplicitOptions { hosts, node_rank, has_address, ..ExplicitOptions::default() };
        if let Ok(start) = start(&variables, None, &given)
            && start != (Start { hint: start.hint.clone(), ..Start::default() })
        {
            let most = start.hosts.map(|hosts| hosts.value).or(hosts.map(|(_, most)| most));
            let most = most.expect("a number of hosts");
            proptest::prop_assert!(most > 1);
            proptest::prop_assert!(start.node_rank.is_none_or(|rank| rank.value < most && node_rank.is_none()));
            proptest::prop_assert!(start.endpoint.is_some() != has_address);
        }
    }
}
