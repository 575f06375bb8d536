//! Errors as the API answers them.

use api::{ApiError, ErrorCode, VolumeName};
use cluster::store::StoreError;
use engine::BackingError;
use status::{RESTORE_HINT, UNTRUSTED_STORE_HINT};

/// The error for a request that the present state rules out.
pub(crate) fn conflict(message: impl Into<String>, hint: &str) -> ApiError {
    ApiError::new(ErrorCode::Conflict, message).with_hint(hint)
}

/// Converts a store error to an API error.
pub(crate) fn store_error(e: &StoreError) -> ApiError {
    match e {
        StoreError::Conflict { .. } => ApiError::new(
            ErrorCode::Conflict,
            "the volume was changed by another request at the \
                same time",
        )
        .with_hint("check its state and try again"),
        StoreError::Unreachable { .. } => ApiError::new(ErrorCode::Unavailable, e.to_string())
            .with_hint("nothing was changed; try again when the store responds"),
        StoreError::TlsRejected { .. } => {
            let hint = format!("nothing was changed; {UNTRUSTED_STORE_HINT}");
            ApiError::new(ErrorCode::Unavailable, e.to_string()).with_hint(hint)
        }
        StoreError::Indeterminate { .. } => ApiError::new(ErrorCode::Unavailable, e.to_string())
            .with_hint("the change may have been made: check before you try again"),
        StoreError::Damaged { .. } => {
            tracing::error!(error = %e, "the store is damaged");
            ApiError::new(ErrorCode::Internal, e.to_string()).with_hint(RESTORE_HINT)
        }
        StoreError::Compacted { .. }
        | StoreError::UnsupportedFormat { .. }
        | StoreError::Failed { .. } => {
            tracing::error!(error = %e, "the store failed");
            ApiError::new(ErrorCode::Internal, e.to_string())
                .with_hint("see the node's log; the data directory may be full or read-only")
        }
    }
}

/// Converts a backing error to an API error.
pub(crate) fn backing_error(name: &VolumeName, e: &BackingError) -> ApiError {
    let error = ApiError::new(e.code(), format!("volume {name}: {e}"));
    match e.hint {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_is_not_trusted_is_not_waited_for() {
        let (store, why) = ("etcd".to_owned(), "invalid peer certificate: Expired".to_owned());
        let away = StoreError::Unreachable { store: store.clone(), why: why.clone() };
        let hint = |e: &StoreError| store_error(e).hint.unwrap_or_default();
        assert!(hint(&away).contains("when the store responds"), "{}", hint(&away));
        let bad = StoreError::TlsRejected { store, why };
        assert!(hint(&bad).contains("cluster.tls_ca") && !hint(&bad).contains("try again"));
        assert!(store_error(&bad).message.contains("Expired"));
    }
}
