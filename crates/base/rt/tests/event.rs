//! Events of other processes, on a real core.
#![allow(clippy::unwrap_used)]

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rt::event::Signal;
use rt::{Core, Cores, CoresConfig};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(20);
const A_WHILE: Duration = Duration::from_millis(30);

fn on_core<Fut: Future<Output = ()> + 'static>(f: impl FnOnce(Core) -> Fut + Send + 'static) {
    let cores = Cores::start(&CoresConfig::default()).unwrap();
    let wait = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let result = wait.block_on(cores.handles()[0].run(f));
    cores.stop_now();
    result.expect("the test's core panicked, see above");
}

/// What stands in for an eventfd here: a pipe is one that counts bytes.
fn pipe() -> (OwnedFd, OwnedFd) {
    let (ours, theirs) = std::io::pipe().unwrap();
    (ours.into(), theirs.into())
}

#[test]
fn an_event_is_awaited() {
    on_core(async |core| {
        let (ours, theirs) = pipe();
        let (event, signal) = (core.event(ours).unwrap(), Signal::new(theirs).unwrap());
        assert!(timeout(A_WHILE, event.given()).await.is_err(), "nobody has given it");
        let giver = std::thread::scope(|s| s.spawn(|| signal.give()).join());
        giver.unwrap();
        timeout(PATIENCE, event.given()).await.unwrap().unwrap();
        assert!(timeout(A_WHILE, event.given()).await.is_err(), "it was given once");
        drop(signal);
        let gone = timeout(PATIENCE, event.given()).await.unwrap().unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::UnexpectedEof, "and never again");
    });
}

/// A giver never waits, and whoever waits never spins.
#[test]
fn what_is_full_has_been_given() {
    on_core(async |core| {
        let (ours, theirs) = pipe();
        let signal = Signal::new(theirs).unwrap();
        (0..20_000).for_each(|_| signal.give());
        core.event(ours).unwrap().given().await.unwrap();
        let file = tempfile();
        assert_eq!(core.event(file).unwrap_err().kind(), ErrorKind::PermissionDenied);
    });
}

fn tempfile() -> OwnedFd {
    std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into()
}
