//! File systems that do not answer, below the paths that the agent writes to for others: its loop feeds the
//! watchdog, and users' jobs attach and restart.

use testing::silent::SilentMount;

use crate::two_users::{B, host_with};

#[test]
fn the_loop_goes_on_while_the_directory_of_segment_health_does_not_answer() {
    let place = testing::tempdir().unwrap();
    let Some(_mount) = SilentMount::over(place.path()) else {
        return testing::skip("no FUSE mount can be made here (root and /dev/fuse)");
    };
    let Some(host) = host_with(&[("NVRX_SEGMENT_HEALTH_DIR", place.path())]) else { return };
    println!("{:?}", host.seen_by(B));
}
