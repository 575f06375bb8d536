//! A connection with one key.

use std::fmt;
use std::sync::OnceLock;
use std::task::Poll;

use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, Mode, PskHmac, Version};
use s2n_tls::error::ErrorType;
use s2n_tls::psk;
use s2n_tls::security::Policy;

use crate::s2n_io::{self, CiphertextBuffers};
use crate::{CipherSuite, Psk, TlsError};

/// Most ciphertext accepted before it must be read, in bytes: several records, of at most 16 KiB
/// and a little each.
const MAX_INPUT_BYTES: usize = 64 * 1024;

/// Most ciphertext waiting to be sent, in bytes, before more plaintext is accepted; one record may
/// exceed it.
const MAX_OUTPUT_BYTES: usize = 256 * 1024;

/// Plaintext of the longest record, in bytes (RFC 8446, 5.1). Shorter pieces are combined up to
/// this.
const MAX_PLAINTEXT_BYTES: usize = 1 << 14;

/// TLS 1.3 only, both ciphers; groups P-256, X25519 and P-384. Numbered policies of `s2n-tls` do
/// not change.
const SECURITY_POLICY: &str = "AWS-CRT-SDK-TLSv1.3-2023";

/// One connection, of either role.
pub struct Session {
    connection: Connection,
    buffers: CiphertextBuffers,
    identity: Vec<u8>,
    suite: CipherSuite,
    is_established: bool,
    /// Combines short pieces of plaintext.
    record_buffer: Vec<u8>,
    /// The error that ended it.
    end_reason: Option<TlsError>,
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

impl From<s2n_tls::error::Error> for TlsError {
    fn from(error: s2n_tls::error::Error) -> Self {
        match error.kind() {
            ErrorType::ConnectionClosed => Self::Closed,
            _ => Self::ProtocolFailure(error.name()),
        }
    }
}

/// The configuration of all connections.
fn shared_config() -> Result<Config, TlsError> {
    static CONFIG: OnceLock<Result<Config, TlsError>> = OnceLock::new();
    let make = || {
        let mut config = Config::builder();
        config.with_system_certs(false)?;
        config.set_security_policy(&Policy::from_version(SECURITY_POLICY)?)?;
        // The time until an AEAD fails reveals nothing, and a core must not wait.
        config.set_max_blinding_delay(0)?;
        Ok(config.build()?)
    };
    CONFIG.get_or_init(make).clone()
}

impl Session {
    /// The client side.
    ///
    /// # Errors
    /// Errors of `s2n-tls` about the key.
    pub fn client(psk: &Psk) -> Result<Self, TlsError> {
        Self::new(Mode::Client, psk)
    }

    /// The server side.
    pub(crate) fn server(psk: &Psk) -> Result<Self, TlsError> {
        Self::new(Mode::Server, psk)
    }

    fn new(mode: Mode, psk: &Psk) -> Result<Self, TlsError> {
        let mut known = psk::Psk::builder()?;
        known.set_identity(&psk.identity)?.set_secret(&psk.key)?.set_hmac(match psk.suite {
            CipherSuite::Aes128Sha256 => PskHmac::SHA256,
            CipherSuite::Aes256Sha384 => PskHmac::SHA384,
        })?;
        let mut connection = Connection::new(mode);
        connection.set_config(shared_config()?)?.set_blinding(Blinding::SelfService)?;
        connection.append_psk(&known.build()?)?;
        s2n_io::install_callbacks(&mut connection)?;
        Ok(Self {
            connection,
            buffers: CiphertextBuffers::default(),
            identity: psk.identity.clone(),
            suite: psk.suite,
            is_established: false,
            record_buffer: Vec::new(),
            end_reason: None,
        })
    }

    /// Whether the handshake is complete.
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.is_established
    }

    /// The client's identity of the key.
    #[must_use]
    pub fn identity(&self) -> &[u8] {
        &self.identity
    }

    /// How many bytes of ciphertext it accepts now.
    #[must_use]
    pub fn input_capacity(&self) -> usize {
        MAX_INPUT_BYTES.saturating_sub(self.buffers.input.unread().len())
    }

    /// Received ciphertext; at most [`Self::input_capacity`] bytes.
    pub fn receive(&mut self, ciphertext: &[u8]) {
        self.buffers.input.push(ciphertext);
    }

    /// The received ciphertext has ended.
    pub fn receive_end(&mut self) {
        self.buffers.has_ended = true;
    }

    /// Ciphertext to be sent.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        self.buffers.output.unread()
    }

    /// Removes `n` sent bytes from the output.
    pub fn consume_output(&mut self, n: usize) {
        self.buffers.output.consume(n);
    }

    /// Frees memory that an idle connection does not need.
    pub fn release_idle_memory(&mut self) {
        self.buffers.input.release_if_empty();
        self.buffers.output.release_if_empty();
        self.record_buffer = Vec::new();
    }

    /// Continues the handshake as far as possible; returns whether it is complete.
    ///
    /// # Errors
    /// [`TlsError::Closed`], [`TlsError::Alert`], [`TlsError::ProtocolFailure`]; and once there was
    /// one, the same again.
    pub fn handshake(&mut self) -> Result<bool, TlsError> {
        if self.is_established {
            return Ok(true);
        }
        let negotiate = |c: &mut Connection| match c.poll_negotiate() {
            Poll::Ready(done) => Poll::Ready(done.map(|_| ())),
            Poll::Pending => Poll::Pending,
        };
        match self.call_s2n(negotiate)? {
            Poll::Pending => Ok(false),
            Poll::Ready(()) => {
                self.check_negotiated().map_err(|why| *self.end_reason.insert(why))?;
                self.is_established = true;
                Ok(true)
            }
        }
    }

    /// Checks that the negotiated parameters are the expected ones.
    fn check_negotiated(&self) -> Result<(), TlsError> {
        let connection = &self.connection;
        let mut chosen = vec![0; connection.negotiated_psk_identity_length()?];
        connection.negotiated_psk_identity(&mut chosen)?;
        let is_by_key = !chosen.is_empty() && chosen == self.identity;
        let is_by_suite = connection.cipher_suite()? == self.suite.name();
        let is_13 = connection.actual_protocol_version()? == Version::TLS13;
        if is_by_key && is_by_suite && is_13 { Ok(()) } else { Err(TlsError::UnknownPsk) }
    }

    /// Reads available plaintext into `into`; `None` if there is none for now.
    ///
    /// # Errors
    /// As [`Self::handshake`]; data received earlier is read first.
    pub fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, TlsError> {
        let mut filled = 0;
        while filled < into.len() && self.is_established {
            match self.call_s2n(|c| c.poll_recv(&mut into[filled..])) {
                Ok(Poll::Ready(0)) => self.end_reason = Some(TlsError::Closed),
                Ok(Poll::Ready(n)) => filled += n,
                Ok(Poll::Pending) => break,
                Err(_) if filled > 0 => break,
                Err(why) => return Err(why),
            }
        }
        Ok((filled > 0).then_some(filled))
    }

    /// Accepts plaintext to be sent, and returns how much: none before the handshake is complete,
    /// or while too much is waiting.
    ///
    /// # Errors
    /// As [`Self::handshake`].
    pub fn write<'a>(
        &mut self,
        plaintext: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<usize, TlsError> {
        if !self.is_established {
            return Ok(0);
        }
        let mut taken = 0;
        for mut piece in plaintext {
            while !piece.is_empty() {
                if self.output().len() + self.record_buffer.len() >= MAX_OUTPUT_BYTES {
                    self.flush()?;
                    return Ok(taken);
                }
                let n = if self.record_buffer.is_empty() && piece.len() >= MAX_PLAINTEXT_BYTES {
                    self.send_records(&piece[..MAX_PLAINTEXT_BYTES])?;
                    MAX_PLAINTEXT_BYTES
                } else {
                    let n = piece.len().min(MAX_PLAINTEXT_BYTES - self.record_buffer.len());
                    self.record_buffer.extend_from_slice(&piece[..n]);
                    if self.record_buffer.len() == MAX_PLAINTEXT_BYTES {
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

    /// Encrypts the combined plaintext.
    fn flush(&mut self) -> Result<(), TlsError> {
        let mut gathered = std::mem::take(&mut self.record_buffer);
        if !gathered.is_empty() {
            self.send_records(&gathered)?;
            gathered.clear();
        }
        self.record_buffer = gathered;
        Ok(())
    }

    /// Makes records of plaintext. They go to memory, so this never blocks.
    fn send_records(&mut self, mut plaintext: &[u8]) -> Result<(), TlsError> {
        while !plaintext.is_empty() {
            match self.call_s2n(|c| c.poll_send(plaintext))? {
                Poll::Ready(n) if n > 0 => plaintext = plaintext.get(n..).unwrap_or_default(),
                _ => {
                    return Err(*self
                        .end_reason
                        .insert(TlsError::ProtocolFailure("nothing is sent")));
                }
            }
        }
        Ok(())
    }

    /// Tells the peer that the stream ends.
    pub fn close(&mut self) {
        if self.is_established && self.end_reason.is_none() {
            let shut = |c: &mut Connection| match c.poll_shutdown_send() {
                Poll::Ready(done) => Poll::Ready(done.map(|_| ())),
                Poll::Pending => Poll::Pending,
            };
            // Best effort: a peer that does not receive it sees the end of the stream.
            let _ = self.call_s2n(shut);
        }
    }

    /// Calls `s2n-tls`, unless it has failed before.
    fn call_s2n<T>(
        &mut self,
        act: impl FnOnce(&mut Connection) -> Poll<Result<T, s2n_tls::error::Error>>,
    ) -> Result<Poll<T>, TlsError> {
        if let Some(end) = self.end_reason {
            return Err(end);
        }
        let failed = match s2n_io::with_buffers(&mut self.connection, &mut self.buffers, act) {
            Ok(Poll::Pending) => return Ok(Poll::Pending),
            Ok(Poll::Ready(Ok(done))) => return Ok(Poll::Ready(done)),
            Ok(Poll::Ready(Err(error))) | Err(error) => error,
        };
        let end = match (failed.kind(), self.connection.alert()) {
            (ErrorType::Alert, Some(alert)) => TlsError::Alert(alert),
            _ => failed.into(),
        };
        Err(*self.end_reason.insert(end))
    }
}

#[cfg(test)]
mod tests {
    use s2n_tls::enums::PeerKeyUpdate;

    use super::*;
    use crate::Acceptor;

    fn carry(from: &mut Session, to: &mut Session) {
        to.receive(from.output());
        from.consume_output(from.output().len());
    }

    /// A client and a server after the handshake.
    fn pair() -> (Session, Session) {
        let psk = Psk::new(b"NVMe0R01 nqn.h nqn.s", &[7; 32], CipherSuite::Aes128Sha256);
        let mut client = Session::client(&psk).unwrap();
        assert_eq!(client.handshake(), Ok(false));
        let mut acceptor = Acceptor::default();
        acceptor.receive(client.output());
        client.consume_output(client.output().len());
        let mut server = acceptor.accept(&psk).unwrap();
        server.handshake().unwrap();
        carry(&mut server, &mut client);
        assert_eq!(client.handshake(), Ok(true));
        carry(&mut client, &mut server);
        assert_eq!(server.handshake(), Ok(true));
        (client, server)
    }

    /// A client that reads continuously, but more slowly than data is sent: there is always data
    /// waiting.
    #[test]
    fn sent_data_takes_no_memory() {
        let (_client, mut server) = pair();
        let piece = [5; MAX_PLAINTEXT_BYTES];
        for round in 0..1000 {
            while server.write([&piece[..]]).unwrap() > 0 {}
            server.consume_output(3 * MAX_PLAINTEXT_BYTES);
            assert!(!server.output().is_empty());
            let bytes = server.buffers.output.capacity();
            assert!(bytes <= 4 * MAX_OUTPUT_BYTES, "{bytes} bytes in round {round}");
        }
    }

    /// RFC 8446, 4.6.3 and 5.5: each side updates its key when it has sent enough, and the peer
    /// follows.
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
                // The KeyUpdate has its own record: 5 bytes of header, 5 of message, 17 of
                // protection.
                assert_eq!(sides[from].output().len(), 27 + 1000 + 22);
                let sent = sides[from].output().to_vec();
                sides[from].consume_output(sent.len());
                sides[to].receive(&sent);
                assert_eq!(sides[to].read(&mut read), Ok(Some(1000)));
                assert_eq!(read, [round; 1000]);
            }
        }
    }
}
