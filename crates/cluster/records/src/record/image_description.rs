//! The description of a volume in its image, for recovery without records (RFD 0036, 3): name,
//! target names, allowed initiators and nodes of its replicas. It contains no secrets.

use std::collections::BTreeSet;

use api::{Initiator, Protocols, VolumeName};
use disk::DESCRIPTOR_TEXT_MAX;
use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{MAX_REPLICAS_WANTED, VolumeRecord};

/// The only supported format.
const FORMAT: u32 = 2;

/// The replica of a volume on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedReplica {
    /// Number of the node.
    pub node: u16,
    /// Its name.
    pub name: String,
    /// The image's id, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Uuid>,
}

/// The shared target that a volume belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedTarget {
    /// The other volume.
    pub volume: Uuid,
    /// Its name, or its target's.
    pub target: String,
}

/// The description of a volume in its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageDescription {
    format: u32,
    /// The volume's name.
    pub name: VolumeName,
    /// Protocols that export it.
    pub protocols: Protocols,
    /// Its iSCSI target name.
    pub iscsi_target: String,
    /// Its NVMe subsystem name.
    pub nvme_subsystem: String,
    /// Its logical unit number.
    pub lun: u16,
    /// The target that it belongs to, if not its own.
    #[serde(rename = "behind")]
    pub shared_target: Option<DescribedTarget>,
    /// The initiators that may connect.
    pub allow: BTreeSet<Initiator>,
    /// Whether `allow` is complete: a long list does not fit.
    pub allow_complete: bool,
    /// The kinds of secrets that initiators must prove; the secrets are not here.
    #[serde(rename = "secrets")]
    pub secret_kinds: BTreeSet<SecretKind>,
    /// When it was created, in seconds since the Unix epoch.
    pub created_s: u64,
    /// The cluster of the node that holds this image, if it is in one.
    pub cluster: Option<Uuid>,
    /// The node's number there.
    pub node: u16,
    /// All its replicas.
    #[serde(rename = "copies")]
    pub replicas: Vec<DescribedReplica>,
    /// How many replicas it is to have.
    #[serde(rename = "copies_wanted")]
    pub replicas_wanted: u8,
}

/// A kind of secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecretKind {
    /// CHAP.
    Chap,
    /// DH-HMAC-CHAP.
    Dhchap,
    /// TLS keys.
    Tls,
}

/// The part that all formats share.
#[derive(Deserialize)]
struct FormatHeader {
    format: u32,
}

/// The node that describes a volume.
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations, reason = "it holds a function")]
pub struct DescriptionSource<'a> {
    /// The node that holds the image.
    pub node: NodeId,
    /// Its cluster.
    pub cluster: Option<Uuid>,
    /// Names of nodes.
    pub node_name: &'a dyn Fn(NodeId) -> String,
}

impl ImageDescription {
    /// The description of `record`'s volume for the image on `source`'s node.
    #[must_use]
    pub fn of(record: &VolumeRecord, source: DescriptionSource<'_>) -> Self {
        let secrets = [
            (record.chap.is_some() || !record.chap_by_initiator.is_empty(), SecretKind::Chap),
            (!record.dhchap_by_host.is_empty(), SecretKind::Dhchap),
            (!record.tls_by_host.is_empty(), SecretKind::Tls),
        ];
        let replicas = record.placements.iter().map(|p| DescribedReplica {
            node: p.node.0,
            name: (source.node_name)(p.node),
            image: p.image,
        });
        let shared_target = record.mapping.shared_target.as_ref();
        Self {
            format: FORMAT,
            name: record.name.clone(),
            protocols: record.protocols,
            iscsi_target: record.iscsi_target.clone(),
            nvme_subsystem: record.nvme_subsystem.clone(),
            lun: record.mapping.lun,
            shared_target: shared_target
                .map(|b| DescribedTarget { volume: b.volume, target: b.target.clone() }),
            allow: record.allow.clone(),
            allow_complete: true,
            secret_kinds: secrets
                .into_iter()
                .filter_map(|(has, kind)| has.then_some(kind))
                .collect(),
            created_s: record.created_s,
            cluster: source.cluster,
            node: source.node.0,
            replicas: replicas.collect(),
            replicas_wanted: record.replicas_wanted,
        }
    }

    /// The JSON form, no longer than an image has space for.
    #[must_use]
    pub fn to_text(&self) -> Vec<u8> {
        let text = |d: &Self| serde_json::to_vec(d).expect("names and numbers always serialise");
        let whole = text(self);
        if whole.len() <= DESCRIPTOR_TEXT_MAX {
            return whole;
        }
        // The number that fits in any case: a name has at most 223 bytes, plus comma and quotes in
        // the list.
        let some = self.allow.iter().take(200).cloned().collect();
        text(&Self { allow: some, allow_complete: false, ..self.clone() })
    }

    /// Parses the result of [`Self::to_text`], which comes from a disk: nothing in it is trusted.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let head: FormatHeader = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        if head.format != FORMAT {
            let found = head.format;
            return Err(format!("it has format {found}, this program supports format {FORMAT}"));
        }
        let description: Self = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        let named = |name: &str| !name.is_empty() && name.len() <= 223;
        if !named(&description.iscsi_target) || !named(&description.nvme_subsystem) {
            return Err("the name of its target is invalid".to_owned());
        }
        if !(1..=MAX_REPLICAS_WANTED).contains(&description.replicas_wanted) {
            return Err("its wanted number of replicas is invalid".to_owned());
        }
        Ok(description)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::description;

    #[test]
    fn a_description_reads_back_as_it_was_written() {
        let mut described = description("web", 1);
        described.allow.insert("iqn.1993-08.org.debian:01:x".parse().unwrap());
        assert_eq!(ImageDescription::parse(&described.to_text()), Ok(described));
    }

    /// Later versions must read what this version writes.
    #[test]
    fn the_golden_description_reads() {
        let golden = br#"{"format":2,"name":"web","protocols":{"iscsi":true,"nvme":true},
            "iscsi_target":"iqn.2026-01.io.windrose:web","nvme_subsystem":"nqn.2026-01.io.windrose:web","lun":0,
            "behind":null,"allow":[],"allow_complete":true,"secrets":[],"created_s":1700000000,
            "cluster":"00000000-0000-0000-0000-000000000009","node":1,
            "copies":[{"node":1,"name":"n1","image":"00000000-0000-0000-0000-000000000001"}],
            "copies_wanted":1}"#;
        assert_eq!(ImageDescription::parse(golden), Ok(description("web", 1)));
        let changed = |from: &str, to: &str| {
            let text = String::from_utf8(golden.to_vec()).unwrap().replace(from, to);
            ImageDescription::parse(text.as_bytes()).unwrap_err()
        };
        assert!(changed("t\":2", "t\":1").contains("format 1"));
        assert!(changed("wanted\":1", "wanted\":0").contains("number of replicas"));
        assert!(changed("iqn.2026-01.io.windrose:web", "").contains("target"));
    }

    #[test]
    fn a_long_list_of_initiators_says_that_it_is_cut_off() {
        let mut described = description("web", 1);
        for n in 0..1024 {
            let name = format!("iqn.1993-08.org.debian:{n:04}:{}", "x".repeat(190));
            described.allow.insert(name.parse().unwrap());
        }
        let text = described.to_text();
        assert!(text.len() <= DESCRIPTOR_TEXT_MAX);
        let read = ImageDescription::parse(&text).unwrap();
        assert!(!read.allow_complete && read.allow.len() == 200);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = ImageDescription::parse(&bytes);
        }
    }
}
