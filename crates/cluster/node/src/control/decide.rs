//! Which copy of a volume goes on when no record says so: a pure function of what images tell (RFD 0036, 4).
//!
//! A copy that was in sync in the highest epoch holds every acknowledged write of that epoch. There may be a higher one
//! only if a node that was in sync then has gone on without it; so either all of them are looked at, or whoever
//! decides says which are to be done without. Where histories differ nothing is decided.

use std::collections::BTreeSet;

use api::{PlannedCopy, PlannedVolume, Size, VolumeName};
use block::Epoch;
use mirror::recovery::{self, Adopted, DifferentHistories, Newest};
use peer::NodeId;
use uuid::Uuid;

use crate::engine::{FoundImage, FoundLog, ImagePlace};
use crate::record::description::Description;

/// Most copies of a volume.
const MAX_COPIES: usize = 3;

/// A copy of a volume, as its image tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    /// The node that has it now.
    pub(super) node: NodeId,
    /// What that is called.
    pub(super) node_name: String,
    /// Where it is there.
    pub(super) place: ImagePlace,
    /// Whether that is a block device.
    pub(super) device: bool,
    /// What it tells.
    pub(super) found: FoundImage,
}

/// The copies that a volume goes on with, by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// What it holds is the volume.
    pub(super) leads: usize,
    /// They are brought in sync with that one.
    pub(super) follow: Vec<usize>,
}

/// Why it cannot be decided which copy goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// These nodes were in sync with the newest copy that was found, and may have gone on without it.
    Missing(Vec<String>),
    /// Two copies were in sync in one epoch of different histories.
    Histories(String, String),
    /// Copies that never were in a mirror say nothing about which is newer.
    Several(Vec<String>),
    /// Two copies have one name: one is a duplicate of the other, made at some time.
    Twins(String, String),
    /// No copy is known to have been in sync.
    Partial(Vec<String>),
}

impl Copy {
    /// Where it is, for people.
    pub(super) fn at(&self) -> String {
        format!("{} on {}", self.place, self.node_name)
    }

    fn epoch(&self) -> u64 {
        match self.found.log {
            FoundLog::Has { epoch, .. } => epoch,
            FoundLog::Never | FoundLog::Lost(_) => 0,
        }
    }

    /// Whether it was in sync in the last epoch that it knows.
    fn in_sync(&self) -> &[u16] {
        match &self.found.log {
            FoundLog::Has { in_sync, .. } => in_sync,
            FoundLog::Never | FoundLog::Lost(_) => &[],
        }
    }

    fn adopted(&self) -> Adopted {
        Adopted {
            node: self.node,
            epoch: Epoch(self.epoch()),
            config: self.config(),
            in_sync: self.in_sync().iter().copied().map(NodeId).collect(),
        }
    }

    fn config(&self) -> Uuid {
        match self.found.log {
            FoundLog::Has { config, .. } => config,
            FoundLog::Never | FoundLog::Lost(_) => Uuid::nil(),
        }
    }

    fn description(&self) -> Option<&Description> {
        self.found.description.as_ref()
    }

    /// As it is shown.
    pub(super) fn shown(&self) -> PlannedCopy {
        let epoch = self.epoch();
        PlannedCopy {
            node: self.node_name.clone(),
            image: self.place.to_string(),
            epoch: (epoch > 0).then_some(epoch),
            in_sync: !self.in_sync().is_empty(),
        }
    }
}

impl Doubt {
    /// The doubt as a sentence, with what helps.
    pub(super) fn sentence(&self) -> String {
        match self {
            Self::Missing(nodes) => {
                let (names, flags) = (nodes.join(", "), nodes.join(" --without "));
                format!(
                    "the copy on {names} was in sync too, was not seen, and may be newer: start that node and have it \
                     join, or do without it (--without {flags}; what only it holds is lost)"
                )
            }
            Self::Histories(a, b) => format!(
                "{a} and {b} have different histories of one epoch: look at both, then take one of them \
                 (windrose volume adopt IMAGE --force)"
            ),
            Self::Several(all) => format!(
                "{} hold it, and none says which is newer: look at them, then take one of them \
                 (windrose volume adopt IMAGE --force)",
                all.join(", ")
            ),
            Self::Twins(a, b) => format!(
                "{a} and {b} are duplicates of one image, made at different times or not: take the one that is newer away \
                 from the older one's place, or take one of them (windrose volume adopt IMAGE --force)"
            ),
            Self::Partial(all) => format!(
                "no copy that was found ({}) is known to have been in sync: it may hold a part at most; to take it all the \
                 same: windrose volume adopt IMAGE --force",
                all.join(", ")
            ),
        }
    }
}

/// The copies that a volume goes on with. `without`: nodes whose copies are to be done without, by name or number.
///
/// # Errors
/// [`Doubt`]: nothing is to be done.
pub(super) fn decide(copies: &[Copy], without: &[String]) -> Result<Choice, Doubt> {
    if let Some((a, b)) = twins(copies) {
        return Err(Doubt::Twins(a.at(), b.at()));
    }
    let numbers = || 0..copies.len();
    let sound: Vec<_> = numbers().filter(|n| !copies[*n].in_sync().is_empty()).collect();
    let never: Vec<_> = numbers().filter(|n| copies[*n].found.log == FoundLog::Never).collect();
    let all = |of: &[usize]| of.iter().map(|n| copies[*n].at()).collect::<Vec<_>>();
    let leads = match (&sound[..], &never[..]) {
        ([], [only]) if copies.len() == 1 => *only,
        ([], []) => return Err(Doubt::Partial(all(&numbers().collect::<Vec<_>>()))),
        (_, []) => newest(copies, without)?,
        _ => return Err(Doubt::Several(all(&numbers().collect::<Vec<_>>()))),
    };
    Ok(Choice { leads, follow: followers(copies, leads) })
}

/// Two images with one name.
fn twins(copies: &[Copy]) -> Option<(&Copy, &Copy)> {
    copies.iter().enumerate().find_map(|(n, a)| {
        let same = copies[n + 1..].iter().find(|b| b.found.image == a.found.image)?;
        Some((a, same))
    })
}

/// The newest of copies some of which were in sync.
fn newest(copies: &[Copy], without: &[String]) -> Result<usize, Doubt> {
    let adopted: Vec<_> = copies.iter().map(Copy::adopted).collect();
    let newest = recovery::newest(&adopted)
        .map_err(|DifferentHistories(a, b)| Doubt::Histories(copies[a].at(), copies[b].at()))?;
    let Some(Newest { leads, later }) = newest else {
        return Err(Doubt::Partial(copies.iter().map(Copy::at).collect()));
    };
    let (lead, later) = (&copies[leads], later.map(|n| &copies[n]));
    let wanted: Vec<u16> = match later {
        None => lead.in_sync().to_vec(),
        Some(later) => {
            let known = later.description().map(|d| d.copies.iter().map(|c| c.node).collect());
            known.unwrap_or_else(|| vec![0])
        }
    };
    let missing = missing(copies, later.unwrap_or(lead), &wanted, without);
    if missing.is_empty() { Ok(leads) } else { Err(Doubt::Missing(missing)) }
}

/// The nodes of `wanted` that no copy here was on, by what `teller` calls them.
fn missing(copies: &[Copy], teller: &Copy, wanted: &[u16], without: &[String]) -> Vec<String> {
    let cluster = teller.description().and_then(|d| d.cluster);
    let was_on = |copy: &Copy| {
        let description = copy.description().filter(|d| d.cluster == cluster);
        description.map(|d| d.node)
    };
    // What an image does not tell itself, another one may tell of it.
    let listed = |copy: &Copy| {
        let known = teller.description().map(|d| d.copies.as_slice()).unwrap_or_default();
        known.iter().find(|c| c.image == Some(copy.found.image)).map(|c| c.node)
    };
    let seen: BTreeSet<u16> =
        copies.iter().filter_map(|c| was_on(c).or_else(|| listed(c))).collect();
    let own = teller.description().map(|d| d.node).or(teller.in_sync().first().copied());
    let name = |node: u16| {
        let copies = teller.description().map(|d| d.copies.as_slice()).unwrap_or_default();
        let known = copies.iter().find(|c| c.node == node);
        known.map_or_else(|| node.to_string(), |c| c.name.clone())
    };
    let given_up = |node: u16| without.iter().any(|w| *w == name(node) || *w == node.to_string());
    let away = wanted.iter().filter(|n| Some(**n) != own && !seen.contains(n) && !given_up(**n));
    away.map(|n| name(*n)).collect()
}

/// The copies that follow: one on each other node, the newest there.
fn followers(copies: &[Copy], leads: usize) -> Vec<usize> {
    let lead = &copies[leads];
    let fits = |c: &Copy| {
        c.node != lead.node
            && c.found.size_bytes == lead.found.size_bytes
            && c.found.block_size == lead.found.block_size
            // Without a log nobody knows what it lacks.
            && c.found.log != FoundLog::Never
    };
    let mut nodes = BTreeSet::new();
    let mut fit: Vec<_> = (0..copies.len()).filter(|n| fits(&copies[*n])).collect();
    fit.sort_by_key(|n| (copies[*n].node, std::cmp::Reverse(copies[*n].epoch())));
    fit.retain(|n| nodes.insert(copies[*n].node));
    fit.truncate(MAX_COPIES - 1);
    fit
}

/// What a volume will be called.
pub(super) fn name_of(copy: &Copy) -> Option<VolumeName> {
    if let Some(description) = copy.description() {
        return Some(description.name.clone());
    }
    // NAME-ID.img, as images of volumes without a path of their own are called.
    let ImagePlace::Path(path) = &copy.place else { return None };
    let stem = path.file_stem()?.to_str()?;
    stem.strip_suffix(&format!("-{}", copy.found.volume))?.parse().ok()
}

/// The plan for a volume whose copies these are.
pub(super) fn planned(copies: &[Copy], decided: &Result<Choice, Doubt>) -> PlannedVolume {
    let (leads, follow) = match decided {
        Ok(choice) => (Some(&copies[choice.leads]), choice.follow.as_slice()),
        Err(_) => (None, &[][..]),
    };
    let teller = leads.or(copies.first());
    let mut notes = Vec::new();
    if let Some(lead) = leads {
        notes.extend(lead_notes(lead));
        let left = (0..copies.len()).filter(|n| !follow.contains(n) && copies[*n] != *lead);
        notes.extend(left.map(|n| format!("{} is left as it is", copies[n].at())));
    }
    PlannedVolume {
        volume: teller.map(|c| c.found.volume).unwrap_or_default(),
        name: teller.and_then(name_of),
        size_bytes: teller.map(|c| c.found.size_bytes).unwrap_or_default(),
        leads: leads.map(Copy::shown),
        follow: follow.iter().map(|n| copies[*n].shown()).collect(),
        notes,
        doubt: decided.as_ref().err().map(Doubt::sentence),
    }
}

/// What is to be known of a volume that is taken from what this copy tells.
fn lead_notes(lead: &Copy) -> Vec<String> {
    let Some(told) = lead.description() else {
        let why = lead.found.undescribed.as_deref().map(|why| format!(" ({why})"));
        return vec![format!(
            "its image does not tell who could reach it{}: nobody can until you allow them",
            why.unwrap_or_default()
        )];
    };
    let mut notes = Vec::new();
    if !told.secrets.is_empty() {
        notes.push(
            "initiators had to prove who they are, and secrets are not kept in images: set them anew (windrose volume \
             chap, dhchap, tls), then allow the initiators"
                .to_owned(),
        );
        notes.extend(told.allow.iter().map(|who| format!("it allowed {who}")));
    } else if !told.allow_complete {
        notes.push(
            "it allowed more initiators than its image has room for: allow the rest".to_owned(),
        );
    }
    if let Some(behind) = &told.behind {
        notes.push(format!(
            "it stood behind the target of another volume: windrose volume target NAME --join {} --lun {}",
            behind.target, told.lun
        ));
    }
    if lead.found.thin {
        notes.push(format!("it is thin: it may take up to {}", Size(lead.found.size_bytes)));
    }
    notes
}

#[cfg(test)]
mod tests {
    use api::BlockSize;

    use super::*;
    use crate::record::description::tests::description;

    /// A copy on node `node` that knows `epoch` with these in sync.
    fn copy(node: u16, epoch: u64, in_sync: &[u16]) -> Copy {
        let mut described = description("web", node);
        described.copies = [1, 2, 3]
            .map(|n| crate::record::description::DescribedCopy {
                node: n,
                name: format!("n{n}"),
                image: Some(Uuid::from_u128(n.into())),
            })
            .into();
        Copy {
            // Numbers change when nodes join anew.
            node: NodeId(node + 10),
            node_name: format!("n{node}"),
            place: ImagePlace::Path(format!("/v/{node}").into()),
            device: false,
            found: FoundImage {
                volume: Uuid::from_u128(7),
                image: Uuid::from_u128(node.into()),
                generation: 2,
                size_bytes: 1 << 30,
                block_size: BlockSize::B512,
                thin: true,
                log: FoundLog::Has {
                    epoch,
                    config: Uuid::from_u128(epoch.into()),
                    in_sync: in_sync.to_vec(),
                },
                description: Some(described),
                undescribed: None,
            },
        }
    }

    fn with_log(copy: Copy, log: FoundLog) -> Copy {
        Copy { found: FoundImage { log, ..copy.found.clone() }, ..copy }
    }

    fn choice(leads: usize, follow: &[usize]) -> Result<Choice, Doubt> {
        Ok(Choice { leads, follow: follow.to_vec() })
    }

    fn doubt(nodes: &[&str]) -> Result<Choice, Doubt> {
        Err(Doubt::Missing(nodes.iter().map(|n| (*n).to_owned()).collect()))
    }

    #[test]
    fn the_newest_copy_that_was_in_sync_leads() {
        // Both were in sync to the last: either will do, and the other follows.
        assert_eq!(decide(&[copy(1, 7, &[1, 2]), copy(2, 7, &[2, 1])], &[]), choice(0, &[1]));
        // The second has gone on alone.
        assert_eq!(decide(&[copy(1, 7, &[1, 2]), copy(2, 8, &[2])], &[]), choice(1, &[0]));
        // Of three, one was away for long.
        let three = [copy(1, 3, &[1, 2, 3]), copy(2, 8, &[2, 3]), copy(3, 8, &[3, 2])];
        assert_eq!(decide(&three, &[]), choice(1, &[0, 2]));
        // One that was being brought in sync knows the same epoch, and holds a part.
        assert_eq!(decide(&[copy(1, 9, &[]), copy(2, 9, &[2])], &[]), choice(1, &[0]));
    }

    #[test]
    fn a_copy_that_may_be_newer_elsewhere_is_asked_for() {
        let alone = [copy(1, 7, &[1, 2])];
        assert_eq!(decide(&alone, &[]), doubt(&["n2"]));
        assert_eq!(decide(&alone, &["n3".into()]), doubt(&["n2"]), "another one was given up");
        assert_eq!(decide(&alone, &["n2".into()]), choice(0, &[]));
        assert_eq!(decide(&alone, &["2".into()]), choice(0, &[]));
        assert_eq!(decide(&[copy(1, 7, &[1])], &[]), choice(0, &[]), "it was the only one in sync");
        // Whoever was in sync then and is here with an older epoch has nothing newer.
        assert_eq!(decide(&[copy(1, 7, &[1, 2]), copy(2, 6, &[2, 1])], &[]), choice(0, &[1]));
        let three = [copy(1, 7, &[1, 2, 3]), copy(3, 7, &[3, 1, 2])];
        assert_eq!(decide(&three, &[]), doubt(&["n2"]));
    }

    #[test]
    fn one_that_was_not_in_sync_tells_of_newer_copies_that_are_not_here() {
        // Node 3 was outside in epoch 9: nodes 1 and 2 know that epoch, or one of them does.
        let seen = [copy(1, 7, &[1, 2]), copy(3, 9, &[])];
        assert_eq!(decide(&seen, &[]), doubt(&["n2"]));
        let all = [copy(1, 7, &[1, 2]), copy(2, 9, &[2]), copy(3, 9, &[])];
        assert_eq!(decide(&all, &[]), choice(1, &[0, 2]));
        let mut undescribed = copy(3, 9, &[]);
        undescribed.found.description = None;
        assert_eq!(decide(&[copy(1, 7, &[1]), undescribed], &[]), doubt(&["0"]));
    }

    #[test]
    fn nothing_is_decided_between_two_histories() {
        let mut other = copy(2, 7, &[2]);
        other = with_log(
            other,
            FoundLog::Has { epoch: 7, config: Uuid::from_u128(99), in_sync: vec![2] },
        );
        let decided = decide(&[copy(1, 7, &[1]), other], &["n1".into(), "n2".into()]);
        let Err(doubt @ Doubt::Histories(..)) = decided else { panic!("{decided:?}") };
        assert!(doubt.sentence().contains("/v/1 on n1 and /v/2 on n2"), "{}", doubt.sentence());
    }

    #[test]
    fn flat_images_are_taken_one_by_one() {
        let flat = |node| with_log(copy(node, 0, &[]), FoundLog::Never);
        assert_eq!(decide(&[flat(1)], &[]), choice(0, &[]));
        assert!(
            matches!(decide(&[flat(1), flat(2)], &[]), Err(Doubt::Several(all)) if all.len() == 2)
        );
        let mixed = [flat(1), copy(2, 7, &[2])];
        assert!(
            matches!(decide(&mixed, &[]), Err(Doubt::Several(_))),
            "one is from before the mirror"
        );
    }

    #[test]
    fn what_was_never_in_sync_or_has_lost_its_log_does_not_lead() {
        let lost = |node| with_log(copy(node, 0, &[]), FoundLog::Lost("rotten".into()));
        assert!(matches!(decide(&[copy(1, 9, &[])], &[]), Err(Doubt::Partial(_))));
        assert!(matches!(decide(&[lost(1)], &[]), Err(Doubt::Partial(_))));
        assert!(matches!(decide(&[lost(1), lost(2)], &[]), Err(Doubt::Partial(_))));
        assert_eq!(decide(&[lost(1), copy(2, 7, &[2, 1])], &[]), choice(1, &[0]));
        assert!(matches!(decide(&[], &[]), Err(Doubt::Partial(_))));
    }

    #[test]
    fn duplicates_of_one_image_are_not_told_apart() {
        let a = copy(1, 7, &[1]);
        let b = Copy { node: NodeId(12), place: ImagePlace::Path("/copy".into()), ..a.clone() };
        assert!(matches!(decide(&[a, b], &[]), Err(Doubt::Twins(_, at)) if at.contains("/copy")));
    }

    #[test]
    fn one_copy_of_each_node_follows_and_only_if_it_fits() {
        let older = Copy { node: NodeId(12), ..copy(3, 5, &[3]) };
        let mut small = copy(3, 8, &[]);
        small.found.image = Uuid::from_u128(30);
        small.found.size_bytes = 1 << 20;
        let all = [copy(1, 8, &[1]), copy(2, 7, &[2, 1]), older, small];
        assert_eq!(decide(&all, &[]), choice(0, &[1]));
        let plan = planned(&all, &decide(&all, &[]));
        assert_eq!((plan.leads.unwrap().node, plan.follow.len()), ("n1".to_owned(), 1));
        assert!(
            plan.notes.iter().any(|n| n.contains("/v/3 on n3 is left as it is")),
            "{:?}",
            plan.notes
        );
    }

    #[test]
    fn a_volume_is_called_what_its_image_tells_or_what_its_file_is_called() {
        let mut one = copy(1, 7, &[1]);
        assert_eq!(name_of(&one), Some("web".parse().unwrap()));
        one.found.description = None;
        assert_eq!(name_of(&one), None);
        one.place = ImagePlace::Path(format!("/v/mail-{}.img", one.found.volume).into());
        assert_eq!(name_of(&one), Some("mail".parse().unwrap()));
        let plan = planned(&[one.clone()], &decide(&[one], &[]));
        assert!(plan.notes[0].contains("does not tell who could reach it"), "{:?}", plan.notes);
    }

    #[test]
    fn secrets_are_to_be_set_before_anybody_is_let_in() {
        let mut one = copy(1, 7, &[1]);
        let told = one.found.description.as_mut().unwrap();
        told.secrets.insert(crate::record::description::Secrets::Chap);
        told.allow.insert("iqn.1993-08.org.debian:01:x".parse().unwrap());
        let plan = planned(&[one.clone()], &decide(&[one], &[]));
        assert!(plan.notes.iter().any(|n| n.contains("set them anew")), "{:?}", plan.notes);
        assert!(plan.notes.iter().any(|n| n.ends_with("org.debian:01:x")), "{:?}", plan.notes);
    }
}
