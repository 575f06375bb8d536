//! An association that is up: its queues, and what keeps them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ::nvme::Sqe;
use ::nvme::entry::AdminOpcode;
use ::nvme::fabrics::DISCOVERY_NQN;
use ::nvme::host::{Command, Payload};
use ::nvme::identify::Cns;
use ::nvme::log::{AnaGroup, AnaHeader, AnaState, LogId};
use futures_util::future::select_all;
use tokio::time::{Instant, sleep};
use tracing::warn;
use zerocopy::FromBytes;

use super::admin::{Admin, Failed, feature};
use super::connect::{ConnectError, Connector, Wanted};
use super::identity::{Abilities, Described, Identity};
use super::queue::{End, Queue};

/// Offsets of properties in bytes (NVMe Base 2.0, 3.1.3).
mod property {
    pub(super) const CAP: u32 = 0x00;
    pub(super) const CC: u32 = 0x14;
    pub(super) const CSTS: u32 = 0x1c;
}

/// CC: enabled, the NVM command set, entries of 64 and 16 bytes.
const CC_ENABLED: u32 = 1 << 0 | 6 << 16 | 4 << 20;
/// CC.SHN: a normal shutdown.
const CC_SHUT_DOWN: u32 = 0b01 << 14;
/// CSTS: ready; fatal; the state of a shutdown, and its end.
const CSTS_RDY: u64 = 1 << 0;
const CSTS_CFS: u64 = 1 << 1;
const CSTS_SHST: u64 = 0b11 << 2;
const CSTS_SHST_COMPLETE: u64 = 0b10 << 2;

/// How often a property is looked at that is to change.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Pause before events are asked for again that were refused.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// How long a controller may take to shut down.
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(10);

/// Times that a log is read again because it changed meanwhile.
const LOG_TRIES: usize = 5;

/// Most namespaces that are listed.
pub(super) const MOST_NAMESPACES: usize = 1 << 16;

/// LSP of the ANA log: groups without their namespaces.
const GROUPS_ONLY: u8 = 1 << 0;

/// What a controller tells of by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Namespaces have come, gone or changed.
    Namespaces,
    /// Access states have changed.
    Ana,
    /// Something else, of which a log tells.
    Other(LogId),
}

impl Event {
    /// Bits of OAES and of the feature, for what is wanted.
    const WANTED: u32 = 1 << 8 | 1 << 11;

    /// Reads dword 0 of a completion (NVMe Base 2.0, 5.2).
    pub(super) fn parse(result: u64) -> Self {
        const NOTICE: u8 = 0b010;
        let [kind, information, log, ..] = result.to_le_bytes();
        match (kind & 0b111, information) {
            (NOTICE, 0x00) => Self::Namespaces,
            (NOTICE, 0x03) => Self::Ana,
            _ => Self::Other(LogId(log)),
        }
    }
}

/// Reads groups of the ANA log, without their namespaces (NVMe Base 2.0, 5.16.1.11).
pub(super) fn states(groups: &[u8]) -> BTreeMap<u32, AnaState> {
    let groups = groups.chunks_exact(size_of::<AnaGroup>());
    let groups = groups.filter_map(|g| AnaGroup::read_from_bytes(g).ok());
    groups.map(|g| (g.group.get(), AnaState(g.state & 0xf))).collect()
}

/// Appends what the next list of active namespaces (NVMe Base 2.0, 5.17.2.2) has, of identifiers up to `highest`;
/// whether there may be more of them.
pub(super) fn go_on(out: &mut Vec<u32>, list: &[u8], highest: u32) -> Result<bool, Failed> {
    let before = out.len();
    for number in list.as_chunks::<4>().0.iter().map(|n| u32::from_le_bytes(*n)) {
        if number == 0 {
            return Ok(false);
        }
        if number <= out.last().copied().unwrap_or(0) || number > highest {
            return Err(Failed::Nonsense("a list of namespaces that is out of order"));
        }
        if out.len() == MOST_NAMESPACES {
            return Err(Failed::Nonsense("a list of namespaces without end"));
        }
        out.push(number);
    }
    Ok(out.len() > before)
}

/// An association.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) admin: Admin,
    pub(super) io: Vec<Queue>,
    pub(super) abilities: Abilities,
    /// Access states by group.
    pub(super) ana: RefCell<BTreeMap<u32, AnaState>>,
    /// Whether the controller is on this machine.
    pub(super) is_local: bool,
    keep_alive: Duration,
    next: Cell<usize>,
}

impl Connector {
    /// Connects all queues, and makes the controller ready.
    pub(super) async fn bring_up(&self) -> Result<Rc<Live>, ConnectError> {
        let (queue, id) = self.open(Wanted::ADMIN).await?;
        let admin = self.admin(&queue);
        let options = &self.options;
        let is_discovery = options.subnqn == DISCOVERY_NQN;
        let cap = admin.property(property::CAP, true).await?;
        enable(&admin, cap).await?;
        let identified = admin.identify(Cns::Controller, 0).await?;
        let page_bytes = 4096 << (cap >> 48 & 0xf);
        let who = (id, options.subnqn.as_str(), is_discovery);
        let mut abilities = Abilities::parse(&identified, who, page_bytes)?;
        if !is_discovery {
            abilities.limit(admin.identify(Cns::CommandSetController, 0).await.ok(), page_bytes);
        }
        let mut live = Live {
            admin,
            io: Vec::new(),
            abilities,
            ana: RefCell::default(),
            is_local: self.is_local.get(),
            keep_alive: options.keep_alive,
            next: Cell::new(0),
        };
        if is_discovery {
            return Ok(Rc::new(live));
        }
        let events = abilities.events & Event::WANTED;
        live.admin.set_feature(feature::EVENTS, events).await?;
        live.read_ana().await?;
        self.open_io(&mut live, id, cap).await?;
        Ok(Rc::new(live))
    }

    /// Opens the I/O queues: as many as are wanted and allowed, one at least.
    async fn open_io(&self, live: &mut Live, id: u16, cap: u64) -> Result<(), ConnectError> {
        let wished = u32::from(self.options.io_queues.max(1)) - 1;
        let granted = live.admin.set_feature(feature::QUEUES, wished << 16 | wished).await?;
        let [a, b, c, d, ..] = granted.to_le_bytes();
        let granted = u16::from_le_bytes([a, b]).min(u16::from_le_bytes([c, d])).saturating_add(1);
        // MQES is 0's based; a fused pair needs three entries.
        let [a, b, ..] = cap.to_le_bytes();
        let most = u16::from_le_bytes([a, b]).saturating_add(1).min(::nvme::host::MAX_IN_FLIGHT);
        let entries = self.options.queue_entries.min(most).max(3);
        let in_capsule_bytes = live.abilities.in_capsule_bytes;
        for qid in 1..=self.options.io_queues.max(1).min(granted) {
            let wanted = Wanted { id: qid, controller: id, entries, in_capsule_bytes };
            live.io.push(self.open(wanted).await?.0);
        }
        Ok(())
    }
}

/// Enables a controller and waits until it is ready (NVMe Base 2.0, 3.5.1).
async fn enable(admin: &Admin, cap: u64) -> Result<(), ConnectError> {
    admin.set_property(property::CC, CC_ENABLED).await?;
    // CAP.TO counts 500 ms.
    let within = Duration::from_millis(500) * u32::try_from(cap >> 24 & 0xff).unwrap_or(0).max(1);
    let until = Instant::now() + within;
    loop {
        let status = admin.property(property::CSTS, false).await?;
        if status & CSTS_CFS != 0 {
            return Err(Failed::Nonsense("it has failed fatally").into());
        }
        if status & CSTS_RDY != 0 {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(ConnectError::TimedOut);
        }
        sleep(LOOK_AGAIN).await;
    }
}

impl Live {
    /// An I/O queue for the next command: in turn.
    pub(super) fn queue(&self) -> &Queue {
        let at = self.next.get();
        self.next.set(at.wrapping_add(1));
        self.io.get(at % self.io.len().max(1)).unwrap_or(&self.admin.queue)
    }

    /// Whether no queue has ended, or is about to.
    pub(super) fn is_up(&self) -> bool {
        self.io.iter().chain([&self.admin.queue]).all(Queue::is_open)
    }

    /// Waits for the end of any queue.
    pub(super) async fn ended(&self) -> End {
        let queues = self.io.iter().chain([&self.admin.queue]);
        select_all(queues.map(|queue| Box::pin(queue.ended()))).await.0
    }

    /// How long after now, when it has just ended, commands that are in doubt may still be carried out.
    ///
    /// A controller that has ended it itself goes on for its quiesce time at most. One that has fallen silent
    /// does not know yet that it has: it misses its host after two timeouts at the latest, for it may look at
    /// traffic instead of at keep alives (NVMe Base 2.1, 3.9.4). Nobody misses a host without keep alive.
    pub(super) fn in_doubt_for(&self) -> Duration {
        let Abilities { quiesce, keep_alive_unit, .. } = self.abilities;
        if self.io.iter().chain([&self.admin.queue]).any(Queue::has_been_left) {
            return quiesce;
        }
        let (timeout, unit) = (self.keep_alive.as_millis(), keep_alive_unit.as_millis().max(1));
        let rounded = u64::try_from(timeout.next_multiple_of(unit)).unwrap_or(u64::MAX);
        match rounded {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms).saturating_mul(2).saturating_add(quiesce),
        }
    }

    /// Ends all queues.
    pub(super) fn close(&self) {
        self.io.iter().chain([&self.admin.queue]).for_each(Queue::close);
    }

    /// Takes leave: what was written is durable, and nothing is done any more (NVMe Base 2.0, 3.6.1).
    pub(super) async fn shut_down(&self) -> Result<(), Failed> {
        self.io.iter().for_each(Queue::close);
        self.admin.set_property(property::CC, CC_ENABLED | CC_SHUT_DOWN).await?;
        let until = Instant::now() + SHUT_DOWN_WITHIN;
        while self.admin.property(property::CSTS, false).await? & CSTS_SHST != CSTS_SHST_COMPLETE {
            if Instant::now() >= until {
                return Err(Failed::Nonsense("it does not shut down"));
            }
            sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Tells the controller that this host lives, for as long as it answers (NVMe Base 2.0, 3.9).
    pub(super) async fn keep_alive(self: Rc<Self>) {
        while !self.keep_alive.is_zero() {
            sleep(self.keep_alive / 2).await;
            let sqe = Sqe::new(AdminOpcode::KeepAlive.0, 0, 0);
            let command = Command { sqe, payload: Payload::None, timeout: Some(self.keep_alive) };
            let reply = self.admin.queue.submit(command).await;
            if !reply.outcome.is_ok_and(|c| c.status.is_success()) {
                return self.close();
            }
        }
    }

    /// The next event. `None` once there are none any more. A request that is refused for now is made again: whoever
    /// hears of nothing does not hear that a namespace has become another one.
    pub(super) async fn event(&self) -> Option<Event> {
        loop {
            let sqe = Sqe::new(AdminOpcode::AsyncEventRequest.0, 0, 0);
            let command = Command { sqe, payload: Payload::None, timeout: None };
            let completion = self.admin.queue.submit(command).await.outcome.ok()?;
            match completion.status {
                status if status.is_success() => return Some(Event::parse(completion.result)),
                status if status.is_final() => {
                    warn!("a controller takes no requests for events: {status:?}");
                    return None;
                }
                _ => sleep(ASK_AGAIN).await,
            }
        }
    }

    /// Reads what an event is about, so that the controller tells of the next one.
    pub(super) async fn look_into(&self, event: Event) -> Result<(), Failed> {
        match event {
            Event::Namespaces => {
                self.admin.log((LogId::ChangedNamespaces, 0), 0, 4096).await.map(drop)
            }
            Event::Ana => self.read_ana().await,
            Event::Other(log) => self.admin.log((log, 0), 0, 512).await.map(drop),
        }
    }

    /// Reads the access states, all of one moment (NVMe Base 2.0, 5.16.1.11).
    pub(super) async fn read_ana(&self) -> Result<(), Failed> {
        if !self.abilities.ana {
            return Ok(());
        }
        for _ in 0..LOG_TRIES {
            let header = self.ana_header().await?;
            let length = usize::from(header.groups.get()) * size_of::<AnaGroup>();
            let at = size_of::<AnaHeader>() as u64;
            let groups = self.admin.log((LogId::Ana, GROUPS_ONLY), at, length).await?;
            let after = self.ana_header().await?;
            if (after.change_count, after.groups) == (header.change_count, header.groups) {
                *self.ana.borrow_mut() = states(&groups);
                return Ok(());
            }
        }
        Err(Failed::Nonsense("access states that never stand still"))
    }

    async fn ana_header(&self) -> Result<AnaHeader, Failed> {
        let bytes = self.admin.log((LogId::Ana, GROUPS_ONLY), 0, size_of::<AnaHeader>()).await?;
        AnaHeader::read_from_bytes(&bytes).map_err(|_| Failed::Nonsense("a part of a log"))
    }

    /// The namespaces that this host may use, in order.
    pub(super) async fn namespaces(&self) -> Result<Vec<u32>, Failed> {
        let mut out: Vec<u32> = Vec::new();
        loop {
            let after = out.last().copied().unwrap_or(0);
            let list = self.admin.identify(Cns::ActiveNamespaces, after).await?;
            if !go_on(&mut out, &list, self.abilities.namespaces)? {
                return Ok(out);
            }
        }
    }

    /// What a namespace is; `None` for one that there is not, or that cannot be used.
    pub(super) async fn describe(&self, nsid: u32) -> Result<Option<Described>, Failed> {
        let list = match self.admin.identify(Cns::Descriptors, nsid).await {
            Ok(list) => list,
            // It is inactive, or the controller knows no such list.
            Err(Failed::Refused(status)) if status.is_final() => Vec::new(),
            Err(failed) => return Err(failed),
        };
        match self.admin.identify(Cns::Namespace, nsid).await {
            Ok(bytes) => Ok(Described::parse(&bytes, Identity::parse(&list), &self.abilities)),
            Err(Failed::Refused(status)) if status.is_final() => Ok(None),
            Err(failed) => Err(failed),
        }
    }
}
