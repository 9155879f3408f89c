//! How messages name a sealed checkpoint.

use mainstay_model::time::Wall;

/// The first step that is a time: 2001-09-09. No trainer counts as many steps.
const FIRST_TIME: u64 = 1_000_000_000;

/// Names a checkpoint by its step, or by the time at which it was written if its name has no step (see
/// [`OVERWRITTEN_NAMES`](super::OVERWRITTEN_NAMES)).
pub fn title(step: u64) -> String {
    let seconds = i64::try_from(step).ok().filter(|_| step >= FIRST_TIME);
    match seconds.and_then(|seconds| seconds.checked_mul(1_000_000_000)) {
        Some(nanoseconds) => format!("the checkpoint of {} (step {step})", Wall(nanoseconds)),
        None => format!("step {step}"),
    }
}

#[cfg(test)]
mod tests {
    use super::title;

    #[test]
    fn a_step_that_is_a_time_is_named_by_it() {
        assert_eq!(title(412), "step 412");
        testing::snapshot!("messages", "title: a step that is a time is named by it", title(1_795_912_366));
        assert_eq!(title(u64::MAX), format!("step {}", u64::MAX));
    }
}
