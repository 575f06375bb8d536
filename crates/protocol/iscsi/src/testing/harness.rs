//! An initiator and a target, face to face.

use std::sync::Arc;
use std::time::Duration;

use frame::Machine;

use super::{Driver, Pdu, ScriptedInitiator};
use crate::pdu::LoginStage;
use crate::target::{Action, CloseReason, Config, Connection};

/// How a byte stream is cut.
#[derive(Clone, Copy, Debug)]
pub enum Portions {
    /// As large as the target takes them.
    Whole,
    /// So many bytes each.
    Bytes(usize),
    /// Any number of bytes, from this seed.
    Random(u64),
}

impl Portions {
    fn next(&mut self) -> usize {
        match self {
            Self::Whole => usize::MAX,
            Self::Bytes(n) => *n,
            Self::Random(seed) => {
                *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                1 + ((*seed >> 33) % 97) as usize
            }
        }
    }
}

/// An initiator, a target and its driver.
#[derive(Debug)]
pub struct Harness {
    /// The target.
    pub target: Connection,
    /// The initiator.
    pub initiator: ScriptedInitiator,
    /// The driver.
    pub driver: Driver,
    /// How the initiator's bytes are cut.
    pub portions: Portions,
    /// Actions are left in [`Self::actions`] instead of being done.
    pub manual: bool,
    /// Actions that were not done.
    pub actions: Vec<Action>,
    /// Why the target closed the connection.
    pub closed: Option<CloseReason>,
    /// All that the target was sent.
    pub bytes_sent: Vec<u8>,
    /// All that the target sent.
    pub bytes_received: Vec<u8>,
    /// Time since the connection began.
    pub now: Duration,
}

impl Default for Harness {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl Harness {
    /// A connection that has just begun.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            target: Connection::new(Arc::new(config)),
            initiator: ScriptedInitiator::default(),
            driver: Driver::new(4096, 16 << 20),
            portions: Portions::Whole,
            manual: false,
            actions: Vec::new(),
            closed: None,
            bytes_sent: Vec::new(),
            bytes_received: Vec::new(),
            now: Duration::ZERO,
        }
    }

    /// A session in the full feature phase, negotiated with these operational keys.
    ///
    /// # Panics
    /// If the login fails.
    #[must_use]
    pub fn logged_in(config: Config, keys: &[(&str, &str)]) -> Self {
        let mut lab = Self::new(config);
        lab.log_in(keys);
        lab
    }

    /// Logs in with these operational keys.
    ///
    /// # Panics
    /// If the login fails.
    pub fn log_in(&mut self, keys: &[(&str, &str)]) {
        let names = [
            ("InitiatorName", "iqn.2026-01.com.example:host"),
            ("TargetName", "iqn.2026-01.com.example:disk"),
            ("SessionType", "Normal"),
        ];
        let all: Vec<_> = names.iter().chain(keys).copied().collect();
        let login =
            self.initiator.login(LoginStage::Operational, Some(LoginStage::FullFeature), &all);
        let got = self.say(&login);
        let last = got.last().expect("a login is answered");
        assert_eq!(last.header[36..38], [0, 0], "{last:?}");
        assert_eq!(last.header[1], 0x87, "in the full feature phase");
        let said = |key: &str| last.value(key).is_some_and(|v| v == "CRC32C");
        self.initiator.header_digest = said("HeaderDigest");
        self.initiator.data_digest = said("DataDigest");
    }

    /// The initiator says `bytes`; what it gets back.
    ///
    /// # Panics
    /// If the target takes no bytes although nothing is left to be done.
    pub fn say(&mut self, bytes: &[u8]) -> Vec<Pdu> {
        let rest = self.feed(bytes);
        assert!(rest == 0 || self.closed.is_some(), "{rest} bytes were not taken");
        self.pump()
    }

    /// The initiator says `bytes`; how many of them the target did not take.
    ///
    /// # Panics
    /// If the target offers an empty space.
    pub fn feed(&mut self, mut bytes: &[u8]) -> usize {
        while !bytes.is_empty() {
            let portion = self.portions.next();
            let Some(space) = self.target.receive_space() else {
                if self.act() {
                    continue;
                }
                break;
            };
            assert!(!space.is_empty(), "an empty space");
            let n = space.len().min(bytes.len()).min(portion);
            space[..n].copy_from_slice(&bytes[..n]);
            self.target.on_received(n);
            self.bytes_sent.extend(&bytes[..n]);
            bytes = &bytes[n..];
            self.act();
        }
        bytes.len()
    }

    /// Takes the target's actions; whether there were any.
    pub fn act(&mut self) -> bool {
        let mut any = false;
        while let Some(action) = self.target.poll_action() {
            any = true;
            if let Action::Close(reason) = action {
                self.closed = Some(reason);
            } else if self.manual {
                self.actions.push(action);
            } else {
                self.driver.act(action, &mut self.target);
            }
        }
        any
    }

    /// Takes actions and what the target sends.
    pub fn pump(&mut self) -> Vec<Pdu> {
        let bytes = self.collect();
        self.initiator.receive(&bytes)
    }

    /// Takes actions and the bytes that the target sends.
    pub fn collect(&mut self) -> Vec<u8> {
        self.act();
        let mut bytes = Vec::new();
        while !self.target.output().is_empty() {
            let output = self.target.output();
            output.slices().for_each(|s| bytes.extend_from_slice(&s));
            output.advance(output.len());
        }
        self.bytes_received.extend(&bytes);
        bytes
    }

    /// Time passes.
    pub fn wait(&mut self, seconds: u64) -> Vec<Pdu> {
        self.now += Duration::from_secs(seconds);
        self.target.on_timer(self.now);
        self.pump()
    }

    /// The one action that was not done.
    ///
    /// # Panics
    /// If there is none, or more.
    pub fn action(&mut self) -> Action {
        self.act();
        assert_eq!(self.actions.len(), 1, "{:?}", self.actions);
        self.actions.remove(0)
    }
}
