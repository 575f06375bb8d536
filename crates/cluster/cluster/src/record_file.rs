//! Small local record files of a node, with a checksum as in the store ([`checksummed`]): written
//! atomically, durably, and readable by their owner only.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::store::checksummed;

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Its contents are damaged.
    #[error("{0}")]
    Damaged(String),
}

/// Reads the file at `path`, at most `max` bytes long, with a checksum for the record `name`;
/// `None` if there is no file.
///
/// # Errors
/// [`ReadError`].
pub fn read(path: &Path, name: &str, max: u64) -> Result<Option<Vec<u8>>, ReadError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let mut bytes = Vec::new();
    file.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        return Err(ReadError::Damaged(format!("it is longer than {max} bytes")));
    }
    if bytes.is_empty() {
        return Err(ReadError::Damaged("it is empty".to_owned()));
    }
    match checksummed::verify_checksum(name, &bytes) {
        Ok(contents) => Ok(Some(contents.to_vec())),
        Err(damage) => Err(ReadError::Damaged(damage.to_string())),
    }
}

/// Writes the file at `path` atomically, with a checksum for the record `name`: readers see the old
/// or the new file, also after a power cut.
///
/// # Errors
/// The system's error; the file is then either the old or the new one.
pub fn write(path: &Path, name: &str, contents: &[u8]) -> io::Result<()> {
    write_unchecked(path, &checksummed::add_checksum(name, contents))
}

/// The same for bytes as they are, without a checksum.
///
/// # Errors
/// As [`write()`].
pub fn write_unchecked(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = Path::new(&new);
    // A file left over by a crash may have another mode.
    remove_if_present(new)?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    if let Err(e) = written {
        // Free the space: the file system may be full.
        let _ = fs::remove_file(new);
        return Err(e);
    }
    fs::rename(new, path)?;
    sync_directory(path)
}

/// Removes the file at `path`, durably. It may be gone already.
///
/// # Errors
/// The system's error.
pub fn remove(path: &Path) -> io::Result<()> {
    remove_if_present(path)?;
    match sync_directory(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        synced => synced,
    }
}

fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Makes the directory entry of `path` durable.
fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_written_whole_and_for_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        assert!(read(&path, "a.json", 100).unwrap().is_none());
        // As a crash may have left it.
        fs::write(dir.path().join("a.json.new"), "half").unwrap();
        write(&path, "a.json", b"one").unwrap();
        write(&path, "a.json", b"two").unwrap();
        assert_eq!(read(&path, "a.json", 100).unwrap().unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        remove(&path).unwrap();
        remove(&path).unwrap();
    }

    #[test]
    fn no_bit_of_a_file_changes_unseen_nor_does_another_files_pass() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write(&path, "a.json", b"{}").unwrap();
        let good = fs::read(&path).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bad).unwrap();
            assert!(matches!(read(&path, "a.json", 100), Err(ReadError::Damaged(_))), "bit {bit}");
        }
        fs::write(&path, &good).unwrap();
        assert!(read(&path, "b.json", 100).unwrap_err().to_string().contains("another record"));
        assert!(read(&path, "a.json", 5).unwrap_err().to_string().contains("longer"));
        fs::write(&path, "").unwrap();
        assert_eq!(read(&path, "a.json", 100).unwrap_err().to_string(), "it is empty");
    }
}
