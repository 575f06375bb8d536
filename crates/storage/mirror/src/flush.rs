//! Flushes (RFD 0010, 4.4).

use std::rc::Rc;

use block::{Class, Ctx, Error};
use futures_util::future::{join, join_all};
use intent_log::FlushStamp;
use peer::{Link, Message, NodeId, Role, View};
use rt::fault::{self, Point};

use super::Mistake;
use super::replica::Replica;
use super::requests::Answer;

impl Replica {
    pub(super) async fn flush(self: &Rc<Self>, ctx: &Ctx) -> Result<(), Error> {
        loop {
            let view = self.serving(ctx).await?;
            if self.flush_in(view, 0).await?.is_some() {
                return Ok(());
            }
        }
    }

    /// Flushes every member in `view`: the number of the flush, and what it covers here. `None` if
    /// the view is over before all have confirmed. All others then have recorded the lineage of that
    /// count, if it is not 0 (RFD 0032).
    pub(super) async fn flush_in(
        self: &Rc<Self>,
        view: View,
        lineage: u32,
    ) -> Result<Option<(u64, FlushStamp)>, Error> {
        let request = self.requests.number();
        let mut nodes = self.others();
        if self.is_primary() {
            nodes.extend(self.joiners.borrow().behind_barrier());
        }
        let theirs = nodes.into_iter().map(|node| self.flush_as(view, node, request, lineage));
        let own = async {
            self.settle_aside(view).await?;
            Some(self.flush_leg(None).await)
        };
        let (theirs, own) = join(join_all(theirs), own).await;
        match own {
            Some(Err(e)) => self.flush_failed(view, e).await,
            Some(Ok(stamp)) if !theirs.contains(&None) => Ok(Some((request, stamp))),
            _ => Ok(None),
        }
    }

    /// Flushes the own leg; `request` is the number that a CLEAR may name, and the lineage that goes with it.
    async fn flush_leg(&self, request: Option<(u64, u32)>) -> Result<FlushStamp, Error> {
        let ctx = self.memory(0, Class::Immediate).await?;
        self.leg.flush(request, &ctx, self.pulse.get()).await
    }

    /// Waits until what has changed beside the volume is in force here; `None` if the view is over first. Who
    /// is about to become a member has no clients whom it concerns, and cannot know yet.
    async fn settle_aside(&self, view: View) -> Option<()> {
        let careless = self.settings.makes(Mistake::FlushesUnsettled);
        if careless || self.member.borrow().role() != Role::Member {
            return Some(());
        }
        self.in_view(view, self.keeper.settled()).await
    }

    /// The leg is lost; others may finish the flush in another view.
    async fn flush_failed<T>(self: &Rc<Self>, view: View, e: Error) -> Result<Option<T>, Error> {
        if self.leg_failed(e) {
            return Err(e);
        }
        self.in_view(view, std::future::pending::<()>()).await;
        Ok(None)
    }

    /// Answers a FLUSH.
    pub(super) async fn serve_flush(
        self: Rc<Self>,
        from: NodeId,
        link: Link,
        view: View,
        (request, lineage): (u64, u32),
    ) {
        // A CLEAR names flushes of the primary only.
        let remembered = (Some(from) == self.primary()).then_some((request, lineage));
        if self.settle_aside(view).await.is_none() {
            return;
        }
        if let Err(e) = self.flush_leg(remembered).await {
            self.leg_failed(e);
            return;
        }
        if lineage > 0 && remembered.is_some() && !self.record_lineage(view, lineage).await {
            return;
        }
        if self.is_primary() && self.flush_joiners(view).await.is_none() {
            return;
        }
        fault::pass(Point::MemberFlushed);
        link.send(Message::Flushed { view, request });
    }

    /// Flushes the joiners that take part in flushes; `None` if the view is over first.
    async fn flush_joiners(&self, view: View) -> Option<()> {
        let nodes = self.joiners.borrow().behind_barrier();
        for node in nodes {
            self.flush_as(view, node, self.requests.number(), 0).await?;
        }
        Some(())
    }

    /// Has `node` flush, under a number that others may flush under as well; `None` if the view is
    /// over first. One that is required no more counts as having done it. Asks again in each new
    /// session: to flush twice does no harm.
    pub(super) async fn flush_as(
        &self,
        view: View,
        node: NodeId,
        request: u64,
        lineage: u32,
    ) -> Option<()> {
        let asked = self.requests.ask(request, node, self.pulse.get());
        let ended = || self.view.get() != view || self.turns_away();
        let over = || ended() || !self.is_required(node);
        loop {
            let there = || if over() { Some(None) } else { self.link(node).map(Some) };
            let Some(link) = self.signal.until(there).await else { break };
            link.send(Message::Flush { view, request, lineage });
            let vain = || over() || link.is_closed();
            if let Some(Answer::Flushed) = self.signal.unless(vain, asked.answered()).await {
                return Some(());
            }
        }
        (!ended()).then_some(())
    }
}
