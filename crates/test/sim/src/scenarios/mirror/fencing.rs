//! Hosts that take a mirrored volume from each other by persistent reservations, each with paths
//! through all nodes, under all faults of the mirror scenario.
//!
//! Once PREEMPT is answered, each command that the preempted host had sent, on any path, has taken
//! effect or never will; commands that it sends later, until it registers again, never take effect.
//! The register checker applies this rule to every read.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::{Checker, CrashKind, InitialContents, Outcome, Ticket};
use block::{Account, Blocks, Bufs, Epoch, Error, Lba, MemoryClass, Request, RequestError};
use peer::NodeId;
use reservation::{Change, Initiator, ItNexus, ReservationError, ReservationType};
use rt::Core;
use rt::sim::{Rng, World};
use tokio::sync::oneshot;
use volume::{ReservationChangeError, Volume, VolumeClient};

use super::{CloneMode, ExportVolume, MirrorTestbed, ScenarioConfig, set_up};

/// Number of competing hosts.
const COMPETING_HOSTS: usize = 3;

/// Blocks they compete for.
const BLOCKS: u64 = 24;

/// How long other nodes may still carry out commands of a node that died.
const UNKNOWN_OUTCOME_LIMIT: Duration = Duration::from_secs(30);

/// Virtual time limit for a takeover without faults.
const TAKEOVER_LIMIT: Duration = Duration::from_secs(60);

/// A host, as the checker knows it.
#[derive(Default)]
struct CompetingHost {
    /// Whether it may be registered.
    may_write: Cell<bool>,
    /// Counts its registrations.
    registrations: Cell<u64>,
    /// Registrations begun and not yet answered.
    registering: Cell<usize>,
    /// When the outcome of a registration last became unknown.
    unknown_since: Cell<Option<Duration>>,
    /// When each unanswered write began.
    open: RefCell<BTreeMap<Ticket, Duration>>,
}

/// Tracks which hosts may write.
struct ReservationChecker {
    world: World,
    rng: Rng,
    checker: RefCell<Checker>,
    /// Writes of fenced hosts: no read may ever return them.
    fenced_writes: RefCell<Checker>,
    kind: ReservationType,
    hosts: [CompetingHost; COMPETING_HOSTS],
    /// Whether a reservation certainly exists.
    reserved: Cell<bool>,
    /// The epoch of the last known forced takeover.
    last_forced_epoch: Cell<Epoch>,
    /// How often a host has certainly lost its rights.
    fenced: Cell<u64>,
    load_enabled: Cell<bool>,
    violation: RefCell<Option<String>>,
}

/// A host on one path, through one node.
struct HostPath {
    judge: Rc<ReservationChecker>,
    host: usize,
    volume: Rc<Volume>,
    account: Account,
    caller: Rc<VolumeClient>,
    party: ItNexus,
}

/// Runs the scenario.
pub(crate) async fn run(world: World, plan: ScenarioConfig) -> Result<(), String> {
    let judge = ReservationChecker::new(&world);
    let theirs = Rc::clone(&judge);
    let offer: ExportVolume =
        Rc::new(move |core, node, volume| theirs.spawn_paths(core, node, volume));
    // A host that registers has a path through every node, and none through a clone.
    let plan = ScenarioConfig { clone_mode: CloneMode::NoClones, ..plan };
    let bench = set_up(&world, plan, Some(offer)).await?;
    judge.begin(bench.block_size);
    let on_crash = Rc::clone(&judge);
    bench.shared.on_crash(move |loss| on_crash.crash(loss));
    bench.start_all();
    for _ in 0..world.rng().between(2, 8) {
        bench.inject_random_fault().await?;
        judge.check_forced_primary(&bench);
        judge.first_violation()?;
    }
    bench.heal_and_wait_in_sync().await?;
    judge.check_forced_primary(&bench);
    // Without faults, one host takes over and all others are fenced.
    let before = judge.fenced.get();
    let taken = async {
        while judge.fenced.get() <= before && judge.violation.borrow().is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let taken = tokio::time::timeout(TAKEOVER_LIMIT, taken).await;
    judge.first_violation()?;
    taken.map_err(|_| {
        format!("no host takes over within {TAKEOVER_LIMIT:?}: {}", describe_gates(&bench))
    })?;
    world.note(format!("{} hosts were fenced", judge.fenced.get()));
    judge.load_enabled.set(false);
    tokio::time::sleep(Duration::from_secs(20)).await;
    judge.first_violation()?;
    bench.check_converged().await
}

/// The state of the nodes, for the report.
fn describe_gates(bench: &MirrorTestbed) -> String {
    let gate = |volume: &Rc<Volume>| format!("{:?}", volume.reservation_gate());
    let of = |node: &Rc<super::Node>| (node.id, node.volume.borrow().as_ref().map(gate));
    format!("{:?}", bench.nodes.iter().map(of).collect::<Vec<_>>())
}

impl ReservationChecker {
    fn new(world: &World) -> Rc<Self> {
        let rng = Rng::new(world.seed(), "fencing");
        let kinds = [
            ReservationType::WriteExclusiveRegistrantsOnly,
            ReservationType::ExclusiveAccessRegistrantsOnly,
            ReservationType::WriteExclusiveAllRegistrants,
            ReservationType::ExclusiveAccessAllRegistrants,
        ];
        let checker = |volume| RefCell::new(Checker::new(volume, 512, InitialContents::Zeroes));
        Rc::new(Self {
            world: world.clone(),
            kind: *rng.pick(&kinds),
            rng,
            checker: checker(1),
            fenced_writes: checker(2),
            hosts: Default::default(),
            reserved: Cell::new(false),
            last_forced_epoch: Cell::default(),
            fenced: Cell::new(0),
            load_enabled: Cell::new(true),
            violation: RefCell::default(),
        })
    }

    fn begin(&self, block_size: u32) {
        self.checker.replace(Checker::new(1, block_size, InitialContents::Zeroes));
        self.fenced_writes.replace(Checker::new(2, block_size, InitialContents::Zeroes));
        self.clear_reservations();
    }

    /// Opens the paths through a node that has started.
    fn spawn_paths(self: &Rc<Self>, core: &Core, node: NodeId, volume: &Rc<Volume>) {
        let Some(gate) = volume.reservation_gate() else {
            return self.report_violation("the volume has no reservations");
        };
        for host in 0..COMPETING_HOSTS {
            let name = format!("iqn.2026-01.example:host{host}");
            let party =
                ItNexus { initiator: Initiator::Iscsi { name, isid: [0; 6] }, port: node.0 };
            let path = HostPath {
                judge: Rc::clone(self),
                host,
                volume: Rc::clone(volume),
                account: core.buffer_pool().account(),
                caller: gate.attach_client(party.clone(), Box::new(|_| {})),
                party,
            };
            let path = Rc::new(path);
            for part in 0..3 {
                let path = Rc::clone(&path);
                tokio::task::spawn_local(async move {
                    while path.judge.load_enabled.get() {
                        // One client only reads, and one keeps writing while the other fences.
                        match part {
                            0 => path.read().await,
                            1 => path.write().await,
                            _ => path.run_reservation_step().await,
                        }
                    }
                });
            }
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "errors are passed as they come")]
    fn report_violation(&self, what: impl ToString) {
        self.violation.borrow_mut().get_or_insert(what.to_string());
    }

    fn first_violation(&self) -> Result<(), String> {
        self.violation.borrow_mut().take().map_or(Ok(()), Err)
    }

    fn crash(&self, loss: CrashKind) {
        self.checker.borrow_mut().crash(loss);
    }

    /// No reservation is known: every host may write.
    fn clear_reservations(&self) {
        self.reserved.set(false);
        self.hosts.iter().for_each(|host| host.may_write.set(true));
    }

    /// An operator may have forced a replica to continue with its own data, whatever the others
    /// held. The registrations it holds are unknown.
    fn check_forced_primary(&self, bench: &MirrorTestbed) {
        if self.last_forced_epoch.replace(bench.last_forced_epoch.get())
            != bench.last_forced_epoch.get()
        {
            self.clear_reservations();
        }
        // A command unanswered for so long has taken effect by now, or never will.
        let before = self.world.now().saturating_sub(UNKNOWN_OUTCOME_LIMIT * 2);
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

    /// A host begins to register.
    fn begin_registration(&self, host: usize) {
        let host = &self.hosts[host];
        host.may_write.set(true);
        host.registrations.update(|n| n + 1);
        host.registering.update(|n| n + 1);
    }

    /// Whether the host is registered now, as far as is known.
    fn may_register(&self, host: usize) -> bool {
        let host = &self.hosts[host];
        let unsure = host
            .unknown_since
            .get()
            .is_some_and(|since| self.world.now() < since + UNKNOWN_OUTCOME_LIMIT);
        unsure || host.registering.get() > 0
    }

    /// PREEMPT of `victim` was answered. `before`: the victim's registrations when it began.
    fn record_preempted(&self, victim: usize, before: u64) {
        let host = &self.hosts[victim];
        let has_begun_anew = host.registrations.get() != before || self.may_register(victim);
        if !self.reserved.get() || has_begun_anew {
            return;
        }
        host.may_write.set(false);
        self.fenced.update(|n| n + 1);
        let mut checker = self.checker.borrow_mut();
        host.open.take().into_keys().for_each(|ticket| checker.end(ticket, Outcome::Failed));
    }
}

/// A registration in flight. If its node dies, the outcome is unknown.
struct PendingRegistration<'a>(&'a HostPath);

impl Drop for PendingRegistration<'_> {
    fn drop(&mut self) {
        let host = self.0.host();
        host.registering.update(|n| n - 1);
        host.unknown_since.set(Some(self.0.judge.world.now()));
    }
}

impl HostPath {
    fn host(&self) -> &CompetingHost {
        &self.judge.hosts[self.host]
    }

    fn key(host: usize) -> u64 {
        host as u64 + 1
    }

    async fn change_reservation(&self, change: Change) -> Result<(), ReservationChangeError> {
        let (answer, answered) = oneshot::channel();
        self.volume.change_reservations(
            self.party.clone(),
            change,
            || true,
            move |r| {
                // The node may die before the answer is received.
                let _ = answer.send(r);
            },
        );
        answered.await.unwrap_or(Err(ReservationChangeError::DeviceError(Error::Gone)))
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.judge.rng.duration_between(Duration::ZERO, most)).await;
    }

    /// Registers, reserves, or takes the reservation over.
    async fn run_reservation_step(&self) {
        self.pause(3000).await;
        if !self.caller.rights().is_registered {
            return self.register().await;
        }
        let key = Self::key(self.host);
        if !self.judge.reserved.get() {
            let reserved =
                self.change_reservation(Change::Reserve { key, kind: self.judge.kind }).await;
            // The answer to an earlier registration may have been lost with its node.
            let found = self.volume.read_reservations().await;
            if reserved.is_ok() || found.is_ok_and(|table| table.reservation.is_some()) {
                self.judge.reserved.set(true);
            }
            return;
        }
        let victim = (self.host + 1 + self.judge.rng.below(COMPETING_HOSTS as u64 - 1) as usize)
            % COMPETING_HOSTS;
        let before = self.judge.hosts[victim].registrations.get();
        if self.judge.may_register(victim) {
            return;
        }
        let (kind, abort) = (Some(self.judge.kind), self.judge.rng.chance(0.5));
        let victim_key = Self::key(victim);
        let preempt = Change::Preempt { key, preempt_key: victim_key, kind, abort };
        match self.change_reservation(preempt).await {
            Ok(()) => self.judge.record_preempted(victim, before),
            Err(
                ReservationChangeError::Rejected(ReservationError::Conflict)
                | ReservationChangeError::DeviceError(_),
            ) => {
                self.check_preempted(victim, before).await;
            }
            Err(other) => self.judge.report_violation(format!("PREEMPT ends with {other:?}")),
        }
    }

    /// As fence agents do: treats a missing key as preempted.
    async fn check_preempted(&self, victim: usize, before: u64) {
        let Ok(table) = self.volume.read_reservations().await else { return };
        let is_gone = table.registrants().iter().all(|r| r.key != Self::key(victim));
        if is_gone && table.reservation.is_some() && !self.judge.may_register(victim) {
            self.judge.record_preempted(victim, before);
        }
    }

    async fn register(&self) {
        self.judge.begin_registration(self.host);
        let unsure = self.host().unknown_since.get();
        let under_way = PendingRegistration(self);
        let change = Change::Register {
            key: 0,
            new_key: Self::key(self.host),
            ignore_key: true,
            persist: true,
            ports: vec![],
            other_initiators: vec![],
        };
        let answer = self.change_reservation(change).await;
        drop(under_way);
        if !matches!(answer, Err(ReservationChangeError::DeviceError(_))) {
            self.host().unknown_since.set(unsure);
        }
    }

    fn range(&self) -> Blocks {
        let count = self.judge.rng.between(1, 4);
        Blocks::new(Lba(self.judge.rng.between(0, BLOCKS - count)), count)
    }

    async fn send(&self, request: Request) -> Result<Bufs, RequestError> {
        let (answer, answered) = oneshot::channel();
        self.volume.start_for(&self.caller, request, &self.account, move |r| {
            let _ = answer.send(r);
        });
        let result = answered.await.unwrap_or(Err(RequestError::Device(Error::Gone)));
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
                    self.judge.report_violation(violation);
                }
            }
            Err(_) => checker.end(ticket, Outcome::Failed),
        }
    }

    async fn write(&self) {
        self.pause(20).await;
        let (range, host) = (self.range(), self.host());
        let bytes = range.count as usize * self.volume.info().block_size as usize;
        let Ok(credit) = self.account.credit(bytes, MemoryClass::LocalIo).await else { return };
        let (may, registrations) = (host.may_write.get(), host.registrations.get());
        let checker = if may { &self.judge.checker } else { &self.judge.fenced_writes };
        let ticket = checker.borrow_mut().begin_write(range, self.host as u32 + 1, false);
        let data = checker.borrow().data(ticket, &credit);
        drop(credit);
        if may {
            host.open.borrow_mut().insert(ticket, self.judge.world.now());
        }
        let result = self.send(Request::Write { at: range.at, data, fua: false }).await;
        if !may {
            if result.is_ok() && host.registrations.get() == registrations && !host.may_write.get()
            {
                self.judge
                    .report_violation(format!("host {} writes without permission", self.host));
            }
            return;
        }
        // The checker has already handled hosts that were fenced meanwhile.
        if matches!(result, Err(RequestError::Device(Error::Fenced | Error::Gone))) {
            return;
        }
        if host.open.borrow_mut().remove(&ticket).is_some() {
            let outcome = if result.is_ok() { Outcome::Done } else { Outcome::Failed };
            checker.borrow_mut().end(ticket, outcome);
        }
    }
}
