//! The server's handshake ("Handshake",

use zerocopy::{FromBytes, IntoBytes};

use super::{CloseReason, Connection, Expecting, MAX_OPTION_BYTES, Phase};
use crate::Export;
use crate::message::{
    BASE_ALLOCATION, EXPORT_NAME_PADDING, FIXED_NEWSTYLE, Fields, Info, InfoBlockSize, InfoExport,
    NO_ZEROES, OPTION_MAGIC, Opt, OptionHeader, OptionReply, REPLY_MAGIC, Rep, string,
};

/// Context ID of `base:allocation`.
pub(super) const CONTEXT_ID: u32 = 1;

/// Clients that request no size constraints are assumed to align to sectors, as all known ones do,
/// but not to more, in bytes.
const USUAL_MINIMUM: u32 = 512;

impl Connection {
    /// "Client flags".
    pub(super) fn client_flags(&mut self) {
        let flags = Fields(&self.header).u32().unwrap_or_default();
        if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
            return self.finish(CloseReason::Violation("unknown client flags"));
        }
        self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
        self.receive = Expecting::OptionHeader;
    }

    pub(super) fn option_header(&mut self) {
        let Ok((header, _)) = OptionHeader::read_from_prefix(&self.header) else { return };
        if header.magic.get() != OPTION_MAGIC {
            return self.finish(CloseReason::Violation("an option without its magic"));
        }
        let (option, length) = (Opt(header.option.get()), header.length.get());
        if length == 0 {
            return self.option(option, &[]);
        }
        if length > MAX_OPTION_BYTES {
            if option == Opt::ExportName {
                return self.finish(CloseReason::Refused);
            }
            self.receive = Expecting::OptionSkip { option, remaining: length };
            return;
        }
        self.receive = Expecting::Option { option, data: vec![0; length as usize] };
    }

    pub(super) fn option_too_big(&mut self, option: Opt) {
        self.receive = Expecting::OptionHeader;
        let known = matches!(
            option,
            Opt::Abort
                | Opt::List
                | Opt::StartTls
                | Opt::Info
                | Opt::Go
                | Opt::StructuredReply
                | Opt::ListMetaContext
                | Opt::SetMetaContext
        );
        if option == Opt::SetMetaContext {
            self.context = None;
        }
        if option == Opt::Abort {
            return self.option(option, &[]);
        }
        self.refuse_option(option, if known { Rep::ErrTooBig } else { Rep::ErrUnsup });
    }

    pub(super) fn option(&mut self, option: Opt, data: &[u8]) {
        self.receive = Expecting::OptionHeader;
        if self.shutting_down && option != Opt::Abort {
            return match option {
                Opt::ExportName => self.finish(CloseReason::ShutDown),
                _ => self.refuse_option(option, Rep::ErrShutdown),
            };
        }
        match option {
            Opt::ExportName => self.export_name(data),
            Opt::Abort => {
                self.reply(option, Rep::Ack, &[]);
                self.finish(CloseReason::Aborted);
            }
            Opt::List | Opt::StructuredReply | Opt::StartTls if !data.is_empty() => {
                self.refuse_option(option, Rep::ErrInvalid);
            }
            Opt::List => self.list(),
            // "If it does not support the option at all": TLS is not supported.
            Opt::StartTls => self.refuse_option(option, Rep::ErrUnsup),
            Opt::StructuredReply if self.structured => self.refuse_option(option, Rep::ErrInvalid),
            Opt::StructuredReply => {
                self.structured = true;
                self.reply(option, Rep::Ack, &[]);
            }
            Opt::Info | Opt::Go => self.info(option, data),
            Opt::ListMetaContext | Opt::SetMetaContext => {
                if let Err(why) = self.meta_context(option, data) {
                    self.refuse_option(option, why);
                }
            }
            _ => self.refuse_option(option, Rep::ErrUnsup),
        }
    }

    fn find(&self, name: &str) -> Option<usize> {
        if name.is_empty() && !self.config.exports.is_empty() {
            return Some(0);
        }
        self.config.exports.iter().position(|e| e.name == name)
    }

    /// `NBD_OPT_EXPORT_NAME`.
    fn export_name(&mut self, data: &[u8]) {
        let index = string(data).and_then(|name| self.find(name));
        let fits = |i: &usize| self.config.exports[*i].size_constraints.minimum <= USUAL_MINIMUM;
        let Some(index) = index.filter(fits) else { return self.finish(CloseReason::Refused) };
        let export = self.info_export(&self.config.exports[index]);
        self.out.push_bytes(export.as_bytes());
        if !self.no_zeroes {
            self.out.push_bytes(&[0; EXPORT_NAME_PADDING]);
        }
        self.begin(index);
    }

    /// Enters the transmission phase.
    fn begin(&mut self, export: usize) {
        self.context = self.context.filter(|&context| context == export);
        self.phase = Phase::Transmission(export);
        self.receive = Expecting::Request;
    }

    /// `NBD_OPT_LIST`.
    fn list(&mut self) {
        for export in self.config.exports.clone().iter() {
            let mut data =
                u32::try_from(export.name.len()).unwrap_or_default().to_be_bytes().to_vec();
            data.extend(export.name.as_bytes());
            data.extend(export.description.as_bytes());
            self.reply(Opt::List, Rep::Server, &data);
        }
        self.reply(Opt::List, Rep::Ack, &[]);
    }

    /// `NBD_OPT_INFO`, `NBD_OPT_GO`.
    fn info(&mut self, option: Opt, data: &[u8]) {
        let Some((name, wanted)) = parse_info(data) else {
            return self.refuse_option(option, Rep::ErrInvalid);
        };
        let Some(index) = self.find(name) else {
            return self.refuse_option(option, Rep::ErrUnknown);
        };
        let exports = self.config.exports.clone();
        let export = &exports[index];
        let information = |kind: Info, data: &[u8]| [&kind.0.to_be_bytes()[..], data].concat();
        let export_info = self.info_export(export);
        self.reply(option, Rep::Info, &information(Info::Export, export_info.as_bytes()));
        let sizes = InfoBlockSize {
            minimum: export.size_constraints.minimum.into(),
            preferred: export.size_constraints.preferred.into(),
            payload: export.size_constraints.payload.into(),
        };
        // Sent unrequested as well, as it is enforced.
        self.reply(option, Rep::Info, &information(Info::BlockSize, sizes.as_bytes()));
        if wanted.contains(&Info::Name) {
            self.reply(option, Rep::Info, &information(Info::Name, export.name.as_bytes()));
        }
        if wanted.contains(&Info::Description) && !export.description.is_empty() {
            let description = export.description.as_bytes();
            self.reply(option, Rep::Info, &information(Info::Description, description));
        }
        if !wanted.contains(&Info::BlockSize) && export.size_constraints.minimum > USUAL_MINIMUM {
            return self.refuse_option(option, Rep::ErrBlockSizeReqd);
        }
        self.reply(option, Rep::Ack, &[]);
        if option == Opt::Go {
            self.begin(index);
        }
    }

    fn info_export(&self, export: &Export) -> InfoExport {
        let flags = export.transmission_flags(self.structured).0;
        InfoExport { bytes: export.bytes.into(), flags: flags.into() }
    }

    /// `NBD_OPT_LIST_META_CONTEXT`, `NBD_OPT_SET_META_CONTEXT`.
    fn meta_context(&mut self, option: Opt, data: &[u8]) -> Result<(), Rep> {
        let sets = option == Opt::SetMetaContext;
        if sets {
            // "Including when this command fails".
            self.context = None;
        }
        if !self.structured {
            return Err(Rep::ErrInvalid);
        }
        let mut fields = Fields(data);
        let (name, count) = fields.string().zip(fields.u32()).ok_or(Rep::ErrInvalid)?;
        let wildcard = BASE_ALLOCATION.split_inclusive(':').next();
        let mut found = !sets && count == 0;
        for _ in 0..count {
            let query = fields.string().ok_or(Rep::ErrInvalid)?;
            found |= query == BASE_ALLOCATION || (!sets && Some(query) == wildcard);
        }
        if !fields.0.is_empty() {
            return Err(Rep::ErrInvalid);
        }
        let index = self.find(name).ok_or(Rep::ErrUnknown)?;
        if found {
            let id = if sets { CONTEXT_ID } else { 0 };
            let data = [&id.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat();
            self.reply(option, Rep::MetaContext, &data);
            if sets {
                self.context = Some(index);
            }
        }
        self.reply(option, Rep::Ack, &[]);
        Ok(())
    }

    /// Refuses an option, with a text for users.
    fn refuse_option(&mut self, option: Opt, why: Rep) {
        let message = match why {
            Rep::ErrUnsup => "this server does not know the option",
            Rep::ErrInvalid => "the option is malformed or misplaced",
            Rep::ErrUnknown => "there is no such export",
            Rep::ErrShutdown => "the server is being shut down",
            Rep::ErrBlockSizeReqd => "the client has to ask for the block size of this export",
            Rep::ErrTooBig => "the option is too long",
            _ => "",
        };
        self.reply(option, why, message.as_bytes());
    }

    fn reply(&mut self, option: Opt, kind: Rep, data: &[u8]) {
        let length = u32::try_from(data.len()).expect("names are short");
        let header = OptionReply {
            magic: REPLY_MAGIC.into(),
            option: option.0.into(),
            kind: kind.0.into(),
            length: length.into(),
        };
        self.out.push_bytes(header.as_bytes());
        self.out.push_bytes(data);
    }
}

/// Parses the name of an export and the requested information.
fn parse_info(data: &[u8]) -> Option<(&str, Vec<Info>)> {
    let mut fields = Fields(data);
    let name = fields.string()?;
    let count = fields.u16()?;
    let wanted = (0..count).map(|_| fields.u16().map(Info)).collect::<Option<Vec<_>>>()?;
    fields.0.is_empty().then_some((name, wanted))
}
