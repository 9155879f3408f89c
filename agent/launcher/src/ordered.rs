//! Records an order in the journal and carries it out.

use mainstay_model::entry::Fact;
use mainstay_model::id::Rank;

use crate::order::{JobOrder, Ordered, Refused, observed};
use crate::run::Launcher;
use mainstay_sys::{clock, users};

impl Launcher {
    /// Carries out an order of a person. The journal records it first.
    pub(crate) fn ordered(&mut self, ordered: Ordered) {
        let Ordered { uid, reason, order, answer } = ordered;
        // The sender may have gone; the order is carried out all the same.
        let _ = answer.send(self.carry_out_order(uid, &reason, order));
    }

    fn carry_out_order(&mut self, uid: u32, reason: &str, order: JobOrder) -> Result<(), Refused> {
        let user = users::name(uid).unwrap_or_else(|| uid.to_string());
        let who = format!("user {user}{}", self.on_host());
        let of = |wanted: Rank| self.ranks.living().find(|rank| rank.rank == wanted);
        let being_stopped = self.stopping.stop.is_some() || !self.ranks.are_running();
        match order {
            JobOrder::Restart | JobOrder::Exclude(_) if being_stopped => {
                Err(Refused::NotNow("no ranks run, or they are being stopped already"))
            }
            JobOrder::Stop if self.stopping.asked_by.is_some() || self.stopping.leave_within.is_some() => {
                Err(Refused::NotNow("the job is being stopped already"))
            }
            JobOrder::Inject(..) if !self.settings.allow_inject => Err(Refused::NotAllowed),
            JobOrder::Inject(_, rank) | JobOrder::Exclude(rank) if of(rank).is_none() => {
                Err(Refused::NoSuchRank(rank))
            }
            JobOrder::Restart => {
                self.fact(observed(&who, uid, reason, order));
                Ok(())
            }
            JobOrder::Stop => {
                self.fact(observed(&who, uid, reason, order));
                self.stopping.asked_by = Some((nix::libc::SIGTERM, clock::mono()));
                let (by, exit) = (format!("{who} ({reason})"), 128 + nix::libc::SIGTERM);
                self.fact(Fact::StopRequested { by, exit });
                Ok(())
            }
            JobOrder::Exclude(rank) => {
                let left = of(rank).map(|process| self.rank_spec.devices_without(process.local_rank));
                let left = left.ok_or(Refused::NoSuchRank(rank))?.map_err(Refused::NotHere)?;
                self.fact(observed(&who, uid, reason, order));
                self.rank_spec.devices = Some(left);
                Ok(())
            }
            JobOrder::Inject(fault, rank) => {
                self.can_inject(fault, rank)?;
                self.fact(observed(&who, uid, reason, order));
                self.inject(fault, rank);
                Ok(())
            }
        }
    }
}
