//! Our best engine beside ISA-L, which is loaded at run time: nothing links it.
//!
//! ```text
//! isal SECONDS [PLACE [ENGINE]]
//! ```
//! Each case is one computation on buffers of one size, which fit the caches or exceed them by far.
//! Both sides run it in alternating turns of a few milliseconds, changing who begins, and their
//! results are compared. The output is JSON: bytes of data members (of those read, if members are
//! lost) per second, the median and the best of all turns.
#![allow(unsafe_code, reason = "calls a library of C")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::{
    ffi::{c_int, c_uchar, c_void},
    hint::black_box,
    time::{Duration, Instant},
};

use libloading::{Library, Symbol};
use parity::Parity;

const PAGE: usize = 4096;
/// Several times the last-level cache, which holds nothing of the work any more when it comes
/// again.
const MEMORY: usize = 1 << 30;
/// What fits into the innermost private cache.
const CACHED: usize = 256 << 10;
/// So much is done between two looks at the clock.
const ROUND_BYTES: usize = 32 << 20;
/// Those two members are lost.
const LOST: [usize; 2] = [1, 5];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Computation {
    Xor,
    Pq,
    TwoData,
}

struct Case {
    what: Computation,
    members: usize,
    bytes: usize,
    in_memory: bool,
}

const CASES: [(Computation, usize); 5] = [
    (Computation::Xor, 4),
    (Computation::Xor, 8),
    (Computation::Pq, 4),
    (Computation::Pq, 8),
    (Computation::TwoData, 8),
];
const BUFFER_PLACEMENTS: [(usize, bool); 4] =
    [(PAGE, false), (4 * PAGE, false), (PAGE, true), (16 * PAGE, true)];

impl Case {
    fn name(&self) -> &'static str {
        match (self.what, self.members) {
            (Computation::Xor, 4) => "P of 4+1",
            (Computation::Xor, _) => "P of 8+1",
            (Computation::Pq, 4) => "P and Q of 4+2",
            (Computation::Pq, _) => "P and Q of 8+2",
            (Computation::TwoData, _) => "two lost members of 8+2",
        }
    }

    fn placement_name(&self) -> &'static str {
        if self.in_memory { "memory" } else { "cache" }
    }

    fn outputs(&self) -> usize {
        if self.what == Computation::Xor { 1 } else { 2 }
    }

    fn stripes(&self) -> usize {
        let stripe = self.bytes * (self.members + self.outputs());
        (if self.in_memory { MEMORY } else { CACHED }) / stripe
    }

    /// Stripes per turn. In memory the two sides are half of all stripes apart, so neither finds
    /// the other's data in a cache.
    fn round_stripes(&self, round: usize, side: usize) -> impl Iterator<Item = usize> {
        let (all, count) = (self.stripes(), ROUND_BYTES / (self.bytes * self.members));
        let first = if self.in_memory { round * count + side * (all / 2) } else { 0 };
        (first..first + count).map(move |stripe| stripe % all)
    }
}

type Gen = unsafe extern "C" fn(c_int, c_int, *mut *mut c_void) -> c_int;
type Encode =
    unsafe extern "C" fn(c_int, c_int, c_int, *mut c_uchar, *mut *mut c_uchar, *mut *mut c_uchar);
type Matrix = unsafe extern "C" fn(*mut c_uchar, c_int, c_int);
type Invert = unsafe extern "C" fn(*mut c_uchar, *mut c_uchar, c_int) -> c_int;
type Tables = unsafe extern "C" fn(c_int, c_int, *mut c_uchar, *mut c_uchar);

struct IsaL<'a> {
    xor_gen: Symbol<'a, Gen>,
    pq_gen: Symbol<'a, Gen>,
    encode: Symbol<'a, Encode>,
    /// For [`LOST`] of eight members, by the other six, P and Q.
    tables: Vec<u8>,
}

impl<'a> IsaL<'a> {
    fn new(library: &'a Library) -> Result<Self, libloading::Error> {
        // SAFETY: the types are those of ISA-L's headers.
        unsafe {
            Ok(Self {
                xor_gen: library.get(b"xor_gen")?,
                pq_gen: library.get(b"pq_gen")?,
                encode: library.get(b"ec_encode_data")?,
                tables: tables(library)?,
            })
        }
    }

    fn compute(&self, what: Computation, stripe: &mut Pointers, bytes: usize) {
        let bytes = c_int::try_from(bytes).expect("a few pages");
        let members = c_int::try_from(stripe.sources).expect("a few members");
        let all = c_int::try_from(stripe.all.len()).expect("a few members");
        let (sources, outputs) = stripe.all.split_at_mut(stripe.sources);
        // SAFETY: `Pointers` are those of buffers of so many bytes, aligned to pages; nothing else
        // uses them meanwhile.
        let failed = unsafe {
            match what {
                Computation::Xor => (self.xor_gen)(all, bytes, stripe.all.as_mut_ptr().cast()),
                Computation::Pq => (self.pq_gen)(all, bytes, stripe.all.as_mut_ptr().cast()),
                Computation::TwoData => {
                    let tables = self.tables.as_ptr().cast_mut();
                    let (sources, outputs) = (sources.as_mut_ptr(), outputs.as_mut_ptr());
                    (self.encode)(bytes, members, 2, tables, sources, outputs);
                    0
                }
            }
        };
        assert_eq!(failed, 0, "ISA-L takes such buffers");
    }
}

/// The input of a recovery by ISA-L: the rows of the survivors, inverted; those of the lost
/// members, expanded.
///
/// # Safety
/// `library` is ISA-L.
unsafe fn tables(library: &Library) -> Result<Vec<u8>, libloading::Error> {
    const MEMBERS: usize = 8;
    let mut all = [0; (MEMBERS + 2) * MEMBERS];
    let (mut inverted, mut tables) = ([0; MEMBERS * MEMBERS], vec![0; 2 * MEMBERS * 32]);
    // SAFETY: the types are those of ISA-L's headers, and matrices have the sizes that it says.
    unsafe {
        let generate: Symbol<'_, Matrix> = library.get(b"gf_gen_rs_matrix")?;
        let invert: Symbol<'_, Invert> = library.get(b"gf_invert_matrix")?;
        let expand: Symbol<'_, Tables> = library.get(b"ec_init_tables")?;
        generate(all.as_mut_ptr(), 10, 8);
        let survivors = (0..MEMBERS + 2).filter(|row| !LOST.contains(row));
        let mut rows: Vec<u8> =
            survivors.flat_map(|row| all[row * MEMBERS..][..MEMBERS].to_vec()).collect();
        assert_eq!(invert(rows.as_mut_ptr(), inverted.as_mut_ptr(), 8), 0);
        let mut rows: Vec<u8> =
            LOST.iter().flat_map(|row| inverted[row * MEMBERS..][..MEMBERS].to_vec()).collect();
        expand(8, 2, rows.as_mut_ptr(), tables.as_mut_ptr());
    }
    Ok(tables)
}

/// A stripe as ISA-L is given it.
struct Pointers {
    all: Vec<*mut u8>,
    sources: usize,
}

/// Buffers aligned to pages, as those of a volume are.
struct Buffers {
    memory: Vec<Page>,
}

#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; PAGE]);

impl Buffers {
    fn new(bytes: usize) -> Self {
        let mut seed = 1u64;
        let mut memory = vec![Page([0; PAGE]); bytes / PAGE];
        for byte in memory.iter_mut().flat_map(|page| &mut page.0) {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (seed >> 56) as u8;
        }
        Self { memory }
    }

    fn all(&mut self) -> &mut [u8] {
        // SAFETY: pages are bytes.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.memory.as_mut_ptr().cast(),
                self.memory.len() * PAGE,
            )
        }
    }
}

/// Turns of one side: data bytes per second.
#[derive(Default)]
struct RoundTimes(Vec<f64>);

impl RoundTimes {
    fn add(
        &mut self,
        case: &Case,
        stripes: impl Iterator<Item = usize>,
        mut compute: impl FnMut(usize),
    ) {
        let (mut count, begun) = (0, Instant::now());
        for stripe in stripes {
            compute(black_box(stripe));
            count += 1;
        }
        let bytes = count * case.members * case.bytes;
        self.0.push(bytes as f64 / begun.elapsed().as_secs_f64());
    }

    fn json(&self) -> String {
        let (median, best) =
            (median(self.0.iter().copied()), self.0.iter().copied().fold(0.0, f64::max));
        format!("{{\"median\": {median:.0}, \"best\": {best:.0}}}")
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let seconds =
        words.first().and_then(|word| word.parse().ok()).expect("isal SECONDS [PLACE [ENGINE]]");
    let place = words.get(1).map_or("", String::as_str);
    let engine = parity::engines().find(|e| words.get(2).is_none_or(|name| e.name() == name));
    let parity = Parity::with_engine(engine.expect("this machine has that engine"));
    // SAFETY: loading ISA-L runs nothing of it.
    let library = unsafe { Library::new("libisal.so.2") }.expect("ISA-L is installed");
    let isal = IsaL::new(&library).expect("ISA-L has its functions");
    let mut cases = Vec::new();
    for (what, members) in CASES {
        for (bytes, in_memory) in BUFFER_PLACEMENTS {
            let case = Case { what, members, bytes, in_memory };
            if format!("{} {bytes} {}", case.name(), case.placement_name()).contains(place) {
                cases.push(measure(&case, &isal, parity, Duration::from_secs_f64(seconds)));
            }
        }
    }
    let engine = parity.engine().name();
    println!("{{\"engine\": \"{engine}\", \"cases\": [\n{}\n]}}", cases.join(",\n"));
}

/// A case as JSON.
fn measure(case: &Case, isal: &IsaL<'_>, parity: Parity, whole: Duration) -> String {
    let mut sources = Buffers::new(case.stripes() * case.members * case.bytes);
    let mut outputs = Buffers::new(case.stripes() * case.outputs() * case.bytes);
    if case.what == Computation::TwoData {
        make_parity(case, sources.all());
    }
    check_same_results(case, isal, parity, sources.all(), outputs.all());
    let (mut theirs, mut ours) = (RoundTimes::default(), RoundTimes::default());
    let begun = Instant::now();
    let mut round = 0;
    while begun.elapsed() < whole || round < 3 {
        for side in [round % 2, 1 - round % 2] {
            let turn = case.round_stripes(round, side);
            if side == 0 {
                let mut stripes = pointers(case, sources.all(), outputs.all());
                theirs.add(case, turn, |i| isal.compute(case.what, &mut stripes[i], case.bytes));
            } else {
                let mut stripes = slices(case, sources.all(), outputs.all());
                ours.add(case, turn, |i| compute(parity, case.what, &mut stripes[i]));
            }
        }
        round += 1;
    }
    let ratio = median(ours.0.iter().zip(&theirs.0).map(|(ours, theirs)| ours / theirs));
    let (name, place) = (case.name(), case.placement_name());
    let (bytes, theirs, ours) = (case.bytes, theirs.json(), ours.json());
    format!(
        "{{\"case\": \"{name}\", \"bytes\": {bytes}, \"place\": \"{place}\", \"ratio\": {ratio:.4}, \"isal\": {theirs}, \"ours\": {ours}}}"
    )
}

/// Both compute everything, and the same.
fn check_same_results(
    case: &Case,
    isal: &IsaL<'_>,
    parity: Parity,
    sources: &mut [u8],
    outputs: &mut [u8],
) {
    for stripe in &mut pointers(case, sources, outputs) {
        isal.compute(case.what, stripe, case.bytes);
    }
    let theirs = outputs.to_vec();
    outputs.fill(0);
    for stripe in &mut slices(case, sources, outputs) {
        compute(parity, case.what, stripe);
    }
    assert!(theirs == outputs, "{} differs from ISA-L's", case.name());
}

/// In each stripe, the last two sources become P and Q of those six and of two members that are
/// lost.
fn make_parity(case: &Case, sources: &mut [u8]) {
    let bytes = case.bytes;
    let lost: Vec<Vec<u8>> = (1..3).map(|seed| vec![seed; bytes]).collect();
    for stripe in sources.chunks_exact_mut(case.members * bytes) {
        let (data, pq) = stripe.split_at_mut(6 * bytes);
        let mut members: Vec<&[u8]> = data.chunks_exact(bytes).collect();
        members.insert(LOST[0], &lost[0]);
        members.insert(LOST[1], &lost[1]);
        let (p, q) = pq.split_at_mut(bytes);
        Parity::best().pq(&members, p, q);
    }
}

/// Stripes as ISA-L is given them.
fn pointers(case: &Case, sources: &mut [u8], outputs: &mut [u8]) -> Vec<Pointers> {
    let stripes = sources.chunks_exact_mut(case.members * case.bytes);
    stripes
        .zip(outputs.chunks_exact_mut(case.outputs() * case.bytes))
        .map(|(sources, outputs)| {
            let sources = sources.chunks_exact_mut(case.bytes);
            let all = sources.chain(outputs.chunks_exact_mut(case.bytes));
            Pointers { all: all.map(<[u8]>::as_mut_ptr).collect(), sources: case.members }
        })
        .collect()
}

/// A stripe as we are given it.
type Slices<'a> = (Vec<&'a [u8]>, Vec<&'a mut [u8]>);

fn slices<'a>(case: &Case, sources: &'a [u8], outputs: &'a mut [u8]) -> Vec<Slices<'a>> {
    let chunks = |stripe: &'a [u8]| stripe.chunks_exact(case.bytes).collect();
    let sources = sources.chunks_exact(case.members * case.bytes).map(chunks);
    let outputs = outputs.chunks_exact_mut(case.outputs() * case.bytes);
    sources.zip(outputs.map(|stripe| stripe.chunks_exact_mut(case.bytes).collect())).collect()
}

fn compute(parity: Parity, what: Computation, (sources, outputs): &mut Slices<'_>) {
    match (what, &mut outputs[..]) {
        (Computation::Xor, [p]) => parity.xor(sources, p),
        (Computation::Pq, [p, q]) => parity.pq(sources, p, q),
        (_, [low, high]) => {
            parity.recover_two_data(LOST, &sources[..6], [sources[6], sources[7]], [low, high]);
        }
        _ => unreachable!("there are one or two outputs"),
    }
}
