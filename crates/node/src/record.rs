//! What the store holds of volumes.
//!
//! `volumes/ID` holds a volume's record, `names/NAME` the identity of the volume of that name.
//! Both are written in one commit, so a name belongs to one volume and a volume has its name.
//! Where the copies of a volume are, its [`Place`]s say (RFD 0012, 2.4).

mod chap;
pub mod dhchap;
pub mod mapping;
mod secrets;
mod text;
pub mod tls;

use std::collections::{BTreeMap, BTreeSet};

use api::{Backing, BlockSize, Initiator, Protocols, VolumeName};
use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub use chap::{Of, StoredChap};
pub use dhchap::{OfHost, StoredDhchap};
pub use mapping::Mapping;
pub use secrets::Method;
pub use tls::StoredTls;

use crate::meta::{Change, Entry, Expect, MetaError, Revision};

/// Where records of volumes are.
pub const VOLUMES: &str = "volumes/";

const NAMES: &str = "names/";

/// Most copies of one volume, those that come and go among them.
pub const MAX_PLACES: usize = layers::mirror::record::MAX_REPLICAS;

/// The number of a node that is in no cluster, and of the one that begins a cluster.
pub const FIRST_NODE: NodeId = NodeId(1);

/// How far the life of a volume has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// It was asked for; its backing may exist or not. Nobody was told that it exists: after a
    /// crash it is taken back.
    Creating,
    /// It exists.
    Ready,
    /// It is to vanish; its backing may exist or not. After a crash that goes on.
    Deleting,
}

/// How far the life of a copy has come (RFD 0012, 2.4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum PlaceStage {
    /// It was asked for; its image may exist or not.
    Wanted {
        /// Whether to overwrite what the file or device holds.
        #[serde(default)]
        force: bool,
    },
    /// Its image exists.
    Made,
    /// It is to vanish; its image may exist or not.
    Leaving {
        /// The node whose copy takes its place: it stays until that one is in sync.
        #[serde(default, skip_serializing_if = "Option::is_none", with = "text::node")]
        instead_of: Option<NodeId>,
    },
    /// Its image could not be made.
    Failed {
        /// Why not.
        reason: String,
    },
}

/// Where one copy of a volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// On which node.
    pub node: NodeId,
    /// In which file or on which device there.
    pub backing: Backing,
    /// The image's own name, once it has been made and seen.
    pub image: Option<Uuid>,
    /// Number of the image's label when it was last seen: an older one is a copy from the past.
    pub image_generation: u64,
    /// How far its life has come.
    pub stage: PlaceStage,
}

/// Who creates a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Creator {
    /// Which node.
    pub node: NodeId,
    /// What its process drew when it started: another one has not begun this.
    pub life: Uuid,
}

/// A volume, as the store holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "text::Text", into = "text::Text")]
pub struct VolumeRecord {
    /// Its identity.
    pub id: Uuid,
    /// Its name.
    pub name: VolumeName,
    /// How far its life has come.
    pub stage: Stage,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Size of a logical block.
    pub block_size: BlockSize,
    /// Whether space is taken when it is written.
    pub thin: bool,
    /// Where its copies are, by node; at most [`MAX_PLACES`], and one at least until the last one
    /// has been removed.
    pub places: Vec<Place>,
    /// Who creates it, while it is being created.
    pub creator: Option<Creator>,
    /// The node that an operator wants to put writes in order, while it is in sync.
    pub prefer: Option<NodeId>,
    /// Protocols that export it.
    pub protocols: Protocols,
    /// Its iSCSI target name, whether exported or not.
    pub iscsi_target: String,
    /// Behind which target it stands, and what stands behind its own.
    pub mapping: Mapping,
    /// Its NVMe subsystem name, whether exported or not.
    pub nvme_subsystem: String,
    /// Who may reach it.
    pub allow: BTreeSet<Initiator>,
    /// What iSCSI initiators must prove.
    pub chap: Option<StoredChap>,
    /// What single ones of them must prove instead, by name.
    pub proofs: BTreeMap<String, StoredChap>,
    /// What NVMe hosts must prove, by name; the others prove nothing.
    pub hosts: BTreeMap<String, StoredDhchap>,
    /// Which NVMe hosts come by TLS, or may, by name.
    pub tls: BTreeMap<String, StoredTls>,
    /// When it was created, in seconds since the Unix epoch.
    pub created_s: u64,
}

/// A record and the commit that wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
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

/// The identity in a key that [`volume_key`] made.
#[must_use]
pub fn volume_of_key(key: &str) -> Option<Uuid> {
    key.strip_prefix(VOLUMES)?.parse().ok()
}

/// Key of a name.
#[must_use]
pub fn name_key(name: &VolumeName) -> String {
    format!("{NAMES}{name}")
}

/// The identity that a name's entry holds.
///
/// # Errors
/// [`MetaError::Failed`] for contents that no version of the program writes.
pub fn decode_name(entry: &Entry) -> Result<Uuid, MetaError> {
    let bytes = <[u8; 16]>::try_from(entry.value.as_slice());
    bytes.map(Uuid::from_bytes).map_err(|_| unreadable(entry, "16 bytes were expected"))
}

/// The record that a volume's entry holds.
///
/// # Errors
/// [`MetaError::Failed`] for contents that no version of the program writes.
pub fn decode(entry: &Entry) -> Result<Stored, MetaError> {
    let record = serde_json::from_slice::<VolumeRecord>(&entry.value)
        .map_err(|e| unreadable(entry, &e.to_string()))?;
    if entry.key != volume_key(record.id) {
        return Err(unreadable(entry, "it is the record of another volume"));
    }
    Ok(Stored { record, revision: entry.revision })
}

fn unreadable(entry: &Entry, why: &str) -> MetaError {
    MetaError::Failed { path: entry.key.clone(), why: format!("the record is damaged: {why}") }
}

impl VolumeRecord {
    /// The copy on `node`.
    #[must_use]
    pub fn place(&self, node: NodeId) -> Option<&Place> {
        self.places.iter().find(|p| p.node == node)
    }

    /// The same, to be changed.
    pub fn place_mut(&mut self, node: NodeId) -> Option<&mut Place> {
        self.places.iter_mut().find(|p| p.node == node)
    }

    /// Adds a copy, in its node's place.
    pub fn add_place(&mut self, place: Place) {
        let at = self.places.partition_point(|p| p.node < place.node);
        self.places.insert(at, place);
    }

    /// What `node` has seen of its image.
    pub fn see(&mut self, node: NodeId, image: crate::engine::Image) {
        self.size_bytes = image.size_bytes;
        if let Some(place) = self.place_mut(node) {
            place.image = Some(image.image);
            place.image_generation = image.generation;
        }
    }

    fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("names, numbers and lists always serialise")
    }

    /// The changes that bring a new volume into the store.
    #[must_use]
    pub fn insert(&self) -> Vec<Change> {
        vec![
            Change {
                key: name_key(&self.name),
                expect: Expect::Absent,
                value: Some(self.id.as_bytes().to_vec()),
            },
            Change { key: volume_key(self.id), expect: Expect::Absent, value: Some(self.encode()) },
        ]
    }

    /// The changes that replace the record that `at` wrote by this one.
    #[must_use]
    pub fn replace(&self, at: Revision) -> Vec<Change> {
        vec![Change {
            key: volume_key(self.id),
            expect: Expect::At(at),
            value: Some(self.encode()),
        }]
    }

    /// The changes that remove the record that `at` wrote, and the name that `name` wrote.
    #[must_use]
    pub fn remove(&self, at: Revision, name: Revision) -> Vec<Change> {
        vec![
            Change { key: name_key(&self.name), expect: Expect::At(name), value: None },
            Change { key: volume_key(self.id), expect: Expect::At(at), value: None },
        ]
    }
}

#[cfg(test)]
pub(crate) mod tests {
    pub(crate) use super::chap::tests::{chap, ring};
    pub(crate) use super::dhchap::tests::{HOST, SECRETS, dhchap, dhchap_of};
    pub(crate) use super::tls::tests::{KEYS, tls};
    use super::*;

    /// A copy that has been made.
    pub(crate) fn place(node: NodeId, name: &str) -> Place {
        Place {
            node,
            backing: Backing::File { path: format!("/v/{name}").into() },
            image: Some(Uuid::from_u128(node.0.into())),
            image_generation: 2,
            stage: PlaceStage::Made,
        }
    }

    /// A volume that is ready.
    pub(crate) fn record(name: &str) -> VolumeRecord {
        VolumeRecord {
            id: Uuid::new_v5(&Uuid::NAMESPACE_DNS, name.as_bytes()),
            name: name.parse().unwrap(),
            stage: Stage::Ready,
            size_bytes: 1 << 30,
            block_size: BlockSize::B512,
            thin: true,
            places: vec![place(FIRST_NODE, name)],
            creator: None,
            prefer: None,
            protocols: Protocols::default(),
            iscsi_target: format!("iqn.2026-01.io.windrose:{name}"),
            mapping: Mapping::default(),
            nvme_subsystem: format!("nqn.2026-01.io.windrose:{name}"),
            allow: BTreeSet::new(),
            chap: None,
            proofs: BTreeMap::new(),
            hosts: BTreeMap::new(),
            tls: BTreeMap::new(),
            created_s: 1_700_000_000,
        }
    }

    /// What the store has of it.
    pub(crate) fn entry(record: &VolumeRecord) -> Entry {
        let revision = Revision(7);
        Entry { key: volume_key(record.id), value: record.encode(), revision }
    }

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        let old = r#"{"user":"u","secret":"0123456789ab","mutual":null}"#;
        let record = VolumeRecord {
            chap: serde_json::from_str(old).unwrap(),
            allow: ["any".parse().unwrap()].into(),
            ..record("v")
        };
        let stored = decode(&entry(&record)).unwrap();
        assert_eq!(stored, Stored { record: record.clone(), revision: Revision(7) });
        assert!(!format!("{stored:?}").contains("0123456789ab"), "secrets stay out of logs");
        assert_eq!(volume_of_key(&volume_key(record.id)), Some(record.id));
        assert_eq!(volume_of_key("volumes/x"), None);
    }

    /// What version 1 wrote, every later one reads.
    #[test]
    fn the_golden_record_reads() {
        let golden = r#"{"id":"3d813cbb-47fb-32ba-91df-831e1593ac29","name":"web","stage":"ready",
            "size_bytes":1073741824,"block_size":4096,"thin":false,
            "backing":{"kind":"device","path":"/dev/sdb"},"image_generation":2,"protocols":{"iscsi":true,"nvme":false},
            "iscsi_target":"iqn.2026-01.io.windrose:web",
            "nvme_subsystem":"nqn.2026-01.io.windrose:web",
            "allow":["any","iqn.1993-08.org.debian:01:x","nqn.2014-08.org.nvmexpress:h"],
            "chap":{"user":"u","secret":"0123456789ab","mutual":null},"created_s":1700000000}"#;
        let entry = Entry {
            key: "volumes/3d813cbb-47fb-32ba-91df-831e1593ac29".into(),
            value: golden.into(),
            revision: Revision(1),
        };
        let record = decode(&entry).unwrap().record;
        assert_eq!((record.allow.len(), record.thin), (3, false));
        let backing = Backing::Device { path: "/dev/sdb".into() };
        let (image, stage) = (None, PlaceStage::Made);
        let only = Place { node: FIRST_NODE, backing, image, image_generation: 2, stage };
        assert_eq!(record.places, [only]);
    }

    /// What version 2 wrote, every later one reads.
    #[test]
    fn the_golden_record_of_a_cluster_reads() {
        let golden = r#"{"id":"3d813cbb-47fb-32ba-91df-831e1593ac29","name":"web","stage":"creating",
            "size_bytes":1073741824,"block_size":4096,"thin":false,
            "places":[{"node":1,"backing":{"kind":"file","path":"/a"},"image":"00000000-0000-0000-0000-000000000005",
                "image_generation":2,"stage":{"is":"made"}},
                {"node":3,"backing":{"kind":"file","path":"/b"},"stage":{"is":"failed","reason":"full"}},
                {"node":4,"backing":{"kind":"file","path":"/c"},"stage":{"is":"leaving","instead_of":3}}],
            "creator":{"node":1,"life":"00000000-0000-0000-0000-000000000007"},"prefer":3,
            "protocols":{"iscsi":true,"nvme":false},
            "iscsi_target":"iqn.2026-01.io.windrose:web","nvme_subsystem":"nqn.2026-01.io.windrose:web",
            "allow":[],"chap":null,"created_s":1700000000}"#;
        let record: VolumeRecord = serde_json::from_str(golden).unwrap();
        let again: VolumeRecord = serde_json::from_slice(&record.encode()).unwrap();
        assert_eq!(again, record);
        assert_eq!(record.places[0].image, Some(Uuid::from_u128(5)));
        assert_eq!(record.places[1].stage, PlaceStage::Failed { reason: "full".into() });
        let leaving = PlaceStage::Leaving { instead_of: Some(NodeId(3)) };
        assert_eq!(record.places[2].stage, leaving);
        assert_eq!(record.creator, Some(Creator { node: NodeId(1), life: Uuid::from_u128(7) }));
        assert_eq!(record.prefer, Some(NodeId(3)));
        let refused = |from: &str, to: &str| {
            assert!(golden.contains(from), "{from}");
            serde_json::from_str::<VolumeRecord>(&golden.replace(from, to)).unwrap_err().to_string()
        };
        assert!(refused(r#""node":3"#, r#""node":1"#).contains("listed by node"));
        assert!(refused(r#""node":3"#, r#""node":0"#).contains("listed by node"));
    }

    /// What a volume in pools of disks looks like, every later version reads. Older ones refuse it by name.
    #[test]
    fn the_golden_record_of_a_volume_in_pools_reads() {
        let golden = r#"{"id":"3d813cbb-47fb-32ba-91df-831e1593ac29","name":"web","stage":"ready",
            "size_bytes":1073741824,"block_size":4096,"thin":true,
            "places":[{"node":1,"backing":{"kind":"pool","pool":"tank"},"image":"00000000-0000-0000-0000-000000000005",
                "image_generation":2,"stage":{"is":"made"}},
                {"node":3,"backing":{"kind":"file","path":"/b"},"image_generation":2,"stage":{"is":"made"}}],
            "protocols":{"iscsi":true,"nvme":false},
            "iscsi_target":"iqn.2026-01.io.windrose:web","nvme_subsystem":"nqn.2026-01.io.windrose:web",
            "allow":[],"chap":null,"created_s":1700000000}"#;
        let record: VolumeRecord = serde_json::from_str(golden).unwrap();
        let pool = record.places[0].backing.pool().unwrap();
        assert_eq!((pool.as_str(), record.places[1].backing.pool()), ("tank", None));
        let again: VolumeRecord = serde_json::from_slice(&record.encode()).unwrap();
        assert_eq!(again, record);
        let odd = golden.replace("tank", "Tank");
        assert!(
            serde_json::from_str::<VolumeRecord>(&odd)
                .unwrap_err()
                .to_string()
                .contains("pool name")
        );
    }

    /// What a volume behind another's target looks like, every later version reads. Older ones refuse it.
    #[test]
    fn the_golden_record_of_a_volume_behind_another_target_reads() {
        let golden = r#"{"id":"3d813cbb-47fb-32ba-91df-831e1593ac29","name":"web","stage":"ready",
            "size_bytes":1073741824,"block_size":4096,"thin":false,
            "places":[{"node":1,"backing":{"kind":"file","path":"/a"},"image_generation":2,"stage":{"is":"made"}}],
            "protocols":{"iscsi":true,"nvme":false,"lun":3,"behind":{
                "volume":"00000000-0000-0000-0000-000000000009","target":"iqn.2026-01.io.windrose:a"},
                "guests":{"7":"00000000-0000-0000-0000-000000000008"}},
            "iscsi_target":"iqn.2026-01.io.windrose:web","nvme_subsystem":"nqn.2026-01.io.windrose:web","allow":[],"chap":null,"created_s":1700000000}"#;
        let guest: VolumeRecord = serde_json::from_str(golden).unwrap();
        assert_eq!((guest.owner(), guest.mapping.lun), (Uuid::from_u128(9), 3));
        assert_eq!(guest.target(), "iqn.2026-01.io.windrose:a");
        assert_eq!(guest.mapping.guests, [(7, Uuid::from_u128(8))].into());
        let text = serde_json::to_value(&guest).unwrap();
        assert_eq!(text["protocols"]["lun"], 3);
        assert!(serde_json::from_value::<Protocols>(text["protocols"].clone()).is_err());
        let again: VolumeRecord = serde_json::from_value(text).unwrap();
        assert_eq!(again, guest);
        let own = r#""lun":3,"proofs":{"iqn.a":{"user":"u","sealed":"x","mutual":null}}"#;
        let guarded: VolumeRecord =
            serde_json::from_str(&golden.replace(r#""lun":3"#, own)).unwrap();
        assert_eq!((guarded.proofs.len(), guarded.has_chap()), (1, true));
        let text = serde_json::to_value(&guarded).unwrap();
        assert_eq!(serde_json::from_value::<VolumeRecord>(text).unwrap(), guarded);
        let hosts = r#""lun":3,"hosts":{"nqn.h":{"host":{"sealed":"x"},"controller":{"sealed":"y"}},
            "nqn.i":{"host":{"sealed":"z"}}}"#;
        let guarded: VolumeRecord =
            serde_json::from_str(&golden.replace(r#""lun":3"#, hosts)).unwrap();
        let mutual: Vec<_> = guarded.hosts.values().map(StoredDhchap::is_mutual).collect();
        assert_eq!((mutual, guarded.has_chap()), (vec![true, false], false));
        let text = serde_json::to_value(&guarded).unwrap();
        assert_eq!(serde_json::from_value::<VolumeRecord>(text).unwrap(), guarded);
        let tls = r#""lun":3,"tls":{"nqn.h":{"key":{"sealed":"x"},"required":true},
            "nqn.i":{"key":{"sealed":"y"},"required":false}}"#;
        let guarded: VolumeRecord =
            serde_json::from_str(&golden.replace(r#""lun":3"#, tls)).unwrap();
        let required: Vec<_> = guarded.tls.values().map(StoredTls::is_required).collect();
        assert_eq!((required, guarded.requires_tls()), (vec![true, false], true));
        let text = serde_json::to_value(&guarded).unwrap();
        assert_eq!(serde_json::from_value::<VolumeRecord>(text).unwrap(), guarded);
        let plain = serde_json::to_value(record("v")).unwrap();
        serde_json::from_value::<Protocols>(plain["protocols"].clone()).unwrap();
        assert!(plain["protocols"].get("guests").is_none(), "a record without is as ever");
    }

    #[test]
    fn a_record_says_that_virtual_machines_use_it_where_they_do() {
        let mut used = record("v");
        let plain = serde_json::to_value(&used).unwrap();
        assert!(plain["protocols"].get("vhost_user").is_none(), "a record without is as ever");
        used.protocols.vhost_user = true;
        let text = serde_json::to_value(&used).unwrap();
        assert_eq!(text["protocols"]["vhost_user"], true);
        assert_eq!(serde_json::from_value::<VolumeRecord>(text).unwrap(), used);
    }

    /// RFD 0020, 2: who does not know of secrets of hosts serves the volume nowhere rather than without the proof.
    #[test]
    fn older_versions_refuse_a_record_with_secrets_of_hosts() {
        let mut guarded = record("v");
        let of = OfHost { volume: guarded.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), of, &ring(1)).unwrap();
        // These are what versions before this one knew of `protocols`.
        let old = |record: &VolumeRecord| {
            let text = serde_json::to_value(record).unwrap();
            serde_json::from_value::<Protocols>(text["protocols"].clone()).is_ok()
        };
        assert!(old(&guarded));
        guarded.hosts.insert(HOST.into(), sealed);
        assert!(!old(&guarded));
        let stored = decode(&entry(&guarded)).unwrap();
        assert_eq!(stored.record, guarded);
        let (of, held) = stored.record.host_proof(HOST).unwrap();
        assert_eq!(held.open(of, &ring(1)), Ok(dhchap()));
        assert!(stored.record.host_proof("nqn.2014-08.org.nvmexpress:uuid:2").is_none());
    }

    /// RFD 0022, 3: nor without TLS, whether it is required or not: it would forget the key when it writes the record.
    #[test]
    fn older_versions_refuse_a_record_with_keys_of_tls() {
        // Versions before this one refuse what they do not know of in `protocols`.
        let old = |record: &VolumeRecord| {
            let text = serde_json::to_value(record).unwrap();
            serde_json::from_value::<Protocols>(text["protocols"].clone()).is_ok()
        };
        for required in [true, false] {
            let mut guarded = record("v");
            assert!(old(&guarded));
            let of = OfHost { volume: guarded.id, host: HOST };
            let sealed = StoredTls::seal(&tls(KEYS[0], required), of, &ring(1)).unwrap();
            guarded.tls.insert(HOST.into(), sealed);
            assert!(!old(&guarded));
            let stored = decode(&entry(&guarded)).unwrap().record;
            assert_eq!((&stored, stored.requires_tls()), (&guarded, required));
            let (of, held) = stored.all_tls().next().unwrap();
            assert_eq!((of.host, held.open(of, &ring(1))), (HOST, Ok(tls(KEYS[0], required))));
        }
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
