//! The catalogues that are compiled in.

use anyhow::Context;
use mainstay_core::catalog::Catalog;
use mainstay_core::dcgm::DcgmCatalog;

/// What XIDs, SXIDs and kernel lines mean.
///
/// # Errors
/// A file of the catalogue is wrong; the core's tests read the same files.
pub fn compiled_in() -> anyhow::Result<Catalog> {
    const DAMAGED: &str = "the catalogue that is compiled in is damaged";
    let catalog = Catalog::new(
        toml::from_str(include_str!("../../catalog/hardware/xid.toml")).context(DAMAGED)?,
        toml::from_str(include_str!("../../catalog/hardware/sxid.toml")).context(DAMAGED)?,
        toml::from_str(include_str!("../../catalog/hardware/kernel.toml")).context(DAMAGED)?,
        toml::from_str(include_str!("../../catalog/hardware/nvlink5.toml")).context(DAMAGED)?,
    );
    catalog.context(DAMAGED)
}

/// What DCGM's errors mean.
///
/// # Errors
/// The file of the catalogue is wrong; a test here reads the same.
pub fn dcgm() -> anyhow::Result<DcgmCatalog> {
    const DAMAGED: &str = "the catalogue of DCGM's errors that is compiled in is damaged";
    let file = toml::from_str(include_str!("../../catalog/hardware/dcgm.toml")).context(DAMAGED)?;
    DcgmCatalog::new(file).map_err(|code| anyhow::anyhow!("{DAMAGED}: {code} stands there twice"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_compiled_in_can_be_read() {
        super::compiled_in().unwrap();
    }

    #[test]
    fn every_error_of_dcgm_4_is_known() {
        let catalog = super::dcgm().unwrap();
        let missing: Vec<u32> = (0..=132).filter(|code| catalog.meaning(*code).is_none()).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
