//! Reception: headers with their digests, payload into its buffers, data digests.

use std::time::Duration;

use zerocopy::FromBytes;

use super::{Digests, IncomingData, Tag};
use crate::pdu::{
    COMMON_BYTES, CommonHeader, DIGEST_BYTES, DataPdu, FLAG_DDGST, FLAG_HDGST, FatalError,
    MAX_HEADER_BYTES,
};

/// Byte offsets of header fields that can be wrong, for FEI.
pub(crate) mod at {
    pub(crate) const PDU_TYPE: u32 = 0;
    pub(crate) const FLAGS: u32 = 1;
    pub(crate) const HLEN: u32 = 2;
    pub(crate) const PDO: u32 = 3;
    pub(crate) const PLEN: u32 = 4;
    /// PFV of ICReq and ICResp.
    pub(crate) const PFV: u32 = 8;
    /// HPDA of ICReq, CPDA of ICResp.
    pub(crate) const ALIGNMENT: u32 = 10;
    /// DGST of ICReq and ICResp.
    pub(crate) const DIGESTS: u32 = 11;
    /// MAXH2CDATA of ICResp.
    pub(crate) const MAX_H2C_DATA: u32 = 12;
}

/// A fatal error: FES and FEI (NVMe/TCP 3.6.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) error: FatalError,
    pub(crate) information: u32,
}

impl Violation {
    /// The header field at byte `at` is invalid.
    pub(crate) fn field(at: u32) -> Self {
        Self { error: FatalError::InvalidHeaderField, information: at }
    }

    /// A PDU that must not arrive now.
    pub(crate) fn sequence() -> Self {
        Self { error: FatalError::PduSequence, information: 0 }
    }

    /// Data, or a request for data, out of range.
    pub(crate) fn out_of_range() -> Self {
        Self { error: FatalError::DataOutOfRange, information: 0 }
    }

    /// More data, or more requests for data, than negotiated.
    pub(crate) fn limit() -> Self {
        Self { error: FatalError::DataLimit, information: 0 }
    }
}

/// Provides the buffers for the data of commands.
pub(crate) trait CommandBuffers {
    /// The data of a command in flight.
    fn incoming(&mut self, tag: Tag) -> Option<&mut IncomingData>;
}

/// What the received bytes have completed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReceiveEvent {
    /// Nothing to handle.
    Incomplete,
    /// A common header: call [`Receiver::expect_header`].
    Common(CommonHeader),
    /// A header, with its digest: call [`Receiver::check_header`], then one of
    /// [`Receiver::next_pdu`], [`Receiver::start_payload`] and [`Receiver::block_on`].
    Header(CommonHeader),
    /// The data of a PDU, of this command unless discarded.
    Data(Option<Tag>),
}

const SCRATCH_BYTES: usize = 256;
const _: () = assert!(SCRATCH_BYTES >= MAX_HEADER_BYTES + DIGEST_BYTES);

/// State of reception in the byte stream.
#[derive(Debug)]
pub(crate) struct Receiver {
    state: State,
    /// The header being received; also a buffer for discarded bytes.
    scratch: [u8; SCRATCH_BYTES],
    /// Valid bytes of a header at the start of `scratch`.
    header: usize,
    /// When the peer began the unfinished PDU.
    pdu_started_at: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// `have` bytes of a header of `need` bytes are in the scratch space.
    Header {
        have: usize,
        need: usize,
    },
    /// In-capsule data waits for its command's admission and memory.
    Blocked(Payload),
    /// Bytes up to PDO are skipped.
    Padding(Payload),
    Data(Payload),
    /// `have` bytes of the data digest are in the scratch space.
    Digest {
        have: usize,
        payload: Payload,
    },
}

/// Data of the PDU being received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload {
    /// The command; `None`: discarded.
    tag: Option<Tag>,
    padding: usize,
    /// Length of the data in bytes.
    pub(crate) length: u32,
    /// Bytes of it still to come.
    remaining: usize,
    digest: bool,
}

const NEXT_PDU: State = State::Header { have: 0, need: COMMON_BYTES };

impl Default for Receiver {
    fn default() -> Self {
        Self { state: NEXT_PDU, scratch: [0; SCRATCH_BYTES], header: 0, pdu_started_at: None }
    }
}

impl Receiver {
    /// Buffer for the next bytes. `None` while data waits for its memory.
    pub(crate) fn space<'a>(
        &'a mut self,
        owners: &'a mut impl CommandBuffers,
    ) -> Option<&'a mut [u8]> {
        match &self.state {
            State::Header { have, need } => Some(&mut self.scratch[*have..*need]),
            State::Blocked(_) => None,
            State::Padding(p) => Some(&mut self.scratch[..p.padding.min(SCRATCH_BYTES)]),
            State::Digest { have, .. } => Some(&mut self.scratch[*have..DIGEST_BYTES]),
            State::Data(p) => {
                let sink = &mut self.scratch[..p.remaining.min(SCRATCH_BYTES)];
                let incoming = p.tag.and_then(|tag| owners.incoming(tag));
                Some(incoming.and_then(|data| data.space(p.remaining)).unwrap_or(sink))
            }
        }
    }

    /// The first `n` bytes of that space have been filled.
    pub(crate) fn advance(
        &mut self,
        n: usize,
        now: Duration,
        owners: &mut impl CommandBuffers,
    ) -> ReceiveEvent {
        match &mut self.state {
            State::Header { have, need } => {
                *have += n;
                let (have, need) = (*have, *need);
                self.header = have;
                self.pdu_started_at.get_or_insert(now);
                match (have == need, need == COMMON_BYTES) {
                    (false, _) => return ReceiveEvent::Incomplete,
                    (true, true) => return ReceiveEvent::Common(self.pdu()),
                    (true, false) => return ReceiveEvent::Header(self.pdu()),
                }
            }
            State::Blocked(_) => {}
            State::Padding(p) => {
                p.padding = p.padding.saturating_sub(n);
                if p.padding == 0 {
                    self.state = State::Data(*p);
                }
            }
            State::Data(p) => {
                p.remaining = p.remaining.saturating_sub(n);
                let p = *p;
                if let Some(data) = p.tag.and_then(|tag| owners.incoming(tag)) {
                    data.advance(n);
                }
                if p.remaining == 0 && p.digest {
                    self.state = State::Digest { have: 0, payload: p };
                } else if p.remaining == 0 {
                    return self.data_complete(p);
                }
            }
            State::Digest { have, payload } => {
                *have += n;
                if *have == DIGEST_BYTES {
                    let p = *payload;
                    self.check_data_digest(p, owners);
                    return self.data_complete(p);
                }
            }
        }
        ReceiveEvent::Incomplete
    }

    fn check_data_digest(&self, payload: Payload, owners: &mut impl CommandBuffers) {
        let received = first_u32(&self.scratch);
        if let Some(data) = payload.tag.and_then(|tag| owners.incoming(tag)) {
            let wrong = |crc| crc != received;
            data.corrupt |= data.checksum_of_last(payload.length).is_some_and(wrong);
        }
    }

    fn data_complete(&mut self, payload: Payload) -> ReceiveEvent {
        self.next_pdu();
        ReceiveEvent::Data(payload.tag)
    }

    /// Expects the rest of a header whose common part has arrived: `hlen` bytes in all. `digests`
    /// is `None` for PDUs that never have digests.
    pub(crate) fn expect_header(
        &mut self,
        common: CommonHeader,
        hlen: usize,
        digests: Option<Digests>,
    ) -> Result<(), Violation> {
        if usize::from(common.hlen) != hlen {
            return Err(Violation::field(at::HLEN));
        }
        if digests.is_some_and(|d| common.has(FLAG_HDGST) != d.header) {
            return Err(Violation::field(at::FLAGS));
        }
        let has_digest = digests.is_some_and(|d| d.header);
        let need = hlen + if has_digest { DIGEST_BYTES } else { 0 };
        if (common.plen.get() as usize) < need {
            return Err(Violation::field(at::PLEN));
        }
        self.state = State::Header { have: COMMON_BYTES, need };
        Ok(())
    }

    /// The header in the scratch space.
    pub(crate) fn pdu<T: FromBytes>(&self) -> T {
        const { assert!(size_of::<T>() <= SCRATCH_BYTES) };
        let read = T::read_from_prefix(&self.scratch);
        read.map(|(pdu, _)| pdu).expect("the scratch space is longer than any header")
    }

    /// Checks the header digest and the position of the data. `None` without data.
    pub(crate) fn check_header(
        &mut self,
        common: CommonHeader,
        digests: Digests,
    ) -> Result<Option<Payload>, Violation> {
        let need = self.header;
        if digests.header {
            self.header = usize::from(common.hlen);
            let (header, rest) = self.scratch.split_at(self.header);
            let digest = first_u32(rest);
            if wire::crc32c(header) != digest {
                let error = FatalError::HeaderDigest;
                return Err(Violation { error, information: digest });
            }
        }
        locate_payload(common, need, digests)
    }

    /// Receives the data of a PDU, if any, for `tag`; without a tag it is discarded.
    pub(crate) fn start_payload(
        &mut self,
        payload: Option<Payload>,
        tag: Option<Tag>,
        now: Duration,
    ) {
        match payload {
            None => self.next_pdu(),
            Some(p) => self.begin(Payload { tag, ..p }, now),
        }
    }

    /// Blocks reception before the data of `tag` until [`Self::resume`] or
    /// [`Self::discard_blocked`].
    pub(crate) fn block_on(&mut self, payload: Option<Payload>, tag: Tag) {
        self.pdu_started_at = None;
        self.state = match payload {
            Some(p) => State::Blocked(Payload { tag: Some(tag), ..p }),
            None => NEXT_PDU,
        };
    }

    /// Continues: the memory for the data of `tag` is available.
    pub(crate) fn resume(&mut self, tag: Tag, now: Duration) {
        if let State::Blocked(p) = self.state
            && p.tag == Some(tag)
        {
            self.begin(p, now);
        }
    }

    /// Discards the data of `tag`.
    pub(crate) fn discard_blocked(&mut self, tag: Tag, now: Duration) {
        match &mut self.state {
            State::Blocked(p) if p.tag == Some(tag) => {
                let p = Payload { tag: None, ..*p };
                self.begin(p, now);
            }
            State::Padding(p) | State::Data(p) | State::Digest { payload: p, .. }
                if p.tag == Some(tag) =>
            {
                p.tag = None;
            }
            _ => {}
        }
    }

    fn begin(&mut self, payload: Payload, now: Duration) {
        self.pdu_started_at = Some(now);
        self.state =
            if payload.padding > 0 { State::Padding(payload) } else { State::Data(payload) };
    }

    pub(crate) fn next_pdu(&mut self) {
        self.pdu_started_at = None;
        self.state = NEXT_PDU;
    }

    /// Buffer for discarded bytes.
    pub(crate) fn discard_space(&mut self) -> &mut [u8] {
        &mut self.scratch
    }

    /// The header received last, or the part that has arrived.
    pub(crate) fn header(&self) -> &[u8] {
        &self.scratch[..self.header.min(MAX_HEADER_BYTES)]
    }

    /// Since when a PDU of the peer is incomplete.
    pub(crate) fn pdu_started_at(&self) -> Option<Duration> {
        self.pdu_started_at
    }
}

impl DataPdu {
    /// The data length, if header and payload agree on it.
    pub(crate) fn agreed_length(&self, payload: Option<Payload>) -> Result<u32, Violation> {
        let length = self.length.get();
        if payload.map_or(0, |p| p.length) != length || length == 0 {
            return Err(Violation::field(at::PLEN));
        }
        Ok(length)
    }
}

/// Position of the data of a PDU, after `need` bytes of header.
fn locate_payload(
    common: CommonHeader,
    need: usize,
    digests: Digests,
) -> Result<Option<Payload>, Violation> {
    let plen = common.plen.get() as usize;
    if plen == need {
        return Ok(None);
    }
    if common.has(FLAG_DDGST) != digests.data {
        return Err(Violation::field(at::FLAGS));
    }
    let offset = usize::from(common.pdo);
    if offset < need || !offset.is_multiple_of(4) {
        return Err(Violation::field(at::PDO));
    }
    let trailer = if digests.data { DIGEST_BYTES } else { 0 };
    let left = plen.checked_sub(offset + trailer).filter(|&l| l > 0);
    let left = left.ok_or(Violation::field(at::PLEN))?;
    let length = u32::try_from(left).map_err(|_| Violation::field(at::PLEN))?;
    let padding = offset - need;
    Ok(Some(Payload { tag: None, padding, length, remaining: left, digest: digests.data }))
}

fn first_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |b| u32::from_le_bytes(*b))
}
