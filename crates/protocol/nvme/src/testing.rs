//! A scripted host for tests and simulations: it says what it is told to say, and checks the form
//! of what comes back. Nothing here negotiates or recovers.

mod host;

pub use host::{Reply, ScriptedHost};
