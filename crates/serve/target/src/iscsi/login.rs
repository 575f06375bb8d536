//! Which initiators may log in, and which targets discovery reports.

use std::net::SocketAddr;

use iscsi::chap::Secret;
use iscsi::pdu::LoginStatus;
use iscsi::target::{
    Auth, ChapPolicy, LoginAttempt, LoginGrant, LoginReject, NegotiatedSession as Negotiated,
    SendTargetsScope, TargetRecord,
};

use tokio::time::Instant;

use super::{InitiatorConnection, SessionGuard};
use crate::auth_throttle::AuthMethod;
use crate::catalog::{
    AccessRule, Catalog, ChapCredentials, IscsiTarget, PORTAL_GROUP, pair_by_name,
    reachable_addresses,
};
use crate::iscsi_sessions::Event;

/// Where and when a login is decided.
enum Decision {
    Here(Result<LoginGrant, LoginRefusal>),
    AtCore(usize),
    /// Here, at that time.
    Later(Instant),
}

/// A login that is refused.
struct LoginRefusal {
    /// The answer to the initiator.
    response: LoginReject,
    /// The actual reason, for the node's log: the initiator may not learn all of it.
    why: &'static str,
}

impl LoginRefusal {
    fn new(status: LoginStatus, why: &'static str) -> Self {
        Self { response: status.into(), why }
    }
}

impl InitiatorConnection {
    /// Decides about a login, or moves to the core where that must happen.
    pub(super) fn decide_login(&mut self, attempt: Box<LoginAttempt>) {
        match self.decide(&attempt) {
            Decision::AtCore(core) => self.moving = Some((core, attempt)),
            Decision::Later(at) => {
                let inbox = self.context.inbox.clone();
                tokio::task::spawn_local(async move {
                    tokio::time::sleep_until(at).await;
                    inbox.push(Event::Decide(attempt));
                });
            }
            Decision::Here(decision) => {
                if let Err(LoginRefusal { response, why }) = &decision
                    && let Some(left_out) = self.server().refusal_line()
                {
                    tracing::info!(
                        initiator = %attempt.initiator,
                        target = attempt.target.as_ref().map_or("discovery", |t| t.as_str()),
                        peer = %self.context.peer,
                        status = ?response.status,
                        why,
                        others_not_logged = left_out,
                        "an iSCSI login was refused"
                    );
                }
                self.machine.login_decision(decision.map_err(|refused| refused.response));
            }
        }
    }

    fn decide(&mut self, attempt: &LoginAttempt) -> Decision {
        let grant = |auth, portal_group, session| LoginGrant {
            auth,
            portal_group,
            target_alias: None,
            session,
        };
        let Some(name) = &attempt.target else {
            return Decision::Here(Ok(grant(Auth::None, PORTAL_GROUP, None)));
        };
        let refuse = |status, why| Decision::Here(Err(LoginRefusal::new(status, why)));
        let (catalog, initiator) = (self.server().catalog(), attempt.initiator.as_str());
        let admitted = catalog
            .targets
            .get(name.as_str())
            .and_then(|target| Some((target, target.access.rule_for(initiator)?)));
        let Some((target, admission)) = admitted else {
            return Decision::Here(Err(unknown_target(&catalog, name.as_str(), initiator)));
        };
        if target.serves_any() && target.core != self.server().core().id() {
            return Decision::AtCore(target.core);
        }
        if let Some(portal) = self.redirect_for(&catalog, target).filter(|_| attempt.tsih == 0) {
            let (status, moved_to) = (LoginStatus::MovedTemporarily, Some(portal.to_string()));
            let why = "another node serves its volumes";
            return Decision::Here(Err(LoginRefusal {
                response: LoginReject { status, redirect_address: moved_to },
                why,
            }));
        }
        // "Not found" would be permanent, and it is not.
        if self.draining {
            return refuse(LoginStatus::ServiceUnavailable, "the node stops");
        }
        if !target.serves_any() {
            return refuse(
                LoginStatus::ServiceUnavailable,
                "its volumes are not served at the moment",
            );
        }
        let group = catalog.portal_group(target);
        let old =
            (attempt.tsih != 0).then(|| self.server().iscsi.session_to_reinstate(attempt, group));
        let old = match old.transpose() {
            Ok(old) => old,
            Err(status) => return refuse(status, "there is no such session to continue"),
        };
        let by_name = target.access.named.contains_key(initiator);
        if !self.server().iscsi.would_replace(attempt)
            && self.server().is_at_share_limit(initiator, by_name, self.context.peer.ip())
        {
            return refuse(LoginStatus::OutOfResources, "it has the largest number of connections");
        }
        if matches!(admission, AccessRule::Proof(_)) && self.attempt.is_none() {
            let source = (self.context.peer.ip(), AuthMethod::Chap, name.as_str());
            let Some((at, begun)) = self.server().begin_auth_attempt(source) else {
                let why = "too many failed logins from its address are being delayed";
                return refuse(LoginStatus::ServiceUnavailable, why);
            };
            self.attempt = Some(begun);
            if let Some(at) = at {
                return Decision::Later(at);
            }
        }
        match self.auth(admission) {
            Ok(auth) => {
                self.rule = Some(admission.clone());
                self.login_names = Some(Box::new((attempt.initiator.clone(), name.clone())));
                Decision::Here(Ok(grant(auth, group, old.map(|session| session.params.clone()))))
            }
            Err(status) => refuse(status, "its CHAP secret cannot be used"),
        }
    }

    /// The portal to which a login to `target` is redirected (RFC 7143 11.13.5), if it is.
    fn redirect_for(&self, catalog: &Catalog, target: &IscsiTarget) -> Option<SocketAddr> {
        let ids = target.luns.values();
        let portal = catalog.redirect_portal(ids, self.context.local, self.draining);
        portal.filter(|_| catalog.redirect)
    }

    fn auth(&self, admission: &AccessRule<ChapCredentials>) -> Result<Auth, LoginStatus> {
        let AccessRule::Proof(ChapCredentials { user, secret, mutual }) = admission else {
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
        let mut challenge = [0; iscsi::chap::CHALLENGE_LEN];
        core.fill_random(&mut challenge);
        let [id, ..] = core.random_u64().to_be_bytes();
        let secret = secret_of(secret)?;
        Ok(Auth::Chap(Box::new(ChapPolicy { user: user.clone(), secret, mutual, challenge, id })))
    }

    /// Creates the session of an authenticated initiator.
    pub(super) fn establish(&mut self, negotiated: &Negotiated) {
        let login = &negotiated.login;
        let initiator = login.initiator.as_str();
        let Some(name) = &login.target else {
            self.context.registration.logged_in(initiator, None, login.cid);
            return self.machine.session_established(Ok(self.server().iscsi.next_tsih()));
        };
        let server = std::rc::Rc::clone(self.server());
        // The catalog may have changed while the initiator authenticated itself.
        let catalog = server.catalog();
        let target = catalog.targets.get(name.as_str());
        let admitted = target.and_then(|t| Some((t, t.access.rule_for(initiator)?)));
        let Some((target, admission)) = admitted else {
            return self.machine.session_established(Err(LoginStatus::TargetRemoved.into()));
        };
        // The credentials it proved are no longer the required ones.
        if self.rule.as_ref() != Some(admission) {
            return self
                .machine
                .session_established(Err(LoginStatus::AuthenticationFailure.into()));
        }
        if target.core != server.core().id() || !target.serves_any() {
            return self.machine.session_established(Err(LoginStatus::ServiceUnavailable.into()));
        }
        if let Some(attempt) = self.attempt.take() {
            attempt.succeeded();
        }
        let way = (self.context.inbox.clone(), self.context.peer);
        let (served, names) = (server.served(), server.duplicate_names());
        match server.iscsi.begin(served, names, negotiated, (target, admission), way) {
            Ok(session) => {
                self.context.registration.logged_in(initiator, Some(name.as_str()), login.cid);
                let tsih = session.tsih;
                self.session_guard = Some(SessionGuard::new(&server, &session));
                self.session = Some(session);
                self.machine.session_established(Ok(tsih));
                if !self.is_shared_name() {
                    tracing::info!(initiator, target = %name, peer = %self.context.peer, "iSCSI login");
                }
            }
            Err(status) => self.machine.session_established(Err(status.into())),
        }
    }

    pub(super) fn report_targets(&mut self, scope: &SendTargetsScope) {
        let catalog = self.server().catalog();
        let records = records(&catalog, scope, self);
        self.machine.targets(&records);
    }
}

/// Why an initiator may not use a target, and the answer to it. The answer is the same whether the
/// target exists or not, so that names of volumes cannot be probed.
fn unknown_target(catalog: &Catalog, name: &str, initiator: &str) -> LoginRefusal {
    let elsewhere = catalog.remote.targets.get(name);
    if elsewhere.is_some_and(|target| target.access.rule_for(initiator).is_some()) {
        return LoginRefusal::new(LoginStatus::NotFound, "only other nodes have its volumes");
    }
    let exists = elsewhere.is_some() || catalog.targets.contains_key(name);
    let why = if exists { "the initiator is not allowed" } else { "there is no such target" };
    if catalog.is_incomplete {
        // Records that cannot be read for now are no reason for the initiator to give the path up.
        return LoginRefusal::new(LoginStatus::ServiceUnavailable, why);
    }
    LoginRefusal::new(LoginStatus::AuthorizationFailure, why)
}

/// The targets that the initiator may use.
fn records(
    catalog: &Catalog,
    scope: &SendTargetsScope,
    initiator: &InitiatorConnection,
) -> Vec<TargetRecord> {
    let own =
        initiator.session.as_ref().and_then(|s| s.target.as_ref()).map(iscsi::name::Name::as_str);
    let asks = initiator.context.registration.initiator();
    let wanted = |name: &str| match scope {
        SendTargetsScope::All => true,
        SendTargetsScope::Named(n) => n.as_str() == name,
        SendTargetsScope::Session => own == Some(name),
    };
    let own_portals = reachable_addresses(&catalog.iscsi_portals, initiator.context.local);
    // RFC 7143 appendix C: all portals of a target, each with the tag of its group.
    let record = |(name, groups): (&str, [Option<&IscsiTarget>; 2])| {
        let admits = |target: &&IscsiTarget| {
            asks.as_deref().is_some_and(|i| target.access.rule_for(i).is_some())
        };
        let [here, remote] = groups.map(|one| one.filter(admits));
        let own = here.map(|target| (catalog.portal_group(target), &own_portals));
        let asks = asks.as_deref().unwrap_or_default();
        let units = here.into_iter().chain(remote).flat_map(|target| target.visible_volumes(asks));
        let units: Vec<_> = units.map(|(_, id)| id).collect();
        let others = catalog.others_serving(&units);
        let others = others.into_iter().map(|(node, portals)| (node.port_id(), &portals.iscsi));
        let tagged = |(group, portals): (u16, &Vec<SocketAddr>)| {
            portals.iter().map(|portal| (portal.to_string(), group)).collect::<Vec<_>>()
        };
        let addresses: Vec<_> = own.into_iter().chain(others).flat_map(tagged).collect();
        // A name without an address is reachable here.
        (!addresses.is_empty()).then(|| TargetRecord { name: name.to_owned(), addresses })
    };
    let all = pair_by_name(&catalog.targets, &catalog.remote.targets);
    all.filter(|(name, _)| wanted(name)).filter_map(record).collect()
}
