//! What must hold in every state.
//!
//! * *Never two*: all that serve are in the same view of the same record. A view opens only when
//!   every member of its record has left the older ones, and a write of it is answered only when
//!   every member has applied it: so no write of one that serves can miss another that does.
//! * *Reads*: each state in which a member serves and its leg is not locked counts as a read. What
//!   was read or answered once never gives way to something older: [`World::history`].
//! * *Writes*: every member in sync and continuous holds the newest of these, or something newer.
//! * *Opening*: when the primary says OPEN all legs in its view are equal.
//! * *Blackout*: who leads has all that was flushed; and all that was answered, while a continuous
//!   member lives or its log is clean.
//! * *Leaving*: who goes leaves the volume to nobody that died while it served.
//! * *Liveness*: once faults end somebody serves, or a refusal names a node that is down; and when
//!   all are back, writes of those who serve are answered.

use std::rc::Rc;

use peer::{Lineage, NodeId};

use super::super::super::record::Record;
use super::super::{Event, Member, Why};
use super::world::{Node, Step, Value, World, Written, at, id};

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
        let place = |n: usize| self.member(n).and_then(|m| Some((m.view()?, m.record()?.config)));
        for pair in serving.windows(2) {
            if place(pair[0]) != place(pair[1]) {
                return Err(format!(
                    "nodes {pair:?} serve in {:?} {:?}",
                    place(pair[0]),
                    place(pair[1])
                ));
            }
        }
        for n in serving {
            if self.nodes[n].entries.is_empty() {
                self.observe(n)?;
            }
        }
        let last = self.history.len() - 1;
        for listed in self.store.in_sync.clone() {
            let n = at(listed.node);
            let continuous = self.member(n).is_some_and(|m| m.incarnation() == listed.incarnation);
            let holds = self.position(self.nodes[n].leg.volatile);
            if continuous && holds.is_some_and(|p| p < last) {
                let has = self.nodes[n].leg.volatile;
                return Err(format!("node {n} in sync holds {has} after {:?}", self.history));
            }
        }
        Ok(())
    }

    fn position(&self, value: Value) -> Option<usize> {
        self.history.iter().position(|&v| v == value)
    }

    /// A read at node `n`.
    fn observe(&mut self, n: usize) -> Result<(), String> {
        let value = self.nodes[n].leg.volatile;
        if self.history.last() == Some(&value) {
            return Ok(());
        }
        if self.history.contains(&value) || self.gone.contains(&value) {
            return Err(format!("node {n} reads {value} after {:?}", self.history));
        }
        self.history.push(value);
        Ok(())
    }

    pub(super) fn answer(&mut self, write: Value) {
        self.writes[usize::from(write) - 1].1 = Written::Answered;
        if !self.history.contains(&write) {
            self.errors.push(format!("{write} is answered and nowhere: {:?}", self.history));
        }
    }

    /// The primary knows that all members have applied the write. Where one of them holds something
    /// else by now, that came later.
    pub(super) fn applied_by_all(&mut self, primary: usize, write: Value) {
        let record = self.member(primary).and_then(Member::record).expect("a member");
        let overtaken = record.in_sync.iter().any(|m| {
            let here = self.member(at(m.node)).is_some_and(|x| x.incarnation() == m.incarnation);
            here && self.nodes[at(m.node)].leg.volatile != write
        });
        if !self.history.contains(&write) {
            let end = self.history.len() - usize::from(overtaken);
            self.history.insert(end, write);
            self.flushed += usize::from(end <= self.flushed);
        }
    }

    /// The primary says OPEN.
    pub(super) fn equal_at_open(&mut self, primary: usize) {
        let record = self.member(primary).and_then(Member::record).expect("a member");
        let view = self.member(primary).and_then(Member::view);
        let legs: Vec<_> = record
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

    /// `record` is about to take effect: if a returned replica goes on alone, what it brings
    /// defines the block from now on.
    pub(super) fn blackout(&mut self, record: &Record) -> Result<(), String> {
        let [alone] = record.in_sync[..] else { return Ok(()) };
        if self.store.has(alone.node, alone.incarnation) {
            return Ok(());
        }
        let leg = self.nodes[at(alone.node)].leg;
        let Some(brings) = self.position(leg.volatile) else { return Ok(()) };
        if brings + 1 == self.history.len() {
            return Ok(());
        }
        if self.nodes[at(alone.node)].set_back {
            // It did not know, nor did anybody whom it heard: its copy is what the volume holds now.
            let lost = self.history.split_off(brings + 1);
            self.gone.extend(lost);
            self.flushed = self.flushed.min(brings);
            return Ok(());
        }
        let alive = self
            .store
            .others(alone.node)
            .any(|m| self.member(at(m.node)).is_some_and(|x| x.incarnation() == m.incarnation));
        if alive || brings < self.flushed || !leg.marked {
            let (history, flushed) = (&self.history, self.flushed);
            return Err(format!(
                "{} leads with {} of {history:?}, flushed to {flushed}",
                alone.node, leg.volatile
            ));
        }
        let lost = self.history.split_off(brings + 1);
        self.gone.extend(lost);
        Ok(())
    }

    /// Node `n` asks for a record that names it alone. If its image was set back, it does not know that,
    /// nor does anybody whom it hears.
    pub(super) fn leads_older(&mut self, n: usize) {
        let image = |n: usize| uuid::Uuid::from_u128(u128::from(id(n).0));
        let shared = |n: usize, of: usize| {
            let all = &self.nodes[n].lineages.shared;
            all.iter().find(|(i, _)| *i == image(of)).map(|(_, s)| *s).unwrap_or_default()
        };
        let knows =
            |&o: &usize| o != n && self.linked(n, o) && shared(o, n).is_ahead_of(&shared(n, o));
        let other = (0..self.nodes.len()).find(knows);
        let record = self.store.history.lineage > self.nodes[n].lineages.lineage;
        let returned = self.member(n).is_some_and(|m| m.role() == peer::Role::Returned);
        if self.nodes[n].set_back && returned && (other.is_some() || record) {
            let who = other.map_or("the record".into(), |other| format!("node {other}"));
            self.errors.push(format!("node {n} leads with an older copy, and {who} knows it"));
        }
    }

    /// Node `n` asks for a record without itself: whoever it leaves the volume to was alive when it
    /// had stopped serving.
    pub(super) fn handed_over(&mut self, n: usize, record: &Record) {
        let listed = |i| record.in_sync.iter().any(|m| m.incarnation == i);
        if self.member(n).is_some_and(|m| listed(m.incarnation())) {
            return;
        }
        if let Some(dead) = self.nodes[n].outlived.iter().find(|&&i| listed(i)) {
            self.errors.push(format!("node {n} leaves the volume to {dead:?}, which it outlived"));
        }
    }

    pub(super) fn can_flush(&self) -> bool {
        let Some(p) = (0..self.nodes.len())
            .find(|&n| self.serves(n) && self.member(n).is_some_and(Member::is_primary))
        else {
            return false;
        };
        let record = self.member(p).and_then(Member::record).expect("a member");
        let view = self.member(p).and_then(Member::view);
        record.others(id(p)).all(|m| {
            let n = at(m.node);
            let there = self.member(n).is_some_and(|m| m.is_open() && m.view() == view);
            there && self.linked(p, n)
        })
    }

    /// All that was answered becomes durable at all members; and where nothing is under way and
    /// nobody is missing, the marks go.
    pub(super) fn flush(&mut self) {
        self.left.flushes -= 1;
        let quiet = self.nodes.iter().all(|n| n.entries.is_empty())
            && self.lanes.iter().flatten().flatten().all(std::collections::VecDeque::is_empty)
            && self.store.in_sync.len() == self.store.replicas.len();
        for n in 0..self.nodes.len() {
            if self.store.member(id(n)).is_some() {
                let leg = &mut self.node(n).leg;
                leg.durable = leg.volatile;
                leg.marked &= !quiet;
            }
        }
        if quiet {
            self.record_everywhere();
        }
        self.flushed = self.history.len() - 1;
    }

    /// All members record a lineage, and clear under it.
    fn record_everywhere(&mut self) {
        let members: Vec<_> = self.store.in_sync.iter().map(|m| m.node).collect();
        let last = self.nodes.iter().map(|n| n.lineages.lineage).max().unwrap_or_default();
        let epoch = self.store.epoch;
        let count = if last.epoch == epoch { last.count + 1 } else { 1 };
        let lineage = Lineage { epoch, count };
        for &member in &members {
            self.record(at(member), lineage, &members, true);
        }
        self.tell(at(self.store.primary), Event::Recorded(lineage));
    }

    /// From here on: a copy is taken of the last node, a write is made and flushed everywhere, and the
    /// copy takes the place of the image.
    pub(super) fn set_last_back(&mut self) -> Result<(), String> {
        let last = self.nodes.len() - 1;
        self.do_step(Step::Copy(last))?;
        self.do_step(Step::Take(0))?;
        self.go_on(false, |w| w.writes[0].1 == Written::Answered)?;
        self.do_step(Step::Flush)?;
        self.left.kills += 1;
        self.do_step(Step::Crash(last, false))?;
        self.do_step(Step::SetBack(last))
    }

    /// Faults are over: everything that can happen happens, in a fixed order, until `goal` holds.
    fn go_on(&mut self, restart: bool, goal: fn(&Self) -> bool) -> Result<(), String> {
        for _ in 0..40 {
            for n in 0..self.nodes.len() {
                if restart && !self.up(n) {
                    self.do_step(Step::Restart(n))?;
                }
            }
            self.work_off(|s| {
                matches!(
                    s,
                    Step::Connect(..)
                        | Step::Read(_)
                        | Step::Land(_)
                        | Step::Deliver(..)
                        | Step::Drain(_)
                        | Step::Apply(_)
                        | Step::Ask(_)
                        | Step::Lease(..)
                        | Step::Notice(..)
                )
            })?;
            if goal(self) {
                return Ok(());
            }
            self.do_step(Step::Tick)?;
        }
        let whys: Vec<_> = self.nodes.iter().map(why).collect();
        Err(format!("nobody serves when faults are over: {whys:?}"))
    }

    fn work_off(&mut self, fair: fn(&Step) -> bool) -> Result<(), String> {
        for _ in 0..1000 {
            let Some(step) = self.steps().into_iter().find(fair) else { return Ok(()) };
            self.do_step(step)?;
        }
        Err("there is no end of it".into())
    }

    /// To where all members serve.
    pub(super) fn calm_down(&mut self) -> Result<(), String> {
        self.go_on(false, |w| (0..w.nodes.len()).all(|n| w.serves(n)))
    }

    /// To where the last node was put out, has come back and is outside.
    pub(super) fn put_last_out(&mut self) -> Result<(), String> {
        let last = self.nodes.len() - 1;
        self.left.kills += 1;
        self.do_step(Step::Crash(last, false))?;
        self.go_on(false, |w| (0..w.nodes.len() - 1).all(|n| w.serves(n)))?;
        self.do_step(Step::Restart(last))?;
        self.go_on(false, |w| {
            (0..w.nodes.len() - 1).all(|n| w.serves(n)) && w.linked(0, w.nodes.len() - 1)
        })
    }

    /// From here, faults over: it serves, or says who is missing; and if they return, it serves.
    pub(super) fn lives(&self) -> Result<(), String> {
        if self.nodes.iter().any(|n| n.dead || n.set_back) {
            // What a lost leg held may be missed for good; and an older copy does not lead by itself.
            return Ok(());
        }
        let serves = |w: &Self| {
            let waits = |&(at, written): &(usize, Written)| {
                w.serves(at) && matches!(written, Written::Taken { .. })
            };
            (0..w.nodes.len()).any(|n| w.serves(n)) && !w.writes.iter().any(waits)
        };
        let mut now = self.clone();
        now.go_on(false, |w| {
            let down = |n: NodeId| !w.up(at(n));
            let names_down = |n: &Rc<Node>| match why(n) {
                Some(Why::Blackout(nodes)) => nodes.into_iter().any(down),
                Some(Why::Outside(primary)) => down(primary),
                _ => false,
            };
            (0..w.nodes.len()).any(|n| w.serves(n))
                || w.nodes.iter().all(|n| n.member.is_none())
                || w.nodes.iter().any(names_down)
        })?;
        now.go_on(true, serves)
    }
}

fn why(node: &Rc<Node>) -> Option<Why> {
    node.member.as_ref().and_then(|m| m.waits_for(super::world::NOW))
}
