//! Evidence from the frames of tracebacks: libraries with their own kernels, incompatible libraries, and processes that run no code of
//! the program.

use std::collections::BTreeSet;

use super::{framed, is, spots_of, vote};
use crate::attribution::Evidence;
use crate::attribution::catalog::Catalog;
use crate::attribution::class::{Class, Restart};
use crate::attribution::scan::{Exception, SignatureMatch};
use crate::attribution::traceback::{CALLING_CHECKOUTS, Frame};
use crate::attribution::vote::Vote;
use mainstay_model::verdict::FaultDomain;

/// Log-odds of a kernel fault whose frames are in a kernel library.
const LIBRARY_KERNEL_LOG_ODDS: f64 = 1.4;

/// The most that the fault of a library's kernel says against the program, which gave it its data.
const MAX_PROGRAM_LOG_ODDS: f64 = 1.4;

/// Log-odds of a library that uses what another one lacks: incompatible versions.
const INCOMPATIBLE_LIBRARIES_LOG_ODDS: f64 = 2.4;

/// Log-odds of a library whose assertion shows only its own state.
const OWN_STATE_LOG_ODDS: f64 = 2.6;

/// Log-odds of a training framework that trips over an object of its own. Its caller may have caused that.
const OWN_OBJECT_LOG_ODDS: f64 = 2.3;
/// The inner parts of frameworks: no program calls them directly, and they check what users give them further out.
const INNER_PARTS: [&str; 11] = [
    "/deepspeed/runtime/",
    "/torch/distributed/fsdp/",
    "/torch/nn/parallel/",
    "/accelerate/utils/",
    "/ray/_private/",
    "/ray/train/_internal/",
    "/vllm/v1/",
    "/vllm/model_executor/",
    "/sglang/srt/",
    "/megatron/core/distributed/",
    "/megatron/core/pipeline_parallel/",
];

/// Log-odds of a library that does not implement something. A setting may avoid it.
const NOT_IMPLEMENTED_LOG_ODDS: f64 = 2.2;

/// Log-odds of an installed library that uses a name which it does not define: no program can fix that.
const UNDEFINED_NAME_LOG_ODDS: f64 = 6.0;

/// Log-odds of an assertion without a message inside a compiler: an internal error.
const COMPILER_ERROR_LOG_ODDS: f64 = 2.6;
/// Paths of compiler libraries.
const COMPILERS: [&str; 7] = [
    "/torch/_inductor/",
    "/torch/_dynamo/",
    "/torch/_functorch/",
    "/torch/fx/",
    "/triton/compiler/",
    "/jax/_src/interpreters/",
    "/torch_xla/",
];

/// Log-odds of an internal error in a launcher, which runs before the program and next to it.
const LAUNCHER_ERROR_LOG_ODDS: f64 = 5.0;
/// Paths of libraries that start and monitor programs.
const LAUNCHERS: [&str; 4] = [
    "/torch/distributed/elastic/",
    "/torch/distributed/launcher/",
    "/deepspeed/launcher/",
    "/accelerate/commands/",
];

/// Libraries with their own GPU kernels.
const KERNEL_LIBRARIES: [&str; 14] = [
    "/vllm/",
    "/sglang/",
    "/flash_attn",
    "/transformer_engine/",
    "/xformers/",
    "/deepspeed/ops/",
    "/bitsandbytes/",
    "/triton/",
    "/mamba_ssm/",
    "/apex/",
    "/deep_gemm/",
    "/flashinfer/",
    "/aiter/",
    "/megablocks/",
];

/// Signatures of faults that a kernel causes itself.
const KERNEL_FAULTS: [&str; 5] = [
    "cuda.illegal_access",
    "cuda.misaligned",
    "cuda.launch_failure",
    "cuda.illegal_instruction",
    "amd.page_fault",
];

/// Prefixes of log lines from processes of an inference engine, which run no code of the training program.
const ENGINES: [&str; 4] = ["(EngineCore", "[EngineCore", "(VllmWorker", "(Worker_TP"];

/// Log-odds of a GPU fault in such a process.
const ENGINE_FAULT_LOG_ODDS: f64 = 6.0;

/// A kernel fault whose innermost frame is in a library with its own kernels.
pub(super) fn library_kernel(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
    framed(evidence).find_map(|(source, exception, frame)| {
        let library = KERNEL_LIBRARIES.iter().find(|library| frame.path.contains(**library))?;
        let is_fault = |sighting: &SignatureMatch| {
            KERNEL_FAULTS.iter().any(|fault| is(catalog, sighting, fault))
                && sighting.spots.iter().any(|spot| spot.line == exception.spot.line)
        };
        let name = library.trim_matches('/');
        let meaning = format!("the fault shows in the frames of {name}, which has kernels of its own");
        evidence.findings[source].sightings.iter().any(is_fault).then(|| {
            of_platform("frame.kernel_library", meaning, LIBRARY_KERNEL_LOG_ODDS, (source, exception))
        })
    })
}

/// Lowers what a kernel's fault says against the program where it is a library's kernel: the XIDs and the access are that one fault.
pub fn fold_library_kernels(votes: &mut [Vote]) {
    const OF_LIBRARY: [&str; 2] = ["frame.kernel_library", "cuda.library_kernel"];
    const OF_ACCESS: [&str; 5] =
        ["xid.13", "xid.31", "xid.out_of_range_address", "cuda.illegal_access", "cuda.misaligned"];
    if !votes.iter().any(|vote| OF_LIBRARY.contains(&vote.id.as_str())) {
        return;
    }
    for vote in votes.iter_mut().filter(|vote| OF_ACCESS.contains(&vote.id.as_str())) {
        if vote.class == Class::UserCode {
            vote.weight = vote.weight.min(MAX_PROGRAM_LOG_ODDS);
            "cuda".clone_into(&mut vote.family);
        }
    }
}

/// A kernel fault reported by a process of an inference engine.
pub(super) fn in_engine(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
    let faults = KERNEL_FAULTS.into_iter().chain(["cuda.device_assert"]);
    let mut spots = faults.flat_map(|fault| spots_of(catalog, evidence, fault));
    let (source, spot) = spots.find(|(_, spot)| ENGINES.iter().any(|engine| spot.text.contains(engine)))?;
    let meaning =
        "the fault shows in a process of the inference engine, which runs no code of the program".to_owned();
    let fault = vote(
        "frame.engine",
        meaning,
        (Class::SoftwarePlatform, ENGINE_FAULT_LOG_ODDS),
        vec![(source, spot.clone())],
        "frames",
    );
    // A new process of the engine serves again: which requests meet the fault is chance.
    Some(Vote { restart: Some(Restart::RestartSameNodes), ..fault })
}

/// An assertion, missing key or index inside a compiler: its internals, not the program's.
pub(super) fn in_compiler(evidence: &Evidence) -> Option<Vote> {
    const SLIPS: [&str; 4] = ["AssertionError", "KeyError", "IndexError", "NotImplementedError"];
    let slipped = slipped_inside(evidence, &COMPILERS, &SLIPS)?;
    let meaning = "a compiler stopped at an internal error".to_owned();
    Some(of_platform("frame.compiler", meaning, COMPILER_ERROR_LOG_ODDS, slipped))
}

/// A missing key, attribute or argument inside a launcher: it reports users' mistakes explicitly.
pub(super) fn in_launcher(evidence: &Evidence) -> Option<Vote> {
    const SLIPS: [&str; 5] = ["KeyError", "AttributeError", "IndexError", "TypeError", "UnboundLocalError"];
    let slipped = slipped_inside(evidence, &LAUNCHERS, &SLIPS)?;
    let meaning = "the launcher itself failed, and no code of the program runs in it".to_owned();
    Some(of_platform("frame.launcher", meaning, LAUNCHER_ERROR_LOG_ODDS, slipped))
}

/// The first exception of one of these types that was raised in one of these folders.
fn slipped_inside<'e>(
    evidence: &'e Evidence,
    folders: &[&str],
    types: &[&str],
) -> Option<(usize, &'e Exception)> {
    let is_slip = |exception: &Exception, frame: &Frame| {
        folders.iter().any(|folder| frame.path.contains(folder))
            && types.iter().any(|name| exception.name.ends_with(name))
    };
    let mut slips = framed(evidence).filter(|(_, exception, frame)| is_slip(exception, frame));
    slips.next().map(|(source, exception, _)| (source, exception))
}

/// Evidence for the software platform that an exception shows.
fn of_platform(id: &str, meaning: String, log_odds: f64, (source, exception): (usize, &Exception)) -> Vote {
    let spots = vec![(source, exception.spot.clone())];
    vote(id, meaning, (Class::SoftwarePlatform, log_odds), spots, "frames")
}

/// What an installed library says that it does not implement. A method that the program should have is another matter.
pub(super) fn not_implemented(evidence: &Evidence) -> Option<Vote> {
    let (source, exception, _) = framed(evidence).find(|(_, exception, frame)| {
        let (_, message) = exception.spot.text.split_once("NotImplementedError:").unwrap_or_default();
        frame.path.contains("-packages/") && !message.trim().is_empty() && !message.contains("forward")
    })?;
    let meaning = "an installed library does not implement what is asked of it here".to_owned();
    Some(of_platform("frame.not_implemented", meaning, NOT_IMPLEMENTED_LOG_ODDS, (source, exception)))
}

/// A missing attribute, argument or name that an installed library uses. If the program used it, the innermost frame would be the
/// program's.
pub(super) fn between_libraries(evidence: &Evidence) -> Option<Vote> {
    const ASKS: [&str; 5] = [
        "has no attribute",
        "unexpected keyword argument",
        "cannot import name",
        "missing 1 required positional argument",
        "is not supported by the V",
    ];
    framed(evidence).find_map(|(source, exception, frame)| {
        let installed = frame.path.contains("site-packages/") || frame.path.contains("dist-packages/");
        let text = &exception.spot.text;
        let asks = ASKS.iter().any(|words| text.contains(words)) && !text.contains("NoneType");
        let asks = asks || lacks_a_part(text);
        let calls = CALLING_CHECKOUTS.iter().any(|folder| frame.path.contains(folder))
            && text.contains("unexpected keyword argument");
        let names = exception.name.ends_with("UnboundLocalError") || exception.name.ends_with("NameError");
        let path = &frame.path;
        let (id, meaning, log_odds) = if installed && names {
            let meaning = format!("an installed library uses a name that it does not define ({path})");
            ("frame.library_name", meaning, UNDEFINED_NAME_LOG_ODDS)
        } else if installed && asks || calls {
            let meaning = format!("an installed library uses a part of another that does not exist ({path})");
            ("frame.between_libraries", meaning, INCOMPATIBLE_LIBRARIES_LOG_ODDS)
        } else {
            return None;
        };
        Some(of_platform(id, meaning, log_odds, (source, exception)))
    })
}

/// An installed library that stops without words for its caller: an assertion with a dump of the library's own state, or, in the inner
/// part of a framework, an assertion without a message or an object that is missing or of another form.
pub(super) fn own_state(evidence: &Evidence) -> Option<Vote> {
    framed(evidence).find_map(|(source, exception, frame)| {
        let text = &exception.spot.text;
        let asserted =
            text.split_once("AssertionError").map(|(_, message)| message.trim_start_matches([':', ' ']));
        let asserted = asserted.filter(|_| exception.name.ends_with("AssertionError"));
        let dumps = asserted.is_some_and(|message| message.starts_with(['{', '[', '(', '<']));
        let is_inner = INNER_PARTS.iter().any(|folder| frame.path.contains(folder));
        let misses = asserted.is_some_and(|message| message.trim().is_empty()) || slips(exception);
        let (meaning, log_odds) = if frame.path.contains("-packages/") && dumps {
            ("an installed library stopped at an assertion about its own state", OWN_STATE_LOG_ODDS)
        } else if is_inner && misses {
            ("the inner part of a framework misses an object of its own", OWN_OBJECT_LOG_ODDS)
        } else {
            return None;
        };
        Some(of_platform("frame.own_state", meaning.to_owned(), log_odds, (source, exception)))
    })
}

/// Whether code used an object of its own that is missing or of another form. It says nothing to its caller.
fn slips(exception: &Exception) -> bool {
    let text = &exception.spot.text;
    let is_a = |name: &str| exception.name.ends_with(name);
    is_a("KeyError")
        || is_a("IndexError")
        || (is_a("AttributeError") || is_a("TypeError")) && text.contains("NoneType")
        || is_a("ValueError") && text.contains("values to unpack")
}

/// Where an installed library calls another in a way that it does not allow, the program did not make the call.
pub fn fold_calls_of_libraries(votes: &mut [Vote]) {
    const CALLS: [&str; 3] = ["frame.between_libraries", "frame.own_state", "frame.not_implemented"];
    let calls = votes.iter().filter(|vote| CALLS.contains(&vote.id.as_str()));
    let lines: BTreeSet<(usize, u64)> = calls.flat_map(Vote::lines).collect();
    for vote in votes.iter_mut().filter(|vote| vote.class.domain() == FaultDomain::User) {
        if vote.lines().any(|line| lines.contains(&line)) {
            vote.weight = vote.weight.min(MAX_PROGRAM_LOG_ODDS);
        }
    }
}

/// Whether a module is missing from a package that exists in another version. A package that is missing completely was not installed.
fn lacks_a_part(text: &str) -> bool {
    text.split_once("No module named ").is_some_and(|(_, module)| {
        let name = module.trim_matches(|letter| "'\"` ".contains(letter));
        name.contains('.') && !name.contains(' ')
    })
}

#[cfg(test)]
mod tests {
    use crate::attribution::class::Class;
    use crate::attribution::judged;

    #[test]
    fn a_fault_in_a_kernel_library_points_to_the_platform() {
        let raised = |path: &str| {
            format!(
                "  File \"{path}\", line 9, in forward\n    x = op(y)\nRuntimeError: CUDA error: an illegal memory access was encountered\n"
            )
        };
        let library = judged(&raised("/usr/lib/python3.12/site-packages/vllm/model_executor/mla.py"));
        assert_eq!(library.class, Class::SoftwarePlatform);
        assert_eq!(judged(&raised("/home/a/train.py")).class, Class::UserCode);
    }

    #[test]
    fn an_internal_error_of_a_launcher_points_to_the_platform() {
        let raised = |path: &str| {
            format!(
                "  File \"{path}\", line 259, in run\n    x.is_failed()\nAttributeError: 'NoneType' object has no attribute 'is_failed'\n"
            )
        };
        let launcher =
            judged(&raised("/venv/lib/python3.12/site-packages/torch/distributed/launcher/api.py"));
        assert_eq!(launcher.class, Class::SoftwarePlatform);
        assert_eq!(judged(&raised("/home/a/train.py")).class, Class::UserCode);
    }

    #[test]
    fn an_installed_library_that_misses_a_part_of_another_points_to_the_platform() {
        let raised = |path: &str, module: &str| {
            let log = format!(
                "  File \"{path}\", line 6, in <module>\n    from {module} import f\nModuleNotFoundError: No module named '{module}'\n"
            );
            judged(&log).class
        };
        let library = "/opt/env/lib/python3.8/site-packages/titans/gpt.py";
        assert_eq!(raised(library, "colossalai.builder.pipeline"), Class::SoftwarePlatform);
        assert_eq!(raised("/home/a/train.py", "einops"), Class::UserConfig);
    }

    #[test]
    fn a_name_that_an_installed_library_does_not_define_is_the_librarys_fault() {
        let raised = |path: &str| {
            format!(
                "  File \"{path}\", line 9, in train\n    r = stats\nUnboundLocalError: cannot access local variable 'stats' \
                 where it is not associated with a value\n"
            )
        };
        let library = judged(&raised("/usr/lib/python3.12/site-packages/rfdetr/main.py"));
        assert_eq!(library.class, Class::SoftwarePlatform);
        assert_eq!(judged(&raised("/home/a/train.py")).class, Class::UserCode);
    }

    #[test]
    fn a_gpu_fault_in_an_inference_engine_is_not_the_programs() {
        let engine_log = |who: &str| {
            format!(
                "{who}ERROR 01-04 [core.py:844] torch.AcceleratorError: CUDA error: device-side assert triggered\n"
            )
        };
        assert_eq!(judged(&engine_log("(EngineCore_DP0 pid=43065) ")).class, Class::SoftwarePlatform);
        assert_eq!(judged(&engine_log("")).class, Class::UserCode);
    }

    #[test]
    fn incompatible_libraries_point_to_the_platform() {
        let raised = |path: &str, on: &str| {
            format!(
                "  File \"{path}\", line 9, in forward\n    return x.y\nAttributeError: '{on}' object has no attribute 'y'\n"
            )
        };
        let installed = "/v/lib/python3.12/site-packages/vllm/llm.py";
        assert_eq!(judged(&raised(installed, "LLMEngine")).class, Class::SoftwarePlatform);
        assert_eq!(judged(&raised(installed, "NoneType")).domain, mainstay_model::verdict::FaultDomain::User);
        assert_eq!(judged(&raised("/home/a/train.py", "Model")).class, Class::UserCode);
    }

    #[test]
    fn an_assertion_within_a_compiler_points_to_the_platform() {
        let raised = |path: &str| format!("  File \"{path}\", line 512, in merge\nAssertionError\n");
        let compiler =
            judged(&raised("/v/lib/python3.12/site-packages/torch/_inductor/fx_passes/bucketing.py"));
        assert_eq!(compiler.class, Class::SoftwarePlatform);
        assert_eq!(judged(&raised("/home/a/train.py")).domain, mainstay_model::verdict::FaultDomain::User);
    }

    #[test]
    fn a_call_from_one_library_to_another_is_none_of_the_program() {
        let raised =
            |path: &str, text: &str| format!("  File \"{path}\", line 31, in build\n    make(x)\n{text}\n");
        let unknown_argument =
            "TypeError: RewardTrainer.__init__() got an unexpected keyword argument 'margin'";
        for path in ["/opt/image/src/axolotl/core/builder.py", "/v/lib/python3.11/site-packages/acme/run.py"]
        {
            assert_eq!(judged(&raised(path, unknown_argument)).class, Class::SoftwarePlatform, "{path}");
        }
        let own = judged(&raised("/home/a/train.py", unknown_argument));
        assert_eq!(own.class.domain(), mainstay_model::verdict::FaultDomain::User);
    }

    #[test]
    fn an_assertion_of_a_library_about_its_own_state_is_none_of_the_program() {
        let raised = |message: &str| {
            format!(
                "  File \"/v/lib/python3.11/site-packages/acme/swap.py\", line 31, in take\n    assert ok, state\nAssertionError{message}\n"
            )
        };
        assert_eq!(
            judged(&raised(": {'id': 7, 'status': 'MOVING', 'users': set()}")).class,
            Class::SoftwarePlatform
        );
        let asked = judged(&raised(": heads must be even"));
        assert_eq!(asked.class, Class::UserConfig);
    }

    #[test]
    fn what_a_library_does_not_implement_is_none_of_the_program() {
        let raised = |path: &str, message: &str| {
            judged(&format!("  File \"{path}\", line 31, in run\n    op(x)\nNotImplementedError{message}\n"))
                .class
        };
        let library = "/v/lib/python3.11/site-packages/acme/ops.py";
        assert_eq!(raised(library, ": no kernel for float8 on this device"), Class::SoftwarePlatform);
        assert_eq!(raised("/home/a/ops.py", ": no kernel for float8 on this device"), Class::UserCode);
        assert_eq!(raised(library, ": Net lacks the required forward function"), Class::UserCode);
    }

    #[test]
    fn the_inner_part_of_a_framework_that_misses_its_own_object_is_none_of_the_program() {
        let raised = |path: &str, text: &str| {
            judged(&format!("  File \"{path}\", line 88, in hook\n    acc.next(0)\n{text}\n"))
        };
        let inner = "/v/lib/python3.11/site-packages/deepspeed/runtime/zero/hooks.py";
        let missing = "AttributeError: 'NoneType' object has no attribute 'next'";
        for text in
            [missing, "AssertionError", "KeyError: 77", "ValueError: too many values to unpack (expected 2)"]
        {
            let judged = raised(inner, text);
            assert_eq!(judged.class, Class::SoftwarePlatform, "{text}");
            assert_ne!(judged.restart, crate::attribution::class::Restart::DoNotRestart, "{text}");
            assert_eq!(raised("/home/a/hooks.py", text).domain, mainstay_model::verdict::FaultDomain::User);
        }
    }

    #[test]
    fn an_inference_engine_whose_kernel_failed_is_started_again() {
        let log = "(EngineCore_DP1 pid=77) ERROR 08-29 04:12:01 [core.py:844] torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n";
        let kernel = "NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=VLLM::EngineCor, MMU Fault\n";
        for log in [log.to_owned(), kernel.to_owned(), format!("{log}{kernel}")] {
            let judged = judged(&log);
            assert_eq!(judged.class, Class::SoftwarePlatform, "{log}");
            assert_eq!(judged.restart, crate::attribution::class::Restart::RestartSameNodes, "{log}");
        }
    }
}
