//! Secrets in what a command prints about a run: in its command line and in what its program wrote.

use std::path::Path;

use anyhow::Context;
use mainstay_model::entry::Entry;
use mainstay_model::redact::{mask, masked};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::explain;

/// Whether secrets are shown.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(super) struct Secrets {
    /// Show tokens, passwords and other secrets in the command line and in what the program wrote
    #[arg(long)]
    show_secrets: bool,
}

impl Secrets {
    /// The journal of a run.
    pub(super) fn read(self, run_dir: &Path) -> anyhow::Result<Vec<Entry>> {
        explain::read(run_dir)?.into_iter().map(|entry| self.mask(entry)).collect()
    }

    /// The value as it may be shown.
    pub(super) fn mask<T: Serialize + DeserializeOwned>(self, value: T) -> anyhow::Result<T> {
        if self.show_secrets {
            return Ok(value);
        }
        masked(&value).context("masking secrets (--show-secrets shows them)")
    }

    /// The text as it may be shown.
    pub(super) fn mask_text(self, text: &str) -> String {
        if self.show_secrets { text.to_owned() } else { mask(text) }
    }
}
