//! The kernel log of a healthy host over a day, with the usual noise: each component must stay healthy.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use mainstay_health::host::kernel_reports::LogState;
use mainstay_model::health::HealthState;
use support::Host;
use support::lines::ORDINARY;

/// Pseudo-random numbers, the same each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn one_of<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        let place = self.below(choices.len() as u64) as usize;
        choices[place]
    }
}

const GPUS: [&str; 8] = [
    "0000:18:00",
    "0000:2a:00",
    "0000:3a:00",
    "0000:5d:00",
    "0000:9a:00",
    "0000:ab:00",
    "0000:ba:00",
    "0000:db:00",
];
const PROGRAMS: [&str; 6] = ["python", "python3", "train", "eval", "pt_main_thread", "nccl-tests"];

/// XIDs that programs cause, on any GPU.
const OF_PROGRAMS: [&str; 6] = [
    "13, pid=4711, name={program}, Graphics SM Warp Exception on (GPC 1, TPC 0, SM 1): Out Of Range Address",
    "31, pid=4711, name={program}, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_0 faulted @ 0x7f2b_34000000.",
    "43, pid=4711, name={program}, Ch 00000008",
    "45, pid=4711, name={program}, Ch 0000000a",
    "69, pid=4711, name={program}, Class Error: ChId 0010, Class 0000c7c0",
    "137, pid=4711, name={program}, NVLink: fault remote, FLA privilege error",
];

/// XIDs that need no action.
const NOTES: [&str; 5] = [
    "121, pid='<unknown>', name=<unknown>, C2C Link corrected error",
    "93, pid='<unknown>', name=<unknown>, Non-fatal violation of provisioned InfoROM wear limit",
    "106, SMBPBI Test Message",
    "185, pid='<unknown>', name=<unknown>, Sparing event",
    "145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000082 0x00000100 0x0 0x0)",
];

/// Lines that are logged now and then.
const CHATTER: [&str; 22] = [
    "mlx5_core 0000:3b:00.0 ens1np0: Link down",
    "mlx5_core 0000:3b:00.0 ens1np0: Link up",
    "mlx5_core 0000:3b:00.0: Port module event: module 0, Cable plugged",
    "mlx5_core 0000:3b:00.0: mlx5_cmd_out_err:803:(pid 33): ACCESS_REG(0x805) op_mod(0x1) failed, status bad operation(0x2), syndrome (0x305684), err(-22)",
    "infiniband mlx5_0: dump_cqe:272:(pid 12): dump error cqe",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Non-fatal, Link 30 LTSSM Fault Up",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Severity 0 Engine instance 30 Sub-engine instance 00",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Data {0x00000001, 0x00000000}",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
    "python[4711]: segfault at 0 ip 00007f1c2a3b4c5d sp 00007ffd12345678 error 4 in libtorch_cpu.so[7f1c2a000000+1000000]",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=j,mems_allowed=0-1,oom_memcg=/job,task_memcg=/job/rank0,task=python,pid=4712,uid=1000",
    "Memory cgroup out of memory: Killed process 4712 (python) total-vm:1kB",
    "mce: CPU3: Package temperature/speed normal",
    "perf: interrupt took too long (2506 > 2500), lowering kernel.perf_event_max_sample_rate to 79750",
    "audit: type=1400 audit(1700000000.123:45): apparmor=\"DENIED\" operation=\"open\" comm=\"python\"",
    "EXT4-fs (nvme0n1p2): re-mounted. Opts: errors=remount-ro",
    "XFS (md0): Mounting V5 Filesystem",
    "blk_update_request: I/O error, dev loop3, sector 0",
    "NVRM: GPU at PCI:0000:18:00: GPU-12345678-1234-5678-9abc-def012345678",
    "NVRM: GPU Board Serial Number: 1320000000000",
    "systemd[1]: NVRM: Xid (PCI:0000:18:00): 79, in a unit's description",
    "clocksource: timekeeping watchdog on CPU1: hpet wd-wd read-back delay of 62514ns",
];

/// Error records of the previous boot, and the lines of a normal boot.
const BOOT: [&str; 6] = [
    "Linux version 6.8.0-45-generic (buildd@lcy02) (x86_64-linux-gnu-gcc-13) #45-Ubuntu SMP PREEMPT_DYNAMIC",
    "BERT: Error records from previous boot:",
    "[Hardware Error]: event severity: fatal",
    "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 6: ee0000000040110a",
    "tsc: Marking TSC unstable due to TSC halts in idle",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
];

#[test]
fn a_healthy_day_causes_no_unhealthy_component() {
    let mut host = Host::new();
    let mut dice = Dice(7);
    host.host.log_is(host.now, LogState::Reading);
    BOOT.iter().for_each(|line| host.log(line));
    let ordinary: Vec<&str> = ORDINARY.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let mut lines = 0u32;
    for tick in 0u64..24 * 360 {
        let gpu = dice.one_of(&GPUS);
        let mut say = |line: &str| {
            host.log(line);
            lines += 1;
        };
        if dice.below(30) == 0 {
            let program = dice.one_of(&PROGRAMS);
            say(&format!(
                "NVRM: Xid (PCI:{gpu}): {}",
                dice.one_of(&OF_PROGRAMS).replace("{program}", program)
            ));
        }
        if dice.below(100) == 0 {
            say(&format!("NVRM: Xid (PCI:{gpu}): {}", dice.one_of(&NOTES)));
        }
        if dice.below(3) == 0 {
            say(dice.one_of(&CHATTER));
        }
        if dice.below(3) == 0 {
            say(dice.one_of(&ordinary));
        }
        if dice.below(12) == 0 {
            // Each corrected PCIe error is logged in two lines.
            say(&format!("pcieport 0000:16:00.0: AER: Corrected error received: {gpu}.0"));
            say(&format!(
                "nvidia {gpu}.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)"
            ));
        }
        if dice.below(120) == 0 {
            say(&format!(
                "EDAC MC{}: 1 CE memory scrubbing error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1)",
                dice.below(4)
            ));
            say("mce: [Hardware Error]: Machine check events logged");
        }
        if dice.below(1000) == 0 {
            say("mce: CPU3: Core temperature above threshold, cpu clock throttled (total events = 7)");
        }
        if tick % 8 == 0 {
            let held_back = host.reader.held_back(host.now);
            for fact in held_back {
                host.devices.take_in(host.now, &fact);
                host.host.take_in(host.now, &fact);
            }
        }
        let not_healthy = host.not_healthy();
        assert_eq!(
            not_healthy,
            [],
            "after {} minutes: {:?}",
            tick / 6,
            host.components().iter().find(|component| component.state != HealthState::Healthy)
        );
        host.wait(10);
    }
    assert!(lines > 4000, "{lines} lines");
}

#[test]
fn one_fault_is_reported() {
    let mut host = Host::new();
    host.log("NVRM: Xid (PCI:0000:5d:00): 95, pid='<unknown>', name=<unknown>, Uncontained: LTC TAG. RST: Yes, D-RST: No");
    assert_eq!(host.not_healthy().len(), 1);
}
