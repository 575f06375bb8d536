//! Flushes (RFD 0010, 4.4).

use std::rc::Rc;

use block::{Ctx, Error, MemoryClass};
use futures_util::future::{join, join_all};
use intent_log::FlushStamp;
use peer::{Link, Message, NodeId, Role, View};
use rt::fault_point::{self, FaultPoint};

use super::Mistake;
use super::peer_requests::PeerAnswer;
use super::replica::Replica;

impl Replica {
    pub(super) async fn flush(self: &Rc<Self>, ctx: &Ctx) -> Result<(), Error> {
        loop {
            let view = self.wait_serving(ctx).await?;
            if self.flush_members(view, 0).await?.is_some() {
                return Ok(());
            }
        }
    }

    /// Flushes every member in `view`. Returns the number of the flush and what it covers here, or
    /// `None` if the view ends before all have confirmed. If `generation` is not 0, all other
    /// members have then recorded the data generation with that count (RFD 0032).
    pub(super) async fn flush_members(
        self: &Rc<Self>,
        view: View,
        generation: u32,
    ) -> Result<Option<(u64, FlushStamp)>, Error> {
        let request = self.peer_requests.next_number();
        let mut nodes = self.others();
        if self.is_primary() {
            nodes.extend(self.state().joiners.in_flushes());
        }
        let peers = nodes.into_iter().map(|node| self.flush_peer(view, node, request, generation));
        let local = async {
            self.wait_metadata_applied(view).await?;
            Some(self.flush_leg(None).await)
        };
        let (peers, local) = join(join_all(peers), local).await;
        match local {
            Some(Err(e)) => self.on_flush_failed(view, e).await,
            Some(Ok(stamp)) if !peers.contains(&None) => Ok(Some((request, stamp))),
            _ => Ok(None),
        }
    }

    /// Flushes the local leg. `request` is the number that a CLEAR REGIONS may name, and the count
    /// of the data generation.
    async fn flush_leg(&self, request: Option<(u64, u32)>) -> Result<FlushStamp, Error> {
        let ctx = self.reserve_memory(0, MemoryClass::LocalIo).await?;
        self.leg.flush(request, &ctx, self.awake_now()).await
    }

    /// Waits until changes of the metadata blocks have taken effect here; `None` if the view ends
    /// first. A joiner need not wait: it serves no clients yet.
    async fn wait_metadata_applied(&self, view: View) -> Option<()> {
        let skips = self.settings.has_mistake(Mistake::FlushesBeforeMetadataApplied);
        if skips || self.state().membership.role() != Role::Member {
            return Some(());
        }
        self.while_in_view(view, self.metadata_observer.wait_in_force()).await
    }

    /// The leg is lost; other members may finish the flush in another view.
    async fn on_flush_failed<T>(self: &Rc<Self>, view: View, e: Error) -> Result<Option<T>, Error> {
        if self.on_leg_error(e) {
            return Err(e);
        }
        self.while_in_view(view, std::future::pending::<()>()).await;
        Ok(None)
    }

    /// Answers a FLUSH.
    pub(super) async fn serve_flush(
        self: Rc<Self>,
        from: NodeId,
        link: Link,
        view: View,
        (request, generation): (u64, u32),
    ) {
        // A CLEAR REGIONS names flushes of the primary only.
        let request_to_remember = (Some(from) == self.primary()).then_some((request, generation));
        if self.wait_metadata_applied(view).await.is_none() {
            return;
        }
        if let Err(e) = self.flush_leg(request_to_remember).await {
            self.on_leg_error(e);
            return;
        }
        if generation > 0
            && request_to_remember.is_some()
            && !self.record_flush_generation(view, generation).await
        {
            return;
        }
        if self.is_primary() && self.flush_joiners(view).await.is_none() {
            return;
        }
        fault_point::reach(FaultPoint::MemberFlushed);
        link.send(Message::Flushed { view, request });
    }

    /// Flushes the joiners that take part in flushes; `None` if the view ends first.
    async fn flush_joiners(&self, view: View) -> Option<()> {
        let nodes = self.state().joiners.in_flushes();
        for node in nodes {
            self.flush_peer(view, node, self.peer_requests.next_number(), 0).await?;
        }
        Some(())
    }

    /// Makes `node` flush, under a number that other nodes may share; `None` if the view ends
    /// first. A node that is not required any more counts as flushed. Sends the request again in
    /// each new session: a second flush does no harm.
    pub(super) async fn flush_peer(
        &self,
        view: View,
        node: NodeId,
        request: u64,
        generation: u32,
    ) -> Option<()> {
        let pending = self.peer_requests.register(request, node, self.awake_now());
        let ended = || self.is_view_over(view);
        let over = || ended() || !self.state().is_required(node);
        loop {
            let poll_link = || if over() { Some(None) } else { self.link(node).map(Some) };
            let Some(link) = self.signal.until(poll_link).await else { break };
            link.send(Message::Flush { view, request, generation });
            let given_up = || over() || link.is_closed();
            if let Some(PeerAnswer::Flushed) =
                self.signal.unless(given_up, pending.wait_answer()).await
            {
                return Some(());
            }
        }
        (!ended()).then_some(())
    }
}
