//! Flight records of PyTorch among the files: detected by their content, read, and compared.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::Context;
use mainstay_diagnosis::attribution::dumps::Dumps;
use mainstay_diagnosis::attribution::lines;
use mainstay_hang::flight::{BEGINNING, DUMP_BYTES, FlightRecord, held_up, looks_like_one};
use mainstay_model::id::Rank;

use super::files::LogFile;
use crate::output;

/// A flight record and the file it comes from.
pub(super) struct Record {
    file: String,
    rank: Rank,
    record: FlightRecord,
}

/// Reads the flight records among the files; returns the other files too. A record that cannot be used is reported
/// and left out.
///
/// # Errors
/// It was given by name and cannot be read.
pub(super) fn apart(files: Vec<LogFile>) -> anyhow::Result<(Vec<Record>, Vec<LogFile>)> {
    let (mut records, mut logs) = (Vec::new(), Vec::new());
    for file in files {
        if !is_one(&file.path) {
            logs.push(file);
            continue;
        }
        match read(&file.path) {
            Ok(record) => records.push(record),
            Err(error) if file.found => output::note(&format!("left out: {error:#}")),
            Err(error) => return Err(error),
        }
    }
    Ok((records, logs))
}

/// What the records show; with several records of one rank the newest counts. `named`: ranks whose logs are
/// available.
pub(super) fn compared(records: Vec<Record>, named: impl Iterator<Item = u32>) -> Dumps {
    let mut newest: BTreeMap<Rank, Record> = BTreeMap::new();
    for record in records {
        let known = newest.get(&record.rank);
        if known.is_none_or(|known| known.record.newest <= record.record.newest) {
            if let Some(older) = newest.insert(record.rank, record) {
                output::note(&format!("{}: there is a newer flight record of {}", older.file, older.rank));
            }
        } else {
            output::note(&format!("{}: there is a newer flight record of {}", record.file, record.rank));
        }
    }
    let files = newest.values().map(|dump| (dump.file.clone(), dump.rank.0)).collect();
    let records = newest.into_values().map(|dump| (dump.rank, dump.record)).collect();
    Dumps { files, held_up: held_up(&named.map(Rank).collect(), &records) }
}

/// Whether a file starts like a flight record. An unreadable file is none here: the log reader reports the error.
fn is_one(path: &Path) -> bool {
    // Reading from a pipe would consume its data.
    if path.as_os_str() == "-" || !path.is_file() {
        return false;
    }
    let mut begin = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BEGINNING as u64).read_to_end(&mut begin));
    read.is_ok() && looks_like_one(&begin)
}

fn read(path: &Path) -> anyhow::Result<Record> {
    let file = path.display().to_string();
    let reading = || format!("reading {file}");
    let mut bytes = Vec::new();
    let source = File::open(path).with_context(reading)?;
    source.take(DUMP_BYTES as u64 + 1).read_to_end(&mut bytes).with_context(reading)?;
    let record = FlightRecord::read(&bytes).map_err(|error| {
        anyhow::anyhow!("{file} is not a flight record of PyTorch that can be used: {error}")
    })?;
    let rank = rank_of(&file).with_context(|| {
        format!("{file} is a flight record, and its name does not end in the rank as in nccl_trace_rank_3")
    })?;
    Ok(Record { file, rank: Rank(rank), record })
}

/// The rank in the name of a dump: `nccl_trace_rank_3`, `rank3.json`, else the number at its end, as torch appends it to any
/// prefix.
fn rank_of(path: &str) -> Option<u32> {
    let name = path.rsplit('/').next()?;
    let stem = name.split_once('.').map_or(name, |(stem, _)| stem);
    let digits = stem.len() - stem.trim_end_matches(|letter: char| letter.is_ascii_digit()).len();
    lines::rank_of_path(name).or_else(|| stem[stem.len() - digits..].parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_is_read_from_the_name_of_the_file() {
        assert_eq!(rank_of("/tmp/nccl_trace_rank_3"), Some(3));
        assert_eq!(rank_of("dumps/comm_lib_trace_rank_12"), Some(12));
        assert_eq!(rank_of("run7/rank5.json"), Some(5));
        assert_eq!(rank_of("/scratch/job_17_"), None);
        assert_eq!(rank_of("/scratch/job_17_4.json"), Some(4));
        assert_eq!(rank_of("trace.pickle"), None);
    }
}
