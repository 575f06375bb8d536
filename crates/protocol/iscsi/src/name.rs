//! Names of initiators and targets (RFC 7143 4.2.7).

use std::fmt;
use std::str::FromStr;

/// Longest name in bytes.
pub const MAX_NAME: usize = 223;

/// A name in its form for comparison: lower case.
///
/// RFC 3722 folds case and normalises by NFKC before it forbids characters. Here case is folded;
/// NFKC is not applied, so that two spellings of a name outside ASCII are two names.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

/// Not an iSCSI name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an iSCSI name: iqn.YYYY-MM.domain[:string], eui. or naa. and hexadecimal digits")]
pub struct BadName;

impl Name {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        if text.len() > MAX_NAME {
            return Err(BadName);
        }
        let name = text.to_lowercase();
        let (kind, rest) = name.split_once('.').ok_or(BadName)?;
        let proper = match kind {
            "iqn" => is_qualified(rest),
            "eui" => is_hex(rest, &[16]),
            "naa" => is_hex(rest, &[16, 32]),
            _ => false,
        };
        if proper && name.len() <= MAX_NAME { Ok(Self(name)) } else { Err(BadName) }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// RFC 7143 4.2.7.4: a date, a reversed domain name, and perhaps a string of its owner's.
fn is_qualified(rest: &str) -> bool {
    let Some((date, authority)) = rest.split_once('.') else { return false };
    let domain = authority.split(':').next().unwrap_or_default();
    is_date(date) && !domain.is_empty() && authority.chars().all(is_allowed)
}

fn is_date(date: &str) -> bool {
    let Some((year, month)) = date.split_once('-') else { return false };
    let digits = |s: &str, n| s.len() == n && s.bytes().all(|b| b.is_ascii_digit());
    digits(year, 4) && digits(month, 2) && ("01"..="12").contains(&month)
}

/// RFC 3722 6.2 allows `-`, `.`, `:` and forbids all other ASCII punctuation. `_` is accepted:
/// hosts put their host names into initiator names, and these may contain it.
fn is_allowed(c: char) -> bool {
    c.is_alphanumeric() || "-.:_".contains(c)
}

fn is_hex(digits: &str, lengths: &[usize]) -> bool {
    lengths.contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7143 4.2.7.4 to 4.2.7.6 and 4.2.7.2 (case).
    #[test]
    fn names_are_validated_and_folded() {
        let same = |n: &str| n.parse::<Name>().unwrap().to_string() == n;
        assert!(same("iqn.2001-04.com.example:storage:diskarrays-sn-a8675309"));
        assert!(same("iqn.2008-11.org.linux-kvm") && same("iqn.1991-05.com.microsoft:büro_7"));
        assert!(same("eui.02004567a425678d") && same("naa.52004567ba64678d"));
        assert!(same("naa.62004567ba64678d0123456789abcdef"));
        let folded: Name = "IQN.2001-04.COM.Example:Disk".parse().unwrap();
        assert_eq!(folded.as_str(), "iqn.2001-04.com.example:disk");
    }

    /// RFC 7143 4.2.7.
    #[test]
    fn invalid_names_are_refused() {
        let long = format!("iqn.2001-04.com.example:{}", "x".repeat(MAX_NAME));
        for bad in [
            "",
            "iqn",
            "iqn.",
            "iqn.2001-04",
            "iqn.2001-04.",
            "iqn.2001-04.:x",
            "iqn.2001-13.com.example",
            "iqn.01-04.com.example",
            "iqn.2001-04.com.example:a b",
            "iqn.2001-04.com.example:a\u{7}",
            "iqn.2001-04.com.example/x",
            "eui.02004567a425678",
            "eui.02004567a425678g",
            "naa.52004567ba64678d0",
            "wwn.52004567ba64678d",
            &long,
        ] {
            assert_eq!(bad.parse::<Name>(), Err(BadName), "{bad}");
        }
    }
}
