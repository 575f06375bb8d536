use proptest::prelude::*;

use super::*;
use crate::parse_page;

const LOG: LogId = LogId(42);
const A: Slot = Slot::ALL[0];

/// A log with `cells` cells, none of them dirty, as on disk.
fn bitmap(cells: u32) -> DirtyBitmap {
    let geometry = Geometry::new(u64::from(cells * REGIONS_PER_CELL) << 16).unwrap();
    let mut book = DirtyBitmap::new(SlotBitmaps::none(geometry), LOG, vec![0; cells as usize]);
    book.all_pages().iter().for_each(|page| book.note_durable(page));
    book
}

/// Marks `region` dirty, durably.
fn make_hot(book: &mut DirtyBitmap, region: Region) {
    if let PersistNeed::Page(page) = book.mark(region) {
        book.take_page(page);
        book.pages_written(true);
    }
    assert!(book.is_hot(region));
}

#[test]
fn a_mark_is_hot_when_its_page_is_durable() {
    let mut book = bitmap(9);
    let region = Region(8 * REGIONS_PER_CELL);
    assert_eq!(book.mark(region), PersistNeed::Page(1));
    assert!(book.bitmaps().is_set_in_all_slots(region) && !book.is_hot(region));
    let bytes = book.take_page(1);
    let cell = parse_page(&bytes, LOG, 1)[0].clone().unwrap();
    assert_eq!((cell.slots.map(|slot| slot[0]), cell.generation), ([1; 3], 1));
    assert_eq!(book.mark(region), PersistNeed::PageInFlight(1));
    assert!(!book.is_hot(region));
    book.pages_written(true);
    assert!(book.is_hot(region));
    assert_eq!(book.mark(region), PersistNeed::Nothing);
}

#[test]
fn an_unsynced_page_makes_no_region_hot() {
    let mut book = bitmap(1);
    assert_eq!(book.mark(Region(3)), PersistNeed::Page(0));
    book.take_page(0);
    book.pages_written(false);
    assert!(!book.is_hot(Region(3)));
    assert_eq!(book.mark(Region(3)), PersistNeed::Page(0));
}

#[test]
fn a_bit_set_again_before_its_page_is_written_needs_no_write() {
    let mut book = bitmap(1);
    make_hot(&mut book, Region(3));
    assert!(book.clear(A, Region(3)));
    assert!(!book.is_hot(Region(3)), "not in memory");
    assert_eq!(book.mark(Region(3)), PersistNeed::Nothing);
    assert!(book.is_hot(Region(3)));
}

#[test]
fn a_bit_set_again_during_the_write_without_it_needs_another_write() {
    let mut book = bitmap(1);
    make_hot(&mut book, Region(3));
    book.clear(A, Region(3));
    book.take_page(0);
    assert_eq!(book.mark(Region(3)), PersistNeed::Page(0), "the disk may hold a page without it");
    assert!(!book.is_hot(Region(3)));
    book.pages_written(true);
    assert!(!book.is_hot(Region(3)), "what came home is the page without it");
    assert_eq!(book.mark(Region(3)), PersistNeed::Page(0));
    book.take_page(0);
    book.pages_written(true);
    assert!(book.is_hot(Region(3)));
}

#[test]
fn a_bit_cleared_during_its_page_write_is_still_durable() {
    let mut book = bitmap(1);
    assert_eq!(book.mark(Region(3)), PersistNeed::Page(0));
    book.take_page(0);
    book.clear(A, Region(3));
    book.pages_written(true);
    assert!(!book.is_hot(Region(3)) && !book.unwritten_pages().is_empty());
    assert_eq!(book.mark(Region(3)), PersistNeed::Nothing);
}

#[test]
fn a_region_cleared_in_one_slot_is_not_hot() {
    let mut book = bitmap(1);
    make_hot(&mut book, Region(3));
    assert!(book.clear(A, Region(3)) && !book.clear(A, Region(3)));
    assert_eq!(book.bitmaps().count(Slot::ALL[1]), 1);
    assert!(!book.is_hot(Region(3)));
}

#[test]
fn merged_bits_are_written_even_if_none_is_new() {
    let mut book = bitmap(9);
    let theirs = |region| {
        let mut marks = SlotBitmaps::none(book_geometry());
        marks.set(A, Region(region));
        marks
    };
    assert_eq!(book.merge(A, &theirs(8 * 1280)), PageSet::NONE.with(1));
    book.take_page(1);
    assert_eq!(book.merge(A, &theirs(8 * 1280)), PageSet::NONE.with(1));
    assert_eq!(book.merge(A, &SlotBitmaps::none(book_geometry())), PageSet::NONE);
    assert_eq!(book.bitmaps().count(A), 1);
    assert_eq!(book.bitmaps().count(Slot::ALL[1]), 0);
}

fn book_geometry() -> Geometry {
    Geometry::new(u64::from(9 * REGIONS_PER_CELL) << 16).unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Mark(u32),
    Clear(usize, u32),
    Send(u32),
    Home(bool),
}

fn step() -> impl Strategy<Value = Step> {
    // Few regions, on two pages.
    let region = (0u32..2, 0u32..3).prop_map(|(page, n)| page * 8 * REGIONS_PER_CELL + n);
    prop_oneof![
        region.clone().prop_map(Step::Mark),
        (0usize..3, region).prop_map(|(slot, region)| Step::Clear(slot, region)),
        (0u32..2).prop_map(Step::Send),
        any::<bool>().prop_map(Step::Home),
    ]
}

/// A page on a disk: its possible contents after a crash.
struct Place {
    may_hold: Vec<[u8; PAGE_BYTES]>,
}

proptest! {
    /// A disk that may lose any write that was not synced.
    #[test]
    fn hot_regions_are_marked_in_every_possible_disk_state(
        steps in proptest::collection::vec(step(), 1..80),
    ) {
        let mut book = bitmap(9);
        let mut places: Vec<Place> =
            (0..2).map(|page| Place { may_hold: vec![book.take_page(page)] }).collect();
        book.pages_written(true);
        let mut out = [false; 2];
        for step in steps {
            match step {
                Step::Mark(region) => { book.mark(Region(region)); }
                Step::Clear(slot, region) => { book.clear(Slot::ALL[slot], Region(region)); }
                // One page at a time.
                Step::Send(page) if out[page as usize] => {}
                Step::Send(page) => {
                    places[page as usize].may_hold.push(book.take_page(page));
                    out[page as usize] = true;
                }
                Step::Home(synced) => {
                    for (place, out) in places.iter_mut().zip(&mut out) {
                        if synced && *out {
                            place.may_hold.drain(..place.may_hold.len() - 1);
                        }
                        *out = false;
                    }
                    book.pages_written(synced);
                }
            }
            for region in (0..2).flat_map(|page| (0..3).map(move |n| page * 10240 + n)) {
                let page = region / 10240;
                let certain = places[page as usize].may_hold.iter().all(|bytes| {
                    let cell = parse_page(bytes, LOG, page)[0].clone().unwrap();
                    cell.slots.iter().all(|slot| slot[0] & 1 << (region % 10240) != 0)
                });
                let durable = book.is_durable(Region(region));
                prop_assert!(certain || !durable, "{region} after {step:?}");
                let alone = places[page as usize].may_hold.len() == 1;
                prop_assert!(durable || !certain || !alone, "a needless write of {region}");
            }
        }
    }
}
