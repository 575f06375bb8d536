//! Text keys and the parameters they negotiate (RFC 7143 12 and 13).

use crate::pdu::MAX_SEGMENT;
use crate::stream::Digests;
use crate::value::{IRRELEVANT, NOT_UNDERSTOOD, REJECT, choose, from_bool, number, yes_no};

/// A known key.
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
pub enum KeyUse {
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

const KEYS: [(&str, Key, KeyUse); 34] = [
    ("InitiatorName", Key::InitiatorName, KeyUse::Identity),
    ("TargetName", Key::TargetName, KeyUse::Identity),
    ("SessionType", Key::SessionType, KeyUse::Identity),
    ("InitiatorAlias", Key::InitiatorAlias, KeyUse::Any),
    ("AuthMethod", Key::AuthMethod, KeyUse::Security),
    ("CHAP_A", Key::ChapA, KeyUse::Security),
    ("CHAP_I", Key::ChapI, KeyUse::Security),
    ("CHAP_C", Key::ChapC, KeyUse::Security),
    ("CHAP_N", Key::ChapN, KeyUse::Security),
    ("CHAP_R", Key::ChapR, KeyUse::Security),
    ("HeaderDigest", Key::HeaderDigest, KeyUse::Operational),
    ("DataDigest", Key::DataDigest, KeyUse::Operational),
    ("MaxConnections", Key::MaxConnections, KeyUse::Operational),
    ("InitialR2T", Key::InitialR2T, KeyUse::Operational),
    ("ImmediateData", Key::ImmediateData, KeyUse::Operational),
    ("MaxRecvDataSegmentLength", Key::MaxRecvDataSegmentLength, KeyUse::Any),
    ("MaxBurstLength", Key::MaxBurstLength, KeyUse::Operational),
    ("FirstBurstLength", Key::FirstBurstLength, KeyUse::Operational),
    ("DefaultTime2Wait", Key::DefaultTime2Wait, KeyUse::Operational),
    ("DefaultTime2Retain", Key::DefaultTime2Retain, KeyUse::Operational),
    ("MaxOutstandingR2T", Key::MaxOutstandingR2T, KeyUse::Operational),
    ("DataPDUInOrder", Key::DataPDUInOrder, KeyUse::Operational),
    ("DataSequenceInOrder", Key::DataSequenceInOrder, KeyUse::Operational),
    ("ErrorRecoveryLevel", Key::ErrorRecoveryLevel, KeyUse::Operational),
    ("TaskReporting", Key::TaskReporting, KeyUse::Operational),
    ("iSCSIProtocolLevel", Key::ProtocolLevel, KeyUse::Operational),
    ("IFMarker", Key::IFMarker, KeyUse::Operational),
    ("OFMarker", Key::OFMarker, KeyUse::Operational),
    ("IFMarkInt", Key::IFMarkInt, KeyUse::Operational),
    ("OFMarkInt", Key::OFMarkInt, KeyUse::Operational),
    ("SendTargets", Key::SendTargets, KeyUse::FullFeature),
    ("TargetAlias", Key::TargetAlias, KeyUse::Target),
    ("TargetAddress", Key::TargetAddress, KeyUse::Target),
    ("TargetPortalGroupTag", Key::TargetPortalGroupTag, KeyUse::Target),
];

impl Key {
    /// Finds a key by name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        KEYS.iter().find(|(n, ..)| *n == name).map(|&(_, key, _)| key)
    }

    /// Where it may be used.
    #[must_use]
    pub fn key_use(self) -> KeyUse {
        KEYS[self as usize].2
    }

    /// A set with this key alone.
    #[must_use]
    pub fn bit(self) -> u64 {
        1 << (self as u32)
    }
}

/// Limits of the negotiation.
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
    /// Whether data beyond immediate data needs an R2T.
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

/// Negotiated parameters; initially the defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Params {
    /// Whether headers carry CRC-32C.
    pub header_digest: bool,
    /// Whether data carries CRC-32C.
    pub data_digest: bool,
    /// Whether data beyond immediate data needs an R2T.
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
pub struct IllegalDeclaration;

const SEGMENT: std::ops::RangeInclusive<u32> = 512..=MAX_SEGMENT;

impl Params {
    /// Handles an initiator's offer for an operational key and returns the answer; `None` if none
    /// is due.
    ///
    /// # Errors
    /// [`IllegalDeclaration`] for a declaration that is out of range.
    pub fn answer(
        &mut self,
        key: Key,
        value: &str,
        limits: &Limits,
    ) -> Result<Option<String>, IllegalDeclaration> {
        if key == Key::MaxRecvDataSegmentLength {
            let len = number(value).filter(|n| SEGMENT.contains(n)).ok_or(IllegalDeclaration)?;
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

    /// The initial parameters of a further connection of the session: digests and segment lengths
    /// are per connection.
    #[must_use]
    pub fn for_further_connection(&self) -> Self {
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

    /// Makes the parameters consistent
    pub fn clamp_first_burst(&mut self) {
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
            assert_eq!((Key::from_name(name), *key as usize), (Some(*key), i));
        }
        assert_eq!(Key::from_name("initiatorname"), None);
    }

    fn answers(offers: &[(&str, &str)], limits: &Limits) -> (Vec<String>, Params) {
        let mut params = Params::default();
        let mut out = Vec::new();
        for (name, value) in offers {
            let key = Key::from_name(name).unwrap();
            out.push(params.answer(key, value, limits).unwrap().unwrap_or_default());
        }
        params.clamp_first_burst();
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
            assert_eq!(got, Err(IllegalDeclaration), "{bad}");
        }
    }

    /// RFC 7143 13.14.
    #[test]
    fn the_first_burst_stays_within_a_burst() {
        let offers = [("FirstBurstLength", "262144"), ("MaxBurstLength", "16384")];
        assert_eq!(answers(&offers, &Limits::default()).1.first_burst, 16_384);
    }
}
