//! A connection that receives any bytes ends with a reason, and leaves nothing behind.

#[path = "script/feed.rs"]
mod script;

use proptest::prelude::*;

proptest! {
    #[test]
    fn on_arbitrary_input_the_connection_ends_and_frees_its_memory(
        line: u8,
        made: bool,
        portion: u16,
        bytes in prop::collection::vec(any::<u8>(), 0..2000),
    ) {
        script::feed(line, made, portion, &bytes);
    }

    /// Mostly zeroes, so that some of it is valid.
    #[test]
    fn on_half_valid_input_the_connection_ends_and_frees_its_memory(
        line in 0..3u8,
        portion: u16,
        kinds in prop::collection::vec((2..40u8, any::<u8>(), 0..6u8), 1..8),
    ) {
        let mut script = Vec::new();
        for (kind, scale, small) in kinds {
            let mut frame = [0; 66];
            (frame[0], frame[1], frame[2 + 3]) = (scale, 3, kind);
            frame[2 + 32] = small;
            frame[2 + 56] = small;
            script.extend(frame);
        }
        script::feed(line, true, portion, &script);
    }
}

/// The scripts reach messages: otherwise they would prove little.
#[test]
fn valid_frames_are_accepted() {
    let mut applied = [0; 66];
    applied[2 + 3] = 21;
    let mut write = [0; 66];
    (write[0], write[1], write[2 + 3], write[2 + 56]) = (16 << 2 | 3, 7, 20, 1);
    let twice = |frame: [u8; 66]| [frame, frame].concat();
    assert_eq!(script::feed(0, true, 3, &twice(applied)), 2);
    assert_eq!(script::feed(1, true, 3, &twice(write)), 2);
}
