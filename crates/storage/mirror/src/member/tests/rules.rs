//! The rules of RFD 0010, 3.2 and 5, one by one. A lease is 2 s, the grace 3 s.

use std::time::Duration;

use block::Epoch;
use peer::{Incarnation, Lineage, NodeId, Role, SharedLineage, Stamp, Standing, View};
use uuid::Uuid;

use super::super::super::record::{History, Member as Listed, Put, Record, Replica};
use super::super::{
    Action, Change, Event, Image, Judgement, Lineages, Member, Refusal, Say, SetBack, Settings, Why,
};

const START: Duration = Duration::from_secs(1000);
const FRESH: u128 = 77;

fn ms(ms: u64) -> Duration {
    START + Duration::from_millis(ms)
}

/// Of nodes 1 to 3, these in sync under incarnation 10 × node; the first is primary.
fn record(epoch: u64, in_sync: &[u16]) -> Record {
    let replica =
        |n: u16| Replica { node: NodeId(n), image: Uuid::from_u128(u128::from(n)), new: false };
    let mut listed: Vec<_> = in_sync.iter().map(|&n| listed(n, 0)).collect();
    listed.sort_unstable_by_key(|m| m.node);
    Record {
        epoch: Epoch(epoch),
        config: u128::from(epoch),
        replicas: (1..=3).map(replica).collect(),
        in_sync: listed,
        primary: NodeId(in_sync[0]),
        born: Epoch::default(),
        history: History::default(),
    }
}

/// What is put in place of a record: all members have reached the beginning of epoch `lineage`.
fn after(epoch: u64, in_sync: &[u16], lineage: u64) -> Record {
    let history = History { lineage: Lineage::first(Epoch(lineage)), ..History::default() };
    Record { config: FRESH, history, ..record(epoch, in_sync) }
}

fn listed(node: u16, life: u64) -> Listed {
    Listed { node: NodeId(node), incarnation: Incarnation(u64::from(node) * 10 + life) }
}

fn image(epoch: u64, config: u128) -> Image {
    let (clean, same_boot, lost) = (false, false, false);
    let lineage = Lineage::first(Epoch(epoch));
    Image { epoch: Epoch(epoch), config, clean, same_boot, lineage, lost }
}

fn boot(me: u16, life: u64, image: Image) -> Member {
    let incarnation = listed(me, life).incarnation;
    let mut member = Member::new(NodeId(me), incarnation, Settings::default(), START, image);
    assert_eq!(member.apply(START, Event::Tick), [Action::ReadRecord]);
    member
}

fn read(record: &Record) -> Event {
    Event::Read { record: record.clone(), fresh: FRESH }
}

fn renew(epoch: u64, from: u16, life: u64) -> Event {
    let incarnation = listed(from, life).incarnation;
    Event::Heard(NodeId(from), Say::Renew { epoch: Epoch(epoch), incarnation, stamp: Stamp(5) })
}

fn promise(member: &Member, from: u16, asked: Duration) -> Event {
    let epoch = member.record().unwrap().epoch;
    let stamp = Stamp(u64::try_from(asked.as_nanos()).unwrap());
    let incarnation = member.incarnation();
    Event::Heard(NodeId(from), Say::Promise { epoch, incarnation, stamp })
}

fn stands(from: u16, life: u64, role: Role) -> Event {
    let incarnation = listed(from, life).incarnation;
    let (clean, same_boot) = (false, false);
    let (epoch, config, older, shared) = (Epoch(1), 1, false, SharedLineage::default());
    let standing = Standing { incarnation, epoch, config, role, clean, same_boot, older, shared };
    Event::Heard(NodeId(from), Say::Standing(standing))
}

fn start(view: View, record: &Record) -> Event {
    Event::Heard(record.primary, Say::Start { view, record: record.clone() })
}

fn promised(actions: &[Action]) -> bool {
    actions.iter().any(|a| matches!(a, Action::Send(_, Say::Promise { .. })))
}

fn reads(actions: &[Action]) -> bool {
    actions.contains(&Action::ReadRecord)
}

fn put(actions: &[Action]) -> Option<Record> {
    actions.iter().find_map(|a| match a {
        Action::Put { record, .. } => Some(record.clone()),
        _ => None,
    })
}

fn nodes(nodes: &[u16]) -> Vec<NodeId> {
    nodes.iter().map(|&n| NodeId(n)).collect()
}

const FIRST: View = View { epoch: Epoch(1), round: 0 };

/// Node 1, primary of these, linked to all, view open, all promises fresh at `START`.
fn serving(in_sync: &[u16]) -> Member {
    let mut member = boot(1, 0, image(0, 0));
    let mut tell = |event| member.apply(START, event);
    for &n in &in_sync[1..] {
        let _ = tell(Event::LinkUp(NodeId(n)));
        let _ = tell(stands(n, 0, Role::Member));
    }
    let begin = Action::Begin { view: FIRST, record: Some(record(1, in_sync)) };
    assert!(tell(read(&record(1, in_sync))).contains(&begin));
    let _ = tell(Event::Began(FIRST));
    for &n in &in_sync[1..] {
        let _ = tell(Event::Started(NodeId(n), FIRST));
    }
    assert_eq!(tell(Event::Settled(FIRST)), [Action::Opened(FIRST)]);
    // What was learned while a read ran is looked at again.
    let _ = member.apply(START, read(&record(1, in_sync)));
    for &n in &in_sync[1..] {
        let event = promise(&member, n, START);
        let _ = member.apply(START, event);
    }
    assert!(member.serves(START));
    member
}

/// These have answered what was asked at `asked`; then the record is read.
fn hear_all(member: &mut Member, nodes: &[u16], asked: Duration, now: Duration) -> Vec<Action> {
    for &n in nodes {
        let event = promise(member, n, asked);
        let _ = member.apply(now, event);
    }
    let record = member.record().unwrap().clone();
    member.apply(now, read(&record))
}

/// 5.1
#[test]
fn settings_that_let_two_act_are_refused() {
    let cases = [(2000, 3000, true), (2000, 2445, true), (2000, 2444, false), (0, 1, false)];
    for (lease, grace, safe) in cases {
        let settings = Settings::new(Duration::from_millis(lease), Duration::from_millis(grace));
        assert_eq!(settings.is_ok(), safe, "{lease} {grace}");
    }
}

/// 5.1
#[test]
fn who_is_promised_something() {
    let cases = [
        ("a member", renew(1, 2, 0), true),
        ("one that has returned", renew(1, 2, 1), false),
        ("one outside", renew(1, 3, 0), false),
        ("a member of an older epoch", renew(0, 2, 0), false),
        ("a member of a later one", renew(2, 2, 0), false),
    ];
    for (who, event, answered) in cases {
        assert_eq!(promised(&serving(&[1, 2]).apply(ms(1), event)), answered, "{who}");
    }
    let below = serving(&[1, 2]).apply(ms(1), renew(0, 2, 0));
    assert_eq!(below, [Action::Send(NodeId(2), Say::Newer(Epoch(1)))]);
    assert!(reads(&serving(&[1, 2]).apply(ms(1), renew(2, 2, 0))));
}

/// 5.3
#[test]
fn a_lease_runs_from_when_it_was_asked_for() {
    let mut member = serving(&[1, 2, 3]);
    let two = promise(&member, 2, ms(500));
    let _ = member.apply(ms(1900), two);
    assert!(member.serves(ms(1999)) && !member.serves(ms(2000)));
    assert_eq!(member.waits_for(ms(2000)), Some(Why::Lease(vec![NodeId(3)])));
    let three = promise(&member, 3, ms(1900));
    let _ = member.apply(ms(2100), three);
    assert!(member.serves(ms(2499)) && !member.serves(ms(2500)));
    let alone = serving(&[1]);
    assert!(alone.serves(ms(1_000_000)));
}

/// 5.5, and 5.2 for what follows.
#[test]
fn a_silent_member_is_given_up_and_then_put_out() {
    let mut member = serving(&[1, 2]);
    assert!(promised(&member.apply(ms(1000), renew(1, 2, 0))));
    assert!(!reads(&member.apply(ms(2499), Event::Tick)));
    assert!(reads(&member.apply(ms(2500), Event::Tick)));
    assert!(put(&member.apply(ms(2510), read(&record(1, &[1, 2])))).is_none());
    assert_eq!(member.waits_for(ms(2510)), Some(Why::Deciding(vec![NodeId(2)])));
    assert!(!promised(&member.apply(ms(2520), renew(1, 2, 0))));
    assert!(!reads(&member.apply(ms(3999), Event::Tick)));
    assert!(reads(&member.apply(ms(4000), Event::Tick)));
    let next = put(&member.apply(ms(4010), read(&record(1, &[1, 2])))).unwrap();
    assert_eq!(next, after(2, &[1], 2));
    // Boats are burnt: no outcome is known, so the same is put again.
    assert!(reads(&member.apply(ms(4100), Event::Put(Put::Unknown))));
    assert!(!promised(&member.apply(ms(4110), renew(1, 2, 0))));
    assert_eq!(member.waits_for(ms(4110)), Some(Why::Changing));
    let again = member.apply(ms(4120), Event::Read { record: record(1, &[1, 2]), fresh: 99 });
    assert_eq!(put(&again), Some(next.clone()));
    let begin = Action::Begin { view: View::first(Epoch(2)), record: Some(next) };
    assert!(member.apply(ms(4200), Event::Put(Put::Done)).contains(&begin));
}

/// 5.5: it may be this one that is cut off.
#[test]
fn without_the_store_promises_go_on() {
    let mut member = serving(&[1, 2]);
    assert!(reads(&member.apply(ms(2500), Event::Tick)));
    let _ = member.apply(ms(2600), Event::ReadFailed);
    assert!(promised(&member.apply(ms(2610), renew(1, 2, 0))));
    // Given up, but the store goes before the put: taken back.
    assert!(reads(&member.apply(ms(3100), Event::Tick)));
    let _ = member.apply(ms(3110), read(&record(1, &[1, 2])));
    assert!(!promised(&member.apply(ms(3120), renew(1, 2, 0))));
    assert!(reads(&member.apply(ms(5610), Event::Tick)));
    let _ = member.apply(ms(5700), Event::ReadFailed);
    assert!(promised(&member.apply(ms(5710), renew(1, 2, 0))));
}

/// 5.2: what excludes nobody lets it serve for a lease.
#[test]
fn an_admission_lets_the_primary_serve_on() {
    let mut member = serving(&[1, 2]);
    let joiner = listed(3, 4);
    assert!(reads(&member.apply(ms(1), Event::Admit(joiner))));
    let next = put(&member.apply(ms(10), read(&record(1, &[1, 2])))).unwrap();
    assert!(next.has(NodeId(3), joiner.incarnation));
    let two = promise(&member, 2, ms(1500));
    let _ = member.apply(ms(1501), two);
    assert!(member.serves(ms(2009)) && !member.serves(ms(2010)));
    // A new round of this epoch would forget the joiner, which the store may have let in.
    let _ = member.apply(ms(20), Event::LinkDown(NodeId(2)));
    let up = member.apply(ms(30), Event::LinkUp(NodeId(2)));
    assert!(!up.iter().any(|a| matches!(a, Action::Begin { .. })));
}

/// 5.4
#[test]
fn planned_changes_and_their_guards() {
    type Case = (&'static str, &'static [u16], Event, Result<(&'static [u16], u16), Change>);
    let cases: [Case; 6] = [
        ("switch", &[1, 2], Event::Switch(NodeId(2)), Ok((&[1, 2], 2))),
        ("to one outside", &[1, 2], Event::Switch(NodeId(3)), Err(Change::Switch(NodeId(3)))),
        ("to itself", &[1, 2], Event::Switch(NodeId(1)), Err(Change::Switch(NodeId(1)))),
        ("leave", &[1, 2, 3], Event::Leave, Ok((&[2, 3], 2))),
        ("the last one leaves", &[1], Event::Leave, Err(Change::Leave)),
        ("admit a member", &[1, 2], Event::Admit(listed(2, 3)), Err(Change::Admit(NodeId(2)))),
    ];
    for (what, members, event, expected) in cases {
        let mut member = serving(members);
        assert!(reads(&member.apply(ms(1), event)), "{what}");
        let mut actions = member.apply(ms(2), read(&record(1, members)));
        if what == "leave" {
            assert!(put(&actions).is_none() && !member.serves(ms(2)), "it asks who lives first");
            actions = hear_all(&mut member, &members[1..], ms(2), ms(3));
        }
        match expected {
            Ok((in_sync, primary)) => {
                let next = put(&actions).expect(what);
                assert_eq!(next.in_sync, record(2, in_sync).in_sync, "{what}");
                assert_eq!(next.primary, NodeId(primary), "{what}");
                assert_eq!(member.serves(ms(2)), what == "switch", "{what}");
            }
            Err(change) => {
                assert!(actions.contains(&Action::Declined(change)), "{what}");
                assert!(put(&actions).is_none() && member.serves(ms(3)), "{what}");
            }
        }
    }
}

/// 4.8 and 5.4: a lost leg stops at once and leaves.
#[test]
fn a_lost_leg_leaves() {
    let mut member = serving(&[1, 2]);
    let asked = member.apply(ms(1), Event::LegDead);
    assert!(asked.iter().any(|a| matches!(a, Action::Send(_, Say::Renew { .. }))));
    assert!(!member.serves(ms(1)) && member.role() == Role::Outside);
    assert!(!promised(&member.apply(ms(1), renew(1, 2, 0))));
    assert!(put(&member.apply(ms(2), read(&record(1, &[1, 2])))).is_none());
    let next = put(&hear_all(&mut member, &[2], ms(1), ms(3))).unwrap();
    assert_eq!((next.in_sync, next.primary), (vec![listed(2, 0)], NodeId(2)));
    let mut last = serving(&[1]);
    assert!(!reads(&last.apply(ms(1), Event::LegDead)));
    assert_eq!(last.waits_for(ms(1)), Some(Why::LegDead));
}

/// 5.6: node 1 has returned into a record that lists it and node 2, or it alone.
#[test]
fn who_leads_after_a_blackout() {
    type Case = (&'static str, &'static [u16], bool, Option<Event>, bool);
    let cases: [Case; 7] = [
        ("a: nobody else is listed", &[1], false, None, true),
        ("b: its log is clean", &[1, 2], true, Some(stands(2, 1, Role::Returned)), true),
        ("b: but the other has yet to read the record", &[1, 2], true, None, false),
        ("b: but the other is a member", &[1, 2], true, Some(stands(2, 0, Role::Member)), false),
        ("c: nobody was heard", &[1, 2], false, None, false),
        ("c: the other has returned", &[1, 2], false, Some(stands(2, 1, Role::Returned)), true),
        ("c: the last primary leads", &[2, 1], false, Some(stands(2, 1, Role::Returned)), false),
    ];
    for (what, members, clean, heard, leads) in cases {
        let mut member = boot(1, 1, Image { clean, same_boot: clean, ..image(1, 1) });
        let record = record(1, members);
        assert!(member.apply(START, read(&record)).contains(&Action::Outside), "{what}");
        let _ = member.apply(START, Event::LinkUp(NodeId(2)));
        let silent = heard.is_none();
        if let Some(heard) = heard {
            let _ = member.apply(START, heard);
        }
        assert!(!reads(&member.apply(ms(2999), Event::Tick)), "{what}");
        let mute = member.waits_for(START) == Some(Why::Mute(vec![NodeId(2)]));
        assert_eq!(mute, clean && silent, "{what}");
        assert_eq!(reads(&member.apply(ms(3000), Event::Tick)), leads, "{what}");
        if leads {
            let next = put(&member.apply(ms(3001), read(&record))).expect(what);
            assert_eq!((next.in_sync, next.primary), (vec![listed(1, 1)], NodeId(1)), "{what}");
        }
    }
}

/// A volume that nobody has served yet waits for no grace time: as soon as all have met, the one that
/// is primary by the first record takes all of them in (5.6 e).
#[test]
fn a_new_volume_is_led_at_once_with_all_its_replicas() {
    let nobody = |n: u16| Listed { node: NodeId(n), incarnation: Incarnation(0) };
    let first = Record { in_sync: vec![nobody(1), nobody(2)], ..record(1, &[1, 2]) };
    let unused = Image { lineage: Lineage::default(), ..image(0, 0) };
    let says = |epoch: u64, role| {
        let Event::Heard(from, Say::Standing(said)) = stands(2, 0, role) else { unreachable!() };
        let standing = Standing { epoch: Epoch(epoch), config: 0, ..said };
        Event::Heard(from, Say::Standing(standing))
    };
    let met = |image, record: &Record, heard: Option<Event>| {
        let mut member = boot(1, 0, image);
        let _ = member.apply(START, read(record));
        let _ = member.apply(START, Event::LinkUp(NodeId(2)));
        let asks = heard.is_some_and(|heard| reads(&member.apply(ms(1), heard)));
        (member, asks)
    };
    let returned = || Some(says(0, Role::Returned));
    let lost = Image { lost: true, ..unused };
    let (mut member, asks) = met(unused, &first, returned());
    assert!(asks, "nothing was ever promised");
    let next = put(&member.apply(ms(2), read(&first))).unwrap();
    assert_eq!((next.epoch, next.primary), (Epoch(2), NodeId(1)));
    assert_eq!(next.in_sync, vec![listed(1, 0), listed(2, 0)]);
    // A put for which nobody is thrown out: this one serves as soon as the other has come along.
    assert!(member.admitting().is_none());
    let other_first = Record { primary: NodeId(2), ..first.clone() };
    let served = Record { epoch: Epoch(2), ..first.clone() };
    let cases = [
        ("the other was not heard", unused, &first, None),
        ("it has not read the record", unused, &first, Some(says(0, Role::Unknown))),
        ("it is no part of it", unused, &first, Some(says(0, Role::Outside))),
        ("its image was in use", unused, &first, Some(says(1, Role::Returned))),
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

/// 5.6 b: one whose log is clean waits for nobody who has no session.
#[test]
fn a_clean_log_leads_where_the_others_are_away() {
    let mut member = boot(1, 1, Image { clean: true, same_boot: true, ..image(1, 1) });
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    assert!(!reads(&member.apply(ms(2999), Event::Tick)));
    assert!(reads(&member.apply(ms(3000), Event::Tick)));
}

/// The image may be a copy of the one that was used last, and that one in use elsewhere.
#[test]
fn a_clean_log_of_another_boot_waits_for_the_others() {
    let mut member = boot(1, 1, Image { clean: true, same_boot: false, ..image(1, 1) });
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    assert!(!reads(&member.apply(ms(30_000), Event::Tick)));
    assert_eq!(member.waits_for(ms(30_000)), Some(Why::Blackout(vec![NodeId(2)])));
}

/// 5.6 d
#[test]
fn an_operator_may_force() {
    let mut member = boot(1, 1, image(1, 1));
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    assert_eq!(member.waits_for(START), Some(Why::Blackout(vec![NodeId(2)])));
    assert!(reads(&member.apply(ms(1), Event::Force)));
    assert!(put(&member.apply(ms(2), read(&record(1, &[1, 2])))).is_some());
    assert_eq!(serving(&[1]).apply(ms(1), Event::Force), [Action::Declined(Change::Force)]);
}

/// 5.6 d: the leg is found dead as it is to record that it goes on alone.
#[test]
fn who_is_to_go_on_and_loses_its_leg_asks_no_more() {
    let mut member = boot(1, 1, image(1, 1));
    let pair = record(1, &[1, 2]);
    let _ = member.apply(START, read(&pair));
    assert!(reads(&member.apply(ms(1), Event::Force)));
    assert!(put(&member.apply(ms(2), read(&pair))).is_some());
    assert!(!reads(&member.apply(ms(3), Event::LegDead)));
    assert!(!reads(&member.apply(ms(3), Event::Put(Put::Refused))));
    assert_eq!(member.waits_for(ms(3)), Some(Why::LegDead));
}

/// 5.6 d: neither a copy that was never in sync goes on, nor one beside a member that is there.
#[test]
fn an_order_to_go_on_has_its_limits() {
    let mut new = record(1, &[2]);
    new.replicas.iter_mut().filter(|r| r.node == NodeId(1)).for_each(|r| r.new = true);
    let mut member = boot(1, 1, image(0, 0));
    let _ = member.apply(START, read(&new));
    assert!(reads(&member.apply(ms(1), Event::Force)));
    let actions = member.apply(ms(2), read(&new));
    assert!(actions.contains(&Action::Declined(Change::Force)), "{actions:?}");

    let mut member = boot(1, 1, image(1, 1));
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    let _ = member.apply(START, Event::LinkUp(NodeId(2)));
    let _ = member.apply(START, stands(2, 0, Role::Member));
    assert!(reads(&member.apply(ms(1), Event::Force)));
    let actions = member.apply(ms(2), read(&record(1, &[1, 2])));
    assert!(actions.contains(&Action::Declined(Change::Force)), "{actions:?}");
}

/// 5.6 d: two are told to go on, and one has done so by the time the other gets to it.
#[test]
fn an_order_to_go_on_is_not_for_the_next_configuration() {
    let mut member = boot(1, 1, image(1, 1));
    let _ = member.apply(START, read(&record(1, &[1, 2])));
    assert!(reads(&member.apply(ms(1), Event::Force)));
    let actions = member.apply(ms(2), read(&record(2, &[2])));
    assert!(actions.contains(&Action::Declined(Change::Force)));
    assert_eq!(put(&actions), None);
}

/// 5.7: node 2 under primary 1.
#[test]
fn a_start_is_heeded_by_its_view() {
    let old = record(1, &[1, 2]);
    let mut member = boot(2, 0, image(0, 0));
    let _ = member.apply(START, read(&old));
    let _ = member.apply(START, Event::Began(FIRST));
    let again = [Action::SendStarted(FIRST)];
    assert_eq!(member.apply(ms(1), start(FIRST, &old)), again);
    assert_eq!(member.apply(ms(2), start(FIRST, &old)), again);
    let next = FIRST.next_round();
    let begin = [Action::Begin { view: next, record: None }];
    assert_eq!(member.apply(ms(3), start(next, &old)), begin);
    assert_eq!(member.apply(ms(4), Event::Open(NodeId(1), next)), [], "not drained yet");
    assert_eq!(member.apply(ms(5), Event::Began(next)), [Action::SendStarted(next)]);
    assert_eq!(member.apply(ms(6), Event::Open(NodeId(3), next)), [], "not the primary");
    assert_eq!(member.apply(ms(7), Event::Open(NodeId(1), next)), [Action::Opened(next)]);

    let new = record(2, &[1, 2]);
    let view = View { epoch: Epoch(2), round: 3 };
    let actions = member.apply(ms(8), start(view, &new));
    assert!(actions.contains(&Action::Begin { view, record: Some(new) }));
    let below = member.apply(ms(9), start(next, &old));
    assert!(below.contains(&Action::Send(NodeId(1), Say::Newer(Epoch(2)))));
}

/// 5.7: a member's session has come up.
#[test]
fn a_session_begins_a_round() {
    let mut member = serving(&[1, 2]);
    let next = FIRST.next_round();
    let begin = Action::Begin { view: next, record: None };
    assert!(member.apply(ms(1), Event::LinkUp(NodeId(2))).contains(&begin));
    assert!(!member.serves(ms(1)));
    let again = member.apply(ms(2), Event::LinkUp(NodeId(2)));
    assert!(!again.contains(&Action::Begin { view: next.next_round(), record: None }));
    let began = member.apply(ms(3), Event::Began(next));
    assert_eq!(began.len(), 1, "START to node 2");
    assert_eq!(member.apply(ms(4), Event::Started(NodeId(2), FIRST)), [], "of an older view");
    let started = member.apply(ms(5), Event::Started(NodeId(2), next));
    assert_eq!(started, [Action::Settle(next)]);
    let outside = serving(&[1, 2]).apply(ms(1), Event::LinkUp(NodeId(3)));
    assert!(!outside.iter().any(|a| matches!(a, Action::Begin { .. })));
}

/// 3.2
#[test]
fn histories_that_do_not_fit_are_refused() {
    let (image_is, store) = (Epoch(7), Epoch(5));
    let cases = [
        (image(7, 7), Some(Refusal::ImageAhead { image: image_is, store })),
        (image(5, 6), Some(Refusal::OtherConfig { epoch: store })),
        (image(5, 5), None),
        (image(4, 9), None),
    ];
    for (image, refusal) in cases {
        let mut member = boot(1, 0, image);
        let actions = member.apply(START, read(&record(5, &[1, 2])));
        let refused = refusal.map(Action::Refused);
        assert_eq!(refused.is_some_and(|r| actions.contains(&r)), refusal.is_some());
        assert_eq!(member.waits_for(START) == refusal.map(Why::Refused), refusal.is_some());
    }
}

/// Attack 10: another image knows of more than the store.
#[test]
fn a_peer_that_is_ahead_stops_it() {
    let mut member = serving(&[1]);
    let _ = member.apply(ms(1), Event::LinkUp(NodeId(3)));
    let ahead = Standing { epoch: Epoch(9), ..member.standing() };
    assert!(reads(&member.apply(ms(2), Event::Heard(NodeId(3), Say::Standing(ahead)))));
    let (node, epoch, config) = (NodeId(3), Epoch(9), ahead.config);
    let why = Refusal::PeerAhead { node, epoch, config };
    assert!(member.apply(ms(3), read(&record(1, &[1]))).contains(&Action::Refused(why)));
    assert!(!member.serves(ms(3)));
}

/// What the store lacks is remembered when the one that has told it is away, until the store has it.
#[test]
fn a_peer_that_was_ahead_and_is_away_still_stops_it() {
    let holds_all = Image { clean: true, same_boot: true, ..image(2, 2) };
    let restored = record(3, &[1, 2]);
    let mut member = boot(2, 0, holds_all);
    let _ = member.apply(START, read(&restored));
    let _ = member.apply(START, Event::LinkUp(NodeId(1)));
    let Event::Heard(from, Say::Standing(said)) = stands(1, 0, Role::Unknown) else {
        unreachable!()
    };
    let ahead = Standing { epoch: Epoch(3), config: 33, ..said };
    assert!(reads(&member.apply(ms(1), Event::Heard(from, Say::Standing(ahead)))));
    let why = Refusal::PeerAhead { node: from, epoch: Epoch(3), config: 33 };
    assert!(member.apply(ms(2), read(&restored)).contains(&Action::Refused(why)));
    let _ = member.apply(ms(3), Event::LinkDown(NodeId(1)));
    for at in [4, 4000, 8000] {
        let actions = member.apply(ms(at), read(&restored));
        assert!(put(&actions).is_none(), "{actions:?}");
        assert_eq!(member.waits_for(ms(at)), Some(Why::Refused(why)));
    }
    // The record that it has spoken of, and one in which its image is no more.
    let mut gone = record(3, &[2]);
    gone.replicas.retain(|r| r.node != NodeId(1));
    for believed in [Record { config: 33, ..record(3, &[1, 2]) }, record(4, &[1, 2]), gone] {
        let mut member = member.clone();
        let _ = member.apply(ms(9000), read(&believed));
        assert_ne!(member.waits_for(ms(9000)), Some(Why::Refused(why)), "{believed:?}");
    }
}

/// Whom it asks for a promise.
fn asks(actions: &[Action]) -> Vec<u16> {
    let asked = |a: &Action| match a {
        Action::Send(node, Say::Renew { .. }) => Some(node.0),
        _ => None,
    };
    actions.iter().filter_map(asked).collect()
}

/// Node 2 under primary 1, serving with these.
fn second(in_sync: &[u16]) -> Member {
    let mut member = boot(2, 0, image(0, 0));
    let _ = member.apply(START, Event::LinkUp(NodeId(1)));
    let _ = member.apply(START, stands(1, 0, Role::Member));
    let _ = member.apply(START, read(&record(1, in_sync)));
    let _ = member.apply(START, Event::Began(FIRST));
    let _ = member.apply(START, start(FIRST, &record(1, in_sync)));
    let _ = member.apply(START, Event::Open(NodeId(1), FIRST));
    let _ = member.apply(START, read(&record(1, in_sync)));
    for &n in in_sync.iter().filter(|n| **n != 2) {
        let event = promise(&member, n, START);
        let _ = member.apply(START, event);
    }
    assert!(member.serves(START));
    member
}

/// 4.8: what the leg has failed, this member is never taken to hold.
#[test]
fn a_failed_leg_takes_no_part_beside_others() {
    let mut member = second(&[1, 2]);
    assert_eq!(asks(&member.apply(ms(1), Event::LegFailed)), [1]);
    assert!(!member.serves(ms(1)));
    assert_eq!(member.waits_for(ms(1)), Some(Why::LegFailed));
    assert_eq!(member.apply(ms(2), start(FIRST.next_round(), &record(1, &[1, 2]))), []);
    assert!(!promised(&member.apply(ms(3), renew(1, 1, 0))));

    // The next record still has it.
    let two = record(2, &[1, 2]);
    let actions = member.apply(ms(4), start(View::first(Epoch(2)), &two));
    assert!(actions.contains(&Action::Outside));
    assert!(!actions.iter().any(|a| matches!(a, Action::Begin { .. } | Action::SendStarted(_))));
    assert!(!promised(&member.apply(ms(5), renew(2, 1, 0))));
    assert_eq!(member.role(), Role::Member, "5.6 c: nobody may lead over it");
    let next = put(&hear_all(&mut member, &[1], ms(4), ms(6))).unwrap();
    assert_eq!(next, Record { config: FRESH, ..record(3, &[1]) });

    // The put failed: the record went another way, and it is the last.
    let three = record(3, &[2]);
    let _ = member.apply(ms(7), Event::Put(Put::Refused));
    let begin = Action::Begin { view: View::first(Epoch(3)), record: Some(three.clone()) };
    assert!(member.apply(ms(8), read(&three)).contains(&begin));
    let _ = member.apply(ms(9), Event::Began(View::first(Epoch(3))));
    let _ = member.apply(ms(10), Event::Settled(View::first(Epoch(3))));
    assert!(member.serves(ms(10)));
    let _ = member.apply(ms(11), Event::LegFailed);
    assert!(member.serves(ms(11)), "alone, its clients get the error");
}

/// 5.4: the leaver asks again who lives; who does not answer goes first.
#[test]
fn a_leaver_leaves_nothing_to_the_silent() {
    let mut member = second(&[1, 2, 3]);
    let all = record(1, &[1, 2, 3]);
    let early = promise(&member, 1, ms(99));
    assert!(reads(&member.apply(ms(100), Event::Leave)));
    assert!(member.serves(ms(100)), "the store may be away");
    assert_eq!(asks(&member.apply(ms(110), read(&all))), [1, 3]);
    assert_eq!(member.waits_for(ms(110)), Some(Why::Leaving));
    assert!(promised(&member.apply(ms(115), renew(1, 1, 0))), "others need it until it goes");
    assert!(!reads(&member.apply(ms(120), early)), "asked for while it served");
    assert!(put(&hear_all(&mut member, &[1], ms(110), ms(130))).is_none());
    // Node 3 is silent: given up at 2500, let go of 3000 after the epoch began.
    let alive = promise(&member, 1, ms(2490));
    let _ = member.apply(ms(2495), alive);
    assert!(reads(&member.apply(ms(2500), Event::Tick)));
    assert!(put(&member.apply(ms(2510), read(&all))).is_none());
    assert!(!promised(&member.apply(ms(2520), renew(1, 3, 0))));
    assert!(reads(&member.apply(ms(3000), Event::Tick)));
    let next = put(&member.apply(ms(3001), read(&all))).unwrap();
    assert_eq!(next, after(2, &[1], 1));
    assert!(!promised(&member.apply(ms(3002), renew(1, 1, 0))));
}

/// 5.4
#[test]
fn the_last_one_stays() {
    let pair = record(1, &[1, 2]);
    // A wish is declined when the other turns out to be silent, and it serves alone.
    let mut member = second(&[1, 2]);
    let _ = member.apply(ms(1), Event::Leave);
    let _ = member.apply(ms(2), read(&pair));
    assert!(reads(&member.apply(ms(2500), Event::Tick)));
    let actions = member.apply(ms(2501), read(&pair));
    assert!(actions.contains(&Action::Declined(Change::Leave)));
    assert!(reads(&member.apply(ms(3000), Event::Tick)));
    assert_eq!(put(&member.apply(ms(3001), read(&pair))), Some(after(2, &[2], 2)));

    // A failed leg goes on alone, but gives the others time to go on without it.
    let mut member = second(&[1, 2]);
    let _ = member.apply(ms(1), Event::LegFailed);
    assert!(!reads(&member.apply(ms(5499), Event::Tick)));
    assert!(reads(&member.apply(ms(5500), Event::Tick)));
    let next = put(&member.apply(ms(5501), read(&pair)));
    assert_eq!(next, Some(after(2, &[2], 2)));

    // A lost one stays listed.
    let mut member = second(&[1, 2]);
    let _ = member.apply(ms(1), Event::LegDead);
    assert!(!reads(&member.apply(ms(90_000), Event::Tick)));
    assert_eq!(put(&member.apply(ms(90_001), read(&pair))), None);
    let next = put(&hear_all(&mut member, &[1], ms(90_001), ms(90_002)));
    assert_eq!(next, Some(after(2, &[1], 1)));
}

/// 5.4: leaving waits for the store, serving does not.
#[test]
fn a_leaver_serves_while_the_store_is_away() {
    let mut member = second(&[1, 2]);
    let pair = record(1, &[1, 2]);
    let _ = member.apply(ms(1), Event::Leave);
    let _ = member.apply(ms(2), read(&pair));
    let alive = promise(&member, 1, ms(2));
    assert!(reads(&member.apply(ms(3), alive)));
    let _ = member.apply(ms(4), Event::ReadFailed);
    assert!(member.serves(ms(4)));
    assert!(reads(&member.apply(ms(504), Event::Tick)));
    let _ = member.apply(ms(505), read(&pair));
    assert!(!member.serves(ms(505)));
    assert!(put(&hear_all(&mut member, &[1], ms(505), ms(506))).is_some());
}

/// 5.4: it has answered, and then its power went.
#[test]
fn a_leaver_leaves_nothing_to_who_has_returned() {
    let mut member = second(&[1, 2]);
    let pair = record(1, &[1, 2]);
    let _ = member.apply(ms(1), Event::LegDead);
    let alive = promise(&member, 1, ms(1));
    assert!(reads(&member.apply(ms(2), alive)));
    let _ = member.apply(ms(3), stands(1, 1, Role::Returned));
    assert!(put(&member.apply(ms(4), read(&pair))).is_none());
}

/// The leg dies, or fails, before the first view of an epoch has begun: the driver may never say
/// that it has, and others must not wait for it.
#[test]
fn a_leg_that_is_lost_in_the_drain_is_taken_out() {
    for event in [Event::LegDead, Event::LegFailed] {
        let mut member = boot(2, 0, image(0, 0));
        let _ = member.apply(START, read(&record(1, &[1, 2])));
        assert_eq!(asks(&member.apply(ms(1), event)), [1]);
        assert!(!promised(&member.apply(ms(2), renew(1, 1, 0))));
        assert_eq!(member.apply(ms(3), Event::Began(FIRST)), []);
        let next = put(&hear_all(&mut member, &[1], ms(1), ms(4)));
        assert_eq!(next, Some(Record { config: FRESH, ..record(2, &[1]) }));
    }
}

/// A joiner's leg refuses what the record may count on already.
#[test]
fn a_joiner_that_has_failed_begins_nothing() {
    let listed = |epoch, life| {
        let mut record = record(epoch, &[1, 2]);
        record.in_sync[1] = listed(2, life);
        record
    };
    let mut member = boot(2, 1, image(0, 0));
    let _ = member.apply(START, read(&record(1, &[1])));
    let _ = member.apply(START, Event::Joining(Incarnation(22)));
    let _ = member.apply(ms(1), Event::LegFailed);
    let actions = member.apply(ms(2), start(View::first(Epoch(2)), &listed(2, 2)));
    assert!(actions.contains(&Action::Outside));
    assert_eq!(member.waits_for(ms(2)), Some(Why::LegFailed));
    let _ = member.apply(ms(3), start(View::first(Epoch(3)), &record(3, &[1])));
    assert_eq!(member.role(), Role::Outside);
    // A new attempt copies what was refused.
    let _ = member.apply(ms(4), Event::Joining(Incarnation(23)));
    let view = View::first(Epoch(4));
    let actions = member.apply(ms(5), start(view, &listed(4, 3)));
    assert!(actions.iter().any(|a| matches!(a, Action::Begin { view: v, .. } if *v == view)));
}

/// 6.6: the joiner is not new any more, and stays required from the put on.
#[test]
fn an_admission_cannot_be_taken_back_once_it_is_put() {
    let mut pair = record(1, &[1, 2]);
    pair.replicas[2].new = true;
    let mut member = boot(1, 0, image(0, 0));
    let _ = member.apply(START, Event::LinkUp(NodeId(2)));
    let _ = member.apply(START, read(&pair));
    let _ = member.apply(START, Event::Began(FIRST));
    assert_eq!(member.gathering(), nodes(&[2]));
    let _ = member.apply(START, Event::Started(NodeId(2), FIRST));
    assert_eq!(member.gathering(), []);
    let _ = member.apply(START, Event::Settled(FIRST));
    let _ = member.apply(START, read(&pair));
    let _ = member.apply(ms(1), Event::Admit(listed(3, 4)));
    assert_eq!(member.admitting(), None);
    let next = put(&member.apply(ms(2), read(&pair))).unwrap();
    assert_eq!(next.replicas.iter().filter(|r| r.new).count(), 0);
    assert_eq!(member.admitting(), Some(listed(3, 4)));
    let declined = Action::Declined(Change::Withdraw(NodeId(3)));
    assert!(member.apply(ms(3), Event::Withdraw(NodeId(3))).contains(&declined));
    let _ = member.apply(ms(4), Event::Put(Put::Unknown));
    for event in [Event::LinkUp(NodeId(2)), Event::LinkUp(NodeId(3)), Event::LegFailed] {
        let actions = member.apply(ms(5), event);
        assert!(!actions.iter().any(|a| matches!(a, Action::Begin { .. })));
    }
    assert_eq!(put(&member.apply(ms(6), read(&pair))), None, "it began before the outcome");
    assert_eq!(put(&member.apply(ms(7), read(&pair))), Some(next.clone()));
    let _ = member.apply(ms(8), Event::Put(Put::Done));
    assert_eq!((member.admitting(), member.record()), (None, Some(&next)));
}

/// 6.6: a lone primary whose leg refuses what its joiner may have got.
#[test]
fn a_lone_primary_that_fails_admits_nobody() {
    let admit = Event::Admit(listed(3, 4));
    let mut member = serving(&[1]);
    let _ = member.apply(ms(1), admit.clone());
    let declined = Action::Declined(Change::Admit(NodeId(3)));
    assert_eq!(member.apply(ms(2), Event::LegFailed), [declined]);
    assert!(member.serves(ms(2)));
    assert_eq!(put(&member.apply(ms(3), read(&record(1, &[1])))), None);

    // It is put: it may not be alone any more.
    let mut member = serving(&[1]);
    let _ = member.apply(ms(1), admit);
    let next = put(&member.apply(ms(2), read(&record(1, &[1])))).unwrap();
    let _ = member.apply(ms(3), Event::LegFailed);
    assert!(!member.serves(ms(3)));
    assert!(member.apply(ms(4), Event::Put(Put::Done)).contains(&Action::Outside));
    let joiner = Say::Promise {
        epoch: next.epoch,
        incarnation: member.incarnation(),
        stamp: Stamp(u64::try_from(ms(4).as_nanos()).unwrap()),
    };
    let _ = member.apply(ms(5), Event::Heard(NodeId(3), joiner));
    let last = put(&member.apply(ms(6), read(&next))).unwrap();
    assert_eq!((last.in_sync, last.primary), (vec![listed(3, 4)], NodeId(3)));
}

/// 5.4: only members that are linked and silent are gathered.
#[test]
fn gathering_names_who_is_linked_and_has_not_answered() {
    let mut member = serving(&[1, 2, 3]);
    assert_eq!(member.gathering(), []);
    let _ = member.apply(ms(1), Event::LinkDown(NodeId(3)));
    let _ = member.apply(ms(2), Event::LinkUp(NodeId(2)));
    assert_eq!(member.gathering(), [], "it drains");
    let _ = member.apply(ms(3), Event::Began(FIRST.next_round()));
    assert_eq!(member.gathering(), nodes(&[2]));
    let _ = member.apply(ms(4), Event::Started(NodeId(2), FIRST.next_round()));
    assert_eq!(member.gathering(), []);
}

/// 5.6: a replica that has returned beside a member whose leg has failed.
#[test]
fn nobody_leads_over_a_member_whose_leg_has_failed() {
    let mut failed = second(&[1, 2]);
    let _ = failed.apply(ms(1), Event::LegFailed);
    let says = Event::Heard(NodeId(2), Say::Standing(failed.standing()));
    let mut returned = boot(1, 1, Image { clean: true, same_boot: true, ..image(1, 1) });
    let _ = returned.apply(START, read(&record(1, &[1, 2])));
    let _ = returned.apply(START, Event::LinkUp(NodeId(2)));
    let _ = returned.apply(START, says);
    assert!(!reads(&returned.apply(ms(9000), Event::Tick)));
    assert_eq!(returned.waits_for(ms(9000)), Some(Why::Returned(NodeId(2))));
}

fn yielded(from: u16, life: u64, view: View) -> Event {
    let incarnation = listed(from, life).incarnation;
    Event::Heard(NodeId(from), Say::Yielded { view, incarnation })
}

/// 5.5: nobody waits for the leases of one that says that it serves no more.
#[test]
fn who_hangs_is_put_out_as_soon_as_it_has_yielded() {
    let pair = record(1, &[1, 2]);
    let mut member = serving(&[1, 2]);
    assert!(reads(&member.apply(ms(100), Event::Stuck(NodeId(2)))));
    let actions = member.apply(ms(101), read(&pair));
    let incarnation = listed(2, 0).incarnation;
    let asks = Action::Send(NodeId(2), Say::Yield { view: FIRST, incarnation });
    assert!(actions.contains(&asks));
    assert!(!member.serves(ms(101)));
    for other in [yielded(2, 1, FIRST), yielded(2, 0, FIRST.next_round())] {
        assert!(!reads(&member.apply(ms(102), other)));
    }
    assert!(member.apply(ms(601), Event::Tick).contains(&asks), "it is said again");
    assert!(reads(&member.apply(ms(602), yielded(2, 0, FIRST))));
    let next = put(&member.apply(ms(603), read(&pair))).unwrap();
    assert_eq!(next.in_sync, [listed(1, 0)]);
}

/// 5.5: a member that was told to yield.
#[test]
fn who_has_yielded_serves_again_in_another_view() {
    let pair = record(1, &[1, 2]);
    let mut member = second(&[1, 2]);
    let told = |from, life, view| {
        let incarnation = listed(2, life).incarnation;
        Event::Heard(NodeId(from), Say::Yield { view, incarnation })
    };
    let stale = View { epoch: Epoch(0), round: 9 };
    for in_vain in [told(1, 1, FIRST), told(3, 0, FIRST), told(1, 0, stale)] {
        assert_eq!(member.apply(START, in_vain), []);
        assert!(member.serves(START));
    }
    let incarnation = listed(2, 0).incarnation;
    let says = Action::Send(NodeId(1), Say::Yielded { view: FIRST, incarnation });
    for _ in 0..2 {
        assert_eq!(member.apply(START, told(1, 0, FIRST)), std::slice::from_ref(&says));
        assert_eq!(member.waits_for(START), Some(Why::Yielded(NodeId(1))));
    }
    let next = FIRST.next_round();
    for event in [start(next, &pair), Event::Began(next), Event::Open(NodeId(1), next)] {
        assert!(!member.serves(START));
        let _ = member.apply(START, event);
    }
    assert!(member.serves(START));
    assert_eq!(member.apply(START, told(1, 0, FIRST)), [], "that view is over");
    assert!(member.serves(START));
}

/// 5.5: what the store is away for is undone, and who has yielded serves in a new view.
#[test]
fn whom_it_cannot_put_out_it_takes_back() {
    let pair = record(1, &[1, 2]);
    for linked in [true, false] {
        let mut member = serving(&[1, 2]);
        let _ = member.apply(ms(100), Event::Stuck(NodeId(2)));
        let _ = member.apply(ms(101), read(&pair));
        if !linked {
            let _ = member.apply(ms(102), Event::LinkDown(NodeId(2)));
        }
        assert!(reads(&member.apply(ms(103), yielded(2, 0, FIRST))));
        let actions = member.apply(ms(104), Event::ReadFailed);
        let begins = Action::Begin { view: FIRST.next_round(), record: None };
        assert_eq!(actions.contains(&begins), linked);
        assert_eq!(member.serves(ms(104)), !linked, "it may, as far as it knows");
    }
}

/// 5.1: a request that came before its epoch was adopted is made again as soon as the other has adopted it.
#[test]
fn who_asks_after_its_adoption_is_asked_back_at_once() {
    let pair = record(1, &[1, 2]);
    let mut member = boot(1, 0, image(0, 0));
    let _ = member.apply(START, Event::LinkUp(NodeId(2)));
    let _ = member.apply(START, read(&pair));
    assert_eq!(asks(&member.apply(START, Event::Began(FIRST))), [2]);
    assert!(asks(&member.apply(ms(1), Event::Tick)).is_empty());
    let actions = member.apply(ms(2), renew(1, 2, 0));
    assert!(promised(&actions));
    assert_eq!(asks(&actions), [2], "it had nothing to answer with before");
    assert!(asks(&member.apply(ms(3), renew(1, 2, 0))).is_empty(), "attack 85");
    let event = promise(&member, 2, ms(2));
    let _ = member.apply(ms(4), event);
    assert!(asks(&member.apply(ms(5), renew(1, 2, 0))).is_empty(), "it has answered");
}

/// Reached and cleared, in epoch 1.
fn shared(reached: u32, cleared: u32) -> SharedLineage {
    let at = |count| Lineage { epoch: Epoch(1), count };
    SharedLineage { reached: at(reached), cleared: at(cleared) }
}

/// What an image has recorded, about that of node 2.
fn lineages(own: u32, about: SharedLineage) -> Lineages {
    let lineage = Lineage { epoch: Epoch(1), count: own };
    Lineages { lineage, lost: false, shared: vec![(Uuid::from_u128(2), about)] }
}

fn says(member: &mut Member, now: Duration, older: bool, about: SharedLineage) {
    let Event::Heard(from, Say::Standing(standing)) = stands(2, 1, Role::Returned) else {
        unreachable!()
    };
    let said = Say::Standing(Standing { older, shared: about, ..standing });
    let _ = member.apply(now, Event::Heard(from, said));
}

/// RFD 0032: a copy that is older than the record knows does not lead by itself, alone or not.
#[test]
fn an_older_copy_does_not_lead_unless_it_is_forced() {
    let later = Lineage { epoch: Epoch(1), count: 4 };
    let record = |in_sync: &[u16]| {
        let history = History { lineage: later, ..History::default() };
        Record { history, ..record(1, in_sync) }
    };
    for (own, leads) in [(4, true), (3, false)] {
        let mut alone = boot(1, 1, Image { clean: true, same_boot: true, ..image(1, 1) });
        alone.remember(lineages(own, SharedLineage::default()));
        let _ = alone.apply(ms(1), read(&record(&[1])));
        let put = put(&alone.apply(ms(3001), read(&record(&[1]))));
        assert_eq!(put.is_some(), leads, "{own}");
        let refuses = Why::SetBack { by: SetBack::Record, silent: vec![] };
        assert_eq!(alone.waits_for(ms(3002)) == Some(refuses), !leads, "{own}");
    }
    let mut forced = boot(1, 1, image(1, 1));
    forced.remember(lineages(3, SharedLineage::default()));
    let _ = forced.apply(ms(1), read(&record(&[1, 2])));
    let _ = forced.apply(ms(2), Event::Force);
    let next = put(&forced.apply(ms(3), read(&record(&[1, 2])))).expect("an order");
    assert_eq!((next.history.forced, next.history.lineage), (Epoch(2), Lineage::first(Epoch(2))));
    // Where what it had recorded was lost, that it has not recorded it says nothing.
    let mut lost = boot(1, 1, image(1, 1));
    lost.remember(Lineages { lost: true, ..Lineages::default() });
    let _ = lost.apply(ms(1), read(&record(&[1])));
    assert!(put(&lost.apply(ms(3001), read(&record(&[1])))).is_some());
}

/// RFD 0032: who leads after a blackout is not older than what any other knows of it.
#[test]
fn a_copy_that_another_knows_to_be_older_does_not_lead() {
    let pair = record(1, &[1, 2]);
    let cases = [
        // What it has recorded of the other, what the other has of it, whether that is older: who leads.
        (shared(4, 4), shared(4, 4), false, Some(1)),
        (shared(4, 3), shared(4, 4), false, Some(1)),
        (shared(3, 3), shared(4, 3), false, Some(1)),
        (shared(3, 3), shared(4, 4), false, None),
        (shared(4, 4), shared(3, 3), true, Some(1)),
    ];
    for (mine, theirs, older, leads) in cases {
        let mut member = boot(1, 1, image(1, 1));
        member.remember(lineages(4, mine));
        let _ = member.apply(ms(1), Event::LinkUp(NodeId(2)));
        says(&mut member, ms(1), older, theirs);
        let _ = member.apply(ms(2), read(&pair));
        let next = put(&member.apply(ms(3001), read(&pair)));
        assert_eq!(next.map(|r| r.primary), leads.map(NodeId), "{mine:?} {theirs:?}");
        let sent = member.standing_for(NodeId(2));
        assert_eq!((sent.older, sent.shared), (leads.is_none(), mine));
    }
}

/// RFD 0032: what becomes of a joiner.
#[test]
fn joiners_are_judged_by_what_both_have_recorded() {
    let mut member = boot(1, 0, image(1, 1));
    let _ = member.apply(ms(1), read(&record(1, &[1])));
    let judge = |member: &Member, mine, theirs, forgotten| member.judge(&mine, &theirs, forgotten);
    let cases = [
        (shared(4, 4), shared(4, 4), Judgement::Continues),
        // The other was asked to record what this one then did not clear under, and the other way round.
        (shared(4, 3), shared(5, 3), Judgement::Continues),
        (shared(5, 4), shared(4, 4), Judgement::Continues),
        (shared(4, 4), shared(3, 3), Judgement::SetBack),
        (shared(4, 4), shared(0, 0), Judgement::SetBack),
        (shared(3, 3), shared(4, 4), Judgement::Newer),
    ];
    for (mine, theirs, judged) in cases {
        assert_eq!(judge(&member, mine, theirs, false), judged, "{mine:?} {theirs:?}");
    }
    assert_eq!(judge(&member, shared(0, 0), shared(4, 4), true), Judgement::Unknown);
    // An operator has decided since.
    let forced = History { forced: Epoch(2), ..History::default() };
    let _ = member.apply(ms(2), read(&Record { history: forced, ..record(2, &[1]) }));
    assert_eq!(judge(&member, shared(3, 3), shared(4, 4), false), Judgement::Unknown);
}

/// RFD 0032, attack 18: a sweep's flush that comes when the next record is known already is not confirmed. By that record
/// this one is alone: it would record the lineage together with nobody, and the primary would clear by it.
#[test]
fn a_lineage_is_recorded_with_the_members_of_its_epoch_only() {
    let mut member = serving(&[1, 2]);
    assert_eq!(member.recorded_with(Epoch(1)), Some(vec![Uuid::from_u128(2)]));
    let _ = member.apply(ms(1), read(&record(2, &[1])));
    assert_eq!(member.recorded_with(Epoch(1)), None);
}

/// RFD 0032: that a copy was set back is in the record that takes it in.
#[test]
fn the_record_says_which_copies_were_set_back() {
    let mut member = serving(&[1]);
    member.note_set_back(NodeId(2));
    let joiner = listed(2, 1);
    let _ = member.apply(ms(1), Event::Admit(joiner));
    let next = put(&member.apply(ms(2), read(&record(1, &[1])))).expect("it is taken in");
    assert_eq!(next.history.set_back, [NodeId(2)]);
    assert!(next.has(joiner.node, joiner.incarnation));
}
