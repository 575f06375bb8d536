//! Paused processes: as by `SIGSTOP`, a debugger, or a machine out of memory.

use std::rc::Rc;
use std::time::Duration;

use super::host::Host;
use super::process_pause::ProcessPause;

impl Host {
    /// Pauses the host's process for `how_long` of virtual time, as `SIGSTOP` does: none of its
    /// tasks runs, on any core. Its system continues: disks complete their operations, data written
    /// to sockets is sent, received data is acknowledged and buffered up to the window, and
    /// listeners queue connections. Peers see a connection that is open and silent. Clocks
    /// continue. Afterwards everything that was due runs late, including work started meanwhile by
    /// [`Self::run`].
    ///
    /// Other system calls of the process (opening, renaming, dialling) wait as well. A process that
    /// is paused already stays so until the later of the two ends; [`Self::kill`] and
    /// [`Self::power_cut`] end it. Has no effect on a host that is down.
    ///
    /// If called from one of the host's own tasks, tasks woken before may still run once.
    pub fn pause(&self, how_long: Duration) {
        let Some(pause) = self.state.pause() else { return };
        let now = self.shared.agenda.now();
        let until = now.saturating_add(how_long);
        pause.extend_until(until);
        let microseconds = u64::try_from(how_long.as_micros()).unwrap_or(u64::MAX);
        self.shared.event("pause", &self.state.name, &[microseconds]);
        let host = self.clone();
        self.shared.agenda.schedule(how_long, move || {
            if pause.is_over(host.shared.agenda.now()) {
                host.resume_process(&pause);
            }
        });
    }

    /// Ends [`Self::pause`] early.
    pub fn resume(&self) {
        if let Some(pause) = self.state.pause()
            && pause.is_active()
        {
            self.resume_process(&pause);
        }
    }

    /// Whether its process is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.state.pause().is_some_and(|pause| pause.is_active())
    }

    fn resume_process(&self, pause: &Rc<ProcessPause>) {
        self.shared.event("resume", &self.state.name, &[]);
        pause.end();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::Core;
    use crate::buf::{MemoryClass, copy_in};
    use crate::disk::OpenOptions;
    use crate::net::Stream;
    use crate::sim::{DiskSetup, HostSetup, ScenarioOutcome, World, WorldSetup, run};

    const SECOND: Duration = Duration::from_secs(1);

    fn run_scenario<Fut: Future<Output = ()>>(seeds: u64, f: impl Fn(World, [Host; 2]) -> Fut) {
        for seed in 0..seeds {
            let outcome = run(WorldSetup::new(seed), |world: World| {
                let hosts = ["paused", "peer"].map(|n| world.add_host(n, HostSetup::default()));
                let scene = f(world, hosts);
                async move {
                    scene.await;
                    Ok(())
                }
            });
            outcome.result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
    }

    /// Counts tenths of a second on a host.
    fn tick(host: &Host) -> Rc<Cell<u32>> {
        let ticks = Rc::new(Cell::new(0));
        let count = Rc::clone(&ticks);
        host.run(|_| async move {
            loop {
                tokio::time::sleep(SECOND / 10).await;
                count.set(count.get() + 1);
            }
        });
        ticks
    }

    #[test]
    fn a_pause_stops_the_tasks_and_not_the_clock() {
        run_scenario(3, |world, [host, peer]| async move {
            let [ticks, others] = [tick(&host), tick(&peer)];
            let slept = host.run(|core: Core| async move {
                let start = core.now();
                core.sleep(SECOND).await;
                core.now() - start
            });
            tokio::time::sleep(SECOND / 2).await;
            let before = ticks.get();
            host.pause(10 * SECOND);
            let asked = host.run(|_| async {});
            tokio::time::sleep(9 * SECOND).await;
            assert!(host.is_paused() && !peer.is_paused());
            assert_eq!(ticks.get(), before);
            assert!(others.get() >= 90);
            let start = world.now();
            assert_eq!(slept.join().await, Some(21 * SECOND / 2), "late, and it can tell");
            asked.join().await.expect("done in the end");
            assert_eq!(world.now() - start, SECOND, "when the pause ends, not before");
            tokio::time::sleep(SECOND).await;
            assert!(ticks.get() > before);
        });
    }

    #[test]
    fn the_disk_completes_operations_during_a_pause() {
        run_scenario(5, |_, [host, _]| async move {
            let disk = host.add_disk("/dev/d", DiskSetup::device(1 << 20));
            let written = host.run(|core: Core| async move {
                let how = OpenOptions::new();
                let disk = core.open_disk("/dev/d".as_ref(), how).await.expect("it is free");
                let credit = core.buffer_pool().account().credit(4096, MemoryClass::LocalIo).await;
                let data = copy_in(&credit.expect("the pool is larger"), &[7; 4096]);
                disk.write(0, data).await.expect("no faults");
                disk.sync().await.expect("no faults");
            });
            while disk.in_flight() == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            host.pause(60 * SECOND);
            tokio::time::sleep(30 * SECOND).await;
            assert_eq!(disk.in_flight(), 0, "done, though no task has learnt of it");
            assert_eq!(disk.read_visible(0, 4096), [7; 4096]);
            assert_eq!(disk.unsynced_changes(), 1, "what comes after it has not been asked for");
            written.join().await.expect("it goes on");
            assert_eq!(disk.unsynced_changes(), 0);
        });
    }

    async fn accept(core: &Core) -> Stream {
        let at = SocketAddr::from(([0, 0, 0, 0], 7));
        let listener = core.listen(at).await.expect("the port is free");
        listener.accept().await.expect("the listener lives").0
    }

    /// A connection from the peer to the host to be paused: sends, then echoes.
    async fn serve(core: Core) {
        let mut stream = accept(&core).await;
        stream.write_all(b"sent before").await.expect("the window is open");
        let mut got = [0; 5];
        stream.read_exact(&mut got).await.expect("the peer is there");
        stream.write_all(&got).await.expect("the peer is there");
    }

    #[test]
    fn bytes_arrive_during_a_pause_but_the_peer_gets_no_answer() {
        run_scenario(10, |world, [host, peer]| async move {
            host.run(serve);
            let to = SocketAddr::new(host.address(), 7);
            tokio::time::sleep(SECOND).await;
            let stopped = host.clone();
            let talk = peer.run(move |core: Core| async move {
                let mut stream = core.dial(to).await.expect("it listens");
                // Data handed to its socket arrives, whenever the pause begins after that.
                tokio::time::sleep(SECOND).await;
                stopped.pause(10 * SECOND);
                let mut got = [0; 11];
                stream.read_exact(&mut got).await.expect("on its way");
                assert_eq!(&got, b"sent before");
                stream.write_all(b"hello").await.expect("the window is open");
                let mut echo = [0; 5];
                let answer = stream.read_exact(&mut echo);
                let early = tokio::time::timeout(9 * SECOND, answer).await;
                assert!(early.is_err(), "neither an answer nor an end");
                stream.read_exact(&mut echo).await.expect("it goes on");
                assert_eq!(&echo, b"hello");
                assert!(core.dial(to).await.is_err(), "no listener any more");
            });
            talk.join().await.expect("no crash");
            assert!(!host.is_paused());
            assert!((11..15).contains(&world.now().as_secs()), "{:?}", world.now());
        });
    }

    #[test]
    fn a_paused_listener_still_queues_connections() {
        run_scenario(5, |_, [host, peer]| async move {
            let accepted = host.run(|core| async move { accept(&core).await.peer_addr() });
            tokio::time::sleep(SECOND).await;
            host.pause(100 * SECOND);
            let to = SocketAddr::new(host.address(), 7);
            let dialled = peer.run(move |core| async move {
                let dial = tokio::time::timeout(SECOND, core.dial(to)).await;
                dial.expect("the system answers").expect("it listens")
            });
            let stream = dialled.join().await.expect("no crash");
            host.resume();
            let peer_sees = stream.local_addr().expect("it is connected");
            let host_sees = accepted.join().await.expect("no crash").expect("it is connected");
            assert_eq!(peer_sees, host_sees);
        });
    }

    #[test]
    fn overlapping_pauses_end_with_the_last_and_crashes_end_them_all() {
        run_scenario(1, |_, [host, _]| async move {
            host.pause(SECOND);
            assert!(!host.is_paused(), "nothing runs there");
            tick(&host);
            host.pause(10 * SECOND);
            host.pause(2 * SECOND);
            tokio::time::sleep(5 * SECOND).await;
            assert!(host.is_paused());
            host.pause(10 * SECOND);
            tokio::time::sleep(9 * SECOND).await;
            assert!(host.is_paused());
            tokio::time::sleep(2 * SECOND).await;
            assert!(!host.is_paused());
            for end in [Host::kill, Host::power_cut] {
                host.pause(10 * SECOND);
                end(&host);
                let ticks = tick(&host);
                tokio::time::sleep(SECOND).await;
                assert!(!host.is_paused() && ticks.get() > 5, "a new life owes nothing to the old");
                host.pause(SECOND);
                tokio::time::sleep(SECOND / 2).await;
                assert!(host.is_paused());
                tokio::time::sleep(10 * SECOND).await;
            }
        });
    }

    #[test]
    fn a_process_killed_in_a_pause_does_not_go_on() {
        let events = |pause: Duration| {
            let outcome = run(WorldSetup::new(1), |world: World| async move {
                let host = world.add_host("host", HostSetup::default());
                tick(&host);
                host.pause(pause);
                host.kill();
                tokio::time::sleep(10 * SECOND).await;
                Ok(())
            });
            outcome.digest.events
        };
        assert_eq!(events(SECOND), events(20 * SECOND), "nothing happens at its end");
    }

    /// A host that pauses itself, and another that is paused at random times.
    fn busy(seed: u64) -> ScenarioOutcome {
        run(WorldSetup::new(seed), |world: World| async move {
            let hosts = ["a", "b"].map(|n| world.add_host(n, HostSetup::default()));
            let own = hosts[0].clone();
            let both = hosts.each_ref().map(tick);
            hosts[0].run(move |core: Core| async move {
                loop {
                    core.sleep(SECOND).await;
                    own.pause(Duration::from_millis(core.random_u64() % 1000));
                }
            });
            for _ in 0..20 {
                tokio::time::sleep(world.rng().duration_between(Duration::ZERO, SECOND)).await;
                hosts[1].pause(world.rng().duration_between(Duration::ZERO, SECOND));
                hosts[0].set_clock_drift(i32::from(world.rng().u64() as i16));
                world.note(format!("{both:?}"));
            }
            Ok(())
        })
    }

    #[test]
    fn a_seed_with_pauses_and_drift_replays() {
        for seed in 0..5 {
            let (first, second) = (busy(seed), busy(seed));
            assert_eq!(first.digest, second.digest);
            first.result.unwrap_or_else(|e| panic!("{e}"));
            assert_ne!(first.digest.hash, busy(seed + 100).digest.hash);
        }
    }
}
