//! When a device counts as degraded or unhealthy, and for how long. What is a matter of taste is a number here.

use crate::base::units::{Percent, Period};
use crate::settings;

settings! {
    /// How GPUs are judged.
    pub struct DeviceLimits {
        /// How long after a fault what follows in its wake is folded into it.
        echo_window: Period = Period::seconds(60),
        /// How long a fault that new processes mend is held against a GPU after it was last seen.
        passing: Period = Period::seconds(600),
        /// How long failures of programs are remembered.
        repeats_window: Period = Period::seconds(86_400),
        /// Programs of different names that must fail on one GPU, and on no other of the host, before it is degraded.
        programs: u32 = 3,
        /// How often a code that nobody knows must come, with less than repeats_window in between, before a device is degraded.
        unknown_codes: u32 = 3,
        /// How long the driver must have been silent before gpu.driver is unhealthy; it is unknown before.
        hung_after: Period = Period::seconds(60),
        /// Readings in a row by which a GPU must be beyond a limit before that counts. What the driver says in so many words
        /// (a lost GPU, a row that waits to be remapped) counts at once.
        worsen_after: u32 = 3,
        /// Readings in a row that must be in order before a finding is taken back.
        recover_after: u32 = 3,
        /// Share of a limit below which a rate, or a difference to siblings, has to fall before a finding is taken back.
        taken_back_below: Percent = Percent(50.0),
        /// How far below its limit a temperature, or above it a margin, has to be for the same, in degrees Celsius.
        cooler_by: u32 = 3,
        /// How old the last reading of a GPU may be before it is unknown how it is.
        stale_after: Period = Period::seconds(60),
        /// Minutes of the last ten in which heat or power slowed a GPU down before it is degraded.
        slow_minutes: u32 = 6,
        /// Whether a GPU is degraded when its thermal margin is below that at which clocks are held down. Off: some boards
        /// read a margin of 0 or less though they are well.
        judge_margin: bool = false,
        /// Memory errors corrected in an hour before a GPU is degraded.
        corrected_errors_per_hour: u64 = 1_000_000,
        /// Errors of the memory on the chip that could not be corrected, over a GPU's life, above which the next one asks for
        /// another GPU, not for a reset. By themselves they say nothing of now.
        sram_errors_of_a_life: u64 = 4,
        /// Rows remapped after errors that could not be corrected before a GPU is degraded.
        remapped_rows: u32 = 512,
        /// Pages taken out of use (GPUs before Ampere) before a GPU is degraded.
        pages_retired: u32 = 60,
        /// How busy a GPU must be for its PCIe link to be held against the best that it can do: at rest the link rests too.
        pcie_load: Percent = Percent(50.0),
        /// PCIe packets sent again, as a multiple of what is normal for the link's generation and lanes, before a GPU is
        /// degraded.
        pcie_replays: f64 = 1.0,
        /// Damaged or repeated packets on an NVLink in a minute before the link is degraded.
        nvlink_errors_per_minute: u32 = 100,
        /// Recoveries of an NVLink in a minute before the link is degraded.
        nvlink_recoveries_per_minute: u32 = 5,
        /// Share of bits on an NVLink that may be wrong after correction.
        nvlink_error_rate: f64 = 1e-12,
        /// How far below that of its working siblings (the same model on this host) the clock of a working GPU may be.
        sibling_clock: Percent = Percent(25.0),
        /// How many degrees hotter than its working siblings a working GPU may be, in degrees Celsius.
        sibling_heat: u32 = 20,
        /// Readings in a row by which a GPU must be unlike its siblings before it is degraded.
        sibling_readings: u32 = 30,
        /// In which time errors of an NVLink are counted for the two limits per minute.
        nvlink_window: Period = Period::seconds(300),
        /// How long a recovery that failed is held against an NVLink.
        nvlink_failed_for: Period = Period::seconds(3600),
        /// A fault that comes again so long after it first came was not mended by the reset that it needs: it asks for a reboot.
        unhealed_after: Period = Period::seconds(3600),
        /// How long faults are remembered for what was tried against them and did not help.
        remembered: Period = Period::seconds(7 * 86_400),
        /// Errors of an NVLink (XID 74), and codes that nobody knows, that follow each other so soon are one.
        link_burst: Period = Period::seconds(60),
        /// Within this time an event of NVML and a line of the kernel log about the same XID are one fact.
        event_window: Period = Period::seconds(5),
        /// How long an event of NVML waits for its line before it stands in the journal by itself.
        line_wait: Period = Period::seconds(1),
        /// How long after the boot a GPU may take to be taken up into the fabric.
        fabric_grace: Period = Period::seconds(300),
    }
    sections {}
}

settings! {
    /// What the GPUs of this host should be like. What is left open is learned from what was seen to be well.
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

impl DeviceLimits {
    /// Where a rate has to be for a finding to be taken back that began at `limit`.
    pub(super) fn taken_back(&self, limit: f64) -> f64 {
        limit * self.taken_back_below.0 / 100.0
    }
}
