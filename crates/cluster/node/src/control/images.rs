//! Images on this node that no record names: finding them, taking them as volumes, erasing them (RFD 0036).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::Duration;

use api::{
    AdoptImage, AdoptedImage, ApiError, Backing, Code, DiscardImage, OrphanedImage, OrphanedImages,
    PlannedVolume, Severity, VolumeName,
};
use block::Epoch;
use cluster::identity::Role;
use cluster::mirrors;
use mirror::member::Why;
use mirror::record::{Record, Replica};
use mirror::recovery;
use peer::NodeId;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use uuid::Uuid;
use wire::count;

use super::decide::{Choice, Copy, Doubt, decide, name_of, planned};
use super::status::finding;
use super::{Control, old_images, steps, store_error};
use crate::engine::{BackingError, FoundImage, FoundLog, ImagePlace, Scope, VolumeReport};
use crate::pools;
use crate::reconcile::Observed;
use crate::record::description::Description;
use crate::record::{MAX_COPIES, Mapping, Place, PlaceStage, Stage, VolumeRecord};

/// How often is looked for images that no record names.
const EVERY: Duration = Duration::from_secs(30);

/// Longest time that another node is given to say which images it has.
const ANSWER: Duration = Duration::from_secs(15);

/// How often is looked whether it has.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Findings about single images; the rest is counted.
const MAX_FINDINGS: usize = 20;

/// Most bytes that a node tells of its images.
const TOLD_BYTES: usize = 512 << 10;

/// An image on this node that is not served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldImage {
    /// Where it is.
    pub place: ImagePlace,
    /// Whether that is a block device.
    pub device: bool,
    /// Whether a record names it as the copy of its volume here.
    pub listed: bool,
    /// What it tells.
    pub found: FoundImage,
}

/// What was found when somebody looked last.
#[derive(Debug, Default)]
pub(super) struct Images {
    held: Vec<HeldImage>,
}

/// A place that no record names, before anybody has looked at it.
type Unlisted = (ImagePlace, bool);

impl Control {
    /// Looks for images that no record names, for as long as the node runs.
    pub(super) async fn follow_images(self) {
        loop {
            self.look_around(false).await;
            tokio::time::sleep(EVERY).await;
        }
    }

    /// The images on this node that are not served: those that no record names, and those of volumes that are refused.
    /// At block devices is looked only if it is `thorough`, for an administrator: others may use them. What was found there
    /// is remembered.
    pub(super) async fn look_around(&self, thorough: bool) -> Vec<HeldImage> {
        if !self.is_serving() || !self.keeps_data() {
            return Vec::new();
        }
        let mut held = Vec::new();
        for (place, device) in self.unlisted(thorough).await {
            if let Ok(found) = self.0.engine.find_image(&place).await {
                held.push(HeldImage { place, device, listed: false, found });
            }
        }
        held.extend(self.unserved().await);
        let used: BTreeSet<_> = self.used_paths().into_iter().map(ImagePlace::Path).collect();
        let mut images = self.0.images.lock().unwrap_or_else(PoisonError::into_inner);
        if !thorough {
            let known = |h: &&HeldImage| h.device && !h.listed && !used.contains(&h.place);
            held.extend(images.held.iter().filter(known).cloned());
        }
        images.held.clone_from(&held);
        held
    }

    /// What others are told of it: as much as there is room for in the store.
    pub(super) fn told_images(&self) -> Vec<HeldImage> {
        let (mut images, mut room) = (self.held_images(), TOLD_BYTES);
        images.retain(|image| {
            let bytes = serde_json::to_vec(image).map_or(usize::MAX, |text| text.len());
            let fits = bytes <= room;
            room = room.saturating_sub(bytes);
            fits
        });
        images
    }

    /// Why an image is not taken, as part of a plan.
    pub(super) fn not_taken(&self, held: &HeldImage, why: &ApiError) -> PlannedVolume {
        let copies = [self.own_copy(held)];
        let plan = planned(&copies, &Err(Doubt::Partial(Vec::new())));
        let hint = why.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
        PlannedVolume { doubt: Some(format!("{}{hint}", why.message)), ..plan }
    }

    /// What was found last.
    pub(super) fn held_images(&self) -> Vec<HeldImage> {
        self.0.images.lock().unwrap_or_else(PoisonError::into_inner).held.clone()
    }

    /// Places that may hold an image and that no record names.
    async fn unlisted(&self, devices: bool) -> Vec<Unlisted> {
        let directory = self.0.settings.data_dir.join("volumes");
        // Before the records are looked at: what is created meanwhile is not there yet.
        let found = tokio::task::spawn_blocking(move || paths(directory, devices)).await;
        let found = found.unwrap_or_default();
        let reports = self.0.engine.pool_reports().await;
        let used = self.used_paths();
        let unlisted = tokio::task::spawn_blocking(move || unused(found, &used)).await;
        let mut unlisted = unlisted.unwrap_or_default();
        for (pool, report) in reports {
            let listed: BTreeSet<_> =
                self.volumes_in(&pool).into_iter().map(|(id, _)| id).collect();
            let within = report.volumes.iter().map(|v| v.id).filter(|id| !listed.contains(id));
            unlisted.extend(within.map(|id| (ImagePlace::InPool(pool.clone(), id), false)));
        }
        unlisted
    }

    /// Images of volumes whose records name them, and which are refused here.
    async fn unserved(&self) -> Vec<HeldImage> {
        let cores = self.0.engine.report(Scope::All).await;
        let is_refused = |v: &&VolumeReport| {
            v.mirror.as_ref().is_some_and(|m| matches!(m.status.why, Some(Why::Refused(_))))
        };
        let reports = cores.iter().flat_map(|c| &c.volumes);
        let refused: BTreeSet<Uuid> = reports.filter(is_refused).map(|v| v.id).collect();
        let mut held = Vec::new();
        for (stored, observed) in self.0.state.all() {
            let record = &stored.record;
            let Some(place) = record.place(self.me()).filter(|p| p.stage.is_kept()) else {
                continue;
            };
            let at = match &place.backing {
                Backing::File { path } | Backing::Device { path } => ImagePlace::Path(path.clone()),
                Backing::Pool { pool } => ImagePlace::InPool(pool.clone(), record.id),
            };
            let found = match observed {
                Observed::Open { .. } if refused.contains(&record.id) => {
                    self.0.engine.find_open_image(record.id).await
                }
                Observed::Open { .. } | Observed::Erased | Observed::Stuck { .. } => continue,
                Observed::Closed if !self.lacks_mirror(record) => continue,
                Observed::Closed | Observed::Broken { .. } => {
                    let gate = self.0.state.gate(record.id);
                    let _held = gate.lock().await;
                    self.0.engine.find_image(&at).await
                }
            };
            if let Ok(found) = found {
                let device = matches!(place.backing, Backing::Device { .. });
                held.push(HeldImage { place: at, device, listed: true, found });
            }
        }
        held
    }

    /// Whether the record of a volume's mirror is lost: its copies are not opened.
    fn lacks_mirror(&self, record: &VolumeRecord) -> bool {
        let alone = record.places.len() == 1;
        self.membership().is_some() && !alone && self.0.state.mirror(record.id).is_none()
    }

    /// Images that no record names.
    ///
    /// # Errors
    /// [`Code::Unavailable`] before the node knows its records.
    pub async fn orphans(&self) -> Result<OrphanedImages, ApiError> {
        if !self.is_serving() {
            let message =
                "the node has not read its records yet: it does not know which images they name";
            let hint = "try again when it serves (`windrose status` says what it waits for)";
            return Err(ApiError::new(Code::Unavailable, message).hint(hint));
        }
        let held = self.look_around(true).await;
        let orphans = held.iter().filter(|h| !h.listed).map(|h| self.orphan(h));
        Ok(OrphanedImages { images: orphans.collect() })
    }

    fn orphan(&self, held: &HeldImage) -> OrphanedImage {
        let found = &held.found;
        let listed = self.0.state.get(found.volume).map(|(stored, _)| stored.record);
        let copy = self.own_copy(held);
        let name = name_of(&copy);
        let own = self.0.part.as_ref().map(|part| part.identity().cluster);
        let of = found.description.as_ref().and_then(|d| d.cluster);
        let orphan = OrphanedImage {
            image: held.place.to_string(),
            volume: found.volume,
            size_bytes: found.size_bytes,
            listed_as: listed.as_ref().map(|record| record.name.clone()),
            epoch: copy.shown().epoch,
            problem: match &found.log {
                FoundLog::Lost(why) => Some(why.clone()),
                FoundLog::Never | FoundLog::Has { .. } => found.undescribed.clone(),
            },
            hint: String::new(),
            name,
        };
        let standing = match &listed {
            Some(record) => Standing::Listed {
                may_be_added: own.is_some() && record.place(self.me()).is_none(),
                at: old_images::flags_of(&held.place.backing(held.device)),
                node: self.0.settings.name.clone(),
            },
            None => Standing::Unlisted {
                elsewhere: of.filter(|of| own != Some(*of)).map(|_| own.is_some()),
                doubt: decide(std::slice::from_ref(&copy), &[]).err(),
                is_name_free: orphan.name.as_ref().is_some_and(|n| self.0.state.find(n).is_none()),
            },
        };
        OrphanedImage { hint: orphan_hint(&orphan, &standing), ..orphan }
    }

    /// Whether a record names an image as the copy of its volume here.
    fn is_named(&self, held: &HeldImage) -> bool {
        let Some((stored, _)) = self.0.state.get(held.found.volume) else { return false };
        let Some(place) = stored.record.place(self.me()) else { return false };
        match &held.place {
            ImagePlace::Path(path) => place.backing.path() == Some(path.as_path()),
            ImagePlace::InPool(pool, _) => place.backing.pool() == Some(pool),
        }
    }

    fn own_copy(&self, held: &HeldImage) -> Copy {
        self.copy_of(self.me(), held)
    }

    fn copy_of(&self, node: NodeId, held: &HeldImage) -> Copy {
        Copy {
            node,
            node_name: self.node_name(node),
            place: held.place.clone(),
            device: held.device,
            found: held.found.clone(),
        }
    }

    /// What there is to say of images that no record names.
    pub(super) fn image_findings(&self) -> Vec<api::Finding> {
        let held = self.held_images();
        // It may have been taken in since it was found.
        let is_orphan = |h: &&HeldImage| !h.listed && !self.is_named(h);
        let orphans: Vec<_> = held.iter().filter(is_orphan).map(|h| self.orphan(h)).collect();
        let mut findings: Vec<_> = orphans.iter().take(MAX_FINDINGS).map(orphan_finding).collect();
        if let Some(more) = orphans.len().checked_sub(MAX_FINDINGS).filter(|more| *more > 0) {
            let message = format!("{}: no record names their volumes", count(more, "more image"));
            let hint = "windrose volume orphans lists them";
            findings.push(finding(Severity::Warning, "images", message, Some(hint)));
        }
        findings
    }

    /// All images that are not served, on all nodes that answer; and the names of those that do not.
    pub(super) async fn all_copies(&self) -> Result<(Vec<(Copy, bool)>, Vec<String>), ApiError> {
        let own = self.look_around(true).await;
        let mut copies: Vec<_> = own.iter().map(|h| (self.own_copy(h), h.listed)).collect();
        let Some(membership) = self.membership() else { return Ok((copies, Vec::new())) };
        let (others, down): (Vec<NodeId>, Vec<String>) = {
            let nodes = membership.nodes.borrow();
            let others = nodes.iter().filter(|(n, _)| **n != membership.node);
            let (alive, down): (Vec<_>, Vec<_>) = others.partition(|(_, view)| view.alive);
            let down = down.into_iter().filter(|(_, view)| view.record.role == Role::Data);
            let down = down.map(|(_, view)| view.record.name.clone());
            (alive.into_iter().map(|(n, _)| *n).collect(), down.collect())
        };
        if others.is_empty() {
            return Ok((copies, down));
        }
        let asked = self.ask(&others).await.map_err(|e| store_error(&e))?;
        let deadline = Instant::now() + ANSWER;
        loop {
            let reports = self.reports().await.map_err(|e| store_error(&e))?;
            let answers = |n: &&NodeId| reports.get(n).is_some_and(|r| r.asked >= asked.0);
            let (told, silent): (Vec<_>, Vec<_>) = others.iter().partition(answers);
            if silent.is_empty() || Instant::now() >= deadline {
                for node in told {
                    let images =
                        reports.get(&node).map(|r| r.images.as_slice()).unwrap_or_default();
                    copies.extend(images.iter().map(|h| (self.copy_of(node, h), h.listed)));
                }
                let silent = silent.into_iter().map(|n| self.node_name(n));
                return Ok((copies, silent.chain(down).collect()));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Takes an image that no record names as a volume.
    ///
    /// # Errors
    /// [`Code::Conflict`] says why it is not taken, and what else to do with it.
    pub async fn adopt(&self, ask: AdoptImage) -> Result<AdoptedImage, ApiError> {
        let control = self.clone();
        self.detached(async move { control.adopt_now(ask).await }).await
    }

    pub(super) async fn adopt_now(&self, ask: AdoptImage) -> Result<AdoptedImage, ApiError> {
        self.check_keeps_data()?;
        let copy = self.orphan_at(&ask.image).await?;
        if let Some((stored, _)) = self.0.state.get(copy.found.volume) {
            return Err(self.is_listed(&copy, &stored.record.name));
        }
        let (copies, _) = self.all_copies().await?;
        let same = copies.into_iter().map(|(c, _)| c).filter(|c| {
            c.found.volume == copy.found.volume && (c.node, &c.place) != (copy.node, &copy.place)
        });
        let same: Vec<_> = same.collect();
        let copies: Vec<_> = std::iter::once(copy).chain(same).collect();
        let decided = match ask.force {
            true => Ok(Choice { leads: 0, follow: Vec::new() }),
            false => decide(&copies, &ask.without),
        };
        let mut plan = planned(&copies, &decided);
        plan.name = ask.name.or(plan.name);
        if ask.plan {
            return Ok(AdoptedImage { plan, volume: None });
        }
        let choice = decided.map_err(|doubt| {
            let message = format!("{} is not taken: {}", copies[0].at(), doubt.sentence());
            ApiError::new(Code::Conflict, message)
        })?;
        if choice.leads != 0 {
            let message = format!(
                "{} is not taken: {} is newer, or as good",
                copies[0].at(),
                copies[choice.leads].at()
            );
            return Err(ApiError::new(Code::Conflict, message)
                .hint("`windrose cluster recover` takes all copies, led by that one"));
        }
        let name = plan.name.clone().ok_or_else(|| nameless(&copies[0]))?;
        let id = self.take_in(&name, &copies, &choice).await?;
        self.settle(id).await;
        let volume = self.opened(id, &name).await?;
        self.look_around(false).await;
        Ok(AdoptedImage { plan, volume: Some(volume) })
    }

    /// What is at a place that no record names.
    async fn orphan_at(&self, text: &str) -> Result<Copy, ApiError> {
        let place = ImagePlace::parse(text).ok_or_else(|| {
            let message = format!("{text} is neither an absolute path nor POOL/VOLUME");
            ApiError::new(Code::InvalidRequest, message)
                .hint("`windrose volume orphans` lists the images that no record names")
        })?;
        match &place {
            ImagePlace::Path(path) => self.check_unused_paths(vec![path.clone()]).await?,
            ImagePlace::InPool(pool, id) => {
                if let Some((_, name)) = self.volumes_in(pool).into_iter().find(|(v, _)| v == id) {
                    let message = format!("{place} is the copy of volume {name} already");
                    return Err(ApiError::new(Code::Conflict, message));
                }
            }
        }
        let found = self.0.engine.find_image(&place).await.map_err(|e| not_found(&e))?;
        // A record that cannot be read names it, for all that is known.
        if let Err(e) = self.stored(found.volume).await {
            let message =
                format!("{place} holds volume {}, whose record cannot be read: {e}", found.volume);
            return Err(ApiError::new(Code::Conflict, message)
                .hint("restore the store from a backup, or recover the record first"));
        }
        let device = match &place {
            ImagePlace::Path(path) => is_device(path.clone()).await,
            ImagePlace::InPool(..) => false,
        };
        let held = HeldImage { place, device, listed: false, found };
        Ok(self.own_copy(&held))
    }

    /// A copy of a volume that there is must not become a second one.
    fn is_listed(&self, copy: &Copy, name: &VolumeName) -> ApiError {
        let (me, place) = (&self.0.settings.name, &copy.place);
        let message = format!(
            "{place} is a copy of volume {name}, which has its copies elsewhere: it is older, or another one's"
        );
        let at = old_images::flags_of(&place.backing(copy.device));
        let hint = match self.membership() {
            Some(_) => format!(
                "to have it brought in sync, copied anew: windrose volume mirror add {name} --on {me}{at} --force"
            ),
            None => format!("to be rid of it: windrose volume discard {place}"),
        };
        ApiError::new(Code::Conflict, message).hint(hint)
    }

    /// Makes a volume of what its copies tell. Nobody is let in who had to prove who he is.
    pub(super) async fn take_in(
        &self,
        name: &VolumeName,
        copies: &[Copy],
        choice: &Choice,
    ) -> Result<Uuid, ApiError> {
        if let Some(id) = self.0.state.find(name) {
            let message =
                format!("volume {name} is not taken in: there is another one of that name ({id})");
            return Err(ApiError::new(Code::Exists, message).hint(other_name(copies)));
        }
        if self.0.state.count() >= self.0.settings.max_volumes {
            let message =
                format!("the node has its {}", count(self.0.settings.max_volumes, "volume"));
            return Err(ApiError::new(Code::Conflict, message).hint("raise limits.volumes"));
        }
        let members: Vec<_> =
            std::iter::once(choice.leads).chain(choice.follow.iter().copied()).collect();
        let mut members: Vec<_> = members.into_iter().map(|n| copies[n].clone()).collect();
        self.break_with_mirror(&mut members).await?;
        let record = self.record_of(name, &members)?;
        let mut changes = record.insert();
        if self.membership().is_some() {
            let above = copies.iter().filter_map(|c| c.shown().epoch).max().unwrap_or(0);
            changes.push(mirrors::create(record.id, &recovered_mirror(&members, above)));
        }
        self.0.meta.commit(changes).await.map_err(|e| store_error(&e))?;
        tracing::warn!(volume = %name, id = %record.id, copies = members.len(), "taken in from what its images tell");
        Ok(record.id)
    }

    /// A node by itself keeps no marks for other copies: to mirrors that know the image it must be another one from
    /// now on, else they would take for granted that they know what it lacks.
    async fn break_with_mirror(&self, members: &mut [Copy]) -> Result<(), ApiError> {
        if self.membership().is_some() {
            return Ok(());
        }
        for copy in members.iter_mut().filter(|c| c.found.log != FoundLog::Never) {
            let name = Uuid::new_v4();
            let renamed = self.0.engine.rename_image(&copy.place, name).await;
            renamed.map_err(|e| ApiError::new(e.code(), e.to_string()))?;
            (copy.found.image, copy.found.generation) = (name, copy.found.generation + 1);
        }
        Ok(())
    }

    fn record_of(&self, name: &VolumeName, members: &[Copy]) -> Result<VolumeRecord, ApiError> {
        let lead = members.first().ok_or_else(|| ApiError::new(Code::Internal, "no copy leads"))?;
        let (found, settings) = (&lead.found, &self.0.settings);
        let told = found.description.as_ref().filter(|d| d.name == *name);
        let place = |c: &Copy| Place {
            node: c.node,
            backing: c.place.backing(c.device),
            image: Some(c.found.image),
            image_generation: c.found.generation,
            stage: PlaceStage::Made,
        };
        let mut places: Vec<_> = members.iter().map(place).collect();
        places.sort_by_key(|p| p.node);
        let guarded = found.description.as_ref().is_some_and(|d| !d.secrets.is_empty());
        let allow = found.description.as_ref().filter(|_| !guarded).map(|d| d.allow.clone());
        let record = VolumeRecord {
            id: found.volume,
            name: name.clone(),
            stage: Stage::Ready,
            size_bytes: found.size_bytes,
            block_size: found.block_size,
            thin: found.thin,
            copies_wanted: self.copies_wanted(&places, found.description.as_ref()),
            places,
            repair: None,
            creator: None,
            prefer: None,
            protocols: told.map(|d| d.protocols).unwrap_or_default(),
            iscsi_target: told.map_or_else(
                || format!("{}:{name}", settings.iscsi_authority),
                |d| d.iscsi_target.clone(),
            ),
            mapping: Mapping::default(),
            nvme_subsystem: told.map_or_else(
                || format!("{}:{name}", settings.nvme_authority),
                |d| d.nvme_subsystem.clone(),
            ),
            allow: allow.unwrap_or_default(),
            chap: None,
            proofs: BTreeMap::new(),
            hosts: BTreeMap::new(),
            tls: BTreeMap::new(),
            created_s: found
                .description
                .as_ref()
                .map_or_else(super::create::now_s, |d| d.created_s),
        };
        self.check_target_names(&record, members)?;
        Ok(record)
    }

    /// How many copies a volume is to have that is taken in with these: as many as it was to have. A node by itself
    /// has one of each.
    fn copies_wanted(&self, places: &[Place], told: Option<&Description>) -> u8 {
        let here = u8::try_from(places.len()).unwrap_or(MAX_COPIES).clamp(1, MAX_COPIES);
        let told = told.filter(|_| self.membership().is_some()).map_or(1, |d| d.copies_wanted);
        here.max(told)
    }

    /// Refuses a volume whose target or subsystem another one has.
    fn check_target_names(&self, record: &VolumeRecord, copies: &[Copy]) -> Result<(), ApiError> {
        let all = self.0.state.all();
        let taken = all.iter().map(|(s, _)| &s.record).find(|r| {
            r.iscsi_target == record.iscsi_target || r.nvme_subsystem == record.nvme_subsystem
        });
        taken.map_or(Ok(()), |other| {
            let (name, target) = (&record.name, &record.iscsi_target);
            let message = format!(
                "volume {name} is not taken in: volume {} has its target {target}",
                other.name
            );
            Err(ApiError::new(Code::Exists, message).hint(other_name(copies)))
        })
    }

    /// Erases an image that no record names.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] without the volume's identity; [`Code::Conflict`] for an image that a record names.
    pub async fn discard(&self, ask: DiscardImage) -> Result<(), ApiError> {
        let control = self.clone();
        self.detached(async move {
            let copy = control.orphan_at(&ask.image).await?;
            if copy.found.volume != ask.confirm {
                let message = format!(
                    "{} holds volume {}, and {} is confirmed",
                    copy.place, copy.found.volume, ask.confirm
                );
                return Err(ApiError::new(Code::InvalidRequest, message)
                    .hint("confirm with the identity of the volume: what the image holds is lost"));
            }
            let erased = control.0.engine.erase_image(&copy.place, copy.found.volume).await;
            erased.map_err(|e| not_found(&e))?;
            tracing::warn!(image = %copy.place, volume = %copy.found.volume, "an operator has it erased");
            control.look_around(true).await;
            Ok(())
        })
        .await
    }

    /// Whether what a new copy would be written over holds the volume as it once was: no attempt of making it has left
    /// that.
    pub(super) async fn holds_old_copy(&self, record: &VolumeRecord) -> Option<BackingError> {
        let place = record.place(self.me())?;
        if matches!(place.stage, PlaceStage::Wanted { force: true }) {
            return None;
        }
        let at = match &place.backing {
            Backing::File { path } | Backing::Device { path } => ImagePlace::Path(path.clone()),
            Backing::Pool { pool } => ImagePlace::InPool(pool.clone(), record.id),
        };
        let message = match self.0.engine.find_image(&at).await {
            Ok(found) => old_copy(&found, record, place.image)
                .map(|how_old| old_images::refusal(&at, record, &how_old))?,
            Err(why) if why.is_unreadable => {
                old_images::refusal(&at, record, &format!("it cannot be read: {why}"))
            }
            // There is none, or one whose making was never finished.
            Err(_) => return None,
        };
        Some(BackingError::refused(message).hinted(Some("--force overwrites it")))
    }
}

/// What is known of the age of an image that was a copy of the volume, if it was one and is not the one that the record
/// names. One whose log is lost may be the newest of all.
fn old_copy(found: &FoundImage, record: &VolumeRecord, own: Option<Uuid>) -> Option<String> {
    if found.volume != record.id || own == Some(found.image) {
        return None;
    }
    match &found.log {
        FoundLog::Has { epoch, .. } if *epoch > 0 => Some(format!("of epoch {epoch}")),
        FoundLog::Lost(why) => Some(format!("nobody knows how new it is: {why}")),
        FoundLog::Never | FoundLog::Has { .. } => None,
    }
}

/// The record of the mirror of a volume that is taken in: the first copy is in sync, the others are brought in sync
/// with it.
pub(super) fn recovered_mirror(members: &[Copy], above: u64) -> Record {
    let lead = members.first().map_or(NodeId(0), |c| c.node);
    let replica = |c: &Copy| Replica { node: c.node, image: c.found.image, new: false };
    let replicas = members.iter().map(replica).collect();
    recovery::record(lead, replicas, Epoch(above), steps::random())
}

/// How images are taken as a volume that is not called as they say.
fn other_name(copies: &[Copy]) -> String {
    let image = copies.first().map_or_else(|| "IMAGE".to_owned(), |c| c.place.to_string());
    format!("take it under another name: windrose volume adopt {image} --name NAME")
}

/// How an image stands that no record names.
enum Standing {
    /// There is a record of its volume.
    Listed {
        /// Whether its node can have a copy of it.
        may_be_added: bool,
        /// The options that say where it is.
        at: String,
        /// What its node is called.
        node: String,
    },
    /// There is none.
    Unlisted {
        /// It was a copy of a cluster that this node is not in; whether it is in another one.
        elsewhere: Option<bool>,
        /// Why it is not taken as it is, by itself.
        doubt: Option<Doubt>,
        /// Whether it tells the name of its volume, and no other one has that.
        is_name_free: bool,
    },
}

/// What to do with an image that no record names, with the command as it runs.
fn orphan_hint(orphan: &OrphanedImage, standing: &Standing) -> String {
    let image = &orphan.image;
    let discard = format!("windrose volume discard {image} erases it");
    let (elsewhere, doubt, is_name_free) = match standing {
        Standing::Listed { may_be_added: true, at, node } => {
            let name = orphan.listed_as.as_ref().map(VolumeName::as_str).unwrap_or_default();
            return format!(
                "windrose volume mirror add {name} --on {node}{at} --force makes it one again, copied anew; {discard}"
            );
        }
        Standing::Listed { .. } => return discard,
        Standing::Unlisted { elsewhere, doubt, is_name_free } => (elsewhere, doubt, is_name_free),
    };
    let without = |nodes: &[String]| format!(" --without {}", nodes.join(" --without "));
    let all_the_same = match doubt {
        None => String::new(),
        Some(Doubt::Missing(nodes)) => without(nodes),
        Some(_) => " --force".to_owned(),
    };
    let called = if *is_name_free { "" } else { " --name NAME" };
    let adopt = format!("windrose volume adopt {image}{all_the_same}{called}");
    match (elsewhere, doubt) {
        (Some(false), _) => format!(
            "if that cluster is there, have this node join it first: windrose cluster join --token TOKEN (windrose cluster \
             token at one of its nodes shows one); if it is gone: {adopt}"
        ),
        (Some(true), _) => {
            format!("if that cluster is there, the volume is that one's; if it is gone: {adopt}")
        }
        (None, None) => format!(
            "{adopt} takes it as a volume; windrose cluster recover looks at the copies of all nodes"
        ),
        (None, Some(_)) => format!(
            "windrose cluster recover looks at the copies of all nodes, and takes the newest; to take this one, whatever it \
             may lack: {adopt}"
        ),
    }
}

fn orphan_finding(orphan: &OrphanedImage) -> api::Finding {
    let OrphanedImage { image, volume, name, size_bytes, listed_as, hint, .. } = orphan;
    let size = api::Size(*size_bytes);
    let subject = format!("image {image}");
    if let Some(listed) = listed_as {
        let message = format!("it is a copy of volume {listed} ({size}) that no record names");
        return finding(Severity::Note, subject, message, Some(hint));
    }
    let called = name.as_ref().map_or_else(|| volume.to_string(), ToString::to_string);
    let message = match hint.contains("if that cluster is there") {
        true => format!(
            "it holds a copy of volume {called} ({size}) of a cluster that this node is not in: no record here names it"
        ),
        false => {
            format!("it holds volume {called} ({size}), which no record names: nobody can reach it")
        }
    };
    finding(Severity::Warning, subject, message, Some(hint))
}

fn nameless(copy: &Copy) -> ApiError {
    let message = format!("{} does not tell what its volume was called", copy.at());
    let hint =
        format!("say what it shall be called: windrose volume adopt {} --name NAME", copy.place);
    ApiError::new(Code::InvalidRequest, message).hint(hint)
}

fn not_found(e: &BackingError) -> ApiError {
    let error = ApiError::new(e.code(), e.to_string());
    match e.hint {
        Some(hint) => error.hint(hint),
        None => error.hint("`windrose volume orphans` lists the images that no record names"),
    }
}

async fn is_device(path: PathBuf) -> bool {
    let look = move || std::fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device());
    tokio::task::spawn_blocking(look).await.unwrap_or(false)
}

/// Files of the directory of images, and block devices.
fn paths(directory: PathBuf, devices: bool) -> Vec<(PathBuf, bool)> {
    let entries = std::fs::read_dir(directory).map(Iterator::collect::<Vec<_>>);
    let files = entries.unwrap_or_default().into_iter().flatten();
    let files =
        files.filter(|e| e.file_type().is_ok_and(|t| t.is_file())).map(|e| (e.path(), false));
    let devices = if devices { pools::candidates(&[]) } else { Vec::new() };
    files.chain(devices.into_iter().map(|path| (path, true))).collect()
}

/// Those of these that nothing uses.
fn unused(found: Vec<(PathBuf, bool)>, used: &[PathBuf]) -> Vec<Unlisted> {
    let resolved = |path: &PathBuf| std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
    let used: BTreeSet<_> = used.iter().map(resolved).collect();
    let mut free: Vec<_> =
        found.into_iter().filter(|(path, _)| !used.contains(&resolved(path))).collect();
    free.sort();
    free.into_iter().map(|(path, device)| (ImagePlace::Path(path), device)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_looked_for_where_nothing_is_known_to_be() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.img", "b.img"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        std::fs::create_dir(dir.path().join("c")).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("a.img"), &link).unwrap();
        let found = unused(paths(dir.path().to_owned(), false), &[link]);
        assert_eq!(found, [(ImagePlace::Path(dir.path().join("b.img")), false)]);
        assert!(paths(dir.path().join("nowhere"), false).is_empty());
    }

    /// What cannot be read may be newer than all that serves: it is no reason to write over it.
    #[test]
    fn a_copy_whose_log_is_lost_counts_as_one_that_may_be_newer() {
        let record = crate::record::tests::record("web");
        let with = |log| FoundImage {
            volume: record.id,
            image: Uuid::from_u128(8),
            generation: 1,
            size_bytes: 1 << 20,
            block_size: api::BlockSize::B512,
            thin: false,
            log,
            undescribed: None,
            description: None,
        };
        let has = |epoch| FoundLog::Has { epoch, config: Uuid::nil(), in_sync: Vec::new() };
        let old = |log, own| old_copy(&with(log), &record, own);
        assert_eq!(old(has(2), None).as_deref(), Some("of epoch 2"));
        let lost = old(FoundLog::Lost("damaged".into()), None).unwrap();
        assert_eq!(lost, "nobody knows how new it is: damaged");
        // What an attempt to make a copy has left, the copy of the record itself, and another volume's.
        assert_eq!((old(has(0), None), old(FoundLog::Never, None)), (None, None));
        assert_eq!(old(has(2), Some(Uuid::from_u128(8))), None);
        let other = crate::record::tests::record("mail");
        assert_eq!(old_copy(&with(has(2)), &other, None), None);
    }

    fn orphan(listed: Option<&str>) -> OrphanedImage {
        OrphanedImage {
            image: "/v/web.img".into(),
            volume: Uuid::from_u128(7),
            name: Some("web".parse().unwrap()),
            size_bytes: 1 << 30,
            listed_as: listed.map(|name| name.parse().unwrap()),
            epoch: None,
            problem: None,
            hint: String::new(),
        }
    }

    fn told(listed: Option<&str>, standing: &Standing) -> (Severity, String, String) {
        let orphan = orphan(listed);
        let hint = orphan_hint(&orphan, standing);
        let finding = orphan_finding(&OrphanedImage { hint: hint.clone(), ..orphan });
        assert_eq!(finding.hint.as_ref(), Some(&hint));
        assert!(!hint.contains('…'), "{hint}");
        (finding.severity, finding.message, hint)
    }

    #[test]
    fn an_orphan_is_told_with_the_command_that_helps() {
        let unlisted =
            |elsewhere, doubt| Standing::Unlisted { elsewhere, doubt, is_name_free: true };
        let (severity, message, hint) = told(None, &unlisted(None, None));
        assert_eq!(severity, Severity::Warning);
        assert!(message.contains("nobody can reach it"), "{message}");
        assert!(hint.starts_with("windrose volume adopt /v/web.img takes it"), "{hint}");
        let at = " --pool tank".to_owned();
        let listed =
            |may_be_added| Standing::Listed { may_be_added, at: at.clone(), node: "a".to_owned() };
        let (severity, _, hint) = told(Some("web"), &listed(true));
        assert_eq!(severity, Severity::Note);
        let add = "windrose volume mirror add web --on a --pool tank --force makes it one again";
        assert!(hint.starts_with(add), "it must not be a second one: {hint}");
        let (.., hint) = told(Some("web"), &listed(false));
        assert_eq!(hint, "windrose volume discard /v/web.img erases it");
    }

    #[test]
    fn an_image_that_adopt_refuses_is_told_with_the_options_by_which_it_is_taken() {
        let hint = |doubt, is_name_free| {
            told(None, &Standing::Unlisted { elsewhere: None, doubt: Some(doubt), is_name_free }).2
        };
        let missing = Doubt::Missing(vec!["a".into(), "c".into()]);
        let all = hint(missing, true);
        assert!(all.ends_with("adopt /v/web.img --without a --without c"), "{all}");
        assert!(all.starts_with("windrose cluster recover looks at"), "{all}");
        let part = hint(Doubt::Partial(Vec::new()), false);
        assert!(part.ends_with("adopt /v/web.img --force --name NAME"), "{part}");
    }

    #[test]
    fn a_copy_of_a_cluster_that_may_live_is_not_said_to_be_out_of_reach() {
        let of = |is_in_another| Standing::Unlisted {
            elsewhere: Some(is_in_another),
            doubt: Some(Doubt::Missing(vec!["a".into()])),
            is_name_free: true,
        };
        let (_, message, hint) = told(None, &of(false));
        assert!(!message.contains("nobody can reach it"), "{message}");
        let join = "if that cluster is there, have this node join it first: windrose cluster join";
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
