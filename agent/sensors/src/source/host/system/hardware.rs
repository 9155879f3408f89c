//! Memory with error correction, CPUs, and the modules between GPUs and network cards.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use mainstay_health::host::os::{Capped, MemoryModule, Modules, Reading, SwitchPorts};
use mainstay_health::parse::pci_config;

/// Modules to look for on hosts with GPUs.
const OF_INTEREST: [&str; 4] = ["nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv"];

const NVIDIA: &str = "0x10de";

/// The last reading of slowly changing data.
#[derive(Debug, Default)]
pub(super) struct Hardware {
    pub(super) memory: Vec<MemoryModule>,
    pub(super) governors: BTreeMap<String, u32>,
    pub(super) held_low: u32,
    pub(super) capped: Option<Capped>,
    pub(super) switch_ports: Option<SwitchPorts>,
    packages: BTreeMap<String, PathBuf>,
}

impl Hardware {
    pub(super) fn read(&mut self, sys: &Path) {
        self.memory = memory(&sys.join("devices/system/edac/mc"));
        (self.packages, self.governors) = cpus(&sys.join("devices/system/cpu"));
        self.held_low = held_low(&sys.join("devices/system/cpu"));
        self.capped = capped(&sys.join("devices/system/cpu"));
        self.switch_ports = switch_ports(&sys.join("bus/pci/devices"));
    }

    /// How often each package was throttled.
    pub(super) fn throttled(&self) -> BTreeMap<String, u64> {
        let count = |(name, path): (&String, &PathBuf)| Some((name.clone(), number(path)?));
        self.packages.iter().filter_map(count).collect()
    }
}

/// Modules of each memory controller; the controller itself for errors of an unknown module.
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

/// The throttle counter of one CPU of each package, and how many CPUs have which governor.
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

/// How many CPUs a governor keeps at their lowest frequency. Drivers that choose the frequency themselves treat `powersave`
/// as a hint only, and it is their usual governor.
fn held_low(cpus: &Path) -> u32 {
    let is_low = |cpu: &String| {
        let frequency = cpus.join(cpu).join("cpufreq");
        let governor = text(&frequency.join("scaling_governor"));
        governor.as_deref() == Some("powersave")
            && text(&frequency.join("scaling_driver")).is_some_and(|driver| {
                !matches!(driver.as_str(), "intel_pstate" | "amd-pstate-epp" | "amd_pstate_epp")
            })
    };
    u32::try_from(list(cpus).iter().filter(|cpu| is_low(cpu)).count()).unwrap_or(u32::MAX)
}

/// Whether the CPUs have a fast counter with a constant rate that continues while they sleep. False for guests: the host
/// may prevent its use.
pub(super) fn has_fast_counter(proc: &Path) -> bool {
    let Ok(file) = fs::File::open(proc.join("cpuinfo")) else { return false };
    // The flags of the first CPU apply to all, and the file is long on a large host.
    let mut lines = BufReader::new(file).lines().map_while(Result::ok);
    let Some(flags) = lines.find(|line| line.starts_with("flags")) else { return false };
    let has = |name: &str| flags.split_whitespace().any(|flag| flag == name);
    has("constant_tsc") && has("nonstop_tsc") && !has("hypervisor")
}

/// The frequency limit of the CPUs, if the kernel sets their frequency.
fn capped(cpus: &Path) -> Option<Capped> {
    let mut shares: Vec<f64> = list(cpus)
        .into_iter()
        .filter_map(|cpu| {
            let frequency = cpus.join(cpu).join("cpufreq");
            let best = number(&frequency.join("cpuinfo_max_freq")).filter(|best| *best > 0)?;
            Some(100.0 * number(&frequency.join("scaling_max_freq"))? as f64 / best as f64)
        })
        .collect();
    shares.sort_by(f64::total_cmp);
    let least = *shares.first()?;
    let at_least = shares.iter().take_while(|share| **share <= least).count();
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Some(Capped { cpus: count(shares.len()), least, at_least: count(at_least) })
}

/// The ports of PCIe switches above the GPUs of NVIDIA's driver, if several devices can communicate through them. A machine
/// whose devices are passed to guests (vfio) needs the redirection of its switches.
fn switch_ports(devices: &Path) -> Option<SwitchPorts> {
    let mut above = std::collections::BTreeSet::new();
    for device in list(devices) {
        let path = devices.join(device);
        let driver = fs::read_link(path.join("driver")).ok();
        let is_ours = driver.as_deref().and_then(Path::file_name).is_some_and(|driver| driver == "nvidia");
        if !is_ours || text(&path.join("vendor")).as_deref() != Some(NVIDIA) {
            continue;
        }
        // The device's path contains the directories of the ports above it.
        let Ok(place) = fs::canonicalize(&path) else { continue };
        above.extend(
            place.ancestors().skip(1).filter(|port| port.join("config").is_file()).map(Path::to_owned),
        );
    }
    let ports = above.into_iter().filter_map(|port| {
        let read = pci_config::port(&fs::read(port.join("config")).ok()?)?;
        let name = port.file_name()?.to_str()?.to_owned();
        read.of_switch.then_some((name, read.redirects))
    });
    let ports: Vec<(String, bool)> = ports.collect();
    let redirecting =
        ports.iter().filter(|(_, redirects)| *redirects).map(|(name, _)| name.clone()).collect();
    let read = u32::try_from(ports.len()).unwrap_or(u32::MAX);
    (read > 0).then_some(SwitchPorts { read, redirecting })
}

/// RDMA devices without a verbs device in the kernel.
fn without_verbs(sys: &Path) -> Vec<String> {
    let verbs = sys.join("class/infiniband_verbs");
    let known: Vec<String> =
        list(&verbs).into_iter().filter_map(|device| text(&verbs.join(device).join("ibdev"))).collect();
    list(&sys.join("class/infiniband")).into_iter().filter(|device| !known.contains(device)).collect()
}

/// The numbers of NVIDIA's GPUs and NVSwitches on the PCI bus.
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

/// Modules of interest; none on a host without GPUs if the operator names none.
pub(super) fn modules(proc: &Path, sys: &Path, wanted: &[String]) -> Option<Reading<Modules>> {
    let driver = fs::read_to_string(proc.join("driver/nvidia/version")).ok();
    if driver.is_none() && wanted.is_empty() {
        return None;
    }
    // A built-in module only has a directory.
    let is_loaded = |name: &str| sys.join("module").join(name.replace('-', "_")).exists();
    if !sys.join("module").exists() {
        return Some(Reading::Failed(format!("{} is not there", sys.join("module").display())));
    }
    let (gpus, _) = nvidia_devices(sys);
    Some(Reading::Value(Modules {
        loaded: OF_INTEREST.iter().filter(|name| is_loaded(name)).map(|name| (*name).to_owned()).collect(),
        lacking: wanted.iter().filter(|name| !is_loaded(name)).cloned().collect(),
        rdma: !list(&sys.join("class/infiniband")).is_empty(),
        without_verbs: without_verbs(sys),
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
