//! What an idle node costs: memory with many volumes, processor time, start-up time.

use crate::{
    node::{self, Node, NodeOptions, Profile},
    run_context::RunContext,
};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

const CORES: u32 = 2;
const POOL_MIB: u64 = 32;
/// Memory beyond the buffer pools, with [`IDLE_VOLUMES`]. Counts only anonymous memory: the kernel
/// decides about the pages of the program file, and unoptimised code is half as large again.
const IDLE_LIMIT_MIB: u64 = 48;
const IDLE_VOLUMES: usize = 100;
const MANY_VOLUMES: usize = 1000;
const START_LIMIT: Duration = Duration::from_secs(5);
/// How long the idle node is watched, and the processor time that counts as idle.
const WATCH: Duration = Duration::from_secs(5);
const IDLE_TIME: Duration = Duration::from_millis(50);

pub(super) fn run(context: &RunContext) -> Result<()> {
    let wishes = NodeOptions {
        profile: Profile::Dev,
        cores: CORES,
        pool_mib: POOL_MIB,
        ..NodeOptions::default()
    };
    let mut node = Node::new(context, context.scratch(), "footprint", &wishes)?;
    node.start()?;
    for number in 0..IDLE_VOLUMES {
        node.create(&format!("v{number}"), "1GiB")?;
    }
    restart(&mut node, IDLE_VOLUMES)?;
    context.check("an idle node with 100 volumes: memory beyond the pool under 48 MiB", || {
        let process = node.process()?;
        let resident = node::memory_kib(process, "VmRSS")? / 1024;
        let made = node::memory_kib(process, "RssAnon")? / 1024;
        let beyond = made.saturating_sub(u64::from(CORES) * POOL_MIB);
        context.display.line(&format!(
            "  {resident} MiB resident, {made} of them without the program's file, {beyond} MiB beyond the pools"
        ));
        ensure!(beyond < IDLE_LIMIT_MIB, "{beyond} MiB beyond the pools");
        Ok(())
    });
    context.check("an idle node uses no processor time", || {
        let before = node::processor_time(node.process()?)?;
        std::thread::sleep(WATCH);
        let used = node::processor_time(node.process()?)?.saturating_sub(before);
        ensure!(used <= IDLE_TIME, "{} ms in {} s", used.as_millis(), WATCH.as_secs());
        Ok(())
    });
    context.display.begin_step(&format!("create {MANY_VOLUMES} volumes"));
    for number in IDLE_VOLUMES..MANY_VOLUMES {
        node.create(&format!("v{number}"), "1GiB")?;
    }
    context.check("1000 volumes are served within 5 s of the start", || {
        let took = restart(&mut node, MANY_VOLUMES)?;
        context
            .display
            .line(&format!("  {MANY_VOLUMES} volumes after {:.2} s", took.as_secs_f64()));
        ensure!(took < START_LIMIT, "{:.1} s", took.as_secs_f64());
        Ok(())
    });
    context.check("an orderly end with 1000 volumes", || {
        let status = node.stop()?;
        ensure!(status.success(), "the node ended with {status}");
        Ok(())
    });
    Ok(())
}

/// The time from the start of the process until `volumes` are online.
fn restart(node: &mut Node, volumes: usize) -> Result<Duration> {
    node.stop()?;
    let begun = Instant::now();
    node.start()?;
    while node.volumes_online()? < volumes {
        ensure!(
            begun.elapsed() < START_LIMIT * 6,
            "not all volumes came online: {}",
            node.volumes_online()?
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(begun.elapsed())
}
