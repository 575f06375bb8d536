//! The life cycle of an image: creation, opening, growth, deletion; what is refused and why;
//! crashes at every point.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use disk::{ExistingData, ImageError, ImageErrorReason, ImageLabelError, ImageState, Provisioning};
use image::{CreateImageOptions, FlatImage, OpenImageOptions, delete, inspect};
use rt::Core;
use rt::disk::{DiskErrorKind, OpenOptions, OpenReason};
use rt::sim::{
    BadDuration, BadRange, DiskFaults, DiskSetup, FailingOps, Host, HostSetup, Latency,
    ScriptedFault, TornDamage, UnsyncedFate,
};
use uuid::Uuid;

use crate::common::{VOLUME, client, core_of, essence, existing, run_scenario, succeed, thin};

const IMAGE: &str = "/images/volume";
const SLOTS: [u64; 2] = [0, 512 << 10];
const MIB: u64 = 1 << 20;
const OTHER: Uuid = Uuid::from_u128(99);

fn image() -> &'static Path {
    Path::new(IMAGE)
}

fn reason<T>(result: Result<T, ImageError>) -> ImageErrorReason {
    let error = result.err().expect("must be refused");
    assert_eq!(error.path, image());
    assert!(error.to_string().starts_with(IMAGE), "{error}");
    error.reason
}

/// A host whose disks take one millisecond for everything.
fn punctual(disk: &DiskSetup) -> HostSetup {
    HostSetup { new_file_setup: disk.clone().faults(punctual_faults()), ..HostSetup::default() }
}

fn punctual_faults() -> DiskFaults {
    let ms = Duration::from_millis(1);
    let latency = Latency { min: ms, max: ms, outlier_every: 0 };
    DiskFaults { latency, ..Default::default() }
}

/// Runs `scenario` with a core of a host that has faultless files.
fn with_core<Fut: Future<Output = ()>>(scenario: impl FnOnce(Host, Core) -> Fut) {
    succeed(1, HostSetup::default(), |_, host| async move {
        let core = core_of(&host).await;
        scenario(host, core).await;
    });
}

#[test]
fn an_image_keeps_its_creation_parameters() {
    for provisioning in [Provisioning::Thin, Provisioning::Thick] {
        for block_size in [512, 4096] {
            with_core(|host, core| async move {
                let how = CreateImageOptions { provisioning, block_size, ..thin(3 * MIB) };
                let made = FlatImage::create(&core, image(), &how).await.unwrap();
                let label = made.label();
                assert_eq!(essence(label), (VOLUME, 3 * MIB, block_size, provisioning));
                assert_eq!(label.state, ImageState::Active);
                let space = made.allocated().await.unwrap();
                match provisioning {
                    Provisioning::Thin => assert!(space < MIB, "{space}"),
                    Provisioning::Thick => assert!(space >= 3 * MIB, "{space}"),
                }
                assert_eq!(reason(inspect(&core, image(), false).await), busy());
                drop(made);
                assert_eq!(inspect(&core, image(), false).await.unwrap(), label);
                let opened = FlatImage::open(&core, image(), &existing()).await.unwrap();
                assert_eq!(opened.label(), label);
                assert_eq!(reason(FlatImage::open(&core, image(), &existing()).await), busy());
                drop(opened);
                delete(&core, image(), VOLUME, (false, false), None).await.unwrap();
                assert!(host.disk(IMAGE).is_none());
                let gone = FlatImage::open(&core, image(), &existing()).await;
                assert_eq!(reason(gone), ImageErrorReason::Open(OpenReason::NotFound));
            });
        }
    }
}

fn busy() -> ImageErrorReason {
    ImageErrorReason::Open(OpenReason::Busy)
}

#[test]
fn impossible_sizes_are_refused() {
    with_core(|host, core| async move {
        for how in [
            thin(0),
            thin(1000),
            thin((256 << 40) + 512),
            CreateImageOptions { block_size: 4096, ..thin(512) },
            CreateImageOptions { block_size: 1024, ..thin(4096) },
            thin(u64::MAX),
        ] {
            let refused = reason(FlatImage::create(&core, image(), &how).await);
            assert!(matches!(refused, ImageErrorReason::InvalidSize(_)), "{how:?}: {refused}");
            assert!(host.disk(IMAGE).is_none());
        }
        let huge = FlatImage::create(&core, image(), &thin(256 << 40)).await.unwrap();
        let c = client(&core, &Rc::new(huge));
        let last = (256 << 31) - 1;
        c.write(last, &[1; 512], true).await.unwrap();
        assert_eq!(c.read(last, 1).await.unwrap().to_vec(), [1; 512]);
    });
}

fn known(name: &str) -> ImageErrorReason {
    ImageErrorReason::HoldsOtherData(ExistingData::KnownFormats(vec![name.to_owned()]))
}

#[test]
fn data_in_the_middle_of_a_device_is_not_overwritten_unless_forced() {
    let unknown = |at| ImageErrorReason::HoldsOtherData(ExistingData::UnknownData { at });
    let cases: [(u64, &[u8], ImageErrorReason); 5] = [
        (MIB, b"\x0d\xd0\x01\xc0", known("a VMFS volume")),
        (2 * MIB, b"\x5e\xf1\xab\x2f", known("a VMFS file system")),
        (3 * MIB + 4096, &[1], unknown(3 * MIB + 4096)),
        (40 * MIB + 512, &[1], unknown(40 * MIB + 512)),
        (300 * MIB, &[7; 4096], unknown(300 * MIB)),
    ];
    for (at, bytes, expected) in cases {
        with_core(|host, core| async move {
            let disk = host.add_disk(IMAGE, DiskSetup::device(400 * MIB));
            disk.write_durable(at, bytes);
            let how = CreateImageOptions { size_bytes: None, ..thin(0) };
            assert_eq!(reason(FlatImage::create(&core, image(), &how).await), expected);
            assert_eq!(disk.read_visible(at, bytes.len()), bytes, "nothing was touched");
            FlatImage::create(&core, image(), &CreateImageOptions { overwrite: true, ..how })
                .await
                .unwrap();
        });
    }
}

#[test]
fn an_unresponsive_device_is_refused_within_minutes() {
    for force in [false, true] {
        with_core(|host, core| async move {
            let disk = host.add_disk(IMAGE, DiskSetup::device(8 * MIB));
            let hour = Duration::from_secs(3600);
            disk.set_faults(DiskFaults { stall: 1.0, stall_for: hour, ..DiskFaults::default() });
            let how = CreateImageOptions { size_bytes: None, overwrite: force, ..thin(0) };
            let made = Box::pin(FlatImage::create(&core, image(), &how));
            let made = tokio::time::timeout(Duration::from_secs(200), made).await;
            assert_eq!(
                reason(made.expect("it is waited for")),
                ImageErrorReason::NotResponding,
                "{force}"
            );
        });
    }
}

#[test]
fn existing_data_on_a_device_is_not_overwritten_unless_forced() {
    let cases: [(u64, &[u8], ImageErrorReason); 5] = [
        (1080, &[0x53, 0xef], known("an ext2, ext3 or ext4 file system")),
        (8 * MIB - 512, b"EFI PART", known("a GPT partition table")),
        (
            700_000,
            &[1],
            ImageErrorReason::HoldsOtherData(ExistingData::UnknownData { at: 700_000 }),
        ),
        (
            8 * MIB - 1,
            &[1],
            ImageErrorReason::HoldsOtherData(ExistingData::UnknownData { at: 8 * MIB - 1 }),
        ),
        (0, b"WINDROSE LABEL\r\n?", ImageErrorReason::BothLabelsDamaged),
    ];
    for (at, bytes, expected) in cases {
        with_core(|host, core| async move {
            let disk = host.add_disk(IMAGE, DiskSetup::device(8 * MIB));
            disk.write_durable(at, bytes);
            disk.write_durable(4 * MIB, &[7; 4096]);
            let how = CreateImageOptions { size_bytes: None, ..thin(0) };
            assert_eq!(reason(FlatImage::create(&core, image(), &how).await), expected);
            assert_eq!(disk.read_visible(at, bytes.len()), bytes, "nothing was touched");
            let used = FlatImage::open(&core, image(), &existing()).await;
            let expected = match expected {
                ImageErrorReason::HoldsOtherData(what) => ImageErrorReason::NotAVolume(what),
                other => other,
            };
            assert_eq!(reason(used), expected);
            let forced = CreateImageOptions { overwrite: true, ..how };
            let file = Rc::new(FlatImage::create(&core, image(), &forced).await.unwrap());
            let c = client(&core, &file);
            assert!(c.read(0, 2048).await.unwrap().to_vec().iter().all(|&b| b == 0));
            assert_eq!(c.read(3 * 2048, 1).await.unwrap().to_vec(), [0; 512], "old contents");
            assert_eq!(disk.read_durable(1080, 2), [0, 0]);
        });
    }
}

#[test]
fn a_volume_is_not_overwritten_unless_forced() {
    with_core(|_, core| async move {
        drop(FlatImage::create(&core, image(), &thin(MIB)).await.unwrap());
        let other = CreateImageOptions { volume_id: OTHER, ..thin(2 * MIB) };
        let refused = reason(FlatImage::create(&core, image(), &other).await);
        assert_eq!(refused, ImageErrorReason::HoldsVolume { volume: VOLUME });
        let forced = CreateImageOptions { overwrite: true, ..other };
        let file = FlatImage::create(&core, image(), &forced).await.unwrap();
        assert_eq!(essence(file.label()).0, OTHER);
        drop(file);
        let wanted = reason(FlatImage::open(&core, image(), &existing()).await);
        assert_eq!(wanted, ImageErrorReason::WrongVolume { found: OTHER, wanted: VOLUME });
        let deleted = reason(delete(&core, image(), VOLUME, (false, false), None).await);
        assert_eq!(deleted, ImageErrorReason::WrongVolume { found: OTHER, wanted: VOLUME });
        delete(&core, image(), VOLUME, (false, true), None).await.unwrap();
    });
}

#[test]
fn only_an_empty_file_may_become_an_image() {
    with_core(|host, core| async move {
        drop(core.open_disk(image(), OpenOptions::new().create(9 * MIB)).await.unwrap());
        assert_eq!(
            reason(FlatImage::open(&core, image(), &existing()).await),
            ImageErrorReason::NoLabel
        );
        host.disk(IMAGE).unwrap().write_durable(4 * MIB, &[1; 4096]);
        let disk = core.open_disk(image(), OpenOptions::new()).await.unwrap();
        disk.allocate(4 * MIB, 4096).await.unwrap();
        drop(disk);
        let refused = reason(FlatImage::create(&core, image(), &thin(MIB)).await);
        assert_eq!(
            refused,
            ImageErrorReason::HoldsOtherData(ExistingData::UnknownSpace { bytes: 4096 })
        );
        core.remove_file(image()).await.unwrap();
        drop(core.open_disk(image(), OpenOptions::new().create(9 * MIB)).await.unwrap());
        let unsized_ = CreateImageOptions { size_bytes: None, ..thin(0) };
        let refused = reason(FlatImage::create(&core, image(), &unsized_).await);
        assert_eq!(refused, ImageErrorReason::InvalidSize("a file needs a size"));
        let file = FlatImage::create(&core, image(), &thin(2 * MIB)).await.unwrap();
        assert_eq!(host.disk(IMAGE).unwrap().size(), 3 * MIB);
        drop(file);
    });
}

#[test]
fn a_torn_label_is_repaired_from_its_other_copy() {
    for (slot, other) in [(0, 1), (1, 0)] {
        for sector in 0..8 {
            with_core(|host, core| async move {
                let label = FlatImage::create(&core, image(), &thin(MIB)).await.unwrap().label();
                let disk = host.disk(IMAGE).unwrap();
                let at = SLOTS[slot] + sector * 512;
                let whole = disk.read_visible(SLOTS[slot], 4096);
                disk.write_durable(at, &[0xa5; 512]);
                let read_only = OpenImageOptions { read_only: true, ..existing() };
                drop(FlatImage::open(&core, image(), &read_only).await.unwrap());
                assert_ne!(disk.read_visible(SLOTS[slot], 4096), whole, "reading repairs nothing");
                let opened = FlatImage::open(&core, image(), &existing()).await.unwrap();
                assert_eq!(opened.label(), label);
                drop(opened);
                assert_eq!(disk.read_durable(SLOTS[slot], 4096), whole, "sector {sector}");
                disk.write_durable(at, &[0xa5; 512]);
                disk.write_durable(SLOTS[other] + 512, &[1]);
                let torn = reason(FlatImage::open(&core, image(), &existing()).await);
                assert_eq!(torn, ImageErrorReason::BothLabelsDamaged);
                let torn = reason(delete(&core, image(), VOLUME, (false, false), None).await);
                assert_eq!(torn, ImageErrorReason::BothLabelsDamaged);
            });
        }
    }
}

#[test]
fn a_foreign_format_is_not_repaired_away() {
    with_core(|host, core| async move {
        let disk = host.add_disk(IMAGE, DiskSetup::device(4 * MIB));
        let whole = CreateImageOptions { size_bytes: None, ..thin(0) };
        let file = Rc::new(FlatImage::create(&core, image(), &whole).await.unwrap());
        let c = client(&core, &file);
        let mut backup_table = vec![0; 512];
        backup_table[..8].copy_from_slice(b"EFI PART");
        c.write(c.dev().info().blocks - 1, &backup_table, true).await.unwrap();
        drop((c, file));
        disk.write_durable(0, &[0; 4096]);
        drop(
            FlatImage::open(&core, image(), &existing())
                .await
                .expect("what guests write is no matter"),
        );
        disk.write_durable(0, &[0; 4096]);
        disk.write_durable(1080, &[0x53, 0xef]);
        let what = ExistingData::KnownFormats(vec!["an ext2, ext3 or ext4 file system".to_owned()]);
        let refused = reason(FlatImage::open(&core, image(), &existing()).await);
        assert_eq!(refused, ImageErrorReason::Overwritten(what.clone()));
        assert_eq!(disk.read_visible(1080, 2), [0x53, 0xef]);
        let refused = reason(delete(&core, image(), VOLUME, (false, false), None).await);
        assert_eq!(refused, ImageErrorReason::Overwritten(what));
    });
}

#[test]
fn an_unreadable_label_copy_counts_as_damaged() {
    with_core(|host, core| async move {
        drop(FlatImage::create(&core, image(), &thin(MIB)).await.unwrap());
        let disk = host.disk(IMAGE).unwrap();
        let bad = |slot: u64| BadRange {
            bytes: slot..slot + 512,
            ops: FailingOps::Reads,
            duration: BadDuration::Rewritten,
        };
        disk.add_bad_range(bad(SLOTS[0]));
        drop(FlatImage::open(&core, image(), &existing()).await.unwrap());
        drop(FlatImage::open(&core, image(), &existing()).await.unwrap());
        disk.add_bad_range(bad(SLOTS[0]));
        disk.add_bad_range(bad(SLOTS[1]));
        let failed = reason(FlatImage::open(&core, image(), &existing()).await);
        assert!(
            matches!(failed, ImageErrorReason::Disk(e) if e.kind == DiskErrorKind::Media),
            "{failed}"
        );
    });
}

#[test]
fn a_label_from_the_future_is_refused_even_if_the_other_copy_is_known() {
    with_core(|host, core| async move {
        drop(FlatImage::create(&core, image(), &thin(MIB)).await.unwrap());
        let disk = host.disk(IMAGE).unwrap();
        let mut newer = disk.read_visible(SLOTS[1], 4096);
        newer[16] = 2;
        newer[24..28].fill(0);
        let checksum = wire::crc32c(&newer);
        newer[24..28].copy_from_slice(&checksum.to_le_bytes());
        disk.write_durable(SLOTS[1], &newer);
        let refused = reason(FlatImage::open(&core, image(), &existing()).await);
        assert_eq!(refused, ImageErrorReason::InvalidLabel(ImageLabelError::UnsupportedVersion(2)));
        let refused = reason(FlatImage::create(&core, image(), &thin(MIB)).await);
        assert_eq!(refused, ImageErrorReason::InvalidLabel(ImageLabelError::UnsupportedVersion(2)));
    });
}

#[test]
fn an_old_or_truncated_image_is_refused() {
    with_core(|host, core| async move {
        let file = FlatImage::create(&core, image(), &thin(MIB)).await.unwrap();
        let before = file.label().generation;
        file.grow(2 * MIB).await.unwrap();
        let seen = OpenImageOptions { min_generation: file.label().generation, ..existing() };
        assert!(file.label().generation > before);
        drop(file);
        drop(FlatImage::open(&core, image(), &seen).await.unwrap());
        let later = OpenImageOptions { min_generation: seen.min_generation + 1, ..seen };
        assert_eq!(
            reason(FlatImage::open(&core, image(), &later).await),
            ImageErrorReason::StaleCopy {
                found: seen.min_generation,
                wanted: seen.min_generation + 1
            }
        );
        for bytes in [3 * MIB - 4096, MIB, 600_000, 4096] {
            host.disk(IMAGE).unwrap().resize(bytes);
            let refused = reason(FlatImage::open(&core, image(), &seen).await);
            assert_eq!(refused, ImageErrorReason::Truncated { bytes, needed: 3 * MIB });
        }
    });
}

#[test]
fn a_file_that_shrinks_in_use_fails() {
    with_core(|host, core| async move {
        let file = Rc::new(FlatImage::create(&core, image(), &thin(2 * MIB)).await.unwrap());
        host.disk(IMAGE).unwrap().resize(2 * MIB);
        assert_eq!(
            reason(file.grow(4 * MIB).await),
            ImageErrorReason::Truncated { bytes: 2 * MIB, needed: 3 * MIB }
        );
        let c = client(&core, &file);
        assert_eq!(c.read(4000, 1).await.map(drop), Err(block::Error::Gone));
        assert_eq!(c.read(0, 1).await.map(drop), Err(block::Error::Gone));
    });
}

#[test]
fn a_device_must_be_large_enough() {
    for bytes in [0, 4096, MIB, 3 * MIB - 512] {
        with_core(|host, core| async move {
            host.add_disk(IMAGE, DiskSetup::device(bytes));
            let refused = reason(FlatImage::create(&core, image(), &thin(2 * MIB)).await);
            assert_eq!(refused, ImageErrorReason::TooSmall { bytes, needed: 3 * MIB });
            let whole = CreateImageOptions { size_bytes: None, ..thin(0) };
            let made = FlatImage::create(&core, image(), &whole).await;
            if bytes <= MIB {
                assert_eq!(reason(made), ImageErrorReason::TooSmall { bytes, needed: MIB + 512 });
            } else {
                assert_eq!(made.unwrap().label().data_bytes, bytes - MIB);
            }
        });
    }
}

#[test]
fn without_direct_io_the_error_names_buffered() {
    let mut setup = HostSetup::default();
    setup.new_file_setup.direct_io = false;
    succeed(1, setup, |_, host| async move {
        let core = core_of(&host).await;
        let refused = FlatImage::create(&core, image(), &thin(MIB)).await.unwrap_err();
        assert_eq!(refused.reason, ImageErrorReason::Open(OpenReason::NoDirectIo));
        assert!(refused.to_string().contains("--buffered"), "{refused}");
        let buffered = CreateImageOptions { allow_page_cache: true, ..thin(MIB) };
        drop(FlatImage::create(&core, image(), &buffered).await.unwrap());
        let refused = reason(FlatImage::open(&core, image(), &existing()).await);
        assert_eq!(refused, ImageErrorReason::Open(OpenReason::NoDirectIo));
        let buffered = OpenImageOptions { allow_page_cache: true, ..existing() };
        drop(FlatImage::open(&core, image(), &buffered).await.unwrap());
    });
}

#[test]
fn a_deleted_device_is_empty_and_reusable() {
    with_core(|host, core| async move {
        let disk = host.add_disk(IMAGE, DiskSetup::device(4 * MIB));
        let file = Rc::new(FlatImage::create(&core, image(), &thin(2 * MIB)).await.unwrap());
        client(&core, &file).write(0, &[9; 4096], true).await.unwrap();
        assert_eq!(reason(delete(&core, image(), VOLUME, (false, false), None).await), busy());
        drop(file);
        delete(&core, image(), VOLUME, (false, false), None).await.unwrap();
        assert_eq!(disk.read_visible(0, 4 << 20), vec![0; 4 << 20]);
        assert_eq!(
            reason(FlatImage::open(&core, image(), &existing()).await),
            ImageErrorReason::NoLabel
        );
        drop(FlatImage::create(&core, image(), &thin(2 * MIB)).await.unwrap());
    });
}

#[test]
fn thick_images_reserve_space_and_thin_ones_report_its_lack() {
    let setup = HostSetup { space_bytes: Some(2 * MIB), ..HostSetup::default() };
    succeed(1, setup, |_, host| async move {
        let core = core_of(&host).await;
        let full = CreateImageOptions { provisioning: Provisioning::Thick, ..thin(2 * MIB) };
        let refused = reason(FlatImage::create(&core, image(), &full).await);
        assert!(matches!(refused, ImageErrorReason::Disk(e) if e.kind == DiskErrorKind::NoSpace));
        assert!(host.disk(IMAGE).is_none(), "half-made");
        let small = CreateImageOptions { provisioning: Provisioning::Thick, ..thin(512 << 10) };
        let file = FlatImage::create(&core, image(), &small).await.unwrap();
        assert!(file.grow(3 * MIB).await.is_err());
        assert_eq!(file.label().data_bytes, 512 << 10);
        file.grow(640 << 10).await.expect("the space was given back");
        drop(file);
        delete(&core, image(), VOLUME, (false, false), None).await.unwrap();

        let file = Rc::new(FlatImage::create(&core, image(), &thin(8 * MIB)).await.unwrap());
        let c = client(&core, &file);
        let data = vec![1; 1 << 19];
        for i in 0..3 {
            c.write(i << 10, &data, false).await.unwrap();
        }
        assert_eq!(c.write(8192, &data, false).await, Err(block::Error::NoSpace));
        assert_eq!(c.zero(8192, 1024, false).await, Err(block::Error::NoSpace));
        c.zero(8192, 1024, true).await.expect("takes no space");
        // Freeing partial blocks within holes takes no space either.
        host.update_setup(|setup| setup.space_bytes = Some(host.space_used()));
        c.zero(8193, 1021, true).await.expect("takes no space");
        c.unmap(9217, 3).await.expect("takes no space");
        assert_eq!(c.zero(9217, 3, false).await, Err(block::Error::NoSpace));
        host.update_setup(|setup| setup.space_bytes = Some(2 * MIB));
        c.write(0, &data, true).await.expect("has its space");
        c.unmap(1 << 10, 1 << 10).await.unwrap();
        c.write(8192, &data, true).await.expect("there is space again");
        assert_eq!(c.read(8192, 1024).await.unwrap().to_vec(), data);
    });
}

#[test]
fn a_failed_growth_changes_nothing_and_can_be_repeated() {
    for mishap in [ScriptedFault::WriteError, ScriptedFault::SyncError] {
        with_core(|host, core| async move {
            let file = Rc::new(FlatImage::create(&core, image(), &thin(MIB)).await.unwrap());
            let c = client(&core, &file);
            assert!(matches!(reason(file.grow(MIB - 512).await), ImageErrorReason::InvalidSize(_)));
            assert!(matches!(reason(file.grow(MIB + 1).await), ImageErrorReason::InvalidSize(_)));
            file.grow(MIB).await.expect("nothing to do");
            host.disk(IMAGE).unwrap().script_fault(mishap);
            let failed = reason(file.grow(4 * MIB).await);
            assert!(matches!(failed, ImageErrorReason::Disk(_)), "{failed}");
            assert_eq!(c.dev().info().blocks, 2048);
            if mishap == ScriptedFault::SyncError {
                assert_eq!(c.flush().await, Err(block::Error::Gone));
                assert_eq!(c.read(0, 1).await.map(drop), Err(block::Error::Gone));
            } else {
                file.grow(2 * MIB).await.unwrap();
                assert_eq!(file.label().generation, 4, "a number is not used twice");
                c.write(4095, &[1; 512], true).await.unwrap();
            }
            drop((c, file));
            let again = FlatImage::open(&core, image(), &existing()).await.unwrap();
            let size = again.label().data_bytes;
            assert!(
                size == 4 * MIB
                    || size == if mishap == ScriptedFault::SyncError { MIB } else { 2 * MIB }
            );
        });
    }
}

#[test]
fn old_contents_past_the_end_never_show() {
    with_core(|host, core| async move {
        let file = Rc::new(FlatImage::create(&core, image(), &thin(MIB + 512)).await.unwrap());
        let disk = host.disk(IMAGE).unwrap();
        disk.resize(4 * MIB);
        disk.write_durable(2 * MIB + 512, &vec![3; (2 << 20) - 512]);
        file.grow(3 * MIB).await.unwrap();
        let c = client(&core, &file);
        for at in [2049, 2056, 4096, 6143] {
            assert_eq!(c.read(at, 1).await.unwrap().to_vec(), [0; 512], "block {at}");
        }
    });
}

/// What becomes of unsynced changes, how likely a block that is being written is damaged, and how.
type Fate = (UnsyncedFate, f64, TornDamage);

const FATES: [Fate; 6] = [
    (UnsyncedFate::Random, 1.0, TornDamage::Mixed { bytes: 512 }),
    (UnsyncedFate::Random, 0.0, TornDamage::Garbage),
    (UnsyncedFate::Lost, 0.0, TornDamage::Garbage),
    (UnsyncedFate::Kept, 0.0, TornDamage::Garbage),
    (UnsyncedFate::Random, 1.0, TornDamage::Garbage),
    (UnsyncedFate::Random, 1.0, TornDamage::Unreadable),
];

/// How often a moment is tried: more often if the result is random.
fn rounds(fate: Fate) -> u64 {
    if fate.0 == UnsyncedFate::Random { 4 } else { 1 }
}

/// Power fails at any moment of a creation: afterwards there is the image, or nothing, or leftovers
/// that a creation without force replaces.
#[test]
fn a_creation_survives_a_crash_at_any_point() {
    let full = CreateImageOptions { provisioning: Provisioning::Thick, ..thin(4 * MIB) };
    let whole = CreateImageOptions { size_bytes: None, ..thin(0) };
    let device = DiskSetup::device(2 * MIB);
    let file = DiskSetup::file(0);
    for (disk, how) in [(&file, thin(MIB)), (&file, full), (&device, whole)] {
        for fate in FATES {
            let (mut ms, mut finished) = (0, false);
            while !finished {
                ms += 1;
                for round in 0..rounds(fate) {
                    finished = creation_is_cut_off(ms, disk, how, fate, round);
                }
                assert!(ms < 200, "creation never ends");
            }
            assert!(ms > 6, "it took {ms} ms only");
        }
    }
}

fn creation_is_cut_off(
    ms: u64,
    disk: &DiskSetup,
    how: CreateImageOptions,
    fate: Fate,
    round: u64,
) -> bool {
    let mut setup = punctual(disk);
    (setup.new_file_setup.faults.unsynced, setup.new_file_setup.faults.torn) = (fate.0, fate.1);
    setup.new_file_setup.faults.torn_damage = fate.2;
    let on_device = disk.kind == rt::disk::DiskKind::BlockDevice;
    let finished = std::cell::Cell::new(false);
    let (done, files) = (&finished, setup.new_file_setup.clone());
    let scenario = |_, host: Host| async move {
        if on_device {
            host.add_disk(IMAGE, files);
        }
        let creation = host.run(move |core| async move {
            drop(FlatImage::create(&core, image(), &how).await.unwrap());
        });
        tokio::time::sleep(Duration::from_micros(ms * 1000 - 500)).await;
        host.power_cut();
        done.set(creation.join().await.is_some());
        let core = core_of(&host).await;
        let opened = FlatImage::open(&core, image(), &existing()).await;
        match opened.map_err(|e| e.reason) {
            Ok(file) => assert_eq!(essence(file.label()).1, how.size_bytes.unwrap_or(MIB)),
            Err(e) => {
                assert!(!done.get(), "created and gone: {e}");
                let harmless = matches!(
                    e,
                    ImageErrorReason::CreationUnfinished
                        | ImageErrorReason::NoLabel
                        | ImageErrorReason::Open(OpenReason::NotFound)
                );
                let damaged = fate.1 > 0.0;
                assert!(harmless || damaged, "{e}");
                if on_device && harmless && !matches!(fate.2, TornDamage::Unreadable) {
                    a_file_system_since_then_is_kept(&host, &core, how).await;
                }
                // If blocks are damaged, what was there before is unknown: that takes force.
                let force = !harmless && damaged;
                let again = FlatImage::create(
                    &core,
                    image(),
                    &CreateImageOptions { overwrite: force, ..how },
                )
                .await;
                drop(again.unwrap());
            }
        }
    };
    let seed = ms * 100 + round;
    run_scenario(seed, setup, scenario).result.unwrap_or_else(|e| panic!("{ms} ms, {fate:?}: {e}"));
    finished.get()
}

/// A file system is made after an interrupted creation: it is not taken for a leftover of the
/// creation.
async fn a_file_system_since_then_is_kept(host: &Host, core: &Core, how: CreateImageOptions) {
    let disk = host.disk(IMAGE).unwrap();
    // The magic of ext4 lies after the fields of a label.
    disk.write_durable(1080, &[0x53, 0xef]);
    let refused = FlatImage::create(core, image(), &how).await.unwrap_err().reason;
    assert!(
        matches!(
            refused,
            ImageErrorReason::HoldsOtherData(_) | ImageErrorReason::BothLabelsDamaged
        ),
        "{refused}"
    );
    disk.write_durable(1080, &[0, 0]);
}

/// Power fails at any moment of a growth: the image opens with its old or its new size, and with
/// its data.
#[test]
fn a_growth_survives_a_crash_at_any_point() {
    for full in [false, true] {
        for fate in FATES {
            let (mut ms, mut finished) = (0, false);
            while !finished {
                ms += 1;
                for round in 0..rounds(fate) {
                    finished = growth_is_cut_off(ms, full, fate, round);
                }
                assert!(ms < 100, "growth never ends");
            }
            assert!(ms > 4, "it took {ms} ms only");
        }
    }
}

fn growth_is_cut_off(ms: u64, full: bool, fate: Fate, round: u64) -> bool {
    let mut setup = punctual(&DiskSetup::file(0));
    (setup.new_file_setup.faults.unsynced, setup.new_file_setup.faults.torn) = (fate.0, fate.1);
    setup.new_file_setup.faults.torn_damage = fate.2;
    let provisioning = if full { Provisioning::Thick } else { Provisioning::Thin };
    let how = CreateImageOptions { provisioning, ..thin(MIB) };
    let finished = std::cell::Cell::new(false);
    let done = &finished;
    let scenario = |_, host: Host| async move {
        let core = core_of(&host).await;
        let file = Rc::new(FlatImage::create(&core, image(), &how).await.unwrap());
        let c = client(&core, &file);
        c.write(2047, &[5; 512], true).await.unwrap();
        drop(c);
        let growth = host.run(move |_| async move { file.grow(3 * MIB).await.unwrap() });
        tokio::time::sleep(Duration::from_micros(ms * 1000 - 500)).await;
        host.power_cut();
        done.set(growth.join().await.is_some());
        let core = core_of(&host).await;
        let file = Rc::new(FlatImage::open(&core, image(), &existing()).await.unwrap());
        let size = file.label().data_bytes;
        assert!(size == 3 * MIB || size == MIB && !done.get(), "{size}");
        let c = client(&core, &file);
        assert_eq!(c.read(2047, 1).await.unwrap().to_vec(), [5; 512]);
        file.grow(4 * MIB).await.unwrap();
        for at in [2048, 6143, 8191] {
            assert_eq!(c.read(at, 1).await.unwrap().to_vec(), [0; 512]);
        }
        drop((c, file));
        delete(&core, image(), VOLUME, (false, false), None).await.unwrap();
    };
    let seed = ms * 100 + round;
    run_scenario(seed, setup, scenario).result.unwrap_or_else(|e| panic!("{ms} ms, {fate:?}: {e}"));
    finished.get()
}

/// Power fails at any moment of a deletion on a device: the image is complete, or gone, or the
/// leftovers of its label take force.
#[test]
fn a_deletion_survives_a_crash_at_any_point() {
    for fate in FATES {
        for ms in 1..12 {
            for round in 0..rounds(fate).min(2) {
                deletion_is_cut_off(ms, fate, round);
            }
        }
    }
}

fn deletion_is_cut_off(ms: u64, fate: Fate, round: u64) {
    let mut faults = punctual_faults();
    (faults.unsynced, faults.torn, faults.torn_damage) = fate;
    let device = DiskSetup::device(2 * MIB).faults(faults);
    let scenario = |_, host: Host| async move {
        let disk = host.add_disk(IMAGE, device);
        let core = core_of(&host).await;
        let file = Rc::new(FlatImage::create(&core, image(), &thin(MIB)).await.unwrap());
        client(&core, &file).write(9, &[5; 512], true).await.unwrap();
        drop(file);
        let deletion = host.run(move |core| async move {
            delete(&core, image(), VOLUME, (false, false), None).await.unwrap();
        });
        tokio::time::sleep(Duration::from_micros(ms * 1000 - 500)).await;
        host.power_cut();
        let finished = deletion.join().await.is_some();
        let core = core_of(&host).await;
        match FlatImage::open(&core, image(), &existing()).await.map_err(|e| e.reason) {
            Ok(file) => {
                assert!(!finished);
                let c = client(&core, &Rc::new(file));
                assert_eq!(c.read(9, 1).await.unwrap().to_vec(), [5; 512]);
            }
            Err(ImageErrorReason::NoLabel | ImageErrorReason::NotAVolume(_)) => {
                assert!(fate.1 > 0.0 || disk.read_visible(0, 4096).iter().all(|&b| b == 0));
            }
            Err(e) => {
                let torn =
                    matches!(e, ImageErrorReason::BothLabelsDamaged | ImageErrorReason::Disk(_));
                assert!(torn && !finished && fate.1 > 0.0, "{e}");
            }
        }
        delete(&core, image(), VOLUME, (false, true), None).await.unwrap();
        let gone = FlatImage::open(&core, image(), &existing()).await;
        assert_eq!(reason(gone), ImageErrorReason::NoLabel);
        drop(FlatImage::create(&core, image(), &thin(MIB)).await.unwrap());
    };
    let setup = punctual(&DiskSetup::file(0));
    let outcome = run_scenario(ms * 100 + round, setup, scenario);
    outcome.result.unwrap_or_else(|e| panic!("{ms} ms, {fate:?}: {e}"));
}
