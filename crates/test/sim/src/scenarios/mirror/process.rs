//! What runs on a node: its process, with the replica and the node's clients.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::CrashKind;
use mirror::Mistake;
use peer::NodeId;
use rt::Core;
use rt::sim::World;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::incarnations::IncarnationStore;
use super::peer_network::{self, DataPartitions, NodeAddresses, Ports};
use super::store::{Client, RecordWriter, Store};
use super::{
    ClientState, ExportVolume, Image, MirrorTestbed, Node, open_mirror, serve_replica,
    spawn_clients,
};

/// Request to stop a process that is no longer its node.
pub(super) struct StopRequest {
    node: Rc<Node>,
    incarnation: Uuid,
    /// The process never was the node: an operator has to decide which of the two continues.
    is_copy: bool,
}

/// The software of a node.
#[derive(Clone)]
struct Process {
    world: World,
    node: Rc<Node>,
    image: Image,
    store: Rc<Store>,
    incarnations: Option<Rc<IncarnationStore>>,
    stop_requests: mpsc::UnboundedSender<StopRequest>,
    mistake: Mistake,
    addresses: Rc<NodeAddresses>,
    ports: Ports,
    data_partitions: DataPartitions,
    shared: Rc<ClientState>,
    intact_nodes: Rc<RefCell<BTreeSet<NodeId>>>,
    load_enabled: Rc<Cell<bool>>,
    export: Option<ExportVolume>,
}

impl Process {
    async fn run(self, core: Core) -> Result<(), String> {
        if !self.become_node(&core).await {
            return std::future::pending().await;
        }
        let node = &self.node;
        let (caller, incarnation, incarnations) =
            (node.caller(), node.incarnation.get(), self.incarnations.clone());
        let store = Rc::clone(&self.store);
        let records = Client { store, sender: RecordWriter { caller, incarnation, incarnations } };
        match open_mirror(&core, node, self.image, records, self.mistake).await {
            Ok((mirror, gate)) => {
                let addresses = (Rc::clone(&self.addresses), self.ports);
                let (partitions, store) =
                    (Rc::clone(&self.data_partitions), Rc::clone(&self.store));
                peer_network::connect_peers(&core, node.id, &mirror, addresses, partitions, store)
                    .await?;
                let volume = serve_replica(&core, node, mirror, gate);
                match &self.export {
                    Some(offer) => offer(&core, node.id, &volume),
                    None => spawn_clients(&core, node, &volume, &self.shared, &self.load_enabled),
                }
            }
            // The service manager restarts it.
            Err(e) => {
                self.world.note(format!("node {} does not open its image: {e}", node.id));
                node.open_error.replace(Some(e));
            }
        }
        std::future::pending().await
    }

    /// Whether this process is the node; once true, it stays true until another process becomes the
    /// node.
    async fn become_node(&self, core: &Core) -> bool {
        let node = &self.node;
        if let Some(registry) = &self.incarnations {
            let claimed = Rc::clone(registry).claim(core, node).await;
            let (incarnation, is_copy) = (node.incarnation.get(), claimed.is_none());
            let request = StopRequest { node: Rc::clone(node), incarnation, is_copy };
            let Some(held) = claimed else {
                let _ = self.stop_requests.send(request);
                return false;
            };
            let tell = self.stop_requests.clone();
            tokio::task::spawn_local(async move {
                held.wait_replaced().await;
                let _ = tell.send(request);
            });
        }
        if node.is_clone {
            self.replace_original();
        }
        self.addresses.set(node.id, node.host.address());
        true
    }

    /// The contents of the first machine's disk no longer belong to the node.
    fn replace_original(&self) {
        self.world.note(format!("a clone is node {}", self.node.id));
        let mut intact = self.intact_nodes.borrow_mut();
        if intact.remove(&self.node.id) && intact.is_empty() {
            self.shared.crash(CrashKind::PowerLoss);
        }
    }
}

impl MirrorTestbed {
    /// Starts a node that has an image, unless it already runs or another process is the node.
    pub(super) fn start(&self, node: &Rc<Node>) {
        let down = !node.host.is_running() && !node.is_stopped_as_clone.get();
        let Some(image) = node.image.get().filter(|_| down) else { return };
        let process = Process {
            world: self.world.clone(),
            node: Rc::clone(node),
            image,
            store: Rc::clone(&self.store),
            incarnations: self.incarnations.clone(),
            stop_requests: self.stop_requests.clone(),
            mistake: self.mistake,
            addresses: Rc::clone(&self.addresses),
            ports: self.ports,
            data_partitions: Rc::clone(&self.data_partitions),
            shared: Rc::clone(&self.shared),
            intact_nodes: Rc::clone(&self.intact_nodes),
            load_enabled: Rc::clone(&self.load_enabled),
            export: self.export.clone(),
        };
        node.host.start(move |core| process.clone().run(core));
    }

    /// Stops processes that are not their node. The service manager restarts them, except one that
    /// was told it is a copy.
    pub(super) async fn stop_replaced_processes(
        self: Rc<Self>,
        mut ends: mpsc::UnboundedReceiver<StopRequest>,
    ) {
        while let Some(StopRequest { node, incarnation, is_copy }) = ends.recv().await {
            if node.incarnation.get() != incarnation {
                continue;
            }
            self.world.note(format!("{}: another process is node {}", node.host.name(), node.id));
            node.is_stopped_as_clone.set(is_copy);
            self.stop(&node, false);
            let this = Rc::clone(&self);
            tokio::task::spawn_local(async move {
                tokio::time::sleep(Duration::from_secs(2)).await;
                this.start(&node);
            });
        }
    }
}
