//! The codes by which drivers and the kernel report faults.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::kernel::KernelClass;

/// The code of a report. Its meaning is in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultCode {
    /// An XID of a GPU.
    Xid(u32),
    /// An SXID of an NVSwitch.
    Sxid(u32),
    /// A class of kernel lines.
    KernelLine(KernelClass),
}

impl fmt::Display for FaultCode {
    /// `XID 48`, `SXID 20034`, `hung_task`.
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultCode::Xid(code) => write!(to, "XID {code}"),
            FaultCode::Sxid(code) => write!(to, "SXID {code}"),
            FaultCode::KernelLine(class) => to.write_str(class.name()),
        }
    }
}
