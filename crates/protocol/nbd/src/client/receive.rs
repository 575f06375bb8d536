//! Replies ("Simple reply message", "Structured reply types").

use zerocopy::FromBytes;

use super::commands::BufferPosition;
use super::{CloseReason, CommandError, CompletedCommand, Connection, Phase, Reply};
use crate::message::{
    CHUNK_DONE, CHUNK_ERROR, CHUNK_MAGIC, Chunk, ChunkType, Cmd, Errno, Fields, Greeting,
    InfoExport, OptionReply, Rep, SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO, SimpleReply,
};
use crate::{BlockStatusExtent, Tag};

/// Longest fixed-length header, in bytes.
pub(super) const LONGEST_HEADER: usize = 20;
const _: () = assert!(LONGEST_HEADER == size_of::<OptionReply>());
const _: () = assert!(LONGEST_HEADER == size_of::<Chunk>());

/// Longest error chunk, in bytes: its message has at most 4096, and newer ones may have more
/// fields.
const MAX_ERROR_BYTES: u32 = 8 << 10;

/// What the next bytes are.
#[derive(Debug)]
pub(super) enum Expecting {
    Greeting,
    OptionReply,
    ExportName,
    /// Zeroes after the answer to `NBD_OPT_EXPORT_NAME`.
    Padding {
        remaining: usize,
    },
    Reply,
    /// The offset before the data of a chunk of `length` bytes.
    Offset {
        tag: Tag,
        length: u32,
        done: bool,
    },
    /// Data of a read.
    Data {
        tag: Tag,
        position: BufferPosition,
        remaining: u32,
        done: bool,
    },
    /// A short message.
    Small {
        kind: ShortMessage,
        data: Vec<u8>,
    },
}

/// Kind of a short message.
#[derive(Clone, Copy, Debug)]
pub(super) enum ShortMessage {
    /// The data of a reply to an option.
    Reply { kind: Rep },
    /// The payload of a chunk.
    Chunk { tag: Tag, kind: ChunkType, done: bool },
}

impl Expecting {
    /// Length of the expected header as far as known: the magic decides the length of a reply.
    pub(super) fn header_bytes(&self, header: &[u8], filled: usize) -> usize {
        match self {
            Self::Greeting => size_of::<Greeting>(),
            Self::OptionReply => size_of::<OptionReply>(),
            Self::ExportName => size_of::<InfoExport>(),
            Self::Offset { .. } => 8,
            Self::Reply if filled < 4 => 4,
            Self::Reply => match magic(header) {
                SIMPLE_REPLY_MAGIC => size_of::<SimpleReply>(),
                CHUNK_MAGIC => size_of::<Chunk>(),
                _ => 4,
            },
            Self::Padding { .. } | Self::Data { .. } | Self::Small { .. } => 0,
        }
    }
}

fn magic(header: &[u8]) -> u32 {
    Fields(header).u32().unwrap_or_default()
}

impl Connection {
    /// Handles the expected bytes, now complete.
    pub(super) fn advance(&mut self) {
        match std::mem::replace(&mut self.receive, Expecting::Reply) {
            Expecting::Greeting => self.greeting(),
            Expecting::OptionReply => self.option_reply(),
            Expecting::ExportName => self.export_name(),
            Expecting::Padding { .. } => {}
            Expecting::Reply => match magic(&self.header) {
                SIMPLE_REPLY_MAGIC => self.simple(),
                CHUNK_MAGIC => self.chunk(),
                _ => self.violation("a reply without its magic"),
            },
            Expecting::Offset { tag, length, done } => self.offset(tag, length, done),
            Expecting::Data { tag, done, .. } => self.content(tag, done),
            Expecting::Small { kind: ShortMessage::Reply { kind }, data } => {
                self.on_option_reply(kind, &data);
            }
            Expecting::Small { kind: ShortMessage::Chunk { tag, kind, done }, data } => {
                self.small(tag, kind, done, &data);
            }
        }
    }

    fn simple(&mut self) {
        let Ok((reply, _)) = SimpleReply::read_from_prefix(&self.header) else { return };
        let Some(tag) = self.commands.find(reply.cookie.get()) else {
            return self.violation("a reply to no request");
        };
        let structured = self.negotiated.is_some_and(|a| a.structured);
        let Some(command) = self.commands.get_mut(tag) else { return };
        if (structured && command.kind == Cmd::Read) || command.begun {
            return self.violation("a simple reply instead of a structured one");
        }
        let error = reply.error.get();
        if error != 0 {
            return self.complete(tag, Err(Errno(error)));
        }
        match command.kind {
            Cmd::Read => {
                let (left, place) = (command.len, command.position_of(0));
                command.received.add(0, left);
                if left == 0 {
                    return self.complete(tag, Ok(()));
                }
                self.receive =
                    Expecting::Data { tag, position: place, remaining: left, done: true };
            }
            Cmd::BlockStatus => self.violation("a block status without descriptors"),
            _ => self.complete(tag, Ok(())),
        }
    }

    fn chunk(&mut self) {
        let Ok((chunk, _)) = Chunk::read_from_prefix(&self.header) else { return };
        if !self.negotiated.is_some_and(|a| a.structured) {
            return self.violation("a structured reply that was not negotiated");
        }
        let Some(tag) = self.commands.find(chunk.cookie.get()) else {
            return self.violation("a chunk of a reply to no request");
        };
        let Some(command) = self.commands.get_mut(tag) else { return };
        command.begun = true;
        let (kind, length) = (ChunkType(chunk.kind.get()), chunk.length.get());
        let done = chunk.flags.get() & CHUNK_DONE != 0;
        let small = |length: u32| Expecting::Small {
            kind: ShortMessage::Chunk { tag, kind, done },
            data: vec![0; length as usize],
        };
        match (kind, command.kind) {
            (ChunkType::None, _) if length == 0 && done => self.complete(tag, Ok(())),
            (ChunkType::OffsetData, Cmd::Read) if length > 8 => {
                self.receive = Expecting::Offset { tag, length: length - 8, done };
            }
            (ChunkType::OffsetHole, Cmd::Read) if length == 12 => self.receive = small(length),
            // The context ID and one descriptor, as requested.
            (ChunkType::BlockStatus, Cmd::BlockStatus) if length == 12 => {
                self.receive = small(length);
            }
            (ChunkType(kind), _)
                if kind & CHUNK_ERROR != 0 && (6..=MAX_ERROR_BYTES).contains(&length) =>
            {
                self.receive = small(length);
            }
            _ => self.violation("a chunk that does not fit its request"),
        }
    }

    /// Records that a part of a read arrives; `None` if it must not.
    fn record_received(&mut self, tag: Tag, offset: u64, length: u32) -> Option<u32> {
        let command = self.commands.get_mut(tag)?;
        let start = offset.checked_sub(command.at).and_then(|p| u32::try_from(p).ok())?;
        let end = start.checked_add(length).filter(|end| *end <= command.len)?;
        command.received.add(start, end).then_some(start)
    }

    fn offset(&mut self, tag: Tag, length: u32, done: bool) {
        let offset = Fields(&self.header).u64().unwrap_or_default();
        let Some(position) = self.record_received(tag, offset, length) else {
            return self.violation("data outside of its read, or twice");
        };
        let Some(command) = self.commands.get_mut(tag) else { return };
        let place = command.position_of(position);
        self.receive = Expecting::Data { tag, position: place, remaining: length, done };
    }

    /// Handles a received part of a read.
    fn content(&mut self, tag: Tag, done: bool) {
        if done {
            self.complete(tag, Ok(()));
        }
    }

    fn small(&mut self, tag: Tag, kind: ChunkType, done: bool, data: &[u8]) {
        let mut fields = Fields(data);
        let fits = match kind {
            ChunkType::OffsetHole => self.hole(tag, &mut fields),
            ChunkType::BlockStatus => self.status(tag, &mut fields),
            _ => self.error(tag, kind, &mut fields),
        };
        match fits {
            None => self.violation("a chunk that contradicts its request"),
            Some(()) => self.content(tag, done),
        }
    }

    fn hole(&mut self, tag: Tag, fields: &mut Fields<'_>) -> Option<()> {
        let (offset, length) = (fields.u64()?, fields.u32().filter(|n| *n > 0)?);
        let position = self.record_received(tag, offset, length)?;
        self.commands.get_mut(tag)?.zero(position, length);
        Some(())
    }

    fn status(&mut self, tag: Tag, fields: &mut Fields<'_>) -> Option<()> {
        let (context, bytes, status) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let expected = self.handshake.context;
        let command = self.commands.get_mut(tag)?;
        if Some(context) != expected
            || !(1..=command.len).contains(&bytes)
            || command.extent.is_some()
        {
            return None;
        }
        let (hole, zero) = (status & STATE_HOLE != 0, status & STATE_ZERO != 0);
        command.extent = Some(BlockStatusExtent { bytes, hole, zero });
        Some(())
    }

    fn error(&mut self, tag: Tag, kind: ChunkType, fields: &mut Fields<'_>) -> Option<()> {
        let (error, length) = (fields.u32().filter(|e| *e != 0)?, fields.u16()?);
        fields.take(length.into())?;
        let command = self.commands.get_mut(tag)?;
        if kind == ChunkType::ErrorOffset {
            let offset = fields.u64()?;
            let end = command.at.saturating_add(command.len.into());
            let inside = (command.at..end).contains(&offset);
            if !inside || matches!(command.kind, Cmd::Flush) {
                return None;
            }
        }
        command.error.get_or_insert(Errno(error));
        Some(())
    }

    /// Completes a command.
    fn complete(&mut self, tag: Tag, simply: Result<(), Errno>) {
        let Some(command) = self.commands.remove(tag) else { return };
        let error = command.error.or(simply.err());
        let outcome = match (error, command.kind) {
            (Some(error), _) => Err(CommandError::Error(error)),
            (None, Cmd::Read) if command.received.is_whole(command.len) => {
                Ok(Reply::Data(command.buffers))
            }
            (None, Cmd::BlockStatus) if command.extent.is_some() => {
                Ok(command.extent.map_or(Reply::Done, Reply::Extent))
            }
            (None, Cmd::Read | Cmd::BlockStatus) => {
                self.completed.push_back(CompletedCommand {
                    tag,
                    outcome: Err(CommandError::ConnectionLost),
                });
                return self.violation("a success without all of its data");
            }
            (None, _) => Ok(Reply::Done),
        };
        self.completed.push_back(CompletedCommand { tag, outcome });
        if error == Some(Errno::Shutdown) && self.phase == Phase::Transmission {
            // "It MUST initiate a soft disconnect."
            self.soft_disconnect(CloseReason::ServerShutDown);
        }
    }
}
