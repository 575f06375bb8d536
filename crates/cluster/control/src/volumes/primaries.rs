//! Spreads the primary role: hands primaries over to the nodes that operators prefer, or that lead
//! fewer volumes.

use std::collections::BTreeMap;
use std::time::Duration;

use peer::NodeId;
use uuid::Uuid;

use super::VolumeControl;

/// A node that has just started waits for others to return before it hands over primaries.
const REBALANCE_DELAY: Duration = Duration::from_secs(60);

/// A volume with its primary on this node.
#[derive(Clone, Debug)]
struct LedVolume {
    volume: Uuid,
    /// The other in-sync nodes that could be primary.
    candidates: Vec<NodeId>,
    /// The node that an operator prefers.
    preferred_primary: Option<NodeId>,
}

impl VolumeControl {
    /// Hands over one primary, if an operator prefers another node or another node leads far fewer.
    pub(crate) async fn rebalance_primaries(&self) {
        let Some(joined) = self.joined_cluster() else { return };
        let me = joined.node;
        let eligible = |node: NodeId| {
            let nodes = joined.nodes.borrow();
            nodes.get(&node).is_some_and(|n| n.is_alive && !n.record.is_drained)
        };
        let mut loads = BTreeMap::<NodeId, usize>::new();
        let mut led = Vec::new();
        for volume in self.0.context.volumes.open_volumes(me) {
            let Some((mirror, _)) = volume.mirror else { continue };
            *loads.entry(mirror.primary).or_default() += 1;
            if mirror.primary == me {
                let candidates =
                    mirror.others(me).map(|m| m.node).filter(|n| eligible(*n)).collect();
                let (volume, prefer) =
                    (volume.stored.record.id, volume.stored.record.preferred_primary);
                led.push(LedVolume { volume, candidates, preferred_primary: prefer });
            }
        }
        let balance = self.0.context.started.elapsed() >= REBALANCE_DELAY;
        for (volume, target) in plan_handovers(me, &led, &loads, balance) {
            if let Err(error) = self.0.context.engine.switch_primary(volume, target).await {
                tracing::info!(%volume, node = %target, %error, "primary handover failed");
            }
        }
    }
}

/// The primaries to hand over, and to which node: all that an operator prefers elsewhere, and if
/// `balance` one that goes to a node which leads at least two fewer.
fn plan_handovers(
    me: NodeId,
    led: &[LedVolume],
    loads: &BTreeMap<NodeId, usize>,
    balance: bool,
) -> Vec<(Uuid, NodeId)> {
    let wanted = led.iter().filter_map(|l| {
        let target =
            l.preferred_primary.filter(|node| *node != me && l.candidates.contains(node))?;
        Some((l.volume, target))
    });
    let mut all: Vec<_> = wanted.collect();
    let load = |node: &NodeId| loads.get(node).copied().unwrap_or(0);
    let movable = led.iter().filter(|l| l.preferred_primary.is_none());
    let best = movable
        .flat_map(|l| l.candidates.iter().map(move |target| (l.volume, *target)))
        .filter(|(_, target)| load(target) + 2 <= load(&me))
        .min_by_key(|(_, target)| load(target));
    all.extend(best.filter(|_| balance));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    fn led(volume: u128, heirs: &[NodeId], prefer: Option<NodeId>) -> LedVolume {
        LedVolume {
            volume: Uuid::from_u128(volume),
            candidates: heirs.to_vec(),
            preferred_primary: prefer,
        }
    }

    #[test]
    fn one_volume_goes_to_a_node_that_leads_far_fewer() {
        let all = [led(1, &[B], None), led(2, &[B, C], None)];
        let two = Uuid::from_u128(2);
        assert_eq!(plan_handovers(ME, &all, &[(ME, 2), (B, 1)].into(), true), [(two, C)]);
        assert_eq!(plan_handovers(ME, &all, &[(ME, 2), (B, 1), (C, 1)].into(), true), []);
        assert_eq!(plan_handovers(ME, &all, &[(ME, 2), (B, 1)].into(), false), []);
    }

    #[test]
    fn what_an_operator_wants_goes_first_and_stays() {
        let one = Uuid::from_u128(1);
        let even = [(ME, 1), (B, 1)].into();
        assert_eq!(plan_handovers(ME, &[led(1, &[B], Some(B))], &even, false), [(one, B)]);
        assert_eq!(
            plan_handovers(ME, &[led(1, &[C], Some(B))], &even, true),
            [],
            "it is not in sync"
        );
        let heavy = [(ME, 9), (B, 1)].into();
        assert_eq!(plan_handovers(ME, &[led(1, &[B], Some(ME))], &heavy, true), []);
    }
}
