//! What lets a node into a cluster: one word to copy, in which stands which cluster it is, its
//! secret, and where its store is. Whoever has it can join.
//!
//! It is base64url (RFC 4648 5) of JSON, without padding.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::identity::{ClusterSecret, Protection, check_endpoints};

/// Longest token, in bytes.
pub const MAX_TOKEN: usize = 64 << 10;

/// What a token says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    /// The cluster.
    pub cluster: Uuid,
    /// Its secret.
    pub secret: ClusterSecret,
    /// What protects its connections.
    pub protection: Protection,
    /// Client URLs of the members of its store, at least one.
    pub endpoints: Vec<String>,
}

/// Why something is no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadToken {
    /// Nothing is there.
    #[error("the token is empty")]
    Empty,
    /// It is not one word of the alphabet.
    #[error("the token was not copied whole, or is none ({why})")]
    Mangled {
        /// What is wrong.
        why: String,
    },
}

impl Token {
    /// What `text` says. Blanks around it are no part of it.
    ///
    /// # Errors
    /// [`BadToken`].
    pub fn parse(text: &str) -> Result<Self, BadToken> {
        let mangled = |why: String| BadToken::Mangled { why };
        let text = text.trim();
        if text.is_empty() {
            return Err(BadToken::Empty);
        }
        if text.len() > MAX_TOKEN {
            return Err(mangled(format!("it is longer than {MAX_TOKEN} bytes")));
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|e| mangled(e.to_string()))?;
        let token: Self = serde_json::from_slice(&bytes).map_err(|e| mangled(e.to_string()))?;
        token.protection.check().map_err(mangled)?;
        check_endpoints(&token.endpoints).map_err(mangled)?;
        Ok(token)
    }

    /// As [`Self::parse`] reads it.
    #[must_use]
    pub fn to_text(&self) -> String {
        let json = serde_json::to_vec(self).expect("names and numbers always serialise");
        URL_SAFE_NO_PAD.encode(json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::Authority;

    fn token() -> Token {
        Token {
            cluster: Uuid::from_u128(7),
            secret: ClusterSecret::new([0x5a; 32]),
            protection: Protection::Own(Authority::new().unwrap()),
            endpoints: vec!["http://192.0.2.1:2379".into(), "http://[2001:db8::1]:2379".into()],
        }
    }

    #[test]
    fn a_token_reads_back_as_it_was_written() {
        let token = token();
        let text = token.to_text();
        assert!(text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'));
        assert_eq!(Token::parse(&format!(" {text}\n")), Ok(token.clone()));
        let shown = format!("{token:?}");
        assert!(!shown.contains("5a5a") && !shown.contains("PRIVATE"), "secrets stay out of logs");
    }

    #[test]
    fn what_is_no_token_is_said_to_be_none() {
        let text = token().to_text();
        assert_eq!(Token::parse(" \n"), Err(BadToken::Empty));
        let half = &text[..text.len() / 2];
        let other = URL_SAFE_NO_PAD.encode(b"{\"cluster\":1}");
        let nowhere = Token { endpoints: Vec::new(), ..token() }.to_text();
        let long = "A".repeat(MAX_TOKEN + 1);
        for bad in [half, "not a token", "+/+/", &other, &nowhere, &long] {
            let refused = Token::parse(bad).unwrap_err().to_string();
            assert!(refused.contains("not copied whole"), "{refused}");
        }
    }
}
