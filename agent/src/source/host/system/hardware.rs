//! Memory with error correction, CPUs, and the modules between GPUs and network cards.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use mainstay_core::host::{MemoryModule, Modules, Reading};

/// Modules that are looked for where there are GPUs.
const OF_INTEREST: [&str; 4] = ["nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv"];

const NVIDIA: &str = "0x10de";

/// What changes seldom, as it was read last.
#[derive(Debug, Default)]
pub(super) struct Hardware {
    pub(super) memory: Vec<MemoryModule>,
    pub(super) governors: BTreeMap<String, u32>,
    packages: BTreeMap<String, PathBuf>,
}

impl Hardware {
    pub(super) fn read(&mut self, sys: &Path) {
        self.memory = memory(&sys.join("devices/system/edac/mc"));
        (self.packages, self.governors) = cpus(&sys.join("devices/system/cpu"));
    }

    /// How often each package was throttled.
    pub(super) fn throttled(&self) -> BTreeMap<String, u64> {
        let count = |(name, path): (&String, &PathBuf)| Some((name.clone(), number(path)?));
        self.packages.iter().filter_map(count).collect()
    }
}

/// Modules of each memory controller; the controller itself for errors whose module is not known.
fn memory(controllers: &Path) -> Vec<MemoryModule> {
    let mut modules = Vec::new();
    for controller in list(controllers).into_iter().filter(|name| name.starts_with("mc")) {
        let path = controllers.join(&controller);
        let slots: Vec<String> = list(&path)
            .into_iter()
            .filter(|name| name.starts_with("dimm") || name.starts_with("rank"))
            .collect();
        for slot in &slots {
            let slot_path = path.join(slot);
            let label = text(&slot_path.join("dimm_label")).filter(|label| !label.is_empty());
            let count = |name: &str| number(&slot_path.join(name));
            if let (Some(corrected), Some(uncorrected)) = (count("dimm_ce_count"), count("dimm_ue_count")) {
                let name = format!("{controller} {}", label.unwrap_or_else(|| slot.clone()));
                modules.push(MemoryModule { name, corrected, uncorrected });
            }
        }
        let names =
            if slots.is_empty() { ["ce_count", "ue_count"] } else { ["ce_noinfo_count", "ue_noinfo_count"] };
        let [corrected, uncorrected] = names.map(|name| number(&path.join(name)));
        if let (Some(corrected), Some(uncorrected)) = (corrected, uncorrected)
            && (slots.is_empty() || corrected > 0 || uncorrected > 0)
        {
            modules.push(MemoryModule { name: controller, corrected, uncorrected });
        }
    }
    modules
}

/// The counter of throttling of one CPU of each package, and how many CPUs have which governor.
fn cpus(cpus: &Path) -> (BTreeMap<String, PathBuf>, BTreeMap<String, u32>) {
    let (mut packages, mut governors) = (BTreeMap::new(), BTreeMap::new());
    let is_cpu = |name: &String| name.strip_prefix("cpu").is_some_and(|number| number.parse::<u32>().is_ok());
    for cpu in list(cpus).into_iter().filter(is_cpu) {
        let path = cpus.join(cpu);
        if let Some(governor) = text(&path.join("cpufreq/scaling_governor")) {
            *governors.entry(governor).or_default() += 1;
        }
        let counter = path.join("thermal_throttle/package_throttle_count");
        if let Some(package) = text(&path.join("topology/physical_package_id"))
            && counter.exists()
        {
            packages.entry(format!("CPU package {package}")).or_insert(counter);
        }
    }
    (packages, governors)
}

/// GPUs and NVSwitches of NVIDIA on the PCI bus.
pub(super) fn nvidia_devices(sys: &Path) -> (u32, u32) {
    let bus = sys.join("bus/pci/devices");
    let (mut gpus, mut switches) = (0, 0);
    for device in list(&bus) {
        let path = bus.join(device);
        if text(&path.join("vendor")).as_deref() != Some(NVIDIA) {
            continue;
        }
        match text(&path.join("class")) {
            Some(class) if class.starts_with("0x03") => gpus += 1,
            Some(class) if class.starts_with("0x0680") => switches += 1,
            _ => {}
        }
    }
    (gpus, switches)
}

/// Modules of interest; none on a host without GPUs where the operator names none.
pub(super) fn modules(proc: &Path, sys: &Path, wanted: &[String]) -> Option<Reading<Modules>> {
    let driver = fs::read_to_string(proc.join("driver/nvidia/version")).ok();
    if driver.is_none() && wanted.is_empty() {
        return None;
    }
    // What is built into the kernel is a module by its directory alone.
    let is_loaded = |name: &str| sys.join("module").join(name.replace('-', "_")).exists();
    if !sys.join("module").exists() {
        return Some(Reading::Failed(format!("{} is not there", sys.join("module").display())));
    }
    let (gpus, _) = nvidia_devices(sys);
    Some(Reading::Value(Modules {
        loaded: OF_INTEREST.iter().filter(|name| is_loaded(name)).map(|name| (*name).to_owned()).collect(),
        lacking: wanted.iter().filter(|name| !is_loaded(name)).cloned().collect(),
        rdma: !list(&sys.join("class/infiniband")).is_empty(),
        gpus,
        dma_buf: driver.is_some_and(|version| version.contains("Open Kernel Module")),
    }))
}

fn list(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}
