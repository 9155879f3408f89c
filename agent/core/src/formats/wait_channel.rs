//! What the kernel has a process wait in, by its wait channel (`/proc/PID/wchan`) or a line of its kernel stack.

/// Whether this function of the kernel waits for a file system of the network or of FUSE. Functions of local disks do not
/// count: a busy disk has every writer wait there.
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
    fn file_systems_of_the_network_are_known_by_channel_and_by_stack_line() {
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
