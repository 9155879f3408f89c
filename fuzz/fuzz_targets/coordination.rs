//! The contents of a coordination store: the log of the built-in store, which another version or a failing disk may
//! have written, and the values of other launchers. A store restored from any log survives a round trip, and so does
//! a value.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mainstay_coord::group::values::{self, JobEndedNote, Leader, Member, Record, Round};
use mainstay_coord::server::log::{MAGIC, encode, parse};
use mainstay_coord::server::store::{Limits, Store};
use mainstay_fuzz::survives_json;

fuzz_target!(|bytes: &[u8]| {
    let parsed = parse(bytes);
    assert!(parsed.whole <= bytes.len());
    replayed(parsed.records);
    // Checksums are hard to guess, so the same bytes are also read as the record of a valid frame.
    if let Ok(record) = prost::Message::decode(bytes) {
        let framed = [MAGIC.as_slice(), &encode(&record)].concat();
        let parsed = parse(&framed);
        assert_eq!((parsed.whole, &parsed.records[..]), (framed.len(), &[record][..]));
        replayed(parsed.records);
    }
    if let Ok(member) = values::read::<Member>(bytes) {
        assert!(member.needs <= values::VERSION);
        survives_json::<Member>(bytes);
    }
    let _ = values::read::<Leader>(bytes);
    let _ = values::read::<Record>(bytes);
    let _ = values::read::<Round>(bytes);
    let _ = values::read::<JobEndedNote>(bytes);
});

fn replayed(records: Vec<mainstay_coord::etcd::log::Record>) {
    let mut records = records.into_iter();
    let Some(Ok(mut store)) = records.next().map(|first| Store::restore(first, Limits::default(), 0)) else { return };
    for record in records {
        if store.replay(record, 0).is_err() {
            break;
        }
    }
    let again = Store::restore(store.snapshot(), Limits::default(), 0).expect("a store's own snapshot can be read");
    assert_eq!(again.snapshot(), store.snapshot());
}
