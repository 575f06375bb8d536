//! Arbitrary bytes as what controllers, targets and units say of themselves. Shared by the fuzz
//! target and a property test. What must hold is asserted:
//!
//! * nothing panics, and what is made of it is bounded by what was asked for;
//! * what is taken for a disk is one that a `Dev` may be made of, with commands that the protocols
//!   can say;
//! * nothing that may be shown has control characters.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;

use block::{Error, Info, Lba, METADATA_LBA};
use initiator::{iscsi, nvme};
use testkit::Script;
use zerocopy::{FromBytes, IntoBytes};

use ::nvme::identify::{IdentifyController, IdentifyNamespace, LbaFormat};
use ::nvme::log::{DiscoveryHeader, DiscoveryRecord};

const SUBNQN: &str = "nqn.2026-01.com.example:disk";

/// A structure with runs of bytes changed, mostly whole.
fn with_changes(script: &mut Script<'_>, structure: &[u8]) -> Vec<u8> {
    let mut out = structure.to_vec();
    for _ in 0..script.byte() % 8 {
        let (at, bytes) = (usize::from(script.half()) % out.len(), script.byte() % 16);
        for n in 0..usize::from(bytes) {
            let byte = script.byte();
            if let Some(place) = out.get_mut(at + n) {
                *place = byte;
            }
        }
    }
    if script.byte() >= 0xf0 {
        out.truncate(usize::from(script.half()) % (out.len() + 1));
    }
    out
}

pub(crate) fn run(script: &[u8]) {
    let mut script = Script::new(script);
    match script.byte() % 6 {
        0 => play_namespaces(&mut script),
        1 => play_logs(&mut script),
        2 => play_discovery(&mut script),
        3 => play_unit(&mut script),
        4 => play_targets(&mut script),
        _ => play_answers(&mut script),
    }
}

/// What `Dev` insists on, and what all commands can say.
fn judge(info: &Info) {
    assert!([512, 4096].contains(&info.block_size) && (1..=METADATA_LBA.0).contains(&info.blocks));
    let physical = info.physical_block_size;
    assert!(physical > 0 && physical.is_multiple_of(info.block_size), "{info:?}");
    assert!((1..=1 << 16).contains(&info.max_transfer_blocks), "{info:?}");
    assert!(info.max_transfer_blocks * info.block_size <= 4 << 20, "{info:?}");
    assert!(info.metadata_blocks == 0 && info.overhead_bytes.is_multiple_of(4096), "{info:?}");
    assert!(!info.unmap_zeroes || info.unmap_granularity_blocks > 0, "{info:?}");
}

fn play_namespaces(script: &mut Script<'_>) {
    let mut controller = IdentifyController::zeroed();
    (controller.cntrltype, controller.cntlid) = (1, 9.into());
    (controller.mdts, controller.ioccsz) = (script.byte(), u32::from(script.half()).into());
    controller.subnqn[..SUBNQN.len()].copy_from_slice(SUBNQN.as_bytes());
    controller.oncs = script.half().into();
    let page_bytes = 4096 << (script.byte() & 0xf);
    let mut seen: Option<nvme::NamespaceDescription> = None;
    // Several controllers of one namespace, or of what is none.
    for _ in 0..3 {
        let changed = with_changes(script, controller.as_bytes());
        let command_set = (script.byte() >= 0x80).then(|| script.some().to_vec());
        let who = (SUBNQN, script.byte() >= 0xf0);
        let Some(abilities) = nvme::testing::abilities(&changed, command_set, who, page_bytes)
        else {
            continue;
        };
        assert!((1..=4 << 20).contains(&abilities.max_transfer_bytes), "{abilities:?}");
        assert!(abilities.in_capsule_bytes <= 256 << 10, "{abilities:?}");
        assert!(abilities.max_zero_bytes.max(abilities.max_verify_bytes) <= 32 << 20);
        assert!(abilities.max_discard_blocks > 0, "{abilities:?}");
        let mut namespace = IdentifyNamespace::zeroed();
        (namespace.nsze, namespace.nguid) = (u64::from(script.half()).into(), [5; 16]);
        let shift = if script.byte().is_multiple_of(2) { 9 } else { 12 };
        namespace.lbaf[0] = LbaFormat { ms: 0.into(), lbads: shift, rp: 0 };
        (namespace.nsfeat, namespace.dlfeat) = (script.byte(), script.byte());
        let (changed, list) = (with_changes(script, namespace.as_bytes()), script.some());
        let Some(now) = nvme::testing::described(&changed, list, &abilities) else { continue };
        judge(&now.info);
        let bytes = |blocks: u32| u64::from(blocks) * u64::from(now.info.block_size);
        assert!(now.zero_blocks.max(now.verify_blocks) <= 1 << 16, "{now:?}");
        assert!(bytes(now.zero_blocks).max(bytes(now.verify_blocks)) <= 32 << 20, "{now:?}");
        assert!(now.discard_blocks > 0, "{now:?}");
        assert!(nvme::testing::is_usable_for(&now, &now));
        if let Some(before) = seen.filter(|before| before.identity == now.identity)
            && before.info.block_size == now.info.block_size
        {
            // What both can do is asked of either.
            let least = nvme::testing::least(&before, &now);
            judge(&least.info);
            assert!(nvme::testing::is_usable_for(&least, &before), "{least:?} {before:?}");
            assert!(nvme::testing::is_usable_for(&least, &now), "{least:?} {now:?}");
        }
        seen = Some(now);
    }
}

fn play_logs(script: &mut Script<'_>) {
    let _ = nvme::testing::event(script.long());
    let highest = u32::from(script.half()) << (script.byte() % 17);
    let groups = script.some();
    let states = nvme::testing::states(groups);
    assert!(states.len() <= groups.len() / 32 && states.values().all(|state| state.0 <= 0xf));
    // Numbers that grow by little, mostly: a list as it is, but for what the script does to it.
    let (mut lists, mut number) = (Vec::new(), 0u32);
    for _ in 0..script.byte() % 4 {
        let step = script.byte();
        let list = (0..1024).map(|_| {
            number = number.wrapping_add(u32::from(step % 16));
            number.to_le_bytes()
        });
        let list = list.collect::<Vec<_>>().concat();
        lists.push(with_changes(script, &list));
    }
    lists.push(script.rest().to_vec());
    let lists: Vec<&[u8]> = lists.iter().map(Vec::as_slice).collect();
    if let Some((found, most)) = nvme::testing::namespaces(&lists, highest) {
        assert!(found.len() <= most && found.is_sorted_by(|a, b| a < b));
        assert!(found.iter().all(|nsid| (1..=highest).contains(nsid)));
    }
}

fn play_discovery(script: &mut Script<'_>) {
    let mut header = DiscoveryHeader::read_from_bytes(&[0; 1024]).unwrap();
    header.records = u64::from(script.byte() % 4).into();
    let mut log = with_changes(script, header.as_bytes());
    for _ in 0..script.byte() % 4 {
        let mut record = DiscoveryRecord::read_from_bytes(&[0; 1024]).unwrap();
        (record.trtype, record.adrfam, record.subtype) = (3, 1, script.byte() % 4);
        let texts = [
            (&mut record.trsvcid[..], &b"4420"[..]),
            (&mut record.traddr, b"192.0.2.1 "),
            (&mut record.subnqn, SUBNQN.as_bytes()),
        ];
        for (field, usual) in texts {
            let text = if script.byte() >= 0x80 { script.some() } else { usual };
            field.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
        }
        log.extend(with_changes(script, record.as_bytes()));
    }
    if let Some((asked, entries)) = nvme::testing::discovery(&log) {
        assert!(asked <= 4 << 20 && entries.len() <= asked / 1024);
        assert!(entries.iter().all(|e| !e.nqn.is_empty() && is_shown(&e.nqn)), "{entries:?}");
    }
}

fn is_shown(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

fn play_unit(script: &mut Script<'_>) {
    let mut capacity = [0; 32];
    capacity[..8].copy_from_slice(&u64::from(script.half()).to_be_bytes());
    let size: u32 = if script.byte().is_multiple_of(2) { 512 } else { 4096 };
    capacity[8..12].copy_from_slice(&size.to_be_bytes());
    (capacity[13], capacity[14]) = (script.byte(), script.byte());
    let page = |code: u8, length: u8| [&[0, code, 0, length][..], &[0; 60]].concat();
    let structures = [
        vec![0; 36],
        [&[0, 0x83, 0, 12, 1, 3, 0, 8, 6, 1, 2, 3, 4, 5, 6, 7][..], &[0; 48]].concat(),
        page(0xb0, 60),
        page(0xb2, 4),
        capacity.to_vec(),
        vec![19, 0, 0x10, 0, 8, 18, 4],
    ];
    let changed = structures.map(|structure| with_changes(script, &structure));
    let lengths = changed[1].len();
    let Some(now) = iscsi::testing::described(changed) else { return };
    let changed = &now.attributes;
    judge(&changed.info);
    let most = (32 << 20) / changed.info.block_size;
    assert!(
        (1..=most).contains(&changed.write_same_blocks) && changed.unmap_blocks <= most,
        "{changed:?}"
    );
    assert!(changed.info.unmap_granularity_blocks <= most, "{changed:?}");
    let designators: Vec<_> = now.identity.designators().collect();
    assert_eq!(now.identity.is_known(), !designators.is_empty());
    assert!(designators.len() <= 32);
    assert!(designators.iter().map(|(_, value)| value.len()).sum::<usize>() <= lengths);
    assert!(now.is_same_volume_as(&now));
}

fn play_targets(script: &mut Script<'_>) {
    let asked: SocketAddr = "192.0.2.9:3260".parse().unwrap();
    let text: Vec<u8> = match script.byte() % 2 {
        0 => script.rest().to_vec(),
        _ => {
            let mut text = Vec::new();
            while !script.is_empty() {
                let keys = [
                    &b"TargetName=iqn.2026-01.com.example:"[..],
                    b"TargetName=",
                    b"TargetAddress=",
                ];
                text.extend(keys[usize::from(script.byte()) % keys.len()]);
                text.extend(script.some());
                text.push(0);
            }
            text
        }
    };
    let _ = std::str::from_utf8(&text).map(iscsi::testing::portal);
    if let Some(found) = iscsi::testing::targets(&text, asked) {
        assert!(found.iter().all(|target| is_shown(&target.name)), "{found:?}");
        let portals = found.iter().map(|target| target.portals.len()).sum::<usize>();
        assert!(found.len() + portals <= text.len(), "no more than there is text for");
    }
}

fn play_answers(script: &mut Script<'_>) {
    let room = if script.byte().is_multiple_of(2) { 4096 } else { u32::MAX };
    let list = script.some();
    if let Some((found, most)) = iscsi::testing::units(list, room) {
        let found = found.unwrap_or_default();
        assert!(found.len() <= list.len() / 8 && found.is_sorted_by(|a, b| a < b));
        assert!(most <= 8 + 8 * (u32::from(u16::MAX) + 1));
    }
    let (status, writes) = (script.byte(), script.byte().is_multiple_of(2));
    let (sense, not_begun, error) =
        iscsi::testing::evaluated((status, script.rest()), Lba(7), writes);
    assert!(sense.is_none_or(|sense| sense.key <= 0xf));
    // What is told as an error is one that the contract of `block` knows of a command of this kind.
    match error {
        Some(Error::Unreadable { .. } | Error::Corrupt { .. }) => assert!(!writes),
        Some(Error::Unwritable { .. }) => assert!(writes),
        _ => {}
    }
    let deferred = sense.is_some_and(|sense| sense.deferred);
    assert!(!not_begun || deferred || error.is_none(), "what was not begun is begun again");
}
