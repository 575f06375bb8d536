//! The progress of resyncs, and the mirrors of this node for its report.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use api::ByteRange;
use engine::{CoreReport, MirrorReport, VolumeReport};
use mirror::{MirrorStatus, UnreadableData};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use crate::not_serving::{NameLookup, loss_text, next_step_hint, reason_text};
use crate::report::{ReportedMirror, ResyncReport, UnreadableEverywhere};

/// The window in which the rate of a resync is measured.
const RATE_WINDOW: Duration = Duration::from_secs(60);

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
            let (eta_s, unreadable) = (eta_s.filter(|_| !is_blocked), unreadable_everywhere(lacks));
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

/// The data that a replica lacks and that no other replica can read.
fn unreadable_everywhere(lacks: Option<&UnreadableData>) -> UnreadableEverywhere {
    let Some(UnreadableData { ranges, bytes, .. }) = lacks else {
        return UnreadableEverywhere::default();
    };
    let range =
        |r: &std::ops::Range<u64>| ByteRange { start_bytes: r.start, bytes: r.end - r.start };
    UnreadableEverywhere { ranges: ranges.iter().map(range).collect(), bytes: *bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
