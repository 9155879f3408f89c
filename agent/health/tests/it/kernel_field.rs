//! Lines of hosts of various vendors and ages: those that the parser must classify, whatever their wording, and those
//! that it must ignore.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::parse::log::LogReader;
use mainstay_model::entry::Fact;
use mainstay_model::health::HealthState;
use mainstay_model::kernel::KernelClass;
use mainstay_model::time::Mono;
use support::Host;

/// The class and the subject of a line.
fn read(line: &str) -> Option<(KernelClass, Option<String>)> {
    match LogReader::default().line(Mono(9), line, 1) {
        Some((_, Fact::KernelReport(report))) => Some((report.class, report.subject)),
        Some((_, other)) => panic!("{line}: {other:?}"),
        None => None,
    }
}

fn is(line: &str, class: KernelClass, subject: Option<&str>) {
    assert_eq!(read(line), Some((class, subject.map(str::to_owned))), "{line}");
}

#[test]
fn pcie_lines_of_old_and_new_kernels_are_classified() {
    use KernelClass::{AerCorrected, AerUncorrected, GpuOffBus, NetworkCard, NvmeLost};
    is(
        "pcieport 0000:00:1b.2: AER: Correctable error message received from 0000:03:04.0",
        AerCorrected,
        Some("0000:03:04.0"),
    );
    is(
        "pcieport 10003:00:00.0: AER: Multiple Corrected error received: id=ae00",
        AerCorrected,
        Some("10003:00:00.0"),
    );
    is(
        "hpsa 0000:04:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, id=0400(Transmitter ID)",
        AerCorrected,
        Some("0000:04:00.0"),
    );
    is(
        "pcieport 0000:03:04.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer, (Receiver ID)",
        AerUncorrected,
        Some("0000:03:04.0"),
    );
    is(
        "nvidia 0000:3b:00.0: Unable to change power state from D3cold to D0, device inaccessible",
        GpuOffBus,
        Some("0000:3b:00"),
    );
    is(
        "mlx5_core 0000:5c:00.0: Unable to change power state from D0 to D3hot, device inaccessible",
        NetworkCard,
        Some("0000:5c:00.0"),
    );
    is(
        "nvme 0000:01:00.0: can't change power state from D3cold to D0 (config space inaccessible)",
        NvmeLost,
        Some("0000:01:00.0"),
    );
    is(
        "vfio-pci 0000:3b:00.0: not ready 65535ms after bus reset; giving up",
        AerUncorrected,
        Some("0000:3b:00.0"),
    );
    for harmless in [
        "pci 0000:05:00.0: AER: can't recover (no error_detected callback)",
        "pcieport 0000:03:04.0: AER: Downstream Port link has been reset (0)",
        "pcieport 0000:03:04.0: AER: device recovery successful",
        "nvidia 0000:17:00.0: AER: aer_status: 0x00004000, aer_mask: 0x00000000",
        "nvidia 0000:17:00.0: AER: aer_uncor_severity: 0x004ef030",
        "nvidia 0000:17:00.0: AER: aer_layer=Transaction Layer, aer_agent=Requester ID",
        "vfio-pci 0000:3b:00.0: not ready 1023ms after FLR; waiting",
        "pci 0000:84:00.0: BAR 1 [mem size 0x10000000 64bit pref]: can't assign; no space",
        "pci 0000:84:00.0: BAR 1: no space for [mem size 0x10000000 64bit pref]",
        "pci 0000:84:00.0: BAR 13: failed to assign [io  size 0x1000]",
        "pci 0000:84:00.0: 31.504 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x4 link at 0000:00:00.0 (capable of 252.048 Gb/s with 16.0 GT/s PCIe x16 link)",
        "pci_bus 0000:00: No. 2 try to assign unassigned res",
    ] {
        assert_eq!(read(harmless), None, "{harmless}");
    }
}

#[test]
fn memory_error_lines_of_many_drivers_are_classified() {
    use KernelClass::{MachineCheck, MachineCheckCorrected};
    is(
        "EDAC MC1: 32 CE memory scrubbing error on CPU_SrcID#1_Ha#0_Chan#2_DIMM#0 (channel:2 slot:0)",
        MachineCheckCorrected,
        Some("CPU_SrcID#1_Ha#0_Chan#2_DIMM#0"),
    );
    is(
        "EDAC MC0: 1 UE on mc#0csrow#2channel#1 (csrow:2 channel:1 page:0x71ddf8 offset:0x940 grain:64)",
        MachineCheck,
        Some("mc#0csrow#2channel#1"),
    );
    is(
        "[Hardware Error]: CPU 0: Machine Check Exception: 0 Bank 5: 8c00004000010090",
        MachineCheckCorrected,
        Some("0"),
    );
    is(
        "mce: [Hardware Error]: CPU 20: Machine Check Exception: 5 Bank 1: bd80000000100134",
        MachineCheck,
        Some("20"),
    );
    is("[Hardware Error]: System Fatal error.", MachineCheck, None);
    for harmless in [
        "EDAC sbridge MC1: HANDLING MCE MEMORY ERROR",
        "EDAC sbridge MC1: CPU 8: Machine Check Event: 0 Bank 7: 8c00004000010090",
        "EDAC skx: Driver: Intel Skylake server",
        "EDAC DEBUG: sbridge_init",
        "mce: CPU supports 32 MCE banks",
        "CMCI storm detected: switching to poll mode",
        "{1}[Hardware Error]:  section_type: memory error",
        "[Firmware Warn]: GHES: Poll interval is 0 for generic hardware error source: 1, disabled.",
    ] {
        assert_eq!(read(harmless), None, "{harmless}");
    }
}

#[test]
fn storage_lines_of_many_vendors_are_classified() {
    use KernelClass::{DiskError, FileSystemError, NetworkStorage, RemountedReadOnly};
    is(
        "device offline error, dev sdq, sector 2048 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2",
        DiskError,
        Some("sdq"),
    );
    is("sd 1:0:3:0: [sdd] tag#12 rejecting I/O to offline device", DiskError, Some("sdd"));
    is("sd 1:0:3:0: rejecting I/O to dead device", DiskError, Some("1:0:3:0"));
    is(
        "megaraid_sas 0000:65:00.0: 5013 (682172338s/0x0001/FATAL) - VD 01/1 is now OFFLINE",
        DiskError,
        Some("0000:65:00.0"),
    );
    is("megaraid_sas 0000:65:00.0: FW in FAULT state!!", DiskError, Some("0000:65:00.0"));
    is("mpt3sas_cm0: fault_state(0x2622)!", DiskError, Some("mpt3sas_cm0"));
    is("EXT4-fs (sdb1): I/O error while writing superblock", DiskError, Some("sdb1"));
    is("EXT4-fs (sdb1): This should not happen!! Data will be lost", FileSystemError, Some("sdb1"));
    is("JBD2: Error -5 detected when updating journal superblock for sdb1-8.", FileSystemError, Some("sdb1"));
    is(
        "XFS (dm-4): Internal error xfs_iunlink_remove at line 2038 of file fs/xfs/xfs_inode.c.  Caller xfs_ifree+0x33/0x130 [xfs]",
        FileSystemError,
        Some("dm-4"),
    );
    is(
        "XFS (vda4): Metadata CRC error detected at xfs_dquot_buf_verify_crc+0xe6/0x120 [xfs], xfs_dquot block 0x1478",
        FileSystemError,
        Some("vda4"),
    );
    is("XFS (dm-7): log mount/recovery failed: error -5", FileSystemError, Some("dm-7"));
    is("XFS (sdd1): xfs_log_force: error -5 returned.", RemountedReadOnly, Some("sdd1"));
    is("XFS (xvdb): Log I/O Error Detected.  Shutting down filesystem", RemountedReadOnly, Some("xvdb"));
    is("ceph: [cafe0000-1111 4711]: mds0 hung", NetworkStorage, Some("mds0"));
    for harmless in [
        "megaraid_sas 0000:65:00.0: 5014 (682172338s/0x0020/INFO) - Patrol Read started",
        "mpt3sas_cm0: log_info(0x31120303): originator(PL), code(0x12), sub_code(0x0303)",
        "XFS (sda2): Starting recovery (logdev: internal)",
        "XFS (sda2): Ending recovery (logdev: internal)",
        "XFS (sda2): Quotacheck needed: Please wait.",
        "XFS (sda2): Deprecated V4 format (crc=0) will not be supported after September 2030.",
        "EXT4-fs (sda1): recovery complete",
        "EXT4-fs (sda1): last error at time 1700000000: ext4_lookup:1785: inode 2",
        "EXT4-fs (md127p3): re-mounted 0f3cd65a-338b-4574-bba3-ecef214e1917 r/w. Quota mode: none.",
        "md/raid1:md1: active with 3 out of 18 mirrors",
        "md: md1 stopped.",
        "sd 0:0:0:0: [sda] Attached SCSI disk",
        "ata1.00: failed command: READ FPDMA QUEUED",
        "ata1: hard resetting link",
        "nvme nvme0: Does your device have a faulty power saving mode enabled?",
        "nvme nvme0: Ignoring bogus Namespace Identifiers",
        "libceph: mon1 (1)10.0.0.1:6789 session lost, hunting for new mon",
    ] {
        assert_eq!(read(harmless), None, "{harmless}");
    }
}

#[test]
fn a_hot_network_card_degrades_and_harmless_lines_are_ignored() {
    let mut host = Host::new();
    for line in [
        "mlx5_core 0000:5c:00.0: print_health_info:431:(pid 0): Health issue observed, High temperature, severity(4) WARNING:",
        "mlx5_core 0000:5c:00.0: print_health_info:435:(pid 0): assert_var[0] 0x00000001",
        "mlx5_core 0000:5c:00.0: print_health_info:440:(pid 0): fw_ver 28.39.1002",
    ] {
        host.log(line);
    }
    assert_eq!(host.component("host.network_card").state, HealthState::Degraded);
    is(
        "mlx5_core 0000:03:00.0: mlx5_load_one failed with error code -22",
        KernelClass::NetworkCard,
        Some("0000:03:00.0"),
    );
    for harmless in [
        "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link INIT",
        "mlx5_core 0000:ab:00.0: Rate limit: 127 rates are supported, range: 0Mbps to 195312Mbps",
        "mlx5_core 0000:ab:00.0: handle_hca_cap:526:(pid 6016): log_max_qp value in current profile is 18, changing it to HCA capability limit (17)",
        "mlx5_core 0000:ab:00.0: mlx5_fw_tracer_start:821:(pid 812): FWTracer: Ownership granted and active",
        "workqueue: ib_cache_event_task [ib_core] hogged CPU for >10000us 4 times, consider switching to WQ_UNBOUND",
        "usb 1-1: device descriptor read/64, error -71",
        "ACPI BIOS Error (bug): Could not resolve symbol [\\_SB.PCI0], AE_NOT_FOUND (20230628/psargs-330)",
        "ACPI Error: Aborting method \\_SB.PMI0._PMM due to previous error (AE_NOT_EXIST)",
        "x86/cpu: SGX disabled by BIOS.",
        "i801_smbus 0000:00:1f.4: Timeout waiting for interrupt!",
    ] {
        assert_eq!(read(harmless), None, "{harmless}");
    }
}

#[test]
fn harmless_lines_of_the_nvidia_driver_are_ignored() {
    let mut host = Host::new();
    for line in [
        "nvidia-nvlink: Nvlink Core is being initialized, major device number 510",
        "NVRM: GPU at PCI:0000:3b:00: GPU-db7d1b2c-0000-1111-2222-333344445555",
        "NVRM: GPU Board Serial Number: 1650000000000",
        "NVRM: nvAssertFailedNoLog: Assertion failed: 0 @ kernel_gsp.c:1234",
        "NVRM: gpuHandleSanityCheckRegReadError_GM107: Possible bad register read: addr: 0x110100, regvalue: 0xbadf5040",
        "NVRM: GPU1 kbifCacheVFInfo_GB100: Unable to read NV_PF0_INITIAL_AND_TOTAL_VFS",
        "NVRM: API mismatch: the client has the version 535.129.03, but",
        "NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:3b:00 (printing 1 of every 30).",
        "NVRM:     -2    73   SET_REGISTRY                   0 0x0000000000000000 0x0000000000000000",
        "nvidia 0000:3b:00.0: vgaarb: VGA decodes changed: olddecodes=io+mem,decodes=none:owns=none",
        "nvidia-uvm: Loaded the UVM driver, major device number 507.",
        "nvidia-modeset: WARNING: GPU:0: Unable to read EDID for display device DP-1",
        "NVRM: Xid (PCI:0009:01:00): 43, pid=3188489, name=trigger_xid, channel 0x0b00000a",
    ] {
        host.log(line);
    }
    assert_eq!(host.not_healthy(), []);
}

#[test]
fn a_gpu_off_the_bus_is_recognised_in_a_message_of_three_lines() {
    for gap in ["               ", ""] {
        let mut host = Host::new();
        host.log("[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0");
        host.log(&format!("{gap}NVRM: (PCI ID: 10de:26b5) installed in this system has"));
        host.log(&format!("{gap}NVRM: fallen off the bus and is not responding to commands."));
        host.log("[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s).");
        let not_healthy: Vec<String> = host.not_healthy().into_iter().map(|(name, ..)| name).collect();
        assert_eq!(not_healthy, ["gpu.0000:b3:00"]);
    }
}

#[test]
fn older_kernels_name_the_cgroup_of_an_oom_kill_in_a_separate_line() {
    let mut reader = LogReader::default();
    let mut cgroup = |line: &str| match reader.line(Mono(9), line, 1) {
        Some((_, Fact::KernelReport(report))) => report.cgroup,
        _ => None,
    };
    assert_eq!(cgroup("Task in /kubepods/pod1/c1 killed as a result of limit of /kubepods/pod1"), None);
    let kill = "Memory cgroup out of memory: Kill process 24572 (java) score 0 or sacrifice child";
    assert_eq!(cgroup(kill), Some("/kubepods/pod1/c1".to_owned()));
    // The group does not apply to the next kill.
    assert_eq!(cgroup("Memory cgroup out of memory: Kill process 7 (a) score 0 or sacrifice child"), None);
}

/// Log formats of hosts without one of the common log daemons.
#[test]
fn prefixes_of_containers_and_network_logs_are_removed() {
    let message = "EXT4-fs (sdb1): Remounting filesystem read-only";
    for line in [
        format!("10.0.0.7: kern: alert: [2026-11-21T03:04:05.123456789Z]: {message}"),
        format!("kern:    info: [2026-11-21T03:04:05.123456789Z]: {message}"),
        format!("2026-11-21T03:04:05.123456789Z stderr F [ 4711.123456] {message}"),
        format!("2026-11-21T03:04:05.123456789Z stdout F kern  :err   : [ 4711.123456] {message}"),
        format!("Nov 21 03:04:05 [ 4711.123456] {message}"),
        format!("6.8.0-45-generic,3,1339,5140900123,-,ncfrag=0/47;{message}"),
        format!(" kernel:[405108.698255] {message}"),
        serde_json::json!({ "log": format!("[ 4711.123456] {message}\n"), "stream": "stdout", "time": "2026-11-21T03:04:05Z" })
            .to_string(),
        serde_json::json!({ "facility": "kern", "msg": message, "priority": "alert", "seq": 3 }).to_string(),
    ] {
        is(&line, KernelClass::RemountedReadOnly, Some("sdb1"));
    }
    for of_a_program in [
        format!("10.0.0.7: user: alert: [2026-11-21T03:04:05.123456789Z]: {message}"),
        format!("2026-11-21T03:04:05.123456789Z stderr F Nov 21 03:04:05 gpu-17 python[1]: {message}"),
        serde_json::json!({ "level": "error", "msg": message }).to_string(),
        serde_json::json!({ "log": format!("python: {message}\n"), "stream": "stdout" }).to_string(),
    ] {
        assert_eq!(read(&of_a_program), None, "{of_a_program}");
    }
}
