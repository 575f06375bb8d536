//! Reports that nodes write about themselves to the store, for people. They decide nothing (RFD
//! 0012, 2.3) except whether a volume may be deleted without force.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use api::{ByteRange, PoolName};
use cluster::store::Revision;
use engine::{CoreReport, MirrorReport, VolumeReport};
use mirror::{MirrorStatus, UnreadableData};
use peer::NodeId;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use uuid::Uuid;

use crate::not_serving::{NameLookup, loss_text, next_step_hint, reason_text};
use crate::orphan_images::UnservedImage;

/// Prefix of the keys of reports.
pub const REPORTS: &str = "reports/";

/// Prefix of the keys of report requests.
pub const REPORT_REQUESTS: &str = "questions/";

/// The window in which the rate of a resync is measured.
const RATE_WINDOW: Duration = Duration::from_secs(60);

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
    /// Why it does not, by [`reason_text`].
    #[serde(rename = "why")]
    pub not_serving_reason: Option<String>,
    /// The next step then, by [`next_step_hint`].
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

impl UnreadableEverywhere {
    fn of(lacks: Option<&UnreadableData>) -> Self {
        let Some(UnreadableData { ranges, bytes, .. }) = lacks else { return Self::default() };
        let range =
            |r: &std::ops::Range<u64>| ByteRange { start_bytes: r.start, bytes: r.end - r.start };
        Self { ranges: ranges.iter().map(range).collect(), bytes: *bytes }
    }
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

/// Samples of the progress of resyncs.
#[derive(Debug, Default)]
pub struct ResyncProgress(HashMap<(Uuid, NodeId), (Instant, u64)>);

impl ResyncProgress {
    /// Records the progress of a resync, and returns how many seconds the rest will take.
    fn eta(&mut self, of: (Uuid, NodeId), done: u64, total: u64, now: Instant) -> Option<u64> {
        let (since, before) = *self.0.entry(of).or_insert((now, done));
        if before > done || now - since > RATE_WINDOW {
            self.0.insert(of, (now, done));
        }
        let (copied, millis) = (done.checked_sub(before)?, (now - since).as_millis());
        let rest = u128::from(total.saturating_sub(done));
        let left = rest.checked_mul(millis)?.checked_div(u128::from(copied))? / 1000;
        u64::try_from(left).ok().filter(|_| millis > 0)
    }

    /// The mirrors of this node, for its report.
    pub fn report_mirrors(
        &mut self,
        cores: &[CoreReport],
        names: &impl NameLookup,
        now: Instant,
    ) -> BTreeMap<Uuid, ReportedMirror> {
        let volumes = cores.iter().flat_map(|core| &core.volumes);
        let mirrors = volumes
            .filter_map(|v| Some((v.id, self.report_mirror(v, v.mirror.as_ref()?, now, names))));
        mirrors.collect()
    }

    fn report_mirror(
        &mut self,
        report: &VolumeReport,
        mirror: &MirrorReport,
        now: Instant,
        names: &impl NameLookup,
    ) -> ReportedMirror {
        let volume = report.id;
        let MirrorStatus {
            not_serving: why,
            resyncs,
            unreadable_data: unreadable,
            leg_error: refused,
            newer_replicas: newer,
            ..
        } = &mirror.status;
        let resyncs = resyncs.iter().map(|&(node, done_bytes, total_bytes)| {
            let lacks = unreadable.iter().find(|(of, _)| *of == node).map(|(_, lacks)| lacks);
            let is_blocked = lacks.is_some_and(|lacks| lacks.blocks_admission);
            let eta_s = self.eta((volume, node), done_bytes, total_bytes, now);
            // These blocks become readable only when a client writes them.
            let (eta_s, unreadable) =
                (eta_s.filter(|_| !is_blocked), UnreadableEverywhere::of(lacks));
            ResyncReport { node: node.0, done_bytes, total_bytes, eta_s, unreadable }
        });
        let resyncs = resyncs.collect();
        let named = |node| names.name_of_node(node);
        let next = why.as_ref().and_then(|why| next_step_hint(why, names, volume));
        let MirrorStatus { linked, failed_resyncs, .. } = &mirror.status;
        ReportedMirror {
            serves: why.is_none() && report.reservations_error.is_none(),
            resyncs,
            not_serving_reason: why.as_ref().map(|why| reason_text(why, &named)),
            next_step: next,
            disk_error: refused.map(|error| error.to_string()),
            full: mirror.status.is_full,
            image_lost: mirror.status.leg_loss.map(|loss| loss_text(loss).to_owned()),
            failed_reads: mirror.status.read_errors,
            reservations_error: report.reservations_error.map(|error| error.to_string()),
            peers_with_session: linked.iter().map(|node| node.0).collect(),
            failed_resyncs: failed_resyncs
                .iter()
                .map(|(n, why)| (n.0, (*why).to_owned()))
                .collect(),
            newer_replicas: newer.iter().map(|node| node.0).collect(),
            missing_replica: names.missing_replica(volume),
        }
    }
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
    fn the_rest_is_told_by_the_rate_of_the_last_minute() {
        let mut progress = ResyncProgress::default();
        let of = (Uuid::nil(), NodeId(1));
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        assert_eq!(progress.eta(of, 0, 1000, at(0)), None, "nothing is known yet");
        assert_eq!(progress.eta(of, 100, 1000, at(10)), Some(90));
        assert_eq!(progress.eta(of, 700, 1000, at(70)), Some(30));
        assert_eq!(progress.eta(of, 700, 1000, at(80)), None, "it stands still");
        assert_eq!(progress.eta(of, 20, 1000, at(90)), None, "it began again");
    }

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
