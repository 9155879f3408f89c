//! The host's management controller, read with ipmitool.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_health::host::os::Reading;
use mainstay_health::parse::ipmi::{self, Sensor};
use mainstay_model::time::{Mono, Span};

use super::SystemPlan;
use super::child::PendingRequest;

/// How long a look waits for an answer; a later answer is read at the next look.
const POLL_TIMEOUT: Duration = Duration::from_millis(100);

/// A controller takes seconds for all of its sensors. After this time it counts as hung.
const HUNG_AFTER: Span = Span::seconds(120);

/// How often it is asked: it is slow, and its readings change slowly.
const REQUEST_INTERVAL: Span = Span::seconds(120);

/// The kernel's devices for a controller.
const DEVICES: [&str; 3] = ["dev/ipmi0", "dev/ipmi/0", "dev/ipmidev/0"];

#[derive(Debug)]
pub(super) struct ChassisProbe {
    program: Option<PathBuf>,
    /// The operator did not configure it: if the program is missing, nothing is reported.
    unasked: bool,
    asked: Option<PendingRequest>,
    last: Option<Mono>,
}

impl ChassisProbe {
    pub(super) fn new(plan: &SystemPlan) -> ChassisProbe {
        let has_controller = || DEVICES.iter().any(|device| Path::new("/").join(device).exists());
        let unasked = plan.ipmitool.is_none();
        let program = plan.ipmitool.clone().or_else(|| has_controller().then(|| "ipmitool".into()));
        ChassisProbe { program, unasked, asked: None, last: None }
    }

    /// The controller's sensors, if it was asked and has answered.
    pub(super) fn poll(&mut self, now: Mono) -> Option<Reading<Vec<Sensor>>> {
        let program = self.program.as_ref()?;
        if self.asked.is_none() && self.last.is_none_or(|last| now.since(last) >= REQUEST_INTERVAL) {
            self.last = Some(now);
            match PendingRequest::start(program, &["sdr", "elist"], now) {
                Ok(asked) => self.asked = Some(asked),
                Err(error) if self.unasked && error.kind() == std::io::ErrorKind::NotFound => {
                    self.program = None;
                    return None;
                }
                Err(error) => {
                    return Some(Reading::Failed(format!("starting {}: {error}", program.display())));
                }
            }
        }
        let asked = self.asked.as_mut()?;
        match asked.answer(POLL_TIMEOUT) {
            Some(Ok(text)) => {
                self.asked = None;
                let sensors = ipmi::sensors(&text);
                // One that may not be asked, or has no sensors, counts as absent.
                let silent = sensors.is_empty() && self.unasked;
                (!silent).then_some(Reading::Value(sensors))
            }
            Some(Err(error)) => {
                self.asked = None;
                (!self.unasked).then(|| Reading::Failed(format!("asking {}: {error}", program.display())))
            }
            None if now.since(asked.at) >= HUNG_AFTER => {
                asked.kill();
                Some(Reading::Failed(format!("{} does not answer", program.display())))
            }
            None => None,
        }
    }
}
