//! The members of the etcd cluster: listing, adding, removing and promoting them.

use super::connections::RetryPolicy;
use super::rpc::{
    Empty, MemberAddRequest, MemberAddResponse, MemberListRequest, MemberListResponse,
    MemberRequest, RpcMember, StatusResponse,
};
use super::{EtcdStore, StoreError};

/// A member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// Its etcd member id.
    pub id: u64,
    /// Its name; empty until it has started for the first time.
    pub name: String,
    /// Where the other members reach it.
    pub peer_urls: Vec<String>,
    /// Where clients reach it.
    pub client_urls: Vec<String>,
    /// Whether it is a learner, without a vote.
    pub is_learner: bool,
}

impl From<RpcMember> for MemberInfo {
    fn from(m: RpcMember) -> Self {
        let RpcMember { id, name, peer_urls, client_urls, is_learner } = m;
        Self { id, name, peer_urls, client_urls, is_learner }
    }
}

/// A member's own status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its member id.
    pub id: u64,
    /// The cluster's id.
    pub cluster: u64,
    /// Its etcd version.
    pub version: String,
    /// The leader it knows.
    pub leader: Option<u64>,
    /// Size of its database in bytes.
    pub db_bytes: u64,
}

impl EtcdStore {
    /// Lists the members. Before etcd 3.5 the list is the local view of the asked member.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn members(&self) -> Result<Vec<MemberInfo>, StoreError> {
        let path = "/etcdserverpb.Cluster/MemberList";
        let request = MemberListRequest { linearizable: true };
        let answer = self
            .0
            .connections
            .call::<_, MemberListResponse>(RetryPolicy::Idempotent, path, request)
            .await;
        let answer = answer.map_err(|e| self.0.connections.to_store_error(e))?;
        Ok(answer.members.into_iter().map(Into::into).collect())
    }

    /// Adds a member with the peer URL `peer_url`; afterwards it may start.
    ///
    /// # Errors
    /// [`StoreError`]; after [`StoreError::Indeterminate`] the list of members tells.
    pub async fn add_member(
        &self,
        peer_url: &str,
        is_learner: bool,
    ) -> Result<MemberInfo, StoreError> {
        let path = "/etcdserverpb.Cluster/MemberAdd";
        let request = MemberAddRequest { peer_urls: vec![peer_url.to_owned()], is_learner };
        let answer = self
            .0
            .connections
            .call::<_, MemberAddResponse>(RetryPolicy::AtMostOnce, path, request)
            .await;
        let answer = answer.map_err(|e| self.0.connections.to_store_error(e))?;
        Ok(answer.member.unwrap_or_default().into())
    }

    /// Removes a member. It stops.
    ///
    /// # Errors
    /// As [`Self::add_member`].
    pub async fn remove_member(&self, id: u64) -> Result<(), StoreError> {
        self.call_member_change("/etcdserverpb.Cluster/MemberRemove", id).await
    }

    /// Promotes a learner to voter, once it has caught up.
    ///
    /// # Errors
    /// As [`Self::add_member`].
    pub async fn promote_member(&self, id: u64) -> Result<(), StoreError> {
        self.call_member_change("/etcdserverpb.Cluster/MemberPromote", id).await
    }

    async fn call_member_change(&self, path: &'static str, id: u64) -> Result<(), StoreError> {
        let done = self
            .0
            .connections
            .call::<_, Empty>(RetryPolicy::AtMostOnce, path, MemberRequest { id })
            .await;
        done.map(drop).map_err(|e| self.0.connections.to_store_error(e))
    }

    /// The status of the member that is tried first; with one endpoint, of that one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn member_status(&self) -> Result<MemberStatus, StoreError> {
        let path = "/etcdserverpb.Maintenance/Status";
        let answer = self
            .0
            .connections
            .call::<_, StatusResponse>(RetryPolicy::Idempotent, path, Empty {})
            .await;
        let answer = answer.map_err(|e| self.0.connections.to_store_error(e))?;
        let header = answer.header.unwrap_or_default();
        Ok(MemberStatus {
            id: header.member_id,
            cluster: header.cluster_id,
            version: answer.version,
            leader: Some(answer.leader).filter(|&id| id != 0),
            db_bytes: u64::try_from(answer.db_size).unwrap_or_default(),
        })
    }
}
