//! Which images are older copies of what they were (RFD 0032).

use block::Epoch;
use peer::{Lineage, NodeId, SharedLineage, Standing};
use uuid::Uuid;

use super::super::record::{History, Record};
use super::{Member, Role, SetBack, standing_of};

/// What the image has recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Lineages {
    /// The last lineage that it has reached.
    pub lineage: Lineage,
    /// Whether what it had recorded was lost with its log: nothing can be concluded from what is
    /// missing.
    pub lost: bool,
    /// What it has recorded about other images.
    pub shared: Vec<(Uuid, SharedLineage)>,
}

impl Lineages {
    fn of(&self, image: Uuid) -> SharedLineage {
        let found = self.shared.iter().find(|(of, _)| *of == image);
        found.map(|(_, shared)| *shared).unwrap_or_default()
    }
}

/// What a joiner is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// What both have marked is all that may differ.
    Continues,
    /// Its image is an older copy of what it was: it gets everything.
    SetBack,
    /// What was recorded about it here was lost, or an operator has decided against it: it gets
    /// everything.
    Unknown,
    /// This image is an older copy of what the joiner knows: the joiner must not be overwritten.
    Newer,
}

impl Member {
    /// What the image has recorded by now: to be told before every event.
    pub fn remember(&mut self, lineages: Lineages) {
        self.lineages = lineages;
    }

    /// Decides about a joiner, by what this image has recorded about the joiner's and the joiner's
    /// about this one.
    #[must_use]
    pub fn judge(
        &self,
        mine: &SharedLineage,
        theirs: &SharedLineage,
        forgotten: bool,
    ) -> Judgement {
        if mine.is_ahead_of(theirs) {
            Judgement::SetBack
        } else if !theirs.is_ahead_of(mine) {
            Judgement::Continues
        } else if forgotten || theirs.cleared.epoch < self.forced() {
            Judgement::Unknown
        } else {
            Judgement::Newer
        }
    }

    /// The images that this one records a lineage of `epoch` together with: those of the other
    /// members; the primary's, if it is no member yet. `None` if that is not the epoch of the latest
    /// record that is known: who is in sync by another record has not been asked to record it.
    #[must_use]
    pub fn recorded_with(&self, epoch: Epoch) -> Option<Vec<Uuid>> {
        let record = self.record.as_ref().filter(|record| record.epoch == epoch)?;
        let others: Vec<_> = match self.role() {
            Role::Member => record.others(self.me).map(|m| m.node).collect(),
            _ => vec![record.primary],
        };
        Some(others.into_iter().filter_map(|node| record.image(node)).collect())
    }

    /// The copy on `node` came back older than it had been: the next record says so.
    pub fn note_set_back(&mut self, node: NodeId) {
        if !self.set_back.contains(&node) {
            self.set_back.push(node);
            self.set_back.sort_unstable();
        }
    }

    /// The latest epoch in which an operator has decided for a copy.
    fn forced(&self) -> Epoch {
        self.record.as_ref().map(|r| r.history.forced).unwrap_or_default()
    }

    /// What it says of itself to `node`.
    #[must_use]
    pub fn standing_for(&self, node: NodeId) -> Standing {
        let older = self.is_older().is_some();
        let shared = self.shared_with(node);
        Standing { older, shared, ..standing_of(self.incarnation, self.image, self.role()) }
    }

    fn shared_with(&self, node: NodeId) -> SharedLineage {
        let image = self.record.as_ref().and_then(|r| r.image(node));
        image.map(|image| self.lineages.of(image)).unwrap_or_default()
    }

    /// Whether this image is known to be an older copy of what it was, and by whom.
    #[must_use]
    pub fn is_older(&self) -> Option<SetBack> {
        let record = self.record.as_ref()?;
        let knows = |(node, standing): &(&NodeId, &Standing)| {
            let theirs = standing.shared;
            let counts = theirs.cleared.epoch >= record.history.forced;
            record.image(**node).is_some()
                && counts
                && theirs.is_ahead_of(&self.shared_with(**node))
        };
        if let Some((node, _)) = self.standings.iter().find(knows) {
            return Some(SetBack::Node(*node));
        }
        let behind = record.history.lineage > self.lineages.lineage && !self.lineages.lost;
        (behind && record.member(self.me).is_some()).then_some(SetBack::Record)
    }

    /// Whether that keeps this image from leading after a blackout. Where what it had recorded was
    /// lost, that others know more says nothing.
    pub(super) fn must_not_lead(&self) -> Option<SetBack> {
        self.is_older().filter(|_| !self.lineages.lost)
    }

    /// What `next`, which this replica puts in place of `record`, says of the past.
    pub(super) fn history(&self, record: &Record, next: &Record, forced: bool) -> History {
        let old = &record.history;
        let alone = next.has(self.me, self.incarnation) && next.in_sync.len() == 1;
        let stay = next.in_sync.iter().all(|m| record.in_sync.contains(m));
        let lineage = match self.recorded {
            // It is recorded here before the record is put.
            _ if alone => Lineage::first(next.epoch),
            Some(recorded) if stay && recorded.epoch == record.epoch => recorded.max(old.lineage),
            _ => old.lineage,
        };
        let replica = |node: &&NodeId| next.image(**node).is_some();
        let mut set_back: Vec<_> =
            old.set_back.iter().chain(&self.set_back).filter(replica).copied().collect();
        set_back.sort_unstable();
        set_back.dedup();
        let forced = if forced { next.epoch } else { old.forced };
        History { lineage, forced, set_back, differing: old.differing.clone() }
    }

    /// All members have reached this lineage.
    pub(super) fn recorded(&mut self, lineage: Lineage) {
        self.recorded = self.recorded.max(Some(lineage));
    }
}
