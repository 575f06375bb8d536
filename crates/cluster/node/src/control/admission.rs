//! Who is let into the cluster: what the API asks about tokens and requests to join, and what nodes ask that join (RFD 0038,
//! 2.3).

use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;
use std::time::Duration;

use ::cluster::admission::{
    self, AdmissionError, BadRequest, Denial, JoinAnswer, JoinGrant, JoinRecord, JoinRequest,
    JoinState, NewToken, Outcome, TokenRecord, TokenState,
};
use ::cluster::identity::{Identity, Protection, Role};
use ::cluster::joining;
use ::cluster::nodes::{self, NodeView, Nodes};
use ::cluster::token::{ShortId, Token, Trust};
use api::{
    ApiError, ClusterToken, Code, CreateToken, Finding, JoinInfo, JoinList, NodeRole, Severity,
    TokenInfo, TokenList,
};
use peer::NodeId;

use super::cluster::{conflict, join_error, role};
use super::create::now_s;
use super::status::finding;
use super::{Control, store_error};
use crate::http::joins::{CAPACITY, router};
use crate::http::listen;
use crate::http::{Door, Server, TlsAcceptorDebug};
use crate::meta::{MetaError, embedded};
use crate::part::Part;
use crate::protection;

/// How often what is over is looked for, and how soon after the start.
const CLEAN_UP: Duration = Duration::from_secs(3600);
const FIRST_CLEAN_UP: Duration = Duration::from_secs(60);

/// Pause before a port that cannot be listened at is tried again.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);

/// Longest life of a token: a year.
const MAX_LIFE_S: u64 = 366 * 86_400;

/// What helps where a token lets nobody in.
pub(super) const ANEW: &str =
    "make a new token at a node of the cluster (windrose cluster token), and use that here";

impl Control {
    /// Makes a token.
    ///
    /// # Errors
    /// [`Code::Conflict`] for a node that is in no cluster; [`Code::InvalidRequest`].
    pub async fn create_token(&self, ask: CreateToken) -> Result<ClusterToken, ApiError> {
        let part = self.member_part()?;
        let CreateToken { uses, lasts_s, role, approve } = ask;
        let bad = |what: &str| Err(ApiError::new(Code::InvalidRequest, what.to_owned()));
        if uses == Some(0) {
            return bad("uses: a token is for one node at least");
        }
        if !(1..=MAX_LIFE_S).contains(&lasts_s) {
            return bad("lasts_s: a token lasts for a second at least, and for 366 days at most");
        }
        let role = role.map(|role| match role {
            NodeRole::Data => Role::Data,
            NodeRole::Witness => Role::Witness,
        });
        let Identity { cluster, protection, node, .. } = part.identity();
        let trust = Trust::of(&protection).ok_or_else(|| {
            ApiError::new(
                Code::Internal,
                "the certificate of the cluster's authority cannot be read",
            )
        })?;
        Self::check_no_rotation(part).await?;
        let (present, _) = nodes::list(part.store()).await.map_err(|e| store_error(&e))?;
        let addresses = join_addresses(&present, node);
        if addresses.is_empty() {
            return Err(conflict(
                "no node of the cluster says where it lets others in",
                "set cluster.listen in the configuration of this node and restart it",
            ));
        }
        let made_by = self.0.settings.name.clone();
        let new = NewToken { role, lasts_s, uses, approve, made_by };
        let now = now_s();
        let made = admission::create(part.store(), now, &new).await;
        let (record, secret) = made.map_err(|e| admission_error(&e))?;
        tracing::info!(token = %record.id, uses, lasts_s, approve, "a token was made with which nodes can join");
        let token = Token { cluster, id: record.id, secret, trust, addresses };
        Ok(ClusterToken { token: token.to_text(), info: token_info(&record, now) })
    }

    /// The tokens.
    ///
    /// # Errors
    /// [`Code::Conflict`] for a node that is in no cluster.
    pub async fn tokens(&self) -> Result<TokenList, ApiError> {
        let part = self.member_part()?;
        let tokens = admission::tokens(part.store()).await.map_err(|e| store_error(&e))?;
        let now = now_s();
        Ok(TokenList { tokens: tokens.iter().map(|token| token_info(token, now)).collect() })
    }

    /// Takes a token back.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::InvalidRequest`] for what is no identifier.
    pub async fn revoke_token(&self, id: &str) -> Result<TokenList, ApiError> {
        let (part, id) = (self.member_part()?, parse_id(id)?);
        let revoked = admission::revoke(part.store(), id).await;
        revoked.map_err(|e| admission_error(&e))?;
        tracing::info!(token = %id, "a token was revoked");
        self.tokens().await
    }

    /// The requests to join.
    ///
    /// # Errors
    /// [`Code::Conflict`] for a node that is in no cluster.
    pub async fn joins(&self) -> Result<JoinList, ApiError> {
        let part = self.member_part()?;
        let store = part.store();
        let read = async {
            let joins = admission::joins(store).await?;
            let tokens = admission::tokens(store).await?;
            let (present, _) = nodes::list(store).await?;
            Ok::<_, MetaError>((joins, tokens, present))
        };
        let (joins, tokens, present) = read.await.map_err(|e| store_error(&e))?;
        let now = now_s();
        let joins = joins.iter().map(|join| join_info(join, &tokens, &present, now)).collect();
        Ok(JoinList { joins })
    }

    /// Lets a node in that waits, or keeps it out.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::Conflict`] where it was decided otherwise or has ended;
    /// [`Code::InvalidRequest`] for what is no identifier.
    pub async fn decide_join(&self, id: &str, approve: bool) -> Result<JoinList, ApiError> {
        let (part, id) = (self.member_part()?, parse_id(id)?);
        let name = &self.0.settings.name;
        let decided = admission::decide(part.store(), now_s(), id, approve, name).await;
        decided.map_err(|e| admission_error(&e))?;
        tracing::info!(join = %id, approve, "a request to join was decided");
        self.joins().await
    }

    /// What a node is told that asks to join from `from`.
    ///
    /// # Errors
    /// [`Code::Unauthorized`] for who has no token of this cluster; others say what is in the way.
    pub(crate) async fn let_in(&self, body: &[u8], from: IpAddr) -> Result<JoinAnswer, ApiError> {
        let request = JoinRequest::parse(body).map_err(|e| bad_request(&e))?;
        let part = self.member_part()?;
        let identity = part.identity();
        if request.store_format != embedded::FORMAT {
            // Versions are for those that have a token.
            let shown = admission::shown_token(part.store(), &request).await;
            shown.map_err(|e| denied(&e))?;
            return Err(other_version(&format!(
                "its store has format {}, and the node that joins knows format {}",
                embedded::FORMAT,
                request.store_format
            )));
        }
        let outcome = admission::ask(part.store(), now_s(), &request, from).await;
        let outcome = outcome.map_err(|e| denied(&e))?;
        let (name, addresses) = (&request.name, &request.addresses);
        let node = match outcome {
            Outcome::Waiting(id) => {
                tracing::debug!(join = %id, name, %from, "a node waits to be let in");
                return Ok(JoinAnswer::Waiting { id });
            }
            Outcome::Admitted(node) => node,
        };
        tracing::info!(%node, name, ?addresses, %from, token = %request.token, "a node is let into the cluster");
        let Identity { secret, protection, endpoints, member, .. } = identity;
        let now = match part.own_members() {
            true => part.store().members().await.map(|m| joining::endpoints(&m, member.as_ref())),
            false => Ok(Vec::new()),
        };
        let endpoints = now.ok().filter(|now| !now.is_empty()).unwrap_or(endpoints);
        Ok(JoinAnswer::Granted(JoinGrant { node: node.0, secret, protection, endpoints }))
    }

    /// Lets nodes in for as long as this one is a member.
    pub(super) async fn serve_joins(self) {
        let (Some(part), Some(at)) = (self.0.part.clone(), self.0.settings.cluster.join) else {
            return;
        };
        let mut identity = part.follow_identity();
        loop {
            let protection = identity.borrow_and_update().protection.clone();
            match self.open_joins(&part, (&protection, at)) {
                Ok(_server) => {
                    self.set_joins_trouble(None);
                    tracing::info!(%at, "nodes with a token can join here");
                    // It serves until it is dropped: for as long as it shows what it should.
                    let changed = identity.wait_for(|now| now.protection != protection).await;
                    if changed.is_err() {
                        return;
                    }
                }
                Err(why) => {
                    if self.set_joins_trouble(Some(why.clone())) {
                        tracing::warn!(why, "no node can join here");
                    }
                    tokio::time::sleep(LISTEN_AGAIN).await;
                }
            }
        }
    }

    fn open_joins(
        &self,
        part: &Part,
        (protection, at): (&Protection, SocketAddr),
    ) -> Result<Server, String> {
        let listener = listen::tcp("cluster.join", at).map_err(|e| e.to_string())?;
        let door = match part.certificates() {
            None => Door::Plain(listener),
            Some(tls) => {
                let acceptor = protection::join_acceptor(protection, tls);
                Door::Tls(listener, TlsAcceptorDebug(acceptor.map_err(|e| e.to_string())?))
            }
        };
        let mut server = Server::default();
        server.open(door, router(self), CAPACITY);
        Ok(server)
    }

    /// Says whether that is news.
    fn set_joins_trouble(&self, why: Option<String>) -> bool {
        let mut trouble = self.0.joins_trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = *trouble != why;
        *trouble = why;
        is_news
    }

    /// Removes what is over, for as long as this node is a member.
    pub(super) async fn clean_up_admission(self) {
        let Some(part) = self.0.part.clone() else { return };
        tokio::time::sleep(FIRST_CLEAN_UP).await;
        loop {
            if let Err(error) = admission::clean_up(part.store(), now_s()).await {
                tracing::debug!(%error, "tokens and requests to join that are over stay for now");
            }
            tokio::time::sleep(CLEAN_UP).await;
        }
    }

    /// What there is to say of nodes that want to join: who waits, where the store answers.
    pub(super) async fn join_findings(&self, store_answers: bool) -> Vec<Finding> {
        let trouble = self.0.joins_trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut findings: Vec<_> = trouble.as_deref().map(cannot_join_here).into_iter().collect();
        if store_answers && let Ok(list) = self.joins().await {
            findings.extend(list.joins.iter().filter_map(waits));
        }
        findings
    }
}

fn cannot_join_here(why: &str) -> Finding {
    let hint = "stop what uses the port, or set cluster.join in the configuration to another one and restart this node; \
                nodes join at the others meanwhile";
    finding(Severity::Warning, "joins", format!("no node can join here: {why}"), Some(hint))
}

/// What there is to say of a request that waits.
fn waits(join: &JoinInfo) -> Option<Finding> {
    if join.state != api::JoinState::Waiting {
        return None;
    }
    let JoinInfo { id, name, addresses, from, role, .. } = join;
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let what = match role {
        NodeRole::Data => "to keep data",
        NodeRole::Witness => "as a witness",
    };
    let message = format!(
        "node {name} at {}, which asks from {from}, wants to join {what} and waits for approval",
        addresses.join(", ")
    );
    let hint = format!(
        "windrose cluster approve {id} lets it in, windrose cluster refuse {id} keeps it out"
    );
    Some(finding(Severity::Note, "joins", message, Some(&hint)))
}

/// Where nodes let others in: this one first, those that run before those that do not.
fn join_addresses(present: &Nodes, own: NodeId) -> Vec<SocketAddr> {
    let mut all: Vec<&NodeView> = present.values().collect();
    all.sort_by_key(|view| (view.record.node != own, !view.alive, view.record.node));
    all.iter().filter_map(|view| view.record.join).collect()
}

fn parse_id(id: &str) -> Result<ShortId, ApiError> {
    id.parse().map_err(|e| {
        ApiError::new(Code::InvalidRequest, format!("{id:?}: {e}"))
            .hint("windrose cluster token list and windrose cluster joins show them")
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
        uses: token.uses,
        expires_s: token.expires_s,
        role: token.role.map(role),
        approve: token.approve,
        made_by: token.made_by.clone(),
        made_s: token.made_s,
    }
}

fn join_info(join: &JoinRecord, tokens: &[TokenRecord], present: &Nodes, now_s: u64) -> JoinInfo {
    let answers = tokens.iter().any(|token| token.id == join.token && token.answers(now_s));
    let (state, node, by) = match &join.state {
        JoinState::Refused { by } => (api::JoinState::Refused, None, Some(by.clone())),
        JoinState::Admitted { node } if present.contains_key(&NodeId(*node)) => {
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
        from: join.from,
        version: join.version.clone(),
        token: join.token.to_string(),
        asked_s: join.asked_s,
        state,
        node,
        by,
    }
}

fn admission_error(error: &AdmissionError) -> ApiError {
    let message = error.to_string();
    match error {
        AdmissionError::Unknown { what, .. } => {
            let hint = match *what {
                "token" => "windrose cluster token list shows what there is",
                _ => "windrose cluster joins shows what there is",
            };
            ApiError::new(Code::NotFound, message).hint(hint)
        }
        AdmissionError::Refused { .. } | AdmissionError::Ended { .. } => conflict(
            message,
            "make a new token (windrose cluster token create --approve), with which the node asks again",
        ),
        AdmissionError::Admitted { node, .. } => {
            let hint = format!(
                "windrose cluster leave --node {node} --force takes it out, once it does not run"
            );
            conflict(message, &hint)
        }
        AdmissionError::TooManyTokens => conflict(
            message,
            "windrose cluster token list shows them, windrose cluster token revoke ID takes one back",
        ),
        AdmissionError::NoRandom => ApiError::new(Code::Internal, message),
        AdmissionError::Store(error) => store_error(error),
    }
}

fn other_version(what: &str) -> ApiError {
    let message =
        format!("the cluster runs version {} of windrose: {what}", env!("CARGO_PKG_VERSION"));
    conflict(message, "run the same version of windrose at all nodes")
}

fn bad_request(error: &BadRequest) -> ApiError {
    match error {
        // No token was seen: it counts as an attempt without one, and is told nothing but this.
        BadRequest::OtherFormat { .. } => ApiError::new(Code::Unauthorized, error.to_string())
            .hint("run the same version of windrose at all nodes"),
        BadRequest::Malformed(_) => ApiError::new(Code::Unauthorized, error.to_string()),
    }
}

/// Why a node is not let in, as it is told.
fn denied(error: &Denial) -> ApiError {
    let message = error.to_string();
    match error {
        Denial::NoToken => ApiError::new(Code::Unauthorized, message).hint(ANEW),
        Denial::Expired { .. } | Denial::UsedUp | Denial::Revoked => conflict(message, ANEW),
        Denial::OtherRole { role } => {
            let hint = match role {
                Role::Witness => {
                    "windrose cluster witness uses it, or make another one: windrose cluster token"
                }
                Role::Data => {
                    "windrose cluster join uses it, or make another one: windrose cluster token"
                }
            };
            conflict(message, hint)
        }
        Denial::Refused { .. } => conflict(
            message,
            "if that was a mistake, make a new token at a node of the cluster (windrose cluster token), and use that here",
        ),
        Denial::TooManyWait | Denial::TooMany => conflict(
            message,
            "windrose cluster joins at a node of the cluster shows them; windrose cluster refuse ID decides one, \
             windrose cluster token revoke ID takes the token back that lets so many in",
        ),
        Denial::Join(error) => join_error(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(state: JoinState) -> JoinRecord {
        JoinRecord {
            id: ShortId(0x1a2b_3c4d),
            token: ShortId(1),
            directory: uuid::Uuid::nil(),
            name: "b".into(),
            role: Role::Data,
            addresses: vec!["192.0.2.2:7480".parse().unwrap()],
            from: "192.0.2.9".parse().unwrap(),
            version: "0.1.0".into(),
            asked_s: 7,
            state,
        }
    }

    #[test]
    fn a_node_that_waits_is_named_with_its_addresses_and_both_commands() {
        let token = TokenRecord {
            id: ShortId(1),
            digest: ::cluster::token::Digest([0; 32]),
            role: None,
            expires_s: 100,
            uses: Some(0),
            approve: true,
            revoked: false,
            made_by: "a".into(),
            made_s: 0,
        };
        let present = [super::super::members::tests::node(2, "b", true)].into();
        let shown = |state, now_s| {
            let tokens = std::slice::from_ref(&token);
            join_info(&join(state), tokens, &present, now_s)
        };
        let waiting = shown(JoinState::Waiting, 99);
        let found = waits(&waiting).unwrap();
        for part in ["node b", "192.0.2.2:7480", "192.0.2.9"] {
            assert!(found.message.contains(part), "{found:?}");
        }
        let hint = found.hint.unwrap();
        assert!(
            hint.contains("cluster approve 1a2b3c4d") && hint.contains("cluster refuse 1a2b3c4d")
        );
        assert_eq!(waits(&shown(JoinState::Waiting, 100)), None, "nobody can let it in any more");
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
        let hint = |e: Denial| denied(&e).hint.unwrap_or_default();
        for error in
            [Denial::NoToken, Denial::UsedUp, Denial::Revoked, Denial::Expired { ago_s: 9 }]
        {
            assert!(hint(error.clone()).contains("windrose cluster token"), "{error}");
        }
        assert!(
            hint(Denial::OtherRole { role: Role::Witness }).contains("windrose cluster witness")
        );
        assert_eq!(denied(&Denial::NoToken).code, Code::Unauthorized);
        let newer = JoinRequest::parse(br#"{"format":9,"version":"2.0"}"#).unwrap_err();
        let told = bad_request(&newer);
        assert_eq!(told.code, Code::Unauthorized, "no token was seen");
        assert!(told.message.contains("speaks version 1 of the protocol"), "{told:?}");
        assert!(!told.message.contains(env!("CARGO_PKG_VERSION")), "{told:?}");
        assert_eq!(bad_request(&BadRequest::Malformed("?".into())).code, Code::Unauthorized);
    }

    #[test]
    fn a_token_names_the_nodes_that_run_first_and_its_own_before_all() {
        let mut present: Nodes = [(1, true), (2, false), (3, true)]
            .into_iter()
            .map(|(n, alive)| super::super::members::tests::node(n, "n", alive))
            .collect();
        for (node, view) in &mut present {
            view.record.join = Some(([192, 0, 2, u8::try_from(node.0).unwrap()], 7481).into());
        }
        let order: Vec<_> =
            join_addresses(&present, NodeId(3)).iter().map(ToString::to_string).collect();
        assert_eq!(order, ["192.0.2.3:7481", "192.0.2.1:7481", "192.0.2.2:7481"]);
    }
}
