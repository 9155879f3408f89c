//! Which GPUs are near a network card: behind the same PCIe switch, or at least the same root port.

use std::path::Path;

use mainstay_health::parse::sysfs::is_pci_function;

use super::{list, read};

/// The components of the NVIDIA GPUs that share the longest path from the root with the function at `function`. None if no
/// path is shared: then all are equally far.
pub(super) fn gpus(sys: &Path, function: &Path) -> Vec<String> {
    let bus = sys.join("bus/pci/devices");
    let mut nearest = Vec::new();
    let mut longest = 1;
    for name in list(&bus).unwrap_or_default() {
        let path = bus.join(&name);
        let is_gpu = read(&path.join("vendor")).is_ok_and(|vendor| vendor == "0x10de")
            && read(&path.join("class")).is_ok_and(|class| class.starts_with("0x03"));
        let Ok(place) = std::fs::canonicalize(&path) else { continue };
        if !is_gpu {
            continue;
        }
        let shared = shared_bridges(function, &place);
        if shared > longest {
            (nearest, longest) = (Vec::new(), shared);
        }
        if shared == longest {
            let device = name.rsplit_once('.').map_or(name.as_str(), |(device, _)| device);
            nearest.push(format!("gpu.{device}"));
        }
    }
    nearest
}

/// The number of bridges on the paths to both functions.
fn shared_bridges(one: &Path, other: &Path) -> usize {
    let shared = one.components().zip(other.components()).take_while(|(a, b)| a == b);
    shared.filter(|(part, _)| part.as_os_str().to_str().is_some_and(is_pci_function)).count()
}
