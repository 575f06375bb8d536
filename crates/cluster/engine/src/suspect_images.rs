//! Images whose disks may have lost completed writes although the machine was not rebooted.
//!
//! After a failed sync the kernel has dropped the data that it could not write, and only the
//! process that asked for the sync knows. If that process ends, the next one must not take the
//! image for an intact one (RFD 0010, attack 77). So the image is marked in the data directory,
//! which need not be on that disk.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::timeout;
use uuid::Uuid;

/// How long a call may wait for the data directory, which may be on the disk that fails.
const DATA_DIR_TIMEOUT: Duration = Duration::from_secs(5);

/// The suspect images of all cores of a node.
#[derive(Clone, Debug)]
pub(super) struct SuspectImages {
    markers: Arc<MarkerFiles>,
    /// Those that this process knows, whether or not they could be marked.
    marked_by_process: Arc<Mutex<BTreeSet<Uuid>>>,
    /// Closed images whose disks have not finished all I/O.
    lingering_io: Arc<Mutex<BTreeSet<Uuid>>>,
    /// Only one thread at a time waits for the directory's disk: other work needs threads too.
    io_lock: Arc<tokio::sync::Mutex<()>>,
    timeout: Duration,
}

impl SuspectImages {
    /// Those marked in `data_dir`.
    pub(super) fn in_data_dir(data_dir: &Path) -> Self {
        let markers = MarkerFiles { directory: data_dir.join("distrusted-images") };
        Self {
            markers: Arc::new(markers),
            marked_by_process: Arc::default(),
            lingering_io: Arc::default(),
            io_lock: Arc::default(),
            timeout: DATA_DIR_TIMEOUT,
        }
    }

    /// The disk of `image`, which was closed, has unfinished I/O, which may reach the disk after
    /// later writes.
    pub(super) fn add_lingering_io(&self, image: Uuid) {
        lock(&self.lingering_io).insert(image);
    }

    /// The disk of `image` has finished its I/O.
    pub(super) fn remove_lingering_io(&self, image: Uuid) {
        lock(&self.lingering_io).remove(&image);
    }

    /// Whether the disk of `image` has unfinished I/O.
    pub(super) fn has_lingering_io(&self, image: Uuid) -> bool {
        lock(&self.lingering_io).contains(&image)
    }

    /// Marks `image`, durably; returns whether the data directory stored that in time.
    pub(super) async fn mark(&self, image: Uuid) -> bool {
        lock(&self.marked_by_process).insert(image);
        let marked = self.run_blocking(move |markers| markers.create(image)).await;
        if let Err(error) = &marked {
            let what = "cannot mark an image as suspect after its disk was lost";
            tracing::error!(%image, %error, "{what}; reboot this machine before the image is used again");
        }
        marked.is_ok()
    }

    /// Whether `image` is marked. If that cannot be read, yes: then another replica becomes the
    /// primary, if there is one.
    pub(super) async fn is_marked(&self, image: Uuid) -> bool {
        lock(&self.marked_by_process).contains(&image)
            || self.run_blocking(move |markers| markers.exists(image)).await.unwrap_or(true)
    }

    /// Removes the mark: the intent log records the loss by now, or the image no longer exists.
    ///
    /// # Errors
    /// The error of the data directory, or a timeout.
    pub(super) async fn clear(&self, image: Uuid) -> io::Result<()> {
        self.run_blocking(move |markers| markers.remove(image)).await?;
        lock(&self.marked_by_process).remove(&image);
        Ok(())
    }

    async fn run_blocking<T: Send + 'static>(
        &self,
        what: impl FnOnce(&MarkerFiles) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let asked = async {
            let guard = Arc::clone(&self.io_lock).lock_owned().await;
            let markers = Arc::clone(&self.markers);
            let asking = tokio::task::spawn_blocking(move || {
                let answer = what(&markers);
                drop(guard);
                answer
            });
            asking.await.map_err(io::Error::other)?
        };
        timeout(self.timeout, asked).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

/// One empty file for each marked image, named by its id. Calls block on the disk of the data
/// directory.
#[derive(Debug)]
struct MarkerFiles {
    directory: PathBuf,
}

impl MarkerFiles {
    fn create(&self, image: Uuid) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        File::create(self.path(image))?.sync_all()?;
        sync_dir(&self.directory)?;
        // The directory itself may be new.
        self.directory.parent().map_or(Ok(()), sync_dir)
    }

    fn exists(&self, image: Uuid) -> io::Result<bool> {
        self.path(image).try_exists()
    }

    fn remove(&self, image: Uuid) -> io::Result<()> {
        match fs::remove_file(self.path(image)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
            Ok(()) => sync_dir(&self.directory),
        }
    }

    fn path(&self, image: Uuid) -> PathBuf {
        self.directory.join(image.to_string())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sync_dir(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_image_is_noted_until_it_is_forgotten() {
        let data_dir = tempfile::tempdir().unwrap();
        let (one, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let suspect_images = SuspectImages::in_data_dir(data_dir.path());
        assert!(!suspect_images.is_marked(one).await);
        suspect_images.clear(one).await.unwrap();
        assert!(suspect_images.mark(one).await && suspect_images.mark(one).await);
        // Another process of the node finds the mark.
        let suspect_images = SuspectImages::in_data_dir(data_dir.path());
        assert!(suspect_images.is_marked(one).await && !suspect_images.is_marked(other).await);
        suspect_images.clear(one).await.unwrap();
        assert!(!suspect_images.is_marked(one).await);
    }

    #[tokio::test]
    async fn what_cannot_be_found_out_counts_as_noted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let suspect_images = SuspectImages::in_data_dir(file.path());
        assert!(suspect_images.is_marked(Uuid::from_u128(1)).await);
        assert!(!suspect_images.mark(Uuid::from_u128(1)).await);
    }

    /// The same process opens the image again: it still knows.
    #[tokio::test]
    async fn what_could_not_be_noted_is_known_all_the_same() {
        let data_dir = tempfile::tempdir().unwrap();
        let image = Uuid::from_u128(1);
        fs::write(data_dir.path().join("distrusted-images"), "no directory").unwrap();
        let suspect_images = SuspectImages::in_data_dir(data_dir.path());
        assert!(!suspect_images.mark(image).await);
        fs::remove_file(data_dir.path().join("distrusted-images")).unwrap();
        assert!(
            suspect_images.clone().is_marked(image).await
                && !SuspectImages::in_data_dir(data_dir.path()).is_marked(image).await
        );
        suspect_images.clear(image).await.unwrap();
        assert!(!suspect_images.is_marked(image).await);
    }

    #[tokio::test]
    async fn a_directory_that_hangs_holds_up_nobody() {
        let data_dir = tempfile::tempdir().unwrap();
        let limit = Duration::from_millis(10);
        let suspect_images =
            SuspectImages { timeout: limit, ..SuspectImages::in_data_dir(data_dir.path()) };
        let _hangs = suspect_images.io_lock.lock().await;
        assert!(suspect_images.is_marked(Uuid::from_u128(1)).await);
        assert!(!suspect_images.mark(Uuid::from_u128(1)).await);
        let refused = suspect_images.clear(Uuid::from_u128(1)).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
    }
}
