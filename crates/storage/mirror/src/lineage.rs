//! Copies that were set back: what replicas have recorded tells an older copy from the one that it was
//! (RFD 0032).

use std::rc::Rc;

use block::{Epoch, Error};
use intent_log::Advance;
use peer::{Lineage, NodeId, SharedLineage};
use uuid::Uuid;

use super::Mistake;
use super::member::{Judgement, Lineages};
use super::record::Record;
use super::replica::Replica;

impl Replica {
    /// What the image has recorded, for the membership machine.
    pub(super) fn lineages(&self) -> Lineages {
        let log = &self.leg.log;
        let (mut lineage, lost, mut shared) = (log.lineage(), log.was_lost(), log.shared());
        if self.settings.makes(Mistake::LeadsWhenOlder) {
            lineage.epoch = Epoch(u64::MAX);
            shared.iter_mut().for_each(|(_, shared)| shared.reached.epoch = Epoch(u64::MAX));
        }
        Lineages { lineage, lost, shared }
    }

    /// Decides whether the marks are enough for a joiner. One whose image is an older copy of what it was gets
    /// everything; one that knows of a later state of this image gets nothing.
    pub(super) async fn judge_joiner(
        self: &Rc<Self>,
        node: NodeId,
        image: Uuid,
        theirs: SharedLineage,
    ) -> Result<(), &'static str> {
        if self.settings.makes(Mistake::TrustsJoiners) {
            return Ok(());
        }
        let (mine, forgotten) =
            (self.leg.log.shared_with(image), self.leg.log.has_forgotten(image));
        let judged = self.member.borrow().judge(&mine, &theirs, forgotten);
        if judged != Judgement::Newer {
            self.newer.borrow_mut().remove(&node);
        }
        match judged {
            Judgement::Continues => return Ok(()),
            Judgement::Unknown => {
                tracing::warn!(
                    node = node.0,
                    "what a copy was like is not known any more: all is copied"
                );
            }
            Judgement::SetBack => {
                let (had, has) = (mine.cleared, theirs.reached);
                tracing::error!(
                    node = node.0,
                    %had,
                    %has,
                    "a copy was set back to an earlier state, as by a backup or a snapshot: all is copied"
                );
                self.member.borrow_mut().note_set_back(node);
            }
            Judgement::Newer => {
                if self.newer.borrow_mut().insert(node) {
                    tracing::error!(
                        node = node.0,
                        "the copy here was set back to an earlier state, and that node's is newer: it is not overwritten"
                    );
                }
                return Err("its copy is newer");
            }
        }
        self.leg.log.mark_all(image).await.map_err(|_| "the source's log failed")
    }

    /// The replicas whose copies are known to be newer than this one.
    pub(super) fn newer_copies(&self) -> Vec<NodeId> {
        let mut newer = self.outsiders();
        newer.retain(|node| self.newer.borrow().contains(node));
        newer
    }

    /// Before a record that names nobody else is put: the image records that it goes on alone, so that a copy of
    /// it from before is not taken for it. Says whether it could.
    pub(super) async fn records_alone(self: &Rc<Self>, record: &Record) -> bool {
        let [only] = record.in_sync[..] else { return true };
        if only.node != self.me {
            return true;
        }
        let reached: Lineage = record.history.lineage;
        let advance = Advance { reached, ..Advance::default() };
        let recorded = self.leg.log.advance(advance).await;
        if recorded.is_err() {
            self.leg_failed(Error::Gone);
        }
        recorded.is_ok()
    }
}
