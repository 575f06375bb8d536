//! Executes Copy: ordinary reads and writes of the namespace's volume, in chunks (RFD 0019).

use std::rc::Rc;

use block::{Account, Blocks, Bufs, Error, Lba, Request, RequestError};
use nvme::{Controller, CopyRequest};
use scsi::CopyRange;
use volume::VolumeClient;

use crate::served_volumes::ServedVolume;
use crate::server::Server;
use crate::third_party_copy::{CancelToken, chunk_sizes, split_zeroes, submit_cancellable};

/// The copy was aborted.
pub(super) const ABORTED: RequestError = RequestError::Device(Error::Aborted);

/// What to copy, and on whose behalf.
pub(super) struct CopyContext {
    pub(super) server: Rc<Server>,
    pub(super) served: Rc<ServedVolume>,
    pub(super) caller: Rc<VolumeClient>,
    /// The controller through which the host accesses the volume, and the caller.
    pub(super) cntlid: u16,
    pub(super) nsid: u32,
}

/// A running copy.
struct RunningCopy {
    context: CopyContext,
    account: Account,
    fua: bool,
    cancel: CancelToken,
}

/// Executes a Copy within a volume. Ends soon after an abort; requests started by then have ended
/// when this does.
///
/// # Errors
/// The number of the first source range that is not copied completely, and why.
pub(super) async fn run_copy(
    end: CopyContext,
    work: CopyRequest,
    stopped: CancelToken,
) -> Result<(), (u64, RequestError)> {
    let copies = end.server.copy_permits();
    let turn = stopped.run_until_cancelled(copies.acquire()).await;
    let Some(_turn) = turn else { return Err((0, ABORTED)) };
    let account = end.server.copy_account();
    let copy = RunningCopy { context: end, account, fua: work.fua, cancel: stopped };
    let mut to = work.to;
    for (number, source) in (0..).zip(&work.sources) {
        copy.range(*source, to).await.map_err(|failure| (number, failure))?;
        to = Lba(to.0 + source.count);
    }
    Ok(())
}

impl RunningCopy {
    async fn range(&self, source: Blocks, to: Lba) -> Result<(), RequestError> {
        let info = self.context.served.volume.info();
        let bytes = source.count * u64::from(info.block_size);
        let extent = CopyRange { from: source.at, to, bytes };
        let (first, step) = chunk_sizes(&info, &info, to);
        let within = Some(info.block_size);
        let pieces = extent.pieces(first, step, within);
        let work = |piece| self.copy_chunk(&extent, u64::from(info.block_size), piece);
        let is_whole = self.cancel.for_each(pieces, !extent.overlaps(within), work).await?;
        if is_whole { Ok(()) } else { Err(ABORTED) }
    }

    /// Reads a chunk, and writes it.
    async fn copy_chunk(
        &self,
        extent: &CopyRange,
        block: u64,
        (at, len): (u64, u64),
    ) -> Result<(), RequestError> {
        let range = Blocks::new(Lba(extent.from.0 + at / block), len / block);
        let data = self.request(Request::Read { range }).await?;
        let (unmap, fua) = (self.context.served.thin, self.fua);
        for (part, is_zero) in split_zeroes(&data, extent.to.0 * block + at) {
            let to = Lba(extent.to.0 + (at + part.start as u64) / block);
            let request = if is_zero {
                let range = Blocks::new(to, part.len() as u64 / block);
                Request::Zero { range, unmap, fua }
            } else {
                Request::Write { at: to, data: data.slice(part), fua }
            };
            self.request(request).await?;
        }
        Ok(())
    }

    /// Sends `request` to the volume, if the host may still access it.
    async fn request(&self, request: Request) -> Result<Bufs, RequestError> {
        let CopyContext { server, served, caller, cntlid, nsid } = &self.context;
        let uuid = |c: &mut Controller| c.namespaces().get(nsid).map(|ns| ns.uuid);
        if server.nvme.with_controller(*cntlid, uuid).flatten() != Some(served.id.0) {
            return Err(RequestError::Device(Error::Gone));
        }
        submit_cancellable(served, caller, request, &self.account, &self.cancel).await
    }
}
