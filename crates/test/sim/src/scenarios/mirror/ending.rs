//! What is demanded when all faults are over.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use block::{Error, Failure, Lba};
use mirror::{InFlight, Mirror};
use rt::Core;
use volume::Volume;

use super::super::clients::{self, Client};
use super::{BYTES, Bench, DATA, Node, wires};

/// Virtual time within which all must be well again.
const PATIENCE: Duration = Duration::from_secs(300);

/// Longest time that a write waits where leases get through and data do not.
const NO_DATA: Duration = Duration::from_secs(4);

/// Longest time that two members which do not reach each other hold up a flush.
const APART: Duration = Duration::from_secs(20);

/// Size of a region in bytes.
const REGION: u64 = 64 << 10;

impl Bench {
    /// Waits until all replicas are in sync and serve.
    pub(super) async fn in_sync(&self) -> Result<(), String> {
        let all = async {
            loop {
                self.pause(200).await;
                let record = self.store.record();
                let serves = |n: &Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::serves);
                let listed = self.nodes.iter().filter(|n| record.image(n.id).is_some());
                let whole = listed.clone().all(serves) && record.in_sync.len() == listed.count();
                if whole && !self.changing.get() {
                    return;
                }
                self.force();
            }
        };
        self.within_patience("not in sync", all).await
    }

    /// What `work` gives, if it ends in time and nothing else was wrong meanwhile.
    async fn within_patience<T>(
        &self,
        otherwise: &str,
        work: impl Future<Output = T>,
    ) -> Result<T, String> {
        let ended = tokio::time::timeout(PATIENCE, work).await;
        self.shared.verdict()?;
        ended.map_err(|_| {
            let (record, states) = (self.store.record(), self.states());
            format!("{otherwise} within {PATIENCE:?}: {record:?}; {states}")
        })
    }

    fn states(&self) -> String {
        let state = |n: &Rc<Node>| {
            let (mirror, broken) = (n.mirror.borrow(), n.broken.borrow());
            let volume = n.volume.borrow();
            let gate = volume.as_ref().and_then(|v| v.gate());
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

    /// No faults any more.
    pub(super) async fn last_round(&self) -> Result<(), String> {
        self.load.set(false);
        // Commands that were begun end.
        tokio::time::sleep(Duration::from_secs(20)).await;
        self.shared.verdict()?;
        for node in self.replicas() {
            let work = async |_, client: Client| client.mend().await;
            self.at(&node, "blocks are not mended", work).await?;
        }
        self.in_sync().await?;
        let node = self.any_replica();
        let shared = Rc::clone(&self.shared);
        let (core, volume) = opened(&node)?;
        let check = async move { clients::check(&core, &volume, &shared).await };
        let work = node.host.run(move |_| check);
        let ended = self.within_patience("a command does not end", work.join()).await?;
        ended.ok_or("the host crashed by itself")??;
        self.repair().await?;
        self.at_rest().await?;
        self.come_back().await?;
        self.come_back_older(self.world.rng().chance(0.5)).await?;
        self.fill_a_hole().await?;
        self.go_on_apart().await?;
        self.go_on_without_data().await?;
        self.at_rest().await
    }

    /// All replicas are in sync and equal, and no marks are left.
    pub(super) async fn settled(&self) -> Result<(), String> {
        self.in_sync().await?;
        self.verified().await?;
        // Marks go when nothing has been written for a while.
        tokio::time::sleep(Duration::from_secs(60)).await;
        self.equal()?;
        self.unmarked()
    }

    /// Nothing is left of what was done.
    async fn at_rest(&self) -> Result<(), String> {
        // Marks go when nothing has been written for a while.
        tokio::time::sleep(Duration::from_secs(60)).await;
        self.equal()?;
        self.unmarked()?;
        for node in self.replicas() {
            let mirror = node.mirror.borrow().clone().ok_or("it died")?;
            let (flight, resynced) = (mirror.in_flight(), mirror.resynced());
            if flight != InFlight::default() {
                return Err(format!("node {} rests with {flight:?}: {}", node.id, self.states()));
            }
            if resynced.copied > resynced.marked {
                return Err(format!("node {} has copied what was equal: {resynced:?}", node.id));
            }
            let usage = opened(&node)?.0.pool().usage();
            if usage.free != node.free.get() || usage.overdrafts > 0 {
                let before = node.free.get();
                return Err(format!("node {} keeps memory: {before} free, now {usage:?}", node.id));
            }
        }
        Ok(())
    }

    /// Ends a replica, and waits until others go on without it. `None` if there are none.
    pub(super) async fn without(
        &self,
        away: &Node,
        power: bool,
    ) -> Result<Option<Rc<Node>>, String> {
        let others = self.replicas().into_iter().find(|n| n.id != away.id);
        let Some(node) = others else { return Ok(None) };
        self.stop(away, power);
        let alone = async {
            while self.store.record().member(away.id).is_some()
                || !node.mirror.borrow().as_ref().is_some_and(Mirror::serves)
            {
                self.pause(200).await;
            }
        };
        self.within_patience("nobody goes on", alone).await?;
        Ok(Some(node))
    }

    /// Who was away for a while gets what was written meanwhile, and no more.
    async fn come_back(&self) -> Result<(), String> {
        let (away, copied) = (self.any_replica(), || {
            let nodes =
                self.nodes.iter().filter_map(|n| Some(n.mirror.borrow().as_ref()?.resynced()));
            nodes.map(|r| r.copied).sum::<u64>()
        });
        // With its power it loses that marks were taken which nobody needs any more.
        let killed = !away.is_tainted();
        let Some(node) = self.without(&away, !killed).await? else { return Ok(()) };
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
        self.at(&node, "a block is not written", write).await?;
        self.start(&away);
        self.in_sync().await?;
        let (copied, written) = (copied() - before, regions.len() as u64 * REGION);
        if copied < written || killed && copied > written {
            return Err(format!("{copied} bytes were copied to node {}, not {written}", away.id));
        }
        Ok(())
    }

    /// What nobody can read is an error to clients, and one that has come back is in sync when it has been
    /// written.
    async fn fill_a_hole(&self) -> Result<(), String> {
        let (away, rng) = (self.any_replica(), self.world.rng());
        let Some(node) = self.without(&away, false).await? else { return Ok(()) };
        let in_region = REGION / u64::from(self.block_size);
        let block = rng.between(1, BYTES / u64::from(self.block_size) / in_region - 1) * in_region;
        let marks = async move |_, client: Client| client.write_block(block + 1).await;
        self.at(&node, "a block is not written", marks).await?;
        for other in self.replicas().iter().filter(|n| n.id != away.id) {
            self.spoil_block(&other.disk().ok_or("its disk is gone")?, block);
        }
        self.start(&away);
        tokio::time::sleep(Duration::from_secs(20)).await;
        let read = async move |_, client: Client| client.read_block(block).await;
        let found = self.at(&node, "a hole is not read", read).await?;
        if found != Err(Failure::Device(Error::Unreadable { at: Lba(block) })) {
            return Err(format!("block {block}, which nobody has: {found:?}"));
        }
        if self.store.record().member(away.id).is_some() {
            return Err(format!("node {} is in sync without block {block}", away.id));
        }
        let write = async move |_, client: Client| client.write_block(block).await;
        self.at(&node, "a hole is not written", write).await?;
        let filled = tokio::time::timeout(Duration::from_secs(30), self.in_sync()).await;
        filled.map_err(|_| format!("not in sync though written: {}", self.states()))?
    }

    /// Two that reach the primary, and not each other, hold up nobody for long.
    async fn go_on_apart(&self) -> Result<(), String> {
        let primary = self.store.record().primary;
        let others: Vec<_> = self.replicas().into_iter().filter(|n| n.id != primary).collect();
        let [a, b] = &others[..] else { return Ok(()) };
        self.world.note(format!("nodes {} and {} are apart", a.id, b.id));
        wires::part(&self.apart, a.id, b.id, true);
        if let Some(mirror) = &*b.mirror.borrow() {
            mirror.break_link(a.id);
        }
        let flush = async move |_, client: Client| client.flush().await;
        let flushed = tokio::time::timeout(APART, self.at(a, "no flush", flush)).await;
        flushed.map_err(|_| format!("no flush within {APART:?}: {}", self.states()))??;
        self.pause(20_000).await;
        wires::part(&self.apart, a.id, b.id, false);
        self.in_sync().await
    }

    /// Leases get through between two, and data do not: writes do not wait until leases are over.
    async fn go_on_without_data(&self) -> Result<(), String> {
        let primary = self.store.record().primary;
        let (of, others): (Vec<_>, Vec<_>) =
            self.replicas().into_iter().partition(|n| n.id == primary);
        let ([primary], [other, ..]) = (&of[..], &others[..]) else { return Ok(()) };
        let both_ways = self.world.rng().chance(0.7);
        self.store.set_prompt(true);
        self.cut_data(primary, other, true);
        self.cut_data(other, primary, both_ways);
        let write = async move |_, client: Client| client.write_block(0).await;
        let written = self.at(primary, "no write", write);
        let written = tokio::time::timeout(NO_DATA, written).await;
        written.map_err(|_| format!("no write within {NO_DATA:?}: {}", self.states()))??;
        self.store.set_prompt(false);
        self.pause(5_000).await;
        self.cut_data(primary, other, false);
        self.cut_data(other, primary, false);
        self.in_sync().await
    }

    fn any_replica(&self) -> Rc<Node> {
        Rc::clone(self.world.rng().pick(&self.replicas()))
    }

    /// Has a client on `node` do some work.
    pub(super) async fn at<F>(
        &self,
        node: &Node,
        otherwise: &str,
        work: impl FnOnce(Core, Client) -> F,
    ) -> Result<F::Output, String>
    where
        F: Future + 'static,
    {
        let (core, volume) = opened(node)?;
        let work = work(core.clone(), Client::new(&core, &volume, &self.shared));
        let work = node.host.run(move |_| work);
        let ended = self.within_patience(otherwise, work.join()).await?;
        ended.ok_or_else(|| "the host crashed by itself".into())
    }

    /// What one disk cannot read any more is read from another, and written again.
    async fn repair(&self) -> Result<(), String> {
        self.verified().await?;
        let (node, rng) = (self.any_replica(), self.world.rng());
        if self.replicas().len() == 1 {
            return Ok(());
        }
        let block = rng.between(1, BYTES / u64::from(self.block_size) - 1);
        let disk = node.disk().ok_or("its disk is gone")?;
        self.spoil_block(&disk, block);
        let read = async move |_, client: Client| client.read_block(block).await;
        self.at(&node, "a bad block is not read", read).await?.map_err(|e| {
            format!("block {block} of node {} is not read from another: {e}", node.id)
        })?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        self.verified().await
    }

    /// All replicas can be read, and are equal.
    async fn verified(&self) -> Result<(), String> {
        let primary = self.store.record().primary;
        let node = self.nodes.iter().find(|n| n.id == primary).ok_or("a strange primary")?;
        let mirror = node.mirror.borrow().clone().ok_or("it died")?;
        let work = node.host.run(move |_| async move { mirror.verify(None).await });
        let ended = self.within_patience("replicas are not compared", work.join()).await?;
        let verified = ended.ok_or("the host crashed by itself")?.map_err(|e| e.to_string())?;
        if verified.unreadable > 0 || !verified.differences.is_empty() {
            return Err(format!("without faults: {verified:?}"));
        }
        Ok(())
    }

    /// All replicas are equal, also what no client has read.
    pub(super) async fn equal_now(&self) -> Result<(), String> {
        self.verified().await
    }

    fn equal(&self) -> Result<(), String> {
        let len = usize::try_from(BYTES).expect("small");
        let replicas = self.replicas();
        let contents: Vec<_> =
            replicas.iter().map(|n| n.disk().map(|d| d.peek(DATA, len))).collect();
        match contents.iter().position(|c| *c != contents[0]) {
            None => Ok(()),
            Some(i) => {
                Err(format!("nodes {} and {} differ at rest", replicas[0].id, replicas[i].id))
            }
        }
    }

    fn unmarked(&self) -> Result<(), String> {
        for node in self.replicas() {
            let status = node.status().ok_or("it died")?;
            if status.marked.iter().any(|(_, n)| *n > 0) {
                return Err(format!("marks are left at rest: node {}: {status:?}", node.id));
            }
        }
        Ok(())
    }
}

/// What clients on `node` use.
fn opened(node: &Node) -> Result<(Core, Rc<Volume>), String> {
    let (core, volume) = (node.core.borrow().clone(), node.volume.borrow().clone());
    core.zip(volume).ok_or_else(|| "it died".into())
}
