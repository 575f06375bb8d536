//! Limits the log lines about connections whose peer has not proved its identity. Anyone can open a
//! connection and claim to be any node; one log line each would let a stranger fill the log.

use std::cell::RefCell;

use rt::LogLimit;
use tokio::time::Instant;
use uuid::Uuid;

use crate::NodeId;
use crate::session::LogDedup;

/// Logs refused connections.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog(RefCell<RefusalLogInner>);

#[derive(Debug, Default)]
struct RefusalLogInner {
    said: LogDedup<NodeId, String>,
    limit: LogLimit,
}

impl RefusalLog {
    /// Logs why a connection was refused: as a warning if it names a node with a replica (`known`)
    /// and the reason is new for that node, at most as often as [`LogLimit`] allows; otherwise for
    /// debugging only.
    pub(crate) fn log(&self, volume: Uuid, node: NodeId, known: bool, why: &str) {
        match self.warning(Instant::now(), node, known, why) {
            Some(left_out) => tracing::warn!(
                %volume, others_not_logged = left_out,
                "a connection that names node {node} as its sender was refused: {why}"
            ),
            None => tracing::debug!(
                %volume, "a connection that names node {node} as its sender was refused: {why}"
            ),
        }
    }

    /// Returns whether to warn, and how many warnings were left out before this one.
    fn warning(&self, now: Instant, node: NodeId, known: bool, why: &str) -> Option<u64> {
        let RefusalLogInner { said: dedup, limit } = &mut *self.0.borrow_mut();
        (known && dedup.is_news(node, why.to_owned())).then(|| limit.try_log(now))?
    }

    /// Makes the next reason new for `node`, which has authenticated.
    pub(crate) fn forget(&self, node: NodeId) {
        self.0.borrow_mut().said.forget(&node);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// 374 kB of warnings a second were once written for HELLOs that named any node.
    #[test]
    fn an_unauthenticated_peer_cannot_fill_the_log() {
        let (log, now) = (RefusalLog::default(), Instant::now());
        let warnings = |minute: u64, known: bool| {
            let at = |n: u64| now + Duration::from_secs(60 * minute) + Duration::from_millis(n);
            let one = |n: u64| {
                let node = NodeId(u16::try_from(n % 1000).unwrap());
                log.warning(at(n), node, known, ["no response in time", "it broke"][n as usize % 2])
            };
            (0..20_000).filter_map(one).collect::<Vec<_>>()
        };
        assert_eq!(warnings(0, false), [0_u64; 0]);
        // It names a node that there is, and gives another reason each time.
        assert_eq!(warnings(1, true).len(), 10);
        let next = warnings(2, true);
        assert_eq!((next.len(), next[0]), (10, 19_990));
    }

    #[test]
    fn a_refusal_of_a_known_node_is_logged_once_until_it_was_connected() {
        let (log, now) = (RefusalLog::default(), Instant::now());
        let warns = |why| log.warning(now, NodeId(2), true, why).is_some();
        assert!(warns("another cluster") && !warns("another cluster") && warns("no answer"));
        log.forget(NodeId(2));
        assert!(warns("no answer"));
    }
}
