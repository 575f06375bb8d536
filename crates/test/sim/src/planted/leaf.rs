//! A block device directly on a disk with one of the typical mistakes of leaf devices.

use rt::sim::World;

use super::Variant;
use crate::scenarios::leaf::{LeafStack, Mistake};
use crate::scenarios::storage;

macro_rules! leaf {
    ($name:ident, $mistake:ident) => {
        pub(super) async fn $name(world: World, variant: Variant) -> Result<(), String> {
            let wrong = variant == Variant::Mistaken;
            storage::run(world, LeafStack(if wrong { Mistake::$mistake } else { Mistake::None }))
                .await
        }
    };
}

leaf!(no_flush, NoFlush);
leaf!(no_fua, NoFua);
leaf!(shared_sector, SharedSector);
leaf!(zero_too_far, ZeroTooFar);
