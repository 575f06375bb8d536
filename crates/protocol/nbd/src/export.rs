//! An export and its properties.

use crate::message::flag;

/// Size constraints of an export ("Size constraints", `NBD_INFO_BLOCK_SIZE`), in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeConstraints {
    /// Offsets and lengths are multiples of this: a power of two, at most 64 KiB.
    pub minimum: u32,
    /// Efficient size: a power of two, at least `minimum` and 512.
    pub preferred: u32,
    /// Most data of one request; not below `preferred`.
    pub payload: u32,
}

impl SizeConstraints {
    /// The protocol's defaults.
    pub const DEFAULT: Self = Self { minimum: 1, preferred: 4096, payload: 32 << 20 };

    /// Whether they satisfy the specification.
    #[must_use]
    pub fn are_valid(&self) -> bool {
        self.minimum.is_power_of_two()
            && self.minimum <= 1 << 16
            && self.preferred.is_power_of_two()
            && self.preferred >= self.minimum.max(512)
            && self.payload >= self.preferred
    }
}

/// Capabilities of an export: the transmission flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransmissionFlags(pub u16);

impl TransmissionFlags {
    /// Whether all of `flags` ([`flag`]) are set.
    #[must_use]
    pub fn has(self, flags: u16) -> bool {
        self.0 & flags == flags
    }
}

/// One export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its name, at most 4096 bytes. Clients that name none get the first export.
    pub name: String,
    /// Description for users, at most 4096 bytes; may be empty.
    pub description: String,
    /// Its size in bytes, a multiple of `sizes.minimum`.
    pub bytes: u64,
    /// Size constraints. They are enforced.
    pub size_constraints: SizeConstraints,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether [`server::Command::Trim`](crate::server::Command::Trim) has an effect.
    pub can_trim: bool,
    /// Zeroing with holes is faster than writing if offset and length are multiples of this, in
    /// bytes; `None` if unknown.
    pub fast_zero_bytes: Option<u32>,
    /// Whether a flush on any connection covers what was completed on all of them.
    pub multi_conn: bool,
}

impl Export {
    /// Its transmission flags for a client with or without structured replies ("Transmission
    /// flags").
    #[must_use]
    pub fn transmission_flags(&self, structured: bool) -> TransmissionFlags {
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA;
        let mut set = |condition: bool, flag: u16| flags |= if condition { flag } else { 0 };
        set(self.read_only, flag::READ_ONLY);
        set(!self.read_only && self.can_trim, flag::SEND_TRIM);
        set(!self.read_only, flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO);
        set(structured, flag::SEND_DF);
        set(self.multi_conn, flag::CAN_MULTI_CONN);
        TransmissionFlags(flags)
    }
}

/// Bytes in a row that are alike (`base:allocation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatusExtent {
    /// How many bytes; not 0.
    pub bytes: u32,
    /// Whether there is no space behind them (`NBD_STATE_HOLE`).
    pub hole: bool,
    /// Whether they read as zeroes (`NBD_STATE_ZERO`).
    pub zero: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_obey_the_specification() {
        let sizes = |minimum, preferred, payload| SizeConstraints { minimum, preferred, payload };
        for good in
            [SizeConstraints::DEFAULT, sizes(512, 512, 512), sizes(1 << 16, 1 << 20, u32::MAX)]
        {
            assert!(good.are_valid(), "{good:?}");
        }
        for bad in [
            sizes(0, 4096, 1 << 20),
            sizes(3, 4096, 1 << 20),
            sizes(1 << 17, 1 << 17, 1 << 20),
            sizes(1, 256, 1 << 20),
            sizes(4096, 512, 1 << 20),
            sizes(512, 4097, 1 << 20),
            sizes(512, 4096, 4095),
        ] {
            assert!(!bad.are_valid(), "{bad:?}");
        }
    }

    #[test]
    fn reported_block_status_is_correct() {
        let export = Export {
            name: String::new(),
            description: String::new(),
            bytes: 0,
            size_constraints: SizeConstraints::DEFAULT,
            read_only: true,
            can_trim: true,
            fast_zero_bytes: None,
            multi_conn: false,
        };
        let offered = export.transmission_flags(false);
        assert_eq!(
            offered.0,
            flag::HAS_FLAGS | flag::READ_ONLY | flag::SEND_FLUSH | flag::SEND_FUA
        );
        let export = Export { read_only: false, multi_conn: true, ..export };
        let offered = export.transmission_flags(true);
        assert!(offered.has(flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO));
        assert!(
            offered.has(flag::SEND_DF | flag::CAN_MULTI_CONN) && !offered.has(flag::SEND_CACHE)
        );
    }
}
