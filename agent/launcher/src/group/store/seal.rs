//! Proof that a launcher of the job wrote its end, and no stranger who can write into the store.

use mainstay_coord::JobEndedNote;
use serde_json::{Value, json};

use crate::group::plan::HostsPlan;

/// The key of the proofs of one job.
#[derive(Clone)]
pub struct Seal([u8; 32]);

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal(..)")
    }
}

impl Seal {
    /// By the job's token, which a launcher that comes after the end has too; without one, by the secret in the store.
    pub(crate) fn new(plan: &HostsPlan, run_id: &str, stored: &str) -> Seal {
        let secret = plan.token.as_deref().unwrap_or(stored);
        Seal(blake3::derive_key("mainstay 2026-11 end of a job", format!("{secret}\0{run_id}").as_bytes()))
    }

    /// What the note of the end contains.
    pub(crate) fn sealed(&self, epoch: u64, exit: i32) -> Value {
        json!({ "exit": exit, "proof": self.proof(epoch, exit) })
    }

    /// Whether a launcher of the job wrote this.
    pub(crate) fn is_of(&self, ended: &JobEndedNote) -> bool {
        let proof = ended.body.get("proof").and_then(Value::as_str);
        let proof = proof.and_then(|proof| blake3::Hash::from_hex(proof).ok());
        // Hashes are compared in constant time.
        proof.is_some_and(|proof| proof == self.hash(ended.epoch, super::exit_of(ended)))
    }

    fn proof(&self, epoch: u64, exit: i32) -> String {
        self.hash(epoch, exit).to_hex().to_string()
    }

    fn hash(&self, epoch: u64, exit: i32) -> blake3::Hash {
        blake3::keyed_hash(&self.0, format!("{epoch}\0{exit}").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_note_of_a_launcher_of_the_job_is_accepted() {
        let seal = |secret: &str| Seal(blake3::derive_key("test", secret.as_bytes()));
        let note = |epoch, body| JobEndedNote { version: 1, needs: 1, epoch, why: String::new(), body };
        let (own, body) = (seal("own"), seal("own").sealed(3, 0));
        assert!(own.is_of(&note(3, body.clone())));
        assert!(!seal("other").is_of(&note(3, body.clone())));
        assert!(!own.is_of(&note(4, body.clone())), "of another leader");
        let failed = json!({ "exit": 1, "proof": body["proof"] });
        for forged in [failed, json!({ "exit": 0 }), json!({ "exit": 0, "proof": 7 }), Value::Null] {
            assert!(!own.is_of(&note(3, forged)));
        }
    }
}
