//! Listening Unix sockets, whose files outlive their process.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixSocket, UnixStream};

/// A listener and its file, which is removed with it.
#[derive(Debug)]
pub(super) struct UnixSocketListener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file, which distinguish it from one that has replaced it.
    file_identity: (u64, u64),
}

impl UnixSocketListener {
    pub(super) async fn bind(at: &Path, backlog: u32, mode: Option<u32>) -> io::Result<Self> {
        let socket = match bind_socket(at) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                remove_stale_socket(at).await?;
                bind_socket(at)?
            }
            other => other?,
        };
        // Set before it listens, so that no client connects earlier.
        if let Some(mode) = mode {
            fs::set_permissions(at, fs::Permissions::from_mode(mode))?;
        }
        let listener = socket.listen(backlog)?;
        let file = file_identity(&fs::symlink_metadata(at)?);
        Ok(Self { listener, path: at.to_owned(), file_identity: file })
    }

    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }
}

impl Drop for UnixSocketListener {
    fn drop(&mut self) {
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|m| file_identity(&m) == self.file_identity) {
            // If this fails, the next listener replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn file_identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn bind_socket(at: &Path) -> io::Result<UnixSocket> {
    let socket = UnixSocket::new_stream()?;
    socket.bind(at)?;
    Ok(socket)
}

/// Removes a socket without a listener.
///
/// It is renamed and checked afterwards: another process may replace it in the meantime, and its
/// socket must not be lost.
async fn remove_stale_socket(at: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(at)?.file_type().is_socket() {
        let why = format!("{} exists and is not a socket", at.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    let in_use = || {
        let why = format!("another process listens at {}", at.display());
        io::Error::new(io::ErrorKind::AddrInUse, why)
    };
    if has_listener(at).await? {
        return Err(in_use());
    }
    let mut aside = at.as_os_str().to_owned();
    aside.push(format!(".{}", std::process::id()));
    let aside = PathBuf::from(aside);
    fs::rename(at, &aside)?;
    if has_listener(&aside).await? {
        // If a third process has come, both listen, and clients find the newer socket.
        let _ = fs::hard_link(&aside, at);
        fs::remove_file(&aside)?;
        return Err(in_use());
    }
    fs::remove_file(&aside)
}

/// Whether a process listens there.
async fn has_listener(at: &Path) -> io::Result<bool> {
    match UnixStream::connect(at).await {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        // It listens, but its queue is full.
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(e) => Err(e),
    }
}
