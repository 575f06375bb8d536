//! Reads: from the own disk, behind writes that are not known to be committed (RFD 0010, 4.3).

use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Bufs, Class, Ctx, Error, RangeLock, Run};
use peer::{Message, NodeId, View};

use super::Mistake;
use super::replica::Replica;
use super::requests::Answer;

/// How long a read waits for writes before it asks the primary.
const PATIENCE: Duration = Duration::from_millis(50);

/// How often it is looked for a moment without writes.
const LOOKS: usize = 100;

/// What came of waiting for a range.
enum Waited {
    Held,
    /// The view is over.
    Over,
    /// The primary had the contents.
    Found(Bufs),
}

impl Replica {
    pub(super) async fn read(self: &Rc<Self>, range: Blocks, ctx: &Ctx) -> Result<Bufs, Error> {
        loop {
            let view = self.serving(ctx).await?;
            let lock = self.locks.enter(range, false);
            if !lock.is_held() && !self.settings.makes(Mistake::ReadsThroughEntries) {
                self.want(range);
                match Box::pin(self.wait_for(view, range, &lock, ctx)).await {
                    Waited::Held => {}
                    Waited::Over => continue,
                    Waited::Found(found) => return Ok(found),
                }
            }
            let found = self.leg.read(range, ctx, self.pulse.get()).await;
            // Its range must not be held while others are asked: attack 32.
            drop(lock);
            // The lease covers what was read only if it still holds now.
            if self.serves().is_none() {
                continue;
            }
            match found {
                Err(Error::Unreadable { .. } | Error::Corrupt { .. }) => {
                    if let Some(found) = Box::pin(self.fetch_elsewhere(view, range, ctx)).await {
                        self.ask_for_repair(view, range);
                        return Ok(found);
                    }
                    if self.view.get() == view {
                        return found;
                    }
                }
                Err(Error::Gone) => {
                    // The last member's client learns why; at any other the command goes elsewhere.
                    return if self.leg_failed(Error::Gone) { found } else { Err(Error::Fenced) };
                }
                found => return found,
            }
        }
    }

    /// How a range begins, by the own disk, which has what every member has while it serves. What is not known to be
    /// committed may yet turn out not to have happened: its blocks are mapped, whatever they are by now.
    pub(super) async fn map(self: &Rc<Self>, range: Blocks, ctx: &Ctx) -> Result<Run, Error> {
        loop {
            let view = self.serving(ctx).await?;
            let found = self.leg.map(range, ctx, self.pulse.get()).await;
            // The opening of another view may have put back what was freed.
            if self.serves() != Some(view) {
                continue;
            }
            return match found {
                Ok(run) if run.mapped => Ok(run),
                Ok(run) => Ok(self.as_committed(range, run)),
                Err(Error::Gone) if !self.leg_failed(Error::Gone) => Err(Error::Fenced),
                // Nothing can be told: nothing is free.
                Err(Error::Unreadable { .. } | Error::Corrupt { .. }) => {
                    let blocks = u32::try_from(range.count).unwrap_or(u32::MAX);
                    Ok(Run { blocks, mapped: true })
                }
                Err(e) => Err(e),
            };
        }
    }

    /// Waits until no write of `range` that this leg has, or is about to get, may yet turn out not to have happened.
    pub(super) async fn settle_range(
        self: &Rc<Self>,
        range: Blocks,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        for _ in 0..LOOKS {
            let view = self.serving(ctx).await?;
            let lock = self.locks.enter(range, false);
            if !lock.is_held() {
                self.want(range);
                let held = self.in_view(view, lock.held());
                if !matches!(tokio::time::timeout(PATIENCE, held).await, Ok(Some(()))) {
                    continue;
                }
            }
            if self.serves() == Some(view) {
                return Ok(());
            }
        }
        // Others' writes of the range do not end, or views do not last.
        Err(Error::Fenced)
    }

    /// What of `run`, which `range` begins with and has nothing in it, is known to be so at all members.
    fn as_committed(&self, range: Blocks, run: Run) -> Run {
        let Some(next) = self.entries.borrow().next(range.at) else { return run };
        let blocks = |count: u64| u32::try_from(count).unwrap_or(u32::MAX).min(run.blocks);
        if next.at > range.at {
            return Run { blocks: blocks(next.at.0 - range.at.0), mapped: false };
        }
        let end = next.end().unwrap_or(u64::MAX);
        Run { blocks: blocks(end - range.at.0), mapped: true }
    }

    /// Waits for a range that writes have. Writes may overtake it here for ever; at the primary they
    /// cannot, so after a while its contents are fetched from there.
    async fn wait_for(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        lock: &RangeLock,
        ctx: &Ctx,
    ) -> Waited {
        loop {
            match tokio::time::timeout(PATIENCE, self.in_view(view, lock.held())).await {
                Ok(Some(())) => return Waited::Held,
                Ok(None) => return Waited::Over,
                Err(_) if self.turns_away() => return Waited::Over,
                Err(_) if self.is_primary() => {}
                Err(_) => {
                    let Some(primary) = self.primary() else { continue };
                    let left = ctx.credit().left();
                    let found = tokio::select! {
                        biased;
                        // The next writer here waits for whoever has the range, and the primary's
                        // answer stands behind that writer: attack 84.
                        () = lock.held() => {
                            regain(ctx, left).await;
                            return Waited::Held;
                        }
                        found = self.fetch(view, primary, range, ctx) => found,
                    };
                    match found {
                        Some(found) if self.serves().is_some() => return Waited::Found(found),
                        _ if self.view.get() != view => return Waited::Over,
                        _ => {}
                    }
                }
            }
        }
    }

    /// Tells the primary that somebody waits for the commit of what is in the way.
    fn want(&self, range: Blocks) {
        if self.is_primary() {
            return;
        }
        let Some(link) = self.primary_link() else { return };
        for (view, seq) in self.entries.borrow().overlapped(range) {
            link.send(Message::Want { view, seq });
        }
    }

    /// The contents as another member has them. `None` if no other member has them, or the view
    /// is over.
    pub(super) async fn fetch_elsewhere(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        ctx: &Ctx,
    ) -> Option<Bufs> {
        for node in self.others() {
            if let Some(found) = self.fetch(view, node, range, ctx).await {
                tracing::warn!(at = range.at.0, node = node.0, "read from another replica");
                return Some(found);
            }
        }
        None
    }

    /// The contents as `node` has them, if it can tell before the view is over.
    pub(super) async fn fetch(
        &self,
        view: View,
        node: NodeId,
        range: Blocks,
        ctx: &Ctx,
    ) -> Option<Bufs> {
        let link = self.link(node)?;
        let left = ctx.credit().left();
        let answer = {
            let request = self.requests.number();
            let asked = self.requests.ask(request, node, self.pulse.get());
            let _memory = link.expect(request, ctx.clone());
            link.send(Message::Fetch { view, request, range });
            let gone = || self.view.get() != view || link.is_closed();
            self.signal.unless(gone, asked.answered()).await
        };
        match answer {
            Some(Answer::Data(Ok(found))) if found.len() == self.len(range) => return Some(found),
            answer => drop(answer),
        }
        regain(ctx, left).await;
        None
    }

    fn ask_for_repair(self: &Rc<Self>, view: View, range: Blocks) {
        if self.is_primary() {
            let this = Rc::clone(self);
            self.spawn(async move {
                let _ = this.repair(view, range).await;
            });
        } else if let Some(link) = self.primary_link() {
            link.send(Message::Repair { view, range });
        }
    }

    /// Answers a FETCH.
    pub(super) async fn serve_fetch(
        self: Rc<Self>,
        link: peer::Link,
        view: View,
        request: u64,
        range: Blocks,
    ) {
        // An answer in any case: the other side keeps in mind that it has asked.
        let result = self.fetch_for_peer(link.node(), view, range).await;
        link.send(Message::Data { view, request, result });
    }

    /// Memory for what `range` holds, to be sent to another member. Whoever has it waits for the
    /// own disk and the way there, never for a lock.
    pub(super) async fn answering(&self, view: View, range: Blocks) -> Result<Ctx, Error> {
        let memory = self.memory(self.len(range), Class::Answer);
        self.in_view(view, memory).await.ok_or(Error::Fenced)?
    }

    async fn fetch_for_peer(
        self: &Rc<Self>,
        from: NodeId,
        view: View,
        range: Blocks,
    ) -> Result<Bufs, Error> {
        if !self.is_inside(range) || self.len(range) > self.max_transfer() {
            return Err(Error::OutOfRange);
        }
        if self.view.get() != view {
            return Err(Error::Fenced);
        }
        // While members are made equal the range is locked by the very entry that is asked for,
        // and nobody else is at work. A write of this view says that it is open, though OPEN is late; so does
        // whoever asks and is not the primary, whose OPEN another's request may overtake.
        let settling = self.primary() == Some(from)
            && self.opened.get() != Some(view)
            && self.entries.borrow().are_copies(view, range);
        if settling {
            let ctx = self.answering(view, range).await?;
            let found = self.leg.read(range, &ctx, self.pulse.get()).await;
            if let Err(e) = found
                && !self.entries.borrow().overlapped(range).is_empty()
            {
                // It has written this moments ago (attack 86).
                self.leg_failed(e);
            }
            return found;
        }
        let lock = self.locks.enter(range, false);
        self.in_view(view, lock.held()).await.ok_or(Error::Fenced)?;
        let ctx = self.answering(view, range).await?;
        let found = self.leg.read(range, &ctx, self.pulse.get()).await;
        // A lease that has run out meanwhile may come back without a new view.
        if self.serves().is_some() { found } else { Err(Error::Fenced) }
    }
}

/// Waits until `ctx` has so much memory again. Contents that nobody wants any more may be half received: what they
/// lie in is free when they have come, or with the end of the session.
async fn regain(ctx: &Ctx, left: usize) {
    while ctx.credit().left() < left {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
