//! Services, read with systemctl.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_health::host::os::{Reading, Services};
use mainstay_health::parse::systemd;
use mainstay_model::time::{Mono, Span};

use super::SystemPlan;
use super::child::PendingRequest;
use super::hardware::nvidia_devices;
use crate::source::fabric::has_switches_behind_a_card;

/// How long a look waits for an answer; a later answer is read at the next look.
const POLL_TIMEOUT: Duration = Duration::from_millis(500);

/// After this time without an answer systemd counts as hung.
const HUNG_AFTER: Span = Span::seconds(20);

#[derive(Debug)]
pub(super) struct ServiceProbe {
    program: Option<PathBuf>,
    units: Vec<String>,
    asked: Option<PendingRequest>,
    /// NVSwitches behind a network card: product data are slow to read and constant.
    behind_a_card: Option<bool>,
}

impl ServiceProbe {
    pub(super) fn new(plan: &SystemPlan) -> ServiceProbe {
        let runs = Path::new("/run/systemd/system").exists();
        let program = plan.systemctl.clone().or_else(|| runs.then(|| "systemctl".into()));
        ServiceProbe { program, units: plan.units.clone(), asked: None, behind_a_card: None }
    }

    /// The services, if systemd was asked and has answered. It is asked if it is `time`.
    pub(super) fn poll(&mut self, now: Mono, time: bool, sys: &Path) -> Option<Reading<Services>> {
        let program = self.program.as_ref()?;
        if self.units.is_empty() {
            return None;
        }
        if self.asked.is_none() && time {
            let properties = "--property=Id,LoadState,ActiveState,SubState,Result,UnitFileState,NRestarts";
            let mut arguments = vec!["show", "--no-pager", properties, "--"];
            arguments.extend(self.units.iter().map(String::as_str));
            match PendingRequest::start(program, &arguments, now) {
                Ok(asked) => self.asked = Some(asked),
                Err(error) => {
                    return Some(Reading::Failed(format!("starting {}: {error}", program.display())));
                }
            }
        }
        let asked = self.asked.as_mut()?;
        match asked.answer(POLL_TIMEOUT) {
            Some(Ok(text)) => {
                self.asked = None;
                let (gpus, on_the_bus) = nvidia_devices(sys);
                let behind = *self.behind_a_card.get_or_insert_with(|| has_switches_behind_a_card(sys));
                let switches = on_the_bus > 0 || behind;
                Some(Reading::Value(Services { units: systemd::units(&text), gpus, switches }))
            }
            Some(Err(error)) => {
                self.asked = None;
                Some(Reading::Failed(format!("asking {}: {error}", program.display())))
            }
            None if now.since(asked.at) >= HUNG_AFTER => {
                asked.kill();
                Some(Reading::Failed(format!("{} does not answer", program.display())))
            }
            None => None,
        }
    }
}
