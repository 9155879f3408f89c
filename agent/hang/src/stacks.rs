//! What ranks are doing, by their stacks: text from Python's faulthandler and from py-spy, folded into groups of
//! ranks in the same place.

use std::collections::BTreeMap;

use mainstay_model::hang::{Hang, HangKind, PlaceGroup, listed};
use mainstay_model::id::Rank;
use mainstay_wire::wait_channel;

/// The confidence that a rank hangs because of the storage that it waits for in the kernel.
const IN_STORAGE: f64 = 0.9;

/// The innermost frame of the main thread as `function (file:line)`, from a faulthandler dump: the last dump in
/// `text`, whose current thread is the one that received the signal.
pub fn innermost_of_faulthandler(text: &str) -> Option<String> {
    let (_, current) = text.rsplit_once("Current thread")?;
    first_frame(current)
}

/// The same from a faulthandler dump that was made by a thread without Python, such as PyTorch's worker server.
/// Python lists its newest thread first, so the main thread is the last.
pub fn innermost_of_worker_server(text: &str) -> Option<String> {
    let (_, main) = text.rsplit_once("\nThread ")?;
    first_frame(main)
}

/// The first frame below the line that names the thread: `  File "/a/train.py", line 12 in forward`.
fn first_frame(thread: &str) -> Option<String> {
    thread.lines().skip(1).find_map(|line| {
        let (file, rest) = line.trim().strip_prefix("File \"")?.split_once("\", line ")?;
        let (number, function) = rest.split_once(" in ")?;
        Some(place(function, file, number))
    })
}

/// The same from py-spy's text: the thread named `MainThread`, else the first.
pub fn innermost_of_py_spy(text: &str) -> Option<String> {
    let threads: Vec<&str> = text.split("\nThread ").skip(1).collect();
    let main =
        threads.iter().find(|thread| thread.lines().next().is_some_and(|head| head.contains("MainThread")));
    main.or(threads.first())?.lines().skip(1).find_map(|line| {
        // `    forward (train.py:12)`
        let (function, rest) = line.trim().split_once(" (")?;
        let (file, number) = rest.strip_suffix(')')?.rsplit_once(':')?;
        Some(place(function, file, number))
    })
}

fn place(function: &str, file: &str, line: &str) -> String {
    let file = file.rsplit('/').next().unwrap_or(file);
    format!("{function} ({file}:{line})")
}

/// Groups ranks by place, the smallest group first: the odd ones out are where to look.
pub fn fold(places: impl IntoIterator<Item = (Rank, String)>) -> Vec<PlaceGroup> {
    let mut groups: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
    for (rank, place) in places {
        groups.entry(place).or_default().push(rank);
    }
    let mut groups: Vec<PlaceGroup> =
        groups.into_iter().map(|(place, ranks)| PlaceGroup { ranks, place }).collect();
    groups.sort_by_key(|group| (group.ranks.len(), group.ranks.first().copied()));
    groups
}

/// Names the culprit by the stacks if nothing else did: ranks that wait for storage in the kernel, or the few
/// that are in another place than the many.
pub fn refine(hang: &mut Hang, groups: &[PlaceGroup]) {
    if refine_by_storage(hang, groups) {
        return;
    }
    let all: usize = groups.iter().map(|group| group.ranks.len()).sum();
    // Ranks in one function are together: they may wait in different lines of it.
    let function = |place: &str| place.rsplit_once(':').map_or(place, |(function, _)| function).to_owned();
    let places =
        groups.iter().flat_map(|group| group.ranks.iter().map(|rank| (*rank, function(&group.place))));
    let merged = fold(places);
    let [few, many] = merged.as_slice() else { return };
    if !hang.culprits.is_empty() || hang.kind != HangKind::AllStill || few.ranks.len() >= many.ranks.len() {
        return;
    }
    hang.kind = HangKind::UserCode;
    hang.culprits = few.ranks.clone();
    hang.victims.retain(|rank| !few.ranks.contains(rank));
    hang.confidence = 0.7;
    hang.evidence.push(format!("of {all} ranks only {} is there, by the stacks", listed(&few.ranks)));
}

/// A rank that seems to be in its own code, or like all others, may be waiting for a file system in the kernel.
fn refine_by_storage(hang: &mut Hang, groups: &[PlaceGroup]) -> bool {
    let in_doubt = matches!(hang.kind, HangKind::AllStill | HangKind::UserCode);
    let of_storage = groups.iter().filter(|group| waits_for_storage(&group.place));
    let mut waiting: Vec<Rank> = of_storage.flat_map(|group| group.ranks.iter().copied()).collect();
    waiting.retain(|rank| hang.culprits.is_empty() || hang.culprits.contains(rank));
    waiting.sort_unstable();
    if !in_doubt || waiting.is_empty() {
        return false;
    }
    let wait = if waiting.len() == 1 { "waits" } else { "wait" };
    hang.evidence
        .push(format!("{} {wait} for a file system, by the kernel's wait channel", listed(&waiting)));
    hang.kind = HangKind::BlockedIo;
    hang.confidence = IN_STORAGE;
    hang.victims.append(&mut hang.culprits);
    hang.victims.retain(|rank| !waiting.contains(rank));
    hang.victims.sort_unstable();
    hang.culprits = waiting;
    true
}

fn waits_for_storage(place: &str) -> bool {
    let channel = place.split_once(" of the kernel").map(|(channel, _)| channel);
    channel.is_some_and(wait_channel::is_of_network_file_system)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAULTHANDLER: &str = "Thread 0x00007f11 (most recent call first):
  File \"/usr/lib/python3.11/threading.py\", line 324 in wait

Current thread 0x00007f22 (most recent call first):
  File \"/home/u/train.py\", line 12 in forward
  File \"/home/u/train.py\", line 40 in <module>
";

    const PY_SPY: &str = "Process 77: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 78 (idle): \"worker\"
    wait (threading.py:324)
Thread 77 (active): \"MainThread\"
    all_reduce (torch/distributed/distributed_c10d.py:2501)
    <module> (train.py:40)
";

    fn all_still(ranks: u32) -> Hang {
        Hang {
            kind: HangKind::AllStill,
            culprits: Vec::new(),
            hosts: Vec::new(),
            victims: (0..ranks).map(Rank).collect(),
            since: mainstay_model::time::Mono(1),
            confirmed: mainstay_model::time::Mono(2),
            phase: "step".into(),
            limit: mainstay_model::time::Span(1),
            step: Some(4),
            confidence: 0.3,
            evidence: Vec::new(),
        }
    }

    #[test]
    fn a_rank_that_waits_for_a_file_system_in_the_kernel_is_not_in_its_own_code() {
        let at = |place: &str| {
            fold([
                (Rank(0), "futex_do_wait of the kernel (sleeping)".to_owned()),
                (Rank(1), place.to_owned()),
            ])
        };
        let fuse = at("request_wait_answer of the kernel (uninterruptible sleep)");
        let mut nothing_known = all_still(2);
        let mut own_code = Hang {
            kind: HangKind::UserCode,
            culprits: vec![Rank(1)],
            hosts: Vec::new(),
            victims: vec![Rank(0)],
            confidence: 0.97,
            ..all_still(2)
        };
        for hang in [&mut nothing_known, &mut own_code] {
            refine(hang, &fuse);
            assert_eq!(
                (hang.kind, &hang.culprits[..], &hang.victims[..]),
                (HangKind::BlockedIo, &[Rank(1)][..], &[Rank(0)][..])
            );
            testing::snapshot!(
                "reasons",
                "stacks: a rank that waits for a file system in the kernel is not in its own code",
                hang.evidence.join("\n")
            );
        }
        // None of these is storage: a function of the program with that name, a pipe, a rank that others do not wait
        // for.
        for other in [at("nfs_read (data.py:7)"), at("pipe_read of the kernel (sleeping)")] {
            let mut hang = own_code_of(Rank(1));
            refine(&mut hang, &other);
            assert_eq!(hang.kind, HangKind::UserCode);
        }
        let mut hang = own_code_of(Rank(0));
        refine(&mut hang, &fuse);
        assert_eq!((hang.kind, &hang.culprits[..]), (HangKind::UserCode, &[Rank(0)][..]));
    }

    fn own_code_of(culprit: Rank) -> Hang {
        let mut hang = Hang { kind: HangKind::UserCode, culprits: vec![culprit], ..all_still(2) };
        hang.victims.retain(|rank| *rank != culprit);
        hang
    }

    #[test]
    fn the_innermost_frame_of_the_main_thread() {
        assert_eq!(innermost_of_faulthandler(FAULTHANDLER).as_deref(), Some("forward (train.py:12)"));
        let by_server = "Current thread 0x1 (most recent call first):\n  <no Python frame>\n\nThread 0x2 (most recent call first):\n  File \"/usr/lib/threading.py\", line 324 in wait\n\nThread 0x3 (most recent call first):\n  File \"/home/u/train.py\", line 12 in forward\n";
        assert_eq!(innermost_of_worker_server(by_server).as_deref(), Some("forward (train.py:12)"));
        assert_eq!(innermost_of_worker_server("Current thread 0x1\n  <no Python frame>\n"), None);
        assert_eq!(innermost_of_py_spy(PY_SPY).as_deref(), Some("all_reduce (distributed_c10d.py:2501)"));
        for text in [
            "",
            "Current thread",
            "Thread 1 (x)",
            "\nThread 7\n  (:)",
            "Current thread 0x1:\n  <no Python frame>",
        ] {
            assert_eq!(innermost_of_faulthandler(text), None);
            assert_eq!(innermost_of_py_spy(text).filter(|place| place.contains("MainThread")), None);
        }
    }

    #[test]
    fn ranks_are_folded_and_the_few_are_named() {
        let at = |rank: u32| {
            (Rank(rank), if rank == 3 { "read (data.py:7)" } else { "all_reduce (c10d.py:1)" }.to_owned())
        };
        let groups = fold((0..61).map(at));
        let sizes: Vec<(usize, &str)> =
            groups.iter().map(|group| (group.ranks.len(), group.place.as_str())).collect();
        assert_eq!(sizes, [(1, "read (data.py:7)"), (60, "all_reduce (c10d.py:1)")]);
        let lines: Vec<String> = groups.iter().map(PlaceGroup::to_string).collect();
        testing::snapshot!("reasons", "stacks: groups of ranks", lines.join("\n"));

        let mut hang = all_still(61);
        refine(&mut hang, &groups);
        assert_eq!(
            (hang.kind, hang.culprits.as_slice(), hang.victims.len()),
            (HangKind::UserCode, &[Rank(3)][..], 60)
        );
        testing::snapshot!("reasons", "stacks: ranks are folded and the few are named", hang.evidence[0]);
        let named = hang.clone();
        refine(&mut hang, &fold((0..4).map(|rank| (Rank(rank), rank.to_string()))));
        assert_eq!(hang, named);
    }
}
