//! Recognises lines of a training log that report a completed step, for the rule that what came before healthy steps is no
//! cause. Understood: nanoGPT, Megatron, Hugging Face Trainer, tqdm, Lightning, torchtitan, MaxText, DeepSpeed, fairseq,
//! Keras, PyTorch's examples, and `step 10 loss 2.3` in general.
//!
//! It is called for every line of a log, so it makes one pass and allocates only where a line has terminal colours.

mod bar;
mod words;

use words::{Number, Words, is_number_at, number_after};

/// Bytes of a line that are looked at: its end, where a progress bar has its newest state.
const LOOKED_AT: usize = 4096;

/// Whether the line shows that a step was completed in good order. A NaN or infinite loss shows none.
pub fn is_progress(line: &str) -> bool {
    read(line).is_some()
}

/// The step that the line reports as completed, where the line names its number. Numbers may begin anew in each epoch.
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

fn read_plain(line: &[u8]) -> Option<Option<u64>> {
    if let Some(bar) = bar::read(line) {
        return bar.map(Some);
    }
    let seen = look(line)?;
    seen.reports_a_step().then_some(seen.step)
}

fn end_of(line: &str) -> &[u8] {
    let line = line.as_bytes();
    &line[line.len().saturating_sub(LOOKED_AT)..]
}

/// What a line has of a report.
#[derive(Default)]
struct Seen {
    /// The number of a step, an iteration or a batch.
    step: Option<u64>,
    /// A place in the training: that number, an epoch, `[64/60000]`.
    place: bool,
    /// A finite loss of training.
    loss: bool,
    /// A finite loss of an evaluation.
    evaluated: bool,
    /// What only a completed step has: its time, a throughput, a word that says so.
    measured: bool,
}

impl Seen {
    fn reports_a_step(&self) -> bool {
        // nanoGPT evaluates before its first step: `step 0: train loss 10.9, val loss 10.9`.
        let before_the_first = self.step == Some(0) && self.evaluated;
        let by_loss = self.loss && self.place;
        (by_loss || self.measured && self.step.is_some()) && !before_the_first
    }
}

/// Reads the words of a line; none where one of them says that the line is something else than a report.
fn look(line: &[u8]) -> Option<Seen> {
    let mut seen = Seen::default();
    let mut words = Words::new(line);
    // A loss belongs to an evaluation if such a word came since the last word `train`.
    let mut evaluation = false;
    let mut named = false;
    while let Some((word, end)) = words.next_word() {
        match word::kind(word) {
            word::Kind::Other => {}
            word::Kind::NoReport => return None,
            word::Kind::Restored if !seen.place => return None,
            word::Kind::Restored => {}
            word::Kind::Dump if line.get(end) == Some(&b'(') => return None,
            word::Kind::Dump => {}
            word::Kind::Training => evaluation = false,
            word::Kind::Evaluation => evaluation = true,
            word::Kind::Step => {
                if let Some(step) = words::whole_number_after(line, end) {
                    seen.place = true;
                    // A number of the whole job is better than one within the epoch.
                    if seen.step.is_none() || word.len() > "iteration".len() {
                        seen.step = Some(step);
                        named = true;
                    }
                }
            }
            word::Kind::Epoch => seen.place |= is_number_at(line, end),
            word::Kind::Loss(of_evaluation) => match number_after(line, end) {
                Number::Finite if of_evaluation || evaluation => seen.evaluated = true,
                Number::Finite => seen.loss = true,
                Number::NotFinite if !of_evaluation => return None,
                Number::NotFinite | Number::None => {}
            },
            word::Kind::Measure => seen.measured |= is_number_at(line, end),
            word::Kind::Done => seen.measured = true,
        }
    }
    if seen.loss
        && !named
        && let Some(step) = words::place_in_brackets(line)
    {
        seen.place = true;
        seen.step = seen.step.or(step);
    }
    Some(seen)
}

mod word {
    /// What a word of a line is in a report.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(super) enum Kind {
        Other,
        /// A line with it is an error or a warning.
        NoReport,
        /// What follows was read from a checkpoint.
        Restored,
        /// With a parenthesis after it, a dump of arguments.
        Dump,
        Training,
        Evaluation,
        Step,
        Epoch,
        /// A loss, and whether its name says that it is one of an evaluation.
        Loss(bool),
        /// What is measured of a completed step.
        Measure,
        /// The step is said to be done.
        Done,
    }

    /// By the field's habits. Letters are compared without case where programs differ in it.
    pub(super) fn kind(word: &[u8]) -> Kind {
        let is = |names: &[&str]| names.iter().any(|name| word.eq_ignore_ascii_case(name.as_bytes()));
        match word.first().map_or(0, u8::to_ascii_lowercase) {
            _ if ends(word, "loss") => loss(word),
            _ if word.ends_with(b"Error") || word.ends_with(b"Exception") || word.ends_with(b"Warning") => {
                Kind::NoReport
            }
            b'a' if is(&["acc", "accuracy"]) => Kind::Measure,
            b'a' if is(&["args", "arguments"]) => Kind::Dump,
            b'b' if is(&["batch"]) => Kind::Step,
            b'c' if is(&["completed"]) => Kind::Done,
            b'c' if is(&["critical"]) => Kind::NoReport,
            b'd' if is(&["done"]) => Kind::Done,
            b'e' if is(&["epoch"]) => Kind::Epoch,
            b'e' if is(&["eval", "evaluation", "evaluating"]) => Kind::Evaluation,
            b'e' if is(&["elapsed"]) => Kind::Measure,
            b'e' if word == b"ERROR" => Kind::NoReport,
            b'e' | b'f' | b'w' if is_glog(word) => Kind::NoReport,
            b'f' if is(&["failed", "fatal", "failure"]) => Kind::NoReport,
            b'f' if is(&["finished"]) => Kind::Done,
            b'g' if is(&["global_step", "global_steps"]) => Kind::Step,
            b'g' if is(&["grad_norm"]) => Kind::Measure,
            b'i' if is(&["iter", "iters", "iteration"]) => Kind::Step,
            b'l' if is(&["load", "loaded", "loading"]) => Kind::Restored,
            b'm' if is(&["mfu"]) => Kind::Measure,
            b'n' if is(&["namespace"]) => Kind::Dump,
            b'n' if is(&["num_updates"]) => Kind::Step,
            b'o' if is(&["overflow"]) => Kind::NoReport,
            b'r' if starts(word, "resum") || starts(word, "restor") => Kind::Restored,
            b'r' if is(&["runningavgsamplespersec"]) => Kind::Measure,
            b's' if is(&["step", "steps"]) => Kind::Step,
            b's' if is(&["sec", "secs", "seconds", "skipped"]) => Kind::Measure,
            b't' if is(&["test", "testing"]) => Kind::Evaluation,
            b't' if is(&["time", "took", "tps", "throughput", "tflops"]) => Kind::Measure,
            b't' if is(&["train", "training"]) => Kind::Training,
            b't' if is(&["training_iteration"]) => Kind::Step,
            b't' if word == b"Traceback" => Kind::NoReport,
            b'v' if is(&["val", "valid", "validation"]) => Kind::Evaluation,
            b'w' if is(&["warn", "warning"]) => Kind::NoReport,
            _ if word.ends_with(b"Config") || word.ends_with(b"Arguments") => Kind::Dump,
            _ => Kind::Other,
        }
    }

    fn loss(word: &[u8]) -> Kind {
        let of_evaluation = ["eval", "val", "test"].iter().any(|name| starts(word, name));
        Kind::Loss(of_evaluation)
    }

    fn starts(word: &[u8], with: &str) -> bool {
        word.get(..with.len()).is_some_and(|head| head.eq_ignore_ascii_case(with.as_bytes()))
    }

    fn ends(word: &[u8], with: &str) -> bool {
        let at = word.len().checked_sub(with.len());
        at.is_some_and(|at| word[at..].eq_ignore_ascii_case(with.as_bytes()))
    }

    /// `W0926`, `E0628`: the level and the day of glog.
    fn is_glog(word: &[u8]) -> bool {
        word.len() >= 5 && word[0].is_ascii_uppercase() && word[1..].iter().all(u8::is_ascii_digit)
    }
}

#[cfg(test)]
mod tests;
