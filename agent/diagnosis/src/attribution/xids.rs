//! What the agent's catalog of hardware codes says about a line with an XID: a note, a fault that passes, or one that counts.

use mainstay_health::hardware::catalog::Catalog as Codes;
use mainstay_health::parse::nvidia;
use mainstay_model::health::{HealthState, RecommendedAction};

/// How much the line of an XID counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum XidWeight {
    /// The device is in order after it: nothing has to be done.
    Note,
    /// The line itself says that the device needs no reset: an error that is over, not the end of a job.
    Passing,
    /// As much as its code.
    Usual,
}

/// The code with which the driver reports which reset a GPU needs.
const RECOVERY_ACTION_XID: u32 = 154;

/// Weighs a line as the driver wrote it, or as a tool that repeats its message. `None` for any other line.
pub(super) fn weight(codes: &Codes, line: &str) -> Option<XidWeight> {
    let Some(start) = line.find("NVRM: Xid") else {
        let change = &line[line.find("recovery action changed")?..];
        return (nvidia::recovery_action(change) == Some(0)).then_some(XidWeight::Note);
    };
    let xid = nvidia::xid(line.get(start..)?.trim_end())?;
    if xid.code == RECOVERY_ACTION_XID {
        return Some(if xid.recovery_action == Some(0) { XidWeight::Note } else { XidWeight::Usual });
    }
    if codes.xid(xid.code).is_none() {
        return Some(XidWeight::Usual);
    }
    let by_line = xid.nvlink.is_some() || xid.link_registers.is_some();
    Some(match codes.severity(&xid) {
        (_, action) if by_line && action < RecommendedAction::ResetDevice => XidWeight::Passing,
        (HealthState::Healthy, RecommendedAction::None) => XidWeight::Note,
        _ => XidWeight::Usual,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribution::class::Class;
    use crate::attribution::{Attribution, judged};
    use mainstay_model::verdict::FaultDomain;

    fn weight_of(code_and_text: &str) -> XidWeight {
        let codes = Codes::built_in().expect("the catalog is compiled in");
        let line = format!("[ 12.5] NVRM: Xid (PCI:0000:3b:00): {code_and_text}");
        weight(&codes, &line).expect("an XID")
    }

    #[test]
    fn a_line_weighs_what_the_agent_makes_of_it() {
        for note in [
            "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
            "66, pid=7, name=python, Illegal access by driver",
            "93, pid=7, name=python, InfoROM",
        ] {
            assert_eq!(weight_of(note), XidWeight::Note, "{note}");
        }
        for passing in [
            "145, RLW_RXPIPE Nonfatal XC0 i0 Link 3 (0x00000008 0x00000000 0x00000000 0x00000000)",
            "146, TLW_RX/TLW_RX_PIPE0 Nonfatal XC0 i0 Link 3 (0x00000400 0x00000001 0x00000000 0x00000000)",
        ] {
            assert_eq!(weight_of(passing), XidWeight::Passing, "{passing}");
        }
        for fault in [
            "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "79, pid=7, name=python, GPU has fallen off the bus.",
            "63, pid=7, name=python, Row Remapper: New row marked for remapping",
            "144, SAW_MVB Fatal XC0 i0 Link 3 (0x00000002 0x00000002 0x00000000 0x00000000)",
            "199, pid=7, name=python, a code that is newer than the catalog",
        ] {
            assert_eq!(weight_of(fault), XidWeight::Usual, "{fault}");
        }
        let others = |line| weight(&Codes::built_in().expect("the catalog"), line);
        assert_eq!(others("NVRM: loading NVIDIA"), None);
        let repeated =
            "gpud: Xid 154: GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)";
        assert_eq!(others(repeated), Some(XidWeight::Note));
        assert_eq!(others(&repeated.replace("to 0x0 (None)", "to 0x2 (Node Reboot Required)")), None);
    }

    /// Every line of the agent's catalog.
    fn examples() -> Vec<String> {
        let file: toml::Table = include_str!("../../../catalog/hardware/xid.toml").parse().expect("a table");
        let entries = file["xid"].as_array().expect("a list of XIDs");
        entries
            .iter()
            .flat_map(|entry| {
                let example = entry["example"].as_str().expect("each XID has an example");
                let ids = entry["ids"].as_array().expect("each has codes").iter();
                let (before, _) = example.split_once("): ").expect("a line of the driver");
                let rest = example
                    .split_once("): ")
                    .and_then(|(_, rest)| rest.split_once(','))
                    .map_or("", |pair| pair.1);
                ids.map(|code| format!("{before}): {code},{rest}\n")).collect::<Vec<_>>()
            })
            .collect()
    }

    fn traceback(raised: &str) -> String {
        format!(
            "Traceback (most recent call last):\n  File \"/home/a/train.py\", line 3, in step\n    x = b\n{raised}\n"
        )
    }

    #[test]
    fn what_no_device_can_cause_stays_the_programs_beside_any_xid() {
        let lines = examples();
        assert!(lines.len() > 100, "{} lines", lines.len());
        let mut wrong = Vec::new();
        for raised in [
            "NameError: name 'b' is not defined",
            "KeyError: 'b'",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ] {
            for line in &lines {
                for log in [line.clone() + &traceback(raised), traceback(raised) + line] {
                    let judged: Attribution = judged(&log);
                    if judged.domain != FaultDomain::User {
                        wrong.push(format!(
                            "{raised} with {}: {} {:.2}",
                            line.trim(),
                            judged.class.name(),
                            judged.confidence
                        ));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{} are not the user's:\n{}", wrong.len(), wrong.join("\n"));
    }

    #[test]
    fn no_host_is_given_up_for_an_xid_that_the_agent_calls_harmless() {
        let codes = Codes::built_in().expect("the catalog is compiled in");
        let mut wrong = Vec::new();
        for line in examples() {
            let xid = nvidia::xid(line.trim()).expect("an XID");
            let (state, _) = codes.severity(&xid);
            let judged = judged(&line);
            // The number in a line of 154 decides.
            if state == HealthState::Healthy
                && xid.code != RECOVERY_ACTION_XID
                && judged.domain == FaultDomain::Hardware
            {
                wrong.push(format!("{}: {} {:.2}", line.trim(), judged.class.name(), judged.confidence));
            }
        }
        assert!(wrong.is_empty(), "{} lines:\n{}", wrong.len(), wrong.join("\n"));
    }

    #[test]
    fn a_device_that_the_program_met_is_to_blame() {
        let xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.\n";
        let met =
            traceback("RuntimeError: CUDA error: unspecified launch failure") + &traceback("KeyError: 'b'");
        assert_eq!(judged(&(xid.to_owned() + &met)).class, Class::HardwareGpu);
    }
}
