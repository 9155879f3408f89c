//! Evidence from earlier occurrences of the same failure: in this job, with the same data, on other hosts, in other jobs.

use crate::attribution::Observation;
use crate::attribution::class::Class;
use crate::repeats::SeenBefore;

/// Log-odds of an earlier occurrence in this job; more at the same step and across a reboot of the host. On one host a broken device
/// could also cause it, so this stays below the weight of a kernel line.
const AGAIN_LOG_ODDS: f64 = 0.6;
const SAME_STEP_LOG_ODDS: f64 = 0.8;
const OTHER_BOOT_LOG_ODDS: f64 = 0.6;

/// Log-odds for the data when the failure repeats with the same data at another step.
const SAME_DATA_LOG_ODDS: f64 = 3.0;

/// Log-odds when the same program failed in the same way on another host: the cause is not on this one.
const OTHER_HOST_LOG_ODDS: f64 = 2.0;

/// The number of other jobs with the same failure that rules out chance, and its log-odds.
const MIN_OTHER_JOBS: u32 = 2;
const OTHER_JOBS_LOG_ODDS: f64 = 1.5;

/// A repeated failure points to the program, its data or the software below it, more so at the same step, across a reboot and on
/// another host. A failure of several jobs on one host points to the host or to software that all of them use.
pub(super) fn observations(seen: &SeenBefore) -> impl Iterator<Item = Observation> {
    [in_this_job(seen), by_data(seen), on_other_hosts(seen), in_other_jobs(seen)].into_iter().flatten()
}

fn in_this_job(seen: &SeenBefore) -> Option<Observation> {
    let weight = AGAIN_LOG_ODDS
        + if seen.at_this_step > 0 { SAME_STEP_LOG_ODDS } else { 0.0 }
        + if seen.in_other_boots > 0 { OTHER_BOOT_LOG_ODDS } else { 0.0 };
    // At the same step with other data, the data is an unlikely cause.
    let data = if seen.at_other_data > seen.at_this_data { 0.0 } else { weight };
    let times = |count: u32| if count == 1 { "once".to_owned() } else { format!("{count} times") };
    let mut text = format!("the same failure occurred {} before in this job", times(seen.in_this_job));
    if seen.at_this_step > 0 {
        text += &format!(", {} at this step", times(seen.at_this_step));
    }
    if seen.in_other_boots > 0 {
        text += &format!(", {} before the last boot of the host", times(seen.in_other_boots));
    }
    let also = [(Class::UserConfig, weight), (Class::Data, data), (Class::SoftwarePlatform, 0.8 * weight)];
    (seen.in_this_job > 0).then(|| observation("repetition", text, (Class::UserCode, weight), &also))
}

fn by_data(seen: &SeenBefore) -> Option<Observation> {
    let (same, other) = (seen.at_this_data, seen.at_other_data);
    if same > other {
        let text = format!("{same} of them at other steps, where the same data was read");
        Some(observation("repetition_at_data", text, (Class::Data, SAME_DATA_LOG_ODDS), &[]))
    } else if other > same {
        let text = format!("{other} of them at this step, where other data was read");
        Some(observation(
            "repetition_at_data",
            text,
            (Class::UserCode, AGAIN_LOG_ODDS),
            &[(Class::UserConfig, AGAIN_LOG_ODDS)],
        ))
    } else {
        None
    }
}

fn on_other_hosts(seen: &SeenBefore) -> Option<Observation> {
    let hosts: Vec<&str> = seen.elsewhere.iter().map(|failure| failure.host.as_str()).collect();
    let text = format!("this program failed in the same way before on {}", hosts.join(", "));
    let also = [
        (Class::UserConfig, OTHER_HOST_LOG_ODDS),
        (Class::Data, OTHER_HOST_LOG_ODDS),
        (Class::SoftwarePlatform, 0.8 * OTHER_HOST_LOG_ODDS),
    ];
    (!hosts.is_empty())
        .then(|| observation("repetition_on_hosts", text, (Class::UserCode, OTHER_HOST_LOG_ODDS), &also))
}

fn in_other_jobs(seen: &SeenBefore) -> Option<Observation> {
    let text = format!("{} other jobs failed in the same way on this host", seen.other_jobs);
    let also =
        [(Class::HardwareHost, 0.7 * OTHER_JOBS_LOG_ODDS), (Class::Storage, 0.7 * OTHER_JOBS_LOG_ODDS)];
    (seen.other_jobs >= MIN_OTHER_JOBS).then(|| {
        observation("repetition_elsewhere", text, (Class::SoftwarePlatform, OTHER_JOBS_LOG_ODDS), &also)
    })
}

fn observation(family: &str, text: String, main: (Class, f64), also: &[(Class, f64)]) -> Observation {
    let (class, weight) = main;
    Observation { family: family.to_owned(), text, class, weight, also: also.to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repeats::OnHost;

    /// The total log-odds for a class.
    fn speaks(seen: &SeenBefore, class: Class) -> f64 {
        let received = observations(seen);
        let votes = received.flat_map(|vote| std::iter::once((vote.class, vote.weight)).chain(vote.also));
        votes.filter(|(other, _)| *other == class).map(|(_, weight)| weight).sum()
    }

    #[test]
    fn a_repetition_supports_the_program_and_in_many_jobs_the_host() {
        let once = SeenBefore { in_this_job: 1, ..SeenBefore::default() };
        let here = SeenBefore { at_this_step: 1, in_other_boots: 1, ..once.clone() };
        assert!(speaks(&here, Class::UserCode) > speaks(&once, Class::UserCode));
        assert!(speaks(&once, Class::UserCode) > 0.0);
        assert_eq!(observations(&SeenBefore { other_jobs: 1, ..SeenBefore::default() }).count(), 0);
        let many = SeenBefore { other_jobs: 3, ..SeenBefore::default() };
        assert!(speaks(&many, Class::SoftwarePlatform) > speaks(&many, Class::HardwareHost));
    }

    #[test]
    fn the_same_data_supports_the_data_and_other_data_the_program() {
        let same = SeenBefore { in_this_job: 1, at_this_data: 1, ..SeenBefore::default() };
        assert!(speaks(&same, Class::Data) > 2.0 * speaks(&same, Class::UserCode));
        let other = SeenBefore { in_this_job: 1, at_this_step: 1, at_other_data: 1, ..SeenBefore::default() };
        assert!(speaks(&other, Class::Data).abs() < f64::EPSILON);
        assert!(speaks(&other, Class::UserCode) > 0.0);
        // Without reports on the data, either may be the cause.
        let unreported = SeenBefore { in_this_job: 1, at_this_step: 1, ..SeenBefore::default() };
        assert!(
            (speaks(&unreported, Class::Data) - speaks(&unreported, Class::UserCode)).abs() < f64::EPSILON
        );
    }

    #[test]
    fn a_failure_on_another_host_clears_this_host_and_listeners_are_no_evidence() {
        let on_b = OnHost { host: "b".to_owned(), at_this_place: false };
        let seen = SeenBefore { elsewhere: vec![on_b], ..SeenBefore::default() };
        assert!(speaks(&seen, Class::UserCode) > 0.0 && speaks(&seen, Class::Data) > 0.0);
        assert!(speaks(&seen, Class::HardwareGpu).abs() < f64::EPSILON);
        assert!(observations(&seen).any(|observation| observation.text.ends_with("on b")));
        assert_eq!(observations(&SeenBefore { answered_by: 3, ..SeenBefore::default() }).count(), 0);
    }
}
