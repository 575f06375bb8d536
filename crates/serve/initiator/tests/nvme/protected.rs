//! Queues by TLS (RFD 0022), with our own server behind it.

use std::sync::Arc;

use common::{A, Wire, cut_while_working, guarded};
use nvme::tls::TlsKey;
use target::{AccessList, HostKey, HostSecrets, HostTls};

use super::proof::{HOST_SECRET, secret, secrets};
use super::*;

const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const OTHER_KEY: &str = "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:";
const LONG_KEY: &str =
    "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

/// `decrypt_error`.
const REFUSED: ConnectError = ConnectError::Tls(tls::TlsError::Alert(51));

fn key(text: &str) -> TlsKey {
    TlsKey::parse(text).unwrap()
}

/// The host has to come by TLS.
fn asks_for(site: &Site, key: HostKey, access: AccessList<HostSecrets>) {
    let tls = [(HOSTNQN.to_owned(), HostTls { key, required: true })].into();
    site.serve_by(SUBNQN, A, access, tls);
}

async fn connect(site: &Site, key: Option<&str>) -> Result<Controller, ConnectError> {
    let tls_key = key.map(|text| Arc::new(self::key(text)));
    let options = Options { tls_key, io_queues: 2, ..options(site.at) };
    Controller::connect(&site.core, options, Staging::default()).await
}

#[test]
fn all_queues_come_by_tls() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        for text in [KEY, LONG_KEY] {
            asks_for(&site, HostKey::Known(key(text)), AccessList::open());
            let controller = connect(&site, Some(text)).await.unwrap();
            assert_eq!(controller.queues().len(), 2);
            assert!(site.server.sessions().iter().all(|s| s.tls), "{:?}", site.server.sessions());
            let (_, client) = open(&controller).await;
            client.write(0, &[7; 1 << 20], true).await.unwrap();
            assert_eq!(client.read(0, 2048).await.unwrap().to_vec(), [7; 1 << 20]);
            client.flush().await.unwrap();
            controller.shut_down().await.unwrap();
        }
    });
}

#[test]
fn without_the_key_the_connection_fails() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        asks_for(&site, HostKey::Known(key(KEY)), AccessList::open());
        for wrong in [OTHER_KEY, LONG_KEY] {
            assert_eq!(connect(&site, Some(wrong)).await.map(drop), Err(REFUSED), "{wrong}");
        }
        let plain = connect(&site, None).await.map(drop).unwrap_err();
        assert!(matches!(plain, ConnectError::Refused(_)) && plain.is_final(), "{plain}");
        // It may be able to read it soon.
        asks_for(&site, HostKey::Unknown, AccessList::open());
        assert_eq!(connect(&site, Some(KEY)).await.map(drop), Err(REFUSED));
        assert!(!REFUSED.is_final());
        // Of a subsystem that has none.
        site.serve(SUBNQN, A, AccessList::open());
        assert_eq!(connect(&site, Some(KEY)).await.map(drop), Err(REFUSED));
    });
}

/// A host that authenticates does so behind TLS as well.
#[test]
fn a_proof_behind_tls() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let known = HostSecrets::Known { host: secret(HOST_SECRET), controller: None };
        asks_for(&site, HostKey::Known(key(KEY)), guarded(known));
        let none = connect(&site, Some(KEY)).await.map(drop);
        assert_eq!(none, Err(ConnectError::SecretMissing));
        let tls_key = Some(Arc::new(key(KEY)));
        let secrets = Some(secrets(HOST_SECRET, None));
        let options = Options { tls_key, secrets, ..options(site.at) };
        // What is shared with a subsystem is nothing that discovery knows of.
        let discovered = discover(&core, options.clone(), Staging::default()).await.unwrap();
        assert_eq!(discovered.iter().filter(|e| e.nqn == SUBNQN).count(), 1);
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let (_, client) = open(&controller).await;
        client.write(0, &[1; 512], false).await.unwrap();
    });
}

/// Whenever the connections are cut, nothing is lost, and no caller is told of it.
#[test]
fn cuts_are_not_noticed_behind_tls() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        asks_for(&site, HostKey::Known(key(KEY)), AccessList::open());
        let wire = Wire::new(&core, site.at).await;
        let tls_key = Some(Arc::new(key(KEY)));
        let options =
            Options { tls_key, retry_timeout: PATIENCE, io_queues: 2, ..options(wire.at) };
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let (_, client) = open(&controller).await;
        let pauses_ms = [30, 10, 7, 45, 15, 0, 40, 20];
        cut_while_working(&wire, client, (&pauses_ms, 40), 200).await;
    });
}
