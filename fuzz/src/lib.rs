//! Helpers of the targets: text from any bytes, and the catalogs that are compiled into the agent.

use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::LazyLock;

use mainstay_health::hardware::catalog::Catalog;
use serde::{Serialize, de::DeserializeOwned};

/// The files of the hardware catalog.
pub const CATALOGUES: [&str; 4] = [
    include_str!("../../agent/catalog/hardware/xid.toml"),
    include_str!("../../agent/catalog/hardware/sxid.toml"),
    include_str!("../../agent/catalog/hardware/kernel.toml"),
    include_str!("../../agent/catalog/hardware/nvlink.toml"),
];

/// Converts bytes to text as the agent does.
pub fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// The hardware catalog, parsed once.
pub fn catalog() -> Catalog {
    static CATALOG: LazyLock<Catalog> = LazyLock::new(|| {
        let [xid, sxid, kernel, nvlink] = CATALOGUES;
        Catalog::new(read(xid), read(sxid), read(kernel), read(nvlink))
            .expect("our own catalogue agrees with itself")
    });
    CATALOG.clone()
}

fn read<T: DeserializeOwned>(file: &str) -> T {
    toml::from_str(file).expect("our own catalogue can be read")
}

/// Asserts that a value that can be read as JSON survives a round trip, and returns it.
pub fn survives_json<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) -> Option<T> {
    let value: T = serde_json::from_slice(bytes).ok()?;
    let written = serde_json::to_vec(&value).expect("what was read can be written");
    assert_eq!(serde_json::from_slice::<T>(&written).expect("what was written can be read"), value);
    Some(value)
}
