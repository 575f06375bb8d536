//! A device in memory: sparse, thin, with a limit; optionally with a cache that a power cut loses.

use std::cell::RefCell;
use std::fmt;

use rt::buf::{Buf, BufMut, Bufs};
use rustc_hash::FxHashMap;

use crate::{ASIDE_BYTES, Blocks, Ctx, Error, Info, Layer, Op, Run};

/// Granularity of allocation in bytes.
const PAGE: usize = 4096;

/// Most pages that one look at what has space goes through.
const MAPPED_AT_ONCE: usize = 4096;

const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// What a [`Mem`] is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemOptions {
    /// Size of a logical block in bytes: 512 or 4096.
    pub block_size: u32,
    /// Size in blocks.
    pub blocks: u64,
    /// Most memory its contents may take, in bytes; writes beyond get [`Error::NoSpace`].
    pub space_bytes: u64,
    /// Whether it keeps what [`Mem::cut_power`] may lose: for tests. It remembers every version
    /// of a block that was overwritten since the last flush.
    pub volatile_cache: bool,
    /// Whether a whole page that is written is kept where it came, and not copied. Then what the
    /// device holds is memory of whoever wrote it, and counts as held by him: for pools that have
    /// room for all of it several times, as the pages of one buffer are given back together.
    pub keeps_buffers: bool,
}

impl MemOptions {
    /// A device of `blocks` blocks with space for all of them and no cache.
    #[must_use]
    pub fn new(block_size: u32, blocks: u64) -> Self {
        let (volatile_cache, keeps_buffers) = (false, false);
        Self { block_size, blocks, space_bytes: u64::MAX, volatile_cache, keeps_buffers }
    }
}

/// A device in memory.
pub struct Mem {
    options: MemOptions,
    /// But for its size, which may change.
    info: Info,
    state: RefCell<State>,
}

struct State {
    blocks: u64,
    /// Readers share them: a page that somebody holds is not changed, but replaced.
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
        let info = declared(&options);
        Self { options, info, state: RefCell::new(State { blocks, pages, undo }) }
    }

    /// Something of a block is not what was written any more: for tests. A block that was never written stays as it is.
    pub fn spoil(&self, block: u64, at: usize) {
        let place = block * u64::from(self.options.block_size) + at as u64;
        let mut state = self.state.borrow_mut();
        let Some(page) = state.pages.get_mut(&(place / PAGE as u64)) else { return };
        let mut spoilt = BufMut::lone_page();
        spoilt.copy_from_slice(page);
        spoilt[(place % PAGE as u64) as usize] ^= 0x40;
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

    /// Power is lost: of every block changed since it was last durable one of its contents since
    /// then stays. `fate(n)` chooses, below `n`: 0 is the oldest.
    pub fn cut_power(&self, mut fate: impl FnMut(usize) -> usize) {
        let mut state = self.state.borrow_mut();
        let mut undo: Vec<_> = std::mem::take(&mut state.undo).into_iter().collect();
        undo.sort_unstable_by_key(|(lba, _)| *lba);
        for (lba, versions) in undo {
            if let Some(old) = versions.get(fate(versions.len() + 1)) {
                state.put(self.at(lba), old);
            }
        }
    }

    /// Address in bytes of block `lba`.
    fn at(&self, lba: u64) -> u64 {
        lba * u64::from(self.options.block_size)
    }

    fn span(&self, range: Blocks) -> Span {
        Span { at: self.at(range.at.0), end: self.at(range.at.0 + range.count) }
    }

    /// Does an operation on `range` that changes its contents.
    fn change(&self, op: &Op, range: Blocks) -> Result<(), Error> {
        let span = self.span(range);
        let mut state = self.state.borrow_mut();
        let needs_space = match op {
            Op::Write { .. } | Op::Zero { unmap: false, .. } => state.missing(span),
            _ => 0,
        };
        if (state.pages.len() as u64 + needs_space) * PAGE as u64 > self.options.space_bytes {
            return Err(Error::NoSpace);
        }
        let fua = matches!(op, Op::Write { fua: true, .. } | Op::Zero { fua: true, .. });
        if self.options.volatile_cache {
            self.remember(&mut state, range, fua);
        }
        match op {
            Op::Write { data, .. } => {
                let mut at = span.at;
                for piece in data.iter() {
                    match self.options.keeps_buffers {
                        true => state.keep(at, piece),
                        false => state.put(at, piece),
                    }
                    at += piece.len() as u64;
                }
            }
            Op::Zero { unmap: false, .. } => {
                span.pages().for_each(|(page, part)| state.page(page)[part].fill(0));
            }
            _ => state.free(span),
        }
        Ok(())
    }

    /// How a range begins.
    fn map(&self, range: Blocks) -> Run {
        let (span, state) = (self.span(range), self.state.borrow());
        let mapped = |n: u64| state.pages.contains_key(&n);
        let first = mapped(span.at / PAGE as u64);
        let alike = |(n, _): &(u64, std::ops::Range<usize>)| mapped(*n) == first;
        let bytes: usize =
            span.pages().take(MAPPED_AT_ONCE).take_while(alike).map(|(_, part)| part.len()).sum();
        let blocks = bytes as u64 / u64::from(self.options.block_size);
        Run { blocks: blocks.min(range.count) as u32, mapped: first }
    }

    fn remember(&self, state: &mut State, range: Blocks, durable: bool) {
        for lba in range.at.0..range.at.0 + range.count {
            if durable {
                state.undo.remove(&lba);
            } else {
                let mut old = vec![0; self.options.block_size as usize].into_boxed_slice();
                state.get(self.at(lba), &mut old);
                state.undo.entry(lba).or_default().push(old);
            }
        }
    }
}

/// A range of bytes.
#[derive(Clone, Copy)]
struct Span {
    at: u64,
    end: u64,
}

impl Span {
    fn new(at: u64, len: usize) -> Self {
        Self { at, end: at + len as u64 }
    }

    /// The pages it touches, and the part of each.
    fn pages(self) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let page = PAGE as u64;
        (self.at / page..self.end.div_ceil(page)).map(move |n| {
            let start = self.at.max(n * page) - n * page;
            let end = self.end.min((n + 1) * page) - n * page;
            (n, start as usize..end as usize)
        })
    }
}

impl State {
    fn missing(&self, span: Span) -> u64 {
        span.pages().filter(|(n, _)| !self.pages.contains_key(n)).count() as u64
    }

    /// A page, to be changed.
    fn page(&mut self, n: u64) -> &mut [u8] {
        let page = self.pages.entry(n).or_insert_with(|| BufMut::lone_page().freeze());
        if page.get_mut().is_none() {
            let mut copy = BufMut::lone_page();
            copy.copy_from_slice(page);
            *page = copy.freeze();
        }
        page.get_mut().expect("nobody else holds it")
    }

    fn put(&mut self, at: u64, mut bytes: &[u8]) {
        for (n, part) in Span::new(at, bytes.len()).pages() {
            let (now, later) = bytes.split_at(part.len());
            self.page(n)[part].copy_from_slice(now);
            bytes = later;
        }
    }

    /// As [`Self::put`]; whole pages are kept, and not copied.
    fn keep(&mut self, at: u64, piece: &Buf) {
        let mut done = 0;
        for (n, part) in Span::new(at, piece.len()).pages() {
            let end = done + part.len();
            if part.len() == PAGE && piece[done..].as_ptr().addr().is_multiple_of(PAGE) {
                self.pages.insert(n, piece.slice(done..end));
            } else {
                self.page(n)[part].copy_from_slice(&piece[done..end]);
            }
            done = end;
        }
    }

    /// What is there, without a copy.
    fn share(&self, span: Span) -> Bufs {
        let of = |(n, part): (u64, std::ops::Range<usize>)| match self.pages.get(&n) {
            Some(page) => page.slice(part),
            None => Buf::zeroes(part.len()),
        };
        span.pages().map(of).collect()
    }

    fn get(&self, at: u64, mut into: &mut [u8]) {
        for (n, part) in Span::new(at, into.len()).pages() {
            let (now, later) = into.split_at_mut(part.len());
            match self.pages.get(&n) {
                Some(page) => now.copy_from_slice(&page[part]),
                None => now.fill(0),
            }
            into = later;
        }
    }

    /// Frees whole pages and zeroes parts of pages.
    fn free(&mut self, span: Span) {
        for (n, part) in span.pages() {
            if part.len() == PAGE {
                self.pages.remove(&n);
            } else if self.pages.contains_key(&n) {
                self.page(n)[part].fill(0);
            }
        }
    }
}

fn declared(options: &MemOptions) -> Info {
    let block_size = options.block_size;
    Info {
        block_size,
        blocks: options.blocks,
        aside_blocks: ASIDE_BYTES / block_size,
        physical_block_size: PAGE as u32,
        max_transfer_blocks: MAX_TRANSFER_BYTES / block_size,
        unmap_granularity_blocks: PAGE as u32 / block_size,
        unmap_zeroes: true,
        volatile_cache: options.volatile_cache,
        native_fua: true,
        read_only: false,
        overhead: 0,
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
        if op.writes() {
            return self.change(&op, range).map(|()| Bufs::new());
        }
        if let Op::Map { .. } = op {
            return Ok(self.map(range).into_bufs(&ctx));
        }
        Ok(self.state.borrow().share(self.span(range)))
    }
}
