//! The state and action for each XID from 1 to 173, alone on a healthy host. The table is NVIDIA's catalog of
//! 2025-10-29, ordered by its immediate actions, with our state next to it. Codes whose line contains the severity are
//! tested with their lines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::collections::BTreeMap;

use mainstay_model::health::{HealthState, RecommendedAction};
use support::Host;

use HealthState::{Degraded, Healthy, Unhealthy};
use RecommendedAction::{ContactSupport, None as Nothing, RebootNode, ResetDevice, RestartProcess};

const GPU: &str = "gpu.0000:01:00";

/// Codes whose line contains the severity: NVLink errors, and the recovery action that the driver reports.
const BY_LINE: [u32; 9] = [74, 144, 145, 146, 147, 148, 149, 150, 154];

/// All codes that change the state. The others are only events.
const FAULTS: [(HealthState, RecommendedAction, &[u32]); 8] = [
    (
        Unhealthy,
        ResetDevice,
        &[46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 158, 169, 171, 172],
    ),
    (Unhealthy, RebootNode, &[79, 151, 167, 173]),
    (Unhealthy, ContactSupport, &[54]),
    (Degraded, ResetDevice, &[63, 156, 160, 166]),
    (Degraded, RestartProcess, &[94]),
    (Degraded, ContactSupport, &[61, 78, 122, 123, 124, 125, 142, 157, 161, 165]),
    (Degraded, Nothing, &[38, 44, 92, 159, 163]),
    (Degraded, RebootNode, &[168]),
];

#[test]
fn each_xid_yields_the_state_and_action_of_the_catalog() {
    let mut expected: BTreeMap<u32, (HealthState, RecommendedAction)> =
        (1..=173).map(|code| (code, (Healthy, Nothing))).collect();
    for (state, action, codes) in FAULTS {
        expected.extend(codes.iter().map(|code| (*code, (state, action))));
    }
    for (code, expected) in expected.into_iter().filter(|(code, _)| !BY_LINE.contains(code)) {
        for who in ["pid=4711, name=python3, ", "pid='<unknown>', name=<unknown>, ", ""] {
            let mut host = Host::new();
            host.xid(&format!("{code}, {who}something"));
            let component = host.component(GPU);
            assert_eq!((component.state, component.action), expected, "XID {code}: {}", component.reason);
        }
    }
}
