//! Orphaned images, which no record names: findings about them, and the next step (RFD 0036).

use api::{ApiError, ErrorCode, Finding, OrphanedImage, Severity, VolumeName};
use engine::{ImageLocation, ScannedImage, ScannedIntentLog};
use records::record::VolumeRecord;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::finding;
use crate::recovery_choice::{Ambiguity, ReplicaImage};

/// An image on this node that is not served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnservedImage {
    /// Where the image is.
    #[serde(rename = "place")]
    pub location: ImageLocation,
    /// Whether that is a block device.
    #[serde(rename = "device")]
    pub is_device: bool,
    /// Whether a record names it as the volume's replica here.
    #[serde(rename = "listed")]
    pub is_referenced: bool,
    /// What the image says about itself.
    #[serde(rename = "found")]
    pub scan: ScannedImage,
}

/// What is known of the age of an image, if it was a replica of the volume and is not the one in
/// the record. One whose log is lost may be the newest.
pub fn old_image_age(
    found: &ScannedImage,
    record: &VolumeRecord,
    own: Option<Uuid>,
) -> Option<String> {
    if found.volume != record.id || own == Some(found.id) {
        return None;
    }
    match &found.log {
        ScannedIntentLog::Present { epoch, .. } if *epoch > 0 => Some(format!("of epoch {epoch}")),
        ScannedIntentLog::Unreadable(why) => Some(format!("of unknown age: {why}")),
        ScannedIntentLog::Absent | ScannedIntentLog::Present { .. } => None,
    }
}

/// How to adopt images under another volume name than theirs.
pub fn rename_hint(replicas: &[ReplicaImage]) -> String {
    let image = replicas.first().map_or_else(|| "IMAGE".to_owned(), |c| c.location.to_string());
    format!("adopt it under another name: windrose volume adopt {image} --name NAME")
}

/// What an orphaned image's hint depends on.
pub enum OrphanContext {
    /// A record of its volume exists.
    VolumeExists {
        /// Whether its node can have a replica of it.
        may_be_added: bool,
        /// The options that name its place.
        at: String,
        /// The name of its node.
        node: String,
    },
    /// No record of its volume exists.
    NoVolume {
        /// If it was a replica in a cluster that this node is not in: whether this node is in
        /// another one.
        foreign_cluster: Option<bool>,
        /// Why it cannot be adopted alone.
        doubt: Option<Ambiguity>,
        /// Whether it knows its volume's name, and that name is free.
        is_name_free: bool,
    },
}

/// The next step for an orphaned image, as a complete command.
pub fn orphan_hint(orphan: &OrphanedImage, context: &OrphanContext) -> String {
    let image = &orphan.image;
    let discard = format!("to erase it: windrose volume discard {image}");
    let (foreign_cluster, doubt, is_name_free) = match context {
        OrphanContext::VolumeExists { may_be_added: true, at, node } => {
            let name = orphan.existing_volume.as_ref().map(VolumeName::as_str).unwrap_or_default();
            return format!(
                "to overwrite it with a new replica: windrose volume mirror add {name} --on \
                 {node}{at} --force; {discard}"
            );
        }
        OrphanContext::VolumeExists { .. } => return discard,
        OrphanContext::NoVolume { foreign_cluster, doubt, is_name_free } => {
            (foreign_cluster, doubt, is_name_free)
        }
    };
    let without = |nodes: &[String]| format!(" --without {}", nodes.join(" --without "));
    let without_options = match doubt {
        None => String::new(),
        Some(Ambiguity::UnseenReplicas(nodes)) => without(nodes),
        Some(_) => " --force".to_owned(),
    };
    let called = if *is_name_free { "" } else { " --name NAME" };
    let adopt = format!("windrose volume adopt {image}{without_options}{called}");
    match (foreign_cluster, doubt) {
        (Some(false), _) => format!(
            "if that cluster still exists, join this node to it first: windrose cluster join \
             --token TOKEN (make a token at one of its nodes: windrose cluster token); if it is \
             gone: {adopt}"
        ),
        (Some(true), _) => {
            format!(
                "if that cluster still exists, the volume belongs to it; if it is gone: \
                     {adopt}"
            )
        }
        (None, None) => format!(
            "to adopt it as a volume: {adopt}; to search the images of all nodes: windrose cluster \
             recover"
        ),
        (None, Some(_)) => format!(
            "to adopt the newest image of all nodes: windrose cluster recover; to adopt this one \
             although it may lack data: {adopt}"
        ),
    }
}

/// The finding about an orphaned image.
pub fn orphan_finding(orphan: &OrphanedImage) -> Finding {
    let OrphanedImage { image, volume, name, size_bytes, existing_volume, hint, .. } = orphan;
    let size = api::Size(*size_bytes);
    let subject = format!("image {image}");
    if let Some(listed) = existing_volume {
        let message = format!(
            "it is a former replica of volume {listed} ({size}), which no record \
            references"
        );
        return finding(Severity::Note, subject, message, Some(hint));
    }
    let called = name.as_ref().map_or_else(|| volume.to_string(), ToString::to_string);
    let message = match hint.contains("if that cluster still exists") {
        true => format!(
            "it holds a replica of volume {called} ({size}) of a cluster that this node is not in: \
             no record here references it"
        ),
        false => {
            format!(
                "it holds volume {called} ({size}), which no record references: the volume is \
                     inaccessible"
            )
        }
    };
    finding(Severity::Warning, subject, message, Some(hint))
}

/// The error for an image that does not say which volume it holds.
pub fn name_unknown_error(replica: &ReplicaImage) -> ApiError {
    let message = format!("{} does not contain the name of its volume", replica.location_text());
    let hint = format!("give a name: windrose volume adopt {} --name NAME", replica.location);
    ApiError::new(ErrorCode::InvalidRequest, message).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An unreadable log may be newer than all serving replicas: the image is not overwritten.
    #[test]
    fn a_copy_whose_log_is_lost_counts_as_one_that_may_be_newer() {
        let record = records::samples::record("web");
        let with = |log| ScannedImage {
            volume: record.id,
            id: Uuid::from_u128(8),
            generation: 1,
            size_bytes: 1 << 20,
            block_size: api::BlockSize::B512,
            thin: false,
            log,
            description_error: None,
            description: None,
        };
        let has =
            |epoch| ScannedIntentLog::Present { epoch, config: Uuid::nil(), in_sync: Vec::new() };
        let old = |log, own| old_image_age(&with(log), &record, own);
        assert_eq!(old(has(2), None).as_deref(), Some("of epoch 2"));
        let lost = old(ScannedIntentLog::Unreadable("damaged".into()), None).unwrap();
        assert_eq!(lost, "of unknown age: damaged");
        // The remainder of a failed attempt, the record's own replica, and another volume's image.
        assert_eq!((old(has(0), None), old(ScannedIntentLog::Absent, None)), (None, None));
        assert_eq!(old(has(2), Some(Uuid::from_u128(8))), None);
        let other = records::samples::record("mail");
        assert_eq!(old_image_age(&with(has(2)), &other, None), None);
    }

    fn orphan(listed: Option<&str>) -> OrphanedImage {
        OrphanedImage {
            image: "/v/web.img".into(),
            volume: Uuid::from_u128(7),
            name: Some("web".parse().unwrap()),
            size_bytes: 1 << 30,
            existing_volume: listed.map(|name| name.parse().unwrap()),
            epoch: None,
            problem: None,
            hint: String::new(),
        }
    }

    fn told(listed: Option<&str>, standing: &OrphanContext) -> (Severity, String, String) {
        let orphan = orphan(listed);
        let hint = orphan_hint(&orphan, standing);
        let finding = orphan_finding(&OrphanedImage { hint: hint.clone(), ..orphan });
        assert_eq!(finding.hint.as_ref(), Some(&hint));
        assert!(!hint.contains('…'), "{hint}");
        (finding.severity, finding.message, hint)
    }

    #[test]
    fn an_orphan_is_told_with_the_command_that_helps() {
        let unlisted = |elsewhere, doubt| OrphanContext::NoVolume {
            foreign_cluster: elsewhere,
            doubt,
            is_name_free: true,
        };
        let (severity, message, hint) = told(None, &unlisted(None, None));
        assert_eq!(severity, Severity::Warning);
        assert!(message.contains("the volume is inaccessible"), "{message}");
        assert!(
            hint.starts_with("to adopt it as a volume: windrose volume adopt /v/web.img"),
            "{hint}"
        );
        let at = " --pool tank".to_owned();
        let listed = |may_be_added| OrphanContext::VolumeExists {
            may_be_added,
            at: at.clone(),
            node: "a".to_owned(),
        };
        let (severity, _, hint) = told(Some("web"), &listed(true));
        assert_eq!(severity, Severity::Note);
        let add = "to overwrite it with a new replica: windrose volume mirror add web --on a \
            --pool tank --force";
        assert!(hint.starts_with(add), "it must not be a second one: {hint}");
        let (.., hint) = told(Some("web"), &listed(false));
        assert_eq!(hint, "to erase it: windrose volume discard /v/web.img");
    }

    #[test]
    fn an_image_that_adopt_refuses_is_told_with_the_options_by_which_it_is_taken() {
        let hint = |doubt, is_name_free| {
            told(
                None,
                &OrphanContext::NoVolume {
                    foreign_cluster: None,
                    doubt: Some(doubt),
                    is_name_free,
                },
            )
            .2
        };
        let missing = Ambiguity::UnseenReplicas(vec!["a".into(), "c".into()]);
        let all = hint(missing, true);
        assert!(all.ends_with("adopt /v/web.img --without a --without c"), "{all}");
        assert!(all.contains(": windrose cluster recover;"), "{all}");
        let part = hint(Ambiguity::NeverInSync(Vec::new()), false);
        assert!(part.ends_with("adopt /v/web.img --force --name NAME"), "{part}");
    }

    #[test]
    fn a_copy_of_a_cluster_that_may_live_is_not_said_to_be_out_of_reach() {
        let of = |is_in_another| OrphanContext::NoVolume {
            foreign_cluster: Some(is_in_another),
            doubt: Some(Ambiguity::UnseenReplicas(vec!["a".into()])),
            is_name_free: true,
        };
        let (_, message, hint) = told(None, &of(false));
        assert!(!message.contains("the volume is inaccessible"), "{message}");
        let join = "if that cluster still exists, join this node to it first: windrose cluster \
            join";
        assert!(hint.starts_with(join), "{hint}");
        assert!(
            hint.ends_with("if it is gone: windrose volume adopt /v/web.img --without a"),
            "{hint}"
        );
        let (_, message, hint) = told(None, &of(true));
        assert!(message.contains("of a cluster that this node is not in"), "{message}");
        assert!(!hint.contains("cluster join"), "a node is in one cluster: {hint}");
    }
}
