//! Who is let into a cluster: its tokens and the requests of nodes to join, as records of the store (RFD 0038, 2.3).
//!
//! | key | holds | written by |
//! |---|---|---|
//! | `tokens/ID` | [`TokenRecord`] | the node that makes it; each that counts a use, or revokes it |
//! | `joins/ID` | [`JoinRecord`] | the node that is asked; who approves or refuses it |
//!
//! [`judge`] decides and is pure. A use is counted by the commit that writes the record of the join, so an answer that is
//! lost costs nothing: the same node that asks again with the same token finds its record.

use std::net::{IpAddr, SocketAddr};

use peer::NodeId;
use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::identity::{ClusterSecret, MAX_NODES, Protection, Role};
use crate::joining::{self, JoinError};
use crate::meta::{Change, Entry, Expect, Meta, MetaError, Revision};
use crate::nodes::{self, ClusterRecord};
use crate::token::{Digest, ShortId, TokenSecret};

/// What keys of tokens begin with.
pub const TOKENS: &str = "tokens/";

/// What keys of requests to join begin with.
pub const JOINS: &str = "joins/";

/// Version of requests and answers.
pub const FORMAT: u64 = 1;

/// Longest request or answer, in bytes.
pub const MAX_MESSAGE: usize = 64 << 10;

/// Most tokens that are kept, over ones included, and most requests.
const MAX_TOKENS: usize = 256;
const MAX_JOINS: usize = 1024;

/// Most requests that wait for a decision.
pub const MAX_WAITING: usize = 64;

/// How long what is over is kept, so that who comes too late is told why: a week.
const KEPT_S: u64 = 7 * 86_400;

/// Longest name and version in a request, and most addresses.
const MAX_TEXT: usize = 253;
const MAX_OWN_ADDRESSES: usize = 64;

/// A token, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRecord {
    /// Its identifier.
    pub id: ShortId,
    /// SHA-256 of its secret.
    pub digest: Digest,
    /// What it lets a node be; `None`: whatever it wants.
    pub role: Option<Role>,
    /// Until when, in seconds since 1970.
    pub expires_s: u64,
    /// How many nodes it lets in yet; `None`: any number.
    pub uses: Option<u32>,
    /// Whether a human has to approve each of them.
    pub approve: bool,
    /// Whether it was taken back.
    pub revoked: bool,
    /// The node at which it was made.
    pub made_by: String,
    /// When, in seconds since 1970.
    pub made_s: u64,
}

/// A token that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewToken {
    /// What it lets a node be; `None`: whatever it wants.
    pub role: Option<Role>,
    /// For how long, in seconds.
    pub lasts_s: u64,
    /// How many nodes it lets in; `None`: any number.
    pub uses: Option<u32>,
    /// Whether a human has to approve each of them.
    pub approve: bool,
    /// The node at which it is made.
    pub made_by: String,
}

/// Whether a token lets anybody in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenState {
    /// It does.
    Valid,
    /// As many have joined as it was for.
    UsedUp,
    /// Its time is over.
    Expired,
    /// It was taken back.
    Revoked,
}

impl TokenRecord {
    /// Whether it lets anybody in.
    #[must_use]
    pub fn state(&self, now_s: u64) -> TokenState {
        match self {
            Self { revoked: true, .. } => TokenState::Revoked,
            Self { expires_s, .. } if *expires_s <= now_s => TokenState::Expired,
            Self { uses: Some(0), .. } => TokenState::UsedUp,
            _ => TokenState::Valid,
        }
    }

    /// Whether those that were let in by it may still fetch their answer.
    #[must_use]
    pub fn answers(&self, now_s: u64) -> bool {
        matches!(self.state(now_s), TokenState::Valid | TokenState::UsedUp)
    }

    fn is_shown_by(&self, request: &JoinRequest) -> bool {
        self.id == request.token && self.digest == request.secret.digest()
    }

    fn put(&self, expect: Expect) -> Change {
        nodes::put(token_key(self.id), expect, self)
    }
}

/// How far a request to join has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is", deny_unknown_fields)]
pub enum JoinState {
    /// A human has to approve it.
    Waiting,
    /// One has; the node does not know yet.
    Approved {
        /// At which node.
        by: String,
    },
    /// One has refused it.
    Refused {
        /// At which node.
        by: String,
    },
    /// It has its number.
    Admitted {
        /// Which.
        node: u16,
    },
}

/// A request to join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRecord {
    /// Its identifier.
    pub id: ShortId,
    /// The token that was shown.
    pub token: ShortId,
    /// Who asks: the identity of its data directory.
    pub directory: Uuid,
    /// Its name.
    pub name: String,
    /// What it wants to be.
    pub role: Role,
    /// Where other nodes reach it, as it says.
    pub addresses: Vec<SocketAddr>,
    /// Where it asked from.
    pub from: IpAddr,
    /// Its version of the program.
    pub version: String,
    /// When it asked first, in seconds since 1970.
    pub asked_s: u64,
    /// How far it has come.
    pub state: JoinState,
}

impl JoinRecord {
    fn put(&self, expect: Expect) -> Change {
        nodes::put(join_key(self.id), expect, self)
    }

    /// The number that it was given.
    fn number(&self) -> Option<NodeId> {
        match self.state {
            JoinState::Admitted { node } => Some(NodeId(node)),
            JoinState::Waiting | JoinState::Approved { .. } | JoinState::Refused { .. } => None,
        }
    }

    fn is_of(&self, request: &JoinRequest) -> bool {
        let JoinRequest { token, directory, name, role, addresses, .. } = request;
        (self.token, self.directory, self.role) == (*token, *directory, *role)
            && (&self.name, &self.addresses) == (name, addresses)
    }
}

/// What a node asks that wants to join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// [`FORMAT`].
    pub format: u64,
    /// Its version of the program.
    pub version: String,
    /// The format of stores that it knows.
    pub store_format: u64,
    /// The cluster that it means.
    pub cluster: Uuid,
    /// Its token.
    pub token: ShortId,
    /// What shows that it has the token.
    pub secret: TokenSecret,
    /// Who it is: the identity of its data directory.
    pub directory: Uuid,
    /// Its name.
    pub name: String,
    /// What it wants to be.
    pub role: Role,
    /// Where other nodes reach it.
    pub addresses: Vec<SocketAddr>,
    /// How long its leases run, in milliseconds.
    pub lease_ms: u64,
    /// How long it waits leases out, in milliseconds.
    pub grace_ms: u64,
}

/// What a request of any version begins with.
#[derive(Deserialize)]
struct Head {
    format: u64,
}

/// Why bytes are no request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// Another version of the program sent it.
    #[error("this node speaks version {FORMAT} of the protocol by which nodes join")]
    OtherFormat {
        /// Its version of the protocol.
        format: u64,
    },
    /// It is none.
    #[error("it is no request to join: {0}")]
    Malformed(String),
}

/// Whether a text can stand in a log and on a terminal.
fn is_printable(text: &str) -> bool {
    (1..=MAX_TEXT).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic())
}

impl JoinRequest {
    /// What `bytes` say.
    ///
    /// # Errors
    /// [`BadRequest`].
    pub fn parse(bytes: &[u8]) -> Result<Self, BadRequest> {
        let malformed = |why: String| BadRequest::Malformed(why);
        if bytes.len() > MAX_MESSAGE {
            return Err(malformed(format!("it is longer than {MAX_MESSAGE} bytes")));
        }
        let head: Head = serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))?;
        if head.format != FORMAT {
            return Err(BadRequest::OtherFormat { format: head.format });
        }
        let request: Self = serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))?;
        let addresses = 1..=MAX_OWN_ADDRESSES;
        if !is_printable(&request.name) || !is_printable(&request.version) {
            return Err(malformed("its name or its version is none".to_owned()));
        }
        if !addresses.contains(&request.addresses.len()) {
            return Err(malformed("it names no addresses, or too many".to_owned()));
        }
        Ok(request)
    }

    /// As [`Self::parse`] reads it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        nodes::encode(self)
    }

    /// Where its record may stand, in the order in which it is looked for: what differs only by chance stands elsewhere.
    fn places(&self) -> impl Iterator<Item = ShortId> + use<> {
        let Self { token, directory, name, role, addresses, .. } = self;
        let mut sum = Context::new(&SHA256);
        sum.update(&nodes::encode(&(token, directory, name, role, addresses)));
        let sum = sum.finish();
        let words: Vec<_> =
            sum.as_ref().as_chunks().0.iter().map(|w| ShortId(u32::from_be_bytes(*w))).collect();
        words.into_iter()
    }

    fn record(&self, id: ShortId, from: IpAddr, now_s: u64, state: JoinState) -> JoinRecord {
        let Self { token, directory, name, role, addresses, version, .. } = self.clone();
        JoinRecord {
            id,
            token,
            directory,
            name,
            role,
            addresses,
            from,
            version,
            asked_s: now_s,
            state,
        }
    }
}

/// What a node is given that may join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinGrant {
    /// Its number, never 0.
    pub node: u16,
    /// The cluster's secret.
    pub secret: ClusterSecret,
    /// What protects the cluster's connections.
    pub protection: Protection,
    /// Client URLs of the store's members as they are now.
    pub endpoints: Vec<String>,
}

/// What a node is told that has asked well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JoinAnswer {
    /// It may.
    Granted(JoinGrant),
    /// A human has to approve it: ask again.
    Waiting {
        /// What its request is called.
        id: ShortId,
    },
}

impl JoinAnswer {
    /// What `bytes` say; else what is wrong with them.
    ///
    /// # Errors
    /// In words.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MAX_MESSAGE {
            return Err(format!("it is longer than {MAX_MESSAGE} bytes"));
        }
        let answer: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if let Self::Granted(grant) = &answer {
            if grant.node == 0 {
                return Err("the node's number is 0".to_owned());
            }
            grant.protection.check()?;
            crate::identity::check_endpoints(&grant.endpoints)?;
        }
        Ok(answer)
    }

    /// As [`Self::parse`] reads it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        nodes::encode(self)
    }
}

/// Why a node is not let in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// There is no such token, or another secret was shown.
    #[error(
        "the cluster does not know this token: it is wrong, or was removed a week after it expired"
    )]
    NoToken,
    /// Its time is over.
    #[error("the token expired {} ago by the clock of the node that was asked", span(*ago_s))]
    Expired {
        /// How long ago, in seconds.
        ago_s: u64,
    },
    /// As many have joined as it was for.
    #[error("the token is used up: as many nodes have joined with it as it was made for")]
    UsedUp,
    /// It was taken back.
    #[error("the token was revoked")]
    Revoked,
    /// It is for nodes of another kind.
    #[error("the token is for {}", match role { Role::Witness => "a witness only", Role::Data => "a node that keeps data only" })]
    OtherRole {
        /// For which.
        role: Role,
    },
    /// A human has refused it.
    #[error("the request {id} of this node to join was refused at node {by}")]
    Refused {
        /// Which request.
        id: ShortId,
        /// Where.
        by: String,
    },
    /// Too many wait.
    #[error("{MAX_WAITING} requests to join wait for approval already")]
    TooManyWait,
    /// Too many have come.
    #[error("there are {MAX_JOINS} requests to join already")]
    TooMany,
    /// What is the matter with the cluster or the store.
    #[error(transparent)]
    Join(#[from] JoinError),
}

impl From<MetaError> for Denial {
    fn from(e: MetaError) -> Self {
        Self::Join(e.into())
    }
}

/// A span of time for people.
#[must_use]
pub fn span(seconds: u64) -> String {
    let (number, one) = match seconds {
        0..120 => (seconds, "second"),
        120..7200 => (seconds / 60, "minute"),
        7200..172_800 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    wire::count(number, one).to_string()
}

/// Why something cannot be done with a token or a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// There is none.
    #[error("there is no {what} {id}")]
    Unknown {
        /// What of.
        what: &'static str,
        /// Which.
        id: ShortId,
    },
    /// It was refused before.
    #[error("request {id} was refused at node {by}: that stays so")]
    Refused {
        /// Which.
        id: ShortId,
        /// Where.
        by: String,
    },
    /// Its token is over.
    #[error("request {id} expired with its token {token}")]
    Ended {
        /// Which.
        id: ShortId,
        /// The token.
        token: ShortId,
    },
    /// It has come in.
    #[error("request {id} was granted: that is node {node} now")]
    Admitted {
        /// Which.
        id: ShortId,
        /// Its number.
        node: u16,
    },
    /// There are too many.
    #[error("there are {MAX_TOKENS} tokens that let nodes in already")]
    TooManyTokens,
    /// The system gives no random bytes.
    #[error("the system gives no random bytes")]
    NoRandom,
    /// The store.
    #[error(transparent)]
    Store(#[from] MetaError),
}

/// Key of a token.
#[must_use]
pub fn token_key(id: ShortId) -> String {
    format!("{TOKENS}{id}")
}

/// Key of a request.
#[must_use]
pub fn join_key(id: ShortId) -> String {
    format!("{JOINS}{id}")
}

fn decode_token(entry: &Entry) -> Result<TokenRecord, MetaError> {
    let record: TokenRecord = nodes::decode(entry)?;
    named(entry, &token_key(record.id)).map(|()| record)
}

fn decode_join(entry: &Entry) -> Result<JoinRecord, MetaError> {
    let record: JoinRecord = nodes::decode(entry)?;
    named(entry, &join_key(record.id)).map(|()| record)
}

fn named(entry: &Entry, key: &str) -> Result<(), MetaError> {
    let why = || "it is the record of another one".to_owned();
    let bad = || MetaError::Damaged { path: entry.key.clone(), why: why() };
    if entry.key == key { Ok(()) } else { Err(bad()) }
}

/// Whether what an entry under [`TOKENS`] or [`JOINS`] holds can be believed.
///
/// # Errors
/// [`MetaError::Damaged`].
pub fn check(entry: &Entry) -> Result<(), MetaError> {
    if entry.key.starts_with(TOKENS) {
        decode_token(entry).map(drop)
    } else {
        decode_join(entry).map(drop)
    }
}

/// What is to be done for a node that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Tell it to wait.
    Wait,
    /// Give it what it was given before.
    Repeat(NodeId),
    /// It was approved: give it a number.
    Admit,
    /// Count a use, and write its request down; whether it has to wait then.
    Count {
        /// For a human.
        wait: bool,
    },
}

/// Decides about a request at `now_s`, by its token and its record as they are in the store. `has_entered`: whether the node
/// of the record is one of the cluster, and so has had its answer: who asks is about to join once more.
///
/// # Errors
/// [`Denial`].
pub fn judge(
    now_s: u64,
    request: &JoinRequest,
    token: Option<&TokenRecord>,
    join: Option<&JoinRecord>,
    has_entered: bool,
) -> Result<Step, Denial> {
    let token = token.filter(|token| token.is_shown_by(request)).ok_or(Denial::NoToken)?;
    let state = token.state(now_s);
    match (state, token.role) {
        (TokenState::Revoked, _) => return Err(Denial::Revoked),
        (TokenState::Expired, _) => return Err(Denial::Expired { ago_s: now_s - token.expires_s }),
        (_, Some(role)) if role != request.role => return Err(Denial::OtherRole { role }),
        _ => {}
    }
    match join.map(|join| (join, &join.state)) {
        Some((join, JoinState::Refused { by })) => {
            Err(Denial::Refused { id: join.id, by: by.clone() })
        }
        Some((_, JoinState::Waiting)) => Ok(Step::Wait),
        Some((_, JoinState::Approved { .. })) => Ok(Step::Admit),
        Some((_, JoinState::Admitted { node })) if !has_entered => Ok(Step::Repeat(NodeId(*node))),
        _ if state == TokenState::UsedUp => Err(Denial::UsedUp),
        _ => Ok(Step::Count { wait: token.approve }),
    }
}

/// What came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The node is let in under this number.
    Admitted(NodeId),
    /// A human has to approve it.
    Waiting(ShortId),
}

/// Changes records until nobody else does at the same time.
macro_rules! until_unchanged {
    ($attempt:expr, $changed:pat) => {
        loop {
            match $attempt {
                Err($changed) => {}
                done => break done,
            }
        }
    };
}

/// Carries out what a node asks that wants to join, which asks from `from`.
///
/// # Errors
/// [`Denial`]. After [`MetaError::Unknown`] in it the same request may be made again.
pub async fn ask(
    meta: &dyn Meta,
    now_s: u64,
    request: &JoinRequest,
    from: IpAddr,
) -> Result<Outcome, Denial> {
    until_unchanged!(
        ask_once(meta, now_s, request, from).await,
        Denial::Join(JoinError::Store(MetaError::Changed { .. }))
    )
}

/// The token that a request shows, and where it stands in the store. Who shows none is told nothing else.
///
/// # Errors
/// [`Denial::NoToken`]; what is the matter with the store.
pub async fn shown_token(
    meta: &dyn Meta,
    request: &JoinRequest,
) -> Result<(TokenRecord, Revision), Denial> {
    let token = meta.get(&token_key(request.token)).await?;
    let token = token
        .map(|entry| Ok::<_, MetaError>((decode_token(&entry)?, entry.revision)))
        .transpose()?;
    token.filter(|(token, _)| token.is_shown_by(request)).ok_or(Denial::NoToken)
}

async fn ask_once(
    meta: &dyn Meta,
    now_s: u64,
    request: &JoinRequest,
    from: IpAddr,
) -> Result<Outcome, Denial> {
    // Who has no token makes the store do no more than this.
    let (token, token_at) = shown_token(meta, request).await?;
    let (cluster, cluster_at) = suits(meta, request).await?;
    let present = nodes::list_all(meta).await?;
    let (id, known) = find(meta, request).await?;
    let has_entered =
        known.as_ref().and_then(|(j, _)| j.number()).is_some_and(|n| present.contains_key(&n));
    let step = judge(now_s, request, Some(&token), known.as_ref().map(|(j, _)| j), has_entered)?;
    if let Step::Count { .. } | Step::Admit = step
        && present.len() >= MAX_NODES
    {
        return Err(JoinError::Full.into());
    }
    let wait = match step {
        Step::Wait => return Ok(Outcome::Waiting(id)),
        Step::Repeat(node) => return Ok(Outcome::Admitted(node)),
        Step::Admit => false,
        Step::Count { wait } => wait,
    };
    let mut changes = Vec::new();
    if let Step::Count { .. } = step {
        check_room(meta, wait).await?;
        let uses = token.uses.map(|uses| uses.saturating_sub(1));
        changes.push(TokenRecord { uses, ..token }.put(Expect::At(token_at)));
    } else {
        // It may be revoked at this moment.
        let still = Expect::Still(token_at);
        changes.push(Change { key: token_key(token.id), expect: still, value: None });
    }
    let node = cluster.next_node;
    let state = if wait {
        JoinState::Waiting
    } else {
        let next_node = node.checked_add(1).ok_or(JoinError::Full)?;
        changes.push(ClusterRecord { next_node, ..cluster }.put(Expect::At(cluster_at)));
        JoinState::Admitted { node }
    };
    let (record, expect) = match known {
        Some((known, at)) if step == Step::Admit => (JoinRecord { state, ..known }, Expect::At(at)),
        Some((_, at)) => (request.record(id, from, now_s, state), Expect::At(at)),
        None => (request.record(id, from, now_s, state), Expect::Absent),
    };
    changes.push(record.put(expect));
    meta.commit(changes).await?;
    Ok(if wait { Outcome::Waiting(id) } else { Outcome::Admitted(NodeId(node)) })
}

/// The cluster's record, if the node that asks is like its nodes.
async fn suits(
    meta: &dyn Meta,
    request: &JoinRequest,
) -> Result<(ClusterRecord, Revision), Denial> {
    let (cluster, at) = nodes::cluster(meta).await?.ok_or(JoinError::NoCluster)?;
    if cluster.id != request.cluster {
        return Err(JoinError::OtherCluster { found: cluster.id }.into());
    }
    joining::check_settings(&cluster, request.lease_ms, request.grace_ms)?;
    Ok((cluster, at))
}

/// The record of a request, and where it stands or would.
async fn find(
    meta: &dyn Meta,
    request: &JoinRequest,
) -> Result<(ShortId, Option<(JoinRecord, Revision)>), Denial> {
    for id in request.places() {
        let Some(entry) = meta.get(&join_key(id)).await? else { return Ok((id, None)) };
        let record = decode_join(&entry)?;
        if record.is_of(request) {
            return Ok((id, Some((record, entry.revision))));
        }
    }
    Err(Denial::TooMany)
}

async fn check_room(meta: &dyn Meta, wait: bool) -> Result<(), Denial> {
    let (entries, _) = meta.list(JOINS).await?;
    if entries.len() >= MAX_JOINS {
        return Err(Denial::TooMany);
    }
    let waiting = entries
        .iter()
        .filter_map(|e| decode_join(e).ok())
        .filter(|j| j.state == JoinState::Waiting);
    if wait && waiting.count() >= MAX_WAITING { Err(Denial::TooManyWait) } else { Ok(()) }
}

/// Makes a token; gives its record and its secret, which nothing else has.
///
/// # Errors
/// [`AdmissionError`].
pub async fn create(
    meta: &dyn Meta,
    now_s: u64,
    new: &NewToken,
) -> Result<(TokenRecord, TokenSecret), AdmissionError> {
    until_unchanged!(
        create_once(meta, now_s, new).await,
        AdmissionError::Store(MetaError::Changed { .. })
    )
}

async fn create_once(
    meta: &dyn Meta,
    now_s: u64,
    new: &NewToken,
) -> Result<(TokenRecord, TokenSecret), AdmissionError> {
    let (entries, _) = meta.list(TOKENS).await?;
    let mut changes = Vec::new();
    if entries.len() >= MAX_TOKENS {
        let is_over =
            |e: &&Entry| decode_token(e).is_ok_and(|t| t.state(now_s) != TokenState::Valid);
        let over = entries.iter().find(is_over).ok_or(AdmissionError::TooManyTokens)?;
        changes.push(removal(over));
    }
    let secret = TokenSecret::random().ok_or(AdmissionError::NoRandom)?;
    let NewToken { role, lasts_s, uses, approve, made_by } = new.clone();
    let record = TokenRecord {
        id: ShortId::random().ok_or(AdmissionError::NoRandom)?,
        digest: secret.digest(),
        role,
        expires_s: now_s.saturating_add(lasts_s),
        uses,
        approve,
        revoked: false,
        made_by,
        made_s: now_s,
    };
    changes.push(record.put(Expect::Absent));
    meta.commit(changes).await?;
    Ok((record, secret))
}

fn removal(entry: &Entry) -> Change {
    Change { key: entry.key.clone(), expect: Expect::At(entry.revision), value: None }
}

/// All tokens that can be read, the newest first.
///
/// # Errors
/// [`MetaError`].
pub async fn tokens(meta: &dyn Meta) -> Result<Vec<TokenRecord>, MetaError> {
    let (entries, _) = meta.list(TOKENS).await?;
    let mut tokens: Vec<_> = entries.iter().filter_map(|e| decode_token(e).ok()).collect();
    tokens.sort_by_key(|token| std::cmp::Reverse((token.made_s, token.id)));
    Ok(tokens)
}

/// All requests to join that can be read, the newest first.
///
/// # Errors
/// [`MetaError`].
pub async fn joins(meta: &dyn Meta) -> Result<Vec<JoinRecord>, MetaError> {
    let (entries, _) = meta.list(JOINS).await?;
    let mut joins: Vec<_> = entries.iter().filter_map(|e| decode_join(e).ok()).collect();
    joins.sort_by_key(|join| std::cmp::Reverse((join.asked_s, join.id)));
    Ok(joins)
}

/// Takes a token back, again or for the first time. One whose record is damaged is removed.
///
/// # Errors
/// [`AdmissionError::Unknown`]; [`AdmissionError::Store`].
pub async fn revoke(meta: &dyn Meta, id: ShortId) -> Result<(), AdmissionError> {
    until_unchanged!(revoke_once(meta, id).await, AdmissionError::Store(MetaError::Changed { .. }))
}

/// Takes all tokens back that are not over.
///
/// # Errors
/// [`AdmissionError`].
pub async fn revoke_all(meta: &dyn Meta) -> Result<(), AdmissionError> {
    for token in tokens(meta).await?.iter().filter(|token| !token.revoked) {
        match revoke(meta, token.id).await {
            // It was removed meanwhile.
            Ok(()) | Err(AdmissionError::Unknown { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn revoke_once(meta: &dyn Meta, id: ShortId) -> Result<(), AdmissionError> {
    let entry = meta.get(&token_key(id)).await?;
    let entry = entry.ok_or(AdmissionError::Unknown { what: "token", id })?;
    let change = match decode_token(&entry) {
        Ok(TokenRecord { revoked: true, .. }) => return Ok(()),
        Ok(token) => TokenRecord { revoked: true, ..token }.put(Expect::At(entry.revision)),
        Err(_) => removal(&entry),
    };
    Ok(meta.commit(vec![change]).await.map(drop)?)
}

/// Lets a node in that waits, or keeps it out; said at the node called `by`. Doing it again changes nothing.
///
/// # Errors
/// [`AdmissionError`].
pub async fn decide(
    meta: &dyn Meta,
    now_s: u64,
    id: ShortId,
    approve: bool,
    by: &str,
) -> Result<(), AdmissionError> {
    until_unchanged!(
        decide_once(meta, now_s, id, approve, by).await,
        AdmissionError::Store(MetaError::Changed { .. })
    )
}

async fn decide_once(
    meta: &dyn Meta,
    now_s: u64,
    id: ShortId,
    approve: bool,
    by: &str,
) -> Result<(), AdmissionError> {
    let entry = meta.get(&join_key(id)).await?;
    let entry = entry.ok_or(AdmissionError::Unknown { what: "request to join", id })?;
    let record = match decode_join(&entry) {
        // What cannot be read lets nobody in.
        Err(_) if !approve => return Ok(meta.commit(vec![removal(&entry)]).await.map(drop)?),
        record => record?,
    };
    let by = by.to_owned();
    let state = match (&record.state, approve) {
        (JoinState::Refused { .. }, false)
        | (JoinState::Approved { .. } | JoinState::Admitted { .. }, true) => {
            return Ok(());
        }
        (JoinState::Refused { by }, true) => {
            return Err(AdmissionError::Refused { id, by: by.clone() });
        }
        (JoinState::Admitted { node }, false) => {
            return Err(AdmissionError::Admitted { id, node: *node });
        }
        (JoinState::Waiting | JoinState::Approved { .. }, false) => JoinState::Refused { by },
        (JoinState::Waiting, true) => {
            let token = meta.get(&token_key(record.token)).await?;
            let token = token.and_then(|entry| decode_token(&entry).ok());
            if token.is_none_or(|token| !token.answers(now_s)) {
                return Err(AdmissionError::Ended { id, token: record.token });
            }
            JoinState::Approved { by }
        }
    };
    let change = JoinRecord { state, ..record }.put(Expect::At(entry.revision));
    Ok(meta.commit(vec![change]).await.map(drop)?)
}

/// What removes the requests under which a node came, when it goes: who comes again asks anew.
///
/// # Errors
/// [`MetaError`].
pub(crate) async fn forget(meta: &dyn Meta, node: NodeId) -> Result<Vec<Change>, MetaError> {
    let (entries, _) = meta.list(JOINS).await?;
    let of = |entry: &&Entry| decode_join(entry).is_ok_and(|join| join.number() == Some(node));
    Ok(entries.iter().filter(of).map(removal).collect())
}

/// The condition that the node has asked to join, was let in, and was not removed since.
pub(crate) async fn is_admitted(
    meta: &dyn Meta,
    node: NodeId,
) -> Result<Option<Change>, MetaError> {
    let (entries, _) = meta.list(JOINS).await?;
    let admitted = |entry: &&Entry| {
        let state = decode_join(entry).map(|join| join.state);
        state.is_ok_and(|state| state == JoinState::Admitted { node: node.0 })
    };
    Ok(entries.iter().find(admitted).map(|entry| Change {
        key: entry.key.clone(),
        expect: Expect::Still(entry.revision),
        value: None,
    }))
}

/// Removes what is over for a week.
///
/// # Errors
/// [`MetaError`]; the rest goes another time.
pub async fn clean_up(meta: &dyn Meta, now_s: u64) -> Result<(), MetaError> {
    let (tokens, _) = meta.list(TOKENS).await?;
    let (joins, _) = meta.list(JOINS).await?;
    let present = nodes::list_all(meta).await?;
    let old = |at_s: u64| at_s.saturating_add(KEPT_S) < now_s;
    let kept: Vec<TokenRecord> = tokens.iter().filter_map(|e| decode_token(e).ok()).collect();
    let answers = |id| kept.iter().any(|t| t.id == id && t.answers(now_s));
    let token_is_old = |e: &&Entry| decode_token(e).is_ok_and(|t| old(t.expires_s));
    let join_is_old = |e: &&Entry| {
        decode_join(e).is_ok_and(|j| {
            let entered = j.number().is_some_and(|node| present.contains_key(&node));
            old(j.asked_s) && (entered || !answers(j.token))
        })
    };
    let over = tokens.iter().filter(token_is_old).chain(joins.iter().filter(join_is_old));
    for entry in over {
        match meta.commit(vec![removal(entry)]).await {
            Ok(_) | Err(MetaError::Changed { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
