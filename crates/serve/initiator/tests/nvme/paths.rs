//! Several controllers of one volume: which of them is used, and what becomes of commands when one
//! is lost.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use block::testing::register::{Checker, InitialContents};
use block::testing::workload::Workload;
use block::{Blocks, MemoryClass};
use common::Wire;
use initiator::nvme::PathPolicy;
use nvme::Sqe;
use nvme::entry::NvmOpcode;
use nvme::host::{Command, LostCommand, Payload};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use super::*;

/// The shortest keep alive timeout that our controllers know.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// Two servers with one volume, a wire to each, and a controller by each wire.
struct Both {
    _sites: [Site; 2],
    wires: [Wire; 2],
    controllers: [Controller; 2],
}

impl Both {
    async fn new(core: &rt::Core) -> Self {
        Self::with_patience(core, Duration::from_secs(60)).await
    }

    async fn with_patience(core: &rt::Core, patience: Duration) -> Self {
        let first = Site::new(core, 1 << 14).await;
        let sites = [first.twin().await, first];
        let wires = [Wire::new(core, sites[0].at).await, Wire::new(core, sites[1].at).await];
        let [a, b] = wires.each_ref().map(|wire| Self::connect(core, wire, patience));
        let controllers = [a.await, b.await];
        Self { _sites: sites, wires, controllers }
    }

    async fn connect(core: &rt::Core, wire: &Wire, patience: Duration) -> Controller {
        let options = Options {
            keep_alive: KEEP_ALIVE,
            io_queues: 2,
            retry_timeout: patience,
            ..options(wire.at)
        };
        Controller::connect(core, options, Staging::default()).await.unwrap()
    }

    async fn open(&self, policy: PathPolicy) -> TestClient {
        self.opened(policy).await.1
    }

    async fn opened(&self, policy: PathPolicy) -> (Rc<Namespace>, TestClient) {
        let namespace = Namespace::open_multipath(&self.controllers, 1, policy).await.unwrap();
        let dev = Dev::shared(Rc::clone(&namespace));
        let client = TestClient::new(&dev, &BufferPool::new(16 << 20).unwrap());
        // Until both are seen to be paths.
        let before = self.wires.each_ref().map(Wire::carried);
        let is_used = |i: usize| self.wires[i].carried() > before[i] + 8 * 4096;
        let used = async {
            while !(is_used(0) && is_used(1)) {
                client.read(0, 64).await.unwrap();
            }
        };
        timeout(PATIENCE, used).await.expect("both are used");
        (namespace, client)
    }
}

/// Whatever becomes of one path or the other, nothing is lost, nothing is done twice that a reader
/// could see, and no caller is told of it.
#[test]
fn a_path_that_is_cut_is_not_noticed() {
    for policy in [PathPolicy::RoundRobin, PathPolicy::QueueDepth, PathPolicy::LocalFirst] {
        on_core(async move |core| {
            let both = Both::new(&core).await;
            let client = both.open(policy).await;
            let checker = RefCell::new(Checker::new(1, 512, InitialContents::Zeroes));
            let workload = Workload::new(client, Blocks::new(Lba(0), 2048), 16, 7);
            let rounds = Cell::new(0);
            let cutting = async {
                for pause_ms in [3u64, 1, 7, 2, 15, 0, 40, 5, 1, 1, 25, 9].into_iter().cycle() {
                    let wire = &both.wires[rounds.get() % 2];
                    // Away for a while, or only cut.
                    wire.set_open(!rounds.get().is_multiple_of(3));
                    wire.cut();
                    sleep(Duration::from_millis(pause_ms)).await;
                    wire.set_open(true);
                    rounds.set(rounds.get() + 1);
                }
            };
            let working = async {
                while rounds.get() < 60 {
                    workload.run(&checker, 400).await.unwrap();
                    assert_eq!(workload.take_errors(), []);
                }
            };
            tokio::select! {
                biased;
                () = cutting => {}
                () = working => {}
            }
            workload.audit(&checker).await.unwrap();
        });
    }
}

/// While both serve, the policy decides.
#[test]
fn the_policy_spreads_the_load() {
    on_core(async |core| {
        let both = Both::new(&core).await;
        for (policy, is_spread) in [
            (PathPolicy::RoundRobin, true),
            (PathPolicy::QueueDepth, true),
            (PathPolicy::LocalFirst, true),
        ] {
            let client = both.open(policy).await;
            let carried = || both.wires.each_ref().map(Wire::carried);
            let before = carried();
            for lba in 0..64 {
                client.read(lba * 8, 8).await.unwrap();
            }
            let after = carried();
            let moved = [after[0] - before[0], after[1] - before[1]];
            let is_even = moved.iter().all(|bytes| *bytes > 64 * 4096 / 3);
            assert_eq!(is_even, is_spread, "{policy:?}: {moved:?}");
        }
    });
}

/// A path that falls silent holds up what was on its way by it, and nothing else: a read is asked
/// again as soon as the silence is noticed, a write when it cannot happen any more, by the other
/// path.
#[test]
fn silence_of_one_path_is_bounded() {
    on_core(async |core| {
        let both = Both::new(&core).await;
        let client = both.open(PathPolicy::RoundRobin).await;
        both.wires[0].freeze();
        let began = Instant::now();
        let op = |write: bool, at: u64| {
            let client = client.clone();
            spawn_local(async move {
                match write {
                    true => client.write(at, &[1; 512], false).await.unwrap(),
                    false => client.read(at, 1).await.map(drop).unwrap(),
                }
                began.elapsed()
            })
        };
        // Two of each: one by each path.
        let (reads, writes) = ([op(false, 0), op(false, 1)], [op(true, 8), op(true, 16)]);
        let mut took = Vec::new();
        for one in reads.into_iter().chain(writes) {
            took.push(timeout(PATIENCE, one).await.unwrap().unwrap());
        }
        took[..2].sort_unstable();
        took[2..].sort_unstable();
        let [read, late_read, write, late_write] = took[..] else { panic!() };
        assert!(read < KEEP_ALIVE && write < KEEP_ALIVE, "{took:?}");
        assert!(late_read < 2 * KEEP_ALIVE, "{took:?}");
        assert!(late_write > 2 * KEEP_ALIVE && late_write < PATIENCE / 2, "{took:?}");
    });
}

/// A write that has to wait for longer than patience lasts, before it may be sent again, is sent
/// again.
#[test]
fn commands_in_doubt_outlast_the_retry_timeout() {
    on_core(async |core| {
        let patience = Duration::from_secs(2);
        let both = Both::with_patience(&core, patience).await;
        let (namespace, client) = both.opened(PathPolicy::RoundRobin).await;
        both.wires[0].freeze();
        both.wires[0].set_open(false);
        let began = Instant::now();
        // One of them goes by the path that is silent.
        let writes = [8, 16].map(|at| {
            let client = client.clone();
            spawn_local(async move { client.write(at, &[1; 512], false).await })
        });
        for write in writes {
            assert_eq!(timeout(PATIENCE, write).await.unwrap().unwrap(), Ok(()));
        }
        assert!(began.elapsed() > patience, "this is no test");
        assert_eq!(namespace.gone(), None);
        for at in [8, 16] {
            assert_eq!(client.read(at, 1).await.unwrap().to_vec(), [1; 512], "at {at}");
        }
    });
}

/// RFD 0010, attack 17: a write that is stuck on the way must not undo what was written after its
/// repetition.
#[test]
fn a_write_that_comes_late_does_not_undo_a_newer_one() {
    on_core(async |core| {
        let both = Both::new(&core).await;
        let client = both.open(PathPolicy::RoundRobin).await;
        both.wires[0].freeze();
        // One of them goes by the wire that keeps it.
        let (a, b) =
            tokio::join!(client.write(0, &[1; 512], false), client.write(8, &[1; 512], false));
        a.and(b).unwrap();
        client.write(0, &[2; 512], false).await.unwrap();
        client.write(8, &[2; 512], false).await.unwrap();
        both.wires[0].thaw();
        sleep(Duration::from_millis(300)).await;
        for at in [0, 8] {
            assert_eq!(client.read(at, 1).await.unwrap().to_vec(), [2; 512], "at {at}");
        }
    });
}

/// A path that comes later is used, one that leads to another volume is not.
#[test]
fn a_path_has_to_lead_to_the_volume() {
    on_core(async |core| {
        let (site, other) = (Site::new(&core, 1 << 14).await, Site::new(&core, 1 << 14).await);
        let (volume, _) = Site::volume(&other.server, common::B, 1 << 14);
        other.serve(SUBNQN, common::B, target::AccessList::open());
        let (good, bad) = (site.connect().await, other.connect().await);
        let both = [good.clone(), bad.clone()];
        let opened = Namespace::open_multipath(&both, 1, PathPolicy::RoundRobin).await.map(drop);
        assert_eq!(opened, Err(OpenError::Different(1)));
        let namespace =
            Namespace::open_multipath(&[good], 1, PathPolicy::RoundRobin).await.unwrap();
        namespace.add_path(&bad);
        let wire = Wire::new(&core, other.at).await;
        wire.set_open(false);
        let others = [other.at, wire.at];
        let options = options(other.at);
        let staging = Staging::default();
        let expected = Controller::connect_all(&core, &options, &others, &staging);
        expected.await.unwrap().iter().for_each(|controller| namespace.add_path(controller));
        wire.set_open(true);
        let client = TestClient::new(&Dev::shared(namespace), &BufferPool::new(16 << 20).unwrap());
        for at in 0..32 {
            client.write(at, &[4; 512], false).await.unwrap();
        }
        assert_eq!(volume.space_used(), 0, "nothing of it went to the other volume");
    });
}

/// A node whose process sleeps for so long that its host has gone elsewhere does nothing of what it
/// finds in its sockets when it wakes up.
#[test]
fn stale_commands_in_the_sockets_of_a_paused_node_are_not_executed() {
    let config = rt::CoresConfig { cpus: vec![None; 2], ..rt::CoresConfig::default() };
    let cores = rt::Cores::start(&config).unwrap();
    let [sleeper, host] = [0, 1].map(|i| cores.handles()[i].clone());
    let done = testkit::wait(host.run(async move |core| {
        let at = sleeper.run(async |core| {
            let site = Site::new(&core, 1 << 14).await;
            let at = site.at;
            SITE.set(Some(site));
            at
        });
        let at = at.await.unwrap();
        let options = Options { keep_alive: KEEP_ALIVE, ..options(at) };
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let queue = controller.queues().remove(0);
        let credit =
            core.buffer_pool().account().credit(4096, MemoryClass::UnsolicitedData).await.unwrap();
        let write = |lba: u32| {
            let mut sqe = Sqe::new(NvmOpcode::Write.0, 0, 1);
            sqe.cdw10[0] = lba.into();
            let data = rt::buf::copy_in(&credit, &[9; 512]);
            Command { sqe, payload: Payload::ToController(data), timeout: None }
        };
        assert!(queue.submit(write(0)).await.outcome.is_ok_and(|c| c.status.is_success()));
        sleeper.post(async |_| pause(3 * KEEP_ALIVE)).await.unwrap();
        sleep(Duration::from_millis(50)).await;
        assert_eq!(queue.submit(write(64)).await.outcome.map(drop), Err(LostCommand::InDoubt));
        sleep(3 * KEEP_ALIVE).await;
        let used = sleeper.run(async |_| SITE.take().unwrap().mem.space_used()).await.unwrap();
        assert_eq!(used, 4096, "the first was done, and no other");
    }));
    cores.stop_now();
    done.expect("the test's core panicked, see above");
}

thread_local! {
    /// What the sleeper's core keeps for the test.
    static SITE: Cell<Option<Site>> = const { Cell::new(None) };
}

fn pause(time: Duration) {
    #[expect(clippy::disallowed_methods, reason = "a core that is blocked is what is tested")]
    std::thread::sleep(time);
}
