//! Commands of the NVM command set (NVM Command Set 1.0, 3.2), translated.

use block::{Blocks, Bufs, Info, Lba, Request};

use super::Controller;
use crate::Status;
use crate::entry::{NSID_ALL, NvmOpcode, Sqe};

/// An I/O command, checked.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The namespace; `None` for a Flush of all.
    pub nsid: Option<u32>,
    /// Bytes that it brings.
    pub data_out: u32,
    io: Io,
}

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub enum Io {
    /// Read.
    Read(Blocks),
    /// Write.
    Write {
        /// First block.
        at: Lba,
        /// Force unit access.
        fua: bool,
    },
    /// Compare.
    Compare(Lba),
    /// Verify.
    Verify(Blocks),
    /// Write Zeroes.
    Zero {
        /// Which blocks.
        range: Blocks,
        /// They may be deallocated.
        unmap: bool,
        /// Force unit access.
        fua: bool,
    },
    /// Dataset Management; deallocate, or only a hint.
    Dataset {
        /// Whether anything is to be done.
        deallocate: bool,
        /// Length of the ranges in bytes; the data may be longer.
        bytes: u32,
    },
    /// Flush.
    Flush,
}

const FUA: u32 = 1 << 30;
const DEALLOCATE_ZEROES: u32 = 1 << 25;
const PROTECTION: u32 = 0xf << 26;
const DATASET_RANGE: u32 = 16;

/// Data of 256 ranges.
const MAX_DATASET: u32 = 256 * DATASET_RANGE;

impl Controller {
    /// Checks an I/O command before any memory is taken for it.
    ///
    /// # Errors
    /// The status it fails with.
    pub fn plan(&self, sqe: &Sqe) -> Result<Plan, Status> {
        let opcode = NvmOpcode(sqe.opcode);
        if sqe.fabrics().is_some() {
            return Err(Status::INVALID_OPCODE.do_not_retry());
        }
        if sqe.is_fused() {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        let nsid = sqe.nsid.get();
        if opcode == NvmOpcode::Flush && nsid == NSID_ALL {
            return Ok(Plan { nsid: None, data_out: 0, io: Io::Flush });
        }
        let namespace = self.subsystem.namespaces.get(&nsid);
        let info = namespace.ok_or(Status::INVALID_NAMESPACE.do_not_retry())?.info;
        let (io, data_out) = translate(opcode, sqe, &info).map_err(Status::do_not_retry)?;
        Ok(Plan { nsid: Some(nsid), data_out, io })
    }
}

fn translate(opcode: NvmOpcode, sqe: &Sqe, info: &Info) -> Result<(Io, u32), Status> {
    let dw12 = sqe.cdw(2);
    let range = Blocks::new(Lba(sqe.slba()), u64::from(dw12 & 0xffff) + 1);
    let inside = || match range.end() {
        Some(end) if end <= info.blocks => Ok(()),
        _ => Err(Status::LBA_OUT_OF_RANGE),
    };
    let moved = || {
        if range.count > u64::from(info.max_transfer_blocks) || dw12 & PROTECTION != 0 {
            return Err(Status::INVALID_FIELD);
        }
        inside()?;
        u32::try_from(range.count * u64::from(info.block_size)).map_err(|_| Status::INVALID_FIELD)
    };
    let writable = || if info.read_only { Err(Status::WRITE_PROTECTED) } else { Ok(()) };
    let fua = dw12 & FUA != 0;
    match opcode {
        NvmOpcode::Read => moved().map(|_| (Io::Read(range), 0)),
        NvmOpcode::Write => {
            writable()?;
            moved().map(|bytes| (Io::Write { at: range.at, fua }, bytes))
        }
        NvmOpcode::Compare => moved().map(|bytes| (Io::Compare(range.at), bytes)),
        NvmOpcode::Verify => inside().map(|()| (Io::Verify(range), 0)),
        NvmOpcode::WriteZeroes => {
            writable()?;
            inside()?;
            Ok((Io::Zero { range, unmap: dw12 & DEALLOCATE_ZEROES != 0, fua }, 0))
        }
        NvmOpcode::DatasetManagement => {
            let needed = ((sqe.cdw(0) & 0xff) + 1) * DATASET_RANGE;
            // Linux always sends room for 256 ranges, however few there are.
            let bytes = sqe.data_bytes();
            if bytes < needed || bytes > MAX_DATASET {
                return Err(Status::DATA_SGL_LENGTH_INVALID);
            }
            let deallocate = sqe.cdw(1) & 1 << 2 != 0;
            if deallocate {
                writable()?;
            }
            Ok((Io::Dataset { deallocate, bytes: needed }, bytes))
        }
        NvmOpcode::Flush => Ok((Io::Flush, 0)),
        _ => Err(Status::INVALID_OPCODE),
    }
}

impl Plan {
    /// The request to a volume; `None` when there is nothing to do.
    ///
    /// # Errors
    /// The status of a command whose data names blocks outside `info`.
    pub fn request(self, data: Bufs, info: &Info) -> Result<Option<Request>, Status> {
        Ok(Some(match self.io {
            Io::Read(range) => Request::Read { range },
            Io::Write { at, fua } => Request::Write { at, data, fua },
            Io::Compare(at) => Request::Compare { at, data },
            Io::Verify(range) => Request::Verify { range },
            Io::Zero { range, unmap, fua } => Request::Zero { range, unmap, fua },
            Io::Dataset { deallocate: false, .. } => return Ok(None),
            Io::Dataset { deallocate: true, bytes } => {
                let bytes = (bytes as usize).min(data.len());
                Request::Unmap { ranges: ranges(&data.slice(0..bytes), info)? }
            }
            Io::Flush => Request::Flush,
        }))
    }
}

/// The ranges of Dataset Management (NVM Command Set 1.0, figure 42).
fn ranges(data: &Bufs, info: &Info) -> Result<Vec<Blocks>, Status> {
    let bytes = data.to_vec();
    let mut out = Vec::with_capacity(bytes.len() / DATASET_RANGE as usize);
    for entry in bytes.chunks_exact(DATASET_RANGE as usize) {
        let [_, _, _, _, a, b, c, d, ref lba @ ..] = *entry else { continue };
        let Ok(lba) = <[u8; 8]>::try_from(lba) else { continue };
        let count = u64::from(u32::from_le_bytes([a, b, c, d]));
        let range = Blocks::new(Lba(u64::from_le_bytes(lba)), count);
        if range.end().is_none_or(|end| end > info.blocks) {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
        if count > 0 {
            out.push(range);
        }
    }
    Ok(out)
}
