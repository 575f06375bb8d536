//! Copy, carried out: ordinary reads and writes of the namespace's volume, in pieces (RFD 0019).

use std::rc::Rc;

use block::{Account, Blocks, Bufs, Error, Failure, Lba, Request};
use nvme::{Controller, CopyWork};
use scsi::CopyExtent;
use volume::Caller;

use crate::copying::{Stopped, heeded, parts, steps};
use crate::server::{Served, Server};

/// A copy was given up.
pub(super) const ABORTED: Failure = Failure::Device(Error::Aborted);

/// What is copied, and on whose behalf.
pub(super) struct End {
    pub(super) server: Rc<Server>,
    pub(super) served: Rc<Served>,
    pub(super) caller: Rc<Caller>,
    /// The controller through which the host has it, and as what.
    pub(super) cntlid: u16,
    pub(super) nsid: u32,
}

/// A running copy.
struct Copy {
    end: End,
    account: Account,
    fua: bool,
    stopped: Stopped,
}

/// Copies what `work` says within a volume. Ends soon after somebody asks for that; what it has begun
/// by then is done when this is.
///
/// # Errors
/// The number of the first source that is not copied as a whole, and why.
pub(super) async fn carry_out(
    end: End,
    work: CopyWork,
    stopped: Stopped,
) -> Result<(), (u64, Failure)> {
    let copies = end.server.copies();
    let turn = stopped.or(copies.acquire()).await;
    let Some(_turn) = turn else { return Err((0, ABORTED)) };
    let account = end.server.copying();
    let copy = Copy { end, account, fua: work.fua, stopped };
    let mut to = work.to;
    for (number, source) in (0..).zip(&work.sources) {
        copy.range(*source, to).await.map_err(|failure| (number, failure))?;
        to = Lba(to.0 + source.count);
    }
    Ok(())
}

impl Copy {
    async fn range(&self, source: Blocks, to: Lba) -> Result<(), Failure> {
        let info = self.end.served.volume.info();
        let bytes = source.count * u64::from(info.block_size);
        let extent = CopyExtent { from: source.at, to, bytes };
        let (first, step) = steps(&info, &info, to);
        let within = Some(info.block_size);
        let pieces = extent.pieces(first, step, within);
        let work = |piece| self.piece(&extent, u64::from(info.block_size), piece);
        let is_whole = self.stopped.each(pieces, !extent.overlaps(within), work).await?;
        if is_whole { Ok(()) } else { Err(ABORTED) }
    }

    /// Reads a piece, and writes it.
    async fn piece(
        &self,
        extent: &CopyExtent,
        block: u64,
        (at, len): (u64, u64),
    ) -> Result<(), Failure> {
        let range = Blocks::new(Lba(extent.from.0 + at / block), len / block);
        let data = self.request(Request::Read { range }).await?;
        let (unmap, fua) = (self.end.served.thin, self.fua);
        for (part, is_zero) in parts(&data, extent.to.0 * block + at) {
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

    /// Has the volume do `request`, if it is the host's still.
    async fn request(&self, request: Request) -> Result<Bufs, Failure> {
        let End { server, served, caller, cntlid, nsid } = &self.end;
        let uuid = |c: &mut Controller| c.namespaces().get(nsid).map(|ns| ns.uuid);
        if server.nvme.with(*cntlid, uuid).flatten() != Some(served.id.0) {
            return Err(Failure::Device(Error::Gone));
        }
        heeded(served, caller, request, &self.account, &self.stopped).await
    }
}
