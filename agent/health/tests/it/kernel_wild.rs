//! More lines of hosts with various vendors, drivers and ages, with varying prefixes: the result of each on a fresh
//! host, and long stretches of ordinary logs that must be ignored.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_model::health::{HealthState, RecommendedAction};
use support::Host;

use HealthState::{Degraded, Unhealthy};
use RecommendedAction::{
    ContactSupport, None as Nothing, RebootNode, ReplaceNode, ResetDevice, RestartProcess,
};

/// Prefixes of lines, used in turn.
const PREFIXES: [&str; 14] = [
    "",
    "[1234567.890123] ",
    "[  994.005678][  T642] ",
    "<3>[  812.000001] ",
    "kern  :err   : [Fri Nov 20 10:11:12 2026] ",
    "Nov 20 10:11:12 10.1.2.3 kernel: ",
    "Nov  2 10:11:12 node-0017 kernel: [81234.567890] ",
    "2026-11-20T10:11:12.123456+01:00 node-0017 kernel: ",
    "2026-11-20T10:11:12+0000 node-0017 kernel: ",
    "Fri Nov 20 10:11:12 2026 kern.err kernel: [  81.234567] ",
    "[81234.567890] node-0017 kernel: ",
    "Fri 2026-11-20 10:11:12 UTC node-0017 kernel: ",
    "1795169472.123456 node-0017 kernel: ",
    "3,991,81234567890,-;",
];

/// Each line alone on a fresh host must yield exactly this state and action of one component.
fn each(component: &str, state: HealthState, action: RecommendedAction, lines: &[&str]) {
    for (place, line) in lines.iter().enumerate() {
        for prefix in [PREFIXES[place % PREFIXES.len()], PREFIXES[(place * 5 + 3) % PREFIXES.len()]] {
            let mut host = Host::new();
            host.log(&format!("{prefix}{line}"));
            assert_eq!(host.not_healthy(), [(component.to_owned(), state, action)], "{prefix}{line}");
        }
    }
}

/// With each prefix, all lines in sequence must leave one host healthy.
fn silent(lines: &str) {
    for (place, prefix) in PREFIXES.iter().enumerate() {
        let mut host = Host::new();
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
            host.log(&format!("{prefix}{line}"));
            assert_eq!(host.not_healthy(), [], "form {place}: {line}");
        }
    }
}

const GPU: &str = "gpu.0000:3b:00";

#[test]
fn gpu_errors_that_need_a_reset_are_unhealthy() {
    each(
        GPU,
        Unhealthy,
        ResetDevice,
        &[
            "NVRM: Xid (PCI:0000:3b:00): 48, pid=30214, name=pt_main_thread, DBE (double bit error) ECC Error",
            "NVRM: Xid (PCI:00000000:3B:00): 48, An uncorrectable double bit error (DBE) has been detected on GPU (00 02 01).",
            "NVRM: Xid (PCI:0000:3b:00.0): 62, pid='<unknown>', name=<unknown>, 32d8c2f0 0000fd44 00000000 20277b1c",
            "NVRM: Xid (PCI:0000:3b:00): 64, pid=0, Row Remapper Error: (0x0000000000b8ed00) - All reserved rows for bank are remapped",
            "NVRM: Xid (PCI:0000:3b:00): 95, pid=7194, name=python3, Uncontained: FBHUB. RST: Yes, D-RST: No",
            "NVRM: Xid (PCI:0000:3b:00): 109, pid=99, name=vllm, Ch 0000001a, errorString CTX SWITCH TIMEOUT, Info 0x4c007",
            "NVRM: Xid (PCI:0000:3b:00): 110, pid='<unknown>', name=<unknown>, Security fault",
            "NVRM: Xid (PCI:0000:3b:00): 119, pid=1, name=systemd, Timeout after 45s of waiting for RPC response from GPU0 GSP! Expected function 103 (GSP_RM_ALLOC) (0x2080 0x4).",
            "NVRM: Xid (PCI:0000:3b:00): 120, GSP task timeout @ pc:0x4a1b2c, task: 1",
            "NVRM: Xid (PCI:0000:3b:00): 136, pid='<unknown>', name=<unknown>, Link training failed on link 4",
            "NVRM: Xid (PCI:0000:3b:00): 140, pid=22, name=dcgmproftester, An uncorrectable ECC error detected (possible firmware handling failure) DRAM:1, LTC:0, MMU:0, PCIE:0",
            "NVRM: Xid (PCI:0000:3b:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            "NVRM: Xid (PCI:0000:3b:00): 158, pid=311, name=python, Ch 0000002c, engine timeout",
            "NVRM: Xid (PCI:0000:3b:00): 155, pid='<unknown>', name=<unknown>, NVLink: SW-defined error",
        ],
    );
}

#[test]
fn gpu_errors_that_need_a_reboot_are_unhealthy() {
    each(
        GPU,
        Unhealthy,
        RebootNode,
        &[
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=2213, name=nvidia-smi, GPU has fallen off the bus.",
            "NVRM: GPU at 0000:3b:00.0 has fallen off the bus.",
            "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x24:0x72:1568)",
            "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x23:0x65:1438)",
            "NVRM: Xid (PCI:0000:3b:00): 151, Key rotation error",
            "NVRM: Xid (PCI:0000:3b:00): 167, PCIe fatal timeout",
            "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)",
            "nvidia 0000:3b:00.0: Unable to change power state from D3hot to D0, device inaccessible",
        ],
    );
}

#[test]
fn other_gpu_errors_yield_the_expected_state_and_action() {
    each(
        GPU,
        Degraded,
        ResetDevice,
        &[
            "NVRM: Xid (PCI:0000:3b:00): 63, pid=1896, name=python, Row Remapper: New row (0x0000000001ae3c00) marked for remapping, reset gpu to activate.",
            "NVRM: Xid (PCI:0000:3b:00): 63, Dynamic Page Retirement: New page retired, reboot to activate (0x00000000004a1a5b).",
            "NVRM: Xid (PCI:0000:3b:00): 160, pid='<unknown>', name=<unknown>, Channel Retirement Event",
        ],
    );
    each(
        GPU,
        Degraded,
        RestartProcess,
        &[
            "NVRM: Xid (PCI:0000:3b:00): 94, pid=4242, name=torchrun, Contained: SM (0x1). RST: No, D-RST: No",
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:0c): 94, pid=17, name=python, Contained: CE User Channel (0x9). RST: No, D-RST: No",
        ],
    );
    each(
        GPU,
        Degraded,
        ContactSupport,
        &[
            "NVRM: Xid (PCI:0000:3b:00): 123, pid='<unknown>', name=<unknown>, SPI PMU RPC write failed",
            "NVRM: Xid (PCI:0000:3b:00): 142, NVENC3 exception",
        ],
    );
    each(
        GPU,
        Unhealthy,
        ContactSupport,
        &[
            "NVRM: Xid (PCI:0000:3b:00): 54, pid='<unknown>', name=<unknown>, Auxiliary power is not connected to the GPU board",
        ],
    );
}

#[test]
fn xids_of_fifth_generation_nvlinks_give_their_severity() {
    each(
        GPU,
        Unhealthy,
        ResetDevice,
        &[
            "NVRM: Xid (PCI:0000:3b:00): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 02 (0x00009003 0x00000001 0x00000000 0x00000000 0x00000000 0x00000000)",
            "NVRM: Xid (PCI:0000:3b:00): 146, pid=1, name=a, TLW_RX Fatal XC1 i0 Link 11 (0x00000003 0x00000001 0x0 0x0 0x0 0x0)",
        ],
    );
    silent(
        "NVRM: Xid (PCI:0000:3b:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 0x00000000 0x00100000 0x00000004)",
    );
}

#[test]
fn program_faults_and_driver_notes_leave_the_gpu_healthy() {
    silent(
        "NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception: ESR 0x405840=0xa204020e
         NVRM: Xid (PCI:0000:3b:00): 13, pid=12, name=python, Graphics Exception: Shader Program Header 11 Error
         NVRM: Xid (PCI:0000:3b:00): 31, pid=12345, name=python, Ch 0000001e, intr 00000000. MMU Fault: ENGINE CE2 HUBCLIENT_CE0 faulted @ 0x7f11_00000000. Fault is of type FAULT_PTE ACCESS_TYPE_VIRT_WRITE
         NVRM: Xid (PCI:0000:3b:00): 43, pid=12345, name=python, channel 0x00000012
         NVRM: Xid (PCI:0000:3b:00): 45, pid=12345, name=python, Ch 00000013, caused by previous Xid 31
         NVRM: Xid (PCI:0000:3b:00 GPU-I:03): 43, pid=9, name=jupyter, Ch 00000009
         NVRM: Xid (PCI:0000:3b:00): 32, pid=9, name=python, Channel ID 0000000a intr0 00040000
         NVRM: Xid (PCI:0000:3b:00): 137, pid=9, name=python, NVLink: FLA privilege error
         NVRM: Xid (PCI:0000:3b:00): 121, C2C Link corrected error
         NVRM: Xid (PCI:0000:3b:00): 93, Non-fatal violation of provisioned InfoROM wear limit
         NVRM: krcWatchdog_IMPL: RC watchdog: GPU is probably locked!  Notify Timeout Seconds: 7
         NVRM: gpuClearFbhubPoisonIntrForBug2924523_GA100: FBHUB Interrupt detected. Clearing it.
         NVRM: nvCheckOkFailedNoLog: Check failed: Call not supported [NV_ERR_NOT_SUPPORTED] (0x00000056) returned from rmapi
         NVRM: GPU0 _kgspRpcRecvPoll: GSP RM heartbeat timed out
         NVRM: iovaspaceDestruct_IMPL: 1 left-over mappings in IOVAS 0x3b00
         NVRM: Persistence mode is deprecated and will be removed in a future release. Please use nvidia-persistenced instead.
         NVRM: Going over RM unhandled interrupt threshold for irq 212
         NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Getting peer1's postRxDetLinkMask
         NVRM: dmaAllocMapping_GM107: can't alloc VA space for mapping.
         nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing
         nvidia_uvm: module license 'Dual MIT/GPL' taints kernel
         nvidia-nvlink: Unregistered Nvlink Core, major device number 510
         nvidia-nvswitch0: Probing device 0000:c1:00.0, Vendor Id = 0x10de, Device Id = 0x22a3, Class = 0x68000
         nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12021, Non-fatal, Link 55 ingress ECC limit
         nvidia-nvswitch0: SXid (PCI:0000:c1:00): 22013, Non-fatal, Link 03 Minion Link DLREQ interrupt
         nvidia-modeset: ERROR: GPU:0: Idling display engine timed out: 0x0000c67d:0:0:407
         nvidia 0000:3b:00.0: PM: suspend failed: -5",
    );
}

#[test]
fn fatal_sxids_of_switches_need_a_reset() {
    each(
        "nvswitch.0000:05:00",
        Unhealthy,
        ResetDevice,
        &[
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 24007, Fatal, Link 32 sourcetrack TCEN0 crumbstore DBE (First)",
            "nvidia-nvswitch0: SXid (PCI:0000:05:00): 22003, Fatal, Link 00 Minion exterror",
            "nvidia-nvswitch5: SXid (PCI:0000:05:00.0): 23006, Non-recoverable, NVLIPT fatal",
            "nvidia-nvswitch1: SXid (PCI:0000:05:00.0): 29999, Fatal, Link 10 a code of another day",
        ],
    );
}

#[test]
fn host_lines_yield_the_expected_state_and_action() {
    each(
        "host.pcie",
        Unhealthy,
        RebootNode,
        &[
            "pcieport 0000:15:01.0: AER: Uncorrectable (Fatal) error message received from 0000:17:00.0",
            "pcieport 0000:15:01.0: DPC: containment event, status:0x1f05, ERR_FATAL received from 0000:17:00.0",
            "pcieport 0000:15:01.0: pciehp: Slot(12): Link Down",
        ],
    );
    each(
        "host.hardware",
        Unhealthy,
        ReplaceNode,
        &[
            "EDAC MC1: 1 UE Memory Error: on mc#1memory#3 (node:1 card:3 module:0 bank:2 row:0x1f)",
            "mce: [Hardware Error]: CPU 48: Machine Check Exception: f Bank 12: bb80000000000e0b",
            "{7}[Hardware Error]: event severity: fatal",
            "Memory failure: 0x1a2b3c: recovery action for dirty LRU page: Recovered",
            "[Hardware Error]: Deferred error, no action required.",
        ],
    );
    each(
        "host.kernel",
        Degraded,
        RebootNode,
        &[
            "INFO: task kworker/u256:3:98231 blocked for more than 122 seconds.",
            "watchdog: BUG: soft lockup - CPU#101 stuck for 26s! [pt_main_thread:41231]",
            "watchdog: CPU12: Watchdog detected hard LOCKUP on cpu 12",
            "rcu: INFO: rcu_tasks detected stalls on tasks:",
        ],
    );
    each(
        "host.kernel",
        Unhealthy,
        RebootNode,
        &[
            "Oops: general protection fault, probably for non-canonical address 0xdead000000000122: 0000 [#1] SMP NOPTI",
            "kernel BUG at mm/slub.c:435!",
            "BUG: unable to handle page fault for address: ffffffffc0a31000",
            "Kernel panic - not syncing: hung_task: blocked tasks",
        ],
    );
    each(
        "host.storage",
        Degraded,
        ReplaceNode,
        &[
            "nvme0n1: Read(0x2) @ LBA 1953125, 8 blocks, Unrecovered Read Error (sct 0x2 / sc 0x81) DNR",
            "critical medium error, dev nvme0n1, sector 1953125 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2",
            "print_req_error: I/O error, dev sdd, sector 2048",
            "md/raid10:md127: Disk failure on nvme3n1, disabling device.",
            "sd 0:2:1:0: [sdb] tag#40 rejecting I/O to offline device",
        ],
    );
    each(
        "host.storage",
        Unhealthy,
        RebootNode,
        &[
            "EXT4-fs error (device nvme0n1p2) in ext4_reserve_inode_write:5792: Journal has aborted",
            "XFS (nvme1n1): Block device removal (0x20) detected at fs_bdev_mark_dead+0x5e/0x80 [xfs] (fs/xfs/xfs_super.c:1180).  Shutting down filesystem.",
            "XFS (dm-2): metadata I/O error in \"xfs_buf_ioend+0x1b5/0x3a0 [xfs]\" at daddr 0x1f4 len 8 error 5",
        ],
    );
    each("host.storage", Unhealthy, ReplaceNode, &["nvme nvme1: Disabling device after reset failure: -19"]);
    each(
        "host.storage",
        Degraded,
        Nothing,
        &[
            "nvme nvme1: I/O tag 12 (a00c) opcode 0x2 (I/O Cmd) QID 5 timeout, aborting req_op:READ(0) size:4096",
        ],
    );
    each(
        "host.network_storage",
        Degraded,
        Nothing,
        &[
            "nfs: server nas-17.example.org not responding, timed out",
            "LustreError: 167-0: scratch-MDT0000-mdc-ffff8d5f1a2b3000: This client was evicted by scratch-MDT0000; in progress operations using this service will fail.",
        ],
    );
    each(
        "host.network_card",
        Unhealthy,
        RebootNode,
        &[
            "mlx5_core 0000:1a:00.0: poll_health:1042:(pid 0): Fatal error 1 detected",
            "mlx5_core 0000:1a:00.0: print_health_info:431:(pid 0): synd 0x8: unrecoverable hardware error",
            "mlx5_core 0000:9a:00.1: mlx5_cmd_exec:1933: CREATE_CQ(0x400) timeout. Will cause a leak of a command resource",
        ],
    );
    each(
        "host.network_card",
        Degraded,
        ContactSupport,
        &[
            "mlx5_core 0000:1a:00.0: Port module event[error]: module 3, Cable error, Bad or unsupported cable/EEPROM",
            "mlx5_core 0000:1a:00.0: Port module event[error]: module 1, Cable error, Power budget exceeded",
        ],
    );
    each(
        "host.network_card",
        Degraded,
        Nothing,
        &[
            "mlx5_core 0000:1a:00.0 ens3f0np0: NETDEV WATCHDOG: CPU: 12: transmit queue 3 timed out 5013 ms",
            "NETDEV WATCHDOG: eno1 (ixgbe): transmit queue 0 timed out 5632 ms",
        ],
    );
}

#[test]
fn thermal_lines_of_old_and_new_kernels_are_counted_together() {
    let mut host = Host::new();
    for line in [
        "mce: CPU12: Core temperature is above threshold, cpu clock is throttled (total events = 1)",
        "CPU12: Package temperature is above threshold, cpu clock is throttled (total events = 12)",
        "mce: CPU12: Core temperature above threshold, cpu clock throttled (total events = 2)",
    ] {
        host.log(line);
    }
    assert_eq!(host.not_healthy(), [("host.hardware".to_owned(), Degraded, ContactSupport)]);
}

#[test]
fn unrelated_kernel_lines_are_ignored() {
    silent(
        "INFO: task python3:4242 is blocked on a mutex likely owned by task python3:4243.
         wait_func_handle_exec_timeout:1128:(pid 2053): cmd[0]: CREATE_MKEY(0x200) Recovered after timeout
         mlx5_core 0000:1a:00.0: wait_func_handle_exec_timeout:1128:(pid 2053): cmd[0]: CREATE_MKEY(0x200) Recovered after timeout
         mlx5_core 0000:1a:00.0: mlx5_cmd_comp_handler:1713:(pid 0): Command completion arrived after timeout (entry idx = 0).
         mlx5_core 0000:1a:00.0: Port module event: module 1, Cable plugged
         mlx5_core 0000:1a:00.0 ens3f0np0: Disabling LRO, not supported in legacy RQ
         mlx5_core 0000:1a:00.0: mlx5_wait_for_pages:898:(pid 55): Skipping wait for vf pages stage
         infiniband mlx5_3: create_qp:3311:(pid 99): Create QP type 2 failed
         bnxt_en 0000:1b:00.0 ens5f0: NIC Link is Up, 200000 Mbps full duplex, Flow control: none
         ice 0000:1c:00.0 ens6: NIC Link is Down
         pcieport 0000:00:01.0: AER: found no error details for 0000:01:00.0
         pcieport 0000:00:1c.0: pciehp: Slot(8): Attention button pressed
         DMAR: [DMA Read NO_PASID] Request device [3b:00.0] fault addr 0xbe000000 [fault reason 0x06] PTE Read access is not set
         AMD-Vi: Event logged [IO_PAGE_FAULT device=3b:00.0 domain=0x0012 address=0xfd000000 flags=0x0020]
         arm-smmu-v3 arm-smmu-v3.3.auto: event 0x10 received:
         amdgpu 0000:c1:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=1, emitted seq=3
         EDAC skx MC2: HANDLING MCE MEMORY ERROR
         EDAC igen6: v2.5.1
         mce: CPU7: Core temperature/speed normal
         mce: [Hardware Error]: Run the above through 'mcelog --ascii'
         [Firmware Bug]: the BIOS has corrupted hw-PMU resources (MSR 38d is 330)
         x86/split lock detection: #AC: python3/4242 took a split_lock trap at address: 0x7f0012340123
         nvme nvme0: failed to set APST feature (2)
         nvme 0000:5e:00.0: platform quirk: setting simple suspend
         nvme nvme3: 16/0/0 default/read/poll queues
         EXT4-fs (sda2): warning: mounting fs with errors, running e2fsck is recommended
         xfs filesystem being mounted at /scratch supports timestamps until 2038-01-19 (0x7fffffff)
         md/raid1:md0: redirecting sector 8 to other mirror: sda1
         md: md0: recovery done.
         ata3: SATA link down (SStatus 0 SControl 300)
         sd 0:0:0:0: [sda] tag#0 Sense Key : Illegal Request [current]
         scsi 10:0:0:1: Wrong diagnostic page; asked for 1 got 8
         Lustre: 8211:0:(client.c:2289:ptlrpc_expire_one_request()) @@@ Request sent has timed out for slow reply: [sent 1700000000/real 1700000000]
         NFS: nas-17: lost 1 locks
         FS-Cache: Loaded
         libceph: osd12 (1)10.0.0.9:6801 socket closed (con state OPEN)
         wekafs: reconnected to backend
         cgroup: fork rejected by pids controller in /kubepods/burstable/pod1/c1
         docker0: port 3(veth1a2b3c4) entered disabled state
         overlayfs: fs on '/var/lib/docker/overlay2/l/AB' does not support file handles, falling back to xino=off.
         TCP: request_sock_TCP: Possible SYN flooding on port 29500. Sending cookies.
         net_ratelimit: 5 callbacks suppressed
         systemd-journald[412]: /dev/kmsg buffer overrun, some messages lost.
         audit: backlog limit exceeded
         kauditd_printk_skb: 12 callbacks suppressed
         hrtimer: interrupt took 23345 ns
         clocksource: Long readout interval, skipping watchdog check: cs_nsec: 1001 wd_nsec: 1002
         perf: interrupt took too long (3155 > 3132), lowering kernel.perf_event_max_sample_rate to 63250
         watchdog: watchdog0: watchdog did not stop!
         ipmi_si IPI0001:00: The BMC does not support clearing the recv irq bit, compensating, but the BMC needs to be fixed.
         usb 1-6: device descriptor read/64, error -110
         CPU: 12 PID: 41231 Comm: pt_main_thread Tainted: P           OE      6.8.0-45-generic #45-Ubuntu
         RIP: 0010:_nv000123rm+0x12/0x40 [nvidia]
         Modules linked in: nvidia_uvm(POE) nvidia_drm(POE) nvidia_peermem(POE) nvidia(POE)
         ---[ end trace 0000000000000000 ]---
         pt_main_thread[4242]: segfault at 18 ip 00007f12aa bb sp 00007ffd error 4 in libnccl.so.2[7f12a0000000+a000000] likely on CPU 5 (core 5, socket 0)
         python3 (4242): drop_caches: 3
         process '/usr/bin/dockerd' started with executable stack",
    );
}
