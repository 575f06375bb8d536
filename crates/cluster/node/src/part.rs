//! A node's part in a cluster: the member of the store that it runs, and the steps that make it a
//! node of the cluster, or one by itself again (RFD 0012, 2.2).

mod rotate;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::cluster::identity::{Identity, IdentityError, OwnMember, Stage};
use ::cluster::joining::{self, JoinError};
use ::cluster::lives::{self, Claim, Life};
use ::cluster::member::{self, Behind, Member, Origin, Supervisor};
use ::cluster::meta::embedded::Embedded;
use ::cluster::meta::etcd::{Announced, Etcd, MemberHealth, MemberInfo, Settings, Tls};
use ::cluster::meta::{Meta, MetaError, format};
use ::cluster::mirrors::Mirrors;
use ::cluster::nodes::{self, ALIVE_TTL, ClusterRecord, NodePortals, NodeRecord, Nodes};
use rt::fault::{self, Point};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use crate::anchor::{self, AnchorError};
use crate::config::{self, ClusterTls, Config};
use crate::control::{SecretsError, forget_report, hand_over, member_name, own_member};
use crate::data_dir::{DataDir, DataDirError};
use crate::engine::Portals;
use crate::membership::Membership;
use crate::protection::{self, ProtectionError};
use rotate::InEffect;
pub(crate) use rotate::RotateError;

/// How often the leader of the store's members gives a sign of life.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// How long a member is given to stop in order.
const MEMBER_PATIENCE: Duration = Duration::from_secs(5);

/// How often the members are looked at for changes.
const MEMBERS_PAUSE: Duration = Duration::from_secs(10);

/// How often is looked whether a new one gets on.
const MEMBER_PAUSE: Duration = Duration::from_secs(1);

/// How long a node may take to start a member that the store lacks, before the next one tries; and when it tries again.
const TURN: Duration = Duration::from_secs(60);
const TRY_AGAIN: Duration = Duration::from_secs(600);

/// How often the members are asked how they are.
const HEALTH_PAUSE: Duration = Duration::from_secs(3);

/// How long the other members of the store may take for a first answer, before they are taken to wait for this one.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// How often a copy of a node lets that know that it is there, and how long that is told of.
const ASK_AGAIN: Duration = Duration::from_secs(10);
const RIVAL: Duration = Duration::from_secs(30);

/// What etcd says while it takes in a member, which ends by itself in seconds, and what that means.
const TAKES_IN: [(&str, &str); 2] = [
    (
        "unhealthy cluster",
        "the store takes in one member after the other, and the last one is not up for long enough yet",
    ),
    ("in sync with leader", "this node's member of the store catches up with the others"),
];

/// Why a node does not get on with becoming what it is to be.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// A step over the store.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// What secrets are sealed by.
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    /// Its file.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Its data directory.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// Another process is the node.
    #[error(
        "node {node} is another process, on {}, and this one, on {}, is a copy of it: it serves nothing. Stop one of \
         them for good. To have this one be the node, stop the other, and then here: systemctl stop windrose; windrose \
         node accept-data-dir; systemctl start windrose",
        other.place(), own.place()
    )]
    OtherLife {
        /// Which node.
        node: peer::NodeId,
        /// The process that is the node.
        other: Box<Life>,
        /// This one.
        own: Box<Life>,
    },
    /// What says that this is a copy.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
    /// The store's member that it runs.
    #[error("the store's member on this node: {0}")]
    Member(String),
    /// No restart mends the store's member that it runs.
    #[error("the store's member on this node: {0}")]
    Defect(member::Defect),
    /// Its certificates.
    #[error(transparent)]
    Protection(#[from] ProtectionError),
}

impl From<MetaError> for PartError {
    fn from(e: MetaError) -> Self {
        Self::Join(e.into())
    }
}

/// What the steps have made of a node.
pub(crate) enum Became {
    /// A member; the tasks keep what it knows current.
    Member(Box<Membership>, JoinSet<()>),
    /// A node by itself, once its inside begins again.
    Alone,
}

/// For how long the store lacks a member, and whether this node has tried to run it.
#[derive(Debug, Default)]
struct Lacks {
    since: Option<Instant>,
    gave_up: Option<Instant>,
}

impl Lacks {
    fn begin(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// Whether it is the turn of a node with so many before it.
    fn is_turn_of(&mut self, before: usize) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        let turn = TURN * u32::try_from(before).unwrap_or(u32::MAX);
        since.elapsed() >= turn && self.gave_up.is_none_or(|at| at.elapsed() >= TRY_AGAIN)
    }

    /// Whether the node has had its time.
    fn is_given_up(&self) -> bool {
        self.since.is_none_or(|since| since.elapsed() >= TURN)
    }

    fn give_up(&mut self) {
        self.gave_up = Some(Instant::now());
    }
}

/// A node's part in a cluster.
pub(crate) struct Part {
    data_dir: Arc<DataDir>,
    name: String,
    config: config::Cluster,
    portals: Portals,
    /// What it shows to others and to the store; `None` if they speak in plain text.
    certificates: Option<ClusterTls>,
    tls: Option<peer::Tls>,
    /// What it proves itself with to other nodes.
    secret: peer::Secret,
    /// What it shows and accepts at present.
    in_effect: Mutex<InEffect>,
    /// How the cluster's secret and authority are replaced.
    rotation: rotate::Rotation,
    store: Etcd,
    /// The records that a first node takes with it.
    local: Mutex<Option<Embedded>>,
    identity: watch::Sender<Identity>,
    supervisor: Mutex<Option<Supervisor>>,
    announced: Mutex<Option<Announced>>,
    /// This process, among all that are or were the node.
    life: Life,
    /// Whether it is the node.
    claimed: AtomicBool,
    /// A copy of the node that wanted to be it, and when that was.
    rival: Arc<Mutex<Option<(Life, Instant)>>>,
    /// When the node was told last that this is a copy of it.
    asked: Mutex<Option<Instant>>,
    /// The process that is the node now, in place of this one.
    over: watch::Sender<Option<Life>>,
    /// How the store's members were when they were last asked.
    health: Mutex<Vec<MemberHealth>>,
    /// Whether its member of the store is to run no more.
    retired: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How the store at `endpoints` is reached.
pub(crate) fn store(endpoints: &[String], tls: Option<&ClusterTls>) -> Result<Etcd, MetaError> {
    let tls = tls.map(etcd_tls);
    Etcd::new(&Settings { endpoints: endpoints.to_vec(), tls, ..Settings::default() })
}

/// What the store is shown, and believed by.
fn etcd_tls(tls: &ClusterTls) -> Tls {
    Tls { ca: tls.ca.clone(), identity: Some((tls.cert.clone(), tls.key.clone())) }
}

/// This process, for other ones that may be the same node.
fn life(config: &Config, data_dir: &DataDir) -> Life {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    Life {
        life: Uuid::new_v4(),
        host: read("/proc/sys/kernel/hostname"),
        addresses: config.cluster.listen.clone(),
        machine: read("/etc/machine-id"),
        boot: read("/proc/sys/kernel/random/boot_id"),
        lock: data_dir.lock_id(),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Part {
    /// The part that `identity` says. Its own records are taken from `data_dir`, if it is to move.
    pub(crate) fn new(
        config: &Config,
        data_dir: Arc<DataDir>,
        identity: Identity,
        portals: Portals,
    ) -> Result<Self, PartError> {
        let (name, cluster) = (&config.name, &config.cluster);
        let protections = rotate::protections(&identity);
        let certificates = protection::certificates(protections, name, cluster, data_dir.path())?;
        let secret = identity.secret.for_peers();
        let other = identity.other_credentials().map(|other| &other.secret);
        identity.secret.replace_in(&secret, other);
        let local = match identity.stage {
            // It has been there, and must not be taken for an empty one.
            Stage::Moving => Some(Embedded::open_existing(&data_dir.store())?),
            Stage::Joining | Stage::Member | Stage::Leaving => None,
        };
        Ok(Self {
            name: config.name.clone(),
            tls: certificates.as_ref().map(protection::peer_tls).transpose()?,
            store: store(&identity.endpoints, certificates.as_ref())?,
            certificates,
            secret,
            in_effect: Mutex::new(InEffect::of(&identity)),
            rotation: rotate::Rotation::default(),
            config: config.cluster.clone(),
            life: life(config, &data_dir),
            data_dir,
            portals,
            local: Mutex::new(local),
            identity: watch::Sender::new(identity),
            supervisor: Mutex::default(),
            announced: Mutex::default(),
            claimed: AtomicBool::new(false),
            rival: Arc::default(),
            asked: Mutex::default(),
            over: watch::Sender::new(None),
            health: Mutex::default(),
            retired: AtomicBool::new(false),
        })
    }

    /// The cluster's store.
    pub(crate) fn store(&self) -> &Etcd {
        &self.store
    }

    /// What it shows to others and to the store; `None` if they speak in plain text.
    pub(crate) fn certificates(&self) -> Option<&ClusterTls> {
        self.certificates.as_ref()
    }

    /// What the node is now.
    pub(crate) fn identity(&self) -> Identity {
        self.identity.borrow().clone()
    }

    /// What the node is, and will be.
    pub(crate) fn follow_identity(&self) -> watch::Receiver<Identity> {
        self.identity.subscribe()
    }

    /// Whether the nodes run the store's members.
    pub(crate) fn own_members(&self) -> bool {
        self.config.store.endpoints.is_empty()
    }

    /// Changes what the node is, and writes that down first.
    pub(crate) fn update(
        &self,
        change: impl FnOnce(&mut Identity),
    ) -> Result<Identity, IdentityError> {
        let mut outcome = None;
        self.identity.send_if_modified(|identity| {
            let mut next = identity.clone();
            change(&mut next);
            let written = next.write(&self.data_dir.identity());
            let is_written = written.is_ok();
            outcome = Some(written.map(|()| next.clone()));
            if is_written {
                *identity = next;
            }
            is_written
        });
        outcome.expect("what changes the value was called")
    }

    /// Forgets the cluster, without a word to the others.
    pub(crate) fn forget(&self) -> Result<(), IdentityError> {
        let path = self.data_dir.path();
        anchor::forget_records(path)
            .map_err(|why| IdentityError::Refused { path: path.to_owned(), why })?;
        Identity::remove(&self.data_dir.identity())?;
        protection::forget(path);
        Ok(())
    }

    /// Has the node be the first of the new cluster `next` when its inside begins again, and its member of the old store
    /// end for good: what that has is put aside.
    pub(crate) async fn retire(&self, next: &Identity) -> Result<(), PartError> {
        self.retired.store(true, Ordering::Release);
        self.stop().await;
        self.data_dir.set_member_aside(self.identity().cluster)?;
        // There is nothing that it takes along; a store that is missing later is none that was empty.
        drop(Embedded::open(&self.data_dir.store())?);
        Ok(next.write(&self.data_dir.identity())?)
    }

    /// Takes the steps that are left. To be called again after an error.
    pub(crate) async fn advance(&self) -> Result<Became, PartError> {
        loop {
            let identity = self.identity();
            match identity.stage {
                Stage::Moving => self.move_in(identity).await?,
                Stage::Joining => self.join(identity).await?,
                Stage::Member => return self.take_part(&identity).await,
                Stage::Leaving => {
                    self.leave(&identity).await?;
                    return Ok(Became::Alone);
                }
            }
        }
    }

    /// Why it does not get on, with what helps if that is known.
    pub(crate) fn explain(&self, error: &PartError) -> String {
        let said = error.to_string();
        if let Some((_, means)) = TAKES_IN.iter().find(|(says, _)| said.contains(says)) {
            return (*means).to_owned();
        }
        let joins = self.identity().stage == Stage::Joining;
        match error {
            PartError::Join(JoinError::Store(MetaError::Unreachable { .. })) if joins => format!(
                "{error}. That is where the store was when this node was let in: if those nodes have gone, say \
                 windrose cluster leave --force here, and join with a new token (windrose cluster token at a node of \
                 the cluster)"
            ),
            _ => said,
        }
    }

    async fn move_in(&self, identity: Identity) -> Result<(), PartError> {
        if let Some(own) = &identity.member {
            let all = vec![(own.name.clone(), own.peer_url.clone())];
            self.run_member(&identity, Origin::New, all)?;
        }
        format::check(&self.store, self.store.name()).await?;
        let record = ClusterRecord {
            id: identity.cluster,
            next_node: identity.node.0.saturating_add(1),
            own_members: self.own_members(),
            lease_ms: millis(self.config.lease),
            grace_ms: millis(self.config.grace),
        };
        joining::begin(&self.store, &record).await?;
        fault::pass(Point::InitBegun);
        let local = lock(&self.local).clone();
        if let Some(local) = local {
            joining::copy(&local, &self.store).await?;
            // No record was read by anybody yet: nobody is a member.
            hand_over(self.data_dir.path(), &self.store, &identity).await?;
        }
        fault::pass(Point::InitCopied);
        let index = joining::enter(&self.store, &self.record(&identity)).await?;
        fault::pass(Point::InitEntered);
        self.update(|own| (own.stage, own.index) = (Stage::Member, Some(index)))?;
        fault::pass(Point::MemberWritten);
        lock(&self.local).take();
        Ok(())
    }

    async fn join(&self, identity: Identity) -> Result<(), PartError> {
        if let Some(own) = &identity.member {
            let all = joining::make_room(&self.store, own).await?;
            fault::pass(Point::JoinRoom);
            self.run_member(&identity, Origin::Joins, all)?;
            joining::promote(&self.store, own).await?;
        }
        fault::pass(Point::JoinPromoted);
        self.check_cluster(&identity).await?;
        let index = joining::enter_admitted(&self.store, &self.record(&identity)).await?;
        fault::pass(Point::JoinEntered);
        self.update(|own| (own.stage, own.index) = (Stage::Member, Some(index)))?;
        Ok(())
    }

    async fn check_cluster(&self, identity: &Identity) -> Result<(), PartError> {
        format::check(&self.store, self.store.name()).await?;
        let cluster = joining::cluster_of(&self.store, identity.cluster).await?;
        let (lease, grace) = (millis(self.config.lease), millis(self.config.grace));
        Ok(joining::check_settings(&cluster, lease, grace)?)
    }

    /// Makes this process the node, unless another one is.
    async fn claim(&self, identity: &Identity) -> Result<(), PartError> {
        if self.claimed.load(Ordering::Acquire) {
            return Ok(());
        }
        let node = identity.node;
        let refused = |other: Life| {
            let (other, own) = (Box::new(other), Box::new(self.life.clone()));
            PartError::OtherLife { node, other, own }
        };
        if let Some(other) = anchor::other(self.data_dir.path())? {
            let due = {
                let mut asked = lock(&self.asked);
                let due = asked.is_none_or(|at| at.elapsed() >= ASK_AGAIN);
                *asked = Some(Instant::now()).filter(|_| due).or(*asked);
                due
            };
            // So that the node tells of this one for as long as it is there.
            if due {
                let _ = lives::ask(&self.store, node, &self.life).await;
            }
            return Err(refused(other));
        }
        let own = identity.member.as_ref();
        let is_alone =
            own.is_some_and(|own| identity.endpoints.iter().all(|e| *e == own.client_url));
        match lives::claim(&self.store, node, &self.life, is_alone).await? {
            Claim::Ours => {
                self.claimed.store(true, Ordering::Release);
                Ok(())
            }
            Claim::Other(other) => {
                anchor::note_other(self.data_dir.path(), &other).map_err(|why| {
                    DataDirError::Refused { path: self.data_dir.path().to_owned(), why }
                })?;
                let error = refused(*other);
                tracing::error!(%error, "two processes have the identity of one node");
                Err(error)
            }
        }
    }

    /// Claims the node by the others' members of the store, before its own is started: no two members may have one
    /// identity either. Where the others do not answer they wait for this one.
    async fn claim_by_others(&self, identity: &Identity) -> Result<(), PartError> {
        let others = identity.member.as_ref().is_some_and(|own| {
            identity.endpoints.iter().any(|endpoint| *endpoint != own.client_url)
        });
        if !others || lock(&self.supervisor).is_some() {
            return Ok(());
        }
        if anchor::other(self.data_dir.path())?.is_some() {
            return self.claim(identity).await;
        }
        let look = self.store.get(nodes::CLUSTER);
        match tokio::time::timeout(FIRST_LOOK, look).await {
            Ok(Ok(_)) => self.claim(identity).await,
            _ => Ok(()),
        }
    }

    async fn take_part(&self, identity: &Identity) -> Result<Became, PartError> {
        self.data_dir.set_store_aside()?;
        self.claim_by_others(identity).await?;
        let mut member = Ok(());
        if let Some(own) = &identity.member {
            if !self.data_dir.member().join("member").exists() {
                return Err(PartError::Defect(member::Defect::AlreadyBootstrapped));
            }
            let all = vec![(own.name.clone(), own.peer_url.clone())];
            member = self.run_member(identity, Origin::Joins, all);
            if let Err(error) = &member
                && lock(&self.supervisor).as_ref().is_some_and(Supervisor::is_down)
            {
                return Err(PartError::Member(error.to_string()));
            }
        }
        // The others may be enough, if its own member does not start.
        self.check_cluster(identity).await.map_err(|error| member.err().unwrap_or(error))?;
        self.claim(identity).await?;
        joining::refresh(&self.store, &self.record(identity)).await?;
        forget_report(&self.store, identity.node).await?;
        let (present, _) = nodes::list(&self.store).await?;
        let own = present.get(&identity.node).ok_or(JoinError::Removed)?;
        let index = own.record.index;
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        let announced = self.store.announce(&nodes::alive_key(identity.node), version, ALIVE_TTL);
        *lock(&self.announced) = Some(announced);
        let mut tasks = JoinSet::new();
        let (tell, nodes) = watch::channel::<Nodes>(present);
        let store = self.store.clone();
        tasks.spawn(async move { nodes::follow(&store, tell).await });
        let (store, node, own) = (self.store.clone(), identity.node, self.life.clone());
        let (over, rival) = (self.over.clone(), Arc::clone(&self.rival));
        tasks.spawn(async move {
            let seen = |life: &Life| {
                let (other, own) = (life.place(), own.place());
                let before = lock(&rival).replace((life.clone(), Instant::now()));
                if before.is_some_and(|(before, _)| before.life == life.life) {
                    return;
                }
                tracing::error!(%node, own, other, "a copy of this node was started: it serves nothing; stop it");
            };
            let other = lives::hold(&store, node, &own, seen).await;
            over.send_replace(Some(other));
        });
        let bound = Settings::default().try_timeout * (1 + u32::from(self.own_members()) * 2);
        let own = Some((identity.node, self.life.life));
        let (mirrors, serve) = Mirrors::new(Arc::new(self.store.clone()), bound, own);
        tasks.spawn(serve);
        let membership = Membership {
            node: identity.node,
            index,
            cluster: identity.cluster,
            secret: self.secret.clone(),
            role: identity.role,
            tls: self.tls.clone(),
            lease: self.config.lease,
            grace: self.config.grace,
            nodes,
            mirrors,
        };
        Ok(Became::Member(Box::new(membership), tasks))
    }

    async fn leave(&self, identity: &Identity) -> Result<(), PartError> {
        if let Some(own) = &identity.member
            && self.data_dir.member().join("member").exists()
        {
            let all = vec![(own.name.clone(), own.peer_url.clone())];
            self.run_member(identity, Origin::Joins, all)?;
        }
        joining::strike(&self.store, identity.node).await?;
        fault::pass(Point::LeaveStruck);
        if let Some(own) = &identity.member {
            joining::remove_member(&self.store, &own.name, &[]).await?;
        }
        fault::pass(Point::LeaveRemoved);
        Ok(self.forget()?)
    }

    /// Has the store's member run, unless it does already.
    fn run_member(
        &self,
        identity: &Identity,
        origin: Origin,
        all: Vec<(String, String)>,
    ) -> Result<(), PartError> {
        let Some(OwnMember { name, peer_url, client_url }) = identity.member.clone() else {
            return Ok(());
        };
        let mut supervisor = lock(&self.supervisor);
        if self.retired.load(Ordering::Acquire) {
            return Err(PartError::Member("a new store takes its place".to_owned()));
        }
        if let Some(running) = &*supervisor {
            return match &*running.state().borrow() {
                member::State::Down(defect) if identity.stage != Stage::Leaving => {
                    Err(PartError::Defect(defect.clone()))
                }
                member::State::Waiting { why } => Err(PartError::Member(why.clone())),
                _ => Ok(()),
            };
        }
        let tls = self.certificates.as_ref().map(|tls| member::Identity {
            ca: tls.ca.clone(),
            cert: tls.cert.clone(),
            key: tls.key.clone(),
        });
        let member = Member {
            name,
            data_dir: self.data_dir.member(),
            peer_url,
            client_url,
            cluster: all,
            token: identity.cluster.to_string(),
            origin,
            tls,
            heartbeat: HEARTBEAT,
        };
        *supervisor = Some(Supervisor::start(self.config.store.program.clone(), member));
        drop(supervisor);
        lock(&self.in_effect).member_starts(protection::believed(identity));
        Ok(())
    }

    /// The node's record as it should be; its index is for the store to say.
    fn record(&self, identity: &Identity) -> NodeRecord {
        let Portals { iscsi, nvme, discovery } = self.portals.clone();
        NodeRecord {
            node: identity.node,
            index: identity.index.unwrap_or_default(),
            name: self.name.clone(),
            role: identity.role,
            data: self.config.listen.clone(),
            heartbeat: self.config.heartbeat.clone(),
            join: self.config.join,
            portals: NodePortals { iscsi, nvme, discovery },
            data_dir: self.data_dir.path().to_owned(),
            failure_domain: self.config.failure_domain.clone().unwrap_or_else(|| self.name.clone()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            drained: false,
        }
    }

    /// Waits until another process is the node; gives that one, and this.
    pub(crate) async fn replaced(&self) -> (Life, Life) {
        let mut over = self.over.subscribe();
        let other = over.wait_for(Option::is_some).await.ok().and_then(|other| other.clone());
        match other {
            Some(other) => (other, self.life.clone()),
            // The sender is this one's own.
            None => std::future::pending().await,
        }
    }

    /// A copy of the node that has asked in the last moments to be it.
    pub(crate) fn rival(&self) -> Option<Life> {
        let rival = lock(&self.rival);
        rival.as_ref().filter(|(_, at)| at.elapsed() < RIVAL).map(|(life, _)| life.clone())
    }

    /// How the store's members were a few seconds ago; nothing before they were first asked.
    pub(crate) fn health(&self) -> Vec<MemberHealth> {
        lock(&self.health).clone()
    }

    /// Why the store's member that this node runs does not keep running.
    pub(crate) fn member_trouble(&self) -> Option<String> {
        lock(&self.supervisor).as_ref().and_then(Supervisor::trouble)
    }

    /// The members of the store whose clocks are behind this node's, as its own member sees them.
    pub(crate) fn clocks_behind(&self) -> Vec<Behind> {
        lock(&self.supervisor).as_ref().map(Supervisor::behind).unwrap_or_default()
    }

    /// Asks the store's members how they are.
    pub(crate) async fn look_at_health(&self) -> Vec<MemberHealth> {
        let known = self.health();
        let health = self.store.health(&known, self.own_members()).await;
        lock(&self.health).clone_from(&health);
        health
    }

    /// Keeps current what is known of the store's members, for as long as the node is a member.
    pub(crate) async fn follow_health(self: Arc<Self>) {
        loop {
            self.look_at_health().await;
            tokio::time::sleep(HEALTH_PAUSE).await;
        }
    }

    /// Keeps the addresses of the store's members current, here and in the file, and has this node run one where the store
    /// lacks it, for as long as the node is a member.
    pub(crate) async fn follow_members(self: Arc<Self>) {
        let (mut lacks, mut told) = (Lacks::default(), String::new());
        loop {
            let mut pause = MEMBERS_PAUSE;
            if let Ok(members) = self.store.members().await {
                self.note_endpoints(&members);
                match self.tend_member(&members, &mut lacks).await {
                    Ok(true) => pause = MEMBER_PAUSE,
                    Ok(false) => told.clear(),
                    Err(why) => {
                        if why != told {
                            tracing::warn!(
                                why,
                                "the store lacks a member, and this node cannot run one"
                            );
                            told = why;
                        }
                        pause = MEMBER_PAUSE;
                    }
                }
            }
            tokio::time::sleep(pause).await;
        }
    }

    fn note_endpoints(&self, members: &[MemberInfo]) {
        let identity = self.identity();
        let now = joining::endpoints(members, identity.member.as_ref());
        if identity.stage == Stage::Member && !now.is_empty() && now != identity.endpoints {
            let set = self.store.set_endpoints(&now).map_err(PartError::from);
            let update = || self.update(|own| own.endpoints = now);
            if let Err(error) = set.and_then(|()| Ok(update().map(drop)?)) {
                tracing::warn!(%error, "where the store is cannot be written down");
            }
        }
    }

    /// Where a member of the store was removed, a node that joined when there was no place for one of its own takes the
    /// place. Says whether it is about to. The node serves all the while, whatever becomes of it; its file names the member
    /// once that has its data, and before it has a vote.
    async fn tend_member(&self, members: &[MemberInfo], lacks: &mut Lacks) -> Result<bool, String> {
        let identity = self.identity();
        if identity.stage != Stage::Member || !self.own_members() {
            return Ok(false);
        }
        let entry = |own: &OwnMember| members.iter().find(|m| m.peer_urls.contains(&own.peer_url));
        if let Some(own) = &identity.member {
            let learns = entry(own).is_some_and(|member| member.is_learner);
            if learns {
                // It is refused for as long as the member has not learnt enough.
                let _ = joining::promote(&self.store, own).await;
            }
            return Ok(learns);
        }
        let Some(at) = self.config.listen.first().copied() else { return Ok(false) };
        let own = own_member(&self.config, at, identity.node, &identity.protection);
        let own = own.map_err(|e| e.to_string())?;
        match entry(&own) {
            // It was begun before.
            Some(_) => lacks.begin(),
            None if !self.is_to_run_member(members, lacks).await => return Ok(false),
            None => tracing::info!("the store lacks a member: this node runs one from now on"),
        }
        let begun = self.begin_member(&Identity { member: Some(own.clone()), ..identity }).await;
        if let Err(error) = &begun
            && lacks.is_given_up()
        {
            // A member that does not start is in the way of others that would.
            self.stop_member().await;
            let at = [at.ip()];
            let _ = joining::remove_member(&self.store, &own.name, &at).await;
            lacks.give_up();
            return Err(error.to_string());
        }
        begun.map_err(|error| error.to_string())
    }

    /// Whether the store lacks a member, and this is the node to run it: the first of those that run and have none, or a
    /// later one where those before it have had their time.
    async fn is_to_run_member(&self, members: &[MemberInfo], lacks: &mut Lacks) -> bool {
        let learns = members.iter().any(|member| member.is_learner);
        if learns || members.len() >= joining::MAX_MEMBERS {
            *lacks = Lacks::default();
            return false;
        }
        let identity = self.identity();
        let cluster = joining::cluster_of(&self.store, identity.cluster).await;
        let (Ok(cluster), Ok((present, _))) = (cluster, nodes::list(&self.store).await) else {
            return false;
        };
        let has_member = |node| members.iter().any(|m| m.name == member_name(node));
        let running = present.values().filter(|view| view.alive).map(|view| view.record.node);
        let before = running.filter(|node| *node < identity.node && !has_member(*node)).count();
        cluster.own_members && lacks.is_turn_of(before)
    }

    /// Starts the member in `next`, and writes down that the node runs it once it has its data.
    async fn begin_member(&self, next: &Identity) -> Result<bool, PartError> {
        let Some(own) = &next.member else { return Ok(false) };
        let all = joining::make_room(&self.store, own).await?;
        fault::pass(Point::JoinRoom);
        self.run_member(next, Origin::Joins, all)?;
        let runs = lock(&self.supervisor)
            .as_ref()
            .is_some_and(|member| *member.state().borrow() == member::State::Running);
        if runs && self.data_dir.member().join("member").exists() {
            self.update(|identity| identity.member = Some(own.clone()))?;
        }
        Ok(true)
    }

    async fn stop_member(&self) {
        let supervisor = lock(&self.supervisor).take();
        if let Some(supervisor) = supervisor
            && !supervisor.stop(MEMBER_PATIENCE).await
        {
            tracing::warn!("the store's member did not stop by itself");
        }
    }

    /// Takes its sign of life back and stops the store's member.
    pub(crate) async fn stop(&self) {
        lock(&self.announced).take();
        self.stop_member().await;
    }
}
