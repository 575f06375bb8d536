//! Process incarnations: which process is a node. It is the one whose incarnation is registered in
//! the store, and no other.
//!
//! | key | holds | written by |
//! |---|---|---|
//! | `lives/ID` | [`RegisteredIncarnation`], with its last answered challenge | the node |
//! | `challenges/ID` | [`ProcessIncarnation`] of the challenger | the challenger |
//!
//! A process draws a random incarnation at its start, and replaces the last one by compare-and-swap
//! before it does anything else in the cluster ([`claim`]). It may do so at once if the last
//! incarnation is certainly dead: both held the same lock of the same file in the same boot of the
//! same machine. Otherwise it writes a challenge: a live incarnation answers within moments, and
//! then the challenger is a copy of the node. Silence for [`CHALLENGE_TIMEOUT`] proves the other
//! dead, or for [`CHALLENGE_TIMEOUT_NOT_ALIVE`] if its liveness key is absent, expired or not yet
//! written. A process that was cut off from the store finds another incarnation registered when it
//! is back ([`answer_challenges`]), and stops.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::{Either, select};
use peer::NodeId;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::time::{Instant, sleep, timeout_at};
use uuid::Uuid;

use crate::nodes;
use crate::store::{Change, Entry, MetadataStore, Precondition, Revision, StoreError};

/// Prefix of the keys of registered incarnations.
pub const INCARNATION_KEY_PREFIX: &str = "lives/";

/// Prefix of the keys of challenges.
pub const CHALLENGE_KEY_PREFIX: &str = "challenges/";

/// How long a live incarnation may take to answer: within it, a watch finds another store member.
pub const CHALLENGE_TIMEOUT: Duration = Duration::from_secs(4);

/// The same if its liveness key is absent. It may have registered just now.
pub const CHALLENGE_TIMEOUT_NOT_ALIVE: Duration = Duration::from_secs(1);

/// Longest time between two reads, in case a watch missed a change.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Pause before a failed store call is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// One run of a node's process, from start to exit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessIncarnation {
    /// Random, drawn at the start.
    #[serde(rename = "life")]
    pub id: Uuid,
    /// The name of its host.
    pub host: String,
    /// Where other nodes reach it.
    pub addresses: Vec<SocketAddr>,
    /// The machine id, as the system reports it.
    #[serde(rename = "machine")]
    pub machine_id: String,
    /// The boot id.
    #[serde(rename = "boot")]
    pub boot_id: String,
    /// The file whose lock it holds: device and inode.
    #[serde(rename = "lock")]
    pub lock_file: (u64, u64),
}

impl ProcessIncarnation {
    /// Whether `other` must have exited for this process to run.
    fn proves_dead(&self, other: &Self) -> bool {
        let known = !self.machine_id.is_empty() && !self.boot_id.is_empty();
        let same = (&self.machine_id, &self.boot_id, self.lock_file)
            == (&other.machine_id, &other.boot_id, other.lock_file);
        known && same
    }

    /// Where the process runs, for people.
    #[must_use]
    pub fn describe_location(&self) -> String {
        let addresses: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        format!("host {} ({})", self.host, addresses.join(", "))
    }
}

/// The registered incarnation of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegisteredIncarnation {
    /// The incarnation.
    #[serde(rename = "life")]
    pub incarnation: ProcessIncarnation,
    /// The incarnation whose challenge it answered last; nil before the first.
    #[serde(rename = "answered")]
    pub answered_challenge: Uuid,
}

/// The result of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// This incarnation is registered.
    Registered,
    /// Another incarnation is registered and alive.
    OtherAlive(Box<ProcessIncarnation>),
}

/// Key of a node's registered incarnation.
#[must_use]
pub fn incarnation_key(node: NodeId) -> String {
    format!("{INCARNATION_KEY_PREFIX}{node}")
}

/// Key of the challenge to a node's registered incarnation.
#[must_use]
pub fn challenge_key(node: NodeId) -> String {
    format!("{CHALLENGE_KEY_PREFIX}{node}")
}

/// Checks that an entry under [`INCARNATION_KEY_PREFIX`] or [`CHALLENGE_KEY_PREFIX`] is valid.
///
/// # Errors
/// [`StoreError::Damaged`].
pub fn validate_entry(entry: &Entry) -> Result<(), StoreError> {
    if entry.key.starts_with(INCARNATION_KEY_PREFIX) {
        decode::<RegisteredIncarnation>(entry).map(drop)
    } else {
        decode::<ProcessIncarnation>(entry).map(drop)
    }
}

fn decode<T: DeserializeOwned>(entry: &Entry) -> Result<T, StoreError> {
    serde_json::from_slice(entry.contents()?)
        .map_err(|e| StoreError::Damaged { path: entry.key.clone(), why: e.to_string() })
}

fn put_change<T: Serialize>(key: String, revision: Option<Revision>, value: &T) -> Change {
    let value = serde_json::to_vec(value).expect("names and numbers always serialise");
    Change {
        key,
        precondition: revision.map_or(Precondition::Absent, Precondition::AtRevision),
        value: Some(value),
    }
}

async fn get<T: DeserializeOwned>(
    meta: &dyn MetadataStore,
    key: &str,
) -> Result<Option<(T, Revision)>, StoreError> {
    let Some(entry) = meta.get(key).await? else { return Ok(None) };
    Ok(Some((decode(&entry)?, entry.revision)))
}

/// Decodes an entry under [`INCARNATION_KEY_PREFIX`].
///
/// # Errors
/// [`StoreError::Damaged`].
pub fn decode_registered(entry: &Entry) -> Result<RegisteredIncarnation, StoreError> {
    decode(entry)
}

/// The guard that makes a commit fail unless `incarnation` is registered for `node`;
/// `None` if another one is.
///
/// # Errors
/// [`StoreError`].
pub async fn incarnation_condition(
    meta: &dyn MetadataStore,
    node: NodeId,
    incarnation: Uuid,
) -> Result<Option<Change>, StoreError> {
    let registered = get::<RegisteredIncarnation>(meta, &incarnation_key(node)).await?;
    let own = registered.filter(|(registered, _)| registered.incarnation.id == incarnation);
    Ok(own.map(|(_, at)| Change {
        key: incarnation_key(node),
        precondition: Precondition::GuardAtRevision(at),
        value: None,
    }))
}

/// Registers `own` for `node`, unless another incarnation is alive. `is_alone`: no other process
/// can have used the store, because this one runs the store's only member.
///
/// May be called again after any error.
///
/// # Errors
/// [`StoreError`].
pub async fn claim(
    meta: &dyn MetadataStore,
    node: NodeId,
    own: &ProcessIncarnation,
    is_alone: bool,
) -> Result<ClaimOutcome, StoreError> {
    loop {
        let registered = get::<RegisteredIncarnation>(meta, &incarnation_key(node)).await?;
        let expected = match registered {
            Some((registered, _)) if registered.incarnation.id == own.id => {
                return Ok(ClaimOutcome::Registered);
            }
            None => None,
            Some((registered, revision)) => {
                if !is_alone && !own.proves_dead(&registered.incarnation) {
                    let shows_alive = meta.get(&nodes::alive_key(node)).await?.is_some();
                    let answer_timeout =
                        if shows_alive { CHALLENGE_TIMEOUT } else { CHALLENGE_TIMEOUT_NOT_ALIVE };
                    if let Some(other) =
                        challenge_incumbent(meta, node, own, (revision, answer_timeout)).await?
                    {
                        return Ok(ClaimOutcome::OtherAlive(Box::new(other)));
                    }
                }
                Some(revision)
            }
        };
        let registered =
            RegisteredIncarnation { incarnation: own.clone(), answered_challenge: Uuid::nil() };
        match meta.commit(vec![put_change(incarnation_key(node), expected, &registered)]).await {
            Ok(_) => return Ok(ClaimOutcome::Registered),
            // Another process was faster, or the challenged one answered after all.
            Err(StoreError::Conflict { .. }) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Challenges the registered incarnation on behalf of `own`.
///
/// # Errors
/// [`StoreError`].
pub async fn write_challenge(
    meta: &dyn MetadataStore,
    node: NodeId,
    own: &ProcessIncarnation,
) -> Result<(), StoreError> {
    loop {
        let expected = meta.get(&challenge_key(node)).await?.map(|e| e.revision);
        match meta.commit(vec![put_change(challenge_key(node), expected, own)]).await {
            Ok(_) => return Ok(()),
            Err(StoreError::Conflict { .. }) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Challenges the incarnation registered at revision `at`. `None` if it does not answer in time, or
/// has been replaced.
async fn challenge_incumbent(
    meta: &dyn MetadataStore,
    node: NodeId,
    own: &ProcessIncarnation,
    (at, answer_timeout): (Revision, Duration),
) -> Result<Option<ProcessIncarnation>, StoreError> {
    let mut answers = meta.watch(&incarnation_key(node), at);
    write_challenge(meta, node, own).await?;
    let deadline = Instant::now() + answer_timeout;
    loop {
        // The read after the deadline finds what the watch missed.
        let event = timeout_at(deadline, answers.next_event()).await;
        let now = get::<RegisteredIncarnation>(meta, &incarnation_key(node)).await?;
        match now {
            Some((now, _)) if now.answered_challenge == own.id && now.incarnation.id != own.id => {
                return Ok(Some(now.incarnation));
            }
            Some((_, revision)) if revision == at && event.is_ok() => sleep(RETRY_PAUSE).await,
            _ => return Ok(None),
        }
    }
}

/// Answers challenges to `own`, which is registered, and calls `rival` with each challenger. Ends
/// when another incarnation is registered, and returns it: this one is replaced.
pub async fn answer_challenges(
    meta: &dyn MetadataStore,
    node: NodeId,
    own: &ProcessIncarnation,
    rival: impl Fn(&ProcessIncarnation),
) -> ProcessIncarnation {
    let mut reported_challenge = None;
    loop {
        match poll_once(meta, node, own, &mut reported_challenge, &rival).await {
            Ok(Some(other)) => return other,
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, "cannot check whether this process still holds the node");
                sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// Reads both keys, answers a pending challenge, and waits for the next change.
async fn poll_once(
    meta: &dyn MetadataStore,
    node: NodeId,
    own: &ProcessIncarnation,
    reported_challenge: &mut Option<Revision>,
    rival: &impl Fn(&ProcessIncarnation),
) -> Result<Option<ProcessIncarnation>, StoreError> {
    let (entries, from) = meta.list(&incarnation_key(node)).await?;
    let registered_entry = entries.iter().find(|e| e.key == incarnation_key(node));
    let registered_entry = registered_entry
        .map(|e| Ok::<_, StoreError>((decode::<RegisteredIncarnation>(e)?, e.revision)))
        .transpose()?;
    if let Some((registered, _)) = &registered_entry
        && registered.incarnation.id != own.id
    {
        return Ok(Some(registered.incarnation.clone()));
    }
    let challenge = get::<ProcessIncarnation>(meta, &challenge_key(node)).await?;
    if let Some((other, at)) = challenge.filter(|(other, _)| other.id != own.id) {
        let answered = registered_entry
            .as_ref()
            .is_some_and(|(registered, _)| registered.answered_challenge == other.id);
        if !answered {
            let registered =
                RegisteredIncarnation { incarnation: own.clone(), answered_challenge: other.id };
            meta.commit(vec![put_change(
                incarnation_key(node),
                registered_entry.map(|(_, at)| at),
                &registered,
            )])
            .await?;
        }
        if reported_challenge.replace(at) != Some(at) {
            rival(&other);
        }
        if !answered {
            return Ok(None);
        }
    }
    let (own_key, challenge_key) = (incarnation_key(node), challenge_key(node));
    let (mut own_watch, mut challenge_watch) =
        (meta.watch(&own_key, from), meta.watch(&challenge_key, from));
    let changed = select(own_watch.next_event(), challenge_watch.next_event());
    let event = timeout_at(Instant::now() + POLL_INTERVAL, changed).await;
    if let Ok(Either::Left((Err(_), _)) | Either::Right((Err(_), _))) = event {
        sleep(RETRY_PAUSE).await;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::store::memory::{CallDelivery, CallKind, FaultInjector, MemoryStore};

    const NODE: NodeId = NodeId(2);

    fn life(n: u128, machine: &str, boot: &str) -> ProcessIncarnation {
        ProcessIncarnation {
            id: Uuid::from_u128(n),
            host: format!("host-{n}"),
            addresses: vec![format!("192.0.2.{n}:7480").parse().unwrap()],
            machine_id: machine.into(),
            boot_id: boot.into(),
            lock_file: (1, 2),
        }
    }

    fn client(model: &MemoryStore, faults: FaultInjector) -> Arc<dyn MetadataStore> {
        Arc::new(model.client(Duration::from_secs(1), faults))
    }

    fn well(model: &MemoryStore) -> Arc<dyn MetadataStore> {
        client(model, Box::new(|_| CallDelivery::IMMEDIATE))
    }

    /// Writes or removes the node's liveness key.
    async fn shows(meta: &dyn MetadataStore, alive: bool) {
        let key = nodes::alive_key(NODE);
        let revision = meta.get(&key).await.unwrap();
        if revision.is_some() != alive {
            let expect =
                revision.map_or(Precondition::Absent, |e| Precondition::AtRevision(e.revision));
            let value = alive.then(|| b"1".to_vec());
            meta.commit(vec![Change { key, precondition: expect, value }]).await.unwrap();
        }
    }

    /// What a live incarnation has found.
    #[derive(Clone, Default)]
    struct Holder {
        rivals: Arc<Mutex<Vec<ProcessIncarnation>>>,
        over: Arc<Mutex<Option<ProcessIncarnation>>>,
    }

    impl Holder {
        fn start(meta: Arc<dyn MetadataStore>, own: ProcessIncarnation) -> Self {
            let holder = Self::default();
            let Self { rivals, over } = holder.clone();
            tokio::spawn(async move {
                let ended = answer_challenges(&*meta, NODE, &own, |l| {
                    rivals.lock().unwrap().push(l.clone());
                })
                .await;
                *over.lock().unwrap() = Some(ended);
            });
            holder
        }

        fn over(&self) -> Option<ProcessIncarnation> {
            self.over.lock().unwrap().clone()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cloned_node_is_told_apart_and_the_first_goes_on() {
        let model = MemoryStore::default();
        let meta = well(&model);
        let (first, clone) = (life(1, "m", "b1"), life(2, "m", "b2"));
        assert_eq!(claim(&*meta, NODE, &first, false).await, Ok(ClaimOutcome::Registered));
        shows(&*meta, true).await;
        let holder = Holder::start(Arc::clone(&meta), first.clone());
        for _ in 0..3 {
            let reported = claim(&*meta, NODE, &clone, false).await;
            assert_eq!(reported, Ok(ClaimOutcome::OtherAlive(Box::new(first.clone()))));
            sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(holder.over(), None, "it goes on undisturbed");
        assert!(!holder.rivals.lock().unwrap().is_empty());
        assert_eq!(
            holder.rivals.lock().unwrap()[0].describe_location(),
            "host host-2 (192.0.2.2:7480)"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_restart_takes_over_at_once_where_the_last_life_is_over_beyond_doubt() {
        let model = MemoryStore::default();
        let meta = well(&model);
        let at_once = |began: Instant| assert!(began.elapsed() < Duration::from_millis(100));
        // Killed and restarted: the lock of the data directory is free, the lease still runs.
        claim(&*meta, NODE, &life(1, "m", "b1"), false).await.unwrap();
        shows(&*meta, true).await;
        let began = Instant::now();
        let again = claim(&*meta, NODE, &life(2, "m", "b1"), false).await;
        assert_eq!(again, Ok(ClaimOutcome::Registered));
        // It runs the only member of the store.
        assert_eq!(
            claim(&*meta, NODE, &life(3, "m", "b2"), true).await,
            Ok(ClaimOutcome::Registered)
        );
        at_once(began);
        // The machine was away for longer than the lease.
        shows(&*meta, false).await;
        let began = Instant::now();
        assert_eq!(
            claim(&*meta, NODE, &life(4, "m", "b3"), false).await,
            Ok(ClaimOutcome::Registered)
        );
        assert!(began.elapsed() < CHALLENGE_TIMEOUT_NOT_ALIVE + Duration::from_millis(100));
        shows(&*meta, true).await;
        // A machine that was reset and is back before its lease has expired.
        let began = Instant::now();
        assert_eq!(
            claim(&*meta, NODE, &life(5, "m", "b4"), false).await,
            Ok(ClaimOutcome::Registered)
        );
        assert!(began.elapsed() < CHALLENGE_TIMEOUT + Duration::from_secs(1));
        // A machine without a machine id proves nothing.
        let nameless = |n| ProcessIncarnation {
            machine_id: String::new(),
            boot_id: String::new(),
            ..life(n, "", "")
        };
        assert_eq!(claim(&*meta, NODE, &nameless(6), false).await, Ok(ClaimOutcome::Registered));
        let began = Instant::now();
        assert_eq!(claim(&*meta, NODE, &nameless(7), false).await, Ok(ClaimOutcome::Registered));
        assert!(began.elapsed() >= CHALLENGE_TIMEOUT);
    }

    /// A process that has registered and has no liveness key yet is the node.
    #[tokio::test(start_paused = true)]
    async fn a_copy_that_begins_a_moment_after_the_node_is_told_apart() {
        let model = MemoryStore::default();
        let meta = well(&model);
        let (first, clone) = (life(1, "m", "b1"), life(2, "m", "b2"));
        assert_eq!(claim(&*meta, NODE, &first, false).await, Ok(ClaimOutcome::Registered));
        let holder = Holder::start(Arc::clone(&meta), first.clone());
        let reported = claim(&*meta, NODE, &clone, false).await;
        assert_eq!(reported, Ok(ClaimOutcome::OtherAlive(Box::new(first))));
        assert_eq!(holder.over(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_life_that_was_cut_off_from_the_store_finds_that_another_has_taken_its_place() {
        let model = MemoryStore::default();
        let meta = well(&model);
        let cut = Arc::new(Mutex::new(true));
        let delivery = {
            let cut = Arc::clone(&cut);
            move |_: CallKind| {
                if *cut.lock().unwrap() { CallDelivery::Refused } else { CallDelivery::IMMEDIATE }
            }
        };
        let (first, second) = (life(1, "m", "b1"), life(2, "n", "b2"));
        claim(&*meta, NODE, &first, false).await.unwrap();
        shows(&*meta, true).await;
        let holder = Holder::start(client(&model, Box::new(delivery)), first);
        assert_eq!(claim(&*meta, NODE, &second, false).await, Ok(ClaimOutcome::Registered));
        *cut.lock().unwrap() = false;
        sleep(Duration::from_secs(10)).await;
        assert_eq!(holder.over(), Some(second));
    }

    /// Two claims at once, over a store that refuses, delays and loses calls: in any case one of
    /// them is the node in the end, and the other knows it.
    #[tokio::test(start_paused = true)]
    async fn of_two_lives_one_remains_whatever_the_store_does() {
        for seed in 1..200_u64 {
            let model = MemoryStore::default();
            let unlucky = |mut seed: u64| -> FaultInjector {
                let mut roll = move |sides: u64| {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    seed % sides
                };
                Box::new(move |_| match roll(8) {
                    0 => CallDelivery::Refused,
                    1 => CallDelivery::Sent { request_delay: None, response_delay: None },
                    n => CallDelivery::Sent {
                        request_delay: Some(Duration::from_millis(roll(40) * n)),
                        response_delay: (roll(9) > 0).then(|| Duration::from_millis(roll(40))),
                    },
                })
            };
            shows(&*well(&model), true).await;
            let run = |n: u64| {
                let meta = client(&model, unlucky(seed * 2 + n));
                let own = life(u128::from(n) + 1, "m", &n.to_string());
                tokio::spawn(async move {
                    loop {
                        match claim(&*meta, NODE, &own, false).await {
                            Ok(ClaimOutcome::Registered) => {
                                break answer_challenges(&*meta, NODE, &own, |_| {}).await;
                            }
                            Ok(ClaimOutcome::OtherAlive(other)) => break *other,
                            Err(_) => sleep(RETRY_PAUSE).await,
                        }
                    }
                })
            };
            let incarnations = [run(0), run(1)];
            sleep(Duration::from_secs(120)).await;
            let ended: Vec<_> =
                incarnations.iter().map(tokio::task::JoinHandle::is_finished).collect();
            assert_eq!(ended.iter().filter(|ended| **ended).count(), 1, "seed {seed}: {ended:?}");
            let (registered, _) =
                get::<RegisteredIncarnation>(&*well(&model), &incarnation_key(NODE))
                    .await
                    .unwrap()
                    .unwrap();
            let goes_on = ended.iter().position(|ended| !ended).unwrap();
            assert_eq!(
                registered.incarnation.id,
                Uuid::from_u128(goes_on as u128 + 1),
                "seed {seed}"
            );
            incarnations.iter().for_each(tokio::task::JoinHandle::abort);
        }
    }
}
