//! Changes of the leader: what a leader stores before it acts, how a follower replaces a lost leader, and how a leader that
//! was only slow steps down.

use mainstay_group::predecessor::Predecessor;
use mainstay_group::succession::Adopted;
use mainstay_model::entry::{Body, Fact};
use mainstay_model::observation::HOSTS;
use mainstay_model::observation::{Observation, Weight};
use mainstay_model::time::Mono;
use mainstay_recovery::job::{Input, Output, policy_trouble};

use crate::launch::decider::Decider;
use crate::launch::event_loop::Launcher;
use crate::launch::following::Following;
use crate::launch::leading::{Leading, Remote};
use crate::launch::store_session::{Elected, FromStore, exit_of};
use crate::launch::user_policy;
use mainstay_sys::clock;

impl Leading {
    fn look_who_leads(&mut self) {
        if let Some(leader) = self.remote.as_ref().and_then(|remote| remote.store_session.leader()) {
            self.lead.led_by(&leader.launch, &leader.host, leader.epoch);
        }
    }
}

impl Launcher {
    /// Processes news from the store for a leader.
    pub(super) fn store_sent_to_leader(&mut self, update: FromStore) {
        let now = clock::mono();
        let Decider::Leading(leading) = &mut self.decider else { return };
        match update {
            FromStore::Written(number) => leading.lead.stored(now, number),
            FromStore::Deposed(epoch) => {
                leading.lead.forgotten(epoch);
                leading.look_who_leads();
            }
            // Dropping a leadership that arrives too late returns it to the store.
            FromStore::Elected(_) if leading.lead.is_deposed() => {}
            FromStore::Elected(elected) => {
                let Elected { record_writer, last, .. } = *elected;
                let epoch = record_writer.epoch;
                if let Some(remote) = &mut leading.remote {
                    remote.record_writer = Some(record_writer);
                }
                leading.lead.elected(epoch, last);
            }
            FromStore::Leader(_) => leading.look_who_leads(),
            // Its key is removed next, and then the store reports it.
            FromStore::LeaderMissed => {}
            FromStore::Trouble(why) => self.terminal.print(why),
            FromStore::Ended(ended) => leading.lead.ended(exit_of(&ended)),
        }
        self.lead(now);
    }

    /// After another launcher has taken over, events on this host go only to this host's journal.
    pub(super) fn see_deposed(&mut self, at: Mono, input: Input) {
        let Input::Fact(fact) = input else { return };
        if matches!(fact, Fact::AttemptEnded { .. }) {
            self.exit = Some(self.settings.policy.hand_back_exit);
        }
        self.publish_body(at, Body::Fact(fact));
    }

    /// The leader is lost, and this launcher was elected: it continues from the leader's record and from what hosts report again.
    pub(super) fn take_over(&mut self, elected: Elected) {
        let Elected { record_writer, record, .. } = elected;
        let Decider::Following(following) = &mut self.decider else { return };
        let now = clock::now();
        let takes_over = following.follow.takes_over(now.mono, record.as_ref());
        let Some(record) = record.filter(|_| takes_over) else {
            // Dropping it returns the leadership to the store.
            return;
        };
        let epoch = record_writer.epoch;
        let spec = following.spec.clone();
        let me = self.rank_spec.seat.group_rank;
        let adopted = Adopted::of(&record, me, following.member(), self.attempt, now);
        let patience = following.plan.join_timeout;
        let me = adopted.me;
        let (mut job, merge) = adopted.resume(now.mono, spec, self.policy(), patience);
        let mut out = Vec::new();
        if let Some(file) = &self.settings.policy_file {
            let (advisor, trouble) = user_policy::read(file);
            job.advised_by(advisor);
            out.extend(trouble.map(|trouble| Output::Record(Body::Fact(policy_trouble(&trouble)))));
        }
        self.recall(&mut job);
        let before = std::mem::replace(&mut self.decider, Decider::Gone);
        let Decider::Following(following) = before else { return };
        let join = following.join();
        let Following { follow, plan, store_session, listener, .. } = *following;
        let names = (record.job.clone(), record.launch.clone());
        let remote = Remote::new(listener, plan, store_session, record_writer);
        let mut leading = Leading::of(job, merge, me, join, names, remote);
        self.snapshots.show_due();
        let reader = self.snapshots.reader();
        let entries =
            reader.entries_after(follow.since(), usize::MAX).map(|read| read.entries).unwrap_or_default();
        leading.lead.replaces(Predecessor::new(follow.leader().launcher.clone(), &entries, reader.newest()));
        let host = adopted.lost.as_ref().map(|seated| seated.member.host.clone()).unwrap_or_default();
        self.terminal
            .print(format!("host {host}, which led the job, is lost: this host leads now (epoch {epoch})"));
        leading.lead.begin_with(now.mono, out);
        leading.lead.report_to_job(now.mono, Input::Fact(leader_replaced(&host, me, epoch)));
        leading.lead.continue_from(now.mono, &adopted, record.ended, follow.into_log());
        self.exit = record.ended.or(self.exit);
        self.decider = Decider::Leading(Box::new(leading));
        self.decider.judge_hangs_with(&mut self.hangs, now.mono);
        self.lead(now.mono);
    }
}

fn leader_replaced(host: &str, seat: u32, epoch: u64) -> Fact {
    let detail = format!("host {host} is lost; node rank {seat} leads the job now (epoch {epoch})");
    Fact::Observed(Observation {
        component: HOSTS.to_owned(),
        event: "leader_replaced".to_owned(),
        weight: Weight::Warning,
        detail,
        ..Observation::default()
    })
}
