//! The attacks of hostile clients. Every attack ends by itself and expects errors of its sockets.
//! It returns a line to print, or an error if the node failed to defend itself (for example, kept a
//! silent connection).

use crate::server::IscsiLun;
use anyhow::{Result, ensure};
use probe::{
    iscsi::{self, Pdu, Session, login_request, login_text, opcode},
    nvme,
    registers::SeededRng,
};
use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

/// The attacked node.
#[derive(Clone, Debug)]
pub(super) struct AttackTarget {
    pub(super) unit: IscsiLun,
    pub(super) nvme: SocketAddr,
    /// How long the node lets a client be silent in the middle of a message.
    pub(super) timeout: Duration,
}

/// An attack: its name and its function.
pub(super) type Attack = (&'static str, fn(&AttackTarget) -> Result<String>);

/// All attacks.
pub(super) const ATTACKS: &[Attack] = &[
    ("random bytes to both ports", garbage),
    ("random bytes after a login", garbage_after_login),
    ("wrong lengths in every length field", wrong_lengths),
    ("a PDU was left unfinished", half_a_pdu),
    ("valid PDUs with flipped bits", flipped_bits),
    ("10,000 logins", many_logins),
    ("10,000 logins to a target that does not exist", many_refused_logins),
    ("connections that never log in", silent_connections),
    ("clients that never read", never_reading),
];

fn dial(to: SocketAddr) -> Option<TcpStream> {
    let stream = iscsi::connect_with_timeouts(to, probe::DEFAULT_TIMEOUT).ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(200))).ok()?;
    Some(stream)
}

fn login(front: &AttackTarget, isid: u32) -> Option<Session> {
    let lun = u8::try_from(front.unit.lun).ok()?;
    Session::login(front.unit.portal, "iqn.2026-01.test:hostile", &front.unit.target, lun, isid)
        .ok()
}

/// Sends `bytes`, reads replies for a moment, closes.
fn send_and_drain(mut stream: TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut sink = [0; 4096];
    while stream.read(&mut sink).is_ok_and(|n| n > 0) {}
}

fn random_bytes(dice: &mut SeededRng, length: usize) -> Vec<u8> {
    (0..length).map(|_| dice.next_u64().to_le_bytes()[3]).collect()
}

fn garbage(front: &AttackTarget) -> Result<String> {
    let mut dice = SeededRng::new(1);
    for round in 0..400 {
        let port = if round % 2 == 0 { front.unit.portal } else { front.nvme };
        let Some(stream) = dial(port) else { continue };
        let length = usize::try_from(dice.next_below(20_000)).unwrap_or(1);
        send_and_drain(stream, &random_bytes(&mut dice, length));
    }
    Ok("400 connections".to_owned())
}

fn garbage_after_login(front: &AttackTarget) -> Result<String> {
    let mut dice = SeededRng::new(2);
    let mut logins = 0;
    for isid in 0..100 {
        let Some(session) = login(front, isid) else { continue };
        logins += 1;
        let length = usize::try_from(dice.next_below(200_000)).unwrap_or(1);
        send_and_drain(session.into_stream(), &random_bytes(&mut dice, length));
    }
    ensure!(logins > 90, "only {logins} of 100 logins succeeded");
    Ok(format!("{logins} sessions"))
}

fn wrong_lengths(front: &AttackTarget) -> Result<String> {
    let text = login_text("iqn.2026-01.test:hostile", &front.unit.target);
    let mut sent = 0;
    for length in [0_u32, 1, 47, 0x2000, 0xffff, 0x00ff_ffff] {
        for additional in [0_u8, 1, 255] {
            let [_, high, middle, low] = length.to_be_bytes();
            let pdu = login_request(&text, 7).with_bytes_at(4, [additional, high, middle, low]);
            if let Some(stream) = dial(front.unit.portal) {
                send_and_drain(stream, &pdu.to_bytes());
                sent += 1;
            }
        }
    }
    for length in [0_u32, 7, 8, 127, 129, 0xffff, u32::MAX] {
        for header in [0_u8, 8, 72, 128, 255] {
            let mut bytes = nvme::initialize_request();
            bytes[2] = header;
            bytes[4..8].copy_from_slice(&length.to_le_bytes());
            if let Some(stream) = dial(front.nvme) {
                send_and_drain(stream, &bytes);
                sent += 1;
            }
        }
    }
    Ok(format!("{sent} connections"))
}

/// Waits until the node has closed all `streams`.
fn all_closed(streams: Vec<TcpStream>, limit: Duration) -> Result<Duration> {
    let begun = Instant::now();
    let total = streams.len();
    let mut open = streams;
    while !open.is_empty() {
        open.retain_mut(|stream| {
            let mut byte = [0; 64];
            let _ = stream.set_nonblocking(true);
            match stream.read(&mut byte) {
                Ok(n) => n > 0,
                Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
            }
        });
        ensure!(begun.elapsed() < limit, "{} of {total} still open after {limit:?}", open.len());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(begun.elapsed())
}

fn half_a_pdu(front: &AttackTarget) -> Result<String> {
    let mut held = Vec::new();
    let text = login_text("iqn.2026-01.test:hostile", &front.unit.target);
    let whole = login_request(&text, 9).to_bytes();
    for round in 0..100_usize {
        if let Some(mut stream) = dial(front.unit.portal) {
            let _ = stream.write_all(&whole[..1 + round % (whole.len() - 1)]);
            held.push(stream);
        }
        if let Some(mut stream) = dial(front.nvme) {
            let whole = nvme::initialize_request();
            let _ = stream.write_all(&whole[..1 + round % (whole.len() - 1)]);
            held.push(stream);
        }
    }
    for isid in 0..50 {
        let Some(mut session) = login(front, isid) else { continue };
        let write = session.scsi_command(&Session::cdb16(0x8a, 0, 0, 128), 65536, 0);
        let mut bytes = write.with_data(&[0x55; 8192]).to_bytes();
        bytes.truncate(if isid % 2 == 0 { 20 } else { 4000 });
        let mut stream = session.into_stream();
        let _ = stream.write_all(&bytes);
        held.push(stream);
    }
    let count = held.len();
    let took = all_closed(held, front.timeout * 3 + Duration::from_secs(3))?;
    Ok(format!("{count} connections, the last closed after {:.1} s", took.as_secs_f64()))
}

fn flipped_bits(front: &AttackTarget) -> Result<String> {
    let mut dice = SeededRng::new(3);
    let mut sent = 0;
    for isid in 0..150 {
        let Some(mut session) = login(front, isid) else { continue };
        let mut bytes = Vec::new();
        for _ in 0..20 {
            let lba = dice.next_below(4096);
            let mut pdu = match dice.next_below(4) {
                0 => session.scsi_command(&Session::cdb16(0x88, 0, lba, 8), 0, 4096),
                1 => session
                    .scsi_command(&Session::cdb16(0x8a, 0, 0x10_0000 + lba, 8), 4096, 0)
                    .with_data(&[0xaa; 4096]),
                2 => Pdu::new(opcode::NOP_OUT | 0x40, 0x80).with_data(&[1; 64]),
                _ => Pdu::new(opcode::TEXT | 0x40, 0x80).with_data(b"SendTargets=All\0"),
            };
            let bit = usize::try_from(dice.next_below(48 * 8)).unwrap_or(0);
            pdu.header[bit / 8] ^= 1 << (bit % 8);
            bytes.extend_from_slice(&pdu.to_bytes());
            sent += 1;
        }
        send_and_drain(session.into_stream(), &bytes);
    }
    Ok(format!("{sent} PDUs"))
}

fn many_logins(front: &AttackTarget) -> Result<String> {
    // A login with the identifier of a live session replaces it (RFC 7143 6.3.5): each thread has
    // its own.
    let count = |own: u32| (0..5000).filter(|n| login(front, own + n % 32).is_some()).count();
    let begun = Instant::now();
    let done = std::thread::scope(|scope| {
        let other = scope.spawn(|| count(0));
        count(32) + other.join().unwrap_or(0)
    });
    let rate = 10_000.0 / begun.elapsed().as_secs_f64();
    ensure!(done > 9_000, "only {done} of 10000 logins succeeded");
    Ok(format!("{done} succeeded, {rate:.0} per second"))
}

fn many_refused_logins(front: &AttackTarget) -> Result<String> {
    let text = login_text("iqn.2026-01.test:hostile", "iqn.2026-01.test:nowhere");
    let refused = (0..10_000_u32).filter(|isid| {
        let Some(mut stream) = dial(front.unit.portal) else { return false };
        let sent = stream.write_all(&login_request(&text, *isid).to_bytes());
        sent.is_ok() && Pdu::receive(&mut stream).is_ok_and(|answer| answer.header[36] == 2)
    });
    let refused = refused.count();
    ensure!(refused > 9_000, "only {refused} of 10000 got a proper refusal");
    Ok(format!("{refused} refused"))
}

fn silent_connections(front: &AttackTarget) -> Result<String> {
    let ports = [front.unit.portal, front.nvme];
    let held: Vec<TcpStream> = (0..600).filter_map(|round| dial(ports[round % 2])).collect();
    let count = held.len();
    let took = all_closed(held, front.timeout * 3 + Duration::from_secs(3))?;
    Ok(format!("{count} connections, the last closed after {:.1} s", took.as_secs_f64()))
}

/// Sessions that request far more than the pool holds and read none of it.
fn never_reading(front: &AttackTarget) -> Result<String> {
    let mut held = Vec::new();
    for isid in 0..16 {
        let Some(mut session) = login(front, isid) else { continue };
        let mut bytes = Vec::new();
        for _ in 0..64 {
            let read = session.scsi_command(&Session::cdb16(0x88, 0, 0, 512), 0, 262_144);
            bytes.extend_from_slice(&read.to_bytes());
        }
        let mut stream = session.into_stream();
        let _ = stream.write_all(&bytes);
        held.push(stream);
    }
    let count = held.len();
    ensure!(count > 12, "only {count} of 16 logins succeeded");
    std::thread::sleep(front.timeout * 2);
    drop(held);
    Ok(format!("{count} sessions, 256 MiB asked for"))
}
