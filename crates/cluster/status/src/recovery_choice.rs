//! Chooses the replica from which a volume without a usable record goes on: a pure function of what
//! images say (RFD 0036, 4).
//!
//! A replica that was in sync in the highest epoch holds every acknowledged write of that epoch. A
//! higher epoch can exist only if a node that was in sync then has gone on without it. So either
//! all those nodes are examined, or the administrator names the ones to go without. Divergent
//! histories are never decided.

use std::collections::BTreeSet;

use api::{PlannedReplica, PlannedVolume, Size, VolumeName};
use block::Epoch;
use mirror::recovery::{self, DivergentHistories, PrimaryChoice, RecoveryCandidate};
use peer::NodeId;
use uuid::Uuid;

use engine::{ImageLocation, ScannedImage, ScannedIntentLog};
use records::record::image_description::ImageDescription;

/// Most replicas of a volume.
const MAX_RECOVERED_REPLICAS: usize = 3;

/// A replica of a volume, as its image describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaImage {
    /// The node that has it now.
    pub node: NodeId,
    /// The name of that node.
    pub node_name: String,
    /// Where it is there.
    pub location: ImageLocation,
    /// Whether that is a block device.
    pub is_device: bool,
    /// What the image says about itself.
    pub scan: ScannedImage,
}

/// The chosen replicas, as indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryChoice {
    /// The replica whose data the volume keeps.
    pub source: usize,
    /// The replicas that are resynced from it.
    pub resync_targets: Vec<usize>,
}

/// Why no replica can be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ambiguity {
    /// These nodes were in sync with the newest replica found, and may have gone on without it.
    UnseenReplicas(Vec<String>),
    /// Two replicas were in sync in one epoch of different histories.
    DivergentHistories(String, String),
    /// Replicas that never were in a mirror do not say which is newer.
    NeverMirrored(Vec<String>),
    /// Two images have one identity: one is a duplicate of unknown age.
    DuplicateImages(String, String),
    /// No replica is known to have been in sync.
    NeverInSync(Vec<String>),
}

impl ReplicaImage {
    /// Its place, for people.
    pub fn location_text(&self) -> String {
        format!("{} on {}", self.location, self.node_name)
    }

    fn epoch(&self) -> u64 {
        match self.scan.log {
            ScannedIntentLog::Present { epoch, .. } => epoch,
            ScannedIntentLog::Absent | ScannedIntentLog::Unreadable(_) => 0,
        }
    }

    /// The nodes that were in sync in the last epoch that it knows, if it was one of them.
    fn in_sync(&self) -> &[u16] {
        match &self.scan.log {
            ScannedIntentLog::Present { in_sync, .. } => in_sync,
            ScannedIntentLog::Absent | ScannedIntentLog::Unreadable(_) => &[],
        }
    }

    fn adopted_config(&self) -> RecoveryCandidate {
        RecoveryCandidate {
            node: self.node,
            epoch: Epoch(self.epoch()),
            config_id: self.config(),
            in_sync: self.in_sync().iter().copied().map(NodeId).collect(),
        }
    }

    fn config(&self) -> Uuid {
        match self.scan.log {
            ScannedIntentLog::Present { config, .. } => config,
            ScannedIntentLog::Absent | ScannedIntentLog::Unreadable(_) => Uuid::nil(),
        }
    }

    fn description(&self) -> Option<&ImageDescription> {
        self.scan.description.as_ref()
    }

    /// Converts it for the API.
    pub fn to_api(&self) -> PlannedReplica {
        let epoch = self.epoch();
        PlannedReplica {
            node: self.node_name.clone(),
            image: self.location.to_string(),
            epoch: (epoch > 0).then_some(epoch),
            in_sync: !self.in_sync().is_empty(),
        }
    }
}

impl Ambiguity {
    /// The reason as a sentence, with the next step.
    pub fn text(&self) -> String {
        match self {
            Self::UnseenReplicas(nodes) => {
                let (names, flags) = (nodes.join(", "), nodes.join(" --without "));
                format!(
                    "the replica on {names} was also in sync, was not found, and may be newer: \
                     start that node and join it to the cluster, or proceed without it (--without \
                     {flags}; data that only it has is lost)"
                )
            }
            Self::DivergentHistories(a, b) => format!(
                "{a} and {b} have divergent histories of the same epoch: compare both, then adopt \
                 one of them (windrose volume adopt IMAGE --force)"
            ),
            Self::NeverMirrored(all) => format!(
                "{} contain it, and nothing shows which is newer: compare them, then adopt one of \
                 them (windrose volume adopt IMAGE --force)",
                all.join(", ")
            ),
            Self::DuplicateImages(a, b) => format!(
                "{a} and {b} are duplicates of one image, and one may be older: disconnect the \
                 older one, or adopt one of them (windrose volume adopt IMAGE --force)"
            ),
            Self::NeverInSync(all) => format!(
                "no replica that was found ({}) is known to have been in sync: its data may be \
                 incomplete; to adopt it anyway: windrose volume adopt IMAGE --force",
                all.join(", ")
            ),
        }
    }
}

/// Chooses the replicas with which a volume goes on. `without`: nodes to go without, by name or
/// number.
///
/// # Errors
/// [`Ambiguity`] if no replica can be chosen.
pub fn choose_source(
    replicas: &[ReplicaImage],
    without: &[String],
) -> Result<RecoveryChoice, Ambiguity> {
    if let Some((a, b)) = duplicate_images(replicas) {
        return Err(Ambiguity::DuplicateImages(a.location_text(), b.location_text()));
    }
    let numbers = || 0..replicas.len();
    let sound: Vec<_> = numbers().filter(|n| !replicas[*n].in_sync().is_empty()).collect();
    let never: Vec<_> =
        numbers().filter(|n| replicas[*n].scan.log == ScannedIntentLog::Absent).collect();
    let all = |of: &[usize]| of.iter().map(|n| replicas[*n].location_text()).collect::<Vec<_>>();
    let source = match (&sound[..], &never[..]) {
        ([], [only]) if replicas.len() == 1 => *only,
        ([], []) => return Err(Ambiguity::NeverInSync(all(&numbers().collect::<Vec<_>>()))),
        (_, []) => newest_replica(replicas, without)?,
        _ => return Err(Ambiguity::NeverMirrored(all(&numbers().collect::<Vec<_>>()))),
    };
    Ok(RecoveryChoice { source, resync_targets: pick_resync_targets(replicas, source) })
}

/// Two images with one identity.
fn duplicate_images(replicas: &[ReplicaImage]) -> Option<(&ReplicaImage, &ReplicaImage)> {
    replicas.iter().enumerate().find_map(|(n, a)| {
        let same = replicas[n + 1..].iter().find(|b| b.scan.id == a.scan.id)?;
        Some((a, same))
    })
}

/// The newest of replicas some of which were in sync.
fn newest_replica(replicas: &[ReplicaImage], without: &[String]) -> Result<usize, Ambiguity> {
    let adopted: Vec<_> = replicas.iter().map(ReplicaImage::adopted_config).collect();
    let newest = recovery::choose_primary(&adopted).map_err(|DivergentHistories(a, b)| {
        Ambiguity::DivergentHistories(replicas[a].location_text(), replicas[b].location_text())
    })?;
    let Some(PrimaryChoice { primary: source, newer_out_of_sync: later }) = newest else {
        return Err(Ambiguity::NeverInSync(
            replicas.iter().map(ReplicaImage::location_text).collect(),
        ));
    };
    let (source_replica, later) = (&replicas[source], later.map(|n| &replicas[n]));
    let wanted: Vec<u16> = match later {
        None => source_replica.in_sync().to_vec(),
        Some(later) => {
            let known = later.description().map(|d| d.replicas.iter().map(|c| c.node).collect());
            known.unwrap_or_else(|| vec![0])
        }
    };
    let missing = unseen_nodes(replicas, later.unwrap_or(source_replica), &wanted, without);
    if missing.is_empty() { Ok(source) } else { Err(Ambiguity::UnseenReplicas(missing)) }
}

/// Those of the nodes `wanted` from which no replica was found, by the names that `reference` has.
fn unseen_nodes(
    replicas: &[ReplicaImage],
    reference: &ReplicaImage,
    wanted: &[u16],
    without: &[String],
) -> Vec<String> {
    let cluster = reference.description().and_then(|d| d.cluster);
    let was_on = |replica: &ReplicaImage| {
        let description = replica.description().filter(|d| d.cluster == cluster);
        description.map(|d| d.node)
    };
    // An image without a replica list is looked up in the lists of the others.
    let listed = |replica: &ReplicaImage| {
        let known = reference.description().map(|d| d.replicas.as_slice()).unwrap_or_default();
        known.iter().find(|c| c.image == Some(replica.scan.id)).map(|c| c.node)
    };
    let found_nodes: BTreeSet<u16> =
        replicas.iter().filter_map(|c| was_on(c).or_else(|| listed(c))).collect();
    let own = reference.description().map(|d| d.node).or(reference.in_sync().first().copied());
    let name = |node: u16| {
        let replicas = reference.description().map(|d| d.replicas.as_slice()).unwrap_or_default();
        let known = replicas.iter().find(|c| c.node == node);
        known.map_or_else(|| node.to_string(), |c| c.name.clone())
    };
    let given_up = |node: u16| without.iter().any(|w| *w == name(node) || *w == node.to_string());
    let away =
        wanted.iter().filter(|n| Some(**n) != own && !found_nodes.contains(n) && !given_up(**n));
    away.map(|n| name(*n)).collect()
}

/// The replicas to resync: one on each other node, the newest there.
fn pick_resync_targets(replicas: &[ReplicaImage], source: usize) -> Vec<usize> {
    let source_replica = &replicas[source];
    let fits = |c: &ReplicaImage| {
        c.node != source_replica.node
            && c.scan.size_bytes == source_replica.scan.size_bytes
            && c.scan.block_size == source_replica.scan.block_size
            // Without a log, the regions that it lacks are unknown.
            && c.scan.log != ScannedIntentLog::Absent
    };
    let mut nodes = BTreeSet::new();
    let mut targets: Vec<_> = (0..replicas.len()).filter(|n| fits(&replicas[*n])).collect();
    targets.sort_by_key(|n| (replicas[*n].node, std::cmp::Reverse(replicas[*n].epoch())));
    targets.retain(|n| nodes.insert(replicas[*n].node));
    targets.truncate(MAX_RECOVERED_REPLICAS - 1);
    targets
}

/// The name of the recovered volume.
pub fn volume_name_of(replica: &ReplicaImage) -> Option<VolumeName> {
    if let Some(description) = replica.description() {
        return Some(description.name.clone());
    }
    // NAME-ID.img, the default name of image files.
    let ImageLocation::Path(path) = &replica.location else { return None };
    let stem = path.file_stem()?.to_str()?;
    stem.strip_suffix(&format!("-{}", replica.scan.volume))?.parse().ok()
}

/// The plan for a volume with these replicas.
pub fn plan_volume(
    replicas: &[ReplicaImage],
    decided: &Result<RecoveryChoice, Ambiguity>,
) -> PlannedVolume {
    let (source, follow) = match decided {
        Ok(choice) => (Some(&replicas[choice.source]), choice.resync_targets.as_slice()),
        Err(_) => (None, &[][..]),
    };
    let reference = source.or(replicas.first());
    let mut notes = Vec::new();
    if let Some(source_replica) = source {
        notes.extend(source_notes(source_replica));
        let left =
            (0..replicas.len()).filter(|n| !follow.contains(n) && replicas[*n] != *source_replica);
        notes.extend(left.map(|n| format!("{} is not changed", replicas[n].location_text())));
    }
    PlannedVolume {
        volume: reference.map(|c| c.scan.volume).unwrap_or_default(),
        name: reference.and_then(volume_name_of),
        size_bytes: reference.map(|c| c.scan.size_bytes).unwrap_or_default(),
        source: source.map(ReplicaImage::to_api),
        resync_replicas: follow.iter().map(|n| replicas[*n].to_api()).collect(),
        notes,
        ambiguity: decided.as_ref().err().map(Ambiguity::text),
    }
}

/// Notes about a volume that is recovered from this replica.
fn source_notes(source_replica: &ReplicaImage) -> Vec<String> {
    let Some(description) = source_replica.description() else {
        let why = source_replica.scan.description_error.as_deref().map(|why| format!(" ({why})"));
        return vec![format!(
            "its image does not contain its allowed initiators{}: it is inaccessible until you \
             allow some",
            why.unwrap_or_default()
        )];
    };
    let mut notes = Vec::new();
    if !description.secret_kinds.is_empty() {
        notes.push(
            "its initiators had secrets, which images do not contain: set new ones (windrose \
             volume chap, dhchap, tls), then allow the initiators"
                .to_owned(),
        );
        notes.extend(description.allow.iter().map(|who| format!("allowed initiator: {who}")));
    } else if !description.allow_complete {
        notes.push(
            "it allowed more initiators than its image can record: allow the others".to_owned(),
        );
    }
    if let Some(behind) = &description.shared_target {
        notes.push(format!(
            "it used the target of another volume: windrose volume target NAME --join {} --lun {}",
            behind.target, description.lun
        ));
    }
    if source_replica.scan.thin {
        notes.push(format!("it is thin: it may grow to {}", Size(source_replica.scan.size_bytes)));
    }
    notes
}

#[cfg(test)]
mod tests {
    use api::BlockSize;

    use super::*;
    use records::samples::description;

    /// A replica on node `node` that knows `epoch` with these nodes in sync.
    fn copy(node: u16, epoch: u64, in_sync: &[u16]) -> ReplicaImage {
        let mut described = description("web", node);
        described.replicas = [1, 2, 3]
            .map(|n| records::record::image_description::DescribedReplica {
                node: n,
                name: format!("n{n}"),
                image: Some(Uuid::from_u128(n.into())),
            })
            .into();
        ReplicaImage {
            // Nodes get new numbers when they join again.
            node: NodeId(node + 10),
            node_name: format!("n{node}"),
            location: ImageLocation::Path(format!("/v/{node}").into()),
            is_device: false,
            scan: ScannedImage {
                volume: Uuid::from_u128(7),
                id: Uuid::from_u128(node.into()),
                generation: 2,
                size_bytes: 1 << 30,
                block_size: BlockSize::B512,
                thin: true,
                log: ScannedIntentLog::Present {
                    epoch,
                    config: Uuid::from_u128(epoch.into()),
                    in_sync: in_sync.to_vec(),
                },
                description: Some(described),
                description_error: None,
            },
        }
    }

    fn with_log(copy: ReplicaImage, log: ScannedIntentLog) -> ReplicaImage {
        ReplicaImage { scan: ScannedImage { log, ..copy.scan.clone() }, ..copy }
    }

    fn choice(leads: usize, follow: &[usize]) -> Result<RecoveryChoice, Ambiguity> {
        Ok(RecoveryChoice { source: leads, resync_targets: follow.to_vec() })
    }

    fn doubt(nodes: &[&str]) -> Result<RecoveryChoice, Ambiguity> {
        Err(Ambiguity::UnseenReplicas(nodes.iter().map(|n| (*n).to_owned()).collect()))
    }

    #[test]
    fn the_newest_copy_that_was_in_sync_leads() {
        // Both were in sync to the end: either can be the source, and the other is resynced.
        assert_eq!(
            choose_source(&[copy(1, 7, &[1, 2]), copy(2, 7, &[2, 1])], &[]),
            choice(0, &[1])
        );
        // The second has gone on alone.
        assert_eq!(choose_source(&[copy(1, 7, &[1, 2]), copy(2, 8, &[2])], &[]), choice(1, &[0]));
        // One of three was away for long.
        let three = [copy(1, 3, &[1, 2, 3]), copy(2, 8, &[2, 3]), copy(3, 8, &[3, 2])];
        assert_eq!(choose_source(&three, &[]), choice(1, &[0, 2]));
        // A replica that was being resynced knows the same epoch, and holds a part of the data.
        assert_eq!(choose_source(&[copy(1, 9, &[]), copy(2, 9, &[2])], &[]), choice(1, &[0]));
    }

    #[test]
    fn a_copy_that_may_be_newer_elsewhere_is_asked_for() {
        let alone = [copy(1, 7, &[1, 2])];
        assert_eq!(choose_source(&alone, &[]), doubt(&["n2"]));
        assert_eq!(
            choose_source(&alone, &["n3".into()]),
            doubt(&["n2"]),
            "another one was given up"
        );
        assert_eq!(choose_source(&alone, &["n2".into()]), choice(0, &[]));
        assert_eq!(choose_source(&alone, &["2".into()]), choice(0, &[]));
        assert_eq!(
            choose_source(&[copy(1, 7, &[1])], &[]),
            choice(0, &[]),
            "it was the only one in sync"
        );
        // A node that was in sync then and is here with an older epoch has nothing newer.
        assert_eq!(
            choose_source(&[copy(1, 7, &[1, 2]), copy(2, 6, &[2, 1])], &[]),
            choice(0, &[1])
        );
        let three = [copy(1, 7, &[1, 2, 3]), copy(3, 7, &[3, 1, 2])];
        assert_eq!(choose_source(&three, &[]), doubt(&["n2"]));
    }

    #[test]
    fn one_that_was_not_in_sync_tells_of_newer_copies_that_are_not_here() {
        // Node 3 was out of sync in epoch 9: nodes 1 and 2 know that epoch, or one of them does.
        let seen = [copy(1, 7, &[1, 2]), copy(3, 9, &[])];
        assert_eq!(choose_source(&seen, &[]), doubt(&["n2"]));
        let all = [copy(1, 7, &[1, 2]), copy(2, 9, &[2]), copy(3, 9, &[])];
        assert_eq!(choose_source(&all, &[]), choice(1, &[0, 2]));
        let mut undescribed = copy(3, 9, &[]);
        undescribed.scan.description = None;
        assert_eq!(choose_source(&[copy(1, 7, &[1]), undescribed], &[]), doubt(&["0"]));
    }

    #[test]
    fn nothing_is_decided_between_two_histories() {
        let mut other = copy(2, 7, &[2]);
        other = with_log(
            other,
            ScannedIntentLog::Present { epoch: 7, config: Uuid::from_u128(99), in_sync: vec![2] },
        );
        let decided = choose_source(&[copy(1, 7, &[1]), other], &["n1".into(), "n2".into()]);
        let Err(doubt @ Ambiguity::DivergentHistories(..)) = decided else { panic!("{decided:?}") };
        assert!(doubt.text().contains("/v/1 on n1 and /v/2 on n2"), "{}", doubt.text());
    }

    #[test]
    fn flat_images_are_taken_one_by_one() {
        let flat = |node| with_log(copy(node, 0, &[]), ScannedIntentLog::Absent);
        assert_eq!(choose_source(&[flat(1)], &[]), choice(0, &[]));
        assert!(
            matches!(choose_source(&[flat(1), flat(2)], &[]), Err(Ambiguity::NeverMirrored(all)) if all.len() == 2)
        );
        let mixed = [flat(1), copy(2, 7, &[2])];
        assert!(
            matches!(choose_source(&mixed, &[]), Err(Ambiguity::NeverMirrored(_))),
            "one is from before the mirror"
        );
    }

    #[test]
    fn what_was_never_in_sync_or_has_lost_its_log_does_not_lead() {
        let lost =
            |node| with_log(copy(node, 0, &[]), ScannedIntentLog::Unreadable("rotten".into()));
        assert!(matches!(choose_source(&[copy(1, 9, &[])], &[]), Err(Ambiguity::NeverInSync(_))));
        assert!(matches!(choose_source(&[lost(1)], &[]), Err(Ambiguity::NeverInSync(_))));
        assert!(matches!(choose_source(&[lost(1), lost(2)], &[]), Err(Ambiguity::NeverInSync(_))));
        assert_eq!(choose_source(&[lost(1), copy(2, 7, &[2, 1])], &[]), choice(1, &[0]));
        assert!(matches!(choose_source(&[], &[]), Err(Ambiguity::NeverInSync(_))));
    }

    #[test]
    fn duplicates_of_one_image_are_not_told_apart() {
        let a = copy(1, 7, &[1]);
        let b = ReplicaImage {
            node: NodeId(12),
            location: ImageLocation::Path("/copy".into()),
            ..a.clone()
        };
        assert!(
            matches!(choose_source(&[a, b], &[]), Err(Ambiguity::DuplicateImages(_, at)) if at.contains("/copy"))
        );
    }

    #[test]
    fn one_copy_of_each_node_follows_and_only_if_it_fits() {
        let older = ReplicaImage { node: NodeId(12), ..copy(3, 5, &[3]) };
        let mut small = copy(3, 8, &[]);
        small.scan.id = Uuid::from_u128(30);
        small.scan.size_bytes = 1 << 20;
        let all = [copy(1, 8, &[1]), copy(2, 7, &[2, 1]), older, small];
        assert_eq!(choose_source(&all, &[]), choice(0, &[1]));
        let plan = plan_volume(&all, &choose_source(&all, &[]));
        assert_eq!((plan.source.unwrap().node, plan.resync_replicas.len()), ("n1".to_owned(), 1));
        assert!(
            plan.notes.iter().any(|n| n.contains("/v/3 on n3 is not changed")),
            "{:?}",
            plan.notes
        );
    }

    #[test]
    fn a_volume_is_called_what_its_image_tells_or_what_its_file_is_called() {
        let mut one = copy(1, 7, &[1]);
        assert_eq!(volume_name_of(&one), Some("web".parse().unwrap()));
        one.scan.description = None;
        assert_eq!(volume_name_of(&one), None);
        one.location = ImageLocation::Path(format!("/v/mail-{}.img", one.scan.volume).into());
        assert_eq!(volume_name_of(&one), Some("mail".parse().unwrap()));
        let plan = plan_volume(&[one.clone()], &choose_source(&[one], &[]));
        assert!(
            plan.notes[0].contains("does not contain its allowed initiators"),
            "{:?}",
            plan.notes
        );
    }

    #[test]
    fn secrets_are_to_be_set_before_anybody_is_let_in() {
        let mut one = copy(1, 7, &[1]);
        let told = one.scan.description.as_mut().unwrap();
        told.secret_kinds.insert(records::record::image_description::SecretKind::Chap);
        told.allow.insert("iqn.1993-08.org.debian:01:x".parse().unwrap());
        let plan = plan_volume(&[one.clone()], &choose_source(&[one], &[]));
        assert!(plan.notes.iter().any(|n| n.contains("set new ones")), "{:?}", plan.notes);
        assert!(plan.notes.iter().any(|n| n.ends_with("org.debian:01:x")), "{:?}", plan.notes);
    }
}
