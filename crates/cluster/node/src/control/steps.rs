//! Taking the steps that [`crate::reconcile`] names, one volume at a time.

use block::Epoch;
use cluster::mirrors;
use mirror::record::{History, Member, Record, Replica};
use peer::{Incarnation, NodeId};
use rt::fault::{self, Point};
use uuid::Uuid;

use super::{Control, MAX_STEPS};
use crate::engine::{BackingError, Image};
use crate::meta::{MetaError, Revision};
use crate::reconcile::{Mirroring, Observed, Step, next_step};
use crate::record::{self, PlaceStage, Stage, Stored, VolumeRecord};

/// What the store says of a volume.
#[derive(Clone, Debug, Default)]
pub(super) struct Records {
    /// Its record.
    pub(super) stored: Option<Stored>,
    /// Its mirror's, in a cluster.
    pub(super) mirror: Option<(Record, Revision)>,
}

/// What came of a step.
enum Taken {
    /// It is done.
    Done,
    /// It has to wait for something, and is tried again later.
    Later,
}

impl Control {
    /// Takes steps for a volume until there is nothing left to do.
    pub(super) async fn settle(&self, id: Uuid) {
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        self.settle_held(id).await;
    }

    /// [`Self::settle`] for those who hold the gate.
    pub(super) async fn settle_held(&self, id: Uuid) {
        if let Err(error) = self.try_settle_held(id).await {
            tracing::error!(volume = %id, %error, "a volume is left as it is");
        }
    }

    /// [`Self::settle`] for those who want to know what the store said.
    ///
    /// # Errors
    /// [`MetaError`]; the volume is left as it is then.
    pub(super) async fn try_settle(&self, id: Uuid) -> Result<(), MetaError> {
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        self.try_settle_held(id).await
    }

    /// [`Self::settle`] by records that a list of the store has shown.
    pub(super) async fn settle_by(&self, id: Uuid, records: Records) {
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        if let Err(error) = self.try_settle_by(id, Some(records)).await {
            tracing::error!(volume = %id, %error, "a volume is left as it is");
        }
    }

    async fn try_settle_held(&self, id: Uuid) -> Result<(), MetaError> {
        self.try_settle_by(id, None).await
    }

    async fn try_settle_by(&self, id: Uuid, known: Option<Records>) -> Result<(), MetaError> {
        let mut known = known.filter(|known| !self.0.state.is_behind(id, known));
        for _ in 0..MAX_STEPS {
            let records = match known.take() {
                Some(records) => records,
                None => self.records(id).await?,
            };
            self.0.state.know(id, &records);
            let mirror = self.mirroring(&records);
            let observed = self.0.state.observed(id);
            if self.has_to_move(&records, &observed) {
                self.move_to_target(id).await;
                continue;
            }
            let step = next_step(records.stored.as_ref(), mirror, self.life(), &observed);
            if matches!(step, Step::Rest | Step::Erase | Step::Vacate | Step::Forget) {
                self.tell_where(id).await;
            }
            if step == Step::Rest {
                if records.stored.is_none() {
                    self.0.state.drop_volume(id);
                }
                return Ok(());
            }
            // What this node does by itself does not change the records; others' changes are told.
            if matches!(step, Step::Open | Step::Publish) {
                known = Some(records.clone());
            }
            match self.take(step, id, records).await {
                // Somebody else was faster with something: what is there now decides.
                Ok(Taken::Done) | Err(MetaError::Changed { .. }) => {}
                Ok(Taken::Later) => {
                    // Who may use it now does not wait for that.
                    self.tell_where(id).await;
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        tracing::error!(volume = %id, "a volume does not settle");
        Ok(())
    }

    /// Whether a volume is open on another core than its target.
    fn has_to_move(&self, records: &Records, observed: &Observed) -> bool {
        let record = records.stored.as_ref().map(|stored| &stored.record);
        matches!(observed, Observed::Open { .. })
            && record.is_some_and(|r| {
                r.stage == Stage::Ready && self.0.engine.has_to_move(r.id, r.owner())
            })
    }

    /// Closes a volume that is to be opened on another core. The other nodes go on without a pause.
    async fn move_to_target(&self, id: Uuid) {
        if self.membership().is_some()
            && let Err(error) = self.0.engine.leave(id).await
        {
            tracing::debug!(volume = %id, %error, "its mirror is not left before it moves");
        }
        self.close(id, false).await;
    }

    /// The records of a volume, as the store has them now.
    async fn records(&self, id: Uuid) -> Result<Records, MetaError> {
        let stored = self.stored(id).await?;
        let mirror = match self.membership() {
            Some(_) => mirrors::get(&*self.0.meta, id).await?,
            None => None,
        };
        Ok(Records { stored, mirror })
    }

    /// The record of a volume, as the store has it now.
    pub(super) async fn stored(&self, id: Uuid) -> Result<Option<Stored>, MetaError> {
        let entry = self.0.meta.get(&record::volume_key(id)).await?;
        entry.as_ref().map(record::decode).transpose()
    }

    fn mirroring<'a>(&self, records: &'a Records) -> Mirroring<'a> {
        match (&records.mirror, self.membership()) {
            (_, None) => Mirroring::Alone,
            (None, Some(_)) => Mirroring::Absent,
            (Some((record, revision)), Some(_)) => Mirroring::Has(record, *revision),
        }
    }

    /// Takes one step. An error is one of the store; those of the backing are remembered.
    async fn take(&self, step: Step, id: Uuid, records: Records) -> Result<Taken, MetaError> {
        let mirror = records.mirror;
        match (step, records.stored) {
            (Step::Rest, _) => {}
            (Step::Close, stored) => {
                let erased = stored.is_some_and(|s| s.record.stage == Stage::Deleting);
                self.close(id, erased).await;
            }
            (Step::Publish, stored) => self.publish(stored.as_ref()).await,
            (_, None) => {}
            (Step::Make, Some(stored)) => self.make(stored).await?,
            (Step::Finish, Some(stored)) => self.finish(stored).await?,
            (Step::GiveUp, Some(stored)) => {
                self.change(stored, |record| record.stage = Stage::Deleting).await?;
            }
            (Step::Look, Some(stored)) => return self.look(stored).await,
            (Step::Open, Some(stored)) => self.open(&stored).await,
            (Step::Adopt(image), Some(stored)) => {
                tracing::info!(volume = %stored.record.name, ?image, "its image is seen anew");
                self.change(stored, |record| record.see(self.me(), image)).await?;
            }
            (Step::Mirror | Step::Enlist | Step::Delist, Some(stored)) => {
                return self.enrol(step, &stored.record, mirror).await;
            }
            (Step::Leave, Some(stored)) => return Ok(self.leave_mirror(&stored.record).await),
            (Step::Erase, Some(stored)) => self.erase(&stored.record).await,
            (Step::Vacate, Some(stored)) => self.vacate(stored, mirror).await?,
            (Step::Forget, Some(stored)) => self.forget(&stored, mirror).await?,
        }
        Ok(Taken::Done)
    }

    /// Replaces a volume's record by what `change` makes of it.
    async fn change(
        &self,
        stored: Stored,
        change: impl FnOnce(&mut VolumeRecord),
    ) -> Result<(), MetaError> {
        let Stored { mut record, revision } = stored;
        change(&mut record);
        self.0.meta.commit(record.replace(revision)).await.map(drop)
    }

    /// Makes the image. What an attempt of an earlier life has left of it goes first.
    async fn make(&self, stored: Stored) -> Result<(), MetaError> {
        let record = &stored.record;
        let force = record
            .place(self.me())
            .is_some_and(|place| matches!(place.stage, PlaceStage::Wanted { force: true }));
        let made = self.make_image(record, force).await;
        self.0.state.observe(record.id, Observed::Closed);
        fault::pass(Point::VolumeMade);
        self.made(stored, made).await
    }

    async fn make_image(&self, record: &VolumeRecord, force: bool) -> Result<Image, BackingError> {
        self.check_makeable(record).await.map_err(|e| BackingError::refused(e.message))?;
        if let Some(e) = self.holds_old_copy(record).await {
            return Err(e);
        }
        self.erase_image(record).await?;
        self.0.engine.make(record, force).await
    }

    async fn made(
        &self,
        stored: Stored,
        made: Result<Image, BackingError>,
    ) -> Result<(), MetaError> {
        let (me, id) = (self.me(), stored.record.id);
        let stage = match &made {
            Ok(_) => PlaceStage::Made,
            Err(e) => {
                tracing::warn!(volume = %stored.record.name, error = %e, "its image is not made");
                PlaceStage::Failed { reason: e.to_string() }
            }
        };
        self.0.state.make_failed(id, made.as_ref().err().cloned());
        let image = made.ok();
        self.change(stored, |record| {
            if let Some(image) = image {
                record.see(me, image);
            }
            if let Some(place) = record.place_mut(me) {
                place.stage = stage;
            }
        })
        .await
    }

    /// Every copy is made: from here on the volume exists.
    async fn finish(&self, stored: Stored) -> Result<(), MetaError> {
        let Stored { mut record, revision } = stored;
        record.stage = Stage::Ready;
        record.creator = None;
        let mut changes = record.replace(revision);
        if self.membership().is_some() {
            changes.push(mirrors::create(record.id, &first_mirror(&record)));
        }
        fault::pass(Point::VolumeFinishing);
        self.0.meta.commit(changes).await?;
        fault::pass(Point::VolumeFinished);
        tracing::info!(volume = %record.name, id = %record.id, bytes = record.size_bytes, "created");
        Ok(())
    }

    async fn look(&self, stored: Stored) -> Result<Taken, MetaError> {
        let id = stored.record.id;
        let looked = match self.check_pool_of(&stored.record) {
            Ok(()) => self.0.engine.inspect(&stored.record).await,
            Err(e) => Err(e),
        };
        match looked {
            Ok(image) => {
                self.change(stored, |record| record.see(self.me(), image)).await?;
                Ok(Taken::Done)
            }
            Err(e) => {
                self.0.state.observe(id, Observed::Broken { reason: e.to_string() });
                Ok(Taken::Later)
            }
        }
    }

    async fn open(&self, stored: &Stored) {
        let record = &stored.record;
        let opened = match self.check_pool_of(record) {
            Ok(()) => self.0.engine.open(record).await,
            Err(e) => Err(e),
        };
        let observed = match opened {
            Ok(opened) => {
                tracing::info!(volume = %record.name, core = opened.core, "open");
                Observed::Open { core: opened.core, image: opened.image, published: None }
            }
            Err(e) => Observed::Broken { reason: e.to_string() },
        };
        if let Observed::Broken { reason } = &observed {
            tracing::error!(volume = %record.name, reason, "the volume is offline");
        }
        self.0.state.observe(record.id, observed);
        self.heed_drain(record.id).await;
    }

    /// Ends the export of a volume and closes it.
    pub(super) async fn close(&self, id: Uuid, erased: bool) {
        self.0.state.observe(id, Observed::Closed);
        self.tell_where(id).await;
        if let Err(error) = self.0.engine.close(id, erased).await {
            tracing::error!(volume = %id, %error, "a volume did not close cleanly");
        }
    }

    /// Brings this copy into the mirror or out of it.
    async fn enrol(
        &self,
        step: Step,
        record: &VolumeRecord,
        mirror: Option<(Record, Revision)>,
    ) -> Result<Taken, MetaError> {
        let me = self.me();
        let image = record.place(me).and_then(|place| place.image);
        let change = match (step, mirror, image) {
            (Step::Mirror, None, Some(_)) => Ok(mirrors::create(record.id, &first_mirror(record))),
            (Step::Enlist, Some((held, at)), Some(image)) => {
                let next = held.with_replica(me, image, random());
                next.map(|next| mirrors::replace(record.id, at, &next))
            }
            (_, Some((held, at)), _) => {
                let next = held.without_replica(me, random());
                next.map(|next| mirrors::replace(record.id, at, &next))
            }
            _ => return Ok(Taken::Later),
        };
        match change {
            Ok(change) => self.0.meta.commit(vec![change]).await.map(|_| Taken::Done),
            Err(why) => {
                tracing::warn!(volume = %record.name, %why, "its replicas are not changed now");
                Ok(Taken::Later)
            }
        }
    }

    /// Asks the mirror to go on without this copy; the mirror declines if it is the last.
    async fn leave_mirror(&self, record: &VolumeRecord) -> Taken {
        match self.0.engine.leave(record.id).await {
            Ok(true) => Taken::Done,
            Ok(false) => {
                tracing::info!(volume = %record.name, "nobody can go on with it: the copy here stays");
                Taken::Later
            }
            Err(error) => {
                tracing::warn!(volume = %record.name, %error, "the copy here is not left");
                Taken::Later
            }
        }
    }

    async fn erase_image(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        self.check_pool_of(record)?;
        self.0.engine.erase(record).await
    }

    async fn erase(&self, record: &VolumeRecord) {
        let erased = match self.lost_its_pool(record) {
            true => Ok(()),
            false => self.erase_image(record).await,
        };
        let observed = match erased {
            Ok(()) => Observed::Erased,
            Err(e) => {
                tracing::warn!(volume = %record.name, error = %e, "not erased");
                Observed::Stuck { reason: e.to_string() }
            }
        };
        fault::pass(Point::VolumeErased);
        self.0.state.observe(record.id, observed);
    }

    /// Removes this copy from the record; whoever removes the last one of a volume that is being
    /// deleted removes all of it.
    async fn vacate(
        &self,
        stored: Stored,
        mirror: Option<(Record, Revision)>,
    ) -> Result<(), MetaError> {
        let me = self.me();
        let last = stored.record.places.iter().all(|place| place.node == me);
        if stored.record.stage == Stage::Deleting && last {
            return self.forget(&stored, mirror).await;
        }
        let id = stored.record.id;
        self.change(stored, |record| record.places.retain(|place| place.node != me)).await?;
        self.0.state.observe(id, Observed::Closed);
        Ok(())
    }

    async fn forget(
        &self,
        stored: &Stored,
        mirror: Option<(Record, Revision)>,
    ) -> Result<(), MetaError> {
        let Stored { record, revision } = stored;
        let name = self.0.meta.get(&record::name_key(&record.name)).await?;
        let name = name.map(|e| e.revision).unwrap_or_default();
        let mut changes = record.remove(*revision, name);
        changes.extend(mirror.map(|(_, at)| mirrors::remove(record.id, at)));
        self.0.meta.commit(changes).await?;
        self.0.state.observe(record.id, Observed::Closed);
        tracing::info!(volume = %record.name, id = %record.id, "deleted");
        Ok(())
    }
}

/// The first record of a volume's mirror. All its images are new and hold the same, or there is only
/// one: nobody lacks anything. Who leads first is spread over the nodes.
fn first_mirror(record: &VolumeRecord) -> Record {
    let replica = |node: NodeId, image: Uuid| Replica { node, image, new: false };
    let images = record.places.iter().filter_map(|p| Some((p.node, p.image?)));
    let replicas: Vec<_> = images.map(|(node, image)| replica(node, image)).collect();
    let nobody_yet = Incarnation(0);
    let in_sync = replicas.iter().map(|r| Member { node: r.node, incarnation: nobody_yet });
    let count = replicas.len().max(1) as u128;
    let first = usize::try_from(record.id.as_u128() % count).unwrap_or(0);
    Record {
        epoch: Epoch(1),
        config: random(),
        primary: replicas.get(first).map_or(NodeId(0), |r| r.node),
        born: Epoch::default(),
        history: History::default(),
        in_sync: in_sync.collect(),
        replicas,
    }
}

/// A name for a record of a mirror that no other has.
pub(super) fn random() -> u128 {
    Uuid::new_v4().as_u128()
}
