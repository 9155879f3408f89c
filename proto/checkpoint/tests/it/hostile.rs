//! Manifests and containers from any source: a written one is read back, a changed one is refused, and nothing
//! panics.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::collections::BTreeMap;

use mainstay_checkpoint_format::container::{self, Tensor};
use mainstay_checkpoint_format::{Chunks, Identity, Manifest, SealedFile, chunk_sum};
use proptest::prelude::*;

fn manifest(job: String, step: u64, rank: u32, sums: Vec<u64>, format: u8) -> Manifest {
    let bytes = 64;
    Manifest {
        identity: Identity { job, attempt: 3, step, rank, world_size: rank + 1 },
        run: if format == 2 { "4711".to_owned() } else { String::new() },
        created_unix_s: 1_790_000_000,
        serialisation: "safetensors".to_owned(),
        software: BTreeMap::from([("mainstay".to_owned(), "0.1.0".to_owned())]),
        file: SealedFile {
            name: "state.safetensors".to_owned(),
            size: sums.len() as u64 * bytes,
            xxh3_128: 5,
        },
        chunks: (format == 2).then_some(Chunks { bytes, sums }),
        shared_content: None,
    }
}

proptest! {
    #[test]
    fn a_manifest_is_read_back_and_every_changed_byte_is_found(
        job in ".{0,20}", step in 0..1_000_000_u64, rank in 0..9_u32, sums in prop::collection::vec(any::<u64>(), 0..9),
        format in 1..3_u8, place in any::<prop::sample::Index>(), flip in 1..=255_u8,
    ) {
        let written = manifest(job, step, rank, sums, format);
        let mut bytes = written.encode();
        prop_assert_eq!(Manifest::decode(&bytes), Ok(written));
        let at = place.index(bytes.len());
        bytes[at] ^= flip;
        prop_assert!(Manifest::decode(&bytes).is_err());
        prop_assert!(Manifest::decode(&bytes[..at]).is_err());
    }

    #[test]
    fn any_bytes_are_no_manifest(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Manifest::decode(&bytes).is_err());
    }

    #[test]
    fn a_table_is_read_back_with_its_offsets(
        shapes in prop::collection::vec((0..3_usize, prop::collection::vec(0..5_u64, 0..4)), 0..8),
        words in prop::collection::btree_map(".{0,8}", ".{0,8}", 0..4),
    ) {
        let dtypes = ["F32", "BF16", "U8"];
        let tensors: Vec<Tensor> = shapes.into_iter().enumerate().map(|(number, (dtype, shape))| Tensor {
            name: format!("model.é\"{number}"), dtype: dtypes[dtype].to_owned(), shape,
        }).collect();
        let (bytes, header) = container::encode(&words, tensors).expect("a header");
        prop_assert_eq!(bytes.len() as u64 % container::ALIGNMENT, 0);
        let read = container::decode(&bytes, header.file_bytes).expect("read back");
        prop_assert_eq!((&read.metadata, read.file_bytes, read.tensors.len()), (&header.metadata, header.file_bytes, header.tensors.len()));
        for tensor in &header.tensors {
            prop_assert!(read.tensors.contains(tensor));
        }
        prop_assert!(container::decode(&bytes, header.file_bytes + 1).is_err());
    }

    #[test]
    fn any_header_is_read_without_a_panic(text in "\\{(\"[a-z]{1,3}\":\\{\"dtype\":\"(F32|U8|X)\",\"shape\":\\[[0-9,]{0,25}\\],\"data_offsets\":\\[[0-9]{1,20},[0-9]{1,20}\\]\\},?){0,3}\\}", size in any::<u64>()) {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        let _ = container::decode(&bytes, size);
        let _ = container::decode(&bytes[..bytes.len() / 2], size);
    }
}

#[test]
fn a_header_that_claims_too_much_is_refused_before_it_is_read() {
    assert!(container::header_bytes(u64::MAX.to_le_bytes()).is_err());
    assert!(container::decode(&u64::MAX.to_le_bytes(), 100).is_err());
    assert!(container::tensor_bytes("F64", &[u64::MAX, 2]).is_err());
    let twice = |name: &str| Tensor { name: name.to_owned(), dtype: "U8".to_owned(), shape: vec![1] };
    assert!(container::encode(&BTreeMap::new(), vec![twice("a"), twice("a")]).is_err());
    assert!(container::encode(&BTreeMap::new(), vec![twice("__metadata__")]).is_err());
}

#[test]
fn a_manifest_resigned_by_another_writer_is_checked_against_its_root() {
    let honest = manifest("job".to_owned(), 1, 0, vec![chunk_sum(b"x")], 2);
    let other = Manifest { identity: Identity { step: 2, ..honest.identity.clone() }, ..honest.clone() };
    assert_ne!(honest.root(), other.root());
    let swapped =
        Manifest { chunks: Some(Chunks { bytes: 64, sums: vec![chunk_sum(b"y")] }), ..honest.clone() };
    assert_ne!(honest.root(), swapped.root());
}

#[test]
fn a_manifest_of_the_first_version_is_read() {
    // As client/python wrote it before this crate existed.
    let first = manifest("job-1".to_owned(), 10, 0, vec![0; 2], 1);
    let text = String::from_utf8(first.encode()).expect("ASCII");
    assert!(
        text.starts_with("{\n \"attempt\": 3,\n")
            && text.contains("\"format\": 1")
            && text.ends_with("\n}\n")
    );
    assert_eq!(Manifest::decode(text.as_bytes()).expect("read").chunks, None);
    let newer = text.replace("\"format\": 1", "\"format\": 3");
    assert!(Manifest::decode(newer.as_bytes()).is_err());
}
