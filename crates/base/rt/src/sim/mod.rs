//! The deterministic simulator: the system behind [`crate::Core`] in tests.
//!
//! A [`World`] is built from a seed. It has hosts ([`Host`]) with disks and software, a network
//! between them, and virtual time that stands still while anything can run. A scenario plays in
//! it: it starts hosts, gives them work, cuts their power, cuts links, and says at the end what
//! it thinks of the result. The same seed gives the same world, event by event, and
//! [`Outcome::digest`] proves it.
//!
//! # What is simulated
//! * Disks ([`DiskSetup`], [`DiskFaults`], [`DiskControl`]): a volatile cache whose every unsynced
//!   change meets its own fate at power loss; errors, stalls, bit rot, misdirected and lost
//!   writes, failed syncs, full file systems.
//! * TCP ([`LinkSetup`]): portions of any size, delay, cut links, resets, silence.
//! * Crashes: [`Host::power_cut`] and [`Host::kill`]; processes that are stopped and go on
//!   ([`Host::pause`]).
//! * Clocks: each host has its own since its boot ([`crate::Core::now`]), with a rate of its own
//!   ([`HostSetup::clock_drift_ppm`], [`Host::set_clock_drift`]). [`HostFaults`] has pauses and
//!   changes of rate happen by themselves.
//!
//! # Rules for code that runs here
//! Nothing may depend on anything but the seed:
//! * time is `tokio::time`, and the core's clock for leases; randomness is [`crate::Core::random_u64`], disks and connections come
//!   from the core, tasks are `spawn_local`;
//! * `tokio::select!` is `biased` (tokio draws the branch order from the system otherwise), and a
//!   `tokio::sync::watch` channel has one receiver (it wakes several in an order of its own);
//! * maps whose order can be seen are `BTreeMap`, or hash maps with a fixed hasher
//!   (`rustc_hash`); addresses of memory decide nothing.

pub(crate) mod agenda;
mod clock;
pub(crate) mod core;
mod device;
pub(crate) mod disk;
mod extents;
mod faults;
mod harm;
mod host;
mod machine;
mod medium;
pub(crate) mod net;
mod panics;
mod pause;
mod rng;
mod trace;
mod world;

pub use self::core::EPOCH;
pub(crate) use self::core::SimCore;
pub use device::Mishap;
pub use disk::{DiskControl, DiskCopy};
pub use faults::{Bad, BadOps, BadUntil, DiskFaults, DiskSetup, HostFaults, Latency, Unsynced};
pub use host::{Host, HostSetup, Task};
pub use medium::Damage;
pub use net::LinkSetup;
pub use rng::Rng;
pub use trace::{Digest, Trace, content};
pub use world::{Failure, Outcome, Setup, World, run};
