use block::{Blocks, Bufs, Epoch, Error, Lba, Pool};
use proptest::prelude::*;
use uuid::Uuid;

use super::lease::SHARED_BYTES;
use super::*;
use crate::{
    Change, Entry, Incarnation, Kind, Lineage, NodeId, Outcome, Role, Seq, SharedLineage, Stamp,
    Standing, Tag, View,
};

const MAX_DATA: u32 = 8192;

fn rules(line: Line) -> Rules {
    Rules { line, version: 1, max_data_bytes: MAX_DATA }
}

fn data(bytes: &[u8]) -> Bufs {
    let pool = Pool::new(bytes.len()).unwrap();
    let credit = pool.account().try_credit(bytes.len(), block::Class::Immediate).unwrap();
    rt::buf::copy_in(&credit, bytes)
}

fn bytes_of(message: Message) -> Result<Vec<u8>, Bad> {
    let mut queue = SendQueue::default();
    let line = Line::Lane(message.lane());
    Outgoing::new(rules(line)).push(message, &mut queue)?;
    Ok(queue.slices().flat_map(|s| s.to_vec()).collect())
}

#[derive(Debug, PartialEq, Eq)]
enum Unread {
    Torn,
    Bad(Bad),
}

/// Reads one frame as the driver does.
fn read(incoming: &mut Incoming, bytes: &[u8]) -> Result<(Message, usize), Unread> {
    let header = bytes.first_chunk().ok_or(Unread::Torn)?;
    let head = incoming.head(header).map_err(Unread::Bad)?;
    let len = head.body_bytes();
    let end = HEADER_BYTES + len;
    let body = bytes.get(HEADER_BYTES..end).ok_or(Unread::Torn)?;
    let pad = bytes.get(end..end + padding(len)).ok_or(Unread::Torn)?;
    check_padding(head.kind(), pad).map_err(Unread::Bad)?;
    let body = match head.needs() {
        Needs::Nothing => Body::Bytes(body.to_vec()),
        _ => Body::Data(if body.is_empty() { Bufs::new() } else { data(body) }),
    };
    Ok((head.message(body).map_err(Unread::Bad)?, end + padding(len)))
}

fn read_on(line: Line, bytes: &[u8]) -> Result<Message, Unread> {
    read(&mut Incoming::new(rules(line)), bytes).map(|(message, _)| message)
}

fn view() -> impl Strategy<Value = View> {
    (any::<u64>(), any::<u32>()).prop_map(|(epoch, round)| View { epoch: Epoch(epoch), round })
}

fn tag() -> impl Strategy<Value = Tag> {
    (any::<u16>(), any::<u64>()).prop_map(|(node, number)| Tag { node: NodeId(node), number })
}

fn range() -> impl Strategy<Value = Blocks> {
    (0..u64::MAX / 2, 1..=u32::MAX).prop_map(|(at, n)| Blocks::new(Lba(at), u64::from(n)))
}

fn kind() -> impl Strategy<Value = Kind> {
    let zero = any::<bool>().prop_map(|unmap| Kind::Zero { unmap });
    prop_oneof![Just(Kind::Write), zero]
}

/// `times` times a few blocks of `range`.
fn contents(times: usize) -> impl Strategy<Value = (Blocks, Bufs)> {
    (0..u64::MAX / 2, 1..5usize, 1..300usize, any::<u8>()).prop_map(move |(at, n, block, seed)| {
        let bytes: Vec<u8> = (0..n * block * times).map(|i| (i as u8).wrapping_mul(seed)).collect();
        (Blocks::new(Lba(at), n as u64), data(&bytes))
    })
}

fn change() -> impl Strategy<Value = Change> {
    let write = (contents(1), any::<bool>()).prop_map(|((range, data), fua)| Change {
        range,
        kind: Kind::Write,
        fua,
        data,
    });
    let zero = (range(), any::<bool>(), any::<bool>()).prop_map(|(range, unmap, fua)| Change {
        range,
        kind: Kind::Zero { unmap },
        fua,
        data: Bufs::new(),
    });
    prop_oneof![write, zero]
}

fn error() -> impl Strategy<Value = Error> {
    (0..9u8, any::<u64>()).prop_map(|(which, at)| match which {
        0 => Error::Unreadable { at: Lba(at) },
        1 => Error::Corrupt { at: Lba(at) },
        2 => Error::Unwritable { at: Lba(at) },
        3 => Error::OutOfRange,
        4 => Error::NoSpace,
        5 => Error::ReadOnly,
        6 => Error::Fenced,
        7 => Error::Aborted,
        _ => Error::Gone,
    })
}

fn standing() -> impl Strategy<Value = Message> {
    let roles = [Role::Unknown, Role::Member, Role::Returned, Role::Outside];
    let role = prop::sample::select(roles.to_vec());
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let draw = (any::<u64>(), any::<u64>(), any::<u128>(), role, flags, shared());
    draw.prop_map(|(incarnation, epoch, config, role, (clean, same_boot, older), shared)| {
        Message::Standing(Standing {
            incarnation: Incarnation(incarnation),
            epoch: Epoch(epoch),
            config,
            role,
            clean,
            same_boot,
            older,
            shared,
        })
    })
}

fn lineage() -> impl Strategy<Value = Lineage> {
    let draw = (any::<u64>(), any::<u32>());
    draw.prop_map(|(epoch, count)| Lineage { epoch: Epoch(epoch), count })
}

fn shared() -> impl Strategy<Value = SharedLineage> {
    (lineage(), lineage()).prop_map(|(reached, cleared)| SharedLineage { reached, cleared })
}

fn entry() -> impl Strategy<Value = Entry> {
    let draw = (view(), any::<u64>(), tag(), range(), kind(), any::<bool>());
    draw.prop_map(|(view, seq, tag, range, kind, fua)| Entry {
        view,
        seq: Seq(seq),
        tag,
        range,
        kind,
        fua,
    })
}

fn opening() -> impl Strategy<Value = Message> {
    let lease = |f: fn(Epoch, Incarnation, Stamp) -> Message| {
        (any::<u64>(), any::<u64>(), any::<u64>())
            .prop_map(move |(e, i, s)| f(Epoch(e), Incarnation(i), Stamp(s)))
    };
    prop_oneof![
        standing(),
        lease(|epoch, incarnation, stamp| Message::Renew { epoch, incarnation, stamp }),
        lease(|epoch, incarnation, stamp| Message::Promise { epoch, incarnation, stamp }),
        any::<u64>().prop_map(|epoch| Message::Newer { epoch: Epoch(epoch) }),
        (view(), any::<u64>())
            .prop_map(|(view, i)| Message::Yield { view, incarnation: Incarnation(i) }),
        (view(), any::<u64>())
            .prop_map(|(view, i)| Message::Yielded { view, incarnation: Incarnation(i) }),
        (view(), prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(view, record)| Message::Start { view, record }),
        (view(), prop::collection::vec(entry(), 0..9))
            .prop_map(|(view, entries)| Message::Started { view, entries }),
        (view(), any::<u64>(), prop::collection::vec(tag(), 0..9))
            .prop_map(|(view, seq, settled)| Message::Open { view, through: Seq(seq), settled }),
        view().prop_map(|view| Message::Rejoin { view }),
    ]
}

fn ordering() -> impl Strategy<Value = Message> {
    let outcome = prop_oneof![
        Just(Outcome::Done),
        any::<u64>().prop_map(|offset| Outcome::Miscompare { offset }),
        error().prop_map(Outcome::Failed),
    ];
    let zeroes = prop::collection::vec((0..u64::MAX / 2, 1..u64::MAX / 2), 0..9);
    prop_oneof![
        (view(), any::<u64>(), any::<u64>(), change()).prop_map(|(view, number, stamp, change)| {
            Message::Order { view, number, stamp: Stamp(stamp), change }
        }),
        (view(), any::<u64>(), any::<u64>()).prop_map(|(view, number, seq)| Message::Grant {
            view,
            number,
            seq: Seq(seq)
        }),
        (view(), any::<u64>()).prop_map(|(view, number)| Message::Done { view, number }),
        (view(), any::<u64>()).prop_map(|(view, number)| Message::Late { view, number }),
        (view(), any::<u64>(), tag(), any::<bool>(), change()).prop_map(
            |(view, seq, tag, copy, change)| Message::Write {
                view,
                seq: Seq(seq),
                tag,
                copy,
                change
            }
        ),
        (view(), any::<u64>()).prop_map(|(view, seq)| Message::Applied { view, seq: Seq(seq) }),
        (view(), prop::collection::vec(any::<u64>().prop_map(Seq), 0..9))
            .prop_map(|(view, seqs)| Message::Commit { view, seqs }),
        (view(), any::<u64>()).prop_map(|(view, seq)| Message::Want { view, seq: Seq(seq) }),
        (view(), any::<u64>()).prop_map(|(view, seq)| Message::NoSpace { view, seq: Seq(seq) }),
        (view(), any::<u64>(), any::<u64>()).prop_map(|(view, request, seq)| Message::Assess {
            view,
            request,
            seq: Seq(seq)
        }),
        (view(), any::<u64>(), any::<u64>(), prop::result::maybe_ok(zeroes, error())).prop_map(
            |(view, request, free_bytes, zeroes)| Message::Assessed {
                view,
                request,
                free_bytes,
                zeroes
            }
        ),
        (view(), any::<u64>(), any::<u64>(), contents(2), any::<bool>()).prop_map(
            |(view, number, stamp, (range, data), fua)| {
                Message::Forward { view, number, stamp: Stamp(stamp), range, fua, data }
            }
        ),
        (view(), any::<u64>(), outcome).prop_map(|(view, number, outcome)| Message::Outcome {
            view,
            number,
            outcome
        }),
    ]
}

fn asking() -> impl Strategy<Value = Message> {
    let contents = contents(1).prop_map(|(_, data)| data);
    let region = || (0..u64::MAX / 2, 1..u64::MAX / 2);
    let marks = (prop::collection::vec(any::<u8>(), 0..300), any::<u64>(), any::<u32>());
    prop_oneof![
        (view(), any::<u64>(), any::<u32>()).prop_map(|(view, request, lineage)| Message::Flush {
            view,
            request,
            lineage
        }),
        (view(), any::<u64>()).prop_map(|(view, request)| Message::Flushed { view, request }),
        (view(), any::<u64>(), range()).prop_map(|(view, request, range)| Message::Fetch {
            view,
            request,
            range
        }),
        (view(), any::<u64>(), prop::result::maybe_ok(contents, error()))
            .prop_map(|(view, request, result)| Message::Data { view, request, result }),
        (view(), range()).prop_map(|(view, range)| Message::Repair { view, range }),
        (any::<u64>(), any::<u64>(), marks, shared()).prop_map(
            |(incarnation, volume_bytes, marks, shared)| {
                let (marks, epoch, region_shift) = marks;
                let (incarnation, epoch) = (Incarnation(incarnation), Epoch(epoch));
                Message::Join { incarnation, epoch, volume_bytes, region_shift, shared, marks }
            }
        ),
        (view(), any::<u64>(), prop::collection::vec((any::<u128>(), lineage()), 0..=MAX_REACHED))
            .prop_map(|(view, incarnation, reached)| {
                let reached = reached.into_iter().map(|(image, l)| (Uuid::from_u128(image), l));
                let incarnation = Incarnation(incarnation);
                Message::Accept { view, incarnation, reached: reached.collect() }
            }),
        any::<u64>().prop_map(|i| Message::Detached { incarnation: Incarnation(i) }),
        (view(), any::<u64>(), prop::collection::vec(region(), 0..9))
            .prop_map(|(view, request, regions)| Message::Clear { view, request, regions }),
        (view(), prop::collection::vec(region(), 0..9))
            .prop_map(|(view, regions)| Message::Marked { view, regions }),
        (view(), any::<u16>())
            .prop_map(|(view, node)| Message::Unreachable { view, node: NodeId(node) }),
        (view(), any::<u64>(), range()).prop_map(|(view, request, range)| Message::Sum {
            view,
            request,
            range
        }),
        (view(), any::<u64>(), prop::result::maybe_ok(any::<[u8; 32]>(), error()))
            .prop_map(|(view, request, result)| Message::Summed { view, request, result }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![opening(), ordering(), asking()]
}

/// The same but for what `Debug` says of buffers; their contents are compared as bytes.
fn said(message: &Message) -> String {
    format!("{message:?}")
}

proptest! {
    #[test]
    fn every_message_comes_back(message in message()) {
        let line = Line::Lane(message.lane());
        let bytes = bytes_of(message.clone()).unwrap();
        prop_assert!(bytes.len().is_multiple_of(ALIGN_BYTES));
        let back = read_on(line, &bytes).unwrap();
        prop_assert_eq!(said(&back), said(&message));
        prop_assert_eq!(bytes_of(back).unwrap(), bytes, "contents");
    }

    #[test]
    fn torn_anywhere_it_is_not_whole(message in message()) {
        let line = Line::Lane(message.lane());
        let bytes = bytes_of(message).unwrap();
        for end in 0..bytes.len() {
            prop_assert_eq!(read_on(line, &bytes[..end]).unwrap_err(), Unread::Torn, "at {}", end);
        }
    }

    #[test]
    fn no_flipped_bit_goes_unnoticed(message in message(), place: prop::sample::Index) {
        let line = Line::Lane(message.lane());
        let mut bytes = bytes_of(message).unwrap();
        let bit = place.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        // Never torn: the length is judged after the checksum that covers it.
        prop_assert!(matches!(read_on(line, &bytes), Err(Unread::Bad(_))), "bit {bit}");
    }

    /// Whatever a header with a right checksum says: it is refused, or it is what is written for the
    /// message that it makes.
    #[test]
    fn bytes_have_one_meaning(
        mut bytes in prop::collection::vec(any::<u8>(), 64..400),
        kind in 0..45u8,
        lane in 0..4usize,
        sparse: bool,
    ) {
        if sparse {
            bytes[16..28].fill(0);
            bytes[32..64].iter_mut().step_by(2).for_each(|b| *b = 0);
        }
        let line = [Lane::Control, Lane::Down, Lane::Up].map(Line::Lane);
        let line = *line.get(lane).unwrap_or(&Line::Lease);
        let body = (bytes.len() - HEADER_BYTES) / ALIGN_BYTES * ALIGN_BYTES;
        sign(&mut bytes, kind, body);
        if let Ok(message) = read_on(line, &bytes) {
            let again = bytes_of(message).unwrap();
            prop_assert_eq!(&again[..], &bytes[..again.len()]);
        }
    }
}

/// Makes a frame of `bytes` that is right but for what its fields say.
fn sign(bytes: &mut [u8], kind: u8, body: usize) {
    bytes[..4].copy_from_slice(&[b'W', b'P', 1, kind]);
    bytes[8..12].copy_from_slice(&(body as u32).to_le_bytes());
    bytes[28..32].fill(0);
    let sum = wire::crc32c(&bytes[HEADER_BYTES..HEADER_BYTES + body]);
    bytes[12..16].copy_from_slice(&sum.to_le_bytes());
    sign_header(bytes);
}

fn sign_header(bytes: &mut [u8]) {
    bytes[4..8].fill(0);
    let sum = wire::crc32c(&bytes[..HEADER_BYTES]);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
}

fn applied() -> Vec<u8> {
    bytes_of(Message::Applied { view: View::default(), seq: Seq(1) }).unwrap()
}

#[test]
fn what_is_wrong_is_said_by_name() {
    let control = Line::Lane(Lane::Control);
    let of = |at: usize, byte: u8| {
        let mut bytes = applied();
        bytes[at] = byte;
        sign_header(&mut bytes);
        read_on(control, &bytes).unwrap_err()
    };
    let kind = Type::Applied;
    assert_eq!(of(0, b'X'), Unread::Bad(Bad::NoMagic));
    assert_eq!(of(2, 2), Unread::Bad(Bad::Version(2)));
    for unknown in [6, 9, 12, 15, 26, 45, 255] {
        assert_eq!(of(3, unknown), Unread::Bad(Bad::Type(Type(unknown))));
    }
    assert_eq!(of(3, 1), Unread::Bad(Bad::Type(Type::Hello)), "once is enough");
    assert_eq!(of(3, 20), Unread::Bad(Bad::Line { kind: Type::Write, line: control }));
    let limit = 0;
    assert_eq!(of(8, 1), Unread::Bad(Bad::TooLong { kind, bytes: 1, limit }));
    assert_eq!(of(28, 1), Unread::Bad(Bad::Gap { expected: 0, got: 1 }));
    for unused in [40, 48, 56, 60, 62, 63] {
        assert_eq!(of(unused, 1), Unread::Bad(Bad::Reserved(kind)), "byte {unused}");
    }
    let mut damaged = applied();
    damaged[32] ^= 1;
    assert_eq!(read_on(control, &damaged).unwrap_err(), Unread::Bad(Bad::HeaderChecksum));
    let up = Line::Lane(Lane::Up);
    assert_eq!(read_on(up, &applied()).unwrap_err(), Unread::Bad(Bad::Line { kind, line: up }));
}

#[test]
fn a_lease_connection_carries_leases_and_nothing_else() {
    let renew = Message::Renew { epoch: Epoch(1), incarnation: Incarnation(2), stamp: Stamp(3) };
    let bytes = bytes_of(renew).unwrap();
    assert!(read_on(Line::Lease, &bytes).is_ok());
    let bad = Bad::Line { kind: Type::Applied, line: Line::Lease };
    assert_eq!(read_on(Line::Lease, &applied()).unwrap_err(), Unread::Bad(bad));
}

#[test]
fn frames_are_counted_and_one_that_is_there_twice_is_found() {
    let mut queue = SendQueue::default();
    let mut outgoing = Outgoing::new(rules(Line::Lane(Lane::Control)));
    for seq in 0..3 {
        let message = Message::Applied { view: View::default(), seq: Seq(seq) };
        outgoing.push(message, &mut queue).unwrap();
    }
    let bytes: Vec<u8> = queue.slices().flat_map(|s| s.to_vec()).collect();
    let mut incoming = Incoming::new(rules(Line::Lane(Lane::Control)));
    for frame in bytes.chunks(HEADER_BYTES) {
        read(&mut incoming, frame).unwrap();
    }
    let again = read(&mut incoming, &bytes[2 * HEADER_BYTES..]).unwrap_err();
    assert_eq!(again, Unread::Bad(Bad::Gap { expected: 3, got: 2 }));
}

/// No header makes its reader lay out more memory than its type may need.
#[test]
fn bodies_are_bounded_by_their_type() {
    let most = [
        (Type::Start, MAX_RECORD_BYTES, 0),
        (Type::Started, MAX_ENTRIES * 48, MAX_ENTRIES),
        (Type::Open, MAX_TAGS * 16, MAX_TAGS),
        (Type::Commit, MAX_SEQS * 8, MAX_SEQS),
        (Type::Clear, MAX_REGIONS * 16, MAX_REGIONS),
        (Type::Marked, MAX_REGIONS * 16, MAX_REGIONS),
        (Type::Assessed, MAX_REGIONS * 16, MAX_REGIONS),
        (Type::Join, SHARED_BYTES + MAX_MARK_BYTES, 20),
        (Type::Accept, MAX_REACHED * 32, MAX_REACHED),
        (Type::Write, MAX_DATA as usize, 1),
        (Type::Order, MAX_DATA as usize, 1),
        (Type::Forward, 2 * MAX_DATA as usize, 1),
        (Type::Data, MAX_DATA as usize, 0),
    ];
    for (kind, bytes, count) in most {
        let head = |bytes: usize, count: usize| {
            let header = Header {
                fields: Fields::new(kind).count(count),
                version: 1,
                number: 0,
                length: bytes as u32,
                body_checksum: 0,
            };
            let line = Line::Lane(kind.lane().unwrap());
            Incoming::new(rules(line)).head(&header.to_bytes()).map(|head| head.body_bytes())
        };
        assert_eq!(head(bytes, count), Ok(bytes), "{kind:?}");
        let (item, lists) = (bytes / count.max(1), count > 20);
        let (more, counted) = if lists { (bytes + item, count + 1) } else { (bytes + 1, count) };
        let bad = Bad::TooLong { kind, bytes: more as u64, limit: bytes as u64 };
        assert_eq!(head(more, counted), Err(bad));
        assert!(matches!(head(u32::MAX as usize, counted), Err(Bad::TooLong { .. })));
    }
}

/// The other side would end the session over it, so ours does.
#[test]
fn what_would_be_refused_is_not_sent() {
    let view = View::default();
    let write = |range, kind, data| {
        let change = Change { range, kind, fua: false, data };
        let (seq, tag) = (Seq(0), Tag::default());
        bytes_of(Message::Write { view, seq, tag, copy: false, change }).unwrap_err()
    };
    let block = Blocks::new(Lba(0), 1);
    let kind = Type::Write;
    let too_long = MAX_DATA as usize + 1;
    let bad = Bad::TooLong { kind, bytes: too_long as u64, limit: u64::from(MAX_DATA) };
    assert_eq!(write(block, Kind::Write, Bufs::zeroes(too_long)), bad);
    assert_eq!(write(block, Kind::Write, Bufs::new()), Bad::Length { kind, bytes: 0 });
    let three = Blocks::new(Lba(0), 3);
    assert_eq!(write(three, Kind::Write, Bufs::zeroes(1024)), Bad::Length { kind, bytes: 1024 });
    let ranges =
        [Blocks::new(Lba(0), 0), Blocks::new(Lba(u64::MAX), 1), Blocks::new(Lba(0), 1 << 32)];
    for range in ranges {
        let zero = Kind::Zero { unmap: true };
        assert_eq!(write(range, zero, Bufs::new()), Bad::Field(kind, "range"));
    }
    let record = vec![0; MAX_RECORD_BYTES + 1];
    assert!(matches!(bytes_of(Message::Start { view, record }), Err(Bad::TooLong { .. })));
    let seqs = vec![Seq(0); MAX_SEQS + 1];
    assert!(matches!(bytes_of(Message::Commit { view, seqs }), Err(Bad::TooLong { .. })));
}

/// Every message once, with fields that differ: the golden bytes of `docs/format/peer.md`.
fn join(view: View, incarnation: Incarnation, shared: SharedLineage) -> Message {
    let (epoch, volume_bytes, region_shift) = (view.epoch, 8 << 16, 16);
    let marks = vec![0xcc];
    Message::Join { incarnation, epoch, volume_bytes, region_shift, shared, marks }
}

fn samples() -> Vec<Message> {
    let view = View { epoch: Epoch(0x11), round: 0x22 };
    let (incarnation, stamp) = (Incarnation(0x33), Stamp(0x44));
    let (number, seq, request) = (0x55, Seq(0x66), 0x77);
    let tag = Tag { node: NodeId(2), number };
    let range = Blocks::new(Lba(0x88), 1);
    let written = |byte| data(&[byte; 8]);
    let change = Change { range, kind: Kind::Write, fua: true, data: written(0xaa) };
    let zeroed = Change {
        kind: Kind::Zero { unmap: true },
        fua: false,
        data: Bufs::new(),
        ..change.clone()
    };
    let lineage = |count| Lineage { epoch: Epoch(0x11), count };
    let shared = SharedLineage { reached: lineage(0xee), cleared: lineage(0xed) };
    let standing = Standing {
        incarnation,
        epoch: Epoch(0x11),
        config: 0x99,
        role: Role::Returned,
        clean: true,
        same_boot: true,
        older: true,
        shared,
    };
    let entry = Entry { view, seq, tag, range, kind: Kind::Write, fua: true };
    let gone = Error::Unreadable { at: Lba(0x88) };
    vec![
        Message::Standing(standing),
        Message::Renew { epoch: view.epoch, incarnation, stamp },
        Message::Promise { epoch: view.epoch, incarnation, stamp },
        Message::Newer { epoch: view.epoch },
        Message::Yield { view, incarnation },
        Message::Yielded { view, incarnation },
        Message::Start { view, record: b"{}".to_vec() },
        Message::Started { view, entries: vec![entry] },
        Message::Open { view, through: seq, settled: vec![tag] },
        Message::Rejoin { view },
        Message::Order { view, number, stamp, change: zeroed },
        Message::Grant { view, number, seq },
        Message::Done { view, number },
        Message::Late { view, number },
        Message::Write { view, seq, tag, copy: true, change },
        Message::Applied { view, seq },
        Message::Commit { view, seqs: vec![seq] },
        Message::Want { view, seq },
        Message::Forward { view, number, stamp, range, fua: true, data: written(0xbb) },
        Message::Outcome { view, number, outcome: Outcome::Miscompare { offset: 5 } },
        Message::Flush { view, request, lineage: 0xee },
        Message::Flushed { view, request },
        Message::Fetch { view, request, range },
        Message::Data { view, request, result: Err(gone) },
        Message::Repair { view, range },
        join(view, incarnation, shared),
        Message::Accept {
            view,
            incarnation,
            reached: vec![(Uuid::from_u128(0xff), shared.reached)],
        },
        Message::Detached { incarnation },
        Message::Clear { view, request, regions: vec![(0, 0x1_0000)] },
        Message::Marked { view, regions: vec![(0, 0x1_0000)] },
        Message::Unreachable { view, node: NodeId(3) },
        Message::Sum { view, request, range },
        Message::Summed { view, request, result: Ok([0xdd; 32]) },
        Message::NoSpace { view, seq },
        Message::Assess { view, request, seq },
        Message::Assessed { view, request, free_bytes: 0x1000, zeroes: Ok(vec![(0x88, 2)]) },
    ]
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.chunks(16).fold(String::new(), |mut out, line| {
        for part in line.chunks(4) {
            part.iter().for_each(|b| write!(out, "{b:02x}").expect("a string takes all"));
            out.push(' ');
        }
        out.truncate(out.trim_end().len());
        out + "\n"
    })
}

/// `insta` keeps them: what is on the wire does not change unnoticed.
#[test]
fn the_bytes_of_every_message_stay() {
    let mut golden = String::new();
    for message in samples() {
        let bytes = bytes_of(message).unwrap();
        golden += &format!("{:?}\n{}\n", Type(bytes[3]), hex(&bytes));
    }
    insta::assert_snapshot!("messages", golden);
}

fn hello() -> Hello {
    Hello {
        min_version: 1,
        max_version: 1,
        line: Line::Lane(Lane::Down),
        max_data_bytes: MAX_DATA_BYTES,
        features: 0x11,
        cluster: Uuid::from_u128(0x22),
        volume: Uuid::from_u128(0x33),
        session: 0x44,
        from: NodeId(2),
        to: NodeId(1),
        challenge: [0x55; 32],
    }
}

#[test]
fn the_bytes_of_the_handshake_stay() {
    let frames = [
        ("Hello", hello().to_frame()),
        ("Proof", HandshakeFrame::proof([0x66; 32])),
        ("Ready", HandshakeFrame::ready()),
        ("Refused", HandshakeFrame::refused(Refusal::Volume)),
    ];
    let golden: String =
        frames.iter().map(|(name, bytes)| format!("{name}\n{}\n", hex(bytes))).collect();
    insta::assert_snapshot!("handshake", golden);
}

fn read_handshake(bytes: &[u8]) -> Result<HandshakeFrame, Bad> {
    let header = bytes.first_chunk().expect("a header");
    let body = HandshakeFrame::body_bytes(header)?;
    HandshakeFrame::parse(header, &bytes[HEADER_BYTES..HEADER_BYTES + body])
}

#[test]
fn a_handshake_comes_back_and_no_flipped_bit_goes_unnoticed() {
    let frames = [
        (HandshakeFrame::Hello(hello(), hello().to_bytes()), hello().to_frame()),
        (HandshakeFrame::Proof([3; 32]), HandshakeFrame::proof([3; 32])),
        (HandshakeFrame::Ready, HandshakeFrame::ready()),
        (HandshakeFrame::Refused(Refusal(99)), HandshakeFrame::refused(Refusal(99))),
    ];
    for (frame, bytes) in frames {
        assert_eq!(read_handshake(&bytes), Ok(frame));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(read_handshake(&flipped).is_err(), "bit {bit}");
        }
    }
}

/// A HELLO of a later release says more, and is understood as far as it goes.
#[test]
fn a_longer_hello_is_heard() {
    let mut body = hello().to_bytes();
    body.extend([7; 100]);
    assert_eq!(Hello::parse(&body), Ok(hello()));
    assert_eq!(Hello::parse(&body[..103]), Err(Bad::Field(Type::Hello, "length")));
    body[3] = 1;
    assert_eq!(Hello::parse(&body), Err(Bad::Reserved(Type::Hello)));
}
