//! Names of volumes and pools.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::InvalidValue;

/// Longest name, in bytes.
const MAX_NAME_LEN: usize = 63;

/// A DNS label (RFC 1123 2.1) in lower case.
fn is_label(s: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !s.is_empty()
        && s.len() <= MAX_NAME_LEN
        && s.bytes().all(inner)
        && !s.starts_with('-')
        && !s.ends_with('-')
}

/// Declares a type of names.
macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
        )]
        #[serde(try_from = "String", into = "String")]
        #[schema(value_type = String, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length = 63)]
        pub struct $name(String);

        impl $name {
            /// Longest name, in bytes.
            pub const MAX: usize = MAX_NAME_LEN;

            /// The name.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidValue;

            fn try_from(s: String) -> Result<Self, InvalidValue> {
                if is_label(&s) {
                    Ok(Self(s))
                } else {
                    Err(InvalidValue::new(
                        $what,
                        &s,
                        "use 1 to 63 of a-z, 0-9 and '-', with a letter or digit at both ends",
                    ))
                }
            }
        }

        impl FromStr for $name {
            type Err = InvalidValue;

            fn from_str(s: &str) -> Result<Self, InvalidValue> {
                Self::try_from(s.to_owned())
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

name! {
    /// Name of a volume: a DNS label (RFC 1123 2.1) in lower case, so that it can be part of an
    /// iSCSI qualified name (RFC 7143 4.2.7) and of an NVMe qualified name (NVMe Base 2.0 4.5) as
    /// it is.
    VolumeName, "volume name"
}

name! {
    /// Name of a pool of disks, of the same rules as a volume's.
    PoolName, "pool name"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn labels_are_names_and_nothing_else_is() {
        for good in ["a", "0", "web-1", "a--b", &"x".repeat(63)] {
            assert!(good.parse::<VolumeName>().is_ok(), "{good}");
        }
        for bad in
            ["", "-a", "a-", "A", "a.b", "a_b", "a b", "ä", "a/b", "..", "a\0", &"x".repeat(64)]
        {
            assert!(bad.parse::<VolumeName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn json_refuses_what_the_parser_refuses() {
        assert!(serde_json::from_str::<VolumeName>("\"ok\"").is_ok());
        let e = serde_json::from_str::<VolumeName>("\"No\"").unwrap_err().to_string();
        assert!(e.contains("\"No\" is not a valid volume name"), "{e}");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_and_what_passes_is_a_label(s in ".{0,80}") {
            if let Ok(name) = s.parse::<VolumeName>() {
                prop_assert_eq!(name.as_str(), s.as_str());
                prop_assert!(s.is_ascii() && !s.contains(['/', '.', ':', ' ']));
            }
        }

        #[test]
        fn every_label_passes(s in "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?") {
            prop_assert!(s.parse::<VolumeName>().is_ok());
        }
    }
}
