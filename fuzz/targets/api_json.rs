//! Any bytes as API request bodies and as command-line texts: what is accepted is valid and
//! round-trips.

use api::{
    AddDisks, Chap, CreatePoolRequest, CreateVolumeRequest, Dhchap, GrowVolumeRequest, HostDhchap,
    HostTls, Initiator, InitiatorList, OpenPoolRequest, Protocols, ReplaceDisk, Size, Tls,
    VolumeName,
};
use serde::{Serialize, de::DeserializeOwned};

fn body<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
    let value: T = serde_json::from_slice(bytes).ok()?;
    let text = serde_json::to_vec(&value).expect("what was parsed can be written");
    let again: T = serde_json::from_slice(&text).expect("what was written can be parsed");
    assert_eq!(value, again);
    Some(value)
}

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |bytes: &[u8]| {
        if let Some(chap) = body::<CreateVolumeRequest>(bytes).and_then(|create| create.chap) {
            assert!(chap.mutual.is_none_or(|mutual| mutual.secret != chap.secret));
        }
        let _ = (
            body::<GrowVolumeRequest>(bytes),
            body::<InitiatorList>(bytes),
            body::<Protocols>(bytes),
        );
        let _ =
            (body::<AddDisks>(bytes), body::<ReplaceDisk>(bytes), body::<OpenPoolRequest>(bytes));
        if let Some(create) = body::<CreatePoolRequest>(bytes)
            && create.check().is_ok()
        {
            assert!(!create.disks.is_empty() && create.disks.len() <= api::MAX_DISKS);
        }
        let _ = (body::<Chap>(bytes), body::<HostTls>(bytes), body::<Tls>(bytes));
        let hosts = body::<HostDhchap>(bytes).and_then(|host| host.secrets);
        for dhchap in hosts.into_iter().chain(body::<Dhchap>(bytes)) {
            assert!(dhchap.controller_secret.is_none_or(|secret| secret != dhchap.secret));
        }
        if let Ok(text) = std::str::from_utf8(bytes) {
            if let Ok(name) = text.parse::<VolumeName>() {
                assert_eq!(name.as_str(), text);
            }
            if let Ok(initiator) = text.parse::<Initiator>() {
                assert_eq!(initiator.to_string().parse(), Ok(initiator));
            }
            if let Ok(size) = text.parse::<Size>() {
                assert_eq!(size.to_exact_string().parse(), Ok(size));
            }
        }
    });
}
