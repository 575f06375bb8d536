//! Reports that nodes write about themselves to the store, for people. They decide nothing (RFD
//! 0012, 2.3) except whether a volume may be deleted without force.

use std::collections::BTreeMap;

use api::{ByteRange, PoolName};
use cluster::store::Revision;
use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::orphan_images::UnservedImage;

/// Prefix of the keys of reports.
pub const REPORTS: &str = "reports/";

/// Prefix of the keys of report requests.
pub const REPORT_REQUESTS: &str = "questions/";

/// The report of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Size of the file system of its data directory, in bytes.
    #[serde(rename = "bytes")]
    pub data_dir_bytes: u64,
    /// Free space in it, in bytes.
    #[serde(rename = "free_bytes")]
    pub data_dir_free_bytes: u64,
    /// Its mirrors.
    pub mirrors: BTreeMap<Uuid, ReportedMirror>,
    /// Volumes that it has a replica of and cannot open, and why.
    #[serde(default)]
    #[serde(rename = "broken")]
    pub open_errors: BTreeMap<Uuid, String>,
    /// Numbers of initiator sessions, for volumes that have any.
    #[serde(default)]
    pub sessions: BTreeMap<Uuid, u32>,
    /// By how many seconds the clocks of other nodes lag behind its own, where that is much.
    #[serde(default)]
    #[serde(rename = "behind")]
    pub clocks_behind_s: BTreeMap<u16, u64>,
    /// Why the store member that it runs does not stay up.
    #[serde(default)]
    #[serde(rename = "member_trouble")]
    pub store_member_error: Option<String>,
    /// Its open pools, with the bytes that volumes may still allocate in each.
    #[serde(default)]
    pub pools: BTreeMap<PoolName, u64>,
    /// Images that are not served there.
    #[serde(default)]
    pub images: Vec<UnservedImage>,
    /// After how many seconds it replaces replicas of down nodes; 0 for never.
    #[serde(default)]
    pub repair_after_s: u64,
    /// The revision of the last report request before this report was made.
    #[serde(default)]
    #[serde(rename = "asked")]
    pub answers_request: u64,
}

/// A mirror as one of its nodes sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedMirror {
    /// Whether it serves there.
    pub serves: bool,
    /// Why it does not, by [`reason_text`](crate::not_serving::reason_text).
    #[serde(rename = "why")]
    pub not_serving_reason: Option<String>,
    /// The next step then, by `next_step_hint` of `not_serving`.
    #[serde(default)]
    #[serde(rename = "next")]
    pub next_step: Option<String>,
    /// The last error of its disk, if it has not served since.
    #[serde(default)]
    #[serde(rename = "refused")]
    pub disk_error: Option<String>,
    /// Whether a write failed for lack of space within the last minute, and space is still short.
    #[serde(default)]
    pub full: bool,
    /// Why its image is not used any more until it is reopened.
    #[serde(default)]
    #[serde(rename = "lost")]
    pub image_lost: Option<String>,
    /// Reads that failed on its disk in the last hour.
    #[serde(default)]
    pub failed_reads: u64,
    /// Why its reservations cannot be read: no initiator is served there.
    #[serde(default)]
    #[serde(rename = "reservations")]
    pub reservations_error: Option<String>,
    /// Numbers of the nodes with which it has a session.
    #[serde(default)]
    #[serde(rename = "linked")]
    pub peers_with_session: Vec<u16>,
    /// By node number: why the last resync from here to the replica there failed.
    #[serde(default)]
    pub failed_resyncs: BTreeMap<u16, String>,
    /// Nodes whose replicas are resynced from there.
    pub resyncs: Vec<ResyncReport>,
    /// On the primary: why a replica that the volume lacks is not being made.
    #[serde(default)]
    #[serde(rename = "missing")]
    pub missing_replica: Option<MissingReplica>,
    /// Numbers of nodes whose replicas are newer than the one there, and are not overwritten.
    #[serde(default)]
    #[serde(rename = "newer")]
    pub newer_replicas: Vec<u16>,
}

/// Why a missing replica is not being made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingReplica {
    /// The reason, or when the repair starts.
    pub why: String,
    /// The next step, if there is a special one.
    #[serde(rename = "next")]
    pub next_step: Option<String>,
}

/// Data that a replica lacks and that no other replica can read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadableEverywhere {
    /// The first ranges of bytes.
    pub ranges: Vec<ByteRange>,
    /// Bytes in total.
    pub bytes: u64,
}

/// A replica that is being resynced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResyncReport {
    /// Number of its node.
    pub node: u16,
    /// Bytes copied.
    pub done_bytes: u64,
    /// Bytes to copy in all.
    pub total_bytes: u64,
    /// Seconds until it is in sync, by the rate of the last minute.
    pub eta_s: Option<u64>,
    /// Blocks that no replica can read.
    #[serde(default)]
    pub unreadable: UnreadableEverywhere,
}

/// Key of a node's report.
pub fn report_key(node: NodeId) -> String {
    format!("{REPORTS}{node}")
}

/// Key of a report request to a node.
pub fn report_request_key(node: NodeId) -> String {
    format!("{REPORT_REQUESTS}{node}")
}

/// Whether one of these nodes serves the volume, by `reports` that answer the request
/// `answers_request`. `None` as long as a node that might serve it has not answered.
pub fn served_by_reports(
    reports: &BTreeMap<NodeId, NodeReport>,
    nodes: &[NodeId],
    volume: Uuid,
    request: Revision,
) -> Option<bool> {
    let answer =
        |node: &NodeId| reports.get(node).filter(|report| report.answers_request >= request.0);
    let serves = |node: &NodeId| Some(answer(node)?.mirrors.get(&volume)?.serves);
    if nodes.iter().any(|node| serves(node) == Some(true)) {
        return Some(true);
    }
    nodes.iter().all(|node| answer(node).is_some()).then_some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    #[test]
    fn only_what_was_said_since_the_question_counts_as_served() {
        let volume = Uuid::from_u128(7);
        let report = |asked, serves: Option<bool>| NodeReport {
            answers_request: asked,
            mirrors: serves
                .map(|serves| (volume, ReportedMirror { serves, ..ReportedMirror::default() }))
                .into_iter()
                .collect(),
            ..NodeReport::default()
        };
        let look = |b, c| served_by_reports(&[(B, b), (C, c)].into(), &[B, C], volume, Revision(5));
        assert_eq!(look(report(5, Some(true)), report(4, None)), Some(true));
        assert_eq!(
            look(report(4, Some(true)), report(5, Some(false))),
            None,
            "B may serve no more"
        );
        assert_eq!(look(report(5, Some(false)), report(6, None)), Some(false));
        assert_eq!(served_by_reports(&BTreeMap::new(), &[], volume, Revision(5)), Some(false));
    }
}
