//! Debian's kernel for guests: this machine's, or one unpacked beside the build. It is never
//! installed: tests must not change what this machine boots.

use crate::run_context::RunContext;
use anyhow::{Context, Result};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// The package that depends on Debian's current kernel.
pub(crate) const PACKAGE: &str = "linux-image-amd64";

const LIMIT: Duration = Duration::from_secs(900);

/// A kernel with its modules.
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    pub(crate) version: String,
    /// The root directory of its `lib/modules`.
    pub(crate) root: PathBuf,
}

/// Where [`unpack`] puts the kernel.
pub(crate) fn unpacked(context: &RunContext) -> PathBuf {
    context.target.join("guest-kernel")
}

/// This machine's kernel, or else the unpacked one.
pub(crate) fn find(context: &RunContext) -> Option<Kernel> {
    newest_in(Path::new("/")).or_else(|| newest_in(&unpacked(context)))
}

/// The newest kernel in a root's /boot that has its modules.
fn newest_in(root: &Path) -> Option<Kernel> {
    let mut versions: Vec<String> = fs::read_dir(root.join("boot"))
        .ok()?
        .filter_map(|entry| {
            entry.ok()?.file_name().to_str()?.strip_prefix("vmlinuz-").map(str::to_owned)
        })
        .filter(|version| root.join("lib/modules").join(version).is_dir())
        .collect();
    versions.sort_by_key(|version| -> Vec<u64> {
        version.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
    });
    let version = versions.pop()?;
    let image = root.join("boot").join(format!("vmlinuz-{version}"));
    Some(Kernel { image, version, root: root.to_owned() })
}

/// Downloads Debian's kernel and unpacks it beside the build. `update` refreshes the package lists.
pub(crate) fn unpack(context: &RunContext, update: impl FnOnce() -> Result<String>) -> Result<()> {
    let root = unpacked(context);
    let unfinished = root.with_extension("new");
    let _ = fs::remove_dir_all(&unfinished);
    fs::create_dir_all(&unfinished).context("cannot create the directory of a guest's kernel")?;
    context.display.begin_step("unpack Debian's kernel for guests");
    if download(context, &unfinished).is_err() {
        // Old lists name packages that no longer exist.
        update()?;
        download(context, &unfinished)?;
    }
    let mut files = fs::read_dir(&unfinished)?.filter_map(|entry| Some(entry.ok()?.path()));
    let archive = files.find(|path| path.extension().is_some_and(|e| e == "deb"));
    let archive = archive.context("apt-get has downloaded no kernel")?;
    let mut extract = Command::new("dpkg-deb");
    extract.arg("-x").arg(&archive).arg(&unfinished);
    context.run("dpkg-deb", &mut extract, LIMIT)?.success_output()?;
    fs::remove_file(&archive).context("cannot remove the kernel's package")?;
    if !unfinished.join("lib").exists() {
        std::os::unix::fs::symlink("usr/lib", unfinished.join("lib"))?;
    }
    let kernel = newest_in(&unfinished).context("the package has no kernel with modules")?;
    let mut index = Command::new("depmod");
    index.arg("-b").arg(&unfinished).arg(&kernel.version).env("PATH", with_sbin());
    context.run("depmod", &mut index, LIMIT)?.success_output()?;
    let _ = fs::remove_dir_all(&root);
    fs::rename(&unfinished, &root).context("cannot rename the directory of a guest's kernel")?;
    context
        .display
        .line(&format!("  unpacked Linux {} for guests, beside the build", kernel.version));
    Ok(())
}

/// Downloads the package of Debian's current kernel into a directory.
fn download(context: &RunContext, directory: &Path) -> Result<()> {
    let mut ask = Command::new("apt-cache");
    ask.args(["depends", PACKAGE]);
    let said = context.run("apt-cache depends", &mut ask, LIMIT)?.success_output()?;
    let name = image_of(&said).with_context(|| format!("apt knows no {PACKAGE}"))?;
    let mut get = Command::new("apt-get");
    get.args(["-q", "download", name]).current_dir(directory);
    context.run("apt-get download", &mut get, LIMIT)?.success_output().map(|_| ())
}

/// The kernel package that [`PACKAGE`] depends on.
fn image_of(said: &str) -> Option<&str> {
    said.lines().find_map(|line| line.trim().strip_prefix("Depends: ").map(str::trim))
}

/// `PATH` including the sbin directories.
fn with_sbin() -> String {
    format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cleanup::ScratchDir;

    #[test]
    fn the_newest_kernel_with_its_modules_is_taken_from_any_root() {
        let scratch = ScratchDir::new(&std::env::temp_dir()).unwrap();
        let root = scratch.path();
        assert!(newest_in(root).is_none(), "there is none");
        fs::create_dir_all(root.join("boot")).unwrap();
        for version in ["6.1.0-9-amd64", "6.1.0-10-amd64", "6.12.1-amd64"] {
            fs::write(root.join("boot").join(format!("vmlinuz-{version}")), "").unwrap();
        }
        assert!(newest_in(root).is_none(), "none has modules");
        for version in ["6.1.0-9-amd64", "6.1.0-10-amd64"] {
            fs::create_dir_all(root.join("lib/modules").join(version)).unwrap();
        }
        let kernel = newest_in(root).unwrap();
        assert_eq!(kernel.version, "6.1.0-10-amd64");
        assert_eq!(kernel.image, root.join("boot/vmlinuz-6.1.0-10-amd64"));
        assert_eq!(kernel.root, root);
    }

    #[test]
    fn the_kernels_package_is_the_one_that_debian_names() {
        let said = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n";
        assert_eq!(image_of(said), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(image_of("linux-image-amd64\n"), None);
    }
}
