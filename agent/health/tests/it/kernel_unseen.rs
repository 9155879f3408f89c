//! Lines of hosts, drivers and kernels that the parser was not written for: each alone on a fresh host, with its
//! expected result. A failure lists all lines with a different result.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::parse::log::LogReader;
use mainstay_model::entry::Fact;
use mainstay_model::time::Mono;
use support::lines::{check, comes_to};

#[test]
fn nvidia_gpu_lines_yield_the_expected_state_and_action() {
    check(
        "= gpu.0000:01:00 UNHEALTHY RESET_DEVICE
         NVRM: Xid (PCI:0000:01:00): 62, 223b6a66 00002100 00000000 20662342 20662ba6 20664272 2065f7ca 2063f48c
         NVRM: Xid (PCI:0000:01:00): 120, GSP kernel exception: store access page fault (cause:0xf) @ pc:0xffffffff93003d42, partition:4#0
         NVRM: Xid (PCI:0000:01:00): 119, pid=1234, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU1 GSP! Expected function 76 (GSP_RM_CONTROL) sequence 1234 (0x2080a097 0x7b4).
         NVRM: Xid (PCI:0000:01:00): 119, pid='N/A', Timeout waiting for RPC from GSP
         NVRM: Xid (PCI:0000:01:00): 95, pid='<unknown>', name=<unknown>, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No
         NVRM: Xid (PCI:0000:01:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error
         NVRM: Xid (PCI:0000:01:00): 46, pid=7, name=python, GPU stopped processing
         NVRM: Xid (PCI:0000:01:00): 109, pid=1797828, name=pt_main_thread, Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x58005
         NVRM: Xid (PCI:0000:01:00): 143, GPU Initialization Failure
         NVRM: Xid (PCI:0000:01:00): 150, MSE_WATCHDOG Fatal XC0 i0 Link -1 (0x00000007 0x00000001 0x00000000 0x00000000 0x00000000 0x00000000)
         NVRM: Xid (PCI:0000:01:00): 169, SEC2 halted
         = gpu.0000:01:00 UNHEALTHY REBOOT_NODE
         NVRM: Xid (PCI:0000:01:00): 79, pid=4242, name=VLLM::Worker, GPU has fallen off the bus.
         NVRM: Xid (PCI:0000:01:00): 79, pid=4242, name=ray::IDLE, with, commas, GPU has fallen off the bus.
         NVRM: Xid (PCI:0000:01:00): 173, C2C fatal error
         NVRM: Xid (PCI:0000:01:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
         NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x62:0xffff:2350)
         NVRM: GPU 0000:01:00.0: rm_init_adapter failed, device minor number 3
         NVRM: GPU at PCI:0000:01:00 has fallen off the bus.
         NVRM: GPU 0000:01:00.0 has fallen off the bus and is not responding to commands.
         = gpu.0000:01:00 DEGRADED RESET_DEVICE
         NVRM: Xid (PCI:0000:01:00): 94, pid=99, name=python, Contained: LTC (0x3). RST: Yes, D-RST: Yes
         NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)
         NVRM: Xid (PCI:0000:01:00): 63, pid=4242, name=python, Row Remapper: New row (0x000000118e6d1b00) marked for remapping, reset gpu to activate.
         NVRM: Xid (PCI:0000:01:00): 156, Resource retirement event: TPC
         = gpu.0000:01:00 DEGRADED RESTART_PROCESS
         NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)
         NVRM: Xid (PCI:0000:01:00): 94, pid=99, name=VLLM::Worker_TP, Contained: SM (0x1). RST: No, D-RST: No
         = gpu.0008:01:00 UNHEALTHY RESET_DEVICE
         NVRM: Xid (PCI:0008:01:00): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 05 (0x00009003 0x00000001 0x00000000 0x00000000 0x00000000 0x00000000)
         NVRM: Xid (PCI:0008:01:00.0): 140, pid='<unknown>', name=<unknown>, An uncorrectable ECC error detected (possible firmware handling failure) DRAM:0, LTC:0, MMU:0, PCIE:1
         = host.gpu UNHEALTHY REBOOT_NODE
         NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover.
         NVRM: RmInitAdapter failed! (0x26:0xffff:1290)
         NVRM: rm_init_adapter failed for device bearing minor number 0
         = nothing
         NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149
         NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Illegal Instruction Parameter
         NVRM: Xid (PCI:0000:cb:00): 31, pid=5, name=python, channel 0x0200000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC2 GPCCLIENT_T1_3 faulted @ 0x7fc0_bc000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ
         NVRM: Xid (PCI:0000:cb:00): 137, pid=5, name=VLLM::Worker, NVLink: TLC RX PRIV Error
         NVRM: Xid (PCI:0000:cb:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)
         NVRM: GPU0 _kgspRpcGspEventPmuHalted: Received signal from GSP that PMU has halted.
         NVRM: _kgspIsHeartbeatTimedOut: Heartbeat timed out, currentTimeMs 3175895033 heartbeat 19834604 heartbeatWithOffsetMs 3175815351 diff 79682 timeout 5200
         NVRM: GPU0 kgspHealthCheck_TU102: ********** GSP-CrashCat Report **********
         NVRM: GPU0 nvAssertOkFailedNoLog: Assertion failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F) returned from kfspWaitForResponse
         NVRM: os_schedule: Attempted to yield the CPU while in atomic or interrupt context
         NVRM: GPU 0000:01:00.0 is already bound to vfio-pci.
         NVRM: GPU 0000:01:00.0: Failed to copy vbios to system memory.
         NVRM: No NVIDIA GPU found.
         NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U22-I3)
         NVRM: GPU0 GSP Firmware: version 570.86.15 loaded
         NVRM: GPU3 knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!
         NVRM: Can't find an IRQ for your NVIDIA card!
         NVRM: request_irq() failed (-22)
         nvidia: module verification failed: signature and/or required key missing - tainting kernel
         nvidia-nvlink: Nvlink Core is being initialized, major device number 236
         nvidia-caps-imex-channels: registered device number 508
         nvidia-gpu 0000:01:00.3: i2c timeout error e0000000
         [drm] [nvidia-drm] [GPU ID 0x00000100] Loading driver
         [drm:nv_drm_load [nvidia_drm]] *ERROR* [nvidia-drm] [GPU ID 0x00003b00] Failed to allocate NvKmsKapiDevice
         nvidia_uvm: loading out-of-tree module taints kernel.
         nv_peer_mem: loading out-of-tree module taints kernel.
         nvidia 0000:01:00.0: enabling device (0140 -> 0142)
         nvidia 0000:01:00.0: Direct firmware load for nvidia/570.86.15/gsp_ga10x.bin failed with error -2
         vfio-pci 0000:01:00.0: vfio_ecap_init: hiding ecap 0x1e@0x258
         python3: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.
         systemd[1]: NVRM: Xid (PCI:0000:01:00): 48, DBE",
    );
}

#[test]
fn nvidia_switch_lines_yield_the_expected_state_and_action() {
    check(
        "= nvswitch.0000:84:00 UNHEALTHY RESET_DEVICE
         nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Fatal, Link 61 egress non-posted PRIV error (First)
         nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
         nvidia-nvswitch0: SXid (PCI:0000:84:00): 11013, Fatal, Link 4 ingress TLC DBE
         = nvswitch.0000:84:00 DEGRADED RESTART_PROCESS
         nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)
         nvidia-nvswitch3: SXid (PCI:0000:84:00.0): 19084, Non-fatal, Link 24 AN1 Heartbeat Timeout Error (First)
         = nothing
         nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Data {0x000001c0, 0x00bd5c8a, 0x00000500, 0x00000064, 0x00000000, 0x40008000, 0x5a001100, 0x00000000, 0x00000000}
         nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Severity 1 Engine instance 61 Sub-engine instance 00
         nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 20001, Non-fatal, Link 18 TX Replay Error
         nvidia-nvswitch1: open (major=509)
         nvidia-nvswitch1: using MSI
         nvidia-nvswitch: Probing device 0000:84:00.0, Vendor Id = 0x10de, Device Id = 0x22a3, Class = 0x68000",
    );
}

#[test]
fn amd_gpu_lines_yield_the_expected_state_and_action() {
    check(
        "= gpu.0000:68:00 UNHEALTHY RESET_DEVICE
         amdgpu 0000:68:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!
         amdgpu 0000:68:00.0: amdgpu: uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!
         amdgpu 0000:68:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block, no user action is needed.
         amdgpu 0000:68:00.0: amdgpu: socket: 3, die: 0, 1 new uncorrectable hardware errors detected in xgmi_wafl block
         = gpu.0000:68:00 UNHEALTHY REBOOT_NODE
         amdgpu 0000:68:00.0: device lost from bus!
         amdgpu 0000:68:00.0: amdgpu: GPU reset(4) failed
         amdgpu 0000:68:00.0: amdgpu: GPU Recovery Failed: -19
         amdgpu 0000:68:00.0: amdgpu: ASIC reset failed with error, -110 for drm dev, 0000:68:00.0
         amdgpu 0000:68:00.0: amdgpu: Fatal error during GPU init
         amdgpu 0000:68:00.0: probe with driver amdgpu failed with error -110 || amdgpu 0000:68:00.0: Fatal error during GPU init
         = gpu.0000:68:00 UNHEALTHY REPLACE_NODE
         amdgpu 0000:68:00.0: amdgpu: RAS records:257 exceeds threshold:256
         amdgpu 0000:68:00.0: amdgpu: Saved bad pages 270 reaches threshold value 256
         = nothing
         amdgpu 0000:68:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected! || amdgpu 0000:68:00.0: amdgpu: GPU reset begin! || amdgpu 0000:68:00.0: amdgpu: GPU reset(1) succeeded!
         amdgpu 0000:68:00.0: amdgpu: GPU reset begin!
         amdgpu 0000:68:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=1, emitted seq=3
         amdgpu 0000:68:00.0: amdgpu: 12 correctable hardware errors detected in umc block, no user action is needed.
         amdgpu 0000:68:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:8 pasid:32770, for process python pid 12 thread python pid 12)
         amdgpu 0000:68:00.0: {1}[Hardware Error]: aca entry[00].STATUS=0x98000800003e0000
         amdgpu 0000:68:00.0: amdgpu: RAS: optional ras ta ucode is not available
         amdgpu 0000:68:00.0: amdgpu: SMU is resumed successfully!
         [drm] PCIE GART of 512M enabled (table at 0x000000807FD00000).",
    );
}

#[test]
fn pcie_lines_yield_the_expected_state_and_action() {
    check(
        "= host.pcie UNHEALTHY REBOOT_NODE
         pcieport 0000:15:01.0: DPC: containment event, status:0x1f01 source:0x0000
         pcieport 0000:15:01.0: DPC: containment event, status:0x1f05: ERR_FATAL received from 0000:17:00.0
         pcieport 0000:15:01.0: DPC: unmasked uncorrectable error detected
         nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (First)
         pcieport 0000:15:01.0: AER: subordinate device reset failed
         pcieport 0000:15:01.0: pciehp: Slot(12-1): Card not present
         = host.pcie DEGRADED NONE
         pcieport 0000:15:01.0: AER: Multiple Uncorrectable (Non-Fatal) error message received from 0000:17:00.0
         mlx5_core 0000:5c:00.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer, (Requester ID)
         {1}[Hardware Error]: event severity: recoverable || {1}[Hardware Error]:  Error 0, type: recoverable || {1}[Hardware Error]:   section_type: PCIe error
         = nothing
         pcieport 0000:15:01.0: AER: Correctable error message received from 0000:17:00.0
         nvidia 0000:17:00.0: AER:    [ 0] RxErr                  (First)
         pcieport 0000:15:01.0: AER: enabled with IRQ 124
         pcieport 0000:15:01.0: DPC: enabled with IRQ 124
         pcieport 0000:15:01.0: DPC: error containment capabilities: Int Msg #0, RPExt+ PoisonedTLP+ SwTrigger+ RP PIO Log 4, DL_ActiveErr+
         pcieport 0000:15:01.0: AER: Root Port link has been reset (0)
         pcieport 0000:15:01.0: pciehp: Slot(12): Powering on due to button press
         pcieport 0000:97:01.0: PME: Signaling with IRQ 45
         pci 0000:98:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint
         {1}[Hardware Error]:  aer_uncor_status: 0x00040000, aer_uncor_mask: 0x00100000
         pci_hp_register failed with error -16",
    );
}

#[test]
fn memory_and_cpu_lines_yield_the_expected_state_and_action() {
    check(
        "= host.hardware UNHEALTHY REPLACE_NODE
         EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2 slot:0 page:0xb757589 offset:0x140 grain:32 -  OVERFLOW err_code:0101:0092 socket:1 imc:1 rank:0 bg:3 ba:0 row:1a1e8 col:180)
         EDAC MC0: UE page 0x1234, offset 0x0, grain 64, row 2, labels \"\": i3200 UE
         Memory failure: 0xe16677: already hardware poisoned
         mce: Uncorrected hardware memory error in user-access at 1a2b3c4d00
         [Hardware Error]: Uncorrected, software restartable error.
         mce: [Hardware Error]: CPU 12: Machine Check Exception: 7 Bank 1: bd80000000100134
         {3}[Hardware Error]: event severity: recoverable || {3}[Hardware Error]:  Error 0, type: recoverable || {3}[Hardware Error]:  fru_text: B1 || {3}[Hardware Error]:   section_type: memory error
         {3}[Hardware Error]: event severity: fatal
         SError Interrupt on CPU12, code 0x00000000be000011 -- SError
         = nothing
         {37}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 162 || {37}[Hardware Error]: It has been corrected by h/w and requires no further action || {37}[Hardware Error]: event severity: corrected || {37}[Hardware Error]:  Error 0, type: corrected || {37}[Hardware Error]:   section_type: memory error
         mce: [Hardware Error]: Machine check events logged
         mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 4: a600000000020408
         [Hardware Error]: Corrected error, no action required.
         [Hardware Error]: Unified Memory Controller Ext. Error Code: 0
         mce: CMCI storm detected: switching to poll mode
         EDAC MC1: 1 CE memory scrubbing error on CPU_SrcID#1_Ha#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0xee30a0)
         EDAC amd64: F19h detected (node 0).
         EDAC i10nm: No hbm memory
         EDAC MC: Ver: 3.0.0
         BERT: Error records from previous boot:
         [Hardware Error]: event severity: fatal
         ERST: Error Record Serialization Table (ERST) support is initialized.
         GHES: APEI firmware first mode is enabled by APEI bit and WHEA _OSC.
         RAS: Correctable Errors collector initialized.
         MCE: In-kernel MCE decoding enabled.
         Uhhuh. NMI received for unknown reason 3d on CPU 1.
         perf: interrupt took too long (2501 > 2500), lowering kernel.perf_event_max_sample_rate to 79750",
    );
}

#[test]
fn kernel_error_lines_yield_the_expected_state_and_action() {
    check(
        "= host.kernel DEGRADED REBOOT_NODE
         INFO: task kworker/u513:0:1234 blocked for more than 241 seconds.
         INFO: task jbd2/nvme0n1p2-:812 blocked for more than 120 seconds.
         INFO: task cuda-EvtHandlr:4242 blocked in I/O wait for more than 122 seconds.
         watchdog: BUG: soft lockup - CPU#5 stuck for 48s! [nv_queue:2231]
         watchdog: Watchdog detected hard LOCKUP on cpu 7
         NMI watchdog: Watchdog detected hard LOCKUP on cpu 3
         rcu: INFO: rcu_sched self-detected stall on CPU
         rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 5-...D } 21 jiffies s: 1234 root: 0x20/.
         BUG: workqueue lockup - pool cpus=12 node=0 flags=0x0 nice=0 stuck for 45s!
         = host.kernel UNHEALTHY REBOOT_NODE
         BUG: kernel NULL pointer dereference, address: 0000000000000008
         Internal error: synchronous external abort: 0000000096000410 [#1] SMP
         Unable to handle kernel paging request at virtual address ffff80001234
         Oops: 0000 [#1] PREEMPT SMP NOPTI
         list_add corruption. prev->next should be next (ffff), but was 0000.
         kernel BUG at fs/ext4/inode.c:2727!
         Kernel panic - not syncing: Fatal hardware error!
         = nothing
         INFO: task python:812 <reader> blocked on an rw-semaphore likely owned by task python:813 <writer>
         INFO: NMI handler (perf_event_nmi_handler) took too long to run: 1.234 msecs
         INFO: lockdep is turned off.
         WARNING: CPU: 3 PID: 4242 at kernel/sched/core.c:1234 foo+0x12/0x34
         task:python          state:D stack:    0 pid: 4242 ppid:  4241 flags:0x00004006
         workqueue: lru_add_drain_per_cpu hogged CPU for >10000us 7 times, consider switching to WQ_UNBOUND
         sched: RT throttling activated
         sched: DL replenish lagged too much
         rcu: Hierarchical SRCU implementation.
         rcu: INFO: rcu_preempt kthread starved for 12 jiffies! g1 f0x0 RCU_GP_WAIT_FQS(5) ->state=0x0 ->cpu=3
         watchdog: NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.
         audit: type=1400 audit(1763700000.123:456): apparmor=\"DENIED\" operation=\"open\" profile=\"docker-default\" name=\"/proc/4242/mem\" comm=\"py-spy\"
         audit: type=1701 audit(1763700000.123:457): auid=1000 uid=1000 gid=1000 ses=3 pid=4242 comm=\"python\" exe=\"/usr/bin/python3.12\" sig=11 res=1
         apparmor=\"STATUS\" operation=\"profile_load\" name=\"Oops: NVRM: Xid (PCI:0000:01:00): 79\"
         systemd[1]: Kernel panic - not syncing: a name that a person gave
         python3[4242]: BUG: unable to handle my own input
         SELinux:  Class mctp_socket not defined in policy.
         page_owner is disabled
         Freeing unused kernel image (initmem) memory: 4568K
         x86/fpu: Supporting XSAVE feature 0x001: 'x87 floating point registers'
         tsc: Refined TSC clocksource calibration: 2000.000 MHz",
    );
}

#[test]
fn disk_and_file_system_lines_yield_the_expected_state_and_action() {
    check(
        "= host.storage DEGRADED REPLACE_NODE
         I/O error, dev nvme0n1, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2
         Buffer I/O error on dev dm-0, logical block 0, lost async page write
         md/raid1:md0: Disk failure on nvme0n1p1, disabling device.
         JBD2: Detected IO errors while flushing file data on dm-0-8
         device-mapper: multipath: 253:3: Failing path 8:16.
         sd 2:0:0:0: [sdc] tag#11 UNKNOWN(0x2003) Result: hostbyte=DID_OK driverbyte=DRIVER_OK cmd_age=3s || sd 2:0:0:0: [sdc] tag#11 Sense Key : Medium Error [current] || critical medium error, dev sdc, sector 1234 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2
         = host.storage UNHEALTHY REBOOT_NODE
         EXT4-fs error (device sda1): ext4_journal_check_start:83: comm kworker/u8:2: Detected aborted journal
         EXT4-fs (nvme0n1): failed to convert unwritten extents to written extents -- potential data loss!  (inode 17, error -5)
         EXT4-fs (sda1): Remounting filesystem read-only
         JBD2: I/O error when updating journal superblock for sdb1-8.
         Aborting journal on device dm-0-8.
         XFS (nvme0n1): xfs_do_force_shutdown(0x2) called from line 1234 of file fs/xfs/xfs_log.c. Return address = ffffffffc0
         XFS (nvme2n1): Corruption of in-memory data (0x8) detected at xfs_defer_finish_noroll+0x1/0x2 [xfs] (fs/xfs/libxfs/xfs_defer.c:504).  Shutting down filesystem.
         XFS (sdb): writeback error on inode 123, offset 0, sector 0
         BTRFS: error (device sdb1) in btrfs_commit_transaction:2377: errno=-5 IO failure
         BTRFS: error (device sdb1: state EA) in cleanup_transaction:2018: errno=-5 IO failure
         BTRFS critical (device nvme0n1p2: state EA): corrupt leaf: root=5 block=30408704 slot=6
         BTRFS info (device sdb1: state E): forced readonly
         BTRFS error (device sdb1): bdev /dev/sdb1 errs: wr 1, rd 0, flush 0, corrupt 0, gen 0
         device-mapper: thin: 253:4: switching pool to read-only mode
         = host.storage DEGRADED NONE
         nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10
         nvme nvme0: I/O tag 12 (100c) opcode 0x2 (I/O Cmd) QID 4 timeout, reset controller
         nvme nvme2: I/O 128 QID 32 timeout, disable controller
         = host.storage UNHEALTHY REPLACE_NODE
         nvme nvme0: Removing after probe failure status: -19
         nvme nvme0: Device not ready; aborting reset, CSTS=0x1
         = nothing
         nvme nvme0: pci function 0000:5e:00.0
         nvme nvme0: allocated 64 MiB host memory buffer.
         nvme nvme0: rescanning namespaces.
         nvme0n1: p1 p2 p3
         EXT4-fs (sda1): mounted filesystem 8f3b r/w with ordered data mode. Quota mode: none.
         EXT4-fs (sda1): unmounting filesystem 8f3b.
         EXT4-fs (sda1): orphan cleanup on readonly fs
         XFS (sda1): Mounting V5 Filesystem 12ab
         XFS (sda1): Unmounting Filesystem 12ab
         BTRFS info (device sdb1): using crc32c (crc32c-intel) checksum algorithm
         BTRFS: device fsid 1234 devid 1 transid 5 /dev/sdb1 scanned by mount (812)
         BTRFS warning (device sdb1): csum failed root 5 ino 257 off 0 csum 0x1 expected csum 0x2 mirror 1
         I/O error, dev loop3, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2
         I/O error, dev fd0, sector 0 op 0x0:(READ)
         squashfs: version 4.0 (2009/01/31) Phillip Lougher
         md: md0 in immediate safe mode
         md: data-check of RAID array md0
         device-mapper: uevent: version 1.0.3
         device-mapper: multipath round-robin: version 1.2.0 loaded
         sd 0:0:0:0: [sda] Synchronizing SCSI cache
         scsi host0: ahci
         ata1.00: exception Emask 0x0 SAct 0x0 SErr 0x0 action 0x6 frozen
         systemd-fsck[812]: /dev/sda1: clean, 123/456 files",
    );
}

#[test]
fn network_storage_lines_yield_the_expected_state_and_action() {
    check(
        "= host.network_storage DEGRADED NONE
         nfs: server 10.0.0.5 not responding, still trying
         NFS: server nas-1 not responding, timed out
         lockd: server nas-1 not responding, still trying
         LustreError: 167-0: scratch-OST0002-osc-ffff8d5f: This client was evicted by scratch-OST0002; in progress operations using this service will fail.
         Lustre: scratch-OST0004-osc-ffff9: Connection to scratch-OST0004 (at 10.0.0.8@o2ib) was lost; in progress operations using this service will wait for recovery to complete
         LNetError: 2314:0:(o2iblnd_cb.c:3461:kiblnd_check_txs_locked()) Timed out tx: active_txs, 1 seconds
         LNetError: 2314:0:(o2iblnd_cb.c:3536:kiblnd_check_conns()) Timed out RDMA with 10.12.0.4@o2ib (12): c: 5, oc: 0, rc: 8
         CIFS: VFS: \\\\nas has not responded in 180 seconds. Reconnecting...
         ceph: mds0 hung
         = nothing
         nfs: server 10.0.0.5 not responding, still trying || nfs: server 10.0.0.5 OK
         Lustre: scratch-OST0004-osc-ffff9: Connection to scratch-OST0004 (at 10.0.0.8@o2ib) was lost; in progress operations using this service will wait for recovery to complete || Lustre: scratch-OST0004-osc-ffff9: Connection restored to 10.0.0.8@o2ib (at 10.0.0.8@o2ib)
         NFS: Registering the id_resolver key type
         NFSv4: state recovery failed for open file x, error = -116
         RPC: Registered rdma transport module.
         Lustre: Mounted scratch-client
         Lustre: 2319:0:(client.c:2310:ptlrpc_expire_one_request()) @@@ Request sent has timed out for sent delay
         LNet: Added LNI 10.0.0.9@o2ib [8/256/0/180]
         libceph: mon0 (1)10.0.0.1:6789 session established
         ceph: mds0 caps renewed
         FS-Cache: Netfs 'nfs' registered for caching
         CIFS: Attempting to mount \\\\nas\\share",
    );
}

#[test]
fn network_card_lines_yield_the_expected_state_and_action() {
    check(
        "= host.network_card UNHEALTHY REBOOT_NODE
         mlx5_core 0000:1a:00.0: mlx5_health_try_recover:340:(pid 2931): health recovery flow aborted, PCI reads still not working
         mlx5_core 0000:1a:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count
         mlx5_core 0000:1a:00.0: wait_func:1063:(pid 1): MODIFY_RQ(0x909) timeout. Will cause a leak of a command resource
         mlx5_core 0000:1a:00.0: mlx5_pci_err_detected Device state = 1 health sensors: 1 pci_status: 0. Enter, pci channel state = 2
         mlx5_core 0000:1a:00.0: mlx5_function_setup:1193:(pid 1): Firmware over 120000 MS in pre-initializing state, aborting
         bnxt_en 0000:1b:00.0 ens5f0np0: Firmware fatal reset event received, max wait time 8000 msec
         bnxt_en 0000:1b:00.0 ens5f0np0: Firmware heartbeat stopped, aborting
         ice 0000:1c:00.0: Rebuild failed, unload and reload driver
         = host.network_card DEGRADED CONTACT_SUPPORT
         mlx5_core 0000:1a:00.0: temp_warn:199:(pid 0): High temperature on sensors with bit set 0x0 0x1
         mlx5_core 0000:1a:00.0: Port module event[error]: module 0, Cable error, High Temperature
         mlx5_core 0000:1a:00.0: mlx5_pcie_event:301:(pid 812): Detected insufficient power on the PCIe slot (27W).
         = host.network_card DEGRADED NONE
         mlx5_core 0000:1a:00.0 ens3f0np0: TX timeout detected
         NETDEV WATCHDOG: ens3f0np0 (mlx5_core): transmit queue 12 timed out
         ib0: transmit timeout: latency 1234 msecs
         = nothing
         mlx5_core 0000:1a:00.0: mlx5_cmd_out_err:808:(pid 812): ACCESS_REG(0x805) op_mod(0x0) failed, status bad parameter(0x3), syndrome (0x305684), err(-22)
         mlx5_core 0000:1a:00.0: firmware version: 28.41.1000
         mlx5_core 0000:1a:00.0: 252.048 Gb/s available PCIe bandwidth (16.0 GT/s PCIe x16 link)
         mlx5_core 0000:1a:00.0: E-Switch: Total vports 18, per vport: max uc(128) max mc(2048)
         mlx5_core 0000:1a:00.0: mlx5_pcie_event:296:(pid 812): PCIe slot advertised sufficient power (75W).
         mlx5_core 0000:1a:00.0 ens3f0np0: Link up
         mlx5_core 0000:1a:00.0 ens3f0np0: Link down
         mlx5_core 0000:1a:00.0: Port module event: module 0, Cable unplugged
         infiniband mlx5_0: mlx5_ib_dereg_mr: mr pinned
         infiniband mlx5_2: wait_for_async_commands:781:(pid 2): done with all pending requests
         bond0: (slave ens3f0np0): link status definitely down, disabling slave
         ib0: enabling connected mode will cause multicast packet drops
         ice 0000:1c:00.0: The DDP package was successfully loaded: ICE OS Default Package version 1.3.36.0
         bnxt_en 0000:1b:00.0 ens5f0np0: hwrm req_type 0x17 seq id 0x5 error 0xf
         IPv6: ADDRCONF(NETDEV_CHANGE): ens3f0np0: link becomes ready",
    );
}

/// Reports about processes are events and do not affect the state of the host.
#[test]
fn killed_and_crashed_processes_are_recorded() {
    let read = |line: &str| match LogReader::default().line(Mono(9), line, 1) {
        Some((_, Fact::KernelReport(report))) => {
            let process = report.process.as_deref().unwrap_or("-").to_owned();
            format!("{} {process} {}", report.class.name(), report.pid.map_or(0, |pid| pid.0))
        }
        Some((_, other)) => format!("{other:?}"),
        None => "nothing".to_owned(),
    };
    let mut wrong = Vec::new();
    for (expected, line) in [
        (
            "out_of_memory python3 4242",
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=cri-containerd-12.scope,mems_allowed=0-1,oom_memcg=/kubepods.slice/pod1,task_memcg=/kubepods.slice/pod1/c1,task=python3,pid=4242,uid=0",
        ),
        (
            "out_of_memory pt_data_worker 77",
            "Memory cgroup out of memory: Killed process 77 (pt_data_worker) total-vm:12kB, anon-rss:4kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:1000",
        ),
        (
            "out_of_memory ray::IDLE 9",
            "Out of memory: Killed process 9 (ray::IDLE) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0",
        ),
        ("out_of_memory java 5", "Out of memory: Kill process 5 (java) score 912 or sacrifice child"),
        (
            "segfault python3 4242",
            "python3[4242]: segfault at 7f1200000010 ip 00007f1234567890 sp 00007ffc12345678 error 4 in libcuda.so.550.54.15[7f1234000000+1a00000] likely on CPU 12 (core 12, socket 0)",
        ),
        (
            "segfault python3 4242",
            "traps: python3[4242] general protection fault ip:7f12 sp:7ffc error:0 in libcuda.so.570.86.15[7f1234000000+1a00000]",
        ),
        (
            "segfault pt_main_thread 5",
            "pt_main_thread[5]: segfault at 0 ip 0000000000000000 sp 00007ffc12345678 error 14 likely on CPU 3 (core 3, socket 0)",
        ),
        (
            "segfault ray::train_fn 88",
            "ray::train_fn[88]: segfault at 18 ip 00007f sp 00007f error 6 in libnccl.so.2[7f+a0]",
        ),
        (
            "segfault VLLM::Worker_TP 12",
            "traps: VLLM::Worker_TP[12] trap invalid opcode ip:7f sp:7f error:0 in libtorch_cpu.so[7f+a0]",
        ),
        (
            "nothing",
            "python3 invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, oom_score_adj=0",
        ),
        (
            "nothing",
            "oom_reaper: reaped process 4242 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        ),
        ("nothing", "Tasks state (memory values in pages):"),
        ("nothing", "memory: usage 1048576kB, limit 1048576kB, failcnt 123"),
        ("nothing", "show_signal_msg: 12 callbacks suppressed"),
        ("nothing", "python3: potentially unexpected fatal signal 11."),
        ("nothing", "Code: 48 8b 07 c3 66 90 <48> 8b 47 08"),
    ] {
        let found = read(line);
        if found != expected {
            wrong.push(format!("{line}\n    must be {expected}\n    is      {found}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn an_xid_is_recognised_behind_each_known_log_prefix() {
    let message =
        "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";
    let mut wrong = Vec::new();
    for prefix in [
        "kernel: ",
        "kernel: [ 4711.123456] ",
        "Mar 29 15:38:59 kernel: ",
        "gpu-17 kernel: ",
        "Nov 21 03:04:05.123456 gpu-17 kernel: ",
        "2026-11-21 03:04:05 gpu-17 kernel: ",
        "2026-11-21 03:04:05.123 gpu-17 kernel: ",
        "2026-11-21T03:04:05,123456+00:00 ",
        "kern  :err   : 2026-11-21T03:04:05,123456+00:00 ",
        "kern  :warn  : [Fri Nov 20 10:11:12 2026] ",
        "<4>Nov 21 03:04:05 gpu-17 kernel: [ 4711.123456] ",
        "<4>1 2026-11-21T03:04:05.123Z gpu-17 kernel - - - ",
        "<4>1 2026-11-21T03:04:05.123Z gpu-17 kernel - - - [ 4711.123456] ",
        "Nov 21 2026 03:04:05 gpu-17 kernel: ",
        "[Fri Nov 21 03:04:05 2026] ",
        "[2026-11-21T03:04:05.123456+00:00] ",
        "[2026-11-21 03:04:05] ",
        "[ 4711.123456@12] ",
        "[ 4711.123456][ T4242] ",
        "[ 4711.123456] [T4242] ",
        "[   12.123456] [    T1] ",
        "[4711.123456 <    0.000012>] ",
        "10.10.10.10: kern: err: [2026-11-21T03:04:05.123456789Z]: ",
        "Nov 21 03:04:05 gpu-17 kernel[0]: ",
        "1763694245.123456 gpu-17 kernel: ",
        "3,991,81234567890,-,caller=T12;",
        "kern.err: ",
        "kern.warn kernel: ",
        "gpu-17.example.org kernel: [4711.1] ",
    ] {
        let found = comes_to(&format!("{prefix}{message}"));
        if found != "gpu.0000:01:00 UNHEALTHY REBOOT_NODE" {
            wrong.push(format!("{prefix}: {found}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
