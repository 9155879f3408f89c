//! Tables of kernel log lines, each with its result on a fresh host.

use super::Host;

/// The components of a fresh host that are not healthy after these lines (one, or several joined by ` || `), each as
/// `name STATE ACTION`, or `nothing`.
pub fn comes_to(lines: &str) -> String {
    let mut host = Host::new();
    lines.split(" || ").for_each(|line| host.log(line));
    let not_healthy = host.not_healthy().into_iter();
    let texts: Vec<String> = not_healthy
        .map(|(component, state, action)| format!("{component} {} {}", name(state), name(action)))
        .collect();
    if texts.is_empty() { "nothing".to_owned() } else { texts.join(", ") }
}

fn name(value: impl serde::Serialize) -> String {
    serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
}

/// Checks a table of groups: `= result`, and below it the lines that yield this result, alone or several joined by
/// ` || `. One panic reports all lines with a different result.
pub fn check(table: &str) {
    let mut expected = "";
    let mut wrong = Vec::new();
    let mut count = 0;
    for line in table.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(what) = line.strip_prefix("= ") {
            expected = what;
            continue;
        }
        count += 1;
        let found = comes_to(line);
        if found != expected {
            wrong.push(format!("{line}\n    expected: {expected}\n    found:    {found}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Lines that drivers of all kinds log in normal operation.
pub const ORDINARY: &str = "
    NVRM: The NVIDIA probe routine was not called for 1 device(s).
    NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!
    NVRM: dmaAllocMapping_GM107: can't alloc VA space for mapping.
    NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359
    NVRM: GPU3 nvAssertFailedNoLog: Assertion failed: pEvent != NULL @ event.c:412
    NVRM: GPU3 rpcRmApiAlloc_GSP: GspRmAlloc failed: hClient=0xc1d0002a; hParent=0x5c000001; hObject=0x5c000002; hClass=0x000000f8; paramsSize=0x00000010; paramsStatus=0x00000051; status=0x00000051
    NVRM: GPU3 _issueRpcAndWait: rpcSendMessage failed with status 0x0000000f for fn 78!
    NVRM: Persistence mode is deprecated and will be removed in a future release. Please use nvidia-persistenced instead.
    NVRM: GPU 0000:4e:00.0: 16.0 GT/s PCIe link
    NVRM: osInitNvMapping: *** Cannot attach gpu
    NVRM: nvidia_uvm is not loaded
    NVRM: Going over RM unhandled interrupt threshold for irq 123
    NVRM: krcWatchdog_IMPL: RC watchdog: GPU is probably locked!  Notify Timeout Seconds: 7
    nvidia-uvm: Loaded the UVM driver, major device number 510.
    nvidia-modeset: Loading NVIDIA Kernel Mode Setting Driver for UNIX platforms  570.86.15  Tue Jan 14 16:35:40 UTC 2025
    nvidia-modeset: ERROR: GPU:0: Failed to query display engine channel state: 0x0000c67e:0:0:0x0000000f
    nvidia: loading out-of-tree module taints kernel.
    nvidia: module license 'NVIDIA' taints kernel.
    nvidia 0000:4e:00.0: vgaarb: VGA decodes changed: olddecodes=none,decodes=none:owns=none
    nvidia-nvlink: Unregistered Nvlink Core, major device number 236
    nvidia-nvswitch0: using MSI
    nvidia_gdrcopy: loading out-of-tree module taints kernel.
    nvidia-persistenced[1234]: Started (1234)
    pcieport 0000:00:1c.0: AER: Multiple Correctable error message received from 0000:03:00.0
    pcieport 0000:b0:02.0: pciehp: Slot(33): Attention button pressed
    pcieport 0000:b0:02.0: pciehp: Slot #33 AttnBtn- PwrCtrl- MRL- AttnInd+ PwrInd+ HotPlug+ Surprise+ Interlock- NoCompl+ IbPresDis- LLActRep+
    pcieport 10000:e0:06.0: AER: Corrected error message received from 10000:e1:00.0
    pcieport 0000:15:01.0: broken device, retraining non-functional downstream link at 2.5GT/s
    pcieport 0000:15:01.0: PME: Spurious native interrupt!
    nvidia 0000:17:00.0: AER: can't recover (no error_detected callback)
    nvidia 0000:17:00.0: AER:   Error of this Agent is reported first
    pci 0000:4e:00.0: Max Payload Size set to 256 (was 128, max 256)
    pci 0000:4e:00.0: PME# supported from D0 D3hot
    pci 0000:4e:00.0: disabling ASPM on pre-1.1 PCIe device.  You can enable it with 'pcie_aspm=force'
    pci 0000:4e:00.0: Adding to iommu group 42
    AMD-Vi: Event logged [IO_PAGE_FAULT device=4e:00.0 domain=0x0023 address=0xfe000000 flags=0x0020]
    nvidia 0000:4e:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0023 address=0x7f000000 flags=0x0000]
    arm-smmu-v3 arm-smmu-v3.0.auto: event 0x10 received:
    iommu: Default domain type: Passthrough (set via kernel command line)
    EDAC MC0: 1 CE on mc#0csrow#1channel#0 (csrow:1 channel:0 page:0x3f6a8e offset:0x200 grain:64 syndrome:0x100)
    EDAC amd64: MCT channel count: 8
    EDAC MC0: Giving out device to module i10nm_edac controller Intel_10nm Socket#0 IMC#0: DEV 0000:7e:0c.0 (INTERRUPT)
    EDAC igen6: v2.5.1
    mce_notify_irq: 1 callbacks suppressed
    mce: CPU0: Thermal monitoring enabled (TM1)
    mce: Using 20 MCE banks
    soft_offline: 0x7e5d00: page already poisoned
    thermal thermal_zone3: failed to read out thermal zone (-61)
    thermal_sys: Registered thermal governor 'step_wise'
    [Firmware Bug]: TSC ADJUST differs within socket(s), fixing all errors
    [Firmware Info]: CPU: Re-enabling disabled Topology Extensions Support.
    intel_rapl_common: LinkFindings RAPL domain package
    nmi_backtrace: sending NMI from CPU 1 to CPUs 12:
    NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.
    BUG: Bad rss-counter state mm:00000000deadbeef type:MM_ANONPAGES val:1
    BUG: sleeping function called from invalid context at kernel/locking/mutex.c:580
    BUG: using smp_processor_id() in preemptible [00000000] code: python/4711
    BUG: MAX_LOCKDEP_CHAINS too low!
    INFO: task python:4711 is blocked on a mutex likely owned by task python:4712.
    WARNING: CPU: 12 PID: 4711 at drivers/iommu/dma-iommu.c:1234 iommu_dma_unmap_page+0x79/0x90
    WARNING: possible circular locking dependency detected
    ------------[ cut here ]------------
    refcount_t: underflow; use-after-free.
    UBSAN: array-index-out-of-bounds in /build/linux/drivers/net/foo.c:12:3
    unchecked MSR access error: RDMSR from 0x1b0 at rIP: 0xffffffff9a6 (native_read_msr+0x4/0x40)
    x86/split lock detection: #AC: python/4711 took a split_lock trap at address: 0x7f2b34000000
    TSC found unstable after boot, most likely due to broken BIOS. Use 'tsc=unstable'.
    hrtimer: interrupt took 12345 ns
    NOHZ tick-stop error: local softirq work is pending, handler #08!!!
    python3: page allocation failure: order:4, mode:0x40dc0(GFP_KERNEL|__GFP_COMP|__GFP_ZERO), nodemask=(null),cpuset=/,mems_allowed=0-1
    cgroup: fork rejected by pids controller in /kubepods.slice/pod1
    rcu: rcu_preempt kthread starved for 5250 jiffies! g81349 f0x2 RCU_GP_WAIT_FQS(5) ->state=0x0 ->cpu=12
    systemd-journald[412]: Received client request to flush runtime journal.
    Lockdown: python: debugfs access is restricted; see man kernel_lockdown.7
    nf_conntrack: nf_conntrack: table full, dropping packet
    TCP: request_sock_TCP: Possible SYN flooding on port 29500. Sending cookies.
    docker0: port 1(veth1a2b3c) entered blocking state
    device veth1a2b3c left promiscuous mode
    loop7: detected capacity change from 0 to 131072
    kvm_intel: VMX not supported by CPU 12
    kexec_core: Starting new kernel
    random: crng init done
    sysrq: Show Blocked State
    sched_ext: enabled
    nvme nvme3: missing or invalid SUBNQN field.
    nvme nvme3: 63/0/0 default/read/poll queues
    nvme nvme3: Shutdown timeout set to 10 seconds
    nvme nvme3: D3 entry latency set to 10 seconds
    nvme nvme3: failed to set APST feature (2)
    nvme nvme3: using unchecked data buffer
    nvme 0000:81:00.0: platform quirk: setting simple suspend
    critical target error, dev nvme3n1, sector 0 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 2
    md/raid1:md0: redirecting sector 1234 to other mirror: nvme1n1
    md/raid:md0: read error corrected (8 sectors at 123 on sdc1)
    sd 0:0:3:0: [sdd] Write cache: enabled, read cache: enabled, doesn't support DPO or FUA
    sd 0:0:3:0: Power-on or device reset occurred
    ata3: SATA link up 6.0 Gbps (SStatus 133 SControl 300)
    scsi 0:0:3:0: Direct-Access     ATA      SAMSUNG          QA02 PQ: 0 ANSI: 6
    smartpqi 0000:65:00.0: added 0:2:0:0 scsi
    megaraid_sas 0000:65:00.0: Controller type: MR,Memory size is: 8192MB
    EDD information not available.
    SQUASHFS error: xz decompression failed, data probably corrupt
    EXT4-fs (dm-3): warning: mounting fs with errors, running e2fsck is recommended
    EXT4-fs (dm-3): mounted filesystem with ordered data mode. Opts: (null)
    EXT4-fs (nvme0n1p2): re-mounted. Opts: errors=remount-ro. Quota mode: none.
    EXT4-fs (nvme0n1p2): 3 orphan inodes deleted
    XFS (nvme1n1): Ending clean mount
    XFS (nvme1n1): EXPERIMENTAL online scrub feature in use. Use at your own risk!
    XFS: python(4711) possible memory allocation deadlock size 65552 in kmem_alloc (mode:0x2400)
    BTRFS warning (device nvme1n1): checksum verify failed on logical 12 mirror 1 wanted 0x1 found 0x2 level 0
    BTRFS info (device nvme1n1): bdev /dev/nvme1n1 errs: wr 0, rd 2, flush 0, corrupt 0, gen 0
    FAT-fs (sda1): Volume was not properly unmounted. Some data may be corrupt. Please run fsck.
    overlayfs: upper fs does not support RENAME_WHITEOUT.
    fuse: init (API version 7.39)
    VFS: busy inodes on changed media or resized disk sr0
    systemd-remount-fs.service: Deactivated successfully.
    NFS: state manager: check lease failed on NFSv4 server nas-1 with error 13
    RPC: rpcrdma: connection to 10.1.1.1:20049 closed (-103)
    rpcrdma: connection to 10.0.0.1:20049 on mlx5_0, memreg 'FRWR', 128 credits, 16 responders
    nfs4_discover_server_trunking unhandled error -512. Exiting with error EIO
    Lustre: 3023:0:(client.c:2295:ptlrpc_expire_one_request()) @@@ Request sent has failed due to network error: [sent 1700000000/real 1700000000]
    LNet: 2314:0:(o2iblnd_cb.c:413:kiblnd_handle_rx()) PUT_NACK from 10.0.0.5@o2ib
    Lustre: Unmounted scratch-client
    Key type dns_resolver registered
    libceph: osd12 (1)10.0.0.4:6801 socket closed (con state OPEN)
    mlx5_core 0000:9a:00.0: print_health_info:431:(pid 0): Health issue observed, icm fetch error, severity(6) INFO
    mlx5_core 0000:9a:00.0: wait_func_handle_exec_timeout:1109:(pid 12): cmd[0]: CREATE_MKEY(0x200) recovered after timeout
    mlx5_core 0000:9a:00.0: mlx5_crdump_collect:50:(pid 1): crdump: failed to lock vsc gw err -16
    mlx5_core 0000:9a:00.0: mlx5_sync_reset_now_event:300:(pid 12): Sync Reset now. Device is going to reset.
    mlx5_core 0000:9a:00.0 eth2: Error cqe on cqn 0x41c, ci 0x5, sqn 0x1f1, opcode 0xd, syndrome 0x2, vendor syndrome 0x0
    mlx5_core 0000:9a:00.0 eth2: ERR CQE on SQ: 0x1f1
    mlx5_core 0000:9a:00.0: lag map: port 1:2 port 2:2
    mlx5_core 0000:9a:00.0: mlx5_cmd_out_err:829:(pid 4711): CREATE_QP(0x500) op_mod(0x0) failed, status limits exceeded(0x8), syndrome (0x0), err(-12)
    mlx5_core 0000:9a:00.0: Port module event: module 0, Cable plugged
    mlx5_core 0000:9a:00.0: MLX5E: StrdRq(1) RqSz(8) StrdSz(2048) RxCqeCmprss(0 basic)
    mlx5_core 0000:9a:00.0: PTM is not supported by PCIe
    mlx5_core 0000:9a:00.0: Supported tc chains and prios offload
    mlx5_ib: Mellanox Connect-IB Infiniband driver v24.10-0.7.0
    ice 0000:31:00.0 ens1f0: NIC Link is Down
    ice 0000:31:00.0 ens1f0: NIC Link is up 100 Gbps Full Duplex, Requested FEC: RS-FEC, Negotiated FEC: RS-FEC, Autoneg Advertised: Off
    ice 0000:31:00.0: Commit DDP package
    bnxt_en 0000:1b:00.0 ens5f0np0: NIC Link is Up, 100000 Mbps (NRZ) full duplex, Flow control: none
    bnxt_en 0000:1b:00.0 ens5f0np0: Firmware non-fatal reset event received, max wait time 4200 msec
    gve 0000:00:04.0: Performing reset
    gve 0000:00:04.0 eth0: Device link is up.
    efa 0000:10:00.0: Failed to process command CREATE_QP (opcode 1) comp_status 7 err -12
    tg3 0000:04:00.0 eno1: Link is down
    igb 0000:04:00.0 eno1: igb: eno1 NIC Link is Up 1000 Mbps Full Duplex, Flow Control: RX
    virtio_net virtio1 eth0: renamed from eth1
    bond0: now running without any active interface!
    8021q: adding VLAN 0 to HW filter on device bond0
    ib_srpt MAD registration failed for mlx5_3-1.
    ib0: ignoring multicast join failure
    rdma_rxe: loaded
    rpcrdma: module loaded
    python3[4711]: segfault at 0 ip 00007f1c2a3b4c5d sp 00007ffd12345678 error 4 in libnvidia-ml.so.550.54.15[7f1c2a000000+1000000]
    traps: python3[4711] trap divide error ip:7f12 sp:7ffc error:0 in libtorch_cpu.so[7f1234000000+1a00000]
";
