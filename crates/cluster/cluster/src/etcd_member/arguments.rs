//! The configuration of a store member, and etcd's command line for it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// A member of the cluster's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdMemberConfig {
    /// Its name, unique among the members.
    pub name: String,
    /// Its data directory, for its exclusive use.
    pub data_dir: PathBuf,
    /// `http://ADDRESS:PORT` or `https://…`: where it listens for the other members, and where they
    /// reach it.
    pub peer_url: String,
    /// The same for clients.
    pub client_url: String,
    /// All members with their peer URLs, this one among them.
    pub initial_cluster: Vec<(String, String)>,
    /// A name that distinguishes this cluster from others, the same at all members.
    pub initial_cluster_token: String,
    /// How it starts if it has no data yet.
    pub initial_cluster_state: InitialClusterState,
    /// Certificates for `https`, used with members and clients alike.
    pub tls: Option<TlsFiles>,
    /// The leader's heartbeat interval. A member calls an election after ten times that.
    pub heartbeat_interval: Duration,
}

/// How a member without data starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialClusterState {
    /// As part of a new cluster, together with all others.
    New,
    /// It joins a cluster that has added it as a member.
    Existing,
}

/// The certificate a member presents, and the authority it trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM file of the authority of all members and clients; peers without a certificate of it are
    /// rejected.
    pub ca: PathBuf,
    /// PEM file of its certificate, for server and client use.
    pub cert: PathBuf,
    /// PEM file of the key.
    pub key: PathBuf,
}

impl EtcdMemberConfig {
    /// etcd's command-line arguments.
    #[must_use]
    pub fn arguments(&self) -> Vec<OsString> {
        let members: Vec<_> =
            self.initial_cluster.iter().map(|(name, url)| format!("{name}={url}")).collect();
        let state = match self.initial_cluster_state {
            InitialClusterState::New => "new",
            InitialClusterState::Existing => "existing",
        };
        let heartbeat_ms = self.heartbeat_interval.as_millis().max(1);
        let mut all = vec![
            flag("name", &self.name),
            flag("data-dir", &self.data_dir),
            flag("listen-peer-urls", &self.peer_url),
            flag("initial-advertise-peer-urls", &self.peer_url),
            flag("listen-client-urls", &self.client_url),
            flag("advertise-client-urls", &self.client_url),
            flag("initial-cluster", members.join(",")),
            flag("initial-cluster-token", &self.initial_cluster_token),
            flag("initial-cluster-state", state),
            flag("heartbeat-interval", heartbeat_ms.to_string()),
            flag("election-timeout", (heartbeat_ms * 10).to_string()),
            // A member that was isolated and returns must not depose a working leader. 3.4 lacks
            // this as a default.
            flag("pre-vote", "true"),
            // Watchers that are an hour behind must list again.
            flag("auto-compaction-mode", "periodic"),
            flag("auto-compaction-retention", "1h"),
            // The format that `etcd_log` parses.
            flag("logger", "zap"),
            flag("log-outputs", "stderr"),
        ];
        if let Some(TlsFiles { ca, cert, key }) = &self.tls {
            for peer in ["", "peer-"] {
                all.extend([
                    flag(&format!("{peer}client-cert-auth"), "true"),
                    flag(&format!("{peer}trusted-ca-file"), ca),
                    flag(&format!("{peer}cert-file"), cert),
                    flag(&format!("{peer}key-file"), key),
                ]);
            }
        }
        all
    }
}

fn flag(name: &str, value: impl Into<OsString>) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(value.into());
    flag
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member() -> EtcdMemberConfig {
        EtcdMemberConfig {
            name: "a".into(),
            data_dir: "/var/lib/windrose/etcd".into(),
            peer_url: "https://10.0.0.1:2380".into(),
            client_url: "https://10.0.0.1:2379".into(),
            initial_cluster: vec![
                ("a".into(), "https://10.0.0.1:2380".into()),
                ("b".into(), "https://10.0.0.2:2380".into()),
            ],
            initial_cluster_token: "t".into(),
            initial_cluster_state: InitialClusterState::New,
            tls: None,
            heartbeat_interval: Duration::from_millis(100),
        }
    }

    fn has(member: &EtcdMemberConfig, flag: &str) -> bool {
        member.arguments().iter().any(|a| a == flag)
    }

    #[test]
    fn etcd_is_told_what_the_member_is() {
        let member = member();
        let expected = [
            "--name=a",
            "--data-dir=/var/lib/windrose/etcd",
            "--initial-cluster=a=https://10.0.0.1:2380,b=https://10.0.0.2:2380",
            "--initial-cluster-state=new",
            "--heartbeat-interval=100",
            "--election-timeout=1000",
            "--pre-vote=true",
            "--logger=zap",
        ];
        for flag in expected {
            assert!(has(&member, flag), "{flag}");
        }
        assert!(has(
            &EtcdMemberConfig { initial_cluster_state: InitialClusterState::Existing, ..member },
            "--initial-cluster-state=existing"
        ));
    }

    #[test]
    fn with_certificates_nobody_comes_in_without() {
        let tls = TlsFiles { ca: "/c".into(), cert: "/x".into(), key: "/k".into() };
        let member = EtcdMemberConfig { tls: Some(tls), ..member() };
        for flag in [
            "--client-cert-auth=true",
            "--trusted-ca-file=/c",
            "--peer-client-cert-auth=true",
            "--peer-trusted-ca-file=/c",
            "--peer-cert-file=/x",
            "--peer-key-file=/k",
        ] {
            assert!(has(&member, flag), "{flag}");
        }
    }
}
