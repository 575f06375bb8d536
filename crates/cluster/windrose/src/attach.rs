//! `windrose attach`: serves a volume as a device of this machine, until told to stop.

mod front_ends;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use api::client::ApiAddress;
use api::endpoint::{GetVolume, NoBody};
use api::{NvmeExport, VolumeName};
use attach::{OutageSignal, WriteDelay, ublk};
use block::{Dev, Epoch};
use config::Config;
use futures_util::FutureExt;
use initiator::nvme::{Controller, Namespace, Options, PathPolicy, Staging, discover};
use nvme::{DiscoveryEntry, DiscoveryKind};
use rt::{Core, Cores, CoresConfig, DiskEngine};
use sd_notify::NotifyState;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use volume::Volume;

use front_ends::{FrontEnds, OpenFrontEnds};

use crate::cli::AttachArgs;
use crate::daemon::{Signals, crash_on_panic, notify_systemd};
use crate::exit::{CliError, FAILED, UNAVAILABLE};
use crate::files::{self, HostKeys};
use crate::host::NvmeHost;
use crate::log;
use crate::remote::NodeConnection;

/// Buffer memory for requests in flight, in bytes. Allocated on first use.
const BUFFER_POOL_BYTES: usize = 64 << 20;

/// How long a node may be silent before another path is used. A write in progress is then sent
/// again after twice this plus the controller's quiesce time (RFD 0027).
const KEEP_ALIVE: Duration = Duration::from_secs(3);

/// Entries of each I/O queue, if the volume's node supports as many.
const IO_QUEUE_ENTRIES: u16 = 128;

/// Directory with links to block devices, named after their volumes.
const DEVICE_LINK_DIR: &str = "/run/windrose/disks";

/// What to serve, and how; sent to the core.
struct AttachSpec {
    name: VolumeName,
    /// The volume's identity: guests see it as their disk's serial number.
    serial: String,
    portals: Vec<SocketAddr>,
    export: NvmeExport,
    host: NvmeHost,
    keys: HostKeys,
    front_ends: FrontEnds,
    queues: u16,
    /// Mode of the FUSE file.
    mode: u32,
    read_only: bool,
    /// How long a request waits while no path works.
    no_path_timeout: Duration,
}

/// Serves a volume until told to stop.
pub(crate) async fn run(remote: NodeConnection, args: AttachArgs) -> Result<ExitCode, CliError> {
    let spec = resolve_volume(&remote, args).await?;
    log::init_logging(&Config::default());
    crash_on_panic();
    let mut signals = Signals::new()?;
    let failed = |e: std::io::Error| CliError::new(FAILED, e.to_string());
    let config = CoresConfig {
        memory_bytes_per_core: BUFFER_POOL_BYTES,
        disk_engine: DiskEngine::Threads,
        ..CoresConfig::default()
    };
    let cores = Cores::start(&config).map_err(failed)?;
    let (stop, stopped) = oneshot::channel();
    let (ready, is_ready) = oneshot::channel();
    let serving = cores.handles()[0].run(move |core| serve_on_core(core, spec, ready, stopped));
    let second_signal = async {
        if is_ready.await.is_ok() {
            notify_systemd(&[NotifyState::Ready, NotifyState::Status("Serving")]);
        }
        let name = signals.next().await;
        tracing::info!(signal = name, "stopping; a second signal ends the process at once");
        notify_systemd(&[NotifyState::Stopping, NotifyState::Status("Stopping")]);
        drop(stop);
        let name = signals.next().await;
        tracing::warn!(signal = name, "stopped before everything was written");
        std::process::exit(FAILED.into());
    };
    let ended = tokio::select! {
        ended = serving => ended,
        () = second_signal => unreachable!("the second signal ends the process"),
    };
    // Blocks until the core's thread exits, which must not happen on a runtime thread.
    let _ = tokio::task::spawn_blocking(|| cores.stop_now()).await;
    ended.map_err(|e| CliError::new(FAILED, e.to_string()))??;
    tracing::info!("stopped; everything that was written is durable");
    Ok(ExitCode::SUCCESS)
}

/// Looks up the volume and its portals.
async fn resolve_volume(remote: &NodeConnection, args: AttachArgs) -> Result<AttachSpec, CliError> {
    let host = NvmeHost::local(args.host_nqn.as_ref(), args.host_id)?;
    let keys = files::read_host_keys(&args.keys)?;
    let volume = remote.client.call_on::<GetVolume>(&args.name, &[], &NoBody).await?;
    let name = volume.name;
    let export = volume.nvme.ok_or_else(|| {
        CliError::new(FAILED, format!("volume {name} is not exported by NVMe/TCP"))
            .with_hint(format!("windrose volume export {name} --protocols iscsi,nvme"))
    })?;
    let portals = candidate_portals(&export.portals, remote.client.address()).await;
    let ublk = args.ublk.then(|| ublk::Options {
        identity: volume.id.as_u128(),
        queues: args.queues,
        read_only: args.read_only,
        device: args.device_id,
        link: Some(Path::new(DEVICE_LINK_DIR).join(name.as_str())),
    });
    Ok(AttachSpec {
        serial: volume.id.simple().to_string(),
        name,
        portals,
        export,
        host,
        keys,
        front_ends: FrontEnds { vhost_user: args.vhost_user, nbd: args.nbd, ublk, fuse: args.fuse },
        queues: args.queues,
        mode: args.fuse_mode,
        read_only: args.read_only,
        no_path_timeout: Duration::from_secs(args.no_path_timeout.into()),
    })
}

/// Candidate portals, best first: loopback if the API is on a Unix socket, otherwise loopback last.
async fn candidate_portals(listed: &[String], api: &ApiAddress) -> Vec<SocketAddr> {
    let mut out = Vec::new();
    for portal in listed.iter().filter_map(|p| p.parse::<SocketAddr>().ok()) {
        match (portal.ip(), api) {
            (ip, ApiAddress::Tls { host, .. }) if ip.is_unspecified() => {
                // An unspecified address: the node also listens where its API answers.
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
    let is_local = matches!(api, ApiAddress::Unix(_));
    out.sort_by_key(|portal| portal.ip().is_loopback() != is_local);
    out
}

/// The main task of the core: connects, serves, and makes everything durable at the end.
async fn serve_on_core(
    core: Core,
    spec: AttachSpec,
    ready: oneshot::Sender<()>,
    mut stop: oneshot::Receiver<()>,
) -> Result<(), CliError> {
    let block = match &spec.front_ends.ublk {
        Some(options) => Some(front_ends::open_block_device(&core, options).await?),
        None => None,
    };
    let (controllers, namespace) = tokio::select! {
        biased;
        // The sender is only ever dropped.
        _ = &mut stop => return Ok(()),
        connected = connect(&core, &spec) => connected?,
    };
    let dev = Dev::shared(Rc::clone(&namespace));
    let has_leftovers = spec.front_ends.has_leftovers(&core, spec.name.as_str()).await
        || block.as_ref().is_some_and(ublk::DeviceControl::is_in_doubt);
    let write_deadline = has_leftovers.then(|| write_delay_deadline(&controllers));
    let dev = match write_deadline {
        Some(at) => Dev::new(WriteDelay::new(dev, at)),
        None => dev,
    };
    let volume = Volume::new(dev, Epoch::default());
    let stop = async {
        drop(stop.await);
        // Keep the sockets until the write delay is over: the next process sees them and waits.
        sleep_until(write_deadline.unwrap_or_else(Instant::now)).await;
    };
    let stop = stop.shared();
    let gone_namespace = Rc::clone(&namespace);
    let outage =
        OutageSignal::new(move || gone_namespace.gone().is_some_and(|gone| gone.is_unreachable));
    let volume_and_outage = (&volume, &outage);
    let write_delay = (write_deadline, &controllers[..]);
    let served =
        serve_front_ends(&core, &spec, volume_and_outage, block, write_delay, ready, stop).await;
    // No write is in doubt after this, so the next process repeats none that could still take
    // effect.
    let closed = volume.close(&core.buffer_pool().account()).await;
    for controller in controllers {
        if let Err(e) = controller.shut_down().await {
            tracing::info!(error = %e, "cannot shut down {controller:?}");
        }
    }
    let has_leftovers = served?;
    if let Some(gone) = namespace.gone().filter(|_| outage.is_set()) {
        let left = format!("volume {} cannot be reached: {}", spec.name, gone.reason);
        return Err(CliError::new(FAILED, left)
            .with_hint("requests stay pending: start this command again to resume them"));
    }
    closed.map_err(|e| {
        let lost = format!("the last writes to volume {} may not be durable: {e}", spec.name);
        CliError::new(FAILED, lost)
    })?;
    if let Some(options) = spec.front_ends.ublk.filter(|_| has_leftovers)
        && let Err(error) = options.mark_clean(&core).await
    {
        tracing::info!(%error, "cannot mark the device as clean; the next process delays its first writes");
    }
    Ok(())
}

/// Opens the requested front ends, and serves them until `stop`, or until the volume is out of
/// reach. Returns whether a block device remains.
///
/// Open front ends replace a killed predecessor's leftovers, and are in turn what a successor
/// detects. They stay open until the write delay is over, even if serving fails; only unmounting
/// the file system removes it earlier.
async fn serve_front_ends(
    core: &Core,
    spec: &AttachSpec,
    volume_and_outage: (&Rc<Volume>, &OutageSignal),
    block: Option<ublk::DeviceControl>,
    (write_deadline, controllers): (Option<Instant>, &[Controller]),
    ready: oneshot::Sender<()>,
    stop: impl Future<Output = ()> + Clone,
) -> Result<bool, CliError> {
    let mut opened = OpenFrontEnds::default();
    let mut open = opened.open(core, spec, volume_and_outage).await;
    let mut until = write_deadline.filter(|_| opened.may_have_replaced_leftovers());
    if write_deadline.is_none() && opened.has_replaced_mount() {
        // `has_leftovers` missed this mount. Serve nothing before the write delay is over.
        let at = write_delay_deadline(controllers);
        sleep_until(at).await;
        until = Some(at);
    }
    if open.is_ok() {
        open = opened.start_block_device(spec, volume_and_outage, block).await;
    }
    let served = match open {
        Ok(()) => {
            // Nothing waits for it if the process is about to end.
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

/// When writes may begin after a killed predecessor. It has left bytes in the nodes' socket
/// buffers, unread while a node does not run: the rules for a silent connection apply to its
/// connections as well (RFD 0027, 3).
fn write_delay_deadline(controllers: &[Controller]) -> Instant {
    let quiesce = controllers.iter().filter_map(Controller::capabilities).map(|a| a.quiesce).max();
    let delay = 2 * KEEP_ALIVE + quiesce.unwrap_or_default();
    tracing::info!(seconds = delay.as_secs(), "the previous process was killed; delaying writes");
    Instant::now() + delay
}

/// Connects to all portals of the volume.
async fn connect(
    core: &Core,
    spec: &AttachSpec,
) -> Result<(Vec<Controller>, Rc<Namespace>), CliError> {
    let name = &spec.name;
    let unreachable = |why: String| {
        CliError::new(UNAVAILABLE, format!("volume {name} cannot be reached: {why}")).with_hint(
            format!(
                "check that this host is allowed: `windrose volume allow {name} {}`",
                spec.host.nqn
            ),
        )
    };
    let Some(first) = spec.portals.first() else {
        return Err(unreachable("its node has no NVMe/TCP portals".to_owned()));
    };
    let NvmeExport { subsystem, namespace, .. } = &spec.export;
    let defaults = Options::new(*first, subsystem, &spec.host.nqn, spec.host.id.into_bytes());
    let (no_path_timeout, HostKeys { secrets, tls_key }) =
        (spec.no_path_timeout, spec.keys.clone());
    let options = Options {
        queue_entries: IO_QUEUE_ENTRIES,
        keep_alive: KEEP_ALIVE,
        retry_timeout: no_path_timeout,
        secrets,
        tls_key,
        ..defaults
    };
    let staging = Staging::default();
    let portals = discover_portals(core, spec, &options, &staging).await;
    let connected = Controller::connect_all(core, &options, &portals, &staging).await;
    let controllers = connected.map_err(|e| unreachable(e.to_string()))?;
    match Namespace::open_multipath(&controllers, *namespace, PathPolicy::LocalFirst).await {
        Ok(namespace) => Ok((controllers, namespace)),
        Err(e) => Err(unreachable(e.to_string())),
    }
}

/// The volume's portals as discovery on the first answering node reports them, that node's own
/// first; those from the API if no node reports any.
async fn discover_portals(
    core: &Core,
    spec: &AttachSpec,
    options: &Options,
    staging: &Staging,
) -> Vec<SocketAddr> {
    let of_volume =
        |e: &DiscoveryEntry| e.kind == DiscoveryKind::Nvm && e.nqn == spec.export.subsystem;
    for portal in &spec.portals {
        let options = Options { address: *portal, ..options.clone() };
        let entries = match discover(core, options, staging.clone()).await {
            Ok(entries) => entries,
            Err(e) => {
                tracing::debug!(portal = %portal, error = %e, "discovery failed at a portal");
                continue;
            }
        };
        let mut all: Vec<_> = entries.iter().filter(|e| of_volume(e)).map(|e| e.address).collect();
        all.sort_by_key(|address| address != portal);
        all.dedup();
        if !all.is_empty() {
            return all;
        }
    }
    spec.portals.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn portals_are_tried_where_they_are_likely_to_answer() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let listed = ["10.0.0.5:4420", "[::]:4421", "127.0.0.1:4420"].map(str::to_owned);
        let here = candidate_portals(&listed, &"unix:/run/x".parse().unwrap()).await;
        let expected = ["[::1]:4421", "127.0.0.1:4421", "127.0.0.1:4420", "10.0.0.5:4420"];
        assert_eq!(here, expected.map(at));
        let there = candidate_portals(&listed, &"https://10.0.0.5:4242".parse().unwrap()).await;
        assert_eq!(there, ["10.0.0.5:4420", "10.0.0.5:4421", "127.0.0.1:4420"].map(at));
    }
}
