//! Abbreviated options, as argparse reads them for torchrun: `--redirect 3` is `--redirects 3`. An abbreviation
//! means torchrun's option if one matches, so that torchrun command lines keep their meaning; else it means one of
//! ours.

use std::ffi::OsString;

/// The options of torchrun (`torch/distributed/run.py` of PyTorch 2.11, and `--log-line-prefix-template` of its
/// successor).
const TORCHRUN: [&str; 32] = [
    "duplicate-stderr-filters",
    "duplicate-stdout-filters",
    "event-log-handler",
    "help",
    "local-addr",
    "local-ranks-filter",
    "log-dir",
    "log-line-prefix-template",
    "logs-specs",
    "master-addr",
    "master-port",
    "max-restarts",
    "module",
    "monitor-interval",
    "nnodes",
    "no-python",
    "node-rank",
    "nproc-per-node",
    "numa-binding",
    "rdzv-backend",
    "rdzv-conf",
    "rdzv-endpoint",
    "rdzv-id",
    "redirects",
    "role",
    "run-path",
    "shutdown-timeout",
    "signals-to-handle",
    "standalone",
    "start-method",
    "tee",
    "virtual-local-rank",
];

/// The arguments after `run` with each abbreviated option in full, up to the script. `options` are those of
/// `mainstay run`, each with whether it takes the next argument as its value.
///
/// # Errors
/// An abbreviation that fits several options.
pub(crate) fn in_full(arguments: Vec<OsString>, options: &[(String, bool)]) -> Result<Vec<OsString>, String> {
    let mut full = Vec::with_capacity(arguments.len());
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let text = argument.to_str().unwrap_or_default();
        let Some(written) = text.strip_prefix("--").filter(|name| !name.is_empty()) else {
            // A short option with a separate value, or the script, or an argument for the parser.
            let is_short = text.starts_with('-') && text.len() > 1 && text != "--";
            let takes_next = matches!(text, "-r" | "-t");
            full.push(argument);
            if !is_short {
                break;
            }
            full.extend(if takes_next { arguments.next() } else { None });
            continue;
        };
        let (name, value) = match written.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (written, None),
        };
        let Some(known) = option(name, options)? else {
            // For the parser, which suggests similar options.
            full.push(argument);
            continue;
        };
        full.push(match value {
            Some(value) => format!("--{}={value}", known.0).into(),
            None => format!("--{}", known.0).into(),
        });
        if known.1 && value.is_none() {
            full.extend(arguments.next());
        }
    }
    full.extend(arguments);
    Ok(full)
}

/// The option that `name` is or abbreviates.
fn option<'o>(name: &str, options: &'o [(String, bool)]) -> Result<Option<&'o (String, bool)>, String> {
    let hyphens = name.replace('_', "-");
    if let Some(exact) = options.iter().find(|(known, _)| *known == hyphens) {
        return Ok(Some(exact));
    }
    let options_of = |is_torchrun: bool| -> Vec<&'o (String, bool)> {
        let fits = |known: &str| known.starts_with(&hyphens) && TORCHRUN.contains(&known) == is_torchrun;
        options.iter().filter(|(known, _)| fits(known)).collect()
    };
    let mut fitting = options_of(true);
    if fitting.is_empty() {
        fitting = options_of(false);
    }
    match fitting[..] {
        [] => Ok(None),
        [only] => Ok(Some(only)),
        _ => {
            let mut names: Vec<String> = fitting.iter().map(|(known, _)| format!("--{known}")).collect();
            names.sort();
            Err(format!("ambiguous option: --{name} could match {}", names.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(line: &str) -> Result<String, String> {
        let known = [
            ("redirects", true),
            ("nproc-per-node", true),
            ("run-path", false),
            ("runtime-dir", true),
            ("rdzv-id", true),
            ("rdzv-conf", true),
            ("restart-window", true),
            ("standalone", false),
            ("help", false),
        ];
        let options: Vec<_> = known.iter().map(|(name, takes)| ((*name).to_owned(), *takes)).collect();
        let arguments = line.split_whitespace().map(OsString::from).collect();
        let full = in_full(arguments, &options)?;
        Ok(full.iter().map(|part| part.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn an_unambiguous_prefix_is_the_option() {
        let is = |line, expected: &str| assert_eq!(full(line).as_deref(), Ok(expected), "{line}");
        is("--redirect 3 --nproc_per=2 a.py --redirect", "--redirects 3 --nproc-per-node=2 a.py --redirect");
        is("--run --stand a.py", "--run-path --standalone a.py");
        is("--runt /dev/shm a.py", "--runtime-dir /dev/shm a.py");
        is("--rest 1h -m -r 3 --stand a", "--restart-window 1h -m -r 3 --standalone a");
        is("--nproc_per_node 2 -- --redirect", "--nproc-per-node 2 -- --redirect");
        is("--unknown --redirect 3", "--unknown --redirects 3");
    }

    #[test]
    fn an_ambiguous_prefix_names_the_candidates() {
        let error = full("--rdzv x a.py").expect_err("two fit");
        testing::snapshot!("run", "an ambiguous option", error);
    }
}
