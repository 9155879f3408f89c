//! Limits of the states of a link.

use mainstay_model::settings;
use mainstay_model::time::Span;
use mainstay_model::units::Period;

/// Readings in a row in which an expected link must be missing before it is unhealthy.
pub(super) const MISSING_AFTER: u32 = 3;

/// Readings in a row in which a link must be slower than before until it is degraded, and as fast as before until it is
/// healthy again.
pub(super) const SLOW_AFTER: u32 = 3;

/// Links that all went down within this time point to the switch rather than to the host.
pub(super) const TOGETHER: Span = Span::seconds(30);

settings! {
    /// Limits of the link checks.
    pub struct FabricLimits {
        /// How long an expected link must be down before it is unhealthy.
        down_after: Period = Period::seconds(30),
        /// How long a link must be up again before it is healthy.
        recover_after: Period = Period::seconds(60),
        /// How many times a link must go down and come back within flap_window before it is unhealthy.
        flaps: u64 = 3,
        /// How long flaps are remembered, across restarts and reboots.
        flap_window: Period = Period::seconds(12 * 3600),
        /// Readings in a row in which a link must be active before it is expected to be active.
        learn_after: u32 = 6,
        /// How long after boot links may take to come up.
        boot_grace: Period = Period::seconds(300),
    }
    sections {
        /// Errors that a working link may have before it is degraded. Errors alone never make a link unhealthy.
        errors: ErrorLimits,
    }
}

settings! {
    /// How many errors are too many.
    pub struct ErrorLimits {
        /// symbol_error of InfiniBand within an hour; the standard allows an intact cable 120.
        symbol_errors: u64 = 120,
        /// link_error_recovery within ten minutes: the link was retrained and stayed up.
        link_recoveries: u64 = 30,
        /// local_link_integrity_errors within an hour: bursts of cable errors.
        link_integrity_errors: u64 = 3,
        /// excessive_buffer_overrun_errors within an hour: flow control failed.
        buffer_overruns: u64 = 3,
        /// port_rcv_errors within five minutes.
        receive_errors: u64 = 3000,
        /// port_xmit_discards within five minutes: packets dropped because the path was blocked.
        transmit_discards: u64 = 30_000,
        /// rx_icrc_encapsulated within an hour: damaged RoCE packets.
        damaged_packets: u64 = 10,
        /// rx_crc_errors of Ethernet within an hour.
        crc_errors: u64 = 120,
        /// local_ack_timeout_err within ten minutes: the other end did not answer. A short burst means that the other
        /// end died and is no fault of this link.
        ack_timeouts: u64 = 600,
        /// roce_slow_restart within ten minutes: congestion.
        slow_restarts: u64 = 6000,
    }
    sections {}
}
