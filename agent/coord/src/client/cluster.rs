//! The members of an etcd cluster. The built-in store has none.

use super::Client;
use super::ask::Repeat;
use crate::error::CoordError;
use crate::etcd::etcdserverpb as pb;
use crate::etcd::etcdserverpb::cluster_client::ClusterClient;

impl Client {
    /// The members according to the endpoint. A member that has never run has no name.
    pub(crate) async fn members(&self) -> Result<Vec<pb::Member>, CoordError> {
        let ask = |channel, question| async move { ClusterClient::new(channel).member_list(question).await };
        let (answer, _) = self.ask("list members", Repeat::Freely, pb::MemberListRequest {}, ask).await?;
        Ok(answer.members)
    }

    /// Removes a member permanently.
    pub(crate) async fn remove_member(&self, id: u64) -> Result<(), CoordError> {
        let ask =
            |channel, question| async move { ClusterClient::new(channel).member_remove(question).await };
        self.ask("remove member", Repeat::OnlyIfUnsent, pb::MemberRemoveRequest { id }, ask).await?;
        Ok(())
    }

    /// Adds a member that will be started at this URL.
    pub(crate) async fn add_member(&self, peer_url: &str) -> Result<(), CoordError> {
        let ask = |channel, question| async move { ClusterClient::new(channel).member_add(question).await };
        let question = pb::MemberAddRequest { peer_urls: vec![peer_url.to_owned()] };
        self.ask("add member", Repeat::OnlyIfUnsent, question, ask).await?;
        Ok(())
    }
}
