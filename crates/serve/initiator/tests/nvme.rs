//! Hosts of our own server on real cores: what works, and what is cut off in the middle of it.

use crate::common;
mod conformance;
mod lost;
mod paths;
mod proof;
mod protected;
mod queue;

use std::rc::Rc;

use crate::common::{HOSTNQN, PATIENCE, SUBNQN, Site, on_core, options};
use block::testing::TestClient;
use block::testing::faulty::{Effect, OpKind, Rule};
use block::{BufferPool, Dev, Error, Lba};
use initiator::nvme::{
    CompareError, ConnectError, Controller, Namespace, OpenError, Options, Staging, discover,
};
use nvme::DiscoveryKind;
use tokio::time::timeout;

/// A namespace and a caller of it, with memory of its own.
async fn open(controller: &Controller) -> (Rc<Namespace>, TestClient) {
    let namespace = Namespace::open(controller, 1).await.unwrap();
    let dev = Dev::shared(Rc::clone(&namespace));
    (namespace, TestClient::new(&dev, &BufferPool::new(16 << 20).unwrap()))
}

async fn bufs(client: &TestClient, bytes: &[u8]) -> block::Bufs {
    let ctx = client.ctx(bytes.len()).await;
    rt::buf::copy_in(ctx.credit(), bytes)
}

/// NVM Command Set 1.0, 3.2: all that the seam has, and what a host has beside it.
#[test]
fn commands_do_what_they_say() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let controller = site.connect().await;
        assert_eq!(controller.namespaces().await.unwrap(), [1]);
        let abilities = controller.capabilities().unwrap();
        assert_eq!(
            (abilities.in_capsule_bytes, abilities.max_transfer_bytes),
            (128 << 10, 1 << 20)
        );
        let (namespace, client) = open(&controller).await;
        let info = client.dev().info();
        assert_eq!((info.block_size, info.blocks, info.volatile_cache), (512, 1 << 14, true));
        assert_eq!(namespace.described().identity.nguid, [0xa; 16]);
        client.write(8, &[0x11; 8192], true).await.unwrap();
        client.write(100, &[0x22; 512 * 300], false).await.unwrap();
        let read = client.read(8, 392).await.unwrap().to_vec();
        assert!(read[..8192].iter().all(|b| *b == 0x11), "in the capsule");
        assert!(read[92 * 512..].iter().all(|b| *b == 0x22), "by R2T");
        client.flush().await.unwrap();

        let ctx = client.ctx(1 << 20).await;
        namespace.verify(Lba(0), 1 << 14, &ctx).await.unwrap();
        let [old, new] = [bufs(&client, &[0x11; 512]).await, bufs(&client, &[0x33; 512]).await];
        namespace.compare(Lba(8), &old, &ctx).await.unwrap();
        assert_eq!(namespace.compare(Lba(8), &new, &ctx).await, Err(CompareError::Miscompare));
        namespace.compare_and_write(Lba(8), (&old, &new), true, &ctx).await.unwrap();
        assert_eq!(client.read(8, 1).await.unwrap().to_vec(), [0x33; 512]);
        let again = namespace.compare_and_write(Lba(8), (&old, &new), false, &ctx).await;
        assert_eq!(again, Err(CompareError::Miscompare));
        let long = bufs(&client, &[0; 16384]).await;
        let long = namespace.compare_and_write(Lba(8), (&long, &long), false, &ctx).await;
        assert_eq!(long, Err(CompareError::Unsupported), "more than the controller takes");
        controller.shut_down().await.unwrap();
        assert_eq!(client.read(8, 1).await.map(drop), Err(Error::Gone));
    });
}

/// What the volume reports arrives as what it was.
#[test]
fn failures_arrive() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let controller = site.connect().await;
        let (_, client) = open(&controller).await;
        for (kind, error) in [
            (OpKind::Read, Error::Unreadable { at: Lba(3) }),
            (OpKind::Write, Error::Unwritable { at: Lba(3) }),
            (OpKind::Write, Error::NoSpace),
        ] {
            site.faults.add(Rule::new(Effect::Fail(error)).on(&[kind]).times(1));
            let result = match kind {
                OpKind::Read => client.read(3, 8).await.map(drop),
                _ => client.write(3, &[1; 4096], false).await,
            };
            assert_eq!(result, Err(error));
            client.write(3, &[1; 4096], false).await.unwrap();
        }
    });
}

/// NVMe Base 2.0, 5.16.1.23.
#[test]
fn discovery_lists_the_targets() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let asked = Options { subnqn: String::new(), ..options(site.at) };
        let found = discover(&core, asked, Staging::default()).await.unwrap();
        let [entry] = &found[..] else { panic!("{found:?}") };
        assert_eq!((entry.kind, entry.nqn.as_str()), (DiscoveryKind::Nvm, SUBNQN));
        assert_eq!(entry.address, site.at);
    });
}

/// What does not help is not tried again: the first answer says so.
#[test]
fn refusals_are_reported() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let wrong = Options { subnqn: format!("{SUBNQN}-other"), ..options(site.at) };
        let refused = Controller::connect(&core, wrong, Staging::default()).await.unwrap_err();
        assert!(matches!(refused, ConnectError::Refused(_)) && refused.is_final(), "{refused}");
        let controller = site.connect().await;
        let missing = Namespace::open(&controller, 2).await.map(drop);
        assert_eq!(missing, Err(OpenError::Unusable(2)));
        site.serve_nothing();
        let wait = async {
            while controller.final_error().is_none() {
                let _ = controller.changed(controller.generation()).await;
            }
        };
        timeout(PATIENCE, wait).await.expect("it is given up");
        assert!(matches!(controller.final_error(), Some(ConnectError::Refused(_))));
        assert!(format!("{controller:?}").contains(SUBNQN) && !HOSTNQN.is_empty());
    });
}

/// A namespace that grows is used up to its new end; NVMe Base 2.0, 5.2: Namespace Attribute
/// Changed.
#[test]
fn a_namespace_grows() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let controller = site.connect().await;
        let (_, client) = open(&controller).await;
        assert_eq!(client.read(1 << 14, 1).await.map(drop), Err(Error::OutOfRange));
        site.mem.grow(1 << 15);
        site.server.volume_resized(common::A);
        let wait = async {
            while client.dev().info().blocks != 1 << 15 {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, wait).await.expect("it is told");
        client.write((1 << 15) - 1, &[9; 512], true).await.unwrap();
    });
}
