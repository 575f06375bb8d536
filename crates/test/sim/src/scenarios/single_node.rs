//! A whole node that serves a volume to clients on other hosts, under all faults: power cuts,
//! kills, failing disks, cut and slow links, clients that vanish.
//!
//! The node is assembled as in the product: an image, a volume, a server, a listener.
//! [`ProtocolClient`] implements the protocol of its clients. At the end there are no faults: every
//! operation succeeds, every block holds a permitted value, and the node has released all memory.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use block::testing::register::CrashKind;
use block::{Account, Epoch};
use disk::{ImageErrorReason, Provisioning};
use image::{CreateImageOptions, FlatImage};
use rt::Core;
use rt::disk::DiskErrorKind;
use rt::net::Stream;
use rt::sim::{DiskFaults, DiskSetup, Host, HostSetup, LinkSetup, World};
use target::{Catalog, Limits, ServedVolume, Server, Service, VolumeId, core_links};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep, timeout};
use volume::Volume;

use super::file::{FlushBehaviour, FlushSkippingLayer, IMAGE, VOLUME, open};
use super::storage::{check_no_memory_held, draw_faults, stop_host, wait_disk_idle};
use super::workload_model::{Completion, NextStep, Op, PendingOperation, WorkloadModel};

/// Size of the volume in bytes.
const BYTES: u64 = 64 << 10;

/// The node's listening port.
pub(super) const PORT: u16 = 3260;

/// Most operations between two faults, and without faults at the end.
pub(super) const OPERATIONS_PER_ROUND: u64 = 100;
pub(super) const FINAL_OPERATIONS: u64 = 60;

/// Virtual time limit.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a client waits for an answer before it drops the connection.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(40);

/// How long a client tries to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// The result of bytes received from the node.
#[derive(Debug, Default)]
pub(super) struct ReceivedEvents {
    /// Operations that have ended.
    pub(super) completions: Vec<(u32, Completion)>,
    /// Whether the node or the client has closed the connection.
    pub(super) is_closing: bool,
}

/// Operations in flight, by protocol tag.
pub(super) type InFlight = BTreeMap<u32, PendingOperation>;

/// The client's side of a protocol, on one connection. Bytes to send are appended to `out`.
pub(super) trait ProtocolClient: Sized + 'static {
    /// What the node listens for.
    const SERVICE: Service;

    /// Whether the protocol has COMPARE AND WRITE.
    const HAS_COMPARE_AND_WRITE: bool;

    /// Exports the volume.
    fn export(catalog: &mut Catalog, id: VolumeId);

    /// Connects and logs in; `None` if that fails or is refused.
    fn connect(
        core: &Core,
        to: SocketAddr,
        client: u8,
        book: &Rc<WorkloadModel>,
    ) -> impl Future<Output = Option<(Self, Stream)>>;

    /// The client's port, if no other session of this port can still take effect.
    fn port(&self) -> Option<u8>;

    /// Sends an operation; returns its tag.
    fn send_operation(&mut self, pending: &PendingOperation, out: &mut Vec<u8>) -> u32;

    /// Handles bytes received from the node.
    fn receive(&mut self, bytes: &[u8], open: &mut InFlight, out: &mut Vec<u8>) -> ReceivedEvents;

    /// Sends something other than an operation: a ping, an abort.
    fn issue_extra(&mut self, open: &InFlight, out: &mut Vec<u8>);

    /// Logs out.
    fn begin_logout(&mut self, out: &mut Vec<u8>) -> LogoutKind;
}

/// Addresses of a volume: each is another node.
pub(super) type Paths = Rc<RefCell<Vec<SocketAddr>>>;

/// State of an orderly disconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogoutKind {
    /// The client has asked for it and waits for the answer.
    AwaitsResponse,
    /// The connection is closed.
    Close,
}

/// How a connection ended for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SessionEnd {
    /// It was lost or dropped.
    Lost,
    /// The work is done.
    Finished,
}

/// A client's connection.
struct Session<T> {
    client: T,
    stream: Stream,
    model: Rc<WorkloadModel>,
    memory: Account,
    pending: InFlight,
    out: Vec<u8>,
    /// The counter when it was last read.
    counter: Option<u64>,
    logging_out: bool,
    /// Whether other nodes serve the volume too.
    has_other_nodes: bool,
    /// Whether operations begun from now on must succeed, because faults are over.
    must_succeed: bool,
}

impl<T: ProtocolClient> Session<T> {
    async fn run(&mut self) -> SessionEnd {
        let rng = &Rc::clone(&self.model).rng;
        let depth = usize::try_from(rng.between(1, 10)).expect("small");
        let patience = if self.must_succeed { SCENARIO_TIMEOUT } else { RESPONSE_TIMEOUT };
        let mut heard_at = Instant::now();
        let mut bytes = vec![0; 16 << 10];
        loop {
            if self.model.is_fault_free() && !self.must_succeed {
                return SessionEnd::Lost;
            }
            if self.issue(depth) == Some(LogoutKind::Close) {
                return SessionEnd::Finished;
            }
            let silence = sleep(patience);
            let rests = self.pending.is_empty() && !self.logging_out;
            let pause = Duration::from_millis(if rests { 100 } else { 10 });
            let pause = sleep(rng.duration_between(Duration::from_millis(1), pause));
            let (mut reader, mut writer) = tokio::io::split(&mut self.stream);
            tokio::select! {
                biased;
                read = reader.read(&mut bytes) => {
                    let n = match read {
                        Ok(n) if n > 0 => n,
                        _ if self.logging_out && self.pending.is_empty() => return SessionEnd::Finished,
                        _ => return SessionEnd::Lost,
                    };
                    heard_at = Instant::now();
                    let heard = self.client.receive(&bytes[..n], &mut self.pending, &mut self.out);
                    if let Some(end) = self.handle_events(heard) {
                        return end;
                    }
                }
                written = writer.write(&self.out), if !self.out.is_empty() => match written {
                    Ok(n) => drop(self.out.drain(..n)),
                    Err(_) => return SessionEnd::Lost,
                },
                () = pause, if !self.logging_out => {}
                () = silence => {}
            }
            let gives_up = !self.model.is_fault_free() && rng.chance(0.005);
            if heard_at.elapsed() >= patience && !self.pending.is_empty() || gives_up {
                return SessionEnd::Lost;
            }
        }
    }

    /// Begins the next operations; logs out when there are none left.
    fn issue(&mut self, depth: usize) -> Option<LogoutKind> {
        let rng = &Rc::clone(&self.model).rng;
        while !self.logging_out
            && self.pending.len() < depth
            && (self.pending.is_empty() || rng.chance(0.6))
        {
            let next = match self.counter.take() {
                Some(counter) => NextStep::Issue(Op::IncrementCounter(counter)),
                None => self.model.next(),
            };
            let op = match next {
                NextStep::Issue(op) => op,
                NextStep::Finish if self.pending.is_empty() => {
                    self.logging_out = true;
                    return Some(self.client.begin_logout(&mut self.out));
                }
                NextStep::Finish | NextStep::Wait => return None,
            };
            let op = if T::HAS_COMPARE_AND_WRITE || op != Op::ReadCounter { op } else { Op::Flush };
            self.ask(op);
            if rng.chance(0.05) && !self.model.is_fault_free() {
                self.client.issue_extra(&self.pending, &mut self.out);
            }
        }
        None
    }

    fn ask(&mut self, op: Op) {
        let pending = self.model.begin(op, &self.memory, self.must_succeed);
        let tag = self.client.send_operation(&pending, &mut self.out);
        self.pending.insert(tag, pending);
    }

    fn handle_events(&mut self, heard: ReceivedEvents) -> Option<SessionEnd> {
        for (tag, how) in heard.completions {
            let Some(pending) = self.pending.remove(&tag) else { continue };
            if self.has_other_nodes && !self.must_succeed && matches!(how, Completion::Failed(_)) {
                // Another node may still carry it out: the outcome is unknown. Retry at another
                // node.
                return Some(SessionEnd::Lost);
            }
            let again = (how == Completion::Retry).then(|| pending.op.clone());
            if let Some(counter) = pending.complete(&how, &self.memory) {
                self.counter = Some(counter);
            }
            if let Some(op) = again {
                self.ask(op);
            }
        }
        heard.is_closing.then_some(if self.logging_out {
            SessionEnd::Finished
        } else {
            SessionEnd::Lost
        })
    }
}

/// A client: reconnects until no work is left.
async fn client<T: ProtocolClient>(
    core: Core,
    paths: Paths,
    number: u8,
    book: Rc<WorkloadModel>,
    finished: Rc<Cell<usize>>,
) -> Result<(), String> {
    let mut lost = BTreeMap::<u8, InFlight>::new();
    for turn in 0.. {
        let (to, several) = {
            let paths = paths.borrow();
            (paths[turn % paths.len()], paths.len() > 1)
        };
        // A login during a restart may have reached the previous process.
        let must = book.is_fault_free();
        if let Ok(Some((talk, stream))) =
            timeout(CONNECT_TIMEOUT, T::connect(&core, to, number, &book)).await
        {
            let memory = core.buffer_pool().account();
            let book = Rc::clone(&book);
            let (open, out, counter) = (BTreeMap::new(), Vec::new(), None);
            let leaving = false;
            let mut session = Session {
                client: talk,
                stream,
                model: book,
                memory,
                pending: open,
                out,
                counter,
                logging_out: leaving,
                has_other_nodes: several,
                must_succeed: must,
            };
            // Taking over a session at one node ends nothing at another.
            let port = session.client.port().filter(|_| !several);
            // Commands of the port's last session have taken effect by now, or never will.
            for (_, pending) in port.and_then(|p| lost.remove(&p)).into_iter().flatten() {
                pending.complete(
                    &Completion::Failed("its session was replaced".into()),
                    &session.memory,
                );
            }
            if session.run().await == SessionEnd::Finished {
                finished.set(finished.get() + 1);
                return Ok(());
            }
            // Without a port, this is unknown.
            port.map(|p| lost.insert(p, session.pending));
        }
        sleep(book.rng.duration_between(Duration::from_millis(1), Duration::from_millis(300)))
            .await;
    }
    Ok(())
}

/// Runs clients on separate hosts, as many as the seed says. `over` counts those that are done.
pub(super) fn spawn_clients<T: ProtocolClient>(
    paths: &Paths,
    book: &Rc<WorkloadModel>,
    finished: &Rc<Cell<usize>>,
) -> Vec<Host> {
    let world = &book.world;
    let count = u8::try_from(world.rng().between(1, 3)).expect("small");
    let start = |number| {
        let setup = HostSetup { memory_bytes: 4 << 20, ..HostSetup::default() };
        let host = world.add_host(&format!("client{number}"), setup);
        let (paths, book, finished) = (Rc::clone(paths), Rc::clone(book), Rc::clone(finished));
        host.start(move |core| {
            client::<T>(core, Rc::clone(&paths), number, Rc::clone(&book), Rc::clone(&finished))
        });
        host
    };
    (1..=count).map(start).collect()
}

/// Waits until all of `count` clients are done, and no work is left.
pub(super) async fn wait_finished(
    book: &WorkloadModel,
    finished: &Cell<usize>,
    count: usize,
) -> Result<(), String> {
    let all = async {
        while finished.get() < count {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let end = timeout(SCENARIO_TIMEOUT, all).await;
    if end.is_err() || !book.is_finished() {
        return Err(format!(
            "{} of {count} clients are through after {SCENARIO_TIMEOUT:?}",
            finished.get()
        ));
    }
    book.world.note(format!("{} operations succeeded", book.successes()));
    Ok(())
}

/// What runs on the node now, for the final checks.
#[derive(Default)]
struct RunningNode {
    server: Weak<Server>,
    volume: Weak<Volume>,
}

struct NodeTestbed {
    world: World,
    node: Host,
    clients: Vec<Host>,
    book: Rc<WorkloadModel>,
    running: Rc<RefCell<RunningNode>>,
    /// Number of clients that are done.
    finished_clients: Rc<Cell<usize>>,
}

/// Runs the scenario.
pub(super) async fn run<T: ProtocolClient>(
    world: World,
    flushes: FlushBehaviour,
) -> Result<(), String> {
    let rng = world.rng();
    let (block_size, (logical, physical)) = *rng.pick(&[
        (512, (512, 4096)),
        (512, (4096, 4096)),
        (4096, (512, 4096)),
        (4096, (4096, 4096)),
    ]);
    let files = DiskSetup::file(0).blocks(logical, physical);
    let pool_bytes = *rng.pick(&[4 << 20, 16 << 20]);
    let node = world.add_host(
        "node",
        HostSetup { memory_bytes: pool_bytes, new_file_setup: files, ..HostSetup::default() },
    );
    let at = Rc::new(RefCell::new(vec![SocketAddr::new(node.address(), PORT)]));
    let book = WorkloadModel::new(&world, block_size, BYTES);
    let running = Rc::<RefCell<RunningNode>>::default();
    create(&node, block_size).await?;
    let (serving, its_book) = (Rc::clone(&running), Rc::clone(&book));
    node.start(move |core| serve::<T>(core, flushes, Rc::clone(&its_book), Rc::clone(&serving)));
    let finished = Rc::new(Cell::new(0));
    let clients = spawn_clients::<T>(&at, &book, &finished);
    let bench = NodeTestbed {
        world: world.clone(),
        node,
        clients,
        book,
        running,
        finished_clients: finished,
    };
    for _ in 0..rng.between(1, 6) {
        bench.inject_fault().await;
    }
    bench.finish().await
}

async fn create(node: &Host, block_size: u32) -> Result<(), String> {
    let how = CreateImageOptions {
        volume_id: VOLUME,
        block_size,
        size_bytes: Some(BYTES),
        provisioning: Provisioning::Thin,
        allow_page_cache: false,
        overwrite: false,
        keep_contents: false,
        claim: None,
    };
    let made = node.run(move |core| async move {
        let made = FlatImage::create(&core, Path::new(IMAGE), &how).await;
        made.map(drop).map_err(|e| e.to_string())
    });
    let made = made.join().await.unwrap_or_else(|| Err("the node crashed by itself".into()));
    // As when the process ends.
    node.kill();
    made
}

/// The software of the node.
async fn serve<T: ProtocolClient>(
    core: Core,
    flushes: FlushBehaviour,
    book: Rc<WorkloadModel>,
    running: Rc<RefCell<RunningNode>>,
) -> Result<(), String> {
    let file = loop {
        match open(&core, 0).await {
            Ok(file) => break file,
            Err(e) if book.is_fault_free() => return Err(format!("without faults: {e}")),
            Err(e) => {
                // After a failed sync the same data is lost as in a power cut.
                if matches!(e.reason, ImageErrorReason::Disk(e) if e.kind == DiskErrorKind::Gone) {
                    book.crash(CrashKind::PowerLoss);
                }
                sleep(Duration::from_secs(1)).await;
            }
        }
    };
    let volume = Volume::new(FlushSkippingLayer::dev(&file, flushes), Epoch::default());
    let server = new_server::<T>(&core, &volume);
    *running.borrow_mut() =
        RunningNode { server: Rc::downgrade(&server), volume: Rc::downgrade(&volume) };
    drop(volume);
    listen::<T>(&core, server).await
}

/// A server that exports the volume to all initiators.
pub(super) fn new_server<T: ProtocolClient>(core: &Core, volume: &Rc<Volume>) -> Rc<Server> {
    let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
    let (id, volume) = (VolumeId(VOLUME.into_bytes()), Rc::clone(volume));
    server.add_volume(ServedVolume { id, name: "volume".into(), volume, thin: true, access: None });
    let mut catalog = Catalog::default();
    T::export(&mut catalog, id);
    server.set_catalog(Arc::new(catalog));
    server
}

/// Serves every connection.
pub(super) async fn listen<T: ProtocolClient>(
    core: &Core,
    server: Rc<Server>,
) -> Result<(), String> {
    let at = SocketAddr::from(([0, 0, 0, 0], PORT));
    let listener = core.listen(at).await.map_err(|e| e.to_string())?;
    server.serve(listener, T::SERVICE).await;
    Ok(())
}

impl NodeTestbed {
    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        sleep(self.world.rng().duration_between(Duration::ZERO, most)).await;
    }

    fn set_faults(&self, faults: &DiskFaults) {
        if let Some(disk) = self.node.disk(IMAGE) {
            disk.set_faults(faults.clone());
        }
    }

    /// Ends the node's process, by a power cut or a kill.
    async fn crash(&self) {
        let disk = self.node.disk(IMAGE);
        let rng = self.world.rng();
        let fails_syncs = disk.is_some_and(|d| d.faults().sync_error > 0.0);
        // When the process ends after a failed sync, the same data is lost as in a power cut.
        let power = fails_syncs || rng.chance(0.6);
        self.book.crash(stop_host(&self.node, &self.world, power));
        self.pause(*rng.pick(&[10, 2000, 20_000])).await;
        if let Some(disk) = self.node.disk(IMAGE) {
            wait_disk_idle(&disk).await;
        }
    }

    /// Injects a fault while the clients continue.
    async fn inject_fault(&self) {
        let rng = self.world.rng();
        self.book.allow(OPERATIONS_PER_ROUND);
        self.pause(500).await;
        match rng.below(8) {
            0..4 => {
                self.crash().await;
                self.set_faults(&draw_faults(&self.world));
                self.node.restart();
            }
            4 => self.cut().await,
            5 => self.slow_link(),
            6 => {
                let client = rng.pick(&self.clients);
                if rng.chance(0.5) {
                    client.power_cut();
                } else {
                    client.kill();
                }
                self.pause(1000).await;
                client.restart();
            }
            _ => self.pause(3000).await,
        }
    }

    /// A link is cut, in one direction or both.
    async fn cut(&self) {
        let rng = self.world.rng();
        let client = rng.pick(&self.clients);
        match rng.below(3) {
            0 => self.world.partition(client, &self.node),
            1 => self.world.set_link(client, &self.node, |l| l.is_cut = true),
            _ => self.world.set_link(&self.node, client, |l| l.is_cut = true),
        }
        self.pause(*rng.pick(&[100, 5000, 60_000])).await;
        self.world.heal(client, &self.node);
    }

    fn slow_link(&self) {
        let rng = self.world.rng();
        let client = rng.pick(&self.clients);
        let (max, loss) =
            (rng.duration_between(Duration::ZERO, Duration::from_millis(100)), 0.1 * rng.unit());
        let window = *rng.pick(&[1000, 64 << 10]);
        for (from, to) in [(client, &self.node), (&self.node, client)] {
            self.world.set_link(from, to, |l| {
                (l.max_delay, l.loss, l.window) = (l.min_delay + max, loss, window);
            });
        }
    }

    /// Without faults, and with the last process: everything must work, and all memory must be
    /// released.
    async fn finish(&self) -> Result<(), String> {
        self.crash().await;
        self.set_faults(&DiskFaults::default());
        for client in &self.clients {
            for (from, to) in [(client, &self.node), (&self.node, client)] {
                self.world.set_link(from, to, |l| *l = LinkSetup::default());
            }
        }
        self.book.set_fault_free();
        self.book.allow(FINAL_OPERATIONS);
        self.node.restart();
        wait_finished(&self.book, &self.finished_clients, self.clients.len()).await?;
        let running = Rc::clone(&self.running);
        let judged = self.node.run(move |core| check_at_rest(core, running));
        let judged = timeout(SCENARIO_TIMEOUT, judged.join()).await;
        let judged = judged.map_err(|_| "the node does not become idle")?;
        judged.unwrap_or_else(|| Err("the node crashed by itself".into()))
    }
}

/// Whether the node is idle.
async fn check_at_rest(core: Core, running: Rc<RefCell<RunningNode>>) -> Result<(), String> {
    let gone = || "the node has served no client".to_owned();
    let server = running.borrow().server.upgrade().ok_or_else(gone)?;
    let volume = running.borrow().volume.upgrade().ok_or_else(gone)?;
    // The node notices vanished clients when they do not answer its pings.
    while !server.sessions().is_empty() {
        sleep(Duration::from_millis(100)).await;
    }
    let account = core.buffer_pool().account();
    volume.close(&account).await.map_err(|e| format!("close: {e}"))?;
    drop(account);
    check_no_memory_held(core.buffer_pool())
}
