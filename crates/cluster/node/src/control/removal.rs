//! Taking the copies of a node that does not come back out of all volumes.
//!
//! Nothing is changed while a volume needs such a copy. From then on volumes are changed one by one. One that somebody
//! else changes at the same time is decided anew, and a node that is alive again keeps what it has.

use std::future::Future;
use std::time::Duration;

use ::cluster::meta::{Change, Expect, Meta, MetaError};
use ::cluster::mirrors;
use ::cluster::nodes;
use api::{ApiError, VolumeName};
use peer::NodeId;
use uuid::Uuid;

use super::cluster::conflict;
use super::{Control, steps, store_error};
use crate::record::{self, Stage, Stored, VOLUMES};

/// How often the removal of one copy is decided while others change its volume.
const ATTEMPTS: u32 = 20;

/// How long the next attempt waits at least; each waits longer than the one before.
const AGAIN: Duration = Duration::from_millis(10);

/// Most volumes that an error names.
const MAX_NAMED: usize = 40;

/// A copy that is to be taken out.
struct Removal {
    volume: Uuid,
    name: VolumeName,
    changes: Vec<Change>,
}

/// What a look at a volume says.
enum Decided {
    /// These changes take the copy out.
    Remove(Vec<Change>),
    /// The newest data may be there alone.
    Needed {
        /// Whether the volume has no other copy.
        is_only: bool,
    },
    /// There is no such copy any more.
    Gone,
}

/// Why a copy was not taken out.
#[derive(Debug)]
enum Kept {
    /// Its node is alive again.
    Alive,
    /// The newest data may be there alone now.
    Needed {
        /// Whether the volume has no other copy.
        is_only: bool,
    },
    /// Others have changed the volume each time.
    Busy,
    /// Something else is in the way.
    Other(ApiError),
}

impl Control {
    /// Takes the copies of a node that does not come back out of all volumes, or out of none if one needs them. Gives the
    /// volumes.
    pub(super) async fn strip(
        &self,
        node: NodeId,
        name: &str,
    ) -> Result<Vec<VolumeName>, ApiError> {
        let (entries, _) = self.0.meta.list(VOLUMES).await.map_err(|e| store_error(&e))?;
        let mut removals = Vec::new();
        let mut needed = Vec::new();
        for entry in &entries {
            let stored = record::decode(entry).map_err(|e| store_error(&e))?;
            let (volume, name) = (stored.record.id, stored.record.name.clone());
            match self.removal(stored, node).await? {
                Decided::Remove(changes) => removals.push(Removal { volume, name, changes }),
                Decided::Needed { is_only } => needed.push((name, is_only)),
                Decided::Gone => {}
            }
        }
        if !needed.is_empty() {
            return Err(newest_there(name, &needed, "no volume was changed"));
        }
        let mut done = Vec::new();
        let mut removals = removals.into_iter();
        while let Some(Removal { volume, name: of, changes }) = removals.next() {
            let anew = || self.decide_anew(volume, node);
            match take_out(&*self.0.meta, node, changes, anew).await {
                Ok(()) => {
                    tracing::warn!(volume = %of, node = name, "a copy that does not come back was taken out");
                    done.push(of);
                }
                Err(kept) => {
                    let left: Vec<_> =
                        std::iter::once(of).chain(removals.map(|r| r.name)).collect();
                    return Err(ended_early(name, &kept, &done, &left));
                }
            }
        }
        Ok(done)
    }

    async fn decide_anew(&self, volume: Uuid, node: NodeId) -> Result<Decided, ApiError> {
        match self.stored(volume).await.map_err(|e| store_error(&e))? {
            Some(stored) => self.removal(stored, node).await,
            None => Ok(Decided::Gone),
        }
    }

    /// What takes the copy on a node out of a volume.
    async fn removal(&self, stored: Stored, node: NodeId) -> Result<Decided, ApiError> {
        let Stored { mut record, revision } = stored;
        if record.place(node).is_none() {
            return Ok(Decided::Gone);
        }
        let mirror = mirrors::get(&*self.0.meta, record.id).await;
        let mirror = mirror.map_err(|e| store_error(&e))?;
        if record.stage == Stage::Ready {
            let needed = mirror.as_ref().is_none_or(|(m, _)| m.member(node).is_some());
            let is_only = record.places.len() == 1;
            if needed || is_only {
                return Ok(Decided::Needed { is_only });
            }
            self.check_give_up(&record, node).await?;
        }
        // How many copies the volume is to have stays: that one is missing now is told.
        record.remove_place(node);
        let mut changes = record.replace(revision);
        if let Some((held, at)) = mirror {
            changes.push(match held.without_replica(node, steps::random()) {
                Ok(next) => mirrors::replace(record.id, at, &next),
                // It is as it was when this was decided.
                Err(_) => {
                    Change { key: mirrors::key(record.id), expect: Expect::Still(at), value: None }
                }
            });
        }
        Ok(Decided::Remove(changes))
    }
}

/// That a node was alive again when its copies had been taken out of these volumes.
pub(super) fn alive_again(node: &str, done: &[VolumeName]) -> ApiError {
    ended_early(node, &Kept::Alive, done, &[])
}

/// Takes a copy out of one volume unless its node is alive again. Decides anew when somebody else has changed it.
async fn take_out<F, Fut>(
    meta: &dyn Meta,
    node: NodeId,
    mut changes: Vec<Change>,
    mut anew: F,
) -> Result<(), Kept>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Decided, ApiError>>,
{
    let stored = |e: &MetaError| Kept::Other(store_error(e));
    let alive = nodes::alive_key(node);
    for attempt in 1..=ATTEMPTS {
        changes.push(Change { key: alive.clone(), expect: Expect::Absent, value: None });
        match meta.commit(changes).await {
            Ok(_) => return Ok(()),
            Err(MetaError::Changed { .. }) => {}
            Err(error) => return Err(stored(&error)),
        }
        if meta.get(&alive).await.map_err(|e| stored(&e))?.is_some() {
            return Err(Kept::Alive);
        }
        tokio::time::sleep(AGAIN * attempt).await;
        changes = match anew().await.map_err(Kept::Other)? {
            Decided::Remove(changes) => changes,
            Decided::Needed { is_only } => return Err(Kept::Needed { is_only }),
            Decided::Gone => return Ok(()),
        };
    }
    Err(Kept::Busy)
}

/// That a node which does not come back has the newest data of volumes, or all of it: each with whether its copy is the
/// only one.
fn newest_there(node: &str, needed: &[(VolumeName, bool)], but: &str) -> ApiError {
    let names: Vec<_> = needed.iter().map(|(volume, _)| volume.clone()).collect();
    let what = if needed.len() == 1 { "volume" } else { "volumes" };
    let message = format!("node {node} has the newest data of {what} {}; {but}", named(&names));
    let helps = needed.iter().take(MAX_NAMED).map(|(volume, is_only)| {
        // Its node is down: whether somebody uses the volume there is not known.
        let delete = format!("windrose volume delete {volume} --discard --force");
        match is_only {
            true => format!("give up what it alone holds: {delete}"),
            false => format!(
                "have another copy go on first: windrose volume force {volume}, at the node that keeps it; or: {delete}"
            ),
        }
    });
    let hint = format!("bring node {node} back; or {}", helps.collect::<Vec<_>>().join("; "));
    conflict(message, &hint)
}

/// That not all copies of a node were taken out, and which.
fn ended_early(node: &str, kept: &Kept, done: &[VolumeName], left: &[VolumeName]) -> ApiError {
    let so_far = match done {
        [] => "no volume was changed".to_owned(),
        done if left.is_empty() => {
            format!("its copies of {} were taken out before that", named(done))
        }
        done => format!(
            "its copies of {} were taken out before that, and it still has those of {}",
            named(done),
            named(left)
        ),
    };
    let first = left.first().map(ToString::to_string).unwrap_or_default();
    let again = format!("`windrose cluster leave --node {node} --force` goes on with the rest");
    match kept {
        Kept::Alive => conflict(
            format!("node {node} is alive again and stays in the cluster; {so_far}"),
            &format!(
                "missing copies are made anew (`windrose status`); to take the node out, run `windrose cluster \
                 leave` at node {node}"
            ),
        ),
        Kept::Needed { is_only } => {
            let first: Vec<_> =
                left.first().map(|volume| (volume.clone(), *is_only)).into_iter().collect();
            newest_there(node, &first, &so_far)
        }
        Kept::Busy => conflict(format!("volume {first} is changed all the time; {so_far}"), &again),
        Kept::Other(error) => {
            let message = format!("volume {first}: {}; {so_far}", error.message);
            let hint = error.hint.iter().cloned().chain([again]).collect::<Vec<_>>().join("; ");
            ApiError::new(error.code, message).hint(hint)
        }
    }
}

/// Their names, as many as can be read.
fn named(volumes: &[VolumeName]) -> String {
    let names: Vec<_> = volumes.iter().take(MAX_NAMED).map(ToString::to_string).collect();
    match volumes.len() - names.len() {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ::cluster::meta::model::{Client, Fate, Model};

    use super::*;

    const GONE: NodeId = NodeId(2);
    const KEY: &str = "volumes/x";

    fn store(model: &Model) -> Client {
        model.client(Duration::from_secs(1), Box::new(|_| Fate::WELL))
    }

    async fn put(meta: &dyn Meta, key: &str) {
        let held = meta.get(key).await.unwrap();
        let expect = held.map_or(Expect::Absent, |held| Expect::At(held.revision));
        let value = Some(b"changed".to_vec());
        meta.commit(vec![Change { key: key.to_owned(), expect, value }]).await.unwrap();
    }

    /// What takes the copy out of the volume as it is now.
    async fn removal(meta: &dyn Meta) -> Vec<Change> {
        let at = meta.get(KEY).await.unwrap().unwrap().revision;
        vec![Change { key: KEY.to_owned(), expect: Expect::At(at), value: Some(b"taken".to_vec()) }]
    }

    async fn holds(meta: &dyn Meta) -> Vec<u8> {
        meta.get(KEY).await.unwrap().unwrap().value
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_that_is_changed_meanwhile_is_decided_anew() {
        let model = Model::default();
        let meta = store(&model);
        put(&meta, KEY).await;
        let first = removal(&meta).await;
        put(&meta, KEY).await;
        let looks = Cell::new(0);
        let anew = async || {
            looks.set(looks.get() + 1);
            let changes = removal(&meta).await;
            if looks.get() < 3 {
                // Once more, and once more.
                put(&meta, KEY).await;
            }
            Ok(Decided::Remove(changes))
        };
        take_out(&meta, GONE, first, anew).await.unwrap();
        assert_eq!((looks.get(), holds(&meta).await), (3, b"taken".to_vec()));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_changed_all_the_time_is_given_up_in_the_end() {
        let model = Model::default();
        let meta = store(&model);
        put(&meta, KEY).await;
        let first = removal(&meta).await;
        put(&meta, KEY).await;
        let anew = async || {
            let changes = removal(&meta).await;
            put(&meta, KEY).await;
            Ok(Decided::Remove(changes))
        };
        assert!(matches!(take_out(&meta, GONE, first, anew).await, Err(Kept::Busy)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_that_is_needed_by_now_or_gone_is_left_alone() {
        let model = Model::default();
        let meta = store(&model);
        put(&meta, KEY).await;
        let old = removal(&meta).await;
        put(&meta, KEY).await;
        let needed = async || Ok(Decided::Needed { is_only: false });
        assert!(matches!(
            take_out(&meta, GONE, old.clone(), needed).await,
            Err(Kept::Needed { .. })
        ));
        take_out(&meta, GONE, old, async || Ok(Decided::Gone)).await.unwrap();
        assert_eq!(holds(&meta).await, b"changed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_alive_again_keeps_its_copies() {
        let model = Model::default();
        let meta = store(&model);
        put(&meta, KEY).await;
        let changes = removal(&meta).await;
        put(&meta, &nodes::alive_key(GONE)).await;
        let never = async || -> Result<Decided, ApiError> { panic!("there is nothing to decide") };
        let kept = take_out(&meta, GONE, changes, never).await;
        assert!(matches!(kept, Err(Kept::Alive)));
        assert_eq!(holds(&meta).await, b"changed");
    }

    #[test]
    fn an_early_end_says_what_was_done_and_what_is_left() {
        let names = |names: &[&str]| -> Vec<VolumeName> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        let (done, left) = (names(&["v1", "v2"]), names(&["v3", "v4"]));
        let busy = ended_early("b", &Kept::Busy, &done, &left);
        assert_eq!(
            busy.message,
            "volume v3 is changed all the time; its copies of v1, v2 were taken out before that, and it still has \
             those of v3, v4"
        );
        assert!(busy.hint.unwrap().contains("windrose cluster leave --node b --force"));
        let none = ended_early("b", &Kept::Alive, &[], &left).message;
        assert_eq!(none, "node b is alive again and stays in the cluster; no volume was changed");
        let all = alive_again("b", &done).message;
        assert!(all.ends_with("; its copies of v1, v2 were taken out before that"), "{all}");
        let needed = ended_early("b", &Kept::Needed { is_only: false }, &done, &left).message;
        assert!(needed.starts_with("node b has the newest data of volume v3; its copies of v1"));
        let store = Kept::Other(ApiError::new(api::Code::Unavailable, "the store is away"));
        let store = ended_early("b", &store, &done, &left);
        assert!(store.message.starts_with("volume v3: the store is away; its copies of v1, v2"));
        let many: Vec<VolumeName> = (0..100).map(|n| format!("v{n}").parse().unwrap()).collect();
        assert!(named(&many).ends_with("v39 and 60 more"));
    }

    #[test]
    fn what_needs_a_dead_node_is_told_with_commands_that_are_not_refused() {
        let volume = |name: &str| name.parse::<VolumeName>().unwrap();
        let needed = [(volume("solo"), true), (volume("both"), false)];
        let refused = newest_there("b", &needed, "no volume was changed");
        assert!(refused.message.contains("volumes solo, both; no volume was changed"));
        let hint = refused.hint.unwrap();
        let solo = "give up what it alone holds: windrose volume delete solo --discard --force;";
        assert!(hint.starts_with("bring node b back; or ") && hint.contains(solo), "{hint}");
        assert!(!hint.contains("volume force solo"), "there is no other copy: {hint}");
        assert!(hint.contains("windrose volume force both, at the node that keeps it"), "{hint}");
        assert!(hint.ends_with("windrose volume delete both --discard --force"), "{hint}");
    }
}
