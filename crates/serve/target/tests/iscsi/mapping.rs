//! Units that are added, taken away and not there for now, as sessions see it (RFD 0017).

use super::*;
use target::{ChapCredentials, RemoteCatalog, Unavailability};

const HOST: &str = "iqn.2026-01.com.example:host";

/// A target with these volumes, for any initiator.
fn mapped(luns: &[(u16, u8)]) -> IscsiTarget {
    let access = AccessList::open();
    let luns = luns.iter().map(|&(lun, id)| (lun, VolumeId([id; 16]))).collect();
    IscsiTarget { luns, access, ..IscsiTarget::default() }
}

fn publish(server: &Rc<Server>, target: Option<IscsiTarget>) {
    let targets = target.map(|t| (TARGET.to_owned(), t)).into_iter().collect();
    server.set_catalog(Arc::new(Catalog { targets, ..Catalog::default() }));
}

/// A server with these volumes, as a target of which all are units.
async fn serve_all(core: &Core, luns: &[(u16, u8)]) -> (Rc<Server>, SocketAddr) {
    let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
    for &(_, id) in luns {
        add(&server, id);
    }
    publish(&server, Some(mapped(luns)));
    let address = listen(core, &server, Service::Iscsi).await;
    (server, address)
}

fn add(server: &Rc<Server>, id: u8) {
    let mem = Mem::new(MemOptions::new(512, 1 << 17));
    let volume = Volume::new(Dev::new(mem), Epoch::default());
    let (id, name) = (VolumeId([id; 16]), format!("disk-{id}"));
    server.add_volume(ServedVolume { id, name, volume, thin: false, access: None });
}

impl Client {
    /// The numbers that REPORT LUNS lists.
    async fn luns(&mut self, lun: u8) -> Vec<u8> {
        self.initiator.lun = [0, lun, 0, 0, 0, 0, 0, 0];
        let list = self.ask_for(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0], 255).await.1;
        list[8..].chunks(8).map(|entry| entry[1]).collect()
    }

    /// How TEST UNIT READY of a unit ends.
    async fn ready(&mut self, lun: u8) -> Option<[u8; 3]> {
        self.initiator.lun = [0, lun, 0, 0, 0, 0, 0, 0];
        self.sense(&READY, 0).await
    }
}

async fn login_status(core: &Core, at: SocketAddr) -> [u8; 2] {
    let mut client = Client::dial(core, at, 99).await;
    client.ask(&[]).await;
    let header = client.next().await.header;
    [header[36], header[37]]
}

const NOT_SUPPORTED: Option<[u8; 3]> = Some([5, 0x25, 0]);
const LUNS_CHANGED: Option<[u8; 3]> = Some([6, 0x3f, 0x0e]);
const POWER_ON: Option<[u8; 3]> = Some([6, 0x29, 0]);

/// SAM-5 5.11, SPC-4 6.33: a removed unit is not supported, even for commands in flight; the other
/// units report the change, and that of an added one.
#[test]
fn a_removed_unit_is_not_supported_and_the_others_report_it() {
    on_core(async |core| {
        let (server, at) = serve_all(&core, &[(1, 7), (2, 8), (3, 9)]).await;
        publish(&server, Some(mapped(&[(1, 7), (2, 8)])));
        let mut client = Client::log_in(&core, at, 1, &[("ImmediateData", "No")]).await;
        assert_eq!(client.ready(2).await, POWER_ON);
        client.write(0, 8, &[]).await;
        let r2t = client.next().await;
        assert_eq!(r2t.opcode(), Opcode::R2t);
        publish(&server, Some(mapped(&[(1, 7)])));
        client.answer(&r2t).await;
        let ended = client.next().await;
        assert_eq!((ended.itt(), ended.header[3]), (r2t.itt(), 2), "{ended:?}");
        assert_eq!((ended.data[4], ended.data[14]), (5, 0x25));
        assert_eq!(client.ready(2).await, NOT_SUPPORTED);
        assert_eq!(client.ready(1).await, LUNS_CHANGED);
        assert_eq!(client.ready(1).await, None, "it is told once");
        assert_eq!(client.luns(1).await, [1]);
        assert_eq!(client.ask_for(&[0x12, 0, 0, 0, 96, 0], 96).await.1[0], 0);
        // One that comes.
        publish(&server, Some(mapped(&[(1, 7), (3, 9)])));
        assert_eq!(client.ready(1).await, LUNS_CHANGED);
        assert_eq!(client.luns(1).await, [1, 3]);
        assert_eq!(client.ready(3).await, POWER_ON);
        publish(&server, Some(mapped(&[(1, 7), (2, 8)])));
        assert_eq!(client.ready(1).await, LUNS_CHANGED);
        assert_eq!(client.ready(2).await, POWER_ON, "it is another unit");
    });
}

/// RFD 0017, attack 10: a number does not become another volume's under a disk that an initiator
/// still has.
#[test]
fn a_number_names_one_volume_in_a_session() {
    on_core(async |core| {
        let (server, at) = serve_all(&core, &[(1, 7), (2, 8), (3, 9)]).await;
        publish(&server, Some(mapped(&[(1, 7), (2, 8)])));
        let mut client = Client::log_in(&core, at, 1, &[]).await;
        assert_eq!(client.ready(2).await, POWER_ON);
        for gone in [true, false] {
            if gone {
                publish(&server, Some(mapped(&[(1, 7)])));
                assert_eq!(client.ready(1).await, LUNS_CHANGED);
            }
            publish(&server, Some(mapped(&[(1, 7), (2, 9)])));
            for _ in 0..2 {
                assert_eq!(client.ready(2).await, NOT_SUPPORTED);
            }
            client.ready(1).await;
            assert_eq!(client.luns(1).await, [1]);
            let mut fresh = Client::log_in(&core, at, 2, &[]).await;
            assert_eq!(fresh.luns(1).await, [1, 2], "a new session sees it");
            publish(&server, Some(mapped(&[(1, 7), (2, 8)])));
            assert_eq!(client.ready(1).await, LUNS_CHANGED);
            assert_eq!(client.ready(2).await, POWER_ON, "it is the same volume again");
        }
    });
}

/// RFD 0017, attack 11: a login that began before secrets were changed does not succeed with the
/// old ones.
#[test]
fn a_login_is_judged_by_the_secrets_of_its_end() {
    on_core(async |core| {
        let (server, at) = serve_all(&core, &[(1, 7)]).await;
        let mut client = Client::dial(&core, at, 1).await;
        let names = [
            ("InitiatorName", "iqn.2026-01.com.example:host"),
            ("TargetName", TARGET),
            ("SessionType", "Normal"),
            ("AuthMethod", "None"),
        ];
        let begun =
            client.initiator.login(LoginStage::Security, Some(LoginStage::Operational), &names);
        client.send(&begun).await;
        assert_eq!(client.next().await.header[36..38], [0, 0]);
        let chap =
            ChapCredentials { user: "u".into(), secret: "s".repeat(12).into(), mutual: None };
        let any = Some(AccessRule::Proof(chap));
        let guarded = IscsiTarget {
            access: AccessList { any, ..AccessList::default() },
            ..mapped(&[(1, 7)])
        };
        publish(&server, Some(guarded));
        let end =
            client.initiator.login(LoginStage::Operational, Some(LoginStage::FullFeature), &[]);
        client.send(&end).await;
        assert_eq!(client.next().await.header[36..38], [2, 1], "authentication failure");
        assert!(server.sessions().len() <= 1);
    });
}

/// Initiators without access cannot find out by logins or discovery which volumes exist (RFC 7143
/// 11.13.5).
#[test]
fn a_target_that_is_not_the_initiators_and_one_that_is_not_there_are_refused_alike() {
    on_core(async |core| {
        let denied = IscsiTarget { access: AccessList::default(), ..mapped(&[(1, 7)]) };
        let none = Catalog::default;
        let here = || Catalog { targets: [(TARGET.to_owned(), denied.clone())].into(), ..none() };
        let remote = RemoteCatalog {
            targets: [(TARGET.to_owned(), denied.clone())].into(),
            ..RemoteCatalog::default()
        };
        let elsewhere = || Catalog { remote: remote.clone(), ..none() };
        let (server, at) = serve_all(&core, &[(1, 7)]).await;
        for (is_incomplete, status) in [(false, [2, 2]), (true, [3, 1])] {
            for catalog in [none(), here(), elsewhere()] {
                server.set_catalog(Arc::new(Catalog { is_incomplete, ..catalog }));
                assert_eq!(login_status(&core, at).await, status);
                let mut client = Client::dial(&core, at, 2).await;
                client.discover().await;
                for asked in ["All", TARGET] {
                    let text = client.initiator.text(NO_TAG, &[("SendTargets", asked)]);
                    client.send(&text).await;
                    assert_eq!(client.next().await.data, [0; 0], "{asked}");
                }
            }
        }
        // An initiator with access learns that it is not on this node.
        let allowed = RemoteCatalog {
            targets: [(TARGET.to_owned(), mapped(&[(1, 7)]))].into(),
            ..RemoteCatalog::default()
        };
        server.set_catalog(Arc::new(Catalog { remote: allowed, ..none() }));
        assert_eq!(login_status(&core, at).await, [2, 3]);
    });
}

/// RFD 0017, 2: a session that loses its last unit stays open, and reports that it is gone. A new
/// one is refused.
#[test]
fn a_session_outlives_its_last_unit() {
    on_core(async |core| {
        let denied = || IscsiTarget { access: AccessList::default(), ..mapped(&[(1, 7)]) };
        for after in [None, Some(denied())] {
            let (server, at) = serve_all(&core, &[(1, 7)]).await;
            let mut client = Client::log_in(&core, at, 1, &[]).await;
            publish(&server, after);
            for _ in 0..2 {
                assert_eq!(client.ready(1).await, NOT_SUPPORTED);
                assert_eq!(client.sense(&cdb(0x2a, 0, 0), 0).await, NOT_SUPPORTED);
            }
            assert_eq!(client.luns(1).await, [0; 0]);
            assert_eq!(client.ask_for(&[0x12, 0, 0, 0, 96, 0], 96).await.1[0], 0x7f);
            assert_eq!(login_status(&core, at).await, [2, 2]);
            // It comes back as a unit that was just powered on.
            publish(&server, Some(mapped(&[(1, 7)])));
            assert_eq!(client.ready(1).await, POWER_ON);
            assert_eq!(client.ready(1).await, None);
        }
    });
}

/// Only the denied initiator loses it.
#[test]
fn a_denied_initiator_loses_its_units_and_no_other_does() {
    on_core(async |core| {
        let (server, at) = serve_all(&core, &[(1, 7)]).await;
        let mut client = Client::log_in(&core, at, 1, &[]).await;
        let only = |name: &str| {
            let named = [(name.to_owned(), AccessRule::NameOnly)].into();
            Some(IscsiTarget { access: AccessList { any: None, named }, ..mapped(&[(1, 7)]) })
        };
        publish(&server, only(HOST));
        assert_eq!(client.ready(1).await, None);
        publish(&server, only("iqn.2026-01.com.example:other"));
        assert_eq!(client.ready(1).await, NOT_SUPPORTED);
    });
}

/// Who has to prove itself in another way logs in anew: its units are there.
#[test]
fn a_session_whose_secret_changes_ends() {
    on_core(async |core| {
        let (server, at) = serve_all(&core, &[(1, 7)]).await;
        let mut client = Client::log_in(&core, at, 1, &[]).await;
        let chap =
            ChapCredentials { user: "u".into(), secret: b"0123456789ab".to_vec(), mutual: None };
        let any = Some(AccessRule::Proof(chap));
        let access = AccessList { any, ..AccessList::default() };
        publish(&server, Some(IscsiTarget { access, ..mapped(&[(1, 7)]) }));
        let reply = client.next().await;
        assert_eq!((reply.opcode(), reply.header[36]), (Opcode::AsyncMessage, 3));
        assert!(client.receive().await.is_none());
    });
}

/// RFD 0017, 2: a unit that this node does not serve for now is never reported as gone, and stays
/// in the list.
#[test]
fn a_unit_that_is_away_is_not_gone() {
    on_core(async |core| {
        let (server, at) = serve_all(&core, &[(1, 7), (2, 8)]).await;
        let mut client = Client::log_in(&core, at, 1, &[("ImmediateData", "No")]).await;
        assert_eq!(client.ready(2).await, POWER_ON);
        client.write(0, 8, &[]).await;
        let r2t = client.next().await;
        let without = |luns: &[u16], away| {
            let away = luns.iter().map(|lun| (*lun, away)).collect();
            Some(IscsiTarget { unavailable: away, ..mapped(&[(1, 7), (2, 8)]) })
        };
        publish(&server, without(&[2], Unavailability::BecomingReady));
        client.answer(&r2t).await;
        let ended = client.next().await;
        assert_eq!((ended.itt(), ended.data[4], ended.data[14]), (r2t.itt(), 2, 4), "{ended:?}");
        server.remove_volume(VolumeId([8; 16]));
        assert_eq!(client.ready(2).await, Some([2, 4, 1]));
        assert_eq!(client.sense(&cdb(0x2a, 0, 0), 0).await, Some([2, 4, 1]));
        publish(&server, without(&[2], Unavailability::Unavailable));
        assert_eq!(client.ready(2).await, Some([2, 4, 0x0c]));
        assert_eq!(client.ready(1).await, None, "the list is the same");
        assert_eq!(client.luns(1).await, [1, 2]);
        assert_eq!(client.luns(2).await, [1, 2]);
        let reset = client.initiator.task(TaskFunction::LogicalUnitReset, NO_TAG, 0);
        client.send(&reset).await;
        assert_eq!(client.next().await.header[2], 0);
        assert_eq!(login_status(&core, at).await, [0, 0]);
        // Where nothing is served no new login succeeds, but not permanently.
        publish(&server, without(&[1, 2], Unavailability::Unavailable));
        assert_eq!(client.ready(1).await, Some([2, 4, 0x0c]));
        assert_eq!(login_status(&core, at).await, [3, 1]);
        add(&server, 8);
        publish(&server, without(&[], Unavailability::Unavailable));
        assert_eq!(client.ready(2).await, POWER_ON);
        assert_eq!(client.ready(2).await, None);
        assert_eq!(client.ready(1).await, POWER_ON);
    });
}
