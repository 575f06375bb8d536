//! Recognising rolled-back images (RFD 0032).

use block::Epoch;
use peer::{DataGeneration, NodeId, PeerGenerations, ReplicaReport};
use uuid::Uuid;

use super::super::config::{CopyHistory, MirrorConfig};
use super::{MirrorMembership, Role, RollbackWitness, replica_report};

/// The data generations that the image has recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RecordedGenerations {
    /// The last data generation that it has recorded.
    pub generation: DataGeneration,
    /// Whether its history was lost with its log: missing generations prove nothing.
    pub is_log_lost: bool,
    /// The generations that it has recorded with other images.
    pub by_image: Vec<(Uuid, PeerGenerations)>,
}

impl RecordedGenerations {
    fn with_image(&self, image: Uuid) -> PeerGenerations {
        let found = self.by_image.iter().find(|(other, _)| *other == image);
        found.map(|(_, generations)| *generations).unwrap_or_default()
    }
}

/// How a joiner compares with this image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinerComparison {
    /// The dirty regions of both are all that may differ.
    DirtyRegionsSuffice,
    /// The joiner is a rolled-back copy: it gets everything.
    JoinerRolledBack,
    /// The history with this joiner was lost here, or an operator has decided against the joiner:
    /// it gets everything.
    HistoryUnknown,
    /// This image is an older copy than the joiner knows: the joiner must not be overwritten.
    JoinerNewer,
}

impl MirrorMembership {
    /// Sets the generations that the image has recorded; to be called before every event.
    pub fn set_generations(&mut self, generations: RecordedGenerations) {
        self.generations = generations;
    }

    /// Compares a joiner, by what this image has recorded with the joiner's image and the other way
    /// round.
    #[must_use]
    pub fn compare_joiner(
        &self,
        own: &PeerGenerations,
        joiner: &PeerGenerations,
        history_lost: bool,
    ) -> JoinerComparison {
        if own.is_ahead_of(joiner) {
            JoinerComparison::JoinerRolledBack
        } else if !joiner.is_ahead_of(own) {
            JoinerComparison::DirtyRegionsSuffice
        } else if history_lost || joiner.last_cleared.epoch < self.forced_epoch() {
            JoinerComparison::HistoryUnknown
        } else {
            JoinerComparison::JoinerNewer
        }
    }

    /// The images with which this one records a data generation of `epoch`: those of the other
    /// members; that of the primary, if this is not a member yet. `None` if the latest known
    /// configuration has another epoch: the members of another configuration were not asked to
    /// record it.
    #[must_use]
    pub fn generation_peers(&self, epoch: Epoch) -> Option<Vec<Uuid>> {
        let config = self.config.as_ref().filter(|config| config.epoch == epoch)?;
        let others: Vec<_> = match self.role() {
            Role::Member => config.others(self.me).map(|m| m.node).collect(),
            _ => vec![config.primary],
        };
        Some(others.into_iter().filter_map(|node| config.image(node)).collect())
    }

    /// The copy on `node` was rolled back: the next configuration will note it.
    pub fn note_rolled_back(&mut self, node: NodeId) {
        if !self.rolled_back.contains(&node) {
            self.rolled_back.push(node);
            self.rolled_back.sort_unstable();
        }
    }

    /// The latest epoch that an operator began by forcing a primary.
    fn forced_epoch(&self) -> Epoch {
        self.config.as_ref().map(|r| r.history.forced_epoch).unwrap_or_default()
    }

    /// The report for `node`.
    #[must_use]
    pub fn report_for(&self, node: NodeId) -> ReplicaReport {
        let is_rolled_back = self.rolled_back_by().is_some();
        let generations = self.generations_with(node);
        ReplicaReport {
            is_rolled_back,
            generations,
            ..replica_report(self.incarnation, self.image_summary, self.role())
        }
    }

    fn generations_with(&self, node: NodeId) -> PeerGenerations {
        let image = self.config.as_ref().and_then(|r| r.image(node));
        image.map(|image| self.generations.with_image(image)).unwrap_or_default()
    }

    /// Whether this image is known to be an older copy, and how.
    #[must_use]
    pub fn rolled_back_by(&self) -> Option<RollbackWitness> {
        let config = self.config.as_ref()?;
        let knows = |(node, report): &(&NodeId, &ReplicaReport)| {
            let generations = report.generations;
            let is_relevant = generations.last_cleared.epoch >= config.history.forced_epoch;
            config.image(**node).is_some()
                && is_relevant
                && generations.is_ahead_of(&self.generations_with(**node))
        };
        if let Some((node, _)) = self.peer_reports.iter().find(knows) {
            return Some(RollbackWitness::Node(*node));
        }
        let behind = config.history.generation > self.generations.generation
            && !self.generations.is_log_lost;
        (behind && config.member(self.me).is_some()).then_some(RollbackWitness::Config)
    }

    /// Whether that keeps this image from taking over after a total outage. If its history was
    /// lost, later generations of others prove nothing.
    pub(super) fn takeover_forbidden_by(&self) -> Option<RollbackWitness> {
        self.rolled_back_by().filter(|_| !self.generations.is_log_lost)
    }

    /// The history in `next`, which this replica puts in place of `config`.
    pub(super) fn next_history(
        &self,
        config: &MirrorConfig,
        next: &MirrorConfig,
        is_forced: bool,
    ) -> CopyHistory {
        let old = &config.history;
        let is_sole_member = next.has_member(self.me, self.incarnation) && next.in_sync.len() == 1;
        let all_stay = next.in_sync.iter().all(|m| config.in_sync.contains(m));
        let generation = match self.common_generation {
            // It is recorded here before the configuration is put.
            _ if is_sole_member => DataGeneration::first(next.epoch),
            Some(recorded) if all_stay && recorded.epoch == config.epoch => {
                recorded.max(old.generation)
            }
            _ => old.generation,
        };
        let has_replica = |node: &&NodeId| next.image(**node).is_some();
        let mut rolled_back: Vec<_> =
            old.rolled_back.iter().chain(&self.rolled_back).filter(has_replica).copied().collect();
        rolled_back.sort_unstable();
        rolled_back.dedup();
        let forced_epoch = if is_forced { next.epoch } else { old.forced_epoch };
        CopyHistory { generation, forced_epoch, rolled_back, mismatch: old.mismatch.clone() }
    }

    /// Notes that all members have recorded this data generation.
    pub(super) fn note_common_generation(&mut self, generation: DataGeneration) {
        self.common_generation = self.common_generation.max(Some(generation));
    }
}
