//! Who may use a volume: the persistent reservations of SCSI (SPC-4 5.12) and NVMe, and what else
//! the initiators of one volume share and a node by itself cannot know.
//!
//! All nodes that serve a volume keep one [`Table`]. A change is a pure function from the table
//! that holds to its successor, which is written durably before anybody is answered:
//!
//! ```text
//! as_of(era, seated) -> Table              what still holds of a table that was written
//! change(by, seat, change) -> Table        the successor; nothing to do; or a refusal
//! encode() -> bytes, parse(bytes)          as it lies on disk (docs/format/reservations.md)
//! rights(party) -> Rights                  what a party may do
//! notices(old, new, party) -> Notices      what it must be told of a change
//! ```
//!
//! Nothing here does I/O or knows a protocol's bytes. Clauses are those of SPC-4 r37 and, for
//! RESERVE and RELEASE, SPC-2 r20.

mod change;
mod format;
mod notices;
mod party;
mod preempt;
mod register;
mod rights;
mod table;

pub use change::{Change, Enlisting, Field, Refusal};
pub use format::{COPY_BYTES, Damaged, MAX_REGISTRANTS};
pub use notices::{Notice, Notices};
pub use party::{Initiator, MAX_NAME, Party};
pub use rights::Rights;
pub use table::{Kind, Last, Registrant, Reservation, Sole, Table, What};
