//! Compiles the subset of etcd's v3 API that the crate uses, without an installed `protoc`.
#![allow(clippy::expect_used, reason = "a build that cannot go on says why and stops")]

fn main() {
    println!("cargo::rerun-if-changed=proto");
    let descriptors =
        protox::compile(["kv.proto", "log.proto", "rpc.proto"], ["proto"]).unwrap_or_else(|error| {
            eprintln!("{error:?}");
            std::process::exit(1);
        });
    tonic_prost_build::configure().compile_fds(descriptors).expect("what protox accepted can be generated");
}
