//! A mirrored volume on its core: image, intent log, mirror, the sessions with the other replicas,
//! and what initiators are told of all that.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{AccessState, Dev, Epoch};
use image::File;
use intent_log::{Damage, Found, IntentLog, LogError};
use mirror::member::Why;
use mirror::record::Record;
use mirror::{Mirror, Parts, Status, Verified};
use peer::{Endpoint, Greeting, NodeId, PeerAddresses};
use rt::Core;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use uuid::Uuid;
use volume::{Gate, Standing, Volume};

use super::access::{Idle, access};
use super::backing::{BackingError, Ground};
use super::distrust::Distrust;
use super::report::MirrorReport;
use super::seat::Seat;

/// How long a mirror may wait for its memory when it is opened.
const MEMORY: Duration = Duration::from_secs(5);

/// How long the commands of a volume that is closed may take, and so may its sessions and its log: a
/// disk that answers nothing any more holds up nobody.
const CLOSING: Duration = Duration::from_secs(5);

/// How long a change of the record may take that somebody waits for, beyond the grace time.
const CHANGE: Duration = Duration::from_secs(5);

/// How long after an attempt to note that an image has lost its disk there is another.
const AGAIN: Duration = Duration::from_secs(10);

/// How often the access state is looked at while the mirror does not serve, and time may decide.
const LOOK_CLOSELY: Duration = Duration::from_millis(100);

/// How often while initiators have been told to go elsewhere.
const LOOK: Duration = Duration::from_secs(1);

/// How often while it serves: whatever ends that, a lease that lapses as well, is told.
const LOOK_SELDOM: Duration = Duration::from_secs(60);

/// An open mirrored volume.
pub(super) struct Mirrored {
    me: NodeId,
    grace: Duration,
    mirror: Mirror,
    /// What judges its commands by reservations.
    gate: Rc<Gate>,
    endpoint: Endpoint<Mirror>,
    access: AccessState,
    peers: tokio::sync::Mutex<BTreeMap<NodeId, PeerAddresses>>,
    /// Where it is noted if the image has lost its disk: who opens it next must know.
    distrust: Distrust,
    image: Uuid,
    telling: RefCell<Option<JoinHandle<()>>>,
}

/// Makes the intent log of an image that has none.
pub(super) async fn make_log(core: &Core, file: &Rc<File>) -> Result<(), BackingError> {
    let refused = |e: LogError| bad_log(file, &e);
    let log = IntentLog::create(core, file.log_area().await?).await.map_err(refused)?;
    log.close().await.map_err(|_| bad_log(file, &LogError::Gone))
}

/// Opens the intent log of an image; one that was made before it was in a cluster gets one now.
async fn open_log(
    core: &Core,
    distrust: &Distrust,
    file: &Rc<File>,
) -> Result<(IntentLog, Found), BackingError> {
    if !file.label().intent_log {
        make_log(core, file).await?;
    }
    let (path, image) = (file.path().display(), file.label().image);
    let area = file.log_area().await?;
    let distrusted = distrust.has(image).await;
    let boot = if distrusted { Uuid::nil() } else { area.boot(core) };
    let opened = IntentLog::open(core, area, boot).await;
    let (log, found) = opened.map_err(|e| bad_log(file, &e))?;
    if distrusted {
        tracing::warn!(%path, "its disk may have lost what it had completed");
        if let Err(error) = distrust.forget(image).await {
            tracing::warn!(%path, %error, "it stays noted that its disk may have lost something");
        }
    }
    match found.damage {
        Damage::None => {}
        Damage::Cells(cells) => {
            tracing::warn!(%path, cells, "parts of the intent log were damaged: more is copied");
        }
        Damage::Lost => {
            tracing::error!(%path, "the intent log was lost: it is made anew, all is copied");
        }
    }
    Ok((log, found))
}

fn bad_log(file: &File, e: &LogError) -> BackingError {
    match e {
        LogError::Gone => BackingError::lost(file.path(), e),
        _ => BackingError::refused(format!("{}: {e}", file.path().display())),
    }
}

impl Mirrored {
    /// Opens the replica of `volume` in `file`. Does not wait until it serves.
    pub(super) async fn open(
        core: &Core,
        seat: &Seat,
        distrust: &Distrust,
        volume: Uuid,
        (file, ground): (&Rc<File>, &Ground<'_>),
    ) -> Result<Self, BackingError> {
        let (log, found) = open_log(core, distrust, file).await?;
        let gate = Rc::new(Gate::default());
        let parts = Parts {
            node: seat.node,
            core: core.clone(),
            account: core.pool().account(),
            leg: Dev::shared(Rc::clone(file)),
            log,
            found,
            keeper: Rc::clone(&gate) as Rc<dyn block::Aside>,
            free_space: ground.free_space(core),
            records: seat.mirrors.of(volume),
            settings: seat.settings,
            turns: Arc::clone(&seat.turns),
        };
        let opened = timeout(MEMORY, Mirror::open(parts)).await;
        let mirror = opened.ok().and_then(Result::ok).ok_or_else(|| {
            let least = core.pool().least_mib_for(0, true);
            BackingError::refused(format!(
                "pools of disks hold the buffer memory that mirrored volumes need on this core: set \
                 cores.pool to \"{least}MiB\" or more in the configuration, and restart the node"
            ))
        })?;
        let handler = Rc::new(mirror.clone());
        let endpoint = Endpoint::new(core.clone(), seat.identity(volume), handler);
        mirror.set_paths(endpoint.paths_for_handler());
        let state = AccessState::new(block::Access::Transitioning);
        let telling = tell_access(mirror.clone(), seat.node, state.clone(), Rc::clone(&gate));
        let (distrust, image) = (distrust.clone(), file.label().image);
        let noting = note_loss(mirror.clone(), distrust.clone(), image);
        let telling = async move {
            tokio::join!(telling, noting);
        };
        Ok(Self {
            me: seat.node,
            grace: seat.settings.member.grace(),
            mirror,
            gate,
            endpoint,
            access: state,
            peers: tokio::sync::Mutex::default(),
            distrust,
            image,
            telling: RefCell::new(Some(tokio::task::spawn_local(telling))),
        })
    }

    /// What owns its commands.
    pub(super) fn volume(&self, core: &Core) -> Rc<Volume> {
        let compares = Rc::new(self.mirror.clone());
        let volume = Volume::shared(Dev::new(self.mirror.clone()), compares, Epoch::default());
        let (mirror, me) = (self.mirror.clone(), self.me);
        let record = move || mirror.status().record;
        self.gate.set_source(Box::new(move || record().map(|record| standing(&record, me))));
        volume.keep_reservations(Rc::clone(&self.gate), core.pool().account());
        volume
    }

    /// How it is to be used through this node.
    pub(super) fn access(&self) -> AccessState {
        self.access.clone()
    }

    /// Takes over a connection of another node.
    pub(super) fn accept(&self, greeting: Greeting) {
        self.endpoint.accept(greeting);
    }

    /// From now on these are the nodes with the other replicas.
    pub(super) async fn set_peers(&self, peers: BTreeMap<NodeId, PeerAddresses>) {
        let mut known = self.peers.lock().await;
        let gone =
            |(node, at): (&NodeId, &PeerAddresses)| (peers.get(node) != Some(at)).then_some(*node);
        let gone: Vec<_> = known.iter().filter_map(gone).collect();
        for node in gone {
            self.endpoint.remove(node).await;
            known.remove(&node);
        }
        for (node, at) in peers {
            if node != self.me && !known.contains_key(&node) {
                self.endpoint.add(node, at.clone());
                known.insert(node, at);
            }
        }
    }

    /// Waits until it serves with so many copies in sync, or for so long. Says whether it does.
    pub(super) async fn serves_with(&self, copies: usize, limit: Duration) -> bool {
        let serves = || {
            let status = self.mirror.status();
            status.why.is_none() && status.record.is_some_and(|r| r.in_sync.len() == copies)
        };
        let served = async {
            while !serves() {
                self.mirror.changed().await;
            }
        };
        timeout(limit, served).await.is_ok()
    }

    /// What it says of itself.
    pub(super) fn report(&self) -> MirrorReport {
        MirrorReport { status: self.mirror.status(), access: self.access.get() }
    }

    /// Leaves the volume to the others, and stays out until [`Self::rejoin`]. Says whether it is
    /// out: it is not if nobody else is in sync and there to take over.
    pub(super) async fn leave(&self) -> bool {
        self.mirror.set_may_join(false);
        let status = self.mirror.status();
        if let Some(record) = &status.record
            && record.others(self.me).next().is_none()
        {
            return record.member(self.me).is_none();
        }
        self.mirror.leave();
        // Those that do not answer are excluded first.
        timeout(self.grace * 2 + CHANGE, self.mirror.has_left()).await.unwrap_or(false)
    }

    /// Is brought in sync again whenever it is outside.
    pub(super) fn rejoin(&self) {
        self.mirror.set_may_join(true);
    }

    /// Makes the replica on `node` the primary.
    pub(super) async fn switch_to(&self, node: NodeId) -> Result<(), BackingError> {
        let leads =
            |status: &Status, node| status.record.as_ref().is_some_and(|r| r.primary == node);
        if leads(&self.mirror.status(), node) {
            return Ok(());
        }
        self.leads().await?;
        self.mirror.switch_to(node);
        let switched = async {
            while !leads(&self.mirror.status(), node) {
                self.mirror.changed().await;
            }
        };
        let refused = || {
            let why = "it is not in sync, not reached, or a change of another kind is under way";
            BackingError::refused(format!("node {node} has not taken over: {why}"))
        };
        timeout(CHANGE, switched).await.map_err(|_| refused())
    }

    /// Goes on alone, whatever may be lost.
    pub(super) fn force(&self) {
        self.mirror.force();
    }

    /// Compares all replicas; where they differ, writes the contents of the one on node `keep` to all, if that is
    /// named.
    pub(super) async fn verify(&self, keep: Option<NodeId>) -> Result<Verified, BackingError> {
        self.leads().await?;
        let record = self.mirror.status().record;
        let in_sync = |node| record.as_ref().is_some_and(|r| r.member(node).is_some());
        if let Some(node) = keep.filter(|node| !in_sync(*node)) {
            return Err(BackingError::refused(format!("the copy on node {node} is not in sync")));
        }
        let ended = |_| BackingError::refused("the configuration has changed meanwhile");
        let found = self.mirror.verify(keep).await.map_err(ended)?;
        match found.nodes.len() {
            // It was the last one by then.
            1 => Err(BackingError::refused("nothing was compared: only one copy is in sync")),
            _ => Ok(found),
        }
    }

    /// Waits until this is the primary and serves: a new view passes by itself.
    async fn leads(&self) -> Result<(), BackingError> {
        let decided = async {
            loop {
                let status = self.mirror.status();
                match status.record.map(|r| r.primary) {
                    Some(node) if node != self.me => return Some(node),
                    Some(_) if status.why.is_none() => return None,
                    _ => self.mirror.changed().await,
                }
            }
        };
        match timeout(CHANGE, decided).await {
            Ok(None) => Ok(()),
            Ok(Some(node)) => {
                Err(BackingError::refused(format!("node {node} is its primary: ask there")))
            }
            Err(_) => Err(BackingError::refused("the volume is not served here now")),
        }
    }

    /// Ends the commands of its volume, which is told to initiators no more.
    ///
    /// # Errors
    /// What the last flush reports; or that the disk does not answer.
    pub(super) async fn close_volume(
        &self,
        volume: &Rc<Volume>,
        core: &Core,
    ) -> Result<(), String> {
        let account = core.pool().account();
        match self.in_time(volume.close(&account)).await {
            None => Err("a disk does not answer".to_owned()),
            Some(Err(_)) if self.has_nothing() => Ok(()),
            Some(ended) => ended.map_err(|e| e.to_string()),
        }
    }

    /// What comes of something that waits for commands. If that takes too long, these end as those of clients that are
    /// turned away; nothing comes of it if they do not end either.
    pub(super) async fn in_time<T>(&self, ending: impl Future<Output = T>) -> Option<T> {
        let mut ending = std::pin::pin!(ending);
        match timeout(CLOSING, &mut ending).await {
            Ok(ended) => Some(ended),
            Err(_) => {
                self.mirror.set_holds(false);
                timeout(CLOSING, ending).await.ok()
            }
        }
    }

    /// Whether nothing that was answered here has to be made durable here: the others have it all, or
    /// nothing has been answered yet.
    fn has_nothing(&self) -> bool {
        let Status { why, lost, record, .. } = self.mirror.status();
        let is_out = record.is_some_and(|record| record.member(self.me).is_none());
        if lost.is_some() && is_out {
            return true;
        }
        why.is_some_and(|why| {
            matches!(
                why,
                Why::Outside(_)
                    | Why::Returned(_)
                    | Why::Blackout(_)
                    | Why::SetBack { .. }
                    | Why::Mute(_)
                    | Why::Leads(_)
                    | Why::Unread { .. }
            )
        })
    }

    /// Ends its sessions and the mirror.
    pub(super) async fn close(&self) {
        if let Some(telling) = self.telling.take() {
            telling.abort();
        }
        self.access.set(block::Access::Unavailable);
        let parts = async {
            self.endpoint.stop().await;
            self.mirror.close().await
        };
        let kept = timeout(CLOSING, parts).await.unwrap_or_else(|_| {
            tracing::error!("a mirror is not closed in order: its disk does not answer");
            false
        });
        if !kept {
            self.distrust.note(self.image).await;
        }
    }
}

/// Waits until the leg of `mirror`, which is `image`, is lost, and notes it, however long that takes.
async fn note_loss(mirror: Mirror, distrust: Distrust, image: Uuid) {
    while !mirror.is_lost() {
        mirror.changed().await;
    }
    while !distrust.note(image).await {
        tokio::time::sleep(AGAIN).await;
    }
}

/// What of its reservations holds, by this record.
fn standing(record: &Record, me: NodeId) -> Standing {
    let seats = record.in_sync.iter().map(|m| m.incarnation.0).collect();
    let seat = record.member(me).map_or(0, |m| m.incarnation.0);
    Standing { era: record.born.0, seat, seats }
}

/// Tells how the volume is to be used through node `me`, for as long as the mirror lives.
async fn tell_access(mirror: Mirror, me: NodeId, state: AccessState, gate: Rc<Gate>) {
    let (mut served, mut has_served) = (Instant::now(), false);
    loop {
        let status = mirror.status();
        if status.why.is_none() {
            if !has_served {
                // What cannot be read is to be known before an initiator comes.
                gate.look();
            }
            (served, has_served) = (Instant::now(), true);
        }
        let idle = status.why.as_ref().map(|why| Idle {
            why,
            since: served.elapsed(),
            has_served,
            unanswered: status.unanswered,
        });
        let now = access(me, idle);
        if let Some(record) = &status.record {
            gate.set_standing(standing(record, me));
        }
        // Told before commands end, so that what they end with sends initiators elsewhere.
        state.set(now);
        mirror.set_holds(now != block::Access::Unavailable);
        let soon = match now {
            _ if status.why.is_none() => LOOK_SELDOM,
            block::Access::Unavailable => LOOK,
            _ => LOOK_CLOSELY,
        };
        // Out of time is as good as a change.
        let _ = timeout(soon, mirror.changed()).await;
    }
}
