//! A replica outside asks the primary to bring it in sync (RFD 0010, 6.6).

use std::rc::Rc;
use std::time::Duration;

use block::Error;
use intent_log::{Adoption, Other};
use peer::{Incarnation, Lineage, Message, NodeId, Role, View};
use rt::fault::{self, Point};
use uuid::Uuid;

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

/// A failure so long after the one before it is a first one.
const FRESH: Duration = Duration::from_secs(120);

/// A member that is put out so soon after it was admitted gained nothing by its attempt. More than
/// the others take to put it out.
const HELD: Duration = Duration::from_secs(30);

/// When a replica outside may begin an attempt. One that fails again and again must not take all
/// the time of disks and network; one that succeeds need not wait, however often it goes out and
/// comes back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attempts {
    /// How many in a row failed after the primary had accepted them: they cost copies.
    failed: u32,
    /// How many in a row the primary has not answered.
    unanswered: u32,
    /// When the last one ended in vain.
    ended: Duration,
    /// When the last one was admitted, if nobody has put this replica out since.
    admitted: Option<Duration>,
    /// The leg that has failed is left alone until then.
    leg_rests_until: Duration,
}

impl Attempts {
    pub(super) fn may_begin(&self, now: Duration) -> bool {
        let pause = pause(self.failed.max(self.unanswered));
        now >= self.leg_rests_until && now >= self.ended + pause
    }

    /// One has failed after it was accepted.
    fn fail(self, now: Duration) -> Self {
        let failed = if now > self.ended + FRESH { 0 } else { self.failed };
        Self { failed: failed.saturating_add(1), unanswered: 0, ended: now, ..self }
    }

    /// The primary has not answered one.
    fn unanswered(self, now: Duration) -> Self {
        Self { unanswered: self.unanswered.saturating_add(1), ended: now, ..self }
    }

    /// The primary serves and asks for attempts, or a session with it is new.
    pub(super) fn invited(self) -> Self {
        Self { unanswered: 0, ..self }
    }

    /// The leg has failed one: the next begins after `pause` at the earliest.
    pub(super) fn rest(self, now: Duration, pause: Duration) -> Self {
        Self { leg_rests_until: now + pause, ..self }
    }

    /// One was successful: this replica is a member.
    pub(super) fn admitted(self, now: Duration) -> Self {
        Self { admitted: Some(now), unanswered: 0, ..self }
    }

    /// This replica is no member any more. If it was put out at once, its last attempt failed.
    pub(super) fn put_out(self, now: Duration) -> Self {
        match self.admitted {
            None => self,
            Some(at) if now < at + HELD => Self { admitted: None, ..self }.fail(now),
            Some(_) => Self { admitted: None, failed: 0, ..self },
        }
    }
}

/// The pause after so many failures in a row.
fn pause(failures: u32) -> Duration {
    match failures {
        0 | 1 => Duration::ZERO,
        n => (FIRST_PAUSE * (1 << (n - 2).min(16))).min(LONGEST_PAUSE),
    }
}

/// Why an attempt came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The configuration or the view has changed: that is nobody's failure.
    Overtaken,
    /// Its session, its primary or its leg has failed, or the primary has given it up.
    Failed,
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
        self.end_attempt(Ending::Failed);
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
    pub(super) fn end_attempt(&self, how: Ending) {
        let Some(joining) = self.joining.take() else { return };
        let now = self.core.now();
        match (how, joining.view) {
            (Ending::Overtaken, _) => {}
            (Ending::Failed, Some(_)) => self.attempts.update(|attempts| attempts.fail(now)),
            (Ending::Failed, None) => self.attempts.update(|attempts| attempts.unanswered(now)),
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
            self.end_attempt(Ending::Failed);
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

    /// How long after `now` the next may begin, in whole seconds.
    fn pause_after(attempts: &Attempts, now: Duration) -> u64 {
        let waited = (0..=100).find(|n| attempts.may_begin(now + SECOND * *n));
        u64::from(waited.expect("it may begin at some time"))
    }

    #[test]
    fn attempts_that_fail_again_and_again_become_rare() {
        let (mut attempts, mut now) = (Attempts::default(), SECOND);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            now += SECOND / 10;
            attempts = attempts.fail(now);
            pauses.push(pause_after(&attempts, now));
            now += SECOND * u32::try_from(pauses[pauses.len() - 1]).unwrap();
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        now += FRESH + SECOND;
        assert_eq!(pause_after(&attempts.fail(now), now), 0, "what is long ago is forgiven");
    }

    #[test]
    fn one_that_is_put_out_at_once_again_and_again_waits_as_well() {
        let (mut attempts, mut now) = (Attempts::default(), SECOND);
        let mut pauses = Vec::new();
        for _ in 0..4 {
            attempts = attempts.admitted(now).put_out(now + SECOND);
            now += SECOND;
            pauses.push(pause_after(&attempts, now));
            now += SECOND * 8;
        }
        assert_eq!(pauses, [0, 1, 2, 4]);
    }

    #[test]
    fn attempts_that_succeed_are_no_failures_however_close_they_follow() {
        let (mut attempts, mut now) = (Attempts::default(), SECOND);
        for _ in 0..20 {
            attempts = attempts.admitted(now);
            now += HELD;
            attempts = attempts.put_out(now);
            assert!(attempts.may_begin(now));
        }
        // One success ends a row of failures.
        let failing = attempts.fail(now).fail(now).fail(now).fail(now);
        assert_eq!(pause_after(&failing, now), 4);
        let held = failing.admitted(now).put_out(now + HELD);
        assert_eq!(pause_after(&held.fail(now + HELD), now + HELD), 0);
    }

    #[test]
    fn a_primary_that_serves_again_is_asked_at_once() {
        let mut attempts = Attempts::default();
        for _ in 0..8 {
            attempts = attempts.unanswered(SECOND);
        }
        assert_eq!(pause_after(&attempts, SECOND), 60);
        assert_eq!(pause_after(&attempts.invited(), SECOND), 0);
        let both = attempts.fail(SECOND).fail(SECOND).fail(SECOND).unanswered(SECOND).invited();
        assert_eq!(pause_after(&both, SECOND), 2, "what has cost copies is not forgiven by it");
    }

    #[test]
    fn a_leg_that_has_failed_an_attempt_rests() {
        let attempts = Attempts::default().fail(SECOND).rest(SECOND, SECOND * 10);
        assert_eq!(pause_after(&attempts, SECOND), 10);
        assert_eq!(pause_after(&attempts.admitted(SECOND), SECOND), 10);
    }
}
