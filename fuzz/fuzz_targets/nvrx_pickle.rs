//! The messages of an NVRx client: refused or parsed, with the same result at once and byte by byte.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_wire::nvrx::Session;
use mainstay_wire::nvrx::message::Message;
use mainstay_wire::nvrx::pickle::Pickle;

fuzz_target!(|bytes: &[u8]| {
    let _ = (Pickle::read(bytes), Message::read(bytes));
    let framed = [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat();
    for stream in [bytes, &framed] {
        let (mut reported, mut answers) = (Vec::new(), Vec::new());
        let whole = Session::default().receive(stream, &mut reported, &mut answers);
        let (mut slowly_told, mut slowly_answered, mut session) =
            (Vec::new(), Vec::new(), Session::default());
        let slowly = stream
            .iter()
            .try_for_each(|byte| session.receive(&[*byte], &mut slowly_told, &mut slowly_answered));
        assert_eq!((whole, reported, answers), (slowly, slowly_told, slowly_answered));
    }
});
