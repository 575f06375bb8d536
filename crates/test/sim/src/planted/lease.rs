//! A number that two hosts count up, never both at once: the holder while it has a lease, the
//! granter once the lease must have expired. A step reads the number, does some work on the host's
//! own disk, and writes the next number; where both hosts count at once, steps are lost.

use std::cell::Cell;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use rt::Core;
use rt::disk::OpenOptions;
use rt::sim::{DiskSetup, HostFaults, HostSetup, Rng, World};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Variant;
use crate::bytes;
use crate::scenarios::storage::draw_host_faults;

const DISK: &str = "/dev/work";
const PORT: u16 = 700;

/// How long the holder has the lease, from the moment before its request, on its clock.
const LEASE_MS: u64 = 2000;

/// How long the granter waits after its last answer, on its clock.
const GRACE_MS: u64 = 3000;

/// Worst faults of either host: clocks off by a tenth, and pauses longer than any margin.
const WORST_HOST_FAULTS: HostFaults = HostFaults {
    max_drift_ppm: 100_000,
    max_drift_duration: Duration::from_secs(20),
    max_pause_interval: Duration::from_secs(10),
    max_pause_duration: Duration::from_secs(6),
};

// The granter's fast clock expires later than the holder's slow one.
const _: () = assert!(GRACE_MS * (10 - 1) > LEASE_MS * (10 + 1));

/// Correct or mistaken handling of the lease.
#[derive(Clone, Copy, Debug)]
struct LeaseRules {
    checks_lease_after_work: bool,
    grace: Duration,
}

impl LeaseRules {
    const CORRECT: Self =
        Self { checks_lease_after_work: true, grace: Duration::from_millis(GRACE_MS) };
}

/// The number, and its expected value. It does no fencing. Between a look at the clock and a step
/// no time passes in a simulation.
#[derive(Debug, Default)]
struct Counter {
    number: Cell<u64>,
    steps: Cell<u64>,
}

/// The holder checks its lease only before the work.
pub(super) async fn checks_lease_before_work_only(
    world: World,
    variant: Variant,
) -> Result<(), String> {
    let looks_after_work = variant == Variant::Correct;
    run(world, LeaseRules { checks_lease_after_work: looks_after_work, ..LeaseRules::CORRECT })
        .await
}

/// The granter waits for the length of the lease, as if its clock were the holder's.
pub(super) async fn ignores_drift(world: World, variant: Variant) -> Result<(), String> {
    let grace = match variant {
        Variant::Correct => LeaseRules::CORRECT.grace,
        Variant::Mistaken => Duration::from_millis(LEASE_MS),
    };
    run(world, LeaseRules { grace, ..LeaseRules::CORRECT }).await
}

async fn run(world: World, rules: LeaseRules) -> Result<(), String> {
    let hosts = ["holder", "granter"].map(|n| world.add_host(n, HostSetup::default()));
    let rng = Rng::new(world.seed(), "host faults");
    for host in &hosts {
        host.add_disk(DISK, DiskSetup::device(1 << 20));
        host.set_faults(draw_host_faults(&rng, WORST_HOST_FAULTS));
    }
    let board = Rc::new(Counter::default());
    let [holder, granter] = &hosts;
    let (dice, shared) = (world.clone(), Rc::clone(&board));
    granter.start(move |core| run_granter(core, dice.clone(), Rc::clone(&shared), rules));
    let (to, shared) = (SocketAddr::new(granter.address(), PORT), Rc::clone(&board));
    holder.start(move |core| run_holder(core, to, Rc::clone(&shared), rules));

    let seconds = Duration::from_secs;
    tokio::time::sleep(world.rng().duration_between(seconds(1), seconds(10))).await;
    if world.rng().chance(0.7) {
        world.partition(holder, granter);
    }
    tokio::time::sleep(world.rng().duration_between(seconds(5), seconds(15))).await;
    let (number, steps) = (board.number.get(), board.steps.get());
    world.note(format!("{steps} steps, and the number is {number}"));
    if number != steps {
        return Err(format!("both counted at once: {steps} steps, and the number is {number}"));
    }
    if steps == 0 {
        return Err("neither counted".into());
    }
    Ok(())
}

/// Counts whenever `may` allows it.
async fn count(
    core: &Core,
    board: &Counter,
    looks_after_work: bool,
    may: impl Fn() -> bool,
) -> Result<(), String> {
    let disk = core.open_disk(Path::new(DISK), OpenOptions::new()).await;
    let disk = disk.map_err(|e| e.to_string())?;
    loop {
        if !may() {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        }
        let seen = board.number.get();
        bytes::write(core, &disk, 0, &[7; 4096]).await.map_err(|e| e.to_string())?;
        if !looks_after_work || may() {
            board.number.set(seen + 1);
            board.steps.set(board.steps.get() + 1);
        }
    }
}

/// The holder.
async fn run_holder(
    core: Core,
    granter: SocketAddr,
    board: Rc<Counter>,
    rules: LeaseRules,
) -> Result<(), String> {
    let fresh_until = Rc::new(Cell::new(Duration::ZERO));
    tokio::task::spawn_local(renew(core.clone(), granter, Rc::clone(&fresh_until)));
    let fresh = || core.now() < fresh_until.get();
    count(&core, &board, rules.checks_lease_after_work, fresh).await
}

async fn renew(core: Core, granter: SocketAddr, fresh_until: Rc<Cell<Duration>>) {
    let lease = Duration::from_millis(LEASE_MS);
    loop {
        let Ok(mut stream) = core.dial(granter).await else { continue };
        loop {
            // Measured before the request, so a late answer shortens the lease.
            let asked = core.now();
            if stream.write_u8(0).await.is_err() || stream.read_u8().await.is_err() {
                break;
            }
            fresh_until.set(asked + lease);
            core.sleep(lease / 4).await;
        }
    }
}

/// The granter.
async fn run_granter(
    core: Core,
    world: World,
    board: Rc<Counter>,
    rules: LeaseRules,
) -> Result<(), String> {
    let promised = Rc::new(Cell::new(Some(core.now() + rules.grace)));
    let at = SocketAddr::from(([0, 0, 0, 0], PORT));
    let listener = core.listen(at).await.map_err(|e| e.to_string())?;
    let (ours, theirs) = (core.clone(), Rc::clone(&promised));
    tokio::task::spawn_local(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            while stream.read_u8().await.is_ok() && theirs.get().is_some() {
                theirs.set(Some(ours.now() + rules.grace));
                if stream.write_u8(0).await.is_err() {
                    break;
                }
            }
        }
    });
    // The lease may have been renewed during the wait.
    while let Some(until) = promised.get() {
        core.sleep_until(until).await;
        if promised.get().is_some_and(|until| until <= core.now()) {
            promised.set(None);
        }
    }
    world.note("the granter takes over");
    count(&core, &board, rules.checks_lease_after_work, || true).await
}
