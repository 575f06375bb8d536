//! Bytes to and from protocol machines, in portions of any length.

use frame::Machine;

/// Takes all that a machine wants to send.
pub fn take(machine: &mut impl Machine, portion: &mut dyn FnMut() -> usize) -> Vec<u8> {
    let mut taken = Vec::new();
    while !machine.output().is_empty() {
        let queue = machine.output();
        let n = portion().clamp(1, queue.len());
        taken.extend(queue.slices().flat_map(|slice| slice.to_vec()).take(n));
        queue.advance(n);
    }
    taken
}

/// Gives a machine `bytes`; returns how many it has taken.
pub fn feed(machine: &mut impl Machine, bytes: &[u8], portion: &mut dyn FnMut() -> usize) -> usize {
    let mut at = 0;
    while at < bytes.len()
        && let Some(space) = machine.receive_space()
    {
        assert!(!space.is_empty(), "an empty space would mean end of stream");
        let n = portion().clamp(1, space.len()).min(bytes.len() - at);
        space[..n].copy_from_slice(&bytes[at..at + n]);
        machine.on_received(n);
        at += n;
    }
    at
}
