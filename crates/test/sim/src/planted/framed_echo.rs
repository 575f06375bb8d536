//! An echo of messages with a length in front.

use std::net::SocketAddr;

use rt::Core;
use rt::net::Stream;
use rt::sim::{HostSetup, World};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Variant;

const PORT: u16 = 7;
const MAX_MESSAGE_LEN: usize = 5000;

pub(super) async fn run(world: World, variant: Variant) -> Result<(), String> {
    let [server, client] = ["server", "client"].map(|n| world.add_host(n, HostSetup::default()));
    server.start(move |core| serve(core, variant));
    let (dice, to) = (world.clone(), SocketAddr::new(server.address(), PORT));
    let talk = client.run(move |core| async move { run_client(core, &dice, to).await });
    talk.join().await.unwrap_or_else(|| Err("the client crashed by itself".into()))
}

async fn serve(core: Core, variant: Variant) -> Result<(), String> {
    let at = SocketAddr::from(([0, 0, 0, 0], PORT));
    let listener = core.listen(at).await.map_err(|e| e.to_string())?;
    loop {
        let (stream, _) = listener.accept().await.map_err(|e| e.to_string())?;
        // The client sees what went wrong, if anything did.
        tokio::task::spawn_local(async move { drop(echo(stream, variant).await) });
    }
}

async fn echo(mut stream: Stream, variant: Variant) -> std::io::Result<()> {
    loop {
        let len = usize::from(stream.read_u16_le().await?);
        let mut message = vec![0; len];
        match variant {
            Variant::Correct => drop(stream.read_exact(&mut message).await?),
            Variant::Mistaken => {
                let n = stream.read(&mut message).await?;
                message.truncate(n);
            }
        }
        stream.write_all(&message).await?;
    }
}

async fn run_client(core: Core, world: &World, to: SocketAddr) -> Result<(), String> {
    let mut stream = loop {
        if let Ok(stream) = core.dial(to).await {
            break stream;
        }
    };
    for round in 0..20 {
        let len = 1 + world.rng().index(MAX_MESSAGE_LEN);
        let mut message = vec![0; len];
        world.rng().fill(&mut message);
        let prefix = u16::try_from(len).expect("at most LONGEST");
        stream.write_u16_le(prefix).await.map_err(|e| e.to_string())?;
        stream.write_all(&message).await.map_err(|e| e.to_string())?;
        let mut answer = vec![0; len];
        let read =
            tokio::time::timeout(std::time::Duration::from_secs(5), stream.read_exact(&mut answer));
        match read.await {
            Ok(Ok(_)) if answer == message => {}
            Ok(Ok(_)) => return Err(format!("round {round}: the echo differs")),
            Ok(Err(e)) => return Err(format!("round {round}: {e}")),
            Err(_) => return Err(format!("round {round}: no echo")),
        }
    }
    Ok(())
}
