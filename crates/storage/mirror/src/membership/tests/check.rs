//! The invariants that must hold in every state.
//!
//! * *Never two*: all serving members are in the same view of the same configuration. A view
//!   becomes active only when every member of its configuration has left the older ones, and its
//!   writes are acknowledged only when every member has applied them: so no write of one serving
//!   member can be missing at another.
//! * *Reads*: each state in which a member serves and its leg is not locked counts as a read. A
//!   value once read or acknowledged never gives way to an older one: [`World::history`].
//! * *Writes*: every in-sync member under its listed incarnation holds the newest of these, or a
//!   newer one.
//! * *View change*: when the primary sends START VIEW all legs in its view are equal.
//! * *Total outage*: the replica that takes over has everything flushed; and everything
//!   acknowledged, while a member lives under its listed incarnation or the log of the replica is
//!   clean.
//! * *Leaving*: a leaving member does not leave the volume to one that died while it served.
//! * *Liveness*: once faults end some member serves, or a reason names a node that is down; and
//!   once all are back, writes of serving members are acknowledged.

use std::rc::Rc;

use peer::{DataGeneration, NodeId};

use super::super::super::config::{InSyncMember as Listed, MirrorConfig};
use super::super::{Event, MirrorMembership, NotServingReason};
use super::world::{Node, Step, Value, World, WriteProgress, at, id};

impl World {
    pub(super) fn take_errors(&mut self) -> Result<(), String> {
        match self.errors.pop() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    pub(super) fn check(&mut self) -> Result<(), String> {
        let count = self.nodes.len();
        let serving: Vec<_> = (0..count).filter(|&n| self.serves(n)).collect();
        let view_of =
            |n: usize| self.member(n).and_then(|m| Some((m.view()?, m.config()?.config_id)));
        for pair in serving.windows(2) {
            if view_of(pair[0]) != view_of(pair[1]) {
                return Err(format!(
                    "nodes {pair:?} serve in {:?} {:?}",
                    view_of(pair[0]),
                    view_of(pair[1])
                ));
            }
        }
        for n in serving {
            if self.process(n).is_block_free() {
                self.observe(n)?;
            }
        }
        let last = self.history.len() - 1;
        for listed in self.store.in_sync.clone() {
            let n = at(listed.node);
            let is_current = self.member(n).is_some_and(|m| m.incarnation() == listed.incarnation);
            let position = self.position(self.nodes[n].leg.volatile);
            if is_current && position.is_some_and(|p| p < last) {
                let has = self.nodes[n].leg.volatile;
                return Err(format!("node {n} in sync holds {has} after {:?}", self.history));
            }
        }
        Ok(())
    }

    fn position(&self, value: Value) -> Option<usize> {
        self.history.iter().position(|&v| v == value)
    }

    /// Reads at node `n`.
    fn observe(&mut self, n: usize) -> Result<(), String> {
        let value = self.nodes[n].leg.volatile;
        if self.history.last() == Some(&value) {
            return Ok(());
        }
        if self.history.contains(&value) || self.lost_values.contains(&value) {
            return Err(format!("node {n} reads {value} after {:?}", self.history));
        }
        self.history.push(value);
        Ok(())
    }

    pub(super) fn answer(&mut self, write: Value) {
        self.writes[usize::from(write) - 1].1 = WriteProgress::Answered;
        if !self.history.contains(&write) {
            self.errors.push(format!("{write} is answered and nowhere: {:?}", self.history));
        }
    }

    /// The primary knows that all members have applied the write. If a member holds another value
    /// by now, that is newer.
    pub(super) fn applied_by_all(&mut self, primary: usize, write: Value) {
        let config = self.member(primary).and_then(MirrorMembership::config).expect("a member");
        let overtaken = config.in_sync.iter().any(|m| {
            let is_current =
                self.member(at(m.node)).is_some_and(|x| x.incarnation() == m.incarnation);
            is_current && self.nodes[at(m.node)].leg.volatile != write
        });
        if !self.history.contains(&write) {
            let end = self.history.len() - usize::from(overtaken);
            self.history.insert(end, write);
            self.flushed += usize::from(end <= self.flushed);
        }
    }

    /// Node `n` is about to answer a write. The origin may know before the primary that all members
    /// have applied it.
    pub(super) fn origin_knows(&mut self, n: usize, write: Value) {
        let Some(config) = self.member(n).and_then(MirrorMembership::config) else { return };
        let has = |m: &Listed| {
            let is_current =
                self.member(at(m.node)).is_some_and(|x| x.incarnation() == m.incarnation);
            !is_current || self.nodes[at(m.node)].leg.volatile == write
        };
        if !self.history.contains(&write) && config.in_sync.iter().all(has) {
            self.applied_by_all(n, write);
        }
    }

    /// The primary sends START VIEW.
    pub(super) fn equal_at_open(&mut self, primary: usize) {
        let config = self.member(primary).and_then(MirrorMembership::config).expect("a member");
        let view = self.member(primary).and_then(MirrorMembership::view);
        let legs: Vec<_> = config
            .in_sync
            .iter()
            .map(|m| at(m.node))
            .filter(|&n| self.member(n).is_some_and(|m| m.view() == view))
            .map(|n| self.nodes[n].leg.volatile)
            .collect();
        if legs.windows(2).any(|w| w[0] != w[1]) {
            self.errors.push(format!("OPEN over legs {legs:?}"));
        }
    }

    /// `config` is about to take effect: if a restarted replica becomes the sole member, its value
    /// defines the block from now on.
    pub(super) fn blackout(&mut self, config: &MirrorConfig) -> Result<(), String> {
        let [sole_member] = config.in_sync[..] else { return Ok(()) };
        if self.store.has_member(sole_member.node, sole_member.incarnation) {
            return Ok(());
        }
        let leg = self.nodes[at(sole_member.node)].leg;
        let Some(position) = self.position(leg.volatile) else { return Ok(()) };
        if position + 1 == self.history.len() {
            return Ok(());
        }
        if self.nodes[at(sole_member.node)].is_rolled_back {
            // It could not know, nor could any node that reported to it: its copy is the volume
            // now.
            let lost = self.history.split_off(position + 1);
            self.lost_values.extend(lost);
            self.flushed = self.flushed.min(position);
            return Ok(());
        }
        let alive = self
            .store
            .others(sole_member.node)
            .any(|m| self.member(at(m.node)).is_some_and(|x| x.incarnation() == m.incarnation));
        if alive || position < self.flushed || !leg.marked {
            let (history, flushed) = (&self.history, self.flushed);
            return Err(format!(
                "{} leads with {} of {history:?}, flushed to {flushed}",
                sole_member.node, leg.volatile
            ));
        }
        let lost = self.history.split_off(position + 1);
        self.lost_values.extend(lost);
        Ok(())
    }

    /// Node `n` puts a configuration with itself as the sole member. If its image was rolled back,
    /// neither it nor any linked node may know that.
    pub(super) fn check_takeover(&mut self, n: usize) {
        let image = |n: usize| uuid::Uuid::from_u128(u128::from(id(n).0));
        let generations = |n: usize, other: usize| {
            let all = &self.nodes[n].generations.by_image;
            all.iter().find(|(i, _)| *i == image(other)).map(|(_, s)| *s).unwrap_or_default()
        };
        let knows = |&o: &usize| {
            o != n && self.linked(n, o) && generations(o, n).is_ahead_of(&generations(n, o))
        };
        let other = (0..self.nodes.len()).find(knows);
        let by_config = self.store.history.generation > self.nodes[n].generations.generation;
        let restarted = self.member(n).is_some_and(|m| m.role() == peer::Role::Restarted);
        if self.nodes[n].is_rolled_back && restarted && (other.is_some() || by_config) {
            let witness = other.map_or("the record".into(), |other| format!("node {other}"));
            self.errors.push(format!("node {n} leads with an older copy, and {witness} knows it"));
        }
    }

    /// Node `n` puts a configuration without itself: all remaining members were alive when it had
    /// stopped serving.
    pub(super) fn handed_over(&mut self, n: usize, config: &MirrorConfig) {
        let listed = |i| config.in_sync.iter().any(|m| m.incarnation == i);
        if self.member(n).is_some_and(|m| listed(m.incarnation())) {
            return;
        }
        if let Some(dead) = self.nodes[n].died_while_serving.iter().find(|&&i| listed(i)) {
            self.errors.push(format!("node {n} leaves the volume to {dead:?}, which it outlived"));
        }
    }

    pub(super) fn can_flush(&self) -> bool {
        let Some(p) = (0..self.nodes.len())
            .find(|&n| self.serves(n) && self.member(n).is_some_and(MirrorMembership::is_primary))
        else {
            return false;
        };
        let config = self.member(p).and_then(MirrorMembership::config).expect("a member");
        let view = self.member(p).and_then(MirrorMembership::view);
        config.others(id(p)).all(|m| {
            let n = at(m.node);
            let is_active = self.member(n).is_some_and(|m| m.is_view_active() && m.view() == view);
            is_active && self.linked(p, n)
        })
    }

    /// Everything acknowledged becomes durable at all members; if nothing is in flight and all
    /// replicas are in sync, dirty bits are cleared.
    pub(super) fn flush(&mut self) {
        self.budget.flushes -= 1;
        let is_idle =
            self.nodes.iter().flat_map(|n| &n.process).all(|p| p.state.prepared.len() == 0)
                && self.lanes.iter().flatten().flatten().all(std::collections::VecDeque::is_empty)
                && self.store.in_sync.len() == self.store.replicas.len();
        for n in 0..self.nodes.len() {
            if self.store.member(id(n)).is_some() {
                let leg = &mut self.node(n).leg;
                leg.durable = leg.volatile;
                leg.marked &= !is_idle;
            }
        }
        if is_idle {
            self.record_everywhere();
        }
        self.flushed = self.history.len() - 1;
    }

    /// All members record a data generation, and clear dirty bits under it.
    fn record_everywhere(&mut self) {
        let members: Vec<_> = self.store.in_sync.iter().map(|m| m.node).collect();
        let last = self.nodes.iter().map(|n| n.generations.generation).max().unwrap_or_default();
        let epoch = self.store.epoch;
        let count = if last.epoch == epoch { last.count + 1 } else { 1 };
        let generation = DataGeneration { epoch, count };
        for &member in &members {
            self.record(at(member), generation, &members, true);
        }
        self.handle_event(at(self.store.primary), Event::GenerationRecorded(generation));
    }

    /// Copies the image of the last node, writes and flushes everywhere, and rolls the image back
    /// to the copy.
    pub(super) fn roll_back_last(&mut self) -> Result<(), String> {
        let last = self.nodes.len() - 1;
        self.do_step(Step::Copy(last))?;
        self.do_step(Step::Accept(0))?;
        self.go_on(false, |w| w.writes[0].1 == WriteProgress::Answered)?;
        self.do_step(Step::Flush)?;
        self.budget.kills += 1;
        self.do_step(Step::Crash(last, false))?;
        self.do_step(Step::RollBack(last))
    }

    /// Without further faults, runs all possible steps in a fixed order until `goal` holds.
    fn go_on(&mut self, restart: bool, goal: fn(&Self) -> bool) -> Result<(), String> {
        for _ in 0..40 {
            for n in 0..self.nodes.len() {
                if restart && !self.up(n) {
                    self.do_step(Step::Restart(n))?;
                }
            }
            self.run_steps(|s| {
                matches!(
                    s,
                    Step::Connect(..)
                        | Step::Read(_)
                        | Step::ApplyPut(_)
                        | Step::Deliver(..)
                        | Step::Drain(_)
                        | Step::Apply(_)
                        | Step::Lease(..)
                        | Step::NoticePowerCut(..)
                )
            })?;
            if goal(self) {
                return Ok(());
            }
            self.do_step(Step::Tick)?;
        }
        let reasons: Vec<_> = self.nodes.iter().map(why).collect();
        Err(format!("nobody serves when faults are over: {reasons:?}"))
    }

    fn run_steps(&mut self, fair: fn(&Step) -> bool) -> Result<(), String> {
        for _ in 0..1000 {
            let Some(step) = self.steps().into_iter().find(fair) else { return Ok(()) };
            self.do_step(step)?;
        }
        Err("there is no end of it".into())
    }

    /// Runs until all members serve.
    pub(super) fn calm_down(&mut self) -> Result<(), String> {
        self.go_on(false, |w| (0..w.nodes.len()).all(|n| w.serves(n)))
    }

    /// Runs until the last node was excluded, has restarted and is out of sync.
    pub(super) fn exclude_last(&mut self) -> Result<(), String> {
        let last = self.nodes.len() - 1;
        self.budget.kills += 1;
        self.do_step(Step::Crash(last, false))?;
        self.go_on(false, |w| (0..w.nodes.len() - 1).all(|n| w.serves(n)))?;
        self.do_step(Step::Restart(last))?;
        self.go_on(false, |w| {
            (0..w.nodes.len() - 1).all(|n| w.serves(n)) && w.linked(0, w.nodes.len() - 1)
        })
    }

    /// Without further faults a member serves, or a reason names missing nodes; when they return, a
    /// member serves.
    pub(super) fn lives(&self) -> Result<(), String> {
        if self.nodes.iter().any(|n| n.is_leg_lost || n.is_rolled_back) {
            // Data of a lost leg may stay missing; and an older copy does not take over by itself.
            return Ok(());
        }
        let serves = |w: &Self| {
            let is_waiting = |&(at, written): &(usize, WriteProgress)| {
                w.serves(at) && written == WriteProgress::Accepted
            };
            (0..w.nodes.len()).any(|n| w.serves(n)) && !w.writes.iter().any(is_waiting)
        };
        let mut world = self.clone();
        world.go_on(false, |w| {
            let down = |n: NodeId| !w.up(at(n));
            let names_down = |n: &Rc<Node>| match why(n) {
                Some(NotServingReason::AwaitingRestartedMembers(nodes)) => {
                    nodes.into_iter().any(down)
                }
                Some(NotServingReason::OutOfSync(primary)) => down(primary),
                _ => false,
            };
            (0..w.nodes.len()).any(|n| w.serves(n))
                || w.nodes.iter().all(|n| n.process.is_none())
                || w.nodes.iter().any(names_down)
        })?;
        world.go_on(true, serves)
    }
}

fn why(node: &Rc<Node>) -> Option<NotServingReason> {
    let membership = node.process.as_ref().map(|p| &p.state.membership);
    membership.and_then(|m| m.not_serving_reason(super::world::NOW))
}
