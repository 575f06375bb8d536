//! Subsystems with several namespaces: which hosts see which, and events when one is added,
//! removed, or not served for now (RFD 0019, 4).

use target::{RemoteCatalog, UnavailableNamespace, VolumeSpace};

use super::*;

/// A subsystem with volumes A and B as namespaces 1 and 6.
fn both() -> Subsystem {
    let access = AccessList::open();
    let namespaces = [(1, A), (6, B)].into();
    Subsystem { namespaces, serial: "1".into(), access, ..Subsystem::default() }
}

/// A server of volumes A and B, in a subsystem with these namespaces, and where it listens.
async fn serve_both(core: &Core, subsystem: Subsystem) -> (Rc<Server>, SocketAddr) {
    let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
    for id in [A, B] {
        add(&server, id, disk());
    }
    server.set_catalog(of(subsystem));
    let at = listen(core, &server, Service::Nvme).await;
    (server, at)
}

fn on(nsid: u32, sqe: Sqe) -> Sqe {
    Sqe { nsid: nsid.into(), ..sqe }
}

impl Queue {
    /// The active namespaces.
    async fn namespaces(&mut self) -> Vec<u32> {
        let list = self.identify(2, 0).await;
        let ids = list.chunks_exact(4).map(|id| dword(id, 0));
        ids.take_while(|id| *id != 0).collect()
    }

    /// How a write of a block of a namespace ends.
    async fn write_to(&mut self, nsid: u32, byte: u8) -> Status {
        let capsule = self.host.capsule(on(nsid, rw(NvmOpcode::Write, 7, 1)), &[byte; 512]);
        self.send(&capsule).await;
        self.status(7).await.0
    }

    /// Enables events for namespaces and access states.
    async fn wants_events(&mut self) {
        let mut events = Sqe::new(AdminOpcode::SetFeatures.0, 8, 0);
        (events.cdw10[0], events.cdw10[1]) = (0x0b.into(), (1 << 11 | 1 << 8).into());
        self.command(events).await;
        assert!(self.status(8).await.0.is_success());
    }

    /// The next event, once `cause` has happened.
    async fn event(&mut self, cause: impl FnOnce()) -> u64 {
        self.command(Sqe::new(AdminOpcode::AsyncEventRequest.0, 30, 0)).await;
        cause();
        self.status(30).await.1
    }

    /// The log of changed namespaces.
    async fn changed(&mut self) -> u32 {
        let mut log = Sqe::new(AdminOpcode::GetLogPage.0, 9, 0);
        log.cdw10[0] = (0x04 | 1023 << 16).into();
        dword(&self.fetch(log, 4096).await, 0)
    }
}

const NAMESPACE_CHANGED: u64 = 0x0004_0002;
const ANA_CHANGED: u64 = 0x000c_0302;

/// NVMe Base 2.0, 2.1: each volume is a namespace, and a host sees those that it is allowed to.
#[test]
fn volumes_are_namespaces_of_one_subsystem() {
    on_core(async |core| {
        let (server, at) = serve_both(&core, both()).await;
        let (mut admin, mut io) = associate(&core, at).await;
        assert_eq!(admin.namespaces().await, [1, 6]);
        let groups =
            (dword(&admin.identify(0, 1).await, 92), dword(&admin.identify(0, 6).await, 92));
        assert_eq!(groups, (1, 6), "ANAGRPID");
        assert_eq!(io.write_to(6, 0x66).await, Status::SUCCESS);
        let [a, b] = [A, B].map(|id| Rc::clone(&server.volume(id).unwrap().volume));
        assert_eq!((first_byte(&core, &a).await, first_byte(&core, &b).await), (0, 0x66));
        // B belongs to another host from now on.
        admin.wants_events().await;
        let masks = [(6, ["nqn.2026-01.com.example:other".to_owned()].into())].into();
        let hide = || server.set_catalog(of(Subsystem { masks, ..both() }));
        assert_eq!(admin.event(hide).await, NAMESPACE_CHANGED);
        assert_eq!((admin.changed().await, admin.namespaces().await), (6, vec![1]));
        assert_eq!(io.write_to(6, 1).await.code(), Status::INVALID_FIELD, "inactive");
        assert_eq!(io.write_to(1, 0x11).await, Status::SUCCESS);
        let (mut admin, mut io) = associate(&core, at).await;
        assert_eq!(admin.namespaces().await, [1]);
        assert_eq!(io.write_to(6, 1).await.code(), Status::INVALID_FIELD);
        assert_eq!((first_byte(&core, &a).await, first_byte(&core, &b).await), (0x11, 0x66));
    });
}

/// 5.2: namespaces come and go while the host is there.
#[test]
fn namespaces_come_and_go() {
    on_core(async |core| {
        let (server, at) = serve_both(&core, catalog(A).subsystems[SUBNQN].clone()).await;
        let (mut admin, mut io) = associate(&core, at).await;
        admin.wants_events().await;
        assert_eq!(admin.namespaces().await, [1]);
        assert_eq!(admin.event(|| server.set_catalog(of(both()))).await, NAMESPACE_CHANGED);
        assert_eq!((admin.changed().await, admin.namespaces().await), (6, vec![1, 6]));
        assert_eq!(io.write_to(6, 1).await, Status::SUCCESS);
        let last = || server.set_catalog(of(Subsystem { namespaces: [(6, B)].into(), ..both() }));
        assert_eq!(admin.event(last).await, NAMESPACE_CHANGED);
        assert_eq!((admin.changed().await, admin.namespaces().await), (1, vec![6]));
        assert_eq!(io.write_to(1, 1).await.code(), Status::INVALID_FIELD);
        assert_eq!(io.write_to(6, 1).await, Status::SUCCESS);
    });
}

/// NVM Command Set 1.0, 4.1.5.1: the space of a thin volume is reported to hosts that ask, even
/// later ones; it causes no event.
#[test]
fn space_use_of_a_thin_volume_is_reported() {
    on_core(async |core| {
        let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
        let volume = Volume::new(disk(), Epoch::default());
        let name = "thin".to_owned();
        server.add_volume(ServedVolume { id: A, name, volume, thin: true, access: None });
        add(&server, B, disk());
        server.set_catalog(of(both()));
        let at = listen(&core, &server, Service::Nvme).await;
        let (mut early, _io) = associate(&core, at).await;
        early.wants_events().await;
        let take = |used| {
            for id in [A, B] {
                server.set_space(id, VolumeSpace { used, available: 1 << 20 });
            }
        };
        async fn nuse(queue: &mut Queue) -> (u32, u32) {
            (dword(&queue.identify(0, 1).await, 16), dword(&queue.identify(0, 6).await, 16))
        }
        assert_eq!(nuse(&mut early).await, (1 << 14, 1 << 14), "not measured yet");
        early.command(Sqe::new(AdminOpcode::AsyncEventRequest.0, 30, 0)).await;
        take(5 * 512 + 1);
        assert_eq!(nuse(&mut early).await, (6, 1 << 14), "B is not thin");
        let (mut late, _io) = associate(&core, at).await;
        assert_eq!(nuse(&mut late).await, (6, 1 << 14));
        take(64 << 20);
        assert_eq!(nuse(&mut late).await, (1 << 14, 1 << 14), "as much as there is, at most");
        // The request is still pending for a real event.
        server.set_catalog(of(Subsystem { namespaces: [(1, A)].into(), ..both() }));
        assert_eq!(early.status(30).await.1, NAMESPACE_CHANGED);
        assert_eq!(early.changed().await, 6, "and not 1");
    });
}

/// Known properties of a volume that is away.
const ABSENT: UnavailableNamespace =
    UnavailableNamespace { block_size: 512, blocks: 1 << 14, thin: false };

fn away(nsids: &[u32]) -> Subsystem {
    Subsystem { unavailable: nsids.iter().map(|nsid| (*nsid, ABSENT)).collect(), ..both() }
}

/// 8.1: a namespace that the node does not serve for now is listed as inaccessible, also for new
/// hosts: otherwise they would treat it as deleted.
#[test]
fn a_namespace_that_is_away_is_inaccessible() {
    on_core(async |core| {
        let (server, at) = serve_both(&core, both()).await;
        let (mut admin, mut io) = associate(&core, at).await;
        admin.wants_events().await;
        assert_eq!(admin.event(|| server.set_catalog(of(away(&[6])))).await, ANA_CHANGED);
        let log = admin.ana(16 + 2 * 36).await;
        assert_eq!(
            (log[8], log[32], dword(&log, 52), log[68]),
            (2, 1, 6, 3),
            "optimized, inaccessible"
        );
        let old = server.remove_volume(B).unwrap();
        old.volume.close(&core.buffer_pool().account()).await.unwrap();
        let (mut late, mut late_io) = associate(&core, at).await;
        for (admin, io) in [(&mut admin, &mut io), (&mut late, &mut late_io)] {
            assert_eq!(admin.namespaces().await, [1, 6]);
            let size = admin.identify(0, 6).await[..8].to_vec();
            assert_eq!(size, (1u64 << 14).to_le_bytes(), "NSZE");
            assert_eq!(io.write_to(6, 1).await.code(), Status::ANA_INACCESSIBLE);
            assert_eq!(io.write_to(1, 1).await, Status::SUCCESS);
            io.command(Sqe::new(NvmOpcode::Flush.0, 5, nvme::entry::NSID_ALL)).await;
            assert_eq!(io.status(5).await.0.code(), Status::ANA_INACCESSIBLE, "not of all");
        }
        let back = || {
            add(&server, B, disk());
            server.set_catalog(of(both()));
        };
        assert_eq!(admin.event(back).await, ANA_CHANGED);
        assert_eq!(admin.ana(16 + 2 * 36).await[68], 1, "optimized");
        for io in [&mut io, &mut late_io] {
            assert_eq!(io.write_to(6, 1).await, Status::SUCCESS);
        }
    });
}

/// A volume that has gone before the catalog says so is another path's, or a matter of time.
#[test]
fn a_volume_that_has_just_gone_is_tried_again() {
    on_core(async |core| {
        let (server, at) = serve_both(&core, both()).await;
        let (_admin, mut io) = associate(&core, at).await;
        server.remove_volume(B).unwrap();
        let early = io.write_to(6, 1).await;
        assert_eq!((early.code(), early.is_do_not_retry()), (Status::ANA_TRANSITION, false));
    });
}

/// 8.1: a host keeps the last state of a namespace that it has lost; when that returns in another
/// state it is notified.
#[test]
fn an_access_state_is_reported_although_its_namespace_was_absent_meanwhile() {
    on_core(async |core| {
        let (server, at) = serve_both(&core, both()).await;
        let (mut admin, mut io) = associate(&core, at).await;
        admin.wants_events().await;
        assert_eq!(admin.event(|| server.set_catalog(of(away(&[6])))).await, ANA_CHANGED);
        assert_eq!(admin.ana(16 + 2 * 36).await[68], 3, "inaccessible");
        let alone = || (*catalog(A)).clone().subsystems[SUBNQN].clone();
        assert_eq!(admin.event(|| server.set_catalog(of(alone()))).await, NAMESPACE_CHANGED);
        assert_eq!(admin.changed().await, 6);
        let mut events = vec![admin.event(|| server.set_catalog(of(both()))).await];
        while events.last() != Some(&ANA_CHANGED) {
            assert_eq!((events.len(), admin.changed().await), (1, 6), "{events:x?}");
            events.push(admin.event(|| {}).await);
        }
        assert_eq!(io.write_to(6, 1).await, Status::SUCCESS);
    });
}

/// 6.3: a subsystem of which nothing is served for now ends its associations, and has hosts come
/// again: a refusal for good would have Linux give the path up.
#[test]
fn a_subsystem_that_is_away_asks_its_hosts_to_come_again() {
    on_core(async |core| {
        let (server, at) = serve_both(&core, both()).await;
        let (mut admin, _io) = associate(&core, at).await;
        for id in [A, B] {
            server.remove_volume(id).unwrap();
        }
        server.set_catalog(of(Subsystem { core: 7, ..away(&[1, 6]) }));
        assert!(timeout(PATIENCE, admin.receive()).await.expect("it is told").is_none());
        assert_eq!(comes_again(&core, at).await, Status::CONNECT_BUSY);
        let mut discoverer = discoverer(&core, at).await;
        assert_eq!(discoverer.discovery_header().await.1, 0, "NUMREC");
        for id in [A, B] {
            add(&server, id, disk());
        }
        server.set_catalog(of(both()));
        assert_eq!(discoverer.discovery_header().await.1, 1, "NUMREC");
        let (mut admin, mut io) = associate(&core, at).await;
        assert_eq!(admin.namespaces().await, [1, 6]);
        assert_eq!(io.write_to(1, 1).await, Status::SUCCESS);
    });
}

/// The refusal of a host that is to come again.
async fn comes_again(core: &Core, at: SocketAddr) -> Status {
    let (_, status) = Queue::try_connect(core, at, &connect(0, 0)).await;
    assert!(!status.is_do_not_retry(), "{status:?}");
    status.code()
}

/// Hosts without access cannot find out by Connect or discovery which volumes exist (NVMe Base 2.0,
/// 6.3).
#[test]
fn a_subsystem_that_is_not_the_hosts_and_one_that_is_not_there_are_refused_alike() {
    on_core(async |core| {
        let (server, at) = serve_both(&core, both()).await;
        let denied =
            || [(SUBNQN.to_owned(), Subsystem { access: AccessList::default(), ..both() })];
        let none = Catalog::default;
        let here = || Catalog { subsystems: denied().into(), ..none() };
        let remote = || RemoteCatalog { subsystems: denied().into(), ..RemoteCatalog::default() };
        let elsewhere = || Catalog { remote: remote(), ..none() };
        let refused = Status::CONNECT_INVALID_HOST.do_not_retry();
        for (is_incomplete, expected) in [(false, refused), (true, Status::CONNECT_BUSY)] {
            for catalog in [none(), here(), elsewhere()] {
                server.set_catalog(Arc::new(Catalog { is_incomplete, ..catalog }));
                let (_, status) = Queue::try_connect(&core, at, &connect(0, 0)).await;
                assert_eq!(status, expected);
            }
        }
    });
}

/// Only namespaces visible to the host count; unknown ones are not refused permanently.
#[test]
fn a_host_whose_namespaces_are_away_comes_again() {
    on_core(async |core| {
        let (server, at) = serve_both(&core, both()).await;
        let (mut admin, _io) = associate(&core, at).await;
        let own = [connect(0, 0).hostnqn].into();
        let masks = [(1, ["nqn.2026-01.com.example:other".to_owned()].into()), (6, own)].into();
        server.set_catalog(of(Subsystem { masks, ..away(&[6]) }));
        assert!(timeout(PATIENCE, admin.receive()).await.expect("it is told").is_none());
        assert_eq!(comes_again(&core, at).await, Status::CONNECT_BUSY);
        server.set_catalog(Arc::new(Catalog { is_incomplete: true, ..Catalog::default() }));
        assert_eq!(comes_again(&core, at).await, Status::CONNECT_BUSY);
        server.set_catalog(Arc::new(Catalog::default()));
        let (_, status) = Queue::try_connect(&core, at, &connect(0, 0)).await;
        assert!(status.is_do_not_retry(), "no record, no subsystem");
    });
}
