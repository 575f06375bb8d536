//! A block device is an array of independent registers: every block this module writes says which register it is and which write it
//! came from, and the book knows which writes a block may show after a crash.

use crate::{Disk, fault};
use std::io;

const MAGIC: u64 = 0x7769_6e64_726f_7365;

/// A small, fast, seeded source of numbers (xorshift64*).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which is not zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.roll() % limit
    }
}

/// What block `lba` holds after write `sequence`: recognisable from its first bytes, different in every one.
pub fn fill(block: &mut [u8], volume: u64, lba: u64, sequence: u64) {
    let mut dice = Dice::new(volume ^ lba.rotate_left(20) ^ sequence.rotate_left(40));
    let words = [MAGIC, volume, lba, sequence];
    for (index, place) in block.chunks_mut(8).enumerate() {
        let word = words.get(index).copied().unwrap_or_else(|| dice.roll());
        place.copy_from_slice(&word.to_le_bytes()[..place.len()]);
    }
}

/// Which write a block shows: `None` for a block never written.
pub fn sequence_of(block: &[u8], volume: u64, lba: u64) -> Result<Option<u64>, String> {
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
    fill(&mut expected, volume, lba, word(3));
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
    /// What it shows as long as nothing crashes.
    current: u64,
}

/// What every block of a range may hold.
#[derive(Debug)]
pub struct Book {
    volume: u64,
    first: u64,
    registers: Vec<Register>,
    sequence: u64,
    /// Blocks with writes younger than the last flush.
    dirty: Vec<usize>,
    /// Blocks written and acknowledged, over the book's life.
    pub acknowledged: u64,
}

impl Book {
    /// A book of `blocks` blocks from `first`, none ever written.
    #[must_use]
    pub fn new(volume: u64, first: u64, blocks: usize) -> Self {
        let registers = vec![Register::default(); blocks];
        Self { volume, first, registers, sequence: 0, dirty: Vec::new(), acknowledged: 0 }
    }

    /// One step of load: mostly a write of some blocks, sometimes with FUA, sometimes a flush, sometimes a read that is
    /// checked.
    pub fn step(&mut self, disk: &mut dyn Disk, dice: &mut Dice) -> io::Result<()> {
        match dice.below(16) {
            0 => self.flush(disk),
            1 => self.check_some(disk, dice),
            2 => self.write(disk, dice, true),
            _ => self.write(disk, dice, false),
        }
    }

    /// A place in the book: index of a block and how many follow.
    fn place(&self, dice: &mut Dice) -> (usize, usize) {
        let total = self.registers.len() as u64;
        let most = if dice.below(8) == 0 { 128 } else { 16 };
        let at = dice.below(total);
        let length = 1 + dice.below(most.min(total - at));
        (usize::try_from(at).unwrap_or(0), usize::try_from(length).unwrap_or(1))
    }

    fn write(&mut self, disk: &mut dyn Disk, dice: &mut Dice, fua: bool) -> io::Result<()> {
        let (at, length) = self.place(dice);
        self.sequence += 1;
        let lba = self.first + at as u64;
        let size = disk.block_bytes();
        let mut data = vec![0; length * size];
        for (block, lba) in data.chunks_mut(size).zip(lba..) {
            fill(block, self.volume, lba, self.sequence);
        }
        for index in at..at + length {
            self.registers[index].later.push((self.sequence, false));
        }
        disk.write(lba, &data, fua)?;
        self.acknowledged += length as u64;
        for index in at..at + length {
            self.registers[index].current = self.sequence;
            if fua {
                let sequence = self.sequence;
                self.registers[index] =
                    Register { durable: sequence, later: Vec::new(), current: sequence };
            } else if let Some(last) = self.registers[index].later.last_mut() {
                last.1 = true;
                self.dirty.push(index);
            }
        }
        Ok(())
    }

    fn flush(&mut self, disk: &mut dyn Disk) -> io::Result<()> {
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
    fn check_some(&mut self, disk: &mut dyn Disk, dice: &mut Dice) -> io::Result<()> {
        let (at, length) = self.place(dice);
        let found = self.read(disk, at, length)?;
        for (index, found) in (at..).zip(found) {
            let expected = self.registers[index].current;
            if found != expected {
                return Err(fault(self.complaint(index, found, &format!("was write {expected}"))));
            }
        }
        Ok(())
    }

    /// After a crash: reads the whole book and checks every block: what was durable is there, or something younger that
    /// was sent. What it finds must stay from then on.
    pub fn check(&mut self, disk: &mut dyn Disk) -> io::Result<()> {
        let total = self.registers.len();
        for at in (0..total).step_by(256) {
            let found = self.read(disk, at, 256.min(total - at))?;
            for (index, found) in (at..).zip(found) {
                let register = &mut self.registers[index];
                let sent = register.later.iter().any(|(sequence, _)| *sequence == found);
                if !sent && found != register.durable {
                    let durable = register.durable;
                    return Err(fault(self.complaint(
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
    fn read(&mut self, disk: &mut dyn Disk, at: usize, length: usize) -> io::Result<Vec<u64>> {
        let size = disk.block_bytes();
        let first = self.first + at as u64;
        let mut data = vec![0; length * size];
        disk.read(first, &mut data)?;
        let blocks = data.chunks(size).zip(first..);
        blocks
            .map(|(block, lba)| {
                sequence_of(block, self.volume, lba).map(Option::unwrap_or_default).map_err(fault)
            })
            .collect()
    }

    fn complaint(&self, index: usize, found: u64, expected: &str) -> String {
        let (lba, volume) = (self.first + index as u64, self.volume);
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

    impl Disk for Memory {
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
        let (mut disk, mut book, mut dice) =
            (Memory::new(lies), Book::new(7, 0, 64), Dice::new(seed));
        for _ in 0..200 {
            book.step(&mut disk, &mut dice)?;
        }
        disk.now.copy_from_slice(&disk.stable);
        book.check(&mut disk)
    }

    #[test]
    fn an_honest_disk_passes_and_a_lying_one_is_found() {
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
        fill(&mut block, 1, 5, 9);
        assert_eq!(sequence_of(&block, 1, 5), Ok(Some(9)));
        assert!(sequence_of(&block, 1, 6).unwrap_err().contains("holds block 5"));
        block[511] ^= 1;
        assert!(sequence_of(&block, 1, 5).unwrap_err().contains("torn"));
    }
}
