//! Hosts that come by TLS (RFD 0022; NVMe/TCP Transport 1.0c, 3.6), on sockets.

use std::io::{self, Read, Write};
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::task::{Context, Poll, ready};

use crate::common::on_cores;
use nvme::tls::{Psk, TlsKey};
use rt::net::Stream;
use target::auth_throttle::AuthMethod;
use target::{HostKey, HostTls};
use tls::{CipherSuite, Session, TlsError};
use tokio::io::ReadBuf;

use super::authentication::{HOST_SECRET, config, guarded};
use super::*;

const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const OTHER_KEY: &str = "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:";
const LONG_KEY: &str =
    "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

/// `decrypt_error`.
const REFUSED: TlsError = TlsError::Alert(51);

/// TLS on a socket, as a host has it.
struct Secure {
    stream: Stream,
    session: Session,
}

impl Secure {
    async fn dial(core: &Core, to: SocketAddr, psk: &Psk) -> Result<Self, TlsError> {
        let suite = match psk.suite() {
            nvme::tls::CipherSuite::Aes128Sha256 => CipherSuite::Aes128Sha256,
            nvme::tls::CipherSuite::Aes256Sha384 => CipherSuite::Aes256Sha384,
        };
        Self::dial_as(core, to, psk, suite).await
    }

    /// By a key that is taken for one of this suite.
    async fn dial_as(
        core: &Core,
        to: SocketAddr,
        psk: &Psk,
        suite: CipherSuite,
    ) -> Result<Self, TlsError> {
        let psk = tls::Psk::new(psk.identity().as_bytes(), psk.key(), suite);
        let stream = core.dial(to).await.unwrap();
        let mut secure = Self { stream, session: Session::client(&psk)? };
        loop {
            let is_done = secure.session.handshake()?;
            secure.send().await;
            if is_done {
                return Ok(secure);
            }
            let mut bytes = vec![0; secure.session.input_capacity()];
            let read = timeout(PATIENCE, secure.stream.read(&mut bytes)).await.expect("in time");
            match read {
                Ok(n) if n > 0 => secure.session.receive(&bytes[..n]),
                _ => secure.session.receive_end(),
            }
        }
    }

    /// Sends pending data.
    async fn send(&mut self) {
        let n = self.session.output().len();
        self.stream.write_all(self.session.output()).await.unwrap();
        self.session.consume_output(n);
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.session.output().is_empty() {
            let n = ready!(Pin::new(&mut self.stream).poll_write(cx, self.session.output()))?;
            self.session.consume_output(n);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Secure {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            match this.session.read(buf.initialize_unfilled()) {
                Ok(Some(n)) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Ok(None) => {}
                Err(TlsError::Closed) => return Poll::Ready(Ok(())),
                Err(why) => panic!("what the server sends: {why}"),
            }
            let mut bytes = vec![0; this.session.input_capacity()];
            let mut ciphertext = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut ciphertext))?;
            match ciphertext.filled() {
                [] => this.session.receive_end(),
                bytes => this.session.receive(bytes),
            }
        }
    }
}

impl AsyncWrite for Secure {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_send(cx))?;
        let n = this.session.write([buf]).map_err(io::Error::other)?;
        let _ = this.poll_send(cx)?;
        Poll::Ready(Ok(n))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_send(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(cx))?;
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}

fn key(text: &str) -> TlsKey {
    TlsKey::parse(text).unwrap()
}

/// The host's key in the format of the specification.
fn psk(text: &str) -> Psk {
    key(text).psks(&connect(0, 0).hostnqn, SUBNQN).next().unwrap()
}

/// Namespace 1 is volume A, for any host; this host has this rule.
fn subsystem(tls: Option<HostTls>) -> Subsystem {
    let tls = tls.map(|tls| (connect(0, 0).hostnqn, tls)).into_iter().collect();
    let (namespaces, access) = ([(1, A)].into(), AccessList::open());
    Subsystem { namespaces, serial: "1".into(), access, tls, ..Subsystem::default() }
}

fn rule(text: &str, required: bool) -> Option<HostTls> {
    Some(HostTls { key: HostKey::Known(key(text)), required })
}

async fn serve_by(core: &Core, limits: Limits, tls: Option<HostTls>) -> (Rc<Server>, SocketAddr) {
    let (server, at, _) = serve(core, limits).await;
    server.set_catalog(of(subsystem(tls)));
    (server, at)
}

/// A queue by this key, and how its Connect ends.
async fn try_connect(core: &Core, to: SocketAddr, psk: &Psk, connect: &Connect) -> (Queue, Status) {
    let mut queue = Queue::on(Secure::dial(core, to, psk).await.expect("a handshake"));
    let status = queue.connects(connect).await;
    (queue, status)
}

/// An association by this key.
async fn associate_by(core: &Core, to: SocketAddr, psk: &Psk) -> (Queue, Queue) {
    let (mut admin, status) = try_connect(core, to, psk, &connect(0, 0)).await;
    assert!(status.is_success(), "{status:?}");
    admin.command(Property::encode(1, 0x14, false, Some(0x0046_0001))).await;
    assert!(admin.status(1).await.0.is_success());
    let (io, status) = try_connect(core, to, psk, &connect(1, admin.cntlid)).await;
    assert!(status.is_success(), "{status:?}");
    (admin, io)
}

async fn is_refused(core: &Core, to: SocketAddr, psk: &Psk) {
    assert_eq!(Secure::dial(core, to, psk).await.map(|_| ()), Err(REFUSED));
}

async fn is_gone(queue: &mut Queue) {
    let end = timeout(PATIENCE, queue.receive()).await.expect("an end in time");
    assert!(end.is_none(), "{end:?}");
}

/// NVMe/TCP 3.6.1.3: keys of both hashes, and the keys that hosts derive.
#[test]
fn hosts_come_by_tls_however_they_derive_their_key() {
    on_core(async |core| {
        for text in [KEY, LONG_KEY] {
            let (server, at) = serve_by(&core, Limits::default(), rule(text, true)).await;
            for psk in key(text).psks(&connect(0, 0).hostnqn, SUBNQN) {
                let (_admin, mut io) = associate_by(&core, at, &psk).await;
                assert_eq!(io.read().await, Status::SUCCESS, "{psk:?}");
                let sessions = server.sessions();
                assert!(sessions.iter().filter(|s| s.initiator.is_some()).all(|s| s.tls));
            }
        }
        let (server, at) = serve_by(&core, Limits::default(), None).await;
        let (_admin, _io) = associate(&core, at).await;
        assert!(server.sessions().iter().all(|s| !s.tls));
    });
}

/// As much as one command moves, both ways.
#[test]
fn data_goes_through_tls_both_ways() {
    const BLOCKS: u32 = 2048;
    on_core(async |core| {
        let (server, at) = serve_by(&core, Limits::default(), rule(LONG_KEY, true)).await;
        let (_admin, mut io) = associate_by(&core, at, &psk(LONG_KEY)).await;
        let data: Vec<u8> = (0..BLOCKS * 512).map(|i| (i % 249) as u8).collect();
        for round in 1..=3 {
            io.command(rw(NvmOpcode::Write, 5, BLOCKS)).await;
            let mut end = None;
            while end.is_none() {
                match io.next().await {
                    r2t @ Reply::R2t { .. } => io.send(&io.host.answer(&r2t, &data, 1 << 16)).await,
                    Reply::Resp { status, .. } => end = Some(status),
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(end, Some(Status::SUCCESS), "round {round}");
            let read = io.fetch(rw(NvmOpcode::Read, 6, BLOCKS), BLOCKS * 512).await;
            assert!(read == data, "round {round}");
        }
        let a = Rc::clone(&server.volume(A).unwrap().volume);
        assert_eq!(first_byte(&core, &a).await, data[0]);
    });
}

/// RFD 0022, 3: a refused host learns only that it is refused.
#[test]
fn a_host_without_the_key_is_refused() {
    on_core(async |core| {
        let (server, at) = serve_by(&core, Limits::default(), rule(KEY, false)).await;
        is_refused(&core, at, &psk(OTHER_KEY)).await;
        is_refused(&core, at, &psk(LONG_KEY)).await;
        // A key is bound to its host and subsystem: no other host or subsystem has it.
        let hostnqn = connect(0, 0).hostnqn;
        for (host, subsystem) in [("nqn.other", SUBNQN), (&*hostnqn, "nqn.other")] {
            for psk in key(KEY).psks(host, subsystem) {
                is_refused(&core, at, &psk).await;
            }
        }
        // Nothing is set, or it cannot be read for now.
        for tls in [None, Some(HostTls { key: HostKey::Unknown, required: false })] {
            server.set_catalog(of(subsystem(tls)));
            is_refused(&core, at, &psk(KEY)).await;
            let (_admin, mut io) = associate(&core, at).await;
            assert_eq!(io.read().await, Status::SUCCESS);
        }
        server.set_catalog(of(subsystem(rule(KEY, false))));
        let (_admin, mut io) = associate_by(&core, at, &psk(KEY)).await;
        assert_eq!(io.read().await, Status::SUCCESS);
    });
}

/// RFC 8446, 4.2.11: a key of one hash is none of another, for which GnuTLS before 3.8.11 takes
/// those of SHA-384.
#[test]
fn a_key_is_not_used_with_another_hash_than_its_own() {
    on_core(async |core| {
        for (text, other) in
            [(LONG_KEY, CipherSuite::Aes128Sha256), (KEY, CipherSuite::Aes256Sha384)]
        {
            let (_server, at) = serve_by(&core, Limits::default(), rule(text, true)).await;
            for psk in key(text).psks(&connect(0, 0).hostnqn, SUBNQN) {
                let dialled = Secure::dial_as(&core, at, &psk, other).await;
                assert_eq!(dialled.map(drop), Err(REFUSED), "{psk:?}");
            }
        }
    });
}

/// RFD 0020, 6.
#[test]
fn keys_of_tls_cannot_be_guessed_quickly_and_the_right_one_gets_in() {
    on_core(async |core| {
        let (server, at) = serve_by(&core, Limits::default(), rule(KEY, true)).await;
        let began = Instant::now();
        for _ in 0..12 {
            is_refused(&core, at, &psk(OTHER_KEY)).await;
        }
        // The last four wait for 3.75 s.
        assert!(began.elapsed() > Duration::from_millis(3700), "{:?}", began.elapsed());
        let clients = server.clients();
        assert_eq!(clients.attempt_counts.failures[AuthMethod::Tls as usize], 12);
        let [failing] = &clients.failing_clients[..] else { panic!("{clients:?}") };
        assert_eq!((failing.method, failing.target.as_str()), (AuthMethod::Tls, SUBNQN));
        assert!(failing.name.contains(&connect(0, 0).hostnqn), "{failing:?}");
        let began = Instant::now();
        let (_admin, _io) = associate_by(&core, at, &psk(KEY)).await;
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        assert!(server.clients().failing_clients.is_empty());
    });
}

/// RFD 0022, 3: TLS is required of the one host, and of no other.
#[test]
fn required_tls_is_enforced() {
    on_core(async |core| {
        let refused = Status::CONNECT_INVALID_HOST.do_not_retry();
        let unknown = Some(HostTls { key: HostKey::Unknown, required: true });
        for tls in [rule(KEY, true), unknown] {
            let (_server, at) = serve_by(&core, Limits::default(), tls).await;
            assert_eq!(Queue::try_connect(&core, at, &connect(0, 0)).await.1, refused);
            let other = Connect { hostnqn: "nqn.other".into(), ..connect(0, 0) };
            assert_eq!(Queue::try_connect(&core, at, &other).await.1, Status::SUCCESS);
            let _discovering = Queue::connect(&core, at, &discovery()).await;
        }
        let (_server, at) = serve_by(&core, Limits::default(), rule(KEY, false)).await;
        let (_admin, _io) = associate(&core, at).await;
        let (_admin, _io) = associate_by(&core, at, &psk(KEY)).await;
    });
}

/// RFD 0022, 3: the key is of one host and one subsystem, and of their queues alike.
#[test]
fn a_connect_names_whose_key_it_is() {
    on_core(async |core| {
        let (_server, at) = serve_by(&core, Limits::default(), rule(KEY, false)).await;
        for connect in [
            Connect { hostnqn: "nqn.other".into(), ..connect(0, 0) },
            Connect { subnqn: "nqn.other".into(), ..connect(0, 0) },
            discovery(),
        ] {
            let (_, status) = try_connect(&core, at, &psk(KEY), &connect).await;
            assert_eq!(status, Status::CONNECT_INVALID_HOST.do_not_retry());
        }
        let (admin, _io) = associate_by(&core, at, &psk(KEY)).await;
        let (_, status) = Queue::try_connect(&core, at, &connect(2, admin.cntlid)).await;
        assert_eq!(status.code(), Status::CONNECT_INVALID_PARAMETERS);
        let (admin, _io) = associate(&core, at).await;
        let (_, status) = try_connect(&core, at, &psk(KEY), &connect(2, admin.cntlid)).await;
        assert_eq!(status.code(), Status::CONNECT_INVALID_PARAMETERS);
    });
}

/// RFD 0020 within RFD 0022.
#[test]
fn a_host_proves_its_secret_within_tls() {
    on_core(async |core| {
        let (server, at, _) = serve(&core, Limits::default()).await;
        let access = guarded(HOST_SECRET).subsystems[SUBNQN].access.clone();
        server.set_catalog(of(Subsystem { access, ..subsystem(rule(KEY, true)) }));
        let (mut admin, status) = try_connect(&core, at, &psk(KEY), &connect(0, 0)).await;
        assert!(status.is_success());
        assert_eq!(admin.read().await, Status::AUTHENTICATION_REQUIRED);
        admin.prove(config(HOST_SECRET, true)).await.unwrap();
        admin.command(Property::encode(1, 0x14, false, Some(0x0046_0001))).await;
        assert!(admin.status(1).await.0.is_success());
    });
}

/// RFD 0022, 3: a host for which TLS becomes mandatory is disconnected; a new key is for the next
/// handshake.
#[test]
fn rules_change_under_hosts_of_tls() {
    on_core(async |core| {
        let (server, at) = serve_by(&core, Limits::default(), rule(KEY, false)).await;
        let (mut plain, mut plain_io) = associate(&core, at).await;
        let (_admin, mut io) = associate_by(&core, at, &psk(KEY)).await;
        server.set_catalog(of(subsystem(rule(KEY, true))));
        is_gone(&mut plain).await;
        is_gone(&mut plain_io).await;
        for tls in [rule(OTHER_KEY, true), None] {
            server.set_catalog(of(subsystem(tls)));
            sleep(Duration::from_millis(20)).await;
            assert_eq!(io.read().await, Status::SUCCESS, "it goes on");
            is_refused(&core, at, &psk(KEY)).await;
        }
    });
}

/// Discovery tells each host whether to use TLS.
#[test]
fn discovery_tells_of_tls() {
    on_core(async |core| {
        let (server, at) = serve_by(&core, Limits::default(), None).await;
        let cases = [(None, (4, 0)), (rule(KEY, false), (4, 2)), (rule(KEY, true), (4 | 1, 2))];
        for (tls, expected) in cases {
            server.set_catalog(of(subsystem(tls)));
            let mut queue = Queue::connect(&core, at, &discovery()).await;
            queue.command(Property::encode(1, 0x14, false, Some(0x0046_0001))).await;
            assert!(queue.status(1).await.0.is_success());
            let mut log = Sqe::new(AdminOpcode::GetLogPage.0, 9, 0);
            log.cdw10[0] = (0x70 | 511 << 16).into();
            let log = queue.fetch(log, 2048).await;
            assert_eq!((log[1024 + 3], log[1024 + 768]), expected, "TREQ, SECTYPE");
        }
    });
}

/// RFD 0022, 5, attacks 4 and 5: any altered data ends the connection, without other effects.
#[test]
fn tampered_records_are_rejected() {
    on_core(async |core| {
        let (server, at) = serve_by(&core, Limits::default(), rule(KEY, true)).await;
        let a = Rc::clone(&server.volume(A).unwrap().volume);
        let (admin, _io) = associate_by(&core, at, &psk(KEY)).await;
        for (change, qid) in [(0, 2), (4, 3), (5, 4), (100, 5), (600, 6)] {
            let mut secure = Secure::dial(&core, at, &psk(KEY)).await.unwrap();
            let host = ScriptedHost::default();
            let (sqe, data) = connect(qid, admin.cntlid).encode(0);
            for pdu in [host.ic_req(), host.capsule(sqe, data.as_bytes())] {
                secure.write_all(&pdu).await.unwrap();
            }
            // The answers to both, in whatever pieces: 128 and 24 bytes.
            secure.read_exact(&mut [0; 128 + 24]).await.unwrap();
            let write = host.capsule(rw(NvmOpcode::Write, 5, 1), &[0x77; 512]);
            secure.session.write([&write[..]]).unwrap();
            let mut record = secure.session.output().to_vec();
            record[change] ^= 1;
            secure.stream.write_all(&record).await.unwrap();
            let _ = secure.stream.shutdown().await;
            let mut rest = Vec::new();
            let end = timeout(PATIENCE, secure.stream.read_to_end(&mut rest)).await;
            assert!(end.is_ok(), "it is let go");
        }
        // Plain PDUs after a handshake, and a handshake after PDUs.
        let mut secure = Secure::dial(&core, at, &psk(KEY)).await.unwrap();
        secure.stream.write_all(&ScriptedHost::default().ic_req()).await.unwrap();
        assert_eq!(timeout(PATIENCE, secure.stream.read(&mut [0; 1])).await.unwrap().ok(), Some(0));
        let mut queue = Queue::dial(&core, at).await;
        queue.send(&queue.host.ic_req()).await;
        assert!(matches!(queue.next().await, Reply::IcResp { .. }));
        queue.send(&[22, 3, 1, 0, 200, 1, 0, 0, 196]).await;
        assert!(matches!(queue.next().await, Reply::Term { .. }));
        assert_eq!(first_byte(&core, &a).await, 0);
    });
}

/// RFD 0022, 4: a handshake is a part of the login, and has its time.
#[test]
fn a_slow_handshake_is_disconnected() {
    on_core(async |core| {
        let login_timeout = Duration::from_millis(400);
        let limits = Limits { login_timeout, ..Limits::default() };
        let (server, at) = serve_by(&core, limits, rule(KEY, true)).await;
        let mut hello =
            Session::client(&tls::Psk::new(b"x", &[7; 32], CipherSuite::Aes128Sha256)).unwrap();
        assert_eq!(hello.handshake(), Ok(false));
        let began = Instant::now();
        let mut slow = Vec::new();
        for n in [1, 5, 100] {
            let mut stream = core.dial(at).await.unwrap();
            stream.write_all(&hello.output()[..n]).await.unwrap();
            slow.push(Queue::on(stream));
        }
        // One goes on, byte by byte; one has shaken hands and says nothing.
        slow.push(Queue::on(Secure::dial(&core, at, &psk(KEY)).await.unwrap()));
        let mut drips = core.dial(at).await.unwrap();
        for byte in hello.output() {
            if drips.write_all(&[*byte]).await.is_err() {
                break;
            }
            sleep(Duration::from_millis(20)).await;
        }
        for queue in &mut slow {
            is_gone(queue).await;
        }
        assert!(began.elapsed() >= login_timeout);
        sleep(2 * login_timeout).await;
        sleep(Duration::from_secs(1)).await;
        assert_eq!(server.sessions().len(), 0);
    });
}

/// Connections without a completed handshake make room for new ones.
#[test]
fn pending_handshakes_block_no_host() {
    on_core(async |core| {
        let limits = Limits { logins: 4, ..Limits::default() };
        let (server, at) = serve_by(&core, limits, rule(KEY, true)).await;
        let mut silent = Vec::new();
        for _ in 0..50 {
            let mut stream = core.dial(at).await.unwrap();
            stream.write_all(&[22, 3, 1]).await.unwrap();
            silent.push(stream);
        }
        let (_admin, mut io) = associate_by(&core, at, &psk(KEY)).await;
        assert_eq!(io.read().await, Status::SUCCESS);
        assert!(server.sessions().len() <= 6, "{}", server.sessions().len());
    });
}

/// A host that does not read is disconnected, however much TLS would buffer.
#[test]
fn a_tls_host_that_does_not_read_is_disconnected() {
    on_core(async |core| {
        let limits = Limits { send_timeout: Duration::from_secs(1), ..Limits::default() };
        let (server, at) = serve_by(&core, limits, rule(KEY, true)).await;
        let (mut admin, mut io) = associate_by(&core, at, &psk(KEY)).await;
        let began = Instant::now();
        for cid in 0..30 {
            io.command(rw(NvmOpcode::Read, cid, 2048)).await;
        }
        while server.sessions().len() > 1 {
            assert!(began.elapsed() < PATIENCE, "it is let go");
            sleep(Duration::from_millis(20)).await;
            admin.command(Sqe::new(AdminOpcode::KeepAlive.0, 3, 0)).await;
            assert!(admin.status(3).await.0.is_success());
        }
        assert!(began.elapsed() >= Duration::from_secs(1));
    });
}

/// The catalog's core of the subsystem is another one: each queue goes there with Connect, and its
/// TLS with it.
#[test]
fn tls_goes_with_its_connection_to_another_core() {
    on_cores(2, async |core| {
        let mut doors = core_links(2);
        let (there, here) = (doors.remove(1), doors.remove(0));
        let subsystem = || Subsystem { core: 1, ..subsystem(rule(KEY, true)) };
        let home = core.peers()[1].clone();
        home.post(move |core| async move {
            let server = Server::new(core.clone(), Limits::default(), there);
            add(&server, A, disk());
            server.set_catalog(of(subsystem()));
            std::future::pending::<()>().await;
        })
        .await
        .unwrap();
        let server = Server::new(core.clone(), Limits::default(), here);
        server.set_catalog(of(subsystem()));
        let at = listen(&core, &server, Service::Nvme).await;
        for _ in 0..5 {
            let (mut admin, mut io) = associate_by(&core, at, &psk(KEY)).await;
            assert_eq!(server.sessions().len(), 0, "they live elsewhere");
            for _ in 0..20 {
                assert_eq!(io.read().await, Status::SUCCESS);
                admin.command(Sqe::new(AdminOpcode::KeepAlive.0, 3, 0)).await;
                assert!(admin.status(3).await.0.is_success());
            }
            let data = vec![0x3c; 256 * 512];
            io.command(rw(NvmOpcode::Write, 5, 256)).await;
            let r2t = io.next().await;
            io.send(&io.host.answer(&r2t, &data, 1 << 16)).await;
            assert!(io.status(5).await.0.is_success());
            assert!(io.fetch(rw(NvmOpcode::Read, 6, 256), 256 * 512).await == data);
        }
        // A host whose Connect is refused there gets the answer here.
        let other = Connect { hostnqn: "nqn.other".into(), ..connect(0, 0) };
        let (_, status) = try_connect(&core, at, &psk(KEY), &other).await;
        assert_eq!(status, Status::CONNECT_INVALID_HOST.do_not_retry());
    });
}

fn hex(psk: &Psk) -> String {
    psk.key().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn openssl(to: SocketAddr, psk: &Psk, groups: &str) -> Command {
    let mut client = Command::new("openssl");
    client
        .args(["s_client", "-quiet", "-tls1_3", "-connect", &to.to_string()])
        .args(["-psk", &hex(psk), "-psk_identity", psk.identity()])
        .args(["-ciphersuites", "TLS_AES_128_GCM_SHA256", "-groups", groups]);
    client
}

/// GnuTLS, with the options that `tlshd` uses for Linux hosts.
fn gnutls(to: SocketAddr, psk: &Psk, groups: &str) -> Command {
    let priority = format!(
        "SECURE256:+SECURE128:-COMP-ALL:-GROUP-ALL:{groups}:-VERS-ALL:+VERS-TLS1.3:%NO_TICKETS:+PSK:+DHE-PSK:+ECDHE-PSK"
    );
    let mut client = Command::new("gnutls-cli");
    client
        .args(["--logfile=/dev/null", "--priority", &priority, "--port", &to.port().to_string()])
        .args(["--pskkey", &hex(psk), "--pskusername", psk.identity(), &to.ip().to_string()]);
    client
}

/// The first `n` bytes that a client receives for these bytes; the error of its handshake if that
/// failed.
fn talk(mut client: Command, bytes: &[u8], n: usize) -> Result<Vec<u8>, String> {
    client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = client.spawn().unwrap();
    // It may be gone already.
    let _ = client.stdin.as_mut().unwrap().write_all(bytes);
    let mut answer = vec![0; n];
    let came = client.stdout.as_mut().unwrap().read_exact(&mut answer);
    client.kill().unwrap();
    let output = client.wait_with_output().unwrap();
    came.map(|()| answer).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A host by another implementation of TLS, with any of these groups: a queue is connected by any
/// of its keys, and by no other.
fn shakes_hands(client: fn(SocketAddr, &Psk, &str) -> Command, groups: &'static [&str]) {
    on_core(async move |core| {
        let (_server, at) = serve_by(&core, Limits::default(), rule(KEY, true)).await;
        let host = ScriptedHost::default();
        let (sqe, data) = connect(0, 0).encode(0);
        let bytes = [host.ic_req(), host.capsule(sqe, data.as_bytes())].concat();
        for psk in key(KEY).psks(&connect(0, 0).hostnqn, SUBNQN) {
            for groups in groups {
                let (bytes, client) = (bytes.clone(), client(at, &psk, groups));
                let talk = core.run_blocking(move || talk(client, &bytes, 128 + 24));
                let mut answer = talk.await.unwrap().expect("a handshake");
                let replies = ScriptedHost::default().parse(&mut answer);
                assert!(matches!(replies[0], Reply::IcResp { .. }), "{replies:?}");
                let Reply::Resp { status, .. } = replies[1] else { panic!("{replies:?}") };
                assert!(status.is_success(), "{status:?}");
            }
        }
        let client = client(at, &psk(OTHER_KEY), groups[0]);
        let why = core.run_blocking(move || talk(client, &bytes, 1)).await.unwrap().unwrap_err();
        assert!(why.to_lowercase().contains("alert"), "{why}");
    });
}

/// Another implementation of TLS finds the same in the same keys. The last groups begin with one
/// that is not known here: the client is asked to begin again (RFC 8446, 4.1.4).
#[test]
fn openssl_shakes_hands() {
    if testkit::installed(&["openssl"]) {
        shakes_hands(openssl, &["X25519", "P-256", "P-521:P-384"]);
    }
}

/// The TLS library of Linux hosts.
#[test]
fn gnutls_shakes_hands() {
    if testkit::installed(&["gnutls-cli"]) {
        shakes_hands(
            gnutls,
            &["+GROUP-X25519", "+GROUP-SECP256R1", "+GROUP-SECP521R1:+GROUP-SECP384R1"],
        );
    }
}

/// Clients with certificates or an older version are told what is missing.
#[test]
fn clients_without_a_key_get_an_alert() {
    if !testkit::installed(&["openssl"]) {
        return;
    }
    on_core(async |core| {
        let (_server, at) = serve_by(&core, Limits::default(), rule(KEY, true)).await;
        for (options, why) in [
            (&["-tls1_3"][..], "alert missing extension"),
            (&["-tls1_2"], "alert protocol version"),
        ] {
            let mut client = Command::new("openssl");
            client.args(["s_client", "-quiet", "-connect", &at.to_string()]).args(options);
            let tls_error =
                core.run_blocking(move || talk(client, &[], 1)).await.unwrap().unwrap_err();
            assert!(tls_error.contains(why), "{tls_error}");
        }
    });
}
