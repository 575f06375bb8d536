//! Replicas that are alive but not reachable: leases take paths that data does not (RFD 0010, 4.8).
//!
//! A silent session is closed, so that a new one may use another path. Two members that reach the
//! primary but not each other cannot flush: they tell the primary, which excludes one of them.

use std::collections::BTreeMap;
use std::time::Duration;

use peer::{Message, NodeId};

use super::super::membership::Event;
use super::ReplicaState;
use super::effects::Effects;

/// How often a replica checks for hung operations; also the longest interval between its messages
/// on each session.
pub(in super::super) const WATCHDOG_INTERVAL: Duration = Duration::from_millis(500);

/// How long a session may be silent while lease messages arrive over other paths.
const SESSION_SILENCE_MAX: Duration = Duration::from_millis(1500);

/// How many lease messages must have arrived while a session was silent: fewer than a node sends on
/// one path in [`SESSION_SILENCE_MAX`], and more than a stopped node that resumes may have queued.
const LEASE_MESSAGES_MIN: u32 = 4;

/// How long a joiner may be silent. It has no leases, and every write waits for it.
const JOINER_SILENCE_MAX: Duration = Duration::from_millis(2500);

/// How long a report of an unreachable peer counts: a few watchdog intervals.
const REPORT_LIFETIME: Duration = Duration::from_millis(1500);

/// What was last received from another replica.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct LastHeard {
    /// When a message last arrived over its session, by the awake clock.
    session_at: Duration,
    /// Lease messages over other paths since then.
    lease_messages: u32,
}

impl LastHeard {
    fn is_session_silent(self, now: Duration) -> bool {
        now >= self.session_at + SESSION_SILENCE_MAX && self.lease_messages >= LEASE_MESSAGES_MIN
    }

    /// Whether the session carries the messages that every member sends each watchdog interval.
    fn is_session_alive(self, now: Duration) -> bool {
        now < self.session_at + 2 * WATCHDOG_INTERVAL
    }
}

/// Pairs of members that do not reach each other, and when that was last reported, by the awake
/// clock.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct UnreachablePairs(BTreeMap<(NodeId, NodeId), Duration>);

impl UnreachablePairs {
    /// Notes that `from` does not reach `to`.
    fn record(&mut self, from: NodeId, to: NodeId, now: Duration) {
        self.0.insert((from.min(to), from.max(to)), now);
    }

    /// The member to exclude, by the reports since `since` about members that the primary reaches:
    /// the one that fails to reach most others; of equals the one with the highest number. Failing
    /// to reach a dead node does not count.
    fn member_to_exclude(
        &mut self,
        since: Duration,
        is_reached: impl Fn(NodeId) -> bool,
    ) -> Option<NodeId> {
        self.0.retain(|_, reported_at| *reported_at >= since);
        let mut gap_counts: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (a, b) in self.0.keys().filter(|(a, b)| is_reached(*a) && is_reached(*b)) {
            *gap_counts.entry(*a).or_default() += 1;
            *gap_counts.entry(*b).or_default() += 1;
        }
        gap_counts.into_iter().max_by_key(|(node, gaps)| (*gaps, *node)).map(|(node, _)| node)
    }
}

impl ReplicaState {
    /// Notes a message over the session with `node`, or a new session.
    pub(in super::super) fn note_session_message(&mut self, node: NodeId) {
        let heard = LastHeard { session_at: self.awake_clock, lease_messages: 0 };
        self.last_heard.insert(node, heard);
    }

    /// Notes a lease message over another path.
    pub(in super::super) fn note_lease_message(&mut self, node: NodeId) {
        self.last_heard.entry(node).or_default().lease_messages += 1;
    }

    /// A member does not reach another one.
    pub(in super::super) fn on_peer_unreachable(&mut self, from: NodeId, node: NodeId) {
        let others = self.others();
        if self.is_primary() && from != node && others.contains(&from) && others.contains(&node) {
            self.unreachable_pairs.record(from, node, self.awake_clock);
        }
    }

    /// Whether the session with `node` is silent although the node is alive.
    pub(in super::super) fn is_session_silent(&self, node: NodeId) -> bool {
        self.last_heard.get(&node).is_some_and(|h| h.is_session_silent(self.awake_clock))
    }

    /// The joiners that are silent.
    fn silent_joiners(&self) -> Vec<NodeId> {
        let since = self.awake_clock.saturating_sub(JOINER_SILENCE_MAX);
        let silent =
            |node: &NodeId| self.last_heard.get(node).is_some_and(|h| h.session_at < since);
        self.joiners.attached().filter(silent).collect()
    }

    /// Reports to the primary the members with which this one has had no session since `since`.
    pub(in super::super) fn report_unreachable(&mut self, since: Duration, effects: &mut Effects) {
        let Some((view, primary)) = self.serving_view().zip(self.primary()) else { return };
        let others = self.others();
        for (&node, _) in self.unlinked_since.iter().filter(|(_, ended)| **ended < since) {
            if node != primary && others.contains(&node) {
                effects.send(primary, Message::PeerUnreachable { view, node });
            }
        }
    }

    /// At the primary: excludes members that have made no progress since `stuck_before`, or have
    /// had no session since `absent_before`, and drops such joiners. Those in `overdue` have not
    /// answered a flush, fetch or digest since then.
    pub(in super::super) fn exclude_unresponsive(
        &mut self,
        stuck_before: Duration,
        absent_before: Duration,
        overdue: Vec<NodeId>,
        effects: &mut Effects,
    ) {
        let mut unresponsive = overdue;
        unresponsive.extend(self.sequencer.overdue(stuck_before));
        unresponsive.extend(self.silent_joiners());
        if self.view_began_at < stuck_before && self.active_view != self.membership.view() {
            unresponsive.extend(self.membership.missing_do_view_change());
        }
        let unlinked = self.unlinked_since.iter().filter(|(_, ended)| **ended < absent_before);
        unresponsive.extend(unlinked.map(|(node, _)| *node));
        unresponsive.extend(self.unreachable_member());
        unresponsive.sort_unstable();
        unresponsive.dedup();
        for node in unresponsive {
            if !self.others().contains(&node) {
                self.drop_joiner(node, effects);
            } else if !self.membership.is_peer_stuck(node) {
                tracing::warn!(
                    node = node.0,
                    "a replica makes no progress although its node is alive"
                );
                self.handle_event(Event::PeerStuck(node), effects);
            }
        }
    }

    /// The member to exclude because others do not reach it. Returned again as long as that lasts.
    fn unreachable_member(&mut self) -> Option<NodeId> {
        let Self { awake_clock: now, last_heard, unreachable_pairs, .. } = self;
        let is_reached = |node| last_heard.get(&node).is_some_and(|h| h.is_session_alive(*now));
        unreachable_pairs.member_to_exclude(now.saturating_sub(REPORT_LIFETIME), is_reached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: NodeId = NodeId(9);

    fn victim(pairs: &[(u16, u16)]) -> Option<u16> {
        let mut unreachable = UnreachablePairs::default();
        for (from, to) in pairs {
            unreachable.record(NodeId(*from), NodeId(*to), Duration::ZERO);
        }
        unreachable.member_to_exclude(Duration::ZERO, |node| node != DEAD).map(|node| node.0)
    }

    #[test]
    fn the_worst_connected_member_is_excluded_ties_by_number() {
        assert_eq!(victim(&[]), None);
        assert_eq!(victim(&[(2, 3)]), Some(3));
        assert_eq!(victim(&[(2, 3), (3, 2)]), Some(3));
        assert_eq!(victim(&[(2, 3), (4, 2)]), Some(2));
    }

    #[test]
    fn an_unreachable_dead_node_excludes_no_other() {
        assert_eq!(victim(&[(2, 9), (3, 9)]), None);
        assert_eq!(victim(&[(2, 9), (3, 9), (2, 3)]), Some(3));
        let heard = LastHeard { session_at: WATCHDOG_INTERVAL, lease_messages: 0 };
        assert!(
            heard.is_session_alive(2 * WATCHDOG_INTERVAL)
                && !heard.is_session_alive(3 * WATCHDOG_INTERVAL)
        );
    }

    #[test]
    fn a_session_is_silent_only_if_its_node_is_heard_otherwise() {
        let heard = |lease_messages| LastHeard { session_at: WATCHDOG_INTERVAL, lease_messages };
        assert!(!heard(LEASE_MESSAGES_MIN).is_session_silent(SESSION_SILENCE_MAX));
        assert!(
            heard(LEASE_MESSAGES_MIN).is_session_silent(WATCHDOG_INTERVAL + SESSION_SILENCE_MAX)
        );
        // Not heard at all: the lease will expire.
        assert!(!heard(0).is_session_silent(1000 * SESSION_SILENCE_MAX));
        // It was stopped, and resumes.
        assert!(!heard(LEASE_MESSAGES_MIN - 1).is_session_silent(1000 * SESSION_SILENCE_MAX));
    }

    #[test]
    fn reports_expire_unless_repeated() {
        let second = Duration::from_secs(1);
        let mut gaps = UnreachablePairs::default();
        gaps.record(NodeId(2), NodeId(3), second);
        assert_eq!(gaps.member_to_exclude(second, |_| true), Some(NodeId(3)));
        assert_eq!(gaps.member_to_exclude(2 * second, |_| true), None);
    }
}
