//! Files of procfs and sysfs: rates are finite and positive, and names are parts of the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_health::host::fabric::Expected;
use mainstay_health::parse::{mounts, proc, sysfs, systemd, tcp};
use mainstay_fuzz::text;

fuzz_target!(|bytes: &[u8]| {
    let _ = mainstay_health::parse::pci_config::port(bytes);
    let _ = mainstay_health::hardware::tpu::read_driver_line(&text(bytes));
    let text = text(bytes);
    let mounts = mounts::parse_mounts(&text);
    assert!(mounts.len() <= text.lines().count());
    if let Some(first) = mounts.first() {
        assert!(mounts::mount_of(&mounts, &first.point).is_some_and(|of| first.point.starts_with(&of.point)));
        let _ = mounts::meant_writable(&text, &first.point);
    }
    assert!(systemd::units(&text).len() <= text.split("\n\n").count());
    assert!(mainstay_health::parse::ipmi::sensors(&text).len() <= text.lines().count());
    if let Some(stat) = proc::process_stat(&text) {
        assert!(text.contains(&stat.name));
    }
    let _ = proc::runs(&text);
    assert!(tcp::unacknowledged(&text).len() <= text.lines().count());
    for rate in [sysfs::port_rate(&text), sysfs::interface_rate(&text)].into_iter().flatten() {
        assert!(rate.is_finite() && rate > 0.0, "{rate}");
    }
    assert!(sysfs::state_name(&text).is_none_or(|name| !name.is_empty() && text.contains(name)));
    let _ = sysfs::is_pci_function(&text);
    let (pattern, name) = text.split_once('\n').unwrap_or((&text, &text));
    let _ = (sysfs::names(pattern, name), Expected::parse(&text));
    assert!(sysfs::names(name, name) || name.ends_with('*'));
});
