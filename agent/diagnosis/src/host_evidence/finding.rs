//! Evidence from findings of a running job when it fails. All of it is weak, since the job ran on despite the finding.

use crate::attribution::Observation;
use crate::attribution::class::Class;
use mainstay_model::finding::{Finding, FindingKind};
use mainstay_model::verdict::FaultDomain;

/// Log-odds of one replica that computes a different result than the majority: less than any kernel line, since non-deterministic
/// programs show the same.
const CORRUPTION_LOG_ODDS: f64 = 1.5;

/// Log-odds of replicas that differ when none is known to be right.
const DIFFERENCE_LOG_ODDS: f64 = 0.5;

/// Log-odds of invalid numbers on one rank only.
const ONE_RANK_LOG_ODDS: f64 = 1.0;

/// Log-odds of a loss or gradients out of bounds on all ranks: far more often caused by the program, its settings or its data than by a
/// device.
const NUMBERS_LOG_ODDS: f64 = 0.6;
const DEVICE_NUMBERS_LOG_ODDS: f64 = 0.3;

/// Log-odds of slowness that is caused by a fault of the place.
const SLOW_LOG_ODDS: f64 = 1.0;

/// `None` for findings about unevenly distributed work, which blame nothing that can fail.
pub(super) fn observation(finding: &Finding) -> Option<Observation> {
    let sure = finding.confidence.clamp(0.0, 1.0);
    let (family, class, weight, also) = match finding.what {
        FindingKind::SilentCorruption => {
            ("numbers", Class::HardwareGpu, CORRUPTION_LOG_ODDS * sure, Vec::new())
        }
        FindingKind::GradNormSpike | FindingKind::NotANumber if finding.domain == FaultDomain::Hardware => (
            "numbers",
            Class::HardwareGpu,
            ONE_RANK_LOG_ODDS * sure,
            vec![(Class::UserCode, NUMBERS_LOG_ODDS)],
        ),
        FindingKind::ReplicasDiffer => {
            ("numbers", Class::UserCode, DIFFERENCE_LOG_ODDS, vec![(Class::HardwareGpu, DIFFERENCE_LOG_ODDS)])
        }
        FindingKind::LossSpike | FindingKind::GradNormSpike | FindingKind::NotANumber => {
            let also = vec![
                (Class::UserConfig, NUMBERS_LOG_ODDS),
                (Class::Data, NUMBERS_LOG_ODDS),
                (Class::HardwareGpu, DEVICE_NUMBERS_LOG_ODDS),
            ];
            ("numbers", Class::UserCode, NUMBERS_LOG_ODDS, also)
        }
        FindingKind::SlowRank | FindingKind::SlowHost if finding.domain == FaultDomain::Hardware => {
            let of_a_device = finding.device.is_some();
            let class = if of_a_device { Class::HardwareGpu } else { Class::HardwareHost };
            ("straggler", class, SLOW_LOG_ODDS * sure, Vec::new())
        }
        FindingKind::SlowLink => ("straggler", Class::Fabric, SLOW_LOG_ODDS * sure, Vec::new()),
        FindingKind::SlowRank
        | FindingKind::SlowHost
        | FindingKind::StageImbalance
        | FindingKind::DataImbalance
        | FindingKind::SilentFileSystem => return None,
    };
    Some(Observation { family: family.to_owned(), text: finding.stood(), class, weight, also })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_model::id::{Attempt, Rank};

    fn finding(what: FindingKind, domain: FaultDomain, device: Option<&str>) -> Finding {
        Finding {
            finding: 1,
            attempt: Attempt(0),
            what,
            over: false,
            headline: "rank 3 is slow".to_owned(),
            domain,
            confidence: 0.8,
            ranks: vec![Rank(3)],
            device: device.map(str::to_owned),
            host: None,
            stage: None,
            since_step: 80,
            step: 90,
            cost_percent: None,
            evidence: Vec::new(),
            last_agreed_step: None,
            doubtful_steps: Vec::new(),
        }
    }

    #[test]
    fn a_corruption_supports_the_device_and_invalid_numbers_the_program_first() {
        let hardware = FaultDomain::Hardware;
        let corrupt = observation(&finding(FindingKind::SilentCorruption, hardware, None)).expect("evidence");
        assert_eq!(corrupt.class, Class::HardwareGpu);
        assert!(corrupt.text.contains("since step 80"), "{}", corrupt.text);
        let alone = observation(&finding(FindingKind::NotANumber, hardware, None)).expect("evidence");
        assert_eq!(alone.class, Class::HardwareGpu);
        let unhealthy =
            observation(&finding(FindingKind::NotANumber, FaultDomain::User, None)).expect("evidence");
        let device =
            unhealthy.also.iter().find(|(class, _)| *class == Class::HardwareGpu).expect("a device, too");
        assert_eq!(unhealthy.class, Class::UserCode);
        assert!(
            device.1 < unhealthy.weight && unhealthy.weight < alone.weight && alone.weight < corrupt.weight
        );
    }

    #[test]
    fn slowness_counts_only_if_the_place_has_a_fault() {
        let slow = |what, domain, device| {
            observation(&finding(what, domain, device)).map(|observation| observation.class)
        };
        let hardware = FaultDomain::Hardware;
        assert_eq!(slow(FindingKind::SlowRank, hardware, Some("0000:3b:00")), Some(Class::HardwareGpu));
        assert_eq!(slow(FindingKind::SlowHost, hardware, None), Some(Class::HardwareHost));
        assert_eq!(slow(FindingKind::SlowRank, FaultDomain::Unknown, None), None);
        assert_eq!(slow(FindingKind::SlowLink, FaultDomain::Infrastructure, None), Some(Class::Fabric));
        assert_eq!(slow(FindingKind::DataImbalance, FaultDomain::User, None), None);
    }
}
