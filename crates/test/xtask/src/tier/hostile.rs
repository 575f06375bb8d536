//! Hostile input against a real node: whatever a client sends, or fails to read, a well-behaved
//! session gets correct answers in bounded time, and the node's memory stays bounded. All over
//! loopback.

mod attacks;
mod well_behaved_client;

use crate::{
    node::{self, Node, NodeOptions},
    run_context::RunContext,
};
use anyhow::{Context, Result, ensure};
use attacks::{ATTACKS, AttackTarget};
use std::time::{Duration, Instant};
use well_behaved_client::WellBehavedClient;

const CORES: u32 = 2;
const POOL_MIB: u64 = 32;
/// Seconds the node allows for a login, and for a client that stops in the middle of sending or
/// receiving.
const TIMEOUT_S: u64 = 2;
const CONNECTIONS: u64 = 1024;
/// What a node may need beyond its pools: its base memory (as in the footprint tier) and a little
/// for each connection.
const BASE_MIB: u64 = 64;
const CONNECTION_KIB: u64 = 80;
/// Quick attacks are repeated for this long, so that they overlap with the well-behaved client's
/// I/O.
const MIN_ATTACK_TIME: Duration = Duration::from_secs(1);
/// The longest the well-behaved client may wait for an answer; attackers and node share two cores
/// with it.
const MAX_WITNESS_LATENCY: Duration = Duration::from_secs(1);

pub(super) fn run(context: &RunContext) -> Result<()> {
    let more = format!(
        "[limits]\nconnections = {CONNECTIONS}\nlogins = {CONNECTIONS}\nlogin_timeout_s = {TIMEOUT_S}\n\
         send_timeout_s = {TIMEOUT_S}\nreceive_timeout_s = {TIMEOUT_S}\n[log]\nlevel = \"error\"\n"
    );
    let wishes = NodeOptions {
        cores: CORES,
        pool_mib: POOL_MIB,
        extra_config: &more,
        ..NodeOptions::default()
    };
    let mut node = Node::new(context, context.scratch(), "hostile", &wishes)?;
    node.start()?;
    let own = node.create("witness", "64MiB")?;
    let front = AttackTarget {
        unit: node.create("front", "1GiB")?.unit,
        nvme: node.nvme,
        timeout: Duration::from_secs(TIMEOUT_S),
    };
    let quiet = WellBehavedClient::start(&own.unit, 99)?;
    std::thread::sleep(Duration::from_secs(2));
    let quiet = quiet.end()?;
    context
        .display
        .line(&format!("  undisturbed, half of the answers take less than {:?}", quiet.median()));
    for (number, (name, attack)) in ATTACKS.iter().enumerate() {
        context.check(&format!("hostile: {name}"), || {
            let witness = WellBehavedClient::start(&own.unit, number as u64)?;
            let begun = Instant::now();
            let mut outcome = attack(&front);
            while outcome.is_ok() && begun.elapsed() < MIN_ATTACK_TIME {
                outcome = attack(&front);
            }
            let served = witness.end();
            node.alive()?;
            let line = outcome?;
            let served = served?;
            let line = format!(
                "  {line}; meanwhile {} answers for others, half below {:?}, worst {:?}",
                served.steps(),
                served.median(),
                served.worst()
            );
            context.display.line(&line);
            ensure!(served.steps() > 0, "another session had no answer at all");
            ensure!(
                served.worst() < MAX_WITNESS_LATENCY,
                "another session waited {:?}",
                served.worst()
            );
            within_bounds(context, &node)
        });
    }
    context.check("hostile: an orderly end", || {
        let log = node.log()?;
        ensure!(!log.contains("panicked"), "{}", crate::process::tail(&log));
        let status = node.stop()?;
        ensure!(status.success(), "the node ended with {status}");
        Ok(())
    });
    Ok(())
}

/// Checks the node's peak memory.
fn within_bounds(context: &RunContext, node: &Node) -> Result<()> {
    let peak = node::memory_kib(node.process()?, "VmHWM").context("the node's memory")? / 1024;
    let bound = u64::from(CORES) * POOL_MIB + BASE_MIB + CONNECTIONS * CONNECTION_KIB / 1024;
    context.display.line(&format!("  memory at its highest {peak} MiB of {bound} MiB"));
    ensure!(peak <= bound, "memory reached {peak} MiB, the bound is {bound} MiB");
    Ok(())
}
