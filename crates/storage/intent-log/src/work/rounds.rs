//! How pages get to the disk: in rounds, one after the other.
//!
//! A round takes the pages that marks wait for, and some of those that merely differ, writes them and
//! syncs if a mark waits. What comes meanwhile shares the next round. So a page has one write on its
//! way at most, and misses that come together share writes and sync. Rounds run in a task of their own:
//! whoever waits for one may lose interest.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use block::Error;
use disk::LOG_TRANSFER_MAX;
use futures_util::future::join_all;

use super::super::Region;
use super::super::cell::PAGE_BYTES;
use super::Inner;
use super::book::{Book, Need};
use super::pages::Pages;

/// Pages that are written at once, as many as the area has memory for.
const AT_ONCE: usize = LOG_TRANSFER_MAX / PAGE_BYTES;

/// The number of a round, from 1.
pub(super) type Round = u64;

/// The bits, and what is to become of their pages.
#[derive(Debug)]
pub(super) struct Rounds {
    pub(super) book: Book,
    /// Pages that somebody waits for to be durable.
    wanted: Pages,
    /// Pages that are to be written some time.
    lazy: Pages,
    started: Round,
    finished: Round,
    /// Whether the round that runs ends with a sync.
    syncs: bool,
    /// Whether there is a task that runs rounds.
    driven: bool,
    life: Life,
    wakers: Vec<Waker>,
}

/// Whether the log takes marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// It does.
    Open,
    /// It has been closed, or is about to be.
    Closed,
    /// A write or a sync has failed: what the disk holds is not known any more.
    Dead,
}

/// What a round does.
struct Plan {
    pages: Pages,
    sync: bool,
}

impl Rounds {
    pub(super) fn new(book: Book) -> Self {
        Self {
            book,
            wanted: Pages::NONE,
            lazy: Pages::NONE,
            started: 0,
            finished: 0,
            syncs: false,
            driven: false,
            life: Life::Open,
            wakers: Vec::new(),
        }
    }

    pub(super) fn life(&self) -> Life {
        self.life
    }

    /// Takes no marks any more.
    pub(super) fn close(&mut self) {
        if self.life == Life::Open {
            self.life = Life::Closed;
        }
    }

    /// Whether all of `regions` are marked durably.
    pub(super) fn is_hot(&self, mut regions: impl Iterator<Item = Region>) -> bool {
        self.life == Life::Open && regions.all(|region| self.book.is_hot(region))
    }

    /// Marks `regions`; the round whose end makes that durable, if it is not yet.
    pub(super) fn mark(&mut self, regions: impl Iterator<Item = Region>) -> Option<Round> {
        let mut until = None;
        for region in regions {
            until = until.max(match self.book.mark(region) {
                Need::Nothing => None,
                Need::PageOnItsWay(_) if self.syncs => Some(self.started),
                Need::PageOnItsWay(page) | Need::Page(page) => {
                    Some(self.want(Pages::NONE.with(page)))
                }
            });
        }
        until
    }

    /// Wants `pages` written as they are now, durably; the round after which they are.
    pub(super) fn want(&mut self, pages: Pages) -> Round {
        self.wanted = self.wanted.and(pages);
        self.started + 1
    }

    /// Has all pages that differ written some time; which these are.
    fn want_some_time(&mut self) -> Pages {
        let pages = self.book.dirty();
        self.lazy = self.lazy.and(pages);
        pages
    }

    /// The next round, if anything is to be done.
    fn start(&mut self) -> Option<Plan> {
        let plan = Plan {
            pages: self.wanted.and(self.lazy.lowest(AT_ONCE)),
            sync: !self.wanted.is_empty(),
        };
        self.driven = !plan.pages.is_empty() && self.life != Life::Dead;
        if !self.driven {
            return None;
        }
        self.wanted = Pages::NONE;
        self.syncs = plan.sync;
        self.started += 1;
        Some(plan)
    }

    fn end(&mut self, plan: &Plan, result: Result<(), Error>) -> Vec<Waker> {
        match result {
            Ok(()) => {
                self.book.home(plan.sync);
                self.lazy = self.lazy.without(plan.pages);
                self.finished = self.started;
            }
            Err(_) => self.life = Life::Dead,
        }
        self.syncs = false;
        std::mem::take(&mut self.wakers)
    }
}

impl Inner {
    /// Ends the log.
    pub(super) fn die(&self) {
        let wakers = {
            let mut rounds = self.rounds.borrow_mut();
            rounds.life = Life::Dead;
            std::mem::take(&mut rounds.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits for the end of `round`.
    pub(super) async fn until(self: &Rc<Self>, round: Round) -> Result<(), Error> {
        self.when(|rounds| rounds.finished >= round).await
    }

    /// Writes `pages` as they are now, durably.
    pub(super) async fn persist(self: &Rc<Self>, pages: Pages) -> Result<(), Error> {
        if pages.is_empty() {
            return Ok(());
        }
        let round = self.rounds.borrow_mut().want(pages);
        self.until(round).await
    }

    /// Writes all pages that differ now.
    pub(super) async fn write_back(self: &Rc<Self>) -> Result<(), Error> {
        let pages = self.rounds.borrow_mut().want_some_time();
        self.when(|rounds| !rounds.lazy.touches(pages)).await
    }

    /// Has rounds run until `done`.
    async fn when(self: &Rc<Self>, done: impl Fn(&Rounds) -> bool) -> Result<(), Error> {
        poll_fn(|cx| {
            let mut rounds = self.rounds.borrow_mut();
            if rounds.life == Life::Dead {
                return Poll::Ready(Err(Error::Gone));
            }
            if done(&rounds) {
                return Poll::Ready(Ok(()));
            }
            if !rounds.driven {
                rounds.driven = true;
                tokio::task::spawn_local(drive(Rc::clone(self)));
            }
            rounds.wakers.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    async fn run(&self, plan: &Plan) -> Result<(), Error> {
        let pages: Vec<u32> = plan.pages.iter().collect();
        for some in pages.chunks(AT_ONCE) {
            let ended = join_all(some.iter().map(|&page| self.write_page(page))).await;
            ended.into_iter().collect::<Result<(), Error>>()?;
        }
        if plan.sync { self.area.sync().await } else { Ok(()) }
    }

    async fn write_page(&self, page: u32) -> Result<(), Error> {
        let (bytes, at) = {
            let book = &mut self.rounds.borrow_mut().book;
            let at = book.geometry().page_offset(page).expect("a page of the log");
            (book.send(page), at)
        };
        self.area.write(at, &bytes).await.map_err(|e| self.failed(e))
    }
}

/// Runs rounds as long as there is anything to do.
async fn drive(log: Rc<Inner>) {
    loop {
        let Some(plan) = log.rounds.borrow_mut().start() else { return };
        let result = log.run(&plan).await;
        if result.is_err() {
            tracing::error!(image = %log.area.path().display(), "the intent log is given up");
        }
        let wakers = log.rounds.borrow_mut().end(&plan, result);
        wakers.into_iter().for_each(Waker::wake);
    }
}
