//! A block device is an array of independent registers: every block that this module writes names
//! its register and its write, and the model knows which writes a block may show after a crash.

use crate::{BlockClient, protocol_error};
use std::io;

const MAGIC: u64 = 0x7769_6e64_726f_7365;

/// A small, fast, seeded random number generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct SeededRng(u64);

impl SeededRng {
    /// The same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which is not zero.
    pub fn next_below(&mut self, limit: u64) -> u64 {
        self.next_u64() % limit
    }
}

/// What block `lba` holds after write `sequence`: recognisable from its first bytes, different in
/// every one.
pub fn fill_block(block: &mut [u8], volume: u64, lba: u64, sequence: u64) {
    let mut rng = SeededRng::new(volume ^ lba.rotate_left(20) ^ sequence.rotate_left(40));
    let words = [MAGIC, volume, lba, sequence];
    for (index, place) in block.chunks_mut(8).enumerate() {
        let word = words.get(index).copied().unwrap_or_else(|| rng.next_u64());
        place.copy_from_slice(&word.to_le_bytes()[..place.len()]);
    }
}

/// Which write a block shows: `None` for a block never written.
pub fn write_number_of(block: &[u8], volume: u64, lba: u64) -> Result<Option<u64>, String> {
    if block.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let word = |index: usize| {
        let bytes = block.get(index * 8..index * 8 + 8).and_then(|b| b.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    if word(0) != MAGIC {
        return Err(format!(
            "block {lba}: not one of ours: {:02x?}",
            &block[..block.len().min(16)]
        ));
    }
    if (word(1), word(2)) != (volume, lba) {
        return Err(format!(
            "block {lba} of volume {volume} holds block {} of volume {}",
            word(2),
            word(1)
        ));
    }
    let mut expected = vec![0; block.len()];
    fill_block(&mut expected, volume, lba, word(3));
    if expected != block {
        return Err(format!("block {lba}: torn, its head is from write {}", word(3)));
    }
    Ok(Some(word(3)))
}

/// One block: the write known to be durable (0: none) and every later one that was sent.
#[derive(Clone, Debug, Default)]
struct Register {
    durable: u64,
    /// Later writes, oldest first, each with whether it was acknowledged.
    later: Vec<(u64, bool)>,
    /// The write it shows as long as nothing crashes.
    current: u64,
}

/// The writes that every block of a range may show.
#[derive(Debug)]
pub struct RegisterModel {
    volume: u64,
    first_lba: u64,
    registers: Vec<Register>,
    last_write: u64,
    /// Blocks with writes younger than the last flush.
    dirty: Vec<usize>,
    /// Blocks written and acknowledged since the model was created.
    pub acknowledged: u64,
}

impl RegisterModel {
    /// A model of `blocks` blocks from `first`, none of them written.
    #[must_use]
    pub fn new(volume: u64, first: u64, blocks: usize) -> Self {
        let registers = vec![Register::default(); blocks];
        Self {
            volume,
            first_lba: first,
            registers,
            last_write: 0,
            dirty: Vec::new(),
            acknowledged: 0,
        }
    }

    /// One step of load: mostly a write of some blocks, sometimes with FUA, sometimes a flush,
    /// sometimes a read that is checked.
    pub fn step(&mut self, disk: &mut dyn BlockClient, rng: &mut SeededRng) -> io::Result<()> {
        match rng.next_below(16) {
            0 => self.flush(disk),
            1 => self.check_random_range(disk, rng),
            2 => self.write(disk, rng, true),
            _ => self.write(disk, rng, false),
        }
    }

    /// A random range in the model: index of a block and how many follow.
    fn random_range(&self, rng: &mut SeededRng) -> (usize, usize) {
        let total = self.registers.len() as u64;
        let most = if rng.next_below(8) == 0 { 128 } else { 16 };
        let at = rng.next_below(total);
        let length = 1 + rng.next_below(most.min(total - at));
        (usize::try_from(at).unwrap_or(0), usize::try_from(length).unwrap_or(1))
    }

    fn write(
        &mut self,
        disk: &mut dyn BlockClient,
        rng: &mut SeededRng,
        fua: bool,
    ) -> io::Result<()> {
        let (at, length) = self.random_range(rng);
        self.last_write += 1;
        let lba = self.first_lba + at as u64;
        let size = disk.block_bytes();
        let mut data = vec![0; length * size];
        for (block, lba) in data.chunks_mut(size).zip(lba..) {
            fill_block(block, self.volume, lba, self.last_write);
        }
        for index in at..at + length {
            self.registers[index].later.push((self.last_write, false));
        }
        disk.write(lba, &data, fua)?;
        self.acknowledged += length as u64;
        for index in at..at + length {
            self.registers[index].current = self.last_write;
            if fua {
                let sequence = self.last_write;
                self.registers[index] =
                    Register { durable: sequence, later: Vec::new(), current: sequence };
            } else if let Some(last) = self.registers[index].later.last_mut() {
                last.1 = true;
                self.dirty.push(index);
            }
        }
        Ok(())
    }

    fn flush(&mut self, disk: &mut dyn BlockClient) -> io::Result<()> {
        disk.flush()?;
        for index in std::mem::take(&mut self.dirty) {
            let register = &mut self.registers[index];
            if let Some(position) =
                register.later.iter().rposition(|(_, acknowledged)| *acknowledged)
            {
                register.durable = register.later[position].0;
                register.later.drain(..=position);
            }
        }
        Ok(())
    }

    /// Without a crash a block shows its last acknowledged write.
    fn check_random_range(
        &mut self,
        disk: &mut dyn BlockClient,
        rng: &mut SeededRng,
    ) -> io::Result<()> {
        let (at, length) = self.random_range(rng);
        let found = self.read(disk, at, length)?;
        for (index, found) in (at..).zip(found) {
            let expected = self.registers[index].current;
            if found != expected {
                return Err(protocol_error(self.describe_violation(
                    index,
                    found,
                    &format!("was write {expected}"),
                )));
            }
        }
        Ok(())
    }

    /// After a crash, reads and checks every block: each must show its durable write or a later
    /// one. What it shows must not change from then on.
    pub fn check_after_crash(&mut self, disk: &mut dyn BlockClient) -> io::Result<()> {
        let total = self.registers.len();
        for at in (0..total).step_by(256) {
            let found = self.read(disk, at, 256.min(total - at))?;
            for (index, found) in (at..).zip(found) {
                let register = &mut self.registers[index];
                let sent = register.later.iter().any(|(sequence, _)| *sequence == found);
                if !sent && found != register.durable {
                    let durable = register.durable;
                    return Err(protocol_error(self.describe_violation(
                        index,
                        found,
                        &format!("write {durable} was durable"),
                    )));
                }
                register.current = found;
            }
        }
        Ok(())
    }

    /// Which writes the blocks from `at` show.
    fn read(
        &mut self,
        disk: &mut dyn BlockClient,
        at: usize,
        length: usize,
    ) -> io::Result<Vec<u64>> {
        let size = disk.block_bytes();
        let first = self.first_lba + at as u64;
        let mut data = vec![0; length * size];
        disk.read(first, &mut data)?;
        let blocks = data.chunks(size).zip(first..);
        blocks
            .map(|(block, lba)| {
                write_number_of(block, self.volume, lba)
                    .map(Option::unwrap_or_default)
                    .map_err(protocol_error)
            })
            .collect()
    }

    fn describe_violation(&self, index: usize, found: u64, expected: &str) -> String {
        let (lba, volume) = (self.first_lba + index as u64, self.volume);
        let later = &self.registers[index].later;
        format!(
            "block {lba} of volume {volume} shows write {found}; {expected}, sent since: {later:?}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk in memory that can forget what was not flushed.
    struct Memory {
        now: Vec<u8>,
        stable: Vec<u8>,
        lies: bool,
    }

    impl Memory {
        fn new(lies: bool) -> Self {
            Self { now: vec![0; 64 * 512], stable: vec![0; 64 * 512], lies }
        }
    }

    impl BlockClient for Memory {
        fn block_bytes(&self) -> usize {
            512
        }

        fn blocks(&self) -> u64 {
            64
        }

        fn read(&mut self, lba: u64, into: &mut [u8]) -> io::Result<()> {
            let at = usize::try_from(lba).unwrap() * 512;
            into.copy_from_slice(&self.now[at..at + into.len()]);
            Ok(())
        }

        fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> io::Result<()> {
            let at = usize::try_from(lba).unwrap() * 512;
            self.now[at..at + data.len()].copy_from_slice(data);
            if fua {
                self.stable[at..at + data.len()].copy_from_slice(data);
            }
            Ok(())
        }

        fn flush(&mut self) -> io::Result<()> {
            if !self.lies {
                self.stable.copy_from_slice(&self.now);
            }
            Ok(())
        }
    }

    fn after_crash(lies: bool, seed: u64) -> io::Result<()> {
        let (mut disk, mut model, mut rng) =
            (Memory::new(lies), RegisterModel::new(7, 0, 64), SeededRng::new(seed));
        for _ in 0..200 {
            model.step(&mut disk, &mut rng)?;
        }
        disk.now.copy_from_slice(&disk.stable);
        model.check_after_crash(&mut disk)
    }

    #[test]
    fn a_correct_disk_passes_and_a_faulty_one_is_detected() {
        for seed in 0..50 {
            after_crash(false, seed).unwrap();
            assert!(
                after_crash(true, seed).is_err(),
                "seed {seed}: flushes that did nothing went unseen"
            );
        }
    }

    #[test]
    fn misplaced_and_torn_blocks_are_named() {
        let mut block = [0; 512];
        fill_block(&mut block, 1, 5, 9);
        assert_eq!(write_number_of(&block, 1, 5), Ok(Some(9)));
        assert!(write_number_of(&block, 1, 6).unwrap_err().contains("holds block 5"));
        block[511] ^= 1;
        assert!(write_number_of(&block, 1, 5).unwrap_err().contains("torn"));
    }
}
