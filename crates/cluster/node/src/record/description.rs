//! What an image tells of its volume, for the day when no record does (RFD 0036, 3): what it is called, by which names
//! initiators know it, who may reach it, and where its copies are. No secret is among it.

use std::collections::BTreeSet;

use api::{Initiator, Protocols, VolumeName};
use disk::DESCRIPTOR_TEXT_MAX;
use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{MAX_COPIES, VolumeRecord};

/// The only format that is read.
const FORMAT: u32 = 2;

/// The copy of a volume on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedCopy {
    /// Number of the node.
    pub node: u16,
    /// Its name.
    pub name: String,
    /// The image's own name, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Uuid>,
}

/// Behind whose target a volume stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedTarget {
    /// The other volume.
    pub volume: Uuid,
    /// Its name, or its target's.
    pub target: String,
}

/// What an image tells of its volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
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
    /// Behind whose target it stands, if not its own.
    pub behind: Option<DescribedTarget>,
    /// Who may reach it.
    pub allow: BTreeSet<Initiator>,
    /// Whether that is all of them: a long list has no room.
    pub allow_complete: bool,
    /// What initiators have to prove; the secrets are elsewhere.
    pub secrets: BTreeSet<Secrets>,
    /// When it was created, in seconds since the Unix epoch.
    pub created_s: u64,
    /// The cluster of the node that keeps this image, if it is in one.
    pub cluster: Option<Uuid>,
    /// The node's number there.
    pub node: u16,
    /// All its copies.
    pub copies: Vec<DescribedCopy>,
    /// How many it is to have.
    pub copies_wanted: u8,
}

/// A kind of secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Secrets {
    /// CHAP.
    Chap,
    /// DH-HMAC-CHAP.
    Dhchap,
    /// Keys of TLS.
    Tls,
}

/// Only what every format has.
#[derive(Deserialize)]
struct Head {
    format: u32,
}

/// Who tells.
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations, reason = "it holds a function")]
pub struct Teller<'a> {
    /// The node that keeps the image.
    pub node: NodeId,
    /// Its cluster.
    pub cluster: Option<Uuid>,
    /// What nodes are called.
    pub names: &'a dyn Fn(NodeId) -> String,
}

impl Description {
    /// What the image on `teller`'s node has to tell of the volume of `record`.
    #[must_use]
    pub fn of(record: &VolumeRecord, teller: Teller<'_>) -> Self {
        let secrets = [
            (record.chap.is_some() || !record.proofs.is_empty(), Secrets::Chap),
            (!record.hosts.is_empty(), Secrets::Dhchap),
            (!record.tls.is_empty(), Secrets::Tls),
        ];
        let copies = record.places.iter().map(|p| DescribedCopy {
            node: p.node.0,
            name: (teller.names)(p.node),
            image: p.image,
        });
        let behind = record.mapping.behind.as_ref();
        Self {
            format: FORMAT,
            name: record.name.clone(),
            protocols: record.protocols,
            iscsi_target: record.iscsi_target.clone(),
            nvme_subsystem: record.nvme_subsystem.clone(),
            lun: record.mapping.lun,
            behind: behind.map(|b| DescribedTarget { volume: b.volume, target: b.target.clone() }),
            allow: record.allow.clone(),
            allow_complete: true,
            secrets: secrets.into_iter().filter_map(|(has, kind)| has.then_some(kind)).collect(),
            created_s: record.created_s,
            cluster: teller.cluster,
            node: teller.node.0,
            copies: copies.collect(),
            copies_wanted: record.copies_wanted,
        }
    }

    /// As it is written, within the room that an image has for it.
    #[must_use]
    pub fn to_text(&self) -> Vec<u8> {
        let text = |d: &Self| serde_json::to_vec(d).expect("names and numbers always serialise");
        let whole = text(self);
        if whole.len() <= DESCRIPTOR_TEXT_MAX {
            return whole;
        }
        // As many as surely fit: the longest name has 223 bytes, and a list of names has commas and quotes.
        let some = self.allow.iter().take(200).cloned().collect();
        text(&Self { allow: some, allow_complete: false, ..self.clone() })
    }

    /// Reads what [`Self::to_text`] wrote. It comes from a disk: nothing about it is assumed.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let head: Head = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        if head.format != FORMAT {
            let found = head.format;
            return Err(format!("it has format {found}, this program knows format {FORMAT}"));
        }
        let description: Self = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        let named = |name: &str| !name.is_empty() && name.len() <= 223;
        if !named(&description.iscsi_target) || !named(&description.nvme_subsystem) {
            return Err("a name of its target makes no sense".to_owned());
        }
        if !(1..=MAX_COPIES).contains(&description.copies_wanted) {
            return Err("it wants a number of copies that no volume can have".to_owned());
        }
        Ok(description)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::tests::record;

    pub(crate) fn description(name: &str, node: u16) -> Description {
        let names = |node: NodeId| format!("n{node}");
        let cluster = Some(Uuid::from_u128(9));
        Description::of(&record(name), Teller { node: NodeId(node), cluster, names: &names })
    }

    #[test]
    fn a_description_reads_back_as_it_was_written() {
        let mut described = description("web", 1);
        described.allow.insert("iqn.1993-08.org.debian:01:x".parse().unwrap());
        assert_eq!(Description::parse(&described.to_text()), Ok(described));
    }

    /// What this version writes, every later one reads.
    #[test]
    fn the_golden_description_reads() {
        let golden = br#"{"format":2,"name":"web","protocols":{"iscsi":true,"nvme":true},
            "iscsi_target":"iqn.2026-01.io.windrose:web","nvme_subsystem":"nqn.2026-01.io.windrose:web","lun":0,
            "behind":null,"allow":[],"allow_complete":true,"secrets":[],"created_s":1700000000,
            "cluster":"00000000-0000-0000-0000-000000000009","node":1,
            "copies":[{"node":1,"name":"n1","image":"00000000-0000-0000-0000-000000000001"}],
            "copies_wanted":1}"#;
        assert_eq!(Description::parse(golden), Ok(description("web", 1)));
        let changed = |from: &str, to: &str| {
            let text = String::from_utf8(golden.to_vec()).unwrap().replace(from, to);
            Description::parse(text.as_bytes()).unwrap_err()
        };
        assert!(changed("t\":2", "t\":1").contains("format 1"));
        assert!(changed("wanted\":1", "wanted\":0").contains("number of copies"));
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
        let read = Description::parse(&text).unwrap();
        assert!(!read.allow_complete && read.allow.len() == 200);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = Description::parse(&bytes);
        }
    }
}
