//! A load generator in fio's terms for any [`block::Layer`]: local files and devices, and remote
//! volumes through our own initiators (`docs/rfd/0024-the-load-generator.md`).
//!
//! ```text
//!  job file, options ──> Job ──> JobSpec ──> Pattern ──┐
//!                     (job)     (spec)     (pattern)   ├─> JobRunner ──> Measurement ──> text, JSON
//!  URI, path ────────────────────────────> Dev ────────┘    (engine)    (measurement)    (report)
//!                                         (open)
//! ```
//!
//! [`job`], [`spec`], [`pattern`], [`verify`] and [`measurement`] are pure. [`engine`] runs one job
//! on one core, [`benchmark`] all of them.

pub mod benchmark;
pub mod engine;
pub mod job;
pub mod measurement;
pub mod open;
pub mod pattern;
mod random;
pub mod report;
pub mod spec;
pub mod units;
pub mod verify;
