//! The layers of a storage stack.

pub mod file;
mod identity;
pub mod integrity;
pub mod mirror;
pub mod multihost;
mod overlay;
pub mod pool;
pub mod raid;
pub mod raw;
mod seal;
mod units;

pub use multihost::utc;
