//! The layers of a storage stack.
