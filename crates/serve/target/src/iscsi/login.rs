//! Who may log in, and what discovery reports.

use std::net::SocketAddr;

use iscsi::chap::Secret;
use iscsi::pdu::LoginStatus;
use iscsi::target::{
    Auth, ChapPolicy, LoginAttempt, LoginGrant, LoginReject, Scope, Session as Negotiated,
    TargetRecord,
};

use tokio::time::Instant;

use super::session::Member;
use super::{Event, Initiator};
use crate::catalog::{Admission, Catalog, Chap, IscsiTarget, by_name, dialled};
use crate::guesses::Method;

/// The portal group of discovery, and of targets that only this node serves: every portal reaches
/// every volume.
const PORTAL_GROUP: u16 = 1;

/// Tag of this node's portal group at a target. Sessions do not span nodes, so where several serve
/// a target each is a portal group of its own (RFC 7143 4.4.1).
pub(crate) fn portal_group(catalog: &Catalog, target: &IscsiTarget) -> u16 {
    if catalog.shares_any(target.luns.values()) { catalog.node.port() } else { PORTAL_GROUP }
}

/// Where a login is decided.
enum Decision {
    Here(Result<LoginGrant, Refused>),
    AtCore(usize),
    /// Here, at that time.
    Later(Instant),
}

/// A login that is refused.
struct Refused {
    /// What the initiator is told.
    told: LoginReject,
    /// What is true, for the node's log: not all of it is the initiator's to know.
    why: &'static str,
}

impl Refused {
    fn new(status: LoginStatus, why: &'static str) -> Self {
        Self { told: status.into(), why }
    }
}

impl Initiator {
    /// Decides about a login, or moves to the core where that has to be done.
    pub(super) fn decide_login(&mut self, attempt: Box<LoginAttempt>) {
        match self.judge(&attempt) {
            Decision::AtCore(core) => self.moving = Some((core, attempt)),
            Decision::Later(at) => {
                let inbox = self.place.inbox.clone();
                tokio::task::spawn_local(async move {
                    tokio::time::sleep_until(at).await;
                    inbox.push(Event::Decide(attempt));
                });
            }
            Decision::Here(decision) => {
                if let Err(Refused { told, why }) = &decision
                    && let Some(left_out) = self.server().refusal_line()
                {
                    tracing::info!(
                        initiator = %attempt.initiator,
                        target = attempt.target.as_ref().map_or("discovery", |t| t.as_str()),
                        peer = %self.place.peer,
                        status = ?told.status,
                        why,
                        others_not_logged = left_out,
                        "an iSCSI login is refused"
                    );
                }
                self.machine.login_decision(decision.map_err(|refused| refused.told));
            }
        }
    }

    fn judge(&mut self, attempt: &LoginAttempt) -> Decision {
        let grant = |auth, portal_group, session| LoginGrant {
            auth,
            portal_group,
            target_alias: None,
            session,
        };
        let Some(name) = &attempt.target else {
            return Decision::Here(Ok(grant(Auth::None, PORTAL_GROUP, None)));
        };
        let refuse = |status, why| Decision::Here(Err(Refused::new(status, why)));
        let (catalog, initiator) = (self.server().catalog(), attempt.initiator.as_str());
        let admitted = catalog
            .targets
            .get(name.as_str())
            .and_then(|target| Some((target, target.access.admission(initiator)?)));
        let Some((target, admission)) = admitted else {
            return Decision::Here(Err(unknown(&catalog, name.as_str(), initiator)));
        };
        if target.serves() && target.core != self.server().core().id() {
            return Decision::AtCore(target.core);
        }
        if let Some(portal) = self.moved_to(&catalog, target).filter(|_| attempt.tsih == 0) {
            let (status, moved_to) = (LoginStatus::MovedTemporarily, Some(portal.to_string()));
            let why = "another node serves its volumes";
            return Decision::Here(Err(Refused { told: LoginReject { status, moved_to }, why }));
        }
        // "Not found" would be for good, and it is not.
        if self.draining {
            return refuse(LoginStatus::ServiceUnavailable, "the node stops");
        }
        if !target.serves() {
            return refuse(LoginStatus::ServiceUnavailable, "its volumes are not served for now");
        }
        let group = portal_group(&catalog, target);
        let old = (attempt.tsih != 0).then(|| self.server().iscsi.reinstated(attempt, group));
        let old = match old.transpose() {
            Ok(old) => old,
            Err(status) => return refuse(status, "there is no such session to go on with"),
        };
        let by_name = target.access.named.contains_key(initiator);
        if !self.server().iscsi.would_replace(attempt)
            && self.server().has_its_share(initiator, by_name, self.place.peer.ip())
        {
            return refuse(
                LoginStatus::OutOfResources,
                "it has as many connections as one may have",
            );
        }
        if matches!(admission, Admission::Proof(_)) && self.attempt.is_none() {
            let whence = (self.place.peer.ip(), Method::Chap, name.as_str());
            let Some((at, begun)) = self.server().attempt(whence) else {
                let why = "too many logins from its address wait after failures";
                return refuse(LoginStatus::ServiceUnavailable, why);
            };
            self.attempt = Some(begun);
            if let Some(at) = at {
                return Decision::Later(at);
            }
        }
        match self.auth(admission) {
            Ok(auth) => {
                self.asked = Some(admission.clone());
                self.tried = Some(Box::new((attempt.initiator.clone(), name.clone())));
                Decision::Here(Ok(grant(auth, group, old.map(|session| session.params.clone()))))
            }
            Err(status) => refuse(status, "its CHAP secret cannot be used"),
        }
    }

    /// Where an initiator is better off that wants a session with `target` here (RFC 7143 11.13.5), if that is to be told.
    fn moved_to(&self, catalog: &Catalog, target: &IscsiTarget) -> Option<SocketAddr> {
        let ids = target.luns.values();
        let portal = catalog.elsewhere(ids, self.place.local, self.draining);
        portal.filter(|_| catalog.redirect)
    }

    fn auth(&self, admission: &Admission<Chap>) -> Result<Auth, LoginStatus> {
        let Admission::Proof(Chap { user, secret, mutual }) = admission else {
            return Ok(Auth::None);
        };
        let secret_of = |bytes: &[u8]| {
            Secret::new(bytes).map_err(|error| {
                tracing::error!(%error, "a CHAP secret cannot be used; `windrose status` says why");
                LoginStatus::TargetError
            })
        };
        let mutual = match mutual {
            Some((user, secret)) => Some((user.clone(), secret_of(secret)?)),
            None => None,
        };
        let core = self.server().core();
        let mut challenge = [0; iscsi::chap::CHALLENGE];
        core.fill_random(&mut challenge);
        let [id, ..] = core.random_u64().to_be_bytes();
        let secret = secret_of(secret)?;
        Ok(Auth::Chap(Box::new(ChapPolicy { user: user.clone(), secret, mutual, challenge, id })))
    }

    /// Makes the session of an initiator that has proved who it is.
    pub(super) fn establish(&mut self, negotiated: &Negotiated) {
        let who = &negotiated.who;
        let initiator = who.initiator.as_str();
        let Some(name) = &who.target else {
            self.place.registration.logged_in(initiator, None, who.cid);
            return self.machine.established(Ok(self.server().iscsi.next_tsih()));
        };
        let server = std::rc::Rc::clone(self.server());
        // The catalog may have changed while the initiator authenticated itself.
        let catalog = server.catalog();
        let target = catalog.targets.get(name.as_str());
        let admitted = target.and_then(|t| Some((t, t.access.admission(initiator)?)));
        let Some((target, admission)) = admitted else {
            return self.machine.established(Err(LoginStatus::TargetRemoved.into()));
        };
        // What it has proved is no longer what it has to prove.
        if self.asked.as_ref() != Some(admission) {
            return self.machine.established(Err(LoginStatus::AuthenticationFailure.into()));
        }
        if target.core != server.core().id() || !target.serves() {
            return self.machine.established(Err(LoginStatus::ServiceUnavailable.into()));
        }
        if let Some(attempt) = self.attempt.take() {
            attempt.succeeded();
        }
        let way = (self.place.inbox.clone(), self.place.peer);
        match server.iscsi.begin(&server, negotiated, (target, admission), way) {
            Ok(session) => {
                self.place.registration.logged_in(initiator, Some(name.as_str()), who.cid);
                let tsih = session.tsih;
                self.member = Some(Member::new(&server, &session));
                self.session = Some(session);
                self.machine.established(Ok(tsih));
                if !self.is_shared_name() {
                    tracing::info!(initiator, target = %name, peer = %self.place.peer, "iSCSI login");
                }
            }
            Err(status) => self.machine.established(Err(status.into())),
        }
    }

    pub(super) fn report_targets(&mut self, scope: &Scope) {
        let catalog = self.server().catalog();
        let records = records(&catalog, scope, self);
        self.machine.targets(&records);
    }
}

/// Why an initiator does not get to a target, and what it is told. One that may not use a target is told the same
/// whether there is one of that name or not: names of volumes cannot be found out by asking for them.
fn unknown(catalog: &Catalog, name: &str, initiator: &str) -> Refused {
    let elsewhere = catalog.remote.targets.get(name);
    if elsewhere.is_some_and(|target| target.access.admission(initiator).is_some()) {
        return Refused::new(LoginStatus::NotFound, "only other nodes have its volumes");
    }
    let exists = elsewhere.is_some() || catalog.targets.contains_key(name);
    let why = if exists { "the initiator is not allowed" } else { "there is no such target" };
    if catalog.is_incomplete {
        // What a record says that cannot be read for now is no reason to give a path up.
        return Refused::new(LoginStatus::ServiceUnavailable, why);
    }
    Refused::new(LoginStatus::AuthorizationFailure, why)
}

/// The targets that the initiator may use.
fn records(catalog: &Catalog, scope: &Scope, initiator: &Initiator) -> Vec<TargetRecord> {
    let own =
        initiator.session.as_ref().and_then(|s| s.target.as_ref()).map(iscsi::name::Name::as_str);
    let asks = initiator.place.registration.initiator();
    let wanted = |name: &str| match scope {
        Scope::All => true,
        Scope::Named(n) => n.as_str() == name,
        Scope::Session => own == Some(name),
    };
    let own_portals = dialled(&catalog.iscsi_portals, initiator.place.local);
    // RFC 7143 appendix C: all portals of a target, each with the tag of its group.
    let record = |(name, doors): (&str, [Option<&IscsiTarget>; 2])| {
        let admits = |target: &&IscsiTarget| {
            asks.as_deref().is_some_and(|i| target.access.admission(i).is_some())
        };
        let [here, remote] = doors.map(|door| door.filter(admits));
        let own = here.map(|target| (portal_group(catalog, target), &own_portals));
        let asks = asks.as_deref().unwrap_or_default();
        let units = here.into_iter().chain(remote).flat_map(|target| target.maps(asks));
        let units: Vec<_> = units.map(|(_, id)| id).collect();
        let others = catalog.others_serving(&units);
        let others = others.into_iter().map(|(node, portals)| (node.port(), &portals.iscsi));
        let tagged = |(group, portals): (u16, &Vec<SocketAddr>)| {
            portals.iter().map(|portal| (portal.to_string(), group)).collect::<Vec<_>>()
        };
        let addresses: Vec<_> = own.into_iter().chain(others).flat_map(tagged).collect();
        // A name without an address is one that is reached here.
        (!addresses.is_empty()).then(|| TargetRecord { name: name.to_owned(), addresses })
    };
    let all = by_name(&catalog.targets, &catalog.remote.targets);
    all.filter(|(name, _)| wanted(name)).filter_map(record).collect()
}
