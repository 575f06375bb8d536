//! Reads secrets and tokens from files, and the arguments that name such files.

use std::fmt::Display;
use std::io::Read;
use std::path::{Path, PathBuf};

use std::sync::Arc;

use clap::Args;

use api::{Chap, ChapUser, Dhchap, DhchapSecret, MutualChap, Secret, Tls, TlsKey};

use initiator::nvme::Secrets;
use nvme::auth::{self, AuthPolicy};

use crate::exit::{CliError, USAGE};

/// Longest secret file, in bytes.
const MAX_SECRET_FILE_LEN: u64 = 4096;

/// What an NVMe host shares with a volume.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct HostKeyArgs {
    /// File with the secret with which this host authenticates (DH-HMAC-CHAP), as `nvme
    /// gen-dhchap-key` prints it; `-` reads it from standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) dhchap_secret: Option<PathBuf>,
    /// File with the secret with which the volume must authenticate; it differs from the host's.
    #[arg(long, value_name = "FILE", requires = "dhchap_secret")]
    pub(crate) dhchap_ctrl_secret: Option<PathBuf>,
    /// File with the TLS key of the connections, as `nvme gen-tls-key` prints it; `-` reads it from
    /// standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
}

/// A user name and the file with its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChapUserFile {
    pub(crate) user: String,
    pub(crate) file: PathBuf,
}

impl std::str::FromStr for ChapUserFile {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once(':') {
            Some((user, file)) if !user.is_empty() && !file.is_empty() => {
                Ok(Self { user: user.to_owned(), file: file.into() })
            }
            _ => {
                Err("use USER:SECRET-FILE; do not put the secret itself on the command line".into())
            }
        }
    }
}

/// An absolute path: the node does not know our working directory.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path).map_err(|e| CliError::new(USAGE, format!("{}: {e}", path.display())))
}

/// The only line of the file at `path`; `-` is standard input.
pub(crate) fn read_line(path: &Path) -> Result<String, CliError> {
    let refused = |why: String| CliError::new(USAGE, format!("{}: {why}", path.display()));
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().take(MAX_SECRET_FILE_LEN).read_to_string(&mut text)
    } else {
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_SECRET_FILE_LEN).read_to_string(&mut text))
    };
    read.map_err(|e| refused(e.to_string()))?;
    let line = text.trim_end_matches(['\r', '\n']);
    if line.is_empty() || line.contains('\n') {
        return Err(refused("exactly one line is expected".to_owned()));
    }
    Ok(line.to_owned())
}

/// Reads CHAP credentials from the secret files.
pub(crate) fn read_chap(
    user: &ChapUserFile,
    mutual: Option<&ChapUserFile>,
) -> Result<Chap, CliError> {
    let (user, secret) = read_credentials(user)?;
    let mutual = mutual.map(read_credentials).transpose()?;
    let mutual = mutual.map(|(user, secret)| MutualChap { user, secret });
    Chap::new(user, secret, mutual).map_err(|e| CliError::new(USAGE, e.to_string()))
}

/// Reads the DH-HMAC-CHAP secrets of an NVMe host and of the volume from files.
pub(crate) fn read_dhchap(secret: &Path, controller: Option<&Path>) -> Result<Dhchap, CliError> {
    let secret = read_dhchap_secret(secret)?;
    let controller = controller.map(read_dhchap_secret).transpose()?;
    Dhchap::new(secret, controller).map_err(|e| CliError::new(USAGE, e.to_string()))
}

fn read_dhchap_secret(file: &Path) -> Result<DhchapSecret, CliError> {
    let secret = DhchapSecret::try_from(read_line(file)?);
    secret.map_err(|e| CliError::new(USAGE, format!("{}: {e}", file.display())))
}

/// Reads an NVMe host's TLS key from a file.
pub(crate) fn read_tls_key(file: &Path, required: bool) -> Result<Tls, CliError> {
    let key = TlsKey::try_from(read_line(file)?);
    let key = key.map_err(|e| CliError::new(USAGE, format!("{}: {e}", file.display())))?;
    Ok(Tls { key, required })
}

/// The secrets and key that this machine, as the host, shares with a volume.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostKeys {
    pub(crate) secrets: Option<Arc<Secrets>>,
    pub(crate) tls_key: Option<Arc<nvme::tls::TlsKey>>,
}

/// Reads them from files.
pub(crate) fn read_host_keys(args: &HostKeyArgs) -> Result<HostKeys, CliError> {
    fn read<T, E: Display>(
        file: Option<&PathBuf>,
        parse: fn(&str) -> Result<T, E>,
    ) -> Result<Option<T>, CliError> {
        let Some(file) = file else { return Ok(None) };
        let parsed = parse(&read_line(file)?);
        let parsed =
            parsed.map_err(|e| CliError::new(USAGE, format!("{}: {e}", file.display())))?;
        Ok(Some(parsed))
    }
    let controller = read(args.dhchap_ctrl_secret.as_ref(), auth::Secret::parse)?;
    let host = read(args.dhchap_secret.as_ref(), auth::Secret::parse)?;
    let secrets = host.map(|host| Secrets { host, controller, policy: AuthPolicy::default() });
    let tls_key = read(args.tls_key.as_ref(), nvme::tls::TlsKey::parse)?;
    Ok(HostKeys { secrets: secrets.map(Arc::new), tls_key: tls_key.map(Arc::new) })
}

fn read_credentials(source: &ChapUserFile) -> Result<(ChapUser, Secret), CliError> {
    let user = ChapUser::try_from(source.user.clone());
    let user = user.map_err(|e| CliError::new(USAGE, e.to_string()))?;
    let secret = Secret::try_from(read_line(&source.file)?);
    let secret =
        secret.map_err(|e| CliError::new(USAGE, format!("{}: {e}", source.file.display())))?;
    Ok((user, secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_named_by_file() {
        let parsed: ChapUserFile = "u:/etc/a:b".parse().unwrap();
        assert_eq!((parsed.user.as_str(), parsed.file), ("u", "/etc/a:b".into()));
        for bad in ["u", "u:", ":f", ""] {
            assert!(bad.parse::<ChapUserFile>().unwrap_err().contains("USER:SECRET-FILE"));
        }
    }
}
