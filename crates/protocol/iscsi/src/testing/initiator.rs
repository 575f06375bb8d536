//! What an initiator says, byte by byte.

use wire::crc32c;
use zerocopy::big_endian::{U16, U32};

use crate::pdu::{
    BHS_LEN, CONTINUE, DataOut, FINAL, Header, IMMEDIATE, LoginRequest, LoginStage, LogoutRequest,
    NO_TAG, NopOut, Opcode, ScsiCommand, TaskFunction, TaskRequest, TextRequest, padding,
    segment_len,
};
use crate::text::Pairs;

/// A PDU that came from the target.
#[derive(Clone, PartialEq, Eq)]
pub struct Pdu {
    /// Its basic header.
    pub header: [u8; BHS_LEN],
    /// Its data segment.
    pub data: Vec<u8>,
}

impl Pdu {
    /// What it is.
    #[must_use]
    pub fn opcode(&self) -> Opcode {
        Header::of(&self.header).opcode()
    }

    /// Its initiator task tag.
    #[must_use]
    pub fn itt(&self) -> u32 {
        Header::of(&self.header).itt.get()
    }

    /// The big-endian word at byte `at` of its header.
    #[must_use]
    pub fn word(&self, at: usize) -> u32 {
        let bytes = self.header[at..at + 4].try_into().expect("four bytes");
        u32::from_be_bytes(bytes)
    }

    /// Its data as text.
    #[must_use]
    pub fn text(&self) -> Vec<(String, String)> {
        let own = |(k, v): (&str, &str)| (k.to_string(), v.to_string());
        Pairs::of(&self.data).map(|p| own(p.expect("a target's text is proper"))).collect()
    }

    /// The value of `key` in its text.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<String> {
        self.text().into_iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }
}

impl std::fmt::Debug for Pdu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:02x?} and {} bytes", self.opcode(), self.header, self.data.len())
    }
}

/// An initiator. All numbers can be changed to wrong ones.
#[derive(Clone, Debug)]
pub struct ScriptedInitiator {
    /// Number of the next command.
    pub cmd_sn: u32,
    /// Number of the next status, followed from what comes.
    pub exp_stat_sn: u32,
    /// Tag of the next task.
    pub itt: u32,
    /// Whether headers carry digests, both ways.
    pub header_digest: bool,
    /// Whether data carries digests, both ways.
    pub data_digest: bool,
    /// Session identifier.
    pub isid: [u8; 6],
    /// The unit that commands and requests are for.
    pub lun: [u8; 8],
    /// Session to be joined.
    pub tsih: u16,
    /// Connection identifier.
    pub cid: u16,
    received: Vec<u8>,
    /// Whether the target's first status number is known.
    synced: bool,
}

impl Default for ScriptedInitiator {
    fn default() -> Self {
        Self {
            cmd_sn: 1,
            exp_stat_sn: 0,
            itt: 0x10,
            header_digest: false,
            data_digest: false,
            lun: [0, 1, 0, 0, 0, 0, 0, 0],
            isid: [0x40, 0, 1, 0x37, 0, 0],
            tsih: 0,
            cid: 0,
            received: Vec::new(),
            synced: false,
        }
    }
}

/// Text of these pairs.
#[must_use]
pub(super) fn text(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (key, value) in pairs {
        crate::text::push(&mut out, key, value);
    }
    out
}

impl ScriptedInitiator {
    /// A PDU's bytes: lengths, padding and digests added.
    #[must_use]
    pub fn frame(&self, header: &[u8; BHS_LEN], data: &[u8]) -> Vec<u8> {
        self.frame_with_ahs(header, &[], data)
    }

    /// The same with additional header segments, a multiple of four bytes.
    #[must_use]
    pub fn frame_with_ahs(&self, header: &[u8; BHS_LEN], ahs: &[u8], data: &[u8]) -> Vec<u8> {
        let mut out = header.to_vec();
        out[4] = u8::try_from(ahs.len() / 4).expect("at most 255 words");
        out[5..8].copy_from_slice(&segment_len(data.len()));
        out.extend(ahs);
        if self.header_digest {
            let crc = crc32c(&out);
            out.extend(crc.to_le_bytes());
        }
        if !data.is_empty() {
            let start = out.len();
            out.extend(data);
            out.resize(out.len() + padding(data.len()), 0);
            if self.data_digest {
                let crc = crc32c(&out[start..]);
                out.extend(crc.to_le_bytes());
            }
        }
        out
    }

    /// A login request; `next` sets T.
    #[must_use]
    pub fn login(
        &self,
        stage: LoginStage,
        next: Option<LoginStage>,
        pairs: &[(&str, &str)],
    ) -> Vec<u8> {
        self.login_text(stage, next, false, &text(pairs))
    }

    /// A login request with any text; `continues` sets C.
    #[must_use]
    pub fn login_text(
        &self,
        stage: LoginStage,
        next: Option<LoginStage>,
        continues: bool,
        text: &[u8],
    ) -> Vec<u8> {
        let mut pdu = LoginRequest::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = stage.0 << 2 | next.map_or(0, |n| FINAL | n.0);
        if continues {
            pdu.flags |= CONTINUE;
        }
        pdu.isid = self.isid;
        pdu.tsih = U16::new(self.tsih);
        pdu.cid = U16::new(self.cid);
        pdu.itt = U32::new(self.itt);
        pdu.cmd_sn = U32::new(self.cmd_sn);
        pdu.exp_stat_sn = U32::new(self.exp_stat_sn);
        self.frame(pdu.as_bytes(), text)
    }

    /// Header of a command with the next numbers. `flags` are R, W and attribute; F is set.
    pub fn command_header(&mut self, cdb: &[u8], flags: u8, expected_len: u32) -> ScsiCommand {
        let mut pdu = ScsiCommand::zeroed();
        pdu.flags = FINAL | flags;
        pdu.lun = self.lun;
        pdu.itt = U32::new(self.itt);
        pdu.expected_len = U32::new(expected_len);
        pdu.cmd_sn = U32::new(self.cmd_sn);
        pdu.exp_stat_sn = U32::new(self.exp_stat_sn);
        pdu.cdb[..cdb.len()].copy_from_slice(cdb);
        self.itt += 1;
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        pdu
    }

    /// A command with immediate data.
    pub fn command(&mut self, cdb: &[u8], flags: u8, expected_len: u32, data: &[u8]) -> Vec<u8> {
        let header = self.command_header(cdb, flags, expected_len);
        self.frame(header.as_bytes(), data)
    }

    /// A Data-Out PDU.
    #[must_use]
    pub fn data_out(
        &self,
        itt: u32,
        ttt: u32,
        data_sn: u32,
        offset: u32,
        last: bool,
        data: &[u8],
    ) -> Vec<u8> {
        let mut pdu = DataOut::zeroed();
        pdu.flags = if last { FINAL } else { 0 };
        pdu.itt = U32::new(itt);
        pdu.ttt = U32::new(ttt);
        pdu.exp_stat_sn = U32::new(self.exp_stat_sn);
        pdu.data_sn = U32::new(data_sn);
        pdu.offset = U32::new(offset);
        self.frame(pdu.as_bytes(), data)
    }

    /// An immediate ping.
    pub fn ping(&mut self, data: &[u8]) -> Vec<u8> {
        let mut pdu = NopOut::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = FINAL;
        pdu.itt = U32::new(self.next_itt());
        pdu.ttt = U32::new(NO_TAG);
        pdu.cmd_sn = U32::new(self.cmd_sn);
        self.frame(pdu.as_bytes(), data)
    }

    /// The answer to a target's ping.
    #[must_use]
    pub fn pong(&self, ttt: u32) -> Vec<u8> {
        let mut pdu = NopOut::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = FINAL;
        pdu.itt = U32::new(NO_TAG);
        pdu.ttt = U32::new(ttt);
        pdu.cmd_sn = U32::new(self.cmd_sn);
        self.frame(pdu.as_bytes(), &[])
    }

    /// Header of an immediate text request, F set.
    pub fn text_header(&mut self, ttt: u32) -> TextRequest {
        let mut pdu = TextRequest::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = FINAL;
        pdu.itt = U32::new(if ttt == NO_TAG { self.next_itt() } else { self.itt - 1 });
        pdu.ttt = U32::new(ttt);
        pdu.cmd_sn = U32::new(self.cmd_sn);
        pdu
    }

    /// An immediate text request.
    pub fn text(&mut self, ttt: u32, pairs: &[(&str, &str)]) -> Vec<u8> {
        let header = self.text_header(ttt);
        self.frame(header.as_bytes(), &text(pairs))
    }

    /// An immediate task management request.
    pub fn task(&mut self, function: TaskFunction, referenced: u32, ref_cmd_sn: u32) -> Vec<u8> {
        let mut pdu = TaskRequest::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = FINAL | function.0;
        pdu.lun = self.lun;
        pdu.itt = U32::new(self.next_itt());
        pdu.referenced = U32::new(referenced);
        pdu.cmd_sn = U32::new(self.cmd_sn);
        pdu.ref_cmd_sn = U32::new(ref_cmd_sn);
        self.frame(pdu.as_bytes(), &[])
    }

    /// An immediate logout request.
    pub fn logout(&mut self, reason: u8, cid: u16) -> Vec<u8> {
        let mut pdu = LogoutRequest::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = FINAL | reason;
        pdu.itt = U32::new(self.next_itt());
        pdu.cid = U16::new(cid);
        pdu.cmd_sn = U32::new(self.cmd_sn);
        self.frame(pdu.as_bytes(), &[])
    }

    fn next_itt(&mut self) -> u32 {
        self.itt += 1;
        self.itt - 1
    }

    /// Takes bytes from the target apart; keeps what is not whole yet.
    ///
    /// # Panics
    /// If digests or padding are wrong, or a status number is not the next one.
    pub fn receive(&mut self, bytes: &[u8]) -> Vec<Pdu> {
        self.received.extend(bytes);
        std::iter::from_fn(|| self.next_pdu()).collect()
    }

    fn next_pdu(&mut self) -> Option<Pdu> {
        let header: [u8; BHS_LEN] = *self.received.first_chunk()?;
        let len = Header::of(&header).data_segment_len();
        let mut at = BHS_LEN;
        if self.header_digest {
            let digest = self.received.get(at..at + 4)?;
            assert_eq!(digest, crc32c(&header).to_le_bytes(), "header digest");
            at += 4;
        }
        let data = self.received.get(at..at + len)?.to_vec();
        let padded = len + padding(len);
        assert!(self.received.get(at + len..at + padded)?.iter().all(|&b| b == 0), "padding");
        if self.data_digest && len > 0 {
            let digest = self.received.get(at + padded..at + padded + 4)?;
            let expect = crc32c(&self.received[at..at + padded]);
            assert_eq!(digest, expect.to_le_bytes(), "data digest");
            at += 4;
        }
        self.received.drain(..at + padded);
        let pdu = Pdu { header, data };
        self.check_status(&pdu);
        Some(pdu)
    }

    /// RFC 7143 4.2.2.2: status numbers follow each other.
    fn check_status(&mut self, pdu: &Pdu) {
        let numbered = match pdu.opcode() {
            Opcode::DataIn => pdu.header[1] & 1 != 0,
            Opcode::R2t => false,
            Opcode::NopIn => pdu.itt() != NO_TAG,
            _ => true,
        };
        if numbered {
            if !std::mem::replace(&mut self.synced, true) {
                self.exp_stat_sn = pdu.word(24);
            }
            assert_eq!(pdu.word(24), self.exp_stat_sn, "StatSN of {pdu:?}");
            self.exp_stat_sn = self.exp_stat_sn.wrapping_add(1);
        }
    }
}
