use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(Path::new("w.toml"), text)
}

#[test]
fn an_empty_file_is_the_defaults() {
    let config = parse("").unwrap();
    assert_eq!(config, Config::default());
    assert_eq!(config.data_dir, Path::new("/var/lib/windrose"));
    assert_eq!(config.cores.memory_bytes, 256 << 20);
    assert_eq!(config.iscsi.portals, ["[::]:3260".parse().unwrap()]);
    assert_eq!(config.nvme.discovery, ["[::]:8009".parse().unwrap()]);
    assert_eq!(config.limits.login_timeout, Duration::from_secs(15));
    assert_eq!((config.api.tcp, config.metrics), (None, None));
    assert!(!config.name.is_empty());
}

#[test]
fn every_setting_is_taken_over() {
    let config = parse(
        r#"
        name = "n1"
        data_dir = "/d"
        shutdown_timeout_s = 5
        [cores]
        cpus = [1, 0]
        memory = "64M"
        poll_window_us = 0
        [disks]
        engine = "threads"
        buffered = true
        low_space_percent = 25
        [iscsi]
        portals = ["127.0.0.1:0", "127.0.0.1:0"]
        authority = "iqn.2001-04.com.example"
        [nvme]
        portals = []
        discovery = []
        authority = "nqn.2001-04.com.example"
        [vhost_user]
        directory = "/v"
        [api]
        socket = "/s"
        tcp = "127.0.0.1:7443"
        tls_cert = "/c"
        tls_key = "/k"
        token_file = "/t"
        [metrics]
        listen = "127.0.0.1:9260"
        [log]
        format = "json"
        level = "debug"
        [limits]
        connections = 10
        logins = 9
        discoveries = 9
        login_timeout_s = 8
        send_timeout_s = 7
        receive_timeout_s = 6
        admission_timeout_ms = 5
        keep_alive_s = 4
        commands = 3
        volumes = 2
        api_connections = 1
        "#,
    )
    .unwrap();
    assert_eq!(config.vhost_user.directory.as_deref(), Some(Path::new("/v")));
    let none = parse("[vhost_user]\ndirectory = \"\"").unwrap();
    assert_eq!(none.vhost_user.directory, None);
    let fresh = Config::default();
    assert_eq!(config.name, "n1");
    assert_eq!(config.cores.cpus, [1, 0]);
    assert_eq!(
        config.disks,
        Disks { engine: DiskEngine::Threads, buffered: true, low_space_percent: 25 }
    );
    assert_eq!(config.nvme.authority, "nqn.2001-04.com.example");
    assert_eq!(config.api.tcp.as_ref().unwrap().tls_key, Path::new("/k"));
    assert_eq!(config.log, Log { format: LogFormat::Json, level: LogLevel::Debug });
    assert_eq!(config.limits.admission_timeout, Duration::from_millis(5));
    assert_eq!(config.limits.api_connections, 1);
    assert_ne!(config.limits, fresh.limits);
    assert_ne!(config.iscsi, fresh.iscsi);
}

#[test]
fn every_setting_of_the_cluster_is_taken_over() {
    let config = parse(
        r#"
        [cluster]
        listen = ["192.0.2.1:7480", "198.51.100.1:7480"]
        heartbeat = ["203.0.113.1:7480"]
        lease_ms = 1000
        grace_ms = 1500
        failure_domain = "rack 1"
        resyncs = 3
        repair_after_s = "off"
        store_client = "192.0.2.1:12379"
        store_peer = "192.0.2.1:12380"
        store_program = "/opt/etcd"
        store_endpoints = ["https://192.0.2.9:2379"]
        tls_ca = "/ca"
        tls_cert = "/cc"
        tls_key = "/ck"
        "#,
    )
    .unwrap();
    let fresh = Config::default();
    assert_eq!(config.cluster.listen.len(), 2);
    assert_eq!(config.cluster.store.endpoints, ["https://192.0.2.9:2379"]);
    assert_eq!(config.cluster.tls.as_ref().unwrap().cert, Path::new("/cc"));
    assert_eq!(config.cluster.grace, Duration::from_millis(1500));
    assert_eq!(config.cluster.repair_after, None);
    assert_eq!(fresh.cluster.repair_after, Some(Duration::from_secs(1800)));
    assert_ne!(config.cluster.heartbeat, fresh.cluster.heartbeat);
    assert_eq!(fresh.cluster.store.program, Path::new("etcd"));
}

/// Text, line at fault (0 for none), texts that the message must contain.
const BAD: &[(&str, usize, &[&str])] = &[
    ("[cluster]\nrepair_after_s = 0", 2, &["cluster.repair_after_s: 0 is not", "or \"off\""]),
    ("[cluster]\nrepair_after_s = \"never\"", 2, &["\"never\" is not allowed; use whole seconds"]),
    ("nam = \"x\"", 1, &["unknown setting nam", "did you mean name?"]),
    ("\n\n[cores]\nmemry = \"1G\"", 4, &["unknown setting cores.memry", "cores.memory?"]),
    ("[cores]\nfrobnicate = 1", 2, &["cores.frobnicate", "there are: cores.count, cores.cpus"]),
    ("[core]\n", 1, &["unknown section core", "cores?"]),
    ("[a.b]\n", 1, &["unknown section a"]),
    ("\"a\\nb\" = 1", 1, &["unknown setting a\\nb"]),
    ("[\"a\\nb\"]\n", 1, &["unknown section a\\nb"]),
    ("cores = 2", 1, &["unknown setting cores"]),
    ("[name]\nx = 1", 1, &["name: this table is not allowed", "use a host name"]),
    ("[[cores]]\ncount = 1", 1, &["unknown setting cores"]),
    ("name = 5", 1, &["name: 5 is not allowed", "use a host name"]),
    ("name = \"a b\"", 1, &["name: \"a b\" is not allowed"]),
    ("data_dir = \"x\"", 1, &["data_dir: \"x\"", "an absolute path"]),
    ("data_dir = \"/a\\u0000b\"", 1, &["data_dir"]),
    ("shutdown_timeout_s = 0", 1, &["shutdown_timeout_s: 0", "1 to 600"]),
    (
        "[vhost_user]\ndirectory = \"run\"",
        2,
        &["vhost_user.directory: \"run\"", "an absolute path"],
    ),
    (
        "[vhost_user]\ndirectory = \"/a2345678901234567890123456789012345678901234567890123456789012345678901234567890\"",
        2,
        &["vhost_user.directory", "at most 80 bytes"],
    ),
    ("[cores]\ncount = 0", 2, &["cores.count: 0 is not allowed", "1 to 256"]),
    ("[cores]\ncount = -1", 2, &["cores.count: -1"]),
    ("[cores]\ncount = 1.5", 2, &["cores.count: 1.5"]),
    ("[cores]\ncount = 99999999999999999999", 2, &["cores.count"]),
    ("[cores]\ncpus = [0, 0]", 2, &["processor 0 is named twice"]),
    ("[cores]\ncpus = [0, \"x\"]", 2, &["\"x\" is not allowed"]),
    ("[cores]\ncpus = 1", 2, &["cores.cpus: 1 is not allowed", "a list"]),
    ("[cores]\ncpus = [1]\ncount = 1", 0, &["cores.count and cores.cpus exclude each other"]),
    (
        "[cores]\nmemory = \"15M\"",
        2,
        &["cores.memory: 15 MiB cannot hold 8 requests", "2 MiB each", "at least 16 MiB", "64GiB"],
    ),
    ("[cores]\nmemory = \"1T\"", 2, &["cores.memory: \"1T\" is not allowed", "16MiB to 64GiB"]),
    ("[cores]\nmemory = \"1GB\"", 2, &["decimal units are not used"]),
    ("[cores]\nmemory = true", 2, &["cores.memory: true"]),
    ("[disks]\nengine = \"magic\"", 2, &["\"auto\", \"io_uring\" or \"threads\""]),
    ("[disks]\nlow_space_percent = 91", 2, &["disks.low_space_percent: 91", "0 to 90"]),
    ("[disks]\nbuffered = \"yes\"", 2, &["disks.buffered: \"yes\"", "true or false"]),
    ("[iscsi]\nportals = [\"localhost:1\"]", 2, &["iscsi.portals: \"localhost:1\""]),
    ("[iscsi]\nportals = [\"[::]:1\", \"[::]:1\"]", 2, &["[::]:1 is named twice"]),
    ("[iscsi]\nauthority = \"nqn.2026-01.io.x\"", 2, &["iscsi.authority"]),
    ("[iscsi]\nauthority = \"iqn.2026-01.io.x:y\"", 2, &["iscsi.authority"]),
    ("[iscsi]\nauthority = \"iqn.2026-13.io.x\"", 2, &["iscsi.authority"]),
    ("[api]\ntcp = \"0.0.0.0:7443\"", 0, &["api.tcp needs api.tls_cert", "TLS and a token"]),
    (
        "[api]\ntcp = \"0.0.0.0:7443\"\ntls_cert = \"/c\"\ntls_key = \"/k\"",
        0,
        &["api.tcp needs api.token_file"],
    ),
    ("[api]\ntoken_file = \"/t\"", 0, &["api.token_file has no effect without api.tcp"]),
    ("[metrics]\nlisten = \"0.0.0.0:3260\"", 0, &["metrics.listen", "iscsi.portals", "same port"]),
    (
        "[cluster]\nlisten = [\"0.0.0.0:7480\"]",
        2,
        &["cluster.listen: \"0.0.0.0:7480\"", "wildcards"],
    ),
    ("[cluster]\nstore_peer = \"192.0.2.1:0\"", 2, &["cluster.store_peer"]),
    ("[cluster]\nstore_program = \"./etcd\"", 2, &["cluster.store_program", "absolute"]),
    ("[cluster]\nstore_endpoints = [\"192.0.2.1\"]", 2, &["cluster.store_endpoints", "URLs"]),
    ("[cluster]\nfailure_domain = \"\"", 2, &["cluster.failure_domain"]),
    ("[cluster]\nlease_ms = 3000", 0, &["cluster.grace_ms is too short"]),
    ("[cluster]\ntls_ca = \"/ca\"", 0, &["cluster.tls_key", "all three or none"]),
    (
        "[cluster]\nlisten = [\"192.0.2.1:1\"]\nheartbeat = [\"192.0.2.1:1\"]",
        0,
        &["cluster.heartbeat", "same port"],
    ),
    (
        "[cluster]\nlisten = [\"192.0.2.1:7481\"]",
        0,
        &["cluster.join (192.0.2.1:7481)", "cluster.listen", "same port"],
    ),
    ("[log]\nlevel = \"loud\"", 2, &["log.level: \"loud\"", "\"error\""]),
    ("[limits]\nlogins = 5000", 0, &["limits.logins exceeds limits.connections"]),
    ("[limits]\nlogins = 1979-05-27", 2, &["this datetime is not allowed"]),
    ("name = \"a\"\nname = \"b\"", 2, &["duplicate"]),
    ("name = ", 1, &[]),
    ("\n{", 2, &[]),
];

#[test]
fn bad_configurations_are_told_apart() {
    for &(text, line, says) in BAD {
        let error = parse(text).expect_err(text);
        assert_eq!(error.line.unwrap_or(0), line, "{text:?}: {error}");
        let shown = error.to_string();
        let location = if line == 0 { "w.toml: ".into() } else { format!("w.toml:{line}: ") };
        assert!(shown.starts_with(&location), "{shown}");
        for part in says {
            assert!(shown.contains(part), "{text:?}: {shown:?} does not say {part:?}");
        }
        assert!(!shown.contains('\n'), "{shown:?}");
    }
}

#[test]
fn addresses_that_do_not_clash_are_accepted() {
    for text in [
        "[iscsi]\nportals = [\"127.0.0.1:1\"]\n[nvme]\nportals = [\"127.0.0.2:1\"]",
        "[iscsi]\nportals = [\"0.0.0.0:1\"]\n[nvme]\nportals = [\"[::1]:1\"]",
        "[iscsi]\nportals = [\"[::]:0\"]\n[nvme]\nportals = [\"[::]:0\"]",
    ] {
        parse(text).unwrap();
    }
    parse("[iscsi]\nportals = [\"[::]:1\"]\n[nvme]\nportals = [\"127.0.0.1:1\"]").unwrap_err();
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("no.toml");
    let error = Config::load(&missing).unwrap_err().to_string();
    assert!(error.contains("no.toml: cannot be read"), "{error}");
    let binary = dir.path().join("bin.toml");
    std::fs::write(&binary, [0xff, 0xfe]).unwrap();
    assert!(Config::load(&binary).unwrap_err().to_string().contains("is not UTF-8"));
    let long = dir.path().join("long.toml");
    std::fs::write(&long, vec![b'#'; 2 << 20]).unwrap();
    assert!(Config::load(&long).unwrap_err().to_string().contains("is longer than"));
}

#[test]
fn the_guide_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/guides/configuration.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(Path::new(path).parent().unwrap()).unwrap();
        std::fs::write(path, guide()).unwrap();
    }
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(page == guide(), "run UPDATE=1 cargo test -p node to write configuration.md");
}

#[test]
fn the_example_with_its_comments_taken_off_is_the_defaults() {
    let set: String = example()
        .lines()
        .filter(|l| !l.contains("=      #"))
        .map(|l| format!("{}\n", l.trim_start_matches('#')))
        .collect();
    assert_eq!(parse(&set).unwrap(), Config::default());
    assert_eq!(parse(&example()).unwrap(), Config::default());
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(s in "\\PC{0,200}") {
        let _ = parse(&s);
    }

    #[test]
    fn nothing_like_a_configuration_makes_it_panic(
        lines in prop::collection::vec(
            "(\\[|\\[\\[)?(cores|api|limits|x)?(\\]|\\]\\])?|(count|cpus|pool|tcp|name|portals) = (-?[0-9]{1,25}|\"[a-z:.0-9\\[\\]]{0,12}\"|\\[[0-9, ]{0,9}\\]|true|1e9|\\{a=1\\})",
            0..8,
        )
    ) {
        let _ = parse(&lines.join("\n"));
    }
}
