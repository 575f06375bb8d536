use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::meta::model::{Client, Fate, Model};
use crate::nodes::tests::{record, store};

const CLUSTER: Uuid = Uuid::from_u128(7);
const NOW: u64 = 1_800_000_000;
const HOUR: u64 = 3600;
const FROM: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 9));

fn cluster() -> ClusterRecord {
    ClusterRecord { id: CLUSTER, next_node: 2, own_members: true, lease_ms: 2000, grace_ms: 3000 }
}

fn new_token() -> NewToken {
    NewToken { role: None, lasts_s: HOUR, uses: Some(1), approve: false, made_by: "a".into() }
}

/// A cluster with one node and such a token, and what the node of data directory 1 asks by it.
async fn begun(model: &Model, new: &NewToken) -> (Arc<dyn Meta>, JoinRequest) {
    let meta: Arc<dyn Meta> = Arc::new(store(model));
    joining::begin(&*meta, &cluster()).await.unwrap();
    joining::enter(&*meta, &record(1, 0)).await.unwrap();
    let (token, secret) = create(&*meta, NOW, new).await.unwrap();
    (meta, request(1, token.id, secret))
}

fn request(directory: u128, token: ShortId, secret: TokenSecret) -> JoinRequest {
    JoinRequest {
        format: FORMAT,
        version: "0.1.0".into(),
        store_format: 2,
        cluster: CLUSTER,
        token,
        secret,
        directory: Uuid::from_u128(directory),
        name: format!("n{directory}"),
        role: Role::Data,
        addresses: vec!["192.0.2.9:7480".parse().unwrap()],
        lease_ms: 2000,
        grace_ms: 3000,
    }
}

fn of(directory: u128, like: &JoinRequest) -> JoinRequest {
    request(directory, like.token, like.secret.clone())
}

async fn asked(meta: &Arc<dyn Meta>, request: &JoinRequest) -> Result<Outcome, Denial> {
    ask(&**meta, NOW, request, FROM).await
}

fn admitted(node: u16) -> Result<Outcome, Denial> {
    Ok(Outcome::Admitted(NodeId(node)))
}

/// A node that was removed before it had come, or had come and was removed, is not in the cluster again because its own
/// file says that it joins.
#[tokio::test(start_paused = true)]
async fn who_was_removed_does_not_enter_by_itself() {
    let model = Model::default();
    let (meta, request) = begun(&model, &new_token()).await;
    let new = record(2, 0);
    assert_eq!(
        joining::enter_admitted(&*meta, &new).await,
        Err(JoinError::Removed),
        "nobody asked"
    );
    assert_eq!(asked(&meta, &request).await, admitted(2));
    let index = joining::enter_admitted(&*meta, &new).await.unwrap();
    // Its answer was lost, and it goes on.
    assert_eq!(joining::enter_admitted(&*meta, &new).await, Ok(index));
    joining::strike(&*meta, NodeId(2)).await.unwrap();
    assert_eq!(joining::enter_admitted(&*meta, &new).await, Err(JoinError::Removed));
}

async fn uses(meta: &Arc<dyn Meta>) -> Option<u32> {
    tokens(&**meta).await.unwrap()[0].uses
}

#[tokio::test(start_paused = true)]
async fn a_token_lets_in_as_many_nodes_as_it_is_for() {
    let (meta, one) = begun(&Model::default(), &NewToken { uses: Some(2), ..new_token() }).await;
    assert_eq!(asked(&meta, &one).await, admitted(2));
    assert_eq!(asked(&meta, &of(2, &one)).await, admitted(3));
    assert_eq!(asked(&meta, &of(3, &one)).await, Err(Denial::UsedUp));
    let (meta, one) = begun(&Model::default(), &NewToken { uses: None, ..new_token() }).await;
    for n in 0..20 {
        assert!(asked(&meta, &of(n, &one)).await.is_ok());
    }
    assert_eq!(uses(&meta).await, None);
}

#[tokio::test(start_paused = true)]
async fn who_shows_no_token_is_told_nothing_else_whatever_it_asks() {
    let (meta, one) = begun(&Model::default(), &new_token()).await;
    shown_token(&*meta, &one).await.unwrap();
    let guess = TokenSecret::new([9; 16]);
    let of_another_version = JoinRequest { store_format: 9, secret: guess, ..one.clone() };
    let of_another_cluster = JoinRequest { cluster: Uuid::nil(), ..of_another_version.clone() };
    let of_another_token = JoinRequest { token: ShortId(!one.token.0), ..one };
    for request in [of_another_version, of_another_cluster, of_another_token] {
        assert_eq!(shown_token(&*meta, &request).await.map(drop), Err(Denial::NoToken));
        assert_eq!(asked(&meta, &request).await, Err(Denial::NoToken));
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_lost_is_given_again_and_counts_once() {
    let (meta, one) = begun(&Model::default(), &new_token()).await;
    for _ in 0..3 {
        assert_eq!(asked(&meta, &one).await, admitted(2));
    }
    assert_eq!(uses(&meta).await, Some(0));
    // Somebody else with the same data directory is somebody else: a machine that was cloned before it joined.
    let clone = JoinRequest { name: "clone".into(), ..one.clone() };
    assert_eq!(asked(&meta, &clone).await, Err(Denial::UsedUp));
    // Once the node has come it needs no answer any more; who has left and comes again is counted anew.
    joining::enter(&*meta, &record(2, 1)).await.unwrap();
    assert_eq!(asked(&meta, &one).await, Err(Denial::UsedUp));
    joining::strike(&*meta, NodeId(2)).await.unwrap();
    assert!(joins(&*meta).await.unwrap().is_empty());
    assert_eq!(asked(&meta, &one).await, Err(Denial::UsedUp));
}

#[tokio::test(start_paused = true)]
async fn who_has_left_and_comes_again_gets_another_number() {
    let (meta, one) = begun(&Model::default(), &NewToken { uses: Some(3), ..new_token() }).await;
    assert_eq!(asked(&meta, &one).await, admitted(2));
    joining::enter(&*meta, &record(2, 1)).await.unwrap();
    // By force, without a word to the others.
    assert_eq!(asked(&meta, &one).await, admitted(3));
    joining::strike(&*meta, NodeId(2)).await.unwrap();
    assert_eq!(asked(&meta, &one).await, admitted(3), "it has not come yet");
    joining::enter(&*meta, &record(3, 1)).await.unwrap();
    joining::strike(&*meta, NodeId(3)).await.unwrap();
    assert_eq!(asked(&meta, &one).await, admitted(4));
    assert_eq!(uses(&meta).await, Some(0));
}

#[tokio::test(start_paused = true)]
async fn of_two_joiners_that_race_for_the_last_use_one_is_let_in() {
    let model = Model::default();
    let (meta, one) = begun(&model, &new_token()).await;
    let slow = || -> Client {
        let late = Some(Duration::from_millis(3));
        model.client(
            Duration::from_secs(1),
            Box::new(move |_| Fate::Sent { there: late, back: late }),
        )
    };
    let (client, other) = (slow(), slow());
    let second = of(2, &one);
    let (first, second) =
        tokio::join!(ask(&client, NOW, &one, FROM), ask(&other, NOW, &second, FROM));
    let let_in = [&first, &second].into_iter().filter(|o| o.is_ok()).count();
    assert_eq!(let_in, 1, "{first:?} {second:?}");
    assert!([&first, &second].contains(&&Err(Denial::UsedUp)));
    assert_eq!(uses(&meta).await, Some(0));
    // The same node by two ways is one.
    let (meta, one) = begun(&Model::default(), &new_token()).await;
    let (first, second) = tokio::join!(asked(&meta, &one), asked(&meta, &one));
    assert_eq!((first, second), (admitted(2), admitted(2)));
}

#[tokio::test(start_paused = true)]
async fn what_is_wrong_with_a_token_is_named() {
    let (meta, one) = begun(&Model::default(), &new_token()).await;
    let wrong = JoinRequest { secret: TokenSecret::new([0; 16]), ..one.clone() };
    assert_eq!(asked(&meta, &wrong).await, Err(Denial::NoToken));
    let unknown = JoinRequest { token: ShortId(!one.token.0), ..one.clone() };
    assert_eq!(asked(&meta, &unknown).await, Err(Denial::NoToken));
    let late = ask(&*meta, NOW + HOUR, &one, FROM).await;
    assert_eq!(late, Err(Denial::Expired { ago_s: 0 }));
    let late = ask(&*meta, NOW + 3 * HOUR, &one, FROM).await.unwrap_err().to_string();
    assert!(late.contains("expired 2 hours ago by the clock"), "{late}");
    assert!(ask(&*meta, NOW + HOUR - 1, &one, FROM).await.is_ok());
    // Its answer is not given again when the time is over, nor when the token was taken back.
    assert!(ask(&*meta, NOW + HOUR, &one, FROM).await.is_err());
    revoke(&*meta, one.token).await.unwrap();
    revoke(&*meta, one.token).await.unwrap();
    assert_eq!(asked(&meta, &one).await, Err(Denial::Revoked));
    assert_eq!(ask(&*meta, NOW + HOUR, &one, FROM).await, Err(Denial::Revoked));
    let id = ShortId(!one.token.0);
    assert_eq!(revoke(&*meta, id).await, Err(AdmissionError::Unknown { what: "token", id }));
}

#[tokio::test(start_paused = true)]
async fn a_token_for_a_witness_lets_no_other_in_and_what_does_not_suit_costs_no_use() {
    let witness = NewToken { role: Some(Role::Witness), ..new_token() };
    let (meta, one) = begun(&Model::default(), &witness).await;
    assert_eq!(asked(&meta, &one).await, Err(Denial::OtherRole { role: Role::Witness }));
    let one = JoinRequest { role: Role::Witness, ..one };
    let other = JoinRequest { cluster: Uuid::from_u128(8), ..one.clone() };
    assert!(matches!(
        asked(&meta, &other).await,
        Err(Denial::Join(JoinError::OtherCluster { .. }))
    ));
    let other = JoinRequest { lease_ms: 4000, ..one.clone() };
    assert!(matches!(asked(&meta, &other).await, Err(Denial::Join(JoinError::Setting { .. }))));
    for n in 2..17 {
        joining::enter(&*meta, &record(n, 0)).await.unwrap();
    }
    assert_eq!(asked(&meta, &one).await, Err(JoinError::Full.into()));
    assert_eq!(uses(&meta).await, Some(1));
    joining::strike(&*meta, NodeId(9)).await.unwrap();
    assert!(asked(&meta, &one).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_node_waits_until_a_human_approves_it_and_comes_in_then() {
    let (meta, one) = begun(&Model::default(), &NewToken { approve: true, ..new_token() }).await;
    let Ok(Outcome::Waiting(id)) = asked(&meta, &one).await else { panic!("it waits") };
    assert_eq!(asked(&meta, &one).await, Ok(Outcome::Waiting(id)));
    // The use is its own while it waits, and no number is drawn for it yet.
    assert_eq!(asked(&meta, &of(2, &one)).await, Err(Denial::UsedUp));
    assert_eq!(nodes::cluster(&*meta).await.unwrap().unwrap().0.next_node, 2);
    let [waiting] = &joins(&*meta).await.unwrap()[..] else { panic!("one") };
    assert_eq!((waiting.id, &waiting.name, waiting.from), (id, &one.name, FROM));
    for _ in 0..2 {
        decide(&*meta, NOW, id, true, "a").await.unwrap();
    }
    assert_eq!(asked(&meta, &one).await, admitted(2));
    assert_eq!(asked(&meta, &one).await, admitted(2));
    decide(&*meta, NOW, id, true, "a").await.unwrap();
    let refused = decide(&*meta, NOW, id, false, "a").await;
    assert_eq!(refused, Err(AdmissionError::Admitted { id, node: 2 }));
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_stays_out_and_what_nobody_decides_ends_with_its_token() {
    let approve = NewToken { approve: true, uses: None, ..new_token() };
    let (meta, one) = begun(&Model::default(), &approve).await;
    let two = of(2, &one);
    let Ok(Outcome::Waiting(first)) = asked(&meta, &one).await else { panic!("it waits") };
    let Ok(Outcome::Waiting(second)) = asked(&meta, &two).await else { panic!("it waits") };
    // Also after it was approved, while it does not know.
    decide(&*meta, NOW, first, true, "a").await.unwrap();
    for _ in 0..2 {
        decide(&*meta, NOW, first, false, "b").await.unwrap();
    }
    let by = "b".to_owned();
    assert_eq!(asked(&meta, &one).await, Err(Denial::Refused { id: first, by: by.clone() }));
    let again = decide(&*meta, NOW, first, true, "a").await;
    assert_eq!(again, Err(AdmissionError::Refused { id: first, by }));
    let late = decide(&*meta, NOW + HOUR, second, true, "a").await;
    assert_eq!(late, Err(AdmissionError::Ended { id: second, token: one.token }));
    revoke(&*meta, one.token).await.unwrap();
    assert!(decide(&*meta, NOW, second, true, "a").await.is_err());
    assert_eq!(asked(&meta, &two).await, Err(Denial::Revoked));
    let id = ShortId(1);
    assert!(matches!(
        decide(&*meta, NOW, id, true, "a").await,
        Err(AdmissionError::Unknown { .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn what_waits_and_what_is_kept_is_bounded() {
    let approve = NewToken { approve: true, uses: None, ..new_token() };
    let (meta, one) = begun(&Model::default(), &approve).await;
    for n in 0..MAX_WAITING as u128 {
        assert!(asked(&meta, &of(n, &one)).await.is_ok());
    }
    assert_eq!(asked(&meta, &of(1000, &one)).await, Err(Denial::TooManyWait));
    for _ in 1..MAX_TOKENS {
        create(&*meta, NOW, &new_token()).await.unwrap();
    }
    assert_eq!(create(&*meta, NOW, &new_token()).await, Err(AdmissionError::TooManyTokens));
    // One that is over makes room.
    create(&*meta, NOW + HOUR, &new_token()).await.unwrap();
    assert_eq!(tokens(&*meta).await.unwrap().len(), MAX_TOKENS);
    clean_up(&*meta, NOW + HOUR).await.unwrap();
    assert_eq!(joins(&*meta).await.unwrap().len(), MAX_WAITING, "who comes too late is told why");
    clean_up(&*meta, NOW + 3 * HOUR + KEPT_S).await.unwrap();
    assert!(joins(&*meta).await.unwrap().is_empty() && tokens(&*meta).await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_join_that_may_still_fetch_its_answer_is_not_cleaned_up() {
    let (meta, one) =
        begun(&Model::default(), &NewToken { lasts_s: 30 * 86_400, ..new_token() }).await;
    assert_eq!(asked(&meta, &one).await, admitted(2));
    let later = NOW + KEPT_S + HOUR;
    clean_up(&*meta, later).await.unwrap();
    assert_eq!(ask(&*meta, later, &one, FROM).await, admitted(2));
    joining::enter(&*meta, &record(2, 1)).await.unwrap();
    clean_up(&*meta, later).await.unwrap();
    assert!(joins(&*meta).await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_damaged_record_lets_nobody_in_and_can_be_removed() {
    let (meta, one) = begun(&Model::default(), &new_token()).await;
    let key = token_key(one.token);
    let at = meta.get(&key).await.unwrap().unwrap().revision;
    let bad = Change { key: key.clone(), expect: Expect::At(at), value: Some(b"{}".to_vec()) };
    meta.commit(vec![bad]).await.unwrap();
    let refused = asked(&meta, &one).await.unwrap_err();
    assert!(
        matches!(refused, Denial::Join(JoinError::Store(MetaError::Damaged { .. }))),
        "{refused}"
    );
    check(&meta.get(&key).await.unwrap().unwrap()).unwrap_err();
    revoke(&*meta, one.token).await.unwrap();
    assert_eq!(asked(&meta, &one).await, Err(Denial::NoToken));
}

#[test]
fn a_request_reads_back_and_what_is_none_is_told() {
    let whole = request(1, ShortId(1), TokenSecret::new([0x5a; 16]));
    let bytes = whole.to_bytes();
    assert_eq!(JoinRequest::parse(&bytes), Ok(whole.clone()));
    assert!(!format!("{whole:?}").contains("Wlpa"), "secrets stay out of logs");
    let text = String::from_utf8(bytes).unwrap();
    let newer = text.replace("\"format\":1", "\"format\":2,\"more\":true");
    let refused = JoinRequest::parse(newer.as_bytes()).unwrap_err();
    assert_eq!(refused, BadRequest::OtherFormat { format: 2 });
    let escapes = JoinRequest { name: "\u{1b}[2J".into(), ..whole.clone() };
    let nowhere = JoinRequest { addresses: Vec::new(), ..whole };
    for bad in [escapes.to_bytes(), nowhere.to_bytes(), b"{}".to_vec(), b"?".to_vec()] {
        assert!(matches!(JoinRequest::parse(&bad), Err(BadRequest::Malformed(_))));
    }
}

#[test]
fn an_answer_reads_back() {
    let protection = Protection::Own(crate::authority::Authority::new().unwrap());
    let grant = JoinGrant {
        node: 2,
        secret: ClusterSecret::new([1; 32]),
        protection,
        endpoints: vec!["https://192.0.2.1:2379".into()],
    };
    for answer in [JoinAnswer::Granted(grant.clone()), JoinAnswer::Waiting { id: ShortId(1) }] {
        assert_eq!(JoinAnswer::parse(&answer.to_bytes()), Ok(answer));
    }
    let nobody = JoinAnswer::Granted(JoinGrant { node: 0, ..grant.clone() });
    let nowhere = JoinAnswer::Granted(JoinGrant { endpoints: Vec::new(), ..grant });
    assert!([nobody, nowhere].iter().all(|bad| JoinAnswer::parse(&bad.to_bytes()).is_err()));
}

#[test]
fn the_records_of_a_store_are_these() {
    let id = ShortId(0x1a2b_3c4d);
    let token = TokenRecord {
        id,
        digest: Digest([0; 32]),
        role: Some(Role::Witness),
        expires_s: NOW,
        uses: None,
        approve: true,
        revoked: false,
        made_by: "a".into(),
        made_s: NOW,
    };
    assert_eq!(
        String::from_utf8(nodes::encode(&token)).unwrap(),
        "{\"id\":\"1a2b3c4d\",\"digest\":\"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\",\"role\":\"witness\",\
         \"expires_s\":1800000000,\"uses\":null,\"approve\":true,\"revoked\":false,\"made_by\":\"a\",\"made_s\":1800000000}"
    );
    let asks = request(1, id, TokenSecret::new([0; 16]));
    let join = asks.record(id, FROM, NOW, JoinState::Admitted { node: 2 });
    assert_eq!(
        String::from_utf8(nodes::encode(&join)).unwrap(),
        "{\"id\":\"1a2b3c4d\",\"token\":\"1a2b3c4d\",\"directory\":\"00000000-0000-0000-0000-000000000001\",\
         \"name\":\"n1\",\"role\":\"data\",\"addresses\":[\"192.0.2.9:7480\"],\"from\":\"192.0.2.9\",\"version\":\"0.1.0\",\
         \"asked_s\":1800000000,\"state\":{\"is\":\"admitted\",\"node\":2}}"
    );
}
