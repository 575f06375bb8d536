//! The intent log of an image, on simulated disks.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use block::Error;
use disk::{ImageErrorReason, ImageLabel};
use futures_util::future::join_all;
use image::{CreateImageOptions, FlatImage};
use intent_log::{
    CloseError, ConfigAdoption, ExportedBitmap, IntentLog, LogDamage, LogError, LogOpenReport,
    MergeError, OtherImage, Region, SUPERBLOCK_OFFSETS,
};
use rt::Core;
use rt::disk::DiskErrorKind;
use rt::sim::{DiskControl, Host, HostSetup, ScriptedFault};
use uuid::Uuid;

use crate::common::{client, core_of, existing, succeed, thin};

const IMAGE: &str = "/images/volume";
const MIB: u64 = 1 << 20;
const REGION: u64 = 64 << 10;
const A: Uuid = Uuid::from_u128(0xa);
const B: Uuid = Uuid::from_u128(0xb);
const BOOT: Uuid = Uuid::from_u128(0xb007);

async fn create(core: &Core, bytes: u64) -> Rc<FlatImage> {
    let options = CreateImageOptions { block_size: 4096, ..thin(bytes) };
    Rc::new(FlatImage::create(core, Path::new(IMAGE), &options).await.unwrap())
}

async fn reopen(core: &Core) -> Rc<FlatImage> {
    Rc::new(FlatImage::open(core, Path::new(IMAGE), &existing()).await.unwrap())
}

async fn open(core: &Core) -> (IntentLog, LogOpenReport, Rc<FlatImage>) {
    open_in(core, BOOT).await
}

async fn open_in(core: &Core, boot: Uuid) -> (IntentLog, LogOpenReport, Rc<FlatImage>) {
    let file = reopen(core).await;
    let area = file.log_area().await.unwrap();
    let (log, found) = IntentLog::open(core, area, boot).await.unwrap();
    (log, found, file)
}

fn adoption(epoch: u64, others: &[Uuid]) -> ConfigAdoption {
    let others = others.iter().map(|image| OtherImage { image: *image, is_new: false }).collect();
    let (config_id, in_sync, in_sync_hint) = (Uuid::from_u128(7), Vec::new(), [None; 3]);
    let inherited = Vec::new();
    ConfigAdoption {
        epoch,
        config_id,
        other_images: others,
        in_sync_images: in_sync,
        inherited_generations: inherited,
        in_sync_hint,
        boot_id: None,
    }
}

/// A host with an image of `bytes`, and a log with slots for `A` and `B`.
fn with_log<Fut: Future<Output = ()>>(
    bytes: u64,
    scenario: impl FnOnce(Host, Core, DiskControl, Rc<FlatImage>, IntentLog) -> Fut,
) {
    succeed(1, HostSetup::default(), |_, host| async move {
        let core = core_of(&host).await;
        let file = create(&core, bytes).await;
        let area = file.log_area().await.unwrap();
        let log = IntentLog::create(&core, area).await.unwrap();
        log.adopt_config(adoption(1, &[A, B])).await.unwrap();
        let disk = host.disk(IMAGE).unwrap();
        scenario(host, core, disk, file, log).await;
    });
}

fn bytes_of(region: u64) -> std::ops::Range<u64> {
    region * REGION..region * REGION + 4096
}

#[test]
fn a_log_records_how_it_was_closed() {
    with_log(10 * MIB, |_, core, _, file, log| async move {
        assert!(file.label().has_intent_log);
        let area = file.log_area().await.unwrap();
        let again = IntentLog::create(&core, area).await.map(drop);
        assert_eq!(again, Err(LogError::AlreadyExists));
        log.mark(bytes_of(3)).await.unwrap();
        drop((log, file));
        let (log, found, file) = open(&core).await;
        // It was opened in this disk session, but has been in sync in none.
        assert!(found.damage == LogDamage::None && !found.same_boot && !found.was_closed);
        let member = ConfigAdoption { boot_id: Some(BOOT), ..adoption(2, &[A, B]) };
        log.adopt_config(member).await.unwrap();
        assert_eq!(found.adopted.map(|a| a.epoch), Some(1));
        assert_eq!(
            (log.dirty_regions(A), log.dirty_regions(B)),
            (vec![Region(3)], vec![Region(3)])
        );
        assert!(log.is_hot(bytes_of(3)) && !log.is_hot(bytes_of(4)));
        let guard = log.begin_op(bytes_of(3));
        assert_eq!(log.close().await, Err(CloseError::InUse(1)));
        drop(guard);
        log.close().await.unwrap();
        assert!(!log.is_hot(bytes_of(3)));
        assert_eq!(log.mark(bytes_of(3)).await, Err(Error::Gone));
        drop((log, file));
        let (log, found, _file) = open(&core).await;
        assert!(found.was_closed && found.damage == LogDamage::None && found.same_boot);
        assert!(!log.is_clean(&[A]) && log.dirty_count(A) == Some(1));
    });
}

#[test]
fn an_untrusted_image_counts_as_of_another_boot_until_in_sync() {
    with_log(10 * MIB, |_, core, _, file, log| async move {
        log.adopt_config(ConfigAdoption { boot_id: Some(BOOT), ..adoption(2, &[A, B]) })
            .await
            .unwrap();
        drop((log, file));
        let (log, found, file) = open_in(&core, Uuid::nil()).await;
        assert!(!found.same_boot);
        drop((log, file));
        let (log, found, file) = open(&core).await;
        assert!(!found.same_boot, "it is noted");
        log.adopt_config(ConfigAdoption { boot_id: Some(BOOT), ..adoption(3, &[A, B]) })
            .await
            .unwrap();
        drop((log, file));
        assert!(open(&core).await.1.same_boot);
    });
}

#[test]
fn a_replugged_disk_counts_as_of_another_boot() {
    with_log(10 * MIB, |_, core, disk, file, log| async move {
        let before = log.boot(&core);
        drop((log, file));
        let file = reopen(&core).await;
        assert_eq!(file.log_area().await.unwrap().disk_session(&core), before);
        disk.unplug();
        disk.plug();
        // For a file opened earlier, the disk never came back.
        assert_eq!(file.log_area().await.unwrap().disk_session(&core), before);
        drop(file);
        assert_ne!(reopen(&core).await.log_area().await.unwrap().disk_session(&core), before);
    });
}

#[test]
fn a_log_area_is_confined_and_needs_its_full_size() {
    succeed(1, HostSetup::default(), |_, host| async move {
        let core = core_of(&host).await;
        let file = create(&core, MIB).await;
        let area = file.log_area().await.unwrap();
        let absent = IntentLog::open(&core, area, BOOT).await.map(drop);
        assert_eq!(absent, Err(LogError::NoLog));
        let area = file.log_area().await.unwrap();
        for (at, len) in [(512 << 10, 4096), (936 << 10, 4096), (932 << 10, 8192), (u64::MAX, 1)] {
            assert_eq!(area.read(at, len).await.unwrap_err().kind, DiskErrorKind::PastEnd);
        }
        for (at, len) in [((516 << 10) + 512, 4096), (516 << 10, disk::LOG_TRANSFER_MAX + 4096)] {
            assert_eq!(
                area.write(at, &vec![0; len]).await.unwrap_err().kind,
                DiskErrorKind::Misaligned
            );
        }
        let label = file.label();
        drop((area, file));
        let crowded = ImageLabel { data_offset: 520 << 10, ..label };
        let disk = host.disk(IMAGE).unwrap();
        disk.write_durable(0, &crowded.to_bytes(0));
        disk.write_durable(512 << 10, &crowded.to_bytes(1));
        let refused = reopen(&core).await.log_area().await.map(drop).unwrap_err();
        assert_eq!(refused.reason, ImageErrorReason::NoLogArea { data_offset: 520 << 10 });
    });
}

#[test]
fn only_writes_to_cold_regions_wait() {
    with_log(10 * MIB, |_, _, disk, _file, log| async move {
        log.mark(bytes_of(1)).await.unwrap();
        disk.hold_completions();
        let misses = join_all((2..20).map(|region| log.mark(bytes_of(region))));
        let mut misses = Box::pin(misses);
        let early = tokio::time::timeout(Duration::from_secs(1), &mut misses).await;
        assert!(early.is_err() && log.dirty_count(A) == Some(19));
        assert!(!log.is_hot(bytes_of(2)) && log.is_hot(bytes_of(1)));
        assert_eq!(log.mark(bytes_of(1)).await, Ok(()));
        assert_eq!(disk.in_flight(), 1, "they share one page");
        disk.release_completions();
        assert!(misses.await.into_iter().all(|marked| marked.is_ok()));
        assert!(log.is_hot(bytes_of(2)));
        assert_eq!(log.mark(10 * MIB - 1..10 * MIB + 1).await, Err(Error::OutOfRange));
    });
}

#[test]
fn a_bit_set_again_during_its_page_write_waits_for_another() {
    with_log(10 * MIB, |_, core, disk, file, log| async move {
        let client = client(&core, &file);
        log.mark(bytes_of(1)).await.unwrap();
        let stamp = log.begin_flush();
        client.flush().await.unwrap();
        assert_eq!(log.clear(&[A, B], [Region(1), Region(9999)], stamp), 2);
        // No page has been written yet.
        assert!(!log.is_hot(bytes_of(1)));
        disk.hold_completions();
        assert_eq!(log.mark(bytes_of(1)).await, Ok(()));
        disk.release_completions();
        let stamp = log.begin_flush();
        client.flush().await.unwrap();
        assert_eq!(log.clear(&[A, B], [Region(1)], stamp), 2);
        disk.hold_completions();
        let mut write_back = Box::pin(log.write_back());
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut write_back).await.is_err());
        let mut remark = Box::pin(log.mark(bytes_of(1)));
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut remark).await.is_err());
        assert_eq!(disk.in_flight(), 1, "one write of a page at a time");
        disk.release_completions();
        assert_eq!((write_back.await, remark.await), (Ok(()), Ok(())));
        assert!(log.is_hot(bytes_of(1)));
    });
}

#[test]
fn bits_of_operations_not_covered_by_a_flush_stay() {
    with_log(10 * MIB, |_, _, _, _file, log| async move {
        log.mark(0..4 * REGION).await.unwrap();
        drop(log.begin_op(bytes_of(1)));
        let stamp = log.begin_flush();
        drop(log.begin_op(bytes_of(2)));
        let _in_flight = log.begin_op(bytes_of(3));
        assert_eq!(log.clear(&[A], (0..4).map(Region), stamp), 2);
        assert_eq!(log.dirty_regions(A), [Region(2), Region(3)]);
        assert_eq!(log.dirty_count(B), Some(4), "not named");
        assert_eq!(log.clear(&[B], [Region(0), Region(2)], stamp), 1);
        assert_eq!(log.clear(&[Uuid::from_u128(1)], [Region(2)], stamp), 0);
    });
}

#[test]
fn a_write_or_sync_that_fails_ends_the_log() {
    for mishap in [ScriptedFault::WriteError, ScriptedFault::SyncError] {
        with_log(10 * MIB, |_, core, disk, file, log| async move {
            log.mark(bytes_of(1)).await.unwrap();
            disk.script_fault(mishap);
            assert_eq!(log.mark(bytes_of(2)).await, Err(Error::Gone));
            assert_eq!(log.mark(bytes_of(1)).await, Err(Error::Gone));
            assert!(!log.is_hot(bytes_of(1)) && !log.is_clean(&[]));
            assert_eq!(log.write_back().await, Err(Error::Gone));
            let image = client(&core, &file).flush().await;
            assert_eq!(image.is_err(), mishap == ScriptedFault::SyncError);
        });
    }
}

#[test]
fn corrupt_cells_are_marked_dirty_and_rewritten() {
    with_log(200 * MIB, |_, core, disk, file, log| async move {
        log.close().await.unwrap();
        drop((log, file));
        disk.flip_bit((524 << 10) + 512 + 40, 3);
        disk.flip_bit(SUPERBLOCK_OFFSETS[1] + 100, 3);
        let (log, found, file) = open(&core).await;
        assert_eq!((found.damage, found.was_closed), (LogDamage::Cells(1), true));
        assert_eq!(log.dirty_regions(A), Vec::from_iter((1280..2560).map(Region)));
        drop((log, file));
        let (log, found, file) = open(&core).await;
        assert_eq!((found.damage, log.dirty_count(B)), (LogDamage::None, Some(1280)));
        drop((log, file));
        SUPERBLOCK_OFFSETS.iter().for_each(|at| disk.flip_bit(at + 100, 3));
        let (log, found, file) = open(&core).await;
        assert_eq!((found.damage, found.adopted), (LogDamage::SuperblockLost, None));
        assert!(log.images().is_empty() && !log.is_clean(&[]));
        log.adopt_config(adoption(1, &[A])).await.unwrap();
        assert_eq!(log.dirty_count(A), Some(3200));
        drop((log, file));
        let (log, found, _file) = open(&core).await;
        assert_eq!((found.damage, log.dirty_count(A)), (LogDamage::None, Some(3200)));
    });
}

#[test]
fn merged_bitmaps_are_durable() {
    with_log(10 * MIB, |_, core, _, file, log| async move {
        log.mark(bytes_of(5)).await.unwrap();
        let own = log.export_bitmap(A).unwrap();
        assert_eq!((own.region_shift, own.bits.len(), own.bits[0]), (16, 20, 1 << 5));
        // Two regions of 128 KiB each, and one past the end of the volume.
        let mut bits = vec![0; 11];
        (bits[0], bits[10]) = (0b11, 0xff);
        let theirs = ExportedBitmap { volume_bytes: 11 * MIB, region_shift: 17, bits };
        log.merge_bitmap(A, &theirs).await.unwrap();
        let expected = Vec::from_iter((0..4).chain([5]).map(Region));
        assert_eq!((log.dirty_regions(A), log.dirty_count(B)), (expected.clone(), Some(1)));
        let wrong = ExportedBitmap { bits: vec![0; 10], ..theirs.clone() };
        let length = MergeError::Length { found: 10, wanted: 11 };
        assert_eq!(log.merge_bitmap(A, &wrong).await, Err(length));
        let wrong = ExportedBitmap { region_shift: u32::MAX, ..theirs.clone() };
        assert!(matches!(log.merge_bitmap(A, &wrong).await, Err(MergeError::Geometry(_))));
        let unknown = Uuid::from_u128(1);
        assert_eq!(
            log.merge_bitmap(unknown, &theirs).await,
            Err(MergeError::UnknownImage(unknown))
        );
        drop((log, file));
        assert_eq!(open(&core).await.0.dirty_regions(A), expected);
    });
}

#[test]
fn idle_regions_are_cleared_faster_if_there_are_many() {
    with_log(10 * MIB, |_, _, _, _file, log| async move {
        log.mark(0..8 * REGION).await.unwrap();
        (0..8).rev().for_each(|region| {
            drop(log.begin_op(bytes_of(region)));
            let _ = log.begin_flush();
        });
        assert_eq!(log.idle_dirty_regions(&[A], 100), []);
        log.set_hot_limit(7);
        assert_eq!(log.idle_dirty_regions(&[A], 100), [Region(7), Region(6)], "a quarter");
        log.set_hot_limit(8);
        log.tick();
        log.tick();
        drop(log.begin_op(bytes_of(0)));
        let _in_flight = log.begin_op(bytes_of(1));
        assert_eq!(log.idle_dirty_regions(&[A], 3), [2, 3, 4].map(Region));
        assert_eq!(log.idle_dirty_regions(&[A, B], 100).len(), 6);
    });
}

#[test]
fn a_returning_image_finds_its_missed_regions_dirty() {
    with_log(10 * MIB, |_, core, _, file, log| async move {
        log.mark(bytes_of(1)).await.unwrap();
        log.adopt_config(adoption(2, &[A])).await.unwrap();
        log.mark(bytes_of(2)).await.unwrap();
        let c = Uuid::from_u128(0xc);
        log.adopt_config(adoption(3, &[A, c])).await.unwrap();
        let stamp = log.begin_flush();
        client(&core, &file).flush().await.unwrap();
        log.clear(&[A, c], (0..160).map(Region), stamp);
        assert!(log.is_clean(&[A, c]));
        log.adopt_config(adoption(4, &[A, B])).await.unwrap();
        assert_eq!(log.dirty_regions(B), [Region(1), Region(2)]);
        drop((log, file));
        assert_eq!(open(&core).await.0.dirty_regions(B), [Region(1), Region(2)]);
        let (log, ..) = open(&core).await;
        let mut next = adoption(5, &[A, c]);
        next.other_images[1].is_new = true;
        log.adopt_config(next).await.unwrap();
        assert_eq!(log.dirty_count(c), Some(160));
    });
}

#[test]
fn an_interrupted_creation_leaves_no_log_or_a_complete_one() {
    let (mut none, mut whole) = (0, 0);
    for ms in (0..160).step_by(3) {
        let has_log = std::cell::Cell::new(false);
        succeed(ms, HostSetup::default(), |_, host| {
            let has_log = &has_log;
            async move {
                let core = core_of(&host).await;
                let file = create(&core, 10 * MIB).await;
                drop(host.run(move |core| async move {
                    let area = file.log_area().await.unwrap();
                    let log = IntentLog::create(&core, area).await;
                    std::future::pending::<()>().await;
                    drop(log);
                }));
                tokio::time::sleep(Duration::from_millis(ms)).await;
                host.power_cut();
                let core = core_of(&host).await;
                let file = reopen(&core).await;
                has_log.set(file.label().has_intent_log);
                drop(file);
                if has_log.get() {
                    assert_eq!(open(&core).await.1.damage, LogDamage::None);
                } else {
                    let area = reopen(&core).await.log_area().await.unwrap();
                    IntentLog::create(&core, area).await.unwrap();
                }
            }
        });
        if has_log.get() { whole += 1 } else { none += 1 }
    }
    assert!(none > 5 && whole > 5, "{none} without, {whole} with");
}
