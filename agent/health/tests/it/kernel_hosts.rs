//! Lines of other kinds of hosts: ARM, cloud VMs, old kernels, boots and shutdowns, log daemons. The expected results
//! were written down before the parser ran on the lines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use support::lines::check;

#[test]
fn lines_of_normal_boots_runs_and_shutdowns_are_ignored() {
    check(
        "= nothing
         Booting Linux on physical CPU 0x0000000000 [0x410fd4f0]
         Linux version 6.8.0-1021-aws (buildd@lcy02-amd64-064) (x86_64-linux-gnu-gcc-13 (Ubuntu 13.2.0-23ubuntu4) 13.2.0)
         DMI: NVIDIA DGXH100/DGXH100, BIOS 1.01.03 04/03/2023
         Hypervisor detected: KVM
         ACPI: RSDP 0x00000000000F68C0 000014 (v00 BOCHS )
         Memory: 2113456132K/2146435072K available (22528K kernel code, 4345K rwdata, 13696K rodata, 5032K init)
         GICv3: 960 SPIs implemented
         CPU features: detected: Spectre-v4
         SDEI NMI watchdog: SDEI Watchdog registered successfully
         arm-smmu-v3 arm-smmu-v3.0.auto: allocated 524288 entries for cmdq
         pci 0000:00:03.0: [1d0f:ec20] type 00 class 0x020000
         ena 0000:00:05.0: ENA device version: 0.10
         ena 0000:00:05.0 ens5: Local page cache is disabled for less than 16 channels
         ena 0000:00:05.0 ens5: Found a Tx that wasn't completed on time, qid 3, index 12.
         efa 0000:10:1b.0: Setup irq:340 name:efa-mgmnt@pci:0000:10:1b.0
         virtio_blk virtio0: [vda] 209715200 512-byte logical blocks (107 GB/100 GiB)
         virtio_balloon virtio5: Out of puff! Can't get 1 pages
         hv_netvsc 000d3a7c-1234-000d-3a7c-1234000d3a7c eth0: VF slot 1 added
         hv_utils: TimeSync IC version 4.0
         BERT: Total records found: 1 || [Hardware Error]: Skipped 1 error records
         pstore: Registered erst as persistent store backend
         resctrl: L3 allocation detected
         hugetlb: allocating 512 of page size 2.00 MiB failed.  Only allocated 300 hugepages.
         workqueue: round-robin CPU selection forced, expect performance impact
         nvidia 0009:01:00.0: enabling device (0000 -> 0002)
         NVRM: Xid (PCI:0008:01:00): 121, pid='<unknown>', name=<unknown>, C2C Link 3 corrected error
         nouveau 0000:3b:00.0: unknown chipset (180000a1)
         ast 0000:03:00.0: [drm] Using P2A bridge for configuration
         VFIO - User Level meta-driver version: 0.3
         beegfs: mount(812): BeeGFS mount ready.
         mmfs: module verification failed: signature and/or required key missing - tainting kernel
         ceph: mds0 caps stale
         libceph: osd3 down
         rbd: rbd0: capacity 107374182400 features 0x3d
         tun: Universal TUN/TAP device driver, 1.6
         wireguard: WireGuard 1.0.0 loaded. See www.wireguard.com for information.
         IPVS: rr: TCP 10.96.0.1:443 - no destination available
         printk: python3: 12 output lines suppressed due to ratelimiting
         audit: audit_backlog=8193 > audit_backlog_limit=8192
         usb 1-3: USB disconnect, device number 4
         sd 6:0:0:0: [sdx] Media removed, stopped polling
         nvme1n1: detected capacity change from 0 to 209715200
         nvme nvme0: restart after slot reset
         igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down
         mlx4_core 0000:05:00.0: command 0x34 failed: fw status = 0x2
         oom_reaper: reaped process 4711 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
         Tasks in /kubepods.slice/pod1 are going to be killed due to memory.oom.group set
         perf: Dynamic interrupt throttling disabled, can hang your system!
         watchdog: watchdog0: watchdog did not stop!
         sched: CPU 12 need_resched set for > 50000000 ns (12 ticks) without schedule
         thermal LNXTHERM:00: registered as thermal_zone0
         amdgpu 0000:c1:00.0: amdgpu: ring comp_1.0.0 timeout, signaled seq=1, emitted seq=2 || amdgpu 0000:c1:00.0: amdgpu: GPU reset begin! || amdgpu 0000:c1:00.0: amdgpu: GPU reset(2) succeeded!
         [drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx timeout, signaled seq=12, emitted seq=14
         systemd[1]: Failed to start nvidia-persistenced.service - NVIDIA Persistence Daemon.
         kubelet[2233]: E1120 10:11:12.123456 2233 remote_runtime.go:222] \"RunPodSandbox failed\" err=\"rpc error: I/O error, dev nvme0n1\"
         containerd[999]: time=\"2026-11-20T10:11:12Z\" level=error msg=\"EXT4-fs error (device sda1): shown\"
         docker-abc[12]: RuntimeError: CUDA error: uncorrectable ECC error encountered
         systemd-shutdown[1]: Sending SIGTERM to remaining processes...
         kvm: exiting hardware virtualization
         reboot: Restarting system",
    );
}

#[test]
fn memory_cpu_and_kernel_lines_yield_the_expected_state_and_action() {
    check(
        "= host.hardware UNHEALTHY REPLACE_NODE
         {1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 0 || {1}[Hardware Error]: event severity: recoverable || {1}[Hardware Error]:  Error 0, type: recoverable || {1}[Hardware Error]:   section_type: ARM processor error
         Memory failure: 0x1a2b3c: recovery action for reserved kernel page: Ignored
         EDAC MC0: 1 UE memory read error on unknown label (node:1 card:0 page:0x1234 offset:0x0 grain:1)
         mce: [Hardware Error]: CPU 0: Machine Check Exception: 4 Bank 0: b200000000000005
         = host.kernel UNHEALTHY REBOOT_NODE
         Kernel panic - not syncing: Timeout: Not all CPUs entered broadcast exception handler
         Internal error: Oops: 0000000096000004 [#1] SMP
         Unable to handle kernel access to user memory outside uaccess routines at virtual address 0000000000000010
         Unable to handle kernel paging request at virtual address dead000000000108
         BUG: unable to handle kernel NULL pointer dereference at 0000000000000018
         BUG: unable to handle kernel paging request at ffffc90000123000
         = host.kernel DEGRADED REBOOT_NODE
         watchdog: BUG: soft lockup - CPU#0 stuck for 22s! [swapper/0:1]
         NMI watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4711]
         BUG: soft lockup - CPU#3 stuck for 67s! [python:4711]
         INFO: task kworker/0:1:12 blocked for more than 122 seconds.
         INFO: task khugepaged:512 blocked for more than 120 seconds.
         INFO: rcu_sched self-detected stall on CPU { 3}  (t=60000 jiffies g=1 c=0 q=12)
         INFO: rcu_sched detected stalls on CPUs/tasks: { 3} (detected by 1, t=60002 jiffies, g=1, c=0, q=12)",
    );
}

#[test]
fn storage_lines_of_clouds_and_old_kernels_yield_the_expected_state_and_action() {
    check(
        "= host.storage DEGRADED REPLACE_NODE
         I/O error, dev vda, sector 123456 op 0x1:(WRITE) flags 0x8800 phys_seg 1 prio class 2
         Buffer I/O error on device vda1, logical block 12
         end_request: I/O error, dev sdb, sector 1234
         print_req_error: I/O error, dev nvme1n1, sector 2048 flags 0
         blk_update_request: I/O error, dev sda, sector 0 op 0x1:(WRITE) flags 0x800 phys_seg 0 prio class 0
         = host.storage DEGRADED NONE
         nvme nvme1: I/O 12 QID 1 timeout, completion polled
         nvme nvme0: frozen state error detected, reset controller
         = host.storage UNHEALTHY REBOOT_NODE
         EXT4-fs (vda1): Remounting filesystem read-only
         EXT4-fs error (device vda1): __ext4_get_inode_loc_noinmem:4467: inode #12: block 1: comm python: unable to read itable block
         EXT3-fs (sda1): error: remounting filesystem read-only
         XFS (dm-0): Corruption detected. Unmount and run xfs_repair
         = host.network_storage DEGRADED NONE
         CIFS VFS: Server nas-1 has not responded in 120 seconds. Reconnecting...
         nfs: server 192.168.1.5 not responding, still trying
         ceph: mds0 hung",
    );
}

#[test]
fn network_card_gpu_and_pcie_lines_yield_the_expected_state_and_action() {
    check(
        "= host.network_card UNHEALTHY REBOOT_NODE
         mlx5_core 0003:01:00.0: poll_health:955:(pid 0): device's health compromised - reached miss count
         mlx4_core 0000:05:00.0: Internal error detected:
         bnxt_en 0000:1b:00.0: Firmware not responding, status: 0xdead0001
         = host.network_card DEGRADED NONE
         NETDEV WATCHDOG: eth0 (virtio_net): transmit queue 0 timed out
         ixgbe 0000:01:00.0 eno1: Detected Tx Unit Hang
         igb 0000:01:00.0 eno1: Detected Tx Unit Hang
         e1000e 0000:00:1f.6 eno1: Detected Hardware Unit Hang:
         tg3 0000:04:00.0 eno1: transmit timed out, resetting
         bnxt_en 0000:1b:00.0 ens5: TX timeout detected, starting reset task!
         = gpu.0009:01:00 UNHEALTHY REBOOT_NODE
         NVRM: Xid (PCI:0009:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
         NVRM: Xid (PCI:0009:01:00): 173, pid='<unknown>', name=<unknown>, C2C fatal error
         NVRM: GPU 0009:01:00.0: RmInitAdapter failed! (0x22:0x65:762)
         = gpu.0000:00:1e UNHEALTHY RESET_DEVICE
         NVRM: Xid (PCI:0000:00:1e): 48, pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error
         NVRM: Xid (PCI:0000:00:1e): 62, pid='<unknown>', name=<unknown>, 2027(2c8c) 00000000 00000000
         = host.pcie UNHEALTHY REBOOT_NODE
         pcieport 0001:00:00.0: AER: Uncorrected (Fatal) error received: 0001:01:00.0
         pcieport 0001:00:00.0: pciehp: Slot(1): Link Down",
    );
}

#[test]
fn raid_controller_gpu_and_fabric_lines_yield_the_expected_state_and_action() {
    check(
        "= host.storage DEGRADED REPLACE_NODE
         sd 1:0:0:0: [sdb] tag#5 FAILED Result: hostbyte=DID_OK driverbyte=DRIVER_OK cmd_age=0s || sd 1:0:0:0: [sdb] tag#5 Sense Key : Hardware Error [current] || critical target error, dev sdb, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2
         blk_update_request: critical target error, dev sdb, sector 2048 op 0x1:(WRITE) flags 0x0 phys_seg 1 prio class 0
         smartpqi 0000:65:00.0: controller is offline: status code 0x6100c
         hpsa 0000:03:00.0: controller lockup detected: 0x00130000 after 30
         mpt3sas_cm0: SAS host is non-operational !!!!
         = host.storage UNHEALTHY REBOOT_NODE
         WARNING: Pool 'tank' has encountered an uncorrectable I/O failure and has been suspended.
         EXT4-fs error (device dm-1): ext4_mb_generate_buddy:1141: group 12, block bitmap and bg descriptor inconsistent: 1 vs 2 free clusters
         = host.hardware UNHEALTHY REPLACE_NODE
         EDAC MC1: UE row 0, channel-a= 1 channel-b= 2 labels \"-\": i5000 UE
         = host.pcie UNHEALTHY REBOOT_NODE
         pcieport 0000:3a:00.0: AER: Multiple Uncorrected (Fatal) error received: 0000:3b:00.0
         = gpu.0000:3b:00 UNHEALTHY RESET_DEVICE
         NVRM: Xid (PCI:0000:3b:00): 136, pid='<unknown>', name=<unknown>, Link training failed
         NVRM: Xid (PCI:0000:3b:00): 171, pid='<unknown>', name=<unknown>, DRAM uncorrectable
         = gpu.0000:3b:00 UNHEALTHY CONTACT_SUPPORT
         NVRM: Xid (PCI:0000:3b:00): 54, Auxiliary power is not connected
         = gpu.0000:3b:00 DEGRADED CONTACT_SUPPORT
         NVRM: Xid (PCI:0000:3b:00): 61, pid=1, 0cec(3098) 00000000 00000000
         NVRM: Xid (PCI:0000:3b:00): 165, pid='<unknown>', name=<unknown>, PWR smoothing primitive wear
         = gpu.0000:3b:00 DEGRADED NONE
         NVRM: Xid (PCI:0000:3b:00): 92, pid=1, High single-bit ECC error rate
         = nothing
         device-mapper: multipath: 253:3: Reinstating path 8:16.
         sd 1:0:0:0: [sdb] Very big device. Trying to use READ CAPACITY(16).
         smartpqi 0000:65:00.0: Online Firmware Activation: ENABLED
         hpsa 0000:03:00.0: scsi 0:0:1:0: added Direct-Access     HP       LOGICAL VOLUME RAID-1(+0)
         mpt3sas_cm0: port enable: SUCCESS
         connection1:0: detected conn error (1020)
         EXT4-fs warning (device sda1): ext4_dx_add_entry:2516: Directory (ino: 12) index full, reach max htree level :2
         EXT4-fs warning (device sda1): ext4_multi_mount_protect:328: MMP interval 42 higher than expected, please wait.
         nvidia-peermem: nv_get_p2p_free_callback: ERROR 22 in get_pages
         infiniband mlx5_0: mlx5_ib_modify_qp: unsupported transition
         nvidia-nvswitch3: SXid (PCI:0000:0a:00.0): 12023, Non-fatal, Link 14 ingress non-posted credit limit
         nvidia-nvswitch3: SXid (PCI:0000:0a:00.0): 14017, Non-fatal, Link 14 TS ACL
         nvidia-nvswitch3: SXid (PCI:0000:0a:00.0): 20001, Non-fatal, Link 31 TX Replay Error
         pcieport 0000:15:01.0: pciehp: Timeout on hotplug command 0x1038 (issued 65284 msec ago)
         nvidia 0000:3b:00.0: BAR 3 [mem size 0x02000000 64bit pref]: failed to assign
         NVRM: This PCI I/O region assigned to your NVIDIA device is invalid: || NVRM: BAR1 is 0M @ 0x0 (PCI:0000:3b:00.0)
         systemd-oomd[812]: Killed /user.slice/user-1000.slice due to memory pressure
         zram0: detected capacity change from 0 to 16777216
         EDAC MC: Removed device 0 for i10nm_edac.c Intel_10nm Socket#0 IMC#0: DEV 0000:7e:0c.0
         mpt3sas_cm0: log_info(0x31110e05): originator(PL), code(0x11), sub_code(0x0e05)",
    );
}
