//! Virtual machines on this machine: a vhost-user socket for each volume exported to them (RFD
//! 0023, 9).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use api::VolumeName;
use attach::vhost_user::{MAX_QUEUES, Options, OutagePolicy, Server};
use block::AccessState;
use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, Shared, join_all};
use rt::Core;
use rt::net::Listener;
use tokio::sync::oneshot;
use uuid::Uuid;
use volume::Volume;

use config::data_dir;

/// Mode of a socket: its owner and group may use it.
const SOCKET_MODE: u32 = 0o660;

/// Mode of a socket directory that the node creates.
const DIRECTORY_MODE: u32 = 0o750;

/// Pause before listening at a socket is tried again.
const LISTEN_RETRY_PAUSE: Duration = Duration::from_secs(5);

/// The volumes that are exported to virtual machines, with their names.
pub type ExportedVolumes = BTreeMap<Uuid, VolumeName>;

/// Where the socket of a volume is.
#[must_use]
pub fn socket_path(directory: &Path, name: &VolumeName) -> PathBuf {
    directory.join(format!("{name}.sock"))
}

/// A virtual machine that uses a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestReport {
    /// Which volume.
    pub volume: Uuid,
    /// By which socket.
    pub socket: PathBuf,
    /// For how long.
    pub age: Duration,
}

/// The vhost-user endpoints of one core's volumes.
pub(super) struct Guests {
    core: Core,
    directory: Option<PathBuf>,
    endpoints: RefCell<BTreeMap<Uuid, GuestEndpoint>>,
}

/// What an endpoint needs of a volume.
pub(super) struct GuestVolume {
    pub(super) volume: Rc<Volume>,
    /// Its access state through this node, if it is mirrored.
    pub(super) access: Option<AccessState>,
}

/// A volume's endpoint.
struct GuestEndpoint {
    socket: PathBuf,
    server: Rc<Server>,
    /// Dropping it ends the endpoint.
    stop: Option<oneshot::Sender<()>>,
    ended: EndedFuture,
}

/// Completes when an endpoint, and every earlier one at its socket, has ended.
type EndedFuture = Shared<LocalBoxFuture<'static, ()>>;

impl Guests {
    pub(super) fn new(core: Core, directory: Option<PathBuf>) -> Self {
        Self { core, directory, endpoints: RefCell::default() }
    }

    /// Serves these volumes and no others.
    pub(super) fn serve(&self, offers: impl Iterator<Item = (Uuid, VolumeName, GuestVolume)>) {
        let Some(directory) = &self.directory else { return };
        let mut served = Vec::new();
        for (id, name, offer) in offers {
            served.push(id);
            let mut endpoints = self.endpoints.borrow_mut();
            if endpoints.get(&id).is_none_or(|endpoint| endpoint.stop.is_none()) {
                let before = endpoints.remove(&id).map(|endpoint| endpoint.ended);
                endpoints.insert(
                    id,
                    self.open_endpoint(id, socket_path(directory, &name), offer, before),
                );
            }
        }
        for (id, endpoint) in self.endpoints.borrow_mut().iter_mut() {
            if !served.contains(id) {
                endpoint.stop.take();
            }
        }
    }

    /// Opens a volume's endpoint, after `before`, the previous one, has ended.
    fn open_endpoint(
        &self,
        id: Uuid,
        at: PathBuf,
        offer: GuestVolume,
        before: Option<EndedFuture>,
    ) -> GuestEndpoint {
        let serial = id.simple().to_string();
        let options = Options { queues: MAX_QUEUES, read_only: false, serial };
        let outage = offer.access.map_or(OutagePolicy::Fail, OutagePolicy::Wait);
        let server = Rc::new(Server::new(&self.core, offer.volume, outage, &options));
        let (stop, stopped) = oneshot::channel();
        let (core, serving, path) = (self.core.clone(), Rc::clone(&server), at.clone());
        let task = tokio::task::spawn_local(async move {
            if let Some(before) = before {
                before.await;
            }
            let stop = async { drop(stopped.await) }.shared();
            if let Some(listener) = listen_with_retry(&core, &path, stop.clone()).await {
                tracing::info!(at = %path.display(), "serving a volume over vhost-user");
                serving.serve(&listener, stop).await;
            }
        });
        let ended = task.map(|ended| {
            if ended.is_err() {
                tracing::error!("vhost-user server panicked");
            }
        });
        GuestEndpoint { socket: at, server, stop: Some(stop), ended: ended.boxed_local().shared() }
    }

    /// Closes the endpoint of a volume, after answering its requests.
    pub(super) async fn close_endpoint(&self, id: Uuid) {
        let ended = self.endpoints.borrow_mut().get_mut(&id).map(|endpoint| {
            endpoint.stop.take();
            endpoint.ended.clone()
        });
        if let Some(ended) = ended {
            ended.await;
            self.endpoints
                .borrow_mut()
                .retain(|_, endpoint| endpoint.stop.is_some() || !has_ended(endpoint));
        }
    }

    /// Closes all endpoints.
    pub(super) async fn close_all(&self) {
        let all: Vec<_> = self.endpoints.borrow().keys().copied().collect();
        join_all(all.into_iter().map(|id| self.close_endpoint(id))).await;
    }

    pub(super) fn report(&self) -> Vec<GuestReport> {
        let endpoints = self.endpoints.borrow();
        let guest = |(id, endpoint): (&Uuid, &GuestEndpoint)| {
            let age = endpoint.server.connected_for()?;
            Some(GuestReport { volume: *id, socket: endpoint.socket.clone(), age })
        };
        endpoints.iter().filter_map(guest).collect()
    }
}

fn has_ended(endpoint: &GuestEndpoint) -> bool {
    endpoint.ended.peek().is_some()
}

/// Listens at `at`, and retries until that succeeds or `stop` completes.
async fn listen_with_retry(
    core: &Core,
    at: &Path,
    stop: impl Future<Output = ()>,
) -> Option<Listener> {
    let mut stop = std::pin::pin!(stop);
    let mut logged = None;
    loop {
        let why = match try_listen(core, at).await {
            Ok(listener) => return Some(listener),
            Err(e) => e.to_string(),
        };
        if logged.as_ref() != Some(&why) {
            let at = at.display();
            tracing::error!(%at, why, "cannot listen on the vhost-user socket; retrying");
            logged = Some(why);
        }
        tokio::select! {
            biased;
            () = &mut stop => return None,
            () = tokio::time::sleep(LISTEN_RETRY_PAUSE) => {}
        }
    }
}

async fn try_listen(core: &Core, at: &Path) -> io::Result<Listener> {
    if let Some(directory) = at.parent() {
        data_dir::create_dir_with_mode(directory, DIRECTORY_MODE)?;
    }
    core.listen_unix_for(at, SOCKET_MODE).await
}
