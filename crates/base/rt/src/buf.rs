//! Counted buffers from a bounded pool, and the credits that keep the pool from deadlocking.
//!
//! * A [`Buf`] is an immutable, reference-counted slice of a page run that begins on a 4 KiB
//!   boundary. The legs of a mirror, the cache and the log share a write without a copy.
//! * A [`BufMut`] is the only owner of a run while it is being filled; [`BufMut::freeze`] ends
//!   that.
//! * A [`Credit`] is reserved memory. A front end admits a command only once it holds the command's
//!   worst case, so no command waits for memory half way through.
//! * An [`Account`] (one per connection) limits what one client may hold: at most as much as is
//!   still free (a dynamic threshold), so a client that stops reading leaves room for the others.
//!
//! Buffers may be dropped on any core; the pool's state is protected by a lock that is held
//! briefly.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use slab::Slab;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::memory::{Buddy, HeapPageMemory, Mapping, PAGE};

/// The purpose of a credit: its share of the pool, and the classes that it may wait for.
///
/// Each class has a share that no other class can take, so none starves another; memory beyond all
/// shares is granted in order of arrival. A caller that waits for memory while it holds some waits
/// only for classes further up in this list, on any node: so there is no circular wait (RFD 0037).
/// Where a client decides how long memory is held, waits are also limited in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryClass {
    /// Work that needs only this node's disks to return its memory: labels, logs, flushes. May
    /// briefly use the shares of all others.
    LocalIo,
    /// Replies to other nodes, from this node's disk: returned when they have been sent.
    PeerReply,
    /// Data that another node writes to this node's disk. It waits for disks and for reads in
    /// progress.
    ReplicaWrite,
    /// Resynchronisation, repairs, and reconciliation when a view begins: waits for
    /// [`Self::ReplicaWrite`] and [`Self::PeerReply`] memory on other nodes.
    Resync,
    /// Data of a write that another node sends for ordering: waits for [`Self::ReplicaWrite`]
    /// memory on other nodes. Granted however much the account holds, because clients of other
    /// nodes wait for it.
    PeerRequest,
    /// Memory that a command needs in addition to the data it brought: waits for
    /// [`Self::PeerRequest`] memory on other nodes. Granted however much the account holds, because
    /// the account's memory is returned only if this is granted.
    Command,
    /// Data in transit that blocks the client's other data. Granted however much the account holds,
    /// because that may be data that waits behind this.
    UnsolicitedData,
    /// Memory for a command that holds almost none: reads. It is held until the client has received
    /// the data.
    Read,
    /// Data that a client has yet to send (R2T).
    SolicitedData,
    /// Memory that is held for as long as a pool of disks is open. It has no share of its own, and
    /// cannot use the shares of others.
    Pinned,
}

/// The least share of a class, in pages: a request of 1 MiB and its overhead.
const MIN_SHARE_PAGES: u32 = 320;

impl MemoryClass {
    const ALL: [Self; 10] = [
        Self::LocalIo,
        Self::PeerReply,
        Self::ReplicaWrite,
        Self::Resync,
        Self::PeerRequest,
        Self::Command,
        Self::UnsolicitedData,
        Self::Read,
        Self::SolicitedData,
        Self::Pinned,
    ];

    /// Its share of a pool of `total` pages; less than a whole share only in very small pools.
    fn share(self, total: u32, has_peers: bool) -> u32 {
        let of = |sixty_fourths: u32, most: u32| (total / 64 * sixty_fourths).min(most);
        match self {
            Self::LocalIo => of(2, MIN_SHARE_PAGES * 2 / 5),
            Self::PeerReply | Self::ReplicaWrite | Self::Resync | Self::PeerRequest
                if !has_peers =>
            {
                0
            }
            // A comparison carries its data twice.
            Self::PeerRequest => of(9, MIN_SHARE_PAGES * 9 / 5),
            Self::PeerReply
            | Self::ReplicaWrite
            | Self::Resync
            | Self::Command
            | Self::UnsolicitedData
            | Self::Read
            | Self::SolicitedData => of(5, MIN_SHARE_PAGES),
            Self::Pinned => 0,
        }
    }

    /// Whether the class is limited to an account's fair share.
    fn is_limited_per_account(self) -> bool {
        matches!(self, Self::Read | Self::SolicitedData)
    }
}

/// The pool cannot satisfy a request of this size even when it is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a command needs {wanted} bytes of buffer memory; the pool holds {available}")]
pub struct CreditTooLarge {
    /// Bytes asked for.
    pub wanted: usize,
    /// Bytes the class may use.
    pub available: usize,
}

/// A bounded pool of page runs. Cheap to clone.
#[derive(Clone)]
pub struct BufferPool(Arc<Inner>);

struct Inner {
    mapping: Mapping,
    pages: u32,
    runs: Box<[Run]>,
    state: Mutex<State>,
    overdrafts: AtomicU64,
    timed_out_waits: AtomicU64,
}

struct Run {
    refs: AtomicU32,
    /// Index of this run's first page; also its index in `Inner::runs`.
    first_page: u32,
    /// The pool that owns the run. Valid while `refs > 0`: a live run holds one strong count. Null
    /// for a [`HeapPage`].
    pool: Cell<*const Inner>,
}

/// A page outside every pool.
#[repr(C)]
struct HeapPage {
    /// First, so that it has the address of the whole.
    run: Run,
    /// The box with its memory.
    memory: NonNull<HeapPageMemory>,
}

impl Drop for HeapPage {
    fn drop(&mut self) {
        // SAFETY: it came from a box when this was made, and no handle to it is left.
        drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
    }
}

// SAFETY: `pool` is written once, before the run is shared, and read only afterwards.
unsafe impl Sync for Run {}
// SAFETY: as above.
unsafe impl Send for Run {}

struct State {
    buddy: Buddy,
    /// Pages reserved for credits and not yet taken.
    reserved: u32,
    /// Pages reserved for or held by each class.
    by_class: [u32; MemoryClass::ALL.len()],
    /// Whether the core has mirrored volumes: then other nodes send it requests that need memory.
    has_peers: bool,
    /// A period in which commands waited without success.
    shortage: Option<Shortage>,
    run_info: Vec<RunInfo>,
    accounts: Slab<AccountState>,
    credits: Slab<CreditState>,
    waiters: [VecDeque<Arc<Waiter>>; MemoryClass::ALL.len()],
}

#[derive(Clone, Copy)]
struct RunInfo {
    order: u8,
    credit: u32,
}

/// One credit; outlives its handle while buffers taken from it do.
struct CreditState {
    account: u32,
    class: MemoryClass,
    /// Pages reserved and not taken.
    unused: u32,
    /// Pages taken and not yet freed.
    in_use: u32,
    /// Whether its handle exists: freed pages may then be taken again.
    is_open: bool,
}

struct AccountState {
    /// Pages reserved for or held by this account.
    held: u32,
    is_closed: bool,
}

struct Waiter {
    account: u32,
    class: MemoryClass,
    pages: u32,
    since: Instant,
    state: Mutex<WaiterState>,
}

enum WaiterState {
    Waiting(Option<Waker>),
    Granted,
    Finished,
}

/// A shortage of memory: commands were refused, the last one recently.
#[derive(Clone, Copy, Debug)]
struct Shortage {
    since: Instant,
    last_refusal: Instant,
}

/// Giving up after a wait this long counts as a refusal; before, the client was gone.
const MIN_REFUSED_WAIT: Duration = Duration::from_millis(500);

/// If a waiter has waited this long, memory is short.
const SHORTAGE_WAIT: Duration = Duration::from_secs(3);

/// This long after the last refusal memory is no longer short.
const SHORTAGE_HOLD_TIME: Duration = Duration::from_secs(60);

/// Memory usage of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// Size of the pool in bytes.
    pub total: u64,
    /// Bytes neither held nor reserved.
    pub free: u64,
    /// Commands waiting for a credit.
    pub waiting: u64,
    /// Number of times a layer took more than its credit held; a bug if not zero.
    pub overdrafts: u64,
    /// Number of waits for memory that ended without any.
    pub timed_out_waits: u64,
    /// How long memory has been short: a command has waited for seconds, or was refused within the
    /// last minute.
    pub shortage_duration: Option<Duration>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn pages_for(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(PAGE)).unwrap_or(u32::MAX)
}

impl BufferPool {
    /// A pool of `bytes`, rounded up to whole pages (at least one). The system provides the memory
    /// on first use.
    ///
    /// # Errors
    /// What `mmap` reports.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let pages = pages_for(bytes.max(1));
        let mapping = Mapping::new(pages as usize * PAGE)?;
        let runs = (0..pages)
            .map(|page| Run {
                refs: AtomicU32::new(0),
                first_page: page,
                pool: Cell::new(std::ptr::null()),
            })
            .collect();
        let state = State {
            buddy: Buddy::new(pages),
            reserved: 0,
            by_class: [0; MemoryClass::ALL.len()],
            has_peers: false,
            shortage: None,
            run_info: vec![RunInfo { order: 0, credit: 0 }; pages as usize],
            accounts: Slab::new(),
            credits: Slab::new(),
            waiters: Default::default(),
        };
        let state = Mutex::new(state);
        let (overdrafts, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self(Arc::new(Inner {
            mapping,
            pages,
            runs,
            state,
            overdrafts,
            timed_out_waits: refused,
        })))
    }

    /// A new account, with nothing held.
    #[must_use]
    pub fn account(&self) -> Account {
        self.account_of(None)
    }

    /// The same for a client that can be told to retry: the limit for how long its commands wait.
    #[must_use]
    pub fn client_account(&self, patience: Duration) -> Account {
        self.account_of(Some(patience))
    }

    fn account_of(&self, patience: Option<Duration>) -> Account {
        let id = lock(&self.0.state).accounts.insert(AccountState { held: 0, is_closed: false });
        Account(Arc::new(AccountInner {
            buffer_pool: self.clone(),
            id: u32::try_from(id).expect("fewer accounts than 2^32"),
            max_wait: patience,
        }))
    }

    /// The pool's memory usage.
    #[must_use]
    pub fn usage(&self) -> PoolUsage {
        let s = lock(&self.0.state);
        PoolUsage {
            total: u64::from(self.0.pages) * PAGE as u64,
            free: u64::from(s.available()) * PAGE as u64,
            waiting: s.waiters.iter().map(VecDeque::len).sum::<usize>() as u64,
            overdrafts: self.0.overdrafts.load(Ordering::Relaxed),
            timed_out_waits: self.0.timed_out_waits.load(Ordering::Relaxed),
            shortage_duration: s.shortage_duration(Instant::now()),
        }
    }

    /// Reserves shares for the classes of requests from other nodes.
    ///
    /// # Errors
    /// [`CreditTooLarge`] if pools of disks hold the memory of these shares.
    pub fn reserve_peer_shares(&self) -> Result<(), CreditTooLarge> {
        let mut s = lock(&self.0.state);
        let before = std::mem::replace(&mut s.has_peers, true);
        let (held, limit) =
            (s.by_class[MemoryClass::Pinned as usize], s.limit(self.0.pages, MemoryClass::Pinned));
        if held <= limit {
            return Ok(());
        }
        s.has_peers = before;
        Err(CreditTooLarge { wanted: held as usize * PAGE, available: limit as usize * PAGE })
    }

    /// The smallest value of the setting, in MiB, with which pools of disks can hold `more` bytes
    /// in addition to what they hold, and other nodes have their shares, if they have them now or
    /// `peers`.
    #[must_use]
    pub fn min_mib_for(&self, more: usize, peers: bool) -> u64 {
        const MIB: u32 = (1 << 20) / PAGE as u32;
        let s = lock(&self.0.state);
        let more = u32::try_from(more.div_ceil(PAGE)).unwrap_or(u32::MAX / 2);
        let wanted = s.by_class[MemoryClass::Pinned as usize].saturating_add(more);
        let peers = peers || s.has_peers;
        let fits = |mib: &u32| pinned_limit(mib.saturating_mul(MIB), peers) >= wanted;
        let all = self.0.pages.div_ceil(MIB)..u32::MAX / MIB;
        all.into_iter().find(fits).map_or(u64::from(u32::MAX / MIB), u64::from)
    }

    /// Address and length in bytes of the pool's memory, for registration with the kernel.
    #[must_use]
    pub fn region(&self) -> (NonNull<u8>, usize) {
        (self.0.mapping.base(), self.0.mapping.bytes())
    }

    fn buf_mut(&self, first: u32, len: usize) -> BufMut {
        let run = &self.0.runs[first as usize];
        run.pool.set(Arc::into_raw(Arc::clone(&self.0)));
        run.refs.store(1, Ordering::Release);
        let len = u32::try_from(len).expect("a run is at most 1 MiB");
        BufMut { ptr: self.0.mapping.page(first), len, run: NonNull::from(run) }
    }

    fn limit(&self, class: MemoryClass) -> u32 {
        lock(&self.0.state).limit(self.0.pages, class)
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BufferPool").field(&self.usage()).finish()
    }
}

/// Most pages that pools of disks may hold in a pool of `total` pages.
fn pinned_limit(total: u32, has_peers: bool) -> u32 {
    total - MemoryClass::ALL.into_iter().map(|c| c.share(total, has_peers)).sum::<u32>()
}

impl State {
    fn available(&self) -> u32 {
        self.buddy.free_pages() - self.reserved
    }

    /// Whether the pool itself has room. A request beyond its class's own share must leave the
    /// unused shares of the others free; a request within it need not, so that memory briefly
    /// borrowed from all shares blocks none of them.
    fn has_room(&self, total: u32, class: MemoryClass, pages: u32) -> bool {
        let kept: u32 = match class {
            MemoryClass::LocalIo => 0,
            _ if pages <= self.unused_share(total, class) => 0,
            _ => MemoryClass::ALL
                .into_iter()
                .filter(|c| *c != class)
                .map(|c| self.unused_share(total, c))
                .sum(),
        };
        let fixed = || self.by_class[class as usize].saturating_add(pages);
        (class != MemoryClass::Pinned || fixed() <= self.limit(total, class))
            && self.available() >= pages.saturating_add(kept)
    }

    /// The unused part of a class's share.
    fn unused_share(&self, total: u32, class: MemoryClass) -> u32 {
        class.share(total, self.has_peers).saturating_sub(self.by_class[class as usize])
    }

    /// Most pages that a class may ever hold.
    fn limit(&self, total: u32, class: MemoryClass) -> u32 {
        if class == MemoryClass::LocalIo {
            return total;
        }
        let others = MemoryClass::ALL.into_iter().filter(|c| *c != class);
        total - others.map(|c| c.share(total, self.has_peers)).sum::<u32>()
    }

    fn shortage_duration(&self, now: Instant) -> Option<Duration> {
        let turned_away = self
            .shortage
            .filter(|s| now.saturating_duration_since(s.last_refusal) < SHORTAGE_HOLD_TIME);
        let waiting = self.waiters.iter().filter_map(|q| q.front()).map(|w| w.since);
        let waiting =
            waiting.filter(|since| now.saturating_duration_since(*since) >= SHORTAGE_WAIT).min();
        let since = turned_away.map(|s| s.since).into_iter().chain(waiting).min()?;
        Some(now.saturating_duration_since(since))
    }

    /// Records that a caller has given up waiting.
    fn note_refused(&mut self, since: Instant, now: Instant) {
        let before = self
            .shortage
            .filter(|s| now.saturating_duration_since(s.last_refusal) < SHORTAGE_HOLD_TIME);
        self.shortage =
            Some(Shortage { since: before.map_or(since, |s| s.since), last_refusal: now });
    }

    /// Whether `account` may hold so much: no more than is still free, but always one command.
    fn is_within_fair_share(&self, account: u32, class: MemoryClass, pages: u32) -> bool {
        if !class.is_limited_per_account() {
            return true;
        }
        let held = self.accounts[account as usize].held;
        held == 0 || held.saturating_add(pages) <= self.available()
    }

    fn reserve(&mut self, account: u32, class: MemoryClass, pages: u32) {
        self.reserved += pages;
        self.by_class[class as usize] += pages;
        self.accounts[account as usize].held += pages;
    }

    /// A credit over `pages` that are already reserved.
    fn open_credit(&mut self, account: u32, class: MemoryClass, pages: u32) -> u32 {
        let credit = CreditState { account, class, unused: pages, in_use: 0, is_open: true };
        u32::try_from(self.credits.insert(credit)).expect("fewer credits than pages")
    }

    /// Takes a run of at most `pages` pages and at most what the credit has left.
    fn take_run(&mut self, credit: u32, pages: u32) -> Option<(u32, u8)> {
        let c = &mut self.credits[credit as usize];
        let pages = pages.min(c.unused);
        if pages == 0 {
            return None;
        }
        let (first, order) = self.buddy.alloc(pages).expect("promised pages are free");
        c.unused -= 1 << order;
        c.in_use += 1 << order;
        self.reserved -= 1 << order;
        self.run_info[first as usize] = RunInfo { order, credit };
        Some((first, order))
    }

    /// Frees a run: back to its credit if that is open, else to the pool.
    fn free_run(&mut self, first: u32) {
        let RunInfo { order, credit } = self.run_info[first as usize];
        let pages = 1u32 << order;
        self.buddy.free(first, order);
        let c = &mut self.credits[credit as usize];
        c.in_use -= pages;
        if c.is_open {
            c.unused += pages;
            self.reserved += pages;
        } else {
            let (account, class, empty) = (c.account, c.class, c.in_use == 0);
            if empty {
                self.credits.remove(credit as usize);
            }
            self.release_pages(account, class, pages);
        }
    }

    fn close_credit(&mut self, credit: u32) {
        let c = &mut self.credits[credit as usize];
        let (account, class, left, empty) = (c.account, c.class, c.unused, c.in_use == 0);
        c.is_open = false;
        c.unused = 0;
        if empty {
            self.credits.remove(credit as usize);
        }
        self.reserved -= left;
        self.release_pages(account, class, left);
    }

    fn release_pages(&mut self, account: u32, class: MemoryClass, pages: u32) {
        self.by_class[class as usize] -= pages;
        let a = &mut self.accounts[account as usize];
        a.held -= pages;
        if a.is_closed && a.held == 0 {
            self.accounts.remove(account as usize);
        }
    }

    /// Grants waiting credits in order: an account over its share is skipped, a pool without room
    /// blocks its class (so that small requests do not starve large ones).
    fn grant(&mut self, total: u32, woken: &mut SmallVec<[Waker; 4]>) {
        for class in MemoryClass::ALL {
            let mut i = 0;
            while let Some(w) = self.waiters[class as usize].get(i).cloned() {
                if !self.has_room(total, class, w.pages) {
                    break;
                }
                if !self.is_within_fair_share(w.account, class, w.pages) {
                    i += 1;
                    continue;
                }
                self.waiters[class as usize].remove(i);
                self.reserve(w.account, class, w.pages);
                if let WaiterState::Waiting(Some(waker)) =
                    std::mem::replace(&mut *lock(&w.state), WaiterState::Granted)
                {
                    woken.push(waker);
                }
            }
        }
    }
}

impl Inner {
    /// Changes the state, grants credits that this made possible, then wakes outside the lock.
    fn update<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut woken = SmallVec::new();
        let mut state = lock(&self.state);
        let r = f(&mut state);
        if state.waiters.iter().any(|q| !q.is_empty()) {
            state.grant(self.pages, &mut woken);
        }
        drop(state);
        woken.into_iter().for_each(Waker::wake);
        r
    }
}

/// One client's account with a pool. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Account(Arc<AccountInner>);

#[derive(Debug)]
struct AccountInner {
    buffer_pool: BufferPool,
    id: u32,
    max_wait: Option<Duration>,
}

impl Drop for AccountInner {
    fn drop(&mut self) {
        let id = self.id as usize;
        self.buffer_pool.0.update(|s| {
            if s.accounts[id].held == 0 {
                s.accounts.remove(id);
            } else {
                s.accounts[id].is_closed = true;
            }
        });
    }
}

impl Account {
    /// The account's pool.
    #[must_use]
    pub fn buffer_pool(&self) -> &BufferPool {
        &self.0.buffer_pool
    }

    /// How long a command of this client may wait for memory before it is told to retry; `None` for
    /// a client that cannot be told, which waits as long as necessary.
    #[must_use]
    pub fn max_wait(&self) -> Option<Duration> {
        self.0.max_wait
    }

    /// A credit for `bytes` (rounded up to pages), without waiting.
    #[must_use]
    pub fn try_credit(&self, bytes: usize, class: MemoryClass) -> Option<Credit> {
        let (pool, pages, id) = (&self.0.buffer_pool.0, pages_for(bytes), self.0.id);
        let mut s = lock(&pool.state);
        let now = s.waiters[class as usize].is_empty()
            && s.has_room(pool.pages, class, pages)
            && s.is_within_fair_share(id, class, pages);
        now.then(|| {
            s.reserve(id, class, pages);
            Credit { account: self.clone(), key: s.open_credit(id, class, pages) }
        })
    }

    /// Waits, first come first served within the class, for a credit of `bytes`.
    ///
    /// # Errors
    /// [`CreditTooLarge`] if the class could never grant that much.
    pub async fn credit(&self, bytes: usize, class: MemoryClass) -> Result<Credit, CreditTooLarge> {
        if let Some(credit) = self.try_credit(bytes, class) {
            return Ok(credit);
        }
        let limit = self.0.buffer_pool.limit(class);
        if pages_for(bytes) > limit {
            return Err(CreditTooLarge { wanted: bytes, available: limit as usize * PAGE });
        }
        let waiter = Arc::new(Waiter {
            account: self.0.id,
            class,
            pages: pages_for(bytes),
            since: Instant::now(),
            state: Mutex::new(WaiterState::Waiting(None)),
        });
        self.0.buffer_pool.0.update(|s| s.waiters[class as usize].push_back(Arc::clone(&waiter)));
        Ok(CreditFuture { account: self.clone(), waiter }.await)
    }
}

struct CreditFuture {
    account: Account,
    waiter: Arc<Waiter>,
}

impl Future for CreditFuture {
    type Output = Credit;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Credit> {
        let mut state = lock(&self.waiter.state);
        match &mut *state {
            WaiterState::Waiting(waker) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            WaiterState::Granted | WaiterState::Finished => {
                *state = WaiterState::Finished;
                drop(state);
                let w = &self.waiter;
                let mut s = lock(&self.account.0.buffer_pool.0.state);
                let key = s.open_credit(w.account, w.class, w.pages);
                drop(s);
                Poll::Ready(Credit { account: self.account.clone(), key })
            }
        }
    }
}

impl Drop for CreditFuture {
    fn drop(&mut self) {
        let pool = &self.account.0.buffer_pool.0;
        pool.update(|s| {
            let was = std::mem::replace(&mut *lock(&self.waiter.state), WaiterState::Finished);
            match was {
                WaiterState::Finished => {}
                WaiterState::Granted => {
                    s.reserved -= self.waiter.pages;
                    s.release_pages(self.waiter.account, self.waiter.class, self.waiter.pages);
                }
                WaiterState::Waiting(_) => {
                    let class = self.waiter.class as usize;
                    s.waiters[class].retain(|w| !Arc::ptr_eq(w, &self.waiter));
                    let now = Instant::now();
                    if now.saturating_duration_since(self.waiter.since) >= MIN_REFUSED_WAIT {
                        pool.timed_out_waits.fetch_add(1, Ordering::Relaxed);
                        s.note_refused(self.waiter.since, now);
                    }
                }
            }
        });
    }
}

/// Reserved memory. Freed buffers can be taken again while it exists. On drop it returns its unused
/// pages to the pool.
#[derive(Debug)]
pub struct Credit {
    account: Account,
    key: u32,
}

impl Credit {
    /// Bytes still reserved.
    #[must_use]
    pub fn left(&self) -> usize {
        lock(&self.account.0.buffer_pool.0.state).credits[self.key as usize].unused as usize * PAGE
    }

    /// Takes buffers of `len` bytes in all, in as few runs as the pool's state allows. Their
    /// contents are undefined: fill them.
    ///
    /// Never fails: a layer that takes more than its credit holds gets memory from the system, and
    /// the overdraft is counted ([`PoolUsage::overdrafts`]).
    #[must_use]
    pub fn alloc(&self, len: usize) -> BufsMut {
        let mut out = BufsMut::new();
        let pool = &self.account.0.buffer_pool;
        let mut left = len;
        let mut state = lock(&pool.0.state);
        while left > 0 {
            let Some((first, order)) = state.take_run(self.key, pages_for(left)) else { break };
            let bytes = left.min(PAGE << order);
            out.push(pool.buf_mut(first, bytes));
            left -= bytes;
        }
        drop(state);
        if left > 0 {
            pool.0.overdrafts.fetch_add(1, Ordering::Relaxed);
            out.extend(overdraft_bufs(left));
        }
        out
    }

    /// Like [`Self::alloc`] for at most one page.
    ///
    /// # Panics
    /// If `len` is zero or larger than [`PAGE`].
    #[must_use]
    pub fn alloc_page(&self, len: usize) -> BufMut {
        assert!((1..=PAGE).contains(&len), "alloc_page of {len} bytes");
        self.alloc(len).pop().expect("one run holds one page")
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.account.0.buffer_pool.0.update(|s| s.close_credit(self.key));
    }
}

/// Memory outside every pool, in its own mapping.
fn overdraft_bufs(len: usize) -> BufsMut {
    let pool = BufferPool::new(len).expect("the system is out of memory");
    let account = pool.account();
    account.try_credit(len, MemoryClass::LocalIo).expect("a fresh pool is free").alloc(len)
}

/// The only owner of a run of pages, or of a part of one, while it is being filled.
pub struct BufMut {
    ptr: NonNull<u8>,
    len: u32,
    run: NonNull<Run>,
}

/// Several [`BufMut`]s that together hold one transfer.
pub type BufsMut = SmallVec<[BufMut; 1]>;

/// As [`Bufs::run`], to be filled.
pub fn run_mut(bufs: &mut BufsMut, at: usize) -> &mut [u8] {
    let (part, skip) = locate(bufs.iter().map(|part| part.len()), at);
    bufs.get_mut(part).map_or(&mut [], |part| &mut part[skip..])
}

/// The part that contains byte `at`, and the offset in it.
fn locate(parts: impl Iterator<Item = usize>, mut at: usize) -> (usize, usize) {
    let mut number = 0;
    for len in parts {
        if at < len {
            break;
        }
        (number, at) = (number + 1, at - len);
    }
    (number, at)
}

// SAFETY: a `BufMut` is the only handle to its bytes; the run's bookkeeping is atomic or locked.
unsafe impl Send for BufMut {}
// SAFETY: shared access only reads.
unsafe impl Sync for BufMut {}

impl BufMut {
    /// A page ([`PAGE`] bytes) of zeroes outside every pool and credit: for devices that keep their
    /// contents in memory.
    #[must_use]
    pub fn heap_page() -> Self {
        let run = Run { refs: AtomicU32::new(1), first_page: 0, pool: Cell::new(std::ptr::null()) };
        let memory = NonNull::from(Box::leak(HeapPageMemory::zeroed()));
        let lone = NonNull::from(Box::leak(Box::new(HeapPage { run, memory })));
        Self { ptr: memory.cast(), len: PAGE as u32, run: lone.cast() }
    }

    /// Ends writing: the buffer becomes shareable and immutable.
    #[must_use]
    pub fn freeze(self) -> Buf {
        let this = ManuallyDrop::new(self);
        Buf { ptr: this.ptr, len: this.len, run: Some(this.run) }
    }

    /// Shortens the buffer to `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(u32::try_from(len).unwrap_or(u32::MAX));
    }
}

impl Deref for BufMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the run is alive, mapped (zeroed at first), and this is its only handle.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl Drop for BufMut {
    fn drop(&mut self) {
        release(self.run);
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} bytes)", self.len)
    }
}

/// An immutable, shared slice of a run of pages (or of the static zeroes).
pub struct Buf {
    ptr: NonNull<u8>,
    len: u32,
    run: Option<NonNull<Run>>,
}

// SAFETY: the bytes are immutable while any `Buf` exists; the count is atomic.
unsafe impl Send for Buf {}
// SAFETY: as above.
unsafe impl Sync for Buf {}

#[repr(C, align(4096))]
struct Zeroes([u8; Buf::ZEROES]);
static ZEROES: Zeroes = Zeroes([0; Buf::ZEROES]);

impl Buf {
    /// Longest buffer that [`Self::zeroes`] gives, in bytes.
    pub const ZEROES: usize = 64 * 1024;

    /// `len` static zero bytes, at most [`Self::ZEROES`]: needs no memory.
    #[must_use]
    pub fn zeroes(len: usize) -> Self {
        let len = len.min(Self::ZEROES);
        let ptr = NonNull::from(&ZEROES.0).cast();
        Self { ptr, len: u32::try_from(len).expect("at most 64 KiB"), run: None }
    }

    /// The bytes of `range`, sharing the memory.
    ///
    /// # Panics
    /// If the range leaves the buffer.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "slice {range:?}");
        let mut part = self.clone();
        // SAFETY: `start` lies inside the buffer, checked above.
        part.ptr = unsafe { part.ptr.add(range.start) };
        part.len = u32::try_from(range.len()).expect("no longer than the buffer");
        part
    }

    /// The bytes, for writing, if no other handle exists.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        // SAFETY: the run is alive while `self` holds it.
        let alone = unsafe { self.run?.as_ref() }.refs.load(Ordering::Acquire) == 1;
        // SAFETY: the bytes are a run's, and this is its only handle for as long as it is borrowed.
        alone.then(|| unsafe {
            std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len as usize)
        })
    }

    /// The writable buffer again, if no other handle exists.
    ///
    /// # Errors
    /// Gives the buffer back when it is shared or static.
    pub fn try_into_mut(self) -> Result<BufMut, Self> {
        let Some(run) = self.run else { return Err(self) };
        // SAFETY: the run is alive while `self` holds it.
        if unsafe { run.as_ref() }.refs.load(Ordering::Acquire) != 1 {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        Ok(BufMut { ptr: this.ptr, len: this.len, run })
    }
}

impl Clone for Buf {
    fn clone(&self) -> Self {
        if let Some(run) = self.run {
            // SAFETY: the run is alive while `self` holds it.
            unsafe { run.as_ref() }.refs.fetch_add(1, Ordering::Relaxed);
        }
        Self { ptr: self.ptr, len: self.len, run: self.run }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if let Some(run) = self.run {
            release(run);
        }
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the run is alive and is not written to while a `Buf` exists.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// Drops one reference to a run; the last one returns it to its pool.
fn release(run: NonNull<Run>) {
    // SAFETY: the caller owns one count, so the run and its pool are alive.
    let r = unsafe { run.as_ref() };
    if r.refs.fetch_sub(1, Ordering::Release) != 1 {
        return;
    }
    std::sync::atomic::fence(Ordering::Acquire);
    if r.pool.get().is_null() {
        // SAFETY: a run without a pool is the beginning of a `HeapPage` that was leaked when it was
        // made; its last reference is gone.
        return drop(unsafe { Box::from_raw(run.cast::<HeapPage>().as_ptr()) });
    }
    // SAFETY: the pointer came from `Arc::into_raw` when the run was taken, and a run is released
    // once per taking.
    let pool = unsafe { Arc::from_raw(r.pool.get()) };
    let page = r.first_page;
    pool.update(|s| s.free_run(page));
}

/// The data of one transfer: buffers in order.
#[derive(Clone, Debug, Default)]
pub struct Bufs {
    parts: SmallVec<[Buf; 1]>,
    len: usize,
}

impl Bufs {
    /// No data.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// `len` zero bytes that take no memory.
    #[must_use]
    pub fn zeroes(len: usize) -> Self {
        let mut out = Self::new();
        while out.len < len {
            out.push(Buf::zeroes(len - out.len));
        }
        out
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a buffer.
    pub fn push(&mut self, buf: Buf) {
        if !buf.is_empty() {
            self.len += buf.len();
            self.parts.push(buf);
        }
    }

    /// Appends all of `other`.
    pub fn append(&mut self, other: Self) {
        self.len += other.len;
        self.parts.extend(other.parts);
    }

    /// The buffers in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Buf> {
        self.parts.iter()
    }

    /// The bytes of `range`, sharing the memory.
    ///
    /// # Panics
    /// If the range leaves the data.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?}");
        let mut out = Self::new();
        let mut at = 0;
        for part in &self.parts {
            let (start, end) = (range.start.max(at), range.end.min(at + part.len()));
            if start < end {
                out.push(part.slice(start - at..end - at));
            }
            at += part.len();
        }
        out
    }

    /// The contiguous bytes from `at` on; none at the end of the data.
    #[must_use]
    pub fn run(&self, at: usize) -> &[u8] {
        let (part, skip) = locate(self.parts.iter().map(|part| part.len()), at);
        self.parts.get(part).map_or(&[], |part| &part[skip..])
    }

    /// Copies the data out.
    ///
    /// # Panics
    /// If `to` is not exactly as long as the data.
    pub fn copy_to(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len, "copy of {} bytes", self.len);
        let mut at = 0;
        for part in &self.parts {
            to[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }

    /// The data in one contiguous heap buffer: for small control data, not for the data path.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len];
        self.copy_to(&mut out);
        out
    }

    /// Whether both hold the same bytes, however they are split.
    #[must_use]
    pub fn same_bytes(&self, other: &Self) -> bool {
        self.first_difference(other).is_none() && self.len == other.len
    }

    /// Offset of the first byte in which the two differ, within the length of the shorter.
    #[must_use]
    pub fn first_difference(&self, other: &Self) -> Option<usize> {
        let (mut a, mut b) = (self.parts.iter(), other.parts.iter());
        let (mut x, mut y): (&[u8], &[u8]) = (&[], &[]);
        let mut at = 0;
        loop {
            if x.is_empty() {
                x = a.next()?;
            }
            if y.is_empty() {
                y = b.next()?;
            }
            let n = x.len().min(y.len());
            if x[..n] != y[..n] {
                let i = (0..n).find(|&i| x[i] != y[i]).expect("slices differ");
                return Some(at + i);
            }
            (x, y, at) = (&x[n..], &y[n..], at + n);
        }
    }

    /// Whether every part starts and ends on a multiple of `align` bytes.
    #[must_use]
    pub fn is_aligned(&self, align: usize) -> bool {
        self.parts
            .iter()
            .all(|p| p.as_ptr().addr().is_multiple_of(align) && p.len().is_multiple_of(align))
    }
}

impl From<Buf> for Bufs {
    fn from(buf: Buf) -> Self {
        let mut out = Self::new();
        out.push(buf);
        out
    }
}

impl From<BufMut> for Bufs {
    fn from(buf: BufMut) -> Self {
        buf.freeze().into()
    }
}

impl From<BufsMut> for Bufs {
    fn from(bufs: BufsMut) -> Self {
        bufs.into_iter().map(BufMut::freeze).collect()
    }
}

impl FromIterator<Buf> for Bufs {
    fn from_iter<I: IntoIterator<Item = Buf>>(iter: I) -> Self {
        let mut out = Self::new();
        iter.into_iter().for_each(|b| out.push(b));
        out
    }
}

/// Copies `bytes` into buffers of `credit`.
#[must_use]
pub fn copy_in(credit: &Credit, bytes: &[u8]) -> Bufs {
    let mut bufs = credit.alloc(bytes.len());
    let mut at = 0;
    for b in &mut bufs {
        let n = b.len();
        b.copy_from_slice(&bytes[at..at + n]);
        at += n;
    }
    bufs.into()
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    fn pool(pages: usize) -> BufferPool {
        BufferPool::new(pages * PAGE).unwrap()
    }

    fn poll<F: Future>(f: Pin<&mut F>) -> Poll<F::Output> {
        f.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn dropping_everything_returns_every_page() {
        let p = pool(64);
        let a = p.account();
        let c = a.try_credit(10 * PAGE, MemoryClass::LocalIo).unwrap();
        let bufs: Bufs = c.alloc(7 * PAGE + 5).into();
        assert_eq!(bufs.len(), 7 * PAGE + 5);
        let part = bufs.slice(PAGE..3 * PAGE);
        drop((bufs, c));
        assert!(p.usage().free < p.usage().total);
        drop(part);
        assert_eq!(p.usage().free, p.usage().total);
    }

    #[test]
    fn runs_are_contiguous() {
        let p = pool(64);
        let c = p.account().try_credit(8 * PAGE, MemoryClass::LocalIo).unwrap();
        let mut parts: BufsMut = [3 * PAGE, 5, PAGE].into_iter().flat_map(|n| c.alloc(n)).collect();
        let lens: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        let (len, mut at) = (lens.iter().sum::<usize>(), 0);
        for part in lens {
            for skip in [0, part - 1] {
                assert_eq!(run_mut(&mut parts, at + skip).len(), part - skip);
                run_mut(&mut parts, at + skip).fill(skip as u8);
            }
            at += part;
        }
        assert!(run_mut(&mut parts, len).is_empty());
        let (data, mut at) = (Bufs::from(parts), 0);
        let all = data.to_vec();
        while at < len {
            assert!(!data.run(at).is_empty() && all[at..].starts_with(data.run(at)));
            at += data.run(at).len();
        }
        assert!(at == len && data.run(len).is_empty() && Bufs::new().run(0).is_empty());
    }

    #[test]
    fn one_account_leaves_memory_for_the_next() {
        let p = pool(64);
        let (hog, other) = (p.account(), p.account());
        let mut held = Vec::new();
        while let Some(c) = hog.try_credit(PAGE, MemoryClass::Read) {
            held.push(c);
        }
        assert_eq!(held.len(), 32, "half of the pool");
        assert!(other.try_credit(15 * PAGE, MemoryClass::Read).is_some());
    }

    /// Everything that a class gets with a new account each time, so that no account limit applies.
    fn all_of(p: &BufferPool, class: MemoryClass) -> Vec<Credit> {
        std::iter::from_fn(|| p.account().try_credit(PAGE, class)).collect()
    }

    /// Otherwise commands that hold the share, and need a page more to finish, would never return
    /// it.
    #[test]
    fn an_account_at_its_share_still_gets_what_its_commands_need_to_finish() {
        let p = pool(64);
        let hog = p.account();
        let mut held = Vec::new();
        for class in [MemoryClass::SolicitedData, MemoryClass::Read, MemoryClass::UnsolicitedData] {
            while let Some(c) = hog.try_credit(PAGE, class) {
                held.push(c);
            }
        }
        let command: Vec<_> =
            std::iter::from_fn(|| hog.try_credit(PAGE, MemoryClass::Command)).take(9).collect();
        assert_eq!(command.len(), 5);
        assert!(hog.try_credit(2 * PAGE, MemoryClass::LocalIo).is_some());
    }

    /// RFD 0037: whatever all other classes do, with the smallest pool and with a large one.
    #[test]
    fn no_class_takes_the_reserved_share_of_another() {
        for pages in [4096, 65_536] {
            for class in MemoryClass::ALL.into_iter().filter(|c| *c != MemoryClass::Pinned) {
                let p = pool(pages);
                p.reserve_peer_shares().unwrap();
                let others = MemoryClass::ALL.into_iter().filter(|c| *c != class);
                // Local I/O memory is only borrowed from the others.
                let others = others.filter(|c| *c != MemoryClass::LocalIo);
                let held: Vec<_> = others.flat_map(|other| all_of(&p, other)).collect();
                let wanted = match class {
                    MemoryClass::LocalIo => 128,
                    MemoryClass::PeerRequest => 2 * 256 + 8,
                    _ => 256 + 8,
                };
                assert!(p.account().try_credit(wanted * PAGE, class).is_some(), "{class:?}");
                drop(held);
                assert_eq!(p.usage().free, p.usage().total);
            }
        }
    }

    #[test]
    fn a_starved_class_gets_its_share_first() {
        let p = pool(4096);
        let all = p.account().try_credit(4096 * PAGE, MemoryClass::LocalIo).unwrap();
        let (reads, writes) = (p.account(), p.account());
        let mut read = Box::pin(reads.credit(256 * PAGE, MemoryClass::Read));
        let mut write = Box::pin(writes.credit(4000 * PAGE, MemoryClass::UnsolicitedData));
        assert!(poll(read.as_mut()).is_pending());
        assert!(poll(write.as_mut()).is_ready(), "it never fits");
        drop(all);
        assert!(poll(read.as_mut()).is_ready());
    }

    #[test]
    fn pinned_memory_is_bounded_and_reported() {
        let p = pool(4096);
        let held = p.account().try_credit(2600 * PAGE, MemoryClass::Pinned).unwrap();
        assert!(p.account().try_credit(200 * PAGE, MemoryClass::Pinned).is_none());
        let more = p.reserve_peer_shares().unwrap_err();
        assert_eq!(more.wanted, 2600 * PAGE);
        assert!(p.account().try_credit(300 * PAGE, MemoryClass::Read).is_some());
        drop(held);
        assert!(p.reserve_peer_shares().is_ok());
        let Poll::Ready(Err(_)) = poll(pin!(p.account().credit(2600 * PAGE, MemoryClass::Pinned)))
        else {
            panic!("it never fits beside the shares of peers")
        };
    }

    #[test]
    fn the_reported_minimum_is_the_smallest_sufficient_size() {
        for pages in [4096, 65_536] {
            for (held, more) in [(0, 0), (0, 1200), (1000, 200), (1152, 1), (0, 70_000)] {
                let p = pool(pages);
                let _held = p.account().try_credit(held * PAGE, MemoryClass::Pinned).unwrap();
                let least = usize::try_from(p.min_mib_for(more * PAGE, true)).unwrap() * 256;
                let fits = |pages: usize| {
                    let p = pool(pages);
                    p.reserve_peer_shares().unwrap();
                    p.account().try_credit((held + more) * PAGE, MemoryClass::Pinned).is_some()
                };
                assert!(least >= pages && fits(least), "{pages} {held} {more} {least}");
                assert!(least == pages || !fits(least - 256), "{pages} {held} {more} {least}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn memory_counts_as_short_during_long_waits_and_a_minute_after_a_refusal() {
        let p = pool(64);
        let all = p.account().try_credit(64 * PAGE, MemoryClass::LocalIo).unwrap();
        let account = p.account();
        let turned =
            tokio::time::timeout(Duration::from_secs(5), account.credit(PAGE, MemoryClass::Read));
        let mut turned = Box::pin(turned);
        assert!(poll(turned.as_mut()).is_pending());
        assert_eq!(p.usage().shortage_duration, None);
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(p.usage().shortage_duration, Some(Duration::from_secs(4)));
        assert!(turned.await.is_err());
        assert_eq!((p.usage().timed_out_waits, p.usage().waiting), (1, 0));
        tokio::time::advance(Duration::from_secs(30)).await;
        assert!(p.usage().shortage_duration.is_some_and(|short| short >= Duration::from_secs(35)));
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(p.usage().shortage_duration, None);
        drop(all);
    }

    #[test]
    fn waiters_are_served_in_order_and_may_give_up() {
        let p = pool(4);
        let (a, b, c) = (p.account(), p.account(), p.account());
        let all = a.try_credit(4 * PAGE, MemoryClass::LocalIo).unwrap();
        let mut first = Box::pin(b.credit(3 * PAGE, MemoryClass::LocalIo));
        let mut second = Box::pin(c.credit(PAGE, MemoryClass::LocalIo));
        assert!(poll(first.as_mut()).is_pending());
        assert!(poll(second.as_mut()).is_pending());
        drop(all);
        let Poll::Ready(Ok(held)) = poll(first.as_mut()) else { panic!("first in line") };
        assert!(matches!(poll(second.as_mut()), Poll::Ready(Ok(_))));
        assert_eq!(held.left(), 3 * PAGE);
        drop(held);

        let all = a.try_credit(4 * PAGE, MemoryClass::LocalIo).unwrap();
        let mut gone = Box::pin(b.credit(PAGE, MemoryClass::LocalIo));
        assert!(poll(gone.as_mut()).is_pending());
        drop(gone);
        drop(all);
        assert_eq!(p.usage().free, p.usage().total);
        assert_eq!(p.usage().waiting, 0);
    }

    #[test]
    fn an_uncollected_credit_is_returned() {
        let p = pool(4);
        let (a, b) = (p.account(), p.account());
        let all = a.try_credit(4 * PAGE, MemoryClass::LocalIo).unwrap();
        let mut waiting = Box::pin(b.credit(PAGE, MemoryClass::LocalIo));
        assert!(poll(waiting.as_mut()).is_pending());
        drop(all);
        drop(waiting);
        assert_eq!(p.usage().free, p.usage().total);
    }

    #[test]
    fn requests_larger_than_the_pool_are_refused_at_once() {
        let p = pool(64);
        let a = p.account();
        let Poll::Ready(r) =
            poll(Box::pin(a.credit(48 * PAGE, MemoryClass::SolicitedData)).as_mut())
        else {
            panic!("must not wait")
        };
        assert_eq!(r.unwrap_err(), CreditTooLarge { wanted: 48 * PAGE, available: 47 * PAGE });
    }

    #[test]
    fn an_overdraft_is_served_and_counted() {
        let p = pool(8);
        let c = p.account().try_credit(PAGE, MemoryClass::LocalIo).unwrap();
        let bufs: Bufs = c.alloc(3 * PAGE).into();
        assert_eq!(bufs.len(), 3 * PAGE);
        assert_eq!(p.usage().overdrafts, 1);
    }

    #[test]
    fn memory_returns_to_its_credit_while_it_lives() {
        let p = pool(8);
        let c = p.account().try_credit(2 * PAGE, MemoryClass::LocalIo).unwrap();
        for _ in 0..10 {
            assert_eq!(c.alloc(2 * PAGE).iter().map(|b| b.len()).sum::<usize>(), 2 * PAGE);
        }
        let kept = c.alloc(PAGE);
        drop(c);
        assert_eq!(p.usage().free, 7 * PAGE as u64);
        drop(kept);
        assert_eq!((p.usage().free, p.usage().overdrafts), (8 * PAGE as u64, 0));
    }

    #[test]
    fn a_private_page_lives_as_long_as_its_last_reference() {
        let mut page = BufMut::heap_page();
        assert_eq!(page[..], [0; PAGE]);
        assert!(page.as_ptr().addr().is_multiple_of(PAGE));
        page[7] = 1;
        let mut whole = page.freeze();
        let part = whole.slice(4..8);
        assert!(whole.get_mut().is_none(), "it is shared");
        std::thread::scope(|s| {
            s.spawn(|| drop(whole.clone()));
        });
        assert_eq!(part[..], [0, 0, 0, 1]);
        drop(part);
        whole.get_mut().unwrap()[7] = 2;
        assert_eq!(whole.try_into_mut().unwrap()[7], 2);
        assert!(Buf::zeroes(16).get_mut().is_none(), "the zeroes stay zeroes");
    }

    #[test]
    fn buffers_cross_threads() {
        let p = pool(64);
        let a = p.account();
        let bufs: Vec<Bufs> = (0..32)
            .map(|_| a.try_credit(PAGE, MemoryClass::LocalIo).unwrap().alloc(PAGE).into())
            .collect();
        std::thread::scope(|s| {
            for b in bufs {
                s.spawn(move || drop(b.clone()));
            }
        });
        assert_eq!(p.usage().free, p.usage().total);
    }

    #[test]
    fn first_difference_ignores_buffer_boundaries() {
        let p = pool(64);
        let c = p.account().try_credit(32 * PAGE, MemoryClass::LocalIo).unwrap();
        let bytes: Vec<u8> = (0..9000u32).map(|i| (i * 7) as u8).collect();
        let a = copy_in(&c, &bytes);
        let mut b = Bufs::new();
        b.append(a.slice(0..100));
        b.append(a.slice(100..9000));
        assert!(a.same_bytes(&b));
        let mut other = bytes.clone();
        other[8190] ^= 1;
        assert_eq!(a.first_difference(&copy_in(&c, &other)), Some(8190));
        assert!(Bufs::zeroes(200_000).iter().all(|b| b.iter().all(|&x| x == 0)));
    }
}
