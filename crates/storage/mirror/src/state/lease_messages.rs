//! Lease messages, which travel over several paths, and are handled once (RFD 0010, 4.8).

use std::collections::BTreeMap;
use std::time::Duration;

use block::Epoch;
use peer::{ClockStamp, Incarnation, Message, NodeId};

/// Whether the message may also travel on lease connections.
pub(in super::super) fn is_lease_message(message: &Message) -> bool {
    matches!(
        message,
        Message::LeaseRequest { .. }
            | Message::LeaseGrant { .. }
            | Message::NewerEpoch { .. }
            | Message::RevokeLease { .. }
            | Message::LeaseRevoked { .. }
    )
}

/// When the latest lease requests of one member arrived.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct RecentLeaseRequests {
    /// The incarnation whose clock the stamps are of.
    incarnation: Incarnation,
    latest: [(ClockStamp, Duration); 8],
    count: usize,
}

impl RecentLeaseRequests {
    /// A lease request with this stamp has arrived.
    pub(in super::super) fn record(
        &mut self,
        incarnation: Incarnation,
        stamp: ClockStamp,
        now: Duration,
    ) {
        if self.incarnation != incarnation {
            *self = Self { incarnation, ..Self::default() };
        }
        // The same request arrives over several paths; a late duplicate is not newer.
        if self.latest.iter().any(|(s, _)| *s >= stamp) {
            return;
        }
        self.latest[self.count % 8] = (stamp, now);
        self.count += 1;
    }

    /// Whether a message with `stamp` was sent less than `lease` ago, as far as can be told.
    pub(in super::super) fn is_fresh(
        &self,
        stamp: ClockStamp,
        now: Duration,
        lease: Duration,
    ) -> bool {
        self.latest.iter().any(|(s, arrived_at)| *s == stamp && now < *arrived_at + lease)
    }
}

/// The latest lease messages from and to each node.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct LeaseDedup {
    /// The requests that were granted here.
    granted: BTreeMap<NodeId, LeaseRequestKey>,
    /// The grants that have arrived.
    received: BTreeMap<NodeId, LeaseRequestKey>,
}

/// Identifies a lease request: epoch, incarnation of the requester, its clock.
type LeaseRequestKey = (Epoch, Incarnation, ClockStamp);

impl LeaseDedup {
    /// Whether the same message has come over another path: the request was answered on all paths,
    /// or the grant was handled.
    pub(in super::super) fn is_duplicate(&self, from: NodeId, message: &Message) -> bool {
        match *message {
            Message::LeaseRequest { epoch, incarnation, stamp } => {
                self.granted.get(&from) == Some(&(epoch, incarnation, stamp))
            }
            Message::LeaseGrant { epoch, incarnation, stamp } => {
                self.received.get(&from) == Some(&(epoch, incarnation, stamp))
            }
            _ => false,
        }
    }

    /// Notes a message from `node`.
    pub(in super::super) fn note_received(&mut self, node: NodeId, message: &Message) {
        if let Message::LeaseGrant { epoch, incarnation, stamp } = *message {
            self.received.insert(node, (epoch, incarnation, stamp));
        }
    }

    /// Notes a message to `node`.
    pub(in super::super) fn note_sent(&mut self, node: NodeId, message: &Message) {
        if let Message::LeaseGrant { epoch, incarnation, stamp } = *message {
            self.granted.insert(node, (epoch, incarnation, stamp));
        }
    }
}
