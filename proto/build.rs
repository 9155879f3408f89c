//! Compiles every `.proto` file of `v1/` and `third_party/` without an installed `protoc`.
#![allow(clippy::expect_used, reason = "a build that cannot go on says why and stops")]

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=v1");
    println!("cargo::rerun-if-changed=third_party");
    println!("cargo::rerun-if-changed=nvrx");

    let mut files = protos_in(Path::new("v1"));
    files.push(PathBuf::from("third_party/grpc/health/v1/health.proto"));
    files.push(PathBuf::from("nvrx/nvhcd.proto"));

    let tonic = || tonic_prost_build::configure().btree_map(".");

    // Files import each other, and reflection names them, by their path from the package's roots.
    let descriptors = protox::compile(&files, ["third_party", "."]).unwrap_or_else(|error| {
        eprintln!("{error:?}");
        std::process::exit(1);
    });

    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    std::fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))
        .expect("OUT_DIR is writable");

    tonic().compile_fds(descriptors).expect("what protox accepted can be generated");

    // APIs that other programs serve are not part of ours: they are not in its reflection or its snapshot.
    let foreign = protox::compile(["third_party/libtpu/runtime_metrics.proto"], ["third_party"])
        .unwrap_or_else(|error| {
            eprintln!("{error:?}");
            std::process::exit(1);
        });
    tonic().compile_fds(foreign).expect("what protox accepted can be generated");
}

/// The `.proto` files of a directory in a fixed order, so that builds are equal.
fn protos_in(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory)
        .expect("the directory of the API is part of the package")
        .map(|entry| entry.expect("its entries can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "proto"))
        .collect();
    files.sort();
    files
}
