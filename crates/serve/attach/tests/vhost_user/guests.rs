//! Guests that keep to the rules, whatever befalls them.

use std::os::fd::AsRawFd;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use block::testing::faulty::{Effect, OpKind, Rule};
use block::testing::{Rng, TestClient};
use block::{Error, MemOptions};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress};

use super::common::{DATA, Disk, Guest, INDIRECT, NEXT, Site, WRITE, nap, put_descriptor, regions};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const ZEROES: u32 = 13;

const EVENT_INDEX: u64 = 1 << 29;
const FLUSHES: u64 = 1 << 9;

/// Virtio 1.2, 5.2.6, request by request.
#[test]
fn requests_do_what_they_say() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 2);
    let config = |guest: &mut Guest, at: u32, size: u32| {
        let nothing = vec![0; size as usize];
        let flags = VhostUserConfigFlags::empty();
        guest.monitor.get_config(at, size, flags, &nothing).unwrap().1
    };
    assert_eq!(config(&mut guest, 0, 8), (1u64 << 16).to_le_bytes());
    assert_eq!(config(&mut guest, 34, 2), [2, 0]);
    assert_eq!(guest.monitor.get_queue_num().unwrap(), 2);

    guest.put(DATA + 0x1000, &[0x5a; 8192]);
    assert_eq!(guest.plain(0, OUT, 100, (8192, 0)), (0, 1));
    guest.put(DATA + 0x1000, &[0; 8192]);
    assert_eq!(guest.plain(1, IN, 108, (4096, WRITE)), (0, 4097));
    assert_eq!(guest.get(DATA + 0x1000, 4097), [[0x5a; 4096].as_slice(), &[0]].concat());
    assert_eq!(guest.plain(0, FLUSH, 0, (0, 0)), (0, 1));
    assert_eq!(guest.plain(0, GET_ID, 0, (20, WRITE)), (0, 21));
    assert_eq!(guest.get(DATA + 0x1000, 20), b"a serial of more tha");

    let range = |sector: u64, sectors: u32, flags: u32| {
        let (a, b, c) = (sector.to_le_bytes(), sectors.to_le_bytes(), flags.to_le_bytes());
        [&a[..], &b, &c].concat()
    };
    guest.put(DATA + 0x1000, &range(100, 8, 1));
    assert_eq!(guest.plain(0, ZEROES, 0, (16, 0)), (0, 1));
    guest.put(DATA + 0x1000, &[range(108, 4, 0), range(113, 1, 0)].concat());
    assert_eq!(guest.plain(0, DISCARD, 0, (32, 0)), (0, 1));
    assert_eq!(guest.plain(0, IN, 100, (8192, WRITE)), (0, 8193));
    let expected = (100..116).map(|n| [if n == 112 || n > 113 { 0x5a } else { 0 }; 512]);
    assert_eq!(guest.get(DATA + 0x1000, 8192), expected.collect::<Vec<_>>().concat());

    for (kind, sector, data, status) in [
        (IN, (1 << 16) - 1, (1024, WRITE), 1),
        (OUT, u64::MAX, (512, 0), 1),
        (IN, 0, (100, WRITE), 1),
        (GET_ID, 0, (21, WRITE), 1),
        (DISCARD, 0, (17, 0), 1),
        (ZEROES, 0, (32, 0), 1),
        (14, 0, (0, 0), 2),
        (u32::MAX, 0, (512, WRITE), 2),
    ] {
        assert_eq!(guest.plain(0, kind, sector, data), (status, 0), "{kind} {sector} {data:?}");
    }
    guest.put(DATA + 0x1000, &range(0, 1, 2));
    assert_eq!(guest.plain(0, ZEROES, 0, (16, 0)), (2, 0), "an unknown flag");
    assert_eq!(guest.plain(0, DISCARD, 0, (16, 0)), (2, 0));
    site.on_core(|g| {
        let failed = Effect::Fail(Error::Unreadable { at: block::Lba(0) });
        g.faults.add(Rule::new(failed).on(&[OpKind::Read]).times(1));
    });
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (1, 0), "the volume cannot");
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (0, 513));
    drop(guest);
    site.end();
}

/// 2.7.4: how a request is cut into descriptors means nothing.
#[test]
fn requests_may_be_split_anywhere() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    let (header, data, back) = (DATA, DATA + 0x1000, DATA + 0x8000);
    guest.put(data, &[0x77; 1024]);
    guest.header(header, OUT, 7);
    let parts = [(header, 3, 0), (header + 3, 13, 0), (data, 1, 0), (data + 1, 1023, 0)];
    assert_eq!(guest.ask(0, &[&parts[..], &[(back, 1, WRITE)]].concat()), (0, 1));
    // Header and data in one, data and status in one.
    guest.header(data, OUT, 9);
    assert_eq!(guest.ask(0, &[(data, 16 + 512, 0), (back, 1, WRITE)]), (0, 1));
    guest.header(header, IN, 7);
    let parts = [(header, 16, 0), (back, 1000, WRITE), (back + 1000, 537, WRITE)];
    assert_eq!(guest.ask(0, &parts), (0, 1537));
    let read = guest.get(back, 1536);
    assert_eq!((&read[..1024], &read[1024..]), (&[0x77; 1024][..], &guest.get(data + 16, 512)[..]));
    // In a table of its own.
    let table = DATA + 0xf000;
    put_descriptor(&guest.memory, table, (header, 16, NEXT, 2));
    put_descriptor(&guest.memory, table + 32, (back, 1025, WRITE, 0));
    guest.put(back, &[0xff; 1025]);
    let head = guest.rings[0].send(&guest.memory, &[(table, 48, INDIRECT)]).unwrap();
    assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1025)]);
    assert_eq!(guest.get(back, 1025), [&[0x77; 1024][..], &[0]].concat());
    drop(guest);
    site.end();
}

/// Several rings, many requests at once of all lengths, in memory that does not suffice for all;
/// with event indexes and without.
#[test]
fn a_load_reads_what_it_wrote() {
    for (without, pool_bytes) in [(0, 32 << 20), (EVENT_INDEX, 1 << 20)] {
        let options = MemOptions::new(512, 1 << 16);
        let site = Site::start(&Disk { options, pool_bytes, ..Disk::default() });
        let mut guest = Guest::boot_without(&site, 2, without);
        let mut load = Load::new(7);
        load.run(&mut guest, 1500);
        drop(guest);
        site.end();
    }
}

/// Requests in flight do not overlap; each slot of the guest's memory has one.
/// A request in flight: ring, head, kind, first byte on the disk, bytes.
type Asked = (usize, u16, u32, u64, usize);

struct Load {
    rng: Rng,
    disk: Vec<u8>,
    slots: Vec<Option<Asked>>,
}

const SLOTS: usize = 12;
const SLOT: u64 = 4 << 20;
const LONGEST: u64 = 3 << 20;

impl Load {
    fn new(seed: u64) -> Self {
        let (rng, disk) = (Rng::new(seed), vec![0; 32 << 20]);
        Self { rng, disk, slots: vec![None; SLOTS] }
    }

    fn run(&mut self, guest: &mut Guest, mut requests: usize) {
        while requests > 0 || self.slots.iter().any(Option::is_some) {
            let slot = self.slots.iter().position(Option::is_none).filter(|_| requests > 0);
            if let Some(slot) = slot.filter(|_| !self.rng.one_in(5)) {
                requests -= usize::from(self.begin(guest, slot));
            } else if let Some(busy) = self.slots.iter().flatten().next() {
                let ring = busy.0;
                for (head, bytes) in guest.rings[ring].wait(&guest.memory) {
                    self.end(guest, ring, head, bytes);
                }
            }
        }
    }

    fn begin(&mut self, guest: &mut Guest, slot: usize) -> bool {
        let most = if self.rng.one_in(20) { LONGEST / 512 } else { 64 };
        let sectors = self.rng.within(1, most);
        let at = self.rng.below((1 << 16) - sectors) * 512;
        let length = sectors as usize * 512;
        let clashes = |s: &Asked| at < s.3 + s.4 as u64 && s.3 < at + length as u64;
        if self.slots.iter().flatten().any(clashes) {
            return false;
        }
        let place = DATA + SLOT * slot as u64;
        let kind = if self.rng.one_in(2) { IN } else { OUT };
        guest.header(place, kind, at / 512);
        let data = place + 0x1000;
        if kind == OUT {
            let fill = (self.rng.below(256) as u8..=255).cycle().take(length).collect::<Vec<_>>();
            guest.put(data, &fill);
            self.disk[at as usize..at as usize + length].copy_from_slice(&fill);
        }
        let flags = if kind == IN { WRITE } else { 0 };
        let cut = self.rng.within(1, length as u64) as u32;
        let mut parts = vec![(place, 16, 0), (data, cut, flags)];
        parts.push((data + u64::from(cut), length as u32 - cut, flags));
        parts.push((place + 16, 1, WRITE));
        let ring = self.rng.below(2) as usize;
        let Some(head) = guest.rings[ring].send(&guest.memory, &parts) else { return false };
        self.slots[slot] = Some((ring, head, kind, at, length));
        true
    }

    fn end(&mut self, guest: &Guest, ring: usize, head: u16, bytes: u32) {
        let mine = |s: &Option<Asked>| matches!(s, Some((r, h, ..)) if (*r, *h) == (ring, head));
        let slot = self.slots.iter().position(mine).unwrap();
        let (_, _, kind, at, length) = self.slots[slot].take().unwrap();
        let place = DATA + SLOT * slot as u64;
        assert_eq!(guest.get(place + 16, 1), [0]);
        if kind == IN {
            assert_eq!(bytes as usize, length + 1);
            let expected = &self.disk[at as usize..at as usize + length];
            assert!(guest.get(place + 0x1000, length) == expected, "{length} bytes at {at}");
        }
    }
}

/// First byte of a block, whatever the volume is doing.
fn peek(site: &Site, block: u64) -> u8 {
    site.on_core(move |g| {
        let client = TestClient::new(&block::Dev::shared(g.mem.clone()), g.core.buffer_pool());
        let mut read = Box::pin(async move { client.read(block, 1).await.unwrap().to_vec()[0] });
        match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(byte) => byte,
            Poll::Pending => panic!("memory answers at once"),
        }
    })
}

/// A driver that knows nothing of flushes believes that what is written is durable; so does one
/// that has chosen that.
#[test]
fn without_a_cache_writes_are_durable() {
    let options = MemOptions { volatile_cache: true, ..MemOptions::new(512, 1 << 16) };
    let site = Site::start(&Disk { options, ..Disk::default() });
    let first_byte = |site: &Site| {
        site.on_core(|g| g.mem.cut_power(|_| 0));
        peek(site, 9)
    };
    let write = |guest: &mut Guest, byte: u8| {
        guest.put(DATA + 0x1000, &[byte; 512]);
        assert_eq!(guest.plain(0, OUT, 9, (512, 0)), (0, 1));
    };
    let mut guest = Guest::boot_without(&site, 1, FLUSHES);
    write(&mut guest, 1);
    assert_eq!(first_byte(&site), 1);
    drop(guest);
    let mut guest = Guest::boot(&site, 1);
    write(&mut guest, 2);
    assert_eq!(first_byte(&site), 1, "not flushed");
    write(&mut guest, 3);
    assert_eq!(guest.plain(0, FLUSH, 0, (0, 0)), (0, 1));
    assert_eq!(first_byte(&site), 3);
    guest.monitor.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    write(&mut guest, 4);
    assert_eq!(first_byte(&site), 4);
    drop(guest);
    site.end();
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let site = Site::start(&Disk { read_only: true, ..Disk::default() });
    let mut guest = Guest::boot(&site, 1);
    assert!(guest.features >> 5 & 1 == 1, "it is told");
    for kind in [OUT, ZEROES] {
        assert_eq!(guest.plain(0, kind, 0, (512, 0)), (1, 0));
    }
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (0, 513));
    drop(guest);
    site.end();
}

/// One request that the volume does not finish until it is told to.
fn stall(site: &Site, kind: OpKind) {
    site.on_core(move |g| g.faults.add(Rule::new(Effect::Stall).on(&[kind]).times(1)));
}

fn wait_until_in_flight(site: &Site) {
    while site.on_core(|g| g.volume.stats().in_flight) == 0 {
        nap(1);
    }
}

/// A ring that is told to stop answers what is in flight first.
#[test]
fn a_ring_stops_when_all_is_answered() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    stall(&site, OpKind::Write);
    guest.header(DATA, OUT, 0);
    let parts = [(DATA, 16, 0), (DATA + 0x1000, 512, 0), (DATA + 16, 1, WRITE)];
    let head = guest.rings[0].send(&guest.memory, &parts).unwrap();
    wait_until_in_flight(&site);
    let base = std::thread::scope(|s| {
        let monitor = &guest.monitor;
        let stop = s.spawn(move || monitor.get_vring_base(0).unwrap());
        nap(50);
        assert!(!stop.is_finished(), "a write is in flight");
        site.on_core(|g| g.faults.release());
        stop.join().unwrap()
    });
    assert_eq!(base, 1);
    assert_eq!(guest.rings[0].take(&guest.memory), [(head, 1)]);
    // And goes on where it was.
    guest.start_ring(0, 1);
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (0, 513));
    guest.monitor.reset_device().unwrap();
    drop(guest);
    site.end();
}

/// What is in flight when the disk is told to stop is answered; what comes afterwards is not taken.
#[test]
fn a_disk_stops_when_all_is_answered() {
    let mut site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    stall(&site, OpKind::Write);
    guest.header(DATA, OUT, 0);
    let parts = [(DATA, 16, 0), (DATA + 0x1000, 512, 0), (DATA + 16, 1, WRITE)];
    let head = guest.rings[0].send(&guest.memory, &parts).unwrap();
    wait_until_in_flight(&site);
    site.tell_to_stop();
    nap(20);
    site.on_core(|g| g.faults.release());
    assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
    site.end();
    assert!(guest.monitor.get_features().is_err(), "it has hung up");
}

/// The connection is lost with requests in flight: nothing is answered behind it, and each is
/// answered once when the monitor has come back, whatever has been done before.
#[test]
fn requests_in_flight_are_answered_once_after_a_reconnect() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 2);
    guest.put(DATA + 0x1000, &[0x11; 512]);
    assert_eq!(guest.plain(0, OUT, 0, (512, 0)), (0, 1));
    stall(&site, OpKind::Read);
    let mut heads = Vec::new();
    for (n, kind) in [(0, IN), (1, OUT), (2, IN)] {
        let place = DATA + 0x10000 * (n + 1);
        guest.header(place, kind, n);
        guest.put(place + 0x1000, &[0x22 + n as u8; 512]);
        guest.put(place + 16, &[0xee]);
        let flags = if kind == IN { WRITE } else { 0 };
        let parts = [(place, 16, 0), (place + 0x1000, 512, flags), (place + 16, 1, WRITE)];
        heads.push(guest.rings[0].send(&guest.memory, &parts).unwrap());
    }
    // The first stays in flight; the others are answered, behind it.
    let mut answered = Vec::new();
    while answered.len() < 2 {
        answered.extend(guest.rings[0].wait(&guest.memory).into_iter().map(|(head, _)| head));
    }
    answered.sort_unstable();
    let mut others = heads[1..].to_vec();
    others.sort_unstable();
    assert_eq!(answered, others);
    // The monitor goes; its disk is done with the read only afterwards.
    guest.leave();
    nap(50);
    site.on_core(|g| g.faults.release());
    nap(50);
    assert_eq!(guest.get(DATA + 0x10010, 1), [0xee], "no answer for a guest that has gone");
    assert_eq!(guest.get(DATA + 0x11000, 512), [0x22; 512]);
    guest.reconnect(&site);
    assert_eq!(guest.rings[0].wait(&guest.memory), [(heads[0], 513)]);
    assert_eq!(guest.get(DATA + 0x11000, 512), [0x11; 512]);
    assert_eq!(guest.plain(0, IN, 1, (512, WRITE)), (0, 513));
    assert_eq!(guest.plain(1, IN, 1, (512, WRITE)), (0, 513));
    drop(guest);
    site.end();
}

/// The server of a ring may have ended between an answer and its notification: its successor
/// notifies in its place.
#[test]
fn a_ring_that_begins_notifies() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    super::common::wait_for(&guest.rings[0].call);
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (0, 513));
    while guest.rings[0].call.read().is_ok() {}
    guest.reconnect(&site);
    super::common::wait_for(&guest.rings[0].call);
    drop(guest);
    site.end();
}

/// The memory of a guest whose monitor has gone may be anything: what has not been fetched of a
/// long write is left out.
#[test]
fn a_long_write_ends_with_its_monitor() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    stall(&site, OpKind::Write);
    guest.header(DATA, OUT, 0);
    guest.put(DATA + 0x1000, &vec![0x33; 3 << 20]);
    let parts = [(DATA, 16, 0), (DATA + 0x1000, 3 << 20, 0), (DATA + 16, 1, WRITE)];
    let head = guest.rings[0].send(&guest.memory, &parts).unwrap();
    wait_until_in_flight(&site);
    guest.leave();
    nap(50);
    site.on_core(|g| g.faults.release());
    while site.on_core(|g| g.volume.stats().in_flight) > 0 {
        nap(1);
    }
    nap(20);
    assert_eq!([0, 1 << 11, 1 << 12].map(|block| peek(&site, block)), [0x33, 0, 0]);
    guest.reconnect(&site);
    assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
    assert_eq!([0, 1 << 11, 1 << 12].map(|block| peek(&site, block)), [0x33; 3]);
    drop(guest);
    site.end();
}

/// Memory comes and goes while requests are in flight: they keep what they were taken under.
#[test]
fn memory_changes_while_requests_are_in_flight() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    let more = tempfile::tempfile().unwrap();
    more.set_len(1 << 20).unwrap();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 40,
        memory_size: 1 << 20,
        userspace_addr: 1 << 50,
        mmap_offset: 0,
        mmap_handle: more.as_raw_fd(),
    };
    guest.monitor.add_mem_region(&region).unwrap();
    assert!(guest.monitor.get_max_mem_slots().unwrap() >= 32);
    stall(&site, OpKind::Read);
    guest.header(DATA, IN, 0);
    let parts = [(DATA, 16, 0), (1 << 40, 512, WRITE), (DATA + 16, 1, WRITE)];
    let head = guest.rings[0].send(&guest.memory, &parts).unwrap();
    wait_until_in_flight(&site);
    guest.monitor.remove_mem_region(&region).unwrap();
    guest.monitor.set_mem_table(&regions(&guest.memory)).unwrap();
    site.on_core(|g| g.faults.release());
    assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 513)]);
    // It is gone for what comes now.
    guest.rings[0].send(&guest.memory, &parts).unwrap();
    super::common::wait_for(&guest.rings[0].error);
    assert_eq!(guest.memory.read_obj::<u8>(GuestAddress(DATA + 16)).unwrap(), 0);
    drop(guest);
    site.end();
}

/// A volume that is out of reach: the disk hangs up, nothing is answered, and who serves the guest
/// next does it all.
#[test]
fn requests_without_a_path_are_left_to_the_next_process() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 2);
    site.on_core(|g| {
        g.away.set(true);
        g.faults.add(Rule::new(Effect::Fail(Error::Gone)));
    });
    let mut asked = Vec::new();
    for (n, kind, bytes) in [(0, OUT, 512), (1, IN, 512), (2, OUT, 3 << 20), (3, FLUSH, 0)] {
        let place = DATA + SLOT * n;
        guest.header(place, kind, n << 13);
        guest.put(place + 0x1000, &vec![0x40 + n as u8; bytes as usize]);
        guest.put(place + 16, &[0xee]);
        let flags = if kind == IN { WRITE } else { 0 };
        let parts = [(place, 16, 0), (place + 0x1000, bytes, flags), (place + 16, 1, WRITE)];
        let parts: Vec<_> = parts.into_iter().filter(|(_, bytes, _)| *bytes > 0).collect();
        let ring = usize::from(n == 3);
        asked.push((ring, guest.rings[ring].send(&guest.memory, &parts).unwrap()));
    }
    site.wait();
    assert!(guest.monitor.get_features().is_err(), "it has hung up");
    assert!(guest.rings.iter().all(|ring| ring.used(&guest.memory) == 0), "nothing is answered");
    for n in 0..4 {
        assert_eq!(guest.get(DATA + SLOT * n + 16, 1), [0xee]);
    }
    let site = Site::start(&Disk::default());
    guest.reconnect(&site);
    let mut answered = Vec::new();
    while answered.len() < asked.len() {
        for ring in 0..2 {
            let took = guest.rings[ring].take(&guest.memory);
            answered.extend(took.into_iter().map(|(head, _)| (ring, head)));
        }
        nap(1);
    }
    answered.sort_unstable();
    asked.sort_unstable();
    assert_eq!(answered, asked);
    assert_eq!([0, 2 << 13].map(|block| peek(&site, block)), [0x40, 0x42]);
    drop(guest);
    site.end();
}

/// A ring that is told to stop while something stays in flight does not say that it has stopped.
#[test]
fn a_ring_does_not_stop_over_what_is_left() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 2);
    stall(&site, OpKind::Write);
    let parts = |at, flags| [(at, 16, 0), (at + 0x1000, 512, flags), (at + 16, 1, WRITE)];
    guest.header(DATA, OUT, 0);
    guest.header(DATA + SLOT, IN, 1);
    guest.rings[0].send(&guest.memory, &parts(DATA, 0)).unwrap();
    wait_until_in_flight(&site);
    let Guest { monitor, rings, memory, .. } = &mut guest;
    std::thread::scope(|s| {
        let stop = s.spawn(|| monitor.get_vring_base(0));
        nap(50);
        site.on_core(|g| {
            g.away.set(true);
            g.faults.add(Rule::new(Effect::Fail(Error::Gone)));
        });
        rings[1].send(memory, &parts(DATA + SLOT, WRITE)).unwrap();
        nap(50);
        site.on_core(|g| g.faults.release());
        assert!(stop.join().unwrap().is_err());
    });
    assert_eq!(rings[1].used(memory), 0);
    site.wait();
}

/// A volume that has failed is another matter: its guest is told.
#[test]
fn a_volume_that_is_lost_fails_its_requests() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    site.on_core(|g| g.faults.add(Rule::new(Effect::Fail(Error::Gone))));
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (1, 0));
    assert_eq!(guest.plain(0, FLUSH, 0, (0, 0)), (1, 0));
    site.on_core(|g| g.faults.clear());
    drop(guest);
    site.end();
}

/// Monitors take a region away and add it again, in other pieces: a ring in it waits. What is in
/// flight is answered.
#[test]
fn a_ring_waits_for_its_memory() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    let whole = regions(&guest.memory).remove(0);
    // A cut through the ring.
    let cut = 0x1_4000;
    let first = VhostUserMemoryRegionInfo { memory_size: cut, ..regions(&guest.memory).remove(0) };
    let rest = VhostUserMemoryRegionInfo {
        guest_phys_addr: whole.guest_phys_addr + cut,
        memory_size: whole.memory_size - cut,
        userspace_addr: whole.userspace_addr + cut,
        mmap_offset: whole.mmap_offset + cut,
        ..regions(&guest.memory).remove(0)
    };
    stall(&site, OpKind::Read);
    let parts = |at| [(at, 16, 0), (at + 0x1000, 512, WRITE), (at + 16, 1, WRITE)];
    guest.header(DATA, IN, 0);
    guest.header(DATA + SLOT, IN, 1);
    let head = guest.rings[0].send(&guest.memory, &parts(DATA)).unwrap();
    wait_until_in_flight(&site);
    guest.monitor.remove_mem_region(&whole).unwrap();
    let next = guest.rings[0].send(&guest.memory, &parts(DATA + SLOT)).unwrap();
    site.on_core(|g| g.faults.release());
    assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 513)]);
    guest.monitor.add_mem_region(&first).unwrap();
    nap(50);
    assert_eq!(guest.rings[0].used(&guest.memory), 1, "nothing is taken meanwhile");
    assert!(guest.rings[0].error.read().is_err(), "nothing is broken");
    guest.monitor.add_mem_region(&rest).unwrap();
    assert_eq!(guest.rings[0].wait(&guest.memory), [(next, 513)]);
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (0, 513));
    guest.monitor.remove_mem_region(&rest).unwrap();
    assert_eq!(guest.monitor.get_vring_base(0).unwrap(), 3, "it stops where it is");
    drop(guest);
    site.end();
}

/// One monitor after the other; an idle one costs nothing.
#[test]
fn guests_come_and_go() {
    let site = Site::start(&Disk::default());
    for n in 0..5u8 {
        let mut guest = Guest::boot(&site, 2);
        assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (0, 513));
        assert_eq!(guest.get(DATA + 0x1000, 1), [n]);
        guest.put(DATA + 0x1000, &[n + 1; 512]);
        assert_eq!(guest.plain(1, OUT, 0, (512, 0)), (0, 1));
    }
    nap(Duration::from_millis(20).as_millis() as u64);
    site.end();
}
