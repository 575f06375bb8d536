//! Writes pages to disk in batches, one after the other.
//!
//! A batch takes the pages that must be durable, and some of those that merely differ, writes them,
//! and syncs if necessary. Requests that arrive meanwhile share the next batch (group commit), so a
//! page has one write in flight at most. Batches run in a task of their own: a future that waits
//! for one may be dropped.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use block::Error;
use disk::LOG_TRANSFER_MAX;
use futures_util::future::join_all;

use super::super::Region;
use super::super::cell::PAGE_BYTES;
use super::LogShared;
use super::dirty_bitmap::{DirtyBitmap, PersistNeed};
use super::page_set::PageSet;

/// Pages that are written at a time, as many as the area has memory for.
const PAGES_PER_WRITE: usize = LOG_TRANSFER_MAX / PAGE_BYTES;

/// The number of a batch, from 1.
pub(super) type BatchNumber = u64;

/// The bitmap, and the state of its pages.
#[derive(Debug)]
pub(super) struct BitmapWriter {
    pub(super) bitmap: DirtyBitmap,
    /// Pages that must become durable.
    sync_pages: PageSet,
    /// Pages to be written some time.
    lazy_pages: PageSet,
    last_started: BatchNumber,
    last_finished: BatchNumber,
    /// Whether the running batch ends with a sync.
    is_syncing: bool,
    /// Whether a task runs batches.
    is_running: bool,
    state: WriterState,
    wakers: Vec<Waker>,
}

/// Whether the log can be marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriterState {
    /// Yes.
    Open,
    /// It is closed, or about to be.
    Closed,
    /// A write or a sync has failed: the contents of the disk are unknown.
    Failed,
}

/// The work of a batch.
struct WriteBatch {
    pages: PageSet,
    sync: bool,
}

impl BitmapWriter {
    pub(super) fn new(bitmap: DirtyBitmap) -> Self {
        Self {
            bitmap,
            sync_pages: PageSet::NONE,
            lazy_pages: PageSet::NONE,
            last_started: 0,
            last_finished: 0,
            is_syncing: false,
            is_running: false,
            state: WriterState::Open,
            wakers: Vec::new(),
        }
    }

    pub(super) fn state(&self) -> WriterState {
        self.state
    }

    /// Refuses further marks.
    pub(super) fn close(&mut self) {
        if self.state == WriterState::Open {
            self.state = WriterState::Closed;
        }
    }

    /// Whether all of `regions` are durably dirty.
    pub(super) fn is_hot(&self, mut regions: impl Iterator<Item = Region>) -> bool {
        self.state == WriterState::Open && regions.all(|region| self.bitmap.is_hot(region))
    }

    /// Marks `regions` dirty. Returns the batch that makes this durable, if it is not yet.
    pub(super) fn mark(&mut self, regions: impl Iterator<Item = Region>) -> Option<BatchNumber> {
        let mut until = None;
        for region in regions {
            until = until.max(match self.bitmap.mark(region) {
                PersistNeed::Nothing => None,
                PersistNeed::PageInFlight(_) if self.is_syncing => Some(self.last_started),
                PersistNeed::PageInFlight(page) | PersistNeed::Page(page) => {
                    Some(self.request_sync(PageSet::NONE.with(page)))
                }
            });
        }
        until
    }

    /// Requests that `pages` be written as they are now, durably. Returns the batch that does it.
    pub(super) fn request_sync(&mut self, pages: PageSet) -> BatchNumber {
        self.sync_pages = self.sync_pages.union(pages);
        self.last_started + 1
    }

    /// Requests that all differing pages be written some time. Returns these pages.
    fn request_lazy(&mut self) -> PageSet {
        let pages = self.bitmap.unwritten_pages();
        self.lazy_pages = self.lazy_pages.union(pages);
        pages
    }

    /// Starts the next batch, if there is anything to do.
    fn start_batch(&mut self) -> Option<WriteBatch> {
        let batch = WriteBatch {
            pages: self.sync_pages.union(self.lazy_pages.lowest(PAGES_PER_WRITE)),
            sync: !self.sync_pages.is_empty(),
        };
        self.is_running = !batch.pages.is_empty() && self.state != WriterState::Failed;
        if !self.is_running {
            return None;
        }
        self.sync_pages = PageSet::NONE;
        self.is_syncing = batch.sync;
        self.last_started += 1;
        Some(batch)
    }

    fn finish_batch(&mut self, batch: &WriteBatch, result: Result<(), Error>) -> Vec<Waker> {
        match result {
            Ok(()) => {
                self.bitmap.pages_written(batch.sync);
                self.lazy_pages = self.lazy_pages.without(batch.pages);
                self.last_finished = self.last_started;
            }
            Err(_) => self.state = WriterState::Failed,
        }
        self.is_syncing = false;
        std::mem::take(&mut self.wakers)
    }
}

impl LogShared {
    /// Puts the log into the failed state.
    pub(super) fn set_failed(&self) {
        let wakers = {
            let mut writer = self.writer.borrow_mut();
            writer.state = WriterState::Failed;
            std::mem::take(&mut writer.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits for the end of `batch`.
    pub(super) async fn wait_batch(self: &Rc<Self>, batch: BatchNumber) -> Result<(), Error> {
        self.wait_until(|writer| writer.last_finished >= batch).await
    }

    /// Writes `pages` as they are now, durably.
    pub(super) async fn persist(self: &Rc<Self>, pages: PageSet) -> Result<(), Error> {
        if pages.is_empty() {
            return Ok(());
        }
        let batch = self.writer.borrow_mut().request_sync(pages);
        self.wait_batch(batch).await
    }

    /// Writes all pages that differ now.
    pub(super) async fn write_back(self: &Rc<Self>) -> Result<(), Error> {
        let pages = self.writer.borrow_mut().request_lazy();
        self.wait_until(|writer| !writer.lazy_pages.intersects(pages)).await
    }

    /// Runs batches until `done`.
    async fn wait_until(
        self: &Rc<Self>,
        done: impl Fn(&BitmapWriter) -> bool,
    ) -> Result<(), Error> {
        poll_fn(|cx| {
            let mut writer = self.writer.borrow_mut();
            if writer.state == WriterState::Failed {
                return Poll::Ready(Err(Error::Gone));
            }
            if done(&writer) {
                return Poll::Ready(Ok(()));
            }
            if !writer.is_running {
                writer.is_running = true;
                tokio::task::spawn_local(run_batches(Rc::clone(self)));
            }
            writer.wakers.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    async fn write_batch(&self, batch: &WriteBatch) -> Result<(), Error> {
        let pages: Vec<u32> = batch.pages.iter().collect();
        for chunk in pages.chunks(PAGES_PER_WRITE) {
            let results = join_all(chunk.iter().map(|&page| self.write_page(page))).await;
            results.into_iter().collect::<Result<(), Error>>()?;
        }
        if batch.sync { self.area.sync().await } else { Ok(()) }
    }

    async fn write_page(&self, page: u32) -> Result<(), Error> {
        let (bytes, at) = {
            let bitmap = &mut self.writer.borrow_mut().bitmap;
            let at = bitmap.geometry().page_offset(page).expect("a page of the log");
            (bitmap.take_page(page), at)
        };
        self.area.write(at, &bytes).await.map_err(|e| self.on_write_error(e))
    }
}

/// Runs batches as long as there is anything to do.
async fn run_batches(log: Rc<LogShared>) {
    loop {
        let Some(batch) = log.writer.borrow_mut().start_batch() else { return };
        let result = log.write_batch(&batch).await;
        if result.is_err() {
            tracing::error!(image = %log.area.path().display(), "the intent log has failed");
        }
        let wakers = log.writer.borrow_mut().finish_batch(&batch, result);
        wakers.into_iter().for_each(Waker::wake);
    }
}
