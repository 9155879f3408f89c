//! What several lines tell together that none of them tells alone: ranks that wait in different collectives, ranks
//! that never came to one, the order of deaths in the launcher's table, the library in whose frames a GPU fault shows.

use std::collections::BTreeMap;

use super::Evidence;
use super::catalog::{Catalog, Determinism, Role};
use super::class::Class;
use super::scan::{Findings, Sighting, Spot};
use super::vote::Vote;

/// Log-odds of ranks that stand in different collectives of one group: the program's branches differ.
const DISAGREE: f64 = 3.4;
/// The same where the lines do not tell that it is the same group.
const DISAGREE_PERHAPS: f64 = 2.2;
/// Log-odds of a fault that a program's kernel causes, shown in the frames of a library of kernels.
const LIBRARY_KERNEL: f64 = 1.4;

/// Log-odds of one library that asks another for what that one does not have: versions that do not fit together.
const BETWEEN_LIBRARIES: f64 = 2.4;

/// Log-odds of an installed library that uses a name which it does not define: no program can mend that.
const LIBRARY_NAME: f64 = 6.0;

/// Libraries that bring GPU kernels of their own.
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
/// Signatures of faults that a kernel causes by itself.
const KERNEL_FAULTS: [&str; 5] = [
    "cuda.illegal_access",
    "cuda.misaligned",
    "cuda.launch_failure",
    "cuda.illegal_instruction",
    "amd.page_fault",
];
/// What processes of an inference engine write before their lines: no code of the training program runs in them.
const ENGINES: [&str; 4] = ["(EngineCore", "[EngineCore", "(VllmWorker", "(Worker_TP"];
/// Log-odds of a GPU fault in such a process.
const IN_ENGINE: f64 = 6.0;
/// Signatures that read "killed by SIGKILL" in a launcher's table.
const KILLED: [&str; 4] = ["exit.minus9", "exit.any_kill", "torch.sigkill", "exit.minus15"];

/// Causes that are consequences where the same source tells of one of these.
const FOLLOWS: [(&str, &[&str]); 6] = [
    ("nccl.internal_error", &["nccl.closed_by_peer", "nccl.remote_error", "nccl.socket_lost"]),
    ("crash.segv", &["exit.134", "amd.gpu_hang", "intel.gpu_hang"]),
    // A program that hangs in a collective had what it needed: what was not found is a side matter, a monitor.
    ("conda.env", &["nccl.watchdog_timeout"]),
    // A host that never came up is reported as one that failed.
    ("host.node_failure", &["slurm.boot"]),
    // A GPU whose program went out of bounds is reset, and said to hang.
    ("amd.gpu_hang", &["amd.page_fault"]),
    // What a rank finds when it tries again after another fault.
    ("python.file_exists", &["storage.quota", "storage.enospc"]),
];

/// A collective in which a rank waited when its watchdog barked.
#[derive(Clone, Debug, PartialEq)]
struct Waiting {
    rank: u32,
    group: String,
    sequence: u64,
    operation: String,
    elements: String,
    place: usize,
    spot: Spot,
}

/// Votes from several lines together.
pub fn votes(catalog: &Catalog, evidence: &Evidence) -> Vec<Vote> {
    let waiting = waiting(catalog, evidence);
    let kernel = library_kernel(catalog, evidence);
    let engine = in_engine(catalog, evidence);
    disagreement(&waiting)
        .into_iter()
        .chain(kernel)
        .chain(engine)
        .chain(between_libraries(evidence))
        .collect()
}

/// The rank that all others wait for: the only one that is behind in a group, or that has nothing under way while
/// the others have. None where the lines do not tell.
pub fn laggard(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, Spot)> {
    of_status(catalog, evidence).or_else(|| of_sequences(&waiting(catalog, evidence)))
}

/// Ranks of one group that wait in one place of its sequence for different things.
fn disagreement(waiting: &[Waiting]) -> Option<Vote> {
    let mut seen: BTreeMap<(&str, u64), &Waiting> = BTreeMap::new();
    for one in waiting {
        let key = (one.group.as_str(), one.sequence);
        let Some(other) = seen.get(&key) else {
            seen.insert(key, one);
            continue;
        };
        let differ = (&other.operation, &other.elements) != (&one.operation, &one.elements);
        if other.rank == one.rank || !differ || is_point_to_point(one) || is_point_to_point(other) {
            continue;
        }
        let told = |of: &Waiting| format!("rank {} in {} of {} elements", of.rank, of.operation, of.elements);
        let default = matches!(one.group.as_str(), "" | "0");
        return Some(vote(
            "nccl.collectives_differ",
            format!(
                "at collective {} {}, {}: their programs took different ways",
                one.sequence,
                told(other),
                told(one)
            ),
            (Class::UserCode, if default { DISAGREE } else { DISAGREE_PERHAPS }),
            vec![(other.place, other.spot.clone()), (one.place, one.spot.clone())],
            "nccl",
        ));
    }
    None
}

fn is_point_to_point(one: &Waiting) -> bool {
    matches!(
        one.operation.as_str(),
        "SEND" | "RECV" | "COALESCED" | "SENDRECV" | "ALLTOALL" | "ALLTOALL_BASE"
    )
}

/// Where one rank alone is behind the others of its group.
fn of_sequences(waiting: &[Waiting]) -> Option<(u32, usize, Spot)> {
    let mut first: BTreeMap<(&str, u32), &Waiting> = BTreeMap::new();
    for one in waiting {
        first.entry((one.group.as_str(), one.rank)).or_insert(one);
    }
    let group = first.keys().map(|(group, _)| *group).next()?;
    let mut ranks: Vec<&Waiting> = first.values().filter(|one| one.group == group).copied().collect();
    ranks.sort_by_key(|one| one.sequence);
    match ranks.as_slice() {
        [least, next, _, ..] if least.sequence < next.sequence => {
            Some((least.rank, least.place, least.spot.clone()))
        }
        _ => None,
    }
}

/// `last enqueued work: 7220, last completed work: 7218`: the rank that has completed all that it enqueued, while
/// others have work under way, never came to the collective.
fn of_status(catalog: &Catalog, evidence: &Evidence) -> Option<(u32, usize, Spot)> {
    let mut idle: BTreeMap<u32, (usize, Spot)> = BTreeMap::new();
    let mut busy = 0;
    for (place, spot) in spots_of(catalog, evidence, "nccl.last_enqueued") {
        let (Some(rank), Some(enqueued), Some(completed)) = (
            spot.rank,
            number_after(
                &spot.text,
                &["last enqueued work: ", "Last enqueued NCCL work: ", "last enqueued NCCL work: "],
            ),
            number_after(
                &spot.text,
                &["last completed work: ", "last completed NCCL work: ", "Last completed NCCL work: "],
            ),
        ) else {
            continue;
        };
        if enqueued == completed {
            idle.entry(rank).or_insert((place, spot.clone()));
        } else {
            busy += 1;
        }
    }
    let alone = idle.len() == 1 && busy > 0;
    idle.into_iter().next().filter(|_| alone).map(|(rank, (place, spot))| (rank, place, spot))
}

fn waiting(catalog: &Catalog, evidence: &Evidence) -> Vec<Waiting> {
    spots_of(catalog, evidence, "nccl.watchdog_timeout")
        .filter_map(|(place, spot)| {
            let work = spot.text.split_once("WorkNCCL(")?.1;
            Some(Waiting {
                rank: spot.rank?,
                group: group(&spot.text),
                sequence: number_after(work, &["SeqNum="])?,
                operation: field(work, "OpType=")?.to_owned(),
                elements: field(work, "NumelIn=")?.to_owned(),
                place,
                spot: spot.clone(),
            })
        })
        .collect()
}

/// The process group that a line names: `[PG ID 2 PG GUID 7(tp) Rank 3]`, `[PG 2 Rank 3]`.
fn group(text: &str) -> String {
    let named = ["PG GUID ", "[PG ID ", "[PG "].iter().find_map(|mark| text.split_once(mark));
    named.map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect()).unwrap_or_default()
}

fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let rest = text.split_once(name)?.1;
    rest.split([',', ')']).next().filter(|value| !value.is_empty())
}

pub(super) fn number_after(text: &str, names: &[&str]) -> Option<u64> {
    let rest = names.iter().find_map(|name| text.split_once(name))?.1;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    rest[..digits].parse().ok()
}

/// A fault of a kernel whose innermost frame is a library's that brings kernels of its own.
fn library_kernel(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
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

/// A fault that a program's kernel causes, told by a process of an inference engine.
fn in_engine(catalog: &Catalog, evidence: &Evidence) -> Option<Vote> {
    let faults = KERNEL_FAULTS.into_iter().chain(["cuda.device_assert"]);
    let mut spots = faults.flat_map(|fault| spots_of(catalog, evidence, fault));
    let (place, spot) = spots.find(|(_, spot)| ENGINES.iter().any(|engine| spot.text.contains(engine)))?;
    Some(vote(
        "frame.engine",
        "the fault shows in a process of the inference engine, which runs no code of the program".to_owned(),
        (Class::SoftwarePlatform, IN_ENGINE),
        vec![(place, spot.clone())],
        "frames",
    ))
}

/// An attribute, an argument or a name that is not there, asked for by an installed library: had the program asked, the
/// innermost frame would be its own.
fn between_libraries(evidence: &Evidence) -> Option<Vote> {
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
            if installed && asks {
                return Some(vote(
                    "frame.between_libraries",
                    format!("an installed library asks another for what it does not have ({})", frame.path),
                    (Class::SoftwarePlatform, BETWEEN_LIBRARIES),
                    vec![(place, exception.spot.clone())],
                    "frames",
                ));
            }
        }
    }
    None
}

/// In a launcher's table with another first failure, ranks that were killed were stopped by the launcher: they tell
/// nothing of the cause.
pub fn demote_stopped_ranks(catalog: &Catalog, evidence: &Evidence, votes: &mut [Vote]) {
    if !evidence.findings.iter().any(|findings| first_failure_was_no_kill(catalog, findings)) {
        return;
    }
    for vote in votes.iter_mut().filter(|vote| KILLED.contains(&vote.id.as_str())) {
        vote.role = Role::Secondary;
        vote.class = Class::Unknown;
        vote.weight = vote.weight.min(0.8);
        vote.also.clear();
    }
}

/// A library's "internal error" whose last error is a lost connection tells of a peer that went away.
pub fn demote_followers(votes: &mut [Vote]) {
    for (cause, signs) in FOLLOWS {
        if !votes.iter().any(|vote| signs.contains(&vote.id.as_str())) {
            continue;
        }
        for vote in votes.iter_mut().filter(|vote| vote.id == cause) {
            vote.role = Role::Secondary;
            vote.class = Class::Unknown;
            vote.weight = vote.weight.min(1.0);
            vote.also.clear();
        }
    }
}

fn first_failure_was_no_kill(catalog: &Catalog, findings: &Findings) -> bool {
    let Some(root) = spots_in(catalog, findings, "torch.first_failure").map(|spot| spot.line).min() else {
        return false;
    };
    let first = spots_in(catalog, findings, "torch.table_exit")
        .filter(|spot| spot.line > root)
        .min_by_key(|spot| spot.line);
    let Some((_, code)) = first.and_then(|spot| spot.text.split_once(':')) else { return false };
    let code = code.split_whitespace().next().unwrap_or_default();
    !code.is_empty() && !matches!(code, "-9" | "-15" | "137" | "143")
}

fn is(catalog: &Catalog, sighting: &Sighting, id: &str) -> bool {
    catalog.signatures().get(sighting.signature).is_some_and(|of| of.id == id)
}

pub(super) fn spots_of<'e>(
    catalog: &'e Catalog,
    evidence: &'e Evidence,
    id: &'static str,
) -> impl Iterator<Item = (usize, &'e Spot)> {
    let sources = evidence.findings.iter().enumerate();
    sources.flat_map(move |(place, findings)| spots_in(catalog, findings, id).map(move |spot| (place, spot)))
}

fn spots_in<'e>(
    catalog: &'e Catalog,
    findings: &'e Findings,
    id: &'static str,
) -> impl Iterator<Item = &'e Spot> {
    findings.sightings.iter().filter(move |of| is(catalog, of, id)).flat_map(|of| of.spots.iter())
}

fn vote(
    id: &str,
    meaning: String,
    (class, weight): (Class, f64),
    spots: Vec<(usize, Spot)>,
    family: &str,
) -> Vote {
    Vote {
        family: family.to_owned(),
        id: id.to_owned(),
        meaning,
        role: Role::Primary,
        class,
        weight,
        also: Vec::new(),
        determinism: Determinism::Either,
        restart: None,
        domain: None,
        reporter: false,
        hint: false,
        spots,
        count: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::scan::{Kind, Scan};
    use crate::attribute::{Attribution, attribute};

    fn judged(log: &str) -> Attribution {
        let catalog = Catalog::built_in().expect("the catalogue is compiled in");
        let findings = vec![Scan::of_text(catalog, "log", None, Kind::Log, log.as_bytes())];
        attribute(catalog, &Evidence { findings, ..Evidence::default() })
    }

    fn timeout(rank: u32, sequence: u64, operation: &str, elements: u64) -> String {
        format!(
            "[rank{rank}]: [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, \
             OpType={operation}, NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000) ran for 600063 milliseconds\n"
        )
    }

    #[test]
    fn ranks_in_different_collectives_are_the_programs_fault() {
        let log = timeout(0, 5769, "ALLREDUCE", 100) + &timeout(1, 5769, "ALLREDUCE", 2_958_336);
        assert_eq!(judged(&log).class, Class::UserCode);
        let same = timeout(0, 5769, "ALLREDUCE", 2_958_336) + &timeout(1, 5769, "ALLREDUCE", 2_958_336);
        assert_eq!(judged(&same).class, Class::Unknown);
        let pipeline = timeout(0, 5769, "SEND", 100) + &timeout(1, 5769, "RECV", 200);
        assert_eq!(judged(&pipeline).class, Class::Unknown);
    }

    #[test]
    fn the_rank_that_is_behind_is_the_one_that_all_wait_for() {
        let log = timeout(0, 900, "ALLREDUCE", 4096)
            + &timeout(1, 899, "ALLREDUCE", 4096)
            + &timeout(2, 900, "ALLREDUCE", 4096);
        assert_eq!(judged(&log).root.rank, Some(1));
        let two = timeout(0, 900, "ALLREDUCE", 4096) + &timeout(1, 899, "ALLREDUCE", 4096);
        assert_eq!(judged(&two).root.rank, None, "of two nobody can tell who waits for whom");
    }

    #[test]
    fn the_rank_with_nothing_under_way_never_came() {
        let status = |rank, enqueued, completed| {
            format!(
                "[rank{rank}]: [Rank {rank}] failure detected: last enqueued work: {enqueued}, last completed work: {completed}\n"
            )
        };
        let log = status(0, 52, 51) + &status(1, 51, 51) + &status(2, 52, 51);
        assert_eq!(judged(&log).root.rank, Some(1));
        let all_busy = status(0, 52, 51) + &status(1, 52, 51);
        assert_eq!(judged(&all_busy).root.rank, None);
    }

    #[test]
    fn ranks_that_the_launcher_killed_tell_nothing_of_the_cause() {
        let table = |first: &str| {
            format!(
                "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 11)\n  traceback : Signal 9 (SIGKILL) \
                 received by PID 11\nRoot Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : {first} (pid: 12)\n"
            )
        };
        assert_eq!(judged(&table("1")).class, Class::Unknown);
        assert_eq!(judged(&table("-9")).class, Class::HostResource);
    }

    #[test]
    fn a_fault_in_a_library_of_kernels_is_the_platforms() {
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
        let told = |who: &str| {
            format!(
                "{who}ERROR 01-04 [core.py:844] torch.AcceleratorError: CUDA error: device-side assert triggered\n"
            )
        };
        assert_eq!(judged(&told("(EngineCore_DP0 pid=43065) ")).class, Class::SoftwarePlatform);
        assert_eq!(judged(&told("")).class, Class::UserCode);
    }

    #[test]
    fn a_gpu_that_is_reset_after_a_page_fault_is_not_broken() {
        let hang = "HW Exception by GPU node-1 (Agent handle: 0x56) reason :GPU Hang\n";
        let fault = "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f52c3f5f000. Reason: Page not present or supervisor privilege.\n";
        assert_eq!(judged(hang).class, Class::HardwareGpu);
        assert_eq!(judged(&format!("{fault}{hang}")).class, Class::SoftwarePlatform);
    }

    #[test]
    fn a_host_that_never_came_up_is_not_one_that_failed() {
        let failed = "srun: error: Node failure on node17\n";
        let boot = "srun: error: Something is wrong with the boot of the nodes.\n";
        assert_eq!(judged(failed).class, Class::HardwareHost);
        assert_eq!(judged(&format!("{failed}{boot}")).class, Class::SoftwarePlatform);
    }

    #[test]
    fn libraries_that_do_not_fit_together_are_the_platforms() {
        let raised = |path: &str, on: &str| {
            format!(
                "  File \"{path}\", line 9, in forward\n    return x.y\nAttributeError: '{on}' object has no attribute 'y'\n"
            )
        };
        let installed = "/v/lib/python3.12/site-packages/vllm/llm.py";
        assert_eq!(judged(&raised(installed, "LLMEngine")).class, Class::SoftwarePlatform);
        assert_eq!(judged(&raised(installed, "NoneType")).domain, crate::verdict::FaultDomain::User);
        assert_eq!(judged(&raised("/home/a/train.py", "Model")).class, Class::UserCode);
    }
}
