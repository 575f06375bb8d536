//! Text keys and the parameters they negotiate (RFC 7143 12 and 13).

use crate::pdu::MAX_SEGMENT;
use crate::stream::Digests;
use crate::value::{IRRELEVANT, NOT_UNDERSTOOD, REJECT, choose, from_bool, number, yes_no};

/// A key that has a meaning to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the RFC's, and so are the meanings")]
pub enum Key {
    InitiatorName,
    TargetName,
    SessionType,
    InitiatorAlias,
    AuthMethod,
    ChapA,
    ChapI,
    ChapC,
    ChapN,
    ChapR,
    HeaderDigest,
    DataDigest,
    MaxConnections,
    InitialR2T,
    ImmediateData,
    MaxRecvDataSegmentLength,
    MaxBurstLength,
    FirstBurstLength,
    DefaultTime2Wait,
    DefaultTime2Retain,
    MaxOutstandingR2T,
    DataPDUInOrder,
    DataSequenceInOrder,
    ErrorRecoveryLevel,
    TaskReporting,
    ProtocolLevel,
    IFMarker,
    OFMarker,
    IFMarkInt,
    OFMarkInt,
    SendTargets,
    TargetAlias,
    TargetAddress,
    TargetPortalGroupTag,
}

/// Where a key may be used (RFC 7143 13, "Use").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// In the first login request.
    Identity,
    /// In the security stage.
    Security,
    /// In the operational stage.
    Operational,
    /// At any time.
    Any,
    /// In the full feature phase.
    FullFeature,
    /// By targets.
    Target,
}

const KEYS: [(&str, Key, Use); 34] = [
    ("InitiatorName", Key::InitiatorName, Use::Identity),
    ("TargetName", Key::TargetName, Use::Identity),
    ("SessionType", Key::SessionType, Use::Identity),
    ("InitiatorAlias", Key::InitiatorAlias, Use::Any),
    ("AuthMethod", Key::AuthMethod, Use::Security),
    ("CHAP_A", Key::ChapA, Use::Security),
    ("CHAP_I", Key::ChapI, Use::Security),
    ("CHAP_C", Key::ChapC, Use::Security),
    ("CHAP_N", Key::ChapN, Use::Security),
    ("CHAP_R", Key::ChapR, Use::Security),
    ("HeaderDigest", Key::HeaderDigest, Use::Operational),
    ("DataDigest", Key::DataDigest, Use::Operational),
    ("MaxConnections", Key::MaxConnections, Use::Operational),
    ("InitialR2T", Key::InitialR2T, Use::Operational),
    ("ImmediateData", Key::ImmediateData, Use::Operational),
    ("MaxRecvDataSegmentLength", Key::MaxRecvDataSegmentLength, Use::Any),
    ("MaxBurstLength", Key::MaxBurstLength, Use::Operational),
    ("FirstBurstLength", Key::FirstBurstLength, Use::Operational),
    ("DefaultTime2Wait", Key::DefaultTime2Wait, Use::Operational),
    ("DefaultTime2Retain", Key::DefaultTime2Retain, Use::Operational),
    ("MaxOutstandingR2T", Key::MaxOutstandingR2T, Use::Operational),
    ("DataPDUInOrder", Key::DataPDUInOrder, Use::Operational),
    ("DataSequenceInOrder", Key::DataSequenceInOrder, Use::Operational),
    ("ErrorRecoveryLevel", Key::ErrorRecoveryLevel, Use::Operational),
    ("TaskReporting", Key::TaskReporting, Use::Operational),
    ("iSCSIProtocolLevel", Key::ProtocolLevel, Use::Operational),
    ("IFMarker", Key::IFMarker, Use::Operational),
    ("OFMarker", Key::OFMarker, Use::Operational),
    ("IFMarkInt", Key::IFMarkInt, Use::Operational),
    ("OFMarkInt", Key::OFMarkInt, Use::Operational),
    ("SendTargets", Key::SendTargets, Use::FullFeature),
    ("TargetAlias", Key::TargetAlias, Use::Target),
    ("TargetAddress", Key::TargetAddress, Use::Target),
    ("TargetPortalGroupTag", Key::TargetPortalGroupTag, Use::Target),
];

impl Key {
    /// The key of this name. Names are compared exactly.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        KEYS.iter().find(|(n, ..)| *n == name).map(|&(_, key, _)| key)
    }

    /// Where it may be used.
    #[must_use]
    pub fn used(self) -> Use {
        KEYS[self as usize].2
    }

    /// A set with this key alone.
    #[must_use]
    pub fn bit(self) -> u64 {
        1 << (self as u32)
    }
}

/// What a target is willing to agree to.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest data segment that it receives, in bytes: 512 to 2^24 − 1.
    pub max_segment: u32,
    /// Longest sequence of data PDUs, in bytes: 512 to 2^24 − 1.
    pub max_burst: u32,
    /// Most unsolicited data, in bytes; at most `max_burst`.
    pub first_burst: u32,
    /// Most R2Ts outstanding for one command.
    pub max_outstanding_r2t: u16,
    /// Whether data beyond the immediate waits for an R2T.
    pub initial_r2t: bool,
    /// Whether commands may carry data.
    pub immediate_data: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_segment: 256 * 1024,
            max_burst: 1024 * 1024,
            first_burst: 256 * 1024,
            max_outstanding_r2t: 4,
            initial_r2t: false,
            immediate_data: true,
        }
    }
}

/// What holds for a session; begins with the values that hold without negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Params {
    /// Whether headers carry CRC-32C.
    pub header_digest: bool,
    /// Whether data carries CRC-32C.
    pub data_digest: bool,
    /// Whether data beyond the immediate waits for an R2T.
    pub initial_r2t: bool,
    /// Whether commands may carry data.
    pub immediate_data: bool,
    /// Longest data segment that the initiator receives, in bytes.
    pub initiator_max_segment: u32,
    /// Longest data segment that the target receives, in bytes.
    pub target_max_segment: u32,
    /// Longest sequence of data PDUs, in bytes.
    pub max_burst: u32,
    /// Most unsolicited data of a command, in bytes.
    pub first_burst: u32,
    /// Most R2Ts outstanding for one command.
    pub max_outstanding_r2t: u16,
    /// Seconds before an initiator should connect again.
    pub time2wait: u16,
    /// Seconds for which tasks outlive their connection.
    pub time2retain: u16,
}

/// Longest data segment before anything is declared (RFC 7143 13.12), in bytes.
pub const DEFAULT_SEGMENT: u32 = 8192;

impl Default for Params {
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            initial_r2t: true,
            immediate_data: true,
            initiator_max_segment: DEFAULT_SEGMENT,
            target_max_segment: DEFAULT_SEGMENT,
            max_burst: 262_144,
            first_burst: 65_536,
            max_outstanding_r2t: 1,
            time2wait: 2,
            time2retain: 20,
        }
    }
}

/// A declaration outside what the key allows; it cannot be answered, only refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key was declared with a value it must not have")]
pub struct Illegal;

const SEGMENT: std::ops::RangeInclusive<u32> = 512..=MAX_SEGMENT;

impl Params {
    /// Takes an initiator's offer for an operational key and says what to answer; `None` where
    /// no answer is due.
    ///
    /// # Errors
    /// [`Illegal`] for a declaration that is out of range.
    pub fn answer(
        &mut self,
        key: Key,
        value: &str,
        limits: &Limits,
    ) -> Result<Option<String>, Illegal> {
        if key == Key::MaxRecvDataSegmentLength {
            let len = number(value).filter(|n| SEGMENT.contains(n)).ok_or(Illegal)?;
            self.initiator_max_segment = len;
            return Ok(None);
        }
        if [IRRELEVANT, NOT_UNDERSTOOD, REJECT].contains(&value) {
            return Ok(None);
        }
        let agreed = match key {
            Key::HeaderDigest => digest(value, &mut self.header_digest),
            Key::DataDigest => digest(value, &mut self.data_digest),
            Key::InitialR2T
            | Key::ImmediateData
            | Key::DataPDUInOrder
            | Key::DataSequenceInOrder => self.boolean(key, value, limits),
            Key::TaskReporting => {
                choose(value, |v| ["RFC3720", "ResponseFence"].into_iter().find(|k| *k == v))
                    .map(String::from)
            }
            // RFC 7143 13.25 lets a responder say `No` to these; older initiators expect it.
            Key::IFMarker | Key::OFMarker => Some(from_bool(false).into()),
            _ => self.numerical(key, value, limits).map(|n| n.to_string()),
        };
        Ok(Some(agreed.unwrap_or_else(|| REJECT.into())))
    }

    fn boolean(&mut self, key: Key, value: &str, limits: &Limits) -> Option<String> {
        let offer = yes_no(value)?;
        let agreed = match key {
            Key::InitialR2T => {
                self.initial_r2t = offer || limits.initial_r2t;
                self.initial_r2t
            }
            Key::ImmediateData => {
                self.immediate_data = offer && limits.immediate_data;
                self.immediate_data
            }
            _ => true,
        };
        Some(from_bool(agreed).into())
    }

    fn numerical(&mut self, key: Key, value: &str, limits: &Limits) -> Option<u32> {
        let within =
            |range: std::ops::RangeInclusive<u32>| number(value).filter(|n| range.contains(n));
        let short = |n: u32| u16::try_from(n).ok();
        Some(match key {
            Key::MaxConnections => within(1..=65_535)?.min(1),
            Key::MaxBurstLength => {
                self.max_burst = within(SEGMENT)?.min(limits.max_burst);
                self.max_burst
            }
            Key::FirstBurstLength => {
                self.first_burst = within(SEGMENT)?.min(limits.first_burst).min(limits.max_burst);
                self.first_burst
            }
            Key::MaxOutstandingR2T => {
                let ours = limits.max_outstanding_r2t.max(1);
                self.max_outstanding_r2t = short(within(1..=65_535)?)?.min(ours);
                self.max_outstanding_r2t.into()
            }
            Key::DefaultTime2Wait => {
                self.time2wait = short(within(0..=3600)?)?;
                self.time2wait.into()
            }
            Key::DefaultTime2Retain => {
                // Without error recovery nothing is kept.
                within(0..=3600)?;
                self.time2retain = 0;
                0
            }
            Key::ErrorRecoveryLevel => within(0..=2).map(|_| 0)?,
            Key::ProtocolLevel => within(0..=31)?.min(1),
            _ => return None,
        })
    }

    /// What a further connection of the session begins with: digests and lengths of segments are each connection's own.
    #[must_use]
    pub fn of_session(&self) -> Self {
        let own = Self::default();
        Self {
            header_digest: own.header_digest,
            data_digest: own.data_digest,
            initiator_max_segment: own.initiator_max_segment,
            target_max_segment: own.target_max_segment,
            ..self.clone()
        }
    }

    /// Digests agreed on.
    #[must_use]
    pub fn digests(&self) -> Digests {
        Digests { header: self.header_digest, data: self.data_digest }
    }

    /// Makes what was agreed consistent (RFC 7143 13.14: the first burst is within a burst).
    pub fn settle(&mut self) {
        self.first_burst = self.first_burst.min(self.max_burst);
    }
}

fn digest(list: &str, on: &mut bool) -> Option<String> {
    let known = ["CRC32C", "None"];
    let chosen = choose(list, |v| known.into_iter().find(|k| *k == v))?;
    *on = chosen == "CRC32C";
    Some(chosen.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_keys() {
        for (i, (name, key, _)) in KEYS.iter().enumerate() {
            assert_eq!((Key::of(name), *key as usize), (Some(*key), i));
        }
        assert_eq!(Key::of("initiatorname"), None);
    }

    fn answers(offers: &[(&str, &str)], limits: &Limits) -> (Vec<String>, Params) {
        let mut params = Params::default();
        let mut out = Vec::new();
        for (name, value) in offers {
            let key = Key::of(name).unwrap();
            out.push(params.answer(key, value, limits).unwrap().unwrap_or_default());
        }
        params.settle();
        (out, params)
    }

    /// RFC 7143 13: result functions of all operational keys.
    #[test]
    fn every_key_has_its_result_function() {
        let limits = Limits { first_burst: 32_768, ..Limits::default() };
        let (got, params) = answers(
            &[
                ("HeaderDigest", "None,CRC32C"),
                ("DataDigest", "CRC32C,None"),
                ("MaxConnections", "8"),
                ("InitialR2T", "No"),
                ("ImmediateData", "No"),
                ("MaxRecvDataSegmentLength", "65536"),
                ("MaxBurstLength", "16776192"),
                ("FirstBurstLength", "0x40000"),
                ("DefaultTime2Wait", "5"),
                ("DefaultTime2Retain", "60"),
                ("MaxOutstandingR2T", "16"),
                ("DataPDUInOrder", "No"),
                ("DataSequenceInOrder", "No"),
                ("ErrorRecoveryLevel", "2"),
                ("TaskReporting", "FastAbort,ResponseFence,RFC3720"),
                ("iSCSIProtocolLevel", "2"),
                ("IFMarker", "Yes"),
                ("OFMarkInt", "512~1024"),
            ],
            &limits,
        );
        let expect = [
            "None",
            "CRC32C",
            "1",
            "No",
            "No",
            "",
            "1048576",
            "32768",
            "5",
            "0",
            "4",
            "Yes",
            "Yes",
            "0",
            "ResponseFence",
            "1",
            "No",
            "Reject",
        ];
        assert_eq!(got, expect);
        assert!(!params.header_digest && params.data_digest);
        assert!(!params.initial_r2t && !params.immediate_data);
        assert_eq!(params.initiator_max_segment, 65_536);
        assert_eq!((params.max_burst, params.first_burst), (1_048_576, 32_768));
        assert_eq!((params.max_outstanding_r2t, params.time2wait, params.time2retain), (4, 5, 0));
    }

    /// RFC 7143 6.2.2: what is not admissible is answered with `Reject` and changes nothing.
    #[test]
    fn inadmissible_offers_are_rejected() {
        let bad = [
            ("HeaderDigest", "CRC64"),
            ("InitialR2T", "yes"),
            ("MaxBurstLength", "511"),
            ("FirstBurstLength", "16777216"),
            ("MaxOutstandingR2T", "0"),
            ("MaxConnections", "-1"),
            ("ErrorRecoveryLevel", "3"),
            ("TaskReporting", "FastAbort"),
        ];
        let (got, params) = answers(&bad, &Limits::default());
        assert!(got.iter().all(|a| a == "Reject"), "{got:?}");
        assert_eq!(params, Params::default());
        let irrelevant = answers(&[("MaxBurstLength", "Irrelevant")], &Limits::default());
        assert_eq!(irrelevant.0, [""]);
    }

    /// RFC 7143 13.12.
    #[test]
    fn a_declaration_out_of_range_is_illegal() {
        for bad in ["511", "16777216", "many", "Reject"] {
            let key = Key::MaxRecvDataSegmentLength;
            let got = Params::default().answer(key, bad, &Limits::default());
            assert_eq!(got, Err(Illegal), "{bad}");
        }
    }

    /// RFC 7143 13.14.
    #[test]
    fn the_first_burst_stays_within_a_burst() {
        let offers = [("FirstBurstLength", "262144"), ("MaxBurstLength", "16384")];
        assert_eq!(answers(&offers, &Limits::default()).1.first_burst, 16_384);
    }
}
