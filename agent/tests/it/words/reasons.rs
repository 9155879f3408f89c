//! Reasons of components, checks and events.

/// The driver asks for a reboot.
pub const REBOOT_OF_NODE: &str = "a reboot of the node";

/// The device that an XID names.
pub const OFF_THE_BUS: &str = "fallen off the bus";

/// A driver that does not answer.
pub const HUNG_SINCE: &str = "driver hung since";

/// The GPU whose reading does not return.
pub const WHILE_GPU_WAS_READ: &str = "while GPU 0000:01:00 was read";

/// A reading that came and comes no more.
pub const NO_LONGER: &str = "the driver no longer";

/// A reading that fails.
pub const NO_POWER_READING: &str = "its power cannot be read";

/// Another one.
pub const NO_WORKERS: &str = "who works on it";

/// A GPU with an NVLink that is down.
pub const ONE_NVLINK_DOWN: &str = "NVLink 3 down, 16 of 17 up";

/// Where the NVLink leads to.
pub const OTHER_END: &str = "its other end is 0000:c1:00";

/// A GPU that the driver does not find any more.
pub const DRIVER_LOST_IT: &str = "the driver lost it";

/// What does not count and is shown.
pub const ON_THE_SCREEN: &str = "note: its clocks";

/// The driver asks for a reset.
pub const NEEDS_RESET: &str = "the driver says that it needs a reset";

/// A GPU after a reset.
pub const WAS_RESET: &str = "it answers, and the driver asks for nothing more";

/// A file of sysfs with nonsense.
pub const NOT_A_STATE: &str = "not a state";

/// A link that is there for the first time.
pub const LINK_EXPECTED: &str = "expected to be from now on";

/// A link that was down between two looks.
pub const LINK_LOST_TWICE: &str = "lost its link twice";

/// A link that is down.
pub const LINK_DOWN: &str = "went down (DOWN, Polling)";

/// A link that is up.
pub const LINK_UP: &str = "mlx5_1/1 is up at 400 Gb/s and expected";

/// A link whose device is not there.
pub const DEVICE_GONE: &str = "its device (e8eb:d303:0072:0002) is gone";

/// A link that no longer counts.
pub const NOT_WATCHED: &str = "fabric.mlx5_1/1: it is no longer watched";

/// All network file systems answer.
pub const MOUNT_ANSWERS: &str = "the network file system answers";

/// A file system that does not answer.
pub const MOUNT_SILENT: &str = "has not answered for";

/// A window of maintenance, with its state.
pub const MAINTENANCE_SCHEDULED: &str = "maintenance of the host: SCHEDULED";

/// The same as a reason.
pub const MAINTENANCE_STARTS: &str = "maintenance of the host, starts in";

/// The machine is lost soon.
pub const PREEMPTED: &str = "the machine is taken away (preempted)";

/// Another server at the address of the cloud.
pub const NOT_THE_SERVER: &str = "not the server that was asked";

/// The first look at the cloud.
pub const NO_ANSWER_YET: &str = "no answer yet";

/// The kernel log by another way.
pub const JOURNAL_INSTEAD: &str = "systemd's journal is read instead: opening";

/// A journal of another boot.
pub const JOURNAL_SILENT: &str = "gives no line of this boot's kernel";

/// The same before the first line.
pub const NO_LINE_OF_THIS_BOOT: &str = "no line of this boot's kernel";

/// Neither way is there.
pub const JOURNAL_NEITHER: &str = "nor is the journal read: starting";

/// journalctl that fails.
pub const JOURNALCTL_ENDED: &str = "journalctl ended: exit status: 1: No journal files were opened";

/// Processes of other users.
pub const MAY_NOT_LOOK_INTO: &str = "1 processes may not be looked into";

/// Another server at the address of libtpu.
pub const NOT_LIBTPU: &str = "does not have libtpu's service";

/// libtpu of a trainer that hangs.
pub const LIBTPU_SILENT: &str = "chips are held by python3 (4711), and libtpu does not answer";

/// No trainer runs.
pub const TPU_IDLE: &str = "idle: no process holds a chip";

/// A core with an error.
pub const TPU_CORE_ILL: &str = "libtpu reports for core 1: UNCORRECTABLE HBM ECC";

/// A connection to DCGM that is lost.
pub const DCGM_GONE: &str = "not valid any longer (-21)";

/// systemctl that fails.
pub const NO_ANSWER_FROM_SYSTEMD: &str = "without an answer";

/// systemctl that hangs.
pub const DOES_NOT_ANSWER: &str = "does not answer";

/// A check with too little time.
pub const NOT_IN_TIME_20: &str = "did not answer in 20 ms";

/// The same.
pub const NOT_IN_TIME_300: &str = "did not answer in 300 ms";

/// A requirement that is not met.
pub const TWO_OF_EIGHT: &str = "8 are required, 2 GPUs seen";

/// A GPU that others use.
pub const MEMORY_IN_USE: &str = "30.0 GiB of its memory is in use";

/// A host without CUDA.
pub const NO_CUDA: &str = "no CUDA driver here";

/// A GPU that computes wrong results.
pub const WRONG_PRODUCT: &str = "1 wrong values of a product of matrices";

/// A GPU whose memory changes.
pub const WRONG_MEMORY: &str = "words of the GPU's memory differ";

/// A GPU with errors in its memory.
pub const UNCORRECTABLE: &str = "memory that cannot be corrected";

/// A GPU without free memory.
pub const NO_FREE_MEMORY: &str = "no memory of the GPU is free";

/// A driver of another kind.
pub const NO_KERNELS: &str = "does not take our kernels";

/// CUDA without GPUs.
pub const CUDA_SEES_NO_GPU: &str = "CUDA sees no GPU";

/// CUDA with other GPUs.
pub const CUDA_SEES_OTHERS: &str = "CUDA does not see the GPU 0000:3b:00.0";

/// A check that does not return.
pub const STILL_OUT: &str = "has not returned for 89.00 s";

/// A file in the place of a directory.
pub const FILE_FOR_DIRECTORY: &str = "there is a file where a directory is needed";

/// The path of a socket.
pub const TOO_LONG: &str = "its path is too long";

/// The log of an agent that has started.
pub const AGENT_IS_READY: &str = "the agent is ready";

/// An XID that NVML reports.
pub const XID_79_BY_EVENT: &str = "XID 79 of GPU 0000:01:00: reported by an NVML event";

/// The same of another GPU.
pub const OTHER_XID_79_BY_EVENT: &str = "XID 79 of GPU 0000:02:00: reported by an NVML event";

/// The same with another code.
pub const XID_48_BY_EVENT: &str = "XID 48 of GPU 0000:02:00: reported by an NVML event";

/// What an XID means.
pub const LINK_ADVICE: &str = "look at the link's connection";

/// A hook that hangs.
pub const PROBE_TOO_LONG: &str = "took longer than 0.05 s";
