//! Optional addresses are written as empty text: TOML has no null.

use std::net::SocketAddr;

use serde::{Deserialize, Deserializer, Serializer, de::Error};

pub(super) fn serialize<S: Serializer>(address: &Option<SocketAddr>, s: S) -> Result<S::Ok, S::Error> {
    match address {
        Some(address) => s.collect_str(address),
        None => s.serialize_str(""),
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(d)?;
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| {
        D::Error::custom(format!(
            "{text:?} is not an address: write an IP address and a port, like \"127.0.0.1:7130\" or \"[::1]:7130\""
        ))
    })
}
