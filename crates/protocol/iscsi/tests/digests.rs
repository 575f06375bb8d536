//! Digests (RFC 7143 7.8, 11.2.3, 13.1).

use iscsi::pdu::{Opcode, ScsiCommand};
use iscsi::target::{CloseReason, Config};
use iscsi::testing::{BLOCK, Harness, Portions};

const BOTH: [(&str, &str); 3] =
    [("HeaderDigest", "CRC32C"), ("DataDigest", "CRC32C,None"), ("InitialR2T", "No")];

fn lab() -> Harness {
    let lab = Harness::logged_in(Config::default(), &BOTH);
    assert!(lab.initiator.header_digest && lab.initiator.data_digest);
    lab
}

const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 1, 0, 0, 2, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 1, 0, 0, 2, 0];

/// RFC 3720 B.4 gives this header and its digest.
#[test]
fn clause_13_1_the_digest_of_the_rfcs_example() {
    let mut lab = Harness::default();
    lab.initiator.cmd_sn = 0x14;
    lab.log_in(&BOTH);
    let mut command = vec![0; 48];
    command[..2].copy_from_slice(&[0x01, 0xc0]);
    command[16] = 0x14;
    command[22] = 0x04;
    command[27] = 0x14;
    command[31] = 0x18;
    command[32] = 0x28;
    command[40] = 0x02;
    command.extend([0x56, 0x3a, 0x96, 0xd9]);
    lab.say(&command);
    assert_eq!(lab.closed, None, "the digest is right");
    command[48] ^= 1;
    lab.say(&command);
    assert_eq!(lab.closed, Some(CloseReason::HeaderDigest));
}

/// RFC 7143 11.2.3: all PDUs carry digests, with padding inside the data's.
#[test]
fn clause_11_2_3_everything_is_covered() {
    for portions in [Portions::Whole, Portions::Bytes(3), Portions::Random(9)] {
        let mut lab = Harness { portions, ..lab() };
        for len in [0, 1, 2, 3, 4, 500] {
            let ping = lab.initiator.ping(&vec![7; len]);
            assert_eq!(lab.say(&ping)[0].data, vec![7; len]);
        }
        let bytes: Vec<u8> = (0..1024).map(|i| (i % 251) as u8).collect();
        let write = lab.initiator.command(&WRITE, ScsiCommand::WRITE, 1024, &bytes[..333]);
        let got = lab.say(&write);
        assert_eq!(got[0].opcode(), Opcode::R2t);
        let data = lab.initiator.data_out(got[0].itt(), 1, 0, 333, true, &bytes[333..]);
        assert_eq!(lab.say(&data)[0].header[3], 0);
        let read = lab.initiator.command(&READ, ScsiCommand::READ, 1023, &[]);
        let got = lab.say(&read);
        assert_eq!(got[0].data, bytes[..1023]);
        assert_eq!(lab.driver.disk[BLOCK..3 * BLOCK], bytes);
    }
}

/// RFC 7143 11.2.3: additional header segments are part of the header's digest.
#[test]
fn clause_11_2_3_additional_segments_are_covered() {
    let mut lab = lab();
    let header = lab.initiator.command_header(&[0], 0, 0);
    let ahs = [0, 5, 1, 0, 1, 2, 3, 4];
    let command = lab.initiator.frame_with_ahs(header.as_bytes(), &ahs, &[]);
    assert_eq!(lab.say(&command)[0].opcode(), Opcode::ScsiResponse);
    let header = lab.initiator.command_header(&[0], 0, 0);
    let mut command = lab.initiator.frame_with_ahs(header.as_bytes(), &ahs, &[]);
    command[53] ^= 1;
    assert!(lab.say(&command).is_empty());
    assert_eq!(lab.closed, Some(CloseReason::HeaderDigest));
}

/// RFC 7143 7.8: a garbled Data-Out is rejected, and its command fails when all data has come.
#[test]
fn clause_7_8_garbled_data_fails_the_command() {
    let mut lab = lab();
    let write = lab.initiator.command(&WRITE, ScsiCommand::WRITE, 1024, &[]);
    let itt = lab.say(&write)[0].itt();
    let mut data = lab.initiator.data_out(itt, 1, 0, 0, false, &[1; 512]);
    let last = data.len() - 1;
    data[last] ^= 0x80;
    let got = lab.say(&data);
    assert_eq!((got.len(), got[0].opcode(), got[0].header[2]), (1, Opcode::Reject, 0x02));
    assert_eq!(got[0].data[..], data[..48]);
    let data = lab.initiator.data_out(itt, 1, 1, 512, true, &[1; 512]);
    let got = lab.say(&data);
    assert_eq!((got[0].opcode(), got[0].header[3]), (Opcode::ScsiResponse, 2));
    assert_eq!((got[0].data[4], got[0].data[14], got[0].data[15]), (0x0b, 0x47, 0x05));
    assert_eq!(lab.driver.disk[BLOCK + 1], 2, "nothing was written");
}

/// RFC 7143 7.8: garbled immediate data. The command is known by its header, so that the
/// initiator gets an answer for it.
#[test]
fn clause_7_8_garbled_immediate_data_fails_the_command() {
    let mut lab = lab();
    let mut write = lab.initiator.command(&WRITE, ScsiCommand::WRITE, 1024, &[3; 1024]);
    write[52 + 100] ^= 4;
    let got = lab.say(&write);
    assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, 0x02));
    assert_eq!((got[1].opcode(), got[1].header[3]), (Opcode::ScsiResponse, 2));
    assert_eq!((got[1].data[4], got[1].data[14], got[1].data[15]), (0x0b, 0x47, 0x05));
    let write = lab.initiator.command(&WRITE, ScsiCommand::WRITE, 1024, &[3; 1024]);
    assert_eq!(lab.say(&write)[0].header[3], 0, "it may be repeated");
}

/// RFC 7143 7.8: other garbled PDUs are rejected and dropped.
#[test]
fn clause_7_8_garbled_requests_are_rejected() {
    let mut lab = lab();
    let mut ping = lab.initiator.ping(b"ping");
    ping[53] ^= 1;
    let got = lab.say(&ping);
    assert_eq!((got.len(), got[0].opcode(), got[0].header[2]), (1, Opcode::Reject, 0x02));
    for data in [&b""[..], b"ping"] {
        let ping = lab.initiator.ping(data);
        assert_eq!(lab.say(&ping)[0].data, data, "nothing is left of the garbled one");
    }
}

/// RFC 7143 7.8: a garbled header ends the connection, whatever it seems to say.
#[test]
fn clause_7_8_a_garbled_header_ends_the_connection() {
    let mut lab = lab();
    let mut read = lab.initiator.command(&READ, ScsiCommand::READ, 1024, &[]);
    read[7] ^= 1;
    assert!(lab.say(&read).is_empty());
    assert_eq!(lab.closed, Some(CloseReason::HeaderDigest));
}

/// RFC 7143 13.1: one without the other.
#[test]
fn clause_13_1_digests_are_independent() {
    for keys in [[BOTH[0], ("DataDigest", "None")], [("HeaderDigest", "None"), BOTH[1]]] {
        let mut lab = Harness::logged_in(Config::default(), &keys);
        assert_ne!(lab.initiator.header_digest, lab.initiator.data_digest);
        let ping = lab.initiator.ping(b"hello");
        assert_eq!(lab.say(&ping)[0].data, b"hello");
        let read = lab.initiator.command(&READ, ScsiCommand::READ, 1024, &[]);
        assert_eq!(lab.say(&read)[0].data.len(), 1024);
    }
}
