//! Plays a script of arbitrary bytes against the client's machine: what a server may send, in any
//! portions, and what a caller may submit. Shared by the fuzz target and property tests. What must
//! hold is asserted on the way:
//!
//! * nothing panics, and the space for more bytes is never empty;
//! * each command ends once; a read that succeeds has brought what was sent of it, all of it;
//! * nothing is said of what was not agreed on.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::Duration;

use block::{Account, BufferPool, MemoryClass};
use frame::Machine;
use nbd::client::{Config, Connection, Op, Reply};
use nbd::message::{
    CHUNK_MAGIC, Chunk, Opt, OptionReply, REPLY_MAGIC, Rep, SIMPLE_REPLY_MAGIC, SimpleReply, flag,
};
use testkit::Script;
use zerocopy::IntoBytes;

/// The step in which it acts as an honest server up to the end of the handshake.
pub(crate) const AGREE: u8 = 1;

/// A command, as the server knows it.
#[derive(Clone, Copy)]
struct Known {
    cookie: u64,
    reads: bool,
    status: bool,
    at: u64,
    len: u32,
    /// Bytes of a read that were sent.
    moved: u32,
}

struct World {
    conn: Connection,
    account: Account,
    structured: bool,
    now: Duration,
    portion: usize,
    /// What was submitted, by tag.
    open: BTreeMap<usize, u64>,
    known: Vec<Known>,
    next_cookie: Option<u64>,
}

/// Plays `script`.
pub(crate) fn run(script: &[u8]) {
    let mut script = Script::new(script);
    let structured = script.byte() & 1 == 1;
    let config = Config { structured, max_in_flight: 8, ..Config::new("disk") };
    let mut world = World {
        conn: Connection::new(config),
        account: BufferPool::new(16 << 20).unwrap().account(),
        structured,
        now: Duration::ZERO,
        portion: usize::MAX,
        open: BTreeMap::new(),
        known: Vec::new(),
        next_cookie: None,
    };
    for _ in 0..400 {
        if script.is_empty() {
            break;
        }
        world.step(&mut script);
        world.collect();
    }
    world.conn.close();
    world.collect();
    assert!(world.open.is_empty(), "each command ends");
    assert!(world.conn.is_closing() && world.conn.close_reason().is_some());
}

impl World {
    fn step(&mut self, script: &mut Script<'_>) {
        match script.byte() & 0x1f {
            0 if script.is_rare() => {
                let n = usize::from(script.byte());
                let bytes: Vec<u8> = (0..n).map(|_| script.byte()).collect();
                self.hear(&bytes);
            }
            AGREE if self.conn.negotiated().is_none() => self.agree(),
            2..=4 if self.conn.negotiated().is_none() => self.reply(script),
            2..=9 => self.submit(script),
            10..=17 => self.data(script),
            18..=20 => self.status(script),
            21..=25 => self.end(script),
            26 => {
                self.now += Duration::from_millis(u64::from(script.byte()) * 20);
                self.conn.on_timer(self.now);
            }
            27 => self.portion = usize::from(script.byte()).max(1),
            28 if script.is_rare() => self.conn.close(),
            _ => self.drain(),
        }
    }

    fn hear(&mut self, bytes: &[u8]) {
        let portion = self.portion;
        let at = testkit::machine::feed(&mut self.conn, bytes, &mut || portion);
        assert!(at == bytes.len() || self.conn.is_closing(), "a client takes all");
    }

    fn drain(&mut self) {
        let n = self.conn.output().len();
        self.conn.output().advance(n);
    }

    fn option(&mut self, option: Opt, kind: Rep, data: &[u8]) {
        let header = OptionReply {
            magic: REPLY_MAGIC.into(),
            option: option.0.into(),
            kind: kind.0.into(),
            length: (data.len() as u32).into(),
        };
        self.hear(&[header.as_bytes(), data].concat());
    }

    fn agree(&mut self) {
        self.hear(b"NBDMAGICIHAVEOPT\0\x03");
        if self.structured {
            self.option(Opt::StructuredReply, Rep::Ack, &[]);
            let context = [&[0, 0, 0, 7][..], b"base:allocation"].concat();
            self.option(Opt::SetMetaContext, Rep::MetaContext, &context);
            self.option(Opt::SetMetaContext, Rep::Ack, &[]);
        }
        let all = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES;
        let export = [&[0, 0][..], &(1u64 << 20).to_be_bytes(), &all.to_be_bytes()].concat();
        self.option(Opt::Go, Rep::Info, &export);
        self.option(Opt::Go, Rep::Ack, &[]);
        self.drain();
    }

    /// Something like a handshake.
    fn reply(&mut self, script: &mut Script<'_>) {
        let option =
            [Opt::StructuredReply, Opt::SetMetaContext, Opt::Go, Opt(script.byte().into())]
                [usize::from(script.byte() % 4)];
        let kind = match script.byte() % 6 {
            0 => Rep::Info,
            1 => Rep::ErrUnsup,
            2 => Rep::MetaContext,
            3 => Rep(1 << 31 | u32::from(script.byte())),
            _ => Rep::Ack,
        };
        let data: Vec<u8> = (0..script.byte() % 24).map(|_| script.byte()).collect();
        self.option(option, kind, if script.byte() & 1 == 0 { &[] } else { &data });
    }

    fn submit(&mut self, script: &mut Script<'_>) {
        let room = self.conn.free_slots();
        let (at, len) = (u64::from(script.byte()) * 512, 512 * (1 + u32::from(script.byte() % 64)));
        let buffers = || {
            let credit = self.account.try_credit(len as usize, MemoryClass::LocalIo);
            credit.expect("the pool is large").alloc(len as usize)
        };
        let op = match script.byte() % 6 {
            0 | 1 => Op::Read { at, buffers: buffers() },
            2 => Op::Write { at, data: buffers().into(), fua: false },
            3 if self.structured => Op::BlockStatus { at, len },
            4 => Op::WriteZeroes { at, len, hole: true, fua: false },
            _ => Op::Flush,
        };
        let (reads, status) = (matches!(op, Op::Read { .. }), matches!(op, Op::BlockStatus { .. }));
        self.drain();
        let timeout = Some(Duration::from_secs(5));
        let Some(tag) = self.conn.submit(op, timeout) else { return assert_eq!(room, 0) };
        assert!(room > 0);
        let said: Vec<u8> = self.conn.output().slices().flat_map(|s| s.to_vec()).collect();
        let cookie = u64::from_be_bytes(said[8..16].try_into().unwrap());
        assert!(self.open.insert(tag.index(), cookie).is_none(), "the tag is in use");
        self.known.push(Known { cookie, reads, status, at, len, moved: 0 });
    }

    /// One of the commands that are as they are wanted, and once in a while one that there is not.
    fn pick(&mut self, script: &mut Script<'_>, wanted: fn(&Known) -> bool) -> Option<usize> {
        let which = usize::from(script.byte());
        if script.is_rare() {
            self.next_cookie = Some(u32::from_be_bytes(script.bytes()).into());
        }
        let all: Vec<usize> = (0..self.known.len()).filter(|i| wanted(&self.known[*i])).collect();
        all.get(which % all.len().max(1)).copied()
    }

    fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, length: usize, payload: &[u8]) {
        let chunk = Chunk {
            magic: CHUNK_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: self.next_cookie.take().unwrap_or(cookie).into(),
            length: (length as u32).into(),
        };
        self.hear(&[chunk.as_bytes(), payload].concat());
    }

    fn data(&mut self, script: &mut Script<'_>) {
        let wanted = |k: &Known| k.reads && k.moved < k.len;
        let Some(index) = self.pick(script, wanted) else { return self.submit(script) };
        let Known { cookie, at, len, moved, .. } = self.known[index];
        let spoil = script.byte();
        if !self.structured {
            let reply = SimpleReply {
                magic: SIMPLE_REPLY_MAGIC.into(),
                error: 0.into(),
                cookie: cookie.into(),
            };
            self.known.swap_remove(index);
            return self.hear(&[reply.as_bytes(), &vec![0x5a; len as usize]].concat());
        }
        let length = (len - moved).min(1 + u32::from(script.byte()) * 90);
        let length = if spoil == 1 { length + 9 } else { length };
        let offset = if spoil == 2 {
            u32::from_be_bytes(script.bytes()).into()
        } else {
            at + u64::from(moved)
        };
        let last = moved + length >= len;
        let flags = if spoil == 3 { 1 } else { u16::from(last && spoil & 8 == 0) };
        self.known[index].moved += length;
        if spoil & 0x30 == 0x30 {
            let hole = [&offset.to_be_bytes()[..], &length.to_be_bytes()].concat();
            self.chunk(flags, 2, cookie, 12, &hole);
        } else {
            let payload = [&offset.to_be_bytes()[..], &vec![0x5a; length as usize]].concat();
            self.chunk(flags, 1, cookie, payload.len(), &payload);
        }
        if flags == 1 {
            self.known.swap_remove(index);
        }
    }

    fn status(&mut self, script: &mut Script<'_>) {
        let Some(index) = self.pick(script, |k| k.status) else { return self.submit(script) };
        let Known { cookie, len, .. } = self.known.swap_remove(index);
        let length = if script.is_rare() { u32::from_be_bytes(script.bytes()) } else { len };
        let words = [7, length, u32::from(script.byte())].map(u32::to_be_bytes).concat();
        self.chunk(1, 5, cookie, 12, &words);
    }

    /// Ends a command, well or badly.
    fn end(&mut self, script: &mut Script<'_>) {
        let wanted = |k: &Known| !(k.status || k.reads && k.moved < k.len);
        let fails = script.byte() & 3 == 0;
        let wanted = if fails { |_: &Known| true } else { wanted };
        let Some(index) = self.pick(script, wanted) else { return self.submit(script) };
        let Known { cookie, reads, at, moved, .. } = self.known.swap_remove(index);
        let error = if fails { 1 + u32::from(script.byte() % 119) } else { 0 };
        if !self.structured || (!reads && moved == 0 && script.byte() & 1 == 0) {
            let (magic, cookie) = (SIMPLE_REPLY_MAGIC.into(), cookie.into());
            let reply = SimpleReply { magic, error: error.into(), cookie };
            return self.hear(reply.as_bytes());
        }
        if !fails {
            return self.chunk(1, 0, cookie, 0, &[]);
        }
        let mut payload = [&error.to_be_bytes()[..], &[0, 3], b"bad"].concat();
        let kind = [0x8001, 0x8002, 0x8077][usize::from(script.byte() % 3)];
        if kind == 0x8002 {
            payload.extend(at.to_be_bytes());
        }
        self.chunk(1, kind, cookie, payload.len(), &payload);
    }

    fn collect(&mut self) {
        while let Some(done) = self.conn.poll_done() {
            let cookie = self.open.remove(&done.tag.index()).expect("it ends once");
            self.known.retain(|k| k.cookie != cookie);
            if let Ok(Reply::Data(read)) = done.outcome {
                let fine = read.iter().all(|b| b.iter().all(|b| [0, 0x5a].contains(b)));
                assert!(fine, "what was not sent");
            }
        }
        assert_eq!(self.conn.in_flight(), self.open.len());
        if self.conn.is_closing() {
            assert!(self.conn.close_reason().is_some() && self.conn.receive_space().is_none());
        }
    }
}
