//! A unit of our own server is a layer like any other.

use std::cell::{Cell, RefCell};

use block::Mem;
use block::testing::conformance::{self, MIN_BYTES, MIN_POOL, Subject};
use block::testing::faulty::Faults;
use target::{AccessList, VolumeId};

use super::*;

struct Remote {
    site: Site,
    pool: BufferPool,
    made: Cell<u8>,
    last: RefCell<Option<Last>>,
}

struct Last {
    id: VolumeId,
    dev: Dev,
    mem: Rc<Mem>,
    faults: Faults,
}

impl Subject for Remote {
    fn pool(&self) -> BufferPool {
        self.pool.clone()
    }

    async fn fresh(&self) -> Dev {
        self.made.set(self.made.get() + 1);
        let (id, target) =
            (VolumeId([self.made.get(); 16]), format!("{TARGET}-{}", self.made.get()));
        let (mem, faults) = Site::volume(&self.site.server, id, MIN_BYTES / 512);
        self.site.serve_unit(&target, id, AccessList::open());
        let look_every = Duration::from_millis(20);
        let options = Options { target, poll_interval: look_every, ..options(self.site.at) };
        let session = connect(&self.site.core, options).await;
        let dev = Dev::shared(Lun::open(&session, 1).await.unwrap());
        *self.last.borrow_mut() = Some(Last { id, dev: dev.clone(), mem, faults });
        dev
    }

    async fn grow(&self) -> bool {
        let (id, dev) = {
            let last = self.last.borrow();
            let Last { id, dev, mem, .. } = last.as_ref().unwrap();
            mem.grow(2 * dev.info().blocks);
            (*id, dev.clone())
        };
        let before = dev.info().blocks;
        self.site.server.volume_resized(id);
        while dev.info().blocks == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        true
    }

    async fn space_used(&self) -> Option<u64> {
        None
    }

    async fn cut_power(&self, _seed: u64) -> Option<Dev> {
        None
    }

    async fn fail_next(&self, kind: OpKind, error: Error) -> bool {
        let last = self.last.borrow();
        let rule = Rule::new(Effect::Fail(error)).on(&[kind]).times(1);
        last.as_ref().unwrap().faults.add(rule);
        true
    }
}

#[test]
fn a_unit_conforms() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let pool = BufferPool::new(MIN_POOL).unwrap();
        let subject = Remote { site, pool, made: Cell::new(0), last: RefCell::default() };
        conformance::check(&subject, 1).await;
    });
}
