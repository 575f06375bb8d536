//! Importing a pool that this node does not know: its record was lost with its disk, or its disks
//! come from another machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{
    ApiError, ErrorCode, FindPools, ImportPoolRequest, ImportablePool, ImportablePools, PoolName,
};
use uuid::Uuid;

use super::PoolControl;
use super::admin::{check_paths, conflict, pool_error, record_write_error};
use super::{KnownPool, candidate_paths};
use engine::PoolDiskSeen;
use records::pool_records::{KnownDisk, MAX_POOL_CORES, PoolRecord, PoolStage};
use status::pool_status::{PoolObserved, offline_pool_hint};

/// How long to wait until other nodes know a pool.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often that wait checks.
const REPORT_POLL: Duration = Duration::from_millis(100);

/// A pool that was found on disks, by their metadata.
struct ImportCandidate {
    id: Uuid,
    disks: Vec<(PathBuf, PoolDiskSeen)>,
}

impl ImportCandidate {
    fn name(&self) -> &str {
        self.disks.first().map_or("", |(_, metadata)| &metadata.name)
    }

    fn to_api(&self, taken: bool) -> ImportablePool {
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

impl PoolControl {
    /// Lists the pools on this machine's disks that the node does not know.
    ///
    /// # Errors
    /// Fails if a core has stopped.
    pub async fn find_importable_pools(
        &self,
        request: FindPools,
    ) -> Result<ImportablePools, ApiError> {
        let candidates = self.scan_import_candidates(request.disks).await?;
        let taken = |s: &ImportCandidate| s.name().parse().is_ok_and(|name| self.has_pool(&name));
        Ok(ImportablePools { pools: candidates.iter().map(|s| s.to_api(taken(s))).collect() })
    }

    async fn scan_import_candidates(
        &self,
        disks: Vec<PathBuf>,
    ) -> Result<Vec<ImportCandidate>, ApiError> {
        self.0.context.check_data_node()?;
        check_paths(&disks)?;
        let paths = if disks.is_empty() { candidate_paths(Vec::new()).await } else { disks };
        let known: Vec<_> = self.0.table.entries().values().map(|k| k.record.id).collect();
        let found =
            self.0.context.engine.find_pool_disks(paths).await.map_err(|e| pool_error(&e))?;
        let mut candidates = BTreeMap::<Uuid, ImportCandidate>::new();
        for (path, metadata) in found {
            match metadata {
                Ok(metadata) if !known.contains(&metadata.pool_id) => {
                    let id = metadata.pool_id;
                    let candidate = candidates
                        .entry(id)
                        .or_insert_with(|| ImportCandidate { id, disks: Vec::new() });
                    candidate.disks.push((path, metadata));
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "cannot read the pool metadata of a disk"),
            }
        }
        Ok(candidates.into_values().collect())
    }

    /// Opens a pool that this node does not know, and records it; returns its name.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`] without such a pool; [`ErrorCode::Conflict`] says why it cannot be
    /// opened: it is known from then on.
    pub(crate) async fn import_pool_now(
        &self,
        request: ImportPoolRequest,
    ) -> Result<PoolName, ApiError> {
        let candidates = self.scan_import_candidates(request.disks.clone()).await?;
        let candidate = select_candidate(&candidates, &request.pool)?;
        let name = match &request.name {
            Some(name) => name.clone(),
            None => candidate.name().parse().map_err(|e: api::InvalidValue| {
                ApiError::from(e).with_hint("give the pool another name: --as NAME")
            })?,
        };
        let max_cores =
            candidate.disks.iter().map(|(_, metadata)| metadata.max_cores).max().unwrap_or(1);
        let disk = |(path, metadata): &(PathBuf, PoolDiskSeen)| KnownDisk {
            path: path.clone(),
            serial: Some(metadata.serial.clone()).filter(|s| !s.is_empty()),
            is_out: false,
        };
        let record = PoolRecord {
            id: candidate.id,
            name: name.clone(),
            stage: PoolStage::Ready,
            max_cores: max_cores.clamp(1, MAX_POOL_CORES),
            disks: candidate.disks.iter().map(disk).collect(),
        };
        let known = KnownPool::new(record.clone());
        let lock = Arc::clone(&known.lock);
        let guard = lock.lock().await;
        if !self.0.table.insert(known) {
            let message = format!("this node has another pool {name}");
            return Err(ApiError::new(ErrorCode::Exists, message)
                .with_hint("give it another name: --as NAME"));
        }
        if let Err(error) = self.write_pool_record(&record).await {
            self.0.table.entries().remove(&name);
            return Err(record_write_error(&name, &error));
        }
        tracing::warn!(pool = %name, id = %record.id, disks = record.disks.len(), "pool imported \
            by an operator");
        match self.0.context.engine.open_pool(&record, record.paths(), (Vec::new(), true)).await {
            Ok(report) => self.on_pool_opened(&record, &report).await,
            Err(error) => {
                self.0.table.observe(&name, PoolObserved::OpenFailed(error.clone()));
                let why = error.message_without_pool(&name);
                let message = format!("pool {name} was imported, but is offline: {why}");
                return Err(conflict(message).with_hint(offline_pool_hint(&name, &error)));
            }
        }
        drop(guard);
        self.await_pool_reported(&name).await;
        Ok(name)
    }

    /// Waits until other nodes can know a pool here: the next command may go to one of them.
    async fn await_pool_reported(&self, pool: &PoolName) {
        if self.0.context.joined_cluster().is_none() {
            return;
        }
        let reported = async {
            loop {
                let reports = self.0.context.reports().await.unwrap_or_default();
                if reports
                    .get(&self.0.context.this_node())
                    .is_some_and(|r| r.pools.contains_key(pool))
                {
                    return;
                }
                tokio::time::sleep(REPORT_POLL).await;
            }
        };
        // On a timeout they learn it later.
        let _ = tokio::time::timeout(REPORT_TIMEOUT, reported).await;
    }
}

/// The pool that `which` names, by name or identity.
fn select_candidate<'a>(
    candidates: &'a [ImportCandidate],
    which: &str,
) -> Result<&'a ImportCandidate, ApiError> {
    let id = which.parse::<Uuid>().ok();
    let mut named = candidates.iter().filter(|s| Some(s.id) == id || s.name() == which);
    match (named.next(), named.next()) {
        (Some(candidate), None) => Ok(candidate),
        (Some(_), Some(_)) => Err(conflict(format!("several pools have the name {which}"))
            .with_hint("use its identity, as `windrose pool import` lists it")),
        (None, _) => {
            let message = format!("no disk of this node holds an unknown pool {which}");
            Err(ApiError::new(ErrorCode::NotFound, message).with_hint(
                "`windrose pool import` lists the pools that can be imported; for disks that are \
                 files, use --disk",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stray(id: u128, name: &str) -> ImportCandidate {
        let id = Uuid::from_u128(id);
        let seen = PoolDiskSeen {
            pool_id: id,
            name: name.into(),
            member: 0,
            serial: "S".into(),
            max_cores: 2,
        };
        ImportCandidate { id, disks: vec![("/dev/a".into(), seen)] }
    }

    #[test]
    fn a_pool_is_named_by_its_name_or_its_identity() {
        let strays = [stray(1, "tank"), stray(2, "zoo"), stray(3, "zoo")];
        assert_eq!(select_candidate(&strays, "tank").map(|s| s.id), Ok(Uuid::from_u128(1)));
        let id = Uuid::from_u128(3);
        assert_eq!(select_candidate(&strays, &id.to_string()).map(|s| s.id), Ok(id));
        assert!(
            select_candidate(&strays, "zoo")
                .map(|s| s.id)
                .unwrap_err()
                .message
                .contains("several pools")
        );
        assert_eq!(
            select_candidate(&strays, "none").map(|s| s.id).unwrap_err().code,
            ErrorCode::NotFound
        );
    }

    #[test]
    fn a_name_that_is_taken_or_is_none_is_told() {
        assert_eq!(stray(1, "tank").to_api(false).problem, None);
        assert!(stray(1, "tank").to_api(true).problem.unwrap().contains("--as NAME"));
        assert!(stray(1, "Tank!").to_api(false).problem.unwrap().contains("--as NAME"));
    }
}
