//! Reserves the memory that a pool or device holds while it is open.

use std::time::Duration;

use rt::buf::{Account, Credit, MemoryClass};

use crate::Error;

/// How long to wait for memory that a closing pool has not freed yet.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Reserves `bytes` of memory for as long as a pool is open.
///
/// # Errors
/// [`Error::NoSpace`] if the core has too little memory left.
pub async fn reserve_memory(account: &Account, bytes: usize) -> Result<Credit, Error> {
    let credit =
        tokio::time::timeout(RESERVE_TIMEOUT, account.credit(bytes, MemoryClass::Pinned)).await;
    if let Ok(Ok(credit)) = credit {
        return Ok(credit);
    }
    let free = account.buffer_pool().usage().free;
    tracing::error!(
        wanted = bytes,
        free,
        "the core has too little memory for a pool of disks: raise cores.memory"
    );
    Err(Error::NoSpace)
}
