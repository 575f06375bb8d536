//! The JSON of a volume's record. Every field is there, and no other: what is not said would be taken for what
//! guards a volume least.

use std::collections::{BTreeMap, BTreeSet};

use api::{Backing, BlockSize, Initiator, Protocols, VolumeName};
use peer::NodeId;
use serde::{Deserialize, Deserializer, Serialize};
use uuid::Uuid;

use super::mapping::{Behind, Mapping};
use super::{
    Creator, MAX_COPIES, MAX_PLACES, Place, PlaceStage, Repair, Stage, StoredChap, StoredDhchap,
    StoredTls, VolumeRecord,
};

/// A record as it is written.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Text {
    id: Uuid,
    name: VolumeName,
    stage: Stage,
    size_bytes: u64,
    block_size: BlockSize,
    thin: bool,
    places: Vec<PlaceText>,
    copies_wanted: u8,
    #[serde(deserialize_with = "present")]
    repair: Option<Repair>,
    #[serde(deserialize_with = "present")]
    creator: Option<CreatorText>,
    #[serde(deserialize_with = "present")]
    prefer: Option<u16>,
    protocols: ProtocolsText,
    iscsi_target: String,
    nvme_subsystem: String,
    allow: BTreeSet<Initiator>,
    #[serde(deserialize_with = "present")]
    chap: Option<StoredChap>,
    created_s: u64,
}

/// What a field that has to be there says: something, or `null`.
pub(crate) fn present<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(from)
}

/// The protocols, as what, and to whom.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProtocolsText {
    iscsi: bool,
    nvme: bool,
    vhost_user: bool,
    lun: u16,
    #[serde(deserialize_with = "present")]
    behind: Option<Behind>,
    guests: BTreeMap<u16, Uuid>,
    proofs: BTreeMap<String, StoredChap>,
    hosts: BTreeMap<String, StoredDhchap>,
    tls: BTreeMap<String, StoredTls>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlaceText {
    node: u16,
    backing: Backing,
    #[serde(deserialize_with = "present")]
    image: Option<Uuid>,
    image_generation: u64,
    stage: PlaceStage,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CreatorText {
    node: u16,
    life: Uuid,
}

impl From<VolumeRecord> for Text {
    fn from(r: VolumeRecord) -> Self {
        let place = |p: Place| {
            let Place { node, backing, image, image_generation, stage } = p;
            PlaceText { node: node.0, backing, image, image_generation, stage }
        };
        Self {
            id: r.id,
            name: r.name,
            stage: r.stage,
            size_bytes: r.size_bytes,
            block_size: r.block_size,
            thin: r.thin,
            places: r.places.into_iter().map(place).collect(),
            copies_wanted: r.copies_wanted,
            repair: r.repair,
            creator: r.creator.map(|c| CreatorText { node: c.node.0, life: c.life }),
            prefer: r.prefer.map(|node| node.0),
            protocols: ProtocolsText {
                iscsi: r.protocols.iscsi,
                nvme: r.protocols.nvme,
                vhost_user: r.protocols.vhost_user,
                lun: r.mapping.lun,
                behind: r.mapping.behind,
                guests: r.mapping.guests,
                proofs: r.proofs,
                hosts: r.hosts,
                tls: r.tls,
            },
            iscsi_target: r.iscsi_target,
            nvme_subsystem: r.nvme_subsystem,
            allow: r.allow,
            chap: r.chap,
            created_s: r.created_s,
        }
    }
}

impl TryFrom<Text> for VolumeRecord {
    type Error = &'static str;

    fn try_from(t: Text) -> Result<Self, &'static str> {
        let places = places(t.places)?;
        if !(1..=MAX_COPIES).contains(&t.copies_wanted) {
            return Err("it wants a number of copies that no volume can have");
        }
        Ok(Self {
            id: t.id,
            name: t.name,
            stage: t.stage,
            size_bytes: t.size_bytes,
            block_size: t.block_size,
            thin: t.thin,
            places,
            copies_wanted: t.copies_wanted,
            repair: t.repair,
            creator: t.creator.map(|c| Creator { node: NodeId(c.node), life: c.life }),
            prefer: t.prefer.map(NodeId),
            protocols: Protocols {
                iscsi: t.protocols.iscsi,
                nvme: t.protocols.nvme,
                vhost_user: t.protocols.vhost_user,
            },
            proofs: t.protocols.proofs,
            hosts: t.protocols.hosts,
            tls: t.protocols.tls,
            mapping: Mapping {
                behind: t.protocols.behind,
                lun: t.protocols.lun,
                guests: t.protocols.guests,
            },
            iscsi_target: t.iscsi_target,
            nvme_subsystem: t.nvme_subsystem,
            allow: t.allow,
            chap: t.chap,
            created_s: t.created_s,
        })
    }
}

/// A node's number.
pub(super) mod number {
    use peer::NodeId;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        node: &NodeId,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        node.0.serialize(to)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<NodeId, D::Error> {
        u16::deserialize(from).map(NodeId)
    }
}

/// A node's number, or none.
pub(super) mod node {
    use peer::NodeId;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    // As serde wants it.
    #[allow(clippy::ref_option, clippy::trivially_copy_pass_by_ref)]
    pub(in super::super) fn serialize<S: Serializer>(
        node: &Option<NodeId>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        node.map(|n| n.0).serialize(to)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<NodeId>, D::Error> {
        Ok(Option::<u16>::deserialize(from)?.map(NodeId))
    }
}

fn places(places: Vec<PlaceText>) -> Result<Vec<Place>, &'static str> {
    if places.len() > MAX_PLACES {
        return Err("it has too many copies");
    }
    let place = |p: PlaceText| {
        let PlaceText { node, backing, image, image_generation, stage } = p;
        Place { node: NodeId(node), backing, image, image_generation, stage }
    };
    let places: Vec<_> = places.into_iter().map(place).collect();
    let sorted = places.iter().map(|p| p.node).is_sorted_by(|a, b| a < b);
    if !sorted || places.iter().any(|p| p.node == NodeId(0)) {
        return Err("its copies are not listed by node, each node once");
    }
    Ok(places)
}
