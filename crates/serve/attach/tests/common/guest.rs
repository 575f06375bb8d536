//! A guest with its monitor, in the process of a test: rings in real memory, and the protocol's own
//! front end.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// How long anything may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Places of a ring.
pub(crate) const QUEUE_SIZE: u16 = 64;

/// Where the parts of ring `n` are, 64 KiB each ring, and where data begins.
const RING: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x8000;
pub(crate) const DATA: u64 = 0x10_0000;
pub(crate) const MEMORY: u64 = 64 << 20;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// A ring of the guest's driver.
pub(crate) struct Ring {
    index: usize,
    base: u64,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    pub(crate) error: EventFd,
    free: Vec<u16>,
    /// Descriptors of each chain in flight, by its first.
    chains: Vec<Vec<u16>>,
    available: u16,
    seen: u16,
}

/// A guest, and its monitor.
pub(crate) struct Guest {
    pub(crate) monitor: Frontend,
    pub(crate) memory: GuestMemoryMmap<()>,
    pub(crate) rings: Vec<Ring>,
    pub(crate) features: u64,
    pub(crate) record: Option<(VhostUserInflight, File)>,
}

/// The guest's memory, in a file as a monitor has it.
pub(crate) fn memory() -> GuestMemoryMmap<()> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(MEMORY).unwrap();
    let place = (GuestAddress(0), MEMORY as usize, Some(FileOffset::new(file, 0)));
    GuestMemoryMmap::from_ranges_with_files([place]).unwrap()
}

pub(crate) fn regions(memory: &GuestMemoryMmap<()>) -> Vec<VhostUserMemoryRegionInfo> {
    memory.iter().map(|r| VhostUserMemoryRegionInfo::from_guest_region(r).unwrap()).collect()
}

impl Ring {
    fn new(index: usize) -> Self {
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        Self {
            index,
            base: RING * (index as u64 + 1),
            kick: event(),
            call: event(),
            error: event(),
            free: (0..QUEUE_SIZE).rev().collect(),
            chains: vec![Vec::new(); QUEUE_SIZE.into()],
            available: 0,
            seen: 0,
        }
    }

    fn table(&self) -> u64 {
        self.base
    }

    /// Puts a descriptor into the table.
    pub(crate) fn describe(
        &self,
        memory: &GuestMemoryMmap<()>,
        index: u16,
        (at, bytes, flags, next): (u64, u32, u16, u16),
    ) {
        put_descriptor(memory, self.table() + 16 * u64::from(index), (at, bytes, flags, next));
    }

    /// Makes `head` available, without a kick.
    pub(crate) fn offer(&mut self, memory: &GuestMemoryMmap<()>, head: u16) {
        let at = self.base + AVAILABLE + 4 + 2 * u64::from(self.available % QUEUE_SIZE);
        memory.write_obj(head.to_le(), GuestAddress(at)).unwrap();
        self.available = self.available.wrapping_add(1);
        let at = GuestAddress(self.base + AVAILABLE + 2);
        memory.store(self.available.to_le(), at, Ordering::Release).unwrap();
    }

    pub(crate) fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// Tells the device after how many answers it wants to be notified.
    fn want(&self, memory: &GuestMemoryMmap<()>, used: u16) {
        let at = GuestAddress(self.base + AVAILABLE + 4 + 2 * u64::from(QUEUE_SIZE));
        memory.store(used.to_le(), at, Ordering::SeqCst).unwrap();
    }

    pub(crate) fn used(&self, memory: &GuestMemoryMmap<()>) -> u16 {
        let at = GuestAddress(self.base + USED + 2);
        u16::from_le(memory.load(at, Ordering::Acquire).unwrap())
    }

    /// Offers a chain of these parts; gives its head.
    pub(crate) fn send(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        parts: &[(u64, u32, u16)],
    ) -> Option<u16> {
        if self.free.len() < parts.len() {
            return None;
        }
        let taken: Vec<u16> = parts.iter().map(|_| self.free.pop().unwrap()).collect();
        for (i, &(at, bytes, flags)) in parts.iter().enumerate() {
            let (flags, next) = match taken.get(i + 1) {
                Some(next) => (flags | NEXT, *next),
                None => (flags, 0),
            };
            self.describe(memory, taken[i], (at, bytes, flags, next));
        }
        let head = taken[0];
        self.chains[usize::from(head)] = taken;
        self.offer(memory, head);
        self.kick();
        Some(head)
    }

    /// The answers that have come since the last look: head and length.
    pub(crate) fn take(&mut self, memory: &GuestMemoryMmap<()>) -> Vec<(u16, u32)> {
        let mut out = Vec::new();
        while self.seen != self.used(memory) {
            let at = self.base + USED + 4 + 8 * u64::from(self.seen % QUEUE_SIZE);
            let head: u32 = memory.read_obj(GuestAddress(at)).unwrap();
            let bytes: u32 = memory.read_obj(GuestAddress(at + 4)).unwrap();
            let head = u16::try_from(u32::from_le(head)).unwrap();
            let chain = std::mem::take(&mut self.chains[usize::from(head)]);
            assert!(!chain.is_empty(), "{head} is answered, and was not asked");
            self.free.extend(chain);
            self.seen = self.seen.wrapping_add(1);
            out.push((head, u32::from_le(bytes)));
        }
        out
    }

    /// The answers that have come; the ring's event is given when there are more.
    pub(crate) fn look(&mut self, memory: &GuestMemoryMmap<()>) -> Vec<(u16, u32)> {
        // The order of Virtio 1.2, 2.7.14: ask first, then look, else an answer between the two is
        // missed.
        self.want(memory, self.seen);
        self.take(memory)
    }

    /// Waits for answers by the ring's event, as an interrupt comes.
    pub(crate) fn wait(&mut self, memory: &GuestMemoryMmap<()>) -> Vec<(u16, u32)> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            let answers = self.look(memory);
            if !answers.is_empty() {
                return answers;
            }
            wait_for(&self.call);
        }
        panic!("ring {} is not answered", self.index);
    }
}

/// Waits for an event.
pub(crate) fn wait_for(event: &EventFd) {
    let until = Instant::now() + PATIENCE;
    while event.read().is_err() {
        assert!(Instant::now() < until, "no event");
        nap(1);
    }
}

#[expect(clippy::disallowed_methods, reason = "a thread of the test, not a core")]
pub(crate) fn nap(millis: u64) {
    std::thread::sleep(Duration::from_millis(millis));
}

/// Puts a descriptor anywhere.
pub(crate) fn put_descriptor(
    memory: &GuestMemoryMmap<()>,
    place: u64,
    (at, bytes, flags, next): (u64, u32, u16, u16),
) {
    let mut entry = [0; 16];
    entry[..8].copy_from_slice(&at.to_le_bytes());
    entry[8..12].copy_from_slice(&bytes.to_le_bytes());
    entry[12..14].copy_from_slice(&flags.to_le_bytes());
    entry[14..].copy_from_slice(&next.to_le_bytes());
    memory.write_slice(&entry, GuestAddress(place)).unwrap();
}

const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::CONFIG
    .union(VhostUserProtocolFeatures::MQ)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::RESET_DEVICE)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// Connects to a disk, and agrees on features: all but those of `without`.
pub(crate) fn connect(disk: &impl AsRef<Path>, without: u64) -> (Frontend, u64) {
    let mut monitor = Frontend::connect(disk, 64).unwrap();
    monitor.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    monitor.set_owner().unwrap();
    let features = monitor.get_features().unwrap() & !without;
    assert_eq!(monitor.get_protocol_features().unwrap(), PROTOCOL);
    monitor.set_protocol_features(PROTOCOL).unwrap();
    monitor.set_features(features).unwrap();
    (monitor, features)
}

impl Guest {
    /// A guest that has booted: its rings run.
    pub(crate) fn boot(disk: &impl AsRef<Path>, rings: usize) -> Self {
        Self::boot_without(disk, rings, 0)
    }

    /// One that does without some features.
    pub(crate) fn boot_without(disk: &impl AsRef<Path>, rings: usize, without: u64) -> Self {
        let (monitor, features) = connect(disk, without);
        let rings = (0..rings).map(Ring::new).collect();
        let mut guest = Self { monitor, memory: memory(), rings, features, record: None };
        let asked = VhostUserInflight::new(0, 0, guest.rings.len() as u16, QUEUE_SIZE);
        guest.record = Some(guest.monitor.get_inflight_fd(&asked).unwrap());
        guest.start(0);
        guest
    }

    /// Gives the disk memory, the record and the rings.
    pub(crate) fn start(&mut self, base: u16) {
        if let Some((inflight, file)) = &self.record {
            self.monitor.set_inflight_fd(inflight, file.as_raw_fd()).unwrap();
        }
        self.monitor.set_mem_table(&regions(&self.memory)).unwrap();
        for n in 0..self.rings.len() {
            self.start_ring(n, base);
        }
    }

    /// Where a ring is, for the monitor.
    pub(crate) fn place(&self, n: usize) -> VringConfigData {
        let monitor = self.memory.iter().next().unwrap().as_ptr() as u64;
        let ring = &self.rings[n];
        VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: monitor + ring.table(),
            used_ring_addr: monitor + ring.base + USED,
            avail_ring_addr: monitor + ring.base + AVAILABLE,
            log_addr: None,
        }
    }

    pub(crate) fn start_ring(&mut self, n: usize, base: u16) {
        let (config, ring) = (self.place(n), &self.rings[n]);
        self.monitor.set_vring_num(n, QUEUE_SIZE).unwrap();
        self.monitor.set_vring_base(n, base).unwrap();
        self.monitor.set_vring_addr(n, &config).unwrap();
        self.monitor.set_vring_err(n, &ring.error).unwrap();
        self.monitor.set_vring_call(n, &ring.call).unwrap();
        self.monitor.set_vring_kick(n, &ring.kick).unwrap();
        self.monitor.set_vring_enable(n, true).unwrap();
    }

    /// The connection is lost.
    pub(crate) fn leave(&mut self) {
        let (gone, _) = UnixStream::pair().unwrap();
        drop(std::mem::replace(&mut self.monitor, Frontend::from_stream(gone, 1)));
    }

    /// Connects anew, as a monitor does whose back end has gone.
    pub(crate) fn reconnect(&mut self, disk: &impl AsRef<Path>) {
        let without = !self.features;
        // The old connection goes first: one monitor at a time.
        self.leave();
        self.monitor = connect(disk, without).0;
        let base = self.rings[0].used(&self.memory);
        self.start(base);
    }

    /// A request of these parts on a ring, done; gives its status and the length of the answer.
    pub(crate) fn ask(&mut self, n: usize, parts: &[(u64, u32, u16)]) -> (u8, u32) {
        let &(last, bytes, _) = parts.last().unwrap();
        let status = GuestAddress(last + u64::from(bytes) - 1);
        self.memory.write_obj(0xffu8, status).unwrap();
        let ring = &mut self.rings[n];
        let head = ring.send(&self.memory, parts).unwrap();
        let answers = ring.wait(&self.memory);
        let [(answered, bytes)] = answers[..] else { panic!("{answers:?}") };
        assert_eq!(answered, head);
        (self.memory.read_obj(status).unwrap(), bytes)
    }

    /// Puts a request's header somewhere.
    pub(crate) fn header(&self, at: u64, kind: u32, sector: u64) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.memory.write_slice(&header, GuestAddress(at)).unwrap();
    }

    /// A plain request: header, data, status.
    pub(crate) fn plain(
        &mut self,
        n: usize,
        kind: u32,
        sector: u64,
        data: (u32, u16),
    ) -> (u8, u32) {
        self.header(DATA, kind, sector);
        let parts = [(DATA, 16, 0), (DATA + 0x1000, data.0, data.1), (DATA + 16, 1, WRITE)];
        let parts: Vec<_> = parts.into_iter().filter(|(_, bytes, _)| *bytes > 0).collect();
        self.ask(n, &parts)
    }

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub(crate) fn get(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.memory.read_slice(&mut out, GuestAddress(at)).unwrap();
        out
    }
}
