//! The format of a cluster store's contents: checked once, before anything else is read.
//!
//! Nodes of two versions never share a store: each would misread what the other has written.
//!
//! An embedded store has its format in its file's header ([`super::embedded`]); other stores have
//! it under a key.

use super::embedded::FORMAT;
use super::{Change, MetadataStore, Precondition, StoreError};

/// The key.
pub const FORMAT_KEY: &str = "format";

/// Checks that this version understands the format of the store `name`; an empty store gets the
/// newest.
///
/// # Errors
/// [`StoreError::UnsupportedFormat`]; [`StoreError::Damaged`]; [`StoreError::Failed`] if the format
/// is not a number; other store errors.
pub async fn check_or_init(meta: &dyn MetadataStore, name: &str) -> Result<(), StoreError> {
    let found = match meta.get(FORMAT_KEY).await? {
        Some(entry) => entry.contents()?.to_vec(),
        None => {
            let value = FORMAT.to_string().into_bytes();
            let fresh = Change {
                key: FORMAT_KEY.into(),
                precondition: Precondition::Absent,
                value: Some(value),
            };
            match meta.commit(vec![fresh]).await {
                Ok(_) => return Ok(()),
                // Another node may have written it: read the key again.
                Err(StoreError::Conflict { .. } | StoreError::Indeterminate { .. }) => {}
                Err(e) => return Err(e),
            }
            match meta.get(FORMAT_KEY).await? {
                Some(entry) => entry.contents()?.to_vec(),
                None => Vec::new(),
            }
        }
    };
    let number = std::str::from_utf8(&found).ok().and_then(|text| text.parse::<u64>().ok());
    match number {
        Some(FORMAT) => Ok(()),
        Some(found) => {
            Err(StoreError::UnsupportedFormat { path: name.to_owned(), found, supported: FORMAT })
        }
        _ => Err(StoreError::Failed {
            path: name.to_owned(),
            why: format!("its format is {:?}", String::from_utf8_lossy(&found)),
        }),
    }
}
