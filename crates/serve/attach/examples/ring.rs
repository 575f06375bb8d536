//! A guest's driver at a vhost-user socket, without a guest: how long a read of 4 KiB takes, one
//! after the other.
//!
//! ```text
//! ring SOCKET SECONDS
//! ```
//! Half of the time it sleeps until the disk gives the ring's event, as a processor of a guest does
//! that has nothing else to do; half of the time it looks for answers in the ring. It prints both
//! medians as JSON, in microseconds.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/guest.rs"]
#[allow(dead_code, reason = "the guest can do more than is asked of it here")]
mod guest;

use std::os::fd::AsRawFd;
use std::time::Duration;

use guest::{DATA, Guest, WRITE};
use tokio::time::Instant;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// VIRTIO_BLK_T_IN.
const IN: u32 = 0;
const SECTORS: u64 = 8;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, seconds] = &words[..] else { panic!("ring SOCKET SECONDS") };
    let half = Duration::from_secs(seconds.parse().unwrap()) / 2;
    let mut guest = Guest::boot(socket, 1);
    let alarm = Epoll::new().unwrap();
    let call = guest.rings[0].call.as_raw_fd();
    alarm.ctl(ControlOperation::Add, call, EpollEvent::new(EventSet::IN, 0)).unwrap();
    let sleeping = median(&mut guest, half, |guest| {
        alarm.wait(-1, &mut [EpollEvent::default()]).unwrap();
        let _ = guest.rings[0].call.read();
    });
    let looking = median(&mut guest, half, |_| std::hint::spin_loop());
    println!("{{\"sleeping_us\": {sleeping}, \"looking_us\": {looking}}}");
}

/// Reads for so long; the median of what a read takes.
fn median(guest: &mut Guest, whole: Duration, wait: impl Fn(&Guest)) -> f64 {
    let (mut times, begun) = (Vec::new(), Instant::now());
    let mut place = 1u64;
    while begun.elapsed() < whole {
        // A walk that visits all of a small disk in no order that anything could foresee.
        place = place.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        times.push(read(guest, place >> 16 & 0xfff, &wait));
    }
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn read(guest: &mut Guest, block: u64, wait: impl Fn(&Guest)) -> Duration {
    guest.header(DATA, IN, block * SECTORS);
    let parts = [(DATA, 16, 0), (DATA + 0x1000, 4096, WRITE), (DATA + 16, 1, WRITE)];
    let begun = Instant::now();
    guest.rings[0].send(&guest.memory, &parts).unwrap();
    while guest.rings[0].look(&guest.memory).is_empty() {
        wait(guest);
    }
    let took = begun.elapsed();
    assert_eq!(guest.get(DATA + 16, 1), [0], "a read has failed");
    took
}
