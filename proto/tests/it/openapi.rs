//! `docs/reference/openapi.yaml` has the JSON form of each message that HTTP answers with: names, types and comments of
//! the `.proto` files. `cargo xtask test --accept` writes that part.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/openapi.yaml");

/// The written part ends with this line.
const MARK: &str = "    # The rest is generated: cargo xtask test --accept\n";

/// The messages of the answers.
const ANSWERS: [&str; 5] =
    ["GetNodeResponse", "ListDevicesResponse", "ListJobsResponse", "GetJobResponse", "ListEventsResponse"];

/// Fields that may be absent: texts that JSON leaves out if they are empty, and the ranks in a list of jobs.
const ABSENT: [&str; 7] = [
    "Job.policy_trouble",
    "Job.copies_behind",
    "Job.waits_as_spare",
    "Job.leading_host",
    "Job.incomplete",
    "Job.ranks",
    "ListJobsResponse.next_page_token",
];

struct Api {
    messages: BTreeMap<String, (DescriptorProto, String)>,
    enums: BTreeMap<String, EnumDescriptorProto>,
    /// Comments by message and field.
    comments: BTreeMap<String, String>,
}

impl Api {
    fn read() -> Api {
        let set = FileDescriptorSet::decode(mainstay_proto::FILE_DESCRIPTOR_SET).unwrap();
        let mut api = Api { messages: BTreeMap::new(), enums: BTreeMap::new(), comments: BTreeMap::new() };
        for file in set.file.iter().filter(|file| file.package() == "mainstay.v1") {
            let locations = file.source_code_info.iter().flat_map(|of| &of.location);
            let comments: BTreeMap<&[i32], String> = locations
                .map(|of| {
                    (
                        of.path.as_slice(),
                        of.leading_comments().split_whitespace().collect::<Vec<_>>().join(" "),
                    )
                })
                .collect();
            // Of a path, 4 is a message of the file, and 2 a field of it (descriptor.proto).
            for (place, message) in (0..).zip(&file.message_type) {
                let comment = comments.get(&[4, place][..]).cloned().unwrap_or_default();
                for (at, field) in (0..).zip(&message.field) {
                    let comment = comments.get(&[4, place, 2, at][..]).cloned().unwrap_or_default();
                    api.comments.insert(format!("{}.{}", message.name(), field.name()), comment);
                }
                api.messages.insert(message.name().to_owned(), (message.clone(), comment));
            }
            api.enums.extend(file.enum_type.iter().map(|of| (of.name().to_owned(), of.clone())));
        }
        api
    }

    /// The answers and all that is in them.
    fn reachable(&self) -> BTreeSet<String> {
        let (mut found, mut left) = (BTreeSet::new(), ANSWERS.map(str::to_owned).to_vec());
        while let Some(name) = left.pop() {
            let Some((message, _)) = self.messages.get(&name).filter(|_| found.insert(name.clone())) else {
                continue;
            };
            left.extend(message.field.iter().map(|field| short(field.type_name()).to_owned()));
        }
        found.retain(|name| self.messages.contains_key(name));
        found
    }

    fn value(&self, field: &FieldDescriptorProto) -> String {
        let one = match (field.type_name(), field.r#type()) {
            (".google.protobuf.Timestamp", _) => "type: string, format: date-time".to_owned(),
            (".google.protobuf.Duration", _) => "type: number, description: in seconds".to_owned(),
            (name, Type::Enum) => {
                let values = &self.enums[short(name)].value;
                let prefix = values[0].name().strip_suffix("UNSPECIFIED").unwrap();
                let names: Vec<&str> = values.iter().map(|of| of.name().trim_start_matches(prefix)).collect();
                format!("type: string, enum: [{}]", names.join(", "))
            }
            (name, Type::Message) if name.ends_with("AttributesEntry") => {
                "type: object, additionalProperties: { type: string }".to_owned()
            }
            (name, Type::Message) => format!("$ref: \"#/components/schemas/{}\"", short(name)),
            (_, Type::String) => "type: string".to_owned(),
            (_, Type::Bool) => "type: boolean".to_owned(),
            // JSON has no NaN, which a loss may be.
            (_, Type::Double | Type::Float) => "type: [number, \"null\"]".to_owned(),
            (_, Type::Uint32 | Type::Uint64) => "type: integer, minimum: 0".to_owned(),
            (_, Type::Int32 | Type::Int64) => "type: integer".to_owned(),
            (_, other) => panic!("{other:?} has no form here"),
        };
        let is_map = field.type_name().ends_with("AttributesEntry");
        match field.label() {
            Label::Repeated if !is_map => format!("{{ type: array, items: {{ {one} }} }}"),
            _ => format!("{{ {one} }}"),
        }
    }

    fn schema(&self, name: &str) -> String {
        let (message, comment) = &self.messages[name];
        let mut text = format!("    {name}:\n      description: {}\n", quoted(comment));
        let is_choice = message.oneof_decl.iter().any(|of| !of.name().starts_with('_'));
        if is_choice {
            // Of the alternatives, one is set; of a kind that an older server does not know, none.
            text.push_str("      oneOf:\n        - type: \"null\"\n");
            for field in &message.field {
                let (name, value) = (field.name(), self.value(field));
                let _ = writeln!(
                    text,
                    "        - {{ type: object, required: [{name}], properties: {{ {name}: {value} }} }}"
                );
            }
            return text;
        }
        text.push_str("      type: object\n");
        let is_required = |field: &&FieldDescriptorProto| {
            let is_message = field.r#type() == Type::Message && field.label() != Label::Repeated;
            let key = format!("{name}.{}", field.name());
            !field.proto3_optional() && !is_message && !ABSENT.contains(&key.as_str())
        };
        let required: Vec<&str> =
            message.field.iter().filter(is_required).map(FieldDescriptorProto::name).collect();
        if !required.is_empty() {
            let _ = writeln!(text, "      required: [{}]", required.join(", "));
        }
        text.push_str("      properties:\n");
        for field in &message.field {
            let comment = &self.comments[&format!("{name}.{}", field.name())];
            if !comment.is_empty() {
                let _ = writeln!(text, "        # {comment}");
            }
            let _ = writeln!(text, "        {}: {}", field.name(), self.value(field));
        }
        text
    }
}

fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[test]
fn the_schemas_are_those_of_the_messages() {
    let api = Api::read();
    let schemas: String = api.reachable().iter().map(|name| api.schema(name)).collect();
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (written, generated) =
        page.split_once(MARK).unwrap_or_else(|| panic!("{PAGE} lacks the line {MARK}"));
    if std::env::var_os("MAINSTAY_TEST_ACCEPT").is_some() {
        std::fs::write(PAGE, format!("{written}{MARK}{schemas}")).unwrap();
        return;
    }
    assert!(generated == schemas, "{PAGE}: cargo xtask test --accept writes the schemas anew:\n{schemas}");
}
