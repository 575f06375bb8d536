//! The node's own files, which never become a volume's image or a disk of a pool: its data directory but for
//! `volumes/`, its configuration, keys, certificates and token.
//!
//! What a path leads to is told by device and inode, its directories included: links, `..`, bind mounts and
//! `/proc/self/fd` are other spellings of the same file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::beneath::{Beneath, Candidate, Identity};
use crate::anchor;
use crate::config::Config;

/// Directories of the data directory that are looked into, one within the other.
const MAX_DEPTH: usize = 8;

/// Most files and directories that are looked at.
const MAX_ENTRIES: usize = 100_000;

/// Where the system shows what is no file of any disk.
const SYSTEM: [&str; 2] = ["/proc", "/sys"];

/// Which files and directories are the node's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnFiles {
    data_dir: PathBuf,
    /// What it is for, and where it is.
    others: Vec<(&'static str, PathBuf)>,
}

impl OwnFiles {
    /// Those of a node that runs by `config`.
    pub(crate) fn of(config: &Config) -> Self {
        let anchor = anchor::path(&config.data_dir, config.anchor_dir.as_deref());
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
        // Sockets lie where nothing outlives a restart of the machine: a directory there is the service's alone.
        if let Some(run) = config.api.socket.parent().filter(|dir| is_run_directory(dir)) {
            others.push(("the directory of api.socket", run.to_owned()));
        }
        Self { data_dir: config.data_dir.clone(), others }
    }

    /// Why no image and no disk of a pool can be at `path`, if so. Looks at files: not on a core.
    pub(crate) fn refusal(&self, path: &Path) -> Option<String> {
        let shown = path.display();
        let Some(real) = resolve(path) else {
            // Whoever opens it says what is wrong with it.
            return None;
        };
        if SYSTEM.iter().any(|dir| spelled_below(path, dir) || real.starts_with(dir)) {
            return Some(format!(
                "{shown} is a path in {}, which leads elsewhere after a restart",
                SYSTEM.join(" or ")
            ));
        }
        let own = self.own();
        let volumes = self.data_dir.join("volumes");
        let volumes = fs::metadata(&volumes).ok().map(|m| Identity::of(&m));
        let mut found = self.what(&own, &real);
        for directory in real.ancestors().skip(1) {
            if found.is_some() {
                break;
            }
            let Ok(metadata) = fs::metadata(directory) else { continue };
            if Some(Identity::of(&metadata)) == volumes {
                break;
            }
            found = own.get(&Identity::of(&metadata)).cloned();
        }
        found.map(|what| format!("{shown} is one of the node's own files ({what})"))
    }

    /// What the file or device at a path without links is of the node's, by itself.
    fn what(&self, own: &BTreeMap<Identity, String>, real: &Path) -> Option<String> {
        let named = |(_, path): &&(&str, PathBuf)| resolve(path).is_some_and(|own| own == real);
        if fs::metadata(real).is_err() {
            return self.others.iter().find(named).map(|(what, _)| (*what).to_owned());
        }
        let beneath = Beneath::of(real);
        let mut found = beneath.all().iter().filter_map(|id| Some((id, own.get(id)?)));
        let (id, what) = found.next()?;
        Some(match beneath.is(*id) {
            true => what.clone(),
            false => format!("{what}, behind a loop device"),
        })
    }

    /// Why a device cannot be used that is no file of the node's and no volume's or pool's either, if so: what it lies on
    /// is in `volumes/`, is not to be seen, or has the data directory in it. Looks at files.
    pub(super) fn refusal_of_device(&self, path: &Path) -> Option<String> {
        let shown = path.display();
        if Candidate::new(path).shares_with(&self.data_dir) {
            return Some(format!("the node's data directory lies on {shown}"));
        }
        let beneath = Beneath::of(path);
        if beneath.backings().is_empty() {
            return None;
        }
        let mut images = BTreeMap::new();
        list(&self.data_dir.join("volumes"), Path::new(""), MAX_DEPTH, &mut images);
        beneath.backings().iter().find_map(|backing| {
            let behind = backing.path.display();
            match backing.identity {
                None => Some(format!(
                    "{shown} lies on {behind} by a loop device, and that file is gone or not to be seen from here"
                )),
                Some(file) => images.get(&file).map(|image| {
                    format!("{shown} lies on the image {image} by a loop device")
                }),
            }
        })
    }

    /// All files and directories that are the node's own now, with what they are.
    fn own(&self) -> BTreeMap<Identity, String> {
        let mut own = BTreeMap::new();
        for (what, path) in &self.others {
            if let Ok(metadata) = fs::metadata(path) {
                own.insert(Identity::of(&metadata), format!("{what}: {}", path.display()));
            }
        }
        if let Ok(metadata) = fs::metadata(&self.data_dir) {
            own.insert(Identity::of(&metadata), format!("data_dir: {}", self.data_dir.display()));
        }
        let volumes = self.data_dir.join("volumes");
        list(&self.data_dir, &volumes, MAX_DEPTH, &mut own);
        own
    }
}

/// Notes everything in `directory` and below but for `without`.
fn list(directory: &Path, without: &Path, depth: usize, own: &mut BTreeMap<Identity, String>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if path == without || own.len() >= MAX_ENTRIES {
            continue;
        }
        own.insert(Identity::of(&metadata), path.display().to_string());
        // A file of the node's may lie elsewhere and be linked to, and so may its member of the store.
        if let Ok(there) = fs::metadata(&path)
            && (there.is_file() || path.ends_with("etcd"))
        {
            own.insert(Identity::of(&there), path.display().to_string());
        }
        if metadata.is_dir() && depth > 0 {
            list(&path, without, depth - 1, own);
        }
    }
}

/// The path without links; of a file that is not there, that of where it would be made.
fn resolve(path: &Path) -> Option<PathBuf> {
    if let Ok(real) = fs::canonicalize(path) {
        return Some(real);
    }
    // A link to nothing: a file would be made where it leads.
    if let Ok(to) = fs::read_link(path) {
        let to = path.parent()?.join(to);
        return Some(fs::canonicalize(to.parent()?).ok()?.join(to.file_name()?));
    }
    Some(fs::canonicalize(path.parent()?).ok()?.join(path.file_name()?))
}

/// Whether a path leads through `directory` by its spelling or by the links of its directories.
fn spelled_below(path: &Path, directory: &str) -> bool {
    let parent = path.parent().and_then(|parent| fs::canonicalize(parent).ok());
    let link = fs::read_link(path).is_ok_and(|to| to.starts_with(directory));
    link || parent.is_some_and(|parent| parent.starts_with(directory))
}

/// Whether a directory is one of a service's below `/run`.
fn is_run_directory(directory: &Path) -> bool {
    let real = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    real.starts_with("/run") && real != Path::new("/run")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    fn node(dir: &Path) -> OwnFiles {
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
        OwnFiles { data_dir: data, others }
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
            let why = own.refusal(&path).unwrap_or_else(|| panic!("{}", path.display()));
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
            assert_eq!(own.refusal(&at(path)), None, "{path}");
        }
        assert_eq!(own.refusal(&at("images/new.img")), None);
        assert_eq!(own.refusal(&at("no/such/directory")), None, "the system says what is wrong");
    }
}
