//! The ClientHello (RFC 8446, 4.1.2), read before anything is answered: for which keys there are depends on it.

use ring::{digest, hmac};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::{Error, FIRST_BYTE, Psk, Session, Suite};

/// Length in bytes of the longest ClientHello that is read.
const MAX_HELLO_BYTES: usize = 16 * 1024;

/// Most bytes that are received for one: there is room for the headers of a few hundred records.
const MAX_RECEIVED_BYTES: usize = MAX_HELLO_BYTES + 2048;

/// Length in bytes of the longest record without protection (RFC 8446, 5.1).
const MAX_RECORD_BYTES: usize = 1 << 14;

/// Length in bytes of what stands before a handshake message: its type, and its length.
const HEADER_BYTES: usize = 4;

/// A connection of which nothing is known yet: collects what the client says first.
#[derive(Debug, Default)]
pub struct Acceptor {
    received: Vec<u8>,
}

/// What a client has said first.
#[derive(Debug, PartialEq, Eq)]
pub struct Hello {
    offers: Vec<Offer>,
    suites: Vec<u16>,
    /// The message up to the binders: what they are calculated from.
    partial: Vec<u8>,
}

/// A key that a client says it has.
#[derive(Debug, PartialEq, Eq)]
pub struct Offer {
    /// What it calls the key.
    pub identity: Vec<u8>,
    binder: Vec<u8>,
}

impl Offer {
    /// Whether its binder has the length of those that are made with the hash of this suite; if it does not, the client has
    /// taken the key for one of another hash, and cannot use it (RFC 8446, 4.2.11).
    #[must_use]
    pub fn is_bound_for(&self, suite: Suite) -> bool {
        self.binder.len() == digest_of(suite).output_len()
    }
}

impl Acceptor {
    /// More of what the client sends.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// The ClientHello, once it is whole.
    ///
    /// # Errors
    /// [`Error::NoHello`], [`Error::OldVersion`], [`Error::NoKey`].
    pub fn hello(&self) -> Result<Option<Hello>, Error> {
        match message(&self.received)? {
            Some(message) => Hello::parse(message).map(Some),
            None if self.received.len() > MAX_RECEIVED_BYTES => Err(Error::NoHello),
            None => Ok(None),
        }
    }

    /// Goes on with the client by this key.
    ///
    /// # Errors
    /// What `s2n-tls` has against it.
    pub fn accept(self, psk: &Psk) -> Result<Session, Error> {
        let mut session = Session::server(psk)?;
        session.receive(&self.received);
        Ok(session)
    }
}

/// The first handshake message, put together from the records that it comes in; `None` while it is not whole.
fn message(records: &[u8]) -> Result<Option<Vec<u8>>, Error> {
    let mut rest = Reader(records);
    let mut message = Vec::new();
    loop {
        let whole = length(&message)?;
        if whole.is_some_and(|whole| message.len() >= whole) {
            message.truncate(whole.unwrap_or_default());
            return Ok(Some(message));
        }
        if rest.0.first().is_some_and(|first| *first != FIRST_BYTE) {
            return Err(Error::NoHello);
        }
        let Some([_, _, _, high, low]) = rest.0.first_chunk() else { return Ok(None) };
        let len = usize::from(u16::from_be_bytes([*high, *low]));
        if len == 0 || len > MAX_RECORD_BYTES {
            return Err(Error::NoHello);
        }
        // What there is of a record tells already whether it is a ClientHello.
        let (fragment, is_whole) = match rest.0.get(5..5 + len) {
            Some(fragment) => (fragment, true),
            None => (&rest.0[5..], false),
        };
        message.extend_from_slice(fragment);
        if !is_whole {
            length(&message)?;
            return Ok(None);
        }
        rest.0 = &rest.0[5 + len..];
    }
}

/// Length of a message with its header, if that is here.
fn length(message: &[u8]) -> Result<Option<usize>, Error> {
    const CLIENT_HELLO: u8 = 1;
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err(Error::NoHello);
    }
    let Some([_, a, b, c]) = message.first_chunk() else { return Ok(None) };
    let len = u32::from_be_bytes([0, *a, *b, *c]) as usize;
    if len > MAX_HELLO_BYTES {
        return Err(Error::NoHello);
    }
    Ok(Some(HEADER_BYTES + len))
}

impl Hello {
    /// Reads a ClientHello with its header.
    fn parse(message: Vec<u8>) -> Result<Self, Error> {
        /// Numbers of extensions (RFC 8446, 4.2).
        const PRE_SHARED_KEY: u16 = 41;
        const SUPPORTED_VERSIONS: u16 = 43;
        const KEY_EXCHANGE_MODES: u16 = 45;
        let mut fields = Reader(message.get(HEADER_BYTES..).ok_or(Error::NoHello)?);
        let (suites, mut extensions) = fields.hello().ok_or(Error::NoHello)?;
        let (mut is_13, mut has_dhe, mut keys) = (false, false, None);
        while !extensions.0.is_empty() {
            let (kind, mut body) = extensions.extension().ok_or(Error::NoHello)?;
            // Nothing stands behind the keys: the binders are the end of the message (4.2.11).
            if keys.is_some() {
                return Err(Error::NoHello);
            }
            match kind {
                SUPPORTED_VERSIONS => is_13 = body.has_tls_13().ok_or(Error::NoHello)?,
                KEY_EXCHANGE_MODES => has_dhe = body.has_dhe().ok_or(Error::NoHello)?,
                PRE_SHARED_KEY => keys = Some(body.offers().ok_or(Error::NoHello)?),
                _ => {}
            }
        }
        if !is_13 {
            return Err(Error::OldVersion);
        }
        let (offers, binders_bytes) = keys.filter(|_| has_dhe).ok_or(Error::NoKey)?;
        let mut partial = message;
        partial.truncate(partial.len() - binders_bytes);
        Ok(Self { offers, suites, partial })
    }

    /// The keys that the client says it has.
    #[must_use]
    pub fn offers(&self) -> &[Offer] {
        &self.offers
    }

    /// Whether the client has this key, and can use it: its binder fits (RFC 8446, 4.2.11.2).
    #[must_use]
    pub fn has(&self, offer: &Offer, psk: &Psk) -> bool {
        let fits: bool = binder(psk, &self.partial).as_ref().ct_eq(&offer.binder).into();
        fits && offer.identity == psk.identity && self.suites.contains(&psk.suite.number())
    }
}

/// The binder of a message without binders (RFC 8446, 4.2.11.2 and 7.1).
fn binder(psk: &Psk, partial: &[u8]) -> hmac::Tag {
    let of = digest_of(psk.suite);
    let hash = match psk.suite {
        Suite::Aes128Sha256 => hmac::HMAC_SHA256,
        Suite::Aes256Sha384 => hmac::HMAC_SHA384,
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

/// What the keys of a suite are made with.
fn digest_of(suite: Suite) -> &'static digest::Algorithm {
    match suite {
        Suite::Aes128Sha256 => &digest::SHA256,
        Suite::Aes256Sha384 => &digest::SHA384,
    }
}

fn sign(hash: hmac::Algorithm, key: &[u8], parts: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hash, key));
    parts.iter().for_each(|part| context.update(part));
    context.sign()
}

/// What is left to be read.
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

    /// What stands behind its length of one byte.
    fn short(&mut self) -> Option<Self> {
        let n = self.take(1)?[0];
        self.take(n.into()).map(Self)
    }

    /// What stands behind its length of two bytes.
    fn long(&mut self) -> Option<Self> {
        let n = self.u16()?;
        self.take(n.into()).map(Self)
    }

    /// A ClientHello: its ciphers and its extensions.
    fn hello(&mut self) -> Option<(Vec<u16>, Self)> {
        let _version_and_random = self.take(2 + 32)?;
        let _session = self.short()?;
        let suites = self.long()?;
        let _compression = self.short()?;
        let extensions = self.long()?;
        let pairs = suites.0.chunks_exact(2);
        let suites = pairs.map(|pair| u16::from_be_bytes([pair[0], pair[1]])).collect();
        self.0.is_empty().then_some((suites, extensions))
    }

    fn extension(&mut self) -> Option<(u16, Self)> {
        Some((self.u16()?, self.long()?))
    }

    /// Whether the supported versions (4.2.1) are TLS 1.3, among others.
    fn has_tls_13(&mut self) -> Option<bool> {
        let versions = self.short()?;
        Some(versions.0.chunks_exact(2).any(|version| version == [3, 4]))
    }

    /// Whether the key exchange modes (4.2.9) are `psk_dhe_ke`, among others.
    fn has_dhe(&mut self) -> Option<bool> {
        self.short().map(|modes| modes.0.contains(&1))
    }

    /// The keys (4.2.11), and how many bytes the binders take at the end.
    fn offers(&mut self) -> Option<(Vec<Offer>, usize)> {
        let (mut identities, binders_bytes) = (self.long()?, self.0.len());
        let mut binders = self.long()?;
        let mut offers = Vec::new();
        while !identities.0.is_empty() {
            let identity = identities.long()?.0.to_vec();
            let _age = identities.take(4)?;
            let binder = binders.short()?.0.to_vec();
            offers.push(Offer { identity, binder });
        }
        let is_whole = self.0.is_empty() && binders.0.is_empty() && !offers.is_empty();
        is_whole.then_some((offers, binders_bytes))
    }
}
