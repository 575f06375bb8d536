//! The iSCSI protocol machine (RFC 7143), sans-io.
