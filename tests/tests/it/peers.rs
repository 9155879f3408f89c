//! Real agents on separate loopback addresses keep replicas of each other's shards. Owners and holders are killed,
//! disks are lost, and a job on another host continues from the newest whole step.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "in a test, a panic is the report"
)]

use crate::hosts;

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use hosts::{Hosts, ckpt, json};
use mainstay_checkpoint_format::{
    CHUNK_BYTES, Chunks, Identity, MANIFEST_NAME, Manifest, SealedFile, SharedContent, chunk_sum,
};
use mainstay_tests::{Agent, Stage, mainstay, processes};
use twox_hash::XxHash3_128;

fn bytes(rank: u32, size: usize) -> Vec<u8> {
    let words =
        (0..size as u64 / 8).map(|word| (word ^ u64::from(rank) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

/// Seals the shards of a step as the ranks of a job do.
pub fn save(directory: &Path, run: &str, step: u64, world: u32, size: usize) {
    (0..world).for_each(|rank| save_rank(directory, run, (step, rank, world), size, None));
}

fn save_rank(
    directory: &Path,
    run: &str,
    (step, rank, world): (u64, u32, u32),
    size: usize,
    shared_content: Option<SharedContent>,
) {
    let content = bytes(rank, size);
    let manifest = Manifest {
        identity: Identity { job: run.to_owned(), attempt: 0, step, rank, world_size: world },
        run: run.to_owned(),
        created_unix_s: 1_700_000_000,
        serialisation: "safetensors".to_owned(),
        software: Default::default(),
        file: SealedFile {
            name: "state.safetensors".to_owned(),
            size: content.len() as u64,
            xxh3_128: XxHash3_128::oneshot(&content),
        },
        chunks: Some(Chunks {
            bytes: CHUNK_BYTES,
            sums: content.chunks(CHUNK_BYTES as usize).map(chunk_sum).collect(),
        }),
        shared_content,
    };
    let home = directory.join(format!("step-{step:012}/rank-{rank:05}"));
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("state.safetensors"), &content).unwrap();
    fs::write(home.join(MANIFEST_NAME), manifest.encode()).unwrap();
}

pub fn assert_is_in(directory: &Path, step: u64, world: u32, size: usize) {
    for rank in 0..world {
        let found = directory.join(format!("step-{step:012}/rank-{rank:05}/state.safetensors"));
        assert!(fs::read(&found).unwrap() == bytes(rank, size), "{} is as it was saved", found.display());
    }
}

#[test]
fn a_job_on_another_host_goes_on_from_what_a_lost_host_had_saved() {
    let hosts = Hosts::new(0, 3, &[]);
    let agents: Vec<Agent> = (0..3).map(|host| hosts.agent(host)).collect();
    let (run, size) = ("run-a", 9 << 20);
    let owned = hosts.directory(0);
    save(&owned, run, 40, 2, size);
    let pushed = ckpt(&agents[0], &["push", run, &owned.display().to_string(), "--wait", "90", "--json"]);
    assert_eq!(json(&pushed)["copies"], 2, "{}", String::from_utf8_lossy(&pushed.stderr));

    // The host is lost with its disk; the test does not know which of the others holds the replicas.
    let mut agents = agents.into_iter();
    agents.next().unwrap().kill();
    fs::remove_dir_all(&owned).unwrap();
    let others: Vec<Agent> = agents.collect();
    let place = hosts.directory(2);
    let job = hosts.stages[2]
        .sh("mark loaded; exit 0")
        .with(&others[1])
        .own_paths()
        .options(&format!(
            "--rdzv-id {run} --resume-from {run} --log-dir {} --runtime-dir {} --checkpoint-dir {}",
            hosts.stages[2].logs().display(),
            hosts.stages[2].tmpfs().display(),
            place.display()
        ))
        .start();
    let end = job.end();
    end.assert_status(0).assert_printed("checkpoint: step 40");
    assert_is_in(&place, 40, 2, size);

    let listed = json(&ckpt(&others[1], &["ls", "--run", run, "--json"]));
    assert_eq!(
        (&listed["steps"][0]["step"], &listed["steps"][0]["whole"]),
        (&40.into(), &true.into()),
        "{listed}"
    );
    let verified = Command::new(mainstay()).args(["ckpt", "verify", "--json"]).arg(&place).output().unwrap();
    assert_eq!((verified.status.code(), &json(&verified)["good"]), (Some(0), &2.into()));
    // The shard whose replica was on this host is replicated again.
    processes::wait_until("both shards on both hosts", || {
        json(&ckpt(&others[1], &["ls", "--run", run, "--json"]))["steps"][0]["least_copies"] == 2
    });
    // A flipped bit is found without an agent.
    let shard = place.join("step-000000000040/rank-00001/state.safetensors");
    let mut content = fs::read(&shard).unwrap();
    content[5 << 20] ^= 1;
    fs::write(&shard, content).unwrap();
    let verified = Command::new(mainstay()).args(["ckpt", "verify"]).arg(&place).output().unwrap();
    assert_eq!(verified.status.code(), Some(2));
    let damaged = String::from_utf8_lossy(&verified.stdout).replace(&place.display().to_string(), "PLACE");
    testing::snapshot!("ckpt", "verify: a damaged shard", damaged);
    // And repaired from a peer.
    let pulled = ckpt(&others[1], &["pull", run, &place.display().to_string(), "--json"]);
    assert_eq!(json(&pulled)["step"], 40);
    assert_is_in(&place, 40, 2, size);
}

#[test]
fn a_holder_that_is_killed_in_the_middle_is_replaced_by_another() {
    // Slow enough that the transfer takes seconds.
    let hosts = Hosts::new(1, 3, &["RATE_LIMIT=4MiB"]);
    let owner = hosts.agent(0);
    let mut holders: Vec<Option<Agent>> = vec![None, Some(hosts.agent(1)), Some(hosts.agent(2))];
    let (run, size) = ("run-b", 24 << 20);
    let directory = hosts.directory(0);
    save(&directory, run, 1, 1, size);
    assert_eq!(
        ckpt(&owner, &["push", run, &directory.display().to_string(), "--wait", "0"]).status.code(),
        Some(1)
    );
    processes::wait_until("a holder that takes chunks", || hosts.has_started(1) || hosts.has_started(2));
    let killed = if hosts.has_started(1) { 1 } else { 2 };
    holders[killed].take().unwrap().kill();
    let pushed = ckpt(&owner, &["push", run, &directory.display().to_string(), "--wait", "100", "--json"]);
    assert_eq!(json(&pushed)["copies"], 2);
    let other = 3 - killed;
    let kept = json(&ckpt(holders[other].as_ref().unwrap(), &["show", "1", "--run", run, "--json"]));
    let copies = kept["steps"][0]["copies"].as_array().unwrap();
    assert!(copies.iter().any(|copy| copy["holder"] == hosts.names[other].as_str()), "{kept}");
}

#[test]
fn an_owner_that_is_killed_in_the_middle_goes_on_where_it_was() {
    let hosts = Hosts::new(2, 2, &["RATE_LIMIT=4MiB"]);
    let owner = hosts.agent(0);
    let holder = hosts.agent(1);
    let (run, size) = ("run-c", 24 << 20);
    let directory = hosts.directory(0);
    save(&directory, run, 1, 1, size);
    ckpt(&owner, &["push", run, &directory.display().to_string(), "--wait", "0"]);
    processes::wait_until("a holder that takes chunks", || hosts.has_started(1));
    owner.kill();
    // It finds by itself what it watched, without another request.
    let owner = hosts.agent(0);
    processes::wait_until("a replica", || {
        json(&ckpt(&holder, &["ls", "--run", run, "--json"]))["steps"][0]["least_copies"] == 2
    });
    drop(owner);
    let place = hosts.directory(1);
    let pulled = ckpt(&holder, &["pull", run, &place.display().to_string(), "--json"]);
    assert_eq!(json(&pulled)["shards_here"], 1, "from its own store");
    assert_is_in(&place, 1, 1, size);
}

#[test]
fn a_step_that_is_removed_is_gone_everywhere_and_the_next_stays() {
    let hosts = Hosts::new(6, 2, &[]);
    let agents: Vec<Agent> = (0..2).map(|host| hosts.agent(host)).collect();
    let (run, owned, size) = ("run-r", hosts.directory(0), 1 << 20);
    let push = || ckpt(&agents[0], &["push", run, &owned.display().to_string(), "--wait", "90", "--json"]);
    for step in [10, 20] {
        save(&owned, run, step, 1, size);
        assert_eq!(json(&push())["copies"], 2);
    }
    let steps = |agent: &Agent| -> Vec<u64> {
        let listed = json(&ckpt(agent, &["ls", "--run", run, "--json"]));
        listed["steps"].as_array().unwrap().iter().map(|of| of["step"].as_u64().unwrap()).collect()
    };
    assert_eq!(steps(&agents[1]).len(), 2);
    // There is nothing to collect.
    let collected = ckpt(&agents[1], &["gc", "--json"]);
    assert_eq!((collected.status.code(), &json(&collected)["replicas"]), (Some(0), &0.into()));
    assert_eq!(steps(&agents[1]).len(), 2);

    // An agent that has only the replica shows no certificate: it must not delete what ranks of another host wrote.
    let refused = ckpt(&agents[1], &["rm", run, "10", "--json"]);
    assert!(!refused.status.success());
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(printed.contains(&format!("ranks on {} wrote step 10", hosts.names[0])), "{printed}");
    assert_eq!(steps(&agents[1]).len(), 2);
    let removed = ckpt(&agents[0], &["rm", run, "10", "--json"]);
    assert_eq!((removed.status.code(), &json(&removed)["copies"]), (Some(0), &2.into()));
    assert!(!owned.join("step-000000000010").exists(), "the owner's own copy too");
    for agent in &agents {
        processes::wait_until("only one step is known", || steps(agent) == [20]);
    }
    let again = ckpt(&agents[1], &["rm", run, "10", "--json"]);
    assert_eq!((again.status.code(), &json(&again)["copies"]), (Some(0), &0.into()));
    let place = hosts.directory(1);
    let pulled = ckpt(&agents[1], &["pull", run, &place.display().to_string(), "--json"]);
    assert_eq!(json(&pulled)["step"], 20);
    assert_is_in(&place, 20, 1, size);
}

/// For each host keys of `checkpoint` that name certificates of one authority.
fn certificates(hosts: &Hosts) -> Vec<String> {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap().pem();
    let issuer = rcgen::Issuer::new(params, key);
    let of_host = |(name, stage): (&String, &Stage)| {
        let host = name.rsplit_once(':').unwrap().0.to_owned();
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate =
            rcgen::CertificateParams::new(vec![host]).unwrap().signed_by(&key, &issuer).unwrap();
        let files =
            [("tls.crt", certificate.pem()), ("tls.key", key.serialize_pem()), ("ca.crt", authority.clone())];
        for (name, text) in files {
            let path = stage.work().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        format!("TLS={}", stage.work().display())
    };
    hosts.names.iter().zip(&hosts.stages).map(of_host).collect()
}

#[test]
fn agents_with_certificates_keep_replicas_and_one_without_is_no_peer_of_theirs() {
    let hosts = Hosts::new(3, 3, &[]);
    let certificates = certificates(&hosts);
    let with = |host: usize| -> Agent { hosts.agent_with(host, &[&certificates[host]]) };
    let (owner, holder, plain) = (with(0), with(1), hosts.agent(2));
    let (run, size) = ("run-tls", 5 << 20);
    let directory = hosts.directory(0);
    save(&directory, run, 7, 1, size);
    let pushed = ckpt(&owner, &["push", run, &directory.display().to_string(), "--wait", "90", "--json"]);
    assert_eq!(json(&pushed)["copies"], 2, "{}", String::from_utf8_lossy(&pushed.stderr));
    let place = hosts.directory(1);
    let pulled = ckpt(&holder, &["pull", run, &place.display().to_string(), "--json"]);
    assert_eq!(json(&pulled)["step"], 7);
    assert_is_in(&place, 7, 1, size);
    // Each side reports what to do about the other.
    for (agent, peer, case) in [(&plain, 0, "a peer with TLS"), (&owner, 2, "a peer without TLS")] {
        let why = || {
            let listed = json(&ckpt(agent, &["ls", "--json"]));
            let peers = listed["peers"].as_array()?;
            let peer = peers.iter().find(|known| known["name"] == hosts.names[peer].as_str())?;
            peer["error"].as_str().filter(|why| why.contains("TLS")).map(str::to_owned)
        };
        processes::wait_until(case, || why().is_some());
        testing::snapshot!("ckpt", case, why().expect("it is still so").replace(&hosts.names[peer], "PEER"));
    }
    assert!(json(&ckpt(&plain, &["ls", "--json"]))["steps"].as_array().is_none_or(Vec::is_empty));
}

#[test]
fn an_agent_with_an_unusable_certificate_names_its_key() {
    let hosts = Hosts::new(4, 1, &[]);
    let certificates = certificates(&hosts);
    let key = hosts.stages[0].work().join("tls.key");
    fs::write(&key, "no key").unwrap();
    let mut command = Command::new(mainstay());
    let (name, value) = certificates[0].split_once('=').unwrap();
    command.env(format!("MAINSTAY_AGENT_CHECKPOINT_{name}"), value);
    let state = hosts.stages[0].work().join("state");
    let printed = command
        .env("MAINSTAY_AGENT_CHECKPOINT_LISTEN", &hosts.names[0])
        .args(["agent", "--state-dir"])
        .arg(&state)
        .arg("--socket")
        .arg(hosts.stages[0].tmpfs().join("agent.sock"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&printed.stderr);
    assert!(!printed.status.success());
    assert!(text.contains("checkpoint.tls") && text.contains(&key.display().to_string()), "{text}");
}

#[test]
fn a_directory_is_listed_without_an_agent_and_an_agent_without_peers_reports_it() {
    let stage = Stage::new();
    let directory = stage.work().join("checkpoints");
    save(&directory, "run-d", 7, 2, 1 << 20);
    fs::remove_file(directory.join("step-000000000007/rank-00001").join(MANIFEST_NAME)).unwrap();
    let listed =
        Command::new(mainstay()).args(["ckpt", "ls", "--json", "--dir"]).arg(&directory).output().unwrap();
    assert_eq!(listed.status.code(), Some(1), "a step is there, and it is not whole");
    assert_eq!(json(&listed)["steps"][0]["missing_ranks"], serde_json::json!([1]));
    let agent = stage.agent();
    let asked = ckpt(&agent, &["ls"]);
    assert_eq!(asked.status.code(), Some(3));
    testing::snapshot!(
        "ckpt",
        "an agent that keeps no copies",
        stage.masked(&String::from_utf8_lossy(&asked.stderr))
    );
}

#[test]
fn ranks_of_two_hosts_that_should_have_saved_the_same_and_did_not_are_reported_on_both() {
    let hosts = Hosts::new(7, 2, &[]);
    let agents: Vec<Agent> = (0..2).map(|host| hosts.agent(host)).collect();
    let run = "run-u";
    let push = |host: usize, step: u64, content: char| {
        let directory = hosts.directory(host);
        let rank = host as u32;
        save_in_group(&directory, run, step, rank, content);
        ckpt(&agents[host], &["push", run, &directory.display().to_string(), "--wait", "0"]);
    };
    push(0, 3, 'a');
    push(1, 3, 'a');
    push(0, 4, 'a');
    push(1, 4, 'b');
    let headline = format!(
        "step 4 of {run}: rank 0 on {}, rank 1 on {} save the same (dp) and saved different bytes",
        hosts.names[0], hosts.names[1]
    );
    for agent in &agents {
        let listed = || json(&ckpt(agent, &["ls", "--run", run, "--json"]));
        processes::wait_until("the finding", || !listed()["unlike"].as_array().unwrap().is_empty());
        let found = listed()["unlike"].clone();
        assert_eq!((found.as_array().unwrap().len(), &found[0]["step"]), (1, &4.into()), "{found}");
        assert!(found[0]["headline"].as_str().unwrap().starts_with(&headline), "{found}");
        let shown = ckpt(agent, &["ls", "--run", run]);
        assert!(String::from_utf8_lossy(&shown.stdout).contains(&headline));
        let reported = || {
            let events = Command::new(mainstay())
                .args(["events", "--json", "--socket"])
                .arg(agent.socket())
                .output()
                .unwrap();
            String::from_utf8_lossy(&events.stdout).into_owned()
        };
        processes::wait_until("the journal", || reported().contains("replicas_differ"));
        assert!(reported().contains(&headline), "{}", reported());
    }
}

#[test]
fn a_host_that_lost_a_gpu_keeps_no_replicas_until_an_operator_takes_it_on_himself() {
    let hosts = Hosts::new(8, 3, &[]);
    let agents: Vec<Agent> = (0..3).map(|host| hosts.agent(host)).collect();
    let (run, size) = ("run-x", 1 << 20);
    let directory = hosts.directory(0);
    save(&directory, run, 1, 1, size);
    let pushed = ckpt(&agents[0], &["push", run, &directory.display().to_string(), "--wait", "90", "--json"]);
    assert_eq!(json(&pushed)["copies"], 2, "{}", String::from_utf8_lossy(&pushed.stderr));
    let listed = || json(&ckpt(&agents[0], &["ls", "--run", run, "--json"]));
    let holders = || -> Vec<String> {
        let copies = listed()["steps"][0]["copies"].as_array().unwrap().clone();
        copies.iter().map(|copy| copy["holder"].as_str().unwrap().to_owned()).collect()
    };
    let held = holders();
    let holder = (1..3).find(|host| held.contains(&hosts.names[*host])).unwrap();
    let other = 3 - holder;
    assert!(!held.contains(&hosts.names[other]));
    let excluded = || {
        let peers = listed()["peers"].as_array().unwrap().clone();
        let found = peers.into_iter().find(|peer| peer["name"] == hosts.names[holder]);
        found.unwrap()["excluded"].as_str().map(str::to_owned)
    };
    assert_eq!(excluded(), None);

    let lost =
        "4,100,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.\n";
    let mut log = fs::File::options().append(true).open(hosts.kernel_log(holder)).unwrap();
    log.write_all(lost.as_bytes()).unwrap();
    processes::wait_until("a replica elsewhere", || holders().contains(&hosts.names[other]));
    assert!(excluded().unwrap().starts_with("gpu.0000:3b:00: "), "{:?}", excluded());
    let of_itself = json(&ckpt(&agents[holder], &["ls", "--json"]))["excluded"].clone();
    assert!(of_itself.as_str().unwrap().starts_with("gpu.0000:3b:00: "), "{of_itself}");

    let mut known = Command::new(mainstay());
    known
        .args(["ack", "gpu.0000:3b:00", "--reason", "it is not used", "--socket"])
        .arg(agents[holder].socket());
    assert!(known.output().unwrap().status.success());
    processes::wait_until("the host to be back", || excluded().is_none());
}

/// Seals a shard that other ranks should have saved as well.
fn save_in_group(directory: &Path, run: &str, step: u64, rank: u32, content: char) {
    save_rank(
        directory,
        run,
        (step, rank, 2),
        1 << 20,
        Some(SharedContent { group: "dp".to_owned(), root: content.to_string().repeat(64) }),
    );
}
