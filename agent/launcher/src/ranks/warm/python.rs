//! Parses a command line that starts Python: the interpreter with its options, and the program.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A Python program as a command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PythonProgram {
    /// The interpreter and its own options.
    pub interpreter: Vec<String>,
    /// Whether the target is a module (`-m`).
    pub module: bool,
    /// The script's path, or the module's name.
    pub target: String,
    /// `sys.argv` as the program will see it, the target first.
    pub arguments: Vec<String>,
}

/// Why there is no template for a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTemplate {
    /// It is not a Python program.
    #[error("{0}")]
    NotPython(String),
    /// It is one that would not run correctly after a fork.
    #[error("{0}")]
    Plainly(String),
}

/// Options of the interpreter that take no value and have the same effect after a fork.
const PLAIN_OPTIONS: &str = "bBdEIOPqsSuv";

impl PythonProgram {
    /// Parses a command line; a program with `#!` and a Python interpreter counts too.
    ///
    /// # Errors
    /// It is no Python program that could be started from a template; with the reason.
    pub fn parse(command: &[String], search: Option<&OsStr>) -> Result<PythonProgram, NoTemplate> {
        let none = NoTemplate::NotPython;
        let (program, rest) = command.split_first().ok_or_else(|| none("there is no command".to_owned()))?;
        if is_python(program) {
            return after_interpreter(vec![program.clone()], rest).map_err(NoTemplate::Plainly);
        }
        let script = find(program, search).ok_or_else(|| none(format!("{program} is not found")))?;
        let mut interpreter =
            shebang(&script).ok_or_else(|| none(format!("{program} is not a Python program")))?;
        if interpreter.first().is_some_and(|first| file_name(first) == "env") {
            interpreter.remove(0);
        }
        if !interpreter.first().is_some_and(|first| is_python(first)) {
            return Err(none(format!("{program} is not a Python program")));
        }
        let mut arguments = interpreter.split_off(1);
        arguments.push(script.display().to_string());
        arguments.extend(rest.iter().cloned());
        after_interpreter(interpreter, &arguments).map_err(NoTemplate::Plainly)
    }
}

/// The interpreter of a command's program, also if it cannot be forked; `python3` if it is not a Python program.
pub fn interpreter_of(command: &[String], search: Option<&OsStr>) -> String {
    let named = |program: &String| {
        if is_python(program) {
            return Some(program.clone());
        }
        let parts = shebang(&find(program, search)?)?;
        parts.into_iter().find(|part| file_name(part) != "env").filter(|part| is_python(part))
    };
    command.first().and_then(named).unwrap_or_else(|| "python3".to_owned())
}

fn after_interpreter(mut interpreter: Vec<String>, rest: &[String]) -> Result<PythonProgram, String> {
    let mut rest = rest.iter();
    while let Some(argument) = rest.next() {
        let Some(options) = argument.strip_prefix('-').filter(|options| !options.is_empty()) else {
            return program(interpreter, false, argument, rest.as_slice());
        };
        let value_follows = match options.find(|letter| !PLAIN_OPTIONS.contains(letter)) {
            None => false,
            Some(at) => match (&options[at..], &options[at..=at]) {
                ("m", _) => {
                    if at > 0 {
                        interpreter.push(format!("-{}", &options[..at]));
                    }
                    let module = rest.next().ok_or("-m names no module")?;
                    return program(interpreter, true, module, rest.as_slice());
                }
                ("W" | "X", _) => true,
                (_, "W" | "X") => false,
                _ => return Err(format!("the interpreter's option {argument} needs a plain start")),
            },
        };
        interpreter.push(argument.clone());
        if value_follows {
            interpreter.extend(rest.next().cloned());
        }
    }
    Err("it names no program".to_owned())
}

fn program(
    interpreter: Vec<String>,
    module: bool,
    target: &str,
    rest: &[String],
) -> Result<PythonProgram, String> {
    if target.contains("${local_rank}") {
        return Err("each rank runs another program".to_owned());
    }
    if !module && !Path::new(target).is_file() {
        return Err(format!("{target} is not a file"));
    }
    if !module
        && Path::new(target).extension().is_some_and(|extension| extension == "pyz" || extension == "zip")
    {
        return Err(format!("{target} is an archive"));
    }
    let arguments = std::iter::once(target.to_owned()).chain(rest.iter().cloned()).collect();
    Ok(PythonProgram { interpreter, module, target: target.to_owned(), arguments })
}

fn is_python(program: &str) -> bool {
    let version = file_name(program).strip_prefix("python");
    version.is_some_and(|version| version.chars().all(|letter| letter.is_ascii_digit() || letter == '.'))
}

fn file_name(path: &str) -> &str {
    Path::new(path).file_name().and_then(OsStr::to_str).unwrap_or_default()
}

/// Finds a program as `execvp` does.
fn find(program: &str, search: Option<&OsStr>) -> Option<PathBuf> {
    if program.contains('/') {
        return Path::new(program).is_file().then(|| PathBuf::from(program));
    }
    std::env::split_paths(search?).map(|directory| directory.join(program)).find(|path| path.is_file())
}

/// The words after `#!` in the file's first line.
fn shebang(path: &Path) -> Option<Vec<String>> {
    let mut head = Vec::new();
    std::fs::File::open(path).ok()?.take(512).read_to_end(&mut head).ok()?;
    let line = String::from_utf8_lossy(&head);
    let parts = line.lines().next()?.strip_prefix("#!")?;
    Some(parts.split_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(command: &[&str]) -> Result<PythonProgram, NoTemplate> {
        let command: Vec<String> = command.iter().map(|part| (*part).to_owned()).collect();
        PythonProgram::parse(&command, None)
    }

    fn script() -> (testing::TempDir, String) {
        let directory = testing::tempdir().expect("a directory");
        let path = directory.path().join("train.py");
        std::fs::write(&path, "").expect("a file");
        let path = path.display().to_string();
        (directory, path)
    }

    #[test]
    fn a_script_with_its_interpreters_options() {
        let (_directory, path) = script();
        let program =
            parsed(&["/usr/bin/python3.11", "-uX", "dev", "-W", "error", &path, "-m", "5"]).expect("Python");
        assert_eq!(program.interpreter, ["/usr/bin/python3.11", "-uX", "dev", "-W", "error"]);
        assert_eq!((program.module, program.arguments), (false, vec![path, "-m".into(), "5".into()]));
    }

    #[test]
    fn a_module_also_behind_other_options() {
        let program = parsed(&["python3", "-um", "train.main", "--x"]).expect("Python");
        assert_eq!(program.interpreter, ["python3", "-u"]);
        assert_eq!((program.module, program.target.as_str()), (true, "train.main"));
        assert_eq!(program.arguments, ["train.main", "--x"]);
    }

    #[test]
    fn a_console_script_runs_under_the_interpreter_that_it_names() {
        let (directory, _) = script();
        let path = directory.path().join("train");
        std::fs::write(&path, "#!/opt/venv/bin/python3 -s\nimport sys\n").expect("a file");
        let path = path.display().to_string();
        let program = parsed(&[&path, "--x"]).expect("Python");
        assert_eq!(program.interpreter, ["/opt/venv/bin/python3", "-s"]);
        assert_eq!(program.arguments, [path, "--x".to_owned()]);
    }

    #[test]
    fn the_interpreter_of_any_command() {
        let (directory, _) = script();
        let path = directory.path().join("train");
        std::fs::write(&path, "#!/usr/bin/env python3.12 -s\n").expect("a file");
        for (command, interpreter) in [
            (vec!["/opt/venv/bin/python", "-c", "pass"], "/opt/venv/bin/python"),
            (vec![path.to_str().expect("text"), "--x"], "python3.12"),
            (vec!["/bin/sh", "x.sh"], "python3"),
            (vec![], "python3"),
        ] {
            let command: Vec<String> = command.into_iter().map(str::to_owned).collect();
            assert_eq!(interpreter_of(&command, None), interpreter, "{command:?}");
        }
    }

    #[test]
    fn what_cannot_be_forked_is_left_to_a_plain_start_with_the_reason() {
        let (_directory, path) = script();
        for (command, why) in [
            (vec!["/bin/sh", "x.sh"], "/bin/sh"),
            (vec!["python3", "-c", "pass"], "-c"),
            (vec!["python3", "-i", &path], "-i"),
            (vec!["python3", "/no/such/script.py"], "/no/such/script.py"),
            (vec!["python3", "-m", "rank${local_rank}"], "another program"),
            (vec!["python3"], "no program"),
        ] {
            let error = parsed(&command).expect_err("a plain start");
            assert!(error.to_string().contains(why), "{command:?}: {error}");
            let is_python = command[0] == "python3";
            assert_eq!(matches!(error, NoTemplate::Plainly(_)), is_python, "{command:?}: {error}");
        }
    }
}
