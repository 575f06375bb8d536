//! Who may reach a volume.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::Invalid;

/// One entry of a volume's list of initiators.
///
/// As text: `any`, an iSCSI name (`iqn.`, `eui.`, `naa.`) or an NVMe host name (`nqn.`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Initiator {
    /// Every initiator that can reach the node.
    Any,
    /// An iSCSI initiator, by its name (RFC 7143 4.2.7) in lower case.
    Iscsi(String),
    /// An NVMe host, by its qualified name (NVMe Base 2.0 4.5).
    Nvme(String),
}

impl PartialSchema for Initiator {
    fn schema() -> RefOr<Schema> {
        let about = "'any', an iSCSI name (iqn., eui., naa.) or an NVMe host name (nqn.).";
        ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some(about))
            .max_length(Some(MAX_NAME))
            .examples(["iqn.1993-08.org.debian:01:abcdef"])
            .into()
    }
}

impl ToSchema for Initiator {}

/// Longest iSCSI or NVMe name, in bytes (RFC 7143 4.2.7.1; NVMe Base 2.0 4.5).
const MAX_NAME: usize = 223;

const ALLOWED: &str = "use 'any', an iSCSI name such as iqn.1993-08.org.debian:01:abcdef, \
                       or an NVMe host name such as nqn.2014-08.org.nvmexpress:uuid:UUID";

/// Whether `s` starts like `2014-08.`: the year and month in which the authority owned its domain.
fn starts_with_date(s: &str) -> bool {
    let b = s.as_bytes();
    let digits = |range: std::ops::Range<usize>| {
        b.get(range).is_some_and(|d| d.iter().all(u8::is_ascii_digit))
    };
    let month = s.get(5..7).is_some_and(|m| ("01"..="12").contains(&m));
    digits(0..4) && b.get(4) == Some(&b'-') && digits(5..7) && month && b.get(7) == Some(&b'.')
}

/// Whether `s` is a domain in reverse: dot-separated labels.
fn is_domain(s: &str) -> bool {
    let label = |l: &str| {
        !l.is_empty()
            && !l.starts_with('-')
            && !l.ends_with('-')
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    s.split('.').all(label)
}

/// Whether `rest`, what follows `iqn.` or `nqn.`, is a date, a domain and a `suffix` that passes.
fn is_qualified(rest: &str, needs_suffix: bool, suffix: impl Fn(char) -> bool) -> bool {
    let (authority, own) = match rest.split_once(':') {
        Some((authority, own)) => (authority, Some(own)),
        None => (rest, None),
    };
    starts_with_date(authority)
        && is_domain(authority.get(8..).unwrap_or_default())
        && own.map_or(!needs_suffix, |own| !own.is_empty() && own.chars().all(suffix))
}

fn is_hex(s: &str, lengths: &[usize]) -> bool {
    lengths.contains(&s.len()) && s.bytes().all(|b| b.is_ascii_hexdigit())
}

fn is_iscsi_name(s: &str) -> bool {
    // RFC 3722 leaves letters, digits and three marks of ASCII in an iSCSI name.
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '-' | '.' | ':');
    if let Some(rest) = s.strip_prefix("iqn.") {
        is_qualified(rest, false, allowed)
    } else if let Some(rest) = s.strip_prefix("eui.") {
        is_hex(rest, &[16])
    } else {
        s.strip_prefix("naa.").is_some_and(|rest| is_hex(rest, &[16, 32]))
    }
}

impl Initiator {
    /// Whether this is an iSCSI initiator or everyone.
    #[must_use]
    pub fn covers_iscsi(&self) -> bool {
        matches!(self, Self::Any | Self::Iscsi(_))
    }

    /// Whether this is an NVMe host or everyone.
    #[must_use]
    pub fn covers_nvme(&self) -> bool {
        matches!(self, Self::Any | Self::Nvme(_))
    }
}

impl FromStr for Initiator {
    type Err = Invalid;

    fn from_str(s: &str) -> Result<Self, Invalid> {
        let refused = || Invalid::new("initiator", s, ALLOWED);
        if s.eq_ignore_ascii_case("any") {
            return Ok(Self::Any);
        }
        if s.len() > MAX_NAME {
            let allowed = format!("a name has at most {MAX_NAME} bytes");
            return Err(Invalid::new("initiator", s, allowed));
        }
        if let Some(rest) = s.strip_prefix("nqn.") {
            let printable = |c: char| !c.is_control() && !c.is_whitespace();
            return is_qualified(rest, true, printable)
                .then(|| Self::Nvme(s.to_owned()))
                .ok_or_else(refused);
        }
        let lower = s.to_lowercase();
        if is_iscsi_name(&lower) { Ok(Self::Iscsi(lower)) } else { Err(refused()) }
    }
}

impl TryFrom<String> for Initiator {
    type Error = Invalid;

    fn try_from(s: String) -> Result<Self, Invalid> {
        s.parse()
    }
}

impl From<Initiator> for String {
    fn from(initiator: Initiator) -> Self {
        initiator.to_string()
    }
}

impl fmt::Display for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "any",
            Self::Iscsi(name) | Self::Nvme(name) => name,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_of_real_initiators_are_accepted() {
        for name in [
            "iqn.1993-08.org.debian:01:e6b4ef21b9f",
            "iqn.1991-05.com.microsoft:win-host.example.org",
            "iqn.2008-11.org.linux-kvm:guest",
            "iqn.2001-04.com.example",
            "eui.02004567A425678D",
            "naa.52004567BA64678D",
            "naa.62004567BA64678D0123456789ABCDEF",
        ] {
            let parsed: Initiator = name.parse().unwrap();
            assert_eq!(parsed, Initiator::Iscsi(name.to_lowercase()));
        }
        for name in [
            "nqn.2014-08.org.nvmexpress:uuid:8a7b6c5d-0000-4000-8000-112233445566",
            "nqn.2016-06.io.spdk:Host_1",
        ] {
            assert_eq!(name.parse::<Initiator>().unwrap(), Initiator::Nvme(name.to_owned()));
        }
        assert_eq!("Any".parse::<Initiator>().unwrap(), Initiator::Any);
    }

    #[test]
    fn what_no_initiator_is_called_is_refused() {
        for name in [
            "",
            "*",
            "all",
            "host1",
            "iqn.",
            "iqn.1993-13.org.debian:x",
            "iqn.1993-08:x",
            "iqn.1993-08.org..debian:x",
            "iqn.1993-08.org.debian:",
            "iqn.1993-08.org.debian:a b",
            "iqn.1993-08.org.debian:a_b",
            "eui.02004567A425678",
            "naa.52004567BA64678D0",
            "nqn.2014-08.org.nvmexpress",
            "nqn.2014-08.org.nvmexpress:a b",
            "NQN.2014-08.org.nvmexpress:a",
            &format!("iqn.1993-08.org.debian:{}", "x".repeat(201)),
        ] {
            assert!(name.parse::<Initiator>().is_err(), "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_and_what_passes_parses_back(
            s in "(iqn\\.|nqn\\.|eui\\.|naa\\.)?([0-9]{4}-[0-9]{2}\\.)?.{0,60}"
        ) {
            if let Ok(initiator) = s.parse::<Initiator>() {
                prop_assert_eq!(initiator.to_string().parse::<Initiator>(), Ok(initiator));
            }
        }
    }
}
