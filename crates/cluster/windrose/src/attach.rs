//! `windrose attach`: a volume as a device of this machine, until somebody says that it is enough.

mod doors;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use api::client::Address;
use api::endpoint::{GetVolume, Nothing};
use api::{NvmeExport, VolumeName};
use attach::{Absence, Settling, ublk};
use block::{Dev, Epoch};
use futures_util::FutureExt;
use initiator::nvme::{Controller, Namespace, Options, Policy, Staging, discover};
use node::config::Config;
use nvme::{DiscoveryEntry, DiscoveryKind};
use rt::{Core, Cores, CoresConfig, DiskEngine};
use sd_notify::NotifyState;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use volume::Volume;

use doors::{Doors, Opened};

use crate::cli::AttachArgs;
use crate::daemon::{Signals, crash_on_panic, notify};
use crate::exit::{FAILED, Failure, UNAVAILABLE};
use crate::files::{self, HostKeys};
use crate::host::Host;
use crate::log;
use crate::remote::Remote;

/// Memory for requests in flight, in bytes. It is taken when it is first used.
const POOL_BYTES: usize = 64 << 20;

/// After how long a silence of a node another path is taken. A write that was under way then is sent again after
/// twice as much and the controller's quiesce time (RFD 0027).
const KEEP_ALIVE: Duration = Duration::from_secs(3);

/// Entries of the queue to the volume's node, where that has room for as many.
const QUEUE_ENTRIES: u16 = 128;

/// Where block devices are found by the names of their volumes.
const DISKS: &str = "/run/windrose/disks";

/// What to serve, and how; all of it crosses to the core.
struct Order {
    name: VolumeName,
    /// The volume's identity: guests see it as their disk's serial number.
    serial: String,
    portals: Vec<SocketAddr>,
    export: NvmeExport,
    host: Host,
    keys: HostKeys,
    doors: Doors,
    rings: u16,
    /// Permissions of the file.
    mode: u32,
    read_only: bool,
    /// How long a request waits while no node answers.
    patience: Duration,
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
    let keys = files::host_keys(&args.keys)?;
    let volume = remote.client.call_on::<GetVolume>(&args.name, &[], &Nothing).await?;
    let name = volume.name;
    let export = volume.nvme.ok_or_else(|| {
        Failure::new(FAILED, format!("volume {name} is not exported by NVMe/TCP"))
            .hint(format!("windrose volume export {name} --via both"))
    })?;
    let portals = portals(&export.portals, remote.client.address()).await;
    let ublk = args.ublk.then(|| ublk::Options {
        identity: volume.id.as_u128(),
        queues: args.queues,
        read_only: args.read_only,
        device: args.device_id,
        link: Some(Path::new(DISKS).join(name.as_str())),
    });
    Ok(Order {
        serial: volume.id.simple().to_string(),
        name,
        portals,
        export,
        host,
        keys,
        doors: Doors { vhost_user: args.vhost_user, nbd: args.nbd, ublk, fuse: args.fuse },
        rings: args.queues,
        mode: args.fuse_mode,
        read_only: args.read_only,
        patience: Duration::from_secs(args.patience.into()),
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
    let block = match &order.doors.ublk {
        Some(options) => Some(doors::block_device(&core, options).await?),
        None => None,
    };
    let (controllers, namespace) = tokio::select! {
        biased;
        // Closed, never sent on.
        _ = &mut stop => return Ok(()),
        connected = connect(&core, &order) => connected?,
    };
    let dev = Dev::shared(Rc::clone(&namespace));
    let is_left = order.doors.are_left(&core, order.name.as_str()).await
        || block.as_ref().is_some_and(ublk::Door::is_in_doubt);
    let settled = is_left.then(|| settles(&controllers));
    let dev = match settled {
        Some(at) => Dev::new(Settling::new(dev, at)),
        None => dev,
    };
    let volume = Volume::new(dev, Epoch::default());
    let stop = async {
        drop(stop.await);
        // Who comes next knows by the sockets that he has to wait.
        sleep_until(settled.unwrap_or_else(Instant::now)).await;
    };
    let stop = stop.shared();
    let known = Rc::clone(&namespace);
    let absence = Absence::when(move || known.gone().is_some_and(|gone| gone.away));
    let what = (&volume, &absence);
    let settle = (settled, &controllers[..]);
    let served = serve_doors(&core, &order, what, block, settle, ready, stop).await;
    // What is in doubt is over when this is: the next process repeats no change that could still happen.
    let closed = volume.close(&core.pool().account()).await;
    for controller in controllers {
        if let Err(e) = controller.shut_down().await {
            tracing::info!(error = %e, "{controller:?} was not told that we leave");
        }
    }
    let is_left = served?;
    if let Some(gone) = namespace.gone().filter(|_| absence.is_certain()) {
        let left = format!("volume {} is out of reach: {}", order.name, gone.why);
        return Err(Failure::new(FAILED, left)
            .hint("requests are left unanswered: this process, started anew, goes on with them"));
    }
    closed.map_err(|e| {
        let lost =
            format!("what was written last to volume {} may not be durable: {e}", order.name);
        Failure::new(FAILED, lost)
    })?;
    if let Some(options) = order.doors.ublk.filter(|_| is_left)
        && let Err(error) = options.left_in_order(&core).await
    {
        tracing::info!(%error, "the next process waits as if this one had been killed");
    }
    Ok(())
}

/// Opens the doors that are asked for, and serves at them until `stop`, or until the volume is out of reach. Whether there
/// still is a block device then.
///
/// What is open is in the place of what was left, and tells who comes next. It stays for as long as changes wait, also
/// where nothing comes to be served; only who unmounts the file system takes that away before.
async fn serve_doors(
    core: &Core,
    order: &Order,
    what: (&Rc<Volume>, &Absence),
    block: Option<ublk::Door>,
    (settled, controllers): (Option<Instant>, &[Controller]),
    ready: oneshot::Sender<()>,
    stop: impl Future<Output = ()> + Clone,
) -> Result<bool, Failure> {
    let mut opened = Opened::default();
    let mut open = opened.open(core, order, what).await;
    let mut until = settled.filter(|_| opened.has_touched());
    if settled.is_none() && opened.has_replaced() {
        // The look has missed it. Nobody is served before changes may be made.
        let at = settles(controllers);
        sleep_until(at).await;
        until = Some(at);
    }
    if open.is_ok() {
        open = opened.begin(order, what, block).await;
    }
    let served = match open {
        Ok(()) => {
            // Nobody waits for it where the process is about to end.
            let _ = ready.send(());
            opened.serve(stop).await
        }
        Err(failure) => {
            sleep_until(until.unwrap_or_else(Instant::now)).await;
            drop(opened);
            Err(failure)
        }
    };
    sleep_until(until.unwrap_or_else(Instant::now)).await;
    served
}

/// Until when changes wait where a process was here before and has been killed. It has left bytes in the sockets of nodes,
/// which do not know of it as long as they do not run: what is said of a connection that falls silent holds for its
/// connections as well (RFD 0027, 3).
fn settles(controllers: &[Controller]) -> Instant {
    let quiesce = controllers.iter().filter_map(Controller::abilities).map(|a| a.quiesce).max();
    let time = 2 * KEEP_ALIVE + quiesce.unwrap_or_default();
    tracing::info!(seconds = time.as_secs(), "whoever was here before was killed: changes wait");
    Instant::now() + time
}

/// Connects to the volume at all of its portals.
async fn connect(core: &Core, order: &Order) -> Result<(Vec<Controller>, Rc<Namespace>), Failure> {
    let name = &order.name;
    let unreachable = |why: String| {
        Failure::new(UNAVAILABLE, format!("volume {name} cannot be reached: {why}")).hint(format!(
            "may this host reach it? `windrose volume allow {name} {}`",
            order.host.nqn
        ))
    };
    let Some(first) = order.portals.first() else {
        return Err(unreachable("its node listens nowhere".to_owned()));
    };
    let NvmeExport { subsystem, namespace, .. } = &order.export;
    let usual = Options::new(*first, subsystem, &order.host.nqn, order.host.id.into_bytes());
    let (patience, HostKeys { secrets, tls_key }) = (order.patience, order.keys.clone());
    let options = Options {
        queue_entries: QUEUE_ENTRIES,
        keep_alive: KEEP_ALIVE,
        patience,
        secrets,
        tls_key,
        ..usual
    };
    let staging = Staging::default();
    let portals = every_portal(core, order, &options, &staging).await;
    let connected = Controller::connect_all(core, &options, &portals, &staging).await;
    let controllers = connected.map_err(|e| unreachable(e.to_string()))?;
    match Namespace::through(&controllers, *namespace, Policy::LocalFirst).await {
        Ok(namespace) => Ok((controllers, namespace)),
        Err(e) => Err(unreachable(e.to_string())),
    }
}

/// Where the volume is served: what the first node that answers tells of all (discovery), that node first. What the
/// API has told, where none tells anything.
async fn every_portal(
    core: &Core,
    order: &Order,
    options: &Options,
    staging: &Staging,
) -> Vec<SocketAddr> {
    let of_volume =
        |e: &DiscoveryEntry| e.kind == DiscoveryKind::Nvm && e.nqn == order.export.subsystem;
    for at in &order.portals {
        let options = Options { address: *at, ..options.clone() };
        let told = match discover(core, options, staging.clone()).await {
            Ok(told) => told,
            Err(e) => {
                tracing::debug!(portal = %at, error = %e, "it tells nothing of the others");
                continue;
            }
        };
        let mut all: Vec<_> = told.iter().filter(|e| of_volume(e)).map(|e| e.address).collect();
        all.sort_by_key(|address| address != at);
        all.dedup();
        if !all.is_empty() {
            return all;
        }
    }
    order.portals.clone()
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
