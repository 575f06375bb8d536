//! Plays a script of arbitrary bytes against machines and controllers: what a host may send, in
//! any portions, and what a driver may decide, in any order. Shared by the fuzz target and a
//! property test. What must hold is asserted on the way:
//!
//! * nothing panics, and the space for more bytes is never empty;
//! * a queue holds no more commands than it has entries, so nothing else grows either;
//! * tags are unique while in use, and every command can be brought to its end;
//! * what goes out is a sequence of well-formed PDUs.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::{Account, BufferPool, Bufs, BufsMut, Error, Info, Lba, MemoryClass, RequestError};
use frame::Machine;
use nvme::entry::{FLAG_SGL, Sgl};
use nvme::fabrics::{CNTLID_DYNAMIC, DISCOVERY_NQN};
use nvme::log::AnaState;
use nvme::pdu::{
    CapsuleCmd, CommonHeader, DIGEST_DATA, DIGEST_HEADER, DataPdu, IcReq, PduType, R2t,
};
use nvme::{
    Action, AdminAction, Completion, Config, Connect, Connection, Controllers, DiscoveryLog, Event,
    IoCommand, IoWork, Limits, Namespace, Role, Sqe, Status, Subsystem, Tag,
};
use reservation::{Change, Initiator, ItNexus, Table};
use testkit::Script;
use zerocopy::{FromBytes, IntoBytes};

const SUBNQN: &str = "nqn.a";

#[derive(Clone, Copy, Debug)]
enum Plan {
    Connect(Sqe),
    Consume(Sqe),
    Produce(Sqe, u32),
    Hold,
    Abort,
    Io(Sqe, IoCommand),
}

struct Link {
    conn: Connection,
    cntlid: Option<u16>,
    digest: u8,
    plans: BTreeMap<usize, (Tag, Plan)>,
    waiting: Vec<(Tag, u32, MemoryClass)>,
    running: Vec<(Tag, Bufs)>,
    r2ts: Vec<R2t>,
    unread: Vec<u8>,
    sent: Vec<u8>,
}

struct World {
    links: Vec<Link>,
    controllers: Controllers,
    subsystem: Rc<Subsystem>,
    account: Account,
    now: Duration,
    portion: usize,
    table: Table,
    /// Whether memory comes and commands end at once.
    eager: bool,
}

fn namespace(blocks: u64) -> Namespace {
    let info = Info {
        block_size: 512,
        blocks,
        metadata_blocks: 0,
        physical_block_size: 4096,
        max_transfer_blocks: 64,
        unmap_granularity_blocks: 8,
        unmap_zeroes: true,
        volatile_cache: true,
        native_fua: false,
        read_only: blocks == 13,
        overhead_bytes: 0,
    };
    Namespace {
        info,
        uuid: [1; 16],
        nguid: [2; 16],
        eui64: None,
        thin: true,
        used_blocks: None,
        keeps_reservations: true,
        is_shared: false,
    }
}

/// Plays `script`.
pub(crate) fn run(script: &[u8]) {
    let mut script = Script::new(script);
    let subsystem = Subsystem {
        nqn: SUBNQN.into(),
        serial: "1".into(),
        model: "m".into(),
        firmware: "f".into(),
        quiesce_ms: 0,
    };
    let mut world = World {
        links: Vec::new(),
        controllers: Controllers::new(1..=3),
        subsystem: Rc::new(subsystem),
        account: BufferPool::new(16 << 20).unwrap().account(),
        now: Duration::ZERO,
        portion: usize::MAX,
        table: Table::default(),
        eager: script.byte() & 1 == 0,
    };
    world.open();
    for _ in 0..400 {
        if script.is_empty() {
            break;
        }
        world.step(&mut script);
    }
    for link in 0..world.links.len() {
        world.finish(link);
    }
}

impl World {
    fn open(&mut self) {
        let config = Config { max_h2c_data: 8192, max_c2h_data: 5000, ..Config::default() };
        let mut conn = Connection::new(config);
        conn.on_timer(self.now);
        self.links.push(Link {
            conn,
            cntlid: None,
            digest: 0,
            plans: BTreeMap::new(),
            waiting: Vec::new(),
            running: Vec::new(),
            r2ts: Vec::new(),
            unread: Vec::new(),
            sent: Vec::new(),
        });
    }

    fn step(&mut self, script: &mut Script<'_>) {
        let what = script.byte();
        let link = usize::from(what >> 5) % self.links.len();
        match what & 0x1f {
            0 => {
                let n = usize::from(script.byte());
                let bytes = script.many(n);
                self.feed(link, &bytes);
            }
            1 => self.ic_req(link, script),
            2 | 3 => self.connect(link, script),
            4..=11 => self.command(link, script),
            12..=14 => self.h2c_data(link, script),
            15 => self.grant(link),
            16 | 17 => self.end_one(link, script),
            18 => self.tick(script),
            19 => self.drain(link, usize::from(script.byte())),
            20 => self.portion = usize::from(script.byte()).max(1),
            21 => self.portion = usize::MAX,
            22 => self.change(script),
            23 if self.links.len() < 4 => self.open(),
            24 => self.refuse(link),
            25 => self.links[link].conn.close(),
            26 => self.disconnect(link),
            27 => self.common_sequence(link),
            _ => self.drain(link, usize::MAX),
        }
    }

    /// ICReq, Connect and enabling the controller, so that scripts reach what lies behind.
    fn common_sequence(&mut self, link: usize) {
        let req = IcReq::new(0, 0);
        self.feed(link, req.as_bytes());
        let admin = self.links.iter().find_map(|l| l.cntlid);
        let qid = u16::try_from(admin.map_or(0, |_| link)).unwrap();
        self.send_connect(link, qid, admin.unwrap_or(CNTLID_DYNAMIC), SUBNQN, 31, true);
        self.drain(link, usize::MAX);
        let enable = nvme::fabrics::Property::encode(0x77, 0x14, false, Some(0x0046_0001));
        self.send(link, CapsuleCmd::new(enable).as_bytes(), &[], 0);
        self.drain(link, usize::MAX);
    }

    fn ic_req(&mut self, link: usize, script: &mut Script<'_>) {
        let (digest, hpda) = (script.byte() & 3, script.byte());
        self.feed(link, IcReq::new(digest, hpda % 33).as_bytes());
        let (header, data) = self.links[link].conn.digests();
        self.links[link].digest = u8::from(header) | u8::from(data) << 1;
    }

    fn connect(&mut self, link: usize, script: &mut Script<'_>) {
        let (flags, qid) = (script.byte(), u16::from(script.byte() % 4));
        let known = self.controllers.iter().map(nvme::Controller::id).next();
        let cntlid = if qid == 0 { CNTLID_DYNAMIC } else { known.unwrap_or(9) };
        let subnqn = if flags & 1 != 0 { DISCOVERY_NQN } else { SUBNQN };
        let entries = u16::from(script.byte());
        self.send_connect(link, qid, cntlid, subnqn, entries, flags & 2 == 0);
    }

    fn send_connect(
        &mut self,
        link: usize,
        qid: u16,
        cntlid: u16,
        subnqn: &str,
        sqsize: u16,
        flow_control: bool,
    ) {
        let connect = Connect {
            qid,
            sqsize,
            flow_control,
            kato_ms: 5000,
            host_id: [3; 16],
            hostnqn: "nqn.h".into(),
            subnqn: subnqn.into(),
            cntlid,
        };
        let (mut sqe, data) = connect.encode(0x99);
        sqe.sgl = Sgl::in_capsule(1024);
        self.send(link, CapsuleCmd::new(sqe).as_bytes(), data.as_bytes(), 0);
    }

    fn command(&mut self, link: usize, script: &mut Script<'_>) {
        let (opcode, shape) = (script.byte(), script.byte());
        let mut sqe = Sqe::new(opcode, u16::from(script.byte()), 1);
        sqe.flags = if shape & 1 == 0 { FLAG_SGL } else { script.byte() };
        if shape & 2 != 0 {
            sqe.nsid = script.word().into();
        }
        for dword in 0..6 {
            if shape & 4 << dword != 0 {
                sqe.cdw10[dword % 6] = script.word().into();
            } else if dword == 2 {
                sqe.cdw10[2] = 7.into();
            }
        }
        let length =
            [0u32, 16, 512, 1024, 4096, 8192, 16384, 32768, 8, 64][usize::from(script.byte() % 10)];
        let in_capsule = shape & 0x80 != 0 && length <= 16384;
        let data = if in_capsule { vec![0x5a; length as usize] } else { Vec::new() };
        sqe.sgl = if in_capsule { Sgl::in_capsule(length) } else { Sgl::transport(length) };
        let padding = usize::from(script.byte() % 4) * 4;
        self.send(link, CapsuleCmd::new(sqe).as_bytes(), &data, padding);
    }

    /// Data for an R2T, mostly what was asked for.
    fn h2c_data(&mut self, link: usize, script: &mut Script<'_>) {
        let Some(r2t) = self.links[link].r2ts.first().copied() else { return };
        let asked = r2t.length.get().saturating_sub(r2t.offset.get());
        let spoil = script.byte();
        let length = asked.min(1 + u32::from(script.byte()) * 40);
        let offset = r2t.offset.get() + u32::from(spoil == 1);
        let cid = r2t.command_id.get() + u16::from(spoil == 2);
        let tag = r2t.transfer_tag.get() + u16::from(spoil == 3);
        let mut header = DataPdu::new(PduType::H2CData, cid, tag, offset, length);
        header.common.flags = if length == asked || spoil == 4 { 4 } else { 0 };
        let data = vec![0x77; length as usize];
        if length == asked {
            self.links[link].r2ts.remove(0);
        } else {
            self.links[link].r2ts[0].offset = (offset + length).into();
        }
        self.send(link, header.as_bytes(), &data, 0);
    }

    /// Sends a PDU with all lengths and digests in place.
    fn send(&mut self, link: usize, header: &[u8], data: &[u8], padding: usize) {
        let digest = self.links[link].digest;
        let mut header = header.to_vec();
        let after = header.len() + if digest & DIGEST_HEADER != 0 { 4 } else { 0 };
        let trailer = digest & DIGEST_DATA != 0 && !data.is_empty();
        let pdo = if data.is_empty() { after } else { after + padding };
        let plen = pdo + data.len() + if trailer { 4 } else { 0 };
        header[1] |= digest & DIGEST_HEADER | if trailer { 2 } else { 0 };
        header[3] = u8::try_from(pdo).unwrap();
        header[4..8].copy_from_slice(&u32::try_from(plen).unwrap().to_le_bytes());
        let mut pdu = header.clone();
        if digest & DIGEST_HEADER != 0 {
            pdu.extend(wire::crc32c(&header).to_le_bytes());
        }
        pdu.resize(pdo, 0);
        pdu.extend(data);
        if trailer {
            pdu.extend(wire::crc32c(data).to_le_bytes());
        }
        self.feed(link, &pdu);
    }

    fn feed(&mut self, link: usize, bytes: &[u8]) {
        let mut bytes = [std::mem::take(&mut self.links[link].unread), bytes.to_vec()].concat();
        while !bytes.is_empty() {
            let Some(space) = self.links[link].conn.receive_space() else { break };
            assert!(!space.is_empty(), "an empty space would mean end of stream");
            let n = self.portion.min(space.len()).min(bytes.len());
            space[..n].copy_from_slice(&bytes[..n]);
            self.links[link].conn.on_received(n);
            bytes.drain(..n);
            self.act(link);
        }
        // A driver does not read on while the machine waits.
        bytes.truncate(64 * 1024);
        self.links[link].unread = bytes;
    }

    fn act(&mut self, link: usize) {
        let entries = self.links[link].conn.queue().map_or(1, |q| usize::from(q.entries));
        let conn = &self.links[link].conn;
        assert!(conn.close_reason().is_some() || conn.in_flight() <= entries);
        while let Some(action) = self.links[link].conn.poll_action() {
            let l = &mut self.links[link];
            match action {
                Action::CommandArrived { tag, sqe } => {
                    assert!(tag.index() < entries && !l.plans.contains_key(&tag.index()));
                    self.arrived(link, tag, sqe);
                }
                Action::Grant { tag, bytes, class } => {
                    l.waiting.push((tag, bytes, class));
                    if self.eager {
                        self.grant(link);
                    }
                }
                Action::Run { tag, data } => {
                    if !matches!(l.plans[&tag.index()].1, Plan::Hold | Plan::Abort) {
                        l.running.push((tag, data));
                    }
                    if self.eager {
                        self.end_one(link, &mut Script::new(&[]));
                    }
                }
                Action::CommandRefused { .. } => {}
                Action::Abort { tag } => self.complete(link, tag, Completion::OK, &Bufs::new()),
            }
        }
        self.poll_events();
    }

    fn arrived(&mut self, link: usize, tag: Tag, sqe: Sqe) {
        let Some(queue) = self.links[link].conn.queue() else {
            self.links[link].plans.insert(tag.index(), (tag, Plan::Connect(sqe)));
            return self.links[link].conn.admit(tag, sqe.data_bytes().min(1024));
        };
        let controller = self.links[link].cntlid.and_then(|id| self.controllers.get_mut(id));
        let Some(controller) = controller else {
            let status = Completion::failed(Status::ABORTED_SQ_DELETED);
            return self.complete(link, tag, status, &Bufs::new());
        };
        let judged = if queue.id == 0 {
            match controller.admin(tag, &sqe) {
                AdminAction::Complete(completion) => Err(completion),
                AdminAction::Receive { bytes } => Ok((Plan::Consume(sqe), bytes)),
                AdminAction::Produce { bytes } => Ok((Plan::Produce(sqe, bytes), 0)),
                AdminAction::Hold => Ok((Plan::Hold, 0)),
                AdminAction::Flush
                | AdminAction::SetPersistence { .. }
                | AdminAction::GetPersistence { .. } => Err(Completion::OK),
                AdminAction::Abort { .. } => Ok((Plan::Abort, 0)),
            }
        } else {
            controller.io(queue.id, &sqe).map(|c| (Plan::Io(sqe, c), c.data_out))
        };
        match judged {
            Ok((plan, bytes)) => {
                self.links[link].plans.insert(tag.index(), (tag, plan));
                self.links[link].conn.admit(tag, bytes);
            }
            Err(completion) => self.complete(link, tag, completion, &Bufs::new()),
        }
    }

    fn alloc(&self, bytes: u32) -> BufsMut {
        let bytes = bytes as usize;
        self.account.try_credit(bytes, MemoryClass::LocalIo).expect("bounded use").alloc(bytes)
    }

    fn grant(&mut self, link: usize) {
        if self.links[link].waiting.is_empty() {
            return;
        }
        let (tag, bytes, _) = self.links[link].waiting.remove(0);
        let buffers = self.alloc(bytes);
        self.links[link].conn.grant(tag, buffers);
        self.feed(link, &[]);
        self.act(link);
    }

    fn end_one(&mut self, link: usize, script: &mut Script<'_>) {
        let l = &mut self.links[link];
        if l.running.is_empty() {
            return;
        }
        let at = usize::from(script.byte()) % l.running.len();
        let (tag, data) = l.running.remove(at);
        let Some(&(_, plan)) = l.plans.get(&tag.index()) else { return };
        let (completion, data) = self.outcome(link, tag, plan, data, script.byte());
        if let Some(completion) = completion {
            self.complete(link, tag, completion, &data);
        }
    }

    fn outcome(
        &mut self,
        link: usize,
        tag: Tag,
        plan: Plan,
        data: Bufs,
        how: u8,
    ) -> (Option<Completion>, Bufs) {
        let none = Bufs::new();
        let cntlid = self.links[link].cntlid;
        let controller = cntlid.and_then(|id| self.controllers.get_mut(id));
        match (plan, controller) {
            (Plan::Connect(sqe), _) => (self.try_connect(link, tag, &sqe, &data), none),
            (Plan::Consume(sqe), Some(c)) => (Some(c.consume(&sqe, &data.to_vec())), none),
            (Plan::Produce(sqe, bytes), Some(_)) => {
                let mut buffers = self.alloc(bytes);
                let c = cntlid.and_then(|id| self.controllers.get_mut(id)).unwrap();
                let completion = c.produce(&sqe, &mut buffers);
                let mut out = Bufs::new();
                buffers.into_iter().for_each(|b| out.push(b.freeze()));
                (Some(completion), out)
            }
            (Plan::Io(sqe, command), Some(c)) => {
                if how == 1 {
                    let failure = RequestError::Device(Error::Unreadable { at: Lba(1) });
                    return (Some(c.fail(1, &sqe, failure)), none);
                }
                let info = c.namespaces().get(&command.nsid).map(|ns| ns.info);
                let Some(info) = info else { return (Some(Completion::OK), none) };
                match command.into_work(data, &info) {
                    Ok(IoWork::Volume(block::Request::Read { range })) => {
                        (Some(Completion::OK), Bufs::zeroes(range.count as usize * 512))
                    }
                    Ok(IoWork::ChangeReservations(change)) => {
                        (Some(self.alter(link, &sqe, &change)), none)
                    }
                    Ok(IoWork::ReservationReport { bytes }) => {
                        (Some(Completion::OK), self.report(bytes))
                    }
                    Ok(_) => (Some(Completion::OK), none),
                    Err(status) => (Some(Completion::failed(status)), none),
                }
            }
            _ => (Some(Completion::failed(Status::ABORTED_SQ_DELETED)), none),
        }
    }

    /// Changes the table on behalf of a link's host, and tells all controllers.
    fn alter(&mut self, link: usize, sqe: &Sqe, change: &Change) -> Completion {
        let cntlid = self.links[link].cntlid;
        let Some(controller) = cntlid.and_then(|id| self.controllers.get_mut(id)) else {
            return Completion::failed(Status::ABORTED_SQ_DELETED);
        };
        let by = ItNexus { initiator: Initiator::Host(controller.host_id()), port: 0 };
        match self.table.with_change(&by, 1, change) {
            Err(why) => return controller.fail_refused_change(1, sqe, why),
            Ok(None) => {}
            Ok(Some(next)) => {
                for controller in self.controllers.iter_mut() {
                    let host = Initiator::Host(controller.host_id());
                    let notices = Table::notifications(
                        &self.table,
                        &next,
                        &ItNexus { initiator: host, port: 0 },
                    );
                    controller.reservations_changed(1, notices);
                }
                self.table = next;
            }
        }
        Completion::OK
    }

    fn report(&self, bytes: u32) -> Bufs {
        let mut buffers = self.alloc(bytes);
        nvme::write_report(&self.table, &mut buffers);
        let mut out = Bufs::new();
        buffers.into_iter().for_each(|b| out.push(b.freeze()));
        out
    }

    fn try_connect(&mut self, link: usize, tag: Tag, sqe: &Sqe, data: &Bufs) -> Option<Completion> {
        let connect = match Connect::parse(sqe, &data.to_vec()) {
            Ok(connect) => connect,
            Err(completion) => return Some(completion),
        };
        let connected = if connect.qid > 0 {
            self.controllers.connect_io(&connect)
        } else {
            let role = if connect.is_discovery() {
                Role::Discovery(Rc::default())
            } else {
                Role::Io(BTreeMap::from([(1, namespace(1000))]))
            };
            let limits = Limits { max_transfer_bytes: 32768, namespaces: 4, ..Limits::default() };
            self.controllers.connect_admin(&connect, &self.subsystem, role, limits, self.now)
        };
        match connected {
            Ok(connected) => {
                let l = &mut self.links[link];
                l.cntlid = Some(connected.cntlid);
                l.plans.remove(&tag.index());
                l.conn.queue_connected(tag, connected.queue, connected.cntlid.into());
                None
            }
            Err(completion) => Some(completion),
        }
    }

    fn complete(&mut self, link: usize, tag: Tag, completion: Completion, data: &Bufs) {
        let l = &mut self.links[link];
        l.plans.remove(&tag.index());
        l.waiting.retain(|w| w.0 != tag);
        l.running.retain(|r| r.0 != tag);
        l.conn.complete(tag, completion, data);
        self.feed(link, &[]);
    }

    /// Ends the oldest command, whatever it waits for.
    fn refuse(&mut self, link: usize) {
        let first = self.links[link].plans.values().next().copied();
        if let Some((tag, Plan::Connect(_) | Plan::Io(..) | Plan::Abort)) = first {
            let status = Completion::failed(Status::ABORT_REQUESTED);
            self.complete(link, tag, status, &Bufs::new());
        }
    }

    fn disconnect(&mut self, link: usize) {
        self.links[link].conn.close();
        let Some(cntlid) = self.links[link].cntlid.take() else { return };
        match self.links[link].conn.queue() {
            Some(queue) if queue.id > 0 => {
                if let Some(c) = self.controllers.get_mut(cntlid) {
                    c.io_disconnected(queue.id);
                }
            }
            _ => drop(self.controllers.remove(cntlid)),
        }
    }

    fn tick(&mut self, script: &mut Script<'_>) {
        self.now += Duration::from_millis(u64::from(script.byte()) * 100);
        for link in 0..self.links.len() {
            self.links[link].conn.on_timer(self.now);
            self.act(link);
        }
        self.controllers.iter_mut().for_each(|c| c.on_timer(self.now));
        self.poll_events();
    }

    fn change(&mut self, script: &mut Script<'_>) {
        let (what, value) = (script.byte(), script.byte());
        for c in self.controllers.iter_mut() {
            match what % 4 {
                0 => c.set_namespaces(BTreeMap::from([(1, namespace(value.into()))])),
                1 => c.set_ana(u32::from(value >> 7) + 1, AnaState(value % 6)),
                2 => {
                    let log = DiscoveryLog { generation: value.into(), entries: Vec::new() };
                    c.set_discovery(Rc::new(log));
                }
                _ => c.shut_down(),
            }
        }
        self.poll_events();
    }

    fn poll_events(&mut self) {
        let ids: Vec<u16> = self.controllers.iter().map(nvme::Controller::id).collect();
        for id in ids {
            while let Some(event) =
                self.controllers.get_mut(id).and_then(nvme::Controller::poll_event)
            {
                let admin =
                    |l: &Link| l.cntlid == Some(id) && l.conn.queue().is_some_and(|q| q.id == 0);
                let Some(link) = self.links.iter().position(admin) else { continue };
                match event {
                    Event::Complete { tag, completion } => {
                        self.complete(link, tag, completion, &Bufs::new());
                    }
                    Event::Discard { tag } => {
                        self.links[link].plans.remove(&tag.index());
                        self.links[link].conn.discard(tag);
                    }
                    Event::ShutDown | Event::Reset | Event::KeepAliveExpired => {}
                }
            }
        }
    }

    /// Takes up to `most` bytes of output, and checks the PDUs in it.
    fn drain(&mut self, link: usize, most: usize) {
        let l = &mut self.links[link];
        let mut left = most;
        while left > 0 && !l.conn.output().is_empty() {
            let queue = l.conn.output();
            let flat: Vec<u8> = queue.slices().flat_map(|s| s.to_vec()).collect();
            let n = flat.len().min(left);
            queue.advance(n);
            l.sent.extend(&flat[..n]);
            left -= n;
        }
        while let Ok((common, _)) = CommonHeader::read_from_prefix(&l.sent) {
            let plen = common.plen.get() as usize;
            assert!(plen >= usize::from(common.hlen) && plen < 1 << 17, "{common:?}");
            if l.sent.len() < plen {
                break;
            }
            if common.kind() == PduType::R2T {
                let (r2t, _) = R2t::read_from_prefix(&l.sent).unwrap();
                l.r2ts.push(r2t);
                if let Some(r2t) = l.r2ts.last_mut() {
                    r2t.offset = 0.into();
                }
            }
            assert!(matches!(common.pdu_type, 1 | 3 | 5 | 7 | 9), "{common:?}");
            l.sent.drain(..plen);
        }
    }

    fn finish(&mut self, link: usize) {
        self.links[link].conn.close();
        let tags: Vec<Tag> = self.links[link].plans.values().map(|p| p.0).collect();
        for tag in tags {
            self.complete(link, tag, Completion::OK, &Bufs::new());
        }
        self.drain(link, usize::MAX);
        assert_eq!(self.links[link].conn.in_flight(), 0, "a command was forgotten");
    }
}
