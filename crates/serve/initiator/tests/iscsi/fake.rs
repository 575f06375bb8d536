//! A target that speaks the protocol as it should, and whose units say what the test wants.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use frame::Machine;
use iscsi::pdu::{LoginStatus, TaskOutcome};
use iscsi::target::{
    Action, ArrivedCommand, Auth, CommandOutcome, Config, Connection, LoginGrant, LoginReject,
};
use rt::buf::{Account, Bufs, MemoryClass, copy_in};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::spawn_local;

/// Size of its disk in blocks of 512 bytes.
pub(crate) const BLOCKS: usize = 4096;

/// What is said instead of what would be right.
#[derive(Clone)]
pub(crate) enum Say {
    Status(u8),
    Sense(u8, u8, u8),
    Deferred,
    /// A success with half of the data.
    HalfOfIt,
    /// A success before any data has been asked for.
    Early,
    /// That the command has failed below SCSI (RFC 7143 11.4.3: response 01h).
    Failure,
    /// That it has grown, which it does just then.
    Grows,
}

#[derive(Default)]
pub(crate) struct Unit {
    pub(crate) disk: RefCell<Vec<u8>>,
    /// What the next commands with an opcode are answered with.
    pub(crate) says: RefCell<BTreeMap<u8, VecDeque<Say>>>,
    /// Opcodes that it does not know.
    pub(crate) unknown: RefCell<Vec<u8>>,
    /// Opcodes of the commands that it has seen.
    pub(crate) seen: RefCell<Vec<u8>>,
    /// How many writes had FUA.
    pub(crate) forced: Cell<usize>,
    /// Blocks beyond [`BLOCKS`].
    pub(crate) grown: Cell<u64>,
    /// Whether what is freed reads as anything.
    pub(crate) frees_to_anything: Cell<bool>,
    /// What it answers to MODE SENSE.
    pub(crate) modes: RefCell<Vec<u8>>,
    /// Blocks that one COMPARE AND WRITE takes.
    pub(crate) compares: Cell<u8>,
    /// Whether the next answer is that of a failure.
    fails: Cell<bool>,
    /// Bits of the page *Logical Block Provisioning*: LBPU, LBPWS.
    pub(crate) provisioning: Cell<u8>,
    /// Where who logs in is sent to.
    pub(crate) moved: RefCell<Option<String>>,
}

impl Unit {
    pub(crate) fn say(&self, opcode: u8, what: &[Say]) {
        self.says.borrow_mut().entry(opcode).or_default().extend(what.iter().cloned());
    }

    pub(crate) fn count(&self, opcode: u8) -> usize {
        self.seen.borrow().iter().filter(|o| **o == opcode).count()
    }
}

pub(crate) struct Fake {
    pub(crate) at: SocketAddr,
    pub(crate) unit: Rc<Unit>,
}

impl Fake {
    pub(crate) async fn new(core: &rt::Core) -> Self {
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        let unit = Rc::new(Unit::default());
        unit.disk.borrow_mut().resize(BLOCKS * 512, 0);
        let (account, served) = (core.buffer_pool().account(), Rc::clone(&unit));
        spawn_local(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                spawn_local(serve(stream, Rc::clone(&served), account.clone()));
            }
        });
        Self { at, unit }
    }
}

/// Makes the first SCSI response among these PDUs that of a failure.
fn fail(mut pdus: &mut [u8]) {
    const SCSI_RESPONSE: u8 = 0x21;
    while pdus.len() >= 48 && pdus[0] & 0x3f != SCSI_RESPONSE {
        let length = u32::from_be_bytes([0, pdus[5], pdus[6], pdus[7]]) as usize;
        pdus = &mut pdus[48 + length.next_multiple_of(4)..];
    }
    pdus[2] = 1;
}

struct Server {
    unit: Rc<Unit>,
    account: Account,
    commands: BTreeMap<u32, ArrivedCommand>,
}

async fn serve(mut stream: rt::net::Stream, unit: Rc<Unit>, account: Account) {
    let mut machine = Connection::new(Arc::new(Config::default()));
    let mut server = Server { unit, account, commands: BTreeMap::new() };
    loop {
        while let Some(action) = machine.poll_action() {
            server.act(action, &mut machine);
        }
        while !machine.output().is_empty() {
            let mut bytes: Vec<u8> = machine.output().slices().flat_map(|s| s.to_vec()).collect();
            if server.unit.fails.take() {
                fail(&mut bytes);
            }
            if stream.write_all(&bytes).await.is_err() {
                return;
            }
            machine.output().advance(bytes.len());
        }
        if machine.is_closing() {
            return;
        }
        let Some(space) = machine.receive_space() else { continue };
        match stream.read(space).await {
            Ok(n) if n > 0 => machine.on_received(n),
            _ => return,
        }
    }
}

impl Server {
    fn act(&mut self, action: Action, machine: &mut Connection) {
        match action {
            Action::Login(_) => {
                let moved = self.unit.moved.borrow().clone().map(|to| LoginReject {
                    status: LoginStatus::MovedTemporarily,
                    redirect_address: Some(to),
                });
                let grant = LoginGrant {
                    auth: Auth::None,
                    portal_group: 1,
                    target_alias: None,
                    session: None,
                };
                machine.login_decision(moved.map_or(Ok(grant), Err));
            }
            Action::Establish(_) => machine.session_established(Ok(1)),
            Action::CommandArrived(command) => {
                let writes = matches!(command.direction, iscsi::target::Direction::Write);
                let wanted = if writes { command.expected_len.into() } else { 0 };
                let tag = command.tag;
                let mut says = self.unit.says.borrow_mut();
                let said = says.get_mut(&command.cdb[0]);
                if said.and_then(|said| said.pop_front_if(|s| matches!(s, Say::Early))).is_some() {
                    return machine.complete(tag, &CommandOutcome::default());
                }
                drop(says);
                self.commands.insert(tag.0, command);
                machine.admit(tag, wanted);
            }
            Action::Grant { tag, bytes, .. } => {
                let credit = self.account.try_credit(bytes, MemoryClass::LocalIo).unwrap();
                machine.grant(tag, credit.alloc(bytes));
            }
            Action::Run { tag, data } => {
                let command = self.commands.remove(&tag.0).unwrap();
                self.run(&command, &data, machine);
            }
            Action::Abort { tag } => machine.complete(tag, &CommandOutcome::status(0x40, &[])),
            Action::TaskManagement { id, .. } => {
                machine.task_management_done(id, TaskOutcome::Complete);
            }
            Action::SendTargets(_) => machine.targets(&[]),
            Action::Close(_) => {}
        }
    }

    fn run(&mut self, command: &ArrivedCommand, data: &Bufs, machine: &mut Connection) {
        let (tag, opcode) = (command.tag, command.cdb[0]);
        self.unit.seen.borrow_mut().push(opcode);
        let forced = opcode == 0x8a && command.cdb[1] & 8 != 0;
        self.unit.forced.update(|n| n + usize::from(forced));
        let said = self.unit.says.borrow_mut().get_mut(&opcode).and_then(VecDeque::pop_front);
        let fixed = |first: u8, key: u8, code: [u8; 2]| {
            let mut sense = [0; 18];
            (sense[0], sense[2], sense[7]) = (first, key, 10);
            sense[12..14].copy_from_slice(&code);
            sense
        };
        let check = |machine: &mut Connection, sense: &[u8]| {
            machine.complete(tag, &CommandOutcome::status(2, sense));
        };
        match said {
            Some(Say::Status(status)) => {
                return machine.complete(tag, &CommandOutcome::status(status, &[]));
            }
            Some(Say::Sense(key, a, b)) => return check(machine, &fixed(0x70, key, [a, b])),
            Some(Say::Deferred) => return check(machine, &fixed(0x71, 3, [0x0c, 0])),
            Some(Say::Failure) => {
                self.unit.fails.set(true);
                return machine.complete(tag, &CommandOutcome::default());
            }
            Some(Say::Grows) => {
                self.unit.grown.update(|n| n + 1024);
                return check(machine, &fixed(0x70, 6, [0x2a, 9]));
            }
            Some(Say::HalfOfIt | Say::Early) | None => {}
        }
        if self.unit.unknown.borrow().contains(&opcode) {
            return check(machine, &fixed(0x70, 5, [0x20, 0]));
        }
        let mut answer = self.answer(command, data);
        if matches!(said, Some(Say::HalfOfIt)) {
            answer.truncate(answer.len() / 2);
        }
        if answer.is_empty() {
            return machine.complete(tag, &CommandOutcome::default());
        }
        answer.truncate(command.expected_len as usize);
        let credit = self.account.try_credit(answer.len(), MemoryClass::LocalIo).unwrap();
        machine.complete(tag, &CommandOutcome::good(copy_in(&credit, &answer)));
    }

    fn answer(&self, command: &ArrivedCommand, data: &Bufs) -> Vec<u8> {
        let cdb = &command.cdb;
        let at = u64::from_be_bytes(cdb[2..10].try_into().unwrap()) as usize;
        let at = at.wrapping_mul(512);
        let count = u32::from_be_bytes(cdb[10..14].try_into().unwrap()) as usize * 512;
        let mut disk = self.unit.disk.borrow_mut();
        match cdb[0] {
            0x12 if cdb[1] & 1 == 0 => vec![0; 36],
            0x12 => self.page(cdb[2]),
            0x9e => {
                let mut out = vec![0; 32];
                let last = BLOCKS as u64 + self.unit.grown.get() - 1;
                out[..8].copy_from_slice(&last.to_be_bytes());
                let thin = if self.unit.frees_to_anything.get() { 0x80 } else { 0xc0 };
                (out[10], out[14]) = (2, thin);
                out
            }
            0x88 => disk[at..at + count].to_vec(),
            0x8a => {
                data.copy_to(&mut disk[at..at + data.len()]);
                Vec::new()
            }
            0x93 => {
                let freed = cdb[1] & 8 != 0 && self.unit.frees_to_anything.get();
                disk[at..at + count].fill(if freed { 0xee } else { 0 });
                Vec::new()
            }
            0x1a => self.unit.modes.borrow().clone(),
            0x42 => {
                let list = data.to_vec();
                let at = u64::from_be_bytes(list[8..16].try_into().unwrap()) as usize * 512;
                let count = u32::from_be_bytes(list[16..20].try_into().unwrap()) as usize * 512;
                disk[at..at + count].fill(0);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn page(&self, page: u8) -> Vec<u8> {
        match page {
            0x83 => vec![0, 0x83, 0, 12, 1, 3, 0, 8, 6, 0, 0, 1, 2, 3, 4, 5],
            0xb0 => {
                let mut out = vec![0, 0xb0, 0, 60];
                out.resize(64, 0);
                // At most 64 blocks in one UNMAP, of one range.
                (out[5], out[23], out[27]) = (self.unit.compares.get(), 64, 1);
                out
            }
            0xb2 => vec![0, 0xb2, 0, 4, 0, self.unit.provisioning.get(), 0, 0],
            _ => vec![0, page, 0, 0],
        }
    }
}
