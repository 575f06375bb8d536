//! Files: secrets and tokens are read from where they belong.

use std::fmt::Display;
use std::io::Read;
use std::path::{Path, PathBuf};

use std::sync::Arc;

use api::{Chap, ChapUser, Dhchap, DhchapSecret, MutualChap, Secret, Tls, TlsKey};

use initiator::nvme::Secrets;
use nvme::auth::{self, Policy};

use crate::cli::{HostKeyArgs, UserAndFile};
use crate::exit::{Failure, USAGE};

/// Longest file with a secret, in bytes.
const MAX: u64 = 4096;

/// A path from / on: the node does not know our working directory.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::new(USAGE, format!("{}: {e}", path.display())))
}

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

/// What this machine shares with a volume when it is the host.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostKeys {
    pub(crate) secrets: Option<Arc<Secrets>>,
    pub(crate) tls_key: Option<Arc<nvme::tls::TlsKey>>,
}

/// Likewise, out of its files.
pub(crate) fn host_keys(args: &HostKeyArgs) -> Result<HostKeys, Failure> {
    fn read<T, E: Display>(
        file: Option<&PathBuf>,
        parse: fn(&str) -> Result<T, E>,
    ) -> Result<Option<T>, Failure> {
        let Some(file) = file else { return Ok(None) };
        let parsed = parse(&line(file)?);
        let parsed = parsed.map_err(|e| Failure::new(USAGE, format!("{}: {e}", file.display())))?;
        Ok(Some(parsed))
    }
    let controller = read(args.dhchap_ctrl_secret.as_ref(), auth::Secret::parse)?;
    let host = read(args.dhchap_secret.as_ref(), auth::Secret::parse)?;
    let secrets = host.map(|host| Secrets { host, controller, policy: Policy::default() });
    let tls_key = read(args.tls_key.as_ref(), nvme::tls::TlsKey::parse)?;
    Ok(HostKeys { secrets: secrets.map(Arc::new), tls_key: tls_key.map(Arc::new) })
}

fn credentials(from: &UserAndFile) -> Result<(ChapUser, Secret), Failure> {
    let user = ChapUser::try_from(from.user.clone());
    let user = user.map_err(|e| Failure::new(USAGE, e.to_string()))?;
    let secret = Secret::try_from(line(&from.file)?);
    let secret =
        secret.map_err(|e| Failure::new(USAGE, format!("{}: {e}", from.file.display())))?;
    Ok((user, secret))
}
