//! What all rings of a disk serve: the volume, in whose name it is asked, and what becomes of a request when the volume
//! is not to be had.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use block::{Access, AccessState, Account, Bufs, Error, Failure, Request};
use reservation::Party;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use volume::{Caller, Gate, Volume};

use super::request::{ID_BYTES, Shape};
use crate::Absence;
use crate::parts::part_blocks;

/// Pause before what the volume could not do for now is begun again.
const PAUSE: Duration = Duration::from_millis(100);

/// What becomes of requests while the volume is not to be had, and nothing is wrong with it.
#[derive(Clone, Debug)]
pub enum Outage {
    /// They fail: nobody knows of such a time.
    Told,
    /// They wait, on a node that serves the volume with others: by this it is told when it may go on.
    Waited(AccessState),
    /// They are left, unanswered, to the process that serves the guest next, where the volume is reached from afar.
    Left(Absence),
}

/// What becomes of a request that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is answered so.
    Fails,
    /// It is begun again.
    Waits,
    /// It is not answered.
    Left,
}

/// How far the life of a disk has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Serves,
    /// What is in flight is answered if the volume answers; nobody waits for the volume to come back.
    Ends,
    /// The same, and nothing of the guest is touched any more.
    Cut,
}

/// A disk.
pub(super) struct Disk {
    pub(super) volume: Rc<Volume>,
    pub(super) account: Account,
    pub(super) read_only: bool,
    pub(super) serial: [u8; ID_BYTES],
    pub(super) rings: u16,
    /// Longest part of a request that is done as one, in blocks.
    pub(super) part_blocks: u64,
    /// Whom the volume's reservations judge.
    caller: Rc<Caller>,
    outage: Outage,
    life: Cell<Life>,
    ending: Notify,
    /// When what waits may be begun again at the earliest.
    again: Cell<Instant>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("volume", &self.volume)
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

impl Disk {
    pub(super) fn new(
        (volume, outage): (Rc<Volume>, Outage),
        account: Account,
        (rings, read_only): (u16, bool),
        serial: [u8; ID_BYTES],
    ) -> Self {
        let part_blocks = part_blocks(&volume.info(), account.pool());
        let caller = volume.gate().map_or_else(Gate::node, |g| g.on_behalf_of(Party::GUEST));
        Self {
            volume,
            account,
            read_only,
            serial,
            rings,
            part_blocks,
            caller,
            outage,
            life: Cell::new(Life::Serves),
            ending: Notify::new(),
            again: Cell::new(Instant::now()),
        }
    }

    pub(super) fn shape(&self) -> Shape {
        let info = self.volume.info();
        Shape {
            block_size: info.block_size,
            blocks: info.blocks,
            read_only: self.read_only || info.read_only,
            discards: info.unmap_granularity_blocks > 0,
        }
    }

    /// Has the volume do something for the guest.
    pub(super) fn start(
        &self,
        request: Request,
        done: impl FnOnce(Result<Bufs, Failure>) + 'static,
    ) {
        self.volume.start_for(&self.caller, request, &self.account, done);
    }

    /// [`Self::start`] for who waits.
    pub(super) async fn execute(&self, request: Request) -> Result<Bufs, Failure> {
        self.volume.execute_for(&self.caller, request, &self.account).await
    }

    /// What becomes of a request that has failed. Where it is not the volume at fault nobody else is there whom the guest
    /// could ask, so it is not told.
    pub(super) fn fate(&self, failure: &Failure) -> Fate {
        let away = matches!(failure, Failure::Device(Error::Fenced | Error::Gone));
        match &self.outage {
            Outage::Waited(_) if away => Fate::Waits,
            Outage::Left(absence) if absence.explains(failure) => Fate::Left,
            _ => Fate::Fails,
        }
    }

    /// Waits until requests are left to another process.
    pub(super) async fn lost(&self) {
        match &self.outage {
            Outage::Left(absence) => absence.certain().await,
            Outage::Told | Outage::Waited(_) => std::future::pending().await,
        }
    }

    /// Whether requests are left to another process.
    pub(super) fn is_lost(&self) -> bool {
        matches!(&self.outage, Outage::Left(absence) if absence.is_certain())
    }

    /// Something waits from now on.
    pub(super) fn wait_a_little(&self) {
        self.again.set(Instant::now() + PAUSE);
    }

    /// Waits until what waits may be begun again, or is not waited for any more.
    pub(super) async fn may_try(&self) {
        let served = async {
            sleep_until(self.again.get()).await;
            if let Outage::Waited(access) = &self.outage
                && access.get() == Access::Unavailable
            {
                access.other_than(Access::Unavailable).await;
            }
        };
        let ending = self.ending.notified();
        if self.is_ending() {
            return;
        }
        tokio::select! {
            biased;
            () = ending => {}
            () = served => {}
        }
    }

    /// It serves, from now on.
    pub(super) fn serve(&self) {
        self.life.set(Life::Serves);
    }

    /// Nothing is waited for any more that the volume cannot do now.
    pub(super) fn end(&self) {
        self.life.set(Life::Ends);
        self.ending.notify_waiters();
    }

    /// Likewise; and nothing of the guest is touched any more.
    pub(super) fn cut(&self) {
        self.life.set(Life::Cut);
        self.ending.notify_waiters();
    }

    pub(super) fn is_ending(&self) -> bool {
        self.life.get() != Life::Serves || self.is_lost()
    }

    pub(super) fn is_cut(&self) -> bool {
        self.life.get() == Life::Cut
    }
}
