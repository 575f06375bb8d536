//! A node's membership in a cluster: the store member that it runs, and the steps by which it joins
//! the cluster or leaves it (RFD 0012, 2.2).

mod rotation_driver;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::etcd_member::{self, ClockLag, EtcdMemberConfig, EtcdSupervisor, InitialClusterState};
use cluster::identity::{ClusterIdentity, IdentityError, LocalStoreMember, MembershipStage};
use cluster::incarnations::{self, ClaimOutcome, ProcessIncarnation};
use cluster::join_error::{JoinError, check_settings};
use cluster::mirror_records::MirrorRecords;
use cluster::node_membership::{self, store_member_name};
use cluster::nodes::{self, ALIVE_TTL, ClusterRecord, NodePortals, NodeRecord, Nodes};
use cluster::store::embedded::EmbeddedStore;
use cluster::store::etcd::{EtcdSettings, EtcdStore, EtcdTls, LeasedKey, MemberHealth, MemberInfo};
use cluster::store::{Change, MetadataStore, Precondition, StoreError, store_format};
use peer::NodeId;
use rt::fault_point::{self, FaultPoint};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use crate::anchor::{self, AnchorError};
use crate::certificates::{self, CertificateError};
use crate::secret_keys::{SecretsError, move_keys_to_cluster};
use crate::store_member::own_store_member;
use config::data_dir::{DataDir, DataDirError};
use config::{self, ClusterTls, Config};
use engine::Portals;
use engine::joined_cluster::JoinedCluster;
use rotation_driver::CredentialsInUse;
pub use rotation_driver::RotationError;
use status::report::report_key;

/// Heartbeat interval of the leader of the store.
const STORE_HEARTBEAT: Duration = Duration::from_millis(100);

/// How long a store member may take to stop.
const STORE_MEMBER_STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of checks for changed store members.
const MEMBER_POLL: Duration = Duration::from_secs(10);

/// Interval of checks on a new store member.
const NEW_MEMBER_POLL: Duration = Duration::from_secs(1);

/// How long a node may take to start a member that the store lacks before the next node tries, and
/// how long a node that failed waits before it tries again.
const VACANCY_TURN: Duration = Duration::from_secs(60);
const VACANCY_RETRY: Duration = Duration::from_secs(600);

/// Interval of health checks of the store members.
const HEALTH_POLL: Duration = Duration::from_secs(3);

/// How long the other store members may take to answer at first. After that this node assumes that
/// they wait for its own member.
const PEER_CLAIM_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a copy of a node announces itself to the node, and how long the node reports it.
const COPY_NOTICE_INTERVAL: Duration = Duration::from_secs(10);
const RIVAL_REPORT_TIME: Duration = Duration::from_secs(30);

/// Errors of etcd while it adds a member, which pass within seconds, and their meaning.
const TRANSIENT_ETCD_ERRORS: [(&str, &str); 2] = [
    (
        "unhealthy cluster",
        "the store adds one member at a time, and the last one has not been up long enough yet",
    ),
    ("in sync with leader", "this node's member of the store is catching up with the others"),
];

/// Why a step of joining, being in or leaving a cluster failed.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// A step that needs the store.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The keys of secrets.
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    /// The identity file.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The data directory.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// Another process holds the node.
    #[error(
        "node {node} already runs as another process, on {}; this process, on {}, is a duplicate \
         of it and serves nothing. Stop one of them for good. To keep this one, stop the other, \
         then run here: systemctl stop windrose; windrose node accept-data-dir; systemctl start \
         windrose",
        other.describe_location(), own.describe_location()
    )]
    ReplacedByProcess {
        /// Which node.
        node: NodeId,
        /// The process that holds the node.
        other: Box<ProcessIncarnation>,
        /// This process.
        own: Box<ProcessIncarnation>,
    },
    /// The file that marks this data directory as a copy.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
    /// The store member that the node runs.
    #[error("store member on this node: {0}")]
    StoreMember(String),
    /// The store member is broken, and restarting it does not help.
    #[error("store member on this node: {0}")]
    StoreMemberDefect(etcd_member::PermanentFailure),
    /// The node's certificates.
    #[error(transparent)]
    Certificates(#[from] CertificateError),
}

impl From<StoreError> for MembershipError {
    fn from(e: StoreError) -> Self {
        Self::Join(e.into())
    }
}

/// The result of all steps.
pub enum MembershipOutcome {
    /// A member of the cluster; the tasks keep its data current.
    Member(Box<JoinedCluster>, JoinSet<()>),
    /// A standalone node, after its restart.
    Standalone,
}

/// How long the store has lacked a member, and whether this node gave up running it.
#[derive(Debug, Default)]
struct StoreMemberVacancy {
    since: Option<Instant>,
    abandoned_at: Option<Instant>,
}

impl StoreMemberVacancy {
    fn note_vacancy(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// Whether it is this node's turn, with `before` nodes ahead of it.
    fn is_turn_after(&mut self, before: usize) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        let delay = VACANCY_TURN * u32::try_from(before).unwrap_or(u32::MAX);
        since.elapsed() >= delay && self.abandoned_at.is_none_or(|at| at.elapsed() >= VACANCY_RETRY)
    }

    /// Whether this node has used up its turn.
    fn has_timed_out(&self) -> bool {
        self.since.is_none_or(|since| since.elapsed() >= VACANCY_TURN)
    }

    fn abandon(&mut self) {
        self.abandoned_at = Some(Instant::now());
    }
}

/// A node's membership in a cluster.
pub struct ClusterMembership {
    data_dir: Arc<DataDir>,
    name: String,
    config: config::Cluster,
    portals: Portals,
    /// Its certificates for other nodes and the store; `None` in a plain-text cluster.
    certificates: Option<ClusterTls>,
    tls: Option<peer::Tls>,
    /// The secret by which it authenticates to other nodes.
    secret: peer::PeerSecret,
    /// The credentials that it uses and accepts now.
    credentials_in_use: Mutex<CredentialsInUse>,
    /// State of the rotation of the cluster's secret and authority.
    rotation: rotation_driver::RotationDriver,
    store: EtcdStore,
    /// The records that the first node moves into the cluster's store.
    local_store: Mutex<Option<EmbeddedStore>>,
    identity: watch::Sender<ClusterIdentity>,
    supervisor: Mutex<Option<EtcdSupervisor>>,
    alive_announcement: Mutex<Option<LeasedKey>>,
    /// The identity of this process, among all that run or ran as the node.
    incarnation: ProcessIncarnation,
    /// Whether this process holds the node.
    has_claimed_node: AtomicBool,
    /// A copy of the node that tried to claim it, and when.
    rival: Arc<Mutex<Option<(ProcessIncarnation, Instant)>>>,
    /// When this process, as a copy, last announced itself to the node.
    last_copy_notice: Mutex<Option<Instant>>,
    /// The process that took the node over from this one.
    replaced_by: watch::Sender<Option<ProcessIncarnation>>,
    /// Health of the store members at the last check.
    store_health: Mutex<Vec<MemberHealth>>,
    /// Whether its store member must not run again.
    is_store_member_retired: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects to the store at `endpoints`.
pub fn connect_store(
    endpoints: &[String],
    tls: Option<&ClusterTls>,
) -> Result<EtcdStore, StoreError> {
    let tls = tls.map(etcd_tls);
    EtcdStore::new(&EtcdSettings { endpoints: endpoints.to_vec(), tls, ..EtcdSettings::default() })
}

/// The certificate for the store, and the authority that signs the store's.
fn etcd_tls(tls: &ClusterTls) -> EtcdTls {
    EtcdTls { ca: tls.ca.clone(), identity: Some((tls.cert.clone(), tls.key.clone())) }
}

/// The identity of this process, for others that may be the same node.
fn read_incarnation(config: &Config, data_dir: &DataDir) -> ProcessIncarnation {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    ProcessIncarnation {
        id: Uuid::new_v4(),
        host: read("/proc/sys/kernel/hostname"),
        addresses: config.cluster.listen.clone(),
        machine_id: read("/etc/machine-id"),
        boot_id: read("/proc/sys/kernel/random/boot_id"),
        lock_file: data_dir.lock_id(),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl ClusterMembership {
    /// The membership that `identity` describes. Opens the standalone store in `data_dir` if its
    /// records have yet to move.
    pub fn new(
        config: &Config,
        data_dir: Arc<DataDir>,
        identity: ClusterIdentity,
        portals: Portals,
    ) -> Result<Self, MembershipError> {
        let (name, cluster) = (&config.name, &config.cluster);
        let protections = rotation_driver::current_and_other_protection(&identity);
        let certificates =
            certificates::prepare_certificates(protections, name, cluster, data_dir.path())?;
        let secret = identity.secret.to_peer_secret();
        let other = identity.also_accepted_credentials().map(|other| &other.secret);
        identity.secret.install_in(&secret, other);
        let local = match identity.stage {
            // The store was there before: an empty one must not replace it.
            MembershipStage::Creating => {
                Some(EmbeddedStore::open_existing(&data_dir.store_path())?)
            }
            MembershipStage::Joining | MembershipStage::Member | MembershipStage::Leaving => None,
        };
        Ok(Self {
            name: config.name.clone(),
            tls: certificates.as_ref().map(certificates::peer_tls).transpose()?,
            store: connect_store(&identity.endpoints, certificates.as_ref())?,
            certificates,
            secret,
            credentials_in_use: Mutex::new(CredentialsInUse::new(&identity)),
            rotation: rotation_driver::RotationDriver::default(),
            config: config.cluster.clone(),
            incarnation: read_incarnation(config, &data_dir),
            data_dir,
            portals,
            local_store: Mutex::new(local),
            identity: watch::Sender::new(identity),
            supervisor: Mutex::default(),
            alive_announcement: Mutex::default(),
            has_claimed_node: AtomicBool::new(false),
            rival: Arc::default(),
            last_copy_notice: Mutex::default(),
            replaced_by: watch::Sender::new(None),
            store_health: Mutex::default(),
            is_store_member_retired: AtomicBool::new(false),
        })
    }

    /// The cluster's store.
    pub fn store(&self) -> &EtcdStore {
        &self.store
    }

    /// Its certificates for other nodes and the store; `None` in a plain-text cluster.
    pub fn certificates(&self) -> Option<&ClusterTls> {
        self.certificates.as_ref()
    }

    /// The node's current identity in the cluster.
    pub fn identity(&self) -> ClusterIdentity {
        self.identity.borrow().clone()
    }

    /// Watches the node's identity.
    pub fn watch_identity(&self) -> watch::Receiver<ClusterIdentity> {
        self.identity.subscribe()
    }

    /// Whether the nodes run the store members, rather than an external etcd.
    pub fn runs_own_store(&self) -> bool {
        self.config.store.endpoints.is_empty()
    }

    /// Changes the node's identity; writes the file first.
    pub fn update_identity(
        &self,
        change: impl FnOnce(&mut ClusterIdentity),
    ) -> Result<ClusterIdentity, IdentityError> {
        let mut outcome = None;
        self.identity.send_if_modified(|identity| {
            let mut next = identity.clone();
            change(&mut next);
            let written = next.write(&self.data_dir.identity_path());
            let is_written = written.is_ok();
            outcome = Some(written.map(|()| next.clone()));
            if is_written {
                *identity = next;
            }
            is_written
        });
        outcome.expect("what changes the value was called")
    }

    /// Removes the node's identity in the cluster, without informing other nodes.
    pub fn forget_cluster(&self) -> Result<(), IdentityError> {
        let path = self.data_dir.path();
        anchor::clear_records_location(path)
            .map_err(|why| IdentityError::Io { path: path.to_owned(), why })?;
        ClusterIdentity::remove(&self.data_dir.identity_path())?;
        certificates::remove_certificates(path);
        Ok(())
    }

    /// Makes the node the first of the new cluster `next` at its next restart, and stops its member
    /// of the old store for good, archiving its data.
    pub async fn move_to_new_cluster(&self, next: &ClusterIdentity) -> Result<(), MembershipError> {
        self.is_store_member_retired.store(true, Ordering::Release);
        self.stop().await;
        self.data_dir.archive_store_member(self.identity().cluster)?;
        // There are no records to move. Create the store now, so that a store missing later is an
        // error.
        drop(EmbeddedStore::open(&self.data_dir.store_path())?);
        Ok(next.write(&self.data_dir.identity_path())?)
    }

    /// Takes the remaining steps. Call it again after an error.
    pub async fn advance_stage(&self) -> Result<MembershipOutcome, MembershipError> {
        loop {
            let identity = self.identity();
            match identity.stage {
                MembershipStage::Creating => self.move_records_to_cluster(identity).await?,
                MembershipStage::Joining => self.join_cluster(identity).await?,
                MembershipStage::Member => return self.become_member(&identity).await,
                MembershipStage::Leaving => {
                    self.leave_cluster(&identity).await?;
                    return Ok(MembershipOutcome::Standalone);
                }
            }
        }
    }

    /// Explains an error, with the remedy if one is known.
    pub fn explain_error(&self, error: &MembershipError) -> String {
        let text = error.to_string();
        if let Some((_, meaning)) =
            TRANSIENT_ETCD_ERRORS.iter().find(|(pattern, _)| text.contains(pattern))
        {
            return (*meaning).to_owned();
        }
        let joins = self.identity().stage == MembershipStage::Joining;
        match error {
            MembershipError::Join(JoinError::Store(StoreError::Unreachable { .. })) if joins => {
                format!(
                    "{error}. These were the store's addresses when this node was admitted: if \
                     those nodes are gone, run windrose cluster leave --force here, and join with \
                     a new token (windrose cluster token at a node of the cluster)"
                )
            }
            _ => text,
        }
    }

    async fn move_records_to_cluster(
        &self,
        identity: ClusterIdentity,
    ) -> Result<(), MembershipError> {
        if let Some(own) = &identity.member {
            let all = vec![(own.name.clone(), own.peer_url.clone())];
            self.start_store_member(&identity, InitialClusterState::New, all)?;
        }
        store_format::check_or_init(&self.store, self.store.name()).await?;
        let record = ClusterRecord {
            id: identity.cluster,
            next_node: identity.node.0.saturating_add(1),
            runs_own_store: self.runs_own_store(),
            lease_ms: millis(self.config.lease),
            grace_ms: millis(self.config.grace),
        };
        node_membership::create_cluster(&self.store, &record).await?;
        fault_point::reach(FaultPoint::InitClusterRecordWritten);
        let local = lock(&self.local_store).clone();
        if let Some(local) = local {
            node_membership::copy_store(&local, &self.store).await?;
            // No record has been read yet, so there are no members.
            move_keys_to_cluster(self.data_dir.path(), &self.store, &identity).await?;
        }
        fault_point::reach(FaultPoint::InitRecordsCopied);
        let index = node_membership::add_node(&self.store, &self.node_record(&identity)).await?;
        fault_point::reach(FaultPoint::InitNodeListed);
        self.update_identity(|own| {
            (own.stage, own.index) = (MembershipStage::Member, Some(index));
        })?;
        fault_point::reach(FaultPoint::MembershipWritten);
        lock(&self.local_store).take();
        Ok(())
    }

    async fn join_cluster(&self, identity: ClusterIdentity) -> Result<(), MembershipError> {
        if let Some(own) = &identity.member {
            let all = node_membership::add_learner(&self.store, own).await?;
            fault_point::reach(FaultPoint::JoinStoreMemberAdded);
            self.start_store_member(&identity, InitialClusterState::Existing, all)?;
            node_membership::promote_learner(&self.store, own).await?;
        }
        fault_point::reach(FaultPoint::JoinStoreVoter);
        self.check_cluster(&identity).await?;
        let index =
            node_membership::add_admitted_node(&self.store, &self.node_record(&identity)).await?;
        fault_point::reach(FaultPoint::JoinNodeListed);
        self.update_identity(|own| {
            (own.stage, own.index) = (MembershipStage::Member, Some(index));
        })?;
        Ok(())
    }

    async fn check_cluster(&self, identity: &ClusterIdentity) -> Result<(), MembershipError> {
        store_format::check_or_init(&self.store, self.store.name()).await?;
        let cluster = node_membership::cluster_record(&self.store, identity.cluster).await?;
        let (lease, grace) = (millis(self.config.lease), millis(self.config.grace));
        Ok(check_settings(&cluster, lease, grace)?)
    }

    /// Claims the node for this process, unless another process holds it.
    async fn claim_node(&self, identity: &ClusterIdentity) -> Result<(), MembershipError> {
        if self.has_claimed_node.load(Ordering::Acquire) {
            return Ok(());
        }
        let node = identity.node;
        let refused = |other: ProcessIncarnation| {
            let (other, own) = (Box::new(other), Box::new(self.incarnation.clone()));
            MembershipError::ReplacedByProcess { node, other, own }
        };
        if let Some(other) = anchor::active_process(self.data_dir.path())? {
            let due = {
                let mut last_notice = lock(&self.last_copy_notice);
                let due = last_notice.is_none_or(|at| at.elapsed() >= COPY_NOTICE_INTERVAL);
                *last_notice = Some(Instant::now()).filter(|_| due).or(*last_notice);
                due
            };
            // Announce this copy regularly, so that the node reports it.
            if due {
                let _ = incarnations::write_challenge(&self.store, node, &self.incarnation).await;
            }
            return Err(refused(other));
        }
        let own = identity.member.as_ref();
        let is_alone =
            own.is_some_and(|own| identity.endpoints.iter().all(|e| *e == own.client_url));
        match incarnations::claim(&self.store, node, &self.incarnation, is_alone).await? {
            ClaimOutcome::Registered => {
                self.has_claimed_node.store(true, Ordering::Release);
                Ok(())
            }
            ClaimOutcome::OtherAlive(other) => {
                anchor::record_active_process(self.data_dir.path(), &other).map_err(|why| {
                    DataDirError::Io { path: self.data_dir.path().to_owned(), why }
                })?;
                let error = refused(*other);
                tracing::error!(%error, "another process runs with the identity of this node");
                Err(error)
            }
        }
    }

    /// Claims the node at the other store members before starting its own, since two members with
    /// one identity must not run either. If the others do not answer, they wait for this node's
    /// member.
    async fn claim_before_store_start(
        &self,
        identity: &ClusterIdentity,
    ) -> Result<(), MembershipError> {
        let others = identity.member.as_ref().is_some_and(|own| {
            identity.endpoints.iter().any(|endpoint| *endpoint != own.client_url)
        });
        if !others || lock(&self.supervisor).is_some() {
            return Ok(());
        }
        if anchor::active_process(self.data_dir.path())?.is_some() {
            return self.claim_node(identity).await;
        }
        let look = self.store.get(nodes::CLUSTER_KEY);
        match tokio::time::timeout(PEER_CLAIM_TIMEOUT, look).await {
            Ok(Ok(_)) => self.claim_node(identity).await,
            _ => Ok(()),
        }
    }

    async fn become_member(
        &self,
        identity: &ClusterIdentity,
    ) -> Result<MembershipOutcome, MembershipError> {
        self.data_dir.archive_own_store()?;
        self.claim_before_store_start(identity).await?;
        let mut member = Ok(());
        if let Some(own) = &identity.member {
            if !self.data_dir.store_member_dir().join("member").exists() {
                return Err(MembershipError::StoreMemberDefect(
                    etcd_member::PermanentFailure::DataLost,
                ));
            }
            let all = vec![(own.name.clone(), own.peer_url.clone())];
            member = self.start_store_member(identity, InitialClusterState::Existing, all);
            if let Err(error) = &member
                && lock(&self.supervisor).as_ref().is_some_and(EtcdSupervisor::is_permanently_down)
            {
                return Err(MembershipError::StoreMember(error.to_string()));
            }
        }
        // The other members may suffice if its own does not start.
        self.check_cluster(identity).await.map_err(|error| member.err().unwrap_or(error))?;
        self.claim_node(identity).await?;
        node_membership::update_node(&self.store, &self.node_record(identity)).await?;
        remove_report(&self.store, identity.node).await?;
        let (present, _) = nodes::list_readable(&self.store).await?;
        let own = present.get(&identity.node).ok_or(JoinError::Removed)?;
        let index = own.record.index;
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        let announced = self.store.put_leased(&nodes::alive_key(identity.node), version, ALIVE_TTL);
        *lock(&self.alive_announcement) = Some(announced);
        let mut tasks = JoinSet::new();
        let (tell, nodes) = watch::channel::<Nodes>(present);
        let store = self.store.clone();
        tasks.spawn(async move { nodes::watch_nodes(&store, tell).await });
        let (store, node, own) = (self.store.clone(), identity.node, self.incarnation.clone());
        let (replaced_by, rival) = (self.replaced_by.clone(), Arc::clone(&self.rival));
        tasks.spawn(async move {
            let seen = |rival_process: &ProcessIncarnation| {
                let (other, own) = (rival_process.describe_location(), own.describe_location());
                let before = lock(&rival).replace((rival_process.clone(), Instant::now()));
                if before.is_some_and(|(before, _)| before.id == rival_process.id) {
                    return;
                }
                tracing::error!(%node, own, other, "a duplicate of this node was started and serves nothing; stop it");
            };
            let other = incarnations::answer_challenges(&store, node, &own, seen).await;
            replaced_by.send_replace(Some(other));
        });
        let bound =
            EtcdSettings::default().attempt_timeout * (1 + u32::from(self.runs_own_store()) * 2);
        let own = Some((identity.node, self.incarnation.id));
        let (mirrors, serve) = MirrorRecords::new(Arc::new(self.store.clone()), bound, own);
        tasks.spawn(serve);
        let membership = JoinedCluster {
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
        Ok(MembershipOutcome::Member(Box::new(membership), tasks))
    }

    async fn leave_cluster(&self, identity: &ClusterIdentity) -> Result<(), MembershipError> {
        if let Some(own) = &identity.member
            && self.data_dir.store_member_dir().join("member").exists()
        {
            let all = vec![(own.name.clone(), own.peer_url.clone())];
            self.start_store_member(identity, InitialClusterState::Existing, all)?;
        }
        node_membership::remove_node(&self.store, identity.node).await?;
        fault_point::reach(FaultPoint::LeaveNodeUnlisted);
        if let Some(own) = &identity.member {
            node_membership::remove_member(&self.store, &own.name, &[]).await?;
        }
        fault_point::reach(FaultPoint::LeaveStoreMemberRemoved);
        Ok(self.forget_cluster()?)
    }

    /// Starts the store member, unless it runs already.
    fn start_store_member(
        &self,
        identity: &ClusterIdentity,
        origin: InitialClusterState,
        all: Vec<(String, String)>,
    ) -> Result<(), MembershipError> {
        let Some(LocalStoreMember { name, peer_url, client_url }) = identity.member.clone() else {
            return Ok(());
        };
        let mut supervisor = lock(&self.supervisor);
        if self.is_store_member_retired.load(Ordering::Acquire) {
            return Err(MembershipError::StoreMember("a new store is replacing it".to_owned()));
        }
        if let Some(running) = &*supervisor {
            return match &*running.state().borrow() {
                etcd_member::EtcdState::PermanentlyDown(defect)
                    if identity.stage != MembershipStage::Leaving =>
                {
                    Err(MembershipError::StoreMemberDefect(defect.clone()))
                }
                etcd_member::EtcdState::Restarting { why } => {
                    Err(MembershipError::StoreMember(why.clone()))
                }
                _ => Ok(()),
            };
        }
        let tls = self.certificates.as_ref().map(|tls| etcd_member::TlsFiles {
            ca: tls.ca.clone(),
            cert: tls.cert.clone(),
            key: tls.key.clone(),
        });
        let member = EtcdMemberConfig {
            name,
            data_dir: self.data_dir.store_member_dir(),
            peer_url,
            client_url,
            initial_cluster: all,
            initial_cluster_token: identity.cluster.to_string(),
            initial_cluster_state: origin,
            tls,
            heartbeat_interval: STORE_HEARTBEAT,
        };
        *supervisor = Some(EtcdSupervisor::start(self.config.store.program.clone(), member));
        drop(supervisor);
        lock(&self.credentials_in_use)
            .set_store_member_trust(certificates::trusted_authorities(identity));
        Ok(())
    }

    /// The node's record as it should be; the store assigns its index.
    fn node_record(&self, identity: &ClusterIdentity) -> NodeRecord {
        let Portals { iscsi, nvme, discovery } = self.portals.clone();
        NodeRecord {
            node: identity.node,
            index: identity.index.unwrap_or_default(),
            name: self.name.clone(),
            role: identity.role,
            data_addresses: self.config.listen.clone(),
            heartbeat_addresses: self.config.heartbeat.clone(),
            join_address: self.config.join,
            portals: NodePortals { iscsi, nvme, discovery },
            data_dir: self.data_dir.path().to_owned(),
            failure_domain: self.config.failure_domain.clone().unwrap_or_else(|| self.name.clone()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            is_drained: false,
        }
    }

    /// Waits until another process holds the node; returns that process and this one.
    pub async fn wait_replaced(&self) -> (ProcessIncarnation, ProcessIncarnation) {
        let mut replaced_by = self.replaced_by.subscribe();
        let other =
            replaced_by.wait_for(Option::is_some).await.ok().and_then(|other| other.clone());
        match other {
            Some(other) => (other, self.incarnation.clone()),
            // Unreachable: `self` holds the sender.
            None => std::future::pending().await,
        }
    }

    /// A copy of the node that tried to claim it recently.
    pub fn rival(&self) -> Option<ProcessIncarnation> {
        let rival = lock(&self.rival);
        rival
            .as_ref()
            .filter(|(_, at)| at.elapsed() < RIVAL_REPORT_TIME)
            .map(|(process, _)| process.clone())
    }

    /// Health of the store members at the last check; empty before the first.
    pub fn store_health(&self) -> Vec<MemberHealth> {
        lock(&self.store_health).clone()
    }

    /// Why the store member of this node does not keep running.
    pub fn store_member_error(&self) -> Option<String> {
        lock(&self.supervisor).as_ref().and_then(EtcdSupervisor::last_failure)
    }

    /// Store members whose clocks are behind this node's, according to its own member.
    pub fn store_members_behind(&self) -> Vec<ClockLag> {
        lock(&self.supervisor).as_ref().map(EtcdSupervisor::clock_lags).unwrap_or_default()
    }

    /// Checks the health of the store members.
    pub async fn refresh_store_health(&self) -> Vec<MemberHealth> {
        let known = self.store_health();
        let health = self.store.health(&known, self.runs_own_store()).await;
        lock(&self.store_health).clone_from(&health);
        health
    }

    /// Checks the health of the store members regularly, while the node is a member.
    pub async fn poll_store_health(self: Arc<Self>) {
        loop {
            self.refresh_store_health().await;
            tokio::time::sleep(HEALTH_POLL).await;
        }
    }

    /// Keeps the endpoints of the store members current, in memory and in the identity file, and
    /// runs a store member here if the store lacks one. Runs while the node is a member.
    pub async fn maintain_store_members(self: Arc<Self>) {
        let (mut vacancy, mut logged) = (StoreMemberVacancy::default(), String::new());
        loop {
            let mut pause = MEMBER_POLL;
            if let Ok(members) = self.store.members().await {
                self.update_store_endpoints(&members);
                match self.fill_store_vacancy(&members, &mut vacancy).await {
                    Ok(true) => pause = NEW_MEMBER_POLL,
                    Ok(false) => logged.clear(),
                    Err(why) => {
                        if why != logged {
                            tracing::warn!(
                                why,
                                "store lacks a member, but this node cannot run one"
                            );
                            logged = why;
                        }
                        pause = NEW_MEMBER_POLL;
                    }
                }
            }
            tokio::time::sleep(pause).await;
        }
    }

    fn update_store_endpoints(&self, members: &[MemberInfo]) {
        let identity = self.identity();
        let now = node_membership::voter_endpoints(members, identity.member.as_ref());
        if identity.stage == MembershipStage::Member && !now.is_empty() && now != identity.endpoints
        {
            let set = self.store.set_endpoints(&now).map_err(MembershipError::from);
            let update = || self.update_identity(|own| own.endpoints = now);
            if let Err(error) = set.and_then(|()| Ok(update().map(drop)?)) {
                tracing::warn!(%error, "cannot record the addresses of the store");
            }
        }
    }

    /// Replaces a removed store member: a node that had to join without one now runs it. Returns
    /// whether that is in progress. The node serves meanwhile, whatever the outcome; its identity
    /// file names the member once that has data, before it can vote.
    async fn fill_store_vacancy(
        &self,
        members: &[MemberInfo],
        vacancy: &mut StoreMemberVacancy,
    ) -> Result<bool, String> {
        let identity = self.identity();
        if identity.stage != MembershipStage::Member || !self.runs_own_store() {
            return Ok(false);
        }
        let entry =
            |own: &LocalStoreMember| members.iter().find(|m| m.peer_urls.contains(&own.peer_url));
        if let Some(own) = &identity.member {
            let is_learner = entry(own).is_some_and(|member| member.is_learner);
            if is_learner {
                // Refused until the learner has caught up.
                let _ = node_membership::promote_learner(&self.store, own).await;
            }
            return Ok(is_learner);
        }
        let Some(at) = self.config.listen.first().copied() else { return Ok(false) };
        let own = own_store_member(&self.config, at, identity.node, &identity.transport_security);
        let own = own.map_err(|e| e.to_string())?;
        match entry(&own) {
            // Started before.
            Some(_) => vacancy.note_vacancy(),
            None if !self.should_run_store_member(members, vacancy).await => return Ok(false),
            None => tracing::info!("store lacks a member; adding one on this node"),
        }
        let started = self
            .start_replacement_member(&ClusterIdentity { member: Some(own.clone()), ..identity })
            .await;
        if let Err(error) = &started
            && vacancy.has_timed_out()
        {
            // Remove a member that does not start, so that another node can run one.
            self.stop_store_member().await;
            let at = [at.ip()];
            let _ = node_membership::remove_member(&self.store, &own.name, &at).await;
            vacancy.abandon();
            return Err(error.to_string());
        }
        started.map_err(|error| error.to_string())
    }

    /// Whether the store lacks a member and this node should run it: the first running node without
    /// a member does, or a later one if those before it used up their turns.
    async fn should_run_store_member(
        &self,
        members: &[MemberInfo],
        vacancy: &mut StoreMemberVacancy,
    ) -> bool {
        let is_learner = members.iter().any(|member| member.is_learner);
        if is_learner || members.len() >= node_membership::MAX_STORE_MEMBERS {
            *vacancy = StoreMemberVacancy::default();
            return false;
        }
        let identity = self.identity();
        let cluster = node_membership::cluster_record(&self.store, identity.cluster).await;
        let (Ok(cluster), Ok((present, _))) = (cluster, nodes::list_readable(&self.store).await)
        else {
            return false;
        };
        let has_member = |node| members.iter().any(|m| m.name == store_member_name(node));
        let running = present.values().filter(|view| view.is_alive).map(|view| view.record.node);
        let before = running.filter(|node| *node < identity.node && !has_member(*node)).count();
        cluster.runs_own_store && vacancy.is_turn_after(before)
    }

    /// Starts the member in `next`, and writes it to the identity file once it has data.
    async fn start_replacement_member(
        &self,
        next: &ClusterIdentity,
    ) -> Result<bool, MembershipError> {
        let Some(own) = &next.member else { return Ok(false) };
        let all = node_membership::add_learner(&self.store, own).await?;
        fault_point::reach(FaultPoint::JoinStoreMemberAdded);
        self.start_store_member(next, InitialClusterState::Existing, all)?;
        let runs = lock(&self.supervisor)
            .as_ref()
            .is_some_and(|member| *member.state().borrow() == etcd_member::EtcdState::Running);
        if runs && self.data_dir.store_member_dir().join("member").exists() {
            self.update_identity(|identity| identity.member = Some(own.clone()))?;
        }
        Ok(true)
    }

    async fn stop_store_member(&self) {
        let supervisor = lock(&self.supervisor).take();
        if let Some(supervisor) = supervisor
            && !supervisor.stop(STORE_MEMBER_STOP_TIMEOUT).await
        {
            tracing::warn!("store member did not stop in time");
        }
    }

    /// Withdraws the node's alive key and stops the store member.
    pub async fn stop(&self) {
        lock(&self.alive_announcement).take();
        self.stop_store_member().await;
    }
}

/// Removes the report of this node's earlier run, which must not be taken for current.
///
/// # Errors
/// [`StoreError`].
async fn remove_report(meta: &dyn MetadataStore, node: NodeId) -> Result<(), StoreError> {
    let key = report_key(node);
    let Some(found) = meta.get(&key).await? else { return Ok(()) };
    let change =
        Change { key, precondition: Precondition::AtRevision(found.revision), value: None };
    meta.commit(vec![change]).await.map(drop)
}
