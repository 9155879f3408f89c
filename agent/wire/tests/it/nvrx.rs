//! The rank-monitor protocol of NVRx: messages captured from clients of versions 0.4.1 and 0.6.0, and invalid ones.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic here is the test's report")]

use mainstay_wire::nvrx::message::{Change, Message, MessageError};
use mainstay_wire::nvrx::pickle::{Pickle, PickleError};
use mainstay_wire::nvrx::{ClientMessage, MESSAGE_BYTES, Session, SessionError};
use proptest::prelude::*;

/// Version, message, and the pickle in hexadecimal digits. Python 3.11 made it from the package's own classes.
const MESSAGES: &str = include_str!("nvrx_messages.txt");

fn captured(version: &str, name: &str) -> Vec<u8> {
    let line = MESSAGES.lines().find(|line| line.starts_with(&format!("{version} {name} "))).unwrap();
    let digits = line.rsplit(' ').next().unwrap();
    digits
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

fn framed(pickle: &[u8]) -> Vec<u8> {
    [&(pickle.len() as u32).to_be_bytes()[..], pickle].concat()
}

/// What a client reports by these messages, sent at once and byte by byte, and the answers.
fn reported_by(messages: &[Vec<u8>]) -> (Vec<ClientMessage>, Vec<u8>) {
    let bytes: Vec<u8> = messages.iter().flat_map(|message| framed(message)).collect();
    let (mut messages, mut answers) = (Vec::new(), Vec::new());
    Session::default().receive(&bytes, &mut messages, &mut answers).unwrap();
    let (mut slowly, mut session) = ((Vec::new(), Vec::new()), Session::default());
    for byte in &bytes {
        session.receive(&[*byte], &mut slowly.0, &mut slowly.1).unwrap();
    }
    assert_eq!((&messages, &answers), (&slowly.0, &slowly.1));
    (messages, answers)
}

#[test]
fn captured_client_messages_are_read() {
    for version in ["0.4", "0.6"] {
        let read = |name| Message::read(&captured(version, name)).unwrap();
        let iteration = (version == "0.6").then_some(70_000);
        assert_eq!(read("authkey"), Message::Authkey);
        assert_eq!(read("init"), Message::Init { pid: Some(4711), waits: version == "0.4" });
        assert_eq!(read("heartbeat"), Message::Heartbeat);
        assert_eq!(read("open"), Message::Section { change: Change::Open("step".into()), iteration });
        assert_eq!(read("close"), Message::Section { change: Change::Close("step".into()), iteration });
        assert_eq!(read("close_all"), Message::Section { change: Change::CloseAll, iteration: None });
        assert_eq!(read("update"), Message::UpdateConfig);
        assert_eq!(
            Message::read(&captured(version, "request")),
            Err(MessageError::Unknown),
            "a message of the launcher"
        );
    }
}

#[test]
fn a_client_without_step_numbers_gets_counted_steps_and_an_answer_to_each_message() {
    let message = |name| captured("0.4", name);
    let ok = reported_by(&[message("authkey")]).1;
    let (messages, answers) = reported_by(&[
        message("authkey"),
        message("init"),
        message("open"),
        message("close"),
        message("heartbeat"),
        message("update"),
    ]);
    let step = "step".to_owned();
    assert_eq!(
        messages,
        [
            ClientMessage::Connected { pid: 4711 },
            ClientMessage::Enter(step.clone()),
            ClientMessage::Leave(step),
            ClientMessage::Step(1),
            ClientMessage::Beat
        ],
    );
    let configuration = answers.len() - 5 * ok.len();
    assert!(answers.starts_with(&ok) && configuration > 100);
    assert!(answers[ok.len() + configuration..].chunks(ok.len()).all(|answer| answer == ok));
}

#[test]
fn a_client_that_does_not_wait_gets_no_answers_and_iterations_count_once() {
    let message = |name| captured("0.6", name);
    let (messages, answers) = reported_by(&[
        message("init"),
        message("open"),
        message("close"),
        message("open"),
        message("close"),
        message("heartbeat"),
    ]);
    let steps: Vec<_> =
        messages.iter().filter(|messages| matches!(messages, ClientMessage::Step(_))).collect();
    assert_eq!(steps, [&ClientMessage::Step(70_000)], "evaluation in the same iteration is not a step");
    let init_alone = reported_by(&[message("init")]).1;
    assert_eq!(answers, init_alone);
}

#[test]
fn overlapping_sections_become_a_stack() {
    let section = |name: &str, action: u8| {
        let open = captured("0.4", "open");
        let at = open.windows(4).position(|window| window == b"step").unwrap();
        let mut made = open.clone();
        made.splice(at - 1..at + 4, [&[name.len() as u8], name.as_bytes()].concat());
        // The enumeration's number is the only one-byte integer 1. The parser ignores a frame's length.
        let number = made.windows(3).rposition(|window| window == [b'K', 1, 0x85]).unwrap();
        made[number + 1] = action;
        made
    };
    let init = captured("0.4", "init");
    let (messages, _) =
        reported_by(&[init, section("setup", 1), section("checkpointing", 1), section("setup", 2)]);
    let texts = |messages: &[ClientMessage]| {
        messages.iter().map(|messages| format!("{messages:?}")).collect::<Vec<_>>()
    };
    assert_eq!(
        texts(&messages[1..]),
        [r#"Enter("setup")"#, r#"Enter("checkpoint")"#, r#"Leave("setup")"#, r#"Enter("checkpoint")"#],
    );
}

#[test]
fn sections_that_are_open_at_the_end_of_the_connection_are_closed() {
    let mut session = Session::default();
    let (mut messages, mut answers) = (Vec::new(), Vec::new());
    let bytes = [framed(&captured("0.6", "init")), framed(&captured("0.6", "open"))].concat();
    session.receive(&bytes, &mut messages, &mut answers).unwrap();
    messages.clear();
    session.end(&mut messages);
    assert_eq!(messages, [ClientMessage::Leave("step".into())]);
}

fn refusal(pickle: &[u8]) -> SessionError {
    let (mut messages, mut answers) = (Vec::new(), Vec::new());
    let mut session = Session::default();
    let error = session.receive(&framed(pickle), &mut messages, &mut answers).unwrap_err();
    assert_eq!(messages, []);
    let shown = String::from_utf8_lossy(&answers).into_owned();
    assert!(shown.contains("ErrorMsg") && shown.contains(&error.to_string()), "{shown}");
    error
}

fn refused_pickle(bytes: &[u8]) -> PickleError {
    match refusal(bytes) {
        SessionError::Message(MessageError::Pickle(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn refused_class(name: &str) -> PickleError {
    PickleError::Class { name: name.to_owned() }
}

#[test]
fn no_other_class_can_be_constructed_or_called() {
    // os.system("x") as Python 3 and Python 2 write it.
    assert_eq!(
        refused_pickle(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R."),
        refused_class("os.system")
    );
    assert_eq!(refused_pickle(b"cos\nsystem\n(S'x'\ntR."), PickleError::Opcode { opcode: b'c', at: 0 });
    // A class of the right module that is not allowed, and an allowed class name in another module.
    let module = mainstay_wire::nvrx::pickle::MODULE;
    let class = |module: &str, name: &str| {
        let text = |text: &str| [&[0x8c, text.len() as u8], text.as_bytes()].concat();
        [&b"\x80\x04"[..], &text(module), &text(name), b"\x93"].concat()
    };
    for (module, name) in [(module, "FT_LAUNCHER_IPC_SOCKET_ENV_VAR"), ("builtins", "OkMsg")] {
        let pickle = [&class(module, name)[..], b"."].concat();
        assert_eq!(refused_pickle(&pickle), refused_class(&format!("{module}.{name}")));
    }
    // A call of a class, an enumeration member without a call, a build of something that is no object.
    let misfits: [&[u8]; 5] = [b")R.", b"K\x01\x85\x81.", b"}b.", b"K\x01\x85R.", b"\x85."];
    for instructions in misfits {
        let refused = refusal(&[&class(module, "HeartbeatMsg")[..], instructions].concat());
        assert!(
            matches!(
                refused,
                SessionError::Message(
                    MessageError::Pickle(PickleError::Stack { .. }) | MessageError::Unknown
                )
            ),
            "{refused:?}"
        );
    }
    // Persistent ids, extensions, out-of-band buffers, instances of Python 1.
    for opcode in
        [b'P', b'Q', 0x82, 0x83, 0x84, b'i', b'o', b'c', 0x92, 0x97, 0x98, 0x8b, 0x8d, 0x8e, 0x96, b'B', b'V']
    {
        assert!(matches!(
            Pickle::read(&[opcode, 0, 0, 0, 0, 0, 0, 0, 0, b'.']),
            Err(PickleError::Opcode { .. })
        ));
    }
}

#[test]
fn lengths_are_bounded() {
    let (mut messages, mut answers) = (Vec::new(), Vec::new());
    let too_long = (MESSAGE_BYTES as u32 + 1).to_be_bytes();
    let error = Session::default().receive(&too_long, &mut messages, &mut answers).unwrap_err();
    assert_eq!(error, SessionError::TooLong(MESSAGE_BYTES + 1));
    // Text that claims to be longer than the message, and ten thousand nested values.
    assert_eq!(Pickle::read(b"X\xff\xff\xff\x7fabc").unwrap_err(), PickleError::Truncated);
    let deep = [vec![b')'; 10_000], vec![0x85; 10_000], b".".to_vec()].concat();
    Pickle::read(&deep).unwrap();
    // A list that contains itself, and a value doubled 8000 times: neither costs more than its bytes.
    Pickle::read(b"]\x94h\x00a.").unwrap();
    let doubled = b"h\x00h\x00\x86q\x00".repeat(8000);
    Pickle::read(&[&b")q\x00"[..], &doubled, b"."].concat()).unwrap();
}

#[test]
fn a_client_must_identify_itself_first() {
    assert_eq!(refusal(&captured("0.6", "heartbeat")), SessionError::NotInitialised);
}

#[test]
fn large_integers_are_read_as_python_writes_them() {
    let number = |bytes: &[u8]| {
        let pickle = [&[0x8a, bytes.len() as u8], bytes, b"."].concat();
        match Pickle::read(&pickle).unwrap().root() {
            mainstay_wire::nvrx::pickle::Node::Int(value) => *value,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((number(&[]), number(&[0xff]), number(&[0, 1]), number(&[0xff, 0x7f])), (0, -1, 256, 32767));
    assert_eq!((number(&[0xff; 20]), number(&[0x7f; 20]), number(&[0x80; 20])), (-1, i64::MAX, i64::MIN));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Message::read(&bytes);
        let (mut messages, mut answers) = (Vec::new(), Vec::new());
        let _ = Session::default().receive(&bytes, &mut messages, &mut answers);
    }

    #[test]
    fn a_corrupted_message_does_not_panic(
        which in 0_usize..16, cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let line = MESSAGES.lines().nth(which).unwrap();
        let mut words = line.split(' ');
        let mut bytes = captured(words.next().unwrap(), words.next().unwrap());
        for (at, value) in cuts {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = Message::read(&bytes);
        bytes.truncate(bytes.len() / 2);
        let _ = Message::read(&bytes);
    }

    #[test]
    fn a_truncated_message_is_refused(which in 0_usize..16, length in any::<prop::sample::Index>()) {
        let line = MESSAGES.lines().nth(which).unwrap();
        let mut words = line.split(' ');
        let mut bytes = captured(words.next().unwrap(), words.next().unwrap());
        bytes.truncate(length.index(bytes.len()));
        prop_assert!(Message::read(&bytes).is_err());
    }

    #[test]
    fn no_sequence_of_allowed_instructions_panics(
        picks in prop::collection::vec(prop::sample::select(vec![
            &b"\x80\x04"[..], b"N", b"\x88", b"K\x01", b"M\x01\x02", b"J\x01\x02\x03\x04", b"\x8a\x01\x05", b"\x8c\x04step",
            b"C\x01x", b"}", b")", b"]", b"\x8f", b"(", b"\x85", b"\x86", b"\x87", b"t", b"a", b"e", b"\x90", b"s", b"u",
            b"\x8c\x2anvidia_resiliency_ext.fault_tolerance.data\x8c\x0aSectionMsg\x93",
            b"\x8c\x2anvidia_resiliency_ext.fault_tolerance.data\x8c\x0dSectionAction\x93",
            b"\x81", b"R", b"b", b"\x94", b"h\x00", b"q\x01", b"h\x01", b"j\x00\x00\x00\x00",
        ]), 0..60),
    ) {
        let bytes = [picks.concat(), b".".to_vec()].concat();
        let _ = Message::read(&bytes);
    }
}
