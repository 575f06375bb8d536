//! What is refused on a real system: the error says why, and nothing is changed.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;

use disk::{ExistingData, ImageError, ImageErrorReason, Provisioning};
use image::{CreateImageOptions, FlatImage, OpenImageOptions, delete, inspect};
use rt::disk::{DiskErrorKind, OpenReason};
use rt::{Core, DiskEngine};
use testkit::TestDir;

use crate::common::{VOLUME, client, existing, on_core, thin};
use testkit::system::{Loop, Mount, program, text};

const MIB: u64 = 1 << 20;

/// Environment variable that names the image which a child process holds open.
const TO_HOLD: &str = "WINDROSE_TEST_HOLD";

/// A file of `bytes` and a block device over it, with these options of `losetup`.
fn device(dir: &TestDir, bytes: u64, options: &[&str]) -> Option<(PathBuf, Loop)> {
    let backing = dir.file("backing");
    if !backing.exists() {
        std::fs::File::create(&backing).unwrap().set_len(bytes).unwrap();
    }
    let device = Loop::new(&backing, options);
    if device.is_none() {
        println!("skipped: no right to make a loop device");
    }
    device.map(|device| (backing, device))
}

fn reason<T>(result: Result<T, ImageError>) -> ImageErrorReason {
    result.err().expect("must be refused").reason
}

/// Every way to use `path` is refused for `why`.
async fn all_refuse(core: &Core, path: &Path, why: OpenReason) {
    let why = ImageErrorReason::Open(why);
    let forced = CreateImageOptions { overwrite: true, ..thin(MIB) };
    assert_eq!(reason(FlatImage::create(core, path, &forced).await), why);
    assert_eq!(reason(FlatImage::open(core, path, &existing()).await), why);
    assert_eq!(reason(delete(core, path, VOLUME, (false, true), None).await), why);
}

/// Plays two roles: a child process that holds an image until it is killed, and the parent.
#[test]
fn an_image_open_in_another_process_is_busy_until_it_ends() {
    if let Some(path) = std::env::var_os(TO_HOLD) {
        on_core(DiskEngine::Auto, |core| async move {
            let _held = FlatImage::open(&core, path.as_ref(), &existing()).await.unwrap();
            println!("\nheld");
            // Until the parent kills this process or ends.
            let _ = std::io::stdin().read(&mut [0]);
        });
        return;
    }
    let dir = TestDir::on_disk();
    let mut images = vec![dir.file("image")];
    let device = device(&dir, 8 * MIB, &[]);
    images.extend(device.as_ref().map(|(_, device)| device.path().to_owned()));
    on_core(DiskEngine::Auto, move |core| async move {
        for path in &images {
            drop(FlatImage::create(&core, path, &thin(MIB)).await.unwrap());
            let mut child = hold(path);
            all_refuse(&core, path, OpenReason::Busy).await;
            let read = inspect(&core, path, false).await;
            assert_eq!(reason(read), ImageErrorReason::Open(OpenReason::Busy));
            child.kill().unwrap();
            FlatImage::open(&core, path, &existing())
                .await
                .expect("a killed process holds nothing");
            child.wait().unwrap();
        }
    });
}

/// Starts this test again as a process that holds `path`, and waits until it does.
fn hold(path: &Path) -> std::process::Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "refusals::an_image_open_in_another_process_is_busy_until_it_ends"])
        .arg("--nocapture")
        .env(TO_HOLD, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let held = lines.map_while(Result::ok).any(|line| line == "held");
    assert!(held, "the child did not come to hold {}", path.display());
    child
}

#[test]
fn a_mounted_device_is_in_use() {
    let dir = TestDir::in_memory();
    let Some((_, device)) = device(&dir, 16 * MIB, &[]) else { return };
    let made = program("mkfs.ext4", &["-q", text(device.path())]);
    let Some(mount) = made.and_then(|_| Mount::new(&[text(device.path())])) else {
        println!("skipped: mkfs.ext4 is not installed, or no right to mount");
        return;
    };
    let path = device.path().to_owned();
    on_core(DiskEngine::Auto, move |core| async move {
        all_refuse(&core, &path, OpenReason::Busy).await;
        std::fs::write(mount.file("works"), "still").unwrap();
    });
}

#[test]
fn existing_formats_on_a_device_are_named_and_kept() {
    let dir = TestDir::in_memory();
    let cases: [(&[&str], &str); 4] = [
        (&["mkfs.ext4", "-q"], "an ext2, ext3 or ext4 file system"),
        (&["mkfs.xfs", "-q"], "an XFS file system"),
        (&["mkswap"], "swap space"),
        (&["mkfs.btrfs", "-q"], "a btrfs file system"),
    ];
    let Some((backing, device)) = device(&dir, 320 * MIB, &[]) else { return };
    for (format, what) in cases {
        let path = device.path().to_owned();
        if program(format[0], &[&format[1..], &[text(&path)]].concat()).is_none() {
            println!("skipped: {} is not installed", format[0]);
            continue;
        }
        let before = checksum(&backing);
        on_core(DiskEngine::Auto, move |core| async move {
            let refused = FlatImage::create(&core, &path, &thin(MIB)).await.unwrap_err();
            let ImageErrorReason::HoldsOtherData(ExistingData::KnownFormats(names)) =
                &refused.reason
            else {
                panic!("{refused}")
            };
            // libblkid may find more, such as names.
            assert!(names.iter().any(|name| name.starts_with(what)), "{refused}");
            assert!(refused.to_string().contains("--force"), "{refused}");
            let foreign = ImageErrorReason::NotAVolume(ExistingData::KnownFormats(names.clone()));
            assert_eq!(reason(FlatImage::open(&core, &path, &existing()).await), foreign);
            assert_eq!(reason(inspect(&core, &path, false).await), foreign);
            assert_eq!(reason(delete(&core, &path, VOLUME, (false, false), None).await), foreign);
        });
        assert_eq!(checksum(&backing), before, "{what}: nothing was changed");
        let path = device.path().to_owned();
        on_core(DiskEngine::Auto, move |core| async move {
            let forced = CreateImageOptions { overwrite: true, ..thin(MIB) };
            drop(FlatImage::create(&core, &path, &forced).await.unwrap());
            delete(&core, &path, VOLUME, (false, false), None).await.unwrap();
            assert_eq!(
                reason(FlatImage::open(&core, &path, &existing()).await),
                ImageErrorReason::NoLabel
            );
        });
    }
}

/// Checksum of a whole file.
fn checksum(path: &Path) -> u32 {
    wire::crc32c(&std::fs::read(path).unwrap())
}

#[test]
fn a_write_protected_device_can_only_be_read() {
    let dir = TestDir::in_memory();
    let Some((backing, writable)) = device(&dir, 8 * MIB, &[]) else { return };
    let path = writable.path().to_owned();
    on_core(DiskEngine::Auto, |core| async move {
        drop(FlatImage::create(&core, &path, &thin(MIB)).await.unwrap());
    });
    drop(writable);
    let Some((_, protected)) = device(&dir, 0, &["--read-only"]) else { return };
    let (path, before) = (protected.path().to_owned(), checksum(&backing));
    on_core(DiskEngine::Auto, |core| async move {
        all_refuse(&core, &path, OpenReason::ReadOnly).await;
        let e = FlatImage::open(&core, &path, &existing()).await.unwrap_err().to_string();
        assert!(e.ends_with("read-only: it cannot be written"), "{e}");
        assert_eq!(inspect(&core, &path, false).await.unwrap().volume_id, VOLUME);
        let read_only = OpenImageOptions { read_only: true, ..existing() };
        let file = Rc::new(FlatImage::open(&core, &path, &read_only).await.unwrap());
        let c = client(&core, &file);
        assert_eq!(c.read(0, 1).await.unwrap().to_vec(), [0; 512]);
        assert_eq!(c.write(0, &[1; 512], false).await, Err(block::Error::ReadOnly));
        assert_eq!(c.unmap(0, 2048).await, Err(block::Error::ReadOnly));
    });
    assert_eq!(checksum(&backing), before);
}

#[test]
fn sectors_above_4_kib_are_refused() {
    let dir = TestDir::in_memory();
    let Some((_, device)) = device(&dir, 8 * MIB, &["--sector-size", "16384"]) else { return };
    let path = device.path().to_owned();
    on_core(DiskEngine::Auto, |core| async move {
        all_refuse(&core, &path, OpenReason::BlocksTooLarge(16384)).await;
        let e = FlatImage::open(&core, &path, &existing()).await.unwrap_err().to_string();
        assert!(e.contains("blocks of 16384 bytes"), "{e}");
    });
}

#[test]
fn a_read_only_file_system_is_named() {
    let Some(mount) = Mount::memory("8m") else {
        println!("skipped: no right to mount a file system");
        return;
    };
    let path = mount.file("image");
    on_core(DiskEngine::Auto, move |core| async move {
        drop(FlatImage::create(&core, &path, &thin(MIB)).await.unwrap());
        program("mount", &["-o", "remount,ro", text(path.parent().unwrap())]).unwrap();
        all_refuse(&core, &path, OpenReason::ReadOnly).await;
        let new = FlatImage::create(&core, &path.with_extension("new"), &thin(MIB)).await;
        assert_eq!(reason(new), ImageErrorReason::Open(OpenReason::ReadOnly));
        assert_eq!(inspect(&core, &path, false).await.unwrap().volume_id, VOLUME);
        drop(mount);
    });
}

/// ext4 that journals data has no direct I/O, though it accepts the flag.
#[test]
fn a_file_system_without_direct_io_needs_the_flag() {
    let dir = TestDir::in_memory();
    let Some((_, device)) = device(&dir, 64 * MIB, &[]) else { return };
    let made = program("mkfs.ext4", &["-q", text(device.path())]);
    let journal = ["-o", "data=journal", text(device.path())];
    let Some(mount) = made.and_then(|_| Mount::new(&journal)) else {
        println!("skipped: mkfs.ext4 is not installed, or no right to mount");
        return;
    };
    on_core(DiskEngine::Auto, move |core| async move {
        let path = mount.file("image");
        let refused = FlatImage::create(&core, &path, &thin(MIB)).await.unwrap_err();
        assert_eq!(refused.reason, ImageErrorReason::Open(OpenReason::NoDirectIo));
        assert!(refused.to_string().contains("--buffered"), "{refused}");
        assert!(!path.exists(), "nothing is left behind");
        let buffered = CreateImageOptions { allow_page_cache: true, ..thin(MIB) };
        let file = Rc::new(FlatImage::create(&core, &path, &buffered).await.unwrap());
        let c = client(&core, &file);
        c.write(7, &[7; 512], true).await.unwrap();
        assert_eq!(c.read(7, 1).await.unwrap().to_vec(), [7; 512]);
        drop((c, file));
        let refused = FlatImage::open(&core, &path, &existing()).await.unwrap_err();
        assert_eq!(refused.reason, ImageErrorReason::Open(OpenReason::NoDirectIo));
    });
}

/// On a full file system, on disk and in memory: failed operations leave no trace, old data are
/// intact, and freed space can be used.
#[test]
fn a_full_file_system_costs_no_data() {
    let dir = TestDir::in_memory();
    let device = device(&dir, 32 * MIB, &[]);
    let on_disk = device.as_ref().and_then(|(_, device)| {
        program("mkfs.ext4", &["-q", "-m", "0", text(device.path())])?;
        Mount::new(&[text(device.path())])
    });
    for mount in [on_disk, Mount::memory("24m")] {
        let Some(mount) = mount else {
            println!("skipped: no right to mount a file system");
            continue;
        };
        on_core(DiskEngine::Auto, move |core| async move { fill_up(&core, &mount).await });
    }
}

async fn fill_up(core: &Core, mount: &Mount) {
    let no_space = |e: ImageError| match e.reason {
        ImageErrorReason::Disk(e) => assert_eq!(e.kind, DiskErrorKind::NoSpace),
        other => panic!("{other}"),
    };
    let path = mount.file("image");
    let full = CreateImageOptions { provisioning: Provisioning::Thick, ..thin(64 * MIB) };
    no_space(FlatImage::create(core, &path, &full).await.unwrap_err());
    assert!(!path.exists());
    std::fs::File::create(&path).unwrap();
    no_space(FlatImage::create(core, &path, &full).await.unwrap_err());
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "the space is given back");

    let small = CreateImageOptions { size_bytes: Some(4 * MIB), ..full };
    let other = Rc::new(FlatImage::create(core, &path, &small).await.unwrap());
    no_space(other.grow(64 * MIB).await.unwrap_err());
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 5 * MIB, "as long as it was");

    let thin_path = mount.file("thin");
    let file = Rc::new(FlatImage::create(core, &thin_path, &thin(64 * MIB)).await.unwrap());
    let c = client(core, &file);
    let data = vec![1; 1 << 20];
    let mut written = 0;
    let failed = loop {
        match c.write(written * 2048, &data, false).await {
            Ok(()) => written += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(failed, block::Error::NoSpace);
    assert!((4..32).contains(&written), "{written} MiB");
    assert_eq!(c.zero(40 * 2048, 20 * 2048, false).await, Err(block::Error::NoSpace));
    let owner = client(core, &other);
    owner.write(0, &[3; 4096], true).await.expect("a full image has its space");
    owner.unmap(0, 8192).await.expect("and keeps it");
    owner.write(4096, &data, true).await.expect("whatever happens around it");
    for i in 0..written {
        assert!(c.read(i * 2048, 2048).await.unwrap().to_vec() == data, "MiB {i}");
        c.write(i * 2048, &data, false).await.expect("there is space behind it");
    }
    c.flush().await.unwrap();
    c.unmap(0, 2048 * 2).await.unwrap();
    c.flush().await.unwrap();
    c.write(50 * 2048, &data, true).await.expect("what was freed can be used");
}
