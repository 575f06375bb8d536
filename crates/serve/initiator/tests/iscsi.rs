//! Initiators of our own server on real cores: what works, what is cut off in the middle of it, and
//! targets that are not as ours is.

use crate::common;
mod conformance;
mod fake;
mod lost;
mod proof;
mod strange;

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use crate::common::{INITIATOR, PATIENCE, Site, TARGET, Wire, on_core};
use block::testing::TestClient;
use block::testing::faulty::{Effect, OpKind, Rule};
use block::{Blocks, BufferPool, Dev, Error, Lba};
use initiator::iscsi::{
    Backoff, CompareError, ConnectError, Lun, OpenError, Options, Session, SessionEnd, Staging,
    discover,
};
use iscsi::Digests;
use iscsi::pdu::LoginStatus;
use tokio::time::timeout;

fn options(at: SocketAddr) -> Options {
    let backoff = Backoff { initial: Duration::from_millis(2), max: Duration::from_millis(50) };
    Options { backoff, ..Options::new(at, TARGET, INITIATOR) }
}

async fn connect(core: &rt::Core, options: Options) -> Session {
    Session::connect(core, options, Staging::default()).await.unwrap()
}

/// A unit and a caller of it, with memory of its own.
async fn open(session: &Session) -> (Rc<Lun>, TestClient) {
    let lun = Lun::open(session, 1).await.unwrap();
    let dev = Dev::shared(Rc::clone(&lun));
    (lun, TestClient::new(&dev, &BufferPool::new(16 << 20).unwrap()))
}

async fn bufs(client: &TestClient, bytes: &[u8]) -> block::Bufs {
    let ctx = client.ctx(bytes.len()).await;
    rt::buf::copy_in(ctx.credit(), bytes)
}

/// SBC-3: all that the seam has, and what an initiator has beside it; with digests and without.
#[test]
fn commands_do_what_they_say() {
    on_core(async |core| {
        for digests in [false, true] {
            let site = Site::iscsi(&core, 1 << 14).await;
            let digests = Digests { header: digests, data: digests };
            let session = connect(&core, Options { digests, ..options(site.at) }).await;
            assert_eq!(session.luns().await.unwrap(), [1]);
            let (lun, client) = open(&session).await;
            let info = client.dev().info();
            assert_eq!((info.block_size, info.blocks, info.volatile_cache), (512, 1 << 14, false));
            assert!(info.native_fua && info.unmap_zeroes && info.unmap_granularity_blocks > 0);
            assert!(lun.described().identity.is_known());
            client.write(8, &[0x11; 8192], true).await.unwrap();
            client.write(100, &[0x22; 512 * 900], false).await.unwrap();
            let read = client.read(8, 992).await.unwrap().to_vec();
            assert!(read[..8192].iter().all(|b| *b == 0x11), "immediate");
            assert!(read[92 * 512..].iter().all(|b| *b == 0x22), "unsolicited, and by R2T");
            client.flush().await.unwrap();

            let ctx = client.ctx(1 << 20).await;
            lun.verify(Lba(0), 1 << 14, &ctx).await.unwrap();
            let [old, new] = [bufs(&client, &[0x11; 512]).await, bufs(&client, &[0x33; 512]).await];
            lun.compare(Lba(8), &old, &ctx).await.unwrap();
            assert_eq!(lun.compare(Lba(8), &new, &ctx).await, Err(CompareError::Miscompare));
            lun.compare_and_write(Lba(8), (&old, &new), true, &ctx).await.unwrap();
            assert_eq!(client.read(8, 1).await.unwrap().to_vec(), [0x33; 512]);
            let again = lun.compare_and_write(Lba(8), (&old, &new), false, &ctx).await;
            assert_eq!(again, Err(CompareError::Miscompare));
            let long = bufs(&client, &[0; 256 * 512]).await;
            let long = lun.compare_and_write(Lba(8), (&long, &long), false, &ctx).await;
            assert_eq!(long, Err(CompareError::Unsupported), "more than a command can say");
            session.reset(1).await.unwrap();
            client.read(8, 1).await.unwrap();
            session.shut_down().await.unwrap();
            assert_eq!(client.read(8, 1).await.map(drop), Err(Error::Gone));
        }
    });
}

/// What the volume reports arrives as what it was.
#[test]
fn failures_arrive() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let session = connect(&core, options(site.at)).await;
        let (_, client) = open(&session).await;
        for (kind, error) in [
            (OpKind::Read, Error::Unreadable { at: Lba(5) }),
            (OpKind::Read, Error::Corrupt { at: Lba(3) }),
            (OpKind::Write, Error::Unwritable { at: Lba(3) }),
            (OpKind::Write, Error::NoSpace),
            (OpKind::Write, Error::ReadOnly),
        ] {
            let rule = Rule::new(Effect::Fail(error)).on(&[kind]).times(1);
            let rule = match error {
                Error::Unreadable { at } => rule.within(Blocks::new(at, 1)),
                _ => rule,
            };
            site.faults.add(rule);
            let result = match kind {
                OpKind::Read => client.read(3, 8).await.map(drop),
                _ => client.write(3, &[1; 4096], false).await,
            };
            assert_eq!(result, Err(error));
            client.write(3, &[1; 4096], false).await.unwrap();
        }
    });
}

/// RFC 7143 appendix C.
#[test]
fn discovery_lists_the_targets() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let found = discover(&core, options(site.at), Staging::default()).await.unwrap();
        let [target] = &found[..] else { panic!("{found:?}") };
        assert_eq!((target.name.as_str(), target.portals[0].0), (TARGET, site.at));
    });
}

/// What does not help is not tried again: the first answer says so.
#[test]
fn refusals_are_reported() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let target = format!("{TARGET}-other");
        let wrong = Options { target, ..options(site.at) };
        let refused = Session::connect(&core, wrong, Staging::default()).await.unwrap_err();
        // What is not there is refused as what may not be reached is.
        let refusal = LoginStatus::AuthorizationFailure;
        let not_there = SessionEnd::Machine(iscsi::initiator::CloseReason::LoginRefused(refusal));
        assert_eq!(refused, ConnectError::Ended(not_there));
        assert!(refused.is_final());
        let wrong = Options { target: "no name".into(), ..options(site.at) };
        let refused = Session::connect(&core, wrong, Staging::default()).await.unwrap_err();
        assert_eq!(refused, ConnectError::Unusable("not a name"));
        let wire = Wire::new(&core, site.at).await;
        let session = connect(&core, options(wire.at)).await;
        for unit in [2, u16::MAX] {
            let missing = Lun::open(&session, unit).await.map(drop);
            assert_eq!(missing, Err(OpenError::Unusable(unit)));
        }
        site.serve_nothing();
        wire.cut();
        let wait = async {
            while session.final_error().is_none() {
                let _ = session.changed(session.generation()).await;
            }
        };
        timeout(PATIENCE, wait).await.expect("it is given up");
        assert_eq!(session.final_error(), Some(ConnectError::Ended(not_there)));
        assert!(format!("{session:?}").contains(TARGET));
    });
}

/// A unit that grows is used up to its new end: the next command is told of it, and an unused unit
/// is asked.
#[test]
fn a_unit_grows() {
    on_core(async |core| {
        for idle in [false, true] {
            let site = Site::iscsi(&core, 1 << 14).await;
            let look_every = Duration::from_millis(if idle { 20 } else { 0 });
            let session =
                connect(&core, Options { poll_interval: look_every, ..options(site.at) }).await;
            let (_, client) = open(&session).await;
            assert_eq!(client.read(1 << 14, 1).await.map(drop), Err(Error::OutOfRange));
            site.mem.grow(1 << 15);
            site.server.volume_resized(common::A);
            let wait = async {
                while client.dev().info().blocks != 1 << 15 {
                    if !idle {
                        client.read(0, 1).await.unwrap();
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            timeout(PATIENCE, wait).await.expect("it is told");
            client.write((1 << 15) - 1, &[9; 512], true).await.unwrap();
        }
    });
}
