//! Failures of Mainstay's own client: never the program's fault.

use super::{framed, vote};
use crate::attribution::Evidence;
use crate::attribution::catalog::Role;
use crate::attribution::class::Class;
use crate::attribution::scan::{Exception, RelevantLine};
use crate::attribution::traceback::Frame;
use crate::attribution::vote::Vote;

/// The id of the vote.
pub const CLIENT_FAILED: &str = "client.failed";

/// The exception by which the client reports that it cannot read a checkpoint. For mistakes of the program it raises other types.
const LOST_CHECKPOINT: &str = "RuntimeError";

/// Its log-odds: nothing of the program runs in these frames.
const CLIENT_ERROR_LOG_ODDS: f64 = 6.0;

/// What the interpreter or a library reports about its caller. Only such a message is about the client if it was raised in the client.
const ABOUT_THE_CALLER: [Class; 5] =
    [Class::UserCode, Class::UserConfig, Class::Data, Class::SoftwarePlatform, Class::Unknown];

/// Families of signatures about devices and other ranks. CUDA reports an error of the program's kernels in whatever call comes next.
const FROM_ELSEWHERE: [&str; 4] = ["amd", "cuda", "nccl", "xid"];

/// Replaces all votes about exceptions that the client raised, unless it raised them for a mistake of the program.
pub fn name_client(evidence: &Evidence, votes: &mut Vec<Vote>) {
    let mut failed = exceptions(evidence, |_, frame| frame.is_failure_of_client());
    failed.retain(|spot| !votes.iter().any(|vote| is_of(vote, spot) && is_from_elsewhere(vote)));
    let meaning = "Mainstay's own client failed, and the program has no part in it";
    replace(votes, failed, CLIENT_FAILED, meaning, Class::SoftwarePlatform);
    let lost = exceptions(evidence, |exception, frame| {
        exception.name == LOST_CHECKPOINT && frame.is_raised_by_client()
    });
    replace(votes, lost, "client.checkpoint", "a checkpoint of Mainstay could not be read", Class::Storage);
}

fn exceptions(evidence: &Evidence, is: impl Fn(&Exception, &Frame) -> bool) -> Vec<(usize, RelevantLine)> {
    let raised = framed(evidence).filter(|(_, exception, frame)| is(exception, frame));
    raised.map(|(source, exception, _)| (source, exception.spot.clone())).collect()
}

fn replace(votes: &mut Vec<Vote>, spots: Vec<(usize, RelevantLine)>, id: &str, meaning: &str, class: Class) {
    if spots.is_empty() {
        return;
    }
    votes.retain_mut(|vote| {
        let named = vote.spots.len();
        vote.spots.retain(|spot| !spots.iter().any(|other| is_same(other, spot)));
        named == 0 || !vote.spots.is_empty()
    });
    votes.push(vote(id, meaning.to_owned(), (class, CLIENT_ERROR_LOG_ODDS), spots, "client"));
}

fn is_of(vote: &Vote, failure: &(usize, RelevantLine)) -> bool {
    vote.spots.iter().any(|spot| is_same(failure, spot))
}

fn is_same(one: &(usize, RelevantLine), other: &(usize, RelevantLine)) -> bool {
    (one.0, one.1.line) == (other.0, other.1.line)
}

/// Whether a vote is about a signal, a device, another rank or a resource, which show themselves in any code.
fn is_from_elsewhere(vote: &Vote) -> bool {
    vote.role != Role::Primary
        || FROM_ELSEWHERE.contains(&vote.family.as_str())
        || !ABOUT_THE_CALLER.contains(&vote.class)
}

#[cfg(test)]
mod tests {
    use crate::attribution::class::Class;
    use crate::attribution::{Attribution, judged};
    use mainstay_model::verdict::FaultDomain;

    const CLIENT: &str = "/venv/lib/python3.12/site-packages/mainstay/_pinned.py";
    const MISSING: &str = "ModuleNotFoundError: No module named 'torch'";

    /// A traceback from the program into these frames.
    fn raised_in(frames: &[(&str, &str, &str)], exception: &str) -> Attribution {
        let program = ("/home/a/train.py", "<module>", "saved = mainstay.checkpoint.load()");
        let frames = std::iter::once(&program).chain(frames).map(|(path, function, source)| {
            format!("  File \"{path}\", line 7, in {function}\n    {source}\n    ^^^^^^\n")
        });
        let frames: String = frames.collect();
        judged(&format!("step 9 loss 2.0\nTraceback (most recent call last):\n{frames}{exception}\n"))
    }

    fn is_clients(judged: &Attribution) -> bool {
        let clients = judged.is_of_client();
        assert_eq!(clients, judged.domain == FaultDomain::Platform, "{judged:?}");
        clients
    }

    #[test]
    fn an_exception_raised_in_the_client_is_mainstays_own() {
        let failed = |exception: &str| raised_in(&[(CLIENT, "synchronize", "import torch")], exception);
        for exception in [
            MISSING,
            "TypeError: 'NoneType' object is not subscriptable",
            "KeyError: 'model'",
            "AttributeError: 'Control' object has no attribute 'epochs'",
            "ValueError: too many values to unpack (expected 2)",
            "FileNotFoundError: [Errno 2] No such file or directory: '/run/x/pool.json'",
        ] {
            let judged = failed(exception);
            assert!(is_clients(&judged) && judged.confidence > 0.8, "{exception}: {judged:?}");
        }
        // Wherever the package is, and whatever of Python's own library it has called.
        let elsewhere = ("/opt/site/mainstay/_pool.py", "of", "about = json.load(file)");
        assert!(is_clients(&raised_in(&[elsewhere], "KeyError: 'directory'")));
        let python =
            ("/usr/lib/python3.12/json/decoder.py", "raw_decode", "raise JSONDecodeError(\"x\", s, 0)");
        let judged = raised_in(&[elsewhere, python], "json.decoder.JSONDecodeError: Expecting value");
        assert!(is_clients(&judged));
    }

    #[test]
    fn a_program_that_uses_the_client_wrongly_or_fails_below_it_is_at_fault_itself() {
        let user = |frames: &[(&str, &str, &str)], exception: &str| {
            let judged = raised_in(frames, exception);
            assert!(!is_clients(&judged) && judged.domain == FaultDomain::User, "{frames:?}: {judged:?}");
        };
        let on_purpose = (
            "/v/site-packages/mainstay/dcp.py",
            "__init__",
            "raise ValueError(\"mainstay.dcp.Writer: no step\")",
        );
        user(&[on_purpose], "ValueError: mainstay.dcp.Writer: no step");
        let within = ("/v/site-packages/mainstay/_section.py", "inside", "return function(*args, **kwargs)");
        user(
            &[within, ("/home/a/model.py", "forward", "return x[3]")],
            "IndexError: list index out of range",
        );
        // A class that the saved state names, and that the program no longer has.
        let unpickles = ("/v/site-packages/mainstay/_container.py", "of_the_program", "return load()");
        user(&[unpickles], "AttributeError: Can't get attribute 'Gone' on <module '__main__' (built-in)>");
        let by_python = ("/usr/lib/python3.12/copyreg.py", "__newobj__", "return cls.__new__(cls, *args)");
        user(&[unpickles, by_python], "TypeError: __new__() missing 1 required positional argument: 'n'");
        // A folder of the program with the same name.
        user(&[("/home/a/mainstay/train.py", "step", "x = y[\"z\"]")], "KeyError: 'z'");
    }

    #[test]
    fn a_checkpoint_that_the_client_cannot_read_is_not_the_programs_fault() {
        let raises = ("/v/site-packages/mainstay/checkpoint.py", "_take_chosen", "raise RuntimeError(");
        let text = "mainstay.checkpoint.load: all hosts go on from step 8, and the shard of rank 1 is not on this host any more";
        let judged = raised_in(&[raises], &format!("RuntimeError: {text}"));
        assert_eq!(
            (judged.class, judged.domain),
            (Class::Storage, FaultDomain::Infrastructure),
            "{judged:?}"
        );
    }

    #[test]
    fn what_a_device_or_the_host_reports_in_the_client_keeps_its_cause() {
        let copies = (CLIENT, "synchronize", "torch.cuda.current_stream(device).synchronize()");
        let judged = raised_in(&[copies], "RuntimeError: CUDA error: device-side assert triggered");
        assert!(!judged.is_of_client() && judged.class == Class::UserCode, "{judged:?}");
        let full = raised_in(&[copies], "OSError: [Errno 28] No space left on device");
        assert!(!full.is_of_client() && full.class == Class::Storage, "{full:?}");
    }
}
