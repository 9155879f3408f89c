//! Explains a component, an event or a code: what was seen, what it means, what to do, where that is documented, and
//! which sources disagree.

mod known;

use mainstay_health::hardware::catalog::{Catalog, FaultOrigin, RegisterMeaning};
use mainstay_model::entry::{Body, Entry, Fact};
use mainstay_model::escape::clean;
use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::{Component, Evidence};
use mainstay_model::time::Stamp;
use mainstay_proto::json::ApiEnum;
use mainstay_proto::v1::explain_response::Report;
use mainstay_proto::v1::{self, CodeBlame, CodeMeaning, RecommendedAction};
use serde_json::{Value, json};

use crate::convert::health as convert;
use crate::node::NodeView;

/// Where checks are documented.
const DOCUMENT: &str = "docs/reference/checks.md";

/// The report on a component in its current state. Without a catalog no code is explained.
pub fn component(
    view: &NodeView,
    of: &Component,
    now: Stamp,
    catalog: Option<&Catalog>,
) -> v1::ComponentReport {
    let known = known::find(&of.name);
    let (document, section) = known.map_or((DOCUMENT, ""), |known| known.documented);
    v1::ComponentReport {
        component: Some(convert::component(&view.operator_state, of, now)),
        what: known.map(|known| known.what.to_owned()).unwrap_or_default(),
        meanings: of_evidence(&of.evidence, catalog),
        document: document.to_owned(),
        section: section.replace('`', ""),
    }
}

/// The report on an event of the journal. `event` is the entry as the caller may read it.
pub fn event(entry: &Entry, event: v1::Event, catalog: Option<&Catalog>) -> v1::EventReport {
    let code = |code| meaning(code, catalog).into_iter().collect();
    let meanings = match &entry.body {
        Body::Fact(Fact::Xid(xid)) => {
            let mut meaning = meaning(FaultCode::Xid(xid.code), catalog);
            let registers = xid.link_registers.as_ref();
            let decoded =
                registers.and_then(|line| RegisterMeaning::from_rules(catalog?.register_rules(), line));
            if let (Some(meaning), Some(decoded)) = (&mut meaning, decoded) {
                meaning.meaning.push_str(&format!(" Its registers say: {}.", decoded.names.join("; ")));
            }
            meaning.into_iter().collect()
        }
        Body::Fact(Fact::Sxid(sxid)) => code(FaultCode::Sxid(sxid.code)),
        Body::Fact(Fact::KernelReport(report)) => code(FaultCode::KernelLine(report.class)),
        Body::Health(change) => of_evidence(&change.component.evidence, catalog),
        _ => Vec::new(),
    };
    v1::EventReport { event: Some(event), meanings }
}

/// The meanings of the codes, each once.
fn of_evidence(evidence: &[Evidence], catalog: Option<&Catalog>) -> Vec<CodeMeaning> {
    let mut found: Vec<CodeMeaning> = Vec::new();
    for of in evidence {
        let Some(meaning) = of.code.and_then(|code| meaning(code, catalog)) else { continue };
        if !found.iter().any(|known| known.code == meaning.code) {
            // That of this report may say more than that of all reports with its code.
            found.push(CodeMeaning { name: of.meaning.clone().unwrap_or(meaning.name), ..meaning });
        }
    }
    found
}

/// What the catalog says about a code; `None` if it does not have it.
pub fn meaning(code: FaultCode, catalog: Option<&Catalog>) -> Option<CodeMeaning> {
    let catalog = catalog?;
    let found = match code {
        FaultCode::Xid(number) => catalog.xid(number),
        FaultCode::Sxid(number) => catalog.sxid(number),
        FaultCode::KernelLine(class) => {
            let of = catalog.kernel(class)?;
            return Some(CodeMeaning {
                code: Some(convert::code(code)),
                name: of.name.clone(),
                meaning: of.meaning.clone(),
                recommended_action: convert::action(of.action).into(),
                origin: of.origin.clone(),
                ..CodeMeaning::default()
            });
        }
    };
    let of = found?;
    let blame = match of.blame {
        FaultOrigin::Application => CodeBlame::Program,
        FaultOrigin::Device => CodeBlame::Device,
        FaultOrigin::Fabric => CodeBlame::Fabric,
        FaultOrigin::Driver => CodeBlame::Driver,
        FaultOrigin::None => CodeBlame::None,
    };
    Some(CodeMeaning {
        code: Some(convert::code(code)),
        name: of.name.clone(),
        meaning: of.meaning.clone(),
        blame: blame.into(),
        recommended_action: convert::action(of.action).into(),
        source: of.source.clone(),
        differs: of.differs.clone(),
        origin: of.origin.clone(),
    })
}

/// The report for people; that of a failure is [`crate::incident_report::render`].
pub fn text(report: &Report) -> String {
    let lines = match report {
        Report::Component(report) => component_lines(report),
        Report::Event(report) => event_lines(report),
        Report::Code(meaning) => code_lines(meaning),
        Report::Failure(_) => Vec::new(),
    };
    let lines: Vec<String> = lines.iter().map(|line| clean(line)).collect();
    format!("{}\n", lines.join("\n"))
}

/// The report for scripts; that of a failure is [`crate::incident_report::json`].
pub fn json(report: &Report) -> Value {
    let meanings = |of: &[CodeMeaning]| of.iter().map(meaning_json).collect::<Vec<Value>>();
    match report {
        Report::Component(report) => {
            let of = report.component.clone().unwrap_or_default();
            json!({
                "component": of.name,
                "state": of.state().name(),
                "what": Some(&report.what).filter(|what| !what.is_empty()),
                "reason": of.reason,
                "documented": report.document,
                "recommended_action": of.recommended_action().name(),
                "meanings": meanings(&report.meanings),
            })
        }
        Report::Event(report) => {
            let of = report.event.clone().unwrap_or_default();
            json!({
                "cursor": of.cursor,
                "message": of.message,
                "attributes": of.attributes,
                "meanings": meanings(&report.meanings),
            })
        }
        Report::Code(meaning) => json!({ "meanings": meanings(std::slice::from_ref(meaning)) }),
        Report::Failure(_) => Value::Null,
    }
}

fn component_lines(report: &v1::ComponentReport) -> Vec<String> {
    let of = report.component.clone().unwrap_or_default();
    let state = of.state().name();
    let mut lines = vec![format!("{} is {state}", of.name), String::new()];
    if !report.what.is_empty() {
        lines.push(format!("What it is: {}", report.what));
    }
    lines.push(format!("What was seen: {}", of.reason));
    for of in &of.evidence {
        let before = of.before.as_ref().map(|before| format!(" (before: {before})")).unwrap_or_default();
        let limit = of.limit.as_ref().map(|limit| format!(" (limit {limit})")).unwrap_or_default();
        lines.push(format!("  {}: {}{before}{limit}", of.source, of.reading));
    }
    if let Some(sure) = of.confidence.filter(|sure| *sure < 1.0) {
        lines.push(format!("  {:.0} % sure", sure * 100.0));
    }
    if let Some(known) = &of.acknowledgement {
        lines.push(format!("  acknowledged by user {}: {}", known.uid, known.reason));
    }
    if let Some(silence) = &of.silence {
        lines.push(format!("  silenced by user {}: {}", silence.uid, silence.reason));
    }
    lines.extend(report.meanings.iter().flat_map(meaning_lines));
    lines.push(String::new());
    lines.push(format!("What to do: {}", advice(of.recommended_action())));
    let section = if report.section.is_empty() { String::new() } else { format!(", {}", report.section) };
    lines.push(format!("Documented in {}{section}.", report.document));
    lines
}

fn event_lines(report: &v1::EventReport) -> Vec<String> {
    let of = report.event.clone().unwrap_or_default();
    let mut lines = vec![format!("event {}: {}", of.cursor, of.message)];
    for (name, value) in of.attributes.iter().filter(|(name, _)| *name != "line") {
        lines.push(format!("  {name}: {value}"));
    }
    lines.extend(report.meanings.iter().flat_map(meaning_lines));
    lines.push(String::new());
    lines.extend(report.meanings.iter().map(CodeMeaning::recommended_action).max().map(to_do));
    lines.push(format!("Documented in {DOCUMENT} and docs/reference/journal.md."));
    lines
}

fn code_lines(meaning: &CodeMeaning) -> Vec<String> {
    let mut lines = meaning_lines(meaning);
    // The first line is empty.
    lines.remove(0);
    lines.extend([String::new(), to_do(meaning.recommended_action()), format!("Documented in {DOCUMENT}.")]);
    lines
}

fn to_do(action: RecommendedAction) -> String {
    format!("What to do, if there is no other fault: {}", advice(action))
}

/// `XID 48`, or the class of the line.
fn name(meaning: &CodeMeaning) -> String {
    let code = meaning.code.as_ref().and_then(convert::code_in);
    code.map(|code| code.to_string()).unwrap_or_default()
}

fn origin(meaning: &CodeMeaning) -> &str {
    meaning.origin.as_deref().unwrap_or("compiled in")
}

fn meaning_lines(of: &CodeMeaning) -> Vec<String> {
    let mut lines = vec![String::new(), format!("What it means: {}: {}", name(of), of.name)];
    lines.push(format!("  {}", of.meaning));
    lines.extend(blame(of.blame()).map(|blame| format!("  fault domain: {blame}")));
    if !of.source.is_empty() {
        lines.push(format!("  by {}", of.source));
    }
    lines.extend(of.differs.iter().map(|differs| format!("  other sources: {differs}")));
    lines.push(format!("  this entry of the catalog: {}", origin(of)));
    lines
}

fn meaning_json(of: &CodeMeaning) -> Value {
    json!({
        "what": name(of),
        "name": of.name,
        "meaning": of.meaning,
        "blame": blame(of.blame()),
        "source": of.source,
        "differs": of.differs,
        "origin": origin(of),
    })
}

fn blame(blame: CodeBlame) -> Option<&'static str> {
    Some(match blame {
        CodeBlame::Unspecified => return None,
        CodeBlame::Program => "the program that ran",
        CodeBlame::Device => "the GPU",
        CodeBlame::Fabric => "NVLink or a switch",
        CodeBlame::Driver => "the driver or its firmware",
        CodeBlame::None => "no component's",
    })
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
    use super::*;

    #[test]
    fn every_component_has_a_description_and_its_documentation() {
        for known in &known::COMPONENTS {
            let name = known.name().replace('*', "0000:3b:00");
            let of = Component { name, reason: "it is so".into(), ..Component::default() };
            let report = component(&NodeView::default(), &of, Stamp::default(), None);
            assert_eq!((report.what.as_str(), report.document.as_str()), (known.what, known.documented.0));
            let text = text(&Report::Component(report));
            assert!(text.contains(known.what) && text.contains("it is so"), "{text}");
        }
    }
}
