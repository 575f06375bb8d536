//! What nodes tell each other of themselves through the store, for people to see: nothing is
//! decided by it (RFD 0012, 2.3) but whether a volume may be deleted without force.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use api::{PoolName, UnreadableBytes};
use mirror::{Status, Unreadable};
use peer::NodeId;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use uuid::Uuid;

use super::images::HeldImage;
use super::why::Names;
use crate::engine::{CoreReport, MirrorReport, VolumeReport};
use crate::meta::{Change, Expect, Meta, MetaError};

/// What keys of reports begin with.
pub(super) const REPORTS: &str = "reports/";

/// What keys of questions begin with.
pub(super) const QUESTIONS: &str = "questions/";

/// How far back the rate of a resync is looked for.
const RATE_OVER: Duration = Duration::from_secs(60);

/// What a node tells of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Size of the file system of its data directory, in bytes.
    pub bytes: u64,
    /// Free space in it, in bytes.
    pub free_bytes: u64,
    /// Its mirrors.
    pub mirrors: BTreeMap<Uuid, SeenMirror>,
    /// Volumes that it keeps a copy of and cannot open, and why not.
    #[serde(default)]
    pub broken: BTreeMap<Uuid, String>,
    /// Sessions of initiators, of volumes that have any.
    #[serde(default)]
    pub sessions: BTreeMap<Uuid, u32>,
    /// By how many seconds the clocks of other nodes are behind its own, where that is much.
    #[serde(default)]
    pub behind: BTreeMap<u16, u64>,
    /// Why the store's member that it runs does not keep running.
    #[serde(default)]
    pub member_trouble: Option<String>,
    /// Its pools that are open, and how many bytes volumes may still have of each.
    #[serde(default)]
    pub pools: BTreeMap<PoolName, u64>,
    /// Images that are not served there.
    #[serde(default)]
    pub images: Vec<HeldImage>,
    /// After how many seconds it makes copies of nodes that are gone; 0 for never.
    #[serde(default)]
    pub repair_after_s: u64,
    /// The question, by the commit that put it, after which it has looked at all of this.
    #[serde(default)]
    pub asked: u64,
}

/// A mirror as one of its nodes sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenMirror {
    /// Whether it serves there.
    pub serves: bool,
    /// Why it does not, as [`super::why::sentence`] has it.
    pub why: Option<String>,
    /// The next step then, as [`super::why::next_step`] has it.
    #[serde(default)]
    pub next: Option<String>,
    /// What its disk has refused, if it has not served since.
    #[serde(default)]
    pub refused: Option<String>,
    /// Whether it has had no space for a write within the last minute, and has no room yet.
    #[serde(default)]
    pub full: bool,
    /// Why nothing is read or written there any more before its image is opened anew.
    #[serde(default)]
    pub lost: Option<String>,
    /// Reads that its disk has failed in the last hour.
    #[serde(default)]
    pub failed_reads: u64,
    /// Why its reservations cannot be read: no initiator is served there.
    #[serde(default)]
    pub reservations: Option<String>,
    /// Numbers of the nodes that it has a session with.
    #[serde(default)]
    pub linked: Vec<u16>,
    /// By number of the node: why the last resync from here to a copy there has failed.
    #[serde(default)]
    pub failed_resyncs: BTreeMap<u16, String>,
    /// Nodes whose copies are brought in sync from there.
    pub resyncs: Vec<Resync>,
    /// What becomes of a copy that the volume lacks, if its writes are put in order there.
    #[serde(default)]
    pub missing: Option<MissingCopy>,
    /// Numbers of nodes whose copies are newer than the one there, and are not overwritten.
    #[serde(default)]
    pub newer: Vec<u16>,
}

/// Why no copy is made in place of one that is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingCopy {
    /// Why not, or from when on.
    pub why: String,
    /// What helps, if that is something particular.
    pub next: Option<String>,
}

/// What a copy lacks that no other can read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unread {
    /// The first ranges of bytes.
    pub ranges: Vec<UnreadableBytes>,
    /// Bytes of all of it.
    pub bytes: u64,
}

impl Unread {
    fn of(lacks: Option<&Unreadable>) -> Self {
        let Some(Unreadable { ranges, bytes, .. }) = lacks else { return Self::default() };
        let range = |r: &std::ops::Range<u64>| UnreadableBytes {
            start_bytes: r.start,
            bytes: r.end - r.start,
        };
        Self { ranges: ranges.iter().map(range).collect(), bytes: *bytes }
    }
}

/// A copy that is being brought in sync.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resync {
    /// Number of its node.
    pub node: u16,
    /// Bytes copied.
    pub done_bytes: u64,
    /// Bytes to copy in all.
    pub total_bytes: u64,
    /// Seconds until it is in sync, by the rate of the last minute.
    pub eta_s: Option<u64>,
    /// What no copy can read of it.
    #[serde(default)]
    pub unreadable: Unread,
}

/// Key of a node's report.
pub(super) fn key(node: NodeId) -> String {
    format!("{REPORTS}{node}")
}

/// Removes what a node told in an earlier life: nobody is to take that for what is.
///
/// # Errors
/// [`MetaError`].
pub(crate) async fn forget(meta: &dyn Meta, node: NodeId) -> Result<(), MetaError> {
    let key = key(node);
    let Some(found) = meta.get(&key).await? else { return Ok(()) };
    let change = Change { key, expect: Expect::At(found.revision), value: None };
    meta.commit(vec![change]).await.map(drop)
}

/// Key of what a node is asked: to look and to report at once.
pub(super) fn question_key(node: NodeId) -> String {
    format!("{QUESTIONS}{node}")
}

/// How far resyncs were when they were looked at.
#[derive(Debug, Default)]
pub(super) struct Progress(HashMap<(Uuid, NodeId), (Instant, u64)>);

impl Progress {
    /// Notes how far a resync is, and tells how long the rest will take.
    fn eta(&mut self, of: (Uuid, NodeId), done: u64, total: u64, now: Instant) -> Option<u64> {
        let (since, before) = *self.0.entry(of).or_insert((now, done));
        if before > done || now - since > RATE_OVER {
            self.0.insert(of, (now, done));
        }
        let (copied, millis) = (done.checked_sub(before)?, (now - since).as_millis());
        let rest = u128::from(total.saturating_sub(done));
        let left = rest.checked_mul(millis)?.checked_div(u128::from(copied))? / 1000;
        u64::try_from(left).ok().filter(|_| millis > 0)
    }

    /// What the mirrors of this node tell.
    pub(super) fn mirrors(
        &mut self,
        cores: &[CoreReport],
        names: &impl Names,
    ) -> BTreeMap<Uuid, SeenMirror> {
        let now = Instant::now();
        let volumes = cores.iter().flat_map(|core| &core.volumes);
        let seen =
            volumes.filter_map(|v| Some((v.id, self.mirror(v, v.mirror.as_ref()?, now, names))));
        seen.collect()
    }

    fn mirror(
        &mut self,
        report: &VolumeReport,
        mirror: &MirrorReport,
        now: Instant,
        names: &impl Names,
    ) -> SeenMirror {
        let volume = report.id;
        let Status { why, resyncs, unreadable, refused, newer, .. } = &mirror.status;
        let resyncs = resyncs.iter().map(|&(node, done_bytes, total_bytes)| {
            let lacks = unreadable.iter().find(|(of, _)| *of == node).map(|(_, lacks)| lacks);
            let waits = lacks.is_some_and(|lacks| lacks.waited_for);
            let eta_s = self.eta((volume, node), done_bytes, total_bytes, now);
            // What it waits for comes when somebody writes.
            let (eta_s, unreadable) = (eta_s.filter(|_| !waits), Unread::of(lacks));
            Resync { node: node.0, done_bytes, total_bytes, eta_s, unreadable }
        });
        let resyncs = resyncs.collect();
        let named = |node| names.node(node);
        let next = why.as_ref().and_then(|why| super::why::next_step(why, names, volume));
        let Status { linked, failed_resyncs, .. } = &mirror.status;
        SeenMirror {
            serves: why.is_none() && report.reservations.is_none(),
            resyncs,
            why: why.as_ref().map(|why| super::why::sentence(why, &named)),
            next,
            refused: refused.map(|error| error.to_string()),
            full: mirror.status.full,
            lost: mirror.status.lost.map(|loss| super::why::loss(loss).to_owned()),
            failed_reads: mirror.status.failed_reads,
            reservations: report.reservations.map(|error| error.to_string()),
            linked: linked.iter().map(|node| node.0).collect(),
            failed_resyncs: failed_resyncs
                .iter()
                .map(|(n, why)| (n.0, (*why).to_owned()))
                .collect(),
            newer: newer.iter().map(|node| node.0).collect(),
            missing: names.missing(volume),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_told_by_the_rate_of_the_last_minute() {
        let mut progress = Progress::default();
        let of = (Uuid::nil(), NodeId(1));
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        assert_eq!(progress.eta(of, 0, 1000, at(0)), None, "nothing is known yet");
        assert_eq!(progress.eta(of, 100, 1000, at(10)), Some(90));
        assert_eq!(progress.eta(of, 700, 1000, at(70)), Some(30));
        assert_eq!(progress.eta(of, 700, 1000, at(80)), None, "it stands still");
        assert_eq!(progress.eta(of, 20, 1000, at(90)), None, "it began again");
    }
}
