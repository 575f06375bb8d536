//! COMPARE AND WRITE, as a whole at the primary (RFD 0010, 4.5); and repair, which writes what it has
//! read in the same way.

use std::rc::Rc;

use block::{Blocks, Bufs, Class, Ctx, Error, Failure, Lba};
use peer::{Change, Kind, Link, Message, NodeId, Outcome, Tag, View};

use super::own::{Own, Verdict};
use super::receive::outcome;
use super::replica::Replica;
use super::write::{Brought, Placed};

/// A request of another member.
#[derive(Debug)]
pub(super) struct Forwarded {
    pub(super) tag: Tag,
    pub(super) range: Blocks,
    pub(super) fua: bool,
    /// The expected contents, then the new ones.
    pub(super) data: Bufs,
}

/// What became of a request at the primary.
enum Done {
    Answer(Result<(), Failure>),
    /// The view was over before it had any effect.
    Missed,
    /// The view is over; the next one knows.
    Ended,
}

impl Replica {
    /// Replaces the contents from `at` on by `write` if they are `compare`.
    pub(super) async fn compare_and_write(
        self: &Rc<Self>,
        at: Lba,
        compare: &Bufs,
        write: &Bufs,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), Failure> {
        let block = u64::from(self.leg.dev.info().block_size);
        let range = Blocks::new(at, write.len() as u64 / block);
        let data: Bufs = compare.iter().chain(write.iter()).cloned().collect();
        let own = self.own.begin();
        let request = Forwarded { tag: own.tag(), range, fua, data };
        loop {
            let view = self.serving(ctx).await?;
            own.renew();
            if self.is_primary() {
                match self.compare_here(view, &request, ctx).await {
                    Done::Answer(result) => return result,
                    Done::Missed => continue,
                    Done::Ended => {}
                }
            } else {
                self.forward(view, &own, &request);
            }
            match own.verdict().await {
                Verdict::Committed | Verdict::Outcome(Outcome::Done) => return Ok(()),
                Verdict::Outcome(Outcome::Miscompare { offset }) => {
                    return Err(Failure::Miscompare { offset });
                }
                Verdict::Outcome(Outcome::Failed(e)) | Verdict::Failed(e) => return Err(e.into()),
                Verdict::Again => {}
                Verdict::Late => self.renewed(view).await,
                Verdict::Fenced => return Err(Error::Fenced.into()),
            }
        }
    }

    fn forward(&self, view: View, own: &Own, request: &Forwarded) {
        let Some(link) = self.primary_link() else { return };
        let (number, stamp) = (own.tag().number, self.answered(link.node()));
        let Forwarded { range, fua, .. } = *request;
        let data = request.data.clone();
        link.send(Message::Forward { view, number, stamp, range, fua, data });
    }

    /// A request of another member, at the primary.
    pub(super) async fn compare_for_peer(
        self: Rc<Self>,
        link: Link,
        view: View,
        request: Forwarded,
        ctx: Ctx,
    ) {
        let len = self.len(request.range);
        if request.data.len() != len * 2 || len > self.max_transfer() {
            let outcome = Outcome::Failed(Error::OutOfRange);
            link.send(Message::Outcome { view, number: request.tag.number, outcome });
            return;
        }
        let number = request.tag.number;
        match self.compare_here(view, &request, &ctx).await {
            Done::Answer(result) => {
                link.send(Message::Outcome { view, number, outcome: outcome(result) });
            }
            // If the view goes on all the same, it is asked again.
            Done::Missed => link.send(Message::Late { view, number }),
            Done::Ended => {}
        }
        drop(ctx);
    }

    async fn compare_here(self: &Rc<Self>, view: View, request: &Forwarded, ctx: &Ctx) -> Done {
        let Forwarded { tag, range, fua, ref data } = *request;
        let lock = self.locks.enter(range, true);
        let over = || self.view.get() != view || self.turns_away();
        if self.signal.unless(over, lock.held()).await.is_none() {
            return Done::Missed;
        }
        // The memory that came with another member's request holds its data, and no more.
        let reading = match tag.node == self.me {
            true => ctx.clone(),
            false => match self.answering(view, range).await {
                Ok(reading) => reading,
                Err(_) => return Done::Missed,
            },
        };
        let found = self.read_ordered(view, range, &reading).await;
        // What was read is the truth only if the lease still holds.
        if self.serves() != Some(view) {
            return Done::Missed;
        }
        let found = match found {
            Ok(found) => found,
            Err(e) => return Done::Answer(Err(e.into())),
        };
        let half = data.len() / 2;
        if let Some(offset) = data.slice(0..half).first_difference(&found) {
            return Done::Answer(Err(Failure::Miscompare { offset: offset as u64 }));
        }
        drop((found, reading));
        let data = data.slice(half..data.len());
        let change = Change { range, kind: Kind::Write, fua, data };
        match self.place_locked(view, tag, Brought::Here, &change, lock, ctx).await {
            Placed::Committed => Done::Answer(Ok(())),
            Placed::Failed(e) => Done::Answer(Err(e.into())),
            Placed::Missed => Done::Missed,
            Placed::Ended => Done::Ended,
        }
    }

    /// Reads a range that this primary holds for writing.
    async fn read_ordered(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        match self.leg.read(range, ctx, self.pulse.get()).await {
            Err(e @ (Error::Unreadable { .. } | Error::Corrupt { .. })) => {
                // Others may hold the range for writes whose commit they have not been told.
                self.tell(view);
                self.fetch_elsewhere(view, range, ctx).await.ok_or(e)
            }
            found => found,
        }
    }

    /// Writes a good copy of `range` to all members, at the primary. Says whether all have it.
    pub(super) async fn repair(self: &Rc<Self>, view: View, range: Blocks) -> bool {
        self.repair_from(view, range, None).await
    }

    /// As [`Self::repair`], with the copy that the member on this node has, if one is named.
    pub(super) async fn repair_from(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        node: Option<NodeId>,
    ) -> bool {
        let fits = self.is_inside(range) && self.len(range) <= self.max_transfer();
        if !fits || !self.is_primary() || self.serves() != Some(view) {
            return false;
        }
        let Ok(ctx) = self.memory(self.len(range), Class::Restore).await else { return false };
        let lock = self.locks.enter(range, true);
        if self.in_view(view, lock.held()).await.is_none() {
            return false;
        }
        let found = match node.filter(|node| *node != self.me) {
            None => self.read_ordered(view, range, &ctx).await,
            Some(node) => {
                // It may hold the range for a write whose commit it has not been told.
                self.tell(view);
                let found = self.fetch(view, node, range, &ctx).await;
                found.ok_or(Error::Unreadable { at: range.at })
            }
        };
        if self.serves() != Some(view) {
            return false;
        }
        match found {
            Ok(data) => {
                let own = self.own.begin();
                let change = Change { range, kind: Kind::Write, fua: true, data };
                let placed =
                    self.place_locked(view, own.tag(), Brought::Here, &change, lock, &ctx).await;
                tracing::warn!(at = range.at.0, blocks = range.count, ?placed, "repaired");
                placed == Placed::Committed
            }
            Err(error) => {
                tracing::error!(at = range.at.0, %error, "no replica can read this");
                false
            }
        }
    }
}
