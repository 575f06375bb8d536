//! Block devices and file systems that a test makes for itself, where it has the right to.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::TestDir;

/// Runs a program; gives its output, or `None` when it is missing or fails.
pub fn program(name: &str, args: &[&str]) -> Option<String> {
    let done = Command::new(name).args(args).stderr(Stdio::null()).output().ok()?;
    done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("a test chooses plain names")
}

/// A block device over a file.
pub struct Loop(PathBuf);

impl Loop {
    /// `None` where that is not allowed, or `losetup` does not know the options.
    pub fn new(backing: &Path, options: &[&str]) -> Option<Self> {
        let args = [&["--find", "--show"], options, &[text(backing)]].concat();
        program("losetup", &args).map(|device| Self(device.into()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Notes that the backing file has another size now.
    pub fn resized(&self) {
        program("losetup", &["--set-capacity", text(&self.0)]).expect("losetup resizes");
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        program("losetup", &["--detach", text(&self.0)]);
    }
}

/// A mounted file system.
pub struct Mount(TestDir);

impl Mount {
    /// Mounts with these arguments of `mount`, on a directory beside the build; `None` where that
    /// is not allowed.
    pub fn new(args: &[&str]) -> Option<Self> {
        let at = TestDir::on_disk();
        program("mount", &[args, &[text(at.path())]].concat()).map(|_| Self(at))
    }

    /// A memory file system of this size (`mount` understands `1m`).
    pub fn memory(size: &str) -> Option<Self> {
        Self::new(&["-t", "tmpfs", "-o", &format!("size={size}"), "test"])
    }

    /// The name of a file on it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.file(name)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        program("umount", &[text(self.0.path())]);
    }
}
