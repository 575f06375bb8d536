//! The reservation table in the metadata area of a volume: reading and changing it (RFD 0013, 4).

use std::rc::{Rc, Weak};
use std::time::Duration;

use block::{
    Account, Blocks, Bufs, Ctx, Epoch, Error, Lba, METADATA_BYTES, METADATA_LBA, MemoryClass,
    MetadataObserver, Op, Request, RequestError,
};
use reservation::{COPY_BYTES, Change, ItNexus, ReservationError, Table};
use rt::buf::copy_in;
use tokio_util::task::AbortOnDropHandle;

use crate::command::Command;
use crate::reservation_gate::ReservationGate;
use crate::reservation_state::ReservationState;
use crate::volume::Volume;

/// Both copies fit the metadata area.
const _: () = assert!(2 * COPY_BYTES == METADATA_BYTES as usize);

/// Memory for one change: what is read, and for a comparison the expected, new and found contents.
/// Only one comparison is in flight.
const CHANGE_MEMORY_BYTES: usize = 5 * COPY_BYTES;

/// Memory to read the table.
const READ_MEMORY_BYTES: usize = METADATA_BYTES as usize;

/// Delay between a failed read of the table and the next.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// The same if the disk has failed, or the table is unreadable.
const ERROR_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Why the table was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationChangeError {
    /// The rules of reservations forbid it.
    Rejected(ReservationError),
    /// The device failed; the change may have happened.
    DeviceError(Error),
}

/// Both copies, as read.
struct StoredTables {
    copies: [Bufs; 2],
    table: Table,
    /// The copy that is not current.
    stale_copy: Option<usize>,
}

impl Volume {
    /// Enables reservations in the metadata area, if there is room. `gate` is the one to which a
    /// mirror below reports changes; it admits commands once it has a context. Memory comes from
    /// `account`. Call once, in a `LocalSet`, before there are callers.
    pub fn enable_reservations(self: &Rc<Self>, gate: Rc<ReservationGate>, account: Account) {
        if self.info().metadata_blocks == 0 {
            return;
        }
        let task =
            tokio::task::spawn_local(run_table_reader(Rc::downgrade(self), Rc::clone(&gate)));
        let state = ReservationState {
            gate,
            account,
            change_lock: tokio::sync::Mutex::default(),
            _task: AbortOnDropHandle::new(task),
        };
        if self.reservations.set(state).is_err() {
            tracing::error!("the volume already stores its reservations");
        }
    }

    /// Its gate, if reservations are enabled.
    #[must_use]
    pub fn reservation_gate(&self) -> Option<&Rc<ReservationGate>> {
        self.reservations.get().map(|k| &k.gate)
    }

    /// The table as it is in force on all nodes: if a registration is gone from it, its commands
    /// have ended.
    ///
    /// # Errors
    /// What the device reports; [`Error::Corrupt`] if it is unreadable.
    pub async fn read_reservations(self: &Rc<Self>) -> Result<Table, Error> {
        let state = self.reservations.get().ok_or(Error::ReadOnly)?;
        let _busy = self.begin_internal_op_if_open()?;
        let ctx = self.acquire_memory(state, READ_MEMORY_BYTES).await?;
        let found = self.read_table(&ctx).await?;
        drop(ctx);
        self.wait_in_force(state).await?;
        self.effective_table(found.table)
    }

    /// Changes the table on behalf of `by`, and calls `done` once that is in force on all nodes.
    /// Nothing is changed any more once `wanted` returns false: the initiator may have given it up
    /// with its session.
    pub fn change_reservations<D>(
        self: &Rc<Self>,
        by: ItNexus,
        change: Change,
        wanted: impl Fn() -> bool + 'static,
        done: D,
    ) where
        D: FnOnce(Result<(), ReservationChangeError>) + 'static,
    {
        let volume = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let result = volume.change_reservations_now(&by, &change, &wanted).await;
            done(result);
        });
    }

    async fn change_reservations_now(
        self: &Rc<Self>,
        by: &ItNexus,
        change: &Change,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(), ReservationChangeError> {
        let state =
            self.reservations.get().ok_or(ReservationChangeError::DeviceError(Error::ReadOnly))?;
        let _busy = self.begin_internal_op_if_open()?;
        let _turn = state.change_lock.lock().await;
        if !wanted() {
            return Err(ReservationChangeError::DeviceError(Error::Aborted));
        }
        // Before the same nexus, reconnected, reserves again.
        let mut left = state.gate.take_lost_nexuses();
        while let Some(gone) = left.pop() {
            if let Err(why) = self.apply_change(state, &gone, &Change::NexusLoss, &|| true).await {
                left.push(gone);
                state.gate.requeue_lost_nexuses(left);
                return Err(why);
            }
        }
        self.apply_change(state, by, change, wanted).await
    }

    async fn apply_change(
        self: &Rc<Self>,
        state: &ReservationState,
        by: &ItNexus,
        change: &Change,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(), ReservationChangeError> {
        let ctx = self.acquire_memory(state, CHANGE_MEMORY_BYTES).await?;
        let (mut patience, mut begun) = (ConflictRetries::default(), false);
        loop {
            let found = match self.read_table(&ctx).await {
                Err(Error::Corrupt { .. } | Error::Unreadable { .. })
                    if *change == Change::AdminClear && !begun =>
                {
                    self.reset_table(&ctx).await?;
                    begun = true;
                    continue;
                }
                found => found?,
            };
            patience.next_attempt(&found).await?;
            if let Some(stale) = found.stale_copy {
                self.repair_stale_copy(found, stale, &ctx).await?;
                continue;
            }
            let context = state.gate.current_context().ok_or(Error::Fenced)?;
            let table = self.effective_table(found.table.clone())?;
            let Some(next) = table
                .with_change(by, context.incarnation, change)
                .map_err(ReservationChangeError::Rejected)?
            else {
                // It may be another node's change that is not in force yet.
                break;
            };
            if !wanted() || self.is_closed() {
                return Err(ReservationChangeError::DeviceError(Error::Aborted));
            }
            let bytes = copy_in(ctx.credit(), &next.encode());
            if self.replace_copy(0, &found.copies[0], &bytes, &ctx).await? {
                // If the copy has changed, another node has completed this change, and made the
                // next.
                self.replace_copy(1, &found.copies[1], &bytes, &ctx).await?;
                tracing::info!(
                    generation = next.generation,
                    era = next.power_epoch,
                    ?by,
                    ?change,
                    "reservations have changed"
                );
                break;
            }
        }
        drop(ctx);
        Ok(self.wait_in_force(state).await?)
    }

    /// Waits until the written table is in force on all nodes.
    async fn wait_in_force(&self, state: &ReservationState) -> Result<(), Error> {
        if self.replicated.is_none() {
            state.gate.wait_in_force().await;
            return Ok(());
        }
        let overhead = self.info().overhead_bytes as usize;
        let credit = state.account.credit(overhead.max(1), MemoryClass::Command).await;
        let credit = credit.map_err(|_| Error::OutOfRange)?;
        self.dev.submit(Op::Flush, &Ctx::new(credit, Epoch::default())).await?;
        Ok(())
    }

    /// Replaces an unreadable table by an empty one. No other node changes a table that none can
    /// read.
    async fn reset_table(&self, ctx: &Ctx) -> Result<(), ReservationChangeError> {
        tracing::warn!(
            "the reservation table is damaged and was recreated: all registrations are lost"
        );
        let blocks = self.info().metadata_blocks;
        let (range, command) = (Blocks::new(METADATA_LBA, u64::from(blocks)), Command::default());
        let _lock = self.lock(range, true, &command).await?;
        let zero = Op::Zero { at: METADATA_LBA, blocks, unmap: false, fua: true };
        self.dev.submit(zero, ctx).await?;
        self.note_written(range, &Bufs::new());
        Ok(())
    }

    /// Makes both copies equal: the node that wrote one did not get to the other. Or the comparison
    /// finds them equal, so only this node's replica has rotted: then the copy is rewritten, which
    /// repairs it here.
    async fn repair_stale_copy(
        &self,
        found: StoredTables,
        stale: usize,
        ctx: &Ctx,
    ) -> Result<(), ReservationChangeError> {
        let bytes = copy_in(ctx.credit(), &found.table.encode());
        if self.replace_copy(stale, &found.copies[stale], &bytes, ctx).await? {
            return Ok(());
        }
        self.replace_copy(stale, &found.copies[1 - stale], &bytes, ctx).await.map(drop)
    }

    /// Writes a copy, if it is unchanged since it was read.
    async fn replace_copy(
        &self,
        copy: usize,
        expected: &Bufs,
        bytes: &Bufs,
        ctx: &Ctx,
    ) -> Result<bool, ReservationChangeError> {
        let at = self.copy_lba(copy);
        let (compare, write) = (expected.clone(), bytes.clone());
        let request = Request::CompareAndWrite { at, compare, write, fua: true };
        match self.compose(request, ctx, &Command::default()).await {
            Ok(()) => {}
            Err(
                RequestError::Miscompare { .. }
                | RequestError::ReservationConflict
                | RequestError::NoMemory,
            ) => {
                return Ok(false);
            }
            Err(RequestError::Device(e)) => return Err(ReservationChangeError::DeviceError(e)),
        }
        self.note_written(self.blocks_of(at, bytes), bytes);
        Ok(true)
    }

    /// Reports the written table to the gate, where no mirror does.
    fn note_written(&self, range: Blocks, bytes: &Bufs) {
        if let (None, Some(state)) = (&self.replicated, self.reservations.get()) {
            state.gate.on_applied(range, bytes);
        }
    }

    fn copy_lba(&self, copy: usize) -> Lba {
        Lba(METADATA_LBA.0 + (copy * COPY_BYTES) as u64 / u64::from(self.info().block_size))
    }

    async fn acquire_memory(&self, state: &ReservationState, bytes: usize) -> Result<Ctx, Error> {
        self.acquire_memory_of_class(MemoryClass::Read, state, bytes).await
    }

    async fn acquire_memory_of_class(
        &self,
        class: MemoryClass,
        state: &ReservationState,
        bytes: usize,
    ) -> Result<Ctx, Error> {
        let bytes = bytes + self.info().overhead_bytes as usize;
        let credit = state.account.credit(bytes, class).await;
        Ok(Ctx::new(credit.map_err(|_| Error::OutOfRange)?, Epoch::default()))
    }

    async fn read_table(&self, ctx: &Ctx) -> Result<StoredTables, Error> {
        let range = Blocks::new(METADATA_LBA, u64::from(self.info().metadata_blocks));
        let lock = self.lock(range, false, &Command::default()).await?;
        let bytes = self.read(range, ctx).await?;
        drop(lock);
        let copies = [bytes.slice(0..COPY_BYTES), bytes.slice(COPY_BYTES..2 * COPY_BYTES)];
        let (first, second) = (copies[0].to_vec(), copies[1].to_vec());
        let chosen = Table::recover(&first, &second);
        let (table, stale) = chosen.map_err(|_damaged| Error::Corrupt { at: METADATA_LBA })?;
        Ok(StoredTables { copies, table, stale_copy: stale })
    }

    fn effective_table(&self, table: Table) -> Result<Table, Error> {
        let context =
            self.reservation_gate().and_then(|gate| gate.current_context()).ok_or(Error::Fenced)?;
        Ok(table.as_of(context.power_epoch, |incarnation| {
            context.serving_incarnations.contains(&incarnation)
        }))
    }

    /// Begins an internal operation that the close of the volume waits for.
    fn begin_internal_op(self: &Rc<Self>) -> InternalOp {
        self.counters.update(|s| s.in_flight += 1);
        InternalOp(Rc::clone(self))
    }

    fn begin_internal_op_if_open(self: &Rc<Self>) -> Result<InternalOp, Error> {
        if self.is_closed() { Err(Error::Gone) } else { Ok(self.begin_internal_op()) }
    }

    /// Reads the table for the gate until it does not change meanwhile, and releases reservations
    /// of lost nexuses.
    async fn refresh_gate(self: &Rc<Self>, state: &ReservationState) {
        let _busy = self.begin_internal_op();
        while state.gate.is_stale() {
            let serial = state.gate.read_started();
            let read = async {
                // Not of a class that may wait for this: commands whose data has arrived wait at
                // the gate.
                let ctx = self
                    .acquire_memory_of_class(MemoryClass::Command, state, READ_MEMORY_BYTES)
                    .await?;
                self.read_table(&ctx).await.map(|found| found.table)
            };
            match read.await {
                Ok(table) => state.gate.read_succeeded(serial, table),
                Err(e) => {
                    if state.gate.read_failed(e) && e != Error::Fenced {
                        tracing::error!(error = %e, "reservations cannot be read: the volume is inaccessible");
                    }
                    if self.is_closed() {
                        return;
                    }
                    let passes = e == Error::Fenced;
                    tokio::time::sleep(if passes { RETRY_DELAY } else { ERROR_RETRY_DELAY }).await;
                }
            }
        }
        for nexus in state.gate.take_lost_nexuses() {
            self.release_lost_nexus(nexus);
        }
    }

    /// Releases the reservations that ended with `nexus`, in a task of its own: a change waits for
    /// the table to be read.
    fn release_lost_nexus(self: &Rc<Self>, nexus: ItNexus) {
        let (volume, gone) = (Rc::clone(self), nexus.clone());
        self.change_reservations(
            nexus,
            Change::NexusLoss,
            || true,
            move |left| {
                let Some(gate) = volume.reservation_gate().cloned() else { return };
                if let Err(why) = left {
                    tracing::debug!(?why, "releasing the reservation of a lost initiator failed");
                    // The next change does it first: the nexus may have returned, and reserve
                    // again.
                    gate.requeue_lost_nexuses(vec![gone]);
                    tokio::task::spawn_local(async move {
                        tokio::time::sleep(RETRY_DELAY).await;
                        if !volume.is_closed() {
                            gate.wake_reader();
                        }
                    });
                }
            },
        );
    }
}

/// How long a change is retried while other nodes change the table in between. Each time the table
/// must differ: otherwise this node reads something else than the comparison does, and retrying is
/// useless.
#[derive(Default)]
struct ConflictRetries {
    last: Option<[Vec<u8>; 2]>,
    unchanged: u32,
}

impl ConflictRetries {
    const MAX_UNCHANGED: u32 = 20;

    /// # Errors
    /// [`Error::Corrupt`] when time is up.
    async fn next_attempt(&mut self, found: &StoredTables) -> Result<(), Error> {
        let copies = [found.copies[0].to_vec(), found.copies[1].to_vec()];
        if self.last.as_ref() != Some(&copies) {
            *self = Self { last: Some(copies), unchanged: 0 };
            return Ok(());
        }
        self.unchanged += 1;
        if self.unchanged > Self::MAX_UNCHANGED {
            tracing::error!(
                "the reservation table of this node differs from the one compared with"
            );
            return Err(Error::Corrupt { at: METADATA_LBA });
        }
        tokio::time::sleep(RETRY_DELAY).await;
        Ok(())
    }
}

/// See [`Volume::begin_internal_op`].
struct InternalOp(Rc<Volume>);

impl Drop for InternalOp {
    fn drop(&mut self) {
        self.0.counters.update(|s| s.in_flight -= 1);
        self.0.wake_closers();
    }
}

impl From<Error> for ReservationChangeError {
    fn from(e: Error) -> Self {
        Self::DeviceError(e)
    }
}

/// Reads the table on request, for as long as the volume exists.
async fn run_table_reader(volume: Weak<Volume>, gate: Rc<ReservationGate>) {
    loop {
        gate.wait_read_wanted().await;
        let Some(volume) = volume.upgrade() else { return };
        if let Some(state) = volume.reservations.get() {
            Box::pin(volume.refresh_gate(state)).await;
        }
    }
}
