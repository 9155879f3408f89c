//! `mainstay run` on a real terminal: the line with the progress of the job, and the table at its end.

use mainstay_tests::{Stage, has_client};

use crate::words::terminal as words;

/// Ranks that write a line in each step.
const TALKATIVE: &str = r#"
import itertools, mainstay
mainstay.total_steps(10**4)
for step in itertools.count():
    mainstay.step(step)
    print(f"line {step} ends", flush=True)
    if os.path.exists(f"{MARKS}/end"):
        break
    time.sleep(0.02)
"#;

/// Whether a line is one that a rank wrote, whole.
fn is_of_a_rank(line: &str) -> bool {
    let number = |text: &str| text.parse::<u64>().is_ok();
    let step = line.strip_prefix("[rank 0] line ").or_else(|| line.strip_prefix("[rank 1] line "));
    step.and_then(|step| step.strip_suffix(" ends")).is_some_and(number)
}

#[test]
fn a_terminal_shows_the_progress_of_a_job_below_the_lines_of_its_ranks() {
    if !has_client() {
        return;
    }
    let stage = Stage::new();
    let Some(mut terminal) = stage.python(TALKATIVE).ranks(2).on_terminal() else { return };
    let shows_pace = |screen: &str| screen.lines().last().is_some_and(|last| last.contains(words::PACE));
    terminal.wait_for("the pace of the job", shows_pace);
    let total = |screen: &str| screen.lines().last().is_some_and(|last| last.contains(" of 10000 "));
    terminal.wait_for("the number of its steps, as the ranks reported it", total);
    // What does not fit is left out: the line is never longer than the terminal.
    terminal.resize(24, 30);
    terminal.wait_for("the start of that line", |screen| {
        screen.lines().last().is_some_and(|last| last.contains("step ") && !last.contains(words::PACE))
    });
    terminal.resize(24, 80);
    terminal.wait_for("the pace again", shows_pace);
    stage.mark("end");
    assert_eq!(terminal.end(), Some(0));
    assert!(!terminal.hides_cursor());
    let lines = terminal.lines();
    let written: Vec<&String> = lines.iter().filter(|line| line.contains("[rank ")).collect();
    assert!(written.len() > 20 && written.iter().all(|line| is_of_a_rank(line)), "{written:#?}");
    assert!(
        !lines.iter().any(|line| line.contains(words::PACE)),
        "the line is left on the terminal: {lines:#?}"
    );
    assert!(lines.iter().any(|line| line.contains(words::GOODPUT_ROW)), "{lines:#?}");
}

#[test]
fn progress_can_be_switched_off() {
    let stage = Stage::new();
    let script = "mark up; wait_for end";
    let Some(mut terminal) = stage.sh(script).options("--no-progress").on_terminal() else { return };
    terminal.wait_for("the first line", |screen| screen.contains("mainstay: job "));
    stage.mark("end");
    assert_eq!(terminal.end(), Some(0));
    assert!(!terminal.raw().contains('\x1b'), "{}", terminal.raw());
}
