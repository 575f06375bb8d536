//! Records of volumes in the store.
//!
//! `volumes/ID` holds a volume's record, `names/NAME` the id of the volume of that name. One commit
//! writes both, so a name belongs to one volume and a volume has its name. The
//! [`ReplicaPlacement`]s of a record name the nodes of its replicas (RFD 0012, 2.4).

mod chap;
pub mod dhchap;
mod host_secret;
pub mod image_description;
mod json;
pub mod lun_mapping;
mod secrets;
pub mod tls;

use std::collections::{BTreeMap, BTreeSet};

use api::{Backing, BlockSize, Initiator, Protocols, VolumeName};
use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub use chap::{ChapContext, StoredChap};
pub use dhchap::StoredDhchap;
pub use host_secret::HostSecretContext;
pub(crate) use json::required_option;
pub use lun_mapping::LunMapping;
pub use secrets::VolumeAuthMethod;
pub use tls::StoredTls;

use cluster::store::{Change, Entry, Precondition, Revision, StoreError};

/// The identity of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// Its own id.
    pub id: Uuid,
    /// Size of the volume in it, in bytes.
    pub size_bytes: u64,
    /// Generation of its label; raised with every change of it.
    pub generation: u64,
}

/// Key prefix of volume records.
pub const VOLUMES: &str = "volumes/";

/// Key prefix of volume names.
pub const NAMES: &str = "names/";

/// Most replicas of one volume, those being added or removed included.
pub const MAX_PLACEMENTS: usize = mirror::config::MAX_REPLICAS;

/// Most replicas that a volume may want.
pub const MAX_REPLICAS_WANTED: u8 = 3;

/// The number of a standalone node, and of the node that creates a cluster.
pub const FIRST_NODE: NodeId = NodeId(1);

/// Stage of a volume's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeStage {
    /// Requested; its images may exist or not. Not acknowledged yet: after a crash it is rolled
    /// back.
    Creating,
    /// It exists.
    Ready,
    /// Being deleted; its images may exist or not. Continues after a crash.
    Deleting,
}

/// Stage of a replica's life (RFD 0012, 2.4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is", deny_unknown_fields)]
pub enum PlacementStage {
    /// Requested; its image may exist or not.
    #[serde(rename = "wanted")]
    Creating {
        /// Whether to overwrite what the file or device holds.
        force: bool,
    },
    /// Its image exists.
    #[serde(rename = "made")]
    Ready,
    /// Its image exists, but a replica on another node replaced it while its node was down. It
    /// stays until it is in sync, because its contents are known then (RFD 0039).
    Superseded,
    /// Being removed; its image may exist or not.
    #[serde(rename = "leaving")]
    Removing {
        /// The node whose replica replaces it; it stays until that one is in sync.
        #[serde(with = "json::node")]
        #[serde(rename = "instead_of")]
        replaced_by: Option<NodeId>,
    },
    /// Creating its image failed.
    Failed {
        /// Why not.
        reason: String,
    },
}

impl PlacementStage {
    /// Whether its image exists and its node should open it.
    #[must_use]
    pub fn should_be_open(&self) -> bool {
        matches!(self, Self::Ready | Self::Superseded)
    }

    /// Whether its image exists or may exist.
    #[must_use]
    pub fn has_image(&self) -> bool {
        self.should_be_open() || matches!(self, Self::Removing { .. })
    }
}

/// A replica that is being created in place of a missing one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PendingRepair {
    /// The node of the new replica.
    #[serde(with = "json::number")]
    pub node: NodeId,
    /// The down node whose replica it replaces, if there was one.
    #[serde(with = "json::node")]
    #[serde(rename = "instead_of")]
    pub replaces: Option<NodeId>,
    /// Start, in seconds since the Unix epoch.
    pub since_s: u64,
}

/// Where one replica of a volume lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaPlacement {
    /// Its node.
    pub node: NodeId,
    /// The file, device or pool there.
    pub backing: Backing,
    /// The image's id, once the image has been created and read.
    pub image: Option<Uuid>,
    /// Generation of the image's label when it was last read; an older one is a copy from the past.
    pub image_generation: u64,
    /// Its stage.
    pub stage: PlacementStage,
}

/// The process that creates a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeProcess {
    /// Its node.
    pub node: NodeId,
    /// The id that the process chose when it started.
    pub process: Uuid,
}

/// A volume, as the store holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "json::VolumeRecordJson", into = "json::VolumeRecordJson")]
pub struct VolumeRecord {
    /// Its identity.
    pub id: Uuid,
    /// Its name.
    pub name: VolumeName,
    /// Its stage.
    pub stage: VolumeStage,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Size of a logical block.
    pub block_size: BlockSize,
    /// Whether space is allocated on write.
    pub thin: bool,
    /// Its replicas, by node; at most [`MAX_PLACEMENTS`], and at least one until the last one has
    /// been removed.
    pub placements: Vec<ReplicaPlacement>,
    /// How many replicas it is to have, 1 to [`MAX_REPLICAS_WANTED`]; failures of nodes do not
    /// change this (RFD 0039).
    pub replicas_wanted: u8,
    /// The replica being created in place of a missing one; one at a time.
    pub repair: Option<PendingRepair>,
    /// The process that creates it, while it is being created.
    pub creator: Option<NodeProcess>,
    /// The node that an operator wants as primary while it is in sync.
    pub preferred_primary: Option<NodeId>,
    /// Protocols that export it.
    pub protocols: Protocols,
    /// Its own iSCSI target name, whether exported or not.
    pub iscsi_target: String,
    /// Its LUN, the target that it belongs to, and the volumes that share its own target.
    pub mapping: LunMapping,
    /// Its own NVMe subsystem name, whether exported or not.
    pub nvme_subsystem: String,
    /// The initiators that may connect to it.
    pub allow: BTreeSet<Initiator>,
    /// The CHAP credentials that iSCSI initiators must prove.
    pub chap: Option<StoredChap>,
    /// Those that single initiators must prove instead, by name.
    pub chap_by_initiator: BTreeMap<String, StoredChap>,
    /// The secrets that NVMe hosts must prove, by name; other hosts prove nothing.
    pub dhchap_by_host: BTreeMap<String, StoredDhchap>,
    /// TLS keys of NVMe hosts that may or must use TLS, by name.
    pub tls_by_host: BTreeMap<String, StoredTls>,
    /// When it was created, in seconds since the Unix epoch.
    pub created_s: u64,
}

/// A record and the commit that wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredVolumeRecord {
    /// The record.
    pub record: VolumeRecord,
    /// The commit.
    pub revision: Revision,
}

/// Key of a volume's record.
#[must_use]
pub fn volume_key(id: Uuid) -> String {
    format!("{VOLUMES}{id}")
}

/// The volume id in a key made by [`volume_key`].
#[must_use]
pub fn volume_of_key(key: &str) -> Option<Uuid> {
    key.strip_prefix(VOLUMES)?.parse().ok()
}

/// Key of a name.
#[must_use]
pub fn name_key(name: &VolumeName) -> String {
    format!("{NAMES}{name}")
}

/// The volume id in a name's entry.
///
/// # Errors
/// [`StoreError::Damaged`].
pub fn decode_name(entry: &Entry) -> Result<Uuid, StoreError> {
    let bytes = <[u8; 16]>::try_from(entry.contents()?);
    bytes.map(Uuid::from_bytes).map_err(|_| damaged_entry(entry, "16 bytes were expected"))
}

/// The record in a volume's entry.
///
/// # Errors
/// [`StoreError::Damaged`].
pub fn decode(entry: &Entry) -> Result<StoredVolumeRecord, StoreError> {
    let contents = entry.contents()?;
    let record = serde_json::from_slice::<VolumeRecord>(contents)
        .map_err(|e| damaged_entry(entry, &e.to_string()))?;
    if record.encode() != contents {
        return Err(damaged_entry(entry, "it has an unknown or duplicate field"));
    }
    if entry.key != volume_key(record.id) {
        return Err(damaged_entry(entry, "it is the record of another volume"));
    }
    Ok(StoredVolumeRecord { record, revision: entry.revision })
}

fn damaged_entry(entry: &Entry, why: &str) -> StoreError {
    StoreError::Damaged { path: entry.key.clone(), why: why.to_owned() }
}

impl VolumeRecord {
    /// The replica on `node`.
    #[must_use]
    pub fn placement(&self, node: NodeId) -> Option<&ReplicaPlacement> {
        self.placements.iter().find(|p| p.node == node)
    }

    /// Whether the volume exists, and its replica on `node` too, if it has one there.
    #[must_use]
    pub fn is_ready_on(&self, node: NodeId) -> bool {
        let is_ready =
            self.placement(node).is_none_or(|placement| placement.stage.should_be_open());
        self.stage == VolumeStage::Ready && is_ready
    }

    /// The replica on `node`, to be changed.
    pub fn placement_mut(&mut self, node: NodeId) -> Option<&mut ReplicaPlacement> {
        self.placements.iter_mut().find(|p| p.node == node)
    }

    /// Adds a replica; placements stay sorted by node.
    pub fn add_placement(&mut self, placement: ReplicaPlacement) {
        let at = self.placements.partition_point(|p| p.node < placement.node);
        self.placements.insert(at, placement);
    }

    /// Removes the replica on `node`. A replica that it was to replace stays.
    pub fn remove_placement(&mut self, node: NodeId) {
        self.placements.retain(|placement| placement.node != node);
        self.cancel_replacement_by(node);
    }

    /// Marks the replica on `node` for removal. A replica that it was to replace stays.
    pub fn mark_for_removal(&mut self, node: NodeId) {
        match self.placement_mut(node) {
            // It has no image.
            Some(ReplicaPlacement { stage: PlacementStage::Failed { .. }, .. }) => {
                self.remove_placement(node);
            }
            Some(placement) => {
                placement.stage = PlacementStage::Removing { replaced_by: None };
                self.cancel_replacement_by(node);
            }
            None => {}
        }
    }

    /// Keeps the replica that was to be removed once the one on `node` was in sync.
    fn cancel_replacement_by(&mut self, node: NodeId) {
        for placement in &mut self.placements {
            if placement.stage == (PlacementStage::Removing { replaced_by: Some(node) }) {
                placement.stage = PlacementStage::Ready;
            }
        }
    }

    /// The replicas that count: existing or being created, and not being removed.
    pub fn current_placements(&self) -> impl Iterator<Item = &ReplicaPlacement> {
        self.placements
            .iter()
            .filter(|p| matches!(p.stage, PlacementStage::Creating { .. } | PlacementStage::Ready))
    }

    /// Raises the wanted number to the current one, after an administrator added or replaced a
    /// replica.
    pub fn raise_replicas_wanted(&mut self) {
        self.replicas_wanted = self.replicas_wanted.max(self.current_placement_count());
    }

    /// Lowers the wanted number to the current one, after an administrator removed a replica.
    pub fn lower_replicas_wanted(&mut self) {
        self.replicas_wanted = self.replicas_wanted.min(self.current_placement_count().max(1));
    }

    fn current_placement_count(&self) -> u8 {
        u8::try_from(self.current_placements().count())
            .unwrap_or(MAX_REPLICAS_WANTED)
            .min(MAX_REPLICAS_WANTED)
    }

    /// Records what `node` has read of its image.
    pub fn record_image(&mut self, node: NodeId, image: ImageInfo) {
        self.size_bytes = image.size_bytes;
        if let Some(placement) = self.placement_mut(node) {
            placement.image = Some(image.id);
            placement.image_generation = image.generation;
        }
    }

    /// The record as the store holds it.
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("names, numbers and lists always serialise")
    }

    /// The changes that insert a new volume into the store.
    #[must_use]
    pub fn insert_changes(&self) -> Vec<Change> {
        vec![
            Change {
                key: name_key(&self.name),
                precondition: Precondition::Absent,
                value: Some(self.id.as_bytes().to_vec()),
            },
            Change {
                key: volume_key(self.id),
                precondition: Precondition::Absent,
                value: Some(self.encode()),
            },
        ]
    }

    /// The changes that replace the record written at revision `at` by this one.
    #[must_use]
    pub fn replace_changes(&self, at: Revision) -> Vec<Change> {
        vec![Change {
            key: volume_key(self.id),
            precondition: Precondition::AtRevision(at),
            value: Some(self.encode()),
        }]
    }

    /// The changes that remove the record written at revision `at`, and the name written at `name`.
    #[must_use]
    pub fn remove_changes(&self, at: Revision, name: Revision) -> Vec<Change> {
        vec![
            Change {
                key: name_key(&self.name),
                precondition: Precondition::AtRevision(name),
                value: None,
            },
            Change {
                key: volume_key(self.id),
                precondition: Precondition::AtRevision(at),
                value: None,
            },
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{HOST, KEYS, dhchap, entry, place, record, ring, tls};

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let old = r#"{"user":"u","secret":"0123456789ab","mutual":null}"#;
        let record = VolumeRecord {
            chap: serde_json::from_str(old).unwrap(),
            allow: ["any".parse().unwrap()].into(),
            ..record("v")
        };
        let stored = decode(&entry(&record)).unwrap();
        assert_eq!(stored, StoredVolumeRecord { record: record.clone(), revision: Revision(7) });
        assert!(!format!("{stored:?}").contains("0123456789ab"), "secrets stay out of logs");
        assert_eq!(volume_of_key(&volume_key(record.id)), Some(record.id));
        assert_eq!(volume_of_key("volumes/x"), None);
    }

    #[test]
    fn only_administrators_change_how_many_copies_a_volume_is_to_have() {
        let [a, b, c] = [1, 2, 3].map(NodeId);
        let mut record = record("v");
        record.add_placement(place(b, "v"));
        record.raise_replicas_wanted();
        assert_eq!(record.replicas_wanted, 2);
        // Its node is removed, and one that is added becomes the second again.
        record.remove_placement(b);
        record.add_placement(place(c, "v"));
        record.raise_replicas_wanted();
        assert_eq!(record.replicas_wanted, 2);
        // A superseded replica does not count.
        record
            .add_placement(ReplicaPlacement { stage: PlacementStage::Superseded, ..place(b, "v") });
        record.mark_for_removal(b);
        record.lower_replicas_wanted();
        assert_eq!(record.replicas_wanted, 2);
        record.mark_for_removal(c);
        record.lower_replicas_wanted();
        assert_eq!((record.replicas_wanted, record.current_placements().count()), (1, 1));
        assert_eq!(record.current_placements().next().map(|p| p.node), Some(a));
    }

    #[test]
    fn a_copy_that_was_to_move_stays_where_it_is_when_the_new_one_goes() {
        let [b, c] = [2, 3].map(NodeId);
        let moving = || {
            let mut record = record("v");
            let stage = PlacementStage::Removing { replaced_by: Some(c) };
            record.add_placement(ReplicaPlacement { stage, ..place(b, "v") });
            record.add_placement(place(c, "v"));
            record
        };
        let ways: [fn(&mut VolumeRecord, NodeId); 2] =
            [VolumeRecord::remove_placement, VolumeRecord::mark_for_removal];
        for goes in ways {
            let mut record = moving();
            goes(&mut record, c);
            assert_eq!(record.placement(b).unwrap().stage, PlacementStage::Ready);
        }
    }

    /// A record as it is written, without the line breaks of this source.
    fn written(text: &str) -> String {
        text.split_inclusive([',', '{', '[']).map(str::trim_start).collect()
    }

    fn read(text: &str) -> Result<VolumeRecord, StoreError> {
        let key = "volumes/3d813cbb-47fb-32ba-91df-831e1593ac29";
        decode(&Entry::new(key, text, Revision(1))).map(|stored| stored.record)
    }

    /// Later versions must read what this version writes.
    #[test]
    fn the_golden_record_reads() {
        let golden = written(
            r#"{"id":"3d813cbb-47fb-32ba-91df-831e1593ac29","name":"web","stage":"ready",
            "size_bytes":1073741824,"block_size":4096,"thin":false,
            "places":[{"node":1,"backing":{"kind":"device","path":"/dev/sdb"},"image":null,
                "image_generation":2,"stage":{"is":"made"}}],"copies_wanted":1,"repair":null,"creator":null,"prefer":null,
            "protocols":{"iscsi":true,"nvme":false,"vhost_user":false,"lun":0,"behind":null,"guests":{},
                "proofs":{},"hosts":{},"tls":{}},
            "iscsi_target":"iqn.2026-01.io.windrose:web","nvme_subsystem":"nqn.2026-01.io.windrose:web",
            "allow":["any","iqn.1993-08.org.debian:01:x","nqn.2014-08.org.nvmexpress:h"],
            "chap":{"user":"u","secret":"0123456789ab","mutual":null},"created_s":1700000000}"#,
        );
        let record = read(&golden).unwrap();
        assert_eq!((record.allow.len(), record.thin), (3, false));
        let backing = Backing::Device { path: "/dev/sdb".into() };
        let (image, stage) = (None, PlacementStage::Ready);
        let only =
            ReplicaPlacement { node: FIRST_NODE, backing, image, image_generation: 2, stage };
        assert_eq!(record.placements, [only]);
    }

    #[test]
    fn the_golden_record_of_a_cluster_reads() {
        let golden = written(
            r#"{"id":"3d813cbb-47fb-32ba-91df-831e1593ac29","name":"web","stage":"creating",
            "size_bytes":1073741824,"block_size":4096,"thin":false,
            "places":[{"node":1,"backing":{"kind":"file","path":"/a"},"image":"00000000-0000-0000-0000-000000000005",
                "image_generation":2,"stage":{"is":"made"}},
                {"node":3,"backing":{"kind":"pool","pool":"tank"},"image":null,"image_generation":0,
                "stage":{"is":"failed","reason":"full"}},
                {"node":4,"backing":{"kind":"file","path":"/c"},"image":null,"image_generation":0,
                "stage":{"is":"leaving","instead_of":3}},
                {"node":5,"backing":{"kind":"file","path":"/d"},"image":null,"image_generation":0,
                "stage":{"is":"wanted","force":false}}],
            "copies_wanted":2,
            "repair":{"node":5,"instead_of":3,"since_s":1700000001},"creator":{"node":1,"life":"00000000-0000-0000-0000-000000000007"},"prefer":3,
            "protocols":{"iscsi":true,"nvme":false,"vhost_user":true,"lun":3,"behind":{
                "volume":"00000000-0000-0000-0000-000000000009","target":"iqn.2026-01.io.windrose:a"},
                "guests":{"7":"00000000-0000-0000-0000-000000000008"},
                "proofs":{"iqn.a":{"user":"u","sealed":"x","mutual":null}},
                "hosts":{"nqn.h":{"host":{"sealed":"x"},"controller":{"sealed":"y"}},
                    "nqn.i":{"host":{"sealed":"z"},"controller":null}},
                "tls":{"nqn.h":{"key":{"sealed":"x"},"required":true},
                    "nqn.i":{"key":{"sealed":"y"},"required":false}}},
            "iscsi_target":"iqn.2026-01.io.windrose:web","nvme_subsystem":"nqn.2026-01.io.windrose:web",
            "allow":[],"chap":null,"created_s":1700000000}"#,
        );
        let record = read(&golden).unwrap();
        assert_eq!(record.placements[0].image, Some(Uuid::from_u128(5)));
        assert_eq!(record.placements[1].stage, PlacementStage::Failed { reason: "full".into() });
        assert_eq!(record.placements[1].backing.pool().unwrap().as_str(), "tank");
        let leaving = PlacementStage::Removing { replaced_by: Some(NodeId(3)) };
        assert_eq!(record.placements[2].stage, leaving);
        assert_eq!(
            record.creator,
            Some(NodeProcess { node: NodeId(1), process: Uuid::from_u128(7) })
        );
        assert_eq!(record.preferred_primary, Some(NodeId(3)));
        assert_eq!((record.target_owner(), record.mapping.lun), (Uuid::from_u128(9), 3));
        assert_eq!(record.target_name(), "iqn.2026-01.io.windrose:a");
        assert_eq!(record.mapping.other_luns, [(7, Uuid::from_u128(8))].into());
        assert_eq!((record.chap_by_initiator.len(), record.has_chap()), (1, true));
        let mutual: Vec<_> = record.dhchap_by_host.values().map(StoredDhchap::is_mutual).collect();
        assert_eq!(mutual, [true, false]);
        let required: Vec<_> = record.tls_by_host.values().map(StoredTls::is_required).collect();
        assert_eq!((required, record.requires_tls()), (vec![true, false], true));
        let refused = |from: &str, to: &str| {
            assert!(golden.contains(from), "{from}");
            read(&golden.replace(from, to)).unwrap_err().to_string()
        };
        assert!(refused(r#""node":3"#, r#""node":1"#).contains("sorted by node"));
        assert!(refused(r#""node":3"#, r#""node":0"#).contains("sorted by node"));
        assert!(refused("tank", "Tank").contains("pool name"));
    }

    /// RFD 0020, 2, and 0022, 3.
    #[test]
    fn secrets_of_hosts_and_keys_of_tls_read_back() {
        let mut guarded = record("v");
        let context = HostSecretContext { volume: guarded.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), context, &ring(1)).unwrap();
        guarded.dhchap_by_host.insert(HOST.into(), sealed);
        let key = StoredTls::seal(&tls(KEYS[0], true), context, &ring(1)).unwrap();
        guarded.tls_by_host.insert(HOST.into(), key);
        let stored = decode(&entry(&guarded)).unwrap().record;
        assert_eq!((&stored, stored.requires_tls()), (&guarded, true));
        let (context, stored_secret) = stored.dhchap_for(HOST).unwrap();
        assert_eq!(stored_secret.open(context, &ring(1)), Ok(dhchap()));
        assert!(stored.dhchap_for("nqn.2014-08.org.nvmexpress:uuid:2").is_none());
        let (context, stored_secret) = stored.tls_keys().next().unwrap();
        assert_eq!(
            (context.host, stored_secret.open(context, &ring(1))),
            (HOST, Ok(tls(KEYS[0], true)))
        );
    }

    #[test]
    fn damaged_records_are_named() {
        let good = entry(&record("v"));
        let bad = Entry { value: b"{}".to_vec(), ..good.clone() };
        assert!(decode(&bad).unwrap_err().to_string().contains(&good.key));
        let swapped = Entry { key: "volumes/other".into(), ..good };
        assert!(decode(&swapped).unwrap_err().to_string().contains("another volume"));
    }
}
