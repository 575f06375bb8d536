//! What an administrator does with the copies of a volume.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{
    AddCopy, ApiError, Backing, BlockSize, Code, ForceCopy, NewBacking, RemoveCopy, ReplaceCopy,
    SetCopies, SwitchTo, TakeOver, Verification, Volume, VolumeName,
};
use cluster::identity::Role;
use cluster::mirrors;
use cluster::nodes::NodeView;
use mirror::Verified;
use mirror::member::Why;
use mirror::record::{Differing, Record};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::create::absolute;
use super::placement::{self, Candidate};
use super::steps::random;
use super::together::{NodeState, Together};
use super::waits::MAJORITY_LOST;
use super::{Control, backing_error, store_error};
use crate::engine::Scope;
use crate::meta::MetaError;
use crate::reconcile::Observed;
use crate::record::{MAX_COPIES, MAX_PLACES, Place, PlaceStage, Stored, VolumeRecord};

/// Longest time that a node is given to take over, before the answer.
const SWITCHING: Duration = Duration::from_secs(5);

/// Longest time that a copy which was forced is given to serve, before the answer.
const FORCING: Duration = Duration::from_secs(20);

/// How often is looked whether it has.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How often what a comparison has found is put into a record that changes meanwhile.
const PUTS: usize = 5;

impl Control {
    /// Adds a copy of a volume.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::Conflict`] names the node that cannot have one, and why.
    pub async fn add_copy(&self, name: VolumeName, ask: AddCopy) -> Result<Volume, ApiError> {
        let new = (Some(ask.backing.clone()), None);
        let old = self.old_images(self.find(&name).ok()).await;
        self.change_copies(name, new, move |control, record, Scene { free, .. }| {
            let taken: Vec<_> = record.places.iter().map(|p| p.node).collect();
            if record.standing().count() >= usize::from(MAX_COPIES) || taken.len() >= MAX_PLACES {
                return Err(conflict(format!("it has its {MAX_COPIES} copies")));
            }
            let node = control.choose_for(record, &ask, free, &old)?;
            let place = control.wanted(record.id, &record.name, node, &ask.backing, ask.force)?;
            record.add_place(place);
            record.want_as_added();
            Ok(())
        })
        .await
    }

    /// Sets how many copies a volume is to have.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::InvalidRequest`] for a number that no volume can have; [`Code::Conflict`] for fewer
    /// than it has.
    pub async fn set_copies(&self, name: VolumeName, ask: SetCopies) -> Result<Volume, ApiError> {
        let wanted = ask.replicas;
        if !(1..=MAX_COPIES).contains(&wanted) {
            let message = format!("volume {name} cannot have {wanted} copies");
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint(format!("give replicas from 1 to {MAX_COPIES}")));
        }
        self.change_copies(name, (None, None), move |_, record, _| {
            let has = record.standing().count();
            if has > usize::from(wanted) {
                let name = &record.name;
                return Err(conflict(format!("it has {has} copies")).hint(format!(
                    "remove one, which also lowers how many it is to have: windrose volume mirror remove {name} --on NODE"
                )));
            }
            record.copies_wanted = wanted;
            Ok(())
        })
        .await
    }

    /// Removes a copy of a volume, once the others can go on without it.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::Conflict`] if nothing would be left.
    pub async fn remove_copy(&self, name: VolumeName, ask: RemoveCopy) -> Result<Volume, ApiError> {
        let gone = (None, Some(ask.node.clone()));
        self.change_copies(name, gone, move |control, record, Scene { mirror, .. }| {
            let node = control.keeper(record, &ask.node)?;
            let others = mirror.others(node).next().is_some();
            let heir = PlaceStage::Leaving { instead_of: Some(node) };
            let stays =
                |p: &Place| p.node != node && (p.stage == PlaceStage::Made || p.stage == heir);
            if !record.places.iter().any(stays) || !others {
                let name = &record.name;
                return Err(conflict("no other copy is in sync".into()).hint(format!(
                    "wait until one is in sync, or add one first (windrose volume mirror add {name}); \
                     `windrose volume delete {name}` removes all"
                )));
            }
            record.dismiss(node);
            record.want_as_removed();
            Ok(())
        })
        .await
    }

    /// Replaces a copy of a volume.
    ///
    /// # Errors
    /// As [`Self::add_copy`]; [`Code::Conflict`] for one in sync that would be replaced in place.
    pub async fn replace_copy(
        &self,
        name: VolumeName,
        ask: ReplaceCopy,
    ) -> Result<Volume, ApiError> {
        let moves = ask.with.as_ref().is_some_and(|with| *with != ask.node);
        let gone = (!moves).then(|| ask.node.clone());
        self.change_copies(
            name,
            (Some(ask.backing.clone()), gone),
            move |control, record, Scene { free, mirror }| {
                let old = control.keeper(record, &ask.node)?;
                let with = ask.with.clone().filter(|with| *with != ask.node);
                let Some(with) = with else {
                    if mirror.member(old).is_some() {
                        let message = format!("the copy on {} is in sync", ask.node);
                        return Err(conflict(message)
                            .hint("replace it with one on another node: --with NODE"));
                    }
                    let (id, name) = (record.id, record.name.clone());
                    let mut place = control.wanted(id, &name, old, &ask.backing, ask.force)?;
                    // What is replaced may be erased where it is.
                    place.image = record.place(old).and_then(|p| p.image);
                    record.place_mut(old).into_iter().for_each(|p| p.clone_from(&place));
                    record.want_as_added();
                    return Ok(());
                };
                let taken: Vec<_> = record.places.iter().map(|p| p.node).collect();
                if taken.len() >= MAX_PLACES {
                    return Err(conflict("another copy is being replaced".into()));
                }
                let new = control.choose(&[with], 1, (&taken, &ask.backing), free)?.remove(0);
                let place =
                    control.wanted(record.id, &record.name, new, &ask.backing, ask.force)?;
                record.add_place(place);
                set_stage(record, old, PlaceStage::Leaving { instead_of: Some(new) });
                record.want_as_added();
                Ok(())
            },
        )
        .await
    }

    /// Has the copy of a node put writes in order whenever it is in sync.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::Conflict`] for a node without a copy.
    pub async fn switch(&self, name: VolumeName, ask: SwitchTo) -> Result<Volume, ApiError> {
        let node = self.node_called(&ask.node)?;
        self.change_copies(name.clone(), (None, None), move |control, record, _| {
            record.prefer = Some(control.keeper(record, &ask.node)?);
            Ok(())
        })
        .await?;
        self.await_switch(&name, node).await;
        self.show(&name).await
    }

    /// Gives a node some time to take over. It leads later, if it is not in sync now.
    async fn await_switch(&self, name: &VolumeName, node: NodeId) {
        let deadline = Instant::now() + SWITCHING;
        let leads = || {
            let mirror = self.0.state.mirror(self.find(name).ok()?)?;
            Some(mirror.primary == node || mirror.member(node).is_none())
        };
        while leads() == Some(false) && Instant::now() < deadline {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Takes the image of a volume from the node that had it last, and opens it.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] without the volume's name; [`Code::Conflict`] if it is open here; [`Code::Backing`] if it cannot be
    /// taken.
    pub async fn take_over(&self, name: VolumeName, ask: TakeOver) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.detached(async move { control.take_over_now(&name, &ask).await }).await
    }

    async fn take_over_now(&self, name: &VolumeName, ask: &TakeOver) -> Result<Volume, ApiError> {
        if ask.confirm != *name {
            let message = format!("{} is confirmed, and {name} is meant", ask.confirm);
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("repeat the name of the volume: no other node may use its image any more"));
        }
        let id = self.find(name)?;
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        if matches!(self.0.state.observed(id), Observed::Open { .. }) {
            return Err(conflict(format!("volume {name} is open on this node"))
                .hint("there is nothing to take over"));
        }
        tracing::warn!(volume = %name, "an operator has its image taken over");
        self.0.engine.take_over_next(id);
        self.0.state.forget_failure(id);
        self.settle_held(id).await;
        match self.0.state.observed(id) {
            Observed::Broken { reason } | Observed::Stuck { reason } => {
                Err(ApiError::new(Code::Backing, format!("volume {name}: {reason}")))
            }
            _ => self.show_id(id).await,
        }
    }

    /// Has the copy of this node go on alone, whatever the others may have that it lacks.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] without the volume's name; [`Code::Conflict`] if it serves, or a
    /// node that may have newer data is alive.
    pub async fn force(&self, name: VolumeName, ask: ForceCopy) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.detached(async move { control.force_now(&name, &ask).await }).await
    }

    async fn force_now(&self, name: &VolumeName, ask: &ForceCopy) -> Result<Volume, ApiError> {
        self.in_cluster()?;
        if ask.confirm != *name {
            let message = format!("{} is confirmed, and {name} is meant", ask.confirm);
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("repeat the name of the volume: acknowledged writes may be lost"));
        }
        let id = self.find(name)?;
        let Some(mirror) = self.0.state.mirror(id) else {
            return Err(conflict(format!("volume {name} has no copies yet")));
        };
        let (me, together) = (self.me(), self.together(&[]).await.unwrap_or_default());
        if !together.served_by(id).is_empty() {
            return Err(
                conflict(format!("volume {name} is served")).hint("there is nothing to force")
            );
        }
        if let Some(Why::Refused(refusal)) = self.own_why(id).await {
            return Err(conflict(format!("volume {name} cannot be forced: {refusal}")).hint(
                "the record of its mirror is older than its images: `windrose cluster recover` makes a newer one, led by \
                 the newest copy",
            ));
        }
        if mirror.replicas.iter().any(|r| r.node == me && r.new) {
            return Err(conflict(format!(
                "the copy of {name} on node {} was never in sync: it holds a part at most",
                self.node_name(me)
            ))
            .hint("ask the node of another copy"));
        }
        if mirror.image(me).is_none() {
            return Err(conflict(format!("node {} keeps no copy of {name}", self.node_name(me)))
                .hint("ask the node whose copy is to go on"));
        }
        let others: Vec<_> = mirror.others(me).map(|m| m.node).collect();
        together.check_gone(&others, name)?;
        tracing::warn!(volume = %name, "an operator has this copy go on alone, whatever is lost");
        let forced = self.0.engine.force(id).await;
        forced.map_err(|e| backing_error(name, &e))?;
        self.await_forced(id, name).await?;
        self.show_id(id).await
    }

    /// Waits until a copy that was forced serves, and says why it does not.
    async fn await_forced(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
        let deadline = Instant::now() + FORCING;
        loop {
            let Some(why) = self.own_why(id).await else { return Ok(()) };
            if Instant::now() >= deadline {
                let why = super::why::sentence(&why, &|node| self.node_name(node));
                return Err(conflict(format!(
                    "volume {name} was forced, and does not serve here yet: {why}"
                ))
                .hint("`windrose status` says how it goes on"));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Why the copy here does not serve; `None` if it does.
    async fn own_why(&self, id: Uuid) -> Option<Why> {
        let reports = self.0.engine.report(Scope::One(id)).await;
        let mirror = reports.iter().flat_map(|r| &r.volumes).find_map(|v| v.mirror.as_ref());
        mirror.map_or(Some(Why::Unread { away: false }), |mirror| mirror.status.why.clone())
    }

    /// Compares the copies of a volume, and makes them like the one on node `keep` where they differ, if that is
    /// named. What is found stays a finding of the status until copies are equal again.
    ///
    /// # Errors
    /// [`Code::Conflict`] names the node to ask, if this is not the primary's; [`Code::NotFound`].
    pub async fn verify(
        &self,
        name: &VolumeName,
        keep: Option<String>,
    ) -> Result<Verification, ApiError> {
        self.in_cluster()?;
        let id = self.find(name)?;
        let keep = keep.map(|node| self.node_called(&node)).transpose()?;
        let Some((stored, _)) = self.0.state.get(id) else {
            return Err(ApiError::new(Code::NotFound, "the volume was deleted just now"));
        };
        let mirror = self.0.state.mirror(id);
        check_comparable(name, &stored.record, mirror.as_ref())?;
        let primary = mirror.map(|m| m.primary);
        if let Some(primary) = primary.filter(|p| *p != self.me()) {
            let node = self.node_name(primary);
            return Err(conflict(format!("writes of {name} are put in order by node {node}"))
                .hint(format!(
                    "ask there, or `windrose volume switch {name} --to {}` first",
                    self.node_name(self.me())
                )));
        }
        let found = self.0.engine.verify(id, keep).await;
        let found = found.map_err(|e| backing_error(name, &e))?;
        let left_out = stored.record.places.iter().map(|p| p.node);
        let left_out: Vec<_> = left_out.filter(|node| !found.nodes.contains(node)).collect();
        self.note_comparison(name, (id, stored.record.block_size), &found).await?;
        let block = u64::from(stored.record.block_size.bytes());
        let differing = found.differences.iter().map(|d| api::Differing {
            at_bytes: d.range.at.0.saturating_mul(block),
            len_bytes: d.range.count * block,
            node: self.node_name(d.node),
        });
        Ok(Verification {
            compared_bytes: found.compared * block,
            differing_bytes: found.differing * block,
            differing: differing.collect(),
            copies: found.nodes.iter().map(|node| self.node_name(*node)).collect(),
            left_out: left_out.iter().map(|node| self.node_name(*node)).collect(),
            unreadable: found.unreadable,
            repaired_bytes: found.repaired * block,
        })
    }

    /// Puts into the record of the mirror what a comparison has found, if that is news.
    async fn note_comparison(
        &self,
        name: &VolumeName,
        (id, block_size): (Uuid, BlockSize),
        found: &Verified,
    ) -> Result<(), ApiError> {
        let repaired = found.repaired == found.differing;
        if found.unreadable > 0 && repaired {
            // Nothing is known of what could not be read.
            return Ok(());
        }
        let block = u64::from(block_size.bytes());
        let mut nodes: Vec<_> = found.differences.iter().map(|d| d.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let first = found.differences.first().filter(|_| !repaired);
        let differing = first.map(|first| Differing {
            at_bytes: first.range.at.0.saturating_mul(block),
            bytes: (found.differing - found.repaired) * block,
            nodes,
            from: self.me(),
        });
        for _ in 0..PUTS {
            let mirror = mirrors::get(&*self.0.meta, id).await.map_err(|e| store_error(&e))?;
            let Some((mirror, at)) = mirror else { return Ok(()) };
            // Of a copy that was not compared, what was known still is.
            let compared =
                |node: &NodeId| found.nodes.contains(node) || mirror.image(*node).is_none();
            let before = mirror.history.differing.clone();
            let before = before.filter(|before| !before.nodes.iter().all(compared));
            let Some(next) = mirror.with_comparison(differing.clone().or(before), random()) else {
                return Ok(());
            };
            let put = self.0.meta.commit(vec![mirrors::replace(id, at, &next)]).await;
            match put {
                Err(MetaError::Changed { .. }) => {}
                put => return put.map(drop).map_err(|e| store_error(&e)),
            }
        }
        Err(conflict(format!("the configuration of {name} keeps changing"))
            .hint("what was compared is known, and is not noted: ask again in a moment"))
    }

    /// Changes the places of a volume, as its mirror is at that moment. A new one is to lie in `new`; what is on the
    /// node `gone` is lost by it, so some copy has to serve.
    async fn change_copies<F>(
        &self,
        name: VolumeName,
        (new, gone): (Option<NewBacking>, Option<String>),
        change: F,
    ) -> Result<Volume, ApiError>
    where
        F: Fn(&Self, &mut VolumeRecord, &Scene) -> Result<(), ApiError> + Send + 'static,
    {
        self.in_cluster()?;
        let control = self.clone();
        self.detached(async move {
            let id = control.find(&name)?;
            let free = control.free_space(&new.unwrap_or_default()).await;
            let gate = control.0.state.gate(id);
            let _held = gate.lock().await;
            let Stored { mut record, revision } = control.ready(id, &name).await?;
            if let Some(node) = gone.and_then(|node| control.made_on(&record, &node)) {
                control.check_give_up(&record, node).await?;
            }
            let mirror = mirrors::get(&*control.0.meta, id).await;
            let Some((mirror, at)) = mirror.map_err(|e| store_error(&e))? else {
                return Err(conflict(format!("volume {name} has no mirror yet"))
                    .hint("its node has to open it first; see `windrose status`"));
            };
            let named = |e: ApiError| {
                let message = format!("volume {name}: {}", e.message);
                ApiError { message, ..e }
            };
            let scene = Scene { free, mirror };
            change(&control, &mut record, &scene).map_err(named)?;
            let is_wanted = |p: &Place| matches!(p.stage, PlaceStage::Wanted { .. });
            if record.place(control.me()).is_some_and(is_wanted) {
                control.check_makeable(&record).await.map_err(named)?;
            }
            let mut changes = record.replace(revision);
            // As it was: what has just been put out or taken in decides anew.
            changes.push(mirrors::replace(id, at, &scene.mirror));
            let committed = control.0.meta.commit(changes).await;
            control.settle_held(id).await;
            committed.map_err(|e| store_error(&e))?;
            control.show_id(id).await
        })
        .await
    }

    /// Free space by node for such a backing, as they have told. Those that cannot have one are not there.
    pub(super) async fn free_space(&self, backing: &NewBacking) -> Free {
        let reports = self.reports().await.unwrap_or_default();
        let NewBacking::Pool { pool } = backing else {
            return reports.into_iter().map(|(node, report)| (node, report.free_bytes)).collect();
        };
        let own = self.0.engine.pool_reports().await;
        let here = own.get(pool).map(|report| (self.me(), report.free_bytes));
        let told = reports.into_iter().filter(|(node, _)| *node != self.me());
        let told = told.filter_map(|(node, report)| Some((node, *report.pools.get(pool)?)));
        told.chain(here).collect()
    }

    /// The nodes that get `count` copies of a volume which has some on `taken`: those named `on`,
    /// and others.
    pub(super) fn choose(
        &self,
        on: &[String],
        count: usize,
        (taken, backing): (&[NodeId], &NewBacking),
        free: &Free,
    ) -> Result<Vec<NodeId>, ApiError> {
        let candidates = self.candidates_for(backing, free);
        let find = |name: &String| candidates.iter().find(|c| c.name == *name).map(|c| c.node);
        let mut named = Vec::new();
        for name in on {
            named.push(find(name).map_or_else(|| self.node_called(name), Ok)?);
        }
        placement::choose(&candidates, taken, &named, count)
            .map_err(|why| conflict(why).hint("`windrose cluster nodes` shows who there is"))
    }

    /// Who could keep a copy with such a backing, and why others cannot.
    pub(super) fn candidates_for(&self, backing: &NewBacking, free: &Free) -> Vec<Candidate> {
        let mut candidates = self.candidates(free);
        if matches!(backing, NewBacking::Pool { .. }) {
            let without = candidates.iter_mut().filter(|c| !free.contains_key(&c.node));
            without.for_each(|c| c.unfit = c.unfit.or(Some("has no such pool, or it is offline")));
        }
        candidates
    }

    fn candidates(&self, free: &Free) -> Vec<Candidate> {
        let Some(membership) = self.membership() else {
            return vec![Candidate {
                node: self.me(),
                name: self.0.settings.name.clone(),
                domain: String::new(),
                unfit: None,
                free_bytes: 0,
                copies: 0,
            }];
        };
        let volumes = self.0.state.all();
        let copies =
            |node: NodeId| volumes.iter().filter(|(s, _)| s.record.place(node).is_some()).count();
        let nodes = membership.nodes.borrow();
        let candidate = |(&node, view): (&NodeId, &NodeView)| Candidate {
            node,
            name: view.record.name.clone(),
            domain: view.record.failure_domain.clone(),
            unfit: unfit(view),
            free_bytes: free.get(&node).copied().unwrap_or(0),
            copies: copies(node),
        };
        nodes.iter().map(candidate).collect()
    }

    /// A copy that `node` shall make.
    pub(super) fn wanted(
        &self,
        volume: Uuid,
        name: &VolumeName,
        node: NodeId,
        backing: &NewBacking,
        force: bool,
    ) -> Result<Place, ApiError> {
        let backing = match backing {
            NewBacking::File { path: Some(path) } => {
                Backing::File { path: absolute(path)?.to_owned() }
            }
            NewBacking::Device { path } => Backing::Device { path: absolute(path)?.to_owned() },
            NewBacking::Pool { pool } if node == self.me() && !self.has_pool(pool) => {
                let message = format!("there is no pool {pool} on this node");
                return Err(ApiError::new(Code::NotFound, message)
                    .hint("`windrose pool list` shows what there is"));
            }
            NewBacking::Pool { pool } => Backing::Pool { pool: pool.clone() },
            NewBacking::File { path: None } => {
                let file = format!("{name}-{volume}.img");
                Backing::File { path: self.data_dir_of(node)?.join("volumes").join(file) }
            }
        };
        let (image, stage) = (None, PlaceStage::Wanted { force });
        Ok(Place { node, backing, image, image_generation: 0, stage })
    }

    fn data_dir_of(&self, node: NodeId) -> Result<std::path::PathBuf, ApiError> {
        if node == self.me() {
            return Ok(self.0.settings.data_dir.clone());
        }
        let nodes = self.membership().map(|m| m.nodes.borrow());
        let record = nodes.as_ref().and_then(|nodes| nodes.get(&node));
        let found = record.map(|view| view.record.data_dir.clone());
        found.ok_or_else(|| ApiError::new(Code::NotFound, format!("there is no node {node}")))
    }

    /// The node called `name`, which keeps a copy of the volume.
    fn keeper(&self, record: &VolumeRecord, name: &str) -> Result<NodeId, ApiError> {
        let keepers = record.places.iter().map(|p| p.node);
        keepers.into_iter().find(|node| self.node_name(*node) == name).ok_or_else(|| {
            let all: Vec<_> = record.places.iter().map(|p| self.node_name(p.node)).collect();
            conflict(format!("node {name} keeps no copy of it"))
                .hint(format!("its copies are on {}", all.join(", ")))
        })
    }

    /// The node called `name`, if it keeps a copy that was made.
    fn made_on(&self, record: &VolumeRecord, name: &str) -> Option<NodeId> {
        let made = |p: &&Place| !matches!(p.stage, PlaceStage::Failed { .. });
        let node = record.places.iter().filter(made).map(|p| p.node);
        node.into_iter().find(|node| self.node_name(*node) == name)
    }

    /// The node called `name`.
    pub(super) fn node_called(&self, name: &str) -> Result<NodeId, ApiError> {
        let nodes = self.membership().map(|m| m.nodes.borrow().clone()).unwrap_or_default();
        let found = nodes.iter().find(|(_, view)| view.record.name == name);
        found.map(|(node, _)| *node).ok_or_else(|| {
            ApiError::new(Code::NotFound, format!("there is no node {name}"))
                .hint("`windrose cluster nodes` shows who there is")
        })
    }

    /// What a volume is called.
    pub(super) fn volume_name(&self, id: Uuid) -> String {
        let known = self.0.state.get(id);
        known.map_or_else(|| id.to_string(), |(stored, _)| stored.record.name.to_string())
    }

    /// What a node is called.
    pub(super) fn node_name(&self, node: NodeId) -> String {
        let nodes = self.membership().map(|m| m.nodes.borrow());
        let known = nodes.as_ref().and_then(|nodes| Some(nodes.get(&node)?.record.name.clone()));
        known.unwrap_or_else(|| {
            if node == self.me() { self.0.settings.name.clone() } else { format!("number {node}") }
        })
    }

    /// Whether this node keeps copies of volumes.
    pub(super) fn keeps_data(&self) -> bool {
        self.membership().is_none_or(|m| m.role == Role::Data)
    }

    fn in_cluster(&self) -> Result<(), ApiError> {
        if self.membership().is_some() {
            return Ok(());
        }
        Err(conflict("this node is in no cluster".into())
            .hint("`windrose cluster init` begins one, `windrose cluster join` joins one"))
    }
}

impl Together {
    /// Refuses to have a copy of `name` go on alone unless all `others`, which may have newer data, are known not to run.
    fn check_gone(&self, others: &[NodeId], name: &VolumeName) -> Result<(), ApiError> {
        if let Some(error) = &self.store.error {
            let names: Vec<_> = others.iter().map(|node| self.name(*node)).collect();
            let message = match &names[..] {
                [] => format!("volume {name} cannot be forced without the metadata store: {error}"),
                names => format!(
                    "whether node {} runs, and has newer data of {name}, is not known without the metadata store: \
                     {error}",
                    names.join(" or ")
                ),
            };
            let hint = format!(
                "bring back a majority of the store's members, or the network to them, then ask again; {MAJORITY_LOST}"
            );
            return Err(ApiError::new(Code::Unavailable, message).hint(hint));
        }
        for node in others {
            let called = self.name(*node);
            match self.state_of(*node) {
                NodeState::Down => {}
                NodeState::Unknown => {
                    return Err(conflict(format!(
                        "node {called} does not answer, and nothing shows yet that it is down: it may have newer data of \
                         {name}"
                    ))
                    .hint(format!(
                        "ask again in some 10 seconds; if this stays, mend the network to node {called}, or switch it off"
                    )));
                }
                NodeState::Runs => {
                    return Err(conflict(format!(
                        "node {called} is alive and may have newer data of {name}"
                    ))
                    .hint(format!("let it serve, or switch node {called} off first")));
                }
            }
        }
        Ok(())
    }
}

/// What a change of copies is decided by.
struct Scene {
    free: Free,
    mirror: Record,
}

/// Free space by node, in bytes.
pub(super) type Free = BTreeMap<NodeId, u64>;

/// Refuses to compare a volume that has not two copies in sync: nothing would be said of its data.
fn check_comparable(
    name: &VolumeName,
    record: &VolumeRecord,
    mirror: Option<&Record>,
) -> Result<(), ApiError> {
    if mirror.is_some_and(|mirror| mirror.in_sync.len() > 1) {
        return Ok(());
    }
    let message = format!("nothing was compared: volume {name} has not two copies in sync");
    let hint = match record.places.len() {
        1 => format!("it has one copy; for another: windrose volume mirror add {name}"),
        _ => {
            "`windrose status` says what the others lack; compare when they are in sync".to_owned()
        }
    };
    Err(conflict(message).hint(hint))
}

fn conflict(message: String) -> ApiError {
    ApiError::new(Code::Conflict, message)
}

fn set_stage(record: &mut VolumeRecord, node: NodeId, stage: PlaceStage) {
    if let Some(place) = record.place_mut(node) {
        place.stage = stage;
    }
}

/// Why a node gets no copy now.
fn unfit(node: &NodeView) -> Option<&'static str> {
    match () {
        () if node.record.role == Role::Witness => Some("is a witness"),
        () if !node.alive => Some("is down, or cut off"),
        () if node.record.drained => Some("is drained"),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::members::Store;
    use super::super::members::tests::node;
    use super::*;

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);

    fn together(b_is_alive: bool) -> Together {
        Together {
            me: A,
            nodes: [node(1, "a", true), node(2, "b", b_is_alive), node(3, "c", true)].into(),
            ..Together::default()
        }
    }

    fn refused(together: &Together) -> ApiError {
        together.check_gone(&[B], &"web".parse().unwrap()).unwrap_err()
    }

    #[test]
    fn whether_a_node_is_alive_is_not_claimed_without_the_store_when_a_copy_is_forced() {
        let mut together = together(true);
        let (store, why) = ("etcd".into(), "no leader".into());
        let error = Some(MetaError::Unreachable { store, why });
        together.store = Store { error, ..Store::default() };
        let error = refused(&together);
        assert!(error.message.contains("whether node b runs"), "{error}");
        assert!(error.message.contains("not known") && !error.message.contains("is alive"));
        let hint = error.hint.unwrap();
        for part in ["bring back a majority", "systemctl restart", "cluster recover --plan"] {
            assert!(hint.contains(part), "{hint}");
        }
        // Nobody else is in sync: it still needs the store.
        let alone = together.check_gone(&[], &"web".parse().unwrap()).unwrap_err();
        assert!(alone.message.contains("without the metadata store"), "{alone}");
    }

    #[test]
    fn a_copy_is_forced_only_once_the_others_are_known_not_to_run() {
        let mut down = together(false);
        assert!(down.check_gone(&[B], &"web".parse().unwrap()).is_ok());
        down = together(true);
        assert!(refused(&down).message.contains("node b is alive"));
        down.silent = [B].into();
        let silent = refused(&down);
        assert!(silent.message.contains("does not answer"), "{silent}");
        assert!(!silent.message.contains("alive"), "{silent}");
        assert!(silent.hint.unwrap().contains("ask again in some 10 seconds"));
    }
}
