//! The unit as an initiator sees it, clause by clause. `docs/conformance/scsi.md` is the index.

mod atomic;
mod capacity;
mod copy;
mod copy_oracle;
mod harness;
mod inquiry;
mod lifecycle;
mod mode;
mod oracle;
mod persistent;
mod ports;
mod provisioning;
mod random;
mod rw;
mod service;
mod space;
mod supported;
mod token;
mod verify;
