//! Whether shown components were read recently. A sensor that hangs (a dead NFS server, a driver that does not answer)
//! sends no reports, and its last report must not be shown as healthy.

use crate::health::{Component, HealthState};
use crate::time::{Mono, Span};

/// The minimum time after which a sensor without a report counts as hanging.
pub const MIN_STALE_AFTER: Span = Span::seconds(30);

/// How long a sensor may send no report: three of its intervals, and at least half a minute.
pub fn allowed(interval: Span) -> Span {
    Span(interval.0.saturating_mul(3).max(MIN_STALE_AFTER.0))
}

/// The component as shown at `now` if its sensor has sent no report since `received` for longer than `allowed`; `None` if
/// it is shown unchanged. A state worse than unknown stays: a missing report does not improve it.
pub fn stale(
    component: &Component,
    sensor: &str,
    received: Mono,
    allowed: Span,
    now: Mono,
) -> Option<Component> {
    let silent = now.since(received);
    if silent <= allowed {
        return None;
    }
    let seconds = silent.0 / 1_000_000_000;
    let before =
        component.reason.split_once(REASON_SEPARATOR).map_or(component.reason.as_str(), |(_, before)| before);
    let reason = format!("not read for {seconds} s (the {sensor} sensor hangs){REASON_SEPARATOR}{before}");
    if component.state == HealthState::Healthy {
        return Some(Component { state: HealthState::Unknown, reason, since: now, ..component.clone() });
    }
    Some(Component { reason, ..component.clone() })
}

/// Separates the age from the last reason.
const REASON_SEPARATOR: &str = "; before: ";

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Mono {
        Mono(seconds * 1_000_000_000)
    }

    fn component(state: HealthState) -> Component {
        Component { name: "host.disk".into(), state, reason: "all is well".into(), ..Component::default() }
    }

    #[test]
    fn a_healthy_component_without_reports_becomes_unknown() {
        let allowed = allowed(Span::seconds(5));
        assert_eq!(allowed, Span::seconds(30));
        let healthy = component(HealthState::Healthy);
        assert_eq!(stale(&healthy, "host", at(100), allowed, at(130)), None);
        let unknown = stale(&healthy, "host", at(100), allowed, at(131)).unwrap();
        assert_eq!((unknown.state, unknown.since), (HealthState::Unknown, at(131)));
        assert!(unknown.reason.contains(" 31 s ") && unknown.reason.ends_with(&healthy.reason));
        let later = stale(&unknown, "host", at(100), allowed, at(200)).unwrap();
        assert_eq!((later.reason.matches(&healthy.reason).count(), later.since), (1, at(131)));
        assert_eq!(later.reason.len(), unknown.reason.replace(" 31 s ", " 100 s ").len());
    }

    #[test]
    fn a_worse_state_is_kept_without_reports() {
        let ill = stale(&component(HealthState::Unhealthy), "host", at(0), MIN_STALE_AFTER, at(60)).unwrap();
        assert_eq!(ill.state, HealthState::Unhealthy);
        assert_eq!(self::allowed(Span::seconds(60)), Span::seconds(180));
    }
}
