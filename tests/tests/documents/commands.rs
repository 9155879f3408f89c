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

/// Command lines of `mainstay`, in blocks and in the text, that it does not understand.
pub fn refused(page: &Page) -> Vec<String> {
    let blocks = page.blocks().into_iter().filter(|block| block.is_of_commands());
    let in_blocks = blocks.flat_map(|block| {
        block.commands().into_iter().map(|command| (block.start, command)).collect::<Vec<_>>()
    });
    let is_text = |kind: &Kind| matches!(kind, Kind::Prose | Kind::Table);
    let lines = page.lines.iter().enumerate().filter(|(_, line)| is_text(&line.kind));
    let in_text = lines.flat_map(|(index, line)| {
        let code = line.text.split('`').skip(1).step_by(2).filter(|code| code.starts_with("mainstay "));
        code.map(move |code| (index, code.to_owned()))
    });
    // What changed is written in the words of its time.
    let is_history = page.name == Path::new("CHANGELOG.md");
    let commands: Vec<(usize, String)> = in_blocks.chain(in_text.filter(|_| !is_history)).collect();
    commands
        .into_iter()
        .filter_map(|(index, command)| {
            let why = why_refused(&command)?;
            Some(format!("{}: {command}: {why}", page.at(index)))
        })
        .collect()
}

/// Why `mainstay` does not understand its part of a command line. What is left out of an example is no error.
fn why_refused(command: &str) -> Option<String> {
    let words = shlex::split(command)?;
    let of_mainstay = words.iter().skip_while(|word| *word != "mainstay");
    let is_end = |word: &&String| ["|", ">", "&&", ";", "...", "\u{2026}"].contains(&word.as_str());
    let line: Vec<&String> = of_mainstay.take_while(|word| !is_end(word)).collect();
    if line.len() < 2 {
        return None;
    }
    let error = mainstay_cli::command_line().try_get_matches_from(line).err()?;
    let is_wrong = matches!(
        error.kind(),
        ErrorKind::UnknownArgument
            | ErrorKind::InvalidSubcommand
            | ErrorKind::InvalidValue
            | ErrorKind::ValueValidation
    );
    is_wrong.then(|| error.to_string().lines().next().unwrap_or_default().to_owned())
}

#[test]
fn an_option_that_is_gone_is_reported_and_an_example_that_leaves_something_out_is_not() {
    let text = "```console\n$ mpirun -x A mainstay run --nproc-per-node 2 ... train.py | tee a\n\
                $ mainstay status --jsn\n```\nThe command `mainstay ckpt` and `mainstay nosuch x`.\n";
    let found = refused(&Page::parse(Path::new("docs/a.md"), text));
    let lines: Vec<&str> = found.iter().filter_map(|line| line.split(": ").next()).collect();
    assert_eq!(lines, ["docs/a.md:2", "docs/a.md:5"]);
}
