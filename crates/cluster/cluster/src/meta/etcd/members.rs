//! The members of the etcd cluster itself: who they are, how one joins and leaves.

use super::pool::Asked;
use super::wire::{
    Empty, MemberAddRequest, MemberAddResponse, MemberListRequest, MemberListResponse,
    MemberRequest, StatusResponse, WireMember,
};
use super::{Etcd, MetaError};

/// A member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// The number that etcd knows it by.
    pub id: u64,
    /// Its name; empty until it has started for the first time.
    pub name: String,
    /// Where the other members reach it.
    pub peer_urls: Vec<String>,
    /// Where clients reach it.
    pub client_urls: Vec<String>,
    /// Whether it only learns so far, and has no vote.
    pub is_learner: bool,
}

impl From<WireMember> for MemberInfo {
    fn from(m: WireMember) -> Self {
        let WireMember { id, name, peer_urls, client_urls, is_learner } = m;
        Self { id, name, peer_urls, client_urls, is_learner }
    }
}

/// What the member that was asked says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its number.
    pub id: u64,
    /// The cluster's number.
    pub cluster: u64,
    /// Its version of etcd.
    pub version: String,
    /// The leader it knows.
    pub leader: Option<u64>,
    /// Size of its database in bytes.
    pub db_bytes: u64,
}

impl Etcd {
    /// The members. Before etcd 3.5 they are as the member knows them that was asked.
    ///
    /// # Errors
    /// [`MetaError`].
    pub async fn members(&self) -> Result<Vec<MemberInfo>, MetaError> {
        let path = "/etcdserverpb.Cluster/MemberList";
        let request = MemberListRequest { linearizable: true };
        let answer = self.0.pool.ask::<_, MemberListResponse>(Asked::Freely, path, request).await;
        let answer = answer.map_err(|e| self.0.pool.error(e))?;
        Ok(answer.members.into_iter().map(Into::into).collect())
    }

    /// Makes room for one more, which can be reached at `peer_url`: it may start then.
    ///
    /// # Errors
    /// [`MetaError`]; after [`MetaError::Unknown`] the list of members tells.
    pub async fn add_member(
        &self,
        peer_url: &str,
        is_learner: bool,
    ) -> Result<MemberInfo, MetaError> {
        let path = "/etcdserverpb.Cluster/MemberAdd";
        let request = MemberAddRequest { peer_urls: vec![peer_url.to_owned()], is_learner };
        let answer = self.0.pool.ask::<_, MemberAddResponse>(Asked::Once, path, request).await;
        let answer = answer.map_err(|e| self.0.pool.error(e))?;
        Ok(answer.member.unwrap_or_default().into())
    }

    /// Removes a member. It stops.
    ///
    /// # Errors
    /// As [`Self::add_member`].
    pub async fn remove_member(&self, id: u64) -> Result<(), MetaError> {
        self.change("/etcdserverpb.Cluster/MemberRemove", id).await
    }

    /// Gives a learner its vote, once it has learnt enough.
    ///
    /// # Errors
    /// As [`Self::add_member`].
    pub async fn promote_member(&self, id: u64) -> Result<(), MetaError> {
        self.change("/etcdserverpb.Cluster/MemberPromote", id).await
    }

    async fn change(&self, path: &'static str, id: u64) -> Result<(), MetaError> {
        let done = self.0.pool.ask::<_, Empty>(Asked::Once, path, MemberRequest { id }).await;
        done.map(drop).map_err(|e| self.0.pool.error(e))
    }

    /// What the member says that is asked first; with one endpoint, that one.
    ///
    /// # Errors
    /// [`MetaError`].
    pub async fn member_status(&self) -> Result<MemberStatus, MetaError> {
        let path = "/etcdserverpb.Maintenance/Status";
        let answer = self.0.pool.ask::<_, StatusResponse>(Asked::Freely, path, Empty {}).await;
        let answer = answer.map_err(|e| self.0.pool.error(e))?;
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
