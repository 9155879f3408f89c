//! Three hosts run an etcd cluster. Here each host is a port of this machine.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use mainstay_coord::{Client, Endpoint, Lease, Managed, ManagedOptions, ManagedState, Settings, WatchEvent};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use testing::free_port;

use crate::stores::{endpoint, has_etcd};

/// A free port whose next port is free too.
fn pair() -> Endpoint {
    loop {
        let (port, next) = (free_port(), free_port());
        if next == port + 1 {
            return endpoint(port);
        }
    }
}

fn options(endpoints: &[Endpoint], me: usize, folder: &Path) -> ManagedOptions {
    let directory = folder.join(me.to_string());
    ManagedOptions { me: Some(me), ..ManagedOptions::new(endpoints.to_vec(), "job", directory) }
}

fn pid(managed: &Managed) -> u32 {
    match *managed.state().borrow() {
        ManagedState::Running { pid, .. } => pid,
        ref other => panic!("{other:?}"),
    }
}

fn is_there(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Retries a write until it succeeds. If the lost process was etcd's leader, the others first elect one.
async fn write(client: &Client, value: &[u8], lease: &Lease) {
    while let Err(error) = client.put("/k", value, Some(lease.id())).await {
        assert!(error.is_unreachable(), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hosts_serve_despite_the_loss_of_one_and_leave_no_processes() {
    if !has_etcd() {
        return;
    }
    let folder = testing::tempdir().unwrap();
    let endpoints = [pair(), pair(), pair()];
    let client = Client::new(Settings::new(endpoints.to_vec())).unwrap();
    let mut hosts = Vec::new();
    for me in 0..2 {
        hosts.push(Managed::start(options(&endpoints, me, folder.path())).await.unwrap());
    }
    // Two of three are enough; the third starts late.
    hosts[0].serves(&client).await.unwrap();
    client.put("/k", b"1", None).await.unwrap();
    hosts.push(Managed::start(options(&endpoints, 2, folder.path())).await.unwrap());

    let lease = client.lease(Duration::from_secs(10)).await.unwrap();
    let mut watch = client.watch("/k", Some(1));
    assert!(matches!(watch.next().await.unwrap(), WatchEvent::Put { .. }));

    // Each process in turn is killed and restarted with its data.
    for (n, host) in hosts.iter().enumerate() {
        let (mut state, killed) = (host.state(), pid(host));
        kill(Pid::from_raw(killed.try_into().unwrap()), Signal::SIGKILL).unwrap();
        let value = [u8::try_from(n).unwrap()];
        write(&client, &value, &lease).await;
        loop {
            let WatchEvent::Put { now, .. } = watch.next().await.unwrap() else { panic!() };
            if now.value == value {
                break;
            }
        }
        let again =
            |state: &ManagedState| matches!(state, ManagedState::Running { restarts, .. } if *restarts > 0);
        state.wait_for(again).await.unwrap();
        let own = Client::new(Settings::new(vec![endpoints[n].clone()])).unwrap();
        host.serves(&own).await.unwrap();
    }

    // A host that leaves permanently.
    let pids: Vec<u32> = hosts.iter().map(pid).collect();
    hosts.pop().unwrap().stop().await;
    assert!(!is_there(pids[2]));
    write(&client, b"two are left", &lease).await;
    assert!(client.get("/k").await.unwrap().is_some());
    for host in hosts {
        host.stop().await;
    }
    assert!(pids.into_iter().all(|pid| !is_there(pid)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_returns_without_its_data_rejoins() {
    if !has_etcd() {
        return;
    }
    let folder = testing::tempdir().unwrap();
    let endpoints = [pair(), pair(), pair()];
    let client = Client::new(Settings::new(endpoints.to_vec())).unwrap();
    let lease = async || loop {
        match client.lease(Duration::from_secs(10)).await {
            Err(error) => assert!(error.is_unreachable(), "{error}"),
            Ok(lease) => break lease,
        }
    };
    let mut hosts = Vec::new();
    for me in 0..3 {
        hosts.push(Managed::start(options(&endpoints, me, folder.path())).await.unwrap());
    }
    hosts[0].serves(&client).await.unwrap();
    write(&client, b"before", &lease().await).await;
    // One after the other, so that the remaining ones always have the majority.
    for me in 0..2 {
        hosts.remove(me).stop().await;
        std::fs::remove_dir_all(folder.path().join(me.to_string())).unwrap();
        write(&client, b"two are left", &lease().await).await;
        hosts.insert(me, Managed::start(options(&endpoints, me, folder.path())).await.unwrap());
        let own = Client::new(Settings::new(vec![endpoints[me].clone()])).unwrap();
        hosts[me].serves(&own).await.unwrap();
        assert_eq!(own.get("/k").await.unwrap().unwrap().value, b"two are left");
    }
    hosts.pop().unwrap().stop().await;
    write(&client, b"both came back", &lease().await).await;
    for host in hosts {
        host.stop().await;
    }
}

/// Whether the member at this endpoint is etcd's leader, according to its metrics.
fn leads(endpoint: &Endpoint) -> bool {
    let mut stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).unwrap();
    metrics.lines().any(|line| line == "etcd_server_is_leader 1")
}

/// On busy hosts the other members do not answer within the time in which etcd asks them whether it has run before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_returns_without_its_data_rejoins_while_the_others_are_stalled() {
    if !has_etcd() {
        return;
    }
    let folder = testing::tempdir().unwrap();
    let endpoints = [pair(), pair(), pair()];
    let client = Client::new(Settings::new(endpoints.to_vec())).unwrap();
    let mut hosts = Vec::new();
    for me in 0..3 {
        hosts.push(Managed::start(options(&endpoints, me, folder.path())).await.unwrap());
    }
    for (host, endpoint) in hosts.iter().zip(&endpoints) {
        let own = Client::new(Settings::new(vec![endpoint.clone()])).unwrap();
        host.serves(&own).await.unwrap();
    }
    while let Err(error) = client.put("/k", b"before", None).await {
        assert!(error.is_unreachable(), "{error}");
    }
    let follower = endpoints.iter().position(|endpoint| !leads(endpoint)).unwrap();
    hosts.remove(follower).stop().await;
    std::fs::remove_dir_all(folder.path().join(follower.to_string())).unwrap();

    let signal_others = |signal| {
        for other in &hosts {
            kill(Pid::from_raw(pid(other).try_into().unwrap()), signal).unwrap();
        }
    };
    signal_others(Signal::SIGSTOP);
    let returned = Managed::start(options(&endpoints, follower, folder.path())).await.unwrap();
    while !folder.path().join(follower.to_string()).join("data/member/wal").exists() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    signal_others(Signal::SIGCONT);
    let own = Client::new(Settings::new(vec![endpoints[follower].clone()])).unwrap();
    returned.serves(&own).await.unwrap();
    assert_eq!(own.get("/k").await.unwrap().unwrap().value, b"before");
    returned.stop().await;
    for host in hosts {
        host.stop().await;
    }
}

#[tokio::test]
async fn an_unusable_configuration_is_reported_at_once() {
    let folder = testing::tempdir().unwrap();
    let three = [pair(), pair(), pair()];
    let start = async |options| Managed::start(options).await.unwrap_err().to_string();

    let missing = ManagedOptions { program: "/nowhere/etcd".into(), ..options(&three, 0, folder.path()) };
    let error = start(missing).await;
    testing::snapshot!("errors", "etcd is not installed", error);

    let error = start(options(&three[..2], 0, folder.path())).await;
    testing::snapshot!("errors", "two endpoints of etcd", error);

    let strange: Vec<Endpoint> =
        ["a.invalid:1", "b.invalid:1", "c.invalid:1"].map(|text| text.parse().unwrap()).to_vec();
    let error = start(ManagedOptions::new(strange, "job", folder.path())).await;
    testing::snapshot!("errors", "etcd on other hosts", error);

    let _taken = std::net::TcpListener::bind(("127.0.0.1", three[0].port + 1)).unwrap();
    let error = start(options(&three, 0, folder.path())).await;
    assert!(error.contains(&format!("127.0.0.1:{}", three[0].port + 1)), "{error}");
}
