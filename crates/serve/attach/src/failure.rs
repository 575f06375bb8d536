//! Failures, as Linux says them.

use block::{Error, Failure};
use rustix::io::Errno;

/// What those who use a volume by the kernel are told of a failure.
pub(crate) fn errno(failure: &Failure) -> Errno {
    match failure {
        Failure::Device(Error::NoSpace) => Errno::NOSPC,
        Failure::Device(Error::ReadOnly) => Errno::ROFS,
        Failure::Device(Error::OutOfRange) => Errno::INVAL,
        // Only clients of targets are told so: these here wait.
        Failure::Busy => Errno::AGAIN,
        // "Reservation conflict", as Linux says it of its own disks.
        Failure::Conflict => Errno::BADE,
        Failure::Device(
            Error::Unreadable { .. }
            | Error::Corrupt { .. }
            | Error::Unwritable { .. }
            | Error::Fenced
            | Error::Aborted
            | Error::Gone,
        )
        | Failure::Miscompare { .. } => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use block::Lba;

    use super::*;

    #[test]
    fn failures_are_told_as_what_they_are() {
        assert_eq!(errno(&Failure::Device(Error::NoSpace)), Errno::NOSPC);
        assert_eq!(errno(&Failure::Device(Error::Unreadable { at: Lba(0) })), Errno::IO);
        assert_eq!(errno(&Failure::Conflict), Errno::BADE);
    }
}
