//! A read whose data is being sent, and what its status says about the transfer.

use rt::buf::Bufs;

use crate::pdu::ScsiResponse;

/// Status of a command, as sent to the initiator.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandEnd {
    pub(super) itt: u32,
    pub(super) status: u8,
    pub(super) residual: Residual,
}

/// A read whose data is being sent.
#[derive(Debug)]
pub(super) struct ReadTransfer {
    pub(super) end: CommandEnd,
    pub(super) sense: Box<[u8]>,
    pub(super) data: Bufs,
    /// First byte that has not been sent.
    pub(super) position: usize,
    /// Latest end of the current sequence of PDUs.
    pub(super) burst_end: usize,
    /// PDUs sent.
    pub(super) pdus: u32,
}

/// By how much a transfer missed what the initiator expected (RFC 7143 11.4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Residual {
    pub(super) flags: u8,
    pub(super) count: u32,
}

impl Residual {
    pub(super) fn of(expected: u32, presented: u64) -> Self {
        let expected = u64::from(expected);
        let flags = match presented.cmp(&expected) {
            std::cmp::Ordering::Less => ScsiResponse::UNDERFLOW,
            std::cmp::Ordering::Equal => 0,
            std::cmp::Ordering::Greater => ScsiResponse::OVERFLOW,
        };
        let count = u32::try_from(presented.abs_diff(expected)).unwrap_or(u32::MAX);
        Self { flags, count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7143 11.4.5.1.
    #[test]
    fn residuals_count_both_ways() {
        let of = |e, p| {
            let r = Residual::of(e, p);
            (r.flags, r.count)
        };
        assert_eq!(of(512, 512), (0, 0));
        assert_eq!(of(512, 36), (0x02, 476));
        assert_eq!(of(0, 512), (0x04, 512));
        assert_eq!(of(0, u64::MAX), (0x04, u32::MAX));
    }
}
