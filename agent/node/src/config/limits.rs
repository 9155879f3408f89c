//! The limits of the checks: one table, by the names of the checks.

use mainstay_hang::nccl_ras::NcclLimits;
use mainstay_health::hardware::gpu::DeviceLimits;
use mainstay_health::hardware::tpu::TpuLimits;
use mainstay_health::host::fabric::FabricLimits;
use mainstay_health::host::os::HostLimits;
use mainstay_health::host::preflight::deep::DeepLimits;
use mainstay_model::settings;

settings! {
    /// When a component counts as degraded or unhealthy.
    pub struct Limits {}
    sections {
        /// The components of the host.
        host: HostLimits,
        /// The components gpu and gpu.driver.
        gpu: DeviceLimits,
        /// The components tpu.0, tpu.1 and so on.
        tpu: TpuLimits,
        /// The component nccl.
        nccl: NcclLimits,
        /// The components fabric and net.
        fabric: FabricLimits,
        /// The checks of mainstay check.
        preflight: DeepLimits,
    }
}
