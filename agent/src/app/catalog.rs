//! The catalogues that are compiled in.

use anyhow::Context;
use mainstay_core::catalog::Catalog;

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

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_compiled_in_can_be_read() {
        super::compiled_in().unwrap();
    }
}
