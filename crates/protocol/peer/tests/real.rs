//! A session over real sockets: the largest payloads, read directly into their memory.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use block::{Account, Blocks, Lba, MemoryClass};
use peer::{
    Endpoint, Link, Message, NodeId, PeerAddresses, PeerIdentity, PeerSecret, ReceivedMessage, Seq,
    SessionHandler, View, WriteId, WriteKind, WriteOp, accept_connections,
};
use rt::Core;
use uuid::Uuid;

const DATA: usize = 1 << 20;
const WRITES: u64 = 64;

struct Replica {
    memory: Account,
    link: RefCell<Option<Link>>,
    got: Cell<u64>,
}

impl SessionHandler for Replica {
    fn session_up(&self, link: Link) {
        *self.link.borrow_mut() = Some(link);
    }
    fn session_down(&self, _: NodeId, _: u64) {
        self.link.take();
    }
    async fn deliver(&self, _: NodeId, _: u64, received: ReceivedMessage) {
        let Message::Write { seq, op, .. } = &received.message else { return };
        assert_eq!(seq.0, self.got.get());
        let right = |part: &block::Buf| part.iter().all(|&b| b == seq.0 as u8);
        assert!(op.data.len() == DATA && op.data.iter().all(right));
        self.got.set(seq.0 + 1);
    }
    fn account(&self) -> &Account {
        &self.memory
    }
    fn overhead_bytes(&self) -> usize {
        4096
    }
}

fn endpoint(core: &Core, node: u16) -> (Endpoint<Replica>, Rc<Replica>) {
    let replica = Rc::new(Replica {
        memory: core.buffer_pool().account(),
        link: RefCell::default(),
        got: Cell::new(0),
    });
    let secret = PeerSecret::new(&[1; 32]);
    let identity = PeerIdentity::new(Uuid::from_u128(1), secret, NodeId(node), Uuid::from_u128(2));
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
    let serve = async move { accept_connections(&listener, |g| accepts.accept(g)).await };
    let serving = tokio::task::spawn_local(serve);
    one.add(NodeId(2), PeerAddresses::default());
    two.add(NodeId(1), PeerAddresses { data: vec![at], ..PeerAddresses::default() });
    until(|| receiver.link.borrow().is_some() && sender.link.borrow().is_some()).await;
    let account = core.buffer_pool().account();
    for seq in 0..WRITES {
        let credit = account.credit(DATA, MemoryClass::Read).await.expect("room for one");
        let data = rt::buf::copy_in(&credit, &vec![seq as u8; DATA]);
        let range = Blocks::new(Lba(seq), (DATA / 4096) as u64);
        let op = WriteOp { range, kind: WriteKind::Data, fua: false, data };
        let (view, write_id) = (View::default(), WriteId { origin: NodeId(2), number: seq });
        let link = sender.link.borrow().clone().expect("the session lasts");
        link.send(Message::Write { view, seq: Seq(seq), write_id, is_copy: false, op });
    }
    until(|| receiver.got.get() == WRITES).await;
    two.stop().await;
    one.stop().await;
    serving.abort();
    until(|| core.buffer_pool().usage().free == core.buffer_pool().usage().total).await;
    assert_eq!(core.buffer_pool().usage().overdrafts, 0);
}

#[test]
fn a_session_over_real_sockets() {
    testkit::on_first_core(&testkit::cores_config(1, 32 << 20), talk);
}
