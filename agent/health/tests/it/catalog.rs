//! The compiled-in catalogs: each entry's example is its test.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;

use mainstay_health::hardware::catalog::{
    Catalog, CatalogError, FaultOrigin, KernelFile, NvlinkFile, NvlinkMeaning, OverrideFile, RegisterMeaning,
    SxidFile, XidFile,
};
use mainstay_health::parse::kmsg::Record;
use mainstay_health::parse::log::LogReader;
use mainstay_health::parse::nvidia;
use mainstay_model::entry::Fact;
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::kernel::{KernelClass, LinkRegisters, NvlinkError};
use mainstay_model::time::Mono;

fn files() -> (XidFile, SxidFile, KernelFile, NvlinkFile) {
    (
        toml::from_str(include_str!("../../../catalog/hardware/xid.toml")).unwrap(),
        toml::from_str(include_str!("../../../catalog/hardware/sxid.toml")).unwrap(),
        toml::from_str(include_str!("../../../catalog/hardware/kernel.toml")).unwrap(),
        toml::from_str(include_str!("../../../catalog/hardware/nvlink.toml")).unwrap(),
    )
}

fn catalog() -> Catalog {
    let (xid, sxid, kernel, nvlink) = files();
    Catalog::new(xid, sxid, kernel, nvlink).unwrap()
}

fn read(line: &str) -> Option<Fact> {
    let text = format!("4,1,1000,-;{line}\n SUBSYSTEM=pci\n");
    LogReader::default().read(Mono(5), &Record::parse(&text), 2).map(|(_, fact)| fact)
}

#[test]
fn each_example_is_parsed_as_its_own_entry() {
    let (xid, sxid, kernel, _) = files();
    for meaning in xid.xid {
        let Some(Fact::Xid(xid)) = read(&meaning.example) else { panic!("no XID: {}", meaning.example) };
        assert!(meaning.ids.contains(&xid.code), "{}", meaning.example);
        assert_eq!(xid.place.line, meaning.example);
    }
    for meaning in sxid.sxid {
        let Some(Fact::Sxid(sxid)) = read(&meaning.example) else { panic!("no SXID: {}", meaning.example) };
        assert!(meaning.ids.contains(&sxid.code), "{}", meaning.example);
        assert!(sxid.fatal.is_some() && sxid.link.is_some(), "{}", meaning.example);
    }
    for meaning in kernel.kernel {
        let Some(Fact::KernelReport(report)) = read(&meaning.example) else {
            panic!("no report: {}", meaning.example)
        };
        assert_eq!(report.class, meaning.class, "{}", meaning.example);
    }
}

#[test]
fn xids_of_programs_leave_the_gpu_healthy() {
    let (xid, _, _, _) = files();
    for meaning in xid.xid {
        if matches!(meaning.blame, FaultOrigin::Application | FaultOrigin::None) {
            assert_eq!(meaning.state, HealthState::Healthy, "{:?}", meaning.ids);
        }
    }
    for code in [13, 31, 43, 45, 68] {
        assert_eq!(catalog().xid(code).unwrap().blame, FaultOrigin::Application, "{code}");
    }
}

#[test]
fn unhealthy_entries_recommend_at_least_a_device_reset() {
    let (xid, sxid, kernel, _) = files();
    for meaning in xid.xid.iter().chain(&sxid.sxid) {
        let serious = meaning.state == HealthState::Unhealthy;
        assert!(!serious || meaning.action >= RecommendedAction::ResetDevice, "{:?}", meaning.ids);
    }
    for meaning in kernel.kernel {
        let serious = meaning.state == HealthState::Unhealthy;
        assert!(!serious || meaning.action >= RecommendedAction::ResetDevice, "{:?}", meaning.class);
    }
}

#[test]
fn codes_that_entries_refer_to_exist() {
    let catalog = catalog();
    for code in 1..=173 {
        let Some(meaning) = catalog.xid(code) else { continue };
        for other in meaning.echo_of.iter().chain(&meaning.cancels) {
            assert!(catalog.xid(*other).is_some(), "{code} names {other}");
        }
    }
}

#[test]
fn every_nvlink_rule_matches_in_both_layouts() {
    let (_, _, _, nvlink) = files();
    let rules = catalog().nvlink_rules().to_vec();
    let mut units = BTreeSet::new();
    for rule in nvlink.rule {
        for pattern in [&rule.v1, &rule.v2] {
            let intrinfo = u32::from_str_radix(&pattern.replace('-', "0"), 2).unwrap();
            let unit = rule.unit.clone();
            let error = NvlinkError { unit, fatal: None, link: None, intrinfo, status: rule.status };
            let meaning = NvlinkMeaning::from_rules(&rules, rule.xid, &error);
            assert!(
                meaning.known && meaning.fatal >= rule.fatal && meaning.action >= rule.action,
                "{rule:?}"
            );
        }
        units.insert(rule.unit);
    }
    assert!(units.len() > 15);
}

/// NVIDIA's table has 94 rules: 45 to ignore, 8 that the XID 154 logged with them decides, 41 that need a reset. Two
/// of those to ignore are called fatal.
#[test]
fn the_nvlink_table_is_complete() {
    let (_, _, _, nvlink) = files();
    let count = |matches: &dyn Fn(&mainstay_health::hardware::catalog::NvlinkRule) -> bool| {
        nvlink.rule.iter().filter(|rule| matches(rule)).count()
    };
    assert_eq!(nvlink.rule.len(), 94);
    assert_eq!(count(&|rule| rule.action == RecommendedAction::None), 45);
    assert_eq!(count(&|rule| rule.action == RecommendedAction::None && rule.fatal), 2);
    assert_eq!(count(&|rule| rule.ask154), 8);
    assert_eq!(count(&|rule| rule.action == RecommendedAction::ResetDevice && rule.fatal), 41);
    let by_xid = |xid| count(&|rule| rule.xid == xid);
    assert_eq!([144, 145, 146, 147, 148, 149, 150].map(by_xid), [6, 33, 20, 2, 1, 31, 1]);
}

#[test]
fn nvlink_registers_are_decoded() {
    let decoded = |registers: [u32; 7]| {
        let line = LinkRegisters { link: 14, registers: registers.to_vec() };
        RegisterMeaning::from_rules(catalog().register_rules(), &line)
            .map(|meaning| (meaning.names, meaning.action, meaning.support_from))
    };
    assert_eq!(decoded([1 << 23, 0, 0, 0, 0, 0, 0]).unwrap().1, RecommendedAction::None);
    let (names, action, support_from) = decoded([0x10000, 0, 0, 0, 0, 0, 0]).unwrap();
    assert_eq!((names.len(), action, support_from), (1, RecommendedAction::ResetDevice, Some(2)));
    testing::snapshot!("reasons", "catalog: nvlink registers are decoded", names[0]);
    let (names, _, support_from) = decoded([0, 0, 0x10004, 0, 0, 0, 0]).unwrap();
    assert_eq!((names.len(), support_from), (2, Some(2)));
    assert_eq!(decoded([0, 0, 1 << 13, 0, 0, 0, 0]).unwrap().1, RecommendedAction::ContactSupport);
    assert_eq!(decoded([0, 0, 0, 0, 1 << 26, 0, 0]).unwrap().1, RecommendedAction::None);
    assert_eq!(decoded([1 << 31, 0xffff_ffff, 0, 0, 0, 0, 0]), None);
}

#[test]
fn entries_of_a_site_override_and_extend_the_catalog() {
    let file: OverrideFile = toml::from_str(
        r#"
        [[xid]]
        ids = [79, 9001]
        name = "ours"
        meaning = "ours"
        blame = "device"
        state = "UNHEALTHY"
        action = "REPLACE_NODE"

        [[kernel]]
        class = "aer_corrected"
        name = "ours"
        meaning = "ours"
        state = "DEGRADED"
        action = "NONE"
        count = 7
        "#,
    )
    .unwrap();
    let catalog = catalog().overridden("/etc/ours.toml", file).unwrap();
    for code in [79, 9001] {
        let ours = catalog.xid(code).unwrap();
        assert_eq!((ours.name.as_str(), ours.origin.as_deref()), ("ours", Some("/etc/ours.toml")));
    }
    assert_eq!(catalog.kernel(KernelClass::AerCorrected).unwrap().count, 7);
    assert_eq!(catalog.xid(48).unwrap().origin, None);
}

#[test]
fn an_error_in_an_override_names_its_place() {
    let entry = |rest: &str| {
        format!(
            "[[xid]]\nids = [79]\nname = \"a\"\nmeaning = \"a\"\nblame = \"device\"\nstate = \"UNHEALTHY\"\naction = \"REBOOT_NODE\"\n{rest}"
        )
    };
    let refused = toml::from_str::<OverrideFile>(&entry("colour = 1\n")).unwrap_err().to_string();
    assert!(refused.contains("line 8") && refused.contains("colour"), "{refused}");
    let file: OverrideFile =
        toml::from_str(&entry("example = \"NVRM: Xid (PCI:0000:01:00): 48, x\"\n")).unwrap();
    let refused = catalog().overridden("x", file).unwrap_err().to_string();
    testing::snapshot!("reasons", "catalog: an error in an override names its place", refused);
    let file: OverrideFile = toml::from_str(&format!("{}{}", entry(""), entry(""))).unwrap();
    assert_eq!(catalog().overridden("x", file).unwrap_err(), CatalogError::Twice { kind: "XID", code: 79 });
}

#[test]
fn the_severity_in_the_line_overrides_the_table() {
    let rules = catalog().nvlink_rules().to_vec();
    let judge = |line: &str| {
        let xid = nvidia::xid(line).unwrap();
        NvlinkMeaning::from_rules(&rules, xid.code, &xid.nvlink.unwrap())
    };
    let fatal = judge(
        "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x0)",
    );
    assert_eq!((fatal.fatal, fatal.action, fatal.known), (true, RecommendedAction::ResetDevice, true));
    let calm = judge(
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000082 0x00000080 0x0)",
    );
    assert_eq!((calm.fatal, calm.known), (false, true));
    assert!(calm.action < RecommendedAction::ResetDevice);
    let unknown =
        judge("NVRM: Xid (PCI:0018:01:00): 150, MSE_NEW Fatal XC0 i0 Link 00 (0xffffffff 0x12345678)");
    assert_eq!((unknown.known, unknown.action), (false, RecommendedAction::ResetDevice));
}

#[test]
fn an_invalid_catalog_is_refused() {
    let (mut xid, sxid, kernel, nvlink) = files();
    let again = xid.xid[0].clone();
    xid.xid.push(again);
    let refused = Catalog::new(xid, sxid, kernel, nvlink).unwrap_err();
    assert_eq!(refused, CatalogError::Twice { kind: "XID", code: 8 });

    let (xid, sxid, mut kernel, nvlink) = files();
    kernel.kernel.pop();
    let refused = Catalog::new(xid, sxid, kernel, nvlink).unwrap_err();
    assert_eq!(refused, CatalogError::Class { class: "segfault", times: 0 });

    let (xid, sxid, kernel, mut nvlink) = files();
    nvlink.rule[2].v1 = "01".into();
    let refused = Catalog::new(xid, sxid, kernel, nvlink).unwrap_err();
    assert_eq!(refused, CatalogError::Pattern { number: 3, pattern: "01".into() });
}

#[test]
fn the_reference_lists_every_entry() {
    let document = include_str!("../../../../docs/reference/checks.md");
    let (xid, sxid, kernel, _) = files();
    let codes = xid.xid.iter().chain(&sxid.sxid).map(|meaning| (&meaning.name, meaning.action));
    let classes = kernel.kernel.iter().map(|meaning| (&meaning.name, meaning.action));
    for (name, action) in codes.chain(classes) {
        let action = serde_json::to_value(action).unwrap();
        let is_it =
            |line: &str| line.contains(&format!("| {name} |")) && line.contains(action.as_str().unwrap());
        assert!(document.lines().any(is_it), "docs/reference/checks.md lacks {name}");
    }
}
