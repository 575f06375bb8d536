//! A connection by one key.

use std::fmt;
use std::sync::OnceLock;
use std::task::Poll;

use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, Mode, PskHmac, Version};
use s2n_tls::error::ErrorType;
use s2n_tls::psk;
use s2n_tls::security::Policy;

use crate::pipe::{self, Pipe};
use crate::{Error, Psk, Suite};

/// Ciphertext that is taken before it has to be read, in bytes: several records, of at most 16 KiB and a little each.
const INPUT_BYTES: usize = 64 * 1024;

/// Ciphertext that may wait to be sent, in bytes, before more plaintext is taken; a record may go beyond.
const OUTPUT_BYTES: usize = 256 * 1024;

/// Plaintext of the longest record, in bytes (RFC 8446, 5.1). Shorter pieces are put together up to this.
const RECORD_BYTES: usize = 1 << 14;

/// TLS 1.3 only, both ciphers; of the groups P-256, X25519 and P-384. Numbered policies of `s2n-tls` do not change.
const POLICY: &str = "AWS-CRT-SDK-TLSv1.3-2023";

/// One connection, of either role.
pub struct Session {
    connection: Connection,
    pipe: Pipe,
    identity: Vec<u8>,
    suite: Suite,
    is_established: bool,
    /// Where short pieces of plaintext are put together.
    gathered: Vec<u8>,
    /// What has ended it.
    end: Option<Error>,
}

const _: () = {
    const fn crosses_threads<T: Send>() {}
    crosses_threads::<Session>();
};

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("identity", &String::from_utf8_lossy(&self.identity))
            .field("is_established", &self.is_established)
            .finish_non_exhaustive()
    }
}

impl From<s2n_tls::error::Error> for Error {
    fn from(error: s2n_tls::error::Error) -> Self {
        match error.kind() {
            ErrorType::ConnectionClosed => Self::Closed,
            _ => Self::Failed(error.name()),
        }
    }
}

/// What all connections have in common.
fn config() -> Result<Config, Error> {
    static CONFIG: OnceLock<Result<Config, Error>> = OnceLock::new();
    let make = || {
        let mut config = Config::builder();
        config.with_system_certs(false)?;
        config.set_security_policy(&Policy::from_version(POLICY)?)?;
        // There is nothing to be learnt from how long an AEAD takes to fail, and a core does not wait.
        config.set_max_blinding_delay(0)?;
        Ok(config.build()?)
    };
    CONFIG.get_or_init(make).clone()
}

impl Session {
    /// The side that begins.
    ///
    /// # Errors
    /// What `s2n-tls` has against the key.
    pub fn client(psk: &Psk) -> Result<Self, Error> {
        Self::new(Mode::Client, psk)
    }

    /// The side that is begun with.
    pub(crate) fn server(psk: &Psk) -> Result<Self, Error> {
        Self::new(Mode::Server, psk)
    }

    fn new(mode: Mode, psk: &Psk) -> Result<Self, Error> {
        let mut known = psk::Psk::builder()?;
        known.set_identity(&psk.identity)?.set_secret(&psk.key)?.set_hmac(match psk.suite {
            Suite::Aes128Sha256 => PskHmac::SHA256,
            Suite::Aes256Sha384 => PskHmac::SHA384,
        })?;
        let mut connection = Connection::new(mode);
        connection.set_config(config()?)?.set_blinding(Blinding::SelfService)?;
        connection.append_psk(&known.build()?)?;
        pipe::prepare(&mut connection)?;
        Ok(Self {
            connection,
            pipe: Pipe::default(),
            identity: psk.identity.clone(),
            suite: psk.suite,
            is_established: false,
            gathered: Vec::new(),
            end: None,
        })
    }

    /// Whether the handshake is done.
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.is_established
    }

    /// What the client calls the key.
    #[must_use]
    pub fn identity(&self) -> &[u8] {
        &self.identity
    }

    /// How many bytes of ciphertext it takes now.
    #[must_use]
    pub fn room(&self) -> usize {
        INPUT_BYTES.saturating_sub(self.pipe.input.left().len())
    }

    /// Ciphertext that has come; no more than there is [room](Self::room) for.
    pub fn receive(&mut self, ciphertext: &[u8]) {
        self.pipe.input.add(ciphertext);
    }

    /// No more ciphertext comes.
    pub fn receive_end(&mut self) {
        self.pipe.has_ended = true;
    }

    /// Ciphertext that waits to be sent.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        self.pipe.output.left()
    }

    /// `n` bytes of it were sent.
    pub fn sent(&mut self, n: usize) {
        self.pipe.output.take(n);
    }

    /// Gives memory back that is not needed while nothing happens.
    pub fn rest(&mut self) {
        self.pipe.input.rest();
        self.pipe.output.rest();
        self.gathered = Vec::new();
    }

    /// Goes on with the handshake, as far as it gets; whether it is done.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Alert`], [`Error::Failed`]; and once there was one, the same again.
    pub fn handshake(&mut self) -> Result<bool, Error> {
        if self.is_established {
            return Ok(true);
        }
        let negotiate = |c: &mut Connection| match c.poll_negotiate() {
            Poll::Ready(done) => Poll::Ready(done.map(|_| ())),
            Poll::Pending => Poll::Pending,
        };
        match self.act(negotiate)? {
            Poll::Pending => Ok(false),
            Poll::Ready(()) => {
                self.check().map_err(|why| *self.end.insert(why))?;
                self.is_established = true;
                Ok(true)
            }
        }
    }

    /// That what was agreed on is what this is here for.
    fn check(&self) -> Result<(), Error> {
        let connection = &self.connection;
        let mut chosen = vec![0; connection.negotiated_psk_identity_length()?];
        connection.negotiated_psk_identity(&mut chosen)?;
        let is_by_key = !chosen.is_empty() && chosen == self.identity;
        let is_by_suite = connection.cipher_suite()? == self.suite.name();
        let is_13 = connection.actual_protocol_version()? == Version::TLS13;
        if is_by_key && is_by_suite && is_13 { Ok(()) } else { Err(Error::WrongKey) }
    }

    /// Reads plaintext, as much as there is and goes in; `None` if there is none for now.
    ///
    /// # Errors
    /// As [`Self::handshake`]; what came before is read first.
    pub fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, Error> {
        let mut filled = 0;
        while filled < into.len() && self.is_established {
            match self.act(|c| c.poll_recv(&mut into[filled..])) {
                Ok(Poll::Ready(0)) => self.end = Some(Error::Closed),
                Ok(Poll::Ready(n)) => filled += n,
                Ok(Poll::Pending) => break,
                Err(_) if filled > 0 => break,
                Err(why) => return Err(why),
            }
        }
        Ok((filled > 0).then_some(filled))
    }

    /// Takes plaintext to be sent, and tells how much: none before the handshake is done, or while too much waits.
    ///
    /// # Errors
    /// As [`Self::handshake`].
    pub fn write<'a>(
        &mut self,
        plaintext: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<usize, Error> {
        if !self.is_established {
            return Ok(0);
        }
        let mut taken = 0;
        for mut piece in plaintext {
            while !piece.is_empty() {
                if self.output().len() + self.gathered.len() >= OUTPUT_BYTES {
                    self.flush()?;
                    return Ok(taken);
                }
                let n = if self.gathered.is_empty() && piece.len() >= RECORD_BYTES {
                    self.send(&piece[..RECORD_BYTES])?;
                    RECORD_BYTES
                } else {
                    let n = piece.len().min(RECORD_BYTES - self.gathered.len());
                    self.gathered.extend_from_slice(&piece[..n]);
                    if self.gathered.len() == RECORD_BYTES {
                        self.flush()?;
                    }
                    n
                };
                taken += n;
                piece = &piece[n..];
            }
        }
        self.flush()?;
        Ok(taken)
    }

    /// Sends what was put together.
    fn flush(&mut self) -> Result<(), Error> {
        let mut gathered = std::mem::take(&mut self.gathered);
        if !gathered.is_empty() {
            self.send(&gathered)?;
            gathered.clear();
        }
        self.gathered = gathered;
        Ok(())
    }

    /// Makes records of plaintext. They go to memory, so nothing is in their way.
    fn send(&mut self, mut plaintext: &[u8]) -> Result<(), Error> {
        while !plaintext.is_empty() {
            match self.act(|c| c.poll_send(plaintext))? {
                Poll::Ready(n) if n > 0 => plaintext = plaintext.get(n..).unwrap_or_default(),
                _ => return Err(*self.end.insert(Error::Failed("nothing is sent"))),
            }
        }
        Ok(())
    }

    /// Tells the other side that nothing more comes.
    pub fn close(&mut self) {
        if self.is_established && self.end.is_none() {
            let shut = |c: &mut Connection| match c.poll_shutdown_send() {
                Poll::Ready(done) => Poll::Ready(done.map(|_| ())),
                Poll::Pending => Poll::Pending,
            };
            // It is a word of farewell: whoever does not hear it sees the end of the stream.
            let _ = self.act(shut);
        }
    }

    /// Has `s2n-tls` do something, unless it has failed before.
    fn act<T>(
        &mut self,
        act: impl FnOnce(&mut Connection) -> Poll<Result<T, s2n_tls::error::Error>>,
    ) -> Result<Poll<T>, Error> {
        if let Some(end) = self.end {
            return Err(end);
        }
        let failed = match pipe::with(&mut self.connection, &mut self.pipe, act) {
            Ok(Poll::Pending) => return Ok(Poll::Pending),
            Ok(Poll::Ready(Ok(done))) => return Ok(Poll::Ready(done)),
            Ok(Poll::Ready(Err(error))) | Err(error) => error,
        };
        let end = match (failed.kind(), self.connection.alert()) {
            (ErrorType::Alert, Some(alert)) => Error::Alert(alert),
            _ => failed.into(),
        };
        Err(*self.end.insert(end))
    }
}

#[cfg(test)]
mod tests {
    use s2n_tls::enums::PeerKeyUpdate;

    use super::*;
    use crate::Acceptor;

    fn carry(from: &mut Session, to: &mut Session) {
        to.receive(from.output());
        from.sent(from.output().len());
    }

    /// A client and a server after the handshake.
    fn pair() -> (Session, Session) {
        let psk = Psk::new(b"NVMe0R01 nqn.h nqn.s", &[7; 32], Suite::Aes128Sha256);
        let mut client = Session::client(&psk).unwrap();
        assert_eq!(client.handshake(), Ok(false));
        let mut acceptor = Acceptor::default();
        acceptor.receive(client.output());
        client.sent(client.output().len());
        let mut server = acceptor.accept(&psk).unwrap();
        server.handshake().unwrap();
        carry(&mut server, &mut client);
        assert_eq!(client.handshake(), Ok(true));
        carry(&mut client, &mut server);
        assert_eq!(server.handshake(), Ok(true));
        (client, server)
    }

    /// A client that reads without a pause, and never as fast as it is sent to: something waits all the time.
    #[test]
    fn what_was_sent_takes_no_memory() {
        let (_client, mut server) = pair();
        let piece = [5; RECORD_BYTES];
        for round in 0..1000 {
            while server.write([&piece[..]]).unwrap() > 0 {}
            server.sent(3 * RECORD_BYTES);
            assert!(!server.output().is_empty());
            let bytes = server.pipe.output.capacity();
            assert!(bytes <= 4 * OUTPUT_BYTES, "{bytes} bytes in round {round}");
        }
    }

    /// RFC 8446, 4.6.3 and 5.5: each side changes its key when it has sent enough, and the other follows.
    #[test]
    fn keys_change_in_between() {
        let (mut client, mut server) = pair();
        let mut read = [0; 1000];
        for round in 0..5 {
            for (from, to) in [(0, 1), (1, 0)] {
                let sides = [&mut client, &mut server];
                let update = PeerKeyUpdate::KeyUpdateNotRequested;
                sides[from].connection.request_key_update(update).unwrap();
                assert_eq!(sides[from].write([&[round; 1000][..]]), Ok(1000));
                // The KeyUpdate has a record of its own: 5 bytes of header, 5 of message, 17 of protection.
                assert_eq!(sides[from].output().len(), 27 + 1000 + 22);
                let sent = sides[from].output().to_vec();
                sides[from].sent(sent.len());
                sides[to].receive(&sent);
                assert_eq!(sides[to].read(&mut read), Ok(Some(1000)));
                assert_eq!(read, [round; 1000]);
            }
        }
    }
}
