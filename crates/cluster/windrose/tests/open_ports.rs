//! Which ports of a default cluster answer an unauthenticated client: only those in the guide
//! (`docs/guides/cluster.md`, RFD 0038, 2.5).

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::cluster::{address, wait_all_online};
use crate::common::{Daemon, TestNode};

/// How long a port may take to end a connection, at most.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// A process and its descendants.
fn processes(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut next = 0;
    while let Some(pid) = all.get(next).copied() {
        next += 1;
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = std::fs::read_to_string(task.path().join("children"));
            let children = children.unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    all
}

/// The addresses that the node and its descendants listen on.
fn listening(node: &Daemon) -> Vec<SocketAddr> {
    let processes = processes(node.child.id());
    let files = processes.iter().flat_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")));
    let targets = files.flatten().flatten().filter_map(|file| std::fs::read_link(file.path()).ok());
    let sockets: Vec<String> = targets.map(|target| target.display().to_string()).collect();
    let tables = ["tcp", "tcp6"].map(|table| format!("/proc/{}/net/{table}", node.child.id()));
    let tables = tables.map(|table| std::fs::read_to_string(table).unwrap_or_default());
    let rows = tables.iter().flat_map(|table| table.lines().skip(1));
    let mut all: Vec<_> = rows
        .map(|row| row.split_whitespace().collect::<Vec<_>>())
        // RFC 9293: LISTEN is state 0A of the kernel.
        .filter(|row| row[3] == "0A" && sockets.contains(&format!("socket:[{}]", row[9])))
        .map(|row| {
            let (at, port) = row[1].split_once(':').unwrap();
            assert_eq!(at.len(), 8, "a socket of IPv6 that was not asked for: {row:?}");
            let at = Ipv4Addr::from(u32::from_str_radix(at, 16).unwrap().swap_bytes());
            SocketAddr::from((at, u16::from_str_radix(port, 16).unwrap()))
        })
        .collect();
    all.sort_unstable();
    all
}

/// A port's answer to these bytes, until it ends the connection.
fn answer(at: SocketAddr, request: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT)).unwrap();
    // It may be closed already.
    let _ = stream.write_all(request);
    let mut heard = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return heard,
            Ok(n) => heard.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                panic!("{at} neither answers nor ends: {request:?}")
            }
            Err(_) => return heard,
        }
    }
}

/// A port's answer over TLS to a client without a certificate.
fn answer_by_tls(at: SocketAddr, request: &str) -> String {
    let mut client = Command::new("openssl")
        .args(["s_client", "-quiet", "-no_ign_eof", "-connect", &at.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = client.stdin.take().unwrap();
    let _ = stdin.write_all(request.as_bytes());
    // Read the answer before closing the sending side.
    std::thread::scope(|scope| {
        scope.spawn(move || {
            crate::common::pause(2000);
            drop(stdin);
        });
        String::from_utf8_lossy(&client.wait_with_output().unwrap().stdout).into_owned()
    })
}

#[test]
fn nothing_answers_a_stranger_but_what_the_guide_lists() {
    if !testkit::installed(&["etcd", "openssl"]) {
        return;
    }
    let places = [161, 162].map(|number| {
        let listen = format!("[cluster]\nlisten = [\"{}:7480\"]\n", address(number));
        TestNode::named(&format!("n{number}"), &listen)
    });
    let [a, b] = &places;
    let nodes = [a.start(), b.start()];
    a.ok(&["cluster", "init"]);
    b.ok(&["cluster", "join", "--token", a.ok(&["cluster", "token"]).trim()]);
    a.ok(&["volume", "create", "web", "--size", "4M", "--replicas", "2"]);
    a.ok(&["volume", "allow", "web", "iqn.2026-01.net.example:host"]);
    places.iter().for_each(|test_node| wait_all_online(test_node, 1));

    std::thread::scope(|scope| {
        for (test_node, node) in places.iter().zip(&nodes) {
            let portals = portals(&test_node.log());
            for at in listening(node) {
                let what = portals.get(&at.port()).copied();
                // Some ports take seconds to end a connection with nonsense.
                scope.spawn(move || probe_port(at, what));
            }
        }
    });
}

/// Probes a port in plain text and by TLS; `portal` is its protocol if it is for initiators.
fn probe_port(at: SocketAddr, portal: Option<&str>) {
    let guide = include_str!("../../../../docs/guides/cluster.md");
    let http = "GET /v1/status HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let plain = String::from_utf8_lossy(&answer(at, http.as_bytes())).into_owned();
    assert!(!plain.contains("200") && !plain.contains("windrose"), "{at}: {plain}");
    if portal.is_some() {
        return;
    }
    let port = at.port();
    assert!(guide.contains(&port.to_string()), "{at} is not in the guide");
    match port {
        7480 | 2379 | 2380 => {
            let told = answer_by_tls(at, http);
            assert!(told.is_empty(), "{at}: {told}");
        }
        7481 => {
            for said in [http, &http.replace("GET /v1/status", "POST /v1/join")] {
                let told = answer_by_tls(at, said);
                assert!(told.contains(" 401 "), "{at}: {told}");
            }
        }
        _ => panic!("an unknown listener at {at}"),
    }
}

/// The initiator ports that the log names when the node serves, with their protocols.
fn portals(log: &str) -> BTreeMap<u16, &'static str> {
    let line = log.lines().rfind(|line| line.contains("serving")).unwrap_or_default();
    let mut all = BTreeMap::new();
    for what in ["iscsi", "nvme", "discovery"] {
        let rest = line.split_once(&format!("{what}=[")).map_or("", |(_, rest)| rest);
        let listed = rest.split_once(']').map_or("", |(list, _)| list);
        let ports = listed.split(", ").filter_map(|at| at.parse::<SocketAddr>().ok());
        all.extend(ports.map(|at| (at.port(), what)));
    }
    assert_eq!(all.len(), 3, "{line}");
    all
}
