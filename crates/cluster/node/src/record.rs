//! What the store holds of volumes.
//!
//! `volumes/ID` holds a volume's record, `names/NAME` the identity of the volume of that name.
//! Both are written in one commit, so a name belongs to one volume and a volume has its name.
//! Where the copies of a volume are, its [`Place`]s say (RFD 0012, 2.4).

mod chap;
pub mod description;
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
pub(crate) use text::present;
pub use tls::StoredTls;

use crate::meta::{Change, Entry, Expect, MetaError, Revision};

/// Where records of volumes are.
pub const VOLUMES: &str = "volumes/";

/// Where names of volumes are.
pub const NAMES: &str = "names/";

/// Most copies of one volume, those that come and go among them.
pub const MAX_PLACES: usize = mirror::record::MAX_REPLICAS;

/// Most copies that a volume may want.
pub const MAX_COPIES: u8 = 3;

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
#[serde(rename_all = "snake_case", tag = "is", deny_unknown_fields)]
pub enum PlaceStage {
    /// It was asked for; its image may exist or not.
    Wanted {
        /// Whether to overwrite what the file or device holds.
        force: bool,
    },
    /// Its image exists.
    Made,
    /// Its image exists, and a copy on another node has taken its place while its node was gone. It stays until it is in
    /// sync: what it holds is known then (RFD 0039).
    Superseded,
    /// It is to vanish; its image may exist or not.
    Leaving {
        /// The node whose copy takes its place: it stays until that one is in sync.
        #[serde(with = "text::node")]
        instead_of: Option<NodeId>,
    },
    /// Its image could not be made.
    Failed {
        /// Why not.
        reason: String,
    },
}

impl PlaceStage {
    /// Whether there is an image, which its node opens.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        matches!(self, Self::Made | Self::Superseded)
    }

    /// Whether there is an image, or may be.
    #[must_use]
    pub fn has_image(&self) -> bool {
        self.is_kept() || matches!(self, Self::Leaving { .. })
    }
}

/// A copy that is made in place of a missing one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repair {
    /// The node that makes it.
    #[serde(with = "text::number")]
    pub node: NodeId,
    /// The node that is gone with the one whose place it takes, if there was one.
    #[serde(with = "text::node")]
    pub instead_of: Option<NodeId>,
    /// Since when, in seconds since the Unix epoch.
    pub since_s: u64,
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
    /// How many copies it is to have, 1 to [`MAX_COPIES`]: what becomes of nodes does not change it (RFD 0039).
    pub copies_wanted: u8,
    /// The copy that is being made in place of a missing one; one at a time.
    pub repair: Option<Repair>,
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
/// [`MetaError::Damaged`].
pub fn decode_name(entry: &Entry) -> Result<Uuid, MetaError> {
    let bytes = <[u8; 16]>::try_from(entry.contents()?);
    bytes.map(Uuid::from_bytes).map_err(|_| unreadable(entry, "16 bytes were expected"))
}

/// The record that a volume's entry holds.
///
/// # Errors
/// [`MetaError::Damaged`].
pub fn decode(entry: &Entry) -> Result<Stored, MetaError> {
    let contents = entry.contents()?;
    let record = serde_json::from_slice::<VolumeRecord>(contents)
        .map_err(|e| unreadable(entry, &e.to_string()))?;
    if record.encode() != contents {
        return Err(unreadable(
            entry,
            "it is not written as a record is: a field is unknown or there twice",
        ));
    }
    if entry.key != volume_key(record.id) {
        return Err(unreadable(entry, "it is the record of another volume"));
    }
    Ok(Stored { record, revision: entry.revision })
}

fn unreadable(entry: &Entry, why: &str) -> MetaError {
    MetaError::Damaged { path: entry.key.clone(), why: why.to_owned() }
}

impl VolumeRecord {
    /// The copy on `node`.
    #[must_use]
    pub fn place(&self, node: NodeId) -> Option<&Place> {
        self.places.iter().find(|p| p.node == node)
    }

    /// Whether the volume exists, and its copy on `node` is made, if that is to have one.
    #[must_use]
    pub fn is_settled(&self, node: NodeId) -> bool {
        let made = self.place(node).is_none_or(|place| place.stage.is_kept());
        self.stage == Stage::Ready && made
    }

    /// The copy on `node`, to be changed.
    pub fn place_mut(&mut self, node: NodeId) -> Option<&mut Place> {
        self.places.iter_mut().find(|p| p.node == node)
    }

    /// Adds a copy, in its node's place.
    pub fn add_place(&mut self, place: Place) {
        let at = self.places.partition_point(|p| p.node < place.node);
        self.places.insert(at, place);
    }

    /// Removes the copy on `node`. One that it was to take the place of stays.
    pub fn remove_place(&mut self, node: NodeId) {
        self.places.retain(|place| place.node != node);
        self.keep_replaced(node);
    }

    /// Has the copy on `node` go. One that it was to take the place of stays.
    pub fn dismiss(&mut self, node: NodeId) {
        match self.place_mut(node) {
            // Nothing is there.
            Some(Place { stage: PlaceStage::Failed { .. }, .. }) => self.remove_place(node),
            Some(place) => {
                place.stage = PlaceStage::Leaving { instead_of: None };
                self.keep_replaced(node);
            }
            None => {}
        }
    }

    /// The copy that was to go once the one on `node` was in sync does not go.
    fn keep_replaced(&mut self, node: NodeId) {
        for place in &mut self.places {
            if place.stage == (PlaceStage::Leaving { instead_of: Some(node) }) {
                place.stage = PlaceStage::Made;
            }
        }
    }

    /// The copies that count: those that are there or are being made, and are not to go.
    pub fn standing(&self) -> impl Iterator<Item = &Place> {
        self.places
            .iter()
            .filter(|p| matches!(p.stage, PlaceStage::Wanted { .. } | PlaceStage::Made))
    }

    /// An administrator has added or replaced a copy: it wants as many as that makes.
    pub fn want_as_added(&mut self) {
        self.copies_wanted = self.copies_wanted.max(self.standing_count());
    }

    /// An administrator has removed a copy: it wants no more than are left.
    pub fn want_as_removed(&mut self) {
        self.copies_wanted = self.copies_wanted.min(self.standing_count().max(1));
    }

    fn standing_count(&self) -> u8 {
        u8::try_from(self.standing().count()).unwrap_or(MAX_COPIES).min(MAX_COPIES)
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
            copies_wanted: 1,
            repair: None,
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
        Entry { key: volume_key(record.id), value: record.encode(), revision, damage: None }
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

    #[test]
    fn only_administrators_change_how_many_copies_a_volume_is_to_have() {
        let [a, b, c] = [1, 2, 3].map(NodeId);
        let mut record = record("v");
        record.add_place(place(b, "v"));
        record.want_as_added();
        assert_eq!(record.copies_wanted, 2);
        // Its node is taken out, and one that is added is the second again.
        record.remove_place(b);
        record.add_place(place(c, "v"));
        record.want_as_added();
        assert_eq!(record.copies_wanted, 2);
        // One that was superseded does not count.
        record.add_place(Place { stage: PlaceStage::Superseded, ..place(b, "v") });
        record.dismiss(b);
        record.want_as_removed();
        assert_eq!(record.copies_wanted, 2);
        record.dismiss(c);
        record.want_as_removed();
        assert_eq!((record.copies_wanted, record.standing().count()), (1, 1));
        assert_eq!(record.standing().next().map(|p| p.node), Some(a));
    }

    #[test]
    fn a_copy_that_was_to_move_stays_where_it_is_when_the_new_one_goes() {
        let [b, c] = [2, 3].map(NodeId);
        let moving = || {
            let mut record = record("v");
            let stage = PlaceStage::Leaving { instead_of: Some(c) };
            record.add_place(Place { stage, ..place(b, "v") });
            record.add_place(place(c, "v"));
            record
        };
        let ways: [fn(&mut VolumeRecord, NodeId); 2] =
            [VolumeRecord::remove_place, VolumeRecord::dismiss];
        for goes in ways {
            let mut record = moving();
            goes(&mut record, c);
            assert_eq!(record.place(b).unwrap().stage, PlaceStage::Made);
        }
    }

    /// A record as it is written, with the blanks of this page.
    fn written(text: &str) -> String {
        text.split_inclusive([',', '{', '[']).map(str::trim_start).collect()
    }

    fn read(text: &str) -> Result<VolumeRecord, MetaError> {
        let key = "volumes/3d813cbb-47fb-32ba-91df-831e1593ac29";
        decode(&Entry::new(key, text, Revision(1))).map(|stored| stored.record)
    }

    /// What this version writes, every later one reads.
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
        let (image, stage) = (None, PlaceStage::Made);
        let only = Place { node: FIRST_NODE, backing, image, image_generation: 2, stage };
        assert_eq!(record.places, [only]);
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
        assert_eq!(record.places[0].image, Some(Uuid::from_u128(5)));
        assert_eq!(record.places[1].stage, PlaceStage::Failed { reason: "full".into() });
        assert_eq!(record.places[1].backing.pool().unwrap().as_str(), "tank");
        let leaving = PlaceStage::Leaving { instead_of: Some(NodeId(3)) };
        assert_eq!(record.places[2].stage, leaving);
        assert_eq!(record.creator, Some(Creator { node: NodeId(1), life: Uuid::from_u128(7) }));
        assert_eq!(record.prefer, Some(NodeId(3)));
        assert_eq!((record.owner(), record.mapping.lun), (Uuid::from_u128(9), 3));
        assert_eq!(record.target(), "iqn.2026-01.io.windrose:a");
        assert_eq!(record.mapping.guests, [(7, Uuid::from_u128(8))].into());
        assert_eq!((record.proofs.len(), record.has_chap()), (1, true));
        let mutual: Vec<_> = record.hosts.values().map(StoredDhchap::is_mutual).collect();
        assert_eq!(mutual, [true, false]);
        let required: Vec<_> = record.tls.values().map(StoredTls::is_required).collect();
        assert_eq!((required, record.requires_tls()), (vec![true, false], true));
        let refused = |from: &str, to: &str| {
            assert!(golden.contains(from), "{from}");
            read(&golden.replace(from, to)).unwrap_err().to_string()
        };
        assert!(refused(r#""node":3"#, r#""node":1"#).contains("listed by node"));
        assert!(refused(r#""node":3"#, r#""node":0"#).contains("listed by node"));
        assert!(refused("tank", "Tank").contains("pool name"));
    }

    /// RFD 0020, 2, and 0022, 3.
    #[test]
    fn secrets_of_hosts_and_keys_of_tls_read_back() {
        let mut guarded = record("v");
        let of = OfHost { volume: guarded.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), of, &ring(1)).unwrap();
        guarded.hosts.insert(HOST.into(), sealed);
        let key = StoredTls::seal(&tls(KEYS[0], true), of, &ring(1)).unwrap();
        guarded.tls.insert(HOST.into(), key);
        let stored = decode(&entry(&guarded)).unwrap().record;
        assert_eq!((&stored, stored.requires_tls()), (&guarded, true));
        let (of, held) = stored.host_proof(HOST).unwrap();
        assert_eq!(held.open(of, &ring(1)), Ok(dhchap()));
        assert!(stored.host_proof("nqn.2014-08.org.nvmexpress:uuid:2").is_none());
        let (of, held) = stored.all_tls().next().unwrap();
        assert_eq!((of.host, held.open(of, &ring(1))), (HOST, Ok(tls(KEYS[0], true))));
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
