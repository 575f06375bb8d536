//! Health of the etcd cluster's members, as each reports it.

use futures_util::future::join_all;

use super::connections::{self, RetryPolicy, RpcError};
use super::rpc::{Empty, MemberListRequest, MemberListResponse, StatusResponse};
use super::{EtcdStore, MemberInfo};

/// A member's response to a status request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberResponse {
    /// It runs.
    Running {
        /// The leader it knows.
        leader: Option<u64>,
        /// Its active alarms.
        alarms: Vec<String>,
    },
    /// It does not answer.
    Unreachable {
        /// The errors seen here.
        why: String,
    },
    /// Not asked: it has no address, or none that this node may use.
    NotQueried,
}

/// A member and its health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberHealth {
    /// The member.
    pub member: MemberInfo,
    /// Its response.
    pub response: MemberResponse,
}

/// The result of a status request to one URL.
type StatusReply = (String, Result<StatusResponse, RpcError>);

impl EtcdStore {
    /// Asks all members for their status at once; `known` are the members of the last call, in case
    /// none lists them now. Takes two attempts' time.
    ///
    /// `everywhere`: also ask at the addresses that members announce. Those of an external etcd may
    /// be valid only on its own machines.
    pub async fn health(&self, known: &[MemberHealth], everywhere: bool) -> Vec<MemberHealth> {
        let members = self.local_member_list().await;
        let members =
            members.unwrap_or_else(|| known.iter().map(|known| known.member.clone()).collect());
        let mut urls = self.0.connections.urls();
        if everywhere {
            urls.extend(members.iter().flat_map(|m| m.client_urls.iter().cloned()));
        }
        urls.sort();
        urls.dedup();
        let query = |url: String| async move {
            let path = "/etcdserverpb.Maintenance/Status";
            let answer =
                self.0.connections.call_at::<_, StatusResponse>(&url, path, Empty {}).await;
            (url, answer)
        };
        assign_responses(members, &join_all(urls.into_iter().map(query)).await)
    }

    /// The members as any of them knows them, with or without a leader. `None` if none answers.
    async fn local_member_list(&self) -> Option<Vec<MemberInfo>> {
        let path = "/etcdserverpb.Cluster/MemberList";
        let request = MemberListRequest { linearizable: false };
        let list = |channel| {
            connections::call_without_leader::<_, MemberListResponse>(
                channel,
                path,
                request.clone(),
            )
        };
        let answer = self.0.connections.try_members(RetryPolicy::Idempotent, list).await.ok()?;
        Some(answer.members.into_iter().map(Into::into).collect())
    }
}

/// Assigns the responses to the members.
fn assign_responses(mut members: Vec<MemberInfo>, replies: &[StatusReply]) -> Vec<MemberHealth> {
    if members.is_empty() {
        // The members were never listed: assume one per address.
        members.extend(replies.iter().map(|(url, answer)| MemberInfo {
            id: answer.as_ref().map_or(0, member_id),
            name: url.clone(),
            peer_urls: Vec::new(),
            client_urls: vec![url.clone()],
            is_learner: false,
        }));
    }
    let healths = members
        .into_iter()
        .map(|member| MemberHealth { response: response_of(&member, replies), member });
    healths.collect()
}

fn response_of(member: &MemberInfo, replies: &[StatusReply]) -> MemberResponse {
    // Match by member id: an address may lead to another member.
    let own = replies.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    if let Some(status) = own.into_iter().find(|status| member_id(status) == member.id) {
        let alarms = status.errors.iter().filter(|e| e.contains("alarm:"));
        let leader = Some(status.leader).filter(|&id| id != 0);
        return MemberResponse::Running { leader, alarms: alarms.cloned().collect() };
    }
    let same = |a: &str, b: &str| a.trim_end_matches('/') == b.trim_end_matches('/');
    let own_replies =
        replies.iter().filter(|(url, _)| member.client_urls.iter().any(|m| same(m, url)));
    let whys: Vec<_> = own_replies
        .map(|(url, answer)| match answer {
            Err(RpcError::Unreachable(why)) => Some(format!("{url}: {why}")),
            // The member answers, if not with its status.
            _ => None,
        })
        .collect();
    match whys.into_iter().collect::<Option<Vec<_>>>() {
        Some(whys) if !whys.is_empty() => MemberResponse::Unreachable { why: whys.join(", ") },
        _ => MemberResponse::NotQueried,
    }
}

fn member_id(status: &StatusResponse) -> u64 {
    status.header.as_ref().map_or(0, |header| header.member_id)
}

#[cfg(test)]
mod tests {
    use super::super::rpc::ResponseHeader;
    use super::*;

    fn member(id: u64, urls: &[&str]) -> MemberInfo {
        MemberInfo {
            id,
            name: format!("m{id}"),
            peer_urls: Vec::new(),
            client_urls: urls.iter().map(|&url| url.into()).collect(),
            is_learner: false,
        }
    }

    fn runs(url: &str, id: u64, leader: u64) -> StatusReply {
        let header = Some(ResponseHeader { member_id: id, ..ResponseHeader::default() });
        let errors = vec!["etcdserver: no leader".into(), "memberID:7 alarm:NOSPACE ".into()];
        (url.into(), Ok(StatusResponse { header, leader, errors, ..StatusResponse::default() }))
    }

    fn fails(url: &str) -> StatusReply {
        (url.into(), Err(RpcError::Unreachable("refused".into())))
    }

    fn answers(members: Vec<MemberInfo>, replies: &[StatusReply]) -> Vec<MemberResponse> {
        assign_responses(members, replies).into_iter().map(|health| health.response).collect()
    }

    #[test]
    fn a_member_is_as_it_says_wherever_it_was_asked() {
        let leads = |leader| MemberResponse::Running {
            leader,
            alarms: vec!["memberID:7 alarm:NOSPACE ".into()],
        };
        let silent = MemberResponse::Unreachable { why: "http://c:1: refused".into() };
        let members = vec![
            member(1, &["http://a:1"]),
            member(2, &["http://localhost:1"]),
            member(3, &["http://c:1/"]),
        ];
        let replies = [runs("http://a:1", 1, 1), runs("http://b:1", 2, 0), fails("http://c:1")];
        assert_eq!(answers(members, &replies), [leads(Some(1)), leads(None), silent]);
    }

    #[test]
    fn who_was_not_asked_is_not_said_to_be_down() {
        let replies = [runs("http://a:1", 1, 1), fails("http://b:1")];
        // One has not started; one has another member's address; of one only one address was asked.
        let members = vec![member(2, &[]), member(3, &["http://a:1"]), member(4, &["http://z:1"])];
        assert!(answers(members, &replies).iter().all(|a| *a == MemberResponse::NotQueried));
        let refused =
            [("http://b:1".to_owned(), Err(RpcError::Refused("permission denied".into())))];
        assert_eq!(
            answers(vec![member(2, &["http://b:1"])], &refused),
            [MemberResponse::NotQueried]
        );
    }

    #[test]
    fn without_a_list_the_addresses_stand_for_members() {
        let judged = assign_responses(Vec::new(), &[runs("http://a:1", 1, 0), fails("http://b:1")]);
        let names: Vec<_> = judged.iter().map(|health| health.member.name.as_str()).collect();
        assert_eq!(names, ["http://a:1", "http://b:1"]);
        assert!(matches!(judged[0].response, MemberResponse::Running { leader: None, .. }));
        assert!(matches!(judged[1].response, MemberResponse::Unreachable { .. }));
    }
}
