//! SPC-4 6.6 INQUIRY, 7.8 VPD pages, 6.33 REPORT LUNS.

use scsi::{
    Address, Lun, ReceivedCommand, SharedUnitState, TransferLengths, Unavailability, answer_absent,
    answer_unavailable,
};

use crate::harness::{Harness, config, data, describe_reply, info, pointer};

fn vpd(page: u8) -> [u8; 6] {
    [0x12, 1, page, 2, 0, 0]
}

/// SPC-4 6.6.
#[test]
fn standard_data() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &[0x12, 0, 0, 0x10, 0, 0]));
    assert_eq!(d.len(), 96);
    assert_eq!(d[..8], [0, 0, 6, 0x12, 91, 0x08, 0, 0x02], "disk, SPC-4, HISUP, 3PC, CMDQUE");
    assert_eq!(&d[8..36], b"WINDROSEVolume          0.1 ");
    let versions: Vec<u16> =
        d[58..74].chunks(2).map(|v| u16::from_be_bytes([v[0], v[1]])).collect();
    assert_eq!(versions, [0x00a0, 0x0460, 0x04c0, 0x0960, 0, 0, 0, 0]);
}

/// SPC-4 4.4.1: names are printable ASCII whatever the configuration holds.
#[test]
fn names_are_printable() {
    let mut c = config();
    c.product = "Vølume\n with a name too long".into();
    c.revision = String::new();
    let (mut b, i) = Harness::with(c, info());
    let d = data(&b.data_in(i, &[0x12, 0, 0, 0, 0xff, 0]));
    assert_eq!(&d[16..36], b"Vlume with a nam    ");
}

/// SPC-4 6.6 and 4.2.5.6.
#[test]
fn allocation_length_cuts_and_never_fails() {
    let (mut b, i) = Harness::new();
    let whole = data(&b.data_in(i, &[0x12, 0, 0, 0x02, 0, 0]));
    for n in 0..=255u8 {
        let d = data(&b.data_in(i, &[0x12, 0, 0, 0, n, 0]));
        assert_eq!(d, whole[..usize::from(n).min(whole.len())]);
    }
    assert_eq!(data(&b.data_in(i, &[0x12, 0, 0, 0x01, 0xff, 0])), whole);
}

/// SPC-4 6.6: a page without EVPD, an unknown page, and the obsolete CMDDT.
#[test]
fn wrong_pages_are_refused() {
    let (mut b, i) = Harness::new();
    for (cdb, at) in [
        ([0x12, 0, 1, 0, 96, 0], (true, 2, None)),
        ([0x12, 1, 0x7f, 0, 96, 0], (true, 2, None)),
        ([0x12, 2, 0, 0, 96, 0], (true, 1, Some(1))),
        ([0x12, 0, 0, 0, 96, 0x04], (true, 5, Some(2))),
    ] {
        let r = b.data_in(i, &cdb);
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some(at)), "{cdb:x?}");
    }
}

/// SPC-4 7.8, supported VPD pages: in ascending order, and each of them can be had.
#[test]
fn vpd_supported_pages() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &vpd(0x00)));
    assert_eq!(d, [0, 0, 0, 10, 0x00, 0x80, 0x83, 0x86, 0x87, 0x88, 0x8f, 0xb0, 0xb1, 0xb2]);
    for page in &d[4..] {
        let d = data(&b.data_in(i, &vpd(*page)));
        assert_eq!((d[0], d[1]), (0, *page));
        assert_eq!(d.len(), 4 + usize::from(u16::from_be_bytes([d[2], d[3]])));
    }
}

/// SPC-4 7.8, unit serial number.
#[test]
fn vpd_serial_number() {
    let (mut b, i) = Harness::new();
    assert_eq!(data(&b.data_in(i, &vpd(0x80))), b"\0\x80\0\x07WR-0001");
}

/// SPC-4 7.8, device identification.
#[test]
fn vpd_identification() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &vpd(0x83)));
    let mut designators = Vec::new();
    let mut rest = &d[4..];
    while let [a, b, _, len, tail @ ..] = rest {
        let (id, next) = tail.split_at(usize::from(*len));
        designators.push((*a, *b, id.to_vec()));
        rest = next;
    }
    let naa = [0x60, 0x25, 0x75, 0x20, 0xf1, 0xe2, 0xd3, 0xc4, 0xb5, 0xa6, 0x97, 0x87, 0x96, 0xa5];
    let (a, b, id) = &designators[0];
    assert_eq!((*a, *b, id.len()), (0x01, 0x03, 16), "NAA of the unit");
    assert_eq!(id[..14], naa);
    assert_eq!(
        designators[1],
        (0x02, 0x01, b"WINDROSE0f1e2d3c4b5a469788796a5b4c3d2e1f".to_vec()),
        "T10 vendor identification"
    );
    let (a, b, id) = &designators[2];
    assert_eq!((*a, *b, id.len()), (0x03, 0x08, 40), "name of the unit");
    assert!(id.starts_with(b"naa.602575"));
    assert_eq!(designators[3], (0x51, 0x94, vec![0, 0, 0, 1]), "relative target port");
    assert_eq!(
        designators[4],
        (0x53, 0x98, b"iqn.2025-01.example:disk,t,0x0001\0\0\0".to_vec()),
        "name of the port"
    );
    assert_eq!(
        designators[5],
        (0x53, 0xa8, b"iqn.2025-01.example:disk\0\0\0\0".to_vec()),
        "name of the target"
    );
    assert_eq!(designators.len(), 6);
}

/// SPC-4 7.8, mode page policy and SCSI ports: everything is shared; a unit of one node has one
/// port.
#[test]
fn vpd_mode_page_policy_and_ports() {
    let (mut b, i) = Harness::new();
    assert_eq!(data(&b.data_in(i, &vpd(0x87))), [0, 0x87, 0, 4, 0x3f, 0xff, 0, 0]);
    let name = b"iqn.2025-01.example:disk,t,0x0001\0\0\0";
    let port = [&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 40, 0x53, 0x98, 0, 36][..], name].concat();
    let page = data(&b.data_in(i, &vpd(0x88)));
    assert_eq!((&page[..4], &page[4..]), (&[0, 0x88, 0, 52][..], &port[..]));
}

/// SBC-3 6.5, block limits: commands obey the reported limits.
#[test]
fn vpd_block_limits() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &vpd(0xb0)));
    assert_eq!(d.len(), 64, "SBC-3's length");
    let u32_at = |at: usize| u32::from_be_bytes(d[at..at + 4].try_into().unwrap());
    assert_eq!((d[4], d[5]), (1, 32), "WSNZ; half of the transfer length");
    assert_eq!(d[6..8], [0, 8], "physical blocks");
    assert_eq!((u32_at(8), u32_at(12), u32_at(16)), (64, 0, 0));
    assert_eq!((u32_at(20), u32_at(24)), (1 << 20, 255));
    assert_eq!((u32_at(28), u32_at(32)), (8, 0x8000_0000));
    assert_eq!(u64::from_be_bytes(d[36..44].try_into().unwrap()), 1 << 15);
}

/// SBC-3 6.5, block device characteristics and logical block provisioning; SPC-4 7.8, extended.
#[test]
fn vpd_characteristics_provisioning_and_extended() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &vpd(0xb1)));
    assert_eq!((d.len(), d[4], d[5]), (64, 0, 1), "does not rotate");
    assert_eq!(data(&b.data_in(i, &vpd(0xb2))), [0, 0xb2, 0, 4, 0, 0xe4, 2, 0], "thin");
    let d = data(&b.data_in(i, &vpd(0x86)));
    assert_eq!((d.len(), d[5], d[6], d[13]), (64, 0x01, 0x01, 62));
}

/// SBC-3 6.5: nothing is promised that cannot be done.
#[test]
fn vpd_without_unmap() {
    let mut n = info();
    n.unmap_granularity_blocks = 0;
    n.volatile_cache = false;
    let (mut b, i) = Harness::with(config(), n);
    assert_eq!(data(&b.data_in(i, &vpd(0xb2))), [0, 0xb2, 0, 4, 0, 0, 0, 0]);
    assert_eq!(data(&b.data_in(i, &vpd(0xb0)))[20..36], [0; 16]);
    assert_eq!(data(&b.data_in(i, &vpd(0x86)))[6], 0);
}

/// SPC-4 6.33.
#[test]
fn report_luns() {
    let (mut b, i) = Harness::new();
    b.luns = [0, 7, 300].map(|n| Lun::new(n).unwrap()).to_vec();
    let cdb = |select, n| [0xa0, 0, select, 0, 0, 0, 0, 0, 0, n, 0, 0];
    let d = data(&b.data_in(i, &cdb(0, 255)));
    assert_eq!(d[..8], [0, 0, 0, 24, 0, 0, 0, 0]);
    assert_eq!(
        d[8..],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0x41, 44, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(data(&b.data_in(i, &cdb(1, 255)))[8..], [0xc1, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(data(&b.data_in(i, &cdb(2, 255)))[3], 32);
    assert_eq!(data(&b.data_in(i, &cdb(0, 16))), d[..16], "cut, the length is the whole one's");
    let r = b.data_in(i, &cdb(3, 255));
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 2, None))));
}

fn absent(address: Address, cdb: &[u8]) -> scsi::Reply {
    let luns = [Lun::new(3).expect("a small number")];
    answer_absent(
        address,
        &ReceivedCommand {
            cdb,
            expected_transfer: TransferLengths::to_initiator(256),
            luns: &luns,
            shared: SharedUnitState::DEFAULT,
        },
    )
}

/// SAM-5 5.11: commands to a unit that is not there.
#[test]
fn incorrect_logical_unit_number() {
    let nowhere = Address::Unit(Lun::new(9).unwrap());
    let d = data(&absent(nowhere, &[0x12, 0, 0, 0, 96, 0]));
    assert_eq!((d[0], d.len()), (0x7f, 96));
    assert_eq!(data(&absent(nowhere, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0]))[9], 3);
    let r = absent(nowhere, &[0x03, 0, 0, 0, 18, 0]);
    let d = data(&r);
    assert_eq!((describe_reply(&r).as_str(), d[2], d[12]), ("Good", 5, 0x25));
    for cdb in [&[0x00, 0, 0, 0, 0, 0][..], &[0x28; 10], &[0xff; 16], &[]] {
        assert_eq!(describe_reply(&absent(Address::Unsupported, cdb)), "05/25/00");
    }
    assert_eq!(describe_reply(&absent(nowhere, &[0x12, 1, 0x83, 0, 96, 0])), "05/24/00");
}

/// SPC-4 6.6, SAM-5 5.11: a unit that is mapped but not available now is never reported as
/// unsupported: initiators would give it up for good.
#[test]
fn a_unit_that_is_away_is_not_ready() {
    let luns = [Lun::new(3).expect("a small number")];
    let known = SharedUnitState::DEFAULT;
    for (away, sense) in
        [(Unavailability::BecomingReady, "02/04/01"), (Unavailability::Unavailable, "02/04/0c")]
    {
        let ask = |cdb: &[u8]| {
            let window = TransferLengths::to_initiator(256);
            answer_unavailable(
                away,
                &ReceivedCommand { cdb, expected_transfer: window, luns: &luns, shared: known },
            )
        };
        assert_eq!(data(&ask(&[0x12, 0, 0, 0, 96, 0]))[0], 0x20, "a disk that is not connected");
        assert_eq!(data(&ask(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0]))[9], 3, "it is listed");
        let sense_data = data(&ask(&[0x03, 0, 0, 0, 18, 0]));
        assert_eq!((sense_data[2], sense_data[12]), (2, 4));
        for opcode in 0..=0xff {
            let reply = ask(&[opcode; 16]);
            assert!(!describe_reply(&reply).starts_with("05/25"), "{opcode:02x}");
        }
        for cdb in [&[0; 6][..], &[0x28; 10], &[0x2a; 10], &[0xff; 16], &[]] {
            assert_eq!(describe_reply(&ask(cdb)).to_lowercase(), sense);
        }
    }
}

/// SPC-4 clause 8: the well-known unit REPORT LUNS.
#[test]
fn well_known_logical_unit() {
    let w = Address::ReportLuns;
    assert_eq!(data(&absent(w, &[0x12, 0, 0, 0, 96, 0]))[0], 0x1e);
    assert_eq!(data(&absent(w, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0])).len(), 16);
    assert_eq!(describe_reply(&absent(w, &[0; 6])), "Good");
    assert_eq!(data(&absent(w, &[0x03, 0, 0, 0, 18, 0]))[2], 0);
    assert_eq!(describe_reply(&absent(w, &[0x28; 10])), "05/20/00");
}
