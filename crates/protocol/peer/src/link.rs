//! The sending side of a session.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::Ctx;

use crate::{Lane, Message, NodeId};

/// Sends messages to another replica. Messages wait in memory until the connections of the session
/// take them: payload by reference to memory that its command holds, the rest bounded by the
/// commands in flight. Cheap to clone. Messages to a session that has ended are dropped.
#[derive(Clone)]
pub struct Link(Rc<OutboxState>);

/// The queue of a [`Link`], from which the connections of the session take messages.
pub struct Outbox(Rc<OutboxState>);

struct OutboxState {
    node: NodeId,
    session: u64,
    closed: Cell<bool>,
    /// The task that waits for the end.
    close_waker: RefCell<Option<Waker>>,
    lanes: [RefCell<LaneQueue>; 3],
    posted: RefCell<Vec<(u64, PostedMemory)>>,
}

/// The state of memory posted for an answer.
#[derive(Clone, Debug)]
pub enum PostedMemory {
    /// Memory for the data.
    Memory(Ctx),
    /// No task wants the data any more.
    Cancelled,
}

/// Memory posted for an answer. Dropping this frees it, and the answer is discarded when it comes.
#[derive(Debug)]
#[must_use]
pub struct PostedReceive {
    link: Link,
    request: u64,
}

impl Drop for PostedReceive {
    fn drop(&mut self) {
        let mut posted = self.link.0.posted.borrow_mut();
        let answer = posted.iter_mut().find(|(r, _)| *r == self.request);
        let memory = answer.map(|(_, memory)| std::mem::replace(memory, PostedMemory::Cancelled));
        drop((posted, memory));
    }
}

#[derive(Default)]
struct LaneQueue {
    messages: VecDeque<Message>,
    waker: Option<Waker>,
}

impl Link {
    /// Both ends of the outgoing side of a session with `node`; `session` is a number of this
    /// node's choice.
    #[must_use]
    pub fn new(node: NodeId, session: u64) -> (Self, Outbox) {
        let state = Rc::new(OutboxState {
            node,
            session,
            closed: Cell::new(false),
            close_waker: RefCell::default(),
            lanes: Default::default(),
            posted: RefCell::default(),
        });
        (Self(Rc::clone(&state)), Outbox(state))
    }

    /// The node at the other end.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.0.node
    }

    /// The number of the session, unique within the replica.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.0.session
    }

    /// Whether the session has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.closed.get()
    }

    /// Queues `message`.
    pub fn send(&self, message: Message) {
        if self.0.closed.get() {
            return;
        }
        let mut queue = self.0.lanes[message.lane() as usize].borrow_mut();
        queue.messages.push_back(message);
        if let Some(waker) = queue.waker.take() {
            drop(queue);
            waker.wake();
        }
    }

    /// Posts memory for the answer to the fetch `request`, so that the data need not wait for
    /// memory. It stays posted until they come, the result is dropped, or the session ends.
    ///
    /// Every fetch must be answered, or its entry stays until the session ends.
    pub fn post_receive(&self, request: u64, memory: Ctx) -> PostedReceive {
        if !self.0.closed.get() {
            self.0.posted.borrow_mut().push((request, PostedMemory::Memory(memory)));
        }
        PostedReceive { link: self.clone(), request }
    }

    /// Ends the session: its connections close.
    pub fn close(&self) {
        self.0.close();
    }
}

impl Outbox {
    /// The node at the other end.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.0.node
    }

    /// The number of the session.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.0.session
    }

    /// The next message for `lane`, if there is one.
    #[must_use]
    pub fn take(&self, lane: Lane) -> Option<Message> {
        self.0.lanes[lane as usize].borrow_mut().messages.pop_front()
    }

    /// The next message for `lane`; `None` when the session has ended. One task waits per lane.
    pub async fn next(&self, lane: Lane) -> Option<Message> {
        poll_fn(|cx| self.poll_next(lane, cx)).await
    }

    /// [`Self::next`] as a poll function.
    pub fn poll_next(&self, lane: Lane, cx: &mut Context<'_>) -> Poll<Option<Message>> {
        let mut queue = self.0.lanes[lane as usize].borrow_mut();
        match queue.messages.pop_front() {
            Some(message) => Poll::Ready(Some(message)),
            None if self.0.closed.get() => Poll::Ready(None),
            None => {
                queue.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Takes what was posted for the answer to `request`, if anything was.
    #[must_use]
    pub fn take_posted(&self, request: u64) -> Option<PostedMemory> {
        let mut posted = self.0.posted.borrow_mut();
        let i = posted.iter().position(|(r, _)| *r == request)?;
        Some(posted.swap_remove(i).1)
    }

    /// Whether the session has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.closed.get()
    }

    /// Waits for the end of the session. Only one task may wait.
    pub async fn wait_closed(&self) {
        poll_fn(|cx| {
            if self.0.closed.get() {
                return Poll::Ready(());
            }
            *self.0.close_waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Ends the session.
    pub fn close(&self) {
        self.0.close();
    }
}

/// A session without a driver has ended.
impl Drop for Outbox {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl OutboxState {
    /// Drops queued messages, which mean nothing in another session, and posted memory.
    fn close(&self) {
        self.closed.set(true);
        drop(self.posted.take());
        let waker = self.close_waker.take();
        waker.into_iter().for_each(Waker::wake);
        for lane in &self.lanes {
            let queue = lane.take();
            drop(queue.messages);
            queue.waker.into_iter().for_each(Waker::wake);
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OutboxState { node, session, closed, .. } = &*self.0;
        f.debug_struct("Link")
            .field("node", node)
            .field("session", session)
            .field("closed", closed)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Outbox").field(&Link(Rc::clone(&self.0))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Seq, View};

    fn applied(seq: u64) -> Message {
        Message::Applied { view: View::default(), seq: Seq(seq) }
    }

    #[test]
    fn each_lane_keeps_its_order_and_closing_drops_queued_messages() {
        let (link, outbox) = Link::new(NodeId(2), 7);
        (1..=3).for_each(|seq| link.send(applied(seq)));
        assert!(outbox.take(Lane::Replication).is_none());
        let seqs: Vec<_> = std::iter::from_fn(|| outbox.take(Lane::Control))
            .map(|m| match m {
                Message::Applied { seq, .. } => seq.0,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(seqs, [1, 2, 3]);
        link.send(applied(4));
        outbox.close();
        link.send(applied(5));
        assert!(link.is_closed() && outbox.take(Lane::Control).is_none());
    }
}
