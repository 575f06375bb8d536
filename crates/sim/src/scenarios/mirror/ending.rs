//! What is demanded when all faults are over.

use std::rc::Rc;
use std::time::Duration;

use layers::mirror::Mirror;
use rt::Core;
use volume::Volume;

use super::super::clients::{self, Client};
use super::{BYTES, Bench, DATA, Node};

/// Virtual time within which all must be well again.
const PATIENCE: Duration = Duration::from_secs(300);

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
            format!("{broken:?} {mirror:?}: {:#?}", mirror.as_ref().map(Mirror::status))
        };
        self.nodes.iter().map(state).collect::<Vec<_>>().join("; ")
    }

    /// The nodes that have a replica.
    fn replicas(&self) -> Vec<Rc<Node>> {
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
        // Marks go when nothing has been written for a while.
        tokio::time::sleep(Duration::from_secs(60)).await;
        self.equal()?;
        self.unmarked()
    }

    fn any_replica(&self) -> Rc<Node> {
        Rc::clone(self.world.rng().pick(&self.replicas()))
    }

    /// Has a client on `node` do some work.
    async fn at<F>(
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
        let work = node.host.run(move |_| async move { mirror.verify(false).await });
        let ended = self.within_patience("replicas are not compared", work.join()).await?;
        let verified = ended.ok_or("the host crashed by itself")?.map_err(|e| e.to_string())?;
        if verified.unreadable > 0 || !verified.differences.is_empty() {
            return Err(format!("without faults: {verified:?}"));
        }
        Ok(())
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
