//! Guests and monitors that keep to no rule: they harm themselves alone.

use std::io::Write;
use std::os::unix::net::UnixStream;

use block::testing::Rng;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use super::common::{
    DATA, Disk, Guest, INDIRECT, MEMORY, NEXT, QUEUE_SIZE, Ring, Site, WRITE, connect,
    put_descriptor, wait_for,
};

type Attack = fn(&mut Ring, &vm_memory::GuestMemoryMmap<()>);

const ATTACKS: [(&str, Attack); 13] = [
    ("a loop", |ring, memory| {
        ring.describe(memory, 0, (DATA, 16, NEXT, 1));
        ring.describe(memory, 1, (DATA, 16, NEXT, 0));
        ring.offer(memory, 0);
    }),
    ("a head outside the table", |ring, memory| ring.offer(memory, QUEUE_SIZE)),
    ("a successor outside the table", |ring, memory| {
        ring.describe(memory, 0, (DATA, 16, NEXT, QUEUE_SIZE));
        ring.offer(memory, 0);
    }),
    ("data outside memory", |ring, memory| {
        ring.describe(memory, 0, (DATA, 16, NEXT, 1));
        ring.describe(memory, 1, (MEMORY - 1, 2, WRITE, 0));
        ring.offer(memory, 0);
    }),
    ("data that leaves the address space", |ring, memory| {
        ring.describe(memory, 0, (u64::MAX - 3, 16, NEXT, 1));
        ring.offer(memory, 0);
    }),
    ("to be read behind to be written", |ring, memory| {
        ring.describe(memory, 0, (DATA, 16, WRITE | NEXT, 1));
        ring.describe(memory, 1, (DATA, 16, 0, 0));
        ring.offer(memory, 0);
    }),
    ("no status", |ring, memory| {
        ring.describe(memory, 0, (DATA, 16, NEXT, 1));
        ring.describe(memory, 1, (DATA, 0, WRITE, 0));
        ring.offer(memory, 0);
    }),
    ("a table in a table", |ring, memory| {
        put_descriptor(memory, DATA, (DATA, 16, INDIRECT, 0));
        ring.describe(memory, 0, (DATA, 16, INDIRECT, 0));
        ring.offer(memory, 0);
    }),
    ("a table that goes on", |ring, memory| {
        ring.describe(memory, 0, (DATA, 16, INDIRECT | NEXT, 1));
        ring.offer(memory, 0);
    }),
    ("a table of an odd length", |ring, memory| {
        ring.describe(memory, 0, (DATA, 17, INDIRECT, 0));
        ring.offer(memory, 0);
    }),
    ("a table without end", |ring, memory| {
        (0..400).for_each(|n| put_descriptor(memory, DATA + 16 * n, (DATA, 1, NEXT, n as u16 + 1)));
        ring.describe(memory, 0, (DATA, 65520, INDIRECT, 0));
        ring.offer(memory, 0);
    }),
    ("more requests than descriptors", |ring, memory| {
        (0..=QUEUE_SIZE).for_each(|_| ring.offer(memory, QUEUE_SIZE));
    }),
    ("the same request again and again", |ring, memory| {
        // A long read, so that it is in flight when it comes again.
        ring.describe(memory, 0, (DATA, 16, NEXT, 1));
        ring.describe(memory, 1, (DATA + 0x1000, (4 << 20) + 1, WRITE, 0));
        ring.offer(memory, 0);
        ring.offer(memory, 0);
    }),
];

/// Each ends its ring, and nothing else; a driver that begins anew has a ring again.
#[test]
fn an_invalid_chain_ends_only_its_ring() {
    let site = Site::start(&Disk::default());
    for (what, attack) in ATTACKS {
        let mut guest = Guest::boot(&site, 2);
        guest.header(DATA, 0, 0);
        let Guest { rings, memory, .. } = &mut guest;
        attack(&mut rings[0], memory);
        rings[0].kick();
        wait_for(&rings[0].error);
        assert_eq!(guest.plain(1, 0, 0, (512, WRITE)), (0, 513), "{what}");
        let base = guest.monitor.get_vring_base(0).unwrap();
        assert!(base <= 2, "{what}: {base}");
        drop(guest);
    }
    site.end();
}

/// Rings that are where they cannot be are refused, and so is what makes no sense; the next monitor
/// is served.
#[test]
fn monitors_are_refused() {
    let site = Site::start(&Disk::default());
    let (monitor, features) = connect(&site, 0);
    assert!(monitor.set_features(features | 1 << 26).is_err(), "logging was not offered");
    let (monitor, _) = connect(&site, 0);
    assert!(monitor.set_vring_num(0, 3).is_err(), "no power of two");
    let (monitor, _) = connect(&site, 0);
    assert!(monitor.set_vring_num(2, 4).is_err(), "there are two rings");
    let (monitor, _) = connect(&site, 0);
    let event = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
    assert!(monitor.set_vring_kick(0, &event).is_err(), "it has no place");
    let (mut monitor, _) = connect(&site, 0);
    let asked = vhost::vhost_user::message::VhostUserInflight::new(0, 0, u16::MAX, u16::MAX);
    assert!(monitor.get_inflight_fd(&asked).is_err(), "too many");
    let guest = Guest::boot(&site, 1);
    assert!(guest.monitor.set_vring_num(0, 8).is_err(), "it runs");
    let guest = Guest::boot(&site, 2);
    let elsewhere = guest.place(1);
    assert!(guest.monitor.set_vring_addr(0, &elsewhere).is_err(), "it runs where it is");
    let mut guest = Guest::boot(&site, 1);
    assert_eq!(guest.plain(0, 0, 0, (512, WRITE)), (0, 513));
    guest.monitor.reset_device().unwrap();
    drop((monitor, guest));
    site.end();
}

/// Anything on the socket, in any portions: the connection ends, and the next one is served.
#[test]
fn garbage_ends_a_connection() {
    let site = Site::start(&Disk::default());
    let mut rng = Rng::new(3);
    for _ in 0..60 {
        let mut stream = UnixStream::connect(&site.path).unwrap();
        for _ in 0..rng.within(1, 6) {
            let size = rng.below(40) as u32;
            let code = rng.below(44) as u32;
            let flags = if rng.one_in(4) { 9 } else { 1 };
            let mut message = [code, flags, size].map(u32::to_le_bytes).concat();
            let short = rng.one_in(6);
            message.extend((0..size).map(|_| if rng.one_in(2) { 0 } else { rng.below(256) as u8 }));
            message.truncate(if short { message.len() / 2 } else { message.len() });
            // It may have hung up already.
            let _ = stream.write_all(&message);
        }
    }
    let mut guest = Guest::boot(&site, 1);
    assert_eq!(guest.plain(0, 0, 0, (512, WRITE)), (0, 513));
    drop(guest);
    site.end();
}
