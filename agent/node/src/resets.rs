//! Resets of GPUs: ordered by a person, or needed by a GPU if the host's configuration allows automatic resets.

use std::collections::BTreeMap;

use mainstay_health::hardware::gpu::reset::{ResetBy, ResetError, ResetMode, ResetOrder, may, meant};
use mainstay_model::component_id::ComponentId;
use mainstay_model::health::RecommendedAction;
use mainstay_model::id::JobId;
use mainstay_model::pci::PciAddress;
use mainstay_model::time::{Mono, Span};
use mainstay_view::node::JobPhase;
use tokio::sync::oneshot;

use super::Node;
use mainstay_sys::clock;

/// After an automatic reset the agent leaves a GPU alone for this long: a fault that recurs needs more than a
/// reset.
const MIN_RESET_INTERVAL: Span = Span::seconds(86_400);

/// How long after a refusal the agent tries again: the process on the GPU may be gone.
const TRY_AFTER: Span = Span::seconds(60);

/// Waits for the result of a reset.
pub(super) type ResetReply = oneshot::Sender<Result<(), ResetError>>;

/// The node's state of resets.
#[derive(Debug, Default)]
pub(super) struct Resets {
    /// The reset in progress, and who waits for it.
    under_way: Option<(PciAddress, Option<ResetReply>)>,
    /// When the agent may reset a GPU by itself again.
    not_before: BTreeMap<PciAddress, Mono>,
    /// Why the last automatic reset was refused; recorded once.
    refused: BTreeMap<PciAddress, String>,
}

impl Resets {
    /// With these earlier automatic resets, by GPU.
    pub(super) fn new(own: BTreeMap<PciAddress, Mono>) -> Resets {
        let not_before = own.into_iter().map(|(gpu, at)| (gpu, at.after(MIN_RESET_INTERVAL))).collect();
        Resets { not_before, ..Resets::default() }
    }
}

impl Node {
    /// An operator orders a reset. Refusals are recorded too: a person gave the order.
    pub(super) fn order_reset(&mut self, uid: u32, name: &str, reason: String, answer: ResetReply) {
        let (by, mode) = (ResetBy::User(uid), self.gpus.reset_mode());
        let found = meant(self.gpus.newest(), name).map(|(address, uuid)| (address, uuid.to_owned()));
        let (address, uuid) = match found {
            Ok(found) => found,
            // The order names no GPU.
            Err(error) => return drop(answer.send(Err(error))),
        };
        let order = ResetOrder { address, uuid, by, reason };
        let started = may(mode, by, self.running_job()).and_then(|()| self.begin(order.clone()));
        match started {
            Ok(()) => self.resets.under_way = Some((address, Some(answer))),
            Err(error) => {
                let outcome = Err(error);
                self.record(None, order.ended(&outcome));
                let _ = answer.send(outcome);
            }
        }
    }

    /// Resets the first GPU that needs it and is idle as far as is known, if automatic resets are allowed.
    pub(super) fn reset_what_needs_it(&mut self) {
        let by = ResetBy::Agent;
        if self.gpus.reset_mode() != ResetMode::Automatic
            || self.resets.under_way.is_some()
            || may(ResetMode::Automatic, by, self.running_job()).is_err()
        {
            return;
        }
        let now = clock::mono();
        let view = self.snapshots.view();
        let due = view.gpus.iter().find(|gpu| {
            gpu.action == RecommendedAction::ResetDevice
                && view.operator_state.counts(&ComponentId::Gpu(gpu.address).to_string())
                && self.resets.not_before.get(&gpu.address).is_none_or(|until| now >= *until)
        });
        let Some((address, reason)) = due.map(|gpu| (gpu.address, gpu.reason.clone())) else { return };
        // A GPU that is not among them has never reported its UUID.
        let Ok((_, uuid)) = meant(self.gpus.newest(), &address.to_string()) else { return };
        let order = ResetOrder { address, uuid: uuid.to_owned(), by, reason };
        self.resets.not_before.insert(address, now.after(TRY_AFTER));
        if self.begin(order).is_ok() {
            self.resets.under_way = Some((address, None));
        }
    }

    fn begin(&mut self, order: ResetOrder) -> Result<(), ResetError> {
        if let Some((address, _)) = &self.resets.under_way {
            return Err(ResetError::UnderWay(*address));
        }
        self.gpus.reset(order)
    }

    /// A reset succeeded, failed, or was refused because of the GPU's state.
    pub(super) fn was_reset(&mut self, order: &ResetOrder, outcome: Result<(), ResetError>) {
        let answer = self.resets.under_way.take().and_then(|(_, answer)| answer);
        let now = clock::now();
        let tried = outcome.as_ref().err().is_none_or(ResetError::was_tried);
        if order.by == ResetBy::Agent && tried {
            self.resets.not_before.insert(order.address, now.mono.after(MIN_RESET_INTERVAL));
        }
        let words = outcome.as_ref().err().map(ToString::to_string);
        // The agent tries repeatedly; the same result is recorded once.
        let reported_before = order.by == ResetBy::Agent
            && !tried
            && self.resets.refused.get(&order.address).map(String::as_str) == words.as_deref();
        if !reported_before {
            let fact = order.ended(&outcome);
            self.record(None, fact.clone());
            self.hardware.receive(now.mono, now.mono, &fact);
        }
        match words.filter(|_| !tried) {
            Some(words) => self.resets.refused.insert(order.address, words),
            None => self.resets.refused.remove(&order.address),
        };
        self.show(now, Vec::new());
        if let Some(answer) = answer {
            let _ = answer.send(outcome);
        }
    }

    /// A job of this host that has not ended: it may start ranks on any GPU at any moment.
    fn running_job(&self) -> Option<&JobId> {
        let mut jobs = self.snapshots.view().jobs.iter();
        let running = jobs.find(|(_, job)| !matches!(job.phase, JobPhase::Ended(_) | JobPhase::Lost));
        running.map(|(id, _)| id)
    }
}
