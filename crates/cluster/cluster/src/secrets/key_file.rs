//! The key file of a standalone node, in its data directory: a line of 64 hex digits per key, the
//! sealing key first. A blank and the key's identifier may follow, which exposes a damaged line.
//! Lines that begin with `#` are comments. Only its owner may read the file.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{KEY_LEN, Keyring, MAX_KEYS, SealingKey};

/// Longest file, in bytes.
const MAX_FILE_LEN: u64 = 8 << 10;

/// What a new file begins with.
const FILE_HEADER: &str = "# Keys of the secrets in this node's store. Keep a copy, and not beside copies of the store.\n\
    # The first one seals; all of them open.\n";

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}", path.display())]
pub struct KeyFileError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

/// Parses a file's text. Errors do not reveal its contents.
///
/// # Errors
/// What is wrong, and in which line.
pub fn parse(text: &str) -> Result<Keyring, String> {
    let lines = text.lines().map(str::trim).enumerate();
    let mut keys = Vec::new();
    for (number, line) in lines.filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
        let key = parse_line(line).ok_or_else(|| format!("line {} is not a key", number + 1))?;
        keys.push(key);
        if keys.len() > MAX_KEYS {
            return Err(format!("it has more than {MAX_KEYS} keys"));
        }
    }
    Keyring::new(keys).ok_or_else(|| "it has a duplicate key".to_owned())
}

/// The key in a line; `None` if it does not match the identifier in the line.
fn parse_line(line: &str) -> Option<SealingKey> {
    let Some((key, id)) = line.split_once(' ') else { return parse_key(line) };
    parse_key(key).filter(|key| key.id().to_string() == id)
}

fn parse_key(hex: &str) -> Option<SealingKey> {
    let digits: Option<Vec<_>> = hex.chars().map(|c| c.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len() == 2 * KEY_LEN)?;
    let mut bytes = [0; KEY_LEN];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::try_from(pair[0] << 4 | pair[1]).ok()?;
    }
    Some(SealingKey::new(bytes))
}

/// Encodes a keyring; [`parse`] decodes it.
#[must_use]
pub fn to_text(keyring: &Keyring) -> String {
    keyring.keys.iter().fold(FILE_HEADER.to_owned(), |mut text, key| {
        let _ = writeln!(text, "{} {}", key.to_hex(), key.id());
        text
    })
}

/// Reads the keyring in the file at `path`; an empty one if there is no file.
///
/// # Errors
/// [`KeyFileError`].
pub fn read(path: &Path) -> Result<Keyring, KeyFileError> {
    let refused = |why: String| KeyFileError { path: path.to_owned(), why };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Keyring::default()),
        Err(e) => return Err(refused(e.to_string())),
    };
    let mode = file.metadata().map_err(|e| refused(e.to_string()))?.mode();
    if mode & 0o077 != 0 {
        let mode = mode & 0o777;
        let why =
            format!("users other than its owner have access to it (mode {mode:03o}); chmod 600 it");
        return Err(refused(why));
    }
    let mut text = String::new();
    let read = file.take(MAX_FILE_LEN + 1).read_to_string(&mut text);
    let read = read.map_err(|e| refused(e.to_string()))?;
    if read as u64 > MAX_FILE_LEN {
        return Err(refused(format!("it is longer than {MAX_FILE_LEN} bytes")));
    }
    parse(&text).map_err(|why| refused(format!("{why}; restore it from a backup")))
}

/// Creates the file at `path`, durably, readable by its owner only. An existing file is an error,
/// and stays as it is.
///
/// # Errors
/// [`KeyFileError`].
pub fn create(path: &Path, keyring: &Keyring) -> Result<(), KeyFileError> {
    let write = || {
        if path.try_exists()? {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // The data directory is exclusive to this node: no other process creates the file in
        // between.
        crate::record_file::write_unchecked(path, to_text(keyring).as_bytes())
    };
    write().map_err(|e: io::Error| KeyFileError { path: path.to_owned(), why: e.to_string() })
}
