//! Secrets and tokens, read from where they belong: files.

use std::io::Read;
use std::path::Path;

use api::{Chap, ChapUser, MutualChap, Secret};

use crate::cli::UserAndFile;
use crate::exit::{Failure, USAGE};

/// Longest file with a secret, in bytes.
const MAX: u64 = 4096;

/// The one line in the file at `path`; `-` is standard input.
pub(crate) fn line(path: &Path) -> Result<String, Failure> {
    let refused = |why: String| Failure::new(USAGE, format!("{}: {why}", path.display()));
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().take(MAX).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(MAX).read_to_string(&mut text))
    };
    read.map_err(|e| refused(e.to_string()))?;
    let line = text.trim_end_matches(['\r', '\n']);
    if line.is_empty() || line.contains('\n') {
        return Err(refused("exactly one line is expected".to_owned()));
    }
    Ok(line.to_owned())
}

/// CHAP credentials, with the secrets out of their files.
pub(crate) fn chap(user: &UserAndFile, mutual: Option<&UserAndFile>) -> Result<Chap, Failure> {
    let (user, secret) = credentials(user)?;
    let mutual = mutual.map(credentials).transpose()?;
    let mutual = mutual.map(|(user, secret)| MutualChap { user, secret });
    Chap::new(user, secret, mutual).map_err(|e| Failure::new(USAGE, e.to_string()))
}

fn credentials(from: &UserAndFile) -> Result<(ChapUser, Secret), Failure> {
    let user = ChapUser::try_from(from.user.clone());
    let user = user.map_err(|e| Failure::new(USAGE, e.to_string()))?;
    let secret = Secret::try_from(line(&from.file)?);
    let secret =
        secret.map_err(|e| Failure::new(USAGE, format!("{}: {e}", from.file.display())))?;
    Ok((user, secret))
}
