//! What must hold once all faults are over.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use block::{Error, Lba, RequestError};
use mirror::{InFlightCounts, Mirror};
use rt::Core;
use volume::Volume;

use super::super::clients::{self, Client};
use super::{BYTES, DATA, MirrorTestbed, Node, peer_network};

/// Virtual time limit for complete recovery.
const RECOVERY_LIMIT: Duration = Duration::from_secs(300);

/// Longest time a write may wait while leases pass between two nodes and data does not.
const WRITE_LIMIT_WITHOUT_DATA_LINK: Duration = Duration::from_secs(4);

/// Longest time that two members which cannot reach each other may delay a flush.
const FLUSH_LIMIT_WHEN_PARTITIONED: Duration = Duration::from_secs(20);

/// Size of a region in bytes.
const REGION: u64 = 64 << 10;

impl MirrorTestbed {
    /// Waits until all replicas are in sync and serving.
    pub(super) async fn wait_in_sync(&self) -> Result<(), String> {
        let all = async {
            loop {
                self.pause(200).await;
                let record = self.store.record();
                let serves =
                    |n: &Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::is_serving);
                let listed = self.nodes.iter().filter(|n| record.image(n.id).is_some());
                let whole = listed.clone().all(serves) && record.in_sync.len() == listed.count();
                if whole && !self.is_changing_replicas.get() {
                    return;
                }
                self.force_primary();
            }
        };
        self.within_limit("not in sync", all).await
    }

    /// Runs `work`; fails if it exceeds the time limit or if another check fails meanwhile.
    async fn within_limit<T>(
        &self,
        otherwise: &str,
        work: impl Future<Output = T>,
    ) -> Result<T, String> {
        let ended = tokio::time::timeout(RECOVERY_LIMIT, work).await;
        self.shared.first_violation()?;
        ended.map_err(|_| {
            let (record, states) = (self.store.record(), self.states());
            format!("{otherwise} within {RECOVERY_LIMIT:?}: {record:?}; {states}")
        })
    }

    fn states(&self) -> String {
        let state = |n: &Rc<Node>| {
            let (mirror, broken) = (n.mirror.borrow(), n.open_error.borrow());
            let volume = n.volume.borrow();
            let gate = volume.as_ref().and_then(|v| v.reservation_gate());
            let status = mirror.as_ref().map(Mirror::status);
            format!("{broken:?} {mirror:?}: {gate:?} {status:#?}")
        };
        self.nodes.iter().map(state).collect::<Vec<_>>().join("; ")
    }

    /// The nodes that have a replica.
    pub(super) fn replicas(&self) -> Vec<Rc<Node>> {
        let record = self.store.record();
        self.nodes.iter().filter(|n| record.image(n.id).is_some()).cloned().collect()
    }

    /// Turns all faults off.
    pub(super) async fn last_round(&self) -> Result<(), String> {
        self.load_enabled.set(false);
        // Let the commands in flight finish.
        tokio::time::sleep(Duration::from_secs(20)).await;
        self.shared.first_violation()?;
        for node in self.replicas() {
            let work = async |_, client: Client| client.rewrite_unreadable().await;
            self.run_client_on(&node, "blocks are not repaired", work).await?;
        }
        self.wait_in_sync().await?;
        let node = self.any_replica();
        let shared = Rc::clone(&self.shared);
        let (core, volume) = open_volume_of(&node)?;
        let check = async move { clients::check(&core, &volume, &shared).await };
        let work = node.host.run(move |_| check);
        let ended = self.within_limit("a command does not end", work.join()).await?;
        ended.ok_or("the host crashed by itself")??;
        self.check_read_repair().await?;
        self.check_at_rest().await?;
        self.check_rejoin().await?;
        self.check_rolled_back_rejoin(self.world.rng().chance(0.5)).await?;
        self.check_unreadable_resync().await?;
        self.check_partitioned_backups().await?;
        self.check_data_link_loss().await?;
        self.check_at_rest().await
    }

    /// All replicas are in sync and equal, and no dirty marks are left.
    pub(super) async fn check_converged(&self) -> Result<(), String> {
        self.wait_in_sync().await?;
        self.check_verify().await?;
        // Marks are cleared once writes have stopped for a while.
        tokio::time::sleep(Duration::from_secs(60)).await;
        self.check_contents_equal()?;
        self.check_no_marks()
    }

    /// No state of past operations is left.
    async fn check_at_rest(&self) -> Result<(), String> {
        // Marks are cleared once writes have stopped for a while.
        tokio::time::sleep(Duration::from_secs(60)).await;
        self.check_contents_equal()?;
        self.check_no_marks()?;
        for node in self.replicas() {
            let mirror = node.mirror.borrow().clone().ok_or("it died")?;
            let (flight, resynced) = (mirror.in_flight_counts(), mirror.resync_totals());
            if flight != InFlightCounts::default() {
                return Err(format!("node {} is idle with {flight:?}: {}", node.id, self.states()));
            }
            if resynced.copied_bytes > resynced.dirty_bytes {
                return Err(format!("node {} copied equal regions: {resynced:?}", node.id));
            }
            let usage = open_volume_of(&node)?.0.buffer_pool().usage();
            if usage.free != node.free_memory.get() || usage.overdrafts > 0 {
                let before = node.free_memory.get();
                return Err(format!("node {} keeps memory: {before} free, now {usage:?}", node.id));
            }
        }
        Ok(())
    }

    /// Stops a replica and waits until the others continue without it. `None` if there are no
    /// others.
    pub(super) async fn stop_and_wait_removed(
        &self,
        away: &Node,
        power: bool,
    ) -> Result<Option<Rc<Node>>, String> {
        let others = self.replicas().into_iter().find(|n| n.id != away.id);
        let Some(node) = others else { return Ok(None) };
        self.stop(away, power);
        let alone = async {
            while self.store.record().member(away.id).is_some()
                || !node.mirror.borrow().as_ref().is_some_and(Mirror::is_serving)
            {
                self.pause(200).await;
            }
        };
        self.within_limit("no replica continues", alone).await?;
        Ok(Some(node))
    }

    /// A replica that was down for a while is sent what was written meanwhile, and no more.
    async fn check_rejoin(&self) -> Result<(), String> {
        let (away, copied) = (self.any_replica(), || {
            let nodes =
                self.nodes.iter().filter_map(|n| Some(n.mirror.borrow().as_ref()?.resync_totals()));
            nodes.map(|r| r.copied_bytes).sum::<u64>()
        });
        // A power loss also loses the fact that unneeded marks were cleared.
        let killed = !away.is_tainted();
        let Some(node) = self.stop_and_wait_removed(&away, !killed).await? else { return Ok(()) };
        let (rng, before) = (self.world.rng(), copied());
        let blocks: Vec<_> = (0..rng.between(1, 3))
            .map(|_| rng.between(1, BYTES / u64::from(self.block_size) - 1))
            .collect();
        let regions: BTreeSet<_> =
            blocks.iter().map(|b| b * u64::from(self.block_size) / REGION).collect();
        let write = async move |_, client: Client| {
            for block in blocks {
                client.write_block(block).await;
            }
        };
        self.run_client_on(&node, "a block is not written", write).await?;
        self.start(&away);
        self.wait_in_sync().await?;
        let (copied, written) = (copied() - before, regions.len() as u64 * REGION);
        if copied < written || killed && copied > written {
            return Err(format!("{copied} bytes were copied to node {}, not {written}", away.id));
        }
        Ok(())
    }

    /// A block that no replica can read is an error to clients. A replica that rejoins is in sync
    /// once the block has been written.
    async fn check_unreadable_resync(&self) -> Result<(), String> {
        let (away, rng) = (self.any_replica(), self.world.rng());
        let Some(node) = self.stop_and_wait_removed(&away, false).await? else { return Ok(()) };
        let in_region = REGION / u64::from(self.block_size);
        let block = rng.between(1, BYTES / u64::from(self.block_size) / in_region - 1) * in_region;
        let marks = async move |_, client: Client| client.write_block(block + 1).await;
        self.run_client_on(&node, "a block is not written", marks).await?;
        for other in self.replicas().iter().filter(|n| n.id != away.id) {
            self.make_block_unreadable(&other.disk().ok_or("its disk is gone")?, block);
        }
        self.start(&away);
        tokio::time::sleep(Duration::from_secs(20)).await;
        let read = async move |_, client: Client| client.read_block(block).await;
        let found = self.run_client_on(&node, "a hole is not read", read).await?;
        if found != Err(RequestError::Device(Error::Unreadable { at: Lba(block) })) {
            return Err(format!("block {block}, which no replica has: {found:?}"));
        }
        if self.store.record().member(away.id).is_some() {
            return Err(format!("node {} is in sync without block {block}", away.id));
        }
        let write = async move |_, client: Client| client.write_block(block).await;
        self.run_client_on(&node, "a hole is not written", write).await?;
        let filled = tokio::time::timeout(Duration::from_secs(30), self.wait_in_sync()).await;
        filled.map_err(|_| format!("not in sync though written: {}", self.states()))?
    }

    /// Two replicas that reach the primary but not each other do not delay clients for long.
    async fn check_partitioned_backups(&self) -> Result<(), String> {
        let primary = self.store.record().primary;
        let others: Vec<_> = self.replicas().into_iter().filter(|n| n.id != primary).collect();
        let [a, b] = &others[..] else { return Ok(()) };
        self.world.note(format!("nodes {} and {} are disconnected", a.id, b.id));
        peer_network::set_data_partition(&self.data_partitions, a.id, b.id, true);
        if let Some(mirror) = &*b.mirror.borrow() {
            mirror.close_session(a.id);
        }
        let flush = async move |_, client: Client| client.flush().await;
        let flushed = tokio::time::timeout(
            FLUSH_LIMIT_WHEN_PARTITIONED,
            self.run_client_on(a, "no flush", flush),
        )
        .await;
        flushed.map_err(|_| {
            format!("no flush within {FLUSH_LIMIT_WHEN_PARTITIONED:?}: {}", self.states())
        })??;
        self.pause(20_000).await;
        peer_network::set_data_partition(&self.data_partitions, a.id, b.id, false);
        self.wait_in_sync().await
    }

    /// Leases pass between two nodes and data does not: writes must not wait for leases to expire.
    async fn check_data_link_loss(&self) -> Result<(), String> {
        let primary = self.store.record().primary;
        let (of, others): (Vec<_>, Vec<_>) =
            self.replicas().into_iter().partition(|n| n.id == primary);
        let ([primary], [other, ..]) = (&of[..], &others[..]) else { return Ok(()) };
        let both_ways = self.world.rng().chance(0.7);
        self.store.set_prompt(true);
        self.cut_data(primary, other, true);
        self.cut_data(other, primary, both_ways);
        let write = async move |_, client: Client| client.write_block(0).await;
        let written = self.run_client_on(primary, "no write", write);
        let written = tokio::time::timeout(WRITE_LIMIT_WITHOUT_DATA_LINK, written).await;
        written.map_err(|_| {
            format!("no write within {WRITE_LIMIT_WITHOUT_DATA_LINK:?}: {}", self.states())
        })??;
        self.store.set_prompt(false);
        self.pause(5_000).await;
        self.cut_data(primary, other, false);
        self.cut_data(other, primary, false);
        self.wait_in_sync().await
    }

    fn any_replica(&self) -> Rc<Node> {
        Rc::clone(self.world.rng().pick(&self.replicas()))
    }

    /// Runs `work` on a client on `node`.
    pub(super) async fn run_client_on<F>(
        &self,
        node: &Node,
        otherwise: &str,
        work: impl FnOnce(Core, Client) -> F,
    ) -> Result<F::Output, String>
    where
        F: Future + 'static,
    {
        let (core, volume) = open_volume_of(node)?;
        let work = work(core.clone(), Client::new(&core, &volume, &self.shared));
        let work = node.host.run(move |_| work);
        let ended = self.within_limit(otherwise, work.join()).await?;
        ended.ok_or_else(|| "the host crashed by itself".into())
    }

    /// A block that one disk cannot read is read from another replica and rewritten.
    async fn check_read_repair(&self) -> Result<(), String> {
        self.check_verify().await?;
        let (node, rng) = (self.any_replica(), self.world.rng());
        if self.replicas().len() == 1 {
            return Ok(());
        }
        let block = rng.between(1, BYTES / u64::from(self.block_size) - 1);
        let disk = node.disk().ok_or("its disk is gone")?;
        self.make_block_unreadable(&disk, block);
        let read = async move |_, client: Client| client.read_block(block).await;
        self.run_client_on(&node, "a bad block is not read", read).await?.map_err(|e| {
            format!("block {block} of node {} is not read from another: {e}", node.id)
        })?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        self.check_verify().await
    }

    /// All replicas are readable and equal.
    async fn check_verify(&self) -> Result<(), String> {
        let primary = self.store.record().primary;
        let node = self.nodes.iter().find(|n| n.id == primary).ok_or("an unexpected primary")?;
        let mirror = node.mirror.borrow().clone().ok_or("it died")?;
        let work = node.host.run(move |_| async move { mirror.verify(None).await });
        let ended = self.within_limit("replicas are not compared", work.join()).await?;
        let verified = ended.ok_or("the host crashed by itself")?.map_err(|e| e.to_string())?;
        if verified.unreadable_ranges > 0 || !verified.mismatches.is_empty() {
            return Err(format!("without faults: {verified:?}"));
        }
        Ok(())
    }

    /// All replicas are equal, including blocks that no client has read.
    pub(super) async fn check_equal_now(&self) -> Result<(), String> {
        self.check_verify().await
    }

    fn check_contents_equal(&self) -> Result<(), String> {
        let len = usize::try_from(BYTES).expect("small");
        let replicas = self.replicas();
        let contents: Vec<_> =
            replicas.iter().map(|n| n.disk().map(|d| d.read_visible(DATA, len))).collect();
        match contents.iter().position(|c| *c != contents[0]) {
            None => Ok(()),
            Some(i) => Err(format!(
                "nodes {} and {} differ on an idle volume",
                replicas[0].id, replicas[i].id
            )),
        }
    }

    fn check_no_marks(&self) -> Result<(), String> {
        for node in self.replicas() {
            let status = node.status().ok_or("it died")?;
            if status.dirty_regions.iter().any(|(_, n)| *n > 0) {
                return Err(format!(
                    "dirty bits are left on an idle volume: node {}: {status:?}",
                    node.id
                ));
            }
        }
        Ok(())
    }
}

/// The volume that clients on `node` use.
fn open_volume_of(node: &Node) -> Result<(Core, Rc<Volume>), String> {
    let (core, volume) = (node.core.borrow().clone(), node.volume.borrow().clone());
    core.zip(volume).ok_or_else(|| "it died".into())
}
