//! The C API: the header matches the library's exports, and a C program that uses it writes beats.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a panic here is the test's report"
)]

use crate::support;

use std::path::{Path, PathBuf};
use std::process::Command;

use mainstay_heartbeat::{Claim, ExitKind};
use support::TestPage;
use testing::TempDir;

const CLIENT: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn the_header_declares_exactly_what_the_library_exports() {
    let rust = std::fs::read_to_string(Path::new(CLIENT).join("src/ffi.rs")).unwrap();
    let header = std::fs::read_to_string(Path::new(CLIENT).join("c/mainstay.h")).unwrap();
    let exported = exported_prototypes(&rust);
    assert!(exported.len() > 10, "only {exported:?}");
    assert_eq!(declared_prototypes(&header), exported);
}

#[test]
fn the_example_beats_when_linked_with_the_shared_library() {
    run_example(&["-L{lib}", "-lmainstay_client", "-Wl,-rpath,{lib}"]);
}

#[test]
fn the_example_beats_when_linked_with_the_static_library() {
    run_example(&["{lib}/libmainstay_client.a", "-lpthread", "-ldl"]);
}

#[test]
fn null_and_garbage_arguments_are_tolerated() {
    let source = r#"
        #include <stddef.h>
        #include "mainstay.h"
        int main(void) {
            /* Before any open. */
            mainstay_beat(); mainstay_step(1); mainstay_close(); mainstay_section_enter(7);
            if (mainstay_active() || mainstay_refusal() || mainstay_open_path(NULL)) return 1;
            if (mainstay_open_path("/nonexistent/page") || mainstay_refusal() == NULL) return 2;
            if (!mainstay_open() || mainstay_refusal() != NULL) return 3;
            mainstay_step_with(5, NULL, NULL, NULL);
            if (mainstay_section_intern(NULL) != MAINSTAY_SECTION_OTHER) return 4;
            if (mainstay_section_intern("\xff\xfe") == MAINSTAY_SECTION_OTHER) return 5;
            mainstay_section_leave(4000000000u);
            mainstay_section_enter(4000000000u);
            mainstay_data_at(41); mainstay_total_steps(500); mainstay_resume(); mainstay_pause(); mainstay_pause(); mainstay_resume();
            mainstay_expect_long(1.5); mainstay_resume();
            mainstay_exit_note(-77, NULL, NULL, "\xc3");
            mainstay_close(); mainstay_close();
            return mainstay_active() ? 6 : 0;
        }"#;
    let page = TestPage::new();
    let file = page.directory.path().join("garbage.c");
    std::fs::write(&file, source).unwrap();
    let program =
        compile(&file, page.directory.path(), &["-L{lib}", "-lmainstay_client", "-Wl,-rpath,{lib}"]);
    let status = run(&program).env("MAINSTAY_PAGE", &page.path).status().unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(page.page.beat().unwrap().step, Some(5));
    assert_eq!(page.page.counters().unmatched_leaves, 1);
    assert_eq!((page.page.data(), page.page.total_steps()), (Some(41), Some(500)));
    let note = page.page.exit_note().unwrap();
    assert_eq!((note.kind, note.traceback.as_str()), (ExitKind::Other, "\u{fffd}"));
}

fn run_example(link: &[&str]) {
    let page = TestPage::new();
    let build = TempDir::new().unwrap();
    let program = compile(&Path::new(CLIENT).join("c/example.c"), build.path(), link);

    let output = run(&program).env("MAINSTAY_PAGE", &page.path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "active=1\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");

    let Claim::Closed { by, .. } = page.page.claim() else { panic!("{:?}", page.page.claim()) };
    assert_eq!((by.language.as_str(), by.claims), ("c", 1));
    let beat = page.page.beat().unwrap();
    // 20 x (enter, leave, step) and twice (enter, beat, leave).
    assert_eq!((beat.count, beat.step, beat.depth), (66, Some(20), 0));
    assert_eq!((beat.digest, beat.grad_norm), (Some(42), None));
    assert!(beat.loss.is_some_and(|loss| loss > 0.0));
    let mut records = Vec::new();
    page.page.records_since(0, &mut records);
    assert_eq!(records.iter().map(|record| record.step).collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
    let names = |index: usize| -> Vec<String> {
        records[index].sections().iter().map(|section| page.page.section_name(section.id).unwrap()).collect()
    };
    assert_eq!((names(0), names(9)), (vec!["compute".into()], vec!["compute".into(), "checkpoint".into()]));
    assert_eq!(page.page.collectives()[0].completed, 20);
    assert_eq!(page.page.exit_note().unwrap().message, "all 20 steps done");

    let alone = run(&program).env_remove("MAINSTAY_PAGE").output().unwrap();
    assert!(alone.status.success());
    assert_eq!((alone.stdout.as_slice(), alone.stderr.as_slice()), (&b"active=0\n"[..], &b""[..]));
}

/// Without the library path that cargo sets for its tests: it comes before the program's own, and may hold a library
/// of an earlier build.
fn run(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_remove("LD_LIBRARY_PATH");
    command
}

/// Compiles with warnings as errors against the library built along with this test.
fn compile(source: &Path, directory: &Path, link: &[&str]) -> PathBuf {
    // The test is in target/<profile>/deps, next to the libraries that cargo built for it.
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = directory.join("program");
    let link = link.iter().map(|argument| argument.replace("{lib}", libraries.to_str().unwrap()));
    let output = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(Path::new(CLIENT).join("c"))
        .arg(source)
        .args(link)
        .args(["-lm", "-o"])
        .arg(&program)
        .output()
        .expect("a C compiler named cc is needed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// The exports of ffi.rs, written as C would.
fn exported_prototypes(rust: &str) -> Vec<String> {
    let mut found: Vec<String> = rust
        .split("#[unsafe(no_mangle)]")
        .skip(1)
        .map(|item| {
            let (_, signature) = item.split_once("extern \"C\" fn ").unwrap();
            let (name, rest) = signature.split_once('(').unwrap();
            let (arguments, rest) = rest.split_once(')').unwrap();
            let (result, _) = rest.split_once('{').unwrap();
            let result = result.trim().strip_prefix("->").map_or("void", |rust| c_type(rust.trim()));
            let arguments: Vec<String> = arguments
                .split(',')
                .filter_map(|argument| argument.split_once(':'))
                .map(|(name, rust)| format!("{} {}", c_type(rust.trim()), name.trim()))
                .collect();
            let arguments = if arguments.is_empty() { "void".into() } else { arguments.join(", ") };
            format!("{result} {name}({arguments})").replace("* ", "*")
        })
        .collect();
    found.sort();
    found
}

fn c_type(rust: &str) -> &'static str {
    match rust {
        "c_int" => "int",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "f64" => "double",
        "*const c_char" => "const char *",
        "*const f64" => "const double *",
        "*const u64" => "const uint64_t *",
        other => panic!("no C type is known for {other}"),
    }
}

/// The prototypes of the header, comments and line breaks aside.
fn declared_prototypes(header: &str) -> Vec<String> {
    let mut code = String::new();
    let mut rest = header;
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").unwrap().1;
    }
    code.push_str(rest);
    let lines = code.lines().filter(|line| !line.starts_with('#') && !line.contains("extern \"C\""));
    let mut found: Vec<String> = lines
        .collect::<Vec<_>>()
        .join(" ")
        .split(';')
        .map(|statement| statement.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|statement| statement.contains("mainstay_"))
        .collect();
    found.sort();
    found
}
