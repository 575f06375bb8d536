//! What is agreed on ("Handshake", "Option types").

use zerocopy::{FromBytes, IntoBytes};

use super::receive::Receive;
use super::{Agreed, Connection, End, Phase};
use crate::message::{
    BASE_ALLOCATION, EXPORT_NAME_PADDING, FIXED_NEWSTYLE, Fields, Greeting, Info, InfoBlockSize,
    InfoExport, MAGIC, NO_ZEROES, OPTION_MAGIC, Opt, OptionHeader, OptionReply, REPLY_MAGIC, Rep,
    flag, string,
};
use crate::{Abilities, Sizes};

/// Longest reply to an option, in bytes: more than anything that makes sense.
pub(super) const MAX_REPLY_BYTES: u32 = 16 << 10;

/// Most replies to one option.
const MAX_REPLIES: u32 = 64;

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Greeting,
    /// Waits for the replies to this option.
    Option(Opt),
    ExportName,
}

/// What the server has told so far.
#[derive(Debug, Default)]
pub(super) struct Known {
    no_zeroes: bool,
    structured: bool,
    /// Of `base:allocation`.
    pub(super) context: Option<u32>,
    export: Option<(u64, Abilities)>,
    sizes: Option<Sizes>,
    /// Replies to the current option.
    replies: u32,
}

impl Connection {
    pub(super) fn greeting(&mut self) {
        let Ok((greeting, _)) = Greeting::read_from_prefix(&self.header) else { return };
        if greeting.magic.get() != MAGIC {
            return self.violation("no greeting of NBD");
        }
        if greeting.version.get() != OPTION_MAGIC {
            return self.finish(End::Unsupported("it speaks oldstyle"));
        }
        let flags = greeting.flags.get();
        if flags & FIXED_NEWSTYLE == 0 {
            return self.finish(End::Unsupported("it does not speak fixed newstyle"));
        }
        self.handshake.no_zeroes = flags & NO_ZEROES != 0;
        let ours = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
        self.out.push_bytes(&ours.to_be_bytes());
        if self.config.structured {
            self.ask(Opt::StructuredReply, &[]);
        } else {
            self.go();
        }
    }

    fn ask(&mut self, option: Opt, data: &[u8]) {
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
        self.phase = Phase::Handshake(if name { Step::ExportName } else { Step::Option(option) });
        self.receive = if name { Receive::ExportName } else { Receive::OptionReply };
    }

    fn name(&self) -> Vec<u8> {
        let name = self.config.export.as_bytes();
        let length = u32::try_from(name.len()).expect("names are short");
        [&length.to_be_bytes()[..], name].concat()
    }

    fn set_context(&mut self) {
        let query = BASE_ALLOCATION.as_bytes();
        let length = u32::try_from(query.len()).expect("it is short").to_be_bytes();
        let data = [&self.name()[..], &1u32.to_be_bytes(), &length, query].concat();
        self.ask(Opt::SetMetaContext, &data);
    }

    fn go(&mut self) {
        let wanted = [1u16.to_be_bytes(), Info::BlockSize.0.to_be_bytes()].concat();
        let data = [&self.name()[..], &wanted].concat();
        self.ask(Opt::Go, &data);
    }

    /// The header of a reply.
    pub(super) fn option_reply(&mut self) {
        let Phase::Handshake(Step::Option(option)) = self.phase else { return };
        let Ok((reply, _)) = OptionReply::read_from_prefix(&self.header) else { return };
        let (kind, length) = (Rep(reply.kind.get()), reply.length.get());
        if reply.magic.get() != REPLY_MAGIC || reply.option.get() != option.0 {
            return self.violation("a reply to another option, or none");
        }
        self.handshake.replies += 1;
        if length > MAX_REPLY_BYTES || self.handshake.replies > MAX_REPLIES {
            return self.violation("replies to an option without end");
        }
        if length == 0 {
            return self.replied(kind, &[]);
        }
        self.receive = Receive::Small {
            what: super::receive::Small::Reply { kind },
            data: vec![0; length as usize],
        };
    }

    /// A reply is whole.
    pub(super) fn replied(&mut self, kind: Rep, data: &[u8]) {
        let Phase::Handshake(Step::Option(option)) = self.phase else { return };
        self.receive = Receive::OptionReply;
        if kind == Rep::ErrShutdown {
            return self.abort(End::ServerShutDown);
        }
        match (option, kind) {
            (Opt::StructuredReply, Rep::Ack) => {
                self.handshake.structured = true;
                self.set_context();
            }
            (Opt::StructuredReply, kind) if kind.is_error() => self.go(),
            (Opt::SetMetaContext, Rep::MetaContext) => self.meta_context(data),
            (Opt::SetMetaContext, Rep::Ack) => self.go(),
            (Opt::SetMetaContext, kind) if kind.is_error() => {
                // "The client MUST disregard any context replies."
                self.handshake.context = None;
                self.go();
            }
            (Opt::Go, Rep::Info) => self.info(data),
            (Opt::Go, Rep::Ack) => match self.handshake.export {
                Some(export) => self.agree(export),
                None => self.violation("an export without its size"),
            },
            (Opt::Go, Rep::ErrUnsup) => {
                let name = self.config.export.clone();
                self.ask(Opt::ExportName, name.as_bytes());
            }
            (Opt::Go, kind) if kind.is_error() => self.abort(End::Refused(kind)),
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
                    let abilities = Abilities(export.flags.get());
                    self.handshake.export = Some((export.bytes.get(), abilities));
                }
                Err(_) => self.violation("an export's size of another length"),
            },
            Info::BlockSize => match InfoBlockSize::read_from_bytes(fields.0) {
                Ok(told) => {
                    self.handshake.sizes = Some(Sizes {
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

    /// The answer to `NBD_OPT_EXPORT_NAME`.
    pub(super) fn export_name(&mut self) {
        let Ok((export, _)) = InfoExport::read_from_prefix(&self.header) else { return };
        self.agree((export.bytes.get(), Abilities(export.flags.get())));
        if self.phase == Phase::Transmission && !self.handshake.no_zeroes {
            self.receive = Receive::Padding { left: EXPORT_NAME_PADDING };
        }
    }

    fn agree(&mut self, (bytes, abilities): (u64, Abilities)) {
        let Known { structured, context, sizes, .. } = self.handshake;
        let sizes = sizes.unwrap_or(Sizes::DEFAULT);
        if !abilities.has(flag::HAS_FLAGS) {
            return self.violation("an export without flags");
        }
        if !sizes.are_valid() {
            return self.violation("size constraints that contradict the specification");
        }
        let maps = structured && context.is_some();
        self.agreed = Some(Agreed { bytes, abilities, sizes, structured, maps });
        self.phase = Phase::Transmission;
        self.receive = Receive::Reply;
    }

    /// "Soft disconnect" from the handshake.
    fn abort(&mut self, end: End) {
        self.ask(Opt::Abort, &[]);
        self.lose(end);
    }
}
