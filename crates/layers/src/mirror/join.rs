//! A replica outside asks the primary to bring it in sync (RFD 0010, 6.6).

use std::rc::Rc;
use std::time::Duration;

use block::Error;
use peer::{Incarnation, Lineage, Message, NodeId, Role, View};
use rt::fault::{self, Point};
use uuid::Uuid;

use super::log::{Adoption, Other};
use super::member::Event;
use super::record::Record;
use super::replica::Replica;

/// How often a replica outside looks whether it should ask again.
pub(super) const PERIOD: Duration = Duration::from_secs(1);

/// How long the primary may take to accept.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pause between an attempt that came to nothing and the next, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// An attempt that begins so long after the one before it is a first one: that has led to something.
const FRESH: Duration = Duration::from_secs(120);

/// When a replica outside may begin an attempt: one that fails again and again must not take all the time
/// of disks and network.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attempts {
    /// When the last one began.
    last: Option<Duration>,
    /// How many in a row came soon after the one before.
    again: u32,
    not_before: Duration,
}

impl Attempts {
    pub(super) fn may_begin(&self, now: Duration) -> bool {
        now >= self.not_before
    }

    /// One begins.
    fn begin(self, now: Duration) -> Self {
        let soon = self.last.is_some_and(|last| now < last + FRESH);
        let again = if soon { self.again.saturating_add(1) } else { 0 };
        let next = Self { last: Some(now), again, ..self };
        // It may be admitted, and put out at once.
        Self { not_before: now + next.pause(), ..next }
    }

    /// It has come to nothing; the next begins after `pause` at the earliest.
    pub(super) fn end(self, now: Duration, pause: Duration) -> Self {
        Self { not_before: self.not_before.max(now + pause.max(self.pause())), ..self }
    }

    fn pause(&self) -> Duration {
        let factor = 1 << self.again.saturating_sub(1).min(16);
        if self.again == 0 { Duration::ZERO } else { (FIRST_PAUSE * factor).min(LONGEST_PAUSE) }
    }
}

/// An attempt that was accepted, and what the primary had reached by then together with other
/// images.
pub(super) type Inheritance = (Incarnation, Vec<(Uuid, Lineage)>);

/// An attempt, at the joiner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joining {
    incarnation: Incarnation,
    primary: NodeId,
    session: u64,
    since: Duration,
    /// The primary's view, once it has accepted.
    view: Option<View>,
}

impl Joining {
    pub(super) fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    pub(super) fn session(&self) -> u64 {
        self.session
    }
}

impl Replica {
    /// Whether the primary is bringing this replica in sync.
    pub(super) fn is_joining(&self) -> bool {
        self.joining.get().is_some_and(|j| j.view.is_some())
    }

    /// Whether what `from` says in `view` belongs to the present attempt.
    pub(super) fn joins_in(&self, from: NodeId, view: View) -> bool {
        self.joining.get().is_some_and(|j| j.primary == from && j.view == Some(view))
    }

    /// Begins an attempt, unless one is under way.
    pub(super) async fn join(self: &Rc<Self>) {
        let Some((record, link)) = self.to_join() else { return };
        if let Some(joining) = self.joining.get() {
            let late = self.core.now() > joining.since + PATIENCE && joining.view.is_none();
            if joining.session == link.session() && !late {
                return;
            }
        }
        // Nothing of an earlier attempt is taken from here on, and all of it has reached the disk
        // before the new one begins.
        self.end_attempt();
        if !self.attempts.get().may_begin(self.core.now()) {
            return;
        }
        self.view.set(View::default());
        self.signal.raise();
        self.signal.until(|| self.entries.borrow().is_drained().then_some(())).await;
        if self.to_join().is_none_or(|(now, l)| now != record || l.session() != link.session()) {
            return;
        }
        self.entries.borrow_mut().clear();
        if !self.adopt_outside(&record).await {
            return;
        }
        if self.to_join().is_none_or(|(now, _)| now != record) {
            return;
        }
        let incarnation = Incarnation(self.core.random_u64());
        self.event(Event::Joining(incarnation));
        let Some(image) = record.image(record.primary) else { return };
        let Some(marks) = self.leg.log.export(image) else { return };
        let (primary, session) = (record.primary, link.session());
        let since = self.core.now();
        self.attempts.update(|attempts| attempts.begin(since));
        self.joining.set(Some(Joining { incarnation, primary, session, since, view: None }));
        link.send(Message::Join {
            incarnation,
            epoch: record.epoch,
            volume_bytes: marks.volume_bytes,
            region_shift: marks.region_shift,
            shared: self.leg.log.shared_with(image),
            marks: marks.bits,
        });
    }

    /// The record and the session with its primary, if this replica is outside and may join.
    fn to_join(&self) -> Option<(Record, peer::Link)> {
        let member = self.member.borrow();
        let record = member.record().filter(|_| member.role() == Role::Outside)?;
        let fit = !self.leg.is_dead() && record.image(self.me).is_some();
        let link = self.link(record.primary).filter(|_| fit && record.primary != self.me)?;
        // Members that do not reach each other cannot stay (`reach`).
        record.in_sync.iter().all(|m| self.link(m.node).is_some()).then(|| (record.clone(), link))
    }

    /// The attempt that is under way has come to nothing.
    pub(super) fn end_attempt(&self) {
        if self.joining.take().is_some() {
            self.attempts.update(|attempts| attempts.end(self.core.now(), Duration::ZERO));
        }
    }

    async fn adopt_outside(self: &Rc<Self>, record: &Record) -> bool {
        let adopted = self.leg.log.adopted().map_or(0, |a| a.epoch);
        adopted >= record.epoch.0 || self.adopt(record, false).await
    }

    /// Makes durable that this replica knows `record`, as a member of it or not.
    pub(super) async fn adopt(self: &Rc<Self>, record: &Record, member: bool) -> bool {
        fault::pass(Point::EpochAdopting);
        let adopted = self.leg.log.adopt(self.adoption(record, member)).await;
        fault::pass(Point::EpochAdopted);
        if let Err(error) = &adopted {
            tracing::error!(%error, epoch = record.epoch.0, "a configuration is not adopted");
            self.leg_failed(Error::Gone);
        }
        adopted.is_ok()
    }

    /// What the superblock is to say of `record`, in which this replica is a member or not.
    fn adoption(&self, record: &Record, member: bool) -> Adoption {
        let others = record.replicas.iter().filter(|r| r.node != self.me);
        let members = record.others(self.me).filter_map(|m| record.image(m.node));
        Adoption {
            epoch: record.epoch.0,
            config: Uuid::from_u128(record.config),
            others: others.map(|r| Other { image: r.image, new: r.new }).collect(),
            members: members.collect(),
            inherited: self.inherited(record),
            hint: if member { in_sync_hint(record, self.me) } else { [None; 3] },
            boot: member.then(|| self.leg.log.boot(&self.core)),
        }
    }

    /// What the primary that has brought this replica in sync for `record` had reached together with
    /// others: it holds what that held (RFD 0032, 3.5).
    fn inherited(&self, record: &Record) -> Vec<(Uuid, Lineage)> {
        let inheritance = self.inheritance.borrow();
        let of_record = inheritance.as_ref().filter(|(attempt, _)| record.has(self.me, *attempt));
        of_record.map(|(_, reached)| reached.clone()).unwrap_or_default()
    }

    /// The primary has begun to send everything here.
    pub(super) fn take_accept(
        &self,
        from: NodeId,
        view: View,
        incarnation: Incarnation,
        reached: Vec<(Uuid, Lineage)>,
    ) {
        let Some(mut joining) = self.joining.get() else { return };
        if joining.primary != from || joining.incarnation != incarnation {
            return;
        }
        fault::pass(Point::JoinerAccepted);
        joining.view = Some(view);
        self.joining.set(Some(joining));
        self.inheritance.replace(Some((incarnation, reached)));
        self.view.set(view);
        self.signal.raise();
    }

    /// The primary has given the attempt up.
    pub(super) fn take_detached(&self, incarnation: Incarnation) {
        if self.joining.get().is_some_and(|j| j.incarnation == incarnation) {
            self.end_attempt();
        }
    }
}

/// What an image that is in sync by `record` remembers of it: the nodes in sync, its own first. One that is not in sync
/// remembers none.
fn in_sync_hint(record: &Record, me: NodeId) -> [Option<Uuid>; 3] {
    let all = std::iter::once(me).chain(record.others(me).map(|m| m.node));
    let mut hint = [None; 3];
    for (place, node) in hint.iter_mut().zip(all) {
        *place = Some(Uuid::from_u128(node.0.into()));
    }
    hint
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn attempts_that_fail_again_and_again_become_rare() {
        let (mut attempts, mut now) = (Attempts::default(), SECOND);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert!(attempts.may_begin(now));
            attempts = attempts.begin(now);
            now += SECOND / 10;
            attempts = attempts.end(now, Duration::ZERO);
            let ended = now;
            while !attempts.may_begin(now) {
                now += SECOND / 10;
            }
            pauses.push((now - ended).as_secs());
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        attempts = attempts.begin(now + FRESH);
        assert!(attempts.may_begin(now + FRESH), "what has held for long is forgiven");
    }

    #[test]
    fn one_that_was_admitted_and_put_out_at_once_waits_as_well() {
        let attempts = Attempts::default().begin(SECOND).begin(2 * SECOND).begin(3 * SECOND);
        assert!(!attempts.may_begin(4 * SECOND) && attempts.may_begin(5 * SECOND));
    }
}
