//! `windrose cluster recover`: a new store in the place of one that is lost, and volumes from what images tell
//! (RFD 0036, 5).

use std::collections::BTreeMap;

use ::cluster::identity::Stage;
use ::cluster::meta::MetaError;
use ::cluster::{mirrors, nodes};
use api::{ApiError, Code, NewStore, PlannedVolume, RecoverCluster, RecoveryPlan};
use mirror::record::Replica;
use uuid::Uuid;

use super::cluster::{conflict, first_of_new, identity_error, renewed};
use super::decide::{Choice, Copy, decide, planned};
use super::images::recovered_mirror;
use super::waits::{JOIN_ANEW, MAJORITY_LOST};
use super::{Control, DISTRUST, store_error};
use crate::part::Part;
use crate::record::Stored;

impl Control {
    /// Recovers what there is to recover, or says what would be done.
    ///
    /// # Errors
    /// [`Code::Conflict`] says why nothing can be recovered here.
    pub async fn recover(&self, ask: RecoverCluster) -> Result<RecoveryPlan, ApiError> {
        self.check_keeps_data()?;
        let name = &self.0.settings.name;
        if let Some(confirm) = ask.confirm.as_ref().filter(|confirm| *confirm != name) {
            let message = format!("{confirm} is confirmed, and the node that is asked is {name}");
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("confirm with the name of the node that is asked"));
        }
        if let Some(part) = self.0.part.clone().filter(|_| self.membership().is_none()) {
            let control = self.clone();
            // The node may serve nothing, and does not wait for what it serves.
            return control.recover_store(&part, ask.confirm.is_some()).await;
        }
        let control = self.clone();
        self.detached(async move { control.recover_volumes(&ask).await }).await
    }

    /// Begins a new cluster in the place of one whose store is lost.
    async fn recover_store(&self, part: &Part, confirmed: bool) -> Result<RecoveryPlan, ApiError> {
        let identity = part.identity();
        if identity.stage != Stage::Member {
            return Err(conflict(
                "this node is on its way into its cluster, or out of it: there is nothing to recover",
                "wait until it is there, or `windrose cluster leave --force`",
            ));
        }
        if let Some(waits) = self.waiting().filter(|waits| waits.is_outside) {
            return Err(conflict(format!("nothing is recovered: {}", waits.what), &waits.next));
        }
        let why = lost(
            nodes::cluster(part.store()).await.map(|c| c.map(|(c, _)| c.id)),
            identity.cluster,
        )?;
        let lost = identity.endpoints.clone();
        let store = NewStore { replaces: identity.cluster, lost, why };
        let plan = RecoveryPlan {
            node: self.0.settings.name.clone(),
            store: Some(store),
            volumes: Vec::new(),
            silent: Vec::new(),
            done: confirmed,
        };
        if !confirmed {
            return Ok(plan);
        }
        let protection = renewed(&identity.protection)?;
        let next = first_of_new(&self.0.settings, identity.node, protection)?;
        tracing::warn!(old = %identity.cluster, new = %next.cluster, "an operator has a new store take the place of the old one");
        part.retire(&next).await.map_err(|e| identity_error(&e))?;
        self.0.restart.send_replace(true);
        Ok(plan)
    }

    /// Takes volumes that no record names, and those whose records are behind their images.
    async fn recover_volumes(&self, ask: &RecoverCluster) -> Result<RecoveryPlan, ApiError> {
        if self.membership().is_some() {
            nodes::cluster(&*self.0.meta).await.map_err(|e| no_store(&e))?;
        }
        let (copies, silent) = self.all_copies().await?;
        let mut by_volume = BTreeMap::<Uuid, Vec<(Copy, bool)>>::new();
        for (copy, listed) in copies {
            by_volume.entry(copy.found.volume).or_default().push((copy, listed));
        }
        let confirmed = ask.confirm.is_some();
        let mut volumes = Vec::new();
        for (id, copies) in by_volume {
            volumes.extend(self.recover_volume(id, copies, &ask.without, confirmed).await?);
        }
        let notes = silent.iter().map(|node| format!("node {node} did not say what it has"));
        let notes: Vec<_> = notes.collect();
        volumes.iter_mut().for_each(|v| v.notes.extend(notes.iter().cloned()));
        if confirmed {
            self.look_around(false).await;
        }
        Ok(RecoveryPlan {
            node: self.0.settings.name.clone(),
            store: None,
            volumes,
            silent,
            done: confirmed,
        })
    }

    /// Recovers one volume, if it has to be.
    async fn recover_volume(
        &self,
        id: Uuid,
        copies: Vec<(Copy, bool)>,
        without: &[String],
        confirmed: bool,
    ) -> Result<Option<PlannedVolume>, ApiError> {
        let stored = self.stored(id).await.map_err(|e| store_error(&e))?;
        // Beside a volume that there is, only what its record names counts.
        let known = stored.is_some();
        let copies: Vec<_> =
            copies.into_iter().filter(|(_, listed)| *listed || !known).map(|(c, _)| c).collect();
        // What a node by itself cannot open is in nobody's way but its own.
        let alone = known && self.membership().is_none();
        if copies.is_empty() || alone {
            return Ok(None);
        }
        if let Some(stored) = &stored
            && self.is_served(&stored.record).await?
        {
            return Ok(None);
        }
        let decided = decide(&copies, without);
        let mut plan = planned(&copies, &decided);
        if let Some(stored) = &stored {
            plan.name = Some(stored.record.name.clone());
        }
        if let (true, Ok(choice)) = (confirmed, &decided)
            && let Err(why) = self.carry_out(&plan, &copies, choice, stored).await
        {
            plan.doubt = Some(why.message);
        }
        Ok(Some(plan))
    }

    async fn carry_out(
        &self,
        plan: &PlannedVolume,
        copies: &[Copy],
        choice: &Choice,
        stored: Option<Stored>,
    ) -> Result<(), ApiError> {
        match stored {
            Some(stored) => self.raise_mirror(copies, choice, stored).await?,
            None => {
                let name = plan.name.as_ref().ok_or_else(|| {
                    let image = copies.first().map(|copy| copy.place.to_string()).unwrap_or_default();
                    let message = format!(
                        "its image does not tell what it was called: windrose volume adopt {image} --name NAME"
                    );
                    ApiError::new(Code::InvalidRequest, message)
                })?;
                self.take_in(name, copies, choice).await?;
            }
        }
        self.settle(plan.volume).await;
        Ok(())
    }

    /// Puts a record of the mirror above all that its images have seen.
    async fn raise_mirror(
        &self,
        copies: &[Copy],
        choice: &Choice,
        stored: Stored,
    ) -> Result<(), ApiError> {
        let Stored { mut record, revision } = stored;
        let held = mirrors::get(&*self.0.meta, record.id).await.map_err(|e| store_error(&e))?;
        let known = held.as_ref().map_or(0, |(mirror, _)| mirror.epoch.0);
        let above = copies.iter().filter_map(|c| c.shown().epoch).max().unwrap_or(0).max(known);
        let members: Vec<_> = std::iter::once(choice.leads)
            .chain(choice.follow.iter().copied())
            .map(|n| copies[n].clone())
            .collect();
        let mut next = recovered_mirror(&members, above);
        for place in &mut record.places {
            if let Some(copy) = members.iter().find(|c| c.node == place.node) {
                place.image = Some(copy.found.image);
                place.image_generation = copy.found.generation;
            } else if let (true, Some(image)) = (place.stage.is_kept(), place.image) {
                // It is brought in sync when it is there again.
                next.replicas.push(Replica { node: place.node, image, new: false });
            }
        }
        next.replicas.sort_by_key(|r| r.node);
        let mut changes = record.replace(revision);
        changes.push(match held {
            Some((_, at)) => mirrors::replace(record.id, at, &next),
            None => mirrors::create(record.id, &next),
        });
        self.0.meta.commit(changes).await.map_err(|e| store_error(&e))?;
        tracing::warn!(volume = %record.name, epoch = next.epoch.0, "an operator has its record made newer than its images");
        Ok(())
    }
}

/// That a member which still runs reaches no store. It begins no new one: a word that was meant for volumes would
/// make a second cluster whenever the store does not answer for a moment.
fn no_store(error: &MetaError) -> ApiError {
    match error {
        MetaError::Unreachable { .. } => {
            let hint =
                format!("nothing was changed; try again when the store answers; {MAJORITY_LOST}");
            ApiError::new(Code::Unavailable, error.to_string()).hint(hint)
        }
        error => store_error(error),
    }
}

/// Why the store of a cluster is lost, as its answer says.
fn lost(answer: Result<Option<Uuid>, MetaError>, cluster: Uuid) -> Result<String, ApiError> {
    match answer {
        Ok(Some(found)) if found == cluster => Err(conflict(
            "the cluster's store is there: nothing of it is lost",
            "`windrose status` says what this node waits for; volumes that it does not know are recovered once it is a \
             member",
        )),
        // A second cluster beside it would serve the same images.
        Ok(Some(found)) => Err(conflict(
            format!(
                "a store answers, and it belongs to another cluster ({found}): it took the place of this node's"
            ),
            JOIN_ANEW,
        )),
        Err(error @ MetaError::Untrusted { .. }) => Err(conflict(
            format!("a store answers, and this node is no part of it: {error}"),
            DISTRUST,
        )),
        Ok(None) => Ok("it is empty".to_owned()),
        Err(error) => Ok(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_answers_is_not_replaced() {
        let own = Uuid::from_u128(1);
        let refused = lost(Ok(Some(own)), own).unwrap_err();
        assert!(refused.message.contains("nothing of it is lost"), "{refused}");
        assert_eq!(lost(Ok(None), own).unwrap(), "it is empty");
        let away =
            MetaError::Unreachable { store: "etcd".into(), why: "it does not answer".into() };
        assert!(lost(Err(away), own).unwrap().contains("does not answer"));
    }

    #[test]
    fn a_member_that_runs_and_has_lost_its_store_is_told_to_restart_before_it_recovers() {
        let (store, why) = ("etcd".into(), "no leader".into());
        let refused = no_store(&MetaError::Unreachable { store, why });
        let hint = refused.hint.unwrap_or_default();
        let restart = hint.find("systemctl restart windrose").unwrap();
        assert!(restart < hint.find("windrose cluster recover --plan").unwrap(), "{hint}");
        assert!(refused.message.contains("no leader"), "{}", refused.message);
    }

    #[test]
    fn a_node_whose_cluster_goes_on_in_another_store_begins_no_second_one() {
        let (own, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let why = "invalid peer certificate: UnknownIssuer".to_owned();
        let untrusted = MetaError::Untrusted { store: "etcd".into(), why };
        for answer in [Err(untrusted), Ok(Some(other))] {
            let refused = lost(answer, own).unwrap_err();
            assert!(refused.message.contains("a store answers"), "{refused}");
            let hint = refused.hint.unwrap_or_default();
            assert!(hint.contains("windrose cluster leave --force"), "{hint}");
            assert!(hint.contains("join") && !hint.contains("recover"), "{hint}");
        }
    }
}
