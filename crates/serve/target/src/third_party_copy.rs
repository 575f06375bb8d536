//! Executes third-party copies: ordinary reads and writes of volumes, in chunks, each on the core
//! of its volume (RFD 0014).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Account, Blocks, Buf, Bufs, Error, Info, Lba, MemoryClass, Request, RequestError};
use scsi::{
    CopyFault, CopyHandle, CopyIoError, CopyOutcome, CopyPlan, CopyRange, CopySegment, Cscd,
    CscdTarget, Side,
};
use tokio::sync::{Notify, oneshot};
use volume::VolumeClient;

use crate::catalog::VolumeId;
use crate::principal::{Principal, SessionEnded, VolumeLocation};
use crate::served_volumes::ServedVolume;
use crate::server::Server;

/// Most that is read and then written at once, in bytes.
pub(crate) const COPY_CHUNK_BYTES: u64 = 512 * 1024;

/// Unit in which zeroes are detected, in bytes: smaller runs of zeroes are written.
const ZERO_DETECT_BYTES: usize = 64 * 1024;

/// A resolved source or destination of a segment.
#[derive(Clone, Debug)]
struct CopyEndpoint {
    side: Side,
    location: VolumeLocation,
    info: Info,
    thin: bool,
}

/// Why a segment is not copied.
enum CopyStop {
    Aborted,
    Fault { fault: CopyFault, commanded: bool },
}

/// Why a volume has failed a request of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyError {
    /// The volume does not exist, or this initiator may not use it.
    NotFound,
    Aborted,
    Io(CopyIoError),
}

impl From<RequestError> for CopyError {
    fn from(failure: RequestError) -> Self {
        match failure {
            RequestError::Device(Error::Aborted) => Self::Aborted,
            failure => Self::Io(CopyIoError::Volume(failure)),
        }
    }
}

/// Executes `plan` for `principal`, who sent it to the unit of `commanded`. Ends soon after an
/// abort; requests started by then have ended when this does.
pub(crate) async fn run_copy(
    server: Rc<Server>,
    (principal, session): (Principal, SessionEnded),
    commanded: VolumeId,
    plan: CopyPlan,
) -> CopyOutcome {
    let handle = plan.handle();
    let principal = Arc::new(principal);
    let work = |cancel| async {
        let job = CopyJob {
            server,
            principal,
            receiving_volume: commanded,
            cancel,
            resolved: RefCell::default(),
        };
        job.run(&plan).await
    };
    with_cancel_token(&handle, session, work).await
}

/// Whether cancellation was requested; waiters are woken in order.
#[derive(Debug, Default)]
struct CancelState {
    is_cancelled: AtomicBool,
    notify: Notify,
}

/// Whether to cancel work: on request, or because its session has ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct CancelToken {
    state: Arc<CancelState>,
    session: SessionEnded,
}

impl CancelToken {
    fn new(session: SessionEnded) -> Self {
        Self { session, ..Self::default() }
    }

    /// Requests cancellation.
    pub(crate) fn cancel(&self) {
        if !self.state.is_cancelled.swap(true, Ordering::AcqRel) {
            self.state.notify.notify_waiters();
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.state.is_cancelled.load(Ordering::Acquire) || self.session.get()
    }

    /// Waits for a request; the end of the session leads to one soon after.
    async fn cancelled(&self) {
        let notified = self.state.notify.notified();
        if !self.state.is_cancelled.load(Ordering::Acquire) {
            notified.await;
        }
    }

    /// The result of `wait`, or nothing if cancelled first.
    pub(crate) async fn run_until_cancelled<T>(&self, wait: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.cancelled() => None,
            given = wait => Some(given),
        }
    }

    /// Runs `work` on each of `pieces`, in order, `in_parallel` or two at a time, until cancelled;
    /// returns whether on all. After a failure no more start; all that have started have ended when
    /// this does.
    pub(crate) async fn for_each<T, E, Fut: Future<Output = Result<(), E>>>(
        &self,
        pieces: impl Iterator<Item = T>,
        in_parallel: bool,
        work: impl Fn(T) -> Fut,
    ) -> Result<bool, E> {
        let (rest, failed) = (RefCell::new(pieces), Cell::new(None));
        let worker = || async {
            while !self.is_cancelled() {
                let next = rest.borrow_mut().next();
                let Some(piece) = next else { break };
                if let Err(e) = work(piece).await {
                    failed.set(failed.take().or(Some(e)));
                    rest.borrow_mut().by_ref().for_each(drop);
                }
            }
        };
        if in_parallel {
            tokio::join!(worker(), worker());
        } else {
            worker().await;
        }
        failed.take().map_or_else(|| Ok(!self.is_cancelled()), Err)
    }
}

/// Runs `work` with a token that shows when it is to be cancelled.
pub(crate) async fn with_cancel_token<Fut: Future>(
    handle: &CopyHandle,
    session: SessionEnded,
    work: impl FnOnce(CancelToken) -> Fut,
) -> Fut::Output {
    let cancel = CancelToken::new(session);
    let mut work = pin!(work(cancel.clone()));
    poll_fn(|cx| {
        if handle.poll_aborted(cx).is_ready() {
            cancel.cancel();
        }
        work.as_mut().poll(cx)
    })
    .await
}

struct CopyJob {
    server: Rc<Server>,
    principal: Arc<Principal>,
    receiving_volume: VolumeId,
    /// Whether it is to be cancelled.
    cancel: CancelToken,
    /// CSCDs already resolved.
    resolved: RefCell<Vec<(Cscd, VolumeLocation)>>,
}

impl CopyJob {
    async fn run(&self, plan: &CopyPlan) -> CopyOutcome {
        let copies = self.server.copy_permits();
        let turn = self.cancel.run_until_cancelled(copies.acquire()).await;
        let Some(_turn) = turn else { return CopyOutcome::Aborted };
        for (segment, what) in (0..).zip(plan.segments()) {
            plan.begin_segment(what);
            match self.segment(plan, what).await {
                Ok(()) => {}
                Err(CopyStop::Aborted) => return CopyOutcome::Aborted,
                Err(CopyStop::Fault { fault, commanded }) => {
                    tracing::debug!(segment, ?fault, "a third-party copy was aborted");
                    return CopyOutcome::Failed { segment, fault, on_this_unit: commanded };
                }
            }
        }
        CopyOutcome::Done
    }

    async fn segment(&self, plan: &CopyPlan, segment: &CopySegment) -> Result<(), CopyStop> {
        let source = self.endpoint(plan, segment, Side::Source).await?;
        let destination = self.endpoint(plan, segment, Side::Destination).await?;
        let extent = segment.range(&source.info, &destination.info).map_err(|fault| {
            let failed = match fault {
                CopyFault::OutOfRange(Side::Destination) => &destination,
                _ => &source,
            };
            self.fault(failed.location.id, fault)
        })?;
        plan.set_segment_size(extent.bytes, destination.info.block_size);
        let same = source.location.id == destination.location.id;
        let within = same.then_some(source.info.block_size);
        let (first, step) = chunk_sizes(&source.info, &destination.info, extent.to);
        let pieces = extent.pieces(first, step, within);
        let in_parallel = !extent.overlaps(within);
        let work = |piece| self.copy_chunk(plan, &source, &destination, &extent, piece);
        let is_whole = self.cancel.for_each(pieces, in_parallel, work).await?;
        if is_whole { Ok(()) } else { Err(CopyStop::Aborted) }
    }

    fn fault(&self, id: VolumeId, fault: CopyFault) -> CopyStop {
        CopyStop::Fault { fault, commanded: id == self.receiving_volume }
    }

    /// Resolves the CSCD that a segment means by `side`.
    async fn endpoint(
        &self,
        plan: &CopyPlan,
        segment: &CopySegment,
        side: Side,
    ) -> Result<CopyEndpoint, CopyStop> {
        let unreachable =
            || CopyStop::Fault { fault: CopyFault::Unreachable(side), commanded: false };
        let cscd = plan.cscd(segment, side).ok_or_else(unreachable)?;
        let location = self.locate(cscd).ok_or_else(unreachable)?;
        let there = location.clone();
        let found = self.run_on(location.core, move |server, principal, _| async move {
            let (served, _) = check_access(&server, &principal, &there)?;
            Ok((served.volume.info(), served.thin))
        });
        let (info, thin) =
            found.await.map_err(|refused| self.stop_reason(location.id, side, refused))?;
        match cscd {
            CscdTarget::Named(end) if !end.matches_block_size(info.block_size) => {
                Err(self.fault(location.id, CopyFault::Mismatch(side)))
            }
            _ => Ok(CopyEndpoint { side, location, info, thin }),
        }
    }

    fn locate(&self, cscd: CscdTarget<'_>) -> Option<VolumeLocation> {
        let (catalog, principal) = (self.server.catalog(), &self.principal);
        let end = match cscd {
            CscdTarget::ThisUnit => {
                return principal.find(&catalog, |id| id == self.receiving_volume);
            }
            CscdTarget::Named(end) => end,
        };
        let mut found = self.resolved.borrow_mut();
        found.retain(|(_, location)| principal.may_still_use(&catalog, location));
        if let Some((_, location)) = found.iter().find(|(known, _)| known == end) {
            return Some(location.clone());
        }
        let location = principal.find(&catalog, |id| end.identifies(&id.0))?;
        found.push((end.clone(), location.clone()));
        Some(location)
    }

    fn stop_reason(&self, id: VolumeId, side: Side, refused: CopyError) -> CopyStop {
        match refused {
            CopyError::Aborted => CopyStop::Aborted,
            CopyError::NotFound => self.fault(id, CopyFault::Unreachable(side)),
            CopyError::Io(error) => self.fault(id, CopyFault::Io(side, error)),
        }
    }

    /// Reads a chunk, and writes it.
    async fn copy_chunk(
        &self,
        plan: &CopyPlan,
        source: &CopyEndpoint,
        destination: &CopyEndpoint,
        extent: &CopyRange,
        (at, len): (u64, u64),
    ) -> Result<(), CopyStop> {
        let range = blocks(source, extent.from, at, len);
        let data = self.request(source, Request::Read { range }, true).await?;
        plan.record_command();
        let own_memory = source.location.core == destination.location.core;
        let begins = extent.to.0 * u64::from(destination.info.block_size) + at;
        for (part, is_zero) in split_zeroes(&data, begins) {
            let at = at + part.start as u64;
            let len = part.len() as u64;
            let range = blocks(destination, extent.to, at, len);
            let request = if is_zero {
                Request::Zero { range, unmap: destination.thin, fua: false }
            } else {
                Request::Write { at: range.at, data: data.slice(part), fua: false }
            };
            self.request(destination, request, own_memory).await?;
            plan.record_command();
            plan.record_written(at, len);
        }
        Ok(())
    }

    /// Sends `request` to the volume of `end`. `own_memory`: the data to write is in its core's
    /// pool.
    async fn request(
        &self,
        end: &CopyEndpoint,
        request: Request,
        own_memory: bool,
    ) -> Result<Bufs, CopyStop> {
        let location = end.location.clone();
        let done = self.run_on(location.core, move |server, principal, cancel| async move {
            submit_local(&server, &principal, &location, request, own_memory, cancel).await
        });
        done.await.map_err(|refused| self.stop_reason(end.location.id, end.side, refused))
    }

    /// Runs `work` on a core and returns its result.
    async fn run_on<T, F, Fut>(&self, core: usize, work: F) -> Result<T, CopyError>
    where
        T: Send + 'static,
        F: FnOnce(Rc<Server>, Arc<Principal>, CancelToken) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, CopyError>> + 'static,
    {
        let (principal, cancel) = (Arc::clone(&self.principal), self.cancel.clone());
        let work = move |server| work(server, principal, cancel);
        // A core that has stopped has no volumes.
        on_core(&self.server, core, work).await.unwrap_or(Err(CopyError::NotFound))
    }
}

/// Runs `work` on a core and returns its result; nothing if that core has stopped.
pub(crate) async fn on_core<T, F, Fut>(here: &Rc<Server>, core: usize, work: F) -> Option<T>
where
    T: Send + 'static,
    F: FnOnce(Rc<Server>) -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
{
    if core == here.core().id() {
        return Some(work(Rc::clone(here)).await);
    }
    let (answer, answered) = oneshot::channel();
    let parcel = move |server: &Rc<Server>| {
        let work = work(Rc::clone(server));
        tokio::task::spawn_local(async move {
            // The caller may be gone with its core; the work was done all the same.
            let _ = answer.send(work.await);
        });
    };
    here.send(core, Box::new(parcel)).await;
    answered.await.ok()
}

/// The volume of this core, if `principal` may use it now, and the portal group it would use.
pub(crate) fn check_access(
    server: &Server,
    principal: &Principal,
    location: &VolumeLocation,
) -> Result<(Rc<ServedVolume>, u16), CopyError> {
    let catalog = server.catalog();
    let target = if principal.may_still_use(&catalog, location) {
        Some(Arc::clone(&location.target))
    } else {
        // The target may be a different one now.
        let now = principal.find(&catalog, |id| id == location.id);
        now.filter(|now| now.core == location.core).map(|now| now.target)
    };
    let target = target.and_then(|name| catalog.targets.get(&*name)).ok_or(CopyError::NotFound)?;
    let served = server.volume(location.id).ok_or(CopyError::NotFound)?;
    Ok((served, catalog.portal_group(target)))
}

/// Executes one request of a copy on this core, if it is still allowed.
pub(crate) async fn submit_local(
    server: &Rc<Server>,
    principal: &Principal,
    location: &VolumeLocation,
    request: Request,
    own_memory: bool,
    cancel: CancelToken,
) -> Result<Bufs, CopyError> {
    let account = server.copy_account();
    let writes = !matches!(request, Request::Read { .. } | Request::DrainWrites { .. });
    let request = match request {
        Request::Write { at, data, .. } if !own_memory => {
            // A class further up than that of the data's memory: no circular wait.
            let credit = cancel
                .run_until_cancelled(account.credit(data.len(), MemoryClass::UnsolicitedData))
                .await;
            let credit = credit
                .ok_or(CopyError::Aborted)?
                .map_err(|_| RequestError::Device(Error::OutOfRange))?;
            Request::Write { at, data: copy_into_credit(&credit, &data), fua: false }
        }
        other => other,
    };
    // Checked last: nothing is awaited between this and the volume.
    let (served, port) = check_access(server, principal, location)?;
    if cancel.is_cancelled() {
        return Err(CopyError::Aborted);
    }
    let admitted = server.iscsi.check_copy_access(&served, principal, port, writes);
    let (caller, durable) = admitted.map_err(CopyError::Io)?;
    let request = match request {
        Request::Write { at, data, .. } => Request::Write { at, data, fua: durable },
        Request::Zero { range, unmap, .. } => Request::Zero { range, unmap, fua: durable },
        other => other,
    };
    Ok(submit_cancellable(&served, &caller, request, &account, &cancel).await?)
}

/// The volume's answer to `request`, which is aborted on cancellation, and does not start after it.
pub(crate) async fn submit_cancellable(
    served: &ServedVolume,
    caller: &Rc<VolumeClient>,
    request: Request,
    account: &Account,
    cancel: &CancelToken,
) -> Result<Bufs, RequestError> {
    if cancel.is_cancelled() {
        return Err(RequestError::Device(Error::Aborted));
    }
    let (answer, answered) = oneshot::channel();
    let done = |result| drop(answer.send(result));
    let command = served.volume.start_for(caller, request, account, done);
    let mut answered = pin!(answered);
    let result = tokio::select! {
        biased;
        result = &mut answered => result,
        () = cancel.cancelled() => {
            command.abort();
            // A started request has ended only when the volume has answered.
            answered.await
        }
    };
    result.unwrap_or(Err(RequestError::Device(Error::Gone)))
}

/// Bytes of the first chunk and of the others: what both volumes can transfer, a multiple of both
/// block sizes. Chunks after the first start at multiples of that on the destination, as far as its
/// block size allows, so zero detection is aligned with file system blocks.
pub(crate) fn chunk_sizes(source: &Info, destination: &Info, to: Lba) -> (u64, u64) {
    let most = |info: &Info| u64::from(info.max_transfer_blocks) * u64::from(info.block_size);
    let block = u64::from(source.block_size.max(destination.block_size));
    let step = COPY_CHUNK_BYTES.min(most(source)).min(most(destination));
    let step = (step - step % block).max(block);
    let first = step - (to.0 * u64::from(destination.block_size)) % step;
    let first = first - first % block;
    (if first == 0 { step } else { first }, step)
}

/// `len` bytes from byte `at` of a segment that begins at `first`, as blocks of `end`.
fn blocks(end: &CopyEndpoint, first: Lba, at: u64, len: u64) -> Blocks {
    let block = u64::from(end.info.block_size);
    Blocks::new(Lba(first.0 + at / block), len / block)
}

/// Splits `data` into zero and non-zero parts. It goes to byte `begins` of a volume, which
/// determines the alignment.
pub(crate) fn split_zeroes(data: &Bufs, begins: u64) -> Vec<(Range<usize>, bool)> {
    let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
    let (mut start, mut grain) =
        (0, ZERO_DETECT_BYTES - (begins % ZERO_DETECT_BYTES as u64) as usize);
    while start < data.len() {
        let end = data.len().min(start + grain);
        let zero = data.slice(start..end).iter().all(is_zero);
        match parts.last_mut() {
            Some((part, same)) if *same == zero => part.end = end,
            _ => parts.push((start..end, zero)),
        }
        (start, grain) = (end, ZERO_DETECT_BYTES);
    }
    parts
}

fn is_zero(buf: &Buf) -> bool {
    buf.chunks(64).all(|chunk| chunk.iter().fold(0, |any, byte| any | byte) == 0)
}

/// Copies `data` into memory of `credit`.
fn copy_into_credit(credit: &block::Credit, data: &Bufs) -> Bufs {
    let mut runs = credit.alloc(data.len());
    let mut at = 0;
    for run in &mut runs {
        let end = at + run.len();
        data.slice(at..end).copy_to(run);
        at = end;
    }
    runs.into()
}

/// Reports the end of a copy on drop, whatever ended it: a command waits for it.
pub(crate) struct CompletionGuard<T, F: FnOnce(T)>(Option<(T, F)>);

impl<T, F: FnOnce(T)> CompletionGuard<T, F> {
    /// `lost` is reported unless another result is set.
    pub(crate) fn new(lost: T, tell: F) -> Self {
        Self(Some((lost, tell)))
    }

    pub(crate) fn complete(mut self, outcome: T) {
        if let Some((_, tell)) = self.0.take() {
            tell(outcome);
        }
    }
}

impl<T, F: FnOnce(T)> Drop for CompletionGuard<T, F> {
    fn drop(&mut self) {
        if let Some((lost, tell)) = self.0.take() {
            tell(lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_found_in_grains() {
        let pool = block::BufferPool::new(1 << 20).unwrap();
        let mut bytes = vec![0; 3 * ZERO_DETECT_BYTES + 512];
        let of = |bytes: &[u8]| {
            let credit = pool.account().try_credit(bytes.len(), MemoryClass::LocalIo).unwrap();
            split_zeroes(&rt::buf::copy_in(&credit, bytes), 3 << 20)
        };
        assert_eq!(of(&bytes), [(0..3 * ZERO_DETECT_BYTES + 512, true)]);
        bytes[ZERO_DETECT_BYTES] = 1;
        assert_eq!(
            of(&bytes),
            [
                (0..ZERO_DETECT_BYTES, true),
                (ZERO_DETECT_BYTES..2 * ZERO_DETECT_BYTES, false),
                (2 * ZERO_DETECT_BYTES..3 * ZERO_DETECT_BYTES + 512, true)
            ]
        );
        bytes[3 * ZERO_DETECT_BYTES] = 1;
        bytes[2 * ZERO_DETECT_BYTES] = 1;
        assert_eq!(
            of(&bytes),
            [(0..ZERO_DETECT_BYTES, true), (ZERO_DETECT_BYTES..3 * ZERO_DETECT_BYTES + 512, false)]
        );
        assert_eq!(of(&[]), []);
        let credit = pool.account().try_credit(ZERO_DETECT_BYTES, MemoryClass::LocalIo).unwrap();
        let mut bytes = vec![0; ZERO_DETECT_BYTES];
        bytes[511] = 1;
        let data = rt::buf::copy_in(&credit, &bytes);
        let begins = (5 * ZERO_DETECT_BYTES - 512) as u64;
        assert_eq!(split_zeroes(&data, begins), [(0..512, false), (512..ZERO_DETECT_BYTES, true)]);
    }

    #[test]
    fn a_piece_is_whole_blocks_of_both() {
        let info = |block_size, max_transfer_blocks| Info {
            block_size,
            blocks: 1,
            physical_block_size: 4096,
            max_transfer_blocks,
            unmap_granularity_blocks: 0,
            unmap_zeroes: true,
            volatile_cache: false,
            native_fua: true,
            read_only: false,
            overhead_bytes: 0,
            metadata_blocks: 0,
        };
        let small = || info(512, 2048);
        assert_eq!(
            chunk_sizes(&small(), &info(4096, 256), Lba(0)),
            (COPY_CHUNK_BYTES, COPY_CHUNK_BYTES)
        );
        assert_eq!(chunk_sizes(&small(), &info(4096, 256), Lba(127)), (4096, COPY_CHUNK_BYTES));
        assert_eq!(chunk_sizes(&info(512, 9), &info(4096, 256), Lba(3)), (4096, 4096));
        assert_eq!(chunk_sizes(&info(512, 7), &info(512, 64), Lba(8)), (6 * 512, 7 * 512));
        assert_eq!(chunk_sizes(&small(), &small(), Lba(65_535)), (512, COPY_CHUNK_BYTES));
        // The source's blocks are larger than the destination's alignment.
        assert_eq!(
            chunk_sizes(&info(4096, 256), &small(), Lba(1)),
            (COPY_CHUNK_BYTES - 4096, COPY_CHUNK_BYTES)
        );
        assert_eq!(
            chunk_sizes(&info(4096, 256), &small(), Lba(1023)),
            (COPY_CHUNK_BYTES, COPY_CHUNK_BYTES)
        );
    }

    #[test]
    fn a_lost_promise_is_still_resolved() {
        let notified = Rc::new(Cell::new(None));
        let tell = |notified: &Rc<Cell<_>>| {
            let notified = Rc::clone(notified);
            CompletionGuard::new(CopyOutcome::Aborted, move |outcome| notified.set(Some(outcome)))
        };
        tell(&notified).complete(CopyOutcome::Done);
        assert_eq!(notified.take(), Some(CopyOutcome::Done));
        drop(tell(&notified));
        assert_eq!(notified.take(), Some(CopyOutcome::Aborted));
    }
}
