//! Hosts that join the leader before the first round, and hosts that leave it.

use mainstay_group::lead::Expected;
use mainstay_group::round::{self, Member};
use mainstay_group::wire::{Down, Join};
use tokio::sync::mpsc;

use crate::group::plan::HostsPlan;
use crate::group::streams::listen::FromHost;

/// A host that has joined and waits for the round.
pub struct Waiting {
    /// The join message that it sent.
    pub join: Join,
    /// The same as a member of the round.
    pub member: Member,
    /// Its connection.
    pub connection: u64,
    /// The channel to it.
    pub to: mpsc::Sender<Down>,
}

/// A host joins or leaves: updates `waiting` and prints it on the terminals of both hosts.
pub fn take(
    plan: &HostsPlan,
    mine: &Join,
    me: &Member,
    event: FromHost,
    waiting: &mut Vec<Waiting>,
    print: &impl Fn(String),
) {
    match event {
        FromHost::Joined { connection, join, peer, to } => {
            waiting.retain(|of| of.member.launcher != join.launcher);
            let member = Member::of(&join);
            let members: Vec<Member> =
                std::iter::once(me.clone()).chain(waiting.iter().map(|of| of.member.clone())).collect();
            let expected = Expected { leader: mine.clone(), mixed: plan.mixed };
            let seat = || round::admit(&members, &member, plan.hosts.1).err().map(|error| error.to_string());
            let why = expected.refusal(&join).or_else(|| expected.difference(&join)).or_else(seat);
            if let Some(why) = why {
                print(format!("host {} ({peer}) cannot take part: {why}", join.host));
                let _ = to.try_send(Down::Refused { why, may_return: false });
                return;
            }
            print(format!("host {} ({peer}) has joined{}", join.host, numbered(&join)));
            let version = (join.version != mine.version)
                .then(|| format!("it runs Mainstay {}, host {} {}", join.version, mine.host, mine.version));
            for difference in version.into_iter().chain(expected.differences(&join)) {
                let reported = format!("host {} ({peer}): {difference}", join.host);
                let _ = to.try_send(Down::Waiting { reported: reported.clone(), spare: None });
                print(reported);
            }
            waiting.push(Waiting { join, member, connection, to });
        }
        FromHost::Gone { connection, why } => {
            if let Some(at) = waiting.iter().position(|of| of.connection == connection) {
                let gone = waiting.remove(at);
                print(format!("host {} has left{}: {why}", gone.join.host, numbered(&gone.join)));
            }
        }
        FromHost::Received { .. } => {}
    }
}

fn numbered(join: &Join) -> String {
    join.node_rank.map_or(String::new(), |rank| format!(" as node rank {rank}"))
}
