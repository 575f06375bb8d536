//! Virtual machines beside the node: a socket for each volume that is exported to them (RFD 0023, 9).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use api::VolumeName;
use attach::vhost_user::{MAX_RINGS, Options, Outage, Server};
use block::AccessState;
use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, Shared, join_all};
use rt::Core;
use rt::net::Listener;
use tokio::sync::oneshot;
use uuid::Uuid;
use volume::Volume;

use crate::data_dir;

/// Who may use a socket: its owner and group.
const SOCKET_MODE: u32 = 0o660;

/// Who may look for sockets, in a directory that the node has made.
const DIRECTORY_MODE: u32 = 0o750;

/// Pause before a socket that could not be had is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// The volumes that are exported to virtual machines, with their names.
pub type Exported = BTreeMap<Uuid, VolumeName>;

/// Where the socket of a volume is.
#[must_use]
pub fn socket(directory: &Path, name: &VolumeName) -> PathBuf {
    directory.join(format!("{name}.sock"))
}

/// A virtual machine that uses a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestReport {
    /// Which volume.
    pub volume: Uuid,
    /// By which socket.
    pub at: PathBuf,
    /// For how long.
    pub age: Duration,
}

/// The front ends of one core's volumes.
pub(super) struct Guests {
    core: Core,
    directory: Option<PathBuf>,
    doors: RefCell<BTreeMap<Uuid, Door>>,
}

/// What a front end needs of a volume.
pub(super) struct Offer {
    pub(super) volume: Rc<Volume>,
    /// How it is to be used through this node, where others have it too.
    pub(super) access: Option<AccessState>,
}

/// A volume's front end.
struct Door {
    at: PathBuf,
    server: Rc<Server>,
    /// Ends it when it is dropped.
    stop: Option<oneshot::Sender<()>>,
    over: Over,
}

/// Is over when a front end has ended, and everybody is through who waited at its socket before.
type Over = Shared<LocalBoxFuture<'static, ()>>;

impl Guests {
    pub(super) fn new(core: Core, directory: Option<PathBuf>) -> Self {
        Self { core, directory, doors: RefCell::default() }
    }

    /// Serves these volumes and no others.
    pub(super) fn serve(&self, offers: impl Iterator<Item = (Uuid, VolumeName, Offer)>) {
        let Some(directory) = &self.directory else { return };
        let mut served = Vec::new();
        for (id, name, offer) in offers {
            served.push(id);
            let mut doors = self.doors.borrow_mut();
            if doors.get(&id).is_none_or(|door| door.stop.is_none()) {
                let before = doors.remove(&id).map(|door| door.over);
                doors.insert(id, self.open(id, socket(directory, &name), offer, before));
            }
        }
        for (id, door) in self.doors.borrow_mut().iter_mut() {
            if !served.contains(id) {
                door.stop.take();
            }
        }
    }

    /// Opens a volume's front end, once the one before it has ended.
    fn open(&self, id: Uuid, at: PathBuf, offer: Offer, before: Option<Over>) -> Door {
        let serial = id.simple().to_string();
        let options = Options { rings: MAX_RINGS, read_only: false, serial };
        let outage = offer.access.map_or(Outage::Told, Outage::Waited);
        let server = Rc::new(Server::new(&self.core, offer.volume, outage, &options));
        let (stop, stopped) = oneshot::channel();
        let (core, serving, path) = (self.core.clone(), Rc::clone(&server), at.clone());
        let life = tokio::task::spawn_local(async move {
            if let Some(before) = before {
                before.await;
            }
            let stop = async { drop(stopped.await) }.shared();
            if let Some(listener) = listen(&core, &path, stop.clone()).await {
                tracing::info!(at = %path.display(), "serving a volume to virtual machines");
                serving.serve(&listener, stop).await;
            }
        });
        let over = life.map(|ended| {
            if ended.is_err() {
                tracing::error!("a front end of virtual machines ended by a panic");
            }
        });
        Door { at, server, stop: Some(stop), over: over.boxed_local().shared() }
    }

    /// Ends the front end of a volume, in order.
    pub(super) async fn end(&self, id: Uuid) {
        let over = self.doors.borrow_mut().get_mut(&id).map(|door| {
            door.stop.take();
            door.over.clone()
        });
        if let Some(over) = over {
            over.await;
            self.doors.borrow_mut().retain(|_, door| door.stop.is_some() || !is_over(door));
        }
    }

    /// Ends all of them.
    pub(super) async fn end_all(&self) {
        let all: Vec<_> = self.doors.borrow().keys().copied().collect();
        join_all(all.into_iter().map(|id| self.end(id))).await;
    }

    pub(super) fn report(&self) -> Vec<GuestReport> {
        let doors = self.doors.borrow();
        let guest = |(id, door): (&Uuid, &Door)| {
            let age = door.server.connected_for()?;
            Some(GuestReport { volume: *id, at: door.at.clone(), age })
        };
        doors.iter().filter_map(guest).collect()
    }
}

fn is_over(door: &Door) -> bool {
    door.over.peek().is_some()
}

/// Listens at `at` as soon as that can be had, unless it is `stop` that comes first.
async fn listen(core: &Core, at: &Path, stop: impl Future<Output = ()>) -> Option<Listener> {
    let mut stop = std::pin::pin!(stop);
    let mut said = None;
    loop {
        let why = match try_listen(core, at).await {
            Ok(listener) => return Some(listener),
            Err(e) => e.to_string(),
        };
        if said.as_ref() != Some(&why) {
            let at = at.display();
            tracing::error!(%at, why, "virtual machines are not served here; trying again");
            said = Some(why);
        }
        tokio::select! {
            biased;
            () = &mut stop => return None,
            () = tokio::time::sleep(AGAIN) => {}
        }
    }
}

async fn try_listen(core: &Core, at: &Path) -> io::Result<Listener> {
    if let Some(directory) = at.parent() {
        data_dir::make_with_mode(directory, DIRECTORY_MODE)?;
    }
    core.listen_unix_for(at, SOCKET_MODE).await
}
