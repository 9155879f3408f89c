//! Ports for servers that tests start.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Mutex, PoisonError};

/// Ports of one block. A process claims whole blocks, so that it needs one descriptor for many ports.
const BLOCK: u16 = 64;

/// The blocks are between the ports that need privileges and those that the kernel gives to outgoing connections.
const FIRST: u16 = 10_000;
const BLOCKS: u16 = 312;

/// The blocks that this process has claimed, and the next port of the last one.
static CLAIMED: Mutex<Claimed> = Mutex::new(Claimed { blocks: Vec::new(), next: 0, last: 0 });

struct Claimed {
    /// Each is bound to the name of its block, which excludes all other processes until this one ends.
    blocks: Vec<UnixListener>,
    next: u16,
    last: u16,
}

/// A port on which no process listens, below those that the kernel gives to outgoing connections. It is given to no
/// other test: not in this process, and not in another one that runs at the same time.
pub fn free_port() -> u16 {
    let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if claimed.next == claimed.last {
            claimed.claim();
        }
        let port = claimed.next;
        claimed.next += 1;
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}

impl Claimed {
    /// Claims a block that no process has. Starts at a place that depends on the process: a block that another process
    /// has just left may still have connections that end.
    fn claim(&mut self) {
        let start = std::process::id() % u32::from(BLOCKS);
        let mut blocks = (0..BLOCKS).map(|offset| (u32::from(offset) + start) % u32::from(BLOCKS));
        let claim = |block: u32| {
            let name = format!("mainstay-test-ports-{block}");
            let address = SocketAddr::from_abstract_name(name).expect("the name is short");
            Some((
                u16::try_from(block).expect("below the number of blocks"),
                UnixListener::bind_addr(&address).ok()?,
            ))
        };
        let (block, claim) = blocks.find_map(claim).expect("other processes have all blocks of ports");
        self.blocks.push(claim);
        self.next = FIRST + block * BLOCK;
        self.last = self.next + BLOCK;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_port_is_given_once_and_its_block_to_no_other_process() {
        let ports: BTreeSet<u16> = (0..100).map(|_| free_port()).collect();
        assert_eq!(ports.len(), 100);
        for port in ports {
            let name = format!("mainstay-test-ports-{}", (port - FIRST) / BLOCK);
            assert!(
                UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).is_err(),
                "{port}"
            );
        }
    }
}
