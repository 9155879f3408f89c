//! Writes `corpus/NAME/` for every target from the repository's own test data: `cargo run --example seeds`.
//!
//! It has the form of a target because it must link with their flags, which instrument the code for coverage.
#![no_main]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use mainstay_checkpoint_format::bucket::{StepName, StepRecord, StepShard};
use mainstay_coord::Member;
use mainstay_coord::etcd::etcdserverpb as pb;
use mainstay_coord::server::log;
use mainstay_coord::server::store::{Limits as StoreLimits, Store};
use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_health::hardware::dcgm::{DcgmHealth, DcgmReport, Incident};
use mainstay_health::hardware::gpu::{GpuReading, ProbeAnswer, ProbeLine, ProbeRequest};
use mainstay_hang::RankSeen;
use mainstay_model::entry::{Body, Entry, Fact, StepDone};
use mainstay_model::id::{Attempt, BootId, Rank};
use mainstay_health::parse::log::LogReader;
use mainstay_model::time::{Mono, Span, Stamp, Wall};
use mainstay_fuzz::CATALOGUES;
use mainstay_checkpoint::archive;
use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey};
use mainstay_group::wire::{Down, Join, Message, Up};
use mainstay_recovery::protocol::{Command, Event};
use mainstay_tier::peer::frame::{Header, Kind, MAGIC, VERSION, encode};

const FIELD_LINES: &str = include_str!("../../agent/catalog/signatures/lines.tsv");
const FLIGHT_RECORDS_JSON: [&[u8]; 2] = [
    include_bytes!("../../agent/hang/tests/it/flight_records/late_0.json"),
    include_bytes!("../../agent/hang/tests/it/flight_records/late_2.json"),
];
const FLIGHT_RECORDS: [&[u8]; 2] = [
    include_bytes!("../../agent/hang/tests/it/flight_records/absent_0.pickle"),
    include_bytes!("../../agent/hang/tests/it/flight_records/mismatch_1.pickle"),
];
const NVRX_MESSAGES: &str = include_str!("../../agent/wire/tests/it/nvrx_messages.txt");
const NCCL_TESTS: &str = include_str!("../../agent/hang/tests/it/nccl_ras.rs");

const EXPORTER: &str = "# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).\nDCGM_FI_DEV_GPU_TEMP{gpu=\"0\",UUID=\"GPU-0\",\
    modelName=\"NVIDIA H100 \\\"80GB\\\"\"} 41\nDCGM_FI_DEV_XID_ERRORS{gpu=\"0\"} 79 1700000000000\n";
const TRACE: &str = "rank,step,section,start_ns,end_ns,stage,host\n0,1,forward,0,2500000000,0,a\n1,1,forward,0,3500000000,1,b\n\
    0,1,all_reduce,2500000000,3600000000,0,a\n1,1,all_reduce,3500000000,3600000000,1,b\n";
const STACKS: &str = "Current thread 0x00007f (most recent call first):\n  File \"/a/train.py\", line 12 in forward\n\
    \nThread 812 (idle): \"MainThread\"\n    forward (train.py:12)\n";
const FILES: [&str; 10] = [
    "4711 (a) b (c)) D 17 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 987654 0 0 18446744073709551615",
    "4: ACTIVE\n",
    "400 Gb/sec (4X NDR)\n",
    "100000\n",
    "0000:3b:00.0",
    "mlx5_*\nmlx5_1/1",
    "mlx5_0/1@400",
    "30 27 8:1 / /data\\040x rw,relatime shared:1 - ext4 /dev/sda rw,emergency_ro\n/dev/sda /data\\040x ext4 ro 0 2\n",
    "Id=a.service\nLoadState=loaded\nActiveState=failed\nSubState=failed\nResult=exit-code\nNRestarts=3\n\nId=b.service\n",
    "PSU1 Status | C8h | ok | 10.1 | Presence detected, Power Supply AC lost\nFAN1 | 41h | cr | 29.1 | 300 RPM\n",
];
const VALUES: [&str; 5] = ["5s", "500ms", "64MiB", "4096B", "99.5"];
const ERROR_FILES: [&str; 2] = [
    r#"{"message": {"message": "ValueError: bad: 3", "extraInfo": {"py_callstack": "Trace", "timestamp": "17"}}}"#,
    r#"{"message": "KeyError: 'x'", "timestamp": 3}"#,
];
const LIMITS: [&str; 3] = [
    "[oom]\nwindow = \"1d\"\n",
    "[memory_errors]\ncorrected_errors = 0\n[cpu_speed]\nhot_minutes = 0\n",
    "flaps = 0\nboot_grace = \"10m\"\n",
];
const CLOUD_ANSWERS: [&str; 6] = [
    "NONE",
    "TRUE",
    r#"{"can_reschedule": "true", "maintenance_status": "PENDING", "window_start_time": "2027-01-15T08:00:00Z", "window_end_time": "2027-01-15T12:00:00Z"}"#,
    r#"{"action": "terminate", "time": "2027-01-15T08:22:00Z", "noticeTime": "2027-01-15T08:20:00Z"}"#,
    r#"[{"NotBefore": "21 Jan 2027 09:00:43 GMT", "Code": "system-reboot", "EventId": "i-1", "NotAfter": "21 Jan 2027 09:17:23 GMT", "State": "active"}]"#,
    r#"{"Events": [{"EventId": "A", "EventType": "Preempt", "Resources": ["train_17"], "EventStatus": "Started", "NotBefore": "Thu, 21 Jan 2027 09:00:43 GMT"}]}"#,
];
const WIRE: &str = "{\"devices\": {\"0\": \"gpu.0000:3b:00\"}, \"hints\": []}\n[1]\n{}\n";
const INVENTORY: &str = r#"{"software":"1","domain":"rack","used":1,"quota":2,"copies":[{"shard":{"of":{"step":1,"job":"a","run":"a",
    "attempt":0,"world":1},"rank":0,"root":"00","bytes":4,"created":7},"medium":"memory","own":true,"verified":true}],
    "failures":[{"program":"0123456789abcdef","fingerprint":"fedcba9876543210","place":{"step":7,"heartbeats":true},"at":5}]}"#;
const SECRETS: [&str; 5] = [
    "401 for hf_AbCdEfGhIjKlMnOpQrSt at",
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG",
    "Authorization: Bearer abc.def-123456",
    "postgres://train:hunter22@db/runs",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n",
];

fuzz_target!(init: finish(write_all()), |_bytes: &[u8]| {});

/// Exits before the first input.
fn finish(written: Result<(), Box<dyn std::error::Error>>) {
    if let Err(error) = written {
        eprintln!("the seeds are not written: {error}");
        std::process::exit(1);
    }
    std::process::exit(0);
}

fn write_all() -> Result<(), Box<dyn std::error::Error>> {
    let lines = kernel_lines();
    seed("kernel_log", lines.iter().flat_map(|line| forms(line)))?;
    seed("xid", &lines)?;
    seed("catalog_overrides", CATALOGUES.iter().flat_map(|file| entries_of(file)))?;
    let logs = FIELD_LINES.lines().filter_map(|line| Some(line.split_once('\t')?.1.replace("\\n", "\n")));
    let signatures = Catalog::built_in().into_iter().flat_map(|catalog| catalog.signatures());
    seed("attribution", logs.chain(signatures.map(|signature| signature.example.clone())))?;
    seed("mask", SECRETS)?;
    seed("settings", VALUES)?;
    seed("error_file", ERROR_FILES)?;
    seed("limits", LIMITS)?;
    seed("stacks", [STACKS])?;
    seed("step_record", [step_record()])?;
    seed("straggler_trace", [TRACE])?;
    seed("prometheus", [EXPORTER])?;
    seed("proc_and_sysfs", FILES)?;
    seed("nccl_ras", reports())?;
    seed("nvrx_pickle", NVRX_MESSAGES.lines().filter_map(|line| bytes_of(line.rsplit(' ').next()?)))?;
    seed("flight_record", FLIGHT_RECORDS)?;
    let of_two_ranks = FLIGHT_RECORDS_JSON.join(&0);
    seed("flight_record_json", FLIGHT_RECORDS_JSON.iter().map(|of| of.to_vec()).chain([of_two_ranks]))?;
    seed("cloud_answers", CLOUD_ANSWERS)?;
    seed("launcher_wire", [WIRE])?;
    seed("hosts_wire", between_hosts()?)?;
    seed("coordination", coordination()?)?;
    seed("grpc", calls())?;
    seed("cloud_notices", [[7_u8; 64], [0; 64]])?;
    // A word that marks the page as claimed, and a record of the ring.
    seed(
        "heartbeat_page",
        [vec![], vec![8, 0, 8, 1, 0, 0, 0, 1, 0, 1, 0], vec![64, 0, 255, 1, 2, 3, 4, 5, 6, 7, 8]],
    )?;
    seed("journal_lines", journal(&lines)?)?;
    let gpus = ProbeAnswer::Gpus { driver: Some("580.95".to_owned()), gpus: vec![GpuReading::default()], bound: Vec::new() };
    let answers = [serde_json::to_vec(&gpus)?, serde_json::to_vec(&ProbeLine::Answer(gpus))?];
    seed("probe_answers", answers.into_iter().chain([serde_json::to_vec(&ProbeRequest::default())?]))?;
    let headers = Kind::ALL.map(|kind| encode(&Header { length: 4096, chunk: 7, ..Header::of(kind) }).to_vec());
    seed("peer_frames", headers.into_iter().chain([INVENTORY.as_bytes().to_vec()]))?;
    seed("archive", [two_files()?])?;
    // Magic, version, nonce and a false proof from a stranger; and the first bytes of a TLS connection.
    let greeting = [&MAGIC[..], &[VERSION, 0, 0, 0], &[7; 64]].concat();
    seed("peer_handshake", [greeting, vec![22, 3, 1, 0, 5, 1, 0, 0, 1, 3], Vec::new()])?;
    let incident =
        Incident { gpu: Some(0), system: 1, health: 20, code: 4, message: "a double-bit error".to_owned() };
    let health = DcgmHealth { gpus: vec![0, 1], incidents: vec![incident], first: true, ..DcgmHealth::default() };
    seed("dcgm_answers", [serde_json::to_vec(&DcgmReport::Health(health))?])?;
    Ok(())
}

/// An archive of two files, one with a name that is too long for a header.
fn two_files() -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let file = |path: String, size| archive::Entry { path, size, mode: 0o644 };
    let layout = archive::layout(&[file("model/weights".to_owned(), 700), file("long".repeat(30), 0)])?;
    let mut bytes = Vec::new();
    for (_, piece) in layout.pieces {
        match piece {
            archive::Piece::Bytes(header) => bytes.extend(header),
            archive::Piece::Content(index) => bytes.resize(bytes.len() + if index == 0 { 700 } else { 0 }, 1),
        }
    }
    Ok(bytes)
}

/// Messages between the launchers of a job, of several kinds.
fn between_hosts() -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error>> {
    let attempt = Attempt(2);
    let key = StepKey { step: 7, job: "a".into(), run: "a".into(), attempt: 1, world: 2 };
    let shard = Shard { key, rank: 1, root: "00".repeat(32), bytes: 4, created: 7, piece: None };
    let copies = vec![Copy { holder: "b:1".into(), medium: Medium::Memory, own: true, verified: false, shard }];
    let event = |event| Up::Event { number: 1, at: Mono(5), event };
    let ups = [
        Up::Join(Join::default()),
        Up::Beat { sent: Mono(9) },
        event(Event::Holding { attempt, copies }),
        event(Event::Steps { attempt, ranks: vec![(Rank(1), vec![StepDone::default()])] }),
        event(Event::Opened { attempt, port: Err("no port".to_owned()) }),
        Up::Seen { attempt, ranks: vec![RankSeen::default()] },
    ];
    let downs = [
        Down::Waiting { status: "for b".to_owned(), spare: None },
        Down::Command { number: 3, epoch: 1, command: Command::Open { attempt } },
        Down::Entry { seq: 4, at: Stamp::default(), body: Arc::new(Body::Fact(Fact::RanksStepping { attempt, step: 7, counted: false, restoring: Span::default() })) },
    ];
    let mut seeds = Vec::new();
    for up in &ups {
        seeds.push(Vec::new());
        up.write(seeds.last_mut().expect("just pushed"))?;
    }
    for down in &downs {
        seeds.push(Vec::new());
        down.write(seeds.last_mut().expect("just pushed"))?;
    }
    Ok(seeds)
}

/// The number of a call followed by a message; HTTP/2 settings and a ping; an HTTP/1 request.
fn calls() -> Vec<Vec<u8>> {
    use prost::Message as _;
    let put = pb::PutRequest { key: "a".into(), value: vec![7; 300], lease: 0, prev_kv: true }.encode_to_vec();
    let grant = pb::LeaseGrantRequest { ttl: 5, id: 9 }.encode_to_vec();
    let called = |call: u8, message: &[u8]| [&[call], message].concat();
    let frames = b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x64\0\0\x08\x06\0\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08".to_vec();
    let plain = b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n".to_vec();
    vec![called(0, &put), called(1, &put), called(3, &put), called(4, &grant), called(5, &grant), frames, plain]
}

/// A log of the built-in store, each of its records, and two values.
fn coordination() -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error>> {
    let mut store = Store::new(7, StoreLimits::default());
    let first = store.snapshot();
    store.grant(&pb::LeaseGrantRequest { ttl: 5, id: 0 }, 0).map_err(|refusal| refusal.message)?;
    for key in ["a", "b", "a"] {
        let put = pb::PutRequest { key: key.into(), value: key.into(), lease: 1, prev_kv: false };
        store.put(put).map_err(|refusal| refusal.message)?;
    }
    store.compact(&pb::CompactionRequest { revision: 3, physical: false }).map_err(|refusal| refusal.message)?;
    store.expire(5000);
    let records: Vec<_> =
        [first].into_iter().chain(store.take_records()).chain([store.snapshot()]).collect();
    let frames = records.iter().take(records.len() - 1).flat_map(log::encode);
    let mut seeds = vec![log::MAGIC.iter().copied().chain(frames).collect()];
    seeds.extend(records.iter().map(prost::Message::encode_to_vec));
    seeds.push(serde_json::to_vec(&Member::new("launch", "host"))?);
    seeds.push(br#"{"version": 2, "launch": "l", "host": "h", "epoch": 3, "round": 4, "why": "w", "body": {}}"#.to_vec());
    Ok(seeds)
}

fn seed(target: &str, seeds: impl IntoIterator<Item = impl AsRef<[u8]>>) -> std::io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&folder)?;
    for (number, seed) in seeds.into_iter().enumerate() {
        fs::write(folder.join(format!("seed-{number}")), seed)?;
    }
    Ok(())
}

/// The record of a step of two ranks.
fn step_record() -> Vec<u8> {
    let name = StepName { job: "job".into(), run: "run@a".into(), attempt: 1, step: 100, world_size: 2 };
    let shard = |rank| StepShard { root: format!("{rank:064x}"), bytes: 1 << 30, created_unix_s: 1_700_000_000 };
    StepRecord { name, shards: vec![shard(0), shard(1)] }.encode()
}

/// The examples of the hardware catalog.
fn kernel_lines() -> Vec<String> {
    let lines = CATALOGUES.iter().flat_map(|file| file.lines());
    lines
        .filter_map(|line| Some(line.strip_prefix("example = \"")?.trim_end_matches('"').to_owned()))
        .collect()
}

/// A message in the forms of kmsg, syslog (RFC 3164 and RFC 5424) and journald.
fn forms(line: &str) -> [String; 4] {
    [
        format!("4,1339,5140900123,-,caller=T1;{line}\\x0a{line}\n SUBSYSTEM=pci\n"),
        format!("Nov 21 03:04:05 gpu-17 kernel: [ 4711.123456] {line}"),
        format!("<3>1 2026-11-21T03:04:05.123Z gpu-17 kernel - - [a b=\"c\"] {line}"),
        serde_json::json!({"_TRANSPORT": "kernel", "__CURSOR": "s=1", "MESSAGE": line}).to_string(),
    ]
}

/// Splits a file of the catalog into files of one entry each.
fn entries_of(file: &str) -> Vec<String> {
    file.split("\n[[").skip(1).map(|entry| format!("[[{entry}")).collect()
}

/// The reports in the tests of their parser.
fn reports() -> Vec<String> {
    let text = NCCL_TESTS.split("\"\\\nNCCL version ").skip(1).filter_map(|rest| rest.split_once("\";"));
    let json = NCCL_TESTS.split("r#\"").skip(1).filter_map(|rest| rest.split_once("\"#"));
    text.map(|(report, _)| format!("NCCL version {report}"))
        .chain(json.map(|(report, _)| report.to_owned()))
        .collect()
}

fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    digits.as_bytes().chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// Journal entries for the facts in kernel lines.
fn journal(lines: &[String]) -> Result<Vec<Vec<u8>>, serde_json::Error> {
    let facts = lines.iter().filter_map(|line| LogReader::default().line(Mono(9), line, 1));
    let facts: Vec<(Mono, Fact)> = facts.collect();
    let entry = |(mono, fact): (Mono, Fact)| Entry {
        seq: 1,
        at: Stamp { mono, wall: Wall(7) },
        boot: BootId("b".to_owned()),
        job: None,
        origin_seq: None,
        body: Body::Fact(fact),
    };
    facts.into_iter().map(|fact| serde_json::to_vec(&entry(fact))).collect()
}
