//! What happens to the nodes of a cluster while a guest works on a volume of theirs, when it says so.

use crate::{
    cluster::{A, B, Cluster},
    guest::Signs,
};
use anyhow::Result;
use std::ops::RangeInclusive;
use std::time::Duration;

/// How long a killed node is away.
const AWAY: Duration = Duration::from_secs(1);

/// Kills a node at each of these steps that the guest begins, in turn.
pub(super) fn of_nodes(
    cluster: &mut Cluster,
    signs: &Signs<'_>,
    mut steps: RangeInclusive<usize>,
) -> Result<()> {
    steps.try_for_each(|step| of_node(cluster, signs, step, if step % 2 == 1 { A } else { B }))
}

/// Kills a node at this step that the guest begins.
pub(super) fn of_node(
    cluster: &mut Cluster,
    signs: &Signs<'_>,
    step: usize,
    node: usize,
) -> Result<()> {
    signs.wait_for(&format!("step-{step}"))?;
    // Another moment each time.
    std::thread::sleep(Duration::from_millis(17 * (step as u64 - 1)));
    cluster.nodes[node].kill()?;
    std::thread::sleep(AWAY);
    cluster.nodes[node].start()?;
    cluster.await_safe()?;
    signs.tell(&format!("back-{step}"))
}

/// Kills all nodes at once, so many times, when the guest wants that.
pub(super) fn of_power(cluster: &mut Cluster, signs: &Signs<'_>, times: usize) -> Result<()> {
    for time in 1..=times {
        signs.wait_for(&format!("dark-{time}"))?;
        cluster.blackout(|_| Ok(()))?;
        cluster.await_safe()?;
        signs.tell(&format!("light-{time}"))?;
    }
    Ok(())
}
