//! Secrets and tokens, read from where they belong: files.

use std::io::Read;
use std::path::Path;

use api::{Chap, ChapUser, Dhchap, DhchapSecret, MutualChap, Secret, Tls, TlsKey};

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

/// What an NVMe host and the volume prove to each other, out of its files.
pub(crate) fn dhchap(secret: &Path, controller: Option<&Path>) -> Result<Dhchap, Failure> {
    let secret = dhchap_secret(secret)?;
    let controller = controller.map(dhchap_secret).transpose()?;
    Dhchap::new(secret, controller).map_err(|e| Failure::new(USAGE, e.to_string()))
}

fn dhchap_secret(file: &Path) -> Result<DhchapSecret, Failure> {
    let secret = DhchapSecret::try_from(line(file)?);
    secret.map_err(|e| Failure::new(USAGE, format!("{}: {e}", file.display())))
}

/// The TLS key of an NVMe host, out of its file.
pub(crate) fn tls(file: &Path, required: bool) -> Result<Tls, Failure> {
    let key = TlsKey::try_from(line(file)?);
    let key = key.map_err(|e| Failure::new(USAGE, format!("{}: {e}", file.display())))?;
    Ok(Tls { key, required })
}

fn credentials(from: &UserAndFile) -> Result<(ChapUser, Secret), Failure> {
    let user = ChapUser::try_from(from.user.clone());
    let user = user.map_err(|e| Failure::new(USAGE, e.to_string()))?;
    let secret = Secret::try_from(line(&from.file)?);
    let secret =
        secret.map_err(|e| Failure::new(USAGE, format!("{}: {e}", from.file.display())))?;
    Ok((user, secret))
}
