//! A disk of this machine: as a device, whose it is, and what lies on it.
//!
//! | module | subject |
//! |---|---|
//! | `raw` | a file, a block device or a part of one as a layer, without a label |
//! | `medium` | what an image lies on: a disk, or a device of blocks |
//! | `label`, `slots` | the label in front of an image ([format](../../../../docs/format/label.md)), and its two copies |
//! | `descriptor` | what an image says of its volume ([format](../../../../docs/format/descriptor.md)) |
//! | `contents`, `foreign` | what else a disk holds, and making it hold nothing |
//! | [`claim`] | one machine at a time uses a disk ([RFD 0034](../../../../docs/rfd/0034-one-disk-two-machines.md)) |
//! | `log_area` | the part of an image that is kept for its write-intent log |

pub mod claim;
mod contents;
pub mod descriptor;
mod error;
mod foreign;
mod label;
mod log_area;
mod medium;
mod raw;
pub mod slots;
mod span;

pub use claim::{
    BEAT_AT, BadRecord, CLAIM_AT, Claim, Gate, Hold, INTERVAL, Lease, Lost, NodeIdentity, NotTaken,
    OWNER_BYTES, OwnerRecord, Refusal, SECOND_AT, STOP, Seen, Step, Subject, check, check_free,
    clear_records, judge, pass, utc,
};
pub use contents::{
    CLEAR_STEP, check_empty, clear, clear_disk, is_unused, known_formats, labelled, read_disk,
    whole_units, write_zeroes,
};
pub use descriptor::{BadDescriptor, DESCRIPTOR_TEXT_MAX, Descriptor};
pub use error::{FileError, HeldBy, Holding, Reason};
pub use foreign::{Foreign, MEMBER};
pub use label::{
    ASIDE_OFFSET, BadLabel, DATA_OFFSET, LABEL_AREA_BYTES, LABEL_BYTES, LOG_AREA, Label, MAX_BYTES,
    Provisioning, SLOTS, State,
};
pub use log_area::{Answer, LOG_TRANSFER_MAX, LogArea};
pub use medium::{Failure, Medium, PAGE};
pub use raw::Raw;
pub use slots::Slots;
pub use span::{Part, Span};
