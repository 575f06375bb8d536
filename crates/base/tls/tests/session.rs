//! Both roles against each other, with a man in the middle.
#![allow(clippy::unwrap_used)]

use std::thread;

use proptest::prelude::*;
use tls::{Acceptor, CipherSuite, Psk, Session, TlsError};

const IDENTITY: &[u8] = b"NVMe0R01 nqn.host nqn.subsystem";

fn psk(suite: CipherSuite) -> Psk {
    Psk::new(IDENTITY, &[0x5a; 48][..key_len(suite)], suite)
}

fn key_len(suite: CipherSuite) -> usize {
    match suite {
        CipherSuite::Aes128Sha256 => 32,
        CipherSuite::Aes256Sha384 => 48,
    }
}

/// Everything that waits to be sent.
fn taken(session: &mut Session) -> Vec<u8> {
    let bytes = session.output().to_vec();
    session.consume_output(bytes.len());
    bytes
}

/// A client that has sent its ClientHello, and that message.
fn hello(psk: &Psk) -> (Session, Vec<u8>) {
    let mut client = Session::client(psk).unwrap();
    assert!(!client.handshake().unwrap());
    let hello = taken(&mut client);
    (client, hello)
}

/// A server that goes on with this hello by its key, if the client has it.
fn accept(bytes: &[u8], psk: &Psk) -> Result<Session, TlsError> {
    let mut acceptor = Acceptor::default();
    acceptor.receive(bytes);
    let hello = acceptor.hello()?.ok_or(TlsError::Closed)?;
    if !hello.offers().iter().any(|offer| hello.verify_binder(offer, psk)) {
        return Err(TlsError::UnknownPsk);
    }
    let mut server = acceptor.accept(psk)?;
    server.handshake()?;
    Ok(server)
}

/// A client and a server after the handshake.
fn pair(suite: CipherSuite) -> (Session, Session) {
    let psk = psk(suite);
    let (mut client, hello) = hello(&psk);
    let mut server = accept(&hello, &psk).unwrap();
    client.receive(&taken(&mut server));
    assert!(client.handshake().unwrap());
    server.receive(&taken(&mut client));
    assert!(server.handshake().unwrap());
    assert_eq!((server.identity(), client.identity()), (IDENTITY, IDENTITY));
    (client, server)
}

fn write(session: &mut Session, bytes: &[u8]) {
    assert_eq!(session.write([bytes]), Ok(bytes.len()));
}

/// All that comes out, and why nothing more does.
fn read(session: &mut Session) -> (Vec<u8>, Option<TlsError>) {
    let (mut all, mut some) = (Vec::new(), vec![0; 5000]);
    loop {
        match session.read(&mut some) {
            Ok(Some(n)) => all.extend_from_slice(&some[..n]),
            Ok(None) => return (all, None),
            Err(why) => return (all, Some(why)),
        }
    }
}

/// Where the records begin, and the end of the last.
fn records(bytes: &[u8]) -> Vec<usize> {
    let mut starts = vec![0];
    while let Some(header) = bytes.get(starts[starts.len() - 1]..).filter(|b| b.len() >= 5) {
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        starts.push(starts[starts.len() - 1] + 5 + len);
    }
    starts
}

#[test]
fn plaintext_round_trips() {
    for suite in [CipherSuite::Aes128Sha256, CipherSuite::Aes256Sha384] {
        let (mut client, mut server) = pair(suite);
        for len in [1, 2, 100, 16383, 16384, 16385, 100_000] {
            let sent: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            write(&mut client, &sent);
            let ciphertext = taken(&mut client);
            for part in ciphertext.chunks(10_000) {
                assert!(server.input_capacity() >= part.len());
                server.receive(part);
                let (echo, end) = read(&mut server);
                assert_eq!(end, None);
                write(&mut server, &echo);
            }
            client.receive(&taken(&mut server));
            assert!(read(&mut client) == (sent, None), "{len} bytes");
            client.release_idle_memory();
            server.release_idle_memory();
        }
    }
}

/// Short pieces share records, long ones have the longest.
#[test]
fn split_records_are_assembled() {
    let (mut client, mut server) = pair(CipherSuite::Aes128Sha256);
    let pieces: Vec<Vec<u8>> = [24, 4096, 8, 50_000, 24].iter().map(|n| vec![7; *n]).collect();
    let all: usize = pieces.iter().map(Vec::len).sum();
    assert_eq!(server.write(pieces.iter().map(Vec::as_slice)), Ok(all));
    let ciphertext = taken(&mut server);
    assert_eq!(records(&ciphertext).len() - 1, all.div_ceil(1 << 14));
    client.receive(&ciphertext);
    assert_eq!(read(&mut client), (pieces.concat(), None));
}

/// Data that is never forwarded is bounded.
#[test]
fn too_much_unread_data_is_refused() {
    let (_client, mut server) = pair(CipherSuite::Aes128Sha256);
    let piece = vec![1; 100_000];
    let taken: usize = (0..10).map(|_| server.write([&piece[..]]).unwrap()).sum();
    assert!(taken < 300_000, "{taken}");
    assert!(server.output().len() < 300_000, "{}", server.output().len());
    assert_eq!(server.write([&piece[..]]), Ok(0));
    server.consume_output(200_000);
    assert!(server.write([&piece[..]]).unwrap() > 0);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "what goes from core to core elsewhere")]
fn a_session_goes_from_thread_to_thread() {
    let (mut client, mut server) = pair(CipherSuite::Aes256Sha384);
    write(&mut client, &[3; 40_000]);
    let ciphertext = taken(&mut client);
    let (first, rest) = ciphertext.split_at(20_000);
    server.receive(first);
    let mut some = [0; 100];
    assert_eq!(server.read(&mut some), Ok(Some(100)));
    write(&mut server, b"answer");
    let rest = rest.to_vec();
    let moved = thread::spawn(move || {
        server.receive(&rest);
        let (read, end) = read(&mut server);
        assert_eq!((read.len(), end), (39_900, None));
        server
    });
    let mut server = moved.join().unwrap();
    client.receive(&taken(&mut server));
    assert_eq!(read(&mut client), (b"answer".to_vec(), None));
}

/// RFC 8446, 4.2.11.2: only the owner of the key can make its binder.
#[test]
fn a_client_without_the_key_is_detected() {
    let known = psk(CipherSuite::Aes128Sha256);
    let others = [
        Psk::new(IDENTITY, &[0x5b; 32], CipherSuite::Aes128Sha256),
        Psk::new(b"NVMe0R01 nqn.host nqn.other", &[0x5a; 32], CipherSuite::Aes128Sha256),
        Psk::new(IDENTITY, &[0x5a; 48], CipherSuite::Aes256Sha384),
    ];
    for other in &others {
        let (_client, hello) = hello(other);
        assert_eq!(accept(&hello, &known).unwrap_err(), TlsError::UnknownPsk);
        // Nor does TLS go on with it, if it is tried all the same.
        let mut acceptor = Acceptor::default();
        acceptor.receive(&hello);
        let mut server = acceptor.accept(&known).unwrap();
        let failed = server.handshake().unwrap_err();
        assert_eq!(server.handshake(), Err(failed));
        assert_eq!((server.read(&mut [0; 9]), server.write([&b"x"[..]])), (Ok(None), Ok(0)));
    }
    assert!(others.iter().all(|other| *other != known));
    assert!(!format!("{known:?}").contains("90"), "the key is not shown");
}

/// RFC 8446, 4.2.11: a key goes with one hash. A client that binds by another one than the key's
/// shows it.
#[test]
fn a_binder_identifies_its_hash() {
    let suites = [CipherSuite::Aes128Sha256, CipherSuite::Aes256Sha384];
    for suite in suites {
        let (_, bytes) = hello(&psk(suite));
        let mut acceptor = Acceptor::default();
        acceptor.receive(&bytes);
        let hello = acceptor.hello().unwrap().unwrap();
        let found = suites.map(|other| hello.offers()[0].binder_fits(other));
        assert_eq!(found, suites.map(|other| other == suite));
    }
}

#[test]
fn a_client_without_tls_is_refused() {
    for bytes in
        [&b"GET / HTTP/1.1\r\n"[..], &[0, 0, 0x80, 0], &[22, 3, 1, 0, 0], &[22, 3, 1, 0xff]]
    {
        let mut acceptor = Acceptor::default();
        acceptor.receive(bytes);
        let is_whole = bytes.len() > 4 || bytes[0] != 22;
        let expected = if is_whole { Err(TlsError::NotClientHello) } else { Ok(None) };
        assert_eq!(acceptor.hello(), expected);
    }
    // Another message than a ClientHello, one that is too long, and one that never ends.
    for start in [[2, 0, 0, 100], [1, 1, 0, 0]] {
        let mut acceptor = Acceptor::default();
        acceptor.receive(&[22, 3, 1, 0, 4]);
        acceptor.receive(&start);
        assert_eq!(acceptor.hello(), Err(TlsError::NotClientHello));
    }
    let mut acceptor = Acceptor::default();
    acceptor.receive(&[22, 3, 1, 0, 4, 1, 0, 0x3f, 0]);
    for _ in 0..4000 {
        acceptor.receive(&[22, 3, 1, 0, 1, 0]);
    }
    assert_eq!(acceptor.hello(), Err(TlsError::NotClientHello));
    assert_eq!(TlsError::NotClientHello.alert_record(), Some([21, 3, 3, 0, 2, 2, 50]));
}

/// RFC 8446, 5.1: a message may come in several records.
#[test]
fn a_client_hello_may_be_split_anywhere() {
    let psk = psk(CipherSuite::Aes256Sha384);
    for size in [1, 2, 3, 50, 1000] {
        let (mut client, bytes) = hello(&psk);
        let mut records = Vec::new();
        for part in bytes[5..].chunks(size) {
            records.extend([22, 3, 1, 0, u8::try_from(part.len() & 0xff).unwrap()]);
            let at = records.len() - 2;
            records[at] = u8::try_from(part.len() >> 8).unwrap();
            records.extend(part);
        }
        let mut acceptor = Acceptor::default();
        for byte in &records {
            assert_eq!(acceptor.hello(), Ok(None));
            acceptor.receive(&[*byte]);
        }
        let hello = acceptor.hello().unwrap().unwrap();
        assert!(hello.verify_binder(&hello.offers()[0], &psk));
        let mut server = acceptor.accept(&psk).unwrap();
        server.handshake().unwrap();
        client.receive(&taken(&mut server));
        assert_eq!(client.handshake(), Ok(true));
    }
}

/// Who changes a byte of the handshake ends it. Not protected are the versions in the headers of
/// records, which say nothing, and the record that is there for the sake of old middle boxes (RFC
/// 8446, D.4).
#[test]
fn a_tampered_handshake_fails() {
    let psk = psk(CipherSuite::Aes128Sha256);
    let unprotected = |bytes: &[u8], at: usize| {
        let starts = records(bytes);
        let start = *starts.iter().rev().find(|start| **start <= at).unwrap();
        matches!(at - start, 1 | 2) || bytes[start] == 20
    };
    let (_, first) = hello(&psk);
    for at in 0..first.len() {
        let (mut client, mut bytes) = hello(&psk);
        let free = unprotected(&bytes, at);
        bytes[at] ^= 0x01;
        let Ok(mut server) = accept(&bytes, &psk) else { continue };
        client.receive(&taken(&mut server));
        assert!(client.handshake() != Ok(true) || free, "byte {at} of the hello");
    }
    let answer_len = taken(&mut accept(&first, &psk).unwrap()).len();
    for at in 0..answer_len {
        let (mut client, bytes) = hello(&psk);
        let mut answer = taken(&mut accept(&bytes, &psk).unwrap());
        let free = unprotected(&answer, at);
        answer[at] ^= 0x01;
        client.receive(&answer);
        client.receive_end();
        assert!(client.handshake() != Ok(true) || free, "byte {at} of the answer");
    }
}

/// A handshake that is cut is none, and says so when the stream ends.
#[test]
fn a_truncated_handshake_fails() {
    let psk = psk(CipherSuite::Aes128Sha256);
    let (_, first) = hello(&psk);
    for at in 0..first.len() {
        let mut acceptor = Acceptor::default();
        acceptor.receive(&first[..at]);
        assert_eq!(acceptor.hello(), Ok(None), "{at}");
    }
    let answer_len = taken(&mut accept(&first, &psk).unwrap()).len();
    for at in (0..answer_len).chain([answer_len - 1]) {
        let (mut client, bytes) = hello(&psk);
        let answer = taken(&mut accept(&bytes, &psk).unwrap());
        client.receive(&answer[..at]);
        assert_eq!(client.handshake(), Ok(false), "{at}");
        client.receive_end();
        assert_eq!(client.handshake(), Err(TlsError::Closed), "{at}");
    }
}

/// Three records, some altered on the way: the received data, and the end of the session.
fn through(change: impl FnOnce(&mut Vec<Vec<u8>>)) -> (Vec<u8>, Option<TlsError>) {
    let (mut client, mut server) = pair(CipherSuite::Aes128Sha256);
    for byte in 1..=3 {
        write(&mut client, &[byte; 100]);
    }
    let ciphertext = taken(&mut client);
    let starts = records(&ciphertext);
    let mut all = starts.windows(2).map(|w| ciphertext[w[0]..w[1]].to_vec()).collect();
    change(&mut all);
    server.receive(&all.concat());
    server.receive_end();
    read(&mut server)
}

/// RFC 8446, 5.2: a record out of order fails, and so does everything after it.
#[test]
fn records_arrive_whole_and_in_order_or_fail() {
    let three = [[1; 100], [2; 100], [3; 100]].concat();
    assert_eq!(through(|_| {}), (three.clone(), Some(TlsError::Closed)));
    for record in 0..3 {
        let before = three[..record * 100].to_vec();
        let ends = |change: &dyn Fn(&mut Vec<Vec<u8>>)| {
            let (came, end) = through(change);
            assert_eq!(came, before, "record {record}");
            assert!(end.is_some());
        };
        for at in [0, 3, 4, 5, 50, 104, 105, 106, 121] {
            ends(&|all| all[record][at] ^= 0x10);
        }
        if record < 2 {
            ends(&|all| drop(all.remove(record)));
            ends(&|all| all.swap(record, record + 1));
        }
        for at in [0, 1, 4, 5, 50, 121] {
            ends(&|all| {
                all.truncate(record + 1);
                all[record].truncate(at);
            });
        }
        let (came, end) = through(|all| all.insert(record, all[record].clone()));
        assert_eq!(came, three[..(record + 1) * 100]);
        assert!(matches!(end, Some(TlsError::ProtocolFailure(_))), "{end:?}");
    }
}

/// RFC 8446, 6.1.
#[test]
fn each_side_sends_close_notify() {
    let (mut client, mut server) = pair(CipherSuite::Aes128Sha256);
    write(&mut server, b"last");
    server.close();
    client.receive(&taken(&mut server));
    assert_eq!(read(&mut client), (b"last".to_vec(), Some(TlsError::Closed)));
    assert_eq!(client.write([&b"x"[..]]), Err(TlsError::Closed));
}

/// A server explains in plain text why it rejects a ClientHello.
#[test]
fn an_alert_reaches_the_client() {
    let (mut client, _) = hello(&psk(CipherSuite::Aes128Sha256));
    client.receive(&TlsError::UnknownPsk.alert_record().unwrap());
    assert_eq!(client.handshake(), Err(TlsError::Alert(51)));
    assert_eq!(client.handshake(), Err(TlsError::Alert(51)));
}

proptest! {
    /// Whatever comes first.
    #[test]
    fn arbitrary_client_hello_bytes_do_not_panic(bytes in any::<Vec<u8>>()) {
        let mut acceptor = Acceptor::default();
        acceptor.receive(&[22, 3, 1]);
        acceptor.receive(&bytes);
        let _ = acceptor.hello();
    }

    /// Likewise, with realistic client data; TLS after it still works.
    #[test]
    fn mutated_client_hellos_do_not_panic(changes in proptest::collection::vec((0usize..600, any::<u8>()), 1..8)) {
        let psk = psk(CipherSuite::Aes128Sha256);
        let (_client, mut bytes) = hello(&psk);
        for (at, byte) in changes {
            if let Some(there) = bytes.get_mut(at) {
                *there = byte;
            }
        }
        let mut acceptor = Acceptor::default();
        acceptor.receive(&bytes);
        let _ = acceptor.hello();
        let mut server = acceptor.accept(&psk).unwrap();
        server.receive_end();
        prop_assert!(server.handshake() != Ok(true));
    }
}
