//! The deterministic simulator: the system behind [`crate::Core`] in tests.
//!
//! A [`World`] is built from a seed. It has hosts ([`Host`]) with disks and software, a network
//! between them, and virtual time that stands still while anything can run. A scenario runs in it:
//! it starts hosts, gives them work, cuts their power, cuts links, and finally checks the result.
//! The same seed gives the same world, event by event; [`ScenarioOutcome::digest`] verifies that.
//!
//! # What is simulated
//! * Disks ([`DiskSetup`], [`DiskFaults`], [`DiskControl`]): a volatile cache whose unsynced
//!   changes are each kept or lost at power loss; errors, stalls, bit rot, misdirected and lost
//!   writes, failed syncs, full file systems.
//! * TCP ([`LinkSetup`]): portions of any size, delay, cut links, resets, silence.
//! * Crashes: [`Host::power_cut`] and [`Host::kill`]; processes that are stopped and continue
//!   ([`Host::pause`]).
//! * Clocks: each host has its own since its boot ([`crate::Core::now`]), with its own rate
//!   ([`HostSetup::clock_drift_ppm`], [`Host::set_clock_drift`]). [`HostFaults`] makes pauses and
//!   changes of the rate happen at random.
//!
//! # Rules for code that runs here
//! Nothing may depend on anything but the seed:
//! * time is `tokio::time`, or for leases the core's clock; randomness is
//!   [`crate::Core::random_u64`]; disks and connections come from the core; tasks are
//!   `spawn_local`;
//! * `tokio::select!` is `biased` (otherwise tokio draws the branch order from the system), and a
//!   `tokio::sync::watch` channel has one receiver (it wakes several in an order of its own);
//! * maps whose order matters are `BTreeMap`, or hash maps with a fixed hasher (`rustc_hash`);
//!   memory addresses decide nothing.

mod clock;
pub(crate) mod core;
mod device;
pub(crate) mod disk;
pub(crate) mod event_queue;
mod faults;
mod host;
mod host_fault_state;
mod host_faults;
mod host_run;
mod host_state;
mod machine;
mod medium;
pub(crate) mod net;
mod panics;
mod pause;
mod process_pause;
mod range_set;
mod rng;
mod trace;
mod world;
mod world_state;

pub(crate) use self::core::SimCore;
pub use self::core::WORLD_START;
pub use device::ScriptedFault;
pub use disk::{DiskControl, DiskImage};
pub use faults::{
    BadDuration, BadRange, DiskFaults, DiskSetup, FailingOps, HostFaults, Latency, UnsyncedFate,
};
pub use host::{Host, HostTask};
pub use host_state::HostSetup;
pub use medium::TornDamage;
pub use net::LinkSetup;
pub use rng::Rng;
pub use trace::{Trace, TraceDigest, content_hash};
pub use world::{ScenarioFailure, ScenarioOutcome, World, WorldSetup, run};
