//! Access to a volume: which initiators are allowed, how iSCSI initiators and NVMe hosts
//! authenticate, and which NVMe hosts use TLS.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Initiator, InvalidValue};

/// A CHAP secret. It goes in and never comes out: no answer has a field for one, and it prints as
/// nothing.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(value_type = String, format = Password, min_length = 12, max_length = 255)]
pub struct Secret(String);

impl Secret {
    /// Shortest secret in bytes: 96 bits, as RFC 7143 9.2.1 requires without IPsec.
    pub const MIN: usize = 12;
    /// Longest secret in bytes.
    pub const MAX: usize = 255;

    /// The secret itself, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl TryFrom<String> for Secret {
    type Error = InvalidValue;

    fn try_from(s: String) -> Result<Self, InvalidValue> {
        let printable = s.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
        if printable && (Self::MIN..=Self::MAX).contains(&s.len()) {
            Ok(Self(s))
        } else {
            let allowed = format!(
                "use {} to {} printable ASCII characters; many initiators accept at most 16",
                Self::MIN,
                Self::MAX
            );
            Err(InvalidValue::new("CHAP secret", "(hidden)", allowed))
        }
    }
}

/// The user name of a CHAP exchange (CHAP_N, RFC 7143 12.1.3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, min_length = 1, max_length = 223)]
pub struct ChapUser(String);

impl ChapUser {
    /// Longest user name, in bytes.
    pub const MAX: usize = 223;

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ChapUser {
    type Error = InvalidValue;

    fn try_from(s: String) -> Result<Self, InvalidValue> {
        let printable = s.bytes().all(|b| b.is_ascii_graphic() && b != b',');
        if printable && (1..=Self::MAX).contains(&s.len()) {
            Ok(Self(s))
        } else {
            let allowed = format!(
                "use 1 to {} printable ASCII characters without blanks or commas",
                Self::MAX
            );
            Err(InvalidValue::new("CHAP user", &s, allowed))
        }
    }
}

impl From<ChapUser> for String {
    fn from(user: ChapUser) -> Self {
        user.0
    }
}

/// What an iSCSI initiator must prove before it reaches a volume. Write-only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "ChapParts")]
pub struct Chap {
    /// Name the initiator sends.
    pub user: ChapUser,
    /// Secret the initiator knows.
    pub secret: Secret,
    /// What the volume proves to the initiator in turn; must not share the secret (RFC 7143
    /// 9.2.1).
    pub mutual: Option<MutualChap>,
}

/// What a volume proves to its initiators. Write-only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MutualChap {
    /// Name the volume sends.
    pub user: ChapUser,
    /// Secret the volume knows.
    pub secret: Secret,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChapParts {
    user: ChapUser,
    secret: Secret,
    #[serde(default)]
    mutual: Option<MutualChap>,
}

impl TryFrom<ChapParts> for Chap {
    type Error = InvalidValue;

    fn try_from(parts: ChapParts) -> Result<Self, InvalidValue> {
        let ChapParts { user, secret, mutual } = parts;
        Self::new(user, secret, mutual)
    }
}

impl Chap {
    /// Combines the credentials of both directions.
    ///
    /// # Errors
    /// [`InvalidValue`] when both directions use the same secret: an attacker could then reflect
    /// the challenge.
    pub fn new(
        user: ChapUser,
        secret: Secret,
        mutual: Option<MutualChap>,
    ) -> Result<Self, InvalidValue> {
        if mutual.as_ref().is_some_and(|m| m.secret == secret) {
            let allowed = "the two directions need different secrets";
            return Err(InvalidValue::new("mutual CHAP secret", "(hidden)", allowed));
        }
        Ok(Self { user, secret, mutual })
    }
}

/// What one iSCSI initiator must prove instead of what all others of a volume must. Write-only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InitiatorChap {
    /// Its name.
    pub initiator: Initiator,
    /// User and secret; without them it has to prove what all have to, from now on.
    #[serde(default)]
    pub chap: Option<Chap>,
}

/// The users of an iSCSI initiator that has a secret of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InitiatorChapUser {
    /// Its name.
    pub initiator: Initiator,
    /// User name that it authenticates with.
    pub user: ChapUser,
    /// Name that the volume authenticates itself with to it, where CHAP is mutual.
    pub mutual_user: Option<ChapUser>,
}

/// Checks that `s` can be the output of this nvme-cli command, within a maximum length. Errors do
/// not show `s`.
fn check_nvme_cli_text(
    s: String,
    most: usize,
    (what, command): (&'static str, &str),
) -> Result<String, InvalidValue> {
    if s.bytes().all(|b| b.is_ascii_graphic()) && (1..=most).contains(&s.len()) {
        return Ok(s);
    }
    let allowed = format!(
        "use the output of `nvme {command}`: 1 to {most} printable ASCII characters without blanks"
    );
    Err(InvalidValue::new(what, "(hidden)", allowed))
}

/// A secret of DH-HMAC-CHAP, as `nvme gen-dhchap-key` makes them: `DHHC-1:01:BASE64:`. It goes in
/// and never comes out: no answer has a field for one, and it prints as nothing.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(value_type = String, format = Password, min_length = 1, max_length = 255)]
pub struct DhchapSecret(String);

impl DhchapSecret {
    /// Longest secret accepted, in bytes; every valid one is shorter. The node checks its validity.
    pub const MAX: usize = 255;

    /// The secret itself, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The canonical form, without the optional trailing `:`.
    fn canonical(&self) -> &str {
        self.0.strip_suffix(':').unwrap_or(&self.0)
    }
}

impl fmt::Debug for DhchapSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DhchapSecret(…)")
    }
}

impl TryFrom<String> for DhchapSecret {
    type Error = InvalidValue;

    fn try_from(s: String) -> Result<Self, InvalidValue> {
        check_nvme_cli_text(s, Self::MAX, ("DH-HMAC-CHAP secret", "gen-dhchap-key")).map(Self)
    }
}

/// What an NVMe host must prove before it reaches a volume. Write-only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "DhchapParts")]
pub struct Dhchap {
    /// Secret of the host.
    pub secret: DhchapSecret,
    /// Secret of the volume's subsystem, which it proves to a host that wants it; must not be the
    /// host's.
    pub controller_secret: Option<DhchapSecret>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DhchapParts {
    secret: DhchapSecret,
    #[serde(default)]
    controller_secret: Option<DhchapSecret>,
}

impl TryFrom<DhchapParts> for Dhchap {
    type Error = InvalidValue;

    fn try_from(parts: DhchapParts) -> Result<Self, InvalidValue> {
        let DhchapParts { secret, controller_secret } = parts;
        Self::new(secret, controller_secret)
    }
}

impl Dhchap {
    /// Combines the secrets of both directions.
    ///
    /// # Errors
    /// [`InvalidValue`] when both directions use the same secret: a proof could then be reflected.
    pub fn new(
        secret: DhchapSecret,
        controller_secret: Option<DhchapSecret>,
    ) -> Result<Self, InvalidValue> {
        if controller_secret.as_ref().is_some_and(|c| c.canonical() == secret.canonical()) {
            let allowed = "the two directions need different secrets";
            return Err(InvalidValue::new(
                "DH-HMAC-CHAP secret of the controller",
                "(hidden)",
                allowed,
            ));
        }
        Ok(Self { secret, controller_secret })
    }
}

/// What one NVMe host must prove before it reaches a volume. Write-only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostDhchap {
    /// Its name (NQN).
    pub host: Initiator,
    /// Its secrets; without them its name will do, from now on.
    #[serde(default)]
    pub secrets: Option<Dhchap>,
}

/// An NVMe host that has to prove who it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DhchapHost {
    /// Its name.
    pub host: Initiator,
    /// Whether the volume's subsystem can prove itself to it, too.
    pub mutual: bool,
}

/// A key of TLS between one NVMe host and a volume's subsystem, as `nvme gen-tls-key` makes them:
/// `NVMeTLSkey-1:01:BASE64:`. It goes in and never comes out: no answer has a field for one, and it
/// prints as nothing.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(value_type = String, format = Password, min_length = 1, max_length = 255)]
pub struct TlsKey(String);

impl TlsKey {
    /// Longest key accepted, in bytes; every valid one is shorter. The node checks its validity.
    pub const MAX: usize = 255;

    /// The key itself, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for TlsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsKey(…)")
    }
}

impl TryFrom<String> for TlsKey {
    type Error = InvalidValue;

    fn try_from(s: String) -> Result<Self, InvalidValue> {
        check_nvme_cli_text(s, Self::MAX, ("TLS key", "gen-tls-key")).map(Self)
    }
}

/// How an NVMe host reaches a volume by TLS. Write-only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The key of the host and the volume's subsystem.
    pub key: TlsKey,
    /// Whether it has to be used: the host is refused without TLS then.
    #[serde(default = "default_required")]
    #[schema(default = true)]
    pub required: bool,
}

fn default_required() -> bool {
    true
}

/// How one NVMe host reaches a volume by TLS. Write-only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostTls {
    /// Its name (NQN).
    pub host: Initiator,
    /// Its key; without one it comes without TLS, from now on.
    #[serde(default)]
    pub key: Option<Tls>,
}

/// An NVMe host that has a key of TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TlsHost {
    /// Its name.
    pub host: Initiator,
    /// Whether it has to come by TLS.
    pub required: bool,
}

/// Who may reach a volume, as it is shown: names, never secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Access {
    /// Initiators that may reach the volume; none may when it is empty.
    pub initiators: Vec<Initiator>,
    /// User name that iSCSI initiators authenticate with, where CHAP is required.
    pub chap_user: Option<ChapUser>,
    /// Name that the volume authenticates itself with, where CHAP is mutual.
    pub chap_mutual_user: Option<ChapUser>,
    /// Initiators that have to prove something else than the others.
    #[serde(default)]
    pub chap_initiators: Vec<InitiatorChapUser>,
    /// NVMe hosts that have to prove who they are (DH-HMAC-CHAP), by name; the others come in by
    /// theirs alone.
    #[serde(default)]
    pub dhchap_hosts: Vec<DhchapHost>,
    /// NVMe hosts that come by TLS, or may, by name; the others come without.
    #[serde(default)]
    pub tls_hosts: Vec<TlsHost>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chap(json: &str) -> Result<Chap, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn secrets_never_print() {
        let chap = chap(r#"{"user":"u","secret":"hush-hush-hush"}"#).unwrap();
        assert!(!format!("{chap:?}").contains("hush"));
        let short = r#"{"user":"u","secret":"hush-hush"}"#;
        assert!(!self::chap(short).unwrap_err().to_string().contains("hush"));
        let control = r#"{"user":"u","secret":"hush-hush-hush\n"}"#;
        assert!(!self::chap(control).unwrap_err().to_string().contains("hush"));
    }

    #[test]
    fn both_directions_need_their_own_secret() {
        let same =
            r#"{"user":"u","secret":"0123456789ab","mutual":{"user":"v","secret":"0123456789ab"}}"#;
        assert!(chap(same).unwrap_err().to_string().contains("different secrets"));
        let own =
            r#"{"user":"u","secret":"0123456789ab","mutual":{"user":"v","secret":"ba9876543210"}}"#;
        assert!(chap(own).is_ok());
    }

    fn dhchap(json: &str) -> Result<HostDhchap, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    #[test]
    fn secrets_of_hosts_never_print() {
        let host = r#"{"host":"nqn.2014-08.org.nvmexpress:h","secrets":"#;
        let given = dhchap(&format!(
            r#"{host}{{"secret":"DHHC-1:00:hush:","controller_secret":"DHHC-1:00:hush2:"}}}}"#
        ));
        assert!(!format!("{:?}", given.unwrap()).contains("hush"));
        let long = format!("hush{}", "x".repeat(252));
        for bad in ["hush hush", "hush\\n", "hush\u{e4}", long.as_str()] {
            let refused = dhchap(&format!(r#"{host}{{"secret":"{bad}"}}}}"#)).unwrap_err();
            assert!(refused.contains("gen-dhchap-key") && !refused.contains("hush"), "{refused}");
        }
        let longest = "x".repeat(255);
        assert!(dhchap(&format!(r#"{host}{{"secret":"{longest}"}}}}"#)).is_ok());
        for none in ["null}", r#"null,"more":1}"#, r#"{"secret":""}}"#, r#"{}}"#] {
            assert_eq!(dhchap(&format!("{host}{none}")).is_ok(), none == "null}", "{none}");
        }
        let without = dhchap(r#"{"host":"nqn.2014-08.org.nvmexpress:h"}"#).unwrap();
        assert_eq!(without.secrets, None);
    }

    /// RFD 0020, 2: with one secret a proof could be reflected.
    #[test]
    fn a_host_and_its_controller_need_their_own_secrets() {
        let both = |host, controller| {
            let text = format!(r#"{{"secret":"{host}","controller_secret":"{controller}"}}"#);
            serde_json::from_str::<Dhchap>(&text).map_err(|e| e.to_string())
        };
        assert!(both("DHHC-1:00:a:", "DHHC-1:00:b:").is_ok());
        for same in ["DHHC-1:00:a:", "DHHC-1:00:a"] {
            let refused = both("DHHC-1:00:a:", same).unwrap_err();
            assert!(
                refused.contains("different secrets") && !refused.contains("00:a"),
                "{refused}"
            );
        }
    }

    fn tls(json: &str) -> Result<HostTls, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    #[test]
    fn keys_of_tls_never_print() {
        let host = r#"{"host":"nqn.2014-08.org.nvmexpress:h","key":"#;
        let given = tls(&format!(r#"{host}{{"key":"NVMeTLSkey-1:00:hush:"}}}}"#)).unwrap();
        assert!(!format!("{given:?}").contains("hush"));
        let long = format!("hush{}", "x".repeat(252));
        for bad in ["hush hush", "hush\\n", "hush\u{e4}", long.as_str()] {
            let refused = tls(&format!(r#"{host}{{"key":"{bad}"}}}}"#)).unwrap_err();
            assert!(refused.contains("gen-tls-key") && !refused.contains("hush"), "{refused}");
        }
        let longest = "x".repeat(255);
        assert!(tls(&format!(r#"{host}{{"key":"{longest}"}}}}"#)).is_ok());
        for none in
            ["null}", r#"null,"more":1}"#, r#"{"key":""}}"#, r#"{"required":true}}"#, r#""a"}"#]
        {
            assert_eq!(tls(&format!("{host}{none}")).is_ok(), none == "null}", "{none}");
        }
        assert!(tls(&format!(r#"{host}{{"key":"a","more":1}}}}"#)).is_err());
        assert_eq!(tls(r#"{"host":"nqn.2014-08.org.nvmexpress:h"}"#).unwrap().key, None);
    }

    /// RFD 0022, 3: TLS is mandatory for a host with a key unless stated otherwise.
    #[test]
    fn tls_is_required_unless_it_is_said_not_to_be() {
        let required = |json: &str| serde_json::from_str::<Tls>(json).unwrap().required;
        assert!(required(r#"{"key":"a"}"#));
        assert!(required(r#"{"key":"a","required":true}"#));
        assert!(!required(r#"{"key":"a","required":false}"#));
    }

    #[test]
    fn unknown_fields_and_bad_names_are_refused() {
        for json in [
            r#"{"user":"","secret":"0123456789ab"}"#,
            r#"{"user":"a b","secret":"0123456789ab"}"#,
            r#"{"user":"a,b","secret":"0123456789ab"}"#,
            r#"{"user":"a","secret":"0123456789ab","extra":1}"#,
            r#"{"secret":"0123456789ab"}"#,
        ] {
            assert!(chap(json).is_err(), "{json}");
        }
    }
}
