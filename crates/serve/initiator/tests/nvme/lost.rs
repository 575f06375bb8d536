//! Cut connections, unreachable controllers, replaced namespaces.

use std::io::ErrorKind;
use std::time::Duration;

use block::Op;
use common::{A, B, QUICK_CUTS, Wire, cut_while_working};
use initiator::nvme::Queue;
use nvme::Sqe;
use nvme::entry::NvmOpcode;
use nvme::host::{Command, LostCommand, Payload};
use nvme::pdu::IcResp;
use target::AccessList;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};
use zerocopy::IntoBytes;

use super::*;

/// Options through a proxy that can be cut.
async fn wired(core: &rt::Core, site: &Site, patience: Duration) -> (Wire, Controller) {
    let wire = Wire::new(core, site.at).await;
    let options = Options { retry_timeout: patience, io_queues: 2, ..options(wire.at) };
    let controller = Controller::connect(core, options, Staging::default()).await.unwrap();
    (wire, controller)
}

/// Cut connections lose nothing, repeat nothing visibly, and cause no errors.
#[test]
fn cuts_are_not_noticed() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let (wire, controller) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&controller).await;
        cut_while_working(&wire, client, (&QUICK_CUTS, 60), 400).await;
    });
}

/// Commands for a controller that does not return fail after the timeout, and all later ones too.
#[test]
fn the_retry_timeout_ends_waiting() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let (wire, controller) = wired(&core, &site, Duration::from_millis(200)).await;
        let (namespace, client) = open(&controller).await;
        client.write(0, &[1; 512], false).await.unwrap();
        wire.set_open(false);
        wire.cut();
        let began = Instant::now();
        let (read, write) = tokio::join!(client.read(0, 1), client.write(8, &[2; 512], false));
        assert_eq!((read.map(drop), write), (Err(Error::Gone), Err(Error::Gone)));
        assert!(began.elapsed() >= Duration::from_millis(200) && began.elapsed() < PATIENCE);
        assert!(
            namespace.gone().is_some_and(|gone| gone.is_unreachable),
            "nothing is known to be lost"
        );
        wire.set_open(true);
        let up = async {
            while controller.queues().is_empty() {
                let _ = controller.changed(controller.generation()).await;
            }
        };
        timeout(PATIENCE, up).await.expect("it comes back");
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone), "too late");
        let (_, client) = open(&controller).await;
        assert_eq!(
            client.read(0, 1).await.unwrap().to_vec(),
            [1; 512],
            "for a user that opens it anew"
        );
    });
}

/// A briefly unreachable controller is waited for.
#[test]
fn a_controller_that_is_away_is_waited_for() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let (wire, controller) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&controller).await;
        wire.set_open(false);
        wire.cut();
        let write = spawn_local({
            let client = client.clone();
            async move { client.write(8, &[2; 4096], true).await }
        });
        sleep(Duration::from_millis(100)).await;
        assert!(!write.is_finished());
        wire.set_open(true);
        write.await.unwrap().unwrap();
        assert_eq!(client.read(8, 8).await.unwrap().to_vec(), [2; 4096]);
    });
}

/// A different volume under the same name is not written to.
#[test]
fn a_namespace_that_has_become_another_volume_is_gone() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let (wire, controller) = wired(&core, &site, PATIENCE).await;
        let (namespace, client) = open(&controller).await;
        client.write(0, &[1; 512], false).await.unwrap();
        wire.set_open(false);
        wire.cut();
        let write = spawn_local({
            let client = client.clone();
            async move { client.write(8, &[2; 4096], true).await }
        });
        sleep(Duration::from_millis(20)).await;
        let (b, _) = Site::volume(&site.server, B, 1 << 14);
        site.serve(SUBNQN, B, AccessList::open());
        wire.set_open(true);
        assert_eq!(write.await.unwrap(), Err(Error::Gone));
        assert!(
            namespace.gone().is_some_and(|gone| !gone.is_unreachable),
            "it is not to be found again"
        );
        assert_eq!(b.space_used(), 0, "nothing was written to it");
        site.serve(SUBNQN, A, AccessList::open());
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone), "for ever");
    });
}

/// Likewise without a cut: the controller tells of it.
#[test]
fn a_namespace_that_changes_while_connected_is_gone() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let controller = site.connect().await;
        let (_, client) = open(&controller).await;
        let (b, _) = Site::volume(&site.server, B, 1 << 14);
        site.serve(SUBNQN, B, AccessList::open());
        let gone = async {
            while client.read(0, 1).await.is_ok() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, gone).await.expect("it is noticed");
        assert_eq!(client.write(0, &[2; 512], false).await, Err(Error::Gone));
        assert_eq!(b.space_used(), 0);
    });
}

/// What waits for room in a queue while that happens is not sent to the other volume.
#[test]
fn queued_commands_do_not_reach_another_volume() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let options = Options { queue_entries: 3, ..options(site.at) };
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let (_, client) = open(&controller).await;
        site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Read]).times(2));
        let read = |at| {
            let client = client.clone();
            spawn_local(async move { client.read(at, 1).await.map(drop) })
        };
        let reads = [read(0), read(1)];
        while controller.queues()[0].free_slots() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
        let write = spawn_local({
            let client = client.clone();
            async move { client.write(8, &[2; 4096], true).await }
        });
        let (b, _) = Site::volume(&site.server, B, 1 << 14);
        let known = controller.generation();
        site.serve(SUBNQN, B, AccessList::open());
        controller.changed(known).await.unwrap();
        site.faults.release();
        assert_eq!(timeout(PATIENCE, write).await.unwrap().unwrap(), Err(Error::Gone));
        assert_eq!(b.space_used(), 0, "nothing was written to it");
        for read in reads {
            read.await.unwrap().unwrap();
        }
    });
}

/// A smaller volume is another one, whatever it says of itself.
#[test]
fn a_namespace_that_has_shrunk_is_gone() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let small = Site::new(&core, 1 << 13).await;
        let (wire, controller) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&controller).await;
        client.read(0, 1).await.unwrap();
        wire.lead_to(small.at);
        wire.cut();
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
    });
}

/// A compare and write is not sent twice: its caller is told that the outcome is unknown.
#[test]
fn a_compare_and_write_is_sent_once() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let (wire, controller) = wired(&core, &site, PATIENCE).await;
        let (namespace, client) = open(&controller).await;
        let [old, new] = [bufs(&client, &[0; 512]).await, bufs(&client, &[3; 512]).await];
        site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]).times(1));
        let ctx = client.ctx(0).await;
        let both = async {
            sleep(Duration::from_millis(50)).await;
            wire.cut();
            site.faults.release();
        };
        let sent = namespace.compare_and_write(Lba(0), (&old, &new), false, &ctx);
        let (sent, ()) = tokio::join!(sent, both);
        assert_eq!(sent, Err(CompareError::InDoubt));
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [3; 512], "it was done after all");
    });
}

/// A write whose outcome is unknown is not abandoned before the outcome is known: what its range
/// holds stays.
#[test]
fn a_write_in_doubt_is_not_aborted() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let (wire, controller) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&controller).await;
        site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]).times(1));
        let ctx = client.ctx(512).await;
        let data = rt::buf::copy_in(ctx.credit(), &[3; 512]);
        let write = {
            let (dev, ctx) = (client.dev().clone(), ctx.clone());
            let op = Op::Write { at: Lba(0), data, fua: false };
            spawn_local(async move { dev.submit(op, &ctx).await.map(drop) })
        };
        sleep(Duration::from_millis(50)).await;
        wire.set_open(false);
        wire.cut();
        ctx.abort();
        sleep(Duration::from_millis(50)).await;
        assert!(!write.is_finished());
        site.faults.release();
        wire.set_open(true);
        assert_eq!(timeout(PATIENCE, write).await.unwrap().unwrap(), Ok(()));
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [3; 512]);
    });
}

/// What is in doubt when a connection is given up does not arrive later: the connection is reset.
#[test]
fn connections_in_doubt_are_reset() {
    on_core(async |core| {
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        for in_doubt in [true, false] {
            let stream = core.dial(listener.local_addr().unwrap()).await.unwrap();
            let (mut end, _) = listener.accept().await.unwrap();
            let config = nvme::host::Config::default();
            let queue = Queue::start(stream, config, Staging::default(), PATIENCE);
            end.read_exact(&mut [0; 128]).await.unwrap();
            end.write_all(IcResp::new(0, 4096).as_bytes()).await.unwrap();
            while queue.free_slots() == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            if in_doubt {
                let sqe = Sqe::new(NvmOpcode::Flush.0, 0, 1);
                let flush = Command { sqe, payload: Payload::None, timeout: None };
                let flush = {
                    let queue = queue.clone();
                    spawn_local(async move { queue.submit(flush).await.outcome })
                };
                end.read_exact(&mut [0; 72]).await.unwrap();
                queue.close();
                assert_eq!(flush.await.unwrap(), Err(LostCommand::InDoubt));
            }
            queue.close();
            let last = timeout(PATIENCE, end.read(&mut [0; 1])).await.unwrap();
            match last {
                Ok(n) => assert!(n == 0 && !in_doubt, "it ends in good order"),
                Err(e) => assert!(e.kind() == ErrorKind::ConnectionReset && in_doubt, "{e}"),
            }
        }
    });
}

/// A controller that falls silent is given up when a keep alive is not answered.
#[test]
fn silence_is_noticed() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let wire = Wire::new(&core, site.at).await;
        let keep_alive = Duration::from_millis(300);
        let options = Options { keep_alive, ..options(wire.at) };
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let (_, client) = open(&controller).await;
        let began = Instant::now();
        wire.freeze();
        assert_eq!(client.read(0, 1).await.unwrap().len(), 512);
        let took = began.elapsed();
        assert!(took >= keep_alive && took < PATIENCE, "{took:?}");
    });
}
