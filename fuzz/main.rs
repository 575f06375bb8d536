//! The fuzz targets, one module each, in one program: `./run fuzz TARGET`. `WINDROSE_FUZZ_TARGET`
//! selects the target.
//!
//! It is an example of this package, so it is built with the workspace's tests and with the same
//! dependencies. `./run fuzz` rebuilds our own crates with coverage (`coverage.sh`).
#![no_main]

use std::sync::OnceLock;

use fuzz::feed;

#[path = "targets/api_json.rs"]
mod api_json;
#[path = "targets/cluster_token_and_identity.rs"]
mod cluster_token_and_identity;
#[path = "targets/config_toml.rs"]
mod config_toml;
#[path = "targets/descriptor.rs"]
mod descriptor;
#[path = "targets/fio_job.rs"]
mod fio_job;
#[path = "targets/initiator_responses.rs"]
mod initiator_responses;
#[path = "targets/intent.rs"]
mod intent;
#[path = "targets/iscsi_ffp.rs"]
mod iscsi_ffp;
#[path = "targets/iscsi_initiator.rs"]
mod iscsi_initiator;
#[path = "targets/iscsi_login.rs"]
mod iscsi_login;
#[path = "targets/isns.rs"]
mod isns;
#[path = "targets/label.rs"]
mod label;
#[path = "targets/nbd_client.rs"]
mod nbd_client;
#[path = "targets/nbd_server.rs"]
mod nbd_server;
#[path = "targets/nvme_auth.rs"]
mod nvme_auth;
#[path = "targets/nvme_host.rs"]
mod nvme_host;
#[path = "targets/nvme_tcp.rs"]
mod nvme_tcp;
#[path = "targets/owner_record.rs"]
mod owner_record;
#[path = "targets/parity.rs"]
mod parity;
#[path = "targets/parity_log.rs"]
mod parity_log;
#[path = "targets/peer.rs"]
mod peer;
#[path = "targets/pool_journal.rs"]
mod pool_journal;
#[path = "targets/pool_member.rs"]
mod pool_member;
#[path = "targets/reservation.rs"]
mod reservation;
#[path = "targets/scsi_cdb.rs"]
mod scsi_cdb;
#[path = "targets/scsi_copy.rs"]
mod scsi_copy;
#[path = "targets/secrets.rs"]
mod secrets;
#[path = "targets/target_uri.rs"]
mod target_uri;
#[path = "targets/tls.rs"]
mod tls;
#[path = "targets/verified_block.rs"]
mod verified_block;
#[path = "targets/vhost_monitor.rs"]
mod vhost_monitor;
#[path = "targets/virtio_blk.rs"]
mod virtio_blk;

type Run = fn(&[u8]);

const TARGETS: &[(&str, Run)] = &[
    ("api_json", api_json::run),
    ("cluster_token_and_identity", cluster_token_and_identity::run),
    ("config_toml", config_toml::run),
    ("descriptor", descriptor::run),
    ("fio_job", fio_job::run),
    ("initiator_responses", initiator_responses::run),
    ("intent", intent::run),
    ("iscsi_ffp", iscsi_ffp::run),
    ("iscsi_initiator", iscsi_initiator::run),
    ("iscsi_login", iscsi_login::run),
    ("isns", isns::run),
    ("label", label::run),
    ("owner_record", owner_record::run),
    ("nbd_client", nbd_client::run),
    ("nbd_server", nbd_server::run),
    ("nvme_auth", nvme_auth::run),
    ("nvme_host", nvme_host::run),
    ("nvme_tcp", nvme_tcp::run),
    ("parity", parity::run),
    ("parity_log", parity_log::run),
    ("peer", peer::run),
    ("pool_journal", pool_journal::run),
    ("pool_member", pool_member::run),
    ("reservation", reservation::run),
    ("scsi_cdb", scsi_cdb::run),
    ("scsi_copy", scsi_copy::run),
    ("secrets", secrets::run),
    ("target_uri", target_uri::run),
    ("tls", tls::run),
    ("verified_block", verified_block::run),
    ("vhost_monitor", vhost_monitor::run),
    ("virtio_blk", virtio_blk::run),
];

fn chosen() -> Run {
    let name = std::env::var("WINDROSE_FUZZ_TARGET").unwrap_or_default();
    let target = TARGETS.iter().find(|(known, _)| *known == name);
    target.unwrap_or_else(|| panic!("there is no target {name:?}")).1
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static CHOSEN: OnceLock<Run> = OnceLock::new();
    CHOSEN.get_or_init(chosen)(bytes);
});
