//! Who this machine is as a host of NVMe volumes: what nvme-cli has written down, or else a name made of the machine's
//! identity, as nvme-cli did before its version 2 (which draws another one each time).

use std::path::Path;

use api::Initiator;
use ring::hmac;
use uuid::Uuid;

use crate::exit::{Failure, USAGE};
use crate::files;

/// Where nvme-cli keeps them.
const NQN: &str = "/etc/nvme/hostnqn";
const ID: &str = "/etc/nvme/hostid";
/// machine-id(5).
const MACHINE: &str = "/etc/machine-id";

/// What comes before a host's UUID in its name (NVMe Base 2.0, 4.5).
const PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// What nvme-cli mixes into the machine's identity, which others are not to see.
const APPLICATION: Uuid = Uuid::from_u128(0xc7f4_6181_12be_4932_8c83_106f_9ddd_d86b);

/// A host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// Its qualified name.
    pub(crate) nqn: String,
    /// Its identifier.
    pub(crate) id: Uuid,
}

impl Host {
    /// This machine, but for what is given.
    pub(crate) fn of_this_machine(
        nqn: Option<&Initiator>,
        id: Option<Uuid>,
    ) -> Result<Self, Failure> {
        Self::choose(nqn, id, [NQN, ID, MACHINE].map(Path::new))
    }

    fn choose(
        nqn: Option<&Initiator>,
        id: Option<Uuid>,
        [nqn_file, id_file, machine]: [&Path; 3],
    ) -> Result<Self, Failure> {
        let own = || of_machine(&files::line(machine).ok()?);
        let nqn = match nqn {
            Some(nqn) if nqn.covers_nvme() && *nqn != Initiator::Any => nqn.to_string(),
            Some(nqn) => return Err(Failure::new(USAGE, format!("{nqn} is no NQN of a host"))),
            None if nqn_file.exists() => files::line(nqn_file)?,
            None => format!("{PREFIX}{}", own().ok_or_else(nameless)?),
        };
        let id = match id {
            Some(id) => id,
            None if id_file.exists() => uuid_in(id_file)?,
            // A name that is a UUID is an identifier already; another one has none that would be the same tomorrow.
            None => {
                let named = nqn.strip_prefix(PREFIX).and_then(|uuid| uuid.parse().ok());
                named.or_else(own).ok_or_else(nameless)?
            }
        };
        if id.is_nil() {
            return Err(Failure::new(USAGE, "a host's identifier is not zero"));
        }
        Ok(Self { nqn, id })
    }
}

fn nameless() -> Failure {
    Failure::new(USAGE, format!("this host has no name: neither {NQN} nor {MACHINE} is there"))
        .hint("`nvme gen-hostnqn` makes one; --host-nqn and --host-id give them")
}

fn uuid_in(file: &Path) -> Result<Uuid, Failure> {
    let line = files::line(file)?;
    line.trim().parse().map_err(|e| Failure::new(USAGE, format!("{}: {e}", file.display())))
}

/// The UUID of a machine for this use (sd_id128_get_machine_app_specific(3)): a keyed hash, made to look random.
fn of_machine(machine_id: &str) -> Option<Uuid> {
    let machine: Uuid = machine_id.trim().parse().ok()?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, machine.as_bytes());
    let tag = hmac::sign(&key, APPLICATION.as_bytes());
    let bytes = tag.as_ref().first_chunk::<16>()?;
    Some(uuid::Builder::from_random_bytes(*bytes).into_uuid())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "8a7b6c5d-0000-4000-8000-112233445566";

    fn choose(nqn: Option<&str>, files: [Option<&str>; 3]) -> Result<Host, Failure> {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["nqn", "id", "machine"].map(|name| dir.path().join(name));
        for (path, text) in paths.iter().zip(files) {
            if let Some(text) = text {
                std::fs::write(path, format!("{text}\n")).unwrap();
            }
        }
        let nqn = nqn.map(|nqn| nqn.parse().unwrap());
        let [a, b, c] = &paths;
        Host::choose(nqn.as_ref(), None, [a, b, c])
    }

    #[test]
    fn what_is_written_down_goes_before_what_can_be_made() {
        let machine = Some("0123456789abcdef0123456789abcdef");
        let made = choose(None, [None, None, machine]).unwrap();
        assert_eq!(made, choose(None, [None, None, machine]).unwrap(), "it stays");
        assert_eq!(made.nqn, format!("{PREFIX}{}", made.id));
        // What `systemd-id128 machine-id --app-specific` says of such a machine.
        assert_eq!(made.id.to_string(), "b9ab29c5-8029-47ad-8087-adf3ca83bb9a");
        let named = format!("{PREFIX}{UUID}");
        let told = choose(None, [Some(&named), None, machine]).unwrap();
        assert_eq!((told.nqn.as_str(), told.id.to_string()), (named.as_str(), UUID.to_owned()));
        let odd = "nqn.2026-01.net.example:h";
        let told = choose(Some(odd), [Some(&named), None, machine]).unwrap();
        assert_eq!((told.nqn.as_str(), told.id), (odd, made.id));
        let told = choose(Some(odd), [None, Some(UUID), None]).unwrap();
        assert_eq!(told.id.to_string(), UUID);
        assert!(choose(None, [None, None, None]).is_err());
        assert!(choose(Some(odd), [None, Some("no UUID"), machine]).is_err());
        assert!(choose(Some("iqn.2026-01.net.example:h"), [None, None, machine]).is_err());
        let zero = "00000000-0000-0000-0000-000000000000";
        assert!(choose(Some(odd), [None, Some(zero), machine]).is_err());
    }
}
