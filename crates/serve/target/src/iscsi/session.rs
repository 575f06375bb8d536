//! The sessions and logical units of one core.

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
use iscsi::target::{Config, LoginAttempt, Session as Negotiated};
use reservation::{Initiator, Party};
use scsi::{
    Attention, CopyTrouble, Known, LogicalUnit, Lun, LunConfig, Nexus, NexusId, PortGroup,
    TargetPort, Whom,
};
use tokio::time::Instant;
use volume::{Caller, Gate};

use super::Event;
use super::login::portal_group;
use crate::catalog::{Admission, Away, Catalog, Chap, IscsiTarget, NodeIndex, VolumeId};
use crate::clones::Told;
use crate::conn::Inbox;
use crate::copying::{Ended, Principal};
use crate::server::{MAX_TRANSFER_BYTES, Served, Server, Space};

/// What all iSCSI connections of a core share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(super) config: Arc<Config>,
    units: RefCell<BTreeMap<VolumeId, Rc<RefCell<LogicalUnit>>>>,
    sessions: RefCell<BTreeMap<u16, Rc<Session>>>,
    last_tsih: Cell<u16>,
}

/// A normal session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) tsih: u16,
    /// Of its one connection.
    cid: u16,
    /// Where its connection comes from.
    peer: SocketAddr,
    pub(super) params: Params,
    pub(super) initiator: Name,
    pub(super) isid: [u8; 6],
    pub(super) target: Option<Name>,
    /// By which rule it was let in; a session whose rule changes ends.
    pub(super) admission: Admission<Chap>,
    /// Tag of the portal group it came through.
    pub(super) portal_group: u16,
    /// Of its connection: its units' notices go there, through whichever connection it was begun.
    inbox: Rc<RefCell<Inbox<Event>>>,
    /// Set at the end. Commands that have not been started by then never are: the initiator may
    /// have given them up and written the same blocks through its next session.
    pub(super) ended: Ended,
    /// What its target maps for it.
    map: RefCell<BTreeMap<Lun, VolumeId>>,
    /// Which volume was the first that a number has named, of those that it names no more. Its initiator may have a disk of
    /// that number still, and what it writes there must not reach another volume.
    retired: RefCell<BTreeMap<Lun, VolumeId>>,
    /// The units of the map that are there; all but those in `away`.
    units: RefCell<BTreeMap<Lun, Rc<Unit>>>,
    away: RefCell<BTreeMap<Lun, Away>>,
    luns: RefCell<Rc<[Lun]>>,
}

/// Ends a session when its connection goes, even by a panic: else whoever waits for the session's
/// tasks would wait for ever.
#[derive(Debug)]
pub(super) struct Member {
    server: Rc<Server>,
    session: Rc<Session>,
}

impl Member {
    pub(super) fn new(server: &Rc<Server>, session: &Rc<Session>) -> Self {
        Self { server: Rc::clone(server), session: Rc::clone(session) }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.server.iscsi.end(&self.session);
    }
}

/// A logical unit as one session sees it.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(super) lun: Lun,
    pub(super) served: Rc<Served>,
    pub(super) state: Rc<RefCell<LogicalUnit>>,
    pub(super) nexus: NexusId,
    /// The nexus as the volume knows it.
    pub(super) caller: Rc<Caller>,
}

impl Unit {
    /// What all nodes know of the unit.
    pub(super) fn known(&self) -> Known {
        known(&self.caller)
    }
}

impl Session {
    pub(super) fn has_ended(&self) -> bool {
        self.ended.get()
    }

    /// Whether it is that of the same initiator port with the same target.
    fn is_of(&self, who: &LoginAttempt) -> bool {
        (&self.initiator, self.isid, &self.target) == (&who.initiator, who.isid, &who.target)
    }

    /// On whose behalf its commands copy, and for how long.
    pub(super) fn principal(&self) -> (Principal, Ended) {
        let principal = Principal {
            initiator: self.initiator.clone(),
            isid: self.isid,
            admission: self.admission.clone(),
        };
        (principal, self.ended.clone())
    }

    /// Gives its connection something to do.
    pub(super) fn tell(&self, what: Event) {
        self.inbox.borrow().push(what);
    }

    /// A login from `by` takes its place: logs it if it looks as if two hosts had its initiator's name.
    fn is_replaced(&self, server: &Server, by: SocketAddr) {
        let target = self.target.as_ref().map_or("", Name::as_str);
        let who = (self.initiator.as_str(), target);
        let addresses = [self.peer.ip(), by.ip()];
        let told = server.clones().borrow_mut().replaced(Instant::now(), who, addresses);
        if let Told::Shared(shared) = told {
            let [one, other] = shared.addresses;
            tracing::warn!(
                initiator = who.0, target, %one, %other, times = shared.times,
                "two hosts log in with one initiator name, and end each other's sessions: give one of them a name of its own"
            );
        }
    }

    /// The same session through another connection. What came through this one ends: its tasks, and itself. Its nexuses do
    /// not.
    fn go_on(
        &self,
        admission: &Admission<Chap>,
        params: &Params,
        (inbox, peer): (Inbox<Event>, SocketAddr),
    ) -> Self {
        self.tell(Event::Replaced);
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
            admission: admission.clone(),
            portal_group: self.portal_group,
            inbox: Rc::clone(&self.inbox),
            ended: Ended::default(),
            map: RefCell::new(self.map.take()),
            retired: RefCell::new(self.retired.take()),
            units: RefCell::new(self.units.take()),
            away: RefCell::new(self.away.take()),
            luns: RefCell::new(self.luns()),
        }
    }

    /// Whether it has not ended, for those that outlive it.
    pub(super) fn lives(&self) -> impl Fn() -> bool + use<> {
        let ended = self.ended.clone();
        move || !ended.get()
    }

    pub(super) fn at(&self, lun: Lun) -> Option<Rc<Unit>> {
        self.units.borrow().get(&lun).cloned()
    }

    /// Why the unit of a number that is mapped is not there.
    pub(super) fn away(&self, lun: Lun) -> Option<Away> {
        self.away.borrow().get(&lun).copied()
    }

    /// Whether a unit is one of the session's still.
    pub(super) fn has(&self, unit: &Unit) -> bool {
        self.units.borrow().get(&unit.lun).is_some_and(|u| std::ptr::eq(&**u, unit))
    }

    pub(super) fn unit(&self, id: VolumeId) -> Option<Rc<Unit>> {
        self.units.borrow().values().find(|u| u.served.id == id).cloned()
    }

    pub(super) fn units(&self) -> Vec<Rc<Unit>> {
        self.units.borrow().values().cloned().collect()
    }

    /// The numbers that its target maps for the session, in ascending order.
    pub(super) fn luns(&self) -> Rc<[Lun]> {
        Rc::clone(&self.luns.borrow())
    }
}

impl Shared {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            config: Arc::new(config),
            units: RefCell::default(),
            sessions: RefCell::default(),
            last_tsih: Cell::new(0),
        }
    }

    /// Whether a session has this handle.
    pub(super) fn has(&self, tsih: u16) -> bool {
        self.sessions.borrow().contains_key(&tsih)
    }

    /// A handle that no session has.
    pub(super) fn next_tsih(&self) -> u16 {
        let mut tsih = self.last_tsih.get();
        loop {
            tsih = tsih.wrapping_add(1).max(1);
            if !self.has(tsih) {
                self.last_tsih.set(tsih);
                return tsih;
            }
        }
    }

    /// Whether a login takes the place of a session.
    pub(super) fn would_replace(&self, who: &LoginAttempt) -> bool {
        self.sessions.borrow().values().any(|session| session.is_of(who))
    }

    /// The session whose connection a login asks to reinstate (RFC 7143 6.3.4), in portal group `group`.
    pub(super) fn reinstated(
        &self,
        who: &LoginAttempt,
        group: u16,
    ) -> Result<Rc<Session>, LoginStatus> {
        let is_it = |s: &&Rc<Session>| s.is_of(who) && s.portal_group == group;
        let session = self.sessions.borrow().get(&who.tsih).filter(is_it).cloned();
        let session = session.ok_or(LoginStatus::NoSession)?;
        // One connection a session: another one is one too many.
        if session.cid == who.cid { Ok(session) } else { Err(LoginStatus::TooManyConnections) }
    }

    /// Begins a session, ending the one that it replaces (RFC 7143 6.3.5), or goes on with one through another connection
    /// (6.3.4).
    pub(super) fn begin(
        &self,
        server: &Server,
        negotiated: &Negotiated,
        (target, admission): (&IscsiTarget, &Admission<Chap>),
        (inbox, peer): (Inbox<Event>, SocketAddr),
    ) -> Result<Rc<Session>, LoginStatus> {
        let who = &negotiated.who;
        if who.tsih != 0 {
            let old = self.reinstated(who, portal_group(&server.catalog(), target))?;
            old.is_replaced(server, peer);
            let session = Rc::new(old.go_on(admission, &negotiated.params, (inbox, peer)));
            self.refresh(server, &session, Some(target));
            self.sessions.borrow_mut().insert(session.tsih, Rc::clone(&session));
            return Ok(session);
        }
        self.replace(who, server, peer);
        if self.sessions.borrow().len() >= usize::from(u16::MAX) - 1 {
            return Err(LoginStatus::OutOfResources);
        }
        let session = Rc::new(Session {
            tsih: self.next_tsih(),
            cid: who.cid,
            peer,
            params: negotiated.params.clone(),
            initiator: who.initiator.clone(),
            isid: who.isid,
            target: who.target.clone(),
            admission: admission.clone(),
            portal_group: portal_group(&server.catalog(), target),
            inbox: Rc::new(RefCell::new(inbox)),
            ended: Ended::default(),
            map: RefCell::default(),
            retired: RefCell::default(),
            units: RefCell::default(),
            away: RefCell::default(),
            luns: RefCell::new(Rc::new([])),
        });
        self.refresh(server, &session, Some(target));
        self.sessions.borrow_mut().insert(session.tsih, Rc::clone(&session));
        Ok(session)
    }

    /// Ends the session that the same initiator port has with the same target.
    fn replace(&self, who: &LoginAttempt, server: &Server, peer: SocketAddr) {
        let old = self.sessions.borrow().values().find(|s| s.is_of(who)).cloned();
        if let Some(old) = old {
            old.is_replaced(server, peer);
            old.tell(Event::Replaced);
            self.end(&old);
        }
    }

    /// Makes the session's units those that `target` maps for it: none, if there is no such target for it any more. Those that
    /// stay tell of it. Gives those that it has no more: commands for them end.
    pub(super) fn refresh(
        &self,
        server: &Server,
        session: &Session,
        target: Option<&IscsiTarget>,
    ) -> Vec<Rc<Unit>> {
        let none = IscsiTarget::default();
        let target = target.unwrap_or(&none);
        let mapped = target.maps(session.initiator.as_str());
        let mapped = mapped.filter_map(|(n, id)| Some((Lun::new(n)?, id)));
        let mut map: BTreeMap<_, _> = mapped.collect();
        let mut retired = session.retired.borrow_mut();
        for (lun, id) in session.map.borrow().iter().filter(|&(lun, id)| map.get(lun) != Some(id)) {
            retired.entry(*lun).or_insert(*id);
        }
        map.retain(|lun, id| retired.get(lun).is_none_or(|before| before == id));
        drop(retired);
        let is_away = |lun: Lun| target.away.get(&lun.get()).copied();
        let stays = |lun: &Lun, unit: &Unit| {
            map.get(lun) == Some(&unit.served.id)
                && is_away(*lun).is_none()
                && server.volume(unit.served.id).is_some_and(|s| Rc::ptr_eq(&s, &unit.served))
        };
        let mut units = session.units.borrow_mut();
        let lost: Vec<_> = units.extract_if(.., |lun, unit| !stays(lun, unit)).collect();
        lost.iter().for_each(|(_, unit)| self.leave_unit(unit));
        let kept: Vec<_> = units.values().cloned().collect();
        let (catalog, mut away) = (server.catalog(), BTreeMap::new());
        map.retain(|&lun, &mut id| {
            if let Some(unit) = units.get(&lun) {
                set_port_groups(&mut unit.state.borrow_mut(), &catalog, &unit.served, session);
                return true;
            }
            let served = server.volume(id).filter(|_| is_away(lun).is_none());
            let Some(served) = served else {
                away.insert(lun, is_away(lun).unwrap_or(Away::Returning));
                return true;
            };
            let unit = self.enter_unit(session, lun, served, server);
            unit.map(|unit| units.insert(lun, Rc::new(unit))).is_some()
        });
        *session.luns.borrow_mut() = map.keys().copied().collect();
        session.away.replace(away);
        let before = session.map.replace(map);
        if before != *session.map.borrow() {
            for unit in kept {
                unit.state.borrow_mut().attend(Whom::Only(unit.nexus), Attention::LunsChanged);
            }
        }
        lost.into_iter().map(|(_, unit)| unit).collect()
    }

    fn enter_unit(
        &self,
        session: &Session,
        lun: Lun,
        served: Rc<Served>,
        server: &Server,
    ) -> Option<Unit> {
        let state = self.unit(&served);
        set_port_groups(&mut state.borrow_mut(), &server.catalog(), &served, session);
        if let Some(space) = server.space(served.id) {
            set_space(&mut state.borrow_mut(), &served, space);
        }
        let nexus = state.borrow_mut().add_nexus(nexus(session));
        match nexus {
            Ok(nexus) => {
                let caller = caller(session, &served, &state, nexus);
                Some(Unit { lun, served, state, nexus, caller })
            }
            Err(_) => {
                tracing::warn!(volume = served.name, "too many initiators; one does not see it");
                None
            }
        }
    }

    fn unit(&self, served: &Served) -> Rc<RefCell<LogicalUnit>> {
        let mut units = self.units.borrow_mut();
        let info = served.volume.info();
        if let Some(unit) = units.get(&served.id) {
            // The volume may have come back as another one than it went.
            unit.borrow_mut().set_info(info);
        }
        let new = || Rc::new(RefCell::new(new_unit(served)));
        Rc::clone(units.entry(served.id).or_insert_with(new))
    }

    /// A unit takes other space than before, or there is other space left for it.
    pub(crate) fn space_changed(&self, id: VolumeId, space: Space) {
        let sees = |s: &Rc<Session>| s.unit(id);
        let seen = self.sessions.borrow().values().find_map(sees);
        if let Some(unit) = seen {
            set_space(&mut unit.state.borrow_mut(), &unit.served, space);
        }
    }

    /// Whether a copy on behalf of `principal`, which would reach the volume through portal group `port`, may read
    /// or write it now: as whom it does, and of a write, whether it must be durable.
    pub(crate) fn admits_copy(
        &self,
        served: &Served,
        principal: &Principal,
        port: u16,
        writes: bool,
    ) -> Result<(Rc<Caller>, bool), CopyTrouble> {
        let caller = match served.volume.gate() {
            Some(gate) => gate.on_behalf_of(party(&principal.initiator, principal.isid, port)),
            None => Gate::node(),
        };
        let seen = self.units.borrow().get(&served.id).cloned();
        let durable = match seen {
            Some(unit) => unit.borrow_mut().admits_copy(known(&caller), writes)?,
            // Nobody sees it: it is new, but for what all nodes know.
            None => new_unit(served).admits_copy(known(&caller), writes)?,
        };
        Ok((caller, durable))
    }

    /// Tells everybody who sees a unit how it is to be used through this node from now on.
    pub(crate) fn access_changed(&self, id: VolumeId, access: Access) {
        let unit = self.units.borrow().get(&id).cloned();
        if let Some(unit) = unit {
            unit.borrow_mut().set_access(access);
        }
    }

    fn leave_unit(&self, unit: &Unit) {
        let mut state = unit.state.borrow_mut();
        state.remove_nexus(unit.nexus);
        // Nobody sees it: what the next initiator finds is a unit that was just powered on, but for what all nodes know.
        if state.nexuses() == 0 {
            self.units.borrow_mut().remove(&unit.served.id);
        }
    }

    /// Ends a session; once, however often it is told to.
    pub(super) fn end(&self, session: &Rc<Session>) {
        session.ended.set();
        let mut sessions = self.sessions.borrow_mut();
        if sessions.get(&session.tsih).is_some_and(|s| Rc::ptr_eq(s, session)) {
            sessions.remove(&session.tsih);
        }
        drop(sessions);
        for unit in std::mem::take(&mut *session.units.borrow_mut()).values() {
            self.leave_unit(unit);
        }
    }

    /// All other sessions that see a unit of this volume.
    pub(super) fn others(&self, than: &Rc<Session>, id: VolumeId) -> Vec<Rc<Session>> {
        let sees = |s: &&Rc<Session>| !Rc::ptr_eq(s, than) && s.unit(id).is_some();
        self.sessions.borrow().values().filter(sees).cloned().collect()
    }
}

/// The nexus as the volume knows it. What a change of the reservations means to the initiator it is told
/// by unit attentions; its commands end where they have to.
fn caller(
    session: &Session,
    served: &Served,
    state: &Rc<RefCell<LogicalUnit>>,
    nexus: NexusId,
) -> Rc<Caller> {
    let Some(gate) = served.volume.gate() else { return Gate::node() };
    let party = party(&session.initiator, session.isid, session.portal_group);
    let (inbox, unit) = (Rc::clone(&session.inbox), Some(served.id));
    let state = Rc::downgrade(state);
    gate.enter(
        party,
        Box::new(move |notices| {
            let Some(state) = state.upgrade() else { return };
            if state.borrow_mut().told(nexus, notices) {
                inbox.borrow().push(Event::Abort { unit, barrier: None });
            }
        }),
    )
}

/// A nexus, as reservations know it.
fn party(initiator: &Name, isid: [u8; 6], port: u16) -> Party {
    Party { initiator: Initiator::Iscsi { name: initiator.as_str().to_owned(), isid }, port }
}

/// What all nodes know of the unit of a caller.
fn known(caller: &Caller) -> Known {
    Known { rights: caller.rights(), modes: caller.modes() }
}

fn new_unit(served: &Served) -> LogicalUnit {
    let info = served.volume.info();
    let config = LunConfig {
        uuid: served.id.0,
        product: "VOLUME".into(),
        revision: revision(),
        serial: serial(served.id),
        read_only: info.read_only,
        thin: served.thin,
        solid_state: true,
        max_transfer_blocks: MAX_TRANSFER_BYTES / info.block_size,
        keeps_reservations: served.volume.gate().is_some(),
    };
    LogicalUnit::new(config, info)
}

fn nexus(session: &Session) -> Nexus {
    let target_port = TargetPort {
        name: port_name(session, session.portal_group),
        device: session.target.as_ref().map_or_else(String::new, ToString::to_string),
        relative_id: session.portal_group,
    };
    // Its name as 4.4.1 has it.
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

/// In blocks, as units count: what is taken in part is taken.
fn set_space(unit: &mut LogicalUnit, served: &Served, space: Space) {
    let block = u64::from(served.volume.info().block_size);
    unit.set_space(space.used.div_ceil(block), space.available / block);
}

/// Makes the unit's target port groups those of the catalog; this node's state is its own to know.
fn set_port_groups(unit: &mut LogicalUnit, catalog: &Catalog, served: &Served, session: &Session) {
    let Some(access) = served.access_in(catalog) else { return unit.clear_port_groups() };
    let group = |node: NodeIndex, access| {
        // Where several nodes serve a target, each is a portal group of its own.
        let name = port_name(session, node.port());
        PortGroup { id: node.port(), port: node.port(), name, access }
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
