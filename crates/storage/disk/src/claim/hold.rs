//! Takes a disk, renews its heartbeat as long as it is held, and gives it back.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use block::{Account, Class};
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind};
use tokio::sync::{Mutex, mpsc};
use uuid::Uuid;

use super::judge::{Refusal, SETTLE, Seen, Step, judge};
use super::lease::{Gate, Lease};
use super::record::{BadRecord, Copy, NodeIdentity, OWNER_BYTES, OwnerRecord, State};
use super::{BEAT_AT, CLAIM_AT, Claim, INTERVAL, SECOND_AT, STOP, Subject};
use crate::{clear_disk, read_disk};

/// How often a heartbeat is looked at that is watched.
const LOOK: Duration = Duration::from_millis(500);

/// Pause before a renewal that failed is tried again.
const AGAIN: Duration = Duration::from_millis(200);

/// So often a claim that cannot be read is taken for torn by chance; then it is written again.
const TORN: u32 = 2;

/// Why a disk was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// It is another node's, or nobody knows whose.
    Refused(Refusal),
    /// It fails.
    Disk(DiskError),
}

impl fmt::Display for NotTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Disk(error) => error.fmt(f),
        }
    }
}

impl From<DiskError> for NotTaken {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

/// A disk that another machine has taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// What was held.
    pub subject: Subject,
    /// Who has it now; none if its record was overwritten by something else.
    pub to: Option<Box<OwnerRecord>>,
}

/// A disk that this machine has taken. Dropped, it is held no longer and not given back: the same node may take it again.
pub struct Hold {
    inner: Rc<Inner>,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("record", &self.inner.record).finish_non_exhaustive()
    }
}

struct Inner {
    core: Core,
    disk: Disk,
    memory: Account,
    lease: Arc<Lease>,
    /// The newest record that may be on the disk.
    record: Cell<OwnerRecord>,
    /// Whoever reads or writes records.
    turn: Mutex<()>,
    /// How often in a row the claim could not be understood.
    torn: Cell<u32>,
    lost_to: RefCell<Option<Lost>>,
    told: RefCell<Option<mpsc::UnboundedSender<Lost>>>,
    has_ended: Cell<bool>,
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// The record of one place, and the error if it cannot be read.
async fn read_at(
    disk: &Disk,
    memory: &Account,
    at: u64,
    copy: Copy,
) -> Result<Result<OwnerRecord, BadRecord>, DiskError> {
    let bytes = read_disk(disk, memory, at, OWNER_BYTES).await?;
    Ok(parsed(&bytes, copy))
}

fn parsed(bytes: &[u8], copy: Copy) -> Result<OwnerRecord, BadRecord> {
    let bytes = bytes.try_into().map_err(|_| BadRecord::NoMagic)?;
    OwnerRecord::parse(bytes, copy)
}

/// What the disk says of its owner.
async fn see(disk: &Disk, memory: &Account) -> Result<Seen, DiskError> {
    let first = read_at(disk, memory, CLAIM_AT, Copy::First).await;
    let second = read_at(disk, memory, SECOND_AT, Copy::Second).await;
    let beat = read_at(disk, memory, BEAT_AT, Copy::Beat).await;
    let unread = Err(BadRecord::Damaged);
    match (first, second) {
        (Err(why), Err(_)) => Err(why),
        (first, second) => {
            let (first, second) = (first.unwrap_or(unread), second.unwrap_or(unread));
            Ok(Seen::of(first, second, beat.unwrap_or(unread)))
        }
    }
}

/// Whether a disk has room for records: what is smaller is used by nobody.
fn has_room(disk: &Disk) -> bool {
    disk.info().size >= SECOND_AT + OWNER_BYTES as u64
}

/// Waits until the heartbeat of the disk has not moved for as long as that has to be known. Ends with what was seen, since when,
/// and what is to be done then.
async fn watched(
    core: &Core,
    disk: &Disk,
    memory: &Account,
    claim: &Claim,
) -> Result<(Seen, Duration, Duration), NotTaken> {
    let is_shared = disk.info().shared;
    let mut began = core.now();
    let mut seen = see(disk, memory).await?;
    let mut has_watched = false;
    if claim.ignores_heartbeat() {
        return Ok((seen, began, Duration::ZERO));
    }
    loop {
        match judge(&seen, &claim.node, claim.take_over, is_shared, has_watched) {
            Step::Refuse(refusal) => return Err(NotTaken::Refused(refusal)),
            Step::Take(wait) => return Ok((seen, began, wait)),
            Step::Watch(time) => {
                let path = disk.path().display();
                tracing::info!(%path, seconds = time.as_secs(), "multihost: watching whether another machine uses the disk");
                let until = core.now().saturating_add(time);
                while core.now() < until {
                    core.sleep(LOOK).await;
                    began = core.now();
                    let now = see(disk, memory).await?;
                    if !now.is_as_still_as(&seen) {
                        match now.claim {
                            Some(record) if record.state == State::Held => {
                                return Err(NotTaken::Refused(Refusal::InUse(Box::new(record))));
                            }
                            // It was given back meanwhile, or wiped: all is judged anew.
                            _ => {
                                seen = now;
                                break;
                            }
                        }
                    }
                    seen = now;
                    has_watched = core.now() >= until;
                }
            }
        }
    }
}

/// Whether nobody else uses a disk that is to be overwritten: as long as that has to be watched. Whoever overwrites it on purpose
/// says so by [`Claim::take_over`].
///
/// # Errors
/// [`NotTaken`]: who uses it.
pub async fn check_free(
    core: &Core,
    disk: &Disk,
    memory: &Account,
    claim: &Claim,
) -> Result<(), NotTaken> {
    if !has_room(disk) {
        return Ok(());
    }
    watched(core, disk, memory, claim).await.map(drop)
}

impl Hold {
    /// Takes a disk, after all waits that needs, and renews its heartbeat from then on. `told` hears if another machine takes it.
    ///
    /// # Errors
    /// [`NotTaken`]: who has it, or why it cannot be taken.
    pub async fn take(
        core: &Core,
        disk: &Disk,
        memory: &Account,
        (subject, claim): (Subject, &Claim),
        told: Option<mpsc::UnboundedSender<Lost>>,
    ) -> Result<Self, NotTaken> {
        let (seen, began, wait) = watched(core, disk, memory, claim).await?;
        let is_shared = disk.info().shared;
        let time = |time: Duration| if is_shared { millis(time) } else { 0 };
        let record = OwnerRecord {
            claim: seen.claim.map_or(0, |before| before.claim).saturating_add(1),
            beat: 0,
            nonce: core.random_u64(),
            life: core.random_uuid(),
            subject,
            owner: claim.node,
            written: core.wall_clock(),
            interval_ms: time(INTERVAL),
            stop_ms: time(STOP),
            state: State::Held,
        };
        let lease = Lease::new(is_shared.then(|| began.saturating_add(STOP)));
        let inner = Inner {
            core: core.clone(),
            disk: disk.clone(),
            memory: memory.clone(),
            lease,
            record: Cell::new(record),
            turn: Mutex::new(()),
            torn: Cell::new(0),
            lost_to: RefCell::default(),
            told: RefCell::new(told),
            has_ended: Cell::new(false),
        };
        inner.claim_and_wait(began, wait).await?;
        let inner = Rc::new(inner);
        if is_shared {
            tokio::task::spawn_local(renew(Rc::downgrade(&inner)));
        }
        Ok(Self { inner })
    }

    /// Until when it may be used.
    #[must_use]
    pub fn lease(&self) -> Arc<Lease> {
        Arc::clone(&self.inner.lease)
    }

    /// The gate for operations of this core.
    #[must_use]
    pub fn gate(&self) -> Gate {
        Gate::new(self.inner.core.clone(), self.lease())
    }

    /// The machine that has taken it from this one, if one has.
    #[must_use]
    pub fn lost(&self) -> Option<Lost> {
        self.inner.lost_to.borrow().clone()
    }

    /// Looks whether it is still this machine's.
    ///
    /// # Errors
    /// Who has it now; nothing if that cannot be told.
    pub async fn verify(&self) -> Result<(), Option<Lost>> {
        // One that is alone on it has nothing to fear.
        if self.inner.record.get().interval_ms == 0 {
            return Ok(());
        }
        let _turn = self.inner.turn.lock().await;
        let looked = self.inner.look().await;
        match self.lost() {
            Some(lost) => Err(Some(lost)),
            None => looked.map(drop).map_err(|_| None),
        }
    }

    /// Gives it back: any node may take it from now on. Nothing may be written to it any more.
    ///
    /// # Errors
    /// That it could not be written; it is this node's still then.
    pub async fn release(&self) -> Result<(), DiskError> {
        self.inner.has_ended.set(true);
        let _turn = self.inner.turn.lock().await;
        if self.inner.look().await.is_err() || self.inner.lease.is_lost() {
            return Ok(());
        }
        let record = OwnerRecord { state: State::Released, ..self.inner.next() };
        self.inner.write_claim(&record).await
    }

    /// Ends the heartbeat, and waits for one that is being written: the disk can be opened again at once.
    pub async fn end(&self) {
        self.inner.has_ended.set(true);
        drop(self.inner.turn.lock().await);
    }
}

/// Renews the heartbeat for as long as it is held.
async fn renew(hold: Weak<Inner>) {
    let mut pause = INTERVAL;
    loop {
        tokio::time::sleep(pause).await;
        // Only as long as it takes: whoever drops the hold closes the disk.
        let Some(hold) = hold.upgrade().filter(|hold| !hold.has_ended.get()) else { return };
        let _turn = hold.turn.lock().await;
        if hold.has_ended.get() || hold.lease.is_lost() {
            return;
        }
        pause = match hold.beat().await {
            Ok(()) if hold.lease.is_valid(&hold.core) => INTERVAL,
            Ok(()) => AGAIN,
            Err(error) => {
                let path = hold.disk.path().display();
                tracing::warn!(%path, %error, "multihost: the heartbeat is not renewed");
                AGAIN
            }
        };
    }
}

impl Inner {
    async fn write(&self, at: u64, record: &OwnerRecord, copy: Copy) -> Result<(), DiskError> {
        let bytes = record.to_bytes(copy);
        let credit = self.memory.credit(bytes.len(), Class::Immediate).await;
        let credit = credit.map_err(|_| DiskError::new(DiskErrorKind::Other))?;
        self.disk.write(at, rt::buf::copy_in(&credit, &bytes)).await
    }

    /// Both copies of the claim, one after the other, durably.
    async fn write_claim(&self, record: &OwnerRecord) -> Result<(), DiskError> {
        self.write(CLAIM_AT, record, Copy::First).await?;
        self.disk.sync().await?;
        self.write(SECOND_AT, record, Copy::Second).await?;
        self.disk.sync().await
    }

    /// Claims the disk, of which was looked at `began` that it may be, waits, and looks whether the claim is still there.
    async fn claim_and_wait(&self, began: Duration, wait: Duration) -> Result<(), NotTaken> {
        let record = self.record.get();
        self.write(CLAIM_AT, &record, Copy::First).await?;
        self.disk.sync().await?;
        let took = self.core.now().saturating_sub(began);
        // Another one that has looked before it saw this may have waited already, and use the disk.
        let wait = match self.disk.info().shared && took > SETTLE / 2 {
            true => wait.max(STOP + STOP / 4),
            false => wait,
        };
        if !wait.is_zero() {
            self.core.sleep(wait).await;
            let looked_at = self.core.now();
            let seen = see(&self.disk, &self.memory).await?;
            if seen.claim.map(|claim| claim.life) != Some(record.life) {
                return Err(NotTaken::Refused(Refusal::Lost(seen.claim.map(Box::new))));
            }
            self.lease.extend(looked_at.saturating_add(STOP));
        }
        self.write(SECOND_AT, &record, Copy::Second).await?;
        self.disk.sync().await?;
        Ok(())
    }

    /// The record that is written next.
    fn next(&self) -> OwnerRecord {
        let before = self.record.get();
        let (nonce, written) = (self.core.random_u64(), self.core.wall_clock());
        OwnerRecord { beat: before.beat + 1, nonce, written, ..before }
    }

    fn lose(&self, to: Option<OwnerRecord>) {
        self.lease.lose();
        let to = to.map(Box::new);
        let lost = Lost { subject: self.record.get().subject, to: to.clone() };
        *self.lost_to.borrow_mut() = Some(lost.clone());
        let (path, why) = (self.disk.path().display(), Refusal::Lost(to));
        tracing::error!(%path, "multihost: the disk {why}: it is used no more here");
        if let Some(told) = self.told.take() {
            // Whoever was to hear of it has gone.
            let _ = told.send(lost);
        }
    }

    /// Whether the disk is still this machine's, and when it was looked at. If not it is lost; an error says that this cannot be
    /// told.
    async fn look(&self) -> Result<Duration, DiskError> {
        let mine = self.record.get();
        let began = self.core.now();
        let both = read_disk(&self.disk, &self.memory, CLAIM_AT, 2 * OWNER_BYTES).await;
        let (first, beat) = match &both {
            Ok(bytes) => {
                let (first, beat) = bytes.split_at(OWNER_BYTES);
                (parsed(first, Copy::First), parsed(beat, Copy::Beat))
            }
            Err(_) => (Err(BadRecord::Damaged), Err(BadRecord::Damaged)),
        };
        let is_mine = |record: &OwnerRecord| {
            (record.claim, record.life, record.state) == (mine.claim, mine.life, State::Held)
        };
        match first {
            Ok(record) if is_mine(&record) => self.torn.set(0),
            Ok(record) => self.lose(Some(record)),
            Err(_) => self.look_at_second(is_mine, both.is_ok()).await?,
        }
        // Somebody with a copy of this process's memory.
        let is_ahead = |beat: &OwnerRecord| {
            beat.beat > mine.beat || (beat.beat == mine.beat && beat.nonce != mine.nonce)
        };
        let same = |beat: &OwnerRecord| (beat.claim, beat.life) == (mine.claim, mine.life);
        if let Some(other) = beat.ok().filter(|beat| same(beat) && is_ahead(beat)) {
            self.lose(Some(other));
        }
        Ok(began)
    }

    /// The first copy cannot be understood: the second one tells whose the disk is.
    async fn look_at_second(
        &self,
        is_mine: impl Fn(&OwnerRecord) -> bool,
        was_read: bool,
    ) -> Result<(), DiskError> {
        let second = read_at(&self.disk, &self.memory, SECOND_AT, Copy::Second).await?;
        self.torn.set(self.torn.get() + 1);
        match second {
            // It may just be being written.
            _ if was_read && self.torn.get() <= TORN => Err(DiskError::new(DiskErrorKind::Other)),
            Ok(record) if is_mine(&record) => {
                let claim = OwnerRecord { beat: 0, ..self.record.get() };
                self.write(CLAIM_AT, &claim, Copy::First).await?;
                self.disk.sync().await
            }
            Ok(record) => {
                self.lose(Some(record));
                Ok(())
            }
            Err(_) => {
                self.lose(None);
                Ok(())
            }
        }
    }

    /// Looks whether the disk is still this machine's, and renews its heartbeat then.
    async fn beat(&self) -> Result<(), DiskError> {
        let looked_at = self.look().await?;
        if self.lease.is_lost() {
            return Ok(());
        }
        let next = self.next();
        // It may get there though writing it fails.
        self.record.set(next);
        self.write(BEAT_AT, &next, Copy::Beat).await?;
        self.lease.extend(looked_at.saturating_add(STOP));
        Ok(())
    }
}

/// Takes the owner records off a disk that is held.
///
/// # Errors
/// What the disk says.
pub async fn clear_records(disk: &Disk, memory: &Account) -> Result<(), DiskError> {
    clear_disk(disk, memory, CLAIM_AT, BEAT_AT + OWNER_BYTES as u64).await?;
    clear_disk(disk, memory, SECOND_AT, SECOND_AT + OWNER_BYTES as u64).await
}

/// This process as it may own disks, in tests and tools that keep no identity: the node `id`, on this boot of this machine.
impl NodeIdentity {
    /// A node with this identity and name on the machine of `core`, in whose data directory no other process can be.
    #[must_use]
    pub fn on(core: &Core, id: Uuid, name: &str, host: &str) -> Self {
        Self {
            node: id,
            place: Uuid::from_u128(core.boot_id() ^ id.as_u128()),
            cluster: None,
            number: 0,
            name: wire::Text::new(name),
            host: wire::Text::new(host),
        }
    }
}
