//! Rolled-back copies: the data generations that replicas have recorded tell an older copy from a
//! current one (RFD 0032).

use std::rc::Rc;

use block::Error;
use intent_log::GenerationUpdate;
use peer::{DataGeneration, NodeId, PeerGenerations};
use uuid::Uuid;

use super::Mistake;
use super::config::MirrorConfig;
use super::membership::JoinerComparison;
use super::replica::Replica;

impl Replica {
    /// Decides whether copying the dirty regions is enough for a joiner. A rolled-back joiner gets
    /// everything; a joiner that knows of a later state of this image gets nothing.
    pub(super) async fn check_joiner_generations(
        self: &Rc<Self>,
        node: NodeId,
        image: Uuid,
        joiner: PeerGenerations,
    ) -> Result<(), &'static str> {
        if self.settings.has_mistake(Mistake::SkipsGenerationCheck) {
            return Ok(());
        }
        let (own, history_lost) =
            (self.leg.log.generations_with(image), self.leg.log.is_history_lost(image));
        let comparison = self.state().membership.compare_joiner(&own, &joiner, history_lost);
        if comparison != JoinerComparison::JoinerNewer {
            self.step(|s, _| s.newer_joiners.remove(&node));
        }
        match comparison {
            JoinerComparison::DirtyRegionsSuffice => return Ok(()),
            JoinerComparison::HistoryUnknown => {
                tracing::warn!(
                    node = node.0,
                    "the history of a copy is unknown: resyncing all of it"
                );
            }
            JoinerComparison::JoinerRolledBack => {
                let (had, has) = (own.last_cleared, joiner.common);
                tracing::error!(
                    node = node.0,
                    %had,
                    %has,
                    "a copy was rolled back (a backup or snapshot was restored?): resyncing all of it"
                );
                self.step(|s, _| s.membership.note_rolled_back(node));
            }
            JoinerComparison::JoinerNewer => {
                if self.step(|s, _| s.newer_joiners.insert(node)) {
                    tracing::error!(
                        node = node.0,
                        "the copy here was rolled back, and the copy of that node is newer: it is not overwritten"
                    );
                }
                return Err("its copy is newer");
            }
        }
        self.leg.log.mark_all_dirty(image).await.map_err(|_| "the source's log failed")
    }

    /// The replicas whose copies are known to be newer than this one.
    pub(super) fn newer_replicas(&self) -> Vec<NodeId> {
        let state = self.state();
        let mut newer = state.out_of_sync_replicas();
        newer.retain(|node| state.newer_joiners.contains(node));
        newer
    }

    /// Before a configuration with this replica as its only member is put, records its generation
    /// in the image, so that an older copy of the image is recognised. Returns whether that
    /// succeeded.
    pub(super) async fn record_sole_generation(self: &Rc<Self>, config: &MirrorConfig) -> bool {
        let [only] = config.in_sync[..] else { return true };
        if only.node != self.me {
            return true;
        }
        let generation: DataGeneration = config.history.generation;
        let update = GenerationUpdate { generation, ..GenerationUpdate::default() };
        let recorded = self.leg.log.record_generation(update).await;
        if recorded.is_err() {
            self.on_leg_error(Error::Gone);
        }
        recorded.is_ok()
    }
}
