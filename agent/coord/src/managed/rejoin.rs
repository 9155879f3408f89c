//! A host that comes back without the data of its member: a launcher that was started again has a new directory, and a host
//! may have a new disk. etcd refuses such a member, since it has forgotten how it voted. It gets a new place in the cluster,
//! and its old one is removed.

use std::time::Duration;

use super::ManagedOptions;
use super::command::Line;
use crate::client::{Client, Settings, TlsFiles};
use crate::error::CoordError;
use crate::etcd::etcdserverpb::Member;

/// How long the other members may take to answer.
const WITHIN: Duration = Duration::from_secs(2);

/// What etcd has in its log before it ends as a member that was removed.
const REMOVED: &str = "removed from the cluster";

/// What it has there before it ends as a member that lost what it had acknowledged. etcd asks the others for 1 s each whether this
/// member has run before, and takes itself for a new one if they are too busy to answer (seen with 3.4).
const FORGOTTEN: &str = "Was the raft log corrupted, truncated, or lost?";

/// Whether a member that ended by itself needs another place: it has no log of its own, was removed, or its log lacks what the
/// cluster knows it to have had.
pub(super) fn is_needed(options: &ManagedOptions, last_words: &str) -> bool {
    let is_refused = [REMOVED, FORGOTTEN].iter().any(|words| last_words.contains(words));
    is_refused || !options.data().join("member/wal").exists()
}

/// Gives this host's member a new place, if the cluster serves and knows it as another. With which command line it is
/// started then; none if the one that it has is right.
pub(super) async fn place(options: &ManagedOptions, line: &Line) -> Result<Option<Line>, CoordError> {
    let client = others(options, line)?;
    let members = client.members().await?;
    let me = |member: &Member| member.peer_urls.contains(&line.peer_url);
    let serves = members.iter().any(|member| !me(member) && !member.name.is_empty());
    if !serves {
        // The cluster comes together for the first time.
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

/// The other hosts' members: this host's is not there.
fn others(options: &ManagedOptions, line: &Line) -> Result<Client, CoordError> {
    let mut endpoints = options.endpoints.clone();
    endpoints.remove(line.index);
    let tls = options.tls.as_ref().map(|tls| TlsFiles {
        authorities: Some(tls.authorities.clone()),
        certificate: Some(tls.certificate.clone()),
        key: Some(tls.key.clone()),
    });
    Client::new(Settings { tls, timeout: WITHIN, ..Settings::new(endpoints) })
}
