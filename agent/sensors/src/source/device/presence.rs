//! Signs of GPUs on this host that need no request to the driver.

use std::path::Path;

use mainstay_model::pci::PciAddress;

/// The library's usual name.
const USUAL_LIBRARY: &str = "libnvidia-ml.so.1";

/// Whether there is an NVIDIA GPU on the PCI bus, with or without a driver: display controllers have class 0x03.
pub(in crate::source) fn has_nvidia_device(sys: &Path) -> bool {
    let Ok(devices) = std::fs::read_dir(sys.join("bus/pci/devices")) else { return false };
    devices.flatten().any(|device| {
        let read = |name: &str| std::fs::read_to_string(device.path().join(name)).unwrap_or_default();
        read("vendor").trim() == "0x10de" && read("class").starts_with("0x03")
    })
}

/// Whether NVIDIA's library is on the library path: GPUs that are not on the bus of this machine (WSL).
pub(super) fn is_library_on_path() -> bool {
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .any(|directory| directory.is_absolute() && directory.join(USUAL_LIBRARY).exists())
}

/// The GPUs that the kernel driver holds, without those that an operator excluded, and their names if the driver reports them.
pub(super) fn held(proc: &Path) -> Vec<(PciAddress, Option<String>)> {
    let Ok(directory) = std::fs::read_dir(proc.join("driver/nvidia/gpus")) else { return Vec::new() };
    let gpu = |path: &Path| {
        let information = std::fs::read_to_string(path.join("information")).unwrap_or_default();
        let value = |name: &str| {
            information.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
        };
        let excluded = value("GPU Excluded:").is_some_and(|yes| yes == "Yes");
        let address = PciAddress::parse(path.file_name()?.to_str()?)?;
        (!excluded).then(|| (address, value("GPU UUID:").filter(|name| name.starts_with("GPU-"))))
    };
    directory.flatten().filter_map(|entry| gpu(&entry.path())).collect()
}
