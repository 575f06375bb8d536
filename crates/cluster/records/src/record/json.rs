//! The JSON form of a volume's record. Every field is required and no other allowed: a missing one
//! would be read as the least restrictive value.

use std::collections::{BTreeMap, BTreeSet};

use api::{Backing, BlockSize, Initiator, Protocols, VolumeName};
use peer::NodeId;
use serde::{Deserialize, Deserializer, Serialize};
use uuid::Uuid;

use super::lun_mapping::{LunMapping, SharedTarget};
use super::{
    MAX_PLACEMENTS, MAX_REPLICAS_WANTED, NodeProcess, PendingRepair, PlacementStage,
    ReplicaPlacement, StoredChap, StoredDhchap, StoredTls, VolumeRecord, VolumeStage,
};

/// The JSON form of a record.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VolumeRecordJson {
    id: Uuid,
    name: VolumeName,
    stage: VolumeStage,
    size_bytes: u64,
    block_size: BlockSize,
    thin: bool,
    #[serde(rename = "places")]
    placements: Vec<PlacementJson>,
    #[serde(rename = "copies_wanted")]
    replicas_wanted: u8,
    #[serde(deserialize_with = "required_option")]
    repair: Option<PendingRepair>,
    #[serde(deserialize_with = "required_option")]
    creator: Option<NodeProcessJson>,
    #[serde(deserialize_with = "required_option")]
    #[serde(rename = "prefer")]
    preferred_primary: Option<u16>,
    protocols: ProtocolsJson,
    iscsi_target: String,
    nvme_subsystem: String,
    allow: BTreeSet<Initiator>,
    #[serde(deserialize_with = "required_option")]
    chap: Option<StoredChap>,
    created_s: u64,
}

/// Reads a field that must be present, but may be `null`.
pub(crate) fn required_option<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(from)
}

/// Protocols, LUN mapping, and the secrets of initiators and hosts.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProtocolsJson {
    iscsi: bool,
    nvme: bool,
    vhost_user: bool,
    lun: u16,
    #[serde(deserialize_with = "required_option")]
    #[serde(rename = "behind")]
    shared_target: Option<SharedTarget>,
    #[serde(rename = "guests")]
    other_luns: BTreeMap<u16, Uuid>,
    #[serde(rename = "proofs")]
    chap_by_initiator: BTreeMap<String, StoredChap>,
    #[serde(rename = "hosts")]
    dhchap_by_host: BTreeMap<String, StoredDhchap>,
    #[serde(rename = "tls")]
    tls_by_host: BTreeMap<String, StoredTls>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlacementJson {
    node: u16,
    backing: Backing,
    #[serde(deserialize_with = "required_option")]
    image: Option<Uuid>,
    image_generation: u64,
    stage: PlacementStage,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeProcessJson {
    node: u16,
    #[serde(rename = "life")]
    process: Uuid,
}

impl From<VolumeRecord> for VolumeRecordJson {
    fn from(r: VolumeRecord) -> Self {
        let placement = |p: ReplicaPlacement| {
            let ReplicaPlacement { node, backing, image, image_generation, stage } = p;
            PlacementJson { node: node.0, backing, image, image_generation, stage }
        };
        Self {
            id: r.id,
            name: r.name,
            stage: r.stage,
            size_bytes: r.size_bytes,
            block_size: r.block_size,
            thin: r.thin,
            placements: r.placements.into_iter().map(placement).collect(),
            replicas_wanted: r.replicas_wanted,
            repair: r.repair,
            creator: r.creator.map(|c| NodeProcessJson { node: c.node.0, process: c.process }),
            preferred_primary: r.preferred_primary.map(|node| node.0),
            protocols: ProtocolsJson {
                iscsi: r.protocols.iscsi,
                nvme: r.protocols.nvme,
                vhost_user: r.protocols.vhost_user,
                lun: r.mapping.lun,
                shared_target: r.mapping.shared_target,
                other_luns: r.mapping.other_luns,
                chap_by_initiator: r.chap_by_initiator,
                dhchap_by_host: r.dhchap_by_host,
                tls_by_host: r.tls_by_host,
            },
            iscsi_target: r.iscsi_target,
            nvme_subsystem: r.nvme_subsystem,
            allow: r.allow,
            chap: r.chap,
            created_s: r.created_s,
        }
    }
}

impl TryFrom<VolumeRecordJson> for VolumeRecord {
    type Error = &'static str;

    fn try_from(t: VolumeRecordJson) -> Result<Self, &'static str> {
        let placements = places(t.placements)?;
        if !(1..=MAX_REPLICAS_WANTED).contains(&t.replicas_wanted) {
            return Err("its wanted number of replicas is invalid");
        }
        Ok(Self {
            id: t.id,
            name: t.name,
            stage: t.stage,
            size_bytes: t.size_bytes,
            block_size: t.block_size,
            thin: t.thin,
            placements,
            replicas_wanted: t.replicas_wanted,
            repair: t.repair,
            creator: t.creator.map(|c| NodeProcess { node: NodeId(c.node), process: c.process }),
            preferred_primary: t.preferred_primary.map(NodeId),
            protocols: Protocols {
                iscsi: t.protocols.iscsi,
                nvme: t.protocols.nvme,
                vhost_user: t.protocols.vhost_user,
            },
            chap_by_initiator: t.protocols.chap_by_initiator,
            dhchap_by_host: t.protocols.dhchap_by_host,
            tls_by_host: t.protocols.tls_by_host,
            mapping: LunMapping {
                shared_target: t.protocols.shared_target,
                lun: t.protocols.lun,
                other_luns: t.protocols.other_luns,
            },
            iscsi_target: t.iscsi_target,
            nvme_subsystem: t.nvme_subsystem,
            allow: t.allow,
            chap: t.chap,
            created_s: t.created_s,
        })
    }
}

/// Reads and writes a node's number.
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

/// Reads and writes a node's number or `null`.
pub(super) mod node {
    use peer::NodeId;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    // Serde requires this signature.
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

fn places(json: Vec<PlacementJson>) -> Result<Vec<ReplicaPlacement>, &'static str> {
    if json.len() > MAX_PLACEMENTS {
        return Err("it has too many replicas");
    }
    let placement = |p: PlacementJson| {
        let PlacementJson { node, backing, image, image_generation, stage } = p;
        ReplicaPlacement { node: NodeId(node), backing, image, image_generation, stage }
    };
    let placements: Vec<_> = json.into_iter().map(placement).collect();
    let sorted = placements.iter().map(|p| p.node).is_sorted_by(|a, b| a < b);
    if !sorted || placements.iter().any(|p| p.node == NodeId(0)) {
        return Err("its replicas are not sorted by node, or a node is listed twice");
    }
    Ok(placements)
}
