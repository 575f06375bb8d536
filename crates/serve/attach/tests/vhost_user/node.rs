//! What a guest sees of a volume of a node: one that other nodes have too, that an initiator
//! reserves, that is away.

use std::sync::mpsc;

use block::testing::faulty::{Effect, OpKind, Rule};
use block::{Access, Error};
use reservation::{Change, Initiator, ItNexus, NvmeRegisterAction, ReservationType as Reserved};
use tokio::time::Instant;
use vhost::VhostBackend;

use super::common::{DATA, Disk, Guest, PATIENCE, Site, WRITE, nap};

const IN: u32 = 0;
const OUT: u32 = 1;

const UNTOUCHED: u8 = 0xee;

fn shared() -> Disk {
    Disk { shared: true, ..Disk::default() }
}

/// The node does not serve the volume: what is asked of it ends with `why`.
fn turn_away(site: &Site, why: Error) {
    site.on_core(move |g| {
        g.access.set(Access::Unavailable);
        g.faults.add(Rule::new(Effect::Fail(why)).on(&[OpKind::Read, OpKind::Write]));
    });
}

fn serve_again(site: &Site) {
    site.on_core(|g| {
        g.faults.clear();
        g.access.set(Access::Optimized);
    });
}

/// Sends a request of `bytes` at block `n`, from the `n`th place in memory; gives its head.
fn send(guest: &mut Guest, n: usize, kind: u32, bytes: u32) -> u16 {
    let place = DATA + 0x100_0000 * n as u64;
    guest.header(place, kind, n as u64);
    guest.put(place + 16, &[UNTOUCHED]);
    let flags = if kind == IN { WRITE } else { 0 };
    let parts = [(place, 16, 0), (place + 0x1000, bytes, flags), (place + 16, 1, WRITE)];
    guest.rings[0].send(&guest.memory, &parts).unwrap()
}

fn status(guest: &Guest, n: usize) -> u8 {
    guest.get(DATA + 0x100_0000 * n as u64 + 16, 1)[0]
}

/// Waits until the volume has done, or could not do, so many commands.
fn wait_until_done(site: &Site, count: u64) {
    let until = Instant::now() + PATIENCE;
    let done =
        || site.on_core(|g| g.volume.stats().kinds.iter().map(|kind| kind.completed).sum::<u64>());
    while done() < count {
        assert!(Instant::now() < until, "{} of {count} commands", done());
        nap(1);
    }
}

/// A guest has one path: an error would be its file system's end. In parts or as a whole, with its
/// data as it is when the volume is there again.
#[test]
fn requests_wait_while_the_node_cannot_serve() {
    for bytes in [512, 3 << 20] {
        let site = Site::start(&shared());
        let mut guest = Guest::boot(&site, 1);
        turn_away(&site, Error::Fenced);
        guest.put(DATA + 0x1000, &vec![0x11; bytes as usize]);
        let head = send(&mut guest, 0, OUT, bytes);
        wait_until_done(&site, 1);
        nap(250);
        assert_eq!(status(&guest, 0), UNTOUCHED);
        assert_eq!(site.on_core(|g| g.volume.stats().in_flight), 0, "nothing is held below");
        guest.put(DATA + 0x1000, &vec![0x22; bytes as usize]);
        serve_again(&site);
        assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
        assert_eq!(status(&guest, 0), 0);
        send(&mut guest, 0, IN, 512);
        guest.rings[0].wait(&guest.memory);
        assert_eq!(guest.get(DATA + 0x1000, 512), [0x22; 512]);
        drop(guest);
        site.end();
    }
}

/// It says that it can, and cannot yet: it is asked again, and not without end in one turn.
#[test]
fn a_node_that_serves_again_soon_is_asked_again() {
    let site = Site::start(&shared());
    let mut guest = Guest::boot(&site, 1);
    site.on_core(|g| {
        let fails = Rule::new(Effect::Fail(Error::Fenced)).on(&[OpKind::Read]).times(3);
        g.faults.add(fails);
    });
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (0, 513));
    wait_until_done(&site, 4);
    drop(guest);
    site.end();
}

/// What only this node has is there or is not.
#[test]
fn a_volume_of_one_node_fails_as_it_is() {
    let site = Site::start(&Disk::default());
    let mut guest = Guest::boot(&site, 1);
    turn_away(&site, Error::Fenced);
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (1, 0));
    serve_again(&site);
    let site_of_all = Site::start(&shared());
    let mut other = Guest::boot(&site_of_all, 1);
    turn_away(&site_of_all, Error::NoSpace);
    assert_eq!(other.plain(0, OUT, 0, (512, 0)), (1, 0), "that is no question of who is asked");
    serve_again(&site_of_all);
    drop((guest, other));
    site.end();
    site_of_all.end();
}

/// The disk ends while requests wait: none is answered, and the next server does each once.
#[test]
fn waiting_requests_are_left_to_the_next_process() {
    let mut site = Site::start(&shared());
    let mut guest = Guest::boot(&site, 1);
    guest.put(DATA + 0x1000, &[0x33; 512]);
    turn_away(&site, Error::Fenced);
    let head = send(&mut guest, 0, OUT, 512);
    wait_until_done(&site, 1);
    site.tell_to_stop();
    site.end();
    assert_eq!(status(&guest, 0), UNTOUCHED);
    let next = Site::start(&shared());
    guest.reconnect(&next);
    assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
    assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), (0, 513));
    assert_eq!(guest.get(DATA + 0x1000, 512), [0x33; 512]);
    drop(guest);
    next.end();
}

/// The monitor goes while requests wait: the next one is served, without a look at the volume.
#[test]
fn a_gone_monitor_is_not_waited_for() {
    let site = Site::start(&shared());
    let mut guest = Guest::boot(&site, 1);
    turn_away(&site, Error::Gone);
    let head = send(&mut guest, 0, OUT, 512);
    wait_until_done(&site, 1);
    guest.leave();
    guest.reconnect(&site);
    nap(50);
    assert_eq!(status(&guest, 0), UNTOUCHED);
    serve_again(&site);
    assert_eq!(guest.rings[0].wait(&guest.memory), [(head, 1)]);
    assert_eq!(status(&guest, 0), 0);
    drop(guest);
    site.end();
}

/// A monitor that waits for a ring to end, before the disk ends or from then on, is not told that
/// nothing is in flight: it is hung up on. From then on nothing of the guest is touched, though the
/// volume goes on with another request of that ring.
#[test]
fn a_monitor_that_waits_for_a_ring_is_disconnected() {
    for (first, second) in [(0, 100), (100, 0)] {
        let mut site = Site::start(&shared());
        let mut guest = Guest::boot(&site, 1);
        site.on_core(|g| {
            g.access.set(Access::Unavailable);
            g.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Read]).times(1));
            g.faults.add(Rule::new(Effect::Fail(Error::Fenced)).on(&[OpKind::Write]));
        });
        send(&mut guest, 1, IN, 512);
        send(&mut guest, 0, OUT, 512);
        wait_until_done(&site, 1);
        std::thread::scope(|s| {
            let monitor = &guest.monitor;
            let (done_tx, answer) = mpsc::channel();
            s.spawn(move || {
                nap(first);
                done_tx.send(monitor.get_vring_base(0)).unwrap();
            });
            nap(second);
            site.tell_to_stop();
            let answer = answer.recv_timeout(PATIENCE);
            site.on_core(|g| g.faults.release());
            assert!(answer.unwrap().is_err(), "it is told nothing");
        });
        site.end();
        assert_eq!([0, 1].map(|n| status(&guest, n)), [UNTOUCHED; 2]);
    }
}

/// A guest cannot register, so it may what those may that have not.
#[test]
fn reservations_bind_a_guest() {
    let site = Site::start(&Disk { reserves: true, ..Disk::default() });
    let mut guest = Guest::boot(&site, 1);
    assert_eq!(guest.plain(0, OUT, 0, (512, 0)), (0, 1));
    let alter = |change: Change| {
        let (done_tx, done) = mpsc::channel();
        site.on_core(move |g| {
            let party = ItNexus { initiator: Initiator::Host([7; 16]), port: 0 };
            g.volume.change_reservations(party, change, || true, move |r| done_tx.send(r).unwrap());
        });
        done.recv_timeout(PATIENCE).unwrap().unwrap();
    };
    alter(Change::NvmeRegister {
        action: NvmeRegisterAction::Register { new_key: 1 },
        persist: None,
    });
    for (kind, reads) in [(Reserved::WriteExclusive, true), (Reserved::ExclusiveAccess, false)] {
        alter(Change::Reserve { key: 1, kind });
        assert_eq!(guest.plain(0, OUT, 0, (512, 0)), (1, 0), "{kind:?}");
        let read = if reads { (0, 513) } else { (1, 0) };
        assert_eq!(guest.plain(0, IN, 0, (512, WRITE)), read, "{kind:?}");
        alter(Change::Release { key: 1, kind });
        assert_eq!(guest.plain(0, OUT, 0, (512, 0)), (0, 1));
    }
    drop(guest);
    site.end();
}
