//! The node's own files, which must never become a volume's image or a disk of a pool: its data
//! directory except `volumes/`, its configuration, keys, certificates and token.
//!
//! Files are identified by device and inode, and so are the directories on the path: links, `..`,
//! bind mounts and `/proc/self/fd` are other spellings of the same file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::device_stack::{DeviceStack, FileIdentity, PathCheck};
use config::Config;
use membership::anchor;

/// Most nested directories of the data directory that are searched.
const MAX_DEPTH: usize = 8;

/// Most files and directories that are examined.
const MAX_ENTRIES: usize = 100_000;

/// File systems of the kernel, whose files lie on no disk.
const SYSTEM_DIRS: [&str; 2] = ["/proc", "/sys"];

/// The files and directories that are the node's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReservedPaths {
    data_dir: PathBuf,
    /// Paths, each with its purpose.
    labelled_paths: Vec<(&'static str, PathBuf)>,
}

impl ReservedPaths {
    /// The reserved paths of a node with this configuration.
    pub(crate) fn from_config(config: &Config) -> Self {
        let anchor = anchor::anchor_path(&config.data_dir, config.anchor_dir.as_deref());
        let mut others = vec![("its anchor", anchor), ("api.socket", config.api.socket.clone())];
        others.extend(config.file.clone().map(|path| ("its configuration", path)));
        others
            .extend(config.vhost_user.directory.clone().map(|path| ("vhost_user.directory", path)));
        if let Some(tcp) = &config.api.tcp {
            others.extend([
                ("api.tls_cert", tcp.tls_cert.clone()),
                ("api.tls_key", tcp.tls_key.clone()),
                ("api.token_file", tcp.token_file.clone()),
            ]);
        }
        if let Some(tls) = &config.cluster.tls {
            others.extend([
                ("cluster.tls_ca", tls.ca.clone()),
                ("cluster.tls_cert", tls.cert.clone()),
                ("cluster.tls_key", tls.key.clone()),
            ]);
        }
        // Sockets lie in run directories, which do not outlive a reboot: such a directory is the
        // service's alone.
        if let Some(run) = config.api.socket.parent().filter(|dir| is_run_directory(dir)) {
            others.push(("the directory of api.socket", run.to_owned()));
        }
        Self { data_dir: config.data_dir.clone(), labelled_paths: others }
    }

    /// Why no image and no pool disk can be at `path`, if so. Reads the file system: not for a
    /// core.
    pub(crate) fn refusal_for_path(&self, path: &Path) -> Option<String> {
        let shown = path.display();
        let Some(real) = resolve_path(path) else {
            // Opening the path reports the error.
            return None;
        };
        if SYSTEM_DIRS.iter().any(|dir| spelled_below(path, dir) || real.starts_with(dir)) {
            return Some(format!(
                "{shown} is a path in {}, which may refer to something else after a restart",
                SYSTEM_DIRS.join(" or ")
            ));
        }
        let own = self.identities();
        let volumes = self.data_dir.join("volumes");
        let volumes = fs::metadata(&volumes).ok().map(|m| FileIdentity::of(&m));
        let mut found = self.label_of(&own, &real);
        for directory in real.ancestors().skip(1) {
            if found.is_some() {
                break;
            }
            let Ok(metadata) = fs::metadata(directory) else { continue };
            if Some(FileIdentity::of(&metadata)) == volumes {
                break;
            }
            found = own.get(&FileIdentity::of(&metadata)).cloned();
        }
        found.map(|what| format!("{shown} is one of the node's own files ({what})"))
    }

    /// The label of the file or device at a canonical path, if it is the node's own.
    fn label_of(&self, own: &BTreeMap<FileIdentity, String>, real: &Path) -> Option<String> {
        let named =
            |(_, path): &&(&str, PathBuf)| resolve_path(path).is_some_and(|own| own == real);
        if fs::metadata(real).is_err() {
            return self.labelled_paths.iter().find(named).map(|(what, _)| (*what).to_owned());
        }
        let stack = DeviceStack::of_path(real);
        let mut found = stack.devices().iter().filter_map(|id| Some((id, own.get(id)?)));
        let (id, what) = found.next()?;
        Some(match stack.is_top(*id) {
            true => what.clone(),
            false => format!("{what}, behind a loop device"),
        })
    }

    /// Why a device that is not in use itself cannot be used, if so: what it lies on is in
    /// `volumes/`, is not visible, or holds the data directory. Reads the file system.
    pub(super) fn refusal_for_device(&self, path: &Path) -> Option<String> {
        let shown = path.display();
        if PathCheck::new(path).shares_with(&self.data_dir) {
            return Some(format!("the node's data directory is on {shown}"));
        }
        let stack = DeviceStack::of_path(path);
        if stack.loop_backings().is_empty() {
            return None;
        }
        let mut images = BTreeMap::new();
        collect_identities(&self.data_dir.join("volumes"), Path::new(""), MAX_DEPTH, &mut images);
        stack.loop_backings().iter().find_map(|backing| {
            let behind = backing.path.display();
            match backing.identity {
                None => Some(format!(
                    "{shown} is a loop device on {behind}, a file that was deleted or is not \
                     visible here"
                )),
                Some(file) => images
                    .get(&file)
                    .map(|image| format!("{shown} is a loop device on the image {image}")),
            }
        })
    }

    /// The identities of all files and directories that are the node's own now, with their labels.
    fn identities(&self) -> BTreeMap<FileIdentity, String> {
        let mut own = BTreeMap::new();
        for (what, path) in &self.labelled_paths {
            if let Ok(metadata) = fs::metadata(path) {
                own.insert(FileIdentity::of(&metadata), format!("{what}: {}", path.display()));
            }
        }
        if let Ok(metadata) = fs::metadata(&self.data_dir) {
            own.insert(
                FileIdentity::of(&metadata),
                format!("data_dir: {}", self.data_dir.display()),
            );
        }
        let volumes = self.data_dir.join("volumes");
        collect_identities(&self.data_dir, &volumes, MAX_DEPTH, &mut own);
        own
    }
}

/// Collects everything in `directory` and below, except `without`.
fn collect_identities(
    directory: &Path,
    without: &Path,
    depth: usize,
    own: &mut BTreeMap<FileIdentity, String>,
) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if path == without || own.len() >= MAX_ENTRIES {
            continue;
        }
        own.insert(FileIdentity::of(&metadata), path.display().to_string());
        // A file of the node's, or the directory of its store member, may be a link to elsewhere.
        if let Ok(metadata) = fs::metadata(&path)
            && (metadata.is_file() || path.ends_with("etcd"))
        {
            own.insert(FileIdentity::of(&metadata), path.display().to_string());
        }
        if metadata.is_dir() && depth > 0 {
            collect_identities(&path, without, depth - 1, own);
        }
    }
}

/// The path without links; for a file that does not exist, the path at which it would be created.
fn resolve_path(path: &Path) -> Option<PathBuf> {
    if let Ok(real) = fs::canonicalize(path) {
        return Some(real);
    }
    // A dangling link: the file would be created at its destination.
    if let Ok(to) = fs::read_link(path) {
        let to = path.parent()?.join(to);
        return Some(fs::canonicalize(to.parent()?).ok()?.join(to.file_name()?));
    }
    Some(fs::canonicalize(path.parent()?).ok()?.join(path.file_name()?))
}

/// Whether a path leads through `directory`, by its spelling or by links among its directories.
fn spelled_below(path: &Path, directory: &str) -> bool {
    let parent = path.parent().and_then(|parent| fs::canonicalize(parent).ok());
    let link = fs::read_link(path).is_ok_and(|to| to.starts_with(directory));
    link || parent.is_some_and(|parent| parent.starts_with(directory))
}

/// Whether a directory is a service's own below `/run`.
fn is_run_directory(directory: &Path) -> bool {
    let real = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    real.starts_with("/run") && real != Path::new("/run")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    fn node(dir: &Path) -> ReservedPaths {
        let data = dir.join("data");
        fs::create_dir_all(data.join("volumes")).unwrap();
        fs::create_dir_all(data.join("etcd/member/wal")).unwrap();
        fs::create_dir_all(data.join("distrust")).unwrap();
        for file in ["secrets.key", "etcd/member/wal/0.wal", "volumes/web.img"] {
            fs::write(data.join(file), file).unwrap();
        }
        fs::write(dir.join("windrose.toml"), "").unwrap();
        fs::write(dir.join("token"), "").unwrap();
        let others = vec![
            ("its configuration", dir.join("windrose.toml")),
            ("api.token_file", dir.join("token")),
            ("cluster.tls_key", dir.join("not-yet.pem")),
        ];
        ReservedPaths { data_dir: data, labelled_paths: others }
    }

    #[test]
    fn a_nodes_own_files_are_refused_however_they_are_spelled() {
        let dir = tempfile::tempdir().unwrap();
        let (own, at) = (node(dir.path()), |name: &str| dir.path().join(name));
        let key = at("data/secrets.key");
        symlink(&key, at("link")).unwrap();
        symlink(at("data"), at("linked-dir")).unwrap();
        symlink(at("data/new.key"), at("dangling")).unwrap();
        fs::hard_link(&key, at("hard")).unwrap();
        fs::hard_link(&key, at("data/volumes/hard.img")).unwrap();
        let open = fs::File::open(&key).unwrap();
        let by_fd = format!("/proc/self/fd/{}", open.as_raw_fd());
        symlink(&by_fd, at("to-proc")).unwrap();
        let refused = [
            key.clone(),
            at("data/store.redb"),
            at("data/etcd/member/wal/0.wal"),
            at("data/etcd/new.img"),
            at("data/distrust/x"),
            at("data/volumes/../secrets.key"),
            at("data/./etcd/../secrets.key"),
            at("data/volumes/hard.img"),
            at("link"),
            at("hard"),
            at("linked-dir/secrets.key"),
            at("linked-dir/volumes/../new.img"),
            at("dangling"),
            at("windrose.toml"),
            at("token"),
            at("not-yet.pem"),
            PathBuf::from(&by_fd),
            PathBuf::from(format!("/dev/fd/{}", open.as_raw_fd())),
            at("to-proc"),
        ];
        for path in refused {
            let why = own.refusal_for_path(&path).unwrap_or_else(|| panic!("{}", path.display()));
            assert!(why.contains(&path.display().to_string()), "{why}");
        }
    }

    #[test]
    fn images_lie_in_volumes_and_anywhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let (own, at) = (node(dir.path()), |name: &str| dir.path().join(name));
        fs::write(at("disk.img"), "").unwrap();
        symlink(at("disk.img"), at("link")).unwrap();
        symlink(at("data/volumes"), at("images")).unwrap();
        for path in ["disk.img", "new.img", "link", "data/volumes/web.img", "data/volumes/new.img"]
        {
            assert_eq!(own.refusal_for_path(&at(path)), None, "{path}");
        }
        assert_eq!(own.refusal_for_path(&at("images/new.img")), None);
        assert_eq!(
            own.refusal_for_path(&at("no/such/directory")),
            None,
            "the system says what is wrong"
        );
    }
}
