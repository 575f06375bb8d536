//! Targets that are not as ours is: what they say, and what is made of it.

use tokio::time::Instant;

use super::fake::{BLOCKS, Fake, Say};
use super::*;

const INQUIRY: u8 = 0x12;
const READ: u8 = 0x88;
const WRITE: u8 = 0x8a;
const FLUSH: u8 = 0x91;
const MODE_SENSE: u8 = 0x1a;
const WRITE_SAME: u8 = 0x93;
const COMPARE_AND_WRITE: u8 = 0x89;

async fn setup(core: &rt::Core) -> (Fake, Session, Rc<Lun>, TestClient) {
    let fake = Fake::new(core).await;
    let session =
        connect(core, Options { poll_interval: Duration::ZERO, ..options(fake.at) }).await;
    let (lun, client) = open(&session).await;
    (fake, session, lun, client)
}

/// SAM-5 5.3.1, SPC-4 annex F: what passes is waited for, and not reported.
#[test]
fn temporary_conditions_are_retried() {
    on_core(async |core| {
        let (fake, _, _, client) = setup(&core).await;
        fake.unit.say(READ, &[Say::Status(0x08), Say::Status(0x28), Say::Status(0x40)]);
        assert_eq!(client.read(0, 1).await.unwrap().len(), 512);
        fake.unit.say(
            WRITE,
            &[
                Say::Sense(2, 4, 1),
                Say::Sense(2, 4, 0xa),
                Say::Sense(2, 4, 0xb),
                Say::Sense(0xb, 0, 0),
                Say::Sense(6, 0x29, 0),
                Say::Sense(6, 0x3f, 0xe),
                Say::Sense(6, 0x2a, 6),
            ],
        );
        client.write(0, &[5; 512], false).await.unwrap();
        assert_eq!((fake.unit.count(READ), fake.unit.count(WRITE)), (4, 8));
        assert_eq!(fake.unit.disk.borrow()[..512], [5; 512]);
        // Sense data of a command that has succeeded.
        fake.unit.say(FLUSH, &[Say::Sense(1, 0x17, 1)]);
        client.flush().await.unwrap();
    });
}

/// What does not pass is told, at once or after a few more attempts.
#[test]
fn permanent_conditions_are_reported() {
    on_core(async |core| {
        let (fake, _, _, client) = setup(&core).await;
        fake.unit.say(WRITE, &[Say::Status(0x18)]);
        let began = Instant::now();
        let conflict = client.write(7, &[5; 512], false).await;
        assert_eq!(conflict, Err(Error::Unwritable { at: Lba(7) }));
        fake.unit.say(WRITE, &[Say::Sense(7, 0x27, 7)]);
        assert_eq!(client.write(7, &[5; 512], false).await, Err(Error::NoSpace));
        assert!(began.elapsed() < Duration::from_millis(90), "without a pause");
        fake.unit.say(READ, &[const { Say::Sense(2, 4, 3) }; 3]);
        assert_eq!(client.read(7, 1).await.map(drop), Err(Error::Unreadable { at: Lba(7) }));
        assert_eq!(client.read(7, 1).await.unwrap().len(), 512, "and it goes on");
    });
}

/// A unit that is busy for ever has an end as well.
#[test]
fn the_retry_timeout_ends_retries_of_busy() {
    on_core(async |core| {
        let fake = Fake::new(&core).await;
        let patience = Duration::from_millis(300);
        let session = connect(&core, Options { retry_timeout: patience, ..options(fake.at) }).await;
        let (_, client) = open(&session).await;
        fake.unit.say(READ, &vec![Say::Status(0x08); 100]);
        let began = Instant::now();
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
        assert!(began.elapsed() >= patience && began.elapsed() < PATIENCE);
    });
}

/// A target that starts lets initiators in before it has its units: these are waited for, for a
/// while.
#[test]
fn units_that_are_not_there_yet_are_waited_for() {
    on_core(async |core| {
        let fake = Fake::new(&core).await;
        let patience = Duration::from_millis(500);
        let look_every = Duration::ZERO;
        let options =
            Options { retry_timeout: patience, poll_interval: look_every, ..options(fake.at) };
        let session = connect(&core, options).await;
        let (_, client) = open(&session).await;
        fake.unit.say(READ, &[Say::Sense(6, 0x3f, 0xe)]);
        fake.unit.say(INQUIRY, &[const { Say::Sense(5, 0x25, 0) }; 2]);
        assert_eq!(client.read(0, 1).await.unwrap().len(), 512);
        fake.unit.say(READ, &[Say::Sense(6, 0x3f, 0xe)]);
        fake.unit.say(INQUIRY, &vec![Say::Sense(5, 0x25, 0); 100]);
        let began = Instant::now();
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
        assert!(began.elapsed() >= patience && began.elapsed() < PATIENCE);
    });
}

/// SPC-4 4.5.5: what had been confirmed is lost. Nothing is to be believed any more.
#[test]
fn a_deferred_error_is_the_end() {
    on_core(async |core| {
        let (fake, _, _, client) = setup(&core).await;
        fake.unit.say(READ, &[Say::Deferred]);
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
        assert_eq!(client.write(0, &[1; 512], false).await, Err(Error::Gone));
    });
}

/// A flush that fails is never tried again and believed.
#[test]
fn a_failed_flush_is_the_end() {
    on_core(async |core| {
        let (fake, _, _, client) = setup(&core).await;
        client.write(0, &[1; 512], false).await.unwrap();
        fake.unit.say(FLUSH, &[Say::Sense(3, 0x0c, 0)]);
        assert_eq!(client.flush().await, Err(Error::Gone));
        assert_eq!((client.flush().await, fake.unit.count(FLUSH)), (Err(Error::Gone), 1));
    });
}

/// RFC 7143 11.4.3: a flush that has failed below SCSI is no better. It may have been begun.
#[test]
fn a_flush_that_fails_below_scsi_is_the_end() {
    on_core(async |core| {
        let (fake, _, _, client) = setup(&core).await;
        client.write(0, &[1; 512], false).await.unwrap();
        fake.unit.say(FLUSH, &[Say::Failure]);
        assert_eq!(client.flush().await, Err(Error::Gone));
        assert_eq!((client.flush().await, fake.unit.count(FLUSH)), (Err(Error::Gone), 1));
        // What may be done twice is.
        let (fake, _, _, client) = setup(&core).await;
        fake.unit.say(READ, &[Say::Failure]);
        assert_eq!(client.read(0, 1).await.unwrap().len(), 512);
        assert_eq!(fake.unit.count(READ), 2);
    });
}

/// A compare and write that has succeeded without its data has compared something else.
#[test]
fn a_compare_and_write_without_its_data_is_in_doubt() {
    on_core(async |core| {
        let fake = Fake::new(&core).await;
        let usual = options(fake.at);
        let limits =
            iscsi::params::Limits { initial_r2t: true, immediate_data: false, ..usual.limits };
        fake.unit.compares.set(8);
        let session = connect(&core, Options { limits, ..usual }).await;
        let (lun, client) = open(&session).await;
        let before = session.generation();
        fake.unit.say(COMPARE_AND_WRITE, &[Say::Early]);
        let [old, new] = [bufs(&client, &[0; 512]).await, bufs(&client, &[3; 512]).await];
        let ctx = client.ctx(0).await;
        let swapped = lun.compare_and_write(Lba(0), (&old, &new), false, &ctx).await;
        assert_eq!(swapped, Err(CompareError::InDoubt));
        client.read(0, 1).await.unwrap();
        assert!(session.generation() > before, "its session has ended");
    });
}

/// SBC-3 6.4.5: a write cache that is turned on later is written through, for the layers above do
/// not know of it.
#[test]
fn a_cache_that_is_turned_on_later_is_written_through() {
    const FUA: u8 = 0x10;
    const WCE: u8 = 4;
    on_core(async |core| {
        let fake = Fake::new(&core).await;
        let modes = |device, caching| vec![6, 0, device, 0, 8, 10, caching];
        fake.unit.modes.replace(modes(FUA, 0));
        let session =
            connect(&core, Options { poll_interval: Duration::ZERO, ..options(fake.at) }).await;
        let (_, client) = open(&session).await;
        let info = client.dev().info();
        assert!(info.native_fua && !info.volatile_cache);
        let count = || (fake.unit.forced.get(), fake.unit.count(FLUSH));
        client.write(0, &[1; 512], false).await.unwrap();
        assert_eq!(count(), (0, 0));
        fake.unit.modes.replace(modes(FUA, WCE));
        fake.unit.say(WRITE, &[Say::Sense(6, 0x2a, 1)]);
        client.write(0, &[1; 512], false).await.unwrap();
        assert_eq!(count(), (0, 1), "the very write that was told of it");
        client.write(0, &[1; 512], false).await.unwrap();
        assert_eq!(count(), (1, 1));
        client.zero(0, 8, false).await.unwrap();
        assert_eq!(count(), (1, 2), "WRITE SAME knows no FUA");
        // No FUA any more, as was promised.
        fake.unit.modes.replace(modes(0, WCE));
        fake.unit.say(READ, &[Say::Sense(6, 0x2a, 1)]);
        client.read(0, 1).await.unwrap();
        client.write(0, &[1; 512], true).await.unwrap();
        assert_eq!(count(), (1, 3));
        assert_eq!(client.dev().info(), info, "what was promised stays");
    });
}

/// SBC-3 5.16.2: what is freed need not read as zeroes any more. It was promised to.
#[test]
fn zeroes_stay_zeroes_when_freed_blocks_do_not() {
    on_core(async |core| {
        let fake = Fake::new(&core).await;
        fake.unit.provisioning.set(0x40);
        let session =
            connect(&core, Options { poll_interval: Duration::ZERO, ..options(fake.at) }).await;
        let (_, client) = open(&session).await;
        assert!(client.dev().info().unmap_zeroes);
        for round in 0..2 {
            client.write(0, &[9; 64 * 512], false).await.unwrap();
            fake.unit.frees_to_anything.set(true);
            if round == 0 {
                fake.unit.say(WRITE_SAME, &[Say::Sense(6, 0x3f, 3)]);
            }
            client.unmap(0, 64).await.unwrap();
            let read = client.read(0, 64).await.unwrap().to_vec();
            assert!(read == [0; 64 * 512], "round {round}");
        }
    });
}

/// SPC-4 5.8: what changes while a unit is looked at is told by an answer in the middle of it,
/// once.
#[test]
fn a_unit_that_changes_while_it_is_looked_at_is_looked_at_again() {
    on_core(async |core| {
        let (fake, _, _, client) = setup(&core).await;
        fake.unit.say(READ, &[Say::Sense(6, 0x29, 0)]);
        fake.unit.say(MODE_SENSE, &[Say::Grows]);
        client.read(0, 1).await.unwrap();
        assert_eq!(client.dev().info().blocks, BLOCKS as u64 + 1024);
        // One that always has something to say is waited for no longer than any other.
        let patience = Duration::from_millis(300);
        let options =
            Options { retry_timeout: patience, poll_interval: Duration::ZERO, ..options(fake.at) };
        let session = connect(&core, options).await;
        let (_, client) = open(&session).await;
        fake.unit.say(READ, &[Say::Sense(6, 0x29, 0)]);
        fake.unit.say(MODE_SENSE, &vec![Say::Grows; 1000]);
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
    });
}

/// A success for a read of which half has come is a lie, and the session that told it ends.
#[test]
fn half_of_a_read_is_not_taken() {
    on_core(async |core| {
        let (fake, session, _, client) = setup(&core).await;
        fake.unit.disk.borrow_mut().fill(7);
        fake.unit.say(READ, &[Say::HalfOfIt]);
        let before = session.generation();
        assert_eq!(client.read(0, 8).await.unwrap().to_vec(), [7; 4096]);
        assert!(session.generation() > before && fake.unit.count(READ) == 2);
    });
}

/// SBC-3: units without WRITE SAME, VERIFY, COMPARE AND WRITE or FUA are made use of all the same.
#[test]
fn units_that_know_little() {
    on_core(async |core| {
        let (fake, _, lun, client) = setup(&core).await;
        fake.unit.unknown.borrow_mut().extend([0x93, 0x8f, 0x89]);
        let info = client.dev().info();
        assert!(info.volatile_cache && !info.native_fua && info.unmap_granularity_blocks == 0);
        client.write(0, &[9; 64 * 512], true).await.unwrap();
        assert_eq!(fake.unit.count(FLUSH), 1, "in place of FUA");
        client.zero(0, 64, false).await.unwrap();
        assert!(fake.unit.disk.borrow()[..64 * 512].iter().all(|b| *b == 0));
        client.zero(0, 64, false).await.unwrap();
        assert_eq!(fake.unit.count(0x93), 1, "asked once");
        let ctx = client.ctx(1 << 20).await;
        lun.verify(Lba(0), BLOCKS as u32, &ctx).await.unwrap();
        lun.verify(Lba(0), BLOCKS as u32, &ctx).await.unwrap();
        assert_eq!(fake.unit.count(0x8f), 1, "asked once");
        let block = bufs(&client, &[0; 512]).await;
        let unsupported = Err(CompareError::Unsupported);
        assert_eq!(lun.compare(Lba(0), &block, &ctx).await, unsupported);
        let swapped = lun.compare_and_write(Lba(0), (&block, &block), false, &ctx).await;
        assert_eq!(swapped, unsupported);
    });
}

/// SBC-3 4.7.3: a unit that frees by UNMAP alone promises nothing about what is read then.
#[test]
fn units_that_free_by_unmap() {
    on_core(async |core| {
        let fake = Fake::new(&core).await;
        fake.unit.provisioning.set(0x80);
        let session = connect(&core, options(fake.at)).await;
        let (_, client) = open(&session).await;
        let info = client.dev().info();
        assert!(
            info.unmap_granularity_blocks > 0 && !info.unmap_zeroes && info.overhead_bytes == 4096
        );
        client.write(0, &[9; 200 * 512], false).await.unwrap();
        client.unmap(0, 150).await.unwrap();
        assert_eq!(fake.unit.count(0x42), 3, "64 blocks each");
        let read = client.read(149, 2).await.unwrap().to_vec();
        assert!(read[..512] == [0; 512] && read[512..] == [9; 512]);
    });
}

/// RFC 7143 11.13.5: a target that is elsewhere is followed, but not for ever.
#[test]
fn redirections_are_followed() {
    on_core(async |core| {
        let (first, second) = (Fake::new(&core).await, Fake::new(&core).await);
        second.unit.disk.borrow_mut().fill(3);
        *first.unit.moved.borrow_mut() = Some(format!("{},1", second.at));
        let session = connect(&core, options(first.at)).await;
        let (_, client) = open(&session).await;
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [3; 512]);
        *second.unit.moved.borrow_mut() = Some(first.at.to_string());
        let round = Session::connect(&core, options(first.at), Staging::default()).await;
        assert_eq!(round.map(drop), Err(ConnectError::TooManyRedirects));
        *first.unit.moved.borrow_mut() = Some("disk.example:3260,1".into());
        let named = Session::connect(&core, options(first.at), Staging::default()).await;
        assert!(matches!(named, Err(ConnectError::Unusable(_))));
    });
}
