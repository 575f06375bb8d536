//! The client's handshake

use zerocopy::{FromBytes, IntoBytes};

use super::receive::Expecting;
use super::{CloseReason, Connection, NegotiatedExport, Phase};
use crate::message::{
    BASE_ALLOCATION, EXPORT_NAME_PADDING, FIXED_NEWSTYLE, Fields, Greeting, Info, InfoBlockSize,
    InfoExport, MAGIC, NO_ZEROES, OPTION_MAGIC, Opt, OptionHeader, OptionReply, REPLY_MAGIC, Rep,
    flag, string,
};
use crate::{SizeConstraints, TransmissionFlags};

/// Longest reply to an option, in bytes: more than any valid one.
pub(super) const MAX_REPLY_BYTES: u32 = 16 << 10;

/// Most replies to one option.
const MAX_REPLIES: u32 = 64;

/// State of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HandshakeStep {
    Greeting,
    /// Waits for the replies to this option.
    Option(Opt),
    ExportName,
}

/// What the server has reported so far.
#[derive(Debug, Default)]
pub(super) struct ServerInfo {
    no_zeroes: bool,
    structured: bool,
    /// Context ID of `base:allocation`.
    pub(super) context: Option<u32>,
    export_info: Option<(u64, TransmissionFlags)>,
    size_constraints: Option<SizeConstraints>,
    /// Number of replies to the current option.
    replies: u32,
}

impl Connection {
    pub(super) fn greeting(&mut self) {
        let Ok((greeting, _)) = Greeting::read_from_prefix(&self.header) else { return };
        if greeting.magic.get() != MAGIC {
            return self.violation("no NBD greeting");
        }
        if greeting.version.get() != OPTION_MAGIC {
            return self.hard_disconnect(CloseReason::Unsupported(
                "the server speaks oldstyle negotiation",
            ));
        }
        let flags = greeting.flags.get();
        if flags & FIXED_NEWSTYLE == 0 {
            return self.hard_disconnect(CloseReason::Unsupported(
                "the server does not speak fixed newstyle negotiation",
            ));
        }
        self.handshake.no_zeroes = flags & NO_ZEROES != 0;
        let ours = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
        self.out.push_bytes(&ours.to_be_bytes());
        if self.config.structured {
            self.send_option(Opt::StructuredReply, &[]);
        } else {
            self.send_go_option();
        }
    }

    fn send_option(&mut self, option: Opt, data: &[u8]) {
        let length = u32::try_from(data.len()).expect("names are short");
        let header = OptionHeader {
            magic: OPTION_MAGIC.into(),
            option: option.0.into(),
            length: length.into(),
        };
        self.out.push_bytes(header.as_bytes());
        self.out.push_bytes(data);
        self.handshake.replies = 0;
        let name = option == Opt::ExportName;
        self.phase = Phase::Handshake(if name {
            HandshakeStep::ExportName
        } else {
            HandshakeStep::Option(option)
        });
        self.receive = if name { Expecting::ExportName } else { Expecting::OptionReply };
    }

    fn send_export_name_option(&self) -> Vec<u8> {
        let name = self.config.export.as_bytes();
        let length = u32::try_from(name.len()).expect("names are short");
        [&length.to_be_bytes()[..], name].concat()
    }

    fn set_context(&mut self) {
        let query = BASE_ALLOCATION.as_bytes();
        let length = u32::try_from(query.len()).expect("it is short").to_be_bytes();
        let data =
            [&self.send_export_name_option()[..], &1u32.to_be_bytes(), &length, query].concat();
        self.send_option(Opt::SetMetaContext, &data);
    }

    fn send_go_option(&mut self) {
        let wanted = [1u16.to_be_bytes(), Info::BlockSize.0.to_be_bytes()].concat();
        let data = [&self.send_export_name_option()[..], &wanted].concat();
        self.send_option(Opt::Go, &data);
    }

    /// Handles the header of a reply.
    pub(super) fn option_reply(&mut self) {
        let Phase::Handshake(HandshakeStep::Option(option)) = self.phase else { return };
        let Ok((reply, _)) = OptionReply::read_from_prefix(&self.header) else { return };
        let (kind, length) = (Rep(reply.kind.get()), reply.length.get());
        if reply.magic.get() != REPLY_MAGIC || reply.option.get() != option.0 {
            return self.violation("a reply to another option, or none");
        }
        self.handshake.replies += 1;
        if length > MAX_REPLY_BYTES || self.handshake.replies > MAX_REPLIES {
            return self.violation("too many replies to an option");
        }
        if length == 0 {
            return self.on_option_reply(kind, &[]);
        }
        self.receive = Expecting::Small {
            kind: super::receive::ShortMessage::Reply { kind },
            data: vec![0; length as usize],
        };
    }

    /// Handles a complete reply.
    pub(super) fn on_option_reply(&mut self, kind: Rep, data: &[u8]) {
        let Phase::Handshake(HandshakeStep::Option(option)) = self.phase else { return };
        self.receive = Expecting::OptionReply;
        if kind == Rep::ErrShutdown {
            return self.abort(CloseReason::ServerShutDown);
        }
        match (option, kind) {
            (Opt::StructuredReply, Rep::Ack) => {
                self.handshake.structured = true;
                self.set_context();
            }
            (Opt::StructuredReply, kind) if kind.is_error() => self.send_go_option(),
            (Opt::SetMetaContext, Rep::MetaContext) => self.meta_context(data),
            (Opt::SetMetaContext, Rep::Ack) => self.send_go_option(),
            (Opt::SetMetaContext, kind) if kind.is_error() => {
                // "The client MUST disregard any context replies."
                self.handshake.context = None;
                self.send_go_option();
            }
            (Opt::Go, Rep::Info) => self.info(data),
            (Opt::Go, Rep::Ack) => match self.handshake.export_info {
                Some(export) => self.on_negotiated(export),
                None => self.violation("an export without its size"),
            },
            (Opt::Go, Rep::ErrUnsup) => {
                let name = self.config.export.clone();
                self.send_option(Opt::ExportName, name.as_bytes());
            }
            (Opt::Go, kind) if kind.is_error() => self.abort(CloseReason::Refused(kind)),
            _ => self.violation("a reply that does not belong to its option"),
        }
    }

    fn meta_context(&mut self, data: &[u8]) {
        let mut fields = Fields(data);
        let id = fields.u32();
        let named = string(fields.0) == Some(BASE_ALLOCATION);
        match id.filter(|_| named && self.handshake.context.is_none()) {
            Some(id) => self.handshake.context = Some(id),
            None => self.violation("a context that was not asked for"),
        }
    }

    fn info(&mut self, data: &[u8]) {
        let mut fields = Fields(data);
        let Some(kind) = fields.u16() else { return self.violation("information of no kind") };
        match Info(kind) {
            Info::Export => match InfoExport::read_from_bytes(fields.0) {
                Ok(export) => {
                    let abilities = TransmissionFlags(export.flags.get());
                    self.handshake.export_info = Some((export.bytes.get(), abilities));
                }
                Err(_) => self.violation("an export's size of another length"),
            },
            Info::BlockSize => match InfoBlockSize::read_from_bytes(fields.0) {
                Ok(told) => {
                    self.handshake.size_constraints = Some(SizeConstraints {
                        minimum: told.minimum.get(),
                        preferred: told.preferred.get(),
                        payload: told.payload.get(),
                    });
                }
                Err(_) => self.violation("size constraints of another length"),
            },
            // "The client MUST ignore information replies it does not understand."
            _ => {}
        }
    }

    /// Handles the answer to `NBD_OPT_EXPORT_NAME`.
    pub(super) fn export_name(&mut self) {
        let Ok((export, _)) = InfoExport::read_from_prefix(&self.header) else { return };
        self.on_negotiated((export.bytes.get(), TransmissionFlags(export.flags.get())));
        if self.phase == Phase::Transmission && !self.handshake.no_zeroes {
            self.receive = Expecting::Padding { remaining: EXPORT_NAME_PADDING };
        }
    }

    fn on_negotiated(&mut self, (bytes, abilities): (u64, TransmissionFlags)) {
        let ServerInfo { structured, context, size_constraints: sizes, .. } = self.handshake;
        let sizes = sizes.unwrap_or(SizeConstraints::DEFAULT);
        if !abilities.has(flag::HAS_FLAGS) {
            return self.violation("an export without flags");
        }
        if !sizes.are_valid() {
            return self.violation("size constraints that contradict the specification");
        }
        let maps = structured && context.is_some();
        self.negotiated = Some(NegotiatedExport {
            bytes,
            transmission_flags: abilities,
            size_constraints: sizes,
            structured,
            block_status: maps,
        });
        self.phase = Phase::Transmission;
        self.receive = Expecting::Reply;
    }

    /// "Soft disconnect" from the handshake.
    fn abort(&mut self, end: CloseReason) {
        self.send_option(Opt::Abort, &[]);
        self.fail_in_flight(end);
    }
}
