//! The node's membership in a cluster, as its data plane uses it.

use std::cell::Cell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::mirror_records::MirrorRecords;
use mirror::MirrorSettings;
use mirror::membership::{self, UnsafeLeaseSettings};
use peer::frame::HandshakeRefusal;
use peer::{IncomingConnection, NodeId, PeerAddresses, PeerIdentity, PeerSecret, Tls};
use tokio::sync::{Semaphore, mpsc};
use uuid::Uuid;

use super::EngineTask;
use crate::joined_cluster::JoinedCluster;

/// Most connections that are being refused at a time, because this node does not have the volume.
/// Further ones are closed without an answer.
const MAX_CONCURRENT_REFUSALS: usize = 64;

/// What the data plane needs to know of the cluster.
#[derive(Clone, Debug)]
pub struct ClusterContext {
    /// The cluster.
    pub cluster: Uuid,
    /// The secret that only its nodes know.
    pub secret: PeerSecret,
    /// This node's number.
    pub node: NodeId,
    /// TLS between nodes, in clusters that use it.
    pub tls: Option<Tls>,
    /// The records of mirrored volumes.
    pub mirrors: MirrorRecords,
    /// Timeouts and limits of mirrors.
    pub settings: MirrorSettings,
    /// Limits how many volumes are resynced from here at once.
    pub resync_permits: Arc<Semaphore>,
    /// Addresses where other nodes reach this one, for data and leases.
    pub listen: Vec<SocketAddr>,
    /// Addresses where they reach it for leases only.
    pub heartbeat: Vec<SocketAddr>,
}

impl ClusterContext {
    /// The context of a member that listens at these addresses and resyncs so many volumes at once.
    ///
    /// # Errors
    /// [`UnsafeLeaseSettings`]: the cluster's lease and grace time.
    pub fn new(
        membership: &JoinedCluster,
        at: PeerAddresses,
        resyncs: usize,
    ) -> Result<Self, UnsafeLeaseSettings> {
        let JoinedCluster { cluster, secret, node, tls, lease, grace, mirrors, .. } =
            membership.clone();
        let settings = MirrorSettings {
            leases: membership::LeaseSettings::new(lease, grace)?,
            // Longer than the grace time plus a change of the configuration.
            hold_timeout: grace + Duration::from_secs(2),
            ..MirrorSettings::default()
        };
        let PeerAddresses { data: listen, heartbeat } = at;
        let resync_permits = Arc::new(Semaphore::new(resyncs));
        Ok(Self {
            cluster,
            secret,
            node,
            tls,
            mirrors,
            settings,
            resync_permits,
            listen,
            heartbeat,
        })
    }

    /// The identity of the replica of `volume` on this node.
    pub(super) fn identity(&self, volume: Uuid) -> PeerIdentity {
        let identity = PeerIdentity::new(self.cluster, self.secret.clone(), self.node, volume);
        PeerIdentity { tls: self.tls.clone(), ..identity }
    }
}

/// Where an open volume is served.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoreAssignment {
    /// The core.
    pub(super) core: usize,
    /// The volume that owns its target.
    pub(super) target: Uuid,
}

/// The core of each open volume.
#[derive(Clone, Debug, Default)]
pub(super) struct CoreAssignments(Arc<Mutex<HashMap<Uuid, CoreAssignment>>>);

impl CoreAssignments {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, CoreAssignment>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Moves connections of other nodes to the cores of the volumes that they ask for.
pub(super) struct PeerRouter {
    core_assignments: CoreAssignments,
    core_queues: Vec<mpsc::Sender<EngineTask>>,
    refusals_in_progress: Rc<Cell<usize>>,
}

impl PeerRouter {
    pub(super) fn new(
        core_assignments: CoreAssignments,
        core_queues: Vec<mpsc::Sender<EngineTask>>,
    ) -> Self {
        Self { core_assignments, core_queues, refusals_in_progress: Rc::default() }
    }

    /// Moves one, or refuses it if no core has the volume.
    pub(super) fn route(&self, greeting: IncomingConnection) {
        let volume = greeting.volume();
        let core = self.core_assignments.lock().get(&volume).map(|assignment| assignment.core);
        let Some(queue) = core.and_then(|core| self.core_queues.get(core)) else {
            return refuse(&self.refusals_in_progress, greeting);
        };
        let greeting = match greeting.detach() {
            Ok(greeting) => greeting,
            Err(error) => {
                tracing::warn!(%volume, %error, "cannot move a peer connection to the volume's core");
                return;
            }
        };
        // If the core's queue is full, the other node dials again.
        if queue
            .try_send(Box::new(move |engine| engine.accept_peer_connection(volume, greeting)))
            .is_err()
        {
            tracing::debug!(%volume, "peer connection dropped: the volume's core is busy");
        }
    }
}

/// Answers that this node does not have the volume.
fn refuse(refusing: &Rc<Cell<usize>>, greeting: IncomingConnection) {
    if refusing.get() >= MAX_CONCURRENT_REFUSALS {
        return;
    }
    refusing.update(|n| n + 1);
    let refusing = Rc::clone(refusing);
    tokio::task::spawn_local(async move {
        greeting.refuse(HandshakeRefusal::UnknownVolume).await;
        refusing.update(|n| n - 1);
    });
}
