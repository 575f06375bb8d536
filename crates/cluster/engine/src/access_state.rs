//! The access state of a mirrored volume through this node (RFD 0012, 2.6).

use std::time::Duration;

use block::Access;
use mirror::membership::NotServingReason;
use peer::NodeId;

/// A store that has not answered for so long is unreachable, and a volume not served for so long
/// has no lease. With both, this node is isolated, and other nodes have taken over by now.
const ISOLATION_TIMEOUT: Duration = Duration::from_millis(1500);

/// Shorter interruptions are not shown to initiators: a view change takes some round trips, during
/// which their commands are held.
const VIEW_CHANGE_TOLERANCE: Duration = Duration::from_millis(250);

/// Why and for how long a replica has not served.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotServing<'a> {
    /// The reason.
    pub(super) why: &'a NotServingReason,
    /// For how long; since it was opened at most.
    pub(super) not_serving_for: Duration,
    /// Whether it has served before.
    pub(super) has_served: bool,
    /// For how long a request to the store has been unanswered, if one is.
    pub(super) store_silent_for: Option<Duration>,
}

/// The access state of the volume through node `me`; `idle` is `None` while the mirror serves.
pub(super) fn access_state(me: NodeId, idle: Option<NotServing<'_>>) -> Access {
    let Some(NotServing { why, not_serving_for, has_served, store_silent_for }) = idle else {
        return Access::Optimized;
    };
    let isolated = not_serving_for >= ISOLATION_TIMEOUT
        && store_silent_for.is_some_and(|time| time >= ISOLATION_TIMEOUT);
    match why {
        NotServingReason::Refused(_)
        | NotServingReason::LegLost
        | NotServingReason::LegFailed
        | NotServingReason::OutOfSync(_)
        | NotServingReason::AwaitingExclusion(_)
        | NotServingReason::LeaseRevoked(_)
        | NotServingReason::RolledBack { .. }
        | NotServingReason::AwaitingConfigRead(_)
        | NotServingReason::AwaitingRestartedMembers(_) => Access::Unavailable,
        NotServingReason::TakeoverPending(node) if *node != me => Access::Unavailable,
        NotServingReason::ConfigUnread { .. }
        | NotServingReason::TakeoverPending(_)
        | NotServingReason::Leaving
        | NotServingReason::Reconfiguring
        | NotServingReason::Draining
        | NotServingReason::CollectingEntries(_)
        | NotServingReason::Reconciling
        | NotServingReason::AwaitingPrimary(_)
        | NotServingReason::ExcludingMembers(_)
        | NotServingReason::LeasesExpired(_) => match () {
            () if isolated => Access::Unavailable,
            () if has_served && not_serving_for < VIEW_CHANGE_TOLERANCE => Access::Optimized,
            () => Access::Transitioning,
        },
    }
}

#[cfg(test)]
mod tests {
    use block::Epoch;
    use mirror::membership::{ConfigRefusal, RollbackWitness};

    use super::*;

    const ME: NodeId = NodeId(1);
    const OTHER: NodeId = NodeId(2);

    fn told(why: &NotServingReason, since_ms: u64, unanswered_ms: Option<u64>) -> Access {
        let (since, unanswered) =
            (Duration::from_millis(since_ms), unanswered_ms.map(Duration::from_millis));
        access_state(
            ME,
            Some(NotServing {
                why,
                not_serving_for: since,
                has_served: true,
                store_silent_for: unanswered,
            }),
        )
    }

    /// Reasons after which it serves again, or knows that it does not, within the grace time.
    fn passing() -> Vec<NotServingReason> {
        vec![
            NotServingReason::ConfigUnread { store_unavailable: false },
            NotServingReason::TakeoverPending(ME),
            NotServingReason::Leaving,
            NotServingReason::Reconfiguring,
            NotServingReason::Draining,
            NotServingReason::CollectingEntries(vec![OTHER]),
            NotServingReason::Reconciling,
            NotServingReason::AwaitingPrimary(OTHER),
            NotServingReason::ExcludingMembers(vec![OTHER]),
            NotServingReason::LeasesExpired(vec![OTHER]),
        ]
    }

    #[test]
    fn who_serves_is_as_good_as_any_other() {
        assert_eq!(access_state(ME, None), Access::Optimized);
    }

    #[test]
    fn who_deliberates_is_waited_for() {
        for why in passing() {
            assert_eq!(told(&why, 250, None), Access::Transitioning, "{why:?}");
            assert_eq!(told(&why, 60_000, None), Access::Transitioning, "{why:?}");
            assert_eq!(told(&why, 60_000, Some(1499)), Access::Transitioning, "{why:?}");
        }
    }

    #[test]
    fn who_is_cut_off_from_the_store_too_is_unavailable() {
        for why in passing() {
            assert_eq!(told(&why, 1500, Some(1500)), Access::Unavailable, "{why:?}");
            assert_eq!(told(&why, 1499, Some(60_000)), Access::Transitioning, "{why:?}");
        }
        let why = &NotServingReason::LeasesExpired(vec![OTHER]);
        assert_eq!(
            told(why, 100, Some(60_000)),
            Access::Optimized,
            "its lease has only just lapsed"
        );
    }

    #[test]
    fn a_new_view_is_not_told() {
        for why in passing() {
            assert_eq!(told(&why, 249, None), Access::Optimized, "{why:?}");
            let since = Duration::from_millis(249);
            let idle = NotServing {
                why: &why,
                not_serving_for: since,
                has_served: false,
                store_silent_for: None,
            };
            assert_eq!(access_state(ME, Some(idle)), Access::Transitioning, "{why:?}");
        }
    }

    #[test]
    fn what_does_not_pass_by_itself_is_told_at_once() {
        let lasting = [
            NotServingReason::Refused(ConfigRefusal::ConfigMismatch { epoch: Epoch(1) }),
            NotServingReason::LegLost,
            NotServingReason::LegFailed,
            NotServingReason::OutOfSync(OTHER),
            NotServingReason::AwaitingExclusion(OTHER),
            NotServingReason::RolledBack { witness: RollbackWitness::Config, unheard: vec![OTHER] },
            NotServingReason::AwaitingRestartedMembers(vec![OTHER]),
            NotServingReason::AwaitingConfigRead(vec![OTHER]),
            NotServingReason::TakeoverPending(OTHER),
        ];
        for why in lasting {
            assert_eq!(told(&why, 0, None), Access::Unavailable, "{why:?}");
        }
    }
}
