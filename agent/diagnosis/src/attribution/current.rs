//! Filters evidence that cannot be the cause of this failure: lines from before healthy steps, and mere warnings.
//!
//! A signature in the catalog can be exempt: `latent` for faults that show later, `warning` for warnings that count.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::Evidence;
use super::catalog::{Catalog, Role, Signature};
use super::exit::{Exit, Status};
use super::scan::{Findings, Kind, RelevantLine};

/// From this weight on a line that is no cause is worth a mention.
const MIN_MENTIONED_WEIGHT: f64 = 2.0;

/// The evidence without what cannot be the cause.
pub fn current<'e>(catalog: &Catalog, evidence: &'e Evidence) -> Cow<'e, Evidence> {
    let killed = ended_by_signals(evidence);
    let all_speak = evidence.findings.iter().all(|finding| every_spot_speaks(catalog, finding, killed));
    if all_speak {
        return Cow::Borrowed(evidence);
    }
    let mut evidence = evidence.clone();
    for findings in &mut evidence.findings {
        keep_current(catalog, findings, killed);
    }
    Cow::Owned(evidence)
}

/// The lines that would be a cause and are none, because the exception was caught or healthy steps came after it.
pub fn set_aside(catalog: &Catalog, evidence: &Evidence) -> BTreeMap<(usize, u64), RelevantLine> {
    let killed = ended_by_signals(evidence);
    let mut aside = BTreeMap::new();
    for (source, findings) in
        evidence.findings.iter().enumerate().filter(|(_, finding)| finding.kind != Kind::Kernel)
    {
        let causes = findings.sightings.iter().flat_map(|sighting| {
            let signature = catalog.signatures().get(sighting.signature);
            let is_cause = |signature: &&Signature| {
                signature.role == Role::Primary
                    && signature.weight >= MIN_MENTIONED_WEIGHT
                    && !signature.fallback
            };
            let signature = signature.filter(is_cause);
            sighting.spots.iter().filter_map(move |spot| Some((Some(signature?), spot)))
        });
        let raised = findings.exceptions.iter().map(|exception| (None, &exception.spot));
        let over =
            causes.chain(raised).filter(|(signature, spot)| !spot.mild && !speaks(*signature, spot, killed));
        aside.extend(over.map(|(_, spot)| ((source, spot.line), spot.clone())));
    }
    aside
}

fn every_spot_speaks(catalog: &Catalog, findings: &Findings, killed: bool) -> bool {
    let signature = |index: usize| catalog.signatures().get(index);
    findings.kind == Kind::Kernel
        || findings.sightings.iter().all(|sighting| {
            sighting.spots.iter().all(|spot| speaks(signature(sighting.signature), spot, killed))
        }) && findings.exceptions.iter().all(|exception| speaks(None, &exception.spot, killed))
}

fn keep_current(catalog: &Catalog, findings: &mut Findings, killed: bool) {
    // Kernel lines have their own times and are unrelated to the ranks' progress.
    if findings.kind == Kind::Kernel {
        return;
    }
    for sighting in &mut findings.sightings {
        let signature = catalog.signatures().get(sighting.signature);
        sighting.spots.retain(|spot| speaks(signature, spot, killed));
    }
    findings.sightings.retain(|sighting| !sighting.spots.is_empty());
    findings.exceptions.retain(|exception| speaks(None, &exception.spot, killed));
}

/// Whether all known exits were by signals. Then an exception that a program logged did not end it.
fn ended_by_signals(evidence: &Evidence) -> bool {
    let by_signal = |exit: &Exit| matches!(exit.status.normal(), Status::Signal(_));
    !evidence.exits.is_empty() && evidence.exits.iter().all(by_signal)
}

/// Whether a line can be a cause of the failure, given its signature's `warning` and `latent` fields.
fn speaks(signature: Option<&Signature>, spot: &RelevantLine, killed: bool) -> bool {
    let from_a_warning = signature.is_some_and(|signature| signature.warning);
    let is_latent = signature.is_some_and(|signature| signature.latent.is_some());
    let over = spot.is_past() || killed && spot.logged;
    (!spot.mild || from_a_warning) && (!over || is_latent)
}

#[cfg(test)]
mod tests {
    use crate::attribution::class::Class;
    use crate::attribution::{Attribution, judged};

    fn steps(from: u32, to: u32) -> String {
        (from..to).map(|step| format!("iter {step}: loss 2.{step:03}, time 12.30ms, mfu 1.00%\n")).collect()
    }

    const MISSING: &str = "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-7.bin'\n";

    fn names(judged: &Attribution, id: &str) -> bool {
        judged.evidence.iter().chain(&judged.against).any(|vote| vote.id == id)
    }

    #[test]
    fn a_line_is_a_cause_after_healthy_steps_and_not_before_them() {
        assert_eq!(judged(&format!("{MISSING}{}", steps(0, 40))).class, Class::Unknown);
        assert_eq!(judged(&format!("{}{MISSING}", steps(0, 40))).class, Class::UserConfig);
        // One step may have been under way already.
        assert_eq!(judged(&format!("{MISSING}{}", steps(0, 1))).class, Class::UserConfig);
    }

    #[test]
    fn a_diverging_loss_is_no_healthy_step() {
        let nan: String =
            (0..9).map(|step| format!("iter {step}: loss nan, time 12.30ms, mfu 1.00%\n")).collect();
        assert_eq!(judged(&format!("{MISSING}{nan}")).class, Class::UserConfig);
    }

    #[test]
    fn a_latent_fault_is_a_cause_despite_healthy_steps_after_it() {
        let xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.\n";
        assert_eq!(judged(&format!("{xid}{}", steps(0, 40))).class, Class::HardwareGpu);
        let full = "OSError: [Errno 28] No space left on device: '/scratch/ckpt'\n";
        assert!(names(&judged(&format!("{full}{}", steps(0, 40))), "storage.enospc"));
    }

    #[test]
    fn a_warning_is_no_cause_and_the_same_text_as_an_error_is() {
        let text = "OSError: [Errno 116] Stale file handle: '/data/a'";
        assert_eq!(judged(&format!("{text}\n")).class, Class::Storage);
        for warned in [
            format!("WARNING:root:retrying after {text}\n"),
            format!("/opt/venv/lib/a.py:12: UserWarning: {text}\n"),
            format!("2026-01-01 10:00:00,1 - data - WARNING - {text}\n"),
            format!("[rank0]:[W1124 06:42:31.612 reader.cpp:12] {text}\n"),
        ] {
            assert_eq!(judged(&warned).class, Class::Unknown, "{warned}");
        }
    }

    #[test]
    fn machines_warn_before_they_fail() {
        let warned = "WARNING kernel: mlx5_core 0000:a1:00.0 ib3: Link down\n";
        assert!(names(&judged(warned), "net.ib_port_down"));
    }

    #[test]
    fn an_exception_ignored_by_python_is_no_cause() {
        let ignored = "Exception ignored in: <function Pool.__del__ at 0x7f>\nTraceback (most recent call last):\n  File \"/home/a/train.py\", line 3, in __del__\nTypeError: 'NoneType' object is not callable\n";
        assert_eq!(judged(ignored).class, Class::Unknown);
        let raised = ignored.split_once('\n').expect("two lines").1;
        assert_eq!(judged(raised).class, Class::UserCode);
    }

    #[test]
    fn a_signal_names_a_cause_only_together_with_its_reason() {
        let table = "exitcode  : -9 (pid: 10)\ntraceback : Signal 9 (SIGKILL) received by PID 10\n";
        assert_eq!(judged(table).class, Class::Unknown);
        let reason =
            "Memory cgroup out of memory: Killed process 10 (python) total-vm:185938432kB, anon-rss:99kB\n";
        assert_eq!(judged(&format!("{reason}{table}")).class, Class::HostResource);
    }
}
