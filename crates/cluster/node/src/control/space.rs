//! Space that volumes take, and that is left where they lie.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::PoolName;
use peer::NodeId;
use uuid::Uuid;

use super::Control;
use crate::engine::{PoolDiskState, PoolReport};
use crate::reconcile::Observed;
use crate::record::{Stored, VolumeRecord};

/// What the system tells about the backings of some volumes.
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// Bytes that each takes, where that is known: all of a device, and of a file what is allocated to it.
    pub taken: HashMap<Uuid, u64>,
    /// Where files of them lie.
    pub file_systems: Vec<FileSystem>,
    /// Pools of disks that are open.
    pub pools: Vec<PoolSpace>,
    /// Size of the data directory's file system and free space in it, in bytes; `None` where the
    /// system does not tell.
    pub data_dir: Option<(u64, u64)>,
}

/// A file system with volumes in it.
#[derive(Clone, Debug)]
pub struct FileSystem {
    /// A directory in it by which people know it.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes that are free in it.
    pub free: u64,
    /// The volumes.
    pub volumes: Vec<Uuid>,
}

/// A pool of disks, as volumes may have it.
#[derive(Clone, Debug)]
pub struct PoolSpace {
    /// Its name.
    pub name: PoolName,
    /// Bytes that volumes may have.
    pub bytes: u64,
    /// Those of them that are free.
    pub free: u64,
    /// Whether a disk of it is out: what is new is kept on fewer disks then, if there is room on those.
    pub lacks_disk: bool,
    /// The volumes.
    pub volumes: Vec<Uuid>,
}

/// Bytes below which nothing is left that a thin volume could take.
pub(super) const FULL: u64 = 1 << 20;

/// How often initiators of thin volumes are told of their space.
const TELL_EVERY: Duration = Duration::from_secs(15);

impl Control {
    /// Tells initiators of thin volumes how much space these take and have, for as long as the node
    /// serves.
    pub(super) async fn follow_space(self) {
        loop {
            tokio::time::sleep(TELL_EVERY).await;
            self.tell_space(self.0.state.all()).await;
        }
    }

    /// The same of one volume, at once.
    pub(super) async fn tell_space_of(&self, id: Uuid) {
        self.tell_space(self.0.state.get(id).into_iter().collect()).await;
    }

    async fn tell_space(&self, mut volumes: Vec<(Stored, Observed)>) {
        volumes.retain(|(s, o)| s.record.thin && matches!(o, Observed::Open { .. }));
        if volumes.is_empty() {
            return;
        }
        let space = self.space_of(&volumes).await;
        self.0.engine.tell_space(space.of_each()).await;
    }
}

impl Control {
    /// The space that volumes take and have.
    pub(super) async fn space_of(&self, volumes: &[(Stored, Observed)]) -> Space {
        let look = look(self.me(), volumes, &self.0.settings.data_dir);
        let (mut space, pools) = tokio::join!(look, self.0.engine.pool_reports());
        space.add_pools(self.me(), volumes, &pools);
        space
    }
}

impl Space {
    /// Whether nothing is left where a volume lies.
    pub(super) fn is_full(&self, volume: Uuid) -> bool {
        let homes = self.file_systems.iter().map(|home| (&home.volumes, home.free));
        let mut homes = homes.chain(self.pools.iter().map(|pool| (&pool.volumes, pool.free)));
        homes.any(|(volumes, free)| free < FULL && volumes.contains(&volume))
    }

    /// Adds what volumes take of pools, and what is left there.
    fn add_pools(
        &mut self,
        me: NodeId,
        volumes: &[(Stored, Observed)],
        pools: &BTreeMap<PoolName, PoolReport>,
    ) {
        for (name, report) in pools {
            let within =
                |r: &VolumeRecord| r.place(me).and_then(|p| p.backing.pool()) == Some(name);
            let within = volumes.iter().map(|(s, _)| &s.record).filter(|r| within(r));
            let volumes: Vec<_> = within.map(|r| r.id).collect();
            let ids: HashSet<_> = volumes.iter().collect();
            let taken = report.volumes.iter().filter(|v| ids.contains(&v.id));
            self.taken.extend(taken.map(|v| (v.id, v.allocated_bytes)));
            let (bytes, free) = (report.usable_bytes, report.free_bytes);
            let lacks_disk = report.disks.iter().any(|disk| disk.state == PoolDiskState::Out);
            self.pools.push(PoolSpace { name: name.clone(), bytes, free, lacks_disk, volumes });
        }
    }

    /// What each volume takes of its file system or pool and finds there. A device is its volume's alone.
    fn of_each(&self) -> HashMap<Uuid, target::Space> {
        let homes = self.file_systems.iter().map(|home| (&home.volumes, home.free));
        let homes = homes.chain(self.pools.iter().map(|pool| (&pool.volumes, pool.free)));
        let each = homes.flat_map(|(volumes, free)| volumes.iter().map(move |&id| (id, free)));
        let with_taken = |(id, available)| {
            let used = *self.taken.get(&id)?;
            Some((id, target::Space { used, available }))
        };
        each.filter_map(with_taken).collect()
    }
}

/// Looks at the backings of `volumes`. One trip off the control thread for all of them.
pub(super) async fn look(me: NodeId, volumes: &[(Stored, Observed)], data_dir: &Path) -> Space {
    let data_dir = data_dir.to_owned();
    let backings: Vec<_> = (volumes.iter())
        .filter_map(|(Stored { record: r, .. }, _)| {
            Some((r.id, r.place(me)?.backing.path()?.to_owned(), r.size_bytes))
        })
        .collect();
    let look = move || {
        let mut space = Space { data_dir: size_and_free(&data_dir), ..Space::default() };
        let mut homes = BTreeMap::<u64, FileSystem>::new();
        for (id, path, bytes) in backings {
            let Ok(found) = std::fs::metadata(&path) else { continue };
            space.taken.extend(taken_by(&found, bytes).map(|taken| (id, taken)));
            if found.is_file()
                && let Some(home) = home(&mut homes, &found, &path, &data_dir)
            {
                home.volumes.push(id);
            }
        }
        space.file_systems = homes.into_values().collect();
        space
    };
    tokio::task::spawn_blocking(look).await.unwrap_or_default()
}

fn taken_by(found: &Metadata, size_bytes: u64) -> Option<u64> {
    if found.file_type().is_block_device() {
        return Some(size_bytes);
    }
    // `st_blocks` counts 512 bytes each, whatever the file system's blocks are.
    found.blocks().checked_mul(512)
}

/// The file system of the file at `path`.
fn home<'a>(
    homes: &'a mut BTreeMap<u64, FileSystem>,
    found: &Metadata,
    path: &Path,
    data_dir: &Path,
) -> Option<&'a mut FileSystem> {
    match homes.entry(found.dev()) {
        Entry::Occupied(known) => Some(known.into_mut()),
        Entry::Vacant(vacant) => {
            let (bytes, free) = size_and_free(path)?;
            let in_data_dir = std::fs::metadata(data_dir).is_ok_and(|d| d.dev() == found.dev());
            let known_by = if in_data_dir { data_dir } else { path.parent()? };
            Some(vacant.insert(FileSystem {
                path: known_by.to_owned(),
                bytes,
                free,
                volumes: Vec::new(),
            }))
        }
    }
}

/// Of the file system of `path`, in bytes.
fn size_and_free(path: &Path) -> Option<(u64, u64)> {
    let space = rustix::fs::statvfs(path).ok()?;
    let bytes = |blocks| space.f_frsize.saturating_mul(blocks);
    Some((bytes(space.f_blocks), bytes(space.f_bavail)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::meta::Revision;
    use crate::record::FIRST_NODE;
    use crate::record::tests::record;
    use api::Backing;

    fn volume(name: &str, path: &Path) -> (Stored, Observed) {
        let mut record = record(name);
        record.id = Uuid::new_v4();
        record.places[0].backing = Backing::File { path: path.to_owned() };
        (Stored { record, revision: Revision(1) }, Observed::Closed)
    }

    /// Files beside the data directory count where they lie; what is not there counts nowhere.
    #[tokio::test]
    async fn every_file_system_with_volumes_is_looked_at() {
        let (here, memory) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        let paths = [here.path().join("a"), here.path().join("b"), memory.path().join("c")];
        paths.iter().for_each(|path| std::fs::write(path, [1; 8192]).unwrap());
        let mut volumes: Vec<_> = paths.iter().map(|path| volume("v", path)).collect();
        volumes.push(volume("gone", Path::new("/nowhere/v")));
        let space = look(FIRST_NODE, &volumes, here.path()).await;
        assert_eq!(space.taken.len(), 3);
        assert!(space.taken.values().all(|&taken| taken >= 8192), "{space:?}");
        let found: BTreeSet<_> =
            space.file_systems.iter().map(|f| (f.path.clone(), f.volumes.len())).collect();
        let expected = [(here.path().to_owned(), 2), (memory.path().to_owned(), 1)];
        assert_eq!(found, expected.into());
        assert!(space.file_systems.iter().all(|f| f.free <= f.bytes && f.bytes > 0), "{space:?}");
        let each = space.of_each();
        assert_eq!(each.len(), 3, "{each:?}");
        assert!(each.values().all(|s| s.used >= 8192 && s.available > 0), "{each:?}");
    }

    #[test]
    fn volumes_of_a_pool_share_what_is_free_in_it() {
        let tank: PoolName = "tank".parse().unwrap();
        let report = crate::control::pool_view::tests::report("tank");
        let mut within = volume("a", Path::new("/a"));
        within.0.record.id = report.volumes[0].id;
        within.0.record.places[0].backing = Backing::Pool { pool: tank.clone() };
        let mut space = Space::default();
        let volumes = [within, volume("b", Path::new("/b"))];
        space.add_pools(FIRST_NODE, &volumes, &[(tank, report.clone())].into());
        let each = space.of_each();
        let id = report.volumes[0].id;
        assert_eq!((each.len(), space.pools[0].volumes.as_slice()), (1, &[id][..]));
        assert_eq!((each[&id].used, each[&id].available), (1 << 29, report.free_bytes));
    }
}
