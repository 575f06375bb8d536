//! What answers a stranger at a cluster as it is made by default: nothing but what the guide lists
//! (`docs/guides/cluster.md`, RFD 0038, 2.5).

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::cluster::{address, all_online, has_etcd, skipped};
use crate::common::{Daemon, Place};

/// How long a port may take to end a connection, at most.
const PATIENCE: Duration = Duration::from_secs(30);

/// A process and those that it has started.
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

/// Where the node and what it has started listen.
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
            assert_eq!(at.len(), 8, "a socket of IPv6 that nobody asked for: {row:?}");
            let at = Ipv4Addr::from(u32::from_str_radix(at, 16).unwrap().swap_bytes());
            SocketAddr::from((at, u16::from_str_radix(port, 16).unwrap()))
        })
        .collect();
    all.sort_unstable();
    all
}

/// What a port says to these bytes before it ends the connection.
fn answer(at: SocketAddr, said: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // It may be closed already.
    let _ = stream.write_all(said);
    let mut heard = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return heard,
            Ok(n) => heard.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                panic!("{at} neither answers nor ends: {said:?}")
            }
            Err(_) => return heard,
        }
    }
}

/// What a port says by TLS to somebody without a certificate.
fn answer_by_tls(at: SocketAddr, said: &str) -> String {
    let mut client = Command::new("openssl")
        .args(["s_client", "-quiet", "-no_ign_eof", "-connect", &at.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = client.stdin.take().unwrap();
    let _ = stdin.write_all(said.as_bytes());
    // What was said is to be answered before the client hears that there is no more.
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
    if !has_etcd() {
        return;
    }
    if Command::new("openssl").arg("version").output().is_err() {
        skipped("openssl is not installed");
        return;
    }
    let places = [161, 162].map(|number| {
        let listen = format!("[cluster]\nlisten = [\"{}:7480\"]\n", address(number));
        Place::named(&format!("n{number}"), &listen)
    });
    let [a, b] = &places;
    let nodes = [a.start(), b.start()];
    a.ok(&["cluster", "init"]);
    b.ok(&["cluster", "join", "--token", a.ok(&["cluster", "token"]).trim()]);
    a.ok(&["volume", "create", "web", "--size", "4M", "--replicas", "2"]);
    a.ok(&["volume", "allow", "web", "iqn.2026-01.net.example:host"]);
    places.iter().for_each(|place| all_online(place, 1));

    std::thread::scope(|scope| {
        for (place, node) in places.iter().zip(&nodes) {
            let portals = portals(&place.log());
            for at in listening(node) {
                let what = portals.get(&at.port()).copied();
                // Some take seconds to end what says nothing that makes sense.
                scope.spawn(move || look_at(at, what));
            }
        }
    });
}

/// Asks a port in plain text and by TLS; `portal` is what it is, if it is for initiators.
fn look_at(at: SocketAddr, portal: Option<&str>) {
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
        _ => panic!("nobody knows what listens at {at}"),
    }
}

/// The ports of what initiators are for, which the log names when the node serves.
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
