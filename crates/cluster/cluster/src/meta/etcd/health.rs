//! How the members of the etcd cluster are, each as it says itself.

use futures_util::future::join_all;

use super::pool::{self, Asked, Failure};
use super::wire::{Empty, MemberListRequest, MemberListResponse, StatusResponse};
use super::{Etcd, MemberInfo};

/// What a member says when it is asked how it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberAnswer {
    /// It runs.
    Runs {
        /// The leader it knows.
        leader: Option<u64>,
        /// What it has raised an alarm for.
        alarms: Vec<String>,
    },
    /// It does not answer.
    Silent {
        /// Why not, as it was seen from here.
        why: String,
    },
    /// Nothing: it has told no address, or none where this node can ask.
    NotAsked,
}

/// A member and how it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberHealth {
    /// The member.
    pub member: MemberInfo,
    /// What it says.
    pub answer: MemberAnswer,
}

/// What came of asking at an address.
type Asking = (String, Result<StatusResponse, Failure>);

impl Etcd {
    /// Asks each member how it is, all at once; `known` are the members of the last time, in case that
    /// nobody says who there is. Takes a try for each member, and one more.
    ///
    /// `everywhere`: at all addresses that members tell, too. Those of somebody else's etcd may be good
    /// for its own machines only.
    pub async fn health(&self, known: &[MemberHealth], everywhere: bool) -> Vec<MemberHealth> {
        let members = self.members_without_leader().await;
        let members =
            members.unwrap_or_else(|| known.iter().map(|known| known.member.clone()).collect());
        let mut urls = self.0.pool.urls();
        if everywhere {
            urls.extend(members.iter().flat_map(|m| m.client_urls.iter().cloned()));
        }
        urls.sort();
        urls.dedup();
        let ask = |url: String| async move {
            let path = "/etcdserverpb.Maintenance/Status";
            let answer = self.0.pool.ask_at::<_, StatusResponse>(&url, path, Empty {}).await;
            (url, answer)
        };
        judge(members, &join_all(urls.into_iter().map(ask)).await)
    }

    /// The members as anybody of them knows them, who may have no leader. `None` if nobody answers.
    async fn members_without_leader(&self) -> Option<Vec<MemberInfo>> {
        let path = "/etcdserverpb.Cluster/MemberList";
        let request = MemberListRequest { linearizable: false };
        let list = |channel| pool::local::<_, MemberListResponse>(channel, path, request.clone());
        let answer = self.0.pool.try_each(Asked::Freely, list).await.ok()?;
        Some(answer.members.into_iter().map(Into::into).collect())
    }
}

/// Whose answers these are.
fn judge(mut members: Vec<MemberInfo>, asked: &[Asking]) -> Vec<MemberHealth> {
    if members.is_empty() {
        // Nobody has ever said who there is: as many as there are addresses.
        members.extend(asked.iter().map(|(url, answer)| MemberInfo {
            id: answer.as_ref().map_or(0, id),
            name: url.clone(),
            peer_urls: Vec::new(),
            client_urls: vec![url.clone()],
            is_learner: false,
        }));
    }
    let judged = members
        .into_iter()
        .map(|member| MemberHealth { answer: answer_of(&member, asked), member });
    judged.collect()
}

fn answer_of(member: &MemberInfo, asked: &[Asking]) -> MemberAnswer {
    // An address may lead to another one than it says.
    let own = asked.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    if let Some(status) = own.into_iter().find(|status| id(status) == member.id) {
        let alarms = status.errors.iter().filter(|e| e.contains("alarm:"));
        let leader = Some(status.leader).filter(|&id| id != 0);
        return MemberAnswer::Runs { leader, alarms: alarms.cloned().collect() };
    }
    let same = |a: &str, b: &str| a.trim_end_matches('/') == b.trim_end_matches('/');
    let theirs = asked.iter().filter(|(url, _)| member.client_urls.iter().any(|m| same(m, url)));
    let whys: Vec<_> = theirs
        .map(|(url, answer)| match answer {
            Err(Failure::Unreachable(why)) => Some(format!("{url}: {why}")),
            // Somebody answers there, if not with how he is.
            _ => None,
        })
        .collect();
    match whys.into_iter().collect::<Option<Vec<_>>>() {
        Some(whys) if !whys.is_empty() => MemberAnswer::Silent { why: whys.join(", ") },
        _ => MemberAnswer::NotAsked,
    }
}

fn id(status: &StatusResponse) -> u64 {
    status.header.as_ref().map_or(0, |header| header.member_id)
}

#[cfg(test)]
mod tests {
    use super::super::wire::Header;
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

    fn runs(url: &str, id: u64, leader: u64) -> Asking {
        let header = Some(Header { member_id: id, ..Header::default() });
        let errors = vec!["etcdserver: no leader".into(), "memberID:7 alarm:NOSPACE ".into()];
        (url.into(), Ok(StatusResponse { header, leader, errors, ..StatusResponse::default() }))
    }

    fn fails(url: &str) -> Asking {
        (url.into(), Err(Failure::Unreachable("refused".into())))
    }

    fn answers(members: Vec<MemberInfo>, asked: &[Asking]) -> Vec<MemberAnswer> {
        judge(members, asked).into_iter().map(|health| health.answer).collect()
    }

    #[test]
    fn a_member_is_as_it_says_wherever_it_was_asked() {
        let leads = |leader| MemberAnswer::Runs {
            leader,
            alarms: vec!["memberID:7 alarm:NOSPACE ".into()],
        };
        let silent = MemberAnswer::Silent { why: "http://c:1: refused".into() };
        let members = vec![
            member(1, &["http://a:1"]),
            member(2, &["http://localhost:1"]),
            member(3, &["http://c:1/"]),
        ];
        let asked = [runs("http://a:1", 1, 1), runs("http://b:1", 2, 0), fails("http://c:1")];
        assert_eq!(answers(members, &asked), [leads(Some(1)), leads(None), silent]);
    }

    #[test]
    fn who_was_not_asked_is_not_said_to_be_down() {
        let asked = [runs("http://a:1", 1, 1), fails("http://b:1")];
        // It has not started; its address is another member's; one of two addresses is not for here.
        let members = vec![member(2, &[]), member(3, &["http://a:1"]), member(4, &["http://z:1"])];
        assert!(answers(members, &asked).iter().all(|a| *a == MemberAnswer::NotAsked));
        let refused =
            [("http://b:1".to_owned(), Err(Failure::Refused("permission denied".into())))];
        assert_eq!(answers(vec![member(2, &["http://b:1"])], &refused), [MemberAnswer::NotAsked]);
    }

    #[test]
    fn without_a_list_the_addresses_stand_for_members() {
        let judged = judge(Vec::new(), &[runs("http://a:1", 1, 0), fails("http://b:1")]);
        let names: Vec<_> = judged.iter().map(|health| health.member.name.as_str()).collect();
        assert_eq!(names, ["http://a:1", "http://b:1"]);
        assert!(matches!(judged[0].answer, MemberAnswer::Runs { leader: None, .. }));
        assert!(matches!(judged[1].answer, MemberAnswer::Silent { .. }));
    }
}
