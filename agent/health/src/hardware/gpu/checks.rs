//! The checks of one GPU's readings. Each returns one [`CheckResult`]; the watch decides whether it counts.

use super::details::{EccPlace, GpuDetails};
use super::fabric::fabric;
use super::faults;
use super::limits::{BUSY_PERCENT, COOLER_BY, taken_back};
use super::reading::{GpuReading, GpuTrouble, PcieLink, Sampled};
use super::readings::Readings;
use super::rules::{POWER_BRAKE, Rules, SAMPLED, check_sample};
use super::watch::{CheckResult, Problem};
use mainstay_model::health::{HealthState, RecommendedAction};
use mainstay_model::time::{Mono, Span};

use HealthState::{Degraded, Unhealthy, Unknown};
use RecommendedAction::{ContactSupport, RebootNode, ReplaceNode, ResetDevice};

/// The check that asks whether the GPU can be used at all.
pub(super) const TROUBLE_CHECK: &str = "gpu_trouble";

type Checked = Vec<(&'static str, CheckResult)>;

/// What is wrong with a GPU as a whole. What the driver reports counts at once. A GPU that cannot be opened, or a call
/// that does not return, is unknown at first.
pub(super) fn device_trouble(at: Mono, reading: &GpuReading, rules: Rules<'_>, refused: u32) -> CheckResult {
    let Some(trouble) = &reading.trouble else { return CheckResult::Healthy };
    let (state, action) = match trouble {
        GpuTrouble::Lost | GpuTrouble::NoInterrupts => (Unhealthy, RebootNode),
        GpuTrouble::ResetRequired => (Unhealthy, ResetDevice),
        GpuTrouble::NoPower => (Unhealthy, ContactSupport),
        GpuTrouble::Unopened(_) if refused >= rules.limits.worsen_after => (Unhealthy, RebootNode),
        GpuTrouble::Hangs(since) if at.since(*since) >= rules.limits.hung_after.0 => (Unhealthy, RebootNode),
        GpuTrouble::Unopened(_) | GpuTrouble::Hangs(_) | GpuTrouble::NoPermission | GpuTrouble::Other(_) => {
            (Unknown, RecommendedAction::None)
        }
    };
    let reason = match trouble {
        GpuTrouble::Hangs(since) => format!("{} since {}", trouble.describe(), at.since(*since)),
        _ => trouble.describe(),
    };
    CheckResult::Faulty(
        Problem::new(state, reason.clone(), action).by("NVML", reason, "").was(Some("answers")),
    )
}

fn yes_or_no(yes: bool) -> &'static str {
    if yes { "yes" } else { "no" }
}

/// What the driver reports explicitly: it counts at the first reading.
pub(super) fn at_once(readings: &mut Readings, at: Mono, reading: &GpuReading, rules: Rules<'_>) -> Checked {
    let limits = rules.limits;
    let last = readings.last.clone().unwrap_or_default();
    let rows_before = last.remapped.value().copied();
    let mut checked = vec![
        ("ecc_uncorrected", uncorrected(readings, reading, &last)),
        (
            "row_remap_failed",
            check_sample(&reading.remapped, |rows| {
                let reason = "a bad row of memory could not be replaced: no spare one is left";
                rows.failed.then(|| {
                    Problem::new(Unhealthy, reason, ReplaceNode)
                        .by("NVML row remapping failed", "yes", "no")
                        .was(rows_before.map(|before| yes_or_no(before.failed)))
                })
            }),
        ),
        (
            "row_remap_pending",
            check_sample(&reading.remapped, |rows| {
                let reason = "a bad row of memory is replaced at the next reset";
                rows.pending.then(|| {
                    Problem::new(Degraded, reason, ResetDevice)
                        .by("NVML row remapping pending", "yes", "no")
                        .was(rows_before.map(|before| yes_or_no(before.pending)))
                })
            }),
        ),
        (
            "rows_remapped",
            check_sample(&reading.remapped, |rows| {
                let (count, limit) = (rows.uncorrected, limits.remapped_rows);
                let reason =
                    format!("{count} rows of memory were replaced after errors that could not be corrected");
                (count >= limit).then(|| {
                    Problem::new(Degraded, reason, ContactSupport)
                        .by("NVML rows remapped after uncorrectable errors", count, limit)
                        .was(rows_before.map(|before| before.uncorrected))
                })
            }),
        ),
        (
            "page_retirement_pending",
            check_sample(&reading.pages_pending, |pending| {
                let reason = "bad pages of memory are taken out of use at the next reset";
                pending.then(|| {
                    Problem::new(Degraded, reason, ResetDevice)
                        .by("NVML page retirement pending", "yes", "no")
                        .was(last.pages_pending.value().map(|before| yes_or_no(*before)))
                })
            }),
        ),
        (
            "memory_unrepairable",
            check_sample(&reading.unrepairable, |damaged| {
                damaged.then(|| {
                    Problem::new(Unhealthy, "its memory is damaged beyond repair", ReplaceNode)
                        .by("NVML unrepairable memory", "yes", "no")
                        .was(last.unrepairable.value().map(|before| yes_or_no(*before)))
                })
            }),
        ),
        (
            "recovery_action",
            check_sample(&reading.recovery_action, |number| {
                let number = u32::try_from(*number).ok().filter(|number| *number > 0)?;
                let (state, action, what) = faults::recovery(number);
                let reason = format!("the driver says that it needs {what}");
                let problem = Problem::new(state, reason, action).by("NVML recovery action", number, 0);
                Some(problem.was(last.recovery_action.value()))
            }),
        ),
    ];
    checked.push((
        "mig",
        check_sample(&reading.mig, |on| {
            let wanted = rules.expected.mig.as_str();
            let is = if *on { "on" } else { "off" };
            let reason = format!("MIG is {is}, not {wanted}");
            (!wanted.is_empty() && wanted != is).then(|| {
                Problem::new(Degraded, reason, RecommendedAction::None).by("NVML MIG mode", is, wanted)
            })
        }),
    ));
    checked.push(("slowed_down", slowed(readings.slow.count(), "heat or power", reading, rules)));
    checked.push((POWER_BRAKE, slowed(readings.brake.count(), "the power supply's brake", reading, rules)));
    if let Some(details) = &reading.details {
        let before = readings.details_before.clone().unwrap_or_default();
        checked.extend(from_details(details, &before, rules));
    }
    checked.push(("ecc_corrected", corrected(readings, at, reading, rules)));
    checked.push(("pcie_replays", replays(readings, at, reading, rules)));
    checked
}

/// Readings beyond a limit: they count after several readings in a row.
pub(super) fn patient(readings: &Readings, at: Mono, reading: &GpuReading, rules: Rules<'_>) -> Checked {
    let details = readings.details.as_ref();
    let last = readings.last.clone().unwrap_or_default();
    let hot = |what: &str, now: &Sampled<u32>, before: &Sampled<u32>, hottest: Option<&Sampled<u32>>| {
        let before = before.value().map(|degrees| format!("{degrees} °C"));
        let limit = hottest.and_then(|limit| limit.value().copied());
        let near = |degrees: &u32| limit.is_some_and(|limit| degrees.saturating_add(COOLER_BY) > limit);
        let near = now.value().is_some_and(near);
        let judged = check_sample(now, |degrees| {
            let limit = limit.filter(|limit| degrees > limit)?;
            let reason = format!("{what} at {degrees} °C, above the {limit} °C that it may have");
            let limit = format!("{limit} °C");
            let problem = Problem::new(Degraded, reason, ContactSupport);
            Some(problem.by(&format!("NVML {what}"), format!("{degrees} °C"), limit).was(before))
        });
        judged.unless_near(near)
    };
    // Boards without this limit report the temperature at which clocks are slowed down.
    let hottest =
        details.map(
            |details| if details.hottest.value().is_some() { &details.hottest } else { &details.slowdown_at },
        );
    let memory_hottest = details.map(|details| &details.memory_hottest);
    vec![
        ("too_hot", hot("temperature", &reading.temperature, &last.temperature, hottest)),
        (
            "memory_too_hot",
            hot("memory temperature", &reading.memory_temperature, &last.memory_temperature, memory_hottest),
        ),
        ("no_margin", margin(details, reading, rules)),
        ("pcie_link", pcie(reading, &last)),
        ("fabric", fabric(at, reading, &last, rules)),
        ("power_unreadable", unreadable("its power", reading, &reading.power, ContactSupport)),
        (
            "processes_unreadable",
            unreadable("who works on it", reading, &reading.processes, RecommendedAction::None),
        ),
    ]
}

/// A reading that fails although the GPU answers other queries. On a split GPU (MIG) the driver withholds such readings
/// by design.
fn unreadable<T>(
    what: &str,
    reading: &GpuReading,
    read: &Sampled<T>,
    action: RecommendedAction,
) -> CheckResult {
    let split = reading.mig.value() == Some(&true);
    match read {
        Sampled::Failed(_) if !split && reading.temperature.value().is_none() => CheckResult::Unread,
        Sampled::Failed(why) if !split => {
            let reason = format!("{what} cannot be read: {why}");
            let problem = Problem::new(Degraded, reason, action).sure(SAMPLED);
            CheckResult::Faulty(problem.by(&format!("NVML, {what}"), why, ""))
        }
        Sampled::Value(_) | Sampled::NotOffered | Sampled::Failed(_) => CheckResult::Healthy,
    }
}

/// Uses the count of the whole GPU, or the sum by place if it is higher: some drivers count by place only.
fn uncorrected(readings: &Readings, reading: &GpuReading, last: &GpuReading) -> CheckResult {
    let by_place = readings.details.as_ref().map(|details| {
        let of_now = details.ecc.iter().filter(|errors| !errors.corrected && !errors.lifetime);
        of_now.map(|errors| errors.count).fold(0, u64::saturating_add)
    });
    let total = match &reading.ecc_volatile {
        Sampled::Value(total) => *total,
        Sampled::Failed(_) => return CheckResult::Unread,
        // The rarely read details have not been read yet.
        Sampled::NotOffered if by_place.is_none() => return CheckResult::Unread,
        Sampled::NotOffered => 0,
    };
    let by_place = by_place.unwrap_or(0);
    if by_place > total {
        let source = "NVML uncorrected ECC errors by place, volatile";
        return CheckResult::Faulty(memory_errors(by_place).by(source, by_place, 0));
    }
    CheckResult::from_problem((total > 0).then(|| {
        let problem = memory_errors(total).by("NVML uncorrected ECC errors, volatile", total, 0);
        problem.was(last.ecc_volatile.value())
    }))
}

fn memory_errors(count: u64) -> Problem {
    let reason = format!("{count} memory errors that could not be corrected since its last reset");
    Problem::new(Unhealthy, reason, ResetDevice)
}

fn slowed(minutes: u32, by: &str, reading: &GpuReading, rules: Rules<'_>) -> CheckResult {
    if reading.clock_reasons == Sampled::NotOffered && reading.slowdown == Sampled::NotOffered {
        return CheckResult::Healthy;
    }
    let limit = rules.limits.slow_minutes;
    let reason = format!("slowed down by {by} in {minutes} of the last 10 minutes");
    let reading = format!("{minutes} of 10 minutes");
    let limit_words = format!("{limit} of 10 minutes");
    let problem = || {
        Problem::new(Degraded, reason, ContactSupport).by("NVML clock event reasons", reading, limit_words)
    };
    let near = f64::from(minutes) >= taken_back(f64::from(limit));
    CheckResult::from_problem((minutes >= limit).then(|| problem().sure(SAMPLED))).unless_near(near)
}

/// Corrected errors by their rate: the total over a GPU's life may be high.
fn corrected(readings: &mut Readings, at: Mono, reading: &GpuReading, rules: Rules<'_>) -> CheckResult {
    let window = Span::seconds(3600);
    let Some(count) = reading.ecc_corrected.value() else { return unread(&reading.ecc_corrected) };
    let grown = readings.corrected.step(at, *count, window);
    let limit = rules.limits.corrected_errors_per_hour;
    let exceeds = grown.by >= limit && grown.goes_on();
    let reason = format!("{} memory errors were corrected within {}", grown.by, grown.within);
    let near = grown.by as f64 >= taken_back(limit as f64);
    CheckResult::from_problem(exceeds.then(|| {
        Problem::new(Degraded, reason, RecommendedAction::None).sure(SAMPLED).gained(
            "NVML corrected ECC errors, volatile",
            &grown,
            format!("{limit} in an hour"),
        )
    }))
    .unless_near(near)
}

fn unread<T>(read: &Sampled<T>) -> CheckResult {
    if matches!(read, Sampled::NotOffered) { CheckResult::Healthy } else { CheckResult::Unread }
}

/// Normal replayed packets per minute and lane for each PCIe generation, from generation 1 (DCGM's table).
const REPLAYS_PER_LANE: [f64; 6] = [0.15, 0.3, 0.48, 0.96, 1.92, 3.84];

fn replays(readings: &mut Readings, at: Mono, reading: &GpuReading, rules: Rules<'_>) -> CheckResult {
    let Some(count) = reading.pcie_replays.value() else { return unread(&reading.pcie_replays) };
    let grown = readings.replays.step(at, (*count).into(), Span::seconds(300));
    // An idle link is slower than its maximum; the limit is that of a link under load.
    let Some(link) = reading.pcie_max.value().or(reading.pcie.value()) else { return CheckResult::Unread };
    let place = (link.generation.max(1) as usize - 1).min(REPLAYS_PER_LANE.len() - 1);
    let limit = (REPLAYS_PER_LANE[place] * f64::from(link.width)).ceil() * rules.limits.pcie_replays;
    let exceeds = grown.per_minute() > limit && grown.goes_on();
    let reason = format!("{:.0} PCIe packets a minute had to be sent again", grown.per_minute());
    let near = grown.per_minute() > taken_back(limit);
    CheckResult::from_problem(exceeds.then(|| {
        Problem::new(Degraded, reason, ContactSupport).sure(SAMPLED).gained(
            "NVML PCIe replays",
            &grown,
            format!("{limit:.0} a minute"),
        )
    }))
    .unless_near(near)
}

/// The link is compared with its maximum only under load: an idle link slows down.
fn pcie(reading: &GpuReading, last: &GpuReading) -> CheckResult {
    let (Some(now), Some(best)) = (reading.pcie.value(), reading.pcie_max.value()) else {
        return unread(&reading.pcie);
    };
    let busy = reading.utilization.value().is_some_and(|percent| f64::from(*percent) >= BUSY_PERCENT);
    if !busy {
        return CheckResult::Unread;
    }
    // A library that returns 0 does not know the value.
    let slow =
        now.generation > 0 && now.generation < best.generation || now.width > 0 && now.width < best.width;
    let link = |link: &PcieLink| format!("generation {} with {} lanes", link.generation, link.width);
    let reason = format!("under load its PCIe link has {} of {}", link(now), link(best));
    CheckResult::from_problem(slow.then(|| {
        let problem = Problem::new(Degraded, reason, ContactSupport);
        problem.by("NVML PCIe link", link(now), link(best)).was(last.pcie.value().map(link))
    }))
}

fn margin(details: Option<&GpuDetails>, reading: &GpuReading, rules: Rules<'_>) -> CheckResult {
    if !rules.limits.judge_margin {
        return CheckResult::Healthy;
    }
    let least = details.and_then(|details| details.slowdown_margin.value().copied());
    let cooler = i32::try_from(COOLER_BY).unwrap_or(i32::MAX);
    let near = reading
        .margin
        .value()
        .zip(least)
        .is_some_and(|(margin, least)| *margin < least.saturating_add(cooler));
    let judged = check_sample(&reading.margin, |margin| {
        let least = least.filter(|least| margin < least)?;
        let reason = format!("{margin} degrees of margin are left; at {least} clocks are held down");
        let problem = Problem::new(Degraded, reason, ContactSupport).sure(SAMPLED);
        Some(problem.by("NVML temperature margin", margin, least))
    });
    judged.unless_near(near)
}

/// Rarely read values, which count at once.
fn from_details(details: &GpuDetails, before: &GpuDetails, rules: Rules<'_>) -> Checked {
    let (limits, expected) = (rules.limits, rules.expected);
    let sram_before = before.sram.value().copied();
    let sram = check_sample(&details.sram, |sram| {
        let reason = "the memory on the chip has had so many errors that the board should be replaced";
        sram.threshold_exceeded.then(|| {
            let problem = Problem::new(Unhealthy, reason, ReplaceNode).by(
                "NVML SRAM ECC errors, lifetime",
                sram.uncorrected_lifetime,
                "threshold of the driver",
            );
            problem.was(sram_before.map(|before| before.uncorrected_lifetime))
        })
    });
    let on_chip = check_sample(&details.sram, |sram| {
        let errors = on_the_chip(details, sram.uncorrected);
        let earlier = sram_before.map(|sram| on_the_chip(before, sram.uncorrected));
        let reason =
            format!("{errors} errors of the memory on the chip could not be corrected since its last reset");
        // More than a few earlier errors mean wear, not bad luck.
        let (life, few) = (sram.uncorrected_lifetime, limits.sram_errors_of_a_life);
        let (reason, action) = match life > few {
            true => (format!("{reason}, and {life} over its life"), ReplaceNode),
            false => (reason, ResetDevice),
        };
        (errors > 0).then(|| {
            Problem::new(Unhealthy, reason, action).by("NVML SRAM ECC errors", errors, 0).was(earlier).by(
                "NVML SRAM ECC errors, lifetime",
                life,
                few,
            )
        })
    });
    let pages = check_sample(&details.pages_retired, |(often, once)| {
        let count = often.saturating_add(*once);
        let reason = format!("{count} pages of memory were taken out of use");
        (count >= limits.pages_retired).then(|| {
            Problem::new(Degraded, reason, ReplaceNode)
                .by("NVML retired pages", count, limits.pages_retired)
                .was(before.pages_retired.value().map(|(often, once)| often.saturating_add(*once)))
        })
    });
    let inforom = check_sample(&details.inforom_valid, |valid| {
        let reason = "the board's memory of its own configuration (InfoROM) is damaged";
        (!valid).then(|| {
            Problem::new(Degraded, reason, ContactSupport)
                .by("NVML InfoROM", "damaged", "intact")
                .was(before.inforom_valid.value().map(|valid| if *valid { "intact" } else { "damaged" }))
        })
    });
    let repairs = check_sample(&details.repairs, |(channel, processors)| {
        let what = match (channel, processors) {
            (false, false) => return None,
            (true, false) => "a channel of its memory is",
            (false, true) => "some of its processors are",
            (true, true) => "a channel of its memory and some of its processors are",
        };
        let reason = format!("{what} repaired at the next reset");
        Some(Problem::new(Degraded, reason, ResetDevice).by("NVML repairs pending", what, "none"))
    });
    let vbios = check_sample(&details.vbios, |version| {
        let wanted = &expected.vbios;
        let reason = format!("its VBIOS is {version}, not {wanted}");
        (!wanted.is_empty() && wanted != version).then(|| {
            Problem::new(Degraded, reason, RecommendedAction::None).by("NVML VBIOS", version, wanted)
        })
    });
    let persistence = check_sample(&details.persistence, |on| {
        let reason = "persistence mode is off (nvidia-smi -pm 1)";
        (expected.persistence && !on).then(|| {
            Problem::new(Degraded, reason, RecommendedAction::None).by("NVML persistence mode", "off", "on")
        })
    });
    vec![
        ("sram_threshold", sram),
        ("sram_uncorrected", on_chip),
        ("pages_retired", pages),
        ("inforom", inforom),
        ("repair_pending", repairs),
        ("vbios", vbios),
        ("persistence", persistence),
    ]
}

/// Uncorrected errors of the memory on the chip since the last reset, by the counter with the higher value.
fn on_the_chip(details: &GpuDetails, by_status: u64) -> u64 {
    let by_place = details
        .ecc
        .iter()
        .filter(|errors| errors.place == EccPlace::Sram && !errors.corrected && !errors.lifetime);
    by_place.map(|errors| errors.count).max().unwrap_or(0).max(by_status)
}
