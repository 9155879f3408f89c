//! Normalizes a log line: removes colors, progress bars and prefixes, and reads from them which rank wrote the line and when.

use std::borrow::Cow;

/// Bytes of a line that are read on each side of a match, so that a line of 100 MB is not copied whole.
pub const LINE_WINDOW_BYTES: usize = 2048;

/// The prefix of a line's message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prefix {
    /// The rank that wrote it.
    pub rank: Option<u32>,
    /// The rank is a label of the launcher that forwards the line, such as `srun --label`. It may number tasks that each run several
    /// ranks.
    pub by_label: bool,
    /// There is also such a label with another number than the rank.
    pub label_differs: bool,
    /// Length of the prefix in bytes.
    pub len: usize,
}

/// The line without terminal sequences and control characters. All states of a progress bar that redraws itself with carriage returns
/// are kept, one after the other.
pub fn clean(raw: &[u8]) -> Cow<'_, str> {
    let text = String::from_utf8_lossy(raw);
    if text.bytes().all(|byte| (b' '..0x7f).contains(&byte)) {
        return text;
    }
    let mut out = String::with_capacity(text.len());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\x1b' => skip_sequence(&mut letters),
            '\t' | '\r' => out.push(' '),
            _ if letter.is_control() => {}
            _ => out.push(letter),
        }
    }
    Cow::Owned(out)
}

fn skip_sequence(letters: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    if letters.next_if_eq(&'[').is_none() {
        letters.next();
        return;
    }
    while let Some(letter) = letters.next_if(|letter| matches!(letter, ' '..='~')) {
        if matches!(letter, '@'..='~') {
            return;
        }
    }
}

/// Removes terminal sequences, so that a word with colors inside is found. Only control sequences (`ESC [ … letter`): other escapes
/// stay and do no harm.
pub fn without_colours(raw: &[u8], out: &mut Vec<u8>) {
    out.clear();
    let mut rest = raw;
    while let Some(at) = memchr::memchr(0x1b, rest) {
        out.extend_from_slice(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(body) = rest.strip_prefix(b"[") {
            let parameters = body.iter().take_while(|byte| matches!(byte, b' '..=b'?')).count();
            rest = body.get(parameters + 1..).unwrap_or_default();
            // Never drop a newline: it would shift the numbers of all lines after it.
            if body.get(parameters).is_some_and(|byte| !matches!(byte, b'@'..=b'~')) {
                rest = &body[parameters..];
            }
        }
    }
    out.extend_from_slice(rest);
}

/// Whether the line starts with a tag or the time at which it was written (`[prolog] `, `[   12.5] `): it does not continue the line
/// before.
pub fn starts_a_message(line: &str) -> bool {
    match line.strip_prefix('[') {
        Some(rest) => {
            rest.split_once(']').is_some_and(|(tag, text)| tag.len() <= 40 && text.starts_with(' '))
        }
        None if line.starts_with("NVRM:") || line.starts_with(['●', '✔', '✗', '•', '*', '#', '|', '+']) => {
            true
        }
        None => matches!(line.bytes().next(), Some(b'0'..=b'9')) && stamped(line).is_some() || month(line),
    }
}

/// Parses the prefixes of launchers, loggers and kernels, in any combination.
pub fn prefix(line: &str) -> Prefix {
    let mut prefix = Prefix::default();
    for _ in 0..8 {
        let rest = &line[prefix.len..];
        let trimmed = rest.trim_start_matches([' ', ':', '|', '>']);
        let after_spaces = prefix.len + rest.len() - trimmed.len();
        let Some((len, rank)) = one_prefix(trimmed) else {
            prefix.len = after_spaces;
            return prefix;
        };
        match (rank, prefix.rank) {
            (Some(_), None) => (prefix.rank, prefix.by_label) = (rank, is_label(trimmed)),
            (Some(_), Some(_)) if prefix.by_label && !is_label(trimmed) => {
                prefix.label_differs = rank != prefix.rank;
                (prefix.rank, prefix.by_label) = (rank, false);
            }
            _ => {}
        }
        prefix.len = after_spaces + len;
    }
    prefix
}

/// Whether the number at the start is a launcher's: `3: `, `[3]:`. A program calls its rank by that name.
fn is_label(text: &str) -> bool {
    text.trim_start_matches('[').starts_with(|first: char| first.is_ascii_digit())
}

fn one_prefix(text: &str) -> Option<(usize, Option<u32>)> {
    let first = text.bytes().next()?;
    match first {
        b'[' => bracketed(text),
        b'(' => actor(text),
        b'0'..=b'9' => numbered(text).or_else(|| stamped(text)),
        b'A'..=b'Z' => glog(text).or_else(|| level(text)).or_else(|| syslog(text)),
        _ => None,
    }
}

/// `[rank3]:`, `[default3]:`, `[Rank 3]`, `[3]:`, `[1,3]<stderr>:`, `[2026-01-01 12:00:00]`, `[  12.345678]`, `[ERROR]`.
fn bracketed(text: &str) -> Option<(usize, Option<u32>)> {
    let end = text.bytes().take(80).position(|byte| byte == b']')?;
    let body = text[1..end].trim();
    let mut len = end + 1;
    let lower = body.to_ascii_lowercase();
    let rank = ["global_rank", "rank", "default", "worker", "trainer"]
        .iter()
        .find_map(|name| lower.strip_prefix(name))
        .and_then(|number| number.trim_start_matches([' ', ':', '=', '_']).parse().ok());
    if rank.is_some() {
        return Some((len, rank));
    }
    if let Some((world, rank)) = body.split_once(',')
        && world.parse::<u32>().is_ok()
        && let Ok(rank) = rank.parse()
    {
        for stream in ["<stderr>", "<stdout>", "<stddiag>"] {
            if text[len..].starts_with(stream) {
                len += stream.len();
            }
        }
        return Some((len, Some(rank)));
    }
    if body.bytes().all(|byte| byte.is_ascii_digit()) && text[len..].starts_with(':') {
        return Some((len, body.parse().ok()));
    }
    let digits = body.bytes().filter(u8::is_ascii_digit).count();
    let is_time = digits * 2 >= body.len() && body.contains([':', '.', '-']);
    let is_level = matches!(lower.as_str(), "error" | "warning" | "warn" | "info" | "critical" | "fatal");
    (is_time || is_level || month(body) || is_place_in_source(body)).then_some((len, None))
}

/// `core.py:303`, `socket.cpp:860`: a source location written by a logger.
fn is_place_in_source(body: &str) -> bool {
    let Some((file, line)) = body.rsplit_once(':') else { return false };
    let known = [".py", ".cc", ".cpp", ".cu", ".c", ".rs", ".go"];
    !line.is_empty()
        && line.bytes().all(|byte| byte.is_ascii_digit())
        && known.iter().any(|end| file.ends_with(end))
}

/// `(RayTrainWorker pid=123, ip=10.0.0.1)`.
fn actor(text: &str) -> Option<(usize, Option<u32>)> {
    let end = text.bytes().take(120).position(|byte| byte == b')')?;
    let body = &text[1..end];
    let named = body.contains("pid=") || matches!(body, "raylet" | "autoscaler");
    named.then_some((end + 1, None))
}

/// `3: ` of `srun --label`, and the line numbers that some viewers add.
fn numbered(text: &str) -> Option<(usize, Option<u32>)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let rest = &text[digits..];
    if digits <= 5 && rest.starts_with(": ") {
        return Some((digits + 2, text[..digits].parse().ok()));
    }
    (digits <= 7 && rest.starts_with("  ")).then_some((digits + 2, None))
}

/// `2026-06-10 03:09:55,123`, `2026/06/10 …`, `2026-06-10T03:09:55.123Z`, `03:09:55`, and the fields of a logger after it, separated by
/// ` - `.
fn stamped(text: &str) -> Option<(usize, Option<u32>)> {
    let len = text
        .bytes()
        .take_while(|byte| {
            matches!(byte, b'0'..=b'9' | b'-' | b'/' | b':' | b'.' | b',' | b'T' | b'Z' | b'+')
        })
        .count();
    let stamp = &text[..len];
    let separators = stamp.bytes().filter(|byte| matches!(byte, b':' | b'-' | b'/')).count();
    let next = text[len..].bytes().next();
    // `02-27 20:37:29`: a date without its year, before a time.
    let is_day = separators == 1 && len == 5 && text.as_bytes().get(len + 3) == Some(&b':');
    ((separators >= 2 && len >= 8 || is_day) && matches!(next, Some(b' ' | b']') | None))
        .then_some((len, None))
}

/// `E0628 09:54:15.885613 1234 file.cc:12]`.
fn glog(text: &str) -> Option<(usize, Option<u32>)> {
    let bytes = text.as_bytes();
    let is_glog = matches!(bytes[0], b'E' | b'W' | b'I' | b'F')
        && bytes.len() > 5
        && bytes[1..4].iter().all(u8::is_ascii_digit);
    let end = text.bytes().take(240).position(|byte| byte == b']')?;
    is_glog.then_some((end + 1, None))
}

/// `ERROR:`, `WARNING -`, `CRITICAL:root:`.
fn level(text: &str) -> Option<(usize, Option<u32>)> {
    let len = text.bytes().take_while(u8::is_ascii_uppercase).count();
    let known =
        matches!(&text[..len], "ERROR" | "WARNING" | "WARN" | "INFO" | "CRITICAL" | "FATAL" | "DEBUG");
    let next = text[len..].bytes().next();
    (known && matches!(next, Some(b':' | b' '))).then_some((len + 1, None))
}

/// `Jun 10 03:09:55 host kernel:`.
fn syslog(text: &str) -> Option<(usize, Option<u32>)> {
    if !month(text) || text.len() < 16 {
        return None;
    }
    let at = text.find(" kernel: ").filter(|at| *at < 80)?;
    Some((at + " kernel: ".len(), None))
}

fn month(text: &str) -> bool {
    const NAMES: [&str; 19] = [
        "Jan ", "Feb ", "Mar ", "Apr ", "May ", "Jun ", "Jul ", "Aug ", "Sep ", "Oct ", "Nov ", "Dec ",
        "Mon ", "Tue ", "Wed ", "Thu ", "Fri ", "Sat ", "Sun ",
    ];
    NAMES.iter().any(|name| text.starts_with(name))
}

/// The rank that a line mentions anywhere: `[rank3]`, `[Rank 3]`, `Rank 3`, `rank: 3`, `task 3:`.
pub fn rank_in(line: &str) -> Option<u32> {
    of_process_name(line).or_else(|| {
        number_after(line, &["[rank", "rank      : ", " rank ", " task ", "global_rank=", "rank="])
    })
}

/// The rank in Open MPI's and PRRTE's name of a process: `Process name: [[44051,1],3]`, `[prterun-n7-2101@1,11]`.
fn of_process_name(line: &str) -> Option<u32> {
    let (_, name) = line.split_once("Process name: [")?;
    name.trim_end().trim_end_matches(']').rsplit_once(',')?.1.parse().ok()
}

/// The same without tasks.
pub fn rank_called_so(line: &str) -> Option<u32> {
    of_process_name(line)
        .or_else(|| number_after(line, &["[rank", "rank      : ", " rank ", "global_rank=", "rank="]))
}

fn number_after(line: &str, markers: &[&str]) -> Option<u32> {
    let lower = line.to_ascii_lowercase();
    for marker in markers {
        for (at, _) in lower.match_indices(marker) {
            let rest = lower[at + marker.len()..].trim_start();
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            if let (Ok(rank), false) = (rest[..digits].parse(), numbers_within_a_host(&lower[..at])) {
                return Some(rank);
            }
        }
    }
    None
}

/// Whether the text before the word makes it the number of a host, or of a process on its host: `--local_rank=7`, `node rank 1`.
fn numbers_within_a_host(before: &str) -> bool {
    ["local_", "local-", "local", "node_", "node-", "node", "group_"]
        .iter()
        .any(|word| before.ends_with(word))
}

/// How many more processes wrote this line, by Ray's own count: `[repeated 43x across cluster]`.
pub fn repeated_elsewhere(line: &str) -> u64 {
    let Some((before, _)) = line.split_once("x across cluster]") else { return 0 };
    before.rsplit_once("[repeated ").and_then(|(_, count)| count.parse().ok()).unwrap_or(0)
}

/// The rank at the start of a line: `rank 3 (local_rank: 3)`, `rank: 3`.
pub fn rank_at_start(line: &str) -> Option<u32> {
    let rest = line.trim_start().strip_prefix("rank")?.trim_start_matches([' ', ':']);
    rest[..rest.bytes().take_while(u8::is_ascii_digit).count()].parse().ok()
}

/// The rank that a file's path names: `rank3.log`, `rank_3/stderr`, `3/stdout.log` in torchrun's directories.
pub fn rank_of_path(path: &str) -> Option<u32> {
    let unpacked =
        [".gz", ".zst", ".xz", ".bz2"].iter().find_map(|end| path.strip_suffix(end)).unwrap_or(path);
    let mut parts = unpacked.rsplit('/');
    let name = parts.next()?.to_ascii_lowercase();
    let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
    let parent = parts.next().unwrap_or_default().to_ascii_lowercase();
    let after = |text: &str| {
        let (_, rest) = text.split_once("rank")?;
        let digits: String =
            rest.trim_start_matches(['_', '-', '.', ' ']).chars().take_while(char::is_ascii_digit).collect();
        digits.parse().ok()
    };
    let of_torchrun = || matches!(stem, "stdout" | "stderr").then(|| parent.parse().ok()).flatten();
    after(stem).or_else(|| after(&parent)).or_else(of_torchrun)
}

/// Whether the line is advice to the reader: what it mentions did not occur.
pub fn is_advice(line: &str) -> bool {
    const BEGINNINGS: [&str; 16] = [
        "solution:",
        "possible cause",
        "suggestion",
        "hint:",
        "for debugging",
        "please check",
        "please refer",
        "please make sure",
        "make sure",
        "to fix",
        "try ",
        "you can try",
        // General remarks on possible causes, printed with every such failure.
        "this is usually due to",
        "this usually means",
        "this typically indicates",
        "this could be caused by",
    ];
    let text = line[prefix(line).len..].trim_start_matches([' ', '-', '*', '>']);
    let starts = |with: &&str| text.get(..with.len()).is_some_and(|head| head.eq_ignore_ascii_case(with));
    BEGINNINGS.iter().any(starts)
}

/// The first time of day in the line, in seconds since midnight: `09:54:15.885`.
pub fn time_of_day(line: &str) -> Option<f64> {
    let bytes = line.as_bytes();
    let two = |at: usize| -> Option<f64> {
        let pair = bytes.get(at..at + 2)?;
        pair.iter()
            .all(u8::is_ascii_digit)
            .then(|| f64::from(pair[0] - b'0') * 10.0 + f64::from(pair[1] - b'0'))
    };
    for colon in memchr::memchr_iter(b':', &bytes[..bytes.len().min(200)]) {
        let Some(at) = colon.checked_sub(2) else { continue };
        if bytes.get(at + 5) != Some(&b':') {
            continue;
        }
        let (Some(hours), Some(minutes), Some(seconds)) = (two(at), two(at + 3), two(at + 6)) else {
            continue;
        };
        if hours > 23.0 || minutes > 59.0 || seconds > 60.0 {
            continue;
        }
        let fraction = bytes.get(at + 8..).unwrap_or_default();
        let part = match fraction.split_first() {
            Some((b'.' | b',', digits)) => {
                let count = digits.iter().take(9).take_while(|byte| byte.is_ascii_digit()).count();
                line.get(at + 9..at + 9 + count)
                    .and_then(|text| format!("0.{text}").parse().ok())
                    .unwrap_or(0.0)
            }
            _ => 0.0,
        };
        return Some(hours * 3600.0 + minutes * 60.0 + seconds + part);
    }
    None
}

/// Times of day are comparable unless midnight may be between them.
pub fn spans_less_than_half_a_day(times: &[f64]) -> bool {
    let (least, most) = times
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), t| (least.min(*t), most.max(*t)));
    most - least < 43_200.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> (Option<u32>, &str) {
        let prefix = prefix(line);
        (prefix.rank, &line[prefix.len..])
    }

    #[test]
    fn ranks_are_read_from_prefixes() {
        assert_eq!(read("[rank3]: ValueError: x"), (Some(3), "ValueError: x"));
        assert_eq!(read("[default5]:Traceback"), (Some(5), "Traceback"));
        assert_eq!(read("12: KeyError: 'a'"), (Some(12), "KeyError: 'a'"));
        assert_eq!(read("[1,7]<stderr>: boom"), (Some(7), "boom"));
        assert_eq!(read(": [rank18]:   File"), (Some(18), "File"));
        assert_eq!(read("[2026-01-01 12:08:32] [Rank 2] boom"), (Some(2), "boom"));
        assert_eq!(read("(Worker pid=12, ip=10.0.0.1) boom"), (None, "boom"));
        assert_eq!(read("E0926 17:26:32.075402  157988 agent.cc:332] boom"), (None, "boom"));
        assert_eq!(read("Jun 10 03:09:55 h1 kernel: NVRM: x"), (None, "NVRM: x"));
        assert_eq!(read("2026-06-10 03:09:55,123 ERROR: boom"), (None, "boom"));
        assert_eq!(read("ERROR 02-27 20:37:29 [core.py:303] boom"), (None, "boom"));
        // The label of a task that runs several ranks.
        assert_eq!(read("1: [rank9]: boom"), (Some(9), "boom"));
        assert!(prefix("1: [rank9]: boom").label_differs && !prefix("9: [rank9]: boom").label_differs);
        assert_eq!(read("[rank3]: [Rank 7] boom"), (Some(3), "boom"));
    }

    #[test]
    fn colours_go_and_text_stays() {
        assert_eq!(clean(b"\x1b[31mred\x1b[0m \x07\ttab"), "red  tab");
        let mut out = Vec::new();
        without_colours(b"a\x1b[1;31mb\x1b[\nc\x1b", &mut out);
        assert_eq!(out, b"ab\nc");
    }

    #[test]
    fn times_of_day_are_found() {
        assert_eq!(time_of_day("[2026-01-01 01:02:03.5] x"), Some(3723.5));
        assert_eq!(time_of_day("no 99:99:99 time"), None);
        assert_eq!(time_of_day("::::"), None);
    }

    #[test]
    fn ranks_are_read_from_paths() {
        assert_eq!(rank_of_path("logs/rank3.log"), Some(3));
        assert_eq!(rank_of_path("logs/rank_12/out.txt"), Some(12));
        assert_eq!(rank_of_path("/tmp/run/attempt_0/7/stderr.log"), Some(7));
        assert_eq!(rank_of_path("/tmp/run/attempt_0/7/stderr.log.zst"), Some(7));
        assert_eq!(rank_of_path("slurm-4711.out"), None);
    }

    #[test]
    fn ranks_are_found_in_the_text() {
        assert_eq!(rank_in("srun: error: g15: task 1: Exited"), Some(1));
        assert_eq!(rank_in("  rank      : 4 (local_rank: 4)"), Some(4));
        assert_eq!(rank_in("frank 9"), None);
        assert_eq!(rank_in("  Process name: [[44051,1],3]"), Some(3));
        assert_eq!(rank_called_so("   Process name: [prterun-n7-2101@1,11]"), Some(11));
        assert_eq!(rank_in("Process name: [unnamed]"), None);
        assert_eq!(rank_in("started with --local_rank=7 --node_rank=2"), None);
        assert_eq!(rank_in("local rank 7 is global_rank=15"), Some(15));
    }

    #[test]
    fn ray_counts_the_processes_that_wrote_a_line() {
        assert_eq!(repeated_elsewhere("(W pid=3, ip=10.0.0.9) boom [repeated 7x across cluster]"), 7);
        assert_eq!(repeated_elsewhere("(W pid=3, ip=10.0.0.9) boom"), 0);
    }
}
