//! The source of a policy, which a user wrote: any text leads to a decision or to an error with a position, within
//! the limits.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use mainstay_policy::incidents::{self, Incident};
use mainstay_policy::{LIMITS, Policy};

static INCIDENTS: LazyLock<Vec<Incident>> = LazyLock::new(|| {
    incidents::read(include_str!("../../agent/cli/src/policy_usual.toml")).unwrap_or_default()
});

fuzz_target!(|text: &str| {
    let Ok(policy) = Policy::parse("fuzzed.star", text) else { return };
    for incident in INCIDENTS.iter().take(3) {
        let of = || policy.decide(&incident.settings, incident.case(), &|| false);
        let first = of();
        if let Ok(decided) = &first {
            assert!(decided.steps <= LIMITS.steps && decided.bytes <= LIMITS.bytes);
        }
        assert_eq!(first, of(), "the same case is decided the same");
    }
});
