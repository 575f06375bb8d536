//! Cut connections, unreachable targets, replaced units.

use block::Op;
use common::{A, B, QUICK_CUTS, cut_while_working};
use target::AccessList;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use super::fake::Fake;
use super::*;

/// A session through a proxy that can be cut.
async fn wired(core: &rt::Core, site: &Site, patience: Duration) -> (Wire, Session) {
    let wire = Wire::new(core, site.at).await;
    let session = connect(core, Options { retry_timeout: patience, ..options(wire.at) }).await;
    (wire, session)
}

/// Cut connections lose nothing, repeat nothing visibly, and cause no errors.
#[test]
fn cuts_are_not_noticed() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let (wire, session) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&session).await;
        cut_while_working(&wire, client, (&QUICK_CUTS, 60), 400).await;
    });
}

/// Commands for a target that does not return fail after the timeout, and all later ones too.
#[test]
fn the_retry_timeout_ends_waiting() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let (wire, session) = wired(&core, &site, Duration::from_millis(200)).await;
        let (_, client) = open(&session).await;
        client.write(0, &[1; 512], false).await.unwrap();
        wire.set_open(false);
        wire.cut();
        let began = Instant::now();
        let (read, write) = tokio::join!(client.read(0, 1), client.write(8, &[2; 512], false));
        assert_eq!((read.map(drop), write), (Err(Error::Gone), Err(Error::Gone)));
        assert!(began.elapsed() >= Duration::from_millis(200) && began.elapsed() < PATIENCE);
        wire.set_open(true);
        let up = async {
            while !session.is_up() {
                let _ = session.changed(session.generation()).await;
            }
        };
        timeout(PATIENCE, up).await.expect("it comes back");
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone), "too late");
        let (_, client) = open(&session).await;
        let read = client.read(0, 1).await.unwrap().to_vec();
        assert_eq!(read, [1; 512], "for a user that opens it anew");
    });
}

/// A briefly unreachable target is waited for.
#[test]
fn a_target_that_is_away_is_waited_for() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let (wire, session) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&session).await;
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

/// A session ends on the target's request, without errors.
#[test]
fn a_session_ends_at_the_targets_wish() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let other = Site::iscsi(&core, 1 << 14).await;
        let (wire, session) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&session).await;
        client.write(0, &[1; 512], true).await.unwrap();
        wire.lead_to(other.at);
        let drained = spawn_local(async move {
            site.server.drain(Instant::now() + PATIENCE).await;
        });
        let back = async {
            while wire.accepted.get() < 2 {
                client.read(8, 1).await.unwrap();
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, back).await.expect("it logs in again");
        // The same volume by its name, elsewhere.
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [0; 512]);
        timeout(PATIENCE, drained).await.expect("it has ended").unwrap();
    });
}

/// A different volume under the same name is not written to.
#[test]
fn a_unit_that_has_become_another_volume_is_gone() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let (wire, session) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&session).await;
        client.write(0, &[1; 512], false).await.unwrap();
        wire.set_open(false);
        wire.cut();
        let write = spawn_local({
            let client = client.clone();
            async move { client.write(8, &[2; 4096], true).await }
        });
        sleep(Duration::from_millis(20)).await;
        let (b, _) = Site::volume(&site.server, B, 1 << 14);
        site.serve_unit(TARGET, B, AccessList::open());
        wire.set_open(true);
        assert_eq!(write.await.unwrap(), Err(Error::Gone));
        assert_eq!(b.space_used(), 0, "nothing was written to it");
        site.serve_unit(TARGET, A, AccessList::open());
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone), "for ever");
    });
}

/// The same without a cut: the unit reports it, or is missing until the timeout.
#[test]
fn a_unit_that_changes_while_connected_is_gone() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let patience = Duration::from_millis(300);
        let session = connect(&core, Options { retry_timeout: patience, ..options(site.at) }).await;
        let (_, client) = open(&session).await;
        let (b, _) = Site::volume(&site.server, B, 1 << 14);
        site.serve_unit(TARGET, B, AccessList::open());
        let gone = async {
            while client.write(0, &[2; 512], false).await.is_ok() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, gone).await.expect("it is noticed");
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
        assert_eq!(b.space_used(), 0);
    });
}

/// A smaller volume is a different one, whatever its identity.
#[test]
fn a_unit_that_has_shrunk_is_gone() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let small = Site::iscsi(&core, 1 << 13).await;
        let (wire, session) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&session).await;
        client.read(0, 1).await.unwrap();
        wire.lead_to(small.at);
        wire.cut();
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
    });
}

/// A compare and write is not sent twice: its caller learns that it is in doubt.
#[test]
fn a_compare_and_write_is_sent_once() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let (wire, session) = wired(&core, &site, PATIENCE).await;
        let (lun, client) = open(&session).await;
        let [old, new] = [bufs(&client, &[0; 512]).await, bufs(&client, &[3; 512]).await];
        site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]).times(1));
        let ctx = client.ctx(0).await;
        let both = async {
            sleep(Duration::from_millis(50)).await;
            wire.cut();
            site.faults.release();
        };
        let sent = lun.compare_and_write(Lba(0), (&old, &new), false, &ctx);
        let (sent, ()) = tokio::join!(sent, both);
        assert_eq!(sent, Err(CompareError::InDoubt));
        let now = client.read(0, 1).await.unwrap().to_vec();
        assert!(now == [3; 512] || now == [0; 512], "all or nothing");
    });
}

/// A write in doubt is not abandoned: the contents of its range must stay stable.
#[test]
fn a_write_in_doubt_is_not_aborted() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let (wire, session) = wired(&core, &site, PATIENCE).await;
        let (_, client) = open(&session).await;
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

/// RFC 7143 6.3.5: a login ends what the session before it had in flight, where that was. A target
/// that is elsewhere now may be another node, which ends nothing.
#[test]
fn a_write_in_doubt_is_repeated_at_its_target_alone() {
    on_core(async |core| {
        for elsewhere in [false, true] {
            let site = Site::iscsi(&core, 1 << 14).await;
            let [here, there] = [Wire::new(&core, site.at).await, Wire::new(&core, site.at).await];
            let leads = Fake::new(&core).await;
            leads.unit.moved.replace(Some(here.at.to_string()));
            let session = connect(&core, options(leads.at)).await;
            let (lun, client) = open(&session).await;
            site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]).times(1));
            let write = spawn_local({
                let client = client.clone();
                async move { client.write(0, &[3; 512], false).await }
            });
            sleep(Duration::from_millis(50)).await;
            let to = if elsewhere { there.at } else { here.at };
            leads.unit.moved.replace(Some(to.to_string()));
            here.cut();
            sleep(Duration::from_millis(50)).await;
            site.faults.release();
            let outcome = timeout(PATIENCE, write).await.unwrap().unwrap();
            let then = client.read(0, 1).await.map(drop);
            let expected = if elsewhere { Err(Error::Gone) } else { Ok(()) };
            assert_eq!((outcome, then), (expected, expected));
            drop(lun);
        }
    });
}

/// Commands not in doubt continue at the target's new address; the outcome of a compare and write
/// is not looked up there.
#[test]
fn a_target_may_move() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let [here, there] = [Wire::new(&core, site.at).await, Wire::new(&core, site.at).await];
        let leads = Fake::new(&core).await;
        leads.unit.moved.replace(Some(here.at.to_string()));
        let session = connect(&core, options(leads.at)).await;
        let (lun, client) = open(&session).await;
        client.write(0, &[1; 512], false).await.unwrap();
        leads.unit.moved.replace(Some(there.at.to_string()));
        here.cut();
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [1; 512]);
        client.write(0, &[2; 512], false).await.unwrap();
        let [old, new] = [bufs(&client, &[2; 512]).await, bufs(&client, &[3; 512]).await];
        site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]).times(1));
        let ctx = client.ctx(0).await;
        let cut = async {
            sleep(Duration::from_millis(50)).await;
            leads.unit.moved.replace(Some(here.at.to_string()));
            there.cut();
            site.faults.release();
        };
        let sent = lun.compare_and_write(Lba(0), (&old, &new), false, &ctx);
        let (sent, ()) = tokio::join!(sent, cut);
        assert_eq!(sent, Err(CompareError::InDoubt));
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
    });
}

/// A silent target is dropped when a ping is not answered.
#[test]
fn silence_is_noticed() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let wire = Wire::new(&core, site.at).await;
        let keep_alive = Duration::from_millis(300);
        let session = connect(&core, Options { keep_alive, ..options(wire.at) }).await;
        let (_, client) = open(&session).await;
        let began = Instant::now();
        wire.freeze();
        assert_eq!(client.read(0, 1).await.unwrap().len(), 512);
        let took = began.elapsed();
        assert!(took >= keep_alive / 2 && took < PATIENCE, "{took:?}");
    });
}
