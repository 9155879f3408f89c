//! Jobs of several hosts: how torchrun's options say where hosts meet.

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use mainstay_core::base::time::Span;

use super::Args;
use crate::cli::torchrun;
use crate::launch::hosts::HostsPlan;

/// Defaults of torchrun, in seconds.
const JOIN_TIMEOUT: u64 = 600;
const LAST_CALL: u64 = 30;

/// Where torchrun's static rendezvous meets without `--master-port`.
const STATIC_PORT: u16 = 29_500;

/// Where the hosts of the job meet; none for a job of one host.
///
/// # Errors
/// The options do not fit together, or one of them is not supported.
pub(super) fn hosts(args: &Args) -> anyhow::Result<Option<HostsPlan>> {
    let hosts = torchrun::nodes(&args.nnodes).map_err(|error| anyhow::anyhow!("--nnodes: {error}"))?;
    let (least, most) = hosts;
    let meets = args.rdzv_endpoint.is_some() || args.master_addr.is_some() || args.rdzv_backend.is_some();
    if most == 1 || args.standalone || (least == 1 && !meets) {
        if let Some(rank) = args.node_rank.filter(|rank| *rank != 0) {
            bail!("--node-rank: {rank} was given, but a job of one host has only node 0");
        }
        return Ok(None);
    }
    let conf = conf(args.rdzv_conf.as_deref().unwrap_or_default())?;
    let seconds = |key: &str, default: u64| -> anyhow::Result<Span> {
        let Some(text) = conf.get(key) else { return Ok(Span::seconds(default)) };
        let given = text.parse::<f64>().ok().filter(|seconds| seconds.is_finite() && *seconds > 0.0);
        let given = given.with_context(|| format!("--rdzv-conf {key}={text}: write a number of seconds"))?;
        Ok(Span((given * 1e9) as u64))
    };
    let numbered = match args.rdzv_backend.as_deref() {
        Some("static") => true,
        Some("c10d") => false,
        None => args.rdzv_endpoint.is_none() || args.node_rank.is_some(),
        Some(etcd @ ("etcd" | "etcd-v2")) => bail!(
            "--rdzv-backend {etcd}: not supported by this version; use c10d with the address of one of the hosts"
        ),
        Some(other) => bail!("--rdzv-backend {other}: use static or c10d"),
    };
    if numbered && least != most {
        bail!("--nnodes {}: a range of hosts needs --rdzv-backend c10d", args.nnodes);
    }
    let endpoint = match (&args.rdzv_endpoint, numbered) {
        (Some(endpoint), _) => address(endpoint, if numbered { STATIC_PORT } else { HostsPlan::PORT })?,
        (None, true) => {
            let host = args.master_addr.clone().unwrap_or_else(|| "127.0.0.1".to_owned());
            (host, args.master_port.filter(|port| *port != 0).unwrap_or(STATIC_PORT))
        }
        (None, false) => bail!("--rdzv-endpoint: give HOST:PORT of one of the hosts; all hosts meet there"),
    };
    let is_host = match conf.get("is_host").map(String::as_str) {
        None => None,
        Some("1" | "true" | "True") => Some(true),
        Some("0" | "false" | "False") => Some(false),
        Some(other) => bail!("--rdzv-conf is_host={other}: write true or false"),
    };
    Ok(Some(HostsPlan {
        hosts,
        endpoint,
        node_rank: numbered.then(|| args.node_rank.unwrap_or(0)),
        local_addr: args.local_addr.clone(),
        token: conf.get("token").cloned(),
        is_host,
        join_timeout: seconds("join_timeout", JOIN_TIMEOUT)?,
        last_call: seconds("last_call_timeout", LAST_CALL)?,
    }))
}

/// `KEY=VALUE,…`. Keys of torchrun that mean nothing here are accepted.
fn conf(text: &str) -> anyhow::Result<BTreeMap<String, String>> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| {
        let (key, value) =
            pair.split_once('=').with_context(|| format!("--rdzv-conf: {pair:?}: write KEY=VALUE"))?;
        Ok((key.trim().to_owned(), value.trim().to_owned()))
    });
    pairs.collect()
}

/// `HOST:PORT`, `HOST` or `[ADDRESS]:PORT`.
fn address(text: &str, default: u16) -> anyhow::Result<(String, u16)> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        None => match text.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') => (host, Some(port)),
            _ => (text, None),
        },
    };
    if host.is_empty() {
        bail!("--rdzv-endpoint: {text:?} names no host: write HOST:PORT");
    }
    let port = match port {
        None => default,
        Some(port) => port
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .with_context(|| format!("--rdzv-endpoint: {port:?} is no port: write HOST:PORT"))?,
    };
    Ok((host.to_owned(), port))
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

    fn of(line: &str) -> Result<Option<HostsPlan>, String> {
        let line = std::iter::once("run").chain(line.split_whitespace()).chain(["/bin/sh"]);
        let line = Line::try_parse_from(line).map_err(|error| error.to_string())?;
        hosts(&line.args).map_err(|error| format!("{error:#}"))
    }

    fn plan(line: &str) -> HostsPlan {
        of(line).expect("a plan").expect("several hosts")
    }

    #[test]
    fn one_host_needs_no_place_to_meet() {
        for line in ["", "--nnodes 1", "--nnodes 1:4", "--nnodes 2 --standalone", "--nnodes 1 --node-rank 0"]
        {
            assert!(of(line).expect(line).is_none(), "{line}");
        }
        let error = of("--nnodes 1 --node-rank 1").expect_err("no such node");
        assert!(error.starts_with("--node-rank: 1 was given"), "{error}");
    }

    #[test]
    fn numbered_hosts_meet_at_the_master_address() {
        let numbered = plan("--nnodes 2 --node-rank 1 --master-addr a --master-port 7");
        assert_eq!(
            (numbered.hosts, numbered.endpoint, numbered.node_rank),
            ((2, 2), ("a".to_owned(), 7), Some(1))
        );
        let usual = plan("--nnodes 2 --master-addr a");
        assert_eq!((usual.endpoint.1, usual.node_rank), (29_500, Some(0)));
        let numbered = plan("--nnodes 2 --node-rank 1 --rdzv-backend static --rdzv-endpoint a:8");
        assert_eq!((numbered.endpoint, numbered.node_rank), (("a".to_owned(), 8), Some(1)));
    }

    #[test]
    fn elastic_hosts_meet_at_the_endpoint() {
        let elastic = plan(
            "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint [fd00::1]:7 --rdzv-conf join_timeout=5,token=x",
        );
        assert_eq!((elastic.hosts, elastic.endpoint), ((1, 2), ("fd00::1".to_owned(), 7)));
        assert_eq!((elastic.join_timeout, elastic.token.as_deref()), (Span::seconds(5), Some("x")));
        assert_eq!(plan("--nnodes 2 --rdzv-endpoint a").endpoint.1, 29_400);
        assert_eq!(plan("--nnodes=1:2 --rdzv-endpoint other:7").hosts, (1, 2), "it does not start alone");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (line, told) in [
            ("--nnodes 0", "--nnodes"),
            ("--nnodes 3:2", "--nnodes"),
            ("--nnodes 2 --rdzv-backend c10d", "--rdzv-endpoint"),
            ("--nnodes 2 --rdzv-backend zeus --rdzv-endpoint a:1", "--rdzv-backend zeus"),
            ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:x", "--rdzv-endpoint"),
            ("--nnodes 1:2 --master-addr a", "needs --rdzv-backend c10d"),
            ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf join_timeout=soon", "join_timeout=soon"),
        ] {
            let error = of(line).expect_err(line);
            assert!(error.contains(told), "{line}: {error}");
        }
    }
}
