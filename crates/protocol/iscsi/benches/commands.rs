//! What a command costs the machine: nanoseconds per 4 KiB read and write, 32 at a time.
//!
//! `cargo bench -p iscsi`. Commands end as soon as they start. Writes include their memory: one
//! credit and one page from the pool each.

#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use frame::Machine;
use iscsi::pdu::ScsiCommand;
use iscsi::target::{Action, CommandOutcome, Connection};
use iscsi::testing::{Driver, Harness, ScriptedInitiator};
use rt::buf::Bufs;

const DEPTH: usize = 32;
const BATCHES: u32 = 200;
const ROUNDS: u32 = 50;

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];

fn main() {
    for digest in ["None", "CRC32C"] {
        let read = measure(digest, &|i| i.command(&READ, ScsiCommand::READ, 4096, &[]));
        let write = measure(digest, &|i| i.command(&WRITE, ScsiCommand::WRITE, 4096, &[7; 4096]));
        println!("digests {digest}: read {read} ns, write {write} ns per 4 KiB command");
    }
}

/// Nanoseconds per command.
fn measure(digest: &str, command: &dyn Fn(&mut ScriptedInitiator) -> Vec<u8>) -> u128 {
    let mut spent = Duration::ZERO;
    for _ in 0..ROUNDS {
        let mut lab = Harness::default();
        lab.log_in(&[("HeaderDigest", digest), ("DataDigest", digest)]);
        let page = lab.driver.data(&[1; 4096]);
        for _ in 0..BATCHES {
            let batch: Vec<u8> = (0..DEPTH).flat_map(|_| command(&mut lab.initiator)).collect();
            let began = Instant::now();
            feed(&mut lab.target, &batch, &page, &lab.driver);
            spent += began.elapsed();
        }
    }
    spent.as_nanos() / u128::from(ROUNDS * BATCHES) / DEPTH as u128
}

fn feed(target: &mut Connection, mut bytes: &[u8], page: &Bufs, driver: &Driver) {
    while !bytes.is_empty() {
        let Some(space) = target.receive_space() else {
            act(target, page, driver);
            continue;
        };
        let n = space.len().min(bytes.len());
        space[..n].copy_from_slice(&bytes[..n]);
        target.on_received(n);
        bytes = &bytes[n..];
    }
    act(target, page, driver);
    let output = target.output();
    output.slices().for_each(|s| {
        black_box(s);
    });
    output.advance(output.len());
}

fn act(target: &mut Connection, page: &Bufs, driver: &Driver) {
    while let Some(action) = target.poll_action() {
        match action {
            Action::CommandArrived(a) => {
                target.admit(a.tag, if a.cdb[0] == WRITE[0] { 4096 } else { 0 });
            }
            Action::Grant { tag, bytes, .. } => target.grant(tag, driver.memory(bytes)),
            Action::Run { tag, data } => {
                let answer = if data.is_empty() { page.clone() } else { Bufs::new() };
                drop(data);
                target.complete(tag, &CommandOutcome::good(answer));
            }
            other => panic!("{other:?}"),
        }
    }
}
