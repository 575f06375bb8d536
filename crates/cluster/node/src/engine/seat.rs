//! A node's place in a cluster, as its data plane has it.

use std::cell::Cell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::mirrors::Mirrors;
use mirror::Settings;
use mirror::member::{self, UnsafeSettings};
use peer::frame::Refusal;
use peer::{Greeting, Identity, NodeId, PeerAddresses, Secret, Tls};
use tokio::sync::{Semaphore, mpsc};
use uuid::Uuid;

use super::Work;
use crate::membership::Membership;

/// Connections that are being told at one time that nobody has what they ask for. Further ones are
/// closed and told nothing.
const REFUSING: usize = 64;

/// What makes a node one of a cluster.
#[derive(Clone, Debug)]
pub struct Seat {
    /// The cluster.
    pub cluster: Uuid,
    /// What its nodes know and nobody else.
    pub secret: Secret,
    /// This node's number.
    pub node: NodeId,
    /// TLS between nodes, in clusters that want it.
    pub tls: Option<Tls>,
    /// The records of mirrored volumes.
    pub mirrors: Mirrors,
    /// How long things may take.
    pub settings: Settings,
    /// So many volumes are brought up to date from here at once.
    pub turns: Arc<Semaphore>,
    /// Where other nodes reach this one, for data and leases.
    pub listen: Vec<SocketAddr>,
    /// Where they reach it for leases alone.
    pub heartbeat: Vec<SocketAddr>,
}

impl Seat {
    /// That of a member which listens at these addresses, and brings so many volumes up to date at once.
    ///
    /// # Errors
    /// [`UnsafeSettings`]: the cluster's lease and grace time.
    pub fn of(
        membership: &Membership,
        at: PeerAddresses,
        resyncs: usize,
    ) -> Result<Self, UnsafeSettings> {
        let Membership { cluster, secret, node, tls, lease, grace, mirrors, .. } =
            membership.clone();
        let settings = Settings {
            member: member::Settings::new(lease, grace)?,
            // More than the grace time and a change of the record take.
            hold: grace + Duration::from_secs(2),
            ..Settings::default()
        };
        let PeerAddresses { data: listen, heartbeat } = at;
        let turns = Arc::new(Semaphore::new(resyncs));
        Ok(Self { cluster, secret, node, tls, mirrors, settings, turns, listen, heartbeat })
    }

    /// Who the replica of `volume` on this node is.
    pub(super) fn identity(&self, volume: Uuid) -> Identity {
        let identity = Identity::new(self.cluster, self.secret.clone(), self.node, volume);
        Identity { tls: self.tls.clone(), ..identity }
    }
}

/// Where an open volume lives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Home {
    /// On which core.
    pub(super) core: usize,
    /// Behind the target of which volume.
    pub(super) target: Uuid,
}

/// On which core each open volume lives.
#[derive(Clone, Debug, Default)]
pub(super) struct Homes(Arc<Mutex<HashMap<Uuid, Home>>>);

impl Homes {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Home>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes connections of other nodes to the cores of the volumes that they ask for.
pub(super) struct Router {
    homes: Homes,
    keepers: Vec<mpsc::Sender<Work>>,
    refusing: Rc<Cell<usize>>,
}

impl Router {
    pub(super) fn new(homes: Homes, keepers: Vec<mpsc::Sender<Work>>) -> Self {
        Self { homes, keepers, refusing: Rc::default() }
    }

    /// Takes one there, or refuses it by name.
    pub(super) fn route(&self, greeting: Greeting) {
        let volume = greeting.volume();
        let core = self.homes.lock().get(&volume).map(|home| home.core);
        let Some(keeper) = core.and_then(|core| self.keepers.get(core)) else {
            return refuse(&self.refusing, greeting);
        };
        let greeting = match greeting.detach() {
            Ok(greeting) => greeting,
            Err(error) => {
                tracing::warn!(%volume, %error, "a connection of another node could not be moved");
                return;
            }
        };
        // A core that is this busy is asked again by whoever dials.
        if keeper.try_send(Box::new(move |keeper| keeper.greet(volume, greeting))).is_err() {
            tracing::debug!(%volume, "a connection of another node is dropped");
        }
    }
}

/// Says that nobody has the volume.
fn refuse(refusing: &Rc<Cell<usize>>, greeting: Greeting) {
    if refusing.get() >= REFUSING {
        return;
    }
    refusing.update(|n| n + 1);
    let refusing = Rc::clone(refusing);
    tokio::task::spawn_local(async move {
        greeting.refuse(Refusal::Volume).await;
        refusing.update(|n| n - 1);
    });
}
