//! What operators' statements and another boot change for devices.

use super::DeviceJudge;
use super::programs::Programs;
use mainstay_model::component_id::ComponentId;
use mainstay_model::time::Mono;

impl DeviceJudge {
    /// Clears the log's faults of the component up to `at`: an operator has acknowledged them. What the driver still
    /// reports counts as before, and so does anything later.
    pub fn acknowledge(&mut self, component: &str, at: Mono) {
        let faults = match ComponentId::parse(component) {
            ComponentId::Gpu(address) => self.gpus.get_mut(&address).map(|gpu| &mut gpu.faults),
            ComponentId::NvSwitch(address) => {
                self.switches.get_mut(&address).map(|switch| &mut switch.faults)
            }
            _ => None,
        };
        if let Some(faults) = faults {
            faults.forget_until(at);
        }
    }
}

impl DeviceJudge {
    /// Another boot starts in the replayed facts: faults are over, the attempted remedies are kept.
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
