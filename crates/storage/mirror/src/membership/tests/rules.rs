//! The rules of RFD 0010, 3.2 and 5, one by one. A lease is 2 s, the grace 3 s.

use std::time::Duration;

use block::Epoch;
use peer::{
    ClockStamp, DataGeneration, Incarnation, NodeId, PeerGenerations, ReplicaReport, Role, View,
};
use uuid::Uuid;

use super::super::super::config::{
    ConfigReplica, CopyHistory, InSyncMember as Listed, MirrorConfig, PutOutcome,
};
use super::super::{
    Action, ConfigChange, ConfigRefusal, Event, ImageSummary, JoinerComparison, LeaseSettings,
    MembershipMessage, MirrorMembership, NotServingReason, RecordedGenerations, RollbackWitness,
};

const START: Duration = Duration::from_secs(1000);
const FRESH: u128 = 77;

fn ms(ms: u64) -> Duration {
    START + Duration::from_millis(ms)
}

/// The configuration with these of nodes 1 to 3 in sync, under incarnation 10 × node; the first is
/// primary.
fn record(epoch: u64, in_sync: &[u16]) -> MirrorConfig {
    let replica = |n: u16| ConfigReplica {
        node: NodeId(n),
        image: Uuid::from_u128(u128::from(n)),
        is_new: false,
    };
    let mut listed: Vec<_> = in_sync.iter().map(|&n| listed(n, 0)).collect();
    listed.sort_unstable_by_key(|m| m.node);
    MirrorConfig {
        epoch: Epoch(epoch),
        config_id: u128::from(epoch),
        replicas: (1..=3).map(replica).collect(),
        in_sync: listed,
        primary: NodeId(in_sync[0]),
        cold_start_epoch: Epoch::default(),
        history: CopyHistory::default(),
    }
}

/// The next configuration; all members have recorded the beginning of epoch `common_epoch`.
fn after(epoch: u64, in_sync: &[u16], common_epoch: u64) -> MirrorConfig {
    let history = CopyHistory {
        generation: DataGeneration::first(Epoch(common_epoch)),
        ..CopyHistory::default()
    };
    MirrorConfig { config_id: FRESH, history, ..record(epoch, in_sync) }
}

fn listed(node: u16, life: u64) -> Listed {
    Listed { node: NodeId(node), incarnation: Incarnation(u64::from(node) * 10 + life) }
}

fn image(epoch: u64, config_id: u128) -> ImageSummary {
    let (is_clean, same_boot, is_log_lost) = (false, false, false);
    let generation = DataGeneration::first(Epoch(epoch));
    ImageSummary { epoch: Epoch(epoch), config_id, is_clean, same_boot, generation, is_log_lost }
}

fn boot(me: u16, life: u64, image: ImageSummary) -> MirrorMembership {
    let incarnation = listed(me, life).incarnation;
    let mut member =
        MirrorMembership::new(NodeId(me), incarnation, LeaseSettings::default(), START, image);
    assert_eq!(member.apply(START, Event::Tick), [Action::ReadConfig]);
    member
}

fn read(config: &MirrorConfig) -> Event {
    Event::ConfigRead { config: config.clone(), next_config_id: FRESH }
}

fn lease_request(epoch: u64, from: u16, life: u64) -> Event {
    let incarnation = listed(from, life).incarnation;
    Event::Received(
        NodeId(from),
        MembershipMessage::LeaseRequest { epoch: Epoch(epoch), incarnation, stamp: ClockStamp(5) },
    )
}

fn lease_grant(member: &MirrorMembership, from: u16, asked: Duration) -> Event {
    let epoch = member.config().unwrap().epoch;
    let stamp = ClockStamp(u64::try_from(asked.as_nanos()).unwrap());
    let incarnation = member.incarnation();
    Event::Received(NodeId(from), MembershipMessage::LeaseGrant { epoch, incarnation, stamp })
}

fn replica_report(from: u16, life: u64, role: Role) -> Event {
    let incarnation = listed(from, life).incarnation;
    let (is_clean, same_boot) = (false, false);
    let (epoch, config_id, is_rolled_back, generations) =
        (Epoch(1), 1, false, PeerGenerations::default());
    let report = ReplicaReport {
        incarnation,
        epoch,
        config_id,
        role,
        is_clean,
        same_boot,
        is_rolled_back,
        generations,
    };
    Event::Received(NodeId(from), MembershipMessage::ReplicaReport(report))
}

fn start_view_change(view: View, config: &MirrorConfig) -> Event {
    Event::Received(
        config.primary,
        MembershipMessage::StartViewChange { view, config: config.clone() },
    )
}

fn grants_lease(actions: &[Action]) -> bool {
    actions.iter().any(|a| matches!(a, Action::Send(_, MembershipMessage::LeaseGrant { .. })))
}

fn reads(actions: &[Action]) -> bool {
    actions.contains(&Action::ReadConfig)
}

fn put(actions: &[Action]) -> Option<MirrorConfig> {
    actions.iter().find_map(|a| match a {
        Action::PutConfig { next, .. } => Some(next.clone()),
        _ => None,
    })
}

fn nodes(nodes: &[u16]) -> Vec<NodeId> {
    nodes.iter().map(|&n| NodeId(n)).collect()
}

const FIRST: View = View { epoch: Epoch(1), round: 0 };

/// Node 1, primary of these, linked to all, with an active view and fresh grants from all at
/// `START`.
fn serving(in_sync: &[u16]) -> MirrorMembership {
    let mut member = boot(1, 0, image(0, 0));
    let mut tell = |event| member.apply(START, event);
    for &n in &in_sync[1..] {
        let _ = tell(Event::LinkUp(NodeId(n)));
        let _ = tell(replica_report(n, 0, Role::Member));
    }
    let begin = Action::BeginView { view: FIRST, config: Some(record(1, in_sync)) };
    assert!(tell(read(&record(1, in_sync))).contains(&begin));
    let _ = tell(Event::ViewBegun(FIRST));
    for &n in &in_sync[1..] {
        let _ = tell(Event::DoViewChange(NodeId(n), FIRST));
    }
    assert_eq!(tell(Event::Reconciled(FIRST)), [Action::ActivateView(FIRST)]);
    // What was learned during a read requires another one.
    let _ = member.apply(START, read(&record(1, in_sync)));
    for &n in &in_sync[1..] {
        let event = lease_grant(&member, n, START);
        let _ = member.apply(START, event);
    }
    assert!(member.may_serve(START));
    member
}

/// These have granted the lease requested at `asked`; then the configuration is read.
fn hear_all(
    member: &mut MirrorMembership,
    nodes: &[u16],
    asked: Duration,
    now: Duration,
) -> Vec<Action> {
    for &n in nodes {
        let event = lease_grant(member, n, asked);
        let _ = member.apply(now, event);
    }
    let config = member.config().unwrap().clone();
    member.apply(now, read(&config))
}

/// 5.1
#[test]
fn unsafe_lease_settings_are_refused() {
    let cases = [(2000, 3000, true), (2000, 2445, true), (2000, 2444, false), (0, 1, false)];
    for (lease, grace, safe) in cases {
        let settings =
            LeaseSettings::new(Duration::from_millis(lease), Duration::from_millis(grace));
        assert_eq!(settings.is_ok(), safe, "{lease} {grace}");
    }
}

/// 5.1
#[test]
fn leases_are_granted_only_to_the_peers_of_the_epoch() {
    let cases = [
        ("a member", lease_request(1, 2, 0), true),
        ("one that has returned", lease_request(1, 2, 1), false),
        ("one outside", lease_request(1, 3, 0), false),
        ("a member of an older epoch", lease_request(0, 2, 0), false),
        ("a member of a later one", lease_request(2, 2, 0), false),
    ];
    for (who, event, answered) in cases {
        assert_eq!(grants_lease(&serving(&[1, 2]).apply(ms(1), event)), answered, "{who}");
    }
    let below = serving(&[1, 2]).apply(ms(1), lease_request(0, 2, 0));
    assert_eq!(below, [Action::Send(NodeId(2), MembershipMessage::NewerEpoch(Epoch(1)))]);
    assert!(reads(&serving(&[1, 2]).apply(ms(1), lease_request(2, 2, 0))));
}

/// 5.3
#[test]
fn a_lease_counts_from_its_request() {
    let mut member = serving(&[1, 2, 3]);
    let two = lease_grant(&member, 2, ms(500));
    let _ = member.apply(ms(1900), two);
    assert!(member.may_serve(ms(1999)) && !member.may_serve(ms(2000)));
    assert_eq!(
        member.not_serving_reason(ms(2000)),
        Some(NotServingReason::LeasesExpired(vec![NodeId(3)]))
    );
    let three = lease_grant(&member, 3, ms(1900));
    let _ = member.apply(ms(2100), three);
    assert!(member.may_serve(ms(2499)) && !member.may_serve(ms(2500)));
    let alone = serving(&[1]);
    assert!(alone.may_serve(ms(1_000_000)));
}

/// 5.5, and 5.2 for what follows.
#[test]
fn a_silent_member_is_suspected_then_excluded() {
    let mut member = serving(&[1, 2]);
    assert!(grants_lease(&member.apply(ms(1000), lease_request(1, 2, 0))));
    assert!(!reads(&member.apply(ms(2499), Event::Tick)));
    assert!(reads(&member.apply(ms(2500), Event::Tick)));
    assert!(put(&member.apply(ms(2510), read(&record(1, &[1, 2])))).is_none());
    assert_eq!(
        member.not_serving_reason(ms(2510)),
        Some(NotServingReason::ExcludingMembers(vec![NodeId(2)]))
    );
    assert!(!grants_lease(&member.apply(ms(2520), lease_request(1, 2, 0))));
    assert!(!reads(&member.apply(ms(3999), Event::Tick)));
    assert!(reads(&member.apply(ms(4000), Event::Tick)));
    let next = put(&member.apply(ms(4010), read(&record(1, &[1, 2])))).unwrap();
    assert_eq!(next, after(2, &[1], 2));
    // The reconfiguration is pending with unknown outcome, so the same is put again.
    assert!(reads(&member.apply(ms(4100), Event::PutCompleted(PutOutcome::Unknown))));
    assert!(!grants_lease(&member.apply(ms(4110), lease_request(1, 2, 0))));
    assert_eq!(member.not_serving_reason(ms(4110)), Some(NotServingReason::Reconfiguring));
    let again = member
        .apply(ms(4120), Event::ConfigRead { config: record(1, &[1, 2]), next_config_id: 99 });
    assert_eq!(put(&again), Some(next.clone()));
    let begin = Action::BeginView { view: View::first(Epoch(2)), config: Some(next) };
    assert!(member.apply(ms(4200), Event::PutCompleted(PutOutcome::Committed)).contains(&begin));
}

/// 5.5: this member may be the one that is cut off.
#[test]
fn leases_continue_without_the_store() {
    let mut member = serving(&[1, 2]);
    assert!(reads(&member.apply(ms(2500), Event::Tick)));
    let _ = member.apply(ms(2600), Event::ConfigReadFailed);
    assert!(grants_lease(&member.apply(ms(2610), lease_request(1, 2, 0))));
    // Excluded, but the store fails before the put: taken back.
    assert!(reads(&member.apply(ms(3100), Event::Tick)));
    let _ = member.apply(ms(3110), read(&record(1, &[1, 2])));
    assert!(!grants_lease(&member.apply(ms(3120), lease_request(1, 2, 0))));
    assert!(reads(&member.apply(ms(5610), Event::Tick)));
    let _ = member.apply(ms(5700), Event::ConfigReadFailed);
    assert!(grants_lease(&member.apply(ms(5710), lease_request(1, 2, 0))));
}

/// 5.2: with a put that excludes no member it may serve for one lease.
#[test]
fn the_primary_serves_during_an_admission() {
    let mut member = serving(&[1, 2]);
    let joiner = listed(3, 4);
    assert!(reads(&member.apply(ms(1), Event::Admit(joiner))));
    let next = put(&member.apply(ms(10), read(&record(1, &[1, 2])))).unwrap();
    assert!(next.has_member(NodeId(3), joiner.incarnation));
    let two = lease_grant(&member, 2, ms(1500));
    let _ = member.apply(ms(1501), two);
    assert!(member.may_serve(ms(2009)) && !member.may_serve(ms(2010)));
    // A new round of this epoch would forget the joiner, which the store may have admitted.
    let _ = member.apply(ms(20), Event::LinkDown(NodeId(2)));
    let up = member.apply(ms(30), Event::LinkUp(NodeId(2)));
    assert!(!up.iter().any(|a| matches!(a, Action::BeginView { .. })));
}

/// 5.4
#[test]
fn planned_changes_and_their_guards() {
    type Case = (&'static str, &'static [u16], Event, Result<(&'static [u16], u16), ConfigChange>);
    let cases: [Case; 6] = [
        ("switch", &[1, 2], Event::SwitchPrimary(NodeId(2)), Ok((&[1, 2], 2))),
        (
            "to one outside",
            &[1, 2],
            Event::SwitchPrimary(NodeId(3)),
            Err(ConfigChange::SwitchPrimary(NodeId(3))),
        ),
        (
            "to itself",
            &[1, 2],
            Event::SwitchPrimary(NodeId(1)),
            Err(ConfigChange::SwitchPrimary(NodeId(1))),
        ),
        ("leave", &[1, 2, 3], Event::Leave, Ok((&[2, 3], 2))),
        ("the last one leaves", &[1], Event::Leave, Err(ConfigChange::Leave)),
        (
            "admit a member",
            &[1, 2],
            Event::Admit(listed(2, 3)),
            Err(ConfigChange::Admit(NodeId(2))),
        ),
    ];
    for (what, members, event, expected) in cases {
        let mut member = serving(members);
        assert!(reads(&member.apply(ms(1), event)), "{what}");
        let mut actions = member.apply(ms(2), read(&record(1, members)));
        if what == "leave" {
            assert!(put(&actions).is_none() && !member.may_serve(ms(2)), "it asks who lives first");
            actions = hear_all(&mut member, &members[1..], ms(2), ms(3));
        }
        match expected {
            Ok((in_sync, primary)) => {
                let next = put(&actions).expect(what);
                assert_eq!(next.in_sync, record(2, in_sync).in_sync, "{what}");
                assert_eq!(next.primary, NodeId(primary), "{what}");
                assert_eq!(member.may_serve(ms(2)), what == "switch", "{what}");
            }
            Err(change) => {
                assert!(actions.contains(&Action::Decline(change)), "{what}");
                assert!(put(&actions).is_none() && member.may_serve(ms(3)), "{what}");
            }
        }
    }
}

/// 4.8 and 5.4: a lost leg stops at once and leaves.
#[test]
fn a_lost_leg_leaves() {
    let mut member = serving(&[1, 2]);
    let asked = member.apply(ms(1), Event::LegLost);
    assert!(
        asked.iter().any(|a| matches!(a, Action::Send(_, MembershipMessage::LeaseRequest { .. })))
    );
    assert!(!member.may_serve(ms(1)) && member.role() == Role::OutOfSync);
    assert!(!grants_lease(&member.apply(ms(1), lease_request(1, 2, 0))));
    assert!(put(&member.apply(ms(2), read(&record(1, &[1, 2])))).is_none());
    let next = put(&hear_all(&mut member, &[2], ms(1), ms(3))).unwrap();
    assert_eq!((next.in_sync, next.primary), (vec![listed(2, 0)], NodeId(2)));
    let mut last = serving(&[1]);
    assert!(!reads(&last.apply(ms(1), Event::LegLost)));
    assert_eq!(last.not_serving_reason(ms(1)), Some(NotServingReason::LegLost));
}

/// 5.6: node 1 has restarted; the configuration lists it and node 2, or it alone.
#[test]
fn takeover_after_a_total_outage() {
    type Case = (&'static str, &'static [u16], bool, Option<Event>, bool);
    let cases: [Case; 7] = [
        ("a: nobody else is listed", &[1], false, None, true),
        ("b: its log is clean", &[1, 2], true, Some(replica_report(2, 1, Role::Restarted)), true),
        ("b: but the other has yet to read the record", &[1, 2], true, None, false),
        (
            "b: but the other is a member",
            &[1, 2],
            true,
            Some(replica_report(2, 0, Role::Member)),
            false,
        ),
        ("c: nobody was heard", &[1, 2], false, None, false),
        (
            "c: the other has returned",
            &[1, 2],
            false,
            Some(replica_report(2, 1, Role::Restarted)),
            true,
        ),
        (
            "c: the last primary leads",
            &[2, 1],
            false,
            Some(replica_report(2, 1, Role::Restarted)),
            false,
        ),
    ];
    for (what, members, clean, heard, leads) in cases {
        let mut member =
            boot(1, 1, ImageSummary { is_clean: clean, same_boot: clean, ..image(1, 1) });
        let record = record(1, members);
        assert!(member.apply(START, read(&record)).contains(&Action::BecomeOutOfSync), "{what}");
        let _ = member.apply(START, Event::LinkUp(NodeId(2)));
        let silent = heard.is_none();
        if let Some(heard) = heard {
            let _ = member.apply(START, heard);
        }
        assert!(!reads(&member.apply(ms(2999), Event::Tick)), "{what}");
        let mute = member.not_serving_reason(START)
            == Some(NotServingReason::AwaitingConfigRead(vec![NodeId(2)]));
        assert_eq!(mute, clean && silent, "{what}");
        assert_eq!(reads(&member.apply(ms(3000), Event::Tick)), leads, "{what}");
        if leads {
            let next = put(&member.apply(ms(3001), read(&record))).expect(what);
            assert_eq!((next.in_sync, next.primary), (vec![listed(1, 1)], NodeId(1)), "{what}");
        }
    }
}

/// A new volume waits for no grace time: as soon as all replicas are linked, the primary of the
/// first configuration admits all of them (5.6 e).
#[test]
fn a_new_volume_has_a_primary_at_once() {
    let nobody = |n: u16| Listed { node: NodeId(n), incarnation: Incarnation(0) };
    let first = MirrorConfig { in_sync: vec![nobody(1), nobody(2)], ..record(1, &[1, 2]) };
    let unused = ImageSummary { generation: DataGeneration::default(), ..image(0, 0) };
    let says = |epoch: u64, role| {
        let Event::Received(from, MembershipMessage::ReplicaReport(report)) =
            replica_report(2, 0, role)
        else {
            unreachable!()
        };
        let report = ReplicaReport { epoch: Epoch(epoch), config_id: 0, ..report };
        Event::Received(from, MembershipMessage::ReplicaReport(report))
    };
    let met = |image, record: &MirrorConfig, heard: Option<Event>| {
        let mut member = boot(1, 0, image);
        let _ = member.apply(START, read(record));
        let _ = member.apply(START, Event::LinkUp(NodeId(2)));
        let asks = heard.is_some_and(|heard| reads(&member.apply(ms(1), heard)));
        (member, asks)
    };
    let returned = || Some(says(0, Role::Restarted));
    let lost = ImageSummary { is_log_lost: true, ..unused };
    let (mut member, asks) = met(unused, &first, returned());
    assert!(asks, "nothing was ever promised");
    let next = put(&member.apply(ms(2), read(&first))).unwrap();
    assert_eq!((next.epoch, next.primary), (Epoch(2), NodeId(1)));
    assert_eq!(next.in_sync, vec![listed(1, 0), listed(2, 0)]);
    // This put excludes no member: this one serves as soon as the other has followed.
    assert!(member.pending_admission().is_none());
    let other_first = MirrorConfig { primary: NodeId(2), ..first.clone() };
    let served = MirrorConfig { epoch: Epoch(2), ..first.clone() };
    let cases = [
        ("the other was not heard", unused, &first, None),
        ("it has not read the record", unused, &first, Some(says(0, Role::Unknown))),
        ("it is no part of it", unused, &first, Some(says(0, Role::OutOfSync))),
        ("its image was in use", unused, &first, Some(says(1, Role::Restarted))),
        ("the log here was lost", lost, &first, returned()),
        ("it is for the other to lead", unused, &other_first, returned()),
        ("somebody has served it", unused, &served, returned()),
        ("somebody is listed", unused, &record(1, &[1, 2]), returned()),
    ];
    for (what, image, record, heard) in cases {
        let (mut member, asks) = met(image, record, heard);
        let next = put(&member.apply(ms(2), read(record)));
        assert!(next.is_none(), "{what}: {asks} {next:?}");
    }
}

/// 5.6 b: a replica with a clean log does not wait for unlinked ones.
#[test]
fn a_clean_log_takes_over_if_the_others_are_away() {
    let mut member = boot(1, 1, ImageSummary { is_clean: true, same_boot: true, ..image(1, 1) });
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    assert!(!reads(&member.apply(ms(2999), Event::Tick)));
    assert!(reads(&member.apply(ms(3000), Event::Tick)));
}

/// The image may be a copy of the one that was used last, which is in use elsewhere.
#[test]
fn a_clean_log_of_another_boot_waits_for_the_others() {
    let mut member = boot(1, 1, ImageSummary { is_clean: true, same_boot: false, ..image(1, 1) });
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    assert!(!reads(&member.apply(ms(30_000), Event::Tick)));
    assert_eq!(
        member.not_serving_reason(ms(30_000)),
        Some(NotServingReason::AwaitingRestartedMembers(vec![NodeId(2)]))
    );
}

/// 5.6 d
#[test]
fn an_operator_may_force() {
    let mut member = boot(1, 1, image(1, 1));
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    assert_eq!(
        member.not_serving_reason(START),
        Some(NotServingReason::AwaitingRestartedMembers(vec![NodeId(2)]))
    );
    assert!(reads(&member.apply(ms(1), Event::ForcePrimary)));
    assert!(put(&member.apply(ms(2), read(&record(1, &[1, 2])))).is_some());
    assert_eq!(
        serving(&[1]).apply(ms(1), Event::ForcePrimary),
        [Action::Decline(ConfigChange::ForcePrimary)]
    );
}

/// 5.6 d: the leg is lost just as a takeover is to be put.
#[test]
fn a_forced_primary_that_loses_its_leg_gives_up() {
    let mut member = boot(1, 1, image(1, 1));
    let pair = record(1, &[1, 2]);
    let _ = member.apply(START, read(&pair));
    assert!(reads(&member.apply(ms(1), Event::ForcePrimary)));
    assert!(put(&member.apply(ms(2), read(&pair))).is_some());
    assert!(!reads(&member.apply(ms(3), Event::LegLost)));
    assert!(!reads(&member.apply(ms(3), Event::PutCompleted(PutOutcome::Conflict))));
    assert_eq!(member.not_serving_reason(ms(3)), Some(NotServingReason::LegLost));
}

/// 5.6 d: no takeover by a copy that was never in sync, nor beside a linked member.
#[test]
fn forcing_a_primary_has_limits() {
    let mut new = record(1, &[2]);
    new.replicas.iter_mut().filter(|r| r.node == NodeId(1)).for_each(|r| r.is_new = true);
    let mut member = boot(1, 1, image(0, 0));
    let _ = member.apply(START, read(&new));
    assert!(reads(&member.apply(ms(1), Event::ForcePrimary)));
    let actions = member.apply(ms(2), read(&new));
    assert!(actions.contains(&Action::Decline(ConfigChange::ForcePrimary)), "{actions:?}");

    let mut member = boot(1, 1, image(1, 1));
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    let _ = member.apply(START, Event::LinkUp(NodeId(2)));
    let _ = member.apply(START, replica_report(2, 0, Role::Member));
    assert!(reads(&member.apply(ms(1), Event::ForcePrimary)));
    let actions = member.apply(ms(2), read(&record(1, &[1, 2])));
    assert!(actions.contains(&Action::Decline(ConfigChange::ForcePrimary)), "{actions:?}");
}

/// 5.6 d: two are forced, and one has taken over before the other.
#[test]
fn forcing_a_primary_ends_with_the_configuration() {
    let mut member = boot(1, 1, image(1, 1));
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    assert!(reads(&member.apply(ms(1), Event::ForcePrimary)));
    let actions = member.apply(ms(2), read(&record(2, &[2])));
    assert!(actions.contains(&Action::Decline(ConfigChange::ForcePrimary)));
    assert_eq!(put(&actions), None);
}

/// 5.7: node 2 under primary 1.
#[test]
fn start_messages_apply_to_their_view_only() {
    let old = record(1, &[1, 2]);
    let mut member = boot(2, 0, image(0, 0));
    let _ = member.apply(START, read(&old));
    let _ = member.apply(START, Event::ViewBegun(FIRST));
    let again = [Action::SendDoViewChange(FIRST)];
    assert_eq!(member.apply(ms(1), start_view_change(FIRST, &old)), again);
    assert_eq!(member.apply(ms(2), start_view_change(FIRST, &old)), again);
    let next = FIRST.next_round();
    let begin = [Action::BeginView { view: next, config: None }];
    assert_eq!(member.apply(ms(3), start_view_change(next, &old)), begin);
    assert_eq!(member.apply(ms(4), Event::StartView(NodeId(1), next)), [], "not drained yet");
    assert_eq!(member.apply(ms(5), Event::ViewBegun(next)), [Action::SendDoViewChange(next)]);
    assert_eq!(member.apply(ms(6), Event::StartView(NodeId(3), next)), [], "not the primary");
    assert_eq!(
        member.apply(ms(7), Event::StartView(NodeId(1), next)),
        [Action::ActivateView(next)]
    );

    let new = record(2, &[1, 2]);
    let view = View { epoch: Epoch(2), round: 3 };
    let actions = member.apply(ms(8), start_view_change(view, &new));
    assert!(actions.contains(&Action::BeginView { view, config: Some(new) }));
    let below = member.apply(ms(9), start_view_change(next, &old));
    assert!(below.contains(&Action::Send(NodeId(1), MembershipMessage::NewerEpoch(Epoch(2)))));
}

/// 5.7: the session of a member comes up.
#[test]
fn a_session_begins_a_round() {
    let mut member = serving(&[1, 2]);
    let next = FIRST.next_round();
    let begin = Action::BeginView { view: next, config: None };
    assert!(member.apply(ms(1), Event::LinkUp(NodeId(2))).contains(&begin));
    assert!(!member.may_serve(ms(1)));
    let again = member.apply(ms(2), Event::LinkUp(NodeId(2)));
    assert!(!again.contains(&Action::BeginView { view: next.next_round(), config: None }));
    let began = member.apply(ms(3), Event::ViewBegun(next));
    assert_eq!(began.len(), 1, "START to node 2");
    assert_eq!(member.apply(ms(4), Event::DoViewChange(NodeId(2), FIRST)), [], "of an older view");
    let started = member.apply(ms(5), Event::DoViewChange(NodeId(2), next));
    assert_eq!(started, [Action::Reconcile(next)]);
    let outside = serving(&[1, 2]).apply(ms(1), Event::LinkUp(NodeId(3)));
    assert!(!outside.iter().any(|a| matches!(a, Action::BeginView { .. })));
}

/// 3.2
#[test]
fn diverged_histories_are_refused() {
    let (image_is, store) = (Epoch(7), Epoch(5));
    let cases = [
        (image(7, 7), Some(ConfigRefusal::ImageAhead { image: image_is, store })),
        (image(5, 6), Some(ConfigRefusal::ConfigMismatch { epoch: store })),
        (image(5, 5), None),
        (image(4, 9), None),
    ];
    for (image, refusal) in cases {
        let mut member = boot(1, 0, image);
        let actions = member.apply(START, read(&record(5, &[1, 2])));
        let refused = refusal.map(Action::Refuse);
        assert_eq!(refused.is_some_and(|r| actions.contains(&r)), refusal.is_some());
        assert_eq!(
            member.not_serving_reason(START) == refusal.map(NotServingReason::Refused),
            refusal.is_some()
        );
    }
}

/// Attack 10: another image has adopted a later epoch than the store.
#[test]
fn a_peer_with_a_later_epoch_stops_a_replica() {
    let mut member = serving(&[1]);
    let _ = member.apply(ms(1), Event::LinkUp(NodeId(3)));
    let ahead = ReplicaReport { epoch: Epoch(9), ..member.public_report() };
    assert!(reads(
        &member.apply(ms(2), Event::Received(NodeId(3), MembershipMessage::ReplicaReport(ahead)))
    ));
    let (node, epoch, config) = (NodeId(3), Epoch(9), ahead.config_id);
    let why = ConfigRefusal::PeerAhead { node, epoch, config_id: config };
    assert!(member.apply(ms(3), read(&record(1, &[1]))).contains(&Action::Refuse(why)));
    assert!(!member.may_serve(ms(3)));
}

/// An epoch missing in the store is remembered while its reporter is away, until the store has it.
#[test]
fn an_absent_peer_with_a_later_epoch_still_stops_a_replica() {
    let holds_all = ImageSummary { is_clean: true, same_boot: true, ..image(2, 2) };
    let restored = record(3, &[1, 2]);
    let mut member = boot(2, 0, holds_all);
    let _ = member.apply(START, read(&restored));
    let _ = member.apply(START, Event::LinkUp(NodeId(1)));
    let Event::Received(from, MembershipMessage::ReplicaReport(said)) =
        replica_report(1, 0, Role::Unknown)
    else {
        unreachable!()
    };
    let ahead = ReplicaReport { epoch: Epoch(3), config_id: 33, ..said };
    assert!(reads(
        &member.apply(ms(1), Event::Received(from, MembershipMessage::ReplicaReport(ahead)))
    ));
    let why = ConfigRefusal::PeerAhead { node: from, epoch: Epoch(3), config_id: 33 };
    assert!(member.apply(ms(2), read(&restored)).contains(&Action::Refuse(why)));
    let _ = member.apply(ms(3), Event::LinkDown(NodeId(1)));
    for at in [4, 4000, 8000] {
        let actions = member.apply(ms(at), read(&restored));
        assert!(put(&actions).is_none(), "{actions:?}");
        assert_eq!(member.not_serving_reason(ms(at)), Some(NotServingReason::Refused(why)));
    }
    // The configuration reported before, and one in which the reporter's image is gone.
    let mut gone = record(3, &[2]);
    gone.replicas.retain(|r| r.node != NodeId(1));
    for believed in [MirrorConfig { config_id: 33, ..record(3, &[1, 2]) }, record(4, &[1, 2]), gone]
    {
        let mut member = member.clone();
        let _ = member.apply(ms(9000), read(&believed));
        assert_ne!(
            member.not_serving_reason(ms(9000)),
            Some(NotServingReason::Refused(why)),
            "{believed:?}"
        );
    }
}

/// The nodes from which leases are requested.
fn asks(actions: &[Action]) -> Vec<u16> {
    let asked = |a: &Action| match a {
        Action::Send(node, MembershipMessage::LeaseRequest { .. }) => Some(node.0),
        _ => None,
    };
    actions.iter().filter_map(asked).collect()
}

/// Node 2 under primary 1, serving with these.
fn second(in_sync: &[u16]) -> MirrorMembership {
    let mut member = boot(2, 0, image(0, 0));
    let _ = member.apply(START, Event::LinkUp(NodeId(1)));
    let _ = member.apply(START, replica_report(1, 0, Role::Member));
    let _ = member.apply(START, read(&record(1, in_sync)));
    let _ = member.apply(START, Event::ViewBegun(FIRST));
    let _ = member.apply(START, start_view_change(FIRST, &record(1, in_sync)));
    let _ = member.apply(START, Event::StartView(NodeId(1), FIRST));
    let _ = member.apply(START, read(&record(1, in_sync)));
    for &n in in_sync.iter().filter(|n| **n != 2) {
        let event = lease_grant(&member, n, START);
        let _ = member.apply(START, event);
    }
    assert!(member.may_serve(START));
    member
}

/// 4.8: this member is never taken to hold what its leg has failed.
#[test]
fn a_failed_leg_does_not_serve_beside_others() {
    let mut member = second(&[1, 2]);
    assert_eq!(asks(&member.apply(ms(1), Event::LegFailed)), [1]);
    assert!(!member.may_serve(ms(1)));
    assert_eq!(member.not_serving_reason(ms(1)), Some(NotServingReason::LegFailed));
    assert_eq!(member.apply(ms(2), start_view_change(FIRST.next_round(), &record(1, &[1, 2]))), []);
    assert!(!grants_lease(&member.apply(ms(3), lease_request(1, 1, 0))));

    // The next configuration still lists it.
    let two = record(2, &[1, 2]);
    let actions = member.apply(ms(4), start_view_change(View::first(Epoch(2)), &two));
    assert!(actions.contains(&Action::BecomeOutOfSync));
    assert!(
        !actions
            .iter()
            .any(|a| matches!(a, Action::BeginView { .. } | Action::SendDoViewChange(_)))
    );
    assert!(!grants_lease(&member.apply(ms(5), lease_request(2, 1, 0))));
    assert_eq!(member.role(), Role::Member, "5.6 c: nobody may lead over it");
    let next = put(&hear_all(&mut member, &[1], ms(4), ms(6))).unwrap();
    assert_eq!(next, MirrorConfig { config_id: FRESH, ..record(3, &[1]) });

    // The put failed: another configuration took its place, and this member is the last.
    let three = record(3, &[2]);
    let _ = member.apply(ms(7), Event::PutCompleted(PutOutcome::Conflict));
    let begin = Action::BeginView { view: View::first(Epoch(3)), config: Some(three.clone()) };
    assert!(member.apply(ms(8), read(&three)).contains(&begin));
    let _ = member.apply(ms(9), Event::ViewBegun(View::first(Epoch(3))));
    let _ = member.apply(ms(10), Event::Reconciled(View::first(Epoch(3))));
    assert!(member.may_serve(ms(10)));
    let _ = member.apply(ms(11), Event::LegFailed);
    assert!(member.may_serve(ms(11)), "alone, its clients get the error");
}

/// 5.4: the leaving member requests leases again; a silent member is excluded first.
#[test]
fn a_leaving_member_does_not_hand_over_to_a_silent_one() {
    let mut member = second(&[1, 2, 3]);
    let all = record(1, &[1, 2, 3]);
    let early = lease_grant(&member, 1, ms(99));
    assert!(reads(&member.apply(ms(100), Event::Leave)));
    assert!(member.may_serve(ms(100)), "the store may be away");
    assert_eq!(asks(&member.apply(ms(110), read(&all))), [1, 3]);
    assert_eq!(member.not_serving_reason(ms(110)), Some(NotServingReason::Leaving));
    assert!(
        grants_lease(&member.apply(ms(115), lease_request(1, 1, 0))),
        "others need it until it goes"
    );
    assert!(!reads(&member.apply(ms(120), early)), "asked for while it served");
    assert!(put(&hear_all(&mut member, &[1], ms(110), ms(130))).is_none());
    // Node 3 is silent: suspected at 2500, its grace over 3000 after the epoch began.
    let alive = lease_grant(&member, 1, ms(2490));
    let _ = member.apply(ms(2495), alive);
    assert!(reads(&member.apply(ms(2500), Event::Tick)));
    assert!(put(&member.apply(ms(2510), read(&all))).is_none());
    assert!(!grants_lease(&member.apply(ms(2520), lease_request(1, 3, 0))));
    assert!(reads(&member.apply(ms(3000), Event::Tick)));
    let next = put(&member.apply(ms(3001), read(&all))).unwrap();
    assert_eq!(next, after(2, &[1], 1));
    assert!(!grants_lease(&member.apply(ms(3002), lease_request(1, 1, 0))));
}

/// 5.4
#[test]
fn the_last_member_cannot_leave() {
    let pair = record(1, &[1, 2]);
    // A request to leave is declined when the other is silent, and it serves alone.
    let mut member = second(&[1, 2]);
    let _ = member.apply(ms(1), Event::Leave);
    let _ = member.apply(ms(2), read(&pair));
    assert!(reads(&member.apply(ms(2500), Event::Tick)));
    let actions = member.apply(ms(2501), read(&pair));
    assert!(actions.contains(&Action::Decline(ConfigChange::Leave)));
    assert!(reads(&member.apply(ms(3000), Event::Tick)));
    assert_eq!(put(&member.apply(ms(3001), read(&pair))), Some(after(2, &[2], 2)));

    // With a failed leg it goes on alone, but gives the others time to exclude it first.
    let mut member = second(&[1, 2]);
    let _ = member.apply(ms(1), Event::LegFailed);
    assert!(!reads(&member.apply(ms(5499), Event::Tick)));
    assert!(reads(&member.apply(ms(5500), Event::Tick)));
    let next = put(&member.apply(ms(5501), read(&pair)));
    assert_eq!(next, Some(after(2, &[2], 2)));

    // With a lost leg it stays listed.
    let mut member = second(&[1, 2]);
    let _ = member.apply(ms(1), Event::LegLost);
    assert!(!reads(&member.apply(ms(90_000), Event::Tick)));
    assert_eq!(put(&member.apply(ms(90_001), read(&pair))), None);
    let next = put(&hear_all(&mut member, &[1], ms(90_001), ms(90_002)));
    assert_eq!(next, Some(after(2, &[1], 1)));
}

/// 5.4: leaving waits for the store, serving does not.
#[test]
fn a_leaving_member_serves_while_the_store_is_unavailable() {
    let mut member = second(&[1, 2]);
    let pair = record(1, &[1, 2]);
    let _ = member.apply(ms(1), Event::Leave);
    let _ = member.apply(ms(2), read(&pair));
    let alive = lease_grant(&member, 1, ms(2));
    assert!(reads(&member.apply(ms(3), alive)));
    let _ = member.apply(ms(4), Event::ConfigReadFailed);
    assert!(member.may_serve(ms(4)));
    assert!(reads(&member.apply(ms(504), Event::Tick)));
    let _ = member.apply(ms(505), read(&pair));
    assert!(!member.may_serve(ms(505)));
    assert!(put(&hear_all(&mut member, &[1], ms(505), ms(506))).is_some());
}

/// 5.4: a member that has answered, and then lost its power.
#[test]
fn a_leaving_member_does_not_hand_over_to_a_restarted_one() {
    let mut member = second(&[1, 2]);
    let pair = record(1, &[1, 2]);
    let _ = member.apply(ms(1), Event::LegLost);
    let alive = lease_grant(&member, 1, ms(1));
    assert!(reads(&member.apply(ms(2), alive)));
    let _ = member.apply(ms(3), replica_report(1, 1, Role::Restarted));
    assert!(put(&member.apply(ms(4), read(&pair))).is_none());
}

/// The leg is lost, or fails, before the first view of an epoch has begun: the driver may never
/// report that, and the others must not wait for it.
#[test]
fn a_leg_lost_while_draining_is_excluded() {
    for event in [Event::LegLost, Event::LegFailed] {
        let mut member = boot(2, 0, image(0, 0));
        let _ = member.apply(START, read(&record(1, &[1, 2])));
        assert_eq!(asks(&member.apply(ms(1), event)), [1]);
        assert!(!grants_lease(&member.apply(ms(2), lease_request(1, 1, 0))));
        assert_eq!(member.apply(ms(3), Event::ViewBegun(FIRST)), []);
        let next = put(&hear_all(&mut member, &[1], ms(1), ms(4)));
        assert_eq!(next, Some(MirrorConfig { config_id: FRESH, ..record(2, &[1]) }));
    }
}

/// The leg of a joiner fails a write that the configuration may rely on already.
#[test]
fn a_failed_joiner_starts_no_view() {
    let listed = |epoch, life| {
        let mut record = record(epoch, &[1, 2]);
        record.in_sync[1] = listed(2, life);
        record
    };
    let mut member = boot(2, 1, image(0, 0));
    let _ = member.apply(START, read(&record(1, &[1])));
    let _ = member.apply(START, Event::JoinStarted(Incarnation(22)));
    let _ = member.apply(ms(1), Event::LegFailed);
    let actions = member.apply(ms(2), start_view_change(View::first(Epoch(2)), &listed(2, 2)));
    assert!(actions.contains(&Action::BecomeOutOfSync));
    assert_eq!(member.not_serving_reason(ms(2)), Some(NotServingReason::LegFailed));
    let _ = member.apply(ms(3), start_view_change(View::first(Epoch(3)), &record(3, &[1])));
    assert_eq!(member.role(), Role::OutOfSync);
    // A new attempt copies what failed.
    let _ = member.apply(ms(4), Event::JoinStarted(Incarnation(23)));
    let view = View::first(Epoch(4));
    let actions = member.apply(ms(5), start_view_change(view, &listed(4, 3)));
    assert!(actions.iter().any(|a| matches!(a, Action::BeginView { view: v, .. } if *v == view)));
}

/// 6.6: the joiner is not new any more, and stays required from the put on.
#[test]
fn a_put_admission_cannot_be_withdrawn() {
    let mut pair = record(1, &[1, 2]);
    pair.replicas[2].is_new = true;
    let mut member = boot(1, 0, image(0, 0));
    let _ = member.apply(START, Event::LinkUp(NodeId(2)));
    let _ = member.apply(START, read(&pair));
    let _ = member.apply(START, Event::ViewBegun(FIRST));
    assert_eq!(member.missing_do_view_change(), nodes(&[2]));
    let _ = member.apply(START, Event::DoViewChange(NodeId(2), FIRST));
    assert_eq!(member.missing_do_view_change(), []);
    let _ = member.apply(START, Event::Reconciled(FIRST));
    let _ = member.apply(START, read(&pair));
    let _ = member.apply(ms(1), Event::Admit(listed(3, 4)));
    assert_eq!(member.pending_admission(), None);
    let next = put(&member.apply(ms(2), read(&pair))).unwrap();
    assert_eq!(next.replicas.iter().filter(|r| r.is_new).count(), 0);
    assert_eq!(member.pending_admission(), Some(listed(3, 4)));
    let declined = Action::Decline(ConfigChange::CancelAdmission(NodeId(3)));
    assert!(member.apply(ms(3), Event::CancelAdmission(NodeId(3))).contains(&declined));
    let _ = member.apply(ms(4), Event::PutCompleted(PutOutcome::Unknown));
    for event in [Event::LinkUp(NodeId(2)), Event::LinkUp(NodeId(3)), Event::LegFailed] {
        let actions = member.apply(ms(5), event);
        assert!(!actions.iter().any(|a| matches!(a, Action::BeginView { .. })));
    }
    assert_eq!(put(&member.apply(ms(6), read(&pair))), None, "it began before the outcome");
    assert_eq!(put(&member.apply(ms(7), read(&pair))), Some(next.clone()));
    let _ = member.apply(ms(8), Event::PutCompleted(PutOutcome::Committed));
    assert_eq!((member.pending_admission(), member.config()), (None, Some(&next)));
}

/// 6.6: the leg of a sole primary fails a write that its joiner may have applied.
#[test]
fn a_failing_sole_primary_admits_no_joiner() {
    let admit = Event::Admit(listed(3, 4));
    let mut member = serving(&[1]);
    let _ = member.apply(ms(1), admit.clone());
    let declined = Action::Decline(ConfigChange::Admit(NodeId(3)));
    assert_eq!(member.apply(ms(2), Event::LegFailed), [declined]);
    assert!(member.may_serve(ms(2)));
    assert_eq!(put(&member.apply(ms(3), read(&record(1, &[1])))), None);

    // The put was sent: it may not be the sole member any more.
    let mut member = serving(&[1]);
    let _ = member.apply(ms(1), admit);
    let next = put(&member.apply(ms(2), read(&record(1, &[1])))).unwrap();
    let _ = member.apply(ms(3), Event::LegFailed);
    assert!(!member.may_serve(ms(3)));
    assert!(
        member
            .apply(ms(4), Event::PutCompleted(PutOutcome::Committed))
            .contains(&Action::BecomeOutOfSync)
    );
    let joiner = MembershipMessage::LeaseGrant {
        epoch: next.epoch,
        incarnation: member.incarnation(),
        stamp: ClockStamp(u64::try_from(ms(4).as_nanos()).unwrap()),
    };
    let _ = member.apply(ms(5), Event::Received(NodeId(3), joiner));
    let last = put(&member.apply(ms(6), read(&next))).unwrap();
    assert_eq!((last.in_sync, last.primary), (vec![listed(3, 4)], NodeId(3)));
}

/// 5.4: only suspects are excluded together: linked and silent.
#[test]
fn not_serving_names_connected_members_without_an_answer() {
    let mut member = serving(&[1, 2, 3]);
    assert_eq!(member.missing_do_view_change(), []);
    let _ = member.apply(ms(1), Event::LinkDown(NodeId(3)));
    let _ = member.apply(ms(2), Event::LinkUp(NodeId(2)));
    assert_eq!(member.missing_do_view_change(), [], "it drains");
    let _ = member.apply(ms(3), Event::ViewBegun(FIRST.next_round()));
    assert_eq!(member.missing_do_view_change(), nodes(&[2]));
    let _ = member.apply(ms(4), Event::DoViewChange(NodeId(2), FIRST.next_round()));
    assert_eq!(member.missing_do_view_change(), []);
}

/// 5.6: a replica that has restarted, beside a member whose leg has failed.
#[test]
fn no_primary_is_chosen_over_a_member_with_a_failed_leg() {
    let mut failed = second(&[1, 2]);
    let _ = failed.apply(ms(1), Event::LegFailed);
    let says = Event::Received(NodeId(2), MembershipMessage::ReplicaReport(failed.public_report()));
    let mut returned = boot(1, 1, ImageSummary { is_clean: true, same_boot: true, ..image(1, 1) });
    let _ = returned.apply(START, read(&record(1, &[1, 2])));
    let _ = returned.apply(START, Event::LinkUp(NodeId(2)));
    let _ = returned.apply(START, says);
    assert!(!reads(&returned.apply(ms(9000), Event::Tick)));
    assert_eq!(
        returned.not_serving_reason(ms(9000)),
        Some(NotServingReason::AwaitingExclusion(NodeId(2)))
    );
}

fn lease_revoked(from: u16, life: u64, view: View) -> Event {
    let incarnation = listed(from, life).incarnation;
    Event::Received(NodeId(from), MembershipMessage::LeaseRevoked { view, incarnation })
}

/// 5.5: a member that confirms a lease revocation is excluded without waiting for its leases.
#[test]
fn a_hanging_member_is_excluded_once_its_lease_is_revoked() {
    let pair = record(1, &[1, 2]);
    let mut member = serving(&[1, 2]);
    assert!(reads(&member.apply(ms(100), Event::PeerStuck(NodeId(2)))));
    let actions = member.apply(ms(101), read(&pair));
    let incarnation = listed(2, 0).incarnation;
    let asks = Action::Send(NodeId(2), MembershipMessage::RevokeLease { view: FIRST, incarnation });
    assert!(actions.contains(&asks));
    assert!(!member.may_serve(ms(101)));
    for other in [lease_revoked(2, 1, FIRST), lease_revoked(2, 0, FIRST.next_round())] {
        assert!(!reads(&member.apply(ms(102), other)));
    }
    assert!(member.apply(ms(601), Event::Tick).contains(&asks), "it is said again");
    assert!(reads(&member.apply(ms(602), lease_revoked(2, 0, FIRST))));
    let next = put(&member.apply(ms(603), read(&pair))).unwrap();
    assert_eq!(next.in_sync, [listed(1, 0)]);
}

/// 5.5: a member whose lease is revoked.
#[test]
fn a_member_with_a_revoked_lease_serves_again_in_another_view() {
    let pair = record(1, &[1, 2]);
    let mut member = second(&[1, 2]);
    let revoke = |from, life, view| {
        let incarnation = listed(2, life).incarnation;
        Event::Received(NodeId(from), MembershipMessage::RevokeLease { view, incarnation })
    };
    let stale = View { epoch: Epoch(0), round: 9 };
    for in_vain in [revoke(1, 1, FIRST), revoke(3, 0, FIRST), revoke(1, 0, stale)] {
        assert_eq!(member.apply(START, in_vain), []);
        assert!(member.may_serve(START));
    }
    let incarnation = listed(2, 0).incarnation;
    let says =
        Action::Send(NodeId(1), MembershipMessage::LeaseRevoked { view: FIRST, incarnation });
    for _ in 0..2 {
        assert_eq!(member.apply(START, revoke(1, 0, FIRST)), std::slice::from_ref(&says));
        assert_eq!(
            member.not_serving_reason(START),
            Some(NotServingReason::LeaseRevoked(NodeId(1)))
        );
    }
    let next = FIRST.next_round();
    for event in
        [start_view_change(next, &pair), Event::ViewBegun(next), Event::StartView(NodeId(1), next)]
    {
        assert!(!member.may_serve(START));
        let _ = member.apply(START, event);
    }
    assert!(member.may_serve(START));
    assert_eq!(member.apply(START, revoke(1, 0, FIRST)), [], "that view is over");
    assert!(member.may_serve(START));
}

/// 5.5: an exclusion is undone while the store is unavailable, and a revoked member serves in a new
/// view.
#[test]
fn a_member_that_cannot_be_excluded_is_kept() {
    let pair = record(1, &[1, 2]);
    for linked in [true, false] {
        let mut member = serving(&[1, 2]);
        let _ = member.apply(ms(100), Event::PeerStuck(NodeId(2)));
        let _ = member.apply(ms(101), read(&pair));
        if !linked {
            let _ = member.apply(ms(102), Event::LinkDown(NodeId(2)));
        }
        assert!(reads(&member.apply(ms(103), lease_revoked(2, 0, FIRST))));
        let actions = member.apply(ms(104), Event::ConfigReadFailed);
        let begins = Action::BeginView { view: FIRST.next_round(), config: None };
        assert_eq!(actions.contains(&begins), linked);
        assert_eq!(member.may_serve(ms(104)), !linked, "it may, as far as it knows");
    }
}

/// 5.1: a request that came before its epoch was adopted is repeated as soon as the receiver has
/// adopted it.
#[test]
fn a_lease_request_after_adoption_is_returned_at_once() {
    let pair = record(1, &[1, 2]);
    let mut member = boot(1, 0, image(0, 0));
    let _ = member.apply(START, Event::LinkUp(NodeId(2)));
    let _ = member.apply(START, read(&pair));
    assert_eq!(asks(&member.apply(START, Event::ViewBegun(FIRST))), [2]);
    assert!(asks(&member.apply(ms(1), Event::Tick)).is_empty());
    let actions = member.apply(ms(2), lease_request(1, 2, 0));
    assert!(grants_lease(&actions));
    assert_eq!(asks(&actions), [2], "it had nothing to answer with before");
    assert!(asks(&member.apply(ms(3), lease_request(1, 2, 0))).is_empty(), "attack 85");
    let event = lease_grant(&member, 2, ms(2));
    let _ = member.apply(ms(4), event);
    assert!(asks(&member.apply(ms(5), lease_request(1, 2, 0))).is_empty(), "it has answered");
}

/// Common and last cleared counts, in epoch 1.
fn peer_generations(common: u32, cleared: u32) -> PeerGenerations {
    let at = |count| DataGeneration { epoch: Epoch(1), count };
    PeerGenerations { common: at(common), last_cleared: at(cleared) }
}

/// The generations that an image has recorded, with that of node 2.
fn generations(own: u32, about: PeerGenerations) -> RecordedGenerations {
    let generation = DataGeneration { epoch: Epoch(1), count: own };
    RecordedGenerations {
        generation,
        is_log_lost: false,
        by_image: vec![(Uuid::from_u128(2), about)],
    }
}

fn says(
    member: &mut MirrorMembership,
    now: Duration,
    is_rolled_back: bool,
    about: PeerGenerations,
) {
    let Event::Received(from, MembershipMessage::ReplicaReport(report)) =
        replica_report(2, 1, Role::Restarted)
    else {
        unreachable!()
    };
    let message = MembershipMessage::ReplicaReport(ReplicaReport {
        is_rolled_back,
        generations: about,
        ..report
    });
    let _ = member.apply(now, Event::Received(from, message));
}

/// RFD 0032: an image older than the configuration tells does not take over by itself, alone or
/// not.
#[test]
fn a_rolled_back_copy_does_not_take_over_unless_forced() {
    let later = DataGeneration { epoch: Epoch(1), count: 4 };
    let record = |in_sync: &[u16]| {
        let history = CopyHistory { generation: later, ..CopyHistory::default() };
        MirrorConfig { history, ..record(1, in_sync) }
    };
    for (own, leads) in [(4, true), (3, false)] {
        let mut alone = boot(1, 1, ImageSummary { is_clean: true, same_boot: true, ..image(1, 1) });
        alone.set_generations(generations(own, PeerGenerations::default()));
        let _ = alone.apply(ms(1), read(&record(&[1])));
        let put = put(&alone.apply(ms(3001), read(&record(&[1]))));
        assert_eq!(put.is_some(), leads, "{own}");
        let refuses =
            NotServingReason::RolledBack { witness: RollbackWitness::Config, unheard: vec![] };
        assert_eq!(alone.not_serving_reason(ms(3002)) == Some(refuses), !leads, "{own}");
    }
    let mut forced = boot(1, 1, image(1, 1));
    forced.set_generations(generations(3, PeerGenerations::default()));
    let _ = forced.apply(ms(1), read(&record(&[1, 2])));
    let _ = forced.apply(ms(2), Event::ForcePrimary);
    let next = put(&forced.apply(ms(3), read(&record(&[1, 2])))).expect("an order");
    assert_eq!(
        (next.history.forced_epoch, next.history.generation),
        (Epoch(2), DataGeneration::first(Epoch(2)))
    );
    // If its history was lost, a missing generation proves nothing.
    let mut lost = boot(1, 1, image(1, 1));
    lost.set_generations(RecordedGenerations {
        is_log_lost: true,
        ..RecordedGenerations::default()
    });
    let _ = lost.apply(ms(1), read(&record(&[1])));
    assert!(put(&lost.apply(ms(3001), read(&record(&[1])))).is_some());
}

/// RFD 0032: a replica that takes over after a total outage is not older than any other knows.
#[test]
fn a_copy_that_a_peer_knows_to_be_rolled_back_does_not_take_over() {
    let pair = record(1, &[1, 2]);
    let cases = [
        // Its generations with the other, the other's with it, whether it is older: which one takes
        // over.
        (peer_generations(4, 4), peer_generations(4, 4), false, Some(1)),
        (peer_generations(4, 3), peer_generations(4, 4), false, Some(1)),
        (peer_generations(3, 3), peer_generations(4, 3), false, Some(1)),
        (peer_generations(3, 3), peer_generations(4, 4), false, None),
        (peer_generations(4, 4), peer_generations(3, 3), true, Some(1)),
    ];
    for (own, peer, is_rolled_back, leads) in cases {
        let mut member = boot(1, 1, image(1, 1));
        member.set_generations(generations(4, own));
        let _ = member.apply(ms(1), Event::LinkUp(NodeId(2)));
        says(&mut member, ms(1), is_rolled_back, peer);
        let _ = member.apply(ms(2), read(&pair));
        let next = put(&member.apply(ms(3001), read(&pair)));
        assert_eq!(next.map(|r| r.primary), leads.map(NodeId), "{own:?} {peer:?}");
        let sent = member.report_for(NodeId(2));
        assert_eq!((sent.is_rolled_back, sent.generations), (leads.is_none(), own));
    }
}

/// RFD 0032: how joiners compare.
#[test]
fn joiners_are_compared_by_common_generations() {
    let mut member = boot(1, 0, image(1, 1));
    let _ = member.apply(ms(1), read(&record(1, &[1])));
    let judge = |member: &MirrorMembership, own, joiner, history_lost| {
        member.compare_joiner(&own, &joiner, history_lost)
    };
    let cases = [
        (peer_generations(4, 4), peer_generations(4, 4), JoinerComparison::DirtyRegionsSuffice),
        // The other was asked to record a generation under which this one then did not clear, and
        // vice versa.
        (peer_generations(4, 3), peer_generations(5, 3), JoinerComparison::DirtyRegionsSuffice),
        (peer_generations(5, 4), peer_generations(4, 4), JoinerComparison::DirtyRegionsSuffice),
        (peer_generations(4, 4), peer_generations(3, 3), JoinerComparison::JoinerRolledBack),
        (peer_generations(4, 4), peer_generations(0, 0), JoinerComparison::JoinerRolledBack),
        (peer_generations(3, 3), peer_generations(4, 4), JoinerComparison::JoinerNewer),
    ];
    for (own, joiner, comparison) in cases {
        assert_eq!(judge(&member, own, joiner, false), comparison, "{own:?} {joiner:?}");
    }
    assert_eq!(
        judge(&member, peer_generations(0, 0), peer_generations(4, 4), true),
        JoinerComparison::HistoryUnknown
    );
    // An operator has decided since.
    let forced = CopyHistory { forced_epoch: Epoch(2), ..CopyHistory::default() };
    let _ = member.apply(ms(2), read(&MirrorConfig { history: forced, ..record(2, &[1]) }));
    assert_eq!(
        judge(&member, peer_generations(3, 3), peer_generations(4, 4), false),
        JoinerComparison::HistoryUnknown
    );
}

/// RFD 0032, attack 18: a flush for bitmap clearing that comes when the next configuration is known
/// already is not confirmed. In that configuration this member is alone: it would record the
/// generation with no other image, and the primary would clear under it.
#[test]
fn a_generation_is_recorded_with_the_members_of_its_epoch_only() {
    let mut member = serving(&[1, 2]);
    assert_eq!(member.generation_peers(Epoch(1)), Some(vec![Uuid::from_u128(2)]));
    let _ = member.apply(ms(1), read(&record(2, &[1])));
    assert_eq!(member.generation_peers(Epoch(1)), None);
}

/// RFD 0032: the configuration that admits a rolled-back copy notes that.
#[test]
fn the_config_says_which_copies_were_rolled_back() {
    let mut member = serving(&[1]);
    member.note_rolled_back(NodeId(2));
    let joiner = listed(2, 1);
    let _ = member.apply(ms(1), Event::Admit(joiner));
    let next = put(&member.apply(ms(2), read(&record(1, &[1])))).expect("it is taken in");
    assert_eq!(next.history.rolled_back, [NodeId(2)]);
    assert!(next.has_member(joiner.node, joiner.incarnation));
}
