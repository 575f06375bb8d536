//! What a node of a cluster does now and then: it tells of itself, and sees to it that the right
//! nodes put writes in order.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::report::{self, NodeReport, Progress};
use super::{Control, clocks, repair, space};
use crate::engine::{CoreReport, Scope, VolumeReport};
use crate::meta::{Change, Expect, MetaError};
use crate::reconcile::Observed;
use crate::record::Stored;

/// How often.
const EVERY: Duration = Duration::from_secs(5);

/// A node that has just started lets others come back before it hands them anything.
const SETTLE: Duration = Duration::from_secs(60);

/// Pause after the first time that an image which was given up is opened again, and the longest,
const REOPEN_FIRST: Duration = Duration::from_secs(10);
const REOPEN_AT_MOST: Duration = Duration::from_secs(600);

/// and how long beyond that one has to last to be taken for mended.
const FORGIVEN: Duration = Duration::from_secs(600);

/// A volume whose writes this node puts in order.
#[derive(Clone, Debug)]
struct Led {
    volume: Uuid,
    /// The other nodes that are in sync and could lead.
    heirs: Vec<NodeId>,
    /// The one that an operator wants.
    prefer: Option<NodeId>,
}

impl Control {
    /// Does the chores for as long as the node runs.
    pub(super) async fn do_chores(self) {
        let (mut progress, mut told) = (Progress::default(), None);
        let (mut reopenings, mut repairs) = (Reopenings::default(), repair::Repairs::default());
        let mut questions = self.0.asked.subscribe();
        let mut looked = 0;
        loop {
            // Before it looks: what it tells is not older than the question.
            let asked = *questions.borrow_and_update();
            if asked != looked {
                self.look_around(false).await;
                looked = asked;
            }
            let cores = self.0.engine.report(Scope::All).await;
            // A core that does not tell may have sessions that nobody knows of.
            let asked = if cores.len() == self.0.engine.cores() { asked } else { 0 };
            let report = NodeReport { asked, ..self.own_report(&cores, &mut progress).await };
            if let Err(error) = self.tell(report, &mut told).await {
                tracing::debug!(%error, "others are not told of this node now");
            }
            self.reopen_lost(&cores, &mut reopenings);
            self.choose_leaders().await;
            self.keep_copies(&cores, &mut repairs).await;
            if self.is_drained() {
                self.heed_drain_everywhere().await;
            }
            // The control plane holds the sender: it changes, or time is up.
            let _ = tokio::time::timeout(EVERY, questions.changed()).await;
        }
    }

    /// Opens images again that were given up: their disks may answer by now. The others go on with their volumes, and
    /// nothing is taken for granted of what these images hold. Nobody waits for it: a disk that does not answer takes its
    /// time.
    fn reopen_lost(&self, cores: &[CoreReport], reopenings: &mut Reopenings) {
        let lost =
            cores.iter().flat_map(|core| &core.volumes).filter(|v| is_to_reopen(v, self.me()));
        let lost = lost.map(|v| v.id).collect();
        for id in reopenings.due(lost, Instant::now()) {
            let Ok(change) = Arc::clone(&self.0.changing).try_read_owned() else { return };
            let control = self.clone();
            tokio::spawn(async move {
                control.reopen(id).await;
                drop(change);
            });
        }
    }

    async fn reopen(&self, id: Uuid) {
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        // As it is now: it may have been opened again meanwhile.
        let reports = self.0.engine.report(Scope::One(id)).await;
        let mut volumes = reports.iter().flat_map(|core| &core.volumes);
        if volumes.any(|volume| volume.id == id && is_to_reopen(volume, self.me())) {
            let volume = self.volume_name(id);
            tracing::info!(volume, "its image was given up: it is opened again");
            self.close(id, false).await;
            self.settle_held(id).await;
        }
    }

    async fn own_report(&self, cores: &[CoreReport], progress: &mut Progress) -> NodeReport {
        let nothing: &[(Stored, Observed)] = &[];
        let space = space::look(self.me(), nothing, &self.0.settings.data_dir).await;
        let (bytes, free_bytes) = space.data_dir.unwrap_or_default();
        let mirrors = progress.mirrors(cores, self);
        let broken = self.broken_here();
        let sessions = self.session_counts(cores);
        let part = self.0.part.as_ref();
        let behind = part
            .map(|part| clocks::behind(&part.clocks_behind(), &part.health()))
            .unwrap_or_default();
        let member_trouble = part.and_then(|part| part.member_trouble());
        let pools = self.0.engine.pool_reports().await;
        let pools = pools.into_iter().map(|(name, report)| (name, report.free_bytes)).collect();
        let images = self.told_images();
        NodeReport {
            bytes,
            free_bytes,
            mirrors,
            broken,
            sessions,
            behind,
            member_trouble,
            pools,
            images,
            repair_after_s: self.0.settings.cluster.repair_after.map_or(0, |after| after.as_secs()),
            asked: 0,
        }
    }

    /// The volumes that cannot be opened here, and why not.
    pub(super) fn broken_here(&self) -> BTreeMap<Uuid, String> {
        let all = self.0.state.all();
        let broken = all.into_iter().filter_map(|(stored, observed)| match observed {
            Observed::Broken { reason } | Observed::Stuck { reason } => {
                Some((stored.record.id, reason))
            }
            _ => None,
        });
        broken.collect()
    }

    /// Writes the report, if it says something new.
    async fn tell(
        &self,
        report: NodeReport,
        told: &mut Option<NodeReport>,
    ) -> Result<(), MetaError> {
        if told.as_ref() == Some(&report) {
            return Ok(());
        }
        let key = report::key(self.me());
        let found = self.0.meta.get(&key).await?;
        let expect = found.map_or(Expect::Absent, |e| Expect::At(e.revision));
        let value = serde_json::to_vec(&report).expect("names and numbers always serialise");
        let change = Change { key, expect, value: Some(value) };
        self.0.meta.commit(vec![change]).await?;
        *told = Some(report);
        Ok(())
    }

    /// What the nodes have told last.
    ///
    /// # Errors
    /// [`MetaError`].
    pub(super) async fn reports(&self) -> Result<BTreeMap<NodeId, NodeReport>, MetaError> {
        let (entries, _) = self.0.meta.list(report::REPORTS).await?;
        let node = |key: &str| key.strip_prefix(report::REPORTS)?.parse().ok().map(NodeId);
        let mut read = self.0.reports.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = BTreeMap::new();
        for (node, entry) in entries.iter().filter_map(|e| Some((node(&e.key)?, e))) {
            // Long, and asked for more often than they change.
            let report = match read.remove(&node).filter(|(at, _)| *at == entry.revision) {
                Some((_, report)) => report,
                None => match serde_json::from_slice(&entry.value) {
                    Ok(report) => report,
                    Err(_) => continue,
                },
            };
            all.insert(node, (entry.revision, report));
        }
        read.clone_from(&all);
        Ok(all.into_iter().map(|(node, (_, report))| (node, report)).collect())
    }

    /// Hands one volume on, if somebody wants that or another node leads far fewer.
    pub(super) async fn choose_leaders(&self) {
        let Some(membership) = self.membership() else { return };
        let me = membership.node;
        let fit = |node: NodeId| {
            let nodes = membership.nodes.borrow();
            nodes.get(&node).is_some_and(|n| n.alive && !n.record.drained)
        };
        let mut loads = BTreeMap::<NodeId, usize>::new();
        let mut led = Vec::new();
        for volume in self.0.state.open(me) {
            let Some((mirror, _)) = volume.mirror else { continue };
            *loads.entry(mirror.primary).or_default() += 1;
            if mirror.primary == me {
                let heirs = mirror.others(me).map(|m| m.node).filter(|n| fit(*n)).collect();
                let (volume, prefer) = (volume.stored.record.id, volume.stored.record.prefer);
                led.push(Led { volume, heirs, prefer });
            }
        }
        let settled = self.0.started.elapsed() >= SETTLE;
        for (volume, heir) in handovers(me, &led, &loads, settled) {
            if let Err(error) = self.0.engine.switch_to(volume, heir).await {
                tracing::info!(%volume, node = %heir, %error, "it does not take over now");
            }
        }
    }
}

/// Whether an image is to be opened again: it was given up, and other nodes go on with its volume. The last copy is not:
/// what was written there last may be lost, and whoever uses the volume is not to find it going on all the same.
fn is_to_reopen(report: &VolumeReport, me: NodeId) -> bool {
    let Some(mirror) = &report.mirror else { return false };
    let others_go_on = mirror.status.record.as_ref().is_some_and(|record| {
        record.member(me).is_none() && record.image(me).is_some() && !record.in_sync.is_empty()
    });
    // Another machine that has taken the image has it still.
    mirror.status.lost.is_some() && others_go_on && report.lost.is_none()
}

/// When images that were given up were opened again last, and how long it takes to the next time.
#[derive(Debug, Default)]
struct Reopenings(BTreeMap<Uuid, (Instant, Duration)>);

impl Reopenings {
    /// Those of `lost` that are to be opened again now. One that is lost again and again becomes rare.
    fn due(&mut self, lost: Vec<Uuid>, now: Instant) -> Vec<Uuid> {
        self.0.retain(|_, (last, pause)| now < *last + 2 * *pause + FORGIVEN);
        let is_due = |id: &Uuid| self.0.get(id).is_none_or(|(last, pause)| now >= *last + *pause);
        let due: Vec<_> = lost.into_iter().filter(is_due).collect();
        for id in &due {
            let (last, pause) = self.0.entry(*id).or_insert((now, REOPEN_FIRST / 2));
            (*last, *pause) = (now, (*pause * 2).min(REOPEN_AT_MOST));
        }
        due
    }
}

/// The volumes to hand on, and to whom: all that an operator wants elsewhere, and if `balance` one
/// that goes to a node which leads at least two fewer.
fn handovers(
    me: NodeId,
    led: &[Led],
    loads: &BTreeMap<NodeId, usize>,
    balance: bool,
) -> Vec<(Uuid, NodeId)> {
    let wanted = led.iter().filter_map(|l| {
        let heir = l.prefer.filter(|node| *node != me && l.heirs.contains(node))?;
        Some((l.volume, heir))
    });
    let mut all: Vec<_> = wanted.collect();
    let load = |node: &NodeId| loads.get(node).copied().unwrap_or(0);
    let even = led.iter().filter(|l| l.prefer.is_none());
    let best = even
        .flat_map(|l| l.heirs.iter().map(move |heir| (l.volume, *heir)))
        .filter(|(_, heir)| load(heir) + 2 <= load(&me))
        .min_by_key(|(_, heir)| load(heir));
    all.extend(best.filter(|_| balance));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    fn led(volume: u128, heirs: &[NodeId], prefer: Option<NodeId>) -> Led {
        Led { volume: Uuid::from_u128(volume), heirs: heirs.to_vec(), prefer }
    }

    #[test]
    fn one_volume_goes_to_a_node_that_leads_far_fewer() {
        let all = [led(1, &[B], None), led(2, &[B, C], None)];
        let two = Uuid::from_u128(2);
        assert_eq!(handovers(ME, &all, &[(ME, 2), (B, 1)].into(), true), [(two, C)]);
        assert_eq!(handovers(ME, &all, &[(ME, 2), (B, 1), (C, 1)].into(), true), []);
        assert_eq!(handovers(ME, &all, &[(ME, 2), (B, 1)].into(), false), []);
    }

    #[test]
    fn an_image_that_is_given_up_again_and_again_is_opened_ever_more_rarely() {
        let (mut reopenings, begin) = (Reopenings::default(), Instant::now());
        let id = Uuid::from_u128(1);
        let mut at = Vec::new();
        for second in 0..1300 {
            let now = begin + Duration::from_secs(second);
            if !reopenings.due(vec![id], now).is_empty() {
                at.push(second);
            }
        }
        assert_eq!(at, [0, 10, 30, 70, 150, 310, 630, 1230]);
        let later = begin + Duration::from_secs(1230 + 2 * 600 + 600);
        assert!(reopenings.due(Vec::new(), later).is_empty());
        assert_eq!(reopenings.due(vec![id], later), [id], "it was well for long");
        assert!(reopenings.due(vec![id], later + Duration::from_secs(9)).is_empty());
        assert_eq!(reopenings.due(vec![id], later + Duration::from_secs(10)), [id]);
    }

    /// What others go on with is opened again; the last copy, and what another machine has, is not.
    #[test]
    fn only_images_that_others_go_on_without_are_opened_again() {
        let volume = crate::metrics::tests::volume_report(Uuid::from_u128(1));
        let lost = |in_sync: &[NodeId]| {
            let mut volume = volume.clone();
            let status = &mut volume.mirror.as_mut().unwrap().status;
            status.lost = Some(mirror::Loss::Silent);
            let record = status.record.as_mut().unwrap();
            record.in_sync.retain(|member| in_sync.contains(&member.node));
            volume
        };
        assert!(!is_to_reopen(&volume, B), "it is well");
        assert!(is_to_reopen(&lost(&[ME]), B));
        assert!(!is_to_reopen(&lost(&[ME]), ME), "it is the last");
        assert!(!is_to_reopen(&lost(&[ME]), C), "it is no copy of the volume any more");
        let taken = VolumeReport { lost: Some("node 9 has it".into()), ..lost(&[ME]) };
        assert!(!is_to_reopen(&taken, B));
    }

    #[test]
    fn what_an_operator_wants_goes_first_and_stays() {
        let one = Uuid::from_u128(1);
        let even = [(ME, 1), (B, 1)].into();
        assert_eq!(handovers(ME, &[led(1, &[B], Some(B))], &even, false), [(one, B)]);
        assert_eq!(handovers(ME, &[led(1, &[C], Some(B))], &even, true), [], "it is not in sync");
        let heavy = [(ME, 9), (B, 1)].into();
        assert_eq!(handovers(ME, &[led(1, &[B], Some(ME))], &heavy, true), []);
    }
}
