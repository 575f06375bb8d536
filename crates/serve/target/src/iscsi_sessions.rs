//! The iSCSI sessions and logical units of one core, and the events of their connections.

mod event;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use block::Access;
use iscsi::name::Name;
use iscsi::params::Params;
use iscsi::pdu::LoginStatus;
use iscsi::target::{Config, LoginAttempt, NegotiatedSession as Negotiated};
use reservation::{Initiator, ItNexus};
use scsi::{
    AttentionScope, CopyIoError, LogicalUnit, Lun, Nexus, NexusId, PortGroup, SharedUnitState,
    TargetPort, UnitAttention, UnitConfig,
};
use tokio::time::Instant;
use volume::{ReservationGate, VolumeClient};

use crate::catalog::{
    AccessRule, Catalog, ChapCredentials, IscsiTarget, NodeIndex, Unavailability, VolumeId,
};
use crate::connection::Inbox;
use crate::duplicate_names::{DuplicateNames, ReplacementLog};
use crate::limits::{Limits, MAX_TRANSFER_BYTES};
use crate::principal::{Principal, SessionEnded};
use crate::served_volumes::{ServedVolume, ServedVolumes, VolumeSpace};

pub(crate) use event::{Event, TaskBarrier, Ticket};

/// State shared by all iSCSI connections of a core.
#[derive(Debug)]
pub(crate) struct IscsiCore {
    pub(crate) config: Arc<Config>,
    units: RefCell<BTreeMap<VolumeId, Rc<RefCell<LogicalUnit>>>>,
    sessions: RefCell<BTreeMap<u16, Rc<Session>>>,
    last_tsih: Cell<u16>,
}

/// A normal session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) tsih: u16,
    /// Identifier of its one connection.
    cid: u16,
    /// The initiator's address.
    peer: SocketAddr,
    pub(crate) params: Params,
    pub(crate) initiator: Name,
    pub(crate) isid: [u8; 6],
    pub(crate) target: Option<Name>,
    /// The rule that admitted it; if the rule changes the session ends.
    pub(crate) rule: AccessRule<ChapCredentials>,
    /// Tag of its portal group.
    pub(crate) portal_group: u16,
    /// Inbox of its current connection: its units' notices go there, whichever connection created
    /// it.
    inbox: Rc<RefCell<Inbox<Event>>>,
    /// Set when the session ends. Commands not started by then never are: the initiator may have
    /// given them up and written the same blocks through its next session.
    pub(crate) ended: SessionEnded,
    /// The volumes that its target maps for it.
    lun_map: RefCell<BTreeMap<Lun, VolumeId>>,
    /// The first volume of each number that is no longer mapped. Its initiator may still have a
    /// disk of that number, and writes to it must not reach another volume.
    former_volumes: RefCell<BTreeMap<Lun, VolumeId>>,
    /// The mapped units that are present; all but those in `away`.
    units: RefCell<BTreeMap<Lun, Rc<SessionUnit>>>,
    unavailable: RefCell<BTreeMap<Lun, Unavailability>>,
    luns: RefCell<Rc<[Lun]>>,
}

/// A logical unit as one session sees it.
#[derive(Debug)]
pub(crate) struct SessionUnit {
    pub(crate) lun: Lun,
    pub(crate) served: Rc<ServedVolume>,
    pub(crate) state: Rc<RefCell<LogicalUnit>>,
    pub(crate) nexus: NexusId,
    /// The nexus as the volume knows it.
    pub(crate) caller: Rc<VolumeClient>,
}

impl SessionUnit {
    /// The unit's shared state.
    pub(crate) fn shared_state(&self) -> SharedUnitState {
        shared_state(&self.caller)
    }
}

impl Session {
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.get()
    }

    /// Whether it is a session of the same initiator port with the same target.
    fn is_same_nexus(&self, attempt: &LoginAttempt) -> bool {
        (&self.initiator, self.isid, &self.target)
            == (&attempt.initiator, attempt.isid, &attempt.target)
    }

    /// On whose behalf its commands copy, and until when.
    pub(crate) fn principal(&self) -> (Principal, SessionEnded) {
        let principal = Principal {
            initiator: self.initiator.clone(),
            isid: self.isid,
            rule: self.rule.clone(),
        };
        (principal, self.ended.clone())
    }

    /// Sends an event to its connection.
    pub(crate) fn send_event(&self, what: Event) {
        self.inbox.borrow().push(what);
    }

    /// A login from `by` replaces this session: logs it if two hosts seem to share the initiator's
    /// name.
    fn log_replacement(&self, duplicates: &RefCell<DuplicateNames>, by: SocketAddr) {
        let target = self.target.as_ref().map_or("", Name::as_str);
        let names = (self.initiator.as_str(), target);
        let addresses = [self.peer.ip(), by.ip()];
        let replacement = duplicates.borrow_mut().record_replaced(Instant::now(), names, addresses);
        if let ReplacementLog::Duplicate(shared) = replacement {
            let [one, other] = shared.addresses;
            tracing::warn!(
                initiator = names.0, target, %one, %other, times = shared.times,
                "two hosts use the same initiator name and end each other's sessions: give each its own name"
            );
        }
    }

    /// Continues the session through another connection. The old connection and its tasks end; the
    /// nexuses do not.
    fn reinstate(
        &self,
        admission: &AccessRule<ChapCredentials>,
        params: &Params,
        (inbox, peer): (Inbox<Event>, SocketAddr),
    ) -> Self {
        self.send_event(Event::Replaced);
        self.ended.set();
        self.inbox.replace(inbox);
        Self {
            tsih: self.tsih,
            cid: self.cid,
            peer,
            params: params.clone(),
            initiator: self.initiator.clone(),
            isid: self.isid,
            target: self.target.clone(),
            rule: admission.clone(),
            portal_group: self.portal_group,
            inbox: Rc::clone(&self.inbox),
            ended: SessionEnded::default(),
            lun_map: RefCell::new(self.lun_map.take()),
            former_volumes: RefCell::new(self.former_volumes.take()),
            units: RefCell::new(self.units.take()),
            unavailable: RefCell::new(self.unavailable.take()),
            luns: RefCell::new(self.luns()),
        }
    }

    /// A check whether the session still exists, for tasks that outlive it.
    pub(crate) fn liveness_check(&self) -> impl Fn() -> bool + use<> {
        let ended = self.ended.clone();
        move || !ended.get()
    }

    pub(crate) fn unit_at(&self, lun: Lun) -> Option<Rc<SessionUnit>> {
        self.units.borrow().get(&lun).cloned()
    }

    /// Why a mapped unit is not present.
    pub(crate) fn unavailability(&self, lun: Lun) -> Option<Unavailability> {
        self.unavailable.borrow().get(&lun).copied()
    }

    /// Whether a unit still belongs to the session.
    pub(crate) fn contains(&self, unit: &SessionUnit) -> bool {
        self.units.borrow().get(&unit.lun).is_some_and(|u| std::ptr::eq(&**u, unit))
    }

    pub(crate) fn unit(&self, id: VolumeId) -> Option<Rc<SessionUnit>> {
        self.units.borrow().values().find(|u| u.served.id == id).cloned()
    }

    pub(crate) fn units(&self) -> Vec<Rc<SessionUnit>> {
        self.units.borrow().values().cloned().collect()
    }

    /// The numbers that its target maps for the session, in ascending order.
    pub(crate) fn luns(&self) -> Rc<[Lun]> {
        Rc::clone(&self.luns.borrow())
    }
}

impl IscsiCore {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            config: Arc::new(config(limits)),
            units: RefCell::default(),
            sessions: RefCell::default(),
            last_tsih: Cell::new(0),
        }
    }

    /// Whether a session has this handle.
    pub(crate) fn has_session(&self, tsih: u16) -> bool {
        self.sessions.borrow().contains_key(&tsih)
    }

    /// An unused handle.
    pub(crate) fn next_tsih(&self) -> u16 {
        let mut tsih = self.last_tsih.get();
        loop {
            tsih = tsih.wrapping_add(1).max(1);
            if !self.has_session(tsih) {
                self.last_tsih.set(tsih);
                return tsih;
            }
        }
    }

    /// Whether a login replaces a session.
    pub(crate) fn would_replace(&self, attempt: &LoginAttempt) -> bool {
        self.sessions.borrow().values().any(|session| session.is_same_nexus(attempt))
    }

    /// The session whose connection a login reinstates (RFC 7143 6.3.4), in portal group `group`.
    pub(crate) fn session_to_reinstate(
        &self,
        attempt: &LoginAttempt,
        group: u16,
    ) -> Result<Rc<Session>, LoginStatus> {
        let is_it = |s: &&Rc<Session>| s.is_same_nexus(attempt) && s.portal_group == group;
        let session = self.sessions.borrow().get(&attempt.tsih).filter(is_it).cloned();
        let session = session.ok_or(LoginStatus::NoSession)?;
        // One connection per session: a second one is too many.
        if session.cid == attempt.cid { Ok(session) } else { Err(LoginStatus::TooManyConnections) }
    }

    /// Begins a session, ending the one that it replaces (RFC 7143 6.3.5), or continues one through
    /// another connection (6.3.4).
    pub(crate) fn begin(
        &self,
        served: &ServedVolumes,
        duplicates: &RefCell<DuplicateNames>,
        negotiated: &Negotiated,
        (target, admission): (&IscsiTarget, &AccessRule<ChapCredentials>),
        (inbox, peer): (Inbox<Event>, SocketAddr),
    ) -> Result<Rc<Session>, LoginStatus> {
        let attempt = &negotiated.login;
        if attempt.tsih != 0 {
            let group = served.catalog().portal_group(target);
            let old = self.session_to_reinstate(attempt, group)?;
            old.log_replacement(duplicates, peer);
            let session = Rc::new(old.reinstate(admission, &negotiated.params, (inbox, peer)));
            self.refresh(served, &session, Some(target));
            self.sessions.borrow_mut().insert(session.tsih, Rc::clone(&session));
            return Ok(session);
        }
        self.replace(attempt, duplicates, peer);
        if self.sessions.borrow().len() >= usize::from(u16::MAX) - 1 {
            return Err(LoginStatus::OutOfResources);
        }
        let session = Rc::new(Session {
            tsih: self.next_tsih(),
            cid: attempt.cid,
            peer,
            params: negotiated.params.clone(),
            initiator: attempt.initiator.clone(),
            isid: attempt.isid,
            target: attempt.target.clone(),
            rule: admission.clone(),
            portal_group: served.catalog().portal_group(target),
            inbox: Rc::new(RefCell::new(inbox)),
            ended: SessionEnded::default(),
            lun_map: RefCell::default(),
            former_volumes: RefCell::default(),
            units: RefCell::default(),
            unavailable: RefCell::default(),
            luns: RefCell::new(Rc::new([])),
        });
        self.refresh(served, &session, Some(target));
        self.sessions.borrow_mut().insert(session.tsih, Rc::clone(&session));
        Ok(session)
    }

    /// Ends the session that the same initiator port has with the same target.
    fn replace(
        &self,
        attempt: &LoginAttempt,
        duplicates: &RefCell<DuplicateNames>,
        peer: SocketAddr,
    ) {
        let old = self.sessions.borrow().values().find(|s| s.is_same_nexus(attempt)).cloned();
        if let Some(old) = old {
            old.log_replacement(duplicates, peer);
            old.send_event(Event::Replaced);
            self.end(&old);
        }
    }

    /// Sets the session's units to those that `target` maps for it (none if the target no longer
    /// exists for it). Remaining units report the change. Returns the removed ones: commands for
    /// them end.
    pub(crate) fn refresh(
        &self,
        volumes: &ServedVolumes,
        session: &Session,
        target: Option<&IscsiTarget>,
    ) -> Vec<Rc<SessionUnit>> {
        let none = IscsiTarget::default();
        let target = target.unwrap_or(&none);
        let mapped = target.visible_volumes(session.initiator.as_str());
        let mapped = mapped.filter_map(|(n, id)| Some((Lun::new(n)?, id)));
        let mut map: BTreeMap<_, _> = mapped.collect();
        let mut retired = session.former_volumes.borrow_mut();
        for (lun, id) in
            session.lun_map.borrow().iter().filter(|&(lun, id)| map.get(lun) != Some(id))
        {
            retired.entry(*lun).or_insert(*id);
        }
        map.retain(|lun, id| retired.get(lun).is_none_or(|before| before == id));
        drop(retired);
        let is_away = |lun: Lun| target.unavailable.get(&lun.get()).copied();
        let stays = |lun: &Lun, unit: &SessionUnit| {
            map.get(lun) == Some(&unit.served.id)
                && is_away(*lun).is_none()
                && volumes.get(unit.served.id).is_some_and(|s| Rc::ptr_eq(&s, &unit.served))
        };
        let mut units = session.units.borrow_mut();
        let lost: Vec<_> = units.extract_if(.., |lun, unit| !stays(lun, unit)).collect();
        lost.iter().for_each(|(_, unit)| self.remove_unit(unit));
        let kept: Vec<_> = units.values().cloned().collect();
        let (catalog, mut away) = (volumes.catalog(), BTreeMap::new());
        map.retain(|&lun, &mut id| {
            if let Some(unit) = units.get(&lun) {
                set_port_groups(&mut unit.state.borrow_mut(), &catalog, &unit.served, session);
                return true;
            }
            let served = volumes.get(id).filter(|_| is_away(lun).is_none());
            let Some(served) = served else {
                away.insert(lun, is_away(lun).unwrap_or(Unavailability::BecomingReady));
                return true;
            };
            let unit = self.add_unit(session, lun, served, volumes);
            unit.map(|unit| units.insert(lun, Rc::new(unit))).is_some()
        });
        *session.luns.borrow_mut() = map.keys().copied().collect();
        session.unavailable.replace(away);
        let before = session.lun_map.replace(map);
        if before != *session.lun_map.borrow() {
            for unit in kept {
                unit.state.borrow_mut().establish_attention(
                    AttentionScope::Only(unit.nexus),
                    UnitAttention::LunsChanged,
                );
            }
        }
        lost.into_iter().map(|(_, unit)| unit).collect()
    }

    fn add_unit(
        &self,
        session: &Session,
        lun: Lun,
        served: Rc<ServedVolume>,
        volumes: &ServedVolumes,
    ) -> Option<SessionUnit> {
        let state = self.unit(&served);
        set_port_groups(&mut state.borrow_mut(), &volumes.catalog(), &served, session);
        if let Some(space) = volumes.space(served.id) {
            set_space(&mut state.borrow_mut(), &served, space);
        }
        let nexus = state.borrow_mut().add_nexus(nexus(session));
        match nexus {
            Ok(nexus) => {
                let caller = caller(session, &served, &state, nexus);
                Some(SessionUnit { lun, served, state, nexus, caller })
            }
            Err(_) => {
                tracing::warn!(
                    volume = served.name,
                    "a unit has too many initiators: one is refused"
                );
                None
            }
        }
    }

    fn unit(&self, served: &ServedVolume) -> Rc<RefCell<LogicalUnit>> {
        let mut units = self.units.borrow_mut();
        let info = served.volume.info();
        if let Some(unit) = units.get(&served.id) {
            // The volume may have been replaced by another one meanwhile.
            unit.borrow_mut().set_info(info);
        }
        let new = || Rc::new(RefCell::new(new_unit(served)));
        Rc::clone(units.entry(served.id).or_insert_with(new))
    }

    /// The space used by a unit, or left for it, has changed.
    pub(crate) fn space_changed(&self, id: VolumeId, space: VolumeSpace) {
        let sees = |s: &Rc<Session>| s.unit(id);
        let seen = self.sessions.borrow().values().find_map(sees);
        if let Some(unit) = seen {
            set_space(&mut unit.state.borrow_mut(), &unit.served, space);
        }
    }

    /// Whether a copy on behalf of `principal`, which would access the volume through portal group
    /// `port`, may read or write it now; returns the caller to use and, for a write, whether it
    /// must be durable.
    pub(crate) fn check_copy_access(
        &self,
        served: &ServedVolume,
        principal: &Principal,
        port: u16,
        writes: bool,
    ) -> Result<(Rc<VolumeClient>, bool), CopyIoError> {
        let caller = match served.volume.reservation_gate() {
            Some(gate) => {
                gate.client_on_behalf_of(it_nexus(&principal.initiator, principal.isid, port))
            }
            None => ReservationGate::node_client(),
        };
        let seen = self.units.borrow().get(&served.id).cloned();
        let durable = match seen {
            Some(unit) => unit.borrow_mut().check_copy_access(shared_state(&caller), writes)?,
            // No session has this unit: it is new, except for the shared state.
            None => new_unit(served).check_copy_access(shared_state(&caller), writes)?,
        };
        Ok((caller, durable))
    }

    /// Reports a unit's new access state to all sessions that see it.
    pub(crate) fn access_changed(&self, id: VolumeId, access: Access) {
        let unit = self.units.borrow().get(&id).cloned();
        if let Some(unit) = unit {
            unit.borrow_mut().set_access(access);
        }
    }

    fn remove_unit(&self, unit: &SessionUnit) {
        let mut state = unit.state.borrow_mut();
        state.remove_nexus(unit.nexus);
        // No session has this unit: to the next initiator it is just powered on, except for the
        // shared state.
        if state.nexus_count() == 0 {
            self.units.borrow_mut().remove(&unit.served.id);
        }
    }

    /// Ends a session; does nothing if it has ended.
    pub(crate) fn end(&self, session: &Rc<Session>) {
        session.ended.set();
        let mut sessions = self.sessions.borrow_mut();
        if sessions.get(&session.tsih).is_some_and(|s| Rc::ptr_eq(s, session)) {
            sessions.remove(&session.tsih);
        }
        drop(sessions);
        for unit in std::mem::take(&mut *session.units.borrow_mut()).values() {
            self.remove_unit(unit);
        }
    }

    /// All other sessions that see a unit of this volume.
    pub(crate) fn other_sessions(&self, than: &Rc<Session>, id: VolumeId) -> Vec<Rc<Session>> {
        let sees = |s: &&Rc<Session>| !Rc::ptr_eq(s, than) && s.unit(id).is_some();
        self.sessions.borrow().values().filter(sees).cloned().collect()
    }
}

/// The machine's settings for these limits.
fn config(limits: &Limits) -> Config {
    Config {
        window: limits.commands,
        login_timeout: limits.login_timeout,
        ping_after: limits.keep_alive,
        receive_timeout: limits.receive_timeout,
        data_timeout: limits.receive_timeout,
        ..Config::default()
    }
}

/// The nexus as the volume knows it. Unit attentions report changes of the reservations to the
/// initiator; its commands end where they must.
fn caller(
    session: &Session,
    served: &ServedVolume,
    state: &Rc<RefCell<LogicalUnit>>,
    nexus: NexusId,
) -> Rc<VolumeClient> {
    let Some(gate) = served.volume.reservation_gate() else {
        return ReservationGate::node_client();
    };
    let party = it_nexus(&session.initiator, session.isid, session.portal_group);
    let (inbox, unit) = (Rc::clone(&session.inbox), Some(served.id));
    let state = Rc::downgrade(state);
    gate.attach_client(
        party,
        Box::new(move |notices| {
            let Some(state) = state.upgrade() else { return };
            if state.borrow_mut().notify(nexus, notices) {
                inbox.borrow().push(Event::Abort { unit, barrier: None });
            }
        }),
    )
}

/// The nexus as reservations know it.
fn it_nexus(initiator: &Name, isid: [u8; 6], port: u16) -> ItNexus {
    ItNexus { initiator: Initiator::Iscsi { name: initiator.as_str().to_owned(), isid }, port }
}

/// The shared state of a caller's unit.
fn shared_state(caller: &VolumeClient) -> SharedUnitState {
    SharedUnitState { rights: caller.rights(), mode_pages: caller.mode_pages() }
}

fn new_unit(served: &ServedVolume) -> LogicalUnit {
    let info = served.volume.info();
    let config = UnitConfig {
        uuid: served.id.0,
        product: "VOLUME".into(),
        revision: revision(),
        serial: serial(served.id),
        read_only: info.read_only,
        thin: served.thin,
        solid_state: true,
        max_transfer_blocks: MAX_TRANSFER_BYTES / info.block_size,
        keeps_reservations: served.volume.reservation_gate().is_some(),
    };
    LogicalUnit::new(config, info)
}

fn nexus(session: &Session) -> Nexus {
    let target_port = TargetPort {
        name: port_name(session, session.portal_group),
        device: session.target.as_ref().map_or_else(String::new, ToString::to_string),
        relative_id: session.portal_group,
    };
    // Its name by RFC 7143 4.4.1.
    let mut initiator_port = format!("{},i,0x", session.initiator);
    for byte in session.isid {
        let _ = write!(initiator_port, "{byte:02x}");
    }
    Nexus { initiator_port, target_port }
}

/// Name of a port of the session's target (RFC 7143 4.4.1).
fn port_name(session: &Session, portal_group: u16) -> String {
    let device = session.target.as_ref().map_or("", Name::as_str);
    format!("{device},t,0x{portal_group:04x}")
}

/// Sets the space in blocks, as units count it; a partly used block counts as used.
fn set_space(unit: &mut LogicalUnit, served: &ServedVolume, space: VolumeSpace) {
    let block = u64::from(served.volume.info().block_size);
    unit.set_space(space.used.div_ceil(block), space.available / block);
}

/// Sets the unit's target port groups from the catalog; the state of this node comes from itself.
fn set_port_groups(
    unit: &mut LogicalUnit,
    catalog: &Catalog,
    served: &ServedVolume,
    session: &Session,
) {
    let Some(access) = served.access_state(catalog) else { return unit.clear_port_groups() };
    let group = |node: NodeIndex, access| {
        // Where several nodes serve a target, each is a portal group of its own.
        let name = port_name(session, node.port_id());
        PortGroup { id: node.port_id(), port: node.port_id(), name, access }
    };
    let nodes = catalog.shared.get(&served.id);
    let others: Vec<_> = nodes.into_iter().flatten().map(|n| group(n.node, n.access)).collect();
    unit.set_port_groups(group(catalog.node, access), &others);
}

/// The volume's identity in hexadecimal.
fn serial(id: VolumeId) -> String {
    format!("{id:?}")
}

/// PRODUCT REVISION LEVEL has four characters.
fn revision() -> String {
    env!("CARGO_PKG_VERSION").chars().filter(|c| *c != '.').take(4).collect()
}
