//! The control plane of a node: carries out what the API asks, and keeps what the node does equal
//! to what the store says.
//!
//! # Invariants
//! * The store decides. A change is in the store, durably, before it is acknowledged and before
//!   it takes effect; what the node does is derived from there by [`crate::reconcile`].
//! * Steps for one volume happen one at a time, under its gate; volumes do not wait for each other.
//! * A client that goes away does not stop what it has asked for.

mod admission;
mod beneath;
mod change;
mod chores;
mod clients;
mod clocks;
mod cluster;
mod copies;
mod copy_state;
mod create;
mod decide;
mod guard;
mod images;
mod isns;
mod join_call;
mod mapping;
mod members;
mod memory;
mod old_images;
mod own_files;
mod peers;
mod placement;
pub(crate) mod pool_view;
mod pools;
mod questions;
mod reach;
mod records;
mod recover;
mod removal;
mod repair;
mod report;
mod reservations;
mod rotate;
mod secrets;
mod space;
mod state;
mod status;
mod steps;
mod together;
mod view;
mod waits;
mod why;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use ::cluster::identity::Role;
use ::cluster::mirrors;
use api::{ApiError, Code, VolumeName};
use futures_util::StreamExt;
use peer::NodeId;
use target::guesses::Guesses;
use tokio::sync::{Mutex, RwLock, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

pub(crate) use self::cluster::{member_name, own_member};
use crate::config::{self, Config};
use crate::engine::{BackingError, Engine, PeerAddresses, Portals, Seat};
use crate::membership::Membership;
use crate::meta::{Meta, MetaError, Revision};
use crate::part::{Became, Part};
use crate::publish;
use crate::reconcile::Me;
use crate::record::description::{Description, Teller};
use crate::record::{self, FIRST_NODE, Stored, VOLUMES, VolumeRecord};
use own_files::OwnFiles;
pub use pool_view::PoolFacts;
pub use pools::PoolObserved;
pub(crate) use report::forget as forget_report;
pub use secrets::SecretsError;
use secrets::Vault;
pub(crate) use secrets::hand_over;
pub use space::{FileSystem, PoolSpace, Space};
use state::State;
pub use status::{Facts, assess};
use steps::Records;
pub use together::Together;
use waits::Waits;

/// How often broken volumes are tried again.
const RETRY: Duration = Duration::from_secs(30);

/// Volumes that are looked at together when all are: so many wait for the store or a disk at a time.
const AT_ONCE: usize = 64;

/// Pause before what a node waits for is tried again.
const PAUSE: Duration = Duration::from_millis(500);

/// Steps that one volume may take at once; more means that they lead nowhere.
const MAX_STEPS: usize = 32;

/// What to do about a store that is not trusted, or does not trust this node.
const DISTRUST: &str = "the members of the store show certificates of another authority than this node's. If its cluster \
    goes on in a new store, or without this node: `windrose cluster leave --force` here, then `windrose cluster join` \
    with a new token (`windrose cluster token` at a node of the cluster); images stay where they are. With certificates \
    of yours: cluster.tls_cert and those of the store's members have to be of the authority in cluster.tls_ca, valid \
    today, and name the addresses of their machines";

/// What to do about records that cannot be believed.
pub(crate) const RESTORE: &str = "restore the store from a backup: docs/guides/administration.md, section \
    \"When the store is damaged\"";

/// What the control plane needs to know of the configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the node.
    pub name: String,
    /// Its data directory.
    pub data_dir: PathBuf,
    /// What that is known by.
    pub directory: Uuid,
    /// Why nothing outside of it says that it is this node's, if nothing does.
    pub unanchored: Option<String>,
    /// Whether iSCSI logins are sent to nodes that serve a volume, from here where it is not.
    pub redirect: bool,
    /// The iSNS server to register with.
    pub isns: Option<String>,
    /// What names of new iSCSI targets begin with.
    pub iscsi_authority: String,
    /// What names of new NVMe subsystems begin with.
    pub nvme_authority: String,
    /// Most volumes.
    pub max_volumes: usize,
    /// Buffer memory of each core, in bytes.
    pub pool_bytes: u64,
    /// Free space below which the status warns, in percent of a file system; 0 for never.
    pub low_space_percent: u64,
    /// Where initiators are served.
    pub portals: Portals,
    /// Directory of the sockets of virtual machines.
    pub vhost_user: Option<PathBuf>,
    /// How it takes part in a cluster.
    pub cluster: config::Cluster,
    /// What no volume and no pool may lie on.
    own_files: OwnFiles,
}

impl Settings {
    /// Those of `config`, with the addresses that are listened at.
    #[must_use]
    pub fn new(config: &Config, portals: Portals) -> Self {
        Self {
            name: config.name.clone(),
            data_dir: config.data_dir.clone(),
            directory: Uuid::nil(),
            unanchored: None,
            redirect: config.iscsi.redirect,
            isns: config.iscsi.isns.clone(),
            iscsi_authority: config.iscsi.authority.clone(),
            nvme_authority: config.nvme.authority.clone(),
            max_volumes: config.limits.volumes,
            pool_bytes: config.cores.pool_bytes,
            low_space_percent: config.disks.low_space_percent,
            portals,
            vhost_user: config.vhost_user.directory.clone(),
            cluster: config.cluster.clone(),
            own_files: OwnFiles::of(config),
        }
    }
}

/// The control plane. Cheap to clone.
#[derive(Clone)]
pub struct Control(Arc<Inner>);

struct Inner {
    settings: Settings,
    meta: Arc<dyn Meta>,
    engine: Engine,
    state: State,
    /// Its pools of disks.
    pools: pools::Pools,
    /// Clients of the API that have no token, and of the port of joins.
    guesses: Arc<std::sync::Mutex<Guesses>>,
    /// Why nodes cannot join here, if they cannot.
    joins_trouble: std::sync::Mutex<Option<String>>,
    /// What the secrets in the store are sealed by.
    vault: Vault,
    /// What an iSNS server has of this node.
    registered: std::sync::Mutex<Option<isns::Registered>>,
    /// The node's part in a cluster; `None` if it is alone.
    part: Option<Arc<Part>>,
    /// What the node is in its cluster, once it is a member.
    membership: OnceLock<Membership>,
    /// What a start waits for, if anything.
    waits_for: std::sync::Mutex<Option<Waits>>,
    /// Whether the node's inside is to begin again.
    restart: watch::Sender<bool>,
    /// Held for reading while a volume is created, for writing while the node becomes one of a cluster.
    creating: Arc<RwLock<()>>,
    /// Held while the catalog is made and handed to the cores; counts the catalogs.
    publishing: Mutex<u64>,
    /// Held for reading by every change, for writing once there shall be no more.
    changing: Arc<RwLock<()>>,
    /// The last question to this node that it has heard of, [`questions`].
    asked: watch::Sender<u64>,
    /// What other nodes have told of themselves, as it was read last, with the commits that wrote it.
    reports: std::sync::Mutex<BTreeMap<NodeId, (Revision, report::NodeReport)>>,
    /// What becomes of copies that volumes lack which are led from here.
    missing: std::sync::Mutex<BTreeMap<Uuid, report::MissingCopy>>,
    /// Other nodes that have answered this one.
    answered: std::sync::Mutex<BTreeSet<NodeId>>,
    /// Images here that are not served.
    images: std::sync::Mutex<images::Images>,
    /// What runs beside the API.
    tasks: std::sync::Mutex<JoinSet<()>>,
    /// What keeps a member's knowledge of its cluster current: the engine stops before it does.
    beneath: std::sync::Mutex<JoinSet<()>>,
    started: Instant,
    /// Tells this life of the node from others.
    life: Uuid,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("settings", &self.0.settings).finish_non_exhaustive()
    }
}

impl Control {
    /// The control plane over a store and a data plane. Does nothing until [`Self::start`].
    #[must_use]
    pub fn new(settings: Settings, meta: Arc<dyn Meta>, engine: Engine) -> Self {
        Self::over(settings, meta, engine, None)
    }

    /// The control plane of a node that is or becomes part of a cluster.
    #[must_use]
    pub(crate) fn of_cluster(settings: Settings, engine: Engine, part: Part) -> Self {
        let store = Arc::new(part.store().clone());
        Self::over(settings, store, engine, Some(Arc::new(part)))
    }

    /// Clients of the API that have no token.
    pub(crate) fn guesses(&self) -> Arc<std::sync::Mutex<Guesses>> {
        Arc::clone(&self.0.guesses)
    }

    fn over(
        settings: Settings,
        meta: Arc<dyn Meta>,
        engine: Engine,
        part: Option<Arc<Part>>,
    ) -> Self {
        let identity = part.as_ref().map(|part| part.follow_identity());
        let vault = Vault::new(&settings.data_dir, identity);
        let pools = pools::Pools::of(&settings.data_dir);
        Self(Arc::new(Inner {
            vault,
            registered: std::sync::Mutex::default(),
            settings,
            meta,
            engine,
            state: State::default(),
            pools,
            guesses: Arc::default(),
            joins_trouble: std::sync::Mutex::default(),
            part,
            membership: OnceLock::new(),
            waits_for: std::sync::Mutex::default(),
            restart: watch::Sender::new(false),
            creating: Arc::default(),
            publishing: Mutex::new(0),
            changing: Arc::default(),
            asked: watch::Sender::new(0),
            reports: std::sync::Mutex::default(),
            missing: std::sync::Mutex::default(),
            answered: std::sync::Mutex::default(),
            images: std::sync::Mutex::default(),
            tasks: std::sync::Mutex::default(),
            beneath: std::sync::Mutex::default(),
            started: Instant::now(),
            life: Uuid::new_v4(),
        }))
    }

    /// The data plane.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.0.engine
    }

    /// What the node is in its cluster; `None` for one that is alone, or not a member yet. It is
    /// there before any volume is opened.
    #[must_use]
    pub fn membership(&self) -> Option<&Membership> {
        self.0.membership.get()
    }

    /// Waits until the node's inside is to begin again: it is to be something else in a cluster.
    pub async fn wants_restart(&self) {
        // The sender is this node's own; without it there is nothing to wait for.
        let _ = self.0.restart.subscribe().wait_for(|wanted| *wanted).await;
    }

    /// Opens and exports what the store says, takes back or finishes what a crash has left half
    /// done, and accepts initiators. Volumes that cannot be opened stay offline; [`Self::status`]
    /// tells. In a cluster all of that happens beside the API, as soon as the store answers.
    ///
    /// # Errors
    /// [`MetaError`] when the own store cannot be read.
    pub async fn start(&self) -> Result<(), MetaError> {
        match self.0.part.clone() {
            None => {
                self.open_pools().await;
                self.spawn(self.clone().follow_pools());
                self.serve().await
            }
            Some(part) => {
                self.spawn(self.clone().take_part(part));
                Ok(())
            }
        }
    }

    /// Waits until another process is this node; gives that one and this, for people.
    pub async fn replaced(&self) -> (String, String) {
        match &self.0.part {
            Some(part) => {
                let (other, own) = part.replaced().await;
                (other.place(), own.place())
            }
            None => std::future::pending().await,
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(task);
    }

    /// Has the data plane meet the other nodes. A witness has nothing to meet them for.
    async fn take_seat(&self, membership: &Membership) -> Result<(), String> {
        if membership.role == Role::Witness {
            return Ok(());
        }
        let config::Cluster { listen, heartbeat, resyncs, .. } = &self.0.settings.cluster;
        let at = PeerAddresses { data: listen.clone(), heartbeat: heartbeat.clone() };
        let seat = Seat::of(membership, at, *resyncs).map_err(|e| e.to_string())?;
        self.0.engine.enter(seat).await.map(drop).map_err(|e| e.to_string())
    }

    async fn serve(&self) -> Result<(), MetaError> {
        let revision = self.settle_all().await?;
        self.0.state.set_serving(true);
        self.0.engine.accept().await;
        self.wait_for(None);
        let Settings { name, portals, .. } = &self.0.settings;
        let (cores, disks) = (self.0.engine.cores(), self.0.engine.disk_backend());
        let took_ms = u64::try_from(self.0.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(
            name, cores, disks, took_ms,
            iscsi = ?portals.iscsi, nvme = ?portals.nvme, discovery = ?portals.discovery,
            "serving"
        );
        self.spawn(self.clone().follow(VOLUMES, record::volume_of_key, revision));
        if let Some(membership) = self.membership() {
            let nodes = membership.nodes.clone();
            self.spawn(self.clone().follow(mirrors::PREFIX, mirrors::volume_of_key, revision));
            self.spawn(self.clone().follow_nodes(nodes));
            self.spawn(self.clone().hear_questions());
            self.spawn(self.clone().do_chores());
            self.spawn(self.clone().serve_joins());
            self.spawn(self.clone().clean_up_admission());
        }
        self.spawn(self.clone().follow_images());
        self.spawn(self.clone().retry());
        self.spawn(self.clone().keep_sealed());
        if let Some(server) = self.0.settings.isns.clone() {
            self.spawn(self.clone().keep_registered(server));
        }
        self.spawn(self.clone().follow_space());
        Ok(())
    }

    /// Becomes what the node is to be in the cluster, and serves.
    async fn take_part(self, part: Arc<Part>) {
        self.0.engine.expect_peers().await;
        self.open_pools().await;
        self.spawn(self.clone().follow_pools());
        let became = loop {
            match part.advance().await {
                Ok(became) => break became,
                Err(error) => {
                    let (what, identity) = (part.explain(&error), part.identity());
                    let name = &self.0.settings.name;
                    self.wait_for(Some(Waits::after(&error, what, &identity, name)));
                }
            }
            tokio::time::sleep(PAUSE).await;
        };
        let mut tasks = match became {
            Became::Member(membership, tasks) => {
                while let Err(why) = self.take_seat(&membership).await {
                    self.wait_for(Some(Waits::by_itself(why)));
                    tokio::time::sleep(PAUSE).await;
                }
                let _ = self.0.membership.set(*membership);
                tasks
            }
            Became::Alone => {
                self.0.restart.send_replace(true);
                return;
            }
        };
        tasks.spawn(Arc::clone(&part).follow_health());
        tasks.spawn(Arc::clone(&part).follow_rotation());
        if part.own_members() {
            tasks.spawn(Arc::clone(&part).follow_members());
        }
        *self.0.beneath.lock().unwrap_or_else(PoisonError::into_inner) = tasks;
        while let Err(error) = self.serve().await {
            self.wait_for(Some(Waits::for_store(&error)));
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Says what a start waits for; logs what is new.
    fn wait_for(&self, new: Option<Waits>) {
        let mut waits = self.0.waits_for.lock().unwrap_or_else(PoisonError::into_inner);
        if *waits != new {
            if let Some(Waits { what, next, .. }) = &new {
                tracing::info!(what, next, "the node is not part of its cluster yet");
            }
            *waits = new;
        }
    }

    fn waiting(&self) -> Option<Waits> {
        self.0.waits_for.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn waits_for(&self) -> Option<String> {
        self.waiting().map(|waits| waits.what)
    }

    /// Refuses changes from here on, and waits for those that have begun.
    pub async fn stop(&self) {
        self.0.state.set_serving(false);
        let _none = self.0.changing.write().await;
        let mut tasks = {
            let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *tasks)
        };
        tasks.shutdown().await;
        self.take_registration_back().await;
    }

    /// Takes leave of the store, once the engine needs it no more: it leaves mirrors by their records.
    pub async fn end(&self) {
        let mut beneath =
            std::mem::take(&mut *self.0.beneath.lock().unwrap_or_else(PoisonError::into_inner));
        beneath.shutdown().await;
        if let Some(part) = &self.0.part {
            part.stop().await;
        }
    }

    /// This node.
    fn me(&self) -> NodeId {
        self.membership().map_or(FIRST_NODE, |m| m.node)
    }

    /// This life of this node.
    fn life(&self) -> Me {
        Me { node: self.me(), life: self.0.life }
    }

    /// Whether volumes are open and initiators accepted.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.0.state.is_serving()
    }

    /// Settles every volume that the store or the node knows; gives the revision it began at.
    async fn settle_all(&self) -> Result<Revision, MetaError> {
        let (entries, revision) = self.0.meta.list("").await?;
        let records::Audit { volumes, mut mirrors, lost_mirrors, damaged } =
            records::audit(&entries);
        let mut listed = BTreeMap::new();
        volumes.iter().for_each(|stored| self.0.state.learn(stored.clone()));
        self.0.state.set_read();
        for stored in volumes {
            let id = stored.record.id;
            // Nothing is made or erased by what a list has shown: it may be over.
            if stored.record.is_settled(self.me()) && !lost_mirrors.contains(&id) {
                let mirror = mirrors.remove(&id).filter(|_| self.membership().is_some());
                listed.insert(id, Records { stored: Some(stored), mirror });
            }
        }
        let before = self.0.state.damaged();
        for damage in damaged.iter().filter(|damage| !before.contains(damage)) {
            tracing::error!(
                damage,
                "the store cannot be believed; what this is the record of is left alone"
            );
        }
        self.0.state.set_damaged(damaged);
        let known = self.0.state.ids().into_iter().map(|id| (id, listed.remove(&id)));
        let known: Vec<_> = known.collect();
        futures_util::stream::iter(known)
            .for_each_concurrent(AT_ONCE, |(id, records)| async move {
                match records {
                    Some(records) => self.settle_by(id, records).await,
                    None => self.settle(id).await,
                }
            })
            .await;
        Ok(revision)
    }

    /// Follows changes of the records under `prefix`, whoever makes them.
    async fn follow(self, prefix: &str, of: fn(&str) -> Option<Uuid>, mut from: Revision) {
        loop {
            let mut watch = self.0.meta.watch(prefix, from);
            loop {
                match watch.next().await {
                    Ok(event) => {
                        from = event.revision;
                        if let Some(id) = of(&event.key) {
                            self.0.state.told(id);
                            self.settle_later(id);
                        }
                    }
                    Err(MetaError::Compacted { .. }) => break,
                    Err(error) => {
                        tracing::debug!(%error, "changes of the store are followed no longer");
                        return;
                    }
                }
            }
            match self.settle_all().await {
                Ok(revision) => from = revision,
                Err(error) => {
                    tracing::error!(%error, "the store cannot be listed; trying again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    /// Settles a volume without making others wait for it.
    fn settle_later(&self, id: Uuid) {
        if let Ok(change) = Arc::clone(&self.0.changing).try_read_owned() {
            // Changes that come while one waits for its turn are looked at together.
            if !self.0.state.enqueue(id) {
                return;
            }
            let control = self.clone();
            tokio::spawn(async move {
                let gate = control.0.state.gate(id);
                let held = gate.lock().await;
                control.0.state.dequeue(id);
                control.settle_held(id).await;
                drop(held);
                drop(change);
            });
        }
    }

    /// Tries broken volumes again, for as long as the node serves.
    async fn retry(self) {
        loop {
            tokio::time::sleep(RETRY).await;
            if !self.is_serving() {
                return;
            }
            if self.membership().is_some()
                && let Err(error) = self.settle_all().await
            {
                tracing::debug!(%error, "the store cannot be listed; trying again");
            }
            for id in self.0.state.broken() {
                let gate = self.0.state.gate(id);
                let _held = gate.lock().await;
                self.0.state.forget_failure(id);
                self.settle_held(id).await;
            }
        }
    }

    /// Has a volume served by its records as they are now. One catalog serves all who wait.
    async fn publish(&self, stored: Option<&Stored>) {
        let Some(Stored { record, revision }) = stored else { return };
        self.meet(record).await;
        if record.prefer.is_some_and(|node| node != self.me()) {
            self.choose_leaders().await;
        }
        // Before initiators come: else what they are told of the unit changes under them.
        self.tell_space_of(record.id).await;
        self.describe(record).await;
        self.0.state.meets(record.id, *revision);
        let mut generation = self.0.publishing.lock().await;
        if !self.0.state.is_published(record.id) {
            *generation += 1;
            self.push(*generation).await;
        }
    }

    /// Has the image here tell of its volume.
    async fn describe(&self, record: &VolumeRecord) {
        let text = {
            let cluster = self.membership().map(|m| m.cluster);
            let teller = Teller { node: self.me(), cluster, names: &|node| self.node_name(node) };
            Description::of(record, teller).to_text()
        };
        if let Err(error) = self.0.engine.describe(record.id, text).await {
            tracing::debug!(volume = %record.name, %error, "its image is not told of it now");
        }
    }

    async fn push_catalog(&self) {
        let mut generation = self.0.publishing.lock().await;
        *generation += 1;
        self.push(*generation).await;
    }

    /// Has initiators hear what has become of a volume that is not open.
    async fn tell_where(&self, id: Uuid) {
        if !self.0.state.is_told(id, self.me()) {
            let mut generation = self.0.publishing.lock().await;
            if !self.0.state.is_told(id, self.me()) {
                *generation += 1;
                self.push(*generation).await;
            }
        }
    }

    async fn push(&self, generation: u64) {
        let all = self.0.state.listed(self.me());
        let portals = &self.0.settings.portals;
        let listed = all.iter().map(|l| (&l.stored.record, l.here));
        let ring = self.keys_for(all.iter().map(|l| &l.stored.record)).await;
        let mut catalog =
            publish::catalog(listed, &ring, &portals.iscsi, &portals.nvme, generation);
        catalog.redirect = self.0.settings.redirect;
        catalog.is_incomplete = !self.0.state.damaged().is_empty();
        if let Some(membership) = self.membership() {
            // Orders that are older than a lease are refused by whoever orders (RFD 0010, 4.6).
            let lease_ms = self.0.settings.cluster.lease.as_millis();
            catalog.quiesce_ms = u16::try_from(lease_ms).unwrap_or(u16::MAX);
            let mirrors = all.iter().map(|l| (&l.stored.record, l.mirror.as_ref().map(|m| &m.0)));
            let nodes = membership.nodes.borrow();
            publish::share(&mut catalog, membership.node, &nodes, mirrors);
        }
        let exported = all.iter().map(|l| &l.stored.record).filter(|r| r.protocols.vhost_user);
        let exported = exported.map(|r| (r.id, r.name.clone())).collect();
        self.0.engine.publish(catalog, exported).await;
        self.0.state.published(&all);
    }

    /// The identity of the volume called `name`.
    fn find(&self, name: &VolumeName) -> Result<Uuid, ApiError> {
        self.0.state.find(name).ok_or_else(|| {
            if !self.0.state.has_read() {
                let message = format!("whether there is a volume {name} is not known yet");
                let why = self.waiting().map_or_else(
                    || "the node is starting: try again in a moment".to_owned(),
                    |Waits { what, next, .. }| {
                        format!("this node waits for its cluster: {what}. What helps: {next}")
                    },
                );
                return ApiError::new(Code::Unavailable, message).hint(why);
            }
            ApiError::new(Code::NotFound, format!("there is no volume {name}"))
                .hint("`windrose volume list` shows what there is")
        })
    }

    /// Runs a change to its end, even if whoever asked goes away.
    async fn detached<T, F>(&self, change: F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>> + Send + 'static,
        T: Send + 'static,
    {
        let permit = Arc::clone(&self.0.changing).try_read_owned();
        let Some(permit) = permit.ok().filter(|_| self.is_serving()) else {
            return Err(self.not_serving());
        };
        let change = async move {
            let answer = change.await;
            drop(permit);
            answer
        };
        tokio::spawn(change).await.unwrap_or_else(|e| {
            tracing::error!(error = %e, "a change panicked");
            Err(ApiError::new(Code::Internal, "the node failed; its log says more"))
        })
    }
}

/// A store that does not work, as the API tells it.
fn store_error(e: &MetaError) -> ApiError {
    match e {
        MetaError::Changed { .. } => {
            ApiError::new(Code::Conflict, "the volume was changed at the same time")
                .hint("look at it and try again")
        }
        MetaError::Unreachable { .. } => ApiError::new(Code::Unavailable, e.to_string())
            .hint("nothing was changed; try again when the store answers"),
        MetaError::Untrusted { .. } => {
            let hint = format!("nothing was changed; {DISTRUST}");
            ApiError::new(Code::Unavailable, e.to_string()).hint(hint)
        }
        MetaError::Unknown { .. } => ApiError::new(Code::Unavailable, e.to_string())
            .hint("look whether it was done before you try again"),
        MetaError::Damaged { .. } => {
            tracing::error!(error = %e, "the store cannot be believed");
            ApiError::new(Code::Internal, e.to_string()).hint(RESTORE)
        }
        MetaError::Compacted { .. } | MetaError::Format { .. } | MetaError::Failed { .. } => {
            tracing::error!(error = %e, "the store failed");
            ApiError::new(Code::Internal, e.to_string())
                .hint("see the node's log; the data directory may be full or read-only")
        }
    }
}

/// A backing that does not work, as the API tells it.
fn backing_error(name: &VolumeName, e: &BackingError) -> ApiError {
    let error = ApiError::new(e.code(), format!("volume {name}: {e}"));
    match e.hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_is_not_trusted_is_not_waited_for() {
        let (store, why) = ("etcd".to_owned(), "invalid peer certificate: Expired".to_owned());
        let away = MetaError::Unreachable { store: store.clone(), why: why.clone() };
        let hint = |e: &MetaError| store_error(e).hint.unwrap_or_default();
        assert!(hint(&away).contains("when the store answers"), "{}", hint(&away));
        let bad = MetaError::Untrusted { store, why };
        assert!(hint(&bad).contains("cluster.tls_ca") && !hint(&bad).contains("try again"));
        assert!(store_error(&bad).message.contains("Expired"));
    }
}
