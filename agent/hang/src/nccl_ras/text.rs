//! The text that NCCL's RAS service writes for people, in the forms of 2.24 to 2.30.
//!
//! It gives details only for what is unusual: communicators without problems are lines of a table, and of the ranks
//! of a faulty one the majority is only counted.

use std::collections::BTreeMap;

use super::report::{
    CommRank, Communicator, Group, Missing, Operation, Process, RankError, RasReport, State,
};

/// Why a text cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// It does not start like a report of NCCL.
    #[error("it is not a report of NCCL: it starts with {0:?}")]
    NotNccl(String),
    /// It is truncated.
    #[error("the report breaks off")]
    Incomplete,
}

/// Reads a report of `STATUS` or `VERBOSE STATUS`.
///
/// # Errors
/// The text is not a report, or not a complete one. Unknown lines are skipped.
pub fn parse(text: &str) -> Result<RasReport, TextError> {
    let mut lines = text.lines();
    let first = lines.find(|line| !line.trim().is_empty()).unwrap_or_default();
    let version = first.strip_prefix("NCCL version ").and_then(|rest| rest.split_whitespace().next());
    let Some(version) = version else {
        return Err(TextError::NotNccl(first.chars().take(60).collect()));
    };
    let mut reading = Reading::new(version);
    lines.for_each(|line| reading.line(line));
    reading.finish()
}

/// What the current lines are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Section {
    Nothing,
    Table,
    MissingProcesses,
    DeadProcesses,
    Timeouts,
    MissingRanks,
    Errors { asynchronous: bool },
    States,
    Operations,
}

struct Reading {
    report: RasReport,
    /// Size and number of communicators, by the table's groups.
    table: BTreeMap<u32, (u32, u32)>,
    /// How many of a group are listed one by one.
    listed: BTreeMap<u32, Vec<String>>,
    about: Section,
    /// Whether the last heading `====` of the report was seen.
    whole: bool,
    title: String,
}

impl Reading {
    fn new(version: &str) -> Reading {
        let report = RasReport { version: version.to_owned(), ..RasReport::default() };
        let (table, listed) = (BTreeMap::new(), BTreeMap::new());
        Reading { report, table, listed, about: Section::Nothing, whole: false, title: String::new() }
    }

    fn line(&mut self, line: &str) {
        let line = line.trim_end();
        if line.starts_with("====") {
            self.whole |= self.title == "Warnings";
            self.about = Section::Nothing;
        } else if line.starts_with('#') {
            self.communicator(line);
        } else if line.starts_with("Group ") {
            self.about = Section::Table;
        } else if self.about == Section::Table {
            self.row(line);
        } else if let Some(text) = line.strip_prefix("  ") {
            self.read_detail(text);
        } else {
            match line {
                "INCOMPLETE" => self.about = Section::MissingProcesses,
                "DEAD" => self.about = Section::DeadProcesses,
                "TIMEOUT" => self.about = Section::Timeouts,
                _ => {}
            }
        }
        if !line.is_empty() {
            line.clone_into(&mut self.title);
        }
    }

    /// `    0         1         1         8         8         8   RUNNING      OK`; the second line of the heading is
    /// not a row.
    fn row(&mut self, line: &str) {
        if line.is_empty() {
            self.about = Section::Nothing;
            return;
        }
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| fields.get(at).and_then(|field| field.parse::<u32>().ok());
        if let (Some(group), Some(count), Some(size), 8..) = (number(0), number(1), number(4), fields.len()) {
            self.table.insert(group, (size, count));
        }
    }

    /// `#0-0 (8a5ed2b3ef4c0f3d) MISMATCH`
    fn communicator(&mut self, line: &str) {
        self.about = Section::Nothing;
        let mut words = line.split_whitespace();
        let group = words.next().and_then(|id| id.strip_prefix('#')?.split('-').next()?.parse().ok());
        let hash = words.next().map(|hash| hash.trim_matches(['(', ')']).to_owned());
        let (Some(group), Some(hash), Some(what)) = (group, hash, words.next()) else { return };
        let listed = self.listed.entry(group).or_default();
        if !listed.contains(&hash) {
            listed.push(hash.clone());
        }
        self.about = match what {
            "INCOMPLETE" => Section::MissingRanks,
            "ERROR" => Section::Errors { asynchronous: false },
            "MISMATCH" => Section::States,
            _ => Section::Nothing,
        };
        // The same communicator can appear under several headings. The last one is the one being read.
        let communicators = &mut self.report.communicators;
        let before = communicators.iter().position(|communicator| communicator.hash == hash);
        let communicator = match before {
            Some(at) => communicators.remove(at),
            None => {
                let size = self.table.get(&group).map(|(size, _)| *size);
                Communicator { hash, size, ..Communicator::default() }
            }
        };
        communicators.push(communicator);
    }

    /// An indented line: details for the last heading.
    fn read_detail(&mut self, text: &str) {
        match self.about {
            Section::MissingProcesses | Section::DeadProcesses => self.process(text),
            Section::Timeouts => {
                if let Some(count) = text.strip_prefix("Encountered ").and_then(first_number) {
                    self.report.timeouts = count;
                }
            }
            Section::MissingRanks => self.missing_rank(text),
            Section::Errors { .. } => self.error(text),
            Section::States | Section::Operations => self.mismatch(text),
            Section::Nothing | Section::Table => {}
        }
    }

    /// `Process 4711 on node 10.0.0.2 managing GPUs 0,1`, or the number of processes.
    fn process(&mut self, text: &str) {
        let processes = match self.about {
            Section::DeadProcesses => &mut self.report.dead,
            _ => &mut self.report.missing,
        };
        if let Some(process) = text.strip_prefix("Process ").and_then(process) {
            processes.named.push(process);
        } else if let Some(count) = first_number(text)
            .or_else(|| text.strip_prefix("Missing communicator data from ").and_then(first_number))
        {
            processes.count = count;
        }
    }

    fn missing_rank(&mut self, text: &str) {
        let Some(communicator) = self.report.communicators.last_mut() else { return };
        if let Some(count) = text.strip_prefix("Missing communicator data from ").and_then(first_number) {
            communicator.missing_count = count;
        } else if let Some((_, ranks)) =
            text.split_once("missing rank").and_then(|(_, rest)| rest.split_once(": "))
        {
            // 2.24 gives only their numbers.
            let ranks = ranks.split(',').filter_map(|rank| rank.trim().parse().ok());
            let bare = |rank| (CommRank { rank, process: None, gpu: None }, Missing::Unresponsive);
            communicator.missing.extend(ranks.map(bare));
        } else if let Some((rank, _)) = rank(text) {
            communicator.missing.push((rank, Missing::Unresponsive));
        }
    }

    fn error(&mut self, text: &str) {
        if text.starts_with("Initialization error") || text.starts_with("Asynchronous error") {
            self.about = Section::Errors { asynchronous: text.starts_with("Asynchronous") };
            return;
        }
        let Section::Errors { asynchronous } = self.about else { return };
        let Some(communicator) = self.report.communicators.last_mut() else { return };
        let error = |what: &str| Some(RankError { what: what.to_owned(), asynchronous });
        let stated = |words: &str| error(words.strip_prefix("reported ")?);
        group_line(&mut communicator.errors, text, stated);
    }

    fn mismatch(&mut self, text: &str) {
        let Some(communicator) = self.report.communicators.last_mut() else { return };
        if let Some(field) = text.strip_prefix("Communicator ranks have different ") {
            self.about = Section::States;
            if let Some(name) = field.strip_suffix(" operation counts") {
                self.about = Section::Operations;
                // 2.24 does not distinguish the kinds.
                communicator.operations.push(Operation { name: name.to_owned(), groups: Vec::new() });
            }
            return;
        }
        match (self.about, communicator.operations.last_mut()) {
            (Section::Operations, Some(operation)) => group_line(&mut operation.groups, text, launched),
            _ => {
                group_line(&mut communicator.states, text, state);
            }
        }
    }

    fn finish(mut self) -> Result<RasReport, TextError> {
        if !self.whole {
            return Err(TextError::Incomplete);
        }
        for communicator in &mut self.report.communicators {
            let named = u32::try_from(communicator.missing.len()).unwrap_or(u32::MAX);
            communicator.missing_count = communicator.missing_count.max(named);
        }
        for processes in [&mut self.report.dead, &mut self.report.missing] {
            let named = u32::try_from(processes.named.len()).unwrap_or(u32::MAX);
            processes.count = processes.count.max(named);
        }
        let count = |listed: &Vec<String>| u32::try_from(listed.len()).unwrap_or(u32::MAX);
        self.report.in_order = self.table.iter().fold(0_u32, |sum, (group, (_, all))| {
            sum.saturating_add(all.saturating_sub(self.listed.get(group).map_or(0, count)))
        });
        Ok(self.report)
    }
}

/// A line of a breakdown: `7 ranks WORDS`, `Rank 3 WORDS -- GPU 3 managed by process 4711 on node 10.0.0.2`, or
/// `Rank 3 -- GPU …` for one of the ranks that the previous line counted.
fn group_line<T>(groups: &mut Vec<Group<T>>, text: &str, parse: impl Fn(&str) -> Option<T>) {
    if let Some((rank, words)) = rank(text) {
        if words.is_empty() {
            if let Some(group) = groups.last_mut() {
                group.named.push(rank);
            }
        } else if let Some(value) = parse(words) {
            groups.push(Group { value, ranks: 1, named: vec![rank] });
        }
        return;
    }
    let words = text.split_once(" ranks ").map(|(_, words)| words);
    if let (Some(ranks), Some(value)) = (first_number(text), words.and_then(parse)) {
        groups.push(Group { value, ranks, named: Vec::new() });
    }
}

fn state(words: &str) -> Option<State> {
    State::parse(words.strip_prefix("has status ").or_else(|| words.strip_prefix("have status "))?)
}

fn launched(words: &str) -> Option<u64> {
    if words.ends_with("not launched any operations") {
        return Some(0);
    }
    let (_, count) = words.split_once("launched up to operation ")?;
    count.trim().parse().ok()
}

/// A rank, and the text between it and its place.
fn rank(text: &str) -> Option<(CommRank, &str)> {
    let rest = text.strip_prefix("Rank ")?;
    let (number, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let (words, place) = match rest.split_once("-- ") {
        Some((words, place)) => (words, place),
        None => (rest, ""),
    };
    let gpu = place.strip_prefix("GPU ").and_then(first_number);
    let process = place.split_once("process ").and_then(|(_, rest)| process(rest));
    Some((CommRank { rank: number.parse().ok()?, process, gpu }, words.trim()))
}

/// `4711 on node 10.0.0.2 managing GPU 0`
fn process(text: &str) -> Option<Process> {
    let (pid, rest) = text.split_once(" on node ")?;
    let host = rest.split_whitespace().next()?.to_owned();
    Some(Process { host, pid: pid.trim().parse().ok()? })
}

fn first_number(text: &str) -> Option<u32> {
    text.split_whitespace().next()?.parse().ok()
}
