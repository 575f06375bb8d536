//! The layers of a storage stack.

pub mod file;
pub mod mirror;
mod seal;
