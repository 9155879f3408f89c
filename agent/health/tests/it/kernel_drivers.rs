//! Lines of recent drivers (NVIDIA's 450 to 580, mlx5, nvme, EDAC, AER, file systems, network cards of clouds), many in
//! the sequence in which a host logs them. The expected results were written down before the parser ran on the lines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_model::health::{HealthState, RecommendedAction};
use support::Host;
use support::lines::{ORDINARY, check};

#[test]
fn nvidia_gpu_errors_need_a_reset_or_a_process_restart() {
    check(
        "= gpu.0000:4e:00 UNHEALTHY RESET_DEVICE
         NVRM: Xid (PCI:0000:4e:00): 119, pid=3021, name=nvidia-smi, Timeout after 45s of waiting for RPC response from GPU3 GSP! Expected function 103 (GSP_RM_ALLOC) sequence 8542 (0x0 0x0).
         NVRM: Xid (PCI:0000:4e:00): 119, Timeout waiting for RPC from GSP! Expected function 76 (GSP_RM_CONTROL) (0x2080208f 0x40).
         NVRM: Xid (PCI:0000:4e:00): 120, pid=1234, name=irq/123-nvidia, GSP task exception: load access fault (cause:0x5) @ pc:0x5f1ea2
         NVRM: Xid (PCI:0000:4e:00): 48, pid=12, name=python, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 3, subpartition 0.
         NVRM: Xid (PCI:0000:4e:00): 48, An uncorrectable double bit error (DBE) has been detected on GPU (00 00 00).
         NVRM: Xid (PCI:0000:4e:00): 95, pid=2412, name=python3, Uncontained: FBHUB. RST: Yes, D-RST: No
         NVRM: Xid (PCI:0000:4e:00): 95, pid='<unknown>', name=<unknown>, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No || NVRM: Xid (PCI:0000:4e:00): 45, pid=2412, name=python3, Ch 00000008 || NVRM: Xid (PCI:0000:4e:00): 45, pid=2412, name=python3, Ch 00000009
         NVRM: Xid (PCI:0000:4e:00): 64, pid='<unknown>', name=<unknown>, Row Remapper: unable to record remap entry in InfoROM
         NVRM: Xid (PCI:0000:4e:00): 109, pid=55, name=python, Ch 00000018, errorString CTX SWITCH TIMEOUT, Info 0x5c009
         NVRM: Xid (PCI:0000:4e:00): 62, pid='<unknown>', name=<unknown>, 0000(0000) 00000000 00000000
         NVRM: Xid (PCI:0000:4e:00): 140, pid='<unknown>', name=<unknown>, An uncorrectable ECC error detected (possible firmware handling failure) DRAM:0, LTC:4, MMU:0, PCIE:0
         NVRM: Xid (PCI:0000:4e:00): 110, pid='<unknown>', name=<unknown>, Security fault
         NVRM: Xid (PCI:0000:4e:00): 158, pid='<unknown>', name=<unknown>, GPU Fatal Timeout
         NVRM: Xid (PCI:0000:4e:00): 155, pid='<unknown>', name=<unknown>, NVLink: SW Defined Error
         NVRM: Xid (PCI:0000:4e:00 GPU-I:02): 95, pid=77, name=python, Uncontained: SM (0x1). RST: Yes, D-RST: No
         NVRM: Xid (PCI:0000:4e:00 GPU-I: 03 CI: 01): 48, pid=77, name=python, DBE
         NVRM: Xid (PCI:00000000:4e:00.0): 95, Uncontained ECC error
         NVRM: Xid (0000:4e:00): 48, DBE
         NVRM: Xid (PCI:0000:4e:00): 119, pid=3021, name=dcgm, Timeout after 6s of waiting for RPC response from GPU3 GSP! Expected function 76 (GSP_RM_CONTROL) sequence 1 (0x0 0x0). || NVRM: GPU3 GSP RPC buffer contains function 76 (GSP_RM_CONTROL) sequence 1 and data 0x0000000020800a97 0x0000000000000004. || NVRM: GPU3 RPC history (CPU -> GSP): || NVRM:     entry function                   sequence data0              data1              ts_start           ts_end             duration actively_polling || NVRM:      0    76   GSP_RM_CONTROL                 1 0x0000000020800a97 0x0000000000000004 0x000616d5a8ad0e5a 0x0000000000000000          y || CPU: 12 PID: 3021 Comm: dcgm Tainted: P           OE     5.15.0-113-generic #123-Ubuntu || Call Trace: ||  <TASK> ||  dump_stack_lvl+0x4a/0x63
         = gpu.0000:4e:00 DEGRADED RESET_DEVICE
         NVRM: Xid (PCI:0000:4e:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping, reset gpu to activate.
         NVRM: Xid (PCI:0000:4e:00): 63, Dynamic Page Retirement: New page retired, reboot to activate (0x0000000000abcdef).
         = gpu.0000:4e:00 DEGRADED RESTART_PROCESS
         NVRM: Xid (PCI:0000:4e:00 GPU-I:05): 94, pid=7194, name=python3, Contained: CE User Channel (0x9). RST: No, D-RST: No",
    );
}

#[test]
fn lost_nvidia_gpus_need_a_reboot() {
    check(
        "= gpu.0000:4e:00 UNHEALTHY REBOOT_NODE
         NVRM: Xid (PCI:0000:4e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus. || NVRM: GPU 0000:4e:00.0: GPU has fallen off the bus. || NVRM: GPU 0000:4e:00.0: GPU serial number is 1653022012345. || NVRM: A GPU crash dump has been created. If possible, please run || NVRM: nvidia-bug-report.sh as root to collect this data before || NVRM: the NVIDIA kernel module is unloaded. || NVRM: Xid (PCI:0000:4e:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
         NVRM: GPU at PCI:0000:4e:00: GPU-b850f46d-d5ea-c752-ddf3-c6b0e2d3e6e5 || NVRM: GPU Board Serial Number: 1653022012345 || NVRM: Xid (PCI:0000:4e:00): 79, GPU has fallen off the bus.
         NVRM: GPU 0000:4e:00.0: rm_init_adapter failed, device minor number 2
         NVRM: RmInitAdapter: Cannot initialize GSP firmware RM || NVRM: GPU 0000:4e:00.0: RmInitAdapter failed! (0x62:0x40:2477)
         NVRM: GPU 0000:4e:00.0: GPU does not have the necessary power cables connected. || NVRM: GPU 0000:4e:00.0: RmInitAdapter failed! (0x24:0x1c:1527)
         NVRM: Xid (PCI:0000:4e:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)
         NVRM: Xid (PCI:0000:4e:00): 167, pid='<unknown>', name=<unknown>, PCIE_FATAL_TIMEOUT
         NVRM: Xid (PCI:0000:4e:00): 119, pid=3021, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU3 GSP! Expected function 76 || NVRM: Xid (PCI:0000:4e:00): 154, pid=3021, name=nvidia-smi, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
         nvidia 0000:4e:00.0: Unable to change power state from D3cold to D0, device inaccessible
         = nothing
         NVRM: Xid (PCI:0000:4e:00): 201, pid='<unknown>', name=<unknown>, something that a newer driver tells",
    );
}

#[test]
fn harmless_nvidia_lines_are_ignored_and_fatal_sxids_need_a_reset() {
    check(
        "= nothing
         NVRM: Xid (PCI:0000:4e:00): 13, pid=4711, name=python3, Graphics SM Warp Exception on (GPC 0, TPC 3, SM 1): Out Of Range Address || NVRM: Xid (PCI:0000:4e:00): 13, pid=4711, name=python3, Graphics Exception: ESR 0x51df30=0x107000e 0x51df34=0x24 0x51df28=0x4c1eb72 0x51df2c=0x174 || NVRM: Xid (PCI:0000:4e:00): 43, pid=4711, name=python3, Ch 00000010
         NVRM: Xid (PCI:0000:4e:00): 31, pid=4711, name=pt_main_thread, channel 0x00000013, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC3 GPCCLIENT_T1_9 faulted @ 0x7f5f_34000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ
         NVRM: Xid (PCI:0000:4e:00): 32, pid=4711, name=python3, channel 0x0000000d intr0 00040000 intr1 00000000
         NVRM: Xid (PCI:0000:4e:00): 45, pid=4711, name=python3, Ch 00000012
         NVRM: Xid (PCI:0000:4e:00): 68, pid=4711, name=ffmpeg, NVDEC0 Exception
         NVRM: Xid (PCI:0000:4e:00): 69, pid=4711, name=python3, Class Error: ChId 0028, Class 0000cbc0, Offset 00000000, Data 00000000, ErrorCode 0000000c
         NVRM: Xid (PCI:0000:4e:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)
         NVRM: Xid (PCI:0000:4e:00): 162, pid='<unknown>', name=<unknown>, PWR smoothing HW feature re-enabled and functional
         NVRM: API mismatch: the client has the version 550.54.15, but || NVRM: this kernel module has the version 535.161.08.  Please || NVRM: make sure that this kernel module and all NVIDIA driver || NVRM: components have the same version.
         NVRM: This can occur when a driver such as: || NVRM: nouveau, rivafb, nvidiafb or rivatv || NVRM: was loaded and obtained ownership of the NVIDIA device(s).
         nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 22013, Non-fatal, Link 08 minion link dlreq interrupt
         nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20009, Non-fatal, Link 52 RX Short Error Rate
         nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 11012, Non-fatal, Link 08 ingress ECC limit
         gdrdrv:minor 0
         = nvswitch.0000:07:00 UNHEALTHY RESET_DEVICE
         nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 24007, Fatal, Link 12 sourcetrack timeout error (First) || nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 24007, Severity 1 Engine instance 12 Sub-engine instance 00 || nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 24007, Data {0x00000001, 0x00000001, 0x00000000}
         nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 23003, Fatal, Link 12 MVB uncorrectable ECC (First)",
    );
}

#[test]
fn an_xid_storm_on_all_gpus_is_reported_for_each_gpu() {
    let buses = ["18", "2a", "3a", "5d", "9a", "ab", "ba", "db"];
    let mut host = Host::new();
    for round in 0..50 {
        for bus in buses {
            let channel = round * 8;
            for line in [
                format!("45, pid=4711, name=python3, Ch {channel:08x}"),
                "119, pid=4711, name=python3, Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76".to_owned(),
                "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.".to_owned(),
                "154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)".to_owned(),
            ] {
                host.log(&format!("NVRM: Xid (PCI:0000:{bus}:00): {line}"));
            }
        }
    }
    let expected: Vec<_> = buses
        .iter()
        .map(|bus| (format!("gpu.0000:{bus}:00"), HealthState::Unhealthy, RecommendedAction::RebootNode))
        .collect();
    assert_eq!(host.not_healthy(), expected);
}

#[test]
fn pcie_and_iommu_lines_yield_the_expected_state_and_action() {
    check(
        "= host.pcie UNHEALTHY REBOOT_NODE
         pcieport 0000:00:1c.0: AER: Uncorrectable (Fatal) error message received from 0000:03:00.0
         pcieport 0000:00:1c.0: AER: Uncorrected (Fatal) error received: 0000:03:00.0
         nvme 0000:81:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Data Link Layer, (Receiver ID)
         nvme 10000:e1:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)
         pcieport 0000:b0:02.0: pciehp: Slot(33): Link Down
         pcieport 0000:b0:02.0: pciehp: Slot(33): Card not present
         pcieport 0000:b0:02.0: DPC: containment event, status:0x1f11: unmasked uncorrectable error detected
         pcieport 0000:b0:02.0: DPC: containment event, status:0x1f01 source:0x0000 || pcieport 0000:b0:02.0: DPC: unmasked uncorrectable error detected || pcieport 0000:b0:02.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)
         = host.pcie DEGRADED NONE
         pcieport 0000:00:1c.0: AER: Uncorrectable (Non-Fatal) error message received from 0000:03:00.0
         pcieport 0000:00:1c.0: AER: Uncorrected (Non-Fatal) error message received from 0000:03:00.0 || nvidia 0000:03:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID) || nvidia 0000:03:00.0:   device [10de:2330] error status/mask=00100000/00000000 || nvidia 0000:03:00.0:    [20] UnsupReq               (First) || nvidia 0000:03:00.0: AER:   TLP Header: 40000001 0000000f fee00000 00000000 || pcieport 0000:00:1c.0: AER: device recovery successful
         = nothing
         pcieport 0000:00:1c.0: AER: Corrected error message received from 0000:03:00.0 || nvidia 0000:03:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID) || nvidia 0000:03:00.0:   device [10de:2330] error status/mask=00001000/00002000 || nvidia 0000:03:00.0:    [12] Timeout
         pcieport 0000:b0:02.0: pciehp: Slot(33): Link Down || pcieport 0000:b0:02.0: pciehp: Slot(33): Card present || pcieport 0000:b0:02.0: pciehp: Slot(33): Link Up
         DMAR: DRHD: handling fault status reg 2 || DMAR: [DMA Write NO_PASID] Request device [4e:00.0] fault addr 0xff000000 [fault reason 0x05] PTE Write access is not set
         vfio-pci 0000:4e:00.0: resetting || vfio-pci 0000:4e:00.0: reset done",
    );
}

#[test]
fn memory_cpu_and_thermal_lines_yield_the_expected_state_and_action() {
    check(
        "= host.hardware UNHEALTHY REPLACE_NODE
         EDAC MC5: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#0_DIMM#0 (channel:0 slot:0 page:0x7b2e3f offset:0x0 grain:32 -  err_code:0x00a0:0x0090  ProcessorSocketId:0x1 MemoryControllerId:0x1 ChannelAddress:0x1ecb8fc00)
         EDAC MC0: 1 UE on mc#0csrow#0channel#2 (csrow:0 channel:2 page:0x0 offset:0x0 grain:64)
         EDAC MC0: 1 UE Multi-bit ECC on unknown memory (node:0 card:2 module:0 rank:1 page:0x8fb0a1 offset:0x0 grain:1 - APEI location: node:0 card:2 module:0 rank:1)
         [Hardware Error]: System Fatal error.
         [Hardware Error]: Deferred error, no action required.
         [Hardware Error]: Uncorrected, software containable error.
         mce: [Hardware Error]: CPU 2: Machine Check Exception: 5 Bank 4: be00000000800400
         mce: [Hardware Error]: Machine check: Processor context corrupt
         Memory failure: 0x1f0b6c: Sending SIGBUS to python:4711 due to hardware memory corruption
         Memory failure: 0x1f0b6c: recovery action for dirty LRU page: Recovered
         mce: Uncorrected hardware memory error in user-access at 3fd5c42c00 || Memory failure: 0x3fd5c42: Killing python:4711 due to hardware memory corruption
         {9}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 4 || {9}[Hardware Error]: event severity: fatal || {9}[Hardware Error]:  Error 0, type: fatal || {9}[Hardware Error]:  fru_text: Card03, ChnF, DIMM0 || {9}[Hardware Error]:   section_type: memory error
         = host.hardware DEGRADED CONTACT_SUPPORT
         mce: CPU12: Core temperature is above threshold, cpu clock is throttled (total events = 12) || mce: CPU12: Core temperature is above threshold, cpu clock is throttled (total events = 13) || mce: CPU12: Core temperature is above threshold, cpu clock is throttled (total events = 14)
         = host.hardware UNHEALTHY CONTACT_SUPPORT
         thermal thermal_zone0: acpitz: critical temperature reached
         thermal thermal_zone0: critical temperature reached (105 C), shutting down
         = nothing
         EDAC skx MC2: HANDLING MCE MEMORY ERROR || EDAC skx MC2: CPU 16: Machine Check Event: 0x0 Bank 13: 0x8c00004200800090 || EDAC skx MC2: TSC 0x1a2b3c4d5e6f || EDAC skx MC2: ADDR 0x1e6b70fc0 || EDAC MC2: 1 CE memory read error on CPU_SrcID#1_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x2e6b70 offset:0xfc0 grain:32 syndrome:0x0 -  err_code:0x0080:0x0090)
         [Hardware Error]: Corrected error, no action required. || [Hardware Error]: CPU:24 (19:1:1) MC17_STATUS[Over|CE|MiscV|AddrV|-|-|SyndV|CECC|-|-|-]: 0xdc2040000000011b || [Hardware Error]: Error Addr: 0x00000003f6a8e200 || [Hardware Error]: IPID: 0x0000009600150f00, Syndrome: 0x0000000100000a21 || [Hardware Error]: Unified Memory Controller Ext. Error Code: 0, DRAM ECC error. || [Hardware Error]: cache level: L3/GEN, tx: GEN, mem-tx: RD
         mce: [Hardware Error]: CPU 24: Machine Check: 0 Bank 17: dc2040000000011b || mce: [Hardware Error]: TSC 0 ADDR fef1c140 MISC d012000100000000 SYND 4d000000 IPID 9600150f00 || mce: [Hardware Error]: PROCESSOR 2:a00f11 TIME 1700000000 SOCKET 0 APIC 0 microcode a0011d1
         mce: CPU12: Core temperature is above threshold, cpu clock is throttled (total events = 12) || mce: CPU12: Core temperature/speed normal
         {5}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 1 || {5}[Hardware Error]: It has been corrected by h/w and requires no further action || {5}[Hardware Error]: event severity: corrected || {5}[Hardware Error]:  Error 0, type: corrected || {5}[Hardware Error]:   section_type: PCIe error || {5}[Hardware Error]:   port_type: 4, root port
         ipmi_si IPI0001:00: Using irq 0 || ipmi_si: IPMI kcs interface initialized
         NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.",
    );
}

#[test]
fn kernel_error_lines_yield_the_expected_state_and_action() {
    check(
        "= host.kernel DEGRADED REBOOT_NODE
         INFO: task txg_sync:2231 blocked for more than 122 seconds. ||       Tainted: P           OE     6.8.0-45-generic #45-Ubuntu || \"echo 0 > /proc/sys/kernel/hung_task_timeout_secs\" disables this message. || task:txg_sync        state:D stack:0     pid:2231  tgid:2231  ppid:2      flags:0x00004000
         INFO: task nvidia-smi:88123 blocked for more than 120 seconds.
         INFO: task UVM GPU1 BH:3021 blocked for more than 120 seconds.
         watchdog: BUG: soft lockup - CPU#87 stuck for 26s! [UVM GPU1 BH:3021]
         watchdog: BUG: soft lockup - CPU#12 stuck for 49s! [kworker/u256:3:188]
         watchdog: CPU12: Watchdog detected hard LOCKUP on cpu 12
         rcu: INFO: rcu_tasks detected stalls on tasks:
         rcu: INFO: rcu_preempt detected stalls on CPUs/tasks: || rcu: 	12-...!: (1 GPs behind) idle=0f7c/1/0x4000000000000000 softirq=31415/31416 fqs=0 || rcu: 	(detected by 3, t=15002 jiffies, g=81349, q=3221 ncpus=128) || rcu: rcu_preempt kthread timer wakeup didn't happen for 15001 jiffies! g81349 f0x0 RCU_GP_WAIT_FQS(5) ->state=0x402
         clocksource: timekeeping watchdog on CPU12: Marking clocksource 'tsc' as unstable because the skew is too large: || clocksource:                       'hpet' wd_nsec: 512000000 wd_now: 1 wd_last: 0 mask: ffffffff || clocksource: Switched to clocksource hpet
         BUG: spinlock lockup suspected on CPU#3, python/4711
         = host.kernel UNHEALTHY REBOOT_NODE
         BUG: unable to handle page fault for address: ffff9a8b40000000 || #PF: supervisor write access in kernel mode || #PF: error_code(0x0002) - not-present page || Oops: 0002 [#1] PREEMPT SMP NOPTI || RIP: 0010:_nv012345rm+0x1c/0x40 [nvidia]
         Oops: general protection fault, probably for non-canonical address 0xdead000000000100: 0000 [#1] SMP NOPTI
         general protection fault, probably for non-canonical address 0x6b6b6b6b6b6b6b6b: 0000 [#1] PREEMPT SMP PTI
         BUG: Bad page state in process python  pfn:12345
         BUG: Bad page map in process python  pte:8000000123456867 pmd:12345067
         BUG: stack guard page was hit at 00000000deadbeef (stack is 0000000012345678..0000000012348678)
         BUG: TASK stack guard page was hit at 00000000deadbeef (stack is 0000000012345678..0000000012348678)
         kernel BUG at mm/slub.c:435!
         Kernel panic - not syncing: Hard LOCKUP
         Unable to handle kernel NULL pointer dereference at virtual address 0000000000000010
         = nothing
         kauditd_printk_skb: 12 callbacks suppressed
         sched_ext: enabled",
    );
}

#[test]
fn disk_lines_yield_the_expected_state_and_action() {
    check(
        "= host.storage DEGRADED REPLACE_NODE
         blk_update_request: critical medium error, dev sdf, sector 1234 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0
         I/O error, dev nvme3n1, sector 2048 op 0x1:(WRITE) flags 0x8800 phys_seg 2 prio class 0
         nvme3n1: Read(0x2) @ LBA 1234, 8 blocks, Unrecovered Read Error (sct 0x2 / sc 0x81) DNR || critical medium error, dev nvme3n1, sector 1234 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2
         Buffer I/O error on dev nvme3n1, logical block 1234, async page read
         md/raid:md0: Disk failure on sdc1, disabling device.
         md/raid0:md0: Disk failure on nvme2n1 detected, failing array.
         md/raid:md0: read error NOT corrected!! (sector 123 on sdc1).
         sd 0:0:3:0: [sdd] tag#12 FAILED Result: hostbyte=DID_NO_CONNECT driverbyte=DRIVER_OK cmd_age=0s || I/O error, dev sdd, sector 2048 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2
         sd 0:0:3:0: rejecting I/O to offline device
         = host.storage DEGRADED NONE
         nvme nvme3: I/O tag 512 (1200) opcode 0x1 (I/O Cmd) QID 12 timeout, aborting req_op:WRITE(1) size:131072 || nvme nvme3: Abort status: 0x0
         nvme nvme3: I/O 23 QID 0 timeout, completion polled
         nvme nvme3: resetting controller due to persistent internal error
         nvme nvme4: queue 3: timeout cid 0x12 type 4 opcode 0x1 (Write)
         nvme nvme4: I/O tag 12 (100c) type 4 opcode 0x1 (I/O Cmd) QID 3 timeout
         = host.network_storage DEGRADED NONE
         nvme nvme4: starting error recovery || nvme nvme4: Reconnecting in 10 seconds... || nvme nvme4: Failed reconnect attempt 3
         = host.storage UNHEALTHY REPLACE_NODE
         nvme nvme3: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10 || nvme nvme3: Does your device have a faulty power saving mode enabled? || nvme nvme3: Device not ready; aborting reset, CSTS=0x1 || nvme nvme3: Disabling device after reset failure: -19
         nvme nvme3: Identify Controller failed (-5)
         = nothing
         nvme nvme4: creating 64 I/O queues. || nvme nvme4: mapped 64/0/0 default/read/poll queues. || nvme nvme4: new ctrl: NQN \"nqn.2016-06.io.spdk:cnode1\", addr 10.0.0.5:4420
         nvme nvme4: Removing ctrl: NQN \"nqn.2016-06.io.spdk:cnode1\"
         nvme nvme4: starting error recovery || nvme nvme4: Reconnecting in 10 seconds... || nvme nvme4: Successfully reconnected (1 attempt)
         md: recovery of RAID array md0 || md: md0: recovery done.
         sdd: sdd1
         SQUASHFS error: xz decompression failed, data probably corrupt",
    );
}

#[test]
fn file_system_lines_yield_the_expected_state_and_action() {
    check(
        "= host.storage DEGRADED NONE
         EXT4-fs warning (device loop0): ext4_end_bio:368: I/O error 3 writing to inode 12 starting block 34049)
         EXT4-fs error (device loop12): ext4_check_bdev_write_error:227: comm ls: Error while async write back metadata
         = host.storage UNHEALTHY REBOOT_NODE
         EXT4-fs error (device nvme0n1p2): ext4_find_entry:1658: inode #2: comm python: reading directory lblock 0
         EXT4-fs error (device dm-3) in ext4_reserve_inode_write:5764: Journal has aborted
         EXT4-fs error (device nvme0n1p2): ext4_validate_block_bitmap:423: comm kworker/u8:2: bg 12: bad block bitmap checksum
         XFS (nvme1n1): log I/O error -5
         XFS (nvme1n1): Filesystem has been shut down due to log error (0x2). || XFS (nvme1n1): Please unmount the filesystem and rectify the problem(s).
         XFS (nvme1n1): metadata I/O error in \"xfs_da_read_buf+0xd9/0x130 [xfs]\" at daddr 0x1234 len 8 error 5
         XFS (nvme1n1): Metadata CRC error detected at xfs_agf_read_verify+0xa1/0xf0 [xfs], xfs_agf block 0x1
         XFS (nvme1n1): User initiated shutdown received. || XFS (nvme1n1): Metadata I/O Error (0x4) detected at xfs_fs_goingdown+0x1/0x2 [xfs] (fs/xfs/xfs_fsops.c:483).  Shutting down filesystem.
         BTRFS error (device nvme1n1): parent transid verify failed on logical 1234 mirror 1 wanted 5 found 4
         BTRFS critical (device nvme1n1): unable to find chunk map for logical 1 length 4096
         FAT-fs (sda1): error, fat_get_cluster: invalid cluster chain (i_pos 0) || FAT-fs (sda1): Filesystem has been set read-only
         = nothing
         EXT4-fs (dm-3): error count since last fsck: 4 || EXT4-fs (dm-3): initial error at time 1690000000: ext4_journal_check_start:83 || EXT4-fs (dm-3): last error at time 1690000000: ext4_journal_check_start:83
         systemd-remount-fs.service: Deactivated successfully.",
    );
}

#[test]
fn network_storage_lines_yield_the_expected_state_and_action() {
    check(
        "= host.network_storage DEGRADED NONE
         nfs: server 10.1.1.1 not responding, timed out
         LustreError: 167-0: scratch-MDT0000-mdc-ffff9a: This client was evicted by scratch-MDT0000; in progress operations using this service will fail.
         Lustre: scratch-MDT0000-mdc-ffff9a: Connection to scratch-MDT0000 (at 10.0.0.5@o2ib) was lost; in progress operations using this service will wait for recovery to complete
         CIFS: VFS: \\\\nas-2 has not responded in 180 seconds. Reconnecting...
         = nothing
         nfs: server 10.1.1.1 not responding, still trying || nfs: server 10.1.1.1 OK
         LustreError: 167-0: scratch-MDT0000-mdc-ffff9a: This client was evicted by scratch-MDT0000; in progress operations using this service will fail. || Lustre: scratch-MDT0000-mdc-ffff9a: Connection restored to 10.0.0.5@o2ib (at 10.0.0.5@o2ib)
         libceph: osd12 (1)10.0.0.4:6801 socket closed (con state OPEN)",
    );
}

#[test]
fn network_card_lines_yield_the_expected_state_and_action() {
    check(
        "= host.network_card UNHEALTHY REBOOT_NODE
         mlx5_core 0000:9a:00.0: print_health_info:504:(pid 0): Health issue observed, firmware internal error, severity(3) ERROR:
         mlx5_core 0000:9a:00.0: print_health_info:430:(pid 0): Health issue observed, unrecoverable hardware error, severity(2) CRITICAL: || mlx5_core 0000:9a:00.0: print_health_info:436:(pid 0): assert_var[0] 0x00000000
         mlx5_core 0000:9a:00.0: device's health compromised - reached miss count
         mlx5_core 0000:9a:00.0: poll_health:955:(pid 0): Fatal error 3 detected
         mlx5_core 0000:9a:00.0: mlx5_health_try_recover:353:(pid 2): health recovery flow aborted, PCI reads still not working
         gve 0000:00:04.0: AQ commands timed out, need to reset AQ || gve 0000:00:04.0: Reset failed
         efa 0000:10:00.0: Wait for completion (polling) timeout
         ena 0000:00:05.0 ens5: Keep alive watchdog timeout.
         igb 0000:04:00.0 eno1: PCIe link lost, device now detached
         igc 0000:04:00.0 eno1: PCIe link lost, device now detached
         ixgbe 0000:04:00.0: Adapter removed
         = host.network_card DEGRADED CONTACT_SUPPORT
         mlx5_core 0000:9a:00.0: print_health_info:504:(pid 0): Health issue observed, High temperature, severity(4) WARNING:
         mlx5_core 0000:9a:00.0: Port module event[error]: module 0, Cable error, Bad/unsupported EEPROM
         mlx5_core 0000:9a:00.0: Port module event[error]: module 1, Cable error, Bus stuck (I2C or data shorted)
         = host.network_card DEGRADED NONE
         ice 0000:31:00.0 ens1f0: NETDEV WATCHDOG: CPU: 12: transmit queue 5 timed out 5112 ms
         ice 0000:31:00.0 ens1f0: tx_timeout: VSI_num: 9, Q 5, NTC: 0x1f, HW_HEAD: 0x1f, NTU: 0x22, INT: 0x0
         NETDEV WATCHDOG: CPU: 3: transmit queue 1 timed out 10240 ms
         = nothing
         mlx5_core 0000:9a:00.0: mlx5_health_try_recover:335:(pid 2): handling bad device here || mlx5_core 0000:9a:00.0: mlx5_health_try_recover:340:(pid 2): health recovery succeeded
         ena 0000:00:05.0 ens5: Keep alive watchdog timeout. || ena 0000:00:05.0 ens5: Device reset completed successfully, Driver info: Elastic Network Adapter (ENA) v2.13.0g
         bond0: (slave ens1f0): link status definitely down, disabling slave || bond0: (slave ens1f0): link status definitely up, 100000 Mbps full duplex
         rpcrdma: module loaded",
    );
}

#[test]
fn lines_of_programs_are_not_kernel_reports() {
    check(
        "= nothing
         Nov 20 10:11:12 node-0017 python3[4711]: NVRM: Xid (PCI:0000:4e:00): 79, GPU has fallen off the bus.
         Nov 20 10:11:12 node-0017 dcgm-exporter[99]: level=error msg=\"NVRM: Xid (PCI:0000:4e:00): 48, DBE\"
         Nov 20 10:11:12 node-0017 nvidia-fabricmanager[1]: detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:C1:00.0 physical id 8 port 30
         2026-11-20T10:11:12.123456+01:00 node-0017 train.sh[4711]: EXT4-fs error (device sda1): a line of a log that is shown
         Nov 20 10:11:12 node-0017 gpud[12]: I/O error, dev nvme3n1, sector 2048
         Nov 20 10:11:12 node-0017 systemd[1]: mlx5_core 0000:9a:00.0: device's health compromised - reached miss count
         audit: type=1300 audit(1700000000.123:45): comm=\"NVRM: Xid (PCI:0000:4e:00): 79\" exe=\"/usr/bin/python3.12\"
         process 'local/bin/NVRM: Xid (PCI:0000:4e:00): 79' launched '/bin/sh' with NULL argv: empty string added",
    );
}

#[test]
fn ordinary_lines_are_ignored() {
    check(&format!("= nothing\n{ORDINARY}"));
}
