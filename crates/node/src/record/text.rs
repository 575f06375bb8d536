//! The JSON of a volume's record.

use std::collections::{BTreeMap, BTreeSet};

use api::{Backing, BlockSize, Initiator, Protocols, VolumeName};
use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::mapping::{Behind, Mapping};
use super::{
    Creator, FIRST_NODE, MAX_PLACES, Place, PlaceStage, Stage, StoredChap, StoredDhchap, StoredTls,
    VolumeRecord,
};

/// A record as it is written. Format 1 had one copy, in `backing` and `image_generation`.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Text {
    id: Uuid,
    name: VolumeName,
    stage: Stage,
    size_bytes: u64,
    block_size: BlockSize,
    thin: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    places: Option<Vec<PlaceText>>,
    #[serde(default, skip_serializing)]
    backing: Option<Backing>,
    #[serde(default, skip_serializing)]
    image_generation: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    creator: Option<CreatorText>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prefer: Option<u16>,
    protocols: ProtocolsText,
    iscsi_target: String,
    nvme_subsystem: String,
    allow: BTreeSet<Initiator>,
    chap: Option<StoredChap>,
    created_s: u64,
}

/// The protocols, as what, and to whom. An older program must not serve a volume at its own target that stands behind another,
/// nor without the proof or the TLS that an initiator or a host has to come by, nor forget who stands behind a volume, or
/// that virtual machines use it, when it writes the record: it takes no unknown field here.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProtocolsText {
    iscsi: bool,
    nvme: bool,
    #[serde(default, skip_serializing_if = "is_not")]
    vhost_user: bool,
    #[serde(default, skip_serializing_if = "is_zero")]
    lun: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    behind: Option<Behind>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    guests: BTreeMap<u16, Uuid>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    proofs: BTreeMap<String, StoredChap>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    hosts: BTreeMap<String, StoredDhchap>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tls: BTreeMap<String, StoredTls>,
}

// As serde wants it.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(lun: &u16) -> bool {
    *lun == 0
}

// As serde wants it.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_not(flag: &bool) -> bool {
    !*flag
}

#[derive(Clone, Serialize, Deserialize)]
struct PlaceText {
    node: u16,
    backing: Backing,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image: Option<Uuid>,
    #[serde(default)]
    image_generation: u64,
    stage: PlaceStage,
}

#[derive(Clone, Serialize, Deserialize)]
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
            places: Some(r.places.into_iter().map(place).collect()),
            backing: None,
            image_generation: 0,
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

    fn try_from(mut t: Text) -> Result<Self, &'static str> {
        let places = places(&mut t)?;
        Ok(Self {
            id: t.id,
            name: t.name,
            stage: t.stage,
            size_bytes: t.size_bytes,
            block_size: t.block_size,
            thin: t.thin,
            places,
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

fn places(text: &mut Text) -> Result<Vec<Place>, &'static str> {
    let Some(places) = text.places.take() else {
        let backing = text.backing.take().ok_or("it says nothing of where the data is")?;
        let stage = match text.stage {
            Stage::Creating => PlaceStage::Wanted { force: false },
            Stage::Ready | Stage::Deleting => PlaceStage::Made,
        };
        let image_generation = text.image_generation;
        return Ok(vec![Place { node: FIRST_NODE, backing, image: None, image_generation, stage }]);
    };
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
