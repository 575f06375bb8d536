//! A client with several paths to one volume, like a multipath driver: it stays on a path while the
//! path answers, switches to the next when it does not, retries unanswered operations, and records
//! everything for [`linearizability::check_history`](crate::linearizability::check_history).
//!
//! An attempt without an answer stays open in the history, because it may still take effect; the
//! next attempt writes another value.

use crate::{
    BlockClient, Timeouts,
    iscsi::{ScsiFailure, Session},
    linearizability::{Operation, OperationKind, UNWRITTEN},
    nvme::{Controller, NvmeFailure},
    registers::{SeededRng, fill_block, write_number_of},
};
use std::{
    io,
    net::SocketAddr,
    ops::Range,
    time::{Duration, Instant},
};

/// Silence, then a ping, then the same silence again: the path is dead (1 s in all). A command may
/// take longer than that if the peer answers pings.
const PATH_TIMEOUTS: Timeouts = Timeouts {
    read_timeout: Duration::from_millis(500),
    ping_when_silent: true,
    command_timeout: Duration::from_secs(30),
};
/// Pause between two attempts on a path that says "not now", and after all paths have failed.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Blocks of the largest operation.
const MAX_OPERATION_BLOCKS: u64 = 16;

/// The addresses of a volume, and its protocol.
#[derive(Clone, Debug)]
pub struct VolumePaths {
    /// One portal of each node.
    pub portals: Vec<SocketAddr>,
    /// The volume's names, the same at every node.
    pub volume: VolumeAddress,
}

/// How a protocol names the volume, and the initiator's own name.
#[derive(Clone, Debug)]
pub enum VolumeAddress {
    /// Over iSCSI.
    Iscsi {
        /// The initiator's name.
        initiator: String,
        /// The target's name.
        target: String,
        /// The number of the unit.
        lun: u8,
    },
    /// Over NVMe/TCP.
    Nvme {
        /// The host's name.
        host: String,
        /// The subsystem's name; its namespace 1 is meant.
        subsystem: String,
    },
}

/// A connection of one of the protocols.
enum PathConnection {
    Session(Session),
    Controller(Controller),
}

impl PathConnection {
    /// Connects; `number` tells sessions of one initiator apart.
    fn open(paths: &VolumePaths, path: usize, number: u32) -> io::Result<Self> {
        let at = paths.portals[path];
        match &paths.volume {
            VolumeAddress::Iscsi { initiator, target, lun } => {
                Session::login_with(at, initiator, target, *lun, number, PATH_TIMEOUTS)
                    .map(Self::Session)
            }
            VolumeAddress::Nvme { host, subsystem } => {
                Controller::connect_with(at, host, subsystem, PATH_TIMEOUTS).map(Self::Controller)
            }
        }
    }

    fn disk(&mut self) -> &mut dyn BlockClient {
        match self {
            Self::Session(session) => session,
            Self::Controller(controller) => controller,
        }
    }

    fn logout_requested(&self) -> bool {
        matches!(self, Self::Session(session) if session.logout_requested())
    }
}

/// How to respond to a refusal or a broken connection.
#[derive(Debug, PartialEq, Eq)]
enum RetryAction {
    /// Retry the same path after a pause.
    RetrySamePath,
    /// Switch to another path.
    NextPath,
    /// No path helps: the application gets an error.
    GiveUp,
}

fn retry_action(error: &io::Error) -> RetryAction {
    if let Some(refused) = ScsiFailure::from_io_error(error) {
        return scsi_retry_action(refused);
    }
    if let Some(failed) = NvmeFailure::from_io_error(error) {
        return nvme_retry_action(failed);
    }
    match error.kind() {
        // A target that breaks its protocol, or data that was never written.
        io::ErrorKind::Other | io::ErrorKind::InvalidData => RetryAction::GiveUp,
        _ => RetryAction::NextPath,
    }
}

/// As Linux does it: SAM-5 5.3 for statuses; SPC-5 5.15.2 for ports that are in transition or
/// unavailable.
fn scsi_retry_action(refused: ScsiFailure) -> RetryAction {
    const BUSY: u8 = 0x08;
    const TASK_SET_FULL: u8 = 0x28;
    const NOT_READY: u8 = 0x2;
    const UNIT_ATTENTION: u8 = 0x6;
    const ABORTED_COMMAND: u8 = 0xb;
    match (refused.status, refused.sense) {
        (BUSY | TASK_SET_FULL, _) => RetryAction::RetrySamePath,
        (_, [UNIT_ATTENTION | ABORTED_COMMAND, ..] | [NOT_READY, 0x04, 0x0a]) => {
            RetryAction::RetrySamePath
        }
        (_, [NOT_READY, ..]) => RetryAction::NextPath,
        _ => RetryAction::GiveUp,
    }
}

/// As Linux does it: NVMe Base 2.0, 3.3.3.2.1 and 8.1.4.
fn nvme_retry_action(failed: NvmeFailure) -> RetryAction {
    const GENERIC: u8 = 0;
    const COMMAND_SPECIFIC: u8 = 1;
    const PATH: u8 = 3;
    match failed.code() {
        // A path in transition; a namespace that is not ready; a command that was interrupted.
        (PATH, 0x03) | (GENERIC, 0x82 | 0x21) => RetryAction::RetrySamePath,
        // Any other path error; a queue that closed during the command; a refused Connect.
        (PATH, _) | (GENERIC, 0x07 | 0x08) | (COMMAND_SPECIFIC, 0x80..=0x84) => {
            RetryAction::NextPath
        }
        _ => RetryAction::GiveUp,
    }
}

/// One client: one command at a time, one connection at a time.
pub struct MultipathClient {
    number: u64,
    volume: u64,
    paths: VolumePaths,
    /// The path in use, or the next to be tried.
    path: usize,
    connection: Option<PathConnection>,
    blocks: Range<u64>,
    sequence: u64,
    /// The clock that all clients share.
    clock: Instant,
    /// How long an operation may fail on all paths before it is an error to the application.
    operation_timeout: Duration,
    operations: Vec<Operation>,
    /// When the longest operation so far was sent, and how long it took with all its attempts.
    slowest_operation: (Duration, Duration),
    completed_operations: u64,
}

impl MultipathClient {
    /// Client `number` of several that use `blocks` of one volume (which `volume` names in every
    /// block) and share `clock`. It starts on the path of its number.
    #[must_use]
    pub fn new(
        number: u64,
        volume: u64,
        paths: VolumePaths,
        blocks: Range<u64>,
        clock: Instant,
    ) -> Self {
        let mut client = Self {
            number,
            volume,
            paths,
            path: 0,
            connection: None,
            blocks,
            sequence: 0,
            clock,
            operation_timeout: Duration::from_secs(120),
            operations: Vec::new(),
            slowest_operation: Default::default(),
            completed_operations: 0,
        };
        client.return_to_home_path();
        client
    }

    /// Returns to the path of its number.
    pub fn return_to_home_path(&mut self) {
        let paths = self.paths.portals.len() as u64;
        self.switch_path(usize::try_from(self.number % paths).unwrap_or(0));
    }

    /// Switches to path `path`; drops the connection without logout, as if its node had died.
    pub fn switch_path(&mut self, path: usize) {
        if self.path != path {
            self.connection = None;
            self.path = path;
        }
    }

    /// The longest operation since the last call: when it began, and how long it took with all its
    /// attempts.
    pub fn take_slowest_operation(&mut self) -> (Duration, Duration) {
        std::mem::take(&mut self.slowest_operation)
    }

    /// Operations that succeeded.
    #[must_use]
    pub fn completed_operations(&self) -> u64 {
        self.completed_operations
    }

    /// All operations so far, block by block.
    #[must_use]
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// One step of load: a write or a read somewhere in its blocks, sometimes a flush. Errors are
    /// those that an application would see.
    pub fn step(&mut self, dice: &mut SeededRng) -> Result<(), String> {
        let most = MAX_OPERATION_BLOCKS.min(self.blocks.end - self.blocks.start);
        let blocks = 1 + dice.next_below(most);
        let lba =
            self.blocks.start + dice.next_below(self.blocks.end - self.blocks.start - blocks + 1);
        match dice.next_below(32) {
            0 => self.retry_until_done(|client| client.disk()?.flush()),
            1..16 => self.retry_until_done(|client| client.read(lba, blocks)),
            roll => self.retry_until_done(|client| client.write(lba, blocks, roll < 18)),
        }
    }

    /// Reads all of its blocks.
    pub fn read_all(&mut self) -> Result<(), String> {
        let Range { start, end } = self.blocks;
        for lba in (start..end).step_by(usize::try_from(MAX_OPERATION_BLOCKS).unwrap_or(1)) {
            self.retry_until_done(|client| client.read(lba, MAX_OPERATION_BLOCKS.min(end - lba)))?;
        }
        Ok(())
    }

    /// Retries `operation` until it succeeds.
    fn retry_until_done(
        &mut self,
        mut operation: impl FnMut(&mut Self) -> io::Result<()>,
    ) -> Result<(), String> {
        let begun = self.clock.elapsed();
        let mut tried = 0;
        loop {
            if self.connection.as_ref().is_some_and(PathConnection::logout_requested) {
                self.next_path();
            }
            let Err(error) = operation(self) else { break };
            let portal = self.paths.portals[self.path];
            let waited = self.clock.elapsed().saturating_sub(begun);
            let next = retry_action(&error);
            if next == RetryAction::GiveUp || waited > self.operation_timeout {
                return Err(format!(
                    "client {}: {error} at {portal} after {:.1} s",
                    self.number,
                    waited.as_secs_f64()
                ));
            }
            tried += 1;
            if next == RetryAction::NextPath {
                self.next_path();
            }
            if next == RetryAction::RetrySamePath || tried % self.paths.portals.len() == 0 {
                std::thread::sleep(RETRY_PAUSE);
            }
        }
        let took = self.clock.elapsed().saturating_sub(begun);
        if took > self.slowest_operation.1 {
            self.slowest_operation = (begun, took);
        }
        self.completed_operations += 1;
        Ok(())
    }

    fn next_path(&mut self) {
        self.connection = None;
        self.path = (self.path + 1) % self.paths.portals.len();
    }

    fn disk(&mut self) -> io::Result<&mut dyn BlockClient> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let number = u32::try_from(self.number).unwrap_or(0) + 1;
                PathConnection::open(&self.paths, self.path, number)?
            }
        };
        Ok(self.connection.insert(connection).disk())
    }

    fn write(&mut self, lba: u64, blocks: u64, fua: bool) -> io::Result<()> {
        let (number, volume) = (self.number, self.volume);
        self.sequence += 1;
        let value = (number + 1) << 40 | self.sequence;
        let size = self.disk()?.block_bytes();
        let mut data = vec![0; usize::try_from(blocks).unwrap_or(0) * size];
        for (block, lba) in data.chunks_mut(size).zip(lba..) {
            fill_block(block, volume, lba, value);
        }
        let invoked = self.clock.elapsed();
        let outcome = self.disk()?.write(lba, &data, fua);
        let answered = outcome.is_ok().then(|| self.clock.elapsed());
        let kind = OperationKind::Write;
        self.operations.extend((lba..lba + blocks).map(|lba| Operation {
            client: number,
            lba,
            kind,
            value,
            invoked_at: invoked,
            completed_at: answered,
        }));
        outcome
    }

    fn read(&mut self, lba: u64, blocks: u64) -> io::Result<()> {
        let size = self.disk()?.block_bytes();
        let mut data = vec![0; usize::try_from(blocks).unwrap_or(0) * size];
        let invoked = self.clock.elapsed();
        self.disk()?.read(lba, &mut data)?;
        let answered = Some(self.clock.elapsed());
        for (block, lba) in data.chunks(size).zip(lba..) {
            let value = write_number_of(block, self.volume, lba).map_err(corrupt_block_error)?;
            let (client, value) = (self.number, value.unwrap_or(UNWRITTEN));
            let kind = OperationKind::Read;
            self.operations.push(Operation {
                client,
                lba,
                kind,
                value,
                invoked_at: invoked,
                completed_at: answered,
            });
        }
        Ok(())
    }
}

/// An error for a block that no write explains; no other path can help.
fn corrupt_block_error(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        iscsi::{Pdu, opcode},
        linearizability,
    };
    use std::{
        io::Write,
        net::{TcpListener, TcpStream},
        sync::{
            Arc, Mutex,
            atomic::{AtomicU8, Ordering},
        },
    };

    const BLOCK: usize = 512;
    const BLOCKS: u64 = 64;

    /// What a node does with commands.
    const SERVES: u8 = 0;
    const UNAVAILABLE: u8 = 1;
    /// Answers pings only.
    const HOLDS: u8 = 2;
    /// Answers nothing, like a stopped process.
    const STOPPED: u8 = 3;

    /// A minimal target for the client, over a disk in memory that the nodes share.
    #[derive(Clone)]
    struct Node {
        disk: Arc<Mutex<Vec<u8>>>,
        does: Arc<AtomicU8>,
    }

    impl Node {
        fn start(disk: &Arc<Mutex<Vec<u8>>>) -> (SocketAddr, Self) {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let at = listener.local_addr().unwrap();
            let node = Self { disk: Arc::clone(disk), does: Arc::new(AtomicU8::new(SERVES)) };
            let this = node.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let node = this.clone();
                    std::thread::spawn(move || node.converse(stream));
                }
            });
            (at, node)
        }

        fn does(&self, what: u8) {
            self.does.store(what, Ordering::SeqCst);
        }

        fn converse(&self, mut stream: TcpStream) -> io::Result<()> {
            loop {
                let asked = Pdu::receive(&mut stream)?;
                while self.does.load(Ordering::SeqCst) == STOPPED {
                    std::thread::sleep(Duration::from_millis(5));
                }
                let answer = match asked.opcode() {
                    opcode::LOGIN => Pdu::new(opcode::LOGIN_RESPONSE, 0x87),
                    opcode::NOP_OUT => Pdu::new(opcode::NOP_IN, 0x80).with_bytes_at(20, [0xff; 4]),
                    _ if self.does.load(Ordering::SeqCst) == HOLDS => {
                        let node = self.clone();
                        let mut stream = stream.try_clone()?;
                        std::thread::spawn(move || {
                            while node.does.load(Ordering::SeqCst) == HOLDS {
                                std::thread::sleep(Duration::from_millis(5));
                            }
                            stream.write_all(&node.run(&asked).to_bytes())
                        });
                        continue;
                    }
                    _ => self.run(&asked),
                };
                stream.write_all(&answer.to_bytes())?;
            }
        }

        fn run(&self, asked: &Pdu) -> Pdu {
            let number = |at: usize| usize::try_from(asked.word_at(at)).unwrap();
            let (from, length) = (number(38) * BLOCK, number(42) * BLOCK);
            let mut disk = self.disk.lock().unwrap();
            if self.does.load(Ordering::SeqCst) == UNAVAILABLE {
                let mut sense = vec![0, 18, 0x70, 0, 2, 0, 0, 0, 0, 10, 0, 0, 0, 0, 4, 0x0c];
                sense.resize(20, 0);
                let mut answer = Pdu::new(opcode::SCSI_RESPONSE, 0x80).with_data(&sense);
                answer.header[3] = 2;
                return answer;
            }
            let good = Pdu::new(opcode::DATA_IN, 0x81);
            match asked.header[32] {
                0x8a => disk[from..from + length].copy_from_slice(&asked.data),
                0x88 => return good.with_data(&disk[from..from + length]),
                0x9e => {
                    let mut size = [0; 32];
                    size[..8].copy_from_slice(&(BLOCKS - 1).to_be_bytes());
                    size[8..12].copy_from_slice(&512u32.to_be_bytes());
                    return good.with_data(&size);
                }
                _ => {}
            }
            Pdu::new(opcode::SCSI_RESPONSE, 0x80)
        }
    }

    fn two_nodes() -> ([Node; 2], MultipathClient) {
        let disk = Arc::new(Mutex::new(vec![0; 64 * BLOCK]));
        let (nodes, portals): (Vec<_>, Vec<_>) =
            (0..2).map(|_| Node::start(&disk)).map(|(at, node)| (node, at)).unzip();
        let paths = VolumePaths {
            portals,
            volume: VolumeAddress::Iscsi {
                initiator: "iqn.2026-01.test:client".to_owned(),
                target: "iqn.2026-01.test:target".to_owned(),
                lun: 0,
            },
        };
        let client = MultipathClient::new(0, 7, paths, 0..BLOCKS, Instant::now());
        (nodes.try_into().map_err(|_| "two nodes").unwrap(), client)
    }

    fn load(client: &mut MultipathClient, steps: usize) {
        let mut dice = SeededRng::new(1);
        for _ in 0..steps {
            client.step(&mut dice).unwrap();
        }
    }

    #[test]
    fn it_moves_to_the_node_that_serves_and_stays_there() {
        let ([first, second], mut client) = two_nodes();
        load(&mut client, 50);
        assert_eq!(client.path, 0);
        first.does(UNAVAILABLE);
        load(&mut client, 50);
        assert_eq!(client.path, 1);
        first.does(SERVES);
        second.does(STOPPED);
        client.take_slowest_operation();
        load(&mut client, 50);
        assert_eq!(client.path, 0);
        let (_, took) = client.take_slowest_operation();
        assert!(took >= Duration::from_millis(900) && took < Duration::from_secs(4), "{took:?}");
        client.read_all().unwrap();
        let checked = linearizability::check_history(client.operations()).unwrap();
        assert!(checked.completed > 150 && checked.blocks == 64, "{checked:?}");
    }

    #[test]
    fn a_node_that_holds_commands_and_answers_pings_is_waited_for() {
        let ([first, _], mut client) = two_nodes();
        load(&mut client, 10);
        first.does(HOLDS);
        let waker = std::thread::spawn({
            let first = first.clone();
            move || {
                std::thread::sleep(Duration::from_millis(1700));
                first.does(SERVES);
            }
        });
        load(&mut client, 10);
        waker.join().unwrap();
        assert_eq!(client.path, 0);
        assert!(client.take_slowest_operation().1 >= Duration::from_millis(1500));
        linearizability::check_history(client.operations()).unwrap();
    }

    #[test]
    fn an_attempt_without_an_answer_stays_open() {
        let ([first, _], mut client) = two_nodes();
        load(&mut client, 10);
        first.does(STOPPED);
        client.write(3, 2, false).unwrap_err();
        assert_eq!(linearizability::check_history(client.operations()).unwrap().pending, 2);
    }

    #[test]
    fn without_a_node_that_serves_the_application_sees_an_error_in_the_end() {
        let ([first, second], mut client) = two_nodes();
        load(&mut client, 2);
        first.does(UNAVAILABLE);
        second.does(UNAVAILABLE);
        client.operation_timeout = Duration::from_millis(300);
        let error = client.read_all().unwrap_err();
        assert!(error.contains("sense 2/04/0c"), "{error}");
    }

    #[test]
    fn statuses_of_nvme_send_where_linux_goes() {
        let next = |status| retry_action(&io::Error::other(NvmeFailure { status }));
        assert_eq!(
            [0x0303, 0x0082].map(next),
            [RetryAction::RetrySamePath, RetryAction::RetrySamePath]
        );
        assert_eq!(
            [0x0302, 0x4301, 0x0008, 0x4182].map(next),
            [(); 4].map(|()| RetryAction::NextPath)
        );
        assert_eq!([0x0281, 0x0006].map(next), [RetryAction::GiveUp, RetryAction::GiveUp]);
    }

    #[test]
    fn foreign_data_is_not_a_path_error() {
        let ([first, _], mut client) = two_nodes();
        first.disk.lock().unwrap()[..8].fill(1);
        let error = client.read_all().unwrap_err();
        assert!(error.contains("not one of ours"), "{error}");
    }
}
