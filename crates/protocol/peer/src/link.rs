//! One end of a session.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::Ctx;

use crate::{Lane, Message, NodeId};

/// Where a replica leaves what it says to another one. What is left waits in memory until the
/// session's connections take it: data by reference to memory that its command holds, the rest
/// bounded by the commands in flight. Cheap to clone. What is left in a session that has ended is
/// dropped.
#[derive(Clone)]
pub struct Link(Rc<Shared>);

/// What a [`Link`] leaves for the session's connections to take.
pub struct Outbox(Rc<Shared>);

struct Shared {
    node: NodeId,
    session: u64,
    closed: Cell<bool>,
    /// Who waits for the end.
    mourner: RefCell<Option<Waker>>,
    lanes: [RefCell<Queue>; 3],
    expected: RefCell<Vec<(u64, Expected)>>,
}

/// What is there for data that were asked for.
#[derive(Clone, Debug)]
pub enum Expected {
    /// Memory for them.
    Memory(Ctx),
    /// Nobody wants them any more.
    Unwanted,
}

/// Memory lies ready for an answer; dropped, it goes back, and the answer is thrown away when it comes.
#[derive(Debug)]
#[must_use]
pub struct Expecting {
    link: Link,
    request: u64,
}

impl Drop for Expecting {
    fn drop(&mut self) {
        let mut expected = self.link.0.expected.borrow_mut();
        let answer = expected.iter_mut().find(|(r, _)| *r == self.request);
        let memory = answer.map(|(_, what)| std::mem::replace(what, Expected::Unwanted));
        drop((expected, memory));
    }
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<Message>,
    waker: Option<Waker>,
}

impl Link {
    /// Both ends of a session's outgoing side: with `node`, under a number of this node's choice.
    #[must_use]
    pub fn new(node: NodeId, session: u64) -> (Self, Outbox) {
        let shared = Rc::new(Shared {
            node,
            session,
            closed: Cell::new(false),
            mourner: RefCell::default(),
            lanes: Default::default(),
            expected: RefCell::default(),
        });
        (Self(Rc::clone(&shared)), Outbox(shared))
    }

    /// The node at the other end.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.0.node
    }

    /// The session's number: no two sessions that a replica sees have the same.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.0.session
    }

    /// Whether the session has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.closed.get()
    }

    /// Leaves `message` to be sent.
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

    /// Lays memory ready for the data that answer the fetch numbered `request`, so that they need
    /// not wait for any. It lies there until they come, what this gives is dropped, or the session ends.
    ///
    /// Every fetch is answered, or what is remembered of it stays until the session ends.
    pub fn expect(&self, request: u64, memory: Ctx) -> Expecting {
        if !self.0.closed.get() {
            self.0.expected.borrow_mut().push((request, Expected::Memory(memory)));
        }
        Expecting { link: self.clone(), request }
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

    /// The session's number.
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

    /// [`Self::next`] for those who wait for other things as well.
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

    /// What was laid ready for the answer to `request`, if it was asked for.
    #[must_use]
    pub fn expected(&self, request: u64) -> Option<Expected> {
        let mut expected = self.0.expected.borrow_mut();
        let i = expected.iter().position(|(r, _)| *r == request)?;
        Some(expected.swap_remove(i).1)
    }

    /// Whether the session has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.closed.get()
    }

    /// Waits for the end of the session. One task may.
    pub async fn closed(&self) {
        poll_fn(|cx| {
            if self.0.closed.get() {
                return Poll::Ready(());
            }
            *self.0.mourner.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Ends the session.
    pub fn close(&self) {
        self.0.close();
    }
}

/// A session that nobody drives any more has ended.
impl Drop for Outbox {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Shared {
    /// What waits is dropped, for it speaks of a session that is over; so is its memory.
    fn close(&self) {
        self.closed.set(true);
        drop(self.expected.take());
        let mourner = self.mourner.take();
        mourner.into_iter().for_each(Waker::wake);
        for lane in &self.lanes {
            let queue = lane.take();
            drop(queue.messages);
            queue.waker.into_iter().for_each(Waker::wake);
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { node, session, closed, .. } = &*self.0;
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
    fn each_lane_keeps_its_order_and_an_end_drops_what_waits() {
        let (link, outbox) = Link::new(NodeId(2), 7);
        (1..=3).for_each(|seq| link.send(applied(seq)));
        assert!(outbox.take(Lane::Down).is_none());
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
