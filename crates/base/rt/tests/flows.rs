//! Fair shares of a core: what runs between two looks for events.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use common::{KIB, on_core};
use rt::flow::{self, FULL_WEIGHT, Flow, FlowGroup};
use rt::{Core, DiskEngine};

/// What has run, in order: the flows of units of work, and looks for events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ran {
    Unit(usize),
    Look,
}

type Log = Rc<RefCell<Vec<Ran>>>;

/// A task that always has work: a unit of so many bytes in each poll.
fn spawn_busy_task(flow: &Flow, name: usize, bytes: u64, ends: &Rc<Cell<bool>>, log: &Log) {
    let (ends, log) = (Rc::clone(ends), Rc::clone(log));
    let work = poll_fn(move |cx| {
        if ends.get() {
            return Poll::Ready(());
        }
        flow::charge(bytes);
        log.borrow_mut().push(Ran::Unit(name));
        cx.waker().wake_by_ref();
        Poll::Pending
    });
    tokio::task::spawn_local(flow.run(work));
}

/// Runs what `spawn` spawns over so many looks for events; returns what ran.
async fn run(looks: usize, spawn: impl FnOnce(&Rc<Cell<bool>>, &Log)) -> Vec<Ran> {
    let (ends, log) = (Rc::new(Cell::new(false)), Log::default());
    spawn(&ends, &log);
    for _ in 0..looks {
        tokio::task::yield_now().await;
        log.borrow_mut().push(Ran::Look);
    }
    ends.set(true);
    tokio::task::yield_now().await;
    log.take()
}

fn units(ran: &[Ran], name: usize) -> usize {
    ran.iter().filter(|ran| **ran == Ran::Unit(name)).count()
}

fn new_flow(core: &Core) -> Flow {
    core.new_flow(FULL_WEIGHT)
}

#[test]
fn little_runs_between_two_looks_however_many_tasks_are_ready() {
    on_core(DiskEngine::Auto, |core| async move {
        let ran = run(2000, |ends, log| {
            let flows = [new_flow(&core), new_flow(&core)];
            (0..64)
                .for_each(|n| spawn_busy_task(&flows[n % 2], n % 2, 128 * KIB as u64, ends, log));
        })
        .await;
        let passes: Vec<_> = ran.split(|ran| *ran == Ran::Look).map(<[Ran]>::len).collect();
        // At first, each flow has what an idle one may use.
        assert!(passes[10..].iter().all(|units| *units <= 2), "{passes:?}");
        let (first, second) = (units(&ran, 0), units(&ran, 1));
        assert!(first + second >= 1000 && first.abs_diff(second) <= 4, "{first}, {second}");
    });
}

#[test]
fn flows_of_one_group_have_one_share() {
    on_core(DiskEngine::Auto, |core| async move {
        let ran = run(4000, |ends, log| {
            let group = FlowGroup::default();
            for _ in 0..8 {
                let flow = new_flow(&core);
                let joining = group.clone();
                tokio::task::spawn_local(flow.run(async move { flow::join(&joining) }));
                spawn_busy_task(&flow, 0, 64 * KIB as u64, ends, log);
            }
            spawn_busy_task(&new_flow(&core), 1, 64 * KIB as u64, ends, log);
        })
        .await;
        let share = units(&ran, 1) * 100 / (units(&ran, 0) + units(&ran, 1));
        assert!((45..=55).contains(&share), "{share} %");
    });
}

#[test]
fn what_a_task_spawns_in_its_flow_counts_as_its_own() {
    on_core(DiskEngine::Auto, |core| async move {
        let ran = run(1000, |ends, log| {
            let flow = new_flow(&core);
            let (ends2, log2) = (Rc::clone(ends), Rc::clone(log));
            tokio::task::spawn_local(flow.run(async move {
                for _ in 0..16 {
                    let (ends, log) = (Rc::clone(&ends2), Rc::clone(&log2));
                    tokio::task::spawn_local(flow::inherit(async move {
                        while !ends.get() {
                            flow::charge(128 * KIB as u64);
                            log.borrow_mut().push(Ran::Unit(0));
                            tokio::task::yield_now().await;
                        }
                    }));
                }
            }));
            spawn_busy_task(&new_flow(&core), 1, 128 * KIB as u64, ends, log);
        })
        .await;
        let (spawned, other) = (units(&ran, 0), units(&ran, 1));
        assert!(spawned > 100 && spawned <= other + other / 8, "{spawned}, {other}");
    });
}

#[test]
fn a_task_that_is_dropped_while_it_waits_holds_up_nobody() {
    on_core(DiskEngine::Auto, |core| async move {
        let ran = run(1000, |ends, log| {
            let flow = new_flow(&core);
            for n in 0..32 {
                let (ends, log) = (Rc::clone(ends), Rc::clone(log));
                let work = flow.run(async move {
                    while !ends.get() {
                        flow::charge(128 * KIB as u64);
                        log.borrow_mut().push(Ran::Unit(0));
                        tokio::task::yield_now().await;
                    }
                });
                let task = tokio::task::spawn_local(work);
                tokio::task::spawn_local(async move {
                    for _ in 0..n {
                        tokio::task::yield_now().await;
                    }
                    if n != 7 {
                        task.abort();
                    }
                });
            }
        })
        .await;
        let late = &ran[ran.len() / 2..];
        assert!(units(late, 0) > 50, "{}", units(late, 0));
    });
}
