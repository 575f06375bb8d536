//! Members that do not reach each other, though both reach the primary (RFD 0010, 4.8).
//!
//! Neither can flush without the other, and both have fresh leases where these take another way. They
//! tell the primary, which puts one of them out.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use peer::{Message, NodeId};

use super::replica::Replica;

/// Which members have said of each other that they do not reach each other, and when, by the replica's
/// pulse.
#[derive(Debug, Default)]
pub(super) struct Gaps(BTreeMap<(NodeId, NodeId), Duration>);

impl Gaps {
    /// `from` does not reach `to`.
    fn note(&mut self, from: NodeId, to: NodeId, now: Duration) {
        self.0.insert((from.min(to), from.max(to)), now);
    }

    /// Who has to go, by what has been said since `since`: whoever lacks most of the others; of those that
    /// lack as many the one with the highest number.
    fn victim(&mut self, since: Duration) -> Option<NodeId> {
        self.0.retain(|_, said| *said >= since);
        let mut lacks: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (a, b) in self.0.keys() {
            *lacks.entry(*a).or_default() += 1;
            *lacks.entry(*b).or_default() += 1;
        }
        lacks.into_iter().max_by_key(|(node, lacking)| (*lacking, *node)).map(|(node, _)| node)
    }
}

impl Replica {
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
        let recent = self.pulse.get().saturating_sub(self.settings.stuck / 2);
        self.gaps.borrow_mut().victim(recent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn victim(gaps: &[(u16, u16)]) -> Option<u16> {
        let mut all = Gaps::default();
        for (from, to) in gaps {
            all.note(NodeId(*from), NodeId(*to), Duration::ZERO);
        }
        all.victim(Duration::ZERO).map(|node| node.0)
    }

    #[test]
    fn the_one_that_lacks_most_goes_else_the_one_with_the_highest_number() {
        assert_eq!(victim(&[]), None);
        assert_eq!(victim(&[(2, 3)]), Some(3));
        assert_eq!(victim(&[(2, 3), (3, 2)]), Some(3));
        assert_eq!(victim(&[(2, 3), (4, 2)]), Some(2));
    }

    #[test]
    fn what_is_not_said_again_counts_no_more() {
        let second = Duration::from_secs(1);
        let mut gaps = Gaps::default();
        gaps.note(NodeId(2), NodeId(3), second);
        assert_eq!(gaps.victim(second), Some(NodeId(3)));
        assert_eq!(gaps.victim(2 * second), None);
    }
}
