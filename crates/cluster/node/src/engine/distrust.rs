//! Images whose disks may not have kept what they had completed, though the machine was not booted since.
//!
//! After a sync that has failed, the system has forgotten what it could not write, and only the process that asked
//! knows it. Should it end, the image must not be taken for one that has been through nothing (RFD 0010, attack 77):
//! so it is noted beside the node's own records, which need not be on that disk.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::timeout;
use uuid::Uuid;

/// How long the data directory may take for an answer. It may be on the disk that fails.
const PATIENCE: Duration = Duration::from_secs(5);

/// The images that are not trusted, of all cores of a node.
#[derive(Clone, Debug)]
pub(super) struct Distrust {
    notes: Arc<Notes>,
    /// Those that this process knows of itself, whether or not they could be noted.
    known: Arc<Mutex<BTreeSet<Uuid>>>,
    /// Those that were closed and whose disks have operations under way still.
    at_work: Arc<Mutex<BTreeSet<Uuid>>>,
    /// One thread at a time waits for the directory's disk: other calls need threads as well.
    turn: Arc<tokio::sync::Mutex<()>>,
    patience: Duration,
}

impl Distrust {
    /// Those noted in `data_dir`.
    pub(super) fn of(data_dir: &Path) -> Self {
        let notes = Notes { directory: data_dir.join("distrusted-images") };
        Self {
            notes: Arc::new(notes),
            known: Arc::default(),
            at_work: Arc::default(),
            turn: Arc::default(),
            patience: PATIENCE,
        }
    }

    /// The disk of `image`, which was closed, has operations under way: they may reach it later than what comes next.
    pub(super) fn begins_work(&self, image: Uuid) {
        lock(&self.at_work).insert(image);
    }

    /// It has none any more.
    pub(super) fn ends_work(&self, image: Uuid) {
        lock(&self.at_work).remove(&image);
    }

    /// Whether it has.
    pub(super) fn is_at_work(&self, image: Uuid) -> bool {
        lock(&self.at_work).contains(&image)
    }

    /// Notes `image`, durably; says whether the data directory took it in time.
    pub(super) async fn note(&self, image: Uuid) -> bool {
        lock(&self.known).insert(image);
        let noted = self.ask(move |notes| notes.note(image)).await;
        if let Err(error) = &noted {
            let what = "it cannot be noted that an image has lost its disk";
            tracing::error!(%image, %error, "{what}: boot this machine before it is used again");
        }
        noted.is_ok()
    }

    /// Whether `image` is noted. What cannot be found out counts as noted: then somebody else leads, if there is
    /// anybody.
    pub(super) async fn has(&self, image: Uuid) -> bool {
        lock(&self.known).contains(&image)
            || self.ask(move |notes| notes.has(image)).await.unwrap_or(true)
    }

    /// Something else says it from now on, or the image is no more.
    ///
    /// # Errors
    /// What the data directory refuses; also that it takes too long.
    pub(super) async fn forget(&self, image: Uuid) -> io::Result<()> {
        self.ask(move |notes| notes.forget(image)).await?;
        lock(&self.known).remove(&image);
        Ok(())
    }

    async fn ask<T: Send + 'static>(
        &self,
        what: impl FnOnce(&Notes) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let asked = async {
            let turn = Arc::clone(&self.turn).lock_owned().await;
            let notes = Arc::clone(&self.notes);
            let asking = tokio::task::spawn_blocking(move || {
                let answer = what(&notes);
                drop(turn);
                answer
            });
            asking.await.map_err(io::Error::other)?
        };
        timeout(self.patience, asked).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

/// An empty file for each image, by its name. Calls wait for the disk of the data directory.
#[derive(Debug)]
struct Notes {
    directory: PathBuf,
}

impl Notes {
    fn note(&self, image: Uuid) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        File::create(self.path(image))?.sync_all()?;
        sync(&self.directory)?;
        // The directory itself may be new.
        self.directory.parent().map_or(Ok(()), sync)
    }

    fn has(&self, image: Uuid) -> io::Result<bool> {
        self.path(image).try_exists()
    }

    fn forget(&self, image: Uuid) -> io::Result<()> {
        match fs::remove_file(self.path(image)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
            Ok(()) => sync(&self.directory),
        }
    }

    fn path(&self, image: Uuid) -> PathBuf {
        self.directory.join(image.to_string())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_image_is_noted_until_it_is_forgotten() {
        let data_dir = tempfile::tempdir().unwrap();
        let (one, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let distrust = Distrust::of(data_dir.path());
        assert!(!distrust.has(one).await);
        distrust.forget(one).await.unwrap();
        assert!(distrust.note(one).await && distrust.note(one).await);
        // Another process of the node finds it.
        let distrust = Distrust::of(data_dir.path());
        assert!(distrust.has(one).await && !distrust.has(other).await);
        distrust.forget(one).await.unwrap();
        assert!(!distrust.has(one).await);
    }

    #[tokio::test]
    async fn what_cannot_be_found_out_counts_as_noted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let distrust = Distrust::of(file.path());
        assert!(distrust.has(Uuid::from_u128(1)).await);
        assert!(!distrust.note(Uuid::from_u128(1)).await);
    }

    /// The same process opens the image again: it has not forgotten.
    #[tokio::test]
    async fn what_could_not_be_noted_is_known_all_the_same() {
        let data_dir = tempfile::tempdir().unwrap();
        let image = Uuid::from_u128(1);
        fs::write(data_dir.path().join("distrusted-images"), "no directory").unwrap();
        let distrust = Distrust::of(data_dir.path());
        assert!(!distrust.note(image).await);
        fs::remove_file(data_dir.path().join("distrusted-images")).unwrap();
        assert!(
            distrust.clone().has(image).await && !Distrust::of(data_dir.path()).has(image).await
        );
        distrust.forget(image).await.unwrap();
        assert!(!distrust.has(image).await);
    }

    #[tokio::test]
    async fn a_directory_that_hangs_holds_up_nobody() {
        let data_dir = tempfile::tempdir().unwrap();
        let patience = Duration::from_millis(10);
        let distrust = Distrust { patience, ..Distrust::of(data_dir.path()) };
        let _hangs = distrust.turn.lock().await;
        assert!(distrust.has(Uuid::from_u128(1)).await);
        assert!(!distrust.note(Uuid::from_u128(1)).await);
        let refused = distrust.forget(Uuid::from_u128(1)).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
    }
}
