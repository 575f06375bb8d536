//! Which process is a node: the one whose life is registered in the store, and no other.
//!
//! | key | holds | written by |
//! |---|---|---|
//! | `lives/ID` | [`Registered`]: the life, and the last challenge that it has answered | the node |
//! | `challenges/ID` | [`Life`]: who has asked whether that life goes on | whoever wants to be the node |
//!
//! A node draws a life when it starts, and puts it in place of the last one by compare-and-put before it does
//! anything else in the cluster ([`claim`]). It may do so where the last life is over beyond doubt: it had the same lock of the
//! same file in the same boot of the same machine. Else it asks: a life that goes on answers within moments, and then the
//! one who has asked is a copy of the node. Silence for [`ANSWER`] is an end, or for [`SIGNLESS_ANSWER`] where its sign of life
//! is not there: that has run out, or has not come yet. Whoever was cut off from the store all the while finds another life
//! registered when he is back ([`hold`]), and stops.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::{Either, select};
use peer::NodeId;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::time::{Instant, sleep, timeout_at};
use uuid::Uuid;

use crate::meta::{Change, Entry, Expect, Meta, MetaError, Revision};
use crate::nodes;

/// What keys of registered lives begin with.
pub const LIVES: &str = "lives/";

/// What keys of challenges begin with.
pub const CHALLENGES: &str = "challenges/";

/// How long a life that goes on may take to answer: a watch finds another member of the store within that time.
pub const ANSWER: Duration = Duration::from_secs(4);

/// The same for one whose sign of life is not there. It may have registered just now.
pub const SIGNLESS_ANSWER: Duration = Duration::from_secs(1);

/// Longest time between two looks at what a watch should have told.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Pause before a store that does not answer is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// One life of a node: a process, from its start to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Life {
    /// Drawn when it began.
    pub life: Uuid,
    /// The name of its host.
    pub host: String,
    /// Where other nodes reach it.
    pub addresses: Vec<SocketAddr>,
    /// The machine, and the boot of it, as the system names them.
    pub machine: String,
    /// The boot.
    pub boot: String,
    /// The file whose lock it holds: device and inode.
    pub lock: (u64, u64),
}

impl Life {
    /// Whether `other` must have ended for this one to be there.
    fn has_outlived(&self, other: &Self) -> bool {
        let known = !self.machine.is_empty() && !self.boot.is_empty();
        let same =
            (&self.machine, &self.boot, self.lock) == (&other.machine, &other.boot, other.lock);
        known && same
    }

    /// The process, for people.
    #[must_use]
    pub fn place(&self) -> String {
        let addresses: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        format!("host {} ({})", self.host, addresses.join(", "))
    }
}

/// The life that is the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registered {
    /// Which one.
    pub life: Life,
    /// The life whose challenge it has answered last; nil before the first.
    pub answered: Uuid,
}

/// What came of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The node is this life now.
    Ours,
    /// It is another one, which goes on.
    Other(Box<Life>),
}

/// Key of a node's registered life.
#[must_use]
pub fn key(node: NodeId) -> String {
    format!("{LIVES}{node}")
}

/// Key of the challenge to a node's registered life.
#[must_use]
pub fn challenge_key(node: NodeId) -> String {
    format!("{CHALLENGES}{node}")
}

/// Whether what an entry under [`LIVES`] or [`CHALLENGES`] holds can be believed.
///
/// # Errors
/// [`MetaError::Damaged`].
pub fn check(entry: &Entry) -> Result<(), MetaError> {
    if entry.key.starts_with(LIVES) {
        decode::<Registered>(entry).map(drop)
    } else {
        decode::<Life>(entry).map(drop)
    }
}

fn decode<T: DeserializeOwned>(entry: &Entry) -> Result<T, MetaError> {
    serde_json::from_slice(entry.contents()?)
        .map_err(|e| MetaError::Damaged { path: entry.key.clone(), why: e.to_string() })
}

fn put<T: Serialize>(key: String, held: Option<Revision>, value: &T) -> Change {
    let value = serde_json::to_vec(value).expect("names and numbers always serialise");
    Change { key, expect: held.map_or(Expect::Absent, Expect::At), value: Some(value) }
}

async fn get<T: DeserializeOwned>(
    meta: &dyn Meta,
    key: &str,
) -> Result<Option<(T, Revision)>, MetaError> {
    let Some(entry) = meta.get(key).await? else { return Ok(None) };
    Ok(Some((decode(&entry)?, entry.revision)))
}

/// The life that an entry under [`LIVES`] holds.
///
/// # Errors
/// [`MetaError::Damaged`].
pub fn registered(entry: &Entry) -> Result<Registered, MetaError> {
    decode(entry)
}

/// The condition under which `life` is `node`, for a commit that it alone may make; `None` if
/// another one is.
///
/// # Errors
/// [`MetaError`].
pub async fn condition(
    meta: &dyn Meta,
    node: NodeId,
    life: Uuid,
) -> Result<Option<Change>, MetaError> {
    let held = get::<Registered>(meta, &key(node)).await?;
    let ours = held.filter(|(held, _)| held.life.life == life);
    Ok(ours.map(|(_, at)| Change { key: key(node), expect: Expect::Still(at), value: None }))
}

/// Makes `own` the life of `node`, unless another one goes on. `is_alone`: nobody but this process can have used the
/// store, as it runs the store's only member.
///
/// May be called again after any error.
///
/// # Errors
/// [`MetaError`].
pub async fn claim(
    meta: &dyn Meta,
    node: NodeId,
    own: &Life,
    is_alone: bool,
) -> Result<Claim, MetaError> {
    loop {
        let held = get::<Registered>(meta, &key(node)).await?;
        let before = match held {
            Some((held, _)) if held.life.life == own.life => return Ok(Claim::Ours),
            None => None,
            Some((held, revision)) => {
                if !is_alone && !own.has_outlived(&held.life) {
                    let shows = meta.get(&nodes::alive_key(node)).await?.is_some();
                    let patience = if shows { ANSWER } else { SIGNLESS_ANSWER };
                    if let Some(other) = challenge(meta, node, own, (revision, patience)).await? {
                        return Ok(Claim::Other(Box::new(other)));
                    }
                }
                Some(revision)
            }
        };
        let registered = Registered { life: own.clone(), answered: Uuid::nil() };
        match meta.commit(vec![put(key(node), before, &registered)]).await {
            Ok(_) => return Ok(Claim::Ours),
            // Somebody else was faster, or answers after all.
            Err(MetaError::Changed { .. }) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Has the registered life know that `own` is there, too.
///
/// # Errors
/// [`MetaError`].
pub async fn ask(meta: &dyn Meta, node: NodeId, own: &Life) -> Result<(), MetaError> {
    loop {
        let before = meta.get(&challenge_key(node)).await?.map(|e| e.revision);
        match meta.commit(vec![put(challenge_key(node), before, own)]).await {
            Ok(_) => return Ok(()),
            Err(MetaError::Changed { .. }) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Asks the life that `at` registered whether it goes on. `None` if it does not answer in time, or is another one by now.
async fn challenge(
    meta: &dyn Meta,
    node: NodeId,
    own: &Life,
    (at, patience): (Revision, Duration),
) -> Result<Option<Life>, MetaError> {
    let mut answers = meta.watch(&key(node), at);
    ask(meta, node, own).await?;
    let deadline = Instant::now() + patience;
    loop {
        // What a watch does not tell, the look at the end does.
        let told = timeout_at(deadline, answers.next()).await;
        let now = get::<Registered>(meta, &key(node)).await?;
        match now {
            Some((now, _)) if now.answered == own.life && now.life.life != own.life => {
                return Ok(Some(now.life));
            }
            Some((_, revision)) if revision == at && told.is_ok() => sleep(PAUSE).await,
            _ => return Ok(None),
        }
    }
}

/// Answers those who ask whether `own`, which is registered, goes on; each of them is given to `rival`. Ends when
/// another life is registered: this one is over, and gives what has taken its place.
pub async fn hold(meta: &dyn Meta, node: NodeId, own: &Life, rival: impl Fn(&Life)) -> Life {
    let mut told = None;
    loop {
        match look(meta, node, own, &mut told, &rival).await {
            Ok(Some(other)) => return other,
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, "it is not known whether this node is still this process");
                sleep(PAUSE).await;
            }
        }
    }
}

/// One look at both keys, an answer if there is something to answer, and a wait for the next change.
async fn look(
    meta: &dyn Meta,
    node: NodeId,
    own: &Life,
    told: &mut Option<Revision>,
    rival: &impl Fn(&Life),
) -> Result<Option<Life>, MetaError> {
    let (lives, from) = meta.list(&key(node)).await?;
    let held = lives.iter().find(|e| e.key == key(node));
    let held =
        held.map(|e| Ok::<_, MetaError>((decode::<Registered>(e)?, e.revision))).transpose()?;
    if let Some((held, _)) = &held
        && held.life.life != own.life
    {
        return Ok(Some(held.life.clone()));
    }
    let asks = get::<Life>(meta, &challenge_key(node)).await?;
    if let Some((other, at)) = asks.filter(|(other, _)| other.life != own.life) {
        let answered = held.as_ref().is_some_and(|(held, _)| held.answered == other.life);
        if !answered {
            let registered = Registered { life: own.clone(), answered: other.life };
            meta.commit(vec![put(key(node), held.map(|(_, at)| at), &registered)]).await?;
        }
        if told.replace(at) != Some(at) {
            rival(&other);
        }
        if !answered {
            return Ok(None);
        }
    }
    let (lives, asks) = (key(node), challenge_key(node));
    let (mut lives, mut asks) = (meta.watch(&lives, from), meta.watch(&asks, from));
    let changed = select(lives.next(), asks.next());
    let told = timeout_at(Instant::now() + LOOK_AGAIN, changed).await;
    if let Ok(Either::Left((Err(_), _)) | Either::Right((Err(_), _))) = told {
        sleep(PAUSE).await;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::meta::model::{Call, Fate, Faults, Model};

    const NODE: NodeId = NodeId(2);

    fn life(n: u128, machine: &str, boot: &str) -> Life {
        Life {
            life: Uuid::from_u128(n),
            host: format!("host-{n}"),
            addresses: vec![format!("192.0.2.{n}:7480").parse().unwrap()],
            machine: machine.into(),
            boot: boot.into(),
            lock: (1, 2),
        }
    }

    fn client(model: &Model, faults: Faults) -> Arc<dyn Meta> {
        Arc::new(model.client(Duration::from_secs(1), faults))
    }

    fn well(model: &Model) -> Arc<dyn Meta> {
        client(model, Box::new(|_| Fate::WELL))
    }

    /// Shows the node as alive, or not.
    async fn shows(meta: &dyn Meta, alive: bool) {
        let key = nodes::alive_key(NODE);
        let held = meta.get(&key).await.unwrap();
        if held.is_some() != alive {
            let expect = held.map_or(Expect::Absent, |e| Expect::At(e.revision));
            let value = alive.then(|| b"1".to_vec());
            meta.commit(vec![Change { key, expect, value }]).await.unwrap();
        }
    }

    /// What a life that goes on has found.
    #[derive(Clone, Default)]
    struct Holder {
        rivals: Arc<Mutex<Vec<Life>>>,
        over: Arc<Mutex<Option<Life>>>,
    }

    impl Holder {
        fn start(meta: Arc<dyn Meta>, own: Life) -> Self {
            let holder = Self::default();
            let Self { rivals, over } = holder.clone();
            tokio::spawn(async move {
                let ended =
                    hold(&*meta, NODE, &own, |l| rivals.lock().unwrap().push(l.clone())).await;
                *over.lock().unwrap() = Some(ended);
            });
            holder
        }

        fn over(&self) -> Option<Life> {
            self.over.lock().unwrap().clone()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cloned_node_is_told_apart_and_the_first_goes_on() {
        let model = Model::default();
        let meta = well(&model);
        let (first, clone) = (life(1, "m", "b1"), life(2, "m", "b2"));
        assert_eq!(claim(&*meta, NODE, &first, false).await, Ok(Claim::Ours));
        shows(&*meta, true).await;
        let holder = Holder::start(Arc::clone(&meta), first.clone());
        for _ in 0..3 {
            let told = claim(&*meta, NODE, &clone, false).await;
            assert_eq!(told, Ok(Claim::Other(Box::new(first.clone()))));
            sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(holder.over(), None, "it goes on undisturbed");
        assert!(!holder.rivals.lock().unwrap().is_empty());
        assert_eq!(holder.rivals.lock().unwrap()[0].place(), "host host-2 (192.0.2.2:7480)");
    }

    #[tokio::test(start_paused = true)]
    async fn a_restart_takes_over_at_once_where_the_last_life_is_over_beyond_doubt() {
        let model = Model::default();
        let meta = well(&model);
        let at_once = |began: Instant| assert!(began.elapsed() < Duration::from_millis(100));
        // Killed, and started again: the lock of the data directory is free, the lease still runs.
        claim(&*meta, NODE, &life(1, "m", "b1"), false).await.unwrap();
        shows(&*meta, true).await;
        let began = Instant::now();
        let again = claim(&*meta, NODE, &life(2, "m", "b1"), false).await;
        assert_eq!(again, Ok(Claim::Ours));
        // It runs the only member of the store.
        assert_eq!(claim(&*meta, NODE, &life(3, "m", "b2"), true).await, Ok(Claim::Ours));
        at_once(began);
        // The machine was away for longer than a lease.
        shows(&*meta, false).await;
        let began = Instant::now();
        assert_eq!(claim(&*meta, NODE, &life(4, "m", "b3"), false).await, Ok(Claim::Ours));
        assert!(began.elapsed() < SIGNLESS_ANSWER + Duration::from_millis(100));
        shows(&*meta, true).await;
        // A machine that was reset and is back before its lease has run out.
        let began = Instant::now();
        assert_eq!(claim(&*meta, NODE, &life(5, "m", "b4"), false).await, Ok(Claim::Ours));
        assert!(began.elapsed() < ANSWER + Duration::from_secs(1));
        // A machine that does not know what it is called proves nothing.
        let nameless = |n| Life { machine: String::new(), boot: String::new(), ..life(n, "", "") };
        assert_eq!(claim(&*meta, NODE, &nameless(6), false).await, Ok(Claim::Ours));
        let began = Instant::now();
        assert_eq!(claim(&*meta, NODE, &nameless(7), false).await, Ok(Claim::Ours));
        assert!(began.elapsed() >= ANSWER);
    }

    /// A node that has registered and has shown no sign of life yet is the node.
    #[tokio::test(start_paused = true)]
    async fn a_copy_that_begins_a_moment_after_the_node_is_told_apart() {
        let model = Model::default();
        let meta = well(&model);
        let (first, clone) = (life(1, "m", "b1"), life(2, "m", "b2"));
        assert_eq!(claim(&*meta, NODE, &first, false).await, Ok(Claim::Ours));
        let holder = Holder::start(Arc::clone(&meta), first.clone());
        let told = claim(&*meta, NODE, &clone, false).await;
        assert_eq!(told, Ok(Claim::Other(Box::new(first))));
        assert_eq!(holder.over(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_life_that_was_cut_off_from_the_store_finds_that_another_has_taken_its_place() {
        let model = Model::default();
        let meta = well(&model);
        let cut = Arc::new(Mutex::new(true));
        let fate = {
            let cut = Arc::clone(&cut);
            move |_: Call| if *cut.lock().unwrap() { Fate::Refused } else { Fate::WELL }
        };
        let (first, second) = (life(1, "m", "b1"), life(2, "n", "b2"));
        claim(&*meta, NODE, &first, false).await.unwrap();
        shows(&*meta, true).await;
        let holder = Holder::start(client(&model, Box::new(fate)), first);
        assert_eq!(claim(&*meta, NODE, &second, false).await, Ok(Claim::Ours));
        *cut.lock().unwrap() = false;
        sleep(Duration::from_secs(10)).await;
        assert_eq!(holder.over(), Some(second));
    }

    /// Two claims at once, over a store that refuses, delays and loses calls: whatever happens, one of them is the node
    /// in the end, and the other knows it.
    #[tokio::test(start_paused = true)]
    async fn of_two_lives_one_remains_whatever_the_store_does() {
        for seed in 1..200_u64 {
            let model = Model::default();
            let unlucky = |mut seed: u64| -> Faults {
                let mut roll = move |sides: u64| {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    seed % sides
                };
                Box::new(move |_| match roll(8) {
                    0 => Fate::Refused,
                    1 => Fate::Sent { there: None, back: None },
                    n => Fate::Sent {
                        there: Some(Duration::from_millis(roll(40) * n)),
                        back: (roll(9) > 0).then(|| Duration::from_millis(roll(40))),
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
                            Ok(Claim::Ours) => break hold(&*meta, NODE, &own, |_| {}).await,
                            Ok(Claim::Other(other)) => break *other,
                            Err(_) => sleep(PAUSE).await,
                        }
                    }
                })
            };
            let lives = [run(0), run(1)];
            sleep(Duration::from_secs(120)).await;
            let ended: Vec<_> = lives.iter().map(tokio::task::JoinHandle::is_finished).collect();
            assert_eq!(ended.iter().filter(|ended| **ended).count(), 1, "seed {seed}: {ended:?}");
            let (held, _) = get::<Registered>(&*well(&model), &key(NODE)).await.unwrap().unwrap();
            let goes_on = ended.iter().position(|ended| !ended).unwrap();
            assert_eq!(held.life.life, Uuid::from_u128(goes_on as u128 + 1), "seed {seed}");
            lives.iter().for_each(tokio::task::JoinHandle::abort);
        }
    }
}
