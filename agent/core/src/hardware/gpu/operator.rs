//! What operators say of devices, and what another boot means for them.

use super::DeviceJudge;
use super::programs::Programs;
use crate::base::time::Mono;
use crate::model::component_id::ComponentId;

impl DeviceJudge {
    /// Forgets what the log told of the component up to `at`: an operator has seen to it. What the driver still reads is
    /// judged on, and what comes later counts anew.
    pub fn acknowledge(&mut self, component: &str, at: Mono) {
        let faults = match ComponentId::parse(component) {
            ComponentId::Gpu(address) => self.gpus.get_mut(&address).map(|gpu| &mut gpu.faults),
            ComponentId::NvSwitch(address) => self.switches.get_mut(&address).map(|of| &mut of.faults),
            _ => None,
        };
        if let Some(faults) = faults {
            faults.forget_until(at);
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
