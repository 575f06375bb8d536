//! A world: hosts, disks and a network that a seed determines, and the scenario that runs in it.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::LocalSet;

use super::host::Host;
use super::host_state::{HostSetup, HostState};
use super::net::LinkSetup;
use super::panics::PanicCollector;
use super::rng::Rng;
use super::trace::TraceDigest;
use super::world_state::WorldInner;

/// Parameters of a world.
#[derive(Clone, Copy, Debug)]
pub struct WorldSetup {
    /// Determines everything random.
    pub seed: u64,
    /// Virtual time after which the scenario fails.
    pub time_limit: Duration,
    /// Print every event to standard error.
    pub verbose: bool,
    /// Called when a host crashes; the result is dropped when everything that ran there is gone.
    /// For guards of the crates above: operations may be dropped in flight just then.
    pub crash_guard: fn() -> Box<dyn Any>,
}

impl WorldSetup {
    /// The default world of a seed: an hour of virtual time, not verbose.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            time_limit: Duration::from_secs(3600),
            verbose: false,
            crash_guard: || Box::new(()),
        }
    }
}

/// How a scenario ended.
#[derive(Debug)]
pub struct ScenarioOutcome {
    /// Digest of the trace: equal for every run of one seed.
    pub digest: TraceDigest,
    /// Virtual time it took.
    pub duration: Duration,
    /// The failure, if any.
    pub result: Result<(), ScenarioFailure>,
}

/// A failed scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScenarioFailure {
    /// What is wrong.
    pub message: String,
    /// The last events before the failure.
    pub last_events: Vec<String>,
}

impl fmt::Display for ScenarioFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.message)?;
        self.last_events.iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}

impl std::error::Error for ScenarioFailure {}

/// A scenario's handle to its world. Cheap to clone.
#[derive(Clone)]
pub struct World {
    shared: Rc<WorldInner>,
    hosts: Hosts,
}

/// The hosts of a world.
type Hosts = Rc<RefCell<Vec<Rc<HostState>>>>;

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("seed", &self.shared.seed).finish_non_exhaustive()
    }
}

impl World {
    /// The seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// The scenario's own random stream.
    #[must_use]
    pub fn rng(&self) -> &Rng {
        &self.shared.rng
    }

    /// Virtual time since the world began.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.shared.agenda.now()
    }

    /// Records an event of the scenario.
    pub fn note(&self, text: impl Into<String>) {
        self.shared.trace.note(self.now(), text.into());
    }

    /// Records an event of the scenario with numbers only.
    pub fn event(&self, what: &'static str, place: &Rc<str>, numbers: &[u64]) {
        self.shared.event(what, place, numbers);
    }

    /// Fails the scenario, from anywhere.
    pub fn fail(&self, why: impl Into<String>) {
        self.shared.fail(why.into());
    }

    /// A new host, not yet started.
    pub fn add_host(&self, name: &str, setup: HostSetup) -> Host {
        let mut hosts = self.hosts.borrow_mut();
        let state = Rc::new(HostState::new(&self.shared, hosts.len(), name, setup));
        hosts.push(Rc::clone(&state));
        self.shared.net.add_host(&state.name);
        Host::new(Rc::clone(&self.shared), state)
    }

    /// Changes the link from `from` to `to`, in this direction only.
    pub fn set_link(&self, from: &Host, to: &Host, change: impl FnOnce(&mut LinkSetup)) {
        self.shared.net.set_link(from.index(), to.index(), change);
    }

    /// Cuts both directions between two hosts.
    pub fn partition(&self, a: &Host, b: &Host) {
        self.set_link(a, b, |l| l.is_cut = true);
        self.set_link(b, a, |l| l.is_cut = true);
    }

    /// Ends [`Self::partition`]: data that TCP still retransmits arrives, late.
    pub fn heal(&self, a: &Host, b: &Host) {
        self.set_link(a, b, |l| l.is_cut = false);
        self.set_link(b, a, |l| l.is_cut = false);
    }
}

/// Runs `scenario` in a new world.
///
/// Everything runs on this thread in virtual time, which stands still while anything can run. A
/// panic anywhere fails the scenario.
pub fn run<S, Fut>(setup: WorldSetup, scenario: S) -> ScenarioOutcome
where
    S: FnOnce(World) -> Fut,
    Fut: Future<Output = Result<(), String>>,
{
    run_boxed(setup, Box::new(|world| Box::pin(scenario(world))))
}

/// A scenario, and what it does in its world.
type BoxedScenario<'a> = Box<dyn FnOnce(World) -> ScenarioFuture<'a> + 'a>;
type ScenarioFuture<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + 'a>>;

/// The rest of [`run`], compiled once and not for each scenario.
fn run_boxed(setup: WorldSetup, scenario: BoxedScenario<'_>) -> ScenarioOutcome {
    let _watch = PanicCollector::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O takes nothing from the system");
    let shared = runtime
        .block_on(async { Rc::new(WorldInner::new(setup.seed, setup.verbose, setup.crash_guard)) });
    let tasks = LocalSet::new();
    let hosts = Hosts::default();
    let world = World { shared: Rc::clone(&shared), hosts: Rc::clone(&hosts) };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        tasks.block_on(&runtime, run_scenario(&shared, setup.time_limit, scenario(world)))
    }));
    let took = runtime.block_on(async { shared.agenda.now() });
    let panicked = PanicCollector::first();
    let result = match (panicked, outcome) {
        (Some(panic), _) => Err(panic),
        (None, Ok(result)) => result,
        (None, Err(_)) => Err("a panic without a message".to_owned()),
    };
    let digest = shared.trace.digest();
    let result =
        result.map_err(|what| ScenarioFailure { message: what, last_events: shared.trace.tail() });
    tear_down(&shared, &hosts, tasks, &runtime);
    ScenarioOutcome { digest, duration: took, result }
}

async fn run_scenario(
    shared: &WorldInner,
    limit: Duration,
    scenario: ScenarioFuture<'_>,
) -> Result<(), String> {
    // A panic ends its task and wakes no one: check after each event, and periodically if there are
    // none.
    let panicked = || PanicCollector::first().is_some();
    let panics = async {
        while !panicked() {
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
    };
    let result = tokio::select! {
        biased;
        () = shared.failure_signal.notified() => Ok(()),
        result = scenario => result,
        () = shared.agenda.run_until(panicked) => Ok(()),
        () = panics => Ok(()),
        () = tokio::time::sleep(limit) => Err(format!("still going after {limit:?}")),
    };
    shared.failure_message.borrow_mut().take().map_or(result, Err)
}

/// Drops everything: host by host, as in a crash of all of them at once.
fn tear_down(
    shared: &Rc<WorldInner>,
    hosts: &Hosts,
    tasks: LocalSet,
    runtime: &tokio::runtime::Runtime,
) {
    let _guard = shared.crash_guard();
    let _entered = runtime.enter();
    let hosts = hosts.take();
    for state in &hosts {
        Host::new(Rc::clone(shared), Rc::clone(state)).power_cut();
    }
    drop(tasks);
    // The software may hold its own host through the scenario's handles.
    hosts.iter().for_each(|state| state.forget_software());
    shared.agenda.clear();
}
