//! Verified load by hand: `load iscsi
//! nvme ADDRESS:PORT TARGET STEPS`. Overwrites the volume.
#![allow(clippy::disallowed_methods, reason = "real time")]

use probe::{
    BlockClient, iscsi,
    nvme::Controller,
    protocol_error,
    registers::{RegisterModel, SeededRng},
};
use std::{io, time::Instant};

const BLOCKS: usize = 4096;

fn load(mut disk: impl BlockClient, steps: u64) -> io::Result<()> {
    println!("{} blocks of {} bytes", disk.blocks(), disk.block_bytes());
    let (mut model, mut rng) = (RegisterModel::new(1, 0, BLOCKS), SeededRng::new(1));
    let zeroes = vec![0; disk.block_bytes() * 256];
    for lba in (0..BLOCKS as u64).step_by(256) {
        disk.write(lba, &zeroes, false)?;
    }
    let begun = Instant::now();
    for _ in 0..steps {
        model.step(&mut disk, &mut rng)?;
    }
    model.check_after_crash(&mut disk)?;
    println!(
        "{steps} steps in {:.1} s, {} blocks written, all as expected",
        begun.elapsed().as_secs_f64(),
        model.acknowledged
    );
    Ok(())
}

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [protocol, address, target, steps] = &words[..] else {
        return Err(protocol_error("load iscsi|nvme ADDRESS:PORT TARGET STEPS"));
    };
    let address = address.parse().map_err(|error| protocol_error(format!("{address}: {error}")))?;
    let steps = steps.parse().map_err(|error| protocol_error(format!("{steps}: {error}")))?;
    match protocol.as_str() {
        "iscsi" => {
            load(iscsi::Session::login(address, "iqn.2026-01.test:probe", target, 1, 1)?, steps)
        }
        _ => load(Controller::connect(address, "nqn.2026-01.test:probe", target)?, steps),
    }
}
