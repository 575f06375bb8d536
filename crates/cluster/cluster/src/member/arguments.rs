//! What a member is, and how etcd is told.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// A member of the cluster's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name among the members.
    pub name: String,
    /// Where it keeps its data. Nobody else may.
    pub data_dir: PathBuf,
    /// `http://ADDRESS:PORT` or `https://…`, where it listens to the other members, and where they
    /// reach it.
    pub peer_url: String,
    /// The same for clients.
    pub client_url: String,
    /// All members with their peer URLs, this one among them.
    pub cluster: Vec<(String, String)>,
    /// A name that tells this cluster from others, the same at all members.
    pub token: String,
    /// How it comes into being, where it has no data yet.
    pub origin: Origin,
    /// Certificates, for `https`: to members and to clients alike.
    pub tls: Option<Identity>,
    /// How often the leader gives a sign of life. A member calls an election after ten times that.
    pub heartbeat: Duration,
}

/// How a member comes into being.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// With the cluster, together with all others.
    New,
    /// It joins a cluster that has made room for it.
    Joins,
}

/// What a member shows and whom it trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// PEM file of the authority of all members and clients; who has no certificate of it is
    /// turned away.
    pub ca: PathBuf,
    /// PEM file of its certificate, for servers and for clients.
    pub cert: PathBuf,
    /// PEM file of the key.
    pub key: PathBuf,
}

impl Member {
    /// etcd's command line.
    #[must_use]
    pub fn arguments(&self) -> Vec<OsString> {
        let members: Vec<_> =
            self.cluster.iter().map(|(name, url)| format!("{name}={url}")).collect();
        let state = match self.origin {
            Origin::New => "new",
            Origin::Joins => "existing",
        };
        let heartbeat_ms = self.heartbeat.as_millis().max(1);
        let mut all = vec![
            flag("name", &self.name),
            flag("data-dir", &self.data_dir),
            flag("listen-peer-urls", &self.peer_url),
            flag("initial-advertise-peer-urls", &self.peer_url),
            flag("listen-client-urls", &self.client_url),
            flag("advertise-client-urls", &self.client_url),
            flag("initial-cluster", members.join(",")),
            flag("initial-cluster-token", &self.token),
            flag("initial-cluster-state", state),
            flag("heartbeat-interval", heartbeat_ms.to_string()),
            flag("election-timeout", (heartbeat_ms * 10).to_string()),
            // One that was cut off and returns puts no leader down that serves all others. 3.4 does not do that by itself.
            flag("pre-vote", "true"),
            // Followers that are an hour behind list again.
            flag("auto-compaction-mode", "periodic"),
            flag("auto-compaction-retention", "1h"),
            // What `log` reads.
            flag("logger", "zap"),
            flag("log-outputs", "stderr"),
        ];
        if let Some(Identity { ca, cert, key }) = &self.tls {
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

    fn member() -> Member {
        Member {
            name: "a".into(),
            data_dir: "/var/lib/windrose/etcd".into(),
            peer_url: "https://10.0.0.1:2380".into(),
            client_url: "https://10.0.0.1:2379".into(),
            cluster: vec![
                ("a".into(), "https://10.0.0.1:2380".into()),
                ("b".into(), "https://10.0.0.2:2380".into()),
            ],
            token: "t".into(),
            origin: Origin::New,
            tls: None,
            heartbeat: Duration::from_millis(100),
        }
    }

    fn has(member: &Member, flag: &str) -> bool {
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
            &Member { origin: Origin::Joins, ..member },
            "--initial-cluster-state=existing"
        ));
    }

    #[test]
    fn with_certificates_nobody_comes_in_without() {
        let tls = Identity { ca: "/c".into(), cert: "/x".into(), key: "/k".into() };
        let member = Member { tls: Some(tls), ..member() };
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
