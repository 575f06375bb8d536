//! What carries out the decisions of the membership machine, and watches what it cannot see.

use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use block::{Epoch, Error};
use peer::{Link, Message, NodeId, Role};
use rt::fault::{self, Point};

use super::link::is_lease;
use super::member::{Action, Change, Event, Say};
use super::record::{Put, Record, Records, Unreachable};
use super::replica::{Nodes, Replica};
use super::{Loss, join, reach, sweep};

/// How often a replica that does not serve asks the store for its record.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Whether it happens again and again to a replica that has nothing to do, and changes nothing as a rule.
fn is_routine(event: &Event) -> bool {
    matches!(event, Event::Tick | Event::Heard(_, Say::Renew { .. } | Say::Promise { .. }))
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// [`Records`] behind a pointer.
pub(super) trait Store {
    fn read(&self) -> Answer<'_, Result<Record, Unreachable>>;
    fn put<'a>(&'a self, after: Epoch, config: u128, record: &'a Record) -> Answer<'a, Put>;
    fn changed(&self) -> Answer<'_, ()>;
}

impl<R: Records> Store for R {
    fn read(&self) -> Answer<'_, Result<Record, Unreachable>> {
        Box::pin(Records::read(self))
    }

    fn put<'a>(&'a self, after: Epoch, config: u128, record: &'a Record) -> Answer<'a, Put> {
        Box::pin(Records::put(self, after, config, record))
    }

    fn changed(&self) -> Answer<'_, ()> {
        Box::pin(Records::changed(self))
    }
}

impl Replica {
    /// Tells the membership machine what has happened, and does what it asks for.
    pub(super) fn event(self: &Rc<Self>, event: Event) {
        if self.closed.get() {
            return;
        }
        let mut routine = is_routine(&event);
        let served = self.served.get();
        let actions = {
            let mut member = self.member.borrow_mut();
            member.remember(self.lineages());
            member.apply(self.core.now(), event)
        };
        for action in actions {
            routine &= matches!(action, Action::Send(..));
            self.act(action);
        }
        self.timer.raise();
        self.promises.raise();
        let serves = self.serves().is_some();
        if !routine || served != serves {
            self.signal.raise();
        }
        if routine && served && !serves {
            // A lease has run out: whether the store answers decides what initiators are told.
            self.event(Event::Changed);
        }
    }

    fn act(self: &Rc<Self>, action: Action) {
        match action {
            Action::ReadRecord => self.read_record(),
            Action::Put { epoch, config, record } => self.put_record(epoch, config, record),
            Action::Send(node, say) => self.say(node, say.into()),
            Action::Begin { view, record } => self.begin(view, record),
            Action::SendStarted(view) => self.send_started(view),
            Action::Settle(view) => self.begin_settling(view),
            Action::Opened(view) => self.open(view),
            Action::Outside => {
                self.outside();
                self.join_soon();
            }
            Action::Refused(why) => {
                tracing::error!(%why, "this replica must not act");
                self.outside();
            }
            Action::Declined(change) => {
                tracing::warn!(?change, "a change cannot be made");
                match change {
                    Change::Admit(node) => {
                        self.joiners.borrow_mut().not_proposed(node);
                        self.drop_joiner(node);
                    }
                    Change::Leave => self.stayed.update(|n| n + 1),
                    _ => {}
                }
            }
        }
    }

    /// Says something of membership; leases by every way there is.
    fn say(&self, node: NodeId, message: Message) {
        self.leases.borrow_mut().say(node, &message);
        if is_lease(&message)
            && let Some(paths) = &*self.paths.borrow()
        {
            paths(node).iter().for_each(|path| path.send(message.clone()));
        }
        if let Some(link) = self.link(node) {
            link.send(message);
        }
    }

    fn read_record(self: &Rc<Self>) {
        let this = Rc::clone(self);
        self.store_asked();
        self.spawn(async move {
            let read = this.store.read().await;
            if read.is_ok() {
                this.unanswered.set(None);
            }
            let fresh =
                (u128::from(this.core.random_u64()) << 64) | u128::from(this.core.random_u64());
            this.event(match read {
                Ok(record) => Event::Read { record, fresh },
                Err(Unreachable) => Event::ReadFailed,
            });
        });
    }

    fn put_record(self: &Rc<Self>, epoch: Epoch, config: u128, record: Record) {
        let number = self.puts.get() + 1;
        self.puts.set(number);
        let this = Rc::clone(self);
        self.store_asked();
        self.spawn(async move {
            let members = record.in_sync.iter().map(|m| m.node.0).collect::<Vec<_>>();
            tracing::info!(epoch = record.epoch.0, ?members, "a new configuration is proposed");
            if !this.records_alone(&record).await {
                this.event(Event::Put(Put::Refused));
                return;
            }
            fault::pass(Point::RecordPutting);
            let put = this.store.put(epoch, config, &record).await;
            fault::pass(Point::RecordPut);
            if put != Put::Unknown {
                this.unanswered.set(None);
            }
            // The answer to an earlier one, which was overtaken by what others put, says nothing
            // about the present one.
            if this.puts.get() == number {
                this.event(Event::Put(put));
            }
        });
    }

    /// Looks soon whether this replica may join.
    pub(super) fn join_soon(&self) {
        self.join_wanted.set(true);
        self.joins.raise();
    }

    /// The leg has failed an operation. Says whether this is the last member, whose clients get the
    /// error; any other leaves, and the rest go on.
    pub(super) fn leg_failed(self: &Rc<Self>, e: Error) -> bool {
        self.leg_fails(e, Loss::Failed)
    }

    /// The same; `loss` says what the leg is lost by, if it is.
    fn leg_fails(self: &Rc<Self>, e: Error, loss: Loss) -> bool {
        if e == Error::NoSpace {
            self.note_full();
        }
        let member = self.member.borrow().role() == Role::Member;
        if !member {
            self.attempt_failed();
        }
        let alone =
            member && self.others().is_empty() && self.member.borrow().admitting().is_none();
        if alone {
            // A joiner may have applied what is refused here: it has to begin again.
            let joiners: Vec<_> = self.joiners.borrow().attached().collect();
            joiners.into_iter().for_each(|node| self.drop_joiner(node));
        }
        if e == Error::Gone && !self.leg.is_dead() {
            tracing::error!("the leg of this replica is lost");
            self.leg.give_up(loss);
            self.event(Event::LegDead);
        } else if e != Error::Gone {
            tracing::error!(error = %e, alone, "the leg of this replica has failed an operation");
            self.refused.set(Some(e));
            self.event(Event::LegFailed);
        }
        self.signal.raise();
        alone
    }

    /// The joiner's leg has failed: the primary need not wait for it.
    fn attempt_failed(&self) {
        let Some(joining) = self.joining.get() else { return };
        self.end_attempt(join::Ending::Failed);
        let pause = self.settings.rejoin_after_failure;
        self.attempts.update(|attempts| attempts.rest(self.core.now(), pause));
        if let Some(link) = self.primary_link() {
            link.send(Message::Detached { incarnation: joining.incarnation() });
        }
    }

    /// A session has come up; the older one with that node, if any, has ended.
    pub(super) fn up(self: &Rc<Self>, link: Link) {
        let node = link.node();
        self.hears(node);
        if let Some(older) = self.links.borrow_mut().insert(node, link) {
            older.close();
        }
        self.lost.borrow_mut().remove(&node);
        self.drop_joiner(node);
        self.event(Event::LinkUp(node));
        self.attempts.update(join::Attempts::invited);
        self.join_soon();
    }

    /// The session has ended.
    pub(super) fn down(self: &Rc<Self>, node: NodeId, session: u64) {
        let present = self.links.borrow().get(&node).is_some_and(|l| l.session() == session);
        if !present {
            return;
        }
        if let Some(link) = self.links.borrow_mut().remove(&node) {
            link.close();
        }
        self.lost.borrow_mut().insert(node, self.pulse.get());
        self.drop_joiner(node);
        if self.joining.get().is_some_and(|j| j.session() == session) {
            self.end_attempt(join::Ending::Failed);
        }
        self.event(Event::LinkDown(node));
    }

    /// Everything that goes on by itself, until the replica is closed.
    pub(super) fn run(self: &Rc<Self>) {
        let this = Rc::clone(self);
        self.spawn(async move { this.keep_time().await });
        let this = Rc::clone(self);
        self.spawn(async move { this.follow_record().await });
        let this = Rc::clone(self);
        self.spawn(async move { this.keep_joining().await });
        let this = Rc::clone(self);
        self.spawn(async move { this.keep_sweeping().await });
        let this = Rc::clone(self);
        self.spawn(async move { this.keep_watch().await });
        self.event(Event::Tick);
    }

    async fn keep_time(self: Rc<Self>) {
        while !self.closed.get() {
            let now = self.core.now();
            let next = self.member.borrow().next_timer(now);
            let armed = || {
                let closed = self.closed.get();
                closed || self.member.borrow().next_timer(self.core.now()) != next
            };
            match next {
                None => self.timer.until(|| armed().then_some(())).await,
                Some(next) => {
                    self.timer.unless(armed, self.core.sleep_until(next)).await;
                    if self.core.now() >= next {
                        self.event(Event::Tick);
                    }
                }
            }
        }
    }

    async fn follow_record(self: Rc<Self>) {
        while !self.closed.get() {
            let over = || self.closed.get();
            self.signal.unless(over, self.store.changed()).await;
            self.event(Event::Changed);
        }
    }

    async fn keep_joining(self: Rc<Self>) {
        while !self.closed.get() {
            let wanted = || (self.join_wanted.replace(false) || self.closed.get()).then_some(());
            // A second later in any case: what was asked may have been lost.
            let _ = tokio::time::timeout(join::PERIOD, self.joins.until(wanted)).await;
            let may = self.may_join.get() && self.attempts.get().may_begin(self.core.now());
            if may && !self.closed.get() {
                self.join().await;
            }
        }
    }

    async fn keep_sweeping(self: Rc<Self>) {
        while !self.closed.get() {
            self.pause(sweep::PERIOD).await;
            if !self.closed.get() && !self.leg.is_dead() {
                self.sweep().await;
            }
        }
    }

    /// Finds what hangs though nobody has died (RFD 0010, 4.8).
    async fn keep_watch(self: Rc<Self>) {
        while !self.closed.get() {
            self.pause(reach::BEAT).await;
            // Not by the clock: while this process is stopped nothing of it answers, and nothing of it
            // has to.
            self.pulse.update(|pulse| pulse + reach::BEAT);
            self.ask_while_idle();
            let ago = |time| self.pulse.get().saturating_sub(time);
            let (stuck, absent) = (ago(self.settings.stuck), ago(self.settings.absent));
            if self.leg.oldest().is_some_and(|began| began < stuck) && !self.leg.is_dead() {
                tracing::error!("the disk of this replica does not answer: it is given up");
                self.leg_fails(Error::Gone, Loss::Silent);
            }
            self.break_silent();
            if self.is_primary() {
                self.watch_members(stuck, absent);
            } else {
                // Later than the primary knows whom nobody reaches.
                self.report_gaps(ago(2 * self.settings.absent));
            }
            self.keep_sessions();
            self.look_for_room();
        }
    }

    /// While it does not serve it asks the store again and again: what it waits for may be a record that
    /// it was not told of.
    fn ask_while_idle(self: &Rc<Self>) {
        if self.serves().is_none() && self.pulse.get() >= self.asked.get() + ASK_AGAIN {
            self.asked.set(self.pulse.get());
            self.event(Event::Changed);
        }
    }

    /// Says something where no leases do: a session whose other end has lost its power is found out
    /// only by what is sent.
    fn keep_sessions(&self) {
        let members = if self.serves().is_some() { self.others() } else { Nodes::new() };
        let links: Vec<_> = self.links.borrow().values().cloned().collect();
        for link in links.iter().filter(|link| !members.contains(&link.node())) {
            let standing = self.member.borrow().standing_for(link.node());
            link.send(Message::Standing(standing));
        }
    }

    /// Gives up members that have not answered since `stuck`, or were not reached since `absent`.
    fn watch_members(self: &Rc<Self>, stuck: Duration, absent: Duration) {
        let mut late = self.order.borrow().late(stuck);
        late.extend(self.requests.late(stuck));
        late.extend(self.silent_joiners());
        if self.began.get() < stuck && self.opened.get() != self.member.borrow().view() {
            late.extend(self.member.borrow().gathering());
        }
        late.extend(self.lost.borrow().iter().filter(|(_, at)| **at < absent).map(|(n, _)| *n));
        late.extend(self.gone_astray());
        late.sort_unstable();
        late.dedup();
        for node in late {
            if self.others().contains(&node) {
                if !self.member.borrow().is_stuck(node) {
                    tracing::warn!(
                        node = node.0,
                        "a replica does not get on though its node lives"
                    );
                    self.event(Event::Stuck(node));
                }
            } else {
                self.drop_joiner(node);
            }
        }
    }

    /// The joiner says that its attempt has ended.
    pub(super) fn drop_attempt(self: &Rc<Self>, node: NodeId, incarnation: peer::Incarnation) {
        if self.joiners.borrow_mut().get(node, incarnation).is_some() {
            self.drop_joiner(node);
        }
    }
}
