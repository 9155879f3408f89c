//! A host that returns without the data of its member: a restarted launcher has a new directory, and a host may have
//! a new disk. etcd refuses such a member, since it has forgotten its votes. The host gets a new member in the
//! cluster, and its old one is removed.

use std::time::Duration;

use super::ManagedOptions;
use super::command::MemberCommand;
use crate::client::{Client, Settings, TlsFiles};
use crate::error::CoordError;
use crate::etcd::etcdserverpb::Member;

/// The time limit for an answer of the other members.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The message in etcd's log before it ends as a removed member.
const REMOVED: &str = "removed from the cluster";

/// The message before it ends as a member that lost acknowledged entries. etcd asks the other members for 1 s each
/// whether this member has run before, and considers itself new if they are too busy to answer (seen with 3.4).
const FORGOTTEN: &str = "Was the raft log corrupted, truncated, or lost?";

/// Whether a member that ended needs to be replaced: it has no log, was removed, or its log lacks entries that the
/// cluster knows it had.
pub(super) fn is_needed(options: &ManagedOptions, stderr_tail: &str) -> bool {
    let is_refused = [REMOVED, FORGOTTEN].iter().any(|message| stderr_tail.contains(message));
    is_refused || !options.data().join("member/wal").exists()
}

/// Replaces this host's member if the cluster serves and knows it as another one. Returns the command line for the
/// new member; none if the current one is right.
pub(super) async fn place(
    options: &ManagedOptions,
    line: &MemberCommand,
) -> Result<Option<MemberCommand>, CoordError> {
    let client = others(options, line)?;
    let members = client.members().await?;
    let me = |member: &Member| member.peer_urls.contains(&line.peer_url);
    let serves = members.iter().any(|member| !me(member) && !member.name.is_empty());
    if !serves {
        // The cluster starts for the first time.
        return Ok(None);
    }
    let mine = members.iter().find(|member| me(member));
    if let Some(before) = mine.filter(|member| !member.name.is_empty()) {
        client.remove_member(before.id).await?;
    }
    if mine.is_none_or(|member| !member.name.is_empty()) {
        client.add_member(&line.peer_url).await?;
    }
    let name = |member: &Member| if me(member) { line.name.clone() } else { member.name.clone() };
    let members = client.members().await?;
    let all: Vec<String> = members
        .iter()
        .flat_map(|member| member.peer_urls.iter().map(|url| format!("{}={url}", name(member))))
        .collect();
    Ok(Some(line.joining(&all.join(","))))
}

/// A client of the other hosts' members: this host's is down.
fn others(options: &ManagedOptions, line: &MemberCommand) -> Result<Client, CoordError> {
    let mut endpoints = options.endpoints.clone();
    endpoints.remove(line.index);
    let tls = options.tls.as_ref().map(|tls| TlsFiles {
        authorities: Some(tls.authorities.clone()),
        certificate: Some(tls.certificate.clone()),
        key: Some(tls.key.clone()),
    });
    Client::new(Settings { tls, timeout: ANSWER_TIMEOUT, ..Settings::new(endpoints) })
}
