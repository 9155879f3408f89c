//! Reed-Solomon over blocks of equal length.

use std::fmt;

use mainstay_checkpoint::parity::Parity;
use reed_solomon_simd::{ReedSolomonDecoder, ReedSolomonEncoder};

/// Errors of coding and decoding.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum CodeError {
    #[error("{left} of the {needed} pieces that are needed are left")]
    TooFew { left: usize, needed: u32 },
    #[error("the blocks make no sense together: {0}")]
    Blocks(String),
}

impl From<reed_solomon_simd::Error> for CodeError {
    fn from(error: reed_solomon_simd::Error) -> CodeError {
        CodeError::Blocks(error.to_string())
    }
}

/// Computes parity, one block at a time.
pub struct Encoder {
    parity: Parity,
    encoder: ReedSolomonEncoder,
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("parity", &self.parity).finish_non_exhaustive()
    }
}

impl Encoder {
    /// For blocks of `block` bytes, an even number.
    pub fn new(parity: Parity, block: usize) -> Result<Encoder, CodeError> {
        Ok(Encoder {
            parity,
            encoder: ReedSolomonEncoder::new(parity.data as usize, parity.parity as usize, block)?,
        })
    }

    /// Parity number `index`, from 0, over one block of each lane of data.
    pub fn parity<B: AsRef<[u8]>>(
        &mut self,
        blocks: &[B],
        index: u32,
        into: &mut [u8],
    ) -> Result<(), CodeError> {
        self.encoder.reset(
            self.parity.data as usize,
            self.parity.parity as usize,
            blocks.first().map_or(0, |block| block.as_ref().len()),
        )?;
        for block in blocks {
            self.encoder.add_original_shard(block)?;
        }
        let encoded = self.encoder.encode()?;
        let found = encoded.recovery(index as usize).filter(|found| found.len() == into.len());
        into.copy_from_slice(found.ok_or_else(|| CodeError::Blocks("there is no such parity".to_owned()))?);
        Ok(())
    }
}

/// The blocks of data that are not among `given`, each with its number.
pub fn restore(cut: Parity, given: &[(u32, &[u8])]) -> Result<Vec<(u32, Vec<u8>)>, CodeError> {
    if given.len() < cut.data as usize {
        return Err(CodeError::TooFew { left: given.len(), needed: cut.data });
    }
    let length = given.first().map_or(0, |(_, block)| block.len());
    let mut decoder = ReedSolomonDecoder::new(cut.data as usize, cut.parity as usize, length)?;
    for (index, block) in given {
        match index.checked_sub(cut.data) {
            None => decoder.add_original_shard(*index as usize, block)?,
            Some(parity) => decoder.add_recovery_shard(parity as usize, block)?,
        }
    }
    let decoded = decoder.decode()?;
    let restored = decoded.restored_original_iter();
    Ok(restored.filter_map(|(index, block)| Some((u32::try_from(index).ok()?, block.to_vec()))).collect())
}
