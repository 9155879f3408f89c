//! Evidence from the frames of tracebacks: libraries with their own kernels, incompatible libraries, and processes that run no code of
//! the program.

use std::collections::BTreeSet;

use super::{spots_of, vote};
use crate::attribution::Evidence;
use crate::attribution::catalog::Catalog;
use crate::attribution::class::{Class, Restart};
use crate::attribution::traceback::{CALLING_CHECKOUTS, Frame};
use crate::attribution::vote::Vote;
use mainstay_model::verdict::FaultDomain;

/// Log-odds of a kernel fault whose frames are in a kernel library.
const LIBRARY_KERNEL: f64 = 1.4;

/// The most that the fault of a library's kernel says against the program, which gave it its data.
const OF_ANY_KERNEL: f64 = 1.4;

/// Log-odds of a library that uses what another one lacks: incompatible versions.
const BETWEEN_LIBRARIES: f64 = 2.4;

/// Log-odds of a library whose assertion shows only its own state.
const OWN_STATE: f64 = 2.6;

/// Log-odds of an installed library that uses a name which it does not define: no program can fix that.
const LIBRARY_NAME: f64 = 6.0;

/// Log-odds of an assertion without a message inside a compiler: an internal error.
const IN_COMPILER: f64 = 2.6;
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
const IN_LAUNCHER: f64 = 5.0;
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
const IN_ENGINE: f64 = 6.0;

/// A kernel fault whose innermost frame is in a library with its own kernels.
pub(super) fn library_kernel(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
    for (place, findings) in evidence.findings.iter().enumerate() {
        let fault = |line: u64| {
            findings.sightings.iter().any(|of| {
                catalog
                    .signatures()
                    .get(of.signature)
                    .is_some_and(|it| KERNEL_FAULTS.contains(&it.id.as_str()))
                    && of.spots.iter().any(|spot| spot.line == line)
            })
        };
        for exception in &findings.exceptions {
            let Some(frame) = &exception.frame else { continue };
            let library = KERNEL_LIBRARIES.iter().find(|library| frame.path.contains(**library));
            if let (Some(library), true) = (library, fault(exception.spot.line)) {
                return Some(vote(
                    "frame.kernel_library",
                    format!(
                        "the fault shows in the frames of {}, which has kernels of its own",
                        library.trim_matches('/')
                    ),
                    (Class::SoftwarePlatform, LIBRARY_KERNEL),
                    vec![(place, exception.spot.clone())],
                    "frames",
                ));
            }
        }
    }
    None
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
            vote.weight = vote.weight.min(OF_ANY_KERNEL);
            "cuda".clone_into(&mut vote.family);
        }
    }
}

/// A kernel fault reported by a process of an inference engine.
pub(super) fn in_engine(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
    let faults = KERNEL_FAULTS.into_iter().chain(["cuda.device_assert"]);
    let mut spots = faults.flat_map(|fault| spots_of(catalog, evidence, fault));
    let (place, spot) = spots.find(|(_, spot)| ENGINES.iter().any(|engine| spot.text.contains(engine)))?;
    let said =
        "the fault shows in a process of the inference engine, which runs no code of the program".to_owned();
    let fault = vote(
        "frame.engine",
        said,
        (Class::SoftwarePlatform, IN_ENGINE),
        vec![(place, spot.clone())],
        "frames",
    );
    // A new process of the engine serves again: which requests meet the fault is chance.
    Some(Vote { restart: Some(Restart::RestartSameNodes), ..fault })
}

/// An assertion, missing key or index inside a compiler: its internals, not the program's.
pub(super) fn in_compiler(evidence: &Evidence) -> Option<Vote> {
    const SLIPS: [&str; 4] = ["AssertionError", "KeyError", "IndexError", "NotImplementedError"];
    evidence.findings.iter().enumerate().find_map(|(place, findings)| {
        let slipped = findings.exceptions.iter().find(|of| {
            let inside = |frame: &Frame| COMPILERS.iter().any(|part| frame.path.contains(part));
            of.frame.as_ref().is_some_and(inside) && SLIPS.iter().any(|slip| of.name.ends_with(slip))
        })?;
        Some(vote(
            "frame.compiler",
            "a compiler stopped at an internal error".to_owned(),
            (Class::SoftwarePlatform, IN_COMPILER),
            vec![(place, slipped.spot.clone())],
            "frames",
        ))
    })
}

/// A missing key, attribute or argument inside a launcher: it reports users' mistakes explicitly.
pub(super) fn in_launcher(evidence: &Evidence) -> Option<Vote> {
    const SLIPS: [&str; 5] = ["KeyError", "AttributeError", "IndexError", "TypeError", "UnboundLocalError"];
    evidence.findings.iter().enumerate().find_map(|(place, findings)| {
        let slipped = findings.exceptions.iter().find(|of| {
            let inside = |frame: &Frame| LAUNCHERS.iter().any(|part| frame.path.contains(part));
            of.frame.as_ref().is_some_and(inside) && SLIPS.iter().any(|slip| of.name.ends_with(slip))
        })?;
        Some(vote(
            "frame.launcher",
            "the launcher itself failed, and no code of the program runs in it".to_owned(),
            (Class::SoftwarePlatform, IN_LAUNCHER),
            vec![(place, slipped.spot.clone())],
            "frames",
        ))
    })
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
    for (place, findings) in evidence.findings.iter().enumerate() {
        for exception in &findings.exceptions {
            let Some(frame) = &exception.frame else { continue };
            let installed = frame.path.contains("site-packages/") || frame.path.contains("dist-packages/");
            let text = &exception.spot.text;
            let asks = ASKS.iter().any(|words| text.contains(words)) && !text.contains("NoneType");
            let asks = asks || lacks_a_part(text);
            let calls = CALLING_CHECKOUTS.iter().any(|place| frame.path.contains(place))
                && text.contains("unexpected keyword argument");
            let names =
                exception.name.ends_with("UnboundLocalError") || exception.name.ends_with("NameError");
            if installed && names {
                return Some(vote(
                    "frame.library_name",
                    format!("an installed library uses a name that it does not define ({})", frame.path),
                    (Class::SoftwarePlatform, LIBRARY_NAME),
                    vec![(place, exception.spot.clone())],
                    "frames",
                ));
            }
            if installed && asks || calls {
                return Some(vote(
                    "frame.between_libraries",
                    format!(
                        "an installed library uses a part of another that does not exist ({})",
                        frame.path
                    ),
                    (Class::SoftwarePlatform, BETWEEN_LIBRARIES),
                    vec![(place, exception.spot.clone())],
                    "frames",
                ));
            }
        }
    }
    None
}

/// An assertion of an installed library without words for its caller: no message, or a dump of the library's own state.
pub(super) fn own_state(evidence: &Evidence) -> Option<Vote> {
    evidence.findings.iter().enumerate().find_map(|(place, findings)| {
        let asserted = findings.exceptions.iter().find(|of| {
            let installed = of.frame.as_ref().is_some_and(|frame| frame.path.contains("-packages/"));
            let (_, message) = of.spot.text.split_once("AssertionError").unwrap_or_default();
            let dumps = message.trim_start_matches([':', ' ']).starts_with(['{', '[', '(', '<']);
            installed && of.name.ends_with("AssertionError") && dumps
        })?;
        Some(vote(
            "frame.own_state",
            "an installed library stopped at an assertion about its own state".to_owned(),
            (Class::SoftwarePlatform, OWN_STATE),
            vec![(place, asserted.spot.clone())],
            "frames",
        ))
    })
}

/// Where an installed library calls another in a way that it does not allow, the program did not make the call.
pub fn fold_calls_of_libraries(votes: &mut [Vote]) {
    let calls =
        votes.iter().filter(|vote| matches!(vote.id.as_str(), "frame.between_libraries" | "frame.own_state"));
    let lines: BTreeSet<(usize, u64)> = calls.flat_map(Vote::lines).collect();
    for vote in votes.iter_mut().filter(|vote| vote.class.domain() == FaultDomain::User) {
        if vote.lines().any(|line| lines.contains(&line)) {
            vote.weight = vote.weight.min(OF_ANY_KERNEL);
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
        let reported = |who: &str| {
            format!(
                "{who}ERROR 01-04 [core.py:844] torch.AcceleratorError: CUDA error: device-side assert triggered\n"
            )
        };
        assert_eq!(judged(&reported("(EngineCore_DP0 pid=43065) ")).class, Class::SoftwarePlatform);
        assert_eq!(judged(&reported("")).class, Class::UserCode);
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
