//! The central guarantee, with PyTorch: a DDP run that loses a rank ends with the same parameters as one that does
//! not.

use mainstay_model::entry::Fact;
use mainstay_model::id::Rank;
use mainstay_tests::{Job, Stage, has_torch, journal};

use crate::ddp::DDP;

#[test]
fn a_ddp_run_that_loses_a_rank_ends_with_the_parameters_of_an_undisturbed_one() {
    if !has_torch() {
        return;
    }
    let stages = [Stage::new(), Stage::new()];
    let undisturbed = stages[0].python(DDP).ranks(2).options("--no-warm").start();
    let disturbed = stages[1].python(DDP).ranks(2).variable("WAITS", "0").start();
    disturbed.mark("waits.0.0");
    disturbed.mark("waits.0.1");
    // The second attempt is forked from a process that holds torch already; the first was started plainly.
    disturbed.wait_for_fact(
        "a template that is warm",
        |fact| matches!(fact, Fact::Observed(seen) if seen.component == "template" && seen.event == "warm"),
    );
    disturbed.kill_rank(0, 1);

    let (expected, found) = (parameters(&undisturbed), parameters(&disturbed));
    let end = disturbed.end();
    end.assert_status(0);
    undisturbed.end().assert_status(0);
    assert_eq!(found, expected, "bit for bit\n{end}");
    assert_eq!(expected[0], expected[1], "all ranks of a DDP run have the same parameters");

    let verdict = end.verdict();
    assert_eq!((verdict.culprit, verdict.step), (Some(Rank(1)), Some(12)), "{end}");
    let [outcome] = journal::outcomes(&end.journal)[..] else { panic!("one outcome\n{end}") };
    assert_eq!((outcome.step, outcome.steps_lost), (10, 3), "{end}");
    assert!(outcome.to_ranks_connected.is_some(), "{end}");
}

fn parameters(job: &Job) -> [String; 2] {
    [0, 1].map(|rank| job.mark(&format!("final.{rank}")))
}

#[test]
fn a_rank_whose_peer_raised_is_a_victim_though_it_raises_too() {
    if !has_torch() {
        return;
    }
    let stage = Stage::new();
    // Rank 0 sees a closed connection when rank 1 is gone, and may report it before rank 1's process has ended.
    let script = r#"
import torch, torch.distributed as dist
import mainstay
dist.init_process_group("gloo")
mainstay.step(0)
if RANK == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(1))
"#;
    let end = stage.python(script).ranks(2).options("--max-restarts 0").start().end();
    end.assert_status(1);
    let verdict = end.verdict();
    assert_eq!((verdict.culprit, &verdict.victims[..]), (Some(Rank(1)), &[Rank(0)][..]), "{end}");
    end.assert_printed("rank 1 raised ValueError: bad batch");
}
