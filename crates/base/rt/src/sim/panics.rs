//! Panics of simulated tasks: tokio keeps them in a join handle that nobody may ever look at, so a
//! failed assertion in a connection's task would pass unseen. Here every panic ends the world.

use std::cell::{Cell, RefCell};
use std::panic;
use std::sync::Once;

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static SEEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

static HOOK: Once = Once::new();

/// While it lives, panics of this thread are collected instead of printed.
pub(crate) struct Watch(());

impl Watch {
    pub(crate) fn start() -> Self {
        HOOK.call_once(|| {
            let previous = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                if WATCHED.get() {
                    SEEN.with_borrow_mut(|seen| seen.push(info.to_string()));
                } else {
                    previous(info);
                }
            }));
        });
        SEEN.with_borrow_mut(Vec::clear);
        WATCHED.set(true);
        Self(())
    }

    /// The first panic since the start.
    pub(crate) fn first() -> Option<String> {
        SEEN.with_borrow(|seen| seen.first().cloned())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHED.set(false);
    }
}
