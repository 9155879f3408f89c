//! The culprits that the hang judge names in simulated jobs. `cargo xtask bench judge` measures large jobs.

#![allow(clippy::panic, reason = "a panic is how a test reports")]

use mainstay_sim::hang::{HangFault, Loss, run};
use mainstay_sim::mesh::Mesh;
use mainstay_sim::random::Random;

const MESHES: [Mesh; 3] = [
    Mesh { tensor: 8, pipeline: 4, data: 32 },
    Mesh { tensor: 8, pipeline: 1, data: 16 },
    Mesh { tensor: 4, pipeline: 8, data: 16 },
];

#[test]
fn the_stopped_rank_is_named_despite_lost_reports_and_silent_hosts() {
    let mut random = Random::new(1);
    for mesh in MESHES {
        for trial in 0..12 {
            let rank = random.below(mesh.ranks());
            let score = run(mesh, HangFault::Rank(rank), Loss::USUAL, trial);
            assert!(score.rank, "{mesh:?}, trial {trial}, rank {rank}: {score:?}");
        }
    }
}

#[test]
fn a_silent_host_with_a_stopped_rank_is_named() {
    let mut random = Random::new(2);
    let (mut right, mut all) = (0, 0);
    for trial in 0..24 {
        let mesh = MESHES[0];
        let rank = random.below(mesh.ranks());
        let score = run(mesh, HangFault::SilentHost(rank), Loss::USUAL, trial);
        let reported = score.hang.as_ref().map(|hang| (hang.kind, &hang.culprits));
        if !score.host {
            eprintln!("trial {trial}, rank {rank}: {reported:?}");
        }
        all += 1;
        right += u32::from(score.host);
    }
    assert!(right * 100 >= all * 95, "{right} of {all}");
}

#[test]
fn an_operation_that_all_ranks_entered_names_no_rank() {
    let loss = Loss { reports: 0.05, silent_hosts: 0.0 };
    let mut random = Random::new(3);
    for trial in 0..8 {
        let mesh = MESHES[0];
        let member = random.below(mesh.ranks());
        let score = run(mesh, HangFault::Link(member), loss, trial);
        assert!(score.rank, "trial {trial}, {member}: {score:?}");
    }
}
