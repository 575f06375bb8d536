//! A disk at a socket on a core of its own, and a guest with its monitor in this process.
#![allow(clippy::unwrap_used, dead_code)]

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use attach::Absence;
use attach::vhost_user::{Options, Server};
use block::testing::faulty::{Faults, Faulty};
use block::{Dev, Epoch, Mem, MemOptions};
use rt::{Core, Cores, CoresConfig};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::time::Instant;
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use volume::Volume;

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Places of a ring.
pub(crate) const PLACES: u16 = 64;

/// Where the parts of ring `n` are, 64 KiB each ring, and where data begins.
const RING: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x8000;
pub(crate) const DATA: u64 = 0x10_0000;
pub(crate) const MEMORY: u64 = 64 << 20;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// What to do with what a test stands on, on its core.
type Job = Box<dyn FnOnce(&Ground) + Send>;

/// What the disk stands on.
pub(crate) struct Ground {
    pub(crate) core: Core,
    pub(crate) mem: Rc<Mem>,
    pub(crate) faults: Faults,
    pub(crate) volume: Rc<Volume>,
    /// Whether a volume that is gone is out of reach, and nothing else.
    pub(crate) away: Rc<Cell<bool>>,
}

/// A disk at a socket.
pub(crate) struct Site {
    cores: Option<Cores>,
    pub(crate) path: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    over: mpsc::Receiver<()>,
    jobs: tokio::sync::mpsc::UnboundedSender<Job>,
    _dir: TempDir,
}

pub(crate) struct Disk {
    pub(crate) options: MemOptions,
    pub(crate) rings: u16,
    pub(crate) read_only: bool,
    pub(crate) pool_bytes: usize,
}

impl Default for Disk {
    fn default() -> Self {
        let options = MemOptions::new(512, 1 << 16);
        Self { options, rings: 2, read_only: false, pool_bytes: 32 << 20 }
    }
}

impl Site {
    pub(crate) fn start(disk: &Disk) -> Self {
        let config = CoresConfig { pool_bytes_per_core: disk.pool_bytes, ..CoresConfig::default() };
        let cores = Cores::start(&config).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let (stop, stopped) = oneshot::channel();
        let (ended, over) = mpsc::channel();
        let (jobs, mut asked) = tokio::sync::mpsc::unbounded_channel::<Job>();
        let options = Options {
            rings: disk.rings,
            read_only: disk.read_only,
            serial: "a serial of more than twenty bytes".to_owned(),
        };
        let (mem_options, at) = (disk.options, path.clone());
        let (ready, is_ready) = mpsc::channel();
        let life = async move |core: Core| {
            let mem = Rc::new(Mem::new(mem_options));
            let (dev, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
            let volume = Volume::new(dev, Epoch::default());
            let away = Rc::new(Cell::new(false));
            let known = Rc::clone(&away);
            let absence = Absence::when(move || known.get());
            let server = Server::new(&core, Rc::clone(&volume), &options).with_absence(&absence);
            let listener = core.listen_unix(&at).await.unwrap();
            ready.send(()).unwrap();
            let ground = Ground { core: core.clone(), mem, faults, volume, away };
            tokio::select! {
                biased;
                () = async {
                    while let Some(job) = asked.recv().await {
                        job(&ground);
                    }
                    std::future::pending::<()>().await;
                } => {}
                () = server.serve(&listener, async { drop(stopped.await) }) => {}
            }
            let closed = ground.volume.close(&core.pool().account()).await;
            assert_eq!(closed.is_err(), absence.is_certain(), "{closed:?}");
            let usage = core.pool().usage();
            assert_eq!((usage.free, usage.overdrafts), (usage.total, 0), "memory came back");
            drop(listener);
            ended.send(()).unwrap();
        };
        cores.handles()[0].try_post(life).unwrap();
        is_ready.recv_timeout(PATIENCE).expect("it listens");
        Self { cores: Some(cores), path, stop: Some(stop), over, jobs, _dir: dir }
    }

    /// Does something on the core.
    pub(crate) fn on_core<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Ground) -> T + Send + 'static,
    ) -> T {
        let (answer, result) = mpsc::channel();
        let job = move |ground: &Ground| answer.send(f(ground)).unwrap();
        self.jobs.send(Box::new(job)).ok().unwrap();
        result.recv_timeout(PATIENCE).unwrap()
    }

    /// Tells it to stop.
    pub(crate) fn tell_to_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Stops it, and waits until everything has come back.
    pub(crate) fn end(mut self) {
        self.tell_to_stop();
        self.wait();
    }

    /// Waits until it ends by itself, and everything has come back.
    pub(crate) fn wait(mut self) {
        self.over.recv_timeout(PATIENCE).expect("it ends");
        self.cores.take().unwrap().stop_now();
    }
}

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
            free: (0..PLACES).rev().collect(),
            chains: vec![Vec::new(); PLACES.into()],
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
        let at = self.base + AVAILABLE + 4 + 2 * u64::from(self.available % PLACES);
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
        let at = GuestAddress(self.base + AVAILABLE + 4 + 2 * u64::from(PLACES));
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
            let at = self.base + USED + 4 + 8 * u64::from(self.seen % PLACES);
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

    /// Waits for answers by the ring's event, as an interrupt comes.
    pub(crate) fn wait(&mut self, memory: &GuestMemoryMmap<()>) -> Vec<(u16, u32)> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            // The order of Virtio 1.2, 2.7.14: ask first, then look, else an answer between the two is missed.
            self.want(memory, self.seen);
            let answers = self.take(memory);
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
pub(crate) fn connect(site: &Site, without: u64) -> (Frontend, u64) {
    let mut monitor = Frontend::connect(&site.path, 64).unwrap();
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
    pub(crate) fn boot(site: &Site, rings: usize) -> Self {
        Self::boot_without(site, rings, 0)
    }

    /// One that does without some features.
    pub(crate) fn boot_without(site: &Site, rings: usize, without: u64) -> Self {
        let (monitor, features) = connect(site, without);
        let rings = (0..rings).map(Ring::new).collect();
        let mut guest = Self { monitor, memory: memory(), rings, features, record: None };
        let asked = VhostUserInflight::new(0, 0, guest.rings.len() as u16, PLACES);
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
            queue_max_size: PLACES,
            queue_size: PLACES,
            flags: 0,
            desc_table_addr: monitor + ring.table(),
            used_ring_addr: monitor + ring.base + USED,
            avail_ring_addr: monitor + ring.base + AVAILABLE,
            log_addr: None,
        }
    }

    pub(crate) fn start_ring(&mut self, n: usize, base: u16) {
        let (config, ring) = (self.place(n), &self.rings[n]);
        self.monitor.set_vring_num(n, PLACES).unwrap();
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
    pub(crate) fn reconnect(&mut self, site: &Site) {
        let without = !self.features;
        // The old connection goes first: one monitor at a time.
        self.leave();
        self.monitor = connect(site, without).0;
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
