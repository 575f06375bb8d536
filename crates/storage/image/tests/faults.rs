//! Every disk operation of a procedure fails once, in turn: what is left then opens, or says why
//! not, and can be used or removed.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use block::testing::TestClient;
use disk::{ImageError, ImageErrorReason, Provisioning};
use image::{CreateImageOptions, FlatImage, delete};
use rt::Core;
use rt::disk::{DiskErrorKind, DiskKind, OpenOptions, OpenReason};
use rt::sim::{DiskControl, DiskFaults, DiskSetup, Host, HostSetup};

use crate::common::{VOLUME, client, core_of, existing, succeed, thin};

const IMAGE: &str = "/images/volume";
const MIB: u64 = 1 << 20;

/// How disks fail: a medium error, a full file system.
const KINDS: [DiskErrorKind; 2] = [DiskErrorKind::Media, DiskErrorKind::NoSpace];

fn image() -> &'static Path {
    Path::new(IMAGE)
}

/// A faultless disk whose operation number `n` fails.
fn failing(n: u64, kind: DiskErrorKind) -> DiskFaults {
    DiskFaults { fail_after: Some((n, kind)), ..DiskFaults::default() }
}

/// Plays `procedure` with its `n`th disk operation failing, for every `n` until none fails; it
/// returns whether one did. Returns how many there were.
fn one_after_the_other(procedure: impl Fn(u64) -> bool) -> u64 {
    (0..200).find(|&n| !procedure(n)).expect("the procedure ends")
}

/// Plays a scenario that returns whether the fault struck.
fn strikes<Fut: Future<Output = bool>>(
    seed: u64,
    setup: HostSetup,
    scenario: impl FnOnce(Host, Core) -> Fut,
) -> bool {
    let struck = Cell::new(false);
    let says = &struck;
    succeed(seed, setup, |_, host| async move {
        let core = core_of(&host).await;
        says.set(scenario(host, core).await);
    });
    struck.get()
}

/// Ends the faults; returns whether one has struck.
fn heal(disk: &DiskControl) -> bool {
    let struck = disk.faults().fail_after.is_none();
    disk.set_faults(DiskFaults::default());
    struck
}

fn full(bytes: u64) -> CreateImageOptions {
    CreateImageOptions { provisioning: Provisioning::Thick, ..thin(bytes) }
}

/// Checks that a procedure failed the way its disk did. A failed sync ends a disk.
fn check_reason(failed: &ImageError, kind: DiskErrorKind) {
    let expected = match failed.reason {
        ImageErrorReason::Disk(e) => e.kind == kind || e.kind == DiskErrorKind::Gone,
        // Zeroing goes through the data path, which reports block errors.
        ImageErrorReason::ZeroingFailed(e) => {
            matches!(e, block::Error::Unwritable { .. } | block::Error::NoSpace)
        }
        _ => false,
    };
    assert!(expected, "{failed}");
}

#[test]
fn a_new_file_is_complete_or_absent() {
    for how in [thin(3 * MIB), full(3 * MIB)] {
        for kind in KINDS {
            let count = one_after_the_other(|n| {
                let files = DiskSetup::file(0).faults(failing(n, kind));
                strikes(
                    n,
                    HostSetup { new_file_setup: files, ..HostSetup::default() },
                    |host, core| async move {
                        let made = FlatImage::create(&core, image(), &how).await;
                        match made {
                            Ok(_) => host.disk(IMAGE).unwrap().faults().fail_after.is_none(),
                            Err(e) => {
                                check_reason(&e, kind);
                                assert!(host.disk(IMAGE).is_none(), "operation {n}: {e}");
                                assert_eq!(host.space_used(), 0);
                                true
                            }
                        }
                    },
                )
            });
            assert!(count >= 10, "{count} operations");
        }
    }
}

#[test]
fn a_failed_creation_over_existing_data_can_be_repeated() {
    let whole = CreateImageOptions { size_bytes: None, ..thin(0) };
    let small = CreateImageOptions { keep_contents: true, ..thin(MIB) };
    for how in [thin(3 * MIB), full(3 * MIB), whole, small] {
        for kind in KINDS {
            let count = one_after_the_other(|n| {
                strikes(n, HostSetup::default(), |host, core| {
                    creation_fails(host, core, n, kind, how)
                })
            });
            assert!(count >= 10, "{count} operations");
        }
    }
}

async fn creation_fails(
    host: Host,
    core: Core,
    n: u64,
    kind: DiskErrorKind,
    how: CreateImageOptions,
) -> bool {
    let on_device = how.size_bytes.is_none() || how.keep_contents;
    if on_device {
        host.add_disk(IMAGE, DiskSetup::device(4 * MIB));
    } else {
        drop(core.open_disk(image(), OpenOptions::new().create(0)).await.unwrap());
    }
    let disk = host.disk(IMAGE).unwrap();
    if how.keep_contents {
        disk.write_durable(MIB + 4096, &[7; 512]);
    }
    disk.set_faults(failing(n, kind));
    let made = FlatImage::create(&core, image(), &how).await;
    let struck = heal(&disk);
    if let Err(e) = &made {
        check_reason(e, kind);
        match FlatImage::open(&core, image(), &existing()).await {
            // A disk whose last sync failed cannot be cleaned up: the volume is found on it.
            Ok(file) => {
                assert!(
                    matches!(e.reason, ImageErrorReason::Disk(e) if e.kind == DiskErrorKind::Gone)
                );
                drop(file);
                let again = FlatImage::create(&core, image(), &how).await.unwrap_err();
                assert_eq!(again.reason, ImageErrorReason::HoldsVolume { volume: VOLUME });
                delete(&core, image(), VOLUME, (false, false), None).await.unwrap();
                return struck;
            }
            Err(e) => assert!(
                matches!(
                    e.reason,
                    ImageErrorReason::NoLabel | ImageErrorReason::CreationUnfinished
                ),
                "operation {n}: {e}"
            ),
        }
        drop(FlatImage::create(&core, image(), &how).await.unwrap());
    }
    drop(made);
    let file = Rc::new(FlatImage::open(&core, image(), &existing()).await.unwrap());
    let kept = client(&core, &file).read(8, 1).await.unwrap().to_vec();
    assert_eq!(kept, [if how.keep_contents { 7 } else { 0 }; 512], "operation {n}");
    struck
}

#[test]
fn a_failed_opening_can_be_repeated() {
    for torn_slot in [None, Some(0), Some(512 << 10)] {
        let count = one_after_the_other(|n| {
            strikes(n, HostSetup::default(), |host, core| async move {
                drop(FlatImage::create(&core, image(), &thin(MIB)).await.unwrap());
                let disk = host.disk(IMAGE).unwrap();
                if let Some(at) = torn_slot {
                    disk.write_durable(at + 100, &[0xff]);
                }
                disk.set_faults(failing(n, DiskErrorKind::Media));
                let opened = FlatImage::open(&core, image(), &existing()).await;
                let struck = heal(&disk);
                if let Err(e) = &opened {
                    let torn =
                        torn_slot.is_some() && e.reason == ImageErrorReason::BothLabelsDamaged;
                    let unreadable = matches!(e.reason, ImageErrorReason::Disk(_));
                    assert!(struck && (torn || unreadable), "{e}");
                }
                drop(opened);
                drop(FlatImage::open(&core, image(), &existing()).await.unwrap());
                struck
            })
        });
        assert!(count >= if torn_slot.is_some() { 5 } else { 3 }, "{count} operations");
    }
}

/// The image kinds with which the tests of growth and deletion begin.
const KEPT: DiskKind = DiskKind::File;
const GIVEN: DiskKind = DiskKind::BlockDevice;

async fn image_with_data(
    host: &Host,
    core: &Core,
    kind: DiskKind,
    how: CreateImageOptions,
) -> Rc<FlatImage> {
    if kind == GIVEN {
        host.add_disk(IMAGE, DiskSetup::device(9 * MIB));
    }
    let file = Rc::new(FlatImage::create(core, image(), &how).await.unwrap());
    let c = client(core, &file);
    c.write(2047, &[5; 512], true).await.unwrap();
    file
}

/// An image with its old or its new size, its data, and zeroes after them.
async fn check_grown(c: &TestClient) {
    let blocks = c.dev().info().blocks;
    assert!(blocks == 2048 || blocks == 3 * 2048, "{blocks}");
    assert_eq!(c.read(2047, 1).await.unwrap().to_vec(), [5; 512]);
    for at in (2048..blocks).step_by(1023) {
        assert_eq!(c.read(at, 1).await.unwrap().to_vec(), [0; 512], "block {at}");
    }
}

#[test]
fn a_failed_growth_leaves_the_old_size_and_can_be_repeated() {
    for (on, how) in [(KEPT, thin(MIB)), (KEPT, full(MIB)), (GIVEN, thin(MIB))] {
        for kind in KINDS {
            let count = one_after_the_other(|n| {
                strikes(n, HostSetup::default(), |host, core| async move {
                    let file = image_with_data(&host, &core, on, how).await;
                    let disk = host.disk(IMAGE).unwrap();
                    // Foreign data where the volume will grow to.
                    if on == KEPT {
                        disk.resize(2 * MIB + 100);
                    }
                    disk.write_durable(2 * MIB + 8, &[9; 50]);
                    disk.set_faults(failing(n, kind));
                    let grown = file.grow(3 * MIB).await;
                    let struck = heal(&disk);
                    let c = client(&core, &file);
                    match grown {
                        Ok(()) => assert_eq!(c.dev().info().blocks, 3 * 2048),
                        Err(e) => growth_failed(&e, kind, &file, &c).await,
                    }
                    drop((c, file));
                    let file = Rc::new(FlatImage::open(&core, image(), &existing()).await.unwrap());
                    let c = client(&core, &file);
                    check_grown(&c).await;
                    file.grow(3 * MIB).await.unwrap();
                    check_grown(&c).await;
                    c.write(3 * 2048 - 1, &[1; 512], true).await.unwrap();
                    struck
                })
            });
            assert!(count >= 6, "{count} operations");
        }
    }
}

/// The image keeps its old size and stays usable, unless a sync failed: that ends it.
async fn growth_failed(e: &ImageError, kind: DiskErrorKind, file: &Rc<FlatImage>, c: &TestClient) {
    check_reason(e, kind);
    assert_eq!(c.dev().info().blocks, 2048);
    if c.flush().await == Err(block::Error::Gone) {
        assert_eq!(c.read(0, 1).await.map(drop), Err(block::Error::Gone));
        return;
    }
    check_grown(c).await;
    file.grow(3 * MIB).await.unwrap();
    assert_eq!(c.dev().info().blocks, 3 * 2048);
    check_grown(c).await;
}

#[test]
fn a_failed_deletion_is_atomic_and_can_be_repeated() {
    for on in [KEPT, GIVEN] {
        let count = one_after_the_other(|n| {
            strikes(n, HostSetup::default(), |host, core| async move {
                drop(image_with_data(&host, &core, on, thin(MIB)).await);
                let disk = host.disk(IMAGE).unwrap();
                disk.set_faults(failing(n, DiskErrorKind::Media));
                let deleted = delete(&core, image(), VOLUME, (false, false), None).await;
                let struck = heal(&disk);
                if let Err(e) = &deleted {
                    check_reason(e, DiskErrorKind::Media);
                    match FlatImage::open(&core, image(), &existing()).await {
                        Ok(file) => {
                            let c = client(&core, &Rc::new(file));
                            assert_eq!(c.read(2047, 1).await.unwrap().to_vec(), [5; 512]);
                        }
                        Err(e) => assert!(
                            matches!(
                                e.reason,
                                ImageErrorReason::NoLabel | ImageErrorReason::NotAVolume(_)
                            ),
                            "operation {n}: {e}"
                        ),
                    }
                    delete(&core, image(), VOLUME, (false, true), None).await.unwrap();
                }
                let gone = FlatImage::open(&core, image(), &existing()).await.unwrap_err().reason;
                match on {
                    DiskKind::File => {
                        assert_eq!(gone, ImageErrorReason::Open(OpenReason::NotFound));
                    }
                    DiskKind::BlockDevice => assert_eq!(gone, ImageErrorReason::NoLabel),
                }
                struck
            })
        });
        assert!(count >= if on == GIVEN { 5 } else { 2 }, "{count} operations");
    }
}

#[test]
fn a_device_beyond_256_tib_is_refused_untouched() {
    succeed(1, HostSetup::default(), |_, host| async move {
        let disk = host.add_disk(IMAGE, DiskSetup::device(257 << 40));
        disk.write_durable(0, &[3; 512]);
        let core = core_of(&host).await;
        let whole = CreateImageOptions { size_bytes: None, overwrite: true, ..thin(0) };
        let refused = FlatImage::create(&core, image(), &whole).await.unwrap_err();
        assert_eq!(refused.reason, ImageErrorReason::InvalidSize("the size is above 256 TiB"));
        assert_eq!(disk.read_visible(0, 512), [3; 512]);
    });
}

#[test]
fn a_file_too_small_for_a_label_can_be_deleted_with_force() {
    for bytes in [4096, 600 << 10] {
        succeed(1, HostSetup::default(), |_, host| async move {
            let disk = host.add_disk(IMAGE, DiskSetup::device(bytes));
            disk.write_durable(0, &[3; 512]);
            let core = core_of(&host).await;
            let refused = delete(&core, image(), VOLUME, (false, false), None).await.unwrap_err();
            assert!(matches!(refused.reason, ImageErrorReason::NotAVolume(_)), "{refused}");
            assert_eq!(disk.read_visible(0, 512), [3; 512]);
            delete(&core, image(), VOLUME, (false, true), None).await.unwrap();
            assert_eq!(disk.read_visible(0, 512), [0; 512]);
        });
    }
}
