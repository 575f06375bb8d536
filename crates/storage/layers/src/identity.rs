//! Identities that are drawn by chance.

use rt::Core;
use uuid::Uuid;

/// A random UUID (RFC 9562 5.4).
pub(crate) fn random_uuid(core: &Core) -> Uuid {
    let random = u128::from(core.random_u64()) << 64 | u128::from(core.random_u64());
    uuid::Builder::from_random_bytes(random.to_be_bytes()).into_uuid()
}
