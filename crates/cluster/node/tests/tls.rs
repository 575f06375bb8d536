//! The API over TCP requires TLS and the token.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::config;
use api::client::{ApiAddress, CallError, Client};
use api::endpoint::{GetHealth, GetStatus, NoBody};
use api::{ApiError, ErrorCode};
use node::node::Node;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Duration, Instant};

const TOKEN: &str = "0123456789abcdef0123";

fn certificate(dir: &Path) {
    let certificate = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(dir.join("cert.pem"), certificate.cert.pem()).unwrap();
    std::fs::write(dir.join("key.pem"), certificate.signing_key.serialize_pem()).unwrap();
    std::fs::write(dir.join("token"), TOKEN).unwrap();
    std::fs::set_permissions(dir.join("token"), PermissionsExt::from_mode(0o600)).unwrap();
}

/// A port that is free now; no other program is expected to take it during the test.
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
        Client::new(ApiAddress::Tls { host: "localhost".into(), port })
            .with_token(token.map(Into::into))
            .with_ca_file(roots.then(|| dir.path().join("cert.pem")))
    };
    assert!(client(Some(TOKEN), true).call::<GetHealth>(&NoBody).await.unwrap().serving);
    for token in [None, Some("0123456789abcdef0124"), Some("")] {
        let refused = client(token, true).call::<GetHealth>(&NoBody).await.unwrap_err();
        let CallError::Refused(ApiError { code, hint, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(code, ErrorCode::Unauthorized);
        assert!(hint.unwrap().contains("--token-file"));
        let page = client(token, true).text("/metrics").await.unwrap_err();
        assert_eq!(page.code(), Some(ErrorCode::Unauthorized));
    }
    let untrusted = client(Some(TOKEN), false).call::<GetHealth>(&NoBody).await.unwrap_err();
    assert!(matches!(untrusted, CallError::Unreachable { .. }), "{untrusted:?}");

    // Plain HTTP gets no answer.
    #[expect(clippy::disallowed_methods, reason = "a client of its own")]
    let mut plain = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let request = format!("GET /v1/health HTTP/1.1\r\nauthorization: Bearer {TOKEN}\r\n\r\n");
    plain.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP/1.1 200"));
    assert!(node.stop().await.clean);
}

/// Sixty-four silent connections once kept the administrator out.
#[tokio::test]
async fn connections_without_a_token_keep_no_client_out_of_the_api_and_metrics() {
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
    let client = Client::new(ApiAddress::Tls { host: "localhost".into(), port })
        .with_token(Some(TOKEN.into()))
        .with_ca_file(Some(dir.path().join("cert.pem")));
    assert!(client.call::<GetHealth>(&NoBody).await.unwrap().serving);
    #[expect(clippy::disallowed_methods, reason = "a client of its own")]
    let mut scrape = tokio::net::TcpStream::connect(("127.0.0.1", metrics)).await.unwrap();
    scrape
        .write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut page = Vec::new();
    scrape.read_to_end(&mut page).await.unwrap();
    assert!(String::from_utf8_lossy(&page).contains("windrose_node_info"));
    // Neither waited for the silent ones to time out, after ten and thirty seconds.
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    drop(silent);
    assert!(node.stop().await.clean);
}

/// Once, 7,086 guesses a second were checked, noticed only in the log.
#[tokio::test]
async fn tokens_cannot_be_guessed_quickly_and_status_names_who_tries() {
    let dir = tempfile::tempdir().unwrap();
    certificate(dir.path());
    let port = free_port();
    let node = Node::start(&config(dir.path(), &over_tcp(dir.path(), port))).await.unwrap();
    let client = |token: &str| {
        Client::new(ApiAddress::Tls { host: "localhost".into(), port })
            .with_token(Some(token.into()))
            .with_ca_file(Some(dir.path().join("cert.pem")))
    };
    let (began, guesses) = (Instant::now(), 13);
    for _ in 0..guesses {
        let refused = client("a guess that is wrong").call::<GetHealth>(&NoBody).await;
        assert_eq!(refused.unwrap_err().code(), Some(ErrorCode::Unauthorized));
    }
    // The last four wait 3.75 s in total.
    assert!(began.elapsed() > Duration::from_millis(3700), "{:?}", began.elapsed());
    // Meanwhile, over the Unix socket.
    let local = Client::new(ApiAddress::Unix(dir.path().join("api.sock")));
    let status = local.call::<GetStatus>(&NoBody).await.unwrap();
    let found = status.findings.iter().find(|f| f.subject == "API").expect("it is told");
    assert!(found.message.contains("a token"), "{found:?}");
    let page = local.text("/metrics").await.unwrap();
    let count = format!("windrose_authentication_failures_total{{method=\"token\"}} {guesses}");
    assert!(page.contains(&count), "{count}");
    // The right token is delayed once, and not again.
    assert!(client(TOKEN).call::<GetHealth>(&NoBody).await.unwrap().serving);
    let began = Instant::now();
    for _ in 0..20 {
        client(TOKEN).call::<GetHealth>(&NoBody).await.unwrap();
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
    // The failed starts left nothing running or locked.
    certificate(dir.path());
    let node = Node::start(&config(dir.path(), &more)).await.unwrap();
    assert!(node.stop().await.clean);
}
