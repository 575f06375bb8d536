//! Clock lags of other store members, read from a member's log.
//!
//! Members ask each other for the time every few seconds, subtract half of the round trip, and log
//! twice a minute which members are behind them by more than a second. A clock that is ahead is
//! reported by the other members.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;

/// etcd's message, from 3.4 on.
const DRIFT_MESSAGE: &str = "prober found high clock drift";

/// How long a report counts as current: etcd repeats it every 30 s.
const REPORT_TTL: Duration = Duration::from_secs(90);

/// Another member whose clock is behind this one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockLag {
    /// Its etcd member id.
    pub member: u64,
    /// How far it is behind.
    pub lag: Duration,
}

/// Recent reports, by member.
#[derive(Debug, Default)]
pub(super) struct ClockLags(Mutex<BTreeMap<u64, (Instant, Duration)>>);

impl ClockLags {
    /// Processes a line of the log.
    pub(super) fn process_line(&self, line: &str) {
        if let Some(ClockLag { member, lag }) = parse_drift_line(line) {
            let mut lags = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            lags.insert(member, (Instant::now(), lag));
        }
    }

    /// The members that are behind now.
    pub(super) fn current(&self) -> Vec<ClockLag> {
        let mut lags = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lags.retain(|_, (at, _)| at.elapsed() < REPORT_TTL);
        lags.iter().map(|(&member, &(_, lag))| ClockLag { member, lag }).collect()
    }
}

#[derive(Deserialize)]
struct DriftLogLine {
    msg: String,
    #[serde(rename = "remote-peer-id")]
    peer: String,
    #[serde(rename = "clock-drift")]
    drift: String,
    rtt: String,
}

fn parse_drift_line(line: &str) -> Option<ClockLag> {
    if !line.contains(DRIFT_MESSAGE) {
        return None;
    }
    let DriftLogLine { msg, peer, drift, rtt } = serde_json::from_str(line).ok()?;
    if msg != DRIFT_MESSAGE {
        return None;
    }
    // Some releases swap the two fields. Only a drift is above a second.
    let lag = parse_go_duration(&drift)?.max(parse_go_duration(&rtt)?);
    Some(ClockLag { member: u64::from_str_radix(&peer, 16).ok()?, lag })
}

/// Parses a duration as Go writes it: `1h2m3.5s`, `502.9µs`.
fn parse_go_duration(text: &str) -> Option<Duration> {
    let (mut rest, mut seconds) = (text, 0.0);
    while !rest.is_empty() {
        let (number, unit) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit() && c != '.')?);
        let end = unit.find(|c: char| c.is_ascii_digit()).unwrap_or(unit.len());
        let (unit, next) = unit.split_at(end);
        let scale = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "\u{b5}s" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        seconds += number.parse::<f64>().ok()? * scale;
        rest = next;
    }
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(drift: &str, rtt: &str) -> String {
        // As etcd 3.4 writes it.
        format!(
            r#"{{"level":"warn","ts":"2026-01-01T00:00:00.000Z","caller":"rafthttp/probing_status.go:86",
                "msg":"prober found high clock drift","round-tripper-name":"ROUND_TRIPPER_SNAPSHOT",
                "remote-peer-id":"d66e878e1cd03cfc","clock-drift":"{drift}","rtt":"{rtt}"}}"#
        )
    }

    #[test]
    fn who_is_behind_is_read_from_the_log() {
        let member = 0xd66e_878e_1cd0_3cfc;
        let found = parse_drift_line(&line("8m0.5s", "502.906\u{b5}s")).unwrap();
        assert_eq!(found, ClockLag { member, lag: Duration::from_millis(480_500) });
        let swapped = parse_drift_line(&line("1.5ms", "1h0m3s")).unwrap();
        assert_eq!(swapped.lag, Duration::from_secs(3603));
        for bad in ["", "s", "1.2.3s", "-1s", "5", "1d", "99999999999999999999h", "1\u{b5}"] {
            let read = parse_drift_line(&line(bad, "1ms"));
            assert!(read.is_none_or(|b| b.lag == Duration::from_millis(1)), "{bad}: {read:?}");
        }
        assert_eq!(parse_drift_line(r#"{"msg":"prober found high clock drift"}"#), None);
        let other = line("3s", "1ms").replace("found high", "found no high");
        assert_eq!(parse_drift_line(&other), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_said_no_more_is_forgotten() {
        let clocks = ClockLags::default();
        clocks.process_line(&line("4s", "1ms"));
        clocks.process_line("serving client traffic");
        clocks.process_line(&line("5s", "1ms"));
        let behind: Vec<_> = clocks.current().iter().map(|b| b.lag.as_secs()).collect();
        assert_eq!(behind, [5]);
        tokio::time::advance(REPORT_TTL).await;
        assert_eq!(clocks.current(), []);
    }
}
