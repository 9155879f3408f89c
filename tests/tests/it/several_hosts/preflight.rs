//! `--preflight`: hosts measure their links before ranks start.

use std::path::Path;

use mainstay_model::entry::Fact;
use mainstay_tests::{Job, journal};

use super::cluster::Cluster;
use super::links::Quality;
use super::lost::has_namespaces;

/// A hundredth of the bandwidth of the others.
const SLOW: Quality = Quality { rate: 1e4, ..Quality::GOOD };

/// A rank that trains nothing.
const RUNS: &str = "mark(f'ran.{RANK}')";

/// Three hosts, of which the last one has a slow link, started with these options.
fn with_a_slow_host(options: &str) -> (Cluster, Vec<Job>) {
    let cluster = Cluster::with_links(3);
    cluster.network().set_link(2, SLOW, SLOW);
    let jobs = cluster.start(RUNS, options, &[]);
    (cluster, jobs)
}

/// The hosts that a journal names as slow, with whether they were measured at all.
fn slow_by(journal: &Path) -> (bool, Vec<String>) {
    let (mut measured, mut slow) = (false, Vec::new());
    for fact in journal::facts(&journal::read(journal)) {
        let Fact::Observed(seen) = fact else { continue };
        measured |= seen.event == "links_measured";
        if seen.event == "link_slow" {
            slow.push(seen.values["hosts"].clone());
        }
    }
    (measured, slow)
}

#[test]
fn a_host_with_a_slow_link_is_named_before_ranks_start_and_the_job_runs() {
    if !has_namespaces() {
        return;
    }
    let (cluster, jobs) = with_a_slow_host("--preflight");
    for end in cluster.ends(jobs) {
        end.assert_status(0);
        let found = slow_by(&end.run_dir.join("journal"));
        assert_eq!(found, (true, vec![cluster.host_name(2)]), "{end}");
    }
}

#[test]
fn a_job_that_requires_good_links_does_not_start_without_them() {
    if !has_namespaces() {
        return;
    }
    let (cluster, jobs) = with_a_slow_host("--preflight=require");
    for job in jobs {
        assert!(job.has_ended());
        let end = job.end();
        assert_ne!(end.status, 0, "{end}");
    }
    assert!((0..3).all(|host| !cluster.stage(host).marks().join(format!("ran.{host}")).exists()));
}
