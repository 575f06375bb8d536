//! Our own server with a volume, a proxy between it and a host, and the host's options.
#![allow(clippy::unwrap_used, dead_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::testing::TestClient;
use block::testing::faulty::{Faults, Faulty};
use block::testing::register::{Checker, InitialContents};
use block::testing::workload::Workload;
use block::{Blocks, Dev, Epoch, Lba, Mem, MemOptions};
use initiator::nvme::{Backoff, Controller, Options, Staging};
use rt::Core;
use target::{
    AccessList, AccessRule, Catalog, ChapCredentials, HostSecrets, HostTls, IscsiTarget, Limits,
    ServedVolume, Server, Service, Subsystem, VolumeId, core_links,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;
use volume::Volume;

pub(crate) const SUBNQN: &str = "nqn.2026-01.com.example:disk";
pub(crate) const HOSTNQN: &str =
    "nqn.2014-08.org.nvmexpress:uuid:6d0a3c1e-0000-4000-8000-000000000001";
pub(crate) const TARGET: &str = "iqn.2026-01.com.example:disk";
pub(crate) const INITIATOR: &str = "iqn.2026-01.com.example:host";
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const A: VolumeId = VolumeId([0xa; 16]);
pub(crate) const B: VolumeId = VolumeId([0xb; 16]);

/// Buffer memory of the core in bytes: for the server, and for the host's admin commands.
const POOL: usize = 32 << 20;

pub(crate) fn on_core<Fut: Future<Output = ()> + 'static>(
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    testkit::on_first_core(&testkit::cores_config(1, POOL), f);
}

/// A server, and a volume of it that can be faulty and can grow.
pub(crate) struct Site {
    pub(crate) core: Core,
    pub(crate) server: Rc<Server>,
    pub(crate) at: SocketAddr,
    pub(crate) mem: Rc<Mem>,
    pub(crate) faults: Faults,
    volume: Rc<Volume>,
}

impl Site {
    /// Namespace 1 of [`SUBNQN`] is volume A.
    pub(crate) async fn new(core: &Core, blocks: u64) -> Self {
        let (server, at) = Self::server(core, Service::Nvme).await;
        let (volume, mem, faults) = Self::made(blocks);
        let site = Self { core: core.clone(), server, at, mem, faults, volume };
        site.serve_a();
        site
    }

    /// Another server with the same volume.
    pub(crate) async fn twin(&self) -> Self {
        let (server, at) = Self::server(&self.core, Service::Nvme).await;
        let (mem, faults) = (Rc::clone(&self.mem), self.faults.clone());
        let (core, volume) = (self.core.clone(), Rc::clone(&self.volume));
        let twin = Self { core, server, at, mem, faults, volume };
        twin.serve_a();
        twin
    }

    async fn server(core: &Core, service: Service) -> (Rc<Server>, SocketAddr) {
        let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        spawn_local(Rc::clone(&server).serve(listener, service));
        (server, at)
    }

    fn serve_a(&self) {
        add(&self.server, A, &self.volume);
        self.serve(SUBNQN, A, AccessList::open());
    }

    fn made(blocks: u64) -> (Rc<Volume>, Rc<Mem>, Faults) {
        let mem = Rc::new(Mem::new(MemOptions::new(512, blocks)));
        let (dev, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
        (Volume::new(dev, Epoch::default()), mem, faults)
    }

    /// Unit 1 of [`TARGET`] is volume A.
    pub(crate) async fn iscsi(core: &Core, blocks: u64) -> Self {
        let (server, at) = Self::server(core, Service::Iscsi).await;
        let (volume, mem, faults) = Self::made(blocks);
        add(&server, A, &volume);
        let site = Self { core: core.clone(), server, at, mem, faults, volume };
        site.serve_unit(TARGET, A, AccessList::open());
        site
    }

    /// Adds a volume.
    pub(crate) fn volume(server: &Rc<Server>, id: VolumeId, blocks: u64) -> (Rc<Mem>, Faults) {
        let (volume, mem, faults) = Self::made(blocks);
        add(server, id, &volume);
        (mem, faults)
    }

    /// Namespace 1 of `subnqn` is this volume.
    pub(crate) fn serve(&self, subnqn: &str, id: VolumeId, access: AccessList<HostSecrets>) {
        self.serve_by(subnqn, id, access, BTreeMap::new());
    }

    /// The same for hosts that come by TLS.
    pub(crate) fn serve_by(
        &self,
        subnqn: &str,
        id: VolumeId,
        access: AccessList<HostSecrets>,
        tls: BTreeMap<String, HostTls>,
    ) {
        let namespaces = [(1, id)].into();
        let serial = "1".to_owned();
        let subsystem = Subsystem { namespaces, serial, access, tls, ..Subsystem::default() };
        let subsystems = [(subnqn.to_owned(), subsystem)].into();
        let nvme_portals = vec![self.at];
        self.server.set_catalog(Arc::new(Catalog {
            subsystems,
            nvme_portals,
            ..Catalog::default()
        }));
    }

    /// Unit 1 of `target` is this volume.
    pub(crate) fn serve_unit(
        &self,
        target: &str,
        id: VolumeId,
        access: AccessList<ChapCredentials>,
    ) {
        let target = (
            target.to_owned(),
            IscsiTarget { luns: [(1, id)].into(), access, ..Default::default() },
        );
        let iscsi_portals = vec![self.at];
        self.server.set_catalog(Arc::new(Catalog {
            targets: [target].into(),
            iscsi_portals,
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

fn add(server: &Rc<Server>, id: VolumeId, volume: &Rc<Volume>) {
    let (name, volume) = (format!("{id:?}"), Rc::clone(volume));
    server.add_volume(ServedVolume { id, name, volume, thin: false, access: None });
}

/// An access list with these secrets.
pub(crate) fn guarded(secrets: HostSecrets) -> AccessList<HostSecrets> {
    let named = [(HOSTNQN.to_owned(), AccessRule::Proof(secrets))].into();
    AccessList { any: None, named }
}

pub(crate) fn options(at: SocketAddr) -> Options {
    let backoff = Backoff { initial: Duration::from_millis(2), max: Duration::from_millis(50) };
    Options { backoff, ..Options::new(at, SUBNQN, HOSTNQN, [7; 16]) }
}

/// A proxy between a host and a server that can be cut.
pub(crate) struct Wire {
    pub(crate) at: SocketAddr,
    to: Rc<Cell<SocketAddr>>,
    lines: Rc<RefCell<Vec<AbortHandle>>>,
    open: Rc<Cell<bool>>,
    pub(crate) accepted: Rc<Cell<usize>>,
    gate: Rc<Gate>,
}

/// Pauses between cuts, in milliseconds.
pub(crate) const QUICK_CUTS: [u64; 12] = [3, 1, 7, 2, 15, 0, 40, 5, 1, 1, 25, 9];

/// Cuts the wire, with these pauses in milliseconds, until so many lines have been accepted, while
/// a volume is worked with, `batch` operations at a time: nothing may fail, and nothing be lost.
pub(crate) async fn cut_while_working(
    wire: &Wire,
    client: TestClient,
    (pauses_ms, lines): (&[u64], usize),
    batch: usize,
) {
    let checker = RefCell::new(Checker::new(1, 512, InitialContents::Zeroes));
    let workload = Workload::new(client, Blocks::new(Lba(0), 2048), 16, 5);
    let cutting = async {
        for &pause in pauses_ms.iter().cycle() {
            sleep(Duration::from_millis(pause)).await;
            wire.cut();
        }
    };
    let working = async {
        while wire.accepted.get() < lines {
            workload.run(&checker, batch).await.unwrap();
            assert_eq!(workload.take_errors(), []);
        }
    };
    tokio::select! {
        biased;
        () = cutting => {}
        () = working => {}
    }
    workload.audit(&checker).await.unwrap();
}

/// Discards the bytes of connections that existed when it was closed.
#[derive(Default)]
struct Gate {
    /// Lines that were accepted before this many.
    keeps: Cell<usize>,
    changed: Notify,
    /// Bytes that have passed.
    carried: Cell<u64>,
}

impl Gate {
    async fn passes(&self, line: usize) {
        loop {
            let changed = self.changed.notified();
            if self.keeps.get() < line {
                return;
            }
            changed.await;
        }
    }

    fn keep(&self, lines: usize) {
        self.keeps.set(lines);
        self.changed.notify_waiters();
    }
}

impl Wire {
    pub(crate) async fn new(core: &Core, to: SocketAddr) -> Self {
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        let (to, lines) = (Rc::new(Cell::new(to)), Rc::new(RefCell::new(Vec::new())));
        let (open, accepted) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(0)));
        let wire = Self { at, to, lines, open, accepted, gate: Rc::default() };
        let (core, to, lines) = (core.clone(), Rc::clone(&wire.to), Rc::clone(&wire.lines));
        let (open, accepted) = (Rc::clone(&wire.open), Rc::clone(&wire.accepted));
        let gate = Rc::clone(&wire.gate);
        spawn_local(async move {
            loop {
                let (host, _) = listener.accept().await.unwrap();
                if !open.get() {
                    continue;
                }
                accepted.set(accepted.get() + 1);
                let (core, to, line) = (core.clone(), to.get(), accepted.get());
                let gate = Rc::clone(&gate);
                let line = spawn_local(async move {
                    let server = core.dial(to).await.unwrap();
                    let (host, server) = (split(host), split(server));
                    // It ends as a whole with either side.
                    tokio::select! {
                        biased;
                        () = carry(host.0, server.1, &gate, line) => {}
                        () = carry(server.0, host.1, &gate, line) => {}
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

    /// Existing connections carry nothing more, but stay open.
    pub(crate) fn freeze(&self) {
        self.gate.keep(self.accepted.get());
    }

    /// Delivers the withheld bytes.
    pub(crate) fn thaw(&self) {
        self.gate.keep(0);
    }

    /// Bytes that it has carried, in both directions.
    pub(crate) fn carried(&self) -> u64 {
        self.gate.carried.get()
    }

    /// Blocks or allows new connections.
    pub(crate) fn set_open(&self, open: bool) {
        self.open.set(open);
    }

    /// Redirects new connections.
    pub(crate) fn lead_to(&self, to: SocketAddr) {
        self.to.set(to);
    }
}

/// One direction of a line, to its end.
async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    gate: &Gate,
    line: usize,
) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let Ok(n @ 1..) = from.read(&mut bytes).await else { return gate.passes(line).await };
        gate.passes(line).await;
        gate.carried.set(gate.carried.get() + n as u64);
        if to.write_all(&bytes[..n]).await.is_err() {
            return;
        }
    }
}
