//! How long what was seen of a device is held against it.

use crate::settings;
use crate::settings::Period;

settings! {
    /// How GPUs are judged by the kernel log.
    pub struct DeviceLimits {
        /// How long after a fault what follows in its wake is folded into it.
        echo_window: Period = Period::seconds(60),
        /// How long a fault that new processes mend is held against a GPU after it was last seen.
        passing: Period = Period::seconds(600),
        /// How long failures of programs are remembered.
        repeats_window: Period = Period::seconds(86_400),
        /// Programs of different names that must fail on one GPU, and on no other of the host, before it is degraded.
        programs: u32 = 3,
        /// How long the driver must have been silent before gpu.driver is unhealthy; it is unknown before.
        hung_after: Period = Period::seconds(60),
        /// Minutes of the last ten in which heat or power slowed a GPU down before it is degraded.
        slow_minutes: u32 = 6,
    }
    sections {}
}
