//! EXTENDED COPY, carried out (SPC-4 5.17, RFD 0014): the numbers are the RFD's.

use block::testing::faulty::OpKind;
use block::{Blocks, Lba, Request};
use iscsi::pdu::TaskFunction;
use rt::buf::copy_in;
use target::ChapCredentials;

use super::*;

const PIECE: u64 = 1024;
pub(super) const DISK: &str = "iqn.2026-01.com.example:disk";
pub(super) const OTHER: &str = "iqn.2026-01.com.example:other";

/// A volume whose identifier is all `n`.
pub(super) struct Disk {
    server: Rc<Server>,
    n: u8,
    pub(super) mem: Rc<Mem>,
    pub(super) faults: Faults,
}

impl Disk {
    fn add(server: &Rc<Server>, n: u8, options: MemOptions, thin: bool) -> Self {
        let mem = Rc::new(Mem::new(options));
        let (dev, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
        let volume = volume_on(server, dev);
        let (id, name) = (VolumeId([n; 16]), format!("disk{n}"));
        server.add_volume(ServedVolume { id, name, volume, thin, access: None });
        Self { server: Rc::clone(server), n, mem, faults }
    }

    pub(super) fn plain(server: &Rc<Server>, n: u8) -> Self {
        Self::add(server, n, MemOptions::new(512, 1 << 15), false)
    }

    pub(super) fn volume(&self) -> Rc<Volume> {
        Rc::clone(&self.server.volume(VolumeId([self.n; 16])).unwrap().volume)
    }

    pub(super) fn account(&self) -> block::Account {
        self.server.pool().account()
    }

    pub(super) async fn put(&self, at: u64, bytes: &[u8]) {
        let account = self.server.pool().account();
        let data = copy_in(
            &account.credit(bytes.len(), MemoryClass::UnsolicitedData).await.unwrap(),
            bytes,
        );
        let write = Request::Write { at: Lba(at), data, fua: false };
        self.volume().execute(write, &account).await.unwrap();
    }

    pub(super) async fn get(&self, at: u64, count: u64) -> Vec<u8> {
        let account = self.server.pool().account();
        let read = Request::Read { range: Blocks::new(Lba(at), count) };
        let data = self.volume().execute(read, &account).await.unwrap();
        data.iter().flat_map(|buf| buf.to_vec()).collect()
    }
}

/// A target: name, core, volumes as logical units 1 and up, secret.
pub(super) type Target<'a> = (&'a str, usize, &'a [u8], Option<&'a str>);

pub(super) fn targets(all: &[Target<'_>]) -> Arc<Catalog> {
    let target = |&(name, core, luns, secret): &Target<'_>| {
        let chap = |s: &str| ChapCredentials {
            user: "u".into(),
            secret: s.to_owned().into(),
            mutual: None,
        };
        let admission = secret.map_or(AccessRule::NameOnly, |s| AccessRule::Proof(chap(s)));
        let access = AccessList { any: Some(admission), ..AccessList::default() };
        let luns = (1..).zip(luns.iter().map(|&n| VolumeId([n; 16]))).collect();
        (name.to_owned(), IscsiTarget { core, luns, access, ..IscsiTarget::default() })
    };
    Arc::new(Catalog { targets: all.iter().map(target).collect(), ..Catalog::default() })
}

/// A server of one core with volume 7, and 8 that the target has too; a client of 7.
pub(super) async fn rig(core: &Core) -> (Rc<Server>, [Disk; 2], SocketAddr, Client) {
    let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
    let disks = [Disk::plain(&server, 7), Disk::plain(&server, 8)];
    server.set_catalog(targets(&[(DISK, 0, &[7, 8], None)]));
    let at = listen(core, &server, Service::Iscsi).await;
    let client = Client::log_in(core, at, 1, &[]).await;
    (server, disks, at, client)
}

/// Identification descriptor of volume `n`, by the NAA designator that its unit has.
fn end(n: u8, block: u32) -> Vec<u8> {
    let mut nibbles = vec![6, 0, 2, 5, 7, 5, 2];
    let digits = (0..32).filter(|i| ![12, 16].contains(i));
    nibbles.extend(digits.map(|i| [n >> 4, n & 0xf][i % 2]));
    let mut end = vec![0xe4, 0, 0, 0, 1, 3, 0, 16];
    end.extend((0..16).map(|i| nibbles[2 * i] << 4 | nibbles[2 * i + 1]));
    end.resize(28, 0);
    end.extend(block.to_be_bytes());
    end
}

/// Blocks from one end to another: ends, count, from, to.
type Segment = ((u16, u16), u16, u64, u64);

fn list(ends: &[Vec<u8>], segments: &[Segment]) -> Vec<u8> {
    let mut list = vec![0, 3 << 3];
    list.extend((32 * ends.len() as u16).to_be_bytes());
    list.extend([0; 4]);
    list.extend((28 * segments.len() as u32).to_be_bytes());
    list.extend([0; 4]);
    list.extend(ends.concat());
    for ((source, destination), count, from, to) in segments {
        list.extend([2, 0, 0, 24]);
        list.extend(source.to_be_bytes());
        list.extend(destination.to_be_bytes());
        list.extend([0, 0]);
        list.extend(count.to_be_bytes());
        list.extend(from.to_be_bytes());
        list.extend(to.to_be_bytes());
    }
    list
}

impl Client {
    /// Sends EXTENDED COPY; its tag.
    async fn begin_copy(&mut self, list: &[u8]) -> u32 {
        let (itt, len) = (self.initiator.itt, list.len() as u32);
        let [a, b] = (len as u16).to_be_bytes();
        let cdb = [0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, 0, 0];
        let command = self.initiator.command(&cdb, WRITE, len, list);
        self.send(&command).await;
        itt
    }

    /// How it ends: status and sense data.
    async fn copy(&mut self, list: &[u8]) -> (u8, Vec<u8>) {
        self.begin_copy(list).await;
        let pdu = self.next().await;
        assert_eq!(pdu.opcode(), Opcode::ScsiResponse, "{pdu:?}");
        (pdu.header[3], pdu.data.get(2..).unwrap_or_default().to_vec())
    }

    async fn copies(&mut self, list: &[u8]) {
        let (status, sense) = self.copy(list).await;
        assert_eq!(status, 0, "{sense:02x?}");
    }

    /// Key, code and segment that a copy fails with.
    async fn copy_fails(&mut self, list: &[u8]) -> ([u8; 3], u16) {
        let (status, sense) = self.copy(list).await;
        assert_eq!(status, 2);
        ([sense[2], sense[12], sense[13]], u16::from_be_bytes([sense[10], sense[11]]))
    }
}

/// 8192 blocks from the commanded unit to volume 8.
fn long() -> Vec<u8> {
    list(&[end(8, 512)], &[((0xffff, 0), 8192, 0, 0)])
}

pub(super) fn noise(blocks: u64, salt: u8) -> Vec<u8> {
    (0..blocks * 512).map(|i| (i % 251) as u8 ^ (i >> 9) as u8 ^ salt | 1).collect()
}

const UNREACHABLE: [u8; 3] = [0x0a, 0x08, 0x04];
const FAILED: [u8; 3] = [0x0a, 0x0d, 0x01];

/// 2, 3: the copy equals the source, in one volume and between two, and the client's connection
/// carries only the list. A segment may overlap itself either way.
#[test]
fn blocks_are_copied() {
    on_core(async |core| {
        let (server, [one, two], _, mut client) = rig(&core).await;
        let bytes = noise(8 * PIECE + 3, 0);
        for (i, piece) in bytes.chunks(512 * 512).enumerate() {
            one.put(5 + 512 * i as u64, piece).await;
        }
        let count = (8 * PIECE + 3) as u16;
        let ends = [end(7, 512), end(8, 0)];
        let between = ((0, 1), count, 5, 999);
        client.copies(&list(&ends, &[between, ((0xffff, 0), count, 5, 20_000)])).await;
        for (at, piece) in bytes.chunks(512 * 512).enumerate() {
            let (at, count) = (512 * at as u64, piece.len() as u64 / 512);
            assert!(two.get(999 + at, count).await == piece);
            assert!(one.get(20_000 + at, count).await == piece);
        }
        for to in [2, 9] {
            let before = one.get(5, 1500).await;
            client.copies(&list(&ends, &[((0, 0), 1500, 5, to)])).await;
            assert!(one.get(to, 1500).await == before, "to {to}");
            one.put(5, &bytes[..1500 * 512]).await;
        }
        let usage = server.pool().usage();
        assert_eq!((usage.free, usage.waiting, usage.overdrafts), (usage.total, 0, 0));
    });
}

/// 2: the copy of a thin volume is thin, and the destination's earlier space is freed.
#[test]
fn zeroes_stay_holes() {
    on_core(async |core| {
        let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
        let (one, two) =
            (Disk::plain(&server, 7), Disk::add(&server, 8, MemOptions::new(4096, 1 << 12), true));
        let thick = Disk::plain(&server, 9);
        server.set_catalog(targets(&[(DISK, 0, &[7, 8, 9], None)]));
        let at = listen(&core, &server, Service::Iscsi).await;
        let mut client = Client::log_in(&core, at, 1, &[]).await;
        one.put(1024, &noise(256, 0)).await;
        two.put(0, &noise(1024, 1)).await;
        let ends = [end(7, 512), end(8, 4096), end(9, 0)];
        let segments = [((0, 1), 4096, 0, 0), ((0, 2), 4096, 0, 0)];
        client.copies(&list(&ends, &segments)).await;
        assert!(two.get(128, 32).await == noise(256, 0));
        assert!(two.get(0, 128).await.iter().all(|byte| *byte == 0));
        assert_eq!(two.mem.space_used(), 256 * 512);
        assert_eq!(thick.mem.space_used(), 4096 * 512, "it is not thin: nothing is given up");
    });
}

/// 4: two cores copy to each other, more than their memory holds.
#[test]
fn volumes_of_other_cores_are_reached() {
    on_cores(2, async |core| {
        let all: Arc<Catalog> = targets(&[(DISK, 0, &[7], None), (OTHER, 1, &[8], None)]);
        let mut doors = core_links(2);
        let (there, here) = (doors.remove(1), doors.remove(0));
        let catalog = Arc::clone(&all);
        core.peers()[1]
            .post(move |core| async move {
                let server = Server::new(core.clone(), Limits::default(), there);
                let _two = Disk::plain(&server, 8);
                server.set_catalog(catalog);
                std::future::pending::<()>().await;
            })
            .await
            .unwrap();
        let server = Server::new(core.clone(), Limits::default(), here);
        let one = Disk::plain(&server, 7);
        server.set_catalog(all);
        let at = listen(&core, &server, Service::Iscsi).await;
        let bytes = noise(PIECE, 0);
        for i in 0..8 {
            one.put(i * PIECE, &bytes).await;
        }
        let mut clients = Vec::new();
        for isid in 1..9 {
            clients.push(Client::log_in(&core, at, isid, &[]).await);
        }
        let ends = [end(7, 512), end(8, 512)];
        let (there, back) = (((0, 1), 8192, 0, 0), ((1, 0), 8192, 0, 16384));
        for client in &mut clients {
            client.begin_copy(&list(&ends, &[there, back, there])).await;
        }
        for client in &mut clients {
            let pdu = client.next().await;
            assert_eq!(pdu.header[3], 0, "{pdu:?}");
        }
        for i in 0..8 {
            assert!(one.get(16384 + i * PIECE, PIECE).await == bytes);
        }
        let usage = server.pool().usage();
        assert_eq!((usage.free, usage.waiting, usage.overdrafts), (usage.total, 0, 0));
    });
}

/// 5: a unit that the initiator may not use looks like one that does not exist, even if that
/// changes half way.
#[test]
fn only_what_the_initiator_may_use_is_reached() {
    on_core(async |core| {
        let (server, [_, two], _, mut client) = rig(&core).await;
        let there = list(&[end(8, 512)], &[((0xffff, 0), 8, 0, 0)]);
        let cases: [(&[Target<'_>], bool); 4] = [
            (&[(DISK, 0, &[7], None)], false),
            (&[(DISK, 0, &[7], None), (OTHER, 0, &[8], Some("secret"))], false),
            (&[(DISK, 0, &[7], None), (OTHER, 0, &[8], None)], true),
            // On a core that it is not on.
            (&[(DISK, 0, &[7], None), (OTHER, 9, &[8], None)], false),
        ];
        for (all, reached) in cases {
            server.set_catalog(targets(all));
            // REPORTED LUNS DATA HAS CHANGED, or nothing.
            client.sense(&READY, 0).await;
            if reached {
                client.copies(&there).await;
            } else {
                assert_eq!(client.copy_fails(&there).await, (UNREACHABLE, 0));
            }
        }
        server.set_catalog(targets(&[(DISK, 0, &[7, 8], None)]));
        client.sense(&READY, 0).await;
        two.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Zero]));
        let ends = [end(8, 512)];
        let long = list(&ends, &[((0xffff, 0), 1, 0, 0), ((0xffff, 0), 8192, 0, 0)]);
        client.begin_copy(&long).await;
        until(|| two.faults.hits() == 1).await;
        server.set_catalog(targets(&[(DISK, 0, &[7], None)]));
        two.faults.clear();
        two.faults.release();
        let sense = client.next().await.data;
        assert_eq!((sense[4], sense[14..16].to_vec()), (0x0a, vec![0x08, 0x04]), "{sense:02x?}");
        assert_eq!(sense[12..14], [0, 1], "the second segment");
    });
}

/// 5, 7: protection, reservations and failures of source and destination are reported as such.
#[test]
fn errors_of_source_and_destination_are_reported() {
    on_core(async |core| {
        let (server, [one, two], at, mut client) = rig(&core).await;
        one.put(0, &noise(16, 0)).await;
        let there = list(&[end(8, 512)], &[((0xffff, 0), 8, 0, 0), ((0xffff, 0), 8, 8, 8)]);
        two.faults.add(Rule::new(Effect::Fail(Error::NoSpace)).after(1));
        let (_, sense) = client.copy(&there).await;
        assert_eq!([sense[2], sense[12], sense[13]], FAILED, "{sense:02x?}");
        assert_eq!(sense[10..12], [0, 1]);
        assert_eq!(sense[15..18], [0x80, 0, 16], "the descriptor of the end");
        assert_eq!((sense[9], sense[18], &sense[31..33]), (18, 2, &[0x27, 0x07][..]));
        two.faults.clear();
        assert!(two.get(0, 8).await == noise(8, 0), "what came before stays");
        // Another initiator port reserves it.
        let mut rival = Client::log_in(&core, at, 2, &[]).await;
        let mut reserve = rival.initiator.command(&[0x16, 0, 0, 0, 0, 0], 0, 0, &[]);
        reserve[9] = 2;
        rival.send(&reserve).await;
        let attention = rival.next().await;
        assert_eq!(attention.header[3], 2, "the unit is new to it");
        let mut reserve = rival.initiator.command(&[0x16, 0, 0, 0, 0, 0], 0, 0, &[]);
        reserve[9] = 2;
        rival.send(&reserve).await;
        assert_eq!(rival.next().await.header[3], 0);
        let (_, sense) = client.copy(&there).await;
        assert_eq!([sense[2], sense[12], sense[13]], FAILED, "{sense:02x?}");
        assert_eq!(sense[18..], [0x18], "RESERVATION CONFLICT");
        drop(rival);
        until(|| server.sessions().len() == 1).await;
        client.copies(&there).await;
    });
}

impl Client {
    /// PERSISTENT RESERVE OUT to a logical unit: service action and type, the key held, the key
    /// that it is about.
    async fn ask_to_reserve(&mut self, lun: u8, [action, kind]: [u8; 2], keys: [u64; 2]) {
        let mut parameters = keys.map(u64::to_be_bytes).concat();
        parameters.resize(24, 0);
        let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24];
        let mut command = self.initiator.command(&cdb, WRITE, 24, &parameters);
        command[9] = lun;
        self.send(&command).await;
    }

    pub(super) async fn reserves(&mut self, lun: u8, what: [u8; 2], keys: [u64; 2]) {
        self.ask_to_reserve(lun, what, keys).await;
        let answer = self.next().await;
        assert_eq!(answer.header[3], 0, "{answer:?}");
    }
}

const REGISTER: [u8; 2] = [6, 0];

/// 5: reservations of others apply to a copy, even if neither they nor its initiator have a session
/// with the unit.
#[test]
fn reservations_bind_copies() {
    on_core(async |core| {
        let (server, [one, two], at, mut client) = rig(&core).await;
        server.set_catalog(targets(&[(DISK, 0, &[7], None), (OTHER, 0, &[8], None)]));
        client.sense(&READY, 0).await;
        one.put(0, &noise(16, 0)).await;
        let to_there = list(&[end(8, 512)], &[((0xffff, 0), 8, 0, 0)]);
        let from_there = list(&[end(8, 512)], &[((0, 0xffff), 8, 0, 64)]);
        client.copies(&to_there).await;
        for (kind, may_read) in [(1, true), (3, false)] {
            let mut rival = Client::log_in_at(&core, at, 2, OTHER, &[]).await;
            rival.reserves(1, REGISTER, [0, 0xa]).await;
            rival.reserves(1, [1, kind], [0xa, 0]).await;
            drop(rival);
            until(|| server.sessions().len() == 1).await;
            let (_, sense) = client.copy(&to_there).await;
            assert_eq!([sense[2], sense[12], sense[13]], FAILED, "{sense:02x?}");
            assert_eq!(sense[18..], [0x18], "RESERVATION CONFLICT");
            assert_eq!(client.copy(&from_there).await.0, if may_read { 0 } else { 2 });
            let mut rival = Client::log_in_at(&core, at, 2, OTHER, &[]).await;
            rival.reserves(1, [3, 0], [0xa, 0]).await;
        }
        client.copies(&to_there).await;
        assert!(two.get(0, 8).await == noise(8, 0));
    });
}

/// 5, 6: PREEMPT AND ABORT ends the copies of whose registration it takes, before it is answered
/// itself.
#[test]
fn preempt_and_abort_ends_copies() {
    on_core(async |core| {
        let (server, disks, at, mut client) = rig(&core).await;
        let mut rival = Client::log_in(&core, at, 2, &[]).await;
        for client in [&mut client, &mut rival] {
            client.ask_to_reserve(2, REGISTER, [0, 0xc]).await;
            assert_eq!(client.next().await.header[3], 2, "the unit is new to it");
        }
        client.reserves(2, REGISTER, [0, 0xc]).await;
        rival.reserves(2, REGISTER, [0, 0xd]).await;
        rival.reserves(2, [1, 5], [0xd, 0]).await;
        begin_many(&mut client, &disks).await;
        rival.ask_to_reserve(2, [5, 5], [0xd, 0xc]).await;
        sleep(Duration::from_millis(20)).await;
        disks[1].faults.clear();
        disks[1].faults.release();
        assert_eq!(rival.next().await.header[3], 0);
        for _ in 0..6 {
            let answer = client.next().await;
            assert_eq!((answer.opcode(), answer.header[3]), (Opcode::ScsiResponse, 2));
        }
        rival.reserves(2, [3, 0], [0xd, 0]).await;
        check_given_up(&server, &mut client, &disks).await;
    });
}

/// Begins more copies than may run at a time, whose writes stall; their tags.
async fn begin_many(client: &mut Client, [one, two]: &[Disk; 2]) -> Vec<u32> {
    for i in 0..8 {
        one.put(i * PIECE, &noise(PIECE, 0)).await;
    }
    two.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]));
    let mut tags = Vec::new();
    for _ in 0..6 {
        tags.push(client.begin_copy(&long()).await);
    }
    // Two pieces; the other copies' wait for the same blocks.
    until(|| two.faults.hits() == 2).await;
    tags
}

/// Only writes in flight were done, all memory is returned, and others may copy.
async fn check_given_up(server: &Server, client: &mut Client, [_, two]: &[Disk; 2]) {
    assert!(two.get(2 * PIECE, PIECE).await.iter().all(|byte| *byte == 0));
    let usage = server.pool().usage();
    assert_eq!((usage.free, usage.waiting), (usage.total, 0));
    client.copies(&long()).await;
    assert!(two.get(7 * PIECE, PIECE).await == noise(PIECE, 0));
}

/// 6: task management ends a copy after the chunks in flight.
#[test]
fn an_abort_ends_a_copy() {
    on_core(async |core| {
        let (server, disks, _, mut client) = rig(&core).await;
        for tag in begin_many(&mut client, &disks).await {
            let abort = client.initiator.task(TaskFunction::AbortTask, tag, 0);
            client.send(&abort).await;
        }
        sleep(Duration::from_millis(20)).await;
        disks[1].faults.clear();
        disks[1].faults.release();
        for _ in 0..6 {
            assert_eq!(client.next().await.opcode(), Opcode::TaskResponse);
        }
        check_given_up(&server, &mut client, &disks).await;
    });
}

/// Attack 6: so does the end of the connection.
#[test]
fn a_lost_connection_ends_its_copies() {
    on_core(async |core| {
        let (server, disks, at, mut client) = rig(&core).await;
        begin_many(&mut client, &disks).await;
        drop(client);
        until(|| server.sessions().is_empty()).await;
        disks[1].faults.clear();
        disks[1].faults.release();
        until(|| server.pool().usage().free == server.pool().usage().total).await;
        let mut client = Client::log_in(&core, at, 1, &[]).await;
        check_given_up(&server, &mut client, &disks).await;
    });
}

/// 4: a volume that goes away ends the copy.
#[test]
fn a_volume_that_goes_away_ends_the_copy() {
    on_core(async |core| {
        let (server, [one, two], _, mut client) = rig(&core).await;
        for i in 0..8 {
            one.put(i * PIECE, &noise(PIECE, 0)).await;
        }
        two.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]));
        client.begin_copy(&long()).await;
        until(|| two.faults.hits() == 2).await;
        let volume = server.remove_volume(VolumeId([8; 16])).unwrap();
        two.faults.clear();
        two.faults.release();
        let pdu = client.next().await;
        assert_eq!((pdu.header[3], &pdu.data[14..16]), (2, &[0x08, 0x04][..]), "{pdu:?}");
        drop(volume);
    });
}

/// A disk whose reads take long once they have begun: aborts come too late then.
struct Slow {
    dev: Dev,
    through: Rc<tokio::sync::Semaphore>,
    begun: Rc<std::cell::Cell<u32>>,
}

impl block::Layer for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn info(&self) -> block::Info {
        self.dev.info()
    }

    async fn submit(&self, op: block::Op, ctx: block::Ctx) -> Result<block::Bufs, Error> {
        if matches!(op, block::Op::Read { at, .. } if at < block::METADATA_LBA) {
            self.begun.update(|n| n + 1);
            self.through.acquire().await.unwrap().forget();
        }
        self.dev.submit(op, &ctx.shielded()).await
    }
}

/// 6: data read for a session is not written after its end: its initiator may have written there
/// since, in another session.
#[test]
fn a_copy_writes_nothing_after_its_session() {
    on_core(async |core| {
        let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
        let (through, begun) = (Rc::new(tokio::sync::Semaphore::new(0)), Rc::default());
        let dev = Dev::new(Mem::new(MemOptions::new(512, 1 << 15)));
        let slow = Slow { dev, through: Rc::clone(&through), begun: Rc::clone(&begun) };
        let volume = volume_on(&server, Dev::new(slow));
        let (id, name) = (VolumeId([7; 16]), "disk7".to_owned());
        let served =
            ServedVolume { id, name, volume: Rc::clone(&volume), thin: false, access: None };
        server.add_volume(served);
        let two = Disk::plain(&server, 8);
        server.set_catalog(targets(&[(DISK, 0, &[7, 8], None)]));
        let at = listen(&core, &server, Service::Iscsi).await;
        let mut client = Client::log_in(&core, at, 1, &[]).await;
        let account = server.pool().account();
        let data = copy_in(
            &account.credit(8 * 512, MemoryClass::UnsolicitedData).await.unwrap(),
            &noise(8, 0),
        );
        let write = Request::Write { at: Lba(0), data, fua: false };
        volume.execute(write, &account).await.unwrap();
        begun.set(0);
        client.begin_copy(&list(&[end(8, 512)], &[((0xffff, 0), 8, 0, 0)])).await;
        until(|| begun.get() == 1).await;
        drop(client);
        until(|| server.sessions().is_empty()).await;
        // The same initiator port in its next session; its write is answered.
        let _again = Client::log_in(&core, at, 1, &[]).await;
        two.put(0, &noise(8, 7)).await;
        through.add_permits(100);
        sleep(Duration::from_millis(100)).await;
        assert!(two.get(0, 8).await == noise(8, 7));
    });
}
