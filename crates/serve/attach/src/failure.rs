//! Failures as Linux error numbers.

use block::{Error, RequestError};
use rustix::io::Errno;

/// The error number that users of a volume get from the kernel.
pub(crate) fn errno(failure: &RequestError) -> Errno {
    match failure {
        RequestError::Device(Error::NoSpace) => Errno::NOSPC,
        RequestError::Device(Error::ReadOnly) => Errno::ROFS,
        RequestError::Device(Error::OutOfRange) => Errno::INVAL,
        // Reported only to clients of targets: front ends here wait.
        RequestError::NoMemory => Errno::AGAIN,
        // "Reservation conflict", as Linux reports it for its own disks.
        RequestError::ReservationConflict => Errno::BADE,
        RequestError::Device(
            Error::Unreadable { .. }
            | Error::Corrupt { .. }
            | Error::Unwritable { .. }
            | Error::Fenced
            | Error::Aborted
            | Error::Gone,
        )
        | RequestError::Miscompare { .. } => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use block::Lba;

    use super::*;

    #[test]
    fn failures_map_to_errno() {
        assert_eq!(errno(&RequestError::Device(Error::NoSpace)), Errno::NOSPC);
        assert_eq!(errno(&RequestError::Device(Error::Unreadable { at: Lba(0) })), Errno::IO);
        assert_eq!(errno(&RequestError::ReservationConflict), Errno::BADE);
    }
}
