//! Unix sockets that are listened at: files that outlive their process.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixSocket, UnixStream};

/// A listener, and the file that it is known by, which goes with it.
#[derive(Debug)]
pub(super) struct LocalListener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file, by which it is told from one that has taken its place.
    file: (u64, u64),
}

impl LocalListener {
    pub(super) async fn bind(at: &Path, backlog: u32, mode: Option<u32>) -> io::Result<Self> {
        let socket = match bound(at) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                clear(at).await?;
                bound(at)?
            }
            other => other?,
        };
        // Nobody connects before it is listened at.
        if let Some(mode) = mode {
            fs::set_permissions(at, fs::Permissions::from_mode(mode))?;
        }
        let listener = socket.listen(backlog)?;
        let file = identity(&fs::symlink_metadata(at)?);
        Ok(Self { listener, path: at.to_owned(), file })
    }

    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        let there = fs::symlink_metadata(&self.path);
        if there.is_ok_and(|m| identity(&m) == self.file) {
            // What cannot be removed is replaced by who comes next.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn bound(at: &Path) -> io::Result<UnixSocket> {
    let socket = UnixSocket::new_stream()?;
    socket.bind(at)?;
    Ok(socket)
}

/// Removes a socket that nobody listens at.
///
/// It is moved aside first and looked at there: somebody else may replace it in the meantime, and what he has
/// put there is not to be lost.
async fn clear(at: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(at)?.file_type().is_socket() {
        let why = format!("{} is there, and is no socket", at.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    let in_use = || {
        let why = format!("another process listens at {}", at.display());
        io::Error::new(io::ErrorKind::AddrInUse, why)
    };
    if is_live(at).await? {
        return Err(in_use());
    }
    let mut aside = at.as_os_str().to_owned();
    aside.push(format!(".{}", std::process::id()));
    let aside = PathBuf::from(aside);
    fs::rename(at, &aside)?;
    if is_live(&aside).await? {
        // If a third one has come, both of them listen, and the newer one is found.
        let _ = fs::hard_link(&aside, at);
        fs::remove_file(&aside)?;
        return Err(in_use());
    }
    fs::remove_file(&aside)
}

/// Whether a process listens there.
async fn is_live(at: &Path) -> io::Result<bool> {
    match UnixStream::connect(at).await {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        // It listens, and has more to do than it can take.
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(e) => Err(e),
    }
}
