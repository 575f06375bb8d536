//! `windrose attach`: a volume as a device of this machine, until somebody says that it is enough.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use api::client::Address;
use api::endpoint::{GetVolume, Nothing};
use api::{NvmeExport, VolumeName};
use attach::vhost_user;
use block::{Dev, Epoch};
use initiator::nvme::{Controller, Namespace, Options, Staging};
use node::config::Config;
use rt::{Core, Cores, CoresConfig, DiskEngine};
use sd_notify::NotifyState;
use tokio::sync::oneshot;
use volume::Volume;

use crate::cli::AttachArgs;
use crate::daemon::{Signals, crash_on_panic, notify};
use crate::exit::{FAILED, Failure, UNAVAILABLE};
use crate::host::Host;
use crate::log;
use crate::remote::Remote;

/// Memory for requests in flight, in bytes. It is taken when it is first used.
const POOL_BYTES: usize = 64 << 20;

/// Entries of the queue to the volume's node, where that has room for as many.
const QUEUE_ENTRIES: u16 = 128;

/// What to serve, and how; all of it crosses to the core.
struct Order {
    name: VolumeName,
    /// The volume's identity: guests see it as their disk's serial number.
    serial: String,
    portals: Vec<SocketAddr>,
    export: NvmeExport,
    host: Host,
    socket: PathBuf,
    rings: u16,
    read_only: bool,
}

/// Serves a volume until told to stop.
pub(crate) async fn run(remote: Remote, args: AttachArgs) -> Result<ExitCode, Failure> {
    let order = order(&remote, args).await?;
    log::start(&Config::default());
    crash_on_panic();
    let mut signals = Signals::new()?;
    let failed = |e: std::io::Error| Failure::new(FAILED, e.to_string());
    let config = CoresConfig {
        pool_bytes_per_core: POOL_BYTES,
        disk_engine: DiskEngine::Pool,
        ..CoresConfig::default()
    };
    let cores = Cores::start(&config).map_err(failed)?;
    let (stop, stopped) = oneshot::channel();
    let (ready, is_ready) = oneshot::channel();
    let life = cores.handles()[0].run(move |core| serve(core, order, ready, stopped));
    let told = async {
        if is_ready.await.is_ok() {
            notify(&[NotifyState::Ready, NotifyState::Status("Serving")]);
        }
        let name = signals.next().await;
        tracing::info!(signal = name, "stopping; a second signal ends the process at once");
        notify(&[NotifyState::Stopping, NotifyState::Status("Stopping")]);
        drop(stop);
        let name = signals.next().await;
        tracing::warn!(signal = name, "ended before everything was written");
        std::process::exit(FAILED.into());
    };
    let ended = tokio::select! {
        ended = life => ended,
        () = told => unreachable!("the second signal ends the process"),
    };
    // It waits for the core's thread, which a runtime's own thread may not.
    let _ = tokio::task::spawn_blocking(|| cores.stop_now()).await;
    ended.map_err(|e| Failure::new(FAILED, e.to_string()))??;
    tracing::info!("stopped; everything that was written is durable");
    Ok(ExitCode::SUCCESS)
}

/// Finds out where the volume is.
async fn order(remote: &Remote, args: AttachArgs) -> Result<Order, Failure> {
    let host = Host::of_this_machine(args.host_nqn.as_ref(), args.host_id)?;
    let volume = remote.client.call_on::<GetVolume>(&args.name, &[], &Nothing).await?;
    let name = volume.name;
    let export = volume.nvme.ok_or_else(|| {
        Failure::new(FAILED, format!("volume {name} is not exported by NVMe/TCP"))
            .hint(format!("windrose volume export {name} --via both"))
    })?;
    let portals = portals(&export.portals, remote.client.address()).await;
    Ok(Order {
        serial: volume.id.simple().to_string(),
        name,
        portals,
        export,
        host,
        socket: args.vhost_user,
        rings: args.queues,
        read_only: args.read_only,
    })
}

/// Where to try, the best first: from the node itself its loopback, from elsewhere anything but.
async fn portals(listed: &[String], api: &Address) -> Vec<SocketAddr> {
    let mut out = Vec::new();
    for portal in listed.iter().filter_map(|p| p.parse::<SocketAddr>().ok()) {
        match (portal.ip(), api) {
            (ip, Address::Tls { host, .. }) if ip.is_unspecified() => {
                // The node listens everywhere: also where its API answers.
                let found = tokio::net::lookup_host((host.as_str(), portal.port())).await;
                out.extend(found.into_iter().flatten());
            }
            (IpAddr::V4(ip), _) if ip.is_unspecified() => {
                out.push((Ipv4Addr::LOCALHOST, portal.port()).into());
            }
            (IpAddr::V6(ip), _) if ip.is_unspecified() => {
                out.push((Ipv6Addr::LOCALHOST, portal.port()).into());
                out.push((Ipv4Addr::LOCALHOST, portal.port()).into());
            }
            _ => out.push(portal),
        }
    }
    let here = matches!(api, Address::Unix(_));
    out.sort_by_key(|portal| portal.ip().is_loopback() != here);
    out
}

/// The life of the core: connects, serves, and ends with everything durable.
async fn serve(
    core: Core,
    order: Order,
    ready: oneshot::Sender<()>,
    mut stop: oneshot::Receiver<()>,
) -> Result<(), Failure> {
    let (controller, dev) = tokio::select! {
        biased;
        // Closed, never sent on.
        _ = &mut stop => return Ok(()),
        connected = connect(&core, &order) => connected?,
    };
    let volume = Volume::new(dev, Epoch::default());
    let options = vhost_user::Options {
        rings: order.rings,
        read_only: order.read_only,
        serial: order.serial.clone(),
    };
    let server = vhost_user::Server::new(&core, std::rc::Rc::clone(&volume), &options);
    let socket = order.socket.display();
    let listener = core
        .listen_local(&order.socket)
        .map_err(|e| Failure::new(FAILED, format!("{socket}: {e}")))?;
    tracing::info!(
        volume = %order.name, portal = %controller.options().address, %socket,
        "serving the volume as a disk of a virtual machine"
    );
    // Nobody waits for it where the process is about to end.
    let _ = ready.send(());
    server.serve(&listener, async { drop(stop.await) }).await;
    drop(listener);
    let closed = volume.close(&core.pool().account()).await;
    if let Err(e) = controller.shut_down().await {
        tracing::info!(error = %e, "the node was not told that we leave");
    }
    closed.map_err(|e| {
        let lost =
            format!("what was written last to volume {} may not be durable: {e}", order.name);
        Failure::new(FAILED, lost)
    })
}

/// Connects to the volume at one of its portals.
async fn connect(core: &Core, order: &Order) -> Result<(Controller, Dev), Failure> {
    let mut why = "its node listens nowhere".to_owned();
    for &portal in &order.portals {
        let NvmeExport { subsystem, namespace, .. } = &order.export;
        let usual = Options::new(portal, subsystem, &order.host.nqn, order.host.id.into_bytes());
        let options = Options { queue_entries: QUEUE_ENTRIES, ..usual };
        let controller = match Controller::connect(core, options, Staging::default()).await {
            Ok(controller) => controller,
            Err(e) => {
                why = format!("{portal}: {e}");
                continue;
            }
        };
        match Namespace::open(&controller, *namespace).await {
            Ok(namespace) => return Ok((controller, Dev::shared(namespace))),
            Err(e) => why = format!("{portal}: {e}"),
        }
    }
    let name = &order.name;
    Err(Failure::new(UNAVAILABLE, format!("volume {name} cannot be reached: {why}"))
        .hint(format!("may this host reach it? `windrose volume allow {name} {}`", order.host.nqn)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn portals_are_tried_where_they_are_likely_to_answer() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let listed = ["10.0.0.5:4420", "[::]:4421", "127.0.0.1:4420"].map(str::to_owned);
        let here = portals(&listed, &"unix:/run/x".parse().unwrap()).await;
        let expected = ["[::1]:4421", "127.0.0.1:4421", "127.0.0.1:4420", "10.0.0.5:4420"];
        assert_eq!(here, expected.map(at));
        let there = portals(&listed, &"https://10.0.0.5:4242".parse().unwrap()).await;
        assert_eq!(there, ["10.0.0.5:4420", "10.0.0.5:4421", "127.0.0.1:4420"].map(at));
    }
}
