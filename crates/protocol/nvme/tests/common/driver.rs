//! A driver without sockets: what `target` does, in one thread and at the test's pace.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::{Account, BufferPool, Bufs, BufsMut, Error, MemoryClass, Request, RequestError};
use frame::Machine;
use nvme::fabrics::CONNECT_BYTES;
use nvme::{
    Action, AdminAction, Completion, Config, Connect, Connection, Controllers, CopyRequest,
    DiscoveryLog, Event, IoCommand, IoWork, Limits, Namespace, Role, Sqe, Status, Subsystem, Tag,
    write_report,
};

use reservation::{Change, Initiator, ItNexus, Table};

use super::{BLOCKS, HOSTNQN, SUBNQN, info, namespaces};
use nvme::testing::{Reply, ScriptedHost};

/// What a command in flight is waiting to do once it runs.
#[derive(Clone, Copy, Debug)]
enum Plan {
    Connect,
    Consume,
    Produce(u32),
    Hold,
    Io(IoCommand),
}

#[derive(Debug)]
pub struct Link {
    pub conn: Connection,
    pub cntlid: Option<u16>,
    plans: BTreeMap<usize, (Sqe, Plan)>,
    unread: Vec<u8>,
    received: Vec<u8>,
}

pub struct Target {
    pub controllers: Controllers,
    pub subsystem: Rc<Subsystem>,
    pub discovery: Rc<DiscoveryLog>,
    pub namespaces: BTreeMap<u32, Namespace>,
    pub limits: Limits,
    pub links: Vec<Link>,
    pub disk: Vec<u8>,
    pub now: Duration,
    /// Requests that reached the volume.
    pub requests: Vec<String>,
    /// How requests end, instead of being carried out.
    pub fail: Option<RequestError>,
    /// I/O commands stay in flight until [`Target::finish_held`].
    pub hold: bool,
    pub held: Vec<(usize, Tag, Bufs)>,
    /// Memory is given only by [`Target::give_memory`].
    pub withhold: bool,
    pub wanting: Vec<(usize, Tag, u32, MemoryClass)>,
    pub events: Vec<Event>,
    /// The reservations of namespace 1.
    pub table: Table,
    pub account: Account,
}

impl Default for Target {
    fn default() -> Self {
        let subsystem = Subsystem {
            nqn: SUBNQN.into(),
            serial: "WR0001".into(),
            model: "Windrose".into(),
            firmware: "0.1.0".into(),
            quiesce_ms: 2000,
        };
        Self {
            controllers: Controllers::new(1..=0xffef),
            subsystem: Rc::new(subsystem),
            discovery: Rc::default(),
            namespaces: namespaces(),
            limits: Limits::default(),
            links: Vec::new(),
            disk: vec![0; BLOCKS as usize * 512],
            now: Duration::ZERO,
            requests: Vec::new(),
            fail: None,
            hold: false,
            held: Vec::new(),
            withhold: false,
            wanting: Vec::new(),
            events: Vec::new(),
            table: Table::default(),
            account: BufferPool::new(64 << 20).unwrap().account(),
        }
    }
}

impl Target {
    pub fn open(&mut self) -> usize {
        self.open_with(Config::default())
    }

    pub fn open_with(&mut self, config: Config) -> usize {
        let mut conn = Connection::new(config);
        conn.on_timer(Duration::ZERO);
        self.links.push(Link {
            conn,
            cntlid: None,
            plans: BTreeMap::new(),
            unread: Vec::new(),
            received: Vec::new(),
        });
        self.links.len() - 1
    }

    pub fn conn(&mut self, link: usize) -> &mut Connection {
        &mut self.links[link].conn
    }

    /// Gives a machine `bytes`, each portion as long as `portion` says.
    pub fn feed(&mut self, link: usize, bytes: &[u8], portion: &mut dyn FnMut() -> usize) {
        let mut bytes = [std::mem::take(&mut self.links[link].unread), bytes.to_vec()].concat();
        while !bytes.is_empty() {
            let Some(space) = self.links[link].conn.receive_space() else { break };
            assert!(!space.is_empty(), "an empty space would mean end of stream");
            let n = portion().clamp(1, space.len()).min(bytes.len());
            space[..n].copy_from_slice(&bytes[..n]);
            self.links[link].conn.on_received(n);
            bytes.drain(..n);
            self.act(link);
        }
        self.links[link].unread = bytes;
    }

    /// Bytes that a machine did not take yet.
    pub fn unread(&self, link: usize) -> usize {
        self.links[link].unread.len()
    }

    /// Takes what a machine has to send, in portions.
    pub fn take(&mut self, link: usize, portion: &mut dyn FnMut() -> usize) -> Vec<u8> {
        let mut out = Vec::new();
        let queue = self.links[link].conn.output();
        while !queue.is_empty() {
            let n = portion().clamp(1, queue.len());
            out.extend(queue.slices().flat_map(|s| s.to_vec()).take(n));
            queue.advance(n);
        }
        out
    }

    /// Sends `bytes` and gives all whole PDUs that come back.
    pub fn talk(&mut self, link: usize, host: &ScriptedHost, bytes: &[u8]) -> Vec<Reply> {
        self.feed(link, bytes, &mut || usize::MAX);
        self.replies(link, host)
    }

    /// All whole PDUs that have come back.
    pub fn replies(&mut self, link: usize, host: &ScriptedHost) -> Vec<Reply> {
        let sent = self.take(link, &mut || usize::MAX);
        let received = &mut self.links[link].received;
        received.extend(sent);
        let out = host.parse(received);
        assert!(received.is_empty(), "half a PDU: {received:?}");
        out
    }

    pub fn tick(&mut self, now: Duration) {
        self.now = now;
        for link in &mut self.links {
            link.conn.on_timer(now);
        }
        self.controllers.iter_mut().for_each(|c| c.on_timer(now));
        self.poll_events();
    }

    /// Takes a machine's actions until there are none.
    pub fn act(&mut self, link: usize) {
        while let Some(action) = self.links[link].conn.poll_action() {
            match action {
                Action::CommandArrived { tag, sqe } => self.arrived(link, tag, sqe),
                Action::Grant { tag, bytes, class } => {
                    self.wanting.push((link, tag, bytes, class));
                    if !self.withhold {
                        self.give_memory();
                    }
                }
                Action::Run { tag, data } => self.run(link, tag, data),
                Action::CommandRefused { .. } => {}
                Action::Abort { tag } => self.end(link, tag, Completion::OK, &Bufs::new()),
            }
        }
        self.poll_events();
    }

    pub fn give_memory(&mut self) {
        for (link, tag, bytes, class) in std::mem::take(&mut self.wanting) {
            let buffers = self.alloc(bytes as usize, class);
            self.links[link].conn.grant(tag, buffers);
            // What waited behind it can be read now.
            self.feed(link, &[], &mut || usize::MAX);
        }
    }

    pub fn finish_held(&mut self) {
        for (link, tag, data) in std::mem::take(&mut self.held) {
            self.carry_out(link, tag, data);
        }
    }

    fn alloc(&self, bytes: usize, class: MemoryClass) -> BufsMut {
        self.account.try_credit(bytes, class).expect("the pool is large").alloc(bytes)
    }

    fn plan(&mut self, link: usize, tag: Tag, sqe: Sqe, plan: Plan) {
        assert!(self.links[link].plans.insert(tag.index(), (sqe, plan)).is_none());
    }

    fn end(&mut self, link: usize, tag: Tag, completion: Completion, data: &Bufs) {
        self.links[link].plans.remove(&tag.index());
        self.links[link].conn.complete(tag, completion, data);
    }

    fn arrived(&mut self, link: usize, tag: Tag, sqe: Sqe) {
        let Some(queue) = self.links[link].conn.queue() else {
            if sqe.data_bytes() != CONNECT_BYTES {
                let status = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
                return self.end(link, tag, Completion::failed(status), &Bufs::new());
            }
            self.plan(link, tag, sqe, Plan::Connect);
            return self.links[link].conn.admit(tag, CONNECT_BYTES);
        };
        let cntlid = self.links[link].cntlid.expect("a connected queue has a controller");
        let Some(controller) = self.controllers.get_mut(cntlid) else { return };
        let (plan, data_out) = if queue.id == 0 {
            match controller.admin(tag, &sqe) {
                AdminAction::Complete(c) => return self.end(link, tag, c, &Bufs::new()),
                AdminAction::Receive { bytes } => (Plan::Consume, bytes),
                AdminAction::Produce { bytes } => (Plan::Produce(bytes), 0),
                AdminAction::Hold => (Plan::Hold, 0),
                AdminAction::Flush => {
                    self.requests.push("flush all".into());
                    return self.end(link, tag, Completion::OK, &Bufs::new());
                }
                AdminAction::SetPersistence { persist: persists, .. } => {
                    let by = party(controller.host_id());
                    self.alter(&by, &Change::SetPersistence(persists)).unwrap();
                    return self.end(link, tag, Completion::OK, &Bufs::new());
                }
                AdminAction::GetPersistence { .. } => {
                    let result = self.table.persist.into();
                    return self.end(link, tag, Completion::ok(result), &Bufs::new());
                }
                AdminAction::Abort { sqid, cid } => {
                    let aborted = self.abort(cntlid, sqid, cid);
                    let controller = self.controllers.get_mut(cntlid).unwrap();
                    let completion = controller.abort_finished(aborted);
                    return self.end(link, tag, completion, &Bufs::new());
                }
            }
        } else {
            match controller.io(queue.id, &sqe) {
                Ok(command) => (Plan::Io(command), command.data_out),
                Err(c) => return self.end(link, tag, c, &Bufs::new()),
            }
        };
        self.plan(link, tag, sqe, plan);
        self.links[link].conn.admit(tag, data_out);
    }

    /// Ends a command that is held or waits for data.
    fn abort(&mut self, cntlid: u16, sqid: u16, cid: u16) -> bool {
        let of =
            |l: &Link| l.cntlid == Some(cntlid) && l.conn.queue().is_some_and(|q| q.id == sqid);
        let Some(link) = self.links.iter().position(of) else { return false };
        let Some(tag) = self.links[link].conn.find(cid) else { return false };
        self.held.retain(|&(l, t, _)| (l, t) != (link, tag));
        self.end(link, tag, Completion::failed(Status::ABORT_REQUESTED), &Bufs::new());
        true
    }

    fn run(&mut self, link: usize, tag: Tag, data: Bufs) {
        let (sqe, plan) = self.links[link].plans[&tag.index()];
        let none = Bufs::new();
        match plan {
            Plan::Hold => {}
            Plan::Connect => self.connect(link, tag, &sqe, &data),
            Plan::Consume => {
                let controller = self.controller(link);
                let completion = controller.consume(&sqe, &data.to_vec());
                self.end(link, tag, completion, &none);
            }
            Plan::Produce(bytes) => {
                let mut buffers = self.alloc(bytes as usize, MemoryClass::LocalIo);
                buffers.iter_mut().for_each(|b| b.fill(0xa5));
                let completion = self.controller(link).produce(&sqe, &mut buffers);
                let mut data = Bufs::new();
                buffers.into_iter().for_each(|b| data.push(b.freeze()));
                self.end(link, tag, completion, &data);
            }
            Plan::Io(_) if self.hold => self.held.push((link, tag, data)),
            Plan::Io(_) => self.carry_out(link, tag, data),
        }
    }

    fn controller(&mut self, link: usize) -> &mut nvme::Controller {
        let cntlid = self.links[link].cntlid.unwrap();
        self.controllers.get_mut(cntlid).unwrap()
    }

    fn connect(&mut self, link: usize, tag: Tag, sqe: &Sqe, data: &Bufs) {
        match self.try_connect(sqe, &data.to_vec()) {
            Ok(connected) => {
                self.links[link].cntlid = Some(connected.cntlid);
                self.links[link].plans.remove(&tag.index());
                let result = u64::from(connected.cntlid);
                self.links[link].conn.queue_connected(tag, connected.queue, result);
            }
            Err(completion) => self.end(link, tag, completion, &Bufs::new()),
        }
    }

    fn try_connect(&mut self, sqe: &Sqe, data: &[u8]) -> Result<nvme::ConnectedQueue, Completion> {
        let connect = Connect::parse(sqe, data)?;
        if connect.qid > 0 {
            return self.controllers.connect_io(&connect);
        }
        if connect.hostnqn != HOSTNQN {
            return Err(Connect::refuse_host());
        }
        let (subsystem, role) = if connect.is_discovery() {
            let nqn = connect.subnqn.clone();
            let subsystem = Rc::new(Subsystem { nqn, ..(*self.subsystem).clone() });
            (subsystem, Role::Discovery(Rc::clone(&self.discovery)))
        } else if connect.subnqn == SUBNQN {
            (Rc::clone(&self.subsystem), Role::Io(self.namespaces.clone()))
        } else {
            return Err(Connect::refuse_subsystem());
        };
        self.controllers.connect_admin(&connect, &subsystem, role, self.limits, self.now)
    }

    fn carry_out(&mut self, link: usize, tag: Tag, data: Bufs) {
        let (sqe, plan) = self.links[link].plans[&tag.index()];
        let Plan::Io(command) = plan else { panic!("{plan:?} is no I/O command") };
        let known = self.namespaces.get(&command.nsid).map_or_else(info, |ns| ns.info);
        let request = match command.into_work(data, &known) {
            Ok(IoWork::Volume(request)) => request,
            Ok(IoWork::Nothing) => return self.end(link, tag, Completion::OK, &Bufs::new()),
            Ok(IoWork::Copy(work)) => {
                let CopyRequest { sources, to, fua } = &work;
                let sources: String =
                    sources.iter().map(|r| format!(" {}+{}", r.at, r.count)).collect();
                self.requests.push(format!("copy{sources} to {to} fua {fua}"));
                return self.end(link, tag, Completion::OK, &Bufs::new());
            }
            Ok(IoWork::ChangeReservations(change)) => {
                let by = party(self.controller(link).host_id());
                let completion = match self.alter(&by, &change) {
                    Ok(()) => Completion::OK,
                    Err(why) => self.controller(link).fail_refused_change(1, &sqe, why),
                };
                return self.end(link, tag, completion, &Bufs::new());
            }
            Ok(IoWork::ReservationReport { bytes }) => {
                let mut buffers = self.alloc(bytes as usize, MemoryClass::LocalIo);
                write_report(&self.table, &mut buffers);
                let mut data = Bufs::new();
                buffers.into_iter().for_each(|b| data.push(b.freeze()));
                return self.end(link, tag, Completion::OK, &data);
            }
            Err(status) => {
                return self.end(link, tag, Completion::failed(status), &Bufs::new());
            }
        };
        self.requests.push(describe(&request));
        let result = match self.fail.take() {
            Some(failure) => Err(failure),
            None => self.on_disk(request),
        };
        match result {
            Ok(data) => self.end(link, tag, Completion::OK, &data),
            Err(failure) => {
                let qid = self.links[link].conn.queue().unwrap().id;
                let completion = self.controller(link).fail(qid, &sqe, failure);
                self.end(link, tag, completion, &Bufs::new());
            }
        }
    }

    /// Changes the table, and tells all controllers.
    pub fn alter(
        &mut self,
        by: &ItNexus,
        change: &Change,
    ) -> Result<(), reservation::ReservationError> {
        let Some(next) = self.table.with_change(by, 1, change)? else { return Ok(()) };
        for controller in self.controllers.iter_mut() {
            let notices = Table::notifications(&self.table, &next, &party(controller.host_id()));
            controller.reservations_changed(1, notices);
        }
        self.table = next;
        Ok(())
    }

    fn on_disk(&mut self, request: Request) -> Result<Bufs, RequestError> {
        let bytes = |at: block::Lba, n: usize| at.0 as usize * 512..at.0 as usize * 512 + n;
        let blocks = |r: block::Blocks| bytes(r.at, r.count as usize * 512);
        match request {
            Request::Read { range } => return Ok(self.buffers(&self.disk[blocks(range)])),
            Request::Write { at, data, .. } => {
                data.copy_to(&mut self.disk[bytes(at, data.len())]);
            }
            Request::Compare { at, data } => {
                let there = self.buffers(&self.disk[bytes(at, data.len())]);
                if let Some(offset) = there.first_difference(&data) {
                    return Err(RequestError::Miscompare { offset: offset as u64 });
                }
            }
            Request::Zero { range, .. } => self.disk[blocks(range)].fill(0),
            Request::Unmap { ranges } => {
                ranges.into_iter().for_each(|r| self.disk[blocks(r)].fill(0));
            }
            Request::Verify { .. } | Request::Flush => {}
            Request::WriteSame { .. }
            | Request::CompareAndWrite { .. }
            | Request::OrWrite { .. }
            | Request::BlockStatus { .. }
            | Request::DrainWrites { .. } => {
                return Err(RequestError::Device(Error::Gone));
            }
        }
        Ok(Bufs::new())
    }

    /// `bytes` in buffers, cut where it hurts.
    fn buffers(&self, bytes: &[u8]) -> Bufs {
        let mut out = Bufs::new();
        let mut left = bytes;
        for mut buffer in self.alloc(bytes.len(), MemoryClass::LocalIo) {
            let (now, later) = left.split_at(buffer.len());
            buffer.copy_from_slice(now);
            let buffer = buffer.freeze();
            let middle = buffer.len() / 3;
            out.push(buffer.slice(0..middle));
            out.push(buffer.slice(middle..buffer.len()));
            left = later;
        }
        out
    }

    fn poll_events(&mut self) {
        let ids: Vec<u16> = self.controllers.iter().map(nvme::Controller::id).collect();
        for id in ids {
            while let Some(event) = self.controllers.get_mut(id).unwrap().poll_event() {
                self.events.push(event);
                let admin =
                    |l: &Link| l.cntlid == Some(id) && l.conn.queue().is_some_and(|q| q.id == 0);
                let link = self.links.iter().position(admin).unwrap();
                match event {
                    Event::Complete { tag, completion } => {
                        self.end(link, tag, completion, &Bufs::new());
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
}

/// A host, as tables know it.
pub fn party(host_id: [u8; 16]) -> ItNexus {
    ItNexus { initiator: Initiator::Host(host_id), port: 0 }
}

fn describe(request: &Request) -> String {
    match request {
        Request::Write { at, data, fua } => format!("write {at}+{} fua {fua}", data.len()),
        Request::Compare { at, data } => format!("compare {at}+{}", data.len()),
        Request::Read { range } => format!("read {}+{}", range.at, range.count),
        Request::Zero { range, unmap, fua } => {
            format!("zero {}+{} unmap {unmap} fua {fua}", range.at, range.count)
        }
        Request::Unmap { ranges } => {
            ranges.iter().fold("unmap".into(), |s: String, r| format!("{s} {}+{}", r.at, r.count))
        }
        Request::Verify { range } => format!("verify {}+{}", range.at, range.count),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// A host with its association.
pub struct Session {
    pub target: Target,
    pub host: ScriptedHost,
    pub admin: usize,
    pub io: Option<usize>,
    pub cntlid: u16,
    cid: u16,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub status: Status,
    pub result: u64,
    pub data: Vec<u8>,
}

impl Outcome {
    pub fn code(&self) -> Status {
        self.status.code()
    }

    #[track_caller]
    pub fn ok(self) -> Self {
        assert!(self.status.is_success(), "{:?}", self.status);
        self
    }
}

impl Session {
    /// An association whose controller is connected and not enabled.
    pub fn connected(target: Target, host: ScriptedHost, connect: &Connect) -> Self {
        let mut s = Self { target, host, admin: 0, io: None, cntlid: 0, cid: 0 };
        s.admin = s.initialized();
        s.cntlid = s.connect(s.admin, connect).ok().result as u16;
        s
    }

    /// An association whose controller is enabled, without I/O queues.
    pub fn enabled(target: Target, host: ScriptedHost) -> Self {
        let mut s = Self::connected(target, host, &super::connect(0, 0));
        s.set_property(0x14, 0x0046_0001).ok();
        s
    }

    /// An association with one I/O queue.
    pub fn ready() -> Self {
        Self::ready_with(Target::default(), ScriptedHost::default())
    }

    pub fn ready_with(target: Target, host: ScriptedHost) -> Self {
        let mut s = Self::enabled(target, host);
        let link = s.add_io(&super::connect(1, s.cntlid));
        s.io = Some(link);
        s
    }

    /// One more I/O queue.
    pub fn add_io(&mut self, connect: &Connect) -> usize {
        let link = self.initialized();
        let connected = self.connect(link, connect).ok();
        assert_eq!(connected.result as u16, self.cntlid);
        link
    }

    pub fn initialized(&mut self) -> usize {
        let link = self.target.open();
        let replies = self.target.talk(link, &self.host, &self.host.ic_req());
        assert!(matches!(replies[..], [Reply::IcResp { .. }]), "{replies:?}");
        link
    }

    pub fn connect(&mut self, link: usize, connect: &Connect) -> Outcome {
        use zerocopy::IntoBytes;
        let cid = self.next_cid();
        let (sqe, data) = connect.encode(cid);
        self.call(link, sqe, data.as_bytes())
    }

    pub fn next_cid(&mut self) -> u16 {
        self.cid = self.cid.wrapping_add(1);
        self.cid
    }

    pub fn set_property(&mut self, offset: u32, value: u64) -> Outcome {
        let cid = self.next_cid();
        let sqe = nvme::fabrics::Property::encode(cid, offset, false, Some(value));
        self.call(self.admin, sqe, &[])
    }

    pub fn property(&mut self, offset: u32, wide: bool) -> Outcome {
        let cid = self.next_cid();
        let sqe = nvme::fabrics::Property::encode(cid, offset, wide, None);
        self.call(self.admin, sqe, &[])
    }

    pub fn admin(&mut self, mut sqe: Sqe) -> Outcome {
        sqe.cid = self.next_cid().into();
        self.call(self.admin, sqe, &[])
    }

    pub fn io(&mut self, mut sqe: Sqe, data: &[u8]) -> Outcome {
        sqe.cid = self.next_cid().into();
        self.call(self.io.unwrap(), sqe, data)
    }

    /// Sends a command as Linux does (data of up to 8 KiB in the capsule, more by R2T) and waits
    /// for its end.
    pub fn call(&mut self, link: usize, sqe: Sqe, data: &[u8]) -> Outcome {
        let in_capsule = !data.is_empty() && data.len() <= 16384;
        let sent = if in_capsule { self.host.capsule(sqe, data) } else { self.host.command(sqe) };
        let mut out = Outcome { status: Status::SUCCESS, result: 0, data: Vec::new() };
        let mut replies = self.target.talk(link, &self.host, &sent);
        while !replies.is_empty() {
            let mut next = Vec::new();
            for reply in replies {
                match reply {
                    Reply::Data { cid, offset, bytes, success, .. } => {
                        assert_eq!((cid, offset as usize), (sqe.cid.get(), out.data.len()));
                        out.data.extend(bytes);
                        if success {
                            return out;
                        }
                    }
                    Reply::R2t { .. } => {
                        let bytes = self.host.answer(&reply, data, 65536);
                        next.extend(self.target.talk(link, &self.host, &bytes));
                    }
                    Reply::Resp { cid, status, result, .. } => {
                        assert_eq!(cid, sqe.cid.get());
                        (out.status, out.result) = (status, result);
                        return out;
                    }
                    other => panic!("{other:?} in answer to {sqe:?}"),
                }
            }
            replies = next;
        }
        panic!("no answer to {sqe:?}");
    }
}
