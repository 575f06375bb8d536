use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::node_membership;
use crate::nodes::tests::{record, store};
use crate::store::memory::{CallDelivery, MemoryStore, MemoryStoreClient};

const CLUSTER: Uuid = Uuid::from_u128(7);
const NOW: u64 = 1_800_000_000;
const HOUR: u64 = 3600;
const FROM: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 9));

fn cluster() -> ClusterRecord {
    ClusterRecord {
        id: CLUSTER,
        next_node: 2,
        runs_own_store: true,
        lease_ms: 2000,
        grace_ms: 3000,
    }
}

fn new_token() -> NewToken {
    NewToken {
        role: None,
        lifetime_s: HOUR,
        uses: Some(1),
        requires_approval: false,
        created_by: "a".into(),
    }
}

/// A cluster with one node and such a token, and the request that data directory 1 makes with it.
async fn begun(model: &MemoryStore, new: &NewToken) -> (Arc<dyn MetadataStore>, JoinRequest) {
    let meta: Arc<dyn MetadataStore> = Arc::new(store(model));
    node_membership::create_cluster(&*meta, &cluster()).await.unwrap();
    node_membership::add_node(&*meta, &record(1, 0)).await.unwrap();
    let (token, secret) = create_token(&*meta, NOW, new).await.unwrap();
    (meta, request(1, token.id, secret))
}

fn request(directory: u128, token: ShortId, secret: TokenSecret) -> JoinRequest {
    JoinRequest {
        format: JOIN_PROTOCOL_VERSION,
        version: "0.1.0".into(),
        store_format: 2,
        cluster: CLUSTER,
        token,
        secret,
        data_dir_id: Uuid::from_u128(directory),
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

async fn asked(
    meta: &Arc<dyn MetadataStore>,
    request: &JoinRequest,
) -> Result<JoinOutcome, JoinDenial> {
    process_join(&**meta, NOW, request, FROM).await
}

fn admitted(node: u16) -> Result<JoinOutcome, JoinDenial> {
    Ok(JoinOutcome::Admitted(NodeId(node)))
}

/// A removed node does not re-enter the cluster because its own file says that it is joining,
/// whether or not it had entered before.
#[tokio::test(start_paused = true)]
async fn who_was_removed_does_not_enter_by_itself() {
    let model = MemoryStore::default();
    let (meta, request) = begun(&model, &new_token()).await;
    let new = record(2, 0);
    assert_eq!(
        node_membership::add_admitted_node(&*meta, &new).await,
        Err(JoinError::Removed),
        "no node asked"
    );
    assert_eq!(asked(&meta, &request).await, admitted(2));
    let index = node_membership::add_admitted_node(&*meta, &new).await.unwrap();
    // Its answer was lost, and it continues.
    assert_eq!(node_membership::add_admitted_node(&*meta, &new).await, Ok(index));
    node_membership::remove_node(&*meta, NodeId(2)).await.unwrap();
    assert_eq!(node_membership::add_admitted_node(&*meta, &new).await, Err(JoinError::Removed));
}

async fn uses(meta: &Arc<dyn MetadataStore>) -> Option<u32> {
    list_tokens(&**meta).await.unwrap()[0].remaining_uses
}

#[tokio::test(start_paused = true)]
async fn a_token_lets_in_as_many_nodes_as_it_is_for() {
    let (meta, one) =
        begun(&MemoryStore::default(), &NewToken { uses: Some(2), ..new_token() }).await;
    assert_eq!(asked(&meta, &one).await, admitted(2));
    assert_eq!(asked(&meta, &of(2, &one)).await, admitted(3));
    assert_eq!(asked(&meta, &of(3, &one)).await, Err(JoinDenial::UsedUp));
    let (meta, one) = begun(&MemoryStore::default(), &NewToken { uses: None, ..new_token() }).await;
    for n in 0..20 {
        assert!(asked(&meta, &of(n, &one)).await.is_ok());
    }
    assert_eq!(uses(&meta).await, None);
}

#[tokio::test(start_paused = true)]
async fn who_shows_no_token_is_told_nothing_else_whatever_it_asks() {
    let (meta, one) = begun(&MemoryStore::default(), &new_token()).await;
    authenticate_token(&*meta, &one).await.unwrap();
    let guess = TokenSecret::new([9; 16]);
    let of_another_version = JoinRequest { store_format: 9, secret: guess, ..one.clone() };
    let of_another_cluster = JoinRequest { cluster: Uuid::nil(), ..of_another_version.clone() };
    let of_another_token = JoinRequest { token: ShortId(!one.token.0), ..one };
    for request in [of_another_version, of_another_cluster, of_another_token] {
        assert_eq!(
            authenticate_token(&*meta, &request).await.map(drop),
            Err(JoinDenial::UnknownToken)
        );
        assert_eq!(asked(&meta, &request).await, Err(JoinDenial::UnknownToken));
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_lost_is_given_again_and_counts_once() {
    let (meta, one) = begun(&MemoryStore::default(), &new_token()).await;
    for _ in 0..3 {
        assert_eq!(asked(&meta, &one).await, admitted(2));
    }
    assert_eq!(uses(&meta).await, Some(0));
    // Another node with the same data directory: a machine that was cloned before it joined.
    let clone = JoinRequest { name: "clone".into(), ..one.clone() };
    assert_eq!(asked(&meta, &clone).await, Err(JoinDenial::UsedUp));
    // Once a node has entered it needs no grant any more; one that left and returns is counted
    // again.
    node_membership::add_node(&*meta, &record(2, 1)).await.unwrap();
    assert_eq!(asked(&meta, &one).await, Err(JoinDenial::UsedUp));
    node_membership::remove_node(&*meta, NodeId(2)).await.unwrap();
    assert!(list_joins(&*meta).await.unwrap().is_empty());
    assert_eq!(asked(&meta, &one).await, Err(JoinDenial::UsedUp));
}

#[tokio::test(start_paused = true)]
async fn who_has_left_and_comes_again_gets_another_number() {
    let (meta, one) =
        begun(&MemoryStore::default(), &NewToken { uses: Some(3), ..new_token() }).await;
    assert_eq!(asked(&meta, &one).await, admitted(2));
    node_membership::add_node(&*meta, &record(2, 1)).await.unwrap();
    // Removed by force, without contact with the others.
    assert_eq!(asked(&meta, &one).await, admitted(3));
    node_membership::remove_node(&*meta, NodeId(2)).await.unwrap();
    assert_eq!(asked(&meta, &one).await, admitted(3), "it has not come yet");
    node_membership::add_node(&*meta, &record(3, 1)).await.unwrap();
    node_membership::remove_node(&*meta, NodeId(3)).await.unwrap();
    assert_eq!(asked(&meta, &one).await, admitted(4));
    assert_eq!(uses(&meta).await, Some(0));
}

#[tokio::test(start_paused = true)]
async fn of_two_joiners_that_race_for_the_last_use_one_is_let_in() {
    let model = MemoryStore::default();
    let (meta, one) = begun(&model, &new_token()).await;
    let slow = || -> MemoryStoreClient {
        let late = Some(Duration::from_millis(3));
        model.client(
            Duration::from_secs(1),
            Box::new(move |_| CallDelivery::Sent { request_delay: late, response_delay: late }),
        )
    };
    let (client, other) = (slow(), slow());
    let second = of(2, &one);
    let (first, second) = tokio::join!(
        process_join(&client, NOW, &one, FROM),
        process_join(&other, NOW, &second, FROM)
    );
    let let_in = [&first, &second].into_iter().filter(|o| o.is_ok()).count();
    assert_eq!(let_in, 1, "{first:?} {second:?}");
    assert!([&first, &second].contains(&&Err(JoinDenial::UsedUp)));
    assert_eq!(uses(&meta).await, Some(0));
    // One node that connects from two addresses counts once.
    let (meta, one) = begun(&MemoryStore::default(), &new_token()).await;
    let (first, second) = tokio::join!(asked(&meta, &one), asked(&meta, &one));
    assert_eq!((first, second), (admitted(2), admitted(2)));
}

#[tokio::test(start_paused = true)]
async fn what_is_wrong_with_a_token_is_named() {
    let (meta, one) = begun(&MemoryStore::default(), &new_token()).await;
    let wrong = JoinRequest { secret: TokenSecret::new([0; 16]), ..one.clone() };
    assert_eq!(asked(&meta, &wrong).await, Err(JoinDenial::UnknownToken));
    let unknown = JoinRequest { token: ShortId(!one.token.0), ..one.clone() };
    assert_eq!(asked(&meta, &unknown).await, Err(JoinDenial::UnknownToken));
    let late = process_join(&*meta, NOW + HOUR, &one, FROM).await;
    assert_eq!(late, Err(JoinDenial::Expired { ago_s: 0 }));
    let late = process_join(&*meta, NOW + 3 * HOUR, &one, FROM).await.unwrap_err().to_string();
    assert!(late.contains("expired 2 hours ago by the clock"), "{late}");
    assert!(process_join(&*meta, NOW + HOUR - 1, &one, FROM).await.is_ok());
    // The grant is not sent again after the token has expired or was revoked.
    assert!(process_join(&*meta, NOW + HOUR, &one, FROM).await.is_err());
    revoke_token(&*meta, one.token).await.unwrap();
    revoke_token(&*meta, one.token).await.unwrap();
    assert_eq!(asked(&meta, &one).await, Err(JoinDenial::Revoked));
    assert_eq!(process_join(&*meta, NOW + HOUR, &one, FROM).await, Err(JoinDenial::Revoked));
    let id = ShortId(!one.token.0);
    assert_eq!(revoke_token(&*meta, id).await, Err(AdmissionError::Unknown { kind: "token", id }));
}

#[tokio::test(start_paused = true)]
async fn a_token_for_a_witness_lets_no_other_in_and_what_does_not_suit_costs_no_use() {
    let witness = NewToken { role: Some(Role::Witness), ..new_token() };
    let (meta, one) = begun(&MemoryStore::default(), &witness).await;
    assert_eq!(asked(&meta, &one).await, Err(JoinDenial::WrongRole { role: Role::Witness }));
    let one = JoinRequest { role: Role::Witness, ..one };
    let other = JoinRequest { cluster: Uuid::from_u128(8), ..one.clone() };
    assert!(matches!(
        asked(&meta, &other).await,
        Err(JoinDenial::Join(JoinError::OtherCluster { .. }))
    ));
    let other = JoinRequest { lease_ms: 4000, ..one.clone() };
    assert!(matches!(
        asked(&meta, &other).await,
        Err(JoinDenial::Join(JoinError::SettingMismatch { .. }))
    ));
    for n in 2..17 {
        node_membership::add_node(&*meta, &record(n, 0)).await.unwrap();
    }
    assert_eq!(asked(&meta, &one).await, Err(JoinError::ClusterFull.into()));
    assert_eq!(uses(&meta).await, Some(1));
    node_membership::remove_node(&*meta, NodeId(9)).await.unwrap();
    assert!(asked(&meta, &one).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_node_waits_until_a_human_approves_it_and_comes_in_then() {
    let (meta, one) =
        begun(&MemoryStore::default(), &NewToken { requires_approval: true, ..new_token() }).await;
    let Ok(JoinOutcome::Waiting(id)) = asked(&meta, &one).await else { panic!("it waits") };
    assert_eq!(asked(&meta, &one).await, Ok(JoinOutcome::Waiting(id)));
    // A waiting request holds a use, and no number is assigned yet.
    assert_eq!(asked(&meta, &of(2, &one)).await, Err(JoinDenial::UsedUp));
    assert_eq!(nodes::get_cluster(&*meta).await.unwrap().unwrap().0.next_node, 2);
    let [waiting] = &list_joins(&*meta).await.unwrap()[..] else { panic!("one") };
    assert_eq!((waiting.id, &waiting.name, waiting.source_ip), (id, &one.name, FROM));
    for _ in 0..2 {
        approve_or_refuse(&*meta, NOW, id, true, "a").await.unwrap();
    }
    assert_eq!(asked(&meta, &one).await, admitted(2));
    assert_eq!(asked(&meta, &one).await, admitted(2));
    approve_or_refuse(&*meta, NOW, id, true, "a").await.unwrap();
    let refused = approve_or_refuse(&*meta, NOW, id, false, "a").await;
    assert_eq!(refused, Err(AdmissionError::Admitted { id, node: 2 }));
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_stays_out_and_what_nobody_decides_ends_with_its_token() {
    let approve = NewToken { requires_approval: true, uses: None, ..new_token() };
    let (meta, one) = begun(&MemoryStore::default(), &approve).await;
    let two = of(2, &one);
    let Ok(JoinOutcome::Waiting(first)) = asked(&meta, &one).await else { panic!("it waits") };
    let Ok(JoinOutcome::Waiting(second)) = asked(&meta, &two).await else { panic!("it waits") };
    // Also after approval, before the node has fetched its grant.
    approve_or_refuse(&*meta, NOW, first, true, "a").await.unwrap();
    for _ in 0..2 {
        approve_or_refuse(&*meta, NOW, first, false, "b").await.unwrap();
    }
    let by = "b".to_owned();
    assert_eq!(asked(&meta, &one).await, Err(JoinDenial::Refused { id: first, by: by.clone() }));
    let again = approve_or_refuse(&*meta, NOW, first, true, "a").await;
    assert_eq!(again, Err(AdmissionError::Refused { id: first, by }));
    let late = approve_or_refuse(&*meta, NOW + HOUR, second, true, "a").await;
    assert_eq!(late, Err(AdmissionError::TokenEnded { id: second, token: one.token }));
    revoke_token(&*meta, one.token).await.unwrap();
    assert!(approve_or_refuse(&*meta, NOW, second, true, "a").await.is_err());
    assert_eq!(asked(&meta, &two).await, Err(JoinDenial::Revoked));
    let id = ShortId(1);
    assert!(matches!(
        approve_or_refuse(&*meta, NOW, id, true, "a").await,
        Err(AdmissionError::Unknown { .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn what_waits_and_what_is_kept_is_bounded() {
    let approve = NewToken { requires_approval: true, uses: None, ..new_token() };
    let (meta, one) = begun(&MemoryStore::default(), &approve).await;
    for n in 0..MAX_WAITING_JOINS as u128 {
        assert!(asked(&meta, &of(n, &one)).await.is_ok());
    }
    assert_eq!(asked(&meta, &of(1000, &one)).await, Err(JoinDenial::TooManyWaiting));
    for _ in 1..MAX_TOKENS {
        create_token(&*meta, NOW, &new_token()).await.unwrap();
    }
    assert_eq!(create_token(&*meta, NOW, &new_token()).await, Err(AdmissionError::TooManyTokens));
    // An expired one makes room.
    create_token(&*meta, NOW + HOUR, &new_token()).await.unwrap();
    assert_eq!(list_tokens(&*meta).await.unwrap().len(), MAX_TOKENS);
    remove_expired(&*meta, NOW + HOUR).await.unwrap();
    assert_eq!(
        list_joins(&*meta).await.unwrap().len(),
        MAX_WAITING_JOINS,
        "who comes too late is told why"
    );
    remove_expired(&*meta, NOW + 3 * HOUR + RETENTION_S).await.unwrap();
    assert!(
        list_joins(&*meta).await.unwrap().is_empty()
            && list_tokens(&*meta).await.unwrap().is_empty()
    );
}

#[tokio::test(start_paused = true)]
async fn a_join_that_may_still_fetch_its_answer_is_not_cleaned_up() {
    let (meta, one) =
        begun(&MemoryStore::default(), &NewToken { lifetime_s: 30 * 86_400, ..new_token() }).await;
    assert_eq!(asked(&meta, &one).await, admitted(2));
    let later = NOW + RETENTION_S + HOUR;
    remove_expired(&*meta, later).await.unwrap();
    assert_eq!(process_join(&*meta, later, &one, FROM).await, admitted(2));
    node_membership::add_node(&*meta, &record(2, 1)).await.unwrap();
    remove_expired(&*meta, later).await.unwrap();
    assert!(list_joins(&*meta).await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_damaged_record_lets_nobody_in_and_can_be_removed() {
    let (meta, one) = begun(&MemoryStore::default(), &new_token()).await;
    let key = token_key(one.token);
    let at = meta.get(&key).await.unwrap().unwrap().revision;
    let bad = Change {
        key: key.clone(),
        precondition: Precondition::AtRevision(at),
        value: Some(b"{}".to_vec()),
    };
    meta.commit(vec![bad]).await.unwrap();
    let refused = asked(&meta, &one).await.unwrap_err();
    assert!(
        matches!(refused, JoinDenial::Join(JoinError::Store(StoreError::Damaged { .. }))),
        "{refused}"
    );
    validate_entry(&meta.get(&key).await.unwrap().unwrap()).unwrap_err();
    revoke_token(&*meta, one.token).await.unwrap();
    assert_eq!(asked(&meta, &one).await, Err(JoinDenial::UnknownToken));
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
    assert_eq!(refused, JoinRequestError::UnsupportedFormat { format: 2 });
    let escapes = JoinRequest { name: "\u{1b}[2J".into(), ..whole.clone() };
    let nowhere = JoinRequest { addresses: Vec::new(), ..whole };
    for bad in [escapes.to_bytes(), nowhere.to_bytes(), b"{}".to_vec(), b"?".to_vec()] {
        assert!(matches!(JoinRequest::parse(&bad), Err(JoinRequestError::Malformed(_))));
    }
}

#[test]
fn an_answer_reads_back() {
    let protection = TransportSecurity::ClusterAuthority(
        crate::certificate_authority::CertificateAuthority::new().unwrap(),
    );
    let grant = JoinGrant {
        node: 2,
        secret: ClusterSecret::new([1; 32]),
        transport_security: protection,
        endpoints: vec!["https://192.0.2.1:2379".into()],
    };
    for answer in [JoinResponse::Granted(grant.clone()), JoinResponse::Waiting { id: ShortId(1) }] {
        assert_eq!(JoinResponse::parse(&answer.to_bytes()), Ok(answer));
    }
    let no_node = JoinResponse::Granted(JoinGrant { node: 0, ..grant.clone() });
    let nowhere = JoinResponse::Granted(JoinGrant { endpoints: Vec::new(), ..grant });
    assert!([no_node, nowhere].iter().all(|bad| JoinResponse::parse(&bad.to_bytes()).is_err()));
}

#[test]
fn the_records_of_a_store_are_these() {
    let id = ShortId(0x1a2b_3c4d);
    let token = TokenRecord {
        id,
        digest: Sha256Digest([0; 32]),
        role: Some(Role::Witness),
        expires_s: NOW,
        remaining_uses: None,
        requires_approval: true,
        revoked: false,
        created_by: "a".into(),
        created_s: NOW,
    };
    assert_eq!(
        String::from_utf8(nodes::encode(&token)).unwrap(),
        "{\"id\":\"1a2b3c4d\",\"digest\":\"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\",\"role\":\"witness\",\
         \"expires_s\":1800000000,\"uses\":null,\"approve\":true,\"revoked\":false,\"made_by\":\"a\",\"made_s\":1800000000}"
    );
    let request = request(1, id, TokenSecret::new([0; 16]));
    let join = request.to_record(id, FROM, NOW, JoinState::Admitted { node: 2 });
    assert_eq!(
        String::from_utf8(nodes::encode(&join)).unwrap(),
        "{\"id\":\"1a2b3c4d\",\"token\":\"1a2b3c4d\",\"directory\":\"00000000-0000-0000-0000-000000000001\",\
         \"name\":\"n1\",\"role\":\"data\",\"addresses\":[\"192.0.2.9:7480\"],\"from\":\"192.0.2.9\",\"version\":\"0.1.0\",\
         \"asked_s\":1800000000,\"state\":{\"is\":\"admitted\",\"node\":2}}"
    );
}
