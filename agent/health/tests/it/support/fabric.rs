//! A host with network links, a clock and a journal.

use mainstay_health::host::fabric::{
    Expected, FabricJudge, FabricLimits, FabricSample, Identity, LearnedLinks, LinkKind, LinkState,
    PortReading,
};
use mainstay_health::host::os::Reading;
use mainstay_model::entry::Fact;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::id::BootId;
use mainstay_model::observation::Observation;
use mainstay_model::time::{Mono, Span, Stamp, Wall};

pub const INTERVAL: u64 = 10;
pub const HOUR: u64 = 3600;

pub fn port(number: usize) -> PortReading {
    PortReading {
        name: format!("mlx5_{number}/1"),
        identity: Identity {
            serial: Some(format!("guid-{number}")),
            place: Some(format!("0000:{number:02x}:00.0")),
        },
        kind: LinkKind::InfiniBand,
        state: up(),
        rate: Reading::Value(400.0),
        counters: [("link_downed", 0), ("symbol_error", 0)].map(|(name, count)| (name.into(), count)).into(),
        ..PortReading::default()
    }
}

pub fn up() -> Reading<LinkState> {
    Reading::Value(LinkState { active: true, logical: "ACTIVE".into(), physical: Some("LinkUp".into()) })
}

pub fn down(physical: &str) -> Reading<LinkState> {
    Reading::Value(LinkState { active: false, logical: "DOWN".into(), physical: Some(physical.into()) })
}

pub fn boot(name: &str) -> BootId {
    BootId(name.into())
}

/// A host with its clock and journal.
pub struct Host {
    pub judge: FabricJudge,
    pub sample: FabricSample,
    pub now: Mono,
    pub boot: BootId,
    pub journal: Vec<(Stamp, BootId, Observation)>,
}

impl Host {
    pub fn with_ports(count: usize) -> Host {
        Host::new((0..count).map(port).collect(), &[])
    }

    pub fn new(links: Vec<PortReading>, expected: &[&str]) -> Host {
        let configured = expected.iter().map(|text| Expected::parse(text).unwrap()).collect();
        Host {
            judge: FabricJudge::new(
                FabricLimits::default(),
                boot("first"),
                configured,
                LearnedLinks::default(),
            ),
            sample: FabricSample { links, ..FabricSample::default() },
            now: Mono(0).after(Span::seconds(HOUR)),
            boot: boot("first"),
            journal: Vec::new(),
        }
    }

    /// A host whose links were all read ten times.
    pub fn settled(count: usize) -> Host {
        let mut host = Host::with_ports(count);
        host.poll_times(10);
        host
    }

    pub fn stamp(&self) -> Stamp {
        let (now, rebooted) = (self.now, i64::from(self.boot.0 != "first"));
        Stamp {
            mono: now,
            wall: Wall(1_700_000_000_000_000_000 + now.0 as i64 + rebooted * 10_000_000_000_000),
        }
    }

    pub fn poll(&mut self) -> Vec<Component> {
        self.now = self.now.after(Span::seconds(INTERVAL));
        let judged = self.judge.step(self.now, &self.sample);
        for fact in judged.facts {
            let Fact::Observed(observation) = fact else { continue };
            self.journal.push((self.stamp(), self.boot.clone(), observation));
        }
        judged.components
    }

    pub fn poll_times(&mut self, count: usize) {
        for _ in 0..count {
            self.poll();
        }
    }

    pub fn sees(&mut self, name: &str) -> Component {
        let all = self.poll();
        let names: Vec<&str> = all.iter().map(|component| component.name.as_str()).collect();
        let found = all.iter().find(|component| component.name == name);
        found.unwrap_or_else(|| panic!("no {name} in {names:?}")).clone()
    }

    pub fn expect(&mut self, name: &str, state: HealthState, action: RecommendedAction) -> String {
        let component = self.sees(name);
        assert_eq!((component.state, component.action), (state, action), "{name}: {}", component.reason);
        component.reason
    }

    pub fn link(&mut self, number: usize) -> &mut PortReading {
        &mut self.sample.links[number]
    }

    pub fn set(&mut self, number: usize, counter: &str, value: u64) {
        self.link(number).counters.insert(counter.into(), value);
    }

    /// Restarts the agent, in this boot or another.
    pub fn restart(&mut self, boot: BootId) {
        self.boot = boot.clone();
        let learned = self.judge.learned().clone();
        self.judge = FabricJudge::new(FabricLimits::default(), boot, vec![], learned);
        let now = self.stamp();
        self.judge.recall(now, &self.journal);
    }

    pub fn events(&self, event: &str) -> usize {
        self.journal.iter().filter(|(.., observation)| observation.event == event).count()
    }

    /// The link is down for one reading.
    pub fn blink(&mut self, number: usize) {
        self.link(number).state = down("Polling");
        self.poll();
        self.link(number).state = up();
        self.poll();
    }
}
