//! Checks the records in the store. All are checked whenever they are listed; a damaged one is
//! reported by its key, and its volume is not served.

use std::collections::{BTreeMap, BTreeSet};

use api::VolumeName;
use cluster::{admission, credential_rotation, incarnations, mirror_records, nodes, secrets};
use mirror::config::MirrorConfig;
use uuid::Uuid;

use cluster::store::{Entry, Revision, StoreError, store_format};
use records::record::{self, NAMES, StoredVolumeRecord, VOLUMES};
use status::report;

/// The valid records of a store, and the damaged ones.
#[derive(Debug, Default)]
pub(super) struct StoreAudit {
    /// Valid volume records.
    pub(super) volumes: Vec<StoredVolumeRecord>,
    /// Valid mirror records, with the revisions that wrote them.
    pub(super) mirrors: BTreeMap<Uuid, (MirrorConfig, Revision)>,
    /// Volumes whose mirror records are damaged.
    pub(super) unreadable_mirrors: BTreeSet<Uuid>,
    /// The damaged records, as error texts.
    pub(super) damaged: Vec<String>,
}

/// Checks everything in a store.
pub(super) fn audit(entries: &[Entry]) -> StoreAudit {
    let mut audit = StoreAudit::default();
    let mut names = BTreeMap::new();
    for entry in entries {
        if let Err(error) = audit_entry(entry, &mut audit, &mut names) {
            audit.unreadable_mirrors.extend(mirror_records::volume_of_key(&entry.key));
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
            audit.damaged.push(missing_text(&format!("the record of volume {name}"), &why));
        }
    }
    for (id, name) in &ids {
        let existing = names.get(*name);
        if existing != Some(id) {
            let (key, record) = (record::name_key(name), record::volume_key(*id));
            audit.damaged.push(missing_text(&key, &format!("{record} refers to it")));
        }
    }
    let lost = |e: &&Entry| mirror_records::volume_of_key(&e.key).is_some_and(|id| !is_kept(id));
    for entry in entries.iter().filter(lost) {
        audit
            .damaged
            .push(missing_text("the volume's record", &format!("{} refers to it", entry.key)));
    }
    audit
}

fn missing_text(what: &str, why: &str) -> String {
    format!("{what} is missing: {why}")
}

/// Checks one entry.
fn audit_entry(
    entry: &Entry,
    audit: &mut StoreAudit,
    names: &mut BTreeMap<VolumeName, Uuid>,
) -> Result<(), StoreError> {
    let key = entry.key.as_str();
    // These are always rewritten before they are used.
    let transient = [nodes::ALIVE_KEY_PREFIX, report::REPORTS, report::REPORT_REQUESTS];
    if key.starts_with(VOLUMES) {
        audit.volumes.push(record::decode(entry)?);
    } else if let Some(name) = key.strip_prefix(NAMES) {
        let id = record::decode_name(entry)?;
        let bad =
            |e: api::InvalidValue| StoreError::Damaged { path: key.to_owned(), why: e.to_string() };
        names.insert(name.parse().map_err(bad)?, id);
    } else if key.starts_with(mirror_records::KEY_PREFIX) {
        let record = mirror_records::decode_record(entry)?;
        audit
            .mirrors
            .extend(mirror_records::volume_of_key(key).map(|id| (id, (record, entry.revision))));
    } else if key.starts_with(nodes::NODE_KEY_PREFIX) || key == nodes::CLUSTER_KEY {
        nodes::validate_entry(entry)?;
    } else if key.starts_with(incarnations::INCARNATION_KEY_PREFIX)
        || key.starts_with(incarnations::CHALLENGE_KEY_PREFIX)
    {
        incarnations::validate_entry(entry)?;
    } else if key.starts_with(admission::TOKEN_KEY_PREFIX)
        || key.starts_with(admission::JOIN_KEY_PREFIX)
    {
        admission::validate_entry(entry)?;
    } else if key == credential_rotation::ROTATION_KEY
        || key.starts_with(credential_rotation::PROGRESS_KEY_PREFIX)
    {
        credential_rotation::validate_entry(entry)?;
    } else if [secrets::KEYRING_KEY, store_format::FORMAT_KEY].contains(&key) {
        entry.contents()?;
    } else if !transient.iter().any(|prefix| key.starts_with(prefix)) {
        let why = "unknown kind of key".to_owned();
        return Err(StoreError::Damaged { path: key.to_owned(), why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cluster::store::embedded::EmbeddedStore;
    use cluster::store::{MetadataStore, Revision};

    use super::*;
    use records::record::VolumeRecord;
    use records::record::{ChapContext, StoredChap};
    use records::samples::{chap, record, ring};

    /// A volume that one initiator may access, with CHAP.
    fn guarded(name: &str) -> VolumeRecord {
        let mut volume = record(name);
        volume.allow.insert("iqn.2001-04.com.example:x".parse().unwrap());
        let of = ChapContext { volume: volume.id, initiator: None };
        volume.chap = Some(StoredChap::seal(&chap(), of, &ring(1)).unwrap());
        volume
    }

    fn entries(volume: &VolumeRecord) -> Vec<Entry> {
        let entry = |c: cluster::store::Change| Entry::new(c.key, c.value.unwrap(), Revision(1));
        volume.insert_changes().into_iter().map(entry).collect()
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

    /// Flips every bit of a record, as a failing disk or memory would.
    #[tokio::test]
    async fn no_bit_of_a_stored_record_turns_its_chap_off_or_lets_another_initiator_in() {
        let dir = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&dir.path().join("store.redb")).unwrap();
        let volume = guarded("web");
        store.commit(volume.insert_changes()).await.unwrap();
        let (whole, _) = store.list("").await.unwrap();
        let kept = cluster::store::checksummed::add_checksum(&whole[1].key, &whole[1].value);
        for bit in 0..kept.len() * 8 {
            let mut bad = kept.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let damage =
                cluster::store::checksummed::verify_checksum(&whole[1].key, &bad).unwrap_err();
            let rotten =
                Entry { value: Vec::new(), checksum_error: Some(damage), ..whole[1].clone() };
            let audit = audit(&[whole[0].clone(), rotten]);
            assert!(audit.volumes.is_empty(), "bit {bit}");
            assert!(audit.damaged[0].starts_with(&whole[1].key), "bit {bit}: {:?}", audit.damaged);
        }
    }

    /// The program reads only what it could have written, even if the checksum is missing.
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
        assert!(read(&spaced).unwrap_err().contains("an unknown or duplicate field"));
        let more = good.replace("\"is\":\"made\"", "\"is\":\"made\",\"more\":1");
        assert!(more != good && read(&more).is_err());
        let mutual = good.replace("\"mutual\":", "\"mutuam\":");
        assert!(mutual != good && read(&mutual).is_err());
    }
}
