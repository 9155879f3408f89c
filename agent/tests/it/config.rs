//! The configuration: precedence, what is refused, and the error messages.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use mainstay_health::hardware::gpu::DeviceLimits;
use mainstay_health::host::os::HostLimits;
use mainstay_model::units::{Bytes, Period};
use mainstay_node::config::{Config, Environment, LogLevel, environment_name, keys, reference_rows};
use proptest::prelude::*;

const DOCUMENT: &str = include_str!("../../../docs/reference/configuration.md");

fn environment(variables: &[(&str, &str)], uid: u32) -> Environment {
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let mut environment = Environment::new(variables, uid);
    environment.default_file = "/nowhere/agent.toml".into();
    environment
}

/// Loads a file with this text.
fn load(text: &str, variables: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Config, String> {
    let dir = testing::tempdir().unwrap();
    let path = dir.path().join("agent.toml");
    std::fs::write(&path, text).unwrap();
    let flags: Vec<(String, String)> =
        flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Config::load(Some(&path), &environment(variables, 1000), &flags)
        .map_err(|error| error.to_string().replace(dir.path().to_str().unwrap(), ""))
}

#[test]
fn without_settings_the_defaults_apply() {
    let config = Config::load(None, &environment(&[], 0), &[]).unwrap();
    let paths = Config {
        state_dir: "/var/lib/mainstay".into(),
        socket: "/run/mainstay/agent.sock".into(),
        ..Config::default()
    };
    assert_eq!(config, paths);
}

#[test]
fn the_directories_that_systemd_made_are_the_defaults_and_explicit_paths_take_precedence() {
    let dir = testing::tempdir().unwrap();
    let configuration = format!("{}:/etc/other", dir.path().display());
    let unit = [
        ("RUNTIME_DIRECTORY", "/run/mainstay:/run/other"),
        ("STATE_DIRECTORY", "/var/lib/mainstay"),
        ("CONFIGURATION_DIRECTORY", configuration.as_str()),
        ("XDG_RUNTIME_DIR", "/run/user/1000"),
        ("HOME", "/home/a"),
    ];
    let load = || Config::load(None, &environment(&unit, 1000), &[]).unwrap();
    assert_eq!(load().socket, Path::new("/run/mainstay/agent.sock"));
    assert_eq!(load().state_dir, Path::new("/var/lib/mainstay"));
    let of_unit = environment(&[], 1000).of_shipped_unit();
    assert_eq!(of_unit.socket(), load().socket, "root and users look for the agent there");
    assert_eq!(of_unit.state_dir(), load().state_dir);

    std::fs::write(dir.path().join("agent.toml"), "socket = \"/run/a.sock\"\nlog = \"warn\"\n").unwrap();
    assert_eq!((load().socket.as_path(), load().log), (Path::new("/run/a.sock"), LogLevel::Warn));
    let flags = [("state_dir".to_owned(), "/b".to_owned())];
    let given = Config::load(None, &environment(&unit, 0), &flags).unwrap();
    assert_eq!(given.state_dir, Path::new("/b"));
    let relative = [("RUNTIME_DIRECTORY", "run"), ("STATE_DIRECTORY", "")];
    let ignored = Config::load(None, &environment(&relative, 0), &[]).unwrap();
    assert_eq!(ignored, Config::load(None, &environment(&[], 0), &[]).unwrap());
}

#[test]
fn an_empty_variable_counts_as_unset_unless_the_key_may_be_empty() {
    let file = "http = \"127.0.0.1:1\"\n[host]\ninterval = \"7s\"\n[journal]\nmax_size = \"1GiB\"\n";
    let variables = [
        ("MAINSTAY_AGENT_CONFIG", ""),
        ("MAINSTAY_AGENT_HOST_INTERVAL", ""),
        ("MAINSTAY_AGENT_JOURNAL_MAX_SIZE", " "),
        ("MAINSTAY_AGENT_GPU_ENABLED", ""),
        ("MAINSTAY_AGENT_LOG", ""),
        ("MAINSTAY_AGENT_HTTP", ""),
    ];
    let config = load(file, &variables, &[]).unwrap();
    assert_eq!(config.host.interval, Period::seconds(7));
    assert_eq!(config.journal.max_size, Bytes(1 << 30));
    assert!(config.gpu.enabled);
    assert_eq!(config.log, LogLevel::Info);
    assert_eq!(config.http, None, "an empty address is none");
}

#[test]
fn flags_weigh_more_than_the_environment_and_that_more_than_the_file() {
    let file = "log = \"error\"\n[journal]\nmax_size = \"1GiB\"\n[limits]\nhost.cpu.load_per_cpu = 4\n";
    let variables = [
        ("MAINSTAY_AGENT_LOG", "warn"),
        ("MAINSTAY_AGENT_JOURNAL_MAX_SIZE", "2GiB"),
        ("MAINSTAY_AGENT_ALLOW_UIDS", "1, 2"),
        ("MAINSTAY_AGENT_HOST_WATCH_PATHS", "/a,/b"),
        ("MAINSTAY_AGENT_HTTP", "[::1]:80"),
        ("MAINSTAY_AGENT_LIMITS_GPU_REMAPPED_ROWS", "256"),
        ("MAINSTAY_PAGE", "none of the agent's business"),
    ];
    let config = load(file, &variables, &[("log", "trace"), ("host.interval", "10s")]).unwrap();
    assert_eq!(config.log, LogLevel::Trace);
    assert_eq!(config.journal.max_size, Bytes(2 << 30));
    assert_eq!(config.journal_limits().segment_bytes, 4 << 20);
    assert_eq!(config.limits.host.cpu.load_per_cpu, 4.0);
    assert_eq!(config.limits.host.memory, HostLimits::default().memory);
    assert_eq!(config.limits.gpu, DeviceLimits { remapped_rows: 256, ..DeviceLimits::default() });
    assert_eq!(config.allow_uids, [1, 2]);
    assert_eq!(config.host.watch_paths, [PathBuf::from("/a"), PathBuf::from("/b")]);
    assert_eq!(config.http, Some("[::1]:80".parse().unwrap()));
    assert_eq!(config.listen, None);
    assert_eq!(config.host.interval, Period::seconds(10));
}

#[test]
fn each_problem_is_reported_with_its_place_and_what_would_be_right() {
    let check = |text: &str, place: &str| {
        let error = load(text, &[], &[]).unwrap_err();
        assert!(error.starts_with(&format!("{place}: ")) && error.lines().count() == 1, "{text}: {error}");
        testing::snapshot!("config", place, error);
    };
    check("\n[journal]\nmax_sise = \"1GiB\"\n", "/agent.toml:3: journal.max_sise");
    check("[jornal]\nmax_size = \"1GiB\"\n", "/agent.toml:1: jornal");
    check("max_size = \"1MiB\"\n", "/agent.toml:1: max_size");
    check("unheard_of = 1\n", "/agent.toml:1: unheard_of");
    check("journal = 5\n", "/agent.toml:1: journal");
    check("[host]\ninterval = \"5\"\n", "/agent.toml:2: host.interval");
    check("http = \"localhost\"\n", "/agent.toml:1: http");
    check("allow_uids = [\"root\"]\n", "/agent.toml:1: allow_uids");
    check("log = \"loud\"\n", "/agent.toml:1: log");
    check("[limits.host.disk]\ndegraded_inodes = 120\n", "/agent.toml:2: limits.host.disk.degraded_inodes");
    check("state_dir = \"here\"\n", "/agent.toml:1: state_dir");
    check("[kernel_log]\npath = \"kmsg\"\n", "/agent.toml:2: kernel_log.path");
    assert!(load("[kernel_log]\npath = \"journald\"\n", &[], &[]).is_ok());
    check("[limits.host.cpu]\nload_per_cpu = nan\n", "/agent.toml:2: limits.host.cpu.load_per_cpu");
    check("[limits.host.cpu_speed]\nhot_minutes = 11\n", "/agent.toml:2: limits.host.cpu_speed.hot_minutes");
    check("[limits]\nfabric.flaps = 0\n", "/agent.toml:2: limits.fabric.flaps");
    check("[limits.host.files]\nunhealthy = 50\n", "/agent.toml:2: limits.host.files.unhealthy");
    assert!(load("a = \n", &[], &[]).unwrap_err().starts_with("/agent.toml:1: "));
}

#[test]
fn keys_of_earlier_versions_are_refused_with_what_replaces_them() {
    let file = "[host.limits.cpu]\nload_per_cpu = 4\n[host.system.limits]\ncorrected_errors = 5\n\
                [host.system.limits.tables]\ndegraded = 50\n[fabric.limits]\nflaps = 4\nslow_after = 2\n\
                [hooks]\ntries = 9\n[preflight.deep]\npeer = \"1GiB\"\nunheard_of = 1\n";
    let variables =
        [("MAINSTAY_AGENT_GPU_LIMITS_REMAPPED_ROWS", "9"), ("MAINSTAY_AGENT_GPU_DETAILS_INTERVAL", "9s")];
    let error = load(file, &variables, &[("cloud.limits.leave", "1m")]).unwrap_err();
    let places: Vec<&str> = error.lines().map(place).collect();
    assert_eq!(
        places,
        [
            "/agent.toml:2: host.limits.cpu.load_per_cpu",
            "/agent.toml:4: host.system.limits.corrected_errors",
            "/agent.toml:6: host.system.limits.tables.degraded",
            "/agent.toml:8: fabric.limits.flaps",
            "/agent.toml:9: fabric.limits.slow_after",
            "/agent.toml:11: hooks.tries",
            "/agent.toml:13: preflight.deep.peer",
            "/agent.toml:14: preflight.deep.unheard_of",
            "environment variable MAINSTAY_AGENT_GPU_DETAILS_INTERVAL",
            "environment variable MAINSTAY_AGENT_GPU_LIMITS_REMAPPED_ROWS",
            "command line: cloud.limits.leave",
        ]
    );
    for now in [
        "limits.host.cpu.load_per_cpu",
        "limits.host.memory_errors.corrected_errors",
        "limits.host.files.degraded",
    ] {
        assert!(error.contains(&format!(" {now} ")), "{now}: {error}");
    }
    testing::snapshot!("config", "keys of earlier versions", error);
}

/// The part of a line of an error that names file, line and key.
fn place(line: &str) -> &str {
    let end = line.rfind(": ").unwrap();
    &line[..end]
}

#[test]
fn there_are_at_most_90_keys() {
    let keys = keys();
    let others = keys.iter().filter(|key| !key.is_limit()).count();
    // The table of limits counts as one.
    assert!(others < 90, "{others} keys and the table of limits");
}

#[test]
fn all_problems_are_reported_at_once() {
    let error = load(
        "lag = \"info\"\n[journal]\nmax_size = \"1KiB\"\n",
        &[("MAINSTAY_AGENT_JOURNAL_MAXSIZE", "1GiB"), ("MAINSTAY_AGENT_LOG", "loud")],
        &[("host.intervall", "5s")],
    )
    .unwrap_err();
    let lines: Vec<&str> = error.lines().collect();
    let begin = [
        "/agent.toml:1: lag: ",
        "environment variable MAINSTAY_AGENT_JOURNAL_MAXSIZE: ",
        "environment variable MAINSTAY_AGENT_LOG: log: ",
        "command line: host.intervall: ",
        "/agent.toml:3: journal.max_size: ",
    ];
    assert_eq!(lines.len(), begin.len(), "{error}");
    assert!(lines.iter().zip(begin).all(|(line, begin)| line.starts_with(begin)), "{error}");
    testing::snapshot!("config", "all problems at once", error);
}

#[test]
fn the_network_needs_tls_unless_the_configuration_says_otherwise() {
    let reported = |lines: &str| load(lines, &[], &[]).map(drop).map_err(|error| error.to_string());
    for key in ["listen", "http"] {
        for address in ["0.0.0.0:7130", "[::]:7130", "10.0.0.7:7130", "[::ffff:10.0.0.7]:7130"] {
            let line = format!("{key} = \"{address}\"\n");
            let refused = reported(&line).unwrap_err();
            assert!(refused.starts_with(&format!("/agent.toml:1: {key}: ")), "{refused}");
            assert_eq!(reported(&format!("{line}tls = \"/c\"\n")), Ok(()));
            assert_eq!(reported(&format!("{line}plain_tcp = true\n")), Ok(()));
            assert!(reported(&format!("{line}tls = \"c\"\n")).unwrap_err().contains(": tls: "));
        }
        for address in ["127.0.0.1:7130", "127.1.2.3:7130", "[::1]:7130", "[::ffff:127.0.0.1]:7130"] {
            assert_eq!(reported(&format!("{key} = \"{address}\"\n")), Ok(()), "{address}");
        }
    }
    testing::snapshot!(
        "config",
        "a listener of the network without TLS",
        reported("listen = \"0.0.0.0:7130\"\n").unwrap_err()
    );
}

#[test]
fn agents_need_a_token_or_tls() {
    let reported = |lines: &str| {
        let text = format!("[checkpoint]\nlisten = \"10.0.0.7:7140\"\n{lines}");
        load(&text, &[], &[]).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(reported("tls = \"/c\"\n"), Ok(()));
    assert_eq!(reported("token_file = \"/t\"\n"), Ok(()));
    assert!(reported("").unwrap_err().contains("checkpoint.token_file"));
    assert!(reported("tls = \"c\"\n").unwrap_err().contains("checkpoint.tls: "));
    for former in ["tls_certificate", "tls_key", "tls_authorities"] {
        let refused = reported(&format!("{former} = \"/c\"\n")).unwrap_err();
        assert!(
            refused.contains(&format!("checkpoint.{former}: ")) && refused.contains("checkpoint.tls"),
            "{refused}"
        );
    }
}

#[test]
fn pieces_need_as_many_other_hosts_as_there_are_of_them() {
    let reported = |lines: &str| {
        let hosts: Vec<String> = (1..=6).map(|host| format!("\"10.0.0.{host}:7140\"")).collect();
        let listed = format!("token_file = \"/t\"\npeers = [{}]\n", hosts.join(", "));
        let text = format!("[checkpoint]\nlisten = \"10.0.0.1:7140\"\n{listed}{lines}");
        load(&text, &[], &[]).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(reported("parity = \"4+1\"\nredundancy = 2\n"), Ok(()));
    let few = reported("parity = \"4+2\"\n").unwrap_err();
    assert!(few.contains("checkpoint.parity: 4+2 needs 6 "), "{few}");
    let more = reported("parity = \"4+1\"\nredundancy = 3\n").unwrap_err();
    assert!(more.contains("checkpoint.redundancy: "), "{more}");
    testing::snapshot!("config", "parity", format!("{few}\n{more}"));
    assert!(reported("parity = \"4\"\n").unwrap_err().contains("checkpoint.parity: "));
}

#[test]
fn directories_of_others_are_tables_or_lines_and_what_makes_no_sense_is_refused() {
    let lines =
        "[checkpoint]\ndurable = \"file:///d\"\nwatch = [\"llama=megatron:/ckpt\"]\ncache = [\"xla=/c\"]\n";
    let tables = "[checkpoint]\ndurable = \"file:///d\"\n[[checkpoint.watch]]\nrun = \"llama\"\nkind = \"megatron\"\n\
                  directory = \"/ckpt\"\n[[checkpoint.cache]]\nname = \"xla\"\ndirectory = \"/c\"\nquota = \"8GiB\"\n";
    let read = load(lines, &[], &[]).unwrap().checkpoint;
    assert_eq!(read, load(tables, &[], &[]).unwrap().checkpoint);
    let by_variable = [("MAINSTAY_AGENT_CHECKPOINT_WATCH", "llama=megatron:/ckpt")];
    assert_eq!(load(&lines.replace("megatron", "auto"), &by_variable, &[]).unwrap().checkpoint, read);
    for (line, reported) in [
        ("watch = [\"/ckpt\"]", "RUN=DIRECTORY"),
        ("watch = [\"r=megatrom:/ckpt\"]", "known are"),
        ("watch = [{run = \"r\", directory = \"/c\", patern = \"x\"}]", "patern"),
        ("watch = [{run = \"r\", directory = \"/c\", pattern = \"x\"}]", "{step}"),
        ("cache = [\"xla=cache\"]", "absolute"),
        ("replicator = [\"/local\"]", "replicator or cache"),
    ] {
        let error = load(&format!("[checkpoint]\n{line}\n"), &[], &[]).unwrap_err();
        assert!(error.contains(reported), "{line}: {error}");
    }
}

#[test]
fn the_file_may_be_named_by_the_environment_and_must_exist_if_it_is_named() {
    let dir = testing::tempdir().unwrap();
    let path = dir.path().join("other.toml");
    std::fs::write(&path, "log = \"debug\"").unwrap();
    let mut named = environment(&[("MAINSTAY_AGENT_CONFIG", path.to_str().unwrap())], 0);
    assert_eq!(Config::load(None, &named, &[]).unwrap().log, LogLevel::Debug);
    named.default_file = path.clone();
    named.variables.clear();
    assert_eq!(Config::load(None, &named, &[]).unwrap().log, LogLevel::Debug);
    let error = Config::load(Some(Path::new("/nowhere/a.toml")), &named, &[]).unwrap_err();
    assert!(error.to_string().starts_with("/nowhere/a.toml: "), "{error}");
    testing::snapshot!("config", "no file", error);
}

#[test]
fn paths_follow_the_user() {
    let check = |variables: &[(&str, &str)], state: &str, socket: &str| {
        let environment = environment(variables, 1000);
        assert_eq!(environment.state_dir(), Path::new(state));
        assert_eq!(environment.socket(), Path::new(socket));
    };
    check(&[], "/tmp/mainstay-1000/state", "/tmp/mainstay-1000/agent.sock");
    check(&[("HOME", "/home/a")], "/home/a/.local/state/mainstay", "/tmp/mainstay-1000/agent.sock");
    check(
        &[("HOME", "/home/a"), ("XDG_STATE_HOME", "/s"), ("XDG_RUNTIME_DIR", "/run/user/1000")],
        "/s/mainstay",
        "/run/user/1000/mainstay/agent.sock",
    );
    check(
        &[("XDG_STATE_HOME", "relative"), ("HOME", "/h")],
        "/h/.local/state/mainstay",
        "/tmp/mainstay-1000/agent.sock",
    );
}

#[test]
fn the_commented_default_is_the_default_with_and_without_its_comments() {
    let text = Config::commented_default();
    let parsed: Config = toml::from_str(&text).unwrap();
    assert_eq!(parsed, Config::default());

    // A value follows a bare #, a sentence follows # and a blank.
    let is_value = |line: &&str| line.starts_with('#') && !line.starts_with("# ");
    let values = text.lines().filter(is_value).count();
    assert_eq!(values, keys().len());
    let uncommented: String = text
        .lines()
        .map(|line| if is_value(&line) { format!("{}\n", &line[1..]) } else { format!("{line}\n") })
        .collect();
    assert_eq!(toml::from_str::<Config>(&uncommented).unwrap(), Config::default());
    // And every key is one that load() knows.
    let loaded = load(&uncommented, &[], &[]).unwrap();
    assert_eq!(loaded.host, Config::default().host);
}

#[test]
fn every_key_has_its_own_variable() {
    let keys = keys();
    let variables: BTreeSet<String> = keys.iter().map(|key| environment_name(&key.name)).collect();
    assert_eq!(variables.len(), keys.len());
    assert!(!variables.contains("MAINSTAY_AGENT_CONFIG"), "that names the file");
    assert!(keys.iter().all(|key| !key.doc.is_empty()));
}

#[test]
fn the_reference_has_every_key() {
    let missing: Vec<String> =
        reference_rows().into_iter().filter(|row| !DOCUMENT.lines().any(|line| line == row)).collect();
    assert!(missing.is_empty(), "docs/reference/configuration.md lacks these rows:\n{}", missing.join("\n"));
    let rows = DOCUMENT.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(rows, keys().len(), "the reference has rows for keys that are gone");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_makes_loading_panic(text in "[a-z_.\\[\\]=\" \n0-9#'{},]{0,80}", value in any::<String>(), key in any::<prop::sample::Index>()) {
        let _ = load(&text, &[], &[]);
        let key = &keys()[key.index(keys().len())].name;
        let _ = load("", &[(&environment_name(key), &value)], &[(key, &value)]);
    }
}
