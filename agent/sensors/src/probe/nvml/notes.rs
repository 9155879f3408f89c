//! Errors that concern a GPU as a whole.

use mainstay_health::hardware::gpu::{GpuTrouble, Sampled};
use nvml_wrapper::error::NvmlError;

use super::calls::{NvmlResult, is_not_offered};

/// Errors that concern a GPU as a whole during its reading. Some calls still answer for a lost GPU, so a single call that
/// reports the loss counts for all.
#[derive(Default)]
pub(super) struct Notes {
    fatal: Option<GpuTrouble>,
    /// Whether any call succeeded.
    is_reported: bool,
    /// The error of a call that failed for no reason that the driver knows.
    unknown: Option<String>,
}

impl Notes {
    /// Whether the GPU is lost or unusable: further calls are pointless.
    pub(super) fn is_fatal(&self) -> bool {
        self.fatal.is_some()
    }

    /// What is wrong with the GPU as a whole: a reported error, or an unknown error if no call succeeded.
    pub(super) fn trouble(self) -> Option<GpuTrouble> {
        let of_unknown = self.unknown.filter(|_| !self.is_reported).map(GpuTrouble::Unopened);
        self.fatal.or(of_unknown)
    }

    /// Takes in the result of a call.
    pub(super) fn take<T>(&mut self, result: NvmlResult<T>) -> Sampled<T> {
        match result {
            Ok(value) => {
                self.is_reported = true;
                Sampled::Value(value)
            }
            Err(error) if is_not_offered(&error) => Sampled::NotOffered,
            Err(error) => {
                if matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired) && self.fatal.is_none() {
                    self.fatal = Some(trouble(&error));
                }
                if matches!(error, NvmlError::Unknown) {
                    self.unknown = Some(error.to_string());
                }
                Sampled::Failed(error.to_string())
            }
        }
    }
}

/// The trouble of a GPU that an error indicates.
pub(super) fn trouble(error: &NvmlError) -> GpuTrouble {
    match error {
        // The second code: a GPU that is not found.
        NvmlError::GpuLost | NvmlError::UnexpectedVariant(28) => GpuTrouble::Lost,
        NvmlError::ResetRequired => GpuTrouble::ResetRequired,
        NvmlError::NoPermission | NvmlError::OperatingSystem => GpuTrouble::NoPermission,
        error => GpuTrouble::Other(error.to_string()),
    }
}
