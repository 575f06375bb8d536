//! How connections begin: HELLO both ways, and a proof each.

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

use crate::frame::{Bad, HEADER_BYTES, HandshakeFrame, Hello, Refusal};
use crate::session::{Agreed, Hellos, Identity, Side};
use crate::tls::Wire;
use crate::unproven::{self, UnprovenConnections};
use crate::{Line, NodeId};

/// Time for the whole of a handshake, connecting included.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);

/// Time that the other side has to close a connection after it was refused: one that is closed over
/// unread bytes is reset, and takes the refusal with it.
const PARTING: Duration = Duration::from_secs(1);

/// How often is looked for connections that take too long to say HELLO.
const LOOK: Duration = Duration::from_millis(250);

/// Why a connection did not become a part of anything.
#[derive(Debug, thiserror::Error)]
pub enum Unjoined {
    /// It broke, or could not be made.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It took longer than 5 s.
    #[error("no answer in time")]
    TimedOut,
    /// What came is not a handshake.
    #[error("it sent {0}")]
    Bad(#[from] Bad),
    /// The other side is not wanted here.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The other side does not want us.
    #[error("the other side refuses: {0}")]
    RefusedByPeer(Refusal),
}

/// A connection that has said HELLO, and waits to be handed to the replica that it asks for.
pub struct Greeting {
    pub(crate) stream: Stream,
    pub(crate) hello: Hello,
    /// HELLO's body as it was sent.
    pub(crate) raw: Vec<u8>,
}

/// A [`Greeting`] between two cores.
#[derive(Debug)]
pub struct DetachedGreeting {
    stream: DetachedStream,
    hello: Hello,
    raw: Vec<u8>,
}

impl Greeting {
    /// Reads HELLO from a new connection, on whatever core it came. Nothing behind it is read.
    ///
    /// # Errors
    /// [`Unjoined`]; after 5 s at most.
    pub async fn read(mut stream: Stream) -> Result<Self, Unjoined> {
        match timeout(HANDSHAKE, receive(&mut stream)).await {
            Err(_) => Err(Unjoined::TimedOut),
            Ok(Err(why)) => Err(why),
            Ok(Ok(HandshakeFrame::Hello(hello, raw))) => Ok(Self { stream, hello, raw }),
            Ok(Ok(other)) => Err(unexpected(&other)),
        }
    }

    /// What it said. Nothing of it is proven yet.
    #[must_use]
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// The volume that it asks for.
    #[must_use]
    pub fn volume(&self) -> Uuid {
        self.hello.volume
    }

    /// Says why it is not wanted, and closes it: [`Refusal::Volume`] where nobody has that.
    pub async fn refuse(mut self, why: Refusal) {
        refuse(&mut self.stream, why).await;
    }

    /// Takes it off this core.
    ///
    /// # Errors
    /// What the system reports.
    pub fn detach(self) -> io::Result<DetachedGreeting> {
        let Self { stream, hello, raw } = self;
        Ok(DetachedGreeting { stream: stream.detach()?, hello, raw })
    }
}

impl DetachedGreeting {
    /// Takes it over to `core`, on which this is called.
    ///
    /// # Errors
    /// What the system reports.
    pub fn attach(self, core: &Core) -> io::Result<Greeting> {
        let Self { stream, hello, raw } = self;
        Ok(Greeting { stream: core.attach(stream)?, hello, raw })
    }
}

impl fmt::Debug for Greeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Greeting").field("hello", &self.hello).finish_non_exhaustive()
    }
}

/// Accepts connections for ever and gives each to `route` once it has said HELLO. Those that break
/// before are forgotten; those that say nothing are given 5 s at most, and where there are many of them, or many of one
/// address, two: nobody waits to be accepted for them.
pub async fn receive_greetings(listener: &Listener, route: impl Fn(Greeting)) {
    let slots = UnprovenConnections::new(unproven::SILENT);
    let mut silent = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            Some(greeting) = silent.join_next() => {
                if let Ok(Some(Ok(greeting))) = greeting {
                    route(greeting);
                }
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    let slot = slots.admit(from.ip(), Instant::now());
                    silent.spawn_local(slot.unless_evicted(Greeting::read(stream)));
                }
                // Of one connection or of the whole process: a little later it may work.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            },
            () = tokio::time::sleep(LOOK), if !slots.is_empty() => slots.evict_slow(Instant::now()),
        }
    }
}

/// The dialler's side of a handshake, from HELLO to READY.
///
/// # Errors
/// [`Unjoined`]; a refusal was said. The caller sets a limit in time.
pub(crate) async fn dial(
    mut stream: Stream,
    identity: &Identity,
    ours: &Hello,
) -> Result<(Wire, Agreed), Unjoined> {
    stream.write_all(&ours.to_frame()).await?;
    let (theirs, raw) = match receive(&mut stream).await? {
        HandshakeFrame::Hello(theirs, raw) => (theirs, raw),
        other => return Err(unexpected(&other)),
    };
    let agreed = match identity.takes(ours, &theirs) {
        Ok(agreed) => agreed,
        Err(why) => return Err(refuse_now(&mut stream, why).await),
    };
    let mut wire = match &identity.tls {
        None => Wire::Plain(stream),
        Some(tls) => tls.dial(stream).await?,
    };
    let proof = match receive(&mut wire).await? {
        HandshakeFrame::Proof(proof) => proof,
        other => return Err(unexpected(&other)),
    };
    let ours_raw = ours.to_bytes();
    let hellos = Hellos { dialler: &ours_raw, acceptor: &raw };
    if !identity.secret.verifies(Side::Acceptor, &hellos, &proof) {
        return Err(refuse_now(&mut wire, Refusal::Proof).await);
    }
    let proof = identity.secret.prove(Side::Dialler, &hellos);
    wire.write_all(&HandshakeFrame::proof(proof)).await?;
    wire.flush().await?;
    match receive(&mut wire).await? {
        HandshakeFrame::Ready => Ok((wire, agreed)),
        other => Err(unexpected(&other)),
    }
}

/// The acceptor's side of a handshake, from the dialler's HELLO to its proof; `known` is whether its
/// node has a replica. READY is left to the caller.
///
/// # Errors
/// [`Unjoined`]; a refusal was said. The caller sets a limit in time.
pub(crate) async fn accept(
    greeting: Greeting,
    identity: &Identity,
    known: bool,
    challenge: [u8; 32],
) -> Result<(Wire, Agreed), Unjoined> {
    let Greeting { mut stream, hello: theirs, raw } = greeting;
    let agreed = match identity.accepts(&theirs) {
        Ok(agreed) if known => agreed,
        Ok(_) => return Err(refuse_now(&mut stream, Refusal::Stranger).await),
        Err(why) => return Err(refuse_now(&mut stream, why).await),
    };
    let ours = identity.hello(theirs.from, theirs.line, theirs.session, challenge);
    stream.write_all(&ours.to_frame()).await?;
    let mut wire = match &identity.tls {
        None => Wire::Plain(stream),
        Some(tls) => tls.accept(stream).await?,
    };
    let ours_raw = ours.to_bytes();
    let hellos = Hellos { dialler: &raw, acceptor: &ours_raw };
    let proof = identity.secret.prove(Side::Acceptor, &hellos);
    wire.write_all(&HandshakeFrame::proof(proof)).await?;
    wire.flush().await?;
    match receive(&mut wire).await? {
        HandshakeFrame::Proof(proof)
            if identity.secret.verifies(Side::Dialler, &hellos, &proof) =>
        {
            Ok((wire, agreed))
        }
        HandshakeFrame::Proof(_) => Err(refuse_now(&mut wire, Refusal::Proof).await),
        other => Err(unexpected(&other)),
    }
}

/// Random bytes for a challenge.
pub(crate) fn challenge(core: &Core) -> [u8; 32] {
    let mut out = [0; 32];
    core.fill_random(&mut out);
    out
}

/// A number for a session.
pub(crate) fn nonce(core: &Core) -> u128 {
    u128::from(core.random_u64()) << 64 | u128::from(core.random_u64())
}

/// Says why, and gives the other side a moment to hear it.
async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, why: Refusal) {
    // How the other one leaves is its own affair.
    let _ = timeout(PARTING, async {
        stream.write_all(&HandshakeFrame::refused(why)).await?;
        stream.shutdown().await?;
        let mut rest = [0; 256];
        while stream.read(&mut rest).await? > 0 {}
        io::Result::Ok(())
    })
    .await;
}

async fn refuse_now<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, why: Refusal) -> Unjoined {
    refuse(stream, why).await;
    Unjoined::Refused(why)
}

fn unexpected(frame: &HandshakeFrame) -> Unjoined {
    let kind = match frame {
        HandshakeFrame::Refused(why) => return Unjoined::RefusedByPeer(*why),
        HandshakeFrame::Hello(..) => crate::frame::Type::Hello,
        HandshakeFrame::Proof(_) => crate::frame::Type::Proof,
        HandshakeFrame::Ready => crate::frame::Type::Ready,
    };
    Unjoined::Bad(Bad::Type(kind))
}

/// The next frame of a handshake; nothing behind it is read.
async fn receive<S: AsyncRead + Unpin>(stream: &mut S) -> Result<HandshakeFrame, Unjoined> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).await?;
    let mut body = vec![0; HandshakeFrame::body_bytes(&header)?];
    stream.read_exact(&mut body).await?;
    Ok(HandshakeFrame::parse(&header, &body)?)
}

/// Whom a message in the log is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Whom {
    pub(crate) node: NodeId,
    /// Which of its connections; `None`: the session.
    pub(crate) path: Option<SocketAddr>,
}

impl fmt::Display for Whom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path {
            None => write!(f, "node {}", self.node),
            Some(path) => write!(f, "node {} at {path}", self.node),
        }
    }
}

/// The connections of a session, in the order of [`crate::Lane`].
pub(crate) fn lanes() -> [Line; 3] {
    use crate::Lane;
    [Lane::Control, Lane::Down, Lane::Up].map(Line::Lane)
}
