//! Disks of this machine: device access, on-disk labels, recognition of their contents, and claims.
//!
//! | module | subject |
//! |---|---|
//! | `raw` | a file, a block device or a part of one as a layer, without a label |
//! | `medium` | what an image lies on: a disk or a block device |
//! | `label`, `label_copies` | the label in front of an image ([format](../../../../docs/format/label.md)), and its two copies |
//! | `descriptor` | the description of its volume that an image holds ([format](../../../../docs/format/descriptor.md)) |
//! | `contents`, `signatures` | recognising what else a disk holds, and zeroing it |
//! | [`claim`] | multihost protection ([RFD 0034](../../../../docs/rfd/0034-one-disk-two-machines.md)) |
//! | `log_area` | the area of an image for its write-intent log |

mod byte_range;
pub mod claim;
mod contents;
pub mod descriptor;
mod error;
mod label;
pub mod label_copies;
mod log_area;
mod medium;
mod raw;
mod signatures;

pub use byte_range::{ByteRange, RangePart};
pub use claim::{
    CLAIM_COPY_OFFSET, CLAIM_OFFSET, ClaimError, ClaimRefusal, ClaimRequest, ClaimStep,
    ClaimSubject, DiskClaim, DiskLease, HEARTBEAT_INTERVAL, HEARTBEAT_OFFSET, LEASE_DURATION,
    LeaseGate, LostClaim, NodeIdentity, OWNER_RECORD_BYTES, ObservedOwner, OwnerRecord,
    OwnerRecordError, check_not_revoked, check_unclaimed, clear_records, format_utc, next_step,
    wait_valid,
};
pub use contents::{
    CLEAR_STEP_BYTES, check_empty, check_unused, current_label, other_known_formats, read_disk,
    usable_bytes, write_zeroes, zero_disk_range, zero_range,
};
pub use descriptor::{DESCRIPTOR_TEXT_MAX, Descriptor, DescriptorError};
pub use error::{DiskOwner, DiskOwnerState, ImageError, ImageErrorReason};
pub use label::{
    DATA_OFFSET, ImageLabel, ImageLabelError, ImageState, LABEL_AREA_BYTES, LABEL_BYTES,
    LABEL_OFFSETS, LOG_AREA, MAX_BYTES, METADATA_OFFSET, Provisioning,
};
pub use label_copies::LabelCopies;
pub use log_area::{LOG_TRANSFER_MAX, LogArea};
pub use medium::{Medium, MediumError, PAGE};
pub use raw::RawDevice;
pub use signatures::{ExistingData, POOL_DISK};
