//! Checkpoints of jobs of several hosts that share no directory: launchers keep copies for each other.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use mainstay_checkpoint::copied_step::CopiedStep;
use mainstay_model::entry::Fact;
use mainstay_tests::{End, Job, has_client, has_torch, is_root, journal, skipped};

use super::assert_undisturbed;
use super::cluster::Cluster;
use crate::ddp::DDP;

/// Twelve steps with a save after each. Ranks wait before step 8 of the attempts that are named in WAITS.
const SAVES_EACH: &str = r#"
import mainstay
saved = mainstay.checkpoint.load()
begin, value = (0, 0) if saved is None else (saved["step"] + 1, saved["value"])
mark(f"from.{ATTEMPT}.{RANK}", begin)
for step in range(begin, 12):
    if step == 8 and str(ATTEMPT) in os.environ.get("WAITS", "").split(","):
        mark(f"waits.{ATTEMPT}.{RANK}")
        wait_for(f"go.{ATTEMPT}")
    value = (value * 31 + step * (RANK + 1)) % 1_000_003
    mainstay.step(step, loss=1.0)
    assert mainstay.checkpoint.save(step, {"step": step, "value": value})
mark(f"final.{RANK}", value)
"#;

/// The final value of an undisturbed rank.
fn undisturbed(rank: u64) -> String {
    (0..12).fold(0, |value: u64, step| (value * 31 + step * (rank + 1)) % 1_000_003).to_string()
}

fn all_wait(jobs: &[Job]) {
    for rank in 0..4 {
        jobs[rank / 2].mark(&format!("waits.0.{rank}"));
    }
}

/// Kills the launcher of the second host with all its ranks; a host with empty memory and disk takes its place.
fn replace_second(cluster: &Cluster, jobs: &mut Vec<Job>, script: &str, options: &str) {
    let lost = jobs.remove(1);
    lost.lose_launcher();
    jobs[0].wait_for_event("host_awaited");
    jobs.push(cluster.start_host_as(2, script, &format!("--nnodes 2 --node-rank 1 {options}"), &[]));
}

/// From which step the ranks of the second attempt went on: the same for all.
fn went_on_from(cluster: &Cluster, hosts: [usize; 2]) -> u64 {
    let from: Vec<String> =
        (0..4).map(|rank| cluster.read(hosts[rank / 2], &format!("from.1.{rank}"))).collect();
    assert!(from.iter().all(|of| *of == from[0]), "one step for all ranks: {from:?}");
    from[0].parse().expect("a step")
}

fn assert_finals(cluster: &Cluster, hosts: [usize; 2], ends: &[End]) {
    for rank in 0..4_usize {
        let last = cluster.read(hosts[rank / 2], &format!("final.{rank}"));
        assert_eq!(last, undisturbed(rank as u64), "rank {rank}\n{}\n{}", ends[0], ends[1]);
    }
}

#[test]
fn a_killed_rank_goes_on_from_the_newest_step_in_memory_on_all_hosts() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(2).sharing_nothing();
    let jobs = cluster.start(SAVES_EACH, "--nproc-per-node 2", &[("WAITS", "0")]);
    all_wait(&jobs);
    for (host, job) in jobs.iter().enumerate() {
        job.wait_for_fact(
            "copies",
            |fact| matches!(fact, Fact::Observed(seen) if CopiedStep::read(seen).is_some()),
        );
        let (_, status) = job.status(cluster.stage(host));
        let copied = &status["servers"][0]["jobs"][0]["copied_step"];
        assert!(copied["step"].is_u64() && copied["time"].is_string(), "host {host}: {status}");
        let screen = job.asked(cluster.stage(host), &["status"]);
        assert!(
            screen.contains("copies:") && screen.contains(&format!("step {}", copied["step"])),
            "{screen}"
        );
    }
    jobs[1].kill_rank(0, 3);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        let (_, copies) = end.line(&["encrypted"]).split_once("; ").expect("what is protected, and by what");
        testing::snapshot!("several_hosts", "copies in memory", copies);
        let chosen = journal::observed(&end.journal, "checkpoint_chosen").next().expect("a step");
        assert_eq!((&*chosen.values["step"], &*chosen.values["attempt"]), ("7", "0"), "{end}");
    }
    assert_eq!(went_on_from(&cluster, [0, 1]), 8);
    assert_finals(&cluster, [0, 1], &ends);
}

#[test]
fn a_host_that_takes_the_place_of_a_lost_one_gets_its_shards_from_the_memory_of_another() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(3).sharing_nothing();
    let options = "--nnodes 2 --nproc-per-node 2";
    let waits = [("WAITS", "0")];
    let mut jobs: Vec<Job> = (0..2)
        .map(|host| cluster.start_host_as(host, SAVES_EACH, &format!("{options} --node-rank {host}"), &waits))
        .collect();
    all_wait(&jobs);
    jobs[0].wait_for_event("step_copied");
    replace_second(&cluster, &mut jobs, SAVES_EACH, "--nproc-per-node 2");
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    // Fetched before the start, or sent as copies as soon as the new host was known.
    assert!(journal::observed(&ends[1].journal, "checkpoint_chosen").next().is_some(), "{}", ends[1]);
    assert!(went_on_from(&cluster, [0, 2]) > 0);
    assert_finals(&cluster, [0, 2], &ends);
}

/// All files of replicas that a host keeps, without their manifests.
fn replicas(below: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(below) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    let files = paths.flat_map(|path| if path.is_dir() { replicas(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_none_or(|extension| extension != "json")).collect()
}

/// The ranks whose shards a host keeps copies of, by the manifests next to them. A copy that goes while they are listed
/// may have a successor that was not listed: then they are listed again.
fn keeps_for(cluster: &Cluster, host: usize) -> BTreeSet<u64> {
    fn manifests(below: &Path) -> std::io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(below)? {
            let path = entry?.path();
            match fs::symlink_metadata(&path)?.is_dir() {
                true => found.extend(manifests(&path)?),
                false if path.extension().is_some_and(|extension| extension == "json") => found.push(path),
                false => {}
            }
        }
        Ok(found)
    }
    let ranks = || -> std::io::Result<BTreeSet<u64>> {
        let mut ranks = BTreeSet::new();
        for pool in fs::read_dir(cluster.stage(host).tmpfs().join("pools"))? {
            for path in manifests(&pool?.path().join("replicas"))? {
                let manifest: serde_json::Value = serde_json::from_slice(&fs::read(path)?)?;
                ranks.extend(manifest["rank"].as_u64());
            }
        }
        Ok(ranks)
    };
    (0..1000).find_map(|_| ranks().ok()).expect("copies that stay while they are listed")
}

#[test]
fn a_copy_goes_to_another_failure_domain_if_there_is_one() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(3).sharing_nothing();
    let jobs: Vec<Job> = ["rack-1", "rack-1", "rack-2"]
        .iter()
        .enumerate()
        .map(|(host, domain)| {
            let options =
                format!("--nnodes 3 --node-rank {host} --nproc-per-node 1 --rdzv-conf domain={domain}");
            cluster.start_host_as(host, SAVES_EACH, &options, &[("WAITS", "0")])
        })
        .collect();
    for (host, job) in jobs.iter().enumerate() {
        job.mark(&format!("waits.0.{host}"));
        job.wait_for_event("step_copied");
    }
    assert_eq!(keeps_for(&cluster, 2), BTreeSet::from([0, 1]), "the only host of the other rack");
    for host in 0..2 {
        assert!(keeps_for(&cluster, host).is_subset(&BTreeSet::from([2])), "nothing of its own rack");
    }
    for host in 0..3 {
        fs::write(cluster.stage(host).marks().join("go.0"), "").expect("a mark for the rank");
    }
    for end in cluster.ends(jobs) {
        end.assert_status(0);
    }
}

#[test]
fn a_replica_that_was_damaged_is_not_used() {
    if !has_client() {
        return;
    }
    let cluster = Cluster::new(3).sharing_nothing();
    let options = "--nnodes 2 --nproc-per-node 2";
    let waits = [("WAITS", "0")];
    let mut jobs: Vec<Job> = (0..2)
        .map(|host| cluster.start_host_as(host, SAVES_EACH, &format!("{options} --node-rank {host}"), &waits))
        .collect();
    all_wait(&jobs);
    jobs[0].wait_for_event("step_copied");
    let lost = jobs.remove(1);
    lost.lose_launcher();
    jobs[0].wait_for_event("host_awaited");
    let pools = fs::read_dir(cluster.stage(0).tmpfs().join("pools")).expect("the pools").flatten();
    let kept: Vec<PathBuf> = pools.flat_map(|pool| replicas(&pool.path().join("replicas"))).collect();
    assert!(!kept.is_empty(), "there are replicas");
    for path in &kept {
        let bytes = fs::read(path).expect("a replica");
        // In place: the same file with other bytes, as faulty memory would change it.
        let damaged: Vec<u8> = bytes.iter().map(|byte| byte ^ 0x40).collect();
        let file = fs::OpenOptions::new().write(true).open(path).expect("a replica");
        std::os::unix::fs::FileExt::write_all_at(&file, &damaged, 0).expect("written over");
    }
    jobs.push(cluster.start_host_as(2, SAVES_EACH, &format!("{options} --node-rank 1"), &[]));
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    let damaged = journal::observed(&ends[0].journal, "checkpoint_not_restored").next();
    assert!(damaged.is_some(), "{}", ends[0]);
    assert_eq!(went_on_from(&cluster, [0, 2]), 0, "no good copy was left");
    assert_finals(&cluster, [0, 2], &ends);
}

#[test]
fn ddp_over_namespaces_that_loses_a_whole_host_ends_with_the_parameters_of_an_undisturbed_run() {
    if !has_torch() {
        return;
    }
    if !is_root() {
        return skipped("only root can make network namespaces");
    }
    let script = DDP.replace("if step % 5 == 4:", "if True:");
    assert_ne!(script, DDP);
    let cluster = Cluster::in_namespaces(3).sharing_nothing();
    let options = "--nnodes 2 --nproc-per-node 1";
    let mut jobs: Vec<Job> = (0..2)
        .map(|host| {
            let options = format!("{options} --node-rank {host}");
            cluster.start_host_as(host, &script, &options, &[("WAITS", "0")])
        })
        .collect();
    jobs[0].mark("waits.0.0");
    jobs[1].mark("waits.0.1");
    jobs[0].wait_for_event("step_copied");
    replace_second(&cluster, &mut jobs, &script, "--nproc-per-node 1");
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
    }
    assert!(journal::observed(&ends[1].journal, "checkpoint_chosen").next().is_some(), "{}", ends[1]);
    assert_undisturbed(&cluster, &[0, 2]);
}
