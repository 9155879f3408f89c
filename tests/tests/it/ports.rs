//! The port of the ranks' store: a free one for each attempt and job, or the requested one, or a clear error.

use std::net::TcpListener;

use mainstay_model::entry::Fact;
use mainstay_tests::{Stage, has_client, journal};

#[test]
fn a_port_in_use_is_named_with_the_option() {
    let stage = Stage::new();
    let listener = TcpListener::bind("0.0.0.0:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let end = stage.sh("exit 0").ranks(2).options(&format!("--master-port {port}")).start().end();
    end.assert_status(70);
    let is_taken =
        |fact: &Fact| matches!(fact, Fact::StartFailed { error, .. } if error.contains(&port.to_string()));
    assert!(journal::facts(&end.journal).any(is_taken), "{end}");
    end.assert_printed("--master-port");
    assert_eq!(end.summary().attempts, 1, "it is not tried again\n{end}");
}

#[test]
fn a_port_on_the_loopback_alone_counts_as_taken_too() {
    let stage = Stage::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let end = stage.sh("exit 0").options(&format!("--master-port {port}")).start().end();
    end.assert_status(70);
    end.assert_printed(&port.to_string());
}

/// Rank 0 listens as torch's store does; the others connect. In the first attempt the connections are open when one
/// of them is killed, so that the port must be taken again from lingering connections.
const STORE: &str = r#"
import socket
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
mark(f"port.{RANK}.{ATTEMPT}", address[1])
if RANK == 0:
    store = socket.create_server(("", address[1]), family=socket.AF_INET6, dualstack_ipv6=True)
    peer, _ = store.accept()
    peer.sendall(b"hello")
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    assert peer.recv(5) == b"hello"
mark(f"met.{RANK}.{ATTEMPT}")
if ATTEMPT == 0:
    time.sleep(36000)
"#;

#[test]
fn a_fixed_port_is_used_again_at_a_restart() {
    let stage = Stage::new();
    let free = testing::free_port();
    let job = stage.python(STORE).ranks(2).options(&format!("--master-port {free}")).start();
    job.mark("met.0.0");
    job.mark("met.1.0");
    job.kill_rank(0, 1);
    let end = job.end();
    end.assert_status(0);
    assert_eq!(journal::restarts(&end.journal), 1, "{end}");
    let marked = std::fs::read_to_string(stage.marks().join("port.1.1")).expect("a mark");
    assert_eq!(marked, free.to_string());
}

#[test]
fn jobs_that_run_at_once_have_ports_of_their_own() {
    let stage = Stage::new();
    let jobs: Vec<_> = (0..4)
        .map(|_| stage.sh(r#"mark "up.$MAINSTAY_JOB_ID.$RANK"; wait_for end"#).ranks(2).start())
        .collect();
    let mut ports: Vec<u16> = jobs.iter().map(|job| job.attempt(0).port).collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), jobs.len());
    stage.mark("end");
    for job in jobs {
        job.end().assert_status(0);
    }
}

#[test]
fn jobs_of_the_same_name_do_not_mix() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let script = r#"
import mainstay
mainstay.step(1)
mark("up." + os.environ["MAINSTAY_JOB_ID"])
wait_for("end")
"#;
    let first = stage.python(script).start();
    let name = first.id().to_owned();
    first.mark(&format!("up.{name}"));
    let places = format!("--log-dir {} --runtime-dir {}", stage.logs().display(), stage.tmpfs().display());
    let second = stage.python(script).own_paths().options(&format!("--rdzv-id {name} {places}")).start();
    second.mark(&format!("up.{name}.2"));
    stage.mark("end");
    let (first, second) = (first.end(), second.end());
    first.assert_status(0);
    second.assert_status(0);
    second.assert_printed(&format!("job {name}.2"));
}
