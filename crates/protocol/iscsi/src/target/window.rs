//! The command window: `CmdSN`, `ExpCmdSN`, `MaxCmdSN` (RFC 7143 4.2.2.1).

use super::Config;
use crate::sequence_number::SequenceNumber;

/// Tracks command numbers and limits outstanding commands.
#[derive(Clone, Debug)]
pub(super) struct CommandWindow {
    expected: SequenceNumber,
    max: SequenceNumber,
    size: u32,
    /// Numbered commands received and not answered.
    outstanding: u32,
}

/// What to do with a PDU that has a command number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CmdSnCheck {
    /// It is the next one, or immediate.
    Next,
    /// Outside the window: ignore it.
    Outside,
    /// Earlier commands are missing, which is irrecoverable on a single connection.
    Gap,
}

impl CommandWindow {
    pub(super) fn new(first: SequenceNumber, size: u32) -> Self {
        let mut window = Self {
            expected: first,
            max: first.plus(u32::MAX),
            size: Config::clamp_window(size),
            outstanding: 0,
        };
        window.reopen();
        window
    }

    /// Checks the number `cmd_sn` of a PDU.
    pub(super) fn on_command(&mut self, cmd_sn: SequenceNumber) -> CmdSnCheck {
        if cmd_sn.is_before(self.expected) || self.max.is_before(cmd_sn) {
            return CmdSnCheck::Outside;
        }
        if cmd_sn != self.expected {
            return CmdSnCheck::Gap;
        }
        self.expected = self.expected.plus(1);
        self.outstanding += 1;
        CmdSnCheck::Next
    }

    /// Records that a numbered command was answered, or never will be.
    pub(super) fn release(&mut self) {
        debug_assert!(self.outstanding > 0, "more answers than commands");
        self.outstanding = self.outstanding.saturating_sub(1);
        self.reopen();
    }

    /// Changes the window size. Returns whether the window opened further.
    pub(super) fn resize(&mut self, size: u32) -> bool {
        self.size = Config::clamp_window(size);
        let before = self.max;
        self.reopen();
        self.max != before
    }

    /// An announced window is never revoked: it shrinks as commands are answered.
    fn reopen(&mut self) {
        let room = self.size.saturating_sub(self.outstanding);
        let max = self.expected.plus(room).plus(u32::MAX);
        if self.max.is_before(max) {
            self.max = max;
        }
    }

    /// Numbered commands received and not answered.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding as usize
    }

    pub(super) fn expected(&self) -> SequenceNumber {
        self.expected
    }

    pub(super) fn max(&self) -> SequenceNumber {
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(w: &CommandWindow) -> (u32, u32) {
        (w.expected().0, w.max().0)
    }

    /// RFC 7143 4.2.2.1.
    #[test]
    fn the_window_moves_with_the_answers() {
        let mut w = CommandWindow::new(SequenceNumber(u32::MAX), 2);
        assert_eq!(bounds(&w), (u32::MAX, 0));
        assert_eq!(w.on_command(SequenceNumber(u32::MAX)), CmdSnCheck::Next);
        assert_eq!(w.on_command(SequenceNumber(u32::MAX)), CmdSnCheck::Outside, "a duplicate");
        assert_eq!(w.on_command(SequenceNumber(1)), CmdSnCheck::Outside, "beyond MaxCmdSN");
        assert_eq!(w.on_command(SequenceNumber(0)), CmdSnCheck::Next);
        assert_eq!(bounds(&w), (1, 0), "closed");
        assert_eq!(w.on_command(SequenceNumber(1)), CmdSnCheck::Outside);
        w.release();
        assert_eq!(bounds(&w), (1, 1));
        w.release();
        assert_eq!(w.on_command(SequenceNumber(2)), CmdSnCheck::Gap);
    }

    /// RFC 7143 4.2.2.1: what was announced is not taken back.
    #[test]
    fn a_window_shrinks_by_not_growing() {
        let mut w = CommandWindow::new(SequenceNumber(0), 4);
        assert_eq!(w.on_command(SequenceNumber(0)), CmdSnCheck::Next);
        assert!(!w.resize(1));
        assert_eq!(bounds(&w), (1, 3));
        for sn in 1..4 {
            assert_eq!(w.on_command(SequenceNumber(sn)), CmdSnCheck::Next);
        }
        for _ in 0..3 {
            w.release();
            assert_eq!(bounds(&w), (4, 3), "one is still outstanding");
        }
        w.release();
        assert_eq!(bounds(&w), (4, 4));
        assert!(w.resize(8));
        assert_eq!(bounds(&w), (4, 11));
    }
}
