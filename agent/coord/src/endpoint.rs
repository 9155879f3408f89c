//! Endpoints of a store.

use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::str::FromStr;

use crate::error::CoordError;

/// The maximum number of endpoints: more than any etcd cluster has members. Bounds what a command line can make us
/// try.
pub const MOST_ENDPOINTS: usize = 16;

/// One address of the store: host name or address, port, and whether it uses TLS.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// Whether it uses TLS (`https://`).
    pub tls: bool,
    /// Name or address, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl Endpoint {
    /// Reads `a:1,b:2,c`; an entry without a port has `default_port`.
    ///
    /// # Errors
    /// An entry is not an endpoint, one is repeated, there is none, or there are more than [`MOST_ENDPOINTS`].
    pub fn parse_list(text: &str, default_port: u16) -> Result<Vec<Endpoint>, CoordError> {
        let wrong = |why: &str| CoordError::Endpoint { text: text.to_owned(), why: why.to_owned() };
        let mut endpoints = Vec::new();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let endpoint = Endpoint::parse(entry, Some(default_port))?;
            if endpoints.contains(&endpoint) {
                return Err(wrong(&format!("{endpoint} is given twice")));
            }
            endpoints.push(endpoint);
        }
        match endpoints.len() {
            0 => Err(wrong("it is empty")),
            count if count > MOST_ENDPOINTS => {
                Err(wrong(&format!("{count} endpoints, at most {MOST_ENDPOINTS} are supported")))
            }
            _ => Ok(endpoints),
        }
    }

    fn parse(text: &str, default_port: Option<u16>) -> Result<Endpoint, CoordError> {
        let wrong = |why: &str| CoordError::Endpoint { text: text.to_owned(), why: why.to_owned() };
        let (tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some((scheme, _)) => return Err(wrong(&format!("the scheme {scheme:?} is unknown"))),
            None => (false, text),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) =
            split_port(rest).ok_or_else(|| wrong("the port is not a number from 1 to 65535"))?;
        let port = port.or(default_port).ok_or_else(|| wrong("the port is missing"))?;
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%');
        if host.is_empty() || host.len() > 253 || !host.chars().all(allowed) {
            return Err(wrong("the host is no name and no address"));
        }
        Ok(Endpoint { tls, host: host.to_owned(), port })
    }

    /// The same host and port with or without TLS.
    #[must_use]
    pub fn with_tls(mut self, tls: bool) -> Endpoint {
        self.tls = tls;
        self
    }

    /// Whether the host is this one: one of its addresses can be bound here. Resolves the name, and blocks as long as
    /// the resolver does.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.addresses().iter().any(|address| {
            !address.is_unspecified() && TcpListener::bind(SocketAddr::new(*address, 0)).is_ok()
        })
    }

    /// The current addresses of the host from the resolver; none if it does not know the name. Blocks.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        found.map(|addresses| addresses.map(|address| address.ip()).collect()).unwrap_or_default()
    }

    /// `host:port`, with brackets around an IPv6 address.
    #[must_use]
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// Host and port of `host`, `host:port`, `[v6]`, `[v6]:port` or a bare IPv6 address; none if the port is invalid.
fn split_port(text: &str) -> Option<(&str, Option<u16>)> {
    if let Some(inner) = text.strip_prefix('[') {
        let (host, rest) = inner.split_once(']')?;
        if rest.is_empty() {
            return Some((host, None));
        }
        return Some((host, Some(port(rest.strip_prefix(':')?)?)));
    }
    match text.rsplit_once(':') {
        Some((host, _)) if host.contains(':') => Some((text, None)),
        Some((host, given)) => Some((host, Some(port(given)?))),
        None => Some((text, None)),
    }
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port != 0)
}

impl FromStr for Endpoint {
    type Err = CoordError;

    fn from_str(text: &str) -> Result<Endpoint, CoordError> {
        Endpoint::parse(text.trim(), None)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]

    use super::*;

    fn shown(text: &str) -> String {
        let list = Endpoint::parse_list(text, 29400);
        list.map_or_else(
            |error| error.to_string(),
            |list| list.iter().map(Endpoint::to_string).collect::<Vec<_>>().join(" "),
        )
    }

    #[test]
    fn the_usual_forms_of_endpoints_are_read() {
        assert_eq!(shown("a"), "http://a:29400");
        assert_eq!(shown("a:1, b:2 ,c"), "http://a:1 http://b:2 http://c:29400");
        assert_eq!(shown("https://e1:2379/"), "https://e1:2379");
        assert_eq!(shown("[::1]:7,fe80::1"), "http://[::1]:7 http://[fe80::1]:29400");
    }

    #[test]
    fn an_invalid_endpoint_is_reported() {
        for text in ["", "a:0", "a:99999", "ftp://a:1", "a b:1", "a:1,a:1", "http://:1", "[::1"] {
            let error = Endpoint::parse_list(text, 1).unwrap_err().to_string();
            assert!(error.contains("HOST:PORT"), "{text}: {error}");
        }
        let many: Vec<String> = (0..17).map(|n| format!("h{n}")).collect();
        assert!(shown(&many.join(",")).contains("at most 16"));
        testing::snapshot!("errors", "an endpoint without a port", "a".parse::<Endpoint>().unwrap_err());
    }

    #[test]
    fn an_address_of_this_host_is_here() {
        assert!("127.0.0.1:1".parse::<Endpoint>().unwrap().is_here());
        assert!(!"host.invalid:1".parse::<Endpoint>().unwrap().is_here());
    }
}
