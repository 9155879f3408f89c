//! What operators say of devices, and what another boot means for them.

use super::DeviceJudge;
use super::programs::Programs;
use crate::base::pci::PciAddress;
use crate::base::time::Mono;

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

impl DeviceJudge {
    /// Another boot begins in what is recalled: faults are over, and what was tried against them is remembered.
    pub fn next_boot(&mut self) {
        for gpu in self.gpus.values_mut() {
            gpu.programs = Programs::default();
            gpu.faults.next_boot();
        }
        for switch in self.switches.values_mut() {
            switch.faults.next_boot();
        }
    }
}
