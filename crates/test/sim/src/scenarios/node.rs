//! A whole node that serves a volume to clients on other hosts, and everything that may happen to
//! it: power cuts, kills, failing disks, cut and slow links, clients that vanish.
//!
//! The node is put together as the product does it: an image, a volume, a server, a listener. What
//! its clients speak is [`Talk`]'s business. In the end there are no faults: every operation ends
//! well, every block holds what it may, and the node has all its memory back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use block::testing::register::Loss;
use block::{Account, Epoch};
use disk::{Provisioning, Reason};
use image::{Create, File};
use rt::Core;
use rt::disk::DiskErrorKind;
use rt::net::Stream;
use rt::sim::{DiskFaults, DiskSetup, Host, HostSetup, LinkSetup, World};
use target::{Catalog, Limits, Served, Server, Service, VolumeId, doors};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep, timeout};
use volume::Volume;

use super::book::{Book, Ended, Next, Op, Pending};
use super::file::{Backing, Flushes, IMAGE, VOLUME, open};
use super::storage::{draw_faults, end, memory_is_back, settle};

/// Size of the volume in bytes.
const BYTES: u64 = 64 << 10;

/// Where the node listens.
pub(super) const PORT: u16 = 3260;

/// Operations between one mishap and the next at most, and without faults at the end.
pub(super) const ROUND: u64 = 100;
pub(super) const LAST: u64 = 60;

/// Virtual time in which the end must come.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a client waits for an answer before it gives up its connection.
const ANSWER: Duration = Duration::from_secs(40);

/// How long a client tries to connect.
const CONNECT: Duration = Duration::from_secs(20);

/// What came of bytes from the node.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// Operations that have ended.
    pub(super) ended: Vec<(u32, Ended)>,
    /// The node says that this is the end of the connection, or the client has said so.
    pub(super) closes: bool,
}

/// Operations in flight, by the tag that the protocol gave them.
pub(super) type InFlight = BTreeMap<u32, Pending>;

/// The client's side of a protocol, on one connection. What it has to say goes into `out`.
pub(super) trait Talk: Sized + 'static {
    /// What the node listens for.
    const SERVICE: Service;

    /// Whether there is COMPARE AND WRITE.
    const COMPARES: bool;

    /// Adds the volume to what is served.
    fn announce(catalog: &mut Catalog, id: VolumeId);

    /// Connects and logs in; `None` if that fails or is refused.
    fn connect(
        core: &Core,
        to: SocketAddr,
        client: u8,
        book: &Rc<Book>,
    ) -> impl Future<Output = Option<(Self, Stream)>>;

    /// The client's port, if no other session of this port can do anything any more.
    fn port(&self) -> Option<u8>;

    /// Asks for an operation; its tag.
    fn ask(&mut self, pending: &Pending, out: &mut Vec<u8>) -> u32;

    /// Takes what the node says.
    fn hear(&mut self, bytes: &[u8], open: &mut InFlight, out: &mut Vec<u8>) -> Heard;

    /// Something beside operations: a ping, an abort.
    fn interject(&mut self, open: &InFlight, out: &mut Vec<u8>);

    /// Takes leave.
    fn farewell(&mut self, out: &mut Vec<u8>) -> Farewell;
}

/// Where a volume is reached: each address another node.
pub(super) type Paths = Rc<RefCell<Vec<SocketAddr>>>;

/// How a connection is ended in good order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Farewell {
    /// The node has been asked for it and answers.
    Answered,
    /// It is closed.
    Close,
}

/// How a connection ended for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It is lost, or given up.
    Lost,
    /// Everything is done.
    Over,
}

/// A client's connection.
struct Session<T> {
    talk: T,
    stream: Stream,
    book: Rc<Book>,
    memory: Account,
    open: InFlight,
    out: Vec<u8>,
    /// What the tally was when it was last read.
    tally: Option<u64>,
    leaving: bool,
    /// Whether other nodes serve the volume too.
    several: bool,
    /// Whether what it begins must succeed: it was begun when nothing went wrong any more.
    must: bool,
}

impl<T: Talk> Session<T> {
    async fn run(&mut self) -> End {
        let rng = &Rc::clone(&self.book).rng;
        let depth = usize::try_from(rng.between(1, 10)).expect("small");
        let patience = if self.must { PATIENCE } else { ANSWER };
        let mut heard_at = Instant::now();
        let mut bytes = vec![0; 16 << 10];
        loop {
            if self.book.is_calm() && !self.must {
                return End::Lost;
            }
            if self.issue(depth) == Some(Farewell::Close) {
                return End::Over;
            }
            let silence = sleep(patience);
            let rests = self.open.is_empty() && !self.leaving;
            let pause = Duration::from_millis(if rests { 100 } else { 10 });
            let pause = sleep(rng.time(Duration::from_millis(1), pause));
            let (mut reader, mut writer) = tokio::io::split(&mut self.stream);
            tokio::select! {
                biased;
                read = reader.read(&mut bytes) => {
                    let n = match read {
                        Ok(n) if n > 0 => n,
                        _ if self.leaving && self.open.is_empty() => return End::Over,
                        _ => return End::Lost,
                    };
                    heard_at = Instant::now();
                    let heard = self.talk.hear(&bytes[..n], &mut self.open, &mut self.out);
                    if let Some(end) = self.took(heard) {
                        return end;
                    }
                }
                written = writer.write(&self.out), if !self.out.is_empty() => match written {
                    Ok(n) => drop(self.out.drain(..n)),
                    Err(_) => return End::Lost,
                },
                () = pause, if !self.leaving => {}
                () = silence => {}
            }
            let gives_up = !self.book.is_calm() && rng.chance(0.005);
            if heard_at.elapsed() >= patience && !self.open.is_empty() || gives_up {
                return End::Lost;
            }
        }
    }

    /// Begins what there is to begin; takes leave when there is nothing any more.
    fn issue(&mut self, depth: usize) -> Option<Farewell> {
        let rng = &Rc::clone(&self.book).rng;
        while !self.leaving && self.open.len() < depth && (self.open.is_empty() || rng.chance(0.6))
        {
            let next = match self.tally.take() {
                Some(tally) => Next::Ask(Op::Raise(tally)),
                None => self.book.next(),
            };
            let op = match next {
                Next::Ask(op) => op,
                Next::Leave if self.open.is_empty() => {
                    self.leaving = true;
                    return Some(self.talk.farewell(&mut self.out));
                }
                Next::Leave | Next::Rest => return None,
            };
            let op = if T::COMPARES || op != Op::ReadTally { op } else { Op::Flush };
            self.ask(op);
            if rng.chance(0.05) && !self.book.is_calm() {
                self.talk.interject(&self.open, &mut self.out);
            }
        }
        None
    }

    fn ask(&mut self, op: Op) {
        let pending = self.book.begin(op, &self.memory, self.must);
        let tag = self.talk.ask(&pending, &mut self.out);
        self.open.insert(tag, pending);
    }

    fn took(&mut self, heard: Heard) -> Option<End> {
        for (tag, how) in heard.ended {
            let Some(pending) = self.open.remove(&tag) else { continue };
            if self.several && !self.must && matches!(how, Ended::Failed(_)) {
                // Others may carry it out yet: nobody knows. It is asked for at another node.
                return Some(End::Lost);
            }
            let again = (how == Ended::Again).then(|| pending.op.clone());
            if let Some(tally) = pending.end(&how, &self.memory) {
                self.tally = Some(tally);
            }
            if let Some(op) = again {
                self.ask(op);
            }
        }
        heard.closes.then_some(if self.leaving { End::Over } else { End::Lost })
    }
}

/// A client: connects again and again, until there is nothing left to be done.
async fn client<T: Talk>(
    core: Core,
    paths: Paths,
    number: u8,
    book: Rc<Book>,
    over: Rc<Cell<usize>>,
) -> Result<(), String> {
    let mut lost = BTreeMap::<u8, InFlight>::new();
    for turn in 0.. {
        let (to, several) = {
            let paths = paths.borrow();
            (paths[turn % paths.len()], paths.len() > 1)
        };
        // Who logs in as the last process starts may have reached the one before.
        let must = book.is_calm();
        if let Ok(Some((talk, stream))) =
            timeout(CONNECT, T::connect(&core, to, number, &book)).await
        {
            let memory = core.pool().account();
            let book = Rc::clone(&book);
            let (open, out, tally) = (BTreeMap::new(), Vec::new(), None);
            let leaving = false;
            let mut session =
                Session { talk, stream, book, memory, open, out, tally, leaving, several, must };
            // What takes over a session at one node ends nothing at another.
            let port = session.talk.port().filter(|_| !several);
            // What the port's last session left has happened by now, or never will.
            for (_, pending) in port.and_then(|p| lost.remove(&p)).into_iter().flatten() {
                pending.end(&Ended::Failed("its session was replaced".into()), &session.memory);
            }
            if session.run().await == End::Over {
                over.set(over.get() + 1);
                return Ok(());
            }
            // Without a port that is nothing that anybody could know.
            port.map(|p| lost.insert(p, session.open));
        }
        sleep(book.rng.time(Duration::from_millis(1), Duration::from_millis(300))).await;
    }
    Ok(())
}

/// Clients on hosts of their own, as many as the seed says. `over` counts those that are through.
pub(super) fn clients<T: Talk>(
    paths: &Paths,
    book: &Rc<Book>,
    over: &Rc<Cell<usize>>,
) -> Vec<Host> {
    let world = &book.world;
    let count = u8::try_from(world.rng().between(1, 3)).expect("small");
    let start = |number| {
        let setup = HostSetup { pool_bytes: 4 << 20, ..HostSetup::default() };
        let host = world.add_host(&format!("client{number}"), setup);
        let (paths, book, over) = (Rc::clone(paths), Rc::clone(book), Rc::clone(over));
        host.start(move |core| {
            client::<T>(core, Rc::clone(&paths), number, Rc::clone(&book), Rc::clone(&over))
        });
        host
    };
    (1..=count).map(start).collect()
}

/// Waits until all of `count` clients are through, and nothing is left to be done.
pub(super) async fn all_through(
    book: &Book,
    over: &Cell<usize>,
    count: usize,
) -> Result<(), String> {
    let all = async {
        while over.get() < count {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let end = timeout(PATIENCE, all).await;
    if end.is_err() || !book.is_over() {
        return Err(format!("{} of {count} clients are through after {PATIENCE:?}", over.get()));
    }
    book.world.note(format!("{} operations succeeded", book.successes()));
    Ok(())
}

/// What runs on the node now, for the judgement in the end.
#[derive(Default)]
struct Running {
    server: Weak<Server>,
    volume: Weak<Volume>,
}

struct Bench {
    world: World,
    node: Host,
    clients: Vec<Host>,
    book: Rc<Book>,
    running: Rc<RefCell<Running>>,
    /// Clients that are through.
    over: Rc<Cell<usize>>,
}

/// Plays it.
pub(super) async fn play<T: Talk>(world: World, flushes: Flushes) -> Result<(), String> {
    let rng = world.rng();
    let (block_size, (logical, physical)) = *rng.pick(&[
        (512, (512, 4096)),
        (512, (4096, 4096)),
        (4096, (512, 4096)),
        (4096, (4096, 4096)),
    ]);
    let files = DiskSetup::file(0).blocks(logical, physical);
    let pool_bytes = *rng.pick(&[4 << 20, 16 << 20]);
    let node = world.add_host("node", HostSetup { pool_bytes, files, ..HostSetup::default() });
    let at = Rc::new(RefCell::new(vec![SocketAddr::new(node.address(), PORT)]));
    let book = Book::new(&world, block_size, BYTES);
    let running = Rc::<RefCell<Running>>::default();
    create(&node, block_size).await?;
    let (serving, its_book) = (Rc::clone(&running), Rc::clone(&book));
    node.start(move |core| serve::<T>(core, flushes, Rc::clone(&its_book), Rc::clone(&serving)));
    let over = Rc::new(Cell::new(0));
    let clients = clients::<T>(&at, &book, &over);
    let bench = Bench { world: world.clone(), node, clients, book, running, over };
    for _ in 0..rng.between(1, 6) {
        bench.mishap().await;
    }
    bench.finish().await
}

async fn create(node: &Host, block_size: u32) -> Result<(), String> {
    let how = Create {
        volume: VOLUME,
        block_size,
        bytes: Some(BYTES),
        provisioning: Provisioning::Thin,
        buffered: false,
        force: false,
        keep_contents: false,
        claim: None,
    };
    let made = node.run(move |core| async move {
        let made = File::create(&core, Path::new(IMAGE), &how).await;
        made.map(drop).map_err(|e| e.to_string())
    });
    let made = made.join().await.unwrap_or_else(|| Err("the node crashed by itself".into()));
    // As a process that ends.
    node.kill();
    made
}

/// The node's software.
async fn serve<T: Talk>(
    core: Core,
    flushes: Flushes,
    book: Rc<Book>,
    running: Rc<RefCell<Running>>,
) -> Result<(), String> {
    let file = loop {
        match open(&core, 0).await {
            Ok(file) => break file,
            Err(e) if book.is_calm() => return Err(format!("without faults: {e}")),
            Err(e) => {
                // A failed sync loses what a power cut loses.
                if matches!(e.reason, Reason::Disk(e) if e.kind == DiskErrorKind::Gone) {
                    book.crash(Loss::Unflushed);
                }
                sleep(Duration::from_secs(1)).await;
            }
        }
    };
    let volume = Volume::new(Backing::dev(&file, flushes), Epoch::default());
    let server = server::<T>(&core, &volume);
    *running.borrow_mut() =
        Running { server: Rc::downgrade(&server), volume: Rc::downgrade(&volume) };
    drop(volume);
    listen::<T>(&core, server).await
}

/// A server of the volume for everybody.
pub(super) fn server<T: Talk>(core: &Core, volume: &Rc<Volume>) -> Rc<Server> {
    let server = Server::new(core.clone(), Limits::default(), doors(1).remove(0));
    let (id, volume) = (VolumeId(VOLUME.into_bytes()), Rc::clone(volume));
    server.add_volume(Served { id, name: "volume".into(), volume, thin: true, access: None });
    let mut catalog = Catalog::default();
    T::announce(&mut catalog, id);
    server.set_catalog(Arc::new(catalog));
    server
}

/// Serves whoever comes.
pub(super) async fn listen<T: Talk>(core: &Core, server: Rc<Server>) -> Result<(), String> {
    let at = SocketAddr::from(([0, 0, 0, 0], PORT));
    let listener = core.listen(at).await.map_err(|e| e.to_string())?;
    server.serve(listener, T::SERVICE).await;
    Ok(())
}

impl Bench {
    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        sleep(self.world.rng().time(Duration::ZERO, most)).await;
    }

    fn set_faults(&self, faults: &DiskFaults) {
        if let Some(disk) = self.node.disk(IMAGE) {
            disk.set_faults(faults.clone());
        }
    }

    /// Ends the node's process, by power or by force.
    async fn crash(&self) {
        let disk = self.node.disk(IMAGE);
        let rng = self.world.rng();
        let fails_syncs = disk.is_some_and(|d| d.faults().sync_error > 0.0);
        // A failed sync loses what a power cut loses, when the process ends.
        let power = fails_syncs || rng.chance(0.6);
        self.book.crash(end(&self.node, &self.world, power));
        self.pause(*rng.pick(&[10, 2000, 20_000])).await;
        if let Some(disk) = self.node.disk(IMAGE) {
            settle(&disk).await;
        }
    }

    /// Something goes wrong, and the clients meanwhile go on.
    async fn mishap(&self) {
        let rng = self.world.rng();
        self.book.allow(ROUND);
        self.pause(500).await;
        match rng.below(8) {
            0..4 => {
                self.crash().await;
                self.set_faults(&draw_faults(&self.world));
                self.node.restart();
            }
            4 => self.cut().await,
            5 => self.slow_down(),
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
            1 => self.world.set_link(client, &self.node, |l| l.cut = true),
            _ => self.world.set_link(&self.node, client, |l| l.cut = true),
        }
        self.pause(*rng.pick(&[100, 5000, 60_000])).await;
        self.world.heal(client, &self.node);
    }

    fn slow_down(&self) {
        let rng = self.world.rng();
        let client = rng.pick(&self.clients);
        let (max, loss) = (rng.time(Duration::ZERO, Duration::from_millis(100)), 0.1 * rng.unit());
        let window = *rng.pick(&[1000, 64 << 10]);
        for (from, to) in [(client, &self.node), (&self.node, client)] {
            self.world.set_link(from, to, |l| {
                (l.max, l.loss, l.window) = (l.min + max, loss, window);
            });
        }
    }

    /// No faults, and the last process: everything must work, and all memory must come back.
    async fn finish(&self) -> Result<(), String> {
        self.crash().await;
        self.set_faults(&DiskFaults::default());
        for client in &self.clients {
            for (from, to) in [(client, &self.node), (&self.node, client)] {
                self.world.set_link(from, to, |l| *l = LinkSetup::default());
            }
        }
        self.book.calm();
        self.book.allow(LAST);
        self.node.restart();
        all_through(&self.book, &self.over, self.clients.len()).await?;
        let running = Rc::clone(&self.running);
        let judged = self.node.run(move |core| judge(core, running));
        let judged = timeout(PATIENCE, judged.join()).await;
        let judged = judged.map_err(|_| "the node does not come to rest")?;
        judged.unwrap_or_else(|| Err("the node crashed by itself".into()))
    }
}

/// Whether the node has come to rest.
async fn judge(core: Core, running: Rc<RefCell<Running>>) -> Result<(), String> {
    let gone = || "the node has not served anybody".to_owned();
    let server = running.borrow().server.upgrade().ok_or_else(gone)?;
    let volume = running.borrow().volume.upgrade().ok_or_else(gone)?;
    // Of clients that vanished it learns when they do not answer its pings.
    while !server.sessions().is_empty() {
        sleep(Duration::from_millis(100)).await;
    }
    let account = core.pool().account();
    volume.close(&account).await.map_err(|e| format!("close: {e}"))?;
    drop(account);
    memory_is_back(core.pool())
}
