//! What the API asks about the cluster: to begin one, to join, to leave, who there is.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use ::cluster::admission::{self, JoinAnswer, JoinGrant, JoinRequest};
use ::cluster::authority::Authority;
use ::cluster::identity::{ClusterSecret, Identity, NodeIndex, OwnMember, Protection, Role, Stage};
use ::cluster::joining::{self, JoinError, MAX_MEMBERS};
use ::cluster::meta::etcd::{Etcd, MemberAnswer, MemberInfo};
use ::cluster::nodes::{self, ClusterRecord, NodeView, Nodes};
use ::cluster::token::{ShortId, Token};
use api::{
    ApiError, BeginCluster, Cluster, ClusterNode, ClusterStage, Code, JoinCluster, LeaveCluster,
    NodeRole, StoreMember,
};
use peer::NodeId;
use rt::fault::{self, Point};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::admission::ANEW;
use super::{Control, Settings, join_call, members, removal, store_error};
use crate::config;
use crate::data_dir;
use crate::meta::{Entry, MetaError, embedded, format};
use crate::part::{self, Part};
use crate::protection;
use crate::record::{self, Stored, VOLUMES};
use wire::count;

/// Ports of the store's members.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// What names of members of the store begin with.
const MEMBER: &str = "node-";

/// Longest time until the others go on without a node that is drained.
const DRAINING: Duration = Duration::from_secs(20);

/// Longest time until the store tells of a change that was made here.
const TELLING: Duration = Duration::from_secs(5);

/// How often is looked whether they do.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

pub(super) fn conflict(message: impl Into<String>, hint: &str) -> ApiError {
    ApiError::new(Code::Conflict, message).hint(hint)
}

pub(super) fn join_error(error: &JoinError) -> ApiError {
    match error {
        JoinError::Store(error) => store_error(error),
        error => ApiError::new(Code::Conflict, error.to_string()),
    }
}

pub(super) fn identity_error(error: &impl std::fmt::Display) -> ApiError {
    ApiError::new(Code::Internal, error.to_string())
        .hint("the data directory may be full or read-only")
}

impl Control {
    /// The cluster as this node sees it.
    pub async fn cluster(&self) -> Cluster {
        let Some(part) = &self.0.part else { return alone() };
        let identity = part.identity();
        let mut nodes = self.membership().map(|m| m.nodes.borrow().clone()).unwrap_or_default();
        let mut unread = None;
        if self.membership().is_some() {
            match nodes::alive(&*self.0.meta).await {
                Ok(alive) => nodes.iter_mut().for_each(|(n, view)| view.alive = alive.contains(n)),
                Err(error) => unread = Some(error.to_string()),
            }
        }
        let store = match identity.stage {
            Stage::Member => store_members(part).await,
            Stage::Moving | Stage::Joining | Stage::Leaving => Vec::new(),
        };
        let nodes = nodes.values().map(shown).collect();
        let waits_for = self.waits_for();
        let rotation = match self.rotation().await {
            Ok(rotation) => rotation,
            Err(error) => {
                unread = unread.or(Some(error.to_string()));
                None
            }
        };
        Cluster { waits_for, nodes, store, unread, rotation, ..of(&identity) }
    }

    /// Whether the cluster was formed without certificates.
    pub(super) fn speaks_plain_text(&self) -> bool {
        let part = self.0.part.as_ref();
        part.is_some_and(|part| part.identity().protection == Protection::Plain)
    }

    /// Makes this node the first of a new cluster.
    ///
    /// # Errors
    /// [`Code::Conflict`] says what is in the way.
    pub async fn init(&self, ask: BeginCluster) -> Result<Cluster, ApiError> {
        let control = self.clone();
        self.detached(async move {
            let settings = &control.0.settings;
            control.check_alone()?;
            let protection = chosen(settings, ask.insecure)?;
            control.become_new(&first_of_new(settings, NodeId(1), protection)?)
        })
        .await
    }

    /// Makes this node one of the cluster that a token names.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] for what is no token; [`Code::Conflict`] says what is in the way.
    pub async fn join(&self, join: JoinCluster) -> Result<Cluster, ApiError> {
        let token = Token::parse(&join.token).map_err(|e| {
            ApiError::new(Code::InvalidRequest, e.to_string())
                .hint("`windrose cluster token` at a node of the cluster prints it")
        })?;
        let role = match join.role {
            NodeRole::Data => Role::Data,
            NodeRole::Witness => Role::Witness,
        };
        let control = self.clone();
        self.detached(async move {
            let settings = &control.0.settings;
            control.check_alone_for(Some(&token))?;
            let at = listens(settings)?;
            // Until it is over, one way or the other, what is looked for next cannot come about.
            let _none = control.0.creating.try_write().map_err(|_| creates())?;
            let (volumes, _) = control.0.meta.list(VOLUMES).await.map_err(|e| store_error(&e))?;
            if !volumes.is_empty() {
                let message =
                    format!("this node has {} of its own", count(volumes.len(), "volume"));
                return Err(conflict(message, "copy their data elsewhere and delete them first"));
            }
            let request = join_request(settings, &token, role);
            let grant = match join_call::ask(&token, &settings.cluster, &request).await? {
                JoinAnswer::Granted(grant) => grant,
                JoinAnswer::Waiting { id } => {
                    let waits_for = Some(waits_for_approval(id));
                    return Ok(Cluster { waits_for, ..alone() });
                }
            };
            let granted = GrantedJoin::new(&token, grant, settings)?;
            let record = granted.look(settings).await?;
            let runs_member = granted.runs_member(&record, role).await?;
            fault::pass(Point::JoinDrawn);
            let GrantedJoin { cluster, node, grant, .. } = granted;
            let JoinGrant { secret, protection, endpoints, .. } = grant;
            let member = runs_member
                .then(|| own_member(&settings.cluster, at, node, &protection))
                .transpose()?;
            // Somebody may have asked for something else meanwhile.
            control.check_alone()?;
            control.become_new(&Identity {
                stage: Stage::Joining,
                cluster,
                node,
                index: None,
                role,
                secret,
                protection,
                rotation: None,
                endpoints,
                member,
            })
        })
        .await
    }

    /// Writes down what this node is to be, and has its inside begin again.
    fn become_new(&self, identity: &Identity) -> Result<Cluster, ApiError> {
        let path = data_dir::identity(&self.0.settings.data_dir);
        identity.write(&path).map_err(|e| identity_error(&e))?;
        let joins = identity.stage == Stage::Joining;
        fault::pass(if joins { Point::JoinWritten } else { Point::InitWritten });
        tracing::info!(cluster = %identity.cluster, node = %identity.node, "it becomes a node of a cluster");
        self.0.restart.send_replace(true);
        Ok(of(identity))
    }

    /// Takes this node, or another one that does not come back, out of the cluster.
    ///
    /// # Errors
    /// [`Code::Conflict`] says what is in the way, [`Code::NotFound`] that there is no such node.
    pub async fn leave(&self, leave: LeaveCluster) -> Result<Cluster, ApiError> {
        match leave.node {
            None if leave.force => self.leave_by_force(),
            None => self.leave_in_order().await,
            Some(node) => self.remove(&node, leave.force).await,
        }
    }

    async fn leave_in_order(&self) -> Result<Cluster, ApiError> {
        let control = self.clone();
        self.detached(async move {
            let part = control.member_part()?;
            let identity = part.identity();
            let (present, _) = nodes::list(part.store()).await.map_err(|e| store_error(&e))?;
            if present.keys().all(|node| *node == identity.node) {
                return Err(conflict(
                    "this node is the last of its cluster, which ends with it",
                    "`--force` makes it a node by itself, without the volumes of the cluster",
                ));
            }
            control.check_holds_nothing(identity.node).await?;
            let identity = part.update(|own| own.stage = Stage::Leaving);
            let identity = identity.map_err(|e| identity_error(&e))?;
            fault::pass(Point::LeaveWritten);
            control.0.restart.send_replace(true);
            Ok(of(&identity))
        })
        .await
    }

    /// Forgets the cluster. For a node whose cluster is gone, or has removed it.
    fn leave_by_force(&self) -> Result<Cluster, ApiError> {
        let part = self.0.part.as_ref().ok_or_else(not_in_one)?;
        part.forget().map_err(|e| identity_error(&e))?;
        tracing::warn!("it has left its cluster without a word to the others");
        self.0.restart.send_replace(true);
        Ok(alone())
    }

    async fn remove(&self, which: &str, force: bool) -> Result<Cluster, ApiError> {
        let part = self.member_part()?;
        let (present, _) = nodes::list(part.store()).await.map_err(|e| store_error(&e))?;
        let gone = match find(&present, which) {
            Ok(gone) => gone,
            Err(unknown) => return self.remove_stray(&present, which, force, unknown).await,
        };
        let (node, name) = (gone.record.node, &gone.record.name);
        if node == part.identity().node {
            return Err(conflict(
                "that is the node that is asked",
                "`windrose cluster leave` without --node takes it out in order",
            ));
        }
        if gone.alive {
            let message = format!("node {name} is alive, or was 10 seconds ago");
            let hint = format!("`windrose cluster leave` at node {name} takes it out");
            return Err(conflict(message, &hint));
        }
        if !force {
            let message = format!("node {name} would be removed for ever, with all that it keeps");
            let hint = format!("windrose cluster leave --node {name} --force removes it");
            return Err(conflict(message, &hint));
        }
        let stripped = self.strip(node, name).await?;
        self.check_holds_nothing(node).await?;
        // If it is back by now, it stays.
        joining::strike_gone(part.store(), node).await.map_err(|e| match e {
            JoinError::Alive { .. } => removal::alive_again(name, &stripped),
            e => join_error(&e),
        })?;
        let at: Vec<_> = gone.record.data.iter().map(SocketAddr::ip).collect();
        let removed = joining::remove_member(part.store(), &member_name(node), &at).await;
        removed.map_err(|e| member_stays(name, node, &e))?;
        tracing::warn!(%node, name, "a node was removed from the cluster");
        self.await_nodes(|nodes| !nodes.contains_key(&node)).await;
        Ok(self.cluster().await)
    }

    /// Removes a member of the store that a node asked room for which never became one of the cluster;
    /// `unknown` if there is none that `which` names.
    async fn remove_stray(
        &self,
        present: &Nodes,
        which: &str,
        force: bool,
        unknown: ApiError,
    ) -> Result<Cluster, ApiError> {
        let part = self.member_part()?;
        if !part.own_members() {
            return Err(unknown);
        }
        let members = part.store().members().await.map_err(|e| store_error(&e))?;
        let Some(stray) = stray(&members, present, which) else { return Err(unknown) };
        let name = joining::called(stray);
        let health = part.look_at_health().await;
        let health = health.iter().find(|h| h.member.id == stray.id);
        if health.is_some_and(|h| matches!(h.answer, MemberAnswer::Runs { .. })) {
            let message = format!("member {name} of the store runs: its node is about to join");
            return Err(conflict(message, "if it does not get on, stop that node first"));
        }
        if !force {
            let message = format!("member {name} of the store would be removed for ever");
            let hint = format!(
                "windrose cluster leave --node {name} --force removes it; its node has to ask anew then"
            );
            return Err(conflict(message, &hint));
        }
        part.store().remove_member(stray.id).await.map_err(|e| store_error(&e))?;
        tracing::warn!(member = name, "a member of the store without a node was removed");
        Ok(self.cluster().await)
    }

    /// Keeps a node out of service, or lets it serve again.
    ///
    /// # Errors
    /// [`Code::NotFound`] says that there is no such node.
    pub async fn set_drained(
        &self,
        which: Option<String>,
        drained: bool,
    ) -> Result<Cluster, ApiError> {
        let part = self.member_part()?;
        let node = match which {
            None => part.identity().node,
            Some(which) => {
                let (present, _) = nodes::list(part.store()).await.map_err(|e| store_error(&e))?;
                find(&present, &which)?.record.node
            }
        };
        let set = nodes::set_drained(part.store(), node, drained).await;
        if set.map_err(|e| store_error(&e))? {
            tracing::info!(%node, drained, "a node is drained, or no longer");
        }
        let is_so =
            |nodes: &Nodes| nodes.get(&node).is_none_or(|view| view.record.drained == drained);
        self.await_nodes(is_so).await;
        if drained {
            self.await_drain(node).await?;
        }
        Ok(self.cluster().await)
    }

    /// Waits for a moment until this node knows of a change of the nodes that it has made itself: it is told of it
    /// as all others are, and answers by what it knows.
    async fn await_nodes(&self, is_so: impl FnMut(&Nodes) -> bool) {
        let Some(mut nodes) = self.membership().map(|m| m.nodes.clone()) else { return };
        let _ = timeout(TELLING, nodes.wait_for(is_so)).await;
    }

    /// Waits until the others go on without the copies of a node.
    async fn await_drain(&self, node: NodeId) -> Result<(), ApiError> {
        let deadline = Instant::now() + DRAINING;
        loop {
            let mirrors = self.0.state.mirrors();
            let held = mirrors.iter().filter(|(_, mirror)| mirror.member(node).is_some());
            let (alone, leaving): (Vec<_>, Vec<_>) =
                held.partition(|(_, mirror)| mirror.others(node).next().is_none());
            if leaving.is_empty() && alone.is_empty() {
                return Ok(());
            }
            if leaving.is_empty() || Instant::now() >= deadline {
                let stay = alone.iter().chain(&leaving).map(|(id, _)| self.volume_name(**id));
                let names: Vec<_> = stay.collect();
                let runs = self.together(&[]).await.is_none_or(|together| together.runs(node));
                return Err(still_held(&self.node_name(node), runs, &names.join(", ")));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Refuses what only a node that keeps data can do.
    ///
    /// # Errors
    /// [`Code::Conflict`] for a witness.
    pub fn check_keeps_data(&self) -> Result<(), ApiError> {
        match self.0.part.as_ref().map(|part| part.identity().role) {
            Some(Role::Witness) => Err(conflict(
                format!("node {} is a witness and keeps no data", self.0.settings.name),
                "ask one of the others; `windrose cluster nodes` shows them",
            )),
            Some(Role::Data) | None => Ok(()),
        }
    }

    /// Refuses what only a node by itself can do.
    fn check_alone(&self) -> Result<(), ApiError> {
        self.check_alone_for(None)
    }

    /// That this node is in no cluster; else in which one, and whether a token is of another.
    fn check_alone_for(&self, token: Option<&Token>) -> Result<(), ApiError> {
        let path = data_dir::identity(&self.0.settings.data_dir);
        match Identity::read(&path) {
            Ok(None) => Ok(()),
            Ok(Some(identity)) => {
                let own = identity.cluster;
                let of = match token.map(|token| token.cluster) {
                    None => String::new(),
                    Some(cluster) if cluster == own => ", which the token is of".to_owned(),
                    Some(cluster) => format!(", and the token is of cluster {cluster}"),
                };
                let message = format!("this node is in cluster {own} already{of}");
                Err(conflict(message, "`windrose cluster leave` takes it out"))
            }
            Err(error) => Err(identity_error(&error)),
        }
    }

    pub(super) fn member_part(&self) -> Result<&Part, ApiError> {
        let part = self.0.part.as_deref().ok_or_else(not_in_one)?;
        if self.membership().is_some() {
            return Ok(part);
        }
        Err(self.not_serving())
    }

    /// Refuses to let a node go that keeps a copy of something.
    async fn check_holds_nothing(&self, node: NodeId) -> Result<(), ApiError> {
        let (entries, _) = self.0.meta.list(VOLUMES).await.map_err(|e| store_error(&e))?;
        let held: Vec<_> = entries.iter().filter_map(|entry| held_at(entry, node)).collect();
        if held.is_empty() {
            return Ok(());
        }
        Err(keeps(&self.node_name(node), &held))
    }
}

/// That a node which was drained has copies that nobody can do without.
fn still_held(node: &str, runs: bool, volumes: &str) -> ApiError {
    if runs {
        let message = format!(
            "node {node} is drained, but still serves volume {volumes}: nobody else is in sync"
        );
        let hint = "it leaves them as soon as another copy is in sync; see `windrose status`";
        return conflict(message, hint);
    }
    let message = format!(
        "node {node} is drained. It does not run, or does not answer, and nobody else is in sync with volume {volumes}: \
         see `windrose status` for whether it is served"
    );
    let hint = format!(
        "start windrose on node {node}: it serves what nobody else can, and leaves that as soon as another copy is in sync"
    );
    conflict(message, &hint)
}

/// That a node which is to go keeps copies of volumes, the names of which these are.
fn keeps(node: &str, volumes: &[String]) -> ApiError {
    let message = format!("node {node} keeps a copy of volume {}", volumes.join(", "));
    let volume = volumes.first().map_or("VOLUME", String::as_str);
    let hint = format!(
        "first move each of them to another node (windrose volume mirror replace {volume} --on {node} --with NODE), do \
         without that copy (windrose volume mirror remove {volume} --on {node}), or delete the volume (windrose volume \
         delete {volume})"
    );
    conflict(message, &hint)
}

/// The name of the volume that `entry` holds, if `node` keeps a copy of it. One that cannot be read
/// may be anywhere.
fn held_at(entry: &Entry, node: NodeId) -> Option<String> {
    match record::decode(entry) {
        Ok(Stored { record, .. }) => record.place(node).map(|_| record.name.to_string()),
        Err(_) => Some(entry.key.clone()),
    }
}

/// That a node was removed, and its member of the store was not.
fn member_stays(name: &str, node: NodeId, why: &JoinError) -> ApiError {
    let message = format!(
        "node {name} was removed from the cluster, but its member of the metadata store is still there: {why}"
    );
    let hint = format!(
        "windrose cluster leave --node {node} --force removes the member; one without a name is named by its address, \
         as `windrose cluster nodes` shows it"
    );
    ApiError::new(join_error(why).code, message).hint(hint)
}

/// The member of the store that `which` names, if it belongs to none of the nodes.
fn stray<'a>(members: &'a [MemberInfo], present: &Nodes, which: &str) -> Option<&'a MemberInfo> {
    let numbered = which.parse().ok().map(|number| member_name(NodeId(number)));
    let found = joining::member_called(members, numbered.as_deref().unwrap_or(which))?;
    let belongs = present.keys().any(|node| member_name(*node) == found.name);
    (!belongs).then_some(found)
}

fn alone() -> Cluster {
    Cluster {
        stage: ClusterStage::Alone,
        id: None,
        node: None,
        role: None,
        waits_for: None,
        nodes: Vec::new(),
        unread: None,
        store: Vec::new(),
        rotation: None,
    }
}

/// What `identity` says.
fn of(identity: &Identity) -> Cluster {
    Cluster {
        stage: match identity.stage {
            Stage::Moving => ClusterStage::Moving,
            Stage::Joining => ClusterStage::Joining,
            Stage::Member => ClusterStage::Member,
            Stage::Leaving => ClusterStage::Leaving,
        },
        id: Some(identity.cluster),
        node: Some(identity.node.0),
        role: Some(role(identity.role)),
        ..alone()
    }
}

pub(super) fn role(role: Role) -> NodeRole {
    match role {
        Role::Data => NodeRole::Data,
        Role::Witness => NodeRole::Witness,
    }
}

fn shown(view: &NodeView) -> ClusterNode {
    let NodeView { record, alive } = view;
    ClusterNode {
        node: record.node.0,
        name: record.name.clone(),
        role: role(record.role),
        alive: *alive,
        drained: record.drained,
        addresses: record.data.clone(),
        failure_domain: record.failure_domain.clone(),
        version: record.version.clone(),
    }
}

fn creates() -> ApiError {
    conflict(
        "a volume is being created at this node, or it joins a cluster already",
        "try again when that is over; a node that joins has no volumes of its own",
    )
}

fn not_in_one() -> ApiError {
    conflict("this node is in no cluster", "`windrose cluster init` begins one")
}

/// The store's members: who they are now, and how they were a few seconds ago.
async fn store_members(part: &Part) -> Vec<StoreMember> {
    let health = part.health();
    let known = || health.iter().map(|h| h.member.clone()).collect();
    let now = part.store().members().await.unwrap_or_else(|_| known());
    let shown = |m: MemberInfo| StoreMember {
        problem: health.iter().find(|h| h.member.id == m.id).and_then(members::problem),
        name: joining::called(&m).to_owned(),
        urls: m.client_urls,
        votes: !m.is_learner,
    };
    now.into_iter().map(shown).collect()
}

/// What names a node in a command: its name, unless that means others as well.
pub(super) fn called(present: &Nodes, view: &NodeView) -> String {
    let NodeView { record, .. } = view;
    let mut others = present.values().filter(|other| other.record.node != record.node);
    let is_number = record.name.parse::<u16>().is_ok();
    match is_number || others.any(|other| other.record.name == record.name) {
        true => record.node.to_string(),
        false => record.name.clone(),
    }
}

/// The node that `which` names, by number or else by name.
fn find<'a>(present: &'a Nodes, which: &str) -> Result<&'a NodeView, ApiError> {
    let numbered = which.parse().ok().and_then(|number| present.get(&NodeId(number)));
    let mut named = present.values().filter(|view| view.record.name == which);
    match (numbered, named.next(), named.next()) {
        (Some(view), _, _) | (None, Some(view), None) => Ok(view),
        (None, Some(_), Some(_)) => {
            Err(conflict(format!("several nodes are called {which}"), "name it by its number"))
        }
        (None, None, _) => Err(ApiError::new(Code::NotFound, format!("there is no node {which}"))
            .hint("`windrose cluster nodes` shows who there is")),
    }
}

/// Where other nodes reach this one.
fn listens(settings: &Settings) -> Result<SocketAddr, ApiError> {
    settings.cluster.listen.first().copied().ok_or_else(|| {
        conflict(
            "cluster.listen is not set: other nodes could not reach this one",
            "set it in the configuration and restart the node",
        )
    })
}

/// A member's name: that of its node, which is never given twice.
pub(crate) fn member_name(node: NodeId) -> String {
    format!("{MEMBER}{node}")
}

/// The node whose member has this name.
pub(super) fn node_of_member(name: &str) -> Option<NodeId> {
    name.strip_prefix(MEMBER)?.parse().ok().map(NodeId)
}

/// The member of the store that this node is to run.
pub(crate) fn own_member(
    cluster: &config::Cluster,
    at: SocketAddr,
    node: NodeId,
    protection: &Protection,
) -> Result<OwnMember, ApiError> {
    let store = &cluster.store;
    if !is_installed(&store.program) {
        let message = format!("{} is not installed", store.program.display());
        let hint = "install it (Debian: etcd-server), or name it by cluster.store_program";
        return Err(conflict(message, hint));
    }
    let scheme = protection.scheme();
    let url = |set: Option<SocketAddr>, port| {
        format!("{scheme}://{}", set.unwrap_or_else(|| SocketAddr::new(at.ip(), port)))
    };
    Ok(OwnMember {
        name: member_name(node),
        peer_url: url(store.peer, PEER_PORT),
        client_url: url(store.client, CLIENT_PORT),
    })
}

fn is_installed(program: &Path) -> bool {
    if program.is_absolute() {
        return program.is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// What this node asks that wants to join.
fn join_request(settings: &Settings, token: &Token, role: Role) -> JoinRequest {
    let config::Cluster { listen, lease, grace, .. } = &settings.cluster;
    JoinRequest {
        format: admission::FORMAT,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        store_format: embedded::FORMAT,
        cluster: token.cluster,
        token: token.id,
        secret: token.secret.clone(),
        directory: settings.directory,
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

fn waits_for_approval(id: ShortId) -> String {
    format!(
        "approval; at a node of the cluster: windrose cluster approve {id}. Who stops waiting says the same command again \
         once it is approved"
    )
}

/// What a node was given that may join, and the cluster's store as it reaches it.
struct GrantedJoin {
    cluster: Uuid,
    node: NodeId,
    grant: JoinGrant,
    store: Etcd,
}

impl GrantedJoin {
    fn new(token: &Token, grant: JoinGrant, settings: &Settings) -> Result<Self, ApiError> {
        let refused = |e: &dyn std::fmt::Display| ApiError::new(Code::Conflict, e.to_string());
        if !token.trust.fits(&grant.protection) {
            return Err(conflict("what this node was given is not of the token's cluster", ANEW));
        }
        let Settings { name, cluster, data_dir, .. } = settings;
        let certificates =
            protection::certificates((&grant.protection, None), name, cluster, data_dir);
        let certificates = certificates.map_err(|e| refused(&e))?;
        let store = part::store(&grant.endpoints, certificates.as_ref()).map_err(|e| {
            refused(&e).hint("are cluster.tls_ca, tls_cert and tls_key set as at the other nodes?")
        })?;
        Ok(Self { cluster: token.cluster, node: NodeId(grant.node), grant, store })
    }

    /// Looks whether the store is there, and this node is like those of the cluster.
    async fn look(&self, settings: &Settings) -> Result<ClusterRecord, ApiError> {
        let checked = format::check(&self.store, self.store.name()).await;
        checked.map_err(|e| self.error(&e.into()))?;
        let cluster = joining::cluster_of(&self.store, self.cluster).await;
        let cluster = cluster.map_err(|e| self.error(&e))?;
        let (lease, grace) = (millis(settings.cluster.lease), millis(settings.cluster.grace));
        joining::check_settings(&cluster, lease, grace).map_err(|e| join_error(&e))?;
        Ok(cluster)
    }

    /// Why it does not come in although it was let in.
    fn error(&self, error: &JoinError) -> ApiError {
        let JoinError::Store(MetaError::Unreachable { why, .. }) = error else {
            return join_error(error);
        };
        let at = self.grant.endpoints.join(", ");
        let message = format!(
            "this node is let in, and the store of the cluster is not reached at {at}: {why}"
        );
        ApiError::new(Code::Unavailable, message).hint(
            "is a firewall in the way (ports 2379 and 2380), or are nodes down? Then say it again with the same token: \
             this node is counted once",
        )
    }

    /// Whether a node that joins runs a member of the store.
    async fn runs_member(&self, cluster: &ClusterRecord, role: Role) -> Result<bool, ApiError> {
        if !cluster.own_members {
            return match role {
                Role::Data => Ok(false),
                Role::Witness => Err(conflict(
                    "the cluster uses an external etcd, and a witness would have nothing to do",
                    "join it as a node that keeps data (windrose cluster join), or not at all",
                )),
            };
        }
        let failed = |e: MetaError| self.error(&e.into());
        let members = self.store.members().await.map_err(failed)?;
        if members.len() < MAX_MEMBERS {
            return Ok(true);
        }
        if role == Role::Data {
            return Ok(false);
        }
        let (present, _) = nodes::list(&self.store).await.map_err(failed)?;
        Err(no_room(&members, &present))
    }
}
/// What protects a cluster that is begun with these settings (RFD 0038, 2.2).
fn chosen(settings: &Settings, insecure: bool) -> Result<Protection, ApiError> {
    let is_given = settings.cluster.tls.is_some();
    match (insecure, is_given) {
        (true, true) => Err(conflict(
            "cluster.tls_ca is set: nodes with certificates do not speak in plain text",
            "leave --insecure out, or remove cluster.tls_ca, tls_cert and tls_key and restart the node",
        )),
        (true, false) => Ok(Protection::Plain),
        (false, true) => Ok(Protection::Given),
        (false, false) if !settings.cluster.store.endpoints.is_empty() => Err(conflict(
            "cluster.store_endpoints names an etcd of yours, which knows no certificates of an authority that this cluster \
             would make",
            "set cluster.tls_ca, tls_cert and tls_key to certificates that it knows; with --insecure it is reached in plain \
             text, and is open to everybody who reaches it",
        )),
        (false, false) => own_authority(),
    }
}

fn own_authority() -> Result<Protection, ApiError> {
    let authority = Authority::new().map_err(|e| ApiError::new(Code::Internal, e.to_string()))?;
    Ok(Protection::Own(authority))
}

/// What protects a cluster in the place of one that was protected so.
pub(super) fn renewed(protection: &Protection) -> Result<Protection, ApiError> {
    match protection {
        Protection::Own(_) => own_authority(),
        Protection::Given | Protection::Plain => Ok(protection.clone()),
    }
}

/// What node number `node` is as the first of a new cluster.
pub(super) fn first_of_new(
    settings: &Settings,
    node: NodeId,
    protection: Protection,
) -> Result<Identity, ApiError> {
    let at = listens(settings)?;
    let secret = ClusterSecret::random()
        .ok_or_else(|| ApiError::new(Code::Internal, "the system gives no random bytes"))?;
    let (endpoints, member) = if settings.cluster.store.endpoints.is_empty() {
        let own = own_member(&settings.cluster, at, node, &protection)?;
        (vec![own.client_url.clone()], Some(own))
    } else {
        (settings.cluster.store.endpoints.clone(), None)
    };
    Ok(Identity {
        stage: Stage::Moving,
        cluster: Uuid::new_v4(),
        node,
        index: NodeIndex::new(0),
        role: Role::Data,
        secret,
        protection,
        rotation: None,
        endpoints,
        member,
    })
}

/// A witness finds the store with all the members that it may have. As a rule one of them is that of a node which
/// died, such as the witness before it was installed anew.
fn no_room(members: &[MemberInfo], present: &Nodes) -> ApiError {
    let message = format!("the store has {MAX_MEMBERS} members already");
    let gone = members.iter().find_map(|member| {
        let name = joining::called(member);
        match present.values().find(|view| member_name(view.record.node) == name) {
            Some(view) if view.alive => None,
            Some(view) => Some((name, format!("node {}", view.record.name), called(present, view))),
            None => Some((
                name,
                "a node that is none of the cluster any more".to_owned(),
                name.to_owned(),
            )),
        }
    });
    match gone {
        Some((member, whose, which)) => conflict(
            format!("{message}, one of them ({member}) that of {whose}, which is gone"),
            &format!(
                "if it never comes back, at a node of the cluster: windrose cluster leave --node {which} --force; \
                 then this again"
            ),
        ),
        None => conflict(
            format!("{message}, and all of them run: a witness would have nothing to do"),
            "join it as a node that keeps data (windrose cluster join), or let one of the others leave first",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_drained_and_does_not_run_is_not_said_to_serve() {
        let serves = still_held("b", true, "solo");
        assert!(serves.message.contains("but still serves volume solo"), "{serves}");
        let down = still_held("b", false, "solo");
        assert!(!down.message.contains("still serves") && down.message.contains("does not run"));
        assert!(down.hint.unwrap().contains("start windrose on node b"));
    }

    #[test]
    fn a_node_that_keeps_copies_is_named_with_the_commands_that_free_it() {
        let refused = keeps("b", &["web".into(), "mail".into()]);
        assert_eq!(refused.message, "node b keeps a copy of volume web, mail");
        let hint = refused.hint.unwrap();
        for command in ["replace web --on b --with NODE", "remove web --on b", "delete web"] {
            assert!(hint.contains(command), "{hint}");
        }
    }

    #[test]
    fn what_a_node_keeps_is_found_in_records_of_any_format() {
        let flat = record::tests::entry(&record::tests::record("web"));
        assert_eq!(held_at(&flat, NodeId(1)), Some("web".into()));
        assert_eq!(held_at(&flat, NodeId(2)), None);
        let unreadable = Entry { value: b"?".to_vec(), ..flat };
        assert_eq!(held_at(&unreadable, NodeId(9)), Some(unreadable.key.clone()));
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
        let present = [members::tests::node(1, "a", true)].into();
        let found = |which| stray(&members, &present, which).map(joining::called);
        assert_eq!((found("1"), found("node-1"), found("a:2380")), (None, None, None));
        assert_eq!((found("3"), found("node-3")), (Some("node-3"), Some("node-3")));
        assert_eq!((found("d:2380"), found("")), (Some("http://d:2380"), None));
    }

    #[test]
    fn programs_are_looked_for_where_a_shell_would() {
        assert!(is_installed(Path::new("sh")) && is_installed(Path::new("/bin/sh")));
        assert!(!is_installed(Path::new("no-such-program")));
        assert!(!is_installed(Path::new("/bin")));
    }
}
