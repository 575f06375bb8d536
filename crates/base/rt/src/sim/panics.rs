//! Panics of simulated tasks: tokio keeps them in a join handle that may never be read, so a failed
//! assertion in a connection's task would go unnoticed. Here every panic ends the world.

use std::cell::{Cell, RefCell};
use std::panic;
use std::sync::Once;

thread_local! {
    static COLLECTING: Cell<bool> = const { Cell::new(false) };
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

static HOOK: Once = Once::new();

/// While it exists, panics of this thread are collected instead of printed.
pub(crate) struct PanicCollector(());

impl PanicCollector {
    pub(crate) fn start() -> Self {
        HOOK.call_once(|| {
            let previous = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                if COLLECTING.get() {
                    PANICS.with_borrow_mut(|seen| seen.push(info.to_string()));
                } else {
                    previous(info);
                }
            }));
        });
        PANICS.with_borrow_mut(Vec::clear);
        COLLECTING.set(true);
        Self(())
    }

    /// The first panic since the start.
    pub(crate) fn first() -> Option<String> {
        PANICS.with_borrow(|seen| seen.first().cloned())
    }
}

impl Drop for PanicCollector {
    fn drop(&mut self) {
        COLLECTING.set(false);
    }
}
