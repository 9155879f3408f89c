//! The management controller's sensors of power supplies, fans and temperatures: the host's surroundings, which no
//! program on it can fix.

use std::collections::BTreeMap;

use super::limits::SENSOR_LOOKS;
use super::sample::SystemSample;
use crate::host::os::Reading;
use crate::host::os::findings::Findings;
use crate::parse::ipmi::{Level, Sensor};
use mainstay_model::health::{HealthState, RecommendedAction};

#[derive(Clone, Debug, Default)]
pub(super) struct ChassisWatch {
    /// Samples in a row in which a sensor was faulty.
    bad_sensors: BTreeMap<String, u32>,
    last: Option<Reading<Vec<Sensor>>>,
}

impl ChassisWatch {
    /// The controller is slow and rarely queried: between queries the last answer counts.
    pub(super) fn judge(&mut self, sample: &SystemSample) -> Option<Findings> {
        if let Some(reading) = &sample.sensors {
            if let Some(sensors) = reading.value() {
                self.follow(sensors);
            }
            self.last = Some(reading.clone());
        }
        let sensors = match self.last.as_ref()? {
            Reading::Value(sensors) => sensors,
            Reading::NotAvailable(_) => return None,
            Reading::Failed(why) => {
                let mut findings = Findings::default();
                findings.unreadable(why.clone());
                return Some(findings);
            }
        };
        let mut findings = Findings::default();
        for sensor in sensors {
            let Some(seen) = self.bad_sensors.get(&sensor.name).copied() else { continue };
            findings.evidence(&sensor.name, sensor.reading.clone(), None);
            if seen < SENSOR_LOOKS {
                continue;
            }
            let how = if sensor.level == Level::Critical { "is critical" } else { "is near its limit" };
            let reason = format!("{} {how}: {}", sensor.name, sensor.reading);
            findings.problem(HealthState::Degraded, reason, RecommendedAction::ContactSupport);
        }
        findings.summary(format!("{} sensors of the management controller are in order", sensors.len()));
        Some(findings)
    }

    fn follow(&mut self, sensors: &[Sensor]) {
        let before = std::mem::take(&mut self.bad_sensors);
        let bad_sensors = sensors.iter().filter(|sensor| sensor.level > Level::Ok);
        self.bad_sensors = bad_sensors
            .map(|sensor| {
                (sensor.name.clone(), before.get(&sensor.name).map_or(1, |seen| seen.saturating_add(1)))
            })
            .collect();
    }
}
