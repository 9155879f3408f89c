//! On any input the scan neither panics nor becomes slow, and its result does not depend on the chunk size.

#![allow(clippy::expect_used, reason = "in a test, a panic is the report")]

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::class::Class;
use mainstay_diagnosis::attribution::scan::{Findings, Kind, Scan};
use mainstay_diagnosis::attribution::{Attribution, Evidence, attribute, explain};
use proptest::prelude::*;

fn catalog() -> &'static Catalog {
    Catalog::built_in().expect("a valid catalog")
}

fn judged(findings: Vec<Findings>) -> Attribution {
    let evidence = Evidence { findings, ..Evidence::default() };
    let judged = attribute(catalog(), &evidence);
    let report = explain::report(&evidence, &judged);
    assert!(!report.headline.is_empty() && !report.next.is_empty());
    judged
}

fn of_text(text: &[u8]) -> Attribution {
    judged(vec![Scan::of_text(catalog(), "log", None, Kind::Log, text)])
}

/// The sightings by signature, count and first line, without their texts.
fn seen(findings: &Findings) -> Vec<(usize, u64, u64)> {
    findings
        .sightings
        .iter()
        .map(|sighting| {
            (sighting.signature, sighting.count, sighting.spots.first().map_or(0, |spot| spot.line))
        })
        .collect()
}

/// Pieces of logs mixed with garbage: words that the scan looks for next to unexpected bytes.
fn log() -> impl Strategy<Value = Vec<u8>> {
    let words: Vec<Vec<u8>> = catalog()
        .signatures()
        .iter()
        .flat_map(|signature| [signature.example.clone(), signature.any.first().cloned().unwrap_or_default()])
        .map(String::into_bytes)
        .chain(
            [
                "\n",
                "\r",
                "\x1b[31m",
                "\x1b[",
                "[rank3]:",
                "Traceback (most recent call last):\n",
                "Xid (PCI:",
            ]
            .map(|s| s.into()),
        )
        .collect();
    let piece = prop_oneof![
        3 => proptest::sample::select(words),
        1 => proptest::collection::vec(any::<u8>(), 0..40),
        1 => Just(b"\n".to_vec()),
    ];
    proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_yield_a_confidence_between_0_and_1(text in log()) {
        let judged = of_text(&text);
        prop_assert!((0.0..=1.0 + 1e-9).contains(&judged.confidence));
    }

    #[test]
    fn the_result_does_not_depend_on_the_chunk_size(text in log(), cut in 1usize..50) {
        let whole = Scan::of_text(catalog(), "log", None, Kind::Log, &text);
        let mut scan = Scan::new(catalog(), "log", None, Kind::Log);
        text.chunks(cut).for_each(|piece| scan.feed(piece));
        let pieces = scan.finish();
        prop_assert_eq!(seen(&whole), seen(&pieces));
        prop_assert_eq!(whole.lines, pieces.lines);
    }
}

#[test]
fn a_very_long_line_does_not_hide_the_next_one() {
    let mut scan = Scan::new(catalog(), "log", None, Kind::Log);
    let piece = "x Error: cuda error: [rank1] ".repeat(4096);
    for _ in 0..6 {
        scan.feed(piece.as_bytes());
    }
    scan.feed(b"\nNVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n");
    let found = scan.finish();
    assert_eq!(found.lines, 2);
    assert_eq!(judged(vec![found]).class, Class::HardwareGpu);
}

#[test]
fn the_rest_of_a_very_long_line_is_skipped_and_that_of_a_progress_bar_is_read() {
    let after = |end: &str| {
        let mut scan = Scan::new(catalog(), "log", None, Kind::Log);
        let piece = format!("Epoch 1 of 9: loaded{end}").repeat(4096);
        for _ in 0..20 {
            scan.feed(piece.as_bytes());
        }
        scan.feed(b"NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\nnext\n");
        let found = scan.finish();
        assert_eq!(found.lines, 2);
        judged(vec![found]).class
    };
    assert_eq!(after("\r"), Class::HardwareGpu);
    assert_eq!(after(" "), Class::Unknown);
}

#[test]
fn messages_are_found_in_colours_across_wraps_and_after_prefixes() {
    let class = |text: &str| of_text(text.as_bytes()).class;
    assert_eq!(
        class("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        Class::UserConfig
    );
    assert_eq!(class("\x1b[31mGPU has fal\x1b[0mlen off the bus\n"), Class::HardwareGpu);
    assert_eq!(class("an uncorrectable double\nbit error was found on the GPU"), Class::HardwareGpu);
    assert_eq!(class("uncorrec\ntable ECC error encountered"), Class::HardwareGpu);
}

#[test]
fn victims_are_not_the_culprit() {
    let scan = |rank: u32, text: &str| {
        Scan::of_text(catalog(), &format!("rank{rank}.log"), Some(rank), Kind::Log, text.as_bytes())
    };
    let victim = "RuntimeError: NCCL communicator: Connection closed by remote peer\n";
    let culprit = "Traceback (most recent call last):\n  File \"/home/a/train.py\", line 3, in step\n    x = b\nNameError: name 'b' is not defined\n";
    let judged = judged(vec![scan(0, victim), scan(1, victim), scan(2, culprit), scan(3, victim)]);
    assert_eq!((judged.class, judged.root.rank), (Class::UserCode, Some(2)));
    assert_eq!(judged.root.victims.into_iter().collect::<Vec<_>>(), [0, 1, 3]);
}

#[test]
fn a_victim_without_a_culprit_has_an_unknown_cause() {
    let judged = of_text(b"[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.");
    assert_eq!(judged.class, Class::Unknown);
}

#[test]
fn a_fault_common_to_all_ranks_names_no_rank() {
    let text: String =
        (0..8).map(|rank| format!("[rank{rank}]: OSError: [Errno 116] Stale file handle\n")).collect();
    let judged = of_text(text.as_bytes());
    assert_eq!((judged.class, judged.root.rank, judged.root.common.len()), (Class::Storage, None, 8));
}

/// A CUDA kernel that failed: a bug or a lost GPU, and nothing shows which.
const DIED: &str = r#"Traceback (most recent call last):
  File "/work/train.py", line 18, in <module>
    raise RuntimeError("CUDA error: unspecified launch failure")
RuntimeError: CUDA error: unspecified launch failure
"#;

#[test]
fn a_kernel_that_failed_for_an_unknown_reason_names_no_cause() {
    assert_eq!(of_text(DIED.as_bytes()).class, Class::Unknown);
}

#[test]
fn no_word_is_joined_across_two_lines_with_the_same_prefix() {
    let lines = "srun: error: Application launch failed: Invalid job credential\nsrun: Job step aborted: Waiting up to 32 seconds\n";
    let judged = of_text(lines.as_bytes());
    assert!(judged.against.iter().chain(&judged.evidence).all(|vote| vote.id != "storage.s3_auth"));
    let wrapped = "botocore.exceptions.NoCreden\ntialsError: Unable to locate creden\ntials\n";
    assert!(of_text(wrapped.as_bytes()).evidence.iter().any(|vote| vote.id == "storage.s3_auth"));
}

#[test]
fn advice_in_a_log_is_not_evidence() {
    let complaint = "frobnicator: gave up after 7 of 9\n";
    let advice = "        Solution: 1. Check whether npu 4 is degraded or unhealthy.\n";
    assert_eq!(of_text(format!("{complaint}{advice}").as_bytes()).class, Class::Unknown);
    let seen = "        Observed: npu 4 is degraded and unhealthy.\n";
    assert_eq!(of_text(format!("{complaint}{seen}").as_bytes()).class, Class::HardwareGpu);
}
