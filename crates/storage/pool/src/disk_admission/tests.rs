use super::AdmissionEffect as Effect;
use super::AdmissionInput as Input;
use super::*;

const DISK: MemberId = MemberId(0);
const OTHER: MemberId = MemberId(1);
const RETURN: ReturnId = ReturnId(1);
const FAILED: Input = Input::WriteFailed { member: DISK, is_voter: true };
const LOST: Input = Input::WriteFailed { member: DISK, is_voter: false };
const DETACHED: Input = Input::VersionWritten { voters: MemberSet(0b10) };
const MISSING: Input = Input::LookedFor { sought: MemberSet(1), present: MemberSet(0) };
const PRESENT: Input = Input::LookedFor { sought: MemberSet(1), present: MemberSet(1) };
const REPORTED: Input = Input::ReportedFailed { member: DISK, join_generation: 1 };
const SILENT: Input = Input::ReportedUnresponsive { member: DISK, join_generation: 1 };
const JOINS: Input = Input::JoinBegan(DISK, JoinKind::Return(RETURN));
const ALL_WRITE: Input = Input::CoresAnswered { member: DISK, all_write: true };
const ONE_FAILS: Input = Input::CoresAnswered { member: DISK, all_write: false };
const VOTES: Input =
    Input::JoinEnded { member: DISK, is_committed: true, is_member: true, is_voter: true };
const REFUSED: Input =
    Input::JoinEnded { member: DISK, is_committed: false, is_member: true, is_voter: false };

/// All inputs about the disk.
const INPUTS: [Input; 24] = [
    Input::Opened,
    MISSING,
    PRESENT,
    Input::NewerCommitProven(DISK),
    Input::Found(DISK),
    Input::ReturnSlow(DISK, RETURN),
    Input::Examined(DISK, RETURN),
    Input::ReturnEnded(DISK, RETURN),
    Input::JoinBegan(DISK, JoinKind::New),
    JOINS,
    Input::CaughtUp(DISK),
    ALL_WRITE,
    ONE_FAILS,
    VOTES,
    REFUSED,
    FAILED,
    DETACHED,
    Input::Abandoned(DISK),
    REPORTED,
    SILENT,
    Input::SilenceConfirmed(DISK),
    Input::RemovalBegan(DISK),
    Input::RemovalCancelled(DISK),
    Input::Removed(DISK),
];

/// The state that the disk has, by name.
fn state_of(admission: &DiskAdmission) -> &'static str {
    match admission.state(DISK) {
        AdmissionState::Unassigned => "Unassigned",
        AdmissionState::Attached => "Attached",
        AdmissionState::Unresponsive => "Unresponsive",
        AdmissionState::Failed => "Failed",
        AdmissionState::Absent => "Absent",
        AdmissionState::Abandoned => "Abandoned",
        AdmissionState::DeclaredLost => "DeclaredLost",
        AdmissionState::Returning(ReturnStage::Examining, _) => "Examining",
        AdmissionState::Returning(ReturnStage::Slow, _) => "Slow",
        AdmissionState::Returning(ReturnStage::Ready, _) => "Ready",
        AdmissionState::Joining(JoinStage::CatchingUp, _) => "CatchingUp",
        AdmissionState::Joining(JoinStage::Learning, _) => "Learning",
        AdmissionState::Joining(JoinStage::Committing, _) => "Committing",
        AdmissionState::Joining(JoinStage::Rejected, _) => "Rejected",
        AdmissionState::Joining(JoinStage::Stopped, _) => "Stopped",
    }
}

/// Two attached disks, after these inputs.
fn after(inputs: &[Input]) -> DiskAdmission {
    let all = MemberSet(0b11);
    let mut admission =
        DiskAdmission::new([(DISK, false), (OTHER, false)], all, MemberSet::default());
    for input in inputs {
        let _ = admission.apply(*input);
    }
    admission
}

/// A disk in each state, reached by the shortest way.
fn each_state() -> Vec<DiskAdmission> {
    let found = [FAILED, MISSING, Input::Found(DISK)];
    let after_found = |more: &[Input]| after(&[&found, more].concat());
    let examined = Input::Examined(DISK, RETURN);
    let caught_up = [examined, JOINS, Input::CaughtUp(DISK)];
    let after_caught_up = |more: &[Input]| after_found(&[&caught_up, more].concat());
    let declared_lost =
        DiskAdmission::new([(DISK, false), (OTHER, false)], MemberSet(0b10), MemberSet(0b01));
    vec![
        after(&[FAILED, Input::Removed(DISK)]),
        after(&[]),
        after(&[Input::Abandoned(DISK)]),
        after(&[FAILED]),
        after(&[FAILED, MISSING]),
        after(&[Input::Abandoned(DISK), DETACHED]),
        declared_lost,
        after_found(&[]),
        after_found(&[Input::ReturnSlow(DISK, RETURN)]),
        after_found(&[examined]),
        after_found(&[examined, JOINS]),
        after_caught_up(&[]),
        after_caught_up(&[ALL_WRITE]),
        after_caught_up(&[REPORTED]),
        after_caught_up(&[LOST]),
    ]
}

type Transition = (&'static str, Input, &'static str, &'static [Effect]);

/// All transitions that change the state or have effects, except answers to reports.
const TRANSITIONS: &[Transition] = &[
    ("Unassigned", Input::JoinBegan(DISK, JoinKind::New), "CatchingUp", &[Effect::CatchUp(DISK)]),
    ("Attached", FAILED, "Failed", &[Effect::StopVersions(DISK), Effect::AnnounceFailure(DISK)]),
    ("Attached", DETACHED, "Failed", &[Effect::StopVersions(DISK)]),
    (
        "Attached",
        Input::Abandoned(DISK),
        "Unresponsive",
        &[Effect::HoldUntilIdle(DISK), Effect::StopWaiting(DISK)],
    ),
    (
        "Unresponsive",
        FAILED,
        "Abandoned",
        &[Effect::StopVersions(DISK), Effect::AnnounceFailure(DISK)],
    ),
    ("Unresponsive", DETACHED, "Abandoned", &[Effect::StopVersions(DISK)]),
    ("Failed", Input::Opened, "Absent", &[]),
    ("Failed", MISSING, "Absent", &[]),
    (
        "Failed",
        Input::Abandoned(DISK),
        "Abandoned",
        &[Effect::HoldUntilIdle(DISK), Effect::StopWaiting(DISK)],
    ),
    ("Absent", PRESENT, "Absent", &[Effect::Identify(DISK)]),
    ("Absent", Input::NewerCommitProven(DISK), "Failed", &[]),
    ("Absent", Input::Found(DISK), "Examining", &[Effect::Reattach(DISK, ReturnId(1))]),
    (
        "Absent",
        Input::Abandoned(DISK),
        "Abandoned",
        &[Effect::HoldUntilIdle(DISK), Effect::StopWaiting(DISK)],
    ),
    ("Examining", Input::ReturnSlow(DISK, RETURN), "Slow", &[Effect::RebuildColumns]),
    ("Examining", Input::Examined(DISK, RETURN), "Ready", &[]),
    ("Slow", Input::Examined(DISK, RETURN), "Ready", &[]),
    ("Examining", Input::ReturnEnded(DISK, RETURN), "Failed", &[]),
    ("Slow", Input::ReturnEnded(DISK, RETURN), "Failed", &[]),
    ("Ready", Input::ReturnEnded(DISK, RETURN), "Failed", &[]),
    ("Ready", JOINS, "CatchingUp", &[Effect::CatchUp(DISK)]),
    ("CatchingUp", Input::CaughtUp(DISK), "Learning", &[Effect::AskCores(DISK)]),
    ("CatchingUp", Input::SilenceConfirmed(DISK), "Stopped", &[]),
    ("CatchingUp", VOTES, "Failed", &[]),
    ("CatchingUp", REFUSED, "Failed", &[]),
    ("Learning", ALL_WRITE, "Committing", &[Effect::CommitVote(DISK)]),
    ("Learning", ONE_FAILS, "Rejected", &[Effect::CancelJoin(DISK)]),
    ("Learning", Input::SilenceConfirmed(DISK), "Rejected", &[]),
    ("Learning", VOTES, "Failed", &[Effect::StopVersions(DISK)]),
    ("Learning", REFUSED, "Failed", &[Effect::StopVersions(DISK), Effect::AnnounceDetached(DISK)]),
    ("Learning", FAILED, "Stopped", &[Effect::StopVersions(DISK), Effect::AnnounceFailure(DISK)]),
    ("Committing", VOTES, "Attached", &[]),
    (
        "Committing",
        REFUSED,
        "Failed",
        &[Effect::StopVersions(DISK), Effect::AnnounceDetached(DISK)],
    ),
    ("Committing", FAILED, "Stopped", &[Effect::StopVersions(DISK), Effect::AnnounceFailure(DISK)]),
    ("Rejected", Input::CaughtUp(DISK), "Rejected", &[Effect::CancelJoin(DISK)]),
    ("Rejected", ALL_WRITE, "Rejected", &[Effect::CancelJoin(DISK)]),
    ("Rejected", ONE_FAILS, "Rejected", &[Effect::CancelJoin(DISK)]),
    ("Rejected", VOTES, "Failed", &[Effect::StopVersions(DISK)]),
    ("Rejected", REFUSED, "Failed", &[Effect::StopVersions(DISK), Effect::AnnounceDetached(DISK)]),
    ("Rejected", FAILED, "Stopped", &[Effect::StopVersions(DISK), Effect::AnnounceFailure(DISK)]),
    ("Stopped", Input::CaughtUp(DISK), "Stopped", &[Effect::CancelJoin(DISK)]),
    ("Stopped", ALL_WRITE, "Stopped", &[Effect::CancelJoin(DISK)]),
    ("Stopped", ONE_FAILS, "Stopped", &[Effect::CancelJoin(DISK)]),
    ("Stopped", VOTES, "Failed", &[]),
    ("Stopped", REFUSED, "Failed", &[Effect::AnnounceDetached(DISK)]),
];

/// What an input leads to in a state, by the table and what the module's documentation adds to it.
fn expected(state: &'static str, input: Input) -> (&'static str, Vec<Effect>) {
    const RETURNING_OR_JOINING: [&str; 8] = [
        "Examining",
        "Slow",
        "Ready",
        "CatchingUp",
        "Learning",
        "Committing",
        "Rejected",
        "Stopped",
    ];
    const FOLLOWERS: [&str; 5] = ["Attached", "Unresponsive", "Learning", "Committing", "Rejected"];
    let is_joining = RETURNING_OR_JOINING[3..].contains(&state);
    match input {
        REPORTED if state == "Committing" => (state, vec![Effect::DetachAfterVote(DISK)]),
        REPORTED => {
            let next = match state {
                "Learning" => "Rejected",
                "CatchingUp" => "Stopped",
                _ => state,
            };
            (next, vec![Effect::Detach(DISK)])
        }
        SILENT if is_joining => (state, vec![Effect::ProbeOthers(DISK)]),
        SILENT => (state, vec![Effect::DetachIfPossible(DISK)]),
        Input::Abandoned(_) if state == "Unassigned" || RETURNING_OR_JOINING.contains(&state) => {
            (state, vec![Effect::HoldUntilIdle(DISK), Effect::StopWaiting(DISK)])
        }
        Input::Removed(_) => {
            let stops = FOLLOWERS.contains(&state).then_some(Effect::StopVersions(DISK));
            ("Unassigned", stops.into_iter().collect())
        }
        _ => {
            let found = TRANSITIONS.iter().find(|(from, by, ..)| (*from, *by) == (state, input));
            found.map_or((state, Vec::new()), |(_, _, to, effects)| (*to, effects.to_vec()))
        }
    }
}

/// The same input, for the join generation that the disk has.
fn of_generation(input: Input, join_generation: u64) -> Input {
    match input {
        REPORTED => Input::ReportedFailed { member: DISK, join_generation },
        SILENT => Input::ReportedUnresponsive { member: DISK, join_generation },
        input => input,
    }
}

#[test]
fn each_input_in_each_state_does_what_the_table_says() {
    let all = each_state();
    for before in &all {
        for input in INPUTS {
            let mut admission = before.clone();
            let given = of_generation(input, before.join_generation(DISK));
            let effects = admission.apply(given);
            let (next, wanted) = expected(state_of(before), input);
            assert_eq!(
                (state_of(&admission), effects),
                (next, wanted),
                "{} {input:?}",
                state_of(before)
            );
            assert_eq!(admission.state(OTHER), before.state(OTHER), "{input:?}");
        }
    }
    let mut states: Vec<_> = all.iter().map(state_of).collect();
    states.dedup();
    assert_eq!(states.len(), 15, "{states:?}");
}

#[test]
fn a_report_about_an_earlier_admission_changes_nothing() {
    for before in each_state() {
        for report in [REPORTED, SILENT] {
            let mut admission = before.clone();
            let late = of_generation(report, before.join_generation(DISK) + 1);
            assert_eq!(admission.apply(late), [Effect::AwaitCommit]);
            assert_eq!(admission, before);
        }
    }
}

#[test]
fn columns_stay_where_they_are_from_the_examination_to_the_end_of_a_return() {
    for mut admission in each_state() {
        let stay = matches!(
            state_of(&admission),
            "Examining"
                | "Ready"
                | "CatchingUp"
                | "Learning"
                | "Committing"
                | "Rejected"
                | "Stopped"
        );
        assert_eq!(admission.keeps_columns(DISK), stay, "{}", state_of(&admission));
        let _ = admission.apply(Input::ReturnSlow(DISK, RETURN));
        let is_examined = !matches!(state_of(&admission), "Slow");
        assert_eq!(admission.keeps_columns(DISK), stay && is_examined, "however long it takes");
    }
}

#[test]
fn a_disk_that_is_missing_during_a_slow_return_is_looked_for_when_that_has_failed() {
    let found = [FAILED, MISSING, Input::Found(DISK)];
    let slow = Input::ReturnSlow(DISK, RETURN);
    let admission =
        after(&[&found[..], &[slow, MISSING, Input::ReturnEnded(DISK, RETURN)]].concat());
    assert_eq!(state_of(&admission), "Absent");
    let admission = after(&[&found[..], &[MISSING, Input::ReturnEnded(DISK, RETURN)]].concat());
    assert_eq!(state_of(&admission), "Failed", "its path is known");
}

#[test]
fn a_disk_that_was_abandoned_while_it_returned_stays_away_unless_it_caught_up() {
    let examined = [FAILED, MISSING, Input::Found(DISK), Input::Abandoned(DISK)];
    let mut admission = after(&examined);
    assert!(admission.abandoned().contains(DISK));
    let _ = admission.apply(Input::ReturnEnded(DISK, RETURN));
    assert_eq!((state_of(&admission), admission.sought()), ("Abandoned", MemberSet::default()));
    let joined = [Input::Examined(DISK, RETURN), JOINS, Input::CaughtUp(DISK)];
    let mut admission = after(&[&examined[..], &joined].concat());
    assert!(!admission.abandoned().contains(DISK));
    let _ = admission.apply(REFUSED);
    assert_eq!(state_of(&admission), "Failed");
}

#[test]
fn a_disk_that_stops_answering_while_its_vote_is_committed_is_a_voter_nothing_waits_for() {
    let joined = [
        Input::Examined(DISK, RETURN),
        JOINS,
        Input::CaughtUp(DISK),
        ALL_WRITE,
        Input::Abandoned(DISK),
    ];
    let mut admission = after(&[&[FAILED, MISSING, Input::Found(DISK)][..], &joined].concat());
    assert_eq!(admission.apply(VOTES), []);
    assert_eq!(state_of(&admission), "Unresponsive");
}

#[test]
fn a_removed_disk_leaves_nothing_behind_but_its_join_generation() {
    let declared_lost = DiskAdmission::new([(DISK, false)], MemberSet::default(), MemberSet(0b01));
    let mut admission = declared_lost;
    assert!(admission.declared_lost().contains(DISK));
    let _ = admission.apply(Input::RemovalBegan(DISK));
    assert!(admission.is_leaving(DISK));
    let _ = admission.apply(Input::Removed(DISK));
    assert!(!admission.is_leaving(DISK) && admission.declared_lost().is_empty());
    for input in [PRESENT, Input::Found(DISK), JOINS, Input::RemovalBegan(DISK)] {
        assert_eq!(admission.apply(input), []);
        assert_eq!(state_of(&admission), "Unassigned");
    }
    let added = Input::JoinBegan(DISK, JoinKind::New);
    assert_eq!(admission.apply(added), [Effect::CatchUp(DISK)]);
    assert_eq!((admission.join_generation(DISK), admission.is_leaving(DISK)), (1, false));
}

#[test]
fn a_new_disk_that_is_refused_is_no_member() {
    let refused =
        Input::JoinEnded { member: DISK, is_committed: false, is_member: false, is_voter: false };
    let admission =
        after(&[FAILED, Input::Removed(DISK), Input::JoinBegan(DISK, JoinKind::New), refused]);
    assert_eq!(state_of(&admission), "Unassigned");
}

/// Regression test: a version waited for ever for a learner that was no learner any more.
#[test]
fn tasks_stop_waiting_for_a_disk_whose_admission_has_ended() {
    let refused =
        Input::JoinEnded { member: DISK, is_committed: false, is_member: false, is_voter: false };
    let added = Input::JoinBegan(DISK, JoinKind::New);
    let mut admission = after(&[FAILED, Input::Removed(DISK), added, refused]);
    let effects = admission.apply(Input::Abandoned(DISK));
    assert!(effects.contains(&Effect::StopWaiting(DISK)));
    assert!(admission.abandoned().contains(DISK));
    let _ = admission.apply(added);
    assert!(admission.abandoned().contains(DISK));
    let _ = admission.apply(Input::CaughtUp(DISK));
    assert!(admission.abandoned().is_empty(), "the next disk is waited for");
    let mut admission = after(&[Input::Abandoned(DISK), DETACHED, Input::Removed(DISK)]);
    assert!(admission.abandoned().contains(DISK));
    let _ = admission.apply(added);
    let _ = admission.apply(refused);
    assert!(admission.abandoned().contains(DISK));
}

#[test]
fn one_disk_joins_at_a_time() {
    let examined = [FAILED, MISSING, Input::Found(DISK), Input::Examined(DISK, RETURN), JOINS];
    let mut admission = after(&examined);
    assert_eq!(admission.apply(Input::JoinBegan(MemberId(2), JoinKind::New)), []);
    let _ = admission.apply(REFUSED);
    let added = Input::JoinBegan(MemberId(2), JoinKind::New);
    assert_eq!(admission.apply(added), [Effect::CatchUp(MemberId(2))]);
}

#[test]
fn an_earlier_return_does_not_end_a_later_one() {
    let mut admission = after(&[
        FAILED,
        MISSING,
        Input::Found(DISK),
        Input::ReturnEnded(DISK, RETURN),
        MISSING,
        Input::Found(DISK),
    ]);
    for late in [Input::ReturnSlow(DISK, RETURN), Input::Examined(DISK, RETURN), JOINS] {
        assert_eq!(admission.apply(late), []);
        assert_eq!(state_of(&admission), "Examining");
    }
    let _ = admission.apply(Input::ReturnEnded(DISK, RETURN));
    assert_eq!(state_of(&admission), "Examining");
}
