//! Hostile input against a real node: whatever a client sends, or fails to read, a well-behaved session goes on with right
//! answers in bounded time, and the node's memory stays below its bound. All of it over loopback.

mod attacks;
mod witness;

use crate::{
    house::House,
    node::{self, Node, Wishes},
};
use anyhow::{Context, Result, ensure};
use attacks::{ATTACKS, Front};
use std::time::{Duration, Instant};
use witness::Witness;

const CORES: u32 = 2;
const POOL_MIB: u64 = 32;
/// Seconds the node allows for a login, and for a client that stops in the middle of sending or receiving.
const TIMEOUT_S: u64 = 2;
const CONNECTIONS: u64 = 1024;
/// What a node may need beyond its pools: itself (as in the footprint tier) and a little for each connection.
const BASE_MIB: u64 = 64;
const CONNECTION_KIB: u64 = 80;
/// Quick attacks are repeated for so long: the witness must have met them.
const AT_LEAST: Duration = Duration::from_secs(1);
/// The longest the witness may wait for one answer: attackers and node share two cores with it.
const WORST: Duration = Duration::from_secs(1);

pub(super) fn run(house: &House) -> Result<()> {
    let more = format!(
        "[limits]\nconnections = {CONNECTIONS}\nlogins = {CONNECTIONS}\nlogin_timeout_s = {TIMEOUT_S}\n\
         send_timeout_s = {TIMEOUT_S}\nreceive_timeout_s = {TIMEOUT_S}\n[log]\nlevel = \"error\"\n"
    );
    let wishes = Wishes { cores: CORES, pool_mib: POOL_MIB, more: &more, ..Wishes::default() };
    let mut node = Node::new(house, house.scratch(), "hostile", &wishes)?;
    node.start()?;
    let own = node.create("witness", "64MiB")?;
    let front = Front {
        unit: node.create("front", "1GiB")?.unit,
        nvme: node.nvme,
        timeout: Duration::from_secs(TIMEOUT_S),
    };
    let quiet = Witness::start(&own.unit, 99)?;
    std::thread::sleep(Duration::from_secs(2));
    let quiet = quiet.end()?;
    house
        .display
        .line(&format!("  undisturbed, half of the answers take less than {:?}", quiet.median()));
    for (number, (name, attack)) in ATTACKS.iter().enumerate() {
        house.check(&format!("hostile: {name}"), || {
            let witness = Witness::start(&own.unit, number as u64)?;
            let begun = Instant::now();
            let mut outcome = attack(&front);
            while outcome.is_ok() && begun.elapsed() < AT_LEAST {
                outcome = attack(&front);
            }
            let served = witness.end();
            node.alive()?;
            let told = outcome?;
            let served = served?;
            let line = format!(
                "  {told}; meanwhile {} answers for others, half below {:?}, worst {:?}",
                served.steps(),
                served.median(),
                served.worst()
            );
            house.display.line(&line);
            ensure!(served.steps() > 0, "another session had no answer at all");
            ensure!(served.worst() < WORST, "another session waited {:?}", served.worst());
            within_bounds(house, &node)
        });
    }
    house.check("hostile: an orderly end", || {
        let log = node.log()?;
        ensure!(!log.contains("panicked"), "{}", crate::process::tail(&log));
        let status = node.stop()?;
        ensure!(status.success(), "the node ended with {status}");
        Ok(())
    });
    Ok(())
}

/// The highest the node's memory has ever been.
fn within_bounds(house: &House, node: &Node) -> Result<()> {
    let peak = node::memory_kib(node.process()?, "VmHWM").context("the node's memory")? / 1024;
    let bound = u64::from(CORES) * POOL_MIB + BASE_MIB + CONNECTIONS * CONNECTION_KIB / 1024;
    house.display.line(&format!("  memory at its highest {peak} MiB of {bound} MiB"));
    ensure!(peak <= bound, "memory reached {peak} MiB, the bound is {bound} MiB");
    Ok(())
}
