//! Images whose disks may not have kept what they had completed, though the machine was not booted since.
//!
//! After a sync that has failed, the system has forgotten what it could not write, and only the process that asked
//! knows it. Should it end, the image must not be taken for one that has been through nothing (RFD 0010, attack 77):
//! so it is noted beside the node's own records, which need not be on that disk.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// The images that are not trusted, by name: an empty file for each. Calls wait for the disk of the data directory.
#[derive(Debug)]
pub(super) struct Distrust {
    directory: PathBuf,
}

impl Distrust {
    /// Those noted in `data_dir`.
    pub(super) fn of(data_dir: &Path) -> Self {
        Self { directory: data_dir.join("distrusted-images") }
    }

    /// Notes `image`, durably.
    pub(super) fn note(&self, image: Uuid) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        File::create(self.path(image))?.sync_all()?;
        self.sync()?;
        // The directory itself may be new.
        self.directory.parent().map_or(Ok(()), sync)
    }

    /// Whether `image` is noted. What cannot be found out counts as noted: then somebody else leads, if there is
    /// anybody.
    pub(super) fn has(&self, image: Uuid) -> bool {
        self.path(image).try_exists().unwrap_or(true)
    }

    /// The image's own log says it from now on.
    pub(super) fn forget(&self, image: Uuid) -> io::Result<()> {
        match fs::remove_file(self.path(image)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
            Ok(()) => self.sync(),
        }
    }

    fn path(&self, image: Uuid) -> PathBuf {
        self.directory.join(image.to_string())
    }

    fn sync(&self) -> io::Result<()> {
        sync(&self.directory)
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_noted_until_it_is_forgotten() {
        let data_dir = tempfile::tempdir().unwrap();
        let (one, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let distrust = Distrust::of(data_dir.path());
        assert!(!distrust.has(one));
        distrust.forget(one).unwrap();
        distrust.note(one).unwrap();
        distrust.note(one).unwrap();
        // Another process of the node finds it.
        let distrust = Distrust::of(data_dir.path());
        assert!(distrust.has(one) && !distrust.has(other));
        distrust.forget(one).unwrap();
        assert!(!distrust.has(one));
    }

    #[test]
    fn what_cannot_be_found_out_counts_as_noted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let distrust = Distrust::of(file.path());
        assert!(distrust.has(Uuid::from_u128(1)));
        distrust.note(Uuid::from_u128(1)).unwrap_err();
    }
}
