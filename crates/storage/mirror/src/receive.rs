//! What other replicas say.

use std::rc::Rc;

use block::{Ctx, Error, Failure};
use intent_log::Bitmap;
use peer::{Change, Entry, Kind, Link, Message, NodeId, Outcome, Received, Role, Tag, View};

use super::join::{Attempts, Ending};
use super::link::is_lease;
use super::member::{Event, Say};
use super::own::Verdict;
use super::record::Record;
use super::replica::Replica;
use super::requests::Answer;
use super::space::Assessment;

impl Replica {
    /// Takes a message of the session that `link` is the end of. What belongs to a view that has
    /// not begun here waits for it, and keeps its lane waiting; dropping the future while it waits
    /// drops the message.
    pub(super) async fn receive(self: &Rc<Self>, link: Link, received: Received) {
        let Received { message, ctx } = received;
        self.hears(link.node());
        if let Some(view) = data_view(&message)
            && view > self.view.get()
        {
            let begun = || (self.view.get() >= view || link.is_closed()).then_some(());
            self.signal.until(begun).await;
        }
        if !link.is_closed() {
            self.take(link, message, ctx);
        }
    }

    fn take(self: &Rc<Self>, link: Link, message: Message, ctx: Option<Ctx>) {
        let from = link.node();
        match message {
            Message::Standing(_)
            | Message::Renew { .. }
            | Message::Promise { .. }
            | Message::Newer { .. }
            | Message::Yield { .. }
            | Message::Yielded { .. }
            | Message::Start { .. } => self.take_word(from, message),
            Message::Started { view, entries } => self.take_started(from, view, entries),
            Message::Open { view, through, settled } => {
                self.take_open(from, view, through, settled);
            }
            Message::Rejoin { .. } => {
                self.end_attempt(Ending::Overtaken);
                self.attempts.update(Attempts::invited);
                self.join_soon();
            }
            Message::Join { incarnation, epoch, volume_bytes, region_shift, shared, marks } => {
                let marks = Bitmap { volume_bytes, region_shift, bits: marks };
                self.take_join(from, incarnation, epoch, (shared, marks));
            }
            // It is answered also where its view is over.
            Message::Fetch { view, request, range } => {
                self.spawn(Rc::clone(self).serve_fetch(link, view, request, range));
            }
            Message::Accept { view, incarnation, reached } => {
                self.take_accept(from, view, incarnation, reached);
            }
            Message::Detached { incarnation } => {
                self.take_detached(incarnation);
                self.drop_attempt(from, incarnation);
            }
            of_view => self.take_in_view(link, of_view, ctx),
        }
    }

    /// What belongs to one view, and means nothing in another.
    fn take_in_view(self: &Rc<Self>, link: Link, message: Message, ctx: Option<Ctx>) {
        let from = link.node();
        let Some(view) = view_of(&message).filter(|view| *view == self.view.get()) else { return };
        match message {
            Message::Order { .. } | Message::Forward { .. } => self.take_order(&link, message, ctx),
            Message::Write { seq, tag, copy, change, .. } => {
                let (Some(ctx), true) = (ctx, self.is_sound(&change)) else { return };
                let (range, kind, fua) = (change.range, change.kind, change.fua);
                let mine = self.member.borrow().role() == Role::Member;
                if mine && self.primary() == Some(from) || self.joins_in(from, view) {
                    let entry = Entry { view, seq, tag, range, kind, fua };
                    self.take_write(link, entry, copy, change, ctx);
                }
            }
            Message::Grant { number, seq, .. } => self.take_grant(from, view, number, seq),
            Message::Done { number, .. } => self.take_done(number),
            Message::Late { number, .. } => self.ends(number, Verdict::Late),
            Message::Outcome { number, outcome, .. } => {
                self.ends(number, Verdict::Outcome(outcome));
            }
            Message::Applied { seq, .. } => self.confirmed(view, seq, from),
            Message::NoSpace { seq, .. } => self.take_no_space(from, view, seq),
            Message::Assess { request, seq, .. } => {
                self.spawn(Rc::clone(self).serve_assess(link, view, request, seq));
            }
            Message::Assessed { request, free_bytes, zeroes, .. } => {
                let assessment = Assessment { free_bytes, zeroes };
                self.requests.answer(request, from, Answer::Assessed(assessment));
            }
            Message::Commit { seqs, .. } => {
                seqs.into_iter().for_each(|seq| self.learned_commit(view, seq));
            }
            Message::Want { .. } => self.tell(view),
            Message::Flush { request, lineage, .. } => {
                self.spawn(Rc::clone(self).serve_flush(from, link, view, (request, lineage)));
            }
            Message::Flushed { request, .. } => {
                self.requests.answer(request, from, Answer::Flushed);
            }
            Message::Data { request, result, .. } => {
                self.requests.answer(request, from, Answer::Data(result));
            }
            Message::Repair { range, .. } => {
                let this = Rc::clone(self);
                self.spawn(async move {
                    let _ = this.repair(view, range).await;
                });
            }
            Message::Clear { request, regions, .. } => self.take_clear(view, request, &regions),
            Message::Marked { regions, .. } => self.take_marked(regions),
            Message::Unreachable { node, .. } => self.take_unreachable(from, node),
            Message::Sum { request, range, .. } => {
                self.spawn(Rc::clone(self).serve_sum(link, view, request, range));
            }
            Message::Summed { request, result, .. } => {
                self.requests.answer(request, from, Answer::Sum(result));
            }
            _ => {}
        }
    }

    /// What has come beside the session.
    pub(super) fn take_lease(self: &Rc<Self>, from: NodeId, message: Message) {
        if is_lease(&message) {
            self.hears_beside(from);
            self.take_word(from, message);
        }
    }

    /// What the membership machine is told.
    fn take_word(self: &Rc<Self>, from: NodeId, message: Message) {
        if self.leases.borrow().is_known(from, &message) {
            return;
        }
        self.leases.borrow_mut().hear(from, &message);
        let say = match message {
            Message::Standing(standing) => Say::Standing(standing),
            Message::Renew { epoch, incarnation, stamp } => {
                let now = self.core.now();
                self.stamps.borrow_mut().entry(from).or_default().note(incarnation, stamp, now);
                Say::Renew { epoch, incarnation, stamp }
            }
            Message::Promise { epoch, incarnation, stamp } => {
                Say::Promise { epoch, incarnation, stamp }
            }
            Message::Newer { epoch } => Say::Newer(epoch),
            Message::Yield { view, incarnation } => Say::Yield { view, incarnation },
            Message::Yielded { view, incarnation } => Say::Yielded { view, incarnation },
            Message::Start { view, record } => match Record::parse(&record) {
                Ok(record) => Say::Start { view, record },
                Err(error) => {
                    tracing::error!(%error, node = from.0, "a view begins with a bad record");
                    return;
                }
            },
            _ => return,
        };
        self.event(Event::Heard(from, say));
    }

    /// A write or request for the primary to put in order.
    fn take_order(self: &Rc<Self>, link: &Link, message: Message, ctx: Option<Ctx>) {
        let from = link.node();
        let (view, number, stamp) = match &message {
            Message::Order { view, number, stamp, .. }
            | Message::Forward { view, number, stamp, .. } => (*view, *number, *stamp),
            _ => return,
        };
        let (Some(ctx), true) = (ctx, self.is_primary()) else { return };
        if self.opened.get() != Some(view) || !self.others().contains(&from) {
            return;
        }
        let (now, lease) = (self.core.now(), self.settings.member.lease());
        let fresh = self.stamps.borrow().get(&from).is_some_and(|s| s.is_fresh(stamp, now, lease));
        if !fresh {
            link.send(Message::Late { view, number });
            return;
        }
        let tag = Tag { node: from, number };
        match message {
            Message::Order { change, .. } if self.is_sound(&change) => {
                self.start(Rc::clone(self).place_for_peer(link.clone(), view, tag, change, ctx));
            }
            Message::Forward { range, fua, data, .. } if self.is_inside(range) => {
                let request = super::compare::Forwarded { tag, range, fua, data };
                self.spawn(Rc::clone(self).compare_for_peer(link.clone(), view, request, ctx));
            }
            _ => tracing::warn!(node = from.0, "an order outside the volume is dropped"),
        }
    }

    /// Whether a change lies in the volume and brings what it should.
    fn is_sound(&self, change: &Change) -> bool {
        let bytes = if change.kind == Kind::Write { self.len(change.range) } else { 0 };
        self.is_inside(change.range) && change.data.len() == bytes
    }

    fn ends(&self, number: u64, verdict: Verdict) {
        if let Some(own) = self.own.get(number) {
            own.ends(verdict);
        }
    }
}

/// The view that a message with data waits for.
fn data_view(message: &Message) -> Option<View> {
    match message {
        Message::Write { view, .. }
        | Message::Order { view, .. }
        | Message::Forward { view, .. } => Some(*view),
        _ => None,
    }
}

/// The view that a message belongs to.
fn view_of(message: &Message) -> Option<View> {
    match message {
        Message::Order { view, .. }
        | Message::Grant { view, .. }
        | Message::Done { view, .. }
        | Message::Late { view, .. }
        | Message::Write { view, .. }
        | Message::Applied { view, .. }
        | Message::NoSpace { view, .. }
        | Message::Assess { view, .. }
        | Message::Assessed { view, .. }
        | Message::Commit { view, .. }
        | Message::Want { view, .. }
        | Message::Forward { view, .. }
        | Message::Outcome { view, .. }
        | Message::Flush { view, .. }
        | Message::Flushed { view, .. }
        | Message::Data { view, .. }
        | Message::Repair { view, .. }
        | Message::Clear { view, .. }
        | Message::Marked { view, .. }
        | Message::Unreachable { view, .. }
        | Message::Sum { view, .. }
        | Message::Summed { view, .. } => Some(*view),
        _ => None,
    }
}

/// What a failed request is called on its way back.
pub(super) fn outcome(result: Result<(), Failure>) -> Outcome {
    match result {
        Ok(()) => Outcome::Done,
        Err(Failure::Miscompare { offset }) => Outcome::Miscompare { offset },
        Err(Failure::Device(e)) => Outcome::Failed(e),
        // Reservations are judged, and clients turned away, above the mirror.
        Err(Failure::Conflict | Failure::Busy) => Outcome::Failed(Error::Aborted),
    }
}
