use block::{Blocks, BufferPool, Bufs, Epoch, Error, Lba};
use proptest::prelude::*;
use uuid::Uuid;

use super::lease::PEER_GENERATIONS_BYTES;
use super::*;
use crate::{
    ClockStamp, CompareAndWriteOutcome, DataGeneration, Incarnation, NodeId, PeerGenerations,
    PreparedEntry, ReplicaReport, Role, Seq, View, WriteId, WriteKind, WriteOp,
};

const MAX_DATA: u32 = 8192;

fn rules(purpose: ConnectionPurpose) -> ConnectionParams {
    ConnectionParams { purpose, version: 1, max_data_bytes: MAX_DATA }
}

fn data(bytes: &[u8]) -> Bufs {
    let pool = BufferPool::new(bytes.len()).unwrap();
    let credit = pool.account().try_credit(bytes.len(), block::MemoryClass::LocalIo).unwrap();
    rt::buf::copy_in(&credit, bytes)
}

fn bytes_of(message: Message) -> Result<Vec<u8>, FrameError> {
    let mut queue = SendQueue::default();
    let purpose = ConnectionPurpose::Lane(message.lane());
    FrameEncoder::new(rules(purpose)).encode(message, &mut queue)?;
    Ok(queue.slices().flat_map(|s| s.to_vec()).collect())
}

#[derive(Debug, PartialEq, Eq)]
enum Unread {
    Torn,
    Bad(FrameError),
}

/// Decodes one frame as the driver does.
fn read(incoming: &mut FrameDecoder, bytes: &[u8]) -> Result<(Message, usize), Unread> {
    let header = bytes.first_chunk().ok_or(Unread::Torn)?;
    let head = incoming.decode_header(header).map_err(Unread::Bad)?;
    let len = head.body_bytes();
    let end = HEADER_BYTES + len;
    let body = bytes.get(HEADER_BYTES..end).ok_or(Unread::Torn)?;
    let pad = bytes.get(end..end + padding(len)).ok_or(Unread::Torn)?;
    check_padding(head.kind(), pad).map_err(Unread::Bad)?;
    let body = match head.needs() {
        BodyNeeds::Heap => FrameBody::Bytes(body.to_vec()),
        _ => FrameBody::Data(if body.is_empty() { Bufs::new() } else { data(body) }),
    };
    Ok((head.message(body).map_err(Unread::Bad)?, end + padding(len)))
}

fn read_on(purpose: ConnectionPurpose, bytes: &[u8]) -> Result<Message, Unread> {
    read(&mut FrameDecoder::new(rules(purpose)), bytes).map(|(message, _)| message)
}

fn view() -> impl Strategy<Value = View> {
    (any::<u64>(), any::<u32>()).prop_map(|(epoch, round)| View { epoch: Epoch(epoch), round })
}

fn tag() -> impl Strategy<Value = WriteId> {
    (any::<u16>(), any::<u64>()).prop_map(|(node, number)| WriteId { origin: NodeId(node), number })
}

fn range() -> impl Strategy<Value = Blocks> {
    (0..u64::MAX / 2, 1..=u32::MAX).prop_map(|(at, n)| Blocks::new(Lba(at), u64::from(n)))
}

fn kind() -> impl Strategy<Value = WriteKind> {
    let zero = any::<bool>().prop_map(|unmap| WriteKind::Zero { unmap });
    prop_oneof![Just(WriteKind::Data), zero]
}

/// `times` times a few blocks of `range`.
fn contents(times: usize) -> impl Strategy<Value = (Blocks, Bufs)> {
    (0..u64::MAX / 2, 1..5usize, 1..300usize, any::<u8>()).prop_map(move |(at, n, block, seed)| {
        let bytes: Vec<u8> = (0..n * block * times).map(|i| (i as u8).wrapping_mul(seed)).collect();
        (Blocks::new(Lba(at), n as u64), data(&bytes))
    })
}

fn change() -> impl Strategy<Value = WriteOp> {
    let write = (contents(1), any::<bool>()).prop_map(|((range, data), fua)| WriteOp {
        range,
        kind: WriteKind::Data,
        fua,
        data,
    });
    let zero = (range(), any::<bool>(), any::<bool>()).prop_map(|(range, unmap, fua)| WriteOp {
        range,
        kind: WriteKind::Zero { unmap },
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
    let roles = [Role::Unknown, Role::Member, Role::Restarted, Role::OutOfSync];
    let role = prop::sample::select(roles.to_vec());
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let draw = (any::<u64>(), any::<u64>(), any::<u128>(), role, flags, shared());
    draw.prop_map(
        |(
            incarnation,
            epoch,
            config_id,
            role,
            (is_clean, same_boot, is_rolled_back),
            generations,
        )| {
            Message::ReplicaReport(ReplicaReport {
                incarnation: Incarnation(incarnation),
                epoch: Epoch(epoch),
                config_id,
                role,
                is_clean,
                same_boot,
                is_rolled_back,
                generations,
            })
        },
    )
}

fn lineage() -> impl Strategy<Value = DataGeneration> {
    let draw = (any::<u64>(), any::<u32>());
    draw.prop_map(|(epoch, count)| DataGeneration { epoch: Epoch(epoch), count })
}

fn shared() -> impl Strategy<Value = PeerGenerations> {
    (lineage(), lineage())
        .prop_map(|(common, last_cleared)| PeerGenerations { common, last_cleared })
}

fn entry() -> impl Strategy<Value = PreparedEntry> {
    let draw = (view(), any::<u64>(), tag(), range(), kind(), any::<bool>());
    draw.prop_map(|(view, seq, write_id, range, kind, fua)| PreparedEntry {
        view,
        seq: Seq(seq),
        write_id,
        range,
        kind,
        fua,
    })
}

fn opening() -> impl Strategy<Value = Message> {
    let lease = |f: fn(Epoch, Incarnation, ClockStamp) -> Message| {
        (any::<u64>(), any::<u64>(), any::<u64>())
            .prop_map(move |(e, i, s)| f(Epoch(e), Incarnation(i), ClockStamp(s)))
    };
    prop_oneof![
        standing(),
        lease(|epoch, incarnation, stamp| Message::LeaseRequest { epoch, incarnation, stamp }),
        lease(|epoch, incarnation, stamp| Message::LeaseGrant { epoch, incarnation, stamp }),
        any::<u64>().prop_map(|epoch| Message::NewerEpoch { epoch: Epoch(epoch) }),
        (view(), any::<u64>())
            .prop_map(|(view, i)| Message::RevokeLease { view, incarnation: Incarnation(i) }),
        (view(), any::<u64>())
            .prop_map(|(view, i)| Message::LeaseRevoked { view, incarnation: Incarnation(i) }),
        (view(), prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(view, config)| Message::StartViewChange { view, config }),
        (view(), prop::collection::vec(entry(), 0..9))
            .prop_map(|(view, entries)| Message::DoViewChange { view, entries }),
        (view(), any::<u64>(), prop::collection::vec(tag(), 0..9)).prop_map(
            |(view, seq, committed)| Message::StartView { view, last_seq: Seq(seq), committed }
        ),
        view().prop_map(|view| Message::Rejoin { view }),
    ]
}

fn ordering() -> impl Strategy<Value = Message> {
    let outcome = prop_oneof![
        Just(CompareAndWriteOutcome::Done),
        any::<u64>().prop_map(|offset| CompareAndWriteOutcome::Miscompare { offset }),
        error().prop_map(CompareAndWriteOutcome::Failed),
    ];
    let zero_blocks = prop::collection::vec((0..u64::MAX / 2, 1..u64::MAX / 2), 0..9);
    prop_oneof![
        (view(), any::<u64>(), any::<u64>(), change()).prop_map(|(view, number, stamp, op)| {
            Message::WriteRequest { view, number, stamp: ClockStamp(stamp), op }
        }),
        (view(), any::<u64>(), any::<u64>()).prop_map(|(view, number, seq)| Message::OpAssigned {
            view,
            number,
            seq: Seq(seq)
        }),
        (view(), any::<u64>()).prop_map(|(view, number)| Message::PeersApplied { view, number }),
        (view(), any::<u64>()).prop_map(|(view, number)| Message::RetryRequest { view, number }),
        (view(), any::<u64>(), tag(), any::<bool>(), change()).prop_map(
            |(view, seq, write_id, is_copy, op)| Message::Write {
                view,
                seq: Seq(seq),
                write_id,
                is_copy,
                op
            }
        ),
        (view(), any::<u64>()).prop_map(|(view, seq)| Message::Applied { view, seq: Seq(seq) }),
        (view(), prop::collection::vec(any::<u64>().prop_map(Seq), 0..9))
            .prop_map(|(view, seqs)| Message::Commit { view, seqs }),
        (view(), any::<u64>())
            .prop_map(|(view, seq)| Message::RequestCommit { view, seq: Seq(seq) }),
        (view(), any::<u64>()).prop_map(|(view, seq)| Message::NoSpace { view, seq: Seq(seq) }),
        (view(), any::<u64>(), any::<u64>()).prop_map(|(view, request, seq)| {
            Message::NoSpaceQuery { view, request, seq: Seq(seq) }
        }),
        (view(), any::<u64>(), any::<u64>(), prop::result::maybe_ok(zero_blocks, error()))
            .prop_map(|(view, request, free_bytes, zero_blocks)| Message::NoSpaceReport {
                view,
                request,
                free_bytes,
                zero_blocks
            }),
        (view(), any::<u64>(), any::<u64>(), contents(2), any::<bool>()).prop_map(
            |(view, number, stamp, (range, data), fua)| {
                Message::CompareAndWrite {
                    view,
                    number,
                    stamp: ClockStamp(stamp),
                    range,
                    fua,
                    data,
                }
            }
        ),
        (view(), any::<u64>(), outcome).prop_map(|(view, number, outcome)| {
            Message::CompareAndWriteResult { view, number, outcome }
        }),
    ]
}

fn asking() -> impl Strategy<Value = Message> {
    let contents = contents(1).prop_map(|(_, data)| data);
    let region = || (0..u64::MAX / 2, 1..u64::MAX / 2);
    let dirty_bits = (prop::collection::vec(any::<u8>(), 0..300), any::<u64>(), any::<u32>());
    prop_oneof![
        (view(), any::<u64>(), any::<u32>())
            .prop_map(|(view, request, generation)| Message::Flush { view, request, generation }),
        (view(), any::<u64>()).prop_map(|(view, request)| Message::Flushed { view, request }),
        (view(), any::<u64>(), range()).prop_map(|(view, request, range)| Message::Fetch {
            view,
            request,
            range
        }),
        (view(), any::<u64>(), prop::result::maybe_ok(contents, error()))
            .prop_map(|(view, request, result)| Message::FetchResult { view, request, result }),
        (view(), range()).prop_map(|(view, range)| Message::RepairRange { view, range }),
        (any::<u64>(), any::<u64>(), dirty_bits, shared()).prop_map(
            |(incarnation, volume_bytes, dirty_bits, generations)| {
                let (dirty_bits, epoch, region_shift) = dirty_bits;
                let (incarnation, epoch) = (Incarnation(incarnation), Epoch(epoch));
                Message::Join {
                    incarnation,
                    epoch,
                    volume_bytes,
                    region_shift,
                    generations,
                    dirty_bits,
                }
            }
        ),
        (
            view(),
            any::<u64>(),
            prop::collection::vec((any::<u128>(), lineage()), 0..=MAX_GENERATIONS)
        )
            .prop_map(|(view, incarnation, generations)| {
                let generations =
                    generations.into_iter().map(|(image, l)| (Uuid::from_u128(image), l));
                let incarnation = Incarnation(incarnation);
                Message::JoinAccepted { view, incarnation, generations: generations.collect() }
            }),
        any::<u64>().prop_map(|i| Message::JoinAborted { incarnation: Incarnation(i) }),
        (view(), any::<u64>(), prop::collection::vec(region(), 0..9))
            .prop_map(|(view, request, regions)| Message::ClearRegions { view, request, regions }),
        (view(), prop::collection::vec(region(), 0..9))
            .prop_map(|(view, regions)| Message::IdleDirtyRegions { view, regions }),
        (view(), any::<u16>())
            .prop_map(|(view, node)| Message::PeerUnreachable { view, node: NodeId(node) }),
        (view(), any::<u64>(), range()).prop_map(|(view, request, range)| Message::Digest {
            view,
            request,
            range
        }),
        (view(), any::<u64>(), prop::result::maybe_ok(any::<[u8; 32]>(), error()))
            .prop_map(|(view, request, result)| Message::DigestResult { view, request, result }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![opening(), ordering(), asking()]
}

/// As `Debug`, except for buffers; their contents are compared as bytes.
fn said(message: &Message) -> String {
    format!("{message:?}")
}

proptest! {
    #[test]
    fn each_message_round_trips(message in message()) {
        let purpose = ConnectionPurpose::Lane(message.lane());
        let bytes = bytes_of(message.clone()).unwrap();
        prop_assert!(bytes.len().is_multiple_of(ALIGN_BYTES));
        let back = read_on(purpose, &bytes).unwrap();
        prop_assert_eq!(said(&back), said(&message));
        prop_assert_eq!(bytes_of(back).unwrap(), bytes, "contents");
    }

    #[test]
    fn a_truncated_frame_is_incomplete(message in message()) {
        let purpose = ConnectionPurpose::Lane(message.lane());
        let bytes = bytes_of(message).unwrap();
        for end in 0..bytes.len() {
            prop_assert_eq!(read_on(purpose, &bytes[..end]).unwrap_err(), Unread::Torn, "at {}", end);
        }
    }

    #[test]
    fn each_flipped_bit_is_detected(message in message(), index: prop::sample::Index) {
        let purpose = ConnectionPurpose::Lane(message.lane());
        let mut bytes = bytes_of(message).unwrap();
        let bit = index.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        // Never torn: the length is checked after the checksum that covers it.
        prop_assert!(matches!(read_on(purpose, &bytes), Err(Unread::Bad(_))), "bit {bit}");
    }

    /// A header with a right checksum is either refused, or it equals the encoding of the message
    /// that it decodes to.
    #[test]
    fn each_frame_has_one_encoding(
        mut bytes in prop::collection::vec(any::<u8>(), 64..400),
        kind in 0..45u8,
        lane in 0..4usize,
        sparse: bool,
    ) {
        if sparse {
            bytes[16..28].fill(0);
            bytes[32..64].iter_mut().step_by(2).for_each(|b| *b = 0);
        }
        let purpose = [Lane::Control, Lane::Replication, Lane::Requests].map(ConnectionPurpose::Lane);
        let purpose = *purpose.get(lane).unwrap_or(&ConnectionPurpose::Lease);
        let body = (bytes.len() - HEADER_BYTES) / ALIGN_BYTES * ALIGN_BYTES;
        sign(&mut bytes, kind, body);
        if let Ok(message) = read_on(purpose, &bytes) {
            let again = bytes_of(message).unwrap();
            prop_assert_eq!(&again[..], &bytes[..again.len()]);
        }
    }
}

/// Makes a frame of `bytes` that is valid except for the values of its fields.
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
fn invalid_frames_are_refused_with_a_reason() {
    let control = ConnectionPurpose::Lane(Lane::Control);
    let of = |at: usize, byte: u8| {
        let mut bytes = applied();
        bytes[at] = byte;
        sign_header(&mut bytes);
        read_on(control, &bytes).unwrap_err()
    };
    let kind = FrameType::Applied;
    assert_eq!(of(0, b'X'), Unread::Bad(FrameError::NoMagic));
    assert_eq!(of(2, 2), Unread::Bad(FrameError::Version(2)));
    for unknown in [6, 9, 12, 15, 26, 45, 255] {
        assert_eq!(of(3, unknown), Unread::Bad(FrameError::UnknownType(FrameType(unknown))));
    }
    assert_eq!(of(3, 1), Unread::Bad(FrameError::UnknownType(FrameType::Hello)), "once is enough");
    assert_eq!(
        of(3, 20),
        Unread::Bad(FrameError::WrongConnection { kind: FrameType::Write, purpose: control })
    );
    let limit = 0;
    assert_eq!(of(8, 1), Unread::Bad(FrameError::TooLong { kind, bytes: 1, limit }));
    assert_eq!(of(28, 1), Unread::Bad(FrameError::WrongFrameNumber { expected: 0, found: 1 }));
    for unused in [40, 48, 56, 60, 62, 63] {
        assert_eq!(of(unused, 1), Unread::Bad(FrameError::ReservedNotZero(kind)), "byte {unused}");
    }
    let mut damaged = applied();
    damaged[32] ^= 1;
    assert_eq!(read_on(control, &damaged).unwrap_err(), Unread::Bad(FrameError::HeaderChecksum));
    let up = ConnectionPurpose::Lane(Lane::Requests);
    assert_eq!(
        read_on(up, &applied()).unwrap_err(),
        Unread::Bad(FrameError::WrongConnection { kind, purpose: up })
    );
}

#[test]
fn a_lease_connection_carries_only_lease_messages() {
    let renew = Message::LeaseRequest {
        epoch: Epoch(1),
        incarnation: Incarnation(2),
        stamp: ClockStamp(3),
    };
    let bytes = bytes_of(renew).unwrap();
    assert!(read_on(ConnectionPurpose::Lease, &bytes).is_ok());
    let bad =
        FrameError::WrongConnection { kind: FrameType::Applied, purpose: ConnectionPurpose::Lease };
    assert_eq!(read_on(ConnectionPurpose::Lease, &applied()).unwrap_err(), Unread::Bad(bad));
}

#[test]
fn repeated_frames_are_detected_by_their_number() {
    let mut queue = SendQueue::default();
    let mut outgoing = FrameEncoder::new(rules(ConnectionPurpose::Lane(Lane::Control)));
    for seq in 0..3 {
        let message = Message::Applied { view: View::default(), seq: Seq(seq) };
        outgoing.encode(message, &mut queue).unwrap();
    }
    let bytes: Vec<u8> = queue.slices().flat_map(|s| s.to_vec()).collect();
    let mut incoming = FrameDecoder::new(rules(ConnectionPurpose::Lane(Lane::Control)));
    for frame in bytes.chunks(HEADER_BYTES) {
        read(&mut incoming, frame).unwrap();
    }
    let again = read(&mut incoming, &bytes[2 * HEADER_BYTES..]).unwrap_err();
    assert_eq!(again, Unread::Bad(FrameError::WrongFrameNumber { expected: 3, found: 2 }));
}

/// No header makes its receiver reserve more memory than its type may need.
#[test]
fn bodies_are_bounded_by_their_type() {
    let most = [
        (FrameType::StartViewChange, MAX_CONFIG_BYTES, 0),
        (FrameType::DoViewChange, MAX_ENTRIES * 48, MAX_ENTRIES),
        (FrameType::StartView, MAX_WRITE_IDS * 16, MAX_WRITE_IDS),
        (FrameType::Commit, MAX_SEQS * 8, MAX_SEQS),
        (FrameType::ClearRegions, MAX_REGIONS * 16, MAX_REGIONS),
        (FrameType::IdleDirtyRegions, MAX_REGIONS * 16, MAX_REGIONS),
        (FrameType::NoSpaceReport, MAX_REGIONS * 16, MAX_REGIONS),
        (FrameType::Join, PEER_GENERATIONS_BYTES + MAX_DIRTY_BITS_BYTES, 20),
        (FrameType::JoinAccepted, MAX_GENERATIONS * 32, MAX_GENERATIONS),
        (FrameType::Write, MAX_DATA as usize, 1),
        (FrameType::WriteRequest, MAX_DATA as usize, 1),
        (FrameType::CompareAndWrite, 2 * MAX_DATA as usize, 1),
        (FrameType::FetchResult, MAX_DATA as usize, 0),
    ];
    for (kind, bytes, count) in most {
        let head = |bytes: usize, count: usize| {
            let header = Header {
                fields: HeaderFields::new(kind).with_count(count),
                version: 1,
                frame_number: 0,
                body_bytes: bytes as u32,
                body_checksum: 0,
            };
            let purpose = ConnectionPurpose::Lane(kind.lane().unwrap());
            FrameDecoder::new(rules(purpose))
                .decode_header(&header.to_bytes())
                .map(|head| head.body_bytes())
        };
        assert_eq!(head(bytes, count), Ok(bytes), "{kind:?}");
        let (item, lists) = (bytes / count.max(1), count > 20);
        let (more, counted) = if lists { (bytes + item, count + 1) } else { (bytes + 1, count) };
        let bad = FrameError::TooLong { kind, bytes: more as u64, limit: bytes as u64 };
        assert_eq!(head(more, counted), Err(bad));
        assert!(matches!(head(u32::MAX as usize, counted), Err(FrameError::TooLong { .. })));
    }
}

/// The peer would end the session over it, so it is refused here.
#[test]
fn invalid_messages_are_not_sent() {
    let view = View::default();
    let write = |range, kind, data| {
        let op = WriteOp { range, kind, fua: false, data };
        let (seq, write_id) = (Seq(0), WriteId::default());
        bytes_of(Message::Write { view, seq, write_id, is_copy: false, op }).unwrap_err()
    };
    let block = Blocks::new(Lba(0), 1);
    let kind = FrameType::Write;
    let too_long = MAX_DATA as usize + 1;
    let bad = FrameError::TooLong { kind, bytes: too_long as u64, limit: u64::from(MAX_DATA) };
    assert_eq!(write(block, WriteKind::Data, Bufs::zeroes(too_long)), bad);
    assert_eq!(write(block, WriteKind::Data, Bufs::new()), FrameError::Length { kind, bytes: 0 });
    let three = Blocks::new(Lba(0), 3);
    assert_eq!(
        write(three, WriteKind::Data, Bufs::zeroes(1024)),
        FrameError::Length { kind, bytes: 1024 }
    );
    let ranges =
        [Blocks::new(Lba(0), 0), Blocks::new(Lba(u64::MAX), 1), Blocks::new(Lba(0), 1 << 32)];
    for range in ranges {
        let zero = WriteKind::Zero { unmap: true };
        assert_eq!(write(range, zero, Bufs::new()), FrameError::InvalidField(kind, "range"));
    }
    let config = vec![0; MAX_CONFIG_BYTES + 1];
    assert!(matches!(
        bytes_of(Message::StartViewChange { view, config }),
        Err(FrameError::TooLong { .. })
    ));
    let seqs = vec![Seq(0); MAX_SEQS + 1];
    assert!(matches!(bytes_of(Message::Commit { view, seqs }), Err(FrameError::TooLong { .. })));
}

/// Every message once, with distinct fields: the golden bytes of `docs/format/peer.md`.
fn join(view: View, incarnation: Incarnation, generations: PeerGenerations) -> Message {
    let (epoch, volume_bytes, region_shift) = (view.epoch, 8 << 16, 16);
    let dirty_bits = vec![0xcc];
    Message::Join { incarnation, epoch, volume_bytes, region_shift, generations, dirty_bits }
}

#[expect(clippy::too_many_lines, reason = "one of each message")]
fn samples() -> Vec<Message> {
    let view = View { epoch: Epoch(0x11), round: 0x22 };
    let (incarnation, stamp) = (Incarnation(0x33), ClockStamp(0x44));
    let (number, seq, request) = (0x55, Seq(0x66), 0x77);
    let write_id = WriteId { origin: NodeId(2), number };
    let range = Blocks::new(Lba(0x88), 1);
    let written = |byte| data(&[byte; 8]);
    let op = WriteOp { range, kind: WriteKind::Data, fua: true, data: written(0xaa) };
    let zeroed = WriteOp {
        kind: WriteKind::Zero { unmap: true },
        fua: false,
        data: Bufs::new(),
        ..op.clone()
    };
    let generation = |count| DataGeneration { epoch: Epoch(0x11), count };
    let generations = PeerGenerations { common: generation(0xee), last_cleared: generation(0xed) };
    let report = ReplicaReport {
        incarnation,
        epoch: Epoch(0x11),
        config_id: 0x99,
        role: Role::Restarted,
        is_clean: true,
        same_boot: true,
        is_rolled_back: true,
        generations,
    };
    let entry = PreparedEntry { view, seq, write_id, range, kind: WriteKind::Data, fua: true };
    let gone = Error::Unreadable { at: Lba(0x88) };
    vec![
        Message::ReplicaReport(report),
        Message::LeaseRequest { epoch: view.epoch, incarnation, stamp },
        Message::LeaseGrant { epoch: view.epoch, incarnation, stamp },
        Message::NewerEpoch { epoch: view.epoch },
        Message::RevokeLease { view, incarnation },
        Message::LeaseRevoked { view, incarnation },
        Message::StartViewChange { view, config: b"{}".to_vec() },
        Message::DoViewChange { view, entries: vec![entry] },
        Message::StartView { view, last_seq: seq, committed: vec![write_id] },
        Message::Rejoin { view },
        Message::WriteRequest { view, number, stamp, op: zeroed },
        Message::OpAssigned { view, number, seq },
        Message::PeersApplied { view, number },
        Message::RetryRequest { view, number },
        Message::Write { view, seq, write_id, is_copy: true, op },
        Message::Applied { view, seq },
        Message::Commit { view, seqs: vec![seq] },
        Message::RequestCommit { view, seq },
        Message::CompareAndWrite { view, number, stamp, range, fua: true, data: written(0xbb) },
        Message::CompareAndWriteResult {
            view,
            number,
            outcome: CompareAndWriteOutcome::Miscompare { offset: 5 },
        },
        Message::Flush { view, request, generation: 0xee },
        Message::Flushed { view, request },
        Message::Fetch { view, request, range },
        Message::FetchResult { view, request, result: Err(gone) },
        Message::RepairRange { view, range },
        join(view, incarnation, generations),
        Message::JoinAccepted {
            view,
            incarnation,
            generations: vec![(Uuid::from_u128(0xff), generations.common)],
        },
        Message::JoinAborted { incarnation },
        Message::ClearRegions { view, request, regions: vec![(0, 0x1_0000)] },
        Message::IdleDirtyRegions { view, regions: vec![(0, 0x1_0000)] },
        Message::PeerUnreachable { view, node: NodeId(3) },
        Message::Digest { view, request, range },
        Message::DigestResult { view, request, result: Ok([0xdd; 32]) },
        Message::NoSpace { view, seq },
        Message::NoSpaceQuery { view, request, seq },
        Message::NoSpaceReport {
            view,
            request,
            free_bytes: 0x1000,
            zero_blocks: Ok(vec![(0x88, 2)]),
        },
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

/// Kept by `insta`: the wire format does not change unnoticed.
#[test]
fn golden_messages() {
    let mut golden = String::new();
    for message in samples() {
        let bytes = bytes_of(message).unwrap();
        golden += &format!("{:?}\n{}\n", FrameType(bytes[3]), hex(&bytes));
    }
    insta::assert_snapshot!("messages", golden);
}

fn hello() -> Hello {
    Hello {
        min_version: 1,
        max_version: 1,
        purpose: ConnectionPurpose::Lane(Lane::Replication),
        max_data_bytes: MAX_DATA_BYTES,
        features: 0x11,
        cluster: Uuid::from_u128(0x22),
        volume: Uuid::from_u128(0x33),
        session: 0x44,
        sender: NodeId(2),
        receiver: NodeId(1),
        challenge: [0x55; 32],
    }
}

#[test]
fn golden_handshake() {
    let frames = [
        ("Hello", hello().to_frame()),
        ("Proof", HandshakeFrame::proof([0x66; 32])),
        ("Ready", HandshakeFrame::ready()),
        ("Refused", HandshakeFrame::refused(HandshakeRefusal::UnknownVolume)),
    ];
    let golden: String =
        frames.iter().map(|(name, bytes)| format!("{name}\n{}\n", hex(bytes))).collect();
    insta::assert_snapshot!("handshake", golden);
}

fn read_handshake(bytes: &[u8]) -> Result<HandshakeFrame, FrameError> {
    let header = bytes.first_chunk().expect("a header");
    let body = HandshakeFrame::body_bytes(header)?;
    HandshakeFrame::parse(header, &bytes[HEADER_BYTES..HEADER_BYTES + body])
}

#[test]
fn the_handshake_round_trips_and_each_flipped_bit_is_detected() {
    let frames = [
        (HandshakeFrame::Hello(hello(), hello().to_bytes()), hello().to_frame()),
        (HandshakeFrame::Proof([3; 32]), HandshakeFrame::proof([3; 32])),
        (HandshakeFrame::Ready, HandshakeFrame::ready()),
        (
            HandshakeFrame::Refused(HandshakeRefusal(99)),
            HandshakeFrame::refused(HandshakeRefusal(99)),
        ),
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

/// A HELLO of a later release is longer; its known part is understood.
#[test]
fn a_longer_hello_is_accepted() {
    let mut body = hello().to_bytes();
    body.extend([7; 100]);
    assert_eq!(Hello::parse(&body), Ok(hello()));
    assert_eq!(
        Hello::parse(&body[..103]),
        Err(FrameError::InvalidField(FrameType::Hello, "length"))
    );
    body[3] = 1;
    assert_eq!(Hello::parse(&body), Err(FrameError::ReservedNotZero(FrameType::Hello)));
}
