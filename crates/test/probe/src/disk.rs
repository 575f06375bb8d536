//! The interface that every initiator here offers.

use std::io;

/// A disk behind some protocol. Every call waits for its answer; an error means that the answer is
/// unknown or bad.
pub trait BlockClient {
    /// Bytes of a logical block.
    fn block_bytes(&self) -> usize;
    /// Logical blocks of the disk.
    fn blocks(&self) -> u64;
    /// Fills `into`, whose length is a whole number of blocks.
    fn read(&mut self, lba: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes `data`, a whole number of blocks; with `fua` it is durable when this returns.
    fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> io::Result<()>;
    /// Makes every completed write durable.
    fn flush(&mut self) -> io::Result<()>;
}

/// An error for a peer that broke the protocol.
pub fn protocol_error(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}
