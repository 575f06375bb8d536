//! The identity of the machine's current boot.

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use crate::sys;

/// A random UUID that the kernel draws at boot (`random(4)`).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The boot's id; the same for all cores of this process, and read once. If the system does not
/// provide it, a random number, which looks like another boot.
pub(super) fn boot_id() -> u128 {
    static ID: OnceLock<u128> = OnceLock::new();
    *ID.get_or_init(|| read_or_draw(Path::new(BOOT_ID)))
}

fn read_or_draw(path: &Path) -> u128 {
    read(path).unwrap_or_else(|e| {
        tracing::warn!(
            path = %path.display(), error = %e,
            "the boot id is unknown: assuming another boot"
        );
        let mut bytes = [0; 16];
        sys::random(&mut bytes).expect("the system gives random bytes");
        u128::from_le_bytes(bytes)
    })
}

fn read(path: &Path) -> io::Result<u128> {
    let text = std::fs::read_to_string(path)?;
    parse_uuid(text.trim()).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a UUID"))
}

/// A UUID in its usual form.
fn parse_uuid(uuid: &str) -> Option<u128> {
    let groups: Vec<&str> = uuid.split('-').collect();
    let is_grouped = groups.iter().map(|g| g.len()).eq([8, 4, 4, 4, 12]);
    let digits = groups.concat();
    let hex = digits.bytes().all(|b| b.is_ascii_hexdigit());
    if is_grouped && hex { u128::from_str_radix(&digits, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_uuids_parse() {
        let parsed = parse_uuid("0a1b2c3d-0001-4203-8405-00000000ffff");
        assert_eq!(parsed, Some(0x0a1b_2c3d_0001_4203_8405_0000_0000_ffff));
        for wrong in [
            "",
            "0a1b2c3d00014203840500000000ffff",
            "0a1b2c3d-0001-4203-8405-00000000fffg",
            "+a1b2c3d-0001-4203-8405-00000000ffff",
            "0a1b2c3d-0001-4203-8405-00000000ffff-00",
        ] {
            assert_eq!(parse_uuid(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn without_a_boot_id_each_start_is_another_boot() {
        let nowhere = Path::new("/nowhere/boot_id");
        assert_ne!(read_or_draw(nowhere), read_or_draw(nowhere));
        assert_eq!(boot_id(), boot_id());
    }
}
