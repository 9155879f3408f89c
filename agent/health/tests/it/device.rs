//! The GPU judge on kernel log lines: rules, each with the opposite case, which must cause no finding.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::host::kernel_reports::LogState;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::Mono;
use proptest::prelude::*;
use support::Host;

use HealthState::{Degraded, Healthy, Unhealthy, Unknown};
use RecommendedAction::{
    ContactSupport, None as Nothing, RebootNode, ReplaceNode, ResetDevice, RestartProcess,
};

const GPU: &str = "gpu.0000:01:00";

#[test]
fn a_gpu_off_the_bus_needs_a_reboot_even_after_the_driver_is_loaded_again() {
    let mut host = Host::new();
    host.xid("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.");
    host.log("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.");
    host.expect(GPU, Unhealthy, RebootNode);
    let component = host.component(GPU);
    testing::snapshot!(
        "reasons",
        "device: a gpu off the bus needs a reboot even after the driver is loaded again",
        component.reason
    );
    assert_eq!(component.evidence.len(), 1);
    host.wait(90_000);
    host.log("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15");
    host.expect(GPU, Unhealthy, RebootNode);
    assert_eq!(host.component(GPU).since, component.since);
}

#[test]
fn a_fault_dates_from_its_log_line_however_late_the_line_is_read() {
    let mut host = Host::new();
    let written = "4,1,400000000,-;";
    host.log(&format!("{written}NVRM: Xid (PCI:0000:01:00): 79, off"));
    host.log(&format!("{written}EXT4-fs (sdb1): Remounting filesystem read-only"));
    host.log(&format!("{written}nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 1 x"));
    host.wait(50);
    for name in ["gpu.0000:01:00", "host.storage", "nvswitch.0000:c1:00"] {
        assert_eq!(host.component(name).since, Mono(400_000_000_000), "{name}");
    }
    // A repetition does not change it. A recovery dates from when it becomes known.
    host.wait(50);
    host.log("NVRM: Xid (PCI:0000:01:00): 79, off");
    assert_eq!(host.component("gpu.0000:01:00").since, Mono(400_000_000_000));
    host.log("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)");
    let (now, gpu) = (host.now, host.component("gpu.0000:01:00"));
    assert_eq!((gpu.state, gpu.since), (HealthState::Healthy, now));
}

#[test]
fn xids_of_programs_leave_a_gpu_healthy() {
    let mut host = Host::new();
    for code in [13, 31, 43, 45, 68, 13, 13, 31] {
        host.xid(&format!("{code}, pid=12, name=python, whatever"));
        host.wait(5);
    }
    host.expect(GPU, Healthy, Nothing);
    let reason = host.component(GPU).reason;
    assert!(reason.contains("8 times") && reason.contains("python"), "{reason}");
}

#[test]
fn a_gpu_is_degraded_if_three_programs_fail_on_it_and_on_no_other_gpu() {
    let mut host = Host::new();
    for name in ["train", "eval", "python"] {
        host.xid(&format!("13, pid=12, name={name}, Graphics Exception"));
    }
    host.expect(GPU, Healthy, Nothing);
    host.log("NVRM: Xid (PCI:0000:03:00): 63, pid=1896, Row Remapper: New row marked for remapping");
    host.expect(GPU, Degraded, ContactSupport);

    host.log("NVRM: Xid (PCI:0000:02:00): 31, pid=12, name=python, MMU Fault");
    host.expect(GPU, Healthy, Nothing);
}

#[test]
fn programs_that_were_stopped_do_not_count_among_those_that_failed() {
    let mut host = Host::new();
    for name in ["train", "eval", "python"] {
        host.xid(&format!("45, pid=12, name={name}, Ch 00000008"));
    }
    host.log("NVRM: Xid (PCI:0000:03:00): 63, pid=1896, Row Remapper: New row marked for remapping");
    host.expect(GPU, Healthy, Nothing);
}

#[test]
fn echoes_are_folded_into_their_cause() {
    let mut host = Host::new();
    host.xid("48, pid=9, name=python, An uncorrectable double bit error");
    host.xid("94, pid=9, name=python, Contained: LTC TAG. RST: No, D-RST: No");
    host.xid("45, pid=9, name=python, Ch 00000008");
    host.expect(GPU, Unhealthy, ResetDevice);
    testing::snapshot!("reasons", "device: echoes are folded into their cause", host.component(GPU).reason);
}

#[test]
fn an_echo_logged_before_its_cause_is_folded_in_too() {
    let mut host = Host::new();
    host.xid("94, pid=9, name=python, Contained: LTC TAG. RST: No, D-RST: No");
    host.expect(GPU, Degraded, RestartProcess);
    host.xid("48, pid=9, name=python, An uncorrectable double bit error");
    assert!(host.component(GPU).reason.ends_with("(followed by 94)"));
}

#[test]
fn an_xid_45_alone_or_long_after_a_fault_is_the_programs_own() {
    let mut host = Host::new();
    host.xid("45, pid=9, name=python, Ch 00000008");
    host.expect(GPU, Healthy, Nothing);
    host.xid("79, off");
    host.wait(3600);
    host.xid("45, pid=9, name=python, Ch 00000008");
    testing::snapshot!(
        "reasons",
        "device: an xid 45 alone or long after a fault is the programs own",
        host.component(GPU).reason
    );
}

#[test]
fn the_recovery_action_of_the_driver_is_added_to_the_cause() {
    let mut host = Host::new();
    host.xid("119, pid=2387, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU1 GSP!");
    host.expect(GPU, Unhealthy, ResetDevice);
    host.xid("154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)");
    host.expect(GPU, Unhealthy, RebootNode);
    testing::snapshot!(
        "reasons",
        "device: the recovery action of the driver is added to the cause",
        host.component(GPU).reason
    );
    host.xid("154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)");
    host.expect(GPU, Healthy, Nothing);
}

#[test]
fn loading_the_driver_clears_a_fault_that_needs_a_reset() {
    let mut host = Host::new();
    host.xid("95, pid=7194, name=python, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No");
    host.expect(GPU, Unhealthy, ResetDevice);
    host.log("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15");
    host.expect(GPU, Healthy, Nothing);
}

#[test]
fn a_fault_that_recurs_after_a_reset_needs_a_stronger_action() {
    let mut host = Host::new();
    let timeout =
        "119, pid=2387, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU1 GSP!";
    let load = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15";
    host.xid(timeout);
    host.xid(timeout);
    host.expect(GPU, Unhealthy, ResetDevice);
    host.log(load);
    host.expect(GPU, Healthy, Nothing);
    host.wait(600);
    host.xid(timeout);
    host.expect(GPU, Unhealthy, RebootNode);
    testing::snapshot!(
        "reasons",
        "device: a fault that recurs after a reset needs a stronger action",
        host.component(GPU).reason
    );

    host.devices.next_boot();
    assert_eq!(host.components(), [], "faults of an earlier boot are not shown");
    host.xid("120, pid='<unknown>', name=<unknown>, GSP task exception: load access page fault");
    host.expect(GPU, Unhealthy, ContactSupport);
}

#[test]
fn nvlink_registers_determine_the_severity_of_an_xid_74() {
    let mut host = Host::new();
    let on = |link: u32, registers: &str| {
        format!(
            "74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link {link}({registers})"
        )
    };
    host.xid(&on(3, "0x800000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"));
    host.expect(GPU, Healthy, Nothing);
    host.xid(&on(14, "0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"));
    host.xid(&on(14, "0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"));
    host.expect(GPU, Unhealthy, ResetDevice);
    testing::snapshot!(
        "reasons",
        "device: nvlink registers determine the severity of an xid 74",
        host.component(GPU).reason
    );
    host.log("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15");
    host.wait(600);
    host.xid(&on(14, "0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"));
    host.expect(GPU, Unhealthy, ContactSupport);
}

#[test]
fn other_faults_and_other_gpus_are_no_recurrence() {
    let mut host = Host::new();
    host.xid("119, pid=1, name=a, Timeout after 6s of waiting for RPC response from GPU1 GSP!");
    host.log("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15");
    host.xid("95, pid=1, name=python, Uncontained: LTC TAG. RST: Yes, D-RST: No");
    host.log("NVRM: Xid (PCI:0000:02:00): 119, pid=1, name=a, Timeout after 6s");
    host.expect(GPU, Unhealthy, ResetDevice);
    host.expect("gpu.0000:02:00", Unhealthy, ResetDevice);
}

#[test]
fn a_fault_that_new_processes_fix_expires_unless_a_reset_is_needed() {
    let mut host = Host::new();
    host.log("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, name=python, Contained: CE User Channel (0x9). RST: No, D-RST: No");
    host.expect(GPU, Degraded, RestartProcess);
    host.wait(601);
    host.expect(GPU, Healthy, Nothing);
    host.xid("94, pid=7, name=python, Contained: SM. RST: No, D-RST: Yes");
    host.wait(601);
    host.expect(GPU, Degraded, ResetDevice);
}

#[test]
fn nvlink_lines_state_their_severity() {
    let mut host = Host::new();
    host.xid("145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000082 0x00000100 0x0 0x0)");
    host.expect(GPU, Healthy, Nothing);
    host.xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x0 0x0)");
    host.expect(GPU, Unhealthy, ResetDevice);
    let mut down = Host::new();
    down.xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x026001c6 0x00000000 0x0 0x0)");
    down.expect(GPU, Degraded, Nothing);
}

#[test]
fn an_xid_clears_the_faults_that_it_cancels_in_the_catalog() {
    let mut host = Host::new();
    host.xid("163, PSHC disengaged");
    host.expect(GPU, Degraded, Nothing);
    host.xid("162, PSHC reengaged");
    host.expect(GPU, Healthy, Nothing);
}

/// A host that logged the XID `line` in a burst, and once more after each of these waits, in seconds.
fn came_again(line: &str, waits: &[u64]) -> Host {
    let mut host = Host::new();
    (0..20).for_each(|_| host.xid(line));
    for wait in waits {
        host.wait(*wait);
        host.xid(line);
    }
    host
}

#[test]
fn an_unknown_xid_is_an_event_and_needs_support_if_it_keeps_recurring() {
    // A code of a newer driver, and one that NVIDIA's catalog calls unused.
    for (line, code) in [("901, something new", "901"), ("59, pid=7, name=python, 0000", "59")] {
        let mut once = came_again(line, &[]);
        once.expect(GPU, Healthy, Nothing);
        let component = once.component(GPU);
        testing::snapshot!("reasons", format!("device: XID {code} is unknown"), component.reason);
        assert_eq!(component.confidence, 0.5);
        assert!(
            component.evidence.iter().any(|evidence| evidence.reading.contains(line)),
            "{:?}",
            component.evidence
        );
        // The driver reports which action the GPU needs.
        once.xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)");
        once.expect(GPU, Unhealthy, ResetDevice);
        came_again(line, &[3600]).expect(GPU, Healthy, Nothing);
        came_again(line, &[3600, 2 * 86_400]).expect(GPU, Healthy, Nothing);
        let mut often = came_again(line, &[3600, 3600]);
        often.expect(GPU, Degraded, ContactSupport);
        assert_eq!(often.component(GPU).confidence, 0.5);
    }
}

#[test]
fn an_unknown_sxid_is_an_event_unless_its_line_calls_it_fatal() {
    let mut host = Host::new();
    let line =
        |word: &str| format!("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 29999, {word}Link 3 something new");
    host.log(&line(""));
    host.expect("nvswitch.0000:c1:00", Healthy, Nothing);
    host.log(&line("Fatal, "));
    host.expect("nvswitch.0000:c1:00", Unhealthy, ResetDevice);
}

#[test]
fn gpus_are_judged_separately() {
    let mut host = Host::new();
    host.xid("79, off");
    host.log("NVRM: Xid (PCI:0000:02:00): 13, pid=1, name=python, Graphics Exception");
    host.expect(GPU, Unhealthy, RebootNode);
    host.expect("gpu.0000:02:00", Healthy, Nothing);
}

#[test]
fn an_sxid_that_its_line_calls_non_fatal_leaves_the_switch_healthy() {
    let mut host = Host::new();
    host.log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Non-fatal, Link 30 LTSSM Fault Up");
    host.expect("nvswitch.0000:c1:00", Healthy, Nothing);
    host.log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up");
    host.expect("nvswitch.0000:c1:00", Unhealthy, ResetDevice);
}

#[test]
fn kernel_reports_determine_the_state_of_host_components() {
    let mut host = Host::new();
    host.host.log_is(host.now, LogState::Reading);
    host.expect("host.kernel_log", Healthy, Nothing);
    host.log("EXT4-fs (sdb1): Remounting filesystem read-only");
    host.expect("host.storage", Unhealthy, RebootNode);
    host.log("INFO: task python:4711 blocked for more than 120 seconds.");
    host.expect("host.kernel", Degraded, RebootNode);
    host.wait(601);
    host.expect("host.kernel", Healthy, Nothing);
    host.expect("host.storage", Unhealthy, RebootNode);
    host.log("EDAC MC0: 1 UE memory read error on DIMM_A1 (channel:1)");
    host.expect("host.hardware", Unhealthy, ReplaceNode);
}

#[test]
fn a_few_corrected_pcie_errors_are_normal_and_very_many_are_not() {
    let mut host = Host::new();
    let line = "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0";
    (0..10).for_each(|_| host.log(line));
    host.expect("host.pcie", Healthy, Nothing);
    (0..1000).for_each(|_| host.log(line));
    host.wait(10);
    let held_back = host.reader.held_back(host.now);
    held_back.iter().for_each(|fact| host.host.take_in(host.now, fact));
    host.expect("host.pcie", Degraded, Nothing);
}

#[test]
fn an_unreadable_kernel_log_is_unknown() {
    let mut host = Host::new();
    host.host.log_is(host.now, LogState::Unreadable("opening /dev/kmsg: not permitted".into()));
    host.expect("host.kernel_log", Unknown, Nothing);
}

proptest! {
    #[test]
    fn xids_of_one_program_leave_a_gpu_healthy(codes in prop::collection::vec(prop::sample::select(vec![8u32, 11, 13, 25, 31, 32, 39, 43, 45, 60, 68, 69, 80, 126, 137, 141]), 1..60), gaps in prop::collection::vec(0u64..5000, 60)) {
        let mut host = Host::new();
        for (code, gap) in codes.into_iter().zip(gaps) {
            host.xid(&format!("{code}, pid=12, name=python, text"));
            host.wait(gap);
        }
        let component = host.component(GPU);
        prop_assert_eq!(component.state, Healthy);
    }

    #[test]
    fn a_gpu_off_the_bus_is_unhealthy_whatever_else_is_logged(codes in prop::collection::vec(1u32..180, 0..40), place in 0usize..40) {
        let mut host = Host::new();
        for (number, code) in codes.iter().enumerate() {
            if number == place {
                host.xid("79, off");
            }
            if *code != 154 {
                host.xid(&format!("{code}, pid=12, name=python, text"));
            }
        }
        if place >= codes.len() {
            host.xid("79, off");
        }
        let component = host.component(GPU);
        prop_assert_eq!(component.state, Unhealthy);
        prop_assert!(component.action >= RebootNode);
    }
}
