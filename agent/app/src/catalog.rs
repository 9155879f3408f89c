//! The catalogs: the built-in ones, and the overrides of a site.

use std::path::PathBuf;

use anyhow::Context;
use mainstay_health::hardware::catalog::{Catalog, OverrideFile};
use mainstay_health::hardware::dcgm::DcgmCatalog;

/// The meaning of XIDs, SXIDs and kernel lines, overridden by the entries of these files; later files take
/// precedence.
///
/// # Errors
/// A file cannot be read or is wrong: the error names the file and the entry or line.
pub fn load(files: &[PathBuf]) -> anyhow::Result<Catalog> {
    files.iter().try_fold(Catalog::built_in()?, |catalog, path| {
        let name = path.display().to_string();
        let wrong = || format!("the catalog {name} (key `catalog.files`)");
        let text = std::fs::read_to_string(path).with_context(wrong)?;
        let file: OverrideFile = toml::from_str(&text).with_context(wrong)?;
        catalog.overridden(&name, file).with_context(wrong)
    })
}

/// The meaning of DCGM's errors.
///
/// # Errors
/// The built-in file is wrong; a test here reads the same file.
pub fn dcgm() -> anyhow::Result<DcgmCatalog> {
    const DAMAGED: &str = "the catalog of DCGM's errors that is compiled in is damaged";
    let file = toml::from_str(include_str!("../../catalog/hardware/dcgm.toml")).context(DAMAGED)?;
    DcgmCatalog::new(file).map_err(|code| anyhow::anyhow!("{DAMAGED}: {code} has two entries"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compiled_in_can_be_read() {
        load(&[]).unwrap();
    }

    #[test]
    fn a_file_that_is_wrong_is_named_with_its_line() {
        let directory = testing::tempdir().unwrap();
        let path = directory.path().join("ours.toml");
        std::fs::write(&path, "[[xid]]\nids = [79]\nstate = \"ILL\"\n").unwrap();
        let refused = format!("{:#}", load(std::slice::from_ref(&path)).unwrap_err());
        for part in ["ours.toml", "catalog.files", "line 3", "ILL"] {
            assert!(refused.contains(part), "{refused}");
        }
        let missing = format!("{:#}", load(&["/nowhere/x.toml".into()]).unwrap_err());
        assert!(missing.contains("/nowhere/x.toml"), "{missing}");
    }

    #[test]
    fn every_error_of_dcgm_4_is_known() {
        let catalog = super::dcgm().unwrap();
        let missing: Vec<u32> = (0..=132).filter(|code| catalog.meaning(*code).is_none()).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
