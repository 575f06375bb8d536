//! Everything that is neither login nor SCSI command: task management, pings, text, logout,
//! asynchronous messages, silence (RFC 7143 4.2.3, 11.5, 11.6, 11.9 to 11.11, 11.14, 11.15,
//! 11.18, 11.19).

use iscsi::pdu::{LoginStage, NO_TAG, Opcode, ScsiCommand, TaskFunction, TaskOutcome};
use iscsi::target::{
    Action, AsyncNotification, CloseReason, CommandOutcome, Config, Connection, RequestId, Tag,
    TargetRecord,
};
use iscsi::testing::{Harness, Pdu};

fn lab() -> Harness {
    Harness::logged_in(Config::default(), &[])
}

fn manual() -> Harness {
    Harness { manual: true, ..lab() }
}

/// A command that runs; its tag and its initiator task tag.
fn running(lab: &mut Harness, lun: u8) -> (Tag, u32) {
    let mut header = lab.initiator.command_header(&[0], 0, 0);
    header.lun[1] = lun;
    let command = lab.initiator.frame(header.as_bytes(), &[]);
    assert!(lab.say(&command).is_empty());
    let Action::CommandArrived(a) = lab.action() else { panic!("nothing arrived") };
    lab.target.admit(a.tag, 0);
    assert!(matches!(lab.action(), Action::Run { .. }));
    (a.tag, header.itt.get())
}

fn outcome(got: &[Pdu]) -> u8 {
    assert_eq!((got.len(), got[0].opcode()), (1, Opcode::TaskResponse), "{got:?}");
    assert_eq!(got[0].header[1], 0x80);
    got[0].header[2]
}

fn aborts(lab: &mut Harness) -> Vec<Tag> {
    lab.actions
        .drain(..)
        .map(|a| match a {
            Action::Abort { tag } => tag,
            other => panic!("{other:?}"),
        })
        .collect()
}

/// RFC 7143 11.5.1: the response comes when the task has ended, and the task gets none.
#[test]
fn clause_11_5_1_abort_task() {
    let mut lab = manual();
    let (tag, itt) = running(&mut lab, 1);
    let request = lab.initiator.task(TaskFunction::AbortTask, itt, 1);
    assert!(lab.say(&request).is_empty());
    assert_eq!(aborts(&mut lab), [tag]);
    lab.target.complete(tag, &CommandOutcome::default());
    let got = lab.pump();
    assert_eq!(outcome(&got), 0);
    assert_eq!(got[0].itt(), itt + 1);
    assert_eq!(lab.target.outstanding(), 0);
    assert_eq!(got[0].word(32), 2 + 127, "its place in the window is free");
}

/// RFC 7143 11.6.1: tasks that are not there.
#[test]
fn clause_11_6_1_abort_task_without_a_task() {
    let mut lab = lab();
    let command = lab.initiator.command(&[0], 0, 0, &[]);
    lab.say(&command);
    let request = lab.initiator.task(TaskFunction::AbortTask, 0x10, 1);
    assert_eq!(outcome(&lab.say(&request)), 1, "it has ended: outside the window");
    // A command that never came.
    lab.initiator.cmd_sn += 1;
    let request = lab.initiator.task(TaskFunction::AbortTask, 0x55, 2);
    let got = lab.say(&request);
    assert_eq!((outcome(&got), got[0].word(28)), (0, 3), "its number counts as received");
    let request = lab.initiator.task(TaskFunction::AbortTask, 0x55, 3);
    assert_eq!(outcome(&lab.say(&request)), 1, "not before this request");
    let next = lab.initiator.command(&[0], 0, 0, &[]);
    assert_eq!(lab.say(&next).len(), 1);
}

/// RFC 7143 4.2.3.2: which tasks are affected. The response waits for them and for the driver.
#[test]
fn clause_4_2_3_2_functions_affect_their_tasks() {
    for (function, all) in [
        (TaskFunction::AbortTaskSet, false),
        (TaskFunction::ClearTaskSet, false),
        (TaskFunction::LogicalUnitReset, false),
        (TaskFunction::TargetWarmReset, true),
    ] {
        for driver_first in [false, true] {
            let mut lab = manual();
            let (a, _) = running(&mut lab, 1);
            let (b, _) = running(&mut lab, 2);
            let (c, _) = running(&mut lab, 1);
            let request = lab.initiator.task(function, NO_TAG, 0);
            lab.say(&request);
            let Action::TaskManagement { id, function: f, lun } = lab.actions.remove(0) else {
                panic!("{:?}", lab.actions)
            };
            assert_eq!((f, lun), (function, [0, 1, 0, 0, 0, 0, 0, 0]));
            let affected = if all { vec![a, b, c] } else { vec![a, c] };
            assert_eq!(aborts(&mut lab), affected);
            if driver_first {
                lab.target.task_management_done(id, TaskOutcome::Complete);
            }
            for tag in &affected {
                assert!(lab.pump().is_empty());
                lab.target.complete(*tag, &CommandOutcome::default());
            }
            if !driver_first {
                assert!(lab.pump().is_empty());
                lab.target.task_management_done(id, TaskOutcome::Complete);
            }
            assert_eq!(outcome(&lab.pump()), 0);
            if !all {
                lab.target.complete(b, &CommandOutcome::default());
                assert_eq!(lab.pump()[0].opcode(), Opcode::ScsiResponse);
            }
        }
    }
}

/// RFC 7143 11.6.1: the driver's outcome is the response.
#[test]
fn clause_11_6_1_the_driver_reports_the_outcome() {
    let mut lab = manual();
    for expect in [TaskOutcome::NoLun, TaskOutcome::Unauthorized, TaskOutcome::Rejected] {
        let request = lab.initiator.task(TaskFunction::LogicalUnitReset, NO_TAG, 0);
        lab.say(&request);
        let Action::TaskManagement { id, .. } = lab.action() else { panic!("not asked") };
        lab.target.task_management_done(id, expect);
        assert_eq!(outcome(&lab.pump()), expect.0);
        lab.target.task_management_done(id, expect);
        assert!(lab.pump().is_empty(), "once");
    }
    lab.target.task_management_done(RequestId(200), TaskOutcome::Complete);
}

/// RFC 7143 11.6.1: what is not supported.
#[test]
fn clause_11_6_1_unsupported_functions() {
    let mut lab = lab();
    for (function, expect) in
        [(TaskFunction::TaskReassign, 4), (TaskFunction::ClearAca, 5), (TaskFunction(0x33), 5)]
    {
        let request = lab.initiator.task(function, 0x10, 1);
        assert_eq!(outcome(&lab.say(&request)), expect);
    }
}

/// RFC 7143 11.5.1: a cold reset ends the session, after its response.
#[test]
fn clause_11_5_1_a_cold_reset_ends_the_session() {
    let mut lab = lab();
    let request = lab.initiator.task(TaskFunction::TargetColdReset, NO_TAG, 0);
    assert_eq!(outcome(&lab.say(&request)), 0);
    assert_eq!(lab.closed, Some(CloseReason::Reset));
}

/// A task that several requests wait for ends for all of them.
#[test]
fn clause_4_2_3_requests_may_overlap() {
    let mut lab = manual();
    let (tag, itt) = running(&mut lab, 1);
    let abort = lab.initiator.task(TaskFunction::AbortTask, itt, 1);
    lab.say(&abort);
    let reset = lab.initiator.task(TaskFunction::LogicalUnitReset, NO_TAG, 0);
    lab.say(&reset);
    let Some(Action::TaskManagement { id, .. }) = lab.actions.pop() else { panic!("not asked") };
    assert_eq!(aborts(&mut lab), [tag], "told once");
    lab.target.task_management_done(id, TaskOutcome::Complete);
    lab.target.complete(tag, &CommandOutcome::default());
    let got = lab.pump();
    assert_eq!(got.iter().map(Pdu::itt).collect::<Vec<_>>(), [itt + 1, itt + 2]);
}

/// RFC 7143 11.17.1: requests that wait are bounded.
#[test]
fn clause_11_17_1_waiting_requests_are_bounded() {
    let mut lab = manual();
    for _ in 0..8 {
        let request = lab.initiator.task(TaskFunction::LogicalUnitReset, NO_TAG, 0);
        assert!(lab.say(&request).is_empty());
    }
    let request = lab.initiator.task(TaskFunction::LogicalUnitReset, NO_TAG, 0);
    let got = lab.say(&request);
    assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, 0x06));
}

/// RFC 7143 4.2.3.3: a write is aborted while its data is on its way; late data is dropped.
#[test]
fn clause_4_2_3_3_a_write_is_aborted_half_way() {
    let mut lab = manual();
    let cdb = [0x2a, 0, 0, 0, 0, 1, 0, 0, 4, 0];
    let write = lab.initiator.command(&cdb, ScsiCommand::WRITE, 2048, &[]);
    lab.say(&write);
    let Action::CommandArrived(a) = lab.action() else { panic!("nothing arrived") };
    lab.target.admit(a.tag, 2048);
    let Action::Grant { tag, bytes, .. } = lab.action() else { panic!("no grant") };
    lab.target.grant(tag, lab.driver.memory(bytes));
    let ttt = lab.pump()[0].word(20);
    let abort = lab.initiator.task(TaskFunction::AbortTask, 0x10, 1);
    lab.say(&abort);
    assert_eq!(aborts(&mut lab), [tag]);
    lab.target.complete(tag, &CommandOutcome::status(0x40, &[]));
    assert_eq!(outcome(&lab.pump()), 0);
    let data = lab.initiator.data_out(0x10, ttt, 0, 0, true, &[1; 2048]);
    assert!(lab.say(&data).is_empty());
}

/// RFC 7143 11.18 and 11.19: a ping is answered with its data.
#[test]
fn clause_11_18_pings_are_answered() {
    let mut lab = lab();
    let ping = lab.initiator.ping(b"0123456789abc");
    let got = lab.say(&ping);
    assert_eq!(got[0].header[..8], [0x20, 0x80, 0, 0, 0, 0, 0, 13]);
    assert_eq!(
        (got[0].itt(), got[0].word(20), &got[0].data[..]),
        (0x10, NO_TAG, &b"0123456789abc"[..])
    );
    let long = vec![5; 20_000];
    let ping = lab.initiator.ping(&long);
    assert_eq!(lab.say(&ping)[0].data, long[..8192], "as much as the initiator takes");
    let silent = lab.initiator.pong(NO_TAG);
    assert!(lab.say(&silent).is_empty(), "no answer is wanted");
}

/// RFC 7143 11.18.1: a ping with a number takes its place in the order.
#[test]
fn clause_11_18_numbered_pings_keep_the_order() {
    let mut lab = lab();
    let mut ping = lab.initiator.ping(b"");
    ping[0] = 0;
    assert_eq!(lab.say(&ping)[0].word(28), 2);
    assert!(lab.say(&ping).is_empty(), "a duplicate");
}

/// RFC 7143 11.19.2: silence is broken by a ping, and ends the connection if it lasts.
#[test]
fn clause_11_19_the_target_pings() {
    let mut lab = lab();
    assert!(lab.wait(9).is_empty());
    let got = lab.wait(1);
    assert_eq!((got[0].opcode(), got[0].itt()), (Opcode::NopIn, NO_TAG));
    let ttt = got[0].word(20);
    assert_ne!(ttt, NO_TAG);
    assert!(lab.wait(14).is_empty());
    let pong = lab.initiator.pong(ttt);
    assert!(lab.say(&pong).is_empty());
    assert_eq!(lab.wait(10).len(), 1);
    lab.wait(15);
    assert_eq!(lab.closed, Some(CloseReason::PingTimeout));
}

/// Half a PDU and then silence.
#[test]
fn half_a_pdu_does_not_wait_for_ever() {
    let config = Config { ping_timeout: std::time::Duration::from_secs(60), ..Config::default() };
    for cut in [1, 47, 48 + 10] {
        let mut lab = Harness::logged_in(config.clone(), &[]);
        let ping = lab.initiator.ping(&[1; 100]);
        assert_eq!(lab.feed(&ping[..cut]), 0);
        lab.wait(29);
        assert_eq!(lab.closed, None);
        lab.wait(1);
        assert_eq!(lab.closed, Some(CloseReason::ReceiveTimeout));
    }
}

/// Silence is not the initiator's fault while the target does not listen.
#[test]
fn waiting_for_memory_is_not_silence() {
    let mut lab = manual();
    let cdb = [0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0];
    let write = lab.initiator.command(&cdb, ScsiCommand::WRITE, 512, &[9; 512]);
    assert_eq!(lab.feed(&write), 512);
    let Action::CommandArrived(a) = lab.action() else { panic!("nothing arrived") };
    lab.target.admit(a.tag, 512);
    for _ in 0..100 {
        assert!(lab.wait(10).is_empty());
    }
    let Action::Grant { tag, bytes, .. } = lab.action() else { panic!("no grant") };
    lab.target.grant(tag, lab.driver.memory(bytes));
    assert_eq!(lab.feed(&write[48..]), 0);
    assert!(matches!(lab.action(), Action::Run { .. }));
}

fn discovery(targets: usize, keys: &[(&str, &str)]) -> Harness {
    let mut lab = Harness::default();
    lab.driver.targets = (0..targets)
        .map(|i| TargetRecord {
            name: format!("iqn.2026-01.com.example:disk-{i}"),
            addresses: vec![("192.0.2.1:3260".into(), 1), ("[2001:db8::1]:3260".into(), 2)],
        })
        .collect();
    let mut pairs =
        vec![("InitiatorName", "iqn.2026-01.com.example:host"), ("SessionType", "Discovery")];
    pairs.extend(keys);
    let login = lab.initiator.login(LoginStage::Operational, Some(LoginStage::FullFeature), &pairs);
    assert_eq!(lab.say(&login)[0].header[1], 0x87);
    lab
}

/// RFC 7143 13.3 and appendix C: all targets, or one.
#[test]
fn clause_13_3_send_targets() {
    let mut lab = discovery(2, &[]);
    let request = lab.initiator.text(NO_TAG, &[("SendTargets", "All")]);
    let got = lab.say(&request);
    assert_eq!((got.len(), got[0].header[1], got[0].word(20)), (1, 0x80, NO_TAG));
    let expect = "TargetName=iqn.2026-01.com.example:disk-0\0TargetAddress=192.0.2.1:3260,1\0\
        TargetAddress=[2001:db8::1]:3260,2\0TargetName=iqn.2026-01.com.example:disk-1\0\
        TargetAddress=192.0.2.1:3260,1\0TargetAddress=[2001:db8::1]:3260,2\0";
    assert_eq!(String::from_utf8_lossy(&got[0].data), expect);
    let one = [("SendTargets", "IQN.2026-01.com.example:disk-1")];
    let request = lab.initiator.text(NO_TAG, &one);
    assert_eq!(lab.say(&request)[0].text().len(), 3);
    let request = lab.initiator.text(NO_TAG, &[("SendTargets", "")]);
    assert_eq!(lab.say(&request)[0].data, b"SendTargets=Reject\0");
}

/// RFC 7143 13.3: a normal session may ask about its own target.
#[test]
fn clause_13_3_send_targets_in_a_normal_session() {
    let mut lab = lab();
    let addresses = vec![("192.0.2.1:3260".into(), 1)];
    lab.driver.targets =
        vec![TargetRecord { name: "iqn.2026-01.com.example:disk".into(), addresses }];
    let request = lab.initiator.text(NO_TAG, &[("SendTargets", "")]);
    assert_eq!(lab.say(&request)[0].text().len(), 2);
    let request = lab.initiator.text(NO_TAG, &[("SendTargets", "All")]);
    assert_eq!(lab.say(&request)[0].data, b"SendTargets=Reject\0");
}

/// RFC 7143 11.11 and 6.2: a long answer comes in parts, which the initiator asks for.
#[test]
fn clause_11_11_long_answers_come_in_parts() {
    let mut lab = discovery(100, &[("MaxRecvDataSegmentLength", "1000")]);
    let request = lab.initiator.text(NO_TAG, &[("SendTargets", "All")]);
    let mut got = lab.say(&request);
    let mut all = Vec::new();
    while got[0].header[1] != 0x80 {
        assert_eq!((got.len(), got[0].header[1], got[0].data.len()), (1, 0x40, 1000));
        all.extend(&got[0].data);
        let more = lab.initiator.text(got[0].word(20), &[]);
        got = lab.say(&more);
    }
    all.extend(&got[0].data);
    let names = all.split(|&b| b == 0).filter(|t| t.starts_with(b"TargetName=")).count();
    assert_eq!(names, 100);
}

/// RFC 7143 11.10: a long request comes in parts as well.
#[test]
fn clause_11_10_long_requests_come_in_parts() {
    let mut lab = discovery(1, &[]);
    let mut header = lab.initiator.text_header(NO_TAG);
    header.flags = 0x40;
    let part = lab.initiator.frame(header.as_bytes(), b"SendTarg");
    let got = lab.say(&part);
    assert_eq!((got[0].header[1], got[0].data.len()), (0x00, 0));
    let mut header = lab.initiator.text_header(got[0].word(20));
    header.flags = 0x80;
    let rest = lab.initiator.frame(header.as_bytes(), b"ets=All\0");
    let got = lab.say(&rest);
    assert_eq!((got[0].header[1], got[0].text().len()), (0x80, 3));
}

/// RFC 7143 11.10.4 and 11.17.1: exchanges that are not there, text that makes no sense.
#[test]
fn clause_11_10_malformed_text_requests_are_rejected() {
    let mut lab = discovery(1, &[]);
    let mut reject = |bytes: &[u8], reason: u8| {
        let got = lab.say(bytes);
        assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, reason));
    };
    let mut i = iscsi::testing::ScriptedInitiator::default();
    let header = i.text_header(NO_TAG);
    let framed = |h: &iscsi::pdu::TextRequest, d: &[u8]| i.frame(h.as_bytes(), d);
    reject(&framed(&header, b"SendTargets"), 0x04);
    let mut lost = header;
    lost.ttt.set(77);
    reject(&framed(&lost, b""), 0x09);
    let mut both = header;
    both.flags = 0xc0;
    reject(&framed(&both, b""), 0x09);
    reject(&framed(&header, &b"A=1\0".repeat(300)), 0x04);
    reject(&framed(&header, &vec![b'x'; 70_000]), 0x04);
}

/// RFC 7143 6.4 and 13.12: what may be said in the full feature phase.
#[test]
fn clause_6_4_only_some_keys_may_be_used_later() {
    let mut lab = lab();
    let keys = [
        ("MaxBurstLength", "4096"),
        ("X-com.example", "1"),
        ("MaxRecvDataSegmentLength", "512"),
        ("InitiatorAlias", "host"),
    ];
    let request = lab.initiator.text(NO_TAG, &keys);
    let got = lab.say(&request);
    assert_eq!(got[0].data, b"MaxBurstLength=Reject\0X-com.example=NotUnderstood\0");
    let ping = lab.initiator.ping(&[1; 1000]);
    assert_eq!(lab.say(&ping)[0].data.len(), 512, "declared anew");
}

/// RFC 7143 4.3 and 7.4: a discovery session is for nothing else.
#[test]
fn clause_4_3_discovery_sessions_take_no_commands() {
    let mut lab = discovery(1, &[]);
    let command = lab.initiator.command(&[0], 0, 0, &[]);
    let reset = lab.initiator.task(TaskFunction::TargetWarmReset, NO_TAG, 0);
    for bytes in [command, reset] {
        let got = lab.say(&bytes);
        assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, 0x05));
    }
    let ping = lab.initiator.ping(b"");
    assert_eq!(lab.say(&ping)[0].opcode(), Opcode::NopIn);
}

/// RFC 7143 11.14 and 11.15.
#[test]
fn clause_11_14_logout() {
    for reason in [0, 1] {
        let mut lab = lab();
        let request = lab.initiator.logout(reason, 0);
        let got = lab.say(&request);
        assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::LogoutResponse, 0));
        assert_eq!(got[0].word(40), 2 << 16, "Time2Wait; nothing is retained");
        assert_eq!(lab.closed, Some(CloseReason::Logout));
    }
}

/// RFC 7143 11.15.1: what cannot be closed.
#[test]
fn clause_11_15_1_other_connections_and_recovery() {
    let mut lab = lab();
    for (reason, cid, expect) in [(1, 7, 1), (2, 0, 2)] {
        let request = lab.initiator.logout(reason, cid);
        let got = lab.say(&request);
        assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::LogoutResponse, expect));
    }
    let request = lab.initiator.logout(9, 0);
    assert_eq!(lab.say(&request)[0].opcode(), Opcode::Reject);
    assert_eq!(lab.closed, None);
}

/// RFC 7143 4.2.6: a session ends when its commands have.
#[test]
fn clause_4_2_6_a_logout_waits_for_running_commands() {
    let mut lab = manual();
    let (a, _) = running(&mut lab, 1);
    let (b, _) = running(&mut lab, 2);
    let request = lab.initiator.logout(0, 0);
    assert!(lab.say(&request).is_empty());
    assert_eq!(aborts(&mut lab), [a, b]);
    let ping = lab.initiator.ping(b"");
    assert_eq!(lab.feed(&ping), 48, "nothing more is received");
    lab.target.complete(b, &CommandOutcome::default());
    assert!(lab.pump().is_empty());
    lab.target.complete(a, &CommandOutcome::default());
    let got = lab.pump();
    assert_eq!((got.len(), got[0].opcode()), (1, Opcode::LogoutResponse));
    assert_eq!(lab.closed, Some(CloseReason::Logout));
}

/// RFC 7143 11.9.1: what the target says by itself.
#[test]
fn clause_11_9_asynchronous_messages() {
    let mut lab = lab();
    let mut say = |notice| {
        lab.target.notify(notice);
        let mut got = lab.pump();
        assert_eq!((got.len(), got[0].opcode(), got[0].itt()), (1, Opcode::AsyncMessage, NO_TAG));
        got.remove(0)
    };
    let got = say(AsyncNotification::LogoutRequest { within_s: 30 });
    assert_eq!(got.header[36..48], [1, 0, 0, 0, 0, 0, 0, 30, 0, 0, 0, 0]);
    let got = say(AsyncNotification::Drop { time2wait_s: 5 });
    assert_eq!(got.header[36..48], [3, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0]);
    let lun = [0, 3, 0, 0, 0, 0, 0, 0];
    let got = say(AsyncNotification::Scsi { lun, sense: &[0x70, 0, 6] });
    assert_eq!((got.header[8..16].to_vec(), got.header[36]), (lun.to_vec(), 0));
    assert_eq!(got.data, [0, 3, 0x70, 0, 6]);

    let mut early = Harness::default();
    early.target.notify(AsyncNotification::Drop { time2wait_s: 5 });
    assert!(early.pump().is_empty(), "not before the full feature phase");
}

/// After the end every call is harmless.
#[test]
fn a_closed_connection_ignores_all_input() {
    let mut lab = manual();
    let (tag, _) = running(&mut lab, 1);
    lab.target.close();
    lab.act();
    assert_eq!(lab.closed, Some(CloseReason::Requested));
    let c = &mut lab.target;
    c.complete(tag, &CommandOutcome::default());
    c.admit(tag, 10);
    c.grant(tag, lab.driver.memory(4096));
    c.task_management_done(RequestId(0), TaskOutcome::Complete);
    c.targets(&[]);
    c.login_decision(Ok(lab.driver.login_grant()));
    c.session_established(Ok(1));
    c.notify(AsyncNotification::Drop { time2wait_s: 0 });
    c.set_window(1000);
    c.close();
    assert!(lab.wait(1000).is_empty() && lab.actions.is_empty());
    let ping = lab.initiator.ping(b"");
    assert_eq!(lab.feed(&ping), 48);
}

/// A connection can move to another core.
#[test]
fn connections_are_plain_data() {
    fn is_send<T: Send>() {}
    is_send::<Connection>();
    is_send::<Action>();
}
