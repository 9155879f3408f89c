//! Blocks of commands: each is run by a test or says why not, and the program accepts each command line.

use std::fs;
use std::path::Path;

use clap::error::ErrorKind;
use mainstay_tests::documents::{Checked, Kind, Page};

/// Blocks of commands that do not say how they are checked, or name no test.
pub fn unchecked(root: &Path, page: &Page) -> Vec<String> {
    let blocks = page.blocks().into_iter().filter(|block| block.is_of_commands());
    let complaint = |why: &str, start| Some(format!("{}: {why}", page.at(start)));
    blocks
        .filter_map(|block| {
            if block.commands().is_empty() {
                return complaint("there is no command: this is `text`", block.start);
            }
            match block.checked() {
                None => complaint(
                    "the line above is none of <!-- run -->, <!-- run by FILE FUNCTION --> and <!-- not run: REASON -->",
                    block.start,
                ),
                Some(Checked::RunBy { file, function }) => {
                    let text = fs::read_to_string(root.join(&file)).unwrap_or_default();
                    let is_there = ["fn", "def"].iter().any(|def| text.contains(&format!("{def} {function}(")));
                    (!is_there).then(|| format!("{}: no {function} in {}", page.at(block.start), file.display()))
                }
                Some(Checked::Run | Checked::NotRun) => None,
            }
        })
        .collect()
}

/// Command lines of `mainstay` that it does not understand: in blocks, and of those in the text the options.
pub fn refused(page: &Page) -> Vec<String> {
    let blocks = page.blocks().into_iter().filter(|block| block.is_of_commands());
    let in_blocks = blocks.flat_map(|block| {
        let commands = block.commands().into_iter();
        commands.map(|command| (block.start, command, &WRONG_IN_BLOCKS[..])).collect::<Vec<_>>()
    });
    // What changed is written in the words of its time.
    let is_history = page.name == Path::new("CHANGELOG.md");
    let is_text = |kind: &Kind| matches!(kind, Kind::Prose | Kind::Table) && !is_history;
    let lines = page.lines.iter().enumerate().filter(|(_, line)| is_text(&line.kind));
    let in_text = lines.flat_map(|(index, line)| {
        let code = line.text.split('`').skip(1).step_by(2).filter(|code| code.starts_with("mainstay "));
        code.map(move |code| (index, code.to_owned(), &WRONG_IN_TEXT[..]))
    });
    let complaint = |(index, command, wrong): (usize, String, &[ErrorKind])| {
        let why = why_refused(&command, wrong)?;
        Some(format!("{}: {command}: {why}", page.at(index)))
    };
    in_blocks.chain(in_text).filter_map(complaint).collect()
}

/// What may not be wrong with a command line that people copy; an example may leave something out.
const WRONG_IN_BLOCKS: [ErrorKind; 4] = [
    ErrorKind::UnknownArgument,
    ErrorKind::InvalidSubcommand,
    ErrorKind::InvalidValue,
    ErrorKind::ValueValidation,
];
/// The text has placeholders in the place of commands and values.
const WRONG_IN_TEXT: [ErrorKind; 1] = [ErrorKind::UnknownArgument];

/// Why `mainstay` does not understand its part of a command line.
fn why_refused(command: &str, wrong: &[ErrorKind]) -> Option<String> {
    let words = shlex::split(command)?;
    // Stock torchrun has an argument of this name.
    if words.first().is_some_and(|program| program == "torchrun") {
        return None;
    }
    let of_mainstay = words.iter().skip_while(|word| *word != "mainstay");
    let is_end = |word: &&String| ["|", ">", "&&", ";", "...", "\u{2026}"].contains(&word.as_str());
    let line: Vec<&String> = of_mainstay.take_while(|word| !is_end(word)).collect();
    if line.len() < 2 {
        return None;
    }
    let error = mainstay_cli::command_line().try_get_matches_from(line).err()?;
    wrong.contains(&error.kind()).then(|| error.to_string().lines().next().unwrap_or_default().to_owned())
}

#[test]
fn an_option_that_is_gone_is_reported_and_an_example_that_leaves_something_out_is_not() {
    let text = "```console\n$ mpirun -x A mainstay run --nproc-per-node 2 ... train.py | tee a\n\
                $ mainstay status --jsn\n```\n`mainstay ckpt`, `mainstay COMMAND` and `mainstay ranks --nosuch`.\n";
    let found = refused(&Page::parse(Path::new("docs/a.md"), text));
    let lines: Vec<&str> = found.iter().filter_map(|line| line.split(": ").next()).collect();
    assert_eq!(lines, ["docs/a.md:2", "docs/a.md:5"]);
}
