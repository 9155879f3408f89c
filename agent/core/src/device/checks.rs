//! The checks of one GPU's readings: what each reading says of each of them. Whether it counts is patience's to tell.

use super::faults;
use super::reading::{EccPlace, FabricInfo, GpuDetails, GpuReading, GpuTrouble, PcieLink, Read};
use super::readings::{POWER_BRAKE, Readings, Rules};
use super::watch::{Look, Problem};
use crate::health::{HealthState, RecommendedAction};
use crate::time::{Mono, Span};

use HealthState::{Degraded, Unhealthy, Unknown};
use RecommendedAction::{ContactSupport, RebootNode, ReplaceNode, ResetDevice};

/// The check that asks whether the GPU can be used at all.
pub(super) const TROUBLE: &str = "gpu_trouble";

type Checked = Vec<(&'static str, Look)>;

/// What a reading says, where it was read and where there is such a thing.
fn look<T>(read: &Read<T>, judge: impl FnOnce(&T) -> Option<Problem>) -> Look {
    match read {
        Read::Value(value) => Look::of(judge(value)),
        Read::NotOffered => Look::Well,
        Read::Failed(_) => Look::Unread,
    }
}

pub(super) fn trouble(reading: &GpuReading) -> Look {
    let Some(trouble) = &reading.trouble else { return Look::Well };
    let (state, action) = match trouble {
        GpuTrouble::Lost => (Unhealthy, RebootNode),
        GpuTrouble::ResetRequired => (Unhealthy, ResetDevice),
        GpuTrouble::NoPermission | GpuTrouble::Other(_) => (Unknown, RecommendedAction::None),
    };
    Look::Ill(Problem::new(state, trouble.words(), action))
}

/// What the driver says in so many words: it counts at the first reading.
pub(super) fn at_once(of: &mut Readings, at: Mono, reading: &GpuReading, rules: Rules<'_>) -> Checked {
    let limits = rules.limits;
    let mut checked = vec![
        ("ecc_uncorrected", uncorrected(reading)),
        (
            "row_remap_failed",
            look(&reading.remapped, |rows| {
                let words = "a bad row of memory could not be replaced: no spare one is left";
                rows.failed.then(|| Problem::new(Unhealthy, words, ReplaceNode))
            }),
        ),
        (
            "row_remap_pending",
            look(&reading.remapped, |rows| {
                let words = "a bad row of memory is replaced at the next reset";
                rows.pending.then(|| Problem::new(Degraded, words, ResetDevice))
            }),
        ),
        (
            "rows_remapped",
            look(&reading.remapped, |rows| {
                let (count, limit) = (rows.uncorrected, limits.remapped_rows);
                let words =
                    format!("{count} rows of memory were replaced after errors that could not be corrected");
                (count >= limit).then(|| {
                    Problem::new(Degraded, words, ContactSupport).by("NVML remapped rows", count, limit)
                })
            }),
        ),
        (
            "page_retirement_pending",
            look(&reading.pages_pending, |pending| {
                let words = "bad pages of memory are taken out of use at the next reset";
                pending.then(|| Problem::new(Degraded, words, ResetDevice))
            }),
        ),
        (
            "memory_unrepairable",
            look(&reading.unrepairable, |damaged| {
                damaged.then(|| Problem::new(Unhealthy, "its memory is damaged beyond repair", ReplaceNode))
            }),
        ),
        (
            "recovery_action",
            look(&reading.recovery_action, |number| {
                let number = u32::try_from(*number).ok().filter(|number| *number > 0)?;
                let (state, action, what) = faults::recovery(number);
                let words = format!("the driver says that it needs {what}");
                Some(Problem::new(state, words, action).by("NVML recovery action", number, 0))
            }),
        ),
    ];
    checked.push((
        "mig",
        look(&reading.mig, |on| {
            let wanted = rules.expected.mig.as_str();
            let is = if *on { "on" } else { "off" };
            let words = format!("MIG is {is}, not {wanted}");
            (!wanted.is_empty() && wanted != is).then(|| {
                Problem::new(Degraded, words, RecommendedAction::None).by("NVML MIG mode", is, wanted)
            })
        }),
    ));
    checked.push(("slowed_down", slowed(of.slow.count(), "heat or power", reading, rules)));
    checked.push((POWER_BRAKE, slowed(of.brake.count(), "the power supply's brake", reading, rules)));
    if let Some(details) = &reading.details {
        checked.extend(from_details(details, rules));
    }
    checked.push(("ecc_corrected", corrected(of, at, reading, rules)));
    checked.push(("pcie_replays", replays(of, at, reading, rules)));
    checked
}

/// What is beyond a limit: it counts when it stays so.
pub(super) fn patient(of: &Readings, at: Mono, reading: &GpuReading, rules: Rules<'_>) -> Checked {
    let details = of.details.as_ref();
    let hot = |what: &str, now: &Read<u32>, hottest: Option<&Read<u32>>| {
        let limit = hottest.and_then(|limit| limit.value().copied());
        look(now, |degrees| {
            let limit = limit.filter(|limit| degrees > limit)?;
            let words = format!("{what} at {degrees} °C, above the {limit} °C that it may have");
            let limit = format!("{limit} °C");
            Some(Problem::new(Degraded, words, ContactSupport).by(
                &format!("NVML {what}"),
                format!("{degrees} °C"),
                limit,
            ))
        })
    };
    vec![
        ("too_hot", hot("temperature", &reading.temperature, details.map(|of| &of.hottest))),
        (
            "memory_too_hot",
            hot("memory temperature", &reading.memory_temperature, details.map(|of| &of.memory_hottest)),
        ),
        ("no_margin", margin(details, reading, rules)),
        ("pcie_link", pcie(reading, rules)),
        ("fabric", fabric(at, reading, rules)),
    ]
}

fn uncorrected(reading: &GpuReading) -> Look {
    let total = look(&reading.ecc_volatile, |errors| {
        (*errors > 0).then(|| memory_errors(*errors).by("NVML uncorrected ECC errors, volatile", errors, 0))
    });
    // Some drivers count by place only.
    match (&reading.ecc_volatile, &reading.details) {
        (Read::NotOffered, Some(details)) => {
            let of_now = details.ecc.iter().filter(|of| !of.corrected && !of.lifetime);
            let errors: u64 = of_now.map(|of| of.count).sum();
            Look::of((errors > 0).then(|| memory_errors(errors)))
        }
        (Read::NotOffered, None) => Look::Unread,
        _ => total,
    }
}

fn memory_errors(count: u64) -> Problem {
    let words = format!("{count} memory errors that could not be corrected since its last reset");
    Problem::new(Unhealthy, words, ResetDevice)
}

fn slowed(minutes: u32, by: &str, reading: &GpuReading, rules: Rules<'_>) -> Look {
    if reading.clock_reasons == Read::NotOffered && reading.slowdown == Read::NotOffered {
        return Look::Well;
    }
    let limit = rules.limits.slow_minutes;
    let words = format!("slowed down by {by} in {minutes} of the last 10 minutes");
    let reading = format!("{minutes} of 10 minutes");
    let limit_words = format!("{limit} of 10 minutes");
    let problem =
        || Problem::new(Degraded, words, ContactSupport).by("NVML clock event reasons", reading, limit_words);
    Look::of((minutes >= limit).then(problem))
}

/// Corrected errors by their rate: a GPU may have many over its life.
fn corrected(of: &mut Readings, at: Mono, reading: &GpuReading, rules: Rules<'_>) -> Look {
    let window = Span::seconds(3600);
    let Some(count) = reading.ecc_corrected.value() else { return unread(&reading.ecc_corrected) };
    let grown = of.corrected.step(at, *count, window);
    let limit = rules.limits.corrected_errors_per_hour;
    let ill = grown.by >= limit && grown.goes_on();
    let words = format!("{} memory errors were corrected within {}", grown.by, grown.within);
    Look::of(ill.then(|| {
        Problem::new(Degraded, words, RecommendedAction::None).gained(
            "NVML corrected ECC errors, volatile",
            &grown,
            format!("{limit} in an hour"),
        )
    }))
}

fn unread<T>(read: &Read<T>) -> Look {
    if matches!(read, Read::NotOffered) { Look::Well } else { Look::Unread }
}

/// Packets sent again per minute and lane that are normal for a PCIe generation, from the first on (DCGM's table).
const REPLAYS_PER_LANE: [f64; 6] = [0.15, 0.3, 0.48, 0.96, 1.92, 3.84];

fn replays(of: &mut Readings, at: Mono, reading: &GpuReading, rules: Rules<'_>) -> Look {
    let Some(count) = reading.pcie_replays.value() else { return unread(&reading.pcie_replays) };
    let grown = of.replays.step(at, (*count).into(), Span::seconds(300));
    // At rest the link is slower than it is made for; its limit is that of the work it does.
    let Some(link) = reading.pcie_max.value().or(reading.pcie.value()) else { return Look::Unread };
    let place = (link.generation.max(1) as usize - 1).min(REPLAYS_PER_LANE.len() - 1);
    let limit = (REPLAYS_PER_LANE[place] * f64::from(link.width)).ceil() * rules.limits.pcie_replays;
    let ill = grown.per_minute() > limit && grown.goes_on();
    let words = format!("{:.0} PCIe packets a minute had to be sent again", grown.per_minute());
    Look::of(ill.then(|| {
        Problem::new(Degraded, words, ContactSupport).gained(
            "NVML PCIe replays",
            &grown,
            format!("{limit:.0} a minute"),
        )
    }))
}

/// The link is held against its best only while it has work: at rest it rests.
fn pcie(reading: &GpuReading, rules: Rules<'_>) -> Look {
    let (Some(now), Some(best)) = (reading.pcie.value(), reading.pcie_max.value()) else {
        return unread(&reading.pcie);
    };
    let busy =
        reading.utilization.value().is_some_and(|percent| f64::from(*percent) >= rules.limits.pcie_load.0);
    if !busy {
        return Look::Unread;
    }
    // A library that tells 0 does not know.
    let slow =
        now.generation > 0 && now.generation < best.generation || now.width > 0 && now.width < best.width;
    let link = |link: &PcieLink| format!("generation {} with {} lanes", link.generation, link.width);
    let words = format!("under load its PCIe link has {} of {}", link(now), link(best));
    Look::of(
        slow.then(|| {
            Problem::new(Degraded, words, ContactSupport).by("NVML PCIe link", link(now), link(best))
        }),
    )
}

fn margin(details: Option<&GpuDetails>, reading: &GpuReading, rules: Rules<'_>) -> Look {
    if !rules.limits.judge_margin {
        return Look::Well;
    }
    let least = details.and_then(|of| of.slowdown_margin.value().copied());
    look(&reading.margin, |margin| {
        let least = least.filter(|least| margin < least)?;
        let words = format!("{margin} degrees of margin are left; at {least} clocks are held down");
        let problem = Problem::new(Degraded, words, ContactSupport);
        Some(problem.by("NVML temperature margin", margin, least))
    })
}

/// Health of the fabric by the driver's bits: the place of two bits in which 1 is bad, the word, how bad.
const FABRIC_MASK: [(u32, &str, HealthState); 4] = [
    (0, "its bandwidth is degraded", Degraded),
    (2, "routes are being recovered", Degraded),
    (4, "its routes are not healthy", Unhealthy),
    (6, "access timed out and is being recovered", Degraded),
];

/// Four bits of the mask from here tell of a wrong configuration: 1 is none, more is one.
const FABRIC_CONFIGURATION: u32 = 8;

fn fabric(at: Mono, reading: &GpuReading, rules: Rules<'_>) -> Look {
    look(&reading.fabric, |info| match info.state {
        // Right after the boot this takes its time; a GPU alone has no fabric to be part of.
        1 | 2 if at.0 < rules.limits.fabric_grace.0.0 || rules.gpus < 2 => None,
        1 | 2 => {
            let stage = if info.state == 1 { "has not begun" } else { "does not come to an end" };
            let words = format!("its registration with the fabric {stage} (is the fabric manager running?)");
            Some(Problem::new(Degraded, words, RebootNode).by("NVML fabric state", info.state, 3))
        }
        3 => fabric_health(info),
        _ => None,
    })
}

fn fabric_health(info: &FabricInfo) -> Option<Problem> {
    let mut worst: Option<HealthState> = None;
    let mut words = Vec::new();
    let mut bad = |state, what: String| {
        worst = worst.max(Some(state));
        words.push(what);
    };
    if info.status != 0 {
        bad(Unhealthy, format!("its registration with the fabric failed (code {})", info.status));
    }
    match info.health_summary {
        2 => bad(Unhealthy, "the fabric is not healthy".to_owned()),
        3 => bad(Degraded, "the fabric has limited capacity".to_owned()),
        _ => {}
    }
    for (shift, what, state) in FABRIC_MASK {
        if (info.health_mask >> shift) & 0b11 == 1 {
            bad(state, what.to_owned());
        }
    }
    if (info.health_mask >> FABRIC_CONFIGURATION) & 0xf > 1 {
        bad(Unhealthy, "the fabric is configured wrongly".to_owned());
    }
    let action = if worst? == Unhealthy { ResetDevice } else { RecommendedAction::None };
    let reading =
        format!("status {}, health {:#x}, summary {}", info.status, info.health_mask, info.health_summary);
    Some(Problem::new(worst?, words.join(", "), action).by("NVML fabric", reading, ""))
}

/// What is read seldom, and counts at once.
fn from_details(details: &GpuDetails, rules: Rules<'_>) -> Checked {
    let (limits, expected) = (rules.limits, rules.expected);
    let sram = look(&details.sram, |sram| {
        let words = "the memory on the chip has had so many errors that the board should be replaced";
        sram.threshold_exceeded.then(|| {
            Problem::new(Unhealthy, words, ReplaceNode).by(
                "NVML SRAM ECC errors, lifetime",
                sram.uncorrected_lifetime,
                "threshold of the driver",
            )
        })
    });
    let on_chip = look(&details.sram, |sram| {
        let by_place =
            details.ecc.iter().filter(|of| of.place == EccPlace::Sram && !of.corrected && !of.lifetime);
        let errors = by_place.map(|of| of.count).max().unwrap_or(0).max(sram.uncorrected);
        let words =
            format!("{errors} errors of the memory on the chip could not be corrected since its last reset");
        (errors > 0)
            .then(|| Problem::new(Unhealthy, words, ResetDevice).by("NVML SRAM ECC errors", errors, 0))
    });
    let pages = look(&details.pages_retired, |(often, once)| {
        let count = often.saturating_add(*once);
        let words = format!("{count} pages of memory were taken out of use");
        (count >= limits.pages_retired).then(|| {
            Problem::new(Degraded, words, ReplaceNode).by("NVML retired pages", count, limits.pages_retired)
        })
    });
    let inforom = look(&details.inforom_valid, |valid| {
        let words = "the board's memory of its own configuration (InfoROM) is damaged";
        (!valid).then(|| Problem::new(Degraded, words, ContactSupport))
    });
    let vbios = look(&details.vbios, |version| {
        let wanted = &expected.vbios;
        let words = format!("its VBIOS is {version}, not {wanted}");
        (!wanted.is_empty() && wanted != version)
            .then(|| Problem::new(Degraded, words, RecommendedAction::None).by("NVML VBIOS", version, wanted))
    });
    let persistence = look(&details.persistence, |on| {
        let words = "persistence mode is off (nvidia-smi -pm 1)";
        (expected.persistence && !on).then(|| Problem::new(Degraded, words, RecommendedAction::None))
    });
    vec![
        ("sram_threshold", sram),
        ("sram_uncorrected", on_chip),
        ("pages_retired", pages),
        ("inforom", inforom),
        ("vbios", vbios),
        ("persistence", persistence),
    ]
}
