//! The result of one sample of a sensor of the agent.

use crate::entry::Fact;
use crate::health::Component;

/// Components and facts of one sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SensorReport {
    /// All components of the sensor.
    pub components: Vec<Component>,
    /// The events since the last sample.
    pub facts: Vec<Fact>,
}
