//! Commands that are more than one request to a volume, or none: fused Compare and Write, Copy,
//! Disconnect.

use std::cell::Cell;

use block::{Bufs, Ctx, Info, Layer, Op};
use nvme::entry::{FLAG_SGL, FabricsType};
use tokio::sync::Notify;

use super::*;

pub(super) const FIRST: u8 = 0b01;
pub(super) const SECOND: u8 = 0b10;

/// Bytes of a page: the least memory.
const PAGE: usize = 4096;

fn at(mut sqe: Sqe, lba: u32) -> Sqe {
    sqe.cdw10[0] = lba.into();
    sqe
}

/// A half of a Compare and Write of 8 blocks.
pub(super) fn half(fuse: u8, cid: u16) -> Sqe {
    let opcode = if fuse == FIRST { NvmOpcode::Compare } else { NvmOpcode::Write };
    Sqe { flags: FLAG_SGL | fuse, ..rw(opcode, cid, 8) }
}

impl Queue {
    /// A command with its data in the capsule.
    pub(super) async fn with_data(&mut self, sqe: Sqe, data: &[u8]) {
        let capsule = self.host.capsule(sqe, data);
        self.send(&capsule).await;
    }

    /// Compares 8 blocks with these bytes, and writes those; how both commands end.
    pub(super) async fn compare_and_write(&mut self, compare: u8, write: u8) -> (Status, Status) {
        self.with_data(half(FIRST, 11), &[compare; PAGE]).await;
        self.with_data(half(SECOND, 12), &[write; PAGE]).await;
        (self.code(11).await, self.code(12).await)
    }

    async fn code(&mut self, cid: u16) -> Status {
        self.status(cid).await.0.code()
    }

    /// Nothing comes from it for a while.
    pub(super) async fn is_silent(&mut self) -> bool {
        timeout(Duration::from_millis(50), self.receive()).await.is_err()
    }

    pub(super) async fn bytes(&mut self, lba: u32, blocks: u32) -> Vec<u8> {
        self.fetch(at(rw(NvmOpcode::Read, 20, blocks), lba), blocks * 512).await
    }

    async fn fill(&mut self, lba: u32, blocks: u32, byte: u8) {
        let data = vec![byte; blocks as usize * 512];
        self.with_data(at(rw(NvmOpcode::Write, 21, blocks), lba), &data).await;
        assert_eq!(self.code(21).await, Status::SUCCESS);
    }

    /// Sends a Copy of these ranges, in blocks.
    pub(super) async fn send_copy(&mut self, cid: u16, to: u32, ranges: &[(u64, u16)]) {
        let data: Vec<u8> = ranges
            .iter()
            .flat_map(|(at, n)| {
                [&[0; 8][..], &at.to_le_bytes(), &(n - 1).to_le_bytes(), &[0; 14]].concat()
            })
            .collect();
        let mut sqe = at(Sqe::new(NvmOpcode::Copy.0, cid, 1), to);
        sqe.cdw10[2] = (ranges.len() as u32 - 1).into();
        self.with_data(sqe, &data).await;
    }

    pub(super) async fn copy(&mut self, to: u32, ranges: &[(u64, u16)]) -> (Status, u64) {
        self.send_copy(22, to, ranges).await;
        self.status(22).await
    }
}

/// Waits until the pool has all its memory back.
async fn all_is_free(core: &Core) {
    let began = Instant::now();
    while core.buffer_pool().usage().free != core.buffer_pool().usage().total {
        assert!(began.elapsed() < PATIENCE, "{:?}", core.buffer_pool().usage());
        sleep(Duration::from_millis(5)).await;
    }
}

/// NVMe Base 2.0, 3.4.2: both commands are done, or none.
#[test]
fn compare_and_write_is_one_step() {
    on_core(async |core| {
        let (_server, to, faults) = serve(&core, Limits::default()).await;
        let (mut admin, mut io) = associate(&core, to).await;
        let id = admin.identify(1, 0).await;
        assert_eq!((id[522] & 1, id[532..534].to_vec()), (1, vec![0, 0]), "FUSES, ACWU");
        let (good, miscompared) =
            ((Status::SUCCESS, Status::SUCCESS), (Status::COMPARE_FAILURE, Status::FAILED_FUSED));
        assert_eq!(io.compare_and_write(0, 1).await, good);
        assert_eq!(io.compare_and_write(0, 2).await, miscompared);
        assert_eq!(io.bytes(0, 8).await, [1; PAGE]);
        assert_eq!(io.compare_and_write(1, 2).await, good);
        faults.add(Rule::new(Effect::Fail(Error::NoSpace)).on(&[OpKind::Write]));
        let full = (Status::CAPACITY_EXCEEDED, Status::FAILED_FUSED);
        assert_eq!(io.compare_and_write(2, 3).await, full);
        faults.clear();
        assert_eq!(io.bytes(0, 8).await, [2; PAGE]);
    });
}

/// 3.4.2: a command without its partner fails, and commands in between are executed.
#[test]
fn fused_commands_are_executed_together() {
    on_core(async |core| {
        let (_server, to, _) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, to).await;
        io.with_data(half(SECOND, 12), &[9; PAGE]).await;
        assert_eq!(io.code(12).await, Status::MISSING_FUSED);
        // One after the other, and then one that is no half.
        io.with_data(half(FIRST, 11), &[0; PAGE]).await;
        io.with_data(half(FIRST, 13), &[0; PAGE]).await;
        assert_eq!(io.code(11).await, Status::MISSING_FUSED);
        io.with_data(rw(NvmOpcode::Compare, 14, 8), &[0; PAGE]).await;
        assert_eq!(
            (io.code(13).await, io.code(14).await),
            (Status::MISSING_FUSED, Status::SUCCESS)
        );
        io.with_data(half(SECOND, 12), &[9; PAGE]).await;
        assert_eq!(io.code(12).await, Status::MISSING_FUSED);
        // Not of the same blocks.
        io.with_data(half(FIRST, 11), &[0; PAGE]).await;
        io.with_data(at(half(SECOND, 12), 8), &[9; PAGE]).await;
        assert_eq!(
            (io.code(11).await, io.code(12).await),
            (Status::INVALID_FIELD, Status::INVALID_FIELD)
        );
        // One of them is refused.
        let outside = 1 << 14;
        io.with_data(at(half(FIRST, 11), outside), &[0; PAGE]).await;
        io.with_data(at(half(SECOND, 12), outside), &[9; PAGE]).await;
        assert_eq!(
            (io.code(11).await, io.code(12).await),
            (Status::LBA_OUT_OF_RANGE, Status::FAILED_FUSED)
        );
        io.with_data(half(FIRST, 11), &[0; PAGE]).await;
        io.with_data(at(half(SECOND, 12), outside), &[9; PAGE]).await;
        assert_eq!(
            (io.code(11).await, io.code(12).await),
            (Status::FAILED_FUSED, Status::LBA_OUT_OF_RANGE)
        );
        assert_eq!(io.bytes(0, 16).await, [0; 2 * PAGE]);
        assert_eq!(io.compare_and_write(0, 1).await, (Status::SUCCESS, Status::SUCCESS));
        all_is_free(&core).await;
    });
}

/// Data may come by R2T, that of several pairs mixed, and memory late: then it comes for both
/// halves.
#[test]
fn the_data_of_both_halves_is_asked_for() {
    on_core(async |core| {
        let (_server, to, _) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, to).await;
        let hog = core.buffer_pool().account();
        let all = hog.try_credit(POOL, MemoryClass::LocalIo).unwrap();
        let pairs = [(1, 0), (3, 8)];
        for (cid, lba) in pairs {
            io.command(at(half(FIRST, cid), lba)).await;
            io.command(at(half(SECOND, cid + 1), lba)).await;
        }
        assert!(io.is_silent().await);
        assert_eq!(
            core.buffer_pool().usage().waiting,
            2,
            "no half waits for memory while another has some"
        );
        drop(all);
        let mut asked = Vec::new();
        for _ in 0..4 {
            asked.push(io.next().await);
        }
        let cid = |r2t: &Reply| match r2t {
            Reply::R2t { cid, .. } => *cid,
            other => panic!("{other:?}"),
        };
        // The second halves first.
        asked.sort_by_key(|r2t| (cid(r2t) % 2, cid(r2t)));
        for r2t in &asked {
            let byte = if cid(r2t) % 2 == 1 { 0 } else { cid(r2t) as u8 };
            let data = io.host.answer(r2t, &[byte; PAGE], 1 << 16);
            io.send(&data).await;
        }
        for cid in 1..=4 {
            assert_eq!(io.code(cid).await, Status::SUCCESS, "{cid}");
        }
        assert_eq!(io.bytes(0, 16).await, [[2; PAGE], [4; PAGE]].concat());
    });
}

/// 5.1: an Abort of either half is one of both, before they are carried out and while they are.
#[test]
fn aborts_are_of_both_halves() {
    on_core(async |core| {
        let (_server, to, faults) = serve(&core, Limits::default()).await;
        let (mut admin, mut io) = associate(&core, to).await;
        for victim in [11, 12] {
            io.command(half(FIRST, 11)).await;
            io.command(half(SECOND, 12)).await;
            let asked = [io.next().await, io.next().await];
            admin.command(abort(7, 1, victim)).await;
            assert_eq!(admin.status(7).await.1, 0, "aborted");
            // They are told once the host has sent what it was asked for.
            for r2t in &asked {
                let data = io.host.answer(r2t, &[0; PAGE], 1 << 16);
                io.send(&data).await;
            }
            let ended = (io.code(11).await, io.code(12).await);
            assert_eq!(ended, (Status::ABORT_REQUESTED, Status::FAILED_FUSED));
        }
        faults.add(Rule::new(Effect::Stall));
        io.with_data(half(FIRST, 11), &[0; PAGE]).await;
        io.with_data(half(SECOND, 12), &[1; PAGE]).await;
        sleep(Duration::from_millis(20)).await;
        admin.command(abort(7, 1, 12)).await;
        sleep(Duration::from_millis(20)).await;
        faults.clear();
        faults.release();
        let ended = (io.code(11).await, io.code(12).await);
        let (aborted, _) = (admin.status(7).await.1 == 0, ());
        let (yes, no) =
            ((Status::ABORT_REQUESTED, Status::FAILED_FUSED), (Status::SUCCESS, Status::SUCCESS));
        assert_eq!(ended, if aborted { yes } else { no });
    });
}

/// Blocks that are smaller than a page of memory, as ESXi locks them.
#[test]
fn a_pair_has_the_memory_that_it_takes() {
    on_core(async |core| {
        let (_server, to, _) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, to).await;
        for (blocks, written) in [(1, 1), (9, 2), (16, 3)] {
            let half = |fuse, cid| {
                let sqe = half(fuse, cid);
                let bare = rw(NvmOpcode(sqe.opcode), cid, blocks);
                at(Sqe { flags: sqe.flags, ..bare }, 100 * written)
            };
            let data = |byte| vec![byte; blocks as usize * 512];
            io.with_data(half(FIRST, 11), &data(0)).await;
            io.with_data(half(SECOND, 12), &data(1)).await;
            assert_eq!((io.code(11).await, io.code(12).await), (Status::SUCCESS, Status::SUCCESS));
            assert_eq!(io.bytes(100 * written, blocks).await, data(1));
        }
        assert_eq!(core.buffer_pool().usage().overdrafts, 0);
    });
}

/// A second command in a capsule blocks data that others wait for: its memory must not come from
/// the share that those hold.
#[test]
fn a_pair_does_not_wait_for_what_is_behind_it() {
    on_core(async |core| {
        let (_server, to, _) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, to).await;
        let mut asked = Vec::new();
        for cid in 1..=4 {
            io.command(at(rw(NvmOpcode::Write, cid, 2048), 4096)).await;
            asked.push(io.next().await);
        }
        io.command(half(FIRST, 11)).await;
        io.with_data(half(SECOND, 12), &[1; PAGE]).await;
        for r2t in &asked {
            let data = io.host.answer(r2t, &vec![3; 1 << 20], 1 << 18);
            io.send(&data).await;
        }
        let mut ended = 0;
        while ended < 6 {
            match io.next().await {
                r2t @ Reply::R2t { .. } => {
                    let data = io.host.answer(&r2t, &[0; PAGE], PAGE);
                    io.send(&data).await;
                }
                Reply::Resp { status, .. } => {
                    assert!(status.is_success(), "{status:?}");
                    ended += 1;
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

/// A first command rejected by the transport counts as failed: the next one is not adjacent to its
/// partner.
#[test]
fn a_half_that_the_transport_refuses_ends_the_other() {
    on_core(async |core| {
        let (_server, to, _) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, to).await;
        let no_sgl = |fuse, cid| Sqe { flags: fuse, ..half(fuse, cid) };
        io.with_data(half(FIRST, 11), &[0; PAGE]).await;
        io.with_data(no_sgl(SECOND, 12), &[1; PAGE]).await;
        let ended = (io.code(12).await, io.code(11).await);
        assert_eq!(ended, (Status::INVALID_FIELD, Status::FAILED_FUSED));
        io.with_data(half(SECOND, 12), &[1; PAGE]).await;
        assert_eq!(io.code(12).await, Status::MISSING_FUSED);
        io.with_data(no_sgl(FIRST, 11), &[0; PAGE]).await;
        io.with_data(half(SECOND, 12), &[1; PAGE]).await;
        let ended = (io.code(11).await, io.code(12).await);
        assert_eq!(ended, (Status::INVALID_FIELD, Status::FAILED_FUSED));
        io.with_data(half(FIRST, 11), &[0; PAGE]).await;
        let other = Sqe { flags: 0, ..rw(NvmOpcode::Write, 13, 8) };
        io.with_data(other, &[1; PAGE]).await;
        let ended = (io.code(13).await, io.code(11).await);
        assert_eq!(ended, (Status::INVALID_FIELD, Status::MISSING_FUSED));
        assert_eq!(io.bytes(0, 8).await, [0; PAGE]);
    });
}

/// A first half after which nothing comes is not kept for ever.
#[test]
fn a_lone_half_ends() {
    on_core(async |core| {
        let receive_timeout = Duration::from_millis(50);
        let (_server, to, _) = serve(&core, Limits { receive_timeout, ..Limits::default() }).await;
        let (_admin, mut io) = associate(&core, to).await;
        io.with_data(half(FIRST, 11), &[0; PAGE]).await;
        assert_eq!(io.code(11).await, Status::MISSING_FUSED);
        all_is_free(&core).await;
        io.with_data(half(SECOND, 12), &[1; PAGE]).await;
        assert_eq!(io.code(12).await, Status::FAILED_FUSED);
    });
}

/// A first command whose second never comes holds its memory no longer than its queue exists, and a
/// queue has at most one.
#[test]
fn memory_of_a_lone_fused_command_is_bounded() {
    on_core(async |core| {
        let (_server, to, _) = serve(&core, Limits::default()).await;
        let (mut admin, mut io) = associate(&core, to).await;
        for cid in 0..20 {
            io.with_data(half(FIRST, cid), &[0; PAGE]).await;
        }
        for cid in 0..19 {
            assert_eq!(io.code(cid).await, Status::MISSING_FUSED);
        }
        sleep(Duration::from_millis(20)).await;
        let held = core.buffer_pool().usage().total - core.buffer_pool().usage().free;
        assert_eq!(held, 2 * PAGE as u64);
        admin.command(abort(7, 1, 19)).await;
        assert_eq!(admin.status(7).await.1, 0, "aborted");
        assert_eq!(io.code(19).await, Status::ABORT_REQUESTED);
        io.with_data(half(SECOND, 12), &[9; PAGE]).await;
        let (status, _) = io.status(12).await;
        assert_eq!(status.code(), Status::FAILED_FUSED, "its first half is gone");
        assert!(!status.is_do_not_retry(), "as little as the abort was");
        io.with_data(half(FIRST, 11), &[0; PAGE]).await;
        sleep(Duration::from_millis(20)).await;
        drop(io);
        all_is_free(&core).await;
    });
}

/// NVMe/TCP 3.6.1.3.2: data with a wrong digest fails its command, and the other half with it.
#[test]
fn a_wrong_digest_fails_both_halves() {
    on_core(async |core| {
        let (_server, to, _) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, to).await;
        let host = ScriptedHost { data_digest: true, ..ScriptedHost::default() };
        let mut digested = Queue::dial(&core, to).await;
        digested.host = host;
        digested.send(&host.ic_req()).await;
        assert!(matches!(digested.next().await, Reply::IcResp { .. }));
        let (sqe, data) = connect(2, io.cntlid).encode(0);
        digested.send(&host.capsule(sqe, data.as_bytes())).await;
        drop(digested.next().await);
        for broken in [11, 12] {
            for (fuse, cid) in [(FIRST, 11), (SECOND, 12)] {
                let mut capsule = host.capsule(half(fuse, cid), &[0; PAGE]);
                if cid == broken {
                    let last = capsule.len() - 1;
                    capsule[last] ^= 1;
                }
                digested.send(&capsule).await;
            }
            let mut ends = Vec::new();
            for _ in 0..2 {
                let Reply::Resp { cid, status, .. } = digested.next().await else { panic!() };
                ends.push((cid, status.code()));
            }
            ends.sort_by_key(|(cid, _)| *cid);
            let (own, along) = (Status::TRANSIENT_TRANSPORT, Status::FAILED_FUSED);
            let ends = [ends[0].1, ends[1].1];
            assert_eq!(ends, if broken == 11 { [own, along] } else { [along, own] });
        }
        assert_eq!(io.bytes(0, 8).await, [0; PAGE]);
    });
}

/// NVM Command Set 1.0, 3.2.2: adjacent sources, also overlapping the destination.
#[test]
fn blocks_are_copied() {
    on_core(async |core| {
        let (_server, to, _) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, to).await;
        for i in 0..8 {
            io.fill(i * 8, 8, i as u8 + 1).await;
        }
        assert_eq!(io.copy(1000, &[(56, 8), (0, 16)]).await, (Status::SUCCESS, 0));
        let copied = [[8; PAGE], [1; PAGE], [2; PAGE]].concat();
        assert_eq!(io.bytes(1000, 24).await, copied);
        // Forwards and backwards onto itself, over more than one piece.
        let large = io.bytes(0, 64).await;
        for i in 0..40 {
            assert_eq!(io.copy(2048 + i * 64, &[(0, 64)]).await.0, Status::SUCCESS);
        }
        for (from, to) in [(2048, 2048 + 8), (2048 + 8, 2048)] {
            assert_eq!(io.copy(to, &[(from, 2048)]).await.0, Status::SUCCESS);
            for i in 0..32 {
                assert_eq!(io.bytes(to + i * 64, 64).await, large, "{from} to {to}, {i}");
            }
        }
        all_is_free(&core).await;
    });
}

/// 3.2.2: dword 0 names the first range that is not copied.
#[test]
fn a_copy_tells_where_it_failed() {
    on_core(async |core| {
        let (_server, to, faults) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, to).await;
        io.fill(0, 8, 1).await;
        let bad = Blocks::new(Lba(300), 1);
        faults.add(Rule::new(Effect::Fail(Error::Unreadable { at: Lba(300) })).within(bad));
        let (status, range) = io.copy(1000, &[(0, 8), (0, 8), (296, 8), (0, 8)]).await;
        assert_eq!((status.code(), range), (Status::UNRECOVERED_READ, 2));
        assert_eq!(io.bytes(1000, 24).await, [vec![1; 2 * PAGE], vec![0; PAGE]].concat());
    });
}

/// The next read is executed at once and answered later, as a disk does that cannot abort it.
struct Late {
    below: Dev,
    next: Cell<bool>,
    has_read: Rc<Notify>,
    tells: Rc<Notify>,
}

impl Layer for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn info(&self) -> Info {
        self.below.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let is_late = matches!(op, Op::Read { .. }) && self.next.take();
        let done = self.below.submit(op, &ctx).await;
        if is_late {
            self.has_read.notify_one();
            self.tells.notified().await;
        }
        done
    }
}

/// A copy writes nothing once it is aborted, once its queue has gone, or its namespace: the host
/// may have written there meanwhile. It was at the disk then, which could not be stopped.
#[test]
fn a_copy_ends_with_its_requester() {
    for cause in ["abort", "queue", "namespace"] {
        on_core(async move |core| {
            let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
            let (has_read, tells) = <(Rc<Notify>, Rc<Notify>)>::default();
            let (below, next) = (disk(), Cell::new(true));
            let (read, tells_clone) = (Rc::clone(&has_read), Rc::clone(&tells));
            let late = Late { below, next, has_read: read, tells: tells_clone };
            let volume = add(&server, A, Dev::new(late));
            server.set_catalog(catalog(A));
            let to = listen(&core, &server, Service::Nvme).await;
            let (mut admin, mut io) = associate(&core, to).await;
            io.fill(1000, 8, 7).await;
            io.send_copy(22, 0, &[(1000, 8)]).await;
            timeout(PATIENCE, has_read.notified()).await.unwrap();
            match cause {
                "abort" => admin.command(abort(7, 1, 22)).await,
                "queue" => io = Queue::connect(&core, to, &connect(2, admin.cntlid)).await,
                _ => {
                    drop(add(&server, B, disk()));
                    server.set_catalog(catalog(B));
                }
            }
            sleep(Duration::from_millis(50)).await;
            tells.notify_one();
            match cause {
                "abort" => {
                    assert_eq!(admin.status(7).await.1, 0, "aborted");
                    assert_eq!(io.code(22).await, Status::ABORT_REQUESTED);
                }
                "namespace" => assert_eq!(io.code(22).await, Status::INTERNAL_ERROR),
                _ => {}
            }
            all_is_free(&core).await;
            assert_eq!(first_byte(&core, &volume).await, 0, "{cause}");
        });
    }
}

/// NVMe Base 2.0, 6.4: a queue that its host disconnects goes when its commands have ended, and may
/// be connected again.
#[test]
fn a_host_disconnects_a_queue() {
    on_core(async |core| {
        let (_server, to, faults) = serve(&core, Limits::default()).await;
        let (mut admin, mut io) = associate(&core, to).await;
        assert_eq!(admin.identify(1, 0).await[1804] & 1, 1, "OFCS");
        let disconnect =
            |cid| Sqe::new(AdminOpcode::Fabrics.0, cid, FabricsType::Disconnect.0.into());
        admin.command(disconnect(9)).await;
        assert_eq!(admin.code(9).await, Status::INVALID_QUEUE_TYPE);
        let mut other_format = disconnect(9);
        other_format.cdw10[0] = 1.into();
        io.command(other_format).await;
        assert_eq!(io.code(9).await, Status::FABRICS_FORMAT);
        faults.add(Rule::new(Effect::Stall));
        io.with_data(rw(NvmOpcode::Write, 1, 8), &[1; PAGE]).await;
        io.with_data(half(FIRST, 2), &[1; PAGE]).await;
        io.command(disconnect(3)).await;
        assert_eq!(io.code(2).await, Status::MISSING_FUSED);
        assert!(io.is_silent().await, "a write is at the disk");
        io.command(rw(NvmOpcode::Read, 4, 8)).await;
        assert_eq!(io.code(4).await, Status::ABORTED_SQ_DELETED);
        faults.clear();
        faults.release();
        let written = io.code(1).await;
        assert!([Status::SUCCESS, Status::ABORT_REQUESTED].contains(&written), "{written:?}");
        assert_eq!(io.code(3).await, Status::SUCCESS);
        assert!(timeout(PATIENCE, io.receive()).await.expect("it closes").is_none());
        let began = Instant::now();
        loop {
            let (mut again, status) =
                Queue::try_connect(&core, to, &connect(1, admin.cntlid)).await;
            if status.is_success() {
                assert_eq!(again.read().await, Status::SUCCESS);
                break;
            }
            assert!(began.elapsed() < PATIENCE, "{status:?}");
        }
    });
}
