//! What a process waits for in the kernel, by its wait channel (`/proc/PID/wchan`) or a line of its kernel stack.

/// Whether this kernel function waits for a network file system or FUSE. Functions of local disks do not count: on a busy disk every
/// writer waits there.
pub fn is_of_network_file_system(function: &str) -> bool {
    const MARKS: [&str; 17] = [
        "[nfs",
        "nfs_",
        "nfs4_",
        "rpc_wait",
        "[sunrpc]",
        "[lustre]",
        "[ptlrpc]",
        "ptlrpc_",
        "cl_sync_io",
        "[ceph]",
        "ceph_",
        "[fuse]",
        "fuse_",
        "request_wait_answer",
        "[cifs]",
        "cifs_",
        "[mmfs",
    ];
    MARKS.iter().any(|mark| function.contains(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_recognised_by_channel_and_stack_line() {
        for function in
            ["request_wait_answer", "rpc_wait_bit_killable", "nfs_wait_client_init_complete+0x1 [nfs]"]
        {
            assert!(is_of_network_file_system(function), "{function}");
        }
        for function in ["futex_do_wait", "pipe_read", "io_schedule", "ext4_file_write_iter", "do_poll_wait"]
        {
            assert!(!is_of_network_file_system(function), "{function}");
        }
    }
}
