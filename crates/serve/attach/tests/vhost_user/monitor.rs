//! Plays a script of arbitrary bytes as a monitor and its guest: messages with descriptors, tables
//! of memory, the record of what is in flight, the configuration, rings with indexes that are
//! anything, at any moment. One disk at a socket serves them all, one after the other. Shared by
//! the fuzz target and a property test. What must hold is asserted:
//!
//! * nothing panics, on any thread;
//! * the next monitor is served, and one that goes is gone in finite time, in whatever state its
//!   rings were;
//! * all memory has come back by then.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, mpsc};
use std::time::Duration;

use attach::vhost_user::{Options, OutagePolicy, Server};
use block::{Dev, Epoch, Mem, MemOptions};
use rt::{Core, Cores, CoresConfig};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
use testkit::Script;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use volume::Volume;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The guest's memory, of which its monitor shows two stretches, and where those are for the
/// monitor.
const MEMORY: u64 = 0x1_0000;
const REGIONS: [(u64, u64); 2] = [(0, 0x4000), (0x8000, 0x8000)];
const MONITOR: u64 = 0x7f00_0000;

/// Each ring has 4 KiB, and these parts in it.
const QUEUE_SIZE: u16 = 16;
const RING: u64 = 0x1000;
const AVAILABLE: u64 = 0x400;
const USED: u64 = 0x800;
const RINGS: u64 = 2;

/// How many chains of three descriptors the guest has in a ring before the script changes them.
const CHAINS: u8 = 5;
const NEXT: u8 = 1;
const WRITE: u8 = 2;

/// Length of the record of two rings of 16 places.
const RECORD: u64 = 2 * 320;

/// Requests of the protocol.
mod request {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    pub(super) const GET_CONFIG: u32 = 24;
    pub(super) const SET_CONFIG: u32 = 25;
    pub(super) const GET_INFLIGHT: u32 = 31;
    pub(super) const SET_INFLIGHT: u32 = 32;
    pub(super) const RESET_DEVICE: u32 = 34;
    pub(super) const ADD_MEM_REGION: u32 = 37;
    pub(super) const REMOVE_MEM_REGION: u32 = 38;
}

/// Whether anything has panicked since the disk began to serve.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// The disk, and the socket that it is at: it is there for as long as the process, and has no name
/// that could be left behind.
struct Site {
    door: OwnedFd,
    cores: Cores,
}

static SITE: LazyLock<Mutex<Site>> = LazyLock::new(|| {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICKED.store(true, Ordering::SeqCst);
        before(info);
    }));
    let config = CoresConfig { memory_bytes_per_core: 8 << 20, ..CoresConfig::default() };
    let cores = Cores::start(&config).unwrap();
    let path = std::env::temp_dir().join(format!("windrose-monitor-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let (at, (ready, is_ready)) = (path.clone(), mpsc::channel());
    let life = async move |core: Core| {
        let volume = Volume::new(Dev::new(Mem::new(MemOptions::new(512, 256))), Epoch::default());
        let options = Options { queues: 2, read_only: false, serial: "one".to_owned() };
        let server = Server::new(&core, volume, OutagePolicy::Fail, &options);
        let listener = core.listen_unix(&at).await.unwrap();
        ready.send(()).unwrap();
        server.serve(&listener, std::future::pending()).await;
    };
    cores.handles()[0].try_post(life).unwrap();
    is_ready.recv_timeout(PATIENCE).expect("it listens");
    let door = open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    std::fs::remove_file(&path).unwrap();
    Mutex::new(Site { door, cores })
});

impl Site {
    /// Whether all memory is there.
    fn is_whole(&self) -> bool {
        let (answer, result) = mpsc::channel();
        let look = async move |core: Core| {
            let usage = core.buffer_pool().usage();
            answer.send((usage.free, usage.overdrafts) == (usage.total, 0)).unwrap();
        };
        self.cores.handles()[0].try_post(look).unwrap();
        result.recv_timeout(PATIENCE).expect("the core does its work")
    }
}

/// Mostly this number: there are fifty of them before a ring begins, and a monitor that says
/// nonsense is hung up on.
fn mostly(script: &mut Script<'_>, usual: u64) -> u64 {
    match script.byte() {
        0xff => u64::MAX - u64::from(script.byte()),
        0xfe => u64::from(script.half()) << 12,
        0xfd => u64::from(script.half()),
        0xfc => usual.wrapping_add(u64::from(script.byte())).wrapping_sub(8),
        _ => usual,
    }
}

/// An address in the guest's memory.
fn address(script: &mut Script<'_>) -> u64 {
    u64::from(script.half()) % MEMORY
}

/// A monitor and its guest.
struct MonitorSession<'a> {
    script: Script<'a>,
    stream: UnixStream,
    memory: File,
    record: File,
    events: [EventFd; 2],
    features: u64,
}

fn file(bytes: u64) -> File {
    let file = File::from(memfd_create("monitor", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}

#[expect(clippy::disallowed_methods, reason = "a thread of the test, not a core")]
fn nap() {
    std::thread::sleep(Duration::from_millis(1));
}

/// What [`run`] says where each ring has answered its five requests.
pub(crate) const ALL_ANSWERED: [u16; 2] = [5, 5];

/// Plays a script; how many answers each ring has then, as the guest sees it.
pub(crate) fn run(script: &[u8]) -> [u16; 2] {
    let site = SITE.lock().unwrap();
    let stream = UnixStream::connect(format!("/proc/self/fd/{}", site.door.as_raw_fd())).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let event = || EventFd::new(EFD_NONBLOCK).unwrap();
    let mut session = MonitorSession {
        script: Script::new(script),
        stream,
        memory: file(MEMORY),
        record: file(RECORD),
        events: [event(), event()],
        features: 0,
    };
    session.send(request::GET_FEATURES, &[], &[]);
    let mut reply = [0; 20];
    session.stream.read_exact(&mut reply).expect("the server answers");
    session.features = u64::from_le_bytes(*reply.last_chunk().unwrap());
    session.set_up();
    for _ in 0..48 {
        if session.script.is_empty() {
            break;
        }
        session.step();
    }
    // A ring that is ended at once may have requests that were not looked at yet.
    for _ in 0..PATIENCE.as_millis() {
        if !script.is_empty() || session.answers() == ALL_ANSWERED {
            break;
        }
        nap();
    }
    // A well-behaved monitor ends its rings first.
    if session.script.byte() < 0xc0 {
        (0..RINGS).for_each(|ring| session.say(request::GET_VRING_BASE, &[(ring, 4), (0, 4)], &[]));
    }
    // All that was sent is heard, and answered or not.
    let _ = session.stream.shutdown(Shutdown::Write);
    let mut answers = Vec::new();
    match session.stream.read_to_end(&mut answers) {
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(e) => panic!("it does not let go of a monitor that has gone: {e}"),
    }
    assert!(site.is_whole(), "memory of a guest that has gone is still in use");
    assert!(!PANICKED.load(Ordering::SeqCst), "something has panicked");
    session.answers()
}

impl MonitorSession<'_> {
    /// How many answers each ring has, as the guest sees it.
    fn answers(&self) -> [u16; 2] {
        [0, 1].map(|ring| {
            let mut index = [0; 2];
            self.memory.read_exact_at(&mut index, ring * RING + USED + 2).unwrap();
            u16::from_le_bytes(index)
        })
    }

    /// Sends a message; to whom has hung up nothing gets through.
    fn send(&self, what: u32, body: &[u8], fds: &[RawFd]) {
        self.send_flagged((what, 1), body, fds);
    }

    fn send_flagged(&self, (what, flags): (u32, u32), body: &[u8], fds: &[RawFd]) {
        let length = u32::try_from(body.len()).unwrap();
        let head = [what, flags, length].map(u32::to_le_bytes).concat();
        if self.stream.send_with_fds(&[&head[..]], fds).is_ok() && !body.is_empty() {
            let _ = (&self.stream).write_all(body);
        }
    }

    /// Sends a message of these numbers, each of the script if it wants so.
    fn say(&mut self, what: u32, numbers: &[(u64, usize)], fds: &[RawFd]) {
        let mut body = Vec::new();
        for &(usual, bytes) in numbers {
            body.extend(&mostly(&mut self.script, usual).to_le_bytes()[..bytes]);
        }
        self.send(what, &body, fds);
    }

    /// What every monitor says before its guest begins, more or less.
    fn set_up(&mut self) {
        let left_out = if self.script.byte() < 0xe0 { 0 } else { self.script.byte() };
        let has = |bit: u8| left_out >> bit & 1 == 0;
        self.fill();
        if has(0) {
            self.say(request::SET_FEATURES, &[(self.features, 8)], &[]);
        }
        self.send(request::GET_PROTOCOL_FEATURES, &[], &[]);
        if has(1) {
            // MQ, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
            let all = 1 << 0 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;
            self.say(request::SET_PROTOCOL_FEATURES, &[(all, 8)], &[]);
        }
        if has(2) {
            self.set_record();
        }
        if has(3) {
            self.set_table(2);
        }
        for ring in 0..RINGS {
            if has(4 + u8::try_from(ring).unwrap()) {
                self.begin(ring);
            }
        }
    }

    /// The guest's memory and the record, as a previous server has left them.
    fn fill(&mut self) {
        for ring in 0..RINGS {
            self.offer_chains(ring);
            let at = ring * RING;
            for _ in 0..self.script.byte() % 8 {
                let (place, descriptor) = (self.script.byte() % 16, self.descriptor());
                self.put(at + 16 * u64::from(place), &descriptor);
            }
            for _ in 0..self.script.byte() % 4 {
                let (place, head) = (self.script.byte() % 16, self.script.byte() % 18);
                self.put(at + AVAILABLE + 4 + 2 * u64::from(place), &[head, 0]);
            }
            // Some answers have been given, of which the record may not know.
            let used = u64::from(self.script.byte() % 4);
            let index = mostly(&mut self.script, used + u64::from(CHAINS)).to_le_bytes();
            self.put(at + AVAILABLE + 2, &index[..2]);
            let index = mostly(&mut self.script, used).to_le_bytes();
            self.put(at + USED + 2, &index[..2]);
            // A record that means something, mostly.
            if self.script.byte() < 0xc0 {
                let head = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 16, 0, self.script.byte() % 18, 0];
                let _ = self.record.write_all_at(&head, ring * RECORD / RINGS);
            }
        }
        for _ in 0..self.script.byte() % 16 {
            let at = u64::from(self.script.half()) % RECORD;
            let _ = self.record.write_all_at(&[self.script.byte()], at);
        }
    }

    /// Requests as a driver has them: a header, a block, a status each.
    fn offer_chains(&self, ring: u64) {
        let at = ring * RING;
        for n in 0..u64::from(CHAINS) {
            let data = 0x9000 + ring * 0x3000 + n * 0x400;
            self.put(data, &[u8::try_from(n % 2).unwrap(), 0, 0, 0, 0, 0, 0, 0, 7]);
            let to = if n % 2 == 0 { WRITE } else { 0 };
            let parts =
                [(data, 16u32, NEXT), (data + 0x200, 512, to | NEXT), (data + 16, 1, WRITE)];
            for (place, (address, bytes, flags)) in (3 * n..).zip(parts) {
                let next = u8::try_from(place + 1).unwrap();
                let descriptor = [&address.to_le_bytes()[..], &bytes.to_le_bytes()];
                let descriptor = [&descriptor.concat()[..], &[flags, 0, next, 0]].concat();
                self.put(at + 16 * place, &descriptor);
            }
            self.put(at + AVAILABLE + 4 + 2 * n, &[u8::try_from(3 * n).unwrap(), 0]);
        }
    }

    fn descriptor(&mut self) -> [u8; 16] {
        let mut out = [0; 16];
        let at = address(&mut self.script);
        out[..8].copy_from_slice(&mostly(&mut self.script, at).to_le_bytes());
        let length = [1, 16, 512, 4096][usize::from(self.script.byte() % 4)];
        out[8..12].copy_from_slice(&mostly(&mut self.script, length).to_le_bytes()[..4]);
        let flags = self.script.byte();
        out[12] = flags & 3 | if flags >= 0xe0 { 4 } else { 0 };
        out[14] = self.script.byte() % 17;
        out
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        let _ = self.memory.write_all_at(bytes, at);
    }

    fn set_record(&mut self) {
        let numbers = [(RECORD, 8), (0, 8), (RINGS, 2), (QUEUE_SIZE.into(), 2), (0, 4)];
        self.say(request::SET_INFLIGHT, &numbers, &[self.record.as_raw_fd()]);
    }

    /// The numbers of a region, with the addresses that it has by right.
    fn region(index: usize) -> [(u64, usize); 4] {
        let (at, bytes) = REGIONS[index % REGIONS.len()];
        [(at, 8), (bytes, 8), (MONITOR + at, 8), (at, 8)]
    }

    fn set_table(&mut self, regions: usize) {
        let payload = [(regions as u64, 4), (0, 4)];
        let regions_told = (0..regions).flat_map(Self::region);
        let numbers: Vec<_> = payload.into_iter().chain(regions_told).collect();
        let fds = vec![self.memory.as_raw_fd(); regions];
        self.say(request::SET_MEM_TABLE, &numbers, &fds);
    }

    fn begin(&mut self, ring: u64) {
        let at = MONITOR + ring * RING;
        let place = [(ring, 4), (0, 4), (at, 8), (at + USED, 8), (at + AVAILABLE, 8), (0, 8)];
        self.say(request::SET_VRING_NUM, &[(ring, 4), (QUEUE_SIZE.into(), 4)], &[]);
        self.say(request::SET_VRING_BASE, &[(ring, 4), (0, 4)], &[]);
        self.say(request::SET_VRING_ADDR, &place, &[]);
        self.event(request::SET_VRING_CALL, ring);
        self.event(request::SET_VRING_KICK, ring);
        self.say(request::SET_VRING_ENABLE, &[(ring, 4), (1, 4)], &[]);
    }

    /// A message that comes with an event, or says that there is none.
    fn event(&mut self, what: u32, ring: u64) {
        let fd = self.events[usize::from(self.script.byte() % 2)].as_raw_fd();
        let fds = if self.script.byte() >= 0xfe { &[][..] } else { &[fd][..] };
        let none = if fds.is_empty() { 0x100 } else { 0 };
        self.say(what, &[(ring | none, 8)], fds);
    }

    /// One thing or another.
    fn step(&mut self) {
        let (what, ring) = (self.script.byte() % 18, u64::from(self.script.byte()) % RINGS);
        match what {
            0 => {
                let usual = u64::from(self.script.peek() % 18);
                let index = mostly(&mut self.script, usual).to_le_bytes();
                self.put(ring * RING + AVAILABLE + 2, &index[..2]);
            }
            1 | 2 => {
                let (at, bytes) = (address(&mut self.script), self.script.byte() % 24);
                let bytes: Vec<u8> = (0..bytes).map(|_| self.script.byte()).collect();
                self.put(at, &bytes);
            }
            3 => {
                // A request of the guest: its header, somewhere.
                let (at, kind) = (address(&mut self.script), [0, 1, 4, 8, 11, 13, 14, 99]);
                let kind = kind[usize::from(self.script.byte() % 8)];
                let sector = self.script.byte() % 0x20;
                self.put(at, &[kind, 0, 0, 0, 0, 0, 0, 0, sector, 0, 0, 0, 0, 0, 0, 0]);
            }
            4 | 5 => drop(self.events[usize::from(self.script.byte() % 2)].write(1)),
            6 => self.say(request::GET_VRING_BASE, &[(ring, 4), (0, 4)], &[]),
            7 => self.begin(ring),
            8 => self.event(request::SET_VRING_ERR, ring),
            9 => self.event(request::SET_VRING_CALL, ring),
            10 => self.say(request::SET_VRING_ENABLE, &[(ring, 4), (1 - ring, 4)], &[]),
            11 => self.configure(),
            12 => {
                let regions = usize::from(self.script.byte() % 4);
                self.set_table(regions);
            }
            13 | 14 => {
                let region = Self::region(self.script.byte().into());
                let numbers: Vec<_> = [(0, 8)].into_iter().chain(region).collect();
                let (add, fds) = (what == 13, [self.memory.as_raw_fd()]);
                let kind = if add { request::ADD_MEM_REGION } else { request::REMOVE_MEM_REGION };
                self.say(kind, &numbers, &fds[..usize::from(add)]);
            }
            15 => match ring {
                0 => self.set_record(),
                _ => {
                    let numbers = [(0, 8), (0, 8), (RINGS, 2), (QUEUE_SIZE.into(), 2), (0, 4)];
                    self.say(request::GET_INFLIGHT, &numbers, &[]);
                }
            },
            16 => self.send(request::RESET_DEVICE, &[], &[]),
            _ => {
                let (kind, flags) = (self.script.byte() % 48, self.script.byte());
                let body: Vec<u8> =
                    (0..self.script.byte() % 64).map(|_| self.script.byte()).collect();
                let fds = vec![self.memory.as_raw_fd(); usize::from(self.script.byte() % 3)];
                let flags = if flags < 0xe0 { 1 | u32::from(flags & 8) } else { flags.into() };
                self.send_flagged((kind.into(), flags), &body, &fds);
            }
        }
    }

    /// Reads or writes the configuration.
    fn configure(&mut self) {
        let (reads, size) = (self.script.byte() >= 0x80, mostly(&mut self.script, 1) % 300);
        let mut body = Vec::new();
        let offset = mostly(&mut self.script, 32);
        for number in [offset, size, mostly(&mut self.script, 0)] {
            body.extend(&number.to_le_bytes()[..4]);
        }
        body.extend((0..size).map(|_| self.script.byte() % 3));
        self.send(if reads { request::GET_CONFIG } else { request::SET_CONFIG }, &body, &[]);
    }
}
