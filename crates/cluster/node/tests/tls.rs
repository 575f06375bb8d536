//! The API over TCP: only with TLS, only with the token.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::config;
use api::client::{Address, CallError, Client};
use api::endpoint::{GetHealth, GetStatus, Nothing};
use api::{ApiError, Code};
use node::node::Node;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Duration, Instant};

const TOKEN: &str = "0123456789abcdef0123";

fn certificate(dir: &Path) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(dir.join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(dir.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    std::fs::write(dir.join("token"), TOKEN).unwrap();
    std::fs::set_permissions(dir.join("token"), PermissionsExt::from_mode(0o600)).unwrap();
}

/// A port that is free now; nobody else asks for it within the test.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn over_tcp(dir: &Path, port: u16) -> String {
    let dir = dir.display();
    format!(
        "tcp = \"127.0.0.1:{port}\"\ntls_cert = \"{dir}/cert.pem\"\ntls_key = \"{dir}/key.pem\"\n\
         token_file = \"{dir}/token\""
    )
}

#[tokio::test]
async fn the_token_opens_and_nothing_else_does() {
    let dir = tempfile::tempdir().unwrap();
    certificate(dir.path());
    let port = free_port();
    let node = Node::start(&config(dir.path(), &over_tcp(dir.path(), port))).await.unwrap();
    let client = |token: Option<&str>, roots: bool| {
        Client::new(Address::Tls { host: "localhost".into(), port })
            .with_token(token.map(Into::into))
            .with_roots(roots.then(|| dir.path().join("cert.pem")))
    };
    assert!(client(Some(TOKEN), true).call::<GetHealth>(&Nothing).await.unwrap().serving);
    for token in [None, Some("0123456789abcdef0124"), Some("")] {
        let refused = client(token, true).call::<GetHealth>(&Nothing).await.unwrap_err();
        let CallError::Refused(ApiError { code, hint, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(code, Code::Unauthorized);
        assert!(hint.unwrap().contains("--token-file"));
        let page = client(token, true).text("/metrics").await.unwrap_err();
        assert_eq!(page.code(), Some(Code::Unauthorized));
    }
    let stranger = client(Some(TOKEN), false).call::<GetHealth>(&Nothing).await.unwrap_err();
    assert!(matches!(stranger, CallError::Unreachable { .. }), "{stranger:?}");

    // Plain HTTP gets nothing.
    #[expect(clippy::disallowed_methods, reason = "a client of its own")]
    let mut plain = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let request = format!("GET /v1/health HTTP/1.1\r\nauthorization: Bearer {TOKEN}\r\n\r\n");
    plain.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP/1.1 200"));
    assert!(node.stop().await.clean);
}

/// Sixty-four connections that said nothing once kept the administrator out.
#[tokio::test]
async fn connections_without_a_token_keep_nobody_out_of_the_api_and_metrics() {
    let dir = tempfile::tempdir().unwrap();
    certificate(dir.path());
    let (port, metrics) = (free_port(), free_port());
    let more =
        format!("{}\n[metrics]\nlisten = \"127.0.0.1:{metrics}\"", over_tcp(dir.path(), port));
    let node = Node::start(&config(dir.path(), &more)).await.unwrap();
    let mut silent = Vec::new();
    for at in [port, metrics] {
        for _ in 0..200 {
            #[expect(clippy::disallowed_methods, reason = "a client of its own")]
            silent.push(tokio::net::TcpStream::connect(("127.0.0.1", at)).await.unwrap());
        }
    }
    let began = Instant::now();
    let client = Client::new(Address::Tls { host: "localhost".into(), port })
        .with_token(Some(TOKEN.into()))
        .with_roots(Some(dir.path().join("cert.pem")));
    assert!(client.call::<GetHealth>(&Nothing).await.unwrap().serving);
    #[expect(clippy::disallowed_methods, reason = "a client of its own")]
    let mut scrape = tokio::net::TcpStream::connect(("127.0.0.1", metrics)).await.unwrap();
    scrape
        .write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut page = Vec::new();
    scrape.read_to_end(&mut page).await.unwrap();
    assert!(String::from_utf8_lossy(&page).contains("windrose_node_info"));
    // Neither has waited until the silent ones were given up, after ten and thirty seconds.
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    drop(silent);
    assert!(node.stop().await.clean);
}

/// 7,086 a second were once looked at, unseen but for as many lines in the log.
#[tokio::test]
async fn tokens_cannot_be_guessed_quickly_and_status_names_who_tries() {
    let dir = tempfile::tempdir().unwrap();
    certificate(dir.path());
    let port = free_port();
    let node = Node::start(&config(dir.path(), &over_tcp(dir.path(), port))).await.unwrap();
    let client = |token: &str| {
        Client::new(Address::Tls { host: "localhost".into(), port })
            .with_token(Some(token.into()))
            .with_roots(Some(dir.path().join("cert.pem")))
    };
    let (began, guesses) = (Instant::now(), 13);
    for _ in 0..guesses {
        let refused = client("a guess that is wrong").call::<GetHealth>(&Nothing).await;
        assert_eq!(refused.unwrap_err().code(), Some(Code::Unauthorized));
    }
    // The last four wait for 3.75 s.
    assert!(began.elapsed() > Duration::from_millis(3700), "{:?}", began.elapsed());
    // Beside it, over the Unix socket.
    let local = Client::new(Address::Unix(dir.path().join("api.sock")));
    let status = local.call::<GetStatus>(&Nothing).await.unwrap();
    let found = status.findings.iter().find(|f| f.subject == "API").expect("it is told");
    assert!(found.message.contains("a token"), "{found:?}");
    let page = local.text("/metrics").await.unwrap();
    let count = format!("windrose_authentication_failures_total{{method=\"token\"}} {guesses}");
    assert!(page.contains(&count), "{count}");
    // The right one waits for its turn once, and then no more.
    assert!(client(TOKEN).call::<GetHealth>(&Nothing).await.unwrap().serving);
    let began = Instant::now();
    for _ in 0..20 {
        client(TOKEN).call::<GetHealth>(&Nothing).await.unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn what_is_wrong_with_the_files_is_named() {
    let dir = tempfile::tempdir().unwrap();
    certificate(dir.path());
    let more = over_tcp(dir.path(), free_port());
    let refused = async |file: &str, text: &str, mode: u32| {
        certificate(dir.path());
        let path = dir.path().join(file);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        Node::start(&config(dir.path(), &more)).await.unwrap_err().to_string()
    };
    for (file, text, mode, says) in [
        ("cert.pem", "nonsense", 0o644, "api.tls_cert"),
        ("key.pem", "nonsense", 0o600, "api.tls_key"),
        ("token", "short", 0o600, "api.token_file"),
        ("token", TOKEN, 0o644, "chmod 600"),
    ] {
        let error = refused(file, text, mode).await;
        assert!(error.contains(says) && error.contains(file), "{file}: {error}");
    }
    // Nothing was left running or locked.
    certificate(dir.path());
    let node = Node::start(&config(dir.path(), &more)).await.unwrap();
    assert!(node.stop().await.clean);
}
