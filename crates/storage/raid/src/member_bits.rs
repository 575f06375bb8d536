//! Sets of members, one bit each.

/// A set of members, one bit each.
pub(super) type MemberBits = u128;

/// The bit of a member in a set of members.
pub(super) fn member_bit(member: u16) -> MemberBits {
    1u128.checked_shl(member.into()).unwrap_or(0)
}
