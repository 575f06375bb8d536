//! What is read and written of one member beside data: its label, its journal, its snapshots.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Account, Class};
use disk::{Gate, Hold, Lease, Lost, NotTaken, Raw, Subject, check, clear_disk, pass, read_disk};
use raid::Errors;
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind};
use tokio::time::timeout;

use super::error::{PoolError, failed};
use super::journal::{BLOCK_BYTES, Block, NoBlock};
use super::knowledge::{Damaged, known};
use super::label::{self, BadLabel, LABEL_BYTES, Label, SLOTS, State};
use super::metadata::{Metadata, Piece, TAIL_BYTES};
use super::multihost::Ownership;
use super::recovery::raw;
use super::snapshot::{self, NoSnapshot};
use super::writer::{LONG_PATIENCE, PATIENCE};

/// How long a disk is waited for that is asked whether it is still this machine's.
const VERIFIED_WITHIN: Duration = Duration::from_secs(1);

/// Most that is read or written at once, in bytes.
const STEP: usize = 256 << 10;

/// A disk that is a member, or is to become one.
#[derive(Debug)]
pub(super) struct MemberDisk {
    disk: Disk,
    memory: Account,
    label: Cell<Label>,
    /// The versions that its two snapshots are of.
    snapshots: Cell<[u64; 2]>,
    /// What all cores count of it.
    errors: Arc<Errors>,
    /// How often something written here has ended.
    steps: Cell<u64>,
    /// Keeps other machines from it.
    hold: RefCell<Option<Rc<Hold>>>,
}

/// What comes of it, or that the disk is gone, as it does not answer for so long. What is under way goes on, and holds the disk.
pub(super) async fn within<T>(
    patience: Duration,
    work: impl Future<Output = Result<T, DiskError>>,
) -> Result<T, DiskError> {
    let gone = Err(DiskError { kind: DiskErrorKind::Gone, errno: 0 });
    timeout(patience, work).await.unwrap_or(gone)
}

/// Why a member that is there cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    /// It cannot be read.
    #[error("{0}")]
    Disk(#[from] DiskError),
    /// It is not all there.
    #[error("{0}")]
    Damaged(#[from] Damaged),
    /// It holds what this release does not know.
    #[error("{0}")]
    Snapshot(#[from] NoSnapshot),
    /// Likewise.
    #[error("{0}")]
    Block(#[from] NoBlock),
}

/// What the label of a disk says; none if there is none.
pub(super) async fn read_label(
    disk: &Disk,
    memory: &Account,
) -> Result<Result<Option<Label>, BadLabel>, DiskError> {
    let mut found = [Err(BadLabel::NoMagic); 2];
    let (mut unread, mut read_any) = (None, false);
    for ((slot, at), found) in (0u16..).zip(SLOTS).zip(&mut found) {
        if at + LABEL_BYTES as u64 > disk.info().size {
            continue;
        }
        match read_disk(disk, memory, at, LABEL_BYTES).await {
            Ok(bytes) => {
                read_any = true;
                *found = page(&bytes).map_or(Err(BadLabel::NoMagic), |b| Label::parse(b, slot));
            }
            Err(why) => (*found, unread) = (Err(BadLabel::Damaged), Some(why)),
        }
    }
    match unread {
        Some(why) if !read_any => Err(why),
        _ => Ok(label::choose(found)),
    }
}

impl MemberDisk {
    /// The member that `label` says `disk` is.
    pub(super) fn new(disk: Disk, memory: Account, label: Label) -> Self {
        Self {
            disk,
            memory,
            label: Cell::new(label),
            snapshots: Cell::new([0; 2]),
            errors: Arc::default(),
            steps: Cell::new(0),
            hold: RefCell::default(),
        }
    }

    /// Takes it for this machine, if that is to be done.
    ///
    /// # Errors
    /// [`NotTaken`]: who has it.
    pub(super) async fn take(&self, core: &Core, ownership: &Ownership) -> Result<(), NotTaken> {
        let Some(claim) = ownership.claim else { return Ok(()) };
        let label = self.label.get();
        let subject = Subject { set: label.pool, part: label.member };
        let told = ownership.told.clone();
        let hold = Hold::take(core, &self.disk, &self.memory, (subject, &claim), told).await?;
        *self.hold.borrow_mut() = Some(Rc::new(hold));
        Ok(())
    }

    fn hold(&self) -> Option<Rc<Hold>> {
        self.hold.borrow().clone()
    }

    /// Until when it may be used.
    pub(super) fn lease(&self) -> Option<Arc<Lease>> {
        self.hold.borrow().as_ref().map(|hold| hold.lease())
    }

    fn gate(&self) -> Option<Gate> {
        self.hold.borrow().as_ref().map(|hold| hold.gate())
    }

    /// Looks whether it is still this machine's.
    ///
    /// # Errors
    /// That another one has it. If that cannot be told it is not lost.
    pub(super) async fn verify(&self) -> Result<(), Lost> {
        let Some(hold) = self.hold() else { return Ok(()) };
        match timeout(VERIFIED_WITHIN, hold.verify()).await {
            Ok(Err(Some(lost))) => Err(lost),
            // What it may not be used for any more it is not used for, by its lease.
            Ok(Ok(()) | Err(None)) | Err(_) => Ok(()),
        }
    }

    /// Gives it back: other nodes may take it from now on. Nothing may be written to it any more.
    pub(super) async fn release(&self) {
        let Some(hold) = self.hold.take() else { return };
        let path = self.path().display();
        match timeout(PATIENCE, hold.release()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(%path, %error, "it is not noted that the disk is closed: another node needs --take-over");
            }
            Err(_) => tracing::warn!(%path, "the disk does not answer: it is not released"),
        }
    }

    /// Ends its heartbeat: it can be opened again at once, by this node.
    pub(super) async fn let_go(&self) {
        if let Some(hold) = self.hold.take() {
            hold.end().await;
        }
    }

    /// The disk as an array uses it.
    pub(super) fn raw(&self) -> Raw {
        raw(self.disk.clone()).guarded(self.gate())
    }

    /// Changes whenever something that was to be written has been.
    pub(super) fn steps(&self) -> u64 {
        self.steps.get()
    }

    pub(super) fn label(&self) -> Label {
        self.label.get()
    }

    pub(super) fn path(&self) -> &Path {
        self.disk.path()
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    pub(super) fn errors(&self) -> Arc<Errors> {
        Arc::clone(&self.errors)
    }

    /// The version of the newer snapshot.
    pub(super) fn snapshot(&self) -> u64 {
        let [a, b] = self.snapshots.get();
        a.max(b)
    }

    /// Makes `label` its label, with the next number.
    pub(super) async fn relabel(&self, label: Label) -> Result<(), DiskError> {
        let label = Label { generation: self.label.get().generation + 1, ..label };
        // A failed attempt may leave one copy with its number: the next one takes a higher.
        self.label.set(label);
        for (slot, at) in [(1, SLOTS[1]), (0, SLOTS[0])] {
            self.write(at, &label.to_bytes(slot)).await?;
            self.sync().await?;
        }
        Ok(())
    }

    /// Has its label say how far it is.
    ///
    /// # Errors
    /// That it cannot be written in time, by the disk's path.
    pub(super) async fn set_state(&self, state: State) -> Result<(), PoolError> {
        let relabelled = self.relabel(Label { state, ..self.label() });
        within(LONG_PATIENCE, relabelled).await.map_err(|why| failed(self.path(), why))
    }

    /// What it knows.
    pub(super) async fn known(&self) -> Result<Metadata, Unusable> {
        let (label, mut snapshots) = (self.label.get(), Vec::new());
        let mut versions = [0; 2];
        for (at, version) in label.layout.snapshots_at.into_iter().zip(&mut versions) {
            if let Some(found) = self.read_snapshot(at, &label).await? {
                *version = found.stamp().version;
                snapshots.push(found);
            }
        }
        self.snapshots.set(versions);
        let blocks = self.read_journal(&label).await?;
        Ok(known(&label, snapshots, blocks)?)
    }

    /// Ends when the disk answers, whatever it says.
    pub(super) async fn wait_for_answer(&self) {
        let _ = read_disk(&self.disk, &self.memory, 0, BLOCK_BYTES).await;
    }

    async fn read_snapshot(&self, at: u64, label: &Label) -> Result<Option<Metadata>, Unusable> {
        let first = read_disk(&self.disk, &self.memory, at, BLOCK_BYTES).await?;
        let length = page(&first).and_then(|first| snapshot::length(first, label.pool));
        let room = u64::from(label.layout.room) * BLOCK_BYTES as u64;
        let Some(length) = length.filter(|length| (1..=room).contains(length)) else {
            return Ok(None);
        };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let bytes = read_disk(&self.disk, &self.memory, at, length).await?;
        match Metadata::of_snapshot(&bytes, label.pool) {
            Ok(found) => Ok(Some(found)),
            Err(why @ (NoSnapshot::Version(_) | NoSnapshot::Broken(_) | NoSnapshot::Nonsense)) => {
                Err(why.into())
            }
            Err(_) => Ok(None),
        }
    }

    async fn read_journal(&self, label: &Label) -> Result<Vec<Block>, Unusable> {
        let mut blocks = Vec::new();
        let (mut at, layout) = (label.layout.journal_at, label.layout);
        let end = layout.journal_block_at(layout.journal_blocks);
        while at < end {
            let len = STEP.min(usize::try_from(end - at).unwrap_or(STEP));
            let bytes = read_disk(&self.disk, &self.memory, at, len).await?;
            for block in bytes.chunks_exact(BLOCK_BYTES).filter_map(page) {
                match Block::parse(block, label.pool) {
                    Ok(block) => blocks.push(block),
                    Err(NoBlock::Foreign | NoBlock::Torn | NoBlock::Other) => {}
                    Err(why @ (NoBlock::Version(_) | NoBlock::Contradiction)) => {
                        return Err(why.into());
                    }
                }
            }
            at += len as u64;
        }
        Ok(blocks)
    }

    /// Makes a version durable.
    pub(super) async fn put(&self, block: &Block) -> Result<(), DiskError> {
        let label = self.label.get();
        let place = Block::place(block.stamp.version, label.layout.journal_blocks);
        let at = label.layout.journal_block_at(place);
        self.write(at, &block.to_bytes(label.pool)).await?;
        self.sync().await
    }

    /// Makes a snapshot of this version durable, in the place of the older one.
    pub(super) async fn put_snapshot(&self, bytes: &[u8], version: u64) -> Result<(), DiskError> {
        let layout = self.label.get().layout;
        let mut versions = self.snapshots.get();
        let older = usize::from(versions[1] < versions[0]);
        if bytes.len() as u64 > u64::from(layout.room) * BLOCK_BYTES as u64 {
            return Err(DiskError { kind: DiskErrorKind::PastEnd, errno: 0 });
        }
        let at = layout.snapshots_at[older];
        for (n, piece) in bytes.chunks(STEP).enumerate() {
            self.write(at + (n * STEP) as u64, piece).await?;
        }
        self.sync().await?;
        versions[older] = version;
        self.snapshots.set(versions);
        Ok(())
    }

    /// Nothing is in its snapshots any more.
    pub(super) async fn forget_snapshots(&self) -> Result<(), DiskError> {
        let layout = self.label.get().layout;
        self.zero(layout.snapshots_at[0], layout.rings_at).await?;
        self.snapshots.set([0; 2]);
        self.sync().await
    }

    /// Nothing is in its journal, its rings and its lists any more: its snapshot is what it knows.
    pub(super) async fn forget_changes(&self) -> Result<(), DiskError> {
        let layout = self.label.get().layout;
        self.zero(layout.journal_at, layout.journal_block_at(layout.journal_blocks)).await?;
        self.zero(layout.rings_at, layout.units_at).await?;
        self.sync().await
    }

    /// Makes all of a unit zero, durably.
    pub(super) async fn clear(&self, piece: Piece) -> Result<(), DiskError> {
        let layout = self.label.get().layout;
        let at = layout.unit_at(piece.unit);
        self.zero(at, at + layout.unit_bytes).await?;
        self.sync().await
    }

    /// Makes zero, durably, what lies behind the strips of a unit: maps and checksums of what was there before.
    pub(super) async fn clear_tail(&self, piece: Piece) -> Result<(), DiskError> {
        let layout = self.label.get().layout;
        let end = layout.unit_at(piece.unit) + layout.unit_bytes;
        self.zero(end - TAIL_BYTES, end).await?;
        self.sync().await
    }

    async fn zero(&self, from: u64, to: u64) -> Result<(), DiskError> {
        pass(self.gate().as_ref()).await?;
        let cleared = clear_disk(&self.disk, &self.memory, from, to).await;
        self.step(cleared)
    }

    async fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DiskError> {
        let credit = self.memory.credit(bytes.len(), Class::Immediate).await;
        let credit = credit.map_err(|_| DiskError { kind: DiskErrorKind::Other, errno: 0 })?;
        let gate = self.gate();
        let written = async {
            pass(gate.as_ref()).await?;
            self.disk.write(at, rt::buf::copy_in(&credit, bytes)).await?;
            pass(gate.as_ref()).await
        };
        let written = written.await;
        self.step(written)
    }

    async fn sync(&self) -> Result<(), DiskError> {
        check(self.gate().as_ref())?;
        let synced = self.disk.sync().await;
        self.step(synced)
    }

    fn step<T>(&self, ended: T) -> T {
        self.steps.set(self.steps.get() + 1);
        ended
    }
}

fn page(bytes: &[u8]) -> Option<&[u8; BLOCK_BYTES]> {
    bytes.get(..BLOCK_BYTES)?.try_into().ok()
}
