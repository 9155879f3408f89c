//! A rolling upgrade: launchers of other versions connect to a leader of this one. A launcher with another protocol
//! is refused with both versions; one with the same protocol joins.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mainstay_coord::{Client, Endpoint, Group, GroupOptions, Leader, Settings};
use mainstay_group::wire::{Down, Join, PROTOCOL};
use mainstay_launcher::group::streams::Token;
use mainstay_launcher::group::streams::connect;
use mainstay_launcher::group::streams::connect::FromLeader;
use tokio::sync::{mpsc, watch};

const RUN: &str = "upgrade";

/// The launcher of host 0 of two, which waits for the other.
struct Leading {
    launcher: Child,
    port: u16,
}

impl Leading {
    fn start(directory: &Path) -> Leading {
        let port = testing::free_port();
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay"));
        command.args(["run", "--no-agent", "--nnodes", "2", "--node-rank", "0", "--rdzv-id", RUN]);
        command.args(["--master-addr", "127.0.0.1", "--master-port", &port.to_string()]);
        command.args(["--rdzv-conf", "encrypt=off", "--no-python", "--log-dir"]).arg(directory.join("logs"));
        command.arg("--runtime-dir").arg(directory.join("runtime")).args(["sleep", "1000"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).current_dir(directory);
        let printed = std::fs::File::create(directory.join("said")).unwrap();
        Leading { launcher: command.stderr(printed).spawn().unwrap(), port }
    }

    /// The job in its store, as a launcher without `--rdzv-conf token` sees it.
    fn group(&self) -> Group {
        let key =
            blake3::derive_key("mainstay 2026-11 built-in coordination store", format!("\0{RUN}").as_bytes());
        let endpoint = Endpoint { tls: false, host: "127.0.0.1".to_owned(), port: self.port };
        let token = Some(blake3::Hash::from_bytes(key).to_hex().to_string());
        let client = Client::new(Settings { token, ..Settings::new(vec![endpoint]) }).unwrap();
        Group::new(client, RUN.parse().unwrap(), GroupOptions::default())
    }
}

impl Drop for Leading {
    fn drop(&mut self) {
        let launcher = nix::unistd::Pid::from_raw(self.launcher.id() as i32);
        let _ = nix::sys::signal::kill(launcher, nix::sys::signal::Signal::SIGTERM);
        let _ = self.launcher.wait();
    }
}

/// Retries until the launcher serves its store and leads.
async fn leader(group: &Group) -> Leader {
    loop {
        if let Ok(state) = group.state().await
            && let Some(leader) = state.leader
        {
            return leader;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The leader's first answer to a launcher of this version and protocol.
async fn answer(leader: &Leader, token: Token, version: &str, protocol: u32) -> Down {
    let join = Join {
        protocol,
        version: version.to_owned(),
        run_id: RUN.to_owned(),
        launcher: format!("launcher-{version}"),
        host: format!("host-{version}"),
        node_rank: Some(1),
        ranks: 1,
        hosts: (2, 2),
        ..Join::default()
    };
    let (_join, join) = watch::channel(join);
    let (sender, mut events) = mpsc::channel(64);
    tokio::spawn(connect::keep(leader.addresses.clone(), token, join, sender));
    let mut open = None;
    loop {
        match events.recv().await.expect("news") {
            // The connection ends when this is dropped.
            FromLeader::Connected { to } => open = Some(to),
            FromLeader::Received { down: Down::Beat { .. } | Down::Waiting { .. }, .. } => {}
            FromLeader::Received { down, .. } => return down,
            FromLeader::Lost { why, .. } => panic!("{why}, after {open:?}"),
        }
    }
}

#[tokio::test]
async fn a_launcher_of_another_protocol_is_refused_by_name_and_one_of_the_same_takes_part() {
    let directory = testing::tempdir().unwrap();
    let leading = Leading::start(directory.path());
    let group = leading.group();
    let leader = leader(&group).await;
    let secret = format!("\0{}", group.secret().await.unwrap());
    let token = Token::new(RUN, Some(&secret));

    let mut refused = Vec::new();
    for (version, protocol) in [("9.0.0", PROTOCOL + 1), ("0.0.1", PROTOCOL - 1)] {
        let Down::Refused { why, .. } = answer(&leader, token.clone(), version, protocol).await else {
            panic!("protocol {protocol} was not refused")
        };
        let named = [format!(" {version} "), format!(" {protocol} ")];
        assert!(named.iter().all(|named| why.contains(named)), "{why}");
        let way_out = why.rsplit_once([';', ':']).map_or(why.as_str(), |(_, way_out)| way_out.trim());
        testing::snapshot!("hosts_upgrade", "the way out of another protocol", way_out);
        refused.push((format!("host-{version} (127.0.0.1)"), why));
    }

    let served = answer(&leader, token, "0.99.0", PROTOCOL).await;
    let Down::Welcome { seat, .. } = served else { panic!("{served:?}") };
    assert_eq!((seat.group_rank, seat.world_size), (1, 2));

    drop(leading);
    let printed = std::fs::read_to_string(directory.path().join("said")).unwrap();
    for (host, why) in refused {
        let is_it = |line: &str| line.contains(&host) && line.ends_with(&why);
        assert!(printed.lines().any(is_it), "{host}: {why}\n{printed}");
    }
}
