//! Jobs of several hosts: where the hosts meet according to torchrun's options.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use mainstay_coord::{Credentials, Endpoint, TlsFiles};
use mainstay_group::round::NoSeat;
use mainstay_model::time::Span;

use super::Args;
use crate::torchrun;
use mainstay_launcher::group::meeting::shared_token;
use mainstay_launcher::group::plan::{HostsPlan, StoreKind, TOKEN_VARIABLE};

/// Default of torchrun, in seconds.
const JOIN_TIMEOUT_SECONDS: u64 = 600;
const LAST_CALL_SECONDS: u64 = 30;

/// A host that reboots is back within this time.
const SHRINK_AFTER_SECONDS: u64 = 60;

/// A planned round costs the unsaved work, and the start.
const GROW_AFTER_SECONDS: u64 = 300;

/// A shorter lease could expire while a host is only busy.
const MIN_LEASE_SECONDS: u64 = 3;

/// After the loss of its own leader etcd answers after some seconds.
const MIN_MANAGED_LEASE_SECONDS: u64 = 6;

/// The password of etcd's user, if the command line does not have it.
const PASSWORD: &str = "MAINSTAY_ETCD_PASSWORD";

/// Where torchrun's static rendezvous meets without `--master-port`.
pub(super) const STATIC_PORT: u16 = 29_500;

/// Where the hosts of the job meet; none for a job of one host.
///
/// # Errors
/// The options do not fit together, or one of them is not supported.
pub(super) fn hosts(args: &Args) -> anyhow::Result<Option<HostsPlan>> {
    let conf = conf(args.rdzv_conf.as_deref().unwrap_or_default())?;
    let nnodes = args.nnodes.as_deref().unwrap_or("1");
    let hosts = torchrun::nodes(nnodes).map_err(|error| anyhow::anyhow!("--nnodes: {error}"))?;
    let (least, most) = hosts;
    let meets = args.rdzv_endpoint.is_some() || args.master_addr.is_some() || args.rdzv_backend.is_some();
    if most == 1 || args.standalone || (least == 1 && !meets) {
        if let Some(rank) = args.node_rank.filter(|rank| *rank != 0) {
            bail!("--node-rank: {rank} was given, but a job of one host has only node 0");
        }
        return Ok(None);
    }
    let seconds = |key: &str, default: u64| -> anyhow::Result<Span> {
        let Some(text) = conf.get(key) else { return Ok(Span::seconds(default)) };
        let given = text.parse::<f64>().ok().filter(|seconds| seconds.is_finite() && *seconds > 0.0);
        let given = given.with_context(|| format!("--rdzv-conf {key}={text}: write a number of seconds"))?;
        Ok(Span((given * 1e9) as u64))
    };
    let etcd = args.rdzv_backend.as_deref() == Some("etcd");
    let numbered = match args.rdzv_backend.as_deref() {
        Some("static") => true,
        Some("c10d" | "etcd") => false,
        None => args.rdzv_endpoint.is_none() || args.node_rank.is_some(),
        Some("etcd-v2") => bail!(
            "--rdzv-backend etcd-v2: etcd's version 2 API is not supported; use --rdzv-backend etcd with etcd 3.4 or later"
        ),
        Some(other) => bail!("--rdzv-backend {other}: use static, c10d or etcd"),
    };
    if let Some(rank) = args.node_rank.filter(|rank| numbered && *rank >= most) {
        bail!("{}", NoSeat::TooHigh(rank, most));
    }
    if numbered && least != most {
        bail!("--nnodes {nnodes}: a range of hosts needs --rdzv-backend c10d or etcd");
    }
    let port = match (etcd, numbered) {
        (true, _) => HostsPlan::ETCD_PORT,
        (false, true) => STATIC_PORT,
        (false, false) => HostsPlan::PORT,
    };
    let endpoints = match (&args.rdzv_endpoint, numbered) {
        (Some(text), _) => {
            Endpoint::parse_list(text, port).map_err(|error| anyhow::anyhow!("--rdzv-endpoint: {error}"))?
        }
        (None, true) => {
            let host = args.master_addr.clone().unwrap_or_else(|| "127.0.0.1".to_owned());
            let port = args.master_port.filter(|port| *port != 0).unwrap_or(STATIC_PORT);
            vec![Endpoint { tls: false, host, port }]
        }
        (None, false) => bail!("--rdzv-endpoint: give HOST:PORT of one of the hosts; all hosts meet there"),
    };
    let store = store(args, &conf, &endpoints, etcd)?;
    let lease = seconds("lease", HostsPlan::LEASE.as_secs())?;
    let least_lease =
        if matches!(store, StoreKind::Managed) { MIN_MANAGED_LEASE_SECONDS } else { MIN_LEASE_SECONDS };
    if lease < Span::seconds(least_lease) {
        bail!("--rdzv-conf lease={}: write at least {least_lease} seconds", lease.as_seconds());
    }
    let is_host = match conf.get("is_host").map(String::as_str) {
        None => None,
        Some("1" | "true" | "True") => Some(true),
        Some("0" | "false" | "False") => Some(false),
        Some(other) => bail!("--rdzv-conf is_host={other}: write true or false"),
    };
    let encrypt = match conf.get("encrypt").map(String::as_str) {
        None | Some("on") => true,
        Some("off") => false,
        Some(other) => bail!("--rdzv-conf encrypt={other}: write on or off"),
    };
    let mixed = match conf.get("mixed").map(String::as_str) {
        None | Some("off") => false,
        Some("on") => true,
        Some(other) => bail!("--rdzv-conf mixed={other}: write on or off"),
    };
    let world_multiple = match conf.get("world_multiple") {
        None => 1,
        Some(text) => {
            let given = text.parse::<u32>().ok().filter(|number| *number > 0);
            given.with_context(|| format!("--rdzv-conf world_multiple={text}: write a number of ranks"))?
        }
    };
    Ok(Some(HostsPlan {
        hosts,
        endpoints,
        store,
        meeting: None,
        node_rank: numbered.then(|| args.node_rank.unwrap_or(0)),
        local_addr: args.local_addr.clone(),
        runs_once: false,
        returning: false,
        token: token(&conf)?,
        token_file: None,
        mixed,
        encrypt,
        domain: conf.get("domain").cloned(),
        is_host,
        preflight: args.preflight,
        join_timeout: seconds("join_timeout", JOIN_TIMEOUT_SECONDS)?,
        last_call: seconds("last_call_timeout", LAST_CALL_SECONDS)?,
        shrink_after: seconds("shrink_after", SHRINK_AFTER_SECONDS)?,
        grow_after: seconds("grow_after", GROW_AFTER_SECONDS)?,
        world_multiple,
        lease: Duration::from_nanos(lease.0),
    }))
}

/// The secret of the job, if there is one: on the command line, in a file or in the environment.
fn token(conf: &BTreeMap<String, String>) -> anyhow::Result<Option<String>> {
    match (conf.get("token"), conf.get("token_file")) {
        (Some(_), Some(_)) => bail!("--rdzv-conf: token and token_file exclude each other"),
        (Some(token), None) => Ok(Some(token.clone())),
        (None, Some(file)) => {
            let token = shared_token(Path::new(file));
            token.map(Some).with_context(|| format!("--rdzv-conf token_file={file}"))
        }
        (None, None) => Ok(std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty())),
    }
}

/// Who runs the store at these endpoints, and how to access it.
fn store(
    args: &Args,
    conf: &BTreeMap<String, String>,
    endpoints: &[Endpoint],
    etcd: bool,
) -> anyhow::Result<StoreKind> {
    if etcd {
        if args.rdzv_id.is_none() {
            bail!("--rdzv-id: name the job, the same on all hosts; other jobs may use the same etcd");
        }
        let file = |key: &str| conf.get(key).map(PathBuf::from);
        let tls = TlsFiles { authorities: file("cacert"), certificate: file("cert"), key: file("key") };
        let user = conf.get("user").map(|user| {
            let password = conf.get("password").cloned().or_else(|| std::env::var(PASSWORD).ok());
            let password = password
                .with_context(|| format!("--rdzv-conf user={user}: add password=… or set {PASSWORD}"));
            password.map(|password| Credentials { user: user.clone(), password })
        });
        let tls = (tls != TlsFiles::default()).then_some(tls);
        return Ok(StoreKind::Etcd { user: user.transpose()?, tls });
    }
    if endpoints.iter().any(|endpoint| endpoint.tls) {
        bail!("--rdzv-endpoint: https needs --rdzv-backend etcd");
    }
    match endpoints.len() {
        1 => Ok(StoreKind::Builtin),
        3 | 5 => Ok(StoreKind::Managed),
        other => bail!(
            "--rdzv-endpoint: {other} hosts are named; name one, or three or five that keep the job's coordination \
             between them, or use --rdzv-backend etcd with a cluster that is there"
        ),
    }
}

/// The keys of `--rdzv-conf` that have a meaning here.
const KEYS: [&str; 17] = [
    "join_timeout",
    "last_call_timeout",
    "shrink_after",
    "grow_after",
    "world_multiple",
    "token",
    "token_file",
    "mixed",
    "encrypt",
    "domain",
    "is_host",
    "lease",
    "user",
    "password",
    "cacert",
    "cert",
    "key",
];

/// Keys that only torchrun's rendezvous backends read: its command lines are accepted as they are.
const KEYS_OF_TORCHRUN: [&str; 13] = [
    "ca_cert",
    "close_timeout",
    "etcd_prefix",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "protocol",
    "rank",
    "read_timeout",
    "ssl_cert",
    "ssl_cert_key",
    "store_type",
    "timeout",
];

/// `KEY=VALUE,…`. Keys of torchrun without a meaning here are accepted.
fn conf(text: &str) -> anyhow::Result<BTreeMap<String, String>> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| {
        let (key, value) =
            pair.split_once('=').with_context(|| format!("--rdzv-conf: {pair:?}: write KEY=VALUE"))?;
        let key = key.trim();
        if !KEYS.contains(&key) && !KEYS_OF_TORCHRUN.contains(&key) {
            bail!("--rdzv-conf {key}: there is no such key; use {}", KEYS.join(", "));
        }
        Ok((key.to_owned(), value.trim().to_owned()))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(line: &str) -> Result<Option<HostsPlan>, String> {
        let line = std::iter::once("run").chain(line.split_whitespace()).chain(["/bin/sh"]);
        let line = Line::try_parse_from(line).map_err(|error| error.to_string())?;
        hosts(&line.args).map_err(|error| format!("{error:#}"))
    }

    fn plan(line: &str) -> HostsPlan {
        parsed(line).expect("a plan").expect("several hosts")
    }

    #[test]
    fn one_host_needs_no_place_to_meet() {
        for line in ["", "--nnodes 1", "--nnodes 1:4", "--nnodes 2 --standalone", "--nnodes 1 --node-rank 0"]
        {
            assert!(parsed(line).expect(line).is_none(), "{line}");
        }
        let error = parsed("--nnodes 1 --node-rank 1").expect_err("no such node");
        assert!(error.starts_with("--node-rank: 1 was given"), "{error}");
    }

    #[test]
    fn numbered_hosts_meet_at_the_master_address() {
        let numbered = plan("--nnodes 2 --node-rank 1 --master-addr a --master-port 7");
        assert_eq!(
            (numbered.hosts, numbered.endpoint(), numbered.node_rank),
            ((2, 2), "a:7".to_owned(), Some(1))
        );
        let usual = plan("--nnodes 2 --master-addr a");
        assert_eq!((usual.endpoint(), usual.node_rank), ("a:29500".to_owned(), Some(0)));
        let numbered = plan("--nnodes 2 --node-rank 1 --rdzv-backend static --rdzv-endpoint a:8");
        assert_eq!((numbered.endpoint(), numbered.node_rank), ("a:8".to_owned(), Some(1)));
    }

    #[test]
    fn elastic_hosts_meet_at_the_endpoint() {
        let elastic = plan(
            "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint [fd00::1]:7 --rdzv-conf join_timeout=5,token=x",
        );
        assert_eq!((elastic.hosts, elastic.endpoint()), ((1, 2), "[fd00::1]:7".to_owned()));
        assert_eq!((elastic.join_timeout, elastic.token.as_deref()), (Span::seconds(5), Some("x")));
        let limits = elastic.limits();
        assert_eq!((limits.shrink_after, limits.grow_after), (Span::seconds(60), Span::seconds(300)));
        assert_eq!(plan("--nnodes 2 --rdzv-endpoint a").endpoint(), "a:29400");
        assert_eq!(plan("--nnodes=1:2 --rdzv-endpoint other:7").hosts, (1, 2), "it does not start alone");
    }

    #[test]
    fn the_secret_of_the_job_may_be_in_a_file() {
        let directory = testing::tempdir().expect("a directory");
        let file = directory.path().join("token").display().to_string();
        let several = format!("--nnodes 2 --rdzv-endpoint a --rdzv-conf token_file={file}");
        let token = plan(&several).token;
        assert_eq!(token.as_ref().map(String::len), Some(64));
        assert_eq!(plan(&several).token, token, "another host reads the same");
        let error = parsed(&format!("{several},token=x")).expect_err("which one");
        assert!(error.starts_with("--rdzv-conf: "), "{error}");
    }

    #[test]
    fn the_store_follows_from_backend_and_endpoints() {
        assert!(matches!(plan("--nnodes 2 --rdzv-endpoint a").store, StoreKind::Builtin));
        let three = plan("--nnodes 3 --rdzv-endpoint a:1,b:1,c:1");
        assert!(matches!(three.store, StoreKind::Managed), "{three:?}");
        let etcd = plan(
            "--nnodes 2 --rdzv-id job --rdzv-backend etcd --rdzv-endpoint https://e1,e2:7 \
             --rdzv-conf cacert=/ca,user=u,password=p,lease=5",
        );
        assert_eq!(etcd.endpoints[0].to_string(), "https://e1:2379");
        assert_eq!(etcd.lease, Duration::from_secs(5));
        let StoreKind::Etcd { user: Some(user), tls: Some(tls) } = etcd.store else { panic!("no etcd") };
        assert_eq!((user.user.as_str(), tls.authorities), ("u", Some(PathBuf::from("/ca"))));
    }

    #[test]
    fn invalid_combinations_are_named() {
        for (line, part) in [
            ("--nnodes 0", "--nnodes"),
            ("--nnodes 3:2", "--nnodes"),
            ("--nnodes 2 --rdzv-backend c10d", "--rdzv-endpoint"),
            ("--nnodes 2 --rdzv-backend zeus --rdzv-endpoint a:1", "--rdzv-backend zeus"),
            ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:x", "--rdzv-endpoint"),
            ("--nnodes 1:2 --master-addr a", "--rdzv-backend c10d"),
            ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf join_timeout=soon", "join_timeout=soon"),
            ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf lease=1", "lease=1"),
            ("--nnodes 1:2 --rdzv-endpoint a:1 --rdzv-conf world_multiple=0", "world_multiple=0"),
            ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf encrypt=no", "encrypt=no"),
            ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf mixed=maybe", "mixed=maybe"),
            ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf join_timout=1,tokn=x", "join_timout:"),
            ("--rdzv-conf tokn=x", "tokn:"),
            ("--nnodes 2 --node-rank 5 --master-addr a", "--node-rank 5:"),
            ("--nnodes 2 --rdzv-endpoint a:1,b:1", "three or five"),
            ("--nnodes 2 --rdzv-endpoint https://a:1", "--rdzv-backend etcd"),
            ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint a:1", "--rdzv-id"),
            ("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint a:1", "etcd-v2"),
        ] {
            let error = parsed(line).expect_err(line);
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
