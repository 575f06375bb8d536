//! What a step of the state makes its driver do.

use std::collections::VecDeque;

use block::{Ctx, Epoch, RangeLock};
use peer::{Message, NodeId, PreparedEntry, View, WriteOp};
use rt::fault_point::{self, FaultPoint};

use super::super::config::MirrorConfig;
use super::prepared_list::EntrySource;

/// One thing to do.
#[derive(Debug)]
pub(in super::super) enum Effect {
    /// Send the message over the session with the node, if there is one.
    Send(NodeId, Message),
    /// Send the lease message over the session and over all lease connections.
    SendLease(NodeId, Message),
    /// End all sessions.
    CloseSessions,
    /// Write an ordered operation to the leg, and report that with
    /// [`on_prepared_applied`](super::ReplicaState::on_prepared_applied).
    Apply(PreparedApply),
    /// Write the replacement of a rejected write to the leg, and report that with
    /// [`on_replaced`](super::ReplicaState::on_replaced).
    Replace(PreparedApply),
    /// Read the configuration from the store.
    ReadConfig,
    /// Put a configuration to the store.
    PutConfig(ConfigPut),
    /// Drain the leg for the view, adopt the configuration if one is given, and report
    /// [`ViewBegun`](super::super::membership::Event::ViewBegun).
    PrepareView(View, Option<MirrorConfig>),
    /// Make all members equal on their prepared entries, and report
    /// [`Reconciled`](super::super::membership::Event::Reconciled).
    Reconcile(View),
    /// Send the queued commits after the commit delay.
    SendCommitsLater(View),
    /// The process has reached this point.
    Reach(FaultPoint),
    /// The process reaches this point once what it has sent has left.
    ReachWhenSent(FaultPoint),
}

/// A write to the leg.
#[derive(Debug)]
pub(in super::super) struct PreparedApply {
    /// The node that has sent it, and is told when it is done.
    pub(in super::super) from: NodeId,
    pub(in super::super) entry: PreparedEntry,
    pub(in super::super) source: EntrySource,
    pub(in super::super) op: WriteOp,
    pub(in super::super) ctx: Ctx,
    /// The lock of its range, if it is not held yet.
    pub(in super::super) awaited_lock: Option<RangeLock>,
}

/// A configuration for the store.
#[derive(Debug)]
pub(in super::super) struct ConfigPut {
    /// Counts the puts of this replica.
    pub(in super::super) number: u64,
    /// The epoch of the configuration it replaces.
    pub(in super::super) epoch: Epoch,
    /// The id of the configuration it replaces.
    pub(in super::super) config_id: u128,
    pub(in super::super) next: MirrorConfig,
}

/// Which tasks have to check their conditions again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Wakes {
    /// Those that wait for a change of the view, the role, the lease or a session.
    pub(in super::super) changed: bool,
    /// The timer of the membership state machine.
    pub(in super::super) timer: bool,
    /// Those that wait for a lease grant.
    pub(in super::super) lease: bool,
    /// The one that asks to join.
    pub(in super::super) join: bool,
}

/// The effects of the steps so far that have not been carried out, in order.
#[derive(Debug, Default)]
pub(in super::super) struct Effects {
    queue: VecDeque<Effect>,
    wakes: Wakes,
    /// Whether the driver is carrying them out.
    is_running: bool,
}

impl Effects {
    /// Adds an effect.
    pub(super) fn push(&mut self, effect: Effect) {
        self.queue.push_back(effect);
    }

    /// Sends `message` to `node`.
    pub(super) fn send(&mut self, node: NodeId, message: Message) {
        self.push(Effect::Send(node, message));
    }

    /// The process reaches `point` after the effects before.
    pub(super) fn reach(&mut self, point: FaultPoint) {
        if fault_point::ENABLED {
            self.push(Effect::Reach(point));
        }
    }

    /// The process reaches `point` once what the effects before send has left.
    pub(super) fn reach_when_sent(&mut self, point: FaultPoint) {
        if fault_point::ENABLED {
            self.push(Effect::ReachWhenSent(point));
        }
    }

    /// Makes the tasks that wait for a change check again.
    pub(in super::super) fn wake(&mut self) {
        self.wakes.changed = true;
    }

    /// The timer of the membership, or a lease, may have changed.
    pub(super) fn wake_timer(&mut self) {
        (self.wakes.timer, self.wakes.lease) = (true, true);
    }

    /// Makes the replica check whether it may join.
    pub(super) fn wake_join(&mut self) {
        self.wakes.join = true;
    }

    /// Begins to carry them out. False if that is under way: then it continues with those that were
    /// added.
    pub(in super::super) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.is_running, true)
    }

    /// The next effect; `None` if there are none left, which ends carrying them out.
    pub(in super::super) fn next(&mut self) -> Option<Effect> {
        let next = self.queue.pop_front();
        self.is_running = next.is_some();
        next
    }

    /// Takes the tasks to be woken.
    pub(in super::super) fn take_wakes(&mut self) -> Wakes {
        std::mem::take(&mut self.wakes)
    }
}
