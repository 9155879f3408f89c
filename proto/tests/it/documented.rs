//! `docs/reference/api.md` names every method of the public services.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use prost::Message;
use prost_types::FileDescriptorSet;

#[test]
fn every_public_method_is_documented() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/api.md");
    let page = std::fs::read_to_string(path).unwrap();
    let set = FileDescriptorSet::decode(mainstay_proto::FILE_DESCRIPTOR_SET).unwrap();
    let public = ["v1/health.proto", "v1/events.proto", "v1/explain.proto", "grpc/health/v1/health.proto"];
    let files: Vec<_> = set.file.iter().filter(|file| public.contains(&file.name())).collect();
    assert_eq!(files.len(), public.len());
    for service in files.iter().flat_map(|file| &file.service) {
        assert!(page.contains(service.name()), "{path} does not mention the service {}", service.name());
        for method in &service.method {
            let name = format!("`{}`", method.name());
            assert!(page.contains(&name), "{path} does not mention {name} of {}", service.name());
        }
    }
}
