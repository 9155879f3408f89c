//! What operators say of devices.

use super::DeviceJudge;
use crate::pci::PciAddress;
use crate::time::Mono;

impl DeviceJudge {
    /// Forgets what the log told of the component up to `at`: an operator has seen to it. What the driver still reads is
    /// judged on, and what comes later counts anew.
    pub fn acknowledge(&mut self, component: &str, at: Mono) {
        let address = |prefix: &str| component.strip_prefix(prefix).and_then(PciAddress::parse);
        if let Some(gpu) = address("gpu.").and_then(|address| self.gpus.get_mut(&address)) {
            gpu.faults.forget_until(at);
        }
        if let Some(switch) = address("nvswitch.").and_then(|address| self.switches.get_mut(&address)) {
            switch.faults.forget_until(at);
        }
    }
}
