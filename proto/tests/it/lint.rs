//! The rules STANDARD and COMMENTS of `buf lint` (buf.build/docs/lint/rules): everything has a comment, and names have
//! the usual forms. What deviates is listed with its reason.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;
use prost_types::{FileDescriptorProto, FileDescriptorSet};

/// Deviations. Names are part of the wire, so they stay.
const EXCEPTIONS: [&str; 2] = [
    // One stream of messages in each direction; older than the rule here.
    "RPC_REQUEST_STANDARD_NAME LauncherService.Attach",
    "RPC_RESPONSE_STANDARD_NAME LauncherService.Attach",
];

/// The numbers of lists in a `FileDescriptorProto` and below it (descriptor.proto).
const MESSAGES: i32 = 4;
const ENUMS: i32 = 5;
const SERVICES: i32 = 6;
const FIELDS: i32 = 2;
const ONEOFS: i32 = 8;
const VALUES: i32 = 2;
const METHODS: i32 = 2;

#[derive(Default)]
struct Lint {
    found: BTreeSet<String>,
    /// What was looked at.
    seen: usize,
}

impl Lint {
    fn want(&mut self, holds: bool, rule: &str, name: &str) {
        self.seen += 1;
        if !holds {
            self.found.insert(format!("{rule} {name}"));
        }
    }

    fn file(&mut self, file: &FileDescriptorProto) {
        let locations = file.source_code_info.iter().flat_map(|of| &of.location);
        let comments: BTreeMap<&[i32], &str> =
            locations.map(|of| (of.path.as_slice(), of.leading_comments().trim())).collect();
        let commented = |path: &[i32]| comments.get(path).is_some_and(|text| !text.is_empty());
        for (at, message) in (0..).zip(&file.message_type) {
            let name = message.name();
            self.want(commented(&[MESSAGES, at]), "COMMENT_MESSAGE", name);
            self.want(is_pascal(name), "MESSAGE_PASCAL_CASE", name);
            // Map entries are made by the compiler.
            let nested =
                message.nested_type.iter().filter(|of| !of.options.as_ref().is_some_and(|of| of.map_entry()));
            self.want(nested.count() == 0 && message.enum_type.is_empty(), "NESTED", name);
            for (place, field) in (0..).zip(&message.field) {
                let name = format!("{name}.{}", field.name());
                self.want(commented(&[MESSAGES, at, FIELDS, place]), "COMMENT_FIELD", &name);
                self.want(is_snake(field.name()), "FIELD_LOWER_SNAKE_CASE", &name);
            }
            // Those of `optional` are made by the compiler.
            let oneofs = (0..).zip(&message.oneof_decl).filter(|(_, of)| !of.name().starts_with('_'));
            for (place, oneof) in oneofs {
                let name = format!("{name}.{}", oneof.name());
                self.want(commented(&[MESSAGES, at, ONEOFS, place]), "COMMENT_ONEOF", &name);
                self.want(is_snake(oneof.name()), "ONEOF_LOWER_SNAKE_CASE", &name);
            }
        }
        for (at, of) in (0..).zip(&file.enum_type) {
            self.want(commented(&[ENUMS, at]), "COMMENT_ENUM", of.name());
            self.want(is_pascal(of.name()), "ENUM_PASCAL_CASE", of.name());
            let prefix = upper_snake(of.name());
            for (place, value) in (0..).zip(&of.value) {
                self.want(commented(&[ENUMS, at, VALUES, place]), "COMMENT_ENUM_VALUE", value.name());
                let has_prefix = value.name().starts_with(&format!("{prefix}_"));
                self.want(has_prefix, "ENUM_VALUE_PREFIX", value.name());
                let is_zero = value.name() == format!("{prefix}_UNSPECIFIED");
                self.want(is_zero == (value.number() == 0), "ENUM_ZERO_VALUE_SUFFIX", value.name());
            }
        }
        for (at, service) in (0..).zip(&file.service) {
            self.want(commented(&[SERVICES, at]), "COMMENT_SERVICE", service.name());
            self.want(service.name().ends_with("Service"), "SERVICE_SUFFIX", service.name());
            for (place, method) in (0..).zip(&service.method) {
                let name = format!("{}.{}", service.name(), method.name());
                self.want(commented(&[SERVICES, at, METHODS, place]), "COMMENT_RPC", &name);
                self.want(is_pascal(method.name()), "RPC_PASCAL_CASE", &name);
                let is_named =
                    |of: &str, what| of.rsplit('.').next() == Some(&format!("{}{what}", method.name()));
                let request = is_named(method.input_type(), "Request");
                self.want(request, "RPC_REQUEST_STANDARD_NAME", &name);
                let response = is_named(method.output_type(), "Response");
                self.want(response, "RPC_RESPONSE_STANDARD_NAME", &name);
            }
        }
    }
}

fn is_pascal(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.chars().all(|of| of.is_ascii_alphanumeric())
}

fn is_snake(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.chars().all(|of| of.is_ascii_lowercase() || of.is_ascii_digit() || of == '_')
        && !name.contains("__")
}

fn upper_snake(name: &str) -> String {
    let mut upper = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !upper.is_empty() {
            upper.push('_');
        }
        upper.push(letter.to_ascii_uppercase());
    }
    upper
}

#[test]
fn the_api_keeps_the_rules_of_buf_lint() {
    let set = FileDescriptorSet::decode(mainstay_proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut lint = Lint::default();
    let ours: Vec<_> = set.file.iter().filter(|file| file.package() == "mainstay.v1").collect();
    ours.iter().for_each(|file| lint.file(file));
    assert!(ours.len() > 4 && lint.seen > 1000, "{} files, {} rules", ours.len(), lint.seen);
    let exceptions: BTreeSet<String> = EXCEPTIONS.map(str::to_owned).into();
    assert_eq!(lint.found, exceptions);
}
