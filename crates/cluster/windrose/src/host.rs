//! This machine's identity as an NVMe host: nvme-cli's files, or a name derived from the machine
//! id, as nvme-cli did before version 2 (which generates a random one each time).

use std::path::Path;

use api::Initiator;
use ring::hmac;
use uuid::Uuid;

use crate::exit::{CliError, USAGE};
use crate::files;

/// nvme-cli's identity files.
const HOST_NQN_FILE: &str = "/etc/nvme/hostnqn";
const HOST_ID_FILE: &str = "/etc/nvme/hostid";
/// machine-id(5).
const MACHINE_ID_FILE: &str = "/etc/machine-id";

/// Prefix of a host name that is a UUID (NVMe Base 2.0, 4.5).
const UUID_NQN_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// nvme-cli's application id, hashed with the machine id to keep that confidential.
const APPLICATION_ID: Uuid = Uuid::from_u128(0xc7f4_6181_12be_4932_8c83_106f_9ddd_d86b);

/// An NVMe host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NvmeHost {
    /// Its qualified name.
    pub(crate) nqn: String,
    /// Its identifier.
    pub(crate) id: Uuid,
}

impl NvmeHost {
    /// This machine's identity, with `nqn` and `id` taking precedence.
    pub(crate) fn local(nqn: Option<&Initiator>, id: Option<Uuid>) -> Result<Self, CliError> {
        Self::resolve(nqn, id, [HOST_NQN_FILE, HOST_ID_FILE, MACHINE_ID_FILE].map(Path::new))
    }

    fn resolve(
        nqn: Option<&Initiator>,
        id: Option<Uuid>,
        [nqn_file, id_file, machine]: [&Path; 3],
    ) -> Result<Self, CliError> {
        let own = || application_machine_id(&files::read_line(machine).ok()?);
        let nqn = match nqn {
            Some(nqn) if nqn.covers_nvme() && *nqn != Initiator::Any => nqn.to_string(),
            Some(nqn) => {
                return Err(CliError::new(USAGE, format!("{nqn} is not the NQN of a host")));
            }
            None if nqn_file.exists() => files::read_line(nqn_file)?,
            None => format!("{UUID_NQN_PREFIX}{}", own().ok_or_else(no_host_identity)?),
        };
        let id = match id {
            Some(id) => id,
            None if id_file.exists() => read_uuid(id_file)?,
            // A UUID name serves as the identifier too; any other name yields no stable one.
            None => {
                let named = nqn.strip_prefix(UUID_NQN_PREFIX).and_then(|uuid| uuid.parse().ok());
                named.or_else(own).ok_or_else(no_host_identity)?
            }
        };
        if id.is_nil() {
            return Err(CliError::new(USAGE, "a host's identifier is not zero"));
        }
        Ok(Self { nqn, id })
    }
}

fn no_host_identity() -> CliError {
    CliError::new(
        USAGE,
        format!("this host has no NQN: neither {HOST_NQN_FILE} nor {MACHINE_ID_FILE} exists"),
    )
    .with_hint("make one with `nvme gen-hostnqn`, or set --host-nqn and --host-id")
}

fn read_uuid(file: &Path) -> Result<Uuid, CliError> {
    let line = files::read_line(file)?;
    line.trim().parse().map_err(|e| CliError::new(USAGE, format!("{}: {e}", file.display())))
}

/// The application-specific UUID of a machine (sd_id128_get_machine_app_specific(3)): a keyed hash,
/// formatted as a random UUID.
fn application_machine_id(machine_id: &str) -> Option<Uuid> {
    let machine: Uuid = machine_id.trim().parse().ok()?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, machine.as_bytes());
    let tag = hmac::sign(&key, APPLICATION_ID.as_bytes());
    let bytes = tag.as_ref().first_chunk::<16>()?;
    Some(uuid::Builder::from_random_bytes(*bytes).into_uuid())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "8a7b6c5d-0000-4000-8000-112233445566";

    fn choose(nqn: Option<&str>, files: [Option<&str>; 3]) -> Result<NvmeHost, CliError> {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["nqn", "id", "machine"].map(|name| dir.path().join(name));
        for (path, text) in paths.iter().zip(files) {
            if let Some(text) = text {
                std::fs::write(path, format!("{text}\n")).unwrap();
            }
        }
        let nqn = nqn.map(|nqn| nqn.parse().unwrap());
        let [a, b, c] = &paths;
        NvmeHost::resolve(nqn.as_ref(), None, [a, b, c])
    }

    #[test]
    fn what_is_written_down_goes_before_what_can_be_made() {
        let machine = Some("0123456789abcdef0123456789abcdef");
        let host = choose(None, [None, None, machine]).unwrap();
        assert_eq!(host, choose(None, [None, None, machine]).unwrap(), "it stays");
        assert_eq!(host.nqn, format!("{UUID_NQN_PREFIX}{}", host.id));
        // What `systemd-id128 machine-id --app-specific` prints for this machine id.
        assert_eq!(host.id.to_string(), "b9ab29c5-8029-47ad-8087-adf3ca83bb9a");
        let named = format!("{UUID_NQN_PREFIX}{UUID}");
        let error = choose(None, [Some(&named), None, machine]).unwrap();
        assert_eq!((error.nqn.as_str(), error.id.to_string()), (named.as_str(), UUID.to_owned()));
        let odd = "nqn.2026-01.net.example:h";
        let error = choose(Some(odd), [Some(&named), None, machine]).unwrap();
        assert_eq!((error.nqn.as_str(), error.id), (odd, host.id));
        let error = choose(Some(odd), [None, Some(UUID), None]).unwrap();
        assert_eq!(error.id.to_string(), UUID);
        assert!(choose(None, [None, None, None]).is_err());
        assert!(choose(Some(odd), [None, Some("no UUID"), machine]).is_err());
        assert!(choose(Some("iqn.2026-01.net.example:h"), [None, None, machine]).is_err());
        let zero = "00000000-0000-0000-0000-000000000000";
        assert!(choose(Some(odd), [None, Some(zero), machine]).is_err());
    }
}
