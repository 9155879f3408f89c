//! Steps of ranks from lines of their output (`--progress`): a thread reads what the files grow by and writes a page
//! for each rank, so that all readers of pages see its steps. The files are read in a separate thread, so that no
//! file system blocks the launcher.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use mainstay_diagnosis::progress_rule::{LineReport, PrintedSteps, ProgressRule};
use mainstay_heartbeat::{Claim, Claiming, Measures, PageSpec, PageWords, Writer};
use mainstay_model::id::Rank;
use mainstay_sys::clock;

use super::pages::page_in_memory;

/// How often the files are read.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Bytes of a file that are read at once. What a file has grown by beyond this is skipped.
const MAX_READ_BYTES: u64 = 1 << 20;

/// Of a longer line, the end is read: a progress bar redraws itself there.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// The writer of these pages, which no process claims.
const WRITER: Claiming<'static> =
    Claiming { pid: 0, start_ticks: 0, pid_namespace: 0, image: 1, version: "lines", language: "output" };

/// The thread that reads the ranks' output.
#[derive(Debug)]
pub struct OutputLines {
    /// The thread ends when this is dropped.
    orders: Sender<Order>,
}

#[derive(Debug)]
enum Order {
    Read(RankLines),
    Forget,
}

/// A rank whose output is read.
#[derive(Debug)]
struct RankLines {
    rank: Rank,
    page: Arc<PageWords>,
    /// The claim of the page in the current round: each counts its steps from where it resumes.
    claims: u64,
    steps: PrintedSteps,
    files: [Tail; 2],
}

/// A file that a rank writes.
#[derive(Debug)]
struct Tail {
    path: PathBuf,
    offset: u64,
    /// The start of a line whose end is not written yet.
    line: Vec<u8>,
}

impl OutputLines {
    /// Starts the thread. `None` if the kernel gives no more threads.
    pub fn start(rule: Arc<ProgressRule>) -> Option<OutputLines> {
        let (orders, receiver) = channel();
        let started = std::thread::Builder::new()
            .name("output-lines".to_owned())
            .spawn(move || read_lines(&rule, &receiver));
        if let Err(error) = started {
            tracing::warn!(%error, "no thread to read steps from the ranks' output");
            return None;
        }
        Some(OutputLines { orders })
    }

    /// Reads the files of a new process from their start. Returns the page of its steps.
    pub fn read(&self, spec: &PageSpec<'_>, files: [&Path; 2]) -> Option<Arc<PageWords>> {
        let page = page_in_memory(spec).ok()?;
        begin_round(&page);
        let (rank, claims) = (Rank(spec.rank), claims(&page));
        let (steps, files) = (PrintedSteps::default(), files.map(Tail::new));
        let lines = RankLines { rank, page: page.clone(), claims, steps, files };
        self.orders.send(Order::Read(lines)).ok()?;
        Some(page)
    }

    /// All processes are gone.
    pub fn forget(&self) {
        // Without its thread there is nothing to forget.
        let _ = self.orders.send(Order::Forget);
    }
}

/// Starts a round in which the rank goes on in its process: the steps that it printed before are over.
pub(crate) fn begin_round(page: &PageWords) {
    let now = clock::mono().0;
    let Ok(writer) = Writer::new(page) else { return };
    if writer.page().claim() == Claim::Unclaimed {
        let _ = writer.claim(now, &WRITER);
    } else if let Some(mut page) = writer.try_write(WRITER.key()) {
        page.begin_round(now);
    }
    if let Some(mut page) = writer.try_write(WRITER.key()) {
        page.beat(now);
    }
}

fn claims(page: &PageWords) -> u64 {
    match Writer::new(page).map(|writer| writer.page().claim()) {
        Ok(Claim::Claimed(by)) => by.claims,
        _ => 0,
    }
}

fn read_lines(rule: &ProgressRule, orders: &Receiver<Order>) {
    let mut ranks: Vec<RankLines> = Vec::new();
    let mut looked = Instant::now();
    loop {
        match orders.recv_timeout(POLL_INTERVAL.saturating_sub(looked.elapsed())) {
            Ok(Order::Read(new)) => {
                ranks.retain(|known| known.rank != new.rank);
                ranks.push(new);
            }
            Ok(Order::Forget) => ranks.clear(),
            Err(RecvTimeoutError::Timeout) => {
                ranks.iter_mut().for_each(|rank| rank.look(rule));
                looked = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl RankLines {
    fn look(&mut self, rule: &ProgressRule) {
        let claims = claims(&self.page);
        if claims != self.claims {
            (self.claims, self.steps) = (claims, PrintedSteps::default());
        }
        let RankLines { page, steps, files, .. } = self;
        for file in files {
            // A file that cannot be read now is read the next time.
            let _ = file.read(|line| {
                if let Some(report) = rule.read(line) {
                    write(page, steps, report);
                }
            });
        }
    }
}

fn write(page: &PageWords, steps: &mut PrintedSteps, LineReport { step, loss }: LineReport) {
    let Ok(writer) = Writer::new(page) else { return };
    let Some(mut page) = writer.try_write(WRITER.key()) else { return };
    let (now, measures) = (clock::mono().0, Measures { loss, ..Measures::default() });
    match (steps.next(step), step) {
        (Some(number), Some(_)) => page.step(now, number, measures),
        (Some(number), None) => page.counted_step(now, number, measures),
        (None, _) => page.beat(now),
    }
}

impl Tail {
    fn new(path: &Path) -> Tail {
        Tail { path: path.to_owned(), offset: 0, line: Vec::new() }
    }

    /// Passes on the lines that were completed since the last call, without their ends.
    fn read(&mut self, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let length = std::fs::metadata(&self.path)?.len();
        if length <= self.offset {
            return Ok(());
        }
        let mut file = File::open(&self.path)?;
        if length - self.offset > MAX_READ_BYTES {
            (self.offset, self.line) = (length - MAX_READ_BYTES, Vec::new());
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        self.offset += file.take(MAX_READ_BYTES).read_to_end(&mut bytes)? as u64;
        // A progress bar ends its states with carriage returns.
        for part in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            self.line.extend_from_slice(part);
            let excess = self.line.len().saturating_sub(MAX_LINE_BYTES);
            self.line.drain(..excess);
            if let Some((b'\n' | b'\r', line)) = self.line.split_last() {
                if !line.is_empty() {
                    each(line);
                }
                self.line.clear();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use mainstay_heartbeat::Page;

    use super::*;

    fn page() -> Arc<PageWords> {
        let spec = PageSpec {
            job: "j",
            rank: 0,
            local_rank: 0,
            world_size: 1,
            attempt: 0,
            boot_id: [0; 16],
            creator_pid: 1,
            created_mono_ns: 1,
        };
        let page = page_in_memory(&spec).expect("a page");
        begin_round(&page);
        page
    }

    fn steps(page: &PageWords) -> Vec<(u64, Option<f64>)> {
        let mut records = Vec::new();
        Page::new(page).expect("a page").records_since(0, &mut records);
        records.iter().map(|record| (record.step, record.loss)).collect()
    }

    #[test]
    fn lines_become_steps_once_they_are_complete() {
        let dir = testing::tempdir().expect("a directory");
        let [stdout, stderr] = ["stdout.log", "stderr.log"].map(|name| dir.path().join(name));
        let mut out = File::create(&stdout).expect("a file");
        let rule: ProgressRule = r"step (\d+)(?: loss (?P<loss>\S+))?".parse().expect("a rule");
        let page = page();
        let mut rank = RankLines {
            rank: Rank(0),
            claims: claims(&page),
            page: page.clone(),
            steps: PrintedSteps::default(),
            files: [Tail::new(&stdout), Tail::new(&stderr)],
        };
        out.write_all(b"start\nstep 1 loss 2.5\nstep 1").expect("written");
        rank.look(&rule);
        assert_eq!(steps(&page), [(1, Some(2.5))]);
        out.write_all(b"2\rstep 13\r").expect("written");
        // The files are read in turn.
        std::fs::write(&stderr, "step 14\n").expect("written");
        rank.look(&rule);
        assert_eq!(steps(&page), [(1, Some(2.5)), (12, None), (13, None), (14, None)]);
        begin_round(&page);
        out.write_all(b"step 3\n").expect("written");
        rank.look(&rule);
        assert_eq!(steps(&page).last(), Some(&(3, None)), "the next round counts from where it resumes");
    }

    #[test]
    fn a_file_that_grows_faster_than_it_is_read_is_read_at_its_end() {
        let dir = testing::tempdir().expect("a directory");
        let path = dir.path().join("stdout.log");
        let mut text = vec![b'x'; 3 << 20];
        text.extend_from_slice(b"\nstep 9\n");
        std::fs::write(&path, text).expect("written");
        let (mut tail, mut lines) = (Tail::new(&path), Vec::new());
        tail.read(|line| lines.push(line.to_vec())).expect("read");
        assert_eq!(lines.last().map(Vec::as_slice), Some(&b"step 9"[..]));
        assert!(lines[0].len() <= MAX_LINE_BYTES, "{}", lines[0].len());
    }
}
