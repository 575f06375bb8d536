//! Taking a pool that this node does not know: its record was lost with the disk that held it, or its disks came from
//! another machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{
    AdoptImage, ApiError, Code, FindPools, ImportPool, ImportablePool, ImportablePools,
    ImportedPool, PlannedVolume, PoolName,
};
use uuid::Uuid;

use super::admin::{check_paths, conflict, not_written, pool_error};
use super::{Known, PoolObserved, candidates, hint_for};
use crate::control::Control;
use crate::engine::{ImagePlace, PoolDiskSeen};
use crate::pools::{MAX_RINGS, PoolRecord, PoolStage, SeenDisk};

/// Longest time that is waited for the others to hear of a pool.
const TELLING: Duration = Duration::from_secs(10);

/// How often is looked whether they may have.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A pool that disks hold, as they tell.
struct Stray {
    id: Uuid,
    disks: Vec<(PathBuf, PoolDiskSeen)>,
}

impl Stray {
    fn name(&self) -> &str {
        self.disks.first().map_or("", |(_, seen)| &seen.name)
    }

    fn shown(&self, taken: bool) -> ImportablePool {
        let name = self.name().to_owned();
        let problem = match name.parse::<PoolName>() {
            Err(e) => Some(format!("{e}; give it another name (--as NAME)")),
            Ok(_) if taken => Some(
                "this node has another pool of that name; give it another one (--as NAME)"
                    .to_owned(),
            ),
            Ok(_) => None,
        };
        let disks = self.disks.iter().map(|(path, _)| path.clone()).collect();
        ImportablePool { id: self.id, name, disks, problem }
    }
}

impl Control {
    /// The pools that disks of this machine hold and that the node does not know.
    ///
    /// # Errors
    /// A core has stopped.
    pub async fn find_pools(&self, ask: FindPools) -> Result<ImportablePools, ApiError> {
        let strays = self.strays(ask.disks).await?;
        let taken = |s: &Stray| s.name().parse().is_ok_and(|name| self.has_pool(&name));
        Ok(ImportablePools { pools: strays.iter().map(|s| s.shown(taken(s))).collect() })
    }

    async fn strays(&self, disks: Vec<PathBuf>) -> Result<Vec<Stray>, ApiError> {
        self.check_keeps_data()?;
        check_paths(&disks)?;
        let paths = if disks.is_empty() { candidates(Vec::new()).await } else { disks };
        let known: Vec<_> = self.0.pools.known().values().map(|k| k.record.id).collect();
        let found = self.0.engine.find_pool_disks(paths).await.map_err(|e| pool_error(&e))?;
        let mut strays = BTreeMap::<Uuid, Stray>::new();
        for (path, seen) in found {
            match seen {
                Ok(seen) if !known.contains(&seen.pool) => {
                    let id = seen.pool;
                    let stray = strays.entry(id).or_insert_with(|| Stray { id, disks: Vec::new() });
                    stray.disks.push((path, seen));
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "a disk does not say which pool it is of"),
            }
        }
        Ok(strays.into_values().collect())
    }

    /// Takes a pool that this node does not know, and the volumes in it that no record names.
    ///
    /// # Errors
    /// [`Code::NotFound`] without such a pool; [`Code::Conflict`] says why it cannot be opened: it is known from then on.
    pub async fn import_pool(&self, ask: ImportPool) -> Result<ImportedPool, ApiError> {
        let control = self.clone();
        self.detached(async move { control.import_pool_now(ask).await }).await
    }

    async fn import_pool_now(&self, ask: ImportPool) -> Result<ImportedPool, ApiError> {
        let strays = self.strays(ask.disks.clone()).await?;
        let stray = chosen(&strays, &ask.pool)?;
        let name = match &ask.name {
            Some(name) => name.clone(),
            None => stray.name().parse().map_err(|e: api::Invalid| {
                ApiError::from(e).hint("give the pool another name: --as NAME")
            })?,
        };
        let rings = stray.disks.iter().map(|(_, seen)| seen.rings).max().unwrap_or(1);
        let disk = |(path, seen): &(PathBuf, PoolDiskSeen)| SeenDisk {
            path: path.clone(),
            serial: Some(seen.serial.clone()).filter(|s| !s.is_empty()),
            out: false,
        };
        let record = PoolRecord {
            id: stray.id,
            name: name.clone(),
            stage: PoolStage::Ready,
            rings: rings.clamp(1, MAX_RINGS),
            disks: stray.disks.iter().map(disk).collect(),
        };
        let known = Known::new(record.clone());
        let gate = Arc::clone(&known.gate);
        let held = gate.lock().await;
        if !self.0.pools.insert(known) {
            let message = format!("this node has another pool {name}");
            return Err(
                ApiError::new(Code::Exists, message).hint("give it another name: --as NAME")
            );
        }
        if let Err(error) = self.write_pool(&record).await {
            self.0.pools.known().remove(&name);
            return Err(not_written(&name, &error));
        }
        tracing::warn!(pool = %name, id = %record.id, disks = record.disks.len(), "an operator has it imported");
        match self.0.engine.open_pool(&record, record.paths(), (Vec::new(), true)).await {
            Ok(report) => self.pool_opened(&record, &report).await,
            Err(error) => {
                self.0.pools.observe(&name, PoolObserved::Broken(error.clone()));
                let why = error.of_that_pool(&name);
                let message = format!("pool {name} is known from now on, and is offline: {why}");
                return Err(conflict(message).hint(hint_for(&name, &error)));
            }
        }
        drop(held);
        self.await_told(&name).await;
        let volumes = self.adopt_from(&name).await;
        Ok(ImportedPool { pool: self.pool(&name).await?, volumes })
    }

    /// Waits until other nodes may know of a pool here: the next command may be said there.
    async fn await_told(&self, pool: &PoolName) {
        if self.membership().is_none() {
            return;
        }
        let told = async {
            loop {
                let reports = self.reports().await.unwrap_or_default();
                if reports.get(&self.me()).is_some_and(|r| r.pools.contains_key(pool)) {
                    return;
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        // They learn of it later, then.
        let _ = tokio::time::timeout(TELLING, told).await;
    }

    /// Takes the volumes in a pool that no record names; what is not taken says why.
    async fn adopt_from(&self, pool: &PoolName) -> Vec<PlannedVolume> {
        let held = self.look_around(false).await;
        let mut volumes = Vec::new();
        for image in held.iter().filter(|h| !h.listed) {
            match &image.place {
                ImagePlace::InPool(within, _) if within == pool => {}
                _ => continue,
            }
            let ask = AdoptImage {
                image: image.place.to_string(),
                name: None,
                without: Vec::new(),
                force: false,
                plan: false,
            };
            match self.adopt_now(ask).await {
                Ok(adopted) => volumes.push(adopted.plan),
                Err(e) => volumes.push(self.not_taken(image, &e)),
            }
        }
        volumes
    }
}

/// The pool that `which` names, by name or identity.
fn chosen<'a>(strays: &'a [Stray], which: &str) -> Result<&'a Stray, ApiError> {
    let id = which.parse::<Uuid>().ok();
    let mut named = strays.iter().filter(|s| Some(s.id) == id || s.name() == which);
    match (named.next(), named.next()) {
        (Some(stray), None) => Ok(stray),
        (Some(_), Some(_)) => Err(conflict(format!("there are several pools {which}"))
            .hint("name it by its identity; `windrose pool import` lists them")),
        (None, _) => {
            let message = format!("no disk here holds a pool {which} that the node does not know");
            Err(ApiError::new(Code::NotFound, message).hint(
                "`windrose pool import` lists those that there are; disks that are files are named by --disk",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stray(id: u128, name: &str) -> Stray {
        let id = Uuid::from_u128(id);
        let seen =
            PoolDiskSeen { pool: id, name: name.into(), member: 0, serial: "S".into(), rings: 2 };
        Stray { id, disks: vec![("/dev/a".into(), seen)] }
    }

    #[test]
    fn a_pool_is_named_by_its_name_or_its_identity() {
        let strays = [stray(1, "tank"), stray(2, "zoo"), stray(3, "zoo")];
        assert_eq!(chosen(&strays, "tank").map(|s| s.id), Ok(Uuid::from_u128(1)));
        let id = Uuid::from_u128(3);
        assert_eq!(chosen(&strays, &id.to_string()).map(|s| s.id), Ok(id));
        assert!(
            chosen(&strays, "zoo").map(|s| s.id).unwrap_err().message.contains("several pools")
        );
        assert_eq!(chosen(&strays, "none").map(|s| s.id).unwrap_err().code, Code::NotFound);
    }

    #[test]
    fn a_name_that_is_taken_or_is_none_is_told() {
        assert_eq!(stray(1, "tank").shown(false).problem, None);
        assert!(stray(1, "tank").shown(true).problem.unwrap().contains("--as NAME"));
        assert!(stray(1, "Tank!").shown(false).problem.unwrap().contains("--as NAME"));
    }
}
