//! Makes copies of volumes that have fewer than they are to have (RFD 0039). What is to be done [`decision`] says; the
//! primary of a volume does it, and commits it only upon the very records from which it was decided: whatever two nodes
//! take themselves for, one of them acts.

mod decision;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use api::{Backing, NewBacking};
use cluster::{mirrors, nodes};
use disk::utc;
use mirror::record::Record;
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use self::decision::{Action, GivenUp, Moment, Rule, Seen, Wait, apply, begin, decide};
use super::create::now_s;
use super::old_images::{add_over, add_over_found};
use super::placement::Candidate;
use super::report::MissingCopy;
use super::state::Listed;
use super::{Control, placement};
use crate::engine::CoreReport;
use crate::meta::{MetaError, Revision};
use crate::record::{Place, Stored, VolumeRecord};

/// How often a place is looked for, for the copy of a volume that has to wait or for which there was none.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What a node remembers of the copies that volumes lack.
#[derive(Debug, Default)]
pub(super) struct Repairs {
    seen: Seen,
    /// Volumes for whose copy a place was looked for, for how long that counts, and why there was none.
    places: BTreeMap<Uuid, (Instant, Option<MissingCopy>)>,
}

impl Control {
    /// Sees to the copies of the volumes whose writes this node puts in order.
    pub(super) async fn keep_copies(&self, cores: &[CoreReport], repairs: &mut Repairs) {
        if !self.keeps_data() {
            return;
        }
        let now = Moment { at: Instant::now(), wall_s: now_s() };
        let volumes = self.0.state.listed(self.me());
        let gone = self.gone_nodes(&volumes).await;
        let Repairs { seen, places } = repairs;
        seen.look(now, gone.as_ref().ok());
        if let Err(error) = gone {
            tracing::debug!(%error, "who is gone is not known now");
            return;
        }
        places.retain(|_, (until, _)| now.at < *until);
        seen.keep(&volumes.iter().map(|v| v.stored.record.id).collect());
        let mirrored =
            volumes.iter().filter_map(|v| Some((&v.stored.record, &v.mirror.as_ref()?.0)));
        let mirrored: Vec<_> = mirrored.collect();
        mirrored.iter().for_each(|(record, mirror)| seen.note(record, mirror, now));
        let serving = serving(cores);
        let leads = |(record, mirror): &&(&VolumeRecord, &Record)| {
            mirror.primary == self.me() && serving.contains(&record.id)
        };
        let led: Vec<_> = mirrored.iter().filter(leads).collect();
        let repaired = led.iter().filter_map(|(record, _)| record.repair.as_ref());
        let mut rule = Rule {
            after: self.0.settings.cluster.repair_after,
            most: self.0.settings.cluster.resyncs,
            // Nothing goes to a node that is gone.
            running: repaired.filter(|repair| !seen.is_gone(repair.node)).count(),
        };
        let mut told = BTreeMap::new();
        for (record, mirror) in led {
            let id = record.id;
            let known = places.get(&id).map(|(_, missing)| missing.clone());
            let missing = match (decide((record, mirror), seen, rule, now), known) {
                (Action::Rest, _) => None,
                (Action::Wait(wait), known) => {
                    let nowhere = match known {
                        Some(known) => known,
                        None => {
                            let instead_of = seen.instead_of(record, mirror);
                            let nowhere = self.nowhere(record, instead_of).await;
                            places.insert(id, (now.at + LOOK_AGAIN, nowhere.clone()));
                            nowhere
                        }
                    };
                    let waits = self.waits(record, &wait, seen);
                    Some(told_of(&wait, waits, nowhere))
                }
                (Action::Begin { .. }, Some(Some(missing))) => Some(missing),
                _ => self.repair(id, seen, &mut rule, now).await.inspect(|missing| {
                    places.insert(id, (now.at + LOOK_AGAIN, Some(missing.clone())));
                }),
            };
            told.extend(missing.map(|missing| (id, missing)));
        }
        *self.0.missing.lock().unwrap_or_else(PoisonError::into_inner) = told;
    }

    /// The nodes that are gone, as the store knows, but for those that were put out of service.
    async fn gone_nodes(&self, volumes: &[Listed]) -> Result<BTreeSet<NodeId>, MetaError> {
        let alive = nodes::alive(&*self.0.meta).await?;
        let me = self.me();
        if !alive.contains(&me) {
            // Whoever is taken for dead itself does not judge others.
            return Err(MetaError::Changed { key: nodes::alive_key(me) });
        }
        let known = self.membership().map(|m| m.nodes.borrow().clone()).unwrap_or_default();
        let named = volumes.iter().flat_map(|v| v.stored.record.places.iter().map(|p| p.node));
        let all: BTreeSet<_> = known.keys().copied().chain(named).collect();
        let drained = |node: &NodeId| known.get(node).is_some_and(|view| view.record.drained);
        Ok(all.into_iter().filter(|node| !alive.contains(node) && !drained(node)).collect())
    }

    /// Does what is to be done by the records as they are now. What is in the way is given back.
    async fn repair(
        &self,
        id: Uuid,
        seen: &mut Seen,
        rule: &mut Rule,
        now: Moment,
    ) -> Option<MissingCopy> {
        let gate = self.0.state.gate(id);
        // Somebody is changing it: there is a next time.
        let Ok(_held) = gate.try_lock() else { return None };
        let Stored { mut record, revision } = self.stored(id).await.ok()??;
        let (mirror, at) = mirrors::get(&*self.0.meta, id).await.ok()??;
        if mirror.primary != self.me() {
            return None;
        }
        let action = decide((&record, &mirror), seen, *rule, now);
        match &action {
            Action::Rest | Action::Wait(_) => return None,
            Action::Begin { instead_of } => {
                match self.place_for(&record, *instead_of, seen).await {
                    Ok(place) => begin(&mut record, *instead_of, place, now),
                    Err(missing) => return Some(missing),
                }
            }
            _ => apply(&mut record, &action),
        }
        if let Err(error) = self.commit_repair(&record, revision, (&mirror, at)).await {
            tracing::info!(volume = %record.name, %error, "repair: nothing was changed");
        } else {
            if matches!(action, Action::Begin { .. }) {
                rule.running += 1;
            }
            self.note_repair(&record, &action, seen, now);
        }
        self.settle_held(id).await;
        None
    }

    async fn commit_repair(
        &self,
        record: &VolumeRecord,
        revision: Revision,
        (mirror, at): (&Record, Revision),
    ) -> Result<(), MetaError> {
        let mut changes = record.replace(revision);
        // As it was: what has just been put out or taken in decides anew.
        changes.push(mirrors::replace(record.id, at, mirror));
        self.0.meta.commit(changes).await.map(drop)
    }

    /// Says in the log what was done, and remembers what has failed.
    fn note_repair(&self, record: &VolumeRecord, action: &Action, seen: &mut Seen, now: Moment) {
        let volume = &record.name;
        let named = |node: &NodeId| self.node_name(*node);
        match action {
            Action::Rest | Action::Wait(_) => {}
            Action::Begin { instead_of } => {
                let node = record.repair.as_ref().map(|repair| named(&repair.node));
                let instead_of = instead_of.as_ref().map(named);
                tracing::warn!(%volume, node, instead_of, "repair: a missing copy is made");
            }
            Action::Complete => {
                seen.succeeded(record.id);
                tracing::info!(%volume, "repair: the volume has its copies");
            }
            Action::GiveUp { node, why } => {
                let why = match why {
                    GivenUp::Failed(why) => {
                        seen.failed(record.id, *node, why, now);
                        why.clone()
                    }
                    GivenUp::Returned(back) => {
                        format!("the one on {} is back in sync", named(back))
                    }
                    GivenUp::Gone => "its node is gone".to_owned(),
                };
                let node = named(node);
                tracing::warn!(%volume, node, why, "repair: the new copy is given up");
            }
            Action::Retire(node) => {
                let node = named(node);
                tracing::info!(%volume, node, "repair: a copy is back in sync, and one too many: it goes");
            }
            Action::Reinstate { node, .. } => {
                let node = named(node);
                tracing::info!(%volume, node, "repair: a copy is back in sync, and counts again");
            }
        }
    }

    /// Why no copy is made yet, for people.
    fn waits(&self, record: &VolumeRecord, wait: &Wait, seen: &Seen) -> MissingCopy {
        let why = match wait {
            Wait::Off => format!(
                "no copy is made by itself, as cluster.repair_after_s is \"off\" at node {}",
                self.0.settings.name
            ),
            Wait::Until(due) => format!("another one is made by itself from {}", utc(due.wall_s)),
            Wait::Paused { until, why } => {
                let failed = seen.failed_at(record.id);
                let backing = self.backing_like(record, None).unwrap_or_default();
                let next =
                    add_over_found(record, &backing, why, &failed, |node| self.node_name(node));
                let until = utc(until.wall_s);
                let why = format!(
                    "another one could not be made ({why}); it is tried again from {until}"
                );
                return MissingCopy { why, next };
            }
            Wait::ForOthers => {
                "another one is made when those of other volumes are done".to_owned()
            }
            Wait::Full => {
                let why = "copies on nodes that are gone have all its places";
                let next = "take out a node that never comes back: windrose cluster leave --node NODE --force";
                return MissingCopy { why: why.to_owned(), next: Some(next.to_owned()) };
            }
        };
        MissingCopy { why, next: None }
    }

    /// Who could keep the copy that is missing, but for the room that it needs, and with what backing.
    async fn keepers_of_another(
        &self,
        record: &VolumeRecord,
        instead_of: Option<NodeId>,
    ) -> Result<(NewBacking, Vec<Candidate>), MissingCopy> {
        let name = &record.name;
        let Some(backing) = self.backing_like(record, instead_of) else {
            let why = "its copies lie where an administrator has named a file or device, and none is made by itself";
            let next = format!(
                "windrose volume mirror add {name} --on NODE --device DEVICE (or --path FILE, --pool POOL)"
            );
            return Err(MissingCopy { why: why.to_owned(), next: Some(next) });
        };
        let free = self.free_space(&backing).await;
        let mut candidates = self.candidates_for(&backing, &free);
        let old = self.old_images(Some(record.id)).await;
        self.rule_out_old(&mut candidates, record, &backing, &old);
        Ok((backing, candidates))
    }

    /// Why no node can keep the copy that is missing, if so, whatever room there is.
    async fn nowhere(
        &self,
        record: &VolumeRecord,
        instead_of: Option<NodeId>,
    ) -> Option<MissingCopy> {
        let (backing, candidates) = match self.keepers_of_another(record, instead_of).await {
            Ok(found) => found,
            Err(missing) => return Some(missing),
        };
        let taken = taken(record);
        let has = candidates.iter().any(|c| c.unfit.is_none() && !taken.contains(&c.node));
        (!has).then(|| nobody(record, &backing, &candidates))
    }

    /// Where a copy is to be made.
    async fn place_for(
        &self,
        record: &VolumeRecord,
        instead_of: Option<NodeId>,
        seen: &Seen,
    ) -> Result<Place, MissingCopy> {
        let (backing, mut candidates) = self.keepers_of_another(record, instead_of).await?;
        let taken = taken(record);
        let is_fit = |c: &Candidate| c.unfit.is_none() && !taken.contains(&c.node);
        let (need, promised) = match candidates.iter().any(is_fit) {
            true => self.needs(record).await,
            false => Default::default(),
        };
        for candidate in &mut candidates {
            let promised = promised.get(&candidate.node).copied().unwrap_or(0);
            if candidate.free_bytes.saturating_sub(promised) < need {
                candidate.unfit = candidate.unfit.or(Some("has no room for it"));
            }
        }
        let failed = seen.failed_at(record.id);
        if candidates.iter().any(|c| is_fit(c) && !failed.contains(&c.node)) {
            candidates.retain(|c| !failed.contains(&c.node));
        }
        let chosen = placement::choose(&candidates, &taken, &[], 1);
        let node = chosen.ok().and_then(|nodes| nodes.first().copied());
        let node = node.ok_or_else(|| nobody(record, &backing, &candidates))?;
        let place = self.wanted(record.id, &record.name, node, &backing, false);
        place.map_err(|e| MissingCopy { why: e.message, next: e.hint })
    }

    /// A backing like that of the copy that is missing, or of one that is there, where every node has such a one: in the
    /// pool of that name, or in the node's own directory.
    fn backing_like(
        &self,
        record: &VolumeRecord,
        instead_of: Option<NodeId>,
    ) -> Option<NewBacking> {
        let first = instead_of.into_iter().chain([self.me()]);
        let all = first.filter_map(|node| record.place(node)).chain(record.standing());
        let mut backings = all.filter_map(|place| like(&place.backing, record.id));
        backings.next()
    }

    /// How many bytes a copy of a volume takes, and what is still to be written by node for copies that are being made.
    async fn needs(&self, record: &VolumeRecord) -> (u64, BTreeMap<NodeId, u64>) {
        let volumes = self.0.state.all();
        let space = self.space_of(&volumes).await;
        let need = |record: &VolumeRecord| {
            let taken = space.taken.get(&record.id).filter(|_| record.thin);
            taken.copied().unwrap_or(record.size_bytes)
        };
        let mut promised = BTreeMap::<NodeId, u64>::new();
        for (Stored { record, .. }, _) in &volumes {
            if let Some(repair) = &record.repair {
                let of = promised.entry(repair.node).or_default();
                *of = of.saturating_add(need(record));
            }
        }
        (need(record), promised)
    }
}

/// What is said of a missing copy that has to wait, if there is `nowhere` to make it: it is not said to come by itself
/// then.
fn told_of(wait: &Wait, waits: MissingCopy, nowhere: Option<MissingCopy>) -> MissingCopy {
    match (wait, nowhere) {
        (_, None) | (Wait::Full, _) => waits,
        (Wait::Until(_) | Wait::ForOthers, Some(nowhere)) => nowhere,
        (Wait::Off | Wait::Paused { .. }, Some(nowhere)) => {
            let why = match wait {
                Wait::Paused { why, .. } => format!("another one could not be made ({why})"),
                _ => waits.why,
            };
            let why = format!("{why}; {}", nowhere.why);
            MissingCopy { why, next: nowhere.next.or(waits.next) }
        }
    }
}

/// That no node can keep the copy that is missing, and what helps.
fn nobody(record: &VolumeRecord, backing: &NewBacking, candidates: &[Candidate]) -> MissingCopy {
    let taken = taken(record);
    let add = "add a node (windrose cluster join), or make room";
    let next = match add_over(record, backing, candidates, &taken, None) {
        Some(over) => format!("{over}; or {add}"),
        None => add.to_owned(),
    };
    MissingCopy { why: placement::nobody(candidates, &taken), next: Some(next) }
}

/// The nodes that have a place of a volume.
fn taken(record: &VolumeRecord) -> Vec<NodeId> {
    record.places.iter().map(|place| place.node).collect()
}

/// The volumes that are served here.
fn serving(cores: &[CoreReport]) -> BTreeSet<Uuid> {
    let volumes = cores.iter().flat_map(|core| &core.volumes);
    let serves = volumes.filter(|v| v.mirror.as_ref().is_some_and(|m| m.status.why.is_none()));
    serves.map(|volume| volume.id).collect()
}

/// What a backing on another node is like, if that one needs no naming.
pub(super) fn like(backing: &Backing, volume: Uuid) -> Option<NewBacking> {
    match backing {
        Backing::Pool { pool } => Some(NewBacking::Pool { pool: pool.clone() }),
        Backing::File { path } => {
            let by_itself = format!("-{volume}.img");
            let name = path.file_name()?.to_str()?;
            name.ends_with(&by_itself).then_some(NewBacking::File { path: None })
        }
        Backing::Device { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One finding does not say that a copy comes by itself and that no node can keep one.
    #[test]
    fn a_copy_that_no_node_can_keep_is_not_said_to_come_by_itself() {
        let record = crate::record::tests::record("web");
        let (node, unfit) = (NodeId(3), Some("is a witness"));
        let (name, domain) = ("w".to_owned(), "w".to_owned());
        let witness = Candidate { node, name, domain, unfit, free_bytes: 0, copies: 0 };
        let nowhere = nobody(&record, &NewBacking::default(), &[witness]);
        assert!(nowhere.next.as_ref().unwrap().contains("add a node"), "{nowhere:?}");
        let moment = Moment { at: Instant::now(), wall_s: 1 };
        let waits = MissingCopy { why: "made by itself from then".to_owned(), next: None };
        let until = Wait::Until(moment);
        let told = |wait: &Wait, nowhere| told_of(wait, waits.clone(), nowhere);
        assert_eq!(told(&until, None), waits);
        assert_eq!(told(&until, Some(nowhere.clone())), nowhere);
        let paused = Wait::Paused { until: moment, why: "no space".to_owned() };
        let both = told(&paused, Some(nowhere.clone()));
        assert_eq!(
            both.why,
            "another one could not be made (no space); no other node can keep a copy now (w is a witness)"
        );
        assert_eq!(both.next, nowhere.next);
    }

    #[test]
    fn only_what_every_node_has_is_made_by_itself() {
        let volume = Uuid::from_u128(7);
        let of = |path: &str| like(&Backing::File { path: path.into() }, volume);
        let own = format!("/var/lib/windrose/volumes/web-{volume}.img");
        assert_eq!(of(&own), Some(NewBacking::File { path: None }));
        assert_eq!(of("/srv/web.img"), None);
        assert_eq!(like(&Backing::Device { path: "/dev/sdb".into() }, volume), None);
        let pool: api::PoolName = "tank".parse().unwrap();
        let in_pool = Backing::Pool { pool: pool.clone() };
        assert_eq!(like(&in_pool, volume), Some(NewBacking::Pool { pool }));
    }
}
