//! The label of a member, kept in two copies ([format](../../../../docs/format/pool.md)).
//! [`MemberLabel::parse`] never panics.

use geometry::{MAX_MEMBERS, RaidGeometry};
use pool_metadata::journal::StoredGeometry;
use pool_metadata::{MAX_LOG_RINGS, MemberId, Metadata, VersionId};
use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use wire::{SHORT_TEXT_BYTES, ShortText};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::member_layout::MemberLayout;

/// Length in bytes of a label.
pub const LABEL_BYTES: usize = 4096;

/// Offsets of the two copies in bytes, the same as for images.
pub const LABEL_OFFSETS: [u64; 2] = [0, 512 << 10];

const MAGIC: [u8; 16] = *b"WINDROSE MEMBER\n";

/// The version of a label.
const VERSION: u16 = 1;
const VERSION_WITH_CHECKSUMS: u16 = 2;

wire::open_enum! {
    /// The state of a member, as stored.
    enum StoredLabelState: u16 {
        Initializing = 1,
        Ready = 2,
        Removed = 3,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredLabel {
    magic: [u8; 16],
    version: U16,
    slot: U16,
    checksum: U32,
    generation: U64,
    pool: [u8; 16],
    member_uuid: [u8; 16],
    name: [u8; SHORT_TEXT_BYTES],
    serial: [u8; SHORT_TEXT_BYTES],
    member_id: U16,
    state: U16,
    log_rings: U16,
    reserved_a: U16,
    bytes: U64,
    geometry: StoredGeometry,
    reserved_b: U32,
    term: U64,
    term_first_version: U64,
    term_id: [u8; 16],
}

const FIELD_BYTES: usize = 256;
const _: () = assert!(size_of::<StoredLabel>() == FIELD_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(StoredLabel, checksum);

/// The state of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelState {
    /// It is being made or resynced: usable only if the metadata lists it.
    Initializing,
    /// It is a complete member.
    Ready,
    /// It was a member, and counts as an empty disk.
    Removed,
}

/// The label of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberLabel {
    /// Counts the writes of the label.
    pub generation: u64,
    /// The pool's identity.
    pub pool_id: Uuid,
    /// The pool's name.
    pub pool_name: ShortText,
    /// The member's identity.
    pub member_uuid: Uuid,
    /// Its number, for messages: the metadata has the authoritative one.
    pub member_id: MemberId,
    /// The serial number of the disk that the label was written to.
    pub serial: ShortText,
    /// Its state.
    pub state: LabelState,
    /// The layout of the pool's extents.
    pub geometry: RaidGeometry,
    /// Rings of the parity log on each member.
    pub log_rings: u16,
    /// Offsets and sizes of its areas.
    pub layout: MemberLayout,
    /// The first version of the last term in which it was a voter or learner. Its metadata must
    /// contain at least this version.
    pub term_start: VersionId,
}

/// Why a label cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// It does not begin like a label.
    #[error("no member label")]
    NoMagic,
    /// The checksum is wrong: torn, damaged, or the other copy.
    #[error("a damaged member label")]
    Damaged,
    /// Of a newer format version.
    #[error("a member label of version {0}, which this release does not know")]
    UnknownVersion(u16),
    /// The checksum is right, but a field is invalid.
    #[error("a member label with an invalid {0}")]
    InvalidField(&'static str),
}

impl MemberLabel {
    fn format_version(&self) -> u16 {
        if self.layout.dirty_lists_at.is_some() { VERSION_WITH_CHECKSUMS } else { VERSION }
    }

    /// The bytes of copy number `slot`.
    #[must_use]
    pub fn to_bytes(&self, slot: u16) -> [u8; LABEL_BYTES] {
        let state = match self.state {
            LabelState::Initializing => StoredLabelState::Initializing,
            LabelState::Ready => StoredLabelState::Ready,
            LabelState::Removed => StoredLabelState::Removed,
        };
        let fields = StoredLabel {
            magic: MAGIC,
            version: self.format_version().into(),
            slot: slot.into(),
            checksum: 0.into(),
            generation: self.generation.into(),
            pool: self.pool_id.into_bytes(),
            member_uuid: self.member_uuid.into_bytes(),
            name: self.pool_name.to_bytes(),
            serial: self.serial.to_bytes(),
            member_id: self.member_id.0.into(),
            state: state.0.into(),
            log_rings: self.log_rings.into(),
            reserved_a: 0.into(),
            bytes: self.layout.used_bytes.into(),
            geometry: StoredGeometry::from_geometry(&self.geometry),
            reserved_b: 0.into(),
            term: self.term_start.term.into(),
            term_first_version: self.term_start.version.into(),
            term_id: self.term_start.term_id.into_bytes(),
        };
        let mut out = [0; LABEL_BYTES];
        out[..FIELD_BYTES].copy_from_slice(fields.as_bytes());
        write_checksum(&mut out, CHECKSUM_AT);
        out
    }

    /// Parses copy number `slot`.
    ///
    /// # Errors
    /// Why it is no usable label.
    pub fn parse(bytes: &[u8; LABEL_BYTES], slot: u16) -> Result<Self, LabelError> {
        let (fields, rest) =
            StoredLabel::read_from_prefix(bytes).map_err(|_| LabelError::NoMagic)?;
        if fields.magic != MAGIC {
            return Err(LabelError::NoMagic);
        }
        if !verify_checksum(bytes, CHECKSUM_AT) || fields.slot.get() != slot {
            return Err(LabelError::Damaged);
        }
        if !matches!(fields.version.get(), VERSION | VERSION_WITH_CHECKSUMS) {
            return Err(LabelError::UnknownVersion(fields.version.get()));
        }
        let reserved = fields.reserved_a.get() == 0 && fields.reserved_b.get() == 0;
        if !reserved || rest.iter().any(|b| *b != 0) {
            return Err(LabelError::InvalidField("reserved part"));
        }
        Self::from_stored(&fields)
    }

    fn from_stored(fields: &StoredLabel) -> Result<Self, LabelError> {
        let state = match StoredLabelState(fields.state.get()) {
            StoredLabelState::Initializing => LabelState::Initializing,
            StoredLabelState::Ready => LabelState::Ready,
            StoredLabelState::Removed => LabelState::Removed,
            _ => return Err(LabelError::InvalidField("state")),
        };
        let (pool, name) = (Uuid::from_bytes(fields.pool), ShortText::parse(&fields.name));
        let (name, log_rings) =
            (name.ok_or(LabelError::InvalidField("name"))?, fields.log_rings.get());
        let geometry = fields.geometry.parse().ok_or(LabelError::InvalidField("geometry"))?;
        if !(1..=MAX_LOG_RINGS).contains(&log_rings) {
            return Err(LabelError::InvalidField("number of rings"));
        }
        let model = Metadata::new(pool, name, geometry, log_rings);
        model.check_geometry(&geometry).map_err(|_| LabelError::InvalidField("geometry"))?;
        let has_checksums = fields.version.get() == VERSION_WITH_CHECKSUMS;
        let layout = MemberLayout::compute(fields.bytes.get(), &geometry, log_rings, has_checksums);
        let member_id = Some(MemberId(fields.member_id.get())).filter(|id| id.0 < MAX_MEMBERS);
        Ok(Self {
            generation: fields.generation.get(),
            pool_id: pool,
            pool_name: name,
            member_uuid: Uuid::from_bytes(fields.member_uuid),
            member_id: member_id.ok_or(LabelError::InvalidField("number"))?,
            serial: ShortText::parse(&fields.serial)
                .ok_or(LabelError::InvalidField("serial number"))?,
            state,
            geometry,
            log_rings,
            layout: layout.ok_or(LabelError::InvalidField("size"))?,
            term_start: VersionId {
                term: fields.term.get(),
                version: fields.term_first_version.get(),
                term_id: Uuid::from_bytes(fields.term_id),
            },
        })
    }
}

/// The newer label of the two copies; `None` if there is neither.
///
/// # Errors
/// Why neither can be used; or that one has an unknown format, and may be the newer one.
pub fn newest_label(
    found: [Result<MemberLabel, LabelError>; 2],
) -> Result<Option<MemberLabel>, LabelError> {
    let is_unknown =
        |e: &LabelError| matches!(e, LabelError::UnknownVersion(_) | LabelError::InvalidField(_));
    if let Some(unknown) = found.iter().filter_map(|f| f.as_ref().err()).find(|e| is_unknown(e)) {
        return Err(*unknown);
    }
    match found {
        [Ok(a), Ok(b)] => Ok(Some(if b.generation > a.generation { b } else { a })),
        [Ok(label), _] | [_, Ok(label)] => Ok(Some(label)),
        [Err(LabelError::NoMagic), Err(LabelError::NoMagic)] => Ok(None),
        _ => Err(LabelError::Damaged),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use pool_metadata::samples::raid5;
    use wire::embedded_checksum::with_checksum;

    fn label() -> MemberLabel {
        let geometry = raid5(5);
        MemberLabel {
            generation: 7,
            pool_id: Uuid::from_u128(1),
            pool_name: ShortText::new("tank"),
            member_uuid: Uuid::from_u128(2),
            member_id: MemberId(3),
            serial: ShortText::new("S3X"),
            state: LabelState::Ready,
            geometry,
            log_rings: 2,
            layout: MemberLayout::compute(1 << 30, &geometry, 2, false).unwrap(),
            term_start: VersionId { term: 4, version: 99, term_id: Uuid::from_u128(5) },
        }
    }

    #[test]
    fn a_block_parses_only_at_its_own_position() {
        for state in [LabelState::Initializing, LabelState::Ready, LabelState::Removed] {
            let label = MemberLabel { state, ..label() };
            assert_eq!(MemberLabel::parse(&label.to_bytes(1), 1), Ok(label));
            assert_eq!(MemberLabel::parse(&label.to_bytes(1), 0), Err(LabelError::Damaged));
        }
    }

    #[test]
    fn invalid_fields_are_named() {
        let with = |at: usize, value: u16| {
            let mut bytes = label().to_bytes(0);
            bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
            MemberLabel::parse(&with_checksum(bytes, CHECKSUM_AT), 0)
        };
        assert_eq!(with(0, 0), Err(LabelError::NoMagic));
        assert!(with(16, 2).unwrap().layout.dirty_lists_at.is_some());
        assert_eq!(with(16, 3), Err(LabelError::UnknownVersion(3)));
        for (at, what) in [
            (192, "number"),
            (194, "state"),
            (196, "number of rings"),
            (198, "reserved part"),
            (208, "geometry"),
            (4000, "reserved part"),
        ] {
            assert_eq!(with(at, 0xff00), Err(LabelError::InvalidField(what)), "{at}");
        }
        let mut torn = label().to_bytes(0);
        torn[4095] = 1;
        assert_eq!(MemberLabel::parse(&torn, 0), Err(LabelError::Damaged));
    }

    #[test]
    fn the_newer_copy_wins_and_an_unknown_one_is_refused() {
        let (old, new) = (label(), MemberLabel { generation: 8, ..label() });
        assert_eq!(newest_label([Ok(old), Ok(new)]), Ok(Some(new)));
        assert_eq!(newest_label([Ok(old), Err(LabelError::Damaged)]), Ok(Some(old)));
        assert_eq!(newest_label([Err(LabelError::NoMagic); 2]), Ok(None));
        assert_eq!(
            newest_label([Err(LabelError::NoMagic), Err(LabelError::Damaged)]),
            Err(LabelError::Damaged)
        );
        assert_eq!(
            newest_label([Ok(old), Err(LabelError::UnknownVersion(3))]),
            Err(LabelError::UnknownVersion(3))
        );
    }

    /// What lies on disks is read for ever.
    #[test]
    fn golden_labels() {
        let layout = MemberLayout::compute(1 << 30, &raid5(5), 2, true).unwrap();
        let labels = [label(), MemberLabel { layout, ..label() }];
        let sums = labels.map(|label| wire::crc32c(&label.to_bytes(0)));
        assert_eq!(sums, GOLDEN);
    }

    /// Without and with checksums.
    const GOLDEN: [u32; 2] = [3_984_774_720, 4_053_534_028];

    proptest! {
        #[test]
        fn arbitrary_label_bytes_do_not_panic(
            fields in prop::collection::vec(any::<u8>(), FIELD_BYTES - 16),
            version in VERSION..=VERSION_WITH_CHECKSUMS,
        ) {
            let mut bytes = [0; LABEL_BYTES];
            bytes[..16].copy_from_slice(&MAGIC);
            bytes[16..FIELD_BYTES].copy_from_slice(&fields);
            bytes[16..18].copy_from_slice(&version.to_le_bytes());
            bytes[18..20].fill(0);
            let bytes = with_checksum(bytes, CHECKSUM_AT);
            if let Ok(label) = MemberLabel::parse(&bytes, 0) {
                prop_assert_eq!(label.to_bytes(0), bytes);
            }
        }
    }
}
