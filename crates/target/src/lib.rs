//! Sockets, protocol machines and volumes, joined.
