//! The command window: `CmdSN`, `ExpCmdSN`, `MaxCmdSN` (RFC 7143 4.2.2.1).

use super::Config;
use crate::serial::Serial;

/// Numbers commands and bounds how many are outstanding.
#[derive(Clone, Debug)]
pub(super) struct Window {
    expected: Serial,
    max: Serial,
    size: u32,
    /// Numbered commands that have arrived and have not been answered.
    outstanding: u32,
}

/// What to do with a PDU that has a command number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It is the next one, or immediate.
    Next,
    /// It lies outside the window: ignore it.
    Outside,
    /// Commands before it are missing, which on a single connection cannot be made good.
    Gap,
}

impl Window {
    pub(super) fn new(first: Serial, size: u32) -> Self {
        let mut window = Self {
            expected: first,
            max: first.plus(u32::MAX),
            size: Config::clamp_window(size),
            outstanding: 0,
        };
        window.open();
        window
    }

    /// A PDU with number `cmd_sn` has arrived.
    pub(super) fn arrive(&mut self, cmd_sn: Serial) -> Place {
        if cmd_sn.is_before(self.expected) || self.max.is_before(cmd_sn) {
            return Place::Outside;
        }
        if cmd_sn != self.expected {
            return Place::Gap;
        }
        self.expected = self.expected.plus(1);
        self.outstanding += 1;
        Place::Next
    }

    /// A numbered command has been answered, or will never be.
    pub(super) fn answered(&mut self) {
        debug_assert!(self.outstanding > 0, "more answers than commands");
        self.outstanding = self.outstanding.saturating_sub(1);
        self.open();
    }

    /// Changes how many commands may be outstanding; whether that opened the window further.
    pub(super) fn resize(&mut self, size: u32) -> bool {
        self.size = Config::clamp_window(size);
        let before = self.max;
        self.open();
        self.max != before
    }

    /// What was announced is never taken back: the window shrinks as commands are answered.
    fn open(&mut self) {
        let room = self.size.saturating_sub(self.outstanding);
        let max = self.expected.plus(room).plus(u32::MAX);
        if self.max.is_before(max) {
            self.max = max;
        }
    }

    /// Numbered commands that have arrived and have not been answered.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding as usize
    }

    pub(super) fn expected(&self) -> Serial {
        self.expected
    }

    pub(super) fn max(&self) -> Serial {
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(w: &Window) -> (u32, u32) {
        (w.expected().0, w.max().0)
    }

    /// RFC 7143 4.2.2.1.
    #[test]
    fn the_window_moves_with_the_answers() {
        let mut w = Window::new(Serial(u32::MAX), 2);
        assert_eq!(bounds(&w), (u32::MAX, 0));
        assert_eq!(w.arrive(Serial(u32::MAX)), Place::Next);
        assert_eq!(w.arrive(Serial(u32::MAX)), Place::Outside, "a duplicate");
        assert_eq!(w.arrive(Serial(1)), Place::Outside, "beyond MaxCmdSN");
        assert_eq!(w.arrive(Serial(0)), Place::Next);
        assert_eq!(bounds(&w), (1, 0), "closed");
        assert_eq!(w.arrive(Serial(1)), Place::Outside);
        w.answered();
        assert_eq!(bounds(&w), (1, 1));
        w.answered();
        assert_eq!(w.arrive(Serial(2)), Place::Gap);
    }

    /// RFC 7143 4.2.2.1: what was announced is not taken back.
    #[test]
    fn a_window_shrinks_by_not_growing() {
        let mut w = Window::new(Serial(0), 4);
        assert_eq!(w.arrive(Serial(0)), Place::Next);
        assert!(!w.resize(1));
        assert_eq!(bounds(&w), (1, 3));
        for sn in 1..4 {
            assert_eq!(w.arrive(Serial(sn)), Place::Next);
        }
        for _ in 0..3 {
            w.answered();
            assert_eq!(bounds(&w), (4, 3), "one is still outstanding");
        }
        w.answered();
        assert_eq!(bounds(&w), (4, 4));
        assert!(w.resize(8));
        assert_eq!(bounds(&w), (4, 11));
    }
}
