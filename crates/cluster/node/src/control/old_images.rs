//! Images that nodes still have of a volume whose record names them no more, where a new copy of it would be made. One
//! such is left when a node is taken out of the cluster by force and joins again.
//!
//! It is never overwritten by itself, and no node with one is chosen unless an administrator says `--force`: it may hold
//! writes that the copies which serve lack (RFD 0039, 2.6).

use std::collections::BTreeSet;

use api::{AddCopy, ApiError, Backing, Code, NewBacking};
use peer::NodeId;
use uuid::Uuid;

use super::copies::Free;
use super::images::HeldImage;
use super::placement::{self, Candidate};
use super::{Control, repair};
use crate::engine::ImagePlace;
use crate::record::VolumeRecord;

/// Why a node with such an image is not chosen.
const UNFIT: &str = "holds an image of it from before";

/// What the reason of a copy that was not made for such an image begins and ends with.
const BEGINS: &str = "it holds an image of volume ";
const ENDS: &str = " from before, which may have newer data";

/// Images of one volume that no record names, with the nodes that have them.
#[derive(Debug, Default)]
pub(super) struct OldImages(Vec<(NodeId, ImagePlace)>);

impl OldImages {
    fn of<'a>(volume: Uuid, images: impl Iterator<Item = (NodeId, &'a HeldImage)>) -> Self {
        let of_it = images.filter(|(_, held)| !held.listed && held.found.volume == volume);
        Self(of_it.map(|(node, held)| (node, held.place.clone())).collect())
    }

    /// Whether `node` has one where `backing` says.
    fn is_at(&self, node: NodeId, backing: &Backing, volume: Uuid) -> bool {
        let at = match backing {
            Backing::File { path } | Backing::Device { path } => ImagePlace::Path(path.clone()),
            Backing::Pool { pool } => ImagePlace::InPool(pool.clone(), volume),
        };
        self.0.iter().any(|(of, place)| *of == node && *place == at)
    }
}

impl Control {
    /// The images of a volume that no record names, as the nodes have told last.
    pub(super) async fn old_images(&self, volume: Option<Uuid>) -> OldImages {
        let Some(volume) = volume else { return OldImages::default() };
        let reports = self.reports().await.unwrap_or_default();
        let (me, own) = (self.me(), self.held_images());
        let told = reports.iter().filter(|(node, _)| **node != me);
        let told = told.flat_map(|(node, report)| report.images.iter().map(|held| (*node, held)));
        OldImages::of(volume, told.chain(own.iter().map(|held| (me, held))))
    }

    /// Has no node get a copy of a volume that holds an old image where the copy would be.
    pub(super) fn rule_out_old(
        &self,
        candidates: &mut [Candidate],
        record: &VolumeRecord,
        backing: &NewBacking,
        old: &OldImages,
    ) {
        for candidate in candidates {
            let place = self.wanted(record.id, &record.name, candidate.node, backing, false);
            if place.is_ok_and(|place| old.is_at(candidate.node, &place.backing, record.id)) {
                candidate.unfit = candidate.unfit.or(Some(UNFIT));
            }
        }
    }

    /// The node that gets a copy of a volume which an administrator adds.
    ///
    /// # Errors
    /// [`Code::Conflict`] says why none can, with the command that has one copy over its old image.
    pub(super) fn choose_for(
        &self,
        record: &VolumeRecord,
        ask: &AddCopy,
        free: &Free,
        old: &OldImages,
    ) -> Result<NodeId, ApiError> {
        let mut candidates = self.candidates_for(&ask.backing, free);
        if !ask.force {
            self.rule_out_old(&mut candidates, record, &ask.backing, old);
        }
        let named = match &ask.node {
            Some(name) => match candidates.iter().find(|c| c.name == *name) {
                Some(candidate) => vec![candidate.node],
                None => vec![self.node_called(name)?],
            },
            None => Vec::new(),
        };
        let taken: Vec<_> = record.places.iter().map(|place| place.node).collect();
        let chosen = placement::choose(&candidates, &taken, &named, 1);
        let hint = || {
            let only = named.first().copied();
            add_over(record, &ask.backing, &candidates, &taken, only)
                .unwrap_or_else(|| "`windrose cluster nodes` shows who there is".to_owned())
        };
        chosen
            .map_err(|why| ApiError::new(Code::Conflict, why).hint(hint()))
            .map(|nodes| nodes.first().copied().unwrap_or_default())
    }
}

/// The command that makes a copy over the old image of the first of these nodes; of this one, if it has to be that.
pub(super) fn add_over(
    record: &VolumeRecord,
    backing: &NewBacking,
    candidates: &[Candidate],
    taken: &[NodeId],
    only: Option<NodeId>,
) -> Option<String> {
    let is_meant = |c: &&Candidate| !taken.contains(&c.node) && only.is_none_or(|n| n == c.node);
    let has_old = candidates.iter().filter(is_meant).find(|c| c.unfit == Some(UNFIT))?;
    Some(over(record, backing, &has_old.name))
}

/// The same, where a node has found its old image only when it was to make a copy, and has failed for that reason.
pub(super) fn add_over_found(
    record: &VolumeRecord,
    backing: &NewBacking,
    why: &str,
    failed: &BTreeSet<NodeId>,
    name: impl Fn(NodeId) -> String,
) -> Option<String> {
    let node = failed.first().filter(|_| is_old_image(why))?;
    Some(over(record, backing, &name(*node)))
}

fn over(record: &VolumeRecord, backing: &NewBacking, node: &str) -> String {
    format!(
        "to have node {node} copy it anew, over that image: windrose volume mirror add {} --on {node}{} --force",
        record.name,
        flags(backing)
    )
}

/// Why no copy is made over an old image.
pub(super) fn refusal(at: &ImagePlace, record: &VolumeRecord, how_old: &str) -> String {
    format!("{at}: {BEGINS}{}{ENDS} ({how_old})", record.name)
}

/// Whether a copy was not made for that.
fn is_old_image(reason: &str) -> bool {
    reason.contains(BEGINS) && reason.contains(ENDS)
}

/// What makes a copy that was not made, for the reason that its node gave.
pub(super) fn make_again(
    record: &VolumeRecord,
    backing: &Backing,
    node: &str,
    reason: &str,
) -> String {
    let place = match repair::like(backing, record.id) {
        Some(like) => flags(&like),
        None => flags_of(backing),
    };
    let again = format!("windrose volume mirror replace {} --on {node}{place}", record.name);
    match is_old_image(reason) {
        true => format!("to have node {node} copy it anew, over that image: {again} --force"),
        false => format!("remove the obstacle, then: {again}"),
    }
}

/// The options that say where a copy is to be; none for a node's own directory.
fn flags(backing: &NewBacking) -> String {
    match backing {
        NewBacking::File { path: None } => String::new(),
        NewBacking::File { path: Some(path) } => format!(" --path {}", path.display()),
        NewBacking::Device { path } => format!(" --device {}", path.display()),
        NewBacking::Pool { pool } => format!(" --pool {pool}"),
    }
}

/// The options that say where a copy is.
pub(super) fn flags_of(backing: &Backing) -> String {
    match backing {
        Backing::File { path } => format!(" --path {}", path.display()),
        Backing::Device { path } => format!(" --device {}", path.display()),
        Backing::Pool { pool } => format!(" --pool {pool}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{FoundImage, FoundLog};
    use crate::record::tests::record;

    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    fn held(volume: Uuid, place: ImagePlace) -> HeldImage {
        let found = FoundImage {
            volume,
            image: Uuid::from_u128(9),
            generation: 1,
            size_bytes: 1 << 20,
            block_size: api::BlockSize::B512,
            thin: true,
            log: FoundLog::Has { epoch: 2, config: Uuid::nil(), in_sync: vec![1, 2] },
            description: None,
            undescribed: None,
        };
        HeldImage { place, device: false, listed: false, found }
    }

    fn candidate(node: NodeId, name: &str, unfit: Option<&'static str>) -> Candidate {
        let domain = name.to_owned();
        Candidate { node, name: name.to_owned(), domain, unfit, free_bytes: 1, copies: 0 }
    }

    #[test]
    fn an_image_from_before_is_in_the_way_only_where_the_copy_would_be() {
        let record = record("web");
        let path = std::path::PathBuf::from("/data/volumes/web.img");
        let here = held(record.id, ImagePlace::Path(path.clone()));
        let other = held(Uuid::from_u128(77), ImagePlace::Path(path.clone()));
        let listed = HeldImage { listed: true, ..here.clone() };
        let old =
            OldImages::of(record.id, [(B, &here), (C, &other), (NodeId(4), &listed)].into_iter());
        let file = Backing::File { path };
        assert!(old.is_at(B, &file, record.id));
        assert!(!old.is_at(C, &file, record.id), "another volume's");
        assert!(!old.is_at(NodeId(4), &file, record.id), "the copy of a record");
        let elsewhere = Backing::File { path: "/srv/web.img".into() };
        assert!(!old.is_at(B, &elsewhere, record.id), "it stays as it is");
        let pool: api::PoolName = "tank".parse().unwrap();
        let in_pool = held(record.id, ImagePlace::InPool(pool.clone(), record.id));
        let old = OldImages::of(record.id, [(B, &in_pool)].into_iter());
        assert!(old.is_at(B, &Backing::Pool { pool }, record.id));
    }

    #[test]
    fn a_node_with_an_image_from_before_is_named_with_the_command_that_copies_over_it() {
        let record = record("web");
        let all = [candidate(B, "b", Some(UNFIT)), candidate(C, "w", Some("is a witness"))];
        let taken = [NodeId(1)];
        let nobody = placement::nobody(&all, &taken);
        assert!(nobody.contains("b holds an image of it from before, w is a witness"), "{nobody}");
        let over = |backing, only| add_over(&record, backing, &all, &taken, only);
        let command = "windrose volume mirror add web --on b --force";
        let file = NewBacking::File { path: None };
        assert!(over(&file, None).unwrap().ends_with(command));
        assert!(over(&file, Some(B)).unwrap().ends_with(command));
        assert_eq!(over(&file, Some(C)), None, "it is a witness");
        let pool = NewBacking::Pool { pool: "tank".parse().unwrap() };
        assert!(over(&pool, None).unwrap().ends_with("add web --on b --pool tank --force"));
        let found = placement::choose(&all, &taken, &[], 1);
        assert!(found.is_err(), "such a node is never chosen by itself: {found:?}");
    }

    #[test]
    fn a_copy_that_was_not_made_is_told_with_a_command_that_runs_as_it_is() {
        let record = record("web");
        let own = Backing::File { path: format!("/data/volumes/web-{}.img", record.id).into() };
        let why = refusal(&ImagePlace::Path("/x".into()), &record, "of epoch 2");
        let again = |backing: &Backing, why: &str| make_again(&record, backing, "b", why);
        let over = "over that image: windrose volume mirror replace web --on b --force";
        assert!(again(&own, &why).ends_with(over), "{}", again(&own, &why));
        let full = again(&Backing::Device { path: "/dev/sdb".into() }, "no space left");
        assert_eq!(
            full,
            "remove the obstacle, then: windrose volume mirror replace web --on b --device /dev/sdb"
        );
        let found = |why: &str| {
            let (file, failed) = (NewBacking::File { path: None }, BTreeSet::from([B]));
            add_over_found(&record, &file, why, &failed, |_| "b".to_owned())
        };
        assert!(found(&why).unwrap().ends_with("mirror add web --on b --force"));
        assert_eq!(found("no space left"), None);
    }
}
