//! How a mirrored volume is to be used through this node (RFD 0012, 2.6).

use std::time::Duration;

use block::Access;
use mirror::member::Why;
use peer::NodeId;

/// A store that has not answered for so long is away, and a volume that has not been served for so
/// long has no lease: this node is the one that is cut off, and the others go on by now.
const CUT_OFF: Duration = Duration::from_millis(1500);

/// Initiators are not told of what is over sooner: a new view takes some round trips, and their
/// commands are held meanwhile.
const BLINK: Duration = Duration::from_millis(250);

/// What a replica that does not serve says of itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle<'a> {
    /// Why it does not.
    pub(super) why: &'a Why,
    /// For how long it has not, since it was opened at most.
    pub(super) since: Duration,
    /// Whether it has served before.
    pub(super) has_served: bool,
    /// How long the store has left a question unanswered, if it has.
    pub(super) unanswered: Option<Duration>,
}

/// How the volume is to be used through node `me`; `idle` is nothing while the mirror serves.
pub(super) fn access(me: NodeId, idle: Option<Idle<'_>>) -> Access {
    let Some(Idle { why, since, has_served, unanswered }) = idle else {
        return Access::Optimized;
    };
    let cut_off = since >= CUT_OFF && unanswered.is_some_and(|time| time >= CUT_OFF);
    match why {
        Why::Refused(_)
        | Why::LegDead
        | Why::LegFailed
        | Why::Outside(_)
        | Why::Returned(_)
        | Why::Yielded(_)
        | Why::SetBack { .. }
        | Why::Mute(_)
        | Why::Blackout(_) => Access::Unavailable,
        Why::Leads(node) if *node != me => Access::Unavailable,
        Why::Unread { .. }
        | Why::Leads(_)
        | Why::Leaving
        | Why::Changing
        | Why::Draining
        | Why::Gathering(_)
        | Why::Settling
        | Why::Open(_)
        | Why::Deciding(_)
        | Why::Lease(_) => match () {
            () if cut_off => Access::Unavailable,
            () if has_served && since < BLINK => Access::Optimized,
            () => Access::Transitioning,
        },
    }
}

#[cfg(test)]
mod tests {
    use block::Epoch;
    use mirror::member::{Refusal, SetBack};

    use super::*;

    const ME: NodeId = NodeId(1);
    const OTHER: NodeId = NodeId(2);

    fn told(why: &Why, since_ms: u64, unanswered_ms: Option<u64>) -> Access {
        let (since, unanswered) =
            (Duration::from_millis(since_ms), unanswered_ms.map(Duration::from_millis));
        access(ME, Some(Idle { why, since, has_served: true, unanswered }))
    }

    /// Those after which it serves again, or knows that it does not, within the grace time.
    fn passing() -> Vec<Why> {
        vec![
            Why::Unread { away: false },
            Why::Leads(ME),
            Why::Leaving,
            Why::Changing,
            Why::Draining,
            Why::Gathering(vec![OTHER]),
            Why::Settling,
            Why::Open(OTHER),
            Why::Deciding(vec![OTHER]),
            Why::Lease(vec![OTHER]),
        ]
    }

    #[test]
    fn who_serves_is_as_good_as_any_other() {
        assert_eq!(access(ME, None), Access::Optimized);
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
        let why = &Why::Lease(vec![OTHER]);
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
            let idle = Idle { why: &why, since, has_served: false, unanswered: None };
            assert_eq!(access(ME, Some(idle)), Access::Transitioning, "{why:?}");
        }
    }

    #[test]
    fn what_does_not_pass_by_itself_is_told_at_once() {
        let lasting = [
            Why::Refused(Refusal::OtherConfig { epoch: Epoch(1) }),
            Why::LegDead,
            Why::LegFailed,
            Why::Outside(OTHER),
            Why::Returned(OTHER),
            Why::SetBack { by: SetBack::Record, silent: vec![OTHER] },
            Why::Blackout(vec![OTHER]),
            Why::Mute(vec![OTHER]),
            Why::Leads(OTHER),
        ];
        for why in lasting {
            assert_eq!(told(&why, 0, None), Access::Unavailable, "{why:?}");
        }
    }
}
