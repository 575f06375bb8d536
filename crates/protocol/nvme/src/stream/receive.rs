//! The way in: headers with their digests, payload to its owner, data digests.

use std::time::Duration;

use zerocopy::FromBytes;

use super::{Digests, Incoming, Tag};
use crate::pdu::{
    COMMON_BYTES, Common, DIGEST_BYTES, Data, FLAG_DDGST, FLAG_HDGST, FatalError, MAX_HEADER_BYTES,
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

    /// A PDU that must not come now.
    pub(crate) fn sequence() -> Self {
        Self { error: FatalError::PduSequence, information: 0 }
    }

    /// Data, or a wish for data, outside of what is there.
    pub(crate) fn out_of_range() -> Self {
        Self { error: FatalError::DataOutOfRange, information: 0 }
    }

    /// More data, or more wishes for data, than was agreed on.
    pub(crate) fn limit() -> Self {
        Self { error: FatalError::DataLimit, information: 0 }
    }
}

/// Who knows where the data of a command goes.
pub(crate) trait Owners {
    /// The data of a command in flight.
    fn incoming(&mut self, tag: Tag) -> Option<&mut Incoming>;
}

/// What the bytes that were received have completed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Received {
    /// Nothing that the machine has to look at.
    Part,
    /// A common header: [`Receiver::expect`] the rest of it.
    Common(Common),
    /// A header, with its digest: let it be [`Receiver::checked`], then go on by one of
    /// [`Receiver::next_pdu`], [`Receiver::start`] and [`Receiver::wait`].
    Header(Common),
    /// The data of a PDU, for this command if it was wanted.
    Data(Option<Tag>),
}

const SCRATCH_BYTES: usize = 256;
const _: () = assert!(SCRATCH_BYTES >= MAX_HEADER_BYTES + DIGEST_BYTES);

/// Where reception stands within the byte stream.
#[derive(Debug)]
pub(crate) struct Receiver {
    state: State,
    /// The header being received; also a place to throw bytes away.
    scratch: [u8; SCRATCH_BYTES],
    /// Valid bytes of a header at the start of `scratch`.
    header: usize,
    /// When the peer began to send what it has not finished.
    since: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// `have` bytes of a header of `need` bytes are in the scratch space.
    Header {
        have: usize,
        need: usize,
    },
    /// In-capsule data waits for its command's admission and memory.
    Waiting(Payload),
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
    /// Whose data; `None`: thrown away.
    tag: Option<Tag>,
    padding: usize,
    /// Length of the data in bytes.
    pub(crate) length: u32,
    /// Bytes of it still to come.
    left: usize,
    digest: bool,
}

const NEXT_PDU: State = State::Header { have: 0, need: COMMON_BYTES };

impl Default for Receiver {
    fn default() -> Self {
        Self { state: NEXT_PDU, scratch: [0; SCRATCH_BYTES], header: 0, since: None }
    }
}

impl Receiver {
    /// Where the next bytes go. `None` while data waits for its memory.
    pub(crate) fn space<'a>(&'a mut self, owners: &'a mut impl Owners) -> Option<&'a mut [u8]> {
        match &self.state {
            State::Header { have, need } => Some(&mut self.scratch[*have..*need]),
            State::Waiting(_) => None,
            State::Padding(p) => Some(&mut self.scratch[..p.padding.min(SCRATCH_BYTES)]),
            State::Digest { have, .. } => Some(&mut self.scratch[*have..DIGEST_BYTES]),
            State::Data(p) => {
                let sink = &mut self.scratch[..p.left.min(SCRATCH_BYTES)];
                let incoming = p.tag.and_then(|tag| owners.incoming(tag));
                Some(incoming.and_then(|data| data.space(p.left)).unwrap_or(sink))
            }
        }
    }

    /// The first `n` bytes of that space have been filled.
    pub(crate) fn advance(
        &mut self,
        n: usize,
        now: Duration,
        owners: &mut impl Owners,
    ) -> Received {
        match &mut self.state {
            State::Header { have, need } => {
                *have += n;
                let (have, need) = (*have, *need);
                self.header = have;
                self.since.get_or_insert(now);
                match (have == need, need == COMMON_BYTES) {
                    (false, _) => return Received::Part,
                    (true, true) => return Received::Common(self.pdu()),
                    (true, false) => return Received::Header(self.pdu()),
                }
            }
            State::Waiting(_) => {}
            State::Padding(p) => {
                p.padding = p.padding.saturating_sub(n);
                if p.padding == 0 {
                    self.state = State::Data(*p);
                }
            }
            State::Data(p) => {
                p.left = p.left.saturating_sub(n);
                let p = *p;
                if let Some(data) = p.tag.and_then(|tag| owners.incoming(tag)) {
                    data.advance(n);
                }
                if p.left == 0 && p.digest {
                    self.state = State::Digest { have: 0, payload: p };
                } else if p.left == 0 {
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
        Received::Part
    }

    fn check_data_digest(&self, payload: Payload, owners: &mut impl Owners) {
        let received = first_u32(&self.scratch);
        if let Some(data) = payload.tag.and_then(|tag| owners.incoming(tag)) {
            let wrong = |crc| crc != received;
            data.corrupt |= data.checksum_of_last(payload.length).is_some_and(wrong);
        }
    }

    fn data_complete(&mut self, payload: Payload) -> Received {
        self.next_pdu();
        Received::Data(payload.tag)
    }

    /// The rest of a header whose common part has come: `hlen` bytes in all. `digests` are `None`
    /// for PDUs that have none whatever was agreed on.
    pub(crate) fn expect(
        &mut self,
        common: Common,
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

    /// The header digest is right, and the data lies where it can. `None` without data.
    pub(crate) fn checked(
        &mut self,
        common: Common,
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
        payload(common, need, digests)
    }

    /// Receives the data of a PDU, if it has any, for `tag`; without one it is thrown away.
    pub(crate) fn start(&mut self, payload: Option<Payload>, tag: Option<Tag>, now: Duration) {
        match payload {
            None => self.next_pdu(),
            Some(p) => self.begin(Payload { tag, ..p }, now),
        }
    }

    /// Keeps the data of `tag` waiting until [`Self::resume`] or [`Self::drop_waiting`].
    pub(crate) fn wait(&mut self, payload: Option<Payload>, tag: Tag) {
        self.since = None;
        self.state = match payload {
            Some(p) => State::Waiting(Payload { tag: Some(tag), ..p }),
            None => NEXT_PDU,
        };
    }

    /// The memory for the data of `tag` is there.
    pub(crate) fn resume(&mut self, tag: Tag, now: Duration) {
        if let State::Waiting(p) = self.state
            && p.tag == Some(tag)
        {
            self.begin(p, now);
        }
    }

    /// Nobody wants the data of `tag` any more.
    pub(crate) fn drop_waiting(&mut self, tag: Tag, now: Duration) {
        match &mut self.state {
            State::Waiting(p) if p.tag == Some(tag) => {
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
        self.since = Some(now);
        self.state =
            if payload.padding > 0 { State::Padding(payload) } else { State::Data(payload) };
    }

    pub(crate) fn next_pdu(&mut self) {
        self.since = None;
        self.state = NEXT_PDU;
    }

    /// A place for bytes that nobody wants.
    pub(crate) fn sink(&mut self) -> &mut [u8] {
        &mut self.scratch
    }

    /// The header received last, or as much of it as has come.
    pub(crate) fn header(&self) -> &[u8] {
        &self.scratch[..self.header.min(MAX_HEADER_BYTES)]
    }

    /// Since when the peer owes the rest of a PDU.
    pub(crate) fn since(&self) -> Option<Duration> {
        self.since
    }
}

impl Data {
    /// The bytes of data that this header and its payload agree on.
    pub(crate) fn agreed_length(&self, payload: Option<Payload>) -> Result<u32, Violation> {
        let length = self.length.get();
        if payload.map_or(0, |p| p.length) != length || length == 0 {
            return Err(Violation::field(at::PLEN));
        }
        Ok(length)
    }
}

/// Where the data of a PDU lies, behind `need` bytes of header.
fn payload(common: Common, need: usize, digests: Digests) -> Result<Option<Payload>, Violation> {
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
    Ok(Some(Payload { tag: None, padding, length, left, digest: digests.data }))
}

fn first_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |b| u32::from_le_bytes(*b))
}
