//! Admission to the cluster: the API for tokens and join requests, and the answers to nodes that
//! ask to join (RFD 0038, 2.3).

use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;
use std::time::Duration;

use api::{
    ApiError, CreateTokenRequest, CreatedToken, ErrorCode, Finding, JoinInfo, JoinList, NodeRole,
    Severity, TokenInfo, TokenList,
};
use axum::body::Bytes;
use cluster::admission::{
    self, AdmissionError, JoinDenial, JoinGrant, JoinOutcome, JoinRecord, JoinRequest,
    JoinRequestError, JoinResponse, JoinState, NewToken, TokenRecord, TokenState,
};
use cluster::identity::{ClusterIdentity, Role, TransportSecurity};
use cluster::join_token::{JoinToken, ShortId, TrustAnchor};
use cluster::node_membership;
use cluster::nodes::{self, NodeView, Nodes};
use peer::NodeId;

use super::ClusterControl;
use super::{join_error, role};
use crate::context::now_s;
use crate::errors::{conflict, store_error};
use cluster::store::{StoreError, embedded};
use http_server::join_endpoint::{self, CAPACITY};
use http_server::{ApiListener, Server, TlsAcceptorDebug, listen};
use membership::{ClusterMembership, certificates};
use status::finding;

/// How often expired tokens and requests are removed, and how soon after the start.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(3600);
const FIRST_CLEANUP_DELAY: Duration = Duration::from_secs(60);

/// Pause before the join port is tried again after listening failed.
const LISTEN_RETRY_PAUSE: Duration = Duration::from_secs(5);

/// Longest lifetime of a token: a year.
const MAX_LIFETIME_S: u64 = 366 * 86_400;

/// Hint for a token that is not valid.
pub(crate) const NEW_TOKEN_HINT: &str =
    "make a new token at a node of the cluster (windrose cluster token), and use it here";

impl ClusterControl {
    /// Creates a token.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] for a node that is in no cluster; [`ErrorCode::InvalidRequest`].
    pub async fn create_token(
        &self,
        request: CreateTokenRequest,
    ) -> Result<CreatedToken, ApiError> {
        let membership = self.require_membership()?;
        let CreateTokenRequest { uses, lifetime_s, role, requires_approval } = request;
        let bad = |what: &str| Err(ApiError::new(ErrorCode::InvalidRequest, what.to_owned()));
        if uses == Some(0) {
            return bad("uses: a token admits at least one node");
        }
        if !(1..=MAX_LIFETIME_S).contains(&lifetime_s) {
            return bad("lifetime_s: a token is valid for 1 second to 366 days");
        }
        let role = role.map(|role| match role {
            NodeRole::Data => Role::Data,
            NodeRole::Witness => Role::Witness,
        });
        let ClusterIdentity { cluster, transport_security: protection, node, .. } =
            membership.identity();
        let trust = TrustAnchor::from_transport_security(&protection).ok_or_else(|| {
            ApiError::new(
                ErrorCode::Internal,
                "cannot read the certificate of the cluster's authority",
            )
        })?;
        Self::check_no_rotation(membership).await?;
        let (nodes, _) =
            nodes::list_readable(membership.store()).await.map_err(|e| store_error(&e))?;
        let addresses = join_addresses(&nodes, node);
        if addresses.is_empty() {
            return Err(conflict(
                "no node of the cluster has an address for join requests",
                "set cluster.listen in the configuration of this node and restart it",
            ));
        }
        let made_by = self.0.context.settings.name.clone();
        let new = NewToken { role, lifetime_s, uses, requires_approval, created_by: made_by };
        let now = now_s();
        let made = admission::create_token(membership.store(), now, &new).await;
        let (record, secret) = made.map_err(|e| admission_error(&e))?;
        tracing::info!(token = %record.id, uses, lifetime_s, requires_approval, "join token created");
        let token = JoinToken { cluster, id: record.id, secret, trust_anchor: trust, addresses };
        Ok(CreatedToken { token: token.to_text(), info: token_info(&record, now) })
    }

    /// Lists the tokens.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] for a node that is in no cluster.
    pub async fn list_tokens(&self) -> Result<TokenList, ApiError> {
        let membership = self.require_membership()?;
        let tokens =
            admission::list_tokens(membership.store()).await.map_err(|e| store_error(&e))?;
        let now = now_s();
        Ok(TokenList { tokens: tokens.iter().map(|token| token_info(token, now)).collect() })
    }

    /// Revokes a token.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; [`ErrorCode::InvalidRequest`] for a malformed identifier.
    pub async fn revoke_token(&self, id: &str) -> Result<TokenList, ApiError> {
        let (membership, id) = (self.require_membership()?, parse_id(id)?);
        let revoked = admission::revoke_token(membership.store(), id).await;
        revoked.map_err(|e| admission_error(&e))?;
        tracing::info!(token = %id, "join token revoked");
        self.list_tokens().await
    }

    /// Lists the join requests.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] for a node that is in no cluster.
    pub async fn list_joins(&self) -> Result<JoinList, ApiError> {
        let membership = self.require_membership()?;
        let store = membership.store();
        let read = async {
            let joins = admission::list_joins(store).await?;
            let tokens = admission::list_tokens(store).await?;
            let (nodes, _) = nodes::list_readable(store).await?;
            Ok::<_, StoreError>((joins, tokens, nodes))
        };
        let (joins, tokens, nodes) = read.await.map_err(|e| store_error(&e))?;
        let now = now_s();
        let joins = joins.iter().map(|join| join_info(join, &tokens, &nodes, now)).collect();
        Ok(JoinList { joins })
    }

    /// Approves or denies the join request of a waiting node.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; [`ErrorCode::Conflict`] if the request was decided otherwise or has
    /// ended; [`ErrorCode::InvalidRequest`] for a malformed identifier.
    pub async fn decide_join(&self, id: &str, approve: bool) -> Result<JoinList, ApiError> {
        let (membership, id) = (self.require_membership()?, parse_id(id)?);
        let name = &self.0.context.settings.name;
        let decided =
            admission::approve_or_refuse(membership.store(), now_s(), id, approve, name).await;
        decided.map_err(|e| admission_error(&e))?;
        tracing::info!(join = %id, approve, "join request decided");
        self.list_joins().await
    }

    /// Answers a node that asks to join from `from`.
    ///
    /// # Errors
    /// [`ErrorCode::Unauthorized`] without a token of this cluster; other errors say what prevents
    /// the join.
    pub(crate) async fn admit_node(
        &self,
        body: &[u8],
        from: IpAddr,
    ) -> Result<JoinResponse, ApiError> {
        let request = JoinRequest::parse(body).map_err(|e| bad_request(&e))?;
        let membership = self.require_membership()?;
        let identity = membership.identity();
        if request.store_format != embedded::FORMAT {
            // Only a client with a token is told the versions.
            let authenticated = admission::authenticate_token(membership.store(), &request).await;
            authenticated.map_err(|e| denial_error(&e))?;
            return Err(version_mismatch(&format!(
                "its store has format {}, and the joining node supports format {}",
                embedded::FORMAT,
                request.store_format
            )));
        }
        let outcome = admission::process_join(membership.store(), now_s(), &request, from).await;
        let outcome = outcome.map_err(|e| denial_error(&e))?;
        let (name, addresses) = (&request.name, &request.addresses);
        let node = match outcome {
            JoinOutcome::Waiting(id) => {
                tracing::debug!(join = %id, name, %from, "join request waits for approval");
                return Ok(JoinResponse::Waiting { id });
            }
            JoinOutcome::Admitted(node) => node,
        };
        tracing::info!(%node, name, ?addresses, %from, token = %request.token, "node admitted to \
            the cluster");
        let ClusterIdentity { secret, transport_security: protection, endpoints, member, .. } =
            identity;
        let now = match membership.runs_own_store() {
            true => membership
                .store()
                .members()
                .await
                .map(|m| node_membership::voter_endpoints(&m, member.as_ref())),
            false => Ok(Vec::new()),
        };
        let endpoints = now.ok().filter(|now| !now.is_empty()).unwrap_or(endpoints);
        Ok(JoinResponse::Granted(JoinGrant {
            node: node.0,
            secret,
            transport_security: protection,
            endpoints,
        }))
    }

    /// Accepts join requests for as long as this node is a member.
    pub(crate) async fn serve_joins(self) {
        let (Some(membership), Some(at)) =
            (self.0.context.cluster_membership.clone(), self.0.context.settings.cluster.join)
        else {
            return;
        };
        let mut identity = membership.watch_identity();
        loop {
            let protection = identity.borrow_and_update().transport_security.clone();
            match self.open_join_listener(&membership, (&protection, at)) {
                Ok(_server) => {
                    self.set_join_listener_error(None);
                    tracing::info!(%at, "accepting join requests");
                    // The listener runs until it is dropped: until its certificate has to change.
                    let changed =
                        identity.wait_for(|now| now.transport_security != protection).await;
                    if changed.is_err() {
                        return;
                    }
                }
                Err(why) => {
                    if self.set_join_listener_error(Some(why.clone())) {
                        tracing::warn!(why, "cannot accept join requests");
                    }
                    tokio::time::sleep(LISTEN_RETRY_PAUSE).await;
                }
            }
        }
    }

    fn open_join_listener(
        &self,
        membership: &ClusterMembership,
        (protection, at): (&TransportSecurity, SocketAddr),
    ) -> Result<Server, String> {
        let listener = listen::tcp("cluster.join", at).map_err(|e| e.to_string())?;
        let api_listener = match membership.certificates() {
            None => ApiListener::Plain(listener),
            Some(tls) => {
                let acceptor = certificates::join_acceptor(protection, tls);
                ApiListener::Tls(listener, TlsAcceptorDebug(acceptor.map_err(|e| e.to_string())?))
            }
        };
        let control = self.clone();
        let admit = move |body: Bytes, from| {
            let control = control.clone();
            async move { control.admit_node(&body, from).await }
        };
        let mut server = Server::default();
        let router = join_endpoint::router(self.api_auth_failures(), admit);
        server.serve_on(api_listener, router, CAPACITY);
        Ok(server)
    }

    /// Records the error; returns whether it is new.
    fn set_join_listener_error(&self, why: Option<String>) -> bool {
        let mut error = self.0.join_listener_error.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = *error != why;
        *error = why;
        is_news
    }

    /// Removes expired tokens and requests, for as long as this node is a member.
    pub(crate) async fn clean_up_admission(self) {
        let Some(membership) = self.0.context.cluster_membership.clone() else { return };
        tokio::time::sleep(FIRST_CLEANUP_DELAY).await;
        loop {
            if let Err(error) = admission::remove_expired(membership.store(), now_s()).await {
                tracing::debug!(%error, "cannot remove expired tokens and join requests");
            }
            tokio::time::sleep(CLEANUP_INTERVAL).await;
        }
    }

    /// Findings about waiting join requests, while the store answers.
    pub(crate) async fn join_findings(&self, store_answers: bool) -> Vec<Finding> {
        let error =
            self.0.join_listener_error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut findings: Vec<_> =
            error.as_deref().map(join_listener_finding).into_iter().collect();
        if store_answers && let Ok(list) = self.list_joins().await {
            findings.extend(list.joins.iter().filter_map(join_request_finding));
        }
        findings
    }
}

fn join_listener_finding(why: &str) -> Finding {
    let hint = "stop the process that uses the port, or set cluster.join to another port and \
        restart this node; until then, nodes can join at the other nodes";
    finding(
        Severity::Warning,
        "joins",
        format!("this node cannot accept join requests: {why}"),
        Some(hint),
    )
}

/// The finding for a waiting join request.
fn join_request_finding(join: &JoinInfo) -> Option<Finding> {
    if join.state != api::JoinState::Waiting {
        return None;
    }
    let JoinInfo { id, name, addresses, requested_from: from, role, .. } = join;
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let what = match role {
        NodeRole::Data => "to keep data",
        NodeRole::Witness => "as a witness",
    };
    let message = format!(
        "node {name} at {} (request from {from}) waits for approval to join {what}",
        addresses.join(", ")
    );
    let hint =
        format!("windrose cluster approve {id} admits it, windrose cluster refuse {id} rejects it");
    Some(finding(Severity::Note, "joins", message, Some(&hint)))
}

/// Addresses at which nodes accept join requests: this node first, running nodes before others.
fn join_addresses(nodes: &Nodes, own: NodeId) -> Vec<SocketAddr> {
    let mut all: Vec<&NodeView> = nodes.values().collect();
    all.sort_by_key(|view| (view.record.node != own, !view.is_alive, view.record.node));
    all.iter().filter_map(|view| view.record.join_address).collect()
}

fn parse_id(id: &str) -> Result<ShortId, ApiError> {
    id.parse().map_err(|e| {
        ApiError::new(ErrorCode::InvalidRequest, format!("{id:?}: {e}")).with_hint(
            "windrose cluster token list and windrose cluster joins show the \
                identifiers",
        )
    })
}

fn token_info(token: &TokenRecord, now_s: u64) -> TokenInfo {
    TokenInfo {
        id: token.id.to_string(),
        state: match token.state(now_s) {
            TokenState::Valid => api::TokenState::Valid,
            TokenState::UsedUp => api::TokenState::UsedUp,
            TokenState::Expired => api::TokenState::Expired,
            TokenState::Revoked => api::TokenState::Revoked,
        },
        remaining_uses: token.remaining_uses,
        expires_s: token.expires_s,
        role: token.role.map(role),
        requires_approval: token.requires_approval,
        created_by: token.created_by.clone(),
        created_s: token.created_s,
    }
}

fn join_info(join: &JoinRecord, tokens: &[TokenRecord], nodes: &Nodes, now_s: u64) -> JoinInfo {
    let answers =
        tokens.iter().any(|token| token.id == join.token && token.allows_result_fetch(now_s));
    let (state, node, by) = match &join.state {
        JoinState::Refused { by } => (api::JoinState::Refused, None, Some(by.clone())),
        JoinState::Admitted { node } if nodes.contains_key(&NodeId(*node)) => {
            (api::JoinState::Joined, Some(*node), None)
        }
        JoinState::Waiting | JoinState::Approved { .. } if !answers => {
            (api::JoinState::Ended, None, None)
        }
        JoinState::Waiting => (api::JoinState::Waiting, None, None),
        JoinState::Approved { by } => (api::JoinState::Approved, None, Some(by.clone())),
        JoinState::Admitted { node } => (api::JoinState::Admitted, Some(*node), None),
    };
    JoinInfo {
        id: join.id.to_string(),
        name: join.name.clone(),
        role: role(join.role),
        addresses: join.addresses.clone(),
        requested_from: join.source_ip,
        version: join.version.clone(),
        token: join.token.to_string(),
        requested_s: join.requested_s,
        state,
        node,
        decided_by: by,
    }
}

fn admission_error(error: &AdmissionError) -> ApiError {
    let message = error.to_string();
    match error {
        AdmissionError::Unknown { kind: what, .. } => {
            let hint = match *what {
                "token" => "windrose cluster token list shows the tokens",
                _ => "windrose cluster joins shows the requests",
            };
            ApiError::new(ErrorCode::NotFound, message).with_hint(hint)
        }
        AdmissionError::Refused { .. } | AdmissionError::TokenEnded { .. } => conflict(
            message,
            "make a new token (windrose cluster token create --require-approval), and join the node with it",
        ),
        AdmissionError::Admitted { node, .. } => {
            let hint = format!(
                "to remove the node: stop it, then run windrose cluster leave --node {node} \
                 --force"
            );
            conflict(message, &hint)
        }
        AdmissionError::TooManyTokens => conflict(
            message,
            "revoke unused ones (windrose cluster token list, windrose cluster token revoke ID)",
        ),
        AdmissionError::NoRandom => ApiError::new(ErrorCode::Internal, message),
        AdmissionError::Store(error) => store_error(error),
    }
}

fn version_mismatch(what: &str) -> ApiError {
    let message =
        format!("the cluster runs windrose version {}: {what}", env!("CARGO_PKG_VERSION"));
    conflict(message, "run the same version of windrose on all nodes")
}

fn bad_request(error: &JoinRequestError) -> ApiError {
    match error {
        // The token was not read: this counts as an attempt without one, and gets no other
        // information.
        JoinRequestError::UnsupportedFormat { .. } => {
            ApiError::new(ErrorCode::Unauthorized, error.to_string())
                .with_hint("run the same version of windrose on all nodes")
        }
        JoinRequestError::Malformed(_) => ApiError::new(ErrorCode::Unauthorized, error.to_string()),
    }
}

/// Converts a denial to the error that the joining node gets.
fn denial_error(error: &JoinDenial) -> ApiError {
    let message = error.to_string();
    match error {
        JoinDenial::UnknownToken => {
            ApiError::new(ErrorCode::Unauthorized, message).with_hint(NEW_TOKEN_HINT)
        }
        JoinDenial::Expired { .. } | JoinDenial::UsedUp | JoinDenial::Revoked => {
            conflict(message, NEW_TOKEN_HINT)
        }
        JoinDenial::WrongRole { role } => {
            let hint = match role {
                Role::Witness => {
                    "use it with windrose cluster witness, or make another token: windrose cluster \
                     token"
                }
                Role::Data => {
                    "use it with windrose cluster join, or make another token: windrose cluster \
                     token"
                }
            };
            conflict(message, hint)
        }
        JoinDenial::Refused { .. } => conflict(
            message,
            "if that was a mistake, make a new token at a node of the cluster (windrose cluster \
             token), and use it here",
        ),
        JoinDenial::TooManyWaiting | JoinDenial::TooMany => conflict(
            message,
            "at a node of the cluster: list the requests (windrose cluster joins) and refuse some \
             (windrose cluster refuse ID), or revoke the token that they use (windrose cluster \
             token revoke ID)",
        ),
        JoinDenial::Join(error) => join_error(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(state: JoinState) -> JoinRecord {
        JoinRecord {
            id: ShortId(0x1a2b_3c4d),
            token: ShortId(1),
            data_dir_id: uuid::Uuid::nil(),
            name: "b".into(),
            role: Role::Data,
            addresses: vec!["192.0.2.2:7480".parse().unwrap()],
            source_ip: "192.0.2.9".parse().unwrap(),
            version: "0.1.0".into(),
            requested_s: 7,
            state,
        }
    }

    #[test]
    fn a_node_that_waits_is_named_with_its_addresses_and_both_commands() {
        let token = TokenRecord {
            id: ShortId(1),
            digest: cluster::join_token::Sha256Digest([0; 32]),
            role: None,
            expires_s: 100,
            remaining_uses: Some(0),
            requires_approval: true,
            revoked: false,
            created_by: "a".into(),
            created_s: 0,
        };
        let present = [status::samples::node(2, "b", true)].into();
        let shown = |state, now_s| {
            let tokens = std::slice::from_ref(&token);
            join_info(&join(state), tokens, &present, now_s)
        };
        let waiting = shown(JoinState::Waiting, 99);
        let found = join_request_finding(&waiting).unwrap();
        for part in ["node b", "192.0.2.2:7480", "192.0.2.9"] {
            assert!(found.message.contains(part), "{found:?}");
        }
        let hint = found.hint.unwrap();
        assert!(
            hint.contains("cluster approve 1a2b3c4d") && hint.contains("cluster refuse 1a2b3c4d")
        );
        assert_eq!(
            join_request_finding(&shown(JoinState::Waiting, 100)),
            None,
            "nobody can let it in any more"
        );
        let states = [
            (JoinState::Waiting, 100, api::JoinState::Ended),
            (JoinState::Approved { by: "a".into() }, 99, api::JoinState::Approved),
            (JoinState::Refused { by: "a".into() }, 100, api::JoinState::Refused),
            (JoinState::Admitted { node: 2 }, 100, api::JoinState::Joined),
            (JoinState::Admitted { node: 3 }, 100, api::JoinState::Admitted),
        ];
        for (state, now_s, expected) in states {
            assert_eq!(shown(state.clone(), now_s).state, expected, "{state:?}");
        }
    }

    #[test]
    fn who_is_not_let_in_is_told_why_and_what_helps() {
        let hint = |e: JoinDenial| denial_error(&e).hint.unwrap_or_default();
        for error in [
            JoinDenial::UnknownToken,
            JoinDenial::UsedUp,
            JoinDenial::Revoked,
            JoinDenial::Expired { ago_s: 9 },
        ] {
            assert!(hint(error.clone()).contains("windrose cluster token"), "{error}");
        }
        assert!(
            hint(JoinDenial::WrongRole { role: Role::Witness })
                .contains("windrose cluster witness")
        );
        assert_eq!(denial_error(&JoinDenial::UnknownToken).code, ErrorCode::Unauthorized);
        let newer = JoinRequest::parse(br#"{"format":9,"version":"2.0"}"#).unwrap_err();
        let told = bad_request(&newer);
        assert_eq!(told.code, ErrorCode::Unauthorized, "no token was seen");
        assert!(told.message.contains("speaks version 1 of the join protocol"), "{told:?}");
        assert!(!told.message.contains(env!("CARGO_PKG_VERSION")), "{told:?}");
        assert_eq!(
            bad_request(&JoinRequestError::Malformed("?".into())).code,
            ErrorCode::Unauthorized
        );
    }

    #[test]
    fn a_token_names_the_nodes_that_run_first_and_its_own_before_all() {
        let mut present: Nodes = [(1, true), (2, false), (3, true)]
            .into_iter()
            .map(|(n, alive)| status::samples::node(n, "n", alive))
            .collect();
        for (node, view) in &mut present {
            view.record.join_address =
                Some(([192, 0, 2, u8::try_from(node.0).unwrap()], 7481).into());
        }
        let order: Vec<_> =
            join_addresses(&present, NodeId(3)).iter().map(ToString::to_string).collect();
        assert_eq!(order, ["192.0.2.3:7481", "192.0.2.1:7481", "192.0.2.2:7481"]);
    }
}
