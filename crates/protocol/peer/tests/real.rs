//! A session over real sockets: data as large as they get, read directly into their place.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use block::{Account, Blocks, Class, Lba};
use peer::{
    Change, Endpoint, Handler, Identity, Kind, Link, Message, NodeId, PeerAddresses, Received,
    Secret, Seq, Tag, View, receive_greetings,
};
use rt::{Core, Cores, CoresConfig};
use uuid::Uuid;

const DATA: usize = 1 << 20;
const WRITES: u64 = 64;

struct Replica {
    memory: Account,
    link: RefCell<Option<Link>>,
    got: Cell<u64>,
}

impl Handler for Replica {
    fn up(&self, link: Link) {
        *self.link.borrow_mut() = Some(link);
    }
    fn down(&self, _: NodeId, _: u64) {
        self.link.take();
    }
    async fn deliver(&self, _: NodeId, _: u64, received: Received) {
        let Message::Write { seq, change, .. } = &received.message else { return };
        assert_eq!(seq.0, self.got.get());
        let right = |part: &block::Buf| part.iter().all(|&b| b == seq.0 as u8);
        assert!(change.data.len() == DATA && change.data.iter().all(right));
        self.got.set(seq.0 + 1);
    }
    fn memory(&self) -> &Account {
        &self.memory
    }
    fn overhead(&self) -> usize {
        4096
    }
}

fn endpoint(core: &Core, node: u16) -> (Endpoint<Replica>, Rc<Replica>) {
    let replica = Rc::new(Replica {
        memory: core.pool().account(),
        link: RefCell::default(),
        got: Cell::new(0),
    });
    let secret = Secret::new(&[1; 32]);
    let identity = Identity::new(Uuid::from_u128(1), secret, NodeId(node), Uuid::from_u128(2));
    (Endpoint::new(core.clone(), identity, Rc::clone(&replica)), replica)
}

async fn until(done: impl Fn() -> bool) {
    let waits = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waits).await.expect("waited in vain");
}

async fn talk(core: Core) {
    let listener = core.listen(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a port");
    let at = listener.local_addr().expect("it listens");
    let (one, receiver) = endpoint(&core, 1);
    let (two, sender) = endpoint(&core, 2);
    let accepts = one.clone();
    let serve = async move { receive_greetings(&listener, |g| accepts.accept(g)).await };
    let serving = tokio::task::spawn_local(serve);
    one.add(NodeId(2), PeerAddresses::default());
    two.add(NodeId(1), PeerAddresses { data: vec![at], ..PeerAddresses::default() });
    until(|| receiver.link.borrow().is_some() && sender.link.borrow().is_some()).await;
    let account = core.pool().account();
    for seq in 0..WRITES {
        let credit = account.credit(DATA, Class::Read).await.expect("room for one");
        let data = rt::buf::copy_in(&credit, &vec![seq as u8; DATA]);
        let range = Blocks::new(Lba(seq), (DATA / 4096) as u64);
        let change = Change { range, kind: Kind::Write, fua: false, data };
        let (view, tag) = (View::default(), Tag { node: NodeId(2), number: seq });
        let link = sender.link.borrow().clone().expect("the session lasts");
        link.send(Message::Write { view, seq: Seq(seq), tag, copy: false, change });
    }
    until(|| receiver.got.get() == WRITES).await;
    two.stop().await;
    one.stop().await;
    serving.abort();
    until(|| core.pool().usage().free == core.pool().usage().total).await;
    assert_eq!(core.pool().usage().overdrafts, 0);
}

#[test]
fn a_session_over_real_sockets() {
    let cores = Cores::start(&CoresConfig { pool_bytes_per_core: 32 << 20, ..Default::default() });
    let cores = cores.expect("a core");
    let wait = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let talked = wait.block_on(cores.handles()[0].run(talk));
    cores.stop_now();
    talked.expect("the core panicked, see above");
}
