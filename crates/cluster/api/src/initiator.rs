//! Initiators that may access a volume.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::InvalidValue;

/// An entry of a volume's list of initiators.
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

const ALLOWED_FORMS: &str = "use 'any', an iSCSI name such as iqn.1993-08.org.debian:01:abcdef, \
                       or an NVMe host name such as nqn.2014-08.org.nvmexpress:uuid:UUID";

impl Initiator {
    /// Whether it covers iSCSI initiators.
    #[must_use]
    pub fn covers_iscsi(&self) -> bool {
        matches!(self, Self::Any | Self::Iscsi(_))
    }

    /// Whether it covers NVMe hosts.
    #[must_use]
    pub fn covers_nvme(&self) -> bool {
        matches!(self, Self::Any | Self::Nvme(_))
    }
}

impl FromStr for Initiator {
    type Err = InvalidValue;

    fn from_str(s: &str) -> Result<Self, InvalidValue> {
        let refused = || InvalidValue::new("initiator", s, ALLOWED_FORMS);
        if s.eq_ignore_ascii_case("any") {
            return Ok(Self::Any);
        }
        if s.len() > MAX_NAME {
            let allowed = format!("a name has at most {MAX_NAME} bytes");
            return Err(InvalidValue::new("initiator", s, allowed));
        }
        // Use the protocols' own parsers: what can log in can be allowed.
        if let Some(rest) = s.strip_prefix("nqn.") {
            let proper = !rest.is_empty() && nvme::fabrics::is_name(s);
            return if proper { Ok(Self::Nvme(s.to_owned())) } else { Err(refused()) };
        }
        match s.parse::<iscsi::name::Name>() {
            Ok(name) => Ok(Self::Iscsi(name.to_string())),
            Err(_) => Err(refused()),
        }
    }
}

impl TryFrom<String> for Initiator {
    type Error = InvalidValue;

    fn try_from(s: String) -> Result<Self, InvalidValue> {
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
            "iqn.1991-05.com.microsoft:SQL_NODE_1.corp.example",
            "iqn.1998-01.com.vmware:esx_07-2f4b6a1c",
            "iqn.2008-11.org.linux-kvm:büro_7",
            "iqn.2026-01.com.my_company:h",
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
            "nqn.2026-01.com.my_company:h",
            "nqn.host_1",
        ] {
            assert_eq!(name.parse::<Initiator>().unwrap(), Initiator::Nvme(name.to_owned()));
        }
        assert_eq!("Any".parse::<Initiator>().unwrap(), Initiator::Any);
    }

    /// RFC 3722 forbids `_`, which real initiator names contain. A name that logs in under `any`
    /// can be allowed by name, and vice versa.
    #[test]
    fn a_name_that_can_log_in_can_be_allowed() {
        for own in ["a_b", "_", "a.b", "A:B", "a-b", "ß", "a b", "a/b", "a@b", "a,b", "", "a+b"] {
            for authority in ["1991-05.com.microsoft", "1991-05.my_company", "1991-05.a..b"] {
                let name = format!("iqn.{authority}:{own}");
                let logs_in = name.parse::<iscsi::name::Name>();
                let allowed = name.parse::<Initiator>();
                let allowed = allowed.map(|i| i.to_string()).ok();
                assert_eq!(allowed, logs_in.map(|n| n.to_string()).ok(), "{name}");
                let name = format!("nqn.{authority}:{own}");
                let allowed = name.parse::<Initiator>();
                assert_eq!(allowed.is_ok(), nvme::fabrics::is_name(&name), "{name}");
            }
        }
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
            "iqn.1993-08.:x",
            "iqn.1993-08.org.debian:a b",
            "iqn.1993-08.org.debian:a/b",
            "iqn.1993-08.org.debian:a,b",
            "iqn.1993-08.org.debian:a\n",
            "eui.02004567A425678",
            "naa.52004567BA64678D0",
            "nqn.",
            "nqn.2014-08.org.nvmexpress:a\n",
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
