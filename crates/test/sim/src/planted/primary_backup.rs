//! A value on two hosts: the primary copies every change to the backup before it acknowledges.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use rt::Core;
use rt::net::Stream;
use rt::sim::{Host, HostSetup, World};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::Variant;

const PORT: u16 = 700;
const REPLICATION_TIMEOUT: Duration = Duration::from_secs(1);
const REFUSED: u64 = u64::MAX;

#[derive(Debug, Default)]
struct ClientState {
    issued: Cell<u64>,
    acknowledged: Cell<u64>,
}

pub(super) async fn run(world: World, variant: Variant) -> Result<(), String> {
    let [client, primary, backup] =
        ["client", "primary", "backup"].map(|n| world.add_host(n, HostSetup::default()));
    let stored = Rc::new(Cell::new(0));
    let value = Rc::clone(&stored);
    backup.start(move |core| run_backup(core, Rc::clone(&value)));
    let to = SocketAddr::new(backup.address(), PORT);
    primary.start(move |core| run_primary(core, to, variant));
    let known = Rc::new(ClientState::default());
    let writes = Rc::clone(&known);
    let to = SocketAddr::new(primary.address(), PORT);
    client.run(move |core| run_client(core, to, writes));

    let ms = Duration::from_millis;
    tokio::time::sleep(world.rng().duration_between(ms(50), ms(400))).await;
    inject_network_fault(&world, &primary, &backup).await;
    tokio::time::sleep(world.rng().duration_between(ms(0), ms(4000))).await;
    primary.power_cut();
    // Fail over: from now on the backup's value counts.
    let (found, low, high) = (stored.get(), known.acknowledged.get(), known.issued.get());
    world.note(format!("failover: {found} stored, {low} acknowledged, {high} issued"));
    if found < low || found > high {
        return Err(format!("the backup holds {found}: {low} acknowledged, {high} issued"));
    }
    if low == 0 {
        return Err("nothing was acknowledged at all".into());
    }
    Ok(())
}

/// A partition, a one-way partition, or nothing but delay.
async fn inject_network_fault(world: &World, primary: &Host, backup: &Host) {
    match world.rng().below(3) {
        0 => world.partition(primary, backup),
        1 => world.set_link(backup, primary, |l| l.is_cut = true),
        _ => world.set_link(primary, backup, |l| l.loss = 0.3),
    }
    if world.rng().chance(0.3) {
        tokio::time::sleep(Duration::from_millis(300)).await;
        world.heal(primary, backup);
    }
}

/// The backup.
async fn run_backup(core: Core, stored: Rc<Cell<u64>>) -> Result<(), String> {
    let at = SocketAddr::from(([0, 0, 0, 0], PORT));
    let listener = core.listen(at).await.map_err(|e| e.to_string())?;
    loop {
        let (mut stream, _) = listener.accept().await.map_err(|e| e.to_string())?;
        let stored = Rc::clone(&stored);
        tokio::task::spawn_local(async move {
            while let Ok(value) = stream.read_u64_le().await {
                // A late message of an old connection must not overwrite a newer one.
                stored.set(stored.get().max(value));
                if stream.write_u64_le(value).await.is_err() {
                    break;
                }
            }
        });
    }
}

/// The primary.
async fn run_primary(core: Core, backup: SocketAddr, variant: Variant) -> Result<(), String> {
    let at = SocketAddr::from(([0, 0, 0, 0], PORT));
    let listener = core.listen(at).await.map_err(|e| e.to_string())?;
    loop {
        let (mut client, _) = listener.accept().await.map_err(|e| e.to_string())?;
        let mut link = core.dial(backup).await.ok();
        while let Ok(value) = client.read_u64_le().await {
            let copied = replicate(&core, &mut link, backup, value).await.is_some();
            let answer = if copied || variant == Variant::Mistaken { value } else { REFUSED };
            if client.write_u64_le(answer).await.is_err() {
                break;
            }
        }
    }
}

async fn replicate(
    core: &Core,
    link: &mut Option<Stream>,
    backup: SocketAddr,
    value: u64,
) -> Option<()> {
    if link.is_none() {
        *link = timeout(REPLICATION_TIMEOUT, core.dial(backup)).await.ok().and_then(Result::ok);
    }
    let stream = link.as_mut()?;
    let exchange = async {
        stream.write_u64_le(value).await?;
        stream.read_u64_le().await
    };
    match timeout(REPLICATION_TIMEOUT, exchange).await {
        Ok(Ok(answer)) if answer == value => Some(()),
        _ => {
            *link = None;
            None
        }
    }
}

async fn run_client(
    core: Core,
    primary: SocketAddr,
    known: Rc<ClientState>,
) -> std::io::Result<()> {
    let mut stream = loop {
        match core.dial(primary).await {
            Ok(stream) => break stream,
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    for value in 1.. {
        known.issued.set(value);
        stream.write_u64_le(value).await?;
        if stream.read_u64_le().await? == value {
            known.acknowledged.set(value);
        }
    }
    Ok(())
}
