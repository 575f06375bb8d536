//! Space that volumes take.

use std::collections::HashMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use uuid::Uuid;

use crate::reconcile::Observed;
use crate::record::Stored;

/// Bytes that the backings of `volumes` take, where the system tells: all of a device, and of a
/// file what is allocated to it. One trip off the control thread for all of them.
pub(super) async fn taken(volumes: &[(Stored, Observed)]) -> HashMap<Uuid, u64> {
    let backings: Vec<_> = (volumes.iter())
        .map(|(s, _)| (s.record.id, s.record.backing.path().to_owned(), s.record.size_bytes))
        .collect();
    let look = move || {
        let taken = backings
            .into_iter()
            .filter_map(|(id, path, bytes)| Some((id, taken_by(&path, bytes)?)));
        taken.collect()
    };
    tokio::task::spawn_blocking(look).await.unwrap_or_default()
}

fn taken_by(path: &Path, size_bytes: u64) -> Option<u64> {
    let found = std::fs::metadata(path).ok()?;
    if found.file_type().is_block_device() {
        return Some(size_bytes);
    }
    // `st_blocks` counts 512 bytes each, whatever the file system's blocks are.
    found.blocks().checked_mul(512)
}
