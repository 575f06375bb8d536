//! Report requests: how a node asks others how many initiators use a volume through them now.
//!
//! A report is written when it has changed, so its age is unknown. A node that needs a fresh one
//! writes a request, `questions/ID`; the other node looks again and names the request in its
//! report. Such a report is as fresh as the node's own state.

use std::sync::Arc;
use std::time::Duration;

use cluster::store::{Change, Precondition, Revision, StoreError};
use peer::NodeId;
use status::report;

use crate::context::Context;

/// Pause before the store is asked again after a failure.
const STORE_RETRY_PAUSE: Duration = Duration::from_secs(1);

impl Context {
    /// Receives report requests to this node, for as long as it runs.
    pub(crate) async fn watch_report_requests(self: Arc<Self>) {
        let key = report::report_request_key(self.this_node());
        let received = |at: Revision| {
            self.last_report_request.send_if_modified(|last| {
                let new = at.0 > *last;
                *last = at.0.max(*last);
                new
            });
        };
        loop {
            if let Ok((entries, revision)) = self.meta.list(&key).await {
                entries.iter().filter(|e| e.key == key).for_each(|e| received(e.revision));
                let mut watch = self.meta.watch(&key, revision);
                while let Ok(event) = watch.next_event().await {
                    // The prefix also matches other nodes: node 10 for node 1.
                    if event.key == key {
                        received(event.revision);
                    }
                }
            }
            tokio::time::sleep(STORE_RETRY_PAUSE).await;
        }
    }

    /// Requests fresh reports from nodes; returns the revision that their reports have to name.
    pub(crate) async fn request_reports(&self, nodes: &[NodeId]) -> Result<Revision, StoreError> {
        loop {
            let mut changes = Vec::new();
            for node in nodes {
                let key = report::report_request_key(*node);
                let current = self.meta.get(&key).await?;
                let expect =
                    current.map_or(Precondition::Absent, |e| Precondition::AtRevision(e.revision));
                changes.push(Change { key, precondition: expect, value: Some(Vec::new()) });
            }
            match self.meta.commit(changes).await {
                // Another request was written at the same time.
                Err(StoreError::Conflict { .. }) => {}
                request => return request,
            }
        }
    }
}
