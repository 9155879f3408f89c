//! Compiles every `.proto` file of `v1/` and `third_party/` without an installed `protoc`.
#![allow(clippy::expect_used, reason = "a build that cannot go on says why and stops")]

use std::path::{Path, PathBuf};

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet};
use tonic_prost_build::Builder;

fn main() {
    println!("cargo::rerun-if-changed=v1");
    println!("cargo::rerun-if-changed=third_party");
    println!("cargo::rerun-if-changed=nvrx");
    println!("cargo::rerun-if-changed=nvsentinel");

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

    let enums: String = ours(&descriptors).flat_map(|file| &file.enum_type).map(named).collect();
    std::fs::write(out.join("enums.rs"), enums).expect("OUT_DIR is writable");
    let messages = ours(&descriptors).flat_map(|file| &file.message_type);
    let as_json = messages.fold(tonic().type_attribute(".mainstay", "#[derive(serde::Serialize)]"), as_json);
    as_json.compile_fds(descriptors.clone()).expect("what protox accepted can be generated");

    // APIs that other programs serve are not part of ours: they are not in its reflection or its snapshot.
    let foreign = protox::compile(FOREIGN, ["third_party", "nvsentinel"]).unwrap_or_else(|error| {
        eprintln!("{error:?}");
        std::process::exit(1);
    });
    tonic().compile_fds(foreign).expect("what protox accepted can be generated");
}

/// Relative to `third_party` or to `nvsentinel`.
const FOREIGN: [&str; 4] = [
    "libtpu/runtime_metrics.proto",
    "health_event.proto",
    "opentelemetry/proto/collector/metrics/v1/metrics_service.proto",
    "opentelemetry/proto/collector/trace/v1/trace_service.proto",
];

fn ours(all: &FileDescriptorSet) -> impl Iterator<Item = &FileDescriptorProto> {
    all.file.iter().filter(|file| file.package() == "mainstay.v1")
}

/// The names of an enum without their prefix.
fn named(of: &EnumDescriptorProto) -> String {
    let zero = of.value[0].name();
    let prefix = zero.strip_suffix("UNSPECIFIED").expect("a test wants it");
    format!(
        "impl ApiEnum for crate::v1::{} {{ fn name(self) -> &'static str {{
            self.as_str_name().trim_start_matches({prefix:?}) }} }}\n",
        of.name()
    )
}

/// Texts that are absent as JSON if they are empty.
const ABSENT: [&str; 6] = [
    "Job.policy_trouble",
    "Job.copies_behind",
    "Job.waits_as_spare",
    "Job.leading_host",
    "Job.incomplete",
    "ListJobsResponse.next_page_token",
];

/// How the fields of a message become JSON.
fn as_json(mut builder: Builder, message: &DescriptorProto) -> Builder {
    let path = |name: &str| format!(".mainstay.v1.{}.{name}", message.name());
    for field in &message.field {
        let is_one = field.label() != Label::Repeated;
        let in_oneof = field.oneof_index.is_some() && !field.proto3_optional();
        let mut how = match field.type_name() {
            ".google.protobuf.Timestamp" => "serialize_with = \"crate::json::time\"".to_owned(),
            ".google.protobuf.Duration" => "serialize_with = \"crate::json::span\"".to_owned(),
            name if field.r#type() == Type::Enum && is_one => {
                let name = name.trim_start_matches(".mainstay.v1.");
                format!("serialize_with = \"crate::json::name::<crate::v1::{name}, _>\"")
            }
            _ => String::new(),
        };
        let optional = field.proto3_optional() || (field.r#type() == Type::Message && is_one);
        let skip = match ABSENT.contains(&format!("{}.{}", message.name(), field.name()).as_str()) {
            true => Some("String::is_empty"),
            false => (optional && !in_oneof).then_some("Option::is_none"),
        };
        if let Some(skip) = skip {
            how = format!("skip_serializing_if = {skip:?}, {how}");
        }
        if !how.is_empty() {
            builder = builder.field_attribute(path(field.name()), format!("#[serde({how})]"));
        }
    }
    // A message with alternatives has no other fields: as JSON it is the one that is set.
    for of in message.oneof_decl.iter().filter(|of| !of.name().starts_with('_')) {
        builder = builder
            .message_attribute(format!(".mainstay.v1.{}", message.name()), "#[serde(transparent)]")
            .type_attribute(path(of.name()), "#[serde(rename_all = \"snake_case\")]");
    }
    builder
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
