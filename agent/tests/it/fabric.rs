//! The network as read from directory trees, and the whole agent with one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use crate::support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use mainstay_health::host::fabric::{FabricSample, LinkKind, PortReading};
use mainstay_health::host::os::Reading;
use mainstay_sensors::source::fabric::FabricSource;
use support::Agent;
use testing::TempDir;

/// A fake sysfs with the kernel's layout: devices below their PCI bridges, classes and the bus as links to them.
struct Sys(TempDir);

impl Sys {
    fn new() -> Sys {
        let sys = Sys(testing::tempdir().unwrap());
        fs::create_dir_all(sys.path().join("class/net")).unwrap();
        fs::create_dir_all(sys.path().join("bus/pci/devices")).unwrap();
        sys
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("sys")
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // As in sysfs, a reader sees the old text or the new one, never an empty file.
        let new = path.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// A PCI function below a bridge below a root port.
    fn function(&self, root: &str, address: &str, vendor: &str, class: &str) -> PathBuf {
        let function = format!("devices/pci0000:{root}/0000:{root}:01.0/0000:{root}:02.0/{address}");
        self.write(&format!("{function}/vendor"), &format!("{vendor}\n"));
        self.write(&format!("{function}/class"), &format!("{class}\n"));
        let function = self.path().join(function);
        symlink(&function, self.path().join("bus/pci/devices").join(address)).unwrap();
        function
    }

    fn gpu(&self, root: &str, address: &str) {
        self.function(root, address, "0x10de", "0x030200");
    }

    /// An InfiniBand card with one active port.
    fn card(&self, name: &str, root: &str, address: &str) {
        let function = self.function(root, address, "0x15b3", "0x020700");
        let device = function.join("infiniband").join(name);
        fs::create_dir_all(&device).unwrap();
        symlink(&function, device.join("device")).unwrap();
        fs::create_dir_all(self.path().join("class/infiniband")).unwrap();
        symlink(&device, self.path().join("class/infiniband").join(name)).unwrap();
        self.set(name, "../../node_guid", "e8eb:d303:0072:0001\n");
        self.set(name, "link_layer", "InfiniBand\n");
        self.up(name);
        for (counter, value) in [
            ("counters/link_downed", "0"),
            ("counters/symbol_error", "7"),
            ("hw_counters/local_ack_timeout_err", "3"),
            ("counters/port_xmit_data", "123456789"),
        ] {
            self.set(name, counter, value);
        }
    }

    fn set(&self, device: &str, file: &str, text: &str) {
        self.write(&format!("class/infiniband/{device}/ports/1/{file}"), text);
    }

    fn up(&self, device: &str) {
        self.set(device, "state", "4: ACTIVE\n");
        self.set(device, "phys_state", "5: LinkUp\n");
        self.set(device, "rate", "400 Gb/sec (4X NDR)\n");
    }

    fn down(&self, device: &str) {
        self.set(device, "state", "1: DOWN\n");
        self.set(device, "phys_state", "2: Polling\n");
        self.set(device, "rate", "10 Gb/sec (4X SDR)\n");
    }

    fn interface(&self, name: &str) {
        for (file, text) in [
            ("carrier", "1\n"),
            ("speed", "100000\n"),
            ("address", "b8:ce:f6:00:00:01\n"),
            ("carrier_changes", "7\n"),
            ("statistics/rx_crc_errors", "5\n"),
        ] {
            self.write(&format!("class/net/{name}/{file}"), text);
        }
    }

    fn sample(&self) -> FabricSample {
        self.source(&[]).sample(&[])
    }

    fn source(&self, exclude: &[&str]) -> FabricSource {
        let exclude = exclude.iter().map(|name| (*name).to_owned()).collect();
        FabricSource::new(self.path(), exclude, vec![])
    }

    fn only(&self) -> PortReading {
        let mut links = self.sample().links;
        assert_eq!(links.len(), 1, "{links:?}");
        links.remove(0)
    }
}

#[test]
fn a_port_is_read_with_its_counters_its_slot_and_the_gpus_near_it() {
    let sys = Sys::new();
    sys.card("mlx5_0", "3a", "0000:3b:00.0");
    sys.gpu("3a", "0000:3c:00.0");
    sys.gpu("80", "0000:81:00.0");
    let link = sys.only();
    assert_eq!((link.name.as_str(), link.kind), ("mlx5_0/1", LinkKind::InfiniBand));
    let state = link.state.value().unwrap();
    assert_eq!((state.active, state.to_string()), (true, "ACTIVE, LinkUp".to_owned()));
    assert_eq!(link.rate, Reading::Value(400.0));
    assert_eq!(link.identity.serial.as_deref(), Some("e8eb:d303:0072:0001"));
    assert_eq!(link.identity.place.as_deref(), Some("0000:3b:00.0"));
    assert_eq!(link.near, ["gpu.0000:3c:00"]);
    let counters: Vec<(&str, u64)> =
        link.counters.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    assert_eq!(counters, [("link_downed", 0), ("local_ack_timeout_err", 3), ("symbol_error", 7)]);
}

#[test]
fn a_host_without_such_devices_has_no_links() {
    let sys = Sys::new();
    sys.gpu("3a", "0000:3c:00.0");
    sys.interface("eth0");
    assert_eq!(sys.sample(), FabricSample::default());
    assert_eq!(FabricSource::new("/nowhere".into(), vec![], vec![]).sample(&[]), FabricSample::default());
}

#[test]
fn a_function_of_the_fabric_manager_is_never_read() {
    let sys = Sys::new();
    sys.card("mlx5_0", "3a", "0000:3b:00.0");
    sys.card("mlx5_4", "80", "0000:81:00.0");
    sys.write("class/infiniband/mlx5_4/device/vpd", "\u{2}ConnectX-7 bridge\u{0}SMDL=SW_MNG\u{0}");
    let sample = sys.sample();
    assert_eq!(sample.links.len(), 1);
    assert!(sample.passed_over["mlx5_4"].contains("SW_MNG"), "{:?}", sample.passed_over);
}

#[test]
fn what_the_operator_leaves_out_is_not_read() {
    let sys = Sys::new();
    sys.card("mlx5_0", "3a", "0000:3b:00.0");
    sys.card("mlx5_1", "80", "0000:81:00.0");
    let left = |exclude: &[&str]| {
        let sample = sys.source(exclude).sample(&[]);
        sample.links.into_iter().map(|link| link.name).collect::<Vec<_>>()
    };
    assert_eq!(left(&["mlx5_0"]), ["mlx5_1/1"]);
    assert_eq!(left(&["mlx5_1/1"]), ["mlx5_0/1"]);
    assert!(left(&["mlx5*"]).is_empty());
    assert_eq!(left(&["mlx5"]).len(), 2);
}

#[test]
fn a_counter_that_is_refused_is_not_asked_for_again() {
    let sys = Sys::new();
    sys.card("mlx5_0", "3a", "0000:3b:00.0");
    sys.set("mlx5_0", "counters/symbol_error", "N/A (no PMA)\n");
    let mut source = sys.source(&[]);
    let has = |source: &mut FabricSource| source.sample(&[]).links[0].counters.contains_key("symbol_error");
    assert!(!has(&mut source));
    sys.set("mlx5_0", "counters/symbol_error", "5\n");
    assert!(!has(&mut source));
    // Another card may have that counter.
    sys.set("mlx5_0", "../../node_guid", "e8eb:d303:0072:0009\n");
    assert!(has(&mut source));
}

#[test]
fn vendors_without_counters_are_read_all_the_same() {
    let sys = Sys::new();
    for (name, layer) in [("rdmap0s6", "Unspecified\n"), ("irdma0", "Ethernet\n")] {
        sys.write(&format!("class/infiniband/{name}/node_guid"), "0000:0000:0000:0000\n");
        for (file, text) in [("link_layer", layer), ("state", "4: ACTIVE\n"), ("phys_state", "5: LinkUp\n")] {
            sys.set(name, file, text);
        }
    }
    let links = sys.sample().links;
    assert_eq!(links.iter().map(|link| link.kind).collect::<Vec<_>>(), [LinkKind::Roce, LinkKind::OtherRdma]);
    for link in links {
        assert!(link.counters.is_empty() && link.identity.serial.is_none(), "{link:?}");
        assert!(link.state.value().unwrap().active && link.rate.value().is_none());
    }
}

#[test]
fn software_devices_are_skipped() {
    let sys = Sys::new();
    sys.set("rxe0", "state", "4: ACTIVE\n");
    let sample = sys.sample();
    assert!(sample.links.is_empty() && sample.passed_over.contains_key("rxe0"));
}

#[test]
fn a_bond_below_roce_shows_its_members() {
    let sys = Sys::new();
    sys.card("mlx5_bond_0", "3a", "0000:3b:00.0");
    sys.set("mlx5_bond_0", "link_layer", "Ethernet\n");
    sys.set("mlx5_bond_0", "gid_attrs/ndevs/0", "bond0\n");
    sys.write("class/net/bond0/bonding/slaves", "eth0 eth1\n");
    sys.interface("eth0");
    sys.interface("eth1");
    sys.write("class/net/eth1/carrier", "0\n");
    sys.write("class/net/eth1/bonding_slave/perm_hwaddr", "b8:ce:f6:00:00:02\n");
    let links = sys.sample().links;
    let names: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
    assert_eq!(names, ["mlx5_bond_0/1", "eth0", "eth1"]);
    assert_eq!((links[0].kind, links[0].interface.as_deref()), (LinkKind::Roce, Some("bond0")));
    let active: Vec<bool> = links.iter().map(|link| link.state.value().unwrap().active).collect();
    assert_eq!(active, [true, true, false]);
    assert_eq!((links[1].rate.value(), links[1].counters["carrier_down_count"]), (Some(&100.0), 3));
    assert_eq!(links[2].identity.serial.as_deref(), Some("b8:ce:f6:00:00:02"));
}

#[test]
fn representors_of_virtual_functions_are_no_ports() {
    let sys = Sys::new();
    sys.card("mlx5_0", "3a", "0000:3b:00.0");
    sys.set("mlx5_0", "link_layer", "Ethernet\n");
    sys.set("mlx5_0", "gid_attrs/ndevs/0", "eth0_3\n");
    sys.write("class/net/eth0_3/phys_port_name", "pf0vf3\n");
    assert!(sys.sample().links.is_empty());
    sys.write("class/net/eth0_3/phys_port_name", "p0\n");
    assert_eq!(sys.only().interface.as_deref(), Some("eth0_3"));
}

#[test]
fn nonsense_is_reported_and_breaks_nothing() {
    for nonsense in ["", "\n", "ACTIVE", "4:", "\u{0}", "99999999999999999999999"] {
        let sys = Sys::new();
        sys.card("mlx5_0", "3a", "0000:3b:00.0");
        for file in ["state", "phys_state", "rate", "link_layer", "counters/link_downed", "../../node_guid"] {
            sys.set("mlx5_0", file, nonsense);
        }
        let link = sys.only();
        assert!(link.state.value().is_none() && link.rate.value().is_none(), "{nonsense:?}: {link:?}");
        let why = link.state.why_absent().unwrap().replace(&sys.path().display().to_string(), "SYS");
        testing::snapshot!("fabric", format!("no state: {nonsense:?}"), why);
    }
}

#[test]
fn a_slot_shows_whether_it_has_a_card() {
    let sys = Sys::new();
    let function = sys.function("3a", "0000:3b:00.0", "0x15b3", "0x020700");
    let places = ["0000:3b:00.0".to_owned(), "0000:99:00.0".to_owned()];
    let slots = || sys.source(&[]).sample(&places).slots;
    assert_eq!(slots(), [(places[0].clone(), None)].into());
    symlink("../../../bus/pci/drivers/mlx5_core", function.join("driver")).unwrap();
    assert_eq!(slots(), [(places[0].clone(), Some("mlx5_core".to_owned()))].into());
}

/// The agent with this tree, fast enough for a test.
fn agent(sys: &Sys) -> Agent {
    let root = sys.path();
    let settings: &[(&str, &Path)] = &[
        ("HOST_SYS_ROOT", &root),
        ("KERNEL_LOG_PATH", Path::new("")),
        ("FABRIC_INTERVAL", Path::new("1s")),
        ("LIMITS_FABRIC_LEARN_AFTER", Path::new("1")),
        ("LIMITS_FABRIC_DOWN_AFTER", Path::new("1s")),
        ("LIMITS_FABRIC_RECOVER_AFTER", Path::new("1s")),
        ("LIMITS_FABRIC_BOOT_GRACE", Path::new("1ms")),
    ];
    Agent::start(sys.0.path(), settings)
}

#[test]
fn flaps_count_on_over_a_restart_of_the_agent() {
    let sys = Sys::new();
    sys.card("mlx5_0", "3a", "0000:3b:00.0");
    let first = agent(&sys);
    first.wait_for_observation("fabric.mlx5_0/1", "port_learned");
    sys.set("mlx5_0", "counters/link_downed", "2");
    assert_eq!(first.wait_for_observation("fabric.mlx5_0/1", "port_flapped")["values.flaps"], "2");
    assert!(!first.status().contains("UNHEALTHY"), "{}", first.status());
    drop(first);

    let second = agent(&sys);
    second.wait_for_first_reading("fabric.mlx5_0/1");
    sys.down("mlx5_0");
    let down = second.wait_for_observation("fabric.mlx5_0/1", "port_down");
    testing::snapshot!("fabric", "journal: a port is down", down["detail"].as_str().unwrap());
    sys.up("mlx5_0");
    let reported = second.wait_until_in_state("fabric.mlx5_0/1", "UNHEALTHY");
    assert!(reported["component.reason"].as_str().unwrap().contains("3 times"), "{reported}");
    drop(second);

    // The third agent has seen no flap itself.
    let third = agent(&sys);
    third.wait_for_first_reading("fabric.mlx5_0/1");
    let status = third.status();
    let line = status.lines().find(|line| line.contains("fabric.mlx5_0/1")).unwrap();
    assert!(line.contains("UNHEALTHY") && line.contains("3 times"), "{status}");
}

#[test]
fn a_missing_port_is_reported_after_a_restart_too_and_forgotten_on_demand() {
    let sys = Sys::new();
    sys.card("mlx5_0", "3a", "0000:3b:00.0");
    sys.card("mlx5_1", "80", "0000:81:00.0");
    sys.set("mlx5_1", "../../node_guid", "e8eb:d303:0072:0002\n");
    let first = agent(&sys);
    first.wait_for_observation("fabric.mlx5_1/1", "port_learned");
    drop(first);

    fs::remove_file(sys.path().join("class/infiniband/mlx5_1")).unwrap();
    let second = agent(&sys);
    let reported = second.wait_for_change("fabric.mlx5_1/1", "UNKNOWN", "UNHEALTHY");
    assert!(reported.contains("e8eb:d303:0072:0002"), "it names the device: {reported}");
    second.wait_for_observation("fabric.mlx5_1/1", "device_missing");
    fs::remove_file(sys.0.path().join("state/fabric.json")).unwrap();
    second.wait_for_change("fabric", "UNHEALTHY", "HEALTHY");
    second.wait_for_observation("fabric.mlx5_1/1", "unwatched");
    // The event is sent just before the component is hidden: a later event shows that it was.
    sys.down("mlx5_0");
    second.wait_for_observation("fabric.mlx5_0/1", "port_down");
    assert!(!second.status().contains("mlx5_1"), "{}", second.status());
}

#[test]
fn a_host_without_fabric_is_silent() {
    let sys = Sys::new();
    sys.interface("eth0");
    let agent = agent(&sys);
    agent.wait_for("host.disk");
    let status = agent.status();
    assert!(!status.contains("fabric") && !status.contains("net."), "{status}");
    assert!(!sys.0.path().join("state/fabric.json").exists());
}
