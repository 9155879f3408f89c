//! Connections of the ranks whose peers acknowledge nothing: the sign of a network that is cut between two hosts, or
//! in one direction.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use mainstay_health::parse::tcp::{Unacknowledged, unacknowledged};
use mainstay_model::hang::no_acknowledgement;
use mainstay_model::id::Pid;

use super::Subject;

/// One sentence for each rank and each address that acknowledges nothing.
pub(super) fn unanswered(subjects: &[Subject]) -> Vec<String> {
    // Ranks share a namespace as a rule, and its list may be long.
    let mut of_namespace: BTreeMap<PathBuf, Vec<Unacknowledged>> = BTreeMap::new();
    let mut sentences = Vec::new();
    for subject in subjects {
        let Ok(namespace) = fs::read_link(format!("/proc/{}/ns/net", subject.pid.0)) else { continue };
        let listed = of_namespace.entry(namespace).or_insert_with(|| listed(subject.pid));
        if listed.is_empty() {
            continue;
        }
        let own = sockets(subject.pid);
        let mut peers: BTreeMap<(IpAddr, IpAddr), u32> = BTreeMap::new();
        for connection in listed.iter().filter(|connection| own.contains(&connection.inode)) {
            let most = peers.entry((connection.from, connection.to)).or_default();
            *most = connection.retransmissions.max(*most);
        }
        let sentence = |((from, to), most): ((IpAddr, IpAddr), u32)| {
            no_acknowledgement(subject.rank, &from.to_string(), &to.to_string(), most)
        };
        sentences.extend(peers.into_iter().map(sentence));
    }
    sentences
}

fn listed(pid: Pid) -> Vec<Unacknowledged> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{}/net/{name}", pid.0)).unwrap_or_default();
    let text = [read("tcp"), read("tcp6")];
    text.iter().flat_map(|text| unacknowledged(text)).collect()
}

/// The inodes of the sockets that a process has open.
fn sockets(pid: Pid) -> BTreeSet<u64> {
    let Ok(files) = fs::read_dir(format!("/proc/{}/fd", pid.0)) else { return BTreeSet::new() };
    let inode = |file: fs::DirEntry| {
        let link = fs::read_link(file.path()).ok()?;
        link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    files.flatten().filter_map(inode).collect()
}
