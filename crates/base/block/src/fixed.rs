//! Memory that is held for as long as a pool or device is open.

use std::time::Duration;

use rt::buf::{Account, Credit, MemoryClass};

use crate::Error;

/// How long to wait for memory that a closing pool still holds.
const MEMORY_PATIENCE: Duration = Duration::from_secs(10);

/// Memory that is held as long as a pool is open.
///
/// # Errors
/// [`Error::NoSpace`] if the core has no more of it.
pub async fn fixed_credit(account: &Account, bytes: usize) -> Result<Credit, Error> {
    let credit =
        tokio::time::timeout(MEMORY_PATIENCE, account.credit(bytes, MemoryClass::Pinned)).await;
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
