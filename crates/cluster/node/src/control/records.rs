//! What is wrong with the records in the store. All of them are looked at whenever they are listed: one
//! that cannot be believed is told of by its key, and what it is the record of is not served.

use std::collections::{BTreeMap, BTreeSet};

use ::cluster::{admission, lives, mirrors, nodes, rotation, vault};
use api::VolumeName;
use mirror::record::Record;
use uuid::Uuid;

use super::report;
use crate::meta::{Entry, MetaError, Revision, format};
use crate::record::{self, NAMES, Stored, VOLUMES};

/// The records of volumes among all that a store holds, and what is wrong with it.
#[derive(Debug, Default)]
pub(super) struct Audit {
    /// Records that can be believed.
    pub(super) volumes: Vec<Stored>,
    /// Those of mirrors among them, with the commits that wrote them.
    pub(super) mirrors: BTreeMap<Uuid, (Record, Revision)>,
    /// Mirrors whose records cannot.
    pub(super) lost_mirrors: BTreeSet<Uuid>,
    /// What cannot, as errors tell of it.
    pub(super) damaged: Vec<String>,
}

/// Looks at everything that a store holds.
pub(super) fn audit(entries: &[Entry]) -> Audit {
    let mut audit = Audit::default();
    let mut names = BTreeMap::new();
    for entry in entries {
        if let Err(error) = look(entry, &mut audit, &mut names) {
            audit.lost_mirrors.extend(mirrors::volume_of_key(&entry.key));
            audit.damaged.push(error.to_string());
        }
    }
    let ids: BTreeMap<Uuid, &VolumeName> =
        audit.volumes.iter().map(|s| (s.record.id, &s.record.name)).collect();
    let kept: BTreeSet<Uuid> =
        entries.iter().filter_map(|e| record::volume_of_key(&e.key)).collect();
    let is_kept = |id: Uuid| kept.contains(&id);
    for (name, id) in &names {
        if !is_kept(*id) {
            let why = format!("there is no {}", record::volume_key(*id));
            audit.damaged.push(missing(&format!("the record of volume {name}"), &why));
        }
    }
    for (id, name) in &ids {
        let held = names.get(*name);
        if held != Some(id) {
            let (key, record) = (record::name_key(name), record::volume_key(*id));
            audit.damaged.push(missing(&key, &format!("{record} needs it")));
        }
    }
    let lost = |e: &&Entry| mirrors::volume_of_key(&e.key).is_some_and(|id| !is_kept(id));
    for entry in entries.iter().filter(lost) {
        audit.damaged.push(missing("the volume's record", &format!("{} needs it", entry.key)));
    }
    audit
}

fn missing(what: &str, why: &str) -> String {
    format!("{what} is missing: {why}")
}

/// Looks at one entry.
fn look(
    entry: &Entry,
    audit: &mut Audit,
    names: &mut BTreeMap<VolumeName, Uuid>,
) -> Result<(), MetaError> {
    let key = entry.key.as_str();
    // These are written anew before anybody goes by them.
    let passing = [nodes::ALIVE, report::REPORTS, report::QUESTIONS];
    if key.starts_with(VOLUMES) {
        audit.volumes.push(record::decode(entry)?);
    } else if let Some(name) = key.strip_prefix(NAMES) {
        let id = record::decode_name(entry)?;
        let bad = |e: api::Invalid| MetaError::Damaged { path: key.to_owned(), why: e.to_string() };
        names.insert(name.parse().map_err(bad)?, id);
    } else if key.starts_with(mirrors::PREFIX) {
        let record = mirrors::decode(entry)?;
        audit.mirrors.extend(mirrors::volume_of_key(key).map(|id| (id, (record, entry.revision))));
    } else if key.starts_with(nodes::NODES) || key == nodes::CLUSTER {
        nodes::check(entry)?;
    } else if key.starts_with(lives::LIVES) || key.starts_with(lives::CHALLENGES) {
        lives::check(entry)?;
    } else if key.starts_with(admission::TOKENS) || key.starts_with(admission::JOINS) {
        admission::check(entry)?;
    } else if key == rotation::KEY || key.starts_with(rotation::NODES) {
        rotation::check(entry)?;
    } else if [vault::KEY, format::KEY].contains(&key) {
        entry.contents()?;
    } else if !passing.iter().any(|prefix| key.starts_with(prefix)) {
        let why = "no record has such a key".to_owned();
        return Err(MetaError::Damaged { path: key.to_owned(), why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ::cluster::meta::embedded::Embedded;
    use ::cluster::meta::{Meta, Revision};

    use super::*;
    use crate::record::VolumeRecord;
    use crate::record::tests::{chap, record, ring};
    use crate::record::{Of, StoredChap};

    /// A volume whom one initiator may reach, with CHAP.
    fn guarded(name: &str) -> VolumeRecord {
        let mut volume = record(name);
        volume.allow.insert("iqn.2001-04.com.example:x".parse().unwrap());
        let of = Of { volume: volume.id, initiator: None };
        volume.chap = Some(StoredChap::seal(&chap(), of, &ring(1)).unwrap());
        volume
    }

    fn entries(volume: &VolumeRecord) -> Vec<Entry> {
        let entry = |c: crate::meta::Change| Entry::new(c.key, c.value.unwrap(), Revision(1));
        volume.insert().into_iter().map(entry).collect()
    }

    #[test]
    fn a_store_that_is_whole_is_believed() {
        let volume = guarded("web");
        let audit = audit(&entries(&volume));
        assert_eq!((audit.volumes.len(), audit.damaged), (1, vec![]));
    }

    #[test]
    fn what_is_missing_beside_a_record_is_named() {
        let volume = guarded("web");
        let all = entries(&volume);
        let (name, record) = (all[0].clone(), all[1].clone());
        let found = |entries: &[Entry]| audit(entries).damaged.join("; ");
        let lost = found(std::slice::from_ref(&name));
        assert!(lost.contains("record of volume web is missing"), "{lost}");
        let nameless = found(std::slice::from_ref(&record));
        assert!(nameless.contains("names/web is missing"), "{nameless}");
        let stray = Entry::new("volumet/x", "", Revision(1));
        assert!(found(&[name, record, stray]).contains("volumet/x is damaged"));
    }

    /// Every bit of a record, changed as a disk or a memory that rots changes it.
    #[tokio::test]
    async fn no_bit_of_a_stored_record_turns_its_chap_off_or_lets_another_initiator_in() {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(&dir.path().join("store.redb")).unwrap();
        let volume = guarded("web");
        store.commit(volume.insert()).await.unwrap();
        let (whole, _) = store.list("").await.unwrap();
        let kept = ::cluster::meta::sealed::seal(&whole[1].key, &whole[1].value);
        for bit in 0..kept.len() * 8 {
            let mut bad = kept.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let damage = ::cluster::meta::sealed::open(&whole[1].key, &bad).unwrap_err();
            let rotten = Entry { value: Vec::new(), damage: Some(damage), ..whole[1].clone() };
            let audit = audit(&[whole[0].clone(), rotten]);
            assert!(audit.volumes.is_empty(), "bit {bit}");
            assert!(audit.damaged[0].starts_with(&whole[1].key), "bit {bit}: {:?}", audit.damaged);
        }
    }

    /// Without the checksum, too: what the program has not written, it does not read.
    #[test]
    fn a_record_that_says_less_or_more_than_it_should_is_refused() {
        let volume = guarded("web");
        let good = String::from_utf8(entries(&volume)[1].value.clone()).unwrap();
        let read = |text: &str| {
            let entry = Entry::new(record::volume_key(volume.id), text, Revision(1));
            record::decode(&entry).map(drop).map_err(|e| e.to_string())
        };
        assert_eq!(read(&good), Ok(()));
        let fields: serde_json::Map<_, _> = serde_json::from_str(&good).unwrap();
        for field in fields.keys() {
            let mut less = fields.clone();
            less.remove(field);
            let refused = read(&serde_json::to_string(&less).unwrap()).unwrap_err();
            assert!(refused.contains(field.as_str()), "{field}: {refused}");
        }
        for (path, _) in fields["protocols"].as_object().unwrap() {
            let mut less = serde_json::Value::Object(fields.clone());
            less["protocols"].as_object_mut().unwrap().remove(path);
            assert!(read(&less.to_string()).unwrap_err().contains(path.as_str()), "{path}");
        }
        let chap = good.replace("\"chap\":", "\"chax\":");
        assert!(read(&chap).unwrap_err().contains("chax"));
        let twice = good.replacen('{', "{\"thin\":true,", 1);
        assert!(read(&twice).is_err());
        let spaced = good.replacen('{', "{ ", 1);
        assert!(read(&spaced).unwrap_err().contains("not written as a record is"));
        let more = good.replace("\"is\":\"made\"", "\"is\":\"made\",\"more\":1");
        assert!(more != good && read(&more).is_err());
        let mutual = good.replace("\"mutual\":", "\"mutuam\":");
        assert!(mutual != good && read(&mutual).is_err());
    }
}
