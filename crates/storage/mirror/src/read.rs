//! Reads: from the local disk, after overlapping uncommitted writes (RFD 0010, 4.3).

use std::rc::Rc;
use std::time::Duration;

use block::{BlockStatus, Blocks, Bufs, Ctx, Error, MemoryClass, RangeLock};
use peer::{Message, NodeId, View};

use super::Mistake;
use super::peer_requests::PeerAnswer;
use super::replica::Replica;

/// How long a read waits for writes before it fetches from the primary.
const COMMIT_WAIT: Duration = Duration::from_millis(50);

/// How often `await_commit` waits for a moment without writes.
const MAX_COMMIT_WAITS: usize = 100;

/// The result of waiting for a range lock.
enum LockWait {
    Held,
    /// The view ended.
    ViewEnded,
    /// The primary sent the contents.
    Fetched(Bufs),
}

impl Replica {
    pub(super) async fn read(self: &Rc<Self>, range: Blocks, ctx: &Ctx) -> Result<Bufs, Error> {
        loop {
            let view = self.wait_serving(ctx).await?;
            let lock = self.range_locks.enter(range, false);
            if !lock.is_held() && !self.settings.has_mistake(Mistake::ReadsUncommitted) {
                self.request_commits(range);
                match Box::pin(self.wait_for_lock(view, range, &lock, ctx)).await {
                    LockWait::Held => {}
                    LockWait::ViewEnded => continue,
                    LockWait::Fetched(data) => return Ok(data),
                }
            }
            let result = self.leg.read(range, ctx, self.awake_now()).await;
            // Do not hold the range while asking other members (attack 32).
            drop(lock);
            // The lease covers the data only if it is still valid now.
            if self.serving_view().is_none() {
                continue;
            }
            match result {
                Err(Error::Unreadable { .. } | Error::Corrupt { .. }) => {
                    if let Some(data) = Box::pin(self.fetch_from_any(view, range, ctx)).await {
                        self.request_repair(view, range);
                        return Ok(data);
                    }
                    if self.view() == view {
                        return result;
                    }
                }
                Err(Error::Gone) => {
                    // A client of the last member gets the error; elsewhere the client uses another
                    // path.
                    return if self.on_leg_error(Error::Gone) {
                        result
                    } else {
                        Err(Error::Fenced)
                    };
                }
                result => return result,
            }
        }
    }

    /// Whether the first blocks of `range` are mapped, by the local disk: it has what every member
    /// has while this member serves. Blocks of uncommitted writes count as mapped, since the writes
    /// may yet be undone.
    pub(super) async fn map(
        self: &Rc<Self>,
        range: Blocks,
        ctx: &Ctx,
    ) -> Result<BlockStatus, Error> {
        loop {
            let view = self.wait_serving(ctx).await?;
            let status = self.leg.map(range, ctx, self.awake_now()).await;
            // Starting another view may have restored freed blocks.
            if self.serving_view() != Some(view) {
                continue;
            }
            return match status {
                Ok(run) if run.mapped => Ok(run),
                Ok(run) => Ok(self.committed_run(range, run)),
                Err(Error::Gone) if !self.on_leg_error(Error::Gone) => Err(Error::Fenced),
                // Unknown: report it as mapped.
                Err(Error::Unreadable { .. } | Error::Corrupt { .. }) => {
                    let blocks = u32::try_from(range.count).unwrap_or(u32::MAX);
                    Ok(BlockStatus { blocks, mapped: true })
                }
                Err(e) => Err(e),
            };
        }
    }

    /// Waits until every write of `range` that this leg has, or is about to get, is committed.
    pub(super) async fn await_commit(
        self: &Rc<Self>,
        range: Blocks,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        for _ in 0..MAX_COMMIT_WAITS {
            let view = self.wait_serving(ctx).await?;
            let lock = self.range_locks.enter(range, false);
            if !lock.is_held() {
                self.request_commits(range);
                let acquired = self.while_in_view(view, lock.acquired());
                if !matches!(tokio::time::timeout(COMMIT_WAIT, acquired).await, Ok(Some(()))) {
                    continue;
                }
            }
            if self.serving_view() == Some(view) {
                return Ok(());
            }
        }
        // Other writes of the range keep coming, or views do not last.
        Err(Error::Fenced)
    }

    /// The part of `run`, the unmapped start of `range`, that is committed at all members.
    fn committed_run(&self, range: Blocks, run: BlockStatus) -> BlockStatus {
        let Some(next) = self.state().prepared.next_range(range.at) else { return run };
        let blocks = |count: u64| u32::try_from(count).unwrap_or(u32::MAX).min(run.blocks);
        if next.at > range.at {
            return BlockStatus { blocks: blocks(next.at.0 - range.at.0), mapped: false };
        }
        let end = next.end().unwrap_or(u64::MAX);
        BlockStatus { blocks: blocks(end - range.at.0), mapped: true }
    }

    /// Waits for the lock of a range. Other writes may overtake it here for ever, but not at the
    /// primary; so after a while the contents are fetched from there.
    async fn wait_for_lock(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        lock: &RangeLock,
        ctx: &Ctx,
    ) -> LockWait {
        loop {
            match tokio::time::timeout(COMMIT_WAIT, self.while_in_view(view, lock.acquired())).await
            {
                Ok(Some(())) => return LockWait::Held,
                Ok(None) => return LockWait::ViewEnded,
                Err(_) if self.rejects_clients() => return LockWait::ViewEnded,
                Err(_) if self.is_primary() => {}
                Err(_) => {
                    let Some(primary) = self.primary() else { continue };
                    let left = ctx.credit().left();
                    let data = tokio::select! {
                        biased;
                        // The next writer here waits for the holder of the range, and the answer of
                        // the primary is queued behind that writer (attack 84).
                        () = lock.acquired() => {
                            reclaim_credit(ctx, left).await;
                            return LockWait::Held;
                        }
                        data = self.fetch(view, primary, range, ctx) => data,
                    };
                    match data {
                        Some(data) if self.serving_view().is_some() => {
                            return LockWait::Fetched(data);
                        }
                        _ if self.view() != view => return LockWait::ViewEnded,
                        _ => {}
                    }
                }
            }
        }
    }

    /// Reads the range from another member. `None` if none can read it, or the view ends.
    pub(super) async fn fetch_from_any(
        self: &Rc<Self>,
        view: View,
        range: Blocks,
        ctx: &Ctx,
    ) -> Option<Bufs> {
        for node in self.others() {
            if let Some(data) = self.fetch(view, node, range, ctx).await {
                tracing::warn!(at = range.at.0, node = node.0, "read from another replica");
                return Some(data);
            }
        }
        None
    }

    /// Reads the range from `node`. `None` if it cannot read it, or the view ends first.
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
            let request = self.peer_requests.next_number();
            let pending = self.peer_requests.register(request, node, self.awake_now());
            let _memory = link.post_receive(request, ctx.clone());
            link.send(Message::Fetch { view, request, range });
            let given_up = || self.view() != view || link.is_closed();
            self.signal.unless(given_up, pending.wait_answer()).await
        };
        match answer {
            Some(PeerAnswer::Fetched(Ok(data))) if data.len() == self.byte_len(range) => {
                return Some(data);
            }
            answer => drop(answer),
        }
        reclaim_credit(ctx, left).await;
        None
    }

    fn request_repair(self: &Rc<Self>, view: View, range: Blocks) {
        if self.is_primary() {
            let this = Rc::clone(self);
            self.spawn(async move {
                let _ = this.repair(view, range).await;
            });
        } else if let Some(link) = self.primary_link() {
            link.send(Message::RepairRange { view, range });
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
        // Always answer: the peer keeps the request open.
        let result = self.read_for_peer(link.node(), view, range).await;
        link.send(Message::FetchResult { view, request, result });
    }

    /// Reserves memory for the contents of `range`, to be sent to another member. Its holder waits
    /// only for the local disk and the network, never for a lock.
    pub(super) async fn reserve_answer_memory(
        &self,
        view: View,
        range: Blocks,
    ) -> Result<Ctx, Error> {
        let memory = self.reserve_memory(self.byte_len(range), MemoryClass::PeerReply);
        self.while_in_view(view, memory).await.ok_or(Error::Fenced)?
    }

    async fn read_for_peer(
        self: &Rc<Self>,
        from: NodeId,
        view: View,
        range: Blocks,
    ) -> Result<Bufs, Error> {
        if !self.contains(range) || self.byte_len(range) > self.max_transfer() {
            return Err(Error::OutOfRange);
        }
        if self.view() != view {
            return Err(Error::Fenced);
        }
        // During reconciliation the range is locked by the very entry that is asked for, and no
        // other task uses it. A write of this view shows that the view is active although START
        // VIEW is late; so does a request of a member that is not the primary, which may overtake
        // START VIEW.
        let reconciling = self.primary() == Some(from)
            && self.active_view() != Some(view)
            && self.state().prepared.has_only_copies(view, range);
        if reconciling {
            let ctx = self.reserve_answer_memory(view, range).await?;
            let result = self.leg.read(range, &ctx, self.awake_now()).await;
            if let Err(e) = result
                && !self.state().prepared.overlapping(range).is_empty()
            {
                // This disk wrote the range moments ago (attack 86).
                self.on_leg_error(e);
            }
            return result;
        }
        let lock = self.range_locks.enter(range, false);
        self.while_in_view(view, lock.acquired()).await.ok_or(Error::Fenced)?;
        let ctx = self.reserve_answer_memory(view, range).await?;
        let result = self.leg.read(range, &ctx, self.awake_now()).await;
        // The lease may have expired meanwhile and come back without a new view.
        if self.serving_view().is_some() { result } else { Err(Error::Fenced) }
    }
}

/// Waits until `ctx` has `left` bytes again. Data no longer wanted may be partly received; its
/// memory is free when the rest has come, or when the session ends.
async fn reclaim_credit(ctx: &Ctx, left: usize) {
    while ctx.credit().left() < left {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
