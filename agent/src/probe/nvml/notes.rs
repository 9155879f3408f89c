//! What was told of a GPU as a whole.

use mainstay_core::hardware::gpu::{GpuTrouble, Read};
use nvml_wrapper::error::NvmlError;

use super::calls::{Answer, is_not_offered};

/// What was told of a GPU as a whole while it was read: some calls go on answering for a GPU that is lost, so that
/// one that says so counts for all.
#[derive(Default)]
pub(super) struct Notes {
    fatal: Option<GpuTrouble>,
    /// Whether anything was told at all.
    reported: bool,
    /// How a call failed for which the driver knows no reason.
    unknown: Option<String>,
}

impl Notes {
    /// Whether the GPU is lost or unusable: there is no point in asking it more.
    pub(super) fn is_fatal(&self) -> bool {
        self.fatal.is_some()
    }

    /// What is wrong with the GPU as a whole: it was said, or nothing was told and the driver does not know why.
    pub(super) fn trouble(self) -> Option<GpuTrouble> {
        let of_unknown = self.unknown.filter(|_| !self.reported).map(GpuTrouble::Unopened);
        self.fatal.or(of_unknown)
    }

    /// What a call came to.
    pub(super) fn take<T>(&mut self, result: Answer<T>) -> Read<T> {
        match result {
            Ok(value) => {
                self.reported = true;
                Read::Value(value)
            }
            Err(error) if is_not_offered(&error) => Read::NotOffered,
            Err(error) => {
                if matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired) && self.fatal.is_none() {
                    self.fatal = Some(trouble(&error));
                }
                if matches!(error, NvmlError::Unknown) {
                    self.unknown = Some(error.to_string());
                }
                Read::Failed(error.to_string())
            }
        }
    }
}

/// What an error says of a GPU.
pub(super) fn trouble(error: &NvmlError) -> GpuTrouble {
    match error {
        // The second: a GPU that is not found.
        NvmlError::GpuLost | NvmlError::UnexpectedVariant(28) => GpuTrouble::Lost,
        NvmlError::ResetRequired => GpuTrouble::ResetRequired,
        NvmlError::NoPermission | NvmlError::OperatingSystem => GpuTrouble::NoPermission,
        error => GpuTrouble::Other(error.to_string()),
    }
}
