//! Operational parameters, from the offering side (RFC 7143 13).

use std::ops::RangeInclusive;

use super::config::Config;
use crate::params::{Key, Params};
use crate::pdu::MAX_SEGMENT;
use crate::text;
use crate::value::{IRRELEVANT, NOT_UNDERSTOOD, REJECT, from_bool, number, yes_no};

const SEGMENT: RangeInclusive<u32> = 512..=MAX_SEGMENT;

/// Parameters before the target has answered.
pub(super) fn initial_params(config: &Config) -> Params {
    let own = Params::default();
    Params {
        immediate_data: config.limits.immediate_data,
        initiator_max_segment: config.limits.max_segment.clamp(512, MAX_SEGMENT),
        first_burst: own.first_burst.min(config.limits.first_burst),
        ..own
    }
}

/// All offers at once.
pub(super) fn offer(config: &Config, reply: &mut Vec<u8>) {
    let digest = |on| if on { "CRC32C,None" } else { "None,CRC32C" };
    let limits = &config.limits;
    text::push(reply, "HeaderDigest", digest(config.digests.header));
    text::push(reply, "DataDigest", digest(config.digests.data));
    text::push(reply, "MaxRecvDataSegmentLength", initial_params(config).initiator_max_segment);
    text::push(reply, "DefaultTime2Wait", 0);
    text::push(reply, "DefaultTime2Retain", 0);
    text::push(reply, "ErrorRecoveryLevel", 0);
    if config.target.is_none() {
        // RFC 7143 4.3: the other keys are irrelevant in a discovery session.
        return;
    }
    text::push(reply, "InitialR2T", from_bool(limits.initial_r2t));
    text::push(reply, "ImmediateData", from_bool(limits.immediate_data));
    text::push(reply, "MaxBurstLength", limits.max_burst);
    text::push(reply, "FirstBurstLength", limits.first_burst.min(limits.max_burst));
    text::push(reply, "MaxOutstandingR2T", limits.max_outstanding_r2t.max(1));
    text::push(reply, "MaxConnections", 1);
    text::push(reply, "DataPDUInOrder", "Yes");
    text::push(reply, "DataSequenceInOrder", "Yes");
}

/// Whether a key was offered, or may be declared by a target.
pub(super) fn is_answer(key: Key) -> bool {
    matches!(
        key,
        Key::HeaderDigest
            | Key::DataDigest
            | Key::MaxRecvDataSegmentLength
            | Key::DefaultTime2Wait
            | Key::DefaultTime2Retain
            | Key::ErrorRecoveryLevel
            | Key::InitialR2T
            | Key::ImmediateData
            | Key::MaxBurstLength
            | Key::FirstBurstLength
            | Key::MaxOutstandingR2T
            | Key::MaxConnections
            | Key::DataPDUInOrder
            | Key::DataSequenceInOrder
    )
}

/// Handles a target's answer or declaration; `None` for an invalid one. Keys that a target rejects
/// or does not understand keep their defaults.
pub(super) fn apply_answer(
    params: &mut Params,
    key: Key,
    value: &str,
    config: &Config,
) -> Option<()> {
    let limits = &config.limits;
    if key == Key::MaxRecvDataSegmentLength {
        params.target_max_segment = within(value, SEGMENT)?;
        return Some(());
    }
    if [IRRELEVANT, NOT_UNDERSTOOD, REJECT].contains(&value) {
        return Some(());
    }
    match key {
        Key::HeaderDigest => params.header_digest = digest(value)?,
        Key::DataDigest => params.data_digest = digest(value)?,
        // One side that wants it is enough.
        Key::InitialR2T => {
            params.initial_r2t = yes_no(value).filter(|agreed| *agreed || !limits.initial_r2t)?;
        }
        // Both sides have to want it.
        Key::ImmediateData => {
            params.immediate_data =
                yes_no(value).filter(|agreed| !*agreed || limits.immediate_data)?;
        }
        Key::MaxBurstLength => params.max_burst = within(value, 512..=limits.max_burst)?,
        Key::FirstBurstLength => {
            let most = limits.first_burst.min(limits.max_burst);
            params.first_burst = within(value, 512..=most)?;
        }
        Key::MaxOutstandingR2T => {
            let most = limits.max_outstanding_r2t.max(1);
            params.max_outstanding_r2t = u16_from(within(value, 1..=most.into())?)?;
        }
        Key::DefaultTime2Wait => params.time2wait = u16_from(within(value, 0..=3600)?)?,
        // Some targets answer with their own preference: nothing is retained here anyway.
        Key::DefaultTime2Retain => params.time2retain = u16_from(within(value, 0..=3600)?)?,
        Key::ErrorRecoveryLevel => return within(value, 0..=0).map(drop),
        Key::MaxConnections => return within(value, 1..=1).map(drop),
        Key::DataPDUInOrder | Key::DataSequenceInOrder => {
            return yes_no(value).filter(|agreed| *agreed).map(drop);
        }
        _ => return None,
    }
    Some(())
}

fn within(value: &str, range: RangeInclusive<u32>) -> Option<u32> {
    number(value).filter(|n| range.contains(n))
}

fn u16_from(n: u32) -> Option<u16> {
    u16::try_from(n).ok()
}

fn digest(value: &str) -> Option<bool> {
    match value {
        "CRC32C" => Some(true),
        "None" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Limits;

    fn config() -> Config {
        let limits = Limits { initial_r2t: true, immediate_data: false, ..Limits::default() };
        Config {
            limits,
            ..Config::new("iqn.2026-01.com.example:host".parse().unwrap(), None, [0; 6])
        }
    }

    /// RFC 7143 13: an answer is within what was offered.
    #[test]
    fn answers_stay_within_offers() {
        let config = config();
        let refused = [
            (Key::HeaderDigest, "CRC64"),
            (Key::InitialR2T, "No"),
            (Key::ImmediateData, "Yes"),
            (Key::MaxBurstLength, "1048577"),
            (Key::MaxBurstLength, "511"),
            (Key::FirstBurstLength, "262145"),
            (Key::MaxOutstandingR2T, "5"),
            (Key::MaxOutstandingR2T, "0"),
            (Key::DefaultTime2Wait, "3601"),
            (Key::ErrorRecoveryLevel, "1"),
            (Key::MaxConnections, "2"),
            (Key::DataPDUInOrder, "No"),
            (Key::DataSequenceInOrder, "No"),
            (Key::MaxRecvDataSegmentLength, "0"),
            (Key::MaxRecvDataSegmentLength, "16777216"),
            (Key::MaxRecvDataSegmentLength, "Reject"),
            (Key::SendTargets, "All"),
        ];
        let before = initial_params(&config);
        for (key, value) in refused {
            let mut params = before.clone();
            assert_eq!(apply_answer(&mut params, key, value, &config), None, "{key:?}={value}");
            assert_eq!(params, before);
        }
        let mut params = before;
        for (key, value) in [
            (Key::HeaderDigest, "CRC32C"),
            (Key::DataDigest, "None"),
            (Key::InitialR2T, "Yes"),
            (Key::ImmediateData, "No"),
            (Key::MaxBurstLength, "65536"),
            (Key::FirstBurstLength, "Irrelevant"),
            (Key::MaxOutstandingR2T, "2"),
            (Key::MaxRecvDataSegmentLength, "0x1000"),
        ] {
            assert_eq!(apply_answer(&mut params, key, value, &config), Some(()), "{key:?}={value}");
        }
        assert!(params.header_digest && !params.data_digest && params.initial_r2t);
        assert_eq!((params.max_burst, params.first_burst), (65_536, 65_536));
        assert_eq!((params.target_max_segment, params.max_outstanding_r2t), (4096, 2));
    }
}
