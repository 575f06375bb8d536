//! Images that nodes still keep of a volume whose record no longer names them, at places where a
//! new replica would be made. They remain when a node is removed from the cluster by force and
//! joins again.
//!
//! They are never overwritten automatically, and a node with one is not chosen unless an
//! administrator says `--force`: it may hold writes that the serving replicas lack (RFD 0039, 2.6).

use std::collections::BTreeSet;

use api::{Backing, NewBacking};
use engine::ImageLocation;
use peer::NodeId;
use records::record::VolumeRecord;
use uuid::Uuid;

use crate::orphan_images::UnservedImage;
use crate::placement::{Candidate, equivalent_backing};

/// Why a node with an old image is not chosen.
pub const HAS_OLD_IMAGE: &str = "has an old image of it";

/// Prefix and suffix of the error for a replica that was not made because of an old image.
const OLD_IMAGE_PREFIX: &str = "it holds an image of volume ";
const OLD_IMAGE_SUFFIX: &str = " from before, which may have newer data";

/// Images of one volume that no record names, with their nodes.
#[derive(Debug, Default)]
pub struct OldImages(Vec<(NodeId, ImageLocation)>);

impl OldImages {
    /// Those of `images` that hold this volume and that no record names.
    pub fn of_volume<'a>(
        volume: Uuid,
        images: impl Iterator<Item = (NodeId, &'a UnservedImage)>,
    ) -> Self {
        let matching =
            images.filter(|(_, image)| !image.is_referenced && image.scan.volume == volume);
        Self(matching.map(|(node, image)| (node, image.location.clone())).collect())
    }

    /// Whether `node` has one at the place that `backing` names.
    pub fn has_at(&self, node: NodeId, backing: &Backing, volume: Uuid) -> bool {
        let at = match backing {
            Backing::File { path } | Backing::Device { path } => ImageLocation::Path(path.clone()),
            Backing::Pool { pool } => ImageLocation::InPool(pool.clone(), volume),
        };
        self.0.iter().any(|(of, location)| *of == node && *location == at)
    }
}

/// The command that makes a replica over the old image on the first of these nodes, or on `only`.
pub fn overwrite_hint(
    record: &VolumeRecord,
    backing: &NewBacking,
    candidates: &[Candidate],
    taken: &[NodeId],
    only: Option<NodeId>,
) -> Option<String> {
    let is_meant = |c: &&Candidate| !taken.contains(&c.node) && only.is_none_or(|n| n == c.node);
    let has_old =
        candidates.iter().filter(is_meant).find(|c| c.exclusion == Some(HAS_OLD_IMAGE))?;
    Some(overwrite_command(record, backing, &has_old.name))
}

/// The same for a node that found its old image only when it was to make a replica, and failed.
pub fn overwrite_hint_after_failure(
    record: &VolumeRecord,
    backing: &NewBacking,
    why: &str,
    failed: &BTreeSet<NodeId>,
    name: impl Fn(NodeId) -> String,
) -> Option<String> {
    let node = failed.first().filter(|_| is_old_image(why))?;
    Some(overwrite_command(record, backing, &name(*node)))
}

fn overwrite_command(record: &VolumeRecord, backing: &NewBacking, node: &str) -> String {
    format!(
        "to overwrite that image with a new replica on node {node}: windrose volume mirror add {} \
         --on {node}{} --force",
        record.name,
        new_backing_flags(backing)
    )
}

/// Why no replica is made over an old image.
pub fn old_image_text(at: &ImageLocation, record: &VolumeRecord, how_old: &str) -> String {
    format!("{at}: {OLD_IMAGE_PREFIX}{}{OLD_IMAGE_SUFFIX} ({how_old})", record.name)
}

/// Whether an old image is why a replica was not made.
fn is_old_image(reason: &str) -> bool {
    reason.contains(OLD_IMAGE_PREFIX) && reason.contains(OLD_IMAGE_SUFFIX)
}

/// The command that makes a replica which failed, by the reason that its node gave.
pub(crate) fn replace_hint(
    record: &VolumeRecord,
    backing: &Backing,
    node: &str,
    reason: &str,
) -> String {
    let placement = match equivalent_backing(backing, record.id) {
        Some(like) => new_backing_flags(&like),
        None => backing_flags(backing),
    };
    let again = format!("windrose volume mirror replace {} --on {node}{placement}", record.name);
    match is_old_image(reason) {
        true => format!(
            "to overwrite that image with a new replica on node {node}: {again} \
            --force"
        ),
        false => format!("remove the cause, then: {again}"),
    }
}

/// The options that place a new replica; none for a node's own directory.
fn new_backing_flags(backing: &NewBacking) -> String {
    match backing {
        NewBacking::File { path: None } => String::new(),
        NewBacking::File { path: Some(path) } => format!(" --path {}", path.display()),
        NewBacking::Device { path } => format!(" --device {}", path.display()),
        NewBacking::Pool { pool } => format!(" --pool {pool}"),
    }
}

/// The options that name the place of a replica.
pub fn backing_flags(backing: &Backing) -> String {
    match backing {
        Backing::File { path } => format!(" --path {}", path.display()),
        Backing::Device { path } => format!(" --device {}", path.display()),
        Backing::Pool { pool } => format!(" --pool {pool}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement;
    use engine::{ScannedImage, ScannedIntentLog};
    use records::samples::record;

    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    fn held(volume: Uuid, place: ImageLocation) -> UnservedImage {
        let found = ScannedImage {
            volume,
            id: Uuid::from_u128(9),
            generation: 1,
            size_bytes: 1 << 20,
            block_size: api::BlockSize::B512,
            thin: true,
            log: ScannedIntentLog::Present { epoch: 2, config: Uuid::nil(), in_sync: vec![1, 2] },
            description: None,
            description_error: None,
        };
        UnservedImage { location: place, is_device: false, is_referenced: false, scan: found }
    }

    fn candidate(node: NodeId, name: &str, unfit: Option<&'static str>) -> Candidate {
        let domain = name.to_owned();
        Candidate {
            node,
            name: name.to_owned(),
            failure_domain: domain,
            exclusion: unfit,
            free_bytes: 1,
            replicas: 0,
        }
    }

    #[test]
    fn an_image_from_before_is_in_the_way_only_where_the_copy_would_be() {
        let record = record("web");
        let path = std::path::PathBuf::from("/data/volumes/web.img");
        let here = held(record.id, ImageLocation::Path(path.clone()));
        let other = held(Uuid::from_u128(77), ImageLocation::Path(path.clone()));
        let listed = UnservedImage { is_referenced: true, ..here.clone() };
        let old = OldImages::of_volume(
            record.id,
            [(B, &here), (C, &other), (NodeId(4), &listed)].into_iter(),
        );
        let file = Backing::File { path };
        assert!(old.has_at(B, &file, record.id));
        assert!(!old.has_at(C, &file, record.id), "another volume's");
        assert!(!old.has_at(NodeId(4), &file, record.id), "the copy of a record");
        let elsewhere = Backing::File { path: "/srv/web.img".into() };
        assert!(!old.has_at(B, &elsewhere, record.id), "it stays as it is");
        let pool: api::PoolName = "tank".parse().unwrap();
        let in_pool = held(record.id, ImageLocation::InPool(pool.clone(), record.id));
        let old = OldImages::of_volume(record.id, [(B, &in_pool)].into_iter());
        assert!(old.has_at(B, &Backing::Pool { pool }, record.id));
    }

    #[test]
    fn a_node_with_an_image_from_before_is_named_with_the_command_that_copies_over_it() {
        let record = record("web");
        let all = [candidate(B, "b", Some(HAS_OLD_IMAGE)), candidate(C, "w", Some("is a witness"))];
        let taken = [NodeId(1)];
        let nobody = placement::no_candidate_text(&all, &taken);
        assert!(nobody.contains("b has an old image of it, w is a witness"), "{nobody}");
        let over = |backing, only| overwrite_hint(&record, backing, &all, &taken, only);
        let command = "windrose volume mirror add web --on b --force";
        let file = NewBacking::File { path: None };
        assert!(over(&file, None).unwrap().ends_with(command));
        assert!(over(&file, Some(B)).unwrap().ends_with(command));
        assert_eq!(over(&file, Some(C)), None, "it is a witness");
        let pool = NewBacking::Pool { pool: "tank".parse().unwrap() };
        assert!(over(&pool, None).unwrap().ends_with("add web --on b --pool tank --force"));
        let found = placement::choose_nodes(&all, &taken, &[], 1);
        assert!(found.is_err(), "such a node is never chosen by itself: {found:?}");
    }

    #[test]
    fn a_copy_that_was_not_made_is_told_with_a_command_that_runs_as_it_is() {
        let record = record("web");
        let own = Backing::File { path: format!("/data/volumes/web-{}.img", record.id).into() };
        let why = old_image_text(&ImageLocation::Path("/x".into()), &record, "of epoch 2");
        let again = |backing: &Backing, why: &str| replace_hint(&record, backing, "b", why);
        let over = "on node b: windrose volume mirror replace web --on b --force";
        assert!(again(&own, &why).ends_with(over), "{}", again(&own, &why));
        let full = again(&Backing::Device { path: "/dev/sdb".into() }, "no space left");
        assert_eq!(
            full,
            "remove the cause, then: windrose volume mirror replace web --on b --device /dev/sdb"
        );
        let found = |why: &str| {
            let (file, failed) = (NewBacking::File { path: None }, BTreeSet::from([B]));
            overwrite_hint_after_failure(&record, &file, why, &failed, |_| "b".to_owned())
        };
        assert!(found(&why).unwrap().ends_with("mirror add web --on b --force"));
        assert_eq!(found("no space left"), None);
    }
}
