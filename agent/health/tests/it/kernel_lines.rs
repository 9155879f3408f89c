//! Lines of many kernel and driver versions: the expected result of each, and the many that must be ignored.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_model::health::{HealthState, RecommendedAction};
use support::Host;

use HealthState::{Degraded, Unhealthy};
use RecommendedAction::{
    ContactSupport, None as Nothing, RebootNode, ReplaceNode, ResetDevice, RestartProcess,
};

type Expected = (&'static str, HealthState, RecommendedAction);

/// Logs the lines in order on a fresh host, in each format. The unhealthy components must be exactly these.
fn check(lines: &str, expected: &[Expected]) {
    for form in FORMS {
        let mut host = Host::new();
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
            host.log(&form(line));
        }
        let expected: Vec<_> =
            expected.iter().map(|(name, state, action)| ((*name).to_owned(), *state, *action)).collect();
        assert_eq!(host.not_healthy(), expected, "{}", form(lines));
    }
}

fn json(line: &str) -> String {
    serde_json::json!({ "_TRANSPORT": "kernel", "MESSAGE": line, "__CURSOR": "s=1" }).to_string()
}

/// The formats in which a line can arrive.
const FORMS: [fn(&str) -> String; 8] = [
    |line| line.to_owned(),
    |line| format!("[ 4711.123456] {line}\r"),
    |line| format!("[Tue Nov 21 03:04:05 2026] {line}"),
    |line| format!("4,1339,5140900123,-;{line}"),
    |line| format!("Nov 21 03:04:05 gpu-17 kernel: [ 4711.123456] {line}"),
    |line| format!("2026-11-21T03:04:05.123456+00:00 gpu-17 kernel: {line}"),
    |line| format!("\u{1b}[32m[ 4711.123456] \u{1b}[0m\u{1b}[33m{line}\u{1b}[0m"),
    json,
];

const GPU: &str = "gpu.0000:3b:00";

#[test]
fn xids_of_many_driver_versions_yield_the_expected_state_and_action() {
    check("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", &[(GPU, Unhealthy, RebootNode)]);
    check(
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        &[(GPU, Unhealthy, RebootNode)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00.0): 79, pid=1, GPU has fallen off the bus.",
        &[(GPU, Unhealthy, RebootNode)],
    );
    check("NVRM: Xid (0000:3b:00): 62, 0a5e(2c48) 00000000 00000000", &[(GPU, Unhealthy, ResetDevice)]);
    check(
        "NVRM: Xid (PCI:0000:3b:00): 61, pid=1194, 0cec(3098) 00000000 00000000",
        &[(GPU, Degraded, ContactSupport)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 6, subpartition 1.",
        &[(GPU, Unhealthy, ResetDevice)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row (0x000000000123abcd) marked for remapping, reset gpu to activate.",
        &[(GPU, Degraded, ResetDevice)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 64, pid='<unknown>', name=<unknown>, Row Remapper: Failed to record row",
        &[(GPU, Unhealthy, ResetDevice)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 92, pid='<unknown>', name=<unknown>, High single-bit ECC error rate",
        &[(GPU, Degraded, Nothing)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 94, pid=7194, name=python, Contained: CE User Channel (0x9). RST: No, D-RST: No",
        &[(GPU, Degraded, RestartProcess)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 95, pid='<unknown>', name=<unknown>, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
        &[(GPU, Unhealthy, ResetDevice)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 109, pid=2387, name=python3, Ch 00000023, errorString CTX SWITCH TIMEOUT, Info 0x2c014",
        &[(GPU, Unhealthy, ResetDevice)],
    );
    check(
        "NVRM: _kgspLogXid119: ********************************* GSP Timeout **********************************
         NVRM: _kgspLogXid119: Note: Please also check logs above.
         NVRM: Xid (PCI:0000:3b:00): 119, pid=2387, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU1 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20800a4c 0x0).
         NVRM: GPU1 GSP RPC buffer contains function 76 (GSP_RM_CONTROL) and data 0x0000000020800a4c 0x0000000000000000.",
        &[(GPU, Unhealthy, ResetDevice)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 120, pid='<unknown>', name=<unknown>, GSP task exception: load access page fault (cause:0xd) @ pc:0x1a7f5d6",
        &[(GPU, Unhealthy, ResetDevice)],
    );
    check(
        "NVRM: Xid (PCI:0000:3b:00): 140, pid='<unknown>', name=<unknown>, An uncorrectable ECC error detected (possible firmware handling failure) DRAM:0, LTC:0, MMU:1, PCIE:0",
        &[(GPU, Unhealthy, ResetDevice)],
    );
    check("NVRM: Xid (PCI:0000:3b:00): 143, GPU Initialization Failure", &[(GPU, Unhealthy, ResetDevice)]);
    check(
        "NVRM: Xid (PCI:0000:3b:00): 122, pid='<unknown>', name=<unknown>, SPI PMU RPC read failed",
        &[(GPU, Degraded, ContactSupport)],
    );
    check("NVRM: Xid (PCI:0000:3b:00): 156, Resource Retirement Event", &[(GPU, Degraded, ResetDevice)]);
}

#[test]
fn xids_of_programs_and_notes_leave_the_gpu_healthy() {
    for rest in [
        "13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 1, TPC 0, SM 1): Out Of Range Address",
        "31, pid=3203, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_0 faulted @ 0x7f2b_34000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        "43, pid=8072, name=pt_main_thread, Ch 00000008",
        "45, pid=8072, name=python, Ch 0000000a",
        "68, pid=99, name=loader, NVDEC0 Exception",
        "69, pid=99, name=python, Class Error: ChId 0010, Class 0000c7c0, Offset 00000290, Data 00000000, ErrorCode 0000000c",
        "121, pid='<unknown>', name=<unknown>, C2C Link corrected error",
        "106, SMBPBI Test Message",
        "14, fake error",
        "93, pid='<unknown>', name=<unknown>, Non-fatal violation of provisioned InfoROM wear limit",
        "154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    ] {
        check(&format!("NVRM: Xid (PCI:0000:3b:00): {rest}"), &[]);
    }
    check("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 31, pid=7, name=python, MMU Fault", &[]);
}

#[test]
fn lost_gpus_are_recognised_without_an_xid() {
    check("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", &[(GPU, Unhealthy, RebootNode)]);
    check(
        "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330)
         NVRM: installed in this system has
         NVRM: fallen off the bus and is not responding to commands.
         nvidia 0000:3b:00.0: probe with driver nvidia failed with error -1",
        &[(GPU, Unhealthy, RebootNode)],
    );
    check(
        r"NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330)\x0aNVRM: installed in this system has\x0aNVRM: fallen off the bus and is not responding to commands.",
        &[(GPU, Unhealthy, RebootNode)],
    );
    check(
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2393)
         NVRM: GPU 0000:3b:00.0: rm_init_adapter failed, device minor number 0",
        &[(GPU, Unhealthy, RebootNode)],
    );
    check("NVRM: RmInitAdapter failed! (0x26:0xffff:1290)", &[("host.gpu", Unhealthy, RebootNode)]);
    check(
        "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:0fc6)
         NVRM: installed in this system is not supported by the
         NVRM: NVIDIA 550.54.15 driver release.",
        &[],
    );
}

#[test]
fn the_first_line_of_an_sxid_gives_its_severity() {
    let report_of = |word: &str| {
        format!(
            "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, {word}, Link 30 LTSSM Fault Up
             nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Severity 0 Engine instance 30 Sub-engine instance 00
             nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Data {{0x00000001, 0x00000000, 0x00000000}}"
        )
    };
    check(&report_of("Fatal"), &[("nvswitch.0000:c1:00", Unhealthy, ResetDevice)]);
    check(&report_of("Non-fatal"), &[]);
}

#[test]
fn pcie_lines_yield_the_expected_state_and_action() {
    check(
        "pcieport 0000:16:00.0: AER: Uncorrected (Fatal) error received: 0000:17:00.0",
        &[("host.pcie", Unhealthy, RebootNode)],
    );
    check(
        "pcieport 0000:16:00.0: AER: Multiple Uncorrected (Fatal) error message received from 0000:17:00.0",
        &[("host.pcie", Unhealthy, RebootNode)],
    );
    check(
        "pcieport 0000:64:01.0: DPC: containment event, status:0x1f01 source:0x0000",
        &[("host.pcie", Unhealthy, RebootNode)],
    );
    check("pcieport 0000:16:00.0: AER: device recovery failed", &[("host.pcie", Unhealthy, RebootNode)]);
    check(
        "pcieport 0000:16:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)",
        &[("host.pcie", Degraded, Nothing)],
    );
    check(
        "pcieport 10000:e0:06.0: pciehp: Slot(3-1): Card not present",
        &[("host.pcie", Unhealthy, RebootNode)],
    );
    check(
        "pcieport 0000:e0:06.0: pciehp: Slot(3-1): Link Down\npcieport 0000:e0:06.0: pciehp: Slot(3-1): Card present\npcieport 0000:e0:06.0: pciehp: Slot(3-1): Link Up",
        &[],
    );
    check(
        "pcieport 0000:16:00.0: AER: enabled with IRQ 24
         pcieport 0000:64:01.0: DPC: enabled with IRQ 31
         pcieport 0000:64:01.0: DPC: error containment capabilities: Int Msg #0, RPExt+ PoisonedTLP+ SwTrigger+ RP PIO Log 4, DL_ActiveErr+
         pcieport 0000:16:00.0: AER: Corrected error received: 0000:17:00.0
         nvidia 0000:17:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)
         nvidia 0000:17:00.0:   device [10de:2330] error status/mask=00000001/0000a000
         nvidia 0000:17:00.0:    [ 0] RxErr                  (First)
         pcieport 0000:16:00.0: AER: Root Port link has been reset (0)
         pci 0000:17:00.0: 31.504 Gb/s available PCIe bandwidth, limited by 2.5 GT/s PCIe x16 link at 0000:16:00.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)",
        &[],
    );
}

#[test]
fn memory_cpu_and_thermal_lines_yield_the_expected_state_and_action() {
    let lost: &[Expected] = &[("host.hardware", Unhealthy, ReplaceNode)];
    check(
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x12345 offset:0x0 grain:32)",
        lost,
    );
    check("EDAC MC0: UE row 0, channel-a= 0 channel-b= 1 labels \"-\": (Branch=0)", lost);
    check("mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400", lost);
    check("{1}[Hardware Error]: event severity: fatal", lost);
    check("{2}[Hardware Error]: event severity: recoverable", lost);
    check("[Hardware Error]: Uncorrected, software restartable/containable error.", lost);
    check("Memory failure: 0x12ab34: Sending SIGBUS to python:4711 due to hardware memory corruption", lost);
    check("mce: Uncorrected hardware memory error in user-access at 7f0012345", lost);
    check(
        "thermal thermal_zone0: critical temperature reached, shutting down",
        &[("host.hardware", Unhealthy, ContactSupport)],
    );
    let hot = "mce: CPU3: Package temperature above threshold, cpu clock throttled (total events = 7)";
    check(&format!("{hot}\n{hot}\n{hot}"), &[("host.hardware", Degraded, ContactSupport)]);
    check(
        &format!(
            "{hot}
             mce: CPU3: Package temperature/speed normal
             mce: CPU0: Thermal monitoring enabled (TM1)
             mce: [Hardware Error]: Machine check events logged
             mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 6: ee0000000040110a
             mce: [Hardware Error]: TSC 0 ADDR fef1ff40 MISC 3880000086
             [Hardware Error]: Corrected error, no action required.
             BERT: Error records from previous boot:
             [Hardware Error]: event severity: fatal
             [Hardware Error]:  Error 0, type: fatal
             {{1}}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 1
             {{1}}[Hardware Error]: It has been corrected by h/w and requires no further action
             {{1}}[Hardware Error]: event severity: corrected
             EDAC MC: Ver: 3.0.0
             EDAC MC0: Giving out device to module i10nm_edac controller Intel_10nm Socket#0 IMC#0: DEV 0000:7e:0c.0 (INTERRUPT)
             EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)
             EDAC i10nm: No hbm memory"
        ),
        &[],
    );
}

#[test]
fn kernel_and_process_lines_yield_the_expected_state_and_action() {
    let stuck: &[Expected] = &[("host.kernel", Degraded, RebootNode)];
    check("INFO: task nvidia-smi:4242 blocked for more than 241 seconds.", stuck);
    check("INFO: task jbd2/sda1-8:733 blocked in I/O wait for more than 120 seconds.", stuck);
    check("watchdog: BUG: soft lockup - CPU#17 stuck for 23s! [kworker/17:2:901]", stuck);
    check("NMI watchdog: BUG: soft lockup - CPU#17 stuck for 23s! [python:901]", stuck);
    check("watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3", stuck);
    check("rcu: INFO: rcu_sched self-detected stall on CPU", stuck);
    check(
        "rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 3-...D } 21 jiffies s: 1049 root: 0x8/.",
        stuck,
    );
    check("BUG: workqueue lockup - pool cpus=3 node=0 flags=0x0 nice=0 stuck for 39s!", stuck);
    check(
        "clocksource: timekeeping watchdog on CPU3: Marking clocksource 'tsc' as unstable because the skew is too large:",
        stuck,
    );
    let bug: &[Expected] = &[("host.kernel", Unhealthy, RebootNode)];
    check("BUG: kernel NULL pointer dereference, address: 0000000000000008", bug);
    check("BUG: unable to handle page fault for address: ffffb0c480000000", bug);
    check("Unable to handle kernel paging request at virtual address ffff80001234abcd", bug);
    check("Internal error: Oops: 0000000096000004 [#1] SMP", bug);
    check(
        "general protection fault, probably for non-canonical address 0xdead000000000100: 0000 [#1] PREEMPT SMP NOPTI",
        bug,
    );
    check("Kernel panic - not syncing: Fatal exception", bug);
    check(
        "python[1]: segfault at 0 ip 00007f1c2a3b4c5d sp 00007ffd12345678 error 4 in libtorch_cpu.so[7f1c2a000000+1000000]
         traps: python[77] general protection fault ip:7f1c sp:7ffd error:0 in libc.so.6[7f1c+1000]
         traps: python[78] trap invalid opcode ip:7f1c sp:7ffd error:0 in libx.so[7f1c+1000]
         python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
         oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=j,mems_allowed=0-1,oom_memcg=/job,task_memcg=/job/rank0,task=python,pid=4711,uid=1000
         Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:1kB oom_score_adj:0
         oom_reaper: reaped process 4711 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
         clocksource: timekeeping watchdog on CPU1: hpet wd-wd read-back delay of 62514ns
         tsc: Marking TSC unstable due to TSC halts in idle
         perf: interrupt took too long (2506 > 2500), lowering kernel.perf_event_max_sample_rate to 79750
         sched: RT throttling activated
         INFO: NMI handler (perf_event_nmi_handler) took too long to run: 1.2 msecs
         WARNING: CPU: 3 PID: 901 at kernel/foo.c:12 bar+0x12/0x34
         rcu: INFO: Some tasks are fine",
        &[],
    );
}

#[test]
fn disk_and_file_system_lines_yield_the_expected_state_and_action() {
    let bad: &[Expected] = &[("host.storage", Degraded, ReplaceNode)];
    check(
        "blk_update_request: I/O error, dev sdb, sector 12345 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
        bad,
    );
    check("I/O error, dev nvme1n1, sector 12345 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2", bad);
    check("blk_update_request: critical medium error, dev sdc, sector 5 op 0x0:(READ)", bad);
    check("Buffer I/O error on dev dm-0, logical block 7, lost async page write", bad);
    check("nvme0n1: I/O Cmd(0x2) @ LBA 123, 8 blocks, I/O Error (sct 0x2 / sc 0x81) MORE DNR", bad);
    check("md/raid1:md0: Disk failure on sdb1, disabling device.", bad);
    let gone: &[Expected] = &[("host.storage", Unhealthy, ReplaceNode)];
    check("nvme nvme2: Removing after probe failure status: -19", gone);
    check("nvme nvme2: Device not ready; aborting reset, CSTS=0x1", gone);
    check(
        "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
        &[("host.storage", Degraded, Nothing)],
    );
    let damaged: &[Expected] = &[("host.storage", Unhealthy, RebootNode)];
    check(
        "EXT4-fs error (device sdb1): ext4_lookup:1785: inode #2: comm ls: deleted inode referenced: 12",
        damaged,
    );
    check("EXT4-fs (sdb1): Remounting filesystem read-only", damaged);
    check("Aborting journal on device dm-1-8.", damaged);
    check(
        "XFS (dm-3): log I/O error -5\nXFS (dm-3): Filesystem has been shut down due to log error (0x2).",
        damaged,
    );
    check("BTRFS: error (device sdb1) in btrfs_commit_transaction:2456: errno=-5 IO failure", damaged);
    check("BTRFS error (device sdb1: state EA): forced readonly", damaged);
    check("BTRFS critical (device sdb1): corrupt leaf, slot offset bad", damaged);
    check("nfs: server filer1 not responding, still trying", &[("host.network_storage", Degraded, Nothing)]);
    check("nfs: server filer1 not responding, still trying\nnfs: server filer1 OK", &[]);
    check(
        "Lustre: fs1-OST0001-osc-ffff9a0000000000: Connection to fs1-OST0001 (at 10.0.0.1@o2ib) was lost; in progress operations using this service will wait for recovery to complete",
        &[("host.network_storage", Degraded, Nothing)],
    );
    check(
        "Lustre: fs1-OST0001-osc-ffff9a0000000000: Connection to fs1-OST0001 (at 10.0.0.1@o2ib) was lost; in progress\nLustre: fs1-OST0001-osc-ffff9a0000000000: Connection restored to 10.0.0.1@o2ib (at 10.0.0.1@o2ib)",
        &[],
    );
    check(
        "EXT4-fs (sda1): mounted filesystem with ordered data mode. Opts: (null). Quota mode: none.
         EXT4-fs (sda1): re-mounted. Opts: errors=remount-ro
         EXT4-fs (sda1): error count since last fsck: 3
         EXT4-fs warning (device sda1): ext4_dirblock_csum_verify:404: inode #1: comm x: No space for directory leaf checksum
         XFS (sdb1): Mounting V5 Filesystem
         XFS (sdb1): Ending clean mount
         XFS (sdb1): Unmounting Filesystem
         BTRFS info (device sdb1): disk space caching is enabled
         nvme nvme0: 32/0/0 default/read/poll queues
         nvme nvme0: Shutdown timeout set to 10 seconds
         blk_update_request: I/O error, dev sr0, sector 0
         blk_update_request: I/O error, dev loop3, sector 0
         Buffer I/O error on dev loop3, logical block 0, async page read
         blk_update_request: critical target error, dev sda, sector 0 op 0x3:(DISCARD) flags 0x800
         sd 0:0:0:0: [sda] Write cache: enabled, read cache: enabled, doesn't support DPO or FUA
         sd 0:0:0:0: Power-on or device reset occurred",
        &[],
    );
}

#[test]
fn network_card_lines_yield_the_expected_state_and_action() {
    let failing: &[Expected] = &[("host.network_card", Unhealthy, RebootNode)];
    check(
        "mlx5_core 0000:3b:00.0: poll_health:801:(pid 0): device's health compromised - reached miss count",
        failing,
    );
    check(
        "mlx5_core 0000:3b:00.1: wait_func:1151:(pid 12): ENABLE_HCA(0x104) timeout. Will cause a leak of a command resource",
        failing,
    );
    check("mlx5_core 0000:3b:00.0: mlx5_health_care:330:(pid 123): handling bad device here", failing);
    check(
        "mlx5_core 0000:3b:00.0: print_health_info:424:(pid 0): Health issue observed, firmware internal error, severity(3) ERROR:",
        failing,
    );
    check("bnxt_en 0000:3b:00.0 ens1: Firmware not responding, status: 0x8000", failing);
    let warm: &[Expected] = &[("host.network_card", Degraded, ContactSupport)];
    check("mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature", warm);
    check(
        "mlx5_core 0000:5c:00.0: mlx5_pcie_event:301:(pid 268269): Detected insufficient power on the PCIe slot (27W).",
        warm,
    );
    check(
        "mlx5_core 0000:5c:00.0: temp_warn:244:(pid 0): High temperature on sensors with bit set 0 1",
        warm,
    );
    check(
        "NETDEV WATCHDOG: ens1np0 (mlx5_core): transmit queue 3 timed out 5000 ms",
        &[("host.network_card", Degraded, Nothing)],
    );
    check(
        "mlx5_core 0000:3b:00.0: poll_health:801:(pid 0): device's health compromised - reached miss count\nmlx5_core 0000:3b:00.0: mlx5_health_try_recover:338:(pid 901): health recovery succeeded",
        &[],
    );
    check(
        "mlx5_core 0000:3b:00.0 ens1np0: Link down
         mlx5_core 0000:3b:00.0 ens1np0: Link up
         mlx5_core 0000:3b:00.0: firmware version: 28.39.1002
         mlx5_core 0000:3b:00.0: Port module event: module 0, Cable plugged
         mlx5_core 0000:3b:00.0: Port module event: module 0, Cable unplugged
         mlx5_core 0000:3b:00.0: mlx5_pcie_event:304:(pid 521): PCIe slot advertised sufficient power (75W).
         mlx5_core 0000:3b:00.0: mlx5_cmd_out_err:803:(pid 33): ACCESS_REG(0x805) op_mod(0x1) failed, status bad operation(0x2), syndrome (0x305684), err(-22)
         mlx5_core 0000:3b:00.0: E-Switch: Total vports 2, per vport: max uc(128) max mc(2048)
         infiniband mlx5_0: dump_cqe:272:(pid 12): dump error cqe
         mlx5_core 0000:3b:00.0: 252.048 Gb/s available PCIe bandwidth (16.0 GT/s PCIe x16 link)
         ena 0000:00:05.0: Elastic Network Adapter (ENA) v2.11.0g
         IPv6: ADDRCONF(NETDEV_CHANGE): ens1np0: link becomes ready",
        &[],
    );
}

#[test]
fn lines_of_a_normal_boot_are_ignored() {
    check(
        "Linux version 6.8.0-45-generic (buildd@lcy02) (x86_64-linux-gnu-gcc-13) #45-Ubuntu SMP PREEMPT_DYNAMIC
         Command line: BOOT_IMAGE=/boot/vmlinuz-6.8.0-45-generic root=UUID=1234 ro panic=10 oops=panic mce=on pci=noaer
         BIOS-e820: [mem 0x0000000000000000-0x000000000009ffff] usable
         ACPI: thermal: Thermal Zone [TZ0] (28 C)
         rcu: Hierarchical RCU implementation.
         rcu: RCU calculated value of scheduler-enlistment delay is 100 jiffies.
         NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.
         mce: CPU0: Thermal monitoring enabled (TM1)
         MCE: In-kernel MCE decoding enabled.
         RAS: Correctable Errors collector initialized.
         ERST: Error Record Serialization Table (ERST) support is initialized.
         GHES: APEI firmware first mode is enabled by APEI bit.
         pcieport 0000:00:01.0: PME: Signaling with IRQ 24
         pcieport 0000:00:01.0: pciehp: Slot #3 AttnBtn- PwrCtrl- MRL- AttnInd- PwrInd- HotPlug+ Surprise+ Interlock- NoCompl+ IbPresDis- LLActRep+
         nvidia: loading out-of-tree module taints kernel.
         nvidia: module license 'NVIDIA' taints kernel.
         nvidia-nvlink: Nvlink Core is being initialized, major device number 234
         nvidia 0000:3b:00.0: enabling device (0140 -> 0142)
         NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16-I3)
         nvidia-modeset: Loading NVIDIA UNIX Open Kernel Mode Setting Driver for x86_64  570.86.15
         nvidia-uvm: Loaded the UVM driver, major device number 511.
         nvidia-nvswitch0: open (major=510)
         [drm] [nvidia-drm] [GPU ID 0x00003b00] Loading driver
         systemd[1]: Started Journal Service.
         audit: type=1400 audit(1700000000.123:45): apparmor=\"DENIED\" operation=\"open\" comm=\"python\"
         EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Quota mode: none.
         Adding 8388604k swap on /swapfile.  Priority:-2 extents:6 across:8388604k FS
         IPVS: ipvs loaded.
         usb 1-14: new high-speed USB device number 2 using xhci_hcd
         usb 1-14: USB disconnect, device number 2
         accel accel0: TPU ready",
        &[],
    );
}

#[test]
fn lines_of_programs_are_not_kernel_reports() {
    for line in [
        "Nov 21 03:04:05 gpu-17 python[4711]: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "Nov 21 03:04:05 gpu-17 train[1]: blk_update_request: I/O error, dev sdb, sector 3",
        "Nov 21 03:04:05 gpu-17 app[1]: saw kernel: NVRM: Xid (PCI:0000:3b:00): 79, off",
        "systemd[1]: unit said: NVRM: Xid (PCI:0000:3b:00): 79",
        r#"{"_TRANSPORT":"stdout","MESSAGE":"NVRM: Xid (PCI:0000:3b:00): 79, off"}"#,
        r#"{"MESSAGE":"NVRM: Xid (PCI:0000:3b:00): 79, off"}"#,
        "python: I/O error, dev sda, sector 1",
        "x: AER: Uncorrected (Fatal) error received",
        "foo [Hardware Error]: Uncorrected",
        " SUBSYSTEM=pci",
    ] {
        let mut host = Host::new();
        host.log(line);
        assert_eq!(host.components(), [], "{line}");
    }
}

#[test]
fn truncated_lines_and_garbage_do_no_harm() {
    let whole = "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=7194, name=python, Contained: CE User Channel (0x9). RST: No, D-RST: No";
    for end in 0..whole.len() {
        Host::new().log(&whole[..end]);
    }
    let mut host = Host::new();
    for line in [
        "\u{0}\u{1}\u{2}",
        "\u{fffd}\u{fffd}NVRM: Xid",
        "NVRM: Xid (PCI:0000:3b:00): ",
        "NVRM: Xid (PCI:0000:3b",
        "{\"MESSAGE\":",
    ] {
        host.log(line);
    }
    assert_eq!(host.components(), []);
}

#[test]
fn only_the_last_boot_in_a_log_counts() {
    let mut host = Host::new();
    host.log("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.");
    host.log("EXT4-fs (sdb1): Remounting filesystem read-only");
    host.log("Linux version 6.8.0-45-generic (buildd@lcy02)");
    assert_eq!(host.not_healthy(), []);
    host.log("NVRM: Xid (PCI:0000:3b:00): 48, pid=1, name=python, DBE");
    assert_eq!(host.not_healthy(), [(GPU.to_owned(), Unhealthy, ResetDevice)]);
}
