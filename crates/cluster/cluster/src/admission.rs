//! Admission to a cluster: join tokens and join requests, as records in the store (RFD 0038, 2.3).
//!
//! | key | holds | written by |
//! |---|---|---|
//! | `tokens/ID` | [`TokenRecord`] | its creator; nodes that count a use or revoke it |
//! | `joins/ID` | [`JoinRecord`] | the node that receives the request; the node that decides it |
//!
//! [`decide_join`] decides and is pure. The commit that writes the join record also counts the use,
//! so a lost response costs nothing: when the same node asks again with the same token, its record
//! is found.

use std::net::{IpAddr, SocketAddr};

use peer::NodeId;
use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::identity::{ClusterSecret, MAX_NODES, Role, TransportSecurity};
use crate::join_error::{JoinError, check_settings};
use crate::join_token::{Sha256Digest, ShortId, TokenSecret};
use crate::nodes::{self, ClusterRecord};
use crate::store::{Change, Entry, MetadataStore, Precondition, Revision, StoreError};

/// Prefix of the keys of tokens.
pub const TOKEN_KEY_PREFIX: &str = "tokens/";

/// Prefix of the keys of join requests.
pub const JOIN_KEY_PREFIX: &str = "joins/";

/// Version of the join protocol.
pub const JOIN_PROTOCOL_VERSION: u64 = 1;

/// Longest request or response, in bytes.
pub const MAX_MESSAGE_LEN: usize = 64 << 10;

/// Most tokens kept, ended ones included, and most requests.
const MAX_TOKENS: usize = 256;
const MAX_JOINS: usize = 1024;

/// Most requests that wait for approval.
pub const MAX_WAITING_JOINS: usize = 64;

/// How long ended tokens and requests are kept, so that a late node learns why it is denied: a
/// week.
const RETENTION_S: u64 = 7 * 86_400;

/// Longest name and version in a request, and most addresses.
const MAX_TEXT_LEN: usize = 253;
const MAX_NODE_ADDRESSES: usize = 64;

/// A token, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRecord {
    /// Its identifier.
    pub id: ShortId,
    /// SHA-256 of its secret.
    pub digest: Sha256Digest,
    /// The role it admits; `None`: any.
    pub role: Option<Role>,
    /// When it expires, in seconds since 1970.
    pub expires_s: u64,
    /// How many more nodes it admits; `None`: any number.
    #[serde(rename = "uses")]
    pub remaining_uses: Option<u32>,
    /// Whether an administrator must approve each of them.
    #[serde(rename = "approve")]
    pub requires_approval: bool,
    /// Whether it was revoked.
    pub revoked: bool,
    /// The node that created it.
    #[serde(rename = "made_by")]
    pub created_by: String,
    /// When it was created, in seconds since 1970.
    #[serde(rename = "made_s")]
    pub created_s: u64,
}

/// A token to be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewToken {
    /// The role it admits; `None`: any.
    pub role: Option<Role>,
    /// How long it is valid, in seconds.
    pub lifetime_s: u64,
    /// How many nodes it admits; `None`: any number.
    pub uses: Option<u32>,
    /// Whether an administrator must approve each of them.
    pub requires_approval: bool,
    /// The node that creates it.
    pub created_by: String,
}

/// Whether a token admits nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenState {
    /// It admits nodes.
    Valid,
    /// All its uses are consumed.
    UsedUp,
    /// It has expired.
    Expired,
    /// It was revoked.
    Revoked,
}

impl TokenRecord {
    /// Whether the token admits nodes at `now_s`.
    #[must_use]
    pub fn state(&self, now_s: u64) -> TokenState {
        match self {
            Self { revoked: true, .. } => TokenState::Revoked,
            Self { expires_s, .. } if *expires_s <= now_s => TokenState::Expired,
            Self { remaining_uses: Some(0), .. } => TokenState::UsedUp,
            _ => TokenState::Valid,
        }
    }

    /// Whether nodes admitted by it may still fetch their grant.
    #[must_use]
    pub fn allows_result_fetch(&self, now_s: u64) -> bool {
        matches!(self.state(now_s), TokenState::Valid | TokenState::UsedUp)
    }

    fn is_proved_by(&self, request: &JoinRequest) -> bool {
        self.id == request.token && self.digest == request.secret.digest()
    }

    fn to_change(&self, expect: Precondition) -> Change {
        nodes::put_change(token_key(self.id), expect, self)
    }
}

/// State of a join request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is", deny_unknown_fields)]
pub enum JoinState {
    /// Waits for approval.
    Waiting,
    /// Approved; the node has not fetched its grant yet.
    Approved {
        /// The node where it was approved.
        by: String,
    },
    /// Refused by an administrator.
    Refused {
        /// The node where it was refused.
        by: String,
    },
    /// The node has its number.
    Admitted {
        /// The number.
        node: u16,
    },
}

/// A stored join request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRecord {
    /// Its identifier.
    pub id: ShortId,
    /// The token it was made with.
    pub token: ShortId,
    /// The identity of the joining node's data directory.
    #[serde(rename = "directory")]
    pub data_dir_id: Uuid,
    /// The node's name.
    pub name: String,
    /// The role it asks for.
    pub role: Role,
    /// Where other nodes reach it, as it claims.
    pub addresses: Vec<SocketAddr>,
    /// The address it connected from.
    #[serde(rename = "from")]
    pub source_ip: IpAddr,
    /// The version it runs.
    pub version: String,
    /// When it first asked, in seconds since 1970.
    #[serde(rename = "asked_s")]
    pub requested_s: u64,
    /// Its state.
    pub state: JoinState,
}

impl JoinRecord {
    fn to_change(&self, expect: Precondition) -> Change {
        nodes::put_change(join_key(self.id), expect, self)
    }

    /// The number the node was given, if it was admitted.
    fn admitted_node(&self) -> Option<NodeId> {
        match self.state {
            JoinState::Admitted { node } => Some(NodeId(node)),
            JoinState::Waiting | JoinState::Approved { .. } | JoinState::Refused { .. } => None,
        }
    }

    fn is_for_request(&self, request: &JoinRequest) -> bool {
        let JoinRequest { token, data_dir_id, name, role, addresses, .. } = request;
        (self.token, self.data_dir_id, self.role) == (*token, *data_dir_id, *role)
            && (&self.name, &self.addresses) == (name, addresses)
    }
}

/// The request of a node that wants to join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// [`JOIN_PROTOCOL_VERSION`].
    pub format: u64,
    /// The version the node runs.
    pub version: String,
    /// The store format it knows.
    pub store_format: u64,
    /// The cluster it wants to join.
    pub cluster: Uuid,
    /// Its token.
    pub token: ShortId,
    /// The secret that proves possession of the token.
    pub secret: TokenSecret,
    /// The identity of the node's data directory.
    #[serde(rename = "directory")]
    pub data_dir_id: Uuid,
    /// The node's name.
    pub name: String,
    /// The role it asks for.
    pub role: Role,
    /// Where other nodes reach it.
    pub addresses: Vec<SocketAddr>,
    /// Its lease duration, in milliseconds.
    pub lease_ms: u64,
    /// Its lease grace period, in milliseconds.
    pub grace_ms: u64,
}

/// The start of a request of any version.
#[derive(Deserialize)]
struct FormatHeader {
    format: u64,
}

/// Why bytes are not a valid request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinRequestError {
    /// The sender speaks another version of the protocol.
    #[error("this node speaks version {JOIN_PROTOCOL_VERSION} of the join protocol")]
    UnsupportedFormat {
        /// The version it speaks.
        format: u64,
    },
    /// The bytes are not a request.
    #[error("it is not a join request: {0}")]
    Malformed(String),
}

/// Whether `text` is safe in a log and on a terminal.
fn is_printable(text: &str) -> bool {
    (1..=MAX_TEXT_LEN).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic())
}

impl JoinRequest {
    /// Parses a request.
    ///
    /// # Errors
    /// [`JoinRequestError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, JoinRequestError> {
        let malformed = |why: String| JoinRequestError::Malformed(why);
        if bytes.len() > MAX_MESSAGE_LEN {
            return Err(malformed(format!("it is longer than {MAX_MESSAGE_LEN} bytes")));
        }
        let head: FormatHeader =
            serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))?;
        if head.format != JOIN_PROTOCOL_VERSION {
            return Err(JoinRequestError::UnsupportedFormat { format: head.format });
        }
        let request: Self = serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))?;
        let addresses = 1..=MAX_NODE_ADDRESSES;
        if !is_printable(&request.name) || !is_printable(&request.version) {
            return Err(malformed("its name or its version is invalid".to_owned()));
        }
        if !addresses.contains(&request.addresses.len()) {
            return Err(malformed("it contains no addresses, or too many".to_owned()));
        }
        Ok(request)
    }

    /// Encodes the request; [`Self::parse`] decodes it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        nodes::encode(self)
    }

    /// Identifiers its record may have, in lookup order. Derived from the request, so a repeated
    /// request finds its record.
    fn candidate_ids(&self) -> impl Iterator<Item = ShortId> + use<> {
        let Self { token, data_dir_id, name, role, addresses, .. } = self;
        let mut context = Context::new(&SHA256);
        context.update(&nodes::encode(&(token, data_dir_id, name, role, addresses)));
        let digest = context.finish();
        let words: Vec<_> =
            digest.as_ref().as_chunks().0.iter().map(|w| ShortId(u32::from_be_bytes(*w))).collect();
        words.into_iter()
    }

    fn to_record(
        &self,
        id: ShortId,
        source_ip: IpAddr,
        now_s: u64,
        state: JoinState,
    ) -> JoinRecord {
        let Self { token, data_dir_id, name, role, addresses, version, .. } = self.clone();
        JoinRecord {
            id,
            token,
            data_dir_id,
            name,
            role,
            addresses,
            source_ip,
            version,
            requested_s: now_s,
            state,
        }
    }
}

/// What an admitted node receives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinGrant {
    /// The node's number, never 0.
    pub node: u16,
    /// The cluster's secret.
    pub secret: ClusterSecret,
    /// What protects the cluster's connections.
    #[serde(rename = "protection")]
    pub transport_security: TransportSecurity,
    /// Current client URLs of the store's members.
    pub endpoints: Vec<String>,
}

/// The response to an accepted request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JoinResponse {
    /// The node may join.
    Granted(JoinGrant),
    /// An administrator must approve the request: ask again.
    Waiting {
        /// The identifier of the request.
        id: ShortId,
    },
}

impl JoinResponse {
    /// Parses and validates a response.
    ///
    /// # Errors
    /// A description of what is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MAX_MESSAGE_LEN {
            return Err(format!("it is longer than {MAX_MESSAGE_LEN} bytes"));
        }
        let answer: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if let Self::Granted(grant) = &answer {
            if grant.node == 0 {
                return Err("the node's number is 0".to_owned());
            }
            grant.transport_security.validate()?;
            crate::identity::check_endpoints(&grant.endpoints)?;
        }
        Ok(answer)
    }

    /// Encodes the response; [`Self::parse`] decodes it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        nodes::encode(self)
    }
}

/// Why a node is denied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinDenial {
    /// The token is unknown, or the secret does not match.
    #[error(
        "the cluster does not know this token: it is wrong, or was removed a week after it expired"
    )]
    UnknownToken,
    /// The token has expired.
    #[error("the token expired {} ago by the clock of the responding node", format_duration(*ago_s))]
    Expired {
        /// How long ago, in seconds.
        ago_s: u64,
    },
    /// All its uses are consumed.
    #[error("the token is used up: the number of nodes that it admits have joined")]
    UsedUp,
    /// It was revoked.
    #[error("the token was revoked")]
    Revoked,
    /// The token is for the other role.
    #[error("the token is for {}", match role { Role::Witness => "a witness only", Role::Data => "a node that keeps data only" })]
    WrongRole {
        /// The role it admits.
        role: Role,
    },
    /// An administrator refused the request.
    #[error("the join request {id} of this node was refused at node {by}")]
    Refused {
        /// The request.
        id: ShortId,
        /// The node where it was refused.
        by: String,
    },
    /// Too many requests wait for approval.
    #[error("{MAX_WAITING_JOINS} join requests already wait for approval")]
    TooManyWaiting,
    /// Too many requests are stored.
    #[error("there are already {MAX_JOINS} join requests")]
    TooMany,
    /// A problem of the cluster or the store.
    #[error(transparent)]
    Join(#[from] JoinError),
}

impl From<StoreError> for JoinDenial {
    fn from(e: StoreError) -> Self {
        Self::Join(e.into())
    }
}

/// Formats a duration for people.
#[must_use]
pub fn format_duration(seconds: u64) -> String {
    let (number, one) = match seconds {
        0..120 => (seconds, "second"),
        120..7200 => (seconds / 60, "minute"),
        7200..172_800 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    wire::plural(number, one).to_string()
}

/// Why an operation on a token or a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// No such token or request.
    #[error("there is no {kind} {id}")]
    Unknown {
        /// "token" or "request".
        kind: &'static str,
        /// Its identifier.
        id: ShortId,
    },
    /// The request was refused earlier.
    #[error("request {id} was already refused at node {by}")]
    Refused {
        /// The request.
        id: ShortId,
        /// The node where it was refused.
        by: String,
    },
    /// The request's token has expired or was revoked.
    #[error("request {id} expired with its token {token}")]
    TokenEnded {
        /// The request.
        id: ShortId,
        /// The token.
        token: ShortId,
    },
    /// The node was admitted already.
    #[error("request {id} was already granted, to node {node}")]
    Admitted {
        /// The request.
        id: ShortId,
        /// The node's number.
        node: u16,
    },
    /// Too many tokens are stored.
    #[error("there are already {MAX_TOKENS} valid tokens")]
    TooManyTokens,
    /// The system provides no random bytes.
    #[error("cannot get random bytes from the system")]
    NoRandom,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Key of a token's record.
#[must_use]
pub fn token_key(id: ShortId) -> String {
    format!("{TOKEN_KEY_PREFIX}{id}")
}

/// Key of a join request's record.
#[must_use]
pub fn join_key(id: ShortId) -> String {
    format!("{JOIN_KEY_PREFIX}{id}")
}

fn decode_token(entry: &Entry) -> Result<TokenRecord, StoreError> {
    let record: TokenRecord = nodes::decode(entry)?;
    check_key(entry, &token_key(record.id)).map(|()| record)
}

fn decode_join(entry: &Entry) -> Result<JoinRecord, StoreError> {
    let record: JoinRecord = nodes::decode(entry)?;
    check_key(entry, &join_key(record.id)).map(|()| record)
}

fn check_key(entry: &Entry, key: &str) -> Result<(), StoreError> {
    let why = || "it is the record of another token or request".to_owned();
    let bad = || StoreError::Damaged { path: entry.key.clone(), why: why() };
    if entry.key == key { Ok(()) } else { Err(bad()) }
}

/// Checks that an entry under [`TOKEN_KEY_PREFIX`] or [`JOIN_KEY_PREFIX`] is valid.
///
/// # Errors
/// [`StoreError::Damaged`].
pub fn validate_entry(entry: &Entry) -> Result<(), StoreError> {
    if entry.key.starts_with(TOKEN_KEY_PREFIX) {
        decode_token(entry).map(drop)
    } else {
        decode_join(entry).map(drop)
    }
}

/// The next step for a join request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinStep {
    /// Respond that it still waits.
    StillWaiting,
    /// Send the grant of this node again.
    ResendGrant(NodeId),
    /// It was approved: assign a number.
    Admit,
    /// Count a use and write the join record.
    ConsumeUse {
        /// Whether it must then wait for approval.
        awaits_approval: bool,
    },
}

/// Decides about a request at `now_s`, given its token and its record as stored. `has_entered`: the
/// recorded node is already in the cluster, so it has received its grant and now asks to join
/// again.
///
/// # Errors
/// [`JoinDenial`].
pub fn decide_join(
    now_s: u64,
    request: &JoinRequest,
    token: Option<&TokenRecord>,
    join: Option<&JoinRecord>,
    has_entered: bool,
) -> Result<JoinStep, JoinDenial> {
    let token =
        token.filter(|token| token.is_proved_by(request)).ok_or(JoinDenial::UnknownToken)?;
    let state = token.state(now_s);
    match (state, token.role) {
        (TokenState::Revoked, _) => return Err(JoinDenial::Revoked),
        (TokenState::Expired, _) => {
            return Err(JoinDenial::Expired { ago_s: now_s - token.expires_s });
        }
        (_, Some(role)) if role != request.role => return Err(JoinDenial::WrongRole { role }),
        _ => {}
    }
    match join.map(|join| (join, &join.state)) {
        Some((join, JoinState::Refused { by })) => {
            Err(JoinDenial::Refused { id: join.id, by: by.clone() })
        }
        Some((_, JoinState::Waiting)) => Ok(JoinStep::StillWaiting),
        Some((_, JoinState::Approved { .. })) => Ok(JoinStep::Admit),
        Some((_, JoinState::Admitted { node })) if !has_entered => {
            Ok(JoinStep::ResendGrant(NodeId(*node)))
        }
        _ if state == TokenState::UsedUp => Err(JoinDenial::UsedUp),
        _ => Ok(JoinStep::ConsumeUse { awaits_approval: token.requires_approval }),
    }
}

/// The result of a join request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinOutcome {
    /// The node is admitted under this number.
    Admitted(NodeId),
    /// An administrator must approve the request.
    Waiting(ShortId),
}

/// Retries a change of records until no concurrent commit conflicts.
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

/// Processes a join request that arrived from the address `from`.
///
/// # Errors
/// [`JoinDenial`]. After [`StoreError::Indeterminate`] in it the same request may be sent again.
pub async fn process_join(
    meta: &dyn MetadataStore,
    now_s: u64,
    request: &JoinRequest,
    source_ip: IpAddr,
) -> Result<JoinOutcome, JoinDenial> {
    until_unchanged!(
        process_join_once(meta, now_s, request, source_ip).await,
        JoinDenial::Join(JoinError::Store(StoreError::Conflict { .. }))
    )
}

/// The token a request presents, and its revision. Without a valid token a client learns nothing
/// else.
///
/// # Errors
/// [`JoinDenial::UnknownToken`]; store errors.
pub async fn authenticate_token(
    meta: &dyn MetadataStore,
    request: &JoinRequest,
) -> Result<(TokenRecord, Revision), JoinDenial> {
    let token = meta.get(&token_key(request.token)).await?;
    let token = token
        .map(|entry| Ok::<_, StoreError>((decode_token(&entry)?, entry.revision)))
        .transpose()?;
    token.filter(|(token, _)| token.is_proved_by(request)).ok_or(JoinDenial::UnknownToken)
}

async fn process_join_once(
    meta: &dyn MetadataStore,
    now_s: u64,
    request: &JoinRequest,
    source_ip: IpAddr,
) -> Result<JoinOutcome, JoinDenial> {
    // Requests without a valid token cost the store only this read.
    let (token, token_at) = authenticate_token(meta, request).await?;
    let (cluster, cluster_at) = check_cluster(meta, request).await?;
    let nodes_present = nodes::list_strict(meta).await?;
    let (id, known) = find_join(meta, request).await?;
    let has_entered = known
        .as_ref()
        .and_then(|(j, _)| j.admitted_node())
        .is_some_and(|n| nodes_present.contains_key(&n));
    let step =
        decide_join(now_s, request, Some(&token), known.as_ref().map(|(j, _)| j), has_entered)?;
    if let JoinStep::ConsumeUse { .. } | JoinStep::Admit = step
        && nodes_present.len() >= MAX_NODES
    {
        return Err(JoinError::ClusterFull.into());
    }
    let awaits_approval = match step {
        JoinStep::StillWaiting => return Ok(JoinOutcome::Waiting(id)),
        JoinStep::ResendGrant(node) => return Ok(JoinOutcome::Admitted(node)),
        JoinStep::Admit => false,
        JoinStep::ConsumeUse { awaits_approval } => awaits_approval,
    };
    let mut changes = Vec::new();
    if let JoinStep::ConsumeUse { .. } = step {
        check_join_limits(meta, awaits_approval).await?;
        let uses = token.remaining_uses.map(|uses| uses.saturating_sub(1));
        changes.push(
            TokenRecord { remaining_uses: uses, ..token }
                .to_change(Precondition::AtRevision(token_at)),
        );
    } else {
        // The token may be revoked concurrently.
        let still = Precondition::GuardAtRevision(token_at);
        changes.push(Change { key: token_key(token.id), precondition: still, value: None });
    }
    let node = cluster.next_node;
    let state = if awaits_approval {
        JoinState::Waiting
    } else {
        let next_node = node.checked_add(1).ok_or(JoinError::ClusterFull)?;
        changes.push(
            ClusterRecord { next_node, ..cluster }.to_change(Precondition::AtRevision(cluster_at)),
        );
        JoinState::Admitted { node }
    };
    let (record, expect) = match known {
        Some((known, at)) if step == JoinStep::Admit => {
            (JoinRecord { state, ..known }, Precondition::AtRevision(at))
        }
        Some((_, at)) => {
            (request.to_record(id, source_ip, now_s, state), Precondition::AtRevision(at))
        }
        None => (request.to_record(id, source_ip, now_s, state), Precondition::Absent),
    };
    changes.push(record.to_change(expect));
    meta.commit(changes).await?;
    Ok(if awaits_approval { JoinOutcome::Waiting(id) } else { JoinOutcome::Admitted(NodeId(node)) })
}

/// The cluster's record, if the joining node's settings match it.
async fn check_cluster(
    meta: &dyn MetadataStore,
    request: &JoinRequest,
) -> Result<(ClusterRecord, Revision), JoinDenial> {
    let (cluster, at) = nodes::get_cluster(meta).await?.ok_or(JoinError::NoCluster)?;
    if cluster.id != request.cluster {
        return Err(JoinError::OtherCluster { found: cluster.id }.into());
    }
    check_settings(&cluster, request.lease_ms, request.grace_ms)?;
    Ok((cluster, at))
}

/// The record of a request, and its identifier; a free one if there is no record.
async fn find_join(
    meta: &dyn MetadataStore,
    request: &JoinRequest,
) -> Result<(ShortId, Option<(JoinRecord, Revision)>), JoinDenial> {
    for id in request.candidate_ids() {
        let Some(entry) = meta.get(&join_key(id)).await? else { return Ok((id, None)) };
        let record = decode_join(&entry)?;
        if record.is_for_request(request) {
            return Ok((id, Some((record, entry.revision))));
        }
    }
    Err(JoinDenial::TooMany)
}

async fn check_join_limits(
    meta: &dyn MetadataStore,
    awaits_approval: bool,
) -> Result<(), JoinDenial> {
    let (entries, _) = meta.list(JOIN_KEY_PREFIX).await?;
    if entries.len() >= MAX_JOINS {
        return Err(JoinDenial::TooMany);
    }
    let waiting = entries
        .iter()
        .filter_map(|e| decode_join(e).ok())
        .filter(|j| j.state == JoinState::Waiting);
    if awaits_approval && waiting.count() >= MAX_WAITING_JOINS {
        Err(JoinDenial::TooManyWaiting)
    } else {
        Ok(())
    }
}

/// Creates a token. Returns its record and its secret, which is stored nowhere.
///
/// # Errors
/// [`AdmissionError`].
pub async fn create_token(
    meta: &dyn MetadataStore,
    now_s: u64,
    new: &NewToken,
) -> Result<(TokenRecord, TokenSecret), AdmissionError> {
    until_unchanged!(
        create_token_once(meta, now_s, new).await,
        AdmissionError::Store(StoreError::Conflict { .. })
    )
}

async fn create_token_once(
    meta: &dyn MetadataStore,
    now_s: u64,
    new: &NewToken,
) -> Result<(TokenRecord, TokenSecret), AdmissionError> {
    let (entries, _) = meta.list(TOKEN_KEY_PREFIX).await?;
    let mut changes = Vec::new();
    if entries.len() >= MAX_TOKENS {
        let has_ended =
            |e: &&Entry| decode_token(e).is_ok_and(|t| t.state(now_s) != TokenState::Valid);
        let ended = entries.iter().find(has_ended).ok_or(AdmissionError::TooManyTokens)?;
        changes.push(removal(ended));
    }
    let secret = TokenSecret::random().ok_or(AdmissionError::NoRandom)?;
    let NewToken { role, lifetime_s, uses, requires_approval, created_by } = new.clone();
    let record = TokenRecord {
        id: ShortId::random().ok_or(AdmissionError::NoRandom)?,
        digest: secret.digest(),
        role,
        expires_s: now_s.saturating_add(lifetime_s),
        remaining_uses: uses,
        requires_approval,
        revoked: false,
        created_by,
        created_s: now_s,
    };
    changes.push(record.to_change(Precondition::Absent));
    meta.commit(changes).await?;
    Ok((record, secret))
}

fn removal(entry: &Entry) -> Change {
    Change {
        key: entry.key.clone(),
        precondition: Precondition::AtRevision(entry.revision),
        value: None,
    }
}

/// All readable tokens, newest first.
///
/// # Errors
/// [`StoreError`].
pub async fn list_tokens(meta: &dyn MetadataStore) -> Result<Vec<TokenRecord>, StoreError> {
    let (entries, _) = meta.list(TOKEN_KEY_PREFIX).await?;
    let mut tokens: Vec<_> = entries.iter().filter_map(|e| decode_token(e).ok()).collect();
    tokens.sort_by_key(|token| std::cmp::Reverse((token.created_s, token.id)));
    Ok(tokens)
}

/// All readable join requests, newest first.
///
/// # Errors
/// [`StoreError`].
pub async fn list_joins(meta: &dyn MetadataStore) -> Result<Vec<JoinRecord>, StoreError> {
    let (entries, _) = meta.list(JOIN_KEY_PREFIX).await?;
    let mut joins: Vec<_> = entries.iter().filter_map(|e| decode_join(e).ok()).collect();
    joins.sort_by_key(|join| std::cmp::Reverse((join.requested_s, join.id)));
    Ok(joins)
}

/// Revokes a token; idempotent. Removes it if its record is damaged.
///
/// # Errors
/// [`AdmissionError::Unknown`]; [`AdmissionError::Store`].
pub async fn revoke_token(meta: &dyn MetadataStore, id: ShortId) -> Result<(), AdmissionError> {
    until_unchanged!(
        revoke_token_once(meta, id).await,
        AdmissionError::Store(StoreError::Conflict { .. })
    )
}

/// Revokes all valid tokens.
///
/// # Errors
/// [`AdmissionError`].
pub async fn revoke_all_tokens(meta: &dyn MetadataStore) -> Result<(), AdmissionError> {
    for token in list_tokens(meta).await?.iter().filter(|token| !token.revoked) {
        match revoke_token(meta, token.id).await {
            // It was removed concurrently.
            Ok(()) | Err(AdmissionError::Unknown { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn revoke_token_once(meta: &dyn MetadataStore, id: ShortId) -> Result<(), AdmissionError> {
    let entry = meta.get(&token_key(id)).await?;
    let entry = entry.ok_or(AdmissionError::Unknown { kind: "token", id })?;
    let change = match decode_token(&entry) {
        Ok(TokenRecord { revoked: true, .. }) => return Ok(()),
        Ok(token) => TokenRecord { revoked: true, ..token }
            .to_change(Precondition::AtRevision(entry.revision)),
        Err(_) => removal(&entry),
    };
    Ok(meta.commit(vec![change]).await.map(drop)?)
}

/// Approves or refuses a waiting request, on the node called `by`; idempotent.
///
/// # Errors
/// [`AdmissionError`].
pub async fn approve_or_refuse(
    meta: &dyn MetadataStore,
    now_s: u64,
    id: ShortId,
    approve: bool,
    by: &str,
) -> Result<(), AdmissionError> {
    until_unchanged!(
        approve_or_refuse_once(meta, now_s, id, approve, by).await,
        AdmissionError::Store(StoreError::Conflict { .. })
    )
}

async fn approve_or_refuse_once(
    meta: &dyn MetadataStore,
    now_s: u64,
    id: ShortId,
    approve: bool,
    by: &str,
) -> Result<(), AdmissionError> {
    let entry = meta.get(&join_key(id)).await?;
    let entry = entry.ok_or(AdmissionError::Unknown { kind: "request to join", id })?;
    let record = match decode_join(&entry) {
        // A damaged record admits no node, so refusing removes it.
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
            if token.is_none_or(|token| !token.allows_result_fetch(now_s)) {
                return Err(AdmissionError::TokenEnded { id, token: record.token });
            }
            JoinState::Approved { by }
        }
    };
    let change = JoinRecord { state, ..record }.to_change(Precondition::AtRevision(entry.revision));
    Ok(meta.commit(vec![change]).await.map(drop)?)
}

/// Changes that remove the requests by which a node joined. Used when it leaves: to return, it must
/// ask again.
///
/// # Errors
/// [`StoreError`].
pub(crate) async fn join_removals(
    meta: &dyn MetadataStore,
    node: NodeId,
) -> Result<Vec<Change>, StoreError> {
    let (entries, _) = meta.list(JOIN_KEY_PREFIX).await?;
    let is_of_node =
        |entry: &&Entry| decode_join(entry).is_ok_and(|join| join.admitted_node() == Some(node));
    Ok(entries.iter().filter(is_of_node).map(removal).collect())
}

/// The precondition that the node was admitted and has not been removed since.
pub(crate) async fn admission_condition(
    meta: &dyn MetadataStore,
    node: NodeId,
) -> Result<Option<Change>, StoreError> {
    let (entries, _) = meta.list(JOIN_KEY_PREFIX).await?;
    let admitted = |entry: &&Entry| {
        let state = decode_join(entry).map(|join| join.state);
        state.is_ok_and(|state| state == JoinState::Admitted { node: node.0 })
    };
    Ok(entries.iter().find(admitted).map(|entry| Change {
        key: entry.key.clone(),
        precondition: Precondition::GuardAtRevision(entry.revision),
        value: None,
    }))
}

/// Removes what ended more than a week ago.
///
/// # Errors
/// [`StoreError`]; a later call removes the rest.
pub async fn remove_expired(meta: &dyn MetadataStore, now_s: u64) -> Result<(), StoreError> {
    let (tokens, _) = meta.list(TOKEN_KEY_PREFIX).await?;
    let (joins, _) = meta.list(JOIN_KEY_PREFIX).await?;
    let present = nodes::list_strict(meta).await?;
    let old = |at_s: u64| at_s.saturating_add(RETENTION_S) < now_s;
    let tokens_left: Vec<TokenRecord> =
        tokens.iter().filter_map(|e| decode_token(e).ok()).collect();
    let grants_fetches =
        |id| tokens_left.iter().any(|t| t.id == id && t.allows_result_fetch(now_s));
    let token_is_old = |e: &&Entry| decode_token(e).is_ok_and(|t| old(t.expires_s));
    let join_is_old = |e: &&Entry| {
        decode_join(e).is_ok_and(|j| {
            let entered = j.admitted_node().is_some_and(|node| present.contains_key(&node));
            old(j.requested_s) && (entered || !grants_fetches(j.token))
        })
    };
    let expired = tokens.iter().filter(token_is_old).chain(joins.iter().filter(join_is_old));
    for entry in expired {
        match meta.commit(vec![removal(entry)]).await {
            Ok(_) | Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
