//! Events of other processes, on a real core.
#![allow(clippy::unwrap_used)]

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rt::event::EventNotifier;
use rt::{Core, CoresConfig};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(20);
const A_WHILE: Duration = Duration::from_millis(30);

fn on_core<Fut: Future<Output = ()> + 'static>(f: impl FnOnce(Core) -> Fut + Send + 'static) {
    testkit::on_first_core(&CoresConfig::default(), f);
}

/// Used as an eventfd here: a pipe, which counts bytes.
fn pipe() -> (OwnedFd, OwnedFd) {
    let (ours, theirs) = std::io::pipe().unwrap();
    (ours.into(), theirs.into())
}

#[test]
fn an_event_is_awaited() {
    on_core(async |core| {
        let (ours, theirs) = pipe();
        let (event, signal) = (core.event(ours).unwrap(), EventNotifier::new(theirs).unwrap());
        assert!(timeout(A_WHILE, event.wait()).await.is_err(), "no signal was given");
        let giver = std::thread::scope(|s| s.spawn(|| signal.notify()).join());
        giver.unwrap();
        timeout(PATIENCE, event.wait()).await.unwrap().unwrap();
        assert!(timeout(A_WHILE, event.wait()).await.is_err(), "it was given once");
        drop(signal);
        let gone = timeout(PATIENCE, event.wait()).await.unwrap().unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::UnexpectedEof, "and never again");
    });
}

/// Signalling never waits, and waiting never spins.
#[test]
fn a_full_counter_counts_as_signalled() {
    on_core(async |core| {
        let (ours, theirs) = pipe();
        let signal = EventNotifier::new(theirs).unwrap();
        (0..20_000).for_each(|_| signal.notify());
        core.event(ours).unwrap().wait().await.unwrap();
        let file = tempfile();
        assert_eq!(core.event(file).unwrap_err().kind(), ErrorKind::PermissionDenied);
    });
}

fn tempfile() -> OwnedFd {
    std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into()
}
