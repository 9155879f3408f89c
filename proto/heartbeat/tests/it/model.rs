//! Random sequences of operations: a reader must see exactly what a plain model predicts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic here is the test's report")]

use crate::support;

use mainstay_heartbeat::layout::{
    COLLECTIVE_ENTRIES, NAME_ENTRIES, RECORD_SECTIONS, RING_RECORDS, SECTION_DEPTH, TRACEBACK_BYTES,
};
use mainstay_heartbeat::{
    Claim, Claiming, Collective, Counters, ExitKind, MINOR, Measures, Note, Page, SectionId, StepRecord,
    Writer,
};
use proptest::prelude::*;
use support::{fresh, process};

#[derive(Clone, Debug)]
enum Operation {
    Claim,
    Beat,
    Step(u64, Measures),
    Intern(u8),
    Enter(u8),
    Leave(u8),
    Spend(u8, u64),
    Collective(u64, u64),
    Note(String),
    Close,
    /// More steps than anyone reads in time.
    ManySteps(u64),
    /// A reader drains the ring.
    Drain,
}

fn counters(comm: u64, count: u64) -> Collective {
    Collective { comm, entered: count + 1, completed: count, signature: comm << 40 | count }
}

fn operation() -> impl Strategy<Value = Operation> {
    let measure = || prop::option::of(prop_oneof![Just(f64::NAN), any::<f64>()]);
    let measures = (measure(), measure(), prop::option::of(any::<u64>()))
        .prop_map(|(loss, grad_norm, digest)| Measures { loss, grad_norm, digest });
    prop_oneof![
        1 => Just(Operation::Claim),
        6 => Just(Operation::Beat),
        12 => (any::<u64>(), measures).prop_map(|(step, measures)| Operation::Step(step, measures)),
        4 => any::<u8>().prop_map(Operation::Intern),
        14 => (0_u8..14).prop_map(Operation::Enter),
        12 => (0_u8..14).prop_map(Operation::Leave),
        4 => (0_u8..14, 0_u64..1000).prop_map(|(id, ns)| Operation::Spend(id, ns)),
        3 => (0_u64..20, 0_u64..15).prop_map(|(comm, count)| Operation::Collective(comm, count)),
        1 => ".{0,40}".prop_map(Operation::Note),
        1 => Just(Operation::Close),
        1 => (1_u64..700).prop_map(Operation::ManySteps),
        2 => Just(Operation::Drain),
    ]
}

/// The expected content of the page.
#[derive(Default)]
struct Model {
    pid: u32,
    claims: u64,
    closed: Option<u64>,
    count: u64,
    beat_ns: Option<u64>,
    step: Option<(u64, u64)>,
    last: Measures,
    open: Vec<(u8, u64)>,
    too_deep: u64,
    step_start: u64,
    first: bool,
    spent: Vec<(u8, u64)>,
    overflow: bool,
    records: Vec<Expected>,
    names: Vec<String>,
    collectives: Vec<Collective>,
    counters: Counters,
    note: Option<String>,
    cursor: usize,
    beat_of_claim: u64,
}

struct Expected {
    step: u64,
    start: u64,
    end: u64,
    claim: u64,
    first: bool,
    measures: Measures,
    spent: Vec<(u8, u64)>,
    overflow: bool,
}

impl Model {
    fn beat(&mut self, now: u64) {
        self.count += 1;
        self.beat_ns = Some(now);
        self.beat_of_claim = self.claims;
    }

    fn charge(&mut self, level: usize, now: u64) {
        let (id, start) = self.open[level];
        if self.open[..level].iter().any(|(outer, _)| *outer == id) {
            return;
        }
        self.spend(id, now - start.max(self.step_start));
    }

    fn spend(&mut self, id: u8, ns: u64) {
        if let Some((_, spent)) = self.spent.iter_mut().find(|(known, _)| *known == id) {
            *spent += ns;
        } else if self.spent.len() < RECORD_SECTIONS {
            self.spent.push((id, ns));
        } else {
            self.overflow = true;
        }
    }

    fn apply(&mut self, operation: &Operation, now: u64) {
        match operation {
            Operation::Claim => {
                let (records, names, cursor) =
                    (std::mem::take(&mut self.records), std::mem::take(&mut self.names), self.cursor);
                *self = Self {
                    pid: self.pid + 1,
                    claims: self.claims + 1,
                    step_start: now,
                    first: true,
                    records,
                    names,
                    cursor,
                    ..Self::default()
                };
            }
            Operation::Beat => self.beat(now),
            Operation::Step(step, measures) => {
                (0..self.open.len()).for_each(|level| self.charge(level, now));
                self.records.push(Expected {
                    step: *step,
                    start: self.step_start,
                    end: now,
                    claim: self.claims,
                    first: self.first,
                    measures: *measures,
                    spent: std::mem::take(&mut self.spent),
                    overflow: self.overflow,
                });
                (self.first, self.step_start, self.overflow) = (false, now, self.too_deep > 0);
                self.step = Some((*step, now));
                self.last = Measures {
                    loss: measures.loss.or(self.last.loss),
                    grad_norm: measures.grad_norm.or(self.last.grad_norm),
                    digest: measures.digest.or(self.last.digest),
                };
                self.beat(now);
            }
            Operation::Intern(name) => {
                let name = name_of(*name);
                if self.names.contains(&name) {
                } else if self.names.len() < NAME_ENTRIES - 1 {
                    self.names.push(name);
                } else {
                    self.counters.names_refused += 1;
                }
            }
            Operation::Enter(id) => {
                if self.open.len() < SECTION_DEPTH {
                    self.open.push((*id, now));
                } else {
                    self.too_deep += 1;
                    self.overflow = true;
                }
                self.beat(now);
            }
            Operation::Leave(id) => {
                if self.too_deep > 0 {
                    self.too_deep -= 1;
                } else if let Some(level) = self.open.iter().rposition(|(open, _)| open == id) {
                    (level..self.open.len()).rev().for_each(|level| self.charge(level, now));
                    self.open.truncate(level);
                } else {
                    self.counters.unmatched_leaves += 1;
                }
                self.beat(now);
            }
            Operation::Spend(id, ns) => self.spend(*id, *ns),
            Operation::Collective(comm, count) => {
                let value = counters(*comm, *count);
                if let Some(known) = self.collectives.iter_mut().find(|known| known.comm == *comm) {
                    *known = value;
                } else if self.collectives.len() < COLLECTIVE_ENTRIES {
                    self.collectives.push(value);
                } else {
                    self.counters.collectives_refused += 1;
                }
            }
            Operation::Note(text) => {
                self.note.get_or_insert_with(|| text.clone());
            }
            Operation::Close => self.closed = Some(now),
            Operation::ManySteps(steps) => {
                (0..*steps)
                    .for_each(|step| self.apply(&Operation::Step(step, Measures::default()), now + step));
            }
            Operation::Drain => {}
        }
    }

    fn perform(&self, writer: &Writer<'_>, operation: &Operation, now: u64) {
        let write = || writer.try_write(process(self.pid).key()).unwrap();
        match operation {
            Operation::Claim => assert!(writer.claim(now, &process(self.pid + 1))),
            Operation::Beat => write().beat(now),
            Operation::Step(step, measures) => write().step(now, *step, *measures),
            Operation::Intern(name) => {
                let id = write().intern(&name_of(*name));
                assert_eq!(writer.find_section(&name_of(*name)).unwrap_or(SectionId::OTHER), id);
            }
            Operation::Enter(id) => write().enter(now, SectionId::new((*id).into())),
            Operation::Leave(id) => write().leave(now, SectionId::new((*id).into())),
            Operation::Spend(id, ns) => write().spend(SectionId::new((*id).into()), *ns),
            Operation::Collective(comm, count) => write().collective_with(counters(*comm, *count)),
            Operation::Note(text) => {
                let note = Note { kind: ExitKind::Other, exception: "", message: text, traceback: "" };
                assert_eq!(writer.exit_note(now, &note), self.note.is_none());
            }
            Operation::Close => write().close(now),
            Operation::ManySteps(steps) => {
                (0..*steps).for_each(|step| write().step(now + step, step, Measures::default()));
            }
            Operation::Drain => {}
        }
    }

    fn check(&self, page: &Page<'_>) {
        let by = match (page.claim(), self.closed) {
            (Claim::Claimed(claimant), None) => claimant,
            (Claim::Closed { by, mono_ns }, Some(closed)) if mono_ns == closed => by,
            other => panic!("{other:?}"),
        };
        assert_eq!((by.pid, by.claims), (self.pid, self.claims));
        if let Some(beat_ns) = self.beat_ns {
            let beat = page.beat().unwrap();
            assert_eq!((beat.claim, beat.count, beat.mono_ns), (self.claims, self.count, beat_ns));
            assert_eq!(beat.step.zip(beat.step_mono_ns), self.step);
            assert!(same(beat.loss, self.last.loss) && same(beat.grad_norm, self.last.grad_norm));
            assert_eq!(beat.digest, self.last.digest);
            assert_eq!(beat.depth, self.open.len() as u64 + self.too_deep);
            let open: Vec<_> =
                beat.open_sections().iter().map(|open| (open.id.get(), open.start_mono_ns)).collect();
            assert_eq!(open, self.open);
        }
        assert_eq!(page.counters(), self.counters);
        assert_eq!(page.collectives(), self.collectives);
        assert_eq!(page.exit_note().map(|note| note.message), self.note);
        for (index, name) in self.names.iter().enumerate() {
            assert_eq!(page.section_name(SectionId::new(index as u64 + 1)).as_ref(), Some(name));
        }
    }

    fn drain(&mut self, page: &Page<'_>) {
        let mut records = Vec::new();
        let drained = page.records_since(self.cursor as u64, &mut records);
        let missed = (self.records.len() - self.cursor).saturating_sub(RING_RECORDS);
        assert_eq!((drained.missed, drained.next_cursor), (missed as u64, self.records.len() as u64));
        let expected = &self.records[self.cursor + missed..];
        assert_eq!(records.len(), expected.len());
        for (record, expected) in records.iter().zip(expected) {
            check_record(record, expected);
        }
        self.cursor = self.records.len();
    }
}

fn check_record(record: &StepRecord, expected: &Expected) {
    assert_eq!((record.step, record.claim), (expected.step, expected.claim as u32));
    assert_eq!((record.start_mono_ns, record.end_mono_ns), (expected.start, expected.end));
    assert_eq!((record.first, record.overflow), (expected.first, expected.overflow));
    assert!(same(record.loss, expected.measures.loss) && same(record.grad_norm, expected.measures.grad_norm));
    assert_eq!(record.digest, expected.measures.digest);
    let spent: Vec<_> = record.sections().iter().map(|spent| (spent.id.get(), spent.ns)).collect();
    assert_eq!(spent, expected.spent);
}

/// Equal bit for bit, so that NaN is NaN.
fn same(left: Option<f64>, right: Option<f64>) -> bool {
    left.map(f64::to_bits) == right.map(f64::to_bits)
}

fn name_of(number: u8) -> String {
    format!("section {number}").repeat(1 + usize::from(number % 3))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    #[test]
    fn a_reader_sees_what_the_writer_did(
        operations in prop::collection::vec((operation(), 0_u64..1000), 1..400),
    ) {
        let words = fresh();
        let (page, writer) = (Page::new(&words).unwrap(), Writer::new(&words).unwrap());
        let (mut model, mut now) = (Model::default(), 1_000);
        prop_assert_eq!(page.claim(), Claim::Unclaimed);
        for (operation, elapsed) in std::iter::once((Operation::Claim, 0)).chain(operations) {
            now += elapsed + 700;
            model.perform(&writer, &operation, now);
            model.apply(&operation, now);
            model.check(&page);
            if matches!(operation, Operation::Drain) {
                model.drain(&page);
            }
        }
        model.drain(&page);
    }

    #[test]
    fn notes_keep_what_matters_and_whole_characters(
        exception in "\\PC{0,90}",
        message in "\\PC{0,40}",
        repeats in 0_usize..400,
        traceback in "\\PC{1,200}",
    ) {
        let words = fresh();
        let (page, writer) = (Page::new(&words).unwrap(), Writer::new(&words).unwrap());
        prop_assert!(writer.claim(1, &process(1)));
        let (message, traceback) = (message.repeat(repeats), traceback.repeat(repeats));
        let note = Note {
            kind: ExitKind::Exception, exception: &exception, message: &message, traceback: &traceback,
        };
        prop_assert!(writer.exit_note(7, &note));
        let read = page.exit_note().unwrap();
        prop_assert_eq!((read.kind, read.mono_ns, read.step), (ExitKind::Exception, 7, None));
        prop_assert!(exception.starts_with(&read.exception) && message.starts_with(&read.message));
        prop_assert!(traceback.ends_with(&read.traceback));
        let cut = read.exception.len() < exception.len() || read.message.len() < message.len();
        prop_assert_eq!(read.message_cut, cut);
        prop_assert_eq!(read.traceback_cut, read.traceback.len() < traceback.len());
        // A character has at most four bytes, so at most three are lost.
        prop_assert!(read.traceback.len() >= traceback.len().min(TRACEBACK_BYTES - 3));
    }
}

#[test]
fn the_creators_words_are_read_as_they_were_given() {
    let words = fresh();
    let identity = Page::new(&words).unwrap().identity();
    let spec = support::spec();
    assert_eq!((identity.major, identity.minor, identity.job.as_str()), (1, MINOR.into(), spec.job));
    assert_eq!((identity.rank, identity.local_rank, identity.world_size), (3, 1, 8));
    assert_eq!((identity.attempt, identity.boot_id), (2, spec.boot_id));
    assert_eq!((identity.creator_pid, identity.created_mono_ns), (99, 5));
    assert_eq!(Page::new(&words).unwrap().section_name(SectionId::OTHER).as_deref(), Some("other"));
}

#[test]
fn a_second_copy_of_the_client_joins_its_process_and_a_new_program_image_does_not() {
    let words = fresh();
    let (page, first, second) =
        (Page::new(&words).unwrap(), Writer::new(&words).unwrap(), Writer::new(&words).unwrap());
    let who = process(1);
    assert!(first.claim(1, &who));
    first.try_write(who.key()).unwrap().enter(2, SectionId::new(1));
    // Say, one copy in a Python extension and one in a C library.
    assert!(second.claim(3, &Claiming { language: "c", ..who }));
    second.try_write(who.key()).unwrap().step(4, 10, Measures::default());
    let beat = page.beat().unwrap();
    assert_eq!((beat.claim, beat.count, beat.depth, beat.step), (1, 2, 1, Some(10)));

    // The process executes another program: same pid, same start, nothing of the old state.
    let next = Claiming { image: who.image + 1, ..who };
    assert!(first.claim(5, &next));
    first.try_write(next.key()).unwrap().beat(6);
    let beat = page.beat().unwrap();
    assert_eq!((beat.claim, beat.count, beat.depth, beat.step), (2, 1, 0, None));
}
