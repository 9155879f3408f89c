//! The state of components as HealthEvents, for the platform connector of NVSentinel on this node.

use std::time::Duration;

use mainstay_model::fault_code::FaultCode;
use mainstay_model::health::{Component, HealthState, RecommendedAction};
use mainstay_model::time::Wall;
use mainstay_proto::datamodels::platform_connector_client::PlatformConnectorClient;
use mainstay_proto::datamodels::{self, Entity, HealthEvent, HealthEvents, ProcessingStrategy};
use tokio::time::timeout;
use tonic::transport::Endpoint;

/// The versions of the two messages.
const VERSION: u32 = 1;

/// The monitor that events are from.
const AGENT: &str = "mainstay";

/// The event for the state of a component: its end if it is `HEALTHY`. A state that could not be read is no fault that
/// takes the node away, and is not healthy either.
pub(super) fn of_component(
    component: &Component,
    at: Wall,
    node: &str,
    strategy: ProcessingStrategy,
) -> HealthEvent {
    let (class, kind, entity) = parts(&component.name);
    let codes = component.evidence.iter().filter_map(|evidence| evidence.code);
    HealthEvent {
        is_fatal: component.state == HealthState::Unhealthy,
        is_healthy: component.state == HealthState::Healthy,
        component_class: class.to_owned(),
        check_name: format!("Mainstay{kind}"),
        message: component.reason.clone(),
        recommended_action: action(component.action).into(),
        error_code: codes.map(error_code).collect(),
        entities_impacted: entity.into_iter().collect(),
        ..event(at, node, strategy)
    }
}

/// An event for a test, which is never more than stored.
pub(super) fn test(message: String, at: Wall, node: &str) -> HealthEvent {
    HealthEvent {
        is_healthy: true,
        component_class: "Node".to_owned(),
        check_name: "MainstayTest".to_owned(),
        message,
        ..event(at, node, ProcessingStrategy::StoreOnly)
    }
}

fn event(at: Wall, node: &str, strategy: ProcessingStrategy) -> HealthEvent {
    let (seconds, nanos) = (at.0.div_euclid(1_000_000_000), at.0.rem_euclid(1_000_000_000));
    HealthEvent {
        version: VERSION,
        agent: AGENT.to_owned(),
        generated_timestamp: Some(prost_types::Timestamp {
            seconds,
            nanos: i32::try_from(nanos).unwrap_or(0),
        }),
        node_name: node.to_owned(),
        processing_strategy: strategy.into(),
        ..HealthEvent::default()
    }
}

/// The class and the kind of a component, and the device that it is about: `gpu.0000:b3:00.0`, `fabric.mlx5_0/1`,
/// `host.memory`.
fn parts(name: &str) -> (&'static str, String, Option<Entity>) {
    let (kind, rest) = name.split_once('.').unwrap_or((name, ""));
    let entity = |entity_type: &str| {
        let (entity_type, entity_value) = (entity_type.to_owned(), rest.to_owned());
        Some(Entity { entity_type, entity_value }).filter(|_| !rest.is_empty())
    };
    match kind {
        "gpu" => ("GPU", camel(kind), entity("PCI")),
        "fabric" => ("NIC", camel(kind), entity("NIC")),
        _ => ("Node", camel(name), None),
    }
}

/// `host.kernel_log` as `HostKernelLog`: conditions of nodes have such names.
fn camel(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric());
    let word = |word: &str| {
        let (first, rest) = word.split_at(word.len().min(1));
        first.to_ascii_uppercase() + rest
    };
    words.map(word).collect()
}

fn error_code(code: FaultCode) -> String {
    match code {
        FaultCode::Xid(code) => code.to_string(),
        FaultCode::Sxid(code) => format!("SXID {code}"),
        FaultCode::KernelLine(class) => class.name().to_owned(),
    }
}

/// A restart of a process is the launcher's, not the cluster's.
fn action(action: RecommendedAction) -> datamodels::RecommendedAction {
    match action {
        RecommendedAction::None | RecommendedAction::RestartProcess => datamodels::RecommendedAction::None,
        RecommendedAction::ResetDevice => datamodels::RecommendedAction::ComponentReset,
        RecommendedAction::RebootNode => datamodels::RecommendedAction::RestartBm,
        RecommendedAction::ReplaceNode => datamodels::RecommendedAction::ReplaceVm,
        RecommendedAction::ContactSupport => datamodels::RecommendedAction::ContactSupport,
    }
}

/// Sends an event to the socket `unix:///path`.
pub(super) async fn send(address: &str, event: HealthEvent, deadline: Duration) -> Result<(), String> {
    let sending = async {
        let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|error| in_full(&error))?;
        let channel = endpoint.connect().await.map_err(|error| in_full(&error))?;
        let events = HealthEvents { version: VERSION, events: vec![event] };
        let answer = PlatformConnectorClient::new(channel).health_event_occurred_v1(events).await;
        answer.map(drop).map_err(|status| format!("{:?}: {}", status.code(), status.message()))
    };
    let late = |_| Err(format!("no answer within {} s", deadline.as_secs_f64()));
    timeout(deadline, sending).await.unwrap_or_else(late)
}

/// An error with its causes.
fn in_full(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_component_has_a_class_a_check_and_the_device_that_it_is_about() {
        let parts = |name: &str| {
            let (class, kind, entity) = parts(name);
            (class, kind, entity.map(|of| (of.entity_type, of.entity_value)))
        };
        let entity = |kind: &str, value: &str| Some((kind.to_owned(), value.to_owned()));
        let gpu = "gpu.0000:b3:00.0";
        assert_eq!(parts(gpu), ("GPU", "Gpu".to_owned(), entity("PCI", "0000:b3:00.0")));
        assert_eq!(parts("fabric.mlx5_0/1"), ("NIC", "Fabric".to_owned(), entity("NIC", "mlx5_0/1")));
        assert_eq!(parts("host.kernel_log"), ("Node", "HostKernelLog".to_owned(), None));
    }
}
