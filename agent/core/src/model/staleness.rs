//! Whether what is shown was read lately. A room whose look hangs (a dead NFS server, a driver that does not answer)
//! says nothing any more, and what it said before must not stand as healthy.

use crate::base::time::{Mono, Span};
use crate::model::health::{Component, HealthState};

/// The least time after which a room that has said nothing counts as hanging.
pub const LEAST: Span = Span::seconds(30);

/// How long a room may say nothing: three of its intervals, and not less than half a minute.
pub fn allowed(interval: Span) -> Span {
    Span(interval.0.saturating_mul(3).max(LEAST.0))
}

/// The component as it may still be shown at `now`, if its room has said nothing since `received` and was allowed less.
/// None if it may stand as it is. What was worse than unknown stays so: it is no better for not being read.
pub fn stale(
    component: &Component,
    room: &str,
    received: Mono,
    allowed: Span,
    now: Mono,
) -> Option<Component> {
    let silent = now.since(received);
    if silent <= allowed {
        return None;
    }
    let seconds = silent.0 / 1_000_000_000;
    let before = component.reason.split_once(MARK).map_or(component.reason.as_str(), |(_, before)| before);
    let reason = format!("not read for {seconds} s (the watch over {room} hangs){MARK}{before}");
    if component.state == HealthState::Healthy {
        return Some(Component { state: HealthState::Unknown, reason, since: now, ..component.clone() });
    }
    Some(Component { reason, ..component.clone() })
}

/// Stands between what is said of the age and what was read.
const MARK: &str = "; before: ";

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
    fn what_is_not_read_any_more_is_unknown() {
        let allowed = allowed(Span::seconds(5));
        assert_eq!(allowed, Span::seconds(30));
        let healthy = component(HealthState::Healthy);
        assert_eq!(stale(&healthy, "host", at(100), allowed, at(130)), None);
        let unknown = stale(&healthy, "host", at(100), allowed, at(131)).unwrap();
        assert_eq!((unknown.state, unknown.since), (HealthState::Unknown, at(131)));
        assert_eq!(unknown.reason, "not read for 31 s (the watch over host hangs); before: all is well");
        let later = stale(&unknown, "host", at(100), allowed, at(200)).unwrap();
        assert!(later.reason.ends_with("hangs); before: all is well") && later.since == at(131));
    }

    #[test]
    fn what_is_worse_stays_so() {
        let ill = stale(&component(HealthState::Unhealthy), "host", at(0), LEAST, at(60)).unwrap();
        assert_eq!(ill.state, HealthState::Unhealthy);
        assert_eq!(self::allowed(Span::seconds(60)), Span::seconds(180));
    }
}
