//! Text requests in the full feature phase (RFC 7143 11.10 and 11.11): discovery.

use zerocopy::big_endian::U32;

use super::action::{Action, SendTargetsScope, TargetRecord};
use super::send::StatSnUse;
use super::{Connection, Phase};
use crate::params::{Key, KeyUse};
use crate::pdu::{CONTINUE, FINAL, NO_TAG, RejectReason, TextRequest, TextResponse};
use crate::text::{self, Pairs};
use crate::value::{NOT_UNDERSTOOD, REJECT};

/// Most bytes of text in one request, over all its PDUs (RFC 7143 6.2).
pub(super) const MAX_TEXT: usize = 64 * 1024;

/// Most keys in one request; each is answered.
const MAX_KEYS: usize = 256;

/// Most text in one response, in bytes.
const MAX_RESPONSE: usize = 64 * 1024;

/// A text request and its answer, each of which may take several PDUs.
#[derive(Debug)]
pub(super) struct TextExchange {
    itt: u32,
    ttt: u32,
    lun: [u8; 8],
    /// Whether the initiator has nothing more to say.
    is_last: bool,
    request: Vec<u8>,
    /// The reply, and how much of it has been sent.
    reply: Vec<u8>,
    sent: usize,
    /// Whether the driver is collecting targets.
    waiting_for_driver: bool,
}

impl TextExchange {
    pub(super) fn waits_for_driver(&self) -> bool {
        self.waiting_for_driver
    }
}

impl Connection {
    pub(super) fn on_text(&mut self, request: &TextRequest, text: &[u8]) {
        let (itt, ttt) = (request.itt.get(), request.ttt.get());
        if itt == NO_TAG || (request.is_final() && request.continues()) {
            return self.reject(RejectReason::InvalidField);
        }
        if ttt == NO_TAG {
            // RFC 7143 11.10.4: a new exchange replaces an old one.
            let (ttt, lun) = (self.new_ttt(), request.lun);
            let (request, reply) = (Vec::new(), Vec::new());
            self.text_exchange = Some(TextExchange {
                itt,
                ttt,
                lun,
                is_last: false,
                request,
                reply,
                sent: 0,
                waiting_for_driver: false,
            });
        }
        let Some(exchange) =
            self.text_exchange.as_mut().filter(|e| e.itt == itt && (ttt == NO_TAG || e.ttt == ttt))
        else {
            return self.reject(RejectReason::InvalidField);
        };
        exchange.is_last = request.is_final();
        if exchange.sent < exchange.reply.len() {
            if !text.is_empty() {
                self.text_exchange = None;
                return self.reject(RejectReason::ProtocolError);
            }
            return self.send_text();
        }
        if exchange.request.len() + text.len() > MAX_TEXT {
            self.text_exchange = None;
            return self.reject(RejectReason::ProtocolError);
        }
        exchange.request.extend_from_slice(text);
        if request.continues() {
            return self.send_text();
        }
        let text = std::mem::take(&mut exchange.request);
        self.answer_text(&text);
    }

    /// Answers the keys of a complete request.
    fn answer_text(&mut self, text: &[u8]) {
        let pairs = Pairs::of(text).take(MAX_KEYS + 1).collect::<Result<Vec<_>, _>>();
        let Some(pairs) = pairs.ok().filter(|p| p.len() <= MAX_KEYS) else {
            self.text_exchange = None;
            return self.reject(RejectReason::ProtocolError);
        };
        let (mut reply, mut asked) = (Vec::new(), None);
        for (name, value) in pairs {
            match Key::from_name(name) {
                None => text::push(&mut reply, name, NOT_UNDERSTOOD),
                Some(Key::SendTargets) if asked.is_none() => match self.scope(value) {
                    Some(scope) => asked = Some(scope),
                    None => text::push(&mut reply, name, REJECT),
                },
                Some(Key::MaxRecvDataSegmentLength) => {
                    // A declaration: takes effect at once, and is not answered.
                    let key = Key::MaxRecvDataSegmentLength;
                    if self.params.answer(key, value, &self.config.limits).is_err() {
                        text::push(&mut reply, name, REJECT);
                    }
                }
                Some(key) if key.key_use() == KeyUse::Any => {}
                Some(_) => text::push(&mut reply, name, REJECT),
            }
        }
        let Some(exchange) = &mut self.text_exchange else { return };
        (exchange.reply, exchange.sent) = (reply, 0);
        if let Some(scope) = asked {
            exchange.waiting_for_driver = true;
            self.actions.push_back(Action::SendTargets(scope));
        } else {
            self.send_text();
        }
    }

    /// RFC 7143 13.3 and appendix C: `All` in discovery sessions, nothing in normal ones, a name
    /// in both.
    fn scope(&self, value: &str) -> Option<SendTargetsScope> {
        let discovery = matches!(self.phase, Phase::FullFeature { discovery: true });
        match value {
            "All" => discovery.then_some(SendTargetsScope::All),
            "" => (!discovery).then_some(SendTargetsScope::Session),
            name => name.parse().ok().map(SendTargetsScope::Named),
        }
    }

    /// Answers [`Action::SendTargets`]. Ignored if no answer is due.
    pub fn targets(&mut self, records: &[TargetRecord]) {
        let Some(exchange) = self.text_exchange.as_mut().filter(|e| e.waiting_for_driver) else {
            return;
        };
        exchange.waiting_for_driver = false;
        for record in records {
            text::push(&mut exchange.reply, "TargetName", &record.name);
            for (address, group) in &record.addresses {
                text::push(&mut exchange.reply, "TargetAddress", format_args!("{address},{group}"));
            }
        }
        self.send_text();
    }

    /// Sends as much of the reply as fits one PDU.
    fn send_text(&mut self) {
        let most = MAX_RESPONSE.min(self.params.initiator_max_segment as usize);
        let Some(mut exchange) = self.text_exchange.take() else { return };
        let start = exchange.sent;
        let end = exchange.reply.len().min(start + most);
        exchange.sent = end;
        let mut pdu = TextResponse::zeroed();
        (pdu.itt, pdu.ttt) = (U32::new(exchange.itt), U32::new(NO_TAG));
        let more = end < exchange.reply.len();
        if more {
            pdu.flags = CONTINUE;
        }
        let over = exchange.is_last && !more;
        if over {
            pdu.flags = FINAL;
        } else {
            (pdu.ttt, pdu.lun) = (U32::new(exchange.ttt), exchange.lun);
        }
        self.send_bytes(pdu, StatSnUse::Advance, &exchange.reply[start..end]);
        if !over {
            self.text_exchange = Some(exchange);
        }
    }
}
