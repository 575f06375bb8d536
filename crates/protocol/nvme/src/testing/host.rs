//! The host's half of the transport: encodes what a host sends, decodes what it gets, and checks
//! every PDU's form while at it.

use zerocopy::{FromBytes, IntoBytes};

use crate::entry::{Cqe, Sgl};
use crate::pdu::{
    CapsuleCmd, CapsuleResp, CommonHeader, DIGEST_DATA, DIGEST_HEADER, DataPdu, FLAG_DDGST,
    FLAG_HDGST, FLAG_LAST, FLAG_SUCCESS, FatalError, IcReq, IcResp, PduType, R2t, TermReq,
};
use crate::{Sqe, Status};

/// A PDU that came from a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the specification's PDUs")]
pub enum Reply {
    /// The connection is initialised.
    IcResp { digest: u8, max_h2c_data: u32 },
    /// Data of a read.
    Data { cid: u16, offset: u32, bytes: Vec<u8>, last: bool, success: bool },
    /// Data of a write is asked for.
    R2t { cid: u16, ttag: u16, offset: u32, length: u32 },
    /// A command has ended.
    Resp { cid: u16, status: Status, result: u64, sq_head: u16 },
    /// The connection is ended.
    Term { error: FatalError, information: u32, excerpt: Vec<u8> },
}

/// What a host says and how it reads what it gets.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScriptedHost {
    /// Whether headers carry digests.
    pub header_digest: bool,
    /// Whether data carries digests.
    pub data_digest: bool,
    /// Alignment of data that the host asks for, in dwords, 0's based.
    pub hpda: u8,
}

fn word(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a PDU is small")
}

impl ScriptedHost {
    /// A host that asks for both digests.
    #[must_use]
    pub fn with_digests() -> Self {
        Self { header_digest: true, data_digest: true, hpda: 0 }
    }

    /// What it asks for, as the PDUs that initialise a connection say it.
    #[must_use]
    pub fn digest_bits(&self) -> u8 {
        let header = if self.header_digest { DIGEST_HEADER } else { 0 };
        header | if self.data_digest { DIGEST_DATA } else { 0 }
    }

    /// The first PDU of a connection.
    #[must_use]
    pub fn ic_req(&self) -> Vec<u8> {
        IcReq::new(self.digest_bits(), self.hpda).as_bytes().to_vec()
    }

    /// A PDU of this header and data, with `padding` bytes in front of the data.
    ///
    /// # Panics
    /// If that is more than a PDU can hold.
    #[must_use]
    pub fn pdu(&self, header: &[u8], data: &[u8], padding: usize) -> Vec<u8> {
        let mut header = header.to_vec();
        let hdgst = if self.header_digest { 4 } else { 0 };
        let ddgst = if self.data_digest && !data.is_empty() { 4 } else { 0 };
        let hlen = header.len();
        let pdo = if data.is_empty() { 0 } else { hlen + hdgst + padding };
        let body = if data.is_empty() { hlen + hdgst } else { pdo + data.len() + ddgst };
        header[1] |= if self.header_digest { FLAG_HDGST } else { 0 };
        header[1] |= if ddgst > 0 { FLAG_DDGST } else { 0 };
        header[3] = u8::try_from(pdo).expect("little padding");
        header[4..8].copy_from_slice(&word(body).to_le_bytes());
        let mut out = header.clone();
        if self.header_digest {
            out.extend(wire::crc32c(&header).to_le_bytes());
        }
        if !data.is_empty() {
            out.extend(vec![0xee; padding]);
            out.extend(data);
            if ddgst > 0 {
                out.extend(wire::crc32c(data).to_le_bytes());
            }
        }
        out
    }

    /// A command without data in its capsule.
    #[must_use]
    pub fn command(&self, sqe: Sqe) -> Vec<u8> {
        self.pdu(CapsuleCmd::new(sqe).as_bytes(), &[], 0)
    }

    /// A command with data in its capsule.
    #[must_use]
    pub fn capsule(&self, mut sqe: Sqe, data: &[u8]) -> Vec<u8> {
        sqe.sgl = Sgl::in_capsule(word(data.len()));
        self.pdu(CapsuleCmd::new(sqe).as_bytes(), data, 0)
    }

    /// A piece of data that was asked for.
    #[must_use]
    pub fn h2c(&self, cid: u16, ttag: u16, offset: u32, data: &[u8], last: bool) -> Vec<u8> {
        let mut header = DataPdu::new(PduType::H2CData, cid, ttag, offset, word(data.len()));
        header.common.flags = if last { FLAG_LAST } else { 0 };
        self.pdu(header.as_bytes(), data, 0)
    }

    /// All data that an R2T asks for, in PDUs of at most `chunk` bytes.
    ///
    /// # Panics
    /// If it is no R2T, or asks for more than there is.
    #[must_use]
    pub fn answer(&self, r2t: &Reply, data: &[u8], chunk: usize) -> Vec<u8> {
        let Reply::R2t { cid, ttag, offset, length } = *r2t else { panic!("no R2T: {r2t:?}") };
        let wanted = &data[offset as usize..(offset + length) as usize];
        let pieces = wanted.chunks(chunk).enumerate();
        pieces
            .flat_map(|(i, piece)| {
                let at = offset as usize + i * chunk;
                let last = at + piece.len() == (offset + length) as usize;
                self.h2c(cid, ttag, word(at), piece, last)
            })
            .collect()
    }

    /// Takes the whole PDUs at the start of `bytes`.
    ///
    /// # Panics
    /// If one is not what a controller sends.
    pub fn parse(&self, bytes: &mut Vec<u8>) -> Vec<Reply> {
        let mut out = Vec::new();
        while let Ok((common, _)) = CommonHeader::read_from_prefix(bytes) {
            let plen = common.plen.get() as usize;
            if bytes.len() < plen {
                break;
            }
            let rest = bytes.split_off(plen);
            let pdu = std::mem::replace(bytes, rest);
            out.push(self.reply(common, &pdu));
        }
        out
    }

    fn reply(&self, common: CommonHeader, pdu: &[u8]) -> Reply {
        let hlen = usize::from(common.hlen);
        if common.kind() == PduType::IcResp {
            let resp = IcResp::read_from_bytes(pdu).expect("its length");
            assert_eq!((hlen, resp.pfv.get(), resp.cpda, common.pdo), (128, 0, 0, 0));
            let max_h2c_data = resp.max_h2c_data.get();
            assert!(max_h2c_data >= 4096 && max_h2c_data.is_multiple_of(4));
            return Reply::IcResp { digest: resp.digest, max_h2c_data };
        }
        assert_eq!(hlen, 24, "{common:?}");
        if common.kind() == PduType::C2HTermReq {
            let (term, excerpt) = TermReq::read_from_prefix(pdu).expect("its length");
            assert_eq!((common.flags, common.pdo), (0, 0));
            assert!((24..=152).contains(&pdu.len()));
            let error = FatalError(term.status.get());
            let information = term.information.get();
            return Reply::Term { error, information, excerpt: excerpt.to_vec() };
        }
        assert_eq!(common.has(FLAG_HDGST), self.header_digest);
        let header_end = hlen + if self.header_digest { 4 } else { 0 };
        if self.header_digest {
            assert_eq!(wire::crc32c(&pdu[..hlen]).to_le_bytes(), pdu[hlen..header_end]);
        }
        match common.kind() {
            PduType::C2HData => self.data(common, pdu, header_end),
            PduType::R2T => {
                assert_eq!(pdu.len(), header_end);
                let (r2t, _) = R2t::read_from_prefix(pdu).expect("its length");
                Reply::R2t {
                    cid: r2t.command_id.get(),
                    ttag: r2t.transfer_tag.get(),
                    offset: r2t.offset.get(),
                    length: r2t.length.get(),
                }
            }
            PduType::CapsuleResp => {
                assert_eq!(pdu.len(), header_end);
                let (capsule, _) = CapsuleResp::read_from_prefix(pdu).expect("its length");
                let (cqe, status) = (capsule.cqe, capsule.cqe.status());
                let Cqe { result, sq_head, cid, .. } = cqe;
                let (cid, sq_head) = (cid.get(), sq_head.get());
                Reply::Resp { cid, status, result: result.get(), sq_head }
            }
            other => panic!("a controller does not send {other:?}"),
        }
    }

    fn data(&self, common: CommonHeader, pdu: &[u8], header_end: usize) -> Reply {
        let (header, _) = DataPdu::read_from_prefix(pdu).expect("its length");
        let pdo = usize::from(common.pdo);
        let alignment = (usize::from(self.hpda) + 1) * 4;
        assert!(pdo >= header_end && pdo.is_multiple_of(alignment), "PDO {pdo}");
        let trailer = if self.data_digest { 4 } else { 0 };
        assert_eq!(common.has(FLAG_DDGST), self.data_digest);
        let bytes = pdu[pdo..pdu.len() - trailer].to_vec();
        assert_eq!(bytes.len(), header.length.get() as usize);
        if self.data_digest {
            assert_eq!(wire::crc32c(&bytes).to_le_bytes(), pdu[pdu.len() - 4..]);
        }
        let (last, success) = (common.has(FLAG_LAST), common.has(FLAG_SUCCESS));
        assert!(last || !success, "SUCCESS without LAST");
        let (cid, offset) = (header.command_id.get(), header.offset.get());
        Reply::Data { cid, offset, bytes, last, success }
    }
}
