//! SBC-3 5.7 POPULATE TOKEN, 5.49 WRITE USING TOKEN, SPC-4 6.26 RECEIVE ROD TOKEN INFORMATION; RFD
//! 0018.

use block::{Error, RequestError};
use proptest::collection::vec;
use proptest::prelude::*;
use scsi::{CopyIoError, NexusId, Reply, Side, TokenFault, TokenResult};

use crate::copy_oracle;
use crate::harness::{BLOCK, BLOCKS, Harness, data, describe_reply, pointer};

const POPULATE: u8 = 0x10;
const WRITE: u8 = 0x11;

/// Ranges: first block and count.
type Ranges<'a> = &'a [(u64, u32)];

fn ranges(all: Ranges<'_>) -> Vec<u8> {
    let range =
        |(at, count): &(u64, u32)| [&at.to_be_bytes()[..], &count.to_be_bytes(), &[0; 4]].concat();
    all.iter().flat_map(range).collect()
}

/// The list of POPULATE TOKEN: flags, inactivity timeout, ROD type.
fn populate(flags: u8, timeout_s: u32, kind: u32, all: Ranges<'_>) -> Vec<u8> {
    let ranges = ranges(all);
    let mut list = (14 + ranges.len() as u16).to_be_bytes().to_vec();
    list.extend([flags, 0]);
    list.extend(timeout_s.to_be_bytes());
    list.extend(kind.to_be_bytes());
    list.extend([0, 0]);
    list.extend((ranges.len() as u16).to_be_bytes());
    list.extend(ranges);
    list
}

fn write(token: &[u8], offset: u64, all: Ranges<'_>) -> Vec<u8> {
    let ranges = ranges(all);
    let mut list = (534 + ranges.len() as u16).to_be_bytes().to_vec();
    list.extend([0; 6]);
    list.extend(offset.to_be_bytes());
    list.extend(token);
    list.resize(534, 0);
    list.extend((ranges.len() as u16).to_be_bytes());
    list.extend(ranges);
    list
}

fn send(b: &mut Harness, i: NexusId, action: u8, id: u32, list: &[u8]) -> Reply {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (0x83, action);
    cdb[6..10].copy_from_slice(&id.to_be_bytes());
    cdb[10..14].copy_from_slice(&(list.len() as u32).to_be_bytes());
    b.data_out(i, &cdb, list)
}

fn ask(b: &mut Harness, i: NexusId, id: u32, allocation: u16) -> Reply {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (0x84, 7);
    cdb[2..6].copy_from_slice(&id.to_be_bytes());
    cdb[12..14].copy_from_slice(&allocation.to_be_bytes());
    b.data_in(i, &cdb)
}

/// Fields of RECEIVE ROD TOKEN INFORMATION: service action, status, blocks, token.
fn information(b: &mut Harness, i: NexusId, id: u32) -> (u8, u8, u64, Vec<u8>) {
    let d = data(&ask(b, i, id, 0xffff));
    assert_eq!(d[..4], (d.len() as u32 - 4).to_be_bytes());
    assert_eq!(d[15], 0xf1, "blocks");
    let field = 32 + usize::from(d[13]);
    let descriptors = u32::from_be_bytes(d[field..field + 4].try_into().expect("four bytes"));
    let behind = &d[field + 4..];
    assert_eq!(behind.len(), descriptors as usize);
    let token = behind.get(2..).unwrap_or_default().to_vec();
    (d[4], d[5], u64::from_be_bytes(d[16..24].try_into().expect("eight bytes")), token)
}

fn made(b: &mut Harness, i: NexusId, all: Ranges<'_>) -> Vec<u8> {
    assert_eq!(describe_reply(&send(b, i, POPULATE, 5, &populate(0, 0, 0, all))), "Good");
    let (action, status, blocks, token) = information(b, i, 5);
    let count: u64 = all.iter().map(|(_, count)| u64::from(*count)).sum();
    assert_eq!((action, status, blocks, token.len()), (POPULATE, 1, count, 512));
    token
}

/// SBC-3 5.7, 5.49: the written data is that of the token, from the offset on, range by range.
#[test]
fn tokens_are_created_returned_and_used() {
    let (mut b, i) = Harness::new();
    let bytes: Vec<u8> = (0..BLOCKS * BLOCK).map(|n| (n / BLOCK) as u8).collect();
    b.contents.copy_from_slice(&bytes);
    let token = made(&mut b, i, &[(10, 4), (0, 0), (20, 2)]);
    assert_eq!(token[..8], [0, 0x80, 0, 1, 0, 0, 1, 0xf8]);
    let other = b.join(2);
    let r = send(&mut b, other, WRITE, 9, &write(&token, 2, &[(500, 1), (600, 3)]));
    assert_eq!(describe_reply(&r), "Good", "another initiator's token is as good");
    assert_eq!(information(&mut b, other, 9), (WRITE, 1, 4, vec![]));
    let block = |b: &Harness, at: u64| b.contents[(at * BLOCK) as usize];
    assert_eq!([500, 600, 601, 602, 603].map(|at| block(&b, at)), [12, 13, 20, 21, 603u64 as u8]);
    let cut = data(&ask(&mut b, i, 5, 40));
    assert_eq!(
        (cut.len(), u32::from_be_bytes(cut[..4].try_into().expect("four bytes"))),
        (40, 546)
    );
}

/// SBC-3 5.49: the zero token, which needs no creation.
#[test]
fn the_zero_token_writes_zeroes() {
    let (mut b, i) = Harness::new();
    b.contents.fill(7);
    let mut token = vec![0xff, 0xff, 0, 1, 0, 0, 0x01, 0xf8];
    token.resize(512, 0);
    assert_eq!(describe_reply(&send(&mut b, i, WRITE, 1, &write(&token, 0, &[(3, 2)]))), "Good");
    assert_eq!(information(&mut b, i, 1), (WRITE, 1, 2, vec![]));
    let zeroes = b.contents.iter().filter(|byte| **byte == 0).count();
    assert_eq!(zeroes as u64, 2 * BLOCK);
}

/// SBC-3 5.7, 5.49: errors in a list are reported before anything is done.
#[test]
fn lists_that_are_wrong() {
    let (mut b, i) = Harness::new();
    let good = populate(0, 0, 0, &[(0, 8)]);
    let with = |at: usize, bytes: &[u8]| {
        let mut list = good.clone();
        list[at..at + bytes.len()].copy_from_slice(bytes);
        list
    };
    let too_many = [(0, 0); 65];
    let field = |byte: u16| ("05/26/00", Some((false, byte, None)));
    let cases = [
        (good[..15].to_vec(), ("05/1a/00", None)),
        (with(0, &[0, 29]), field(0)),
        (with(0, &[0, 31]), ("05/1a/00", None)),
        (with(4, &601u32.to_be_bytes()), field(4)),
        (populate(2, 0, 0x0080_0002, &[(0, 8)]), field(8)),
        (populate(2, 0, 0xffff_0001, &[(0, 8)]), field(8)),
        (with(14, &[0, 15]), field(14)),
        (with(14, &[0, 32]), ("05/1a/00", None)),
        (populate(0, 0, 0, &too_many), field(14)),
        (populate(0, 0, 0, &[(0, 8), (7, 1)]), field(32)),
        (populate(0, 0, 0, &[(BLOCKS, 1)]), ("05/21/00", None)),
        (populate(0, 0, 0, &[(u64::MAX, 2)]), ("05/21/00", None)),
    ];
    for (n, (list, expected)) in cases.into_iter().enumerate() {
        let r = send(&mut b, i, POPULATE, 3, &list);
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), expected, "case {n}");
        assert_eq!(describe_reply(&ask(&mut b, i, 3, 100)), "05/24/00", "nothing has begun");
    }
    for kind in [0x0080_0001, 0x0080_ffff] {
        let r = send(&mut b, i, POPULATE, 3, &populate(3, 600, kind, &[(0, 8)]));
        assert_eq!(describe_reply(&r), "Good", "IMMED and RTV");
    }
    let token = made(&mut b, i, &[(0, 8)]);
    let list = write(&token, 0, &[(8, 1)]);
    let mut strange = token.clone();
    strange[3] = 2;
    let mut short = token.clone();
    short[7] = 0xf7;
    for (list, expected) in [
        (list[..535].to_vec(), ("05/1a/00", None)),
        (write(&strange, 0, &[(8, 1)]), ("05/23/01", None)),
        (write(&short, 0, &[(8, 1)]), ("05/23/0a", None)),
        (write(&token, 0, &[(8, 1), (8, 1)]), field(552)),
        (write(&token, 0, &[(BLOCKS - 1, 2)]), ("05/21/00", None)),
    ] {
        let r = send(&mut b, i, WRITE, 4, &list);
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), expected);
    }
    assert_eq!(describe_reply(&send(&mut b, i, WRITE, 4, &[])), "Good", "no list, no work");
}

/// RFD 0018, 4: the result and progress of a transfer that does not complete.
#[test]
fn transfers_that_fail() {
    let (mut b, i) = Harness::new();
    let token = made(&mut b, i, &[(0, 8)]);
    let gone = RequestError::Device(Error::Gone);
    let unreadable = RequestError::Device(Error::Unreadable { at: block::Lba(1) });
    for (outcome, expected) in [
        (TokenResult::Invalid(TokenFault::Unknown), "05/23/04"),
        (TokenResult::Invalid(TokenFault::Cancelled), "05/23/08"),
        (TokenResult::Invalid(TokenFault::BlockSizeMismatch), "05/23/00"),
        (TokenResult::Invalid(TokenFault::TooShort), "05/26/00"),
        (TokenResult::Invalid(TokenFault::TooManyTokens), "05/55/0d"),
        (TokenResult::Aborted, "0b/00/06"),
        (
            TokenResult::Failed(Side::Destination, CopyIoError::ReservationConflict),
            "ReservationConflict",
        ),
        (TokenResult::Failed(Side::Source, CopyIoError::ReservationConflict), "0a/0d/01"),
        (TokenResult::Failed(Side::Source, CopyIoError::Volume(unreadable)), "0a/0d/01"),
        (TokenResult::Failed(Side::Source, CopyIoError::Volume(gone)), "0a/0d/02"),
        (TokenResult::Failed(Side::Destination, CopyIoError::Volume(gone)), "04/3e/01"),
    ] {
        b.tokened = Some(outcome.clone());
        let reply = send(&mut b, i, WRITE, 6, &write(&token, 0, &[(8, 8)]));
        if outcome != TokenResult::Aborted {
            assert_eq!(describe_reply(&reply), expected, "{outcome:?}");
        }
        let (_, status, blocks, none) = information(&mut b, i, 6);
        let ended = if outcome == TokenResult::Aborted { 0x60 } else { 2 };
        assert_eq!((status, blocks, none), (ended, 0, vec![]), "{outcome:?}");
    }
    // Half way.
    b.wrote = 3 * BLOCK;
    b.tokened = Some(TokenResult::Invalid(TokenFault::Cancelled));
    let reply = send(&mut b, i, WRITE, 6, &write(&token, 0, &[(8, 8)]));
    assert_eq!(describe_reply(&reply), "0a/23/08");
    assert_eq!(information(&mut b, i, 6), (WRITE, 2, 3, vec![]));
}

/// SPC-4 5.17.4: which nexus may query which operation.
#[test]
fn list_identifiers() {
    let (mut b, i) = Harness::new();
    made(&mut b, i, &[(0, 8)]);
    let other = b.join(2);
    assert_eq!(describe_reply(&ask(&mut b, other, 5, 600)), "05/24/00", "of another initiator");
    let list = [&[7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0, 2, 0, 0, 24][..]].concat();
    let mut copy = list;
    copy.extend([0xff; 4]);
    copy.extend([0, 0, 0, 1]);
    copy.extend([0; 15]);
    copy.push(9);
    let cdb = [0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 44, 0, 0];
    assert_eq!(describe_reply(&b.data_out(i, &cdb, &copy)), "Good");
    assert_eq!(describe_reply(&ask(&mut b, i, 7, 600)), "05/24/00", "EXTENDED COPY has no token");
    let mut status = [0; 16];
    (status[0], status[1], status[5], status[13]) = (0x84, 5, 5, 255);
    let d = data(&b.data_in(i, &status));
    assert_eq!((d[4], d[5], &d[15..24]), (POPULATE, 1, &[0, 0, 0, 0, 0, 0, 0, 0x10, 0][..]));
}

/// SBC-3 4.17: POPULATE TOKEN reads, WRITE USING TOKEN writes.
#[test]
fn reservations_and_protection() {
    let (mut b, i) = Harness::new();
    let token = made(&mut b, i, &[(0, 8)]);
    let control = [0, 0, 0, 0, 0x0a, 10, 2, 0x10, 8, 0, 0, 0, 0xff, 0xff, 0, 0];
    b.data_out(i, &[0x15, 0x10, 0, 0, 16, 0], &control);
    let list = write(&token, 0, &[(8, 8)]);
    assert_eq!(describe_reply(&send(&mut b, i, WRITE, 6, &list)), "07/27/02");
    made(&mut b, i, &[(0, 8)]);
    let other = b.join(2);
    assert_eq!(describe_reply(&b.data_in(i, &[0x16, 0, 0, 0, 0, 0])), "Good", "RESERVE");
    for (action, list) in [(POPULATE, populate(0, 0, 0, &[(0, 8)])), (WRITE, list)] {
        let reply = send(&mut b, other, action, 6, &list);
        assert_eq!(describe_reply(&reply), "ReservationConflict");
    }
}

proptest! {
    #[test]
    fn no_list_breaks_the_rules(bytes in vec(any::<u8>(), 0..700)) {
        copy_oracle::run(&bytes);
    }

    /// Lists that are right but for a few bytes.
    #[test]
    fn no_list_that_is_nearly_right_breaks_the_rules(
        writes in any::<bool>(),
        fields in vec((any::<u64>(), any::<u32>()), 0..70),
        changes in vec((any::<usize>(), any::<u8>()), 0..4),
    ) {
        let all: Vec<_> = fields.iter().map(|(at, count)| (at >> (count % 60), count >> 20)).collect();
        let mut token = vec![0, 0x80, 0, 1, 0, 0, 1, 0xf8];
        token.resize(512, 3);
        let mut list = if writes { write(&token, 0, &all) } else { populate(0, 0, 0, &all) };
        for (at, value) in changes {
            let at = at % list.len();
            list[at] = value;
        }
        copy_oracle::run(&[&[0][..], &list].concat());
    }
}
