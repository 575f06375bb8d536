//! Reads and writes plain bytes on disks, for scenarios that are not about buffers.

use rt::Core;
use rt::buf::{Bufs, BufsMut, Credit, MemoryClass, copy_in};
use rt::disk::{Disk, DiskError};

/// Allocates memory of the core's pool for one transfer.
fn credit(core: &Core, bytes: usize) -> Credit {
    let account = core.buffer_pool().account();
    account.try_credit(bytes, MemoryClass::LocalIo).expect("a scenario's pool is large enough")
}

/// Reads `len` bytes.
///
/// # Errors
/// What the disk reports.
pub(crate) async fn read(
    core: &Core,
    disk: &Disk,
    at: u64,
    len: usize,
) -> Result<Vec<u8>, DiskError> {
    let into: BufsMut = credit(core, len).alloc(len);
    let bufs: Bufs = disk.read(at, into).await?.into();
    Ok(bufs.to_vec())
}

/// Writes `bytes`.
///
/// # Errors
/// What the disk reports.
pub(crate) async fn write(
    core: &Core,
    disk: &Disk,
    at: u64,
    bytes: &[u8],
) -> Result<(), DiskError> {
    let data = copy_in(&credit(core, bytes.len()), bytes);
    disk.write(at, data).await
}
