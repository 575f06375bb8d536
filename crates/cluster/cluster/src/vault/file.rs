//! The file with the keys of a node by itself, in its data directory: a line of 64 hex digits for each, the one that seals
//! first. What the key is called by may follow after a blank: a line that has rotted shows by it. Lines that begin with `#`
//! say something to people. Nobody but its owner may read it.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{KEY_LEN, Key, MAX_KEYS, Ring};

/// Longest file, in bytes.
const MAX_FILE: u64 = 8 << 10;

/// What a new file begins with.
const HEAD: &str = "# Keys of the secrets in this node's store. Keep a copy, and not beside copies of the store.\n\
    # The first one seals; all of them open.\n";

/// Why a file with keys cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}", path.display())]
pub struct FileError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

/// The ring that a file's `text` holds; or what is wrong with it, without a word of what it holds.
///
/// # Errors
/// What is wrong, and in which line.
pub fn parse(text: &str) -> Result<Ring, String> {
    let lines = text.lines().map(str::trim).enumerate();
    let mut keys = Vec::new();
    for (number, line) in lines.filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
        let key = key(line).ok_or_else(|| format!("line {} is no key", number + 1))?;
        keys.push(key);
        if keys.len() > MAX_KEYS {
            return Err(format!("it has more than {MAX_KEYS} keys"));
        }
    }
    Ring::new(keys).ok_or_else(|| "it has a key twice".to_owned())
}

/// The key in a line, if it is the one that the line names.
fn key(line: &str) -> Option<Key> {
    let Some((key, id)) = line.split_once(' ') else { return parse_key(line) };
    parse_key(key).filter(|key| key.id().to_string() == id)
}

fn parse_key(hex: &str) -> Option<Key> {
    let digits: Option<Vec<_>> = hex.chars().map(|c| c.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len() == 2 * KEY_LEN)?;
    let mut bytes = [0; KEY_LEN];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::try_from(pair[0] << 4 | pair[1]).ok()?;
    }
    Some(Key::new(bytes))
}

/// As [`parse`] reads it.
#[must_use]
pub fn to_text(ring: &Ring) -> String {
    ring.keys.iter().fold(HEAD.to_owned(), |mut text, key| {
        let _ = writeln!(text, "{} {}", key.hex(), key.id());
        text
    })
}

/// The ring in the file at `path`; an empty one where there is no file.
///
/// # Errors
/// [`FileError`].
pub fn read(path: &Path) -> Result<Ring, FileError> {
    let refused = |why: String| FileError { path: path.to_owned(), why };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Ring::default()),
        Err(e) => return Err(refused(e.to_string())),
    };
    let mode = file.metadata().map_err(|e| refused(e.to_string()))?.mode();
    if mode & 0o077 != 0 {
        let mode = mode & 0o777;
        let why = format!("others than its owner may use it (mode {mode:03o}); chmod 600 it");
        return Err(refused(why));
    }
    let mut text = String::new();
    let read = file.take(MAX_FILE + 1).read_to_string(&mut text);
    let read = read.map_err(|e| refused(e.to_string()))?;
    if read as u64 > MAX_FILE {
        return Err(refused(format!("it is longer than {MAX_FILE} bytes")));
    }
    parse(&text).map_err(|why| refused(format!("{why}; restore it from a backup")))
}

/// Makes the file at `path`, durably, for its owner only. One that is there is left as it is and is an error.
///
/// # Errors
/// [`FileError`].
pub fn create(path: &Path, ring: &Ring) -> Result<(), FileError> {
    let write = || {
        if path.try_exists()? {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // The data directory is this node's alone: nobody makes the file between the look and this.
        crate::file::write_raw(path, to_text(ring).as_bytes())
    };
    write().map_err(|e: io::Error| FileError { path: path.to_owned(), why: e.to_string() })
}
