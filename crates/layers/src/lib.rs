//! The layers of a storage stack.

pub mod file;
pub mod mirror;
mod overlay;
pub mod pool;
pub mod raid;
mod seal;
mod units;
