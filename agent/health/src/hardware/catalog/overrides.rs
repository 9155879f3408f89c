//! A site's overrides of the compiled-in catalog: an entry replaces the one with the same id or is added.

use serde::Deserialize;

use super::{Catalog, CatalogError, CodeMeaning, KernelMeaning, NvlinkFile, NvlinkRule, RegisterRule};
use crate::parse::log::LogReader;
use mainstay_model::entry::Fact;
use mainstay_model::time::Mono;

/// A file of overrides: entries of any catalog file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverrideFile {
    /// What XIDs mean.
    #[serde(default)]
    pub xid: Vec<CodeMeaning>,
    /// What SXIDs mean.
    #[serde(default)]
    pub sxid: Vec<CodeMeaning>,
    /// What classes of kernel lines mean, and how many lines count.
    #[serde(default)]
    pub kernel: Vec<KernelMeaning>,
    /// Rules of NVLink 5.
    #[serde(default)]
    pub rule: Vec<NvlinkRule>,
    /// What the registers of links mean.
    #[serde(default)]
    pub register: Vec<RegisterRule>,
}

impl Catalog {
    /// Returns the catalog with the entries of the file `origin`.
    ///
    /// # Errors
    /// The file contradicts itself, or an example does not parse as its entry's kind.
    pub fn overridden(mut self, origin: &str, file: OverrideFile) -> Result<Catalog, CatalogError> {
        let of_here = |meaning: CodeMeaning| CodeMeaning { origin: Some(origin.to_owned()), ..meaning };
        let xids = super::by_code("XID", file.xid.into_iter().map(of_here).collect())?;
        let sxids = super::by_code("SXID", file.sxid.into_iter().map(of_here).collect())?;
        for (kind, codes) in [("XID", &xids), ("SXID", &sxids)] {
            for (code, meaning) in codes {
                example_is_right(&format!("{kind} {code}"), &meaning.example, |fact| match fact {
                    Fact::Xid(xid) => kind == "XID" && meaning.ids.contains(&xid.code),
                    Fact::Sxid(sxid) => kind == "SXID" && meaning.ids.contains(&sxid.code),
                    _ => false,
                })?;
            }
        }
        self.xids.extend(xids);
        self.sxids.extend(sxids);
        for meaning in file.kernel {
            let class = meaning.class;
            example_is_right(
                class.name(),
                &meaning.example,
                |fact| matches!(fact, Fact::KernelReport(report) if report.class == class),
            )?;
            self.kernel.insert(class, KernelMeaning { origin: Some(origin.to_owned()), ..meaning });
        }
        let (rules, registers) = NvlinkFile { rule: file.rule, register: file.register }.checked()?;
        for rule in rules {
            let same = |other: &NvlinkRule| {
                (other.xid, &other.v1, other.status) == (rule.xid, &rule.v1, rule.status)
            };
            self.nvlink.retain(|other| !same(other));
            self.nvlink.push(rule);
        }
        for rule in registers {
            // Each bit has one meaning.
            for known in self.registers.iter_mut().filter(|known| known.register == rule.register) {
                known.bits.retain(|bit| !rule.bits.contains(bit));
            }
            self.registers.push(rule);
        }
        Ok(self)
    }
}

/// Checks that the example parses as the entry's kind. A site's entry may have no example.
fn example_is_right(entry: &str, example: &str, right: impl Fn(&Fact) -> bool) -> Result<(), CatalogError> {
    if example.is_empty() {
        return Ok(());
    }
    let read = LogReader::default().line(Mono(1), example, 1).map(|(_, fact)| fact);
    if read.as_ref().is_some_and(right) {
        return Ok(());
    }
    Err(CatalogError::Example { entry: entry.to_owned(), example: example.to_owned() })
}
