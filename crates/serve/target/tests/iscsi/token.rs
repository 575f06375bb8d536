//! POPULATE TOKEN and WRITE USING TOKEN, carried out (RFD 0018): the numbers are the RFD's.

use std::sync::atomic::{AtomicBool, Ordering};

use block::testing::faulty::OpKind;
use block::{Blocks, Lba, Request};
use iscsi::pdu::TaskFunction;

use super::copy::{DISK, Disk, OTHER, noise, rig, targets};
use super::*;

const PIECE: u64 = 1024;
const READ: u8 = 0x40;

/// Ranges: first block and count.
type Ranges<'a> = &'a [(u64, u32)];

fn ranges(all: Ranges<'_>) -> Vec<u8> {
    let range =
        |(at, count): &(u64, u32)| [&at.to_be_bytes()[..], &count.to_be_bytes(), &[0; 4]].concat();
    all.iter().flat_map(range).collect()
}

fn populate(timeout_s: u32, all: Ranges<'_>) -> Vec<u8> {
    let ranges = ranges(all);
    let mut list = (14 + ranges.len() as u16).to_be_bytes().to_vec();
    list.extend([0, 0]);
    list.extend(timeout_s.to_be_bytes());
    list.extend([0; 6]);
    list.extend((ranges.len() as u16).to_be_bytes());
    list.extend(ranges);
    list
}

fn write(token: &[u8], flags: u8, offset: u64, all: Ranges<'_>) -> Vec<u8> {
    let ranges = ranges(all);
    let mut list = (534 + ranges.len() as u16).to_be_bytes().to_vec();
    list.extend([flags, 0, 0, 0, 0, 0]);
    list.extend(offset.to_be_bytes());
    list.extend(token);
    list.resize(534, 0);
    list.extend((ranges.len() as u16).to_be_bytes());
    list.extend(ranges);
    list
}

/// Fields of RECEIVE ROD TOKEN INFORMATION.
struct Told {
    status: u8,
    blocks: u64,
    token: Vec<u8>,
}

const UNKNOWN: [u8; 3] = [5, 0x23, 0x04];
const CANCELLED: [u8; 3] = [5, 0x23, 0x08];

impl Client {
    /// Sends POPULATE TOKEN (10h) or WRITE USING TOKEN (11h) with list identifier 1; its tag.
    async fn begin_token(&mut self, lun: u8, action: u8, list: &[u8]) -> u32 {
        let (itt, len) = (self.initiator.itt, list.len() as u32);
        let [a, b] = (len as u16).to_be_bytes();
        let cdb = [0x83, action, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, a, b, 0, 0];
        let mut command = self.initiator.command(&cdb, WRITE, len, list);
        command[9] = lun;
        self.send(&command).await;
        itt
    }

    /// Key and code that it ends with, if it is not GOOD; a conflict is all zeroes.
    async fn token(&mut self, lun: u8, action: u8, list: &[u8]) -> Result<(), [u8; 3]> {
        self.begin_token(lun, action, list).await;
        let pdu = self.next().await;
        assert_eq!(pdu.opcode(), Opcode::ScsiResponse, "{pdu:?}");
        match pdu.header[3] {
            0 => Ok(()),
            0x18 => Err([0; 3]),
            _ => Err([pdu.data[4], pdu.data[14], pdu.data[15]]),
        }
    }

    /// Takes the unit's pending attentions.
    async fn greet(&mut self, lun: u8) {
        loop {
            let mut ready = self.initiator.command(&READY, 0, 0, &[]);
            ready[9] = lun;
            self.send(&ready).await;
            if self.next().await.header[3] == 0 {
                return;
            }
        }
    }

    async fn information(&mut self, lun: u8) -> Told {
        let cdb = [0x84, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0];
        let mut command = self.initiator.command(&cdb, READ, 1024, &[]);
        command[9] = lun;
        self.send(&command).await;
        let data = self.next().await;
        assert_eq!(data.opcode(), Opcode::DataIn, "{data:?}");
        let d = data.data;
        let field = 32 + usize::from(d[13]);
        let token = d.get(field + 6..).unwrap_or_default().to_vec();
        let blocks = u64::from_be_bytes(d[16..24].try_into().unwrap());
        if data.header[1] & 1 == 0 {
            self.next().await;
        }
        Told { status: d[5], blocks, token }
    }

    /// A token for blocks of a logical unit.
    async fn made(&mut self, lun: u8, timeout_s: u32, all: Ranges<'_>) -> Vec<u8> {
        assert_eq!(self.token(lun, 0x10, &populate(timeout_s, all)).await, Ok(()));
        let info = self.information(lun).await;
        assert_eq!((info.status, info.token.len()), (1, 512));
        info.token
    }

    async fn uses(&mut self, lun: u8, token: &[u8], all: Ranges<'_>) -> Result<(), [u8; 3]> {
        self.token(lun, 0x11, &write(token, 0, 0, all)).await
    }
}

async fn fill(disk: &Disk, blocks: u64, salt: u8) {
    for at in (0..blocks).step_by(PIECE as usize) {
        disk.put(at, &noise(PIECE.min(blocks - at), salt)).await;
    }
}

async fn holds(disk: &Disk, at: u64, blocks: u64, salt: u8) -> bool {
    for piece in (0..blocks).step_by(PIECE as usize) {
        let count = PIECE.min(blocks - piece);
        if disk.get(at + piece, count).await != noise(count, salt) {
            return false;
        }
    }
    true
}

/// 1, 3: the written data is that of the token, in the same volume and in another, for any owner of
/// the token in any session; all memory is returned.
#[test]
fn a_token_transfers_the_data_of_its_creation() {
    on_core(async |core| {
        let (server, [one, two], at, mut client) = rig(&core).await;
        fill(&one, 4 * PIECE, 0).await;
        let token = client.made(1, 0, &[(0, 3000), (3000, 1096)]).await;
        client.greet(2).await;
        assert_eq!(client.uses(2, &token, &[(7, 1024), (2048, 3072)]).await, Ok(()));
        let info = client.information(2).await;
        assert_eq!((info.status, info.blocks, info.token.len()), (1, 4096, 0));
        assert!(holds(&two, 7, 1024, 0).await && holds(&two, 2048, 3072, 0).await);
        let mut other = Client::log_in(&core, at, 2, &[]).await;
        assert_eq!(other.token(1, 0x11, &write(&token, 2, 1024, &[(9000, 1024)])).await, Ok(()));
        assert!(holds(&one, 9000, 1024, 0).await, "from the offset on");
        assert_eq!(client.uses(1, &token, &[(9000, 1)]).await, Err(UNKNOWN), "DEL_TKN");
        let usage = server.pool().usage();
        assert_eq!((usage.free, usage.waiting, usage.overdrafts), (usage.total, 0, 0));
    });
}

/// 1: whatever changes a block that a token stands for ends it, and nothing else does.
#[test]
fn a_change_cancels() {
    on_core(async |core| {
        let (_, [one, two], _, mut client) = rig(&core).await;
        fill(&one, 2 * PIECE, 0).await;
        let account = one.account();
        let data = |byte: u8| {
            let credit = account.try_credit(512, MemoryClass::LocalIo).unwrap();
            rt::buf::copy_in(&credit, &[byte; 512])
        };
        let at = Lba(5);
        let range = Blocks::new(at, 1);
        let here = one.get(5, 1).await;
        let same = rt::buf::copy_in(&account.try_credit(512, MemoryClass::LocalIo).unwrap(), &here);
        let changes = [
            Request::Write { at, data: same.clone(), fua: false },
            Request::CompareAndWrite { at, compare: same.clone(), write: data(1), fua: false },
            Request::OrWrite { at, data: data(2), fua: true },
            Request::WriteSame { range, pattern: data(3), fua: false },
            Request::Zero { range, unmap: false, fua: false },
            Request::Unmap { ranges: vec![range] },
        ];
        for change in changes {
            let token = client.made(1, 0, &[(0, 6), (600, 8)]).await;
            let beside = Request::Write { at: Lba(6), data: data(4), fua: false };
            for harmless in [beside, Request::Flush, Request::Read { range }] {
                one.volume().execute(harmless, &account).await.unwrap();
            }
            assert_eq!(client.uses(1, &token, &[(3000, 14)]).await, Ok(()));
            assert_eq!(two.mem.space_used(), 0);
            one.volume().execute(change, &account).await.unwrap();
            assert_eq!(client.uses(1, &token, &[(3000, 14)]).await, Err(CANCELLED));
            let info = client.information(1).await;
            assert_eq!((info.status, info.blocks), (2, 0));
        }
    });
}

/// 1: a write in flight when a token is created is waited for; one that arrives during a transfer
/// ends it after what was already read.
#[test]
fn writes_meanwhile() {
    on_core(async |core| {
        let (_, [one, two], _, mut client) = rig(&core).await;
        fill(&one, 8 * PIECE, 0).await;
        one.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]));
        let (volume, account) = (one.volume(), one.account());
        let credit = account.try_credit(512, MemoryClass::LocalIo).unwrap();
        let data = rt::buf::copy_in(&credit, &[9; 512]);
        drop(volume.start(Request::Write { at: Lba(3), data, fua: false }, &account, drop));
        until(|| one.faults.hits() == 1).await;
        client.begin_token(1, 0x10, &populate(0, &[(0, 8)])).await;
        sleep(Duration::from_millis(20)).await;
        one.faults.clear();
        one.faults.release();
        assert_eq!(client.next().await.header[3], 0);
        let token = client.information(1).await.token;
        assert_eq!(client.uses(1, &token, &[(16_000, 8)]).await, Ok(()));
        assert!(one.get(16_003, 1).await == [9; 512], "what it has waited for");
        // While it is used.
        let token = client.made(1, 0, &[(0, 8192)]).await;
        client.greet(2).await;
        two.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]));
        client.begin_token(2, 0x11, &write(&token, 0, 0, &[(0, 8192)])).await;
        until(|| two.faults.hits() == 2).await;
        one.put(8191, &[1; 512]).await;
        two.faults.clear();
        two.faults.release();
        let answer = client.next().await;
        assert_eq!(
            (answer.header[3], answer.data[4], &answer.data[14..16]),
            (2, 0x0a, &[0x23, 8][..])
        );
        let info = client.information(2).await;
        assert_eq!((info.status, info.blocks), (2, 2 * PIECE), "what had been read was right");
    });
}

/// 2: a token lives as long as it was asked to from each use, and goes with its volume.
#[test]
fn tokens_end() {
    on_core(async |core| {
        let (server, [one, _two], _, mut client) = rig(&core).await;
        fill(&one, PIECE, 0).await;
        let (short, long) =
            (client.made(1, 1, &[(0, 8)]).await, client.made(1, 0, &[(0, 8)]).await);
        sleep(Duration::from_millis(700)).await;
        assert_eq!(client.uses(1, &short, &[(100, 8)]).await, Ok(()));
        sleep(Duration::from_millis(700)).await;
        assert_eq!(client.uses(1, &short, &[(100, 8)]).await, Ok(()), "used a moment ago");
        sleep(Duration::from_millis(1500)).await;
        assert_eq!(client.uses(1, &short, &[(100, 8)]).await, Err(UNKNOWN));
        assert_eq!(client.uses(1, &long, &[(100, 8)]).await, Ok(()));
        client.greet(2).await;
        let served = server.remove_volume(VolumeId([7; 16])).unwrap();
        assert_eq!(client.uses(2, &long, &[(100, 8)]).await, Err(UNKNOWN));
        drop(served);
        let _again = Disk::plain(&server, 7);
        assert_eq!(client.uses(2, &long, &[(100, 8)]).await, Err(UNKNOWN), "another one");
    });
}

/// 2: there are so many tokens of a volume; those that stand for nothing any more make room.
#[test]
fn tokens_are_bounded() {
    on_core(async |core| {
        let (_, [one, _two], _, mut client) = rig(&core).await;
        for n in 0..64 {
            client.made(1, 0, &[(n, 1)]).await;
        }
        let list = populate(0, &[(0, 8)]);
        assert_eq!(client.token(1, 0x10, &list).await, Err([5, 0x55, 0x0d]));
        one.put(3, &[1; 512]).await;
        client.made(1, 0, &[(0, 8)]).await;
        assert_eq!(client.token(1, 0x10, &list).await, Err([5, 0x55, 0x0d]));
    });
}

/// 2: a token that was made up, or changed, is none.
#[test]
fn forged_tokens_are_refused() {
    on_core(async |core| {
        let (_, [_one, _two], _, mut client) = rig(&core).await;
        let token = client.made(1, 0, &[(0, 8)]).await;
        for at in [8, 17, 24, 60, 97, 256, 287, 511] {
            let mut forged = token.clone();
            forged[at] ^= 1;
            assert_eq!(client.uses(1, &forged, &[(100, 8)]).await, Err(UNKNOWN), "byte {at}");
        }
        assert_eq!(client.uses(1, &token, &[(100, 9)]).await, Err([5, 0x26, 0]), "it has no more");
        assert_eq!(client.uses(1, &token, &[(100, 8)]).await, Ok(()));
    });
}

/// 3: reading needs the current rights of the token's creator, writing those of its user.
#[test]
fn rights_are_those_of_both() {
    on_core(async |core| {
        let (server, [one, two], at, mut client) = rig(&core).await;
        fill(&one, PIECE, 0).await;
        let token = client.made(1, 0, &[(0, 8)]).await;
        // A session that could not read the volume itself.
        let secret = Some("secret of ten or more");
        server.set_catalog(targets(&[(DISK, 0, &[7], None), (OTHER, 0, &[8], None)]));
        let mut other = Client::log_in_at(&core, at, 2, OTHER, &[]).await;
        assert_eq!(other.uses(1, &token, &[(0, 8)]).await, Ok(()));
        assert!(two.get(0, 8).await == noise(8, 0));
        // Its creator may not read it any more.
        server.set_catalog(targets(&[(DISK, 0, &[7], secret), (OTHER, 0, &[8], None)]));
        assert_eq!(other.uses(1, &token, &[(0, 8)]).await, Err(UNKNOWN));
        server.set_catalog(targets(&[(DISK, 0, &[7], None), (OTHER, 0, &[8], None)]));
        assert_eq!(other.uses(1, &token, &[(0, 8)]).await, Ok(()));
        // Another port reserves the destination, then the source.
        let mut rival = Client::log_in_at(&core, at, 3, OTHER, &[]).await;
        rival.reserves(1, [6, 0], [0, 0xa]).await;
        rival.reserves(1, [1, 1], [0xa, 0]).await;
        assert_eq!(other.uses(1, &token, &[(0, 8)]).await, Err([0; 3]));
        rival.reserves(1, [3, 0], [0xa, 0]).await;
        let mut rival = Client::log_in_at(&core, at, 3, DISK, &[]).await;
        rival.reserves(1, [6, 0], [0, 0xa]).await;
        rival.reserves(1, [1, 3], [0xa, 0]).await;
        // Attentions of the earlier reservation come first.
        other.greet(1).await;
        assert_eq!(other.uses(1, &token, &[(0, 8)]).await, Err([0x0a, 0x0d, 0x01]));
    });
}

/// 3: a token is used at the core of another volume.
#[test]
fn tokens_of_other_cores_are_used() {
    on_cores(2, async |core| {
        let all: Arc<Catalog> = targets(&[(DISK, 0, &[7], None), (OTHER, 1, &[8], None)]);
        let mut doors = core_links(2);
        let (there, here) = (doors.remove(1), doors.remove(0));
        let catalog = Arc::clone(&all);
        let ready = Arc::new(AtomicBool::new(false));
        let is_ready = Arc::clone(&ready);
        core.peers()[1]
            .post(move |core| async move {
                let server = Server::new(core.clone(), Limits::default(), there);
                let two = Disk::plain(&server, 8);
                fill(&two, 2 * PIECE, 5).await;
                server.set_catalog(catalog);
                is_ready.store(true, Ordering::Release);
                std::future::pending::<()>().await;
            })
            .await
            .unwrap();
        let server = Server::new(core.clone(), Limits::default(), here);
        let one = Disk::plain(&server, 7);
        server.set_catalog(all);
        let at = listen(&core, &server, Service::Iscsi).await;
        until(|| ready.load(Ordering::Acquire)).await;
        let mut there = Client::log_in_at(&core, at, 1, OTHER, &[]).await;
        let token = there.made(1, 0, &[(0, 2048)]).await;
        let mut client = Client::log_in(&core, at, 2, &[]).await;
        assert_eq!(client.uses(1, &token, &[(64, 2048)]).await, Ok(()));
        assert!(holds(&one, 64, 2048, 5).await);
        let mut changed =
            there.initiator.command(&[0x41, 0, 0, 0, 0, 9, 0, 0, 1, 0], WRITE, 512, &[1; 512]);
        changed[9] = 1;
        there.send(&changed).await;
        assert_eq!(there.next().await.header[3], 0);
        assert_eq!(client.uses(1, &token, &[(64, 8)]).await, Err(CANCELLED));
        let usage = server.pool().usage();
        assert_eq!((usage.free, usage.waiting, usage.overdrafts), (usage.total, 0, 0));
    });
}

/// 4: task management and the end of a connection end a transfer after the chunks in flight.
#[test]
fn an_aborted_transfer_stops() {
    on_core(async |core| {
        let (server, [one, two], at, mut client) = rig(&core).await;
        fill(&one, 8 * PIECE, 0).await;
        let token = client.made(1, 0, &[(0, 8192)]).await;
        client.greet(2).await;
        for by_abort in [true, false] {
            two.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]));
            let before = two.faults.hits();
            let list = write(&token, 0, 0, &[(0, 8192)]);
            let tag = client.begin_token(2, 0x11, &list).await;
            until(|| two.faults.hits() == before + 2).await;
            if by_abort {
                let mut abort = client.initiator.task(TaskFunction::AbortTask, tag, 0);
                abort[9] = 2;
                client.send(&abort).await;
            } else {
                client = Client::log_in(&core, at, 1, &[]).await;
            }
            sleep(Duration::from_millis(20)).await;
            two.faults.clear();
            two.faults.release();
            if by_abort {
                assert_eq!(client.next().await.opcode(), Opcode::TaskResponse);
                let info = client.information(2).await;
                assert_eq!(info.status, 0x60);
                assert!(info.blocks <= 2 * PIECE && holds(&two, 0, info.blocks, 0).await);
            }
            until(|| server.pool().usage().free == server.pool().usage().total).await;
            assert!(two.get(2 * PIECE, PIECE).await.iter().all(|byte| *byte == 0));
        }
    });
}
