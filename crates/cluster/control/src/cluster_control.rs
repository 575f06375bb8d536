//! The cluster API: creating, joining, leaving and showing a cluster.

mod admission;
mod join_client;
mod rotation;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::{
    ApiError, Cluster, ClusterNode, ClusterStage, ErrorCode, InitClusterRequest,
    JoinClusterRequest, NodeRole, StoreMember,
};
use cluster::admission::{JOIN_PROTOCOL_VERSION, JoinGrant, JoinRequest, JoinResponse};
use cluster::certificate_authority::CertificateAuthority;
use cluster::identity::{
    ClusterIdentity, ClusterSecret, MembershipStage, NodeIndex, Role, TransportSecurity,
};
use cluster::join_error::{JoinError, check_settings};
use cluster::join_token::{JoinToken, ShortId};
use cluster::node_membership::{self, MAX_STORE_MEMBERS, store_member_name};
use cluster::nodes::{self, ClusterRecord, NodeView, Nodes};
use cluster::store::etcd::{EtcdStore, MemberInfo, MemberResponse};
use peer::NodeId;
use rt::fault_point::{self, FaultPoint};
use target::auth_throttle::AuthThrottle;
use tokio::time::timeout;
use uuid::Uuid;

use crate::context::Context;
use crate::errors::{conflict, store_error};
use crate::settings::ControlSettings;
use admission::NEW_TOKEN_HINT;
use cluster::store::{Entry, StoreError, embedded, store_format};
use config::data_dir;
use membership::certificates;
use membership::store_member::{StoreProgramMissing, own_store_member};
use membership::{ClusterMembership, connect_store};
use records::record::{self, StoredVolumeRecord, VOLUMES};
use status::nodes::node_argument;
use status::store_view;
use wire::plural;

/// Longest wait until the store reports a change that was made here.
const PROPAGATION_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn join_error(error: &JoinError) -> ApiError {
    match error {
        JoinError::Store(error) => store_error(error),
        error => ApiError::new(ErrorCode::Conflict, error.to_string()),
    }
}

pub(crate) fn identity_error(error: &impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, error.to_string())
        .with_hint("the data directory may be full or read-only")
}

fn store_program_missing(error: &StoreProgramMissing) -> ApiError {
    let hint = "install it (Debian: etcd-server), or set cluster.store_program to its path";
    conflict(error.to_string(), hint)
}

/// The cluster of this node: its membership, the admission of nodes, and the rotation of
/// credentials. Cheap to clone.
#[derive(Clone)]
pub struct ClusterControl(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    /// Throttles clients of the API and of the join port that present no valid token.
    api_auth_failures: Arc<Mutex<AuthThrottle>>,
    /// Why nodes cannot join here, if they cannot.
    join_listener_error: Mutex<Option<String>>,
}

impl std::fmt::Debug for ClusterControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterControl").finish_non_exhaustive()
    }
}

impl ClusterControl {
    /// The cluster of a node. Nodes can join once [`Self::serve_joins`] runs.
    pub(crate) fn new(context: Arc<Context>) -> Self {
        let (api_auth_failures, join_listener_error) = (Arc::default(), Mutex::default());
        Self(Arc::new(Inner { context, api_auth_failures, join_listener_error }))
    }

    /// Throttles clients of the API and of the join port that present no valid token.
    #[must_use]
    pub fn api_auth_failures(&self) -> Arc<Mutex<AuthThrottle>> {
        Arc::clone(&self.0.api_auth_failures)
    }

    /// Returns the cluster as this node sees it.
    pub async fn get_cluster(&self) -> Cluster {
        let Some(membership) = &self.0.context.cluster_membership else { return standalone() };
        let identity = membership.identity();
        let mut nodes =
            self.0.context.joined_cluster().map(|m| m.nodes.borrow().clone()).unwrap_or_default();
        let mut stale_reason = None;
        if self.0.context.joined_cluster().is_some() {
            match nodes::list_alive(&*self.0.context.meta).await {
                Ok(alive) => {
                    nodes.iter_mut().for_each(|(n, view)| view.is_alive = alive.contains(n));
                }
                Err(error) => stale_reason = Some(error.to_string()),
            }
        }
        let store = match identity.stage {
            MembershipStage::Member => store_members(membership).await,
            MembershipStage::Creating | MembershipStage::Joining | MembershipStage::Leaving => {
                Vec::new()
            }
        };
        let nodes = nodes.values().map(node_info).collect();
        let waits_for = self.0.context.startup_wait_reason();
        let rotation = match self.get_rotation().await {
            Ok(rotation) => rotation,
            Err(error) => {
                stale_reason = stale_reason.or(Some(error.to_string()));
                None
            }
        };
        Cluster { waits_for, nodes, store, stale_reason, rotation, ..from_identity(&identity) }
    }

    /// Whether the cluster was formed without certificates.
    pub(crate) fn is_plaintext_cluster(&self) -> bool {
        let membership = self.0.context.cluster_membership.as_ref();
        membership.is_some_and(|membership| {
            membership.identity().transport_security == TransportSecurity::PlainText
        })
    }

    /// Makes this node the first of a new cluster.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] says what prevents it.
    pub async fn init_cluster(&self, ask: InitClusterRequest) -> Result<Cluster, ApiError> {
        let control = self.clone();
        self.0
            .context
            .run_to_completion(async move {
                let settings = &control.0.context.settings;
                control.check_standalone()?;
                let protection = choose_protection(settings, ask.insecure)?;
                control.restart_as(&first_node_identity(settings, NodeId(1), protection)?)
            })
            .await
    }

    /// Joins the cluster that a token names.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] for a malformed token; [`ErrorCode::Conflict`] says what
    /// prevents the join.
    pub async fn join_cluster(&self, join: JoinClusterRequest) -> Result<Cluster, ApiError> {
        let token = JoinToken::parse(&join.token).map_err(|e| {
            ApiError::new(ErrorCode::InvalidRequest, e.to_string())
                .with_hint("`windrose cluster token` at a node of the cluster prints it")
        })?;
        let role = match join.role {
            NodeRole::Data => Role::Data,
            NodeRole::Witness => Role::Witness,
        };
        let control = self.clone();
        self.0
            .context
            .run_to_completion(async move {
                let settings = &control.0.context.settings;
                control.check_standalone_for(Some(&token))?;
                let at = cluster_address(settings)?;
                // Held until the join ends: no volume is created after the check below.
                let _none =
                    control.0.context.creation_lock.try_write().map_err(|_| busy_creating())?;
                let (volumes, _) =
                    control.0.context.meta.list(VOLUMES).await.map_err(|e| store_error(&e))?;
                if !volumes.is_empty() {
                    let message =
                        format!("this node has {} of its own", plural(volumes.len(), "volume"));
                    return Err(conflict(
                        message,
                        "copy their data elsewhere and delete the volumes \
                    first",
                    ));
                }
                let request = join_request(settings, &token, role);
                let grant =
                    match join_client::request_join(&token, &settings.cluster, &request).await? {
                        JoinResponse::Granted(grant) => grant,
                        JoinResponse::Waiting { id } => {
                            let waits_for = Some(approval_text(id));
                            return Ok(Cluster { waits_for, ..standalone() });
                        }
                    };
                let granted = GrantedJoin::new(&token, grant, settings)?;
                let record = granted.check_store(settings).await?;
                let runs_member = granted.should_run_store_member(&record, role).await?;
                fault_point::reach(FaultPoint::JoinNumberDrawn);
                let GrantedJoin { cluster, node, grant, .. } = granted;
                let JoinGrant { secret, transport_security: protection, endpoints, .. } = grant;
                let member = runs_member
                    .then(|| own_store_member(&settings.cluster, at, node, &protection))
                    .transpose()
                    .map_err(|e| store_program_missing(&e))?;
                // Another request may have changed the membership meanwhile.
                control.check_standalone()?;
                control.restart_as(&ClusterIdentity {
                    stage: MembershipStage::Joining,
                    cluster,
                    node,
                    index: None,
                    role,
                    secret,
                    transport_security: protection,
                    rotation: None,
                    endpoints,
                    member,
                })
            })
            .await
    }

    /// Stores the new identity of this node, and restarts its services.
    fn restart_as(&self, identity: &ClusterIdentity) -> Result<Cluster, ApiError> {
        let path = data_dir::identity_path_in(&self.0.context.settings.data_dir);
        identity.write(&path).map_err(|e| identity_error(&e))?;
        let joins = identity.stage == MembershipStage::Joining;
        fault_point::reach(if joins {
            FaultPoint::JoinRoleWritten
        } else {
            FaultPoint::InitRoleWritten
        });
        tracing::info!(cluster = %identity.cluster, node = %identity.node, "becoming a node of the \
            cluster");
        self.0.context.restart.send_replace(true);
        Ok(from_identity(identity))
    }

    pub(crate) async fn leave_orderly(&self) -> Result<Cluster, ApiError> {
        let control = self.clone();
        self.0
            .context
            .run_to_completion(async move {
                let membership = control.require_membership()?;
                let identity = membership.identity();
                let (nodes, _) =
                    nodes::list_readable(membership.store()).await.map_err(|e| store_error(&e))?;
                if nodes.keys().all(|node| *node == identity.node) {
                    return Err(conflict(
                        "this node is the last one of its cluster: if it leaves, the cluster ends",
                        "`windrose cluster leave --force` makes it a standalone node, without the \
                     volumes of the cluster",
                    ));
                }
                control.check_has_no_replicas(identity.node).await?;
                let identity =
                    membership.update_identity(|own| own.stage = MembershipStage::Leaving);
                let identity = identity.map_err(|e| identity_error(&e))?;
                fault_point::reach(FaultPoint::LeaveRoleWritten);
                control.0.context.restart.send_replace(true);
                Ok(from_identity(&identity))
            })
            .await
    }

    /// Forgets the cluster, for a node whose cluster is gone or has removed it.
    pub(crate) fn force_leave(&self) -> Result<Cluster, ApiError> {
        let membership = self.0.context.cluster_membership.as_ref().ok_or_else(not_in_cluster)?;
        membership.forget_cluster().map_err(|e| identity_error(&e))?;
        tracing::warn!("left the cluster by force; the other nodes were not informed");
        self.0.context.restart.send_replace(true);
        Ok(standalone())
    }

    /// Removes a store member that was added for a node which never joined the cluster; returns
    /// `unknown` if `which` names no such member.
    pub(crate) async fn remove_stray_store_member(
        &self,
        nodes: &Nodes,
        which: &str,
        force: bool,
        unknown: ApiError,
    ) -> Result<Cluster, ApiError> {
        let membership = self.require_membership()?;
        if !membership.runs_own_store() {
            return Err(unknown);
        }
        let members = membership.store().members().await.map_err(|e| store_error(&e))?;
        let Some(stray) = stray_member(&members, nodes, which) else { return Err(unknown) };
        let name = node_membership::member_label(stray);
        let health = membership.refresh_store_health().await;
        let health = health.iter().find(|h| h.member.id == stray.id);
        if health.is_some_and(|h| matches!(h.response, MemberResponse::Running { .. })) {
            let message = format!("member {name} of the store runs: its node is about to join");
            return Err(conflict(message, "if the node does not finish joining, stop it first"));
        }
        if !force {
            let message = format!("this would remove member {name} of the store for good");
            let hint = format!(
                "to remove it: windrose cluster leave --node {name} --force; its node must then \
                 join again"
            );
            return Err(conflict(message, &hint));
        }
        membership.store().remove_member(stray.id).await.map_err(|e| store_error(&e))?;
        tracing::warn!(member = name, "store member without a node removed");
        Ok(self.get_cluster().await)
    }

    /// Waits briefly until this node sees a change of the node list that it made itself: answers
    /// use the watched list.
    pub(crate) async fn await_nodes(&self, is_so: impl FnMut(&Nodes) -> bool) {
        let Some(mut nodes) = self.0.context.joined_cluster().map(|m| m.nodes.clone()) else {
            return;
        };
        let _ = timeout(PROPAGATION_TIMEOUT, nodes.wait_for(is_so)).await;
    }

    /// Fails unless the node is standalone.
    fn check_standalone(&self) -> Result<(), ApiError> {
        self.check_standalone_for(None)
    }

    /// Fails if this node is in a cluster; says in which, and whether the token is for another.
    fn check_standalone_for(&self, token: Option<&JoinToken>) -> Result<(), ApiError> {
        let path = data_dir::identity_path_in(&self.0.context.settings.data_dir);
        match ClusterIdentity::read(&path) {
            Ok(None) => Ok(()),
            Ok(Some(identity)) => {
                let own = identity.cluster;
                let of = match token.map(|token| token.cluster) {
                    None => String::new(),
                    Some(cluster) if cluster == own => ", the one that the token is for".to_owned(),
                    Some(cluster) => format!(", and the token is for cluster {cluster}"),
                };
                let message = format!("this node is already in cluster {own}{of}");
                Err(conflict(message, "to leave that cluster: `windrose cluster leave`"))
            }
            Err(error) => Err(identity_error(&error)),
        }
    }

    pub(crate) fn require_membership(&self) -> Result<&ClusterMembership, ApiError> {
        let membership = self.0.context.cluster_membership.as_deref().ok_or_else(not_in_cluster)?;
        if self.0.context.joined_cluster().is_some() {
            return Ok(membership);
        }
        Err(self.0.context.not_serving())
    }

    /// Fails if a node that is to be removed keeps a replica.
    pub(crate) async fn check_has_no_replicas(&self, node: NodeId) -> Result<(), ApiError> {
        let (entries, _) = self.0.context.meta.list(VOLUMES).await.map_err(|e| store_error(&e))?;
        let kept: Vec<_> =
            entries.iter().filter_map(|entry| volume_placed_on(entry, node)).collect();
        if kept.is_empty() {
            return Ok(());
        }
        Err(has_replicas_error(&self.0.context.node_name(node), &kept))
    }
}

/// The error for a drained node whose replicas are still needed.
pub(crate) fn drain_incomplete(node: &str, runs: bool, volumes: &str) -> ApiError {
    if runs {
        let message = format!(
            "node {node} is drained, but still serves volume {volumes}: no other replica is in \
             sync"
        );
        let hint = "it stops serving them as soon as another replica is in sync; see `windrose \
            status`";
        return conflict(message, hint);
    }
    let message = format!(
        "node {node} is drained and does not respond, and no other replica of volume {volumes} is \
         in sync: `windrose status` shows whether the volume is served"
    );
    let hint = format!(
        "start windrose on node {node}: it serves these volumes until another replica is in sync"
    );
    conflict(message, &hint)
}

/// The error for a node that is to be removed and keeps replicas of these volumes.
fn has_replicas_error(node: &str, volumes: &[String]) -> ApiError {
    let message = format!("node {node} has a replica of volume {}", volumes.join(", "));
    let volume = volumes.first().map_or("VOLUME", String::as_str);
    let hint = format!(
        "first move each replica to another node (windrose volume mirror replace {volume} --on \
         {node} --with NODE), remove it (windrose volume mirror remove {volume} --on {node}), or \
         delete the volume (windrose volume delete {volume})"
    );
    conflict(message, &hint)
}

/// The name of the volume in `entry`, if `node` keeps a replica of it. A record that cannot be read
/// may be of any node.
fn volume_placed_on(entry: &Entry, node: NodeId) -> Option<String> {
    match record::decode(entry) {
        Ok(StoredVolumeRecord { record, .. }) => {
            record.placement(node).map(|_| record.name.to_string())
        }
        Err(_) => Some(entry.key.clone()),
    }
}

/// The error for a node that was removed while its store member was not.
pub(crate) fn member_not_removed(name: &str, node: NodeId, why: &JoinError) -> ApiError {
    let message = format!(
        "node {name} was removed from the cluster, but its member of the metadata store could not \
         be removed: {why}"
    );
    let hint = format!(
        "to remove the member: windrose cluster leave --node {node} --force; a member without a \
         name is identified by its address, as `windrose cluster nodes` shows it"
    );
    ApiError::new(join_error(why).code, message).with_hint(hint)
}

/// The store member that `which` names, if no node runs it.
fn stray_member<'a>(
    members: &'a [MemberInfo],
    nodes: &Nodes,
    which: &str,
) -> Option<&'a MemberInfo> {
    let numbered = which.parse().ok().map(|number| store_member_name(NodeId(number)));
    let found = node_membership::find_member(members, numbered.as_deref().unwrap_or(which))?;
    let belongs = nodes.keys().any(|node| store_member_name(*node) == found.name);
    (!belongs).then_some(found)
}

fn standalone() -> Cluster {
    Cluster {
        stage: ClusterStage::Standalone,
        id: None,
        node: None,
        role: None,
        waits_for: None,
        nodes: Vec::new(),
        stale_reason: None,
        store: Vec::new(),
        rotation: None,
    }
}

/// Shows the cluster by the identity alone.
fn from_identity(identity: &ClusterIdentity) -> Cluster {
    Cluster {
        stage: match identity.stage {
            MembershipStage::Creating => ClusterStage::Creating,
            MembershipStage::Joining => ClusterStage::Joining,
            MembershipStage::Member => ClusterStage::Member,
            MembershipStage::Leaving => ClusterStage::Leaving,
        },
        id: Some(identity.cluster),
        node: Some(identity.node.0),
        role: Some(role(identity.role)),
        ..standalone()
    }
}

pub(crate) fn role(role: Role) -> NodeRole {
    match role {
        Role::Data => NodeRole::Data,
        Role::Witness => NodeRole::Witness,
    }
}

fn node_info(view: &NodeView) -> ClusterNode {
    let NodeView { record, is_alive: alive } = view;
    ClusterNode {
        node: record.node.0,
        name: record.name.clone(),
        role: role(record.role),
        alive: *alive,
        drained: record.is_drained,
        addresses: record.data_addresses.clone(),
        failure_domain: record.failure_domain.clone(),
        version: record.version.clone(),
    }
}

fn busy_creating() -> ApiError {
    conflict(
        "this node is creating a volume, or is already joining a cluster",
        "try again when that has ended; a joining node must have no volumes",
    )
}

fn not_in_cluster() -> ApiError {
    conflict("this node is in no cluster", "to begin one: `windrose cluster init`")
}

/// The store members: the list as it is now, their health as of a few seconds ago.
async fn store_members(membership: &ClusterMembership) -> Vec<StoreMember> {
    let health = membership.store_health();
    let known = || health.iter().map(|h| h.member.clone()).collect();
    let now = membership.store().members().await.unwrap_or_else(|_| known());
    let shown = |m: MemberInfo| StoreMember {
        problem: health.iter().find(|h| h.member.id == m.id).and_then(store_view::member_problem),
        name: node_membership::member_label(&m).to_owned(),
        urls: m.client_urls,
        voter: !m.is_learner,
    };
    now.into_iter().map(shown).collect()
}

/// The node that `which` names, by number or by name.
pub(crate) fn find_node<'a>(nodes: &'a Nodes, which: &str) -> Result<&'a NodeView, ApiError> {
    let numbered = which.parse().ok().and_then(|number| nodes.get(&NodeId(number)));
    let mut named = nodes.values().filter(|view| view.record.name == which);
    match (numbered, named.next(), named.next()) {
        (Some(view), _, _) | (None, Some(view), None) => Ok(view),
        (None, Some(_), Some(_)) => {
            Err(conflict(format!("several nodes have the name {which}"), "use the node's number"))
        }
        (None, None, _) => {
            Err(ApiError::new(ErrorCode::NotFound, format!("there is no node {which}"))
                .with_hint("`windrose cluster nodes` shows the nodes"))
        }
    }
}

/// The address at which other nodes reach this one.
fn cluster_address(settings: &ControlSettings) -> Result<SocketAddr, ApiError> {
    settings.cluster.listen.first().copied().ok_or_else(|| {
        conflict(
            "cluster.listen is not set: other nodes cannot reach this one",
            "set it in the configuration and restart the node",
        )
    })
}

/// The request with which this node asks to join.
fn join_request(settings: &ControlSettings, token: &JoinToken, role: Role) -> JoinRequest {
    let config::Cluster { listen, lease, grace, .. } = &settings.cluster;
    JoinRequest {
        format: JOIN_PROTOCOL_VERSION,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        store_format: embedded::FORMAT,
        cluster: token.cluster,
        token: token.id,
        secret: token.secret.clone(),
        data_dir_id: settings.data_dir_id,
        name: settings.name.clone(),
        role,
        addresses: listen.clone(),
        lease_ms: millis(*lease),
        grace_ms: millis(*grace),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn approval_text(id: ShortId) -> String {
    format!(
        "approval; at a node of the cluster: windrose cluster approve {id}. If you stop waiting, \
         run the same command again after the approval"
    )
}

/// A granted join, with the cluster's store as this node reaches it.
struct GrantedJoin {
    cluster: Uuid,
    node: NodeId,
    grant: JoinGrant,
    store: EtcdStore,
}

impl GrantedJoin {
    fn new(
        token: &JoinToken,
        grant: JoinGrant,
        settings: &ControlSettings,
    ) -> Result<Self, ApiError> {
        let refused = |e: &dyn std::fmt::Display| ApiError::new(ErrorCode::Conflict, e.to_string());
        if !token.trust_anchor.matches(&grant.transport_security) {
            return Err(conflict(
                "the credentials received are not those of the token's cluster",
                NEW_TOKEN_HINT,
            ));
        }
        let ControlSettings { name, cluster, data_dir, .. } = settings;
        let certificates = certificates::prepare_certificates(
            (&grant.transport_security, None),
            name,
            cluster,
            data_dir,
        );
        let certificates = certificates.map_err(|e| refused(&e))?;
        let store = connect_store(&grant.endpoints, certificates.as_ref()).map_err(|e| {
            refused(&e).with_hint("set cluster.tls_ca, tls_cert and tls_key as at the other nodes")
        })?;
        Ok(Self { cluster: token.cluster, node: NodeId(grant.node), grant, store })
    }

    /// Checks that the store answers, and that this node's settings match the cluster's.
    async fn check_store(&self, settings: &ControlSettings) -> Result<ClusterRecord, ApiError> {
        let checked = store_format::check_or_init(&self.store, self.store.name()).await;
        checked.map_err(|e| self.store_error_after_grant(&e.into()))?;
        let cluster = node_membership::cluster_record(&self.store, self.cluster).await;
        let cluster = cluster.map_err(|e| self.store_error_after_grant(&e))?;
        let (lease, grace) = (millis(settings.cluster.lease), millis(settings.cluster.grace));
        check_settings(&cluster, lease, grace).map_err(|e| join_error(&e))?;
        Ok(cluster)
    }

    /// Why this node cannot join although the request was granted.
    fn store_error_after_grant(&self, error: &JoinError) -> ApiError {
        let JoinError::Store(StoreError::Unreachable { why, .. }) = error else {
            return join_error(error);
        };
        let at = self.grant.endpoints.join(", ");
        let message = format!(
            "this node is admitted, but cannot reach the store of the cluster at {at}: {why}"
        );
        ApiError::new(ErrorCode::Unavailable, message).with_hint(
            "check the firewall (ports 2379 and 2380) and that the nodes run, then try again with \
             the same token: it is used only once",
        )
    }

    /// Whether a joining node runs a store member.
    async fn should_run_store_member(
        &self,
        cluster: &ClusterRecord,
        role: Role,
    ) -> Result<bool, ApiError> {
        if !cluster.runs_own_store {
            return match role {
                Role::Data => Ok(false),
                Role::Witness => Err(conflict(
                    "the cluster uses an external etcd: a witness would have no vote",
                    "join it as a node that keeps data (windrose cluster join)",
                )),
            };
        }
        let failed = |e: StoreError| self.store_error_after_grant(&e.into());
        let members = self.store.members().await.map_err(failed)?;
        if members.len() < MAX_STORE_MEMBERS {
            return Ok(true);
        }
        if role == Role::Data {
            return Ok(false);
        }
        let (nodes, _) = nodes::list_readable(&self.store).await.map_err(failed)?;
        Err(store_full_error(&members, &nodes))
    }
}

/// Chooses the transport security of a new cluster with these settings (RFD 0038, 2.2).
fn choose_protection(
    settings: &ControlSettings,
    insecure: bool,
) -> Result<TransportSecurity, ApiError> {
    let is_given = settings.cluster.tls.is_some();
    match (insecure, is_given) {
        (true, true) => Err(conflict(
            "cluster.tls_ca is set: nodes with certificates do not communicate in plain text",
            "omit --insecure, or remove cluster.tls_ca, tls_cert and tls_key and restart the node",
        )),
        (true, false) => Ok(TransportSecurity::PlainText),
        (false, true) => Ok(TransportSecurity::AdministratorCertificates),
        (false, false) if !settings.cluster.store.endpoints.is_empty() => Err(conflict(
            "cluster.store_endpoints names an external etcd, which does not trust an authority \
             that this cluster would create",
            "set cluster.tls_ca, tls_cert and tls_key to certificates that it trusts; with \
             --insecure the connection is plain text, and anyone who can reach that etcd can \
             change it",
        )),
        (false, false) => own_authority(),
    }
}

fn own_authority() -> Result<TransportSecurity, ApiError> {
    let authority = CertificateAuthority::new()
        .map_err(|e| ApiError::new(ErrorCode::Internal, e.to_string()))?;
    Ok(TransportSecurity::ClusterAuthority(authority))
}

/// New transport security of the same kind as before, for a recovered cluster.
pub(crate) fn renew_protection(
    protection: &TransportSecurity,
) -> Result<TransportSecurity, ApiError> {
    match protection {
        TransportSecurity::ClusterAuthority(_) => own_authority(),
        TransportSecurity::AdministratorCertificates | TransportSecurity::PlainText => {
            Ok(protection.clone())
        }
    }
}

/// The identity of node number `node` as the first of a new cluster.
pub(crate) fn first_node_identity(
    settings: &ControlSettings,
    node: NodeId,
    protection: TransportSecurity,
) -> Result<ClusterIdentity, ApiError> {
    let at = cluster_address(settings)?;
    let secret = ClusterSecret::random().ok_or_else(|| {
        ApiError::new(ErrorCode::Internal, "cannot get random bytes from the system")
    })?;
    let (endpoints, member) = if settings.cluster.store.endpoints.is_empty() {
        let own = own_store_member(&settings.cluster, at, node, &protection)
            .map_err(|e| store_program_missing(&e))?;
        (vec![own.client_url.clone()], Some(own))
    } else {
        (settings.cluster.store.endpoints.clone(), None)
    };
    Ok(ClusterIdentity {
        stage: MembershipStage::Creating,
        cluster: Uuid::new_v4(),
        node,
        index: NodeIndex::new(0),
        role: Role::Data,
        secret,
        transport_security: protection,
        rotation: None,
        endpoints,
        member,
    })
}

/// The error for a witness that finds the store with the maximum of members. Usually one of them
/// belongs to a dead node, such as the witness before it was reinstalled.
fn store_full_error(members: &[MemberInfo], nodes: &Nodes) -> ApiError {
    let message = format!("the store already has {MAX_STORE_MEMBERS} members");
    let dead = members.iter().find_map(|member| {
        let name = node_membership::member_label(member);
        match nodes.values().find(|view| store_member_name(view.record.node) == name) {
            Some(view) if view.is_alive => None,
            Some(view) => {
                Some((name, format!("node {}", view.record.name), node_argument(nodes, view)))
            }
            None => {
                Some((name, "a node that is no longer in the cluster".to_owned(), name.to_owned()))
            }
        }
    });
    match dead {
        Some((member, whose, which)) => conflict(
            format!("{message}; one of them ({member}) belongs to {whose}, which is down"),
            &format!(
                "if it is lost for good, run windrose cluster leave --node {which} --force at a \
                 node of the cluster, then repeat this command"
            ),
        ),
        None => conflict(
            format!("{message}, and all of them run: a witness would have no vote"),
            "join it as a node that keeps data (windrose cluster join), or have another node leave \
             first",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_drained_and_does_not_run_is_not_said_to_serve() {
        let serves = drain_incomplete("b", true, "solo");
        assert!(serves.message.contains("but still serves volume solo"), "{serves}");
        let down = drain_incomplete("b", false, "solo");
        assert!(
            !down.message.contains("still serves") && down.message.contains("does not respond")
        );
        assert!(down.hint.unwrap().contains("start windrose on node b"));
    }

    #[test]
    fn a_node_that_keeps_copies_is_named_with_the_commands_that_free_it() {
        let refused = has_replicas_error("b", &["web".into(), "mail".into()]);
        assert_eq!(refused.message, "node b has a replica of volume web, mail");
        let hint = refused.hint.unwrap();
        for command in ["replace web --on b --with NODE", "remove web --on b", "delete web"] {
            assert!(hint.contains(command), "{hint}");
        }
    }

    #[test]
    fn what_a_node_keeps_is_found_in_records_of_any_format() {
        let flat = records::samples::entry(&records::samples::record("web"));
        assert_eq!(volume_placed_on(&flat, NodeId(1)), Some("web".into()));
        assert_eq!(volume_placed_on(&flat, NodeId(2)), None);
        let unreadable = Entry { value: b"?".to_vec(), ..flat };
        assert_eq!(volume_placed_on(&unreadable, NodeId(9)), Some(unreadable.key.clone()));
    }

    #[test]
    fn a_member_is_a_stray_only_if_it_is_of_no_node() {
        let member = |name: &str, at: &str| MemberInfo {
            id: 1,
            name: name.into(),
            peer_urls: vec![format!("http://{at}")],
            client_urls: Vec::new(),
            is_learner: true,
        };
        let members =
            [member("node-1", "a:2380"), member("node-3", "c:2380"), member("", "d:2380")];
        let present = [status::samples::node(1, "a", true)].into();
        let found =
            |which| stray_member(&members, &present, which).map(node_membership::member_label);
        assert_eq!((found("1"), found("node-1"), found("a:2380")), (None, None, None));
        assert_eq!((found("3"), found("node-3")), (Some("node-3"), Some("node-3")));
        assert_eq!((found("d:2380"), found("")), (Some("http://d:2380"), None));
    }
}
