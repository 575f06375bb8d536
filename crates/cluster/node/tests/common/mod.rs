//! A node in a directory of its own, on ports of the system's choice.

#![allow(dead_code, reason = "each test program uses its part")]

use std::path::Path;

use api::client::{Address, Client};
use api::endpoint::{GetVolume, PostVolume};
use api::{CreateVolume, Volume, VolumeName};
use node::config::Config;
use node::node::Node;

/// Secrets of NVMe hosts, as nvme-cli makes them.
pub(crate) const DHCHAP: [&str; 2] = [
    "DHHC-1:01:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoZ:",
    "DHHC-1:02:WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaBgfU4w==:",
];

/// TLS keys of NVMe hosts, as nvme-cli makes them.
pub(crate) const KEYS: [&str; 2] = [
    "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
    "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:",
];

/// The configuration of a node in `dir`, with `more` at its end.
pub(crate) fn config(dir: &Path, more: &str) -> Config {
    config_with(dir, "[iscsi]\nportals = [\"127.0.0.1:0\"]", more)
}

/// The same with another section for iSCSI.
fn config_with(dir: &Path, iscsi: &str, more: &str) -> Config {
    let text = format!(
        r#"
        name = "test"
        data_dir = "{0}/data"
        shutdown_timeout_s = 10
        [cores]
        count = 2
        pool = "16M"
        [disks]
        buffered = true
        # Verdicts must not depend on the machine.
        low_space_percent = 0
        {iscsi}
        [nvme]
        portals = ["127.0.0.1:0"]
        discovery = ["127.0.0.1:0"]
        [vhost_user]
        directory = "{0}/vhost"
        [api]
        socket = "{0}/api.sock"
        {more}
        "#,
        dir.display()
    );
    Config::parse(&dir.join("test.toml"), &text).unwrap()
}

/// A node and its client.
pub(crate) async fn start(dir: &Path, more: &str) -> (Node, Client) {
    let node = Node::start(&config(dir, more)).await.unwrap();
    (node, Client::new(Address::Unix(dir.join("api.sock"))))
}

/// The same with another section for iSCSI.
pub(crate) async fn start_with(dir: &Path, iscsi: &str) -> (Node, Client) {
    let node = Node::start(&config_with(dir, iscsi, "")).await.unwrap();
    (node, Client::new(Address::Unix(dir.join("api.sock"))))
}

pub(crate) fn name(s: &str) -> VolumeName {
    s.parse().unwrap()
}

pub(crate) fn ask(json: &str) -> CreateVolume {
    serde_json::from_str(json).unwrap()
}

pub(crate) async fn create(client: &Client, volume: &str) -> Volume {
    let json = format!(r#"{{"name":"{volume}","size_bytes":4194304}}"#);
    client.call::<PostVolume>(&ask(&json)).await.unwrap()
}

pub(crate) async fn show(client: &Client, volume: &str) -> Option<Volume> {
    let none = &api::endpoint::Nothing;
    client.call_on::<GetVolume>(&name(volume), &[], none).await.ok()
}

/// Names of the files of volumes in `dir`'s data directory.
pub(crate) fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir.join("data/volumes")).unwrap();
    let mut names: Vec<_> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
