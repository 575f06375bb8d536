//! A device in memory: sparse, thin, with a limit; optionally with a cache that a power cut loses.

use std::cell::RefCell;
use std::fmt;

use rt::buf::{Buf, BufMut, Bufs};
use rustc_hash::FxHashMap;

use crate::{BlockStatus, Blocks, Ctx, Error, Info, Layer, METADATA_BYTES, Op};

/// Granularity of allocation in bytes.
const PAGE: usize = 4096;

/// Most pages that one block status operation examines.
const MAX_STATUS_PAGES: usize = 4096;

const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// Parameters of a [`Mem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemOptions {
    /// Size of a logical block in bytes: 512 or 4096.
    pub block_size: u32,
    /// Size in blocks.
    pub blocks: u64,
    /// Most memory for its contents, in bytes; writes beyond fail with [`Error::NoSpace`].
    pub max_space_bytes: u64,
    /// Whether it has a cache whose contents [`Mem::cut_power`] may lose: for tests. It remembers
    /// every version of a block overwritten since the last flush.
    pub volatile_cache: bool,
    /// Whether written whole pages are kept in the writer's buffers and not copied. The contents
    /// then count as held by the writer: for pools with room for all of it several times, as the
    /// pages of one buffer are freed together.
    pub keeps_buffers: bool,
}

impl MemOptions {
    /// A device of `blocks` blocks with space for all of them and no cache.
    #[must_use]
    pub fn new(block_size: u32, blocks: u64) -> Self {
        let (volatile_cache, keeps_buffers) = (false, false);
        Self { block_size, blocks, max_space_bytes: u64::MAX, volatile_cache, keeps_buffers }
    }
}

/// A device in memory.
pub struct Mem {
    options: MemOptions,
    /// All but the size, which may change.
    info: Info,
    state: RefCell<State>,
}

struct State {
    blocks: u64,
    /// Shared with readers: a page that a reader holds is replaced, not changed.
    pages: FxHashMap<u64, Buf>,
    /// Earlier contents, oldest first, of the blocks changed since they were last durable.
    undo: FxHashMap<u64, Vec<Box<[u8]>>>,
}

impl fmt::Debug for Mem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mem").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Mem {
    /// A device full of zeroes that takes no memory.
    #[must_use]
    pub fn new(options: MemOptions) -> Self {
        let (blocks, pages, undo) = (options.blocks, FxHashMap::default(), FxHashMap::default());
        let info = info_of(&options);
        Self { options, info, state: RefCell::new(State { blocks, pages, undo }) }
    }

    /// Corrupts a byte of a block: for tests. A block that was never written stays as it is.
    pub fn corrupt(&self, block: u64, at: usize) {
        let offset = block * u64::from(self.options.block_size) + at as u64;
        let mut state = self.state.borrow_mut();
        let Some(page) = state.pages.get_mut(&(offset / PAGE as u64)) else { return };
        let mut spoilt = BufMut::heap_page();
        spoilt.copy_from_slice(page);
        spoilt[(offset % PAGE as u64) as usize] ^= 0x40;
        *page = spoilt.freeze();
    }

    /// Makes the device larger; the new blocks are zeroes. A smaller size changes nothing.
    pub fn grow(&self, blocks: u64) {
        let mut state = self.state.borrow_mut();
        state.blocks = state.blocks.max(blocks);
    }

    /// Memory that the contents take, in bytes.
    #[must_use]
    pub fn space_used(&self) -> u64 {
        (self.state.borrow().pages.len() * PAGE) as u64
    }

    /// Cuts the power: each block changed since it was last durable keeps one of its contents since
    /// then. `fate(n)` chooses, below `n`: 0 is the oldest.
    pub fn cut_power(&self, mut choose: impl FnMut(usize) -> usize) {
        let mut state = self.state.borrow_mut();
        let mut undo: Vec<_> = std::mem::take(&mut state.undo).into_iter().collect();
        undo.sort_unstable_by_key(|(lba, _)| *lba);
        for (lba, versions) in undo {
            if let Some(old) = versions.get(choose(versions.len() + 1)) {
                state.copy_in(self.byte_offset(lba), old);
            }
        }
    }

    /// Byte offset of block `lba`.
    fn byte_offset(&self, lba: u64) -> u64 {
        lba * u64::from(self.options.block_size)
    }

    fn byte_range(&self, range: Blocks) -> ByteRange {
        ByteRange {
            start: self.byte_offset(range.at.0),
            end: self.byte_offset(range.at.0 + range.count),
        }
    }

    /// Applies an operation that changes `range`.
    fn apply(&self, op: &Op, range: Blocks) -> Result<(), Error> {
        let span = self.byte_range(range);
        let mut state = self.state.borrow_mut();
        let needs_space = match op {
            Op::Write { .. } | Op::Zero { unmap: false, .. } => state.unallocated_pages(span),
            _ => 0,
        };
        if (state.pages.len() as u64 + needs_space) * PAGE as u64 > self.options.max_space_bytes {
            return Err(Error::NoSpace);
        }
        let fua = matches!(op, Op::Write { fua: true, .. } | Op::Zero { fua: true, .. });
        if self.options.volatile_cache {
            self.save_undo(&mut state, range, fua);
        }
        match op {
            Op::Write { data, .. } => {
                let mut at = span.start;
                for piece in data.iter() {
                    match self.options.keeps_buffers {
                        true => state.store_shared(at, piece),
                        false => state.copy_in(at, piece),
                    }
                    at += piece.len() as u64;
                }
            }
            Op::Zero { unmap: false, .. } => {
                span.pages().for_each(|(page, part)| state.page_mut(page)[part].fill(0));
            }
            _ => state.free(span),
        }
        Ok(())
    }

    /// The status of the first run of a range.
    fn block_status(&self, range: Blocks) -> BlockStatus {
        let (span, state) = (self.byte_range(range), self.state.borrow());
        let mapped = |n: u64| state.pages.contains_key(&n);
        let first = mapped(span.start / PAGE as u64);
        let alike = |(n, _): &(u64, std::ops::Range<usize>)| mapped(*n) == first;
        let bytes: usize =
            span.pages().take(MAX_STATUS_PAGES).take_while(alike).map(|(_, part)| part.len()).sum();
        let blocks = bytes as u64 / u64::from(self.options.block_size);
        BlockStatus { blocks: blocks.min(range.count) as u32, mapped: first }
    }

    fn save_undo(&self, state: &mut State, range: Blocks, durable: bool) {
        for lba in range.at.0..range.at.0 + range.count {
            if durable {
                state.undo.remove(&lba);
            } else {
                let mut old = vec![0; self.options.block_size as usize].into_boxed_slice();
                state.copy_out(self.byte_offset(lba), &mut old);
                state.undo.entry(lba).or_default().push(old);
            }
        }
    }
}

/// A range of bytes.
#[derive(Clone, Copy)]
struct ByteRange {
    start: u64,
    end: u64,
}

impl ByteRange {
    fn new(at: u64, len: usize) -> Self {
        Self { start: at, end: at + len as u64 }
    }

    /// The pages it touches, and the part of each.
    fn pages(self) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let page = PAGE as u64;
        (self.start / page..self.end.div_ceil(page)).map(move |n| {
            let start = self.start.max(n * page) - n * page;
            let end = self.end.min((n + 1) * page) - n * page;
            (n, start as usize..end as usize)
        })
    }
}

impl State {
    fn unallocated_pages(&self, span: ByteRange) -> u64 {
        span.pages().filter(|(n, _)| !self.pages.contains_key(n)).count() as u64
    }

    /// A page, for writing.
    fn page_mut(&mut self, n: u64) -> &mut [u8] {
        let page = self.pages.entry(n).or_insert_with(|| BufMut::heap_page().freeze());
        if page.get_mut().is_none() {
            let mut copy = BufMut::heap_page();
            copy.copy_from_slice(page);
            *page = copy.freeze();
        }
        page.get_mut().expect("no other reference to the buffer exists")
    }

    fn copy_in(&mut self, at: u64, mut bytes: &[u8]) {
        for (n, part) in ByteRange::new(at, bytes.len()).pages() {
            let (now, later) = bytes.split_at(part.len());
            self.page_mut(n)[part].copy_from_slice(now);
            bytes = later;
        }
    }

    /// As [`Self::copy_in`], but keeps whole pages instead of copying them.
    fn store_shared(&mut self, at: u64, piece: &Buf) {
        let mut done = 0;
        for (n, part) in ByteRange::new(at, piece.len()).pages() {
            let end = done + part.len();
            if part.len() == PAGE && piece[done..].as_ptr().addr().is_multiple_of(PAGE) {
                self.pages.insert(n, piece.slice(done..end));
            } else {
                self.page_mut(n)[part].copy_from_slice(&piece[done..end]);
            }
            done = end;
        }
    }

    /// The contents, without a copy.
    fn read_shared(&self, span: ByteRange) -> Bufs {
        let of = |(n, part): (u64, std::ops::Range<usize>)| match self.pages.get(&n) {
            Some(page) => page.slice(part),
            None => Buf::zeroes(part.len()),
        };
        span.pages().map(of).collect()
    }

    fn copy_out(&self, at: u64, mut into: &mut [u8]) {
        for (n, part) in ByteRange::new(at, into.len()).pages() {
            let (now, later) = into.split_at_mut(part.len());
            match self.pages.get(&n) {
                Some(page) => now.copy_from_slice(&page[part]),
                None => now.fill(0),
            }
            into = later;
        }
    }

    /// Frees whole pages and zeroes parts of pages.
    fn free(&mut self, span: ByteRange) {
        for (n, part) in span.pages() {
            if part.len() == PAGE {
                self.pages.remove(&n);
            } else if self.pages.contains_key(&n) {
                self.page_mut(n)[part].fill(0);
            }
        }
    }
}

fn info_of(options: &MemOptions) -> Info {
    let block_size = options.block_size;
    Info {
        block_size,
        blocks: options.blocks,
        metadata_blocks: METADATA_BYTES / block_size,
        physical_block_size: PAGE as u32,
        max_transfer_blocks: MAX_TRANSFER_BYTES / block_size,
        unmap_granularity_blocks: PAGE as u32 / block_size,
        unmap_zeroes: true,
        volatile_cache: options.volatile_cache,
        native_fua: true,
        read_only: false,
        overhead_bytes: 0,
    }
}

impl Layer for Mem {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn info(&self) -> Info {
        Info { blocks: self.state.borrow().blocks, ..self.info }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let Some(range) = op.range(self.options.block_size) else {
            self.state.borrow_mut().undo.clear();
            return Ok(Bufs::new());
        };
        if op.is_write() {
            return self.apply(&op, range).map(|()| Bufs::new());
        }
        if let Op::BlockStatus { .. } = op {
            return Ok(self.block_status(range).into_bufs(&ctx));
        }
        Ok(self.state.borrow().read_shared(self.byte_range(range)))
    }
}
