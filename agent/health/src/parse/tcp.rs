//! TCP connections as `/proc/net/tcp` and `/proc/net/tcp6` list them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Fewer retransmissions in a row than this are common. Each waits twice as long as the one before, the first 0.2 s.
const MIN_RETRANSMISSIONS: u32 = 4;

/// An established connection whose peer acknowledges nothing of what is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unacknowledged {
    /// The address of this end.
    pub from: IpAddr,
    /// The address of the peer.
    pub to: IpAddr,
    /// Retransmissions since the last acknowledgement.
    pub retransmissions: u32,
    /// The inode of the socket.
    pub inode: u64,
}

/// The connections of which nothing is acknowledged.
pub fn unacknowledged(text: &str) -> Vec<Unacknowledged> {
    text.lines().filter_map(line).collect()
}

fn line(line: &str) -> Option<Unacknowledged> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (from, to) = (address(fields.next()?)?, address(fields.next()?)?);
    let state = fields.next()?;
    let timer = fields.nth(1)?;
    let retransmissions = u32::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.nth(2)?.parse().ok()?;
    // Timer 1 waits for an acknowledgement. A peer that takes nothing, as a stopped process, has another one.
    let waits = state == "01" && timer.starts_with("01:") && retransmissions >= MIN_RETRANSMISSIONS;
    waits.then_some(Unacknowledged { from, to, retransmissions, inode })
}

/// `0200A8C0:1F90`: words in the order of the host.
fn address(text: &str) -> Option<IpAddr> {
    let (address, _port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(address.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match address.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for (index, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(index * 8)?);
            }
            Some(Ipv6Addr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

#[cfg(all(test, target_endian = "little"))]
mod tests {
    use super::*;

    const TCP: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 0 100 0 0 10 0
   1: 01004D0A:A2C4 02004D0A:7531 01 00000400:00000000 01:00000A2C 00000007  1000        0 12 2 0 3264 0 0 1 7
   2: 01004D0A:A2C6 03004D0A:7531 01 00000400:00000000 01:00000014 00000001  1000        0 13 2 0 204 0 0 10 7
   3: 01004D0A:A2C8 03004D0A:7531 01 00000400:00000000 04:00000A2C 00000000  1000        5 14 2 0 3264 0 0 10 7
   4: 01004D0A:A2CA 03004D0A:7531 02 00000001:00000000 01:00000A2C 00000005  1000        0 15 2 0 3264 0 0 10 7
";

    #[test]
    fn only_an_established_connection_that_waits_for_an_acknowledgement_counts() {
        let found = unacknowledged(TCP);
        let (from, to) = (Ipv4Addr::new(10, 77, 0, 1).into(), Ipv4Addr::new(10, 77, 0, 2).into());
        assert_eq!(found, [Unacknowledged { from, to, retransmissions: 7, inode: 12 }]);
    }

    #[test]
    fn addresses_of_both_protocols_are_read() {
        assert_eq!(address("0100007F:1F90"), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(address("00000000000000000000000001000000:0016"), Some(Ipv6Addr::LOCALHOST.into()));
        let mapped = address("0000000000000000FFFF000002004D0A:0016");
        assert_eq!(mapped, Some(Ipv4Addr::new(10, 77, 0, 2).into()));
        for wrong in ["", ":", "0100007F", "0100007:1", "é100007F:1", "zz00007F:1"] {
            assert_eq!(address(wrong), None, "{wrong}");
        }
    }
}
