//! Verified load by hand: `load iscsi|nvme ADDRESS:PORT TARGET STEPS`. Destroys what the volume held.
#![allow(clippy::disallowed_methods, reason = "real time")]

use probe::{
    Disk, fault, iscsi,
    nvme::Controller,
    registers::{Book, Dice},
};
use std::{io, time::Instant};

const BLOCKS: usize = 4096;

fn load(mut disk: impl Disk, steps: u64) -> io::Result<()> {
    println!("{} blocks of {} bytes", disk.blocks(), disk.block_bytes());
    let (mut book, mut dice) = (Book::new(1, 0, BLOCKS), Dice::new(1));
    let zeroes = vec![0; disk.block_bytes() * 256];
    for lba in (0..BLOCKS as u64).step_by(256) {
        disk.write(lba, &zeroes, false)?;
    }
    let begun = Instant::now();
    for _ in 0..steps {
        book.step(&mut disk, &mut dice)?;
    }
    book.check(&mut disk)?;
    println!(
        "{steps} steps in {:.1} s, {} blocks written, all as expected",
        begun.elapsed().as_secs_f64(),
        book.acknowledged
    );
    Ok(())
}

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [protocol, address, target, steps] = &words[..] else {
        return Err(fault("load iscsi|nvme ADDRESS:PORT TARGET STEPS"));
    };
    let address = address.parse().map_err(|error| fault(format!("{address}: {error}")))?;
    let steps = steps.parse().map_err(|error| fault(format!("{steps}: {error}")))?;
    match protocol.as_str() {
        "iscsi" => {
            load(iscsi::Session::login(address, "iqn.2026-01.test:probe", target, 1, 1)?, steps)
        }
        _ => load(Controller::connect(address, "nqn.2026-01.test:probe", target)?, steps),
    }
}
