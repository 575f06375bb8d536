//! Measures the space that volumes use, and tells initiators of thin volumes what is left.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use peer::NodeId;
use records::reconcile::Observed;
use records::record::StoredVolumeRecord;
use status::space::{FileSystemSpace, SpaceUsage};
use uuid::Uuid;

use super::VolumeControl;

/// How often initiators of thin volumes are told the free space.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(15);

impl VolumeControl {
    /// Tells initiators of thin volumes how much space these use and have left, for as long as the
    /// node serves.
    pub(crate) async fn publish_space_periodically(self) {
        loop {
            tokio::time::sleep(PUBLISH_INTERVAL).await;
            self.publish_space(self.0.context.volumes.all()).await;
        }
    }

    /// The same for one volume, at once.
    pub(super) async fn publish_space_of(&self, id: Uuid) {
        self.publish_space(self.0.context.volumes.get(id).into_iter().collect()).await;
    }

    async fn publish_space(&self, mut volumes: Vec<(StoredVolumeRecord, Observed)>) {
        volumes.retain(|(s, o)| s.record.thin && matches!(o, Observed::Open { .. }));
        if volumes.is_empty() {
            return;
        }
        let space = self.space_of(&volumes).await;
        self.0.context.engine.publish_space(space.per_volume()).await;
    }
}

impl VolumeControl {
    /// The space of volumes.
    pub(crate) async fn space_of(&self, volumes: &[(StoredVolumeRecord, Observed)]) -> SpaceUsage {
        let look = measure(self.this_node(), volumes, &self.0.context.settings.data_dir);
        let (mut space, pools) = tokio::join!(look, self.0.context.engine.pool_reports());
        space.add_pools(self.this_node(), volumes, &pools);
        space
    }
}

/// Measures the backings of `volumes` in one blocking task.
pub(crate) async fn measure(
    me: NodeId,
    volumes: &[(StoredVolumeRecord, Observed)],
    data_dir: &Path,
) -> SpaceUsage {
    let data_dir = data_dir.to_owned();
    let backings: Vec<_> = (volumes.iter())
        .filter_map(|(StoredVolumeRecord { record: r, .. }, _)| {
            Some((r.id, r.placement(me)?.backing.path()?.to_owned(), r.size_bytes))
        })
        .collect();
    let look = move || {
        let mut space = SpaceUsage { data_dir: size_and_free(&data_dir), ..SpaceUsage::default() };
        let mut file_systems = BTreeMap::<u64, FileSystemSpace>::new();
        for (id, path, bytes) in backings {
            let Ok(found) = std::fs::metadata(&path) else { continue };
            space.allocated.extend(allocated_bytes(&found, bytes).map(|taken| (id, taken)));
            if found.is_file()
                && let Some(file_system) =
                    file_system_of(&mut file_systems, &found, &path, &data_dir)
            {
                file_system.volumes.push(id);
            }
        }
        space.file_systems = file_systems.into_values().collect();
        space
    };
    tokio::task::spawn_blocking(look).await.unwrap_or_default()
}

fn allocated_bytes(found: &Metadata, size_bytes: u64) -> Option<u64> {
    if found.file_type().is_block_device() {
        return Some(size_bytes);
    }
    // `st_blocks` counts units of 512 bytes, whatever the block size of the file system.
    found.blocks().checked_mul(512)
}

/// The file system of the file at `path`.
fn file_system_of<'a>(
    file_systems: &'a mut BTreeMap<u64, FileSystemSpace>,
    found: &Metadata,
    path: &Path,
    data_dir: &Path,
) -> Option<&'a mut FileSystemSpace> {
    match file_systems.entry(found.dev()) {
        Entry::Occupied(known) => Some(known.into_mut()),
        Entry::Vacant(vacant) => {
            let (bytes, free) = size_and_free(path)?;
            let in_data_dir = std::fs::metadata(data_dir).is_ok_and(|d| d.dev() == found.dev());
            let known_by = if in_data_dir { data_dir } else { path.parent()? };
            Some(vacant.insert(FileSystemSpace {
                path: known_by.to_owned(),
                bytes,
                free,
                volumes: Vec::new(),
            }))
        }
    }
}

/// Size and free space of the file system of `path`, in bytes.
fn size_and_free(path: &Path) -> Option<(u64, u64)> {
    let space = rustix::fs::statvfs(path).ok()?;
    let bytes = |blocks| space.f_frsize.saturating_mul(blocks);
    Some((bytes(space.f_blocks), bytes(space.f_bavail)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use api::{Backing, PoolName};
    use cluster::store::Revision;
    use records::record::FIRST_NODE;
    use records::samples::record;

    fn volume(name: &str, path: &Path) -> (StoredVolumeRecord, Observed) {
        let mut record = record(name);
        record.id = Uuid::new_v4();
        record.placements[0].backing = Backing::File { path: path.to_owned() };
        (StoredVolumeRecord { record, revision: Revision(1) }, Observed::Closed)
    }

    /// Files outside the data directory count where they lie; missing files count nowhere.
    #[tokio::test]
    async fn every_file_system_with_volumes_is_looked_at() {
        let (here, memory) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        let paths = [here.path().join("a"), here.path().join("b"), memory.path().join("c")];
        paths.iter().for_each(|path| std::fs::write(path, [1; 8192]).unwrap());
        let mut volumes: Vec<_> = paths.iter().map(|path| volume("v", path)).collect();
        volumes.push(volume("gone", Path::new("/nowhere/v")));
        let space = measure(FIRST_NODE, &volumes, here.path()).await;
        assert_eq!(space.allocated.len(), 3);
        assert!(space.allocated.values().all(|&taken| taken >= 8192), "{space:?}");
        let found: BTreeSet<_> =
            space.file_systems.iter().map(|f| (f.path.clone(), f.volumes.len())).collect();
        let expected = [(here.path().to_owned(), 2), (memory.path().to_owned(), 1)];
        assert_eq!(found, expected.into());
        assert!(space.file_systems.iter().all(|f| f.free <= f.bytes && f.bytes > 0), "{space:?}");
        let each = space.per_volume();
        assert_eq!(each.len(), 3, "{each:?}");
        assert!(each.values().all(|s| s.used >= 8192 && s.available > 0), "{each:?}");
    }

    #[test]
    fn volumes_of_a_pool_share_what_is_free_in_it() {
        let tank: PoolName = "tank".parse().unwrap();
        let report = status::samples::pool_report("tank");
        let mut within = volume("a", Path::new("/a"));
        within.0.record.id = report.volumes[0].id;
        within.0.record.placements[0].backing = Backing::Pool { pool: tank.clone() };
        let mut space = SpaceUsage::default();
        let volumes = [within, volume("b", Path::new("/b"))];
        space.add_pools(FIRST_NODE, &volumes, &[(tank, report.clone())].into());
        let each = space.per_volume();
        let id = report.volumes[0].id;
        assert_eq!((each.len(), space.pools[0].volumes.as_slice()), (1, &[id][..]));
        assert_eq!((each[&id].used, each[&id].available), (1 << 29, report.free_bytes));
    }
}
