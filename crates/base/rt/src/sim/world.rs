//! A world: hosts, disks and a network that a seed determines, and the scenario that plays in it.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::LocalSet;

use super::agenda::Agenda;
use super::host::{Host, HostSetup, HostState};
use super::net::{LinkSetup, Net};
use super::panics::Watch;
use super::rng::Rng;
use super::trace::{Digest, Trace};

/// How a world is made.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Decides everything that is left to chance.
    pub seed: u64,
    /// Virtual time after which the scenario has failed.
    pub limit: Duration,
    /// Print every event to standard error.
    pub verbose: bool,
    /// Called when a host crashes; what it returns is dropped when all that ran there is gone.
    /// For permits of floors above this one: operations may vanish in flight just then.
    pub crash_guard: fn() -> Box<dyn Any>,
}

impl Setup {
    /// The usual world of a seed: an hour of virtual time, quiet.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            limit: Duration::from_secs(3600),
            verbose: false,
            crash_guard: || Box::new(()),
        }
    }
}

/// How a scenario ended.
#[derive(Debug)]
pub struct Outcome {
    /// The sum of all that happened: equal for every run of one seed.
    pub digest: Digest,
    /// Virtual time it took.
    pub took: Duration,
    /// What went wrong, if anything did.
    pub result: Result<(), Failure>,
}

/// A failed scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What is wrong.
    pub what: String,
    /// The last events before it was noticed.
    pub story: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.what)?;
        self.story.iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}

impl std::error::Error for Failure {}

/// What everything in a world shares.
pub(crate) struct Shared {
    pub(crate) seed: u64,
    pub(crate) agenda: Agenda,
    pub(crate) trace: Rc<Trace>,
    pub(crate) net: Net,
    hosts: RefCell<Vec<Rc<HostState>>>,
    rng: Rng,
    crash_guard: fn() -> Box<dyn Any>,
    failed: RefCell<Option<String>>,
    failure: Notify,
}

impl Shared {
    pub(crate) fn event(&self, what: &'static str, place: &Rc<str>, numbers: &[u64]) {
        self.trace.event(self.agenda.now(), what, place, numbers);
    }

    pub(crate) fn crash_guard(&self) -> Box<dyn Any> {
        (self.crash_guard)()
    }

    /// Ends the scenario; the first reason counts.
    pub(crate) fn fail(&self, why: String) {
        self.failed.borrow_mut().get_or_insert(why);
        self.failure.notify_one();
    }
}

/// A scenario's handle on its world. Cheap to clone.
#[derive(Clone)]
pub struct World(Rc<Shared>);

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("seed", &self.0.seed).finish_non_exhaustive()
    }
}

impl World {
    /// The seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.0.seed
    }

    /// The scenario's own draws.
    #[must_use]
    pub fn rng(&self) -> &Rng {
        &self.0.rng
    }

    /// Virtual time since the world began.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.0.agenda.now()
    }

    /// Records an event of the scenario.
    pub fn note(&self, text: impl Into<String>) {
        self.0.trace.note(self.now(), text.into());
    }

    /// Records an event of the scenario that is only numbers.
    pub fn event(&self, what: &'static str, place: &Rc<str>, numbers: &[u64]) {
        self.0.event(what, place, numbers);
    }

    /// Ends the scenario as failed, from wherever this is noticed.
    pub fn fail(&self, why: impl Into<String>) {
        self.0.fail(why.into());
    }

    /// A new host, not yet started.
    pub fn add_host(&self, name: &str, setup: HostSetup) -> Host {
        let mut hosts = self.0.hosts.borrow_mut();
        let state = Rc::new(HostState::new(&self.0, hosts.len(), name, setup));
        hosts.push(Rc::clone(&state));
        self.0.net.add_host(&state.name);
        Host::new(Rc::clone(&self.0), state)
    }

    /// Changes the link from `from` to `to`, this direction only.
    pub fn set_link(&self, from: &Host, to: &Host, change: impl FnOnce(&mut LinkSetup)) {
        self.0.net.set_link(from.index(), to.index(), change);
    }

    /// Cuts both directions between two hosts.
    pub fn partition(&self, a: &Host, b: &Host) {
        self.set_link(a, b, |l| l.cut = true);
        self.set_link(b, a, |l| l.cut = true);
    }

    /// Ends [`Self::partition`]: what TCP still wants to deliver arrives, late.
    pub fn heal(&self, a: &Host, b: &Host) {
        self.set_link(a, b, |l| l.cut = false);
        self.set_link(b, a, |l| l.cut = false);
    }
}

/// Plays `scenario` in a new world.
///
/// Everything runs on this thread in virtual time, which stands still while anything can run. A
/// panic anywhere in it is a failure of the scenario.
pub fn run<S, Fut>(setup: Setup, scenario: S) -> Outcome
where
    S: FnOnce(World) -> Fut,
    Fut: Future<Output = Result<(), String>>,
{
    let _watch = Watch::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O takes nothing from the system");
    let shared = runtime.block_on(async { new_world(setup) });
    let tasks = LocalSet::new();
    let world = World(Rc::clone(&shared));
    let played = catch_unwind(AssertUnwindSafe(|| {
        tasks.block_on(&runtime, play(&shared, setup.limit, scenario(world)))
    }));
    let took = runtime.block_on(async { shared.agenda.now() });
    let panicked = Watch::first();
    let result = match (panicked, played) {
        (Some(panic), _) => Err(panic),
        (None, Ok(result)) => result,
        (None, Err(_)) => Err("a panic without a message".to_owned()),
    };
    let digest = shared.trace.digest();
    let result = result.map_err(|what| Failure { what, story: shared.trace.tail() });
    end_world(&shared, tasks, &runtime);
    Outcome { digest, took, result }
}

fn new_world(setup: Setup) -> Rc<Shared> {
    let agenda = Agenda::new(setup.seed);
    let trace = Rc::new(Trace::new(setup.verbose));
    Rc::new(Shared {
        seed: setup.seed,
        net: Net::new(setup.seed, agenda.clone(), Rc::clone(&trace)),
        agenda,
        trace,
        hosts: RefCell::default(),
        rng: Rng::new(setup.seed, "scenario"),
        crash_guard: setup.crash_guard,
        failed: RefCell::default(),
        failure: Notify::new(),
    })
}

async fn play(
    shared: &Shared,
    limit: Duration,
    scenario: impl Future<Output = Result<(), String>>,
) -> Result<(), String> {
    // A panic ends its task and wakes nobody: look after each entry of the agenda, and now and
    // then when there are none.
    let panicked = || Watch::first().is_some();
    let panics = async {
        while !panicked() {
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
    };
    let result = tokio::select! {
        biased;
        () = shared.failure.notified() => Ok(()),
        result = scenario => result,
        () = shared.agenda.drive(panicked) => Ok(()),
        () = panics => Ok(()),
        () = tokio::time::sleep(limit) => Err(format!("still going after {limit:?}")),
    };
    shared.failed.borrow_mut().take().map_or(result, Err)
}

/// Drops what is left: host by host, as in a crash of all of them at once.
fn end_world(shared: &Rc<Shared>, tasks: LocalSet, runtime: &tokio::runtime::Runtime) {
    let _guard = shared.crash_guard();
    let _entered = runtime.enter();
    let hosts = std::mem::take(&mut *shared.hosts.borrow_mut());
    for state in &hosts {
        Host::new(Rc::clone(shared), Rc::clone(state)).power_cut();
    }
    drop(tasks);
    // It may hold its own host, by way of what the scenario knows of it.
    hosts.iter().for_each(|state| state.forget_software());
    shared.agenda.clear();
}
