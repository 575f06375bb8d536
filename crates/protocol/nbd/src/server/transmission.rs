//! Requests and their answers ("Transmission", "Request types").

use block::Bufs;
use zerocopy::{FromBytes, IntoBytes};

use super::handshake::CONTEXT_ID;
use super::requests::PendingRequest;
use super::{Action, Answer, CloseReason, Command, Connection, Expecting, Phase};
use crate::message::{
    CHUNK_DONE, CHUNK_MAGIC, Chunk, ChunkType, Cmd, Descriptor, Errno, REQUEST_MAGIC, Request,
    SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO, SimpleReply, command_flag,
};
use crate::{BlockStatusExtent, Export, Tag};

/// Most data of one request, even if an export allows more.
const MAX_PAYLOAD_BYTES: u32 = 1 << 30;

impl Connection {
    pub(super) fn request(&mut self) {
        let Phase::Transmission(index) = self.phase else { return };
        let Ok((request, _)) = Request::read_from_prefix(&self.header) else { return };
        if request.magic.get() != REQUEST_MAGIC {
            return self.finish(CloseReason::Violation("a request without its magic"));
        }
        let kind = Cmd(request.kind.get());
        if kind == Cmd::Disc {
            self.close_reason.get_or_insert(CloseReason::Disconnected);
            self.phase = Phase::Draining;
            return;
        }
        let flags = request.flags.get();
        let taken = PendingRequest {
            kind,
            cookie: request.cookie.get(),
            at: request.offset.get(),
            len: request.length.get(),
            fua: flags & command_flag::FUA != 0,
            one: flags & command_flag::REQ_ONE != 0,
        };
        let verdict = if self.shutting_down {
            Err(Errno::Shutdown)
        } else {
            self.check_request(&self.config.exports[index], &taken, flags)
        };
        let (len, tag) = (taken.len, self.requests.insert(taken));
        match (verdict, kind) {
            (Err(error), Cmd::Write) if len > 0 => {
                self.receive = Expecting::Skip { tag, remaining: len, error };
            }
            (Err(error), _) => self.answer(tag, Answer::Failed(error)),
            // "The behavior is unspecified although the server SHOULD NOT disconnect."
            (Ok(()), Cmd::Read) if len == 0 => self.answer(tag, Answer::Data(Bufs::new())),
            (Ok(()), Cmd::Write | Cmd::Trim | Cmd::WriteZeroes) if len == 0 => {
                self.answer(tag, Answer::Done);
            }
            (Ok(()), Cmd::Write) => {
                self.receive = Expecting::Memory { tag };
                self.actions.push_back(Action::Grant { tag, bytes: len });
            }
            (Ok(()), _) => self.run(tag, index, taken, flags),
        }
    }

    /// Checks whether a request may be executed ("Error values", and the section of each command).
    fn check_request(
        &self,
        export: &Export,
        taken: &PendingRequest,
        flags: u16,
    ) -> Result<(), Errno> {
        use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, REQ_ONE};
        let (kind, len) = (taken.kind, taken.len);
        let known = match kind {
            Cmd::Read if self.structured => DF,
            Cmd::WriteZeroes => NO_HOLE | FAST_ZERO,
            Cmd::BlockStatus => REQ_ONE,
            _ => 0,
        };
        ensure(flags & !(FUA | known) == 0, Errno::Inval)?;
        let changes = matches!(kind, Cmd::Write | Cmd::Trim | Cmd::WriteZeroes);
        ensure(!(changes && export.read_only), Errno::Perm)?;
        match kind {
            Cmd::Flush => return ensure(taken.at == 0 && len == 0, Errno::Inval),
            Cmd::Trim => ensure(export.can_trim, Errno::Inval)?,
            Cmd::BlockStatus => ensure(self.context.is_some() && len > 0, Errno::Inval)?,
            Cmd::Read | Cmd::Write | Cmd::WriteZeroes => {}
            // Includes NBD_CMD_CACHE, which is not advertised.
            _ => return Err(Errno::Inval),
        }
        let inside = taken.at.checked_add(len.into()).is_some_and(|end| end <= export.bytes);
        let beyond = matches!(kind, Cmd::Write | Cmd::WriteZeroes);
        ensure(inside, if beyond { Errno::NoSpc } else { Errno::Inval })?;
        ensure(is_aligned(taken, export.size_constraints.minimum), Errno::Inval)?;
        let short = len <= export.size_constraints.payload.min(MAX_PAYLOAD_BYTES);
        match kind {
            Cmd::Read if self.structured => ensure(short, Errno::Overflow),
            Cmd::Read | Cmd::Write => ensure(short, Errno::Inval),
            Cmd::WriteZeroes if flags & FAST_ZERO != 0 => {
                let fits = |granule: u32| flags & NO_HOLE == 0 && is_aligned(taken, granule);
                ensure(export.fast_zero_bytes.is_some_and(fits), Errno::NotSup)
            }
            _ => Ok(()),
        }
    }

    fn run(&mut self, tag: Tag, export: usize, taken: PendingRequest, flags: u16) {
        let PendingRequest { at, len, fua, one, .. } = taken;
        let command = match taken.kind {
            Cmd::Read => Command::Read { at, len },
            Cmd::Flush => Command::Flush,
            Cmd::Trim => Command::Trim { at, len, fua },
            Cmd::WriteZeroes => {
                let hole = flags & command_flag::NO_HOLE == 0;
                Command::WriteZeroes { at, len, hole, fua }
            }
            Cmd::BlockStatus => Command::BlockStatus { at, len, one },
            _ => return self.answer(tag, Answer::Failed(Errno::Inval)),
        };
        self.actions.push_back(Action::Run { tag, export, command });
    }

    /// Handles the received data of a write.
    pub(super) fn payload(&mut self, tag: Tag, data: Bufs) {
        let (Phase::Transmission(export), Some(taken)) = (self.phase, self.requests.get(tag))
        else {
            return;
        };
        let command = Command::Write { at: taken.at, data, fua: taken.fua };
        self.actions.push_back(Action::Run { tag, export, command });
    }

    /// Answers a request. Ignored after the connection has ended.
    pub fn answer(&mut self, tag: Tag, answer: Answer) {
        let Some(taken) = self.requests.remove(tag) else { return };
        if self.phase == Phase::Closed {
            return;
        }
        let cookie = taken.cookie;
        match (taken.kind, answer) {
            (_, Answer::Failed(error)) => self.fail(cookie, error),
            (Cmd::Read, Answer::Data(data)) if data.len() == taken.len as usize => {
                self.data(&taken, &data);
            }
            (Cmd::BlockStatus, Answer::Extents(extents)) => self.extents(&taken, &extents),
            // The driver's answer does not fit: report an error.
            (Cmd::Read | Cmd::BlockStatus, _) => self.fail(cookie, Errno::Io),
            (_, _) => self.simple(cookie, 0),
        }
        self.close_if_shut_down();
    }

    fn data(&mut self, taken: &PendingRequest, data: &Bufs) {
        if !self.structured {
            self.simple(taken.cookie, 0);
        } else if data.is_empty() {
            self.chunk(taken.cookie, ChunkType::None, 0);
        } else {
            self.chunk(taken.cookie, ChunkType::OffsetData, 8 + data.len());
            self.out.push_bytes(&taken.at.to_be_bytes());
        }
        self.out.push_data(data);
    }

    fn extents(&mut self, taken: &PendingRequest, extents: &[BlockStatusExtent]) {
        let mut left = taken.len;
        let mut descriptors = Vec::new();
        for extent in extents.iter().take(if taken.one { 1 } else { usize::MAX }) {
            let length = extent.bytes.min(left);
            if length == 0 {
                break;
            }
            left -= length;
            let hole = if extent.hole { STATE_HOLE } else { 0 };
            let zero = if extent.zero { STATE_ZERO } else { 0 };
            descriptors.push(Descriptor { length: length.into(), status: (hole | zero).into() });
        }
        if descriptors.is_empty() {
            return self.fail(taken.cookie, Errno::Io);
        }
        let bytes = descriptors.as_bytes();
        self.chunk(taken.cookie, ChunkType::BlockStatus, 4 + bytes.len());
        self.out.push_bytes(&CONTEXT_ID.to_be_bytes());
        self.out.push_bytes(bytes);
    }

    fn fail(&mut self, cookie: u64, error: Errno) {
        if !self.structured {
            return self.simple(cookie, error.0);
        }
        let message = error.message().as_bytes();
        let length = u16::try_from(message.len()).expect("messages are short");
        self.chunk(cookie, ChunkType::Error, 6 + message.len());
        self.out.push_bytes(&error.0.to_be_bytes());
        self.out.push_bytes(&length.to_be_bytes());
        self.out.push_bytes(message);
    }

    fn simple(&mut self, cookie: u64, error: u32) {
        let magic = SIMPLE_REPLY_MAGIC.into();
        let reply = SimpleReply { magic, error: error.into(), cookie: cookie.into() };
        self.out.push_bytes(reply.as_bytes());
    }

    /// Sends the header of the only chunk of a reply, with `length` bytes of payload to follow.
    fn chunk(&mut self, cookie: u64, kind: ChunkType, length: usize) {
        let length = u32::try_from(length).expect("payloads are at most 1 GiB");
        let chunk = Chunk {
            magic: CHUNK_MAGIC.into(),
            flags: CHUNK_DONE.into(),
            kind: kind.0.into(),
            cookie: cookie.into(),
            length: length.into(),
        };
        self.out.push_bytes(chunk.as_bytes());
    }
}

fn ensure(fine: bool, otherwise: Errno) -> Result<(), Errno> {
    if fine { Ok(()) } else { Err(otherwise) }
}

fn is_aligned(taken: &PendingRequest, granule: u32) -> bool {
    taken.at.is_multiple_of(granule.into()) && taken.len.is_multiple_of(granule)
}
