//! Space that volumes use, and free space where they lie.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use api::PoolName;
use engine::{PoolDiskState, PoolReport};
use peer::NodeId;
use records::reconcile::Observed;
use records::record::{StoredVolumeRecord, VolumeRecord};
use uuid::Uuid;

/// Space by file system and pool, for some volumes.
#[derive(Clone, Debug, Default)]
pub struct SpaceUsage {
    /// Bytes that each volume uses, where known: the size of a device, the allocated bytes of a
    /// file.
    pub allocated: HashMap<Uuid, u64>,
    /// File systems with files of them.
    pub file_systems: Vec<FileSystemSpace>,
    /// Open pools.
    pub pools: Vec<PoolSpace>,
    /// Size of the data directory's file system and free space in it, in bytes; `None` if the
    /// kernel does not say.
    pub data_dir: Option<(u64, u64)>,
}

/// A file system with volumes in it.
#[derive(Clone, Debug)]
pub struct FileSystemSpace {
    /// A directory in it, as its name for people.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Free bytes in it.
    pub free: u64,
    /// The volumes in it.
    pub volumes: Vec<Uuid>,
}

/// The space of a pool of disks.
#[derive(Clone, Debug)]
pub struct PoolSpace {
    /// Its name.
    pub name: PoolName,
    /// Its capacity for volumes, in bytes.
    pub bytes: u64,
    /// Free bytes of these.
    pub free: u64,
    /// Whether one of its disks is out: new data is then kept on fewer disks, if they have space.
    pub lacks_disk: bool,
    /// The volumes in it.
    pub volumes: Vec<Uuid>,
}

/// With fewer free bytes, a thin volume cannot grow.
pub(crate) const MIN_FREE_BYTES: u64 = 1 << 20;

impl SpaceUsage {
    /// Whether no space is left where a volume lies.
    pub(crate) fn is_full(&self, volume: Uuid) -> bool {
        let spaces =
            self.file_systems.iter().map(|file_system| (&file_system.volumes, file_system.free));
        let mut spaces = spaces.chain(self.pools.iter().map(|pool| (&pool.volumes, pool.free)));
        spaces.any(|(volumes, free)| free < MIN_FREE_BYTES && volumes.contains(&volume))
    }

    /// Adds the space of pools and of the volumes in them.
    pub fn add_pools(
        &mut self,
        me: NodeId,
        volumes: &[(StoredVolumeRecord, Observed)],
        pools: &BTreeMap<PoolName, PoolReport>,
    ) {
        for (name, report) in pools {
            let within =
                |r: &VolumeRecord| r.placement(me).and_then(|p| p.backing.pool()) == Some(name);
            let within = volumes.iter().map(|(s, _)| &s.record).filter(|r| within(r));
            let volumes: Vec<_> = within.map(|r| r.id).collect();
            let ids: HashSet<_> = volumes.iter().collect();
            let taken = report.volumes.iter().filter(|v| ids.contains(&v.id));
            self.allocated.extend(taken.map(|v| (v.id, v.allocated_bytes)));
            let (bytes, free) = (report.usable_bytes, report.free_bytes);
            let lacks_disk = report.disks.iter().any(|disk| disk.state == PoolDiskState::Detached);
            self.pools.push(PoolSpace { name: name.clone(), bytes, free, lacks_disk, volumes });
        }
    }

    /// What each volume uses, and the free space where it lies. A device belongs to its volume
    /// alone.
    pub fn per_volume(&self) -> HashMap<Uuid, target::VolumeSpace> {
        let spaces =
            self.file_systems.iter().map(|file_system| (&file_system.volumes, file_system.free));
        let spaces = spaces.chain(self.pools.iter().map(|pool| (&pool.volumes, pool.free)));
        let each = spaces.flat_map(|(volumes, free)| volumes.iter().map(move |&id| (id, free)));
        let with_taken = |(id, available)| {
            let used = *self.allocated.get(&id)?;
            Some((id, target::VolumeSpace { used, available }))
        };
        each.filter_map(with_taken).collect()
    }
}
