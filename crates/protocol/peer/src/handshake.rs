//! The handshake of a connection: HELLO both ways, then a proof each.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rt::Core;
use rt::net::{DetachedStream, Listener, Stream};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use crate::frame::{FrameError, HEADER_BYTES, HandshakeFrame, HandshakeRefusal, Hello};
use crate::session::{HelloPair, NegotiatedParams, PeerIdentity, Side};
use crate::tls::PeerStream;
use crate::unauthenticated::{self, UnauthenticatedConnections};
use crate::{ConnectionPurpose, NodeId};

/// Time limit of a whole handshake, connecting included.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time that the peer has to close a connection after a refusal: closing it earlier, over unread
/// bytes, resets it, and the refusal is lost.
const REFUSAL_LINGER: Duration = Duration::from_secs(1);

/// How often connections that are slow to say HELLO are evicted.
const EVICT_INTERVAL: Duration = Duration::from_millis(250);

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection broke, or could not be made.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It took longer than 5 s.
    #[error("no response in time")]
    TimedOut,
    /// The peer did not send a handshake.
    #[error("it sent {0}")]
    InvalidFrame(#[from] FrameError),
    /// This side refused the peer.
    #[error("refused: {0}")]
    Refused(HandshakeRefusal),
    /// The peer refused this side.
    #[error("the peer refused: {0}")]
    RefusedByPeer(HandshakeRefusal),
}

/// A connection that has said HELLO, and is to be handed to the replica that it asks for.
pub struct IncomingConnection {
    pub(crate) stream: Stream,
    pub(crate) hello: Hello,
    /// The body of HELLO as received.
    pub(crate) raw: Vec<u8>,
}

/// An [`IncomingConnection`] on its way between two cores.
#[derive(Debug)]
pub struct DetachedConnection {
    stream: DetachedStream,
    hello: Hello,
    raw: Vec<u8>,
}

impl IncomingConnection {
    /// Reads HELLO from a new connection, on any core, and nothing after it.
    ///
    /// # Errors
    /// [`HandshakeError`]; after 5 s at most.
    pub async fn read(mut stream: Stream) -> Result<Self, HandshakeError> {
        match timeout(HANDSHAKE_TIMEOUT, receive_handshake_frame(&mut stream)).await {
            Err(_) => Err(HandshakeError::TimedOut),
            Ok(Err(error)) => Err(error),
            Ok(Ok(HandshakeFrame::Hello(hello, raw))) => Ok(Self { stream, hello, raw }),
            Ok(Ok(other)) => Err(unexpected(&other)),
        }
    }

    /// Its HELLO, not authenticated yet.
    #[must_use]
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// The volume for which it asks.
    #[must_use]
    pub fn volume(&self) -> Uuid {
        self.hello.volume
    }

    /// Sends the reason and closes it: [`HandshakeRefusal::UnknownVolume`] if this node does not
    /// have the volume.
    pub async fn refuse(mut self, refusal: HandshakeRefusal) {
        send_refusal(&mut self.stream, refusal).await;
    }

    /// Detaches it from this core.
    ///
    /// # Errors
    /// The error of the system.
    pub fn detach(self) -> io::Result<DetachedConnection> {
        let Self { stream, hello, raw } = self;
        Ok(DetachedConnection { stream: stream.detach()?, hello, raw })
    }
}

impl DetachedConnection {
    /// Attaches it to `core`, on which this is called.
    ///
    /// # Errors
    /// The error of the system.
    pub fn attach(self, core: &Core) -> io::Result<IncomingConnection> {
        let Self { stream, hello, raw } = self;
        Ok(IncomingConnection { stream: core.attach(stream)?, hello, raw })
    }
}

impl fmt::Debug for IncomingConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncomingConnection").field("hello", &self.hello).finish_non_exhaustive()
    }
}

/// Accepts connections for ever and passes each to `route` after its HELLO. Connections that break
/// before are dropped. A silent one is dropped after 5 s, or after 2 s if there are many, in total
/// or from one address: silent connections never delay the acceptance of others.
pub async fn accept_connections(listener: &Listener, route: impl Fn(IncomingConnection)) {
    let slots = UnauthenticatedConnections::new(unauthenticated::BEFORE_HELLO);
    let mut handshakes = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            Some(connection) = handshakes.join_next() => {
                if let Ok(Some(Ok(connection))) = connection {
                    route(connection);
                }
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    let slot = slots.admit(from.ip(), Instant::now());
                    handshakes.spawn_local(slot.unless_evicted(IncomingConnection::read(stream)));
                }
                // The error may be of one connection or of the whole process: try again a little
                // later.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            },
            () = tokio::time::sleep(EVICT_INTERVAL), if !slots.is_empty() => slots.evict_slow(Instant::now()),
        }
    }
}

/// The dialler's side of a handshake, from HELLO to READY.
///
/// # Errors
/// [`HandshakeError`]; a refusal was sent. The caller limits the time.
pub(crate) async fn dial(
    mut stream: Stream,
    identity: &PeerIdentity,
    ours: &Hello,
) -> Result<(PeerStream, NegotiatedParams), HandshakeError> {
    stream.write_all(&ours.to_frame()).await?;
    let (theirs, raw) = match receive_handshake_frame(&mut stream).await? {
        HandshakeFrame::Hello(theirs, raw) => (theirs, raw),
        other => return Err(unexpected(&other)),
    };
    let params = match identity.check_acceptor(ours, &theirs) {
        Ok(params) => params,
        Err(refusal) => return Err(send_refusal_error(&mut stream, refusal).await),
    };
    let mut stream = match &identity.tls {
        None => PeerStream::Plain(stream),
        Some(tls) => tls.dial(stream).await?,
    };
    let proof = match receive_handshake_frame(&mut stream).await? {
        HandshakeFrame::Proof(proof) => proof,
        other => return Err(unexpected(&other)),
    };
    let ours_raw = ours.to_bytes();
    let hellos = HelloPair { dialler: &ours_raw, acceptor: &raw };
    if !identity.secret.verifies(Side::Acceptor, &hellos, &proof) {
        return Err(send_refusal_error(&mut stream, HandshakeRefusal::InvalidProof).await);
    }
    let proof = identity.secret.prove(Side::Dialler, &hellos);
    stream.write_all(&HandshakeFrame::proof(proof)).await?;
    stream.flush().await?;
    match receive_handshake_frame(&mut stream).await? {
        HandshakeFrame::Ready => Ok((stream, params)),
        other => Err(unexpected(&other)),
    }
}

/// The acceptor's side of a handshake, from the dialler's HELLO to its proof. `is_known`: the
/// dialler's node has a replica. The caller sends READY.
///
/// # Errors
/// [`HandshakeError`]; a refusal was sent. The caller limits the time.
pub(crate) async fn accept(
    connection: IncomingConnection,
    identity: &PeerIdentity,
    is_known: bool,
    challenge: [u8; 32],
) -> Result<(PeerStream, NegotiatedParams), HandshakeError> {
    let IncomingConnection { mut stream, hello: theirs, raw } = connection;
    let params = match identity.check_dialler(&theirs) {
        Ok(params) if is_known => params,
        Ok(_) => return Err(send_refusal_error(&mut stream, HandshakeRefusal::UnknownNode).await),
        Err(refusal) => return Err(send_refusal_error(&mut stream, refusal).await),
    };
    let ours = identity.hello(theirs.sender, theirs.purpose, theirs.session, challenge);
    stream.write_all(&ours.to_frame()).await?;
    let mut stream = match &identity.tls {
        None => PeerStream::Plain(stream),
        Some(tls) => tls.accept(stream).await?,
    };
    let ours_raw = ours.to_bytes();
    let hellos = HelloPair { dialler: &raw, acceptor: &ours_raw };
    let proof = identity.secret.prove(Side::Acceptor, &hellos);
    stream.write_all(&HandshakeFrame::proof(proof)).await?;
    stream.flush().await?;
    match receive_handshake_frame(&mut stream).await? {
        HandshakeFrame::Proof(proof)
            if identity.secret.verifies(Side::Dialler, &hellos, &proof) =>
        {
            Ok((stream, params))
        }
        HandshakeFrame::Proof(_) => {
            Err(send_refusal_error(&mut stream, HandshakeRefusal::InvalidProof).await)
        }
        other => Err(unexpected(&other)),
    }
}

/// Random bytes for a challenge.
pub(crate) fn challenge(core: &Core) -> [u8; 32] {
    let mut out = [0; 32];
    core.fill_random(&mut out);
    out
}

/// A random number for a session.
pub(crate) fn nonce(core: &Core) -> u128 {
    u128::from(core.random_u64()) << 64 | u128::from(core.random_u64())
}

/// Sends a refusal, and gives the peer time to read it.
async fn send_refusal<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    refusal: HandshakeRefusal,
) {
    // How the peer leaves does not matter.
    let _ = timeout(REFUSAL_LINGER, async {
        stream.write_all(&HandshakeFrame::refused(refusal)).await?;
        stream.shutdown().await?;
        let mut rest = [0; 256];
        while stream.read(&mut rest).await? > 0 {}
        io::Result::Ok(())
    })
    .await;
}

async fn send_refusal_error<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    refusal: HandshakeRefusal,
) -> HandshakeError {
    send_refusal(stream, refusal).await;
    HandshakeError::Refused(refusal)
}

fn unexpected(frame: &HandshakeFrame) -> HandshakeError {
    let kind = match frame {
        HandshakeFrame::Refused(refusal) => return HandshakeError::RefusedByPeer(*refusal),
        HandshakeFrame::Hello(..) => crate::frame::FrameType::Hello,
        HandshakeFrame::Proof(_) => crate::frame::FrameType::Proof,
        HandshakeFrame::Ready => crate::frame::FrameType::Ready,
    };
    HandshakeError::InvalidFrame(FrameError::UnknownType(kind))
}

/// Reads the next frame of a handshake, and nothing after it.
async fn receive_handshake_frame<S: AsyncRead + Unpin>(
    stream: &mut S,
) -> Result<HandshakeFrame, HandshakeError> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).await?;
    let mut body = vec![0; HandshakeFrame::body_bytes(&header)?];
    stream.read_exact(&mut body).await?;
    Ok(HandshakeFrame::parse(&header, &body)?)
}

/// What a log message about dialling refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DialTarget {
    pub(crate) node: NodeId,
    /// The address of a lease connection; `None` for the session.
    pub(crate) address: Option<SocketAddr>,
}

impl fmt::Display for DialTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            None => write!(f, "node {}", self.node),
            Some(address) => write!(f, "node {} at {address}", self.node),
        }
    }
}

/// The connections of a session, in the order of [`crate::Lane`].
pub(crate) fn lane_purposes() -> [ConnectionPurpose; 3] {
    use crate::Lane;
    [Lane::Control, Lane::Replication, Lane::Requests].map(ConnectionPurpose::Lane)
}
