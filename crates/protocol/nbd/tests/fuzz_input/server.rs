//! Plays a script of arbitrary bytes against the server's machine: what a client may send, in any
//! portions, and what the driver may answer, in any order. Shared by the fuzz target and property
//! tests. What must hold is asserted on the way:
//!
//! * nothing panics, and the space for more bytes is never empty;
//! * memory is asked for writes alone, and no more than one export takes; each request is answered
//!   once;
//! * what goes out is a greeting, well-formed replies to options and replies to requests that were
//!   made;
//! * requests in flight and output are bounded.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use block::{Account, BufferPool, MemoryClass};
use frame::Machine;
use nbd::message::{
    CHUNK_MAGIC, Chunk, Cmd, OPTION_MAGIC, Opt, OptionHeader, OptionReply, REPLY_MAGIC,
    REQUEST_MAGIC, Request, SIMPLE_REPLY_MAGIC, SimpleReply,
};
use nbd::server::{Action, Answer, Command, Config, Connection, OUTPUT_HIGH_BYTES};
use nbd::{BlockStatusExtent, Errno, Export, SizeConstraints, Tag};
use testkit::Script;
use zerocopy::{FromBytes, IntoBytes};

/// The steps that agree on structured replies and choose the export.
pub(crate) const STRUCTURED: u8 = 1;
/// See [`STRUCTURED`].
pub(crate) const GO: u8 = 2;

const BYTES: u64 = 1 << 20;
const PAYLOAD: u32 = 64 << 10;
const IN_FLIGHT: u16 = 6;

struct World {
    conn: Connection,
    account: Account,
    now: Duration,
    portion: usize,
    /// What the client has sent and the machine has not taken.
    unread: Vec<u8>,
    grants: Vec<(Tag, u32)>,
    running: Vec<(Tag, Command)>,
    /// Requests by cookie: type and length.
    asked: BTreeMap<u64, (Cmd, u32)>,
    cookie: u64,
    sent: Vec<u8>,
    greeted: bool,
    chosen: bool,
}

/// Plays `script`.
pub(crate) fn run(script: &[u8]) {
    let mut script = Script::new(script);
    let export = Export {
        name: "disk".to_owned(),
        description: "described".to_owned(),
        bytes: BYTES,
        size_constraints: SizeConstraints { minimum: 512, preferred: 4096, payload: PAYLOAD },
        read_only: script.byte() > 0xe0,
        can_trim: script.byte() < 0xc0,
        fast_zero_bytes: Some(4096),
        multi_conn: true,
    };
    let config = Config { max_in_flight: IN_FLIGHT, ..Config::new(Arc::from([export])) };
    let mut world = World {
        conn: Connection::new(config),
        account: BufferPool::new(16 << 20).unwrap().account(),
        now: Duration::ZERO,
        portion: usize::MAX,
        unread: 3u32.to_be_bytes().to_vec(),
        grants: Vec::new(),
        running: Vec::new(),
        asked: BTreeMap::new(),
        cookie: 0,
        sent: Vec::new(),
        greeted: false,
        chosen: false,
    };
    for _ in 0..400 {
        if script.is_empty() {
            break;
        }
        world.step(&mut script);
        world.collect();
    }
    world.finish();
}

impl World {
    fn step(&mut self, script: &mut Script<'_>) {
        match script.byte() & 0x1f {
            0 if script.is_rare() => {
                let n = usize::from(script.byte());
                let bytes: Vec<u8> = (0..n).map(|_| script.byte()).collect();
                self.send(&bytes);
            }
            STRUCTURED if !self.chosen => self.option(Opt::StructuredReply, &[]),
            GO if !self.chosen => {
                let wanted = [0, 0, 0, 4, b'd', b'i', b's', b'k', 0, 1, 0, 3];
                self.option(Opt::Go, &wanted);
                self.chosen = true;
            }
            3..=6 if !self.chosen => self.any_option(script),
            3..=18 => self.request(script),
            19..=21 => self.grant(script),
            22..=25 => self.answer(script),
            26 => {
                self.now += Duration::from_millis(u64::from(script.byte()) * 20);
                self.conn.on_timer(self.now);
            }
            27 => self.portion = usize::from(script.byte()).max(1),
            28 if script.is_rare() => self.conn.shut_down(),
            29 if script.is_rare() => self.conn.close(),
            30 => self.drain(usize::from(script.byte())),
            _ => self.drain(usize::MAX),
        }
        self.push();
    }

    fn option(&mut self, option: Opt, data: &[u8]) {
        let header = OptionHeader {
            magic: OPTION_MAGIC.into(),
            option: option.0.into(),
            length: (data.len() as u32).into(),
        };
        self.send(header.as_bytes());
        self.send(data);
    }

    fn any_option(&mut self, script: &mut Script<'_>) {
        let option = Opt(u32::from(script.byte() % 13));
        if option == Opt::ExportName || option == Opt::Go || option == Opt::Abort {
            return;
        }
        let data: Vec<u8> = match script.byte() % 4 {
            0 => Vec::new(),
            1 => [&[0, 0, 0, 4][..], b"disk", &[0, 0, 0, 1, 0, 0, 0, 5], b"base:"].concat(),
            2 => [&[0, 0, 0, 4][..], b"disk", &[0, 2, 0, 3, 0, 1]].concat(),
            _ => (0..script.byte()).map(|_| script.byte()).collect(),
        };
        self.option(option, &data);
    }

    fn request(&mut self, script: &mut Script<'_>) {
        if !self.chosen {
            return;
        }
        let (kind, spoil) = (Cmd(u16::from(script.byte() % 9)), script.byte());
        if kind == Cmd::Disc && !script.is_rare() {
            return;
        }
        let flags = if spoil & 1 == 0 { 0 } else { u16::from(script.byte() & 0x3f) };
        let offset = match spoil >> 6 {
            3 => {
                u64::from(u32::from_be_bytes(script.bytes())) << 32
                    | u64::from(u32::from_be_bytes(script.bytes()))
            }
            _ => u64::from(script.byte()) * 512,
        };
        let length = match spoil >> 1 & 7 {
            0 => u32::from_be_bytes(script.bytes()) & 0x3_ffff,
            1 => 0,
            _ => u32::from(script.byte()) * 512,
        };
        let (offset, length) = if kind == Cmd::Flush { (0, 0) } else { (offset, length) };
        self.cookie += 1;
        let request = Request {
            magic: REQUEST_MAGIC.into(),
            flags: flags.into(),
            kind: kind.0.into(),
            cookie: self.cookie.into(),
            offset: offset.into(),
            length: length.into(),
        };
        self.asked.insert(self.cookie, (kind, length));
        self.send(request.as_bytes());
        if kind == Cmd::Write {
            self.send(&vec![script.byte(); length as usize]);
        }
    }

    fn grant(&mut self, script: &mut Script<'_>) {
        let Some((tag, bytes)) = self.grants.pop() else { return };
        if script.is_rare() {
            return self.conn.refuse(tag, Errno::NoMem);
        }
        let credit = self.account.try_credit(bytes as usize, MemoryClass::LocalIo);
        let room = credit.expect("the pool is large").alloc(bytes as usize);
        self.conn.grant(tag, room);
    }

    fn answer(&mut self, script: &mut Script<'_>) {
        if self.running.is_empty() {
            return;
        }
        let which = usize::from(script.byte()) % self.running.len();
        let (tag, command) = self.running.swap_remove(which);
        let answer = match command {
            _ if script.byte() > 0xe0 => Answer::Failed(Errno::Io),
            Command::Read { len, .. } => {
                let credit = self.account.try_credit(len as usize, MemoryClass::LocalIo);
                Answer::Data(credit.expect("the pool is large").alloc(len as usize).into())
            }
            Command::BlockStatus { .. } => {
                let extent = || BlockStatusExtent { bytes: 512 * 3, hole: true, zero: true };
                Answer::Extents((0..script.byte() % 4).map(|_| extent()).collect())
            }
            _ => Answer::Done,
        };
        self.conn.answer(tag, answer);
    }

    fn send(&mut self, bytes: &[u8]) {
        // A script is to come to an end.
        if self.unread.len() < 1 << 20 {
            self.unread.extend(bytes);
        }
    }

    fn push(&mut self) {
        let mut at = 0;
        while at < self.unread.len()
            && let Some(space) = self.conn.receive_space()
        {
            assert!(!space.is_empty(), "an empty space would mean end of stream");
            let n = space.len().min(self.unread.len() - at).min(self.portion);
            space[..n].copy_from_slice(&self.unread[at..at + n]);
            self.conn.on_received(n);
            at += n;
            self.collect();
        }
        self.unread.drain(..at);
    }

    fn collect(&mut self) {
        while let Some(action) = self.conn.poll_action() {
            match action {
                Action::Grant { tag, bytes } => {
                    assert!((1..=PAYLOAD).contains(&bytes) && self.grants.is_empty());
                    self.grants.push((tag, bytes));
                }
                Action::Run { tag, export, command } => {
                    assert_eq!(export, 0);
                    assert_within(&command);
                    assert!(self.running.iter().all(|(t, _)| *t != tag), "the tag is in use");
                    self.running.push((tag, command));
                }
            }
        }
        let in_flight = self.conn.in_flight();
        assert!(in_flight <= usize::from(IN_FLIGHT));
        let most = OUTPUT_HIGH_BYTES + usize::from(IN_FLIGHT) * (PAYLOAD as usize + 4096);
        assert!(self.conn.output().len() <= most);
        if self.conn.is_closing() {
            assert!(self.conn.close_reason().is_some() && self.conn.receive_space().is_none());
        }
    }

    fn drain(&mut self, most: usize) {
        let mut left = most;
        while left > 0 && !self.conn.output().is_empty() {
            let slice = self.conn.output().slices().next().unwrap().to_vec();
            let n = slice.len().min(left);
            self.sent.extend(&slice[..n]);
            self.conn.output().advance(n);
            left -= n;
        }
        self.parse();
    }

    /// Takes apart what was sent.
    fn parse(&mut self) {
        while let Some(n) = self.message() {
            self.sent.drain(..n);
        }
    }

    /// The length of the message that begins what was sent, if it is whole.
    fn message(&mut self) -> Option<usize> {
        if !self.greeted {
            self.greeted = self.sent.len() >= 18;
            return self.greeted.then_some(18);
        }
        let magic = u32::from_be_bytes(self.sent.get(..4)?.try_into().unwrap());
        match magic {
            SIMPLE_REPLY_MAGIC => {
                let (reply, _) = SimpleReply::read_from_prefix(&self.sent[..]).ok()?;
                let (kind, length) = *self.asked.get(&reply.cookie.get()).expect("it was asked");
                let data = kind == Cmd::Read && reply.error.get() == 0;
                assert!(!data || !self.conn.is_structured());
                let n = 16 + if data { length as usize } else { 0 };
                if self.sent.len() < n {
                    return None;
                }
                self.asked.remove(&reply.cookie.get());
                Some(n)
            }
            CHUNK_MAGIC => {
                let (chunk, _) = Chunk::read_from_prefix(&self.sent[..]).ok()?;
                assert!(self.conn.is_structured() && chunk.flags.get() == 1);
                let n = 20 + chunk.length.get() as usize;
                if self.sent.len() < n {
                    return None;
                }
                self.asked.remove(&chunk.cookie.get()).expect("it was asked, and answered once");
                Some(n)
            }
            _ => {
                let (reply, _) = OptionReply::read_from_prefix(&self.sent[..]).ok()?;
                assert_eq!(reply.magic.get(), REPLY_MAGIC);
                let n = 20 + reply.length.get() as usize;
                (self.sent.len() >= n).then_some(n)
            }
        }
    }

    /// Everything is granted, answered and sent: what is left is what the machine has not taken.
    fn finish(mut self) {
        for _ in 0..10_000 {
            self.drain(usize::MAX);
            self.grant(&mut Script::new(&[]));
            self.answer(&mut Script::new(&[]));
            self.push();
            self.collect();
            let idle = self.grants.is_empty() && self.running.is_empty();
            let stuck = self.unread.is_empty() || self.conn.receive_space().is_none();
            if idle && stuck && self.conn.output().is_empty() {
                break;
            }
        }
        assert!(self.running.is_empty() && self.conn.output().is_empty());
        assert!(self.sent.is_empty(), "half a message");
        let begun = usize::from(!self.grants.is_empty() || self.conn.in_flight() > 0);
        assert!(self.conn.is_closing() || self.conn.in_flight() <= begun);
    }
}

/// What is carried out is within the export, whole blocks, and not too long.
fn assert_within(command: &Command) {
    let (at, len) = match command {
        Command::Flush => return,
        Command::Read { at, len } => {
            assert!(*len <= PAYLOAD);
            (*at, u64::from(*len))
        }
        Command::Write { at, data, .. } => (*at, data.len() as u64),
        Command::Trim { at, len, .. }
        | Command::WriteZeroes { at, len, .. }
        | Command::BlockStatus { at, len, .. } => (*at, u64::from(*len)),
    };
    assert!(len > 0 && len.is_multiple_of(512) && at.is_multiple_of(512));
    assert!(at.checked_add(len).unwrap() <= BYTES);
}
