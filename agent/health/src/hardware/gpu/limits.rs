//! Limits and times for the states of a device. What sites may want to change is a setting.

use mainstay_model::settings;
use mainstay_model::time::Span;
use mainstay_model::units::{Percent, Period};

/// How long after a fault its consequences are folded into it.
pub(super) const ECHO_WINDOW: Span = Span::seconds(60);

/// How long a fault that new processes fix counts against a GPU after it was last seen.
pub(super) const PASSING: Span = Span::seconds(600);

/// How long failures of programs are remembered.
pub(super) const REPEATS_WINDOW: Span = Span::seconds(86_400);

/// How often an unknown code must occur, at intervals below `REPEATS_WINDOW`, before a device is degraded.
pub(super) const UNKNOWN_CODES: u32 = 3;

/// A finding is cleared when a temperature is this far below its limit, or a margin above it, in degrees Celsius.
pub(super) const COOLER_BY: u32 = 3;

/// How old the last reading of a GPU may be before its state is unknown.
pub(super) const STALE_AFTER: Span = Span::seconds(60);

/// How busy a GPU must be, in percent, for its PCIe link to be compared with its maximum and for it to be compared with
/// its siblings: an idle link and idle clocks slow down.
pub(super) const BUSY_PERCENT: f64 = 50.0;

/// Readings in a row in which a GPU must differ from its siblings before it is degraded.
pub(super) const SIBLING_READINGS: u32 = 30;

/// The window in which errors of an NVLink are counted for the two limits per minute.
pub(super) const NVLINK_WINDOW: Span = Span::seconds(300);

/// How long a failed recovery counts against an NVLink.
pub(super) const NVLINK_FAILED_FOR: Span = Span::seconds(3600);

/// How long a fault may recur without a reset before a reboot is recommended instead of a reset.
pub(super) const UNHEALED_AFTER: Span = Span::seconds(3600);

/// How long faults, and the remedies that did not help, are remembered.
pub(super) const FAULT_WINDOW: Span = Span::seconds(7 * 86_400);

/// Errors of an NVLink (XID 74), and unknown codes, within this time of each other count as one.
pub(super) const LINK_BURST: Span = Span::seconds(60);

/// An NVML event and a kernel log line about the same XID within this time are one fact.
pub(super) const EVENT_WINDOW: Span = Span::seconds(5);

/// How long an NVML event waits for its log line before it is written to the journal without it.
pub(super) const LINE_WAIT: Span = Span::seconds(1);

/// How long after the boot a GPU may take to register with the fabric, and its links to train: in the minutes after a boot
/// of a GB200 rack most nodes have links that are still down.
pub(super) const FABRIC_GRACE: Span = Span::seconds(300);

/// The rate, or the difference from siblings, below which a finding with this `limit` is cleared.
pub(super) fn taken_back(limit: f64) -> f64 {
    limit / 2.0
}

settings! {
    /// Limits of the GPU checks.
    pub struct DeviceLimits {
        /// How long the driver may take for one GPU before it counts as hung.
        deadline: Period = Period::seconds(10),
        /// How long the driver must not answer before gpu.driver is unhealthy; before that it is unknown.
        hung_after: Period = Period::seconds(60),
        /// How many programs of different names must fail on one GPU, and on no other of the host, before it is
        /// degraded.
        programs: u32 = 3,
        /// Minutes out of the last ten in which heat or power slowed a GPU down before it is degraded.
        slow_minutes: u32 = 6,
        /// Whether a GPU is degraded when its thermal margin is below the one at which clocks are slowed down. Off by
        /// default: some healthy boards report a margin of 0 or less.
        judge_margin: bool = false,
        /// Corrected memory errors per hour before a GPU is degraded.
        corrected_errors_per_hour: u64 = 1_000_000,
        /// Uncorrected errors of the memory on the chip over a GPU's life, above which the next one recommends
        /// replacing the GPU instead of a reset. They have no effect by themselves.
        sram_errors_of_a_life: u64 = 4,
        /// Rows remapped after uncorrected errors before a GPU is degraded.
        remapped_rows: u32 = 512,
        /// Retired pages (GPUs before Ampere) before a GPU is degraded.
        pages_retired: u32 = 60,
        /// Replayed PCIe packets before a GPU is degraded, as a multiple of the normal rate for the link's generation
        /// and lanes.
        pcie_replays: f64 = 1.0,
        /// Damaged or replayed packets on an NVLink per minute before the link is degraded.
        nvlink_errors_per_minute: u32 = 100,
        /// Recoveries of an NVLink per minute before the link is degraded.
        nvlink_recoveries_per_minute: u32 = 5,
        /// Bit error rate after correction above which an NVLink is faulty.
        nvlink_error_rate: f64 = 1e-12,
        /// How far the clock of a busy GPU may be below that of its busy siblings (the same model on this host).
        sibling_clock: Percent = Percent(25.0),
        /// How many degrees Celsius a busy GPU may be hotter than its busy siblings.
        sibling_heat: u32 = 20,
        /// Readings in a row beyond a limit before it counts. What the driver reports explicitly (a lost GPU, a row
        /// that waits to be remapped) counts at once.
        #[serde(skip)]
        worsen_after: u32 = 3,
        /// Healthy readings in a row before a finding is cleared.
        #[serde(skip)]
        recover_after: u32 = 3,
    }
    sections {}
}

settings! {
    /// What the GPUs of this host should be like. What is not set is learned from healthy readings.
    pub struct ExpectedGpus {
        /// How many GPUs there are. 0: learned.
        gpus: u32 = 0,
        /// How many NVLinks of each GPU are up. 0: learned.
        nvlinks: u32 = 0,
        /// Version of the driver. Empty: any.
        driver: String = String::new(),
        /// Version of the boards' firmware (VBIOS). Empty: any.
        vbios: String = String::new(),
        /// Whether GPUs are split (MIG): "on", "off", or empty for either.
        mig: String = String::new(),
        /// Whether persistence mode must be on.
        persistence: bool = false,
    }
    sections {}
}
