//! Mailboxes: running code of one core on another.
//!
//! A mailbox is bounded: senders wait while it is full. It wakes its core once for all jobs that
//! have arrived since the core last looked.

use std::future::Future;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::Core;

/// Jobs taken out of a mailbox at once.
const BATCH: usize = 64;

type Job = Box<dyn FnOnce(&Core) + Send>;

/// The core is stopping, or the job panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the core has stopped")]
pub struct CoreStopped;

/// Why a job was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The mailbox is full.
    #[error("the core's mailbox is full")]
    Full,
    /// The core is stopping.
    #[error("the core has stopped")]
    Stopped,
}

/// A handle to a core, for other cores and ordinary threads. Cheap to clone.
#[derive(Clone, Debug)]
pub struct CoreHandle {
    id: usize,
    jobs: mpsc::Sender<Job>,
}

impl CoreHandle {
    /// The core's number, from 0.
    #[must_use]
    pub fn id(&self) -> usize {
        self.id
    }

    /// Runs `f` as a task of the core and returns its result. Waits while the mailbox is full.
    ///
    /// Dropping the future before the job was taken withdraws it; afterwards the job runs to its
    /// end and only the result is lost.
    ///
    /// # Errors
    /// [`CoreStopped`] when the core stops before the end, or the job panics.
    pub async fn run<F, Fut, T>(&self, f: F) -> Result<T, CoreStopped>
    where
        F: FnOnce(Core) -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let (answer, result) = oneshot::channel();
        let job = move |core: Core| async move {
            // The caller may be gone: the job has run all the same.
            let _ = answer.send(f(core).await);
        };
        self.post(job).await?;
        result.await.map_err(|_| CoreStopped)
    }

    /// Starts `f` as a task of the core. Waits while the mailbox is full.
    ///
    /// # Errors
    /// [`CoreStopped`] when the core accepts no more jobs.
    pub async fn post<F, Fut>(&self, f: F) -> Result<(), CoreStopped>
    where
        F: FnOnce(Core) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        self.jobs.send(box_job(f)).await.map_err(|_| CoreStopped)
    }

    /// [`Self::post`] for threads that are not cores.
    pub(crate) fn post_blocking<F, Fut>(&self, f: F) -> Result<(), CoreStopped>
    where
        F: FnOnce(Core) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        self.jobs.blocking_send(box_job(f)).map_err(|_| CoreStopped)
    }

    /// Starts `f` as a task of the core if its mailbox has room.
    ///
    /// # Errors
    /// [`PostError`]; `f` is dropped.
    pub fn try_post<F, Fut>(&self, f: F) -> Result<(), PostError>
    where
        F: FnOnce(Core) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        self.jobs.try_send(box_job(f)).map_err(|e| match e {
            TrySendError::Full(_) => PostError::Full,
            TrySendError::Closed(_) => PostError::Stopped,
        })
    }
}

fn box_job<F, Fut>(f: F) -> Job
where
    F: FnOnce(Core) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + 'static,
{
    Box::new(move |core| {
        let core = core.clone();
        // `f` is called inside the task: a panic ends the task, not the mailbox.
        drop(tokio::task::spawn_local(async move { f(core).await }));
    })
}

/// The receiving end of a mailbox.
#[derive(Debug)]
pub(crate) struct Inbox(mpsc::Receiver<Job>);

/// A mailbox for core `id` that holds up to `len` jobs.
pub(crate) fn mailbox(id: usize, len: usize) -> (CoreHandle, Inbox) {
    let (jobs, inbox) = mpsc::channel(len.max(1));
    (CoreHandle { id, jobs }, Inbox(inbox))
}

impl Inbox {
    /// Starts jobs as they come, until every handle is gone.
    pub(crate) async fn serve(mut self, core: &Core) {
        let mut batch = Vec::with_capacity(BATCH);
        while self.0.recv_many(&mut batch, BATCH).await > 0 {
            core.note_activity();
            for job in batch.drain(..) {
                job(core);
            }
        }
    }
}
