//! Bytes to and fro, in any portions, and an export in memory.
#![allow(clippy::unwrap_used, dead_code)]

use std::sync::Arc;

use nbd::message::{
    OPTION_MAGIC, Opt, OptionHeader, OptionReply, REPLY_MAGIC, REQUEST_MAGIC, Rep, Request,
};
use nbd::server::{Action, Answer, Command, Config, Connection};
use nbd::{BlockStatusExtent, Errno, Export, SizeConstraints, Tag};
use testkit::PayloadMemory;
use testkit::machine::{feed, take};
use zerocopy::{FromBytes, IntoBytes};

pub(crate) const BYTES: u64 = 1 << 20;

pub(crate) fn export(name: &str) -> Export {
    Export {
        name: name.to_owned(),
        description: "an export of tests".to_owned(),
        bytes: BYTES,
        size_constraints: SizeConstraints { minimum: 512, preferred: 4096, payload: 256 << 10 },
        read_only: false,
        can_trim: true,
        fast_zero_bytes: Some(4096),
        multi_conn: true,
    }
}

pub(crate) fn config(exports: &[Export]) -> Config {
    Config { max_in_flight: 8, ..Config::new(Arc::from(exports)) }
}

/// A server's machine, and the export behind it.
pub(crate) struct Served {
    pub(crate) machine: Connection,
    pub(crate) memory: PayloadMemory,
    pub(crate) disk: Vec<u8>,
    pub(crate) holes: Vec<bool>,
    /// Commands that were carried out.
    pub(crate) ran: Vec<Command>,
    /// Answers each command with this.
    pub(crate) fails: Option<Errno>,
    unread: Vec<u8>,
}

impl Served {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            machine: Connection::new(config),
            memory: PayloadMemory::new(),
            disk: vec![0; BYTES as usize],
            holes: vec![true; (BYTES / 512) as usize],
            ran: Vec::new(),
            fails: None,
            unread: Vec::new(),
        }
    }

    pub(crate) fn feed(&mut self, bytes: &[u8], portion: &mut dyn FnMut() -> usize) {
        self.unread.extend(bytes);
        loop {
            let n = feed(&mut self.machine, &self.unread, portion);
            self.unread.drain(..n);
            if !self.act() && n == 0 {
                return;
            }
        }
    }

    pub(crate) fn take(&mut self, portion: &mut dyn FnMut() -> usize) -> Vec<u8> {
        take(&mut self.machine, portion)
    }

    /// Feeds, and takes what that brings.
    pub(crate) fn exchange(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.feed(bytes, &mut || usize::MAX);
        self.take(&mut || usize::MAX)
    }

    fn act(&mut self) -> bool {
        let mut any = false;
        while let Some(action) = self.machine.poll_action() {
            any = true;
            match action {
                Action::Grant { tag, bytes } => {
                    let room = self.memory.room(bytes as usize);
                    self.machine.grant(tag, room);
                }
                Action::Run { tag, command, .. } => self.run(tag, command),
            }
        }
        any
    }

    fn run(&mut self, tag: Tag, command: Command) {
        let answer = match self.fails {
            Some(error) => Answer::Failed(error),
            None => self.carry_out(&command),
        };
        self.ran.push(command);
        self.machine.answer(tag, answer);
    }

    fn carry_out(&mut self, command: &Command) -> Answer {
        let part = |at: u64, len: u32| at as usize..at as usize + len as usize;
        let mut mark = |at: u64, len: u64, hole: bool| {
            self.holes[(at / 512) as usize..((at + len) / 512) as usize].fill(hole);
        };
        match command {
            Command::Read { at, len } => {
                return Answer::Data(self.memory.holding(&self.disk[part(*at, *len)]));
            }
            Command::Write { at, data, .. } => {
                mark(*at, data.len() as u64, false);
                let at = *at as usize;
                self.disk[at..at + data.len()].copy_from_slice(&data.to_vec());
            }
            Command::Trim { at, len, .. } | Command::WriteZeroes { at, len, hole: true, .. } => {
                mark(*at, (*len).into(), true);
                self.disk[part(*at, *len)].fill(0);
            }
            Command::WriteZeroes { at, len, .. } => {
                mark(*at, (*len).into(), false);
                self.disk[part(*at, *len)].fill(0);
            }
            Command::BlockStatus { at, len, .. } => {
                return Answer::Extents(self.extents(*at, *len));
            }
            Command::Flush => {}
        }
        Answer::Done
    }

    fn extents(&self, at: u64, len: u32) -> Vec<BlockStatusExtent> {
        let holes = &self.holes[(at / 512) as usize..((at + u64::from(len)) / 512) as usize];
        let alike = holes.chunk_by(|a, b| a == b);
        alike
            .map(|run| BlockStatusExtent {
                bytes: run.len() as u32 * 512,
                hole: run[0],
                zero: run[0],
            })
            .collect()
    }
}

/// The bytes of an option.
pub(crate) fn option(option: Opt, data: &[u8]) -> Vec<u8> {
    let header = OptionHeader {
        magic: OPTION_MAGIC.into(),
        option: option.0.into(),
        length: (data.len() as u32).into(),
    };
    [header.as_bytes(), data].concat()
}

/// A string with its length.
pub(crate) fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

/// Data of `NBD_OPT_GO` and `NBD_OPT_INFO`.
pub(crate) fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|w| data.extend(w.to_be_bytes()));
    data
}

/// Data of the options about metadata.
pub(crate) fn queries(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|q| data.extend(string(q)));
    data
}

pub(crate) fn request(kind: u16, flags: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let request = Request {
        magic: REQUEST_MAGIC.into(),
        flags: flags.into(),
        kind: kind.into(),
        cookie: cookie.into(),
        offset: at.into(),
        length: len.into(),
    };
    request.as_bytes().to_vec()
}

/// Replies to options.
pub(crate) fn replies(mut bytes: &[u8]) -> Vec<(Opt, Rep, Vec<u8>)> {
    let mut out = Vec::new();
    while !bytes.is_empty() {
        let (reply, rest) = OptionReply::read_from_prefix(bytes).unwrap();
        assert_eq!(reply.magic.get(), REPLY_MAGIC);
        let (data, rest) = rest.split_at(reply.length.get() as usize);
        out.push((Opt(reply.option.get()), Rep(reply.kind.get()), data.to_vec()));
        bytes = rest;
    }
    out
}
