//! Other people's programs on a file that is a volume.

use std::path::Path;

use attach::fuse::ServeEnd;
use block::MemOptions;
use block::testing::Rng;
use rt::Core;
use tempfile::TempDir;
use testkit::{installed, skipped};

use crate::common::{Site, mounts};
use crate::cores::on_core;
use crate::tools::{outcome, tool};

const MIB: u64 = 1 << 20;

async fn site(core: &Core, bytes: u64, block_size: u32) -> Site {
    Site::new(core, MemOptions::new(block_size, bytes / u64::from(block_size))).await
}

/// Contents with holes between them.
fn image(path: &Path, bytes: u64) -> Vec<u8> {
    let mut rng = Rng::new(bytes);
    let mut data = vec![0; bytes as usize];
    for piece in data.chunks_mut(64 << 10) {
        if !rng.one_in(3) {
            piece.iter_mut().for_each(|byte| *byte = rng.u64() as u8);
        }
    }
    std::fs::write(path, &data).unwrap();
    data
}

#[test]
fn qemu_img_copies_compares_and_maps() {
    if !mounts() || !installed(&["qemu-img"]) {
        return;
    }
    on_core(async |core| {
        for (block_size, cache) in [(512, "writeback"), (4096, "none")] {
            let mut site = site(&core, 16 * MIB, block_size).await;
            let dir = TempDir::new().unwrap();
            let (file, copy) = (dir.path().join("image"), dir.path().join("copy"));
            let data = image(&file, 16 * MIB);
            let (file, copy) = (file.to_str().unwrap(), copy.to_str().unwrap());
            let path = site.path();
            let path = path.to_str().unwrap();
            let raw = ["-f", "raw", "-O", "raw", "-t", cache];
            tool(&core, "qemu-img", &[&["convert", "-n", "-W"][..], &raw, &[file, path]].concat())
                .await;
            tool(&core, "qemu-img", &["compare", "-f", "raw", "-F", "raw", file, path]).await;
            let map = tool(&core, "qemu-img", &["map", "-f", "raw", "--output=json", path]).await;
            assert!(map.contains("\"zero\": true") && map.contains("\"data\": true"), "{map}");
            tool(&core, "qemu-img", &["convert", "-f", "raw", "-O", "qcow2", path, copy]).await;
            tool(&core, "qemu-img", &["compare", "-F", "qcow2", "-f", "raw", path, copy]).await;
            assert!(site.aside(|path| std::fs::read(path).unwrap()).await == data);
            assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
        }
    });
}

#[test]
fn fio_verifies_what_it_writes() {
    if !mounts() || !installed(&["fio"]) {
        return;
    }
    on_core(async |core| {
        for (block_size, how) in [
            (512, ["--ioengine=psync", "--bsrange=700-70000", "--blockalign=700", "--fsync=64"]),
            (4096, ["--ioengine=psync", "--bsrange=512-256k", "--sync=dsync", "--numjobs=1"]),
            (512, ["--ioengine=libaio", "--bsrange=512-512k", "--direct=1", "--iodepth=32"]),
            (4096, ["--ioengine=io_uring", "--bs=4k", "--direct=1", "--iodepth=16"]),
        ] {
            let mut site = site(&core, 64 * MIB, block_size).await;
            let file = format!("--filename={}", site.path().display());
            let load = [
                "--name=verify",
                &file,
                "--rw=randwrite",
                "--size=64M",
                "--io_size=48M",
                "--verify=crc32c",
                "--verify_backlog=128",
                "--do_verify=1",
                "--verify_state_save=0",
                "--fallocate=none",
                "--allow_file_create=0",
            ];
            let out = tool(&core, "fio", &[&load[..], &how].concat()).await;
            assert!(out.contains("err= 0"), "{out}");
            assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
        }
    });
}

/// What the kernel would keep of it could be old: it is not lent to who would look there.
#[test]
fn the_file_is_not_shared_as_memory() {
    if !mounts() || !installed(&["fio"]) {
        return;
    }
    on_core(async |core| {
        let mut site = site(&core, 4 * MIB, 512).await;
        let file = format!("--filename={}", site.path().display());
        let load = ["--name=map", &file, "--ioengine=mmap", "--rw=write", "--bs=4k", "--size=4M"];
        let said = outcome(&core, "fio", &load).await;
        assert!(!said.status.success());
        let (out, err) = (said.stdout, said.stderr);
        let said = String::from_utf8_lossy(&[out, err].concat()).into_owned();
        assert!(said.contains("No such device"), "{said}");
        assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
    });
}

/// File systems on a loop device on the file: made, filled, trimmed, checked, and found again.
#[test]
fn a_loop_device_carries_file_systems() {
    const PROGRAMS: [&str; 4] = ["losetup", "mkfs.ext4", "mkfs.xfs", "fstrim"];
    if !mounts() || !installed(&PROGRAMS) {
        return;
    }
    on_core(async |core| {
        let works = outcome(&core, "losetup", &["-f"]).await.status.success();
        if !works {
            return skipped("there are no loop devices");
        }
        for (mkfs, block_size, direct) in
            [("mkfs.ext4", 512, "on"), ("mkfs.xfs", 512, "off"), ("mkfs.ext4", 4096, "on")]
        {
            let mut site = site(&core, 512 * MIB, block_size).await;
            let dir = TempDir::new().unwrap();
            let script = format!(
                "set -e; f={file}; m={dir}; \
                 l=$(losetup -f --show --direct-io={direct} -b {block_size} $f); \
                 trap 'umount $m 2>/dev/null || :; losetup -d $l' EXIT; \
                 {mkfs} -q $l; mount $l $m; \
                 head -c 50000000 /dev/urandom > $m/a; cp $m/a $m/b; sync; rm $m/b; fstrim $m; \
                 sum=$(sha256sum < $m/a); umount $m; losetup -d $l; trap - EXIT; \
                 l=$(losetup -f --show $f); trap 'umount $m 2>/dev/null || :; losetup -d $l' EXIT; \
                 mount $l $m; test \"$sum\" = \"$(sha256sum < $m/a)\"; umount $m",
                file = site.path().display(),
                dir = dir.path().display(),
            );
            tool(&core, "sh", &["-c", &script]).await;
            let used = site.mem.space_used();
            assert!((50_000_000..200 << 20).contains(&used), "{used}: it was trimmed");
            assert_eq!(site.stop().await, Ok(ServeEnd::Stopped));
        }
    });
}
