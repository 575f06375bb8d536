//! The target and subsystem that a volume belongs to, and the volumes that share its own (RFD 0017,
//! 3; RFD 0019, 4).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{VolumeAuthMethod, VolumeRecord};

/// Highest LUN: every initiator supports this many.
pub const MAX_LUN: u16 = 255;

/// A target of another volume that a volume belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedTarget {
    /// The volume that the target belongs to.
    pub volume: Uuid,
    /// The target's name; fixed while that volume exists.
    pub target: String,
}

/// The target and LUN of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LunMapping {
    /// The target of another volume that it belongs to; `None` for its own.
    pub shared_target: Option<SharedTarget>,
    /// Its logical unit number in that target.
    pub lun: u16,
    /// The other volumes in its own target, by LUN.
    pub other_luns: BTreeMap<u16, Uuid>,
}

impl VolumeRecord {
    /// The volume that owns the target it belongs to.
    #[must_use]
    pub fn target_owner(&self) -> Uuid {
        self.mapping.shared_target.as_ref().map_or(self.id, |b| b.volume)
    }

    /// The name of that target.
    #[must_use]
    pub fn target_name(&self) -> &str {
        self.mapping.shared_target.as_ref().map_or(&self.iscsi_target, |b| &b.target)
    }

    /// Its namespace id in that volume's subsystem; these count from 1.
    #[must_use]
    pub fn nsid(&self) -> u32 {
        u32::from(self.mapping.lun) + 1
    }
}

/// Why a volume cannot be mapped as requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapError {
    /// Other volumes share its own target.
    OwnTargetShared,
    /// The other volume itself belongs to a target that is not its own.
    TargetNotOwn,
    /// It has CHAP credentials of its own.
    HasChap,
    /// It has DH-HMAC-CHAP secrets of its own.
    HasHostSecrets,
    /// It has TLS keys of its own.
    HasTlsKeys,
    /// The LUN belongs to this volume.
    LunInUse(Uuid),
    /// No LUN is free.
    NoFreeLun,
    /// The LUN exceeds [`MAX_LUN`].
    LunTooLarge,
}

/// Maps volume `id` to the target of `owner` at `lun`; by default at its present LUN, or the lowest
/// free one. `records` must contain both volumes and the present owner.
///
/// # Errors
/// [`MapError`]; nothing is changed.
pub fn assign_lun(
    records: &mut BTreeMap<Uuid, VolumeRecord>,
    id: Uuid,
    owner: Uuid,
    lun: Option<u16>,
) -> Result<(), MapError> {
    let (Some(volume), Some(owner_record)) = (records.get(&id), records.get(&owner)) else {
        return Err(MapError::TargetNotOwn);
    };
    let (from, before) = (volume.target_owner(), volume.mapping.lun);
    if owner != id && !volume.mapping.other_luns.is_empty() {
        return Err(MapError::OwnTargetShared);
    }
    if owner != id && owner_record.mapping.shared_target.is_some() {
        return Err(MapError::TargetNotOwn);
    }
    match volume.auth_methods().next().filter(|_| owner != id) {
        Some(VolumeAuthMethod::Chap) => return Err(MapError::HasChap),
        Some(VolumeAuthMethod::Dhchap) => return Err(MapError::HasHostSecrets),
        Some(VolumeAuthMethod::Tls) => return Err(MapError::HasTlsKeys),
        None => {}
    }
    let mut taken = owner_record.mapping.other_luns.clone();
    if owner != id {
        taken.insert(owner_record.mapping.lun, owner);
    }
    taken.retain(|_, by| *by != id);
    let same = (from == owner).then_some(before);
    let free = || (0..=MAX_LUN).find(|n| !taken.contains_key(n));
    let lun = lun.or(same).or_else(free).ok_or(MapError::NoFreeLun)?;
    if lun > MAX_LUN {
        return Err(MapError::LunTooLarge);
    }
    if let Some(by) = taken.get(&lun) {
        return Err(MapError::LunInUse(*by));
    }
    let target = owner_record.iscsi_target.clone();
    if let Some(previous_owner) = records.get_mut(&from) {
        previous_owner.mapping.other_luns.retain(|_, by| *by != id);
    }
    if let Some(new_owner) = records.get_mut(&owner).filter(|new_owner| new_owner.id != id) {
        new_owner.mapping.other_luns.insert(lun, id);
    }
    if let Some(volume) = records.get_mut(&id) {
        volume.mapping.shared_target =
            (owner != id).then_some(SharedTarget { volume: owner, target });
        volume.mapping.lun = lun;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{HostSecretContext, StoredChap, StoredDhchap, StoredTls, VolumeRecord};
    use super::*;
    use crate::samples::{HOST, KEYS, chap, dhchap, record, ring, tls};

    fn all(names: &[&str]) -> BTreeMap<Uuid, VolumeRecord> {
        names.iter().map(|name| record(name)).map(|r| (r.id, r)).collect()
    }

    #[test]
    fn a_number_is_given_once() {
        let mut records = all(&["a", "b", "c"]);
        let [a, b, c] = ["a", "b", "c"].map(|name| record(name).id);
        assert_eq!(assign_lun(&mut records, b, a, Some(0)), Err(MapError::LunInUse(a)));
        assert_eq!(records, all(&["a", "b", "c"]), "nothing is changed");
        assign_lun(&mut records, b, a, None).unwrap();
        assert_eq!((records[&b].mapping.lun, records[&b].target_owner()), (1, a));
        assert_eq!(records[&b].target_name(), records[&a].iscsi_target);
        assert_eq!(assign_lun(&mut records, c, a, Some(1)), Err(MapError::LunInUse(b)));
        assign_lun(&mut records, c, a, Some(MAX_LUN)).unwrap();
        assert_eq!(assign_lun(&mut records, c, a, Some(MAX_LUN + 1)), Err(MapError::LunTooLarge));
        assert_eq!(records[&a].mapping.other_luns, [(1, b), (MAX_LUN, c)].into());
        // The owner's own LUN counts too.
        assert_eq!(assign_lun(&mut records, a, a, Some(1)), Err(MapError::LunInUse(b)));
        assign_lun(&mut records, a, a, Some(7)).unwrap();
        assign_lun(&mut records, b, a, Some(0)).unwrap();
        assert_eq!(records[&a].mapping.other_luns, [(0, b), (MAX_LUN, c)].into());
        // Repeating it changes nothing; mapping it back restores the record.
        let before = records.clone();
        assign_lun(&mut records, b, a, None).unwrap();
        assert_eq!(records, before);
        assign_lun(&mut records, b, b, None).unwrap();
        assert_eq!(records[&b], record("b"));
        assert_eq!(records[&a].mapping.other_luns, [(MAX_LUN, c)].into());
    }

    #[test]
    fn there_are_no_chains_and_no_second_secret() {
        let mut records = all(&["a", "b", "c"]);
        let [a, b, c] = ["a", "b", "c"].map(|name| record(name).id);
        assign_lun(&mut records, b, a, None).unwrap();
        assert_eq!(assign_lun(&mut records, c, b, None), Err(MapError::TargetNotOwn));
        assert_eq!(assign_lun(&mut records, a, c, None), Err(MapError::OwnTargetShared));
        let sealed = StoredChap::seal(&chap(), c, &ring(1)).unwrap();
        records.get_mut(&c).unwrap().chap = Some(sealed);
        assert_eq!(assign_lun(&mut records, c, a, None), Err(MapError::HasChap));
        assign_lun(&mut records, c, c, Some(9)).unwrap();
        let volume = records.get_mut(&c).unwrap();
        volume.chap = None;
        let sealed =
            StoredDhchap::seal(&dhchap(), HostSecretContext { volume: c, host: HOST }, &ring(1));
        volume.dhchap_by_host.insert(HOST.to_owned(), sealed.unwrap());
        assert_eq!(assign_lun(&mut records, c, a, None), Err(MapError::HasHostSecrets));
        assign_lun(&mut records, c, c, Some(8)).unwrap();
        // Those of the owner apply to all volumes of the target.
        let hosts = std::mem::take(&mut records.get_mut(&c).unwrap().dhchap_by_host);
        records.get_mut(&a).unwrap().dhchap_by_host = hosts;
        let mut free = records.clone();
        assign_lun(&mut free, c, a, None).unwrap();
        // A key that is not required counts all the same.
        for required in [true, false] {
            let context = HostSecretContext { volume: c, host: HOST };
            let sealed = StoredTls::seal(&tls(KEYS[0], required), context, &ring(1)).unwrap();
            records.get_mut(&c).unwrap().tls_by_host.insert(HOST.to_owned(), sealed);
            assert_eq!(assign_lun(&mut records, c, a, None), Err(MapError::HasTlsKeys));
        }
        let keys = std::mem::take(&mut records.get_mut(&c).unwrap().tls_by_host);
        records.get_mut(&a).unwrap().tls_by_host = keys;
        assign_lun(&mut records, c, a, None).unwrap();
    }

    #[test]
    fn a_target_has_256_numbers() {
        let mut records = all(&["a", "b"]);
        let [a, b] = ["a", "b"].map(|name| record(name).id);
        let guests = (1..=MAX_LUN).map(|n| (n, Uuid::from_u128(n.into()))).collect();
        records.get_mut(&a).unwrap().mapping.other_luns = guests;
        assert_eq!(assign_lun(&mut records, b, a, None), Err(MapError::NoFreeLun));
    }
}
