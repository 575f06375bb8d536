//! What is no SCSI command, against our own target. Each test names its clause of RFC 7143.

use std::time::Duration;

use frame::Machine;
use iscsi::initiator::{
    Answer, AsyncNotification, CloseReason, Command, Config, LostRequest, Payload, Request,
};
use iscsi::pdu::{LogoutOutcome, TaskOutcome};
use iscsi::target::{self, TargetRecord};

use super::pair::{Pair, config, scsi};

const S: Duration = Duration::from_secs(1);

fn ask(request: Request) -> Command {
    Command { request, timeout: None }
}

fn pair() -> Pair {
    Pair::logged_in(config(), target::Config::default())
}

fn answer(pair: &mut Pair, request: Request) -> Answer {
    pair.call(ask(request)).outcome.expect("an answer")
}

/// RFC 7143 11.18, 11.19: pings both ways, by themselves and asked for.
#[test]
fn clause_11_18_both_sides_ping() {
    let mut pair = pair();
    assert_eq!(answer(&mut pair, Request::Ping), Answer::Pong);
    // Each side finds the other alive for as long as bytes are carried.
    for second in 1..100 {
        pair.host.on_timer(second * S);
        pair.target.on_timer(second * S);
        pair.pump(&mut || usize::MAX);
    }
    assert_eq!((pair.host.close_reason(), pair.done.len()), (None, 0));
    pair.host.on_timer(110 * S);
    assert_eq!(pair.host.close_reason(), None);
    assert!(!pair.host.output().is_empty(), "a ping");
    pair.host.on_timer(114 * S);
    assert_eq!(pair.host.close_reason(), None);
    pair.host.on_timer(115 * S);
    assert_eq!(pair.host.close_reason(), Some(CloseReason::PingTimeout));
}

/// RFC 7143 11.10, appendix C: what there is, in one answer and in several.
#[test]
fn clause_11_10_targets_are_reported() {
    for count in [1usize, 2000] {
        let host = Config { target: None, ..config() };
        let mut pair = Pair::new(host, target::Config::default());
        pair.driver.targets = (0..count)
            .map(|i| TargetRecord {
                name: format!("iqn.2026-01.com.example:{i}"),
                addresses: vec![("192.0.2.1:3260".into(), 1)],
            })
            .collect();
        pair.pump(&mut || usize::MAX);
        assert_eq!(pair.host.free_command_slots(), 0, "a discovery session is for discovery");
        let answer = answer(&mut pair, Request::Text(b"SendTargets=All\0".to_vec()));
        let Answer::Text(text) = answer else { panic!("{answer:?}") };
        let pairs: Vec<_> = iscsi::text::Pairs::of(&text).map(Result::unwrap).collect();
        assert_eq!(pairs.len(), 2 * count);
        assert_eq!(pairs[2 * count - 1], ("TargetAddress", "192.0.2.1:3260,1"));
        assert!(pair.host.submit(scsi([0; 16], Payload::None)).is_none());
    }
    let mut pair = pair();
    assert!(pair.host.submit(ask(Request::Text(vec![b'x'; 8193]))).is_none(), "too long");
    pair.host.submit(ask(Request::Text(b"SendTargets=\0".to_vec()))).unwrap();
    let second = pair.host.submit(ask(Request::Text(b"SendTargets=\0".to_vec())));
    assert!(second.is_none(), "one at a time");
}

/// RFC 7143 11.5, 4.2.3: a command is aborted, at the target, before it was sent, and when it is
/// over.
#[test]
fn clause_11_5_commands_are_aborted() {
    let target = target::Config { window: 1, ..target::Config::default() };
    let mut pair = Pair::logged_in(config(), target);
    pair.is_manual = true;
    let running = pair.host.submit(scsi([0; 16], Payload::None)).unwrap();
    let waiting = pair.host.submit(scsi([0; 16], Payload::None)).unwrap();
    pair.pump(&mut || usize::MAX);
    pair.manual.clear();
    pair.host.submit(ask(Request::Abort(waiting))).unwrap();
    pair.pump(&mut || usize::MAX);
    let ended: Vec<_> = pair.done.drain(..).map(|d| (d.tag, d.outcome)).collect();
    assert_eq!(ended[0], (waiting, Err(LostRequest::Unsent)));
    assert_eq!(ended[1].1, Ok(Answer::TaskManagement(TaskOutcome::Complete)));
    pair.is_manual = false;
    pair.host.submit(ask(Request::Abort(running))).unwrap();
    pair.pump(&mut || usize::MAX);
    let ended: Vec<_> = pair.done.drain(..).map(|d| (d.tag, d.outcome)).collect();
    assert_eq!(ended[0], (running, Err(LostRequest::Aborted)));
    assert_eq!(ended[1].1, Ok(Answer::TaskManagement(TaskOutcome::Complete)));
    let late = answer(&mut pair, Request::Abort(running));
    assert_eq!(late, Answer::TaskManagement(TaskOutcome::NoTask));
    assert!(pair.call(scsi([0; 16], Payload::None)).outcome.is_ok(), "and it goes on");
}

/// RFC 7143 11.5.1: a reset ends the commands of its unit, and no others.
#[test]
fn clause_11_5_1_a_unit_is_reset() {
    let mut pair = pair();
    pair.is_manual = true;
    let mut submit = |lun: u8| {
        let lun = [0, lun, 0, 0, 0, 0, 0, 0];
        let request = Request::Scsi { lun, cdb: [0; 16], payload: Payload::None };
        pair.host.submit(ask(request)).unwrap()
    };
    let (one, other) = (submit(1), submit(2));
    pair.pump(&mut || usize::MAX);
    pair.manual.clear();
    pair.is_manual = false;
    pair.host.submit(ask(Request::ResetUnit([0, 1, 0, 0, 0, 0, 0, 0]))).unwrap();
    pair.pump(&mut || usize::MAX);
    assert_eq!((pair.done[0].tag, pair.done[0].outcome.clone()), (one, Err(LostRequest::Aborted)));
    assert_eq!(pair.done[1].outcome, Ok(Answer::TaskManagement(TaskOutcome::Complete)));
    assert_eq!((pair.done.len(), pair.host.in_flight()), (2, 1), "{other:?} goes on");
}

/// RFC 7143 11.14: the session ends, by our wish.
#[test]
fn clause_11_14_a_logout() {
    let mut pair = pair();
    assert_eq!(answer(&mut pair, Request::Logout), Answer::Logout(LogoutOutcome::Closed));
    assert_eq!(pair.host.close_reason(), Some(CloseReason::LoggedOut));
}

/// RFC 7143 11.9.1: the target wants the session to end. What is in flight is waited for, what was
/// not sent is told so, and nothing new is taken.
#[test]
fn clause_11_9_1_the_target_asks_for_a_logout() {
    let target = target::Config { window: 1, ..target::Config::default() };
    let mut pair = Pair::logged_in(config(), target);
    pair.is_manual = true;
    let running = pair.host.submit(scsi([0; 16], Payload::None)).unwrap();
    let waiting = pair.host.submit(scsi([0; 16], Payload::None)).unwrap();
    pair.pump(&mut || usize::MAX);
    pair.target.notify(target::AsyncNotification::LogoutRequest { within_s: 5 });
    pair.pump(&mut || usize::MAX);
    assert_eq!(
        pair.host.poll_notification(),
        Some(AsyncNotification::LogoutRequest { within_s: 5 })
    );
    let ended = pair.done.pop().unwrap();
    assert_eq!((ended.tag, ended.outcome), (waiting, Err(LostRequest::Unsent)));
    assert!(!pair.host.is_open() && pair.host.free_command_slots() == 0);
    assert!(pair.host.submit(scsi([0; 16], Payload::None)).is_none());
    assert_eq!(pair.host.close_reason(), None);
    pair.is_manual = false;
    for action in std::mem::take(&mut pair.manual) {
        pair.driver.act(action, &mut pair.target);
    }
    pair.pump(&mut || usize::MAX);
    let ended = pair.done.pop().unwrap();
    assert_eq!(ended.tag, running);
    assert!(ended.outcome.is_ok() && pair.done.is_empty());
    assert_eq!(pair.host.close_reason(), Some(CloseReason::LoggedOut));
}

/// RFC 7143 11.9.1: what does not end in time is ended.
#[test]
fn clause_11_9_1_a_logout_that_takes_too_long() {
    let mut pair = pair();
    pair.is_manual = true;
    pair.host.submit(scsi([0; 16], Payload::None)).unwrap();
    pair.pump(&mut || usize::MAX);
    pair.target.notify(target::AsyncNotification::LogoutRequest { within_s: 3 });
    pair.pump(&mut || usize::MAX);
    pair.host.on_timer(2 * S);
    assert_eq!(pair.host.close_reason(), None);
    pair.host.on_timer(3 * S);
    assert_eq!(pair.host.close_reason(), Some(CloseReason::LogoutTimeout));
    assert_eq!(pair.host.poll_done().unwrap().outcome, Err(LostRequest::InDoubt));
}

/// RFC 7143 11.9: events of units, and connections that are dropped.
#[test]
fn clause_11_9_asynchronous_events() {
    let mut pair = pair();
    let lun = [0, 3, 0, 0, 0, 0, 0, 0];
    pair.target.notify(target::AsyncNotification::Scsi { lun, sense: &[0x70, 0, 6] });
    pair.pump(&mut || usize::MAX);
    let sense = [0x70, 0, 6].into();
    assert_eq!(pair.host.poll_notification(), Some(AsyncNotification::Scsi { lun, sense }));
    pair.target.notify(target::AsyncNotification::Drop { time2wait_s: 7 });
    pair.pump(&mut || usize::MAX);
    assert_eq!(pair.host.close_reason(), Some(CloseReason::DroppedByTarget { wait_s: 7 }));
}
