//! PyTorch's worker server. A rank whose program uses `torch.distributed.elastic.control_plane.worker_main` answers by HTTP
//! on the Unix socket in `TORCH_WORKER_SERVER_SOCKET`, even while Python does not run. It returns stacks and flight
//! records.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mainstay_hang::flight::{DUMP_BYTES, FlightRecord};
use mainstay_model::id::{Pid, Rank};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;

use super::collectives::Environment;
use super::{Subject, left};
use mainstay_sys::processes;

const SOCKET: &str = "TORCH_WORKER_SERVER_SOCKET";
/// No dump of stacks is longer than this.
const STACK_BYTES: usize = 1 << 20;
/// Bytes before the answer's body.
const HEAD_BYTES: usize = 16 << 10;
/// A server that has not answered by then will not.
const ANSWERS_WITHIN: Duration = Duration::from_millis(700);

/// The answers of the ranks' servers.
#[derive(Debug, Default)]
pub(super) struct WorkerServerReply {
    pub(super) stacks: BTreeMap<Rank, String>,
    pub(super) records: BTreeMap<Rank, FlightRecord>,
}

/// Asks the ranks that have a server, all at once.
pub(super) fn ask(subjects: &[Subject], deadline: Instant) -> WorkerServerReply {
    let deadline = deadline.min(Instant::now() + ANSWERS_WITHIN);
    let (sender, answers) = mpsc::channel();
    let mut asked = 0;
    for (rank, socket, owner) in sockets(subjects) {
        let sender = sender.clone();
        let ask = move || {
            let stack = post(&socket, owner, "dump_traceback", STACK_BYTES, deadline);
            let record = post(&socket, owner, "dump_nccl_trace_json", DUMP_BYTES, deadline);
            // The receiver is gone if it took too long.
            let _ = sender.send((rank, stack, record));
        };
        let started = std::thread::Builder::new().name("worker-server".to_owned()).spawn(ask);
        asked += usize::from(started.is_ok());
    }
    let mut reply = WorkerServerReply::default();
    for _ in 0..asked {
        let Ok((rank, stack, record)) = answers.recv_timeout(left(deadline)) else { break };
        let stack = stack.map(|stack| String::from_utf8_lossy(&stack).into_owned());
        reply.stacks.extend(stack.map(|stack| (rank, stack)));
        // Without NCCL there is an answer without operations.
        let record = record.and_then(|record| FlightRecord::read(&record).ok());
        reply.records.extend(record.map(|record| (rank, record)));
    }
    reply
}

/// The sockets of the ranks, except those that several ranks name: it is unknown whose server answers there.
fn sockets(subjects: &[Subject]) -> Vec<(Rank, PathBuf, u32)> {
    let named: Vec<(Rank, Pid, PathBuf)> = subjects
        .iter()
        .filter_map(|subject| {
            let socket = Environment::of_process(subject.pid).get(SOCKET)?;
            Some((subject.rank, subject.pid, PathBuf::from(socket)))
        })
        .collect();
    let alone = |socket: &Path| named.iter().filter(|(_, _, other)| other == socket).count() == 1;
    let own = named.iter().filter(|(_, _, socket)| alone(socket)).filter_map(|(rank, pid, socket)| {
        let owner = processes::user(*pid)?;
        belongs_to(socket, owner).then(|| (*rank, socket.clone(), owner))
    });
    own.collect()
}

/// Whether it is a socket of this user: any other file of that name does not belong to the user's rank.
fn belongs_to(socket: &Path, owner: u32) -> bool {
    fs::symlink_metadata(socket).is_ok_and(|file| file.file_type().is_socket() && owner == file.uid())
}

/// The body of a handler's answer; none if there is no valid one by the deadline.
fn post(socket: &Path, owner: u32, handler: &str, most: usize, deadline: Instant) -> Option<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).ok()?;
    // The path may have been exchanged since: nothing is sent to a server of another user.
    if getsockopt(&stream, PeerCredentials).ok()?.uid() != owner {
        return None;
    }
    // HTTP/1.0: the server closes the connection after its answer.
    let question =
        format!("POST /handler/{handler} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n");
    stream.set_write_timeout(Some(patience(deadline)?)).ok()?;
    stream.write_all(question.as_bytes()).ok()?;
    let mut answer = Vec::new();
    let mut piece = [0; 16 << 10];
    loop {
        stream.set_read_timeout(Some(patience(deadline)?)).ok()?;
        match stream.read(&mut piece).ok()? {
            0 => return body(&answer).map(<[u8]>::to_vec),
            read => answer.extend_from_slice(&piece[..read]),
        }
        if answer.len() > HEAD_BYTES + most {
            return None;
        }
    }
}

/// The time left; none at zero, which sockets do not accept as a time-out.
fn patience(deadline: Instant) -> Option<Duration> {
    Some(left(deadline)).filter(|left| !left.is_zero())
}

/// The body of an answer, if it is valid.
fn body(answer: &[u8]) -> Option<&[u8]> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let status = answer.split(|byte| *byte == b' ').nth(1)?;
    (status == b"200").then_some(&answer[end + 4..])
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command};

    use super::*;

    const STACKS: &str = "Current thread 0x1 (most recent call first):\n  <no Python frame>\n\nThread 0x2 (most recent call \
                          first):\n  File \"/a/train.py\", line 12 in forward\n  File \"/a/train.py\", line 40 in <module>\n";
    const RECORD: &str = r#"{"version": "2.9", "pg_config": {}, "entries": []}"#;

    /// A process that has the socket in its environment, as a rank does.
    fn rank(socket: &Path) -> (Child, Subject) {
        let child = Command::new("sleep").arg("1000").env(SOCKET, socket).spawn().unwrap();
        let pid = Pid(i32::try_from(child.id()).unwrap());
        // Its environment is readable only after the kernel has set up the new program.
        while Environment::of_process(pid).get(SOCKET).is_none() {
            std::thread::yield_now();
        }
        let (sections, last_steps) = (Vec::new(), Vec::new());
        (child, Subject { rank: Rank(3), pid, stacks: None, step: None, sections, last_steps })
    }

    /// Answers this many requests as PyTorch's server does.
    fn serve(listener: &UnixListener, questions: usize) {
        for stream in listener.incoming().take(questions) {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
            let asked = lines.next().unwrap();
            assert!(lines.any(|line| line.is_empty()), "a whole question");
            let (status, body) = match asked.as_str() {
                "POST /handler/dump_traceback HTTP/1.0" => ("200 OK", STACKS),
                "POST /handler/dump_nccl_trace_json HTTP/1.0" => ("200 OK", RECORD),
                _ => ("404 Not Found", "no such handler"),
            };
            write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        }
    }

    #[test]
    fn a_rank_with_a_server_returns_its_stacks_and_its_record() {
        let directory = testing::tempdir().unwrap();
        let socket = directory.path().join("worker.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || serve(&listener, 2));
        let (mut child, subject) = rank(&socket);
        let reply = ask(&[subject], Instant::now() + Duration::from_secs(60));
        child.kill().unwrap();
        child.wait().unwrap();
        server.join().unwrap();
        assert_eq!(reply.stacks.get(&Rank(3)).map(String::as_str), Some(STACKS));
        assert!(reply.records.contains_key(&Rank(3)));
    }

    #[test]
    fn no_answer_and_a_socket_of_another_process_give_no_evidence() {
        let directory = testing::tempdir().unwrap();
        let silent = directory.path().join("silent.sock");
        let _listener = UnixListener::bind(&silent).unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        for socket in [silent, file, directory.path().join("none")] {
            let (mut child, subject) = rank(&socket);
            let reply = ask(&[subject], Instant::now() + Duration::from_millis(50));
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(reply.stacks.is_empty() && reply.records.is_empty(), "{}", socket.display());
        }
    }

    #[test]
    fn a_socket_that_two_ranks_name_belongs_to_no_rank() {
        let directory = testing::tempdir().unwrap();
        let socket = directory.path().join("worker.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        let (mut one, first) = rank(&socket);
        let (mut other, second) = rank(&socket);
        let named = sockets(&[first.clone(), Subject { rank: Rank(4), ..second }]);
        let alone = sockets(&[first]);
        for child in [&mut one, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!((named.len(), alone.len()), (0, 1));
    }
}
