//! What a member's log tells of the clocks of the others.
//!
//! Members ask each other for the time every few seconds, take half of the round trip off, and say
//! twice a minute who is behind them by more than a second. One that is ahead is told of by the
//! others.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;

/// How etcd says it, from 3.4 on.
const MESSAGE: &str = "prober found high clock drift";

/// How long what was said is taken for true: it is said again every 30 s.
const STALE: Duration = Duration::from_secs(90);

/// Another member whose clock is behind the own one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behind {
    /// The number that etcd knows it by.
    pub member: u64,
    /// How far.
    pub by: Duration,
}

/// What was said lately.
#[derive(Debug, Default)]
pub(super) struct Clocks(Mutex<BTreeMap<u64, (Instant, Duration)>>);

impl Clocks {
    /// Takes a line of the log.
    pub(super) fn line(&self, line: &str) {
        if let Some(Behind { member, by }) = parse(line) {
            let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            said.insert(member, (Instant::now(), by));
        }
    }

    /// Who is behind now.
    pub(super) fn behind(&self) -> Vec<Behind> {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.retain(|_, (at, _)| at.elapsed() < STALE);
        said.iter().map(|(&member, &(_, by))| Behind { member, by }).collect()
    }
}

#[derive(Deserialize)]
struct Json {
    msg: String,
    #[serde(rename = "remote-peer-id")]
    peer: String,
    #[serde(rename = "clock-drift")]
    drift: String,
    rtt: String,
}

fn parse(line: &str) -> Option<Behind> {
    if !line.contains(MESSAGE) {
        return None;
    }
    let Json { msg, peer, drift, rtt } = serde_json::from_str(line).ok()?;
    if msg != MESSAGE {
        return None;
    }
    // Some releases call each by the other's name. It is said only of more than a second.
    let by = duration(&drift)?.max(duration(&rtt)?);
    Some(Behind { member: u64::from_str_radix(&peer, 16).ok()?, by })
}

/// A duration as Go writes it: `1h2m3.5s`, `502.9µs`.
fn duration(text: &str) -> Option<Duration> {
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
        // As etcd 3.4 says it.
        format!(
            r#"{{"level":"warn","ts":"2026-01-01T00:00:00.000Z","caller":"rafthttp/probing_status.go:86",
                "msg":"prober found high clock drift","round-tripper-name":"ROUND_TRIPPER_SNAPSHOT",
                "remote-peer-id":"d66e878e1cd03cfc","clock-drift":"{drift}","rtt":"{rtt}"}}"#
        )
    }

    #[test]
    fn who_is_behind_is_read_from_the_log() {
        let member = 0xd66e_878e_1cd0_3cfc;
        let found = parse(&line("8m0.5s", "502.906\u{b5}s")).unwrap();
        assert_eq!(found, Behind { member, by: Duration::from_millis(480_500) });
        let swapped = parse(&line("1.5ms", "1h0m3s")).unwrap();
        assert_eq!(swapped.by, Duration::from_secs(3603));
        for bad in ["", "s", "1.2.3s", "-1s", "5", "1d", "99999999999999999999h", "1\u{b5}"] {
            let read = parse(&line(bad, "1ms"));
            assert!(read.is_none_or(|b| b.by == Duration::from_millis(1)), "{bad}: {read:?}");
        }
        assert_eq!(parse(r#"{"msg":"prober found high clock drift"}"#), None);
        let other = line("3s", "1ms").replace("found high", "found no high");
        assert_eq!(parse(&other), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_said_no_more_is_forgotten() {
        let clocks = Clocks::default();
        clocks.line(&line("4s", "1ms"));
        clocks.line("serving client traffic");
        clocks.line(&line("5s", "1ms"));
        let behind: Vec<_> = clocks.behind().iter().map(|b| b.by.as_secs()).collect();
        assert_eq!(behind, [5]);
        tokio::time::advance(STALE).await;
        assert_eq!(clocks.behind(), []);
    }
}
