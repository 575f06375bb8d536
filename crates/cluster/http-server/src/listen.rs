//! Sockets of the API and of `/metrics`.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, UnixListener};

use config::data_dir;

/// Mode of the API's socket: its owner and group may use it.
const SOCKET_MODE: u32 = 0o660;

/// Mode of a directory that the node creates for it; the socket's own mode restricts access.
const DIRECTORY_MODE: u32 = 0o755;

/// Why listening failed.
#[derive(Debug, thiserror::Error)]
#[error("{setting}: cannot listen at {at}: {why}")]
pub struct ListenError {
    setting: &'static str,
    at: String,
    why: String,
}

/// A listening Unix socket. Dropping it removes its file.
#[derive(Debug)]
pub struct UnixSocket {
    pub(crate) listener: UnixListener,
    path: PathBuf,
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        // A remaining file is replaced at the next start.
        let _ = fs::remove_file(&self.path);
    }
}

/// Listens at the Unix socket at `path`, and replaces a socket whose node has ended.
///
/// # Errors
/// [`ListenError`]: another process answers there, something else is there, no permission.
pub fn unix(path: &Path) -> Result<UnixSocket, ListenError> {
    let refused =
        |why: String| ListenError { setting: "api.socket", at: path.display().to_string(), why };
    let io_error = |e: io::Error| refused(e.to_string());
    if let Some(dir) = path.parent() {
        data_dir::create_dir_with_mode(dir, DIRECTORY_MODE)
            .map_err(|e| refused(format!("{}: {e}", dir.display())))?;
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(refused(
                "a file that is not a socket is in the way; move it away".to_owned(),
            ));
        }
        Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => {
            return Err(refused(
                "another process listens there; stop it or change api.socket".to_owned(),
            ));
        }
        _ => {}
    }
    // Bind under another name until the mode is set, so that nobody connects before.
    let fresh = path.with_extension(format!("new-{}", std::process::id()));
    let _ = fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh).map_err(io_error)?;
    let placed = fs::set_permissions(&fresh, fs::Permissions::from_mode(SOCKET_MODE))
        .and_then(|()| fs::rename(&fresh, path));
    if let Err(e) = placed {
        let _ = fs::remove_file(&fresh);
        return Err(io_error(e));
    }
    Ok(UnixSocket { listener, path: path.to_owned() })
}

/// Listens at `at`, which `setting` names.
///
/// # Errors
/// [`ListenError`].
pub fn tcp(setting: &'static str, at: SocketAddr) -> Result<TcpListener, ListenError> {
    let listen = || {
        let listener = std::net::TcpListener::bind(at)?;
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    };
    listen().map_err(|e: io::Error| ListenError { setting, at: at.to_string(), why: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_taken_over_only_from_the_dead() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/api.sock");
        let socket = unix(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        let refused = unix(&path).unwrap_err().to_string();
        assert!(refused.contains("another process listens"), "{refused}");
        drop(socket);
        assert!(!path.exists());
        // A node that was killed leaves its socket behind.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        unix(&path).unwrap();
        fs::write(&path, "").unwrap();
        let refused = unix(&path).unwrap_err().to_string();
        assert!(refused.contains("not a socket"), "{refused}");
        assert_eq!(fs::read_dir(dir.path().join("run")).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_busy_port_is_named_with_its_setting() {
        let first = tcp("metrics.listen", "127.0.0.1:0".parse().unwrap()).unwrap();
        let refused = tcp("metrics.listen", first.local_addr().unwrap()).unwrap_err().to_string();
        assert!(refused.starts_with("metrics.listen: cannot listen at 127.0.0.1:"), "{refused}");
    }
}
