//! Hosts that must authenticate, on each queue (RFD 0020).

use std::num::NonZeroU32;

use nvme::auth::{
    AuthCommand, AuthFailure, AuthPolicy, Config, FailureExplanation, HostAuthenticator, HostStep,
    Secret, SharedConfig, TransactionRandomness,
};
use nvme::entry::FabricsType;
use nvme::fabrics::CONNECT_AUTHENTICATE;
use target::auth_throttle::AuthMethod;
use target::{AccessRule, HostSecrets};

use super::*;

pub(super) const HOST_SECRET: &str = "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:";
const OTHER_SECRET: &str = "DHHC-1:00:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:";
const CONTROLLER_SECRET: &str = "DHHC-1:01:kcxKKkDGIyL6bvTQ4Bt9Ezc0BxjHs3BnOMW1NDVxqM+rLVUt:";

/// Room that a host of today has for a message, in bytes.
const ROOM: u32 = 4096;

fn secret(text: &str) -> Secret {
    Secret::parse(text).unwrap()
}

/// Namespace 1 is volume A, for the host alone, and by this rule.
fn admitting(admission: AccessRule<HostSecrets>) -> Arc<Catalog> {
    let named = [(connect(0, 0).hostnqn, admission)].into();
    let access = AccessList { any: None, named };
    let namespaces = [(1, A)].into();
    of(Subsystem { namespaces, serial: "1".into(), access, ..Subsystem::default() })
}

/// Likewise, by a secret.
pub(super) fn guarded(host: &str) -> Arc<Catalog> {
    let controller = Some(secret(CONTROLLER_SECRET));
    admitting(AccessRule::Proof(HostSecrets::Known { host: secret(host), controller }))
}

async fn serve_guarded(core: &Core, limits: Limits) -> (Rc<Server>, SocketAddr) {
    let (server, at, _) = serve(core, limits).await;
    server.set_catalog(guarded(HOST_SECRET));
    (server, at)
}

/// The host's secrets; whether it wants the controller to authenticate as well.
pub(super) fn config(host: &str, mutual: bool) -> SharedConfig {
    Arc::new(Config {
        host_nqn: connect(0, 0).hostnqn,
        subsystem_nqn: SUBNQN.into(),
        host_secret: secret(host),
        controller_secret: mutual.then(|| secret(CONTROLLER_SECRET)),
        policy: AuthPolicy::default(),
    })
}

fn fresh() -> TransactionRandomness {
    TransactionRandomness::new(NonZeroU32::new(77).unwrap(), &[0x5a; TransactionRandomness::LEN])
}

fn enable() -> Sqe {
    Property::encode(1, 0x14, false, Some(0x0046_0001))
}

impl Queue {
    /// Connects where a proof is asked for.
    async fn connect_asked(core: &Core, to: SocketAddr, connect: &Connect) -> Self {
        let (queue, status) = Self::try_connect(core, to, connect).await;
        assert!(status.is_success(), "{status:?}");
        assert_eq!(queue.connected & CONNECT_AUTHENTICATE, CONNECT_AUTHENTICATE);
        queue
    }

    fn auth_send(&self, cid: u16, message: &[u8]) -> Vec<u8> {
        let bytes = u32::try_from(message.len()).unwrap();
        self.host.capsule(AuthCommand::Send { bytes }.encode(cid), message)
    }

    async fn auth_receive(&mut self, bytes: u32) -> Vec<u8> {
        self.fetch(AuthCommand::Receive { bytes }.encode(41), bytes).await
    }

    /// Authenticates; how it fails if it does.
    pub(super) async fn prove(&mut self, config: SharedConfig) -> Result<(), AuthFailure> {
        let (mut prover, message) = HostAuthenticator::start(config, 7);
        let mut next = HostStep::Send(message);
        loop {
            let (last, end) = match next {
                HostStep::Send(message) => {
                    let send = self.auth_send(40, &message);
                    self.send(&send).await;
                    assert!(self.status(40).await.0.is_success());
                    let answer = self.auth_receive(ROOM).await;
                    next = prover.receive(&answer, fresh);
                    continue;
                }
                HostStep::Compute(work) => {
                    next = prover.on_computed(work.run()).unwrap();
                    continue;
                }
                HostStep::Authenticated(last) => (last, Ok(())),
                HostStep::Failed(end, last) => (last, Err(end)),
            };
            if let Some(message) = last {
                let send = self.auth_send(40, &message);
                self.send(&send).await;
                assert!(self.status(40).await.0.is_success());
            }
            return end;
        }
    }

    /// The server has closed the connection, and has said nothing more.
    async fn is_closed(&mut self) {
        let end = timeout(PATIENCE, self.receive()).await.expect("an end in time");
        assert!(end.is_none(), "{end:?}");
    }

    /// That nothing may be done before the proof.
    async fn is_refused(&mut self, sqe: Sqe) {
        let cid = sqe.cid.get();
        self.command(sqe).await;
        let (status, _) = self.status(cid).await;
        assert_eq!(status, Status::AUTHENTICATION_REQUIRED);
    }
}

/// An association that has proved itself on both queues.
async fn associate_by(core: &Core, to: SocketAddr, config: &SharedConfig) -> (Queue, Queue) {
    let mut admin = Queue::connect_asked(core, to, &connect(0, 0)).await;
    admin.prove(Arc::clone(config)).await.unwrap();
    admin.command(enable()).await;
    assert!(admin.status(1).await.0.is_success());
    let mut io = Queue::connect_asked(core, to, &connect(1, admin.cntlid)).await;
    io.prove(Arc::clone(config)).await.unwrap();
    (admin, io)
}

/// Whether a read ends well.
async fn reads(io: &mut Queue) -> bool {
    io.fetch(rw(NvmOpcode::Read, 9, 1), 512).await.len() == 512
}

/// NVMe Base 2.0, 8.13.1: only authentication messages until the host has authenticated, on each
/// queue.
#[test]
fn a_host_is_let_in_once_it_has_proved_itself() {
    on_core(async |core| {
        let (server, at) = serve_guarded(&core, Limits::default()).await;
        let hosts = || server.sessions().iter().filter(|s| s.initiator.is_some()).count();
        for mutual in [false, true] {
            let config = config(HOST_SECRET, mutual);
            let mut admin = Queue::connect_asked(&core, at, &connect(0, 0)).await;
            for sqe in [
                Property::encode(1, 0x1c, false, None),
                enable(),
                Sqe::new(AdminOpcode::KeepAlive.0, 3, 0),
                Sqe::new(AdminOpcode::AsyncEventRequest.0, 4, 0),
                abort(5, 0, 4),
            ] {
                admin.is_refused(sqe).await;
            }
            assert_eq!(hosts(), 0, "the host is unknown");
            admin.prove(Arc::clone(&config)).await.unwrap();
            admin.command(enable()).await;
            assert!(admin.status(1).await.0.is_success());
            let mut io = Queue::connect_asked(&core, at, &connect(1, admin.cntlid)).await;
            io.is_refused(rw(NvmOpcode::Read, 9, 1)).await;
            let disconnect = u32::from(FabricsType::Disconnect.0);
            io.is_refused(Sqe::new(AdminOpcode::Fabrics.0, 10, disconnect)).await;
            // Data sent before authentication is processed before it.
            let (_, negotiate) = HostAuthenticator::start(Arc::clone(&config), 6);
            let send = io.auth_send(40, &negotiate);
            let all = [
                io.host.command(rw(NvmOpcode::Read, 9, 1)),
                send,
                io.host.command(rw(NvmOpcode::Read, 11, 1)),
            ];
            io.send(&all.concat()).await;
            for cid in [9, 11] {
                assert_eq!(io.status(cid).await.0, Status::AUTHENTICATION_REQUIRED);
            }
            assert!(io.status(40).await.0.is_success());
            io.prove(config).await.unwrap();
            assert!(reads(&mut io).await);
            assert_eq!(hosts(), 2);
            drop((admin, io));
            while hosts() > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        }
    });
}

#[test]
fn secrets_of_hosts_cannot_be_guessed_quickly_and_the_right_one_gets_in() {
    on_core(async |core| {
        let (server, at) = serve_guarded(&core, Limits::default()).await;
        let began = Instant::now();
        for _ in 0..12 {
            let mut admin = Queue::connect_asked(&core, at, &connect(0, 0)).await;
            admin.prove(config(OTHER_SECRET, false)).await.unwrap_err();
        }
        // The last four wait for 3.75 s.
        assert!(began.elapsed() > Duration::from_millis(3700), "{:?}", began.elapsed());
        let clients = server.clients();
        let [failing] = &clients.failing_clients[..] else { panic!("{clients:?}") };
        assert_eq!(failing.method, AuthMethod::Dhchap);
        assert_eq!(
            (failing.name.as_str(), failing.target.as_str()),
            (&*connect(0, 0).hostnqn, SUBNQN)
        );
        let began = Instant::now();
        let (_admin, mut io) = associate_by(&core, at, &config(HOST_SECRET, true)).await;
        assert!(reads(&mut io).await && began.elapsed() < Duration::from_secs(15));
        assert!(server.clients().failing_clients.is_empty());
    });
}

/// NVMe Base 2.0, 8.13.2: a host that fails learns why, and its connection is closed.
#[test]
fn a_host_with_a_wrong_secret_is_refused_and_disconnected() {
    on_core(async |core| {
        let (_server, at) = serve_guarded(&core, Limits::default()).await;
        let failed = Err(AuthFailure::RefusedByPeer(FailureExplanation::AuthenticationFailed));
        let mut admin = Queue::connect_asked(&core, at, &connect(0, 0)).await;
        assert_eq!(admin.prove(config(OTHER_SECRET, true)).await, failed);
        admin.is_closed().await;
        // The admin queue's proof is no I/O queue's.
        let (admin, _io) = associate_by(&core, at, &config(HOST_SECRET, false)).await;
        let mut io = Queue::connect_asked(&core, at, &connect(2, admin.cntlid)).await;
        assert_eq!(io.prove(config(OTHER_SECRET, false)).await, failed);
        io.is_closed().await;
        // A host that finds the controller wrong says so.
        let mut admin = Queue::connect_asked(&core, at, &connect(0, 0)).await;
        let wrong = Config {
            controller_secret: Some(secret(OTHER_SECRET)),
            ..(*config(HOST_SECRET, true)).clone()
        };
        let refused = Err(AuthFailure::Refused(FailureExplanation::AuthenticationFailed));
        assert_eq!(admin.prove(Arc::new(wrong)).await, refused);
        admin.is_closed().await;
    });
}

/// A host that does not authenticate is disconnected, and does not hold up others.
#[test]
fn a_silent_host_is_disconnected() {
    on_core(async |core| {
        let login_timeout = Duration::from_millis(300);
        let limits = Limits { login_timeout, ..Limits::default() };
        let (_server, at) = serve_guarded(&core, limits).await;
        let mut silent = Queue::connect_asked(&core, at, &connect(0, 0)).await;
        let mut half = Queue::connect_asked(&core, at, &connect(0, 0)).await;
        let (_, negotiate) = HostAuthenticator::start(config(HOST_SECRET, false), 7);
        let send = half.auth_send(40, &negotiate);
        half.send(&send).await;
        assert!(half.status(40).await.0.is_success());
        silent.is_closed().await;
        half.is_closed().await;
        // Authenticated ones are kept, unless they authenticate again.
        let (mut admin, mut io) = associate_by(&core, at, &config(HOST_SECRET, false)).await;
        sleep(2 * login_timeout).await;
        assert!(reads(&mut io).await);
        let send = admin.auth_send(40, &negotiate);
        admin.send(&send).await;
        assert!(admin.status(40).await.0.is_success());
        admin.is_closed().await;
    });
}

/// Unauthenticated connections make room for new ones.
#[test]
fn unauthenticated_connections_block_no_host() {
    on_core(async |core| {
        let limits = Limits { logins: 2, ..Limits::default() };
        let (_server, at) = serve_guarded(&core, limits).await;
        let mut first = Queue::connect_asked(&core, at, &connect(0, 0)).await;
        let _second = Queue::connect_asked(&core, at, &connect(0, 0)).await;
        let (_admin, mut io) = associate_by(&core, at, &config(HOST_SECRET, false)).await;
        first.is_closed().await;
        assert!(reads(&mut io).await);
    });
}

/// A queue taken by an unauthenticated host is refused for as long as that may last, not
/// permanently.
#[test]
fn a_used_queue_id_is_retried() {
    on_core(async |core| {
        let (_server, at) = serve_guarded(&core, Limits::default()).await;
        let (admin, _io) = associate_by(&core, at, &config(HOST_SECRET, false)).await;
        let second = connect(2, admin.cntlid);
        let _stranger = Queue::connect_asked(&core, at, &second).await;
        let (_, status) = Queue::try_connect(&core, at, &second).await;
        assert_eq!(status, Status::COMMAND_SEQUENCE);
    });
}

/// There is one command of an authentication at a time.
#[test]
fn messages_come_one_after_the_other() {
    on_core(async |core| {
        let (_server, at) = serve_guarded(&core, Limits::default()).await;
        let mut admin = Queue::connect_asked(&core, at, &connect(0, 0)).await;
        let (mut prover, negotiate) = HostAuthenticator::start(config(HOST_SECRET, false), 7);
        let both = [admin.auth_send(40, &negotiate), admin.auth_send(42, &negotiate)].concat();
        admin.send(&both).await;
        assert_eq!(admin.status(42).await.0, Status::COMMAND_SEQUENCE.do_not_retry());
        assert!(admin.status(40).await.0.is_success());
        let challenge = admin.auth_receive(ROOM).await;
        assert!(matches!(prover.receive(&challenge, fresh), HostStep::Compute(_)));
    });
}

/// NVMe Base 2.0, 6.1 and 6.2: valid fields and lengths of the commands.
#[test]
fn mismatching_commands_are_refused() {
    on_core(async |core| {
        let (_server, at) = serve_guarded(&core, Limits::default()).await;
        let mut admin = Queue::connect_asked(&core, at, &connect(0, 0)).await;
        let mut other = AuthCommand::Receive { bytes: 64 }.encode(50);
        other.cdw10[0] = 0.into();
        admin.command(other).await;
        assert_eq!(admin.status(50).await.0, Status::INVALID_FIELD.do_not_retry());
        let (mut prover, negotiate) = HostAuthenticator::start(config(HOST_SECRET, false), 7);
        let send = admin.auth_send(40, &negotiate);
        admin.send(&send).await;
        assert!(admin.status(40).await.0.is_success());
        // Data that does not fit remains due; excess room is filled with zeroes.
        admin.command(AuthCommand::Receive { bytes: 64 }.encode(51)).await;
        assert_eq!(admin.status(51).await.0, Status::INVALID_FIELD.do_not_retry());
        let challenge = admin.auth_receive(3 * ROOM).await;
        assert!(challenge[600..].iter().all(|byte| *byte == 0));
        assert!(matches!(prover.receive(&challenge, fresh), HostStep::Compute(_)));
    });
}

/// A host without a secret need not authenticate.
#[test]
fn without_authentication_its_commands_do_not_exist() {
    on_core(async |core| {
        let (_server, at, _) = serve(&core, Limits::default()).await;
        let (mut admin, mut io) = associate(&core, at).await;
        assert_eq!(admin.connected & CONNECT_AUTHENTICATE, 0);
        for queue in [&mut admin, &mut io] {
            let send = queue.auth_send(40, &[0; 24]);
            queue.send(&send).await;
            assert!(!queue.status(40).await.0.is_success());
        }
        assert!(reads(&mut io).await);
    });
}

/// RFD 0020, 2: a host admitted by name is disconnected when a secret is set; one that has
/// authenticated stays connected when the secret changes, and uses the new one next time.
#[test]
fn rules_change_under_hosts() {
    on_core(async |core| {
        let (server, at, _) = serve(&core, Limits::default()).await;
        server.set_catalog(admitting(AccessRule::NameOnly));
        let (mut admin, mut io) = associate(&core, at).await;
        server.set_catalog(guarded(HOST_SECRET));
        admin.is_closed().await;
        io.is_closed().await;

        let (old, new) = (config(HOST_SECRET, true), config(OTHER_SECRET, true));
        let (mut admin, mut io) = associate_by(&core, at, &old).await;
        server.set_catalog(guarded(OTHER_SECRET));
        sleep(Duration::from_millis(20)).await;
        assert!(reads(&mut io).await, "it goes on");
        admin.prove(Arc::clone(&new)).await.unwrap();
        assert!(reads(&mut io).await);
        io.prove(Arc::clone(&new)).await.unwrap();
        assert!(reads(&mut io).await);
        let failed = Err(AuthFailure::RefusedByPeer(FailureExplanation::AuthenticationFailed));
        assert_eq!(io.prove(old).await, failed, "the old one is worth nothing");
        io.is_closed().await;
        // Authentication is no longer required; new hosts need none.
        server.set_catalog(admitting(AccessRule::NameOnly));
        sleep(Duration::from_millis(20)).await;
        admin.prove(new).await.unwrap();
        let mut io = Queue::connect(&core, at, &connect(1, admin.cntlid)).await;
        assert!(reads(&mut io).await);
        // An admin queue that has proved something does not speak for a queue that has not.
        server.set_catalog(guarded(HOST_SECRET));
        io.is_closed().await;
        admin.command(Property::encode(3, 0x1c, false, None)).await;
        assert!(admin.status(3).await.0.is_success());
    });
}

/// Between a proof that fails and its end nothing is done, and nothing is refused for good.
#[test]
fn a_proof_that_fails_stops_the_queue() {
    on_core(async |core| {
        let (_server, at) = serve_guarded(&core, Limits::default()).await;
        let (_admin, mut io) = associate_by(&core, at, &config(HOST_SECRET, false)).await;
        let (mut prover, negotiate) = HostAuthenticator::start(config(OTHER_SECRET, false), 8);
        let send = io.auth_send(40, &negotiate);
        io.send(&send).await;
        assert!(io.status(40).await.0.is_success());
        let challenge = io.auth_receive(ROOM).await;
        let HostStep::Compute(work) = prover.receive(&challenge, fresh) else { panic!("no work") };
        let Some(HostStep::Send(reply)) = prover.on_computed(work.run()) else {
            panic!("no reply")
        };
        assert!(reads(&mut io).await, "it has not failed yet");
        let send = io.auth_send(40, &reply);
        io.send(&send).await;
        assert!(io.status(40).await.0.is_success());
        io.is_refused(rw(NvmOpcode::Read, 9, 1)).await;
        let failure = io.auth_receive(ROOM).await;
        assert_eq!(failure[..2], [0, 0xf1], "AUTH_Failure1");
        io.is_closed().await;
    });
}

/// While a secret cannot be read no host is admitted, and none is refused permanently.
#[test]
fn an_unreadable_secret_asks_hosts_to_retry() {
    on_core(async |core| {
        let (server, at, _) = serve(&core, Limits::default()).await;
        server.set_catalog(admitting(AccessRule::Proof(HostSecrets::Unknown)));
        let (_, status) = Queue::try_connect(&core, at, &connect(0, 0)).await;
        assert_eq!(status, Status::CONNECT_BUSY);
        // A connected host stays, and authenticates with the secret known before.
        server.set_catalog(guarded(HOST_SECRET));
        let (mut admin, mut io) = associate_by(&core, at, &config(HOST_SECRET, false)).await;
        server.set_catalog(admitting(AccessRule::Proof(HostSecrets::Unknown)));
        sleep(Duration::from_millis(20)).await;
        assert!(reads(&mut io).await);
        admin.prove(config(HOST_SECRET, false)).await.unwrap();
    });
}

/// The result of a computation for a closed connection is discarded.
#[test]
fn hosts_that_disconnect_during_authentication_leave_no_state() {
    on_core(async |core| {
        let (_server, at) = serve_guarded(&core, Limits::default()).await;
        let (_, negotiate) = HostAuthenticator::start(config(HOST_SECRET, false), 7);
        for pause_ms in [0, 0, 1, 2] {
            for _ in 0..8 {
                let mut admin = Queue::connect_asked(&core, at, &connect(0, 0)).await;
                let send = admin.auth_send(40, &negotiate);
                admin.send(&send).await;
                sleep(Duration::from_millis(pause_ms)).await;
            }
        }
        let (_admin, mut io) = associate_by(&core, at, &config(HOST_SECRET, true)).await;
        assert!(reads(&mut io).await);
    });
}
