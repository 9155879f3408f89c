//! A port for the store of one attempt, reserved until rank 0 listens on it.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::sockopt::{Ipv6V6Only, ReuseAddr};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrIn6, SockaddrStorage, bind, getsockname,
    setsockopt, socket,
};

/// A bound port that does not listen. With `SO_REUSEADDR` on both sides rank 0 may bind and listen while we hold it, and
/// the kernel gives it to no other process that asks for any free port.
#[derive(Debug)]
pub struct HeldPort {
    port: u16,
    _socket: OwnedFd,
}

impl HeldPort {
    /// Takes `port`, or any free one for 0.
    ///
    /// # Errors
    /// Another process listens on it (`EADDRINUSE`), or it is reserved for root.
    pub fn take(port: u16) -> io::Result<HeldPort> {
        // Both families if there is IPv6, since rank 0's store binds the wildcard of both.
        HeldPort::take_v6(port).or_else(|error| match error.raw_os_error() {
            Some(nix::libc::EAFNOSUPPORT | nix::libc::EADDRNOTAVAIL) => HeldPort::take_v4(port),
            _ => Err(error),
        })
    }

    pub fn number(&self) -> u16 {
        self.port
    }

    fn take_v6(port: u16) -> io::Result<HeldPort> {
        let socket = reusable(AddressFamily::Inet6)?;
        setsockopt(&socket, Ipv6V6Only, &false)?;
        let any = std::net::SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0);
        bind(socket.as_raw_fd(), &SockaddrIn6::from(any))?;
        HeldPort::bound(socket)
    }

    fn take_v4(port: u16) -> io::Result<HeldPort> {
        let socket = reusable(AddressFamily::Inet)?;
        let any = std::net::SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port);
        bind(socket.as_raw_fd(), &SockaddrIn::from(any))?;
        HeldPort::bound(socket)
    }

    fn bound(socket: OwnedFd) -> io::Result<HeldPort> {
        let address: SockaddrStorage = getsockname(socket.as_raw_fd())?;
        let port = address
            .as_sockaddr_in6()
            .map(SockaddrIn6::port)
            .or_else(|| address.as_sockaddr_in().map(SockaddrIn::port))
            .ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(HeldPort { port, _socket: socket })
    }
}

fn reusable(family: AddressFamily) -> io::Result<OwnedFd> {
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, ReuseAddr, &true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn rank_0_may_listen_on_a_held_port_and_a_listening_port_cannot_be_held() {
        let held = HeldPort::take(0).expect("a free port");
        // The standard library sets SO_REUSEADDR, as torch's store does.
        let listener = TcpListener::bind(("0.0.0.0", held.number())).expect("rank 0 listens");
        TcpStream::connect(("127.0.0.1", held.number())).expect("a rank connects");
        let error = HeldPort::take(listener.local_addr().expect("bound").port()).expect_err("taken");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
