//! Hosts that take a mirrored volume from each other by persistent reservations, each on paths through
//! all nodes, under everything that befalls a mirror.
//!
//! When PREEMPT has been answered, whatever its loser had sent, on any path, has happened by then or never
//! will; and what it sends from then on, until it registers again, is never carried out. The register
//! checker is told just that, and judges every read by it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::{Checker, Initially, Loss, Outcome, Ticket};
use block::{Account, Blocks, Bufs, Class, Epoch, Error, Failure, Lba, Request};
use peer::NodeId;
use reservation::{Change, Initiator, Kind, Party, Refusal};
use rt::Core;
use rt::sim::{Rng, World};
use tokio::sync::oneshot;
use volume::{Caller, Unaltered, Volume};

use super::{Bench, LivesPlan, Offer, Plan, set_up};

/// Hosts that compete.
const HOSTS: usize = 3;

/// Blocks they compete for.
const BLOCKS: u64 = 24;

/// How long what a node had begun when it died may still be carried out by others.
const DOUBT: Duration = Duration::from_secs(30);

/// Virtual time within which a host takes over when all is well.
const PATIENCE: Duration = Duration::from_secs(60);

/// A host, as the judge knows it.
#[derive(Default)]
struct Host {
    /// Whether it may be registered.
    may: Cell<bool>,
    /// Counts its registrations.
    registrations: Cell<u64>,
    /// Registrations that have been begun and not been answered.
    registering: Cell<usize>,
    /// When it was last left open whether a registration happens.
    unsure: Cell<Option<Duration>>,
    /// When writes were begun that have not been answered, or never will be.
    open: RefCell<BTreeMap<Ticket, Duration>>,
}

/// Knows who may write.
struct Judge {
    world: World,
    rng: Rng,
    checker: RefCell<Checker>,
    /// What strangers write: no read may ever find it.
    strange: RefCell<Checker>,
    kind: Kind,
    hosts: [Host; HOSTS],
    /// Whether there is a reservation for certain.
    reserved: Cell<bool>,
    /// The configuration of the last order to go on alone that is known.
    forced: Cell<Epoch>,
    /// How often a host has lost its rights for certain.
    fenced: Cell<u64>,
    load: Cell<bool>,
    violation: RefCell<Option<String>>,
}

/// A host on its path through one node.
struct Path {
    judge: Rc<Judge>,
    host: usize,
    volume: Rc<Volume>,
    account: Account,
    caller: Rc<Caller>,
    party: Party,
}

/// Plays it.
pub(crate) async fn play(world: World, plan: Plan) -> Result<(), String> {
    let judge = Judge::new(&world);
    let theirs = Rc::clone(&judge);
    let offer: Offer = Rc::new(move |core, node, volume| theirs.paths(core, node, volume));
    // Who registers has a path through every node, and none through a clone.
    let plan = Plan { lives: LivesPlan::Single, ..plan };
    let bench = set_up(&world, plan, Some(offer)).await?;
    judge.begin(bench.block_size);
    let told = Rc::clone(&judge);
    bench.shared.on_crash(move |loss| told.crash(loss));
    bench.begin();
    for _ in 0..world.rng().between(2, 8) {
        bench.mischief().await?;
        judge.look_at(&bench);
        judge.verdict()?;
    }
    bench.calm_down().await?;
    judge.look_at(&bench);
    // All is well: somebody takes over, and everybody else is out.
    let before = judge.fenced.get();
    let taken = async {
        while judge.fenced.get() <= before && judge.violation.borrow().is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let taken = tokio::time::timeout(PATIENCE, taken).await;
    judge.verdict()?;
    taken.map_err(|_| format!("nobody takes over within {PATIENCE:?}: {}", gates(&bench)))?;
    world.note(format!("{} hosts were fenced", judge.fenced.get()));
    judge.load.set(false);
    tokio::time::sleep(Duration::from_secs(20)).await;
    judge.verdict()?;
    bench.settled().await
}

/// What the nodes know, for the reader of a report.
fn gates(bench: &Bench) -> String {
    let gate = |volume: &Rc<Volume>| format!("{:?}", volume.gate());
    let of = |node: &Rc<super::Node>| (node.id, node.volume.borrow().as_ref().map(gate));
    format!("{:?}", bench.nodes.iter().map(of).collect::<Vec<_>>())
}

impl Judge {
    fn new(world: &World) -> Rc<Self> {
        let rng = Rng::new(world.seed(), "fencing");
        let kinds = [
            Kind::WriteExclusiveRegistrants,
            Kind::ExclusiveAccessRegistrants,
            Kind::WriteExclusiveAll,
            Kind::ExclusiveAccessAll,
        ];
        let checker = |volume| RefCell::new(Checker::new(volume, 512, Initially::Zeroes));
        Rc::new(Self {
            world: world.clone(),
            kind: *rng.pick(&kinds),
            rng,
            checker: checker(1),
            strange: checker(2),
            hosts: Default::default(),
            reserved: Cell::new(false),
            forced: Cell::default(),
            fenced: Cell::new(0),
            load: Cell::new(true),
            violation: RefCell::default(),
        })
    }

    fn begin(&self, block_size: u32) {
        self.checker.replace(Checker::new(1, block_size, Initially::Zeroes));
        self.strange.replace(Checker::new(2, block_size, Initially::Zeroes));
        self.begin_anew();
    }

    /// The paths through a node that has come up.
    fn paths(self: &Rc<Self>, core: &Core, node: NodeId, volume: &Rc<Volume>) {
        let Some(gate) = volume.gate() else { return self.object("it keeps no reservations") };
        for host in 0..HOSTS {
            let name = format!("iqn.2026-01.example:host{host}");
            let party = Party { initiator: Initiator::Iscsi { name, isid: [0; 6] }, port: node.0 };
            let path = Path {
                judge: Rc::clone(self),
                host,
                volume: Rc::clone(volume),
                account: core.pool().account(),
                caller: gate.enter(party.clone(), Box::new(|_| {})),
                party,
            };
            let path = Rc::new(path);
            for part in 0..3 {
                let path = Rc::clone(&path);
                tokio::task::spawn_local(async move {
                    while path.judge.load.get() {
                        // One that only reads, and one that writes on while the other fences.
                        match part {
                            0 => path.read().await,
                            1 => path.write().await,
                            _ => path.fence().await,
                        }
                    }
                });
            }
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "errors are passed as they come")]
    fn object(&self, what: impl ToString) {
        self.violation.borrow_mut().get_or_insert(what.to_string());
    }

    fn verdict(&self) -> Result<(), String> {
        self.violation.borrow_mut().take().map_or(Ok(()), Err)
    }

    fn crash(&self, loss: Loss) {
        self.checker.borrow_mut().crash(loss);
    }

    /// Nobody has reserved anything, as far as is known: everybody may write.
    fn begin_anew(&self) {
        self.reserved.set(false);
        self.hosts.iter().for_each(|host| host.may.set(true));
    }

    /// An operator may have had a replica go on with what it has, whatever others had: who is
    /// registered there is anybody's guess.
    fn look_at(&self, bench: &Bench) {
        if self.forced.replace(bench.forced.get()) != bench.forced.get() {
            self.begin_anew();
        }
        // What nobody has heard of for so long has happened by now, or never will.
        let before = self.world.now().saturating_sub(DOUBT * 2);
        for host in &self.hosts {
            let mut checker = self.checker.borrow_mut();
            host.open.borrow_mut().retain(|ticket, began| {
                let open = *began >= before;
                if !open {
                    checker.end(*ticket, Outcome::Failed);
                }
                open
            });
        }
    }

    /// A registration of a host begins.
    fn registers(&self, host: usize) {
        let host = &self.hosts[host];
        host.may.set(true);
        host.registrations.update(|n| n + 1);
        host.registering.update(|n| n + 1);
    }

    /// Whether a host registers now, as far as can be told.
    fn may_register(&self, host: usize) -> bool {
        let host = &self.hosts[host];
        let unsure = host.unsure.get().is_some_and(|since| self.world.now() < since + DOUBT);
        unsure || host.registering.get() > 0
    }

    /// PREEMPT of `victim` was answered. `before`: its registrations when that began.
    fn preempted(&self, victim: usize, before: u64) {
        let host = &self.hosts[victim];
        let has_begun_anew = host.registrations.get() != before || self.may_register(victim);
        if !self.reserved.get() || has_begun_anew {
            return;
        }
        host.may.set(false);
        self.fenced.update(|n| n + 1);
        let mut checker = self.checker.borrow_mut();
        host.open.take().into_keys().for_each(|ticket| checker.end(ticket, Outcome::Failed));
    }
}

/// A registration under way: if its node dies, nobody knows what becomes of it.
struct Registering<'a>(&'a Path);

impl Drop for Registering<'_> {
    fn drop(&mut self) {
        let host = self.0.host();
        host.registering.update(|n| n - 1);
        host.unsure.set(Some(self.0.judge.world.now()));
    }
}

impl Path {
    fn host(&self) -> &Host {
        &self.judge.hosts[self.host]
    }

    fn key(host: usize) -> u64 {
        host as u64 + 1
    }

    async fn alter(&self, change: Change) -> Result<(), Unaltered> {
        let (answer, answered) = oneshot::channel();
        self.volume.alter(
            self.party.clone(),
            change,
            || true,
            move |r| {
                // Its node may die while nobody waits.
                let _ = answer.send(r);
            },
        );
        answered.await.unwrap_or(Err(Unaltered::Failed(Error::Gone)))
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.judge.rng.time(Duration::ZERO, most)).await;
    }

    /// Registers, reserves, or takes over.
    async fn fence(&self) {
        self.pause(3000).await;
        if !self.caller.rights().registered {
            return self.register().await;
        }
        let key = Self::key(self.host);
        if !self.judge.reserved.get() {
            let reserved = self.alter(Change::Reserve { key, kind: self.judge.kind }).await;
            // The answer of whoever did it may have been lost with its node.
            let found = self.volume.reservations().await;
            if reserved.is_ok() || found.is_ok_and(|table| table.reservation.is_some()) {
                self.judge.reserved.set(true);
            }
            return;
        }
        let victim = (self.host + 1 + self.judge.rng.below(HOSTS as u64 - 1) as usize) % HOSTS;
        let before = self.judge.hosts[victim].registrations.get();
        if self.judge.may_register(victim) {
            return;
        }
        let (kind, abort) = (Some(self.judge.kind), self.judge.rng.chance(0.5));
        let victim_key = Self::key(victim);
        let preempt = Change::Preempt { key, victim: victim_key, kind, abort };
        match self.alter(preempt).await {
            Ok(()) => self.judge.preempted(victim, before),
            Err(Unaltered::Refused(Refusal::Conflict) | Unaltered::Failed(_)) => {
                self.look_for(victim, before).await;
            }
            Err(other) => self.judge.object(format!("PREEMPT ends with {other:?}")),
        }
    }

    /// As fence agents do: a key that is gone is as good as one that was preempted.
    async fn look_for(&self, victim: usize, before: u64) {
        let Ok(table) = self.volume.reservations().await else { return };
        let is_gone = table.registrants().iter().all(|r| r.key != Self::key(victim));
        if is_gone && table.reservation.is_some() && !self.judge.may_register(victim) {
            self.judge.preempted(victim, before);
        }
    }

    async fn register(&self) {
        self.judge.registers(self.host);
        let unsure = self.host().unsure.get();
        let under_way = Registering(self);
        let change = Change::Register {
            key: 0,
            new_key: Self::key(self.host),
            ignore_key: true,
            persists: true,
            ports: vec![],
            also: vec![],
        };
        let answer = self.alter(change).await;
        drop(under_way);
        if !matches!(answer, Err(Unaltered::Failed(_))) {
            self.host().unsure.set(unsure);
        }
    }

    fn range(&self) -> Blocks {
        let count = self.judge.rng.between(1, 4);
        Blocks::new(Lba(self.judge.rng.between(0, BLOCKS - count)), count)
    }

    async fn send(&self, request: Request) -> Result<Bufs, Failure> {
        let (answer, answered) = oneshot::channel();
        self.volume.start_for(&self.caller, request, &self.account, move |r| {
            let _ = answer.send(r);
        });
        let result = answered.await.unwrap_or(Err(Failure::Device(Error::Gone)));
        if result.is_err() {
            self.pause(500).await;
        }
        result
    }

    async fn read(&self) {
        self.pause(20).await;
        let range = self.range();
        let ticket = self.judge.checker.borrow_mut().begin_read(range);
        let result = self.send(Request::Read { range }).await;
        let mut checker = self.judge.checker.borrow_mut();
        match result {
            Ok(data) => {
                if let Err(violation) = checker.end_read(ticket, &data) {
                    self.judge.object(violation);
                }
            }
            Err(_) => checker.end(ticket, Outcome::Failed),
        }
    }

    async fn write(&self) {
        self.pause(20).await;
        let (range, host) = (self.range(), self.host());
        let bytes = range.count as usize * self.volume.info().block_size as usize;
        let Ok(credit) = self.account.credit(bytes, Class::Immediate).await else { return };
        let (may, registrations) = (host.may.get(), host.registrations.get());
        let checker = if may { &self.judge.checker } else { &self.judge.strange };
        let ticket = checker.borrow_mut().begin_write(range, self.host as u32 + 1, false);
        let data = checker.borrow().data(ticket, &credit);
        drop(credit);
        if may {
            host.open.borrow_mut().insert(ticket, self.judge.world.now());
        }
        let result = self.send(Request::Write { at: range.at, data, fua: false }).await;
        if !may {
            if result.is_ok() && host.registrations.get() == registrations && !host.may.get() {
                self.judge.object(format!("host {} writes without a right", self.host));
            }
            return;
        }
        // Who was fenced meanwhile has been judged.
        if matches!(result, Err(Failure::Device(Error::Fenced | Error::Gone))) {
            return;
        }
        if host.open.borrow_mut().remove(&ticket).is_some() {
            let outcome = if result.is_ok() { Outcome::Done } else { Outcome::Failed };
            checker.borrow_mut().end(ticket, outcome);
        }
    }
}
