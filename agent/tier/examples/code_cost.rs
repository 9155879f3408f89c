//! Measures the cost of the authentication code behind each chunk between hosts without TLS: keyed BLAKE3 over pieces as the wire hashes
//! them, compared with a copy of the same bytes. `cargo run --release -p mainstay-tier --example code_cost`
#![allow(clippy::print_stdout, reason = "it is what the program is for")]

use std::hint::black_box;
use std::time::Instant;

/// As `seal::READ_BYTES`.
const PIECE: usize = 256 << 10;

const BYTES: usize = 1 << 30;

fn main() {
    let bytes = vec![7_u8; BYTES];
    let mut into = vec![0_u8; PIECE];
    let rate = |began: Instant| BYTES as f64 / began.elapsed().as_secs_f64() / 1e9;
    for _ in 0..5 {
        let began = Instant::now();
        let mut code = blake3::Hasher::new_keyed(&[1; 32]);
        bytes.chunks(PIECE).for_each(|piece| _ = code.update(piece));
        black_box(code.finalize());
        let hashed = rate(began);
        let began = Instant::now();
        bytes.chunks(PIECE).for_each(|piece| black_box(&mut into).copy_from_slice(piece));
        println!("keyed BLAKE3 {hashed:.1} GB/s, copy {:.1} GB/s", rate(began));
    }
}
