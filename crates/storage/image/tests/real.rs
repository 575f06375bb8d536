//! Images in real files, checked by what the file system reports.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::rc::Rc;

use disk::{ExistingData, ImageErrorReason, Provisioning};
use image::{CreateImageOptions, FlatImage, delete, inspect};
use rt::DiskEngine;
use rt::disk::OpenReason;
use testkit::TestDir;

use crate::common::{VOLUME, client, existing, on_core, thin};

const MIB: u64 = 1 << 20;

fn space(path: &PathBuf) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn space_is_allocated_freed_and_kept() {
    for dir in [TestDir::on_disk, TestDir::in_memory] {
        on_core(DiskEngine::Auto, move |core| async move {
            let dir = dir();
            let path = dir.file("thin");
            let file = Rc::new(FlatImage::create(&core, &path, &thin(64 * MIB)).await.unwrap());
            assert!(space(&path) < MIB);
            let c = client(&core, &file);
            let data = vec![7; 1 << 20];
            for i in 0..8 {
                c.write(i * 2048, &data, false).await.unwrap();
            }
            c.flush().await.unwrap();
            assert!(space(&path) >= 8 * MIB);
            c.unmap(0, 6 * 2048).await.unwrap();
            c.zero(6 * 2048, 2048, true).await.unwrap();
            c.flush().await.unwrap();
            assert!(space(&path) < 2 * MIB, "{}", space(&path));
            assert_eq!(c.read(7 * 2048, 2048).await.unwrap().to_vec(), data);
            file.grow(128 * MIB).await.unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().len(), 129 * MIB);
            drop((c, file));

            let path = dir.file("full");
            let how = CreateImageOptions { provisioning: Provisioning::Thick, ..thin(16 * MIB) };
            let file = Rc::new(FlatImage::create(&core, &path, &how).await.unwrap());
            assert!(space(&path) >= 17 * MIB);
            let c = client(&core, &file);
            c.unmap(0, 32768).await.unwrap();
            file.grow(20 * MIB).await.unwrap();
            assert!(space(&path) >= 21 * MIB);
            drop((c, file));
            assert_eq!(std::fs::metadata(&path).unwrap().len(), 21 * MIB);
        });
    }
}

#[test]
fn a_file_has_one_user_and_is_removed_when_deleted() {
    on_core(DiskEngine::Auto, |core| async move {
        let dir = TestDir::on_disk();
        let path = dir.file("image");
        let file = FlatImage::create(&core, &path, &thin(MIB)).await.unwrap();
        let held = FlatImage::open(&core, &path, &existing()).await.unwrap_err();
        assert_eq!(held.reason, ImageErrorReason::Open(OpenReason::Busy));
        assert!(delete(&core, &path, VOLUME, (false, false), None).await.is_err());
        let label = file.label();
        drop(file);
        assert_eq!(inspect(&core, &path, false).await.unwrap(), label);
        delete(&core, &path, VOLUME, (false, false), None).await.unwrap();
        assert!(!path.exists());
    });
}

#[test]
fn foreign_files_are_left_alone() {
    on_core(DiskEngine::Auto, |core| async move {
        let dir = TestDir::on_disk();
        let path = dir.file("image");
        for (bytes, what) in [
            (b"#!/bin/sh\n".to_vec(), ExistingData::UnknownData { at: 0 }),
            (
                [b"QFI\xfb".to_vec(), vec![0; 8188]].concat(),
                ExistingData::KnownFormats(vec!["a QEMU image (qcow2)".to_owned()]),
            ),
        ] {
            std::fs::write(&path, &bytes).unwrap();
            let refused = FlatImage::create(&core, &path, &thin(MIB)).await.unwrap_err();
            assert_eq!(refused.reason, ImageErrorReason::HoldsOtherData(what.clone()));
            let refused = FlatImage::open(&core, &path, &existing()).await.unwrap_err();
            assert_eq!(refused.reason, ImageErrorReason::NotAVolume(what));
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        let nowhere = dir.file("missing/image");
        let refused = FlatImage::create(&core, &nowhere, &thin(MIB)).await.unwrap_err();
        assert_eq!(refused.reason, ImageErrorReason::Open(OpenReason::NotFound));
        let refused = FlatImage::create(&core, &dir.file("."), &thin(MIB)).await.unwrap_err();
        assert_eq!(refused.reason, ImageErrorReason::Open(OpenReason::NotAFileOrBlockDevice));
    });
}

#[test]
fn a_size_beyond_the_file_system_leaves_nothing_behind() {
    on_core(DiskEngine::Auto, |core| async move {
        let dir = TestDir::on_disk();
        let path = dir.file("image");
        // Some file systems accept even this size; the others must not keep a part of it.
        match FlatImage::create(&core, &path, &thin(256 << 40)).await {
            Ok(file) => assert_eq!(file.label().data_bytes, 256 << 40),
            Err(e) => assert!(!path.exists(), "{e}"),
        }
    });
}
