//! Temporary directories.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A directory that is removed with the value. Every user may enter it.
pub struct TestDir(tempfile::TempDir);

impl TestDir {
    /// A new one in `parent`.
    #[must_use]
    pub fn new(parent: impl AsRef<Path>) -> Self {
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix("test-").permissions(Permissions::from_mode(0o755));
        Self(builder.tempdir_in(parent).unwrap())
    }

    /// A new one on the disk that holds the build.
    #[must_use]
    pub fn on_disk() -> Self {
        // The test is `target/PROFILE/deps/NAME`.
        let test = std::env::current_exe().unwrap();
        let parent = test.ancestors().nth(3).unwrap().join("tmp");
        fs::create_dir_all(&parent).unwrap();
        Self::new(parent)
    }

    /// A new one in memory.
    #[must_use]
    pub fn in_memory() -> Self {
        Self::new("/dev/shm")
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The path of a file in it.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}
