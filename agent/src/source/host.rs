//! The host itself: CPU, memory, pressure, disks, OOM kills.
