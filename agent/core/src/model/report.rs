//! What one look of a room at its part of the host came to.

use crate::model::entry::Fact;
use crate::model::health::Component;

/// Components and facts of one look.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SensorReport {
    /// The components that the room watches, each time all of them.
    pub components: Vec<Component>,
    /// What has happened since the last look.
    pub facts: Vec<Fact>,
}
