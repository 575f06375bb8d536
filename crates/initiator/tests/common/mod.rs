//! Our own server with a volume, what stands between it and a host, and the host's options.
#![allow(clippy::unwrap_used, dead_code)]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::testing::faulty::{Faults, Faulty};
use block::{Dev, Epoch, Mem, MemOptions};
use initiator::nvme::{Backoff, Controller, Options, Staging};
use rt::{Core, Cores, CoresConfig};
use target::{
    Access, Admission, Catalog, HostSecrets, Limits, Served, Server, Service, Subsystem, VolumeId,
    doors,
};
use tokio::io::copy_bidirectional;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, spawn_local};
use volume::Volume;

pub(crate) const SUBNQN: &str = "nqn.2026-01.com.example:disk";
pub(crate) const HOSTNQN: &str =
    "nqn.2014-08.org.nvmexpress:uuid:6d0a3c1e-0000-4000-8000-000000000001";
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const A: VolumeId = VolumeId([0xa; 16]);
pub(crate) const B: VolumeId = VolumeId([0xb; 16]);

/// Buffer memory of the core in bytes: for the server, and for the host's admin commands.
const POOL: usize = 32 << 20;

pub(crate) fn on_core<Fut: Future<Output = ()> + 'static>(
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    let config =
        CoresConfig { cpus: vec![None], pool_bytes_per_core: POOL, ..CoresConfig::default() };
    let cores = Cores::start(&config).unwrap();
    let wait = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let result = wait.block_on(cores.handles()[0].run(f));
    cores.stop_now();
    result.expect("the test's core panicked, see above");
}

/// A server, and a volume of it that can be faulty and can grow.
pub(crate) struct Site {
    pub(crate) core: Core,
    pub(crate) server: Rc<Server>,
    pub(crate) at: SocketAddr,
    pub(crate) mem: Rc<Mem>,
    pub(crate) faults: Faults,
}

impl Site {
    /// Namespace 1 of [`SUBNQN`] is volume A.
    pub(crate) async fn new(core: &Core, blocks: u64) -> Self {
        let server = Server::new(core.clone(), Limits::default(), doors(1).remove(0));
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        spawn_local(Rc::clone(&server).serve(listener, Service::Nvme));
        let (mem, faults) = Self::volume(&server, A, blocks);
        let site = Self { core: core.clone(), server, at, mem, faults };
        site.serve(SUBNQN, A, Access::anybody());
        site
    }

    /// Adds a volume.
    pub(crate) fn volume(server: &Rc<Server>, id: VolumeId, blocks: u64) -> (Rc<Mem>, Faults) {
        let mem = Rc::new(Mem::new(MemOptions::new(512, blocks)));
        let (dev, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
        let volume = Volume::new(dev, Epoch::default());
        let name = format!("{id:?}");
        server.add_volume(Served { id, name, volume, thin: false, access: None });
        (mem, faults)
    }

    /// Namespace 1 of `subnqn` is this volume.
    pub(crate) fn serve(&self, subnqn: &str, id: VolumeId, access: Access<HostSecrets>) {
        let namespaces = [(1, id)].into();
        let serial = "1".to_owned();
        let subsystem = Subsystem { namespaces, serial, access, ..Subsystem::default() };
        let subsystems = [(subnqn.to_owned(), subsystem)].into();
        let nvme_portals = vec![self.at];
        self.server.set_catalog(Arc::new(Catalog {
            subsystems,
            nvme_portals,
            ..Catalog::default()
        }));
    }

    /// Serves nothing.
    pub(crate) fn serve_nothing(&self) {
        self.server.set_catalog(Arc::default());
    }

    pub(crate) async fn connect(&self) -> Controller {
        Controller::connect(&self.core, options(self.at), Staging::default()).await.unwrap()
    }
}

/// Who may connect, by a secret.
pub(crate) fn guarded(secrets: HostSecrets) -> Access<HostSecrets> {
    let named = [(HOSTNQN.to_owned(), Admission::Proof(secrets))].into();
    Access { any: None, named }
}

pub(crate) fn options(at: SocketAddr) -> Options {
    let backoff = Backoff { first: Duration::from_millis(2), longest: Duration::from_millis(50) };
    Options { backoff, ..Options::new(at, SUBNQN, HOSTNQN, [7; 16]) }
}

/// Carries bytes between a host and a server, until it is cut.
pub(crate) struct Wire {
    pub(crate) at: SocketAddr,
    to: Rc<Cell<SocketAddr>>,
    lines: Rc<RefCell<Vec<AbortHandle>>>,
    open: Rc<Cell<bool>>,
    pub(crate) accepted: Rc<Cell<usize>>,
    /// Those who are frozen are those that were accepted before this many.
    frozen: Rc<Cell<usize>>,
    thaw: Rc<Notify>,
}

impl Wire {
    pub(crate) async fn new(core: &Core, to: SocketAddr) -> Self {
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        let (to, lines) = (Rc::new(Cell::new(to)), Rc::new(RefCell::new(Vec::new())));
        let (open, accepted) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(0)));
        let (frozen, thaw) = (Rc::default(), Rc::new(Notify::new()));
        let wire = Self { at, to, lines, open, accepted, frozen, thaw };
        let (core, to, lines) = (core.clone(), Rc::clone(&wire.to), Rc::clone(&wire.lines));
        let (open, accepted) = (Rc::clone(&wire.open), Rc::clone(&wire.accepted));
        let (frozen, thaw) = (Rc::clone(&wire.frozen), Rc::clone(&wire.thaw));
        spawn_local(async move {
            loop {
                let (mut host, _) = listener.accept().await.unwrap();
                if !open.get() {
                    continue;
                }
                accepted.set(accepted.get() + 1);
                let (core, to, number) = (core.clone(), to.get(), accepted.get());
                let (frozen, thaw) = (Rc::clone(&frozen), Rc::clone(&thaw));
                let line = spawn_local(async move {
                    let mut server = core.dial(to).await.unwrap();
                    let is_frozen = async {
                        while frozen.get() < number {
                            thaw.notified().await;
                        }
                    };
                    tokio::select! {
                        biased;
                        () = is_frozen => std::future::pending().await,
                        _ = copy_bidirectional(&mut host, &mut server) => {}
                    }
                });
                lines.borrow_mut().push(line.abort_handle());
            }
        });
        wire
    }

    /// Cuts all connections.
    pub(crate) fn cut(&self) {
        self.lines.borrow_mut().drain(..).for_each(|line| line.abort());
    }

    /// What is connected carries nothing any more, and stays open.
    pub(crate) fn freeze(&self) {
        self.frozen.set(self.accepted.get());
        self.thaw.notify_waiters();
    }

    /// Lets nobody through, or does so again.
    pub(crate) fn set_open(&self, open: bool) {
        self.open.set(open);
    }

    /// From now on it leads there.
    pub(crate) fn lead_to(&self, to: SocketAddr) {
        self.to.set(to);
    }
}
