//! Initiators that fail to authenticate, and hosts that share a name.

use iscsi::chap::{Algorithm, Secret};
use iscsi::pdu::LoginStatus;
use iscsi::value::{Hex, binary};
use target::auth_throttle::AuthMethod;
use target::{ChapCredentials, IscsiTarget};

use super::*;

const HOST: &str = "iqn.2026-01.com.example:host";
const SECRET: &str = "the right secret";

async fn serve_guarded(core: &Core) -> (Rc<Server>, SocketAddr) {
    let (server, at) = serve(core, Limits::default()).await;
    let chap = ChapCredentials { user: "host".into(), secret: SECRET.into(), mutual: None };
    let named = [(HOST.to_owned(), AccessRule::Proof(chap))].into();
    let (luns, access) = ([(1, VolumeId([7; 16]))].into(), AccessList { any: None, named });
    let guarded = IscsiTarget { luns, access, ..IscsiTarget::default() };
    let targets = [(TARGET.to_owned(), guarded)].into();
    server.set_catalog(Arc::new(Catalog { targets, ..Catalog::default() }));
    (server, at)
}

/// How a login with this secret ends.
async fn log_in_with(core: &Core, at: SocketAddr, secret: &str) -> LoginStatus {
    let mut client = Client::dial(core, at, 1).await;
    let names = [
        ("InitiatorName", HOST),
        ("TargetName", TARGET),
        ("SessionType", "Normal"),
        ("AuthMethod", "CHAP"),
    ];
    let status = |pdu: &Pdu| LoginStatus(u16::from_be_bytes([pdu.header[36], pdu.header[37]]));
    let hello = client.initiator.login(LoginStage::Security, Some(LoginStage::Operational), &names);
    client.send(&hello).await;
    let answer = client.next().await;
    if status(&answer) != LoginStatus::Success {
        return status(&answer);
    }
    let algorithms = client.initiator.login(LoginStage::Security, None, &[("CHAP_A", "7")]);
    client.send(&algorithms).await;
    let answer = client.next().await;
    let id = answer.value("CHAP_I").unwrap().parse().unwrap();
    let challenge = binary(&answer.value("CHAP_C").unwrap()).unwrap();
    let secret = Secret::new(secret.as_bytes()).unwrap();
    let response = Algorithm::Sha256.response(id, &secret, &challenge);
    let response = Hex(response.as_bytes()).to_string();
    let proof = [("CHAP_N", "host"), ("CHAP_R", response.as_str())];
    let proof = client.initiator.login(LoginStage::Security, Some(LoginStage::Operational), &proof);
    client.send(&proof).await;
    let answer = client.next().await;
    if status(&answer) != LoginStatus::Success {
        return status(&answer);
    }
    let end = client.initiator.login(LoginStage::Operational, Some(LoginStage::FullFeature), &[]);
    client.send(&end).await;
    status(&client.next().await)
}

/// 667 a second were once looked at, and one line was logged for each.
#[test]
fn chap_secrets_cannot_be_guessed_quickly_and_the_right_one_gets_in() {
    on_core(async |core| {
        let (server, at) = serve_guarded(&core).await;
        let began = Instant::now();
        for _ in 0..12 {
            let status = log_in_with(&core, at, "a wrong secret").await;
            assert_eq!(status, LoginStatus::AuthenticationFailure);
        }
        // The last four wait for 3.75 s.
        assert!(began.elapsed() > Duration::from_millis(3700), "{:?}", began.elapsed());
        let clients = server.clients();
        assert_eq!(clients.attempt_counts.failures[AuthMethod::Chap as usize], 12);
        let [failing] = &clients.failing_clients[..] else { panic!("{clients:?}") };
        assert_eq!((failing.name.as_str(), failing.target.as_str()), (HOST, TARGET));
        assert_eq!((failing.times, failing.address), (12, at.ip()));
        // It is mended there: it has to wait a little once, and no more.
        let began = Instant::now();
        assert_eq!(log_in_with(&core, at, SECRET).await, LoginStatus::Success);
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        let delayed = server.clients().attempt_counts.delayed;
        for _ in 0..5 {
            assert_eq!(log_in_with(&core, at, SECRET).await, LoginStatus::Success);
        }
        assert_eq!(server.clients().attempt_counts.delayed, delayed);
        assert!(server.clients().failing_clients.is_empty());
    });
}

#[test]
fn many_logins_at_once_do_not_guess_faster() {
    on_core(async |core| {
        let (server, at) = serve_guarded(&core).await;
        let guess = |core: Core| async move { log_in_with(&core, at, "a wrong secret").await };
        let guesses: Vec<_> =
            (0..100).map(|_| tokio::task::spawn_local(guess(core.clone()))).collect();
        let mut statuses = Vec::new();
        for guess in guesses {
            statuses.push(guess.await.unwrap());
        }
        let judged = statuses.iter().filter(|s| **s == LoginStatus::AuthenticationFailure).count();
        let busy = statuses.iter().filter(|s| **s == LoginStatus::ServiceUnavailable).count();
        assert!(judged < 20 && judged + busy == 100, "{judged} judged, {busy} told to come again");
        assert!(server.clients().attempt_counts.refused >= 80);
    });
}

/// Regression: a clone and its original logged in ten times a second, and the log named neither.
#[test]
fn hosts_with_one_name_that_end_each_others_sessions_are_reported() {
    on_core(async |core| {
        let (server, at) = serve(&core, Limits::default()).await;
        // Behind one address: it takes more of them to be sure.
        let mut here = Client::log_in(&core, at, 1, &[]).await;
        for n in 0..25 {
            assert!(server.clients().duplicate_names.is_empty() || n > 10);
            let there = Client::log_in(&core, at, 1, &[]).await;
            here = there;
        }
        drop(here);
        let clients = server.clients();
        assert!(clients.replaced >= 20, "{clients:?}");
        let [shared] = &clients.duplicate_names[..] else { panic!("{clients:?}") };
        assert_eq!((shared.initiator.as_str(), shared.target.as_str()), (HOST, TARGET));
    });
}

/// One host once took all connections of a core from those of other volumes.
#[test]
fn one_initiator_leaves_connections_for_others() {
    on_core(async |core| {
        let limits = Limits { connections: 8, ..Limits::default() };
        let (server, at) = serve(&core, limits).await;
        let other = "iqn.2026-01.com.example:other";
        let named = [HOST, other].map(|name| (name.to_owned(), AccessRule::NameOnly));
        let access = AccessList { any: None, named: named.into() };
        let luns = [(1, VolumeId([7; 16]))].into();
        let targets =
            [(TARGET.to_owned(), IscsiTarget { luns, access, ..IscsiTarget::default() })].into();
        server.set_catalog(Arc::new(Catalog { targets, ..Catalog::default() }));
        let mut all = Vec::new();
        for isid in 0..6 {
            all.push(Client::log_in(&core, at, isid, &[]).await);
        }
        let mut one_more = Client::dial(&core, at, 99).await;
        one_more.ask(&[]).await;
        assert_eq!(one_more.next().await.header[36..38], [3, 2], "out of resources");
        // A session that replaces another one does not count in addition.
        all.push(Client::log_in(&core, at, 5, &[]).await);
        // Nor does another of its names have more.
        let log_in_as_other = async || {
            let mut host = Client::dial(&core, at, 1).await;
            let names =
                [("InitiatorName", other), ("TargetName", TARGET), ("SessionType", "Normal")];
            let login = host.initiator.login(
                LoginStage::Operational,
                Some(LoginStage::FullFeature),
                &names,
            );
            host.send(&login).await;
            let status = host.next().await.header[36..38].to_vec();
            (host, status)
        };
        assert_eq!(log_in_as_other().await.1, [3, 2], "out of resources");
        all.pop();
        drop(all.pop());
        let freed = timeout(PATIENCE, async {
            while log_in_as_other().await.1 != [0, 0] {
                sleep(Duration::from_millis(10)).await;
            }
        });
        freed.await.expect("it has its share again");
    });
}
