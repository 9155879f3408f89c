//! Intel GPUs, which PyTorch calls XPUs: how many a program sees.

use std::path::Path;

/// Intel's PCI vendor id, as `/sys` writes it.
const INTEL: &str = "0x8086";

/// Their number: the entries of `mask` (`ZE_AFFINITY_MASK`), else Intel's render nodes. `dri` is `/dev/dri`, where
/// a container has only its own; `drm` is `/sys/class/drm`.
pub(super) fn count(dri: &Path, drm: &Path, mask: Option<&str>) -> u32 {
    let entries = std::fs::read_dir(dri).into_iter().flatten().flatten();
    let of_intel = entries.filter(|entry| {
        let name = entry.file_name();
        let vendor = drm.join(&name).join("device/vendor");
        name.to_string_lossy().starts_with("renderD")
            && std::fs::read_to_string(vendor).is_ok_and(|vendor| vendor.trim() == INTEL)
    });
    let present = u32::try_from(of_intel.count()).unwrap_or(u32::MAX);
    match mask {
        Some(mask) => {
            let named = mask.split(',').filter(|name| !name.trim().is_empty()).count();
            present.min(u32::try_from(named).unwrap_or(u32::MAX))
        }
        None => present,
    }
}

/// A number of ranks as given, with `xpu` replaced by a number, and `auto` if there are XPUs and no other GPUs.
///
/// # Errors
/// XPUs were requested and there are none.
pub(super) fn in_numbers(text: &str, xpus: u32, has_gpus: bool) -> Result<String, String> {
    match text {
        "xpu" if xpus == 0 => Err("xpu asked for, but there is no Intel GPU: /dev/dri has none".to_owned()),
        "xpu" => Ok(xpus.to_string()),
        "auto" if xpus > 0 && !has_gpus => Ok(xpus.to_string()),
        other => Ok(other.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn render_nodes_of_intel_are_xpus() {
        let root = testing::tempdir().expect("a directory");
        let (dri, drm) = (root.path().join("dri"), root.path().join("drm"));
        std::fs::create_dir_all(&dri).expect("a directory");
        for (name, vendor) in
            [("card0", INTEL), ("renderD128", INTEL), ("renderD129", INTEL), ("renderD130", "0x10de")]
        {
            std::fs::write(dri.join(name), "").expect("a file");
            std::fs::create_dir_all(drm.join(name).join("device")).expect("a directory");
            std::fs::write(drm.join(name).join("device/vendor"), format!("{vendor}\n")).expect("a file");
        }
        assert_eq!(count(&dri, &drm, None), 2);
        assert_eq!(count(&dri, &drm, Some("1")), 1);
        assert_eq!(count(&dri, &drm, Some("")), 0);
        assert_eq!(count(&root.path().join("none"), &drm, None), 0);
    }

    #[test]
    fn auto_prefers_other_gpus() {
        assert_eq!(in_numbers("xpu", 3, false).as_deref(), Ok("3"));
        assert_eq!(in_numbers("auto", 3, false).as_deref(), Ok("3"));
        assert_eq!(in_numbers("auto", 3, true).as_deref(), Ok("auto"));
        assert_eq!(in_numbers("4", 3, false).as_deref(), Ok("4"));
        assert!(in_numbers("xpu", 0, true).is_err_and(|error| error.contains("no Intel GPU")));
    }
}
