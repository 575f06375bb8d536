//! The label of a member, kept twice ([format](../../../../docs/format/pool.md)). [`Label::parse`] is total.

use geometry::{MAX_MEMBERS, Shape};
use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use wire::{TEXT_BYTES, Text};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::journal::StoredShape;
use super::layout::Layout;
use super::metadata::{MAX_RINGS, MemberId, Metadata, Stamp};

/// Length in bytes of a label.
pub const LABEL_BYTES: usize = 4096;

/// Where the two copies are, in bytes from the start: where images have theirs.
pub const SLOTS: [u64; 2] = [0, 512 << 10];

const MAGIC: [u8; 16] = *b"WINDROSE MEMBER\n";

/// The version of a label, and that of one whose pool has checksums.
const VERSION: u16 = 1;
const CHECKED: u16 = 2;

wire::open_enum! {
    /// How far a member's life has come, as stored.
    enum StoredState: u16 {
        Making = 1,
        Made = 2,
        Removed = 3,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Stored {
    magic: [u8; 16],
    version: U16,
    slot: U16,
    checksum: U32,
    generation: U64,
    pool: [u8; 16],
    member: [u8; 16],
    name: [u8; TEXT_BYTES],
    serial: [u8; TEXT_BYTES],
    number: U16,
    state: U16,
    rings: U16,
    reserved_a: U16,
    bytes: U64,
    shape: StoredShape,
    reserved_b: U32,
    opening: U64,
    opened: U64,
    opening_id: [u8; 16],
}

const FIELDS: usize = 256;
const _: () = assert!(size_of::<Stored>() == FIELDS);
const CHECKSUM_AT: usize = std::mem::offset_of!(Stored, checksum);

/// How far a member's life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is being made: of use only if the metadata has it.
    Making,
    /// It is one.
    Made,
    /// It was one, and is to be taken for nothing.
    Removed,
}

/// What the label of a member says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Counts the changes of the label.
    pub generation: u64,
    /// The pool.
    pub pool: Uuid,
    /// What it is called.
    pub name: Text,
    /// The member.
    pub member: Uuid,
    /// Its number, for messages: what counts is what the metadata says.
    pub number: MemberId,
    /// The serial number of the disk that it was made on.
    pub serial: Text,
    /// How far its life has come.
    pub state: State,
    /// How extents of the pool lie on their columns.
    pub shape: Shape,
    /// Rings of the parity log on each member.
    pub rings: u16,
    /// What of it is where.
    pub layout: Layout,
    /// The version with which the last opening began that it was in: it has that one at least.
    pub opened: Stamp,
}

/// Why bytes are no usable label of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadLabel {
    /// They do not begin like one.
    #[error("no label of a pool's member")]
    NoMagic,
    /// The checksum does not fit: torn, damaged, or in the other copy's place.
    #[error("a damaged label of a pool's member")]
    Damaged,
    /// A newer version's.
    #[error("a label of a pool's member of version {0}, which this release does not know")]
    Version(u16),
    /// The checksum fits, and a field makes no sense.
    #[error("a label of a pool's member whose {0} makes no sense")]
    Field(&'static str),
}

impl Label {
    fn version(&self) -> u16 {
        if self.layout.lists_at.is_some() { CHECKED } else { VERSION }
    }

    /// The bytes of copy number `slot`.
    #[must_use]
    pub fn to_bytes(&self, slot: u16) -> [u8; LABEL_BYTES] {
        let state = match self.state {
            State::Making => StoredState::Making,
            State::Made => StoredState::Made,
            State::Removed => StoredState::Removed,
        };
        let fields = Stored {
            magic: MAGIC,
            version: self.version().into(),
            slot: slot.into(),
            checksum: 0.into(),
            generation: self.generation.into(),
            pool: self.pool.into_bytes(),
            member: self.member.into_bytes(),
            name: self.name.to_bytes(),
            serial: self.serial.to_bytes(),
            number: self.number.0.into(),
            state: state.0.into(),
            rings: self.rings.into(),
            reserved_a: 0.into(),
            bytes: self.layout.bytes.into(),
            shape: StoredShape::of(&self.shape),
            reserved_b: 0.into(),
            opening: self.opened.opening.into(),
            opened: self.opened.version.into(),
            opening_id: self.opened.id.into_bytes(),
        };
        let mut out = [0; LABEL_BYTES];
        out[..FIELDS].copy_from_slice(fields.as_bytes());
        seal(&mut out, CHECKSUM_AT);
        out
    }

    /// The label that copy number `slot` holds.
    ///
    /// # Errors
    /// Why there is none, whatever the bytes are.
    pub fn parse(bytes: &[u8; LABEL_BYTES], slot: u16) -> Result<Self, BadLabel> {
        let (fields, rest) = Stored::read_from_prefix(bytes).map_err(|_| BadLabel::NoMagic)?;
        if fields.magic != MAGIC {
            return Err(BadLabel::NoMagic);
        }
        if !is_sealed(bytes, CHECKSUM_AT) || fields.slot.get() != slot {
            return Err(BadLabel::Damaged);
        }
        if !matches!(fields.version.get(), VERSION | CHECKED) {
            return Err(BadLabel::Version(fields.version.get()));
        }
        let reserved = fields.reserved_a.get() == 0 && fields.reserved_b.get() == 0;
        if !reserved || rest.iter().any(|b| *b != 0) {
            return Err(BadLabel::Field("reserved part"));
        }
        Self::of(&fields)
    }

    fn of(fields: &Stored) -> Result<Self, BadLabel> {
        let state = match StoredState(fields.state.get()) {
            StoredState::Making => State::Making,
            StoredState::Made => State::Made,
            StoredState::Removed => State::Removed,
            _ => return Err(BadLabel::Field("state")),
        };
        let (pool, name) = (Uuid::from_bytes(fields.pool), Text::parse(&fields.name));
        let (name, rings) = (name.ok_or(BadLabel::Field("name"))?, fields.rings.get());
        let shape = fields.shape.parse().ok_or(BadLabel::Field("shape"))?;
        if !(1..=MAX_RINGS).contains(&rings) {
            return Err(BadLabel::Field("number of rings"));
        }
        let model = Metadata::new(pool, name, shape, rings);
        model.is_shape(&shape).map_err(|_| BadLabel::Field("shape"))?;
        let checksums = fields.version.get() == CHECKED;
        let layout = Layout::of(fields.bytes.get(), &shape, rings, checksums);
        let number = Some(MemberId(fields.number.get())).filter(|id| id.0 < MAX_MEMBERS);
        Ok(Self {
            generation: fields.generation.get(),
            pool,
            name,
            member: Uuid::from_bytes(fields.member),
            number: number.ok_or(BadLabel::Field("number"))?,
            serial: Text::parse(&fields.serial).ok_or(BadLabel::Field("serial number"))?,
            state,
            shape,
            rings,
            layout: layout.ok_or(BadLabel::Field("size"))?,
            opened: Stamp {
                opening: fields.opening.get(),
                version: fields.opened.get(),
                id: Uuid::from_bytes(fields.opening_id),
            },
        })
    }
}

/// The label that counts of what the two places hold: the newer one. None where neither holds anything of the kind.
///
/// # Errors
/// Why neither can be used; or that one is of a release that is not known, and may be the newer one.
pub fn choose(found: [Result<Label, BadLabel>; 2]) -> Result<Option<Label>, BadLabel> {
    let strange = |e: &BadLabel| matches!(e, BadLabel::Version(_) | BadLabel::Field(_));
    if let Some(strange) = found.iter().filter_map(|f| f.as_ref().err()).find(|e| strange(e)) {
        return Err(*strange);
    }
    match found {
        [Ok(a), Ok(b)] => Ok(Some(if b.generation > a.generation { b } else { a })),
        [Ok(label), _] | [_, Ok(label)] => Ok(Some(label)),
        [Err(BadLabel::NoMagic), Err(BadLabel::NoMagic)] => Ok(None),
        _ => Err(BadLabel::Damaged),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::metadata::tests::raid5;
    use wire::seal::sealed;

    fn label() -> Label {
        let shape = raid5(5);
        Label {
            generation: 7,
            pool: Uuid::from_u128(1),
            name: Text::new("tank"),
            member: Uuid::from_u128(2),
            number: MemberId(3),
            serial: Text::new("S3X"),
            state: State::Made,
            shape,
            rings: 2,
            layout: Layout::of(1 << 30, &shape, 2, false).unwrap(),
            opened: Stamp { opening: 4, version: 99, id: Uuid::from_u128(5) },
        }
    }

    #[test]
    fn it_reads_back_in_its_own_place_only() {
        for state in [State::Making, State::Made, State::Removed] {
            let label = Label { state, ..label() };
            assert_eq!(Label::parse(&label.to_bytes(1), 1), Ok(label));
            assert_eq!(Label::parse(&label.to_bytes(1), 0), Err(BadLabel::Damaged));
        }
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let with = |at: usize, value: u16| {
            let mut bytes = label().to_bytes(0);
            bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
            Label::parse(&sealed(bytes, CHECKSUM_AT), 0)
        };
        assert_eq!(with(0, 0), Err(BadLabel::NoMagic));
        assert!(with(16, 2).unwrap().layout.lists_at.is_some());
        assert_eq!(with(16, 3), Err(BadLabel::Version(3)));
        for (at, what) in [
            (192, "number"),
            (194, "state"),
            (196, "number of rings"),
            (198, "reserved part"),
            (208, "shape"),
            (4000, "reserved part"),
        ] {
            assert_eq!(with(at, 0xff00), Err(BadLabel::Field(what)), "{at}");
        }
        let mut torn = label().to_bytes(0);
        torn[4095] = 1;
        assert_eq!(Label::parse(&torn, 0), Err(BadLabel::Damaged));
    }

    #[test]
    fn the_newer_copy_counts_and_a_strange_one_forbids_all() {
        let (old, new) = (label(), Label { generation: 8, ..label() });
        assert_eq!(choose([Ok(old), Ok(new)]), Ok(Some(new)));
        assert_eq!(choose([Ok(old), Err(BadLabel::Damaged)]), Ok(Some(old)));
        assert_eq!(choose([Err(BadLabel::NoMagic); 2]), Ok(None));
        assert_eq!(
            choose([Err(BadLabel::NoMagic), Err(BadLabel::Damaged)]),
            Err(BadLabel::Damaged)
        );
        assert_eq!(choose([Ok(old), Err(BadLabel::Version(3))]), Err(BadLabel::Version(3)));
    }

    /// What lies on disks is read for ever.
    #[test]
    fn the_golden_labels_are_what_they_were() {
        let layout = Layout::of(1 << 30, &raid5(5), 2, true).unwrap();
        let labels = [label(), Label { layout, ..label() }];
        let sums = labels.map(|label| wire::crc32c(&label.to_bytes(0)));
        assert_eq!(sums, GOLDEN);
    }

    /// Without and with checksums.
    const GOLDEN: [u32; 2] = [3_984_774_720, 4_053_534_028];

    proptest! {
        #[test]
        fn any_bytes_are_a_label_or_none(
            fields in prop::collection::vec(any::<u8>(), FIELDS - 16),
            version in VERSION..=CHECKED,
        ) {
            let mut bytes = [0; LABEL_BYTES];
            bytes[..16].copy_from_slice(&MAGIC);
            bytes[16..FIELDS].copy_from_slice(&fields);
            bytes[16..18].copy_from_slice(&version.to_le_bytes());
            bytes[18..20].fill(0);
            let bytes = sealed(bytes, CHECKSUM_AT);
            if let Ok(label) = Label::parse(&bytes, 0) {
                prop_assert_eq!(label.to_bytes(0), bytes);
            }
        }
    }
}
