//! Registration with an iSNS server (RFC 4171): a server of the test, and Debian's.

use crate::common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::{create, name};
use api::Protocols;
use api::endpoint::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(30);

const REGISTER: u8 = 1;
const DEREGISTER: u8 = 4;
const REPLACE: u8 = 0x10;

/// A message that the server received: function, flags, payload.
struct Said {
    function: u8,
    flags: u8,
    payload: Vec<u8>,
}

impl Said {
    fn names(&self, what: &str) -> bool {
        self.payload.windows(what.len()).any(|w| w == what.as_bytes())
    }
}

/// Accepts every message, answers with `status` and a registration period of `period_s`, and
/// forwards it.
async fn serve(mut stream: TcpStream, status: u32, period_s: u32, heard: mpsc::Sender<Said>) {
    let mut header = [0; 12];
    while stream.read_exact(&mut header).await.is_ok() {
        let mut payload = vec![0; usize::from(u16::from_be_bytes([header[4], header[5]]))];
        stream.read_exact(&mut payload).await.unwrap();
        let (function, flags) = (header[3], header[6]);
        let said = Said { function, flags, payload };
        if heard.send(said).await.is_err() {
            return;
        }
        let period =
            [&6u32.to_be_bytes()[..], &4u32.to_be_bytes(), &period_s.to_be_bytes()].concat();
        let answer = [&status.to_be_bytes()[..], &period].concat();
        header[2] = 0x80;
        header[4..6].copy_from_slice(&u16::try_from(answer.len()).unwrap().to_be_bytes());
        header[6] = 0x4c;
        stream.write_all(&[&header[..], &answer].concat()).await.unwrap();
    }
}

async fn server(status: u32, period_s: u32) -> (String, mpsc::Receiver<Said>) {
    #[allow(clippy::disallowed_methods, reason = "the other side of the wire")]
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let (tell, heard) = mpsc::channel(64);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, status, period_s, tell.clone()));
        }
    });
    (at, heard)
}

async fn next(heard: &mut mpsc::Receiver<Said>) -> Said {
    timeout(PATIENCE, heard.recv()).await.expect("a message in time").unwrap()
}

/// More settings of `[iscsi]`; the common configuration ends with that section.
fn isns(at: &str) -> String {
    format!("[iscsi]\nportals = [\"127.0.0.1:0\"]\nisns = \"{at}\"")
}

#[tokio::test]
async fn what_is_served_is_registered_and_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    // The shortest period that is accepted: renewal after five seconds.
    let (at, mut heard) = server(0, 10).await;
    let (node, client) = common::start_with(dir.path(), &isns(&at)).await;
    let portal = node.portals().iscsi[0].port();
    create(&client, "a").await;
    let said = next(&mut heard).await;
    assert_eq!((said.function, said.flags & REPLACE), (REGISTER, REPLACE), "what was there goes");
    assert!(said.names("test\0") && said.names("iqn.2026-01.io.windrose:a\0"));
    let address = [&[0xff, 0xff, 127, 0, 0, 1][..], &[0, 0, 0, 17, 0, 0, 0, 4, 0, 0]].concat();
    let address = [&address[..], &portal.to_be_bytes()].concat();
    assert!(said.payload.windows(address.len()).any(|w| w == address), "the portal");

    let said = next(&mut heard).await;
    assert_eq!((said.function, said.flags & REPLACE), (REGISTER, 0), "renewed in time");

    create(&client, "b").await;
    let said = timeout(PATIENCE, async {
        loop {
            let said = next(&mut heard).await;
            if said.names("windrose:b\0") {
                return said;
            }
        }
    });
    assert_eq!(said.await.unwrap().flags & REPLACE, REPLACE, "what has changed replaces");

    for volume in ["a", "b"] {
        let nvme = Protocols { iscsi: false, ..Protocols::default() };
        client.call_on::<SetProtocols>(&name(volume), &[], &nvme).await.unwrap();
    }
    while next(&mut heard).await.function != DEREGISTER {}
    let both = Protocols::default();
    client.call_on::<SetProtocols>(&name("a"), &[], &both).await.unwrap();
    assert_eq!(next(&mut heard).await.function, REGISTER);
    assert!(node.stop().await.clean);
    while next(&mut heard).await.function != DEREGISTER {}
}

#[tokio::test]
async fn a_server_that_refuses_or_is_away_is_nobodys_trouble() {
    let dir = tempfile::tempdir().unwrap();
    let (at, mut heard) = server(8, 10).await;
    let (node, client) = common::start_with(dir.path(), &isns(&at)).await;
    create(&client, "a").await;
    assert_eq!(next(&mut heard).await.function, REGISTER);
    // The node learns of the refusal.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(node.stop().await.clean);
    assert!(timeout(Duration::from_secs(1), heard.recv()).await.is_err(), "nothing to take back");
    let (node, client) = common::start_with(dir.path(), &isns("127.0.0.1:1")).await;
    create(&client, "b").await;
    assert!(node.stop().await.clean);
}

/// Debian's server, in the foreground, with its own database in memory.
struct Isnsd(Child);

impl Drop for Isnsd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server and returns its port. The server ends if the port was taken meanwhile; then
/// tries another.
async fn isnsd(dir: &Path) -> (Isnsd, u16) {
    for _ in 0..10 {
        #[allow(clippy::disallowed_methods, reason = "an unused port")]
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let mut server = isnsd_at(dir, port);
        for _ in 0..150 {
            if server.0.try_wait().unwrap().is_some() {
                break;
            }
            if dir.join("isnsctl").exists() && !listed(dir).await.contains("onnect") {
                return (server, port);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    panic!("{}", std::fs::read_to_string(dir.join("isnsd.log")).unwrap());
}

fn isnsd_at(dir: &Path, port: u16) -> Isnsd {
    let config = dir.join("isnsd.conf");
    let text = format!(
        "SourceName = iqn.2001-04.com.example:isns\nSecurity = 0\nDefaultDiscoveryDomain = 1\n\
         PIDFile = {0}/isnsd.pid\nBindAddress = 127.0.0.1:{port}\nControlSocket = {0}/isnsctl\n\
         ServerAddress = 127.0.0.1:{port}\nRegistrationPeriod = 10m\n",
        dir.display()
    );
    std::fs::write(&config, text).unwrap();
    let program = if Path::new("/usr/sbin/isnsd").is_file() { "/usr/sbin/isnsd" } else { "isnsd" };
    let log = std::fs::File::create(dir.join("isnsd.log")).unwrap();
    let child = Command::new(program)
        .args(["-f", "-c"])
        .arg(&config)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    Isnsd(child)
}

/// All objects that the server lists. The node, which runs on this thread, continues meanwhile.
async fn listed(dir: &Path) -> String {
    let dir = dir.to_owned();
    tokio::task::spawn_blocking(move || list(&dir)).await.unwrap()
}

fn list(dir: &Path) -> String {
    let program =
        if Path::new("/usr/sbin/isnsadm").is_file() { "/usr/sbin/isnsadm" } else { "isnsadm" };
    let mut text = String::new();
    for what in ["entities", "nodes", "portals", "pgs"] {
        // It retries for minutes if no server answers.
        let mut command = Command::new("timeout");
        command.args(["5", program, "-c"]).arg(dir.join("isnsd.conf"));
        command.args(["--local", "--list", what]);
        let output = command.output().unwrap();
        text.push_str(&String::from_utf8_lossy(&output.stdout));
        text.push_str(&String::from_utf8_lossy(&output.stderr));
    }
    text
}

async fn until(dir: &Path, good: impl Fn(&str) -> bool) {
    let mut text = String::new();
    for _ in 0..150 {
        text = listed(dir).await;
        if good(&text) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let log = std::fs::read_to_string(dir.join("isnsd.log")).unwrap();
    panic!("{text}\n{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn debians_server_lists_what_is_served() {
    if !testkit::installed(&["isnsd", "isnsadm"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (_server, port) = isnsd(dir.path()).await;
    let (node, client) = common::start_with(dir.path(), &isns(&format!("127.0.0.1:{port}"))).await;
    let portal = node.portals().iscsi[0].port();
    create(&client, "a").await;
    // Each kind is listed separately: an object registered meanwhile may show in later lists only.
    let portal = portal.to_string();
    let all = ["windrose:a", &portal, "test"];
    until(dir.path(), |text| all.iter().all(|wanted| text.contains(wanted))).await;
    create(&client, "b").await;
    let both = |text: &str| ["windrose:a", "windrose:b"].iter().all(|name| text.contains(name));
    until(dir.path(), both).await;
    client.call_on::<DeleteVolume>(&name("a"), &[], &NoBody).await.unwrap();
    until(dir.path(), |text| !text.contains("windrose:a") && text.contains("windrose:b")).await;
    assert!(node.stop().await.clean);
    until(dir.path(), |text| !text.contains("windrose")).await;
}
