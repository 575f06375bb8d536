//! The front ends of an attached volume.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use attach::{OutageSignal, fuse, nbd, ublk, vhost_user};
use futures_util::FutureExt;
use rt::Core;
use rt::net::Listener;
use tokio::sync::Notify;
use volume::Volume;

use super::AttachSpec;
use crate::exit::{CliError, FAILED};

/// The requested front ends.
pub(super) struct FrontEnds {
    pub(super) vhost_user: Option<PathBuf>,
    pub(super) nbd: Option<PathBuf>,
    pub(super) ublk: Option<ublk::Options>,
    pub(super) fuse: Option<PathBuf>,
}

impl FrontEnds {
    /// Whether a killed predecessor has left its socket, or a mounted file system that no process
    /// serves.
    pub(super) async fn has_leftovers(&self, core: &Core, volume: &str) -> bool {
        let exists = |path: &Option<PathBuf>| path.as_ref().is_some_and(|path| path.exists());
        if exists(&self.vhost_user) || exists(&self.nbd) {
            return true;
        }
        match &self.fuse {
            Some(path) => fuse::is_stale(core, path, volume).await,
            None => false,
        }
    }
}

/// Checks for the ublk driver, and for a device left by a predecessor.
pub(super) async fn open_block_device(
    core: &Core,
    options: &ublk::Options,
) -> Result<ublk::DeviceControl, CliError> {
    let opened = ublk::DeviceControl::open(core, options.clone()).await;
    opened.map_err(|e| {
        let hint = match e {
            ublk::ServeError::NoDriver => Some("modprobe ublk_drv"),
            ublk::ServeError::OtherDevice { .. } => {
                Some("omit --device-id to continue with the existing device")
            }
            _ => None,
        };
        let failure = CliError::new(FAILED, e.to_string());
        match hint {
            Some(hint) => failure.with_hint(hint),
            None => failure,
        }
    })
}

/// The open front ends.
#[derive(Default)]
pub(super) struct OpenFrontEnds {
    vhost_user: Option<(vhost_user::Server, Listener)>,
    nbd: Option<nbd::Server>,
    fuse: Option<fuse::Server>,
    ublk: Option<ublk::UblkServer>,
    /// Whether a killed predecessor's leftovers may have been replaced.
    may_have_replaced_leftovers: bool,
}

impl OpenFrontEnds {
    /// Opens the requested front ends except the block device.
    pub(super) async fn open(
        &mut self,
        core: &Core,
        spec: &AttachSpec,
        (volume, outage): (&Rc<Volume>, &OutageSignal),
    ) -> Result<(), CliError> {
        if let Some(path) = &spec.front_ends.vhost_user {
            let listener = listen(core, path).await?;
            self.may_have_replaced_leftovers = true;
            self.vhost_user = Some((new_vhost_user(core, spec, (volume, outage)), listener));
        }
        if let Some(path) = &spec.front_ends.nbd {
            self.nbd = Some(open_nbd(core, spec, path, (volume, outage)).await?);
            self.may_have_replaced_leftovers = true;
        }
        if let Some(path) = &spec.front_ends.fuse {
            // Mounting first removes a stale mount, so set this before it can fail.
            self.may_have_replaced_leftovers = true;
            self.fuse = Some(mount_fuse(core, spec, path, (volume, outage)).await?);
        }
        Ok(())
    }

    /// Creates the block device, or takes over the one left by a predecessor.
    pub(super) async fn start_block_device(
        &mut self,
        spec: &AttachSpec,
        (volume, outage): (&Rc<Volume>, &OutageSignal),
        control: Option<ublk::DeviceControl>,
    ) -> Result<(), CliError> {
        if let Some(device) = control {
            self.ublk = Some(device.attach(volume, outage).await.map_err(failed)?);
        }
        let device = self.ublk.as_ref().map(ublk::UblkServer::device);
        let FrontEnds { vhost_user, nbd, fuse, .. } = &spec.front_ends;
        tracing::info!(volume = %spec.name, ?vhost_user, ?nbd, ?fuse, ?device, "serving the volume as a device of this machine");
        Ok(())
    }

    /// Whether a killed predecessor's leftovers may be gone.
    pub(super) fn may_have_replaced_leftovers(&self) -> bool {
        self.may_have_replaced_leftovers
    }

    /// Whether the mount replaced one left by a killed predecessor.
    pub(super) fn has_replaced_mount(&self) -> bool {
        self.fuse.as_ref().is_some_and(fuse::Server::replaced_stale)
    }

    /// Serves all of them until `stop`, or until the volume is out of reach. Returns whether a
    /// block device remains.
    pub(super) async fn serve(
        self,
        stop: impl Future<Output = ()> + Clone,
    ) -> Result<bool, CliError> {
        let unmounted = Notify::new();
        let stop = async {
            tokio::select! {
                () = stop => {}
                // The user unmounted the file system: stop the other front ends too.
                () = unmounted.notified() => {}
            }
        };
        let stop = stop.shared();
        let vhost_user = async {
            if let Some((server, listener)) = &self.vhost_user {
                server.serve(listener, stop.clone()).await;
            }
        };
        let nbd = async {
            if let Some(server) = self.nbd {
                server.run(stop.clone()).await;
            }
        };
        let fuse = async {
            if let Some(server) = self.fuse
                && server.run(stop.clone()).await == fuse::ServeEnd::Unmounted
            {
                unmounted.notify_one();
            }
        };
        let ublk = async {
            match self.ublk {
                Some(serving) => serve_block(serving, stop.clone()).await,
                None => Ok(false),
            }
        };
        let ((), (), (), remains) = tokio::join!(vhost_user, nbd, fuse, ublk);
        remains
    }
}

/// Serves the block device. Returns whether it remains afterwards.
async fn serve_block(
    serving: ublk::UblkServer,
    stop: impl Future<Output = ()> + Clone,
) -> Result<bool, CliError> {
    let device = serving.device();
    let ublk::ServeEnd::LeftForRecovery { user } = serving.run(stop).await.map_err(failed)? else {
        return Ok(false);
    };
    if let Some(user) = user {
        tracing::warn!(%device, %user, "block device in use; keeping it for the next process");
    }
    Ok(true)
}

fn failed<E: std::error::Error>(error: E) -> CliError {
    CliError::new(FAILED, error.to_string())
}

/// Opens an NBD export.
async fn open_nbd(
    core: &Core,
    spec: &AttachSpec,
    at: &Path,
    (volume, outage): (&Rc<Volume>, &OutageSignal),
) -> Result<nbd::Server, CliError> {
    let at = nbd::Address::Unix(at.to_owned());
    let options =
        nbd::Options { read_only: spec.read_only, ..nbd::Options::new(spec.name.as_str()) };
    let server = nbd::Server::bind(core, volume, &at, options).await.map_err(failed)?;
    Ok(server.with_outage_signal(outage))
}

/// Mounts the volume as a file.
async fn mount_fuse(
    core: &Core,
    spec: &AttachSpec,
    path: &Path,
    (volume, outage): (&Rc<Volume>, &OutageSignal),
) -> Result<fuse::Server, CliError> {
    let AttachSpec { name, mode, read_only, .. } = spec;
    let options =
        fuse::Options { name: name.as_str().to_owned(), mode: *mode, read_only: *read_only };
    let server = fuse::Server::mount(core, volume, path, options).await;
    let server = server.map_err(failed)?;
    Ok(server.with_outage_signal(outage))
}

fn new_vhost_user(
    core: &Core,
    spec: &AttachSpec,
    (volume, outage): (&Rc<Volume>, &OutageSignal),
) -> vhost_user::Server {
    let AttachSpec { queues, read_only, serial, .. } = spec;
    let options =
        vhost_user::Options { queues: *queues, read_only: *read_only, serial: serial.clone() };
    let policy = vhost_user::OutagePolicy::LeaveUnanswered(outage.clone());
    vhost_user::Server::new(core, Rc::clone(volume), policy, &options)
}

async fn listen(core: &Core, path: &Path) -> Result<Listener, CliError> {
    let listening = core.listen_unix(path).await;
    listening.map_err(|e| CliError::new(FAILED, format!("{}: {e}", path.display())))
}
