//! What is logged of connections that were accepted and whose other side has not proven that it is the node that it
//! names. Anybody can open them and name any node: a log line for each would let a stranger fill the log.

use std::cell::RefCell;

use rt::LogLimit;
use tokio::time::Instant;
use uuid::Uuid;

use crate::NodeId;
use crate::session::Said;

/// Connections that were refused.
#[derive(Debug, Default)]
pub(crate) struct RefusedConnections(RefCell<Inner>);

#[derive(Debug, Default)]
struct Inner {
    said: Said<NodeId, String>,
    limit: LogLimit,
}

impl RefusedConnections {
    /// Logs why one was refused. It is a warning where it names a node that has a replica (`known`) and that is news of
    /// that node, at most as often as [`LogLimit`] allows; else it is for debugging only.
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

    /// Whether there is a warning; then how many were left out before it.
    fn warning(&self, now: Instant, node: NodeId, known: bool, why: &str) -> Option<u64> {
        let Inner { said, limit } = &mut *self.0.borrow_mut();
        (known && said.is_news(node, why.to_owned())).then(|| limit.line(now))?
    }

    /// The next reason is news of `node`, which has proven itself.
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
    fn a_stranger_that_names_any_node_fills_no_log() {
        let (refused, now) = (RefusedConnections::default(), Instant::now());
        let warnings = |minute: u64, known: bool| {
            let at = |n: u64| now + Duration::from_secs(60 * minute) + Duration::from_millis(n);
            let one = |n: u64| {
                let node = NodeId(u16::try_from(n % 1000).unwrap());
                refused.warning(
                    at(n),
                    node,
                    known,
                    ["no answer in time", "it broke"][n as usize % 2],
                )
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
    fn what_keeps_a_known_node_out_is_a_warning_once_and_again_after_it_was_there() {
        let (refused, now) = (RefusedConnections::default(), Instant::now());
        let warns = |why| refused.warning(now, NodeId(2), true, why).is_some();
        assert!(warns("another cluster") && !warns("another cluster") && warns("no answer"));
        refused.forget(NodeId(2));
        assert!(warns("no answer"));
    }
}
