//! Recognises lines of a training log that report a completed step, for the rule that lines before healthy steps are no cause.
//! Supported formats: nanoGPT, Megatron, Hugging Face Trainer, tqdm, Lightning, torchtitan, MaxText, DeepSpeed, fairseq, Keras,
//! PyTorch's examples, and `step 10 loss 2.3` in general.
//!
//! Called for every line of a log: makes one pass and allocates only for lines with terminal colors.

mod bar;
mod words;

use std::sync::LazyLock;

use memchr::memmem::Finder;
use words::{Number, Words, is_number_at, number_after};

/// Bytes of a line that are read: its end, where a progress bar has its newest state.
const MAX_READ_BYTES: usize = 4096;

/// Whether the line reports a step that completed normally. A NaN or infinite loss does not count.
pub fn is_progress(line: &str) -> bool {
    read(line).is_some()
}

/// The number of the completed step, if the line has one. Numbers may start again in each epoch.
pub fn step_of(line: &str) -> Option<u64> {
    read(line).flatten()
}

/// The completed step that a line reports, with its number where it has one.
fn read(line: &str) -> Option<Option<u64>> {
    let line = end_of(line);
    if memchr::memchr(0x1b, line).is_some() {
        let mut plain = Vec::with_capacity(line.len());
        super::lines::without_colours(line, &mut plain);
        return read_plain(&plain);
    }
    read_plain(line)
}

/// Every report contains one of these: loss, step, iteration. This check rules out most lines of a log.
static MARKS: LazyLock<[Finder<'static>; 3]> = LazyLock::new(|| ["oss", "tep", "ter"].map(Finder::new));

fn read_plain(line: &[u8]) -> Option<Option<u64>> {
    if let Some(bar) = bar::read(line) {
        return bar.map(Some);
    }
    if !MARKS.iter().any(|mark| mark.find(line).is_some()) {
        return None;
    }
    let content = read_content(line)?;
    content.reports_a_step().then_some(content.step)
}

fn end_of(line: &str) -> &[u8] {
    let line = line.as_bytes();
    &line[line.len().saturating_sub(MAX_READ_BYTES)..]
}

/// The parts of a report found in a line.
#[derive(Default)]
struct LineContent {
    /// The number of a step, an iteration or a batch.
    step: Option<u64>,
    /// A position in the training: that number, an epoch, `[64/60000]`.
    has_position: bool,
    /// A finite training loss.
    loss: bool,
    /// A finite evaluation loss.
    evaluated: bool,
    /// What only a completed step has: its time, a throughput, a word for it.
    measured: bool,
}

impl LineContent {
    fn reports_a_step(&self) -> bool {
        // nanoGPT evaluates before its first step: `step 0: train loss 10.9, val loss 10.9`.
        let before_the_first = self.step == Some(0) && self.evaluated;
        let by_loss = self.loss && self.has_position;
        (by_loss || self.measured && self.step.is_some()) && !before_the_first
    }
}

/// Reads the words of a line. `None` if one of them shows that the line is no report.
fn read_content(line: &[u8]) -> Option<LineContent> {
    let mut content = LineContent::default();
    let mut words = Words::new(line);
    // A loss belongs to an evaluation if such a word occurred after the last `train`.
    let mut evaluation = false;
    let mut named = false;
    while let Some((word, end)) = words.next_word() {
        match word::kind(word) {
            word::Kind::Other => {}
            word::Kind::NoReport => return None,
            word::Kind::Restored if !content.has_position => return None,
            word::Kind::Restored => {}
            word::Kind::Dump if line.get(end) == Some(&b'(') => return None,
            word::Kind::Dump => {}
            word::Kind::Training => evaluation = false,
            word::Kind::Evaluation => evaluation = true,
            word::Kind::Step => {
                if let Some(step) = words::whole_number_after(line, end) {
                    content.has_position = true;
                    // A number of the whole job is preferred to one within the epoch.
                    if content.step.is_none() || word.len() > "iteration".len() {
                        content.step = Some(step);
                        named = true;
                    }
                }
            }
            word::Kind::Epoch => content.has_position |= is_number_at(line, end),
            word::Kind::Loss(of_evaluation) => match number_after(line, end) {
                Number::Finite if of_evaluation || evaluation => content.evaluated = true,
                Number::Finite => content.loss = true,
                Number::NotFinite if !of_evaluation => return None,
                Number::NotFinite | Number::None => {}
            },
            word::Kind::Measure => content.measured |= is_number_at(line, end),
            word::Kind::Done => content.measured = true,
        }
    }
    if content.loss
        && !named
        && let Some(step) = words::place_in_brackets(line)
    {
        content.has_position = true;
        content.step = content.step.or(step);
    }
    Some(content)
}

mod word {
    /// The role of a word in a report.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Kind {
        Other,
        /// Marks the line as an error or a warning.
        NoReport,
        /// Marks values that were read from a checkpoint.
        Restored,
        /// With a parenthesis after it, marks a dump of arguments.
        Dump,
        Training,
        Evaluation,
        Step,
        Epoch,
        /// A loss, and whether its name marks an evaluation.
        Loss(bool),
        /// A measurement of a completed step.
        Measure,
        /// States that the step is done.
        Done,
    }

    /// Length of the longest known word.
    const MAX_WORD_BYTES: usize = 24;

    /// By common usage. Case is ignored because programs differ in it.
    pub(super) fn kind(word: &[u8]) -> Kind {
        let mut lower = [0; MAX_WORD_BYTES];
        if let Some(lower) = lower.get_mut(..word.len()) {
            lower.copy_from_slice(word);
            lower.make_ascii_lowercase();
            let known = by_name(lower);
            if known != Kind::Other {
                return known;
            }
        }
        let [first, .., last] = word else { return Kind::Other };
        match last {
            b's' | b'S' if ends(word, "loss") => {
                let of_evaluation = ["eval", "val", "test"].iter().any(|name| starts(word, name));
                Kind::Loss(of_evaluation)
            }
            b's' if word.ends_with(b"Arguments") => Kind::Dump,
            b'r' if word.ends_with(b"Error") => Kind::NoReport,
            b'R' if word == b"ERROR" => Kind::NoReport,
            b'n' if word.ends_with(b"Exception") => Kind::NoReport,
            b'g' if word.ends_with(b"Warning") => Kind::NoReport,
            b'g' if word.ends_with(b"Config") => Kind::Dump,
            b'0'..=b'9' if is_glog(word) => Kind::NoReport,
            _ if matches!(first, b'r' | b'R') && (starts(word, "resum") || starts(word, "restor")) => {
                Kind::Restored
            }
            _ => Kind::Other,
        }
    }

    fn by_name(lower: &[u8]) -> Kind {
        match lower {
            b"loss" => Kind::Loss(false),
            b"batch"
            | b"global_step"
            | b"global_steps"
            | b"iter"
            | b"iteration"
            | b"iters"
            | b"num_updates"
            | b"step"
            | b"steps"
            | b"training_iteration" => Kind::Step,
            b"epoch" => Kind::Epoch,
            b"acc"
            | b"accuracy"
            | b"elapsed"
            | b"grad_norm"
            | b"mfu"
            | b"runningavgsamplespersec"
            | b"sec"
            | b"seconds"
            | b"secs"
            | b"skipped"
            | b"tflops"
            | b"throughput"
            | b"time"
            | b"took"
            | b"tps" => Kind::Measure,
            b"completed" | b"done" | b"finished" => Kind::Done,
            b"train" | b"training" => Kind::Training,
            b"eval" | b"evaluating" | b"evaluation" | b"test" | b"testing" | b"val" | b"valid"
            | b"validation" => Kind::Evaluation,
            b"load" | b"loaded" | b"loading" => Kind::Restored,
            b"args" | b"arguments" | b"namespace" => Kind::Dump,
            b"critical" | b"failed" | b"failure" | b"fatal" | b"overflow" | b"traceback" | b"warn"
            | b"warning" => Kind::NoReport,
            _ => Kind::Other,
        }
    }

    fn starts(word: &[u8], with: &str) -> bool {
        word.get(..with.len()).is_some_and(|head| head.eq_ignore_ascii_case(with.as_bytes()))
    }

    fn ends(word: &[u8], with: &str) -> bool {
        let at = word.len().checked_sub(with.len());
        at.is_some_and(|at| word[at..].eq_ignore_ascii_case(with.as_bytes()))
    }

    /// `W0926`, `E0628`: glog's level and date.
    fn is_glog(word: &[u8]) -> bool {
        word.len() == 5 && matches!(word[0], b'E' | b'F' | b'W') && word[1..].iter().all(u8::is_ascii_digit)
    }
}

#[cfg(test)]
mod tests;
