//! Names of a pool's disks: the serial number, the path, the number in the pool, or the random id
//! in the label.
//!
//! Serial numbers come from the makers of disks and from those who set up virtual machines: they
//! contain slashes and blanks, look like numbers or paths, and may not be unique. A name that
//! matches two disks is refused; the prefixes `serial:`, `path:` and `number:` say which one is
//! meant.

use std::path::Path;

use pool_metadata::{MemberId, PoolMember};

use super::error::PoolError;

/// Prefixes that say what a name is.
const SERIAL_PREFIX: &str = "serial:";
const PATH_PREFIX: &str = "path:";
const NUMBER_PREFIX: &str = "number:";

/// The names of a disk. `K` is the caller's key for it.
#[derive(Clone, Debug)]
pub(super) struct DiskNames<'a, K> {
    pub(super) key: K,
    pub(super) number: u16,
    /// Empty if it has none.
    pub(super) serial: &'a str,
    /// Where it is, if it is present.
    pub(super) path: Option<&'a Path>,
    /// Its random id, from its label.
    pub(super) uuid: uuid::Uuid,
}

/// The names of a member.
pub(super) fn disk_names<'a, K>(
    key: K,
    id: MemberId,
    member: &'a PoolMember,
    path: Option<&'a Path>,
) -> DiskNames<'a, K> {
    DiskNames { key, number: id.0, serial: member.serial.as_str(), path, uuid: member.uuid }
}

impl<K> DiskNames<'_, K> {
    /// The prefix of the kind of name that `name` is for this disk; `None` if it does not match.
    fn matching_prefix(&self, name: &str) -> Option<&'static str> {
        let is_serial = |name: &str| !self.serial.is_empty() && self.serial == name;
        let is_path = |name: &str| self.path == Some(Path::new(name));
        let is_number = |name: &str| self.number.to_string() == name;
        if is_serial(name) || name.strip_prefix(SERIAL_PREFIX).is_some_and(is_serial) {
            return Some(SERIAL_PREFIX);
        }
        if is_path(name) || name.strip_prefix(PATH_PREFIX).is_some_and(is_path) {
            return Some(PATH_PREFIX);
        }
        let is_number = is_number(name) || name.strip_prefix(NUMBER_PREFIX).is_some_and(is_number);
        // No two disks have one random id, so it needs no prefix of its own.
        (is_number || self.uuid.to_string() == name).then_some(NUMBER_PREFIX)
    }
}

/// The disk of `all` that `name` denotes.
///
/// # Errors
/// There is none, or there are several; then also how to tell them apart.
pub(super) fn resolve_disk_name<K: Copy + PartialEq>(
    name: &str,
    all: &[DiskNames<'_, K>],
) -> Result<K, PoolError> {
    let found: Vec<_> = all.iter().filter_map(|d| Some((d, d.matching_prefix(name)?))).collect();
    match found.as_slice() {
        [] => Err(PoolError::new(format!("it has no disk {name}"))
            .with_hint("`windrose pool show` lists its disks, with their serial numbers")),
        [(disk, _), others @ ..] if others.iter().all(|(other, _)| other.key == disk.key) => {
            Ok(disk.key)
        }
        _ => {
            Err(PoolError::new(format!("{name} means several disks: {}", describe_matches(&found)))
                .with_hint("name one of them: serial:SERIAL, path:PATH or number:NUMBER"))
        }
    }
}

fn describe_matches<K>(found: &[(&DiskNames<'_, K>, &'static str)]) -> String {
    let one = |(disk, how): &(&DiskNames<'_, K>, &'static str)| {
        let what = match *how {
            SERIAL_PREFIX => "the serial number",
            PATH_PREFIX => "the path",
            _ => "the number",
        };
        let at = disk.path.map(|path| format!(" at {}", path.display())).unwrap_or_default();
        format!("it is {what} of disk number:{}{at}", disk.number)
    };
    found.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// A serial number, or a path, as the operator can type it: quoted for a shell if needed; a serial
/// number that could be taken for an option, a number or a prefixed name gets the prefix `serial:`.
#[must_use]
pub fn disk_argument(name: &str) -> String {
    let is_number = name.bytes().all(|b| b.is_ascii_digit());
    let has_prefix =
        [SERIAL_PREFIX, PATH_PREFIX, NUMBER_PREFIX].iter().any(|prefix| name.starts_with(prefix));
    let prefix = if is_number || has_prefix || name.starts_with('-') { SERIAL_PREFIX } else { "" };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_./:=@%+,-".contains(c);
    match name.chars().all(is_plain) {
        true => format!("{prefix}{name}"),
        false => format!("'{prefix}{}'", name.replace('\'', r"'\''")),
    }
}

/// Whether the operator typed the serial number of a disk, or the path of one that has none.
pub(super) fn matches_serial_or_path(typed: &[String], serial: &str, path: &str) -> bool {
    let (prefix, expected) =
        if serial.is_empty() { (PATH_PREFIX, path) } else { (SERIAL_PREFIX, serial) };
    typed.iter().any(|t| t == expected || t.strip_prefix(prefix) == Some(expected))
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn disks<'a>(all: &[(u16, &'a str, &'a str)]) -> Vec<DiskNames<'a, u16>> {
        let called = |(number, serial, path): &(u16, &'a str, &'a str)| DiskNames {
            key: *number,
            number: *number,
            serial,
            path: (!path.is_empty()).then_some(Path::new(*path)),
            uuid: Uuid::from_u128(u128::from(*number) + 1),
        };
        all.iter().map(called).collect()
    }

    #[test]
    fn each_serial_number_names_its_disk() {
        const ODD: [&str; 10] = [
            "WD/WX-12",
            "loop:/images/a b.img",
            "S4EV 1",
            "50%",
            "a?b",
            "#7",
            "é\u{4e00}",
            "./x",
            "-o",
            "a'b\"c\\$d",
        ];
        let all: Vec<_> = (0..).zip(ODD).map(|(n, serial)| (n, serial, "")).collect();
        let all = disks(&all);
        for (number, serial) in (0..).zip(ODD) {
            assert_eq!(resolve_disk_name(serial, &all), Ok(number), "{serial}");
            assert_eq!(
                resolve_disk_name(&format!("serial:{serial}"), &all),
                Ok(number),
                "{serial}"
            );
        }
        let uuid = Uuid::from_u128(3).to_string();
        assert_eq!(resolve_disk_name(&uuid, &all), Ok(2));
        let none = resolve_disk_name("WD/WX-13", &all).unwrap_err();
        assert_eq!(none.to_string(), "it has no disk WD/WX-13");
        // A disk without a serial number is not called "".
        assert!(resolve_disk_name("", &disks(&[(0, "", "/dev/a")])).is_err());
    }

    #[test]
    fn an_ambiguous_disk_name_is_refused() {
        // The second has the first one's number for a serial number, the third the first one's
        // path.
        let all = disks(&[(0, "S0", "/dev/a"), (1, "0", "/dev/b"), (2, "/dev/a", "/dev/c")]);
        let twice = resolve_disk_name("0", &all).unwrap_err().to_string();
        let expected = "0 means several disks: it is the number of disk number:0 at /dev/a, it is the serial number of disk number:1 at /dev/b";
        assert_eq!(twice, expected);
        assert_eq!(resolve_disk_name("number:0", &all), Ok(0));
        assert_eq!(resolve_disk_name("serial:0", &all), Ok(1));
        assert!(resolve_disk_name("/dev/a", &all).is_err());
        assert_eq!(resolve_disk_name("path:/dev/a", &all), Ok(0));
        assert_eq!(resolve_disk_name("serial:/dev/a", &all), Ok(2));
        // Cheap enclosures give all their disks one serial number.
        let same = disks(&[(0, "0123", "/dev/a"), (1, "0123", "/dev/b"), (2, "S2", "/dev/c")]);
        assert!(
            resolve_disk_name("0123", &same).unwrap_err().to_string().contains("several disks")
        );
        assert_eq!(resolve_disk_name("/dev/b", &same), Ok(1));
        // A file is called by its path, which is its serial number as well.
        assert_eq!(resolve_disk_name("/a.img", &disks(&[(0, "/a.img", "/a.img")])), Ok(0));
    }

    #[test]
    fn displayed_disk_names_resolve() {
        assert_eq!(disk_argument("WD-WX12"), "WD-WX12");
        assert_eq!(disk_argument("loop:/images/a.img"), "loop:/images/a.img");
        assert_eq!(disk_argument("S4EV 1"), "'S4EV 1'");
        assert_eq!(disk_argument("a'b"), r"'a'\''b'");
        assert_eq!(disk_argument("-o"), "serial:-o");
        assert_eq!(disk_argument("12"), "serial:12");
        assert_eq!(disk_argument("path:x y"), "'serial:path:x y'");
        for odd in ["a?b", "#7", "$x", "é"] {
            assert_eq!(disk_argument(odd), format!("'{odd}'"));
        }
    }

    #[test]
    fn only_its_identity_allows_overwriting_a_disk() {
        let is =
            |typed: &str, serial, path| matches_serial_or_path(&[typed.to_owned()], serial, path);
        assert!(is("WD/1", "WD/1", "/dev/a") && is("serial:WD/1", "WD/1", "/dev/a"));
        assert!(is("/a.img", "", "/a.img") && is("path:/a.img", "", "/a.img"));
        assert!(!is("/dev/a", "WD/1", "/dev/a") && !is("path:/dev/a", "WD/1", "/dev/a"));
        assert!(!is("", "WD/1", "/dev/a") && !is("serial:", "", "/dev/a"));
    }
}
