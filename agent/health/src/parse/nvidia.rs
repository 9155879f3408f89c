//! Messages of NVIDIA's drivers: `NVRM: Xid …` of GPUs, `SXid …` of switches.
//!
//! Parses all known forms of the drivers of the last ten years: with and without process, of a MIG instance, with the required reset,
//! of NVLink 5, with the recovery action.

use mainstay_model::id::Pid;
use mainstay_model::kernel::{KernelClass, KernelReport, LinkRegisters, LogPlace, NvlinkError, Sxid, Xid};
use mainstay_model::pci::PciAddress;

/// Parses an XID: `NVRM: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus.`
pub fn xid(message: &str) -> Option<Xid> {
    let rest = message.strip_prefix("NVRM: ")?.trim_start().strip_prefix("Xid ")?;
    let (place, rest) = rest.trim_start().strip_prefix('(')?.split_once(')')?;
    let mut words = place.split_whitespace();
    let gpu = PciAddress::parse(words.next()?)?;
    let mig_instance = place.split_once("GPU-I:").and_then(|(_, instance)| {
        let digits: &str = instance.trim_start().split(|letter: char| !letter.is_ascii_hexdigit()).next()?;
        u32::from_str_radix(digits, 16).ok()
    });
    let (code, text) = leading_number(rest.strip_prefix(':')?.trim_start())?;
    let (pid, process, text) = who(text.trim_start_matches([',', ' ']));
    Some(Xid {
        gpu,
        code,
        mig_instance,
        pid,
        process,
        reset_needed: yes_or_no(text, " RST:"),
        drain_and_reset_needed: yes_or_no(text, "D-RST:"),
        recovery_action: if code == 154 { recovery_action(text) } else { None },
        nvlink: if (144..=150).contains(&code) { nvlink(text) } else { None },
        link_registers: if code == 74 { link_registers(text) } else { None },
        caused_by: text
            .split_once("caused by previous Xid ")
            .and_then(|(_, code)| leading_number(code))
            .map(|(code, _)| code),
        by_event: false,
        place: LogPlace::default(),
    })
}

/// Parses an SXID: `nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up`.
pub fn sxid(message: &str) -> Option<Sxid> {
    if !message.starts_with("nvidia-nvswitch") {
        return None;
    }
    let (switch, rest) = message.split_once(": SXid (").filter(|(switch, _)| switch.len() <= 32)?;
    let (address, rest) = rest.split_once(')')?;
    let (code, text) = leading_number(rest.strip_prefix(':')?.trim_start())?;
    let text = text.trim_start_matches([',', ' ']);
    // Later lines give details of the same error. The first line has the severity.
    if text.starts_with("Severity ") || text.starts_with("Data {") {
        return None;
    }
    Some(Sxid {
        switch: switch.to_owned(),
        address: PciAddress::parse(address)?,
        code,
        fatal: fatal_word(text),
        link: link(text),
        place: LogPlace::default(),
    })
}

/// Parses the driver's other messages: a GPU off the bus without an XID, a GPU that cannot be initialized, and the start of the driver.
pub fn other(message: &str) -> Option<KernelReport> {
    let text = message.strip_prefix("NVRM: ")?;
    if text.starts_with("loading NVIDIA ") {
        return Some(report(KernelClass::GpuDriverLoaded, None));
    }
    let class = if text.contains("requiring os reboot to recover") {
        KernelClass::GpuDriverFatal
    } else if text.contains("fallen off the bus") {
        KernelClass::GpuOffBus
    } else if text.contains("RmInitAdapter failed") || text.contains("rm_init_adapter failed") {
        KernelClass::GpuInitFailed
    } else {
        return None;
    };
    // Without an address it cannot be attributed to a GPU.
    Some(report(class, gpu_named(text)))
}

/// The GPU of a line that continues in later lines: `NVRM: The NVIDIA GPU 0000:0b:00.0 (PCI ID: 10de:2330)`.
pub fn preface(message: &str) -> Option<String> {
    let text = message.strip_prefix("NVRM: ")?;
    text.starts_with("The NVIDIA GPU ").then(|| gpu_named(text)).flatten()
}

fn gpu_named(text: &str) -> Option<String> {
    let address =
        text.split_whitespace().find_map(|word| PciAddress::parse(word.trim_end_matches([':', ',', '.'])));
    address.map(|address| address.to_string())
}

fn report(class: KernelClass, subject: Option<String>) -> KernelReport {
    KernelReport { class, subject, pid: None, process: None, cgroup: None, place: LogPlace::default() }
}

fn leading_number(text: &str) -> Option<(u32, &str)> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    Some((digits.parse().ok()?, rest))
}

/// `pid=12, name=python, rest`. The driver writes '<unknown>' for an unknown process; drivers before 455 write no process at all.
fn who(text: &str) -> (Option<Pid>, Option<String>, &str) {
    let Some(rest) = text.strip_prefix("pid=") else { return (None, None, text) };
    let (pid, rest) = rest.split_once(',').unwrap_or((rest, ""));
    let pid = pid.trim().trim_matches('\'').parse().ok().filter(|pid| *pid > 0).map(Pid);
    let rest = rest.trim_start();
    let Some(named) = rest.strip_prefix("name=") else { return (pid, None, rest) };
    let (name, rest) = named.split_once(',').unwrap_or((named, ""));
    let name = name.trim().trim_matches('\'');
    let name = (!name.is_empty() && name != "<unknown>").then(|| name.to_owned());
    (pid, name, rest.trim_start())
}

fn yes_or_no(text: &str, key: &str) -> Option<bool> {
    let (_, value) = text.split_once(key)?;
    match value.trim_start() {
        value if value.starts_with("Yes") => Some(true),
        value if value.starts_with("No") => Some(false),
        _ => None,
    }
}

/// `GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)`.
pub fn recovery_action(text: &str) -> Option<u32> {
    const WORDS: [(&str, u32); 5] =
        [("None", 0), ("GPU Reset", 1), ("Node Reboot", 2), ("Drain P2P", 3), ("Drain and Reset", 4)];
    let (_, to) = text.split_once(" to ")?;
    let to = to.trim_start();
    let number = match to.strip_prefix("0x") {
        Some(digits) => leading_hex(digits),
        None => leading_number(to).map(|(number, _)| number),
    };
    let named = || {
        let word = to.trim_start_matches('(');
        WORDS.iter().find(|(name, _)| word.starts_with(name)).map(|(_, number)| *number)
    };
    number.or_else(named)
}

fn leading_hex(text: &str) -> Option<u32> {
    let end = text.find(|letter: char| !letter.is_ascii_hexdigit()).unwrap_or(text.len());
    u32::from_str_radix(&text[..end], 16).ok()
}

fn is_separator(letter: char) -> bool {
    letter.is_whitespace() || matches!(letter, ',' | '(' | ')' | '[' | ']')
}

/// `NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 …)`. Drivers before 575 write less in brackets, and a line may be
/// truncated; then only the unit and the severity are known.
fn nvlink(text: &str) -> Option<NvlinkError> {
    let unit = text.split(is_separator).next().filter(|unit| unit.contains('_') || unit.len() > 2)?;
    if !unit
        .bytes()
        .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'/'))
    {
        return None;
    }
    let (words, numbers) = text.split_once(['(', '[']).unwrap_or((text, ""));
    let mut numbers = numbers.split(is_separator).filter_map(|word| leading_hex(word.strip_prefix("0x")?));
    let (intrinfo, status) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    Some(NvlinkError { unit: unit.to_owned(), fatal: fatal_word(words), link: link(words), intrinfo, status })
}

/// `NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)`: the link and its registers. A truncated line has
/// fewer.
fn link_registers(text: &str) -> Option<LinkRegisters> {
    let (_, on) = text.split_once(" link ")?;
    let (link, rest) = leading_number(on.trim_start())?;
    let inside = rest.trim_start().strip_prefix('(').unwrap_or("");
    let inside = inside.split(')').next().unwrap_or("");
    let registers =
        inside.split(',').map_while(|word| leading_hex(word.trim().strip_prefix("0x")?)).take(7).collect();
    Some(LinkRegisters { link, registers })
}

fn fatal_word(text: &str) -> Option<bool> {
    text.split(|letter: char| letter.is_whitespace() || letter == ',').find_map(|word| {
        let is = |name: &str| word.eq_ignore_ascii_case(name);
        if is("fatal") {
            Some(true)
        } else if is("non-fatal") || is("nonfatal") || is("non_fatal") {
            Some(false)
        } else {
            None
        }
    })
}

/// `Link 08`; -1 means no link.
fn link(text: &str) -> Option<u32> {
    let (_, number) = text.split_once("Link ")?;
    leading_number(number.trim_start()).map(|(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(line: &str) -> Xid {
        xid(line).unwrap_or_else(|| panic!("no XID: {line}"))
    }

    #[test]
    fn process_and_name_are_parsed_if_the_driver_knows_them() {
        let check = |line: &str, code, pid: Option<i32>, name: Option<&str>| {
            let xid = read(line);
            assert_eq!((xid.code, xid.pid, xid.process.as_deref()), (code, pid.map(Pid), name), "{line}");
        };
        check(
            "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            79,
            None,
            None,
        );
        check("NVRM: Xid (PCI:0000:01:00): 63, pid=1896, Row Remapper: New row marked", 63, Some(1896), None);
        check(
            "NVRM: Xid (PCI:0000:01:00): 13, pid=7, name=python3.11, Graphics",
            13,
            Some(7),
            Some("python3.11"),
        );
        check("NVRM: Xid (PCI:0000:01:00): 43, Ch 00000008", 43, None, None);
        check("NVRM: Xid (0000:03:00): 14, Channel 00000001", 14, None, None);
        check("NVRM: Xid (PCI:0000:01:00): 79", 79, None, None);
        check("NVRM: Xid (PCI:0000:01:00): 31, pid=3, name=", 31, Some(3), None);
        check("NVRM: Xid (PCI:0000:01:00): 999, something new", 999, None, None);
    }

    #[test]
    fn a_gpu_instance_is_read() {
        let xid = read(
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, name=python, Contained: CE User Channel (0x9). RST: No, D-RST: Yes",
        );
        assert_eq!(xid.gpu.to_string(), "0000:01:00");
        assert_eq!(xid.mig_instance, Some(5));
        assert_eq!((xid.reset_needed, xid.drain_and_reset_needed), (Some(false), Some(true)));
        assert_eq!(read("NVRM: Xid (PCI:0000:01:00 GPU-I: 0a CI:01): 31, x").mig_instance, Some(10));
    }

    #[test]
    fn the_recovery_action_is_parsed() {
        let line = |to: &str| {
            format!(
                "NVRM: Xid (PCI:0000:01:00): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to {to}"
            )
        };
        assert_eq!(read(&line("0x2 (Node Reboot Required)")).recovery_action, Some(2));
        assert_eq!(read(&line("0x0 (None)")).recovery_action, Some(0));
        assert_eq!(read(&line("(GPU Reset Required)")).recovery_action, Some(1));
        assert_eq!(read(&line("nothing")).recovery_action, None);
    }

    #[test]
    fn an_nvlink_error_is_parsed() {
        let xid = read(
            "NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Nonfatal XC1 i0 Link -1 (0x00000082 0x00000100 0x0 0x0)",
        );
        let expected = NvlinkError {
            unit: "RLW_REMAP".into(),
            fatal: Some(false),
            link: None,
            intrinfo: 0x82,
            status: 0x100,
        };
        assert_eq!(xid.nvlink, Some(expected));
        assert_eq!(read("NVRM: Xid (PCI:0018:01:00): 145, (nothing of this)").nvlink, None);
        let registers_of = |rest: &str| {
            let error = read(&format!("NVRM: Xid (PCI:0018:01:00): {rest}")).nvlink.unwrap();
            (error.fatal, error.link, error.intrinfo)
        };
        assert_eq!(
            registers_of("149, NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]"),
            (Some(true), Some(1), 0xa)
        );
        assert_eq!(
            registers_of("149, pid=7, name=a, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x0)"),
            (Some(true), Some(9), 0x0255_25c6)
        );
        assert_eq!(registers_of("145, RLW_REMAP Nonfatal XC0 i0 Lin"), (Some(false), None, 0));
    }

    #[test]
    fn link_registers_of_earlier_generations_are_parsed() {
        let registers_of =
            |rest: &str| read(&format!("NVRM: Xid (PCI:0003:00:00): 74, {rest}")).link_registers;
        let whole = registers_of("pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)").unwrap();
        assert_eq!((whole.link, whole.registers), (14, vec![0, 0, 0x10000, 0, 0, 0, 0]));
        let cut = registers_of("NVLink: fatal error detected on link 2(0x100, 0x").unwrap();
        assert_eq!((cut.link, cut.registers), (2, vec![0x100]));
        assert_eq!(
            registers_of("pid=<n/a>, name=<unknown>, NVLink: fatal error detected on link 2")
                .unwrap()
                .registers,
            [0u32; 0]
        );
        assert_eq!(registers_of("something else"), None);
    }

    #[test]
    fn the_previous_xid_is_parsed() {
        assert_eq!(
            read("NVRM: Xid (PCI:0018:01:00): 45, pid=1, name=a, Ch 1, caused by previous Xid 145").caused_by,
            Some(145)
        );
    }

    #[test]
    fn the_severity_of_a_switch_error_is_parsed() {
        let read = sxid("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)").unwrap();
        assert_eq!(
            (read.switch.as_str(), read.code, read.fatal, read.link),
            ("nvidia-nvswitch3", 28006, Some(false), Some(46))
        );
        for detail in
            ["Data {0x00000001, 0x00000000}", "Severity 0 Engine instance 46 Sub-engine instance 00"]
        {
            assert_eq!(sxid(&format!("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, {detail}")), None);
        }
        let unsaid =
            sxid("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 10003, Host unhandled interrupt").unwrap();
        assert_eq!((unsaid.fatal, unsaid.link), (None, None));
    }

    #[test]
    fn a_gpu_off_the_bus_is_noticed_without_an_xid() {
        let off = other("NVRM: GPU 0000:0a:00.0: GPU has fallen off the bus.").unwrap();
        assert_eq!((off.class, off.subject.as_deref()), (KernelClass::GpuOffBus, Some("0000:0a:00")));
        let joined = other("NVRM: The NVIDIA GPU 0000:0b:00.0 (PCI ID: 10de:2330) installed in this system has fallen off the bus and is not responding to commands.").unwrap();
        assert_eq!(joined.subject.as_deref(), Some("0000:0b:00"));
        let first = "NVRM: The NVIDIA GPU 0000:0b:00.0 (PCI ID: 10de:2330)";
        assert_eq!((other(first), preface(first).as_deref()), (None, Some("0000:0b:00")));
    }

    #[test]
    fn a_gpu_that_does_not_start_is_noticed() {
        for line in [
            "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2393)",
            "NVRM: GPU 0000:3b:00.0: rm_init_adapter failed, device minor number 0",
        ] {
            let failed = other(line).unwrap();
            assert_eq!(
                (failed.class, failed.subject.as_deref()),
                (KernelClass::GpuInitFailed, Some("0000:3b:00"))
            );
        }
        assert_eq!(other("NVRM: RmInitAdapter failed! (0x26:0xffff:1290)").unwrap().subject, None);
        for calm in [
            "NVRM: GPU 0000:3b:00.0: GPU serial number is 1320000000000.",
            "NVRM: A GPU crash dump has been created. If possible, please run",
            "NVRM: GPU at PCI:0000:3b:00: GPU-12345678-1234-5678-9abc-def012345678",
            "NVRM: GPU Board Serial Number: 1320000000000",
            "NVRM: _kgspLogXid119: ********************************* GSP Timeout **********************************",
        ] {
            assert_eq!((xid(calm), other(calm)), (None, None), "{calm}");
        }
    }

    #[test]
    fn quoted_and_unknown_processes_are_parsed() {
        let quoted = read("NVRM: Xid (PCI:0000:3b:00): 31, pid='4711', name='python3', Ch 00000008");
        assert_eq!((quoted.pid, quoted.process.as_deref()), (Some(Pid(4711)), Some("python3")));
        let unknown = read("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, off");
        assert_eq!((unknown.pid, unknown.process), (None, None));
    }

    #[test]
    fn similar_lines_are_no_xid() {
        for line in [
            "",
            "NVRM: Xid",
            "NVRM: Xid (PCI:0000:01:00: 79",
            "NVRM: Xid (PCI:zz): 79",
            "NVRM: Xid (PCI:0000:01:00): , pid=1",
            "NVRM: Xid (PCI:0000:01:00): 99999999999",
            "python[1]: NVRM: Xid (PCI:0000:01:00): 79",
            "NVRM: GPU at PCI:0000:01:00: GPU-1234",
        ] {
            assert_eq!(xid(line), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn parses_any_text(tail in any::<String>(), head in "(NVRM: Xid \\(PCI:0000:01:00( GPU-I:)?|nvidia-nvswitch0: SXid \\(|NVRM: )?") {
            let line = format!("{head}{tail}");
            let _ = (xid(&line), sxid(&line), other(&line));
        }

        #[test]
        fn every_code_of_every_gpu_is_read(domain in 0u32..0x10000, bus: u8, device in 0u8..32, code in 1u32..2000, pid in 1i32.., name in "[a-z0-9_.-]{1,15}") {
            let line = format!("NVRM: Xid (PCI:{domain:04x}:{bus:02x}:{device:02x}): {code}, pid={pid}, name={name}, text");
            let xid = read(&line);
            prop_assert_eq!(xid.gpu, PciAddress { domain, bus, device });
            prop_assert_eq!((xid.code, xid.pid, xid.process), (code, Some(Pid(pid)), Some(name)));
        }
    }
}
