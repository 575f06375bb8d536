//! A load generator in fio's terms, over whatever is a [`block::Layer`]: files and devices of this machine, and volumes
//! elsewhere by our own initiators (`docs/rfd/0024-the-load-generator.md`).
//!
//! ```text
//!  job file, options ──> Job ──> Spec ──> Pattern ──┐
//!                     (job)    (spec)   (pattern)   ├─> Runner ──> Measured ──> table, JSON
//!  URI, path ─────────────────────────> Dev ────────┘  (engine)   (measured)    (report)
//!                                        (open)
//! ```
//!
//! [`job`], [`spec`], [`pattern`], [`verify`] and [`measured`] are pure. [`engine`] runs one job on one core, [`fleet`] all of them.

mod chance;
pub mod engine;
pub mod fleet;
pub mod job;
pub mod measured;
pub mod open;
pub mod pattern;
pub mod report;
pub mod spec;
pub mod units;
pub mod verify;
