//! Explains a component of the host, or an event: what was observed, what it means, what to do, where that is
//! documented, and which sources disagree.

use mainstay_health::hardware::catalog::{Catalog, CodeMeaning, FaultOrigin, KernelMeaning, RegisterMeaning};
use mainstay_health::parse::log::LogReader;
use mainstay_model::entry::Fact;
use mainstay_model::health::RecommendedAction as Action;
use mainstay_model::time::Mono;
use mainstay_proto::v1::{Component, Event, RecommendedAction};
use serde_json::{Value, json};

use super::known;
use crate::json::plain;
use crate::output::clean;

/// The meaning of a log line.
struct Meaning {
    /// `XID 48`, or the class of the line.
    what: String,
    name: String,
    meaning: String,
    blame: Option<FaultOrigin>,
    action: Action,
    source: String,
    differs: Option<String>,
    origin: Option<String>,
}

/// Where checks are documented.
const DOCUMENT: &str = "docs/reference/checks.md";

/// A component in its current state.
pub(super) fn component(component: &Component, catalog: &Catalog) -> (String, Value) {
    let mut lines = vec![
        format!("{} is {}", component.name, plain(component.state().as_str_name(), "HEALTH_STATE")),
        String::new(),
    ];
    let known = known::of(&component.name);
    lines.extend(known.map(|known| format!("What it is: {}", known.what)));
    lines.push(format!("What was seen: {}", component.reason));
    for of in &component.evidence {
        let before = of.before.as_ref().map(|before| format!(" (before: {before})")).unwrap_or_default();
        let limit = of.limit.as_ref().map(|limit| format!(" (limit {limit})")).unwrap_or_default();
        lines.push(format!("  {}: {}{before}{limit}", of.source, of.reading));
    }
    if let Some(sure) = component.confidence.filter(|sure| *sure < 1.0) {
        lines.push(format!("  {:.0} % sure", sure * 100.0));
    }
    if let Some(known) = &component.acknowledgement {
        lines.push(format!("  acknowledged by user {}: {}", known.uid, known.reason));
    }
    if let Some(silence) = &component.silence {
        lines.push(format!("  silenced by user {}: {}", silence.uid, silence.reason));
    }
    let reported = component.evidence.iter().map(|of| of.reading.as_str());
    let meanings = meanings(reported.chain(std::iter::once(component.reason.as_str())), catalog);
    lines.extend(meanings.iter().flat_map(Meaning::lines));
    lines.push(String::new());
    lines.push(format!("What to do: {}", advice(component.recommended_action())));
    let (document, section) = known.map_or((DOCUMENT, ""), |known| known.documented);
    let section = if section.is_empty() { String::new() } else { format!(", {}", section.replace('`', "")) };
    lines.push(format!("Documented in {document}{section}."));
    let action = plain(component.recommended_action().as_str_name(), "RECOMMENDED_ACTION");
    let value = json!({
        "component": component.name,
        "state": plain(component.state().as_str_name(), "HEALTH_STATE"),
        "what": known.map(|known| known.what),
        "reason": component.reason,
        "documented": document,
        "recommended_action": action,
        "meanings": meanings.iter().map(Meaning::as_json).collect::<Vec<Value>>(),
    });
    (finished(lines), value)
}

/// An event of the agent's journal.
pub(super) fn event(event: &Event, catalog: &Catalog) -> (String, Value) {
    let mut lines = vec![format!("event {}: {}", event.cursor, event.message)];
    let line = event.attributes.get("line").map_or(event.message.as_str(), String::as_str);
    let meanings = meanings([line, event.message.as_str()].into_iter(), catalog);
    for (name, value) in event.attributes.iter().filter(|(name, _)| *name != "line") {
        lines.push(format!("  {name}: {value}"));
    }
    lines.extend(meanings.iter().flat_map(Meaning::lines));
    lines.push(String::new());
    if let Some(most) = meanings.iter().map(|meaning| meaning.action).max() {
        lines.push(format!("What to do, if there is no other fault: {}", advice(of_core(most))));
    }
    lines.push(format!("Documented in {DOCUMENT} and docs/reference/journal.md."));
    let value = json!({
        "cursor": event.cursor,
        "message": event.message,
        "attributes": event.attributes,
        "meanings": meanings.iter().map(Meaning::as_json).collect::<Vec<Value>>(),
    });
    (finished(lines), value)
}

fn finished(lines: Vec<String>) -> String {
    let lines: Vec<String> = lines.iter().map(|line| clean(line)).collect();
    format!("{}\n", lines.join("\n"))
}

/// The meanings of the lines, each once.
fn meanings<'a>(lines: impl Iterator<Item = &'a str>, catalog: &Catalog) -> Vec<Meaning> {
    let mut found: Vec<Meaning> = Vec::new();
    for line in lines {
        let fact = LogReader::default().line(Mono(1), line, 1).map(|(_, fact)| fact);
        let of_line = fact.and_then(|fact| meaning(&fact, catalog));
        for meaning in of_line.into_iter().chain(named(line, catalog)) {
            if !found.iter().any(|of| of.what == meaning.what) {
                found.push(meaning);
            }
        }
    }
    found
}

/// The codes in a sentence of the agent: `XID 79: the GPU has fallen off the bus`. An NVML event has no line.
fn named(text: &str, catalog: &Catalog) -> Vec<Meaning> {
    let mut found = Vec::new();
    for (kind, of_switch) in [("XID ", false), ("SXID ", true)] {
        for (place, _) in text.match_indices(kind) {
            // The second word contains the first.
            if text[..place].ends_with(|letter: char| letter.is_alphanumeric()) {
                continue;
            }
            let digits = &text[place + kind.len()..];
            let end = digits.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(digits.len());
            let Ok(code) = digits[..end].parse() else { continue };
            let meaning = if of_switch { catalog.sxid(code) } else { catalog.xid(code) };
            found.extend(meaning.map(|meaning| Meaning::of_code(format!("{kind}{code}"), meaning)));
        }
    }
    found
}

fn meaning(fact: &Fact, catalog: &Catalog) -> Option<Meaning> {
    match fact {
        Fact::Xid(xid) => {
            let mut meaning = Meaning::of_code(format!("XID {}", xid.code), catalog.xid(xid.code)?);
            let registers = xid.link_registers.as_ref();
            let decoded = registers.and_then(|line| RegisterMeaning::of(catalog.register_rules(), line));
            if let Some(decoded) = decoded {
                meaning.meaning.push_str(&format!(" Its registers say: {}.", decoded.names.join("; ")));
            }
            Some(meaning)
        }
        Fact::Sxid(sxid) => Some(Meaning::of_code(format!("SXID {}", sxid.code), catalog.sxid(sxid.code)?)),
        Fact::KernelReport(report) => Some(Meaning::of_class(catalog.kernel(report.class)?)),
        _ => None,
    }
}

impl Meaning {
    fn of_code(what: String, of: &CodeMeaning) -> Meaning {
        Meaning {
            what,
            name: of.name.clone(),
            meaning: of.meaning.clone(),
            blame: Some(of.blame),
            action: of.action,
            source: of.source.clone(),
            differs: of.differs.clone(),
            origin: of.origin.clone(),
        }
    }

    fn of_class(of: &KernelMeaning) -> Meaning {
        Meaning {
            what: of.class.name().to_owned(),
            name: of.name.clone(),
            meaning: of.meaning.clone(),
            blame: None,
            action: of.action,
            source: String::new(),
            differs: None,
            origin: of.origin.clone(),
        }
    }

    fn origin(&self) -> &str {
        self.origin.as_deref().unwrap_or("compiled in")
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = vec![String::new(), format!("What it means: {}: {}", self.what, self.name)];
        lines.push(format!("  {}", self.meaning));
        if let Some(blame) = self.blame {
            lines.push(format!("  fault domain: {}", to_blame(blame)));
        }
        if !self.source.is_empty() {
            lines.push(format!("  by {}", self.source));
        }
        if let Some(differs) = &self.differs {
            lines.push(format!("  other sources: {differs}"));
        }
        lines.push(format!("  this entry of the catalog: {}", self.origin()));
        lines
    }

    fn as_json(&self) -> Value {
        json!({
            "what": self.what,
            "name": self.name,
            "meaning": self.meaning,
            "blame": self.blame.map(to_blame),
            "source": self.source,
            "differs": self.differs,
            "origin": self.origin(),
        })
    }
}

fn of_core(action: Action) -> RecommendedAction {
    match action {
        Action::None => RecommendedAction::None,
        Action::RestartProcess => RecommendedAction::RestartProcess,
        Action::ResetDevice => RecommendedAction::ResetDevice,
        Action::RebootNode => RecommendedAction::RebootNode,
        Action::ReplaceNode => RecommendedAction::ReplaceNode,
        Action::ContactSupport => RecommendedAction::ContactSupport,
    }
}

fn to_blame(blame: FaultOrigin) -> &'static str {
    match blame {
        FaultOrigin::Application => "the program that ran",
        FaultOrigin::Device => "the GPU",
        FaultOrigin::Fabric => "NVLink or a switch",
        FaultOrigin::Driver => "the driver or its firmware",
        FaultOrigin::None => "no component's",
    }
}

/// The next step for the reader.
fn advice(action: RecommendedAction) -> &'static str {
    match action {
        RecommendedAction::None | RecommendedAction::Unspecified => "nothing.",
        RecommendedAction::RestartProcess => "RESTART_PROCESS: start the processes that use it again.",
        RecommendedAction::ResetDevice => {
            "RESET_DEVICE: let its work end, then reset it (nvidia-smi --gpu-reset -i ADDRESS)."
        }
        RecommendedAction::RebootNode => "REBOOT_NODE: drain the node and reboot it.",
        RecommendedAction::ReplaceNode => "REPLACE_NODE: drain the node and have the hardware replaced.",
        RecommendedAction::ContactSupport => {
            "CONTACT_SUPPORT: contact the vendor with these findings and a bug report of the driver."
        }
    }
}

#[cfg(test)]
mod tests {
    use mainstay_proto::v1::{Evidence, HealthState};

    use super::*;

    fn catalog() -> Catalog {
        mainstay_app::catalog::load(&[]).unwrap()
    }

    #[test]
    fn a_component_is_explained_from_its_lines() {
        let line = "NVRM: Xid (PCI:0000:3b:00): 63, pid=1, name=a, Row Remapper: New row marked";
        let of = Component {
            name: "gpu.0000:3b:00".into(),
            state: HealthState::Degraded.into(),
            reason: "XID 63: a bad page or row was recorded".into(),
            recommended_action: RecommendedAction::ResetDevice.into(),
            evidence: vec![Evidence {
                source: "kernel log".into(),
                reading: line.into(),
                ..Evidence::default()
            }],
            ..Component::default()
        };
        let (text, value) = component(&of, &catalog());
        for part in [
            "gpu.0000:3b:00 is DEGRADED",
            line,
            "What it means: XID 63",
            "fault domain: the GPU",
            "other sources: ",
            "compiled in",
            "RESET_DEVICE",
            DOCUMENT,
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert_eq!(value["meanings"][0]["what"], "XID 63");
    }

    /// Every entry of the catalogs, by its example line: what was observed, what it means, what to do, where that
    /// is documented.
    #[test]
    fn every_event_of_the_catalog_is_explained() {
        let catalog = catalog();
        let codes = (0..1000)
            .filter_map(|code| catalog.xid(code))
            .chain((10_000..30_000).filter_map(|code| catalog.sxid(code)));
        let of_codes = codes.map(|of| (of.example.clone(), of.name.clone()));
        let of_lines = catalog.kernel_meanings().map(|of| (of.example.clone(), of.name.clone()));
        let all: Vec<(String, String)> = of_codes.chain(of_lines).collect();
        assert!(all.len() > 150, "{}", all.len());
        for (line, name) in all {
            let of = Event { cursor: 7, message: line.clone(), ..Event::default() };
            let (text, value) = event(&of, &catalog);
            for part in [line.as_str(), "What it means: ", &name, "What to do", DOCUMENT] {
                assert!(text.contains(&clean(part)), "{part} in\n{text}");
            }
            assert_eq!(value["meanings"].as_array().map(Vec::len), Some(1), "{text}");
        }
    }

    #[test]
    fn every_component_has_a_description_and_its_documentation() {
        for known in &known::COMPONENTS {
            let name = known.name().replace('*', "0000:3b:00");
            let of = Component { name, reason: "it is so".into(), ..Component::default() };
            let (text, _) = component(&of, &catalog());
            let (document, _) = known.documented;
            for part in [known.what, "What was seen: it is so", "What to do: ", document] {
                assert!(text.contains(part), "{part} in\n{text}");
            }
        }
    }

    #[test]
    fn an_event_of_the_driver_is_explained_by_its_number() {
        let of = Component {
            name: "gpu.0000:3b:00".into(),
            reason: "XID 79: the GPU has fallen off the bus".into(),
            evidence: vec![Evidence { reading: "reported by an NVML event".into(), ..Evidence::default() }],
            ..Component::default()
        };
        let (text, value) = component(&of, &catalog());
        assert!(text.contains("What it means: XID 79"), "{text}");
        assert_eq!(value["meanings"].as_array().map(Vec::len), Some(1), "{text}");
        // A switch's code is not a GPU's.
        let of = Component { reason: "SXID 20034: fatal".into(), ..Component::default() };
        assert!(component(&of, &catalog()).0.contains("What it means: SXID 20034"));
    }

    #[test]
    fn registers_of_a_link_are_decoded() {
        let line = "NVRM: Xid (PCI:0003:00:00): 74, NVLink: fatal error detected on link 14(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)";
        let of = Event { cursor: 7, message: line.into(), ..Event::default() };
        let (text, _) = event(&of, &catalog());
        assert!(text.contains("Its registers say: look at the link's connection."), "{text}");
    }

    #[test]
    fn a_component_without_a_known_line_is_explained_as_far_as_possible() {
        let of = Component { name: "host.cpu".into(), reason: "busy".into(), ..Component::default() };
        let (text, value) = component(&of, &catalog());
        assert!(text.contains("What was seen: busy") && !text.contains("What it means"), "{text}");
        assert_eq!(value["meanings"], json!([]));
    }
}
