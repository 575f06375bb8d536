//! Where consumers come to an attached volume.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use attach::{Absence, fuse, nbd, ublk, vhost_user};
use futures_util::FutureExt;
use rt::Core;
use rt::net::Listener;
use tokio::sync::Notify;
use volume::Volume;

use super::Order;
use crate::exit::{FAILED, Failure};

/// Which of them are asked for.
pub(super) struct Doors {
    pub(super) vhost_user: Option<PathBuf>,
    pub(super) nbd: Option<PathBuf>,
    pub(super) ublk: Option<ublk::Options>,
    pub(super) fuse: Option<PathBuf>,
}

impl Doors {
    /// Whether a process was here before and has been killed: its socket is still there, or its file system, which nobody
    /// serves.
    pub(super) async fn are_left(&self, core: &Core, volume: &str) -> bool {
        let is_left = |at: &Option<PathBuf>| at.as_ref().is_some_and(|at| at.exists());
        if is_left(&self.vhost_user) || is_left(&self.nbd) {
            return true;
        }
        match &self.fuse {
            Some(at) => fuse::is_left(core, at, volume).await,
            None => false,
        }
    }
}

/// Looks for the driver of block devices, and for one that was left.
pub(super) async fn block_device(
    core: &Core,
    options: &ublk::Options,
) -> Result<ublk::Door, Failure> {
    let opened = ublk::Door::open(core, options.clone()).await;
    opened.map_err(|e| {
        let hint = match e {
            ublk::ServeError::NoDriver => Some("modprobe ublk_drv"),
            ublk::ServeError::Elsewhere { .. } => Some("without --device-id it is gone on with"),
            _ => None,
        };
        let failure = Failure::new(FAILED, e.to_string());
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    })
}

/// Those that are open.
#[derive(Default)]
pub(super) struct Opened {
    guests: Option<(vhost_user::Server, Listener)>,
    tools: Option<nbd::Server>,
    file: Option<fuse::Server>,
    block: Option<ublk::Serving>,
    /// Whether what a killed process has left may have been replaced.
    touched: bool,
}

impl Opened {
    /// Opens what is asked for, but for a block device.
    pub(super) async fn open(
        &mut self,
        core: &Core,
        order: &Order,
        (volume, absence): (&Rc<Volume>, &Absence),
    ) -> Result<(), Failure> {
        if let Some(at) = &order.doors.vhost_user {
            let listener = listen(core, at).await?;
            self.touched = true;
            self.guests = Some((vhost(core, order, (volume, absence)), listener));
        }
        if let Some(at) = &order.doors.nbd {
            self.tools = Some(tools(core, order, at, (volume, absence)).await?);
            self.touched = true;
        }
        if let Some(at) = &order.doors.fuse {
            // What is there is taken away before anything is put in its place.
            self.touched = true;
            self.file = Some(file(core, order, at, (volume, absence)).await?);
        }
        Ok(())
    }

    /// Makes the block device, or goes on with it.
    pub(super) async fn begin(
        &mut self,
        order: &Order,
        (volume, absence): (&Rc<Volume>, &Absence),
        block: Option<ublk::Door>,
    ) -> Result<(), Failure> {
        if let Some(door) = block {
            self.block = Some(door.begin(volume, absence).await.map_err(failed)?);
        }
        let device = self.block.as_ref().map(ublk::Serving::device);
        let Doors { vhost_user, nbd, fuse, .. } = &order.doors;
        tracing::info!(volume = %order.name, ?vhost_user, ?nbd, ?fuse, ?device, "serving the volume as a device of this machine");
        Ok(())
    }

    /// Whether what a killed process has left may be there no more.
    pub(super) fn has_touched(&self) -> bool {
        self.touched
    }

    /// Whether the file is in the place of one that a killed process had left.
    pub(super) fn has_replaced(&self) -> bool {
        self.file.as_ref().is_some_and(fuse::Server::has_replaced)
    }

    /// Serves at all of them until `stop`, or until the volume is out of reach. Whether there still is a block device then.
    pub(super) async fn serve(
        self,
        stop: impl Future<Output = ()> + Clone,
    ) -> Result<bool, Failure> {
        let unmounted = Notify::new();
        let stop = async {
            tokio::select! {
                () = stop => {}
                // Whoever has done that wants no more of it.
                () = unmounted.notified() => {}
            }
        };
        let stop = stop.shared();
        let guests = async {
            if let Some((server, listener)) = &self.guests {
                server.serve(listener, stop.clone()).await;
            }
        };
        let tools = async {
            if let Some(server) = self.tools {
                server.run(stop.clone()).await;
            }
        };
        let file = async {
            if let Some(server) = self.file
                && server.run(stop.clone()).await == fuse::End::Unmounted
            {
                unmounted.notify_one();
            }
        };
        let block = async {
            match self.block {
                Some(serving) => serve_block(serving, stop.clone()).await,
                None => Ok(false),
            }
        };
        let ((), (), (), is_left) = tokio::join!(guests, tools, file, block);
        is_left
    }
}

/// Whether the block device is still there at the end.
async fn serve_block(
    serving: ublk::Serving,
    stop: impl Future<Output = ()> + Clone,
) -> Result<bool, Failure> {
    let device = serving.device();
    let ublk::End::Left { user } = serving.run(stop).await.map_err(failed)? else {
        return Ok(false);
    };
    if let Some(user) = user {
        tracing::warn!(%device, %user, "the block device is in use, and stays: it waits for the next process");
    }
    Ok(true)
}

fn failed<E: std::error::Error>(error: E) -> Failure {
    Failure::new(FAILED, error.to_string())
}

/// An export for NBD's tools.
async fn tools(
    core: &Core,
    order: &Order,
    at: &Path,
    (volume, absence): (&Rc<Volume>, &Absence),
) -> Result<nbd::Server, Failure> {
    let at = nbd::Address::Unix(at.to_owned());
    let options =
        nbd::Options { read_only: order.read_only, ..nbd::Options::new(order.name.as_str()) };
    let server = nbd::Server::bind(core, volume, &at, options).await.map_err(failed)?;
    Ok(server.with_absence(absence))
}

/// Shows the volume as a file.
async fn file(
    core: &Core,
    order: &Order,
    at: &Path,
    (volume, absence): (&Rc<Volume>, &Absence),
) -> Result<fuse::Server, Failure> {
    let Order { name, mode, read_only, .. } = order;
    let options =
        fuse::Options { name: name.as_str().to_owned(), mode: *mode, read_only: *read_only };
    let server = fuse::Server::mount(core, volume, at, options).await;
    let server = server.map_err(failed)?;
    Ok(server.with_absence(absence))
}

fn vhost(
    core: &Core,
    order: &Order,
    (volume, absence): (&Rc<Volume>, &Absence),
) -> vhost_user::Server {
    let Order { rings, read_only, serial, .. } = order;
    let options =
        vhost_user::Options { rings: *rings, read_only: *read_only, serial: serial.clone() };
    let outage = vhost_user::Outage::Left(absence.clone());
    vhost_user::Server::new(core, Rc::clone(volume), outage, &options)
}

async fn listen(core: &Core, at: &Path) -> Result<Listener, Failure> {
    let listening = core.listen_unix(at).await;
    listening.map_err(|e| Failure::new(FAILED, format!("{}: {e}", at.display())))
}
