//! The ClientHello (RFC 8446, 4.1.2), read before any answer, because the choice of the key depends
//! on it.

use ring::{digest, hmac};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::{CipherSuite, HANDSHAKE_RECORD, Psk, Session, TlsError};

/// Length in bytes of the longest ClientHello that is read.
const MAX_HELLO_BYTES: usize = 16 * 1024;

/// Most bytes received for one: with room for the headers of a few hundred records.
const MAX_RECEIVED_BYTES: usize = MAX_HELLO_BYTES + 2048;

/// Length in bytes of the longest record without protection (RFC 8446, 5.1).
const MAX_RECORD_BYTES: usize = 1 << 14;

/// Length in bytes of the header of a handshake message: type and length.
const HEADER_BYTES: usize = 4;

/// A connection in its initial state: collects the ClientHello.
#[derive(Debug, Default)]
pub struct Acceptor {
    received: Vec<u8>,
}

/// A ClientHello.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientHello {
    offers: Vec<PskOffer>,
    suites: Vec<u16>,
    /// The message without the binders, from which they are computed.
    truncated: Vec<u8>,
}

/// A key that a client offers.
#[derive(Debug, PartialEq, Eq)]
pub struct PskOffer {
    /// The client's identity of the key.
    pub identity: Vec<u8>,
    binder: Vec<u8>,
}

impl PskOffer {
    /// Whether the length of its binder matches the hash of this suite; if not, the client uses the
    /// key with another hash, and cannot use it here (RFC 8446, 4.2.11).
    #[must_use]
    pub fn binder_fits(&self, suite: CipherSuite) -> bool {
        self.binder.len() == suite_digest(suite).output_len()
    }
}

impl Acceptor {
    /// Adds received bytes.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// The ClientHello, once it is complete.
    ///
    /// # Errors
    /// [`TlsError::NotClientHello`], [`TlsError::UnsupportedVersion`], [`TlsError::NoPskOffered`].
    pub fn hello(&self) -> Result<Option<ClientHello>, TlsError> {
        match first_handshake_message(&self.received)? {
            Some(message) => ClientHello::parse(message).map(Some),
            None if self.received.len() > MAX_RECEIVED_BYTES => Err(TlsError::NotClientHello),
            None => Ok(None),
        }
    }

    /// Continues the connection with this key.
    ///
    /// # Errors
    /// Errors of `s2n-tls`.
    pub fn accept(self, psk: &Psk) -> Result<Session, TlsError> {
        let mut session = Session::server(psk)?;
        session.receive(&self.received);
        Ok(session)
    }
}

/// The first handshake message, reassembled from its records; `None` while it is incomplete.
fn first_handshake_message(records: &[u8]) -> Result<Option<Vec<u8>>, TlsError> {
    let mut rest = Reader(records);
    let mut message = Vec::new();
    loop {
        let whole = message_len(&message)?;
        if whole.is_some_and(|whole| message.len() >= whole) {
            message.truncate(whole.unwrap_or_default());
            return Ok(Some(message));
        }
        if rest.0.first().is_some_and(|first| *first != HANDSHAKE_RECORD) {
            return Err(TlsError::NotClientHello);
        }
        let Some([_, _, _, high, low]) = rest.0.first_chunk() else { return Ok(None) };
        let len = usize::from(u16::from_be_bytes([*high, *low]));
        if len == 0 || len > MAX_RECORD_BYTES {
            return Err(TlsError::NotClientHello);
        }
        // Even a partial record shows whether it is a ClientHello.
        let (fragment, is_whole) = match rest.0.get(5..5 + len) {
            Some(fragment) => (fragment, true),
            None => (&rest.0[5..], false),
        };
        message.extend_from_slice(fragment);
        if !is_whole {
            message_len(&message)?;
            return Ok(None);
        }
        rest.0 = &rest.0[5 + len..];
    }
}

/// Length of a message including its header, if that has arrived.
fn message_len(message: &[u8]) -> Result<Option<usize>, TlsError> {
    const CLIENT_HELLO: u8 = 1;
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err(TlsError::NotClientHello);
    }
    let Some([_, a, b, c]) = message.first_chunk() else { return Ok(None) };
    let len = u32::from_be_bytes([0, *a, *b, *c]) as usize;
    if len > MAX_HELLO_BYTES {
        return Err(TlsError::NotClientHello);
    }
    Ok(Some(HEADER_BYTES + len))
}

impl ClientHello {
    /// Parses a ClientHello with its header.
    fn parse(message: Vec<u8>) -> Result<Self, TlsError> {
        /// Numbers of extensions (RFC 8446, 4.2).
        const PRE_SHARED_KEY: u16 = 41;
        const SUPPORTED_VERSIONS: u16 = 43;
        const KEY_EXCHANGE_MODES: u16 = 45;
        let mut fields = Reader(message.get(HEADER_BYTES..).ok_or(TlsError::NotClientHello)?);
        let (suites, mut extensions) = fields.client_hello().ok_or(TlsError::NotClientHello)?;
        let (mut is_13, mut has_dhe, mut keys) = (false, false, None);
        while !extensions.0.is_empty() {
            let (kind, mut body) = extensions.extension().ok_or(TlsError::NotClientHello)?;
            // Nothing may follow the keys: the binders are the end of the message (4.2.11).
            if keys.is_some() {
                return Err(TlsError::NotClientHello);
            }
            match kind {
                SUPPORTED_VERSIONS => is_13 = body.has_tls_13().ok_or(TlsError::NotClientHello)?,
                KEY_EXCHANGE_MODES => has_dhe = body.has_dhe().ok_or(TlsError::NotClientHello)?,
                PRE_SHARED_KEY => keys = Some(body.psk_offers().ok_or(TlsError::NotClientHello)?),
                _ => {}
            }
        }
        if !is_13 {
            return Err(TlsError::UnsupportedVersion);
        }
        let (offers, binders_bytes) = keys.filter(|_| has_dhe).ok_or(TlsError::NoPskOffered)?;
        let mut partial = message;
        partial.truncate(partial.len() - binders_bytes);
        Ok(Self { offers, suites, truncated: partial })
    }

    /// The keys that the client offers.
    #[must_use]
    pub fn offers(&self) -> &[PskOffer] {
        &self.offers
    }

    /// Whether the client has this key, and can use it: its binder is valid (RFC 8446, 4.2.11.2).
    #[must_use]
    pub fn verify_binder(&self, offer: &PskOffer, psk: &Psk) -> bool {
        let fits: bool = compute_binder(psk, &self.truncated).as_ref().ct_eq(&offer.binder).into();
        fits && offer.identity == psk.identity && self.suites.contains(&psk.suite.number())
    }
}

/// The binder of a message without binders (RFC 8446, 4.2.11.2 and 7.1).
fn compute_binder(psk: &Psk, partial: &[u8]) -> hmac::Tag {
    let of = suite_digest(psk.suite);
    let hash = match psk.suite {
        CipherSuite::Aes128Sha256 => hmac::HMAC_SHA256,
        CipherSuite::Aes256Sha384 => hmac::HMAC_SHA384,
    };
    let len = of.output_len();
    let label = |secret: &[u8], label: &[u8], context: &[u8]| {
        let [len, label_len, context_len] =
            [len, b"tls13 ".len() + label.len(), context.len()].map(|n| n.to_be_bytes()[7]);
        let parts: [&[u8]; 6] =
            [&[0, len, label_len], b"tls13 ", label, &[context_len], context, &[1]];
        Zeroizing::new(sign(hash, secret, &parts).as_ref().to_vec())
    };
    let early = Zeroizing::new(sign(hash, &[0; 48][..len], &[&psk.key]).as_ref().to_vec());
    let nothing = digest::digest(of, &[]);
    let binder_key = label(&early, b"ext binder", nothing.as_ref());
    let finished_key = label(&binder_key, b"finished", &[]);
    sign(hash, &finished_key, &[digest::digest(of, partial).as_ref()])
}

/// The hash of a suite.
fn suite_digest(suite: CipherSuite) -> &'static digest::Algorithm {
    match suite {
        CipherSuite::Aes128Sha256 => &digest::SHA256,
        CipherSuite::Aes256Sha384 => &digest::SHA384,
    }
}

fn sign(hash: hmac::Algorithm, key: &[u8], parts: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hash, key));
    parts.iter().for_each(|part| context.update(part));
    context.sign()
}

/// The rest of the input.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*taken))
    }

    /// A vector with a length of one byte.
    fn vec8(&mut self) -> Option<Self> {
        let n = self.take(1)?[0];
        self.take(n.into()).map(Self)
    }

    /// A vector with a length of two bytes.
    fn vec16(&mut self) -> Option<Self> {
        let n = self.u16()?;
        self.take(n.into()).map(Self)
    }

    /// A ClientHello: its ciphers and its extensions.
    fn client_hello(&mut self) -> Option<(Vec<u16>, Self)> {
        let _version_and_random = self.take(2 + 32)?;
        let _session = self.vec8()?;
        let suites = self.vec16()?;
        let _compression = self.vec8()?;
        let extensions = self.vec16()?;
        let pairs = suites.0.chunks_exact(2);
        let suites = pairs.map(|pair| u16::from_be_bytes([pair[0], pair[1]])).collect();
        self.0.is_empty().then_some((suites, extensions))
    }

    fn extension(&mut self) -> Option<(u16, Self)> {
        Some((self.u16()?, self.vec16()?))
    }

    /// Whether the supported versions (4.2.1) include TLS 1.3.
    fn has_tls_13(&mut self) -> Option<bool> {
        let versions = self.vec8()?;
        Some(versions.0.chunks_exact(2).any(|version| version == [3, 4]))
    }

    /// Whether the key exchange modes (4.2.9) include `psk_dhe_ke`.
    fn has_dhe(&mut self) -> Option<bool> {
        self.vec8().map(|modes| modes.0.contains(&1))
    }

    /// The offered keys (4.2.11), and the length of the binders at the end.
    fn psk_offers(&mut self) -> Option<(Vec<PskOffer>, usize)> {
        let (mut identities, binders_bytes) = (self.vec16()?, self.0.len());
        let mut binders = self.vec16()?;
        let mut offers = Vec::new();
        while !identities.0.is_empty() {
            let identity = identities.vec16()?.0.to_vec();
            let _age = identities.take(4)?;
            let binder = binders.vec8()?.0.to_vec();
            offers.push(PskOffer { identity, binder });
        }
        let is_whole = self.0.is_empty() && binders.0.is_empty() && !offers.is_empty();
        is_whole.then_some((offers, binders_bytes))
    }
}
