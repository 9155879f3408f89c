//! Processes a reading of a GPU against the earlier readings.

use super::checks;
use super::details::GpuDetails;
use super::reading::{GpuReading, GpuTrouble, Sampled};
use super::readings::Readings;
use super::rules::Rules;
use super::watch::{Change, CheckResult};
use mainstay_model::time::Mono;

impl Readings {
    /// Processes a reading. Returns the checks that changed.
    pub(super) fn take_in(
        &mut self,
        at: Mono,
        reading: &GpuReading,
        rules: Rules<'_>,
    ) -> Vec<(String, Change)> {
        let mut changes = Vec::new();
        let reading = &self.with_lost_readings_as_failed(reading);
        let refused = matches!(reading.trouble, Some(GpuTrouble::Unopened(_)));
        self.refused = if refused { self.refused.saturating_add(1) } else { 0 };
        if reading.trouble.is_some() {
            // Other values of a GPU in trouble are not reliable.
            let look = checks::device_trouble(at, reading, rules, self.refused);
            self.step(checks::TROUBLE_CHECK, look, rules.at_once(), &mut changes);
        } else {
            self.step(checks::TROUBLE_CHECK, CheckResult::Healthy, rules.at_once(), &mut changes);
            self.read_at = Some(at);
            if let Some(details) = &reading.details {
                self.details_before = self.details.replace(GpuDetails::clone(details));
            }
            self.slowed(at, reading);
            for (name, look) in checks::at_once(self, at, reading, rules) {
                self.step(name, look, rules.at_once(), &mut changes);
            }
            for (name, look) in checks::patient(self, at, reading, rules) {
                self.step(name, look, rules.patient(), &mut changes);
            }
            changes.extend(self.links.take_in(at, reading, rules));
        }
        let mut kept = reading.clone();
        // The details are kept separately.
        kept.details = None;
        self.last = Some(kept);
        changes
    }

    /// Returns the reading with values that the driver no longer reports marked as failed: a fault is not over, and a
    /// GPU not healthy, because a value is missing. A GPU that was split (MIG), or whose ECC was switched off, reports
    /// less by design.
    fn with_lost_readings_as_failed(&self, reading: &GpuReading) -> GpuReading {
        fn changed_reading<T: Clone>(now: &Sampled<T>, before: &Sampled<T>) -> Sampled<T> {
            match (now, before) {
                (Sampled::NotOffered, Sampled::Value(_) | Sampled::Failed(_)) => {
                    Sampled::Failed("the driver no longer reports it".to_owned())
                }
                _ => now.clone(),
            }
        }
        let mut reading = reading.clone();
        let details = reading.details.as_deref().or(self.details.as_ref());
        let no_ecc = details.is_some_and(|details| details.ecc_on.value() == Some(&false));
        let Some(before) = self.last.as_ref().filter(|_| reading.mig.value() != Some(&true)) else {
            return reading;
        };
        if !no_ecc {
            reading.ecc_volatile = changed_reading(&reading.ecc_volatile, &before.ecc_volatile);
            reading.ecc_corrected = changed_reading(&reading.ecc_corrected, &before.ecc_corrected);
            reading.remapped = changed_reading(&reading.remapped, &before.remapped);
            reading.pages_pending = changed_reading(&reading.pages_pending, &before.pages_pending);
            reading.unrepairable = changed_reading(&reading.unrepairable, &before.unrepairable);
        }
        reading.recovery_action = changed_reading(&reading.recovery_action, &before.recovery_action);
        reading.temperature = changed_reading(&reading.temperature, &before.temperature);
        reading.memory_temperature = changed_reading(&reading.memory_temperature, &before.memory_temperature);
        reading.clock_reasons = changed_reading(&reading.clock_reasons, &before.clock_reasons);
        reading.fabric = changed_reading(&reading.fabric, &before.fabric);
        reading
    }
}
