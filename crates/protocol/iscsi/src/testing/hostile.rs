//! Anything an initiator may say, against a driver that does anything it may do.
//!
//! What is checked: nothing panics, the machine keeps to its own rules towards the driver, its
//! memory stays within bounds, and all buffers come back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use frame::Machine;

use super::{Driver, Pdu, ScriptedInitiator};
use crate::chap::Secret;
use crate::pdu::{
    BHS_LEN, LoginStage, LoginStatus, NO_TAG, Opcode, ScsiCommand, TaskFunction, TaskOutcome,
};
use crate::target::{
    Action, ArrivedCommand, AsyncNotification, Auth, ChapPolicy, CommandOutcome, Config,
    Connection, Direction, RequestId, SendTargetsScope, Tag, TargetRecord,
};

/// Most bytes that may wait to be sent: the machine stops receiving at 1 MiB, and the answers to
/// what it has received by then are small here.
const OUTPUT_BOUND: usize = (1 << 20) + (1 << 19);

/// Longest command window that is tried.
const WINDOW: u32 = 8;

/// Commands that may be outstanding at once: a window and the immediate ones.
const TASKS_BOUND: usize = WINDOW as usize + 16;

/// Most actions that may wait to be taken.
const ACTIONS_BOUND: usize = 256;

/// Anything during a login.
pub fn login(input: &[u8]) {
    let mut room = FuzzHarness::new(input);
    while !room.dice.is_empty() {
        let len = usize::from(room.dice.byte());
        match room.dice.byte() % 4 {
            0 => {
                let bytes = room.dice.bytes(len);
                room.say(&bytes);
            }
            1 => {
                let mut header = [0; BHS_LEN];
                header[0] = 0x43;
                header[1] = room.dice.byte();
                header[3] = room.dice.byte() / 255;
                let text = room.dice.bytes(len);
                let pdu = room.initiator.frame(&header, &text);
                room.say(&pdu);
            }
            2 => room.say_login(),
            _ => room.driver_step(),
        }
    }
    room.end();
}

/// Anything in the full feature phase.
///
/// # Panics
/// If what is checked does not hold.
pub fn full_feature(input: &[u8]) {
    let mut room = FuzzHarness::new(input);
    let keys = room.keys();
    let names = [
        ("InitiatorName", "iqn.2026-01.com.example:host"),
        ("TargetName", "iqn.2026-01.com.example:disk"),
    ];
    let discovery = room.dice.byte() == 7;
    let kind = [("SessionType", if discovery { "Discovery" } else { "Normal" })];
    let pairs: Vec<_> = names.iter().chain(&kind).copied().collect();
    let mut pairs: Vec<(&str, &str)> = pairs;
    pairs.extend(keys.iter().map(|(k, v)| (*k, v.as_str())));
    let login =
        room.initiator.login(LoginStage::Operational, Some(LoginStage::FullFeature), &pairs);
    room.auth = Auth::None;
    room.feed(&login);
    room.orderly = true;
    room.drain_driver();
    room.orderly = false;
    room.collect();
    (room.initiator.header_digest, room.initiator.data_digest) =
        (room.target.params().header_digest, room.target.params().data_digest);
    while !room.dice.is_empty() {
        room.fuzz_step();
    }
    room.end();
}

/// Bytes that decide what happens; zeroes when they are used up.
#[derive(Debug)]
struct FuzzInput<'a>(&'a [u8]);

impl FuzzInput<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes([0, self.byte(), self.byte(), self.byte()])
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken.to_vec()
    }
}

/// What the driver knows of a command.
#[derive(Debug)]
struct KnownCommand {
    command: ArrivedCommand,
    admitted: Option<u64>,
    granting: Option<usize>,
    running: bool,
    aborted: bool,
}

struct FuzzHarness<'a> {
    dice: FuzzInput<'a>,
    target: Connection,
    initiator: ScriptedInitiator,
    driver: Driver,
    auth: Auth,
    /// Questions are answered, with consent.
    orderly: bool,
    commands: BTreeMap<Tag, KnownCommand>,
    logins: u32,
    sessions: u32,
    searches: Vec<SendTargetsScope>,
    functions: Vec<RequestId>,
    /// R2Ts that came: task, transfer, offset, length.
    r2ts: Vec<(u32, u32, u32, u32)>,
    now: Duration,
    closed: bool,
}

impl<'a> FuzzHarness<'a> {
    fn new(input: &'a [u8]) -> Self {
        let mut dice = FuzzInput(input);
        let mut config =
            Config { window: 1 + u32::from(dice.byte()) % WINDOW, ..Config::default() };
        config.limits.max_segment = 16_384;
        config.limits.initial_r2t = dice.byte() == 1;
        let auth = if dice.byte().is_multiple_of(2) { Auth::None } else { chap() };
        Self {
            dice,
            target: Connection::new(Arc::new(config)),
            initiator: ScriptedInitiator::default(),
            driver: Driver::new(16, 8 << 20),
            auth,
            orderly: false,
            commands: BTreeMap::new(),
            logins: 0,
            sessions: 0,
            searches: Vec::new(),
            functions: Vec::new(),
            r2ts: Vec::new(),
            now: Duration::ZERO,
            closed: false,
        }
    }

    fn keys(&mut self) -> Vec<(&'static str, String)> {
        let yes = |b: u8| if b % 2 == 1 { "Yes" } else { "No" }.to_string();
        let digest = |b: u8| if b % 4 == 1 { "CRC32C" } else { "None" }.to_string();
        let number = |b: u8| (512 + u32::from(b) * 37).to_string();
        let d = &mut self.dice;
        vec![
            ("HeaderDigest", digest(d.byte())),
            ("DataDigest", digest(d.byte())),
            ("InitialR2T", yes(d.byte())),
            ("ImmediateData", yes(d.byte())),
            ("MaxOutstandingR2T", (1 + d.byte() % 9).to_string()),
            ("MaxBurstLength", number(d.byte())),
            ("FirstBurstLength", number(d.byte())),
            ("MaxRecvDataSegmentLength", number(d.byte())),
        ]
    }

    /// One thing that the initiator or the driver does.
    fn fuzz_step(&mut self) {
        match self.dice.byte() % 16 {
            0 | 1 => self.say_command(),
            2 | 3 => self.say_data(),
            4 => {
                let data = self.some_bytes();
                let ping = self.initiator.ping(&data);
                self.say(&ping);
            }
            5 => self.say_text(),
            6 => {
                let function = TaskFunction(self.dice.byte() % 10);
                let (itt, sn) = (self.dice.word() % 32, self.dice.word() % 32);
                let request = self.initiator.task(function, itt, sn);
                self.say(&request);
            }
            7 if self.dice.byte() == 0 => {
                let request = self.initiator.logout(self.dice.byte() % 4, 0);
                self.say(&request);
            }
            8 => self.say_nonsense(),
            9 if self.dice.byte() == 0 => {
                let len = usize::from(self.dice.byte());
                let bytes = self.dice.bytes(len);
                self.say(&bytes);
            }
            10 => self.collect(),
            11 => {
                self.now += Duration::from_secs(u64::from(self.dice.byte() % 16));
                self.target.on_timer(self.now);
            }
            12 => match self.dice.byte() % 4 {
                0 => self.target.set_window(u32::from(self.dice.byte()) % (WINDOW + 1)),
                1 => self.target.notify(AsyncNotification::LogoutRequest { within_s: 9 }),
                2 => self.target.notify(AsyncNotification::Scsi { lun: [0; 8], sense: &[7; 300] }),
                _ => self.target.notify(AsyncNotification::Drop { time2wait_s: 1 }),
            },
            _ => self.driver_step(),
        }
        self.check();
    }

    fn some_bytes(&mut self) -> Vec<u8> {
        let len = (self.dice.word() % 2100) as usize;
        vec![self.dice.byte(); len]
    }

    fn say_login(&mut self) {
        let stage = if self.dice.byte().is_multiple_of(2) {
            LoginStage::Security
        } else {
            LoginStage::Operational
        };
        let next = [None, Some(LoginStage::Operational), Some(LoginStage::FullFeature)];
        let next = next[usize::from(self.dice.byte() % 3)];
        let all = [
            ("InitiatorName", "iqn.2026-01.com.example:host"),
            ("TargetName", "iqn.2026-01.com.example:disk"),
            ("SessionType", "Discovery"),
            ("AuthMethod", "CHAP,None"),
            ("AuthMethod", "None"),
            ("CHAP_A", "5,7"),
            ("CHAP_N", "host"),
            ("CHAP_R", "0x00112233445566778899aabbccddeeff"),
            ("CHAP_I", "1"),
            ("CHAP_C", "0b0123456789abcdef"),
            ("HeaderDigest", "CRC32C"),
            ("MaxBurstLength", "512"),
            ("X-key", "x"),
            ("MaxRecvDataSegmentLength", "512"),
        ];
        let which = self.dice.word();
        let pairs: Vec<_> =
            (0..all.len()).filter(|i| which >> i & 1 == 1).map(|i| all[i]).collect();
        let login = self.initiator.login(stage, next, &pairs);
        self.say(&login);
    }

    fn say_command(&mut self) {
        let flags = [0, ScsiCommand::READ, ScsiCommand::WRITE, ScsiCommand::WRITE];
        let flags = flags[usize::from(self.dice.byte() % 4)];
        let expected = self.dice.word() % 20_000;
        let mut header = self.initiator.command_header(&[self.dice.byte()], flags, expected);
        let odd = self.dice.byte();
        if odd & 0x81 == 0x81 {
            header.flags &= 0x7f;
        }
        if odd & 0x60 == 0x60 {
            header.first |= 0x40;
            self.initiator.cmd_sn = self.initiator.cmd_sn.wrapping_sub(1);
        }
        if odd == 0x1f {
            header.itt.set(u32::from(self.dice.byte()));
        }
        let data = if flags == ScsiCommand::WRITE && odd & 4 == 4 {
            let mut data = self.some_bytes();
            data.truncate(expected as usize);
            data
        } else {
            Vec::new()
        };
        let command = self.initiator.frame(header.as_bytes(), &data);
        self.say(&command);
    }

    /// Data that was asked for, or something like it.
    fn say_data(&mut self) {
        self.collect();
        let odd = self.dice.byte();
        let unasked = (self.dice.word() % 32, NO_TAG, 0, 700);
        let (itt, ttt, at, len) = if self.r2ts.is_empty() || odd & 0x70 == 0x70 {
            unasked
        } else {
            self.r2ts.swap_remove(usize::from(odd) % self.r2ts.len())
        };
        let len = if odd & 0x0f == 0x0f { self.dice.word() % 3000 } else { len };
        let (first, second) = (len / 2, len - len / 2);
        let bytes = vec![odd; second as usize];
        let offset = if odd == 0xee { at + 4 } else { at };
        let pdu = self.initiator.data_out(itt, ttt, 0, offset, false, &bytes[..first as usize]);
        self.say(&pdu);
        let pdu = self.initiator.data_out(itt, ttt, 1, at + first, odd != 0xdd, &bytes);
        self.say(&pdu);
    }

    fn say_text(&mut self) {
        let values = ["All", "", "iqn.2026-01.com.example:disk", "x"];
        let value = values[usize::from(self.dice.byte() % 4)];
        let ttt = if self.dice.byte() < 200 { NO_TAG } else { self.dice.word() % 64 };
        let mut header = self.initiator.text_header(ttt);
        if self.dice.byte() > 200 {
            header.flags = 0x40;
        }
        let mut text = Vec::new();
        crate::text::push(&mut text, "SendTargets", value);
        let request = self.initiator.frame(header.as_bytes(), &text);
        self.say(&request);
    }

    fn say_nonsense(&mut self) {
        let mut header = [0; BHS_LEN];
        let bytes = self.dice.bytes(BHS_LEN);
        header[..bytes.len()].copy_from_slice(&bytes);
        let ahs = vec![self.dice.byte(); usize::from(self.dice.byte() % 4) * 4];
        let data = self.some_bytes();
        let pdu = self.initiator.frame_with_ahs(&header, &ahs, &data);
        self.say(&pdu);
    }

    /// Says something in portions; the driver works when the machine waits for it.
    fn say(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        for _ in 0..400 {
            let left = self.feed(rest);
            rest = &rest[rest.len() - left..];
            if rest.is_empty() || self.closed {
                return;
            }
            self.collect();
            self.driver_step();
        }
        // The driver does not help: everything is answered, so that the stream stays whole.
        self.orderly = true;
        while !rest.is_empty() && !self.closed {
            let left = self.feed(rest);
            assert!(left < rest.len() || self.drain_driver() || self.stuck(), "nothing helps");
            rest = &rest[rest.len() - left..];
            self.collect();
            if self.stuck() {
                break;
            }
        }
        self.orderly = false;
    }

    /// Whether nothing more will be received although the connection is open: after a logout.
    fn stuck(&mut self) -> bool {
        self.closed || self.target.receive_space().is_none()
    }

    fn feed(&mut self, mut bytes: &[u8]) -> usize {
        while !bytes.is_empty() {
            let Some(space) = self.target.receive_space() else { break };
            assert!(!space.is_empty(), "an empty space");
            let n = space.len().min(bytes.len());
            space[..n].copy_from_slice(&bytes[..n]);
            self.target.on_received(n);
            bytes = &bytes[n..];
            self.check();
        }
        bytes.len()
    }

    fn check(&mut self) {
        assert!(self.target.output().len() <= OUTPUT_BOUND, "{}", self.target.output().len());
        assert!(self.target.outstanding() <= TASKS_BOUND);
        assert!(self.target.pending_actions() <= ACTIONS_BOUND);
    }

    /// Takes what the target sends.
    fn collect(&mut self) {
        let mut bytes = Vec::new();
        while !self.target.output().is_empty() {
            let output = self.target.output();
            output.slices().for_each(|s| bytes.extend_from_slice(&s));
            output.advance(output.len());
        }
        for pdu in self.initiator.receive(&bytes) {
            self.on_pdu(&pdu);
        }
    }

    fn on_pdu(&mut self, pdu: &Pdu) {
        match pdu.opcode() {
            Opcode::R2t => {
                self.r2ts.push((pdu.itt(), pdu.word(20), pdu.word(40), pdu.word(44)));
            }
            Opcode::LoginResponse if pdu.header[1] == 0x87 => self.initiator.cmd_sn = pdu.word(28),
            _ => {}
        }
    }

    /// One thing that the driver may do.
    fn driver_step(&mut self) {
        if self.dice.byte() % 4 < 3
            && let Some(action) = self.target.poll_action()
        {
            return self.act(action);
        }
        self.answer();
    }

    /// Does everything the driver can do; whether there was anything.
    fn drain_driver(&mut self) -> bool {
        let mut any = false;
        loop {
            while let Some(action) = self.target.poll_action() {
                any = true;
                self.act(action);
            }
            if !self.answer() {
                return any;
            }
            any = true;
        }
    }

    /// Takes an action; the machine must have kept to its rules.
    fn act(&mut self, action: Action) {
        assert!(!self.closed, "nothing comes after the end");
        match action {
            Action::Login(_) => self.logins += 1,
            Action::Establish(_) => self.sessions += 1,
            Action::SendTargets(scope) => self.searches.push(scope),
            Action::TaskManagement { id, .. } => {
                assert!(!self.functions.contains(&id));
                self.functions.push(id);
            }
            Action::CommandArrived(command) => {
                let known = KnownCommand {
                    command,
                    admitted: None,
                    granting: None,
                    running: false,
                    aborted: false,
                };
                assert!(self.commands.insert(known.command.tag, known).is_none(), "a tag in use");
            }
            Action::Grant { tag, bytes, .. } => {
                let known = self.commands.get_mut(&tag).expect("a known command");
                assert!(known.admitted.is_some() && !known.running && known.granting.is_none());
                assert!(bytes > 0);
                known.granting = Some(bytes);
            }
            Action::Run { tag, data } => {
                let known = self.commands.get_mut(&tag).expect("a known command");
                let admitted = known.admitted.expect("admitted before it runs");
                assert!(!known.running && known.granting.is_none());
                let writes = known.command.direction == Direction::Write;
                let expect = admitted.min(u64::from(known.command.expected_len));
                assert_eq!(data.len() as u64, if writes { expect } else { 0 });
                known.running = true;
            }
            Action::Abort { tag } => {
                let known = self.commands.get_mut(&tag).expect("a known command");
                assert!(!known.aborted, "aborted once");
                known.aborted = true;
            }
            Action::Close(_) => {
                self.closed = true;
                assert!(self.target.is_closing() && self.target.poll_action().is_none());
            }
        }
    }

    /// Answers something that was asked; whether there was anything to answer.
    fn answer(&mut self) -> bool {
        let willing = self.orderly || self.dice.byte() < 240;
        if self.logins > 0 {
            self.logins -= 1;
            let grant = self.driver.login_grant();
            let grant = crate::target::LoginGrant { auth: self.auth.clone(), ..grant };
            self.target.login_decision(
                willing.then_some(grant).ok_or(LoginStatus::AuthorizationFailure.into()),
            );
        } else if self.sessions > 0 {
            self.sessions -= 1;
            let session = willing.then_some(3).ok_or(LoginStatus::NoSession.into());
            self.target.session_established(session);
        } else if self.searches.pop().is_some() {
            let record = TargetRecord {
                name: "iqn.2026-01.com.example:disk".into(),
                addresses: vec![("192.0.2.1:3260".into(), 1); usize::from(self.dice.byte())],
            };
            self.target.targets(&[record]);
        } else if let Some(id) = self.functions.pop() {
            let outcome = if willing { TaskOutcome::Complete } else { TaskOutcome::NoLun };
            self.target.task_management_done(id, outcome);
        } else {
            return self.answer_command(willing);
        }
        true
    }

    fn answer_command(&mut self, willing: bool) -> bool {
        let count = self.commands.len();
        if count == 0 {
            return false;
        }
        let at = usize::from(self.dice.byte()) % count;
        let (&tag, known) = self.commands.iter_mut().nth(at).expect("within the count");
        let too_much = known.granting.is_some_and(|bytes| bytes > 64 << 10);
        if !willing
            || too_much
            || known.running
            || known.aborted
            || (self.orderly && known.is_idle())
        {
            let data = self.driver.data(&[5; 1000]);
            let sense = [1; 40];
            self.commands.remove(&tag);
            let outcome = match self.dice.byte() % 4 {
                0 => CommandOutcome::status(2, &sense),
                1 => CommandOutcome { available: 9999, ..CommandOutcome::good(data) },
                2 => CommandOutcome::status(8, &[]),
                _ => CommandOutcome::good(data),
            };
            self.target.complete(tag, &outcome);
        } else if known.admitted.is_none() {
            let takes = match self.dice.byte() % 4 {
                0 => 0,
                1 => 512,
                2 => 1 << 33,
                _ => u64::from(known.command.expected_len),
            };
            known.admitted = Some(takes);
            self.target.admit(tag, takes);
        } else if let Some(bytes) = known.granting.take() {
            self.target.grant(tag, self.driver.memory(bytes));
        }
        true
    }

    /// The initiator is gone: the driver's commands end, and all memory comes back.
    fn end(mut self) {
        self.collect();
        self.orderly = true;
        self.drain_driver();
        self.collect();
        self.now += Duration::from_secs(1000);
        self.target.on_timer(self.now);
        self.drain_driver();
        let pool = self.driver.pool().clone();
        drop(self.target);
        assert_eq!(pool.usage().free, pool.usage().total, "memory was lost");
    }
}

impl KnownCommand {
    /// Whether it waits for the initiator.
    fn is_idle(&self) -> bool {
        self.admitted.is_some() && self.granting.is_none()
    }
}

fn chap() -> Auth {
    let secret = |s: &[u8]| Secret::new(s).expect("long enough");
    Auth::Chap(Box::new(ChapPolicy {
        user: "host".into(),
        secret: secret(b"initiator secret"),
        mutual: Some(("disk".into(), secret(b"the target's own"))),
        challenge: [1; 32],
        id: 1,
    }))
}
