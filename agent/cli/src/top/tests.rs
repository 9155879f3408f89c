use std::path::PathBuf;

use mainstay_proto::v1::{GetNodeResponse, Hang, ListDevicesResponse, ListJobsResponse, Node};
use prost::Message;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::super::client::Snapshot;
use super::super::find::SocketAt;
use super::*;
use mainstay_proto::v1::{Component, HealthState, Job, JobPhase, Rank, RankPhase, Server, ServerMode};

fn reply(snapshot: Snapshot) -> ServerReply {
    let place = SocketAt { socket: PathBuf::from("/run/mainstay/agent.sock"), job: None };
    ServerReply { place, result: Ok(snapshot) }
}

/// What an agent answered while a job of two ranks trained again after its rank 1 was killed. `record` wrote it.
fn recorded() -> (Snapshot, Vec<Device>) {
    let node = GetNodeResponse::decode(&include_bytes!("recorded/node.binpb")[..]).unwrap();
    let jobs = ListJobsResponse::decode(&include_bytes!("recorded/jobs.binpb")[..]).unwrap();
    let devices = ListDevicesResponse::decode(&include_bytes!("recorded/devices.binpb")[..]).unwrap();
    let (server, node) = (node.server.unwrap(), node.node.unwrap());
    (Snapshot { server, node, jobs: jobs.jobs }, devices.devices)
}

/// Writes what the agent at MAINSTAY_SOCKET answers.
#[tokio::test]
#[ignore = "it records what the other tests read"]
async fn record() {
    let socket = PathBuf::from(std::env::var_os("MAINSTAY_SOCKET").unwrap());
    let client = Client::connect(&socket).await.unwrap();
    let Snapshot { server, node, jobs } = client.snapshot().await.unwrap();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/top/recorded");
    let write = |name: &str, bytes: Vec<u8>| std::fs::write(folder.join(name), bytes).unwrap();
    let node = GetNodeResponse { node: Some(node), server: Some(server) };
    write("node.binpb", node.encode_to_vec());
    write("jobs.binpb", ListJobsResponse { jobs, ..Default::default() }.encode_to_vec());
    write("devices.binpb", client.devices().await.unwrap().encode_to_vec());
}

fn many_ranks(step: u64) -> Snapshot {
    let rank = |rank: u32| Rank {
        rank,
        host: Some(format!("host-{}", rank / 8)),
        phase: RankPhase::Connected.into(),
        step: Some(if rank == 4711 { 640 } else { step }),
        sections: vec![if rank.is_multiple_of(2) { "forward".into() } else { "allreduce".into() }],
        self_time: Some(prost_types::Duration { seconds: 0, nanos: 120_000_000 }),
        against_peers: Some(if rank == 77 { 1.31 } else { 1.0 }),
        wait_share: Some(0.25),
        ..Rank::default()
    };
    let job = Job {
        id: "llm-70b".into(),
        phase: JobPhase::Running.into(),
        step: Some(640),
        steps_per_second: Some(0.8),
        max_restarts: 3,
        world_size: 10_000,
        command: vec!["python".into(), "train.py".into()],
        ranks: (0..10_000).map(rank).collect(),
        hang: Some(Hang { headline: "rank 4711 hangs".into(), culprits: vec![4711], ..Hang::default() }),
        ..Job::default()
    };
    let component = |name: &str, state: HealthState, reason: &str| Component {
        name: name.into(),
        state: state.into(),
        reason: reason.into(),
        ..Component::default()
    };
    let components = vec![
        component("host.cpu", HealthState::Healthy, ""),
        component("host.memory", HealthState::Degraded, "processes wait for memory"),
    ];
    Snapshot {
        server: Server { mode: ServerMode::Agent.into(), hostname: "node-17".into(), ..Server::default() },
        node: Node { state: HealthState::Degraded.into(), components, ..Node::default() },
        jobs: vec![job],
    }
}

fn drawn(top: &Top, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| top.draw(frame.area(), frame.buffer_mut())).unwrap();
    let buffer = terminal.backend().buffer();
    let cells = |y| (0..width).map(move |x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| cells(y).trim_end().to_owned() + "\n").collect()
}

fn press(top: &mut Top, keys: &str) -> Option<Wish> {
    let code = |key| match key {
        '\n' => KeyCode::Enter,
        '\x1b' => KeyCode::Esc,
        key => KeyCode::Char(key),
    };
    let mut pressed = keys.chars().map(|key| top.key(KeyEvent::new(code(key), KeyModifiers::NONE)));
    let wishes: Vec<Wish> = pressed.by_ref().flatten().collect();
    assert!(wishes.len() <= 1, "{wishes:?}");
    wishes.into_iter().next()
}

#[test]
fn a_job_that_runs_fits_on_small_and_large_screens() {
    let (snapshot, devices) = recorded();
    let mut top = Top::new(Paint::plain());
    top.take(vec![reply(snapshot)], devices);
    for (width, height) in [(80, 24), (120, 40)] {
        testing::snapshot!(
            "top",
            format!("a job of two ranks at {width}x{height}"),
            drawn(&top, width, height)
        );
    }
    let picture = drawn(&top, 80, 24);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/cli.md");
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page.contains(picture.trim_end()), "{path} does not show the screen:\n{picture}");
}

#[test]
fn ten_thousand_ranks_are_folded_and_each_refresh_extends_the_sparklines() {
    let mut top = Top::new(Paint::plain());
    for step in [800, 801, 803, 807] {
        top.take(vec![reply(many_ranks(step))], Vec::new());
    }
    for (width, height) in [(80, 24), (120, 40)] {
        testing::snapshot!("top", format!("10000 ranks at {width}x{height}"), drawn(&top, width, height));
    }
}

#[test]
fn any_size_is_drawn_without_a_panic() {
    let mut top = Top::new(Paint::plain());
    top.take(vec![reply(many_ranks(800))], Vec::new());
    for (width, height) in [(1, 1), (3, 2), (20, 5), (79, 7), (500, 3), (10, 200)] {
        drawn(&top, width, height);
    }
}

#[test]
fn a_restart_is_asked_twice_and_a_reason_is_needed() {
    let mut top = Top::new(Paint::plain());
    top.take(vec![reply(many_ranks(800))], Vec::new());
    assert_eq!(press(&mut top, "r\nstuck\nn"), None, "another key than y does not restart");
    assert_eq!(press(&mut top, "rno\x1b"), None);
    let Some(Wish::Restart { at: None, job, reason }) = press(&mut top, "rstuck\ny") else { panic!() };
    assert_eq!((job.as_str(), reason.as_str()), ("llm-70b", "stuck"));
}

#[test]
fn a_component_is_silenced_with_a_reason_where_it_was_reported() {
    let mut top = Top::new(Paint::plain());
    top.take(vec![reply(many_ranks(800))], Vec::new());
    assert_eq!(press(&mut top, "s"), None, "a job is selected");
    let Some(Wish::Silence { at, component, reason }) = press(&mut top, "jsq\n") else { panic!() };
    assert_eq!((component.as_str(), reason.as_str()), ("host.memory", "q"));
    assert_eq!(at, PathBuf::from("/run/mainstay/agent.sock"));
}

#[test]
fn keys_explain_take_stacks_scroll_and_quit() {
    let mut top = Top::new(Paint::plain());
    top.take(vec![reply(many_ranks(800))], Vec::new());
    assert_eq!(press(&mut top, "\n"), Some(Wish::Explain("llm-70b".to_owned())));
    assert_eq!(press(&mut top, "j\n"), Some(Wish::Explain("host.memory".to_owned())));
    let Some(Wish::Stacks { host, job }) = press(&mut top, "kt") else { panic!() };
    assert_eq!((host.as_str(), job.id.as_str()), ("node-17", "llm-70b"));
    top.read("stacks", &(0..100).map(|line| format!("line {line}\n")).collect::<String>());
    press(&mut top, "jj");
    assert!(drawn(&top, 80, 24).starts_with("stacks\nline 2\n"));
    assert_eq!(press(&mut top, "q"), None, "back to the overview");
    assert_eq!(press(&mut top, "q"), Some(Wish::Quit));
}
