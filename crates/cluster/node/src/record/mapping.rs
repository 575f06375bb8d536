//! Behind which target and subsystem a volume stands, and what stands behind its own (RFD 0017, 3;
//! RFD 0019, 4).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Method, VolumeRecord};

/// Highest number of a unit: what every initiator has.
pub const MAX_LUN: u16 = 255;

/// Whose target a volume stands behind, if not its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Behind {
    /// The volume that the target belongs to.
    pub volume: Uuid,
    /// The target's name, which is that volume's for as long as it exists.
    pub target: String,
}

/// Where a volume is among targets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapping {
    /// Whose target it stands behind; `None` for its own.
    pub behind: Option<Behind>,
    /// Its logical unit number there.
    pub lun: u16,
    /// The other volumes behind its own target, by number.
    pub guests: BTreeMap<u16, Uuid>,
}

impl VolumeRecord {
    /// The volume behind whose target it stands.
    #[must_use]
    pub fn owner(&self) -> Uuid {
        self.mapping.behind.as_ref().map_or(self.id, |b| b.volume)
    }

    /// The name of that target.
    #[must_use]
    pub fn target(&self) -> &str {
        self.mapping.behind.as_ref().map_or(&self.iscsi_target, |b| &b.target)
    }

    /// Its namespace identifier in the subsystem of that volume: they count from 1.
    #[must_use]
    pub fn namespace(&self) -> u32 {
        u32::from(self.mapping.lun) + 1
    }
}

/// Why a volume is not mapped as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotMapped {
    /// Other volumes stand behind its own target.
    HasGuests,
    /// The one whose target it is to stand behind stands behind another one.
    IsGuest,
    /// It asks for CHAP of its own.
    HasChap,
    /// It asks NVMe hosts for secrets of its own.
    HasHostSecrets,
    /// It has keys of TLS of its own.
    HasTlsKeys,
    /// The number is another volume's.
    Taken(Uuid),
    /// There is no number left.
    Full,
    /// The number is beyond [`MAX_LUN`].
    Beyond,
}

/// Puts volume `id` of `records` behind the target of `owner`, at number `lun`, or at its present one or the lowest that is
/// free. `records` has these two and the one behind which it stands.
///
/// # Errors
/// [`NotMapped`]; nothing is changed.
pub fn remap(
    records: &mut BTreeMap<Uuid, VolumeRecord>,
    id: Uuid,
    owner: Uuid,
    lun: Option<u16>,
) -> Result<(), NotMapped> {
    let (Some(volume), Some(to)) = (records.get(&id), records.get(&owner)) else {
        return Err(NotMapped::IsGuest);
    };
    let (from, before) = (volume.owner(), volume.mapping.lun);
    if owner != id && !volume.mapping.guests.is_empty() {
        return Err(NotMapped::HasGuests);
    }
    if owner != id && to.mapping.behind.is_some() {
        return Err(NotMapped::IsGuest);
    }
    match volume.methods().next().filter(|_| owner != id) {
        Some(Method::Chap) => return Err(NotMapped::HasChap),
        Some(Method::Dhchap) => return Err(NotMapped::HasHostSecrets),
        Some(Method::Tls) => return Err(NotMapped::HasTlsKeys),
        None => {}
    }
    let mut taken = to.mapping.guests.clone();
    if owner != id {
        taken.insert(to.mapping.lun, owner);
    }
    taken.retain(|_, by| *by != id);
    let same = (from == owner).then_some(before);
    let free = || (0..=MAX_LUN).find(|n| !taken.contains_key(n));
    let lun = lun.or(same).or_else(free).ok_or(NotMapped::Full)?;
    if lun > MAX_LUN {
        return Err(NotMapped::Beyond);
    }
    if let Some(by) = taken.get(&lun) {
        return Err(NotMapped::Taken(*by));
    }
    let target = to.iscsi_target.clone();
    if let Some(left) = records.get_mut(&from) {
        left.mapping.guests.retain(|_, by| *by != id);
    }
    if let Some(joined) = records.get_mut(&owner).filter(|joined| joined.id != id) {
        joined.mapping.guests.insert(lun, id);
    }
    if let Some(volume) = records.get_mut(&id) {
        volume.mapping.behind = (owner != id).then_some(Behind { volume: owner, target });
        volume.mapping.lun = lun;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{HOST, KEYS, chap, dhchap, record, ring, tls};
    use super::super::{OfHost, StoredChap, StoredDhchap, StoredTls, VolumeRecord};
    use super::*;

    fn all(names: &[&str]) -> BTreeMap<Uuid, VolumeRecord> {
        names.iter().map(|name| record(name)).map(|r| (r.id, r)).collect()
    }

    #[test]
    fn a_number_is_given_once() {
        let mut records = all(&["a", "b", "c"]);
        let [a, b, c] = ["a", "b", "c"].map(|name| record(name).id);
        assert_eq!(remap(&mut records, b, a, Some(0)), Err(NotMapped::Taken(a)));
        assert_eq!(records, all(&["a", "b", "c"]), "nothing is changed");
        remap(&mut records, b, a, None).unwrap();
        assert_eq!((records[&b].mapping.lun, records[&b].owner()), (1, a));
        assert_eq!(records[&b].target(), records[&a].iscsi_target);
        assert_eq!(remap(&mut records, c, a, Some(1)), Err(NotMapped::Taken(b)));
        remap(&mut records, c, a, Some(MAX_LUN)).unwrap();
        assert_eq!(remap(&mut records, c, a, Some(MAX_LUN + 1)), Err(NotMapped::Beyond));
        assert_eq!(records[&a].mapping.guests, [(1, b), (MAX_LUN, c)].into());
        // The owner's own number is one of them.
        assert_eq!(remap(&mut records, a, a, Some(1)), Err(NotMapped::Taken(b)));
        remap(&mut records, a, a, Some(7)).unwrap();
        remap(&mut records, b, a, Some(0)).unwrap();
        assert_eq!(records[&a].mapping.guests, [(0, b), (MAX_LUN, c)].into());
        // Again is nothing, and back is as before.
        let before = records.clone();
        remap(&mut records, b, a, None).unwrap();
        assert_eq!(records, before);
        remap(&mut records, b, b, None).unwrap();
        assert_eq!(records[&b], record("b"));
        assert_eq!(records[&a].mapping.guests, [(MAX_LUN, c)].into());
    }

    #[test]
    fn there_are_no_chains_and_no_second_secret() {
        let mut records = all(&["a", "b", "c"]);
        let [a, b, c] = ["a", "b", "c"].map(|name| record(name).id);
        remap(&mut records, b, a, None).unwrap();
        assert_eq!(remap(&mut records, c, b, None), Err(NotMapped::IsGuest));
        assert_eq!(remap(&mut records, a, c, None), Err(NotMapped::HasGuests));
        let sealed = StoredChap::seal(&chap(), c, &ring(1)).unwrap();
        records.get_mut(&c).unwrap().chap = Some(sealed);
        assert_eq!(remap(&mut records, c, a, None), Err(NotMapped::HasChap));
        remap(&mut records, c, c, Some(9)).unwrap();
        let volume = records.get_mut(&c).unwrap();
        volume.chap = None;
        let sealed = StoredDhchap::seal(&dhchap(), OfHost { volume: c, host: HOST }, &ring(1));
        volume.hosts.insert(HOST.to_owned(), sealed.unwrap());
        assert_eq!(remap(&mut records, c, a, None), Err(NotMapped::HasHostSecrets));
        remap(&mut records, c, c, Some(8)).unwrap();
        // Those of the owner are everybody's.
        let hosts = std::mem::take(&mut records.get_mut(&c).unwrap().hosts);
        records.get_mut(&a).unwrap().hosts = hosts;
        let mut free = records.clone();
        remap(&mut free, c, a, None).unwrap();
        // A key that does not have to be used is one all the same.
        for required in [true, false] {
            let of = OfHost { volume: c, host: HOST };
            let sealed = StoredTls::seal(&tls(KEYS[0], required), of, &ring(1)).unwrap();
            records.get_mut(&c).unwrap().tls.insert(HOST.to_owned(), sealed);
            assert_eq!(remap(&mut records, c, a, None), Err(NotMapped::HasTlsKeys));
        }
        let keys = std::mem::take(&mut records.get_mut(&c).unwrap().tls);
        records.get_mut(&a).unwrap().tls = keys;
        remap(&mut records, c, a, None).unwrap();
    }

    #[test]
    fn a_target_has_256_numbers() {
        let mut records = all(&["a", "b"]);
        let [a, b] = ["a", "b"].map(|name| record(name).id);
        let guests = (1..=MAX_LUN).map(|n| (n, Uuid::from_u128(n.into()))).collect();
        records.get_mut(&a).unwrap().mapping.guests = guests;
        assert_eq!(remap(&mut records, b, a, None), Err(NotMapped::Full));
    }
}
