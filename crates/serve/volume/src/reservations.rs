//! The table of reservations beside a volume: reading and changing it (RFD 0013, 4).

use std::fmt;
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::{
    ASIDE, ASIDE_BYTES, Account, Aside, Blocks, Bufs, Class, Ctx, Epoch, Error, Failure, Lba, Op,
    Request,
};
use reservation::{COPY_BYTES, Change, Party, Refusal, Table};
use rt::buf::copy_in;
use tokio_util::task::AbortOnDropHandle;

use crate::command::Command;
use crate::gate::Gate;
use crate::volume::Volume;

/// Both copies lie beside the volume.
const _: () = assert!(2 * COPY_BYTES == ASIDE_BYTES as usize);

/// Memory for one change: what is read, and for each comparison what is expected, what is new and what is
/// found. Of the latter two only one is under way.
const MEMORY: usize = 5 * COPY_BYTES;

/// Memory to read it.
const READING: usize = ASIDE_BYTES as usize;

/// How long after an attempt to read the table that came to nothing there is another.
const AGAIN: Duration = Duration::from_millis(50);

/// The same where the disk has failed, or the table cannot be made out.
const LATER: Duration = Duration::from_secs(1);

/// Why the table was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unaltered {
    /// By the rules of reservations.
    Refused(Refusal),
    /// The device failed; what was asked for may have happened.
    Failed(Error),
}

/// What a volume that keeps reservations has for them.
pub(crate) struct Keeping {
    pub(crate) gate: Rc<Gate>,
    account: Account,
    /// One change at a time.
    turn: tokio::sync::Mutex<()>,
    _task: AbortOnDropHandle<()>,
}

impl fmt::Debug for Keeping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.gate.fmt(f)
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        // It may know of what knows the gate.
        self.gate.forget_source();
    }
}

/// Both copies, as they were read.
struct Found {
    copies: [Bufs; 2],
    table: Table,
    /// The copy that does not hold it.
    stale: Option<usize>,
}

impl Volume {
    /// Keeps reservations beside the volume from now on, if there is room. `gate` is the one that a mirror
    /// below tells of changes; it judges commands once it has a standing. Memory comes from `account`. To be
    /// called once, in a `LocalSet`, before there are callers.
    pub fn keep_reservations(self: &Rc<Self>, gate: Rc<Gate>, account: Account) {
        if self.info().aside_blocks == 0 {
            return;
        }
        let task = tokio::task::spawn_local(keep(Rc::downgrade(self), Rc::clone(&gate)));
        let keeping = Keeping {
            gate,
            account,
            turn: tokio::sync::Mutex::default(),
            _task: AbortOnDropHandle::new(task),
        };
        if self.keeping.set(keeping).is_err() {
            tracing::error!("a volume keeps its reservations already");
        }
    }

    /// Its gate, if it keeps reservations.
    #[must_use]
    pub fn gate(&self) -> Option<&Rc<Gate>> {
        self.keeping.get().map(|k| &k.gate)
    }

    /// The table as it is in force at all nodes: whoever finds a party gone may rely on it as if he had preempted it.
    ///
    /// # Errors
    /// What the device reports; [`Error::Corrupt`] if it cannot be made out.
    pub async fn reservations(self: &Rc<Self>) -> Result<Table, Error> {
        let keeping = self.keeping.get().ok_or(Error::ReadOnly)?;
        let _busy = self.open_and_busy()?;
        let ctx = self.memory(keeping, READING).await?;
        let found = self.read_table(&ctx).await?;
        drop(ctx);
        self.in_force(keeping).await?;
        self.holding(found.table)
    }

    /// Changes the table on behalf of `by`, and calls `done` when that is in force at all nodes. Nothing is changed any more
    /// once it is not `wanted`: whoever asked may have given it up with his session.
    pub fn alter<D>(
        self: &Rc<Self>,
        by: Party,
        change: Change,
        wanted: impl Fn() -> bool + 'static,
        done: D,
    ) where
        D: FnOnce(Result<(), Unaltered>) + 'static,
    {
        let volume = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let result = volume.alter_now(&by, &change, &wanted).await;
            done(result);
        });
    }

    async fn alter_now(
        self: &Rc<Self>,
        by: &Party,
        change: &Change,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(), Unaltered> {
        let keeping = self.keeping.get().ok_or(Unaltered::Failed(Error::ReadOnly))?;
        let _busy = self.open_and_busy()?;
        let _turn = keeping.turn.lock().await;
        if !wanted() {
            return Err(Unaltered::Failed(Error::Aborted));
        }
        // Before the same party, back again, reserves anew.
        let mut left = keeping.gate.left();
        while let Some(gone) = left.pop() {
            if let Err(why) = self.change(keeping, &gone, &Change::Leave, &|| true).await {
                left.push(gone);
                keeping.gate.still_left(left);
                return Err(why);
            }
        }
        self.change(keeping, by, change, wanted).await
    }

    async fn change(
        self: &Rc<Self>,
        keeping: &Keeping,
        by: &Party,
        change: &Change,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(), Unaltered> {
        let ctx = self.memory(keeping, MEMORY).await?;
        let (mut patience, mut begun) = (Patience::default(), false);
        loop {
            let found = match self.read_table(&ctx).await {
                Err(Error::Corrupt { .. } | Error::Unreadable { .. })
                    if *change == Change::Evict && !begun =>
                {
                    self.begin_anew(&ctx).await?;
                    begun = true;
                    continue;
                }
                found => found?,
            };
            patience.with(&found).await?;
            if let Some(stale) = found.stale {
                self.finish(found, stale, &ctx).await?;
                continue;
            }
            let standing = keeping.gate.standing().ok_or(Error::Fenced)?;
            let table = self.holding(found.table.clone())?;
            let Some(next) = table.change(by, standing.seat, change).map_err(Unaltered::Refused)?
            else {
                // It may be another node's change that is not in force yet.
                break;
            };
            if !wanted() || self.is_closed() {
                return Err(Unaltered::Failed(Error::Aborted));
            }
            let bytes = copy_in(ctx.credit(), &next.encode());
            if self.replace(0, &found.copies[0], &bytes, &ctx).await? {
                // If it is another one by now, somebody has finished this change, and gone on.
                self.replace(1, &found.copies[1], &bytes, &ctx).await?;
                tracing::info!(
                    generation = next.generation,
                    era = next.era,
                    ?by,
                    ?change,
                    "reservations have changed"
                );
                break;
            }
        }
        drop(ctx);
        Ok(self.in_force(keeping).await?)
    }

    /// Waits until what has been written is in force at all nodes.
    async fn in_force(&self, keeping: &Keeping) -> Result<(), Error> {
        if self.compares.is_none() {
            keeping.gate.settled().await;
            return Ok(());
        }
        let overhead = self.info().overhead as usize;
        let credit = keeping.account.credit(overhead.max(1), Class::Command).await;
        let credit = credit.map_err(|_| Error::OutOfRange)?;
        self.dev.submit(Op::Flush, &Ctx::new(credit, Epoch::default())).await?;
        Ok(())
    }

    /// Puts an empty table in the place of one that cannot be made out. Nobody else changes what nobody can read.
    async fn begin_anew(&self, ctx: &Ctx) -> Result<(), Unaltered> {
        tracing::warn!("the table of reservations is made anew: all registrations are gone");
        let blocks = self.info().aside_blocks;
        let (range, command) = (Blocks::new(ASIDE, u64::from(blocks)), Command::default());
        let _lock = self.lock(range, true, &command).await?;
        let zero = Op::Zero { at: ASIDE, blocks, unmap: false, fua: true };
        self.dev.submit(zero, ctx).await?;
        self.note(range, &Bufs::new());
        Ok(())
    }

    /// Makes both copies the same: somebody has not come to do it. Or it is the same already where it is compared, and has
    /// rotted at this node alone: then it is written as it is, which mends it here.
    async fn finish(&self, found: Found, stale: usize, ctx: &Ctx) -> Result<(), Unaltered> {
        let bytes = copy_in(ctx.credit(), &found.table.encode());
        if self.replace(stale, &found.copies[stale], &bytes, ctx).await? {
            return Ok(());
        }
        self.replace(stale, &found.copies[1 - stale], &bytes, ctx).await.map(drop)
    }

    /// Writes a copy, if it is still what was read.
    async fn replace(
        &self,
        copy: usize,
        expected: &Bufs,
        bytes: &Bufs,
        ctx: &Ctx,
    ) -> Result<bool, Unaltered> {
        let at = self.place(copy);
        let (compare, write) = (expected.clone(), bytes.clone());
        let request = Request::CompareAndWrite { at, compare, write, fua: true };
        match self.compose(request, ctx, &Command::default()).await {
            Ok(()) => {}
            Err(Failure::Miscompare { .. } | Failure::Conflict | Failure::Busy) => {
                return Ok(false);
            }
            Err(Failure::Device(e)) => return Err(Unaltered::Failed(e)),
        }
        self.note(self.covered(at, bytes), bytes);
        Ok(true)
    }

    /// Tells the gate what was written, where no mirror does.
    fn note(&self, range: Blocks, bytes: &Bufs) {
        if let (None, Some(keeping)) = (&self.compares, self.keeping.get()) {
            keeping.gate.changed(range, bytes);
        }
    }

    fn place(&self, copy: usize) -> Lba {
        Lba(ASIDE.0 + (copy * COPY_BYTES) as u64 / u64::from(self.info().block_size))
    }

    async fn memory(&self, keeping: &Keeping, bytes: usize) -> Result<Ctx, Error> {
        self.memory_of(Class::Read, keeping, bytes).await
    }

    async fn memory_of(&self, class: Class, keeping: &Keeping, bytes: usize) -> Result<Ctx, Error> {
        let bytes = bytes + self.info().overhead as usize;
        let credit = keeping.account.credit(bytes, class).await;
        Ok(Ctx::new(credit.map_err(|_| Error::OutOfRange)?, Epoch::default()))
    }

    async fn read_table(&self, ctx: &Ctx) -> Result<Found, Error> {
        let range = Blocks::new(ASIDE, u64::from(self.info().aside_blocks));
        let lock = self.lock(range, false, &Command::default()).await?;
        let bytes = self.read(range, ctx).await?;
        drop(lock);
        let copies = [bytes.slice(0..COPY_BYTES), bytes.slice(COPY_BYTES..2 * COPY_BYTES)];
        let (first, second) = (copies[0].to_vec(), copies[1].to_vec());
        let chosen = Table::choose(&first, &second);
        let (table, stale) = chosen.map_err(|_damaged| Error::Corrupt { at: ASIDE })?;
        Ok(Found { copies, table, stale })
    }

    fn holding(&self, table: Table) -> Result<Table, Error> {
        let standing = self.gate().and_then(|gate| gate.standing()).ok_or(Error::Fenced)?;
        Ok(table.as_of(standing.era, |seat| standing.seats.contains(&seat)))
    }

    /// Something is under way that the volume's end waits for.
    fn busy(self: &Rc<Self>) -> Busy {
        self.counters.update(|s| s.in_flight += 1);
        Busy(Rc::clone(self))
    }

    fn open_and_busy(self: &Rc<Self>) -> Result<Busy, Error> {
        if self.is_closed() { Err(Error::Gone) } else { Ok(self.busy()) }
    }

    /// Reads the table for the gate until nothing has changed meanwhile, and gives up what parties held that are gone.
    async fn look(self: &Rc<Self>, keeping: &Keeping) {
        let _busy = self.busy();
        while keeping.gate.is_stale() {
            let serial = keeping.gate.reading();
            let read = async {
                // Not of the class of what may wait for this: commands whose data has arrived wait at the gate.
                let ctx = self.memory_of(Class::Command, keeping, READING).await?;
                self.read_table(&ctx).await.map(|found| found.table)
            };
            match read.await {
                Ok(table) => keeping.gate.found(serial, table),
                Err(e) => {
                    if keeping.gate.failed(e) && e != Error::Fenced {
                        tracing::error!(error = %e, "reservations cannot be read: nobody may use the volume");
                    }
                    if self.is_closed() {
                        return;
                    }
                    let passes = e == Error::Fenced;
                    tokio::time::sleep(if passes { AGAIN } else { LATER }).await;
                }
            }
        }
        for party in keeping.gate.left() {
            self.give_up(party);
        }
    }

    /// Gives up what ended with `party`, in a task of its own: a change waits for the table to be read.
    fn give_up(self: &Rc<Self>, party: Party) {
        let (volume, gone) = (Rc::clone(self), party.clone());
        self.alter(
            party,
            Change::Leave,
            || true,
            move |left| {
                let Some(gate) = volume.gate().cloned() else { return };
                if let Err(why) = left {
                    tracing::debug!(?why, "what a lost initiator has reserved is not given up yet");
                    // Whoever changes something next does it first: the party may be back, and reserve anew.
                    gate.still_left(vec![gone]);
                    tokio::task::spawn_local(async move {
                        tokio::time::sleep(AGAIN).await;
                        if !volume.is_closed() {
                            gate.look_again();
                        }
                    });
                }
            },
        );
    }
}

/// For how long a change is tried that others come in the way of. Each time they do the table is another one: if it is not,
/// this node has something else than is compared with, and no try will do.
#[derive(Default)]
struct Patience {
    last: Option<[Vec<u8>; 2]>,
    unchanged: u32,
}

impl Patience {
    const TRIES: u32 = 20;

    /// # Errors
    /// [`Error::Corrupt`] when it is over.
    async fn with(&mut self, found: &Found) -> Result<(), Error> {
        let copies = [found.copies[0].to_vec(), found.copies[1].to_vec()];
        if self.last.as_ref() != Some(&copies) {
            *self = Self { last: Some(copies), unchanged: 0 };
            return Ok(());
        }
        self.unchanged += 1;
        if self.unchanged > Self::TRIES {
            tracing::error!(
                "this node's table of reservations is not the one that is compared with"
            );
            return Err(Error::Corrupt { at: ASIDE });
        }
        tokio::time::sleep(AGAIN).await;
        Ok(())
    }
}

/// See [`Volume::busy`].
struct Busy(Rc<Volume>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.counters.update(|s| s.in_flight -= 1);
        self.0.wake_if_idle();
    }
}

impl From<Error> for Unaltered {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

/// Reads the table whenever it is wanted, for as long as the volume lives.
async fn keep(volume: Weak<Volume>, gate: Rc<Gate>) {
    loop {
        gate.wanted().await;
        let Some(volume) = volume.upgrade() else { return };
        if let Some(keeping) = volume.keeping.get() {
            Box::pin(volume.look(keeping)).await;
        }
    }
}
