//! What a volume with reservations has: its gate, and what reading and changing the table needs.

use std::fmt;
use std::rc::Rc;

use block::Account;
use tokio_util::task::AbortOnDropHandle;

use crate::reservation_gate::ReservationGate;

/// State of a volume with reservations.
pub(crate) struct ReservationState {
    pub(crate) gate: Rc<ReservationGate>,
    pub(crate) account: Account,
    /// One change at a time.
    pub(crate) change_lock: tokio::sync::Mutex<()>,
    pub(crate) _task: AbortOnDropHandle<()>,
}

impl fmt::Debug for ReservationState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.gate.fmt(f)
    }
}

impl Drop for ReservationState {
    fn drop(&mut self) {
        // The source may hold a reference to the owner of the gate.
        self.gate.clear_context_source();
    }
}
