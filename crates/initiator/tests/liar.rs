//! A controller that lies, on a socket: our own but for what a test makes of its I/O queue.
#![allow(clippy::unwrap_used)]

#[path = "common/mod.rs"]
mod common;
#[path = "../../nvme/tests/common/mod.rs"]
mod fake;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::testing::Client;
use block::{Dev, Error, Pool};
use common::on_core;
use fake::driver::Target;
use initiator::nvme::{Controller, Namespace, Options, Staging};
use nvme::Status;
use nvme::entry::{Cqe, NvmOpcode};
use nvme::pdu::{CapsuleCmd, CapsuleResp, Data, FLAG_LAST, FLAG_SUCCESS, PduType};
use nvme::testing::Host;
use rt::Core;
use rt::net::Stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::spawn_local;
use zerocopy::{FromBytes, IntoBytes};

/// What becomes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    /// It succeeds without any data.
    Nothing,
    /// It succeeds with half of its data.
    Half,
}

struct Liar {
    target: RefCell<Target>,
    /// How often it lies before it tells the truth, and how.
    lies: Cell<(usize, Lie)>,
    connections: Cell<usize>,
}

fn lie(read: &CapsuleCmd, how: Lie) -> Vec<u8> {
    let (form, cid) = (Host::default(), read.sqe.cid.get());
    match how {
        Lie::Nothing => {
            let (result, sq_head, sq_id) = (0.into(), 0.into(), 0.into());
            let status = (Status::SUCCESS.field() << 1).into();
            let cqe = Cqe { result, sq_head, sq_id, cid: cid.into(), status };
            form.pdu(CapsuleResp::new(cqe).as_bytes(), &[], 0)
        }
        Lie::Half => {
            let length = read.sqe.data_bytes() / 2;
            let mut header = Data::new(PduType::C2HData, cid, 0, 0, length);
            header.common.flags = FLAG_LAST | FLAG_SUCCESS;
            form.pdu(header.as_bytes(), &vec![0x77; length as usize], 0)
        }
    }
}

impl Liar {
    async fn serve(self: Rc<Self>, mut stream: Stream) {
        let link = self.target.borrow_mut().open();
        self.connections.set(self.connections.get() + 1);
        let mut bytes = vec![0; 1 << 16];
        while let Ok(n @ 1..) = stream.read(&mut bytes).await {
            let is_io =
                self.target.borrow_mut().conn(link).queue().is_some_and(|queue| queue.id > 0);
            let capsule = CapsuleCmd::read_from_prefix(&bytes[..n]).ok().map(|(c, _)| c);
            let read = capsule.filter(|c| is_io && c.sqe.opcode == NvmOpcode::Read.0);
            let (left, how) = self.lies.get();
            let answer = match read.filter(|_| left > 0) {
                Some(read) => {
                    self.lies.set((left - 1, how));
                    lie(&read, how)
                }
                None => {
                    let mut target = self.target.borrow_mut();
                    target.feed(link, &bytes[..n], &mut || usize::MAX);
                    target.take(link, &mut || usize::MAX)
                }
            };
            if stream.write_all(&answer).await.is_err() {
                return;
            }
        }
    }

    async fn start(core: &Core) -> (Rc<Self>, Options) {
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        let liar = Rc::new(Self {
            target: RefCell::default(),
            lies: Cell::new((0, Lie::Nothing)),
            connections: Cell::new(0),
        });
        let server = Rc::clone(&liar);
        spawn_local(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                spawn_local(Rc::clone(&server).serve(stream));
            }
        });
        let hostnqn = fake::HOSTNQN.to_owned();
        let options = Options { subnqn: fake::SUBNQN.to_owned(), hostnqn, ..common::options(at) };
        (liar, options)
    }
}

/// A read that succeeds without its data would show what its memory held before: the controller is not
/// believed, and asked again on new connections.
#[test]
fn a_read_without_its_data_is_not_believed() {
    on_core(async |core| {
        let (liar, options) = Liar::start(&core).await;
        let options = Options { patience: Duration::from_millis(300), ..options };
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let dev = Dev::shared(Namespace::open(&controller, 1).await.unwrap());
        let client = Client::new(&dev, &Pool::new(1 << 20).unwrap());
        client.write(0, &[5; 4096], false).await.unwrap();
        for how in [Lie::Nothing, Lie::Half] {
            let before = liar.connections.get();
            liar.lies.set((2, how));
            assert_eq!(client.read(0, 8).await.unwrap().to_vec(), [5; 4096], "{how:?}");
            assert_eq!(liar.connections.get(), before + 4, "two associations more");
        }
        liar.lies.set((usize::MAX, Lie::Half));
        assert_eq!(client.read(0, 8).await.map(drop), Err(Error::Gone), "in the end");
    });
}
