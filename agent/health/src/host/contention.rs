//! What a host knows about its devices and itself that may explain a slow rank: which rank computes on which GPU, and
//! what slows GPUs and host down. The agent sends it to launchers, whose findings quote it.
//!
//! A reading alone makes no rank slow: it is quoted only if the rank was found slow by its own time.

use std::collections::BTreeMap;

use crate::hardware::gpu::{GpuReading, GpuView};
use crate::host::preflight::Owners;
use mainstay_model::component_id::ComponentId;
use mainstay_model::finding::Hint;
use mainstay_model::health::{Component, HealthState};
use mainstay_model::id::{Pid, Rank};
pub use mainstay_model::slowdown_hints::SlowdownHints;

/// A GPU with at least this utilization, in percent, should not lower its clocks.
const AT_WORK: u32 = 30;

/// Clocks and power limits below this share of the other GPUs' count as low.
const LOW: f64 = 0.93;

/// This many corrected memory errors since the last reset are a storm.
const STORM: u64 = 1000;

/// Collects the hints for a job's ranks. Processes that a rank started belong to it: if a script started the
/// program, the program computes.
pub fn slowdown_hints(
    ranks: &[(Rank, Pid)],
    owners: &Owners,
    components: &[Component],
    gpus: &[GpuView],
) -> SlowdownHints {
    let owner = |pid: Pid| owners.get(&pid).copied().unwrap_or(pid);
    let mut hints: Vec<Hint> = components.iter().filter_map(of_component).collect();
    let (mut devices, mut at_work) = (BTreeMap::new(), BTreeMap::new());
    let readings: Vec<(String, &GpuView, &GpuReading)> = gpus
        .iter()
        .filter_map(|gpu| Some((ComponentId::Gpu(gpu.address).to_string(), gpu, gpu.reading.as_ref()?)))
        .collect();
    for (name, gpu, reading) in &readings {
        let on_it: Vec<&(Rank, Pid)> = ranks
            .iter()
            .filter(|(_, pid)| processes(reading).any(|process| owner(process.0) == *pid))
            .collect();
        devices.extend(on_it.iter().map(|(rank, _)| (*rank, name.clone())));
        for (rank, _) in &on_it {
            // If a rank has several GPUs, one busy GPU is enough. Without a utilization it stays open.
            if let Some(share) = reading.utilization.value() {
                *at_work.entry(*rank).or_insert(false) |= *share > 0;
            }
        }
        if !on_it.is_empty() {
            let is_strange = |pid: Pid| !ranks.iter().any(|(_, rank)| *rank == owner(pid));
            hints.extend(another_process(name, reading, is_strange));
        }
        hints.extend(narrow_link(name, reading));
        hints.extend(low_clocks(name, reading, &readings));
        hints.extend(low_power_limit(name, gpu, &readings));
        hints.extend(storm(name, reading));
    }
    SlowdownHints { devices, hints, at_work }
}

/// A faulty component may explain slowness, unless it is only full or misconfigured.
fn of_component(component: &Component) -> Option<Hint> {
    if !matches!(component.state, HealthState::Degraded | HealthState::Unhealthy) {
        return None;
    }
    use ComponentId::{Gpu, Gpus, Host, Interface, NvLink, Port};
    let id = ComponentId::parse(&component.name);
    let device = match id {
        Gpus("driver" | "power") => None,
        Gpu(_) | Gpus(_) => Some(component.name.clone()),
        NvLink(_) => Some(Gpu(id.gpu()?).to_string()),
        Host("cpu" | "cpu_speed" | "memory" | "memory_errors" | "pcie" | "oom" | "storage" | "mounts")
        | Port(_)
        | Interface(_) => None,
        _ => return None,
    };
    let readings: Vec<String> = component
        .evidence
        .iter()
        .take(2)
        .map(|evidence| {
            let limit = evidence.limit.as_ref().map_or_else(String::new, |limit| format!(", limit {limit}"));
            format!("{}: {}{limit}", evidence.source, evidence.reading)
        })
        .collect();
    let rests_on = if readings.is_empty() { String::new() } else { format!(" ({})", readings.join("; ")) };
    let fact = format!("{}: {}{rests_on}", component.name, component.reason);
    Some(Hint { host: None, device, about: component.name.clone(), fact })
}

fn processes(reading: &GpuReading) -> impl Iterator<Item = (Pid, Option<u64>)> + '_ {
    reading.processes.value().into_iter().flatten().map(|process| (process.pid, process.memory))
}

fn hint(device: &str, about: &str, fact: String) -> Hint {
    Hint {
        host: None,
        device: Some(device.to_owned()),
        about: about.to_owned(),
        fact: format!("{device}: {fact}"),
    }
}

fn another_process(name: &str, reading: &GpuReading, is_strange: impl Fn(Pid) -> bool) -> Option<Hint> {
    let others: Vec<String> = processes(reading)
        .filter(|(pid, _)| is_strange(*pid))
        .map(|(pid, memory)| match memory {
            Some(bytes) => format!("pid {} with {:.1} GiB", pid.0, bytes as f64 / f64::from(1 << 30)),
            None => format!("pid {}", pid.0),
        })
        .collect();
    let (first, more) = (others.first()?, others.len() - 1);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let fact = format!(
        "another process computes on it (NVML compute processes: {first}{more}, limit: the rank alone)"
    );
    Some(hint(name, "another process", fact))
}

fn narrow_link(name: &str, reading: &GpuReading) -> Option<Hint> {
    let (now, best) = (reading.pcie.value()?, reading.pcie_max.value()?);
    // An idle GPU lowers the link's generation, but not its width.
    (now.width < best.width).then(|| {
        let fact = format!("its PCIe link is narrow (NVML: x{}, limit x{})", now.width, best.width);
        hint(name, "pcie width", fact)
    })
}

fn at_work(reading: &GpuReading) -> bool {
    reading.utilization.value().is_some_and(|share| *share >= AT_WORK)
}

fn low_clocks(name: &str, reading: &GpuReading, all: &[(String, &GpuView, &GpuReading)]) -> Option<Hint> {
    let own = reading.clocks.value().filter(|_| at_work(reading))?.sm;
    let others = all.iter().filter(|(other, _, reading)| other != name && at_work(reading));
    let usual = middle(others.filter_map(|(_, _, reading)| Some(reading.clocks.value()?.sm)).collect())?;
    (f64::from(own) < LOW * f64::from(usual)).then(|| {
        let fact = format!(
            "its clocks are held down (NVML: SM {own} MHz, the host's other GPUs at work {usual} MHz)"
        );
        hint(name, "clocks", fact)
    })
}

fn low_power_limit(name: &str, gpu: &GpuView, all: &[(String, &GpuView, &GpuReading)]) -> Option<Hint> {
    let own = gpu.power_limit?;
    let others = all.iter().filter(|(other, ..)| other != name);
    let usual = middle(others.filter_map(|(_, gpu, _)| gpu.power_limit).collect())?;
    (f64::from(own) < LOW * f64::from(usual)).then(|| {
        let fact = format!(
            "its power limit is low (NVML: {} W, the host's other GPUs {} W)",
            own / 1000,
            usual / 1000
        );
        hint(name, "power limit", fact)
    })
}

fn storm(name: &str, reading: &GpuReading) -> Option<Hint> {
    let errors = reading.ecc_corrected.value().filter(|errors| **errors >= STORM)?;
    let fact = format!(
        "its memory corrects many errors (NVML: {errors} corrected since the last reset, limit {STORM})"
    );
    Some(hint(name, "ecc", fact))
}

fn middle(mut values: Vec<u32>) -> Option<u32> {
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::gpu::{Clocks, GpuProcess, PcieLink, Sampled};
    use mainstay_model::health::{Evidence, RecommendedAction};

    fn gpu(slot: u32, pid: i32) -> GpuView {
        let reading = GpuReading {
            clocks: Sampled::Value(Clocks { sm: 1980, memory: 2619 }),
            utilization: Sampled::Value(98),
            pcie: Sampled::Value(PcieLink { generation: 5, width: 16 }),
            pcie_max: Sampled::Value(PcieLink { generation: 5, width: 16 }),
            ecc_corrected: Sampled::Value(3),
            processes: Sampled::Value(vec![GpuProcess { pid: Pid(pid), memory: Some(60 << 30) }]),
            ..GpuReading::default()
        };
        GpuView {
            address: mainstay_model::pci::PciAddress::parse(&format!("0000:{slot:02x}:00")).unwrap(),
            state: HealthState::Healthy,
            reason: String::new(),
            action: RecommendedAction::None,
            reading: Some(reading),
            links: None,
            power_limit: Some(700_000),
            read_at: None,
            notes: Vec::new(),
        }
    }

    fn host() -> (Vec<(Rank, Pid)>, Vec<GpuView>) {
        let ranks = (0..4).map(|rank| (Rank(rank), Pid(100 + rank as i32))).collect();
        (ranks, (0..4).map(|slot| gpu(slot, 100 + slot as i32)).collect())
    }

    #[test]
    fn a_healthy_host_gives_no_hints_and_maps_ranks_to_gpus() {
        let (ranks, gpus) = host();
        let slowdown = slowdown_hints(&ranks, &Owners::new(), &[], &gpus);
        assert_eq!(slowdown.hints, []);
        assert_eq!(slowdown.devices.len(), 4);
        assert_eq!(slowdown.devices[&Rank(2)], "gpu.0000:02:00");
    }

    #[test]
    fn whether_a_ranks_gpu_is_busy_is_reported_if_known() {
        let (ranks, mut gpus) = host();
        for (gpu, share) in gpus.iter_mut().zip([
            Sampled::Value(97),
            Sampled::Value(0),
            Sampled::NotOffered,
            Sampled::Value(3),
        ]) {
            gpu.reading.as_mut().unwrap().utilization = share;
        }
        let slowdown = slowdown_hints(&ranks, &Owners::new(), &[], &gpus);
        assert_eq!(slowdown.at_work, [(Rank(0), true), (Rank(1), false), (Rank(3), true)].into());
        gpus[1].reading.as_mut().unwrap().utilization = Sampled::Value(50);
        assert!(!slowdown_hints(&ranks, &Owners::new(), &[], &gpus).is_as(&slowdown), "it is news");
    }

    #[test]
    fn what_slows_a_gpu_down_is_reported_with_its_reading() {
        let (ranks, mut gpus) = host();
        {
            let reading = gpus[2].reading.as_mut().unwrap();
            reading.clocks = Sampled::Value(Clocks { sm: 1200, memory: 2619 });
            reading.pcie = Sampled::Value(PcieLink { generation: 5, width: 8 });
            reading.ecc_corrected = Sampled::Value(40_000);
            let other = GpuProcess { pid: Pid(7), memory: Some(12 << 30) };
            reading.processes = Sampled::Value(vec![GpuProcess { pid: Pid(102), memory: None }, other]);
            gpus[2].power_limit = Some(500_000);
        }
        let slowdown = slowdown_hints(&ranks, &Owners::new(), &[], &gpus);
        let about: Vec<&str> = slowdown.hints.iter().map(|hint| hint.about.as_str()).collect();
        assert_eq!(about, ["another process", "pcie width", "clocks", "power limit", "ecc"]);
        assert!(slowdown.hints.iter().all(|hint| hint.device.as_deref() == Some("gpu.0000:02:00")));
        let facts: Vec<&str> = slowdown.hints.iter().map(|hint| hint.fact.as_str()).collect();
        testing::snapshot!(
            "reasons",
            "contention: what slows a gpu down is reported with its reading",
            facts[0]
        );
        assert!(facts[1].contains("x8") && facts[1].contains("x16"), "{facts:?}");
        assert!(facts[2].contains("1200") && facts[2].contains("1980"), "{facts:?}");
    }

    #[test]
    fn processes_started_by_a_rank_belong_to_it() {
        let (ranks, mut gpus) = host();
        let on = |pids: &[i32]| {
            Sampled::Value(pids.iter().map(|pid| GpuProcess { pid: Pid(*pid), memory: None }).collect())
        };
        // Rank 1 is a script whose program computes; rank 2 also has a helper; rank 3 has an unrelated process next to
        // it.
        gpus[1].reading.as_mut().unwrap().processes = on(&[1011]);
        gpus[2].reading.as_mut().unwrap().processes = on(&[102, 1022]);
        gpus[3].reading.as_mut().unwrap().processes = on(&[103, 7]);
        let owners = [(Pid(1011), Pid(101)), (Pid(1022), Pid(102)), (Pid(7), Pid(5))].into();
        let slowdown = slowdown_hints(&ranks, &owners, &[], &gpus);
        assert_eq!(slowdown.devices[&Rank(1)], "gpu.0000:01:00");
        assert_eq!(slowdown.at_work.len(), 4, "{slowdown:?}");
        let strange: Vec<Option<&str>> = slowdown.hints.iter().map(|hint| hint.device.as_deref()).collect();
        assert_eq!(strange, [Some("gpu.0000:03:00")], "{slowdown:?}");
    }

    #[test]
    fn low_clocks_of_an_idle_gpu_give_no_hint() {
        let (ranks, mut gpus) = host();
        let reading = gpus[1].reading.as_mut().unwrap();
        reading.clocks = Sampled::Value(Clocks { sm: 345, memory: 2619 });
        reading.utilization = Sampled::Value(0);
        assert_eq!(slowdown_hints(&ranks, &Owners::new(), &[], &gpus).hints, []);
    }

    #[test]
    fn a_component_that_is_not_well_is_quoted_with_source_reading_and_limit() {
        let stolen = Component {
            name: "host.cpu".into(),
            state: HealthState::Degraded,
            reason: "another guest takes processor time".into(),
            evidence: vec![Evidence {
                source: "/proc/stat".into(),
                reading: "stolen 31.0 %".into(),
                limit: Some("10 %".into()),
                ..Evidence::default()
            }],
            ..Component::default()
        };
        let full =
            Component { name: "host.disk".into(), state: HealthState::Unhealthy, ..Component::default() };
        let slowdown = slowdown_hints(&[], &Owners::new(), &[stolen, full], &[]);
        let [hint] = &slowdown.hints[..] else { panic!("{slowdown:?}") };
        assert_eq!(hint.device, None);
        assert!(hint.fact.ends_with("(/proc/stat: stolen 31.0 %, limit 10 %)"), "{}", hint.fact);
    }

    #[test]
    fn a_changed_reading_is_not_news() {
        let (ranks, mut gpus) = host();
        let mut link_hints = |width| {
            gpus[0].reading.as_mut().unwrap().pcie = Sampled::Value(PcieLink { generation: 5, width });
            slowdown_hints(&ranks, &Owners::new(), &[], &gpus)
        };
        let (eight, four, whole) = (link_hints(8), link_hints(4), link_hints(16));
        assert!(four.is_as(&eight) && four != eight);
        assert!(!whole.is_as(&four));
    }
}
