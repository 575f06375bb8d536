//! The format of what a cluster's store holds: checked once, before anything else is read.
//!
//! Nodes of two versions never share a store: what one of them has written, the other would misread.
//!
//! A store of one node has its format among the facts of its file ([`super::embedded`]); a store
//! that others keep has it under a key.

use super::embedded::FORMAT;
use super::{Change, Expect, Meta, MetaError};

/// The key.
pub const KEY: &str = "format";

/// Sees to it that the store at `name` has a format that this version understands; a new one gets
/// the newest.
///
/// # Errors
/// [`MetaError::Format`]; [`MetaError::Damaged`]; [`MetaError::Failed`] for one that is no number; what the store says.
pub async fn check(meta: &dyn Meta, name: &str) -> Result<(), MetaError> {
    let found = match meta.get(KEY).await? {
        Some(entry) => entry.contents()?.to_vec(),
        None => {
            let value = FORMAT.to_string().into_bytes();
            let fresh = Change { key: KEY.into(), expect: Expect::Absent, value: Some(value) };
            match meta.commit(vec![fresh]).await {
                Ok(_) => return Ok(()),
                // Another node was faster, or nobody knows: the key says it.
                Err(MetaError::Changed { .. } | MetaError::Unknown { .. }) => {}
                Err(e) => return Err(e),
            }
            match meta.get(KEY).await? {
                Some(entry) => entry.contents()?.to_vec(),
                None => Vec::new(),
            }
        }
    };
    let number = std::str::from_utf8(&found).ok().and_then(|text| text.parse::<u64>().ok());
    match number {
        Some(FORMAT) => Ok(()),
        Some(found) => Err(MetaError::Format { path: name.to_owned(), found, known: FORMAT }),
        _ => Err(MetaError::Failed {
            path: name.to_owned(),
            why: format!("its format is {:?}", String::from_utf8_lossy(&found)),
        }),
    }
}
