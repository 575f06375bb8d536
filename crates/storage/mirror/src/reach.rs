//! Replicas that live and are not reached: leases take ways that data do not (RFD 0010, 4.8).
//!
//! A session over which nothing comes ends, so that another one may begin by another way. Two members
//! that do not reach each other, though both reach the primary, cannot flush without each other: they
//! tell the primary, which puts one of them out.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use peer::{Message, NodeId};

use super::replica::Replica;

/// How often a replica looks after what hangs. So often, at least, every replica says something to those
/// it has a session with.
pub(super) const BEAT: Duration = Duration::from_millis(500);

/// How long nothing may come over a session whose other end is heard by other ways.
const SILENCE: Duration = Duration::from_millis(1500);

/// How long nothing may come from a joiner, which has no leases: every write waits for it.
const JOINERS_SILENCE: Duration = Duration::from_millis(2500);

/// What else must have been heard meanwhile: less than what a node lets hear by one way in that time, and
/// more than what may come ahead by it when the node goes on after a stop.
const HEARD_BESIDE: u32 = 4;

/// How long a report of a gap counts: a few beats.
const RECENT: Duration = Duration::from_millis(1500);

/// What was heard of another replica.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heard {
    /// When something last came over its session, by this replica's pulse.
    session: Duration,
    /// How much has come by other ways since.
    beside: u32,
}

impl Heard {
    fn is_silent(self, now: Duration) -> bool {
        now >= self.session + SILENCE && self.beside >= HEARD_BESIDE
    }

    /// Whether its session brings what every member says in each beat.
    fn is_present(self, now: Duration) -> bool {
        now < self.session + 2 * BEAT
    }
}

/// Which members have said of each other that they do not reach each other, and when, by the replica's
/// pulse.
#[derive(Debug, Default)]
pub(super) struct Gaps(BTreeMap<(NodeId, NodeId), Duration>);

impl Gaps {
    /// `from` does not reach `to`.
    fn note(&mut self, from: NodeId, to: NodeId, now: Duration) {
        self.0.insert((from.min(to), from.max(to)), now);
    }

    /// Who has to go, by what has been said since `since` of those that the primary reaches: whoever lacks
    /// most of the others; of those that lack as many the one with the highest number. That nobody reaches
    /// the dead is no fault of the living.
    fn victim(&mut self, since: Duration, reached: impl Fn(NodeId) -> bool) -> Option<NodeId> {
        self.0.retain(|_, said| *said >= since);
        let mut lacks: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (a, b) in self.0.keys().filter(|(a, b)| reached(*a) && reached(*b)) {
            *lacks.entry(*a).or_default() += 1;
            *lacks.entry(*b).or_default() += 1;
        }
        lacks.into_iter().max_by_key(|(node, lacking)| (*lacking, *node)).map(|(node, _)| node)
    }
}

impl Replica {
    /// Something has come over the session with `node`, or the session has.
    pub(super) fn hears(&self, node: NodeId) {
        let heard = Heard { session: self.pulse.get(), beside: 0 };
        self.heard.borrow_mut().insert(node, heard);
    }

    /// A word on leases has come by another way.
    pub(super) fn hears_beside(&self, node: NodeId) {
        self.heard.borrow_mut().entry(node).or_default().beside += 1;
    }

    /// Ends the sessions over which nothing comes though their nodes live.
    pub(super) fn break_silent(&self) {
        let heard = self.heard.borrow();
        let silent = |node| heard.get(&node).is_some_and(|h| h.is_silent(self.pulse.get()));
        for link in self.links.borrow().values().filter(|l| !l.is_closed() && silent(l.node())) {
            tracing::warn!(node = link.node().0, "nothing comes over a session whose node lives");
            link.close();
        }
    }

    /// The joiners of whom nothing is heard any more.
    pub(super) fn silent_joiners(&self) -> Vec<NodeId> {
        let since = self.pulse.get().saturating_sub(JOINERS_SILENCE);
        let (joiners, heard) = (self.joiners.borrow(), self.heard.borrow());
        let silent = |node: &NodeId| heard.get(node).is_some_and(|h| h.session < since);
        joiners.attached().filter(silent).collect()
    }

    /// Tells the primary whom this member has not reached since `before`.
    pub(super) fn report_gaps(&self, before: Duration) {
        let Some((view, primary)) = self.serves().zip(self.primary_link()) else { return };
        let others = self.others();
        for (&node, _) in self.lost.borrow().iter().filter(|(_, since)| **since < before) {
            if node != primary.node() && others.contains(&node) {
                primary.send(Message::Unreachable { view, node });
            }
        }
    }

    /// A member does not reach another one.
    pub(super) fn take_unreachable(&self, from: NodeId, node: NodeId) {
        let others = self.others();
        if self.is_primary() && from != node && others.contains(&from) && others.contains(&node) {
            self.gaps.borrow_mut().note(from, node, self.pulse.get());
        }
    }

    /// Who has to go because others do not reach it. It is said again and again as long as it is so.
    pub(super) fn gone_astray(self: &Rc<Self>) -> Option<NodeId> {
        let now = self.pulse.get();
        let heard = self.heard.borrow();
        let reached = |node| heard.get(&node).is_some_and(|h| h.is_present(now));
        self.gaps.borrow_mut().victim(now.saturating_sub(RECENT), reached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: NodeId = NodeId(9);

    fn victim(gaps: &[(u16, u16)]) -> Option<u16> {
        let mut all = Gaps::default();
        for (from, to) in gaps {
            all.note(NodeId(*from), NodeId(*to), Duration::ZERO);
        }
        all.victim(Duration::ZERO, |node| node != DEAD).map(|node| node.0)
    }

    #[test]
    fn the_one_that_lacks_most_goes_else_the_one_with_the_highest_number() {
        assert_eq!(victim(&[]), None);
        assert_eq!(victim(&[(2, 3)]), Some(3));
        assert_eq!(victim(&[(2, 3), (3, 2)]), Some(3));
        assert_eq!(victim(&[(2, 3), (4, 2)]), Some(2));
    }

    #[test]
    fn nobody_goes_because_he_does_not_reach_the_dead() {
        assert_eq!(victim(&[(2, 9), (3, 9)]), None);
        assert_eq!(victim(&[(2, 9), (3, 9), (2, 3)]), Some(3));
        let heard = Heard { session: BEAT, beside: 0 };
        assert!(heard.is_present(2 * BEAT) && !heard.is_present(3 * BEAT));
    }

    #[test]
    fn a_session_is_silent_only_where_its_node_is_heard_by_other_ways() {
        let heard = |beside| Heard { session: BEAT, beside };
        assert!(!heard(HEARD_BESIDE).is_silent(SILENCE));
        assert!(heard(HEARD_BESIDE).is_silent(BEAT + SILENCE));
        // It is not heard at all: that is for its leases to show.
        assert!(!heard(0).is_silent(1000 * SILENCE));
        // It was stopped, and goes on.
        assert!(!heard(HEARD_BESIDE - 1).is_silent(1000 * SILENCE));
    }

    #[test]
    fn what_is_not_said_again_counts_no_more() {
        let second = Duration::from_secs(1);
        let mut gaps = Gaps::default();
        gaps.note(NodeId(2), NodeId(3), second);
        assert_eq!(gaps.victim(second, |_| true), Some(NodeId(3)));
        assert_eq!(gaps.victim(2 * second, |_| true), None);
    }
}
