//! An established association: its queues and its background tasks.

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

use super::admin::{AdminError, AdminQueue, feature};
use super::connect::{ConnectError, Connector, QueueSpec};
use super::identity::{ControllerCapabilities, Identity, NamespaceDescription};
use super::queue::{Queue, QueueEnd};

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

/// How often a property is polled that is to change.
const PROPERTY_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Delay before an Asynchronous Event Request is repeated after a refusal.
const EVENT_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// How long a controller may take to shut down.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a log is read again because it changed meanwhile.
const MAX_LOG_TRIES: usize = 5;

/// Most namespaces that are listed.
pub(super) const MAX_NAMESPACES: usize = 1 << 16;

/// LSP of the ANA log: groups without their namespaces.
const GROUPS_ONLY: u8 = 1 << 0;

/// An asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Namespaces were added, removed or changed.
    Namespaces,
    /// Access states have changed.
    Ana,
    /// Another event, with its log page.
    Other(LogId),
}

impl Event {
    /// Bits of OAES and of the feature, for the events subscribed to.
    const SUBSCRIBED: u32 = 1 << 8 | 1 << 11;

    /// Parses dword 0 of a completion (NVMe Base 2.0, 5.2).
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

/// Parses groups of the ANA log, without their namespaces (NVMe Base 2.0, 5.16.1.11).
pub(super) fn parse_ana_groups(groups: &[u8]) -> BTreeMap<u32, AnaState> {
    let groups = groups.chunks_exact(size_of::<AnaGroup>());
    let groups = groups.filter_map(|g| AnaGroup::read_from_bytes(g).ok());
    groups.map(|g| (g.group.get(), AnaState(g.state & 0xf))).collect()
}

/// Appends the identifiers, up to `highest`, of the next list of active namespaces (NVMe Base 2.0,
/// 5.17.2.2). Returns whether more may follow.
pub(super) fn append_namespaces(
    out: &mut Vec<u32>,
    list: &[u8],
    highest: u32,
) -> Result<bool, AdminError> {
    let before = out.len();
    for number in list.as_chunks::<4>().0.iter().map(|n| u32::from_le_bytes(*n)) {
        if number == 0 {
            return Ok(false);
        }
        if number <= out.last().copied().unwrap_or(0) || number > highest {
            return Err(AdminError::InvalidResponse("a list of namespaces that is out of order"));
        }
        if out.len() == MAX_NAMESPACES {
            return Err(AdminError::InvalidResponse("a list of namespaces that is too long"));
        }
        out.push(number);
    }
    Ok(out.len() > before)
}

/// An established association.
#[derive(Debug)]
pub(super) struct ActiveAssociation {
    pub(super) admin: AdminQueue,
    pub(super) io: Vec<Queue>,
    pub(super) capabilities: ControllerCapabilities,
    /// Access states by group.
    pub(super) ana: RefCell<BTreeMap<u32, AnaState>>,
    /// Whether the controller is on this machine.
    pub(super) is_local: bool,
    keep_alive: Duration,
    next_queue: Cell<usize>,
}

impl Connector {
    /// Connects all queues and enables the controller.
    pub(super) async fn establish(&self) -> Result<Rc<ActiveAssociation>, ConnectError> {
        let (queue, id) = self.open(QueueSpec::ADMIN).await?;
        let admin = self.admin(&queue);
        let options = &self.options;
        let is_discovery = options.subnqn == DISCOVERY_NQN;
        let cap = admin.property(property::CAP, true).await?;
        enable(&admin, cap).await?;
        let identified = admin.identify(Cns::Controller, 0).await?;
        let page_bytes = 4096 << (cap >> 48 & 0xf);
        let who = (id, options.subnqn.as_str(), is_discovery);
        let mut abilities = ControllerCapabilities::parse(&identified, who, page_bytes)?;
        if !is_discovery {
            abilities.apply_command_set_limits(
                admin.identify(Cns::CommandSetController, 0).await.ok(),
                page_bytes,
            );
        }
        let mut live = ActiveAssociation {
            admin,
            io: Vec::new(),
            capabilities: abilities,
            ana: RefCell::default(),
            is_local: self.is_local.get(),
            keep_alive: options.keep_alive,
            next_queue: Cell::new(0),
        };
        if is_discovery {
            return Ok(Rc::new(live));
        }
        let events = abilities.events & Event::SUBSCRIBED;
        live.admin.set_feature(feature::EVENTS, events).await?;
        live.read_ana().await?;
        self.open_io(&mut live, id, cap).await?;
        Ok(Rc::new(live))
    }

    /// Opens the I/O queues: as many as configured and allowed, at least one.
    async fn open_io(
        &self,
        live: &mut ActiveAssociation,
        id: u16,
        cap: u64,
    ) -> Result<(), ConnectError> {
        let wished = u32::from(self.options.io_queues.max(1)) - 1;
        let granted = live.admin.set_feature(feature::QUEUES, wished << 16 | wished).await?;
        let [a, b, c, d, ..] = granted.to_le_bytes();
        let granted = u16::from_le_bytes([a, b]).min(u16::from_le_bytes([c, d])).saturating_add(1);
        // MQES is 0's based; a fused pair needs three entries.
        let [a, b, ..] = cap.to_le_bytes();
        let most = u16::from_le_bytes([a, b]).saturating_add(1).min(::nvme::host::MAX_IN_FLIGHT);
        let entries = self.options.queue_entries.min(most).max(3);
        let in_capsule_bytes = live.capabilities.in_capsule_bytes;
        for qid in 1..=self.options.io_queues.max(1).min(granted) {
            let wanted = QueueSpec { id: qid, controller: id, entries, in_capsule_bytes };
            live.io.push(self.open(wanted).await?.0);
        }
        Ok(())
    }
}

/// Enables a controller and waits until it is ready (NVMe Base 2.0, 3.5.1).
async fn enable(admin: &AdminQueue, cap: u64) -> Result<(), ConnectError> {
    admin.set_property(property::CC, CC_ENABLED).await?;
    // CAP.TO counts 500 ms.
    let within = Duration::from_millis(500) * u32::try_from(cap >> 24 & 0xff).unwrap_or(0).max(1);
    let until = Instant::now() + within;
    loop {
        let status = admin.property(property::CSTS, false).await?;
        if status & CSTS_CFS != 0 {
            return Err(AdminError::InvalidResponse("the controller reports a fatal error").into());
        }
        if status & CSTS_RDY != 0 {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(ConnectError::TimedOut);
        }
        sleep(PROPERTY_POLL_INTERVAL).await;
    }
}

impl ActiveAssociation {
    /// The I/O queue for the next command, round-robin.
    pub(super) fn queue(&self) -> &Queue {
        let at = self.next_queue.get();
        self.next_queue.set(at.wrapping_add(1));
        self.io.get(at % self.io.len().max(1)).unwrap_or(&self.admin.queue)
    }

    /// Whether no queue has ended or begun to close.
    pub(super) fn is_up(&self) -> bool {
        self.io.iter().chain([&self.admin.queue]).all(Queue::is_open)
    }

    /// Waits for the end of any queue.
    pub(super) async fn wait_end(&self) -> QueueEnd {
        let queues = self.io.iter().chain([&self.admin.queue]);
        select_all(queues.map(|queue| Box::pin(queue.wait_end()))).await.0
    }

    /// How long, from now when it has just ended, commands in doubt may still be executed.
    ///
    /// A controller that ended it itself continues for its quiesce time at most. A silent one may
    /// not have noticed the loss: it does so after at most two timeouts, as it may use
    /// traffic-based keep-alive (NVMe Base 2.1, 3.9.4). Without keep-alive there is no bound.
    pub(super) fn in_doubt_for(&self) -> Duration {
        let ControllerCapabilities { quiesce, keep_alive_unit, .. } = self.capabilities;
        if self.io.iter().chain([&self.admin.queue]).any(Queue::was_ended_by_peer) {
            return quiesce;
        }
        let (timeout, unit) = (self.keep_alive.as_millis(), keep_alive_unit.as_millis().max(1));
        let rounded = u64::try_from(timeout.next_multiple_of(unit)).unwrap_or(u64::MAX);
        match rounded {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms).saturating_mul(2).saturating_add(quiesce),
        }
    }

    /// Closes all queues.
    pub(super) fn close(&self) {
        self.io.iter().chain([&self.admin.queue]).for_each(Queue::close);
    }

    /// Shuts the controller down: writes are then durable and nothing runs any more (NVMe Base 2.0,
    /// 3.6.1).
    pub(super) async fn shut_down(&self) -> Result<(), AdminError> {
        self.io.iter().for_each(Queue::close);
        self.admin.set_property(property::CC, CC_ENABLED | CC_SHUT_DOWN).await?;
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        while self.admin.property(property::CSTS, false).await? & CSTS_SHST != CSTS_SHST_COMPLETE {
            if Instant::now() >= until {
                return Err(AdminError::InvalidResponse("the controller does not shut down"));
            }
            sleep(PROPERTY_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Sends keep-alives for as long as the controller answers (NVMe Base 2.0, 3.9).
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

    /// The next event; `None` once there are no more. Repeats a request that is refused
    /// temporarily: without events a host would not learn that a namespace was replaced.
    pub(super) async fn event(&self) -> Option<Event> {
        loop {
            let sqe = Sqe::new(AdminOpcode::AsyncEventRequest.0, 0, 0);
            let command = Command { sqe, payload: Payload::None, timeout: None };
            let completion = self.admin.queue.submit(command).await.outcome.ok()?;
            match completion.status {
                status if status.is_success() => return Some(Event::parse(completion.result)),
                status if status.is_do_not_retry() => {
                    warn!("a controller refused asynchronous event requests: {status:?}");
                    return None;
                }
                _ => sleep(EVENT_RETRY_PAUSE).await,
            }
        }
    }

    /// Reads the log page of an event, which re-arms the event at the controller.
    pub(super) async fn read_event_log(&self, event: Event) -> Result<(), AdminError> {
        match event {
            Event::Namespaces => {
                self.admin.log((LogId::ChangedNamespaces, 0), 0, 4096).await.map(drop)
            }
            Event::Ana => self.read_ana().await,
            Event::Other(log) => self.admin.log((log, 0), 0, 512).await.map(drop),
        }
    }

    /// Reads one consistent snapshot of the access states (NVMe Base 2.0, 5.16.1.11).
    pub(super) async fn read_ana(&self) -> Result<(), AdminError> {
        if !self.capabilities.ana {
            return Ok(());
        }
        for _ in 0..MAX_LOG_TRIES {
            let header = self.ana_header().await?;
            let length = usize::from(header.groups.get()) * size_of::<AnaGroup>();
            let at = size_of::<AnaHeader>() as u64;
            let groups = self.admin.log((LogId::Ana, GROUPS_ONLY), at, length).await?;
            let after = self.ana_header().await?;
            if (after.change_count, after.groups) == (header.change_count, header.groups) {
                *self.ana.borrow_mut() = parse_ana_groups(&groups);
                return Ok(());
            }
        }
        Err(AdminError::InvalidResponse("access states that keep changing"))
    }

    async fn ana_header(&self) -> Result<AnaHeader, AdminError> {
        let bytes = self.admin.log((LogId::Ana, GROUPS_ONLY), 0, size_of::<AnaHeader>()).await?;
        AnaHeader::read_from_bytes(&bytes)
            .map_err(|_| AdminError::InvalidResponse("a truncated log page"))
    }

    /// The namespaces that this host may use, in order.
    pub(super) async fn namespaces(&self) -> Result<Vec<u32>, AdminError> {
        let mut out: Vec<u32> = Vec::new();
        loop {
            let after = out.last().copied().unwrap_or(0);
            let list = self.admin.identify(Cns::ActiveNamespaces, after).await?;
            if !append_namespaces(&mut out, &list, self.capabilities.namespaces)? {
                return Ok(out);
            }
        }
    }

    /// Describes a namespace; `None` if it does not exist or cannot be used.
    pub(super) async fn describe(
        &self,
        nsid: u32,
    ) -> Result<Option<NamespaceDescription>, AdminError> {
        let list = match self.admin.identify(Cns::Descriptors, nsid).await {
            Ok(list) => list,
            // Inactive, or the controller does not support this list.
            Err(AdminError::Refused(status)) if status.is_do_not_retry() => Vec::new(),
            Err(failed) => return Err(failed),
        };
        match self.admin.identify(Cns::Namespace, nsid).await {
            Ok(bytes) => {
                Ok(NamespaceDescription::parse(&bytes, Identity::parse(&list), &self.capabilities))
            }
            Err(AdminError::Refused(status)) if status.is_do_not_retry() => Ok(None),
            Err(failed) => Err(failed),
        }
    }
}
