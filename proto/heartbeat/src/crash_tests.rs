//! A writer that dies between any two of its stores.
//!
//! Each operation is run once for every number of stores that its process can make before it is killed; later
//! stores are lost. A reader must then see the state before the operation or the state after it.
#![cfg(not(loom))]

use std::cell::Cell;

use crate::fresh::fresh;
use crate::{
    Claim, Claiming, Collective, ExitKind, ExitNote, Measures, Note, Page, SectionId, StepRecord, Writer,
};

thread_local! {
    /// How many more stores the writer of this thread lives to make.
    static STORES_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Counts one store down; once there are none left, none reaches the page.
pub(crate) fn writer_is_dead() -> bool {
    STORES_LEFT.with(|left| match left.get() {
        None => false,
        Some(0) => true,
        Some(more) => {
            left.set(Some(more - 1));
            false
        }
    })
}

fn counters(comm: u64, entered: u64, completed: u64) -> Collective {
    Collective { comm, entered, completed, signature: 0 }
}

/// Runs `work` with only this many stores to make; returns whether it used them up.
fn dies_after(stores: u64, work: impl FnOnce()) -> bool {
    STORES_LEFT.set(Some(stores));
    work();
    STORES_LEFT.replace(None) == Some(0)
}

fn process(pid: u32) -> Claiming<'static> {
    Claiming { pid, start_ticks: 77, pid_namespace: 1, image: 5, version: "test 1.0", language: "rust" }
}

/// One operation at a time `now`.
type Operation = Box<dyn Fn(&Writer<'_>, u64)>;

fn writing(operation: impl Fn(&mut crate::Writing<'_>, u64) + 'static) -> Operation {
    Box::new(move |writer, now| operation(&mut writer.try_write(process(10).key()).unwrap(), now))
}

/// Every kind of operation, in an order that reaches each of its branches.
fn script() -> Vec<Operation> {
    let measures =
        |step: u64| Measures { loss: Some(step as f64), grad_norm: Some(0.5), digest: Some(!step) };
    let mut script: Vec<Operation> = vec![
        Box::new(|writer, now| assert!(writer.claim(now, &process(10)))),
        writing(|page, now| page.beat(now)),
        writing(|page, _| assert_eq!(page.intern("forward").get(), 1)),
        writing(|page, now| page.enter(now, SectionId::new(1))),
        writing(|page, now| page.enter(now, SectionId::new(2))),
        writing(move |page, now| page.step(now, 1, measures(1))),
        writing(|page, now| page.leave(now, SectionId::new(2))),
        writing(|page, now| page.leave(now, SectionId::new(9))),
        writing(|page, _| page.collective_with(counters(40, 2, 1))),
        writing(|page, _| page.collective_with(counters(40, 3, 3))),
        writing(|page, _| page.collective_with(counters(41, 1, 1))),
    ];
    script.extend((0..10).map(|id| writing(move |page, now| page.enter(now, SectionId::new(id)))));
    script.extend((0..10).rev().map(|id| writing(move |page, now| page.leave(now, SectionId::new(id)))));
    script.extend((2..5).map(|step| writing(move |page, now| page.step(now, step, measures(step)))));
    script.push(Box::new(|writer, now| {
        let note = Note {
            kind: ExitKind::Exception,
            exception: "ValueError",
            message: "bad",
            traceback: "line 1\nline 2",
        };
        writer.exit_note(now, &note);
    }));
    script.push(writing(|page, now| page.close(now)));
    script
}

/// All that a reader can see.
#[derive(Clone, Debug, PartialEq)]
struct View {
    beat: Option<crate::Beat>,
    records: Vec<StepRecord>,
    names: Vec<String>,
    collectives: Vec<Collective>,
    note: Option<ExitNote>,
    claim: Claim,
}

fn view(page: &Page<'_>) -> View {
    let mut records = Vec::new();
    let drained = page.records_since(0, &mut records);
    assert_eq!(drained.missed, 0, "a torn record within the ring's head");
    View {
        beat: page.beat(),
        records,
        names: (0..64).map_while(|id| page.section_name(SectionId::new(id))).collect(),
        collectives: page.collectives(),
        note: page.exit_note(),
        claim: page.claim(),
    }
}

fn assert_either<T: PartialEq + std::fmt::Debug>(what: &str, seen: &T, before: &T, after: &T) {
    assert!(seen == before || seen == after, "{what}: {seen:#?}\nbefore: {before:#?}\nafter: {after:#?}");
}

#[test]
fn whichever_store_is_a_writers_last_the_last_whole_state_is_read() {
    let script = script();
    let mut deaths = 0;
    for (index, operation) in script.iter().enumerate() {
        let now = |index: usize| 1000 + 10 * index as u64;
        let replay = |length: usize| {
            let words = fresh();
            let writer = Writer::new(&words).unwrap();
            script[..length].iter().enumerate().for_each(|(index, operation)| operation(&writer, now(index)));
            words
        };
        let (before, after) = (replay(index), replay(index + 1));
        let (before, after) = (view(&Page::new(&before).unwrap()), view(&Page::new(&after).unwrap()));
        for stores in 0.. {
            let words = replay(index);
            let (page, writer) = (Page::new(&words).unwrap(), Writer::new(&words).unwrap());
            let died = dies_after(stores, || operation(&writer, now(index)));

            let seen = view(&page);
            assert_either("beat", &seen.beat, &before.beat, &after.beat);
            assert_either("records", &seen.records, &before.records, &after.records);
            assert_either("names", &seen.names, &before.names, &after.names);
            assert_either("note", &seen.note, &before.note, &after.note);
            if seen.claim != Claim::Unclaimed {
                assert_either("claim", &seen.claim, &before.claim, &after.claim);
            }
            assert!(
                seen.collectives.iter().all(|comm| comm.completed <= comm.entered),
                "{:?}",
                seen.collectives
            );

            // Another process takes the page over, whatever state it was left in.
            let heir = process(11);
            assert!(writer.claim(5000, &heir));
            let claims = match page.claim() {
                Claim::Claimed(claimant) if claimant.pid == 11 => claimant.claims,
                other => panic!("{other:?}"),
            };
            assert_eq!(page.beat(), seen.beat, "the dead process's beat stays until the heir's first");
            writer.try_write(heir.key()).unwrap().step(5010, 9, Measures::default());
            let beat = page.beat().unwrap();
            assert_eq!((beat.claim, beat.count, beat.step, beat.depth), (claims, 1, Some(9), 0));
            assert_eq!((beat.loss, page.exit_note()), (None, None));
            let mut records = Vec::new();
            page.records_since(seen.records.len() as u64, &mut records);
            assert_eq!(
                records.iter().map(|record| (record.step, record.first)).collect::<Vec<_>>(),
                [(9, true)]
            );

            if !died {
                assert_eq!(seen, after, "nothing was lost, and yet");
                break;
            }
            deaths += 1;
        }
    }
    assert!(deaths > 500, "only {deaths} points of death");
}

#[test]
fn a_lock_left_by_the_dead_is_no_obstacle_and_one_held_by_the_living_is() {
    let words = fresh();
    let writer = Writer::new(&words).unwrap();
    assert!(writer.claim(1, &process(10)));
    let held = writer.try_write(process(10).key()).unwrap();
    assert!(writer.try_write(process(10).key()).is_none());
    assert!(!writer.claim(2, &process(10)), "another thread of this process is writing");
    assert_eq!(writer.page().counters().skipped, 1);
    std::mem::forget(held);
    assert!(writer.claim(3, &process(11)), "the process that held it is dead");
}
