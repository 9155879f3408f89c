//! The API is additive only: `v1.snapshot` lists every name, number and type, and none of its lines may go or change.
//!
//! After an addition: `MAINSTAY_UPDATE_SNAPSHOT=1 cargo test -p mainstay-proto`.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet, ServiceDescriptorProto,
};

const SNAPSHOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/v1.snapshot");

#[test]
fn the_api_only_grows() {
    let committed = std::fs::read_to_string(SNAPSHOT).unwrap_or_default();
    let committed: BTreeSet<&str> = committed.lines().collect();
    let now = describe(mainstay_proto::FILE_DESCRIPTOR_SET);
    let now: BTreeSet<&str> = now.iter().map(String::as_str).collect();

    let lost: Vec<&&str> = committed.difference(&now).collect();
    assert!(
        lost.is_empty(),
        "these parts of the API were removed, renamed, renumbered or changed in type, which breaks callers \
         that are already out there; put them back and add something new beside them:\n{lost:#?}"
    );

    let added: Vec<&&str> = now.difference(&committed).collect();
    if std::env::var_os("MAINSTAY_UPDATE_SNAPSHOT").is_some() {
        let text: String = now.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(SNAPSHOT, text).unwrap();
        return;
    }
    assert!(
        added.is_empty(),
        "the API has grown; commit the new snapshot made by \
         `MAINSTAY_UPDATE_SNAPSHOT=1 cargo test -p mainstay-proto`:\n{added:#?}"
    );
}

#[test]
fn every_enum_of_ours_starts_with_unspecified() {
    let set = FileDescriptorSet::decode(mainstay_proto::FILE_DESCRIPTOR_SET).unwrap();
    let ours = set.file.iter().filter(|file| file.package().starts_with("mainstay."));
    let enums: Vec<&EnumDescriptorProto> = ours.flat_map(|file| &file.enum_type).collect();
    assert!(!enums.is_empty());
    for of in enums {
        let zero = of.value.iter().find(|value| value.number() == 0).unwrap();
        assert!(zero.name().ends_with("_UNSPECIFIED"), "{}: zero is {}", of.name(), zero.name());
    }
}

#[test]
fn a_change_of_each_kind_changes_a_line() {
    let original = FileDescriptorSet::decode(mainstay_proto::FILE_DESCRIPTOR_SET).unwrap();
    let lines = |set: &FileDescriptorSet| describe(&set.encode_to_vec());
    let changed = |change: fn(&mut prost_types::FileDescriptorProto)| {
        let mut set = original.clone();
        let file = set.file.iter_mut().find(|file| file.name() == "v1/health.proto").unwrap();
        change(file);
        assert_ne!(lines(&set), lines(&original));
    };
    changed(|file| file.message_type[0].field[0].number = Some(99));
    changed(|file| file.message_type[0].field[0].name = Some("renamed".into()));
    changed(|file| file.message_type[0].field[0].r#type = Some(Type::Bytes.into()));
    changed(|file| file.message_type[0].field[0].label = Some(Label::Repeated.into()));
    changed(|file| file.enum_type[0].value[1].number = Some(99));
    changed(|file| file.service[0].method[0].server_streaming = Some(true));
    changed(|file| file.package = Some("mainstay.v9".into()));
}

/// One line for each message, field, enum value and method, sorted by file and place.
fn describe(descriptors: &[u8]) -> Vec<String> {
    let set = FileDescriptorSet::decode(descriptors).unwrap();
    let mut lines = Vec::new();
    for file in set.file.iter().filter(|file| !file.package().starts_with("google.protobuf")) {
        let package = file.package();
        file.message_type.iter().for_each(|of| describe_message(package, of, &mut lines));
        file.enum_type.iter().for_each(|of| describe_enum(package, of, &mut lines));
        file.service.iter().for_each(|of| describe_service(package, of, &mut lines));
    }
    lines
}

fn describe_message(parent: &str, message: &DescriptorProto, lines: &mut Vec<String>) {
    let name = format!("{parent}.{}", message.name());
    lines.push(format!("message {name}"));
    for field in &message.field {
        let oneof = field.oneof_index.filter(|_| !field.proto3_optional());
        let oneof = oneof.map(|at| format!(" in {}", message.oneof_decl[at as usize].name()));
        lines.push(format!(
            "field {name}.{} = {} {}{}",
            field.name(),
            field.number(),
            field_type(field),
            oneof.unwrap_or_default()
        ));
    }
    message.nested_type.iter().for_each(|of| describe_message(&name, of, lines));
    message.enum_type.iter().for_each(|of| describe_enum(&name, of, lines));
}

fn field_type(field: &FieldDescriptorProto) -> String {
    let kind = match field.r#type() {
        Type::Message | Type::Enum => field.type_name().trim_start_matches('.').to_owned(),
        scalar => scalar.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    };
    match field.label() {
        Label::Repeated => format!("repeated {kind}"),
        _ if field.proto3_optional() => format!("optional {kind}"),
        _ => kind,
    }
}

fn describe_enum(parent: &str, of: &EnumDescriptorProto, lines: &mut Vec<String>) {
    for value in &of.value {
        lines.push(format!("value {parent}.{}.{} = {}", of.name(), value.name(), value.number()));
    }
}

fn describe_service(package: &str, service: &ServiceDescriptorProto, lines: &mut Vec<String>) {
    for method in &service.method {
        let side = |streams: bool, name: &str| {
            format!("{}{}", if streams { "stream " } else { "" }, name.trim_start_matches('.'))
        };
        lines.push(format!(
            "rpc {package}.{}.{}({}) returns ({})",
            service.name(),
            method.name(),
            side(method.client_streaming(), method.input_type()),
            side(method.server_streaming(), method.output_type())
        ));
    }
}
